//! Redis outages under load: responses, latency, log lines and recovery.
//!
//! A steady load uses a policy that is `open`, a policy that is `closed`, and no policy at all. The
//! requests without a policy measure the speed of the machine; the other latencies are compared
//! with them.

use crate::support::fake_redis::start_fixed_reply_server;
use crate::support::prelude::*;
use crate::support::proxy::Setup;

/// `store.redis.timeout`: long enough that a wait for Redis is visible on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_millis(200);

/// Time that a busy machine may add to a deadline.
pub(crate) const TIMEOUT_SLACK: Duration = Duration::from_millis(100);

/// Duration of faults that do not end by themselves.
const OUTAGE_LENGTH: Duration = Duration::from_secs(1);

const MAX_RECOVERY: Duration = Duration::from_secs(2);

/// Number of connections for each of the two policies, and for requests without a policy.
const CONNECTIONS_PER_POLICY: usize = 8;
const CONTROL_CONNECTIONS: usize = 2;

/// Pause between two requests of one connection.
const REQUEST_INTERVAL: Duration = Duration::from_millis(20);

pub(crate) const POLICIES: &str = r#"
[[policy]]
name = "open"
match = { path = "/open" }
limit = { requests = 100000, per = "1h" }

[[policy]]
name = "closed"
match = { path = "/closed" }
limit = { requests = 100000, per = "1h" }
on_store_failure = "closed"
"#;

/// A proxy with two workers in front of an upstream.
pub(crate) struct OutageFixture {
    pub(crate) proxy: Proxy,
    pub(crate) upstream: Upstream,
}

/// Clients that send requests continuously.
pub(crate) struct ClientLoad {
    samples: Arc<Mutex<Vec<RequestSample>>>,
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
    /// Number of lines that the proxy had logged before the load.
    log_mark: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PolicyRoute {
    Open,
    Closed,
    /// No policy applies.
    Unlimited,
}

/// One request and its response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestSample {
    pub(crate) route: PolicyRoute,
    pub(crate) sent: Instant,
    pub(crate) latency: Duration,
    pub(crate) status: u16,
    /// Whether the response has rate limit headers, so Redis decided the request.
    pub(crate) decided: bool,
}

impl OutageFixture {
    async fn new(redis_port: u16, policies: &str) -> Self {
        Self::with_redis(
            &format!("url = \"redis://127.0.0.1:{redis_port}/0\""),
            policies,
        )
        .await
    }

    /// `redis` holds the configuration lines with the address of Redis.
    pub(crate) async fn with_redis(redis: &str, policies: &str) -> Self {
        let upstream = Upstream::echo().await;
        let proxy = build_proxy_with_redis(redis, "1s", policies)
            .upstream(upstream.address)
            .start()
            .await;
        Self { proxy, upstream }
    }

    /// Starts the load and waits until Redis decides all of it.
    pub(crate) async fn start_load(&self) -> ClientLoad {
        let load = ClientLoad {
            samples: Arc::default(),
            stop: Arc::default(),
            clients: Vec::new(),
            log_mark: self.proxy.log_mark(),
        };
        let routes = [
            (PolicyRoute::Open, CONNECTIONS_PER_POLICY),
            (PolicyRoute::Closed, CONNECTIONS_PER_POLICY),
            (PolicyRoute::Unlimited, CONTROL_CONNECTIONS),
        ];
        let routes = routes
            .into_iter()
            .flat_map(|(route, count)| std::iter::repeat_n(route, count));
        let client = |route| {
            let (samples, stop) = (Arc::clone(&load.samples), Arc::clone(&load.stop));
            tokio::spawn(send_until_stopped(self.proxy.address, route, samples, stop))
        };
        let clients = routes.map(client).collect();
        let load = ClientLoad { clients, ..load };
        load.wait_until_decided_since(Instant::now()).await;
        load
    }

