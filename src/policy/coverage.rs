//! Coverage tests for `check`: they detect policies that an earlier policy makes unreachable. An
//! index finds the few matchers that may cover another one, so that thousands need no comparison in
//! pairs.
//!
//! All results are conservative: `true` is certain, `false` may mean unknown. Two regular
//! expressions, for example, count as equal only if their texts are equal.

use super::matcher::RequiredValue;
use super::{AcceptedEntries, KeyPart, Matcher, PartCondition, PathPattern};
use foldhash::HashMap;
use ipnet::IpNet;
use std::iter;

impl Matcher {
    /// Whether these conditions certainly match every request that `other` matches.
    pub fn covers(&self, other: &Self) -> bool {
        covers_any(&self.any, &other.any)
            && self.accepts_entries_of(other)
            && self.conditions.iter().all(|one| other.implies(one))
            && match (&self.not, &other.not) {
                (None, _) => true,
                (Some(not), Some(others)) => others.covers(not),
                (Some(_), None) => false,
            }
    }

    /// Whether a condition certainly holds if these conditions do.
    fn implies(&self, condition: &PartCondition) -> bool {
        let mut own = self.conditions.iter();
        condition.always_holds() || own.any(|own| condition.is_implied_by(own))
    }

    /// Whether no entry of a descriptor beside those of the conditions makes a difference.
    fn accepts_entries_of(&self, other: &Self) -> bool {
        match (self.accepted_entries, other.accepted_entries) {
            (Some(AcceptedEntries::Listed), Some(AcceptedEntries::Listed)) => {
                self.entries().count() == other.entries().count()
            }
            (Some(AcceptedEntries::Any), Some(_))
            | (
                Some(AcceptedEntries::More),
                Some(AcceptedEntries::Listed | AcceptedEntries::More),
            )
            | (None, None) => true,
            _ => false,
        }
    }

    /// Whether `not` excludes every request that the other conditions match.
    pub fn never_matches(&self) -> bool {
        self.not.as_deref().is_some_and(|not| {
            not.covers(&Self {
                not: None,
                ..self.clone()
            })
        })
    }

    /// Returns the conditions on entries that both matchers have in common, the stricter of each
    /// two, if the matchers match different sets of descriptors, but certainly some descriptor
    /// both. `None` also if one accepts more entries, or matches all descriptors of its domain:
    /// such limits are meant to apply together.
    pub fn descriptor_overlap(&self, other: &Self) -> Option<Vec<PartCondition>> {
        if self.accepted_entries != Some(AcceptedEntries::Listed)
            || !self.accepts_entries_of(other)
            || !self.any.is_empty()
            || !other.any.is_empty()
        {
            return None;
        }
        let stricter = |one: &PartCondition| {
            let other = other.entries().find(|other| other.part == one.part)?;
            match () {
                () if one.is_implied_by(other) => Some(other.clone()),
                () if other.is_implied_by(one) => Some(one.clone()),
                () => None,
            }
        };
        let common: Vec<_> = self.entries().map(stricter).collect::<Option<_>>()?;
        let domain = [self, other].map(|one| one.condition_on(&KeyPart::DescriptorDomain));
        let has_common_domain = match domain {
            [Some(mine), Some(others)] => mine == others,
            _ => true,
        };
        if !has_common_domain || (self.covers(other) && other.covers(self)) {
            return None;
        }
        let domain = domain.into_iter().flatten().map(|condition| PartCondition {
            part: KeyPart::DescriptorDomain,
            condition: condition.clone(),
        });
        let intersection = Self {
            conditions: domain.chain(common.clone()).collect(),
            accepted_entries: Some(AcceptedEntries::Listed),
            ..Self::default()
        };
        let is_excluded_by =
            |not: &Option<Box<Self>>| not.as_ref().is_some_and(|not| not.covers(&intersection));
        (!is_excluded_by(&self.not) && !is_excluded_by(&other.not)).then_some(common)
    }
}

