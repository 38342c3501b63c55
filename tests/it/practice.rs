//! What the practice of limiting with Redis asks for, where no other test is about it. The table is in
//! `docs/CONTRIBUTING.md`.

use crate::support::judge::{EVERY_ALGORITHM, seed};
use crate::support::peer::Relay;
use crate::support::redis::{Server, ready, settings};
use fastrand::Rng;
use std::time::{Duration, Instant};
use tidegate::limiter::{Algorithm, Charge, KeyBuilder, Limit};
use tidegate::store::redis::{Redis, Script};
use tokio::task::JoinSet;

const LIMIT: Limit = Limit {
    requests: 1000,
    per_us: 60_000_000,
    algorithm: Algorithm::SlidingLog,
};

/// So many questions at once, each about a key of its own.
async fn all_at_once(redis: &Redis, questions: usize) {
    let mut asked = JoinSet::new();
    for n in 0..questions {
        let redis = redis.clone();
        asked.spawn(async move {
            let key = KeyBuilder::new(&n.to_string()).finish();
            let charge = Charge::new(&LIMIT, &key, 1);
            redis
                .decide(&[charge], tokio::time::Instant::now())
                .await
                .unwrap();
        });
    }
    asked.join_all().await;
}

#[tokio::test]
async fn many_questions_share_a_connection_and_do_not_wait_for_each_other() {
    const QUESTIONS: usize = 200;
    let far = Duration::from_millis(40);
    let server = Server::start();
    let relay = Relay::to(server.port()).await;
    let patient = tidegate::store::redis::RedisSettings {
        timeout: Duration::from_secs(10),
        ..settings(relay.port)
    };
    let (_shared, redis) = ready(patient).await;
    let before = server.info("stats", "total_connections_received").await;
    relay.delay(far);
    let asked = Instant::now();
    all_at_once(&redis, QUESTIONS).await;
    let took = asked.elapsed();
    assert!(
        took < far * 20,
        "{QUESTIONS} questions took {took:?}, one after the other {:?}",
        far * 200
    );
    let opened = server.info("stats", "total_connections_received").await - before;
    // That of the test, which asks.
    assert_eq!(opened, 1);
}

#[tokio::test]
async fn a_program_is_sent_once_and_then_named() {
    let server = Server::start();
    let (_shared, redis) = server.redis().await;
    all_at_once(&redis, 100).await;
    let loads = server.info("commandstats", "cmdstat_script|load").await;
    // One to prove the connection, and what was wanted since.
    assert!(loads < 10, "{loads}");
    let named = server.info("commandstats", "cmdstat_evalsha").await;
    all_at_once(&redis, 100).await;
    assert_eq!(
        server.info("commandstats", "cmdstat_script|load").await,
        loads
    );
    // Those who ask at the same time share calls.
    assert!(server.info("commandstats", "cmdstat_evalsha").await > named);
    assert_eq!(server.info("commandstats", "cmdstat_eval").await, 0);
}

/// Asked of Redis itself, and whatever a client or an owner writes into names.
#[tokio::test]
async fn all_that_a_policy_keeps_for_one_key_is_in_one_slot() {
    let server = Server::with(&["--cluster-enabled", "yes"]);
    let mut rng = Rng::with_seed(seed());
    let mut slots = Vec::new();
    for (prefix, value) in [
        ("shop", "ann"),
        ("shop", "bob"),
        ("{shop}", "{}"),
        ("a{b", "}{x}"),
        ("", "{ann}"),
    ] {
        let (script, mut key) = (Script::new(prefix), KeyBuilder::new("p"));
        key.part(Some(value.as_bytes()));
        let key = key.finish();
        let mut own = Vec::new();
        for (_, draw) in EVERY_ALGORITHM {
            let limit = draw(&mut rng);
            let name = script.key(&Charge::new(&limit, &key, 1));
            own.push(
                server
                    .command::<u64>(&format!("CLUSTER KEYSLOT {name}"))
                    .await,
            );
        }
        own.dedup();
        assert_eq!(own.len(), 1, "{prefix:?}, {value:?}");
        slots.extend(own);
    }
    slots.sort_unstable();
    slots.dedup();
    assert!(slots.len() > 3, "but others elsewhere: {slots:?}");
}
