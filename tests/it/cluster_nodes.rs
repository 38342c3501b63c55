//! Nodes and slots of a Redis Cluster move, fail and return while requests are decided.

use crate::cluster::{
    DAILY_LIMIT, USER_POLICY, connect_store, decide_one, error_count, key_on, policy_key,
    remaining_units, status_for_user, user_on_node,
};
use crate::redis_outage::{OutageFixture, POLICIES, PolicyRoute, TIMEOUT, TIMEOUT_SLACK};
use crate::support::cluster::hash_slot;
use crate::support::fake_redis::start_node_with_moving_slots;
use crate::support::prelude::*;

/// From the end of a fault until Redis decides again.
const RECOVERY: Duration = Duration::from_secs(4);

#[tokio::test]
async fn migrated_slots_are_followed_without_losing_charges() {
    let cluster = RedisCluster::start().await;
    let (shared, store) = connect_store(&cluster).await;
    let log = with_algorithm(DAILY_LIMIT, Algorithm::SlidingLog);
    let owner = key_on(0, "moving");
    for limit in [&DAILY_LIMIT, &log] {
        decide_one(&store, limit, &owner).await.unwrap();
    }
    // New counters of the slot are created on the target node: ASK. With one key here and one
    // there, a call on both gets TRYAGAIN.
    let slot = hash_slot(&owner);
    cluster
        .move_slot(slot, 0, 1, async || {
            for limit in [&DAILY_LIMIT, &log] {
                decide_one(&store, limit, &owner).await.unwrap();
            }
            let window = with_algorithm(DAILY_LIMIT, Algorithm::SlidingWindow { buckets: 2 });
            decide_one(&store, &window, &owner).await.unwrap();
        })
        .await;
    // MOVED, to a known node.
    for limit in [&DAILY_LIMIT, &log] {
        decide_one(&store, limit, &owner).await.unwrap();
        assert_eq!(remaining_units(&store, limit, &owner).await, 1000 - 3);
    }
    assert_eq!(error_count(&shared), 0);
    // The slot map is refreshed, so redirections stop.
    let moved = async || {
        cluster.nodes[0]
            .read_info_number("errorstats", "errorstat_MOVED")
            .await
    };
    wait_until("the slot map to be refreshed", async || {
        let before = moved().await;
        decide_one(&store, &DAILY_LIMIT, &owner).await.unwrap();
        moved().await == before
    })
    .await;
}

