//! Memory of one full counter in each store. The test prints the figures of `benches/SCALE.md`.

use crate::support::prelude::*;

const MINUTE_US: u64 = 60_000_000;
/// The largest key of constant size, name included, and the largest key with settled costs, which
/// stores more.
const MAX_KEY_BYTES: u64 = 512;
const MAX_SETTLED_KEY_BYTES: u64 = 1_024;

/// Each algorithm, and whether its size must be constant. A new algorithm adds one line here.
const MEASURED_ALGORITHMS: [(&str, Algorithm, bool); 7] = [
    ("sliding_log", Algorithm::SlidingLog, false),
    (
        "sliding_window",
        Algorithm::SlidingWindow { buckets: 10 },
        true,
    ),
    (
        "fixed_window",
        Algorithm::FixedWindow { offset_us: 0 },
        true,
    ),
    ("token_bucket", plain_bucket(10_000), true),
    (
        "with warm_up",
        Algorithm::TokenBucket {
            burst: 10_000,
            warm_up_us: MINUTE_US / 6,
        },
        true,
    ),
    (
        "leaky_bucket",
        Algorithm::LeakyBucket {
            max_delay_us: MINUTE_US,
        },
        true,
    ),
    (
        "concurrency",
        Algorithm::Concurrency { max_duration_us: 0 },
        false,
    ),
];

/// Fills a limit with evenly spaced requests, optionally settled later. Returns the bytes of its
/// key.
fn fill_and_measure(
    tested_store: &mut StoreUnderTest,
    limit: &Limit,
    cost: u64,
    times: u64,
    settles: bool,
) -> u64 {
    tested_store.reset();
    let mut key = KeyBuilder::new("api");
    key.push_key_value(Some(b"user-0123456789"));
    let key = key.finish();
    let charge = PolicyCharges::new(limit, &key, cost);
    let charge = charge.map_limits(|charge| charge.is_estimate = settles);
    // The counter is full at the end of a fixed window and of a sub-window.
    let start_us = START_US / limit.per_us * limit.per_us;
    for n in 0..times {
        let charge = PolicyCharges {
            slot_id: u128::from(n) + 1,
            ..charge.clone()
        };
        let decision = tested_store.decide(&[charge], start_us + n * (limit.per_us - 1) / times);
        assert!(decision.admitted, "{limit:?}, {n}: {decision:?}");
    }
    tested_store.counter_bytes(&charge)
}

#[test]
fn keys_stay_small_unless_the_algorithm_lists_requests() {
    let [mut memory, mut redis] = StoreUnderTest::both_stores();
    println!("{:<16}{:>8}{:>8}{:>8}", "", "limit", "memory", "Redis");
    for (name, algorithm, is_small) in MEASURED_ALGORITHMS {
        for requests in [100, 10_000] {
            let limit = make_limit(requests, MINUTE_US, algorithm);
            for (settles, most) in [(false, MAX_KEY_BYTES), (true, MAX_SETTLED_KEY_BYTES)] {
                if settles && !is_small {
                    continue; // It stores each charge with its cost.
                }
                let bytes = [&mut memory, &mut redis].map(|tested_store| {
                    fill_and_measure(tested_store, &limit, 1, requests, settles)
                });
                let what = if settles { "settled" } else { "" };
                println!(
                    "{name:<16}{requests:>8}{:>8}{:>8} {what}",
                    bytes[0], bytes[1]
                );
                assert!(
                    !is_small || bytes.iter().all(|bytes| *bytes < most),
                    "{name} {what}: {bytes:?}"
                );
            }
        }
    }
}

/// The longest numbers that a state can hold.
#[test]
fn keys_stay_small_at_the_largest_limits() {
    let windows = [
        Algorithm::SlidingWindow { buckets: 10 },
        Algorithm::FixedWindow { offset_us: 0 },
    ];
    let windows =
        windows.map(|algorithm| (make_limit(MAX_UNITS, DAY_US, algorithm), MAX_UNITS / 11));
    let most = MAX_UNITS / MINUTE_US;
    let bucket = plain_bucket(most);
    // The longest delay that holds this many requests.
    let line = Algorithm::LeakyBucket {
        max_delay_us: MINUTE_US - 1_000_000,
    };
    let warming = Algorithm::TokenBucket {
        burst: most,
        warm_up_us: MINUTE_US / 6,
    };
    let buckets = [bucket, warming, line].map(|algorithm| {
        let limit = make_limit(most, MINUTE_US, algorithm);
        (limit, limit.capacity() / 11)
    });
    for mut tested_store in StoreUnderTest::both_stores() {
        for (limit, cost) in windows.iter().chain(&buckets) {
            let bytes = fill_and_measure(&mut tested_store, limit, *cost, 11, false);
            assert!(
                bytes < MAX_KEY_BYTES,
                "{bytes} bytes in {tested_store:?}: {limit:?}"
            );
        }
    }
}
