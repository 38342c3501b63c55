//! Adds a route whose requests return their units: many in flight at a time, in a queue, or beside
//! a limit of the instance.

use super::policies::build_policy;
use crate::sim::scenario::{HOUR, PolicySpec, RequestSpec, Rule, SECOND, Scenario, ScenarioClass};
use fastrand::Rng;

/// The greedy client sends so many requests at once.
const CROWD: u64 = 400;

/// In a cluster, each of them is a call, also while the script is not loaded yet.
const CROWD_OF_CLUSTER: u64 = 60;

/// The requests of a crowd are so far apart. All of them are in flight before Redis answers.
const CROWD_DISTANCES_US: [u64; 2] = [1, 50];

/// Draws of its own, so that all other draws of a seed stay.
pub(super) fn add_returns(scenario: &mut Scenario) {
    use ScenarioClass as Class;
    let is_drawn = matches!(
        scenario.class,
        Class::Healthy | Class::Memory | Class::Cluster
    );
    if !is_drawn || scenario.is_rate_limit_service {
        return;
    }
    let mut rng = Rng::with_seed(scenario.seed ^ 0x404);
    let route = scenario.policies.iter().map(|policy| policy.route).max();
    let route = route.map_or(0, |last| last + 1);
    let policy = build_policy(|one| {
        (one.route, one.estimate, one.counts_responses) = (route, Some(1), rng.u8(0..4) > 0);
    });
    let (policy, requests) = match rng.u8(0..4) {
        0 => draw_parallel_requests(policy, scenario, &mut rng),
        1 => draw_queue(policy, scenario, &mut rng),
        _ => draw_crowd(policy, scenario, &mut rng),
    };
    let requests = requests
        .into_iter()
        .map(|request| RequestSpec { route, ..request });
    scenario.requests.extend(requests);
    scenario.policies.push(policy);
}

fn request_at(at_us: u64, service_us: u64, actual: u64) -> RequestSpec {
    RequestSpec {
        at_us,
        instance: 0,
        worker: 0,
        route: 0,
        client: 0,
        cost: 1,
        service_us,
        actual: Some(actual),
        leaves_after_us: None,
        pause_us: 0,
        stream: None,
    }
}

/// The request at any worker of any instance.
fn at_any_worker(request: RequestSpec, scenario: &Scenario, rng: &mut Rng) -> RequestSpec {
    RequestSpec {
        instance: rng.usize(0..scenario.instances),
        worker: rng.usize(0..scenario.workers),
        ..request
    }
}

/// Twice as many requests in flight as the limit can lose, of which few count.
fn draw_parallel_requests(
    policy: PolicySpec,
    scenario: &Scenario,
    rng: &mut Rng,
) -> (PolicySpec, Vec<RequestSpec>) {
    let rule = match rng.u8(0..6) {
        0..3 => Rule::SlidingLog,
        3 => Rule::SlidingWindow,
        4 => Rule::FixedWindow,
        _ => Rule::TokenBucket { burst: 900 },
    };
    let mut requests = Vec::new();
    for first_us in [2 * SECOND, 8 * SECOND] {
        for _ in 0..700 {
            let actual = u64::from(rng.u8(0..20) == 0);
            let at_us = first_us + rng.u64(0..SECOND);
            let request = request_at(at_us, 2 * SECOND + rng.u64(0..SECOND), actual);
            requests.push(at_any_worker(request, scenario, rng));
        }
    }
    let policy = PolicySpec {
        rule,
        is_global: true,
        requests: 900,
        per_us: HOUR,
        ..policy
    };
    (policy, requests)
}

/// A queue that never refuses.
fn draw_queue(
    policy: PolicySpec,
    scenario: &Scenario,
    rng: &mut Rng,
) -> (PolicySpec, Vec<RequestSpec>) {
    let counts_responses = rng.bool();
    let requests = (0..60).map(|_| {
        let at_us = 2 * SECOND + rng.u64(0..5 * SECOND);
        let request = request_at(at_us, 1_000 * rng.u64(1..30), 2 * rng.u64(0..2));
        at_any_worker(request, scenario, rng)
    });
    let policy = PolicySpec {
        rule: Rule::LeakyBucket {
            max_delay_us: 6 * SECOND,
        },
        is_global: true,
        requests: 10,
        per_us: SECOND,
        counts_responses,
        ..policy
    };
    let requests = requests.collect();
    (policy, requests)
}

