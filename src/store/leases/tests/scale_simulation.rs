//! A large fleet in virtual time: checks the formulas of benches/SCALE.md for leases and local
//! shares.
//!
//! The sidecars run the real lease table, deny cache and shares, the store the real algorithms. No
//! faults occur here; [`super::fault_simulation`] covers them.
//!
//! `TIDEGATE_SCALE` is the number of sidecars (`make scale`: 1,000), `TIDEGATE_TEST_SEED` the seed.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::print_stdout,
    reason = "numbers of a simulation, far below any edge, and a table of them"
)]

use super::credited_units_and_time;
use crate::clock::{Clock, ManualClock};
use crate::limiter::{Algorithm, Decision, Key, KeyBuilder, LeaseTerms, Limit, PolicyCharges};
use crate::store::deny_cache::DenyCache;
use crate::store::leases::lease_entry::ClockReading;
use crate::store::leases::lease_table::{LeaseTable, OnLeaseExhausted};
use crate::store::{
    FallbackStore, MemorySettings, MemoryStore, PendingSettlement, Settlement, Share,
};
use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;
use tokio::time::Instant;

/// A whole second of the clock, so that windows start there.
const START_US: u64 = 4_102_444_800_000_000;
const SECOND_US: u64 = 1_000_000;
const PER_US: u64 = SECOND_US / 2;
const LEASE_TTL_US: u64 = PER_US / 10;
/// Requests of the first periods are not counted.
const WARM_UP_US: u64 = 2 * PER_US;
const DURATION_US: u64 = WARM_UP_US + 8 * PER_US;
/// Latency between sidecar and store, in one direction.
const ONE_WAY_LATENCY_US: std::ops::Range<u64> = 100..400;
/// Requests of one sidecar per second.
const REQUESTS_PER_SECOND: u64 = 1_000;
const DEFAULT_SIDECAR_COUNT: u64 = 10;
/// Maximum number of sidecars with a `sliding_log`, which takes back no lease that was followed by
/// other charges. With more sidecars the limit is [`Algorithm::SlidingWindow`] with
/// [`SLIDING_WINDOW_BUCKETS`] buckets.
const MAX_SIDECARS_WITH_LOG: u64 = 200;
const SLIDING_WINDOW_BUCKETS: u64 = 50;

/// Reads the clocks of a machine that is never suspended.
fn reading_without_suspension(instant: Instant) -> ClockReading {
    ClockReading {
        instant,
        boot_us: 0,
    }
}

fn read_env_number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |number| number.parse().unwrap())
}

/// Prints the results of a formula and of the simulation side by side.
fn print_row(measure: &str, expected: Option<f64>, simulated: f64) {
    let expected = expected.map_or(String::new(), |expected| format!("{expected:.4}"));
    println!("| {measure} | {expected} | {simulated:.4} |");
}

fn assert_near(measure: &str, expected: f64, simulated: f64, tolerance: f64) {
    print_row(measure, Some(expected), simulated);
    assert!(
        (simulated - expected).abs() <= expected * tolerance,
        "{measure}: {simulated}, and the formula says {expected}"
    );
}

fn assert_at_least(measure: &str, expected: f64, simulated: f64) {
    print_row(&format!("{measure}, at least"), Some(expected), simulated);
    assert!(
        simulated >= expected,
        "{measure}: {simulated}, and the formula says at least {expected}"
    );
}

fn assert_at_most(measure: &str, expected: f64, simulated: f64) {
    print_row(&format!("{measure}, at most"), Some(expected), simulated);
    assert!(
        simulated <= expected,
        "{measure}: {simulated}, and the formula says at most {expected}"
    );
}

