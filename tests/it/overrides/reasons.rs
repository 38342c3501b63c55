//! What a client and an operator read about a key that an override, `block_for` or a limit of 0
//! refuses.

use super::{OverrideFixture, get};
use crate::support::prelude::*;

const POLICIES: &str = r#"
[[policy]]
name = "api"
dynamic = true
match = { path = "/api" }
key = ["header:x-user-id"]
limit = { requests = 5, per = "1s" }

[[policy]]
name = "login"
match = { path = "/login" }
key = ["header:x-user-id"]
limit = { requests = 1, per = "1s" }
block_for = "1h"

[[policy]]
name = "closed"
match = { path = "/closed" }
key = ["header:x-user-id"]
limit = { requests = 0, per = "1s" }

[[policy]]
name = "hidden"
report = false
dynamic = true
match = { path = "/hidden" }
key = ["header:x-user-id"]
limit = { requests = 5, per = "1s" }
"#;

/// The detail of a 429, and its Retry-After.
async fn read_refusal(proxy: &Proxy, path: &str, user: &str) -> (String, Option<u64>) {
    let response = get(proxy, path, user).await;
    assert_eq!(response.status, 429, "{path} {user}: {}", response.text());
    let detail = response.json()["detail"].as_str().unwrap().to_owned();
    for wrong in ["cost", "Over the limit", "mallory", "secret note"] {
        assert!(!detail.contains(wrong), "{path} {user}: {detail}");
    }
    let wait = response.header("retry-after");
    (detail, wait.map(|text| text.parse().unwrap()))
}

#[tokio::test]
async fn a_block_and_a_limit_of_0_are_called_by_their_names() {
    let fixture = OverrideFixture::start(POLICIES).await;
    let proxy = fixture.start_proxy().await;
    let remarks = ["--author", "mallory", "--note", "secret note"];
    for words in [
        ["set", "api", "ann", "--block", "--expires", "2h"].as_slice(),
        &["set", "api", "ever", "--block"],
        &["set", "hidden", "ann", "--block"],
        &["set", "api", "zero", "--requests", "0"],
        &["set", "api", "small", "--requests", "2"],
    ] {
        fixture.run_successfully(&[words, &remarks].concat()).await;
    }
    // Twice: the second refusal comes from the cache.
    for _ in 0..2 {
        let (detail, wait) = read_refusal(&proxy, "/api", "ann").await;
        assert_contains(
            &detail,
            &["Policy \"api\" blocks this client. Try again in 7"],
        );
        assert!((7100..=7200).contains(&wait.unwrap()), "{wait:?}");
        let (detail, wait) = read_refusal(&proxy, "/api", "ever").await;
        assert_eq!(
            detail,
            "Policy \"api\" blocks this client. Retrying will not help."
        );
        assert_eq!(wait, None);
        let (detail, _) = read_refusal(&proxy, "/hidden", "ann").await;
        assert_eq!(
            detail,
            "A policy blocks this client. Retrying will not help."
        );
        for (path, user) in [("/api", "zero"), ("/closed", "ann")] {
            let (detail, wait) = read_refusal(&proxy, path, user).await;
            assert_contains(&detail, &["its limit is 0. Retrying will not help."]);
            assert_eq!(wait, None);
        }
    }
    for expected in [200, 429] {
        assert_eq!(get(&proxy, "/login", "ann").await.status, expected);
    }
    let (detail, wait) = read_refusal(&proxy, "/login", "ann").await;
    assert_contains(
        &detail,
        &["\"login\" blocks this client after requests over"],
    );
    assert!(wait > Some(3500));
    for _ in 0..3 {
        get(&proxy, "/api", "small").await;
    }

    let log = eventually("the log lines", TEST_TIMEOUT, async || {
        let text = proxy.log_text();
        let lines = text.matches("\"target\":\"access\"").count();
        (lines >= 13).then_some(text)
    });
    let log_path = fixture.config.beside("log");
    fs::write(&log_path, log.await).unwrap();
    let why = async |key: &str, policy: &str| {
        let mut command = tidegate_command();
        command.args(["why", "--policy", policy, "--key", key, "--config"]);
        let ended = run_command(command.arg(fixture.config.path()).arg(&log_path)).await;
        assert!(ended.status.success(), "{}", ended.stderr);
        ended.stdout
    };
    let text = why("ann", "api").await;
    assert_contains(&text, &["now blocked by an override of mallory until 20"]);
    assert!(text.contains("api, blocked by an override"), "{text}");
    assert!(!text.contains("5 per 1s"), "{text}");
    let text = why("ever", "api").await;
    assert!(text.contains("until removed"), "{text}");
    let text = why("zero", "api").await;
    assert_contains(&text, &["0 per 1s, sliding_log, by an override"]);
    assert!(text.contains("never: limit 0"), "{text}");
    let text = why("small", "api").await;
    assert_contains(&text, &["2 per 1s, sliding_log, by an override"]);

    let mut show = tidegate_command();
    show.args(["keys", "show", "api", "ann", "--config"]);
    let shown = run_command(show.arg(fixture.config.path())).await.stdout;
    assert_contains(&shown, &["blocked by an override of mallory until 20"]);
    assert!(shown.contains(": secret note"), "{shown}");
    assert!(!shown.contains("per 1s"), "{shown}");
}

#[tokio::test]
async fn the_admin_port_names_author_end_and_note_of_an_override_in_memory() {
    let proxy = Proxy::with_token(POLICIES).await;
    let put = proxy.authorized_request("PUT", "/overrides/api");
    let put = put.header("content-type", "application/json");
    let body = r#"{"key": "ann", "blocked": true, "author": "mallory", "note": "scraper"}"#;
    assert_eq!(put.body(body).send().await.status, 200);
    let report = proxy.get_json("/keys?policy=api&key=ann").await;
    assert_eq!(
        report["override_words"],
        "blocked by an override of mallory: scraper"
    );
    assert_eq!(report["limits"][0]["override"], "blocked");
    let other = proxy.get_json("/keys?policy=api&key=bob").await;
    assert_eq!(other.get("override_words"), None, "{other}");
}