/// A client that Redis refuses, with a crowd of requests at one instance, beside clients within
/// their limits. The instance has a limit for all of them, which has room for those that Redis
/// admits: a refused request uses nothing of it.
fn draw_crowd(
    policy: PolicySpec,
    scenario: &mut Scenario,
    rng: &mut Rng,
) -> (PolicySpec, Vec<RequestSpec>) {
    let is_cluster = scenario.class == ScenarioClass::Cluster;
    let policy = draw_refusing_policy(policy, is_cluster, rng);
    let of_instance = draw_crowded_policy(&policy, scenario.seed, rng);
    scenario.policies.push(of_instance);
    let crowd = if is_cluster { CROWD_OF_CLUSTER } else { CROWD };
    let distance_us = CROWD_DISTANCES_US[rng.usize(0..2)];
    // All of a crowd is in flight, also in several milliseconds.
    if scenario.class == ScenarioClass::Healthy && rng.bool() {
        (scenario.delay_us, scenario.timeout_us) = (20_000, 400_000);
    }
    let mut requests = Vec::new();
    // Before the first crowd, each worker knows that units are left; another instance uses them.
    if rng.bool() {
        let last = scenario.instances - 1;
        for (instance, at_us, count) in [(0, SECOND, 2), (last, 3 * SECOND / 2, 5)] {
            for number in 0..count {
                let request = request_at(at_us + 50_000 * number as u64, 1_000, 1);
                let worker = number % scenario.workers;
                requests.push(RequestSpec {
                    instance,
                    worker,
                    ..request
                });
            }
        }
    }
    for moment in 0..4 {
        let at_us = (2 + moment) * SECOND;
        let worker = |rng: &mut Rng| rng.usize(0..scenario.workers);
        for number in 0..crowd {
            let request = request_at(at_us + number * distance_us, 1_000, 1);
            let worker = worker(rng);
            requests.push(RequestSpec { worker, ..request });
        }
        for client in 1..5 {
            let at_us = at_us + rng.u64(0..crowd * distance_us);
            let request = request_at(at_us, 1_000, 1);
            let worker = worker(rng);
            requests.push(RequestSpec {
                client,
                worker,
                ..request
            });
        }
    }
    (policy, requests)
}

/// Five units per client, which count responses, or also rejected requests, or are divided among
/// shards.
fn draw_refusing_policy(policy: PolicySpec, is_cluster: bool, rng: &mut Rng) -> PolicySpec {
    let policy = PolicySpec {
        requests: 5,
        per_us: HOUR,
        ..policy
    };
    let plain = PolicySpec {
        estimate: None,
        counts_responses: false,
        ..policy.clone()
    };
    match rng.u8(0..4) {
        0 if is_cluster => PolicySpec { shards: 2, ..plain },
        0..2 => PolicySpec {
            counts_rejected: true,
            ..plain
        },
        _ => policy,
    }
}

/// A limit of the instance for all its clients. With `shards`, it reserves units for all requests,
/// so it has many.
fn draw_crowded_policy(refusing: &PolicySpec, seed: u64, rng: &mut Rng) -> PolicySpec {
    let ttl_us = HOUR;
    let (rule, requests) = match rng.u8(0..12) {
        _ if seed.is_multiple_of(3) || refusing.shards > 1 => (Rule::SlidingLog, 5_000),
        0..4 => (Rule::Concurrency { ttl_us }, 30),
        4..8 => (Rule::SlidingLog, 60),
        8 => (Rule::SlidingWindow, 60),
        9 => (Rule::FixedWindow, 60),
        10 => (Rule::TokenBucket { burst: 60 }, 60),
        // Requests leave it one by one.
        _ => (
            Rule::LeakyBucket {
                max_delay_us: 6 * SECOND,
            },
            10,
        ),
    };
    let is_queue = matches!(rule, Rule::LeakyBucket { .. });
    build_policy(|one| {
        (one.route, one.rule, one.requests) = (refusing.route, rule, requests);
        one.per_us = if is_queue { SECOND } else { HOUR };
        (one.is_global, one.is_of_instance) = (true, true);
    })
}
