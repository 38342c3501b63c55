//! Properties that hold for any input. The tests draw random bytes; the targets in `fuzz/` search
//! for counterexamples.

mod bodies;

use super::authorization::is_lenient_space;
use super::client::{self, ClientAddress};
use super::jwt::{self, ClaimName, RequestToken, TokenIssuer, TokenReader, VerificationKeys};
use super::path::{EscapedDelimiters, EscapedSlashes, PathError, PathInterpretations, Settings};
use super::{
    Facts, KeyComponent, KeyContext, KeyTemplate, Matcher, MissingKeyAction, ValueDigests,
    ValueHasher, path,
};
use crate::limiter::{Key, KeyBuilder};
use http::{HeaderMap, HeaderValue, Method};
use std::net::IpAddr;
use std::sync::{Arc, LazyLock};

pub use bodies::assert_body_readings;

/// The path interpretations equal those of naive readers of all kinds, the most common one first.
/// Each interpretation is in canonical spelling. The first byte chooses the settings, which always
/// merge slashes.
#[allow(
    clippy::too_many_lines,
    reason = "naive readers and their settings, written out"
)]
pub fn assert_path_interpretations(bytes: &[u8]) {
    let Some((choice, path)) = bytes.split_first() else {
        return;
    };
    // HTTP parsers reject a NUL byte.
    let Some(path) = std::str::from_utf8(path)
        .ok()
        .filter(|path| !path.contains('\0'))
    else {
        return;
    };
    let flag = |bit: u8| choice >> bit & 1 == 1;
    let settings = Settings {
        normalize: true,
        merge_slashes: true,
        escaped_slashes: match choice >> 5 & 3 {
            0 => EscapedSlashes::Both,
            1 => EscapedSlashes::Reject,
            2 => EscapedSlashes::Keep,
            _ => EscapedSlashes::Decode,
        },
        ignore_trailing_slash: flag(0),
        strip_parameters: flag(1),
        case_sensitive: flag(2),
        reads_authority: flag(3),
        escaped_delimiters: if flag(4) {
            EscapedDelimiters::Both
        } else {
            EscapedDelimiters::Keep
        },
        rejects_control_characters: flag(7),
        rejects_invalid_utf8: flag(7),
        max_readings_size: 1 << 20,
        ..Settings::DEFAULT
    };
    let decoded: Vec<u8> = percent_encoding::percent_decode_str(path).collect();
    let readings = match PathInterpretations::parse(path, &settings) {
        Ok(readings) => readings,
        Err(PathError::NotAbsolute) => return assert!(!path.starts_with('/')),
        Err(PathError::Nul) => return assert!(decoded.contains(&0)),
        Err(PathError::ControlCharacter) => {
            let is_control = |byte: &u8| byte.is_ascii_control();
            return assert!(settings.rejects_control_characters && decoded.iter().any(is_control));
        }
        Err(PathError::InvalidUtf8) => {
            let is_invalid = std::str::from_utf8(&decoded).is_err();
            return assert!(settings.rejects_invalid_utf8 && is_invalid);
        }
        Err(PathError::CompletedEscape) => return assert!(path.matches('%').count() > 1),
        Err(PathError::EscapedSlash) => {
            let lower = path.to_ascii_lowercase();
            return assert!(lower.contains("%2f") || lower.contains("%5c") || lower.contains('\\'));
        }
        Err(PathError::EscapedDelimiter) => unreachable!("no setting rejects delimiters"),
        Err(PathError::TooManyReadings) => return assert!(path.len() > 1000),
    };
    let separator_choices: &[bool] = match settings.escaped_slashes {
        EscapedSlashes::Both => &[true, false],
        EscapedSlashes::Keep => &[false],
        EscapedSlashes::Decode | EscapedSlashes::Reject => &[true],
    };
    let strip_choices: &[bool] = if settings.strip_parameters {
        &[true, false]
    } else {
        &[false]
    };
    let mut expected = Vec::new();
    for part in split_path_naively(path, &settings) {
        for (dots, strip_parameters) in
            (0..3).flat_map(|dots| strip_choices.iter().map(move |strips| (dots, *strips)))
        {
            let choices = || separator_choices.iter().copied();
            for (slash, backslash, escaped_backslash) in choices()
                .flat_map(|one| choices().map(move |two| (one, two)))
                .flat_map(|(one, two)| choices().map(move |three| (one, two, three)))
            {
                let reader = NaivePathReader {
                    escaped_slash_separates: slash,
                    backslash_separates: backslash,
                    escaped_backslash_separates: escaped_backslash,
                    strips_parameters: strip_parameters,
                    dot_resolution: dots,
                };
                let reading = read_path_naively(part, &settings, reader);
                if !expected.contains(&reading) {
                    expected.push(reading);
                }
            }
        }
    }
    let found: Vec<_> = readings
        .iter()
        .map(|reading| (decode_segments(reading), reading.ends_with('/')))
        .collect();
    if path != "*" {
        let is_same_set =
            found.len() == expected.len() && found.iter().all(|reading| expected.contains(reading));
        assert!(
            is_same_set,
            "{path} with {settings:?}: {found:?} instead of {expected:?}"
        );
        assert_eq!(found.first(), expected.first(), "{path} with {settings:?}");
    }
    for reading in readings.iter() {
        assert!(
            reading.bytes().all(|byte| byte.is_ascii_graphic()),
            "{reading}"
        );
        let again = PathInterpretations::parse(
            reading,
            &Settings {
                escaped_slashes: EscapedSlashes::Keep,
                ..settings
            },
        );
        assert!(
            again.is_ok_and(|again| again.iter().any(|same| same == reading)),
            "{reading} with {settings:?}"
        );
    }
}

