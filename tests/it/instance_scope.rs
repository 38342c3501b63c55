//! `scope = "instance"` end to end: limits of one proxy beside limits in Redis, all or nothing.

mod combinations;
mod model;

use crate::support::prelude::*;

/// Five requests in flight in each proxy, twelve per customer in all proxies.
const POLICIES: &str = r#"
[[policy]]
name = "pod"
scope = "instance"
match = { path = "/jobs/**" }
limit = { requests = 5, algorithm = "concurrency" }

[[policy]]
name = "customer"
match = { path = "/jobs/**" }
key = ["header:x-customer"]
limit = { requests = 12, per = "1h" }
"#;

/// An upstream whose responses, except those of `/jobs/quick`, last until the test drops them.
struct SlowUpstream {
    upstream: Upstream,
    bodies: Arc<Mutex<Vec<BodySender>>>,
}

impl SlowUpstream {
    async fn start() -> Self {
        let bodies = Arc::<Mutex<Vec<BodySender>>>::default();
        let started = Arc::clone(&bodies);
        let upstream = Upstream::with_handler(move |request| {
            let (sender, body) = channel_body();
            if !request.uri().path().ends_with("quick") {
                started.lock().unwrap().push(sender);
            }
            async { UpstreamResponse::from(Response::new(body)) }
        });
        Self {
            upstream: upstream.await,
            bodies,
        }
    }

    async fn start_proxy(&self, redis: &RedisServer, policies: &str) -> Proxy {
        let proxy = Proxy::setup(policies)
            .redis(redis)
            .upstream(self.upstream.address);
        let proxy = proxy.start().await;
        proxy.wait_for_store().await;
        proxy
    }

    fn end_responses(&self) {
        self.bodies.lock().unwrap().clear();
    }
}

/// Sends a request, and returns the client with the head of the response.
async fn begin_request(proxy: &Proxy, customer: &str) -> (RawClient, String) {
    let mut client = RawClient::connect(proxy.address).await;
    let request = format!("GET /jobs/slow HTTP/1.1\r\nHost: a\r\nX-Customer: {customer}\r\n\r\n");
    client.send(request).await;
    let head = client.read_past(b"\r\n\r\n").await;
    (client, String::from_utf8(head).unwrap())
}

async fn send_quick(proxy: &Proxy, customer: &str) -> RawResponse {
    let request = proxy.request("GET", "/jobs/quick");
    request.header("X-Customer", customer).send().await
}

fn remaining(response: &RawResponse, limit: &str) -> Option<u64> {
    response.remaining(limit)
}

/// Waits until a request of the customer gets this status. Slots return a moment after a response.
async fn wait_for_status(proxy: &Proxy, customer: &str, status: u16) -> RawResponse {
    eventually(
        format!("{status} for {customer}"),
        TEST_TIMEOUT,
        async || {
            let response = send_quick(proxy, customer).await;
            (response.status == status).then_some(response)
        },
    )
    .await
}

/// The units of a customer that are used in Redis, read without charging.
async fn used_in_redis(redis: &RedisServer, customer: &str) -> u64 {
    let keys = list_counter_keys(redis).await;
    let Some(key) = keys
        .iter()
        .find(|key| key.ends_with(&format!("customer/{customer}")))
    else {
        return 0;
    };
    redis.command(&format!("ZCARD {key}")).await
}

