//! The conditions of a policy on a request or descriptor: matching, and coverage of each kind.

use super::key_part::KeyPart;
use super::regex_spelling::{has_spellings, header_spellings};
use super::{Facts, HostPattern, KeyError, PathPattern, ValueChecks};
use foldhash::HashSet;
use http::Method;
use ipnet::IpNet;
use regex::Regex;
use std::hash::Hash;

/// The conditions of a policy. All of them must hold.
///
/// A new condition is a [`KeyPart`] or a [`ValueCondition`]. The compiler demands the code that
/// reads the part, and the code that compares the values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matcher {
    /// Cheap conditions come first. Claims come last, because they may require a signature
    /// verification.
    pub conditions: Vec<PartCondition>,
    /// Set only in policies for descriptors, in which no condition is on a request, also in `any`
    /// and `not`. A matcher without it applies to requests only.
    pub accepted_entries: Option<AcceptedEntries>,
    /// One of these must match. Empty: no condition.
    pub any: Vec<Matcher>,
    /// The policy does not apply to a request that meets all conditions of `not`.
    pub not: Option<Box<Matcher>>,
}

/// The entries of a descriptor that a matcher accepts beside those of its conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptedEntries {
    /// Any, as the matcher has no `descriptors`.
    Any,
    /// None: the conditions list all entries, in any order.
    Listed,
    /// Further ones: `descriptors_match = "subset"` in TOML.
    More,
}

impl Matcher {
    /// Whether the matcher applies to descriptors, and not to requests.
    pub fn is_for_descriptors(&self) -> bool {
        self.accepted_entries.is_some()
    }

    /// The conditions on entries of descriptors.
    pub fn entries(&self) -> impl Iterator<Item = &PartCondition> {
        let is_entry = |one: &&PartCondition| matches!(one.part, KeyPart::DescriptorEntry(_));
        self.conditions.iter().filter(is_entry)
    }

    /// The condition on a part that each request has.
    pub fn condition_on(&self, part: &KeyPart) -> Option<&ValueCondition> {
        let mut conditions = self.conditions.iter();
        let found = conditions.find(|one| one.part == *part)?;
        Some(&found.condition)
    }

    /// The path patterns; empty without such a condition.
    pub(super) fn path_patterns(&self) -> &[PathPattern] {
        match self.condition_on(&KeyPart::WholePath) {
            Some(ValueCondition::Paths(patterns)) => patterns,
            _ => &[],
        }
    }

    /// Whether all conditions hold for one interpretation of the path.
    pub fn matches(&self, facts: &Facts<'_>, path: &str) -> bool {
        self.first_unmet_condition(facts, path).is_none()
    }