/// One way in which an upstream server may read paths.
struct NaivePathReader {
    escaped_slash_separates: bool,
    backslash_separates: bool,
    escaped_backslash_separates: bool,
    strips_parameters: bool,
    /// When `.` and `..` segments are resolved: 0 after parameters and empty segments are removed,
    /// 1 before that, 2 never.
    dot_resolution: u8,
}

/// The parts of a path that an upstream may take for the path, the whole path first: what follows
/// a `//host`, and of both what precedes the first `%3F`, `%23`, semicolon or raw space of Latin-1.
fn split_path_naively<'p>(path: &'p str, settings: &Settings) -> Vec<&'p str> {
    let after = |text: &'p str, at: Option<usize>| at.map_or("", |at| text.split_at(at).1);
    let mut parts = vec![path];
    if settings.reads_authority {
        let separators: &[char] = match settings.escaped_slashes {
            EscapedSlashes::Keep => &['/'],
            _ => &['/', '\\'],
        };
        let host = path.trim_start_matches(separators);
        if path.len() - host.len() >= 2 {
            parts.push(after(host, host.find(separators)));
        }
        if let Some(host) = path.strip_prefix("//") {
            parts.push(after(host, host.find('/')));
        }
    }
    let mut ends = Vec::new();
    if settings.escaped_delimiters == EscapedDelimiters::Both {
        ends.extend(["%3f", "%23"]);
    }
    if settings.strip_parameters {
        ends.push(";");
    }
    for part in parts.clone() {
        let lower = part.to_ascii_lowercase();
        let has_latin1_space = |c: char| {
            String::from(c)
                .bytes()
                .any(|byte| matches!(byte, 0x85 | 0xa0))
        };
        let cuts = ends.iter().filter_map(|end| lower.find(end));
        let cuts = cuts.chain(part.find(has_latin1_space));
        parts.extend(cuts.map(|at| part.split_at(at).0));
    }
    parts
}

