use super::outage_usage::OutageUsage;
use super::*;
use crate::clock::ManualClock;
use crate::limiter::{Algorithm, ChargeOutcome, KeyBuilder, Limit, LimitStatus};
use std::sync::Barrier;
use std::thread;

const START_US: u64 = 1_700_000_000_000_000;
const PER_US: u64 = 10_000_000;
const LIMIT_UNITS: u64 = 20;

/// A fleet and its Redis, which is a memory store here, all on one clock.
struct SimulatedFleet {
    manual_clock: ManualClock,
    redis: MemoryStore,
    instances: Vec<FallbackStore>,
    limit: Limit,
    key: Key,
    now_us: u64,
    /// Times of all admissions by any instance.
    admitted_at_us: Vec<u64>,
}

impl SimulatedFleet {
    fn new(instances: u32, algorithm: Algorithm) -> Self {
        let (clock, manual_clock) = Clock::manual(START_US);
        let redis = MemoryStore::new(COUNTER_BOUNDS, clock.clone());
        let instances = (0..instances).map(|rank| {
            let fallback = FallbackStore::new(1, clock.clone());
            fallback.set_share(Share::with_rank(instances, rank));
            fallback
        });
        let limit = Limit {
            requests: LIMIT_UNITS,
            per_us: PER_US,
            algorithm,
        };
        let key = KeyBuilder::new("p").finish();
        Self {
            instances: instances.collect(),
            manual_clock,
            redis,
            limit,
            key,
            now_us: START_US,
            admitted_at_us: Vec::new(),
        }
    }

    fn advance_clock_us(&mut self, us: u64) {
        self.now_us += us;
        self.manual_clock.set_us(self.now_us);
    }

    fn one_unit_charge(&self) -> PolicyCharges<'static> {
        let charge = PolicyCharges {
            has_fallback: true,
            ..PolicyCharges::new(&self.limit, &self.key, 1)
        };
        charge.to_owned_charges()
    }

    fn decide_in_redis(&mut self, instance: usize) -> bool {
        let charges = [self.one_unit_charge()];
        let decision = self.redis.decide(&charges);
        self.instances[instance].cache_statuses(&charges, &decision, Instant::now());
        self.record_admission(decision.admitted)
    }

    /// The instance receives the current status.
    fn decide_zero_cost_in_redis(&mut self, instance: usize) {
        let charges = [self.one_unit_charge().with_cost(0)];
        let decision = self.redis.decide(&charges);
        self.instances[instance].cache_statuses(&charges, &decision, Instant::now());
    }

    fn decide_by_share(&mut self, instance: usize) -> bool {
        let decision = self.instances[instance].decide(&[self.one_unit_charge()], Instant::now());
        self.record_admission(decision.admitted)
    }

    fn record_admission(&mut self, admitted: bool) -> bool {
        self.admitted_at_us.extend(admitted.then_some(self.now_us));
        admitted
    }

    /// Sends requests to all instances without Redis until none admits more.
    fn exhaust_shares(&mut self) -> usize {
        (0..self.instances.len())
            .map(|n| (0..100).filter(|_| self.decide_by_share(n)).count())
            .sum()
    }

    fn write_back_and_end_outage(&mut self) {
        for fallback in &self.instances {
            while fallback.has_pending_write_back() {
                let batch = fallback.take_write_back_batch([]).unwrap();
                let settlements: Vec<_> = batch.iter().map(Settlement::from_pending).collect();
                self.redis.apply_settlements(&settlements);
                fallback.confirm_write_back_batch();
            }
            fallback.take_new_failure_flag();
            fallback.end_outage();
            assert!(!fallback.is_in_outage());
        }
    }

    fn begin_outage(&self) {
        for fallback in &self.instances {
            fallback.mark_partitions_unreachable([SINGLE_PARTITION]);
        }
    }

    /// Stops an instance and starts it again, with its exported usage as the only memory.
    fn restart_instance(&mut self, instance: usize, downtime_us: u64) {
        let usage = self.instances[instance].export_usage(self.now_us);
        self.advance_clock_us(downtime_us);
        let fallback = FallbackStore::new(1, self.instances[instance].clock.clone());
        fallback.set_share(Share::with_unknown_rank(9));
        match usage {
            Some(usage) => {
                let usage = OutageUsage::decode(&usage.encode()).unwrap();
                fallback.restore_usage(usage, downtime_us);
            }
            None => fallback.set_share(self.instances[instance].share()),
        }
        self.instances[instance] = fallback;
    }

    /// The largest number of units admitted since `from_us` in any window of the limit's period.
    fn fullest_window_since(&self, from_us: u64) -> usize {
        let within = |start: u64| {
            self.admitted_at_us
                .iter()
                .filter(|at| (start..start + PER_US).contains(*at))
                .count()
        };
        self.admitted_at_us
            .iter()
            .filter(|at| **at >= from_us)
            .map(|at| within(*at))
            .max()
            .unwrap_or(0)
    }
}