#[tokio::test]
async fn resharding_under_load_fails_no_request() {
    let cluster = RedisCluster::start().await;
    let fixture = OutageFixture::with_redis(&cluster.config_lines(), POLICIES).await;
    let load = fixture.start_load().await;
    for owner in [policy_key("open"), policy_key("closed")] {
        let slot = hash_slot(&owner);
        let (from, to) = (initial_node(&owner), (initial_node(&owner) + 1) % 3);
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
    load.wait_until_decided_since(Instant::now()).await;
    let asked = load.finish().await;
    let undecided = asked
        .iter()
        .filter(|asked| asked.route != PolicyRoute::Unlimited && !asked.decided)
        .count();
    assert_eq!(
        undecided,
        0,
        "of {}: {}",
        asked.len(),
        fixture.proxy.log_text()
    );
    let passed = asked
        .iter()
        .filter(|asked| asked.route == PolicyRoute::Closed)
        .count() as u64;
    let left = fixture
        .proxy
        .get("/closed")
        .await
        .remaining("closed")
        .unwrap();
    assert_eq!(100_000 - left, passed + 1, "each request is counted once");
    println!(
        "resharding: {} requests, slowest {:?}",
        asked.len(),
        asked.iter().map(|asked| asked.latency).max()
    );
}

/// If one node is down, its keys get an immediate 503, and all other keys are unaffected.
async fn assert_one_node_fault_is_isolated(
    what: &str,
    fault: impl AsyncFnOnce(&mut RedisCluster),
    heal: impl AsyncFnOnce(&mut RedisCluster),
) {
    let mut cluster = RedisCluster::start().await;
    let fixture = OutageFixture::with_redis(&cluster.config_lines(), USER_POLICY).await;
    let users: Vec<String> = (0..3).map(user_on_node).collect();
    for user in &users {
        assert_eq!(status_for_user(&fixture.proxy, user).await.0, 200);
    }
    fault(&mut cluster).await;
    let began = Instant::now();
    let (mut others, mut late, mut waited, mut asked) = (Vec::new(), 0, 0, 0);
    while began.elapsed() < Duration::from_secs(3) {
        let (answer, took) = status_for_user(&fixture.proxy, &users[0]).await;
        assert_eq!(answer, 503, "{what}");
        waited += usize::from(took >= TIMEOUT);
        for user in &users[1..] {
            let (answer, took) = status_for_user(&fixture.proxy, user).await;
            // The machine may be too busy to meet the deadline.
            let is_late = answer == 503 && took >= TIMEOUT;
            assert!(
                answer == 200 || is_late,
                "{what}: a key of another node was affected"
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
        median <= TIMEOUT_SLACK / 2,
        "{what}: median {median:?} for keys of other nodes"
    );
    assert!(
        late <= others.len() / 20,
        "{what}: {late} of {} had no decision in time",
        others.len()
    );
    // Each of the two workers gives up its connection after three timeouts.
    assert!(waited <= 6, "{what}: {waited} of {asked} waited");
    heal(&mut cluster).await;
    let healed = Instant::now();
    wait_until_within("decisions by the node", RECOVERY, async || {
        status_for_user(&fixture.proxy, &users[0]).await.0 == 200
    })
    .await;
    println!(
        "{what}: {asked} rounds, {waited} waited, others {median:?}; back after {:?}",
        healed.elapsed()
    );
}

#[tokio::test]
async fn a_dead_node_affects_only_its_own_slots() {
    let kill = async |cluster: &mut RedisCluster| cluster.nodes[0].kill();
    assert_one_node_fault_is_isolated("SIGKILL of a master", kill, async |cluster| {
        cluster.nodes[0].restart_async().await
    })
    .await;
}

#[tokio::test]
async fn a_hung_node_affects_only_its_own_slots() {
    let stop = async |cluster: &mut RedisCluster| cluster.nodes[0].pause();
    assert_one_node_fault_is_isolated("SIGSTOP of a master", stop, async |cluster| {
        cluster.nodes[0].resume()
    })
    .await;
}

#[tokio::test]
async fn a_node_out_of_memory_affects_only_its_own_slots() {
    let full = async |cluster: &mut RedisCluster| {
        cluster.nodes[0].command("CONFIG SET maxmemory 100kb").await
    };
    assert_one_node_fault_is_isolated("a full master", full, async |cluster| {
        cluster.nodes[0].command("CONFIG SET maxmemory 0").await
    })
    .await;
}

#[tokio::test]
async fn a_node_at_its_client_limit_affects_only_its_own_slots() {
    let cluster = RedisCluster::start().await;
    let (shared, store) = connect_store(&cluster).await;
    let (here, there) = (key_on(0, "p"), key_on(1, "p"));
    decide_one(&store, &DAILY_LIMIT, &here).await.unwrap();
    // Opened before the fault, to end it.
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
    wait_until("the node to be unavailable", async || {
        decide_one(&store, &DAILY_LIMIT, &here).await.is_err()
    })
    .await;
    for _ in 0..50 {
        let asked = Instant::now();
        decide_one(&store, &DAILY_LIMIT, &there).await.unwrap();
        decide_one(&store, &DAILY_LIMIT, &here).await.unwrap_err();
        assert_faster_than(cluster.settings().timeout / 2, asked);
    }
    assert!(!shared.is_up());
    redis::cmd("CONFIG")
        .arg(&["SET", "maxclients", "100"])
        .exec_async(&mut admin)
        .await
        .unwrap();
    wait_until_within("the node to come back", RECOVERY, async || {
        decide_one(&store, &DAILY_LIMIT, &here).await.is_ok() && shared.is_up()
    })
    .await;
}

#[tokio::test]
async fn a_promoted_replica_is_followed() {
    let mut cluster = RedisCluster::start().await;
    let replica = cluster.add_replica(0).await;
    let (shared, store) = connect_store(&cluster).await;
    let owner = key_on(0, "p");
    decide_one(&store, &DAILY_LIMIT, &owner).await.unwrap();
    // A requested failover is unnoticed, except while the nodes disagree.
    let _: () = cluster.nodes[replica].command("CLUSTER FAILOVER").await;
    let mut first_failed = None;
    wait_until("calls of the new master", async || {
        if decide_one(&store, &DAILY_LIMIT, &owner).await.is_err() {
            first_failed = first_failed.or_else(|| Some(Instant::now()));
        }
        let node = &cluster.nodes[replica];
        let calls = node.read_info_number("commandstats", "cmdstat_evalsha");
        calls.await > 0
    })
    .await;
    wait_until_within("decisions by the new master", RECOVERY, async || {
        decide_one(&store, &DAILY_LIMIT, &owner).await.is_ok()
    })
    .await;
    assert!(
        first_failed.is_none_or(|failed| failed.elapsed() < RECOVERY * 2),
        "{first_failed:?}"
    );
    // After a crash, calls fail until the nodes agree.
    wait_until("the old master to become a replica", async || {
        cluster.nodes[0]
            .command::<String>("INFO replication")
            .await
            .contains("master_link_status:up")
    })
    .await;
    cluster.nodes[replica].kill();
    let died = Instant::now();
    let mut failed = 0;
    wait_until("the replica to take over", async || {
        let asked = Instant::now();
        let answer = decide_one(&store, &DAILY_LIMIT, &owner).await;
        assert!(asked.elapsed() <= cluster.settings().timeout + TIMEOUT_SLACK);
        failed += usize::from(answer.is_err());
        answer.is_ok()
    })
    .await;
    println!(
        "failover in a cluster: {failed} failed calls in {:?}",
        died.elapsed()
    );
    assert!(
        remaining_units(&store, &DAILY_LIMIT, &owner).await < 999,
        "charges before the failover are lost"
    );
    wait_until_within("all to be well", RECOVERY, async || shared.is_up()).await;
}

#[tokio::test]
async fn connects_to_a_cluster_that_starts_later_or_restarts() {
    let mut cluster = RedisCluster::start().await;
    for node in &mut cluster.nodes {
        node.kill();
    }
    let (shared, redis) = connect_redis(cluster.settings()).await;
    let store = Store::from_redis(redis);
    assert!(!shared.is_up());
    let asked = Instant::now();
    assert_eq!(
        decide_one(&store, &DAILY_LIMIT, &policy_key("k"))
            .await
            .unwrap_err()
            .kind,
        "clusterdown"
    );
    assert!(asked.elapsed() < cluster.settings().timeout / 2);
    for round in 0..2 {
        for node in &mut cluster.nodes {
            node.restart_async().await;
        }
        cluster.wait_until_consistent().await;
        wait_until_within("decisions", RECOVERY, async || {
            decide_one(&store, &DAILY_LIMIT, &policy_key("k"))
                .await
                .is_ok()
        })
        .await;
        wait_until_within("all to be well", RECOVERY, async || shared.is_up()).await;
        if round == 0 {
            for node in &mut cluster.nodes {
                node.kill();
            }
            wait_until("the loss to be detected", async || !shared.is_up()).await;
        }
    }
}

#[tokio::test]
async fn a_server_without_cluster_support_is_reported() {
    let server = RedisServer::start();
    let text = format!(
        "[store]\nkind = 'redis'\n[store.redis]\ntopology = 'cluster'\nurls = ['redis://127.0.0.1:{}']\n\
         key_prefix = 'x'\nconnect_timeout = '300ms'\n[[policy]]\nname = 'p'\nlimit = {{ requests = 1, per = '1h' }}\n",
        server.port()
    );
    let proxy = Proxy::with_echo(&text).await;
    let down = proxy.wait_for_message("redis unavailable", 0).await;
    assert!(down.field("reason").contains("cluster support disabled"));
    let cluster = RedisSettings {
        topology: RedisTopology::Cluster,
        ..redis_settings(1)
    };
    assert_eq!(cluster.to_string(), "cluster 127.0.0.1:1");
}

/// The charge is made: that the limit after the override's end can't be read changes only its times.
#[tokio::test]
async fn a_charge_in_a_moving_slot_stands_if_the_limit_of_the_file_can_not_be_read() {
    let port = start_node_with_moving_slots("api=5@1700000000000 api/ann").await;
    let (_shared, redis) = connect_redis(RedisSettings {
        topology: RedisTopology::Cluster,
        ..redis_settings(port)
    })
    .await;
    let (name, key) = (Arc::<str>::from("api"), KeyBuilder::new("api").finish());
    let charge = PolicyCharges::new(&DAILY_LIMIT, &key, 1);
    let charge = charge.map_limits(|charge| charge.name = Some(Cow::Borrowed(&name)));
    let decision = Store::from_redis(redis).decide(&[charge]).await;
    let decision = decision.expect("the charge is made");
    assert!(decision.admitted);
    let status = decision.statuses().next().unwrap();
    assert_eq!(status.remaining, 4, "{status:?}");
}
