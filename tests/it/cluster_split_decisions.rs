//! Requests whose charges are in several slots of a Redis Cluster: a refused or failed request uses
//! up nothing, and slots that move are followed.

mod reservations;

use crate::support::cluster::{hash_slot, user_key};
use crate::support::prelude::*;

const HOUR_US: u64 = 3_600_000_000;

/// The default of `store.redis.timeout`.
const DEFAULT_TIMEOUT: &str = "50ms";

/// A proxy in front of a cluster, and an upstream.
struct SplitFixture {
    cluster: RedisCluster,
    upstream: Upstream,
    proxy: Proxy,
}

impl SplitFixture {
    async fn start(timeout: &str, policies: &str) -> Self {
        let (cluster, upstream) = (RedisCluster::start().await, Upstream::echo().await);
        let proxy = start_proxy(&cluster, &upstream, timeout, policies).await;
        proxy.wait_for_store().await;
        Self {
            cluster,
            upstream,
            proxy,
        }
    }

    /// Statuses of requests of one user, one after the other.
    async fn statuses(&self, user: &str, count: usize) -> Vec<u16> {
        let mut statuses = Vec::new();
        for _ in 0..count {
            let request = self.proxy.request("GET", "/").header("x-user-id", user);
            statuses.push(request.send_for_status().await);
        }
        statuses
    }

    /// Used units of a counter, as Redis has them.
    async fn used_units(&self, limit: &Limit, key: &Key) -> u64 {
        let settings = RedisSettings {
            key_prefix: "shop".to_owned(),
            ..self.cluster.settings()
        };
        let store = Store::from_redis(connect_redis(settings).await.1);
        let decision = store
            .decide(&[PolicyCharges::new(limit, key, 0)])
            .await
            .unwrap();
        limit.requests
            - decision
                .outcomes()
                .next()
                .unwrap()
                .status
                .unwrap()
                .remaining
    }

    fn forwarded(&self) -> u64 {
        self.upstream.requests().len() as u64
    }
}

async fn start_proxy(
    cluster: &RedisCluster,
    upstream: &Upstream,
    timeout: &str,
    policies: &str,
) -> Proxy {
    let config = format!(
        "listen = {{ threads = 2 }}\nlog = {{ access = 'off' }}\n[store]\nkind = 'redis'\n[store.redis]\n{}\n\
         key_prefix = 'shop'\ntimeout = '{timeout}'\nconnect_timeout = '1s'\n{policies}",
        cluster.config_lines()
    );
    Proxy::start(&config, upstream.address).await
}

fn policy_key(name: &str) -> Key {
    KeyBuilder::new(name).finish()
}

/// A policy name whose key without values is on a node.
fn policy_on(node: usize, name: &str) -> String {
    let mut names = (0..).map(|number| format!("{name}{number}"));
    names
        .find(|name| initial_node(&policy_key(name)) == node)
        .unwrap()
}

/// A user whose key of a policy is on a node.
fn user_on(node: usize, policy: &str) -> String {
    let mut users = (0..).map(|number| format!("u{number}"));
    users
        .find(|user| initial_node(&user_key(policy, user)) == node)
        .unwrap()
}

fn hourly(requests: u64, algorithm: Algorithm) -> Limit {
    make_limit(requests, HOUR_US, algorithm)
}

fn count(statuses: &[u16], status: u16) -> usize {
    statuses.iter().filter(|other| **other == status).count()
}

/// A global policy on one node and a policy per user, whose keys may be on any node.
fn global_and_user_policies(global: &str, per_user: u64) -> String {
    format!(
        "[[policy]]\nname = '{global}'\nkey = []\nlimit = {{ requests = 5000, per = '1h', algorithm = 'sliding_log' }}\n\
         [[policy]]\nname = 'user'\nkey = 'header:x-user-id'\n\
         limit = {{ requests = {per_user}, per = '1h', algorithm = 'sliding_log' }}\n"
    )
}

/// Clients of one user on many connections.
struct HostileLoad {
    stop: Arc<AtomicBool>,
    clients: JoinSet<Vec<u16>>,
}

