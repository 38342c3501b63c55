//! `dynamic` together with leases, concurrency, the rate limit service and clusters, end to end.

use super::{OverrideFixture, await_status, get, status};
use crate::cluster::{connect_store, error_count};
use crate::support::cluster::hash_slot;
use crate::support::prelude::*;
use tidegate::limiter::{KeyOverride, LimitAmounts, LimitName, OverrideInEffect};
use tidegate::policy::{KeyPart, KeyTemplate};
use tidegate::store::StoredOverride;
use tidegate::store::redis::CounterInspector;

#[tokio::test]
async fn leased_units_never_exceed_the_override() {
    let fixture = OverrideFixture::start(
        "[[policy]]\nname = 'api'\ndynamic = true\nkey = ['header:x-user-id']\n\
         limit = { requests = 1000, per = '1h' }\nlease = { size = 20, ttl = '100ms' }\n",
    )
    .await;
    let set = ["set", "api", "ann", "--requests", "30"];
    fixture.run_successfully(&set).await;
    let proxies = [fixture.start_proxy().await, fixture.start_proxy().await];
    let asks = (0..120).map(|n| status(&proxies[n % 2], "ann"));
    let statuses = join_all(asks).await;
    let admitted = statuses.iter().filter(|status| **status == 200).count();
    assert!(admitted <= 30, "{admitted}");
    // Units of leases that nobody used come back: in the end exactly all are used.
    let mut total = admitted;
    in_time(async {
        while total < 30 {
            total += usize::from(status(&proxies[0], "ann").await == 200);
        }
    })
    .await;
    assert_eq!(status(&proxies[1], "ann").await, 429);
    fixture
        .run_successfully(&["set", "api", "ann", "--unlimited"])
        .await;
    await_status(&proxies[0], "ann", 200).await;
    for _ in 0..60 {
        assert_eq!(status(&proxies[0], "ann").await, 200);
    }
    fixture
        .run_successfully(&["set", "api", "ann", "--block"])
        .await;
    await_status(&proxies[0], "ann", 429).await;
    assert_eq!(status(&proxies[0], "bob").await, 200);
}

#[tokio::test]
async fn an_override_sets_how_many_requests_are_in_flight() {
    let fixture = OverrideFixture::start(
        "[[policy]]\nname = 'api'\ndynamic = true\nkey = ['header:x-user-id']\n\
         limit = { requests = 1, algorithm = 'concurrency' }\n",
    )
    .await;
    let app = GatedUpstream::start().await;
    let text = fs::read_to_string(fixture.config.path()).unwrap();
    let proxy = Proxy::start(&text, app.address).await;
    let set = ["set", "api", "ann", "--requests", "3"];
    fixture.run_successfully(&set).await;
    let refuse_then_release = async {
        app.wait_for_requests(3).await;
        assert_eq!(status(&proxy, "ann").await, 429);
        app.answer(100);
    };
    let held = join_all((0..3).map(|_| status(&proxy, "ann")));
    let (held, ()) = tokio::join!(held, refuse_then_release);
    assert_eq!(held, [200; 3]);
    // An unlimited key takes no slot, so it leaves none behind for the next rule.
    fixture
        .run_successfully(&["set", "api", "ann", "--unlimited"])
        .await;
    assert_eq!(
        join_all((0..10).map(|_| status(&proxy, "ann"))).await,
        [200; 10]
    );
    fixture.run_successfully(&["remove", "api", "ann"]).await;
    await_status(&proxy, "ann", 200).await;
}

#[tokio::test]
async fn the_rate_limit_service_applies_overrides() {
    let policy = "[[policy]]\nname = 'user'\ndynamic = true\n\
                  match = { domain = 'edge', descriptors = { user = '*' } }\n\
                  key = ['descriptor:user']\nlimit = { requests = 2, per = '1h' }\n";
    let fixture = OverrideFixture::start(&format!("{RLS_LISTENER}{policy}")).await;
    let mut service = ServiceClient::from_proxy(fixture.start_proxy().await).await;
    let ann = make_descriptor(&[("user", "ann")]);
    let mut admitted = async |count: usize| {
        let codes = service.repeat_for_codes(&ann, count).await;
        let ok = codes.iter().filter(|code| format!("{code:?}") == "Ok");
        ok.count()
    };
    assert_eq!(admitted(2).await, 2);
    fixture
        .run_successfully(&["set", "user", "ann", "--requests", "5"])
        .await;
    assert_eq!(admitted(3).await, 3);
    assert_eq!(admitted(3).await, 0);
    fixture
        .run_successfully(&["set", "user", "ann", "--unlimited"])
        .await;
    wait_until("the override", async || admitted(1).await > 0).await;
    assert_eq!(admitted(20).await, 20);
}

const LIMIT: Limit = sliding_log(4, 3_600_000_000);
const DAILY: Limit = make_limit(50, 86_400_000_000, Algorithm::FixedWindow { offset_us: 0 });

fn user_on(node: usize) -> (String, Key) {
    let header = hyper::header::HeaderName::from_static("x-user-id");
    let template = KeyTemplate::new(vec![KeyPart::Header(header)]);
    let user = |number: u32| {
        let (user, mut key) = (format!("u{number}"), template.start_key("api"));
        key.push_key_value(Some(user.as_bytes()));
        let key = key.finish();
        (initial_node(&key) == node).then_some((user, key))
    };
    (0..).find_map(user).unwrap()
}