    /// The log lines about the store since the load began, once the store is up again. The access
    /// log must have one line for each 503 and no others.
    async fn wait_for_store_log(&self, load: &ClientLoad, refused: usize) -> Vec<LogLine> {
        let (access, store) = eventually("the log to be complete", TEST_TIMEOUT, async || {
            let lines = self.proxy.log_since(load.log_mark).into_iter();
            let (access, store): (Vec<_>, Vec<_>) =
                lines.partition(|line| line.field("target") == "access");
            let up = store
                .last()
                .is_some_and(|line| line.message_starts_with("redis available again"));
            (up && count_logged_refusals(&access) >= refused).then_some((access, store))
        })
        .await;
        let mut requests = access.iter().filter(|line| line.field("lines").is_empty());
        assert!(requests.all(|line| line.field("status") == "503"));
        let logged = count_logged_refusals(&access);
        assert_eq!(logged, refused, "{}", self.proxy.log_text());
        store
    }

    /// Checks an outage that was total from `fault` until `healed`.
    async fn check_outage(&self, what: &str, load: ClientLoad, fault: Instant, healed: Instant) {
        load.wait_until_decided_since(healed).await;
        let samples = load.finish().await;
        let slowest = |samples: &[RequestSample]| {
            samples
                .iter()
                .map(|sample| sample.latency)
                .max()
                .unwrap_or_default()
        };
        let (unlimited, limited): (Vec<_>, Vec<_>) = samples
            .iter()
            .partition(|sample| sample.route == PolicyRoute::Unlimited);
        let baseline = slowest(&unlimited);

        assert!(
            slowest(&limited) <= TIMEOUT + TIMEOUT_SLACK + baseline,
            "{:?}, unlimited: {baseline:?}",
            slowest(&limited)
        );
        let waited = limited
            .iter()
            .filter(|sample| sample.latency >= TIMEOUT + baseline)
            .count();
        assert!(
            waited <= 2 * CONNECTIONS_PER_POLICY,
            "{waited} requests waited for Redis, more than were in flight"
        );

        // By now all requests in flight have failed, and the circuit breaker is open.
        let open = fault + TIMEOUT + TIMEOUT_SLACK + baseline;
        let in_outage = |sample: &&RequestSample| (open..healed).contains(&sample.sent);
        let outage: Vec<RequestSample> = limited
            .iter()
            .copied()
            .filter(|sample| in_outage(&sample))
            .collect();
        assert!(
            outage.len() > 4 * CONNECTIONS_PER_POLICY,
            "only {} requests in the outage",
            outage.len()
        );
        assert!(
            outage.iter().all(|sample| !sample.decided),
            "Redis decided requests during the outage"
        );
        assert!(
            slowest(&outage) <= TIMEOUT / 2 + baseline,
            "{:?}, unlimited: {baseline:?}",
            slowest(&outage)
        );
        let unlimited_in_outage: Vec<RequestSample> = unlimited
            .iter()
            .copied()
            .filter(|sample| in_outage(&sample))
            .collect();
        let (with, without) = (
            median_latency(&outage),
            median_latency(&unlimited_in_outage),
        );
        assert!(
            with <= without + Duration::from_millis(10),
            "{with:?}, unlimited: {without:?}"
        );

        let recovery = measure_recovery(&samples, healed);
        let refused = samples.iter().filter(|sample| sample.status == 503).count();
        let store = self.wait_for_store_log(&load, refused).await;
        // A rejected login is logged beside the lost connection.
        let messages: Vec<&LogLine> = store
            .iter()
            .filter(|line| !line.message_starts_with("redis rejects the login"))
            .collect();
        assert!(messages.len() == 2);
        assert!(store.len() <= 3);
        assert!(messages[0].message_starts_with("redis unavailable"));
        assert!(messages[1].message_starts_with("redis available again"));
        assert_eq!(
            self.upstream.requests().len(),
            samples.len() - refused,
            "every admitted request must reach the upstream exactly once"
        );
        println!(
            "{what}: {} requests, {refused} refused; added at most {:?}, with the breaker open {:?} (median {:?}); \
             back after {recovery:?} (down: {})",
            samples.len(),
            slowest(&limited).saturating_sub(median_latency(&unlimited)),
            slowest(&outage).saturating_sub(median_latency(&unlimited_in_outage)),
            with.saturating_sub(without),
            store[0].field("kind"),
        );
    }
}

