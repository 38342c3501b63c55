//! Finds regular expressions that a path pattern can replace.

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
    use super::path_pattern_from_regex;

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
