//! `counter` end to end: policies that share one quota.

mod combinations;
mod slot_terms;

use crate::support::prelude::*;
use crate::support::rls_client::{LimitCode, RateLimitDescriptor, RateLimitRequest};

/// `/both` matches both policies.
const POLICIES: &str = r#"
[[policy]]
name = "search"
counter = "units"
match = { path = ["/search", "/both"] }
key = ["header:x-user"]
limit = { requests = 8, per = "1h" }

[[policy]]
name = "export"
counter = "units"
match = { path = ["/export", "/both"] }
key = ["header:x-user"]
cost = 2
limit = { requests = 5, per = "1h" }

[[policy]]
name = "units"
match = { path = "/other" }
key = ["header:x-user"]
limit = { requests = 1, per = "1h" }
"#;

async fn send(proxy: &Proxy, path: &str) -> RawResponse {
    proxy.get_with(path, "X-User", "ann").await
}

fn remaining(response: &RawResponse) -> (u16, Option<u64>) {
    (response.status, response.remaining("units"))
}

/// Each policy compares the usage of both with its own limit, in every proxy and in both stores.
async fn assert_usage_is_shared(proxies: &[&Proxy]) {
    let (one, two) = (proxies[0], proxies[proxies.len() - 1]);
    assert_eq!(remaining(&send(one, "/search").await), (200, Some(7)));
    assert_eq!(remaining(&send(two, "/export").await), (200, Some(2)));
    // Both policies match: charged once, at the greatest cost, by the tightest limit.
    assert_eq!(remaining(&send(one, "/both").await), (200, Some(0)));
    for path in ["/export", "/both"] {
        for proxy in [one, two] {
            let response = send(proxy, path).await;
            assert_eq!(remaining(&response), (429, Some(0)), "{path}");
            assert_eq!(response.json()["policy"], "export");
        }
    }
    // A refusal by one policy's limit is none by another's.
    for left in [2, 1, 0] {
        assert_eq!(remaining(&send(two, "/search").await), (200, Some(left)));
    }
    let response = send(one, "/search").await;
    assert_eq!(remaining(&response), (429, Some(0)));
    assert_eq!(response.json()["policy"], "search");
    // The counter is not that of a policy of the same name.
    assert_eq!(remaining(&send(one, "/other").await), (200, Some(0)));
    let count = |policy: &str, decision: &str| {
        format!("tidegate_requests_total{{policy=\"{policy}\",decision=\"{decision}\"}}")
    };
    let mut counts = Vec::new();
    for policy in ["search", "export"] {
        let mut sum = 0.0;
        for proxy in proxies {
            sum += proxy.read_metric(&count(policy, "allowed")).await;
        }
        counts.push(sum);
    }
    assert_eq!(counts, [4.0, 2.0], "each request is counted by one policy");
}

#[tokio::test]
async fn policies_share_a_counter_in_redis() {
    let (redis, upstream) = (RedisServer::start(), Upstream::echo().await);
    let config = format!("{}\n{POLICIES}", redis.store_config());
    let (one, two) = (
        Proxy::start(&config, upstream.address).await,
        Proxy::start(&config, upstream.address).await,
    );
    one.wait_for_store().await;
    two.wait_for_store().await;
    assert_usage_is_shared(&[&one, &two]).await;
    let counters = list_counter_keys(&redis).await;
    assert_eq!(counters.len(), 2, "{counters:?}");
    let is_shared = |key: &String| key.ends_with(":@units/ann");
    assert!(counters.iter().any(is_shared), "{counters:?}");
}

#[tokio::test]
async fn policies_share_a_counter_in_memory() {
    let proxy = Proxy::with_echo(POLICIES).await;
    assert_usage_is_shared(&[&proxy]).await;
}

#[tokio::test]
async fn a_counter_of_the_instance_stands_beside_one_in_redis() {
    let (redis, upstream) = (RedisServer::start(), Upstream::echo().await);
    let policies = POLICIES.replace("counter = ", "scope = \"instance\"\ncounter = ");
    let config = format!("{}\n{policies}", redis.store_config());
    let (one, two) = (
        Proxy::start(&config, upstream.address).await,
        Proxy::start(&config, upstream.address).await,
    );
    for proxy in [&one, &two] {
        assert_eq!(remaining(&send(proxy, "/export").await), (200, Some(3)));
        assert_eq!(remaining(&send(proxy, "/search").await), (200, Some(5)));
    }
    assert!(list_counter_keys(&redis).await.is_empty());
}