#[test]
fn shares_sum_to_the_limit_whatever_it_is() {
    for instances in 1..60_u32 {
        for units in (0..130).chain([crate::limiter::MAX_UNITS]) {
            let shares: Vec<u64> = (0..instances)
                .map(|rank| Share::with_rank(instances, rank).scale_units(units))
                .collect();
            assert_eq!(shares.iter().sum::<u64>(), units, "{instances} of {units}");
            assert!(
                shares.is_sorted_by(|low, high| low >= high),
                "the lowest ranks get the remainder: {shares:?}"
            );
            assert!(shares[0] - shares[shares.len() - 1] <= 1);
            let unranked_total =
                Share::with_unknown_rank(instances).scale_units(units) * u64::from(instances);
            assert!(
                unranked_total <= units,
                "an unknown rank gets no more than any other: {instances} of {units}"
            );
        }
    }
}

#[test]
fn both_amounts_of_a_bucket_are_shared_and_the_counter_stays_the_same() {
    let bucket = Algorithm::TokenBucket {
        burst: 8,
        warm_up_us: 5,
    };
    for algorithm in [
        bucket,
        Algorithm::LeakyBucket {
            max_delay_us: 3 * PER_US,
        },
        Algorithm::SlidingLog,
    ] {
        let limit = Limit {
            requests: 10,
            per_us: PER_US,
            algorithm,
        };
        let shared_limit = Share::with_rank(3, 0).scale_limit(&limit);
        assert_eq!(
            (shared_limit.requests, shared_limit.counter_identity()),
            (4, limit.counter_identity())
        );
    }
    let limit = Limit {
        requests: 10,
        per_us: PER_US,
        algorithm: bucket,
    };
    let bursts = [0, 1, 2].map(|rank| Share::with_rank(3, rank).scale_limit(&limit).capacity());
    assert_eq!(bursts, [3, 3, 2]);
    let block = Limit {
        requests: 1,
        per_us: PER_US,
        algorithm: Algorithm::Block,
    };
    assert_eq!(Share::with_rank(3, 2).scale_limit(&block), block);
}

#[test]
fn a_fleet_admits_the_remaining_units_and_an_exhausted_key_stays_exhausted() {
    for used in 0..=20 {
        let mut fleet = SimulatedFleet::new(3, Algorithm::SlidingLog);
        assert_eq!((0..used).filter(|_| fleet.decide_in_redis(0)).count(), used);
        // All instances have just received the current status.
        (0..3).for_each(|instance| fleet.decide_zero_cost_in_redis(instance));
        fleet.advance_clock_us(1_000_000);
        assert_eq!(fleet.exhaust_shares(), 20 - used, "{used} were used");
        fleet.advance_clock_us(PER_US - 1_000_000);
        assert_eq!(
            fleet.exhaust_shares(),
            used,
            "used units are available again after a period"
        );
    }
}

