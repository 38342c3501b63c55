//! Sentinels: the master changes, and clients hardly notice.

use crate::outage::{Asked, POLICIES, Rig, SLACK, TIMEOUT, Way};
use crate::support::redis::{Server, keys, ready};
use crate::support::sentinel::{MASTER, Watched};
use std::time::{Duration, Instant};
use tidegate::limiter::{Algorithm, Charge, KeyBuilder, Limit};
use tidegate::store::Store;
use tidegate::store::redis::{Login, RedisSettings, Topology};
use tokio::time::sleep;

/// From the moment when the sentinels name another master until the last request that Redis did not decide.
const RECOVERY: Duration = Duration::from_secs(2);

/// Sentinels that vote at once elect nobody, and try again after a while.
const ELECTION: Duration = Duration::from_secs(30);

/// After this, a replica has heard of a charge.
const REPLICATED: Duration = Duration::from_millis(200);

const LIMIT: Limit = Limit {
    requests: 1000,
    per_us: 60_000_000,
    algorithm: Algorithm::SlidingLog,
};

async fn remaining(store: &Store) -> Result<u64, &'static str> {
    let key = KeyBuilder::new("k").finish();
    let decision = store.decide(&[Charge::new(&LIMIT, &key, 1)]).await;
    decision
        .map(|decision| decision.standings[0].unwrap().remaining)
        .map_err(|error| error.kind)
}

/// Puts a fault into a deployment under load, and judges what clients met.
async fn judge(
    what: &str,
    rig: &Rig,
    watched: &mut Watched,
    fault: impl AsyncFnOnce(&mut Watched, u16),
) {
    let load = rig.load().await;
    let old = watched.master().await;
    let began = Instant::now();
    fault(watched, old).await;
    let deadline = Instant::now() + ELECTION;
    while watched.master().await == old {
        assert!(Instant::now() < deadline, "{what}: nobody was promoted");
        sleep(Duration::from_millis(20)).await;
    }
    let elected = Instant::now();
    let new = watched.master().await;
    while watched
        .server(new)
        .info("commandstats", "cmdstat_evalsha")
        .await
        == 0
    {
        assert!(
            elected.elapsed() < RECOVERY,
            "{what}: nobody asks the new master"
        );
        sleep(Duration::from_millis(20)).await;
    }
    let followed = elected.elapsed();
    load.is_decided_since(elected).await;
    let asked = load.end().await;

    let slowest = |past: bool| {
        asked
            .iter()
            .filter(|asked| (asked.way == Way::Past) == past)
            .map(|asked| asked.took)
            .max()
    };
    let (limited, machine) = (slowest(false).unwrap(), slowest(true).unwrap());
    assert!(
        limited <= TIMEOUT + SLACK + machine,
        "{what}: {limited:?}, past all policies {machine:?}"
    );
    let lost = |asked: &&Asked| asked.way != Way::Past && !asked.decided;
    let last = asked
        .iter()
        .filter(lost)
        .map(|asked| asked.sent)
        .max()
        .unwrap_or(elected);
    let recovery = last.saturating_duration_since(elected);
    assert!(recovery < RECOVERY, "{what}: {recovery:?}");
    let refused = asked.iter().filter(|asked| asked.status == 503).count();
    assert_eq!(
        rig.upstream.seen().len(),
        asked.len() - refused,
        "{what}: every request had one answer"
    );
    println!(
        "{what}: {} requests, {} undecided, {refused} refused; slowest {limited:?}; a master after {:?}, \
         followed after {followed:?}, the last undecided after {recovery:?}",
        asked.len(),
        asked.iter().filter(lost).count(),
        elected - began,
    );

    // What the new master did not hear of is lost at most, and it counts what comes now.
    let left =
        |reply: crate::support::client::Reply| reply.parameter("ratelimit", "closed", "r").unwrap();
    // Until the old one is told that it is none any more, a worker that follows later may still ask it.
    let first = loop {
        let first = left(rig.proxy.get("/closed").await);
        let second = left(rig.proxy.get("/closed").await);
        if second == first - 1 {
            break first;
        }
        assert!(
            elected.elapsed() < 2 * RECOVERY,
            "{what}: {first}, then {second}"
        );
    };
    let before = |asked: &&Asked| {
        asked.way == Way::Closed
            && asked.status == 200
            && asked.sent + asked.took + REPLICATED < began
    };
    let known = asked.iter().filter(before).count() as u64;
    assert!(
        100_000 - first >= known,
        "{what}: {known} were charged before, and {first} are left"
    );
}