impl HostileLoad {
    /// `pause`: between two requests of one connection.
    async fn start(proxy: &Proxy, connections: usize, user: &str, pause: Duration) -> Self {
        let (stop, mut clients) = (Arc::new(AtomicBool::new(false)), JoinSet::new());
        for _ in 0..connections {
            let mut client = RawClient::connect(proxy.address).await;
            let (stop, user) = (Arc::clone(&stop), user.to_owned());
            clients.spawn(async move {
                let mut statuses = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let request = format!(
                        "GET / HTTP/1.1\r\nHost: shop.example\r\nx-user-id: {user}\r\n\r\n"
                    );
                    statuses.push(client.request(request).await.status);
                    if !pause.is_zero() {
                        sleep(pause).await;
                    }
                }
                statuses
            });
        }
        Self { stop, clients }
    }

    async fn finish(self) -> Vec<u16> {
        self.stop.store(true, Ordering::Relaxed);
        self.clients.join_all().await.concat()
    }
}

/// All requests are decided, although many arrive at once, and each refusal leaves no charge.
#[tokio::test]
async fn refusals_of_an_exhausted_key_cost_no_unit_of_another_slot() {
    let global = policy_on(0, "all");
    let fixture = SplitFixture::start("2s", &global_and_user_policies(&global, 5)).await;
    let user = user_on(1, "user");
    let load = HostileLoad::start(&fixture.proxy, 600, &user, Duration::ZERO).await;
    sleep(Duration::from_secs(3)).await;
    let statuses = load.finish().await;
    sleep(Duration::from_millis(500)).await;
    let used = fixture
        .used_units(&hourly(5000, Algorithm::SlidingLog), &policy_key(&global))
        .await;
    let passed = count(&statuses, 200);
    println!(
        "600 connections: {} requests, {passed} passed, {used} global units used",
        statuses.len()
    );
    assert_eq!((passed, fixture.forwarded(), used), (5, 5, 5));
}

#[tokio::test]
async fn an_exhausted_key_is_not_forwarded_by_timeouts_of_the_default_length() {
    let global = policy_on(0, "all");
    let policies = global_and_user_policies(&global, 5);
    let fixture = SplitFixture::start(DEFAULT_TIMEOUT, &policies).await;
    // Loads the scripts, which may take longer than the timeout.
    fixture.statuses("another", 5).await;
    let before = fixture.forwarded();
    let user = user_on(1, "user");
    // Both workers get to know the refusal.
    let few = HostileLoad::start(&fixture.proxy, 8, &user, Duration::from_millis(100)).await;
    sleep(Duration::from_millis(500)).await;
    few.finish().await;
    let load = HostileLoad::start(&fixture.proxy, 64, &user, Duration::ZERO).await;
    sleep(Duration::from_secs(3)).await;
    let requests = load.finish().await.len();
    let passed = fixture.forwarded() - before;
    println!("64 connections: {requests} requests, {passed} passed");
    assert_eq!(passed, 5);
}

/// The default timeout applies. A request without rate-limit fields had no decision in time.
#[tokio::test]
async fn a_refused_client_with_600_connections_does_not_delay_another_client() {
    let global = policy_on(0, "all");
    let policies = format!(
        "{}override = [{{ key = ['other'], limit = {{ requests = 100000, per = '1h' }} }}]\n",
        global_and_user_policies(&global, 5)
    );
    let fixture = SplitFixture::start(DEFAULT_TIMEOUT, &policies).await;
    // Load that the machine can bear: the refusals must not saturate Redis.
    fixture.statuses("other", 5).await;
    let pause = Duration::from_millis(600);
    let load = HostileLoad::start(&fixture.proxy, 600, &user_on(1, "user"), pause).await;
    let began = Instant::now();
    let (mut undecided, mut latencies) = (0, Vec::new());
    while began.elapsed() < Duration::from_secs(5) {
        let sent = Instant::now();
        let request = fixture.proxy.request("GET", "/");
        let response = request.header("x-user-id", "other").send().await;
        latencies.push(sent.elapsed());
        undecided += usize::from(response.header("ratelimit").is_none());
        sleep(Duration::from_millis(5)).await;
    }
    let hostile = load.finish().await;
    latencies.sort_unstable();
    println!(
        "another client: {undecided} of {} undecided, median {:?}; {} requests of the refused client, {} passed",
        latencies.len(),
        latencies[latencies.len() / 2],
        hostile.len(),
        count(&hostile, 200)
    );
    // A busy machine sends few requests, and delays some of them itself.
    assert!(undecided * 100 <= latencies.len().max(300));
}

