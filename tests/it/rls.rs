//! The rate-limit service by its protocol, asked by a gRPC client that is not ours. `tests/envoy.sh` has Envoy itself ask.

use crate::support::client::{Ask, RawClient, answered, http2, http2_over};
use crate::support::frames::{self, Framed, frame, head, rst};
use crate::support::process::{Process, tidegate};
use crate::support::proxy::Proxy;
use crate::support::redis::Server;
use crate::support::tls::{Authority, TlsClient};
use crate::support::upstream::Upstream;
use crate::support::{SOON, eventually};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2::SendRequest;
use messages::rate_limit_descriptor::{Entry, RateLimitOverride};
use messages::rate_limit_response::{Code as Is, DescriptorStatus, rate_limit::Unit};
use messages::{RateLimitDescriptor, RateLimitRequest, RateLimitResponse, UInt64Value};
use prost::Message;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

/// As they are made of `proto/rls.proto`.
#[allow(
    dead_code,
    clippy::all,
    reason = "written by `make proto`, with what only others need"
)]
#[path = "../../src/proxy/rls/messages.rs"]
mod messages;

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

const RLS: &str = "[rls]\naddress = '127.0.0.1:0'\n";

const USER: &str = "[[policy]]
name = 'user'
match = { domain = 'edge', descriptors = { user = '*' } }
key = ['descriptor:user']
limit = { requests = 2, per = '1h' }\n";

struct Service {
    proxy: Proxy,
    grpc: Grpc<Channel>,
}

impl Service {
    async fn start(config: &str) -> Self {
        Self::of(
            Proxy::builder()
                .config(&format!("{config}\n"))
                .start()
                .await,
        )
        .await
    }

    async fn of(proxy: Proxy) -> Self {
        let address = proxy
            .logged_address("rate-limit service listening")
            .expect("a rate-limit service");
        Self {
            grpc: connect(address).await,
            proxy,
        }
    }

    async fn ask(&mut self, asked: RateLimitRequest) -> Result<RateLimitResponse, Status> {
        call(&mut self.grpc, SHOULD_RATE_LIMIT, asked).await
    }

    fn address(&self) -> SocketAddr {
        self.proxy
            .logged_address("rate-limit service listening")
            .unwrap()
    }

    /// What a probe is told of this service: a status, or why none.
    async fn health(&mut self, service: &str) -> Result<i32, Code> {
        let asked = messages::HealthCheckRequest {
            service: service.into(),
        };
        let told = call(&mut self.grpc, "/grpc.health.v1.Health/Check", asked).await;
        told.map(|told: messages::HealthCheckResponse| told.status)
            .map_err(|status| status.code())
    }

    /// Asks about one descriptor.
    async fn one(&mut self, entries: &[(&str, &str)]) -> RateLimitResponse {
        self.ask(asked(&[of(entries)])).await.unwrap()
    }

    /// The overall codes of so many calls, one after the other.
    async fn codes(&mut self, descriptor: &RateLimitDescriptor, times: usize) -> Vec<Is> {
        let mut codes = Vec::new();
        for _ in 0..times {
            codes.push(self.ask(about(descriptor)).await.unwrap().overall_code());
        }
        codes
    }
}

async fn connect(address: SocketAddr) -> Grpc<Channel> {
    let channel = Endpoint::from_shared(format!("http://{address}"))
        .unwrap()
        .connect()
        .await
        .unwrap();
    Grpc::new(channel)
}

async fn call<Q, A>(grpc: &mut Grpc<Channel>, path: &'static str, asked: Q) -> Result<A, Status>
where
    Q: prost::Message + Send + Sync + 'static,
    A: prost::Message + Default + Send + Sync + 'static,
{
    grpc.ready().await.unwrap();
    let codec = ProstCodec::<Q, A>::default();
    let path = http::uri::PathAndQuery::from_static(path);
    let answer = tokio::time::timeout(SOON, grpc.unary(Request::new(asked), path, codec)).await;
    answer
        .expect("an answer in time")
        .map(tonic::Response::into_inner)
}

fn of(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entries = entries.iter().map(|(key, value)| Entry {
        key: (*key).into(),
        value: (*value).into(),
    });
    RateLimitDescriptor {
        entries: entries.collect(),
        ..Default::default()
    }
}

fn hits(descriptor: &RateLimitDescriptor, value: u64) -> RateLimitDescriptor {
    RateLimitDescriptor {
        hits_addend: Some(UInt64Value { value }),
        ..descriptor.clone()
    }
}

fn asked(descriptors: &[RateLimitDescriptor]) -> RateLimitRequest {
    RateLimitRequest {
        domain: "edge".into(),
        descriptors: descriptors.to_vec(),
        hits_addend: 0,
    }
}

fn about(descriptor: &RateLimitDescriptor) -> RateLimitRequest {
    asked(std::slice::from_ref(descriptor))
}

fn header<'a>(answer: &'a RateLimitResponse, name: &str) -> Option<&'a str> {
    let found = answer
        .response_headers_to_add
        .iter()
        .find(|header| header.key == name);
    found.map(|header| header.value.as_str())
}