impl ClientLoad {
    /// Waits until Redis has decided a run of requests sent since `since`, over all connections.
    pub(crate) async fn wait_until_decided_since(&self, since: Instant) {
        let wanted = 4 * CONNECTIONS_PER_POLICY;
        self.wait_until("requests to be decided by Redis", |samples| {
            let mut newest = samples
                .iter()
                .rev()
                .filter(|sample| sample.route != PolicyRoute::Unlimited)
                .take(wanted);
            samples.len() > wanted && newest.all(|sample| sample.decided && sample.sent >= since)
        })
        .await;
    }

    /// Waits for the length of an outage.
    async fn wait_for_outage_length(&self, since: Instant) {
        self.wait_until("time to pass", |samples| {
            samples
                .last()
                .is_some_and(|sample| sample.sent >= since + OUTAGE_LENGTH)
        })
        .await;
    }

    async fn wait_until(&self, what: &str, found: impl Fn(&[RequestSample]) -> bool) {
        wait_until(what, async || {
            if let Some(client) = self.clients.iter().find(|client| client.is_finished()) {
                panic!("a client failed: {client:?}");
            }
            found(&self.samples.lock().unwrap())
        })
        .await;
    }

    /// Stops the load and returns all samples. Fails if a client got an unexpected response.
    pub(crate) async fn finish(&self) -> Vec<RequestSample> {
        self.stop.store(true, Ordering::Relaxed);
        wait_until("the clients to end", async || {
            self.clients.iter().all(JoinHandle::is_finished)
        })
        .await;
        self.samples.lock().unwrap().clone()
    }
}

impl RequestSample {
    /// Checks one response by itself.
    fn from_reply(route: PolicyRoute, sent: Instant, reply: &RawResponse) -> Self {
        let decided = reply.header("ratelimit").is_some();
        let refused = reply.status == 503 && is_fail_closed_reply(reply);
        match route {
            PolicyRoute::Open => assert_eq!(reply.status, 200, "open: {}", reply.text()),
            PolicyRoute::Closed => assert!(
                refused || (reply.status == 200 && decided),
                "closed: {reply:?}"
            ),
            PolicyRoute::Unlimited => {
                assert!(reply.status == 200 && !decided, "no policy: {reply:?}")
            }
        }
        assert!(reply.complete);
        Self {
            route,
            sent,
            latency: sent.elapsed(),
            status: reply.status,
            decided,
        }
    }
}

/// Whether the response is a rejection by a `closed` policy.
fn is_fail_closed_reply(reply: &RawResponse) -> bool {
    let problem = reply.json();
    let kind = problem["type"].as_str().unwrap_or_default();
    reply.status == 503
        && kind.ends_with("#temporary-reduced-capacity")
        && reply.header("retry-after") == Some("1")
        && reply.header("cache-control") == Some("no-store")
}

async fn send_until_stopped(
    address: SocketAddr,
    route: PolicyRoute,
    all: Arc<Mutex<Vec<RequestSample>>>,
    stop: Arc<AtomicBool>,
) {
    let path = match route {
        PolicyRoute::Open => "/open",
        PolicyRoute::Closed => "/closed",
        PolicyRoute::Unlimited => "/past",
    };
    let mut client = RawClient::connect(address).await;
    while !stop.load(Ordering::Relaxed) {
        let sent = Instant::now();
        let request = format!("GET {path} HTTP/1.1\r\nHost: shop.example\r\n\r\n");
        let reply = client.request(request).await;
        let sample = RequestSample::from_reply(route, sent, &reply);
        all.lock().unwrap().push(sample);
        sleep(REQUEST_INTERVAL).await;
    }
}

/// Time from `healed` until the last request that Redis did not decide.
fn measure_recovery(samples: &[RequestSample], healed: Instant) -> Duration {
    let undecided = samples
        .iter()
        .filter(|sample| sample.route != PolicyRoute::Unlimited && !sample.decided);
    let last = undecided.map(|sample| sample.sent).max();
    let recovery = last.unwrap_or(healed).saturating_duration_since(healed);
    assert!(recovery < MAX_RECOVERY, "{recovery:?}");
    recovery
}