/// Each worker asks Redis again when its cached refusal is a second old, with one question.
#[tokio::test]
async fn a_refused_key_costs_one_question_per_worker_and_second() {
    let global = policy_on(0, "all");
    let policies = global_and_user_policies(&global, 5);
    let fixture = SplitFixture::start("2s", &policies).await;
    let user = user_on(1, "user");
    fixture.statuses(&user, 5).await;
    let load = HostileLoad::start(&fixture.proxy, 64, &user, Duration::ZERO).await;
    sleep(Duration::from_secs(1)).await;
    let mut calls = Vec::new();
    for _ in 0..2 {
        let mut total = 0;
        for node in &fixture.cluster.nodes {
            total += node
                .read_info_number("commandstats", "cmdstat_evalsha")
                .await;
        }
        calls.push(total);
        sleep(Duration::from_secs(4)).await;
    }
    let refused = load.finish().await.len();
    println!("{refused} refusals, calls {calls:?}");
    // Two workers, four seconds, and the heartbeats of the membership.
    assert!(calls[1] - calls[0] <= 2 * 5 + 2, "{calls:?}");
}

fn two_policies(mode: &str, live: &str, dead: &str, [requests, period]: [&str; 2]) -> String {
    format!(
        "[[policy]]\nname = '{live}'\nkey = []\non_store_failure = '{mode}'\n\
         limit = {{ requests = {requests}, per = '{period}', algorithm = 'sliding_log' }}\n\
         [[policy]]\nname = '{dead}'\nkey = []\non_store_failure = '{mode}'\nmatch = {{ path = '/' }}\n\
         limit = {{ requests = 1000, per = '{period}', algorithm = 'sliding_log' }}\n"
    )
}

/// A fixture with a dead master, and a policy with a key on a live and one on the dead master.
async fn fixture_with_dead_master(mode: &str, live_limit: [&str; 2]) -> (SplitFixture, Key) {
    let (live, dead) = (policy_on(0, "live"), policy_on(1, "dead"));
    let policies = two_policies(mode, &live, &dead, live_limit);
    let mut fixture = SplitFixture::start("200ms", &policies).await;
    // The cluster needs a majority to stay up; the third master has no counter.
    fixture.cluster.nodes[1].kill();
    wait_until("the loss to be noticed", async || {
        fixture.proxy.log_text().contains("redis unavailable")
    })
    .await;
    (fixture, policy_key(&live))
}

#[tokio::test]
async fn a_request_that_fails_closed_leaves_no_charge_on_live_masters() {
    let (fixture, live) = fixture_with_dead_master("closed", ["20", "1h"]).await;
    let began = Instant::now();
    let statuses = fixture.statuses("u", 30).await;
    let took = began.elapsed();
    sleep(Duration::from_millis(300)).await;
    let used = fixture
        .used_units(&hourly(20, Algorithm::SlidingLog), &live)
        .await;
    println!("closed: {statuses:?}, {used} units used, in {took:?}");
    assert_eq!(count(&statuses, 503), 30);
    assert_eq!((fixture.forwarded(), used), (0, 0));
}

