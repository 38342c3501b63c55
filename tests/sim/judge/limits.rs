//! Never more than the limit, with the allowance of the faults so far.

use super::{CounterHistory, CounterUse, FinishedRun, Violation};
use crate::sim::scenario::{Fault, FaultKind, OnFailure, PolicySpec, Rule, ScenarioClass};

/// Instances are connected again this long after a server answers again.
const RECONNECT_US: u64 = 1_000_000;

pub(super) fn check_limits(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
) -> Option<Violation> {
    let policy = history.policy;
    if run.scenario.class == ScenarioClass::MemoryEviction && policy.route != 0 {
        // A policy with more keys than its share of a full memory store loses its own counters.
        return None;
    }
    let forwarded: Vec<&CounterUse> = {
        let mut uses: Vec<_> = history.uses.iter().filter(|one| one.is_forwarded).collect();
        uses.sort_by_key(|one| one.decided_us);
        uses
    };
    let amount = |one: &CounterUse| policy.amount(&run.scenario.requests[one.request]);
    match policy.rule {
        Rule::SlidingLog | Rule::SlidingWindow => {
            check_windows(run, history, &forwarded, (&amount, policy.per_us)).or_else(|| {
                let second = policy.second_limit?;
                check_windows(run, history, &forwarded, (&|_| second, 10 * policy.per_us))
            })
        }
        Rule::FixedWindow | Rule::CalendarDay => {
            let largest = forwarded.iter().map(|one| amount(one)).max().unwrap_or(0);
            check_windows(run, history, &forwarded, (&|_| 2 * largest, policy.per_us))
        }
        Rule::TokenBucket { burst } => check_bucket(run, history, &forwarded, burst),
        Rule::LeakyBucket { max_delay_us } => {
            // Without Redis, each instance may release one request at the same moment.
            let had_outage = run.excuses.iter().any(|excuse| excuse.is_outage);
            let released = u64::from(had_outage) * run.scenario.instances as u64;
            let capacity = max_delay_us * policy.requests / policy.per_us + 1 + released;
            check_bucket(run, history, &forwarded, capacity)
                .or_else(|| check_distances(run, history))
        }
        Rule::Concurrency { ttl_us } => check_slots(run, history, ttl_us),
    }
}

/// The time between charge and verdict varies by so much.
pub(super) fn skew_us(run: &FinishedRun<'_>, per_us: u64) -> u64 {
    let rate_ppm = run
        .scenario
        .rates_ppm
        .iter()
        .map(|rate| rate.unsigned_abs())
        .max()
        .unwrap_or(0);
    run.scenario.timeout_us + 4 * run.scenario.delay_us + 20_000 + per_us / 1_000_000 * 2 * rate_ppm
}

/// The additional limits that an interval may contain.
pub(super) fn extra_limits(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    from_us: u64,
    to_us: u64,
) -> u64 {
    let overlaps = |interval: Option<(u64, u64)>| {
        interval.is_some_and(|(start_us, end_us)| start_us <= to_us && from_us <= end_us)
    };
    let steps = history.wall_clock_steps(run);
    let forward = steps.iter().filter(|(_, by_us)| *by_us > 0);
    let begun = forward.filter(|(at_us, _)| overlaps(Some((*at_us, *at_us))));
    run.excuses
        .iter()
        .filter(|excuse| excuse.server.is_none() || excuse.server == history.server)
        .filter(|excuse| overlaps(excuse.extra_limit))
        .count() as u64
        + begun.count() as u64
}

/// Units that Redis admitted in a pause of an outage. Instances without a reply about the key do
/// not know these units.
pub(super) fn units_in_pauses(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    (from_us, to_us): (u64, u64),
) -> u64 {
    let is_in_pause = |one: &&CounterUse| {
        let is_in = |(start_us, end_us)| {
            (start_us..=end_us + run.scenario.timeout_us).contains(&one.decided_us)
                && from_us <= end_us
                && start_us <= to_us
        };
        !run.records[one.request].is_degraded
            && run
                .excuses
                .iter()
                .any(|excuse| excuse.pause.is_some_and(is_in))
    };
    let uses = history.uses.iter().filter(|one| one.is_forwarded);
    uses.filter(is_in_pause).map(|one| one.least_units).sum()
}

fn check_windows(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    forwarded: &[&CounterUse],
    (limit_of, per_us): (&dyn Fn(&CounterUse) -> u64, u64),
) -> Option<Violation> {
    let skew_us = skew_us(run, per_us);
    let largest = forwarded.iter().map(|one| limit_of(one)).max().unwrap_or(0);
    let length_us = per_us.saturating_sub(skew_us);
    for (number, last) in forwarded.iter().enumerate() {
        let mut units = 0;
        let window = forwarded[..=number].iter().rev();
        // Verdicts may come in another order than the decisions.
        let last_decided = window
            .clone()
            .take_while(|one| one.decided_us + skew_us >= last.decided_us);
        let limit = last_decided.map(|one| limit_of(one)).max().unwrap_or(0);
        // Also shorter intervals: a longer one may be excused by a fault before it.
        for first in window.take_while(|first| first.decided_us + length_us > last.decided_us) {
            units += first.least_units;
            if units <= limit {
                continue;
            }
            let extra = extra_limits(run, history, first.decided_us, last.decided_us);
            let allowed = limit
                + largest * extra
                + units_in_pauses(run, history, (first.decided_us, last.decided_us));
            if units > allowed {
                let from_us = first.decided_us;
                return Some(Violation {
                    rule: "more than the limit",
                    at_us: last.decided_us,
                    text: format!(
                        "{}: {units} units from {from_us} us on, allowed {allowed}",
                        history.name()
                    ),
                });
            }
        }
    }
    None
}

