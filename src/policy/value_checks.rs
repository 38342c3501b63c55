//! Values that apps read in another form than they were sent: trimmed, decoded, or by another name.

use super::authorization::{is_lenient_space, read_credentials};
use super::facts::{cookie_pairs, decode_form_value, query_values, raw_cookie_values};
use super::{Facts, KeyPart};
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName};
use memchr::memmem;
use smallvec::SmallVec;

/// Why a request cannot be keyed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("{0} occurs more than once; expected one")]
    Repeated(String),
    #[error(
        "{0} occurs more than once or has a comma; expected one value without a comma (setting check.joined_headers)"
    )]
    Joined(String),
    #[error("{0} is missing")]
    Missing(String),
    #[error(
        "the path can be read in several ways with different keys (setting path.ambiguous_key)"
    )]
    AmbiguousPath,
    #[error(
        "{0} can be read in several ways; expected it once, by its exact name, percent-encoded in UTF-8 (setting client.ambiguous_query)"
    )]
    AmbiguousQuery(String),
    #[error(
        "{0} can be read in several ways; expected it once, by its exact name, in ASCII without spaces and backslashes (setting client.ambiguous_cookie)"
    )]
    AmbiguousCookie(String),
    #[error(
        "{0} has white space around its value or control characters in it; expected the value without them (setting client.outer_white_space)"
    )]
    OuterWhiteSpace(String),
    #[error(
        "{0} has a comma, a bracket, an ampersand, a control character or an inner quote; expected a value without them (setting client.cookie_octets)"
    )]
    CookieOctet(String),
    #[error(
        "{0} can't be read from the body; expected one JSON document in UTF-8, or a form, of at most max_scan, with the name once (setting missing_key)"
    )]
    UnreadableBody(String),
    #[error(
        "{0} is sent with the prefix __Host- or __Secure- in its name; expected it without (setting client.cookie_prefixes)"
    )]
    PrefixedCookie(String),
}

