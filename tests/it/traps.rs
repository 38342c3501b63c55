//! Common mistakes of rate limiters. Those that apply to every algorithm are tested here for each
//! of them in both stores; tests of the others, named `trap_N_…`, are in the files of their subject.
//!
//! 1. Entries named by time alone count two requests per tick as one.
//! 2. Rejected requests are counted, or not counted although `count_rejected` is set.
//! 3. Expired entries are counted.
//! 4. Check and charge are two steps.
//! 5. Sidecar clocks enter shared decisions (clippy forbids `SystemTime::now` outside `clock`).
//! 6. A key expires before or after its state ends.
//! 7. The expiry is set by a separate command, or only once.
//! 8. Values are inside the script text.
//! 9. Weighted (interpolated) counters are treated as exact.
//! 10. `Retry-After` is always the whole window.
//! 11. One limit is charged although another one rejects.
//! 12. The check precedes the addition of the cost.
//! 13. Lua's doubles exceed 2^53, or fractions are truncated.
//! 14. An entry exactly `per` old still counts.
//! 15. A reload refills a quota, freezes it, or blocks requests.
//! 16. Slots of a crashed sidecar never return.
//! 17. `NOSCRIPT` is treated as a failure.
//! 18. Only connecting has a timeout.
//! 19. A breaker never opens, or probes with requests.
//! 20. A store failure causes a 429.
//! 21. Keys collide, change the hash tag, or are unbounded.
//! 22. Every IPv6 address is its own client.
//! 23. `X-Forwarded-For` is read from the left, or from untrusted peers.
//! 24. Paths are read differently than the app reads them.
//! 25. A request without the key header has no limit.
//! 26. Maps are unbounded.

use crate::support::prelude::*;

/// One key and one limit in one store, with a clock that the test sets.
struct LimitFixture<'a> {
    store: &'a mut StoreUnderTest,
    limit: Limit,
    key: Key,
    now_us: u64,
}

impl LimitFixture<'_> {
    fn decide(&mut self, cost: u64) -> Decision {
        let charge = PolicyCharges::new(&self.limit, &self.key, cost);
        self.store
            .decide(std::slice::from_ref(&charge), self.now_us)
    }

    fn admits(&mut self, cost: u64) -> bool {
        self.decide(cost).admitted
    }

    fn limit_status(&mut self) -> LimitStatus {
        self.decide(0).statuses().next().unwrap()
    }

    /// Units that are certainly admitted at once if nothing was used.
    fn cold_capacity(&self) -> u64 {
        self.limit.cold_capacity()
    }

    fn remaining(&mut self) -> u64 {
        self.limit_status().remaining
    }

    /// The time at which a rejected cost would be admitted.
    fn retry_at_us(&mut self, cost: u64) -> Option<u64> {
        let decision = self.decide(cost);
        let charge = PolicyCharges::new(&self.limit, &self.key, cost);
        admissible_at_us(std::slice::from_ref(&charge), &decision)
    }
}

/// Runs a test for every algorithm, with a hundred limits each, in both stores.
fn for_each_algorithm_and_store(test: impl Fn(&mut LimitFixture<'_>, &mut Rng)) {
    let seed = test_seed();
    for mut store in StoreUnderTest::both_stores() {
        let mut rng = Rng::with_seed(seed);
        for (name, draw) in EVERY_ALGORITHM {
            for number in 0..100 {
                store.reset();
                let (limit, key) = (draw(&mut rng), KeyBuilder::new("p").finish());
                let now_us = START_US + rng.u64(..limit.per_us);
                let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    test(
                        &mut LimitFixture {
                            store: &mut store,
                            limit,
                            key,
                            now_us,
                        },
                        &mut rng,
                    );
                }));
                assert!(
                    run.is_ok(),
                    "TIDEGATE_TEST_SEED={seed}: {name} in {store:?}, number {number}: {limit:?}"
                );
            }
        }
    }
}

/// A cost that is admitted and leaves quota for further requests.
fn random_partial_cost(most: u64, rng: &mut Rng) -> u64 {
    rng.u64(1..=most.div_ceil(2))
}

#[test]
fn trap_1_all_requests_in_the_same_microsecond_are_counted() {
    for_each_algorithm_and_store(|fixture, _| {
        let capacity = fixture.cold_capacity();
        fixture.decide(capacity.saturating_sub(4));
        let admitted = (0..10).filter(|_| fixture.admits(1)).count() as u64;
        assert_eq!(admitted, capacity.min(4));
    });
}

