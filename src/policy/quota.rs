//! Selection of the key and the limits that a request is charged against.

use super::json_pointer::parse_whole_number;
use super::value_pattern::ValuePattern;
use super::{
    ActualCost, AmountSource, CostSource, Descriptor, Facts, KeyContext, KeyError, KeyPart,
    KeyTemplate, KeyValues, MissingKeyAction, NamedLimit, PolicyMode, Threshold, ValueDigests,
    client, path,
};
use crate::limiter::{
    Algorithm, CounterScope, Key, LeaseTerms, Limit, ListedValue, OverrideInEffect,
};
use crate::text::count_noun;
use foldhash::fast::RandomState;
use indexmap::IndexMap;

/// The key, cost and limits of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quota {
    pub key: KeyTemplate,
    pub missing_key: MissingKeyAction,
    pub cost: CostSource,
    /// The limits of the policy, never empty.
    pub limits: Vec<NamedLimit>,
    /// How long a key stays blocked after a rejection ([`Algorithm::Block`]). With `count_when`,
    /// only if the response counter is full.
    ///
    /// [`Algorithm::Block`]: crate::limiter::Algorithm::Block
    pub block: Option<Limit>,
    /// Whether requests that the policy rejects are charged too ([`ChargeEffect::ChargeRejected`]).
    ///
    /// [`ChargeEffect::ChargeRejected`]: crate::limiter::ChargeEffect::ChargeRejected
    pub count_rejected: bool,
    /// Number of counters, spread over a Redis cluster, for each key. 1 means that keys are not
    /// sharded.
    pub shards: u16,
    /// Settings for leasing units in advance; `None` disables leases.
    pub lease: Option<LeaseTerms>,
    pub overrides: LimitOverrides,
    /// Whether overrides of single keys in the store apply (`dynamic`).
    pub is_dynamic: bool,
    /// Usage that is notified, ascending.
    pub notify: Box<[Threshold]>,
}

impl Quota {
    /// All limits, including those of overrides.
    pub fn all_limits(&self) -> impl Iterator<Item = &NamedLimit> + Clone {
        let overridden = self.overrides.as_slice().iter();
        let overridden = overridden.flat_map(|entry| &entry.limits);
        self.limits.iter().chain(overridden)
    }

    /// Whether each instance counts for itself, in its memory.
    pub fn is_instance_scoped(&self) -> bool {
        self.key.scope == CounterScope::Instance
    }

    /// Whether the limits have response counters, which start the block (`count_when` with
    /// `block_for`).
    pub fn counts_responses(&self) -> bool {
        let actual = self.cost.as_estimate().map(|cost| &cost.actual);
        self.block.is_some() && matches!(actual, Some(ActualCost::Status(_)))
    }

    /// Returns the key and the limits for one request or descriptor of policy `name`, or `None` if
    /// the policy skips it. A descriptor's own limit replaces those of the policy. The key then
    /// includes the whole descriptor, so that no other descriptor shares the quota.
    ///
    /// # Errors
    /// Returns a [`KeyError`] if the request cannot be keyed.
    pub fn key_and_limits_for_facts<'t>(
        &'t self,
        name: &str,
        (facts, descriptor): (&Facts<'_>, Option<&'t Descriptor<'t>>),
        context: &KeyContext<'_>,
        digests: &mut ValueDigests<'t>,
    ) -> Result<Option<(Key, SelectedLimits<'t>)>, KeyError> {
        let own_limits = descriptor.and_then(|one| one.resolve_override_limit(name, &self.limits));
        let mut values = self.key.extract_values(facts, context, self.missing_key)?;
        if self.missing_key == MissingKeyAction::Skip && values.iter().any(Option::is_none) {
            return Ok(None);
        }
        let (Some(descriptor), Some(limits)) = (descriptor, own_limits) else {
            return Ok(Some(self.key_and_limits(name, &values, digests)));
        };
        // This key has one value more than the template has parts, so it cannot equal a key that is
        // built from the template alone.
        values.push(Some(descriptor.canonical_text().into_bytes().into()));
        let key = self.key.build_key(name, &values, digests);
        Ok(Some((key, SelectedLimits::from_policy(limits))))
    }

