//! Measures the cost of one decision, and of one full key, for each algorithm: server time in the
//! script, time in the memory store, and bytes in both. Logs and windows are filled evenly over
//! their period with explicit times, so the script's own time lookup (a fraction of a microsecond)
//! is not included. Each result is the minimum of several rounds, to reduce noise.
//!
//! Run by `make bench`, or `cargo bench --bench costs`. Requires redis-server and redis-cli.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark talks on stdout and stops at any error"
)]

mod support;

use redis::{Connection, Value};
use std::time::Instant;
use support::{KEY_PREFIX, RedisServer};
use tidegate::clock::Clock;
use tidegate::limiter::{Algorithm, CounterRef, Key, KeyBuilder, Limit, PolicyCharges};
use tidegate::store::redis::ScriptLibrary;
use tidegate::store::{MemorySettings, MemoryStore};

const HOUR_US: u64 = 3_600_000_000;
/// A time in the year 2100, so that no key expires during the measurement.
const START_US: u64 = 4_102_444_800_000_000;
const ROUNDS: usize = 5;
const LARGE_MEMORY_SETTINGS: MemorySettings = MemorySettings {
    max_keys: 1000,
    max_bytes: 1 << 30,
};

/// Returns the algorithm for a limit of a given size.
type AlgorithmForLimit = fn(u64) -> Algorithm;

/// Bucket and queue are as large as the limit.
const ALGORITHMS: [(&str, AlgorithmForLimit); 7] = [
    ("sliding_log", |_| Algorithm::SlidingLog),
    ("sliding_window", |_| Algorithm::SlidingWindow {
        buckets: 10,
    }),
    ("fixed_window", |_| Algorithm::FixedWindow { offset_us: 0 }),
    ("token_bucket", |requests| Algorithm::TokenBucket {
        burst: requests,
        warm_up_us: 0,
    }),
    // A cold bucket of this size holds as many units as a bucket without a warm-up.
    ("with warm_up", |requests| Algorithm::TokenBucket {
        burst: 3 * requests,
        warm_up_us: HOUR_US,
    }),
    ("leaky_bucket", |_| Algorithm::LeakyBucket {
        max_delay_us: HOUR_US,
    }),
    ("concurrency", |_| Algorithm::Concurrency {
        max_duration_us: 0,
    }),
];

fn main() {
    let server = RedisServer::start();
    println!("{:<16}{:>8}{:>30}{:>30}", "", "", "Redis", "memory");
    println!(
        "{:<16}{:>8}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}",
        "algorithm", "limit", "admitted", "refused", "bytes", "admitted", "refused", "bytes"
    );
    println!(
        "{:<16}{:>8}{:>10}{:>10}{:>10}{:>10}{:>10}",
        "", "", "µs", "µs", "", "ns", "ns"
    );
    for (word, algorithm) in ALGORITHMS {
        for requests in [100, 10_000] {
            let limit = Limit {
                requests,
                per_us: HOUR_US,
                algorithm: algorithm(requests),
            };
            let there = measure_lowest_cost(|| measure_in_redis(&server, &limit));
            let here = measure_lowest_cost(|| measure_in_memory(&limit));
            println!(
                "{word:<16}{requests:>8}{:>10.1}{:>10.1}{:>10}{:>10.0}{:>10.0}{:>10}",
                there.admitted_us,
                there.refused_us,
                there.bytes,
                here.admitted_us * 1e3,
                here.refused_us * 1e3,
                here.bytes
            );
        }
    }
}

struct DecisionCost {
    admitted_us: f64,
    refused_us: f64,
    bytes: u64,
}

fn measure_lowest_cost(mut measure: impl FnMut() -> DecisionCost) -> DecisionCost {
    let rounds = (0..ROUNDS).map(|_| measure());
    let least = rounds.reduce(|a, b| DecisionCost {
        admitted_us: a.admitted_us.min(b.admitted_us),
        refused_us: a.refused_us.min(b.refused_us),
        bytes: b.bytes,
    });
    least.unwrap()
}

