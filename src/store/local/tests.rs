use super::*;
use crate::clock::Hands;
use crate::limiter::KeyBuilder;
use std::collections::BTreeSet;
use std::sync::Barrier;
use std::thread;

const T0: u64 = 1_700_000_000_000_000;
const PER_US: u64 = 10_000_000;
const LIMIT: u64 = 20;

/// A fleet before a Redis that is a memory store here, all by one clock.
struct Fleet {
    hands: Hands,
    redis: Memory,
    instances: Vec<Local>,
    limit: Limit,
    key: Key,
    now_us: u64,
    /// When units were admitted, by whomever.
    admitted: Vec<u64>,
}

impl Fleet {
    fn new(instances: u32, algorithm: Algorithm) -> Self {
        let (clock, hands) = Clock::manual(T0);
        let redis = Memory::new(COUNTERS, clock.clone());
        let instances = (0..instances).map(|place| {
            let local = Local::new(1, clock.clone());
            local.set_share(Share::seen(instances, place));
            local
        });
        let limit = Limit {
            requests: LIMIT,
            per_us: PER_US,
            algorithm,
        };
        let key = KeyBuilder::new("p").finish();
        Self {
            instances: instances.collect(),
            hands,
            redis,
            limit,
            key,
            now_us: T0,
            admitted: Vec::new(),
        }
    }

    fn pass(&mut self, us: u64) {
        self.now_us += us;
        self.hands.set_us(self.now_us);
    }

    fn charge(&self) -> Charge<'_> {
        Charge {
            local: true,
            ..Charge::new(&self.limit, &self.key, 1)
        }
    }

    fn ask_redis(&mut self, instance: usize) -> bool {
        let charges = [self.charge()];
        let decision = self.redis.decide(&charges);
        self.instances[instance].remember(&charges, &decision, Instant::now());
        self.count(decision.admitted)
    }

    fn ask_alone(&mut self, instance: usize) -> bool {
        let decision = self.instances[instance].decide(&[self.charge()], Instant::now());
        self.count(decision.admitted)
    }

    fn count(&mut self, admitted: bool) -> bool {
        self.admitted.extend(admitted.then_some(self.now_us));
        admitted
    }

    /// Asks all alone until nobody admits any more.
    fn exhaust_alone(&mut self) -> usize {
        (0..self.instances.len())
            .map(|n| (0..100).filter(|_| self.ask_alone(n)).count())
            .sum()
    }

    fn write_back(&mut self) {
        for local in &self.instances {
            while local.owes() {
                let owed = local.owed([]);
                for (limit, key, amendment) in &local.amendments(&owed) {
                    self.redis.amend(&[Late {
                        limit,
                        key,
                        amendment: *amendment,
                    }]);
                }
                local.paid();
            }
            local.end();
        }
    }

    /// The most that was admitted from a time on in any window of the limit's period.
    fn fullest_since(&self, from_us: u64) -> usize {
        let within = |start: u64| {
            self.admitted
                .iter()
                .filter(|at| (start..start + PER_US).contains(*at))
                .count()
        };
        self.admitted
            .iter()
            .filter(|at| **at >= from_us)
            .map(|at| within(*at))
            .max()
            .unwrap_or(0)
    }
}