fn status(answer: &RateLimitResponse) -> &DescriptorStatus {
    assert_eq!(answer.statuses.len(), 1);
    &answer.statuses[0]
}

#[tokio::test]
async fn a_descriptor_is_limited_by_its_values() {
    let mut service = Service::start(&format!("{RLS}{USER}")).await;
    let first = service.one(&[("user", "ann")]).await;
    assert_eq!(
        (first.overall_code(), status(&first).code()),
        (Is::Ok, Is::Ok)
    );
    let limit = status(&first).current_limit.clone().unwrap();
    assert_eq!(
        (limit.name.as_str(), limit.requests_per_unit, limit.unit()),
        ("user", 2, Unit::Hour)
    );
    assert_eq!(status(&first).limit_remaining, 1);
    assert!(
        header(&first, "ratelimit")
            .unwrap()
            .starts_with("\"user\";r=1;t="),
        "{first:?}"
    );
    assert_eq!(
        header(&first, "ratelimit-policy"),
        Some("\"user\";q=2;w=3600")
    );
    assert_eq!(
        (
            header(&first, "x-ratelimit-remaining"),
            header(&first, "retry-after")
        ),
        (Some("1"), None)
    );

    assert_eq!(service.one(&[("user", "ann")]).await.overall_code(), Is::Ok);
    let over = service.one(&[("user", "ann")]).await;
    assert_eq!(
        (over.overall_code(), status(&over).code()),
        (Is::OverLimit, Is::OverLimit)
    );
    assert_eq!(status(&over).limit_remaining, 0);
    let reset_s = status(&over).duration_until_reset.unwrap().seconds;
    assert!((3000..=3600).contains(&reset_s), "{reset_s}");
    let retry_after: i64 = header(&over, "retry-after").unwrap().parse().unwrap();
    assert!(
        (reset_s..=reset_s + 1).contains(&retry_after),
        "{retry_after} {reset_s}"
    );

    assert_eq!(service.one(&[("user", "bob")]).await.overall_code(), Is::Ok);
    for (code, count) in [
        ("ok", 3.0),
        ("over_limit", 1.0),
        ("unavailable", 0.0),
        ("invalid", 0.0),
    ] {
        let series = format!("tidegate_rls_calls_total{{result=\"{code}\"}}");
        assert_eq!(service.proxy.metric(&series).await, count, "{code}");
    }
    let rejected = "tidegate_requests_total{policy=\"user\",decision=\"rejected\"}";
    assert_eq!(service.proxy.metric(rejected).await, 1.0);
}

/// A rule of Envoy's own service is reached by all entries of a descriptor; one that says more is another.
#[tokio::test]
async fn what_no_policy_is_about_passes_and_is_counted() {
    let mut service = Service::start(&format!("{RLS}{USER}")).await;
    for _ in 0..3 {
        let more = service.one(&[("user", "ann"), ("path", "/")]).await;
        assert_eq!(
            (more.overall_code(), status(&more).current_limit.clone()),
            (Is::Ok, None)
        );
        let other = RateLimitRequest {
            domain: "other".into(),
            ..asked(&[of(&[("user", "ann")])])
        };
        assert_eq!(service.ask(other).await.unwrap().overall_code(), Is::Ok);
    }
    assert_eq!(
        service
            .proxy
            .metric("tidegate_rls_descriptors_unmet_total")
            .await,
        6.0
    );
}

#[tokio::test]
async fn requests_and_descriptors_have_policies_of_their_own() {
    let upstream = Upstream::echo().await;
    let config =
        format!("{RLS}{USER}[[policy]]\nname = 'all'\nlimit = {{ requests = 1, per = '1h' }}\n");
    let mut service = Service::of(
        Proxy::builder()
            .config(&config)
            .upstream(upstream.address)
            .start()
            .await,
    )
    .await;
    assert_eq!(
        service.codes(&of(&[("user", "ann")]), 2).await,
        [Is::Ok, Is::Ok]
    );
    assert_eq!(service.proxy.statuses("/?user=ann", 2).await, [200, 429]);
    assert_eq!(
        service.one(&[("user", "ann")]).await.overall_code(),
        Is::OverLimit
    );
}

