//! Request costs, and the cost of rejected requests.

use crate::support::prelude::*;
use tokio::time::sleep_until;

const COST_HEADER_POLICY: &str = r#"
[[policy]]
name = "priced"
cost = { header = "x-cost", default = 2, min = 1, max = 10 }
limit = { requests = 1000000, per = "1h" }
"#;

/// The units charged for a request with these header fields.
async fn charged_units(proxy: &Proxy, fields: &[u8]) -> u64 {
    let left = async |fields: &[u8]| {
        let mut client = RawClient::connect(proxy.address).await;
        client
            .send([b"GET / HTTP/1.1\r\nHost: a\r\n", fields, b"\r\n"].concat())
            .await;
        let reply = client.read_response().await;
        assert_eq!(reply.status, 200);
        reply.remaining("priced").unwrap()
    };
    let before = left(b"X-Cost: 1\r\n").await;
    before - left(fields).await
}

#[tokio::test]
async fn a_cost_is_read_from_a_header_and_invalid_values_cost_the_maximum() {
    let proxy = Proxy::with_echo(COST_HEADER_POLICY).await;
    for (fields, cost) in [
        ("", 2),
        ("X-Cost: 1\r\n", 1),
        ("x-cost:  7 \r\n", 7),
        ("X-Cost: 10\r\n", 10),
    ] {
        let answer = charged_units(&proxy, fields.as_bytes()).await;
        assert_eq!(answer, cost, "{fields:?}");
    }
    let absurd = "1000000000000000000000000000000";
    for value in [
        "", "0", "-1", "11", "1.0", "+1", "1e30", absurd, "NaN", "nan", "inf", "-0", "0x1", "1,1",
        "1 1", "\"",
    ] {
        let answer = charged_units(&proxy, format!("X-Cost: {value}\r\n").as_bytes()).await;
        assert_eq!(answer, 10, "{value:?}");
    }
    assert_eq!(charged_units(&proxy, b"X-Cost: \xff\xfe\r\n").await, 10);
    let answer = charged_units(&proxy, b"X-Cost: 1\r\nX-Cost: 1\r\n").await;
    assert_eq!(answer, 10, "repeated");
    for look_alike in ["X_Cost", "x.cost"] {
        let reply = proxy.get_with("/", look_alike, "1").await;
        assert_eq!(reply.status, 400, "{look_alike}");
    }
    let request = proxy.request("GET", "/").header("connection", "x-cost");
    let dropped = request.header("x-cost", "9").send().await;
    assert_eq!(
        dropped.status, 400,
        "a request that removes its own cost header must be rejected"
    );
}

