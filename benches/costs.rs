//! What one decision costs, and one full key: for each algorithm the server's time in the script, the memory store's
//! time, and the bytes in both. Logs and windows are filled evenly over their period, by times that are given: the script's question
//! for the time, a fraction of a microsecond, is left out. The least of some rounds, so that what else the machine does
//! shows as little as it can.
//!
//! Run by `make bench`, or `cargo bench --bench costs`. Needs redis-server and redis-cli.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark talks on stdout and stops at any error"
)]

mod support;

use redis::{Connection, Value};
use std::time::Instant;
use support::{PREFIX, Server};
use tidegate::clock::Clock;
use tidegate::limiter::{Algorithm, Charge, Key, KeyBuilder, Limit};
use tidegate::store::redis::Script;
use tidegate::store::{Memory, MemorySettings};

const HOUR_US: u64 = 3_600_000_000;
/// An hour of the year 2100: no key expires while it is measured.
const START_US: u64 = 4_102_444_800_000_000;
const ROUNDS: usize = 5;
const ROOMY: MemorySettings = MemorySettings {
    max_keys: 1000,
    max_bytes: 1 << 30,
};

/// An algorithm for a limit of so many.
type ForLimit = fn(u64) -> Algorithm;

/// With bucket and line as large as the limit.
const ALGORITHMS: [(&str, ForLimit); 7] = [
    ("sliding_log", |_| Algorithm::SlidingLog),
    ("sliding_window", |_| Algorithm::SlidingWindow {
        buckets: 10,
    }),
    ("fixed_window", |_| Algorithm::FixedWindow { offset_us: 0 }),
    ("token_bucket", |requests| Algorithm::TokenBucket {
        burst: requests,
        warm_up_us: 0,
    }),
    // Cold, it holds as many as the others.
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
    let server = Server::start();
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
            let there = best(|| in_redis(&server, &limit));
            let here = best(|| in_memory(&limit));
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

struct Cost {
    admitted_us: f64,
    refused_us: f64,
    bytes: u64,
}

fn best(mut measure: impl FnMut() -> Cost) -> Cost {
    let rounds = (0..ROUNDS).map(|_| measure());
    let least = rounds.reduce(|a, b| Cost {
        admitted_us: a.admitted_us.min(b.admitted_us),
        refused_us: a.refused_us.min(b.refused_us),
        bytes: b.bytes,
    });
    least.unwrap()
}

/// So many keys that the few asks of a small limit can be measured.
fn owners(limit: &Limit) -> Vec<Key> {
    let names = 0..20_000 / limit.requests;
    let owner = |n: u64| {
        let mut builder = KeyBuilder::new("api");
        builder.part(Some(format!("user-{n:010}").as_bytes()));
        builder.finish()
    };
    names.map(owner).collect()
}

/// When the n-th request comes. A bucket is filled at once: at an even pace it never would be.
fn time_us(n: u64, limit: &Limit) -> u64 {
    match limit.algorithm {
        Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket { .. } => START_US,
        _ => START_US + n.min(limit.requests) * (HOUR_US - 1) / limit.requests,
    }
}

/// The n-th request, which has a slot of its own.
fn charge<'a>(limit: &'a Limit, key: &'a Key, n: u64) -> Charge<'a> {
    Charge {
        slot: u128::from(n) + 1,
        ..Charge::new(limit, key, 1)
    }
}

/// From half full to full, then as often refused.
fn in_redis(server: &Server, limit: &Limit) -> Cost {
    server.flush();
    let mut connection = server.connection();
    let (script, owners) = (Script::new(PREFIX), owners(limit));
    let program = owners
        .iter()
        .map(|owner| script.text(&[charge(limit, owner, 0)]))
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
                    pipe.add_command(
                        script.decide(&[charge(limit, owner, n)], Some(time_us(n, limit))),
                    );
                }
                let _: Vec<Value> = pipe.query(&mut connection).unwrap();
            }
        }
        spent_us(&mut connection)
    };
    ask(0);
    let admitted_us = ask(limit.requests / 2);
    let refused_us = ask(limit.requests);
    let bytes = owners.first().map(|owner| {
        let name = script.key(&charge(limit, owner, 0));
        redis::cmd("MEMORY")
            .arg("USAGE")
            .arg(name)
            .arg("SAMPLES")
            .arg(0)
            .query(&mut connection)
            .unwrap()
    });
    Cost {
        admitted_us,
        refused_us,
        bytes: bytes.unwrap(),
    }
}

/// What the server says that a call of the script has taken on average.
fn spent_us(connection: &mut Connection) -> f64 {
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

/// The same without a way to go.
fn in_memory(limit: &Limit) -> Cost {
    let (clock, hands) = Clock::manual(START_US);
    let (store, owners) = (Memory::new(ROOMY, clock), owners(limit));
    let ask = |from: u64| {
        let start = Instant::now();
        // The clock of this store does not go back.
        for n in from..from + limit.requests / 2 {
            hands.set_us(time_us(n, limit));
            owners
                .iter()
                .for_each(|owner| drop(store.decide(&[charge(limit, owner, n)])));
        }
        start.elapsed().as_secs_f64() * 1e6 / (limit.requests / 2 * owners.len() as u64) as f64
    };
    ask(0);
    let admitted_us = ask(limit.requests / 2);
    let refused_us = ask(limit.requests);
    Cost {
        admitted_us,
        refused_us,
        bytes: (store.bytes() / owners.len()) as u64,
    }
}
