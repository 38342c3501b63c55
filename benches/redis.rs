//! Measures decisions per second through one worker's connection, next to redis-benchmark with the
//! same script and arguments in the same run. The ratio shows the overhead or saving of the client,
//! independent of the machine.
//!
//! Run by `make bench`, or `cargo bench --bench redis`. Requires redis-server and redis-benchmark.
//! See benches/SCALE.md for how to read the results.

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
use support::{KEY_PREFIX, RedisServer};
use tidegate::limiter::{Algorithm, Key, KeyBuilder, LeaseTerms, Limit, PolicyCharges};
use tidegate::store::Store;
use tidegate::store::redis::{RedisStore, ScriptLibrary, SharedRedisState};

const ROUND_LENGTH: Duration = Duration::from_secs(2);
const KEY_COUNT: u32 = 10_000;

fn main() {
    let server = RedisServer::start();
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
        // A hot key is mostly refused; many keys are mostly admitted.
        let limit = Limit {
            requests: 1000,
            per_us: 1_000_000,
            algorithm,
        };
        for keys in [1, KEY_COUNT] {
            let peer = measure_redis_benchmark(&server, &limit, keys);
            let name = if keys == 1 { "hot" } else { "10,000" };
            for tasks in [1, 64, 256] {
                print_row(
                    word,
                    name,
                    tasks,
                    peer,
                    &measure_worker(&server, &limit, keys, tasks, DecisionTarget::Redis),
                );
            }
        }
        // The key is exhausted for the whole round, so the deny cache decides.
        let limit = Limit {
            requests: 100,
            per_us: 60_000_000,
            ..limit
        };
        let peer = measure_redis_benchmark(&server, &limit, 1);
        print_row(
            word,
            "exhausted",
            64,
            peer,
            &measure_worker(&server, &limit, 1, 64, DecisionTarget::Store),
        );
    }
    measure_leased(&server);
}

/// A hot key that is never exhausted, through the whole store.
fn measure_leased(server: &RedisServer) {
    let algorithm = Algorithm::SlidingWindow { buckets: 10 };
    let limit = Limit {
        requests: 1_000_000_000,
        per_us: 1_000_000,
        algorithm,
    };
    let peer = measure_redis_benchmark(server, &limit, 1);
    println!();
    println!(
        "{:<13} {:>6} {:>6} {:>10} {:>10} {:>6} {:>14}",
        "leased key", "size", "tasks", "checks/s", "RB -P 64", "ratio", "calls per 100"
    );
    for size in [None, Some(50), Some(1000)] {
        server.delete_all_keys();
        let before = count_script_calls(server);
        let lease = LeaseTerms {
            size,
            ttl_us: 100_000,
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let rate = runtime.block_on(async {
            let redis = RedisStore::start(&SharedRedisState::new(server.settings()));
            redis.wait_until_ready().await;
            let (store, started) = (Store::from_redis(redis), Instant::now());
            let end = started + ROUND_LENGTH;
            let tasks: Vec<_> = (0..64)
                .map(|_| tokio::spawn(decide_leased_until(store.clone(), limit, lease, end)))
                .collect();
            let mut checks = 0.0;
            for task in tasks {
                checks += f64::from(task.await.unwrap());
            }
            checks / started.elapsed().as_secs_f64()
        });
        let calls = f64::from(count_script_calls(server) - before);
        let size = size.map_or_else(|| "auto".to_owned(), |size| size.to_string());
        println!(
            "{:<13} {size:>6} {:>6} {rate:>10.0} {peer:>10.0} {:>6.2} {:>14.3}",
            "",
            64,
            rate / peer,
            calls * 100.0 / (rate * ROUND_LENGTH.as_secs_f64())
        );
    }
}

/// Script calls so far.
fn count_script_calls(server: &RedisServer) -> u32 {
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

async fn decide_leased_until(store: Store, limit: Limit, lease: LeaseTerms, end: Instant) -> u32 {
    let (mut checks, owner) = (0, make_key(0));
    loop {
        let sent_at = tokio::time::Instant::now();
        if sent_at.into_std() >= end {
            return checks;
        }
        let charge = PolicyCharges {
            lease: Some(lease),
            ..PolicyCharges::new(&limit, &owner, 1)
        };
        store.decide_with_source(&[charge], sent_at).await.unwrap();
        checks += 1;
        // Yields, because a request that never waits would block other tasks.
        if checks % 64 == 0 {
            tokio::task::yield_now().await;
        }
    }
}

fn print_row(word: &str, keys: &str, tasks: u32, peer: f64, measured: &WorkerMeasurement) {
    println!(
        "{word:<14} {keys:>9} {tasks:>6} {:>10.0} {peer:>10.0} {:>6.2} {:>8.2} {:>8.2} {:>8.1}",
        measured.checks_per_second,
        measured.checks_per_second / peer,
        measured.client_us,
        measured.server_us,
        measured.checks_per_call
    );
}

struct WorkerMeasurement {
    checks_per_second: f64,
    client_us: f64,
    server_us: f64,
    /// Checks that one call was successful.
    checks_per_call: f64,
}

/// With the deny cache, or without it, so that every check reaches Redis.
#[derive(Clone, Copy)]
enum DecisionTarget {
    Redis,
    Store,
}

/// Runs as the proxy does: a current_thread runtime, one connection, many concurrent requests.
fn measure_worker(
    server: &RedisServer,
    limit: &Limit,
    keys: u32,
    tasks: u32,
    way: DecisionTarget,
) -> WorkerMeasurement {
    server.delete_all_keys();
    let owners: Arc<[Key]> = (0..keys).map(make_key).collect();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let redis = RedisStore::start(&SharedRedisState::new(server.settings()));
        redis.wait_until_ready().await;
        let calls = server.count_script_calls();
        let (started, client, busy) = (
            Instant::now(),
            cpu_seconds(std::process::id()),
            cpu_seconds(server.pid()),
        );
        let store = Store::from_redis(redis.clone());
        let way = || match way {
            DecisionTarget::Redis => (redis.clone(), None),
            DecisionTarget::Store => (redis.clone(), Some(store.clone())),
        };
        let work = |n| {
            decide_until(
                way(),
                *limit,
                Arc::clone(&owners),
                n,
                started + ROUND_LENGTH,
            )
        };
        let tasks: Vec<_> = (0..tasks).map(|n| tokio::spawn(work(n))).collect();
        let mut checks = 0.0;
        for task in tasks {
            checks += f64::from(task.await.unwrap());
        }
        let took = started.elapsed().as_secs_f64();
        let per_check = |from: f64, pid: u32| (cpu_seconds(pid) - from) * 1e6 / checks;
        WorkerMeasurement {
            checks_per_second: checks / took,
            client_us: per_check(client, std::process::id()),
            server_us: per_check(busy, server.pid()),
            checks_per_call: checks / (server.count_script_calls() - calls),
        }
    })
}