#[tokio::test]
async fn trap_12_a_cost_that_does_not_fit_is_rejected_whole() {
    let config = r#"
[[policy]]
name = "priced"
cost = { header = "x-cost", max = 100 }
limit = { requests = 10, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    let ask = |cost: &'static str| proxy.request("GET", "/").header("x-cost", cost).send();
    assert_eq!(ask("9").await.remaining("priced"), Some(1));
    let refused = ask("2").await;
    assert_eq!(refused.status, 429);
    assert_eq!(refused.remaining("priced"), Some(1));
    assert!(refused.header("retry-after").is_some());
    for never in ["11", "100", "many"] {
        let refused = ask(never).await;
        assert_eq!(refused.status, 429, "{never}");
        assert_eq!(refused.remaining("priced"), Some(1), "{never}");
        assert!(
            refused.header("retry-after").is_none(),
            "{never}: a cost that never fits has no Retry-After"
        );
        let problem = refused.json();
        assert!(
            problem["detail"]
                .as_str()
                .unwrap()
                .contains("more than the limit"),
            "{problem}"
        );
        assert!(problem.get("retry_after").is_none(), "{problem}");
    }
    assert_eq!(ask("1").await.status, 200);
    assert_eq!(proxy.echo().requests().len(), 2);
}

#[tokio::test]
async fn trap_2_a_block_outlasts_the_limit_and_retries_do_not_prolong_it() {
    let config = r#"
[[policy]]
name = "login"
key = ["header:x-user"]
limit = { requests = 1, per = "100ms" }
block_for = "1s"
"#;
    let proxy = Proxy::with_echo(config).await;
    let ask = || proxy.request("GET", "/").header("x-user", "ann").send();
    assert_eq!(ask().await.status, 200);
    // On a slow machine the limit may be free again.
    let (begun, first) = loop {
        let sent = Instant::now();
        let reply = ask().await;
        if reply.status == 429 {
            break (sent, reply);
        }
    };
    let seen = proxy.echo().requests().len();
    assert!(
        first.retry_after_us() > 900_000,
        "{}",
        first.retry_after_us()
    );
    assert_eq!(first.remaining("login"), Some(0));
    let status = proxy.get_with("/", "x-user", "bob").await.status;
    assert_eq!(status, 200, "another key");
    let mark = proxy.log_mark();
    let retry = ask().await;
    assert_eq!(retry.status, 429);
    assert!(
        retry.retry_after_us() < first.retry_after_us(),
        "a retry prolonged the block"
    );
    proxy.wait_for_field("decision", "blocked", mark).await;
    let freed = loop {
        let reply = ask().await;
        if reply.status == 200 {
            break Instant::now();
        }
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "the block did not end despite retries"
        );
    };
    assert!(
        freed - begun >= Duration::from_secs(1),
        "{:?}",
        freed - begun
    );
    assert_eq!(proxy.echo().requests().len(), seen + 2);
}

/// A proxy with counters in memory, and one with counters in Redis.
async fn start_in_each_store(policies: &str) -> [(Proxy, Option<RedisServer>); 2] {
    let server = RedisServer::start();
    let config = format!("{}\n{policies}", server.store_config());
    let (in_memory, in_redis) = (Proxy::with_echo(policies), Proxy::with_echo(&config));
    [(in_memory.await, None), (in_redis.await, Some(server))]
}

#[tokio::test]
async fn trap_2_with_count_rejected_retries_keep_the_client_rejected() {
    let config = r#"
[[policy]]
name = "p"
limit = { requests = 1, per = "1s" }
count_rejected = true
"#;
    for (proxy, _server) in start_in_each_store(config).await {
        let mut last = Instant::now();
        assert_eq!(proxy.get("/").await.status, 200);
        let (start, mut wait_us) = (last, 0);
        while start.elapsed() < Duration::from_millis(1_500) {
            let sent = Instant::now();
            let reply = proxy.get("/").await;
            if reply.status == 200 {
                assert!(
                    last.elapsed() >= Duration::from_secs(1),
                    "a retry was admitted too early"
                );
            } else {
                wait_us = reply.retry_after_us();
                assert_eq!(wait_us, 1_000_000, "the wait is one period from this retry");
                assert_eq!(reply.header("retry-after"), Some("1"));
                assert_eq!(reply.remaining("p"), Some(0));
                assert_eq!(reply.header("x-ratelimit-remaining"), Some("0"));
                assert!(
                    reply
                        .list_parameter("ratelimit", "p", "t")
                        .is_some_and(|seconds| seconds <= 1)
                );
            }
            last = sent;
        }
        let seen = proxy.echo().requests().len();
        sleep_until((Instant::now() + Duration::from_micros(wait_us + 2_000)).into()).await;
        proxy
            .expect_status("/", 200, "the client waited as reported")
            .await;
        assert_eq!(
            proxy.echo().requests().len(),
            seen + 1,
            "rejected requests must not reach the upstream"
        );
    }
}

