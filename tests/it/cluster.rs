//! A Redis Cluster: limits hold for all slots of their keys.

use crate::redis_outage::OutageFixture;
use crate::support::cluster::user_key;
use crate::support::prelude::*;
use tidegate::limiter::LeaseTerms;
use tidegate::store::StoreUnavailable;
use tidegate::store::redis::CounterInspector;

pub(crate) const DAILY_LIMIT: Limit = make_limit(
    1000,
    86_400_000_000,
    Algorithm::FixedWindow { offset_us: 0 },
);
/// [`DAILY_LIMIT`] with another amount.
pub(crate) const fn daily_limit(requests: u64) -> Limit {
    Limit {
        requests,
        ..DAILY_LIMIT
    }
}

pub(crate) const CONCURRENCY_LIMIT: Limit =
    make_limit(3, 10_000_000, Algorithm::Concurrency { max_duration_us: 0 });

pub(crate) fn policy_key(name: &str) -> Key {
    KeyBuilder::new(name).finish()
}

/// A key of a policy in a slot of this node at the start.
pub(crate) fn key_on(node: usize, policy: &str) -> Key {
    let named = |number: u32| {
        let mut key = KeyBuilder::new(policy);
        key.push_key_value(Some(number.to_string().as_bytes()));
        key.finish()
    };
    (0..)
        .map(named)
        .find(|key| initial_node(key) == node)
        .unwrap()
}

pub(crate) async fn connect_store(cluster: &RedisCluster) -> (Arc<SharedRedisState>, Store) {
    let (shared, redis) = connect_redis(cluster.settings()).await;
    wait_until("all nodes to be connected", async || shared.is_up()).await;
    (shared, Store::from_redis(redis))
}

pub(crate) async fn decide_one(
    store: &Store,
    limit: &Limit,
    key: &Key,
) -> Result<Decision, StoreUnavailable> {
    store.decide(&[PolicyCharges::new(limit, key, 1)]).await
}

pub(crate) async fn remaining_units(store: &Store, limit: &Limit, key: &Key) -> u64 {
    let decision = store
        .decide(&[PolicyCharges::new(limit, key, 0)])
        .await
        .unwrap();
    decision.statuses().next().unwrap().remaining
}

pub(crate) fn error_count(shared: &SharedRedisState) -> u64 {
    shared.error_counts().map(|(_, count)| count).sum()
}

/// Users with counters on the first node and on others.
pub(crate) const USER_POLICY: &str = "[[policy]]\nname = 'user'\nkey = 'header:x-user-id'\n\
                     limit = { requests = 100000, per = '1h' }\non_store_failure = 'closed'\n";

pub(crate) fn user_on_node(node: usize) -> String {
    (0..)
        .map(|number: u32| number.to_string())
        .find(|user| initial_node(&user_key("user", user)) == node)
        .unwrap()
}

pub(crate) async fn status_for_user(proxy: &Proxy, user: &str) -> (u16, Duration) {
    let asked = Instant::now();
    let status = proxy.get_with("/", "x-user-id", user).await.status;
    (status, asked.elapsed())
}

