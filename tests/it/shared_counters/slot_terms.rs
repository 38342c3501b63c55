//! `counter` together with `max_duration`, `release` and `max_delay`: all policies that match a
//! request apply, not only the one with the lowest limit.

use crate::support::prelude::*;

fn slot_policy(name: &str, requests: u64, options: &str) -> String {
    format!(
        "[[policy]]\nname = '{name}'\ncounter = 'jobs'\nmatch = {{ path = ['/{name}', '/both'] }}\n\
         limit = {{ requests = {requests}, algorithm = 'concurrency'{options} }}\n"
    )
}

#[tokio::test]
async fn the_shortest_max_duration_of_all_policies_of_a_counter_applies() {
    let silent = Upstream::with_handler(|_request| std::future::pending()).await;
    let (short, long) = (", max_duration = '300ms'", ", max_duration = '1h'");
    for (a, b, in_redis) in [
        ((5, short), (1, ""), false),
        ((1, ""), (5, short), true),
        ((2, short), (2, ""), false),
        ((2, ""), (2, short), false),
        ((1, long), (5, short), false),
        ((5, short), (1, long), true),
    ] {
        let redis = in_redis.then(RedisServer::start);
        let store = redis
            .as_ref()
            .map_or(String::new(), RedisServer::store_config);
        let policies = [slot_policy("a", a.0, a.1), slot_policy("b", b.0, b.1)].concat();
        let proxy = Proxy::start_connected(&format!("{store}\n{policies}"), silent.address).await;
        let path = if a.1 == short { "/a" } else { "/b" };
        for path in [path, "/both"] {
            // The slot of the request before is free a moment after its end.
            let ended = async {
                loop {
                    let begun = Instant::now();
                    let status = proxy.get(path).await.status;
                    if status != 429 {
                        return (status, begun.elapsed());
                    }
                }
            };
            let ended = timeout(TEST_TIMEOUT, ended).await;
            let (status, took) = ended.unwrap_or_else(|_| panic!("{path} runs on: {policies}"));
            assert_eq!(status, 504, "{path}: {policies}");
            assert!(took >= Duration::from_millis(300), "{path}: {took:?}");
        }
    }
}

#[tokio::test]
async fn a_slot_is_held_for_the_upstream_if_one_policy_of_its_counter_says_so() {
    let silent = Upstream::with_handler(|_request| std::future::pending()).await;
    let held = ", release = 'upstream', max_duration = '1h'";
    for (a, b) in [
        ((1, ""), (5, held)),
        ((1, held), (5, "")),
        ((5, held), (1, "")),
    ] {
        let policies = [slot_policy("a", a.0, a.1), slot_policy("b", b.0, b.1)].concat();
        let proxy = Proxy::start(&policies, silent.address).await;
        let client = proxy
            .send_raw("GET /both HTTP/1.1\r\nHost: a\r\n\r\n")
            .await;
        wait_until("the request", async || !silent.requests().is_empty()).await;
        drop(client);
        sleep(Duration::from_millis(200)).await;
        assert_eq!(proxy.get("/both").await.status, 429, "{policies}");
    }
}

/// Delays of which one is longer by less than the interval of two requests.
#[tokio::test]
async fn the_shortest_max_delay_of_all_policies_of_a_counter_applies() {
    let upstream = Upstream::echo().await;
    let policy = |name: &str, max_delay: &str| {
        format!(
            "[[policy]]\nname = '{name}'\ncounter = 'line'\nmatch = {{ path = ['/{name}', '/both'] }}\n\
             limit = {{ requests = 1, per = '10s', algorithm = 'leaky_bucket', max_delay = '{max_delay}' }}\n"
        )
    };
    for delays in [
        ["12s", "1s"],
        ["1s", "12s"],
        ["9999ms", "1s"],
        ["1s", "9999ms"],
    ] {
        let policies = [policy("a", delays[0]), policy("b", delays[1])].concat();
        let proxy = Proxy::start(&policies, upstream.address).await;
        assert_eq!(proxy.get("/both").await.status, 200, "{delays:?}");
        // It would wait almost ten seconds.
        let reply = timeout(Duration::from_secs(5), proxy.get("/both")).await;
        let status = reply.map(|reply| reply.status);
        assert_eq!(status, Ok(429), "{delays:?}");
    }
    let local = |text: String| text.replace("counter", "on_store_failure = 'local'\ncounter");
    let policies = local([policy("a", "9999ms"), policy("b", "1s")].concat());
    let checked = run_check(&policies).await;
    assert!(
        checked.stderr.contains("needs equal amounts"),
        "{checked:?}"
    );
}