fn stored(key: &Key, rule: KeyOverride) -> StoredOverride {
    StoredOverride {
        key: key.clone(),
        rule,
        expires_at_ms: None,
        author: None,
        note: None,
    }
}

fn amounts(requests: u64) -> KeyOverride {
    KeyOverride::Limits(vec![LimitAmounts {
        limit: "api".into(),
        requests,
        burst: None,
    }])
}

/// A slot that moves, with its keys on either node: every request is decided by the override.
#[tokio::test]
async fn a_slot_that_moves_applies_overrides_without_an_error() {
    for moved in [0, 1, 2] {
        let cluster = RedisCluster::start().await;
        let (shared, store) = connect_store(&cluster).await;
        let inspector = CounterInspector::connect(cluster.settings()).await.unwrap();
        let (_, key) = user_on(0);
        let names: [LimitName; 2] = ["api".into(), "day".into()];
        let decide = async |limits: &[Limit]| -> Decision {
            let charges = limits.iter().zip(&names).map(|(limit, name)| LimitCharge {
                name: Some(Cow::Borrowed(name)),
                ..LimitCharge::new(limit, 1)
            });
            let policy = PolicyCharges::with_limits(Cow::Borrowed(&key), charges.collect());
            store.decide(&[policy]).await.unwrap()
        };
        // A refusal is cached for a second.
        let decide_until = async |admitted: bool, limits: &[Limit]| -> Decision {
            let decided = async {
                loop {
                    let decision = decide(limits).await;
                    if decision.admitted == admitted {
                        return decision;
                    }
                }
            };
            in_time(decided).await
        };
        assert!(decide(&[LIMIT]).await.admitted);
        if moved > 0 {
            let set = inspector.set_override(&stored(&key, amounts(6))).await;
            set.unwrap();
        }
        cluster.open_slot(hash_slot(&key), 0, 1, moved).await;
        if moved == 0 {
            // The file's limit without an override: three more.
            for n in 1..6 {
                assert_eq!(decide(&[LIMIT]).await.admitted, n < 4, "{n}");
            }
            let set = inspector.set_override(&stored(&key, amounts(6))).await;
            set.unwrap();
        }
        let used = if moved == 0 { 4 } else { 1 };
        for n in used..8 {
            let decision = decide_until(n < 6, &[LIMIT, DAILY]).await;
            let status = decision.statuses().next().unwrap();
            let in_effect = OverrideInEffect::Amounts {
                requests: 6,
                burst: 6,
            };
            assert_eq!(status.in_effect, Some(in_effect));
        }
        for (rule, admitted) in [
            (KeyOverride::Unlimited, true),
            (KeyOverride::Blocked, false),
            (amounts(100), true),
        ] {
            inspector.set_override(&stored(&key, rule)).await.unwrap();
            decide_until(admitted, &[LIMIT, DAILY]).await;
        }
        assert_eq!(error_count(&shared), 0);
    }
}

#[tokio::test]
async fn overrides_hold_on_every_node_of_a_cluster() {
    let cluster = RedisCluster::start().await;
    let upstream = Upstream::echo().await;
    let config = format!(
        "[store]\nkind = 'redis'\n[store.redis]\n{}\n[[policy]]\nname = 'api'\ndynamic = true\n\
         key = ['header:x-user-id']\nlimit = {{ requests = 2, per = '1h' }}\n",
        cluster.config_lines()
    );
    let proxies = [
        Proxy::start(&config, upstream.address).await,
        Proxy::start(&config, upstream.address).await,
    ];
    let mut settings = cluster.settings();
    settings.key_prefix = "tidegate".to_owned();
    let inspector = CounterInspector::connect(settings).await.unwrap();
    for node in 0..3 {
        let (user, key) = user_on(node);
        let set = inspector.set_override(&stored(&key, amounts(5))).await;
        set.unwrap();
        for n in 0..7 {
            let expected = if n < 5 { 200 } else { 429 };
            let reply = get(&proxies[n % 2], "/", &user).await;
            assert_eq!(reply.status, expected, "node {node}, {n}");
        }
        let unlimited = stored(&key, KeyOverride::Unlimited);
        inspector.set_override(&unlimited).await.unwrap();
        await_status(&proxies[0], &user, 200).await;
    }
    let mut listed = 0;
    let visited = inspector.visit_overrides(|_| {
        listed += 1;
        true
    });
    visited.await.unwrap();
    assert_eq!(listed, 3);
}

/// Without Redis, an override that the instance remembers ends when it says.
#[tokio::test]
async fn a_remembered_override_ends_at_its_expiry_without_redis() {
    let mut fixture = OverrideFixture::start(
        "[[policy]]\nname = 'api'\ndynamic = true\nkey = ['header:x-user-id']\n\
         limit = { requests = 100, per = '1h' }\non_store_failure = 'local'\n",
    )
    .await;
    let proxy = fixture.start_proxy().await;
    for (user, expires) in [("ann", Some("3s")), ("bob", None)] {
        let mut set = vec!["set", "api", user, "--block"];
        set.extend(expires.map(|_| "--expires").into_iter().chain(expires));
        fixture.run_successfully(&set).await;
        assert_eq!(status(&proxy, user).await, 429);
    }
    fixture.redis.kill();
    // The test may reach this line after the expiry.
    await_status(&proxy, "ann", 200).await;
    assert_eq!(status(&proxy, "bob").await, 429);
}