/// A single lost call is decided by the share of what the last reply left. Redis may have admitted
/// those units to other instances meanwhile.
#[test]
fn a_lost_call_admits_at_most_the_share_of_the_last_known_units() {
    for remaining in 0..=20_usize {
        let mut fleet = SimulatedFleet::new(3, Algorithm::SlidingLog);
        assert!((remaining..20).all(|_| fleet.decide_in_redis(0)));
        while fleet.decide_in_redis(1) {}
        let extra = (0..100).filter(|_| fleet.decide_by_share(0)).count();
        let share = if remaining == 20 {
            7
        } else {
            remaining.div_ceil(3)
        };
        assert_eq!(extra, share, "{remaining} units were left");
        fleet.write_back_and_end_outage();
        assert!(!fleet.decide_in_redis(2));
    }
}

/// All that a restarted instance admits is what it would have admitted without the restart.
#[test]
fn a_restart_in_an_outage_changes_no_remaining_units() {
    let algorithms = [
        Algorithm::SlidingLog,
        Algorithm::SlidingWindow { buckets: 10 },
        Algorithm::FixedWindow { offset_us: 0 },
        Algorithm::TokenBucket {
            burst: 12,
            warm_up_us: 0,
        },
    ];
    for algorithm in algorithms {
        let counts = [0, 1, 3].map(|restarts| {
            let mut fleet = SimulatedFleet::new(3, algorithm);
            (0..4).for_each(|_| assert!(fleet.decide_in_redis(0)));
            fleet.begin_outage();
            (0..2).for_each(|_| assert!(fleet.decide_by_share(0)));
            fleet.advance_clock_us(1_000_000);
            assert!(fleet.decide_by_share(1));
            for _ in 0..restarts {
                (0..3).for_each(|instance| fleet.restart_instance(instance, 0));
            }
            let admitted = fleet.exhaust_shares();
            fleet.write_back_and_end_outage();
            let in_redis = (0..50).filter(|_| fleet.decide_in_redis(1)).count();
            (admitted, in_redis)
        });
        assert!(counts[0].0 > 5, "{algorithm:?}: {counts:?}");
        assert!(
            counts.iter().all(|count| *count == counts[0]),
            "{algorithm:?}: {counts:?}"
        );
    }
}

#[test]
fn a_restart_keeps_blocks_and_exhausted_keys_and_lets_them_end() {
    let (clock, manual_clock) = Clock::manual(START_US);
    let key = KeyBuilder::new("p").finish();
    let [block, limit] = [
        (60_000_000, Algorithm::Block),
        (1_000_000, Algorithm::SlidingLog),
    ]
    .map(|(per_us, algorithm)| Limit {
        requests: 1,
        per_us,
        algorithm,
    });
    let charges = [PolicyCharges {
        has_fallback: true,
        ..PolicyCharges::new(&block, &key, 1).and_limit(&limit, 1)
    }];
    let mut fallback = FallbackStore::new(1, clock.clone());
    fallback.mark_partitions_unreachable([SINGLE_PARTITION]);
    assert!(fallback.decide(&charges, Instant::now()).admitted);
    assert!(!fallback.decide(&charges, Instant::now()).admitted);
    for (at_us, admitted) in [(10_000_000, false), (59_999_999, false), (60_000_000, true)] {
        let usage = fallback.export_usage(0).unwrap();
        let downtime_us = START_US + at_us - clock.now_us();
        manual_clock.set_us(START_US + at_us);
        fallback = FallbackStore::new(1, clock.clone());
        fallback.restore_usage(usage, downtime_us);
        let decision = fallback.decide(&charges, Instant::now());
        assert_eq!(decision.admitted, admitted, "at {at_us}");
    }
}

