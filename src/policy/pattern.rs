//! Path patterns, and the index that finds the patterns which match a path without trying each.

use super::path;
use foldhash::HashMap;
use smallvec::SmallVec;

/// `/a/b` exact, `{name}` and `*` one segment, `**` (only last) any rest including none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathPattern {
    segments: Vec<Segment>,
    /// Ends in `**`.
    open: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    /// In the spelling of [`path::Readings`]; empty for what follows a last slash that matters.
    Literal(Box<str>),
    /// One segment that isn't empty; `true` if its value is captured.
    Any { captured: bool },
}

impl PathPattern {
    /// Reads a pattern as written; literals are normalized as paths are.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub fn parse(text: &str, settings: &path::Settings) -> Result<Self, String> {
        let Some(rest) = text.strip_prefix('/') else {
            return Err("a path pattern begins with a slash".to_owned());
        };
        let mut words: Vec<&str> = rest.split('/').collect();
        let open = words.last() == Some(&"**");
        let closed_by_slash = words.len() > 1 && words.last() == Some(&"");
        if open || (closed_by_slash && settings.normalize && settings.ignore_trailing_slash) {
            words.pop();
        }
        let last = words.len().saturating_sub(1);
        let segments = words
            .iter()
            .enumerate()
            .map(|(at, word)| Segment::parse(word, at == last && !open, settings))
            .collect::<Result<_, _>>()?;
        Ok(Self { segments, open })
    }

    pub fn matches(&self, path: &str) -> bool {
        self.walk(path, |_| {})
    }

    /// How many values [`PathPattern::captures`] gives.
    pub fn width(&self) -> usize {
        self.segments
            .iter()
            .filter(|segment| matches!(segment, Segment::Any { captured: true }))
            .count()
    }

    /// The segments at `{name}`s, if the path matches.
    pub fn captures<'p>(&self, path: &'p str) -> Option<SmallVec<[&'p str; 4]>> {
        let mut values = SmallVec::new();
        self.walk(path, |value| values.push(value))
            .then_some(values)
    }

    /// Whether every path that `other` matches is matched by this one.
    pub fn covers(&self, other: &Self) -> bool {
        let long_enough = match (self.open, other.open) {
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

    /// Whether it is `/**`.
    pub fn is_any_path(&self) -> bool {
        self.open && self.segments.is_empty()
    }

    fn walk<'p>(&self, path: &'p str, mut capture: impl FnMut(&'p str)) -> bool {
        let mut words = segments_of(path);
        for segment in &self.segments {
            let Some(word) = words.next() else {
                return false;
            };
            match segment {
                Segment::Literal(literal) if **literal == *word => {}
                Segment::Any { captured } if !word.is_empty() => {
                    if *captured {
                        capture(word);
                    }
                }
                _ => return false,
            }
        }
        self.open || words.next().is_none()
    }
}

impl Segment {
    fn parse(word: &str, last: bool, settings: &path::Settings) -> Result<Self, String> {
        if word == "*" {
            return Ok(Self::Any { captured: false });
        }
        if let Some(name) = word
            .strip_prefix('{')
            .and_then(|word| word.strip_suffix('}'))
        {
            let fits =
                !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
            return if fits {
                Ok(Self::Any { captured: true })
            } else {
                Err(format!(
                    "{{{name}}} is no capture: between the braces stand letters, digits and _"
                ))
            };
        }
        if word == "**" {
            return Err("** stands only at the end".to_owned());
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
            if word.is_empty() && !last && settings.merge_slashes {
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
        Ok(Self::Literal(path::canonical_segment(word, settings)))
    }

    fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Any { .. }, Self::Any { .. }) => true,
            (Self::Any { .. }, Self::Literal(word)) => !word.is_empty(),
            (Self::Literal(mine), Self::Literal(others)) => mine == others,
            (Self::Literal(_), Self::Any { .. }) => false,
        }
    }
}

type Words<'p> = std::str::Split<'p, char>;

fn segments_of(path: &str) -> Words<'_> {
    path.strip_prefix('/').unwrap_or(path).split('/')
}

/// Finds all patterns that match a path; the cost grows with the path, not with the number of patterns.
#[derive(Debug, Default)]
pub(super) struct PathIndex {
    nodes: Vec<Node>,
}

