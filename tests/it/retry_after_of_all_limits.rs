//! `Retry-After` covers every limit that would refuse, whichever part of the store answers first: the
//! instance, one slot of a cluster, a cached refusal, a shard, or a local share.

use crate::support::prelude::*;
use std::ops::RangeInclusive;

const FROM_CACHE: &str = "tidegate_decision_seconds_count{source=\"deny_cache\"}";

/// A policy for some paths, with one unit per user.
fn path_policy(name: &str, paths: &str, per: &str, more: &str) -> String {
    format!(
        "[[policy]]\nname = '{name}'\nmatch = {{ path = [{paths}] }}\n{more}\n\
         limit = {{ requests = 1, per = '{per}' }}\n"
    )
}

/// A policy of the instance, and one of the customer in Redis.
fn pod_and_customer(customer_paths: &str, more: &str) -> String {
    path_policy("pod", "'/all'", "100s", "scope = 'instance'")
        + &path_policy(
            "customer",
            customer_paths,
            "1000s",
            &format!("key = ['header:x-user']\n{more}"),
        )
}

/// The calls of Redis that 200 requests of bob make.
async fn count_calls(redis: &RedisServer, proxy: &Proxy, check: impl Fn(&RawResponse)) -> u64 {
    let calls = async || -> u64 {
        let info: String = redis.command("INFO commandstats").await;
        let (_, rest) = info.split_once("cmdstat_evalsha:calls=").unwrap();
        rest.split(',').next().unwrap().parse().unwrap()
    };
    let before = calls().await;
    for _ in 0..200 {
        check(&send(proxy, "/all", "bob").await);
    }
    calls().await - before
}

async fn send(proxy: &Proxy, path: &str, user: &str) -> RawResponse {
    proxy.get_with(path, "x-user", user).await
}

fn retry_after(response: &RawResponse) -> u64 {
    assert_eq!(response.status, 429, "{response:?}");
    response.retry_after_s()
}

/// Several requests, the first of which reads the counters, all get a time in this range.
async fn assert_waits(proxy: &Proxy, path: &str, user: &str, expected: RangeInclusive<u64>) {
    for nth in 0..6 {
        let wait = retry_after(&send(proxy, path, user).await);
        assert!(
            expected.contains(&wait),
            "request {nth} of {user}: {wait} s"
        );
    }
}

async fn start_proxy(store: &str, policies: &str, app: &Upstream) -> Proxy {
    let config = format!("listen = {{ threads = 1 }}\n{store}\n{policies}");
    Proxy::start_connected(&config, app.address).await
}

fn cluster_config(cluster: &RedisCluster) -> String {
    format!(
        "[store]\nkind = 'redis'\n[store.redis]\n{}\nkey_prefix = 'shop'\ntimeout = '1s'\n",
        cluster.config_lines()
    )
}

/// A policy name whose key without values is on a node.
fn policy_on(node: usize, name: &str) -> String {
    let mut names = (0..).map(|number| format!("{name}{number}"));
    let is_there = |name: &String| initial_node(&KeyBuilder::new(name).finish()) == node;
    names.find(is_there).unwrap()
}

/// The pod admits one request per 100 s, Redis one per customer and 1,000 s. What the pod refuses uses
/// up nothing in Redis.
#[tokio::test]
async fn a_refusal_of_the_instance_covers_the_limits_in_redis() {
    let app = Upstream::echo().await;
    for more in [
        "",
        "count_rejected = true",
        "count_when = { status = ['2xx'] }",
        "block_for = '10s'",
        "lease = { size = 5, ttl = '100ms' }",
        "on_store_failure = 'local'",
        "priority = -5",
        "dynamic = true",
    ] {
        let redis = RedisServer::start();
        let policies = pod_and_customer("'/all', '/customer'", more);
        let one = start_proxy(&redis.store_config(), &policies, &app).await;
        let two = start_proxy(&redis.store_config(), &policies, &app).await;
        assert_eq!(send(&one, "/all", "ann").await.status, 200, "{more}");
        assert_waits(&one, "/all", "ann", 990..=1000).await;
        // Redis has units for others: the pod alone refuses them, and charges nothing.
        assert_waits(&one, "/all", "bob", 90..=100).await;
        // Another instance exhausts a customer of whom this one knows nothing.
        assert_eq!(send(&two, "/customer", "cid").await.status, 200, "{more}");
        assert_waits(&one, "/all", "cid", 990..=1000).await;
        assert_eq!(send(&two, "/customer", "bob").await.status, 200, "{more}");
    }
}

