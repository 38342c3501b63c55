//! Runs ranges of seeds, and sums up what they showed.

use super::draw::draw_scenario;
use super::minimize::{report, run_scenario};
use super::scenario::ScenarioClass;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::thread;

/// What a range of seeds showed.
#[derive(Default)]
pub(crate) struct Summary {
    seeds: u64,
    simulated_us: u64,
    commands: u64,
    requests: u64,
    streams: u64,
    cut_off_streams: u64,
    /// Of all events of all seeds, in any order.
    pub(crate) trace_hash: u64,
    faults: BTreeMap<String, u64>,
    /// By class and rule, with the seeds.
    pub(crate) violations: BTreeMap<String, Vec<u64>>,
}

/// Runs seeds on threads. Prints the report of the first violation of each kind on each thread, and
/// the summary.
pub(crate) fn run_seeds(
    seeds: impl Iterator<Item = u64> + Send,
    classes: &[ScenarioClass],
    threads: usize,
) -> Summary {
    let (seeds, total) = (Mutex::new(seeds), Mutex::new(Summary::default()));
    let run_next_seeds = || {
        let mut summary = Summary::default();
        let next_seed = || seeds.lock().unwrap().next();
        while let Some(seed) = next_seed() {
            summary.add_seed(seed, classes);
        }
        total.lock().unwrap().add(summary);
    };
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(run_next_seeds);
        }
    });
    let total = total.into_inner().unwrap();
    total.print();
    total
}

impl Summary {
    fn add_seed(&mut self, seed: u64, classes: &[ScenarioClass]) {
        let scenario = draw_scenario(seed, classes);
        let result = run_scenario(&scenario, false);
        self.seeds += 1;
        self.simulated_us += scenario.end_us;
        self.commands += result.trace.commands;
        self.trace_hash ^= result.trace.hash();
        self.requests += scenario.requests.len() as u64;
        self.streams += result.streams.0;
        self.cut_off_streams += result.streams.1;
        for fault in &scenario.faults {
            *self.faults.entry(fault.kind.name()).or_default() += 1;
        }
        let Some(first) = result.violations.first() else {
            return;
        };
        let kind = format!("{:?}: {}", scenario.class, first.rule);
        let seeds = self.violations.entry(kind).or_default();
        seeds.push(seed);
        if seeds.len() == 1 && std::env::var("SIM_REPORT").as_deref() != Ok("0") {
            println!("{}", report(&scenario, &result.violations));
        }
    }

    fn add(&mut self, other: Self) {
        self.seeds += other.seeds;
        self.simulated_us += other.simulated_us;
        self.commands += other.commands;
        self.trace_hash ^= other.trace_hash;
        self.requests += other.requests;
        self.streams += other.streams;
        self.cut_off_streams += other.cut_off_streams;
        for (fault, count) in other.faults {
            *self.faults.entry(fault).or_default() += count;
        }
        for (kind, seeds) in other.violations {
            self.violations.entry(kind).or_default().extend(seeds);
        }
    }

    fn print(&self) {
        println!(
            "{} seeds, {:.1} simulated hours, {} requests, {} streams ({} cut off), {} commands of Redis, trace {:016x}",
            self.seeds,
            self.simulated_us as f64 / 3.6e9,
            self.requests,
            self.streams,
            self.cut_off_streams,
            self.commands,
            self.trace_hash
        );
        println!("faults: {:?}", self.faults);
        println!(
            "violations: {}",
            self.violations.values().map(Vec::len).sum::<usize>()
        );
        for (kind, seeds) in &self.violations {
            println!(
                "  {kind}: {} seeds, first {:?}",
                seeds.len(),
                &seeds[..seeds.len().min(8)]
            );
        }
    }
}
