//! Every reply of Redis that is not a decision is a named degradation.
//!
//! The table of replies in `docs/operations/redis.md` is the list of cases: each row is tested, and
//! each case has a row.

use crate::support::fake_redis::AfterReply::{self, Close, Hang, Serve};
use crate::support::fake_redis::{RedisFault, ScriptedRedis};
use crate::support::prelude::*;

const LIMIT: Limit = sliding_log(1000, 60_000_000);

/// What happens to the connection, in the words of the page.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ConnectionEffect {
    Kept,
    Replaced,
    ReplacedAfterThree,
}

/// One row of the page.
struct ReplyRow {
    replies: Vec<String>,
    kind: String,
    opens_breaker: bool,
    connection: ConnectionEffect,
}

/// A reply of the fake server.
struct ReplyCase {
    /// As on the page.
    name: &'static str,
    bytes: String,
    then: AfterReply,
    topology: RedisTopology,
}

fn documented_rows() -> Vec<ReplyRow> {
    let page = include_str!("../../docs/operations/redis.md");
    let section = page.split_once("### Replies\n").unwrap().1;
    let section = section.split_once("\n#").unwrap().0;
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let rows = rows.map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [replies, kind, breaker, connection] = cells[..] else {
            panic!("{line}")
        };
        ReplyRow {
            replies: replies
                .split('`')
                .skip(1)
                .step_by(2)
                .map(str::to_owned)
                .collect(),
            kind: kind.trim_matches('`').to_owned(),
            opens_breaker: match breaker {
                "counts" => true,
                "not counted" => false,
                other => panic!("{other}"),
            },
            connection: match connection {
                "kept" => ConnectionEffect::Kept,
                "replaced" => ConnectionEffect::Replaced,
                "replaced after three" => ConnectionEffect::ReplacedAfterThree,
                other => panic!("{other}"),
            },
        }
    });
    rows.collect()
}

/// The replies of each name on the page.
fn reply_cases(own_port: u16) -> Vec<ReplyCase> {
    let standalone = |name: &'static str, bytes: &str, then| ReplyCase {
        name,
        bytes: bytes.to_owned(),
        then,
        topology: RedisTopology::Standalone,
    };
    let error = |name, text: &str| standalone(name, &format!("-{text}\r\n"), Serve);
    let redirection = |name, text: String| ReplyCase {
        name,
        bytes: format!("-{text}\r\n"),
        then: Serve,
        topology: RedisTopology::Cluster,
    };
    vec![
        error("NOAUTH", "NOAUTH Authentication required."),
        error(
            "WRONGPASS",
            "WRONGPASS invalid username-password pair or user is disabled.",
        ),
        error(
            "NOPERM",
            "NOPERM this user has no permissions to run the 'evalsha' command",
        ),
        error(
            "DENIED",
            "DENIED Redis is running in protected mode because no password is set",
        ),
        error(
            "READONLY",
            "READONLY You can't write against a read only replica.",
        ),
        error("LOADING", "LOADING Redis is loading the dataset in memory"),
        error("MASTERDOWN", "MASTERDOWN Link with MASTER is down"),
        error(
            "OOM",
            "OOM command not allowed when used memory > 'maxmemory'.",
        ),
        error(
            "OOM",
            "@user_script: 9: -OOM command not allowed when used memory > 'maxmemory'.",
        ),
        error(
            "MISCONF",
            "MISCONF Redis is configured to save RDB snapshots",
        ),
        error(
            "NOREPLICAS",
            "NOREPLICAS Not enough good replicas to write.",
        ),
        error("BUSY", "BUSY Redis is busy running a script."),
        error("CLUSTERDOWN", "CLUSTERDOWN Hash slot not served"),
        error(
            "TRYAGAIN",
            "TRYAGAIN Multiple keys request during rehashing of slot",
        ),
        error("MOVED", "MOVED 1 127.0.0.1:1"),
        error("ASK", "ASK 1 127.0.0.1:1"),
        error(
            "CROSSSLOT",
            "CROSSSLOT Keys in request don't hash to the same slot",
        ),
        redirection("MOVED in a circle", format!("MOVED 1 127.0.0.1:{own_port}")),
        redirection("ASK in a circle", format!("ASK 1 127.0.0.1:{own_port}")),
        redirection("MOVED to no node", "MOVED 1 127.0.0.1:1".to_owned()),
        redirection("ASK to no node", "ASK 1 127.0.0.1:1".to_owned()),
        error("FOREIGN", "FOREIGN 1"),
        error(
            "PERIOD",
            "PERIOD the clocks of Redis and of the proxy are in different periods",
        ),
        error("NOSCRIPT", "NOSCRIPT No matching script."),
        error("ERR", "ERR unknown command 'EVALSHA'"),
        error("ERR", "UNKNOWNCODE of a later version"),
        error("ERR", "@user_script:7: attempt to index a nil value"),
        standalone("no reply", "", Hang),
        standalone("truncated reply", "$24\r\n17000000", Hang),
        standalone("overlong reply", "$536870912\r\n1700000000000000 0", Hang),
        standalone("overlong reply", "*1000000000\r\n:1\r\n", Hang),
        standalone("closed connection", "", Close),
        standalone("reply cut by a close", "$24\r\n17000000", Close),
        standalone("other type", "+OK\r\n", Serve),
        standalone("other type", ":5\r\n", Serve),
        standalone("other type", "$-1\r\n", Serve),
        standalone("other type", "*1\r\n:1\r\n", Serve),
        standalone("wrong numbers", "$0\r\n\r\n", Serve),
        standalone(
            "wrong numbers",
            "$24\r\n1700000000000000 0 -1 0 \r\n",
            Serve,
        ),
        standalone(
            "wrong numbers",
            "$25\r\n1700000000000000 0 5000 0\r\n",
            Serve,
        ),
        standalone("wrong numbers", &long_reply(), Serve),
        standalone("not RESP", "HTTP/1.1 200 OK\r\n\r\n", Serve),
    ]
}

