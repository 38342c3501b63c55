//! Overrides that end by themselves, and values at their keys that are none.

use super::{OverrideFixture, POLICIES, get, status};
use std::time::Duration;
use tokio::time::sleep;

fn wait_s(response: &crate::support::client::RawResponse) -> u64 {
    assert_eq!(response.status, 403, "the policy's reject: {response:?}");
    response.header("retry-after").unwrap().parse().unwrap()
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
            let path = format!("/{policy}");
            let mut statuses = Vec::new();
            for _ in 0..3 {
                statuses.push(get(&proxy, &path, &user).await.status);
            }
            assert_eq!(statuses, [200, 200, refused], "{write}");
            let degraded =
                format!("tidegate_requests_total{{policy=\"{policy}\",decision=\"degraded\"}}");
            assert_eq!(proxy.read_metric(&degraded).await, 0.0, "{write}");
            assert_eq!(fixture.run_successfully(&["list"]).await, "", "{write}");
            words[0] = "show";
            let shown = fixture.run_command(&words).await;
            assert_ne!(shown.status.code(), Some(0), "{write}: {}", shown.stdout);
        }
    }
}
