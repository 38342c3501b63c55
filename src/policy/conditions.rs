//! Conditions on the values of a request or descriptor.

use super::key_part::KeyPart;
use super::regex_spelling::{has_spellings, header_spellings};
use super::{Descriptor, Facts};
use regex::Regex;
use std::fmt;
use std::ops::Deref;

/// A condition on the values of a header, query parameter, cookie, claim or descriptor entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartCondition {
    pub part: KeyPart,
    pub condition: ValueCondition,
}

/// A condition on the values of a part. One matching value suffices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueCondition {
    OneOf(Box<[Box<str>]>),
    Regex(ConditionRegex),
    /// The name must be present (`true`) or absent (`false`).
    Present(bool),
}

/// A regular expression of a condition. Equal if the texts are.
#[derive(Clone, Debug)]
pub struct ConditionRegex(pub Regex);

impl Deref for ConditionRegex {
    type Target = Regex;

    fn deref(&self) -> &Regex {
        &self.0
    }
}

impl PartialEq for ConditionRegex {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for ConditionRegex {}

/// Conditions on a descriptor. A matcher with them applies to descriptors only; a matcher without
/// them applies to requests only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DescriptorConditions {
    /// `None` matches any domain.
    pub domain: Option<Box<str>>,
    /// `descriptors` in TOML: the entries, in any order. `None` matches any entries.
    pub entries: Option<Vec<PartCondition>>,
    /// `descriptors_match = "subset"` in TOML: whether a descriptor with further entries matches.
    pub accepts_more_entries: bool,
}

/// The condition that a request does not meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnmetCondition<'a> {
    Method,
    Host,
    Path,
    /// The path is escaped twice, so it gains no exemption.
    NestedEscape,
    PathRegex,
    ClientIp,
    /// The values of a part, such as a header or a descriptor entry, do not meet its condition.
    Value(&'a KeyPart),
    /// The policy is for descriptors and the facts are of a request, or the reverse. The message
    /// names the first case only, because `explain` never has a descriptor.
    RequestKind,
    Domain,
    /// The descriptor has entries that the policy does not list.
    ExtraEntries,
    /// No matcher in `any` holds.
    Alternatives,
    /// All conditions in `not` hold.
    Exclusion,
}

impl PartCondition {
    pub(super) fn is_met(&self, facts: &Facts<'_>) -> bool {
        match (&self.part, &self.condition) {
            // A list without elements and an object are present and have no values.
            (KeyPart::Claim(name), ValueCondition::Present(wanted)) => {
                facts.token.claim(facts.headers, name).is_present() == *wanted
            }
            (KeyPart::Header(name), ValueCondition::Regex(regex)) if has_spellings(name) => {
                let spellings = header_spellings(facts, name);
                spellings.iter().any(|text| regex.is_match(text))
            }
            (part, condition) => part.read_values(facts, |values| condition.is_met_by(values)),
        }
    }

    /// Whether the condition holds only if the part is present.
    pub fn requires_value(&self) -> bool {
        !matches!(self.condition, ValueCondition::Present(false))
    }
}

impl DescriptorConditions {
    pub(super) fn first_unmet_condition(
        &self,
        descriptor: &Descriptor<'_>,
        facts: &Facts<'_>,
    ) -> Option<UnmetCondition<'_>> {
        if self
            .domain
            .as_deref()
            .is_some_and(|domain| domain != descriptor.domain)
        {
            return Some(UnmetCondition::Domain);
        }
        let wanted = self.entries.as_ref()?;
        find_unmet_value(wanted, facts).or_else(|| {
            let has_more = wanted.len() != descriptor.entries.len();
            (has_more && !self.accepts_more_entries).then_some(UnmetCondition::ExtraEntries)
        })
    }
}

/// Returns the first condition that the request or descriptor does not meet.
pub(super) fn find_unmet_value<'c>(
    conditions: &'c [PartCondition],
    facts: &Facts<'_>,
) -> Option<UnmetCondition<'c>> {
    let unmet = conditions.iter().find(|one| !one.is_met(facts));
    unmet.map(|one| UnmetCondition::Value(&one.part))
}

impl ValueCondition {
    /// A condition that one value meets.
    pub fn equals(value: &str) -> Self {
        Self::OneOf(Box::new([value.into()]))
    }

    /// Whether the value does not matter.
    pub(super) fn is_presence(&self) -> bool {
        matches!(self, Self::Present(_))
    }

    /// The texts and the regular expression that values are compared with.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let (texts, regex) = match self {
            Self::OneOf(texts) => (&**texts, None),
            Self::Regex(regex) => (&[][..], Some(regex.as_str())),
            Self::Present(_) => (&[][..], None),
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

    pub(super) fn is_met_by<V: AsRef<[u8]>>(&self, mut values: impl Iterator<Item = V>) -> bool {
        match self {
            Self::OneOf(wanted) => values.any(|value| {
                let value = value.as_ref();
                wanted.iter().any(|wanted| wanted.as_bytes() == value)
            }),
            Self::Regex(regex) => {
                values.any(|value| regex.is_match(&String::from_utf8_lossy(value.as_ref())))
            }
            Self::Present(wanted) => values.next().is_some() == *wanted,
        }
    }
}

/// Text for messages, such as `not for this path`.
impl fmt::Display for UnmetCondition<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Method => f.write_str("not for this method"),
            Self::Host => f.write_str("not for this host"),
            Self::Path => f.write_str("not for this path"),
            Self::NestedEscape => f.write_str("no exemption for a path that is escaped twice"),
            Self::PathRegex => f.write_str("path_regex does not match"),
            Self::ClientIp => f.write_str("not for this client address"),
            Self::Value(part) => write!(f, "the condition on {part} does not hold"),
            Self::RequestKind => f.write_str("for calls of the rate-limit service only"),
            Self::Domain => f.write_str("not for this domain"),
            Self::ExtraEntries => f.write_str("the descriptor has additional entries"),
            Self::Alternatives => f.write_str("nothing in its `any` matches"),
            Self::Exclusion => f.write_str("excluded by its `not`"),
        }
    }
}
