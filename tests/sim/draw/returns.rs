//! Adds a route whose requests return their units: many in flight at a time, in a queue, or beside a
//! limit of the instance.

use super::policies::build_policy;
use crate::sim::scenario::{HOUR, PolicySpec, RequestSpec, Rule, SECOND, Scenario, ScenarioClass};
use fastrand::Rng;

/// The greedy client sends so many requests at once, a microsecond apart.
const CROWD: u64 = 400;

/// In a cluster, each of them is a call, also while the script is not loaded yet.
const CROWD_OF_CLUSTER: u64 = 60;

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
        (one.route, one.estimate, one.counts_responses) = (route, Some(1), true);
    });
    let kind = rng.u8(0..3);
    let (policy, requests) = match kind {
        0 => draw_parallel_requests(policy, &mut rng),
        1 => draw_queue(policy, &mut rng),
        _ => {
            scenario
                .policies
                .push(draw_crowded_policy(&policy, scenario.seed));
            let crowd = match scenario.class {
                Class::Cluster => CROWD_OF_CLUSTER,
                _ => CROWD,
            };
            draw_crowd(policy, crowd, &mut rng)
        }
    };
    let requests = requests.into_iter().map(|request| RequestSpec {
        route,
        instance: match kind {
            2 => 0,
            _ => rng.usize(0..scenario.instances),
        },
        worker: rng.usize(0..scenario.workers),
        ..request
    });
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
    }
}

/// Twice as many requests in flight as the limit can lose, of which few count.
fn draw_parallel_requests(policy: PolicySpec, rng: &mut Rng) -> (PolicySpec, Vec<RequestSpec>) {
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
            requests.push(request_at(at_us, 2 * SECOND + rng.u64(0..SECOND), actual));
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
fn draw_queue(policy: PolicySpec, rng: &mut Rng) -> (PolicySpec, Vec<RequestSpec>) {
    let counts_responses = rng.bool();
    let requests = (0..60).map(|_| {
        let at_us = 2 * SECOND + rng.u64(0..5 * SECOND);
        request_at(at_us, 1_000 * rng.u64(1..30), 2 * rng.u64(0..2))
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
    (policy, requests.collect())
}

/// A limit of the instance for all its clients: few slots, or so many units that it never refuses.
fn draw_crowded_policy(policy: &PolicySpec, seed: u64) -> PolicySpec {
    let (rule, requests) = match seed.is_multiple_of(3) {
        true => (Rule::SlidingLog, 5_000),
        false => (Rule::Concurrency { ttl_us: HOUR }, 30),
    };
    let estimate = None;
    PolicySpec {
        rule,
        requests,
        estimate,
        counts_responses: false,
        is_global: true,
        is_of_instance: true,
        ..policy.clone()
    }
}

/// A client that Redis refuses beside clients within their limits, and few slots of the instance.
fn draw_crowd(policy: PolicySpec, crowd: u64, rng: &mut Rng) -> (PolicySpec, Vec<RequestSpec>) {
    let mut requests = Vec::new();
    for moment in 0..4 {
        let at_us = (2 + moment) * SECOND;
        for number in 0..crowd {
            requests.push(request_at(at_us + number, 1_000, 1));
        }
        for client in 1..5 {
            let at_us = at_us + rng.u64(0..crowd);
            let request = request_at(at_us, 1_000, 1);
            requests.push(RequestSpec { client, ..request });
        }
    }
    let policy = PolicySpec {
        requests: 5,
        per_us: HOUR,
        ..policy
    };
    (policy, requests)
}