#[tokio::test]
async fn a_block_is_one_for_all_policies_of_a_counter() {
    let policies = POLICIES.replace("counter = ", "block_for = \"1h\"\ncounter = ");
    let proxy = Proxy::with_echo(&policies).await;
    for expected in [200, 200, 429] {
        assert_eq!(send(&proxy, "/export").await.status, expected);
    }
    assert_eq!(send(&proxy, "/search").await.status, 429, "4 of 8 are used");
}

#[tokio::test]
async fn commands_show_the_usage_by_each_policy_and_reset_it_for_all() {
    let redis = RedisServer::start();
    let admin = Proxy::with_token(&format!("{}\n{POLICIES}", redis.store_config())).await;
    admin.wait_for_store().await;
    send(&admin, "/search").await;
    send(&admin, "/export").await;
    for (policy, left) in [("search", "5 left"), ("export", "2 left")] {
        let shown = admin.run_command(&["keys", "show", policy, "ann"]).await;
        shown.expect_stdout(left);
        let listed = admin
            .run_command(&["keys", "list", "--policy", policy])
            .await;
        let count = listed.stdout.matches("@units/ann").count();
        assert_eq!(count, 1, "{}", listed.stdout);
    }
    let words = ["explain", "GET", "http://a/both", "-H", "x-user: ann"];
    let explained = admin.run_command(&words).await;
    for left in ["5 left", "2 left"] {
        explained.expect_stdout(left);
    }
    let reset = admin.run_command(&["keys", "reset", "export", "ann"]).await;
    reset.expect_stdout("reset 1 limit");
    assert_eq!(remaining(&send(&admin, "/search").await), (200, Some(7)));
    let policy = admin.wait_for_policy("search", |_| true).await;
    assert_eq!(policy["counter"], "units");
}

/// A key with a block and response counters, beside slots, which responses do not count against.
#[tokio::test]
async fn a_reset_names_the_limits_of_all_counters_of_a_key() {
    let redis = RedisServer::start();
    let policies = "[[policy]]\nname = 'login'\nkey = ['header:x-user']\nblock_for = '1h'\n\
        count_when = { status = [200] }\nlimits = [\n{ requests = 1, per = '1h', name = 'log' },\n\
        { requests = 5, per = '1d', algorithm = 'fixed_window', name = 'day' },\n\
        { requests = 3, algorithm = 'concurrency', name = 'slots' },\n]\n";
    let admin = Proxy::with_token(&format!("{}\n{policies}", redis.store_config())).await;
    admin.wait_for_store().await;
    let reset = async || {
        let reset = admin.run_command(&["keys", "reset", "login", "ann"]).await;
        reset.stdout.trim().rsplit_once(": ").unwrap().1.to_owned()
    };
    assert_eq!(reset().await, "no counter to reset");
    assert_eq!(send(&admin, "/").await.status, 200);
    while send(&admin, "/").await.status != 429 {}
    // The response counters of log and day are those of the same limits.
    let text = reset().await;
    assert!(text.starts_with("reset 2 limits (log, day)"), "{text}");
}

/// Each descriptor of a call is a hit, also if different policies count it.
#[tokio::test]
async fn descriptors_of_one_call_add_up_in_a_shared_counter() {
    let policy = |name: &str, requests: u64| {
        format!(
            "[[policy]]\nname = '{name}'\ncounter = 'hits'\nmatch = {{ domain = 'd', descriptors = {{ {name} = '*' }} }}\n\
             limit = {{ requests = {requests}, per = '1h' }}\n"
        )
    };
    let config = format!("{RLS_LISTENER}{}{}", policy("a", 5), policy("b", 9));
    let mut service = ServiceClient::start(&config).await;
    let (a, b) = (
        make_descriptor(&[("a", "1")]),
        make_descriptor(&[("b", "1")]),
    );
    let call = |descriptors: &[RateLimitDescriptor]| RateLimitRequest {
        domain: "d".to_owned(),
        ..make_request(descriptors)
    };
    for expected in [LimitCode::Ok, LimitCode::Ok, LimitCode::OverLimit] {
        let both = call(&[a.clone(), b.clone()]);
        let response = service.should_rate_limit(both).await.unwrap();
        assert_eq!(response.overall_code(), expected, "{response:?}");
    }
    // Four hits of five are used, and of nine.
    for (descriptor, expected) in [
        (&a, LimitCode::Ok),
        (&a, LimitCode::OverLimit),
        (&b, LimitCode::Ok),
    ] {
        let one = call(std::slice::from_ref(descriptor));
        let response = service.should_rate_limit(one).await.unwrap();
        assert_eq!(response.overall_code(), expected, "{response:?}");
    }
}
