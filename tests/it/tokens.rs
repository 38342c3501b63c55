//! Claims of tokens as keys and in matches, from file to socket.

use crate::support::proxy::{LogLine, Proxy};
use crate::support::tokens::{Issuer, publish};
use crate::support::upstream::Upstream;
use crate::support::{SOON, unix_s};
use jsonwebtoken::Algorithm;
use serde_json::json;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// One request per user; all without one share one.
const PER_USER: &str = r#"
[[policy]]
name = "per-user"
key = ["jwt:sub"]
limit = { requests = 1, per = "1h" }
"#;

fn by_keys(file: &Path) -> String {
    format!("[client.jwt]\nkeys_file = {file:?}\n{PER_USER}")
}

async fn status(proxy: &Proxy, bearer: &str) -> u16 {
    proxy
        .ask("GET", "/")
        .header("Authorization", bearer)
        .status()
        .await
}

#[tokio::test]
async fn every_user_has_a_quota_and_whoever_cannot_prove_to_be_one_shares_one() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("jwks.json");
    let issuers = [Algorithm::RS256, Algorithm::ES256, Algorithm::EdDSA]
        .map(|alg| Issuer::new(&format!("{alg:?}"), alg));
    publish(&file, &issuers.each_ref());
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start(&by_keys(&file), upstream.address).await;
    for (issuer, user) in issuers.iter().zip(["ann", "bob", "cid"]) {
        assert_eq!(status(&proxy, &issuer.names(user)).await, 200, "{user}");
    }
    for user in ["ann", "bob", "cid"] {
        assert_eq!(
            status(&proxy, &issuers[1].names(user)).await,
            429,
            "{user}, by another token"
        );
    }
    assert_eq!(proxy.get("/").await.status, 200, "who is nobody");
    let (ann, stranger) = (
        issuers[0].names("dan"),
        Issuer::new("RS256", Algorithm::RS256),
    );
    let expired = issuers[0].bearer(&json!({ "sub": "eve", "exp": unix_s() - 60 }));
    for (what, bearer) in [
        ("no token", String::new()),
        ("a stranger's", stranger.names("dan")),
        ("HMAC", Issuer::with_secret("RS256").names("dan")),
        ("expired", expired),
        ("cut", ann[..ann.len() - 4].to_owned()),
        ("nonsense", "Bearer x".to_owned()),
        ("too large", format!("Bearer {}", "x".repeat(20 << 10))),
    ] {
        assert_eq!(
            status(&proxy, &bearer).await,
            429,
            "{what}: they all share one quota"
        );
    }
    assert_eq!(
        status(&proxy, &ann).await,
        200,
        "nobody has used it for him"
    );
    assert_eq!(
        upstream.last().one("authorization"),
        ann,
        "forwarded as it came"
    );
    let twice = proxy
        .ask("GET", "/")
        .header("Authorization", &ann)
        .header("authorization", "Bearer x");
    assert_eq!(twice.status().await, 400);
    assert_eq!(upstream.seen().len(), 5);
    let page = crate::support::client::Ask::new(proxy.admin(), "GET", "/metrics")
        .header("Host", "localhost");
    let page = page.send().await.text();
    assert!(
        page.contains("\ntidegate_tokens_refused_total 6\n"),
        "{page}"
    );
}

