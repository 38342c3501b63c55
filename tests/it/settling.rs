//! Costs that only the response tells, as clients meet them: reserved, then settled.

use crate::support::SOON;
use crate::support::client::RawClient;
use crate::support::peer::Relay;
use crate::support::proxy::Proxy;
use crate::support::redis::{Server, ready, settings};
use crate::support::upstream::{Answer, Feeder, Upstream, fed, full};
use hyper::body::Incoming;
use hyper::{HeaderMap, Request, Response};
use std::net::SocketAddr;
use std::time::Duration;
use tidegate::limiter::{Algorithm, Amendment, Charge, Key, KeyBuilder, Limit};
use tidegate::store::Late;
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
fn everywhere() -> impl Iterator<Item = (&'static str, bool)> {
    ALGORITHMS
        .into_iter()
        .flat_map(|algorithm| [(algorithm, false), (algorithm, true)])
}
const ALL: u64 = 1000;
const ESTIMATE: u64 = 100;

/// A proxy in front of an upstream that answers by the path; what `fed` is asked for, the test feeds.
struct Scene {
    proxy: Proxy,
    upstream: Upstream,
    feeders: Receiver<Feeder>,
    config: String,
    redis: Option<Server>,
}

impl Scene {
    async fn with(config: &str, redis: Option<Server>) -> Self {
        let (send, feeders) = channel(1);
        let upstream = Upstream::serving(move |request| answer(request, send.clone())).await;
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
    async fn at((algorithm, in_redis): (&str, bool)) -> Self {
        let server = in_redis.then(Server::start);
        let store = server.as_ref().map(Server::as_store).unwrap_or_default();
        let config = format!("{store}\ndefaults = {{ algorithm = '{algorithm}' }}\n{POLICIES}");
        Self::with(&config, server).await
    }

    /// Whose feeder it is that comes next.
    async fn feeder(&mut self) -> Feeder {
        timeout(SOON, self.feeders.recv()).await.unwrap().unwrap()
    }

    /// Ends when what `policy` has counted for requests that have ended is `used`. Each look reserves as they do, and gives it all back.
    async fn comes_to(&self, policy: &str, used: u64) {
        let look = format!("/{policy}/0");
        // What could be settled wrongly has been after this: settlements keep their order.
        self.proxy.get(&look).await;
        let mut seen = None;
        let came = timeout(SOON, async {
            loop {
                let left = self
                    .proxy
                    .get(&look)
                    .await
                    .parameter("ratelimit", policy, "r");
                if left == Some(ALL - ESTIMATE - used) {
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
            self.proxy.log()
        );
    }
}

async fn answer(request: Request<Incoming>, feeders: Sender<Feeder>) -> Answer {
    let path = request.uri().path().to_owned();
    let what = path.rsplit('/').next().unwrap_or_default();
    let json = |body: &str| {
        Response::builder()
            .header("content-type", "application/json")
            .body(full(body.to_owned()))
    };
    let usage = |units: &str| {
        format!(r#"{{"text":"\"total_tokens\":7","usage":{{"total_tokens":{units}}}}}"#)
    };
    let feed = async |media_type: &str| {
        let (feeder, body) = fed();
        feeders.send(feeder).await.unwrap();
        Response::builder()
            .header("content-type", media_type.to_owned())
            .body(body)
    };
    let answer = match (path.starts_with("/head/"), what) {
        (true, "none") => Response::builder().body(full("x")),
        (true, "odd") => Response::builder().header("x-units", "1.5").body(full("x")),
        (true, "fed") => feed("text/plain").await.map(|mut response| {
            response
                .headers_mut()
                .insert("trailer", "x-units".parse().unwrap());
            response
        }),
        (true, units) => Response::builder().header("x-units", units).body(full("x")),
        (_, "html") => Response::builder()
            .header("content-type", "text/html")
            .body(full(usage("7"))),
        (_, "gzip") => Response::builder()
            .header("content-type", "application/json")
            .header("content-encoding", "gzip")
            .body(full(usage("7"))),
        (_, "none") => json(r#"{"usage":{}}"#),
        (_, "cut") => json(r#"{"usage":{"total_tokens":7}"#),
        (_, "fed") => feed("application/json").await,
        (_, "events") => feed("text/event-stream").await,
        (_, units) => json(&usage(units)),
    };
    answer.unwrap()
}

#[tokio::test]
async fn json_settles_up_and_down() {
    for place in everywhere() {
        let scene = Scene::at(place).await;
        let first = scene.proxy.get("/body/12").await;
        assert_eq!(
            first.parameter("ratelimit", "body", "r"),
            Some(ALL - ESTIMATE),
            "the estimate is reserved"
        );
        assert_eq!(
            first.json()["usage"]["total_tokens"],
            12,
            "and the response is the upstream's"
        );
        scene.comes_to("body", 12).await;
        scene.proxy.get("/body/250").await;
        scene.comes_to("body", 262).await;
        scene.proxy.get("/body/100").await;
        scene.comes_to("body", 362).await;
    }
}

#[tokio::test]
async fn a_header_settles_up_and_down_whatever_the_method() {
    for place in everywhere() {
        let scene = Scene::at(place).await;
        scene.proxy.get("/head/12").await;
        assert_eq!(scene.proxy.ask("HEAD", "/head/150").status().await, 200);
        scene.comes_to("head", 162).await;
    }
}

#[tokio::test]
async fn events_settle_by_the_last_that_tells_and_pass_at_once() {
    for place in everywhere() {
        let mut scene = Scene::at(place).await;
        let mut client = RawClient::connect(scene.proxy.address).await;
        client
            .send("GET /body/events HTTP/1.1\r\nHost: a\r\n\r\n")
            .await;
        let feeder = scene.feeder().await;
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
        scene.comes_to("body", 31).await;
    }
}

#[tokio::test]
async fn a_trailer_settles() {
    for place in everywhere() {
        let mut scene = Scene::at(place).await;
        let reply = tokio::spawn(
            scene
                .proxy
                .ask("GET", "/head/fed")
                .header("TE", "trailers")
                .header("Connection", "TE")
                .send(),
        );
        let feeder = scene.feeder().await;
        assert!(feeder.send("x").await);
        feeder
            .trailers(HeaderMap::from_iter([(
                "x-units".parse().unwrap(),
                "17".parse().unwrap(),
            )]))
            .await;
        assert!(reply.await.unwrap().complete);
        scene.comes_to("head", 17).await;
    }
}

#[tokio::test]
async fn a_response_that_does_not_say_leaves_the_estimate() {
    for place in everywhere() {
        let scene = Scene::at(place).await;
        for path in [
            "/body/none",
            "/body/html",
            "/body/gzip",
            "/body/cut",
            "/body/-3",
        ] {
            assert_eq!(scene.proxy.get(path).await.status, 200);
        }
        assert_eq!(scene.proxy.ask("HEAD", "/body/7").status().await, 200);
        scene.comes_to("body", 6 * ESTIMATE).await;
        for path in ["/head/none", "/head/odd"] {
            assert_eq!(scene.proxy.get(path).await.status, 200);
        }
        scene.comes_to("head", 2 * ESTIMATE).await;
    }
}

#[tokio::test]
async fn what_broke_off_leaves_the_estimate() {
    let mut scene = Scene::at(("sliding_log", false)).await;
    let told = "data: {\"usage\":{\"total_tokens\":7}}\n\n";

    let mut leaver = RawClient::connect(scene.proxy.address).await;
    leaver
        .send("GET /body/events HTTP/1.1\r\nHost: a\r\n\r\n")
        .await;
    let feeder = scene.feeder().await;
    assert!(feeder.send(told).await);
    leaver.read_past(told.as_bytes()).await;
    drop(leaver);
    timeout(SOON, feeder.gone()).await.unwrap();
    scene.comes_to("body", ESTIMATE).await;

    let reply = tokio::spawn(scene.proxy.ask("GET", "/body/events").send());
    let feeder = scene.feeder().await;
    assert!(feeder.send(told).await);
    feeder.fail().await;
    assert!(!reply.await.unwrap().complete);
    scene.comes_to("body", 2 * ESTIMATE).await;
}

#[tokio::test]
async fn a_debt_makes_later_requests_wait() {
    for place in everywhere() {
        let scene = Scene::at(place).await;
        scene.proxy.get("/body/5000").await;
        let refused = timeout(SOON, async {
            loop {
                let reply = scene.proxy.get("/body/none").await;
                if reply.status == 429 {
                    return reply;
                }
            }
        });
        let refused = refused.await.unwrap();
        assert_eq!(refused.parameter("ratelimit", "body", "r"), Some(0));
        assert!(refused.retry_after_us() > 0, "{}", refused.text());
    }
}

#[tokio::test]
async fn what_goes_back_is_felt_by_who_was_refused() {
    for place in everywhere() {
        let mut scene = Scene::at(place).await;
        let mut slow = Vec::new();
        for _ in 0..10 {
            let reply = tokio::spawn(scene.proxy.ask("GET", "/body/fed").send());
            slow.push((scene.feeder().await, reply));
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
        let admitted = timeout(SOON, async {
            while scene.proxy.get("/body/none").await.status == 429 {
                sleep(Duration::from_millis(5)).await;
            }
        });
        assert!(admitted.await.is_ok(), "what was given back is not there");
        assert_eq!(scene.upstream.last().target, "/body/none");
    }
}

#[tokio::test]
async fn a_request_that_never_reached_the_upstream_took_nothing() {
    let nobody: SocketAddr = "127.0.0.1:9".parse().unwrap();
    let proxy = Proxy::start(POLICIES, nobody).await;
    for _ in 0..3 {
        let reply = proxy.get("/body/x").await;
        assert_eq!(
            (reply.status, reply.parameter("ratelimit", "body", "r")),
            (502, Some(ALL - ESTIMATE))
        );
    }
}

#[tokio::test]
async fn a_proxy_that_ends_settles_first() {
    let server = Server::start();
    let config = format!("{}\n{POLICIES}", server.as_store());
    let mut scene = Scene::with(&config, Some(server)).await;
    let reply = tokio::spawn(scene.proxy.ask("GET", "/body/fed").send());
    let feeder = scene.feeder().await;
    assert!(feeder.send(r#"{"usage":{"total_tokens":3}}"#).await);
    scene.proxy.sigterm();
    drop(feeder);
    assert!(reply.await.unwrap().complete);
    assert!(scene.proxy.ended(SOON).await.status.success());
    scene.proxy = Proxy::start(&config, scene.upstream.address).await;
    scene.comes_to("body", 3).await;
}

#[tokio::test]
async fn what_redis_was_not_told_is_counted_and_the_estimate_stands() {
    let mut scene = Scene::at(("sliding_log", true)).await;
    let reply = tokio::spawn(scene.proxy.ask("GET", "/body/fed").send());
    let feeder = scene.feeder().await;
    scene.redis.as_mut().unwrap().kill();
    assert!(feeder.send(r#"{"usage":{"total_tokens":3}}"#).await);
    drop(feeder);
    assert!(reply.await.unwrap().complete);
    let lost = timeout(SOON, async {
        while scene.proxy.metric("tidegate_settlements_lost_total").await < 1.0 {
            sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(lost.await.is_ok(), "nobody counts it");
    scene.redis.as_mut().unwrap().restart();
    scene.comes_to("body", 0).await;
    assert_eq!(
        scene.proxy.metric("tidegate_settlements_lost_total").await,
        1.0,
        "what is told is not lost"
    );
}

#[tokio::test]
async fn a_client_does_not_choose_whether_its_cost_is_settled() {
    let mut scene = Scene::at(("sliding_log", false)).await;
    let asked = scene
        .proxy
        .ask("GET", "/body/300")
        .header("accept-encoding", "gzip, br");
    asked
        .header("range", "bytes=0-")
        .header("if-range", "x")
        .send()
        .await;
    let seen = scene.upstream.last();
    assert_eq!(seen.one("accept-encoding"), "identity");
    assert!(seen.all("range").is_empty() && seen.all("if-range").is_empty());
    scene.comes_to("body", 300).await;

    // Nor does leaving once the bill has been read.
    let told = "data: {\"usage\":{\"total_tokens\":400}}\n\n";
    let mut leaver = RawClient::connect(scene.proxy.address).await;
    leaver
        .send("GET /body/events HTTP/1.1\r\nHost: a\r\n\r\n")
        .await;
    let feeder = scene.feeder().await;
    assert!(feeder.send(told).await);
    leaver.read_past(told.as_bytes()).await;
    drop(leaver);
    scene.comes_to("body", 700).await;
}

/// Through a network that takes its time.
#[tokio::test]
async fn what_is_known_late_is_told_many_at_a_time_and_in_order() {
    let server = Server::start();
    let relay = Relay::to(server.port()).await;
    let (_shared, redis) = ready(RedisSettings {
        timeout: SOON,
        ..settings(relay.port)
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
        .map(|(key, amendment)| Late {
            limit: &limit,
            key,
            amendment: *amendment,
        })
        .collect();
    let trip = Duration::from_millis(50);
    relay.delay(trip);
    // Forgotten programs are loaded once more, and what waits for that keeps its order.
    let _: () = server.command("SCRIPT FLUSH").await;
    let began = Instant::now();
    redis.amend(&late).await.unwrap();
    let took = began.elapsed();
    relay.pass();
    for key in &keys {
        let look = redis
            .decide(&[Charge::new(&limit, key, 0)], Instant::now())
            .await
            .unwrap();
        assert_eq!(look.standings[0].unwrap().remaining, 1000 - 17);
    }
    assert!(took < trip * 80, "{took:?} for {} amendments", late.len());
}