#[tokio::test]
async fn a_failover_on_request_is_followed() {
    let mut watched = Watched::start(1).await;
    let rig = Rig::over(&watched.lines(), POLICIES).await;
    judge(
        "SENTINEL FAILOVER",
        &rig,
        &mut watched,
        async |watched, _| {
            let client = redis::Client::open(("127.0.0.1", watched.sentinels[0].port)).unwrap();
            let mut sentinel = client.get_multiplexed_async_connection().await.unwrap();
            let _: () = redis::cmd("SENTINEL")
                .arg("FAILOVER")
                .arg(MASTER)
                .query_async(&mut sentinel)
                .await
                .unwrap();
        },
    )
    .await;
}

#[tokio::test]
async fn a_dead_master_is_replaced() {
    let mut watched = Watched::start(2).await;
    let rig = Rig::over(&watched.lines(), POLICIES).await;
    judge(
        "kill -9 of the master",
        &rig,
        &mut watched,
        async |watched, old| watched.server(old).kill(),
    )
    .await;
}

#[tokio::test]
async fn a_hung_master_is_replaced() {
    let mut watched = Watched::start(1).await;
    let rig = Rig::over(&watched.lines(), POLICIES).await;
    judge(
        "SIGSTOP of the master",
        &rig,
        &mut watched,
        async |watched, old| watched.server(old).stop(),
    )
    .await;
}

#[tokio::test]
async fn one_sentinel_that_lives_is_enough() {
    let mut watched = Watched::start(1).await;
    watched.sentinels[0].kill();
    watched.sentinels[1].kill();
    for _ in 0..3 {
        let (shared, redis) = ready(watched.settings()).await;
        assert!(shared.is_up());
        remaining(&Store::redis(redis)).await.unwrap();
    }
    watched.sentinels[2].kill();
    let (_shared, redis) = ready(watched.settings()).await;
    assert_eq!(remaining(&Store::redis(redis)).await, Err("refused"));
}

#[tokio::test]
async fn sentinels_that_know_no_such_master_say_so() {
    let watched = Watched::start(0).await;
    let settings = RedisSettings {
        topology: Topology::Sentinel {
            master: "other".to_owned(),
            login: Login::default(),
        },
        ..watched.settings()
    };
    let (_shared, redis) = ready(settings).await;
    assert_eq!(remaining(&Store::redis(redis)).await, Err("masterdown"));
}

/// Cut off from its sentinels, an old master knows nothing of a new one and goes on as if nothing had happened.
#[tokio::test]
async fn a_master_that_is_none_any_more_is_left_though_it_answers() {
    let watched = Watched::start(0).await;
    let (_shared, redis) = ready(watched.settings()).await;
    let store = Store::redis(redis);
    assert_eq!(remaining(&store).await, Ok(999));
    let other = Server::start();
    for sentinel in &watched.sentinels {
        let _: () = sentinel.command(&format!("SENTINEL REMOVE {MASTER}")).await;
        let other = format!("SENTINEL MONITOR {MASTER} 127.0.0.1 {} 2", other.port());
        let _: () = sentinel.command(&other).await;
    }
    let moved = Instant::now();
    while !keys(&other).await.iter().any(|key| key.ends_with(":k")) {
        assert!(moved.elapsed() < RECOVERY, "it stays with the old master");
        // It may have no answer on the way.
        remaining(&store).await.unwrap_or_default();
        sleep(Duration::from_millis(20)).await;
    }
    assert!(
        remaining(&store).await.unwrap() > 990,
        "the new master counts from the start"
    );
}
