//! A Redis Cluster: limits hold whatever slots their keys are in, and while slots and nodes come and go.

use crate::outage::{POLICIES, Rig, SLACK, TIMEOUT, Way};
use crate::support::SOON;
use crate::support::cluster::{Cluster, node_of, slot_of};
use crate::support::process::{run, tidegate};
use crate::support::proxy::Proxy;
use crate::support::redis::{Server, ready, settings};
use crate::support::upstream::Upstream;
use std::fs;
use std::time::{Duration, Instant};
use tidegate::limiter::{Algorithm, Amendment, Charge, Decision, Key, KeyBuilder, Lease, Limit};
use tidegate::store::redis::{Inspector, RedisSettings, Shared, Topology};
use tidegate::store::{Late, Store, Unavailable};
use tokio::task::JoinSet;
use tokio::time::sleep;

const DAILY: Limit = Limit {
    requests: 1000,
    per_us: 86_400_000_000,
    algorithm: Algorithm::FixedWindow { offset_us: 0 },
};
const SLOTS: Limit = Limit {
    requests: 3,
    per_us: 10_000_000,
    algorithm: Algorithm::Concurrency { max_duration_us: 0 },
};

/// From the end of a fault until decisions are made again.
const RECOVERY: Duration = Duration::from_secs(4);

fn key(name: &str) -> Key {
    KeyBuilder::new(name).finish()
}

/// A key of a policy that is on some node at the start.
fn key_on(node: usize, policy: &str) -> Key {
    let named = |number: u32| {
        let mut key = KeyBuilder::new(policy);
        key.part(Some(number.to_string().as_bytes()));
        key.finish()
    };
    (0..).map(named).find(|key| node_of(key) == node).unwrap()
}

async fn store(cluster: &Cluster) -> (Shared, Store) {
    let (shared, redis) = ready(cluster.settings()).await;
    eventually("all nodes to be connected", SOON, async || shared.is_up()).await;
    (shared, Store::redis(redis))
}

async fn ask(store: &Store, limit: &Limit, key: &Key) -> Result<Decision, Unavailable> {
    store.decide(&[Charge::new(limit, key, 1)]).await
}

async fn left(store: &Store, limit: &Limit, key: &Key) -> u64 {
    let decision = store.decide(&[Charge::new(limit, key, 0)]).await.unwrap();
    decision.standings[0].unwrap().remaining
}

fn errors(shared: &Shared) -> u64 {
    shared.errors().map(|(_, count)| count).sum()
}

