//! Values that apps read in another form than they were sent: trimmed or decoded.

use super::authorization::{is_lenient_space, read_credentials};
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName};
use memchr::memmem;

/// The values of keys and conditions that are rejected because an app may read another value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueChecks {
    /// White space around a value, in ASCII or Unicode, and control characters.
    pub rejects_outer_white_space: bool,
    /// Headers with an encoded word (RFC 2047), or with several credentials.
    pub rejects_ambiguous_header: bool,
    /// Cookies with the name of another cookie after `__Host-` or `__Secure-`.
    pub rejects_cookie_prefixes: bool,
    /// Cookies with octets at which lenient parsers end the value.
    pub rejects_cookie_octets: bool,
}

/// Why a header that policies read is rejected. Clients see the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderValueError {
    #[error(
        "a header that a policy reads has white space around its value or control characters in it; expected the value without them (setting client.outer_white_space)"
    )]
    OuterWhiteSpace,
    #[error(
        "a header that a policy reads has an encoded word of RFC 2047, =?…?=; expected plain text (setting client.ambiguous_header)"
    )]
    EncodedWord,
    #[error(
        "the Authorization header can be read as several credentials; expected one scheme and one credential (setting client.ambiguous_header)"
    )]
    SeveralCredentials,
}

impl ValueChecks {
    pub const ALL: Self = Self {
        rejects_outer_white_space: true,
        rejects_ambiguous_header: true,
        rejects_cookie_prefixes: true,
        rejects_cookie_octets: true,
    };

    /// Checks the values of headers whose values policies read.
    pub(super) fn check_headers(
        &self,
        headers: &HeaderMap,
        names: &[HeaderName],
    ) -> Result<(), HeaderValueError> {
        // Comparing the few names of a request is cheaper than a lookup.
        let lines = headers.iter().filter(|_| !names.is_empty());
        lines
            .filter(|(name, _)| names.contains(name))
            .try_for_each(|(name, value)| self.check_header_value(name, value.as_bytes()))
    }

    /// Whether a decoded value of a query parameter, cookie or path is rejected because apps trim
    /// it.
    pub(super) fn rejects_value(&self, value: &[u8]) -> bool {
        self.rejects_outer_white_space && is_trimmed_by_apps(value)
    }

    fn check_header_value(&self, name: &HeaderName, value: &[u8]) -> Result<(), HeaderValueError> {
        let is_credential = *name == AUTHORIZATION;
        let is_plain = |byte: &u8| byte.is_ascii_graphic() && *byte != b'?';
        if !is_credential && value.iter().all(is_plain) {
            return Ok(());
        }
        // An app may split the value at commas, and a proxy may have joined lines with them.
        let mut parts = value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
        let is_trimmed = if is_credential {
            has_wide_space(value)
        } else {
            parts.any(is_header_value_trimmed_by_apps)
        };
        if is_trimmed && self.rejects_outer_white_space {
            return Err(HeaderValueError::OuterWhiteSpace);
        }
        if self.rejects_ambiguous_header {
            if has_encoded_word(value) {
                return Err(HeaderValueError::EncodedWord);
            }
            if is_credential && (read_credentials(value).len() > 1 || names_scheme_later(value)) {
                return Err(HeaderValueError::SeveralCredentials);
            }
        }
        Ok(())
    }
}

/// Whether a text has white space around it, or a control character.
fn is_trimmed_by_apps(value: &[u8]) -> bool {
    has_outer_white_space(value) || String::from_utf8_lossy(value).contains(char::is_control)
}

/// As [`is_trimmed_by_apps`]. Apps read headers as Latin-1 too, in which the last byte of a UTF-8
/// character may be a space.
fn is_header_value_trimmed_by_apps(value: &[u8]) -> bool {
    matches!(value.first(), Some(0x80..=0xa0))
        || matches!(value.last(), Some(0x85 | 0xa0))
        || value.contains(&b'\t')
        || has_outer_white_space(value)
}

/// Whether credentials have white space other than the bytes that keys read as a space.
fn has_wide_space(value: &[u8]) -> bool {
    let is_wide = |letter: char| is_white_space(letter) && !matches!(letter, ' ' | '\t');
    !value.is_ascii() && String::from_utf8_lossy(value).contains(is_wide)
}

/// Whether credentials have the name of a scheme elsewhere than at their start. Sanic reads what
/// follows the first `Bearer`, else the first `Token`, also without a space.
fn names_scheme_later(value: &[u8]) -> bool {
    let end = value.iter().position(is_lenient_space);
    let (scheme, rest) = value.split_at(end.unwrap_or(value.len()));
    let is_named = |name: &[u8]| {
        let is_scheme = scheme.eq_ignore_ascii_case(name);
        memmem::find(if is_scheme { rest } else { value }, name).is_some()
    };
    is_named(b"Bearer") || scheme != b"Bearer" && is_named(b"Token")
}

fn has_outer_white_space(value: &[u8]) -> bool {
    let is_plain = |byte: Option<&u8>| byte.is_none_or(u8::is_ascii_graphic);
    if is_plain(value.first()) && is_plain(value.last()) {
        return false;
    }
    let text = String::from_utf8_lossy(value);
    text.starts_with(is_white_space) || text.ends_with(is_white_space)
}

/// White space of ASCII and Unicode, and characters without width, some of which runtimes trim.
pub(super) fn is_white_space(letter: char) -> bool {
    letter.is_whitespace()
        || letter.is_control()
        || matches!(
            letter,
            '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2060}' | '\u{feff}'
        )
}