#[tokio::test]
async fn hits_are_what_a_call_says_and_a_descriptor_says_it_better() {
    let config = USER.replace("requests = 2", "requests = 10");
    let mut service = Service::start(&format!("{RLS}{config}cost = 2\n")).await;
    let ann = of(&[("user", "ann")]);
    let of_call = RateLimitRequest {
        hits_addend: 2,
        ..about(&ann)
    };
    assert_eq!(
        service.ask(of_call.clone()).await.unwrap().statuses[0].limit_remaining,
        6
    );
    let of_descriptor = RateLimitRequest {
        descriptors: vec![hits(&ann, 3)],
        ..of_call.clone()
    };
    assert_eq!(
        service.ask(of_descriptor).await.unwrap().statuses[0].limit_remaining,
        0
    );
    assert_eq!(
        service.ask(of_call).await.unwrap().overall_code(),
        Is::OverLimit
    );
    let endless = asked(&[hits(&of(&[("user", "eve")]), u64::MAX)]);
    assert_eq!(
        service.ask(endless).await.unwrap().overall_code(),
        Is::OverLimit
    );
    assert_eq!(
        service.one(&[("user", "eve")]).await.statuses[0].limit_remaining,
        8
    );
}

/// What a budget of tokens needs: look before, charge when the response has told.
#[tokio::test]
async fn no_hits_are_a_look_that_charges_nothing() {
    let config = format!(
        "{RLS}{USER}count_rejected = true\n[[policy]]\nname = 'path'\nmatch = {{ domain = 'edge', descriptors = {{ path = '*' }} }}\nkey = ['descriptor:path']\nlimit = {{ requests = 5, per = '1h' }}\n"
    );
    let mut service = Service::start(&config).await;
    let (ann, path) = (of(&[("user", "ann")]), of(&[("path", "/")]));
    for _ in 0..3 {
        let looked = service.ask(asked(&[hits(&ann, 0)])).await.unwrap();
        assert_eq!(
            (looked.overall_code(), status(&looked).limit_remaining),
            (Is::Ok, 2)
        );
    }
    // A call that says 0 says nothing.
    let silent = RateLimitRequest {
        hits_addend: 0,
        ..about(&of(&[("user", "eve")]))
    };
    assert_eq!(
        service.ask(silent).await.unwrap().statuses[0].limit_remaining,
        1
    );
    let both = RateLimitRequest {
        hits_addend: 2,
        ..asked(&[hits(&of(&[("user", "eve")]), 0)])
    };
    assert_eq!(
        service.ask(both).await.unwrap().statuses[0].limit_remaining,
        1
    );
    // More than there is: refused, and all of it is used.
    assert_eq!(service.codes(&hits(&ann, 1), 1).await, [Is::Ok]);
    assert_eq!(service.codes(&hits(&ann, 2), 1).await, [Is::OverLimit]);
    let looked = service
        .ask(asked(&[hits(&ann, 0), path.clone()]))
        .await
        .unwrap();
    assert_eq!(looked.overall_code(), Is::OverLimit);
    assert_eq!(
        (looked.statuses[0].code(), looked.statuses[1].code()),
        (Is::OverLimit, Is::Ok)
    );
    assert!(header(&looked, "retry-after").is_some(), "{looked:?}");
    // Nobody was charged for what was refused, and a look that finds something lets the others be charged.
    let both = service
        .ask(asked(&[hits(&of(&[("user", "bob")]), 0), path]))
        .await
        .unwrap();
    assert_eq!(
        (both.overall_code(), both.statuses[1].limit_remaining),
        (Is::Ok, 4)
    );
}

#[tokio::test]
async fn all_descriptors_of_a_call_are_charged_or_none() {
    let config = format!(
        "{RLS}{USER}[[policy]]\nname = 'all'\nmatch = {{ domain = 'edge', descriptors = {{ generic_key = 'all' }} }}\nlimit = {{ requests = 3, per = '1h' }}\n"
    );
    let mut service = Service::start(&config).await;
    let call = asked(&[of(&[("user", "ann")]), of(&[("generic_key", "all")])]);
    for left in [2, 1] {
        let answer = service.ask(call.clone()).await.unwrap();
        assert_eq!(
            (answer.overall_code(), answer.statuses[1].limit_remaining),
            (Is::Ok, left)
        );
    }
    for _ in 0..3 {
        let answer = service.ask(call.clone()).await.unwrap();
        assert_eq!(answer.overall_code(), Is::OverLimit);
        assert_eq!(
            (answer.statuses[0].code(), answer.statuses[1].code()),
            (Is::OverLimit, Is::Ok)
        );
    }
    assert_eq!(
        service.one(&[("generic_key", "all")]).await.statuses[0].limit_remaining,
        0
    );
    // The same quota twice in one call is used twice.
    let twice = asked(&[of(&[("user", "bob")]), of(&[("user", "bob")])]);
    let answer = service.ask(twice.clone()).await.unwrap();
    assert_eq!(
        (answer.overall_code(), answer.statuses[0].limit_remaining),
        (Is::Ok, 0)
    );
    assert_eq!(
        service.ask(twice).await.unwrap().overall_code(),
        Is::OverLimit
    );
}

