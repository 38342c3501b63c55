//! The traps of `docs/CONTRIBUTING.md` that any algorithm can fall into: each for every algorithm, in both stores.
//! Those about one algorithm or one room stand beside it.

use crate::support::redis::RedisServer;
use crate::support::store_harness::{
    EVERY_ALGORITHM, START_US, StoreUnderTest, admissible_at_us, draw_duration_us, test_seed,
};
use fastrand::Rng;
use tidegate::limiter::{
    Algorithm, Amendment, Charge, Decision, Key, KeyBuilder, Limit, LimitStatus, MAX_UNITS,
};

/// One key of one limit in one store, whose clock goes on when it is told to.
struct LimitFixture<'a> {
    judge: &'a mut StoreUnderTest,
    limit: Limit,
    key: Key,
    now_us: u64,
}

impl LimitFixture<'_> {
    fn decide(&mut self, cost: u64) -> Decision {
        let charge = Charge::new(&self.limit, &self.key, cost);
        self.judge.decide(&[charge], self.now_us)
    }

    fn admits(&mut self, cost: u64) -> bool {
        self.decide(cost).admitted
    }

    fn limit_status(&mut self) -> LimitStatus {
        self.decide(0).statuses[0].unwrap()
    }

    /// What is sure to be admitted at once where nothing was used.
    fn cold_capacity(&self) -> u64 {
        self.limit.cold_capacity()
    }

    fn remaining(&mut self) -> u64 {
        self.limit_status().remaining
    }

    /// When a refused cost would be admitted.
    fn retry_at_us(&mut self, cost: u64) -> Option<u64> {
        let decision = self.decide(cost);
        let charge = Charge::new(&self.limit, &self.key, cost);
        admissible_at_us(&[charge], &decision)
    }
}

/// A test for every algorithm, with a few hundred limits each.
fn for_each_algorithm_and_store(test: impl Fn(&mut LimitFixture<'_>, &mut Rng)) {
    let seed = test_seed();
    for mut judge in StoreUnderTest::both_stores() {
        let mut rng = Rng::with_seed(seed);
        for (name, draw) in EVERY_ALGORITHM {
            for number in 0..100 {
                judge.reset();
                let (limit, key) = (draw(&mut rng), KeyBuilder::new("p").finish());
                let now_us = START_US + rng.u64(..limit.per_us);
                let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    test(
                        &mut LimitFixture {
                            judge: &mut judge,
                            limit,
                            key,
                            now_us,
                        },
                        &mut rng,
                    );
                }));
                assert!(
                    run.is_ok(),
                    "TIDEGATE_TEST_SEED={seed}: {name} in {judge:?}, number {number}: {limit:?}"
                );
            }
        }
    }
}

/// A cost that is admitted, and leaves something to ask for.
fn random_partial_cost(most: u64, rng: &mut Rng) -> u64 {
    rng.u64(1..=most.div_ceil(2))
}

#[test]
fn trap_1_all_requests_in_the_same_microsecond_are_counted() {
    for_each_algorithm_and_store(|desk, _| {
        let capacity = desk.cold_capacity();
        desk.decide(capacity.saturating_sub(4));
        let admitted = (0..10).filter(|_| desk.admits(1)).count() as u64;
        assert_eq!(admitted, capacity.min(4));
    });
}

#[test]
fn trap_2_refused_requests_are_not_counted() {
    for_each_algorithm_and_store(|desk, rng| {
        let capacity = desk.cold_capacity();
        desk.decide(capacity);
        let Some(until_us) = desk.retry_at_us(capacity) else {
            panic!("all is taken")
        };
        for _ in 0..5 {
            desk.now_us += rng.u64(..until_us - desk.now_us);
            assert_eq!(
                desk.retry_at_us(capacity),
                Some(until_us),
                "knocking prolongs the wait"
            );
        }
        desk.now_us = until_us;
        assert!(desk.admits(capacity));
    });
}