#[test]
fn usage_is_exported_only_while_redis_may_lack_it() {
    let mut fleet = SimulatedFleet::new(1, Algorithm::SlidingLog);
    assert!(fleet.decide_in_redis(0));
    assert_eq!(fleet.instances[0].export_usage(0), None);
    assert!(fleet.decide_by_share(0));
    assert!(fleet.instances[0].export_usage(0).is_some());
    fleet.write_back_and_end_outage();
    assert_eq!(fleet.instances[0].export_usage(0), None);
    fleet.instances[0].mark_partitions_unreachable([SINGLE_PARTITION]);
    assert!(fleet.instances[0].take_new_failure_flag());
    fleet.instances[0].mark_partitions_unreachable([SINGLE_PARTITION]);
    fleet.instances[0].end_outage();
    assert!(
        fleet.instances[0].is_in_outage(),
        "a failure since the round began keeps the outage"
    );
}

#[test]
fn an_unknown_key_starts_with_the_whole_share_of_its_instance() {
    let mut fleet = SimulatedFleet::new(3, Algorithm::SlidingLog);
    assert_eq!((0..50).filter(|_| fleet.decide_by_share(0)).count(), 7);
    assert_eq!((0..50).filter(|_| fleet.decide_by_share(2)).count(), 6);
}

#[test]
fn a_refusal_above_the_share_is_not_permanent() {
    let fleet = SimulatedFleet::new(30, Algorithm::SlidingLog);
    let refusal = |fallback: &FallbackStore, cost| {
        let charges = [fleet.one_unit_charge().with_cost(cost)];
        fallback
            .decide(&charges, Instant::now())
            .outcomes()
            .next()
            .unwrap()
            .status
            .unwrap()
            .refusal
    };
    assert_eq!(
        refusal(&fleet.instances[19], 1),
        None,
        "the lowest ranks have one unit each"
    );
    assert_eq!(refusal(&fleet.instances[20], 1), Some(Refusal::Unknown));
    assert_eq!(refusal(&fleet.instances[0], 20), Some(Refusal::Unknown));
    assert_eq!(refusal(&fleet.instances[0], 21), Some(Refusal::Never));
}

#[test]
fn charges_are_all_or_nothing_and_only_local_policies_are_decided() {
    let (clock, _) = Clock::manual(START_US);
    let fallback = FallbackStore::new(1, clock);
    let keys = ["a", "b", "c", "d"].map(|name| KeyBuilder::new(name).finish());
    let [wide, narrow] = [9, 2].map(|requests| Limit {
        requests,
        per_us: PER_US,
        algorithm: Algorithm::SlidingLog,
    });
    let charges = [
        PolicyCharges {
            has_fallback: true,
            ..PolicyCharges::new(&wide, &keys[0], 1)
        },
        PolicyCharges {
            ..PolicyCharges::new(&narrow, &keys[1], 5)
        },
        PolicyCharges {
            has_fallback: true,
            shadow: true,
            ..PolicyCharges::new(&narrow, &keys[2], 5)
        },
        PolicyCharges {
            has_fallback: true,
            ..PolicyCharges::new(&narrow, &keys[3], 1)
        },
    ];
    let admitted = (0..5)
        .filter(|_| fallback.decide(&charges, Instant::now()).admitted)
        .count();
    assert_eq!(admitted, 2);
    let last = fallback.decide(&charges, Instant::now());
    assert_eq!(
        last.outcomes().next().unwrap().status.unwrap().remaining,
        7,
        "refused requests are not charged"
    );
    assert_eq!(
        (
            last.outcomes().nth(1).unwrap().status,
            last.outcomes().nth(2).unwrap().status
        ),
        (None, None)
    );
    assert!(
        last.outcomes()
            .nth(3)
            .unwrap()
            .status
            .unwrap()
            .refusal
            .is_some()
    );
}