/// Reads a path byte by byte. Returns its segments, and whether it ends with a slash.
fn read_path_naively(
    path: &str,
    settings: &Settings,
    reader: NaivePathReader,
) -> (Vec<Vec<u8>>, bool) {
    // Each segment without and with its parameters.
    let mut segments: Vec<[Vec<u8>; 2]> = vec![Default::default()];
    let (mut in_parameter, mut rest) = (false, path.as_bytes().get(1..).unwrap_or_default());
    while let [first, tail @ ..] = rest {
        let escaped = rest
            .get(1..3)
            .filter(|_| *first == b'%')
            .and_then(|digits| {
                let digits = std::str::from_utf8(digits)
                    .ok()
                    .filter(|digits| !digits.starts_with('+'))?;
                u8::from_str_radix(digits, 16).ok()
            });
        rest = if escaped.is_some() {
            tail.get(2..).unwrap_or_default()
        } else {
            tail
        };
        let (byte, is_escaped) = (escaped.unwrap_or(*first), escaped.is_some());
        let ends_segment = match byte {
            b'/' => !is_escaped || reader.escaped_slash_separates,
            b'\\' if is_escaped => reader.escaped_backslash_separates,
            b'\\' => reader.backslash_separates,
            _ => false,
        };
        if ends_segment {
            segments.push(Default::default());
            in_parameter = false;
            continue;
        }
        in_parameter |= byte == b';' && !is_escaped;
        let byte = if settings.case_sensitive {
            byte
        } else {
            byte.to_ascii_lowercase()
        };
        if let Some([bare, whole]) = segments.last_mut() {
            whole.push(byte);
            if !in_parameter {
                bare.push(byte);
            }
        }
    }
    let (mut ends_open, mut kept) = (false, Vec::<Vec<u8>>::new());
    for [bare, whole] in segments {
        let dot_candidate = if reader.dot_resolution == 1 {
            whole.clone()
        } else if reader.strips_parameters {
            bare.clone()
        } else {
            whole.clone()
        };
        let name = if reader.strips_parameters {
            bare
        } else {
            whole
        };
        let is_dots = reader.dot_resolution < 2 && matches!(dot_candidate.as_slice(), b"." | b"..");
        ends_open = is_dots || name.is_empty();
        match name.as_slice() {
            b".." if is_dots => drop(kept.pop()),
            b"." if is_dots => {}
            b"" if reader.dot_resolution != 1 => {}
            _ => kept.push(name),
        }
    }
    kept.retain(|name| !name.is_empty());
    let ends_with_slash = kept.is_empty() || ends_open && !settings.ignore_trailing_slash;
    (kept, ends_with_slash)
}

/// The segments of an interpretation as bytes.
fn decode_segments(reading: &str) -> Vec<Vec<u8>> {
    let inner = reading.strip_prefix('/').unwrap_or(reading);
    let mut segments: Vec<Vec<u8>> = inner
        .split('/')
        .map(|segment| percent_encoding::percent_decode_str(segment).collect())
        .collect();
    if segments.last().is_some_and(Vec::is_empty) {
        segments.pop();
    }
    segments
}

/// No header content can override the element that a trusted proxy appends: that element is the
/// client. An untrusted peer is always the client itself.
pub fn assert_client_cannot_be_forged(bytes: &[u8]) {
    let Some((choice, rest)) = bytes.split_first() else {
        return;
    };
    let forwarded = choice & 1 == 1;
    let settings = trusting_settings(forwarded);
    let mut headers = HeaderMap::new();
    for line in rest.split(|byte| *byte == b'\n') {
        if let Ok(line) = HeaderValue::from_bytes(line) {
            headers.append(&settings.ip_header, line);
        }
    }
    let (proxy, untrusted) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([203, 0, 113, 7]));
    assert_eq!(
        ClientAddress::identify(untrusted, &headers, &settings).ip,
        untrusted
    );
    let proxy_element = if forwarded {
        "for=203.0.113.7"
    } else {
        "203.0.113.7"
    };
    let mut by_line = headers.clone();
    by_line.append(
        &settings.ip_header,
        HeaderValue::from_static(if forwarded {
            "for=203.0.113.7"
        } else {
            "203.0.113.7"
        }),
    );
    assert_eq!(
        ClientAddress::identify(proxy, &by_line, &settings).ip,
        untrusted,
        "{headers:?}"
    );
    if let Some(last) = headers.get_all(&settings.ip_header).iter().next_back()
        && let Ok(joined) =
            HeaderValue::from_bytes(&[last.as_bytes(), b", ", proxy_element.as_bytes()].concat())
    {
        let mut in_line = HeaderMap::new();
        in_line.append(&settings.ip_header, joined);
        assert_eq!(
            ClientAddress::identify(proxy, &in_line, &settings).ip,
            untrusted,
            "{in_line:?}"
        );
    }
}

