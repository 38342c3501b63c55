//! `count_when`: a response that does not count costs nothing, and only those that count lock a
//! client out.

use super::limits::skew_us;
use super::service::{RETURN_US, was_refused_since};
use super::{CounterHistory, CounterUse, FinishedRun, Violation};
use crate::sim::instance::Outcome;
use crate::sim::scenario::{PolicySpec, Rule, Topology};

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

/// The limits of a policy, each with its period.
fn limits_of(policy: &PolicySpec) -> impl Iterator<Item = (u64, u64)> {
    let second = policy.second_limit.map(|limit| (limit, 10 * policy.per_us));
    std::iter::once((policy.requests, policy.per_us)).chain(second)
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
    let cost = policy.cost(&run.scenario.requests[refused.request]);
    limits_of(policy).any(|(limit, per_us)| {
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

/// After a refusal when responses fill a limit, nothing is forwarded until the block ends. Without
/// faults, for sliding algorithms.
pub(super) fn check_lockouts(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
) -> Option<Violation> {
    let policy = history.policy;
    let block_us = policy
        .block_for_us
        .filter(|_| policy.counts_responses && run.excuses.is_empty())?;
    if !matches!(policy.rule, Rule::SlidingLog | Rule::SlidingWindow) {
        return None;
    }
    let is_memory = matches!(run.scenario.topology, Topology::Memory { .. });
    let is_known_refusal = |one: &&CounterUse| {
        let record = &run.records[one.request];
        matches!(record.outcome, Outcome::Refused { .. })
            && (record.is_from_redis || is_memory)
            && run.policies_of(&run.scenario.requests[one.request]).count() == 1
            // In a block, a refusal does not start another one.
            && !was_refused_since(run, history, one, block_us, |_| true)
    };
    for refused in history.uses.iter().filter(is_known_refusal) {
        if !limits_of(policy).any(|limit| is_certainly_full(run, history, refused, limit)) {
            continue;
        }
        let end_us = (refused.arrived_us + block_us).saturating_sub(skew_us(run, block_us));
        let is_in_block = |one: &&CounterUse| {
            one.is_forwarded && one.arrived_us >= refused.decided_us && one.decided_us < end_us
        };
        if let Some(one) = history.uses.iter().find(is_in_block) {
            return Some(Violation {
                rule: "forwarded in a block",
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
