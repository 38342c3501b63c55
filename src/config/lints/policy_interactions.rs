//! Lints about combinations of policies.

use crate::config::policies::{PolicyContext, PolicyWithReader};
use crate::config::table_reader::report;
use crate::policy::{
    AcceptedEntries, CoverageIndex, HostPattern, KeyPart, Matcher, MissingKeyAction, PartCondition,
    PolicyAction, PolicyMode, ValueCondition, merge_ascending,
};
use indexmap::IndexMap;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::rc::Rc;

/// Largest number of comparisons of two policies in one load. An index leaves few to compare,
/// except of policies that differ only in what it does not have, such as `not`. Then some pairs are
/// skipped, and a warning says so: a missed warning does less harm than a reload that takes
/// seconds.
const MAX_COMPARISONS: usize = 200_000;

/// The comparisons of two policies that are left in a load. `None` if some were left out.
pub(super) struct ComparisonBudget(Option<usize>);

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
    warn_client_chosen_keys(policies, context, budget);
}

impl Default for ComparisonBudget {
    fn default() -> Self {
        Self(Some(MAX_COMPARISONS))
    }
}

impl ComparisonBudget {
    /// Whether comparisons were left out, so that an absence of findings proves nothing.
    pub(super) fn is_exhausted(&self) -> bool {
        self.0.is_none()
    }

    /// The candidates that may still be compared; each takes one comparison.
    pub(super) fn limit<T>(
        &mut self,
        candidates: impl Iterator<Item = T>,
    ) -> impl Iterator<Item = T> {
        candidates.take_while(|_| {
            self.0 = self.0.and_then(|left| left.checked_sub(1));
            !self.is_exhausted()
        })
    }
}

