//! Draws a scenario from a seed.

use crate::scenario::{
    Fault, FaultKind, HOUR, OnFailure, PolicySpec, RequestSpec, Rule, SECOND, Scenario,
    ScenarioClass, Topology,
};
use crate::world::TERMINATION_US;
use fastrand::Rng;

/// Requests start when instances are connected.
const FIRST_REQUEST_US: u64 = SECOND;

/// Draws the scenario of a seed in one of the classes.
pub(crate) fn draw_scenario(seed: u64, classes: &[ScenarioClass]) -> Scenario {
    let class = classes[(seed % classes.len() as u64) as usize];
    let mut rng = Rng::with_seed(seed ^ 0x5eed);
    let mut scenario = Scenario {
        seed,
        class,
        topology: Topology::Standalone,
        instances: rng.usize(1..=4),
        workers: rng.usize(1..=2),
        policies: Vec::new(),
        requests: Vec::new(),
        faults: Vec::new(),
        rates_ppm: Vec::new(),
        delay_us: [1_000, 1_000, 2_000][rng.usize(0..3)],
        timeout_us: 50_000,
        end_us: rng.u64(25..45) * SECOND,
    };
    if rng.u8(0..8) == 0 {
        scenario.instances = 8;
    }
    set_topology(&mut scenario, &mut rng);
    set_policies(&mut scenario, &mut rng);
    set_requests(&mut scenario, &mut rng);
    set_faults(&mut scenario, &mut rng);
    scenario.faults.sort_by_key(|fault| fault.at_us);
    scenario.requests.sort_by_key(|request| request.at_us);
    scenario
}

fn set_topology(scenario: &mut Scenario, rng: &mut Rng) {
    use ScenarioClass as Class;
    scenario.topology = match scenario.class {
        Class::Memory => Topology::Memory { max_keys: 100_000 },
        Class::MemoryEviction => Topology::Memory { max_keys: 50 },
        Class::Sentinel => Topology::Sentinel,
        Class::Cluster
        | Class::ClusterFailover
        | Class::ClusterReshard
        | Class::SplitRefusals
        | Class::SplitFailover
        | Class::OpenSlots => Topology::Cluster {
            masters: rng.usize(2..=3),
        },
        _ => Topology::Standalone,
    };
    match scenario.class {
        Class::Memory | Class::MemoryEviction => scenario.instances = 1,
        Class::Flapping => {
            (scenario.instances, scenario.end_us) = (rng.usize(3..=5), 75 * SECOND);
        }
        Class::TerminationInOutage => {
            (scenario.instances, scenario.end_us) = (rng.usize(2..=4), 45 * SECOND);
        }
        Class::ClockRates => scenario.rates_ppm = vec![rng.i64(-500..=500)],
        Class::SettlementsBesideSlots => {
            (scenario.delay_us, scenario.end_us) = (5_000, 16 * SECOND)
        }
        _ => {}
    }
}

/// Draws a policy: its period is short, so that units return, or long, so that counters add up.
fn draw_policy(rng: &mut Rng, route: usize, on_failure: OnFailure) -> PolicySpec {
    let per_us = [SECOND, 3 * SECOND, 10 * SECOND, HOUR][rng.usize(0..4)];
    let requests = rng.u64(3..40);
    let rule = match rng.u8(0..12) {
        0..5 => Rule::SlidingLog,
        5..7 => Rule::SlidingWindow,
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
    let is_window = matches!(
        rule,
        Rule::SlidingLog | Rule::SlidingWindow | Rule::FixedWindow
    );
    let is_counted_in_redis = is_window && per_us >= SECOND;
    let estimate = (is_window && rng.u8(0..5) == 0).then(|| rng.u64(2..6));
    let lease = (is_counted_in_redis && estimate.is_none() && rng.u8(0..4) == 0)
        .then(|| (rng.u64(2..8), [100_000, 300_000, 500_000][rng.usize(0..3)]));
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
        is_global: false,
        estimate,
        lease,
        block_for_us,
        shards: 1,
        second_limit: (is_window && per_us < HOUR && rng.u8(0..4) == 0)
            .then(|| requests * rng.u64(2..8)),
    }
}

