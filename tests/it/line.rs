//! `leaky_bucket` as clients and upstreams meet it: requests are held until their turn.

use crate::support::SOON;
use crate::support::client::{RawClient, Reply};
use crate::support::proxy::Proxy;
use crate::support::redis::Server;
use crate::support::upstream::{Answer, Upstream, full};
use hyper::Response;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// A place every half second. Beside it a policy that only counts.
const LINE: &str = r#"
[[policy]]
name = "count"
limit = { requests = 1000, per = "1h" }
[[policy]]
name = "line"
match = { path = "/line/**" }
limit = { requests = 2, per = "1s", algorithm = "leaky_bucket", max_delay = "1s" }
"#;
const PLACE: Duration = Duration::from_millis(500);

/// An upstream that remembers when each request arrived.
async fn upstream() -> (Upstream, Arc<Mutex<Vec<Instant>>>) {
    let arrivals = Arc::<Mutex<Vec<Instant>>>::default();
    let seen = Arc::clone(&arrivals);
    let upstream = Upstream::serving(move |_request| {
        seen.lock().unwrap().push(Instant::now());
        async { Answer::from(Response::new(full("in".to_owned()))) }
    });
    (upstream.await, arrivals)
}

/// So many GETs at once, to each proxy in turn.
async fn at_once(proxies: &[Proxy], count: usize) -> Vec<Reply> {
    let mut asked = JoinSet::new();
    for n in 0..count {
        asked.spawn(proxies[n % proxies.len()].ask("GET", "/line/").send());
    }
    timeout(SOON, asked.join_all()).await.unwrap()
}

/// Ends when so many requests beside its own have been decided.
async fn until_decided(proxy: &Proxy, requests: u64) {
    let looked = timeout(SOON, async {
        let mut looks = 1;
        while proxy
            .get("/look")
            .await
            .parameter("ratelimit", "count", "r")
            != Some(1000 - requests - looks)
        {
            looks += 1;
        }
    });
    looked.await.unwrap();
}

/// Judged against the first moment at which one could have been decided: no delay on the way makes that earlier.
fn came_one_by_one(start: Instant, arrivals: &[Instant]) {
    for (place, arrival) in (0..).zip(arrivals) {
        let earliest = start + PLACE * place;
        assert!(
            *arrival >= earliest,
            "{place}: {:?} too early",
            earliest - *arrival
        );
    }
}

#[tokio::test]
async fn requests_leave_evenly_and_who_would_wait_too_long_is_refused() {
    let (upstream, arrivals) = upstream().await;
    let proxies = [Proxy::start(LINE, upstream.address).await];
    let start = Instant::now();
    let replies = at_once(&proxies, 8).await;
    let all_sent = start.elapsed();
    let (admitted, refused): (Vec<_>, Vec<_>) =
        replies.iter().partition(|reply| reply.status == 200);
    // Three places are within reach at once, and one more with every place that has passed.
    assert!(admitted.len() >= 3, "{}", admitted.len());
    assert!(admitted.len() <= 3 + (all_sent.as_millis() / PLACE.as_millis()) as usize);
    assert!(!refused.is_empty());
    for reply in refused {
        assert_eq!(reply.status, 429);
        assert_eq!(
            reply.header("ratelimit-policy"),
            Some("\"count\";q=1000;w=3600, \"line\";q=3;w=1")
        );
        assert_eq!(reply.header("retry-after"), Some("1"));
        assert!(
            reply.retry_after_us() <= 500_000,
            "a place is free after half a second"
        );
    }
    let arrivals = arrivals.lock().unwrap();
    assert_eq!(arrivals.len(), admitted.len());
    came_one_by_one(start, &arrivals);
}

#[tokio::test]
async fn proxies_that_share_a_redis_share_the_line() {
    let server = Server::start();
    let (upstream, arrivals) = upstream().await;
    let config = format!(
        "{LINE}\n[store]\nkind = 'redis'\nredis.url = 'redis://127.0.0.1:{}/0'\nredis.timeout = '5s'\nredis.key_prefix = 'line'\n",
        server.port()
    );
    let proxies = [
        Proxy::start(&config, upstream.address).await,
        Proxy::start(&config, upstream.address).await,
    ];
    let start = Instant::now();
    let replies = at_once(&proxies, 8).await;
    let admitted = replies.iter().filter(|reply| reply.status == 200).count();
    let arrivals = arrivals.lock().unwrap();
    assert!(
        admitted >= 3 && admitted == arrivals.len(),
        "{admitted} of {}",
        arrivals.len()
    );
    came_one_by_one(start, &arrivals);
}

#[tokio::test]
async fn who_leaves_is_not_forwarded_and_keeps_his_place() {
    let (upstream, _) = upstream().await;
    let proxy = Proxy::start(LINE, upstream.address).await;
    let start = Instant::now();
    assert_eq!(proxy.get("/line/first").await.status, 200);
    let mut leaver = RawClient::connect(proxy.address).await;
    leaver
        .send("GET /line/leaver HTTP/1.1\r\nHost: a\r\n\r\n")
        .await;
    until_decided(&proxy, 2).await;
    drop(leaver);
    assert_eq!(proxy.get("/line/third").await.status, 200);
    assert!(
        start.elapsed() >= PLACE * 2,
        "the leaver's place was given away"
    );
    let line = upstream
        .seen()
        .into_iter()
        .map(|seen| seen.target)
        .filter(|target| target != "/look");
    assert_eq!(line.collect::<Vec<_>>(), ["/line/first", "/line/third"]);
}

#[tokio::test]
async fn who_waits_is_counted_with_those_who_wait_for_the_upstream() {
    let (upstream, _) = upstream().await;
    let config = format!("listen.http.max_requests_waiting = 1\n{LINE}");
    let proxies = [Proxy::start(&config, upstream.address).await];
    let mut statuses: Vec<_> = at_once(&proxies, 3)
        .await
        .iter()
        .map(|reply| reply.status)
        .collect();
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 200, 503]);
}

#[tokio::test]
async fn the_held_are_let_out_before_the_proxy_ends() {
    let (upstream, _) = upstream().await;
    let mut proxy = Proxy::start(
        &LINE.replace("requests = 2", "requests = 1"),
        upstream.address,
    )
    .await;
    assert_eq!(proxy.get("/line/first").await.status, 200);
    let mut held = RawClient::connect(proxy.address).await;
    held.send("GET /line/held HTTP/1.1\r\nHost: a\r\n\r\n")
        .await;
    until_decided(&proxy, 2).await;
    proxy.sigterm();
    assert_eq!(held.reply().await.status, 200);
    assert_eq!(upstream.last().target, "/line/held");
    assert!(proxy.ended(SOON).await.status.success());
}
