//! Runs scenarios, and reduces one that fails to the faults and requests that it needs.

use crate::sim::judge::{Violation, judge_run};
use crate::sim::scenario::Scenario;
use crate::sim::stream::{StreamEnd, StreamRecord};
use crate::sim::trace::Trace;
use crate::sim::world::World;
use std::time::{Duration, Instant};

/// The most runs of one reduction, and its longest duration.
const MAX_RUNS: usize = 150;
const MAX_DURATION: Duration = Duration::from_secs(20);

/// Lines of the trace shown before a violation.
const SHOWN_LINES: usize = 25;

pub(crate) struct RunResult {
    pub(crate) violations: Vec<Violation>,
    pub(crate) trace: Trace,
    /// All streams with a verdict, and those of them that were cut off.
    pub(crate) streams: (u64, u64),
}

pub(crate) fn run_scenario(scenario: &Scenario, is_verbose: bool) -> RunResult {
    let mut world = World::new(scenario.clone());
    world.trace.is_verbose = is_verbose;
    world.run();
    let violations = judge_run(&mut world);
    let log = world.log.lock().unwrap();
    let streams = || log.iter().filter_map(|record| record.stream.as_ref());
    let is_cut_off = |one: &&StreamRecord| matches!(one.end, StreamEnd::CutOff { .. });
    let streams = (
        streams().count() as u64,
        streams().filter(is_cut_off).count() as u64,
    );
    drop(log);
    RunResult {
        violations,
        trace: std::mem::take(&mut world.trace),
        streams,
    }
}

/// Removes faults and requests as long as the same rule is violated.
pub(crate) fn minimize(scenario: &Scenario, rule: &str) -> Scenario {
    let (mut runs, start) = (0, Instant::now());
    let mut fails = |candidate: &Scenario| {
        runs += 1;
        runs <= MAX_RUNS
            && start.elapsed() < MAX_DURATION
            && run_scenario(candidate, false)
                .violations
                .iter()
                .any(|one| one.rule == rule)
    };
    let mut smallest = scenario.clone();
    let mut index = 0;
    while index < smallest.faults.len() {
        let mut candidate = smallest.clone();
        candidate.faults.remove(index);
        match fails(&candidate) {
            true => smallest = candidate,
            false => index += 1,
        }
    }
    // Bisects: removes halves, then quarters, and so on.
    let mut length = smallest.requests.len() / 2;
    while length > 0 {
        let mut start = 0;
        while start < smallest.requests.len() {
            let mut candidate = smallest.clone();
            candidate
                .requests
                .drain(start..(start + length).min(smallest.requests.len()));
            match fails(&candidate) {
                true => smallest = candidate,
                false => start += length,
            }
        }
        length /= 2;
    }
    smallest
}

/// The report of a failing scenario: what it needs, and the last events before the violation.
pub(crate) fn report(scenario: &Scenario, violations: &[Violation]) -> String {
    let first = &violations[0];
    let smallest = minimize(scenario, first.rule);
    let result = run_scenario(&smallest, true);
    let shown = result
        .violations
        .iter()
        .find(|one| one.rule == first.rule)
        .unwrap_or(first);
    let mut text = format!(
        "seed {} ({:?}, {:?}, {} instances of {} workers, delay {} us)\n",
        scenario.seed,
        scenario.class,
        scenario.topology,
        scenario.instances,
        scenario.workers,
        scenario.delay_us
    );
    for violation in violations {
        text += &format!(
            "  {:>10} us {}: {}\n",
            violation.at_us, violation.rule, violation.text
        );
    }
    text += &format!(
        "minimized to {} requests; {}: {}\n",
        smallest.requests.len(),
        shown.rule,
        shown.text
    );
    for (number, policy) in smallest.policies.iter().enumerate() {
        text += &format!("  p{number} {policy:?}\n");
    }
    for fault in &smallest.faults {
        text += &format!("  {:>10} us {:?}\n", fault.at_us, fault.kind);
    }
    let requests: Vec<_> = smallest
        .requests
        .iter()
        .filter(|one| one.at_us <= shown.at_us)
        .collect();
    for request in &requests[requests.len().saturating_sub(SHOWN_LINES)..] {
        text += &format!("  {request:?}\n");
    }
    let lines: Vec<_> = result
        .trace
        .lines
        .iter()
        .filter(|(at_us, _)| *at_us <= shown.at_us)
        .collect();
    for (at_us, line) in &lines[lines.len().saturating_sub(SHOWN_LINES)..] {
        text += &format!("  {at_us:>10} us {line}\n");
    }
    text
}