    /// Returns the key and the limits for explicit values, one per position. An empty text stands
    /// for an absent value. `parse` is [`ListedValue::Plain`], or [`ListedValue::parse`] for values
    /// as lists of overrides show them, also digests.
    ///
    /// # Errors
    /// Returns a message that states which values are wrong.
    pub fn key_and_limits_for_values<'t>(
        &'t self,
        name: &str,
        values: &[String],
        (client, path): (&client::Settings, &path::Settings),
        parse: impl Fn(&str) -> ListedValue<'_>,
    ) -> Result<(Key, SelectedLimits<'t>), String> {
        let width = self.key.value_count();
        if values.len() != width {
            let parts: Vec<String> = self.key.parts().map(ToString::to_string).collect();
            let parts = if parts.is_empty() {
                String::new()
            } else {
                format!(" ({})", parts.join(", "))
            };
            return Err(format!(
                "the key of {name} has {}{parts}, not {}",
                count_noun(width as u64, "value"),
                values.len()
            ));
        }
        let mut builder = self.key.start_key(name);
        let mut compared = KeyValues::new();
        for (position, text) in values.iter().enumerate() {
            let value = self.key.push_listed_value(
                &mut builder,
                (position, text),
                (client, path),
                &parse,
            )?;
            compared.push(value.map(|value| value.into_string().into_bytes().into()));
        }
        let key = builder.finish();
        let selected = self.select_limits(&key, &compared);
        Ok((key, selected))
    }

    /// Keeps all limits out of responses to clients.
    pub fn hide_limits(&mut self) {
        let overridden = self.overrides.entries.iter_mut();
        let overridden = overridden.flat_map(|entry| &mut entry.limits);
        for named in self.limits.iter_mut().chain(overridden) {
            named.is_reported = false;
        }
    }

    pub(super) fn key_and_limits<'t>(
        &'t self,
        name: &str,
        values: &KeyValues<'_>,
        digests: &mut ValueDigests<'t>,
    ) -> (Key, SelectedLimits<'t>) {
        let key = self.key.build_key(name, values, digests);
        let selected = self.select_limits(&key, values);
        (key, selected)
    }

    fn select_limits(&self, key: &Key, values: &KeyValues<'_>) -> SelectedLimits<'_> {
        let found = self.overrides.find_override(key, values);
        let Some(found) = found else {
            return SelectedLimits::from_policy(&self.limits);
        };
        SelectedLimits {
            limits: if found.limits.is_empty() {
                &self.limits
            } else {
                &found.limits
            },
            rule: found.rule,
        }
    }
}

/// Overrides of a policy. Of those that match a key, one with exact values replaces the policy's
/// limits; else the first by [`ValuePattern::rank`]; of equal ranks, the first in the file.
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
                        .build_key(name, &values, &mut ValueDigests::default())
                        .id();
                    overrides.exact_by_key_id.entry(id).or_insert(index);
                }
                None => overrides.pattern_indices.push(index),
            }
        }
        let entries = &overrides.entries;
        // Compared by position, from the first.
        let rank = |index: &usize| -> Option<Vec<_>> {
            let values = entries.get(*index)?.values.iter();
            Some(values.map(ValuePattern::rank).collect())
        };
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
        patterns.find(|entry| {
            let mut pairs = entry.values.iter().zip(values);
            entry.values.len() == values.len()
                && pairs.all(|(pattern, value)| pattern.matches(value.as_deref()))
        })
    }
}

impl LimitOverride {
    /// The values, if none is a pattern.
    fn exact_values(&self) -> Option<KeyValues<'_>> {
        let exact = |value| Some(ValuePattern::as_exact(value)?.as_bytes().into());
        self.values
            .iter()
            .map(|value| exact(value).map(Some))
            .collect()
    }
}

/// The limits of a policy with the amounts of one request, in the same order; `None` for a limit
/// that does not depend on the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestAmounts(Vec<Option<Limit>>);

impl RequestAmounts {
    /// The limit at an index, if it depends on the request.
    pub fn get(&self, index: usize) -> Option<&Limit> {
        self.0.get(index)?.as_ref()
    }