/// A rejected request counts in all limits of the rejecting policy, also those with quota left, but
/// in no other policy.
#[tokio::test]
async fn rejected_requests_count_in_all_limits_of_their_policy_and_in_no_other() {
    let config = r#"
[[policy]]
name = "p"
limits = [{ requests = 1, per = "1m" }, { requests = 5, per = "1d", algorithm = "token_bucket" }]
count_rejected = true
[[policy]]
name = "other"
limit = { requests = 9, per = "1d" }
count_rejected = true
"#;
    for (proxy, _server) in start_in_each_store(config).await {
        let mut seen = Vec::new();
        for _ in 0..6 {
            let reply = proxy.get("/").await;
            let left = ["p", "p-2", "other"].map(|name| reply.remaining(name).unwrap());
            let wait_us = if reply.status == 429 {
                reply.retry_after_us()
            } else {
                0
            };
            if reply.status == 429 {
                assert!(
                    !reply.json()["violated-policies"]
                        .to_string()
                        .contains("other"),
                    "{}",
                    reply.text()
                );
            }
            seen.push((reply.status, left, wait_us / 60_000_000));
        }
        // The last two requests find the second limit exhausted; a unit returns every fifth of a
        // day.
        assert_eq!(
            seen,
            [
                (200, [0, 4, 8], 0),
                (429, [0, 3, 8], 1),
                (429, [0, 2, 8], 1),
                (429, [0, 1, 8], 1),
                (429, [0, 0, 8], 287),
                (429, [0, 0, 8], 288),
            ]
        );
    }
}

/// The wait is the longer of the block and of the limits, which keep counting during the block.
#[tokio::test]
async fn rejected_requests_count_during_a_block() {
    let config = r#"
[[policy]]
name = "p"
limit = { requests = 1, per = "800ms" }
count_rejected = true
block_for = "2s"
"#;
    for (proxy, _server) in start_in_each_store(config).await {
        // On a slow machine the limit may be free again.
        let start = Instant::now();
        let mut wait_us = loop {
            let reply = proxy.get("/").await;
            if reply.status == 429 {
                break reply.retry_after_us();
            }
            assert!(start.elapsed() < TEST_TIMEOUT, "no request is rejected");
        };
        assert_eq!(wait_us, 2_000_000, "the block has begun");
        while wait_us > 800_000 {
            let reply = proxy.get("/").await;
            assert_eq!(reply.status, 429);
            let next_us = reply.retry_after_us();
            assert!(next_us < wait_us, "{next_us} after {wait_us}");
            assert!(next_us >= 800_000, "{next_us} after {wait_us}");
            wait_us = next_us;
        }
        let refused = proxy.get("/").await;
        assert_eq!(
            (refused.status, refused.retry_after_us()),
            (429, 800_000),
            "the wait is one period from this retry"
        );
        sleep_until((Instant::now() + Duration::from_millis(802)).into()).await;
        proxy
            .expect_status("/", 200, "the client waited as reported")
            .await;
    }
}

/// A shadow policy counts the requests that it would reject, without affecting the clients.
#[tokio::test]
async fn a_shadow_policy_counts_requests_it_would_have_rejected() {
    let config = r#"
[[policy]]
name = "candidate"
mode = "shadow"
limit = { requests = 1, per = "500ms" }
count_rejected = true
"#;
    for (proxy, _server) in start_in_each_store(config).await {
        let (start, mut sent, mut longest) = (Instant::now(), 0, Duration::ZERO);
        let mut last = start;
        while start.elapsed() < Duration::from_millis(1_200) {
            let reply = proxy.get("/").await;
            assert_eq!((reply.status, reply.header("ratelimit")), (200, None));
            sent += 1;
            longest = longest.max(last.elapsed());
            last = Instant::now();
        }
        let page = proxy.admin_request("GET", "/metrics").send().await.text();
        let count = |decision: &str| {
            let series =
                format!("tidegate_requests_total{{policy=\"candidate\",decision=\"{decision}\"}} ");
            page.lines()
                .find_map(|line| line.strip_prefix(&series))
                .unwrap()
                .parse::<u64>()
                .unwrap()
        };
        if longest < Duration::from_millis(400) {
            assert_eq!((count("allowed"), count("shadow_rejected")), (1, sent - 1));
        }
        assert_eq!(count("allowed") + count("shadow_rejected"), sent);
    }
}