    /// Returns the first condition that does not hold. Cheap conditions are evaluated first.
    pub fn first_unmet_condition(
        &self,
        facts: &Facts<'_>,
        path: &str,
    ) -> Option<UnmetCondition<'_>> {
        if self.is_for_descriptors() != facts.descriptor.is_some() {
            return Some(UnmetCondition::RequestKind);
        }
        let unmet = self.conditions.iter().find(|one| !one.is_met(facts, path));
        let has_extra_entries = || {
            self.accepted_entries == Some(AcceptedEntries::Listed)
                && facts.descriptor.map(|one| one.entries.len()) != Some(self.entries().count())
        };
        match unmet {
            Some(unmet) => Some(UnmetCondition::Part(unmet)),
            None if has_extra_entries() => Some(UnmetCondition::ExtraEntries),
            None if !self.meets_alternative(facts, path) => Some(UnmetCondition::Alternatives),
            None if self.is_excluded(facts, path) => Some(UnmetCondition::Exclusion),
            None => None,
        }
    }

    fn meets_alternative(&self, facts: &Facts<'_>, path: &str) -> bool {
        self.any.is_empty() || self.any.iter().any(|one| one.matches(facts, path))
    }

    /// Whether `not` excludes a request. An exclusion is an exemption, so a path that is escaped
    /// twice, or a body that can't be read, gains none.
    fn is_excluded(&self, facts: &Facts<'_>, path: &str) -> bool {
        self.not.as_ref().is_some_and(|not| {
            let is_nested = facts.paths.has_nested_escape;
            let inverted = facts.with_unreadable_values(!facts.unreadable_holds);
            not.matches(&inverted, path) && !(is_nested && not.reads_path())
        })
    }

    /// Whether a condition depends on the path.
    pub(super) fn reads_path(&self) -> bool {
        self.has_condition_on(|part| *part == KeyPart::WholePath)
    }

    /// A part of the body in a condition, also one in `any` and `not`, that can't be read.
    pub(super) fn unreadable_body_part(&self, facts: &Facts<'_>) -> Option<&KeyPart> {
        facts.body?;
        let conditions = self.all_conditions().into_iter();
        let mut parts = conditions.map(|one| &one.part);
        parts.find(|part| part.is_unreadable_in(facts))
    }

    /// Whether a condition, also one in `any` and `not`, is on such a part.
    pub(super) fn has_condition_on(&self, is_part: fn(&KeyPart) -> bool) -> bool {
        let mut nested = self.any.iter().chain(self.not.as_deref());
        self.conditions.iter().any(|one| is_part(&one.part))
            || nested.any(|one| one.has_condition_on(is_part))
    }

    /// Returns a query parameter or cookie that upstreams may read differently, if the result
    /// depends on it: all other conditions hold.
    pub(super) fn find_ambiguity(
        &self,
        facts: &Facts<'_>,
        path: &str,
        checks: ValueChecks,
    ) -> Option<KeyError> {
        if !self.has_condition_on(|part| matches!(part, KeyPart::Query(_) | KeyPart::Cookie(_))) {
            return None;
        }
        let mut found = None;
        for one in &self.conditions {
            match one.part.find_ambiguity(facts, checks) {
                None if !one.is_met(facts, path) => return None,
                ambiguity => found = found.or(ambiguity),
            }
        }
        match self.find_ambiguous_alternative(facts, path, checks) {
            None if !self.meets_alternative(facts, path) => return None,
            ambiguity => found = found.or(ambiguity),
        }
        let not = self.not.as_ref();
        match not.and_then(|not| not.find_ambiguity(facts, path, checks)) {
            None if self.is_excluded(facts, path) => None,
            ambiguity => found.or(ambiguity),
        }
    }

    /// Returns an ambiguity in `any`, unless one of its alternatives matches without any.
    fn find_ambiguous_alternative(
        &self,
        facts: &Facts<'_>,
        path: &str,
        checks: ValueChecks,
    ) -> Option<KeyError> {
        let mut found = None;
        for one in &self.any {
            match one.find_ambiguity(facts, path, checks) {
                None if one.matches(facts, path) => return None,
                ambiguity => found = found.or(ambiguity),
            }
        }
        found
    }

    /// All conditions, also those in `any` and `not`.
    pub fn all_conditions(&self) -> Vec<&PartCondition> {
        let nested = self.any.iter().chain(self.not.as_deref());
        let nested = nested.flat_map(Self::all_conditions);
        self.conditions.iter().chain(nested).collect()
    }

    /// Whether a condition, on the request or a descriptor, holds only if the part is present.
    pub fn requires_part(&self, part: &KeyPart) -> bool {
        let mut conditions = self.conditions.iter();
        conditions.any(|one| one.part == *part && one.requires_value())
    }
}

/// Lists up to this length are compared without a table of their values.
const MAX_SCANNED_ALTERNATIVES: usize = 16;

/// A condition on a part of a request or descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartCondition {
    pub part: KeyPart,
    pub condition: ValueCondition,
}

/// A condition on the values of a part. One matching value suffices, and one of the alternatives of
/// a list; no list is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueCondition {
    OneOf(Box<[Box<str>]>),
    Regex(ConditionRegex),
    /// The name must be present (`true`) or absent (`false`).
    Present(bool),
    Hosts(Box<[HostPattern]>),
    Paths(Box<[PathPattern]>),
    /// Networks of the client's address.
    Networks(Box<[IpNet]>),
}

/// A regular expression of a condition. Equal if the texts are.
#[derive(Clone, Debug)]
pub struct ConditionRegex(pub Regex);

impl PartialEq for ConditionRegex {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Eq for ConditionRegex {}

/// A value of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum RequiredValue<'m> {
    /// A value of a part, or the text of a regular expression on the path. A suffix of hosts begins
    /// with a dot.
    Value(&'m KeyPart, &'m str),
    /// A literal segment of a path pattern, with its position.
    Segment(usize, &'m str),
    Network(IpNet),
    /// A regular expression on a part other than the path.
    Regex(&'m KeyPart),
}

/// The condition that a request does not meet. Its text is for messages, such as `not for this
/// path`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
pub enum UnmetCondition<'a> {
    #[strum(to_string = "{0}")]
    Part(&'a PartCondition),
    /// The path is escaped twice, so it gains no exemption.
    #[strum(to_string = "no exemption for a path that is escaped twice")]
    NestedEscape,
    /// The policy is for descriptors and the facts are of a request, or the reverse. The message
    /// names the first case only, because `explain` never has a descriptor.
    #[strum(to_string = "for calls of the rate-limit service only")]
    RequestKind,
    /// The descriptor has entries that the policy does not list.
    #[strum(to_string = "the descriptor has additional entries")]
    ExtraEntries,
    /// No matcher in `any` holds.
    #[strum(to_string = "nothing in its `any` matches")]
    Alternatives,
    /// All conditions in `not` hold.
    #[strum(to_string = "excluded by its `not`")]
    Exclusion,
}

/// Text for messages if the condition does not hold.
impl std::fmt::Display for PartCondition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.part, &self.condition) {
            (KeyPart::WholePath, ValueCondition::Regex(_)) => {
                f.write_str("path_regex does not match")
            }
            (KeyPart::ClientIp, _) => f.write_str("not for this client address"),
            (part, _) if part.is_always_present() => write!(f, "not for this {part}"),
            (part, _) => write!(f, "the condition on {part} does not hold"),
        }
    }
}

