//! What one full counter costs in each store. `docs/ALGORITHMS.md` has the figures; they are printed here.

use crate::support::judge::{DAY_US, Judge, START_US};
use tidegate::limiter::{Algorithm, Charge, KeyBuilder, Limit, MAX_UNITS};

const MINUTE_US: u64 = 60_000_000;
/// What a key of constant size may take, name and all; and one whose costs are settled, so that it remembers more.
const SMALL_BYTES: u64 = 512;
const SETTLED_BYTES: u64 = 1_024;

/// Each with whether its size is to be constant. A new algorithm is a line here.
const EACH: [(&str, Algorithm, bool); 7] = [
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
    (
        "token_bucket",
        Algorithm::TokenBucket {
            burst: 10_000,
            warm_up_us: 0,
        },
        true,
    ),
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

/// Fills a limit by requests at even distances, which may be settled later, and says how many bytes its key then takes.
fn full(judge: &mut Judge, limit: &Limit, cost: u64, times: u64, settles: bool) -> u64 {
    judge.forget();
    let mut key = KeyBuilder::new("api");
    key.part(Some(b"user-0123456789"));
    let key = key.finish();
    let charge = Charge {
        settles,
        ..Charge::new(limit, &key, cost)
    };
    // So that it is full at the end of a window of the clock, and of a sub-window.
    let start_us = START_US / limit.per_us * limit.per_us;
    for n in 0..times {
        let charge = Charge {
            slot: u128::from(n) + 1,
            ..charge
        };
        let decision = judge.decide(&[charge], start_us + n * (limit.per_us - 1) / times);
        assert!(decision.admitted, "{limit:?}, {n}: {decision:?}");
    }
    judge.bytes(&charge)
}

#[test]
fn a_key_is_small_whatever_its_limit_unless_it_lists_requests() {
    let [mut memory, mut redis] = Judge::both();
    println!("{:<16}{:>8}{:>8}{:>8}", "", "limit", "memory", "Redis");
    for (name, algorithm, is_small) in EACH {
        for requests in [100, 10_000] {
            let limit = Limit {
                requests,
                per_us: MINUTE_US,
                algorithm,
            };
            for (settles, most) in [(false, SMALL_BYTES), (true, SETTLED_BYTES)] {
                if settles && !is_small {
                    continue; // It remembers each charge as it is.
                }
                let bytes = [&mut memory, &mut redis]
                    .map(|judge| full(judge, &limit, 1, requests, settles));
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
fn a_key_is_small_at_the_largest_limits_too() {
    let windows = [
        Algorithm::SlidingWindow { buckets: 10 },
        Algorithm::FixedWindow { offset_us: 0 },
    ];
    let windows = windows.map(|algorithm| {
        (
            Limit {
                requests: MAX_UNITS,
                per_us: DAY_US,
                algorithm,
            },
            MAX_UNITS / 11,
        )
    });
    let most = MAX_UNITS / MINUTE_US;
    let bucket = Algorithm::TokenBucket {
        burst: most,
        warm_up_us: 0,
    };
    // A longest delay that holds as many as this.
    let line = Algorithm::LeakyBucket {
        max_delay_us: MINUTE_US - 1_000_000,
    };
    let warming = Algorithm::TokenBucket {
        burst: most,
        warm_up_us: MINUTE_US / 6,
    };
    let buckets = [bucket, warming, line].map(|algorithm| {
        let limit = Limit {
            requests: most,
            per_us: MINUTE_US,
            algorithm,
        };
        (limit, limit.capacity() / 11)
    });
    for mut judge in Judge::both() {
        for (limit, cost) in windows.iter().chain(&buckets) {
            let bytes = full(&mut judge, limit, *cost, 11, false);
            assert!(bytes < SMALL_BYTES, "{bytes} bytes in {judge:?}: {limit:?}");
        }
    }
}
