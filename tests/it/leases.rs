//! Leases: several proxies take units in advance from one Redis. The upstream records show the
//! admitted requests.

use crate::support::prelude::*;
use std::pin::pin;
use tidegate::clock::Clock;
use tidegate::limiter::LeaseTerms;
use tidegate::store::{DecisionSource, LeasePool};
use tokio::time::Instant;

async fn start_proxy(server: &RedisServer, upstream: &Upstream, policy: &str) -> Proxy {
    let config = format!(
        r#"
store = {{ kind = "redis", redis = {{ url = "redis://127.0.0.1:{}/0", key_prefix = "shop", timeout = "2s" }} }}
log = {{ access = "off" }}
[[policy]]
name = "hot"
on_store_failure = "closed"
{policy}
"#,
        server.port(),
    );
    Proxy::start_connected(&config, upstream.address).await
}

/// How long the deny cache holds a refusal of a leased policy.
const REFUSAL_CACHE_TTL: Duration = Duration::from_millis(20);

/// The number of script calls so far.
async fn count_script_calls(server: &RedisServer) -> u64 {
    server
        .read_info_number("commandstats", "cmdstat_evalsha")
        .await
}

#[tokio::test]
async fn a_hot_key_calls_redis_less_than_once_per_hundred_requests() {
    let (server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let policy = r#"
limit = { requests = 100000, per = "1h", algorithm = "sliding_window" }
lease = { size = 500, ttl = "10m" }
"#;
    let proxy = start_proxy(&server, &upstream, policy).await;
    let before = count_script_calls(&server).await;
    let mut client = RawClient::connect(proxy.address).await;
    for nth in 1..=2_000_u64 {
        let request = client.request("GET / HTTP/1.1\r\nHost: shop.example\r\n\r\n");
        let reply = request.await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let remaining: u64 = reply.header_number("x-ratelimit-remaining");
        let range = 98_000 - 500..=100_000 - nth;
        assert!(range.contains(&remaining), "{remaining} after {nth}");
    }
    let asked = count_script_calls(&server).await - before;
    assert!(asked < 20, "{asked} calls for 2,000 requests");
    let metrics = proxy.read_metrics_page().await;
    let from_lease = "tidegate_decision_seconds_count{source=\"lease\"} 19";
    assert!(metrics.contains(from_lease), "{metrics}");
}

#[tokio::test]
async fn an_exhausted_key_calls_redis_only_after_the_refusal_cache_expires() {
    let (server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let policy = "limit = { requests = 20, per = \"1h\" }\nlease = { size = 5, ttl = \"100ms\" }";
    let proxy = start_proxy(&server, &upstream, policy).await;
    let mut client = RawClient::connect(proxy.address).await;
    let (before, began, mut passed) = (count_script_calls(&server).await, Instant::now(), 0);
    for _ in 0..1_000 {
        let request = client.request("GET / HTTP/1.1\r\nHost: shop.example\r\n\r\n");
        let reply = request.await;
        passed += usize::from(reply.status == 200);
        assert!(
            reply.status == 200 || reply.retry_after_us() > 3_500_000_000,
            "{reply:?}"
        );
    }
    // One call per deny cache TTL, and one membership call per second.
    let moments = began.elapsed().div_duration_f64(REFUSAL_CACHE_TTL) as u64;
    let asked = count_script_calls(&server).await - before;
    assert_eq!(passed, 20);
    assert!(
        asked <= 20 + moments + moments / 50,
        "{asked} calls in {moments} moments"
    );
}

#[tokio::test]
async fn nothing_is_granted_when_redis_rejects_writes() {
    let server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    let key = KeyBuilder::new("p").finish();
    let lends = [
        Algorithm::SlidingLog,
        Algorithm::SlidingWindow { buckets: 10 },
        Algorithm::FixedWindow { offset_us: 0 },
        plain_bucket(100),
    ];
    let limits = lends.map(|algorithm| make_limit(100, 60_000_000, algorithm));
    // A background call of cost 0 requests more units.
    let lend = async |limit: &Limit| {
        let lease = Some(LeaseTerms {
            size: Some(5),
            ttl_us: 1_000_000,
        });
        let charge = PolicyCharges {
            lease,
            requested_lease_units: 5,
            ..PolicyCharges::new(limit, &key, 0)
        };
        redis.decide(&[charge], Instant::now()).await
    };
    server.run("CONFIG SET maxmemory 100kb").await;
    for limit in &limits {
        assert_eq!(
            lend(limit).await.unwrap_err().unavailable.kind,
            "oom",
            "{limit:?}"
        );
    }
    server.run("CONFIG SET maxmemory 0").await;
    for limit in &limits {
        assert_eq!(
            lend(limit).await.unwrap().policies[0]
                .grant
                .map(|grant| grant.units),
            Some(5),
            "{limit:?}"
        );
    }
    server.run("REPLICAOF 127.0.0.1 1").await;
    assert_eq!(
        lend(&limits[0]).await.unwrap_err().unavailable.kind,
        "readonly"
    );
}

#[tokio::test]
async fn unused_units_are_returned_when_the_process_ends() {
    let (server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let policy = "limit = { requests = 10, per = \"1h\" }\nlease = { size = 50, ttl = \"30m\" }";
    let mut first = start_proxy(&server, &upstream, policy).await;
    let second = start_proxy(&server, &upstream, policy).await;
    assert_eq!(first.get_statuses("/", 3).await, [200; 3]);
    let statuses = second.get_statuses("/", 2).await;
    assert_eq!(statuses, [429; 2], "the remaining units are leased");
    first.send_sigterm();
    first.wait_for_exit(TEST_TIMEOUT).await;
    // The deny cache holds a refusal for a moment.
    sleep(REFUSAL_CACHE_TTL).await;
    let statuses = second.get_statuses("/", 9).await;
    assert_eq!(statuses, [200, 200, 200, 200, 200, 200, 200, 429, 429]);
}

#[tokio::test]
async fn unused_units_are_returned_when_the_lease_expires() {
    let (server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let lent = "limit = { requests = 10, per = \"1h\" }\nlease = { size = 50, ttl = \"1s\" }";
    let alone = "limit = { requests = 10, per = \"1h\" }";
    let (first, second) = (
        start_proxy(&server, &upstream, lent).await,
        start_proxy(&server, &upstream, alone).await,
    );
    assert_eq!(first.get_statuses("/", 3).await, [200; 3]);
    wait_until("the return of the units", async || {
        // Without a lease, the deny cache holds a refusal for one second.
        sleep(Duration::from_millis(50)).await;
        second.get("/").await.status == 200
    })
    .await;
    let answers = second.get_statuses("/", 8).await;
    assert_eq!(answers, [200, 200, 200, 200, 200, 200, 429, 429]);
}

#[tokio::test]
async fn leased_units_are_used_while_redis_is_down() {
    let (mut server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let policy = "limit = { requests = 1000, per = \"1h\" }\nlease = { size = 40, ttl = \"30m\" }";
    let proxy = start_proxy(&server, &upstream, policy).await;
    assert_eq!(proxy.get("/").await.status, 200);
    server.kill();
    let statuses = proxy.get_statuses("/", 45).await;
    assert_eq!(
        statuses.iter().filter(|status| **status == 200).count(),
        40,
        "{statuses:?}"
    );
    assert_eq!(statuses[40..], [503; 5]);
}

#[tokio::test]
async fn a_refusal_by_an_unleased_policy_returns_the_leased_unit() {
    let (server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let policy = r#"
limit = { requests = 30, per = "1h" }
lease = { size = 40, ttl = "30m" }
[[policy]]
name = "narrow"
match = { path = "/narrow" }
limit = { requests = 3, per = "1h" }
"#;
    let proxy = start_proxy(&server, &upstream, policy).await;
    let answers = proxy.get_statuses("/narrow", 8).await;
    assert_eq!(answers, [200, 200, 200, 429, 429, 429, 429, 429]);
    let statuses = proxy.get_statuses("/", 29).await;
    assert_eq!(
        statuses.iter().filter(|status| **status == 200).count(),
        27,
        "{statuses:?}"
    );
}

const LIMIT_UNITS: usize = 200;
const LIMIT_PERIOD: Duration = Duration::from_secs(1);

/// An upstream that records the requests it receives.
struct RecordingUpstream {
    start: Instant,
    arrivals: Arc<Mutex<Vec<RequestArrival>>>,
    upstream: Upstream,
}

/// An admitted request. It was decided between these two times.
#[derive(Clone, Debug)]
struct RequestArrival {
    path: String,
    sent: Instant,
    arrived: Instant,
}

/// One request and its response.
#[derive(Clone, Copy, Debug)]
struct ClientSample {
    sent: Instant,
    latency: Duration,
    status: u16,
}

impl RecordingUpstream {
    async fn start() -> Self {
        let (start, arrivals) = (Instant::now(), Arc::<Mutex<Vec<RequestArrival>>>::default());
        let seen = Arc::clone(&arrivals);
        let upstream = Upstream::with_handler(move |request| {
            let sent_us = request.headers()["x-sent-us"]
                .to_str()
                .unwrap()
                .parse()
                .unwrap();
            let sent = start + Duration::from_micros(sent_us);
            let path = request.uri().path().to_owned();
            seen.lock().unwrap().push(RequestArrival {
                path,
                sent,
                arrived: Instant::now(),
            });
            echo(request)
        });
        Self {
            upstream: upstream.await,
            start,
            arrivals,
        }
    }

    /// The requests that arrived at a path, in order.
    fn arrivals(&self, path: &str) -> Vec<RequestArrival> {
        let arrivals = self.arrivals.lock().unwrap();
        let mut own: Vec<_> = arrivals
            .iter()
            .filter(|arrival| arrival.path == path)
            .cloned()
            .collect();
        own.sort_by_key(|arrival| arrival.arrived);
        own
    }

    /// Sends requests for a path until a given time.
    fn spawn_client(
        &self,
        proxy: &Proxy,
        path: &str,
        until: Instant,
    ) -> JoinHandle<Vec<ClientSample>> {
        tokio::spawn(send_requests_until(
            proxy.address,
            path.to_owned(),
            self.start,
            until,
        ))
    }
}

/// The largest number of requests that were certainly decided within less than a period.
fn max_arrivals_in_a_period(arrivals: &[RequestArrival]) -> usize {
    let within = |(nth, last): (usize, &RequestArrival)| {
        arrivals[..=nth]
            .iter()
            .filter(|one| one.sent + LIMIT_PERIOD > last.arrived)
            .count()
    };
    arrivals.iter().enumerate().map(within).max().unwrap_or(0)
}

async fn send_requests_until(
    address: SocketAddr,
    path: String,
    start: Instant,
    until: Instant,
) -> Vec<ClientSample> {
    let (mut client, mut all) = (RawClient::connect(address).await, Vec::new());
    while Instant::now() < until {
        let (sent, sent_us) = (Instant::now(), start.elapsed().as_micros());
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: shop.example\r\nX-Sent-Us: {sent_us}\r\n\r\n");
        let status = client.request(request).await.status;
        all.push(ClientSample {
            sent,
            latency: sent.elapsed(),
            status,
        });
        if status != 200 {
            sleep(Duration::from_millis(5)).await;
        }
    }
    all
}

#[tokio::test]
async fn three_proxies_keep_the_limit_while_one_is_killed() {
    let (server, recorder) = (RedisServer::start(), RecordingUpstream::start().await);
    let policy = format!(
        "limit = {{ requests = {LIMIT_UNITS}, per = \"{}ms\" }}\nlease = {{ size = 20, ttl = \"100ms\" }}",
        LIMIT_PERIOD.as_millis()
    );
    let mut proxies = Vec::new();
    for _ in 0..3 {
        proxies.push(start_proxy(&server, &recorder.upstream, &policy).await);
    }
    let length = 4 * LIMIT_PERIOD;
    let until = Instant::now() + length;
    let mut clients: Vec<Vec<_>> = Vec::new();
    for proxy in &proxies {
        clients.push(
            (0..6)
                .map(|_| recorder.spawn_client(proxy, "/", until))
                .collect(),
        );
    }
    sleep(length / 3).await;
    for client in clients.remove(0) {
        client.abort();
    }
    drop(proxies.remove(0));
    for client in clients.into_iter().flatten() {
        assert!(
            client
                .await
                .unwrap()
                .iter()
                .all(|asked| [200, 429].contains(&asked.status))
        );
    }
    let arrivals = recorder.arrivals("/");
    println!("{} admitted", arrivals.len());
    assert!(
        max_arrivals_in_a_period(&arrivals) <= LIMIT_UNITS,
        "{} in a period",
        max_arrivals_in_a_period(&arrivals)
    );
    assert!(
        arrivals.len() > 2 * LIMIT_UNITS,
        "only {} were admitted in {length:?}",
        arrivals.len()
    );
}

/// `store.redis.timeout` of the proxies in front of a cluster, and an allowance for a busy machine.
const TIMEOUT: Duration = Duration::from_millis(300);
const TIMEOUT_SLACK: Duration = Duration::from_millis(300);

/// From the return of a node until Redis decides its keys again.
const MAX_RECOVERY: Duration = Duration::from_secs(4);

/// Units in one lease of one proxy.
const LEASE_UNITS: usize = 20;
const LEASE_TTL: Duration = Duration::from_millis(100);

/// The restarted node loses its counters, which admits one further limit for its own keys. Other
/// keys are unaffected.
#[tokio::test]
async fn a_cluster_node_is_killed_and_restarts_empty() {
    let (mut cluster, recorder) = (
        RedisCluster::start().await,
        RecordingUpstream::start().await,
    );
    let names = [0, 1].map(|node| {
        let mut names = (0..).map(|number| format!("p{number}"));
        names
            .find(|name| initial_node(&KeyBuilder::new(name).finish()) == node)
            .unwrap()
    });
    let policies = names.each_ref().map(|name| {
        format!(
            "[[policy]]\nname = \"{name}\"\nmatch = {{ path = \"/{name}\" }}\non_store_failure = \"closed\"\n\
             limit = {{ requests = {LIMIT_UNITS}, per = \"{}ms\" }}\nlease = {{ size = {LEASE_UNITS}, ttl = \"{}ms\" }}\n",
            LIMIT_PERIOD.as_millis(),
            LEASE_TTL.as_millis()
        )
    });
    let config = format!(
        "log = {{ access = \"off\" }}\n[store]\nkind = \"redis\"\n[store.redis]\n{}\nkey_prefix = \"shop\"\n\
         timeout = \"{}ms\"\n{}",
        cluster.config_lines(),
        TIMEOUT.as_millis(),
        policies.concat()
    );
    let mut proxies = Vec::new();
    for _ in 0..3 {
        let proxy = Proxy::start_connected(&config, recorder.upstream.address).await;
        proxies.push(proxy);
    }
    let paths = names.each_ref().map(|name| format!("/{name}"));
    let until = Instant::now() + Duration::from_secs(9);
    let [gone, there] = paths.each_ref().map(|path| {
        let clients = proxies.iter().flat_map(|proxy| [proxy; 3]);
        clients
            .map(|proxy| recorder.spawn_client(proxy, path, until))
            .collect::<Vec<_>>()
    });
    sleep(3 * LIMIT_PERIOD / 2).await;
    cluster.nodes[0].kill();
    let died = Instant::now();
    sleep(3 * LIMIT_PERIOD / 2).await;
    let restarted = Instant::now();
    cluster.nodes[0].restart_async().await;
    let healed = Instant::now();
    let all = async |clients: Vec<JoinHandle<Vec<ClientSample>>>| {
        let mut all = Vec::new();
        for client in clients {
            all.extend(client.await.unwrap());
        }
        all
    };
    let (gone, there) = (all(gone).await, all(there).await);

    let items = there.iter();
    let slowest = items.chain(&gone).map(|asked| asked.latency).max().unwrap();
    assert!(slowest <= TIMEOUT + TIMEOUT_SLACK, "{slowest:?}");
    let arrivals = recorder.arrivals(&paths[1]);
    let of_second = |n: u32| {
        let (from, to) = (died + LIMIT_PERIOD * n, died + LIMIT_PERIOD * (n + 1));
        arrivals
            .iter()
            .filter(|one| (from..to).contains(&one.arrived))
            .count()
    };
    let others: Vec<usize> = (0..6).map(of_second).collect();
    assert!(
        max_arrivals_in_a_period(&arrivals) <= LIMIT_UNITS,
        "{} admitted for other nodes in a period",
        max_arrivals_in_a_period(&arrivals)
    );
    // Leased units count until the lease ends. Admissions come in bursts, slightly more than a
    // period apart.
    let bursts = others.windows(2).map(|two| two[0] + two[1]);
    assert!(
        bursts.min() >= Some(LIMIT_UNITS * 9 / 10),
        "keys of other nodes were affected: {others:?}"
    );
    let late = there.iter().filter(|asked| asked.status == 503);
    assert!(
        late.clone().all(|asked| asked.latency >= TIMEOUT),
        "keys of other nodes got an early 503"
    );
    assert!(late.count() <= there.len() / 20);

    let arrivals = recorder.arrivals(&paths[0]);
    let before = arrivals
        .iter()
        .filter(|one| one.arrived < restarted)
        .cloned()
        .collect::<Vec<_>>();
    let after = arrivals
        .iter()
        .filter(|one| one.sent >= restarted)
        .cloned()
        .collect::<Vec<_>>();
    assert!(
        max_arrivals_in_a_period(&before) <= LIMIT_UNITS,
        "{} in a period before the restart",
        max_arrivals_in_a_period(&before)
    );
    assert!(
        max_arrivals_in_a_period(&after) <= LIMIT_UNITS,
        "{} in a period after the restart",
        max_arrivals_in_a_period(&after)
    );
    assert!(
        max_arrivals_in_a_period(&arrivals) <= 2 * LIMIT_UNITS,
        "{} in a period across the restart",
        max_arrivals_in_a_period(&arrivals)
    );
    let in_hand = before.iter().filter(|one| one.sent >= died).count();
    assert!(
        in_hand <= 3 * LEASE_UNITS,
        "{in_hand} were admitted without the node"
    );
    let held = before.last().unwrap().sent.saturating_duration_since(died);
    assert!(
        held <= LEASE_TTL + TIMEOUT_SLACK,
        "leased units were used for {held:?}"
    );
    let refused = gone.iter().filter(|asked| asked.status == 503).count();
    assert!(
        gone.iter()
            .all(|asked| [200, 429, 503].contains(&asked.status))
            && refused > 100,
        "{refused}"
    );
    let last = gone
        .iter()
        .filter(|asked| asked.status == 503)
        .map(|asked| asked.sent)
        .max()
        .unwrap();
    let recovery = last.saturating_duration_since(healed);
    assert!(
        recovery < MAX_RECOVERY && after.len() > LIMIT_UNITS,
        "{recovery:?}, {} after",
        after.len()
    );
    println!(
        "{} and {} admitted, {in_hand} from the hand for {held:?}, slowest {slowest:?}, back after {recovery:?}",
        arrivals.len(),
        others.iter().sum::<usize>()
    );
}

/// A refused request leaves the units that it did not get to others, also to those of other
/// instances.
#[tokio::test]
async fn a_refused_request_of_several_units_leases_none() {
    let (server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let policy = "cost = { header = 'x-cost', max = 9 }\nlease = { size = 3, ttl = '1m' }
        limit = { requests = 4, per = '1h' }";
    let proxy = start_proxy(&server, &upstream, policy).await;
    let other = start_proxy(&server, &upstream, policy).await;
    for (proxy, cost, status) in [
        (&proxy, "5", 429),
        (&proxy, "5", 429),
        (&other, "2", 200),
        (&proxy, "3", 429),
        (&other, "2", 200),
        (&other, "1", 429),
    ] {
        let request = proxy.request("GET", "/").header("x-cost", cost);
        let reply = request.send().await;
        assert_eq!(reply.status, status, "cost {cost}: {}", reply.text());
    }
}

/// In a cluster, the charges of a request and its lease are separate calls. The lease takes what the
/// request leaves.
#[tokio::test]
async fn a_request_takes_its_units_before_a_lease_does() {
    let cluster = RedisCluster::start().await;
    let config = format!(
        "[defaults]\non_store_failure = 'closed'\n[store]\nkind = 'redis'\n[store.redis]\n{}\ntimeout = '5s'\n\
         [[policy]]\nname = 'leased'\nmatch = {{ path = '/leased' }}\nkey = ['header:x-key']\n\
         limit = {{ requests = 1, per = '1h' }}\nlease = {{ size = 2, ttl = '100ms' }}\n\
         [[policy]]\nname = 'other'\nkey = ['header:x-user']\nlimit = {{ requests = 100, per = '1h' }}\n",
        cluster.config_lines()
    );
    let proxy = Proxy::with_echo(&config).await;
    for user in ["ann", "ben", "cem", "dan"] {
        let send = async || {
            let request = proxy.request("GET", "/leased").header("x-key", user);
            request.header("x-user", user).send().await.status
        };
        assert_eq!([send().await, send().await], [200, 429], "{user}");
    }
}

#[tokio::test]
async fn units_leased_for_a_cancelled_request_serve_other_requests() {
    let server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    let store = Store::from_redis(redis);
    let limit = sliding_log(1000, 3_600_000_000);
    let (key, lease) = (
        KeyBuilder::new("hot").finish(),
        LeaseTerms {
            size: Some(50),
            ttl_us: 600_000_000,
        },
    );
    let charge = PolicyCharges::new(&limit, &key, 1);
    for _ in 0..10 {
        let charges = [PolicyCharges {
            lease: Some(lease),
            ..charge.clone()
        }];
        let mut asking = pin!(store.decide(&charges));
        for _ in 0..4 {
            tokio::select! {
                biased;
                _ = &mut asking => break,
                () = tokio::task::yield_now() => {}
            }
        }
    }
    // Sent after the cancelled calls.
    let look = store
        .decide(&[charge.map_limits(|charge| charge.cost = 0)])
        .await
        .unwrap();
    let left = look.statuses().next().unwrap().remaining;
    assert!(left >= 1000 - 50 - 10, "{left}");
}

#[tokio::test]
async fn units_leased_under_old_limits_are_returned_at_once() {
    let server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    let store = Store::from_redis(redis);
    let lease = Some(LeaseTerms {
        size: Some(50),
        ttl_us: 600_000_000,
    });
    let limit = sliding_log(1000, 3_600_000_000);
    let (raised, key) = (
        Limit {
            requests: 2000,
            ..limit
        },
        KeyBuilder::new("hot").finish(),
    );
    for limit in [&limit, &raised] {
        let charge = PolicyCharges {
            lease,
            ..PolicyCharges::new(limit, &key, 1)
        };
        assert!(store.decide(&[charge]).await.unwrap().admitted);
        let look = [PolicyCharges::new(limit, &key, 0)];
        // At most two requests and one lease.
        wait_until("the return of the old limit's lease", async || {
            let status = store
                .decide(&look)
                .await
                .unwrap()
                .statuses()
                .next()
                .unwrap();
            status.remaining >= limit.requests - 52
        })
        .await;
    }
}

#[tokio::test]
async fn a_short_lease_expires_before_an_older_long_one() {
    let server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    let store = Store::from_redis(redis);
    let limit = sliding_log(1000, 3_600_000_000);
    for (name, ttl_us) in [("long", 600_000_000), ("short", 100_000)] {
        let key = KeyBuilder::new(name).finish();
        let charge = PolicyCharges::new(&limit, &key, 1);
        let lease = Some(LeaseTerms {
            size: Some(50),
            ttl_us,
        });
        assert!(
            store
                .decide(&[PolicyCharges {
                    lease,
                    ..charge.clone()
                }])
                .await
                .unwrap()
                .admitted
        );
        let deadline = Instant::now() + TEST_TIMEOUT;
        let look = [charge.map_limits(|charge| charge.cost = 0)];
        let left = async || {
            store
                .decide(&look)
                .await
                .unwrap()
                .statuses()
                .next()
                .unwrap()
                .remaining
        };
        while if name == "long" {
            left().await == 999
        } else {
            left().await < 999
        } {
            assert!(
                Instant::now() < deadline,
                "{name}: {} remaining",
                left().await
            );
            sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test]
async fn a_lease_ends_during_a_suspension_and_for_a_request_that_waited() {
    const TTL: Duration = Duration::from_millis(80);
    let server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    let (clock, boot_clock) = Clock::manual(1);
    let store = Store::from_redis(redis).with_shared_leases(&Arc::new(LeasePool::new(clock)));
    let limit = sliding_log(1000, 3_600_000_000);
    let ttl_us = u64::try_from(TTL.as_micros()).unwrap();
    for cause in ["a suspension", "a wait after the arrival"] {
        let key = KeyBuilder::new(cause).finish();
        let charge = PolicyCharges {
            lease: Some(LeaseTerms {
                size: Some(50),
                ttl_us,
            }),
            ..PolicyCharges::new(&limit, &key, 1)
        };
        let charge = [charge];
        let decide = async |arrived| {
            let (decision, source) = store.decide_with_source(&charge, arrived).await.unwrap();
            assert!(decision.admitted);
            source
        };
        wait_until(format!("a lease before {cause}"), async || {
            decide(Instant::now()).await == DecisionSource::Lease
        })
        .await;
        let arrived = Instant::now();
        match cause {
            "a suspension" => boot_clock.advance_us(ttl_us),
            // Blocks the runtime, so no task removes the lease.
            _ => std::thread::sleep(TTL),
        }
        let source = decide(arrived).await;
        assert_eq!(source, DecisionSource::Redis, "after {cause}");
    }
}
