//! Decisions while Redis misbehaves: errors arrive quickly, have the right kind, and recovery is
//! automatic.

use crate::support::fake_redis::start_faulty_redis;
use crate::support::prelude::*;
use std::task::Poll;
use tidegate::store::StoreUnavailable;
use tidegate::store::redis::{RedisCredentials, RedisPassword, ScriptLibrary};

const LIMIT: Limit = sliding_log(1000, 60_000_000);

/// Time that a loaded machine may add to a deadline.
const TIMEOUT_SLACK: Duration = Duration::from_millis(100);

/// Maximum duration of a call that does not contact Redis.
const MAX_LOCAL_LATENCY: Duration = Duration::from_millis(20);

const MAX_RECOVERY: Duration = Duration::from_secs(2);

fn make_key(name: &str) -> Key {
    KeyBuilder::new(name).finish()
}

async fn decide(store: &Store, name: &str) -> Result<Decision, StoreUnavailable> {
    let key = make_key(name);
    store.decide(&[PolicyCharges::new(&LIMIT, &key, 1)]).await
}

async fn start_store(server: &RedisServer) -> (Arc<SharedRedisState>, Store) {
    let (shared, redis) = server.connect().await;
    let store = Store::from_redis(redis);
    decide(&store, "first").await.unwrap();
    (shared, store)
}

fn error_count(shared: &SharedRedisState, kind: &str) -> u64 {
    shared
        .error_counts()
        .find(|(word, _)| *word == kind)
        .unwrap()
        .1
}

/// Makes decisions until the circuit breaker opens. Every call ends in time. Returns the error
/// kinds.
async fn open_breaker(
    shared: &SharedRedisState,
    store: &Store,
    timeout: Duration,
) -> Vec<&'static str> {
    let mut kinds = Vec::new();
    for _ in 0..50 {
        let started = Instant::now();
        let answer = decide(store, "k").await;
        assert!(
            started.elapsed() <= timeout + TIMEOUT_SLACK,
            "{:?}",
            started.elapsed()
        );
        if let Err(unavailable) = answer {
            kinds.push(unavailable.kind);
        }
        if shared.is_breaker_open() {
            assert!(!shared.is_up());
            return kinds;
        }
    }
    panic!("the circuit breaker did not open: {kinds:?}");
}

/// Checks that calls fail at once while the circuit breaker is open.
async fn assert_fails_fast(store: &Store) {
    for _ in 0..20 {
        let started = Instant::now();
        let answer = decide(store, "k").await;
        assert!(
            answer.is_err() && started.elapsed() < MAX_LOCAL_LATENCY,
            "{answer:?} after {:?}",
            started.elapsed()
        );
    }
}

async fn wait_for_recovery(shared: &SharedRedisState, store: &Store) {
    wait_until_within("the recovery", MAX_RECOVERY, async || {
        decide(store, "back").await.is_ok() && shared.is_up()
    })
    .await;
    assert!(!shared.is_breaker_open());
}

#[tokio::test]
async fn redis_is_killed_and_restarts_empty() {
    let mut server = RedisServer::start();
    let (shared, store) = start_store(&server).await;
    server.kill();
    let kinds = open_breaker(&shared, &store, Duration::ZERO).await;
    assert!(
        kinds
            .iter()
            .all(|kind| ["connection", "refused"].contains(kind)),
        "{kinds:?}"
    );
    assert_fails_fast(&store).await;
    server.restart();
    wait_for_recovery(&shared, &store).await;
    assert_eq!(
        decide(&store, "first")
            .await
            .unwrap()
            .statuses()
            .next()
            .unwrap()
            .remaining,
        999
    );
}

#[tokio::test]
async fn the_store_recovers_when_redis_starts_later() {
    let mut server = RedisServer::start();
    server.kill();
    let (shared, redis) = server.connect().await;
    let store = Store::from_redis(redis);
    assert_eq!(decide(&store, "k").await.unwrap_err().kind, "refused");
    server.restart();
    wait_for_recovery(&shared, &store).await;
}

