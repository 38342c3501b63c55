//! Finds regular expressions that a path pattern can replace, and those in a spelling that no path
//! has.

use crate::policy::path;

/// The first part of a regular expression that no path contains, with its canonical spelling: an
/// escape or a character that paths spell differently.
pub(super) fn find_unusual_spelling<'r>(
    regex: &'r str,
    settings: &path::Settings,
) -> Option<(&'r str, Box<str>)> {
    let mut parts = regex.char_indices().filter_map(|(at, letter)| {
        let rest = regex.get(at..)?;
        let escape = rest.get(..3).filter(|text| is_escape(text));
        match (escape, letter) {
            (Some(escape), _) => Some(escape),
            (None, letter) if !letter.is_ascii() => rest.get(..letter.len_utf8()),
            _ => None,
        }
    });
    parts.find_map(|part| {
        let canonical = path::canonicalize_segment(part, settings);
        let is_same = if settings.case_sensitive {
            *canonical == *part
        } else {
            canonical.eq_ignore_ascii_case(part)
        };
        (!is_same).then_some((part, canonical))
    })
}

/// Whether a text is percent-encoded, at least in part.
pub(super) fn has_escape(text: &str) -> bool {
    let starts = text.match_indices('%');
    let mut escapes = starts.filter_map(|(at, _)| text.get(at..at + 3));
    escapes.any(is_escape)
}

/// Whether three characters are a percent-encoded byte.
fn is_escape(text: &str) -> bool {
    let is_hex = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    text.strip_prefix('%').is_some_and(is_hex)
}

/// Returns the path pattern equivalent to `regex`, or `None`. `^/api/.*` becomes `/api/**`, which
/// also matches `/api`.
///
/// Supports only expressions anchored at the root that consist of literal segments, `[^/]+` as a
/// whole segment, and an "any rest" suffix.
pub(super) fn path_pattern_from_regex(regex: &str) -> Option<String> {
    let mut rest = regex.strip_prefix('^')?;
    if !rest.starts_with('/') {
        return None;
    }
    let mut pattern = String::new();
    loop {
        match rest {
            "$" | "/?$" if !pattern.is_empty() => return Some(pattern),
            "/" | "/.*" | "/.*$" | "(/|$)" | "(/.*)?$" | "(?:/|$)" | "(?:/.*)?$" => {
                return Some(pattern + "/**");
            }
            _ => {}
        }
        rest = rest.strip_prefix('/')?;
        pattern.push('/');
        match rest
            .strip_prefix("[^/]+")
            .or_else(|| rest.strip_prefix("[^/]*"))
        {
            Some(after) => {
                pattern.push('*');
                rest = after;
            }
            None => rest = parse_literal_segment(rest, &mut pattern)?,
        }
    }
}

/// Parses one literal segment. Returns the rest of the expression.
fn parse_literal_segment<'r>(regex: &'r str, pattern: &mut String) -> Option<&'r str> {
    let mut characters = regex.char_indices();
    let start = pattern.len();
    while let Some((at, character)) = characters.next() {
        match character {
            'a'..='z' | 'A'..='Z' | '0'..='9' | '-' | '_' | '~' => pattern.push(character),
            '\\' => match characters.next() {
                Some((_, escaped @ ('.' | '-' | '_'))) => pattern.push(escaped),
                _ => return None,
            },
            '/' | '$' | '(' => {
                return (pattern.len() > start).then_some(regex.get(at..)).flatten();
            }
            // Includes an unescaped dot, which matches any character.
            _ => return None,
        }
    }
    // The expression has no end anchor: `^/api` also matches `/apiary`.
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_that_no_path_has_are_found() {
        let find = |regex, settings| {
            let found = find_unusual_spelling(regex, settings);
            found.map(|(part, canonical)| format!("{part} {canonical}"))
        };
        let exact = path::Settings::DEFAULT;
        for (regex, found) in [
            ("^/café$", Some("é %C3%A9")),
            ("^/caf%c3%A9$", Some("%c3 %C3")),
            ("^/%61dmin", Some("%61 a")),
            ("^/a%2fb", Some("%2f %2F")),
            ("^/caf%C3%A9/a%2Fb%20[%].%x1$", None),
        ] {
            assert_eq!(find(regex, &exact).as_deref(), found, "{regex}");
        }
        let caseless = path::Settings {
            case_sensitive: false,
            ..exact
        };
        assert_eq!(find("^/A%2fb%2F", &caseless), None);
        assert!(has_escape("a%2F") && !has_escape("100%") && !has_escape("%é2 %2"));
    }

    #[test]
    fn converts_only_regexes_that_a_path_pattern_expresses() {
        for (regex, pattern) in [
            ("^/api/", "/api/**"),
            ("^/api/.*", "/api/**"),
            ("^/api/.*$", "/api/**"),
            ("^/api(/.*)?$", "/api/**"),
            ("^/api/v1\\.0/users$", "/api/v1.0/users"),
            ("^/api/[^/]+/orders$", "/api/*/orders"),
            ("^/api/[^/]+$", "/api/*"),
            ("^/api/?$", "/api"),
            ("^/.*", "/**"),
            ("^/", "/**"),
        ] {
            assert_eq!(
                path_pattern_from_regex(regex).as_deref(),
                Some(pattern),
                "{regex}"
            );
        }
        for regex in [
            "/api/",
            "^/api",
            "^/v1.0/x$",
            "^/(a|b)$",
            "^/api/\\d+$",
            "^/a+/",
            "^api",
            "",
            "^",
            "^$",
            "^/a//b$",
            "^/[^/]+x$",
            "^/é$",
            "^/a\\",
            "^/a/(?i)b$",
            "(?i)^/a$",
        ] {
            assert_eq!(path_pattern_from_regex(regex), None, "{regex}");
        }
    }
}
