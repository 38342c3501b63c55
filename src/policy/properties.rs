//! What holds for any bytes at all. The suite draws some at random, `fuzz/` looks for the others.

use super::client::{self, Client};
use super::path::{EscapedSlashes, PathFault, Readings, Settings};
use crate::limiter::KeyBuilder;
use http::{HeaderMap, HeaderValue};
use std::net::IpAddr;

/// The first readings of a path are what a naive reader reads, for all settings (which the first byte chooses) that
/// merge slashes; there are four at most, and they are in a spelling of their own.
pub fn path(bytes: &[u8]) {
    let Some((choice, path)) = bytes.split_first() else { return };
    // No parser of requests lets a bare NUL through.
    let Some(path) = std::str::from_utf8(path).ok().filter(|path| !path.contains('\0')) else { return };
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
    };
    let readings = match Readings::of(path, &settings) {
        Ok(readings) => readings,
        Err(PathFault::NotAbsolute) => return assert!(!path.starts_with('/')),
        Err(PathFault::Nul) => return assert!(path.contains("%00")),
        Err(PathFault::EscapedSlash) => {
            let lower = path.to_ascii_lowercase();
            return assert!(lower.contains("%2f") || lower.contains("%5c") || lower.contains('\\'));
        }
    };
    let separates: &[bool] = match settings.escaped_slashes {
        EscapedSlashes::Both => &[true, false],
        EscapedSlashes::Keep => &[false],
        EscapedSlashes::Decode | EscapedSlashes::Reject => &[true],
    };
    let mut expected: Vec<_> = separates.iter().map(|separates| naive(path, &settings, *separates)).collect();
    expected.dedup();
    let found: Vec<_> = readings.iter().map(|reading| (decoded(reading), reading.ends_with('/'))).collect();
    if path != "*" {
        assert!(found.starts_with(&expected), "{path} with {settings:?}: {found:?} instead of {expected:?}");
        assert!(found.len() <= 4, "{path}: {found:?}");
    }
    for reading in readings.iter() {
        assert!(reading.bytes().all(|byte| byte.is_ascii_graphic()), "{reading}");
        let again = Readings::of(reading, &Settings { escaped_slashes: EscapedSlashes::Keep, ..settings });
        assert!(
            again.is_ok_and(|again| again.iter().any(|same| same == reading)),
            "{reading} with {settings:?}"
        );
    }
}

/// The segments of a path as bytes, and whether its reading ends with a slash: character by character.
fn naive(path: &str, settings: &Settings, separates: bool) -> (Vec<Vec<u8>>, bool) {
    let mut segments: Vec<Vec<u8>> = vec![Vec::new()];
    let (mut in_parameter, mut rest) = (false, path.as_bytes().get(1..).unwrap_or_default());
    while let [first, tail @ ..] = rest {
        let escaped = rest.get(1..3).filter(|_| *first == b'%').and_then(|digits| {
            let digits = std::str::from_utf8(digits).ok().filter(|digits| !digits.starts_with('+'))?;
            u8::from_str_radix(digits, 16).ok()
        });
        rest = if escaped.is_some() { tail.get(2..).unwrap_or_default() } else { tail };
        let (byte, is_escaped) = (escaped.unwrap_or(*first), escaped.is_some());
        let ends = byte == b'/' && !is_escaped || separates && matches!(byte, b'/' | b'\\');
        if ends {
            segments.push(Vec::new());
            in_parameter = false;
        } else if byte == b';' && !is_escaped && settings.strip_parameters {
            in_parameter = true;
        } else if let (false, Some(segment)) = (in_parameter, segments.last_mut()) {
            segment.push(if settings.case_sensitive { byte } else { byte.to_ascii_lowercase() });
        }
    }
    let open = segments.last().is_some_and(|last| matches!(last.as_slice(), b"" | b"." | b".."));
    let mut kept: Vec<Vec<u8>> = Vec::new();
    for segment in segments {
        match segment.as_slice() {
            b"." => {}
            b".." => drop(kept.pop()),
            b"" => {}
            _ => kept.push(segment),
        }
    }
    let ends_with_slash = kept.is_empty() || open && !settings.ignore_trailing_slash;
    (kept, ends_with_slash)
}