#[test]
fn a_block_known_from_redis_continues_and_a_new_block_begins() {
    let (clock, manual_clock) = Clock::manual(START_US);
    let (redis, fallback) = (
        MemoryStore::new(COUNTER_BOUNDS, clock.clone()),
        FallbackStore::new(1, clock),
    );
    let key = KeyBuilder::new("p").finish();
    let block = Limit {
        requests: 1,
        per_us: 60_000_000,
        algorithm: Algorithm::Block,
    };
    let limit = Limit {
        requests: 1,
        per_us: 1_000_000,
        algorithm: Algorithm::SlidingLog,
    };
    let charges = [PolicyCharges {
        has_fallback: true,
        ..PolicyCharges::new(&block, &key, 1).and_limit(&limit, 1)
    }];
    for at_us in [0, 1, 20_000_000] {
        manual_clock.set_us(START_US + at_us);
        fallback.cache_statuses(&charges, &redis.decide(&charges), Instant::now());
    }
    let ends_us = START_US + 60_000_001;
    for (at_us, admitted) in [
        (ends_us - 1, false),
        (ends_us, true),
        (ends_us + 1, false),
        (ends_us + 2_000_000, false),
    ] {
        manual_clock.set_us(at_us);
        assert_eq!(
            fallback.decide(&charges, Instant::now()).admitted,
            admitted,
            "at {}",
            at_us - START_US
        );
    }
    manual_clock.set_us(ends_us + 1 + 60_000_000);
    assert!(fallback.decide(&charges, Instant::now()).admitted);
}

#[test]
fn slots_in_flight_are_counted_and_written_back_only_while_held() {
    let (clock, _) = Clock::manual(START_US);
    let fallback = FallbackStore::new(1, clock);
    let key = KeyBuilder::new("p").finish();
    let limit = Limit {
        requests: 3,
        per_us: PER_US,
        algorithm: Algorithm::Concurrency { max_duration_us: 0 },
    };
    let charge = |slot| {
        [PolicyCharges {
            has_fallback: true,
            slot_id: slot,
            ..PolicyCharges::new(&limit, &key, 1)
        }]
    };
    let status = LimitStatus {
        remaining: 2,
        next_growth_us: None,
        refusal: None,
        in_effect: None,
    };
    let admitted = Decision {
        now_us: START_US,
        admitted: true,
        ..Decision::default()
    }
    .with_outcomes([ChargeOutcome {
        status: Some(status),
        ..ChargeOutcome::default()
    }]);
    fallback.cache_statuses(&charge(1), &admitted, Instant::now());
    // A client that reads its own limits takes no slot.
    let reading = charge(0).map(|charge| charge.with_cost(0));
    fallback.cache_statuses(&reading, &admitted, Instant::now());
    let decide_slot = |slot| fallback.decide(&charge(slot), Instant::now()).admitted;
    assert_eq!(
        [decide_slot(2), decide_slot(3), decide_slot(4)],
        [true, true, false],
        "one slot was in use before"
    );
    let release = |slot| {
        fallback.apply_settlements(&[Settlement {
            limit: &limit,
            key: &key,
            amendment: Amendment::Release { slot },
        }]);
    };
    release(1);
    assert!(decide_slot(5));
    release(2);
    let take_batch = || {
        let batch = fallback.take_write_back_batch([]).unwrap_or_default();
        let amendments = batch.into_iter().map(|(_, amendment)| amendment);
        amendments.collect::<Vec<_>>()
    };
    let [renewal_of_3, renewal_of_5] = [3, 5].map(|slot| Amendment::Renew { slot });
    assert_eq!(take_batch(), [renewal_of_3, renewal_of_5]);
    // Redis may handle the batch after this release, which takes the slot again.
    release(3);
    let unsent = Settlement {
        limit: &limit,
        key: &key,
        amendment: renewal_of_5,
    };
    fallback.requeue_unconfirmed(&[unsent]);
    let release_of_3 = Amendment::Release { slot: 3 };
    assert_eq!(take_batch(), [renewal_of_5, release_of_3]);
    release(5);
    fallback.confirm_write_back_batch();
    assert_eq!(take_batch(), [Amendment::Release { slot: 5 }]);
    fallback.confirm_write_back_batch();
    assert!(!fallback.has_pending_write_back());
}