fn warn_unreachable_policies(policies: &[PolicyWithReader<'_>], budget: &mut ComparisonBudget) {
    let mut in_order: Vec<&PolicyWithReader<'_>> = policies.iter().collect();
    in_order.sort_by_key(|one| Reverse(one.policy.priority));
    let is_terminal =
        |one: &PolicyWithReader<'_>| one.quota().is_none() && one.policy.is_enforced();
    let ends = in_order.iter().copied().enumerate();
    let ends = ends.filter(|(_, one)| is_terminal(one)).collect();
    let ends = CoverageIndex::new(ends, |(_, end)| &end.policy.matcher);
    for (rank, spanned) in in_order.iter().enumerate() {
        let matcher = &spanned.policy.matcher;
        let earlier = ends.candidates(matcher).take_while(|(end, _)| *end < rank);
        let Some((_, end)) = budget
            .limit(earlier)
            .find(|(_, end)| end.policy.matcher.covers(matcher))
        else {
            continue;
        };
        let does = match end.policy.action {
            PolicyAction::Allow => "exempts",
            _ => "denies",
        };
        let end = end.quote_name_and_position();
        report! { spanned.reader;
            Warning("name") => "never reached: {end} comes first and {does} all requests that this policy matches; put this policy first, or give it a higher priority";
        }
    }
}

fn warn_duplicate_policies(policies: &[PolicyWithReader<'_>]) {
    let mut known: HashMap<String, &PolicyWithReader<'_>> = HashMap::new();
    for spanned in policies {
        let Some(quota) = spanned.quota() else {
            continue;
        };
        let PolicyWithReader { policy, reader } = spanned;
        let limits = quota.limits.iter();
        let limits: Vec<_> = limits.map(|named| (named.limit, &named.amount)).collect();
        let overrides = quota.overrides.as_slice().iter();
        let overrides: Vec<_> = overrides.map(|entry| (&entry.values, entry.rule)).collect();
        let content = (
            &policy.matcher,
            policy.mode,
            &quota.key,
            &quota.cost,
            limits,
            overrides,
        );
        let fingerprint = format!("{content:?}");
        if let Some(first) = known.get(&fingerprint) {
            let first = first.quote_name_and_position();
            report! { reader;
                Warning("name") => "has the same match, key and limits as {first}; expected only one of them";
            }
        } else {
            known.insert(fingerprint, spanned);
        }
    }
}

/// Clients cannot use a rate-limit field that has the same name twice.
fn warn_duplicate_limit_names(policies: &[PolicyWithReader<'_>], budget: &mut ComparisonBudget) {
    let mut by_name: IndexMap<&str, Vec<&PolicyWithReader<'_>>> = IndexMap::new();
    for spanned in policies {
        let is_reported = spanned.policy.is_reported && spanned.policy.mode != PolicyMode::Shadow;
        let quota = spanned.quota().filter(|_| is_reported);
        for named in quota.iter().flat_map(|quota| &quota.limits) {
            by_name.entry(&named.name).or_default().push(spanned);
        }
    }
    for (name, sharing) in by_name.iter().filter(|(_, sharing)| sharing.len() > 1) {
        for (spanned, other) in find_overlapping_pairs(sharing, budget) {
            let other = other.quote_name_and_position();
            report! { spanned.reader;
                Warning("name") => "a limit of {other} has the name \"{name}\" in the rate-limit fields too; expected another name, or a name in that limit";
            }
        }
    }
}

/// The policies of which one covers an earlier one, or the reverse, each with the first such.
fn find_overlapping_pairs<'p, 'r>(
    policies: &[&'p PolicyWithReader<'r>],
    budget: &mut ComparisonBudget,
) -> Vec<(&'p PolicyWithReader<'r>, &'p PolicyWithReader<'r>)> {
    let counter = |one: &PolicyWithReader<'_>| Some(one.quota()?.key.counter_name()?.to_owned());
    // A request is charged, and reported, by one policy of a shared counter.
    let shares_counter =
        |one: &_, other: &_| counter(one).is_some_and(|name| counter(other) == Some(name));
    let index = policies.iter().copied().enumerate().collect();
    let index = CoverageIndex::new(index, |(_, one): &(usize, &PolicyWithReader<'_>)| {
        &one.policy.matcher
    });
    let mut firsts: Vec<_> = policies.iter().copied().enumerate().collect();
    for (at, one) in policies.iter().copied().enumerate() {
        for &(other_at, other) in budget.limit(index.candidates(&one.policy.matcher)) {
            let (earlier, later) = if at < other_at {
                ((at, one), other_at)
            } else {
                ((other_at, other), at)
            };
            let first = firsts.get_mut(later);
            let first = first.filter(|(first, _)| earlier.0 < *first);
            if let Some(first) = first
                && !shares_counter(one, other)
                && other.policy.matcher.covers(&one.policy.matcher)
            {
                *first = earlier;
            }
        }
    }
    let pairs = policies.iter().copied().zip(firsts).enumerate();
    pairs
        .filter_map(|(at, (one, (first, other)))| (first < at).then_some((one, other)))
        .collect()
}

fn warn_skippable_keys(policies: &[PolicyWithReader<'_>], budget: &mut ComparisonBudget) {
    let enforced = policies.iter().filter(|one| one.policy.is_enforced());
    let (skippable, others): (Vec<_>, Vec<_>) = enforced
        .map(|one| (one, find_skippable_part(one)))
        .partition(|(_, part)| part.is_some());
    let limiting = others.into_iter().map(|(one, _)| one);
    let limiting = limiting.filter(|one| !matches!(one.policy.action, PolicyAction::Allow));
    let limiting = CoverageIndex::new(limiting.collect(), |one: &&PolicyWithReader<'_>| {
        &one.policy.matcher
    });
    for (spanned, part) in skippable {
        let Some((part, without)) = part else {
            continue;
        };
        let is_caught = budget
            .limit(limiting.candidates(&without))
            .any(|other| other.policy.matcher.covers(&without));
        if !is_caught && !budget.is_exhausted() {
            let key = if spanned.reader.contains_key("missing_key") {
                "missing_key"
            } else {
                "key"
            };
            report! { spanned.reader;
                Warning(key) => "requests without {part} are not limited (missing_key = \"skip\"); expected \"shared\" or \"reject\", or another policy with the key \"client_ip\"";
            }
        }
    }
}

/// The first key part that a client can leave out to avoid the policy, and the requests without it.
fn find_skippable_part<'a>(spanned: &'a PolicyWithReader<'_>) -> Option<(&'a KeyPart, Matcher)> {
    let quota = spanned.quota()?;
    let mut parts = quota
        .key
        .parts()
        .filter(|_| quota.missing_key == MissingKeyAction::Skip);
    parts.find_map(|part| Some((part, narrow_to_missing_part(&spanned.policy.matcher, part)?)))
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
        KeyPart::Header(_) | KeyPart::Query(_) | KeyPart::Cookie(_) | KeyPart::Claim(_)
            if part.may_be_absent(matcher) =>
        {
            narrower.conditions.push(PartCondition {
                part: part.without_issuers(),
                condition: ValueCondition::Present(false),
            });
        }
        _ => return None,
    }
    Some(narrower)
}

/// Envoy's own rate limit service charges one entry per descriptor, the most specific one.
fn warn_overlapping_descriptors(policies: &[PolicyWithReader<'_>], budget: &mut ComparisonBudget) {
    let mut known = DescriptorIndex::default();
    let limits = |one: &&PolicyWithReader<'_>| {
        let is_for_descriptors = one.policy.matcher.is_for_descriptors();
        is_for_descriptors && one.policy.is_enforced() && one.quota().is_some()
    };
    for spanned in policies.iter().filter(limits) {
        let overlap = known.insert(spanned, |earlier| {
            budget.limit(earlier).find_map(|other| {
                let matcher = &spanned.policy.matcher;
                let common = matcher.descriptor_overlap(&other.policy.matcher)?;
                Some((other, common))
            })
        });
        if let Some((other, common)) = overlap {
            let entries: Vec<_> = common.iter().map(describe_entry).collect();
            let (other, entries) = (other.quote_name_and_position(), entries.join(", "));
            report! { spanned.reader;
                Warning("match") => "{other} charges a descriptor {{ {entries} }} too; expected an override there for a value's own limit, or not = {{ descriptors = … }} in one of them";
            }
        }
    }
}

/// Finds the policies with the same entries that share a value of one.
#[derive(Default)]
struct DescriptorIndex<'p, 'r> {
    policies: Vec<&'p PolicyWithReader<'r>>,
    /// The positions of all policies.
    all: Vec<usize>,
    /// By the names of all entries, one of them (none for the domain), and its value (none for a
    /// condition without exact values).
    by_value: HashMap<DescriptorValue<'p>, Vec<usize>>,
}

type DescriptorValue<'p> = (Rc<[&'p str]>, Option<&'p str>, Option<&'p str>);

