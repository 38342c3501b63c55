//! Overrides that end by themselves, and values at their keys that are none.

use super::{OverrideFixture, POLICIES, get, status};
use crate::support::prelude::*;

const FOREIGN_OVERRIDES: &str = "tidegate_foreign_overrides_total";
const OVERRIDE_CHANGES: &str = "tidegate_override_changes_total";

fn wait_s(response: &RawResponse) -> u64 {
    assert_eq!(response.status, 403, "the policy's reject: {response:?}");
    response.retry_after_s()
}

/// A client that waits as told is admitted, also when the refusal comes from the cache.
#[tokio::test]
async fn a_refusal_by_an_override_ends_with_the_override() {
    let fixture = OverrideFixture::start(POLICIES).await;
    let proxy = fixture.start_proxy().await;
    for (user, rule) in [("ann", vec!["--block"]), ("bob", vec!["--requests", "1"])] {
        let set = ["set", "api", user, "--expires", "3s"];
        let words: Vec<_> = set.into_iter().chain(rule).collect();
        fixture.run_successfully(&words).await;
        if user == "bob" {
            assert_eq!(status(&proxy, user).await, 200);
        }
        let mut wait = 0;
        for _ in 0..10 {
            wait = wait_s(&get(&proxy, "/api", user).await);
            assert!((1..=4).contains(&wait), "{user}: {wait} s");
        }
        sleep(Duration::from_secs(wait)).await;
        assert_eq!(status(&proxy, user).await, 200, "{user}");
    }
    // The file's limit is full: the end of the block does not help.
    assert_eq!(status(&proxy, "cid").await, 200);
    assert_eq!(status(&proxy, "cid").await, 200);
    let set = ["set", "api", "cid", "--block", "--expires", "3s"];
    fixture.run_successfully(&set).await;
    for _ in 0..10 {
        let wait = wait_s(&get(&proxy, "/api", "cid").await);
        assert!((3_590..=3_600).contains(&wait), "{wait} s");
    }
}

/// As a lost override: the limits of the file apply, whatever the number of charges in a call.
#[tokio::test]
async fn a_value_of_another_type_is_no_override() {
    let fixture = OverrideFixture::start(POLICIES).await;
    let proxy = fixture.start_proxy().await;
    for (policy, key_values, refused) in [("api", 1, 403), ("several", 2, 429)] {
        for (number, write) in ["HSET KEY a b", "LPUSH KEY a", "SET KEY x", "SET KEY @5"]
            .into_iter()
            .enumerate()
        {
            fixture.redis.command::<()>("FLUSHALL").await;
            // A user of its own: no worker has a refusal of it.
            let user = format!("user{number}");
            let key = [&*user, "sk_live_1"];
            let mut words = vec!["set", policy];
            words.extend(&key[..key_values]);
            let set = words.iter().copied().chain(["--block"]);
            fixture.run_successfully(&set.collect::<Vec<_>>()).await;
            let names: Vec<String> = fixture.redis.command("KEYS *:override").await;
            let [name] = names.as_slice() else {
                panic!("{names:?}")
            };
            fixture.redis.command::<()>(&format!("DEL {name}")).await;
            let write = write.replace("KEY", name);
            let _: redis::Value = fixture.redis.command(&write).await;
            let before = proxy.read_metric(FOREIGN_OVERRIDES).await;
            let path = format!("/{policy}");
            let mut statuses = Vec::new();
            for _ in 0..3 {
                statuses.push(get(&proxy, &path, &user).await.status);
            }
            assert_eq!(statuses, [200, 200, refused], "{write}");
            let met = proxy.read_metric(FOREIGN_OVERRIDES).await - before;
            assert_eq!(met, 3.0, "{write}: one for each decision");
            let degraded =
                format!("tidegate_requests_total{{policy=\"{policy}\",decision=\"degraded\"}}");
            assert_eq!(proxy.read_metric(&degraded).await, 0.0, "{write}");
            assert_eq!(fixture.run_successfully(&["list"]).await, "", "{write}");
            words[0] = "show";
            let shown = fixture.run_successfully(&words).await;
            assert!(shown.contains("no override"), "{write}: {shown}");
            words[0] = "set";
            words.push("--block");
            fixture.run_successfully(&words).await;
            let listed = fixture.run_successfully(&["list"]).await;
            assert!(listed.contains(&user), "{write}: {listed}");
        }
    }
    let log = proxy.log_text();
    let lines = log.matches("holds a foreign value").count();
    assert_eq!(lines, 1, "once a minute: {log}");
}

