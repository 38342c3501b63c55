//! Adds what policies can have beside their limits: other sources of amounts and keys, a counter for
//! two routes, limits of an instance; and steps of the instances' wall clocks.

use super::policies::{draw_policy, is_window};
use crate::sim::scenario::{
    Amounts, Fault, FaultKind, OnFailure, PolicySpec, Rule, SECOND, Scenario, ScenarioClass,
};
use fastrand::Rng;

/// Draws of its own, so that all other draws of a seed stay.
pub(super) fn add_variants(scenario: &mut Scenario) {
    use ScenarioClass as Class;
    let mut rng = Rng::with_seed(scenario.seed ^ 0x405);
    // All other classes need the policies that they have.
    let is_varied = ScenarioClass::ALL[..=Class::Memory as usize].contains(&scenario.class);
    if !is_varied {
        return;
    }
    for policy in &mut scenario.policies {
        vary_policy(policy, scenario.is_rate_limit_service, &mut rng);
    }
    for request in &mut scenario.requests {
        let mut other = scenario.policies.iter().filter_map(|one| {
            let is_moved = one.route == request.route;
            one.other_route.filter(|_| is_moved)
        });
        if rng.u8(0..3) == 0
            && let Some(other) = other.next()
        {
            request.route = other;
        }
    }
    let has_processes = !matches!(scenario.class, Class::DataLoss | Class::Instances);
    if has_processes && !scenario.is_rate_limit_service && rng.u8(0..3) == 0 {
        add_instance_policy(scenario, &mut rng);
    }
    let has_steps = matches!(
        scenario.class,
        Class::Healthy | Class::Cluster | Class::Memory
    );
    for _ in 0..if has_steps { rng.u8(0..3) } else { 0 } {
        let by_us = rng.i64(1..1_000) * 1_000_000;
        scenario.faults.push(Fault {
            at_us: rng.u64(3 * SECOND..scenario.end_us - 10 * SECOND),
            kind: FaultKind::WallClockStep {
                instance: rng.usize(0..scenario.instances),
                by_us: if rng.bool() { by_us } else { -by_us },
            },
        });
    }
}

fn vary_policy(policy: &mut PolicySpec, is_rate_limit_service: bool, rng: &mut Rng) {
    policy.other_route = (policy.shares_counter && rng.bool()).then_some(policy.route + 10);
    policy.has_alternatives = !is_rate_limit_service && !policy.is_global && rng.u8(0..4) == 0;
    if policy.lease.is_some() || policy.shards > 1 {
        return;
    }
    let is_stated = is_window(policy.rule)
        && !is_rate_limit_service
        && policy.on_failure != OnFailure::Local
        && !policy.is_dynamic
        && !policy.counts_responses_for_block();
    let has_amounts = is_window(policy.rule) || matches!(policy.rule, Rule::Concurrency { .. });
    let has_pattern =
        has_amounts && !policy.is_global && !policy.has_alternatives && !policy.shares_counter;
    policy.amounts = match rng.u8(0..4) {
        0 if is_stated => Amounts::OfRequest,
        1 if has_pattern => Amounts::OfPattern,
        _ => Amounts::Fixed,
    };
}

/// A limit of each instance beside a policy of the run.
fn add_instance_policy(scenario: &mut Scenario, rng: &mut Rng) {
    let route = scenario.policies[rng.usize(0..scenario.policies.len())].route;
    let mut policy = draw_policy(rng, route, OnFailure::Open);
    policy.lease = None;
    policy.is_of_instance = true;
    policy.requests = rng.u64(3..15);
    policy.is_global = rng.bool();
    policy.has_alternatives = !policy.is_global && rng.bool();
    scenario.policies.push(policy);
}