#[tokio::test]
async fn a_hanging_redis_opens_the_breaker() {
    let server = RedisServer::start();
    let (shared, store) = start_store(&server).await;
    server.pause();
    let kinds = open_breaker(&shared, &store, server.settings().timeout).await;
    assert!(kinds.contains(&"timeout"), "{kinds:?}");
    assert_fails_fast(&store).await;
    server.resume();
    wait_for_recovery(&shared, &store).await;
}

#[tokio::test]
async fn redis_hangs_under_many_concurrent_callers() {
    let server = RedisServer::start();
    let (shared, store) = start_store(&server).await;
    server.pause();
    let started = Instant::now();
    let calls: Vec<_> = (0..64)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move { decide(&store, "k").await.is_err() })
        })
        .collect();
    for call in calls {
        assert!(call.await.unwrap());
    }
    assert!(started.elapsed() <= server.settings().timeout + TIMEOUT_SLACK);
    assert!(shared.is_breaker_open());
    server.resume();
    wait_for_recovery(&shared, &store).await;
}

#[tokio::test]
async fn flushed_scripts_are_loaded_once_for_all_callers() {
    let server = RedisServer::start();
    let (shared, store) = start_store(&server).await;
    // One alone and two together are decided by different programs.
    decide(&store, "first").await.unwrap();
    let together = tokio::join!(decide(&store, "second"), decide(&store, "third"));
    assert!(together.0.is_ok() && together.1.is_ok());
    let loads = server
        .read_info_number("commandstats", "cmdstat_script|load")
        .await;
    let programs = server
        .read_info_number("memory", "number_of_cached_scripts")
        .await;
    for round in 1..=5 {
        server.run("SCRIPT FLUSH").await;
        let calls: Vec<_> = (0..64)
            .map(|n| {
                let store = store.clone();
                tokio::spawn(async move { decide(&store, &n.to_string()).await })
            })
            .collect();
        for call in calls {
            call.await.unwrap().unwrap();
        }
        let number = server
            .read_info_number("commandstats", "cmdstat_script|load")
            .await;
        assert_eq!(number, loads + round * programs);
    }
    assert_eq!(
        shared.error_counts().map(|(_, count)| count).sum::<u64>(),
        0
    );
}

#[tokio::test]
async fn a_lost_connection_is_noticed_and_replaced_without_a_request() {
    let server = RedisServer::start();
    let (shared, store) = start_store(&server).await;
    let connections = server.connections_received().await;
    server.run("CLIENT KILL TYPE normal SKIPME yes").await;
    let killed = Instant::now();
    // The `CLIENT KILL` command and each `INFO` call open one connection.
    let mut own_connections = 2;
    while server.connections_received().await <= connections + own_connections {
        assert!(killed.elapsed() < MAX_RECOVERY);
        own_connections += 1;
        sleep(Duration::from_millis(5)).await;
    }
    sleep(TIMEOUT_SLACK).await;
    decide(&store, "k").await.unwrap();
    assert!(shared.is_up());
}

#[tokio::test]
async fn redis_is_out_of_memory() {
    let server = RedisServer::start();
    let (shared, store) = start_store(&server).await;
    server.run("CONFIG SET maxmemory 100kb").await;
    let answer = open_breaker(&shared, &store, server.settings().timeout).await;
    assert_eq!(answer, ["oom"; 5]);
    // Probes fail too, so the circuit breaker stays open until Redis has memory.
    sleep(3 * server.settings().probe_interval).await;
    assert_fails_fast(&store).await;
    server.run("CONFIG SET maxmemory 0").await;
    wait_for_recovery(&shared, &store).await;
}

#[tokio::test]
async fn out_of_memory_never_charges_half_a_request() {
    let server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    let daily = with_algorithm(LIMIT, Algorithm::FixedWindow { offset_us: 0 });
    let owner = make_key("k");
    let charge = |limit| PolicyCharges::new(limit, &owner, 1);
    let _: () = server.command("CONFIG SET maxmemory 100kb").await;
    let answer = redis
        .decide(
            &[charge(&daily), charge(&LIMIT)],
            tokio::time::Instant::now(),
        )
        .await;
    assert_eq!(answer.unwrap_err().unavailable.kind, "oom");
    assert!(
        list_counter_keys(&server)
            .await
            .iter()
            .all(|key| key.ends_with("probe"))
    );
}

