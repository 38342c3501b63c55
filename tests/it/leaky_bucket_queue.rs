//! `leaky_bucket` end to end: requests are queued until their turn.

use crate::support::prelude::*;

/// One queue slot every half second, and a second policy that only counts.
const QUEUE_POLICIES: &str = r#"
[[policy]]
name = "count"
limit = { requests = 1000, per = "1h" }
[[policy]]
name = "line"
match = { path = "/line/**" }
limit = { requests = 2, per = "1s", algorithm = "leaky_bucket", max_delay = "1s" }
"#;
const QUEUE_INTERVAL: Duration = Duration::from_millis(500);

/// An upstream that records when each request arrived.
async fn start_recording_upstream() -> (Upstream, Arc<Mutex<Vec<Instant>>>) {
    let arrivals = Arc::<Mutex<Vec<Instant>>>::default();
    let seen = Arc::clone(&arrivals);
    let upstream = Upstream::with_handler(move |_request| {
        seen.lock().unwrap().push(Instant::now());
        async { UpstreamResponse::from(Response::new(full_body("in".to_owned()))) }
    });
    (upstream.await, arrivals)
}

/// Sends this many GETs at the same time, to each proxy in turn.
async fn send_concurrently(proxies: &[Proxy], count: usize) -> Vec<RawResponse> {
    let mut asked = JoinSet::new();
    for n in 0..count {
        asked.spawn(proxies[n % proxies.len()].request("GET", "/line/").send());
    }
    in_time(asked.join_all()).await
}

/// Waits until the proxy has decided this many requests besides its own.
async fn wait_until_decided(proxy: &Proxy, requests: u64) {
    let looked = timeout(TEST_TIMEOUT, async {
        let mut looks = 1;
        while proxy.get("/look").await.remaining("count") != Some(1000 - requests - looks) {
            looks += 1;
        }
    });
    looked.await.unwrap();
}

/// Compares with the earliest possible decision time. A delay in transit never makes an arrival
/// earlier.
fn assert_evenly_spaced(start: Instant, arrivals: &[Instant]) {
    for (place, arrival) in (0..).zip(arrivals) {
        let earliest = start + QUEUE_INTERVAL * place;
        assert!(
            *arrival >= earliest,
            "{place}: {:?} too early",
            earliest - *arrival
        );
    }
}

#[tokio::test]
async fn requests_are_released_evenly_and_excess_requests_are_refused() {
    let (upstream, arrivals) = start_recording_upstream().await;
    let proxies = [Proxy::start(QUEUE_POLICIES, upstream.address).await];
    let start = Instant::now();
    let replies = send_concurrently(&proxies, 8).await;
    let all_sent = start.elapsed();
    let (admitted, refused): (Vec<_>, Vec<_>) =
        replies.iter().partition(|reply| reply.status == 200);
    // Three queue slots are available at once, and one more after each interval.
    assert!(admitted.len() >= 3, "{}", admitted.len());
    assert!(admitted.len() <= 3 + (all_sent.as_millis() / QUEUE_INTERVAL.as_millis()) as usize);
    assert!(!refused.is_empty());
    for reply in refused {
        assert_eq!(reply.status, 429);
        reply.expect_header(
            "ratelimit-policy",
            "\"count\";q=1000;w=3600, \"line\";q=3;w=1",
        );
        assert_eq!(reply.header("retry-after"), Some("1"));
        assert!(
            reply.retry_after_us() <= 500_000,
            "a queue slot is free after half a second"
        );
    }
    let arrivals = arrivals.lock().unwrap();
    assert_eq!(arrivals.len(), admitted.len());
    assert_evenly_spaced(start, &arrivals);
}

#[tokio::test]
async fn proxies_that_share_a_redis_share_the_queue() {
    let server = RedisServer::start();
    let (upstream, arrivals) = start_recording_upstream().await;
    let config = format!(
        "{QUEUE_POLICIES}\n[store]\nkind = 'redis'\nredis.url = 'redis://127.0.0.1:{}/0'\nredis.timeout = '5s'\nredis.key_prefix = 'line'\n",
        server.port()
    );
    let proxies = [
        Proxy::start(&config, upstream.address).await,
        Proxy::start(&config, upstream.address).await,
    ];
    let start = Instant::now();
    let replies = send_concurrently(&proxies, 8).await;
    let admitted = replies.iter().filter(|reply| reply.status == 200).count();
    let arrivals = arrivals.lock().unwrap();
    assert!(
        admitted >= 3 && admitted == arrivals.len(),
        "{admitted} of {}",
        arrivals.len()
    );
    assert_evenly_spaced(start, &arrivals);
}

#[tokio::test]
async fn a_disconnected_client_is_not_forwarded_and_its_queue_slot_stays_consumed() {
    let (upstream, _) = start_recording_upstream().await;
    let proxy = Proxy::start(QUEUE_POLICIES, upstream.address).await;
    let start = Instant::now();
    assert_eq!(proxy.get("/line/first").await.status, 200);
    let leaver = proxy
        .send_raw("GET /line/leaver HTTP/1.1\r\nHost: a\r\n\r\n")
        .await;
    wait_until_decided(&proxy, 2).await;
    drop(leaver);
    assert_eq!(proxy.get("/line/third").await.status, 200);
    assert!(
        start.elapsed() >= QUEUE_INTERVAL * 2,
        "the disconnected client's queue slot was reused"
    );
    let line = upstream
        .requests()
        .into_iter()
        .map(|seen| seen.target)
        .filter(|target| target != "/look");
    assert_eq!(line.collect::<Vec<_>>(), ["/line/first", "/line/third"]);
}

#[tokio::test]
async fn queued_requests_count_towards_max_requests_waiting() {
    let (upstream, _) = start_recording_upstream().await;
    let config = format!("listen.http.max_requests_waiting = 1\n{QUEUE_POLICIES}");
    let proxies = [Proxy::start(&config, upstream.address).await];
    let mut statuses: Vec<_> = send_concurrently(&proxies, 3)
        .await
        .iter()
        .map(|reply| reply.status)
        .collect();
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 200, 503]);
}

#[tokio::test]
async fn queued_requests_are_forwarded_before_the_proxy_exits() {
    let (upstream, _) = start_recording_upstream().await;
    let mut proxy = Proxy::start(
        &QUEUE_POLICIES.replace("requests = 2", "requests = 1"),
        upstream.address,
    )
    .await;
    assert_eq!(proxy.get("/line/first").await.status, 200);
    let mut held = proxy
        .send_raw("GET /line/held HTTP/1.1\r\nHost: a\r\n\r\n")
        .await;
    wait_until_decided(&proxy, 2).await;
    proxy.send_sigterm();
    assert_eq!(held.read_response().await.status, 200);
    assert_eq!(upstream.last_request().target, "/line/held");
    assert!(proxy.wait_for_exit(TEST_TIMEOUT).await.status.success());
}