/// The commands write to Redis. Each proxy counts the changes that its own requests meet.
#[tokio::test]
async fn changes_of_overrides_are_counted_by_the_proxies_that_meet_them() {
    let fixture = OverrideFixture::start(POLICIES).await;
    let (proxy, other) = (fixture.start_proxy().await, fixture.start_proxy().await);
    let changes = async |proxy: &Proxy| proxy.read_metric(OVERRIDE_CHANGES).await;
    assert_eq!(status(&proxy, "ann").await, 200);
    assert_eq!(changes(&proxy).await, 0.0, "no override");
    let block = ["set", "api", "ann", "--block"];
    fixture.run_successfully(&block).await;
    assert_eq!(status(&proxy, "ann").await, 403);
    assert_eq!(changes(&proxy).await, 1.0, "set");
    let raise = ["set", "api", "ann", "--requests", "1000"];
    fixture.run_successfully(&raise).await;
    // The refusal is cached for a second.
    wait_until("the raised limit", async || {
        status(&proxy, "ann").await == 200
    })
    .await;
    assert_eq!(status(&proxy, "ann").await, 200);
    assert_eq!(changes(&proxy).await, 2.0, "replaced");
    fixture.run_successfully(&["remove", "api", "ann"]).await;
    status(&proxy, "ann").await;
    assert_eq!(changes(&proxy).await, 3.0, "removed");
    let block = ["set", "several", "bob", "sk_live_1", "--block"];
    fixture.run_successfully(&block).await;
    assert_eq!(get(&proxy, "/several", "bob").await.status, 429);
    assert_eq!(changes(&proxy).await, 4.0, "two limits, one override");
    assert_eq!(changes(&other).await, 0.0);
    assert_eq!(get(&other, "/several", "bob").await.status, 429);
    assert_eq!(changes(&other).await, 1.0);
    assert_eq!(proxy.read_metric(FOREIGN_OVERRIDES).await, 0.0);
}

/// The numbers of a reply are exact up to 2^53 us, in June 2255: an override that ends later has no
/// end. A value whose expiry is no number is none.
#[tokio::test]
async fn an_expiry_beyond_exact_times_fails_no_decision() {
    let fixture = OverrideFixture::start(POLICIES).await;
    let proxy = fixture.start_proxy().await;
    for (policy, limit, key_values, refused) in
        [("api", "api", 1, 403), ("several", "minute", 2, 429)]
    {
        let (blocked, unlimited) = ([refused; 3], [200; 3]);
        let (one, of_file) = ([200, refused, refused], [200, 200, refused]);
        for (number, (rule, expected)) in [
            ("!@253402300799999", blocked),
            ("!@9007199254740", blocked),
            ("!@9007199254739", blocked),
            ("!@99999999999999999999999999", blocked),
            ("*@253402300799999", unlimited),
            ("*@9007199254739", unlimited),
            ("LIMIT=1@253402300799999", one),
            ("LIMIT=1@9007199254739", one),
            ("LIMIT=0@-1", of_file),
            ("*@-1", of_file),
            ("*@1e30", of_file),
            ("!@nan", of_file),
            ("!@5.5", of_file),
            ("!@+5", of_file),
            ("!@", of_file),
            ("!@1@2", of_file),
        ]
        .into_iter()
        .enumerate()
        {
            fixture.redis.command::<()>("FLUSHALL").await;
            let user = format!("user{number}");
            let key = [&*user, "sk_live_1"];
            let words = [&["set", policy], &key[..key_values], &["--block"]].concat();
            fixture.run_successfully(&words).await;
            let names: Vec<String> = fixture.redis.command("KEYS *:override").await;
            let [name] = names.as_slice() else {
                panic!("{names:?}")
            };
            let rule = rule.replace("LIMIT", limit);
            let script = "redis.call('SET',KEYS[1],ARGV[1]..redis.call('GET',KEYS[1]):sub(2))";
            let replace = format!("EVAL {script} 1 {name} {rule}");
            fixture.redis.command::<()>(&replace).await;
            let path = format!("/{policy}");
            let mut statuses = Vec::new();
            for _ in 0..3 {
                statuses.push(get(&proxy, &path, &user).await.status);
            }
            assert_eq!(statuses, expected, "{policy}: {rule}");
            let degraded =
                format!("tidegate_requests_total{{policy=\"{policy}\",decision=\"degraded\"}}");
            assert_eq!(proxy.read_metric(&degraded).await, 0.0, "{policy}: {rule}");
            let is_listed = !fixture.run_successfully(&["list"]).await.is_empty();
            assert_eq!(is_listed, expected != of_file, "{policy}: {rule}");
        }
    }
}

#[tokio::test]
async fn the_latest_expiry_is_accepted_and_enforced() {
    let redis = RedisServer::start();
    for store in [String::new(), redis.store_config()] {
        let proxy = Proxy::with_token(&format!("{store}\n{POLICIES}")).await;
        for (expires_at, expected) in [
            ("9999-12-31T23:59:59.999Z", 400),
            ("2255-06-05T23:47:34.740Z", 400),
            ("2255-06-05T23:47:34.739Z", 200),
        ] {
            let put = proxy.authorized_request("PUT", "/overrides/api");
            let put = put.header("content-type", "application/json");
            let body =
                format!(r#"{{"key": "ann", "blocked": true, "expires_at": "{expires_at}"}}"#);
            let response = put.body(body).send().await;
            assert_eq!(response.status, expected, "{}", response.text());
            let is_rejected = response.text().contains(
                "the expiry is after 2255-06-05T23:47:34.739Z; expected an earlier one, or none",
            );
            assert_eq!(is_rejected, expected == 400, "{}", response.text());
        }
        for _ in 0..3 {
            let response = get(&proxy, "/api", "ann").await;
            assert_eq!(response.status, 403, "{store}: {response:?}");
        }
        let listed = proxy.get_json("/overrides/api?key=ann").await;
        let listed = &listed["overrides"][0];
        assert_eq!(listed["expires_at"], "2255-06-05T23:47:34.739Z", "{listed}");
    }
}
