//! `concurrency` as clients meet it: slots are taken by requests in flight, and come back whatever ends them.

use crate::support::SOON;
use crate::support::client::{RawClient, Reply};
use crate::support::proxy::Proxy;
use crate::support::redis::{Server, keys};
use crate::support::upstream::{Answer, Feeder, Upstream, fed};
use hyper::Response;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};

const TWO: &str = r#"
[[policy]]
name = "slots"
match = { path = "/jobs/**" }
limit = { requests = 2, algorithm = "concurrency", lease_ttl = "1s" }
"#;
const LEASE: Duration = Duration::from_secs(1);

/// An upstream whose responses go on until the test ends them.
struct Work {
    upstream: Upstream,
    feeders: Arc<Mutex<VecDeque<Feeder>>>,
}

impl Work {
    async fn start() -> Self {
        let feeders = Arc::<Mutex<VecDeque<Feeder>>>::default();
        let started = Arc::clone(&feeders);
        let upstream = Upstream::serving(move |request| {
            let (feeder, body) = fed();
            // What is asked for under /jobs/quick has ended already.
            if !request.uri().path().ends_with("quick") {
                started.lock().unwrap().push_back(feeder);
            }
            async { Answer::from(Response::new(body)) }
        });
        Self {
            upstream: upstream.await,
            feeders,
        }
    }

    async fn proxy(&self, server: Option<&Server>, policies: &str) -> Proxy {
        let store = server.map_or(String::new(), |server| {
            let url = format!("redis://127.0.0.1:{}/0", server.port());
            format!("\n[store]\nkind = 'redis'\nredis.url = '{url}'\nredis.timeout = '2s'\nredis.key_prefix = 'c'\n")
        });
        Proxy::start(&format!("{policies}{store}"), self.upstream.address).await
    }

    /// The oldest one's end.
    fn take(&self) -> Feeder {
        self.feeders
            .lock()
            .unwrap()
            .pop_front()
            .expect("a request has reached the upstream")
    }
}

