//! Runs the simulation of `tests/sim` with other seeds than the gate; see `make sim`.
//!
//! `SIM_SEEDS=from..to`, `SIM_MINUTES` and `SIM_CLASS` select the runs. With `SIM_REPORT=0` a
//! violation is not minimized.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::large_futures,
    clippy::print_stdout,
    reason = "a simulation fails by panicking, and its report goes to stdout"
)]

#[path = "../tests/sim/mod.rs"]
mod sim;

use sim::{ScenarioClass, run_seeds};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// As in the product. The C library's takes a third of the time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let seeds = variable("SIM_SEEDS");
    let (from, to) = seeds.split_once("..").unwrap_or(("0", "1000"));
    let (from, to): (u64, u64) = (from.parse().unwrap(), to.parse().unwrap());
    let minutes: f64 = variable("SIM_MINUTES").parse().unwrap_or(10.0);
    let class = variable("SIM_CLASS");
    let classes: Vec<_> = ScenarioClass::ALL
        .into_iter()
        .filter(|one| class.is_empty() || format!("{one:?}") == class)
        .collect();
    assert!(!classes.is_empty(), "no class is named {class}");
    let started = Instant::now();
    let ends_at = started + Duration::from_secs_f64(minutes * 60.0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let seeds = (from..to).take_while(|_| Instant::now() < ends_at);
    let summary = run_seeds(seeds, &classes, threads);
    println!("{:.0} s", started.elapsed().as_secs_f64());
    ExitCode::from(u8::from(!summary.violations.is_empty()))
}