/// Where refusals are counted it is the other way round: who knocks faster than units come back never gets in, and who
/// stops is in as soon as he was told, after no longer than if he had taken everything just now.
#[test]
fn trap_2_refused_requests_are_counted_with_count_rejected() {
    for_each_algorithm_and_store(|desk, rng| {
        desk.limit.requests = desk.limit.requests.min(10);
        let Limit {
            requests,
            per_us,
            algorithm,
        } = desk.limit;
        let knock = |desk: &mut LimitFixture<'_>| {
            let charge = Charge {
                counts_rejected: true,
                ..Charge::new(&desk.limit, &desk.key, 1)
            };
            let decision = desk.judge.decide(&[charge], desk.now_us);
            admissible_at_us(&[charge], &decision)
        };
        let place_us = (per_us - 1) / requests;
        desk.decide(desk.cold_capacity());
        let mut told_us = knock(desk).expect("all is taken");
        let edge_us = desk.retry_at_us(1).unwrap();
        for _ in 0..2 * requests {
            desk.now_us += rng.u64(1..=place_us);
            if matches!(algorithm, Algorithm::FixedWindow { .. }) && desk.now_us >= edge_us {
                desk.now_us = edge_us - 1; // There everybody gets in.
            }
            told_us = knock(desk).expect("a knocker gets in");
            assert_eq!(desk.remaining(), 0);
        }
        // In a line a refusal can fill the last part of a place.
        let most = desk.cold_capacity();
        let (free_us, key) = (desk.retry_at_us(most).unwrap(), desk.key.clone());
        desk.key = KeyBuilder::new("other").finish();
        desk.decide(most);
        let all_taken_us = desk.retry_at_us(most).unwrap();
        assert!(
            free_us <= all_taken_us + place_us + 1,
            "{free_us}, {all_taken_us}"
        );
        desk.key = key;
        desk.now_us = told_us;
        assert_eq!(knock(desk), None, "waited as told");
    });
}

/// In steady use, so that nothing expires as a whole: what leaves has to make room by itself.
#[test]
fn trap_3_expired_charges_are_no_longer_counted() {
    for_each_algorithm_and_store(|desk, _| {
        let Limit {
            requests, per_us, ..
        } = desk.limit;
        let cost = (requests / 8).min(desk.cold_capacity());
        for round in 0..40 {
            assert!(
                desk.admits(cost),
                "an eighth of the limit, twice a period, in round {round}"
            );
            desk.now_us += per_us / 2;
        }
    });
}

#[test]
fn trap_6_and_7_a_key_expires_exactly_when_its_state_is_fresh() {
    let (mut judge, seed) = (StoreUnderTest::redis(), test_seed());
    let mut rng = Rng::with_seed(seed);
    for (name, draw) in EVERY_ALGORITHM {
        for _ in 0..100 {
            judge.reset();
            let (limit, key) = (draw(&mut rng), KeyBuilder::new("p").finish());
            let mut state = limit.initial_state();
            let mut at_us = START_US + rng.u64(..limit.per_us);
            // A lifetime has to be set by every charge, not only by the first.
            for _ in 0..4 {
                at_us += rng.u64(..limit.per_us);
                let charge = |cost| Charge::new(&limit, &key, cost);
                let cost = random_partial_cost(limit.cold_capacity(), &mut rng);
                if judge.decide(&[charge(cost)], at_us).admitted {
                    state.charge(&charge(cost), at_us);
                }
                let ends_ms = state.expires_at_us(&limit).div_ceil(1_000);
                assert_eq!(
                    judge.expires_at_ms(&charge(cost)),
                    ends_ms,
                    "{name}, seed {seed}: {limit:?}"
                );
            }
        }
    }
}

/// By the server's own clock: a key that expires a moment too early lets a second request into the same millisecond.
#[tokio::test]
async fn trap_6_a_period_of_one_millisecond_is_enforced() {
    let server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    for algorithm in [
        Algorithm::SlidingLog,
        Algorithm::SlidingWindow { buckets: 10 },
        Algorithm::FixedWindow { offset_us: 0 },
        Algorithm::TokenBucket {
            burst: 1,
            warm_up_us: 0,
        },
        Algorithm::LeakyBucket { max_delay_us: 0 },
    ] {
        let (limit, key) = (
            Limit {
                requests: 1,
                per_us: 1_000,
                algorithm,
            },
            KeyBuilder::new("p").finish(),
        );
        let charge = Charge::new(&limit, &key, 1);
        let mut admitted = Vec::new();
        while admitted.len() < 50 {
            let decision = redis
                .decide(&[charge], tokio::time::Instant::now())
                .await
                .unwrap();
            if decision.admitted {
                admitted.push(decision.now_us);
            }
        }
        let apart = |pair: &[u64]| match algorithm {
            Algorithm::FixedWindow { .. } => pair[1] / 1_000 > pair[0] / 1_000,
            _ => pair[1] - pair[0] >= 1_000,
        };
        assert!(
            admitted.windows(2).all(apart),
            "{algorithm:?}: {admitted:?}"
        );
    }
}

