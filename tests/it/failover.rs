//! Sentinel failover: the master changes with little effect on clients.

use crate::redis_outage::{
    OutageFixture, POLICIES, PolicyRoute, RequestSample, TIMEOUT, TIMEOUT_SLACK,
};
use crate::support::prelude::*;
use crate::support::sentinel::{FakeSentinel, MASTER_NAME, SentinelProcess};
use tidegate::store::redis::RedisCredentials;

/// From the moment the sentinels name another master until the last request without a decision by
/// Redis.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(2);

/// Sentinels that vote at the same time elect no leader, and retry after a while.
const ELECTION_TIMEOUT: Duration = Duration::from_secs(30);

/// After this time, a replica has received a charge.
const REPLICATION_DELAY: Duration = Duration::from_millis(200);

const LIMIT: Limit = sliding_log(1000, 60_000_000);

async fn remaining_units(store: &Store) -> Result<u64, &'static str> {
    let key = KeyBuilder::new("k").finish();
    let decision = store.decide(&[PolicyCharges::new(&LIMIT, &key, 1)]).await;
    decision
        .map(|decision| decision.statuses().next().unwrap().remaining)
        .map_err(|error| error.kind)
}

/// Injects a fault into a deployment under load, and checks the responses of clients.
async fn assert_failover_is_handled(
    what: &str,
    fixture: &OutageFixture,
    watched: &mut SentinelDeployment,
    fault: impl AsyncFnOnce(&mut SentinelDeployment, u16),
) {
    let load = fixture.start_load().await;
    let old = watched.master_port().await;
    let began = Instant::now();
    fault(watched, old).await;
    let is_promoted = async || watched.master_port().await != old;
    wait_until_within(
        format!("{what}: a promotion"),
        ELECTION_TIMEOUT,
        is_promoted,
    )
    .await;
    let elected = Instant::now();
    let new = watched.master_port().await;
    let server = watched.server_by_port(new);
    let is_called = async || {
        let calls = server.read_info_number("commandstats", "cmdstat_evalsha");
        calls.await > 0
    };
    let what_calls = format!("{what}: calls of the new master");
    wait_until_within(what_calls, RECOVERY_TIMEOUT, is_called).await;
    let followed = elected.elapsed();
    load.wait_until_decided_since(elected).await;
    let asked = load.finish().await;

    let slowest = |past: bool| {
        asked
            .iter()
            .filter(|asked| (asked.route == PolicyRoute::Unlimited) == past)
            .map(|asked| asked.latency)
            .max()
    };
    let (limited, machine) = (slowest(false).unwrap(), slowest(true).unwrap());
    assert!(
        limited <= TIMEOUT + TIMEOUT_SLACK + machine,
        "{what}: {limited:?}, without policies {machine:?}"
    );
    let lost = |asked: &&RequestSample| asked.route != PolicyRoute::Unlimited && !asked.decided;
    let last = asked
        .iter()
        .filter(lost)
        .map(|asked| asked.sent)
        .max()
        .unwrap_or(elected);
    let recovery = last.saturating_duration_since(elected);
    assert!(recovery < RECOVERY_TIMEOUT, "{what}: {recovery:?}");
    let refused = asked.iter().filter(|asked| asked.status == 503).count();
    assert_eq!(
        fixture.upstream.requests().len(),
        asked.len() - refused,
        "{what}: a request has no response, or more than one"
    );
    println!(
        "{what}: {} requests, {} undecided, {refused} refused; slowest {limited:?}; a master after {:?}, \
         followed after {followed:?}, the last undecided after {recovery:?}",
        asked.len(),
        asked.iter().filter(lost).count(),
        elected - began,
    );

    // Only charges that were not replicated may be lost. The new master counts all later ones.
    let left = |reply: RawResponse| reply.remaining("closed");
    // Until the old master is demoted, a worker that has not switched yet may still call it, and
    // rejects a request when it finds that out.
    let first = loop {
        let first = left(fixture.proxy.get("/closed").await);
        let second = left(fixture.proxy.get("/closed").await);
        if let (Some(first), Some(second)) = (first, second)
            && second == first - 1
        {
            break first;
        }
        assert!(
            elected.elapsed() < 2 * RECOVERY_TIMEOUT,
            "{what}: {first:?}, then {second:?}"
        );
    };
    let before = |asked: &&RequestSample| {
        asked.route == PolicyRoute::Closed
            && asked.status == 200
            && asked.sent + asked.latency + REPLICATION_DELAY < began
    };
    let known = asked.iter().filter(before).count() as u64;
    assert!(
        100_000 - first >= known,
        "{what}: {known} were charged before, and {first} are left"
    );
}