/// Whether each matcher of `others` is covered by one of `mine`; an empty `mine` covers all.
fn covers_any(mine: &[Matcher], others: &[Matcher]) -> bool {
    if mine.is_empty() || others.is_empty() {
        return mine.is_empty();
    }
    let index = CoverageIndex::new(mine.iter().collect(), |one| one);
    let is_covered = |other| index.candidates(other).any(|one| one.covers(other));
    others.iter().all(is_covered)
}

/// Items with matchers, each found by the condition that it shares with the fewest others.
#[derive(Debug)]
pub struct CoverageIndex<'m, T> {
    items: Vec<T>,
    by_value: HashMap<RequiredValue<'m>, Vec<usize>>,
    unindexed: Vec<usize>,
}

impl<'m, T> CoverageIndex<'m, T> {
    pub fn new(items: Vec<T>, matcher: impl Fn(&T) -> &'m Matcher) -> Self {
        let conditions: Vec<_> = items
            .iter()
            .map(|one| required_values(matcher(one)))
            .collect();
        let rarest = find_rarest_conditions(conditions);
        let mut by_value: HashMap<_, Vec<usize>> = HashMap::default();
        let mut unindexed = Vec::new();
        for (index, alternatives) in rarest.into_iter().enumerate() {
            match alternatives {
                Some(values) => values
                    .into_iter()
                    .for_each(|value| by_value.entry(value).or_default().push(index)),
                None => unindexed.push(index),
            }
        }
        Self {
            items,
            by_value,
            unindexed,
        }
    }

    /// All items whose matcher covers `other`, and usually few further ones, in their order. Finds
    /// each on demand: thousands may be candidates for each of thousands.
    pub fn candidates<'a>(
        &'a self,
        other: &'a Matcher,
    ) -> impl Iterator<Item = &'a T> + use<'a, 'm, T> {
        let values = offered_values(other).into_iter();
        let lists = values.filter_map(|value| self.by_value.get(&value));
        let lists = lists.chain([&self.unindexed]).map(Vec::as_slice);
        merge_ascending(lists.collect()).filter_map(|index| self.items.get(index))
    }
}

/// The numbers of ascending lists, in order, each once.
pub fn merge_ascending(mut lists: Vec<&[usize]>) -> impl Iterator<Item = usize> {
    iter::from_fn(move || {
        let next = lists
            .iter()
            .filter_map(|list| list.first())
            .min()
            .copied()?;
        for list in &mut lists {
            while let Some(rest) = list.strip_prefix(&[next]) {
                *list = rest;
            }
        }
        Some(next)
    })
}

/// The condition of each matcher that it shares with the fewest others: the accepted values.
/// `None` for a matcher without conditions.
pub(super) fn find_rarest_conditions(
    matchers: Vec<Vec<Vec<RequiredValue<'_>>>>,
) -> Vec<Option<Vec<RequiredValue<'_>>>> {
    let mut counts: HashMap<RequiredValue<'_>, usize> = HashMap::default();
    for value in matchers.iter().flatten().flatten() {
        *counts.entry(*value).or_default() += 1;
    }
    let most = |values: &Vec<_>| values.iter().map(|value| counts.get(value).copied()).max();
    let rarest = |conditions: Vec<_>| conditions.into_iter().min_by_key(most);
    matchers.into_iter().map(rarest).collect()
}

/// The accepted values of each condition that has such. What a matcher matches, and each matcher
/// that it covers, has one of the values of every condition.
pub(super) fn required_values(matcher: &Matcher) -> Vec<Vec<RequiredValue<'_>>> {
    let conditions = matcher.conditions.iter();
    let lists = conditions.flat_map(PartCondition::required_values);
    // A value of each alternative; none if one has no condition with values.
    let first = |one| required_values(one).into_iter().next();
    let firsts: Option<Vec<Vec<_>>> = matcher.any.iter().map(first).collect();
    let lists = lists.chain(firsts.map(|firsts| firsts.concat()));
    lists.filter(|values| !values.is_empty()).collect()
}

