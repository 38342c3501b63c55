//! Which conditions hold wherever others do. For `check`: what a policy before leaves for one behind.
//!
//! All answers are on the safe side: `true` is certain, `false` may only be unknown. Two regular expressions, for
//! instance, are the same only if they are written alike.

use super::{HostPattern, Matcher, MethodSet, Named, Override, PathPattern, Test};

impl Matcher {
    /// Whether every request that `other` matches is certainly matched by these conditions too.
    pub fn covers(&self, other: &Self) -> bool {
        match (&self.described, &other.described) {
            (None, None) => {}
            (Some(mine), Some(others)) => {
                return mine.covers(others) && self.excepts_no_more(other);
            }
            _ => return false,
        }
        self.methods.covers(&other.methods)
            && all_covered(&self.hosts, &other.hosts, HostPattern::covers)
            && self.covers_paths(other)
            && same_regex(self, other)
            && implied(&self.headers, &other.headers)
            && implied(&self.query, &other.query)
            && implied(&self.cookies, &other.cookies)
            && implied(&self.claims, &other.claims)
            && all_covered(&self.client_ips, &other.client_ips, |net, inner| {
                net.contains(inner)
            })
            && self.excepts_no_more(other)
    }

    fn excepts_no_more(&self, other: &Self) -> bool {
        match (&self.not, &other.not) {
            (None, _) => true,
            (Some(not), Some(others)) => others.covers(not),
            (Some(_), None) => false,
        }
    }

    /// Whether its own `not` takes away all that the other conditions let through.
    pub fn is_void(&self) -> bool {
        let without = |not: &Self| {
            not.covers(&Self {
                not: None,
                ..self.clone()
            })
        };
        self.not.as_deref().is_some_and(without)
    }

    fn covers_paths(&self, other: &Self) -> bool {
        match other.paths.is_empty() {
            true => self.paths.is_empty() || self.paths.iter().any(PathPattern::is_any_path),
            false => all_covered(&self.paths, &other.paths, PathPattern::covers),
        }
    }
}

impl Override {
    /// Whether it fits every key that `other` fits.
    pub fn covers(&self, other: &Self) -> bool {
        self.values.len() == other.values.len()
            && self
                .values
                .iter()
                .zip(&other.values)
                .all(|(mine, others)| mine.is_none() || mine == others)
    }
}

/// Whether each of the others' alternatives has one here that covers it. No alternatives: no condition.
fn all_covered<T>(mine: &[T], others: &[T], covers: impl Fn(&T, &T) -> bool) -> bool {
    mine.is_empty()
        || (!others.is_empty()
            && others
                .iter()
                .all(|other| mine.iter().any(|one| covers(one, other))))
}

fn same_regex(mine: &Matcher, other: &Matcher) -> bool {
    match (&mine.path_regex, &other.path_regex) {
        (None, _) => true,
        (Some(mine), Some(others)) => mine.as_str() == others.as_str(),
        (Some(_), None) => false,
    }
}

/// Whether each of our conditions follows from one of the others'.
pub(super) fn implied<N: PartialEq>(mine: &[Named<N>], others: &[Named<N>]) -> bool {
    mine.iter().all(|one| {
        others
            .iter()
            .any(|other| one.name == other.name && one.test.follows(&other.test))
    })
}

impl Test {
    fn follows(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Present(true), Self::Is(_) | Self::Regex(_)) => true,
            (Self::Present(mine), Self::Present(others)) => mine == others,
            (Self::Is(mine), Self::Is(others)) => mine == others,
            (Self::Regex(mine), Self::Regex(others)) => mine.as_str() == others.as_str(),
            (Self::Regex(mine), Self::Is(text)) => mine.is_match(text),
            _ => false,
        }
    }
}

impl MethodSet {
    fn covers(&self, other: &Self) -> bool {
        self.is_any()
            || (!other.is_any() && other.listed().iter().all(|method| self.contains(method)))
    }
}