/// The first untrusted address from the right is the client, in every form of address. Elements to
/// the left of an unreadable one are ignored. The first byte chooses the header, and each further
/// pair an address and its form.
pub fn assert_proxy_chain(bytes: &[u8]) {
    let Some((choice, elements)) = bytes.split_first() else {
        return;
    };
    let is_forwarded = choice & 1 == 1;
    let settings = trusting_settings(is_forwarded);
    let (mut hops, mut lines) = (Vec::new(), vec![Vec::<String>::new()]);
    for pair in elements.chunks_exact(2).take(60) {
        let [hop_id, form] = *pair else { return };
        let (hop, text) = if is_forwarded {
            make_forwarded_element(hop_id, form)
        } else {
            make_x_forwarded_for_element(hop_id, form)
        };
        hops.push(hop);
        if form >= 0xe0 {
            lines.push(Vec::new());
        }
        if let Some(line) = lines.last_mut() {
            line.push(text);
        }
    }
    let mut headers = HeaderMap::new();
    for line in lines {
        let comma = if choice & 2 == 0 { "," } else { " ,\t" };
        headers.append(
            &settings.ip_header,
            HeaderValue::try_from(line.join(comma)).expect("the elements are printable ASCII"),
        );
    }
    let proxy = IpAddr::from([10, 0, 0, 1]);
    let mut expected = proxy;
    for hop in hops.into_iter().rev() {
        let Some(ip) = hop else { break };
        expected = ip;
        if !is_trusted(ip) {
            break;
        }
    }
    assert_eq!(
        ClientAddress::identify(proxy, &headers, &settings).ip,
        expected,
        "{headers:?}"
    );
}

/// Makes the address of a hop. Half of the addresses are trusted proxies.
fn make_hop_address(hop_id: u8) -> IpAddr {
    match hop_id % 4 {
        0 => IpAddr::from([10, 0, 0, hop_id]),
        1 => IpAddr::from([203, 0, 113, hop_id]),
        2 => IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(hop_id)]),
        _ => IpAddr::from([0x2001, 0xdb8, 0, u16::from(hop_id), 0, 0, 0, 1]),
    }
}

fn is_trusted(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.octets()[0] == 10,
        IpAddr::V6(ip) => ip.octets()[0] == 0xfd,
    }
}

/// Generates an element of `X-Forwarded-For`. Returns the address that the proxy must read from it,
/// and the text of the element.
fn make_x_forwarded_for_element(hop_id: u8, form: u8) -> (Option<IpAddr>, String) {
    let ip = make_hop_address(hop_id);
    let text = match (ip, form % 8) {
        (_, 6) => {
            return (
                None,
                pick_text(
                    ["unknown", "_x", "1.1.1", "0x1.1.1.1", "a:b", "[::1"],
                    hop_id,
                ),
            );
        }
        (_, 0) => ip.to_string(),
        (_, 1) => format!("\"{ip}\""),
        (IpAddr::V4(_), 2 | 3) => format!("{ip}:{}", u16::from(form) * 7),
        (IpAddr::V4(ip), 4) => format!("::ffff:{ip}"),
        (IpAddr::V4(_), _) => format!("\"{ip}:80\""),
        (IpAddr::V6(_), 2) => format!("[{ip}]"),
        (IpAddr::V6(_), 3) => format!("[{ip}]:{}", u16::from(form) * 7),
        (IpAddr::V6(_), 4) => format!("{ip}%eth{}", hop_id % 3),
        (IpAddr::V6(ip), _) => ip.segments().map(|group| format!("{group:04X}")).join(":"),
    };
    (Some(ip), text)
}

