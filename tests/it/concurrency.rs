//! `concurrency` end to end: requests in flight hold slots, and every kind of end returns them.

mod held_slots;
mod slot_calls;

use crate::support::prelude::*;
use std::collections::VecDeque;

const TWO_SLOTS: &str = r#"
[[policy]]
name = "slots"
match = { path = "/jobs/**" }
limit = { requests = 2, algorithm = "concurrency", lease_ttl = "1s" }
"#;
const LEASE_TTL: Duration = Duration::from_secs(1);

/// An upstream with responses that last until the test ends them.
struct SlowUpstream {
    upstream: Upstream,
    feeders: Arc<Mutex<VecDeque<BodySender>>>,
}

impl SlowUpstream {
    async fn start() -> Self {
        let feeders = Arc::<Mutex<VecDeque<BodySender>>>::default();
        let started = Arc::clone(&feeders);
        let upstream = Upstream::with_handler(move |request| {
            let (feeder, body) = channel_body();
            // A request for /jobs/quick ends at once.
            if !request.uri().path().ends_with("quick") {
                started.lock().unwrap().push_back(feeder);
            }
            async { UpstreamResponse::from(Response::new(body)) }
        });
        Self {
            upstream: upstream.await,
            feeders,
        }
    }

    async fn start_proxy(&self, server: Option<&RedisServer>, policies: &str) -> Proxy {
        let store = server.map_or(String::new(), |server| {
            let url = format!("redis://127.0.0.1:{}/0", server.port());
            format!("\n[store]\nkind = 'redis'\nredis.url = '{url}'\nredis.timeout = '2s'\nredis.key_prefix = 'c'\n")
        });
        Proxy::start(&format!("{policies}{store}"), self.upstream.address).await
    }

    /// Returns the sender of the oldest response body.
    fn take_oldest_body(&self) -> BodySender {
        self.feeders
            .lock()
            .unwrap()
            .pop_front()
            .expect("a request has reached the upstream")
    }
}

/// Begins a request as soon as a slot is free. A slot is returned a moment after its response ends.
async fn begin_when_free(proxy: &Proxy) -> RawClient {
    eventually("a free slot", TEST_TIMEOUT, async || {
        let (client, head) = send_request(proxy).await;
        head.starts_with(b"HTTP/1.1 200").then_some(client)
    })
    .await
}

async fn send_request(proxy: &Proxy) -> (RawClient, Vec<u8>) {
    let mut client = proxy
        .send_raw("GET /jobs/ HTTP/1.1\r\nHost: a\r\n\r\n")
        .await;
    let head = client.read_past(b"\r\n\r\n").await;
    (client, head)
}

/// Sends a request and waits until its response has begun.
async fn begin_request(proxy: &Proxy) -> RawClient {
    let (client, head) = send_request(proxy).await;
    assert!(
        head.starts_with(b"HTTP/1.1 200"),
        "{}",
        String::from_utf8_lossy(&head)
    );
    client
}

async fn send_quick_request(proxy: &Proxy) -> RawResponse {
    proxy.get("/jobs/quick").await
}

/// Returns the time until a request is admitted.
async fn wait_until_admitted(proxy: &Proxy) -> Duration {
    let start = Instant::now();
    wait_until("the slot", async || {
        send_quick_request(proxy).await.status == 200
    })
    .await;
    start.elapsed()
}

fn assert_rejected(reply: &RawResponse) {
    assert_eq!(reply.status, 429);
    assert_eq!(reply.header("retry-after"), Some("1"));
    assert_eq!(reply.header("ratelimit-policy"), Some("\"slots\";q=2"));
    assert_eq!(reply.header("ratelimit"), Some("\"slots\";r=0"));
    let problem: Value = serde_json::from_slice(&reply.body).unwrap();
    assert_eq!(problem["policy"], "slots");
    let found = problem.get("retry_after");
    assert_eq!(found, None, "the end of a request is unknown");
}

