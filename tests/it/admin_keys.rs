//! Inspecting and resetting a key by the admin API, and explaining a request.

use crate::admin_api::{POLICIES, assert_problem};
use crate::support::prelude::*;

/// The longest time that the deny cache holds a refusal.
const DENY_CACHE_TTL: Duration = Duration::from_secs(1);

/// Checks the reported state of a key, and that a reset takes effect.
async fn assert_key_can_be_inspected_and_reset(proxy: &Proxy, counters: usize) {
    for expected in [200, 200, 429, 429] {
        assert_eq!(proxy.status_for_user("ann", "/api/pay/1").await, expected);
    }
    let key = "/keys?policy=api&key=ann&key=pay";
    let report = proxy.get_json(key).await;
    assert_fields(&report, json!({ "admitted": false, "key": "api/ann/pay" }));
    assert!(report["blocked_s"].as_f64().unwrap() > 3500.0, "{report}");
    let limits = report["limits"].as_array().unwrap();
    assert_fields(&limits[0], json!({ "used": 2, "remaining": 0 }));
    assert!(
        (3500.0..=3600.0).contains(&limits[0]["grows_in_s"].as_f64().unwrap()),
        "{report}"
    );
    assert_fields(&limits[1], json!({ "name": "daily", "remaining": 48 }));
    assert_eq!(report["counters"].as_array().unwrap().len(), counters);
    let other = proxy.get_json("/keys?policy=api&key=&key=pay").await;
    assert_fields(&other, json!({ "admitted": true, "key": "api/-/pay" }));
    assert_fields(
        &other["limits"][0],
        json!({ "used": 0, "grows_in_s": null }),
    );

    proxy.admin_request("DELETE", key).expect_status(401).await;
    assert_eq!(proxy.status_for_user("ann", "/api/pay/1").await, 429);
    let refused = Instant::now();
    let forgotten = proxy.authorized_request("DELETE", key).send().await;
    assert_eq!(forgotten.status, 200);
    assert_eq!(forgotten.json()["counters_forgotten"], 3);
    // The deny cache may hold the key for up to its TTL. Later requests are admitted, however long
    // the responses take.
    loop {
        let asked = Instant::now();
        if proxy.status_for_user("ann", "/api/pay/1").await == 200 {
            break;
        }
        assert!(asked <= refused + DENY_CACHE_TTL, "still refused");
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(proxy.get_json(key).await["limits"][0]["used"], 1);
    let again = proxy.authorized_request("DELETE", key).send().await.json();
    assert_eq!(again["counters_forgotten"], 2, "the key was not blocked");
    assert_eq!(proxy.get_json("/keys?policy=all").await["key"], "all");
}

#[tokio::test]
async fn a_key_in_memory_can_be_inspected_and_reset() {
    assert_key_can_be_inspected_and_reset(&Proxy::with_token(POLICIES).await, 0).await;
}

fn redis_config(port: u16) -> String {
    format!(
        "[store]\nkind = 'redis'\n[store.redis]\nurl = 'redis://127.0.0.1:{port}/0'\nkey_prefix = 't'\n\
         timeout = '2s'\n[store.redis.breaker]\nprobe_interval = '50ms'\n{POLICIES}"
    )
}

#[tokio::test]
async fn a_key_in_redis_can_be_inspected_and_reset_and_an_outage_is_reported() {
    let mut redis = RedisServer::start();
    let proxy = Proxy::with_token(&redis_config(redis.port())).await;
    proxy.wait_for_store().await;
    assert_key_can_be_inspected_and_reset(&proxy, 3).await;
    let report = proxy.get_json("/keys?policy=api&key=ann&key=pay").await;
    let name = report["counters"][1].as_str().unwrap();
    assert!(name.starts_with("t:v1:{"), "{report}");
    assert!(name.ends_with("api/ann/pay"), "{report}");
    let overview = proxy.get_json("/overview").await;
    let store = &overview["store"];
    assert_fields(
        store,
        json!({ "kind": "redis", "up": true, "instances": 1 }),
    );
    assert_eq!(store["address"], format!("127.0.0.1:{}", redis.port()));
    assert!(
        overview["latency"]["decisions"]["redis"]["count"].as_u64() > Some(0),
        "{overview}"
    );

    redis.kill();
    wait_until("the outage", async || {
        let overview = proxy.get_json("/overview").await;
        overview["store"]["outage"]["kind"] == "refused"
    })
    .await;
    let request = proxy.admin_request("GET", "/keys?policy=api&key=ann&key=pay");
    let away = request.send().await;
    assert_outage_text(&assert_problem(&away, 503), redis.port());
    let request = proxy.authorized_request("DELETE", "/keys?policy=api&key=ann&key=pay");
    let away = request.send().await;
    assert_outage_text(&assert_problem(&away, 503), redis.port());
    let report = post_explain(
        &proxy,
        json!({ "url": "/api/pay/1", "headers": { "x-user": "ann" } }),
    )
    .await;
    assert_outage_text(report["store_error"].as_str().unwrap(), redis.port());
    assert_eq!(report["expected"]["decision"], "degraded", "{report}");
    let overview = proxy.get_json("/overview").await;
    assert_eq!(overview["store"]["up"], false);
    assert_contains(
        overview["hints"][0].as_str().unwrap(),
        &["the store is unavailable"],
    );
    proxy.get_json("/fleet").await;
    // Inspections try to connect, and leave no line.
    let log = proxy.log_text();
    assert_eq!(log.matches("redis unavailable").count(), 1, "{log}");
}

/// The text names the cause, the address, the duration that the running store knows, and the remedy.
fn assert_outage_text(text: &str, port: u16) {
    let pattern = format!(
        r"^Redis gave no answer \(refused\): .* at 127\.0\.0\.1:{port}, for \d+ s; check host and port"
    );
    assert!(
        regex::Regex::new(&pattern).unwrap().is_match(text),
        "{text}"
    );
}

#[tokio::test]
async fn a_key_can_be_inspected_and_reset_with_sentinel_and_cluster() {
    let on = |lines: &str| {
        format!(
            "[store]\nkind = 'redis'\n[store.redis]\n{lines}\nkey_prefix = 't'\ntimeout = '2s'\n{POLICIES}"
        )
    };
    let watched = SentinelDeployment::start(1).await;
    let proxy = Proxy::with_token(&on(&watched.config_lines())).await;
    proxy.wait_for_store().await;
    assert_key_can_be_inspected_and_reset(&proxy, 3).await;
    let cluster = RedisCluster::start().await;
    let proxy = Proxy::with_token(&on(&cluster.config_lines())).await;
    proxy.wait_for_store().await;
    assert_key_can_be_inspected_and_reset(&proxy, 3).await;
}

/// A call without charges has no answer that can be read: Redis must not be asked.
#[tokio::test]
async fn explaining_a_request_without_limits_keeps_the_connection_to_redis() {
    let redis = RedisServer::start();
    let proxy = Proxy::with_token(&redis_config(redis.port())).await;
    proxy.wait_for_store().await;
    let report = post_explain(&proxy, json!({ "url": "/shut/x" })).await;
    assert_eq!(report["store_error"], Value::Null, "{report}");
    assert_eq!(report["expected"]["decision"], "denied", "{report}");
    let log = proxy.log_text();
    assert!(!log.contains("redis unavailable"), "{log}");
}

async fn post_explain(proxy: &Proxy, request: Value) -> Value {
    let body = request.to_string().into_bytes();
    let reply = proxy
        .admin_request("POST", "/explain")
        .header("Content-Type", "application/json")
        .body(body)
        .send()
        .await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

#[tokio::test]
async fn a_request_is_explained_by_the_active_policies_without_being_charged() {
    let proxy = Proxy::with_token(POLICIES).await;
    assert_eq!(proxy.status_for_user("ann", "/api/pay/1").await, 200);
    let request = json!({
        "method": "GET", "url": "http://shop.example//api/pay/2?x", "headers": { "x-user": "ann", "accept": ["a", "b"] },
        "ip": "2001:db8::1",
    });
    for _ in 0..3 {
        let report = post_explain(&proxy, request.clone()).await;
        let steps = report["policies"].as_array().unwrap();
        let results: Vec<(&str, &str)> = steps
            .iter()
            .map(|s| (s["policy"].as_str().unwrap(), s["result"].as_str().unwrap()))
            .collect();
        let expected = [
            ("free", "unmet"),
            ("shut", "unmet"),
            ("api", "limits"),
            ("all", "unmet"),
            ("candidate", "unmet"),
        ];
        assert_eq!(results, expected);
        assert_eq!(steps[0]["why"], "not for this path");
        assert_eq!(steps[2]["key"], "api/ann/pay");
        assert_eq!(steps[2]["limits"][0]["remaining"], 1);
        assert_eq!(report["expected"], json!({ "decision": "allowed" }));
    }
    assert_eq!(
        [
            proxy.status_for_user("ann", "/api/pay/1").await,
            proxy.status_for_user("ann", "/api/pay/1").await
        ],
        [200, 429]
    );
    let report = post_explain(&proxy, request).await;
    assert_eq!(
        report["expected"],
        json!({ "status": 429, "decision": "rejected", "by": ["api"] })
    );
    assert!(
        report["policies"][2]["blocked_s"].as_f64().unwrap() > 3000.0,
        "{report}"
    );
    let report = post_explain(&proxy, json!({ "url": "/shut/x" })).await;
    assert_eq!(
        report["expected"],
        json!({ "status": 403, "decision": "denied", "by": ["shut"] })
    );
    let report = post_explain(
        &proxy,
        json!({ "url": "/x", "headers": { "host": ["a", "b"] } }),
    )
    .await;
    assert!(
        report["expected"]["why"]
            .as_str()
            .unwrap()
            .contains("rejected before policies apply"),
        "{report}"
    );
}
