//! Patterns of paths.

use super::path;
use smallvec::SmallVec;

/// A path pattern. `/a/b` is exact, `{name}` and `*` match one segment, and a final `**` matches
/// any number of segments.
///
/// The text has a slash and a word for each segment, so that a lookup reads one place in memory. The
/// words [`WILDCARD`], [`CAPTURE`] and [`ANY_SUFFIX`] are no literals: a literal has no `?`, or, if
/// normalization has decoded one, no backslash.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PathPattern(Box<str>);

const WILDCARD: &str = "\\?";
const CAPTURE: &str = "\\?{}";
const ANY_SUFFIX: &str = "\\?**";
const ANY_PATH: &str = "/\\?**";

/// The segments of a pattern, from one of them on.
#[derive(Clone, Debug)]
pub(super) struct PatternSegments<'p>(&'p str);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PatternSegment<'p> {
    /// A segment in the spelling of [`path::PathInterpretations`]. The segment after a significant
    /// final slash is empty.
    Literal(&'p str),
    /// One non-empty segment. `captured` is true if its value is captured.
    Wildcard { captured: bool },
    /// The final `**`.
    AnySuffix,
}

impl PathPattern {
    /// Parses a pattern. Literal segments are normalized like paths.
    ///
    /// # Errors
    /// Returns a message that states what is wrong.
    pub fn parse(text: &str, settings: &path::Settings) -> Result<Self, String> {
        let Some(rest) = text.strip_prefix('/') else {
            return Err("a path pattern starts with a slash".to_owned());
        };
        let mut words: Vec<&str> = rest.split('/').collect();
        let matches_any_suffix = words.last() == Some(&"**");
        let ends_with_slash = words.len() > 1 && words.last() == Some(&"");
        if matches_any_suffix
            || (ends_with_slash && settings.normalize && settings.ignore_trailing_slash)
        {
            words.pop();
        }
        let last = words.len().saturating_sub(1);
        let mut text = String::new();
        for (at, word) in words.iter().enumerate() {
            text.push('/');
            text += &parse_word(word, at == last && !matches_any_suffix, settings)?;
        }
        if matches_any_suffix {
            text += ANY_PATH;
        }
        Ok(Self(text.into()))
    }

    pub fn matches(&self, path: &str) -> bool {
        self.match_segments(path, |_| {})
    }

    /// The number of values that [`PathPattern::captured_segments`] returns.
    pub fn capture_count(&self) -> usize {
        self.segments()
            .filter(|segment| matches!(segment, PatternSegment::Wildcard { captured: true }))
            .count()
    }

    /// Returns the segments captured by `{name}`, if the path matches.
    pub fn captured_segments<'p>(&self, path: &'p str) -> Option<SmallVec<[&'p str; 4]>> {
        let mut values = SmallVec::new();
        self.match_segments(path, |value| values.push(value))
            .then_some(values)
    }

    /// Whether this pattern matches every path that `other` matches.
    pub fn covers(&self, other: &Self) -> bool {
        let (mut own, mut others) = (self.segments(), other.segments());
        loop {
            match (own.next(), others.next()) {
                (Some(PatternSegment::AnySuffix), _) | (None, None) => return true,
                (Some(mine), Some(other)) if mine.covers(&other) => {}
                _ => return false,
            }
        }
    }

    /// Whether a literal segment contains ASCII letters.
    pub(super) fn has_letters(&self) -> bool {
        let is_letter = |byte: u8| byte.is_ascii_alphabetic();
        self.literal_segments()
            .any(|(_, word)| word.bytes().any(is_letter))
    }

    /// The segments that are no wildcards, with their positions.
    pub(super) fn literal_segments(&self) -> impl Iterator<Item = (usize, &str)> {
        let segments = self.segments().enumerate();
        segments.filter_map(|(position, segment)| match segment {
            PatternSegment::Literal(word) => Some((position, word)),
            _ => None,
        })
    }

    /// Whether the pattern is `/**`.
    pub fn matches_any_path(&self) -> bool {
        self.segments().next() == Some(PatternSegment::AnySuffix)
    }

    pub(super) fn segments(&self) -> PatternSegments<'_> {
        PatternSegments(&self.0)
    }

    fn match_segments<'p>(&self, path: &'p str, mut capture: impl FnMut(&'p str)) -> bool {
        let mut rest = path;
        for segment in self.segments() {
            let Some(tail) = rest.strip_prefix('/') else {
                return rest.is_empty() && segment == PatternSegment::AnySuffix;
            };
            let tail = match segment {
                PatternSegment::AnySuffix => return true,
                PatternSegment::Literal(literal) => tail.strip_prefix(literal),
                PatternSegment::Wildcard { captured } => {
                    let (word, tail) = split_word(tail);
                    if captured {
                        capture(word);
                    }
                    (!word.is_empty()).then_some(tail)
                }
            };
            let Some(tail) = tail else {
                return false;
            };
            rest = tail;
        }
        rest.is_empty()
    }
}