/// A pod that is full costs Redis one call per customer and second, and Redis gets no counter.
#[tokio::test]
async fn a_full_instance_reads_each_key_once_per_second() {
    let (redis, app) = (RedisServer::start(), Upstream::echo().await);
    let policies = pod_and_customer("'/all'", "");
    let proxy = start_proxy(&redis.store_config(), &policies, &app).await;
    assert_eq!(send(&proxy, "/all", "ann").await.status, 200);
    let is_refused = |response: &RawResponse| assert_eq!(response.status, 429);
    let made = count_calls(&redis, &proxy, is_refused).await;
    assert!((1..=20).contains(&made), "{made} calls");
    assert_eq!(list_counter_keys(&redis).await.len(), 1, "only of ann");
}

/// As above, if the decisions of the read limit are not cached, or if reading it fails.
#[tokio::test]
async fn a_full_instance_reads_any_limit_once_per_second() {
    let app = Upstream::echo().await;
    for (more, is_foreign) in [
        ("count_rejected = true", false),
        ("", true),
        ("count_rejected = true", true),
    ] {
        let redis = RedisServer::start();
        let policies = pod_and_customer("'/all', '/customer'", more);
        let proxy = start_proxy(&redis.store_config(), &policies, &app).await;
        let other = start_proxy(&redis.store_config(), &policies, &app).await;
        assert_eq!(send(&other, "/customer", "bob").await.status, 200);
        if is_foreign {
            for name in list_counter_keys(&redis).await {
                redis.run(&format!("SET {name} foreign")).await;
            }
        }
        assert_eq!(send(&proxy, "/all", "ann").await.status, 200);
        let made = count_calls(&redis, &proxy, |response| {
            let wait = retry_after(response);
            let expected = if is_foreign { 90..=100 } else { 990..=1000 };
            assert!(expected.contains(&wait), "{more} {is_foreign}: {wait} s");
        })
        .await;
        let range = 1..=20;
        assert!(range.contains(&made), "{more} {is_foreign}: {made} calls");
        assert_eq!(proxy.read_metric(FROM_CACHE).await, 0.0, "the pod refuses");
    }
}

/// Limits of one slot each on all nodes of a cluster: whichever slot refuses first, the latest counts.
#[tokio::test]
async fn a_refusal_of_one_slot_covers_all_slots() {
    let (cluster, app) = (RedisCluster::start().await, Upstream::echo().await);
    for (round, periods) in [["200s", "6000s", "3000s"], ["6000s", "3000s", "200s"]]
        .into_iter()
        .enumerate()
    {
        for more in ["", "count_when = { status = ['2xx'] }"] {
            let mut policies = String::new();
            for (node, per) in periods.into_iter().enumerate() {
                let name = policy_on(node, &format!("p{round}{}x", more.len()));
                let paths = format!("'/all', '/{node}', '/first{node}'");
                policies += &path_policy(&name, &paths, per, more);
            }
            let proxy = start_proxy(&cluster_config(&cluster), &policies, &app).await;
            for node in 0..3 {
                let status = send(&proxy, &format!("/{node}"), "ann").await.status;
                assert_eq!(status, 200, "{more}");
            }
            assert_waits(&proxy, "/all", "ann", 5_900..=6_000).await;
            let violated = send(&proxy, "/all", "ann").await;
            let violated = violated.json()["violated-policies"]
                .as_array()
                .unwrap()
                .len();
            assert_eq!(violated, 3, "{more}");
        }
    }
}

