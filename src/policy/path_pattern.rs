//! Path patterns, and an index that finds the patterns that match a path.

use super::path;
use foldhash::HashMap;
use smallvec::SmallVec;

/// A path pattern. `/a/b` is exact, `{name}` and `*` match one segment, and a final `**` matches
/// any number of segments.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PathPattern {
    segments: Vec<PatternSegment>,
    /// Whether the pattern ends in `**`.
    matches_any_suffix: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum PatternSegment {
    /// A segment in the spelling of [`path::PathInterpretations`]. The segment after a significant
    /// final slash is empty.
    Literal(Box<str>),
    /// One non-empty segment. `captured` is true if its value is captured.
    Wildcard { captured: bool },
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
        let segments = words
            .iter()
            .enumerate()
            .map(|(at, word)| {
                PatternSegment::parse(word, at == last && !matches_any_suffix, settings)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            segments,
            matches_any_suffix,
        })
    }

    pub fn matches(&self, path: &str) -> bool {
        self.match_segments(path, |_| {})
    }

    /// The number of values that [`PathPattern::captured_segments`] returns.
    pub fn capture_count(&self) -> usize {
        self.segments
            .iter()
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
        let long_enough = match (self.matches_any_suffix, other.matches_any_suffix) {
            (false, true) => false,
            (false, false) => self.segments.len() == other.segments.len(),
            (true, _) => self.segments.len() <= other.segments.len(),
        };
        long_enough
            && self
                .segments
                .iter()
                .zip(&other.segments)
                .all(|(mine, others)| mine.covers(others))
    }

    /// Whether a literal segment contains ASCII letters.
    pub(super) fn has_letters(&self) -> bool {
        let is_letter = |byte: u8| byte.is_ascii_alphabetic();
        self.literal_segments()
            .any(|(_, word)| word.bytes().any(is_letter))
    }

    /// The segments that are no wildcards, with their positions.
    pub(super) fn literal_segments(&self) -> impl Iterator<Item = (usize, &str)> {
        let segments = self.segments.iter().enumerate();
        segments.filter_map(|(position, segment)| match segment {
            PatternSegment::Literal(word) => Some((position, &**word)),
            PatternSegment::Wildcard { .. } => None,
        })
    }

    /// Whether the pattern is `/**`.
    pub fn matches_any_path(&self) -> bool {
        self.matches_any_suffix && self.segments.is_empty()
    }

    fn match_segments<'p>(&self, path: &'p str, mut capture: impl FnMut(&'p str)) -> bool {
        let mut words = split_segments(path);
        for segment in &self.segments {
            let Some(word) = words.next() else {
                return false;
            };
            match segment {
                PatternSegment::Literal(literal) if **literal == *word => {}
                PatternSegment::Wildcard { captured } if !word.is_empty() => {
                    if *captured {
                        capture(word);
                    }
                }
                _ => return false,
            }
        }
        self.matches_any_suffix || words.next().is_none()
    }
}

impl PatternSegment {
    fn parse(word: &str, is_last: bool, settings: &path::Settings) -> Result<Self, String> {
        if word == "*" {
            return Ok(Self::Wildcard { captured: false });
        }
        if let Some(name) = word
            .strip_prefix('{')
            .and_then(|word| word.strip_suffix('}'))
        {
            let is_valid_name =
                !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
            return if is_valid_name {
                Ok(Self::Wildcard { captured: true })
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
                return Err(
                    "an empty segment never occurs while path.merge_slashes is on".to_owned(),
                );
            }
            if word.contains(';') && settings.strip_parameters {
                return Err("a ; never occurs while path.path_parameters is \"strip\"".to_owned());
            }
        }
        if word.contains(['?', '#']) {
            return Err(
                "a path has no query and no fragment (match a query with `query`)".to_owned(),
            );
        }
        Ok(Self::Literal(path::canonicalize_segment(word, settings)))
    }

    fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Wildcard { .. }, Self::Wildcard { .. }) => true,
            (Self::Wildcard { .. }, Self::Literal(word)) => !word.is_empty(),
            (Self::Literal(mine), Self::Literal(others)) => mine == others,
            (Self::Literal(_), Self::Wildcard { .. }) => false,
        }
    }
}

type PathSegments<'p> = std::str::Split<'p, char>;

fn split_segments(path: &str) -> PathSegments<'_> {
    path.strip_prefix('/').unwrap_or(path).split('/')
}

/// A trie that finds all patterns that match a path. The cost grows with the path's length, not
/// with the number of patterns.
#[derive(Debug, Default)]
pub(super) struct PathIndex {
    literals: HashMap<Box<str>, PathIndex>,
    wildcard: Option<Box<PathIndex>>,
    /// Ids of the patterns that end at this node.
    terminal_ids: Vec<u32>,
    /// Ids of the patterns that end at this node with `**`.
    suffix_wildcard_ids: Vec<u32>,
}

impl PathIndex {
    /// Inserts patterns with one id. No pattern stands for any path.
    pub(super) fn insert(&mut self, patterns: &[PathPattern], id: u32) {
        if patterns.is_empty() {
            self.suffix_wildcard_ids.push(id);
        }
        for pattern in patterns {
            let mut node = &mut *self;
            for segment in &pattern.segments {
                node = match segment {
                    PatternSegment::Literal(word) => node.literals.entry(word.clone()).or_default(),
                    PatternSegment::Wildcard { .. } => node.wildcard.get_or_insert_default(),
                };
            }
            if pattern.matches_any_suffix {
                node.suffix_wildcard_ids.push(id)
            } else {
                node.terminal_ids.push(id)
            }
        }
    }

    /// Adds the ids of all matching patterns to `found`, unordered and possibly with duplicates.
    pub(super) fn find_matches(&self, path: &str, found: &mut SmallVec<[u32; 16]>) {
        self.collect_matches(split_segments(path), found);
    }

    fn collect_matches(&self, mut rest: PathSegments<'_>, found: &mut SmallVec<[u32; 16]>) {
        found.extend(self.suffix_wildcard_ids.iter().copied());
        let Some(word) = rest.next() else {
            found.extend(self.terminal_ids.iter().copied());
            return;
        };
        if let Some(child) = self.literals.get(word) {
            child.collect_matches(rest.clone(), found);
        }
        if let Some(child) = self.wildcard.as_ref().filter(|_| !word.is_empty()) {
            child.collect_matches(rest, found);
        }
    }
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

    proptest::proptest! {
        #[test]
        fn the_index_finds_the_same_patterns_as_a_scan(
            patterns in proptest::collection::vec("/([ab*]|\\{x\\})(/([ab*]|\\{x\\})){0,3}(/\\*\\*)?", 1..12),
            path in "/[ab](/[abc]){0,4}",
        ) {
            let patterns: Vec<PathPattern> = patterns.iter().map(|text| parse_pattern(text)).collect();
            let mut index = PathIndex::default();
            for (id, pattern) in patterns.iter().enumerate() {
                index.insert(std::slice::from_ref(pattern), u32::try_from(id).unwrap());
            }
            let mut found = SmallVec::new();
            index.find_matches(&path, &mut found);
            found.sort_unstable();
            found.dedup();
            let scanned: Vec<u32> = (0..).zip(&patterns).filter(|(_, p)| p.matches(&path)).map(|(id, _)| id).collect();
            proptest::prop_assert_eq!(found.as_slice(), scanned.as_slice());
        }
    }
}
