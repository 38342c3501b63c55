//! Coverage tests for `check`: they detect policies that an earlier policy makes unreachable.
//!
//! All results are conservative: `true` is certain, `false` may mean unknown. Two regular
//! expressions, for example, count as equal only if their texts are equal.

use super::{
    CoverageIndex, DescriptorConditions, HostPattern, Matcher, MethodSet, PartCondition,
    PathPattern, ValueCondition,
};
use foldhash::HashSet;
use std::hash::Hash;

/// Lists up to this length are compared without a table of their values.
const MAX_SCANNED_ALTERNATIVES: usize = 16;

impl Matcher {
    /// Whether these conditions certainly match every request that `other` matches.
    pub fn covers(&self, other: &Self) -> bool {
        // Without `..`: a new condition does not compile until it is compared here.
        let Self {
            methods,
            hosts,
            paths: _,
            path_regex: _,
            client_ips,
            values,
            descriptor_conditions,
            any,
            not: _,
        } = self;
        if !covers_any(any, &other.any) {
            return false;
        }
        match (descriptor_conditions, &other.descriptor_conditions) {
            (None, None) => {}
            (Some(mine), Some(others)) => {
                return mine.covers(others) && self.excludes_no_more_than(other);
            }
            _ => return false,
        }
        methods.covers(&other.methods)
            && covers_alternatives(hosts, &other.hosts, HostPattern::covers)
            && self.covers_paths(other)
            && covers_path_regex(self, other)
            && are_conditions_implied(values, &other.values)
            && covers_alternatives(client_ips, &other.client_ips, |net, inner| {
                net.contains(inner)
            })
            && self.excludes_no_more_than(other)
    }

    fn excludes_no_more_than(&self, other: &Self) -> bool {
        match (&self.not, &other.not) {
            (None, _) => true,
            (Some(not), Some(others)) => others.covers(not),
            (Some(_), None) => false,
        }
    }

    /// Whether `not` excludes every request that the other conditions match.
    pub fn never_matches(&self) -> bool {
        let covers_all_without_exclusion = |not: &Self| {
            not.covers(&Self {
                not: None,
                ..self.clone()
            })
        };
        self.not
            .as_deref()
            .is_some_and(covers_all_without_exclusion)
    }

    /// Returns the conditions that both matchers have in common if they match different sets of
    /// descriptors, but certainly some descriptor both. `None` also if one matches all descriptors
    /// of its domain: a limit for a whole domain is meant to be an additional one.
    pub fn descriptor_overlap(&self, other: &Self) -> Option<Vec<PartCondition>> {
        let (mine, others) = (
            self.descriptor_conditions.as_ref()?,
            other.descriptor_conditions.as_ref()?,
        );
        let has_common_domain =
            mine.domain.is_none() || others.domain.is_none() || mine.domain == others.domain;
        let common = mine.common_entries(others)?;
        let has_alternatives = !self.any.is_empty() || !other.any.is_empty();
        if !has_common_domain || has_alternatives || (self.covers(other) && other.covers(self)) {
            return None;
        }
        let intersection = Self {
            descriptor_conditions: Some(DescriptorConditions {
                domain: mine.domain.clone().or_else(|| others.domain.clone()),
                entries: Some(common.clone()),
                accepts_more_entries: false,
            }),
            ..Self::default()
        };
        let is_excluded_by =
            |not: &Option<Box<Self>>| not.as_ref().is_some_and(|not| not.covers(&intersection));
        (!is_excluded_by(&self.not) && !is_excluded_by(&other.not)).then_some(common)
    }

    fn covers_paths(&self, other: &Self) -> bool {
        match other.paths.is_empty() {
            true => self.paths.is_empty() || self.paths.iter().any(PathPattern::matches_any_path),
            false => covers_alternatives(&self.paths, &other.paths, PathPattern::covers),
        }
    }
}

/// Whether each of `others` is covered by one of `mine`. An empty `mine` covers all.
fn covers_alternatives<T: Eq + Hash>(
    mine: &[T],
    others: &[T],
    covers: impl Fn(&T, &T) -> bool,
) -> bool {
    // Thousands of values are usually equal ones.
    let long = mine.len() > MAX_SCANNED_ALTERNATIVES;
    let equals: HashSet<&T> = long.then_some(mine).into_iter().flatten().collect();
    let is_covered = |other| equals.contains(other) || mine.iter().any(|one| covers(one, other));
    mine.is_empty() || (!others.is_empty() && others.iter().all(is_covered))
}