#[tokio::test]
async fn limits_are_exact_over_two_proxies_and_all_slots() {
    let cluster = RedisCluster::start().await;
    let policies = "[[policy]]\nname = 'each'\nkey = 'header:x-user-id'\non_store_failure = 'closed'\n\
                    limit = { requests = 5, per = '1h' }\n\
                    [[policy]]\nname = 'all'\nlimit = { requests = 10000, per = '1h' }\n";
    let rigs = [
        OutageFixture::with_redis(&cluster.config_lines(), policies).await,
        OutageFixture::with_redis(&cluster.config_lines(), policies).await,
    ];
    let mut asking = JoinSet::new();
    for at in 0..8 {
        let asks: Vec<_> = (0..20)
            .flat_map(|user| [user, user])
            .map(|user| {
                (
                    user,
                    rigs[at % 2]
                        .proxy
                        .request("GET", "/")
                        .header("x-user-id", &format!("user-{user}")),
                )
            })
            .collect();
        asking.spawn(async move {
            let mut passed = [0; 20];
            for (user, ask) in asks {
                match ask.send_for_status().await {
                    200 => passed[user] += 1,
                    status => assert_eq!(status, 429),
                }
            }
            passed
        });
    }
    let mut passed = [0; 20];
    for some in asking.join_all().await {
        passed
            .iter_mut()
            .zip(some)
            .for_each(|(all, some)| *all += some);
    }
    assert_eq!(passed, [5; 20]);
    let used: Vec<u64> = {
        let mut used = Vec::new();
        for node in &cluster.nodes {
            used.push(node.command::<u64>("DBSIZE").await);
        }
        used
    };
    assert!(
        used.iter().all(|keys| *keys > 0),
        "a node was not used: {used:?}"
    );
}

#[tokio::test]
async fn a_denial_in_one_slot_refunds_the_charges_in_the_others() {
    let cluster = RedisCluster::start().await;
    let (shared, store) = connect_store(&cluster).await;
    let narrow = daily_limit(5);
    let (wide, tight, room) = (key_on(0, "wide"), key_on(1, "tight"), key_on(2, "room"));
    let mut admitted = 0;
    for slot in 1..=20 {
        let charges = [
            PolicyCharges::new(&DAILY_LIMIT, &wide, 2),
            PolicyCharges {
                ..PolicyCharges::new(&narrow, &tight, 1)
            },
            PolicyCharges {
                slot_id: slot,
                ..PolicyCharges::new(&CONCURRENCY_LIMIT, &room, 1)
            },
        ];
        let decision = store.decide(&charges).await.unwrap();
        admitted += u64::from(decision.admitted);
        let refusing = decision
            .statuses()
            .filter(|status| status.refusal.is_some());
        assert_eq!(decision.admitted, refusing.count() == 0);
    }
    assert_eq!(admitted, 3, "the limit has three slots");
    // Refunds may still be in flight when the decision returns.
    wait_until("the refund of the refused charges", async || {
        remaining_units(&store, &DAILY_LIMIT, &wide).await == 1000 - 2 * 3
            && remaining_units(&store, &narrow, &tight).await == 5 - 3
    })
    .await;
    assert_eq!(remaining_units(&store, &CONCURRENCY_LIMIT, &room).await, 0);

    // The reverse order: a slot that was taken is free again.
    let (full, free) = (key_on(0, "full"), key_on(1, "free"));
    let nothing = daily_limit(0);
    let charges = [
        PolicyCharges::new(&nothing, &full, 1),
        PolicyCharges {
            slot_id: 7,
            ..PolicyCharges::new(&CONCURRENCY_LIMIT, &free, 1)
        },
    ];
    assert!(!store.decide(&charges).await.unwrap().admitted);
    wait_until("the slot to be free", async || {
        remaining_units(&store, &CONCURRENCY_LIMIT, &free).await == 3
    })
    .await;
    assert_eq!(error_count(&shared), 0);
}

#[tokio::test]
async fn every_algorithm_refunds_denied_charges() {
    let cluster = RedisCluster::start().await;
    let (_shared, store) = connect_store(&cluster).await;
    let nothing = daily_limit(0);
    let (full, owner) = (key_on(0, "full"), key_on(1, "owner"));
    let all = [
        Algorithm::SlidingLog,
        Algorithm::SlidingWindow { buckets: 10 },
        Algorithm::FixedWindow { offset_us: 0 },
        plain_bucket(1000),
    ];
    for algorithm in all {
        let limit = with_algorithm(DAILY_LIMIT, algorithm);
        // With an empty and with a partly used counter.
        for spent in [0, 10] {
            if spent > 0 {
                assert!(
                    store
                        .decide(&[PolicyCharges::new(&limit, &owner, spent)])
                        .await
                        .unwrap()
                        .admitted
                );
            }
            let charges = [
                PolicyCharges::new(&nothing, &full, 1),
                PolicyCharges {
                    ..PolicyCharges::new(&limit, &owner, 7)
                },
            ];
            assert!(!store.decide(&charges).await.unwrap().admitted);
            wait_until(format!("{algorithm:?} to give back"), async || {
                remaining_units(&store, &limit, &owner).await == 1000 - spent
            })
            .await;
        }
    }
}

