//! Queries and cookies that lenient parsers read differently than by their exact names.

use super::facts::decode_form_value;
use http::{HeaderMap, header::COOKIE};
use smallvec::SmallVec;

/// Parameters that all common parsers read (`qs`, PHP and Tomcat ignore further ones).
const MAX_QUERY_PARAMETERS: usize = 1000;

type FoldedName = SmallVec<[u8; 64]>;

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
            // Koa and PHP skip a leading `?`, h3 a leading `=`.
            let trimmed = parameter.trim_start_matches(['?', '=']);
            let (found, value) = trimmed.split_once('=').unwrap_or((trimmed, ""));
            let found = decode_form_value(found);
            let is_ambiguous = if *found == *name.as_bytes() {
                has_semicolon
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
    parameters > MAX_QUERY_PARAMETERS
}

/// Whether parsers disagree on the value of a cookie: a cookie has a look-alike name, a value
/// may contain the cookie, is JSON, or has a backslash or a byte above 0x7F.
pub(super) fn is_cookie_ambiguous(headers: &HeaderMap, name: &str) -> bool {
    let folded = fold_name(name.as_bytes());
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
            let mut parts = value
                .split(|byte| matches!(byte, b',' | b' ' | b'\t'))
                .skip(1);
            if parts.any(|part| starts_cookie(part, name)) {
                return true;
            }
            if found == name.as_bytes() {
                return value.iter().any(|byte| matches!(byte, b'\\' | 0x80..))
                    || is_json_cookie(value);
            }
            let decoded: SmallVec<[u8; 64]> = percent_encoding::percent_decode(found).collect();
            is_look_alike(&decoded, &folded)
        })
}

/// Whether text is `name` or starts with `name=`, in any letter case.
fn starts_cookie(text: &[u8], name: &str) -> bool {
    let found = text.split(|byte| *byte == b'=').next();
    found.is_some_and(|found| found.eq_ignore_ascii_case(name.as_bytes()))
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
            b"a=1, sid=x",
            b"a=1 sid=x",
            b"sid=x, sid=y",
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
        ] {
            assert!(!is_ambiguous(line), "{}", line.escape_ascii());
        }
    }
}
