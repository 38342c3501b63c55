//! `on_store_failure = "local"`: several proxies continue without their Redis, and return to it.

mod flapping;
mod partial_recovery;
mod restart;

use crate::support::cluster::initial_node_for_name;
use crate::support::prelude::*;
use crate::support::proxy::Setup;

const LIMIT_UNITS: usize = 30;
const LIMIT_PERIOD: Duration = Duration::from_secs(1);
const CLIENT_COUNT: usize = 9;

/// How long instances may take to notice joins and leaves. Departed instances leave by timeout.
const MEMBERSHIP_TIMEOUT: Duration = Duration::from_secs(20);

fn build_proxy(redis_port: u16, policies: &str) -> Setup {
    build_proxy_with_redis(
        &format!("url = \"redis://127.0.0.1:{redis_port}/0\""),
        policies,
    )
}

/// With configuration lines for Redis.
fn build_proxy_with_redis(redis: &str, policies: &str) -> Setup {
    Proxy::setup(&format!(
        r#"
listen = {{ threads = 2 }}
log = {{ access = "off" }}
defaults = {{ on_store_failure = "local" }}
[store]
kind = "redis"
[store.redis]
{redis}
key_prefix = "shop"
instances = 4
timeout = "500ms"
{policies}
"#
    ))
}

/// A server that keeps its data over [`RedisServer::kill`] and a restart.
fn start_persistent_redis() -> RedisServer {
    RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"])
}

async fn start_proxy(redis_port: u16, policies: &str, upstream: SocketAddr) -> Proxy {
    build_proxy(redis_port, policies)
        .upstream(upstream)
        .start()
        .await
}

/// Waits until a proxy counts this many instances.
async fn wait_for_instance_count(proxy: &Proxy, instances: f64) {
    let is_reached = async || proxy.read_metric("tidegate_instances").await == instances;
    wait_until_within(
        format!("{instances} instances"),
        MEMBERSHIP_TIMEOUT,
        is_reached,
    )
    .await;
}

/// An admitted request. It was decided between these two times.
#[derive(Clone, Copy, Debug)]
struct AdmittedRequest {
    sent: Instant,
    answered: Instant,
}

/// Clients that send to all proxies continuously.
struct FleetLoad {
    admitted: Arc<Mutex<Vec<AdmittedRequest>>>,
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<usize>>,
}

impl FleetLoad {
    fn start(proxies: &[Proxy], target: &str) -> Self {
        let (admitted, stop): (Arc<Mutex<Vec<AdmittedRequest>>>, Arc<AtomicBool>) =
            Default::default();
        let client = |n: usize| {
            let (admitted, stop) = (Arc::clone(&admitted), Arc::clone(&stop));
            tokio::spawn(send_until_stopped(
                proxies[n % proxies.len()].address,
                target.to_owned(),
                admitted,
                stop,
            ))
        };
        let clients = (0..CLIENT_COUNT).map(client).collect();
        Self {
            admitted,
            stop,
            clients,
        }
    }