/// A customer without units, and a global limit that is exhausted for longer: the cached refusal of the
/// global limit does not hide the customer's, nor the other way round.
#[tokio::test]
async fn a_cached_refusal_of_one_slot_does_not_hide_another() {
    let (cluster, app) = (RedisCluster::start().await, Upstream::echo().await);
    let policies = path_policy("global", "'/all', '/global'", "200s", "key = []")
        + &path_policy(
            "customer",
            "'/all', '/customer'",
            "6000s",
            "key = ['header:x-user']",
        );
    let proxy = start_proxy(&cluster_config(&cluster), &policies, &app).await;
    let users: Vec<_> = (0..8).map(|number| format!("u{number}")).collect();
    for user in &users {
        assert_eq!(send(&proxy, "/customer", user).await.status, 200);
    }
    assert_eq!(send(&proxy, "/global", "any").await.status, 200);
    for user in &users {
        assert_waits(&proxy, "/all", user, 5_900..=6_000).await;
        assert_waits(&proxy, "/all", &format!("other {user}"), 190..=200).await;
    }
    // The refusals reserved nothing.
    for user in &users {
        let status = send(&proxy, "/customer", &format!("other {user}"))
            .await
            .status;
        assert_eq!(status, 200);
    }
}

/// A block that ends before its limit has units again.
#[tokio::test]
async fn a_cached_block_keeps_the_retry_time_of_its_limit() {
    let app = Upstream::with_handler(check_password).await;
    let cluster = RedisCluster::start().await;
    let redis = RedisServer::start();
    for store in [redis.store_config(), cluster_config(&cluster)] {
        let policies = "[[policy]]\nname = 'login'\nkey = ['header:x-user']\nblock_for = '100s'\n\
             count_when = { status = [401] }\nlimit = { requests = 3, per = '1000s' }\n";
        let proxy = start_proxy(&store, policies, &app).await;
        for _ in 0..3 {
            assert_eq!(log_in(&proxy, "/", "ann", "wrong").await.status, 401);
        }
        // The response counters are charged a moment after the response, then the block starts.
        let blocked = async {
            while proxy.read_metric(FROM_CACHE).await == 0.0 {
                let wait = retry_after(&log_in(&proxy, "/", "ann", "wrong").await);
                assert!((990..=1000).contains(&wait), "{wait}");
            }
        };
        in_time(blocked).await;
        for _ in 0..20 {
            let wait = retry_after(&log_in(&proxy, "/", "ann", "right").await);
            assert!((990..=1000).contains(&wait), "{wait}");
        }
    }
}

/// One of the policies has shards: all of them are read.
#[tokio::test]
async fn a_refusal_covers_all_shards() {
    let (cluster, app) = (RedisCluster::start().await, Upstream::echo().await);
    for (sharded_per, other_per, expected) in [
        ("6000s", "200s", 5_900..=6_000),
        ("200s", "6000s", 5_900..=6_000),
    ] {
        let name = format!("sharded{other_per}");
        let policies = format!(
            "[[policy]]\nname = '{name}'\nmatch = {{ path = ['/all', '/sharded'] }}\nshards = 4\n\
             limit = {{ requests = 4, per = '{sharded_per}' }}\n{}",
            path_policy("other", "'/all', '/other'", other_per, "")
        );
        let proxy = start_proxy(&cluster_config(&cluster), &policies, &app).await;
        assert_eq!(send(&proxy, "/other", "ann").await.status, 200);
        // One shard is left: it would admit.
        for _ in 0..3 {
            assert_eq!(send(&proxy, "/sharded", "ann").await.status, 200);
        }
        let other_wait = if other_per == "200s" {
            190..=200
        } else {
            5_900..=6_000
        };
        assert_waits(&proxy, "/all", "ann", other_wait).await;
        assert_eq!(send(&proxy, "/sharded", "ann").await.status, 200);
        let again = start_proxy(&cluster_config(&cluster), &policies, &app).await;
        assert_waits(&again, "/all", "ann", expected).await;
    }
}