fn check_bucket(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    forwarded: &[&CounterUse],
    burst: u64,
) -> Option<Violation> {
    let policy = history.policy;
    let rate = policy.requests as f64 / policy.per_us as f64;
    let slack = rate * skew_us(run, policy.per_us) as f64 + 1.0;
    let (mut level, mut at_us) = (0.0_f64, 0);
    let mut excused = 0;
    for one in forwarded {
        level = (level - rate * (one.decided_us - at_us) as f64).max(0.0) + one.least_units as f64;
        at_us = one.decided_us;
        // Each excuse empties the bucket once.
        let extra = extra_limits(run, history, 0, at_us);
        let allowed = burst as f64 + slack;
        if level > allowed && extra > excused {
            (level, excused) = (one.least_units as f64, excused + 1);
        } else if level > allowed {
            return Some(Violation {
                rule: "more than the limit",
                at_us,
                text: format!(
                    "{}: a bucket level of {level:.1}, allowed {allowed:.1}",
                    history.name()
                ),
            });
        }
    }
    None
}

/// Requests leave a queue at a distance, whatever was returned.
fn check_distances(run: &FinishedRun<'_>, history: &CounterHistory<'_>) -> Option<Violation> {
    let is_queue = |one: &&PolicySpec| matches!(one.rule, Rule::LeakyBucket { .. });
    let queues = run.scenario.policies.iter().filter(is_queue);
    // In two queues, a request leaves at the later one of its positions.
    let is_in_two = queues
        .filter(|one| one.route == history.policy.route)
        .count()
        > 1;
    if !run.excuses.is_empty() || history.policy.is_dynamic || is_in_two {
        return None;
    }
    let forwarded = history.uses.iter().filter(|one| one.is_forwarded);
    let mut times: Vec<u64> = forwarded
        .filter_map(|one| run.records[one.request].forwarded_us)
        .collect();
    times.sort_unstable();
    let distance_us = history.policy.per_us / history.policy.requests;
    // The delay of a reply varies. Timers fire once per millisecond.
    let least_us = distance_us.saturating_sub(5 * run.scenario.delay_us + 2_000);
    let too_close = times.windows(2).find(|pair| pair[1] - pair[0] < least_us)?;
    Some(Violation {
        rule: "requests leave a queue together",
        at_us: too_close[1],
        text: format!(
            "{}: {} us apart, expected {distance_us}",
            history.name(),
            too_close[1] - too_close[0]
        ),
    })
}

/// A lease ends when it says: an instance that ran nothing for longer than a lease lasts has no
/// leased units until Redis has answered again.
pub(super) fn check_lease_ends(run: &FinishedRun<'_>) -> Option<Violation> {
    let lease_ends = |fault: &Fault| match fault.kind {
        FaultKind::Freeze {
            instance, for_us, ..
        } => Some((instance, for_us, fault.at_us + for_us)),
        _ => None,
    };
    let pauses: Vec<_> = run.scenario.faults.iter().filter_map(lease_ends).collect();
    let mut uses = run.scenario.requests.iter().zip(run.records);
    uses.find_map(|(request, record)| {
        let decided_us = record.decided_us.filter(|_| record.is_from_lease)?;
        let leases = run.policies_of(request).filter_map(|(_, one)| one.lease);
        let ttl_us = leases.map(|(_, ttl_us)| ttl_us).max()?;
        let round_trip_us = 2 * run.scenario.delay_us;
        let is_too_late = pauses.iter().any(|(instance, for_us, until_us)| {
            *instance == request.instance
                && *for_us > ttl_us
                && (*until_us..*until_us + round_trip_us).contains(&decided_us)
        });
        is_too_late.then(|| Violation {
            rule: "a lease outlives its end",
            at_us: decided_us,
            text: format!(
                "instance {} has leased units after a pause",
                request.instance
            ),
        })
    })
}

/// Requests at the app at a time.
fn check_slots(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    ttl_us: u64,
) -> Option<Violation> {
    let mut changes: Vec<(u64, i64)> = Vec::new();
    for one in history.uses.iter().filter(|one| one.is_forwarded) {
        let record = &run.records[one.request];
        let forwarded_us = record.forwarded_us.unwrap_or(one.decided_us);
        // A request whose instance ended is not at the app any more.
        let Some(ended_us) = record.ended_us else {
            continue;
        };
        changes.push((forwarded_us, 1));
        changes.push((ended_us, -1));
    }
    changes.sort_unstable();
    let requests = history
        .uses
        .iter()
        .map(|one| &run.scenario.requests[one.request]);
    let largest = requests
        .map(|one| history.policy.amount(one))
        .max()
        .unwrap_or(0);
    let mut in_flight = 0;
    for (at_us, change) in changes {
        in_flight += change;
        // Slots that were not renewed have lapsed; those of requests from before a loss are
        // unknown.
        let lapse_us = ttl_us + 5_000_000;
        let is_lapsing = run.excuses.iter().any(|excuse| {
            let is_renewed_in_time = excuse.instance.is_none()
                && !excuse.loses_charges
                && history.policy.on_failure != OnFailure::Local
                && excuse.to_us - excuse.from_us + RECONNECT_US < ttl_us * 2 / 3;
            (excuse.is_outage || excuse.loses_charges)
                && history.instance.is_none()
                && !is_renewed_in_time
                && excuse.from_us <= at_us
                && at_us <= excuse.to_us + lapse_us
        });
        let allowed = largest * if is_lapsing { 3 } else { 1 };
        if in_flight > allowed as i64 {
            return Some(Violation {
                rule: "more than the limit",
                at_us,
                text: format!(
                    "{}: {in_flight} in flight, allowed {allowed}",
                    history.name()
                ),
            });
        }
    }
    None
}
