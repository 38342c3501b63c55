//! Draws the policies of a scenario.

use crate::sim::scenario::{
    Amounts, HOUR, OnFailure, PolicySpec, Rule, SECOND, Scenario, ScenarioClass, Topology,
};
use fastrand::Rng;

/// Draws a policy: its period is short, so that units return, or long, so that counters add up.
pub(super) fn draw_policy(rng: &mut Rng, route: usize, on_failure: OnFailure) -> PolicySpec {
    let mut per_us = [SECOND, 3 * SECOND, 10 * SECOND, HOUR][rng.usize(0..4)];
    let requests = rng.u64(3..40);
    let rule = match rng.u8(0..12) {
        0..5 => Rule::SlidingLog,
        5..7 => Rule::SlidingWindow,
        7 if per_us == HOUR => Rule::CalendarDay,
        7 => Rule::FixedWindow,
        8 => Rule::TokenBucket {
            burst: rng.u64(3..30),
        },
        9 => Rule::LeakyBucket {
            max_delay_us: rng.u64(1..4) * 100_000,
        },
        _ => Rule::Concurrency {
            ttl_us: rng.u64(1..10) * SECOND,
        },
    };
    if rule == Rule::CalendarDay {
        per_us = 24 * HOUR;
    }
    let is_window = is_window(rule);
    let is_counted_in_redis = is_window && per_us >= SECOND;
    let estimate = (is_window && rng.u8(0..5) == 0).then(|| rng.u64(2..6));
    let lease = (is_counted_in_redis && estimate.is_none() && rng.u8(0..4) == 0).then(|| {
        (
            [0, rng.u64(2..8)][rng.usize(0..2)],
            [100_000, 300_000, 500_000][rng.usize(0..3)],
        )
    });
    let block_for_us = (is_window && estimate.is_none() && lease.is_none() && rng.u8(0..8) == 0)
        .then_some(2 * SECOND);
    PolicySpec {
        route,
        rule,
        requests,
        per_us: if matches!(rule, Rule::LeakyBucket { .. }) {
            per_us.min(10 * SECOND)
        } else {
            per_us
        },
        on_failure,
        estimate,
        lease,
        block_for_us,
        second_limit: (is_window && per_us < HOUR && rng.u8(0..4) == 0)
            .then(|| requests * rng.u64(2..8)),
        ..build_policy(|_| {})
    }
}

pub(super) fn is_window(rule: Rule) -> bool {
    matches!(
        rule,
        Rule::SlidingLog | Rule::SlidingWindow | Rule::FixedWindow | Rule::CalendarDay
    )
}

pub(super) fn set_policies(scenario: &mut Scenario, rng: &mut Rng) {
    use ScenarioClass as Class;
    let draw_failure =
        |rng: &mut Rng| [OnFailure::Open, OnFailure::Closed, OnFailure::Local][rng.usize(0..3)];
    let count = rng.usize(1..=3);
    let mut policies: Vec<_> = (0..count)
        .map(|number| {
            let failure = match scenario.class {
                Class::Outage | Class::Flapping | Class::TerminationInOutage => OnFailure::Local,
                Class::SplitFailover => OnFailure::Closed,
                _ => draw_failure(rng),
            };
            draw_policy(rng, number, failure)
        })
        .collect();
    set_class_policies(scenario, &mut policies, rng);
    for policy in &mut policies {
        let is_plain =
            policy.estimate.is_none() && policy.lease.is_none() && policy.block_for_us.is_none();
        if scenario.class == Class::Cluster && is_plain && is_window(policy.rule) && rng.bool() {
            (policy.shards, policy.on_failure, policy.second_limit) =
                (rng.u16(2..4), OnFailure::Open, None);
        }
    }
    if matches!(scenario.topology, Topology::Memory { .. }) {
        policies.iter_mut().for_each(|policy| policy.lease = None);
    }
    if matches!(scenario.class, Class::Healthy | Class::Network) {
        scenario.has_shadow_policies = rng.bool();
        // Half of the requests must pass two policies.
        // Refusals of other policies are cached for a moment at most.
        let is_remembered = |one: &PolicySpec| {
            let is_slot = matches!(one.rule, Rule::Concurrency { .. });
            one.estimate.is_none() && one.lease.is_none() && !is_slot
        };
        if let [first, second, ..] = &mut policies[..]
            && is_remembered(first)
            && is_remembered(second)
            && rng.bool()
        {
            second.route = 0;
        }
    }
    set_counted_responses(scenario, &mut policies);
    // In a slot that moves, an override and its counter may be in two places.
    let is_overridden = matches!(
        scenario.class,
        Class::Healthy | Class::Network | Class::Outage | Class::Memory | Class::ClusterFailover
    );
    for policy in &mut policies {
        policy.is_dynamic = is_overridden && policy.shards == 1 && rng.bool();
    }
    set_shared_counters(scenario, &mut policies);
    scenario.policies = policies;
}

/// A third of the policies that may do so share their counter with another policy. Draws of its
/// own, so that all other draws of a seed stay.
fn set_shared_counters(scenario: &Scenario, policies: &mut [PolicySpec]) {
    let mut rng = Rng::with_seed(scenario.seed ^ 0x402);
    for policy in policies {
        policy.shares_counter = !policy.is_dynamic && rng.u8(0..3) == 0;
    }
}