/// Simulates normal operation, an outage, and normal operation again, with requests at random times
/// and instances.
fn simulate_outage(algorithm: Algorithm, seed: u64) -> (SimulatedFleet, u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut fleet = SimulatedFleet::new(random.u32(1..6), algorithm);
    let count = fleet.instances.len();
    let pause_us = random.u64(1..PER_US / 4);
    for _ in 0..60 {
        fleet.advance_clock_us(random.u64(0..pause_us));
        fleet.decide_in_redis(random.usize(0..count));
    }
    let outage_start_us = fleet.now_us;
    fleet.begin_outage();
    let restart_chance = [0.0, 0.02, 0.2][random.usize(0..3)];
    for _ in 0..random.usize(1..200) {
        fleet.advance_clock_us(random.u64(0..pause_us));
        if random.f64() < restart_chance {
            fleet.restart_instance(random.usize(0..count), random.u64(0..pause_us));
        }
        fleet.decide_by_share(random.usize(0..count));
    }
    fleet.write_back_and_end_outage();
    for _ in 0..100 {
        fleet.advance_clock_us(random.u64(0..pause_us));
        fleet.decide_in_redis(random.usize(0..count));
    }
    (fleet, outage_start_us)
}

#[test]
fn no_window_after_the_outage_begins_exceeds_the_limit() {
    let sliding = [
        Algorithm::SlidingLog,
        Algorithm::SlidingWindow { buckets: 10 },
    ];
    for (seed, algorithm) in (0..400).flat_map(|seed| sliding.map(|algorithm| (seed, algorithm))) {
        let (fleet, outage_start_us) = simulate_outage(algorithm, seed);
        let limit = usize::try_from(LIMIT_UNITS).unwrap();
        let fullest = fleet.fullest_window_since(outage_start_us);
        assert!(
            fullest <= limit,
            "{fullest} in a window: seed {seed}, {algorithm:?}"
        );
        assert!(
            fleet.fullest_window_since(0) <= 2 * limit,
            "across the start of the outage: seed {seed}, {algorithm:?}"
        );
    }
}

#[test]
fn no_fixed_window_after_the_outage_begins_exceeds_the_limit() {
    for seed in 0..400 {
        let (fleet, outage_start_us) =
            simulate_outage(Algorithm::FixedWindow { offset_us: 0 }, seed);
        let first = outage_start_us.div_ceil(PER_US);
        for window in first..=fleet.now_us / PER_US {
            let count = fleet
                .admitted_at_us
                .iter()
                .filter(|at| **at / PER_US == window)
                .count();
            assert!(
                count <= usize::try_from(LIMIT_UNITS).unwrap(),
                "{count}: seed {seed}"
            );
        }
    }
}

#[test]
fn a_token_bucket_stays_within_burst_and_rate_after_the_outage_begins() {
    for seed in 0..400 {
        let algorithm = Algorithm::TokenBucket {
            burst: 12,
            warm_up_us: 0,
        };
        let (fleet, outage_start_us) = simulate_outage(algorithm, seed);
        let times: Vec<u64> = fleet
            .admitted_at_us
            .iter()
            .copied()
            .filter(|at| *at >= outage_start_us)
            .collect();
        for (nth, from_us) in times.iter().enumerate() {
            for (count, to_us) in (1..).zip(&times[nth..]) {
                let max_units = 12 * PER_US + LIMIT_UNITS * (to_us - from_us);
                assert!(
                    count * PER_US <= max_units,
                    "{count} in {} µs: seed {seed}",
                    to_us - from_us
                );
            }
        }
    }
}

#[test]
fn usage_written_back_after_a_long_outage_expires_within_a_period() {
    for algorithm in [
        Algorithm::TokenBucket {
            burst: 12,
            warm_up_us: 0,
        },
        Algorithm::SlidingLog,
    ] {
        let mut fleet = SimulatedFleet::new(3, algorithm);
        for _ in 0..4_000 {
            fleet.advance_clock_us(PER_US / 20);
            for instance in 0..3 {
                fleet.decide_by_share(instance);
            }
        }
        fleet.write_back_and_end_outage();
        fleet.advance_clock_us(PER_US);
        let after = (0..100).filter(|_| fleet.decide_in_redis(0)).count();
        assert!(after >= 12, "{after} after a period: {algorithm:?}");
    }
}

