//! Overrides of a policy's limits for certain keys, as the configuration writes them.

use super::key_component::KeyDigests;
use super::key_template::KeyTemplate;
use super::named_limit::NamedLimit;
use super::part_values::KeyValues;
use super::policy_mode::PolicyMode;
use super::value_pattern::{PatternRank, ValuePattern};
use crate::limiter::Key;
use foldhash::fast::RandomState;
use indexmap::IndexMap;

/// Overrides of a policy. Of those that match a key, one with exact values replaces the policy's
/// limits; else the first by [`LimitOverride::rank`]; of equal ranks, the first in the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimitOverrides {
    entries: Vec<LimitOverride>,
    /// Index of the entries without a pattern, by [`Key::id`]. The lookup time must not grow with
    /// the number of entries, which may be thousands. In order: equal overrides print equally.
    exact_by_key_id: IndexMap<u128, usize, RandomState>,
    /// Indices of the entries with a pattern, in order of precedence.
    pattern_indices: Vec<usize>,
}

/// One entry of [`LimitOverrides`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitOverride {
    /// One per key position (see [`KeyTemplate::value_count`]).
    pub values: Vec<ValuePattern>,
    /// Empty: the limits of the policy.
    pub limits: Vec<NamedLimit>,
    pub rule: OverrideRule,
}

/// What a policy does with requests of a key that an override matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverrideRule {
    /// Limits them, in a mode of its own if any.
    Limit(Option<PolicyMode>),
    /// Does not limit them. Other policies still apply.
    Allow,
    /// Rejects them.
    Deny,
    /// Does not apply to them (`mode = "off"`).
    Off,
}

/// The limits of one key, and what the policy does with its requests.
#[derive(Clone, Copy, Debug)]
pub struct SelectedLimits<'t> {
    pub limits: &'t [NamedLimit],
    pub rule: OverrideRule,
}

impl<'t> SelectedLimits<'t> {
    /// The limits of a policy for a key without override.
    pub fn from_policy(limits: &'t [NamedLimit]) -> Self {
        Self {
            limits,
            rule: OverrideRule::Limit(None),
        }
    }

    /// The mode that applies to the key, in a policy of this mode.
    pub fn mode(&self, policy_mode: PolicyMode) -> PolicyMode {
        match self.rule {
            OverrideRule::Limit(Some(mode)) => mode,
            _ => policy_mode,
        }
    }
}

impl LimitOverrides {
    /// Creates the overrides of policy `name` with this key.
    pub fn new(name: &str, key: &KeyTemplate, entries: Vec<LimitOverride>) -> Self {
        let mut overrides = Self {
            entries,
            exact_by_key_id: IndexMap::default(),
            pattern_indices: Vec::new(),
        };
        for (index, entry) in overrides.entries.iter().enumerate() {
            match entry.exact_values() {
                Some(values) => {
                    let id = key
                        .build_key(name, &values, &mut KeyDigests::default())
                        .id();
                    overrides.exact_by_key_id.entry(id).or_insert(index);
                }
                None => overrides.pattern_indices.push(index),
            }
        }
        let entries = &overrides.entries;
        let rank = |index: &usize| entries.get(*index).map(LimitOverride::rank);
        overrides.pattern_indices.sort_by_key(rank);
        overrides
    }

    pub fn as_slice(&self) -> &[LimitOverride] {
        &self.entries
    }

    /// The modes of keys whose limits have a mode of their own.
    pub fn modes(&self) -> impl Iterator<Item = PolicyMode> {
        self.entries.iter().filter_map(|entry| match entry.rule {
            OverrideRule::Limit(mode) => mode,
            OverrideRule::Allow | OverrideRule::Deny | OverrideRule::Off => None,
        })
    }

    pub(super) fn limits_mut(&mut self) -> impl Iterator<Item = &mut NamedLimit> {
        self.entries.iter_mut().flat_map(|entry| &mut entry.limits)
    }

    pub(super) fn find_override(
        &self,
        key: &Key,
        values: &KeyValues<'_>,
    ) -> Option<&LimitOverride> {
        if self.entries.is_empty() {
            return None;
        }
        if let Some(index) = self.exact_by_key_id.get(&key.id()) {
            return self.entries.get(*index);
        }
        let patterns = self.pattern_indices.iter();
        let mut patterns = patterns.filter_map(|index| self.entries.get(*index));
        patterns.find(|entry| entry.matches_values(values))
    }
}

impl LimitOverride {
    /// Precedence among overrides with a pattern: compared by position, from the first.
    pub(super) fn rank(&self) -> Vec<PatternRank> {
        self.values.iter().map(ValuePattern::rank).collect()
    }

