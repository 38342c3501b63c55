//! Values and patterns that operators write, such as `acme-*`, in the form that the keys of
//! requests have.

use super::authorization::read_credentials;
use super::client::format_client_network;
use super::host_pattern::canonicalize_host;
use super::key_part::KeyPart;
use super::value_checks::is_white_space;
use super::{client, path};
use http::HeaderName;
use http::header::{AUTHORIZATION, HOST};
use memchr::memmem;
use std::cmp::Reverse;
use std::net::IpAddr;

/// What an override accepts at one position of a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ValuePattern {
    /// `*`: any value, also an absent one.
    Any,
    /// One value; empty if absent.
    Exact(Box<str>),
    /// The texts around the wildcards, at least two. Each wildcard matches any bytes, also none.
    Glob(Box<[Box<str>]>),
}

/// Order of precedence: exact values, then patterns by their literal text, longest first, then any
/// value.
pub(super) type PatternRank = (u8, Reverse<usize>);

/// Splits a text at its wildcards. `\*` is a literal star and `\\` a backslash. One piece: the text
/// has no wildcard.
pub(super) fn split_at_wildcards(text: &str) -> Vec<String> {
    let mut pieces = vec![String::new()];
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        let escaped = match letter {
            '\\' => letters.next_if(|next| matches!(next, '*' | '\\')),
            _ => None,
        };
        if letter == '*' {
            pieces.push(String::new());
        } else if let Some(piece) = pieces.last_mut() {
            piece.push(escaped.unwrap_or(letter));
        }
    }
    pieces
}

impl ValuePattern {
    /// The pattern with these literal texts around its wildcards.
    pub(super) fn from_pieces(pieces: Vec<String>) -> Self {
        let last = pieces.len().saturating_sub(1);
        let is_needed = |at: usize, piece: &str| at == 0 || at == last || !piece.is_empty();
        // Adjacent wildcards are one.
        let pieces = pieces.into_iter().enumerate();
        let pieces = pieces.filter(|(at, piece)| is_needed(*at, piece));
        Self::Glob(pieces.map(|(_, piece)| piece.into()).collect())
    }

    /// A value, or a pattern with `*` for any text.
    pub fn from_text(text: &str) -> Self {
        let pieces = split_at_wildcards(text);
        match pieces.as_slice() {
            [one] => Self::Exact(one.as_str().into()),
            _ if text == "*" => Self::Any,
            _ => Self::from_pieces(pieces),
        }
    }

    /// Whether a value matches. Linear in its length: each literal text is searched once, after the
    /// one before.
    pub fn matches(&self, value: Option<&[u8]>) -> bool {
        match (self, value) {
            (Self::Any, _) => true,
            (Self::Exact(text), value) => text.as_bytes() == value.unwrap_or_default(),
            (Self::Glob(_), None | Some([])) => false,
            (Self::Glob(pieces), Some(value)) => matches_pieces(pieces, value),
        }
    }

    pub(super) fn rank(&self) -> PatternRank {
        match self {
            Self::Exact(_) => (0, Reverse(0)),
            Self::Glob(pieces) => (1, Reverse(pieces.iter().map(|piece| piece.len()).sum())),
            Self::Any => (2, Reverse(0)),
        }
    }

    /// The value, if only one matches.
    pub fn as_exact(&self) -> Option<&str> {
        match self {
            Self::Exact(text) => Some(text),
            Self::Any | Self::Glob(_) => None,
        }
    }

    /// The text that a matching value begins with; empty if it may begin with any.
    pub fn literal_start(&self) -> &str {
        match self {
            Self::Any => "",
            Self::Exact(text) => text,
            Self::Glob(pieces) => pieces.first().map_or("", |piece| piece),
        }
    }

    /// The pattern as the configuration writes it.
    pub fn to_text(&self) -> String {
        let escape = |text: &str| text.replace('\\', "\\\\").replace('*', "\\*");
        match self {
            Self::Any => "*".to_owned(),
            Self::Exact(text) => escape(text),
            Self::Glob(pieces) => {
                let pieces: Vec<String> = pieces.iter().map(|piece| escape(piece)).collect();
                pieces.join("*")
            }
        }
    }
}