#[tokio::test]
async fn the_redis_password_changes_at_run_time() {
    let server = RedisServer::start();
    let (shared, store) = start_store(&server).await;
    let mut admin = server.connection().await;
    let set = |password: &str| {
        let mut command = redis::cmd("CONFIG");
        command.arg("SET").arg("requirepass").arg(password);
        command
    };
    let _: () = set("secret").query_async(&mut admin).await.unwrap();
    let _: i64 = redis::cmd("CLIENT")
        .arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"])
        .query_async(&mut admin)
        .await
        .unwrap();
    let kinds = open_breaker_on_reconnect(&shared, &store).await;
    assert!(kinds.contains(&"noauth"), "{kinds:?}");
    let _: () = set("").query_async(&mut admin).await.unwrap();
    wait_for_recovery(&shared, &store).await;
}

/// As [`open_breaker`], for faults that appear on the next connection.
async fn open_breaker_on_reconnect(shared: &SharedRedisState, store: &Store) -> Vec<&'static str> {
    let are_counted = async || error_count(shared, "noauth") >= 2;
    wait_until_within("two errors", MAX_RECOVERY, are_counted).await;
    open_breaker(shared, store, Duration::ZERO).await
}

#[tokio::test]
async fn a_wrong_password_is_a_noauth_error() {
    let server = RedisServer::start_with(&["--requirepass", "secret"]);
    for (password, kind) in [("secret", None), ("wrong", Some("noauth"))] {
        let password = Some(RedisPassword::new(password.to_owned()));
        let (_shared, redis) = connect_redis(tidegate::store::redis::RedisSettings {
            credentials: RedisCredentials {
                password,
                ..RedisCredentials::default()
            },
            connect_timeout: Duration::from_millis(300),
            ..server.settings()
        })
        .await;
        assert_eq!(
            decide(&Store::from_redis(redis), "k")
                .await
                .err()
                .map(|unavailable| unavailable.kind),
            kind
        );
    }
}

#[tokio::test]
async fn a_foreign_value_fails_only_its_key() {
    let server = RedisServer::start();
    let (shared, store) = start_store(&server).await;
    let daily = with_algorithm(LIMIT, Algorithm::FixedWindow { offset_us: 0 });
    let (bad, good) = (make_key("bad"), make_key("good"));
    let charge = |limit, key| PolicyCharges::new(limit, key, 1);
    let script = ScriptLibrary::new("t");
    let (log, window) = (
        script.counter_key(first_counter(&charge(&LIMIT, &bad))),
        script.counter_key(first_counter(&charge(&daily, &bad))),
    );
    let mut planted = 0;
    for (limit, plant) in [
        (&LIMIT, format!("SET {log} x")),
        (&LIMIT, format!("ZADD {log} 5 x")),
        (&LIMIT, format!("ZADD {log} 5 1:x")),
        (&LIMIT, format!("ZADD {log} inf 1")),
        (&LIMIT, format!("ZADD {log} 5 -1")),
        (&LIMIT, format!("ZADD {log} 5 >I1I1")),
        (&LIMIT, format!("ZADD {log} 5 >I9I9{}", "x".repeat(32))),
        (&LIMIT, format!("ZADD {log} 5 >I1I1{} 9 1", "x".repeat(15))),
        (&LIMIT, format!("ZADD {log} 5 1:1:x")),
        (&LIMIT, format!("ZADD {log} 5.5 0.5")),
        (&daily, format!("SET {window} x")),
        (&daily, format!("SET {window} 5:x")),
        (&daily, format!("SADD {window} 5:5")),
    ] {
        let _: u64 = server.command(&format!("DEL {log} {window}")).await;
        let _: redis::Value = server.command(&plant).await;
        for _ in 0..8 {
            let answer = store
                .decide(&[charge(&LIMIT, &good), charge(limit, &bad)])
                .await;
            assert_eq!(answer.unwrap_err().kind, "wrongtype", "{plant}");
            planted += 1;
        }
    }
    assert_eq!(error_count(&shared, "wrongtype"), planted);
    assert!(shared.is_up() && !shared.is_breaker_open());
    let answer = store.decide(&[charge(&LIMIT, &good)]).await.unwrap();
    assert_eq!(
        answer.statuses().next().unwrap().remaining,
        999,
        "a failed request must charge none of its limits"
    );
}

