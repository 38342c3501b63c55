//! Nothing forwarded, nothing charged; every forwarded request charged once: by the counters in
//! Redis at the end of the run.

use super::{CounterHistory, FinishedRun, Violation, streams};
use crate::sim::redis_server::EPOCH_US;
use crate::sim::resp::{Command, Reply};
use crate::sim::scenario::{CALENDAR_ZONE, HOUR, PolicySpec, Rule};
use crate::sim::world::World;
use tidegate::clock::Clock;
use tidegate::limiter::{Algorithm, Calendar, CalendarUnit, Key, Limit, PolicyCharges};
use tidegate::store::redis::ScriptLibrary;

/// Checks a counter whose period is longer than the run, so that its units add up.
pub(super) fn check_counter(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    world: &mut World,
) -> Option<Violation> {
    let limit = counted_limit(history.policy)?;
    history.server?;
    let key = run
        .scenario
        .counter_key(history.policy_number, history.client);
    let used = match history.instance {
        Some(_) if !history.wall_clock_steps(run).is_empty() => return None,
        Some(instance) => world.instances[instance].used_units(&key, &many(limit))?,
        None => used_units(run, world, &key, &limit)?,
    };
    let (mut least, mut most) = (0, 0);
    for one in &history.uses {
        let record = &run.records[one.request];
        let request = &run.scenario.requests[one.request];
        let cost = history.policy.cost(request);
        let actual = history.policy.actual_units(request);
        let settled = actual.filter(|_| record.is_settled);
        let is_settled = one.is_healthy_until_settled;
        let streamed = streams::charged_units(run, history.policy, one.request, is_settled);
        if let (Some(streamed), true) = (streamed, one.is_forwarded) {
            (least, most) = (least + streamed.0, most + streamed.1);
        } else if one.is_forwarded {
            least += match one.is_healthy_until_settled {
                true => settled.unwrap_or(cost),
                false => settled.unwrap_or(cost).min(cost),
            };
            most += match settled {
                Some(actual) if one.is_healthy_until_settled => actual,
                _ => cost.max(settled.unwrap_or(0)),
            };
            // A write-back may be repeated.
            if !one.is_healthy {
                most += cost.max(settled.unwrap_or(0));
            }
        } else {
            most += one.most_units;
        }
    }
    if history.policy.counts_rejected {
        // Units of rejected requests replace older ones.
        most = most.min(history.policy.requests);
    }
    let faults = run.excuses.iter().filter(|excuse| excuse.is_outage).count() as u64;
    most += 2 * history.policy.lease_units() * run.scenario.workers as u64 * faults;
    let loses = run.excuses.iter().any(|excuse| excuse.loses_charges);
    // An estimate that was not settled stands; a further charge may be lost with its process.
    let lost_settlements = if faults > 0 { least } else { 0 };
    // In the run, a bucket pays back at most so many units.
    let paid_back = match history.policy.rule {
        Rule::TokenBucket { .. } => 1 + limit.requests * run.scenario.end_us / limit.per_us,
        _ => 0,
    };
    let problem = if used > most {
        format!("{used} units are used, explained are {most}")
    } else if used + lost_settlements + paid_back < least && !loses {
        format!("{used} units are used, but {least} were forwarded")
    } else {
        return None;
    };
    let rule = if used > most {
        "charged for nothing"
    } else {
        "forwarded and not charged"
    };
    Some(Violation {
        rule,
        at_us: run.scenario.end_us,
        text: format!("{}: {problem}", history.name()),
    })
}

/// Checks the response counter: each counted response is charged once, and no other response.
pub(super) fn check_counted_responses(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    world: &mut World,
) -> Option<Violation> {
    let limit = counted_limit(history.policy)?;
    history.server?;
    if !history.policy.counts_responses_for_block() || history.instance.is_some() {
        return None;
    }
    let key = run
        .scenario
        .counter_key(history.policy_number, history.client);
    let used = used_units(run, world, &key.to_response_counter_key(), &limit)?;
    let (mut least, mut most) = (0, 0);
    for one in &history.uses {
        let record = &run.records[one.request];
        let request = &run.scenario.requests[one.request];
        let actual = history.policy.actual_units(request);
        let settled = actual.filter(|_| record.is_settled);
        least += settled.filter(|_| one.is_forwarded).unwrap_or(0);
        // A response that is missing may count; beside an outage, a write-back may be repeated.
        let possible = settled.unwrap_or(one.most_units);
        most += if one.is_healthy {
            possible
        } else {
            2 * possible
        };
    }
    let has_faults = !run.excuses.is_empty();
    let rule = match used {
        _ if used > most => "the response counter is too high",
        _ if used < least && !has_faults => "the response counter is too low",
        _ => return None,
    };
    Some(Violation {
        rule,
        at_us: run.scenario.end_us,
        text: format!(
            "{}: {used} units of counted responses, expected {least} to {most}",
            history.name()
        ),
    })
}

fn counted_limit(policy: &PolicySpec) -> Option<Limit> {
    let algorithm = match policy.rule {
        Rule::SlidingLog => Algorithm::SlidingLog,
        Rule::SlidingWindow => Algorithm::SlidingWindow { buckets: 10 },
        Rule::FixedWindow => Algorithm::FixedWindow { offset_us: 0 },
        Rule::CalendarDay => Algorithm::CalendarWindow {
            calendar: Calendar::new(CalendarUnit::Day, CALENDAR_ZONE)?,
        },
        Rule::TokenBucket { .. } if policy.is_of_instance => Algorithm::TokenBucket {
            burst: 1 << 20,
            warm_up_us: 0,
        },
        _ => return None,
    };
    let is_countable = policy.per_us >= HOUR && policy.shards == 1;
    is_countable.then_some(Limit {
        requests: policy.requests,
        per_us: policy.per_us,
        algorithm,
    })
}

/// With a large limit, usage above the policy's limit shows, too. A bucket has a large burst
/// already, and its own rate.
fn many(limit: Limit) -> Limit {
    let requests = match limit.algorithm.is_bucket() {
        true => limit.requests,
        false => 1 << 40,
    };
    Limit { requests, ..limit }
}

/// Reads a counter on all servers by the real script.
fn used_units(run: &FinishedRun<'_>, world: &mut World, key: &Key, limit: &Limit) -> Option<u64> {
    let limit = many(*limit);
    let charges = [PolicyCharges::new(&limit, key, 0)];
    let (clock, _) = Clock::manual(EPOCH_US + run.scenario.end_us);
    let library = ScriptLibrary::with_clock("sim", clock);
    let mut packed = library.decide_command(&charges, None).get_packed_command();
    let mut command: Command = crate::sim::resp::take_commands(&mut packed).pop()?;
    command[0] = b"EVAL".to_vec();
    command[1] = library.script_text(&charges).as_bytes().to_vec();
    let mut used = 0;
    for index in 0..world.servers.len() {
        if world.servers[index].role != crate::sim::redis_server::Role::Master {
            continue;
        }
        let Reply::Bulk(text) = world.inspect(index, &command) else {
            return None;
        };
        let text = String::from_utf8(text).ok()?;
        let remaining: u64 = text.split(' ').nth(2)?.parse().ok()?;
        used += (1_u64 << 40) - remaining;
    }
    Some(used)
}