#[test]
fn lease_calls_and_unused_units_match_the_formulas() {
    let (sidecars, seed) = (
        read_env_number("TIDEGATE_SCALE", DEFAULT_SIDECAR_COUNT),
        read_env_number("TIDEGATE_TEST_SEED", 1),
    );
    let (rate, ttl_s) = (
        REQUESTS_PER_SECOND as f64,
        LEASE_TTL_US as f64 / SECOND_US as f64,
    );
    println!(
        "{sidecars} sidecars, {REQUESTS_PER_SECOND} requests per second each; TIDEGATE_TEST_SEED={seed}"
    );
    println!("| | formula | simulated |\n|---|---|---|");

    // A limit far above the demand.
    let ample_limit = sidecars * REQUESTS_PER_SECOND * 4;
    let units_per_renewal = |size: u64| (size - size / 4) as f64;
    for (name, size, expected) in [
        // A lease is exhausted long before it expires.
        (
            "calls per request, size = 20",
            Some(20),
            1.0 / units_per_renewal(20),
        ),
        // The size of a lease is the demand of one TTL.
        (
            "calls per request, auto",
            None,
            1.0 / units_per_renewal(REQUESTS_PER_SECOND * LEASE_TTL_US / SECOND_US),
        ),
        // A lease expires before it is exhausted; the next request renews it.
        (
            "calls per request, size = 1000",
            Some(1000),
            1.0 / (rate * (ttl_s + 1.0 / rate)),
        ),
    ] {
        let sums = ScaleSimulation::new(sidecars, ample_limit, size, seed).run();
        assert_near(
            name,
            expected,
            sums.calls as f64 / sums.requests as f64,
            0.2,
        );
        assert_at_most("  refused", 0.0, sums.rejected as f64);
        if let Some(size) = size {
            assert_at_most(
                "  leased units of all sidecars",
                (size * sidecars) as f64,
                sums.max_leased_units as f64,
            );
        }
    }

    // A limit of two thirds of the demand.
    let short_limit = sidecars * REQUESTS_PER_SECOND * 2 / 3;
    let requests = short_limit * PER_US / SECOND_US;
    // Leased units stay charged until one period after their lease ends, so an exhausted key
    // completes one cycle in this time. The measurement may start and end within a cycle.
    let cycle_us = PER_US
        + LEASE_TTL_US
        + if sidecars > MAX_SIDECARS_WITH_LOG {
            PER_US / SLIDING_WINDOW_BUCKETS
        } else {
            0
        };
    let cycles = (DURATION_US - WARM_UP_US) as f64 / cycle_us as f64;
    let usable_part = PER_US as f64 / cycle_us as f64 * (cycles - 1.0) / cycles;
    for size in [Some(4), Some(20), None] {
        let sums = ScaleSimulation::new(sidecars, short_limit, size, seed).run();
        let name = size.map_or("auto".to_owned(), |size| format!("size = {size}"));
        // The automatic size is the demand of one TTL.
        let leased_units =
            size.unwrap_or(REQUESTS_PER_SECOND * LEASE_TTL_US / SECOND_US) * sidecars;
        let idle_part = leased_units as f64 / requests as f64;
        assert_at_least(
            &format!("used of a limit below the demand, {name}"),
            (1.0 - idle_part) * usable_part,
            sums.admitted_fraction_of_limit(short_limit),
        );
        assert_at_most(
            "  fullest window, of the limit",
            1.0,
            sums.fullest_window as f64 / requests as f64,
        );
        print_row(
            "  calls per request",
            None,
            sums.calls as f64 / sums.requests as f64,
        );
    }
}

