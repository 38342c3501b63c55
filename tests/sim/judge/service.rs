//! Still answering: healthy masters decide, free units are given, refusals are cached, and
//! everything recovers.

use super::allowance::RECOVERY_US;
use super::{CounterHistory, CounterUse, FinishedRun, Violation, lockouts, retry};
use crate::sim::instance::Outcome;
use crate::sim::scenario::{
    Amounts, Fault, FaultKind, PolicySpec, Rule, SECOND, ScenarioClass, Topology,
};
use crate::sim::world::World;
use std::collections::BTreeMap;

/// Units of a request that was refused, or of a response that has ended, return within this time.
pub(super) const RETURN_US: u64 = 500_000;

/// After an outage, slots that ended in it are released within this time.
const RELEASED_US: u64 = 3 * SECOND;

/// A refusal is cached for at most this time.
const CACHED_US: u64 = SECOND;

pub(super) fn check_service(
    run: &FinishedRun<'_>,
    histories: &[CounterHistory<'_>],
) -> Vec<Violation> {
    let mut by_request: BTreeMap<usize, Vec<(&CounterHistory<'_>, &CounterUse)>> = BTreeMap::new();
    for history in histories {
        for one in &history.uses {
            by_request
                .entry(one.request)
                .or_default()
                .push((history, one));
        }
    }
    let mut violations: Vec<Violation> = by_request
        .values()
        .filter_map(|uses| check_request(run, uses))
        .take(5)
        .collect();
    violations.extend(check_questions(run, histories));
    violations
}

fn check_request(
    run: &FinishedRun<'_>,
    uses: &[(&CounterHistory<'_>, &CounterUse)],
) -> Option<Violation> {
    let (_, first) = uses.first()?;
    let record = &run.records[first.request];
    if !uses.iter().all(|(_, one)| one.is_healthy) {
        return None;
    }
    let violation = |rule: &'static str, text: String| {
        Some(Violation {
            rule,
            at_us: first.decided_us,
            text: format!("request {}: {text}", first.request),
        })
    };
    match record.outcome {
        Outcome::Unavailable if is_near(run, first) => {
            violation("not answered by a healthy master", "503".to_owned())
        }
        Outcome::Forwarded | Outcome::Refused { .. }
            if record.is_degraded && is_near(run, first) =>
        {
            violation(
                "not answered by a healthy master",
                "decided without Redis".to_owned(),
            )
        }
        Outcome::Refused { .. } => {
            let is_justified = uses
                .iter()
                .any(|(history, one)| may_refuse(run, history, one));
            let names: Vec<String> = uses.iter().map(|(history, _)| history.name()).collect();
            if is_justified {
                retry::check_retry(run, uses)
            } else {
                violation("refused although units are free", names.join(", "))
            }
        }
        _ => None,
    }
}

/// Whether a decision with scripts that are not loaded yet fits into the timeout, also of a server
/// that is slow for a time.
fn is_near(run: &FinishedRun<'_>, one: &CounterUse) -> bool {
    let extra_us = run.scenario.faults.iter().filter_map(|fault| {
        let FaultKind::Slow {
            extra_us, for_us, ..
        } = fault.kind
        else {
            return None;
        };
        let overlaps = fault.at_us <= one.decided_us && one.arrived_us <= fault.at_us + for_us;
        overlaps.then_some(extra_us)
    });
    let delay_us = run.scenario.delay_us + extra_us.max().unwrap_or(0);
    12 * delay_us * 5 / 4 < run.scenario.timeout_us
}

/// Whether a policy may have refused a request, at most.
fn may_refuse(run: &FinishedRun<'_>, history: &CounterHistory<'_>, refused: &CounterUse) -> bool {
    let request = &run.scenario.requests[refused.request];
    may_refuse_units(run, history, refused, history.policy.cost(request))
}

/// Whether a policy may have refused so many units at the time of a use, at most.
pub(super) fn may_refuse_units(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    refused: &CounterUse,
    cost: u64,
) -> bool {
    let policy = history.policy;
    // The units of an outage count from a later time; slots that ended in it are free again.
    let past_us = match policy.rule {
        Rule::Concurrency { .. } => RELEASED_US,
        _ if policy.second_limit.is_some() => 20 * policy.per_us + RECOVERY_US,
        _ => 2 * policy.per_us + RECOVERY_US,
    };
    let had_outage = run.excuses.iter().any(|excuse| {
        excuse.is_outage
            && excuse.from_us <= refused.decided_us
            && excuse.to_us + past_us >= refused.arrived_us
    });
    let is_in_redis =
        history.instance.is_none() && !matches!(run.scenario.topology, Topology::Memory { .. });
    let is_set_back = |(at_us, by_us): &(u64, i64)| {
        let until_us = at_us + by_us.unsigned_abs() + policy.per_us;
        *by_us < 0 && *at_us <= refused.decided_us && refused.arrived_us <= until_us
    };
    if had_outage && is_in_redis || history.wall_clock_steps(run).iter().any(is_set_back) {
        return true;
    }
    if is_behind_clock_step(run, history, refused) {
        return true;
    }
    let request = &run.scenario.requests[refused.request];
    match policy.rule {
        Rule::SlidingLog | Rule::FixedWindow | Rule::CalendarDay | Rule::SlidingWindow => {
            lockouts::limits_of(policy, request)
                .any(|limit| is_window_full(run, history, refused, cost, limit))
                || policy.block_for_us.is_some_and(|block_us| {
                    let may_start = |one: &CounterUse| lockouts::may_start_block(run, history, one);
                    was_refused_since(run, history, refused, block_us, may_start)
                })
        }
        Rule::TokenBucket { burst } => is_bucket_full(run, history, refused, cost, burst),
        Rule::LeakyBucket { max_delay_us } => {
            let capacity = max_delay_us * policy.requests / policy.per_us + 1;
            is_bucket_full(run, history, refused, cost, capacity)
        }
        Rule::Concurrency { ttl_us } => {
            let is_held = |one: &&CounterUse| {
                let record = &run.records[one.request];
                let end_us = match record.outcome {
                    Outcome::Refused { .. } | Outcome::Unavailable => one.decided_us + RETURN_US,
                    _ => record
                        .ended_us
                        .map_or(run.scenario.end_us, |ended_us| ended_us + RETURN_US),
                };
                let is_left = record.decided_us.is_none() || !one.is_healthy && has_late_calls(run);
                let end_us = if is_left { end_us + ttl_us } else { end_us };
                let is_nothing =
                    policy.is_of_instance && matches!(record.outcome, Outcome::Refused { .. });
                one.request != refused.request
                    && !is_nothing
                    && one.arrived_us <= refused.decided_us
                    && refused.arrived_us <= end_us
            };
            history.uses.iter().filter(is_held).count() as u64 + cost > policy.amount(request)
        }
    }
}

/// Whether Redis' clock stepped back, and the key has been refused for less than a period since.
fn is_behind_clock_step(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    refused: &CounterUse,
) -> bool {
    let is_step_back = |fault: &Fault| {
        matches!(fault.kind, FaultKind::ClockStep { by_us, .. } if by_us < 0)
            && fault.at_us <= refused.decided_us
    };
    let Some(step) = run
        .scenario
        .faults
        .iter()
        .rev()
        .find(|fault| is_step_back(fault))
    else {
        return false;
    };
    let before = history
        .uses
        .iter()
        .filter(|one| one.arrived_us <= refused.arrived_us);
    // A charge, also for a client that left, takes the key's expiry back to the time before the step.
    let charged = before.clone().filter(|one| one.most_units > 0);
    let since_us = charged
        .map(|one| one.decided_us)
        .max()
        .unwrap_or(0)
        .max(step.at_us);
    let first_refused_us = before
        .filter(|one| one.arrived_us >= since_us && run.records[one.request].is_from_redis)
        .map(|one| one.arrived_us)
        .min();
    let refused_for_us = refused.arrived_us - first_refused_us.unwrap_or(refused.arrived_us);
    refused_for_us <= history.policy.per_us + SECOND
}

/// Whether Redis may run calls after their callers gave up.
fn has_late_calls(run: &FinishedRun<'_>) -> bool {
    run.scenario.faults.iter().any(|fault| {
        !matches!(
            fault.kind,
            FaultKind::Restart { .. } | FaultKind::Failover { .. }
        )
    })
}

/// The units that may be charged by others at the decision about a request.
fn possible_units(
    run: &FinishedRun<'_>,
    policy: &PolicySpec,
    one: &CounterUse,
    refused: &CounterUse,
) -> u64 {
    let record = &run.records[one.request];
    let is_recent = one.decided_us + RETURN_US >= refused.arrived_us;
    match record.outcome {
        // A reservation in another slot is returned soon.
        // An instance keeps nothing for requests that Redis refuses.
        Outcome::Refused { .. } if is_recent && !policy.is_of_instance => {
            policy.cost(&run.scenario.requests[one.request])
        }
        _ if policy.counts_responses => lockouts::possible_units(run, policy, one, refused),
        _ => one.most_units,
    }
}

fn is_window_full(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    refused: &CounterUse,
    cost: u64,
    (limit, per_us): (u64, u64),
) -> bool {
    let policy = history.policy;
    let length_us = match policy.rule {
        Rule::SlidingWindow => per_us + per_us / 10,
        _ => per_us,
    };
    let from_us = refused
        .arrived_us
        .saturating_sub(length_us + length_us / 500 + RETURN_US);
    let units: u64 = history
        .uses
        .iter()
        .filter(|one| one.request != refused.request)
        .filter(|one| one.arrived_us <= refused.decided_us && one.charged_until_us >= from_us)
        .map(|one| possible_units(run, policy, one, refused))
        .sum();
    let leased = 2 * policy.lease_units() * run.scenario.instances as u64;
    // A cost above 1 may fit into no shard.
    let divided = if policy.shards > 1 {
        3 * u64::from(policy.shards)
    } else {
        0
    };
    units + leased + divided + cost > limit
}

fn is_bucket_full(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    refused: &CounterUse,
    cost: u64,
    capacity: u64,
) -> bool {
    let policy = history.policy;
    let rate = policy.requests as f64 / policy.per_us as f64;
    // An outage may leave a full bucket: late and repeated charges have no age in a bucket. Under
    // load, it stays fuller than the requests explain until it was empty once.
    let recoveries_us = run.excuses.iter().filter(|excuse| excuse.is_outage);
    let recovered_us = recoveries_us
        .map(|excuse| excuse.to_us + RECOVERY_US)
        .filter(|recovered_us| *recovered_us <= refused.arrived_us)
        .max();
    let (mut level, mut at_us) = match recovered_us {
        Some(recovered_us) => (capacity as f64, recovered_us),
        None => (0.0, 0),
    };
    for one in history
        .uses
        .iter()
        .filter(|one| one.request != refused.request)
    {
        if one.arrived_us > refused.decided_us {
            break;
        }
        // A charge may come just before the refusal, so that its units have not drained.
        let charged_us = match policy.cut_off {
            Some(_) => one.charged_until_us,
            None => one.decided_us.min(one.arrived_us + run.scenario.timeout_us),
        };
        let until_us = charged_us.min(refused.arrived_us);
        if recovered_us.is_some_and(|recovered_us| until_us < recovered_us) {
            continue;
        }
        level = (level - rate * until_us.saturating_sub(at_us) as f64).max(0.0);
        level += possible_units(run, policy, one, refused) as f64;
        at_us = until_us.max(at_us);
    }
    level = (level - rate * refused.arrived_us.saturating_sub(at_us) as f64).max(0.0);
    level + cost as f64 + 1.0 > capacity as f64
}

/// Whether another request may have been refused within a block before this one, and started it.
pub(super) fn was_refused_since(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    refused: &CounterUse,
    block_us: u64,
    may_start_block: impl Fn(&CounterUse) -> bool,
) -> bool {
    history.uses.iter().any(|one| {
        one.request != refused.request
            && matches!(
                run.records[one.request].outcome,
                Outcome::Refused { .. } | Outcome::Unknown
            )
            && one.arrived_us <= refused.decided_us
            && one.decided_us + block_us + RETURN_US >= refused.arrived_us
            && may_start_block(one)
    })
}

/// A refused key asks Redis at most once per worker and second, while the refusal holds.
fn check_questions(run: &FinishedRun<'_>, histories: &[CounterHistory<'_>]) -> Option<Violation> {
    let has_amounts = |route: usize| {
        let mut on_route = run
            .scenario
            .policies
            .iter()
            .filter(|one| one.route == route);
        on_route.any(|one| one.amounts == Amounts::OfRequest)
    };
    let is_cached = |policy: &PolicySpec| {
        policy.estimate.is_none()
            && policy.lease.is_none()
            && policy.shards == 1
            && !policy.counts_rejected
            && !policy.is_of_instance
            // A refusal of a larger amount replaces the cached one.
            && !has_amounts(policy.route)
            && policy.other_route.is_none()
            && !matches!(policy.rule, Rule::Concurrency { .. })
    };
    for history in histories.iter().filter(|history| is_cached(history.policy)) {
        // By instance, worker and client: when the last refusal was known, and until when it holds.
        let mut refusals: BTreeMap<(usize, usize, u32), (u64, u64)> = BTreeMap::new();
        let (mut refused, mut repeated, mut last_us) = (0, 0, 0);
        let mut uses: Vec<&CounterUse> = history.uses.iter().filter(|one| one.is_healthy).collect();
        uses.sort_by_key(|one| one.decided_us);
        for one in uses {
            let (request, record) = (
                &run.scenario.requests[one.request],
                &run.records[one.request],
            );
            let Outcome::Refused { retry_after_us } = record.outcome else {
                continue;
            };
            let asker = (
                request.instance,
                request.worker % run.scenario.workers,
                request.client,
            );
            if !record.is_from_redis {
                continue;
            }
            // A refusal of a higher cost replaces the cached one, and says nothing about cost
            // 1.
            let (1, Some(retry_us)) = (request.cost, retry_after_us) else {
                refusals.remove(&asker);
                continue;
            };
            refused += 1;
            // A question that was sent before the answer came does not count.
            let is_repeated = refusals.get(&asker).is_some_and(|(known_us, holds_us)| {
                *known_us < one.arrived_us && one.arrived_us + 5_000 < *holds_us
            });
            if is_repeated {
                (repeated, last_us) = (repeated + 1, one.decided_us);
            }
            // The age of a refusal begins when Redis is asked.
            let holds_us = (one.decided_us + retry_us).min(one.arrived_us + CACHED_US);
            refusals.insert(asker, (one.decided_us, holds_us));
        }
        if repeated > refused / 20 + 3 {
            return Some(Violation {
                rule: "a refusal is asked for again",
                at_us: last_us,
                text: format!(
                    "{}: {repeated} of {refused} questions repeat a refusal",
                    history.name()
                ),
            });
        }
    }
    None
}

/// A refused request reserves units that have to be returned only if other requests took the rest
/// since the last reply: once or twice per worker and key.
pub(super) fn check_returns(
    run: &FinishedRun<'_>,
    histories: &[CounterHistory<'_>],
    world: &World,
) -> Option<Violation> {
    if run.scenario.class != ScenarioClass::SplitRefusals {
        return None;
    }
    let records = run.records.iter();
    let unknown = records.filter(|record| record.outcome == Outcome::Unknown);
    let askers = histories.len() * run.scenario.instances * run.scenario.workers;
    let allowed = (10 + 2 * unknown.count() + 3 * askers) as u64;
    let credits = world.trace.credits;
    (credits > allowed).then(|| Violation {
        rule: "refused requests take units and return them",
        at_us: run.scenario.end_us,
        text: format!("{credits} credits, allowed {allowed}"),
    })
}

/// At the end, every instance counts all, and has its connections.
pub(super) fn check_recovery(run: &FinishedRun<'_>, world: &World) -> Vec<Violation> {
    let running = world
        .instances
        .iter()
        .filter(|instance| instance.is_running())
        .count();
    let mut violations = Vec::new();
    for (index, instance) in world
        .instances
        .iter()
        .enumerate()
        .filter(|(_, one)| one.is_running())
    {
        let counted = instance
            .instance_count()
            .map_or(running, |count| count as usize);
        if counted != running || !instance.is_redis_up() {
            violations.push(Violation {
                rule: "not recovered",
                at_us: run.scenario.end_us,
                text: format!(
                    "instance {index} counts {counted} of {running} instances; connected: {}",
                    instance.is_redis_up()
                ),
            });
        }
    }
    violations
}