fn median_latency(samples: &[RequestSample]) -> Duration {
    let mut took: Vec<Duration> = samples.iter().map(|sample| sample.latency).collect();
    took.sort_unstable();
    took[took.len() / 2]
}

fn build_proxy(redis_port: u16, connect_timeout: &str, policies: &str) -> Setup {
    build_proxy_with_redis(
        &format!("url = \"redis://127.0.0.1:{redis_port}/0\""),
        connect_timeout,
        policies,
    )
}

/// `redis` holds the configuration lines with the address of Redis.
fn build_proxy_with_redis(redis: &str, connect_timeout: &str, policies: &str) -> Setup {
    let config = format!(
        r#"
listen = {{ threads = 2 }}
[store]
kind = "redis"
[store.redis]
{redis}
key_prefix = "shop"
timeout = "{}ms"
connect_timeout = "{connect_timeout}"
breaker = {{ failures = 5, probe_interval = "100ms" }}
{policies}"#,
        TIMEOUT.as_millis()
    );
    Proxy::setup(&config)
}

#[tokio::test]
async fn redis_is_killed_and_restarted() {
    let mut server = RedisServer::start();
    let fixture = OutageFixture::new(server.port(), POLICIES).await;
    let load = fixture.start_load().await;
    server.kill();
    let fault = Instant::now();
    load.wait_for_outage_length(fault).await;
    server.restart_async().await;
    fixture
        .check_outage("kill -9", load, fault, Instant::now())
        .await;
}

#[tokio::test]
async fn redis_restarts_empty_at_once() {
    let mut server = RedisServer::start();
    let fixture = OutageFixture::new(server.port(), POLICIES).await;
    let load = fixture.start_load().await;
    let used: u64 = 100_000
        - fixture
            .proxy
            .get("/closed")
            .await
            .remaining("closed")
            .unwrap();
    server.kill();
    server.restart_async().await;
    let healed = Instant::now();
    load.wait_until_decided_since(healed).await;
    let samples = load.finish().await;
    let recovery = measure_recovery(&samples, healed);
    println!("restarted empty: back after {recovery:?}");
    let since = samples
        .iter()
        .filter(|sample| sample.route == PolicyRoute::Closed && sample.status == 200)
        .count() as u64;
    let left = fixture
        .proxy
        .get("/closed")
        .await
        .remaining("closed")
        .unwrap();
    assert!(
        100_000 - left < since,
        "{used} were used before, {since} in all, and {left} are left"
    );
    let refused = samples.iter().filter(|sample| sample.status == 503).count();
    let count = fixture.wait_for_store_log(&load, refused).await.len();
    assert_eq!(count, 2, "{}", fixture.proxy.log_text());
}

#[tokio::test]
async fn redis_hangs_and_resumes() {
    let server = RedisServer::start();
    let fixture = OutageFixture::new(server.port(), POLICIES).await;
    let load = fixture.start_load().await;
    server.pause();
    let fault = Instant::now();
    load.wait_for_outage_length(fault).await;
    server.resume();
    fixture
        .check_outage("SIGSTOP", load, fault, Instant::now())
        .await;
}

#[tokio::test]
async fn redis_is_out_of_memory() {
    let server = RedisServer::start();
    let fixture = OutageFixture::new(server.port(), POLICIES).await;
    let load = fixture.start_load().await;
    server.run("CONFIG SET maxmemory 100kb").await;
    let fault = Instant::now();
    load.wait_for_outage_length(fault).await;
    server.run("CONFIG SET maxmemory 0").await;
    fixture
        .check_outage("OOM", load, fault, Instant::now())
        .await;
}

