//! Costs that only the response reports: units are reserved with the request and settled with the
//! response.

use crate::support::prelude::*;
use hyper::HeaderMap;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::Instant;

/// A request reserves 100 of 1000 units. The period is so long that no unit returns by itself.
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

/// Each algorithm returns units in its own way.
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

/// A proxy in front of an upstream that answers by path. The test feeds the bodies of `/…/fed` and
/// `/…/events`.
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

    /// Starts one case of [`algorithms_and_stores`].
    async fn start_for((algorithm, in_redis): (&str, bool)) -> Self {
        let server = in_redis.then(RedisServer::start);
        let store = server
            .as_ref()
            .map(RedisServer::store_config)
            .unwrap_or_default();
        let config = format!("{store}\ndefaults = {{ algorithm = '{algorithm}' }}\n{POLICIES}");
        Self::start(&config, server).await
    }

    /// The sender for the body of the next such response.
    async fn next_feeder(&mut self) -> BodySender {
        in_time(self.feeders.recv()).await.unwrap()
    }

    /// Waits until finished requests have used `used` units of `policy`. Each probe reserves units
    /// and returns them all.
    async fn wait_for_used_units(&self, policy: &str, used: u64) {
        let probe = format!("/{policy}/0");
        // Settlements keep their order, so all earlier ones are applied after this probe.
        self.proxy.get(&probe).await;
        let wanted = Some(LIMIT_UNITS - ESTIMATED_COST - used);
        let what = format!("{used} used units of {policy}: {}", self.config);
        let is_reached = async || self.proxy.get(&probe).await.remaining(policy) == wanted;
        wait_until(what, is_reached).await;
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
            set_header(&mut response, "trailer", "x-units");
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
    for case in algorithms_and_stores() {
        let fixture = SettlementFixture::start_for(case).await;
        let first = fixture.proxy.get("/body/12").await;
        assert_eq!(
            first.remaining("body"),
            Some(LIMIT_UNITS - ESTIMATED_COST),
            "the estimate must be reserved"
        );
        assert_eq!(
            first.json()["usage"]["total_tokens"],
            12,
            "the response must be the upstream's"
        );
        fixture.wait_for_used_units("body", 12).await;
        fixture.proxy.get("/body/250").await;
        fixture.wait_for_used_units("body", 262).await;
        fixture.proxy.get("/body/100").await;
        fixture.wait_for_used_units("body", 362).await;
    }
}

#[tokio::test]
async fn a_header_cost_settles_above_and_below_the_estimate_for_any_method() {
    for case in algorithms_and_stores() {
        let fixture = SettlementFixture::start_for(case).await;
        fixture.proxy.get("/head/12").await;
        fixture
            .proxy
            .request("HEAD", "/head/150")
            .expect_status(200)
            .await;
        fixture.wait_for_used_units("head", 162).await;
    }
}

#[tokio::test]
async fn the_last_event_with_a_cost_settles_and_events_are_not_delayed() {
    for case in algorithms_and_stores() {
        let mut fixture = SettlementFixture::start_for(case).await;
        let mut client = fixture
            .proxy
            .send_raw("GET /body/events HTTP/1.1\r\nHost: a\r\n\r\n")
            .await;
        let feeder = fixture.next_feeder().await;
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
        fixture.wait_for_used_units("body", 31).await;
    }
}

#[tokio::test]
async fn a_trailer_cost_settles() {
    for case in algorithms_and_stores() {
        let mut fixture = SettlementFixture::start_for(case).await;
        let reply = tokio::spawn(
            fixture
                .proxy
                .request("GET", "/head/fed")
                .header("TE", "trailers")
                .header("Connection", "TE")
                .send(),
        );
        let feeder = fixture.next_feeder().await;
        assert!(feeder.send("x").await);
        feeder
            .send_trailers(HeaderMap::from_iter([(
                "x-units".parse().unwrap(),
                "17".parse().unwrap(),
            )]))
            .await;
        assert!(reply.await.unwrap().complete);
        fixture.wait_for_used_units("head", 17).await;
    }
}