/// A charge during a lease is refunded at the lease's end as well.
#[tokio::test]
async fn denied_charges_are_refunded_while_units_are_leased() {
    let cluster = RedisCluster::start().await;
    let (shared, redis) = connect_redis(cluster.settings()).await;
    wait_until("all nodes to be connected", async || shared.is_up()).await;
    let store = Store::from_redis(redis.clone());
    let nothing = daily_limit(0);
    let full = key_on(0, "full");
    let all = [
        Algorithm::SlidingLog,
        Algorithm::SlidingWindow { buckets: 10 },
        Algorithm::FixedWindow { offset_us: 0 },
        plain_bucket(1000),
    ];
    for algorithm in all {
        let (limit, owner) = (with_algorithm(DAILY_LIMIT, algorithm), key_on(1, "owner"));
        // Two leases with different ends.
        for ttl_us in [DAILY_LIMIT.per_us / 4, DAILY_LIMIT.per_us / 2] {
            let lease = Some(LeaseTerms {
                size: Some(25),
                ttl_us,
            });
            let charge = PolicyCharges {
                lease,
                requested_lease_units: 25,
                ..PolicyCharges::new(&limit, &owner, 0)
            };
            let lent = redis
                .decide(&[charge], tokio::time::Instant::now())
                .await
                .unwrap();
            assert_eq!(
                lent.policies[0].grant.map(|grant| grant.units),
                Some(25),
                "{algorithm:?}"
            );
        }
        for _ in 0..5 {
            let charges = [
                PolicyCharges::new(&nothing, &full, 1),
                PolicyCharges {
                    ..PolicyCharges::new(&limit, &owner, 7)
                },
            ];
            assert!(!store.decide(&charges).await.unwrap().admitted);
        }
        wait_until(format!("{algorithm:?} to give back"), async || {
            remaining_units(&store, &limit, &owner).await == 950
        })
        .await;
    }
}

/// Each server has its own clock.
#[tokio::test]
async fn estimated_costs_in_several_slots_are_settled_in_each() {
    let cluster = RedisCluster::start().await;
    let (_shared, store) = connect_store(&cluster).await;
    let limit = with_algorithm(DAILY_LIMIT, Algorithm::SlidingLog);
    let keys = [0, 1, 2].map(|node| key_on(node, "tokens"));
    let charges: Vec<_> = keys
        .iter()
        .map(|key| {
            let charge = PolicyCharges::new(&limit, key, 100);
            charge.map_limits(|charge| charge.is_estimate = true)
        })
        .collect();
    let decision = store.decide(&charges).await.unwrap();
    assert!(decision.admitted);
    let late = keys.iter().zip(decision.outcomes()).map(|(key, outcome)| {
        let amendment = Amendment::Credit {
            units: 90,
            at_us: outcome.charged_at_us.unwrap(),
        };
        Settlement {
            limit: &limit,
            key,
            amendment,
        }
    });
    store
        .apply_settlements(&late.collect::<Vec<_>>())
        .await
        .unwrap();
    for key in &keys {
        assert_eq!(remaining_units(&store, &limit, key).await, 990);
    }
}