#[tokio::test]
async fn the_redis_password_changes() {
    let server = RedisServer::start();
    let fixture = OutageFixture::new(server.port(), POLICIES).await;
    let load = fixture.start_load().await;
    let mut admin = server.connection().await;
    let requirepass = |password: &str| {
        redis::cmd("CONFIG")
            .arg("SET")
            .arg("requirepass")
            .arg(password)
            .to_owned()
    };
    let _: () = requirepass("new").query_async(&mut admin).await.unwrap();
    let kill = ["KILL", "TYPE", "normal", "SKIPME", "yes"];
    let _: u64 = redis::cmd("CLIENT")
        .arg(&kill)
        .query_async(&mut admin)
        .await
        .unwrap();
    let fault = Instant::now();
    load.wait_for_outage_length(fault).await;
    let _: () = requirepass("").query_async(&mut admin).await.unwrap();
    fixture
        .check_outage("requirepass", load, fault, Instant::now())
        .await;
}

/// Network faults between proxy and Redis: lost replies, late replies and half-closed connections.
#[tokio::test]
async fn the_network_to_redis_fails() {
    let server = RedisServer::start();
    for what in ["answers lost", "answers late", "half-closed"] {
        let relay = TcpRelay::start(server.port()).await;
        let fixture = OutageFixture::new(relay.port, POLICIES).await;
        let load = fixture.start_load().await;
        match what {
            "answers lost" => relay.drop_replies(),
            "answers late" => relay.delay_replies(2 * TIMEOUT),
            _ => relay.close_server_side(),
        }
        let fault = Instant::now();
        load.wait_for_outage_length(fault).await;
        relay.forward_at_once();
        fixture
            .check_outage(what, load, fault, Instant::now())
            .await;
    }
}

#[tokio::test]
async fn killed_redis_connections_are_reestablished() {
    let server = RedisServer::start();
    let fixture = OutageFixture::new(server.port(), POLICIES).await;
    let load = fixture.start_load().await;
    let killed = Instant::now();
    let _: u64 = server.command("CLIENT KILL TYPE normal SKIPME yes").await;
    load.wait_until_decided_since(killed).await;
    let samples = load.finish().await;
    let recovery = measure_recovery(&samples, killed);
    println!("CLIENT KILL: back after {recovery:?}");
    let refused = samples.iter().filter(|sample| sample.status == 503).count();
    let store = fixture.wait_for_store_log(&load, refused).await;
    // Each of the two workers has a connection, and the first may reconnect before the loss of the
    // second is detected.
    let changes: Vec<bool> = store
        .iter()
        .map(|line| line.message_starts_with("redis unavailable"))
        .collect();
    assert!([vec![true, false], [true, false].repeat(2)].contains(&changes));
}

#[tokio::test]
async fn flushed_scripts_are_reloaded_without_a_log_line() {
    let server = RedisServer::start();
    let fixture = OutageFixture::new(server.port(), POLICIES).await;
    let load = fixture.start_load().await;
    for _ in 0..5 {
        server.run("SCRIPT FLUSH").await;
        load.wait_until_decided_since(Instant::now()).await;
    }
    let samples = load.finish().await;
    assert!(
        samples
            .iter()
            .all(|sample| sample.decided || sample.route == PolicyRoute::Unlimited)
    );
    let count = fixture.proxy.log_since(load.log_mark).len();
    assert_eq!(count, 0, "{}", fixture.proxy.log_text());
}

