//! The seeds of the gate: `cargo nextest run --test sim`. `make sim` runs others
//! (`benches/sim.rs`).

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

#[path = "mod.rs"]
mod sim;

use sim::{ScenarioClass, run_seeds};

/// The seeds of the gate.
const GATE_SEEDS: std::ops::Range<u64> = 0..200;

/// Runs the gate's seeds, in as many tests as the gate has processors.
fn run_gate(part: u64) {
    let seeds = GATE_SEEDS.filter(|seed| seed % 2 == part);
    let summary = run_seeds(seeds, &ScenarioClass::ALL, 1);
    assert!(
        summary.violations.is_empty(),
        "some seeds violate a promise"
    );
}

#[test]
fn even_seeds_of_the_gate_violate_nothing() {
    run_gate(0);
}

#[test]
fn odd_seeds_of_the_gate_violate_nothing() {
    run_gate(1);
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let seeds = 0..ScenarioClass::ALL.len() as u64;
    let hashes = [1, 2].map(|_| run_seeds(seeds.clone(), &ScenarioClass::ALL, 1).trace_hash);
    assert_eq!(hashes[0], hashes[1]);
}