#[tokio::test]
async fn local_keeps_the_answers_of_live_masters_and_charges_each_request_once() {
    let (mut fixture, live) = fixture_with_dead_master("local", ["100", "1h"]).await;
    let statuses = fixture.statuses("u", 30).await;
    // Time for a write-back, which would charge the requests again.
    sleep(Duration::from_secs(3)).await;
    let limit = hourly(100, Algorithm::SlidingLog);
    let used = fixture.used_units(&limit, &live).await;
    println!("local: {statuses:?}, {used} units used");
    assert_eq!(count(&statuses, 200), 30);
    assert_eq!(fixture.forwarded(), 30);
    assert_eq!(used, 30);
    fixture.cluster.nodes[1].restart_async().await;
    sleep(Duration::from_secs(5)).await;
    let answer = fixture.used_units(&limit, &live).await;
    assert_eq!(answer, 30, "after the outage");
}

/// The policy of the live key also applies alone. Its limit holds in full, although another
/// instance exists and other requests need the dead master.
#[tokio::test]
async fn keys_on_live_masters_keep_their_throughput_beside_a_dead_master() {
    let (fixture, _) = fixture_with_dead_master("local", ["20", "1s"]).await;
    let (live, dead) = (policy_on(0, "live"), policy_on(1, "dead"));
    let policies = two_policies("local", &live, &dead, ["20", "1s"]);
    let _second = start_proxy(&fixture.cluster, &fixture.upstream, "200ms", &policies).await;
    sleep(Duration::from_secs(12)).await;
    let before = fixture.forwarded();
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(2) {
        fixture.statuses("u", 1).await;
        fixture.proxy.get("/other").await;
        sleep(Duration::from_millis(5)).await;
    }
    let admitted = fixture.forwarded() - before;
    println!("{admitted} admitted in 2 s");
    assert!(admitted >= 38, "{admitted}");
}

/// Two limits: a script that decides both names two keys, which Redis rejects in an open slot.
fn two_limits(mode: &str) -> String {
    format!(
        "[[policy]]\nname = 'two'\nkey = 'header:x-user-id'\non_store_failure = '{mode}'\n\
         limits = [{{ requests = 5, per = '1h' }}, {{ requests = 100, per = '24h' }}]\n"
    )
}

fn blocking(mode: &str) -> String {
    format!(
        "[[policy]]\nname = 'two'\nkey = 'header:x-user-id'\non_store_failure = '{mode}'\nblock_for = '2h'\n\
         limit = {{ requests = 5, per = '1h' }}\n"
    )
}

/// A slot that an interrupted reshard left open, with no counter, with counters on the source, or
/// with counters on both nodes.
#[tokio::test]
async fn an_open_slot_decides_two_keys_without_an_error() {
    for (name, policies) in [
        ("two limits", two_limits("closed")),
        ("block_for", blocking("open")),
        (
            "block_for",
            format!("{}count_when = {{ status = [200] }}\n", blocking("open")),
        ),
    ] {
        for (used_before, moved) in [(0, 0), (2, 0), (2, 1)] {
            let fixture = SplitFixture::start("500ms", &policies).await;
            let user = user_on(0, "two");
            let slot = hash_slot(&user_key("two", &user));
            let answers = fixture.statuses(&user, used_before).await;
            assert_eq!(answers, vec![200; used_before]);
            fixture.cluster.open_slot(slot, 0, 1, moved).await;
            let statuses = fixture.statuses(&user, 20).await;
            println!("{name}, {used_before} used, {moved} moved: {statuses:?}");
            let admitted = 5 - used_before;
            assert_eq!(statuses[..admitted], vec![200; admitted]);
            assert_eq!(statuses[admitted..], vec![429; 20 - admitted]);
            let reply = fixture.proxy.request("GET", "/").header("x-user-id", &user);
            let reply = reply.send().await;
            let wait = reply.json()["retry_after"].as_f64().unwrap();
            let is_block = name == "block_for";
            assert_eq!(wait > 3601.0, is_block, "{wait}");
            if !is_block {
                let daily = sliding_log(100, 24 * HOUR_US);
                let used = fixture.used_units(&daily, &user_key("two", &user)).await;
                assert_eq!(used, 5, "a refused request charges no limit");
            }
            assert_eq!(fixture.forwarded(), 5);
            println!("errors: {:?}", fixture.proxy.read_store_error_lines().await);
        }
    }
}