    /// The values, if none is a pattern.
    fn exact_values(&self) -> Option<KeyValues<'_>> {
        let exact = |value| Some(ValuePattern::as_exact(value)?.as_bytes().into());
        self.values
            .iter()
            .map(|value| exact(value).map(Some))
            .collect()
    }

    fn matches_values(&self, values: &KeyValues<'_>) -> bool {
        self.values.len() == values.len()
            && self
                .values
                .iter()
                .zip(values)
                .all(|(pattern, value)| pattern.matches(value.as_deref()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{KeyPart, client, path};
    use proptest::prelude::*;
    use std::cmp::Reverse;

    const CLIENT: fn() -> client::Settings = || client::Settings {
        trusted_proxies: Vec::new(),
        ip_header: http::HeaderName::from_static("x-forwarded-for"),
        ipv4_prefix: 32,
        ipv6_prefix: 64,
        nat64_prefixes: Vec::new(),
        rejects_ambiguous_query: true,
        rejects_ambiguous_cookie: true,
        value_checks: crate::policy::ValueChecks::ALL,
    };

    fn template(parts: &[&str]) -> KeyTemplate {
        let parts = parts.iter();
        let parts = parts.map(|text| KeyPart::parse(text, &path::Settings::DEFAULT).unwrap());
        KeyTemplate::new(parts.collect())
    }

    fn parse(key: &KeyTemplate, texts: &[String]) -> LimitOverride {
        let parse = |(at, text): (usize, &String)| {
            key.parse_value_pattern(at, text, &CLIENT(), &path::Settings::DEFAULT)
        };
        LimitOverride {
            values: texts
                .iter()
                .enumerate()
                .map(parse)
                .collect::<Result<_, _>>()
                .unwrap(),
            limits: Vec::new(),
            rule: OverrideRule::Allow,
        }
    }

    /// The index of the override that applies to these values.
    fn find(key: &KeyTemplate, entries: &[Vec<String>], values: &[&str]) -> Option<usize> {
        let parsed = entries.iter().map(|texts| parse(key, texts)).collect();
        let overrides = LimitOverrides::new("p", key, parsed);
        let values: KeyValues<'_> = values
            .iter()
            .map(|text| Some(text.as_bytes().into()).filter(|_| !text.is_empty()))
            .collect();
        let built = key.build_key("p", &values, &mut KeyDigests::default());
        let found = overrides.find_override(&built, &values)?;
        overrides
            .as_slice()
            .iter()
            .position(|entry| std::ptr::eq(entry, found))
    }

    fn find_one(entries: &[&str], value: &str) -> Option<usize> {
        let entries: Vec<_> = entries
            .iter()
            .map(|text| vec![(*text).to_owned()])
            .collect();
        find(&template(&["header:x"]), &entries, &[value])
    }

    #[test]
    fn exact_keys_come_before_patterns_and_the_longest_pattern_before_others() {
        let entries = ["*", "acme-*", "acme-e*", "acme-eu", r"lit\*", "*-us"];
        for (value, expected) in [
            ("acme-eu", 3),
            ("acme-east", 2),
            ("acme-us", 1),
            ("beta-us", 5),
            ("lit*", 4),
            ("literal", 0),
            ("", 0),
        ] {
            assert_eq!(find_one(&entries, value), Some(expected), "{value}");
        }
        assert_eq!(find_one(&["acme-*"], "beta"), None);
        assert_eq!(
            find_one(&["*b", "a*"], "ab"),
            Some(0),
            "of equals, the first"
        );
    }

    #[test]
    fn positions_are_compared_from_the_first() {
        let key = template(&["header:x", "header:y"]);
        let entries = [["*", "b"], ["a*", "*"], ["a", "*"], ["*", "*"]];
        let entries = entries.map(|texts| texts.map(str::to_owned).to_vec());
        for (values, expected) in [
            (["a", "b"], 2),
            (["ax", "b"], 1),
            (["x", "b"], 0),
            (["x", "y"], 3),
        ] {
            assert_eq!(find(&key, &entries, &values), Some(expected), "{values:?}");
        }
    }

    proptest! {
        /// The definition: of all that match, exact ones first, then by rank, then by order.
        #[test]
        fn the_lookup_equals_a_search_of_all(
            texts in prop::collection::vec(prop::collection::vec("[ab*]{1,4}", 2), 0..8),
            values in prop::collection::vec("[ab]{1,4}", 2),
        ) {
            let key = template(&["header:x", "header:y"]);
            let literal_len = |text: &String| text.replace('*', "").len();
            let rank = |text: &String| match text.as_str() {
                "*" => (2, Reverse(0)),
                text_with if text_with.contains('*') => (1, Reverse(literal_len(text))),
                _ => (0, Reverse(0)),
            };
            let matches = |text: &String, value: &String| {
                let pattern = regex::Regex::new(&format!("^{}$", text.replace('*', ".*"))).unwrap();
                pattern.is_match(value)
            };
            let all_match = |(_, entry): &(usize, &Vec<String>)| {
                entry.iter().zip(&values).all(|(text, value)| matches(text, value))
            };
            let expected = texts.iter().enumerate().filter(all_match).min_by_key(|(at, entry)| {
                (entry.iter().map(rank).collect::<Vec<_>>(), *at)
            });
            let values: Vec<&str> = values.iter().map(String::as_str).collect();
            prop_assert_eq!(find(&key, &texts, &values), expected.map(|(at, _)| at));
        }
    }
}