/// Requests one unit of each key concurrently, so that the decisions share few calls.
async fn decide_together(
    redis: &RedisStore,
    names: &[String],
) -> Vec<Result<Decision, StoreUnavailable>> {
    let calls = names.iter().map(|name| {
        let (redis, key) = (redis.clone(), make_key(name));
        tokio::spawn(async move {
            redis
                .decide(
                    &[PolicyCharges::new(&LIMIT, &key, 1)],
                    tokio::time::Instant::now(),
                )
                .await
                .map_err(|failure| failure.unavailable)
        })
    });
    let mut answers = Vec::new();
    for call in calls.collect::<Vec<_>>() {
        answers.push(call.await.unwrap());
    }
    answers
}

#[tokio::test]
async fn a_foreign_value_does_not_fail_other_decisions_of_the_batch() {
    let server = RedisServer::start();
    let (shared, redis) = server.connect().await;
    assert!(
        decide_together(&redis, &["first".to_owned(), "second".to_owned()])
            .await
            .iter()
            .all(Result::is_ok)
    );
    let bad = ScriptLibrary::new("t").counter_key(first_counter(&PolicyCharges::new(
        &LIMIT,
        &make_key("bad"),
        1,
    )));
    let names: Vec<String> = (0..60)
        .map(|n| {
            if n % 3 == 0 {
                "bad".to_owned()
            } else {
                n.to_string()
            }
        })
        .collect();
    for plant in [format!("SET {bad} x"), format!("ZADD {bad} 5 1:x")] {
        let _: u64 = server.command(&format!("DEL {bad}")).await;
        let _: redis::Value = server.command(&plant).await;
        let before = server
            .read_info_number("commandstats", "cmdstat_evalsha")
            .await;
        let answers = decide_together(&redis, &names).await;
        let calls = server
            .read_info_number("commandstats", "cmdstat_evalsha")
            .await
            - before;
        assert!(calls <= 2, "{calls} calls");
        for (name, answer) in names.iter().zip(answers) {
            match answer {
                Ok(decision) => assert!(decision.admitted && name != "bad"),
                Err(unavailable) => {
                    assert_eq!((unavailable.kind, name.as_str()), ("wrongtype", "bad"))
                }
            }
        }
    }
    assert_eq!(error_count(&shared, "wrongtype"), 40);
    assert!(shared.is_up() && !shared.is_breaker_open());
}

#[tokio::test]
async fn out_of_memory_fails_only_the_writing_decisions_of_a_batch() {
    let server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    let spent = make_key("spent");
    let all = PolicyCharges::new(&LIMIT, &spent, LIMIT.requests);
    assert!(
        redis
            .decide(&[all], tokio::time::Instant::now())
            .await
            .unwrap()
            .admitted
    );
    server.run("CONFIG SET maxmemory 100kb").await;
    let names: Vec<String> = (0..30)
        .map(|n| {
            if n % 2 == 0 {
                "spent".to_owned()
            } else {
                n.to_string()
            }
        })
        .collect();
    for (name, answer) in names.iter().zip(decide_together(&redis, &names).await) {
        match answer {
            Ok(decision) => assert!(!decision.admitted && name == "spent"),
            Err(unavailable) => {
                assert!(
                    unavailable.kind == "oom" && name != "spent",
                    "{name}: {unavailable}"
                )
            }
        }
    }
}