/// A request whose response has begun, and goes on.
async fn begin(proxy: &Proxy) -> RawClient {
    let mut client = RawClient::connect(proxy.address).await;
    client.send("GET /jobs/ HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let head = client.read_past(b"\r\n\r\n").await;
    assert!(
        head.starts_with(b"HTTP/1.1 200"),
        "{}",
        String::from_utf8_lossy(&head)
    );
    client
}

async fn quick(proxy: &Proxy) -> Reply {
    proxy.get("/jobs/quick").await
}

/// How long until a request gets in.
async fn admitted_after(proxy: &Proxy) -> Duration {
    let start = Instant::now();
    let admitted = timeout(SOON, async {
        while quick(proxy).await.status != 200 {
            sleep(Duration::from_millis(5)).await;
        }
    });
    admitted.await.expect("the slot does not come back");
    start.elapsed()
}

fn is_refused(reply: &Reply) {
    assert_eq!(reply.status, 429);
    assert_eq!(reply.header("retry-after"), Some("1"));
    assert_eq!(reply.header("ratelimit-policy"), Some("\"slots\";q=2"));
    assert_eq!(reply.header("ratelimit"), Some("\"slots\";r=0"));
    let problem: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
    assert_eq!(problem["policy"], "slots");
    assert_eq!(problem.get("retry_after"), None, "nobody knows");
}

async fn slots_are_taken_and_come_back(server: Option<&Server>) {
    let work = Work::start().await;
    let proxy = work.proxy(server, TWO).await;
    let first = quick(&proxy).await;
    assert_eq!(
        (first.status, first.header("ratelimit")),
        (200, Some("\"slots\";r=1"))
    );
    admitted_after(&proxy).await;

    let (mut one, two) = (begin(&proxy).await, begin(&proxy).await);
    is_refused(&quick(&proxy).await);
    // Renewed for as long as they last, which is longer than a lease.
    let start = Instant::now();
    while start.elapsed() < LEASE * 5 / 2 {
        is_refused(&quick(&proxy).await);
        sleep(Duration::from_millis(50)).await;
    }
    // One ends well, of the other the client leaves.
    drop(work.take());
    one.read_past(b"0\r\n\r\n").await;
    admitted_after(&proxy).await;
    let three = begin(&proxy).await;
    is_refused(&quick(&proxy).await);
    drop(two);
    assert!(
        admitted_after(&proxy).await < LEASE,
        "it was given back, not left to lapse"
    );
    drop(three);
}

#[tokio::test]
async fn slots_are_taken_and_come_back_in_this_process() {
    slots_are_taken_and_come_back(None).await;
}

#[tokio::test]
async fn slots_are_taken_and_come_back_in_redis() {
    let server = Server::start();
    slots_are_taken_and_come_back(Some(&server)).await;
    let listed = keys(&server).await;
    assert!(
        listed
            .iter()
            .all(|key| key.contains("}:concurrency:0:slots")),
        "{listed:?}"
    );
}

#[tokio::test]
async fn trap_16_a_crashed_sidecars_slots_come_back_and_no_sooner_than_its_lease_ends() {
    let (server, work) = (Server::start(), Work::start().await);
    let (crashing, proxy) = (
        work.proxy(Some(&server), TWO).await,
        work.proxy(Some(&server), TWO).await,
    );
    let begun = Instant::now();
    let _clients = (begin(&crashing).await, begin(&crashing).await);
    is_refused(&quick(&proxy).await);
    drop(crashing);
    admitted_after(&proxy).await;
    assert!(begun.elapsed() >= LEASE, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn who_leaves_before_redis_has_answered_leaves_no_slot_taken() {
    let (server, work) = (Server::start(), Work::start().await);
    let proxy = work.proxy(Some(&server), &TWO.replace("1s", "1h")).await;
    quick(&proxy).await;
    server.stop();
    for _ in 0..2 {
        let mut client = RawClient::connect(proxy.address).await;
        client.send("GET /jobs/ HTTP/1.1\r\nHost: a\r\n\r\n").await;
        // The question is on its way when nothing more is read of the request.
        sleep(Duration::from_millis(50)).await;
    }
    sleep(Duration::from_millis(50)).await;
    server.resume();
    admitted_after(&proxy).await;
    let _both = (begin(&proxy).await, begin(&proxy).await);
}

#[tokio::test]
async fn an_ending_proxy_gives_back_what_it_held() {
    let (server, work) = (Server::start(), Work::start().await);
    let policies = format!("shutdown.grace = '200ms'\n{TWO}").replace("1s", "1h");
    let mut proxy = work.proxy(Some(&server), &policies).await;
    let _clients = (begin(&proxy).await, begin(&proxy).await);
    assert_eq!(keys(&server).await.len(), 1);
    proxy.sigterm();
    proxy.ended(SOON).await;
    assert_eq!(keys(&server).await, Vec::<String>::new());
}

#[tokio::test]
async fn what_takes_longer_than_max_duration_is_ended() {
    let work = Work::start().await;
    let policies = TWO.replace("lease_ttl = \"1s\"", "max_duration = \"300ms\"");
    let proxy = work.proxy(None, &policies).await;
    let start = Instant::now();
    let mut client = begin(&proxy).await;
    let feeder = work.take();
    feeder.send("some").await;
    let rest = client.rest().await;
    assert!(start.elapsed() >= Duration::from_millis(300));
    assert!(
        !rest.ends_with(b"0\r\n\r\n"),
        "a response that was cut looks whole"
    );
    timeout(SOON, feeder.gone())
        .await
        .expect("the upstream is told");

    // And before a head has come.
    let silent = Upstream::serving(|_request| std::future::pending()).await;
    let proxy = Proxy::start(&policies, silent.address).await;
    let reply = quick(&proxy).await;
    assert_eq!(reply.status, 504);
    let problem: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
    assert_eq!(
        problem["detail"],
        "The request took longer than its policy allows."
    );
}

#[tokio::test]
async fn a_slot_is_one_of_several_limits() {
    let work = Work::start().await;
    let policies = TWO.replace(
        "limit = {",
        "limits = [{ requests = 3, per = \"1h\", name = \"hourly\" }, {",
    );
    let proxy = work
        .proxy(
            None,
            &policies.replace("lease_ttl = \"1s\" }", "name = \"slots\" }]"),
        )
        .await;
    let _two = (begin(&proxy).await, begin(&proxy).await);
    // Refused for want of a slot, which uses nothing of the hour.
    for _ in 0..3 {
        let reply = quick(&proxy).await;
        assert_eq!(reply.status, 429);
        assert_eq!(
            reply.header("ratelimit"),
            Some("\"hourly\";r=1;t=1, \"slots\";r=0")
        );
    }
    drop(work.take());
    admitted_after(&proxy).await;
    // Refused by the hour, which takes no slot: one is still free when the hour is over.
    let reply = quick(&proxy).await;
    assert!(
        reply.retry_after_us() > 3_000_000_000,
        "the hour's, which is known"
    );
    assert_eq!(reply.parameter("ratelimit", "slots", "r"), Some(1));
}
