//! `count_when` with `block_for`: only counted responses lock a key out.

use crate::reference_model::NaiveModel;
use crate::support::login_app;
use crate::support::prelude::*;

/// A refusal with a longer wait than the period is a block.
const LOCKOUT_POLICY: &str = "[[policy]]
name = 'login'
key = ['header:x-user']
limit = { requests = 5, per = '1d' }
count_when = { status = [401, 403] }
block_for = '30d'\n";

const DAY_SECONDS: u64 = 86_400;

async fn log_in(proxy: &Proxy, user: &str, password: &str) -> RawResponse {
    login_app::log_in(proxy, "/", user, password).await
}

fn is_block(reply: &RawResponse) -> bool {
    let wait = reply
        .header("retry-after")
        .map(|text| text.parse().unwrap());
    reply.status == 429 && wait.is_some_and(|seconds: u64| seconds > DAY_SECONDS)
}

/// Sends wrong passwords until the key is locked out. Returns how many reached the app.
async fn fail_until_locked_out(proxy: &Proxy, user: &str) -> usize {
    let mut failures = 0;
    in_time(async {
        loop {
            let reply = log_in(proxy, user, "wrong").await;
            if is_block(&reply) {
                return failures;
            }
            failures += usize::from(reply.status == 401);
        }
    })
    .await
}

fn store_config(redis: Option<&RedisServer>) -> String {
    redis.map(RedisServer::store_config).unwrap_or_default()
}

#[tokio::test]
async fn five_wrong_passwords_lock_out_and_a_reset_unlocks() {
    for in_redis in [false, true] {
        let redis = in_redis.then(RedisServer::start);
        // Each worker has a cache of blocks: with several, the wait below would end only one.
        let store = store_config(redis.as_ref());
        let config = format!("listen.threads = 1\n{store}\n{LOCKOUT_POLICY}");
        let app = Upstream::with_handler(check_password).await;
        let admin_proxy = Proxy::setup(&config)
            .token()
            .owned_upstream(app)
            .start()
            .await;
        let proxy = &admin_proxy;
        for _ in 0..2 {
            assert_eq!(fail_until_locked_out(proxy, "ann").await, 5, "{in_redis}");
            assert!(is_block(&log_in(proxy, "ann", "right").await));
            assert_eq!(log_in(proxy, "bob", "right").await.status, 200);
            let target = "/keys?policy=login&key=ann";
            let reset = admin_proxy.authorized_request("DELETE", target);
            let reset = reset.send().await;
            assert_eq!(reset.json()["counters_forgotten"], 3, "{}", reset.text());
            // A worker caches a block for a second.
            wait_until("the end of the block", async || {
                log_in(proxy, "ann", "right").await.status == 200
            })
            .await;
        }
    }
}

#[tokio::test]
async fn right_passwords_in_parallel_start_no_block() {
    for in_redis in [false, true] {
        let redis = in_redis.then(RedisServer::start);
        let config = format!("{}\n{LOCKOUT_POLICY}", store_config(redis.as_ref()));
        let app = GatedUpstream::start().await;
        let proxy = Proxy::start(&config, app.address).await;
        let release = async {
            app.wait_for_requests(5).await;
            // Refused because of the five reservations alone.
            for _ in 0..20 {
                let reply = log_in(&proxy, "ann", "right").await;
                assert!(reply.status == 429 && !is_block(&reply), "{reply:?}");
            }
            app.answer(1_000);
        };
        let held = join_all((0..5).map(|_| log_in(&proxy, "ann", "right")));
        let (held, ()) = in_time(async { tokio::join!(held, release) }).await;
        assert!(held.iter().all(|reply| reply.status == 200));
        // The last reservations are returned soon.
        in_time(async {
            for _ in 0..20 {
                while log_in(&proxy, "ann", "right").await.status != 200 {}
            }
        })
        .await;
    }
}