#[tokio::test]
async fn a_response_without_a_cost_keeps_the_estimate() {
    for case in algorithms_and_stores() {
        let fixture = SettlementFixture::start_for(case).await;
        for path in [
            "/body/none",
            "/body/html",
            "/body/gzip",
            "/body/cut",
            "/body/-3",
        ] {
            assert_eq!(fixture.proxy.get(path).await.status, 200);
        }
        fixture
            .proxy
            .request("HEAD", "/body/7")
            .expect_status(200)
            .await;
        fixture
            .wait_for_used_units("body", 6 * ESTIMATED_COST)
            .await;
        for path in ["/head/none", "/head/odd"] {
            assert_eq!(fixture.proxy.get(path).await.status, 200);
        }
        fixture
            .wait_for_used_units("head", 2 * ESTIMATED_COST)
            .await;
    }
}

#[tokio::test]
async fn an_incomplete_response_keeps_the_estimate() {
    let mut fixture = SettlementFixture::start_for(("sliding_log", false)).await;
    let event = "data: {\"usage\":{\"total_tokens\":7}}\n\n";

    let mut leaver = fixture
        .proxy
        .send_raw("GET /body/events HTTP/1.1\r\nHost: a\r\n\r\n")
        .await;
    let feeder = fixture.next_feeder().await;
    assert!(feeder.send(event).await);
    leaver.read_past(event.as_bytes()).await;
    drop(leaver);
    in_time(feeder.wait_until_dropped()).await;
    fixture.wait_for_used_units("body", ESTIMATED_COST).await;

    let reply = tokio::spawn(fixture.proxy.request("GET", "/body/events").send());
    let feeder = fixture.next_feeder().await;
    assert!(feeder.send(event).await);
    feeder.send_error().await;
    assert!(!reply.await.unwrap().complete);
    fixture
        .wait_for_used_units("body", 2 * ESTIMATED_COST)
        .await;
}

#[tokio::test]
async fn a_debt_makes_later_requests_wait() {
    for case in algorithms_and_stores() {
        let fixture = SettlementFixture::start_for(case).await;
        fixture.proxy.get("/body/5000").await;
        let refused = eventually("a refusal", TEST_TIMEOUT, async || {
            let reply = fixture.proxy.get("/body/none").await;
            (reply.status == 429).then_some(reply)
        })
        .await;
        assert_eq!(refused.remaining("body"), Some(0));
        assert!(refused.retry_after_us() > 0, "{}", refused.text());
    }
}

