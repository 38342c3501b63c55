//! `Retry-After` covers every limit of all policies of a request: if nothing else is charged, none
//! of them refuses after the wait.

use super::limits::skew_us;
use super::{CounterHistory, CounterUse, FinishedRun, Violation, lockouts};
use crate::sim::instance::Outcome;
use crate::sim::scenario::{Amounts, Rule, SECOND, Topology};

/// A refusal may know the units of other limits as of a tenth of the wait ago: at least and at most
/// these times, and a quarter of a second while a request asks Redis.
const MIN_READING_AGE_US: u64 = SECOND + SECOND / 4;
pub(super) const MAX_READING_AGE_US: u64 = 10 * SECOND;

pub(super) fn check_retry(
    run: &FinishedRun<'_>,
    uses: &[(&CounterHistory<'_>, &CounterUse)],
) -> Option<Violation> {
    let (_, first) = uses.first()?;
    let Outcome::Refused {
        retry_after_us: Some(wait_us),
    } = run.records[first.request].outcome
    else {
        return None;
    };
    // Lost charges count for nothing.
    if run.excuses.iter().any(|excuse| excuse.loses_charges) {
        return None;
    }
    let (history, problem) = uses.iter().find_map(|(history, one)| {
        let problem = describe_refusal(run, history, one, wait_us)?;
        Some((history, problem))
    })?;
    Some(Violation {
        rule: "Retry-After does not cover a limit",
        at_us: first.decided_us,
        text: format!("{}: {problem} after {wait_us} us", history.name()),
    })
}

/// Describes how the units that are known at a refusal refuse the same request after its wait.
fn describe_refusal(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    refused: &CounterUse,
    wait_us: u64,
) -> Option<String> {
    let policy = history.policy;
    // Leased units of the process count as free.
    if policy.lease.is_some() || !history.wall_clock_steps(run).is_empty() {
        return None;
    }
    let request = &run.scenario.requests[refused.request];
    let cost = policy.cost(request);
    let retry_us = refused.decided_us + wait_us;
    let age_us = match run.scenario.topology {
        Topology::Memory { .. } => 0,
        // Requests with larger amounts charge a counter whose refusal of smaller ones is cached.
        _ if policy.amounts == Amounts::OfRequest || policy.other_route.is_some() => {
            MAX_READING_AGE_US
        }
        _ => (wait_us / 9).clamp(MIN_READING_AGE_US, MAX_READING_AGE_US),
    };
    let known_us = refused.arrived_us.saturating_sub(age_us);
    // Redis lacks units that an instance has not written back yet. Charges of the same moment may
    // come later.
    let known = history
        .uses
        .iter()
        .filter(|one| one.is_forwarded && one.is_healthy && one.decided_us < known_us);
    let level = |rate: f64| {
        let fill = |(level, at_us): (f64, u64), one: &CounterUse| {
            let left = level - rate * one.arrived_us.saturating_sub(at_us) as f64;
            (
                left.max(0.0) + one.least_units as f64,
                one.arrived_us.max(at_us),
            )
        };
        let (level, at_us) = known.clone().fold((0.0, 0), fill);
        level - rate * (retry_us - at_us) as f64
    };
    let rate = policy.requests as f64 / policy.per_us as f64;
    let capacity = match policy.rule {
        Rule::TokenBucket { burst } => burst,
        Rule::LeakyBucket { max_delay_us } => max_delay_us * policy.requests / policy.per_us + 1,
        Rule::Concurrency { .. } => return None,
        _ => {
            return lockouts::limits_of(policy, request).find_map(|(limit, per_us)| {
                let from_us = match policy.rule {
                    // Clocks with a rate have other windows.
                    Rule::FixedWindow | Rule::CalendarDay if !run.scenario.rates_ppm.is_empty() => {
                        return None;
                    }
                    Rule::FixedWindow | Rule::CalendarDay => retry_us / per_us * per_us,
                    _ => (retry_us + skew_us(run, per_us)).saturating_sub(per_us),
                };
                let counted = known.clone().filter(|one| one.arrived_us >= from_us);
                let units: u64 = counted.map(|one| one.least_units).sum();
                (units + cost > limit).then(|| format!("{units} of {limit} units are used"))
            });
        }
    };
    let level = level(rate);
    let slack = rate * skew_us(run, policy.per_us) as f64 + 1.0;
    (level + cost as f64 > capacity as f64 + slack)
        .then(|| format!("the level is {level:.1} of {capacity}"))
}
