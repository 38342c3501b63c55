//! Lints about combinations of policies.

use crate::config::policies::context::{PolicyContext, PolicyWithReader};
use crate::policy::{
    KeyPart, Matcher, MissingKeyAction, NamedCondition, PolicyAction, PolicyMode, ValueCondition,
};
use std::cmp::Reverse;
use std::collections::HashMap;

/// Largest number of comparisons of two policies in one load. With thousands of policies some pairs
/// are skipped: a missed warning does less harm than a reload that takes seconds.
const MAX_COMPARISONS: usize = 200_000;

/// The comparisons of two policies that are left in a load.
pub(super) struct ComparisonBudget(usize);

pub(super) fn check_policy_interactions(
    policies: &[PolicyWithReader<'_>],
    context: &PolicyContext,
    budget: &mut ComparisonBudget,
) {
    warn_unreachable_policies(policies, budget);
    warn_duplicate_policies(policies);
    warn_duplicate_limit_names(policies, budget);
    warn_skippable_keys(policies, budget);
    warn_overlapping_descriptors(policies, budget);
    warn_client_chosen_keys(policies, context);
}

impl Default for ComparisonBudget {
    fn default() -> Self {
        Self(MAX_COMPARISONS)
    }
}

impl ComparisonBudget {
    /// Whether comparisons were left out, so that an absence of findings proves nothing.
    pub(super) fn is_exhausted(&self) -> bool {
        self.0 == 0
    }

    /// Takes one comparison. Returns `false` if none is left.
    pub(super) fn take(&mut self) -> bool {
        let is_allowed = self.0 > 0;
        self.0 = self.0.saturating_sub(1);
        is_allowed
    }
}

fn warn_unreachable_policies(policies: &[PolicyWithReader<'_>], budget: &mut ComparisonBudget) {
    let mut in_order: Vec<&PolicyWithReader<'_>> = policies.iter().collect();
    in_order.sort_by_key(|one| Reverse(one.policy.priority));
    let mut terminal_policies: Vec<&PolicyWithReader<'_>> = Vec::new();
    for spanned in in_order {
        let matcher = &spanned.policy.matcher;
        match terminal_policies
            .iter()
            .find(|end| budget.take() && end.policy.matcher.covers(matcher))
        {
            Some(end) => {
                let does = if matches!(end.policy.action, PolicyAction::Allow) {
                    "exempts"
                } else {
                    "denies"
                };
                spanned.reader.report_warning(
                    "name",
                    &format!(
                        "never reached: {} comes first and {does} all requests that this policy matches; put this policy first, or give it a higher priority",
                        end.quote_name_and_position()
                    ),
                );
            }
            None if spanned.quota().is_none() && spanned.policy.is_enforced() => {
                terminal_policies.push(spanned)
            }
            None => {}
        }
    }
}

fn warn_duplicate_policies(policies: &[PolicyWithReader<'_>]) {
    let mut known: HashMap<String, &PolicyWithReader<'_>> = HashMap::new();
    for spanned in policies {
        let Some(quota) = spanned.quota() else {
            continue;
        };
        let limits = quota.limits.iter();
        let limits: Vec<_> = limits.map(|named| (named.limit, &named.amount)).collect();
        let overrides: Vec<_> = quota
            .overrides
            .as_slice()
            .iter()
            .map(|entry| (&entry.values, entry.rule))
            .collect();
        let fingerprint = format!(
            "{:?}",
            (
                &spanned.policy.matcher,
                spanned.policy.mode,
                &quota.key,
                &quota.cost,
                limits,
                overrides
            )
        );
        match known.get(&fingerprint) {
            Some(first) => spanned.reader.report_warning(
                "name",
                &format!(
                    "has the same match, key and limits as {}; expected only one of them",
                    first.quote_name_and_position()
                ),
            ),
            None => {
                known.insert(fingerprint, spanned);
            }
        }
    }
}

/// Clients cannot use a rate-limit field that has the same name twice.
fn warn_duplicate_limit_names(policies: &[PolicyWithReader<'_>], budget: &mut ComparisonBudget) {
    let mut known: HashMap<&str, Vec<&PolicyWithReader<'_>>> = HashMap::new();
    let is_reported = |one: &&PolicyWithReader<'_>| {
        one.policy.is_reported && one.policy.mode != PolicyMode::Shadow
    };
    for spanned in policies.iter().filter(is_reported) {
        for named in spanned.quota().iter().flat_map(|quota| &quota.limits) {
            let others = known.entry(&named.name).or_default();
            let counter_of =
                |one: &PolicyWithReader<'_>| Some(one.quota()?.key.counter_name()?.to_owned());
            let counter = counter_of(spanned);
            let overlaps = |other: &&&PolicyWithReader<'_>| {
                // A request is charged, and reported, by one policy of a shared counter.
                if counter.is_some() && counter_of(other) == counter {
                    return false;
                }
                let (mine, others) = (&spanned.policy.matcher, &other.policy.matcher);
                budget.take() && (mine.covers(others) || others.covers(mine))
            };
            if let Some(other) = others.iter().find(overlaps) {
                spanned.reader.report_warning(
                    "name",
                    &format!(
                        "a limit of {} has the name \"{}\" in the rate-limit fields too; expected another name, or a name in that limit",
                        other.quote_name_and_position(),
                        named.name
                    ),
                );
            }
            others.push(spanned);
        }
    }
}

fn warn_skippable_keys(policies: &[PolicyWithReader<'_>], budget: &mut ComparisonBudget) {
    for (index, spanned) in policies
        .iter()
        .enumerate()
        .filter(|(_, one)| one.policy.is_enforced())
    {
        let Some(part) = find_skippable_part(spanned) else {
            continue;
        };
        let Some(without) = narrow_to_missing_part(&spanned.policy.matcher, part) else {
            continue;
        };
        let is_caught = policies.iter().enumerate().any(|(other_index, other)| {
            let limits = match other.policy.action {
                PolicyAction::Limit(_) => find_skippable_part(other).is_none(),
                PolicyAction::Deny => true,
                PolicyAction::Allow => false,
            };
            other_index != index
                && other.policy.is_enforced()
                && limits
                && budget.take()
                && other.policy.matcher.covers(&without)
        });
        if !is_caught && !budget.is_exhausted() {
            let key = if spanned.reader.contains_key("missing_key") {
                "missing_key"
            } else {
                "key"
            };
            spanned.reader.report_warning(
                key,
                &format!(
                    "requests without {part} are not limited (missing_key = \"skip\"); expected \"shared\" or \"reject\", or another policy with the key \"client_ip\""
                ),
            );
        }
    }
}

/// The first key part that a client can leave out to avoid the policy.
fn find_skippable_part<'a>(spanned: &'a PolicyWithReader<'_>) -> Option<&'a KeyPart> {
    let quota = spanned
        .quota()
        .filter(|quota| quota.missing_key == MissingKeyAction::Skip)?;
    quota
        .key
        .parts()
        .iter()
        .find(|part| narrow_to_missing_part(&spanned.policy.matcher, part).is_some())
}

/// Narrows a match to requests without the key part. Returns `None` if every request has the
/// part or the client does not choose it.
fn narrow_to_missing_part(matcher: &Matcher, part: &KeyPart) -> Option<Matcher> {
    let mut narrower = matcher.clone();
    match part {
        KeyPart::Alternatives(_) => {
            for one in part.alternatives() {
                narrower = narrow_to_missing_part(&narrower, one)?;
            }
        }
        KeyPart::Header(name) => require_absent(&mut narrower.headers, name)?,
        KeyPart::Query(name) => require_absent(&mut narrower.query, name)?,
        KeyPart::Cookie(name) => require_absent(&mut narrower.cookies, name)?,
        KeyPart::Claim(name) => require_absent(&mut narrower.claims, name)?,
        _ => return None,
    }
    Some(narrower)
}

fn require_absent<N: PartialEq + Clone>(
    conditions: &mut Vec<NamedCondition<N>>,
    name: &N,
) -> Option<()> {
    let requires_value = |test: &ValueCondition| !matches!(test, ValueCondition::Present(false));
    if conditions
        .iter()
        .any(|named| named.name == *name && requires_value(&named.condition))
    {
        return None;
    }
    conditions.push(NamedCondition {
        name: name.clone(),
        condition: ValueCondition::Present(false),
    });
    Some(())
}

/// Envoy's own rate limit service charges one entry per descriptor, the most specific one.
fn warn_overlapping_descriptors(policies: &[PolicyWithReader<'_>], budget: &mut ComparisonBudget) {
    let mut known: Vec<&PolicyWithReader<'_>> = Vec::new();
    let limits = |one: &&PolicyWithReader<'_>| {
        let is_for_descriptors = one.policy.matcher.descriptor_conditions.is_some();
        is_for_descriptors && one.policy.is_enforced() && one.quota().is_some()
    };
    for spanned in policies.iter().filter(limits) {
        let overlap = known.iter().find_map(|other| {
            let is_allowed = budget.take();
            let matcher = &spanned.policy.matcher;
            let common =
                is_allowed.then(|| matcher.descriptor_overlap(&other.policy.matcher))??;
            Some((other, common))
        });
        if let Some((other, common)) = overlap {
            let entries: Vec<_> = common.iter().map(describe_entry).collect();
            spanned.reader.report_warning(
                "match",
                &format!(
                    "{} charges a descriptor {{ {} }} too; expected an override there for a value's own limit, or not = {{ descriptors = … }} in one of them",
                    other.quote_name_and_position(),
                    entries.join(", ")
                ),
            );
        }
        known.push(spanned);
    }
}

fn describe_entry(entry: &NamedCondition<Box<str>>) -> String {
    let value = match &entry.condition {
        ValueCondition::OneOf(values) => match &**values {
            [value] => format!("{value:?}"),
            values => format!("{values:?}"),
        },
        ValueCondition::Regex(regex) => format!("{{ regex = {:?} }}", regex.as_str()),
        ValueCondition::Present(_) => "\"*\"".to_owned(),
    };
    format!("{} = {value}", entry.name)
}

fn warn_client_chosen_keys(policies: &[PolicyWithReader<'_>], context: &PolicyContext) {
    let has_client_chosen_key = |one: &PolicyWithReader<'_>| {
        one.key_parts()
            .iter()
            .any(|part| context.is_client_chosen(part))
    };
    // Whether the policy limits a client that invents key values.
    let limits_by_client_ip = |one: &PolicyWithReader<'_>| {
        one.policy.is_enforced()
            && one.key_parts().contains(&KeyPart::ClientIp)
            && !has_client_chosen_key(one)
    };
    if policies.iter().any(limits_by_client_ip) {
        return;
    }
    for spanned in policies.iter().filter(|one| has_client_chosen_key(one)) {
        let chosen = spanned.key_parts().iter().find_map(|part| match part {
            KeyPart::Alternatives(alternatives) => {
                let (_, earlier) = alternatives.split_last()?;
                let mut earlier = earlier.iter().map(|one| &one.part);
                earlier.find(|one| context.is_client_chosen(one))
            }
            _ => None,
        });
        let problem = match chosen {
            Some(part) => format!(
                "a client that invents a {part} gets a quota of its own instead of the next alternative's"
            ),
            None => "clients choose these values and can create any number of counters".to_owned(),
        };
        spanned.reader.report_warning(
            "key",
            &format!("{problem}; add a policy with the key \"client_ip\""),
        );
    }
}