#[test]
fn trap_2_refused_requests_are_not_counted() {
    for_each_algorithm_and_store(|fixture, rng| {
        let capacity = fixture.cold_capacity();
        fixture.decide(capacity);
        let Some(until_us) = fixture.retry_at_us(capacity) else {
            panic!("a used-up limit must report a retry time")
        };
        for _ in 0..5 {
            fixture.now_us += rng.u64(..until_us - fixture.now_us);
            assert_eq!(
                fixture.retry_at_us(capacity),
                Some(until_us),
                "a rejected request must not prolong the wait"
            );
        }
        fixture.now_us = until_us;
        assert!(fixture.admits(capacity));
    });
}

/// With `count_rejected`, a client that retries faster than units return is never admitted. A
/// client that stops is admitted at the reported time, no later than after using the whole limit.
#[test]
fn trap_2_refused_requests_are_counted_with_count_rejected() {
    for_each_algorithm_and_store(|fixture, rng| {
        fixture.limit.requests = fixture.limit.requests.min(10);
        let Limit {
            requests,
            per_us,
            algorithm,
        } = fixture.limit;
        let retry = |fixture: &mut LimitFixture<'_>| {
            let charge = PolicyCharges {
                counts_rejected: true,
                ..PolicyCharges::new(&fixture.limit, &fixture.key, 1)
            };
            let decision = fixture
                .store
                .decide(std::slice::from_ref(&charge), fixture.now_us);
            admissible_at_us(std::slice::from_ref(&charge), &decision)
        };
        let interval_us = (per_us - 1) / requests;
        fixture.decide(fixture.cold_capacity());
        let mut reported_us = retry(fixture).expect("a used-up limit must reject");
        let edge_us = fixture.retry_at_us(1).unwrap();
        for _ in 0..2 * requests {
            fixture.now_us += rng.u64(1..=interval_us);
            let is_window = matches!(
                algorithm,
                Algorithm::FixedWindow { .. } | Algorithm::CalendarWindow { .. }
            );
            if is_window && fixture.now_us >= edge_us {
                fixture.now_us = edge_us - 1; // The next window admits.
            }
            reported_us = retry(fixture).expect("a fast retry must be rejected");
            assert_eq!(fixture.remaining(), 0);
        }
        // In a leaky bucket a rejection can fill the last fraction of a unit.
        let most = fixture.cold_capacity();
        let (free_us, key) = (fixture.retry_at_us(most).unwrap(), fixture.key.clone());
        fixture.key = KeyBuilder::new("other").finish();
        fixture.decide(most);
        let all_taken_us = fixture.retry_at_us(most).unwrap();
        assert!(
            free_us <= all_taken_us + interval_us + 1,
            "{free_us}, {all_taken_us}"
        );
        fixture.key = key;
        fixture.now_us = reported_us;
        let found = retry(fixture);
        assert_eq!(found, None, "a client that waits as reported is admitted");
    });
}

/// The key is in steady use and never expires, so single expired charges must return their units.
#[test]
fn trap_3_expired_charges_are_no_longer_counted() {
    for_each_algorithm_and_store(|fixture, _| {
        let Limit {
            requests, per_us, ..
        } = fixture.limit;
        let cost = (requests / 8).min(fixture.cold_capacity());
        for round in 0..40 {
            assert!(
                fixture.admits(cost),
                "an eighth of the limit twice per period must be admitted, round {round}"
            );
            fixture.now_us += per_us / 2;
        }
    });
}

#[test]
fn trap_6_and_7_a_key_expires_exactly_when_its_state_is_fresh() {
    let (mut store, seed) = (StoreUnderTest::redis(), test_seed());
    let mut rng = Rng::with_seed(seed);
    for (name, draw) in EVERY_ALGORITHM {
        for _ in 0..100 {
            store.reset();
            let (limit, key) = (draw(&mut rng), KeyBuilder::new("p").finish());
            let mut state = limit.initial_state();
            let mut at_us = START_US + rng.u64(..limit.per_us);
            // Every charge must set the expiry, not only the first.
            for _ in 0..4 {
                at_us += rng.u64(..limit.per_us);
                let charge = |cost| PolicyCharges::new(&limit, &key, cost);
                let cost = random_partial_cost(limit.cold_capacity(), &mut rng);
                if store.decide(&[charge(cost)], at_us).admitted {
                    state.charge(&first_charge(&charge(cost)), at_us);
                }
                let ends_us = state.expires_at_us(&limit);
                let expires_ms = store.expires_at_ms(&charge(cost));
                // Redis keeps a key through the whole millisecond of its expiry. The number of a
                // fixed window must not outlive it.
                let ends_exactly = name == "fixed_window" && (expires_ms + 1) * 1_000 == ends_us;
                assert!(
                    expires_ms == ends_us.div_ceil(1_000) || ends_exactly,
                    "{name}, seed {seed}: {limit:?}, {expires_ms}, {ends_us}"
                );
            }
        }
    }
}