#[tokio::test]
async fn clients_that_leave_before_the_response_are_locked_out() {
    for in_redis in [false, true] {
        let redis = in_redis.then(RedisServer::start);
        let silent = RawUpstream::silent().await;
        let policy = LOCKOUT_POLICY.replace("requests = 5", "requests = 1");
        let config = format!("{}\n{policy}", store_config(redis.as_ref()));
        let proxy = Proxy::start(&config, silent.address).await;
        let client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        wait_until("the request", async || silent.connection_count() > 0).await;
        assert!(!is_block(&proxy.get("/").await));
        drop(client);
        wait_until("the block", async || is_block(&proxy.get("/").await)).await;
    }
}

#[tokio::test]
async fn our_own_502_never_locks_out_unless_it_is_listed() {
    let closed = RawUpstream::with_script(|_, _| async {}).await;
    let address = closed.address;
    drop(closed);
    let proxy = Proxy::start(LOCKOUT_POLICY, address).await;
    assert_eq!(proxy.get_statuses("/", 8).await, [502; 8]);
    let proxy = Proxy::start(&LOCKOUT_POLICY.replace("401, 403", "'5xx'"), address).await;
    assert_eq!(proxy.get_statuses("/", 5).await, [502; 5]);
    assert!(is_block(&proxy.get("/").await));
}

/// In a cluster, a worker caches the refusal of each limit. A full response counter refuses no
/// request, so it is not cached: after a block ends, the limit itself refuses and blocks again.
#[tokio::test]
async fn after_a_short_block_the_limit_still_refuses_in_a_cluster() {
    let cluster = RedisCluster::start().await;
    let policy = LOCKOUT_POLICY.replace("30d", "100ms");
    let config = format!(
        "[store]\nkind = 'redis'\n[store.redis]\n{}\n{policy}",
        cluster.config_lines()
    );
    let app = Upstream::with_handler(check_password).await;
    let proxy = Proxy::start_connected(&config, app.address).await;
    for _ in 0..5 {
        assert_eq!(log_in(&proxy, "ann", "wrong").await.status, 401);
    }
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(600) {
        let reply = log_in(&proxy, "ann", "wrong").await;
        assert_eq!(reply.status, 429, "after {:?}", start.elapsed());
    }
    assert_eq!(app.requests().len(), 5);
}

/// Without Redis, an instance locks out by its share; Redis knows of it afterwards.
#[tokio::test]
async fn an_instance_without_redis_locks_out_by_itself() {
    let mut redis = RedisServer::start();
    let config = format!(
        "{}\n{LOCKOUT_POLICY}on_store_failure = 'local'\n",
        redis.store_config()
    );
    let app = Upstream::with_handler(check_password).await;
    let proxy = Proxy::start_connected(&config, app.address).await;
    redis.kill();
    assert_eq!(fail_until_locked_out(&proxy, "ann").await, 5);
    assert_eq!(log_in(&proxy, "bob", "right").await.status, 200);
}

/// Rounds of parallel logins, half of them wrong: never a sixth failure. `TIDEGATE_TEST_ROUNDS`
/// sets the number of rounds.
#[tokio::test]
async fn no_round_of_parallel_log_ins_lets_a_sixth_failure_through() {
    let rounds = std::env::var("TIDEGATE_TEST_ROUNDS").map_or(60, |count| count.parse().unwrap());
    let seed = test_seed();
    let mut rng = Rng::with_seed(seed);
    let redis = RedisServer::start();
    let config = format!("{}\n{LOCKOUT_POLICY}", redis.store_config());
    let app = Upstream::with_handler(check_password).await;
    let proxies = [
        Proxy::start(&config, app.address).await,
        Proxy::start(&config, app.address).await,
    ];
    for round in 0..rounds {
        let user = format!("user{round}");
        let attempts = (0..16).map(|_| {
            let password = if rng.bool() { "wrong" } else { "right" };
            log_in(&proxies[rng.usize(..2)], &user, password)
        });
        let attempts: Vec<_> = attempts.collect();
        let replies = join_all(attempts).await;
        let parallel = replies.iter().filter(|reply| reply.status == 401).count();
        // With all responses known, the rest of the five fails, and then the key is locked out.
        let later = fail_until_locked_out(&proxies[0], &user).await;
        assert_eq!(parallel + later, 5, "seed {seed}, round {round}");
        let reply = log_in(&proxies[1], &user, "right").await;
        assert!(is_block(&reply), "seed {seed}, round {round}: {reply:?}");
    }
}

