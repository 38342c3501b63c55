//! Finds the few matchers that may cover another one, so that thousands need no comparison in
//! pairs.

use super::conditions::RequiredValue;
use super::{KeyPart, Matcher, PartCondition, PathPattern};
use foldhash::HashMap;
use ipnet::IpNet;
use std::iter;

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
    let lists = lists.chain(required_alternatives(&matcher.any));
    lists.filter(|values| !values.is_empty()).collect()
}

/// A value of each alternative; `None` if one has no condition with values.
fn required_alternatives(any: &[Matcher]) -> Option<Vec<RequiredValue<'_>>> {
    let first = |one| required_values(one).into_iter().next();
    let firsts: Option<Vec<Vec<_>>> = any.iter().map(first).collect();
    Some(firsts?.concat())
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
        RequiredValue::Value(part, _) => vec![first, RequiredValue::AnyRegex(part)],
        _ => vec![first],
    }
}