impl HostPattern {
    fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Exact(mine), Self::Exact(others)) => mine == others,
            (Self::Below(_), Self::Exact(name)) => self.matches(name),
            (Self::Below(mine), Self::Below(others)) => others.ends_with(&**mine),
            (Self::Exact(_), Self::Below(_)) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::path::Settings;
    use super::*;
    use http::Method;
    use regex::Regex;

    fn pattern(text: &str) -> PathPattern {
        PathPattern::parse(text, &Settings::USUAL).unwrap()
    }

    #[test]
    fn a_pattern_covers_what_it_matches_and_more() {
        for (wide, narrow) in [
            ("/a/**", "/a/b"),
            ("/a/**", "/a/b/**"),
            ("/a/**", "/a"),
            ("/**", "/"),
            ("/a/*", "/a/b"),
            ("/a/{id}/c", "/a/*/c"),
            ("/*/b", "/a/b"),
        ] {
            assert!(
                pattern(wide).covers(&pattern(narrow)),
                "{wide} covers {narrow}"
            );
            assert!(
                wide == narrow || !pattern(narrow).covers(&pattern(wide)) || wide.contains('{')
            );
        }
        for (one, other) in [
            ("/a/*", "/a/**"),
            ("/a/b", "/a/*"),
            ("/a/b/**", "/a/**"),
            ("/a/**", "/b/**"),
            ("/*", "/"),
        ] {
            assert!(
                !pattern(one).covers(&pattern(other)),
                "{one} does not cover {other}"
            );
        }
    }

    #[test]
    fn conditions_cover_what_asks_for_more() {
        let all = Matcher::default();
        let path = |texts: &[&str]| Matcher {
            paths: texts.iter().map(|t| pattern(t)).collect(),
            ..Matcher::default()
        };
        assert!(
            all.covers(&path(&["/a"]))
                && !path(&["/a"]).covers(&all)
                && path(&["/**"]).covers(&all)
        );
        assert!(path(&["/a", "/b/**"]).covers(&path(&["/b/c", "/a"])));
        assert!(!path(&["/a", "/b/**"]).covers(&path(&["/b/c", "/c"])));

        let methods = |list: &[Method]| Matcher {
            methods: MethodSet::new(list.to_vec()),
            ..Matcher::default()
        };
        assert!(methods(&[Method::GET]).covers(&methods(&[Method::HEAD])));
        assert!(!methods(&[Method::HEAD]).covers(&methods(&[Method::GET])));
        assert!(!methods(&[Method::GET]).covers(&all));

        let hosts = |list: &[&str]| Matcher {
            hosts: list
                .iter()
                .map(|text| HostPattern::parse(text).unwrap())
                .collect(),
            ..Matcher::default()
        };
        assert!(hosts(&["*.example.com"]).covers(&hosts(&["a.example.com", "*.b.example.com"])));
        assert!(!hosts(&["*.example.com"]).covers(&hosts(&["example.com"])));

        let header = |test: Test| Matcher {
            headers: vec![Named {
                name: "x-a".parse().unwrap(),
                test,
            }],
            ..Matcher::default()
        };
        let regex = |text: &str| Test::Regex(Regex::new(text).unwrap());
        assert!(header(Test::Present(true)).covers(&header(Test::Is("1".into()))));
        assert!(header(regex("^a")).covers(&header(Test::Is("abc".into()))));
        assert!(!header(regex("^a")).covers(&header(regex("^ab"))));
        assert!(!header(Test::Present(false)).covers(&all));

        let except = |not: Matcher| Matcher {
            not: Some(Box::new(not)),
            ..Matcher::default()
        };
        assert!(except(path(&["/a"])).covers(&except(path(&["/a/**"]))));
        assert!(!except(path(&["/a/**"])).covers(&except(path(&["/a"]))));
        assert!(except(all.clone()).is_void() && !except(path(&["/a"])).is_void());
    }

    proptest::proptest! {
        /// Certain means certain: no path may be matched by the covered pattern alone.
        #[test]
        fn what_is_covered_is_matched(
            one in "/([ab*]|\\{x\\})(/([ab*]|\\{x\\})){0,2}(/\\*\\*)?",
            other in "/([ab*]|\\{x\\})(/([ab*]|\\{x\\})){0,2}(/\\*\\*)?",
            paths in proptest::collection::vec("(/[abc]){1,4}", 20),
        ) {
            let (one, other) = (pattern(&one), pattern(&other));
            if one.covers(&other) {
                for path in &paths {
                    proptest::prop_assert!(!other.matches(path) || one.matches(path), "{path}");
                }
            }
        }
    }
}