#[test]
fn trap_11_a_limit_is_not_charged_when_another_refuses() {
    for_each_algorithm_and_store(|desk, rng| {
        let one = Limit {
            requests: 1,
            per_us: draw_duration_us(rng),
            algorithm: Algorithm::SlidingLog,
        };
        let (other, cost) = (
            KeyBuilder::new("other").finish(),
            random_partial_cost(desk.cold_capacity(), rng),
        );
        desk.judge
            .decide(&[Charge::new(&one, &other, 1)], desk.now_us);
        desk.decide(cost);
        let (before, key, limit) = (desk.limit_status(), desk.key.clone(), desk.limit);
        let charge = |limit, key| Charge::new(limit, key, 1);
        for both in [
            [charge(&limit, &key), charge(&one, &other)],
            [charge(&one, &other), charge(&limit, &key)],
        ] {
            assert!(!desk.judge.decide(&both, desk.now_us).admitted);
        }
        assert_eq!(desk.limit_status(), before);
    });
}

#[test]
fn trap_12_a_cost_is_checked_before_it_is_added() {
    for_each_algorithm_and_store(|desk, _| {
        let most = desk.cold_capacity();
        assert!(!desk.admits(most + 1), "more than there is");
        assert!(desk.admits(most), "all there is");
        assert_eq!((desk.admits(1), desk.remaining()), (false, 0));
    });
    for_each_algorithm_and_store(|desk, _| {
        desk.decide(1);
        let (left, capacity) = (desk.remaining(), desk.limit.capacity());
        if left < capacity {
            assert_eq!(
                (desk.admits(left + 1), desk.remaining()),
                (false, left),
                "one more than is left"
            );
        }
    });
}

/// The largest amounts at large times: one unit more or less has to show.
#[test]
fn trap_13_lua_counts_exactly_up_to_2_to_the_53() {
    let of_a_log = [
        Algorithm::SlidingLog,
        Algorithm::SlidingWindow { buckets: 10 },
        Algorithm::FixedWindow { offset_us: 0 },
    ];
    let most = |algorithm| Limit {
        requests: MAX_UNITS,
        per_us: 1_000_000,
        algorithm,
    };
    let mut limits = of_a_log.map(most).to_vec();
    let bucket = Algorithm::TokenBucket {
        burst: MAX_UNITS / 1_000,
        warm_up_us: 0,
    };
    let line = Algorithm::LeakyBucket { max_delay_us: 999 };
    limits.extend([bucket, line].map(|algorithm| Limit {
        requests: MAX_UNITS / 1_000,
        per_us: 1_000,
        algorithm,
    }));
    for mut judge in StoreUnderTest::both_stores() {
        for limit in &limits {
            judge.reset();
            let (key, capacity) = (KeyBuilder::new("p").finish(), limit.capacity());
            let mut desk = LimitFixture {
                judge: &mut judge,
                limit: *limit,
                key,
                now_us: 9_000_000_000_000_001,
            };
            for (cost, left) in [(1, capacity - 1), (capacity - 4, 3), (2, 1)] {
                assert!(desk.admits(cost), "{limit:?}");
                assert_eq!(desk.remaining(), left, "{limit:?}");
            }
            assert!(
                !desk.admits(2) && desk.admits(1) && !desk.admits(1),
                "{limit:?}"
            );
            let until_us = desk.retry_at_us(1).unwrap();
            desk.now_us = until_us - 1;
            assert!(!desk.admits(1), "{limit:?}");
            desk.now_us = until_us;
            assert!(desk.admits(1), "{limit:?}");
        }
    }
}