#[test]
fn share_admissions_match_the_formulas() {
    let (sidecars, seed) = (
        read_env_number("TIDEGATE_SCALE", DEFAULT_SIDECAR_COUNT),
        read_env_number("TIDEGATE_TEST_SEED", 1),
    );
    println!("{sidecars} sidecars without their store; TIDEGATE_TEST_SEED={seed}");
    println!("| | formula | simulated |\n|---|---|---|");
    for each in [1, 4, 25, 100] {
        let requests = sidecars * each + sidecars / 2;
        let (admitted, requested) = simulate_shares(sidecars, requests, seed);
        assert_at_most(
            &format!("in a window, of {requests}"),
            requests as f64,
            max_units_per_window(&admitted) as f64,
        );
        // With random requests, as many as there are units, a share loses the requests above it.
        let rejected = (0..sidecars).map(|place| {
            let share = requests / sidecars + u64::from(place < requests % sidecars);
            share as f64 * poisson_probability_of_mean(share)
        });
        let expected = 1.0 - rejected.sum::<f64>() / requests as f64;
        let (total_admitted, total_requested) =
            (admitted.iter().sum::<u64>(), requested.iter().sum::<u64>());
        assert_near(
            "  admitted of the demand",
            expected,
            total_admitted as f64 / total_requested as f64,
            0.03,
        );
    }
    // Fewer units than instances: some have one unit, the others none.
    let (admitted, _) = simulate_shares(sidecars, sidecars / 4, seed);
    assert_at_most(
        "in a window, of a quarter of a unit each",
        (sidecars / 4) as f64,
        max_units_per_window(&admitted) as f64,
    );
}

fn max_units_per_window(admitted: &[u64]) -> u64 {
    admitted.iter().copied().max().unwrap_or(0)
}

/// Admitted and requested units per aligned window. As many requests as there are units arrive at
/// random times and sidecars.
fn simulate_shares(sidecars: u64, requests: u64, seed: u64) -> (Vec<u64>, Vec<u64>) {
    let windows = (20_000 / requests).max(4);
    let (clock, manual_clock) = Clock::manual(START_US);
    let count = u32::try_from(sidecars).unwrap();
    let new_fallback = |place| {
        let fallback = FallbackStore::new(1, clock.clone());
        fallback.set_share(Share::with_rank(count, place));
        fallback
    };
    let fallback_stores: Vec<FallbackStore> = (0..count).map(new_fallback).collect();
    let total_share: u64 = fallback_stores
        .iter()
        .map(|fallback| fallback.share().scale_units(requests))
        .sum();
    assert_eq!(total_share, requests, "the shares sum to the limit");
    let limit = Limit {
        requests,
        per_us: PER_US,
        algorithm: Algorithm::FixedWindow { offset_us: 0 },
    };
    let key = KeyBuilder::new("p").finish();
    let charge = [PolicyCharges {
        has_fallback: true,
        ..PolicyCharges::new(&limit, &key, 1)
    }];
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut admitted, mut requested) = (vec![0; windows as usize], vec![0; windows as usize]);
    // Instances with one unit more get correspondingly more requests.
    let weights: Vec<u64> = fallback_stores
        .iter()
        .map(|fallback| fallback.share().scale_units(requests))
        .collect();
    let instances_by_share: Vec<usize> = weights
        .iter()
        .enumerate()
        .flat_map(|(at, units)| std::iter::repeat_n(at, *units as usize))
        .collect();
    for window in 0..windows {
        let mut at_us = START_US + window * PER_US;
        let end_us = at_us + PER_US;
        loop {
            at_us += draw_gap_us(&mut random, requests as f64 / PER_US as f64);
            if at_us >= end_us {
                break;
            }
            manual_clock.set_us(at_us);
            requested[window as usize] += 1;
            let at = instances_by_share[random.usize(..instances_by_share.len())];
            let decision = fallback_stores[at].decide(&charge, std::time::Instant::now());
            admitted[window as usize] += u64::from(decision.admitted);
        }
    }
    (admitted, requested)
}

/// Probability of exactly `mean` events when `mean` are expected (Poisson). The expected excess
/// above `mean` is `mean` times this.
fn poisson_probability_of_mean(mean: u64) -> f64 {
    let mean_f = mean as f64;
    (1..=mean).fold((-mean_f).exp(), |product, nth| {
        product * mean_f / nth as f64
    })
}

/// Time until the next of random events with `rate` per microsecond.
fn draw_gap_us(random: &mut fastrand::Rng, rate: f64) -> u64 {
    (-(1.0 - random.f64()).ln() / rate).round() as u64
}

#[derive(Debug, Default)]
struct ScaleSimulationTotals {
    requests: u64,
    admitted: u64,
    rejected: u64,
    /// Calls to the store. A charge and a lease request sent together are one call.
    calls: u64,
    fullest_window: u64,
    max_leased_units: u64,
}