/// Only requests for that key are affected, and each policy applies its own failure mode.
#[tokio::test]
async fn a_foreign_value_degrades_only_its_key() {
    const BY_USER: &str = r#"
[log]
access = "all"
[[policy]]
name = "open"
match = { path = "/open" }
key = ["header:x-user"]
limit = { requests = 100, per = "1h" }
[[policy]]
name = "closed"
match = { path = "/closed" }
key = ["header:x-user"]
limit = { requests = 100, per = "1h" }
on_store_failure = "closed"
"#;
    let server = RedisServer::start();
    let fixture = OutageFixture::new(server.port(), BY_USER).await;
    let ask = async |path, user| fixture.proxy.get_with(path, "x-user", user).await;
    for path in ["/open", "/closed"] {
        assert!(ask(path, "ann").await.header("ratelimit").is_some());
    }
    let ours: Vec<String> = list_counter_keys(&server)
        .await
        .into_iter()
        .filter(|key| key.ends_with("/ann"))
        .collect();
    assert_eq!(ours.len(), 2, "{ours:?}");
    for key in &ours {
        server.run(&format!("SET {key} foreign")).await;
    }
    for _ in 0..10 {
        let open = ask("/open", "ann").await;
        assert!(open.status == 200, "{open:?}");
        assert!(open.header("ratelimit").is_none(), "{open:?}");
        assert!(is_fail_closed_reply(&ask("/closed", "ann").await));
        for path in ["/open", "/closed"] {
            assert!(ask(path, "bob").await.header("ratelimit").is_some());
        }
    }
    for key in &ours {
        let _: u64 = server.command(&format!("DEL {key}")).await;
    }
    assert!(ask("/closed", "ann").await.header("ratelimit").is_some());
    let all = eventually("the access log", TEST_TIMEOUT, async || {
        let all = fixture.proxy.log_since(0);
        (all.iter()
            .filter(|line| line.field("target") == "access")
            .count()
            == 43)
            .then_some(all)
    });
    let (access, others): (Vec<_>, Vec<_>) = all
        .await
        .into_iter()
        .partition(|line| line.field("target") == "access");
    assert_eq!(
        access
            .iter()
            .filter(|line| line.field("decision") == "degraded")
            .count(),
        20
    );
    let store: Vec<_> = others
        .iter()
        .filter(|line| line.field("target").starts_with("tidegate::store"))
        .collect();
    let named = store
        .iter()
        .all(|line| line.field("kind") == "wrongtype" && !line.contains("ann"));
    assert!(store.len() == 1 && named);
}

const SMALL_POLICIES: &str = r#"
[[policy]]
name = "open"
match = { path = ["/open", "/both"] }
limit = { requests = 2, per = "1h" }
[[policy]]
name = "closed"
match = { path = ["/closed", "/both", "/shadowed"] }
key = ["path"]
limit = { requests = 2, per = "1h" }
on_store_failure = "closed"
[[policy]]
name = "dark"
mode = "shadow"
match = { path = "/open" }
limit = { requests = 2, per = "1h" }
on_store_failure = "closed"
"#;

/// A key that Redis just rejected stays rejected with 429 in every mode, for at most one second.
#[tokio::test]
async fn exhausted_keys_stay_refused_until_the_refusal_cache_expires() {
    for (path, later) in [("/open", 200), ("/closed", 503)] {
        let mut server = RedisServer::start();
        let upstream = Upstream::echo().await;
        let builder =
            build_proxy(server.port(), "1s", SMALL_POLICIES).env("TIDEGATE_LISTEN__THREADS", "1");
        let proxy = builder.upstream(upstream.address).start().await;
        assert_eq!(proxy.get_statuses(path, 2).await, [200, 200]);
        let refused = Instant::now();
        assert_eq!(proxy.get(path).await.status, 429);
        server.kill();
        let known = proxy.get(path).await;
        // On a busy machine the cached rejection may have expired already.
        assert!(
            known.status == 429 || refused.elapsed() >= Duration::from_secs(1),
            "{known:?}"
        );
        loop {
            let status = proxy.get(path).await.status;
            if status == later {
                break;
            }
            assert_eq!(status, 429);
            assert!(
                refused.elapsed() < Duration::from_secs(1) + TIMEOUT_SLACK,
                "{path}: still 429"
            );
            sleep(Duration::from_millis(10)).await;
        }
        assert!(
            proxy
                .get_statuses(path, 10)
                .await
                .iter()
                .all(|status| *status == later),
            "{path}"
        );
    }
}