#[test]
fn write_back_entries_are_bounded_and_lose_no_units_of_known_keys() {
    let (clock, manual_clock) = Clock::manual(START_US);
    let fallback = FallbackStore::new(1, clock);
    let limit = Limit {
        requests: 1_000_000,
        per_us: PER_US,
        algorithm: Algorithm::SlidingLog,
    };
    let key = KeyBuilder::new("p").finish();
    let charges = [PolicyCharges {
        has_fallback: true,
        ..PolicyCharges::new(&limit, &key, 1)
    }];
    for n in 0..20_000 {
        manual_clock.set_us(START_US + n * 499);
        assert!(fallback.decide(&charges, Instant::now()).admitted);
    }
    let batch = fallback.take_write_back_batch([]).unwrap();
    let units: u64 = batch
        .iter()
        .map(|(_, amendment)| match amendment {
            Amendment::BackdatedCharge { units, .. } => *units,
            other => panic!("{other:?}"),
        })
        .sum();
    assert_eq!(units, 20_000);
    assert!(batch.len() <= 66, "{} entries for one period", batch.len());
    assert!(
        fallback.has_pending_write_back(),
        "until the batch is finished"
    );
    let settlements: Vec<_> = batch.iter().map(Settlement::from_pending).collect();
    fallback.requeue_unconfirmed(&settlements);
    for reason in ["unconfirmed charges", "charges of an aborted write-back"] {
        assert_eq!(
            fallback.take_write_back_batch([]).as_ref(),
            Some(&batch),
            "{reason} are pending again"
        );
    }
    fallback.confirm_write_back_batch();
    assert_eq!(fallback.take_write_back_batch([]), None);
    assert!(!fallback.has_pending_write_back());
}

#[test]
fn redis_answers_without_pending_write_back_are_not_cached() {
    let mut fleet = SimulatedFleet::new(1, Algorithm::SlidingLog);
    assert!(fleet.decide_by_share(0) && fleet.decide_by_share(0) && fleet.decide_in_redis(0));
    assert_eq!(
        fleet.exhaust_shares(),
        18,
        "the answer of Redis lacks two charges and is not cached"
    );
    fleet.write_back_and_end_outage();
    assert!(!fleet.decide_in_redis(0));
    fleet.advance_clock_us(PER_US);
    assert!(fleet.decide_in_redis(0));
    assert_eq!(
        fleet.exhaust_shares(),
        19,
        "now the answer of Redis is cached"
    );
}

/// Redis is available for a short time between two outages. Only one instance receives a status of
/// the key in it.
#[test]
fn a_status_after_an_outage_gives_no_units_that_other_shares_still_have() {
    for is_restarted in [false, true] {
        let mut fleet = SimulatedFleet::new(3, Algorithm::SlidingLog);
        fleet.begin_outage();
        for (instance, units) in [(0, 7), (1, 6), (2, 6)] {
            assert!((0..units).all(|_| fleet.decide_by_share(instance)));
        }
        fleet.write_back_and_end_outage();
        fleet.advance_clock_us(500_000);
        let charges = [fleet.one_unit_charge().with_cost(3)];
        let refused = fleet.redis.decide(&charges);
        assert!(!refused.admitted);
        fleet.instances[0].cache_statuses(&charges, &refused, Instant::now());
        fleet.begin_outage();
        if is_restarted {
            (0..3).for_each(|instance| fleet.restart_instance(instance, 500_000));
        }
        assert_eq!(fleet.exhaust_shares(), 1, "19 of 20 units were used");
    }
}