#[tokio::test]
async fn shards_together_admit_exactly_the_limit() {
    let cluster = RedisCluster::start().await;
    let policies = "[[policy]]\nname = 'hot'\nshards = 7\non_store_failure = 'closed'\n\
                    limit = { requests = 100, per = '1h' }\n\
                    [[policy]]\nname = 'beside'\nmatch = { path = '/beside' }\nshards = 2\n\
                    limit = { requests = 4, per = '1h' }\n";
    let fixture = OutageFixture::with_redis(&cluster.config_lines(), policies).await;
    // Two sharded policies together. The second has fewer units left than any shard of the first.
    for _ in 0..8 {
        fixture.proxy.get("/beside").await;
    }
    let mut passed = 4;
    let mut last = None;
    for _ in 0..110 {
        let reply = fixture.proxy.get("/").await;
        let remaining = reply.remaining("hot").unwrap();
        assert!(
            remaining <= 100 - passed,
            "{remaining} reported as remaining after {passed}"
        );
        assert!([200, 429].contains(&reply.status), "{reply:?}");
        passed += u64::from(reply.status == 200);
        last = Some(reply);
    }
    assert_eq!(passed, 100);
    let last = last.unwrap();
    assert_eq!(last.status, 429);
    let wait = last.json()["retry_after"].as_f64().unwrap();
    let range = 3500.0..=3600.0;
    assert!(range.contains(&wait), "the earliest shard decides: {wait}");
    let mut used = 0;
    for node in &cluster.nodes {
        let keys: Vec<String> = node.command("KEYS *:hot/*").await;
        used += usize::from(!keys.is_empty());
    }
    assert!(used > 1, "the key has counters on {used} nodes");
}

#[tokio::test]
async fn shards_are_inspected_and_reset_as_one_counter() {
    let cluster = RedisCluster::start().await;
    let (_shared, store) = connect_store(&cluster).await;
    let owner = policy_key("hot");
    let charge = |cost| PolicyCharges {
        shard_count: 5,
        ..PolicyCharges::new(&DAILY_LIMIT, &owner, cost)
    };
    for _ in 0..10 {
        assert!(store.decide(&[charge(1)]).await.unwrap().admitted);
    }
    let whole = async || {
        store
            .decide(&[charge(0)])
            .await
            .unwrap()
            .statuses()
            .next()
            .unwrap()
            .remaining
    };
    assert_eq!(whole().await, 990);
    let inspector = CounterInspector::connect(cluster.settings()).await.unwrap();
    assert!(inspector.reset_counters(charge(0).charges()).await.unwrap() >= 1);
    assert_eq!(whole().await, 1000);
}

#[tokio::test]
async fn a_shadow_policy_in_another_slot_is_charged_only_for_admitted_requests() {
    let cluster = RedisCluster::start().await;
    let (_shared, store) = connect_store(&cluster).await;
    let narrow = daily_limit(2);
    let (enforced, shadow) = (key_on(0, "enforced"), key_on(2, "shadow"));
    for _ in 0..6 {
        let charges = [
            PolicyCharges::new(&narrow, &enforced, 1),
            PolicyCharges {
                shadow: true,
                ..PolicyCharges::new(&DAILY_LIMIT, &shadow, 1)
            },
        ];
        store.decide(&charges).await.unwrap();
    }
    wait_until("the shadow policy's charge", async || {
        remaining_units(&store, &DAILY_LIMIT, &shadow).await == 998
    })
    .await;
}

#[tokio::test]
async fn lost_scripts_are_reloaded_on_every_node() {
    let cluster = RedisCluster::start().await;
    let (shared, store) = connect_store(&cluster).await;
    for _ in 0..3 {
        let _: Vec<()> = cluster.command_on_each_node("SCRIPT FLUSH").await;
        let mut asking = JoinSet::new();
        for name in 0..64 {
            let store = store.clone();
            asking.spawn(async move {
                decide_one(&store, &DAILY_LIMIT, &policy_key(&name.to_string())).await
            });
        }
        assert!(asking.join_all().await.iter().all(Result::is_ok));
    }
    assert_eq!(error_count(&shared), 0);
}

