//! Common practices of rate limiting with Redis that no other test covers.

use crate::support::prelude::*;
use tidegate::store::redis::ScriptLibrary;

const LIMIT: Limit = sliding_log(1000, 60_000_000);

/// Makes `questions` concurrent decisions, each for its own key.
async fn decide_concurrently(redis: &RedisStore, decisions: usize) {
    let mut calls = JoinSet::new();
    for n in 0..decisions {
        let redis = redis.clone();
        calls.spawn(async move {
            let key = KeyBuilder::new(&n.to_string()).finish();
            let charge = PolicyCharges::new(&LIMIT, &key, 1);
            redis
                .decide(&[charge], tokio::time::Instant::now())
                .await
                .unwrap();
        });
    }
    calls.join_all().await;
}

#[tokio::test]
async fn concurrent_decisions_are_pipelined_on_one_connection() {
    const DECISION_COUNT: usize = 200;
    let far = Duration::from_millis(40);
    let server = RedisServer::start();
    let relay = TcpRelay::start(server.port()).await;
    let patient = tidegate::store::redis::RedisSettings {
        timeout: Duration::from_secs(10),
        ..redis_settings(relay.port)
    };
    let (_shared, redis) = connect_redis(patient).await;
    let before = server.connections_received().await;
    relay.delay_replies(far);
    let started = Instant::now();
    decide_concurrently(&redis, DECISION_COUNT).await;
    let took = started.elapsed();
    assert!(
        took < far * 20,
        "{DECISION_COUNT} decisions took {took:?}; sequentially they take {:?}",
        far * 200
    );
    let opened = server.connections_received().await - before;
    // The connection of the test itself.
    assert_eq!(opened, 1);
}

#[tokio::test]
async fn a_script_is_loaded_once_and_then_called_by_hash() {
    let server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    decide_concurrently(&redis, 100).await;
    let loads = server
        .read_info_number("commandstats", "cmdstat_script|load")
        .await;
    // One load verifies the connection; the others are the scripts used since.
    assert!(loads < 10, "{loads}");
    let calls_by_hash = server
        .read_info_number("commandstats", "cmdstat_evalsha")
        .await;
    decide_concurrently(&redis, 100).await;
    let number = server
        .read_info_number("commandstats", "cmdstat_script|load")
        .await;
    assert_eq!(number, loads);
    // Concurrent decisions share calls.
    assert!(
        server
            .read_info_number("commandstats", "cmdstat_evalsha")
            .await
            > calls_by_hash
    );
    let number = server
        .read_info_number("commandstats", "cmdstat_eval")
        .await;
    assert_eq!(number, 0);
}

/// Asks Redis itself for the hash slots, with special characters in prefixes and values.
#[tokio::test]
async fn all_redis_keys_of_one_policy_key_share_a_hash_slot() {
    let server = RedisServer::start_with(&["--cluster-enabled", "yes"]);
    let mut rng = Rng::with_seed(test_seed());
    let mut slots = Vec::new();
    for (prefix, value) in [
        ("shop", "ann"),
        ("shop", "bob"),
        ("{shop}", "{}"),
        ("a{b", "}{x}"),
        ("", "{ann}"),
    ] {
        let (script, mut key) = (ScriptLibrary::new(prefix), KeyBuilder::new("p"));
        key.push_key_value(Some(value.as_bytes()));
        let key = key.finish();
        let mut own = Vec::new();
        for (_, draw) in EVERY_ALGORITHM {
            let limit = draw(&mut rng);
            let name = script.counter_key(first_counter(&PolicyCharges::new(&limit, &key, 1)));
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
    assert!(
        slots.len() > 3,
        "different policy keys must use different slots: {slots:?}"
    );
}