/// A request matches policies with several modes. One `closed` policy is enough to reject it, in
/// any order.
#[tokio::test]
async fn one_closed_policy_is_enough_to_refuse() {
    const MODES: &str = r#"
[[policy]]
name = "open"
match = { path = "/**" }
limit = { requests = 100, per = "1h" }
[[policy]]
name = "closed-last"
match = { path = "/last/**" }
limit = { requests = 100, per = "1h" }
on_store_failure = "closed"
[[policy]]
name = "closed-first"
priority = 5
match = { path = "/first" }
limit = { requests = 100, per = "1h" }
on_store_failure = "closed"
[[policy]]
name = "dark"
mode = "shadow"
match = { path = "/dark" }
limit = { requests = 100, per = "1h" }
on_store_failure = "closed"
[[policy]]
name = "exempt"
priority = 9
action = "allow"
match = { path = "/last/exempt" }
[[policy]]
name = "forbidden"
action = "deny"
match = { path = "/last/forbidden" }
"#;
    let mut server = RedisServer::start();
    let fixture = OutageFixture::new(server.port(), MODES).await;
    for path in ["/", "/first", "/last/x", "/dark", "/last/exempt"] {
        assert_eq!(fixture.proxy.get(path).await.status, 200, "{path}");
    }
    server.kill();
    for _ in 0..10 {
        for path in ["/", "/dark", "/last/exempt"] {
            assert_eq!(fixture.proxy.get(path).await.status, 200, "{path}");
        }
        for (path, policy) in [("/first", "closed-first"), ("/last/x", "closed-last")] {
            let reply = fixture.proxy.get(path).await;
            assert!(is_fail_closed_reply(&reply), "{path}: {reply:?}");
            assert!(reply.text().contains(policy), "{path}: {reply:?}");
        }
        assert_eq!(fixture.proxy.get("/last/forbidden").await.status, 403);
    }
}

/// A policy known to be exhausted rejects the request although a `closed` policy cannot be decided.
#[tokio::test]
async fn an_exhausted_policy_is_reported_before_a_closed_one() {
    let mut server = RedisServer::start();
    let fixture = OutageFixture::new(server.port(), SMALL_POLICIES).await;
    assert_eq!(fixture.proxy.get_statuses("/both", 2).await, [200, 200]);
    let mut client = RawClient::connect(fixture.proxy.address).await;
    let mut ask = async || {
        client
            .request("GET /both HTTP/1.1\r\nHost: shop.example\r\n\r\n")
            .await
            .status
    };
    let refused = Instant::now();
    assert_eq!(ask().await, 429);
    server.kill();
    let status = ask().await;
    assert!(
        status == 429 || refused.elapsed() >= Duration::from_secs(1),
        "{status}"
    );
}

/// The listener opens with the first connection to the store, or after `connect_timeout`.
#[tokio::test]
async fn the_listener_waits_for_redis_at_most_connect_timeout() {
    let upstream = Upstream::echo().await;
    let mut server = RedisServer::start();
    let port = server.port();
    let start = async |connect_timeout| {
        let started = Instant::now();
        let proxy = build_proxy(port, connect_timeout, POLICIES)
            .upstream(upstream.address)
            .start()
            .await;
        (proxy, started.elapsed())
    };
    let (proxy, took) = start("8s").await;
    assert!(
        took < Duration::from_secs(4),
        "Redis is available, but startup took {took:?}"
    );
    assert!(proxy.get("/open").await.header("ratelimit").is_some());

    // Redis hangs and then resumes: the first request is decided.
    server.pause();
    let (late, ()) = tokio::join!(start("9s"), async {
        sleep(Duration::from_millis(500)).await;
        server.resume();
    });
    assert!(
        (Duration::from_millis(500)..Duration::from_secs(4)).contains(&late.1),
        "{:?}",
        late.1
    );
    assert!(late.0.get("/open").await.header("ratelimit").is_some());

    // Redis is down.
    server.kill();
    let (proxy, took) = start("400ms").await;
    let range = Duration::from_millis(400)..Duration::from_secs(3);
    assert!(range.contains(&took), "{took:?}");
    assert_eq!(proxy.get("/open").await.status, 200);
    assert!(is_fail_closed_reply(&proxy.get("/closed").await));
    server.restart_async().await;
    let back = Instant::now();
    proxy
        .wait_for_log("the store to recover", 0, MAX_RECOVERY, |line| {
            line.message_starts_with("redis available again")
        })
        .await;
    assert!(proxy.get("/closed").await.header("ratelimit").is_some());
    println!("started without Redis: back after {:?}", back.elapsed());
    let store = proxy
        .log_since(0)
        .into_iter()
        .filter(|line| line.message_starts_with("redis "));
    assert_eq!(store.count(), 2, "{}", proxy.log_text());
}