#[tokio::test]
async fn a_descriptor_may_bring_its_limit_along() {
    let mut service = Service::start(&format!("{RLS}{USER}")).await;
    let bringing = |user: &str, requests_per_unit, unit: Unit| RateLimitDescriptor {
        limit: Some(RateLimitOverride {
            requests_per_unit,
            unit: unit.into(),
        }),
        ..of(&[("user", user)])
    };
    let five = bringing("ann", 5, Unit::Hour);
    let codes = service.codes(&five, 6).await;
    assert_eq!(
        codes,
        [Is::Ok, Is::Ok, Is::Ok, Is::Ok, Is::Ok, Is::OverLimit]
    );
    let answer = service.ask(asked(&[five])).await.unwrap();
    let limit = status(&answer).current_limit.clone().unwrap();
    assert_eq!(
        (limit.requests_per_unit, limit.unit(), limit.name.as_str()),
        (5, Unit::Hour, "user")
    );
    // Its counter is its own.
    assert_eq!(
        service.codes(&of(&[("user", "ann")]), 3).await,
        [Is::Ok, Is::Ok, Is::OverLimit]
    );
    assert_eq!(
        service.codes(&bringing("bob", 0, Unit::Day), 1).await,
        [Is::OverLimit]
    );
    assert_eq!(
        service
            .codes(&bringing("bob", u32::MAX, Unit::Year), 1)
            .await,
        [Is::Ok]
    );
    let unknown = service
        .ask(asked(&[bringing("bob", 1, Unit::Unknown)]))
        .await
        .unwrap_err();
    assert_eq!(unknown.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn exemptions_denials_and_an_owners_words() {
    let config = format!(
        "{RLS}[[policy]]\nname = 'free'\nmatch = {{ domain = 'edge', descriptors = {{ user = 'root' }} }}\naction = 'allow'\n
        [[policy]]\nname = 'banned'\nmatch = {{ domain = 'edge', descriptors = {{ user = {{ regex = '^bad' }} }} }}\naction = 'deny'\nreject = {{ body = 'go away', content_type = 'text/plain', headers = {{ x-why = 'banned' }} }}\n
        {USER}override = [{{ key = ['acme'], limit = {{ requests = 4, per = '1h' }} }}]\n
        [[policy]]\nname = 'candidate'\nmode = 'shadow'\nmatch = {{ domain = 'edge', descriptors = {{ user = '*' }} }}\nlimit = {{ requests = 1, per = '1h' }}\n"
    );
    let mut service = Service::start(&config).await;
    assert_eq!(
        service.codes(&of(&[("user", "root")]), 5).await,
        [Is::Ok; 5]
    );
    let banned = service.one(&[("user", "bad guy")]).await;
    assert_eq!(
        (banned.overall_code(), status(&banned).code()),
        (Is::OverLimit, Is::OverLimit)
    );
    assert_eq!(
        (&*banned.raw_body, header(&banned, "x-why")),
        (&b"go away"[..], Some("banned"))
    );
    assert_eq!(header(&banned, "content-type"), Some("text/plain"));
    let acme = service.codes(&of(&[("user", "acme")]), 5).await;
    assert_eq!(acme, [Is::Ok, Is::Ok, Is::Ok, Is::Ok, Is::OverLimit]);
    let shadow = "tidegate_requests_total{policy=\"candidate\",decision=\"shadow_rejected\"}";
    assert!(service.proxy.metric(shadow).await >= 3.0);
}

#[tokio::test]
async fn what_is_no_proper_call_is_refused() {
    let mut service = Service::start(&format!("{RLS}{USER}")).await;
    let ann = of(&[("user", "ann")]);
    let negative = RateLimitDescriptor {
        is_negative_hits: true,
        ..ann.clone()
    };
    for wrong in [
        RateLimitRequest {
            domain: String::new(),
            ..about(&ann)
        },
        asked(&[]),
        asked(&[negative]),
        asked(&vec![ann.clone(); 65]),
        asked(&[of(&[("user", "ann"); 65])]),
    ] {
        assert_eq!(
            service.ask(wrong).await.unwrap_err().code(),
            Code::InvalidArgument
        );
    }
    let long = "x".repeat(100_000);
    let large = service
        .ask(asked(&[of(&[("user", &long)])]))
        .await
        .unwrap_err();
    assert_eq!(large.code(), Code::ResourceExhausted);
    let other = call::<_, RateLimitResponse>(
        &mut service.grpc,
        "/envoy.service.ratelimit.v3.RateLimitService/Other",
        asked(&[ann]),
    );
    assert_eq!(other.await.unwrap_err().code(), Code::Unimplemented);
    let address = service
        .proxy
        .logged_address("rate-limit service listening")
        .unwrap();
    assert_eq!(Ask::new(address, "GET", "/").send().await.status, 505);
    assert_eq!(
        service
            .proxy
            .metric("tidegate_rls_calls_total{result=\"invalid\"}")
            .await,
        7.0
    );
}

/// A message as it stands on the wire.
fn framed(message: impl Message) -> Vec<u8> {
    prefixed(0, &message.encode_to_vec())
}

fn prefixed(flags: u8, message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[flags], &length[..], message].concat()
}

/// Sends these bytes as a call: the HTTP status, that of gRPC wherever it stands, and the answer.
async fn send(
    client: &mut SendRequest<crate::support::client::ClientBody>,
    content_type: &str,
    body: Vec<u8>,
) -> (u16, Option<String>, Vec<u8>) {
    let request = hyper::Request::post(format!("http://tidegate{SHOULD_RATE_LIMIT}"));
    let request = request
        .header("content-type", content_type)
        .body(Full::new(Bytes::from(body)).boxed())
        .unwrap();
    let response = answered(client.send_request(request)).await;
    let status = response.status().as_u16();
    let code = |headers: &http::HeaderMap| {
        headers
            .get("grpc-status")
            .map(|code| code.to_str().unwrap().to_owned())
    };
    let in_head = code(response.headers());
    let body = tokio::time::timeout(SOON, response.into_body().collect())
        .await
        .unwrap()
        .unwrap();
    let code = in_head.or_else(|| body.trailers().and_then(code));
    (status, code, body.to_bytes().to_vec())
}

/// What one call over this connection is answered.
async fn one_call_over(stream: impl crate::support::client::Wire + 'static) -> Is {
    let mut client = http2_over(stream).await;
    let (status, code, body) = send(
        &mut client,
        "application/grpc",
        framed(about(&of(&[("user", "ann")]))),
    )
    .await;
    assert_eq!((status, code.as_deref()), (200, Some("0")));
    RateLimitResponse::decode(&body[5..])
        .unwrap()
        .overall_code()
}

#[tokio::test]
async fn bytes_that_are_no_call_are_refused_and_the_next_call_is_answered() {
    let service = Service::start(&format!("{RLS}{USER}")).await;
    let good = about(&of(&[("user", "ann")])).encode_to_vec();
    let mut client = http2(service.address()).await;
    let (invalid, unimplemented, exhausted) = ("3", "12", "8");
    let long = |by: u32| {
        [
            &[0],
            &(good.len() as u32).wrapping_add(by).to_be_bytes()[..],
            &good,
        ]
        .concat()
    };
    for (what, code, bytes) in [
        ("nothing", invalid, vec![]),
        ("half a prefix", invalid, vec![0, 0, 0]),
        (
            "a prefix that is longer than what follows",
            invalid,
            long(1),
        ),
        ("one that is shorter", invalid, long(u32::MAX)),
        (
            "the longest",
            invalid,
            [&[0, 255, 255, 255, 255], &good[..]].concat(),
        ),
        (
            "two messages",
            invalid,
            [prefixed(0, &good), prefixed(0, &good)].concat(),
        ),
        ("a compressed one", unimplemented, prefixed(1, &good)),
        ("an empty one, without a domain", invalid, prefixed(0, &[])),
        (
            "a field that is longer than the message",
            invalid,
            prefixed(0, &[10, 200, 1, b'x']),
        ),
        (
            "a text that is no UTF-8",
            invalid,
            prefixed(0, &[10, 2, 0xc3, 0x28]),
        ),
        (
            "an endless number",
            invalid,
            prefixed(
                0,
                &[24, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1],
            ),
        ),
        ("groups in groups", invalid, prefixed(0, &[0x7b; 60_000])),
        ("too much", exhausted, prefixed(0, &[0; 64 << 10])),
    ] {
        let (status, told, answer) = send(&mut client, "application/grpc", bytes).await;
        assert_eq!(
            (status, told.as_deref(), answer),
            (200, Some(code), vec![]),
            "{what}"
        );
    }
    // What it doesn't know it leaves alone.
    let more = [&good[..], &[0xfa, 0x3e, 1, b'x']].concat();
    assert_eq!(
        send(&mut client, "application/grpc", prefixed(0, &more))
            .await
            .1
            .as_deref(),
        Some("0")
    );
    for (content_type, expected) in [
        ("application/grpc+proto", 200),
        ("Application/GRPC; charset=utf-8", 200),
        ("application/grpc+json", 415),
        ("application/grpc-web", 415),
        ("application/grpcs", 415),
        ("application/json", 415),
    ] {
        let (status, ..) = send(&mut client, content_type, prefixed(0, &good)).await;
        assert_eq!(status, expected, "{content_type}");
    }
}

/// A call about ann, on this stream.
fn call_on(stream: u32) -> Vec<u8> {
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "tidegate"),
        (":path", SHOULD_RATE_LIMIT),
        ("content-type", "application/grpc"),
    ];
    let message = framed(about(&of(&[("user", "ann")])));
    [
        head(stream, &fields),
        frame(frames::DATA, frames::END_STREAM, stream, message),
    ]
    .concat()
}