fn set_policies(scenario: &mut Scenario, rng: &mut Rng) {
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
    let plain = PolicySpec {
        route: 0,
        rule: Rule::SlidingLog,
        requests: 20,
        per_us: HOUR,
        on_failure: OnFailure::Open,
        is_global: false,
        estimate: None,
        lease: None,
        block_for_us: None,
        shards: 1,
        second_limit: None,
    };
    match scenario.class {
        Class::SplitRefusals => {
            let global = PolicySpec {
                is_global: true,
                requests: 2_000,
                ..plain.clone()
            };
            policies = vec![
                global,
                PolicySpec {
                    requests: 5,
                    ..plain
                },
            ];
        }
        Class::SplitFailover => {
            let closed = PolicySpec {
                on_failure: OnFailure::Closed,
                requests: 300,
                ..plain
            };
            policies = vec![
                PolicySpec {
                    is_global: true,
                    ..closed.clone()
                },
                closed,
            ];
        }
        Class::OpenSlots => {
            let two_keys = PolicySpec {
                requests: 50,
                per_us: 20 * SECOND,
                second_limit: Some(150),
                ..plain
            };
            policies = vec![PolicySpec {
                on_failure: OnFailure::Closed,
                ..two_keys
            }];
        }
        Class::ClusterReshard => policies.iter_mut().for_each(|policy| {
            // One key per policy, so that no keys of one question are in two places.
            (policy.second_limit, policy.block_for_us) = (None, None);
        }),
        Class::SettlementsBesideSlots => {
            let slots = PolicySpec {
                rule: Rule::Concurrency { ttl_us: SECOND },
                requests: 5,
                ..plain.clone()
            };
            let estimated = PolicySpec {
                route: 1,
                requests: 1_000_000,
                estimate: Some(3),
                ..plain
            };
            policies = vec![slots, estimated];
        }
        Class::Flapping | Class::TerminationInOutage => {
            let (requests, per_us) = if scenario.class == Class::Flapping {
                (50, 60 * SECOND)
            } else {
                (20, 30 * SECOND)
            };
            policies = vec![PolicySpec {
                on_failure: OnFailure::Local,
                requests,
                per_us,
                ..plain
            }];
        }
        Class::MemoryEviction => {
            let many = PolicySpec {
                route: 1,
                requests: 1,
                per_us: 24 * HOUR,
                ..plain.clone()
            };
            policies = vec![
                PolicySpec {
                    requests: 5,
                    ..plain
                },
                many,
            ];
        }
        Class::ClockSteps => {
            policies = vec![PolicySpec {
                requests: 10,
                per_us: 10 * SECOND,
                ..plain
            }]
        }
        Class::FrozenLeases => {
            policies = vec![PolicySpec {
                per_us: 2 * SECOND,
                lease: Some((5, 300_000)),
                ..plain
            }];
        }
        _ => {}
    }
    let is_cluster = matches!(scenario.topology, Topology::Cluster { .. });
    for policy in &mut policies {
        let is_plain =
            policy.estimate.is_none() && policy.lease.is_none() && policy.block_for_us.is_none();
        let is_window = matches!(
            policy.rule,
            Rule::SlidingLog | Rule::SlidingWindow | Rule::FixedWindow
        );
        if scenario.class == Class::Cluster
            && is_cluster
            && is_plain
            && is_window
            && rng.u8(0..4) == 0
        {
            (policy.shards, policy.on_failure, policy.second_limit) =
                (rng.u16(2..4), OnFailure::Open, None);
        }
    }
    if matches!(scenario.topology, Topology::Memory { .. }) {
        policies.iter_mut().for_each(|policy| policy.lease = None);
    }
    scenario.policies = policies;
}