/// Generates an element of `Forwarded`. Returns the address that the proxy must read from it, and
/// the text of the element.
fn make_forwarded_element(hop_id: u8, form: u8) -> (Option<IpAddr>, String) {
    let ip = make_hop_address(hop_id);
    let node = match ip {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    };
    let (ip, text) = match form % 8 {
        0 => (Some(ip), format!("for=\"{node}\"")),
        1 => (Some(ip), format!("FOR=\"{node}:47\"")),
        2 => (Some(ip), format!("for=\"{node}:_hidden\"")),
        3 => (Some(ip), format!("by=_x;For={node};proto=http")),
        4 => (Some(ip), format!("host=\"a,b;for=1.1.1.1\";for=\"{node}\"")),
        5 => (Some(ip), format!("for=\"\\{node}\" ; proto=\"\\\"\"")),
        6 => (
            None,
            pick_text(
                ["for=unknown", "for=_x", "proto=http", "for=\"1.1.1.1"],
                hop_id,
            ),
        ),
        _ => (None, format!("for={node};for={node}")),
    };
    (ip, text)
}

fn pick_text<const N: usize>(texts: [&str; N], which: u8) -> String {
    texts
        .get(usize::from(which) % N)
        .copied()
        .unwrap_or_default()
        .to_owned()
}

fn trusting_settings(is_forwarded: bool) -> client::Settings {
    client::Settings {
        trusted_proxies: ["10.0.0.0/8", "fd00::/8"]
            .iter()
            .filter_map(|net| net.parse().ok())
            .collect(),
        ip_header: if is_forwarded {
            http::header::FORWARDED
        } else {
            http::HeaderName::from_static("x-forwarded-for")
        },
        ipv4_prefix: 32,
        ipv6_prefix: 64,
        nat64_prefixes: Vec::new(),
        value_checks: crate::policy::ValueChecks::ALL,
    }
}

const SECRET: &[u8] = b"a secret that is long enough to be one";
/// A token with `sub` "ann", signed with the secret.
const TOKEN: &str = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCIsImtpZCI6ImsifQ.eyJzdWIiOiJhbm4ifQ.HQcv7f_ozKzJpX-u3I6JkTL8ETaId3-o_rR0cRbD7oQ";

/// Only the signed token is accepted: no edit of it and no other token. The first byte chooses
/// whether the remaining bytes are edits or a token.
pub fn assert_token_verification(bytes: &[u8]) {
    static READERS: LazyLock<[Arc<TokenReader>; 2]> = LazyLock::new(|| {
        let key = r#"{"kty":"oct","kid":"k","alg":"HS256","k":"YSBzZWNyZXQgdGhhdCBpcyBsb25nIGVub3VnaCB0byBiZSBvbmU"}"#;
        let (set, _) = VerificationKeys::from_jwks(&format!("{{\"keys\":[{key}]}}"), false)
            .expect("the key set is valid");
        [VerificationKeys::from_secret(SECRET).0, set].map(|keys| {
            let issuers = vec![TokenIssuer {
                name: None,
                audiences: Vec::new(),
                keys: keys.into(),
            }];
            let settings = jwt::Settings {
                header: http::header::AUTHORIZATION,
                issuers: Some(issuers),
            };
            Arc::new(TokenReader::new(
                settings,
                std::iter::once(ClaimName::parse("sub").expect("\"sub\" is a claim name"))
                    .collect(),
            ))
        })
    });
    let Some((choice, rest)) = bytes.split_first() else {
        return;
    };
    let mut token = TOKEN.as_bytes().to_vec();
    match choice % 2 {
        0 => {
            for edit in rest.chunks_exact(3) {
                let [at, kind, byte] = *edit else { return };
                let at = usize::from(at) % (token.len() + 1);
                match (kind % 3, token.get_mut(at)) {
                    (0, Some(place)) => *place = byte,
                    (1, Some(_)) => drop(token.remove(at)),
                    _ => token.insert(at, byte),
                }
            }
        }
        _ => token = rest.to_vec(),
    }
    let Ok(value) = HeaderValue::from_bytes(&[b"Bearer ", &token[..]].concat()) else {
        return;
    };
    // Space of lenient apps (0x85, 0xa0) around the token counts as space.
    let mut words = token
        .split(is_lenient_space)
        .filter(|word| !word.is_empty());
    let is_signed = words.next() == Some(TOKEN.as_bytes()) && words.next().is_none();
    let mut headers = HeaderMap::new();
    headers.insert(http::header::AUTHORIZATION, value);
    for reader in READERS.iter() {
        let read = RequestToken::new(Some(reader), 1_800_000_000);
        let sub = read.claim(
            &headers,
            &ClaimName::parse("sub").expect("\"sub\" is a claim name"),
        );
        let expected: &[Box<str>] = if is_signed { &["ann".into()] } else { &[] };
        assert_eq!(sub.unwrap_or_default(), expected, "{headers:?}");
    }
}