/// The window is (now − per, now]: what is exactly one period old is out, and a microsecond before it is in.
#[test]
fn trap_14_a_charge_expires_when_it_is_exactly_one_period_old() {
    let log = Limit {
        requests: 3,
        per_us: 1_000,
        algorithm: Algorithm::SlidingLog,
    };
    let buckets = Limit {
        algorithm: Algorithm::SlidingWindow { buckets: 10 },
        ..log
    };
    let window = Limit {
        algorithm: Algorithm::FixedWindow { offset_us: 0 },
        ..log
    };
    for mut judge in StoreUnderTest::both_stores() {
        // The last instant of a sub-window of 100 µs, and the edge of a window, stand for what is in it.
        for (limit, leaves_us) in [(log, 1_042), (buckets, 1_099), (window, 1_000)] {
            judge.reset();
            let key = KeyBuilder::new("p").finish();
            let mut desk = LimitFixture {
                judge: &mut judge,
                limit,
                key,
                now_us: START_US + 42,
            };
            assert!(desk.admits(3));
            desk.now_us = START_US + leaves_us - 1;
            assert!(!desk.admits(1), "{limit:?}");
            desk.now_us = START_US + leaves_us;
            assert!(desk.admits(3), "{limit:?}");
        }
    }
}

/// Without a lease a slot would be lost with its holder; without renewal a long stream would lose its own.
#[test]
fn trap_16_a_crashed_holders_slot_expires_and_a_renewed_one_stays() {
    const LEASE_US: u64 = 10_000_000;
    let algorithm = Algorithm::Concurrency { max_duration_us: 0 };
    let (limit, key) = (
        Limit {
            requests: 2,
            per_us: LEASE_US,
            algorithm,
        },
        KeyBuilder::new("p").finish(),
    );
    for mut judge in StoreUnderTest::both_stores() {
        let take = |judge: &mut StoreUnderTest, slot, at_us| {
            judge
                .decide(
                    &[Charge {
                        slot_id: slot,
                        ..Charge::new(&limit, &key, 1)
                    }],
                    START_US + at_us,
                )
                .admitted
        };
        assert!(take(&mut judge, 1, 0) && take(&mut judge, 2, 0));
        // The first is renewed all the time, the second has crashed.
        for at_us in [LEASE_US / 3, LEASE_US * 2 / 3, LEASE_US - 1] {
            judge.apply_amendment(&limit, &key, Amendment::Renew { slot: 1 }, START_US + at_us);
            assert!(
                !take(&mut judge, 3, at_us),
                "both slots are taken in {judge:?} after {at_us}"
            );
        }
        assert!(
            take(&mut judge, 4, LEASE_US),
            "the crashed one's is free in {judge:?}"
        );
        assert!(
            !take(&mut judge, 5, LEASE_US),
            "the renewed one's is not in {judge:?}"
        );
        judge.apply_amendment(
            &limit,
            &key,
            Amendment::Release { slot: 1 },
            START_US + LEASE_US + 1,
        );
        assert!(take(&mut judge, 6, LEASE_US + 1), "given back in {judge:?}");
    }
}

/// What is used stays used whatever the amount is changed to, and nobody is kept out longer than he was told.
#[test]
fn trap_15_a_changed_limit_applies_at_once_and_keeps_usage() {
    for_each_algorithm_and_store(|desk, rng| {
        let (before, capacity) = (desk.limit, desk.limit.capacity());
        if matches!(
            before.algorithm,
            Algorithm::TokenBucket {
                warm_up_us: 1..,
                ..
            }
        ) {
            return; // How much a bucket grows that is not warm yet is not plain to see.
        }
        let cost = random_partial_cost(capacity, rng);
        assert!(desk.admits(cost));
        let left = desk.remaining();
        let raised = with_capacity(before, capacity + 7);
        let grown = raised.capacity() - capacity;
        desk.limit = raised;
        assert_eq!(
            desk.remaining(),
            left + grown,
            "raised: neither frozen nor refilled"
        );
        desk.limit = before;
        assert_eq!(desk.remaining(), left, "back: usage is kept");
        desk.limit = with_capacity(before, (capacity - left).max(1));
        if desk.limit.capacity() == capacity - left {
            let until_us = desk.retry_at_us(1).expect("lowered: binds at once");
            desk.now_us = until_us;
            assert!(desk.admits(1), "lowered: but not for ever");
        }
    });
}

