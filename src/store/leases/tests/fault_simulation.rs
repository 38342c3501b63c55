//! A fleet in virtual time: instances, one store and random faults between them, all from one seed.
//!
//! The instances run the real lease table and the store the real algorithms. Admissions are judged
//! on the store's clock, at the moment of the decision or of issuing a leased unit.

use crate::clock::{Clock, ManualClock};
use crate::limiter::{
    Algorithm, Decision, Key, KeyBuilder, LeaseTerms, Limit, LimitCharge, PolicyCharges,
};
use crate::store::leases::lease_entry::ClockReading;
use crate::store::leases::lease_entry::LeasePermit;
use crate::store::leases::lease_table::{LeaseTable, OnLeaseExhausted};
use crate::store::{MemorySettings, MemoryStore, PendingSettlement, Settlement};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::time::Duration;
use tokio::time::Instant;

const SEED_COUNT: u64 = 1_000;
const START_US: u64 = 4_102_444_800_000_000;
const TIMEOUT_US: u64 = 5_000;
const DURATION_US: u64 = 160_000;

#[test]
fn no_limit_is_exceeded_under_random_faults() {
    let seeds = match std::env::var("TIDEGATE_FLEET_SEED") {
        Ok(seed) => seed.parse().map(|seed: u64| seed..=seed).unwrap(),
        Err(_) => 0..=SEED_COUNT - 1,
    };
    let mut total = FaultSimulationTotals::default();
    for seed in seeds {
        let mut simulation = FaultSimulation::new(seed, false);
        if let Err(violation) = simulation.run() {
            let mut simulation = FaultSimulation::new(seed, true);
            drop(simulation.run());
            panic!(
                "{violation}\n{}\nTIDEGATE_FLEET_SEED={seed} reproduces it",
                simulation.event_log.unwrap_or_default().join("\n")
            );
        }
        total.add(&simulation.totals);
    }
    // Without these events the simulation would have covered too little.
    assert!(
        total.admitted_by_lease > total.admitted_by_store / 3,
        "{total:?}"
    );
    assert!(
        total.crashes > 0 && total.data_losses > 0 && total.rejected > 0 && total.return_calls > 0,
        "{total:?}"
    );
}

#[derive(Debug, Default)]
struct FaultSimulationTotals {
    admitted_by_lease: u64,
    admitted_by_store: u64,
    rejected: u64,
    unanswered: u64,
    return_calls: u64,
    crashes: u64,
    data_losses: u64,
}

impl FaultSimulationTotals {
    fn add(&mut self, other: &Self) {
        self.admitted_by_lease += other.admitted_by_lease;
        self.admitted_by_store += other.admitted_by_store;
        self.rejected += other.rejected;
        self.unanswered += other.unanswered;
        self.return_calls += other.return_calls;
        self.crashes += other.crashes;
        self.data_losses += other.data_losses;
    }
}

struct FaultSimulation {
    random: fastrand::Rng,
    now_us: u64,
    event_queue: BinaryHeap<Reverse<(u64, u64, usize)>>,
    events: Vec<Option<FaultSimulationEvent>>,
    instances: Vec<SimulatedInstance>,
    key: Key,
    limits: Vec<Limit>,
    memory: MemoryStore,
    manual_clock: ManualClock,
    /// Time and units of each admission.
    admitted_units: Vec<(u64, u64)>,
    /// Times at which the store lost its data.
    data_losses_us: Vec<u64>,
    fault_rates: FaultRates,
    totals: FaultSimulationTotals,
    event_log: Option<Vec<String>>,
}

/// Probabilities of the faults of one simulation.
struct FaultRates {
    message_loss_percent: u64,
    has_crashes: bool,
    has_data_loss: bool,
    max_latency_us: u64,
}

struct SimulatedInstance {
    table: LeaseTable,
    lease: Option<LeaseTerms>,
    /// The start of the local clock.
    start: Instant,
    clock_rate_millionths: u64,
    /// Times at which the machine is suspended, ascending. A suspended machine handles no event,
    /// and its `Instant` stops.
    suspensions_us: Vec<Range<u64>>,
    /// Incremented by every crash. Events of an earlier generation are ignored.
    generation: u64,
    cost: u64,
}