fn set_requests(scenario: &mut Scenario, rng: &mut Rng) {
    use ScenarioClass as Class;
    let last_us = scenario.end_us - 6 * SECOND;
    // In an outage from the third second on, keys without a state in Redis.
    let first_us = match scenario.class {
        Class::Flapping | Class::TerminationInOutage => 6 * SECOND + SECOND / 2,
        _ => FIRST_REQUEST_US,
    };
    let routes = scenario
        .policies
        .iter()
        .map(|policy| policy.route)
        .max()
        .unwrap_or(0)
        + 1;
    let clients = rng.u32(1..6);
    let (rate, hot_share) = match scenario.class {
        Class::SplitRefusals => (60, 90),
        Class::SettlementsBesideSlots => (250, 0),
        Class::MemoryEviction => (10, 50),
        Class::FrozenLeases => (60, 80),
        _ => (rng.u64(8..30), rng.u8(0..60)),
    };
    let seconds = (last_us - first_us) / SECOND;
    for _ in 0..rate * seconds {
        let is_hot = rng.u8(0..100) < hot_share;
        let route = rng.usize(0..routes);
        let mut request = RequestSpec {
            at_us: rng.u64(first_us..last_us),
            instance: rng.usize(0..scenario.instances),
            worker: rng.usize(0..scenario.workers),
            route,
            client: if is_hot { 0 } else { rng.u32(0..clients) },
            cost: if rng.u8(0..6) == 0 { rng.u64(2..4) } else { 1 },
            service_us: rng.u64(1..300) * 1_000,
            actual: (rng.u8(0..5) > 0).then(|| rng.u64(0..8)),
            leaves_after_us: (rng.u8(0..20) == 0).then(|| rng.u64(0..100) * 1_000),
            pause_us: if rng.u8(0..10) == 0 { 1_000 } else { 0 },
        };
        match scenario.class {
            Class::SettlementsBesideSlots if request.route == 0 => {
                request.service_us = 5 * SECOND;
                request.leaves_after_us = None;
            }
            Class::SettlementsBesideSlots => request.service_us = 20_000,
            Class::FrozenLeases => request.pause_us = rng.u64(0..30) * 1_000,
            Class::MemoryEviction if request.route == 1 => request.client = rng.u32(10..100_000),
            Class::SplitRefusals | Class::SplitFailover | Class::OpenSlots => request.cost = 1,
            _ => {}
        }
        scenario.requests.push(request);
    }
}

fn set_faults(scenario: &mut Scenario, rng: &mut Rng) {
    use ScenarioClass as Class;
    // The last fault leaves time for the recovery.
    let (first_us, last_us) = (3 * SECOND, scenario.end_us - 16 * SECOND);
    let count = match scenario.class {
        Class::Healthy | Class::Memory | Class::MemoryEviction | Class::Cluster => 0,
        Class::SplitRefusals | Class::SettlementsBesideSlots | Class::ClockRates => 0,
        Class::Outage | Class::Sentinel | Class::ClusterFailover | Class::SplitFailover => 1,
        Class::OpenSlots | Class::ClusterReshard => rng.usize(1..=2),
        Class::Flapping | Class::TerminationInOutage => 0,
        _ => rng.usize(1..=3),
    };
    for _ in 0..count {
        let kind = draw_fault(scenario, rng);
        scenario.faults.push(Fault {
            at_us: rng.u64(first_us..last_us),
            kind,
        });
    }
    match scenario.class {
        Class::Flapping => set_flapping(scenario, rng, first_us),
        Class::TerminationInOutage => set_termination(scenario, rng, first_us),
        Class::ClockSteps => {
            let (at_us, by_us) = (first_us + SECOND, rng.i64(20..300) * 1_000_000);
            scenario.faults = vec![
                Fault {
                    at_us,
                    kind: FaultKind::ClockStep { server: 0, by_us },
                },
                Fault {
                    at_us: at_us + rng.u64(1..4) * SECOND,
                    kind: FaultKind::ClockStep {
                        server: 0,
                        by_us: -by_us,
                    },
                },
            ];
        }
        _ => {}
    }
}

