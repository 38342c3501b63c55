//! `count_when`: a response that does not count costs nothing, and only those that count lock a
//! client out.

use super::limits::skew_us;
use super::retry::MAX_READING_AGE_US;
use super::service::{RETURN_US, was_refused_since};
use super::{CounterHistory, CounterUse, FinishedRun, Violation};
use crate::sim::instance::Outcome;
use crate::sim::scenario::{PolicySpec, RequestSpec, Rule, Topology};

/// The units of a request at the time of a refusal: those of its response, if that has ended.
pub(super) fn possible_units(
    run: &FinishedRun<'_>,
    policy: &PolicySpec,
    one: &CounterUse,
    refused: &CounterUse,
) -> u64 {
    let record = &run.records[one.request];
    let is_settled = record.is_settled
        && run.excuses.is_empty()
        && record
            .ended_us
            .is_some_and(|ended_us| ended_us + RETURN_US < refused.arrived_us);
    match policy.actual_units(&run.scenario.requests[one.request]) {
        Some(units) if is_settled => units,
        _ => one.most_units,
    }
}

/// The limits of a policy for a request, each with its period.
pub(super) fn limits_of(
    policy: &PolicySpec,
    request: &RequestSpec,
) -> impl Iterator<Item = (u64, u64)> {
    let second = policy.second_limit.map(|limit| (limit, 10 * policy.per_us));
    std::iter::once((policy.amount(request), policy.per_us)).chain(second)
}

/// Whether a refusal may have started a block: with `count_when`, the responses until then may have
/// filled a limit.
pub(super) fn may_start_block(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    refused: &CounterUse,
) -> bool {
    let policy = history.policy;
    if !policy.counts_responses {
        return true;
    }
    let request = &run.scenario.requests[refused.request];
    let cost = policy.cost(request);
    limits_of(policy, request).any(|(limit, per_us)| {
        let length_us = match policy.rule {
            Rule::SlidingWindow => per_us + per_us / 10,
            _ => per_us,
        };
        let from_us = refused
            .arrived_us
            .saturating_sub(length_us + length_us / 500 + RETURN_US);
        let counted = history.uses.iter().filter(|one| {
            let record = &run.records[one.request];
            let ended_us = record.ended_us.unwrap_or(run.scenario.end_us);
            let is_unknown = record.outcome == Outcome::Unknown || !one.is_healthy;
            let is_before = is_unknown || ended_us <= refused.decided_us;
            is_before && ended_us >= from_us && one.arrived_us <= refused.decided_us
        });
        let units: u64 = counted
            .map(|one| match run.records[one.request].is_settled {
                true => policy
                    .actual_units(&run.scenario.requests[one.request])
                    .unwrap_or(one.most_units),
                false => one.most_units,
            })
            .sum();
        units + cost > limit
    })
}

/// After a refusal, with `count_when` when responses fill a limit, nothing is forwarded until the
/// block ends, and no client is told to come back earlier. Without faults, for sliding algorithms.
pub(super) fn check_lockouts(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
) -> Option<Violation> {
    let policy = history.policy;
    let block_us = policy.block_for_us.filter(|_| run.excuses.is_empty())?;
    if !matches!(policy.rule, Rule::SlidingLog | Rule::SlidingWindow) {
        return None;
    }
    let is_memory = matches!(run.scenario.topology, Topology::Memory { .. });
    let is_known_refusal = |one: &&CounterUse| {
        let record = &run.records[one.request];
        // A request that is refused always, because its amount is 0, starts no block.
        matches!(
            record.outcome,
            Outcome::Refused {
                retry_after_us: Some(_)
            }
        ) && (record.is_from_redis || is_memory)
            && run.policies_of(&run.scenario.requests[one.request]).count() == 1
            // In a block, a refusal does not start another one.
            && !was_refused_since(run, history, one, block_us, |_| true)
    };
    for refused in history.uses.iter().filter(is_known_refusal) {
        let is_full = |limit| is_certainly_full(run, history, refused, limit);
        let request = &run.scenario.requests[refused.request];
        if policy.counts_responses && !limits_of(policy, request).any(is_full) {
            continue;
        }
        let end_us = (refused.arrived_us + block_us).saturating_sub(skew_us(run, block_us));
        let is_in_block = |one: &&CounterUse| {
            one.is_forwarded && one.arrived_us >= refused.decided_us && one.decided_us < end_us
        };
        let ends_in_block = |one: &&CounterUse| {
            let Outcome::Refused { retry_after_us } = run.records[one.request].outcome else {
                return false;
            };
            let is_known = one.arrived_us >= refused.decided_us + MAX_READING_AGE_US;
            let retry_us = retry_after_us.map(|us| one.decided_us + us);
            is_known && one.arrived_us < end_us && retry_us.is_some_and(|us| us < end_us)
        };
        let forwarded = history.uses.iter().find(is_in_block);
        let told = || history.uses.iter().find(ends_in_block);
        let found = forwarded.map(|one| ("forwarded in a block", one));
        let found = found.or_else(|| Some(("Retry-After ends in a block", told()?)));
        if let Some((rule, one)) = found {
            return Some(Violation {
                rule,
                at_us: one.decided_us,
                text: format!(
                    "{}: blocked from {} to {end_us} us",
                    history.name(),
                    refused.decided_us
                ),
            });
        }
    }
    None
}

/// Whether responses that the store knows for sure fill a limit at a refusal.
fn is_certainly_full(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    refused: &CounterUse,
    (limit, per_us): (u64, u64),
) -> bool {
    let policy = history.policy;
    let from_us = (refused.decided_us + skew_us(run, per_us)).saturating_sub(per_us);
    let counted = history.uses.iter().filter(|one| {
        let record = &run.records[one.request];
        let is_known = |ended_us| ended_us + RETURN_US <= refused.arrived_us;
        one.is_forwarded
            && record.is_settled
            && one.decided_us >= from_us
            && record.ended_us.is_some_and(is_known)
    });
    let units: u64 = counted
        .filter_map(|one| policy.actual_units(&run.scenario.requests[one.request]))
        .sum();
    units + policy.cost(&run.scenario.requests[refused.request]) > limit
}