/// The values of keys and conditions that are rejected because an app may read another value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueChecks {
    /// White space around a value, in ASCII or Unicode, and control characters.
    pub rejects_outer_white_space: bool,
    /// Headers with an encoded word (RFC 2047), or with several credentials.
    pub rejects_ambiguous_header: bool,
    /// Queries that lenient parsers read differently.
    pub rejects_ambiguous_query: bool,
    /// Cookies that lenient parsers read differently. Otherwise the settings of cookies have no
    /// effect.
    pub rejects_ambiguous_cookie: bool,
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
        rejects_ambiguous_query: true,
        rejects_ambiguous_cookie: true,
        rejects_cookie_prefixes: true,
        rejects_cookie_octets: true,
    };

    /// Whether a decoded value of a query parameter, cookie or path is rejected because apps trim
    /// it.
    pub(super) fn rejects_value(&self, value: &[u8]) -> bool {
        self.rejects_outer_white_space && is_trimmed_by_apps(value)
    }

    /// Checks the value of a header that policies read.
    pub(super) fn check_header_value(
        &self,
        name: &HeaderName,
        value: &[u8],
    ) -> Result<(), HeaderValueError> {
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
fn has_unusual_cookie_octet(value: &[u8]) -> bool {
    let quoted = value.strip_prefix(b"\"");
    let unquoted = quoted.and_then(|value| value.strip_suffix(b"\""));
    let is_octet = |byte: &u8| byte.is_ascii_graphic() && !b"\",;[\\]".contains(byte);
    let unquoted = unquoted.unwrap_or(value);
    // Dancer2 splits the decoded value at these.
    let mut decoded = percent_encoding::percent_decode(unquoted);
    !unquoted.iter().all(is_octet) || decoded.any(|byte| matches!(byte, b'&' | b';'))
}

/// The name of a cookie without `__Host-` or `__Secure-`, if it begins with one of them.
fn strip_cookie_prefix(name: &[u8]) -> Option<&[u8]> {
    [&b"__host-"[..], b"__secure-"].iter().find_map(|prefix| {
        let (start, rest) = name.split_at_checked(prefix.len())?;
        start.eq_ignore_ascii_case(prefix).then_some(rest)
    })
}

/// Parameters that all common parsers read (`qs`, PHP and Tomcat ignore further ones).
const MAX_QUERY_PARAMETERS: usize = 1000;

/// Maximum number of parts of all cookies that are examined. PHP ignores further cookies than this.
const MAX_COOKIE_PARTS: usize = 1000;

type FoldedName = SmallVec<[u8; 64]>;

impl KeyPart {
    /// Returns why upstreams may read another value of a query parameter or cookie, unless a
    /// setting allows it.
    pub(super) fn find_ambiguity(
        &self,
        facts: &Facts<'_>,
        checks: ValueChecks,
    ) -> Option<KeyError> {
        let headers = facts.headers;
        let is_trimmed = || self.has_value(facts, |value| checks.rejects_value(value));
        let error: fn(String) -> KeyError = match self {
            Self::Query(name)
                if checks.rejects_ambiguous_query && has_ambiguous_query(facts, name) =>
            {
                KeyError::AmbiguousQuery
            }
            Self::Cookie(name) if checks.rejects_ambiguous_cookie => {
                let mut raw_values = raw_cookie_values(headers, name);
                match () {
                    () if is_cookie_ambiguous(headers, name) => KeyError::AmbiguousCookie,
                    () if checks.rejects_cookie_octets
                        && raw_values.any(has_unusual_cookie_octet) =>
                    {
                        KeyError::CookieOctet
                    }
                    () if checks.rejects_cookie_prefixes && has_prefixed_cookie(headers, name) => {
                        KeyError::PrefixedCookie
                    }
                    () if is_trimmed() => KeyError::OuterWhiteSpace,
                    () => return None,
                }
            }
            Self::Query(_) | Self::Cookie(_) if is_trimmed() => KeyError::OuterWhiteSpace,
            _ => return None,
        };
        Some(error(self.to_string()))
    }
}

/// Whether there is a cookie with the name, or a look-alike of it, after a prefix that some parsers
/// strip: Sanic reads `__Host-sid` as `sid`.
fn has_prefixed_cookie(headers: &HeaderMap, name: &str) -> bool {
    let folded = fold_name(name.as_bytes());
    let mut parts = cookie_pairs(headers)
        .flat_map(|pair| pair.split(is_lenient_separator))
        .filter_map(strip_cookie_prefix);
    parts.any(|part| names_cookie(part, name, &folded))
}

/// Whether upstreams disagree on the value of a query parameter, in the query or because they read
/// a part of the path as the query.
fn has_ambiguous_query(facts: &Facts<'_>, name: &str) -> bool {
    let may_be_in_path = |rest| {
        // Such an upstream does not read the parameter in the query.
        let is_in_query = query_values(facts.query, name).next().is_some();
        is_in_query || names_parameter(rest, name)
    };
    is_query_ambiguous(facts.query, name)
        || facts
            .paths
            .possible_query
            .as_deref()
            .is_some_and(may_be_in_path)
}

/// Whether a part of a path, which upstreams decode before they split it, has a parameter with this
/// name or a look-alike.
pub(super) fn names_parameter(rest: &str, name: &str) -> bool {
    let folded = fold_name(name.as_bytes());
    let decoded: Vec<u8> = percent_encoding::percent_decode_str(rest).collect();
    decoded
        .split(|byte| matches!(byte, b'&' | b';' | b'?'))
        .any(|parameter| {
            let found = parameter.trim_ascii_start();
            let found = found.split(|byte| *byte == b'=').next();
            let found = String::from_utf8_lossy(found.unwrap_or_default());
            let found = decode_form_value(&found);
            *found == *name.as_bytes() || is_look_alike(&found, &folded)
        })
}

/// Whether parsers disagree on the value of a query parameter: a parameter has a look-alike name, a
/// semicolon may start another parameter, the value is not UTF-8, or there are too many parameters.
pub(super) fn is_query_ambiguous(query: Option<&str>, name: &str) -> bool {
    let query = query.unwrap_or_default();
    let folded = fold_name(name.as_bytes());
    let mut parameters = 0;
    for pair in query.split('&') {
        let has_semicolon = pair.contains(';');
        for parameter in pair.split(';') {
            parameters += 1;
            if parameters > MAX_QUERY_PARAMETERS {
                return true;
            }
            // Koa and PHP skip a leading `?`, h3 a leading `=`.
            let trimmed = parameter.trim_start_matches(['?', '=']);
            let (found, value) = trimmed.split_once('=').unwrap_or((trimmed, ""));
            if has_unicode_escape(found) {
                return true;
            }
            let found = decode_form_value(found);
            let is_ambiguous = if *found == *name.as_bytes() {
                has_semicolon
                    || has_unicode_escape(value)
                    || trimmed.len() < parameter.len()
                    || std::str::from_utf8(&decode_form_value(value)).is_err()
            } else {
                is_look_alike(&found, &folded)
            };
            if is_ambiguous {
                return true;
            }
        }
    }
    false
}

/// ASP.NET reads `%u0061` as `a`.
fn has_unicode_escape(text: &str) -> bool {
    text.as_bytes().windows(6).any(|window| match window {
        [b'%', b'u' | b'U', digits @ ..] => digits.iter().all(u8::is_ascii_hexdigit),
        _ => false,
    })
}

/// Whether parsers disagree on the value of a cookie: a cookie has a look-alike name, another
/// cookie may contain the cookie, its value has a space, a backslash, a byte above 0x7F, or is
/// JSON, or there are too many parts.
fn is_cookie_ambiguous(headers: &HeaderMap, name: &str) -> bool {
    let folded = fold_name(name.as_bytes());
    let mut remaining_parts = MAX_COOKIE_PARTS;
    cookie_pairs(headers).any(|pair| {
        let mut halves = pair.splitn(2, |byte| *byte == b'=').map(<[u8]>::trim_ascii);
        let found = halves.next().unwrap_or_default();
        let value = halves.next().unwrap_or_default();
        if value.starts_with(b"\"") && (value.len() == 1 || !value.ends_with(b"\"")) {
            return true;
        }
        // nginx separates cookies at commas, Python's `http.cookies` at spaces too.
        for (index, part) in pair.trim_ascii().split(is_lenient_separator).enumerate() {
            if remaining_parts == 0 || index > 0 && names_cookie(part, name, &folded) {
                return true;
            }
            remaining_parts -= 1;
            // WebOb finds a name after any byte that no name has.
            let mut inner = part.split(is_foreign_to_cookies).skip(1);
            if inner.any(|text| text.contains(&b'=') && names_cookie(text, name, &folded)) {
                return true;
            }
        }
        if found == name.as_bytes() {
            return value
                .iter()
                .any(|byte| matches!(byte, b' ' | b'\t' | b'\\' | 0x80..))
                || is_json_cookie(value);
        }
        is_look_alike(&decode_percent(found), &folded)
    })
}

fn is_lenient_separator(byte: &u8) -> bool {
    matches!(byte, b',' | b' ' | b'\t')
}

fn is_foreign_to_cookies(byte: &u8) -> bool {
    !byte.is_ascii_graphic() || b"\"&[\\]".contains(byte)
}

/// Whether text before its first `=`, or all of it, is the name of the cookie or a look-alike.
fn names_cookie(text: &[u8], name: &str, folded_name: &[u8]) -> bool {
    let found = text.split(|byte| *byte == b'=').next().unwrap_or_default();
    found == name.as_bytes() || is_look_alike(&decode_percent(found), folded_name)
}

fn decode_percent(text: &[u8]) -> FoldedName {
    percent_encoding::percent_decode(text).collect()
}

/// Express reads `j:"x"` as `x`.
fn is_json_cookie(value: &[u8]) -> bool {
    let value = value.strip_prefix(b"\"").unwrap_or(value);
    percent_encoding::percent_decode(value)
        .take(3)
        .eq(b"j:\"".iter().copied())
}

/// Whether a lenient parser may take `found`, which is not the exact name, for the name.
fn is_look_alike(found: &[u8], folded_name: &[u8]) -> bool {
    let folded = fold_name(found);
    if *folded == *folded_name || *replace_brackets(&folded) == *folded_name {
        return true;
    }
    let is_bracket = |byte: &u8| matches!(byte, b'[' | b']');
    let is_nested = folded.iter().any(is_bracket);
    // `[name]`, `name[]` and `name[0]` (qs, Rack, PHP).
    let mut parts = folded.split(is_bracket).filter(|part| !part.is_empty());
    let mut name_parts = folded_name
        .split(is_bracket)
        .filter(|part| !part.is_empty());
    is_nested && name_parts.all(|part| parts.next() == Some(part))
}

/// PHP reads `a[b` as `a_b`.
fn replace_brackets(folded: &[u8]) -> FoldedName {
    folded
        .iter()
        .map(|byte| if *byte == b'[' { b'_' } else { *byte })
        .collect()
}

/// Folds what lenient parsers fold: letter case (ASP.NET), spaces and dots to underscores and the
/// end at a NUL (PHP), and bytes that are no printable ASCII.
fn fold_name(name: &[u8]) -> FoldedName {
    let end = name.iter().position(|byte| *byte == 0);
    let name = name.get(..end.unwrap_or(name.len())).unwrap_or_default();
    name.trim_ascii()
        .iter()
        .filter(|byte| matches!(byte, 0x20..=0x7e))
        .map(|byte| match byte {
            b' ' | b'.' => b'_',
            byte => byte.to_ascii_lowercase(),
        })
        .collect()
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

    #[test]
    fn names_that_lenient_parsers_fold_are_ambiguous() {
        for query in [
            "[api_key]=1",
            "%5Bapi_key%5D=1",
            "api_key[]=1",
            "api_key[0]=1",
            "api_key%5Bx%5D=1",
            "api.key=1",
            "api%20key=1",
            "api+key=1",
            "api[key=1",
            "+api_key=1",
            "api_key%00x=1",
            "api_key%FF=1",
            "API_KEY=1",
            "a=1&b=2&Api.Key=3",
            "a=1;api_key=2",
            "api_key=1;a=2",
            "api_key=%FF",
            "?api_key=1",
            "a=1&=api_key=1",
            "%u0061pi_key=1",
            "a=1&api_key=%U0061",
        ] {
            assert!(is_query_ambiguous(Some(query), "api_key"), "{query}");
        }
        let thousand = "a&".repeat(1000);
        assert!(is_query_ambiguous(
            Some(&format!("{thousand}api_key=1")),
            "api_key"
        ));
        assert!(is_query_ambiguous(Some("f[u][]=1"), "f[u]"));
        assert!(is_query_ambiguous(Some("[f][u]=1"), "f[u]"));
    }

    #[test]
    fn exact_and_unrelated_names_are_not_ambiguous() {
        for query in [
            "",
            "api_key=1",
            "%61pi_key=a%3Bb+c&api=1&key=2",
            "a;b=1&api_key=2",
            "api-key=1&x[api_key]=2&api_keys[]=3&filter[a.b]=4",
            "api_key=%C3%A9",
            "api_key=%u00&b=%u0061&%u=1",
        ] {
            assert!(!is_query_ambiguous(Some(query), "api_key"), "{query}");
        }
        assert!(!is_query_ambiguous(None, "api_key"));
        assert!(!is_query_ambiguous(Some("f[u]=1&f[v]=2"), "f[u]"));
        let most = "a&".repeat(999);
        assert!(!is_query_ambiguous(
            Some(&format!("{most}api_key=1")),
            "api_key"
        ));
    }

    #[test]
    fn cookies_that_parsers_unescape_differently_are_ambiguous() {
        let is_ambiguous = |line: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.append(
                http::header::COOKIE,
                http::HeaderValue::from_bytes(line).unwrap(),
            );
            is_cookie_ambiguous(&headers, "sid")
        };
        for line in [
            &b"sid=\"\\163x\""[..],
            b"sid=a\\b",
            b"a=1; sid=x\xa0",
            b"sid=x\x85; a=1",
            b"sid=\xc3\xa9",
            b"sid\xa0=x",
            b"\xa0sid=x",
            b"sid[]=x",
            b"%73id=x",
            b"SID=x",
            b"a=\"1; sid=2; b=\"",
            b"sid=\"",
            b"a=1,sid=x",
            b"a\\sid=x",
            b"x\xa0sid=x",
            b"a=1\x85sid=x",
            b"=x[sid=x",
            b"a=1&SID=x",
            b"a=1, sid=x",
            b"a=1 sid=x",
            b"sid=x, sid=y",
            b"sid=x y",
            b"sid=x\ty",
            b"sid=\"x y\"",
            b"secure sid=x",
            b"secure\tsid=x",
            b"$x sid =x",
            b"a=1; $x sid=x",
            b",sid=x",
            b", sid=x",
            b"a,SID=x",
            b"a %73id=x",
            b"sid=j:\"x\"",
            b"sid=j:%22x%22",
        ] {
            assert!(is_ambiguous(line), "{}", line.escape_ascii());
        }
        for line in [
            &b"sid=x"[..],
            b"sid=\"x\"; a=\\b; b=\xa0",
            b"a=\"\"; sid = x%20y ;;",
            b"sids=1; xsid=2",
            b"sid=j:{}; a=1,2 3; b=sid; c=sid=x",
            b"sid=x; a={\"sid\":\"1\"}; b=\"sid\"",
        ] {
            assert!(!is_ambiguous(line), "{}", line.escape_ascii());
        }
        for (separator, most) in [("; ", 1000), (",", 1000)] {
            let parts = |count| vec!["a"; count].join(separator);
            assert!(!is_ambiguous(parts(most).as_bytes()));
            assert!(is_ambiguous(parts(most + 1).as_bytes()));
        }
    }

    #[test]
    fn parameters_in_the_path_are_found_however_they_are_escaped() {
        for rest in [
            ";api_key=1",
            "%3Fa=1&api_key=2",
            "%3fa=1%26api%5fkey%3d2",
            "%3Fapi%255Fkey=1",
            ";a;API.KEY",
            ";a=?api_key=1",
        ] {
            assert!(names_parameter(rest, "api_key"), "{rest}");
        }
        for rest in [";jsessionid=A1", ";a=api_key/x", "%3Fapi=1", ";"] {
            assert!(!names_parameter(rest, "api_key"), "{rest}");
        }
    }
}