async fn eventually(what: &str, within: Duration, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + within;
    while !holds().await {
        assert!(Instant::now() < deadline, "waited {within:?} for {what}");
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn limits_are_exact_over_two_proxies_and_all_slots() {
    let cluster = Cluster::start().await;
    let policies = "[[policy]]\nname = 'each'\nkey = 'header:x-user-id'\non_store_failure = 'closed'\n\
                    limit = { requests = 5, per = '1h' }\n\
                    [[policy]]\nname = 'all'\nlimit = { requests = 10000, per = '1h' }\n";
    let rigs = [
        Rig::over(&cluster.lines(), policies).await,
        Rig::over(&cluster.lines(), policies).await,
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
                        .ask("GET", "/")
                        .header("x-user-id", &format!("user-{user}")),
                )
            })
            .collect();
        asking.spawn(async move {
            let mut passed = [0; 20];
            for (user, ask) in asks {
                match ask.status().await {
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
        "all nodes are used: {used:?}"
    );
}

#[tokio::test]
async fn what_is_refused_in_one_slot_is_given_back_in_the_others() {
    let cluster = Cluster::start().await;
    let (shared, store) = store(&cluster).await;
    let narrow = Limit {
        requests: 5,
        ..DAILY
    };
    let (wide, tight, room) = (key_on(0, "wide"), key_on(1, "tight"), key_on(2, "room"));
    let mut admitted = 0;
    for slot in 1..=20 {
        let charges = [
            Charge::new(&DAILY, &wide, 2),
            Charge {
                group: 1,
                ..Charge::new(&narrow, &tight, 1)
            },
            Charge {
                group: 2,
                slot,
                ..Charge::new(&SLOTS, &room, 1)
            },
        ];
        let decision = store.decide(&charges).await.unwrap();
        admitted += u64::from(decision.admitted);
        let refusing = decision
            .standings
            .iter()
            .flatten()
            .filter(|standing| standing.refusal.is_some());
        assert_eq!(decision.admitted, refusing.count() == 0);
    }
    assert_eq!(admitted, 3, "there are three slots");
    // Refunds are on their way when the answer is given.
    eventually("what was refused to be given back", SOON, async || {
        left(&store, &DAILY, &wide).await == 1000 - 2 * 3
            && left(&store, &narrow, &tight).await == 5 - 3
    })
    .await;
    assert_eq!(left(&store, &SLOTS, &room).await, 0);

    // The other way round: a slot that was taken is free again.
    let (full, free) = (key_on(0, "full"), key_on(1, "free"));
    let nothing = Limit {
        requests: 0,
        ..DAILY
    };
    let charges = [
        Charge::new(&nothing, &full, 1),
        Charge {
            group: 1,
            slot: 7,
            ..Charge::new(&SLOTS, &free, 1)
        },
    ];
    assert!(!store.decide(&charges).await.unwrap().admitted);
    eventually("the slot to come free", SOON, async || {
        left(&store, &SLOTS, &free).await == 3
    })
    .await;
    assert_eq!(errors(&shared), 0);
}

#[tokio::test]
async fn every_algorithm_gives_back() {
    let cluster = Cluster::start().await;
    let (_shared, store) = store(&cluster).await;
    let nothing = Limit {
        requests: 0,
        ..DAILY
    };
    let (full, owner) = (key_on(0, "full"), key_on(1, "owner"));
    let all = [
        Algorithm::SlidingLog,
        Algorithm::SlidingWindow { buckets: 10 },
        Algorithm::FixedWindow { offset_us: 0 },
        Algorithm::TokenBucket {
            burst: 1000,
            warm_up_us: 0,
        },
    ];
    for algorithm in all {
        let limit = Limit { algorithm, ..DAILY };
        // Whatever stands in the counter before.
        for spent in [0, 10] {
            if spent > 0 {
                assert!(
                    store
                        .decide(&[Charge::new(&limit, &owner, spent)])
                        .await
                        .unwrap()
                        .admitted
                );
            }
            let charges = [
                Charge::new(&nothing, &full, 1),
                Charge {
                    group: 1,
                    ..Charge::new(&limit, &owner, 7)
                },
            ];
            assert!(!store.decide(&charges).await.unwrap().admitted);
            eventually(&format!("{algorithm:?} to give back"), SOON, async || {
                left(&store, &limit, &owner).await == 1000 - spent
            })
            .await;
        }
    }
}

/// What is charged while units are lent stands with them, at their end.
#[tokio::test]
async fn what_is_refused_beside_a_lease_is_given_back() {
    let cluster = Cluster::start().await;
    let (shared, redis) = ready(cluster.settings()).await;
    eventually("all nodes to be connected", SOON, async || shared.is_up()).await;
    let store = Store::redis(redis.clone());
    let nothing = Limit {
        requests: 0,
        ..DAILY
    };
    let full = key_on(0, "full");
    let all = [
        Algorithm::SlidingLog,
        Algorithm::SlidingWindow { buckets: 10 },
        Algorithm::FixedWindow { offset_us: 0 },
        Algorithm::TokenBucket {
            burst: 1000,
            warm_up_us: 0,
        },
    ];
    for algorithm in all {
        let (limit, owner) = (Limit { algorithm, ..DAILY }, key_on(1, "owner"));
        // Two that end at different times.
        for ttl_us in [DAILY.per_us / 4, DAILY.per_us / 2] {
            let lease = Some(Lease {
                size: Some(25),
                ttl_us,
            });
            let charge = Charge {
                lease,
                wanted: 25,
                ..Charge::new(&limit, &owner, 0)
            };
            let lent = redis
                .decide(&[charge], tokio::time::Instant::now())
                .await
                .unwrap();
            assert_eq!(
                lent.grants.first().map(|grant| grant.units),
                Some(25),
                "{algorithm:?}"
            );
        }
        for _ in 0..5 {
            let charges = [
                Charge::new(&nothing, &full, 1),
                Charge {
                    group: 1,
                    ..Charge::new(&limit, &owner, 7)
                },
            ];
            assert!(!store.decide(&charges).await.unwrap().admitted);
        }
        eventually(&format!("{algorithm:?} to give back"), SOON, async || {
            left(&store, &limit, &owner).await == 950
        })
        .await;
    }
}

/// Each server has its own clock.
#[tokio::test]
async fn what_was_estimated_in_several_slots_is_settled_in_each() {
    let cluster = Cluster::start().await;
    let (_shared, store) = store(&cluster).await;
    let limit = Limit {
        algorithm: Algorithm::SlidingLog,
        ..DAILY
    };
    let keys = [0, 1, 2].map(|node| key_on(node, "tokens"));
    let charges: Vec<_> = (0..)
        .zip(&keys)
        .map(|(group, key)| Charge {
            group,
            settles: true,
            ..Charge::new(&limit, key, 100)
        })
        .collect();
    let decision = store.decide(&charges).await.unwrap();
    assert!(decision.admitted);
    let late = keys.iter().zip(&decision.stands_us).map(|(key, at_us)| {
        let amendment = Amendment::Credit {
            units: 90,
            at_us: at_us.unwrap(),
        };
        Late {
            limit: &limit,
            key,
            amendment,
        }
    });
    store.amend(&late.collect::<Vec<_>>()).await.unwrap();
    for key in &keys {
        assert_eq!(left(&store, &limit, key).await, 990);
    }
}

#[tokio::test]
async fn shards_admit_as_much_as_the_whole_and_no_more() {
    let cluster = Cluster::start().await;
    let policies = "[[policy]]\nname = 'hot'\nshards = 7\non_store_failure = 'closed'\n\
                    limit = { requests = 100, per = '1h' }\n\
                    [[policy]]\nname = 'beside'\nmatch = { path = '/beside' }\nshards = 2\n\
                    limit = { requests = 4, per = '1h' }\n";
    let rig = Rig::over(&cluster.lines(), policies).await;
    // Two that are spread, found together: of the second less is there than anywhere of the first.
    for _ in 0..8 {
        rig.proxy.get("/beside").await;
    }
    let mut passed = 4;
    let mut last = None;
    for _ in 0..110 {
        let reply = rig.proxy.get("/").await;
        let remaining = reply.parameter("ratelimit", "hot", "r").unwrap();
        assert!(
            remaining <= 100 - passed,
            "{remaining} are said to be left after {passed}"
        );
        assert!([200, 429].contains(&reply.status), "{reply:?}");
        passed += u64::from(reply.status == 200);
        last = Some(reply);
    }
    assert_eq!(passed, 100);
    let last = last.unwrap();
    assert_eq!(last.status, 429);
    let wait = last.json()["retry_after"].as_f64().unwrap();
    assert!(
        (3500.0..=3600.0).contains(&wait),
        "the first to free counts: {wait}"
    );
    let mut used = 0;
    for node in &cluster.nodes {
        let keys: Vec<String> = node.command("KEYS *:hot/*").await;
        used += usize::from(!keys.is_empty());
    }
    assert!(used > 1, "the key is on {used} of the nodes");
}

#[tokio::test]
async fn shards_are_looked_at_and_reset_as_one() {
    let cluster = Cluster::start().await;
    let (_shared, store) = store(&cluster).await;
    let owner = key("hot");
    let charge = |cost| Charge {
        shards: 5,
        ..Charge::new(&DAILY, &owner, cost)
    };
    for _ in 0..10 {
        assert!(store.decide(&[charge(1)]).await.unwrap().admitted);
    }
    let whole = async || {
        store.decide(&[charge(0)]).await.unwrap().standings[0]
            .unwrap()
            .remaining
    };
    assert_eq!(whole().await, 990);
    let inspector = Inspector::connect(cluster.settings()).await.unwrap();
    assert!(inspector.reset(&[charge(0)]).await.unwrap() >= 1);
    assert_eq!(whole().await, 1000);
}

#[tokio::test]
async fn a_shadow_policy_of_another_slot_is_charged_only_with_the_others() {
    let cluster = Cluster::start().await;
    let (_shared, store) = store(&cluster).await;
    let narrow = Limit {
        requests: 2,
        ..DAILY
    };
    let (enforced, shadow) = (key_on(0, "enforced"), key_on(2, "shadow"));
    for _ in 0..6 {
        let charges = [
            Charge::new(&narrow, &enforced, 1),
            Charge {
                group: 1,
                shadow: true,
                ..Charge::new(&DAILY, &shadow, 1)
            },
        ];
        store.decide(&charges).await.unwrap();
    }
    eventually("the shadow to be right", SOON, async || {
        left(&store, &DAILY, &shadow).await == 998
    })
    .await;
}

#[tokio::test]
async fn scripts_that_are_lost_are_healed_on_every_node() {
    let cluster = Cluster::start().await;
    let (shared, store) = store(&cluster).await;
    for _ in 0..3 {
        let _: Vec<()> = cluster.each("SCRIPT FLUSH").await;
        let mut asking = JoinSet::new();
        for name in 0..64 {
            let store = store.clone();
            asking.spawn(async move { ask(&store, &DAILY, &key(&name.to_string())).await });
        }
        assert!(asking.join_all().await.iter().all(Result::is_ok));
    }
    assert_eq!(errors(&shared), 0);
}

#[tokio::test]
async fn slots_that_move_are_followed_and_nothing_is_lost() {
    let cluster = Cluster::start().await;
    let (shared, store) = store(&cluster).await;
    let log = Limit {
        algorithm: Algorithm::SlidingLog,
        ..DAILY
    };
    let owner = key_on(0, "moving");
    for limit in [&DAILY, &log] {
        ask(&store, limit, &owner).await.unwrap();
    }
    // New counters of the slot are made where it goes to: ASK. One is here and one there: TRYAGAIN, for both together.
    let slot = slot_of(&owner);
    cluster
        .move_slot(slot, 0, 1, async || {
            for limit in [&DAILY, &log] {
                ask(&store, limit, &owner).await.unwrap();
            }
            let window = Limit {
                algorithm: Algorithm::SlidingWindow { buckets: 2 },
                ..DAILY
            };
            ask(&store, &window, &owner).await.unwrap();
        })
        .await;
    // MOVED, to a node that is known.
    for limit in [&DAILY, &log] {
        ask(&store, limit, &owner).await.unwrap();
        assert_eq!(left(&store, limit, &owner).await, 1000 - 3);
    }
    assert_eq!(errors(&shared), 0);
    // The map is renewed: by and by nobody is sent on any more.
    let moved = async || cluster.nodes[0].info("errorstats", "errorstat_MOVED").await;
    eventually("the map to be renewed", SOON, async || {
        let before = moved().await;
        ask(&store, &DAILY, &owner).await.unwrap();
        moved().await == before
    })
    .await;
}

#[tokio::test]
async fn resharding_under_load_costs_nobody_an_answer() {
    let cluster = Cluster::start().await;
    let rig = Rig::over(&cluster.lines(), POLICIES).await;
    let load = rig.load().await;
    for owner in [key("open"), key("closed")] {
        let slot = slot_of(&owner);
        let (from, to) = (node_of(&owner), (node_of(&owner) + 1) % 3);
        cluster
            .move_slot(slot, from, to, async || {
                sleep(Duration::from_millis(200)).await
            })
            .await;
        sleep(Duration::from_millis(200)).await;
        cluster
            .move_slot(slot, to, from, async || {
                sleep(Duration::from_millis(200)).await
            })
            .await;
    }
    load.is_decided_since(Instant::now()).await;
    let asked = load.end().await;
    let undecided = asked
        .iter()
        .filter(|asked| asked.way != Way::Past && !asked.decided)
        .count();
    assert_eq!(undecided, 0, "of {}: {}", asked.len(), rig.proxy.log());
    let passed = asked
        .iter()
        .filter(|asked| asked.way == Way::Closed)
        .count() as u64;
    let left = rig
        .proxy
        .get("/closed")
        .await
        .parameter("ratelimit", "closed", "r")
        .unwrap();
    assert_eq!(100_000 - left, passed + 1, "each was counted once");
    println!(
        "resharding: {} requests, slowest {:?}",
        asked.len(),
        asked.iter().map(|asked| asked.took).max()
    );
}

/// Users whose counters are on the first node, and on others.
const USERS: &str = "[[policy]]\nname = 'user'\nkey = 'header:x-user-id'\n\
                     limit = { requests = 100000, per = '1h' }\non_store_failure = 'closed'\n";

fn user_on(node: usize) -> String {
    let user = |number: u32| {
        let mut key = KeyBuilder::new("user");
        key.part(Some(number.to_string().as_bytes()));
        (node_of(&key.finish()) == node).then(|| number.to_string())
    };
    (0..).find_map(user).unwrap()
}

async fn status(proxy: &Proxy, user: &str) -> (u16, Duration) {
    let asked = Instant::now();
    let status = proxy
        .ask("GET", "/")
        .header("x-user-id", user)
        .status()
        .await;
    (status, asked.elapsed())
}

/// One node is away: whose counters it has is told so, at once, and nobody else notices.
async fn one_is_away(
    what: &str,
    fault: impl AsyncFnOnce(&mut Cluster),
    heal: impl AsyncFnOnce(&mut Cluster),
) {
    let mut cluster = Cluster::start().await;
    let rig = Rig::over(&cluster.lines(), USERS).await;
    let users: Vec<String> = (0..3).map(user_on).collect();
    for user in &users {
        assert_eq!(status(&rig.proxy, user).await.0, 200);
    }
    fault(&mut cluster).await;
    let began = Instant::now();
    let (mut others, mut late, mut waited, mut asked) = (Vec::new(), 0, 0, 0);
    while began.elapsed() < Duration::from_secs(3) {
        let (answer, took) = status(&rig.proxy, &users[0]).await;
        assert_eq!(answer, 503, "{what}");
        waited += usize::from(took >= TIMEOUT);
        for user in &users[1..] {
            let (answer, took) = status(&rig.proxy, user).await;
            // On a machine that is too busy for the deadline.
            let is_late = answer == 503 && took >= TIMEOUT;
            assert!(
                answer == 200 || is_late,
                "{what}: it needs another node: {}",
                rig.proxy.log()
            );
            late += usize::from(is_late);
            others.push(took);
        }
        asked += 1;
        sleep(Duration::from_millis(5)).await;
    }
    others.sort_unstable();
    let median = others[others.len() / 2];
    assert!(
        median <= SLACK / 2,
        "{what}: {median:?} for who doesn't need the node"
    );
    assert!(
        late <= others.len() / 20,
        "{what}: {late} of {} had no answer in time",
        others.len()
    );
    // Each of two workers gives its connection up after three.
    assert!(waited <= 6, "{what}: {waited} of {asked} waited");
    heal(&mut cluster).await;
    let healed = Instant::now();
    eventually("the node to be asked again", RECOVERY, async || {
        status(&rig.proxy, &users[0]).await.0 == 200
    })
    .await;
    println!(
        "{what}: {asked} rounds, {waited} waited, others {median:?}; back after {:?}",
        healed.elapsed()
    );
}

#[tokio::test]
async fn a_dead_node_takes_only_its_own_slots_along() {
    let kill = async |cluster: &mut Cluster| cluster.nodes[0].kill();
    one_is_away("SIGKILL of a master", kill, async |cluster| {
        cluster.nodes[0].restart_aside().await
    })
    .await;
}

#[tokio::test]
async fn a_hung_node_takes_only_its_own_slots_along() {
    let stop = async |cluster: &mut Cluster| cluster.nodes[0].stop();
    one_is_away("SIGSTOP of a master", stop, async |cluster| {
        cluster.nodes[0].resume()
    })
    .await;
}

#[tokio::test]
async fn a_full_node_takes_only_its_own_slots_along() {
    let full =
        async |cluster: &mut Cluster| cluster.nodes[0].command("CONFIG SET maxmemory 100kb").await;
    one_is_away("a full master", full, async |cluster| {
        cluster.nodes[0].command("CONFIG SET maxmemory 0").await
    })
    .await;
}

#[tokio::test]
async fn a_node_that_lets_nobody_in_takes_only_its_own_slots_along() {
    let cluster = Cluster::start().await;
    let (shared, store) = store(&cluster).await;
    let (here, there) = (key_on(0, "p"), key_on(1, "p"));
    ask(&store, &DAILY, &here).await.unwrap();
    // Stays open, for healing.
    let mut admin = cluster.nodes[0].connection().await;
    redis::cmd("CONFIG")
        .arg(&["SET", "maxclients", "1"])
        .exec_async(&mut admin)
        .await
        .unwrap();
    let kill = ["KILL", "TYPE", "normal", "SKIPME", "yes"];
    redis::cmd("CLIENT")
        .arg(&kill)
        .exec_async(&mut admin)
        .await
        .unwrap();
    eventually("the node to be away", SOON, async || {
        ask(&store, &DAILY, &here).await.is_err()
    })
    .await;
    for _ in 0..50 {
        let asked = Instant::now();
        ask(&store, &DAILY, &there).await.unwrap();
        ask(&store, &DAILY, &here).await.unwrap_err();
        assert!(
            asked.elapsed() < cluster.settings().timeout / 2,
            "{:?}",
            asked.elapsed()
        );
    }
    assert!(!shared.is_up());
    redis::cmd("CONFIG")
        .arg(&["SET", "maxclients", "100"])
        .exec_async(&mut admin)
        .await
        .unwrap();
    eventually("the node to come back", RECOVERY, async || {
        ask(&store, &DAILY, &here).await.is_ok() && shared.is_up()
    })
    .await;
}

#[tokio::test]
async fn a_replica_that_takes_over_is_followed() {
    let mut cluster = Cluster::start().await;
    let replica = cluster.replica_of(0).await;
    let (shared, store) = store(&cluster).await;
    let owner = key_on(0, "p");
    ask(&store, &DAILY, &owner).await.unwrap();
    // On request: nobody notices, but in the moment in which the nodes don't agree.
    let _: () = cluster.nodes[replica].command("CLUSTER FAILOVER").await;
    let began = Instant::now();
    let mut first_failed = None;
    while cluster.nodes[replica]
        .info("commandstats", "cmdstat_evalsha")
        .await
        == 0
    {
        if ask(&store, &DAILY, &owner).await.is_err() {
            first_failed = first_failed.or_else(|| Some(Instant::now()));
        }
        assert!(began.elapsed() < SOON, "nobody asks the new master");
        sleep(Duration::from_millis(5)).await;
    }
    eventually("decisions by the new master", RECOVERY, async || {
        ask(&store, &DAILY, &owner).await.is_ok()
    })
    .await;
    assert!(
        first_failed.is_none_or(|failed| failed.elapsed() < RECOVERY * 2),
        "{first_failed:?}"
    );
    // By death: for as long as the nodes take to agree.
    eventually("the old master to follow", SOON, async || {
        cluster.nodes[0]
            .command::<String>("INFO replication")
            .await
            .contains("master_link_status:up")
    })
    .await;
    cluster.nodes[replica].kill();
    let died = Instant::now();
    let mut failed = 0;
    eventually("the replica to take over", SOON, async || {
        let asked = Instant::now();
        let answer = ask(&store, &DAILY, &owner).await;
        assert!(asked.elapsed() <= cluster.settings().timeout + SLACK);
        failed += usize::from(answer.is_err());
        answer.is_ok()
    })
    .await;
    println!(
        "failover in a cluster: {failed} calls without an answer in {:?}",
        died.elapsed()
    );
    assert!(
        left(&store, &DAILY, &owner).await < 999,
        "what was charged before is known"
    );
    eventually("all to be well", RECOVERY, async || shared.is_up()).await;
}

#[tokio::test]
async fn started_before_its_cluster_and_restarted_with_it() {
    let mut cluster = Cluster::start().await;
    for node in &mut cluster.nodes {
        node.kill();
    }
    let (shared, redis) = ready(cluster.settings()).await;
    let store = Store::redis(redis);
    assert!(!shared.is_up());
    let asked = Instant::now();
    assert_eq!(
        ask(&store, &DAILY, &key("k")).await.unwrap_err().kind,
        "clusterdown"
    );
    assert!(asked.elapsed() < cluster.settings().timeout / 2);
    for round in 0..2 {
        for node in &mut cluster.nodes {
            node.restart_aside().await;
        }
        cluster.agree().await;
        eventually("decisions", RECOVERY, async || {
            ask(&store, &DAILY, &key("k")).await.is_ok()
        })
        .await;
        eventually("all to be well", RECOVERY, async || shared.is_up()).await;
        if round == 0 {
            for node in &mut cluster.nodes {
                node.kill();
            }
            eventually("the loss to be seen", SOON, async || !shared.is_up()).await;
        }
    }
}

#[tokio::test]
async fn a_server_that_is_no_cluster_is_named_as_such() {
    let server = Server::start();
    let upstream = Upstream::echo().await;
    let text = format!(
        "[store]\nkind = 'redis'\n[store.redis]\ntopology = 'cluster'\nurls = ['redis://127.0.0.1:{}']\n\
         key_prefix = 'x'\nconnect_timeout = '300ms'\n[[policy]]\nname = 'p'\nlimit = {{ requests = 1, per = '1h' }}\n",
        server.port()
    );
    let proxy = Proxy::builder()
        .config(&text)
        .upstream(upstream.address)
        .start()
        .await;
    let down = proxy
        .wait_for_log("a word", 0, SOON, |line| line.says("Redis is down"))
        .await;
    assert!(
        down.field("reason").contains("cluster support disabled"),
        "{}",
        proxy.log()
    );
    let cluster = RedisSettings {
        topology: Topology::Cluster,
        ..settings(1)
    };
    assert_eq!(cluster.to_string(), "cluster 127.0.0.1:1");
}

#[tokio::test]
async fn the_commands_find_counters_on_every_node() {
    let cluster = Cluster::start().await;
    let folder = tempfile::TempDir::new().unwrap();
    let file = folder.path().join("config.toml");
    let upstream = Upstream::echo().await;
    let text = format!(
        "[upstream]\nurl = 'http://{}'\n[store]\nkind = 'redis'\n[store.redis]\n{}\nkey_prefix = 'shop'\n\
         timeout = '1s'\n{USERS}",
        upstream.address,
        cluster.lines()
    );
    fs::write(&file, &text).unwrap();
    let proxy = Proxy::builder()
        .config(&text)
        .upstream(upstream.address)
        .start()
        .await;
    let users: Vec<String> = (0..3).map(user_on).collect();
    for user in &users {
        assert_eq!(status(&proxy, user).await.0, 200);
    }
    let says = async |words: &[&str]| {
        let mut command = tidegate();
        let ended = run(command.args(words).arg("--config").arg(&file)).await;
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
    assert!(reset.contains("1 of 1"), "{reset}");
    assert!(
        says(&["keys", "show", "user", &users[1]])
            .await
            .contains("100000 left")
    );
}

#[tokio::test]
async fn handles_end_their_connections() {
    let cluster = Cluster::start().await;
    let open = async || {
        let mut open = 0;
        for node in &cluster.nodes {
            open += node.info("clients", "connected_clients").await;
        }
        open
    };
    let before = open().await;
    for _ in 0..3 {
        drop(store(&cluster).await);
    }
    eventually("all connections to end", SOON, async || {
        open().await <= before
    })
    .await;
}

#[tokio::test]
async fn who_leaves_while_slots_are_asked_takes_nothing_from_others() {
    let cluster = Cluster::start().await;
    let (_shared, store) = store(&cluster).await;
    let nothing = Limit {
        requests: 0,
        ..DAILY
    };
    let (full, free) = (key_on(0, "full"), key_on(1, "free"));
    for _ in 0..10 {
        let charges = [
            Charge::new(&nothing, &full, 1),
            Charge {
                group: 1,
                ..Charge::new(&DAILY, &free, 1)
            },
        ];
        tokio::select! {
            biased;
            _ = store.decide(&charges) => panic!("nobody is so quick"),
            () = tokio::task::yield_now() => {}
        }
    }
    // This is asked behind them.
    eventually("all to be given back", SOON, async || {
        left(&store, &DAILY, &free).await == 1000
    })
    .await;
}

#[tokio::test]
async fn who_looks_for_a_shard_with_room_is_not_in_his_own_way() {
    let cluster = Cluster::start().await;
    let (_shared, store) = store(&cluster).await;
    let (sixteen, one) = (
        Limit {
            requests: 16,
            ..DAILY
        },
        Limit {
            requests: 1,
            ..DAILY
        },
    );
    for round in 0..8 {
        let (hot, own) = (key(&format!("hot-{round}")), key(&format!("own-{round}")));
        let spread = Charge {
            group: 1,
            shards: 16,
            ..Charge::new(&sixteen, &hot, 1)
        };
        for _ in 0..15 {
            assert!(store.decide(&[spread]).await.unwrap().admitted);
        }
        let decision = store
            .decide(&[Charge::new(&one, &own, 1), spread])
            .await
            .unwrap();
        assert!(decision.admitted, "{decision:?}");
    }
}
