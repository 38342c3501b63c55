//! Measures the CPU time of Redis per refusal that reaches it: each key is refused once, by a
//! policy of its own, beside a global policy that has units left. Compares one server with a
//! cluster, where the two policies are in different slots.
//!
//! Run by `make bench`, or `cargo bench --bench refusals`. Requires redis-server and redis-cli.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_precision_loss,
    reason = "a benchmark talks on stdout and stops at any error"
)]

mod support;

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::RedisServer;
use tidegate::limiter::{Algorithm, Key, KeyBuilder, Limit, PolicyCharges};
use tidegate::store::Store;
use tidegate::store::redis::{RedisSettings, RedisStore, RedisTopology, SharedRedisState};

const KEY_COUNT: usize = 20_000;

const GLOBAL_LIMIT: Limit = Limit {
    requests: 5000,
    per_us: 3_600_000_000,
    algorithm: Algorithm::SlidingLog,
};
const KEY_LIMIT: Limit = Limit {
    requests: 1,
    ..GLOBAL_LIMIT
};

fn main() {
    println!(
        "{:<12} {:>6} {:>14} {:>14} {:>14}",
        "topology", "tasks", "Redis µs each", "calls each", "global units"
    );
    for tasks in [1, 64] {
        let mut costs = Vec::new();
        for topology in [RedisTopology::Standalone, RedisTopology::Cluster] {
            costs.push(measure_refusals(&topology, tasks));
        }
        println!("{:<12} {tasks:>6} {:>14.2}", "ratio", costs[1] / costs[0]);
    }
}

/// Returns the CPU time of Redis per refusal, in µs.
fn measure_refusals(topology: &RedisTopology, tasks: usize) -> f64 {
    let is_cluster = *topology == RedisTopology::Cluster;
    let server = if is_cluster {
        start_cluster()
    } else {
        RedisServer::start()
    };
    let settings = RedisSettings {
        topology: topology.clone(),
        ..server.settings()
    };
    let keys: Arc<Vec<Key>> = Arc::new((0..KEY_COUNT).map(make_user_key).collect());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    // Each key is exhausted by another worker.
    runtime.block_on(async {
        let store = connect(settings.clone()).await;
        for key in keys.iter() {
            let decision = store
                .decide(&[PolicyCharges::new(&KEY_LIMIT, key, 1)])
                .await;
            assert!(decision.unwrap().admitted);
        }
        let global = KeyBuilder::new("global").finish();
        for _ in 0..1000 {
            let decision = store
                .decide(&[PolicyCharges::new(&GLOBAL_LIMIT, &global, 1)])
                .await;
            assert!(decision.unwrap().admitted);
        }
    });
    let (calls, used_us) = (server.count_script_calls(), cpu_time_us(&server));
    let global_units = runtime.block_on(async {
        let store = connect(settings).await;
        let next = Arc::new(AtomicUsize::new(0));
        let refuse = |store: Store, keys: Arc<Vec<Key>>, next: Arc<AtomicUsize>| async move {
            let global = KeyBuilder::new("global").finish();
            while let Some(key) = keys.get(next.fetch_add(1, Ordering::Relaxed)) {
                let own = PolicyCharges::new(&KEY_LIMIT, key, 1);
                let charges = [PolicyCharges::new(&GLOBAL_LIMIT, &global, 1), own];
                assert!(!store.decide(&charges).await.unwrap().admitted);
            }
        };
        let running: Vec<_> = (0..tasks)
            .map(|_| tokio::spawn(refuse(store.clone(), Arc::clone(&keys), Arc::clone(&next))))
            .collect();
        for task in running {
            task.await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        let global = KeyBuilder::new("global").finish();
        let decision = store
            .decide(&[PolicyCharges::new(&GLOBAL_LIMIT, &global, 0)])
            .await;
        5000 - decision.unwrap().statuses().next().unwrap().remaining
    });
    let per_refusal = (cpu_time_us(&server) - used_us) / KEY_COUNT as f64;
    println!(
        "{:<12} {tasks:>6} {per_refusal:>14.1} {:>14.2} {global_units:>14}",
        if is_cluster { "cluster" } else { "standalone" },
        (server.count_script_calls() - calls) / KEY_COUNT as f64
    );
    per_refusal
}

fn make_user_key(number: usize) -> Key {
    let mut key = KeyBuilder::new("user");
    key.push_key_value(Some(number.to_string().as_bytes()));
    key.finish()
}

async fn connect(settings: RedisSettings) -> Store {
    let redis = RedisStore::start(&SharedRedisState::new(settings));
    redis.wait_until_ready().await;
    Store::from_redis(redis)
}

/// A cluster of one master: it has all slots, and a script may use only one of them.
fn start_cluster() -> RedisServer {
    let file = format!("tidegate-bench-nodes-{}.conf", fastrand::u64(..));
    let directory = std::env::temp_dir();
    let server = RedisServer::start_with_args(&[
        "--cluster-enabled",
        "yes",
        "--dir",
        &directory.to_string_lossy(),
        "--cluster-config-file",
        &file,
    ]);
    let port = server.port().to_string();
    let command = |words: &[&str]| {
        let mut cli = Command::new("redis-cli");
        cli.args(["-p", &port]).args(words).stderr(Stdio::null());
        String::from_utf8(cli.output().unwrap().stdout).unwrap()
    };
    command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    let deadline = Instant::now() + Duration::from_secs(10);
    while !command(&["CLUSTER", "INFO"]).contains("cluster_state:ok") {
        assert!(Instant::now() < deadline, "the cluster did not form");
        std::thread::sleep(Duration::from_millis(50));
    }
    // The server keeps the file open, and the next one has another name.
    drop(std::fs::remove_file(directory.join(file)));
    server
}

/// The CPU time that the server has used.
fn cpu_time_us(server: &RedisServer) -> f64 {
    let text: String = redis::cmd("INFO")
        .arg("cpu")
        .query(&mut server.connection())
        .unwrap();
    let seconds = text.lines().filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        ["used_cpu_user", "used_cpu_sys"]
            .contains(&name)
            .then(|| value.trim().parse::<f64>().unwrap())
    });
    seconds.sum::<f64>() * 1e6
}