#[tokio::test]
async fn returned_units_admit_requests_that_were_refused_before() {
    for case in algorithms_and_stores() {
        let mut fixture = SettlementFixture::start_for(case).await;
        let mut slow = Vec::new();
        for _ in 0..10 {
            let reply = tokio::spawn(fixture.proxy.request("GET", "/body/fed").send());
            slow.push((fixture.next_feeder().await, reply));
        }
        fixture
            .proxy
            .expect_status("/body/0", 429, "all units are reserved")
            .await;
        for (feeder, reply) in slow {
            assert!(feeder.send(r#"{"usage":{"total_tokens":1}}"#).await);
            drop(feeder);
            assert!(reply.await.unwrap().complete);
        }
        wait_until("the returned units", async || {
            fixture.proxy.get("/body/none").await.status != 429
        })
        .await;
        assert_eq!(fixture.upstream.last_request().target, "/body/none");
    }
}

#[tokio::test]
async fn a_request_that_never_reached_the_upstream_is_not_charged() {
    let unused_address: SocketAddr = "127.0.0.1:9".parse().unwrap();
    let proxy = Proxy::start(POLICIES, unused_address).await;
    for _ in 0..3 {
        let reply = proxy.get("/body/x").await;
        assert_eq!(reply.status, 502);
        assert_eq!(reply.remaining("body"), Some(LIMIT_UNITS - ESTIMATED_COST));
    }
}

#[tokio::test]
async fn pending_settlements_are_sent_before_shutdown() {
    let server = RedisServer::start();
    let config = format!("{}\n{POLICIES}", server.store_config());
    let mut fixture = SettlementFixture::start(&config, Some(server)).await;
    let reply = tokio::spawn(fixture.proxy.request("GET", "/body/fed").send());
    let feeder = fixture.next_feeder().await;
    assert!(feeder.send(r#"{"usage":{"total_tokens":3}}"#).await);
    fixture.proxy.send_sigterm();
    drop(feeder);
    assert!(reply.await.unwrap().complete);
    assert!(
        fixture
            .proxy
            .wait_for_exit(TEST_TIMEOUT)
            .await
            .status
            .success()
    );
    fixture.proxy = Proxy::start(&config, fixture.upstream.address).await;
    fixture.wait_for_used_units("body", 3).await;
}

#[tokio::test]
async fn lost_settlements_are_counted_and_the_estimate_stands() {
    let mut fixture = SettlementFixture::start_for(("sliding_log", true)).await;
    let reply = tokio::spawn(fixture.proxy.request("GET", "/body/fed").send());
    let feeder = fixture.next_feeder().await;
    fixture.redis.as_mut().unwrap().kill();
    assert!(feeder.send(r#"{"usage":{"total_tokens":3}}"#).await);
    drop(feeder);
    assert!(reply.await.unwrap().complete);
    wait_until("the lost settlement", async || {
        fixture
            .proxy
            .read_metric("tidegate_settlements_lost_total")
            .await
            >= 1.0
    })
    .await;
    fixture.redis.as_mut().unwrap().restart();
    fixture.wait_for_used_units("body", 0).await;
    assert_eq!(
        fixture
            .proxy
            .read_metric("tidegate_settlements_lost_total")
            .await,
        1.0,
        "a later settlement must not be counted as lost"
    );
}

#[tokio::test]
async fn a_client_cannot_avoid_settlement() {
    let mut fixture = SettlementFixture::start_for(("sliding_log", false)).await;
    let request = fixture
        .proxy
        .request("GET", "/body/300")
        .header("accept-encoding", "gzip, br");
    request
        .header("range", "bytes=0-")
        .header("if-range", "x")
        .send()
        .await;
    let seen = fixture.upstream.last_request();
    assert_eq!(seen.single_header("accept-encoding"), "identity");
    assert!(seen.header_values("range").is_empty() && seen.header_values("if-range").is_empty());
    fixture.wait_for_used_units("body", 300).await;

    // Nor does disconnecting after the cost has been read.
    let event = "data: {\"usage\":{\"total_tokens\":400}}\n\n";
    let mut leaver = fixture
        .proxy
        .send_raw("GET /body/events HTTP/1.1\r\nHost: a\r\n\r\n")
        .await;
    let feeder = fixture.next_feeder().await;
    assert!(feeder.send(event).await);
    leaver.read_past(event.as_bytes()).await;
    drop(leaver);
    fixture.wait_for_used_units("body", 700).await;
}

/// Uses a slow network.
#[tokio::test]
async fn settlements_are_pipelined_and_keep_their_order() {
    let server = RedisServer::start();
    let relay = TcpRelay::start(server.port()).await;
    let (_shared, redis) = connect_redis(RedisSettings {
        timeout: TEST_TIMEOUT,
        ..redis_settings(relay.port)
    })
    .await;
    let limit = sliding_log(1000, 3_600_000_000);
    let keys: Vec<Key> = (0..80)
        .map(|nth| KeyBuilder::new(&format!("p{nth}")).finish())
        .collect();
    let mut amendments = Vec::new();
    for key in &keys {
        let decision = redis
            .decide(&[PolicyCharges::new(&limit, key, 100)], Instant::now())
            .await
            .unwrap();
        amendments.push((
            key,
            Amendment::Credit {
                units: 90,
                at_us: decision.now_us,
            },
        ));
        // Charged after the credit's time, so the credit does not reduce it.
        amendments.push((key, Amendment::Charge(7)));
    }
    let settlements: Vec<_> = amendments
        .iter()
        .map(|(key, amendment)| Settlement {
            limit: &limit,
            key,
            amendment: *amendment,
        })
        .collect();
    let trip = Duration::from_millis(50);
    relay.delay_replies(trip);
    // Flushed scripts are loaded again, and the waiting settlements keep their order.
    server.run("SCRIPT FLUSH").await;
    let began = Instant::now();
    redis.apply_settlements(&settlements).await.unwrap();
    let took = began.elapsed();
    relay.forward_at_once();
    for key in &keys {
        let probe = redis
            .decide(&[PolicyCharges::new(&limit, key, 0)], Instant::now())
            .await
            .unwrap();
        assert_eq!(probe.statuses().next().unwrap().remaining, 1000 - 17);
    }
    assert!(
        took < trip * 80,
        "{took:?} for {} amendments",
        settlements.len()
    );
}
