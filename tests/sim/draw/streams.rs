//! Draws streaming responses that are cut off when their key has nothing left.

use super::policies::build_policy;
use crate::sim::scenario::{
    HOUR, OnFailure, PolicySpec, RequestSpec, Rule, SECOND, Scenario, ScenarioClass, StreamReport,
    StreamSpec,
};
use fastrand::Rng;

/// Half of the policies with an estimate cut off their responses, which are short. Draws of its
/// own, so that all other draws of a seed stay.
pub(super) fn cut_off_estimates(scenario: &mut Scenario) {
    let mut rng = Rng::with_seed(scenario.seed ^ 0x406);
    if scenario.class == ScenarioClass::SettlementsBesideSlots {
        return;
    }
    for policy in &mut scenario.policies {
        let is_estimated = policy.estimate.is_some() && !policy.counts_responses;
        policy.cut_off = (is_estimated && rng.bool()).then(|| rng.u64(1..4));
    }
    let policies = &scenario.policies;
    for request in &mut scenario.requests {
        let cuts_off = |one: &PolicySpec| one.cut_off.is_some() && one.applies_to(request);
        if policies.iter().any(cuts_off) {
            let mut stream = draw_stream(8, 3, &mut rng);
            if request.actual.is_none() {
                stream.report = StreamReport::Never;
            }
            request.stream = Some(stream);
        }
    }
}

/// In half of the runs whose policies are free, a route has long streams that share little.
pub(super) fn add_streams(scenario: &mut Scenario) {
    let mut rng = Rng::with_seed(scenario.seed ^ 0x407);
    let is_varied = ScenarioClass::ALL[..=ScenarioClass::Memory as usize].contains(&scenario.class);
    if !is_varied || scenario.is_rate_limit_service || rng.bool() {
        return;
    }
    let used_routes = scenario.policies.iter().map(|one| one.route);
    let route = used_routes.filter(|route| *route < 10).max();
    let route = route.map_or(0, |last| last + 1);
    let policy = draw_policy_of_streams(scenario, route, &mut rng);
    let (first_us, last_us) = (SECOND, scenario.end_us - 8 * SECOND);
    for _ in 0..rng.u64(20..50) {
        let max_events = rng.u64(2..40);
        scenario.requests.push(RequestSpec {
            at_us: rng.u64(first_us..last_us),
            instance: rng.usize(0..scenario.instances),
            worker: rng.usize(0..scenario.workers),
            route,
            client: rng.u32(0..3),
            cost: 1,
            service_us: 1_000 * rng.u64(1..30),
            actual: None,
            leaves_after_us: (rng.u8(0..10) == 0).then(|| rng.u64(0..3 * SECOND)),
            pause_us: 0,
            stream: Some(draw_stream(max_events, 6, &mut rng)),
        });
    }
    scenario.policies.push(policy);
}

fn draw_policy_of_streams(scenario: &Scenario, route: usize, rng: &mut Rng) -> PolicySpec {
    use ScenarioClass as Class;
    let requests = rng.u64(30..300);
    let rule = match rng.u8(0..8) {
        0..4 => Rule::SlidingLog,
        4 => Rule::SlidingWindow,
        5 => Rule::FixedWindow,
        6 => Rule::CalendarDay,
        _ => Rule::TokenBucket { burst: requests },
    };
    let per_us = match rule {
        Rule::CalendarDay => 24 * HOUR,
        _ => [10 * SECOND, HOUR, HOUR][rng.usize(0..3)],
    };
    let failures = [OnFailure::Open, OnFailure::Closed, OnFailure::Local];
    let on_failure = match scenario.class {
        Class::Outage => OnFailure::Local,
        _ => failures[rng.usize(0..3)],
    };
    let has_processes = !matches!(scenario.class, Class::DataLoss | Class::Instances);
    let has_one_key = scenario.class == Class::ClusterReshard;
    build_policy(|one| {
        (one.route, one.rule, one.requests, one.per_us) = (route, rule, requests, per_us);
        (one.on_failure, one.is_global) = (on_failure, rng.bool());
        one.estimate = Some(rng.u64(1..10));
        one.cut_off = Some(rng.u64(1..20));
        one.is_of_instance = has_processes && rng.u8(0..6) == 0;
        let has_second = per_us < HOUR && !has_one_key && !matches!(rule, Rule::TokenBucket { .. });
        one.second_limit = (has_second && rng.u8(0..3) == 0).then(|| 2 * requests);
        one.shares_counter = rng.u8(0..4) == 0;
    })
}

fn draw_stream(max_events: u64, max_units: u64, rng: &mut Rng) -> StreamSpec {
    let (events, event_units) = (rng.u64(1..=max_events), rng.u64(1..=max_units));
    StreamSpec {
        events,
        event_units,
        // Some end while Redis is asked for a slice.
        interval_us: match rng.u8(0..3) {
            0 => 500 * rng.u64(0..6),
            _ => 1_000 * rng.u64(1..100),
        },
        report: match rng.u8(0..4) {
            0 => StreamReport::Never,
            1 => StreamReport::AtEnd(rng.u64(0..=events * event_units)),
            _ => StreamReport::EachEvent,
        },
    }
}