/// Settlements of one slot usually share a call, which Redis rejects while the slot is open. The
/// credit of a log's only charge must not lose the log.
#[tokio::test]
async fn settlements_in_an_open_slot_are_exact() {
    let cluster = RedisCluster::start().await;
    let (shared, redis) = connect_redis(cluster.settings()).await;
    let store = Store::from_redis(redis);
    let key = policy_key(&policy_on(0, "cost"));
    let limits = [
        hourly(100, Algorithm::SlidingLog),
        Limit {
            per_us: 24 * HOUR_US,
            ..hourly(100, Algorithm::SlidingLog)
        },
    ];
    let charges = limits.each_ref().map(|limit| {
        let charge = PolicyCharges::new(limit, &key, 10);
        (0, charge.map_limits(|charge| charge.is_estimate = true))
    });
    let charges = join_policies(charges);
    let decision = store.decide(&charges).await.unwrap();
    cluster.open_slot(hash_slot(&key), 0, 1, 1).await;
    for (units, used) in [(4, 6), (6, 0)] {
        let settlements: Vec<Settlement<'_>> = limits
            .iter()
            .zip(decision.outcomes())
            .map(|(limit, outcome)| Settlement {
                limit,
                key: &key,
                amendment: Amendment::Credit {
                    units,
                    at_us: outcome.charged_at_us.unwrap(),
                },
            })
            .collect();
        store.apply_settlements(&settlements).await.unwrap();
        for limit in &limits {
            let status = store
                .decide(&[PolicyCharges::new(limit, &key, 0)])
                .await
                .unwrap();
            assert_eq!(
                status.outcomes().next().unwrap().status.unwrap().remaining,
                100 - used
            );
        }
    }
    let errors: u64 = shared.error_counts().map(|(_, count)| count).sum();
    assert_eq!(errors, 0);
}

/// Forty slots move under load, each for longer than the timeout of a call. Every request is
/// decided.
///
/// A server that stalls for as long as the timeout fails requests even without resharding.
/// Therefore the timeout is long, and the test runs alone.
#[tokio::test]
async fn resharding_many_slots_under_load_fails_no_request() {
    let policies = format!(
        "{}[[policy]]\nname = 'all'\nkey = []\non_store_failure = 'closed'\n\
         limit = {{ requests = 1000000, per = '1h' }}\n",
        two_limits("closed")
            .replace("requests = 5,", "requests = 100000,")
            .replace("= 100,", "= 100000,")
    );
    let fixture = SplitFixture::start("400ms", &policies).await;
    let mut users: Vec<String> = (0..)
        .map(|n| format!("u{n}"))
        .filter(|user| initial_node(&user_key("two", user)) == 0)
        .take(40)
        .collect();
    users.dedup();
    let stop = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    for at in 0..8 {
        let (users, stop, address) = (users.clone(), Arc::clone(&stop), fixture.proxy.address);
        clients.spawn(async move {
            let mut client = RawClient::connect(address).await;
            let mut statuses = Vec::new();
            for user in users.iter().cycle().skip(at * 5) {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let request = format!("GET / HTTP/1.1\r\nHost: a\r\nx-user-id: {user}\r\n\r\n");
                statuses.push(client.request(request).await.status);
                sleep(Duration::from_millis(2)).await;
            }
            statuses
        });
    }
    for user in &users {
        let slot = hash_slot(&user_key("two", user));
        let pause = async || sleep(Duration::from_millis(450)).await;
        fixture.cluster.move_slot(slot, 0, 1, pause).await;
    }
    stop.store(true, Ordering::Relaxed);
    let statuses = clients.join_all().await.concat();
    let failed = statuses.iter().filter(|status| **status != 200).count();
    println!(
        "resharding 40 slots: {failed} of {} requests failed",
        statuses.len()
    );
    let errors = fixture.proxy.read_store_error_lines().await;
    assert_eq!(failed, 0, "{errors:?}");
    let all = hourly(1_000_000, Algorithm::SlidingLog);
    let used = fixture.used_units(&all, &policy_key("all")).await;
    assert_eq!(used, statuses.len() as u64, "each request is charged once");
}