async fn decide_until(
    (redis, store): (RedisStore, Option<Store>),
    limit: Limit,
    owners: Arc<[Key]>,
    task: u32,
    end: Instant,
) -> u32 {
    let (mut checks, mut next) = (0, usize::try_from(task).unwrap().wrapping_mul(7919));
    loop {
        let sent_at = tokio::time::Instant::now();
        if sent_at.into_std() >= end {
            return checks;
        }
        let charges = [PolicyCharges::new(&limit, &owners[next % owners.len()], 1)];
        match &store {
            None => drop(redis.decide(&charges, sent_at).await.unwrap()),
            Some(store) => drop(store.decide_with_source(&charges, sent_at).await.unwrap()),
        }
        // Yields, because decisions from memory would never let other tasks run.
        tokio::task::consume_budget().await;
        // A prime, so that tasks walk through the keys without colliding.
        next = next.wrapping_add(104_729);
        checks += 1;
    }
}

fn make_key(n: u32) -> Key {
    let mut builder = KeyBuilder::new("api");
    builder.push_key_value(Some(format!("{n:012}").as_bytes()));
    builder.finish()
}

/// Measures redis-benchmark with 64 commands in flight per connection.
fn measure_redis_benchmark(server: &RedisServer, limit: &Limit, keys: u32) -> f64 {
    server.delete_all_keys();
    let (script, owner) = (ScriptLibrary::new(KEY_PREFIX), make_key(0));
    let charge = [PolicyCharges::new(limit, &owner, 1)];
    let load = Command::new("redis-cli")
        .args([
            "-p",
            &server.port().to_string(),
            "SCRIPT",
            "LOAD",
            script.script_text(&charge),
        ])
        .stdout(Stdio::null())
        .status();
    assert!(load.unwrap().success());
    let command = script.decide_command(&charge, None);
    let mut args: Vec<String> = command
        .args_iter()
        .filter_map(|arg| match arg {
            redis::Arg::Simple(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            _ => None,
        })
        .collect();
    if keys > 1 {
        // redis-benchmark replaces the placeholder with twelve digits.
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
    rate.unwrap_or_else(|| panic_on_output(&text))
}

#[allow(clippy::panic, reason = "a benchmark stops at any error")]
fn panic_on_output(text: &str) -> f64 {
    panic!("redis-benchmark says: {text}")
}

/// Returns the CPU seconds that a process has used, in user and system mode.
fn cpu_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // The fields after the name, which may contain any character: utime and stime are the 12th and
    // 13th.
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
