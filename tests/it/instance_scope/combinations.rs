//! `scope = "instance"` with calendar periods and `count_when` beside a policy in Redis: all or
//! nothing in both directions.

use super::{read_remaining, remaining};
use crate::calendar_limits::zone_far_from_midnight;
use crate::support::prelude::*;

/// Sends a request without a password: the app answers 401.
async fn send(proxy: &Proxy, user: &str) -> RawResponse {
    log_in(proxy, "/", user, "wrong").await
}

fn outcome(response: &RawResponse) -> (u16, Option<u64>, Option<u64>) {
    (
        response.status,
        remaining(response, "pod"),
        remaining(response, "customer"),
    )
}

/// Waits until the admin port shows so many units of a policy, or of `POLICY&key=VALUE`.
async fn await_remaining(proxy: &Proxy, policy: &str, expected: u64) {
    let is_reached = async || read_remaining(proxy, policy).await == Some(expected);
    wait_until(format!("{policy}: {expected} units"), is_reached).await;
}

#[tokio::test]
async fn days_and_months_of_instance_and_redis_are_charged_together() {
    let (zone, app) = (zone_far_from_midnight(), Upstream::echo().await);
    for (instance_period, redis_period) in [("day", "month"), ("month", "day"), ("week", "week")] {
        let redis = RedisServer::start();
        let policy = |name: &str, more: &str, requests: u64, period: &str| {
            format!(
                "[[policy]]\nname = '{name}'\n{more}\nlimit = {{ requests = {requests}, per = '{period}', \
                 tz = '{zone}', algorithm = 'fixed_window' }}\n"
            )
        };
        let pod = policy("pod", "scope = 'instance'", 4, instance_period);
        let customer = policy("customer", "key = ['header:x-user']", 3, redis_period);
        let config = format!("{}\n{pod}{customer}", redis.store_config());
        let proxy = Proxy::start_connected(&config, app.address).await;
        for left in [3, 2, 1] {
            let found = outcome(&send(&proxy, "ann").await);
            assert_eq!(found, (200, Some(left), Some(left - 1)));
        }
        // Redis refuses, and the unit of the instance comes back.
        for _ in 0..8 {
            assert_eq!(outcome(&send(&proxy, "ann").await), (429, Some(1), Some(0)));
        }
        assert_eq!(outcome(&send(&proxy, "bob").await), (200, Some(0), Some(2)));
        // The instance refuses, and Redis is not charged: bob has the units with another instance.
        for _ in 0..8 {
            assert_eq!(outcome(&send(&proxy, "bob").await), (429, Some(0), None));
        }
        let other = Proxy::start_connected(&config, app.address).await;
        assert_eq!(outcome(&send(&other, "bob").await), (200, Some(3), Some(1)));
    }
}

/// A policy of the instance by responses beside a policy in Redis by requests, or the reverse.
fn counting_config(redis: &RedisServer, more: &str, is_instance_counting: bool) -> String {
    let counting = format!("count_when = {{ status = [401] }}\n{more}");
    let (pod, customer) = match is_instance_counting {
        true => (counting, String::new()),
        false => (String::new(), counting),
    };
    format!(
        "{}\n[[policy]]\nname = 'pod'\nscope = 'instance'\n{pod}\nlimit = {{ requests = 3, per = '100d' }}\n\
         [[policy]]\nname = 'customer'\nkey = ['header:x-user']\n{customer}\nlimit = {{ requests = 2, per = '100d' }}\n",
        redis.store_config()
    )
}

/// The instance counts responses. A reservation that Redis refuses comes back at once, and no
/// response counts for it.
#[tokio::test]
async fn responses_that_the_instance_counts_stand_beside_requests_in_redis() {
    let app = Upstream::with_handler(check_password).await;
    for more in ["", "block_for = '200d'"] {
        let redis = RedisServer::start();
        let config = counting_config(&redis, more, true);
        let proxy = Proxy::start_connected(&config, app.address).await;
        for left in [1, 0] {
            let response = log_in(&proxy, "/", "ann", "right").await;
            assert_eq!(outcome(&response), (200, Some(2), Some(left)));
            await_remaining(&proxy, "pod", 3).await;
        }
        for _ in 0..8 {
            assert_eq!(outcome(&send(&proxy, "ann").await), (429, Some(3), Some(0)));
        }
        for (user, left) in [("bob", 2), ("bob", 1), ("cid", 0)] {
            let response = send(&proxy, user).await;
            assert_eq!(response.status, 401);
            assert_eq!(remaining(&response, "pod"), Some(left));
        }
        // The instance refuses a customer, of which Redis knows nothing then.
        for _ in 0..4 {
            let response = log_in(&proxy, "/", "dan", "right").await;
            assert_eq!(outcome(&response), (429, Some(0), None));
            let wait: u64 = response.retry_after_s();
            assert_eq!(wait > 150 * 86_400, !more.is_empty(), "{wait}");
        }
        let other = Proxy::start_connected(&config, app.address).await;
        assert_eq!(outcome(&send(&other, "dan").await), (401, Some(2), Some(1)));
    }
}