    /// Runs for this time. Fails if a client received an unexpected response.
    async fn run_for(&self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            assert!(
                !self.clients.iter().any(JoinHandle::is_finished),
                "a client failed"
            );
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn finish(self) -> (Vec<AdmittedRequest>, usize) {
        self.stop.store(true, Ordering::Relaxed);
        let mut refused = 0;
        for client in self.clients {
            refused += client.await.unwrap();
        }
        let mut admitted = self.admitted.lock().unwrap().clone();
        admitted.sort_by_key(|admitted| admitted.sent);
        (admitted, refused)
    }
}

async fn send_until_stopped(
    address: SocketAddr,
    target: String,
    all: Arc<Mutex<Vec<AdmittedRequest>>>,
    stop: Arc<AtomicBool>,
) -> usize {
    let (mut client, mut refused) = (RawClient::connect(address).await, 0);
    let request = format!("GET {target} HTTP/1.1\r\nHost: shop.example\r\n\r\n");
    while !stop.load(Ordering::Relaxed) {
        let sent = Instant::now();
        let reply = client.request(&request).await;
        match reply.status {
            200 => all.lock().unwrap().push(AdmittedRequest {
                sent,
                answered: Instant::now(),
            }),
            429 => {
                assert!(reply.header("retry-after").is_some(), "{reply:?}");
                refused += 1;
            }
            other => panic!("{other}: {}", reply.text()),
        }
        sleep(Duration::from_millis(5)).await;
    }
    refused
}

/// The largest number of requests that were certainly admitted within one period.
fn max_admitted_in_a_period(admitted: &[AdmittedRequest]) -> usize {
    let within = |first: &AdmittedRequest| {
        let inside = |one: &&AdmittedRequest| {
            one.sent >= first.sent && one.answered < first.sent + LIMIT_PERIOD
        };
        admitted.iter().filter(inside).count()
    };
    admitted.iter().map(within).max().unwrap_or(0)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RedisFault {
    /// The server continues with its data, and possibly executes commands received meanwhile.
    Paused,
    /// The server restarts empty.
    Killed,
}

/// A policy that matches everything.
fn catch_all_policy(name: &str, beside: &str) -> String {
    format!(
        "[[policy]]\nname = \"{name}\"\nlimit = {{ requests = {LIMIT_UNITS}, per = \"1s\" }}\n{beside}"
    )
}

/// Loads three proxies before, during and after an outage. The outage lasts half of
/// `TIDEGATE_TEST_SECONDS`, or 3 s by default.
async fn check_limit_through_outage(fault: RedisFault, policy: &str) {
    let seconds =
        std::env::var("TIDEGATE_TEST_SECONDS").map_or(6, |seconds| seconds.parse().unwrap());
    let length = Duration::from_secs(seconds) / 2;
    let (mut server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let mut proxies = Vec::new();
    for _ in 0..3 {
        proxies.push(start_proxy(server.port(), policy, upstream.address).await);
    }
    for proxy in &proxies {
        wait_for_instance_count(proxy, 3.0).await;
    }
    let load = FleetLoad::start(&proxies, "/");
    load.run_for(2 * LIMIT_PERIOD).await;
    match fault {
        RedisFault::Paused => server.pause(),
        RedisFault::Killed => server.kill(),
    }
    let began = Instant::now();
    load.run_for(length).await;
    match fault {
        RedisFault::Paused => server.resume(),
        RedisFault::Killed => server.restart_async().await,
    }
    let healed = Instant::now();
    let mut degraded = 0.0;
    for proxy in &proxies {
        degraded += proxy
            .read_metric("tidegate_degraded_total{policy=\"hot\",outcome=\"local_allowed\"}")
            .await;
    }
    load.run_for(5 * LIMIT_PERIOD).await;
    let (admitted, refused) = load.finish().await;

    let count = |from: Instant, to: Instant| {
        admitted
            .iter()
            .filter(|one| one.sent >= from && one.answered < to)
            .count()
    };
    let items = admitted.iter();
    let since: Vec<AdmittedRequest> = items.copied().filter(|one| one.sent >= began).collect();
    let windows = length.as_secs_f64() / LIMIT_PERIOD.as_secs_f64();
    let after: Vec<usize> = (0..4u32)
        .map(|n| count(healed + LIMIT_PERIOD * n, healed + LIMIT_PERIOD * (n + 1)))
        .collect();
    println!(
        "{fault:?} for {length:?}: {} admitted in it ({} by themselves), at most {} in a window of the limit of {LIMIT_UNITS}, \
         {} across its begin; in the seconds after it {after:?}; {refused} refused",
        count(began, healed),
        degraded,
        max_admitted_in_a_period(&since),
        max_admitted_in_a_period(&admitted),
    );
    assert!(
        refused > 100,
        "only {refused} refusals: the load was too low"
    );
    assert!(
        max_admitted_in_a_period(&since) <= LIMIT_UNITS,
        "in one period since the fault: {}",
        max_admitted_in_a_period(&since)
    );
    assert!(
        max_admitted_in_a_period(&admitted) <= 2 * LIMIT_UNITS,
        "in one period across the start of the fault: {}",
        max_admitted_in_a_period(&admitted)
    );
    let in_outage = count(began, healed);
    assert!(
        in_outage as f64 >= (windows - 1.5) * LIMIT_UNITS as f64 * 0.8,
        "too few admitted during the outage: {in_outage}"
    );
    assert!(
        after.iter().skip(1).all(|count| *count >= LIMIT_UNITS / 2),
        "Redis did not decide again: {after:?}"
    );
    for proxy in &proxies {
        assert_eq!(proxy.read_metric("tidegate_store_up").await, 1.0);
    }
}

#[tokio::test]
async fn three_proxies_keep_the_limit_while_redis_hangs_and_after() {
    check_limit_through_outage(RedisFault::Paused, &catch_all_policy("hot", "")).await;
}

#[tokio::test]
async fn three_proxies_keep_the_limit_while_redis_is_down_and_after_it_restarts_empty() {
    check_limit_through_outage(RedisFault::Killed, &catch_all_policy("hot", "")).await;
}

/// Leased units at the start of the outage are used up. A second policy is leased too, and fails
/// open.
#[tokio::test]
async fn three_proxies_with_leases_keep_the_limit_through_an_outage() {
    let lease = "lease = { size = 4, ttl = \"100ms\" }\n";
    let beside = "[[policy]]\nname = \"beside\"\nlimit = { requests = 5000, per = \"1s\" }\n\
                  on_store_failure = \"open\"\n";
    check_limit_through_outage(
        RedisFault::Paused,
        &(catch_all_policy("hot", lease) + beside + lease),
    )
    .await;
}

#[tokio::test]
async fn leased_units_count_towards_the_local_share() {
    let (server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let policy = "[[policy]]\nname = \"p\"\nlimit = { requests = 30, per = \"1h\" }\n\
                  lease = { size = 5, ttl = \"30m\" }";
    let mut proxies = Vec::new();
    for _ in 0..3 {
        proxies.push(start_proxy(server.port(), policy, upstream.address).await);
    }
    for proxy in &proxies {
        wait_for_instance_count(proxy, 3.0).await;
        assert_eq!(proxy.get("/").await.status, 200);
    }
    server.pause();
    let mut passed = 3;
    for proxy in &proxies {
        let statuses = proxy.get_statuses("/", 40).await;
        let own = statuses.iter().filter(|status| **status == 200).count();
        assert!(own >= 5, "the leased units were not used: {statuses:?}");
        assert!(
            statuses.iter().all(|status| [200, 429].contains(status)),
            "{statuses:?}"
        );
        passed += own;
    }
    assert!(passed <= 30, "{passed} of 30");
    server.resume();
}

/// A hanging cluster node affects only its own keys. They continue by local shares, for longer than
/// silent instances are counted. Afterwards they get no second quota, not even from an instance
/// that had no traffic for them. Redis decides all other keys throughout, whatever the load.
#[tokio::test]
async fn one_node_of_a_cluster_hangs() {
    let (cluster, upstream) = (RedisCluster::start().await, Upstream::echo().await);
    // The membership set is on another node.
    let counted = initial_node_for_name("shop:v1:instances");
    let names = [1, 2].map(|other| {
        let mut names = (0..).map(|number| format!("p{number}"));
        names
            .find(|name| initial_node(&KeyBuilder::new(name).finish()) == (counted + other) % 3)
            .unwrap()
    });
    let policy =
        |name: &String| catch_all_policy(name, &format!("match = {{ path = \"/{name}\" }}\n"));
    let policies = names.each_ref().map(policy).concat();
    let mut proxies = Vec::new();
    for _ in 0..3 {
        let proxy = build_proxy_with_redis(&cluster.config_lines(), &policies)
            .upstream(upstream.address)
            .start()
            .await;
        proxies.push(proxy);
    }
    for proxy in &proxies {
        wait_for_instance_count(proxy, 3.0).await;
    }
    let [path, other] = names.each_ref().map(|name| format!("/{name}"));
    let (gone, there) = (
        FleetLoad::start(&proxies[..2], &path),
        FleetLoad::start(&proxies[..1], &other),
    );
    there.run_for(2 * LIMIT_PERIOD).await;
    cluster.nodes[(counted + 1) % 3].pause();
    let began = Instant::now();
    there.run_for(10 * LIMIT_PERIOD).await;
    for proxy in &proxies {
        let value = proxy.read_metric("tidegate_instances").await;
        assert_eq!(value, 3.0, "an instance that waits for a node still counts");
    }
    cluster.nodes[(counted + 1) % 3].resume();
    let healed = Instant::now();
    let late = FleetLoad::start(&proxies[2..], &path);
    there.run_for(6 * LIMIT_PERIOD).await;
    let (mut gone, _) = gone.finish().await;
    gone.extend(late.finish().await.0);
    let (there, refused) = there.finish().await;

    let count = |admitted: &[AdmittedRequest], from: Instant, to: Instant| {
        admitted
            .iter()
            .filter(|one| one.sent >= from && one.answered < to)
            .count()
    };
    let seconds = |admitted: &[AdmittedRequest], from: Instant, number: u32| -> Vec<usize> {
        (0..number)
            .map(|n| {
                count(
                    admitted,
                    from + LIMIT_PERIOD * n,
                    from + LIMIT_PERIOD * (n + 1),
                )
            })
            .collect()
    };
    let items = gone.iter();
    let since: Vec<AdmittedRequest> = items.copied().filter(|one| one.sent >= began).collect();
    let (in_it, after) = (seconds(&gone, began, 10), seconds(&gone, healed, 5));
    println!(
        "its keys: {in_it:?} in the outage, {after:?} after it; others: {:?}",
        seconds(&there, began, 15)
    );
    assert!(
        max_admitted_in_a_period(&since) <= LIMIT_UNITS,
        "in one period since the fault: {}",
        max_admitted_in_a_period(&since)
    );
    // Two of three shares. On a busy machine the first seconds pass before the fault is detected.
    assert!(
        in_it[1..].iter().all(|count| *count >= LIMIT_UNITS / 5),
        "too few admitted during the outage: {in_it:?}"
    );
    assert!(
        in_it.iter().sum::<usize>() >= 10 * LIMIT_UNITS / 3,
        "too few admitted during the outage: {in_it:?}"
    );
    // Admissions come in bursts, slightly more than a period apart.
    let least = |counts: &[usize]| counts.windows(2).map(|two| two[0] + two[1]).min().unwrap();
    assert!(
        least(&after[1..]) >= LIMIT_UNITS,
        "Redis did not decide again: {after:?}"
    );

    assert!(
        refused > 100 && max_admitted_in_a_period(&there) <= LIMIT_UNITS,
        "{}",
        max_admitted_in_a_period(&there)
    );
    let others = seconds(&there, began, 15);
    assert!(
        least(&others) >= LIMIT_UNITS * 4 / 3,
        "keys of other nodes were affected: {others:?}"
    );
    let mut took: Vec<Duration> = there.iter().map(|one| one.answered - one.sent).collect();
    took.sort_unstable();
    assert!(
        took[took.len() / 2] < Duration::from_millis(50),
        "{:?}",
        took[took.len() / 2]
    );
    let mut alone = 0.0;
    for proxy in &proxies {
        for outcome in ["local_allowed", "local_rejected"] {
            let series = format!(
                "tidegate_degraded_total{{policy=\"{}\",outcome=\"{outcome}\"}}",
                names[1]
            );
            alone += proxy.read_metric(&series).await;
        }
    }
    // The machine may be too busy to meet the deadline.
    assert!(
        alone <= 20.0,
        "{alone} requests for other nodes were decided without Redis"
    );
}

#[tokio::test]
async fn membership_counts_live_instances_only() {
    let (server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let policy = "[[policy]]\nname = \"p\"\nlimit = { requests = 10, per = \"1h\" }";
    let mut proxies = Vec::new();
    for _ in 0..3 {
        proxies.push(start_proxy(server.port(), policy, upstream.address).await);
    }
    wait_for_instance_count(&proxies[0], 3.0).await;
    let members: usize = server.command("ZCARD shop:v1:instances").await;
    assert_eq!(members, 3);

    let mut ends = proxies.pop().unwrap();
    ends.send_sigterm();
    assert!(ends.wait_for_exit(TEST_TIMEOUT).await.status.success());
    let members: usize = server.command("ZCARD shop:v1:instances").await;
    assert_eq!(members, 2, "an instance leaves at once on a clean exit");
    let places: usize = server
        .command("ZCARD shop:v1:instances:{shop:v1:instances}")
        .await;
    assert_eq!(places, 2, "an instance frees its place on a clean exit");
    wait_for_instance_count(&proxies[0], 2.0).await;

    drop(proxies.pop());
    wait_for_instance_count(&proxies[0], 1.0).await;
    drop(proxies);
    let gone = async || server.command::<usize>("EXISTS shop:v1:instances").await == 0;
    wait_until_within("the end of the set", MEMBERSHIP_TIMEOUT, gone).await;
}

/// A server that hung executes an instance's earlier commands when it continues, though they may be
/// outdated.
#[tokio::test]
async fn an_instance_with_pending_write_back_or_a_late_heartbeat_is_not_settled() {
    let server = RedisServer::start();
    let send_membership = async |id: &str, does: &str, until: &str, kept_us: u64| {
        let mut command = redis::cmd("EVAL");
        command
            .arg(include_str!("../../src/store/redis/membership.lua"))
            .arg(2)
            .arg("set")
            .arg("ids");
        command.arg(id).arg(does).arg(kept_us).arg("0").arg(until);
        let (_, live, lower, heard): (u64, u32, u32, u32) = command
            .query_async(&mut server.connection().await)
            .await
            .unwrap();
        (live, lower, heard)
    };
    let beat =
        async |id: &str, does: &str, until: &str| send_membership(id, does, until, 5_000_000).await;
    assert_eq!(beat("b", "heartbeat", "").await, (1, 0, 1));
    assert_eq!(beat("c", "pending", "").await, (2, 1, 1));
    assert_eq!(
        beat("a", "heartbeat", "1").await,
        (3, 0, 1),
        "a late heartbeat does not settle an instance"
    );
    assert_eq!(beat("a", "heartbeat", "9000000000000000").await, (3, 0, 2));
    assert_eq!(beat("d", "read", "").await, (3, 3, 2));
    assert_eq!(beat("c", "heartbeat", "").await, (3, 2, 3));
    assert_eq!(beat("b", "pending", "").await, (3, 1, 2));
    sleep(Duration::from_millis(20)).await;
    let silent = "expired instances have no rank, pending or not";
    let answer = send_membership("d", "heartbeat", "", 10_000).await;
    assert_eq!(answer, (1, 0, 1), "{silent}");
}

#[tokio::test]
async fn an_instance_without_membership_permission_is_still_decided_by_redis() {
    let (server, upstream) = (RedisServer::start(), Upstream::echo().await);
    server.run("ACL SETUSER default -eval").await;
    let mut proxy = start_proxy(server.port(), MIXED_POLICIES, upstream.address).await;
    let warning = "redis rejected the membership script; using the last known instance count";
    proxy
        .wait_for_log("a warning", 0, TEST_TIMEOUT, |line| {
            line.is_level("WARN") && line.message_starts_with(warning)
        })
        .await;
    assert_eq!(
        proxy.get_statuses("/local", 22).await,
        [200; 22],
        "expected the whole limit, not a local share"
    );
    assert_eq!(proxy.read_metric("tidegate_store_up").await, 1.0);
    assert!(proxy.is_running() && !proxy.log_text().contains("redis unavailable"));
}

const MIXED_POLICIES: &str = r#"
[[policy]]
name = "local"
match = { path = ["/local", "/both"] }
limit = { requests = 22, per = "1h" }

[[policy]]
name = "open"
match = { path = ["/open", "/both"] }
limit = { requests = 1, per = "1h" }
on_store_failure = "open"

[[policy]]
name = "closed"
match = { path = "/closed" }
limit = { requests = 10, per = "1h" }
on_store_failure = "closed"

[[policy]]
name = "beside"
match = { path = "/closed" }
limit = { requests = 10, per = "1h" }
"#;

#[tokio::test]
async fn without_redis_at_startup_the_configured_instances_share_the_limit() {
    let upstream = Upstream::echo().await;
    let proxy = start_proxy(free_port(), MIXED_POLICIES, upstream.address).await;
    // An instance without a known place has a part of 22 among four.
    let statuses = proxy.get_statuses("/local", 3).await;
    assert_eq!(statuses, [200; 3]);
    assert_eq!(
        proxy.get_statuses("/both", 3).await,
        [200, 200, 429],
        "a fail-open policy refused a request"
    );
    let refused = proxy.get("/local").await;
    assert_eq!(refused.status, 429);
    assert_eq!(refused.json()["policy"], "local");
    assert!(
        (3_590_000_000..=3_600_000_000).contains(&refused.retry_after_us()),
        "{}",
        refused.text()
    );
    assert_eq!(refused.remaining("local"), Some(0));
    assert_eq!(proxy.get_statuses("/open", 3).await, [200; 3]);
    proxy
        .expect_status("/closed", 503, "a single fail-closed policy refuses")
        .await;
    let outcome = async |policy: &str, outcome: &str| {
        proxy
            .read_metric(&format!(
                "tidegate_degraded_total{{policy=\"{policy}\",outcome=\"{outcome}\"}}"
            ))
            .await
    };
    assert_eq!(outcome("local", "local_allowed").await, 5.0);
    assert_eq!(outcome("local", "local_rejected").await, 2.0);
    assert_eq!(outcome("open", "open").await, 6.0);
    assert_eq!(outcome("closed", "closed").await, 1.0);
    let answer = outcome("beside", "local_allowed").await;
    assert_eq!(answer, 0.0, "a request was charged");
    proxy
        .assert_metric(
            "tidegate_requests_total{policy=\"local\",decision=\"degraded\"}",
            7.0,
        )
        .await;
    assert_eq!(proxy.read_metric("tidegate_instances").await, 4.0);
}

#[tokio::test]
async fn usage_is_kept_when_an_outage_begins_and_when_it_ends() {
    let (server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let proxy = start_proxy(server.port(), MIXED_POLICIES, upstream.address).await;
    wait_for_instance_count(&proxy, 1.0).await;
    assert_eq!(proxy.get_statuses("/local", 20).await, [200; 20]);
    server.pause();
    assert_eq!(
        proxy.get_statuses("/local", 4).await,
        [200, 200, 429, 429],
        "the outage granted a fresh quota"
    );
    server.resume();
    let by_redis = "tidegate_decision_seconds_count{source=\"redis\"}";
    let deadline = Instant::now() + MEMBERSHIP_TIMEOUT;
    while proxy.read_metric(by_redis).await < 25.0 {
        proxy
            .expect_status("/local", 429, "the outage granted a second quota")
            .await;
        assert!(Instant::now() < deadline, "Redis did not decide again");
        // Longer than the deny cache holds a refusal.
        sleep(Duration::from_millis(300)).await;
    }
}

#[tokio::test]
async fn no_leases_are_granted_while_another_instance_has_pending_write_back() {
    let (mut server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let relay = TcpRelay::start(server.port()).await;
    let policy = "[[policy]]\nname = \"hot\"\nlimit = { requests = 200, per = \"1h\" }\n\
                  lease = { size = 50, ttl = \"10s\" }";
    let first = start_proxy(server.port(), policy, upstream.address).await;
    let last = start_proxy(relay.port, policy, upstream.address).await;
    wait_for_instance_count(&first, 2.0).await;
    wait_for_instance_count(&last, 2.0).await;
    server.kill();
    let admitted = |statuses: Vec<u16>| statuses.iter().filter(|status| **status == 200).count();
    let mut sum =
        admitted(last.get_statuses("/", 110).await) + admitted(first.get_statuses("/", 1).await);
    assert_eq!(sum, 101, "a share, and one request");
    // The first proxy reaches Redis again, the last one does not yet.
    relay.drop_replies();
    server.restart_async().await;
    let until = Instant::now() + 2 * LIMIT_PERIOD;
    while Instant::now() < until {
        sum += admitted(first.get_statuses("/", 10).await);
    }
    assert!(sum <= 200, "{sum} of 200");
}

/// A lost connection counts as an outage, since other instances may have continued without this
/// one. But servers also close idle connections.
#[tokio::test]
async fn an_outage_is_noticed_without_requests_and_a_replaced_connection_is_no_outage() {
    let mut server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    let _: u64 = server.command("CLIENT KILL TYPE normal").await;
    // The INFO connection of the test is counted too.
    wait_until("the store to reconnect", async || {
        server.connected_clients().await >= 2 && redis.is_reachable()
    })
    .await;
    assert!(!redis.fallback().is_in_outage());
    server.kill();
    wait_until("the outage to be detected", async || {
        redis.fallback().is_in_outage()
    })
    .await;
}