impl PartCondition {
    /// Whether the condition holds for one interpretation of the path. One on a body that can't be
    /// read usually holds: a client must not evade a limit by another spelling.
    pub(super) fn is_met(&self, facts: &Facts<'_>, path: &str) -> bool {
        let part = &self.part;
        if part.is_unreadable_in(facts) {
            return facts.unreadable_holds;
        }
        match &self.condition {
            ValueCondition::Hosts(hosts) => hosts.iter().any(|host| host.matches(facts.host)),
            ValueCondition::Paths(patterns) => patterns.iter().any(|one| one.matches(path)),
            ValueCondition::Networks(networks) => {
                networks.iter().any(|net| net.contains(&facts.client_ip))
            }
            ValueCondition::OneOf(wanted) => part.has_value(facts, |value| {
                wanted.iter().any(|wanted| wanted.as_bytes() == value)
            }),
            ValueCondition::Regex(ConditionRegex(regex)) => match part {
                KeyPart::WholePath => regex.is_match(path),
                KeyPart::Header(name) if has_spellings(name) => {
                    let spellings = header_spellings(facts, name);
                    spellings.iter().any(|text| regex.is_match(text))
                }
                _ => part.has_value(facts, |value| {
                    regex.is_match(&String::from_utf8_lossy(value))
                }),
            },
            ValueCondition::Present(wanted) => {
                let is_present = match part {
                    // A list without elements and an object are present and have no values.
                    KeyPart::Claim(name) => facts.token.claim(facts.headers, name).is_some(),
                    _ => part.has_value(facts, |_| true),
                };
                is_present == *wanted
            }
        }
    }

    /// Whether the condition holds only if the part is present.
    pub fn requires_value(&self) -> bool {
        !matches!(self.condition, ValueCondition::Present(false))
    }

    /// Whether this certainly holds if the other condition does.
    pub(super) fn is_implied_by(&self, other: &Self) -> bool {
        self.part == other.part && self.condition.is_implied_by(&other.condition)
    }

    /// Whether every request meets the condition.
    pub(super) fn always_holds(&self) -> bool {
        matches!(&self.condition, ValueCondition::Paths(patterns) if patterns.iter().any(PathPattern::matches_any_path))
    }

    /// The accepted values, as lists of alternatives. What meets the condition, and each condition
    /// that implies it, has one value of each list.
    pub(super) fn required_values(&self) -> Vec<Vec<RequiredValue<'_>>> {
        let part = &self.part;
        let value = |text| RequiredValue::Value(part, text);
        let network = |net: &IpNet| RequiredValue::Network(net.trunc());
        let segment = |(position, word)| RequiredValue::Segment(position, word);
        match &self.condition {
            ValueCondition::OneOf(texts) => {
                vec![texts.iter().map(|text| value(&**text)).collect()]
            }
            ValueCondition::Hosts(hosts) => {
                vec![hosts.iter().map(|host| value(host.text())).collect()]
            }
            ValueCondition::Networks(networks) => vec![networks.iter().map(network).collect()],
            ValueCondition::Paths(patterns) => match &**patterns {
                [only] => only
                    .literal_segments()
                    .map(|one| vec![segment(one)])
                    .collect(),
                several => {
                    let lasts = several.iter().map(|one| one.literal_segments().last());
                    let lasts: Option<_> = lasts.map(|last| last.map(segment)).collect();
                    lasts.into_iter().collect()
                }
            },
            // Only the same regular expression implies one on the path, and no list of texts.
            ValueCondition::Regex(regex) if *part == KeyPart::WholePath => {
                vec![vec![value(regex.0.as_str())]]
            }
            ValueCondition::Regex(_) => vec![vec![RequiredValue::Regex(part)]],
            ValueCondition::Present(_) => Vec::new(),
        }
    }
}

