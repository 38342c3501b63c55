//! Draws a scenario from a seed.

mod policies;
mod returns;
mod streams;
mod variants;

use crate::sim::scenario::{
    Fault, FaultKind, OnFailure, OperatorAction, OperatorSpec, PolicySpec, RequestSpec, Rule,
    SECOND, Scenario, ScenarioClass, Topology,
};
use crate::sim::world::TERMINATION_US;
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
        has_shadow_policies: false,
        requests: Vec::new(),
        is_rate_limit_service: false,
        operations: Vec::new(),
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
    policies::set_policies(&mut scenario, &mut rng);
    set_requests(&mut scenario, &mut rng);
    set_faults(&mut scenario, &mut rng);
    set_operations(&mut scenario, &mut rng);
    add_login_rotation(&mut scenario, &mut rng);
    variants::add_variants(&mut scenario);
    streams::cut_off_estimates(&mut scenario);
    returns::add_returns(&mut scenario);
    streams::add_streams(&mut scenario);
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
            (scenario.delay_us, scenario.end_us) = (4_000, 32 * SECOND);
            if rng.bool() {
                (scenario.instances, scenario.workers) = (1, 1);
            }
            if scenario.has_settlement_backlog() {
                scenario.end_us = 18 * SECOND;
            }
        }
        Class::FrozenLeases => {
            (scenario.instances, scenario.timeout_us) = (rng.usize(2..=4), 100_000)
        }
        _ => {}
    }
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
    let is_backlog = scenario.has_settlement_backlog();
    let clients = rng.u32(1..6);
    let (rate, hot_share) = match scenario.class {
        Class::SplitRefusals => (60, 90),
        Class::SettlementsBesideSlots if is_backlog => (300, 0),
        Class::SettlementsBesideSlots => (rng.u64(100..200), 0),
        Class::MemoryEviction => (10, 50),
        Class::FrozenLeases => (100, 80),
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
            route: match scenario.class {
                Class::SettlementsBesideSlots if is_backlog => usize::from(rng.u8(0..10) > 0),
                Class::SettlementsBesideSlots => usize::from(rng.u8(0..3) > 0),
                _ => route,
            },
            client: if is_hot { 0 } else { rng.u32(0..clients) },
            cost: if rng.u8(0..6) == 0 { rng.u64(2..4) } else { 1 },
            service_us: rng.u64(1..300) * 1_000,
            actual: (rng.u8(0..5) > 0).then(|| rng.u64(0..8)),
            leaves_after_us: (rng.u8(0..20) == 0).then(|| rng.u64(0..100) * 1_000),
            pause_us: if rng.u8(0..10) == 0 { 1_000 } else { 0 },
            stream: None,
        };
        match scenario.class {
            Class::SettlementsBesideSlots if request.route == 0 => {
                request.service_us = rng.u64(5..40) * 100_000;
                request.leaves_after_us = None;
            }
            Class::SettlementsBesideSlots => request.service_us = 20_000,
            Class::FrozenLeases => request.pause_us = rng.u64(0..60) * 1_000,
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
        Class::SplitRefusals | Class::ClockRates => 0,
        Class::SettlementsBesideSlots if scenario.has_settlement_backlog() => 0,
        Class::Outage | Class::Sentinel | Class::ClusterFailover | Class::SplitFailover => 1,
        Class::OpenSlots | Class::ClusterReshard => rng.usize(1..=2),
        Class::Flapping | Class::TerminationInOutage => 0,
        _ => rng.usize(1..=3),
    };
    for _ in 0..count {
        let fault = Fault {
            kind: draw_fault(scenario, rng),
            at_us: rng.u64(first_us..last_us),
        };
        // A process is stopped once at a time.
        if !scenario
            .faults
            .iter()
            .any(|other| is_same_process(&fault, other))
        {
            scenario.faults.push(fault);
        }
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

fn set_operations(scenario: &mut Scenario, rng: &mut Rng) {
    let allows_service_calls = |policy: &PolicySpec| {
        policy.estimate.is_none()
            && !matches!(
                policy.rule,
                Rule::Concurrency { .. } | Rule::LeakyBucket { .. }
            )
            && policy.on_failure == OnFailure::Local
    };
    scenario.is_rate_limit_service =
        rng.u8(0..4) == 0 && scenario.policies.iter().all(allows_service_calls);
    for _ in 0..rng.u8(0..4) {
        let Some(request) = rng.choice(&scenario.requests).cloned() else {
            return;
        };
        let action = match rng.u8(0..8) {
            0 => OperatorAction::Explain,
            1 => OperatorAction::Query,
            2 => OperatorAction::Inspect,
            3 => OperatorAction::OwnLimits,
            4 => OperatorAction::Examine,
            5 | 6 => OperatorAction::Override,
            _ => OperatorAction::Replay,
        };
        scenario.operations.push(OperatorSpec {
            at_us: rng.u64(FIRST_REQUEST_US..scenario.end_us),
            action,
            request,
        });
    }
    scenario.operations.sort_by_key(|operation| operation.at_us);
}

/// A new password changes nothing. In these classes no process starts while Redis lacks it.
fn add_login_rotation(scenario: &mut Scenario, rng: &mut Rng) {
    use ScenarioClass as Class;
    let is_drawn = matches!(
        scenario.class,
        Class::Healthy | Class::Network | Class::Sentinel | Class::Cluster | Class::ClusterFailover
    );
    if !is_drawn || rng.bool() {
        return;
    }
    let is_loaded_first = rng.bool();
    // The files are compared twice a second.
    let max_between_us = if is_loaded_first {
        15 * SECOND
    } else {
        SECOND / 2
    };
    let at_us = rng.u64(2 * SECOND..scenario.end_us - 20 * SECOND);
    scenario.faults.push(Fault {
        at_us,
        kind: FaultKind::RotateLogin {
            is_loaded_first,
            between_us: rng.u64(0..max_between_us),
        },
    });
    // New connections need the previous login for longer than a recovery takes.
    if scenario.class == Class::Network && is_loaded_first {
        scenario.faults.push(Fault {
            at_us: at_us + SECOND,
            kind: FaultKind::Reset { server: 0 },
        });
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
        Class::Network => draw_network_fault(rng, (instance, server), for_us),
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
            _ => FaultKind::Freeze {
                instance,
                for_us,
                is_suspended: false,
            },
        },
        Class::FrozenLeases => FaultKind::Freeze {
            instance,
            for_us: 2 * SECOND + for_us,
            is_suspended: rng.bool(),
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
        // Renewals and releases are lost, and slots do not lapse.
        Class::SettlementsBesideSlots => FaultKind::Restart {
            server,
            down_us: rng.u64(1_000..2_600) * 1_000,
            lost_us: 0,
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

fn is_same_process(fault: &Fault, other: &Fault) -> bool {
    let process = |fault: &Fault| match fault.kind {
        FaultKind::Crash { instance, .. }
        | FaultKind::Terminate { instance, .. }
        | FaultKind::Freeze { instance, .. } => Some(instance),
        _ => None,
    };
    process(fault).is_some() && process(fault) == process(other)
}

fn draw_network_fault(rng: &mut Rng, (instance, server): (usize, usize), for_us: u64) -> FaultKind {
    match rng.u8(0..8) {
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

/// All instances end in an outage. New ones start in it or after it. Half of the runs have another
/// outage shortly before it, in which most shares are used. Between the two, one instance serves
/// requests and receives statuses.
fn set_termination(scenario: &mut Scenario, rng: &mut Rng, mut first_us: u64) {
    let restart_server = |at_us, down_us| Fault {
        at_us,
        kind: FaultKind::Restart {
            server: 0,
            down_us,
            lost_us: 0,
        },
    };
    let is_second_outage = rng.bool();
    if is_second_outage {
        let down_us = rng.u64(60..90) * 100_000;
        scenario.faults.push(restart_server(first_us, down_us));
        let pause_us = first_us + down_us;
        first_us = pause_us + rng.u64(5..20) * 100_000;
        let is_in_pause = |request: &RequestSpec| (pause_us..first_us).contains(&request.at_us);
        let requests = &mut scenario.requests;
        requests.retain(|request| request.instance == 0 || !is_in_pause(request));
    }
    let down_us = rng.u64(110..130) * 100_000;
    scenario.faults.push(restart_server(first_us, down_us));
    let starts_in_outage = is_second_outage && rng.bool();
    for instance in 0..scenario.instances {
        let after_us = match starts_in_outage {
            true => rng.u64(35..50) * 100_000,
            false => rng.u64(50..75) * 100_000,
        };
        let restart_us = match starts_in_outage {
            true => rng.u64(1..20) * 100_000,
            false => down_us - after_us - TERMINATION_US + rng.u64(5..20) * 100_000,
        };
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