/// Whether each matcher of `others` is covered by one of `mine`, as for [`covers_alternatives`].
fn covers_any(mine: &[Matcher], others: &[Matcher]) -> bool {
    if mine.is_empty() || others.is_empty() {
        return mine.is_empty();
    }
    let index = CoverageIndex::new(mine.iter().collect(), |one| one);
    let is_covered = |other| index.candidates(other).any(|one| one.covers(other));
    others.iter().all(is_covered)
}

fn covers_path_regex(mine: &Matcher, other: &Matcher) -> bool {
    match (&mine.path_regex, &other.path_regex) {
        (None, _) => true,
        (Some(mine), Some(others)) => mine == others,
        (Some(_), None) => false,
    }
}

impl DescriptorConditions {
    fn covers(&self, other: &Self) -> bool {
        let domain = self.domain.is_none() || self.domain == other.domain;
        domain
            && match (&self.entries, &other.entries) {
                (None, _) => true,
                (Some(_), None) => false,
                (Some(mine), Some(others)) => {
                    let has_same_names = mine.len() == others.len() && !other.accepts_more_entries;
                    (self.accepts_more_entries || has_same_names)
                        && are_conditions_implied(mine, others)
                }
            }
    }
}

impl DescriptorConditions {
    /// The stricter condition on each entry, if both conditions list the same entries and no two
    /// conditions on an entry contradict each other. `None` if one accepts more entries: such
    /// limits are meant to apply together.
    fn common_entries(&self, other: &Self) -> Option<Vec<PartCondition>> {
        if self.accepts_more_entries || other.accepts_more_entries {
            return None;
        }
        let (mine, others) = (self.entries.as_ref()?, other.entries.as_ref()?);
        let stricter = |one: &PartCondition| {
            let other = others.iter().find(|other| other.part == one.part)?;
            match () {
                () if one.condition.is_implied_by(&other.condition) => Some(other.clone()),
                () if other.condition.is_implied_by(&one.condition) => Some(one.clone()),
                () => None,
            }
        };
        (mine.len() == others.len())
            .then(|| mine.iter().map(stricter).collect())
            .flatten()
    }
}

/// Whether each condition of `mine` follows from one of `others`.
fn are_conditions_implied(mine: &[PartCondition], others: &[PartCondition]) -> bool {
    mine.iter().all(|one| {
        others
            .iter()
            .any(|other| one.part == other.part && one.condition.is_implied_by(&other.condition))
    })
}

impl ValueCondition {
    fn is_implied_by(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Present(true), Self::OneOf(_) | Self::Regex(_)) => true,
            (Self::Present(mine), Self::Present(others)) => mine == others,
            (Self::OneOf(mine), Self::OneOf(others)) => {
                covers_alternatives(mine, others, PartialEq::eq)
            }
            (Self::Regex(mine), Self::Regex(others)) => mine == others,
            (Self::Regex(mine), Self::OneOf(texts)) => texts.iter().all(|text| mine.is_match(text)),
            _ => false,
        }
    }
}

impl MethodSet {
    fn covers(&self, other: &Self) -> bool {
        self.is_any()
            || (!other.is_any() && other.as_slice().iter().all(|method| self.contains(method)))
    }
}