async fn assert_slots_are_taken_and_returned(server: Option<&RedisServer>) {
    let work = SlowUpstream::start().await;
    let proxy = work.start_proxy(server, TWO_SLOTS).await;
    let first = send_quick_request(&proxy).await;
    first
        .expect_status(200)
        .expect_header("ratelimit", "\"slots\";r=1");
    let (mut one, two) = (begin_when_free(&proxy).await, begin_when_free(&proxy).await);
    assert_rejected(&send_quick_request(&proxy).await);
    // Slots are renewed while the requests last, which is longer than a lease.
    let start = Instant::now();
    while start.elapsed() < LEASE_TTL * 5 / 2 {
        assert_rejected(&send_quick_request(&proxy).await);
        sleep(Duration::from_millis(50)).await;
    }
    // One request ends normally. The client of the other disconnects.
    drop(work.take_oldest_body());
    one.read_past(b"0\r\n\r\n").await;
    let three = begin_when_free(&proxy).await;
    assert_rejected(&send_quick_request(&proxy).await);
    drop(two);
    assert!(
        wait_until_admitted(&proxy).await < LEASE_TTL,
        "the slot was returned before its lease ended"
    );
    drop(three);
}

#[tokio::test]
async fn slots_are_taken_and_returned_in_memory() {
    assert_slots_are_taken_and_returned(None).await;
}

#[tokio::test]
async fn slots_are_taken_and_returned_in_redis() {
    let server = RedisServer::start();
    assert_slots_are_taken_and_returned(Some(&server)).await;
    let listed = list_counter_keys(&server).await;
    assert!(
        listed
            .iter()
            .all(|key| key.contains("}:concurrency:0:slots")),
        "{listed:?}"
    );
}