/// Envoy gives up a call when its `timeout` is over, 20 ms if it says nothing. All that it has asked of a process that
/// did not get a turn for so long is given up before it is read.
#[tokio::test]
async fn calls_that_were_given_up_take_no_others_with_them() {
    let config = USER.replace("requests = 2", "requests = 100000");
    let service = Service::start(&format!("{RLS}{config}")).await;
    let mut envoy = Framed::connect(service.address(), &[]).await;
    let late = (0..900).map(|nth| 2 * nth + 1);
    assert!(
        envoy
            .send(
                late.flat_map(|id| [call_on(id), rst(id)].concat())
                    .collect::<Vec<_>>()
            )
            .await
    );
    assert!(envoy.send(call_on(2001)).await);
    let wanted = |frame: &frames::Frame| frame.kind == frames::GOAWAY || frame.stream == 2001;
    let answer = envoy.find("an answer", wanted).await;
    assert_eq!(
        (answer.kind, answer.status()),
        (frames::HEADERS, Some(200)),
        "{answer:?}"
    );
    // What is no call is a flood here, too.
    let pings: Vec<u8> = (0..20_000)
        .flat_map(|_| frame(frames::PING, 0, 0, [0; 8]))
        .collect();
    envoy.send(pings).await;
    let (closed, code) = envoy.end(SOON).await;
    assert!(
        closed && code.is_none_or(|code| code == frames::ENHANCE_YOUR_CALM),
        "{code:?}"
    );
}