impl HostPattern {
    fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Exact(mine), Self::Exact(others)) => mine == others,
            (Self::Subdomains(_), Self::Exact(name)) => self.matches(name),
            (Self::Subdomains(mine), Self::Subdomains(others)) => others.ends_with(&**mine),
            (Self::Exact(_), Self::Subdomains(_)) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::path::Settings;
    use super::super::{ConditionRegex, KeyPart};
    use super::*;
    use http::Method;
    use regex::Regex;

    fn parse_pattern(text: &str) -> PathPattern {
        PathPattern::parse(text, &Settings::DEFAULT).unwrap()
    }

    #[test]
    fn general_patterns_cover_specific_ones() {
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
                parse_pattern(wide).covers(&parse_pattern(narrow)),
                "{wide} covers {narrow}"
            );
            assert!(
                wide == narrow
                    || !parse_pattern(narrow).covers(&parse_pattern(wide))
                    || wide.contains('{')
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
                !parse_pattern(one).covers(&parse_pattern(other)),
                "{one} does not cover {other}"
            );
        }
    }

    #[test]
    fn general_matchers_cover_specific_ones() {
        let all = Matcher::default();
        let path = |texts: &[&str]| Matcher {
            paths: texts.iter().map(|t| parse_pattern(t)).collect(),
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

        let header = |condition: ValueCondition| Matcher {
            values: vec![PartCondition {
                part: KeyPart::Header("x-a".parse().unwrap()),
                condition,
            }],
            ..Matcher::default()
        };
        let regex = |text: &str| ValueCondition::Regex(ConditionRegex(Regex::new(text).unwrap()));
        assert!(header(ValueCondition::Present(true)).covers(&header(ValueCondition::equals("1"))));
        assert!(header(regex("^a")).covers(&header(ValueCondition::equals("abc"))));
        let either = |alternatives: &[&Matcher]| Matcher {
            any: alternatives.iter().map(|one| (*one).clone()).collect(),
            ..Matcher::default()
        };
        let get = methods(&[Method::GET]);
        let get_or_host = either(&[&get, &hosts(&["example.com"])]);
        assert!(get_or_host.covers(&either(&[&hosts(&["example.com"])])));
        assert!(!either(&[&get]).covers(&get_or_host) && !get_or_host.covers(&all));
        assert!(all.covers(&get_or_host));
        let list = |values: &[&str]| {
            let values = values.iter().map(|value| Box::from(*value));
            header(ValueCondition::OneOf(values.collect()))
        };
        assert!(
            list(&["1", "2"]).covers(&list(&["2"])) && !list(&["2"]).covers(&list(&["1", "2"]))
        );
        assert!(header(regex("^a")).covers(&list(&["a", "ab"])));
        assert!(!header(regex("^a")).covers(&list(&["a", "b"])));
        assert!(!header(regex("^a")).covers(&header(regex("^ab"))));
        assert!(!header(ValueCondition::Present(false)).covers(&all));

        let except = |not: Matcher| Matcher {
            not: Some(Box::new(not)),
            ..Matcher::default()
        };
        assert!(except(path(&["/a"])).covers(&except(path(&["/a/**"]))));
        assert!(!except(path(&["/a/**"])).covers(&except(path(&["/a"]))));
        assert!(except(all.clone()).never_matches() && !except(path(&["/a"])).never_matches());
    }

    fn make_descriptor_conditions(
        domain: Option<&str>,
        entries: Option<&[(&str, Option<&str>)]>,
    ) -> DescriptorConditions {
        let entry = |(name, value): &(&str, Option<&str>)| PartCondition {
            part: KeyPart::DescriptorEntry((*name).into()),
            condition: value.map_or(ValueCondition::Present(true), |value| {
                ValueCondition::equals(value)
            }),
        };
        DescriptorConditions {
            domain: domain.map(Into::into),
            entries: entries.map(|entries| entries.iter().map(entry).collect()),
            accepts_more_entries: false,
        }
    }

    #[test]
    fn general_descriptor_conditions_cover_specific_ones() {
        let all = make_descriptor_conditions(None, None);
        let edge = make_descriptor_conditions(Some("edge"), None);
        let any = make_descriptor_conditions(Some("edge"), Some(&[("a", None)]));
        let one = make_descriptor_conditions(Some("edge"), Some(&[("a", Some("1"))]));
        for (wide, narrow) in [(&all, &edge), (&edge, &any), (&any, &one), (&all, &one)] {
            assert!(wide.covers(narrow) && !narrow.covers(wide));
        }
        let two = make_descriptor_conditions(Some("edge"), Some(&[("a", None), ("b", None)]));
        assert!(!any.covers(&two) && !two.covers(&any));
        let subset = |conditions: &DescriptorConditions| DescriptorConditions {
            accepts_more_entries: true,
            ..conditions.clone()
        };
        for (wide, narrow) in [
            (&subset(&any), &any),
            (&subset(&any), &two),
            (&subset(&any), &subset(&one)),
            (&subset(&any), &subset(&two)),
        ] {
            assert!(wide.covers(narrow) && !narrow.covers(wide));
        }
    }

    proptest::proptest! {
        /// A covering pattern must match every path that the covered pattern matches.
        #[test]
        fn a_covering_pattern_matches_every_path_of_the_covered_pattern(
            one in "/([ab*]|\\{x\\})(/([ab*]|\\{x\\})){0,2}(/\\*\\*)?",
            other in "/([ab*]|\\{x\\})(/([ab*]|\\{x\\})){0,2}(/\\*\\*)?",
            paths in proptest::collection::vec("(/[abc]){1,4}", 20),
        ) {
            let (one, other) = (parse_pattern(&one), parse_pattern(&other));
            if one.covers(&other) {
                for path in &paths {
                    proptest::prop_assert!(!other.matches(path) || one.matches(path), "{path}");
                }
            }
        }
    }
}
