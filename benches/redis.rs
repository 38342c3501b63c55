//! Decisions per second through one worker's connection, beside redis-benchmark with the same script and
//! arguments in the same run: the ratio says what the client leaves unused or saves, whatever the machine.
//!
//! Run by `make bench`, or `cargo bench --bench redis`. Needs redis-server and redis-benchmark.
//! docs/PERFORMANCE.md says how to read it.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a benchmark talks on stdout and stops at any error"
)]

mod support;

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::{PREFIX, Server};
use tidegate::limiter::{Algorithm, Charge, Key, KeyBuilder, Lease, Limit};
use tidegate::store::Store;
use tidegate::store::redis::{Redis, Script, Shared};

const ROUND: Duration = Duration::from_secs(2);
const KEYS: u32 = 10_000;

fn main() {
    let server = Server::start();
    println!(
        "{:<14} {:>9} {:>6} {:>10} {:>10} {:>6} {:>8} {:>8} {:>8}",
        "algorithm", "keys", "tasks", "checks/s", "RB -P 64", "ratio", "client", "server", "checks"
    );
    println!("{:>67} {:>8} {:>8}", "µs/check", "µs/check", "per call");
    let sub_windows = Algorithm::SlidingWindow { buckets: 10 };
    for (word, algorithm) in [
        ("sliding_log", Algorithm::SlidingLog),
        ("sliding_window", sub_windows),
        ("fixed_window", Algorithm::FixedWindow { offset_us: 0 }),
        (
            "token_bucket",
            Algorithm::TokenBucket {
                burst: 1000,
                warm_up_us: 0,
            },
        ),
    ] {
        // A hot key is refused most of the time, the many are admitted.
        let limit = Limit {
            requests: 1000,
            per_us: 1_000_000,
            algorithm,
        };
        for keys in [1, KEYS] {
            let peer = peer_rate(&server, &limit, keys);
            let name = if keys == 1 { "hot" } else { "10,000" };
            for tasks in [1, 64, 256] {
                row(
                    word,
                    name,
                    tasks,
                    peer,
                    &worker_rate(&server, &limit, keys, tasks, Way::Redis),
                );
            }
        }
        // Spent for the whole of the round: answered by the deny cache.
        let limit = Limit {
            requests: 100,
            per_us: 60_000_000,
            ..limit
        };
        let peer = peer_rate(&server, &limit, 1);
        row(
            word,
            "exhausted",
            64,
            peer,
            &worker_rate(&server, &limit, 1, 64, Way::Store),
        );
    }
    leased(&server);
}

/// A hot key that is never exhausted, through the whole store.
fn leased(server: &Server) {
    let algorithm = Algorithm::SlidingWindow { buckets: 10 };
    let limit = Limit {
        requests: 1_000_000_000,
        per_us: 1_000_000,
        algorithm,
    };
    let peer = peer_rate(server, &limit, 1);
    println!();
    println!(
        "{:<13} {:>6} {:>6} {:>10} {:>10} {:>6} {:>14}",
        "leased key", "size", "tasks", "checks/s", "RB -P 64", "ratio", "calls per 100"
    );
    for size in [None, Some(50), Some(1000)] {
        server.flush();
        let before = calls(server);
        let lease = Lease {
            size,
            ttl_us: 100_000,
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let rate = runtime.block_on(async {
            let redis = Redis::start(&Shared::new(server.settings()));
            redis.first_ready().await;
            let (store, started) = (Store::redis(redis), Instant::now());
            let end = started + ROUND;
            let tasks: Vec<_> = (0..64)
                .map(|_| tokio::spawn(work_leased(store.clone(), limit, lease, end)))
                .collect();
            let mut checks = 0.0;
            for task in tasks {
                checks += f64::from(task.await.unwrap());
            }
            checks / started.elapsed().as_secs_f64()
        });
        let calls = f64::from(calls(server) - before);
        let size = size.map_or_else(|| "auto".to_owned(), |size| size.to_string());
        println!(
            "{:<13} {size:>6} {:>6} {rate:>10.0} {peer:>10.0} {:>6.2} {:>14.3}",
            "",
            64,
            rate / peer,
            calls * 100.0 / (rate * ROUND.as_secs_f64())
        );
    }
}

/// Calls of programs so far.
fn calls(server: &Server) -> u32 {
    let text: String = redis::cmd("INFO")
        .arg("commandstats")
        .query(&mut server.connection())
        .unwrap();
    let calls = text
        .split("cmdstat_evalsha:calls=")
        .nth(1)
        .and_then(|rest| rest.split(',').next());
    calls.map_or(0, |calls| calls.parse().unwrap())
}

async fn work_leased(store: Store, limit: Limit, lease: Lease, end: Instant) -> u32 {
    let (mut checks, owner) = (0, owner(0));
    loop {
        let asked = tokio::time::Instant::now();
        if asked.into_std() >= end {
            return checks;
        }
        let charge = Charge {
            lease: Some(lease),
            ..Charge::new(&limit, &owner, 1)
        };
        store.answer(&[charge], asked).await.unwrap();
        checks += 1;
        // A request that waits for nothing still lets others in between.
        if checks % 64 == 0 {
            tokio::task::yield_now().await;
        }
    }
}

fn row(word: &str, keys: &str, tasks: u32, peer: f64, measured: &Measured) {
    println!(
        "{word:<14} {keys:>9} {tasks:>6} {:>10.0} {peer:>10.0} {:>6.2} {:>8.2} {:>8.2} {:>8.1}",
        measured.rate,
        measured.rate / peer,
        measured.client_us,
        measured.server_us,
        measured.per_call
    );
}

struct Measured {
    rate: f64,
    client_us: f64,
    server_us: f64,
    /// Checks that one call has answered.
    per_call: f64,
}

/// With the deny cache in front, or without: then every check goes to Redis.
#[derive(Clone, Copy)]
enum Way {
    Redis,
    Store,
}

/// As the proxy does it: a current_thread runtime, one connection, many requests at once.
fn worker_rate(server: &Server, limit: &Limit, keys: u32, tasks: u32, way: Way) -> Measured {
    server.flush();
    let owners: Arc<[Key]> = (0..keys).map(owner).collect();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let redis = Redis::start(&Shared::new(server.settings()));
        redis.first_ready().await;
        let calls = server.calls();
        let (started, client, busy) = (Instant::now(), cpu(std::process::id()), cpu(server.pid()));
        let store = Store::redis(redis.clone());
        let way = || match way {
            Way::Redis => (redis.clone(), None),
            Way::Store => (redis.clone(), Some(store.clone())),
        };
        let work = |n| work(way(), *limit, Arc::clone(&owners), n, started + ROUND);
        let tasks: Vec<_> = (0..tasks).map(|n| tokio::spawn(work(n))).collect();
        let mut checks = 0.0;
        for task in tasks {
            checks += f64::from(task.await.unwrap());
        }
        let took = started.elapsed().as_secs_f64();
        let per_check = |from: f64, pid: u32| (cpu(pid) - from) * 1e6 / checks;
        Measured {
            rate: checks / took,
            client_us: per_check(client, std::process::id()),
            server_us: per_check(busy, server.pid()),
            per_call: checks / (server.calls() - calls),
        }
    })
}