#[tokio::test]
async fn a_call_that_is_given_up_while_the_store_is_asked_is_counted() {
    let redis = Server::start();
    let config = format!("{}\n{RLS}{USER}", redis.as_store());
    let service = Service::start(&config).await;
    service.proxy.store_up().await;
    redis.stop();
    let mut envoy = Framed::connect(service.address(), &[]).await;
    assert!(envoy.send(call_on(1)).await);
    // Once for it to be read, once more for it to be under way.
    for round in [1_u8, 2] {
        envoy.send(frame(frames::PING, 0, 0, [round; 8])).await;
        envoy
            .find("the ping's echo", |frame| {
                frame.kind == frames::PING && frame.payload == [round; 8]
            })
            .await;
    }
    envoy.send(rst(1)).await;
    let deadline = Instant::now() + SOON;
    while service
        .proxy
        .metric("tidegate_rls_calls_total{result=\"given_up\"}")
        .await
        != 1.0
    {
        assert!(Instant::now() < deadline, "{}", service.proxy.log());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    redis.resume();
    assert_eq!(
        service
            .proxy
            .metric("tidegate_rls_calls_total{result=\"unavailable\"}")
            .await,
        0.0
    );
}

#[tokio::test]
async fn health_is_told_and_that_it_ends() {
    let mut service = Service::start(&format!("[shutdown]\ndelay = '1h'\n{RLS}{USER}")).await;
    let (serving, not_serving) = (1, 2);
    for known in [
        "",
        "envoy.service.ratelimit.v3.RateLimitService",
        "ratelimit",
    ] {
        assert_eq!(service.health(known).await, Ok(serving), "{known}");
    }
    assert_eq!(service.health("other").await, Err(Code::NotFound));
    let mark = service.proxy.log_mark();
    service.proxy.sigterm();
    service
        .proxy
        .wait_for_log("the drain", mark, SOON, |line| line.says("stopping"))
        .await;
    assert_eq!(service.health("").await, Ok(not_serving));
    assert_eq!(service.health("ratelimit").await, Ok(not_serving));
    // Until everybody knows, it serves.
    assert_eq!(service.one(&[("user", "ann")]).await.overall_code(), Is::Ok);
    let address = service.address();
    let path = "/grpc.health.v1.Health/Check";
    let asked = messages::HealthCheckRequest::default();
    let told: messages::HealthCheckResponse = call(&mut connect(address).await, path, asked)
        .await
        .unwrap();
    assert_eq!(told.status, not_serving, "a new connection is told too");
}

#[tokio::test]
async fn who_calls_by_tls_shows_a_certificate() {
    let (ca, others) = (Authority::new(), Authority::new());
    ca.sign("rls", "rls.internal");
    ca.sign("envoy", "envoy");
    others.sign("envoy", "envoy");
    let tls = format!(
        "[rls.tls]\ncert = {:?}\nkey = {:?}\nclient_ca = {:?}\nclient_auth = 'require'\n",
        ca.text("rls.pem"),
        ca.text("rls.key"),
        ca.text("ca.pem")
    );
    let proxy = Proxy::builder()
        .config(&format!("{RLS}{tls}{USER}"))
        .start()
        .await;
    let address = proxy
        .logged_address("rate-limit service listening")
        .unwrap();
    let envoy =
        |signer: &Authority| TlsClient::with_certificate(&ca, signer, "envoy").offering(&["h2"]);
    for expected in [Is::Ok, Is::Ok, Is::OverLimit] {
        let stream = envoy(&ca).connect(address, "rls.internal").await.unwrap();
        assert_eq!(one_call_over(stream).await, expected);
    }
    // By TLS 1.3 a client learns with the first answer that it was not let in.
    for (stranger, kind) in [
        (TlsClient::new(&ca).offering(&["h2"]), "no_certificate"),
        (envoy(&others), "bad_certificate"),
    ] {
        if let Ok(stream) = stranger.connect(address, "rls.internal").await {
            let mut client = RawClient::over(stream);
            client
                .send([frames::PREFACE, &frame(frames::SETTINGS, 0, 0, [])].concat())
                .await;
            assert_eq!(client.first_bytes().await, Vec::<u8>::new(), "{kind}");
        }
        let series = format!("tidegate_tls_handshake_errors_total{{kind=\"{kind}\"}}");
        let deadline = Instant::now() + SOON;
        while proxy.metric(&series).await != 1.0 {
            assert!(Instant::now() < deadline, "{kind}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    let in_the_clear = RawClient::connect(address)
        .await
        .send(frames::PREFACE)
        .await
        .rest()
        .await;
    assert!(!in_the_clear.is_empty(), "it is told by an alert");

    // New certificates are taken while it runs.
    let old = std::fs::read(ca.path("rls.pem")).unwrap();
    let mark = proxy.log_mark();
    others.sign("rls", "rls.internal");
    for file in ["rls.key", "rls.pem"] {
        std::fs::copy(others.path(file), ca.path(file)).unwrap();
    }
    assert_ne!(std::fs::read(ca.path("rls.pem")).unwrap(), old);
    let told = proxy
        .wait_for_log("them", mark, SOON, |line| line.says("new certificates"))
        .await;
    assert_eq!(told.field("address"), address.to_string());
    assert!(
        envoy(&ca).connect(address, "rls.internal").await.is_err(),
        "another authority signed it"
    );
    let renewed = TlsClient::with_certificate(&others, &ca, "envoy").offering(&["h2"]);
    let stream = renewed.connect(address, "rls.internal").await.unwrap();
    assert_eq!(
        one_call_over(stream).await,
        Is::OverLimit,
        "the counters are the same"
    );
}

/// A process that only serves calls and questions, at sockets in `dir`.
async fn at_sockets(dir: &Path, config: &str) -> Process {
    let path = dir.join("config.toml");
    std::fs::write(
        &path,
        format!("admin = {{ address = '127.0.0.1:0' }}\n{config}"),
    )
    .unwrap();
    let process = Process::start(tidegate().arg("run").arg("--config").arg(&path)).unwrap();
    let listens = |text: &str| text.contains("\"listening\"").then_some(());
    process
        .wait_for("it to listen", 0, SOON, |line| listens(&line.text))
        .await;
    process
}

#[tokio::test]
async fn a_unix_socket_takes_calls() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("rls.sock");
    let config = format!("[rls]\naddress = 'unix:{}'\n{USER}", socket.display());
    let mut process = at_sockets(dir.path(), &config).await;
    for expected in [Is::Ok, Is::Ok, Is::OverLimit] {
        assert_eq!(
            one_call_over(UnixStream::connect(&socket).await.unwrap()).await,
            expected
        );
    }
    process.signal("TERM");
    assert!(process.ended(SOON).await.status.success());
    assert!(!socket.exists(), "the socket is gone");
}

#[tokio::test]
async fn a_call_is_in_the_access_log_with_its_trace() {
    let config = format!("[log]\naccess = 'all'\n{RLS}{USER}");
    let service = Service::start(&config).await;
    let mark = service.proxy.log_mark();
    let mut client = http2(service.address()).await;
    let request = hyper::Request::post(format!("http://tidegate{SHOULD_RATE_LIMIT}"))
        .header("content-type", "application/grpc")
        .header(
            "traceparent",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        );
    let call = about(&of(&[("user", "ann")]));
    assert_eq!(
        answered(
            client.send_request(
                request
                    .body(Full::new(Bytes::from(framed(call))).boxed())
                    .unwrap()
            )
        )
        .await
        .status(),
        200
    );
    let line = service
        .proxy
        .wait_for_log("the call", mark, SOON, |line| line.says("request"))
        .await;
    assert_eq!(
        (line.field("method"), line.field("host")),
        ("RLS".into(), "edge".into())
    );
    assert_eq!(
        (line.field("path"), line.field("remaining")),
        ("user=ann".into(), "1".into())
    );
    assert_eq!(line.field("trace_id"), "4bf92f3577b34da6a3ce929d0e0e4736");
}

/// Without an upstream there is no proxy: only who calls is served.
#[tokio::test]
async fn it_needs_no_upstream() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.toml");
    std::fs::write(
        &path,
        format!("admin = {{ address = '127.0.0.1:0' }}\n{RLS}{USER}"),
    )
    .unwrap();
    let mut command = crate::support::process::tidegate();
    let process =
        crate::support::process::Process::start(command.arg("run").arg("--config").arg(&path))
            .unwrap();
    let address: SocketAddr = process
        .wait_for("the service to listen", 0, SOON, |line| {
            let line: serde_json::Value = serde_json::from_str(&line.text).ok()?;
            let says = line["fields"]["message"] == "listening" || line["message"] == "listening";
            says.then(|| {
                line.get("address")
                    .or(line["fields"].get("address"))?
                    .as_str()?
                    .parse()
                    .ok()
            })?
        })
        .await;
    let mut grpc = connect(address).await;
    let answer: RateLimitResponse = call(
        &mut grpc,
        SHOULD_RATE_LIMIT,
        asked(&[of(&[("user", "ann")])]),
    )
    .await
    .unwrap();
    assert_eq!(answer.overall_code(), Is::Ok);
}

/// Then Envoy does what its own `failure_mode_deny` says; a policy that is `local` goes on.
#[tokio::test]
async fn without_its_store_it_is_unavailable_unless_a_policy_goes_on() {
    let mut redis = Server::start();
    let port = redis.port();
    let config = format!(
        "{RLS}[store]\nkind = 'redis'\n[store.redis]\nurl = 'redis://127.0.0.1:{port}/0'\nkey_prefix = 'test'\ninstances = 1\ntimeout = '1s'\n{USER}[[policy]]\nname = 'path'\nmatch = {{ domain = 'edge', descriptors = {{ path = '*' }} }}\nlimit = {{ requests = 2, per = '1h' }}\non_store_failure = 'local'\n"
    );
    let mut service = Service::start(&config).await;
    service.proxy.store_up().await;
    let (ann, path) = (of(&[("user", "ann")]), of(&[("path", "/")]));
    assert_eq!(service.codes(&ann, 1).await, [Is::Ok]);
    redis.kill();
    let away = service.ask(about(&ann)).await.unwrap_err();
    assert_eq!(
        (away.code(), away.message()),
        (Code::Unavailable, "the store gave no answer")
    );
    assert_eq!(
        service.codes(&path, 3).await,
        [Is::Ok, Is::Ok, Is::OverLimit]
    );
    // One that can't be decided is enough.
    let both = service.ask(asked(&[path, ann.clone()])).await.unwrap_err();
    assert_eq!(both.code(), Code::Unavailable);
    assert_eq!(
        service
            .proxy
            .metric("tidegate_rls_calls_total{result=\"unavailable\"}")
            .await,
        2.0
    );
    redis.restart_aside().await;
    let deadline = Instant::now() + SOON;
    while service.ask(about(&ann)).await.is_err() {
        assert!(Instant::now() < deadline, "{}", service.proxy.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Several processes count together.
#[tokio::test]
async fn a_limit_is_shared_through_redis() {
    let redis = Server::start();
    let config = format!(
        "{}\n{RLS}{}",
        redis.as_store(),
        USER.replace("requests = 2", "requests = 20")
    );
    let mut services = vec![Service::start(&config).await, Service::start(&config).await];
    for service in &services {
        service.proxy.store_up().await;
    }
    let mut admitted = 0;
    for at in 0..30 {
        let answer = services[at % 2].one(&[("user", "ann")]).await;
        admitted += usize::from(answer.overall_code() == Is::Ok);
    }
    assert_eq!(admitted, 20);
}

/// Whoever calls waits for nobody: calls of one connection are answered beside each other, and a drain ends in good order.
#[tokio::test]
async fn calls_share_a_connection_and_a_drain_ends_it() {
    let mut service = Service::start(&format!(
        "{RLS}{}",
        USER.replace("requests = 2", "requests = 50")
    ))
    .await;
    let calls = (0..100).map(|_| {
        let mut grpc = service.grpc.clone();
        tokio::spawn(async move {
            let asked = asked(&[of(&[("user", "ann")])]);
            call::<_, RateLimitResponse>(&mut grpc, SHOULD_RATE_LIMIT, asked)
                .await
                .unwrap()
        })
    });
    let mut ok = 0;
    for call in calls.collect::<Vec<_>>() {
        ok += usize::from(call.await.unwrap().overall_code() == Is::Ok);
    }
    assert_eq!(ok, 50);
    service.proxy.sigterm();
    let ended = service.proxy.ended(SOON).await;
    assert!(ended.status.success(), "{}", service.proxy.log());
    let log = eventually("the end to be told", SOON, || Some(service.proxy.log())).await;
    assert!(
        log.contains("\"connections_cut\":0") || log.contains("connections_cut=0"),
        "{log}"
    );
}
