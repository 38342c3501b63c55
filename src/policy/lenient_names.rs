//! Queries and cookies that lenient parsers read differently than by their exact names.

use super::facts::{decode_form_value, query_values, raw_cookie_values};
use super::key_error::KeyError;
use super::value_checks::{has_unusual_cookie_octet, strip_cookie_prefix};
use super::{Facts, client};
use http::{HeaderMap, header::COOKIE};
use smallvec::SmallVec;

/// Parameters that all common parsers read (`qs`, PHP and Tomcat ignore further ones).
const MAX_QUERY_PARAMETERS: usize = 1000;

/// Maximum number of parts of all cookies that are examined. PHP ignores further cookies than this.
const MAX_COOKIE_PARTS: usize = 1000;

type FoldedName = SmallVec<[u8; 64]>;

/// Why upstreams may read another value of a part.
pub(super) type AmbiguityError = fn(String) -> KeyError;

/// Returns why upstreams may read another value of a query parameter, unless a setting allows it.
pub(super) fn find_query_ambiguity(
    facts: &Facts<'_>,
    name: &str,
    client: &client::Settings,
) -> Option<AmbiguityError> {
    (client.rejects_ambiguous_query && has_ambiguous_query(facts, name))
        .then_some(KeyError::AmbiguousQuery)
}

/// Returns why upstreams may read another value of a cookie, unless a setting allows it.
pub(super) fn find_cookie_ambiguity(
    headers: &HeaderMap,
    name: &str,
    client: &client::Settings,
) -> Option<AmbiguityError> {
    let checks = client.value_checks;
    let mut raw_values = raw_cookie_values(headers, name);
    match () {
        () if !client.rejects_ambiguous_cookie => None,
        () if is_cookie_ambiguous(headers, name) => Some(KeyError::AmbiguousCookie),
        () if checks.rejects_cookie_octets && raw_values.any(has_unusual_cookie_octet) => {
            Some(KeyError::CookieOctet)
        }
        () if checks.rejects_cookie_prefixes && has_prefixed_cookie(headers, name) => {
            Some(KeyError::PrefixedCookie)
        }
        () => None,
    }
}

/// Whether there is a cookie with the name, or a look-alike of it, after a prefix that some parsers
/// strip: Sanic reads `__Host-sid` as `sid`.
fn has_prefixed_cookie(headers: &HeaderMap, name: &str) -> bool {
    let folded = fold_name(name.as_bytes());
    let lines = headers.get_all(COOKIE).into_iter();
    let mut parts = lines.flat_map(|line| {
        let parts = line
            .as_bytes()
            .split(|byte| *byte == b';' || is_lenient_separator(byte));
        parts.filter_map(|part| strip_cookie_prefix(part))
    });
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
        || facts.paths.possible_query().is_some_and(may_be_in_path)
}

/// Whether a part of a path, which upstreams decode before they split it, has a parameter with this
/// name or a look-alike.
fn names_parameter(rest: &str, name: &str) -> bool {
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
pub(super) fn is_cookie_ambiguous(headers: &HeaderMap, name: &str) -> bool {
    let folded = fold_name(name.as_bytes());
    let mut remaining_parts = MAX_COOKIE_PARTS;
    headers
        .get_all(COOKIE)
        .into_iter()
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b';'))
        .any(|pair| {
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
            headers.append(COOKIE, http::HeaderValue::from_bytes(line).unwrap());
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