#[allow(clippy::large_enum_variant, reason = "few events at a time")]
enum FaultSimulationEvent {
    Request {
        instance: usize,
    },
    StoreReceivesQuery {
        instance: usize,
        generation: u64,
        cost: u64,
        units_to_request: u64,
        sent_at: ClockReading,
        sent_us: u64,
    },
    InstanceReceivesAnswer {
        instance: usize,
        generation: u64,
        cost: u64,
        units_to_request: u64,
        sent_at: ClockReading,
        answer: Option<Decision>,
    },
    PermitIsResolved {
        instance: usize,
        generation: u64,
        permit: LeasePermit,
        admitted: bool,
    },
    InstanceSweepsLeases {
        instance: usize,
        generation: u64,
    },
    StoreReceivesReturns {
        returns: Vec<PendingSettlement>,
    },
    InstanceCrashes {
        instance: usize,
    },
    StoreLosesData,
}

impl FaultSimulation {
    fn new(seed: u64, keeps_log: bool) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let per_us = random.u64(10_000..80_000);
        let requests = random.u64(1..300);
        let mut limits = vec![Limit {
            requests,
            per_us,
            algorithm: draw_algorithm(&mut random, per_us),
        }];
        if random.u8(..3) == 0 {
            let per_us = per_us * random.u64(2..4);
            let requests = requests * random.u64(1..3);
            limits.push(Limit {
                requests,
                per_us,
                algorithm: draw_algorithm(&mut random, per_us),
            });
        }
        let (clock, manual_clock) = Clock::manual(START_US);
        let memory = MemoryStore::new(
            MemorySettings {
                max_keys: 10,
                max_bytes: 1 << 20,
            },
            clock,
        );
        let faults = FaultRates {
            message_loss_percent: [0, 0, 5, 30][random.usize(..4)],
            has_crashes: random.bool(),
            has_data_loss: random.u8(..4) == 0,
            max_latency_us: [200, 2_000, 20_000][random.usize(..3)],
        };
        let instances = (0..random.usize(3..6))
            .map(|_| SimulatedInstance::new(&mut random, per_us))
            .collect();
        let mut simulation = Self {
            random,
            now_us: START_US,
            event_queue: BinaryHeap::new(),
            events: Vec::new(),
            instances,
            key: KeyBuilder::new("p").finish(),
            limits,
            memory,
            manual_clock,
            admitted_units: Vec::new(),
            data_losses_us: Vec::new(),
            fault_rates: faults,
            totals: FaultSimulationTotals::default(),
            event_log: keeps_log.then(Vec::new),
        };
        simulation.schedule_external_events();
        simulation
    }

    /// Schedules the events that come from outside: requests, crashes and data losses.
    fn schedule_external_events(&mut self) {
        // Bursts and pauses, between a third and four times the limit.
        let mean_gap_us =
            self.limits[0].per_us * 3 / self.limits[0].requests / self.random.u64(1..12);
        let mut at_us = START_US;
        while at_us < START_US + DURATION_US {
            at_us += match self.random.u8(..60) {
                0 => self.limits[0].per_us / 2,
                _ => self.random.u64(0..2 * mean_gap_us.max(10)),
            };
            let instance = self.random.usize(..self.instances.len());
            self.schedule(at_us, FaultSimulationEvent::Request { instance });
        }
        for _ in 0..if self.fault_rates.has_crashes {
            self.random.u64(1..8)
        } else {
            0
        } {
            let at_us = START_US + self.random.u64(..DURATION_US);
            let instance = self.random.usize(..self.instances.len());
            self.schedule(at_us, FaultSimulationEvent::InstanceCrashes { instance });
        }
        for _ in 0..if self.fault_rates.has_data_loss {
            self.random.u64(1..3)
        } else {
            0
        } {
            let at_us = START_US + self.random.u64(..DURATION_US);
            self.schedule(at_us, FaultSimulationEvent::StoreLosesData);
        }
    }

    fn schedule(&mut self, at_us: u64, event: FaultSimulationEvent) {
        let event_index = self.events.len();
        // Events at the same time run in random order.
        self.event_queue
            .push(Reverse((at_us, self.random.u64(..), event_index)));
        self.events.push(Some(event));
    }

    /// Arrival time of a message; `None` if it is lost.
    fn draw_arrival_us(&mut self) -> Option<u64> {
        let is_lost = self.random.u64(..100) < self.fault_rates.message_loss_percent;
        let slowest_us = if self.random.u8(..10) == 0 {
            self.fault_rates.max_latency_us
        } else {
            200
        };
        let us = self.random.u64(10..slowest_us);
        (!is_lost).then_some(self.now_us + us)
    }

    fn log_event(&mut self, text: impl FnOnce() -> String) {
        let now_us = self.now_us - START_US;
        if let Some(event_log) = &mut self.event_log {
            event_log.push(format!("{now_us:>8} {}", text()));
        }
    }

    fn run(&mut self) -> Result<(), String> {
        if let Some(limits) = self
            .event_log
            .is_some()
            .then(|| format!("{:?}", self.limits))
        {
            self.log_event(|| limits);
        }
        while let Some(Reverse((at_us, _, nth))) = self.event_queue.pop() {
            self.now_us = at_us;
            let Some(event) = self.events[nth].take() else {
                continue;
            };
            match self.suspended_until(&event) {
                Some(end_us) => self.schedule(end_us, event),
                None => self.handle_event(event),
            }
        }
        self.check_limits()
    }

    /// End of the suspension of the machine that the event is for.
    fn suspended_until(&self, event: &FaultSimulationEvent) -> Option<u64> {
        let (FaultSimulationEvent::Request { instance }
        | FaultSimulationEvent::InstanceReceivesAnswer { instance, .. }
        | FaultSimulationEvent::PermitIsResolved { instance, .. }
        | FaultSimulationEvent::InstanceSweepsLeases { instance, .. }) = event
        else {
            return None;
        };
        let mut suspensions = self.instances[*instance].suspensions_us.iter();
        let suspension = suspensions.find(|suspension| suspension.contains(&self.now_us))?;
        Some(suspension.end)
    }

    #[allow(clippy::too_many_lines, reason = "one arm per event")]
    fn handle_event(&mut self, event: FaultSimulationEvent) {
        match event {
            FaultSimulationEvent::Request { instance } => self.handle_request(instance),
            FaultSimulationEvent::StoreReceivesQuery {
                instance,
                generation,
                cost,
                units_to_request,
                sent_at,
                sent_us,
            } => {
                let decision = self.decide_in_store(instance, cost, units_to_request);
                self.log_event(|| {
                    format!(
                        "store to {instance}, sent {}: {decision:?}",
                        sent_us - START_US
                    )
                });
                let in_time = |at_us: &u64| *at_us <= sent_us + TIMEOUT_US;
                let answer = self.draw_arrival_us().filter(in_time);
                if answer.is_some()
                    && decision.admitted
                    && self.instances[instance].generation == generation
                {
                    self.admitted_units.push((self.now_us, cost));
                    self.totals.admitted_by_store += u64::from(cost > 0);
                }
                self.totals.rejected += u64::from(!decision.admitted);
                let (at_us, answer) = match answer {
                    Some(at_us) => (at_us, Some(decision)),
                    None => (sent_us + TIMEOUT_US, None),
                };
                let at_us = at_us.max(self.now_us);
                self.schedule(
                    at_us,
                    FaultSimulationEvent::InstanceReceivesAnswer {
                        instance,
                        generation,
                        cost,
                        units_to_request,
                        sent_at,
                        answer,
                    },
                );
            }
            FaultSimulationEvent::InstanceReceivesAnswer {
                instance,
                generation,
                cost,
                units_to_request,
                sent_at,
                answer,
            } => {
                self.handle_answer(
                    instance,
                    generation,
                    cost,
                    units_to_request,
                    sent_at,
                    answer,
                );
            }
            FaultSimulationEvent::PermitIsResolved {
                instance,
                generation,
                permit,
                admitted,
            } => {
                let now = self.instances[instance].read_local_clock(self.now_us);
                if self.instances[instance].generation != generation {
                } else if admitted && !now.has_reached(&permit.expires_at) {
                    self.record_lease_use(instance, permit);
                } else {
                    self.instances[instance].table.return_permit(&permit);
                }
            }
            FaultSimulationEvent::InstanceSweepsLeases {
                instance,
                generation,
            } if self.instances[instance].generation == generation => self.sweep_leases(instance),
            FaultSimulationEvent::InstanceSweepsLeases { .. } => {}
            FaultSimulationEvent::StoreReceivesReturns { returns } => {
                self.manual_clock.set_us(self.now_us);
                for settlement in returns.iter().map(Settlement::from_pending) {
                    self.log_event(|| format!("store receives return {:?}", settlement.amendment));
                    self.memory.apply_settlements(&[settlement]);
                }
                self.totals.return_calls += 1;
            }
            FaultSimulationEvent::InstanceCrashes { instance } => {
                self.log_event(|| format!("{instance} crashes"));
                let per_us = self.limits[0].per_us;
                let generation = self.instances[instance].generation + 1;
                self.instances[instance] = SimulatedInstance {
                    generation,
                    ..SimulatedInstance::new(&mut self.random, per_us)
                };
                self.totals.crashes += 1;
            }
            FaultSimulationEvent::StoreLosesData => {
                self.log_event(|| "store loses its data".to_owned());
                let (clock, manual_clock) = Clock::manual(self.now_us);
                self.memory = MemoryStore::new(
                    MemorySettings {
                        max_keys: 10,
                        max_bytes: 1 << 20,
                    },
                    clock,
                );
                self.manual_clock = manual_clock;
                self.data_losses_us.push(self.now_us);
                self.totals.data_losses += 1;
            }
        }
    }

    fn handle_request(&mut self, instance_index: usize) {
        let instance = &self.instances[instance_index];
        let (generation, cost, now) = (
            instance.generation,
            instance.cost,
            instance.read_local_clock(self.now_us),
        );
        let is_breaker_open = self.random.u8(..50) == 0;
        let on_exhausted = if is_breaker_open {
            OnLeaseExhausted::NeverRefill
        } else {
            OnLeaseExhausted::RefillWithoutWaiting
        };
        let action = {
            let charges = charges_for_limits(&self.limits, &self.key, cost, instance.lease, 0);
            instance.table.take_permit(&charges, now, on_exhausted)
        };
        let Ok((permit, units_to_request)) = action else {
            unreachable!("the instance never waits for a renewal")
        };
        if permit.is_some() && units_to_request > 0 {
            self.send_query(instance_index, 0, units_to_request, now);
        }
        match permit {
            Some(permit) if self.random.u8(..4) > 0 => {
                self.record_lease_use(instance_index, permit)
            }
            Some(permit) => {
                // Another policy is decided by the store: that takes time, and it may refuse.
                let deadline = now.instant + Duration::from_micros(TIMEOUT_US);
                if permit.expires_at.instant <= deadline {
                    self.instances[instance_index].table.return_permit(&permit);
                    return self.send_query(instance_index, cost, 0, now);
                }
                let delay_us = self.random.u64(..TIMEOUT_US * 999 / 1_000);
                let admitted = self.random.bool();
                self.schedule(
                    self.now_us + delay_us,
                    FaultSimulationEvent::PermitIsResolved {
                        instance: instance_index,
                        generation,
                        permit,
                        admitted,
                    },
                );
            }
            None if is_breaker_open => self.totals.unanswered += 1,
            None => self.send_query(instance_index, cost, units_to_request, now),
        }
    }

    fn send_query(
        &mut self,
        instance: usize,
        cost: u64,
        units_to_request: u64,
        sent_at: ClockReading,
    ) {
        let (generation, sent_us) = (self.instances[instance].generation, self.now_us);
        match self.draw_arrival_us() {
            Some(at_us) => self.schedule(
                at_us,
                FaultSimulationEvent::StoreReceivesQuery {
                    instance,
                    generation,
                    cost,
                    units_to_request,
                    sent_at,
                    sent_us,
                },
            ),
            None => {
                let timeout_event = FaultSimulationEvent::InstanceReceivesAnswer {
                    instance,
                    generation,
                    cost,
                    units_to_request,
                    sent_at,
                    answer: None,
                };
                self.schedule(sent_us + TIMEOUT_US, timeout_event);
            }
        }
    }

    fn decide_in_store(&mut self, instance: usize, cost: u64, units_to_request: u64) -> Decision {
        self.manual_clock.set_us(self.now_us);
        let charges = charges_for_limits(
            &self.limits,
            &self.key,
            cost,
            self.instances[instance].lease,
            units_to_request,
        );
        self.memory.decide(&[charges])
    }

    fn handle_answer(
        &mut self,
        instance_index: usize,
        generation: u64,
        cost: u64,
        units_to_request: u64,
        sent_at: ClockReading,
        answer: Option<Decision>,
    ) {
        let instance = &self.instances[instance_index];
        if instance.generation != generation {
            return;
        }
        let Some(decision) = answer else {
            self.totals.unanswered += 1;
            if units_to_request > 0 {
                instance.table.finish_refill(self.key.id());
            }
            return;
        };
        if units_to_request == 0 {
            return;
        }
        let received = instance.read_local_clock(self.now_us);
        {
            let charges = charges_for_limits(
                &self.limits,
                &self.key,
                cost,
                instance.lease,
                units_to_request,
            );
            instance
                .table
                .record_lease_answer(&charges, &decision, (sent_at, received.instant));
        }
        instance.table.finish_refill(self.key.id());
        if decision
            .policies
            .iter()
            .any(|outcome| outcome.grant.is_some())
        {
            let at_us = self.now_us + self.random.u64(..1_000);
            self.schedule(
                at_us,
                FaultSimulationEvent::InstanceSweepsLeases {
                    instance: instance_index,
                    generation,
                },
            );
        }
    }

    fn record_lease_use(&mut self, instance: usize, permit: LeasePermit) {
        let units = permit.units;
        self.log_event(|| format!("{instance} manual_clock out {units}"));
        self.admitted_units.push((self.now_us, units));
        self.totals.admitted_by_lease += 1;
    }

    /// Simulates the credit task.
    fn sweep_leases(&mut self, instance_index: usize) {
        let instance = &self.instances[instance_index];
        let (generation, now) = (instance.generation, instance.read_local_clock(self.now_us));
        let (returns, next) = instance.table.take_due_credits(now);
        if !returns.is_empty()
            && let Some(at_us) = self.draw_arrival_us()
        {
            self.schedule(
                at_us,
                FaultSimulationEvent::StoreReceivesReturns { returns },
            );
        }
        if let Some(next) = next {
            let wait =
                u64::try_from(next.saturating_duration_since(now.instant).as_micros()).unwrap();
            let at_us = self.now_us + wait.max(1_000) + self.random.u64(..500);
            self.schedule(
                at_us,
                FaultSimulationEvent::InstanceSweepsLeases {
                    instance: instance_index,
                    generation,
                },
            );
        }
    }

    /// Checks the guarantee of each limit, with one further limit per data loss.
    fn check_limits(&mut self) -> Result<(), String> {
        self.admitted_units.sort_unstable();
        self.data_losses_us.sort_unstable();
        for limit in &self.limits {
            if let Algorithm::TokenBucket { burst, .. } = limit.algorithm {
                self.check_token_bucket(limit, burst)?;
                continue;
            }
            let per_us = limit.per_us;
            let window_start_us = |at_us: u64| match limit.algorithm {
                Algorithm::FixedWindow { offset_us } => at_us - (at_us - offset_us) % per_us,
                _ => at_us - per_us + 1,
            };
            let (mut first, mut sum) = (0, 0);
            for (at_us, units) in &self.admitted_units {
                sum += units;
                while self.admitted_units[first].0 < window_start_us(*at_us) {
                    sum -= self.admitted_units[first].1;
                    first += 1;
                }
                // Lost units may have been charged one period, or one lease, earlier.
                let is_relevant_loss =
                    |lost_us: &&u64| **lost_us <= *at_us && **lost_us + 2 * per_us >= *at_us;
                let losses =
                    u64::try_from(self.data_losses_us.iter().filter(is_relevant_loss).count())
                        .unwrap();
                if sum > limit.requests * (1 + losses) {
                    let at_us = at_us - START_US;
                    return Err(format!(
                        "{sum} units up to {at_us}, after {losses} losses, of {limit:?}"
                    ));
                }
            }
        }
        self.check_returned_units()
    }

    /// Checks that no interval t admits more than burst + rate · t: the debt never exceeds the
    /// burst.
    fn check_token_bucket(&self, limit: &Limit, burst: u64) -> Result<(), String> {
        // Negative while a data loss allows further units. Leases from before it may use them.
        let (mut debt, mut last_us, mut losses) =
            (0_i128, START_US, self.data_losses_us.iter().peekable());
        let capacity = i128::from(burst) * i128::from(limit.per_us);
        for (at_us, units) in &self.admitted_units {
            while losses.next_if(|lost_us| *lost_us <= at_us).is_some() {
                debt -= capacity;
            }
            let paid = i128::from(at_us - last_us) * i128::from(limit.requests);
            debt = (debt - paid).max(debt.min(0)) + i128::from(units * limit.per_us);
            last_us = *at_us;
            if debt > capacity {
                let (debt, at_us) = (debt / i128::from(limit.per_us), at_us - START_US);
                return Err(format!("{debt} units in debt at {at_us} of {limit:?}"));
            }
        }
        Ok(())
    }

    /// Checks that all unused units were returned if no fault occurred.
    fn check_returned_units(&mut self) -> Result<(), String> {
        if self.fault_rates.message_loss_percent > 0
            || self.fault_rates.has_crashes
            || self.fault_rates.has_data_loss
            || self.totals.unanswered > 0
        {
            return Ok(());
        }
        self.manual_clock.set_us(self.now_us);
        let charges = charges_for_limits(&self.limits, &self.key, 0, None, 0);
        let decision = self.memory.decide(&[charges]);
        for (limit, outcome) in self.limits.iter().zip(decision.outcomes()) {
            let status = outcome.status;
            // Units are charged at the lease's end at the latest, and for up to one sub-window
            // longer.
            let longest_us = limit.per_us + self.limits[0].per_us / 2 + limit.sub_window_width_us();
            let recent = self
                .admitted_units
                .iter()
                .filter(|(at_us, _)| at_us + longest_us > self.now_us);
            let recent_units = recent.map(|(_, units)| units).sum::<u64>();
            let used = limit.capacity() - status.unwrap().remaining;
            if used > recent_units {
                return Err(format!(
                    "{used} units in use of {recent_units} admitted lately, of {limit:?}"
                ));
            }
        }
        Ok(())
    }
}