impl<'p, 'r> DescriptorIndex<'p, 'r> {
    /// Inserts a policy. Passes the earlier ones to compare it with, in their order, to `compare`.
    fn insert<R>(
        &mut self,
        spanned: &'p PolicyWithReader<'r>,
        compare: impl FnOnce(&mut dyn Iterator<Item = &'p PolicyWithReader<'r>>) -> Option<R>,
    ) -> Option<R> {
        let matcher = &spanned.policy.matcher;
        if matches!(matcher.accepted_entries, None | Some(AcceptedEntries::Any)) {
            return None;
        }
        let mut names: Vec<&str> = matcher.entries().map(|entry| entry.part.name()).collect();
        names.sort_unstable();
        let names: Rc<[&str]> = names.into();
        let domain = matcher.condition_on(&KeyPart::DescriptorDomain);
        let domain = domain.into_iter().flat_map(ValueCondition::texts);
        let domain = (None, domain.collect());
        let entries = matcher.entries().map(|entry| match &entry.condition {
            ValueCondition::OneOf(values) => (
                Some(entry.part.name()),
                values.iter().map(|value| &**value).collect(),
            ),
            _ => (Some(entry.part.name()), Vec::new()),
        });
        let fields: Vec<(_, Vec<&str>)> = std::iter::once(domain).chain(entries).collect();
        let key = |field, value| (Rc::clone(&names), field, value);
        let lists = |(field, values): &(_, Vec<&'p str>)| {
            let any = values.iter().copied().map(Some).chain([None]);
            let lists = any.filter_map(|value| self.by_value.get(&key(*field, value)));
            lists.map(Vec::as_slice).collect::<Vec<_>>()
        };
        let exact = fields
            .iter()
            .filter(|(_, values)| !values.is_empty())
            .map(lists);
        let rarest = exact.min_by_key(|lists| lists.iter().map(|list| list.len()).sum::<usize>());
        let found = merge_ascending(rarest.unwrap_or_else(|| vec![&self.all]));
        let mut earlier = found.filter_map(|at| self.policies.get(at).copied());
        let compared = compare(&mut earlier);
        drop(earlier);
        for (field, values) in &fields {
            let is_inexact = values.is_empty().then_some(None);
            for value in values.iter().copied().map(Some).chain(is_inexact) {
                self.by_value
                    .entry(key(*field, value))
                    .or_default()
                    .push(self.policies.len());
            }
        }
        self.all.push(self.policies.len());
        self.policies.push(spanned);
        compared
    }
}

