//! Overrides by the admin port: changes at the same time, slow listings, and values like digests.

use super::{OverrideFixture, POLICIES};
use crate::support::prelude::*;

#[tokio::test]
async fn two_limits_that_are_set_at_the_same_time_both_stay() {
    let redis = RedisServer::start();
    for store in [String::new(), redis.store_config()] {
        let proxy = Proxy::with_token(&format!("{store}\n{POLICIES}")).await;
        let patch = async |limit: &str, requests: u64| {
            let body =
                format!(r#"{{"key": ["ann", "k"], "limit": "{limit}", "requests": {requests}}}"#);
            let request = proxy.authorized_request("PATCH", "/overrides/several");
            let request = request.header("content-type", "application/json");
            let response = request.body(body).send().await;
            assert_eq!(response.status, 200, "{}", response.text());
        };
        for round in 0..30 {
            let target = "/overrides/several?key=ann&key=k";
            proxy.authorized_request("DELETE", target).send().await;
            tokio::join!(patch("minute", round), patch("day", round + 1));
            let stored = proxy.get_json(target).await;
            let limits = &stored["overrides"][0]["limits"];
            assert_eq!(limits["minute"]["requests"], round, "{stored}");
            assert_eq!(limits["day"]["requests"], round + 1, "{stored}");
        }
        // PUT replaces the whole override.
        let put = proxy.authorized_request("PUT", "/overrides/several");
        let put = put.header("content-type", "application/json");
        let body = r#"{"key": ["ann", "k"], "limit": "day", "requests": 3}"#;
        let replaced = put.body(body).send().await.json();
        assert_eq!(replaced["limits"].as_object().unwrap().len(), 1);
    }
}

#[tokio::test]
async fn a_listing_that_takes_too_long_ends_with_a_reason_and_delays_no_change() {
    let redis = RedisServer::start_with(&["--enable-debug-command", "yes"]);
    redis.run("DEBUG POPULATE 60000").await;
    let relay = TcpRelay::start(redis.port()).await;
    let config = redis.store_config();
    let config = config.replace(&format!(":{}", redis.port()), &format!(":{}", relay.port));
    let proxy = Proxy::with_token(&format!("{config}\n{POLICIES}")).await;
    proxy.wait_for_store().await;
    relay.delay_replies(Duration::from_millis(150));
    let list = proxy.admin_request("GET", "/overrides/api").send();
    let change = async {
        sleep(Duration::from_millis(200)).await;
        let put = proxy.authorized_request("PUT", "/overrides/api");
        let put = put.header("content-type", "application/json");
        put.body(r#"{"key": "ann", "requests": 9}"#).send().await
    };
    tokio::pin!(list);
    let changed = tokio::select! {
        listed = &mut list => panic!("the listing ended first: {}", listed.text()),
        changed = change => changed,
    };
    assert_eq!(changed.status, 200, "{}", changed.text());
    let listed = list.await;
    assert_eq!(listed.status, 503, "{}", listed.text());
    assert!(listed.text().contains("too many keys"), "{}", listed.text());
}

/// A value of the form of a digest is no digest, and can be listed, exported and removed.
#[tokio::test]
async fn a_value_like_a_digest_has_an_override_of_its_own() {
    let fixture = OverrideFixture::start(POLICIES).await;
    let value = format!("#{}", "A".repeat(43));
    let escaped = format!("#{value}");
    let set = ["set", "api", &escaped, "--requests", "7"];
    fixture.run_successfully(&set).await;
    let proxy = fixture.start_proxy().await;
    let reply = super::get(&proxy, "/api", &value).await;
    let found = reply.list_parameter("ratelimit-policy", "api", "q");
    assert_eq!(found, Some(7));
    let exported = fixture.run_successfully(&["export"]).await;
    assert!(exported.contains(&escaped), "{exported}");
    let file = fixture.config.beside("all.jsonl");
    fs::write(&file, &exported).unwrap();
    let removed = fixture.run_successfully(&["remove", "api", &escaped]).await;
    assert!(removed.contains("override removed"), "{removed}");
    fixture
        .run_successfully(&["import", file.to_str().unwrap()])
        .await;
    assert_eq!(fixture.run_successfully(&["export"]).await, exported);
}