fn matches_pieces(pieces: &[Box<str>], value: &[u8]) -> bool {
    let [first, middle @ .., last] = pieces else {
        return false;
    };
    let rest = value.strip_prefix(first.as_bytes());
    let Some(mut rest) = rest.and_then(|rest| rest.strip_suffix(last.as_bytes())) else {
        return false;
    };
    for piece in middle {
        let Some(at) = memmem::find(rest, piece.as_bytes()) else {
            return false;
        };
        rest = rest.get(at + piece.len()..).unwrap_or_default();
    }
    true
}

/// Converts a literal text of a pattern to the form that requests have.
pub(super) fn canonicalize_piece(
    part: &KeyPart,
    piece: &str,
    path: &path::Settings,
) -> Result<String, String> {
    let unsupported = |expected: &str| {
        Err(format!(
            "patterns are not supported for the {part}; expected {expected}"
        ))
    };
    match part {
        KeyPart::ClientIp => {
            unsupported("one address (for networks, use a policy with match.client_ips)")
        }
        KeyPart::WholePath => unsupported("one exact path (for patterns, use match.path)"),
        KeyPart::Header(name) if *name == AUTHORIZATION => unsupported("complete credentials"),
        KeyPart::Header(name) if *name == HOST => Ok(piece.to_ascii_lowercase()),
        KeyPart::Host => Ok(piece.to_ascii_lowercase()),
        KeyPart::Method => Ok(piece.to_ascii_uppercase()),
        KeyPart::PathCaptures(_) if !piece.is_empty() => {
            Ok(path::canonicalize_segment(piece, path).into())
        }
        _ => Ok(piece.to_owned()),
    }
}

/// Rejects a pattern with an end that no canonical value has.
pub(super) fn check_pattern_end(part: &KeyPart, pattern: &str) -> Result<(), String> {
    let is_host = matches!(part, KeyPart::Host | KeyPart::Header(HOST));
    let (_, port) = pattern.rsplit_once(':').unwrap_or(("", "none"));
    let has_port = port.bytes().all(|byte| byte.is_ascii_digit());
    if is_host && (has_port || pattern.ends_with('.')) {
        Err(
            "a host has no port and no dot at its end here; expected for example \"*.example.com\""
                .to_owned(),
        )
    } else {
        Ok(())
    }
}

/// Converts a value of a part without alternatives to the form that requests have.
pub fn canonicalize_part_value(
    part: &KeyPart,
    text: &str,
    client: &client::Settings,
    path: &path::Settings,
) -> Result<Box<str>, String> {
    match part {
        KeyPart::ClientIp => {
            let address = text.split_once('/').map_or(text, |(address, _)| address);
            let ip: IpAddr = address.parse().map_err(|error| {
                format!("the key requires a client address here, but {text:?} is none: {error}")
            })?;
            let canonical = format_client_network(client.client_ip(ip), client);
            if text.contains('/') && text != canonical {
                return Err(format!(
                    "clients are keyed as {canonical} (client.ipv4_prefix, client.ipv6_prefix)"
                ));
            }
            Ok(canonical.into())
        }
        KeyPart::Host => Ok(canonicalize_host(text)),
        KeyPart::Header(name) => canonicalize_header_value(name, text),
        KeyPart::DescriptorEntry(_) => Ok(canonicalize_descriptor_value(text).into()),
        KeyPart::Method => Ok(text.to_ascii_uppercase().into()),
        KeyPart::PathCaptures(_) => Ok(path::canonicalize_segment(text, path)),
        KeyPart::Claim(name) => name.check_listed_value(text, false).map(|()| text.into()),
        KeyPart::WholePath => path::PathInterpretations::parse(text, path)
            .map_err(|error| error.to_string())
            .and_then(|read| read.iter().next().map(Into::into).ok_or_else(String::new)),
        _ => Ok(text.into()),
    }
}