fn describe_entry(entry: &PartCondition) -> String {
    let value = match &entry.condition {
        ValueCondition::OneOf(values) => match &**values {
            [value] => format!("{value:?}"),
            values => format!("{values:?}"),
        },
        ValueCondition::Regex(regex) => format!("{{ regex = {:?} }}", regex.0.as_str()),
        _ => "\"*\"".to_owned(),
    };
    format!("{} = {value}", entry.part.name())
}

/// Whether the conditions list the values that a part of the key may have.
fn is_listed(part: &KeyPart, matcher: &Matcher) -> bool {
    let lists_part = |one: &PartCondition| {
        one.part == *part && matches!(one.condition, ValueCondition::OneOf(_))
    };
    matches!(part, KeyPart::Header(_)) && matcher.conditions.iter().any(lists_part)
}

/// Whether the key has the host, and any host matches.
fn chooses_host(spanned: &PolicyWithReader<'_>) -> bool {
    let is_exact = |host: &HostPattern| matches!(host, HostPattern::Exact(_));
    let lists_hosts = match spanned.policy.matcher.condition_on(&KeyPart::Host) {
        Some(ValueCondition::Hosts(hosts)) => hosts.iter().all(is_exact),
        _ => false,
    };
    let mut sources = spanned.key_parts().flat_map(KeyPart::alternatives);
    sources.any(|part| *part == KeyPart::Host) && !lists_hosts
}

fn warn_client_chosen_keys(
    policies: &[PolicyWithReader<'_>],
    context: &PolicyContext,
    budget: &mut ComparisonBudget,
) {
    let has_client_chosen_key = |one: &PolicyWithReader<'_>| {
        let mut sources = one.key_parts().flat_map(KeyPart::alternatives);
        let is_chosen = |part: &KeyPart| {
            context.is_client_chosen(part) && !is_listed(part, &one.policy.matcher)
        };
        sources.any(|part| *part != KeyPart::Host && is_chosen(part)) || chooses_host(one)
    };
    // Whether the policy limits a client that invents key values.
    let limits_by_client_ip = |one: &PolicyWithReader<'_>| {
        one.policy.is_enforced()
            && one.key_parts().any(|part| *part == KeyPart::ClientIp)
            && !has_client_chosen_key(one)
    };
    let guards = policies.iter().filter(|one| limits_by_client_ip(one));
    let guards = CoverageIndex::new(guards.collect(), |one: &&PolicyWithReader<'_>| {
        &one.policy.matcher
    });
    let has_no_hosts = |one: &&PolicyWithReader<'_>| {
        let matcher = &one.policy.matcher;
        matcher.condition_on(&KeyPart::Host).is_none()
    };
    let choosing = policies.iter().filter(|one| chooses_host(one));
    for spanned in choosing.filter(has_no_hosts) {
        report! { spanned.reader;
            Warning("key") => "a client that sends another Host gets another quota; expected the hosts that you serve as match.hosts";
        }
    }
    for spanned in policies.iter().filter(|one| has_client_chosen_key(one)) {
        let matcher = &spanned.policy.matcher;
        let is_limited = budget
            .limit(guards.candidates(matcher))
            .any(|one| one.policy.matcher.covers(matcher));
        if is_limited || budget.is_exhausted() {
            continue;
        }
        let chosen = spanned.key_parts().find_map(|part| match part {
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
        report! { spanned.reader;
            Warning("key") => "{problem}; add a policy with the key \"client_ip\"";
        }
    }
}
