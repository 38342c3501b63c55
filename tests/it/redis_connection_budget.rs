//! How many connections an instance opens, and how a fleet reconnects. The figures are stated in
//! `docs/operations/redis.md`.

use crate::support::prelude::*;
use std::net::TcpListener;
use std::thread::JoinHandle;

/// Instances of the fleet, each with one worker.
const FLEET_SIZE: usize = 500;

/// Maximum part of the fleet that connects within any 100 ms.
const MAX_CONNECTS_PER_WINDOW: usize = FLEET_SIZE / 2;
const SPREAD_WINDOW: Duration = Duration::from_millis(100);

/// Workers of one instance in the tests of the budget.
const WORKER_COUNT: usize = 3;

/// Returns the largest number of connects within a window.
fn max_connects_per_window(connected_at: &[Instant]) -> usize {
    let within = |(first, start): (usize, &Instant)| {
        let later = connected_at[first..].iter();
        let in_window = later.take_while(|at| at.duration_since(*start) < SPREAD_WINDOW);
        in_window.count()
    };
    connected_at
        .iter()
        .enumerate()
        .map(within)
        .max()
        .unwrap_or(0)
}

/// Accepts connections on a port and answers nothing. A real server with 500 probes would slow the
/// clients down, and so spread or delay their connects. Returns the times of the connects.
fn accept_silently(port: u16, count: usize) -> JoinHandle<Vec<Instant>> {
    std::thread::spawn(move || {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let accepted = listener.incoming().take(count);
        let accepted = accepted.map(|stream| (Instant::now(), stream.unwrap()));
        let (connected_at, _streams): (Vec<_>, Vec<_>) = accepted.unzip();
        connected_at
    })
}

/// Samples how many connections a server has accepted, until it has accepted this many more.
fn sample_connects(port: u16, count: usize) -> JoinHandle<Vec<Instant>> {
    std::thread::spawn(move || {
        let client = redis::Client::open(("127.0.0.1", port)).unwrap();
        let mut connection = client.get_connection().unwrap();
        let (mut connected_at, mut counted) = (Vec::new(), None);
        while connected_at.len() < count {
            let info = redis::cmd("INFO")
                .arg("stats")
                .query::<String>(&mut connection);
            // The test closes all connections.
            let Ok(info) = info else {
                connection = client.get_connection().unwrap();
                continue;
            };
            let mut lines = info.lines();
            let total = lines.find_map(|line| line.strip_prefix("total_connections_received:"));
            let total: usize = total.unwrap().parse().unwrap();
            let new = total - counted.replace(total).unwrap_or(total);
            connected_at.extend(std::iter::repeat_n(Instant::now(), new));
            std::thread::sleep(Duration::from_millis(2));
        }
        connected_at
    })
}

/// Normal clients of a server, without the one that asks.
async fn client_list(server: &RedisServer) -> Vec<String> {
    let list: String = server.command("CLIENT LIST TYPE normal").await;
    let clients = list.lines().filter(|line| !line.contains("cmd=client"));
    clients.map(str::to_owned).collect()
}

async fn wait_for_thread<T>(thread: &JoinHandle<T>) {
    wait_until_within("all instances to reconnect", 3 * TEST_TIMEOUT, async || {
        thread.is_finished()
    })
    .await;
}

/// Waits until a server has exactly this many clients.
async fn wait_for_clients(server: &RedisServer, expected: usize) {
    wait_until_within(
        format!("{expected} clients"),
        3 * TEST_TIMEOUT,
        async || client_list(server).await.len() == expected,
    )
    .await;
}

/// Starts the workers of one instance. The first one also maintains the membership.
async fn start_workers(settings: RedisSettings) -> Vec<RedisStore> {
    let shared = SharedRedisState::new(settings);
    let mut workers = Vec::new();
    for _ in 0..WORKER_COUNT {
        let worker = RedisStore::start(&shared).join_membership();
        worker.wait_until_ready().await;
        workers.push(worker);
    }
    workers
}

#[tokio::test]
async fn a_fleet_of_500_reconnects_with_jitter_and_one_connection_per_worker() {
    let mut server = RedisServer::start_with(&["--maxclients", "2000"]);
    let settings = RedisSettings {
        initial_instances: u32::try_from(FLEET_SIZE).unwrap(),
        connect_timeout: Duration::from_secs(10),
        timeout: Duration::from_secs(5),
        ..server.settings()
    };
    let mut fleet = Vec::new();
    for _ in 0..FLEET_SIZE {
        let shared = SharedRedisState::new(settings.clone());
        fleet.push((RedisStore::start(&shared), shared));
    }
    wait_for_clients(&server, FLEET_SIZE).await;
    // A connection that lasted a second resets the backoff.
    sleep(Duration::from_millis(1_100)).await;

    // The server stays up, as when a proxy or a failover closes all connections.
    let sampled = sample_connects(server.port(), FLEET_SIZE);
    wait_for_clients(&server, FLEET_SIZE + 1).await;
    let _: u64 = server.command("CLIENT KILL TYPE normal SKIPME yes").await;
    wait_for_thread(&sampled).await;
    let after_close = max_connects_per_window(&sampled.join().unwrap());

    server.kill();
    sleep(Duration::from_millis(1_500)).await;
    let accepted = accept_silently(server.port(), FLEET_SIZE);
    wait_for_thread(&accepted).await;
    let after_restart = max_connects_per_window(&accepted.join().unwrap());

    println!(
        "connects within {SPREAD_WINDOW:?}: {after_close} after a close, {after_restart} after a restart"
    );
    assert!(after_close <= MAX_CONNECTS_PER_WINDOW, "{after_close}");
    assert!(after_restart <= MAX_CONNECTS_PER_WINDOW, "{after_restart}");
    server.restart_async().await;
    wait_for_clients(&server, FLEET_SIZE).await;
    wait_until("all instances to be up", async || {
        fleet.iter().all(|(_, shared)| shared.is_up())
    })
    .await;
}

#[tokio::test]
async fn an_instance_has_one_connection_per_worker() {
    let server = RedisServer::start();
    let workers = start_workers(server.settings()).await;
    wait_for_clients(&server, WORKER_COUNT).await;
    drop(workers);
    wait_for_clients(&server, 0).await;
}

#[tokio::test]
async fn an_instance_has_one_connection_per_worker_and_cluster_master() {
    let cluster = RedisCluster::start().await;
    let workers = start_workers(cluster.settings()).await;
    for node in &cluster.nodes {
        wait_for_clients(node, WORKER_COUNT).await;
    }
    drop(workers);
}

#[tokio::test]
async fn an_instance_has_one_connection_per_worker_to_the_master_and_to_each_sentinel() {
    let mut watched = SentinelDeployment::start(0).await;
    let master_port = watched.master_port().await;
    let workers = start_workers(watched.settings()).await;
    let wanted = (WORKER_COUNT * watched.sentinels.len(), WORKER_COUNT);
    wait_until(format!("{wanted:?} connections"), async || {
        let mut watchers = 0;
        for sentinel in &watched.sentinels {
            let list: String = sentinel.command("CLIENT LIST").await;
            // Sentinels are clients of each other, too.
            let is_watcher = |line: &&str| line.contains("get-master-addr-by-name");
            watchers += list.lines().filter(is_watcher).count();
        }
        let master = client_list(watched.server_by_port(master_port)).await;
        let is_worker = |line: &&String| !line.contains("name=sentinel-");
        (watchers, master.iter().filter(is_worker).count()) == wanted
    })
    .await;
    drop(workers);
}