/// Half of the estimates become `count_when`, and half of those lock clients out. Draws of its own,
/// so that all other draws of a seed stay.
fn set_counted_responses(scenario: &Scenario, policies: &mut [PolicySpec]) {
    let mut rng = Rng::with_seed(scenario.seed ^ 0x401);
    if scenario.class == ScenarioClass::SettlementsBesideSlots {
        return;
    }
    for policy in policies.iter_mut().filter(|one| one.estimate.is_some()) {
        policy.counts_responses = rng.bool();
        // The response counter is one more key of a question.
        let may_block = policy.counts_responses && scenario.class != ScenarioClass::ClusterReshard;
        policy.block_for_us = (may_block && rng.bool()).then_some(2 * SECOND);
    }
}

/// Replaces the drawn policies in classes that need certain ones.
fn set_class_policies(scenario: &Scenario, policies: &mut Vec<PolicySpec>, rng: &mut Rng) {
    use ScenarioClass as Class;
    *policies = match scenario.class {
        Class::SplitRefusals => {
            let global = build_policy(|one| (one.is_global, one.requests) = (true, 2_000));
            vec![global, build_policy(|one| one.requests = 5)]
        }
        Class::SplitFailover => {
            // Half of the runs charge without Redis what the dead master does not answer.
            let failure = match policies.len() {
                1 => OnFailure::Local,
                _ => OnFailure::Closed,
            };
            let closed = build_policy(|one| (one.on_failure, one.requests) = (failure, 300));
            let global = PolicySpec {
                is_global: true,
                ..closed.clone()
            };
            vec![global, closed]
        }
        Class::OpenSlots => vec![build_policy(|one| {
            (one.requests, one.per_us, one.second_limit) = (50, 20 * SECOND, Some(150));
            one.on_failure = OnFailure::Closed;
        })],
        Class::ClusterReshard => {
            // One key per policy, so that no keys of one question are in two places.
            for policy in policies {
                (policy.second_limit, policy.block_for_us) = (None, None);
            }
            return;
        }
        Class::SettlementsBesideSlots => {
            let ttl_us = match scenario.has_settlement_backlog() {
                true => 3 * SECOND,
                false => 20 * SECOND,
            };
            let slots = build_policy(|one| {
                (one.rule, one.requests) = (Rule::Concurrency { ttl_us }, 5);
                one.on_failure = OnFailure::Closed;
            });
            let estimated = build_policy(|one| {
                (one.route, one.requests, one.estimate) = (1, 1_000_000, Some(3));
            });
            vec![slots, estimated]
        }
        Class::Flapping => vec![build_policy(|one| {
            (one.on_failure, one.requests, one.per_us) = (OnFailure::Local, 50, 60 * SECOND);
        })],
        Class::TerminationInOutage => vec![draw_policy_of_stored_usage(rng)],
        Class::Healthy if rng.u8(0..4) == 0 => build_leases_beside_slots(),
        Class::MemoryEviction => {
            let many =
                build_policy(|one| (one.route, one.requests, one.per_us) = (1, 1, 24 * HOUR));
            vec![build_policy(|one| one.requests = 5), many]
        }
        Class::ClockSteps => vec![build_policy(|one| {
            (one.requests, one.per_us) = (10, 10 * SECOND);
        })],
        Class::FrozenLeases => vec![build_policy(|one| {
            (one.requests, one.per_us) = (80, 2 * SECOND);
            one.lease = Some((10, 300_000));
        })],
        _ => return,
    };
}

/// A policy whose usage is stored between two processes: of any algorithm.
fn draw_policy_of_stored_usage(rng: &mut Rng) -> PolicySpec {
    let max_delay_us = 3 * SECOND;
    build_policy(|one| {
        (one.on_failure, one.requests, one.per_us) = (OnFailure::Local, 20, 30 * SECOND);
        (one.rule, one.block_for_us) = match rng.u8(0..9) {
            0..3 => (Rule::SlidingLog, None),
            3 => (Rule::SlidingLog, Some(2 * SECOND)),
            4 => (Rule::SlidingWindow, None),
            5 => (Rule::FixedWindow, None),
            6 => (Rule::TokenBucket { burst: 20 }, None),
            7 => {
                one.per_us = 24 * HOUR;
                (Rule::CalendarDay, None)
            }
            _ => (Rule::LeakyBucket { max_delay_us }, None),
        };
    })
}

/// Leased units are returned if no slot is free, or if the client leaves.
fn build_leases_beside_slots() -> Vec<PolicySpec> {
    let ttl_us = 5 * SECOND;
    let leased = build_policy(|one| {
        (one.requests, one.per_us) = (80, 2 * SECOND);
        one.lease = Some((10, 300_000));
    });
    let slots = build_policy(|one| (one.rule, one.requests) = (Rule::Concurrency { ttl_us }, 1));
    vec![leased, slots]
}

/// A sliding log of 20 units per client and hour, with changes.
pub(super) fn build_policy(change: impl FnOnce(&mut PolicySpec)) -> PolicySpec {
    let mut policy = PolicySpec {
        route: 0,
        rule: Rule::SlidingLog,
        requests: 20,
        per_us: HOUR,
        on_failure: OnFailure::Open,
        is_global: false,
        estimate: None,
        counts_responses: false,
        counts_rejected: false,
        lease: None,
        block_for_us: None,
        shards: 1,
        second_limit: None,
        is_dynamic: false,
        shares_counter: false,
        other_route: None,
        amounts: Amounts::Fixed,
        has_alternatives: false,
        is_of_instance: false,
        cut_off: None,
    };
    change(&mut policy);
    policy
}