#[tokio::test]
async fn each_proxy_has_its_slots_beside_a_limit_of_all_proxies() {
    let (redis, work) = (RedisServer::start(), SlowUpstream::start().await);
    let (one, two) = (
        work.start_proxy(&redis, POLICIES).await,
        work.start_proxy(&redis, POLICIES).await,
    );
    let mut clients = Vec::new();
    for proxy in [&one, &two] {
        for _ in 0..5 {
            let (client, head) = begin_request(proxy, "a").await;
            assert!(head.starts_with("HTTP/1.1 200"), "{head}");
            clients.push(client);
        }
        // The proxy is full. Its refusals charge the customer nothing, whoever the customer is.
        for customer in ["a", "b", "b"] {
            let (_, head) = begin_request(proxy, customer).await;
            assert!(head.starts_with("HTTP/1.1 429"), "{head}");
            assert!(head.contains("\r\nretry-after: 1\r\n"), "{head}");
        }
    }
    let counters = list_counter_keys(&redis).await;
    let count = counters.len();
    assert_eq!(count, 1, "no slots, and nothing of b: {counters:?}");
    work.end_responses();
    // 10 of 12 units are used: the refusals took none.
    let response = wait_for_status(&one, "a", 200).await;
    assert_eq!(remaining(&response, "customer"), Some(1));
    assert_eq!(send_quick(&two, "a").await.status, 200);
    // Redis refuses. The customer takes no slot, and others get all of them.
    for proxy in [&one, &two] {
        for _ in 0..20 {
            let response = send_quick(proxy, "a").await;
            assert_eq!(response.status, 429);
            assert_eq!(response.json()["policy"], "customer");
            assert_eq!(remaining(&response, "pod"), Some(5));
        }
        for _ in 0..5 {
            let (client, head) = begin_request(proxy, "b").await;
            assert!(head.starts_with("HTTP/1.1 200"), "{head}");
            clients.push(client);
        }
    }
    let counters = list_counter_keys(&redis).await;
    assert_eq!(counters.len(), 2, "of a and b: {counters:?}");
}

/// Units of the instance that Redis refuses are returned by every algorithm.
#[tokio::test]
async fn units_of_the_instance_are_returned_when_redis_refuses() {
    let (redis, upstream) = (RedisServer::start(), Upstream::echo().await);
    for (algorithm, more) in [
        ("sliding_log", ""),
        ("sliding_window", ""),
        ("fixed_window", ""),
        ("token_bucket", ", burst = 9"),
        ("leaky_bucket", ", max_delay = '1s'"),
    ] {
        let per = if algorithm == "leaky_bucket" {
            "1s"
        } else {
            "100d"
        };
        let config = format!(
            "{}\n[[policy]]\nname = 'pod'\nscope = 'instance'\nlimit = {{ requests = 9, per = '{per}', algorithm = '{algorithm}'{more} }}\n\
             [[policy]]\nname = 'customer'\nkey = ['header:x-customer', 'const:{algorithm}']\nlimit = {{ requests = 2, per = '1h' }}\n",
            redis.store_config(),
        );
        let proxy = Proxy::start_connected(&config, upstream.address).await;
        for round in 0..20 {
            let response = proxy.get_with("/", "x-customer", "a").await;
            let expected = if round < 2 { 200 } else { 429 };
            assert_eq!(response.status, expected, "{algorithm}");
        }
        if algorithm != "leaky_bucket" {
            let response = proxy.get_with("/", "x-customer", "b").await;
            assert_eq!(response.status, 200, "{algorithm}");
            assert_eq!(remaining(&response, "pod"), Some(6), "{algorithm}");
        }
    }
}

/// Redis is unavailable: the instance still enforces its limits, and gives back what a `closed`
/// policy rejects.
#[tokio::test]
async fn an_outage_of_redis_changes_nothing_for_limits_of_the_instance() {
    let (mut redis, work) = (RedisServer::start(), SlowUpstream::start().await);
    let open = work.start_proxy(&redis, &with_mode("open")).await;
    let closed = work.start_proxy(&redis, &with_mode("closed")).await;
    // With three instances, each has a share of twelve.
    let policies = with_mode("local").replace("requests = 12", "requests = 36");
    let local = work.start_proxy(&redis, &policies).await;
    redis.kill();
    for proxy in [&open, &local] {
        let mut clients = Vec::new();
        for _ in 0..5 {
            let (client, head) = begin_request(proxy, "a").await;
            assert!(head.starts_with("HTTP/1.1 200"), "{head}");
            clients.push(client);
        }
        let response = send_quick(proxy, "a").await;
        assert_eq!(response.status, 429);
        assert_eq!(remaining(&response, "pod"), Some(0));
        let degraded = "tidegate_requests_total{policy=\"pod\",decision=\"degraded\"}";
        assert_eq!(proxy.read_metric(degraded).await, 0.0);
        let allowed = "tidegate_requests_total{policy=\"pod\",decision=\"allowed\"}";
        assert_eq!(proxy.read_metric(allowed).await, 5.0);
        drop(clients);
    }
    work.end_responses();
    for _ in 0..20 {
        assert_eq!(send_quick(&closed, "a").await.status, 503);
    }
    // The share of "local" refuses after twelve units, and returns the slots.
    let mut statuses = Vec::new();
    for _ in 0..20 {
        statuses.push(send_quick(&local, "a").await.status);
    }
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 7);
    redis.respawn();
    for proxy in [&closed, &open, &local] {
        proxy.wait_for_store().await;
        let response = wait_for_status(proxy, "b", 200).await;
        assert_eq!(remaining(&response, "pod"), Some(4));
    }
}