/// Enough keys to measure the few requests that a small limit admits.
fn make_keys(limit: &Limit) -> Vec<Key> {
    let names = 0..20_000 / limit.requests;
    let owner = |n: u64| {
        let mut builder = KeyBuilder::new("api");
        builder.push_key_value(Some(format!("user-{n:010}").as_bytes()));
        builder.finish()
    };
    names.map(owner).collect()
}

/// Time of the n-th request. A bucket is filled at once, because an even pace would never fill it.
fn request_time_us(n: u64, limit: &Limit) -> u64 {
    match limit.algorithm {
        Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket { .. } => START_US,
        _ => START_US + n.min(limit.requests) * (HOUR_US - 1) / limit.requests,
    }
}

/// The n-th request, with its own slot.
fn make_charge<'a>(limit: &'a Limit, key: &'a Key, n: u64) -> PolicyCharges<'a> {
    PolicyCharges {
        slot_id: u128::from(n) + 1,
        ..PolicyCharges::new(limit, key, 1)
    }
}

/// Fills the counters from half full to full, then sends as many requests that are refused.
fn measure_in_redis(server: &RedisServer, limit: &Limit) -> DecisionCost {
    server.delete_all_keys();
    let mut connection = server.connection();
    let (script, owners) = (ScriptLibrary::new(KEY_PREFIX), make_keys(limit));
    let program = owners
        .iter()
        .map(|owner| script.script_text(&[make_charge(limit, owner, 0)]))
        .next();
    let _: Value = redis::cmd("SCRIPT")
        .arg("LOAD")
        .arg(program.unwrap())
        .query(&mut connection)
        .unwrap();
    let mut ask = |from: u64| {
        let _: Value = redis::cmd("CONFIG")
            .arg("RESETSTAT")
            .query(&mut connection)
            .unwrap();
        for owner in &owners {
            for start in (from..from + limit.requests / 2).step_by(50) {
                let mut pipe = redis::pipe();
                for n in start..start + 50 {
                    pipe.add_command(script.decide_command(
                        &[make_charge(limit, owner, n)],
                        Some(request_time_us(n, limit)),
                    ));
                }
                let _: Vec<Value> = pipe.query(&mut connection).unwrap();
            }
        }
        script_us_per_call(&mut connection)
    };
    ask(0);
    let admitted_us = ask(limit.requests / 2);
    let refused_us = ask(limit.requests);
    let bytes = owners.first().map(|owner| {
        let name = script.counter_key(CounterRef { limit, key: owner });
        redis::cmd("MEMORY")
            .arg("USAGE")
            .arg(name)
            .arg("SAMPLES")
            .arg(0)
            .query(&mut connection)
            .unwrap()
    });
    DecisionCost {
        admitted_us,
        refused_us,
        bytes: bytes.unwrap(),
    }
}

/// Returns the server's average time per call of the script.
fn script_us_per_call(connection: &mut Connection) -> f64 {
    let text: String = redis::cmd("INFO")
        .arg("commandstats")
        .query(connection)
        .unwrap();
    let line = text
        .lines()
        .find(|line| line.starts_with("cmdstat_evalsha:"))
        .unwrap();
    let (_, rest) = line.split_once("usec_per_call=").unwrap();
    rest.split(',').next().unwrap().parse().unwrap()
}

/// The same measurement for the memory store, without a network.
fn measure_in_memory(limit: &Limit) -> DecisionCost {
    let (clock, hands) = Clock::manual(START_US);
    let (store, owners) = (
        MemoryStore::new(LARGE_MEMORY_SETTINGS, clock),
        make_keys(limit),
    );
    let ask = |from: u64| {
        let start = Instant::now();
        // The clock of this store cannot go back.
        for n in from..from + limit.requests / 2 {
            hands.set_us(request_time_us(n, limit));
            owners
                .iter()
                .for_each(|owner| drop(store.decide(&[make_charge(limit, owner, n)])));
        }
        start.elapsed().as_secs_f64() * 1e6 / (limit.requests / 2 * owners.len() as u64) as f64
    };
    ask(0);
    let admitted_us = ask(limit.requests / 2);
    let refused_us = ask(limit.requests);
    DecisionCost {
        admitted_us,
        refused_us,
        bytes: (store.byte_count() / owners.len()) as u64,
    }
}