#[tokio::test]
async fn a_rejected_password_is_logged_without_its_value() {
    let server = RedisServer::start_with(&["--requirepass", "right"]);
    let upstream = Upstream::echo().await;
    let secret = "wrong-and-never-logged";
    let builder = build_proxy(server.port(), "300ms", POLICIES).env(
        "TIDEGATE_STORE__REDIS__URL",
        &format!("redis://:{secret}@127.0.0.1:{}/0", server.port()),
    );
    let proxy = builder.upstream(upstream.address).start().await;
    let line = proxy.wait_for_message("redis unavailable", 0).await;
    assert_eq!(line.field("kind"), "noauth");
    assert_eq!(proxy.get("/open").await.status, 200);
    assert!(is_fail_closed_reply(&proxy.get("/closed").await));
    assert!(!proxy.log_text().contains(secret));
    let client =
        redis::Client::open(format!("redis://:right@127.0.0.1:{}", server.port())).unwrap();
    let mut admin = client.get_multiplexed_async_connection().await.unwrap();
    let _: () = redis::cmd("CONFIG")
        .arg(&["SET", "requirepass", secret])
        .query_async(&mut admin)
        .await
        .unwrap();
    proxy
        .wait_for_log("the store to recover", 0, MAX_RECOVERY, |line| {
            line.message_starts_with("redis available again")
        })
        .await;
    assert!(proxy.get("/closed").await.header("ratelimit").is_some());
}

/// Any other server in place of Redis: one log line, degraded decisions, and no crash.
#[tokio::test]
async fn a_server_that_is_not_redis_is_logged_once() {
    let cases: [(&'static [u8], &'static [&'static str]); 14] = [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", &["reply"]),
        (b"+OK\r\n", &["reply"]),
        (b":1\r\n", &["reply"]),
        (b"*0\r\n", &["reply"]),
        (b"%1\r\n+a\r\n:1\r\n", &["reply"]),
        (b"$5\r\n1 2 3\r\n", &["reply"]),
        (b"$-2\r\n", &["reply"]),
        (b"*1000000000\r\n", &["timeout"]),
        (b"$536870912\r\nx", &["timeout", "reply"]),
        (b"-ERR unknown command\r\n", &["other"]),
        (b"-NOSCRIPT gone\r\n", &["noscript"]),
        (
            b"-DENIED Redis is running in protected mode\r\n",
            &["noauth"],
        ),
        (b"\x00\xff\xfe\x16\x03\x01", &["reply"]),
        (b"", &["connection"]),
    ];
    let upstream = Upstream::echo().await;
    let mut tests = JoinSet::new();
    for (answer, kinds) in cases {
        tests.spawn(check_non_redis_server(answer, kinds, upstream.address));
    }
    tests.join_all().await;
}

async fn check_non_redis_server(
    answer: &'static [u8],
    kinds: &'static [&'static str],
    upstream: SocketAddr,
) {
    let text = String::from_utf8_lossy(answer);
    let mut proxy = build_proxy(start_fixed_reply_server(answer).await, "300ms", POLICIES)
        .upstream(upstream)
        .start()
        .await;
    for _ in 0..10 {
        assert_eq!(proxy.get("/open").await.status, 200, "{text:?}");
        assert!(
            is_fail_closed_reply(&proxy.get("/closed").await),
            "{text:?}"
        );
    }
    let line = proxy.wait_for_message("redis unavailable", 0).await;
    assert!(kinds.contains(&&*line.field("kind")), "{text:?}: {line:?}");
    let store = proxy
        .log_since(0)
        .into_iter()
        .filter(|line| line.message_starts_with("redis "))
        .count();
    assert!(store == 1, "{text:?}");
    assert!(proxy.is_running(), "{text:?}");
    assert!(!proxy.log_text().contains("panicked"), "{text:?}");
}

/// Number of refusals in these lines of the access log, with those that a summary counts.
fn count_logged_refusals(access: &[LogLine]) -> usize {
    let count = |line: &LogLine| line.field("lines").parse().unwrap_or(1);
    access.iter().map(count).sum()
}