/// Values of which each condition of a covering matcher requires one.
fn offered_values(matcher: &Matcher) -> Vec<RequiredValue<'_>> {
    let mut offered: Vec<_> = required_values(matcher)
        .into_iter()
        .flat_map(first_value)
        .collect();
    if let Some(one) = matcher.any.first() {
        offered.extend(offered_values(one));
    }
    let path = matcher.path_patterns().first();
    let segments = path.into_iter().flat_map(PathPattern::literal_segments);
    offered.extend(segments.map(|(position, word)| RequiredValue::Segment(position, word)));
    offered
}

/// The first of a condition's values, and wider ones that include it.
fn first_value(values: Vec<RequiredValue<'_>>) -> Vec<RequiredValue<'_>> {
    let Some(&first) = values.first() else {
        return Vec::new();
    };
    match first {
        RequiredValue::Value(part @ KeyPart::Host, name) => {
            let dots = name.match_indices('.');
            let suffixes = dots.filter_map(|(at, _)| name.get(at..));
            let suffixes = suffixes.map(|suffix| RequiredValue::Value(part, suffix));
            suffixes.chain([first]).collect()
        }
        RequiredValue::Network(net) => iter::successors(Some(net), IpNet::supernet)
            .map(RequiredValue::Network)
            .collect(),
        RequiredValue::Value(part, _) => vec![first, RequiredValue::Regex(part)],
        _ => vec![first],
    }
}

#[cfg(test)]
mod tests {
    use super::super::path::Settings;
    use super::super::{ConditionRegex, HostPattern, PathPattern, ValueCondition};
    use super::*;
    use crate::policy::descriptor::tests::{make_descriptor_matcher, matcher_with};
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
        let path = |texts: &[&str]| {
            let patterns = texts.iter().map(|text| parse_pattern(text)).collect();
            matcher_with(KeyPart::WholePath, ValueCondition::Paths(patterns))
        };
        assert!(
            all.covers(&path(&["/a"]))
                && !path(&["/a"]).covers(&all)
                && path(&["/**"]).covers(&all)
        );
        assert!(path(&["/a", "/b/**"]).covers(&path(&["/b/c", "/a"])));
        assert!(!path(&["/a", "/b/**"]).covers(&path(&["/b/c", "/c"])));

        let methods =
            |list: &[Method]| matcher_with(KeyPart::Method, ValueCondition::from_methods(list));
        assert!(methods(&[Method::GET]).covers(&methods(&[Method::HEAD])));
        assert!(!methods(&[Method::HEAD]).covers(&methods(&[Method::GET])));
        assert!(!methods(&[Method::GET]).covers(&all));

        let hosts = |list: &[&str]| {
            let hosts = list.iter().map(|text| HostPattern::parse(text).unwrap());
            matcher_with(KeyPart::Host, ValueCondition::Hosts(hosts.collect()))
        };
        assert!(hosts(&["*.example.com"]).covers(&hosts(&["a.example.com", "*.b.example.com"])));
        assert!(!hosts(&["*.example.com"]).covers(&hosts(&["example.com"])));

        let header = |condition: ValueCondition| {
            matcher_with(KeyPart::Header("x-a".parse().unwrap()), condition)
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

    #[test]
    fn general_descriptor_conditions_cover_specific_ones() {
        let all = make_descriptor_matcher(None, None);
        let edge = make_descriptor_matcher(Some("edge"), None);
        let any = make_descriptor_matcher(Some("edge"), Some(&[("a", None)]));
        let one = make_descriptor_matcher(Some("edge"), Some(&[("a", Some("1"))]));
        for (wide, narrow) in [(&all, &edge), (&edge, &any), (&any, &one), (&all, &one)] {
            assert!(wide.covers(narrow) && !narrow.covers(wide));
        }
        let two = make_descriptor_matcher(Some("edge"), Some(&[("a", None), ("b", None)]));
        assert!(!any.covers(&two) && !two.covers(&any));
        let subset = |matcher: &Matcher| Matcher {
            accepted_entries: Some(AcceptedEntries::More),
            ..matcher.clone()
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