    /// What decides instead of the limit of the configuration at an index, if it depends on the
    /// request.
    pub fn in_effect(&self, index: usize) -> Option<OverrideInEffect> {
        let limit = self.get(index)?;
        let burst = match limit.algorithm {
            Algorithm::TokenBucket { burst, .. } => burst,
            _ => limit.requests,
        };
        Some(OverrideInEffect::StatedAmounts {
            requests: limit.requests,
            burst,
        })
    }
}

/// The limits with the amounts of this request, or `None` if no limit depends on the request.
pub fn read_request_amounts(
    limits: &[NamedLimit],
    facts: &Facts<'_>,
) -> Option<Box<RequestAmounts>> {
    if limits.iter().all(|named| named.amount.is_none()) {
        return None;
    }
    let limits = limits.iter().map(|named| {
        let source = named.amount.as_ref()?;
        Some(resolve_limit(source, &named.limit, facts))
    });
    Some(Box::new(RequestAmounts(limits.collect())))
}

/// The limit with the amount of the request: its own without the field, or if the field is no
/// whole number.
fn resolve_limit(source: &AmountSource, limit: &Limit, facts: &Facts<'_>) -> Limit {
    let is_readable = facts.is_peer_trusted || !matches!(source.field, KeyPart::Header(_));
    // A repeated field counts as absent.
    let value = source.field.single_value(facts).ok().flatten();
    match value.filter(|value| is_readable && !value.is_empty()) {
        // A number beyond 64 bits is above the maximum, too.
        Some(value) if value.iter().all(u8::is_ascii_digit) => {
            source.apply_amount(limit, parse_whole_number(&value).unwrap_or(u64::MAX))
        }
        _ => *limit,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderMap, HeaderValue};
    use proptest::prelude::*;
    use std::cmp::Reverse;

    const CLIENT: fn() -> client::Settings = || client::Settings {
        trusted_proxies: Vec::new(),
        ip_header: http::HeaderName::from_static("x-forwarded-for"),
        ipv4_prefix: 32,
        ipv6_prefix: 64,
        nat64_prefixes: Vec::new(),
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
        let built = key.build_key("p", &values, &mut ValueDigests::default());
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

    fn read_amount(algorithm: Algorithm, values: &[&str], is_peer_trusted: bool) -> Limit {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append("x-rpm", HeaderValue::from_str(value).unwrap());
        }
        let facts = Facts {
            headers: &headers,
            is_peer_trusted,
            ..Facts::placeholder()
        };
        let named = NamedLimit {
            name: "p".into(),
            unit: None,
            limit: Limit {
                requests: 100,
                per_us: 60_000_000,
                algorithm,
            },
            amount: Some(Box::new(AmountSource {
                field: AmountSource::parse_field("header:x-rpm").unwrap(),
                max: 1000,
                sets_burst: true,
            })),
            is_reported: true,
            release: crate::policy::SlotRelease::default(),
        };
        *read_request_amounts(&[named], &facts)
            .unwrap()
            .get(0)
            .unwrap()
    }

    #[test]
    fn an_amount_is_a_whole_number_up_to_the_maximum_else_the_default() {
        let read = |values: &[&str]| read_amount(Algorithm::SlidingLog, values, true).requests;
        for (value, expected) in [
            ("7", 7),
            ("0", 0),
            ("0010", 10),
            ("1000", 1000),
            ("1001", 1000),
            ("99999999999999999999999999", 1000),
            ("", 100),
            ("-1", 100),
            ("+5", 100),
            ("5.0", 100),
            ("5, 6", 100),
            ("1e3", 100),
            ("gold", 100),
        ] {
            assert_eq!(read(&[value]), expected, "{value}");
        }
        assert_eq!(read(&[]), 100);
        assert_eq!(read(&["7", "9"]), 100, "a repeated header is ambiguous");
        let untrusted = read_amount(Algorithm::SlidingLog, &["7"], false);
        assert_eq!(
            untrusted.requests, 100,
            "only a trusted proxy states an amount"
        );
    }

    #[test]
    fn the_burst_follows_the_amount() {
        let bucket = Algorithm::TokenBucket {
            burst: 100,
            warm_up_us: 0,
        };
        assert_eq!(read_amount(bucket, &["7"], true).capacity(), 7);
        assert_eq!(read_amount(bucket, &[], true).capacity(), 100);
    }
}