/// The segments of a reading as bytes.
fn decoded(reading: &str) -> Vec<Vec<u8>> {
    let inner = reading.strip_prefix('/').unwrap_or(reading);
    let mut segments: Vec<Vec<u8>> =
        inner.split('/').map(|segment| percent_encoding::percent_decode_str(segment).collect()).collect();
    if segments.last().is_some_and(Vec::is_empty) {
        segments.pop();
    }
    segments
}

/// Nobody can talk a trusted proxy's word away: what it appends to any header names the client; an untrusted peer
/// is itself.
pub fn client(bytes: &[u8]) {
    let Some((choice, rest)) = bytes.split_first() else { return };
    let forwarded = choice & 1 == 1;
    let settings = client::Settings {
        trusted_proxies: ["10.0.0.0/8", "fd00::/8"].iter().filter_map(|net| net.parse().ok()).collect(),
        ip_header: if forwarded {
            http::header::FORWARDED
        } else {
            http::HeaderName::from_static("x-forwarded-for")
        },
        ipv4_prefix: 32,
        ipv6_prefix: 64,
    };
    let mut headers = HeaderMap::new();
    for line in rest.split(|byte| *byte == b'\n') {
        if let Ok(line) = HeaderValue::from_bytes(line) {
            headers.append(&settings.ip_header, line);
        }
    }
    let (proxy, stranger) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([203, 0, 113, 7]));
    assert_eq!(Client::identify(stranger, &headers, &settings).ip, stranger);
    let word = if forwarded { "for=203.0.113.7" } else { "203.0.113.7" };
    let mut by_line = headers.clone();
    by_line.append(
        &settings.ip_header,
        HeaderValue::from_static(if forwarded { "for=203.0.113.7" } else { "203.0.113.7" }),
    );
    assert_eq!(Client::identify(proxy, &by_line, &settings).ip, stranger, "{headers:?}");
    if let Some(last) = headers.get_all(&settings.ip_header).iter().next_back()
        && let Ok(joined) = HeaderValue::from_bytes(&[last.as_bytes(), b", ", word.as_bytes()].concat())
    {
        let mut in_line = HeaderMap::new();
        in_line.append(&settings.ip_header, joined);
        assert_eq!(Client::identify(proxy, &in_line, &settings).ip, stranger, "{in_line:?}");
    }
}

/// Two lists of key values have the same key exactly if they are the same; and one readable form has no bytes
/// that could harm.
pub fn key(bytes: &[u8]) {
    let mut lists = bytes.splitn(2, |byte| *byte == 0xff).map(|list| {
        let mut values = list.split(|byte| *byte == 0xfe);
        let policy = String::from_utf8_lossy(values.next().unwrap_or_default()).into_owned();
        (policy, values.collect::<Vec<_>>())
    });
    let first = lists.next().unwrap_or_default();
    let second = lists.next().unwrap_or_default();
    let built = |(policy, values): &(String, Vec<&[u8]>)| {
        let mut builder = KeyBuilder::new(policy);
        values.iter().for_each(|value| builder.part(Some(value)));
        builder.finish()
    };
    let (one, other) = (built(&first), built(&second));
    assert_eq!(one == other, first == second);
    assert_eq!(one.id() == other.id(), first == second);
    assert_ne!(one.shard(0), one);
    assert_ne!(one.shard(0), one.shard(1));
    assert!(one.readable().bytes().all(|byte| byte.is_ascii_graphic()), "{}", one.readable());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_path(choice in any::<u8>(), path in "/([a-bA%.;/\\\\0-9fFcC\u{e9} -]|%2[fFeE]|%5[cC]|\\.\\.|//){0,20}") {
            super::path(&[&[choice], path.as_bytes()].concat());
        }

        #[test]
        fn any_client(choice in any::<u8>(), lines in r#"([a-f0-9:.,;=" \[\]\n]|for=|10\.0\.0\.[0-9]|1\.1\.1\.1){0,20}"#) {
            super::client(&[&[choice], lines.as_bytes()].concat());
        }

        #[test]
        fn any_key(bytes in prop::collection::vec(prop::sample::select(vec![0_u8, 1, 2, 3, b'a', b'/', 0xfe, 0xff]), 0..20)) {
            super::key(&bytes);
            // Equal lists too.
            super::key(&[&bytes[..], &[0xff], &bytes].concat());
        }
    }
}