impl ScaleSimulationTotals {
    fn admitted_fraction_of_limit(&self, rate: u64) -> f64 {
        self.admitted as f64 / (rate as f64 * (DURATION_US - WARM_UP_US) as f64 / SECOND_US as f64)
    }
}

struct ScaleSimulation {
    random: fastrand::Rng,
    now_us: u64,
    start: Instant,
    event_queue: BinaryHeap<ScheduledEvent>,
    scheduled_events: u64,
    sidecars: Vec<SimulatedSidecar>,
    memory: MemoryStore,
    manual_clock: ManualClock,
    key: Key,
    limit: Limit,
    lease: LeaseTerms,
    /// Admission times within the last period.
    admitted_at_us: VecDeque<u64>,
    leased_units: u64,
    totals: ScaleSimulationTotals,
}

#[derive(Default)]
struct SimulatedSidecar {
    table: LeaseTable,
    deny_cache: DenyCache,
    /// Requests that wait for a renewal.
    waiting_requests: usize,
    is_return_task_running: bool,
}

struct ScheduledEvent {
    at_us: u64,
    sequence: u64,
    event: ScaleSimulationEvent,
}

enum ScaleSimulationEvent {
    Request {
        sidecar: usize,
    },
    StoreReceivesQuery {
        sidecar: usize,
        cost: u64,
        units_to_request: u64,
        sent_at: Instant,
    },
    SidecarReceivesAnswer {
        sidecar: usize,
        cost: u64,
        units_to_request: u64,
        sent_at: Instant,
        decision: Box<Decision>,
    },
    SidecarSweepsLeases {
        sidecar: usize,
    },
    StoreReceivesReturns {
        credits: Vec<PendingSettlement>,
    },
}

impl ScaleSimulation {
    /// Creates a fleet that shares `rate` units per second.
    fn new(sidecars: u64, rate: u64, size: Option<u64>, seed: u64) -> Self {
        let (clock, manual_clock) = Clock::manual(START_US);
        let mut simulation = Self {
            random: fastrand::Rng::with_seed(seed),
            now_us: START_US,
            start: Instant::now(),
            event_queue: BinaryHeap::new(),
            scheduled_events: 0,
            sidecars: (0..sidecars).map(|_| SimulatedSidecar::default()).collect(),
            memory: MemoryStore::new(
                MemorySettings {
                    max_keys: 10,
                    max_bytes: 1 << 30,
                },
                clock,
            ),
            manual_clock,
            key: KeyBuilder::new("p").finish(),
            limit: Limit {
                requests: rate * PER_US / SECOND_US,
                per_us: PER_US,
                algorithm: match sidecars {
                    ..=MAX_SIDECARS_WITH_LOG => Algorithm::SlidingLog,
                    _ => Algorithm::SlidingWindow {
                        buckets: SLIDING_WINDOW_BUCKETS,
                    },
                },
            },
            lease: LeaseTerms {
                size,
                ttl_us: LEASE_TTL_US,
            },
            admitted_at_us: VecDeque::new(),
            leased_units: 0,
            totals: ScaleSimulationTotals::default(),
        };
        for sidecar in 0..simulation.sidecars.len() {
            simulation.schedule_next_request(sidecar);
        }
        simulation
    }

    fn run(mut self) -> ScaleSimulationTotals {
        while let Some(ScheduledEvent { at_us, event, .. }) = self.event_queue.pop() {
            if at_us >= START_US + DURATION_US {
                break;
            }
            self.now_us = at_us;
            self.handle_event(event);
        }
        self.totals
    }

    fn schedule(&mut self, delay_us: u64, event: ScaleSimulationEvent) {
        let (at_us, sequence) = (self.now_us + delay_us, self.scheduled_events);
        self.scheduled_events += 1;
        self.event_queue.push(ScheduledEvent {
            at_us,
            sequence,
            event,
        });
    }