#[tokio::test]
async fn a_requested_failover_is_followed() {
    let mut watched = SentinelDeployment::start(1).await;
    let fixture = OutageFixture::with_redis(&watched.config_lines(), POLICIES).await;
    assert_failover_is_handled(
        "SENTINEL FAILOVER",
        &fixture,
        &mut watched,
        async |watched, _| {
            let client = redis::Client::open(("127.0.0.1", watched.sentinels[0].port)).unwrap();
            let mut sentinel = client.get_multiplexed_async_connection().await.unwrap();
            let _: () = redis::cmd("SENTINEL")
                .arg("FAILOVER")
                .arg(MASTER_NAME)
                .query_async(&mut sentinel)
                .await
                .unwrap();
        },
    )
    .await;
}

#[tokio::test]
async fn a_dead_master_is_replaced() {
    let mut watched = SentinelDeployment::start(2).await;
    let fixture = OutageFixture::with_redis(&watched.config_lines(), POLICIES).await;
    assert_failover_is_handled(
        "kill -9 of the master",
        &fixture,
        &mut watched,
        async |watched, old| watched.server_by_port(old).kill(),
    )
    .await;
}

#[tokio::test]
async fn a_hung_master_is_replaced() {
    let mut watched = SentinelDeployment::start(1).await;
    let fixture = OutageFixture::with_redis(&watched.config_lines(), POLICIES).await;
    assert_failover_is_handled(
        "SIGSTOP of the master",
        &fixture,
        &mut watched,
        async |watched, old| watched.server_by_port(old).pause(),
    )
    .await;
}

#[tokio::test]
async fn one_live_sentinel_is_enough() {
    let mut watched = SentinelDeployment::start(1).await;
    watched.sentinels[0].kill();
    watched.sentinels[1].kill();
    for _ in 0..3 {
        let (shared, redis) = connect_redis(watched.settings()).await;
        assert!(shared.is_up());
        remaining_units(&Store::from_redis(redis)).await.unwrap();
    }
    watched.sentinels[2].kill();
    let (_shared, redis) = connect_redis(watched.settings()).await;
    let answer = remaining_units(&Store::from_redis(redis)).await;
    assert_eq!(answer, Err("refused"));
}

#[tokio::test]
async fn sentinels_without_the_named_master_are_reported() {
    let watched = SentinelDeployment::start(0).await;
    let settings = RedisSettings {
        topology: RedisTopology::Sentinel {
            master: "other".to_owned(),
            credentials: RedisCredentials::default(),
        },
        ..watched.settings()
    };
    let (_shared, redis) = connect_redis(settings).await;
    let answer = remaining_units(&Store::from_redis(redis)).await;
    assert_eq!(answer, Err("masterdown"));
}

/// Makes sentinels monitor another master.
async fn monitor(sentinels: &[SentinelProcess], master: &RedisServer) {
    for sentinel in sentinels {
        sentinel
            .run(&format!("SENTINEL REMOVE {MASTER_NAME}"))
            .await;
        let port = master.port();
        let monitor = format!("SENTINEL MONITOR {MASTER_NAME} 127.0.0.1 {port} 2");
        sentinel.run(&monitor).await;
    }
}

/// Each instance starts with another sentinel, or starts before the sentinels disagree.
#[tokio::test]
async fn all_instances_count_in_one_master_while_sentinels_disagree() {
    for is_epoch_readable in [true, false] {
        let watched = SentinelDeployment::start(0).await;
        if !is_epoch_readable {
            for sentinel in &watched.sentinels {
                sentinel.run("ACL SETUSER default -sentinel|master").await;
            }
        }
        let mut instances = Vec::new();
        for _ in 0..4 {
            instances.push(connect_redis(watched.settings()).await);
        }
        let other = RedisServer::start();
        monitor(&watched.sentinels[..2], &other).await;
        for _ in 0..8 {
            instances.push(connect_redis(watched.settings()).await);
        }
        // Later than the checks that move the first instances to the other master.
        sleep(RECOVERY_TIMEOUT).await;
        let mut left = Vec::new();
        for (_, redis) in &instances {
            left.push(remaining_units(&Store::from_redis(redis.clone())).await);
        }
        let expected: Vec<Result<u64, &str>> = (988..1000).rev().map(Ok).collect();
        assert_eq!(left, expected, "each charge is counted in the same master");
        let counters = list_counter_keys(&other).await;
        let is_charged = counters.iter().any(|key| key.ends_with(":k"));
        assert!(is_charged, "two of three sentinels name this one");
        for (shared, _) in &instances {
            let disagreements = shared.server_info().sentinel_disagreements;
            assert!(disagreements > 0);
        }
    }
}