#[tokio::test]
async fn equal_decisions_share_a_call_and_the_remaining_units() {
    let server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    let few = make_key("k");
    let nearly_all = PolicyCharges::new(&LIMIT, &few, LIMIT.requests - 10);
    assert!(
        redis
            .decide(&[nearly_all], tokio::time::Instant::now())
            .await
            .unwrap()
            .admitted
    );
    let before = server
        .read_info_number("commandstats", "cmdstat_evalsha")
        .await;
    let answers = decide_together(&redis, &vec!["k".to_owned(); 200]).await;
    let number = server
        .read_info_number("commandstats", "cmdstat_evalsha")
        .await;
    assert_eq!(number, before + 1);
    let remaining = answers.iter().map(|answer| {
        let decision = answer.as_ref().unwrap();
        (
            decision.admitted,
            decision.statuses().next().unwrap().remaining,
        )
    });
    let expected = (0..200).map(|n| (n < 10, 9_u64.saturating_sub(n)));
    assert!(remaining.eq(expected), "{answers:?}");
}

#[tokio::test]
async fn a_decision_cancelled_before_sending_is_not_charged() {
    let server = RedisServer::start();
    let (_shared, store) = start_store(&server).await;
    for _ in 0..20 {
        // Polled once and dropped before any other task runs.
        tokio::select! {
            biased;
            _ = decide(&store, "left") => {}
            () = std::future::ready(()) => {}
        }
    }
    let answer = decide(&store, "left").await.unwrap();
    assert_eq!(
        answer.statuses().next().unwrap().remaining,
        LIMIT.requests - 1
    );
}

