//! Matching of a policy's conditions against a request or descriptor.

use super::{
    Facts, KeyError, KeyPart, PartCondition, PathPattern, UnmetCondition, ValueCondition, client,
};

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
    /// twice gains none.
    fn is_excluded(&self, facts: &Facts<'_>, path: &str) -> bool {
        self.not.as_ref().is_some_and(|not| {
            let is_nested = facts.paths.has_nested_escape();
            not.matches(facts, path) && !(is_nested && not.reads_path())
        })
    }

    /// Whether a condition depends on the path.
    pub(super) fn reads_path(&self) -> bool {
        self.has_condition_on(|part| *part == KeyPart::WholePath)
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
        client: &client::Settings,
    ) -> Option<KeyError> {
        if !self.has_condition_on(|part| matches!(part, KeyPart::Query(_) | KeyPart::Cookie(_))) {
            return None;
        }
        let mut found = None;
        for one in &self.conditions {
            match one.part.find_ambiguity(facts, client) {
                None if !one.is_met(facts, path) => return None,
                ambiguity => found = found.or(ambiguity),
            }
        }
        match self.find_ambiguous_alternative(facts, path, client) {
            None if !self.meets_alternative(facts, path) => return None,
            ambiguity => found = found.or(ambiguity),
        }
        let not = self.not.as_ref();
        match not.and_then(|not| not.find_ambiguity(facts, path, client)) {
            None if self.is_excluded(facts, path) => None,
            ambiguity => found.or(ambiguity),
        }
    }

    /// Returns an ambiguity in `any`, unless one of its alternatives matches without any.
    fn find_ambiguous_alternative(
        &self,
        facts: &Facts<'_>,
        path: &str,
        client: &client::Settings,
    ) -> Option<KeyError> {
        let mut found = None;
        for one in &self.any {
            match one.find_ambiguity(facts, path, client) {
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
