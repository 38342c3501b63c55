//! Costs that only the response tells, as clients meet them: reserved, then settled.

use crate::support::TEST_TIMEOUT;
use crate::support::client::RawClient;
use crate::support::fake_redis::TcpRelay;
use crate::support::proxy::Proxy;
use crate::support::redis::{RedisServer, connect_redis, redis_settings};
use crate::support::upstream::{BodySender, Upstream, UpstreamResponse, channel_body, full_body};
use hyper::body::Incoming;
use hyper::{HeaderMap, Request, Response};
use std::net::SocketAddr;
use std::time::Duration;
use tidegate::limiter::{Algorithm, Amendment, Charge, Key, KeyBuilder, Limit};
use tidegate::store::Settlement;
use tidegate::store::redis::RedisSettings;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::{Instant, sleep, timeout};

/// A request reserves 100 of 1000. The period is so long that nothing comes back by itself.
const POLICIES: &str = r#"
[[policy]]
name = "body"
match = { path = "/body/**" }
limit = { requests = 1000, per = "100d", unit = "tokens" }
cost = { estimate = 100, actual = "response_json:/usage/total_tokens" }
[[policy]]
name = "head"
match = { path = "/head/**" }
limit = { requests = 1000, per = "100d" }
cost = { estimate = 100, actual = "response_header:x-units" }
"#;

/// Each gives back in its own way.
const ALGORITHMS: [&str; 4] = [
    "fixed_window",
    "sliding_log",
    "sliding_window",
    "token_bucket",
];

/// Every algorithm in both stores.
fn algorithms_and_stores() -> impl Iterator<Item = (&'static str, bool)> {
    ALGORITHMS
        .into_iter()
        .flat_map(|algorithm| [(algorithm, false), (algorithm, true)])
}
const LIMIT_UNITS: u64 = 1000;
const ESTIMATED_COST: u64 = 100;

/// A proxy in front of an upstream that answers by the path; what `fed` is asked for, the test feeds.
struct SettlementFixture {
    proxy: Proxy,
    upstream: Upstream,
    feeders: Receiver<BodySender>,
    config: String,
    redis: Option<RedisServer>,
}

impl SettlementFixture {
    async fn start(config: &str, redis: Option<RedisServer>) -> Self {
        let (send, feeders) = channel(1);
        let upstream =
            Upstream::with_handler(move |request| respond_by_path(request, send.clone())).await;
        let proxy = Proxy::start(config, upstream.address).await;
        Self {
            proxy,
            upstream,
            feeders,
            config: config.to_owned(),
            redis,
        }
    }

    /// One of [`everywhere`].
    async fn start_for((algorithm, in_redis): (&str, bool)) -> Self {
        let server = in_redis.then(RedisServer::start);
        let store = server
            .as_ref()
            .map(RedisServer::store_config)
            .unwrap_or_default();
        let config = format!("{store}\ndefaults = {{ algorithm = '{algorithm}' }}\n{POLICIES}");
        Self::start(&config, server).await
    }

    /// Whose feeder it is that comes next.
    async fn next_feeder(&mut self) -> BodySender {
        timeout(TEST_TIMEOUT, self.feeders.recv())
            .await
            .unwrap()
            .unwrap()
    }

    /// Ends when what `policy` has counted for requests that have ended is `used`. Each look reserves as they do, and gives it all back.
    async fn wait_for_used_units(&self, policy: &str, used: u64) {
        let look = format!("/{policy}/0");
        // What could be settled wrongly has been after this: settlements keep their order.
        self.proxy.get(&look).await;
        let mut seen = None;
        let came = timeout(TEST_TIMEOUT, async {
            loop {
                let left = self
                    .proxy
                    .get(&look)
                    .await
                    .list_parameter("ratelimit", policy, "r");
                if left == Some(LIMIT_UNITS - ESTIMATED_COST - used) {
                    return;
                }
                seen = left;
                sleep(Duration::from_millis(5)).await;
            }
        });
        let came = came.await;
        assert!(
            came.is_ok(),
            "{used} of {policy} were never used, at last {seen:?} were left: {}\n{}",
            self.config,
            self.proxy.log_text()
        );
    }
}

