//! `on_store_failure = "local"`: a fleet of proxies goes on without its Redis, and comes back to it.

use crate::support::client::RawClient;
use crate::support::cluster::{Cluster, node_of, node_of_name};
use crate::support::peer::Relay;
use crate::support::proxy::{Proxy, ProxyBuilder};
use crate::support::redis::{Server, free_port};
use crate::support::upstream::Upstream;
use crate::support::{SOON, eventually};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tidegate::limiter::KeyBuilder;
use tokio::task::JoinHandle;
use tokio::time::sleep;

const LIMIT: usize = 30;
const PER: Duration = Duration::from_secs(1);
const CLIENTS: usize = 9;

/// How long the instances may take to see who has come or gone: those that are gone are waited for.
const COUNTED: Duration = Duration::from_secs(20);

fn builder(redis_port: u16, policies: &str) -> ProxyBuilder {
    builder_over(
        &format!("url = \"redis://127.0.0.1:{redis_port}/0\""),
        policies,
    )
}

/// With lines that say where Redis is.
fn builder_over(redis: &str, policies: &str) -> ProxyBuilder {
    Proxy::builder().config(&format!(
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

async fn start(redis_port: u16, policies: &str, upstream: SocketAddr) -> Proxy {
    builder(redis_port, policies)
        .upstream(upstream)
        .start()
        .await
}

/// Waits until a proxy counts so many instances.
async fn counts(proxy: &Proxy, instances: f64) {
    let deadline = Instant::now() + COUNTED;
    loop {
        let seen = proxy.metric("tidegate_instances").await;
        if seen == instances {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "counts {seen} instances, not {instances}: {}",
            proxy.log()
        );
        sleep(Duration::from_millis(20)).await;
    }
}

/// A request that was admitted: between these two it was decided.
#[derive(Clone, Copy, Debug)]
struct Admitted {
    sent: Instant,
    answered: Instant,
}

/// Clients of all proxies that ask all the time.
struct Load {
    admitted: Arc<Mutex<Vec<Admitted>>>,
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<usize>>,
}

impl Load {
    fn start(proxies: &[Proxy], target: &str) -> Self {
        let (admitted, stop): (Arc<Mutex<Vec<Admitted>>>, Arc<AtomicBool>) = Default::default();
        let client = |n: usize| {
            let (admitted, stop) = (Arc::clone(&admitted), Arc::clone(&stop));
            tokio::spawn(knock(
                proxies[n % proxies.len()].address,
                target.to_owned(),
                admitted,
                stop,
            ))
        };
        let clients = (0..CLIENTS).map(client).collect();
        Self {
            admitted,
            stop,
            clients,
        }
    }

    /// Lets so much time pass, and fails if a client met what it should not.
    async fn goes_on(&self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            assert!(
                !self.clients.iter().any(JoinHandle::is_finished),
                "a client gave up"
            );
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn end(self) -> (Vec<Admitted>, usize) {
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

async fn knock(
    address: SocketAddr,
    target: String,
    all: Arc<Mutex<Vec<Admitted>>>,
    stop: Arc<AtomicBool>,
) -> usize {
    let (mut client, mut refused) = (RawClient::connect(address).await, 0);
    let request = format!("GET {target} HTTP/1.1\r\nHost: shop.example\r\n\r\n");
    while !stop.load(Ordering::Relaxed) {
        let sent = Instant::now();
        let reply = client.send(&request).await.reply().await;
        match reply.status {
            200 => all.lock().unwrap().push(Admitted {
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

/// The most that were certainly admitted within one period.
fn fullest(admitted: &[Admitted]) -> usize {
    let within = |first: &Admitted| {
        let inside = |one: &&Admitted| one.sent >= first.sent && one.answered < first.sent + PER;
        admitted.iter().filter(inside).count()
    };
    admitted.iter().map(within).max().unwrap_or(0)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// It goes on with all that it knew, and perhaps with what it was told meanwhile.
    Stopped,
    /// It starts again and knows nothing.
    Killed,
}

/// The limit of a policy that matches everything.
fn hot(name: &str, beside: &str) -> String {
    format!(
        "[[policy]]\nname = \"{name}\"\nlimit = {{ requests = {LIMIT}, per = \"1s\" }}\n{beside}"
    )
}

/// Three proxies, asked hard before, in and after an outage. It lasts a half of `TIDEGATE_TEST_SECONDS`, else 3 s.
async fn outage(fault: Fault, policy: &str) {
    let seconds =
        std::env::var("TIDEGATE_TEST_SECONDS").map_or(6, |seconds| seconds.parse().unwrap());
    let length = Duration::from_secs(seconds) / 2;
    let (mut server, upstream) = (Server::start(), Upstream::echo().await);
    let mut proxies = Vec::new();
    for _ in 0..3 {
        proxies.push(start(server.port(), policy, upstream.address).await);
    }
    for proxy in &proxies {
        counts(proxy, 3.0).await;
    }
    let load = Load::start(&proxies, "/");
    load.goes_on(2 * PER).await;
    match fault {
        Fault::Stopped => server.stop(),
        Fault::Killed => server.kill(),
    }
    let began = Instant::now();
    load.goes_on(length).await;
    match fault {
        Fault::Stopped => server.resume(),
        Fault::Killed => server.restart_aside().await,
    }
    let healed = Instant::now();
    let mut degraded = 0.0;
    for proxy in &proxies {
        degraded += proxy
            .metric("tidegate_degraded_total{policy=\"hot\",outcome=\"local_allowed\"}")
            .await;
    }
    load.goes_on(5 * PER).await;
    let (admitted, refused) = load.end().await;

    let count = |from: Instant, to: Instant| {
        admitted
            .iter()
            .filter(|one| one.sent >= from && one.answered < to)
            .count()
    };
    let since: Vec<Admitted> = admitted
        .iter()
        .copied()
        .filter(|one| one.sent >= began)
        .collect();
    let windows = length.as_secs_f64() / PER.as_secs_f64();
    let after: Vec<usize> = (0..4u32)
        .map(|n| count(healed + PER * n, healed + PER * (n + 1)))
        .collect();
    println!(
        "{fault:?} for {length:?}: {} admitted in it ({} by themselves), at most {} in a window of the limit of {LIMIT}, \
         {} across its begin; in the seconds after it {after:?}; {refused} refused",
        count(began, healed),
        degraded,
        fullest(&since),
        fullest(&admitted),
    );
    assert!(refused > 100, "{refused}: the limit was hardly asked for");
    assert!(
        fullest(&since) <= LIMIT,
        "from the fault on, also across its end: {}",
        fullest(&since)
    );
    assert!(
        fullest(&admitted) <= 2 * LIMIT,
        "across its begin: {}",
        fullest(&admitted)
    );
    let in_outage = count(began, healed);
    assert!(
        in_outage as f64 >= (windows - 1.5) * LIMIT as f64 * 0.8,
        "they hardly went on: {in_outage}"
    );
    assert!(
        after.iter().skip(1).all(|count| *count >= LIMIT / 2),
        "Redis decides again: {after:?}"
    );
    for proxy in &proxies {
        assert_eq!(proxy.metric("tidegate_store_up").await, 1.0);
    }
}

#[tokio::test]
async fn three_proxies_keep_the_limit_while_redis_hangs_and_after() {
    outage(Fault::Stopped, &hot("hot", "")).await;
}

#[tokio::test]
async fn three_proxies_keep_the_limit_while_redis_is_gone_and_after_it_came_back_empty() {
    outage(Fault::Killed, &hot("hot", "")).await;
}

/// What is in hand when Redis goes away is handed out; a policy beside lends, too, and is open.
#[tokio::test]
async fn three_proxies_with_leases_keep_the_limit_through_an_outage() {
    let lease = "lease = { size = 4, ttl = \"100ms\" }\n";
    let beside = "[[policy]]\nname = \"beside\"\nlimit = { requests = 5000, per = \"1s\" }\n\
                  on_store_failure = \"open\"\n";
    outage(Fault::Stopped, &(hot("hot", lease) + beside + lease)).await;
}

#[tokio::test]
async fn what_is_in_hand_is_a_part_of_the_share() {
    let (server, upstream) = (Server::start(), Upstream::echo().await);
    let policy = "[[policy]]\nname = \"p\"\nlimit = { requests = 30, per = \"1h\" }\n\
                  lease = { size = 5, ttl = \"30m\" }";
    let mut proxies = Vec::new();
    for _ in 0..3 {
        proxies.push(start(server.port(), policy, upstream.address).await);
    }
    for proxy in &proxies {
        counts(proxy, 3.0).await;
        assert_eq!(proxy.get("/").await.status, 200);
    }
    server.stop();
    let mut passed = 3;
    for proxy in &proxies {
        let statuses = proxy.statuses("/", 40).await;
        let own = statuses.iter().filter(|status| **status == 200).count();
        assert!(own >= 5, "what is in hand is used: {statuses:?}");
        assert!(
            statuses.iter().all(|status| [200, 429].contains(status)),
            "{statuses:?}"
        );
        passed += own;
    }
    assert!(passed <= 30, "{passed} of 30");
    server.resume();
}

/// A node that hangs takes its own keys along: those go on by shares, for longer than silent instances are counted, and
/// get no second quota after, not even by an instance that was not asked for them. All others are decided by Redis
/// throughout, whoever asks how much.
#[tokio::test]
async fn one_node_of_a_cluster_is_away() {
    let (cluster, upstream) = (Cluster::start().await, Upstream::echo().await);
    // The instances are counted elsewhere.
    let counted = node_of_name("shop:v1:instances");
    let names = [1, 2].map(|other| {
        let mut names = (0..).map(|number| format!("p{number}"));
        names
            .find(|name| node_of(&KeyBuilder::new(name).finish()) == (counted + other) % 3)
            .unwrap()
    });
    let policy = |name: &String| hot(name, &format!("match = {{ path = \"/{name}\" }}\n"));
    let policies = names.each_ref().map(policy).concat();
    let mut proxies = Vec::new();
    for _ in 0..3 {
        let proxy = builder_over(&cluster.lines(), &policies)
            .upstream(upstream.address)
            .start()
            .await;
        proxies.push(proxy);
    }
    for proxy in &proxies {
        counts(proxy, 3.0).await;
    }
    let [path, other] = names.each_ref().map(|name| format!("/{name}"));
    let (gone, there) = (
        Load::start(&proxies[..2], &path),
        Load::start(&proxies[..1], &other),
    );
    there.goes_on(2 * PER).await;
    cluster.nodes[(counted + 1) % 3].stop();
    let began = Instant::now();
    there.goes_on(10 * PER).await;
    for proxy in &proxies {
        assert_eq!(
            proxy.metric("tidegate_instances").await,
            3.0,
            "who waits for a node lives"
        );
    }
    cluster.nodes[(counted + 1) % 3].resume();
    let healed = Instant::now();
    let late = Load::start(&proxies[2..], &path);
    there.goes_on(6 * PER).await;
    let (mut gone, _) = gone.end().await;
    gone.extend(late.end().await.0);
    let (there, refused) = there.end().await;

    let count = |admitted: &[Admitted], from: Instant, to: Instant| {
        admitted
            .iter()
            .filter(|one| one.sent >= from && one.answered < to)
            .count()
    };
    let seconds = |admitted: &[Admitted], from: Instant, number: u32| -> Vec<usize> {
        (0..number)
            .map(|n| count(admitted, from + PER * n, from + PER * (n + 1)))
            .collect()
    };
    let since: Vec<Admitted> = gone
        .iter()
        .copied()
        .filter(|one| one.sent >= began)
        .collect();
    let (in_it, after) = (seconds(&gone, began, 10), seconds(&gone, healed, 5));
    println!(
        "its keys: {in_it:?} in the outage, {after:?} after it; others: {:?}",
        seconds(&there, began, 15)
    );
    assert!(
        fullest(&since) <= LIMIT,
        "from the fault on, also across its end: {}",
        fullest(&since)
    );
    // Two of three shares; on a busy machine the first seconds go by in noticing it.
    assert!(
        in_it[1..].iter().all(|count| *count >= LIMIT / 5),
        "they hardly went on: {in_it:?}"
    );
    assert!(
        in_it.iter().sum::<usize>() >= 10 * LIMIT / 3,
        "they hardly went on: {in_it:?}"
    );
    // They come in heaps a little more than a period apart.
    let least = |counts: &[usize]| counts.windows(2).map(|two| two[0] + two[1]).min().unwrap();
    assert!(
        least(&after[1..]) >= LIMIT,
        "Redis decides again: {after:?}"
    );

    assert!(
        refused > 100 && fullest(&there) <= LIMIT,
        "{}",
        fullest(&there)
    );
    let others = seconds(&there, began, 15);
    assert!(
        least(&others) >= LIMIT * 4 / 3,
        "others went on: {others:?}"
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
            alone += proxy.metric(&series).await;
        }
    }
    // On a machine that is too busy for the deadline.
    assert!(
        alone <= 20.0,
        "{alone} of the others were decided without Redis"
    );
}

#[tokio::test]
async fn instances_are_counted_and_those_that_end_or_die_are_not() {
    let (server, upstream) = (Server::start(), Upstream::echo().await);
    let policy = "[[policy]]\nname = \"p\"\nlimit = { requests = 10, per = \"1h\" }";
    let mut proxies = Vec::new();
    for _ in 0..3 {
        proxies.push(start(server.port(), policy, upstream.address).await);
    }
    counts(&proxies[0], 3.0).await;
    let members: usize = server.command("ZCARD shop:v1:instances").await;
    assert_eq!(members, 3);

    let mut ends = proxies.pop().unwrap();
    ends.sigterm();
    assert!(ends.ended(SOON).await.status.success());
    let members: usize = server.command("ZCARD shop:v1:instances").await;
    assert_eq!(members, 2, "who ends in order is out at once");
    let places: usize = server
        .command("ZCARD shop:v1:instances:{shop:v1:instances}")
        .await;
    assert_eq!(places, 2, "and has no place");
    counts(&proxies[0], 2.0).await;

    drop(proxies.pop());
    counts(&proxies[0], 1.0).await;
    drop(proxies);
    let gone = || async { server.command::<usize>("EXISTS shop:v1:instances").await == 0 };
    let deadline = Instant::now() + COUNTED;
    while !gone().await {
        assert!(Instant::now() < deadline, "the set outlives everybody");
        sleep(Duration::from_millis(20)).await;
    }
}

/// What an instance said before a server hung is heard when that goes on, and may no longer be true.
#[tokio::test]
async fn who_has_something_to_tell_or_is_heard_too_late_has_not_told_all() {
    let server = Server::start();
    let tell = async |id: &str, does: &str, until: &str, kept_us: u64| {
        let mut command = redis::cmd("EVAL");
        command
            .arg(include_str!("../../src/store/redis/fleet.lua"))
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
    let beat = async |id: &str, does: &str, until: &str| tell(id, does, until, 5_000_000).await;
    assert_eq!(beat("b", "beat", "").await, (1, 0, 1));
    assert_eq!(beat("c", "owe", "").await, (2, 1, 1));
    assert_eq!(beat("a", "beat", "1").await, (3, 0, 1), "too late");
    assert_eq!(beat("a", "beat", "9000000000000000").await, (3, 0, 2));
    assert_eq!(beat("d", "look", "").await, (3, 3, 2));
    assert_eq!(beat("c", "beat", "").await, (3, 2, 3));
    assert_eq!(beat("b", "owe", "").await, (3, 1, 2));
    sleep(Duration::from_millis(20)).await;
    let silent = "the silent have no place, whether they owe or not";
    assert_eq!(tell("d", "beat", "", 10_000).await, (1, 0, 1), "{silent}");
}

#[tokio::test]
async fn whoever_may_not_be_counted_still_has_his_requests_decided() {
    let (server, upstream) = (Server::start(), Upstream::echo().await);
    let _: () = server.command("ACL SETUSER default -eval").await;
    let mut proxy = start(server.port(), MIXED, upstream.address).await;
    let warning = "Redis does not let the instances be counted";
    proxy
        .wait_for_log("a warning", 0, SOON, |line| {
            line.is_level("WARN") && line.says(warning)
        })
        .await;
    assert_eq!(
        proxy.statuses("/local", 22).await,
        [200; 22],
        "not a share only"
    );
    assert_eq!(proxy.metric("tidegate_store_up").await, 1.0);
    assert!(
        proxy.is_running() && !proxy.log().contains("Redis is down"),
        "{}",
        proxy.log()
    );
}

const MIXED: &str = r#"
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
async fn without_redis_from_the_start_the_configured_number_shares() {
    let upstream = Upstream::echo().await;
    let proxy = start(free_port(), MIXED, upstream.address).await;
    // A part of 22 for one of four whose place nobody knows.
    let statuses = proxy.statuses("/local", 3).await;
    assert_eq!(statuses, [200; 3]);
    assert_eq!(
        proxy.statuses("/both", 3).await,
        [200, 200, 429],
        "what is open stops nothing"
    );
    let refused = proxy.get("/local").await;
    assert_eq!(refused.status, 429);
    assert_eq!(refused.json()["policy"], "local");
    assert!(
        (3_590_000_000..=3_600_000_000).contains(&refused.retry_after_us()),
        "{}",
        refused.text()
    );
    assert_eq!(refused.parameter("ratelimit", "local", "r"), Some(0));
    assert_eq!(proxy.statuses("/open", 3).await, [200; 3]);
    assert_eq!(proxy.get("/closed").await.status, 503, "one closed decides");
    let outcome = async |policy: &str, outcome: &str| {
        proxy
            .metric(&format!(
                "tidegate_degraded_total{{policy=\"{policy}\",outcome=\"{outcome}\"}}"
            ))
            .await
    };
    assert_eq!(outcome("local", "local_allowed").await, 5.0);
    assert_eq!(outcome("local", "local_rejected").await, 2.0);
    assert_eq!(outcome("open", "open").await, 6.0);
    assert_eq!(outcome("closed", "closed").await, 1.0);
    assert_eq!(
        outcome("beside", "local_allowed").await,
        0.0,
        "nothing was charged"
    );
    assert_eq!(
        proxy
            .metric("tidegate_requests_total{policy=\"local\",decision=\"degraded\"}")
            .await,
        7.0
    );
    assert_eq!(proxy.metric("tidegate_instances").await, 4.0);
}

#[tokio::test]
async fn what_was_used_stays_used_in_an_outage_and_what_was_used_in_it_after() {
    let (server, upstream) = (Server::start(), Upstream::echo().await);
    let proxy = start(server.port(), MIXED, upstream.address).await;
    counts(&proxy, 1.0).await;
    assert_eq!(proxy.statuses("/local", 20).await, [200; 20]);
    server.stop();
    assert_eq!(
        proxy.statuses("/local", 4).await,
        [200, 200, 429, 429],
        "no fresh quota"
    );
    server.resume();
    let by_redis = "tidegate_decision_seconds_count{source=\"redis\"}";
    let deadline = Instant::now() + COUNTED;
    while proxy.metric(by_redis).await < 25.0 {
        assert_eq!(proxy.get("/local").await.status, 429, "no second quota");
        assert!(
            Instant::now() < deadline,
            "Redis does not decide again: {}",
            proxy.log()
        );
        // Longer than a refusal is remembered.
        sleep(Duration::from_millis(300)).await;
    }
}

#[tokio::test]
async fn nothing_is_lent_while_others_have_not_written_back() {
    let (mut server, upstream) = (Server::start(), Upstream::echo().await);
    let relay = Relay::to(server.port()).await;
    let policy = "[[policy]]\nname = \"hot\"\nlimit = { requests = 200, per = \"1h\" }\n\
                  lease = { size = 50, ttl = \"10s\" }";
    let first = start(server.port(), policy, upstream.address).await;
    let last = start(relay.port, policy, upstream.address).await;
    counts(&first, 2.0).await;
    counts(&last, 2.0).await;
    server.kill();
    let admitted = |statuses: Vec<u16>| statuses.iter().filter(|status| **status == 200).count();
    let mut sum = admitted(last.statuses("/", 110).await) + admitted(first.statuses("/", 1).await);
    assert_eq!(sum, 101, "a share, and one");
    // One of them finds Redis again, the other does not yet.
    relay.swallow();
    server.restart_aside().await;
    let until = Instant::now() + 2 * PER;
    while Instant::now() < until {
        sum += admitted(first.statuses("/", 10).await);
    }
    assert!(sum <= 200, "{sum} of 200");
}

/// Others may have gone on without it meanwhile. But a server may also close connections because they idle.
#[tokio::test]
async fn an_outage_is_noticed_without_a_request_and_a_connection_that_is_replaced_at_once_is_none()
{
    let mut server = Server::start();
    let (_shared, redis) = server.redis().await;
    let _: u64 = server.command("CLIENT KILL TYPE normal").await;
    let deadline = Instant::now() + SOON;
    // The one that looks is counted too.
    while server.info("clients", "connected_clients").await < 2 || !redis.is_reachable() {
        assert!(Instant::now() < deadline, "it does not connect again");
        sleep(Duration::from_millis(5)).await;
    }
    assert!(!redis.local().is_away());
    server.kill();
    eventually("the outage to be noticed", SOON, || {
        redis.local().is_away().then_some(())
    })
    .await;
}