fn draw_fault(scenario: &Scenario, rng: &mut Rng) -> FaultKind {
    use ScenarioClass as Class;
    let server = rng.usize(0..scenario.topology.masters().max(1));
    let instance = rng.usize(0..scenario.instances);
    let for_us = rng.u64(1..50) * 100_000;
    let lost_us = if rng.bool() {
        rng.u64(1..2_000) * 1_000
    } else {
        0
    };
    match scenario.class {
        Class::Network => match rng.u8(0..8) {
            0 => FaultKind::Partition {
                instance: None,
                server,
                for_us,
            },
            1 => FaultKind::Partition {
                instance: Some(instance),
                server,
                for_us,
            },
            2 => FaultKind::Slow {
                server,
                extra_us: rng.u64(1..100) * 1_000,
                for_us,
            },
            3 => FaultKind::Reset { server },
            4 => FaultKind::HalfOpen { instance, server },
            5 => FaultKind::ScriptFlush { server },
            6 => FaultKind::Hang { server, for_us },
            _ => {
                let errors = [
                    "LOADING Redis is loading the dataset in memory",
                    "BUSY Redis is busy running a script",
                    "OOM command not allowed when used memory > 'maxmemory'.",
                ];
                FaultKind::ErrorReplies {
                    server,
                    error: errors[rng.usize(0..3)],
                    for_us,
                }
            }
        },
        Class::DataLoss => match rng.bool() {
            true => FaultKind::Restart {
                server,
                down_us: for_us,
                lost_us: if rng.bool() { u64::MAX } else { lost_us },
            },
            false => FaultKind::Evict {
                server,
                keys: rng.usize(1..4),
            },
        },
        Class::Instances => match rng.u8(0..3) {
            0 => FaultKind::Crash {
                instance,
                restart_us: for_us,
            },
            1 => FaultKind::Terminate {
                instance,
                restart_us: for_us,
            },
            _ => FaultKind::Freeze { instance, for_us },
        },
        Class::FrozenLeases => FaultKind::Freeze {
            instance,
            for_us: 2 * SECOND + for_us,
        },
        Class::Outage => match rng.bool() {
            true => FaultKind::Restart {
                server,
                down_us: for_us,
                lost_us: 0,
            },
            false => FaultKind::Partition {
                instance: None,
                server,
                for_us,
            },
        },
        Class::Sentinel | Class::ClusterFailover | Class::SplitFailover => FaultKind::Failover {
            server,
            after_us: rng.u64(5..60) * 100_000,
            lost_us,
        },
        _ => FaultKind::Migrate {
            to: server,
            slots: rng.usize(1..4),
            key_us: match scenario.class {
                Class::OpenSlots => 2 * SECOND,
                _ => 3_000,
            },
            interrupted_us: if scenario.class == Class::OpenSlots {
                rng.u64(0..5) * SECOND
            } else {
                0
            },
        },
    }
}

/// Redis answers for moments that are shorter than a heartbeat, after which members have lapsed.
fn set_flapping(scenario: &mut Scenario, rng: &mut Rng, first_us: u64) {
    let mut at_us = first_us;
    for _ in 0..rng.u8(3..=4) {
        let down_us = rng.u64(60..95) * 100_000;
        scenario.faults.push(Fault {
            at_us,
            kind: FaultKind::Restart {
                server: 0,
                down_us,
                lost_us: 0,
            },
        });
        at_us += down_us + rng.u64(5..12) * 50_000;
    }
}

/// All instances end in an outage, and new ones start after it.
fn set_termination(scenario: &mut Scenario, rng: &mut Rng, first_us: u64) {
    let down_us = rng.u64(110..130) * 100_000;
    scenario.faults.push(Fault {
        at_us: first_us,
        kind: FaultKind::Restart {
            server: 0,
            down_us,
            lost_us: 0,
        },
    });
    for instance in 0..scenario.instances {
        let after_us = rng.u64(50..75) * 100_000;
        let restart_us = down_us - after_us - TERMINATION_US + rng.u64(5..20) * 100_000;
        let kind = FaultKind::Terminate {
            instance,
            restart_us,
        };
        scenario.faults.push(Fault {
            at_us: first_us + after_us,
            kind,
        });
    }
}