#[derive(Debug, Default)]
struct Node {
    literals: HashMap<Box<str>, usize>,
    any: Option<usize>,
    /// Patterns that end here.
    ends: Vec<u32>,
    /// Patterns that end here with `**`.
    open: Vec<u32>,
}

impl PathIndex {
    pub(super) fn insert(&mut self, pattern: &PathPattern, id: u32) {
        let mut at = self.ensure_root();
        for segment in &pattern.segments {
            at = self.child(at, segment);
        }
        if let Some(node) = self.nodes.get_mut(at) {
            if pattern.open {
                node.open.push(id)
            } else {
                node.ends.push(id)
            }
        }
    }

    /// Adds the ids of all patterns that match, in no order, some perhaps twice.
    pub(super) fn find(&self, path: &str, found: &mut SmallVec<[u32; 16]>) {
        if let Some(root) = self.nodes.first() {
            self.descend(root, segments_of(path), found);
        }
    }

    fn descend(&self, node: &Node, mut rest: Words<'_>, found: &mut SmallVec<[u32; 16]>) {
        found.extend_from_slice(&node.open);
        let Some(word) = rest.next() else {
            found.extend_from_slice(&node.ends);
            return;
        };
        if let Some(child) = node.literals.get(word).and_then(|at| self.nodes.get(*at)) {
            self.descend(child, rest.clone(), found);
        }
        if let Some(child) = node.any.and_then(|at| self.nodes.get(at))
            && !word.is_empty()
        {
            self.descend(child, rest, found);
        }
    }

    fn ensure_root(&mut self) -> usize {
        if self.nodes.is_empty() {
            self.nodes.push(Node::default());
        }
        0
    }

    fn child(&mut self, parent: usize, segment: &Segment) -> usize {
        let next = self.nodes.len();
        let Some(node) = self.nodes.get_mut(parent) else {
            return parent;
        };
        let at = match segment {
            Segment::Literal(word) => *node.literals.entry(word.clone()).or_insert(next),
            Segment::Any { .. } => *node.any.get_or_insert(next),
        };
        if at == next {
            self.nodes.push(Node::default());
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::super::path::Settings;
    use super::*;

    const USUAL: Settings = Settings::USUAL;

    fn pattern(text: &str) -> PathPattern {
        PathPattern::parse(text, &USUAL).unwrap()
    }

    #[test]
    fn patterns_match_what_they_say() {
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
                assert!(pattern(text).matches(path), "{text} should match {path}");
            }
            for path in misses {
                assert!(
                    !pattern(text).matches(path),
                    "{text} should not match {path}"
                );
            }
        }
    }

    #[test]
    fn captures_are_the_named_segments() {
        let found = pattern("/api/{service}/*/{id}/**");
        assert_eq!(found.width(), 2);
        assert_eq!(
            found.captures("/api/pay/v1/42/x").unwrap().as_slice(),
            ["pay", "42"]
        );
        assert_eq!(found.captures("/api/pay/v1"), None);
    }

    #[test]
    fn impossible_patterns_are_refused_with_the_reason() {
        for (text, reason) in [
            ("a", "slash"),
            ("/a/**/b", "only at the end"),
            ("/a*", "whole segment"),
            ("/{}", "no capture"),
            ("/a//b", "merge_slashes"),
            ("/a/../b", "normalized"),
            ("/a;b", "path_parameters"),
            ("/a?b=1", "query"),
        ] {
            let error = PathPattern::parse(text, &USUAL).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn the_index_finds_what_a_scan_finds(
            patterns in proptest::collection::vec("/([ab*]|\\{x\\})(/([ab*]|\\{x\\})){0,3}(/\\*\\*)?", 1..12),
            path in "/[ab](/[abc]){0,4}",
        ) {
            let patterns: Vec<PathPattern> = patterns.iter().map(|text| pattern(text)).collect();
            let mut index = PathIndex::default();
            for (id, pattern) in patterns.iter().enumerate() {
                index.insert(pattern, u32::try_from(id).unwrap());
            }
            let mut found = SmallVec::new();
            index.find(&path, &mut found);
            found.sort_unstable();
            found.dedup();
            let scanned: Vec<u32> = (0..).zip(&patterns).filter(|(_, p)| p.matches(&path)).map(|(id, _)| id).collect();
            proptest::prop_assert_eq!(found.as_slice(), scanned.as_slice());
        }
    }
}