async fn work(
    (redis, store): (Redis, Option<Store>),
    limit: Limit,
    owners: Arc<[Key]>,
    task: u32,
    end: Instant,
) -> u32 {
    let (mut checks, mut next) = (0, usize::try_from(task).unwrap().wrapping_mul(7919));
    loop {
        let asked = tokio::time::Instant::now();
        if asked.into_std() >= end {
            return checks;
        }
        let charges = [Charge::new(&limit, &owners[next % owners.len()], 1)];
        match &store {
            None => drop(redis.decide(&charges, asked).await.unwrap()),
            Some(store) => drop(store.answer(&charges, asked).await.unwrap()),
        }
        // Who is answered from memory would never let the others run.
        tokio::task::consume_budget().await;
        // Prime, so that tasks walk through the keys without meeting.
        next = next.wrapping_add(104_729);
        checks += 1;
    }
}

fn owner(n: u32) -> Key {
    let mut builder = KeyBuilder::new("api");
    builder.part(Some(format!("{n:012}").as_bytes()));
    builder.finish()
}

/// What redis-benchmark gets with 64 commands in flight on a connection.
fn peer_rate(server: &Server, limit: &Limit, keys: u32) -> f64 {
    server.flush();
    let (script, owner) = (Script::new(PREFIX), owner(0));
    let charge = Charge::new(limit, &owner, 1);
    let load = Command::new("redis-cli")
        .args([
            "-p",
            &server.port().to_string(),
            "SCRIPT",
            "LOAD",
            script.text(&[charge]),
        ])
        .stdout(Stdio::null())
        .status();
    assert!(load.unwrap().success());
    let command = script.decide(&[charge], None);
    let mut args: Vec<String> = command
        .args_iter()
        .filter_map(|arg| match arg {
            redis::Arg::Simple(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            _ => None,
        })
        .collect();
    if keys > 1 {
        // redis-benchmark fills in twelve digits.
        args.iter_mut()
            .for_each(|arg| *arg = arg.replace("000000000000", "__rand_int__"));
    }
    let output = Command::new("redis-benchmark")
        .args([
            "-p",
            &server.port().to_string(),
            "-P",
            "64",
            "-c",
            "4",
            "-n",
            "200000",
            "--csv",
        ])
        .args(["-r", &keys.to_string()])
        .args(args)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let rate = text
        .lines()
        .last()
        .and_then(|line| line.split("\",\"").nth(1)?.parse().ok());
    rate.unwrap_or_else(|| unreadable(&text))
}

#[allow(clippy::panic, reason = "a benchmark stops at any error")]
fn unreadable(text: &str) -> f64 {
    panic!("redis-benchmark says: {text}")
}

/// CPU seconds that a process has used, in and out of the kernel.
fn cpu(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // After the name, which may hold anything: utime and stime are the 12th and 13th.
    let ticks = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .skip(11)
        .take(2);
    ticks
        .map(|ticks| ticks.parse::<f64>().unwrap())
        .sum::<f64>()
        / 100.0
}