/// The word of a segment in a [`PathPattern`].
fn parse_word(word: &str, is_last: bool, settings: &path::Settings) -> Result<Box<str>, String> {
    if word == "*" {
        return Ok(WILDCARD.into());
    }
    if let Some(name) = word
        .strip_prefix('{')
        .and_then(|word| word.strip_suffix('}'))
    {
        let is_valid_name =
            !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        return if is_valid_name {
            Ok(CAPTURE.into())
        } else {
            Err(format!(
                "{{{name}}} is no capture: only letters, digits and _ are allowed between the braces"
            ))
        };
    }
    if word == "**" {
        return Err("** is only allowed at the end".to_owned());
    }
    if word.contains(['*', '{', '}']) {
        return Err(format!(
            "{word:?} mixes text and a wildcard: a wildcard is a whole segment"
        ));
    }
    if settings.normalize {
        if matches!(word, "." | "..") {
            return Err(format!("{word:?} never occurs in a normalized path"));
        }
        if word.is_empty() && !is_last && settings.merge_slashes {
            return Err("an empty segment never occurs while path.merge_slashes is on".to_owned());
        }
        if word.contains(';') && settings.strip_parameters {
            return Err("a ; never occurs while path.path_parameters is \"strip\"".to_owned());
        }
    }
    if word.contains(['?', '#']) {
        return Err("a path has no query and no fragment (match a query with `query`)".to_owned());
    }
    Ok(path::canonicalize_segment(word, settings))
}

impl PatternSegment<'_> {
    fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Wildcard { .. }, Self::Wildcard { .. }) => true,
            (Self::Wildcard { .. }, Self::Literal(word)) => !word.is_empty(),
            (Self::Literal(mine), Self::Literal(others)) => mine == others,
            _ => false,
        }
    }
}

impl PatternSegments<'_> {
    /// The segments of `/**`.
    pub(super) const OF_ANY_PATH: Self = Self(ANY_PATH);
}

impl<'p> Iterator for PatternSegments<'p> {
    type Item = PatternSegment<'p>;

    fn next(&mut self) -> Option<Self::Item> {
        let (word, tail) = split_word(self.0.strip_prefix('/')?);
        self.0 = tail;
        Some(match word {
            WILDCARD => PatternSegment::Wildcard { captured: false },
            CAPTURE => PatternSegment::Wildcard { captured: true },
            ANY_SUFFIX => PatternSegment::AnySuffix,
            literal => PatternSegment::Literal(literal),
        })
    }
}

/// Splits a path or pattern behind its first segment. The slash before that is removed already.
pub(super) fn split_word(text: &str) -> (&str, &str) {
    // Words are short: this is faster than `str::find`.
    let end = text.bytes().position(|byte| byte == b'/');
    end.and_then(|end| text.split_at_checked(end))
        .unwrap_or((text, ""))
}

#[cfg(test)]
mod tests {
    use super::super::path::Settings;
    use super::*;

    const DEFAULT_SETTINGS: Settings = Settings::DEFAULT;

    fn parse_pattern(text: &str) -> PathPattern {
        PathPattern::parse(text, &DEFAULT_SETTINGS).unwrap()
    }

    #[test]
    fn patterns_match_exact_wildcard_and_suffix_paths() {
        for (text, hits, misses) in [
            ("/a/b", vec!["/a/b"], vec!["/a", "/a/b/c", "/a/c"]),
            ("/a/*", vec!["/a/b"], vec!["/a", "/a/b/c", "/a/"]),
            ("/a/{id}/c", vec!["/a/x/c"], vec!["/a/c", "/a/x/y/c"]),
            ("/a/**", vec!["/a", "/a/b", "/a/b/c"], vec!["/", "/ab"]),
            ("/**", vec!["/", "/a", "/a/b"], vec![]),
            ("/", vec!["/"], vec!["/a"]),
            ("/a/b/", vec!["/a/b"], vec!["/a"]),
            ("/%61", vec!["/a"], vec!["/%61"]),
        ] {
            for path in hits {
                assert!(
                    parse_pattern(text).matches(path),
                    "{text} should match {path}"
                );
            }
            for path in misses {
                assert!(
                    !parse_pattern(text).matches(path),
                    "{text} should not match {path}"
                );
            }
        }
    }

    #[test]
    fn captures_are_the_named_segments() {
        let found = parse_pattern("/api/{service}/*/{id}/**");
        assert_eq!(found.capture_count(), 2);
        assert_eq!(
            found
                .captured_segments("/api/pay/v1/42/x")
                .unwrap()
                .as_slice(),
            ["pay", "42"]
        );
        assert_eq!(found.captured_segments("/api/pay/v1"), None);
    }

    #[test]
    fn rejects_impossible_patterns_with_a_reason() {
        for (text, reason) in [
            ("a", "slash"),
            ("/a/**/b", "only allowed at the end"),
            ("/a/**/", "only allowed at the end"),
            ("/a*", "whole segment"),
            ("/{}", "no capture"),
            ("/a//b", "merge_slashes"),
            ("/a/../b", "normalized"),
            ("/a;b", "path_parameters"),
            ("/a?b=1", "query"),
        ] {
            let error = PathPattern::parse(text, &DEFAULT_SETTINGS).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
