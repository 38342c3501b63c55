//! Parts of a split request that are reserved when the request ends early.

use super::*;

/// One slot, whose key is on node 0, and a limit per user. The slot is asked first.
fn slot_and_user_policies(slots: &str) -> String {
    format!(
        "[[policy]]\nname = '{slots}'\nkey = []\nlimit = {{ requests = 1, algorithm = 'concurrency', lease_ttl = '60s' }}\n\
         [[policy]]\nname = 'user'\nkey = 'header:x-user-id'\nlimit = {{ requests = 5, per = '1h' }}\n"
    )
}

impl SplitFixture {
    async fn start_with_slot() -> Self {
        let fixture = Self::start("3s", &slot_and_user_policies(&policy_on(0, "slots"))).await;
        // Both workers have the scripts and the slot map.
        for _ in 0..4 {
            assert_eq!(fixture.statuses("other", 1).await, [200]);
            fixture.wait_for_slots(0).await;
        }
        fixture
    }

    /// Delays all calls of a node that may write.
    async fn pause_writes(&self, node: usize, ms: u64) {
        let command = format!("CLIENT PAUSE {ms} WRITE");
        let _: String = self.cluster.nodes[node].command(&command).await;
    }

    async fn wait_for_slots(&self, held: usize) {
        for _ in 0..300 {
            let keys: Vec<String> = self.cluster.nodes[0].command("KEYS *concurrency*").await;
            if keys.len() == held {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("the number of slots in use does not become {held}");
    }
}

/// The first call that returns the reserved slot fails.
#[tokio::test]
async fn a_refused_request_releases_its_slot_although_a_call_fails() {
    let fixture = SplitFixture::start_with_slot().await;
    let user = user_on(1, "user");
    // The proxy does not know that another instance has used up the user's limit.
    let settings = RedisSettings {
        key_prefix: "shop".to_owned(),
        ..fixture.cluster.settings()
    };
    let store = Store::from_redis(connect_redis(settings).await.1);
    let limit = hourly(5, Algorithm::SlidingLog);
    let key = user_key("user", &user);
    assert!(
        store
            .decide(&[PolicyCharges::new(&limit, &key, 5)])
            .await
            .unwrap()
            .admitted
    );

    fixture.pause_writes(1, 1000).await;
    let request = fixture.proxy.request("GET", "/").header("x-user-id", &user);
    let refused = tokio::spawn(request.send_for_status());
    fixture.wait_for_slots(1).await;
    let node = &fixture.cluster.nodes[0];
    let _: String = node.command("CONFIG SET min-replicas-to-write 1").await;
    assert_eq!(refused.await.unwrap(), 429);
    sleep(Duration::from_millis(400)).await;
    let _: String = node.command("CONFIG SET min-replicas-to-write 0").await;
    fixture.wait_for_slots(0).await;
    assert_eq!(fixture.statuses(&user_on(2, "user"), 1).await, [200]);
}

/// Parts that are not asked yet when the client disconnects are not asked.
#[tokio::test]
async fn a_client_that_disconnects_reserves_nothing_more() {
    let fixture = SplitFixture::start_with_slot().await;
    let user = user_on(1, "user");
    let decisions = async || {
        let node = &fixture.cluster.nodes[1];
        node.read_info_number("commandstats", "cmdstat_evalsha")
            .await
    };
    let before = decisions().await;
    fixture.pause_writes(0, 800).await;
    let client = fixture
        .proxy
        .send_raw(format!(
            "GET / HTTP/1.1\r\nHost: a\r\nX-User-Id: {user}\r\n\r\n"
        ))
        .await;
    sleep(Duration::from_millis(400)).await;
    drop(client);
    sleep(Duration::from_millis(1500)).await;
    fixture.wait_for_slots(0).await;
    assert_eq!(decisions().await - before, 0);
}

/// A worker that stops returns the reservations of its last rejected request before its connections
/// close.
#[tokio::test]
async fn a_stopping_worker_returns_its_reservations() {
    let cluster = RedisCluster::start().await;
    let settings = || RedisSettings {
        timeout: Duration::from_millis(150),
        ..cluster.settings()
    };
    let connect = async || Store::from_redis(connect_redis(settings()).await.1);
    let limit = hourly(5, Algorithm::SlidingLog);
    let (live, dead) = (
        policy_key(&policy_on(0, "a")),
        policy_key(&policy_on(1, "b")),
    );
    let reader = connect().await;
    for _ in 0..5 {
        let store = connect().await;
        // The first call loads the scripts.
        assert!(
            store
                .decide(&[PolicyCharges::new(&limit, &live, 0)])
                .await
                .is_ok()
        );
        cluster.nodes[1]
            .command::<String>("CLIENT PAUSE 400 ALL")
            .await;
        let charges = [&live, &dead].map(|key| PolicyCharges::new(&limit, key, 1));
        let failure = store
            .decide_with_source(&charges, tokio::time::Instant::now())
            .await;
        let failure = failure.expect_err("a server gives no answer");
        assert!(failure.partial.is_some(), "the other server has charged");
        // The request is not forwarded.
        drop(failure);
        store.return_units_and_leave_membership().await;
        drop(store);
        let status = reader.decide(&[PolicyCharges::new(&limit, &live, 0)]).await;
        assert_eq!(
            status
                .unwrap()
                .outcomes()
                .next()
                .unwrap()
                .status
                .unwrap()
                .remaining,
            5
        );
        sleep(Duration::from_millis(400)).await;
    }
}