/// Redis counts responses. Its refusals return the unit of the instance, and refusals of the
/// instance reserve nothing in Redis.
#[tokio::test]
async fn responses_that_redis_counts_stand_beside_requests_of_the_instance() {
    let app = Upstream::with_handler(check_password).await;
    for more in ["", "block_for = '200d'"] {
        let redis = RedisServer::start();
        let config = counting_config(&redis, more, false).replace("requests = 3", "requests = 4");
        let proxy = Proxy::start_connected(&config, app.address).await;
        for left in [1, 0] {
            let response = send(&proxy, "ann").await;
            assert_eq!(outcome(&response), (401, Some(left + 2), Some(left)));
        }
        for _ in 0..8 {
            assert_eq!(outcome(&send(&proxy, "ann").await), (429, Some(2), Some(0)));
        }
        for (user, left) in [("bob", 1), ("cid", 0)] {
            let response = log_in(&proxy, "/", user, "right").await;
            assert_eq!(outcome(&response), (200, Some(left), Some(1)));
        }
        for _ in 0..4 {
            assert_eq!(outcome(&send(&proxy, "bob").await), (429, Some(0), None));
        }
        // The unit of bob's right password is back, and the refusals took none.
        await_remaining(&proxy, "customer&key=bob", 2).await;
        let other = Proxy::start_connected(&config, app.address).await;
        assert_eq!(outcome(&send(&other, "bob").await), (401, Some(3), Some(1)));
    }
}

/// Without Redis, the instance goes on to count responses.
#[tokio::test]
async fn an_outage_changes_nothing_for_responses_that_the_instance_counts() {
    for mode in ["open", "closed"] {
        let app = Upstream::with_handler(check_password).await;
        let mut redis = RedisServer::start();
        let failure = format!("on_store_failure = '{mode}'\nkey = ");
        let config =
            counting_config(&redis, "block_for = '200d'", true).replace("key = ", &failure);
        let proxy = Proxy::start_connected(&config, app.address).await;
        redis.kill();
        let closed = [(503, None, None); 6];
        let open = [
            (200, Some(2), None),
            (401, Some(2), None),
            (401, Some(1), None),
            (200, Some(0), None),
            (401, Some(0), None),
            (429, Some(0), None),
        ];
        let passwords = ["right", "wrong", "wrong", "right", "wrong", "right"];
        let expected = if mode == "open" { open } else { closed };
        for (password, expected) in passwords.into_iter().zip(expected) {
            let response = log_in(&proxy, "/", "ann", password).await;
            assert_eq!(outcome(&response), expected, "{mode}, {password}");
            if expected.0 == 200 {
                let left = expected.1.unwrap() + 1;
                await_remaining(&proxy, "pod", left).await;
            }
        }
        if mode == "closed" {
            await_remaining(&proxy, "pod", 3).await;
            assert!(app.requests().is_empty());
        }
    }
}

/// Redis takes the slot, but its reply is late. Meanwhile another request uses up the instance's limit.
#[tokio::test]
async fn a_slot_is_released_if_the_instance_refuses_after_a_timeout_of_redis() {
    let (redis, app) = (RedisServer::start(), Upstream::echo().await);
    let relay = TcpRelay::start(redis.port()).await;
    let config = format!(
        "listen = {{ threads = 1 }}\n[store]\nkind = 'redis'\n[store.redis]\n\
         url = 'redis://127.0.0.1:{}'\ntimeout = '1s'\n\
         [[policy]]\nname = 'jobs'\nmatch = {{ path = '/jobs' }}\nkey = ['header:x-user']\n\
         limit = {{ requests = 5, algorithm = 'concurrency', lease_ttl = '60s' }}\n\
         [[policy]]\nname = 'pod'\nscope = 'instance'\nlimit = {{ requests = 2, per = '100s' }}\n",
        relay.port
    );
    let proxy = Proxy::start_connected(&config, app.address).await;
    let wait_for_slots = async |expected: usize| {
        wait_until(format!("{expected} counters with slots"), async || {
            let keys: Vec<String> = redis.command("KEYS *:concurrency:*").await;
            keys.len() == expected
        })
        .await;
    };
    let job = async |user: &str| {
        let request = proxy.request("GET", "/jobs").header("x-user", user);
        request.send().await
    };
    // Redis then has the script.
    assert_eq!(job("ann").await.status, 200);
    wait_for_slots(0).await;
    relay.delay_replies(Duration::from_secs(2));
    let fill = async {
        wait_for_slots(1).await;
        let other = proxy.request("GET", "/other").send().await;
        assert_eq!(other.status, 200, "{other:?}");
    };
    let (job, ()) = tokio::join!(job("bob"), fill);
    assert_eq!(job.status, 429, "{job:?}");
    relay.forward_at_once();
    wait_for_slots(0).await;
}