#[test]
fn shares_sum_to_the_limit_whatever_it_is() {
    for live in 1..60_u32 {
        for units in (0..130).chain([crate::limiter::MAX_UNITS]) {
            let parts: Vec<u64> = (0..live)
                .map(|place| Share::seen(live, place).of(units))
                .collect();
            assert_eq!(parts.iter().sum::<u64>(), units, "{live} of {units}");
            assert!(
                parts.is_sorted_by(|low, high| low >= high),
                "the lowest have the remainder: {parts:?}"
            );
            assert!(parts[0] - parts[parts.len() - 1] <= 1);
            let strangers = Share::assumed(live).of(units) * u64::from(live);
            assert!(
                strangers <= units,
                "who doesn't know his place takes no more than any: {live} of {units}"
            );
        }
        for share in [Share::seen(live, live - 1), Share::assumed(live)] {
            assert_eq!(Share::unpacked(share.packed()), share);
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
        let part = Share::seen(3, 0).limit(&limit);
        assert_eq!((part.requests, part.identity()), (4, limit.identity()));
    }
    let limit = Limit {
        requests: 10,
        per_us: PER_US,
        algorithm: bucket,
    };
    let bursts = [0, 1, 2].map(|place| Share::seen(3, place).limit(&limit).capacity());
    assert_eq!(bursts, [3, 3, 2]);
    let block = Limit {
        requests: 1,
        per_us: PER_US,
        algorithm: Algorithm::Block,
    };
    assert_eq!(Share::seen(3, 2).limit(&block), block);
}

#[test]
fn a_fleet_admits_what_remained_and_an_exhausted_key_stays_exhausted() {
    for used in 0..=20 {
        let mut fleet = Fleet::new(3, Algorithm::SlidingLog);
        assert_eq!((0..used).filter(|_| fleet.ask_redis(0)).count(), used);
        // All have just heard how it stands.
        for local in &fleet.instances {
            let look = [Charge {
                cost: 0,
                ..fleet.charge()
            }];
            local.remember(&look, &fleet.redis.decide(&look), Instant::now());
        }
        fleet.pass(1_000_000);
        assert_eq!(fleet.exhaust_alone(), 20 - used, "{used} were used");
        fleet.pass(PER_US - 1_000_000);
        assert_eq!(
            fleet.exhaust_alone(),
            used,
            "what was used before comes back after a period"
        );
    }
}

#[test]
fn a_key_that_nobody_knows_starts_empty_with_its_share() {
    let mut fleet = Fleet::new(3, Algorithm::SlidingLog);
    assert_eq!((0..50).filter(|_| fleet.ask_alone(0)).count(), 7);
    assert_eq!((0..50).filter(|_| fleet.ask_alone(2)).count(), 6);
}

#[test]
fn a_refusal_above_the_share_is_not_for_ever() {
    let fleet = Fleet::new(30, Algorithm::SlidingLog);
    let refusal = |local: &Local, cost| {
        let charges = [Charge {
            cost,
            ..fleet.charge()
        }];
        local.decide(&charges, Instant::now()).standings[0]
            .unwrap()
            .refusal
    };
    assert_eq!(
        refusal(&fleet.instances[19], 1),
        None,
        "the lowest have one each"
    );
    assert_eq!(refusal(&fleet.instances[20], 1), Some(Refusal::Unknown));
    assert_eq!(refusal(&fleet.instances[0], 20), Some(Refusal::Unknown));
    assert_eq!(refusal(&fleet.instances[0], 21), Some(Refusal::Never));
}

#[test]
fn all_or_nothing_and_only_what_is_local() {
    let (clock, _) = Clock::manual(T0);
    let local = Local::new(1, clock);
    let keys = ["a", "b", "c", "d"].map(|name| KeyBuilder::new(name).finish());
    let [wide, narrow] = [9, 2].map(|requests| Limit {
        requests,
        per_us: PER_US,
        algorithm: Algorithm::SlidingLog,
    });
    let charges = [
        Charge {
            local: true,
            ..Charge::new(&wide, &keys[0], 1)
        },
        Charge {
            group: 1,
            ..Charge::new(&narrow, &keys[1], 5)
        },
        Charge {
            group: 2,
            local: true,
            shadow: true,
            ..Charge::new(&narrow, &keys[2], 5)
        },
        Charge {
            group: 3,
            local: true,
            ..Charge::new(&narrow, &keys[3], 1)
        },
    ];
    let admitted = (0..5)
        .filter(|_| local.decide(&charges, Instant::now()).admitted)
        .count();
    assert_eq!(admitted, 2);
    let last = local.decide(&charges, Instant::now());
    assert_eq!(
        last.standings[0].unwrap().remaining,
        7,
        "the refused were not charged"
    );
    assert_eq!((last.standings[1], last.standings[2]), (None, None));
    assert!(last.standings[3].unwrap().refusal.is_some());
}

#[test]
fn a_block_that_redis_knew_of_goes_on_and_another_begins() {
    let (clock, hands) = Clock::manual(T0);
    let (redis, local) = (Memory::new(COUNTERS, clock.clone()), Local::new(1, clock));
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
    let charges = [&block, &limit].map(|limit| Charge {
        local: true,
        ..Charge::new(limit, &key, 1)
    });
    for at_us in [0, 1, 20_000_000] {
        hands.set_us(T0 + at_us);
        local.remember(&charges, &redis.decide(&charges), Instant::now());
    }
    let ends_us = T0 + 60_000_001;
    for (at_us, admitted) in [
        (ends_us - 1, false),
        (ends_us, true),
        (ends_us + 1, false),
        (ends_us + 2_000_000, false),
    ] {
        hands.set_us(at_us);
        assert_eq!(
            local.decide(&charges, Instant::now()).admitted,
            admitted,
            "at {}",
            at_us - T0
        );
    }
    hands.set_us(ends_us + 1 + 60_000_000);
    assert!(local.decide(&charges, Instant::now()).admitted);
}

#[test]
fn slots_in_flight_count_and_are_told_only_while_they_are_held() {
    let (clock, _) = Clock::manual(T0);
    let local = Local::new(1, clock);
    let key = KeyBuilder::new("p").finish();
    let limit = Limit {
        requests: 3,
        per_us: PER_US,
        algorithm: Algorithm::Concurrency { max_duration_us: 0 },
    };
    let charge = |slot| {
        [Charge {
            local: true,
            slot,
            ..Charge::new(&limit, &key, 1)
        }]
    };
    let standing = Standing {
        remaining: 2,
        grows_at_us: None,
        refusal: None,
    };
    let admitted = Decision {
        now_us: T0,
        admitted: true,
        standings: [Some(standing)].into_iter().collect(),
        delay_us: 0,
        grants: SmallVec::new(),
        stands_us: SmallVec::new(),
    };
    local.remember(&charge(1), &admitted, Instant::now());
    let ask = |slot| local.decide(&charge(slot), Instant::now()).admitted;
    assert_eq!(
        [ask(2), ask(3), ask(4)],
        [true, true, false],
        "one was in flight before"
    );
    let release = |slot| {
        local.amend(&[Late {
            limit: &limit,
            key: &key,
            amendment: Amendment::Release { slot },
        }]);
    };
    release(1);
    assert!(ask(5));
    release(2);
    let told: BTreeSet<_> = local
        .amendments(&local.owed([]))
        .into_iter()
        .map(|(.., amendment)| match amendment {
            Amendment::Renew { slot } => slot,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(told, BTreeSet::from([3, 5]));
}

/// Calm, an outage, and calm again, with asks of everybody at random times.
fn a_day_with_an_outage(algorithm: Algorithm, seed: u64) -> (Fleet, u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut fleet = Fleet::new(random.u32(1..6), algorithm);
    let count = fleet.instances.len();
    let pause_us = random.u64(1..PER_US / 4);
    for _ in 0..60 {
        fleet.pass(random.u64(0..pause_us));
        fleet.ask_redis(random.usize(0..count));
    }
    let fault_us = fleet.now_us;
    for _ in 0..random.usize(1..200) {
        fleet.pass(random.u64(0..pause_us));
        fleet.ask_alone(random.usize(0..count));
    }
    fleet.write_back();
    for _ in 0..100 {
        fleet.pass(random.u64(0..pause_us));
        fleet.ask_redis(random.usize(0..count));
    }
    (fleet, fault_us)
}

#[test]
fn no_window_from_the_fault_on_holds_more_than_the_limit() {
    let sliding = [
        Algorithm::SlidingLog,
        Algorithm::SlidingWindow { buckets: 10 },
    ];
    for (seed, algorithm) in (0..400).flat_map(|seed| sliding.map(|algorithm| (seed, algorithm))) {
        let (fleet, fault_us) = a_day_with_an_outage(algorithm, seed);
        let limit = usize::try_from(LIMIT).unwrap();
        let fullest = fleet.fullest_since(fault_us);
        assert!(
            fullest <= limit,
            "{fullest} in a window: seed {seed}, {algorithm:?}"
        );
        assert!(
            fleet.fullest_since(0) <= 2 * limit,
            "across the fault: seed {seed}, {algorithm:?}"
        );
    }
}

#[test]
fn no_aligned_window_from_the_fault_on_holds_more_than_the_limit() {
    for seed in 0..400 {
        let (fleet, fault_us) = a_day_with_an_outage(Algorithm::FixedWindow { offset_us: 0 }, seed);
        let first = fault_us.div_ceil(PER_US);
        for window in first..=fleet.now_us / PER_US {
            let count = fleet
                .admitted
                .iter()
                .filter(|at| **at / PER_US == window)
                .count();
            assert!(
                count <= usize::try_from(LIMIT).unwrap(),
                "{count}: seed {seed}"
            );
        }
    }
}

#[test]
fn a_bucket_gives_no_more_than_burst_and_rate_from_the_fault_on() {
    for seed in 0..400 {
        let algorithm = Algorithm::TokenBucket {
            burst: 12,
            warm_up_us: 0,
        };
        let (fleet, fault_us) = a_day_with_an_outage(algorithm, seed);
        let times: Vec<u64> = fleet
            .admitted
            .iter()
            .copied()
            .filter(|at| *at >= fault_us)
            .collect();
        for (nth, from_us) in times.iter().enumerate() {
            for (count, to_us) in (1..).zip(&times[nth..]) {
                let most = 12 * PER_US + LIMIT * (to_us - from_us);
                assert!(
                    count * PER_US <= most,
                    "{count} in {} µs: seed {seed}",
                    to_us - from_us
                );
            }
        }
    }
}

#[test]
fn a_long_outage_leaves_no_debt_for_longer_than_the_limit_lasts() {
    for algorithm in [
        Algorithm::TokenBucket {
            burst: 12,
            warm_up_us: 0,
        },
        Algorithm::SlidingLog,
    ] {
        let mut fleet = Fleet::new(3, algorithm);
        for _ in 0..4_000 {
            fleet.pass(PER_US / 20);
            for instance in 0..3 {
                fleet.ask_alone(instance);
            }
        }
        fleet.write_back();
        fleet.pass(PER_US);
        let after = (0..100).filter(|_| fleet.ask_redis(0)).count();
        assert!(after >= 12, "{after} after a period: {algorithm:?}");
    }
}

#[test]
fn what_is_noted_is_bounded_and_nothing_of_known_keys_is_lost() {
    let (clock, hands) = Clock::manual(T0);
    let local = Local::new(1, clock);
    let limit = Limit {
        requests: 1_000_000,
        per_us: PER_US,
        algorithm: Algorithm::SlidingLog,
    };
    let key = KeyBuilder::new("p").finish();
    let charges = [Charge {
        local: true,
        ..Charge::new(&limit, &key, 1)
    }];
    for n in 0..20_000 {
        hands.set_us(T0 + n * 499);
        assert!(local.decide(&charges, Instant::now()).admitted);
    }
    let owed = local.owed([]);
    let told = local.amendments(&owed);
    let units: u64 = told
        .iter()
        .map(|(.., amendment)| match amendment {
            Amendment::Back { units, .. } => *units,
            other => panic!("{other:?}"),
        })
        .sum();
    assert_eq!(units, 20_000);
    assert!(told.len() <= 66, "{} entries for one period", told.len());
    assert!(local.owes(), "until it is paid");
    let lates: Vec<_> = told
        .iter()
        .map(|(limit, key, amendment)| Late {
            limit,
            key,
            amendment: *amendment,
        })
        .collect();
    local.unpaid(owed, lates.iter());
    assert_eq!(
        local.amendments(&local.owed([])),
        told,
        "what was not paid is owed again"
    );
    local.paid();
    assert!(!local.owes());
}

#[test]
fn answers_that_may_lack_a_debt_are_not_believed() {
    let mut fleet = Fleet::new(1, Algorithm::SlidingLog);
    assert!(fleet.ask_alone(0) && fleet.ask_alone(0) && fleet.ask_redis(0));
    assert_eq!(
        fleet.exhaust_alone(),
        18,
        "Redis' answer lacks two: it is not where it starts"
    );
    fleet.write_back();
    assert!(!fleet.ask_redis(0));
    fleet.pass(PER_US);
    assert!(fleet.ask_redis(0));
    assert_eq!(fleet.exhaust_alone(), 19, "and now it is");
}

#[test]
fn workers_that_begin_an_outage_at_the_same_time_pass_no_share() {
    let algorithm = Algorithm::FixedWindow { offset_us: 0 };
    let limit = Limit {
        requests: LIMIT,
        per_us: PER_US,
        algorithm,
    };
    let key = KeyBuilder::new("p").finish();
    let charge = Charge {
        local: true,
        ..Charge::new(&limit, &key, 1)
    };
    let standing = Standing {
        remaining: 2,
        grows_at_us: Some(T0 + PER_US),
        refusal: None,
    };
    let answer = Decision {
        now_us: T0,
        admitted: true,
        standings: SmallVec::from_elem(Some(standing), 1),
        delay_us: 0,
        grants: SmallVec::new(),
        stands_us: SmallVec::new(),
    };
    for round in 0..10_000 {
        let local = Local::new(1, Clock::manual(T0).0);
        local.remember(&[charge], &answer, Instant::now());
        let both = Barrier::new(2);
        let ask = || {
            both.wait();
            (0..4)
                .filter(|_| local.decide(&[charge], Instant::now()).admitted)
                .count()
        };
        let admitted = thread::scope(|scope| {
            let other = scope.spawn(ask);
            ask() + other.join().unwrap()
        });
        assert_eq!(admitted, 2, "in round {round}");
    }
}