/// The request of a policy with the response counter, as the enforcer builds it.
struct CountingPolicy {
    limit: Limit,
    block: Limit,
    key: Key,
    counted_key: Key,
}

impl CountingPolicy {
    fn draw(rng: &mut Rng, algorithm_count: usize) -> Self {
        let mut key = KeyBuilder::new("login");
        key.push_key_value(Some(b"ann"));
        let key = key.finish();
        let limit = EVERY_ALGORITHM[rng.usize(..algorithm_count)].1(rng);
        let block = make_limit(1, 1 + rng.u64(..4) * limit.per_us / 2, Algorithm::Block);
        Self {
            limit: Limit {
                requests: rng.u64(1..6),
                ..limit
            },
            block,
            counted_key: key.to_response_counter_key(),
            key,
        }
    }

    fn charges(&self, cost: u64) -> [PolicyCharges<'_>; 1] {
        let mut policy = PolicyCharges::new(&self.block, &self.key, 1);
        policy.response_key = Some(Arc::new(self.counted_key.clone()));
        policy.limits.push(LimitCharge {
            is_estimate: true,
            ..LimitCharge::new(&self.limit, cost)
        });
        policy.limits.push(LimitCharge {
            is_read: true,
            counts_responses: true,
            ..LimitCharge::new(&self.limit, cost)
        });
        [policy]
    }
}

/// Requests whose responses come late, in any order or never: both stores decide alike, and as the
/// model does where it has the algorithm. A block starts only if the responses fill the limit.
#[test]
fn both_stores_block_as_the_model_does() {
    const MODELLED_ALGORITHMS: usize = 3;
    let seed = test_seed();
    let mut rng = Rng::with_seed(seed);
    let mut stores = StoreUnderTest::both_stores();
    for round in 0..80 {
        stores.iter_mut().for_each(StoreUnderTest::reset);
        let algorithms = [MODELLED_ALGORITHMS, EVERY_ALGORITHM.len() - 1][round % 2];
        let policy = CountingPolicy::draw(&mut rng, algorithms);
        let (mut model, mut at_us, mut pending) = (NaiveModel::default(), START_US, Vec::new());
        for step in 0..40 {
            at_us += match rng.u8(..4) {
                0 => rng.u64(..=policy.limit.per_us / 3),
                1 => rng.u64(..1_000),
                _ => 0,
            };
            if rng.bool() && !pending.is_empty() {
                let (units, charged_at_us) = pending.swap_remove(rng.usize(..pending.len()));
                let (key, amendment) = match rng.bool() {
                    true => (&policy.counted_key, Amendment::Charge(units)),
                    false => {
                        let at_us = charged_at_us;
                        (&policy.key, Amendment::Credit { units, at_us })
                    }
                };
                for store in &mut stores {
                    store.apply_amendment(&policy.limit, key, amendment, at_us);
                }
                if algorithms == MODELLED_ALGORITHMS {
                    let charge = PolicyCharges::new(&policy.limit, key, 0);
                    model.apply_amendment(at_us, &charge, amendment);
                }
            }
            let charges = policy.charges(rng.u64(1..3));
            let [memory, redis] = stores.each_mut().map(|store| store.decide(&charges, at_us));
            let context = format!("seed {seed}, round {round}, step {step}: {charges:?}");
            assert_eq!(memory, redis, "{context}");
            if algorithms == MODELLED_ALGORITHMS {
                assert_eq!(memory, model.decide(at_us, &charges), "{context}");
            }
            if let Some(charged_at_us) = memory.outcomes().nth(1).unwrap().charged_at_us {
                pending.push((charges[0].limits[1].cost, charged_at_us));
            }
        }
    }
}

#[tokio::test]
async fn check_describes_the_lockout() {
    let output = run_check(LOCKOUT_POLICY).await;
    assert!(output.status.success(), "{}", output.stderr);
    let text = output.stdout;
    assert_contains(&text, &["if responses with such a status fill the limit"]);
}
