//! The key `counter`: policies that share counters, and the shapes that can be shared.

use super::PolicyWithReader;
use crate::config::suggestions;
use crate::config::table_reader::report;
use crate::limiter::{Algorithm, Limit};
use crate::policy::{
    ActualCost, AmountSource, CountedStatuses, KeyPart, NamedLimit, OnStoreFailure, Quota,
};
use std::collections::BTreeMap;
use std::mem::discriminant;

/// More counters of a single policy than this are no misspelled ones.
const MAX_SUGGESTED_COUNTERS: usize = 16;

/// Reports policies of one counter that cannot share it, and counters of one policy only.
pub(super) fn check_shared_counters(policies: &[PolicyWithReader<'_>]) {
    let mut by_counter: BTreeMap<&str, Vec<(&PolicyWithReader<'_>, &Quota)>> = BTreeMap::new();
    for spanned in policies {
        let Some(quota) = spanned.quota() else {
            continue;
        };
        if let Some(counter) = quota.key.counter_name() {
            let sharing = by_counter.entry(counter).or_default();
            sharing.push((spanned, quota));
        }
    }
    let single = by_counter.values().filter(|sharing| sharing.len() == 1);
    let has_few_single = single.count() <= MAX_SUGGESTED_COUNTERS;
    for (counter, sharing) in &by_counter {
        if let [(single, _)] = sharing.as_slice() {
            let others = by_counter.keys().copied().filter(|other| other != counter);
            let others: Vec<&str> = others.take_while(|_| has_few_single).collect();
            let meant = match suggestions::find_similar_word(&others, counter) {
                Some(meant) => format!("did you mean \"{meant}\"?"),
                None => "expected another policy with this counter, or no such key".to_owned(),
            };
            report! { single.reader;
                Warning("counter") => "no other policy has this counter, so it is not shared; {meant}";
            }
        }
        let Some((&first, others)) = sharing.split_first() else {
            continue;
        };
        let mut chains = vec![Vec::new(); limit_groups(first.1).count()];
        insert_into_chains(first, &mut chains);
        // The first difference suffices: each of the policies has to be like the first.
        for &sharing in others {
            let difference = find_difference(sharing, first).map(|problem| (first.0, problem));
            let difference = difference.or_else(|| insert_into_chains(sharing, &mut chains));
            if let Some((other, problem)) = difference {
                let other = other.quote_name_and_position();
                report! { sharing.0.reader;
                    Error("counter") => "{other} has this counter too: {problem}";
                }
            }
        }
    }
}

/// Limits of the policies of one counter, each as tight as the next one or tighter.
type LimitChain<'p, 'r> = Vec<(&'p PolicyWithReader<'r>, &'p [NamedLimit])>;

/// Inserts the limits of a policy and of its overrides, each into its chain. Returns a policy that
/// is neither tighter nor wider, and the difference.
fn insert_into_chains<'p, 'r>(
    (spanned, quota): (&'p PolicyWithReader<'r>, &'p Quota),
    chains: &mut [LimitChain<'p, 'r>],
) -> Option<(&'p PolicyWithReader<'r>, String)> {
    let mut crossed = None;
    for (chain, limits) in chains.iter_mut().zip(limit_groups(quota)) {
        let at = chain.partition_point(|(_, others)| has_tighter(others, limits));
        let tighter = at.checked_sub(1).and_then(|at| chain.get(at));
        match tighter.and_then(|(other, others)| Some((*other, describe_crossed(limits, others)?)))
        {
            Some(found) => crossed = Some(found),
            None => chain.insert(at, (spanned, limits)),
        }
    }
    crossed
}

/// The limits of a policy, and those of each of its overrides.
fn limit_groups(quota: &Quota) -> impl Iterator<Item = &[NamedLimit]> {
    let overrides = quota.overrides.as_slice().iter();
    std::iter::once(&*quota.limits).chain(overrides.map(|one| &*one.limits))
}

/// Whether one of `limits` is tighter than its counterpart.
fn has_tighter(limits: &[NamedLimit], others: &[NamedLimit]) -> bool {
    let mut pairs = limits.iter().zip(others);
    pairs.any(|(one, other)| one.limit.is_tighter_than(&other.limit))
}

/// Describes that each of two policies has a limit that is tighter than in the other one.
fn describe_crossed(limits: &[NamedLimit], others: &[NamedLimit]) -> Option<String> {
    let mut pairs = limits.iter().zip(others);
    let (_, higher) = pairs
        .clone()
        .find(|(one, other)| one.limit.is_tighter_than(&other.limit))?;
    let (_, lower) = pairs.find(|(one, other)| other.limit.is_tighter_than(&one.limit))?;
    Some(format!(
        "its limit \"{}\" has lower requests or burst than here, and \"{}\" higher ones; expected all lower limits in one of the two policies",
        lower.name, higher.name
    ))
}

/// Why two policies cannot have one counter.
fn find_difference(
    (one, quota): (&PolicyWithReader<'_>, &Quota),
    (other, other_quota): (&PolicyWithReader<'_>, &Quota),
) -> Option<String> {
    let (keys, other_keys) = (quota.overrides.as_slice(), other_quota.overrides.as_slice());
    let has_same_overrides = keys.len() == other_keys.len()
        && keys
            .iter()
            .zip(other_keys)
            .all(|(one, other)| (&one.values, one.rule) == (&other.values, other.rule));
    let (policy, other) = (&one.policy, &other.policy);
    let is_local = policy.on_store_failure == OnStoreFailure::Local;
    macro_rules! expect_same {
        ($($is_same:expr => $what:literal;)+) => {$(
            if !$is_same {
                return Some(concat!("expected the same ", $what).to_owned());
            }
        )+};
    }
    expect_same! {
        have_same_parts(quota, other_quota) => "key (header names and ;hash included)";
        policy.mode == other.mode => "mode; policies that do not reject count separately";
        quota.key.scope == other_quota.key.scope => "scope";
        policy.on_store_failure == other.on_store_failure => "on_store_failure";
        quota.shards == other_quota.shards => "shards";
        quota.lease == other_quota.lease => "lease";
        quota.count_rejected == other_quota.count_rejected => "count_rejected";
        quota.notify == other_quota.notify => "notify; the first crossing is that of all of them";
        quota.block == other_quota.block => "block_for; a block holds for all of them";
        counted_statuses(quota) == counted_statuses(other_quota) => "count_when; the response settles it";
        has_same_overrides => "[[policy.override]] keys, actions and modes, in the same order";
    }
    let needs_same_amounts = match (quota.lease.is_some(), is_local, quota.shards > 1) {
        (true, ..) => Some("lease, which needs equal amounts"),
        (_, true, _) => Some("on_store_failure = \"local\", which needs equal amounts"),
        (.., true) => Some("shards, whose parts need equal amounts"),
        _ => None,
    };
    limit_groups(quota)
        .zip(limit_groups(other_quota))
        .find_map(|(limits, others)| find_limit_difference(limits, others, needs_same_amounts))
}

/// The statuses that `count_when` counts.
fn counted_statuses(quota: &Quota) -> Option<&CountedStatuses> {
    match &quota.cost.as_estimate()?.actual {
        ActualCost::Status(counted) => Some(counted),
        ActualCost::Sum(_) => None,
    }
}

/// Whether keys with the same values mean the same. The patterns of `path:` parts may differ.
fn have_same_parts(one: &Quota, other: &Quota) -> bool {
    let (parts, others) = (one.key.components(), other.key.components());
    parts.len() == others.len()
        && parts.iter().zip(others).all(|(one, other)| {
            let is_same = match (&one.part, &other.part) {
                (KeyPart::PathCaptures(one), KeyPart::PathCaptures(other)) => {
                    one.capture_count() == other.capture_count()
                }
                (one, other) => one == other,
            };
            is_same && one.is_hashed == other.is_hashed
        })
}

fn find_limit_difference(
    limits: &[NamedLimit],
    others: &[NamedLimit],
    needs_same_amounts: Option<&str>,
) -> Option<String> {
    if limits.len() != others.len() {
        return Some("expected the same number of limits".to_owned());
    }
    let pairs = || limits.iter().zip(others);
    let differing = pairs().find_map(|(one, other)| {
        let what = find_shape_difference(one, other)?;
        Some(format!(
            "its limit \"{}\" differs; expected the same {what}",
            other.name
        ))
    });
    if differing.is_some() {
        return differing;
    }
    let amounts = |limit: &Limit| {
        let capacity = (limit.capacity(), limit.max_delay_remainder());
        (limit.requests, capacity)
    };
    let has_same_amounts = pairs().all(|(one, other)| amounts(&one.limit) == amounts(&other.limit));
    if let Some(setting) = needs_same_amounts.filter(|_| !has_same_amounts) {
        return Some(format!(
            "expected the same requests and burst, or no {setting}"
        ));
    }
    let has_same_sources = pairs().all(|(one, other)| amount_source(one) == amount_source(other));
    if !has_same_sources
        && (limits.len() > 1 || limits.iter().any(|named| named.limit.algorithm.is_bucket()))
    {
        return Some(
            "a request may state amounts by which neither policy is the stricter one; expected the same requests_from, default and max"
                .to_owned(),
        );
    }
    describe_crossed(limits, others)
}

/// Where a request states the amount of a limit, with the default; `None` if it does not.
fn amount_source(named: &NamedLimit) -> Option<(&AmountSource, u64)> {
    let source = named.amount.as_deref()?;
    Some((source, named.limit.requests))
}

fn find_shape_difference(one: &NamedLimit, other: &NamedLimit) -> Option<&'static str> {
    let (limit, other_limit) = (&one.limit, &other.limit);
    if discriminant(&limit.algorithm) != discriminant(&other_limit.algorithm) {
        // "day" and "24h" have the same length, and windows of their own.
        let is_period = limit.algorithm.into_str() == other_limit.algorithm.into_str();
        return Some(if is_period { "per" } else { "algorithm" });
    }
    if limit.per_us != other_limit.per_us {
        return Some(match limit.algorithm {
            Algorithm::Concurrency { .. } => "lease_ttl",
            _ => "per",
        });
    }
    if limit.counter_identity() != other_limit.counter_identity() {
        return Some("buckets, offset or tz");
    }
    let warm_up = |limit: &Limit| match limit.algorithm {
        Algorithm::TokenBucket { warm_up_us, .. } => Some((limit.requests, warm_up_us)),
        Algorithm::LeakyBucket { .. } => Some((limit.requests, 0)),
        _ => None,
    };
    if warm_up(limit) != warm_up(other_limit) {
        return Some(
            "requests and warm_up, which set the bucket's rate; only burst and max_delay may differ",
        );
    }
    if one.name != other.name {
        return Some("name");
    }
    (one.unit != other.unit).then_some("unit")
}