fn with_mode(mode: &str) -> String {
    POLICIES.replace("key = ", &format!("on_store_failure = \"{mode}\"\nkey = "))
}

/// A client that leaves while Redis is asked leaves no slot and no unit behind.
#[tokio::test]
async fn a_client_that_leaves_during_the_decision_takes_nothing() {
    let (redis, work) = (RedisServer::start(), SlowUpstream::start().await);
    let units = "[[policy]]\nname = \"units\"\nscope = \"instance\"\nmatch = { path = \"/jobs/**\" }\nlimit = { requests = 9, per = \"1h\" }\n";
    let proxy = work
        .start_proxy(&redis, &format!("{POLICIES}{units}"))
        .await;
    redis.pause();
    let mut clients = Vec::new();
    for _ in 0..5 {
        let client = proxy
            .send_raw("GET /jobs/slow HTTP/1.1\r\nHost: a\r\nX-Customer: a\r\n\r\n")
            .await;
        clients.push(client);
    }
    // A sixth request is refused by the instance, so the five have been decided there.
    wait_until("the slots to be taken", async || {
        read_remaining(&proxy, "pod").await == Some(0)
    })
    .await;
    drop(clients);
    wait_until("the slots to be returned", async || {
        read_remaining(&proxy, "pod").await == Some(5)
            && read_remaining(&proxy, "units").await == Some(9)
    })
    .await;
    redis.resume();
    assert_eq!(wait_for_status(&proxy, "b", 200).await.status, 200);
    assert!(
        work.upstream.requests().len() <= 1,
        "only the last was forwarded"
    );
    assert!(used_in_redis(&redis, "a").await <= 5);
}

/// What the admin port says that a policy of the instance has left.
async fn read_remaining(proxy: &Proxy, policy: &str) -> Option<u64> {
    let target = format!("/keys?policy={policy}");
    let request = ClientRequest::new(proxy.admin_address(), "GET", &target);
    let status = request.header("Host", "localhost").send().await.json();
    status
        .pointer("/limits/0/remaining")
        .and_then(Value::as_u64)
}

/// An estimate of the instance is settled in its memory.
#[tokio::test]
async fn estimates_of_the_instance_are_settled_in_memory() {
    let redis = RedisServer::start();
    let upstream = Upstream::with_handler(|_| async {
        let mut response = Response::new(full_body("x"));
        set_header(&mut response, "x-units", "30");
        UpstreamResponse::from(response)
    });
    let upstream = upstream.await;
    let config = format!(
        "{}\n[[policy]]\nname = 'pod'\nscope = 'instance'\nlimit = {{ requests = 100, per = '1h' }}\n\
         cost = {{ estimate = 50, actual = 'response_header:x-units' }}\n\
         [[policy]]\nname = 'all'\nlimit = {{ requests = 9, per = '1h' }}\n",
        redis.store_config(),
    );
    let proxy = Proxy::start_connected(&config, upstream.address).await;
    for left in [70, 40, 10] {
        if left >= 20 {
            assert_eq!(proxy.get("/").await.status, 200);
        } else {
            proxy.expect_status("/", 429, "50 do not fit into 40").await;
            break;
        }
        wait_until("the settlement", async || {
            read_remaining(&proxy, "pod").await == Some(left)
        })
        .await;
    }
    assert_eq!(list_counter_keys(&redis).await.len(), 1);
}

