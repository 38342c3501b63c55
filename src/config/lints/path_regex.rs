//! Regular expressions that a path pattern says more plainly.

/// The pattern that says the same as `regex`, or `None`. `^/api/.*` becomes `/api/**`, which has `/api` too.
///
/// Only expressions that begin at the root are read, and of those only texts, `[^/]+` as a whole segment, and what
/// stands for "any rest" at the end.
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

/// Reads one segment of plain text. Returns what stands behind it.
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
            // Also a lone dot: it is any character.
            _ => return None,
        }
    }
    // It goes on after the text: `^/api` has `/apiary` too.
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