impl ValueCondition {
    /// A condition that one value meets.
    pub fn equals(value: &str) -> Self {
        Self::OneOf(Box::new([value.into()]))
    }

    /// A condition on the method. `GET` includes `HEAD`.
    pub fn from_methods(methods: &[Method]) -> Self {
        let with_head = |method: &Method| {
            let head = (*method == Method::GET).then_some(Method::HEAD);
            [method.clone()].into_iter().chain(head)
        };
        let methods = methods.iter().flat_map(with_head);
        Self::OneOf(methods.map(|method| method.as_str().into()).collect())
    }

    /// The texts and the regular expression that values are compared with.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let (texts, regex): (&[_], _) = match self {
            Self::OneOf(texts) => (texts, None),
            Self::Regex(regex) => (&[], Some(regex.0.as_str())),
            _ => (&[], None),
        };
        texts.iter().map(|text| &**text).chain(regex)
    }

    /// Rewrites the texts that values are compared with.
    ///
    /// # Errors
    /// Returns the first error of `rewrite`.
    pub fn rewrite_texts(
        self,
        rewrite: impl Fn(&str) -> Result<Box<str>, String>,
    ) -> Result<Self, String> {
        match self {
            Self::OneOf(texts) => texts
                .iter()
                .map(|text| rewrite(text))
                .collect::<Result<_, _>>()
                .map(Self::OneOf),
            other => Ok(other),
        }
    }

    fn is_implied_by(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Present(true), Self::OneOf(_) | Self::Regex(_)) => true,
            (Self::Present(mine), Self::Present(others)) => mine == others,
            (Self::OneOf(mine), Self::OneOf(others)) => {
                covers_alternatives(mine, others, PartialEq::eq)
            }
            (Self::Hosts(mine), Self::Hosts(others)) => {
                covers_alternatives(mine, others, HostPattern::covers)
            }
            (Self::Paths(mine), Self::Paths(others)) => {
                covers_alternatives(mine, others, PathPattern::covers)
            }
            (Self::Networks(mine), Self::Networks(others)) => {
                covers_alternatives(mine, others, |net, inner| net.contains(inner))
            }
            (Self::Regex(mine), Self::Regex(others)) => mine == others,
            (Self::Regex(mine), Self::OneOf(texts)) => {
                texts.iter().all(|text| mine.0.is_match(text))
            }
            (Self::Present(_) | Self::OneOf(_) | Self::Regex(_), _)
            | (Self::Hosts(_) | Self::Paths(_) | Self::Networks(_), _) => false,
        }
    }
}

/// Whether each of `others` is covered by one of `mine`.
fn covers_alternatives<T: Eq + Hash>(
    mine: &[T],
    others: &[T],
    covers: impl Fn(&T, &T) -> bool,
) -> bool {
    // Thousands of values are usually equal ones.
    let long = mine.len() > MAX_SCANNED_ALTERNATIVES;
    let equals: HashSet<&T> = long.then_some(mine).into_iter().flatten().collect();
    let is_covered = |other| equals.contains(other) || mine.iter().any(|one| covers(one, other));
    others.iter().all(is_covered)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::path::Settings;

    #[test]
    fn an_unmet_condition_says_what_it_is_about() {
        let text = |part: KeyPart, condition: ValueCondition| {
            let condition = PartCondition { part, condition };
            UnmetCondition::Part(&condition).to_string()
        };
        let paths = || {
            let pattern = PathPattern::parse("/a", &Settings::DEFAULT).unwrap();
            ValueCondition::Paths([pattern].into())
        };
        let regex = ValueCondition::Regex(ConditionRegex(Regex::new("^/a").unwrap()));
        let networks = ValueCondition::Networks(["10.0.0.0/8".parse().unwrap()].into());
        let hosts = ValueCondition::Hosts([HostPattern::parse("a").unwrap()].into());
        let header = KeyPart::Header("x-a".parse().unwrap());
        let one = || ValueCondition::equals("a");
        for (part, condition, expected) in [
            (KeyPart::Method, one(), "not for this method"),
            (KeyPart::Host, hosts, "not for this host"),
            (KeyPart::WholePath, paths(), "not for this path"),
            (KeyPart::WholePath, regex, "path_regex does not match"),
            (KeyPart::ClientIp, networks, "not for this client address"),
            (KeyPart::DescriptorDomain, one(), "not for this domain"),
            (header, one(), "the condition on header x-a does not hold"),
        ] {
            assert_eq!(text(part, condition), expected);
        }
        let exclusion = UnmetCondition::Exclusion.to_string();
        assert_eq!(exclusion, "excluded by its `not`");
    }
}