/// The admin port and the commands show and reset counters of this process, and explain them.
#[tokio::test]
async fn admin_and_commands_know_the_counters_of_the_instance() {
    let redis = RedisServer::start();
    let config = format!(
        "{}\n[[policy]]\nname = 'pod'\nscope = 'instance'\nkey = ['header:x-customer']\nlimit = {{ requests = 3, per = '1h' }}\n\
         [[policy]]\nname = 'all'\nlimit = {{ requests = 9, per = '1h' }}\n",
        redis.store_config(),
    );
    let admin = Proxy::with_token(&config).await;
    admin.wait_for_store().await;
    let send = || admin.request("GET", "/").header("x-customer", "a").send();
    for _ in 0..2 {
        assert_eq!(send().await.status, 200);
    }
    let shown = admin.run_command(&["keys", "show", "pod", "a"]).await;
    shown.expect_stdout("counted per instance");
    shown.expect_stdout("1 left");
    let listed = admin.run_command(&["keys", "list"]).await;
    listed.expect_stdout("Not listed: pod");
    let explained = admin
        .run_command(&["explain", "GET", "http://a/", "-H", "x-customer: a"])
        .await;
    explained.expect_stdout("counted per instance");
    explained.expect_stdout("Admitted unless");
    let body =
        r#"{"method":"GET","url":"http://a/","headers":{"x-customer":"a"},"ip":"127.0.0.1"}"#;
    let request = admin.authorized_request("POST", "/explain");
    let request = request.header("content-type", "application/json");
    let explained = request.body(body).send().await.json();
    let pod = &explained["policies"][0];
    assert_eq!(pod["scope"], "instance", "{explained}");
    assert_eq!(pod["limits"][0]["remaining"], 1, "{explained}");
    let reset = admin.run_command(&["keys", "reset", "pod", "a"]).await;
    reset.expect_stdout("reset 1 limit");
    let response = send().await;
    assert_eq!(remaining(&response, "pod"), Some(2));
    assert_eq!(remaining(&response, "all"), Some(6));
    let policy = admin.wait_for_policy("pod", |_| true).await;
    assert_eq!(policy["scope"], "instance");
}

/// A policy in shadow mode charges the instance only if Redis admits.
#[tokio::test]
async fn shadow_and_block_of_the_instance_follow_the_whole_decision() {
    let (redis, upstream) = (RedisServer::start(), Upstream::echo().await);
    let config = format!(
        "{}\n[[policy]]\nname = 'pod'\nscope = 'instance'\nmode = 'mark'\nlimit = {{ requests = 9, per = '1h' }}\n\
         [[policy]]\nname = 'blocking'\nscope = 'instance'\nblock_for = '1h'\nlimit = {{ requests = 4, per = '1h' }}\n\
         [[policy]]\nname = 'customer'\nkey = ['header:x-customer']\nlimit = {{ requests = 2, per = '1h' }}\n",
        redis.store_config(),
    );
    let proxy = Proxy::start_connected(&config, upstream.address).await;
    let send = |customer| {
        proxy
            .request("GET", "/")
            .header("x-customer", customer)
            .send()
    };
    for expected in [200, 200, 429, 429, 429, 429] {
        assert_eq!(send("a").await.status, expected);
    }
    // Redis refused four times: no block, and neither policy was charged.
    let response = send("b").await;
    assert_eq!(response.status, 200);
    assert_eq!(remaining(&response, "pod"), Some(6));
    assert_eq!(remaining(&response, "blocking"), Some(1));
    assert_eq!(send("b").await.status, 200);
    // The instance refuses and blocks. Redis is not asked, so c keeps its units.
    let response = send("c").await;
    assert_eq!(response.status, 429);
    assert_eq!(response.json()["policy"], "blocking");
    assert_eq!(used_in_redis(&redis, "c").await, 0);
    let blocked = "tidegate_requests_total{policy=\"blocking\",decision=\"blocked\"}";
    assert_eq!(send("c").await.status, 429);
    assert_eq!(proxy.read_metric(blocked).await, 1.0);
}