fn draw_algorithm(random: &mut fastrand::Rng, per_us: u64) -> Algorithm {
    match random.u8(..4) {
        0 => Algorithm::SlidingLog,
        1 => Algorithm::SlidingWindow {
            buckets: random.u64(2..20),
        },
        2 => Algorithm::TokenBucket {
            burst: random.u64(1..200),
            warm_up_us: 0,
        },
        _ => Algorithm::FixedWindow {
            offset_us: START_US % per_us,
        },
    }
}

fn charges_for_limits<'c>(
    limits: &'c [Limit],
    key: &'c Key,
    cost: u64,
    lease: Option<LeaseTerms>,
    units_to_request: u64,
) -> PolicyCharges<'c> {
    let limits = limits.iter().map(|limit| LimitCharge::new(limit, cost));
    PolicyCharges {
        lease,
        requested_lease_units: units_to_request,
        ..PolicyCharges::with_limits(Cow::Borrowed(key), limits.collect())
    }
}

impl SimulatedInstance {
    /// Some instances use leases and others do not, as during a roll-out, each with its own TTL.
    fn new(random: &mut fastrand::Rng, per_us: u64) -> Self {
        let ttl_us = random.u64(1_000..=per_us / 2);
        let size = random.bool().then(|| random.u64(1..60));
        Self {
            table: LeaseTable::default(),
            lease: (random.u8(..4) > 0).then_some(LeaseTerms { size, ttl_us }),
            start: Instant::now(),
            clock_rate_millionths: random.u64(996_500..=1_003_500),
            suspensions_us: draw_suspensions(random, per_us),
            generation: 0,
            cost: if random.u8(..4) == 0 {
                random.u64(1..4)
            } else {
                1
            },
        }
    }

    fn read_local_clock(&self, now_us: u64) -> ClockReading {
        let local_time_us = |passed_us: u64| passed_us * self.clock_rate_millionths / 1_000_000;
        let before = self.suspensions_us.iter();
        let suspended_us = before
            .take_while(|suspension| suspension.end <= now_us)
            .map(|suspension| suspension.end - suspension.start)
            .sum::<u64>();
        let boot_us = now_us - START_US;
        let running_us = local_time_us(boot_us - suspended_us);
        ClockReading {
            instant: self.start + Duration::from_micros(running_us),
            boot_us: local_time_us(boot_us),
        }
    }
}

/// Half of the machines are suspended a few times, for up to a period.
fn draw_suspensions(random: &mut fastrand::Rng, per_us: u64) -> Vec<Range<u64>> {
    let count = u64::from(random.bool()) * random.u64(1..6);
    let spacing_us = DURATION_US / 6;
    (0..count)
        .map(|nth| {
            let start_us = START_US + nth * spacing_us + random.u64(..spacing_us / 2);
            start_us..start_us + random.u64(1..=per_us.min(spacing_us / 2))
        })
        .collect()
}