/// Uses the server's clock: a key that expires too early admits a second request in the same
/// millisecond.
#[tokio::test]
async fn trap_6_a_period_of_one_millisecond_is_enforced() {
    let server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    for algorithm in [
        Algorithm::SlidingLog,
        Algorithm::SlidingWindow { buckets: 10 },
        Algorithm::FixedWindow { offset_us: 0 },
        plain_bucket(1),
        Algorithm::LeakyBucket { max_delay_us: 0 },
    ] {
        let (limit, key) = (
            make_limit(1, 1_000, algorithm),
            KeyBuilder::new("p").finish(),
        );
        let charge = PolicyCharges::new(&limit, &key, 1);
        let mut admitted = Vec::new();
        while admitted.len() < 50 {
            let decision = redis
                .decide(std::slice::from_ref(&charge), tokio::time::Instant::now())
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
    for_each_algorithm_and_store(|fixture, rng| {
        let one = sliding_log(1, draw_duration_us(rng));
        let (other, cost) = (
            KeyBuilder::new("other").finish(),
            random_partial_cost(fixture.cold_capacity(), rng),
        );
        fixture
            .store
            .decide(&[PolicyCharges::new(&one, &other, 1)], fixture.now_us);
        fixture.decide(cost);
        let (before, key, limit) = (fixture.limit_status(), fixture.key.clone(), fixture.limit);
        let charge = |limit, key| PolicyCharges::new(limit, key, 1);
        for both in [
            [charge(&limit, &key), charge(&one, &other)],
            [charge(&one, &other), charge(&limit, &key)],
        ] {
            assert!(!fixture.store.decide(&both, fixture.now_us).admitted);
        }
        assert_eq!(fixture.limit_status(), before);
    });
}

#[test]
fn trap_12_a_cost_is_checked_before_it_is_added() {
    for_each_algorithm_and_store(|fixture, _| {
        let most = fixture.cold_capacity();
        assert!(!fixture.admits(most + 1), "a cost above the capacity");
        assert!(fixture.admits(most), "a cost equal to the capacity");
        assert_eq!((fixture.admits(1), fixture.remaining()), (false, 0));
    });
    for_each_algorithm_and_store(|fixture, _| {
        fixture.decide(1);
        let (left, capacity) = (fixture.remaining(), fixture.limit.capacity());
        if left < capacity {
            assert_eq!(
                (fixture.admits(left + 1), fixture.remaining()),
                (false, left),
                "a cost of one above the remaining units"
            );
        }
    });
}

/// The largest amounts at large times, where an error of one unit would show.
#[test]
fn trap_13_lua_counts_exactly_up_to_2_to_the_53() {
    let log_algorithms = [
        Algorithm::SlidingLog,
        Algorithm::SlidingWindow { buckets: 10 },
        Algorithm::FixedWindow { offset_us: 0 },
    ];
    let most = |algorithm| make_limit(MAX_UNITS, 1_000_000, algorithm);
    let mut limits = log_algorithms.map(most).to_vec();
    let bucket = plain_bucket(MAX_UNITS / 1_000);
    let line = Algorithm::LeakyBucket { max_delay_us: 999 };
    limits.extend([bucket, line].map(|algorithm| make_limit(MAX_UNITS / 1_000, 1_000, algorithm)));
    for mut store in StoreUnderTest::both_stores() {
        for limit in &limits {
            store.reset();
            let (key, capacity) = (KeyBuilder::new("p").finish(), limit.capacity());
            let mut fixture = LimitFixture {
                store: &mut store,
                limit: *limit,
                key,
                now_us: 9_000_000_000_000_001,
            };
            for (cost, left) in [(1, capacity - 1), (capacity - 4, 3), (2, 1)] {
                assert!(fixture.admits(cost), "{limit:?}");
                assert_eq!(fixture.remaining(), left, "{limit:?}");
            }
            assert!(!fixture.admits(2), "{limit:?}");
            assert!(fixture.admits(1), "{limit:?}");
            assert!(!fixture.admits(1), "{limit:?}");
            let until_us = fixture.retry_at_us(1).unwrap();
            fixture.now_us = until_us - 1;
            assert!(!fixture.admits(1), "{limit:?}");
            fixture.now_us = until_us;
            assert!(fixture.admits(1), "{limit:?}");
        }
    }
}

/// The window is (now − per, now]: a charge exactly one period old has expired, and one microsecond
/// earlier it counts.
#[test]
fn trap_14_a_charge_expires_when_it_is_exactly_one_period_old() {
    let log = sliding_log(3, 1_000);
    let buckets = with_algorithm(log, Algorithm::SlidingWindow { buckets: 10 });
    let window = with_algorithm(log, Algorithm::FixedWindow { offset_us: 0 });
    for mut store in StoreUnderTest::both_stores() {
        // In a sliding window all charges of a sub-window of 100 µs expire together, in a fixed
        // window all at its end.
        for (limit, leaves_us) in [(log, 1_042), (buckets, 1_099), (window, 1_000)] {
            store.reset();
            let key = KeyBuilder::new("p").finish();
            let mut fixture = LimitFixture {
                store: &mut store,
                limit,
                key,
                now_us: START_US + 42,
            };
            assert!(fixture.admits(3));
            fixture.now_us = START_US + leaves_us - 1;
            assert!(!fixture.admits(1), "{limit:?}");
            fixture.now_us = START_US + leaves_us;
            assert!(fixture.admits(3), "{limit:?}");
        }
    }
}

/// Without a lease, a crashed holder would keep its slot for ever. Without renewal, a long stream
/// would lose its slot.
#[test]
fn trap_16_a_crashed_holders_slot_expires_and_a_renewed_one_stays() {
    const LEASE_US: u64 = 10_000_000;
    let algorithm = Algorithm::Concurrency { max_duration_us: 0 };
    let (limit, key) = (
        make_limit(2, LEASE_US, algorithm),
        KeyBuilder::new("p").finish(),
    );
    for mut store in StoreUnderTest::both_stores() {
        let take = |store: &mut StoreUnderTest, slot, at_us| {
            store
                .decide(
                    &[PolicyCharges {
                        slot_id: slot,
                        ..PolicyCharges::new(&limit, &key, 1)
                    }],
                    START_US + at_us,
                )
                .admitted
        };
        assert!(take(&mut store, 1, 0) && take(&mut store, 2, 0));
        // The first holder renews its slot, the second has crashed.
        for at_us in [LEASE_US / 3, LEASE_US * 2 / 3, LEASE_US - 1] {
            store.apply_amendment(&limit, &key, Amendment::Renew { slot: 1 }, START_US + at_us);
            assert!(
                !take(&mut store, 3, at_us),
                "both slots are taken in {store:?} after {at_us}"
            );
        }
        assert!(
            take(&mut store, 4, LEASE_US),
            "the crashed holder's slot must be free in {store:?}"
        );
        assert!(
            !take(&mut store, 5, LEASE_US),
            "the renewed slot must not be free in {store:?}"
        );
        store.apply_amendment(
            &limit,
            &key,
            Amendment::Release { slot: 1 },
            START_US + LEASE_US + 1,
        );
        assert!(
            take(&mut store, 6, LEASE_US + 1),
            "the released slot must be free in {store:?}"
        );
    }
}

/// A changed limit keeps the usage, and no client waits longer than reported.
#[test]
fn trap_15_a_changed_limit_applies_at_once_and_keeps_usage() {
    for_each_algorithm_and_store(|fixture, rng| {
        let (before, capacity) = (fixture.limit, fixture.limit.capacity());
        if matches!(
            before.algorithm,
            Algorithm::TokenBucket {
                warm_up_us: 1..,
                ..
            }
        ) {
            return; // The growth of a bucket that is not warm yet is hard to compute.
        }
        let cost = random_partial_cost(capacity, rng);
        assert!(fixture.admits(cost));
        let left = fixture.remaining();
        let raised = with_capacity(before, capacity + 7);
        let grown = raised.capacity() - capacity;
        fixture.limit = raised;
        let units = fixture.remaining();
        assert_eq!(units, left + grown, "raised: usage must be kept");
        fixture.limit = before;
        assert_eq!(fixture.remaining(), left, "restored: usage must be kept");
        fixture.limit = with_capacity(before, (capacity - left).max(1));
        if fixture.limit.capacity() == capacity - left {
            let until_us = fixture
                .retry_at_us(1)
                .expect("a lowered limit must apply at once");
            fixture.now_us = until_us;
            assert!(
                fixture.admits(1),
                "a lowered limit must admit after the reported time"
            );
        }
    });
}

/// A debt made at a slow rate returns at the new rate as soon as that is faster.
#[test]
fn trap_15_a_raised_rate_pays_back_old_debts() {
    for_each_algorithm_and_store(|fixture, _| {
        let (before, capacity) = (fixture.limit, fixture.limit.capacity());
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
        fixture.decide(capacity);
        let slow_us = fixture.retry_at_us(capacity).unwrap() - fixture.now_us;
        fixture.limit = Limit {
            requests,
            algorithm,
            ..before
        };
        let most = fixture.limit.capacity().min(capacity);
        let until_us = fixture.retry_at_us(most).unwrap();
        assert!(
            until_us - fixture.now_us <= slow_us / 2 + 1,
            "{} of {slow_us}",
            until_us - fixture.now_us
        );
        fixture.now_us = until_us;
        assert!(fixture.admits(most));
    });
}

/// One reload adds a warm-up, another removes it. Neither changes the remaining units at that
/// moment, and no client waits longer than reported.
#[test]
fn trap_15_adding_or_removing_a_warm_up_neither_refills_nor_freezes() {
    for_each_algorithm_and_store(|fixture, rng| {
        let Algorithm::TokenBucket {
            burst,
            warm_up_us: 1..,
        } = fixture.limit.algorithm
        else {
            return;
        };
        let (warming, cost) = (
            fixture.limit,
            random_partial_cost(fixture.cold_capacity(), rng),
        );
        let warm = with_algorithm(warming, plain_bucket(burst));
        // Starts without and with a warm-up.
        for (first, second) in [(warm, warming), (warming, warm)] {
            fixture.store.reset();
            fixture.limit = first;
            assert!(fixture.admits(cost));
            let left = fixture.remaining();
            assert_eq!(left, first.cold_capacity() - cost);
            let reported_us = fixture.retry_at_us(fixture.cold_capacity());
            fixture.limit = second;
            assert_eq!(
                fixture.remaining(),
                left,
                "the reload must not change the remaining units"
            );
            fixture.limit = first;
            assert_eq!(
                fixture.remaining(),
                left,
                "the reverse reload must not change the remaining units"
            );
            fixture.limit = second;
            let wanted = warming.cold_capacity();
            if let Some(until_us) = fixture.retry_at_us(wanted) {
                assert!(
                    reported_us.is_some_and(|reported_us| until_us <= reported_us),
                    "{reported_us:?}, then {until_us}"
                );
                fixture.now_us = until_us;
                assert!(
                    fixture.admits(wanted),
                    "the limit must admit after the reported time"
                );
            }
            fixture.now_us += warming.per_us;
        }
    });
}

/// The same limit with another capacity, or the nearest valid one.
fn with_capacity(limit: Limit, capacity: u64) -> Limit {
    let Limit {
        requests, per_us, ..
    } = limit;
    match limit.algorithm {
        Algorithm::TokenBucket { warm_up_us, .. } => {
            let burst = capacity.min(MAX_UNITS / per_us);
            with_algorithm(limit, Algorithm::TokenBucket { burst, warm_up_us })
        }
        Algorithm::LeakyBucket { max_delay_us } => {
            // Keeps the fraction beyond whole units.
            let grown_us = (capacity * per_us).abs_diff(limit.capacity() * per_us) / requests;
            let longest_us = (MAX_UNITS - per_us) / requests;
            let max_delay_us = match capacity >= limit.capacity() {
                true => (max_delay_us + grown_us).min(longest_us),
                false => max_delay_us - grown_us.min(max_delay_us),
            };
            with_algorithm(limit, Algorithm::LeakyBucket { max_delay_us })
        }
        _ => Limit {
            requests: capacity,
            ..limit
        },
    }
}