/// Converts a header's value to the form that keys and conditions read.
///
/// # Errors
/// Returns a message that states what is wrong.
fn canonicalize_header_value(name: &HeaderName, text: &str) -> Result<Box<str>, String> {
    match *name {
        AUTHORIZATION => match read_credentials(text.as_bytes()).as_slice() {
            [one] => Ok(String::from_utf8_lossy(one).into()),
            _ => Err(
                "these credentials can be read in several ways; expected one scheme and one credential"
                    .to_owned(),
            ),
        },
        HOST => Ok(canonicalize_host(text)),
        _ => Ok(text.trim_matches([' ', '\t']).into()),
    }
}

/// The value of a descriptor entry as policies read it. The caller may not trim what the app trims.
pub fn canonicalize_descriptor_value(text: &str) -> &str {
    text.trim_matches(is_white_space)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> ValuePattern {
        ValuePattern::from_text(text)
    }

    #[test]
    fn stars_match_any_text_and_escaped_ones_only_themselves() {
        for (pattern, hits, misses) in [
            (
                "acme-*",
                vec!["acme-", "acme-eu"],
                vec!["acme", "an acme-eu"],
            ),
            ("*-eu", vec!["-eu", "acme-eu"], vec!["acme-eu1"]),
            (
                "a*b*c",
                vec!["abc", "axbxc", "abbcc"],
                vec!["ac", "acb", "ab"],
            ),
            ("a**c", vec!["ac", "abc"], vec!["a"]),
            ("a*a", vec!["aa", "aba"], vec!["a"]),
            (r"a\*", vec!["a*"], vec!["ab", r"a\*"]),
            (r"a\\*", vec![r"a\", r"a\b"], vec!["a*"]),
            (r"a\b", vec![r"a\b"], vec!["ab"]),
        ] {
            let parsed = parse(pattern);
            for (values, expected) in [(hits, true), (misses, false)] {
                for value in values {
                    assert_eq!(
                        parsed.matches(Some(value.as_bytes())),
                        expected,
                        "{pattern} {value}"
                    );
                }
            }
            assert_eq!(parse(&parsed.to_text()), parsed);
        }
        assert!(parse("*").matches(None) && parse("*").matches(Some(b"")));
        assert!(parse("").matches(None) && !parse("a*").matches(None));
        assert!(!parse("**").matches(None), "two stars require a value");
    }

    /// A pattern that would take a backtracking matcher years.
    #[test]
    fn a_hostile_value_takes_linear_time() {
        let pattern = parse(&("a*".repeat(40) + "b"));
        assert!(!pattern.matches(Some(&[b'a'; 65_536])));
    }

    #[test]
    fn longer_patterns_come_first() {
        let mut texts = ["*", "a*", "*bcd*", "a", "ab*", "*"];
        texts.sort_by_key(|text| parse(text).rank());
        assert_eq!(texts, ["a", "*bcd*", "ab*", "a*", "*", "*"]);
    }

    /// The definition: a star takes any number of bytes.
    fn matches_naively(pieces: &[Box<str>], value: &[u8], is_first: bool) -> bool {
        let Some((piece, rest)) = pieces.split_first() else {
            return value.is_empty();
        };
        let most = if is_first { 0 } else { value.len() };
        (0..=most).any(|skipped| {
            let after = value[skipped..].strip_prefix(piece.as_bytes());
            after.is_some_and(|after| matches_naively(rest, after, false))
        })
    }

    proptest! {
        #[test]
        fn matching_equals_its_definition(text in "[ab*]{0,8}", value in "[ab]{1,10}") {
            let pattern = parse(&text);
            let expected = match &pattern {
                ValuePattern::Any => true,
                ValuePattern::Exact(one) => **one == *value,
                ValuePattern::Glob(pieces) => matches_naively(pieces, value.as_bytes(), true),
            };
            prop_assert_eq!(pattern.matches(Some(value.as_bytes())), expected);
        }
    }
}