/// Two lists of key values have equal keys exactly if the lists are equal. The readable form
/// contains no harmful bytes.
pub fn assert_key_encoding(bytes: &[u8]) {
    let mut lists = bytes.splitn(2, |byte| *byte == 0xff).map(|list| {
        let mut values = list.split(|byte| *byte == 0xfe);
        let policy = String::from_utf8_lossy(values.next().unwrap_or_default()).into_owned();
        (policy, values.collect::<Vec<_>>())
    });
    let first = lists.next().unwrap_or_default();
    let second = lists.next().unwrap_or_default();
    let build_key = |(policy, values): &(String, Vec<&[u8]>)| {
        let mut builder = KeyBuilder::new(policy);
        values
            .iter()
            .for_each(|value| builder.push_key_value(Some(value)));
        builder.finish()
    };
    let (one, other) = (build_key(&first), build_key(&second));
    assert_eq!(one == other, first == second);
    assert_eq!(one.id() == other.id(), first == second);
    assert_ne!(one.shard_key(0), one);
    assert_ne!(one.shard_key(0), one.shard_key(1));
    assert!(
        one.to_readable_string()
            .bytes()
            .all(|byte| byte.is_ascii_graphic()),
        "{}",
        one.to_readable_string()
    );
}

/// Two hashed values of a header have equal keys exactly if they are equal, however the header's
/// name is spelled in the configuration and in the requests. No key contains the value. The first
/// byte chooses the spellings.
pub fn assert_hashed_keys(bytes: &[u8]) {
    const NAME: &str = "x-api-key";
    static HASHERS: LazyLock<[ValueHasher; 2]> = LazyLock::new(|| {
        let secret = ValueHasher::from_secret(SECRET).expect("the secret is long enough");
        [ValueHasher::default(), secret]
    });
    let Some((spelling, rest)) = bytes.split_first() else {
        return;
    };
    let spell = |bits: u8| -> String {
        let letters = NAME.chars().enumerate();
        let spell_letter = |(index, letter): (usize, char)| match bits >> (index % 8) & 1 {
            1 => letter.to_ascii_uppercase(),
            _ => letter,
        };
        letters.map(spell_letter).collect()
    };
    let mut values = rest.splitn(2, |byte| *byte == 0xff);
    let (one, other) = (
        values.next().unwrap_or_default(),
        values.next().unwrap_or_default(),
    );
    let build_key = |hasher: &ValueHasher, bits: u8, value: &[u8]| -> Option<Key> {
        let text = format!("header:{}", spell(bits));
        let component = KeyComponent::parse(&text, &path::Settings::DEFAULT).ok()?;
        assert!(component.is_hashed, "{text}");
        let key = KeyTemplate::from_components(vec![component], hasher.clone());
        let mut headers = HeaderMap::new();
        let name: http::HeaderName = spell(!bits).parse().ok()?;
        headers.insert(name, HeaderValue::from_bytes(value).ok()?);
        let paths = PathInterpretations::default();
        let facts = Facts {
            method: &Method::GET,
            host: "a.example",
            paths: &paths,
            query: None,
            headers: &headers,
            client_ip: [10, 1, 2, 3].into(),
            token: RequestToken::without_token_reader(),
            client_cert: None,
            has_joined_headers: false,
            is_peer_trusted: false,
            body: None,
            unreadable_holds: true,
            descriptor: None,
        };
        let client = trusting_settings(false);
        let context = KeyContext {
            client: &client,
            path: &path::Settings::DEFAULT,
            matcher: &Matcher::default(),
        };
        let missing = MissingKeyAction::Shared;
        let values = key.extract_values(&facts, &context, missing).ok()?;
        Some(key.build_key("p", &values, &mut ValueDigests::default()))
    };
    for hasher in HASHERS.iter() {
        let keys = (
            build_key(hasher, *spelling, one),
            build_key(hasher, !*spelling, other),
        );
        let (Some(first), Some(second)) = keys else {
            return;
        };
        assert_eq!(first == second, one == other);
        assert_eq!(first.id() == second.id(), one == other);
        let encoded = first.encoded_values();
        let holds_value = encoded.windows(one.len().max(1)).any(|part| part == one);
        // A short value may occur in a digest by chance.
        assert!(one.len() < 8 || !holds_value, "{encoded:?}");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn path_interpretations_hold_for_any_path(choice in any::<u8>(), path in "/([a-bA%.;/\\\\0-9fFcC\u{e9}\u{e0}\u{a0} -]|%2[fFeE]|%5[cC]|%3[fF]|%2[35]|%0[aA]|%C3%A9|\\.\\.|//){0,20}") {
            super::assert_path_interpretations(&[&[choice], path.as_bytes()].concat());
        }

        #[test]
        fn client_identity_holds_for_any_header(choice in any::<u8>(), lines in r#"([a-f0-9:.,;=" \[\]\n]|for=|10\.0\.0\.[0-9]|1\.1\.1\.1){0,20}"#) {
            super::assert_client_cannot_be_forged(&[&[choice], lines.as_bytes()].concat());
        }

        #[test]
        fn proxy_chain_holds_for_any_elements(bytes in prop::collection::vec(any::<u8>(), 0..30)) {
            super::assert_proxy_chain(&bytes);
        }

        #[test]
        fn token_verification_holds_for_any_token(edits in prop::collection::vec((any::<u8>(), any::<u8>(), b'+'..b'z'), 0..3), junk in "[a-zA-Z0-9_.=-]{0,40}") {
            let edits: Vec<u8> = edits.into_iter().flat_map(|(at, kind, byte)| [at, kind, byte]).collect();
            super::assert_token_verification(&[&[0], &edits[..]].concat());
            super::assert_token_verification(&[&[1], junk.as_bytes()].concat());
        }

        #[test]
        fn hashed_keys_hold_for_any_values(spelling in any::<u8>(), one in "[ -~\u{80}-\u{ff}]{0,90}", other in "[ -~]{0,3}") {
            for bytes in [[one.as_bytes(), &[0xff], other.as_bytes()].concat(), [one.as_bytes(), &[0xff], one.as_bytes()].concat()] {
                super::assert_hashed_keys(&[&[spelling], &bytes[..]].concat());
            }
        }

        #[test]
        fn key_encoding_holds_for_any_values(bytes in prop::collection::vec(prop::sample::select(vec![0_u8, 1, 2, 3, b'a', b'/', 0xfe, 0xff]), 0..20)) {
            super::assert_key_encoding(&bytes);
            // The property also holds for equal lists.
            super::assert_key_encoding(&[&bytes[..], &[0xff], &bytes].concat());
        }
    }
}