#[tokio::test]
async fn trap_16_the_slots_of_a_crashed_sidecar_return_only_when_its_lease_ends() {
    let (server, work) = (RedisServer::start(), SlowUpstream::start().await);
    let (crashing, proxy) = (
        work.start_proxy(Some(&server), TWO_SLOTS).await,
        work.start_proxy(Some(&server), TWO_SLOTS).await,
    );
    let begun = Instant::now();
    let _clients = (
        begin_request(&crashing).await,
        begin_request(&crashing).await,
    );
    assert_rejected(&send_quick_request(&proxy).await);
    drop(crashing);
    wait_until_admitted(&proxy).await;
    assert!(begun.elapsed() >= LEASE_TTL, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_client_that_disconnects_before_redis_replies_holds_no_slot() {
    let (server, work) = (RedisServer::start(), SlowUpstream::start().await);
    let proxy = work
        .start_proxy(Some(&server), &TWO_SLOTS.replace("1s", "1h"))
        .await;
    send_quick_request(&proxy).await;
    server.pause();
    for _ in 0..2 {
        let _client = proxy
            .send_raw("GET /jobs/ HTTP/1.1\r\nHost: a\r\n\r\n")
            .await;
        // Gives the worker time to send the call to Redis.
        sleep(Duration::from_millis(50)).await;
    }
    sleep(Duration::from_millis(50)).await;
    server.resume();
    let _both = (begin_when_free(&proxy).await, begin_when_free(&proxy).await);
}

#[tokio::test]
async fn a_stopping_proxy_releases_its_slots() {
    let (server, work) = (RedisServer::start(), SlowUpstream::start().await);
    let policies = format!("shutdown.grace = '200ms'\n{TWO_SLOTS}").replace("1s", "1h");
    let mut proxy = work.start_proxy(Some(&server), &policies).await;
    let _clients = (begin_request(&proxy).await, begin_request(&proxy).await);
    assert_eq!(list_counter_keys(&server).await.len(), 1);
    proxy.send_sigterm();
    proxy.wait_for_exit(TEST_TIMEOUT).await;
    assert_eq!(list_counter_keys(&server).await, Vec::<String>::new());
}

#[tokio::test]
async fn a_request_longer_than_max_duration_is_aborted() {
    let work = SlowUpstream::start().await;
    let policies = TWO_SLOTS.replace("lease_ttl = \"1s\"", "max_duration = \"300ms\"");
    let proxy = work.start_proxy(None, &policies).await;
    let start = Instant::now();
    let mut client = begin_request(&proxy).await;
    let feeder = work.take_oldest_body();
    feeder.send("some").await;
    let rest = client.read_to_close().await;
    assert!(start.elapsed() >= Duration::from_millis(300));
    assert!(
        !rest.ends_with(b"0\r\n\r\n"),
        "the aborted response looks complete"
    );
    timeout(TEST_TIMEOUT, feeder.wait_until_dropped())
        .await
        .expect("the upstream connection is closed");

    // Also before a response head has arrived.
    let silent = Upstream::with_handler(|_request| std::future::pending()).await;
    let proxy = Proxy::start(&policies, silent.address).await;
    let reply = send_quick_request(&proxy).await;
    assert_eq!(reply.status, 504);
    let problem: Value = serde_json::from_slice(&reply.body).unwrap();
    assert_eq!(
        problem["detail"],
        "The request took longer than its policy allows."
    );
}

#[tokio::test]
async fn a_response_close_to_max_duration_is_complete_or_504() {
    let upstream = Upstream::with_handler(|request| async move {
        let wait_us = request.uri().query().unwrap().parse().unwrap();
        sleep(Duration::from_micros(wait_us)).await;
        Response::new(full_body("ok"))
    })
    .await;
    let policies = "[[policy]]\nname = 'a'\n\
        limit = { algorithm = 'concurrency', requests = 500, max_duration = '500ms' }\n";
    let proxy = Proxy::start(policies, upstream.address).await;
    let mut clients = JoinSet::new();
    for wait_us in (486_000..501_000).step_by(100) {
        let mut client = RawClient::connect(proxy.address).await;
        clients.spawn(async move {
            client
                .send(format!("GET /?{wait_us} HTTP/1.1\r\nHost: a\r\n\r\n"))
                .await;
            (wait_us, client.read_response_or_close().await)
        });
    }
    while let Some(ended) = clients.join_next().await {
        let (wait_us, reply) = ended.unwrap();
        let reply = reply.unwrap_or_else(|| panic!("{wait_us} µs: closed without a byte"));
        let is_ok = reply.status == 504 || reply.text() == "ok";
        assert!(reply.complete && is_ok, "{wait_us} µs: {reply:?}");
    }
}

#[tokio::test]
async fn concurrency_combines_with_other_limits() {
    let work = SlowUpstream::start().await;
    let policies = TWO_SLOTS.replace(
        "limit = {",
        "limits = [{ requests = 3, per = \"1h\", name = \"hourly\" }, {",
    );
    let proxy = work
        .start_proxy(
            None,
            &policies.replace("lease_ttl = \"1s\" }", "name = \"slots\" }]"),
        )
        .await;
    let _two = (begin_request(&proxy).await, begin_request(&proxy).await);
    // Refused because no slot is free. The hourly limit is not charged.
    for _ in 0..3 {
        let reply = send_quick_request(&proxy).await;
        assert_eq!(reply.status, 429);
        assert_eq!(reply.remaining("hourly"), Some(1));
        let grows_in_s = reply.list_parameter("ratelimit", "hourly", "t").unwrap();
        assert!((3_000..=3_600).contains(&grows_in_s), "{grows_in_s}");
        assert_eq!(reply.remaining("slots"), Some(0));
    }
    drop(work.take_oldest_body());
    wait_until_admitted(&proxy).await;
    // Refused by the hourly limit, which takes no slot: the wait is that of the hour.
    let reply = send_quick_request(&proxy).await;
    assert!(
        reply.retry_after_us() > 3_000_000_000,
        "the retry_after of the hourly limit"
    );
    assert_eq!(reply.remaining("slots"), Some(1));
}