#[tokio::test]
async fn claims_are_matched() {
    let dir = TempDir::new().unwrap();
    let secret = "a secret that is long enough to be one";
    let file = dir.path().join("secret");
    fs::write(&file, format!("{secret}\n")).unwrap();
    let config = format!(
        r#"
[client.jwt]
secret_file = {file:?}
header = "x-identity"
[[policy]]
name = "staff"
match = {{ jwt = {{ "/realm_access/roles" = "staff", aud = {{ regex = "^api" }} }} }}
action = "allow"
[[policy]]
name = "suspended"
match = {{ jwt = {{ suspended = true }} }}
action = "deny"
[[policy]]
name = "anonymous"
match = {{ jwt = {{ sub = {{ present = false }} }} }}
limit = {{ requests = 1, per = "1h" }}
[[policy]]
name = "tenant"
match = {{ not = {{ jwt = {{ plan = "gold" }} }} }}
key = ["jwt:/org/id"]
missing_key = "reject"
limit = {{ requests = 1, per = "1h" }}
"#
    );
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start(&config, upstream.address).await;
    let issuer = Issuer::with_secret(secret);
    let status = async |claims: serde_json::Value| {
        let token = issuer.bearer(&claims);
        let ask = proxy
            .ask("GET", "/")
            .header("X-Identity", token.strip_prefix("Bearer ").unwrap());
        ask.status().await
    };
    let staff = json!({ "realm_access": { "roles": ["user", "staff"] }, "aud": ["x", "api-1"], "suspended": true });
    assert_eq!(
        (status(staff.clone()).await, status(staff).await),
        (200, 200)
    );
    assert_eq!(
        status(json!({ "realm_access": { "roles": ["staff"] }, "aud": "y", "suspended": true }))
            .await,
        403
    );
    assert_eq!(status(json!({ "sub": "a", "org": { "id": 7 } })).await, 200);
    assert_eq!(
        status(json!({ "sub": "b", "org": { "id": 7 } })).await,
        429,
        "one organization"
    );
    assert_eq!(
        status(json!({ "sub": "b", "org": { "id": 8 }, "suspended": false })).await,
        200
    );
    assert_eq!(status(json!({ "sub": "a", "plan": "gold" })).await, 200);
    assert_eq!(
        status(json!({ "sub": "a", "org": { "id": { "x": 1 } } })).await,
        400,
        "no key"
    );
    assert_eq!(
        status(json!({ "plan": "gold" })).await,
        200,
        "the one request of the anonymous"
    );
    assert_eq!(status(json!({ "plan": "gold" })).await, 429);
}

#[tokio::test]
async fn keys_are_rotated_while_it_runs_and_bad_ones_change_nothing() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("jwks.json");
    let (old, new) = (
        Issuer::new("old", Algorithm::ES256),
        Issuer::new("new", Algorithm::ES256),
    );
    publish(&file, &[&old]);
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start(
        &format!("[defaults]\nmissing_key = 'reject'\n{}", by_keys(&file)),
        upstream.address,
    )
    .await;
    assert_eq!(status(&proxy, &old.names("ann")).await, 200);
    assert_eq!(status(&proxy, &new.names("bob")).await, 400, "not yet");
    for bad in ["{", r#"{"keys":[]}"#, ""] {
        let mark = proxy.log_mark();
        fs::write(&file, bad).unwrap();
        let told = |line: &LogLine| line.is_level("ERROR") && line.mentions("client.jwt.keys_file");
        proxy
            .wait_for_log("a complaint about the keys", mark, SOON, told)
            .await;
        assert_eq!(
            status(&proxy, &old.names("ann")).await,
            429,
            "the old keys stay"
        );
    }
    publish(&file, &[&new]);
    let changed = Instant::now();
    while status(&proxy, &new.names("bob")).await == 400 {
        assert!(
            changed.elapsed() < Duration::from_millis(2_500),
            "{}",
            proxy.log()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(
        status(&proxy, &old.names("ann")).await,
        400,
        "known before, and no longer believed"
    );
    assert_eq!(
        status(&proxy, &new.names("ann")).await,
        429,
        "her counter has stayed"
    );
}

#[tokio::test]
async fn an_unverified_token_is_warned_about_and_secrets_are_never_told() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("secret");
    fs::write(&file, "hunter2").unwrap();
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start(
        &format!("[client.jwt]\nverify = false\n{PER_USER}"),
        upstream.address,
    )
    .await;
    let told = |line: &LogLine| line.is_level("WARN") && line.mentions("unverified JWT");
    proxy.wait_for_log("a warning", 0, SOON, told).await;
    let (one, other) = (
        Issuer::with_secret("a").names("ann"),
        Issuer::with_secret("b").names("ann"),
    );
    assert_eq!(
        (status(&proxy, &one).await, status(&proxy, &other).await),
        (200, 429)
    );

    let config =
        format!("[log]\nlevel = 'trace'\n[client.jwt]\nsecret_file = {file:?}\n{PER_USER}");
    let proxy = Proxy::start(&config, upstream.address).await;
    let token = Issuer::with_secret("hunter2").names("ann");
    assert_eq!(status(&proxy, &token).await, 200);
    assert_eq!(status(&proxy, &format!("{token}x")).await, 200);
    let shown = crate::support::client::Ask::new(proxy.admin(), "GET", "/config")
        .header("Host", "localhost");
    let shown = shown.send().await.text();
    assert!(
        shown.contains("secret_file") && !shown.contains("hunter2"),
        "{shown}"
    );
    let log = proxy.log();
    let signature = token.rsplit('.').next().unwrap();
    assert!(
        log.contains("7 bytes") && log.contains("its signature is not"),
        "{log}"
    );
    assert!(
        !log.contains("hunter2") && !log.contains(signature),
        "{log}"
    );
}