#[tokio::test]
async fn a_disagreement_of_sentinels_is_logged_and_counted() {
    const DISAGREEMENTS: &str = "tidegate_redis_sentinel_disagreements_total";
    const MESSAGE: &str = "the sentinels name different masters";
    let watched = SentinelDeployment::start(0).await;
    let config = format!(
        "[store]\nkind = 'redis'\n[store.redis]\n{}",
        watched.config_lines()
    );
    let proxy = Proxy::setup(&config).start().await;
    proxy.wait_for_store().await;
    assert_eq!(proxy.read_metric(DISAGREEMENTS).await, 0.0);
    assert!(!proxy.log_text().contains(MESSAGE));
    let other = RedisServer::start();
    monitor(&watched.sentinels[2..], &other).await;
    let is_logged = |line: &LogLine| line.message_starts_with(MESSAGE);
    let line = proxy
        .wait_for_log(MESSAGE, 0, RECOVERY_TIMEOUT, is_logged)
        .await;
    let port = |server: &RedisServer| format!("127.0.0.1:{} (epoch 0)", server.port());
    let answers = line.field("answers");
    let count = answers.matches(&port(&watched.servers[0])).count();
    assert_eq!(count, 2, "{answers}");
    assert_eq!(answers.matches(&port(&other)).count(), 1, "{answers}");
    let found = line.field("master");
    assert_eq!(found, format!("127.0.0.1:{}", watched.servers[0].port()));
    assert!(proxy.read_metric(DISAGREEMENTS).await > 0.0);
    assert!(list_counter_keys(&other).await.is_empty());
    let mark = proxy.log_mark();
    sleep(RECOVERY_TIMEOUT / 2).await;
    let repeated = proxy
        .log_since(mark)
        .into_iter()
        .any(|line| is_logged(&line));
    assert!(!repeated, "at most one line a minute");
}

/// An old master that is cut off from its sentinels does not know of the new one, and keeps
/// serving.
#[tokio::test]
async fn a_demoted_master_is_abandoned_though_it_still_replies() {
    let watched = SentinelDeployment::start(0).await;
    let (_shared, redis) = connect_redis(watched.settings()).await;
    let store = Store::from_redis(redis);
    assert_eq!(remaining_units(&store).await, Ok(999));
    let other = RedisServer::start();
    monitor(&watched.sentinels, &other).await;
    wait_until_within(
        "the switch to the new master",
        RECOVERY_TIMEOUT,
        async || {
            // The switch may leave this call without a reply.
            remaining_units(&store).await.unwrap_or_default();
            list_counter_keys(&other)
                .await
                .iter()
                .any(|key| key.ends_with(":k"))
        },
    )
    .await;
    assert!(
        remaining_units(&store).await.unwrap() > 990,
        "the new master starts with an empty counter"
    );
}

/// A slow reply does not make the newest configuration the oldest: the last answer counts.
#[tokio::test]
async fn a_slow_sentinel_keeps_its_epoch() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let sentinels = [
        FakeSentinel::start(old.port(), 1).await,
        FakeSentinel::start(new.port(), 2).await,
    ];
    let (_shared, redis) = connect_redis(FakeSentinel::settings(&sentinels)).await;
    let store = Store::from_redis(redis);
    assert_eq!(remaining_units(&store).await, Ok(999));
    // Within the time for one sentinel, and beyond it.
    for (delay_ms, remaining) in [(350, 998), (1_500, 997)] {
        sentinels[1].delay_epoch(Duration::from_millis(delay_ms));
        sleep(RECOVERY_TIMEOUT).await;
        let left = remaining_units(&store).await;
        assert_eq!(left, Ok(remaining), "with a delay of {delay_ms} ms");
    }
    assert!(list_counter_keys(&old).await.is_empty());
}

#[tokio::test]
async fn each_of_many_sentinels_has_the_time_of_one() {
    let master = RedisServer::start();
    let mut sentinels = Vec::new();
    for _ in 0..8 {
        let sentinel = FakeSentinel::start(master.port(), 1).await;
        sentinel.delay_epoch(Duration::from_millis(300));
        sentinels.push(sentinel);
    }
    let connected = timeout(
        TEST_TIMEOUT,
        connect_redis(FakeSentinel::settings(&sentinels)),
    );
    let (_shared, redis) = connected.await.expect("the sentinels name a master");
    let left = remaining_units(&Store::from_redis(redis)).await;
    assert_eq!(left, Ok(999));
}