/// Each reply is delayed by two fifths of the timeout. The second and third decisions must be sent
/// before the first reply arrives.
#[tokio::test]
async fn a_slow_call_does_not_delay_the_next() {
    let server = RedisServer::start();
    let relay = TcpRelay::start(server.port()).await;
    let (_shared, redis) = connect_redis(redis_settings(relay.port)).await;
    let store = Store::from_redis(redis);
    decide(&store, "k").await.unwrap();
    let before = server
        .read_info_number("commandstats", "cmdstat_evalsha")
        .await;
    relay.delay_replies(server.settings().timeout * 2 / 5);
    let mut calls = Vec::new();
    for n in 1..=3 {
        let store = store.clone();
        calls.push(tokio::spawn(async move { decide(&store, "k").await }));
        let started = Instant::now();
        while server
            .read_info_number("commandstats", "cmdstat_evalsha")
            .await
            < before + n
        {
            assert!(
                started.elapsed() < server.settings().timeout / 5,
                "decision {n} was not sent"
            );
            sleep(Duration::from_millis(1)).await;
        }
    }
    for call in calls {
        call.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn redis_is_demoted_to_replica() {
    let server = RedisServer::start();
    let (shared, store) = start_store(&server).await;
    server
        .run(&format!("REPLICAOF 127.0.0.1 {}", free_port()))
        .await;
    let kinds = open_breaker(&shared, &store, server.settings().timeout).await;
    // A call in flight on the discarded connection fails with `connection`.
    assert!(
        kinds
            .iter()
            .all(|kind| ["readonly", "connection"].contains(kind)),
        "{kinds:?}"
    );
    assert!(kinds.contains(&"readonly"));
    server.run("REPLICAOF NO ONE").await;
    wait_for_recovery(&shared, &store).await;
}

#[tokio::test]
async fn the_network_loses_replies() {
    let server = RedisServer::start();
    let relay = TcpRelay::start(server.port()).await;
    let (shared, redis) = connect_redis(redis_settings(relay.port)).await;
    let store = Store::from_redis(redis);
    decide(&store, "k").await.unwrap();
    relay.drop_replies();
    let kinds = open_breaker(&shared, &store, server.settings().timeout).await;
    assert!(kinds.contains(&"timeout"), "{kinds:?}");
    assert_fails_fast(&store).await;
    relay.forward_at_once();
    wait_for_recovery(&shared, &store).await;
}

/// More settlements than fit one call. Every reply is delayed by a quarter of the timeout.
#[tokio::test]
async fn all_settlements_reach_a_slow_redis() {
    let server = RedisServer::start();
    let relay = TcpRelay::start(server.port()).await;
    let (_shared, redis) = connect_redis(redis_settings(relay.port)).await;
    let store = Store::from_redis(redis);
    let window = Algorithm::FixedWindow { offset_us: 0 };
    let limit = make_limit(LIMIT.requests, 86_400_000_000, window);
    let owner = make_key("settlements");
    store
        .decide(&[PolicyCharges::new(&limit, &owner, 1)])
        .await
        .unwrap();
    let settlements = vec![
        Settlement {
            limit: &limit,
            key: &owner,
            amendment: Amendment::Charge(1)
        };
        300
    ];
    // The first call loads the script, because the script's size costs round trips.
    store.apply_settlements(&settlements[..1]).await.unwrap();
    relay.delay_replies(server.settings().timeout / 4);
    store.apply_settlements(&settlements[1..]).await.unwrap();
    let value: String = server
        .command(&format!(
            "GET {}",
            ScriptLibrary::new("t")
                .counter_key(first_counter(&PolicyCharges::new(&limit, &owner, 1)))
        ))
        .await;
    let value: u64 = value.parse().unwrap();
    assert_eq!(value % limit.per_us, 301, "{value}");
}

#[tokio::test]
async fn a_slow_network_is_waited_for_only_until_the_deadline() {
    let server = RedisServer::start();
    let relay = TcpRelay::start(server.port()).await;
    let (shared, redis) = connect_redis(redis_settings(relay.port)).await;
    let store = Store::from_redis(redis);
    // The first decision loads the script.
    decide(&store, "first").await.unwrap();
    relay.delay_replies(server.settings().timeout / 4);
    decide(&store, "k").await.unwrap();
    relay.delay_replies(server.settings().timeout * 2);
    let started = Instant::now();
    assert_eq!(decide(&store, "k").await.unwrap_err().kind, "timeout");
    assert!(started.elapsed() <= server.settings().timeout + TIMEOUT_SLACK);
    relay.forward_at_once();
    wait_for_recovery(&shared, &store).await;
    let answer = decide(&store, "k").await.unwrap();
    assert_eq!(
        answer.statuses().next().unwrap().remaining,
        997,
        "a charge with a late reply must stand"
    );
}

#[tokio::test]
async fn a_connection_closed_by_the_peer_is_a_connection_error() {
    let server = RedisServer::start();
    let relay = TcpRelay::start(server.port()).await;
    let (shared, redis) = connect_redis(redis_settings(relay.port)).await;
    let store = Store::from_redis(redis);
    decide(&store, "k").await.unwrap();
    relay.close_server_side();
    assert_eq!(decide(&store, "k").await.unwrap_err().kind, "connection");
    relay.forward_at_once();
    wait_for_recovery(&shared, &store).await;
}

#[tokio::test]
async fn cancelled_decisions_cause_no_errors() {
    let server = RedisServer::start();
    let (shared, store) = start_store(&server).await;
    for _ in 0..200 {
        // Polled once, so that the call is in flight, and then dropped.
        tokio::select! {
            biased;
            _ = decide(&store, "left") => {}
            () = tokio::task::yield_now() => {}
        }
    }
    decide(&store, "k").await.unwrap();
    assert_eq!(
        shared.error_counts().map(|(_, count)| count).sum::<u64>(),
        0
    );
}

#[tokio::test]
async fn malformed_replies_are_errors_of_the_right_kind() {
    let cases: &[(&'static [u8], &str)] = &[
        (b"+OK\r\n", "reply"),
        (b":5\r\n", "reply"),
        (b"$-1\r\n", "reply"),
        (b"*-1\r\n", "reply"),
        (b"*0\r\n", "reply"),
        (b"*4\r\n:1700000000000000\r\n:0\r\n:1\r\n:0\r\n", "reply"),
        (b"*2\r\n:1\r\n-ERR no\r\n", "reply"),
        (b"$0\r\n\r\n", "reply"),
        (b"$16\r\n1700000000000000\r\n", "reply"),
        (b"$22\r\n1700000000000000 0 1 x\r\n", "reply"),
        (b"$24\r\n1700000000000000 0 -1 0 \r\n", "reply"),
        (b"$24\r\n1700000000000000 nan 1 0\r\n", "reply"),
        (b"$25\r\n1700000000000000 0 5000 0\r\n", "reply"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "reply"),
        (
            b"-LOADING Redis is loading the dataset in memory\r\n",
            "loading",
        ),
        (b"-MASTERDOWN Link with MASTER is down\r\n", "masterdown"),
        (b"-CLUSTERDOWN Hash slot not served\r\n", "clusterdown"),
        (b"-MISCONF can't persist\r\n", "misconf"),
        (b"-BUSY a script runs\r\n", "busy"),
        (b"-NOAUTH Authentication required.\r\n", "noauth"),
        (b"-ERR something\r\n", "other"),
        (b"-NOSCRIPT No matching script.\r\n", "noscript"),
        (b"", "connection"),
    ];
    for &(answer, kind) in cases {
        let (shared, redis) = connect_redis(redis_settings(start_faulty_redis(answer).await)).await;
        let got = decide(&Store::from_redis(redis), "k").await;
        let text = String::from_utf8_lossy(answer);
        assert_eq!(got.unwrap_err().kind, kind, "{text}");
        assert_eq!(error_count(&shared, kind), 1, "{text}");
    }
}

#[tokio::test]
async fn dropped_handles_close_their_connections() {
    let server = RedisServer::start();
    let before = server.connected_clients().await;
    for _ in 0..5 {
        let (_shared, redis): (Arc<SharedRedisState>, RedisStore) = server.connect().await;
        drop(redis);
    }
    wait_until_within("the end of the connections", MAX_RECOVERY, async || {
        server.connected_clients().await <= before
    })
    .await;
}

/// Lets other ready tasks run once. `yield_now` would also wait for sockets.
async fn wait_one_turn() {
    let mut is_ready = false;
    std::future::poll_fn(|context| {
        context.waker().wake_by_ref();
        match std::mem::replace(&mut is_ready, true) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
}

/// Requests of which the server was unreachable when they were checked must not be sent when it has
/// reconnected: their shares are not charged. Several callers make requests at each step of
/// reconnections.
#[tokio::test]
async fn requests_checked_without_redis_are_not_sent_after_a_reconnection() {
    let server = RedisServer::start();
    let settings = RedisSettings {
        // An open breaker would refuse most of the calls.
        breaker_failures: u32::MAX,
        ..redis_settings(server.port())
    };
    let (shared, redis) = connect_redis(settings).await;
    let store = Arc::new(Store::from_redis(redis));
    for round in 0..12 {
        let _: u64 = server.command("CLIENT KILL TYPE normal").await;
        let was_unreachable = Arc::new(AtomicBool::new(false));
        let mut callers = JoinSet::new();
        for turns in 0..8 {
            let (store, shared) = (Arc::clone(&store), shared.clone());
            let was_unreachable = Arc::clone(&was_unreachable);
            callers.spawn(async move {
                let limit = Limit {
                    requests: 1,
                    ..LIMIT
                };
                let key = make_key(&format!("round {round}"));
                let charge = PolicyCharges {
                    has_fallback: true,
                    ..PolicyCharges::new(&limit, &key, 1)
                };
                let started = Instant::now();
                let mut admitted = 0;
                while !(was_unreachable.load(Ordering::Relaxed) && shared.is_up()) {
                    assert!(started.elapsed() < MAX_RECOVERY, "no reconnection");
                    let decision = match store.decide(std::slice::from_ref(&charge)).await {
                        Ok(decision) => decision,
                        Err(_) => {
                            was_unreachable.store(true, Ordering::Relaxed);
                            store
                                .decide_by_fallback(std::slice::from_ref(&charge), None)
                                .unwrap()
                        }
                    };
                    admitted += u32::from(decision.admitted);
                    for _ in 0..=turns % 4 {
                        wait_one_turn().await;
                    }
                }
                admitted
            });
        }
        let admitted: u32 = callers.join_all().await.into_iter().sum();
        assert_eq!(admitted, 1, "round {round}");
    }
}