/// Numbers of far more charges than were sent.
fn long_reply() -> String {
    let text = format!(
        "1700000000000000{}",
        " 0 999 1700000000001000".repeat(10_000)
    );
    format!("${}\r\n{text}\r\n", text.len())
}

async fn decide(store: &Store) -> Option<&'static str> {
    let key = KeyBuilder::new("k").finish();
    let decision = store.decide(&[PolicyCharges::new(&LIMIT, &key, 1)]).await;
    decision.err().map(|unavailable| unavailable.kind)
}

fn error_count(shared: &SharedRedisState, kind: &str) -> u64 {
    let mut counts = shared.error_counts();
    counts.find(|(name, _)| *name == kind).unwrap().1
}

async fn check_reply(case: ReplyCase, row: &ReplyRow, server: &ScriptedRedis) {
    let name = format!(
        "{}: {:?}",
        case.name,
        &case.bytes[..case.bytes.len().min(60)]
    );
    let is_cluster = case.topology == RedisTopology::Cluster;
    let settings = RedisSettings {
        topology: case.topology,
        timeout: Duration::from_millis(150),
        // More failures than the test causes with the fault.
        breaker_failures: 100,
        ..redis_settings(server.port)
    };
    let shared = SharedRedisState::new(settings.clone());
    let redis = RedisStore::start(&shared);
    redis.wait_until_ready().await;
    let store = Store::from_redis(redis);
    assert_eq!(decide(&store).await, None, "{name}");

    let connections = server.connection_count();
    let fault = RedisFault {
        reply: case.bytes.into_bytes(),
        then: case.then,
    };
    server.set_fault(Some(fault.clone()));
    let attempts = match row.connection {
        ConnectionEffect::ReplacedAfterThree => 3,
        _ => 1,
    };
    for attempt in 1..=attempts {
        assert_eq!(server.connection_count(), connections, "{name}");
        assert_eq!(decide(&store).await, Some(row.kind.as_str()), "{name}");
        assert!(error_count(&shared, &row.kind) >= attempt, "{name}");
    }
    if row.connection == ConnectionEffect::Kept {
        for _ in 0..4 {
            assert_eq!(decide(&store).await, Some(row.kind.as_str()), "{name}");
        }
        // A cluster asks for the slot map on its own connections.
        if !is_cluster {
            assert_eq!(server.connection_count(), connections, "{name}");
        }
    } else {
        wait_until(format!("{name}: the connection to be closed"), async || {
            server.connection_count() != connections
        })
        .await;
    }
    server.set_fault(None);
    wait_until(format!("{name}: the recovery"), async || {
        decide(&store).await.is_none() && shared.is_up()
    })
    .await;
    drop(store);

    let shared = SharedRedisState::new(RedisSettings {
        breaker_failures: 1,
        ..settings
    });
    let redis = RedisStore::start(&shared);
    redis.wait_until_ready().await;
    server.set_fault(Some(fault));
    assert!(decide(&Store::from_redis(redis)).await.is_some(), "{name}");
    assert_eq!(shared.is_breaker_open(), row.opens_breaker, "{name}");
    server.set_fault(None);
}

#[tokio::test]
async fn every_reply_is_degraded_as_the_page_says() {
    let rows = documented_rows();
    let server = ScriptedRedis::start().await;
    let mut tested = BTreeSet::new();
    for case in reply_cases(server.port) {
        let row = rows
            .iter()
            .find(|row| row.replies.iter().any(|name| name == case.name));
        let row =
            row.unwrap_or_else(|| panic!("docs/operations/redis.md has no row for {}", case.name));
        tested.insert(case.name.to_owned());
        check_reply(case, row, &server).await;
    }
    let documented: BTreeSet<String> = rows.into_iter().flat_map(|row| row.replies).collect();
    assert_eq!(tested, documented, "every row needs a case");
}

/// A real server at its client limit.
#[tokio::test]
async fn a_server_at_its_client_limit_is_a_connection_error() {
    let server = RedisServer::start_with(&["--maxclients", "1"]);
    let _only_client = server.connection().await;
    let shared = SharedRedisState::new(server.settings());
    let _store = RedisStore::start(&shared);
    wait_until("a connection error", async || {
        error_count(&shared, "connection") > 0
    })
    .await;
}