    fn schedule_next_request(&mut self, sidecar: usize) {
        let delay_us = draw_gap_us(
            &mut self.random,
            REQUESTS_PER_SECOND as f64 / SECOND_US as f64,
        );
        self.schedule(delay_us, ScaleSimulationEvent::Request { sidecar });
    }

    fn current_instant(&self) -> Instant {
        self.start + Duration::from_micros(self.now_us - START_US)
    }

    /// Whether the warm-up has ended.
    fn is_warmed_up(&self) -> bool {
        self.now_us >= START_US + WARM_UP_US
    }

    fn charge(&self, cost: u64, units_to_request: u64) -> PolicyCharges<'static> {
        let charge = PolicyCharges {
            lease: Some(self.lease),
            requested_lease_units: units_to_request,
            ..PolicyCharges::new(&self.limit, &self.key, cost)
        };
        charge.to_owned_charges()
    }

    fn handle_event(&mut self, event: ScaleSimulationEvent) {
        match event {
            ScaleSimulationEvent::Request { sidecar } => {
                self.totals.requests += u64::from(self.is_warmed_up());
                self.decide_request(sidecar);
                self.schedule_next_request(sidecar);
            }
            ScaleSimulationEvent::StoreReceivesQuery {
                sidecar,
                cost,
                units_to_request,
                sent_at,
            } => {
                self.manual_clock.set_us(self.now_us);
                let decision = Box::new(self.memory.decide(&[self.charge(cost, units_to_request)]));
                if cost > 0 && decision.admitted {
                    self.record_admission();
                }
                let delay_us = self.random.u64(ONE_WAY_LATENCY_US);
                self.schedule(
                    delay_us,
                    ScaleSimulationEvent::SidecarReceivesAnswer {
                        sidecar,
                        cost,
                        units_to_request,
                        sent_at,
                        decision,
                    },
                );
            }
            ScaleSimulationEvent::SidecarReceivesAnswer {
                sidecar,
                cost,
                units_to_request,
                sent_at,
                decision,
            } => {
                self.handle_answer(sidecar, cost, units_to_request, sent_at, &decision);
            }
            ScaleSimulationEvent::SidecarSweepsLeases { sidecar } => self.sweep_leases(sidecar),
            ScaleSimulationEvent::StoreReceivesReturns { credits } => {
                self.manual_clock.set_us(self.now_us);
                for settlement in credits.iter().map(Settlement::from_pending) {
                    self.memory.apply_settlements(&[settlement]);
                }
            }
        }
    }

    /// Decides a request of one policy as [`LeasePool`](super::super::LeasePool) does.
    fn decide_request(&mut self, sidecar_index: usize) {
        let now = self.current_instant();
        let charges = [self.charge(1, 0)];
        let SimulatedSidecar {
            table, deny_cache, ..
        } = &self.sidecars[sidecar_index];
        match table.take_permit(
            &charges[0],
            reading_without_suspension(now),
            OnLeaseExhausted::Wait,
        ) {
            Ok((Some(_), units_to_request)) => {
                self.leased_units -= 1;
                self.record_admission();
                if units_to_request > 0 {
                    self.send_queries(sidecar_index, [(0, units_to_request)]);
                }
            }
            Err(_) => self.sidecars[sidecar_index].waiting_requests += 1,
            Ok((None, units_to_request)) => {
                let cached = deny_cache.find_statuses(&charges, now);
                if cached.is_some_and(|cached| cached.is_certain) {
                    if units_to_request > 0 {
                        table.finish_refill(self.key.id());
                    }
                    self.record_rejection();
                } else if units_to_request > 0 {
                    self.send_queries(sidecar_index, [(1, 0), (0, units_to_request)]);
                } else {
                    self.send_queries(sidecar_index, [(1, 0)]);
                }
            }
        }
    }

    /// Sends queries of (cost, units to request) in one call.
    fn send_queries(&mut self, sidecar: usize, queries: impl IntoIterator<Item = (u64, u64)>) {
        let (sent_at, delay_us) = (self.current_instant(), self.random.u64(ONE_WAY_LATENCY_US));
        self.totals.calls += u64::from(self.is_warmed_up());
        for (cost, units_to_request) in queries {
            self.schedule(
                delay_us,
                ScaleSimulationEvent::StoreReceivesQuery {
                    sidecar,
                    cost,
                    units_to_request,
                    sent_at,
                },
            );
        }
    }

    fn handle_answer(
        &mut self,
        sidecar_index: usize,
        cost: u64,
        units_to_request: u64,
        sent_at: Instant,
        decision: &Decision,
    ) {
        let (received_at, charges) = (
            self.current_instant(),
            [self.charge(cost, units_to_request)],
        );
        if cost > 0 {
            if !decision.admitted {
                self.sidecars[sidecar_index].deny_cache.record_refusal(
                    &charges,
                    decision,
                    sent_at,
                    received_at,
                );
                self.record_rejection();
            }
            return;
        }
        let table = &self.sidecars[sidecar_index].table;
        table.record_lease_answer(
            &charges[0],
            decision,
            (reading_without_suspension(sent_at), received_at),
        );
        table.finish_refill(self.key.id());
        self.leased_units += decision
            .policies
            .iter()
            .filter_map(|outcome| outcome.grant)
            .map(|grant| grant.units)
            .sum::<u64>();
        self.totals.max_leased_units = self.totals.max_leased_units.max(self.leased_units);
        if !std::mem::replace(
            &mut self.sidecars[sidecar_index].is_return_task_running,
            true,
        ) {
            self.schedule(
                0,
                ScaleSimulationEvent::SidecarSweepsLeases {
                    sidecar: sidecar_index,
                },
            );
        }
        for _ in 0..std::mem::take(&mut self.sidecars[sidecar_index].waiting_requests) {
            self.decide_request(sidecar_index);
        }
    }

    /// Simulates the credit task.
    fn sweep_leases(&mut self, sidecar_index: usize) {
        let now = self.current_instant();
        let (credits, next) = self.sidecars[sidecar_index]
            .table
            .take_due_credits(reading_without_suspension(now));
        let credited = credits.iter().map(credited_units_and_time);
        self.leased_units -= credited.map(|(units, _)| units).sum::<u64>();
        self.sidecars[sidecar_index].is_return_task_running = next.is_some() || !credits.is_empty();
        if !credits.is_empty() {
            let delay_us = self.random.u64(ONE_WAY_LATENCY_US);
            self.schedule(
                delay_us,
                ScaleSimulationEvent::StoreReceivesReturns { credits },
            );
        }
        if self.sidecars[sidecar_index].is_return_task_running {
            let sweep_interval_us = super::super::SWEEP_INTERVAL.as_micros() as u64;
            let wait = next.map_or(Duration::ZERO, |next| next.saturating_duration_since(now));
            self.schedule(
                sweep_interval_us.max(wait.as_micros() as u64 + 1),
                ScaleSimulationEvent::SidecarSweepsLeases {
                    sidecar: sidecar_index,
                },
            );
        }
    }

    /// Records the admission of one unit at the current time.
    fn record_admission(&mut self) {
        while self
            .admitted_at_us
            .front()
            .is_some_and(|at_us| at_us + self.limit.per_us <= self.now_us)
        {
            self.admitted_at_us.pop_front();
        }
        self.admitted_at_us.push_back(self.now_us);
        self.totals.fullest_window = self
            .totals
            .fullest_window
            .max(self.admitted_at_us.len() as u64);
        self.totals.admitted += u64::from(self.is_warmed_up());
    }

    fn record_rejection(&mut self) {
        self.totals.rejected += u64::from(self.is_warmed_up());
    }
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for ScheduledEvent {}

impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The earliest event is the greatest, because a heap returns the greatest first.
impl Ord for ScheduledEvent {
    fn cmp(&self, other: &Self) -> Ordering {
        Reverse((self.at_us, self.sequence)).cmp(&Reverse((other.at_us, other.sequence)))
    }
}