/// A bucket that was filled under a slow rate empties at the new one as soon as that is faster.
#[test]
fn trap_15_a_raised_rate_pays_back_old_debts() {
    for_each_algorithm_and_store(|desk, _| {
        let (before, capacity) = (desk.limit, desk.limit.capacity());
        let requests = 2 * before.requests;
        let algorithm = match before.algorithm {
            Algorithm::TokenBucket { warm_up_us: 0, .. }
                if requests <= MAX_UNITS / before.per_us =>
            {
                before.algorithm
            }
            Algorithm::LeakyBucket { max_delay_us } => Algorithm::LeakyBucket {
                max_delay_us: max_delay_us / 2,
            },
            _ => return,
        };
        desk.decide(capacity);
        let slow_us = desk.retry_at_us(capacity).unwrap() - desk.now_us;
        desk.limit = Limit {
            requests,
            algorithm,
            ..before
        };
        let most = desk.limit.capacity().min(capacity);
        let until_us = desk.retry_at_us(most).unwrap();
        assert!(
            until_us - desk.now_us <= slow_us / 2 + 1,
            "{} of {slow_us}",
            until_us - desk.now_us
        );
        desk.now_us = until_us;
        assert!(desk.admits(most));
    });
}

/// One reload adds the warm-up, another removes it: neither gives or takes anything at that moment, and nobody waits
/// for longer than he was told.
#[test]
fn trap_15_adding_or_removing_a_warm_up_neither_refills_nor_freezes() {
    for_each_algorithm_and_store(|desk, rng| {
        let Algorithm::TokenBucket {
            burst,
            warm_up_us: 1..,
        } = desk.limit.algorithm
        else {
            return;
        };
        let (warming, cost) = (desk.limit, random_partial_cost(desk.cold_capacity(), rng));
        let warm = Limit {
            algorithm: Algorithm::TokenBucket {
                burst,
                warm_up_us: 0,
            },
            ..warming
        };
        // Begun warm, or cold.
        for (first, second) in [(warm, warming), (warming, warm)] {
            desk.judge.reset();
            desk.limit = first;
            assert!(desk.admits(cost));
            let left = desk.remaining();
            assert_eq!(left, first.cold_capacity() - cost);
            let told_us = desk.retry_at_us(desk.cold_capacity());
            desk.limit = second;
            assert_eq!(desk.remaining(), left, "neither refilled nor frozen");
            desk.limit = first;
            assert_eq!(desk.remaining(), left, "nor by the way back");
            desk.limit = second;
            let wanted = warming.cold_capacity();
            if let Some(until_us) = desk.retry_at_us(wanted) {
                assert!(
                    told_us.is_some_and(|told_us| until_us <= told_us),
                    "{told_us:?}, then {until_us}"
                );
                desk.now_us = until_us;
                assert!(desk.admits(wanted), "but not for ever");
            }
            desk.now_us += warming.per_us;
        }
    });
}

/// The same limit with another capacity, as near to it as it can be.
fn with_capacity(limit: Limit, capacity: u64) -> Limit {
    let Limit {
        requests, per_us, ..
    } = limit;
    match limit.algorithm {
        Algorithm::TokenBucket { warm_up_us, .. } => {
            let burst = capacity.min(MAX_UNITS / per_us);
            Limit {
                algorithm: Algorithm::TokenBucket { burst, warm_up_us },
                ..limit
            }
        }
        Algorithm::LeakyBucket { max_delay_us } => {
            // As much beyond whole units as before.
            let grown_us = (capacity * per_us).abs_diff(limit.capacity() * per_us) / requests;
            let longest_us = (MAX_UNITS - per_us) / requests;
            let max_delay_us = match capacity >= limit.capacity() {
                true => (max_delay_us + grown_us).min(longest_us),
                false => max_delay_us - grown_us.min(max_delay_us),
            };
            Limit {
                algorithm: Algorithm::LeakyBucket { max_delay_us },
                ..limit
            }
        }
        _ => Limit {
            requests: capacity,
            ..limit
        },
    }
}