async fn respond_by_path(
    request: Request<Incoming>,
    feeders: Sender<BodySender>,
) -> UpstreamResponse {
    let path = request.uri().path().to_owned();
    let what = path.rsplit('/').next().unwrap_or_default();
    let json = |body: &str| {
        Response::builder()
            .header("content-type", "application/json")
            .body(full_body(body.to_owned()))
    };
    let usage = |units: &str| {
        format!(r#"{{"text":"\"total_tokens\":7","usage":{{"total_tokens":{units}}}}}"#)
    };
    let feed = async |media_type: &str| {
        let (feeder, body) = channel_body();
        feeders.send(feeder).await.unwrap();
        Response::builder()
            .header("content-type", media_type.to_owned())
            .body(body)
    };
    let answer = match (path.starts_with("/head/"), what) {
        (true, "none") => Response::builder().body(full_body("x")),
        (true, "odd") => Response::builder()
            .header("x-units", "1.5")
            .body(full_body("x")),
        (true, "fed") => feed("text/plain").await.map(|mut response| {
            response
                .headers_mut()
                .insert("trailer", "x-units".parse().unwrap());
            response
        }),
        (true, units) => Response::builder()
            .header("x-units", units)
            .body(full_body("x")),
        (_, "html") => Response::builder()
            .header("content-type", "text/html")
            .body(full_body(usage("7"))),
        (_, "gzip") => Response::builder()
            .header("content-type", "application/json")
            .header("content-encoding", "gzip")
            .body(full_body(usage("7"))),
        (_, "none") => json(r#"{"usage":{}}"#),
        (_, "cut") => json(r#"{"usage":{"total_tokens":7}"#),
        (_, "fed") => feed("application/json").await,
        (_, "events") => feed("text/event-stream").await,
        (_, units) => json(&usage(units)),
    };
    answer.unwrap()
}

#[tokio::test]
async fn a_json_cost_settles_above_and_below_the_estimate() {
    for place in algorithms_and_stores() {
        let scene = SettlementFixture::start_for(place).await;
        let first = scene.proxy.get("/body/12").await;
        assert_eq!(
            first.list_parameter("ratelimit", "body", "r"),
            Some(LIMIT_UNITS - ESTIMATED_COST),
            "the estimate is reserved"
        );
        assert_eq!(
            first.json()["usage"]["total_tokens"],
            12,
            "and the response is the upstream's"
        );
        scene.wait_for_used_units("body", 12).await;
        scene.proxy.get("/body/250").await;
        scene.wait_for_used_units("body", 262).await;
        scene.proxy.get("/body/100").await;
        scene.wait_for_used_units("body", 362).await;
    }
}

#[tokio::test]
async fn a_header_cost_settles_above_and_below_the_estimate_for_any_method() {
    for place in algorithms_and_stores() {
        let scene = SettlementFixture::start_for(place).await;
        scene.proxy.get("/head/12").await;
        assert_eq!(
            scene
                .proxy
                .request("HEAD", "/head/150")
                .send_for_status()
                .await,
            200
        );
        scene.wait_for_used_units("head", 162).await;
    }
}

#[tokio::test]
async fn the_last_event_with_a_cost_settles_and_events_are_not_delayed() {
    for place in algorithms_and_stores() {
        let mut scene = SettlementFixture::start_for(place).await;
        let mut client = RawClient::connect(scene.proxy.address).await;
        client
            .send("GET /body/events HTTP/1.1\r\nHost: a\r\n\r\n")
            .await;
        let feeder = scene.next_feeder().await;
        for piece in [
            "data: {\"text\":\"first\"}\n\n",
            "data: {\"usage\":{\"total_to",
            "kens\":5}}\r\n\r",
            "\ndata: {\"usage\":{\"total_tokens\":\ndata: 31",
            "}}\n\ndata: {\"usage\":null}\n\n",
            "data: [DONE]\n\n",
        ] {
            assert!(feeder.send(piece).await);
            client.read_past(piece.as_bytes()).await;
        }
        drop(feeder);
        client.read_past(b"0\r\n\r\n").await;
        scene.wait_for_used_units("body", 31).await;
    }
}

#[tokio::test]
async fn a_trailer_cost_settles() {
    for place in algorithms_and_stores() {
        let mut scene = SettlementFixture::start_for(place).await;
        let reply = tokio::spawn(
            scene
                .proxy
                .request("GET", "/head/fed")
                .header("TE", "trailers")
                .header("Connection", "TE")
                .send(),
        );
        let feeder = scene.next_feeder().await;
        assert!(feeder.send("x").await);
        feeder
            .send_trailers(HeaderMap::from_iter([(
                "x-units".parse().unwrap(),
                "17".parse().unwrap(),
            )]))
            .await;
        assert!(reply.await.unwrap().complete);
        scene.wait_for_used_units("head", 17).await;
    }
}

#[tokio::test]
async fn a_response_without_a_cost_keeps_the_estimate() {
    for place in algorithms_and_stores() {
        let scene = SettlementFixture::start_for(place).await;
        for path in [
            "/body/none",
            "/body/html",
            "/body/gzip",
            "/body/cut",
            "/body/-3",
        ] {
            assert_eq!(scene.proxy.get(path).await.status, 200);
        }
        assert_eq!(
            scene
                .proxy
                .request("HEAD", "/body/7")
                .send_for_status()
                .await,
            200
        );
        scene.wait_for_used_units("body", 6 * ESTIMATED_COST).await;
        for path in ["/head/none", "/head/odd"] {
            assert_eq!(scene.proxy.get(path).await.status, 200);
        }
        scene.wait_for_used_units("head", 2 * ESTIMATED_COST).await;
    }
}

#[tokio::test]
async fn an_incomplete_response_keeps_the_estimate() {
    let mut scene = SettlementFixture::start_for(("sliding_log", false)).await;
    let told = "data: {\"usage\":{\"total_tokens\":7}}\n\n";

    let mut leaver = RawClient::connect(scene.proxy.address).await;
    leaver
        .send("GET /body/events HTTP/1.1\r\nHost: a\r\n\r\n")
        .await;
    let feeder = scene.next_feeder().await;
    assert!(feeder.send(told).await);
    leaver.read_past(told.as_bytes()).await;
    drop(leaver);
    timeout(TEST_TIMEOUT, feeder.wait_until_dropped())
        .await
        .unwrap();
    scene.wait_for_used_units("body", ESTIMATED_COST).await;

    let reply = tokio::spawn(scene.proxy.request("GET", "/body/events").send());
    let feeder = scene.next_feeder().await;
    assert!(feeder.send(told).await);
    feeder.send_error().await;
    assert!(!reply.await.unwrap().complete);
    scene.wait_for_used_units("body", 2 * ESTIMATED_COST).await;
}

#[tokio::test]
async fn a_debt_makes_later_requests_wait() {
    for place in algorithms_and_stores() {
        let scene = SettlementFixture::start_for(place).await;
        scene.proxy.get("/body/5000").await;
        let refused = timeout(TEST_TIMEOUT, async {
            loop {
                let reply = scene.proxy.get("/body/none").await;
                if reply.status == 429 {
                    return reply;
                }
            }
        });
        let refused = refused.await.unwrap();
        assert_eq!(refused.list_parameter("ratelimit", "body", "r"), Some(0));
        assert!(refused.retry_after_us() > 0, "{}", refused.text());
    }
}

#[tokio::test]
async fn returned_units_admit_requests_that_were_refused_before() {
    for place in algorithms_and_stores() {
        let mut scene = SettlementFixture::start_for(place).await;
        let mut slow = Vec::new();
        for _ in 0..10 {
            let reply = tokio::spawn(scene.proxy.request("GET", "/body/fed").send());
            slow.push((scene.next_feeder().await, reply));
        }
        assert_eq!(
            scene.proxy.get("/body/0").await.status,
            429,
            "all is reserved"
        );
        for (feeder, reply) in slow {
            assert!(feeder.send(r#"{"usage":{"total_tokens":1}}"#).await);
            drop(feeder);
            assert!(reply.await.unwrap().complete);
        }
        let admitted = timeout(TEST_TIMEOUT, async {
            while scene.proxy.get("/body/none").await.status == 429 {
                sleep(Duration::from_millis(5)).await;
            }
        });
        assert!(admitted.await.is_ok(), "what was given back is not there");
        assert_eq!(scene.upstream.last_request().target, "/body/none");
    }
}

#[tokio::test]
async fn a_request_that_never_reached_the_upstream_is_not_charged() {
    let nobody: SocketAddr = "127.0.0.1:9".parse().unwrap();
    let proxy = Proxy::start(POLICIES, nobody).await;
    for _ in 0..3 {
        let reply = proxy.get("/body/x").await;
        assert_eq!(
            (reply.status, reply.list_parameter("ratelimit", "body", "r")),
            (502, Some(LIMIT_UNITS - ESTIMATED_COST))
        );
    }
}

#[tokio::test]
async fn pending_settlements_are_sent_before_shutdown() {
    let server = RedisServer::start();
    let config = format!("{}\n{POLICIES}", server.store_config());
    let mut scene = SettlementFixture::start(&config, Some(server)).await;
    let reply = tokio::spawn(scene.proxy.request("GET", "/body/fed").send());
    let feeder = scene.next_feeder().await;
    assert!(feeder.send(r#"{"usage":{"total_tokens":3}}"#).await);
    scene.proxy.send_sigterm();
    drop(feeder);
    assert!(reply.await.unwrap().complete);
    assert!(
        scene
            .proxy
            .wait_for_exit(TEST_TIMEOUT)
            .await
            .status
            .success()
    );
    scene.proxy = Proxy::start(&config, scene.upstream.address).await;
    scene.wait_for_used_units("body", 3).await;
}

#[tokio::test]
async fn lost_settlements_are_counted_and_the_estimate_stands() {
    let mut scene = SettlementFixture::start_for(("sliding_log", true)).await;
    let reply = tokio::spawn(scene.proxy.request("GET", "/body/fed").send());
    let feeder = scene.next_feeder().await;
    scene.redis.as_mut().unwrap().kill();
    assert!(feeder.send(r#"{"usage":{"total_tokens":3}}"#).await);
    drop(feeder);
    assert!(reply.await.unwrap().complete);
    let lost = timeout(TEST_TIMEOUT, async {
        while scene
            .proxy
            .read_metric("tidegate_settlements_lost_total")
            .await
            < 1.0
        {
            sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(lost.await.is_ok(), "nobody counts it");
    scene.redis.as_mut().unwrap().restart();
    scene.wait_for_used_units("body", 0).await;
    assert_eq!(
        scene
            .proxy
            .read_metric("tidegate_settlements_lost_total")
            .await,
        1.0,
        "what is told is not lost"
    );
}

#[tokio::test]
async fn a_client_cannot_avoid_settlement() {
    let mut scene = SettlementFixture::start_for(("sliding_log", false)).await;
    let asked = scene
        .proxy
        .request("GET", "/body/300")
        .header("accept-encoding", "gzip, br");
    asked
        .header("range", "bytes=0-")
        .header("if-range", "x")
        .send()
        .await;
    let seen = scene.upstream.last_request();
    assert_eq!(seen.single_header("accept-encoding"), "identity");
    assert!(seen.header_values("range").is_empty() && seen.header_values("if-range").is_empty());
    scene.wait_for_used_units("body", 300).await;

    // Nor does leaving once the bill has been read.
    let told = "data: {\"usage\":{\"total_tokens\":400}}\n\n";
    let mut leaver = RawClient::connect(scene.proxy.address).await;
    leaver
        .send("GET /body/events HTTP/1.1\r\nHost: a\r\n\r\n")
        .await;
    let feeder = scene.next_feeder().await;
    assert!(feeder.send(told).await);
    leaver.read_past(told.as_bytes()).await;
    drop(leaver);
    scene.wait_for_used_units("body", 700).await;
}

/// Through a network that takes its time.
#[tokio::test]
async fn settlements_are_pipelined_and_keep_their_order() {
    let server = RedisServer::start();
    let relay = TcpRelay::start(server.port()).await;
    let (_shared, redis) = connect_redis(RedisSettings {
        timeout: TEST_TIMEOUT,
        ..redis_settings(relay.port)
    })
    .await;
    let limit = Limit {
        requests: 1000,
        per_us: 3_600_000_000,
        algorithm: Algorithm::SlidingLog,
    };
    let keys: Vec<Key> = (0..80)
        .map(|nth| KeyBuilder::new(&format!("p{nth}")).finish())
        .collect();
    let mut amendments = Vec::new();
    for key in &keys {
        let decision = redis
            .decide(&[Charge::new(&limit, key, 100)], Instant::now())
            .await
            .unwrap();
        amendments.push((
            key,
            Amendment::Credit {
                units: 90,
                at_us: decision.now_us,
            },
        ));
        // Charged later, so nothing of it is given back.
        amendments.push((key, Amendment::Charge(7)));
    }
    let late: Vec<_> = amendments
        .iter()
        .map(|(key, amendment)| Settlement {
            limit: &limit,
            key,
            amendment: *amendment,
        })
        .collect();
    let trip = Duration::from_millis(50);
    relay.delay_replies(trip);
    // Forgotten programs are loaded once more, and what waits for that keeps its order.
    let _: () = server.command("SCRIPT FLUSH").await;
    let began = Instant::now();
    redis.amend(&late).await.unwrap();
    let took = began.elapsed();
    relay.forward_at_once();
    for key in &keys {
        let look = redis
            .decide(&[Charge::new(&limit, key, 0)], Instant::now())
            .await
            .unwrap();
        assert_eq!(look.statuses[0].unwrap().remaining, 1000 - 17);
    }
    assert!(took < trip * 80, "{took:?} for {} amendments", late.len());
}