/// In the second outage, the key has no request that is admitted before the restart.
#[test]
fn a_restart_in_a_second_outage_keeps_the_usage_from_before() {
    for (used_in_redis, is_refused) in [(0, false), (0, true), (20, false), (20, true)] {
        let mut fleet = SimulatedFleet::new(3, Algorithm::SlidingLog);
        (0..used_in_redis).for_each(|_| assert!(fleet.decide_in_redis(0)));
        (0..3).for_each(|instance| fleet.decide_zero_cost_in_redis(instance));
        fleet.begin_outage();
        assert_eq!(fleet.exhaust_shares(), 20 - used_in_redis);
        for _ in 0..2 {
            fleet.write_back_and_end_outage();
            fleet.advance_clock_us(1_000_000);
            fleet.begin_outage();
        }
        if is_refused {
            assert_eq!(fleet.exhaust_shares(), 0);
        }
        (0..3).for_each(|instance| fleet.restart_instance(instance, 1_000_000));
        assert_eq!(
            fleet.exhaust_shares(),
            0,
            "{used_in_redis} used in Redis, refused: {is_refused}"
        );
        fleet.advance_clock_us(PER_US);
        assert_eq!(fleet.exhaust_shares(), 20);
    }
}

/// Counters of earlier outages are kept only as long as their units are in use.
#[test]
fn usage_that_has_expired_is_not_exported_in_a_later_outage() {
    let mut fleet = SimulatedFleet::new(1, Algorithm::SlidingLog);
    for (wait_us, counters) in [(0, 1), (PER_US, 0)] {
        assert_eq!(fleet.exhaust_shares(), 20);
        fleet.write_back_and_end_outage();
        fleet.advance_clock_us(wait_us);
        fleet.begin_outage();
        let usage = fleet.instances[0].export_usage(0).unwrap();
        assert_eq!(usage.counter_count(), counters, "after {wait_us}");
        fleet.write_back_and_end_outage();
        fleet.advance_clock_us(PER_US);
    }
}

/// Other instances have received statuses too, so an uneven use of the first outage no longer
/// counts.
#[test]
fn a_status_long_after_an_outage_replaces_the_usage_of_the_share() {
    let mut fleet = SimulatedFleet::new(3, Algorithm::SlidingLog);
    fleet.begin_outage();
    assert_eq!((0..20).filter(|_| fleet.decide_by_share(0)).count(), 7);
    fleet.write_back_and_end_outage();
    fleet.advance_clock_us(5_000_000);
    assert!(fleet.decide_in_redis(0));
    fleet.begin_outage();
    let admitted = (0..20).filter(|_| fleet.decide_by_share(0)).count();
    assert_eq!(admitted, 4, "the share of 12 units");
}

#[test]
fn workers_that_enter_an_outage_at_once_never_exceed_the_share() {
    let algorithm = Algorithm::FixedWindow { offset_us: 0 };
    let limit = Limit {
        requests: LIMIT_UNITS,
        per_us: PER_US,
        algorithm,
    };
    let key = KeyBuilder::new("p").finish();
    let charge = [PolicyCharges {
        has_fallback: true,
        ..PolicyCharges::new(&limit, &key, 1)
    }];
    let status = LimitStatus {
        remaining: 2,
        next_growth_us: Some(START_US + PER_US),
        refusal: None,
        in_effect: None,
    };
    let answer = Decision {
        now_us: START_US,
        admitted: true,
        ..Decision::default()
    }
    .with_outcomes([ChargeOutcome {
        status: Some(status),
        ..ChargeOutcome::default()
    }]);
    for round in 0..10_000 {
        let fallback = FallbackStore::new(1, Clock::manual(START_US).0);
        fallback.cache_statuses(&charge, &answer, Instant::now());
        let barrier = Barrier::new(2);
        let count_admitted = || {
            barrier.wait();
            (0..4)
                .filter(|_| fallback.decide(&charge, Instant::now()).admitted)
                .count()
        };
        let admitted = thread::scope(|scope| {
            let other = scope.spawn(count_admitted);
            count_admitted() + other.join().unwrap()
        });
        assert_eq!(admitted, 2, "in round {round}");
    }
}