/// Whether a value has an encoded word (RFC 2047), such as `=?utf-8?q?alice?=`.
fn has_encoded_word(value: &[u8]) -> bool {
    memmem::find(value, b"=?").is_some_and(|start| {
        let rest = value.get(start + 2..).unwrap_or_default();
        memmem::find(rest, b"?=").is_some()
    })
}

/// Whether a cookie's raw value has an octet outside of RFC 6265, a bracket or an ampersand.
/// Lenient parsers end the value at such an octet. One pair of quotes may enclose the value.
pub(super) fn has_unusual_cookie_octet(value: &[u8]) -> bool {
    let quoted = value.strip_prefix(b"\"");
    let unquoted = quoted.and_then(|value| value.strip_suffix(b"\""));
    let is_octet = |byte: &u8| byte.is_ascii_graphic() && !b"\",;[\\]".contains(byte);
    let unquoted = unquoted.unwrap_or(value);
    // Dancer2 splits the decoded value at these.
    let mut decoded = percent_encoding::percent_decode(unquoted);
    !unquoted.iter().all(is_octet) || decoded.any(|byte| matches!(byte, b'&' | b';'))
}

/// The name of a cookie without `__Host-` or `__Secure-`, if it begins with one of them.
pub(super) fn strip_cookie_prefix(name: &[u8]) -> Option<&[u8]> {
    [&b"__host-"[..], b"__secure-"].iter().find_map(|prefix| {
        let (start, rest) = name.split_at_checked(prefix.len())?;
        start.eq_ignore_ascii_case(prefix).then_some(rest)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_apps_trim_are_found() {
        for value in [
            "alice ",
            " alice",
            "alice\n",
            "alice\0",
            "al\u{7}ice",
            "alice\u{a0}",
            "\u{85}alice",
            "alice\u{2003}",
            "\u{3000}alice",
            "\u{feff}alice",
            "alice\u{200b}",
            " ",
        ] {
            assert!(is_trimmed_by_apps(value.as_bytes()), "{value:?}");
        }
        for value in ["", "alice", "al ice", "voil\u{e0}", "\u{e9}t\u{e9}"] {
            assert!(!is_trimmed_by_apps(value.as_bytes()), "{value:?}");
        }
    }

    #[test]
    fn headers_are_checked_as_utf_8_and_as_latin_1() {
        let plan = HeaderName::from_static("x-plan");
        let check = |value: &[u8]| ValueChecks::ALL.check_header_value(&plan, value);
        for value in [
            &b"alice\xa0"[..],
            b"\x85alice",
            b"alice\xc2\xa0",
            b"\xe3\x80\x80alice",
            b"a\tb",
            b"\xa0",
            b"free\xa0, x",
            b"x,free\xa0",
        ] {
            let found = check(value).unwrap_err();
            assert_eq!(found, HeaderValueError::OuterWhiteSpace, "{value:?}");
        }
        for value in [
            &b""[..],
            b"alice",
            b"a, b",
            b"\xc3\xa9t\xc3\xa9",
            b"a=?b",
            b"?=",
        ] {
            assert_eq!(check(value), Ok(()), "{}", value.escape_ascii());
        }
        for value in ["=?utf-8?q?alice?=", "a =?UTF-8?B?YQ==?= b", "=?x?=?="] {
            let found = check(value.as_bytes()).unwrap_err();
            assert_eq!(found, HeaderValueError::EncodedWord, "{value}");
        }
        let check = |value: &[u8]| ValueChecks::ALL.check_header_value(&AUTHORIZATION, value);
        assert_eq!(
            check(b"Bearer alice bob"),
            Err(HeaderValueError::SeveralCredentials)
        );
        assert_eq!(
            check(b"Bearer alice\xc2\xa0"),
            Err(HeaderValueError::OuterWhiteSpace)
        );
        for value in ["Bearer \u{2003}alice", "Bearer\u{2028} alice", "\u{feff}x"] {
            let found = check(value.as_bytes()).unwrap_err();
            assert_eq!(found, HeaderValueError::OuterWhiteSpace, "{value}");
        }
        for value in [
            "Beareralice",
            "x Token alice",
            "Token bob, Token alice",
            "Basic Bearer",
        ] {
            let found = check(value.as_bytes()).unwrap_err();
            assert_eq!(found, HeaderValueError::SeveralCredentials, "{value}");
        }
        for value in [
            &b"Bearer\talice\xa0"[..],
            b"token x",
            b"tokenx",
            b"Bearer",
            b"Bearer aTokenb",
            b"Digest a=\"b\", c=d",
        ] {
            assert_eq!(check(value), Ok(()), "one spelling in keys");
        }
    }

    #[test]
    fn cookie_octets_and_prefixes() {
        for value in [
            &b"alice,x"[..],
            b"alice]",
            b"ali[ce",
            b"ali\\ce",
            b"al\"ice",
            b"\"alice\"x",
            b"\"ali\"ce\"",
            b"al ice",
            b"alice&x",
            b"alice%26x",
            b"alice%3bx",
            b"alice\x7f",
            b"alice\xe9",
            b"\"",
        ] {
            assert!(has_unusual_cookie_octet(value), "{}", value.escape_ascii());
        }
        for value in [
            &b""[..],
            b"alice",
            b"\"alice\"",
            b"a%20b",
            b"j:{}",
            b"a=b:c/d",
        ] {
            assert!(!has_unusual_cookie_octet(value), "{}", value.escape_ascii());
        }
        assert_eq!(strip_cookie_prefix(b"__Host-sid"), Some(&b"sid"[..]));
        assert_eq!(strip_cookie_prefix(b"__SECURE-sid"), Some(&b"sid"[..]));
        assert_eq!(strip_cookie_prefix(b"__Hosted"), None);
    }
}