#[tokio::test]
async fn the_commands_find_counters_on_every_node() {
    let cluster = RedisCluster::start().await;
    let upstream = Upstream::echo().await;
    let text = format!(
        "[upstream]\nurl = 'http://{}'\n[store]\nkind = 'redis'\n[store.redis]\n{}\nkey_prefix = 'shop'\n\
         timeout = '1s'\n{USER_POLICY}",
        upstream.address,
        cluster.config_lines()
    );
    let config = ConfigFile::new(&text);
    let proxy = Proxy::start(&text, upstream.address).await;
    let users: Vec<String> = (0..3).map(user_on_node).collect();
    for user in &users {
        assert_eq!(status_for_user(&proxy, user).await.0, 200);
    }
    let says = async |words: &[&str]| {
        let ended = config.run(words).await;
        assert!(ended.status.success(), "{words:?}: {}", ended.stderr);
        ended.stdout
    };
    let list = says(&["keys", "list"]).await;
    assert!(
        users
            .iter()
            .all(|user| list.contains(&format!("user/{user}\n"))),
        "{list}"
    );
    let shown = says(&["keys", "show", "user", &users[1]]).await;
    assert!(shown.contains("99999 left"), "{shown}");
    let header = format!("x-user-id: {}", users[2]);
    let explained = says(&["explain", "GET", "/", "-H", &header]).await;
    assert!(explained.contains("99999 left"), "{explained}");
    let reset = says(&["keys", "reset", "user", &users[1]]).await;
    assert!(reset.contains("reset 1 limit"), "{reset}");
    assert_contains(
        &says(&["keys", "show", "user", &users[1]]).await,
        &["100000 left"],
    );
}

#[tokio::test]
async fn dropping_the_store_closes_its_connections() {
    let cluster = RedisCluster::start().await;
    let open = async || {
        let mut open = 0;
        for node in &cluster.nodes {
            open += node.connected_clients().await;
        }
        open
    };
    let before = open().await;
    for _ in 0..3 {
        drop(connect_store(&cluster).await);
    }
    wait_until("all connections to end", async || open().await <= before).await;
}

#[tokio::test]
async fn a_decision_cancelled_between_slots_refunds_its_charges() {
    let cluster = RedisCluster::start().await;
    let (_shared, store) = connect_store(&cluster).await;
    let nothing = daily_limit(0);
    let (full, free) = (key_on(0, "full"), key_on(1, "free"));
    for _ in 0..10 {
        let charges = [
            PolicyCharges::new(&nothing, &full, 1),
            PolicyCharges {
                ..PolicyCharges::new(&DAILY_LIMIT, &free, 1)
            },
        ];
        tokio::select! {
            biased;
            _ = store.decide(&charges) => panic!("the decision finished before the cancellation"),
            () = tokio::task::yield_now() => {}
        }
    }
    // Sent after the refunds.
    wait_until("the refund of all charges", async || {
        remaining_units(&store, &DAILY_LIMIT, &free).await == 1000
    })
    .await;
}

#[tokio::test]
async fn retries_on_other_shards_do_not_deny_the_request_themselves() {
    let cluster = RedisCluster::start().await;
    let (_shared, store) = connect_store(&cluster).await;
    let (sixteen, one) = (daily_limit(16), daily_limit(1));
    for round in 0..8 {
        let (hot, own) = (
            policy_key(&format!("hot-{round}")),
            policy_key(&format!("own-{round}")),
        );
        let spread = PolicyCharges {
            shard_count: 16,
            ..PolicyCharges::new(&sixteen, &hot, 1)
        };
        for _ in 0..15 {
            assert!(
                store
                    .decide(std::slice::from_ref(&spread))
                    .await
                    .unwrap()
                    .admitted
            );
        }
        let decision = store
            .decide(&[PolicyCharges::new(&one, &own, 1), spread])
            .await
            .unwrap();
        assert!(decision.admitted, "{decision:?}");
    }
}
