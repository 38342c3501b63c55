//! The rate-limit service by its protocol, asked by a gRPC client that is not ours. `tests/envoy.sh` has Envoy itself ask.

use crate::support::client::{
    ClientRequest, RawClient, await_response, open_http2_connection, open_http2_over_stream,
};
use crate::support::h2_frames::{
    self, FrameClient, encode_frame, request_head_frame, rst_stream_frame,
};
use crate::support::process::{ChildProcess, tidegate_command};
use crate::support::proxy::Proxy;
use crate::support::redis::RedisServer;
use crate::support::tls::{CertificateAuthority, TlsClient};
use crate::support::upstream::Upstream;
use crate::support::{TEST_TIMEOUT, eventually};
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
#[path = "../../src/proxy/rate_limit_service/messages.rs"]
mod messages;

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

const RLS_LISTENER: &str = "[rls]\naddress = '127.0.0.1:0'\n";

const USER_POLICY: &str = "[[policy]]
name = 'user'
match = { domain = 'edge', descriptors = { user = '*' } }
key = ['descriptor:user']
limit = { requests = 2, per = '1h' }\n";

struct ServiceClient {
    proxy: Proxy,
    grpc: Grpc<Channel>,
}

impl ServiceClient {
    async fn start(config: &str) -> Self {
        Self::from_proxy(
            Proxy::builder()
                .config(&format!("{config}\n"))
                .start()
                .await,
        )
        .await
    }

    async fn from_proxy(proxy: Proxy) -> Self {
        let address = proxy
            .logged_address("rate-limit service listening")
            .expect("a rate-limit service");
        Self {
            grpc: connect(address).await,
            proxy,
        }
    }

    async fn should_rate_limit(
        &mut self,
        asked: RateLimitRequest,
    ) -> Result<RateLimitResponse, Status> {
        call_unary(&mut self.grpc, SHOULD_RATE_LIMIT, asked).await
    }

    fn address(&self) -> SocketAddr {
        self.proxy
            .logged_address("rate-limit service listening")
            .unwrap()
    }

    /// What a probe is told of this service: a status, or why none.
    async fn check_health(&mut self, service: &str) -> Result<i32, Code> {
        let asked = messages::HealthCheckRequest {
            service: service.into(),
        };
        let told = call_unary(&mut self.grpc, "/grpc.health.v1.Health/Check", asked).await;
        told.map(|told: messages::HealthCheckResponse| told.status)
            .map_err(|status| status.code())
    }

    /// Asks about one descriptor.
    async fn ask_one_descriptor(&mut self, entries: &[(&str, &str)]) -> RateLimitResponse {
        self.should_rate_limit(make_request(&[make_descriptor(entries)]))
            .await
            .unwrap()
    }

    /// The overall codes of so many calls, one after the other.
    async fn repeat_for_codes(
        &mut self,
        descriptor: &RateLimitDescriptor,
        times: usize,
    ) -> Vec<Is> {
        let mut codes = Vec::new();
        for _ in 0..times {
            codes.push(
                self.should_rate_limit(single_descriptor_request(descriptor))
                    .await
                    .unwrap()
                    .overall_code(),
            );
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

async fn call_unary<Q, A>(
    grpc: &mut Grpc<Channel>,
    path: &'static str,
    asked: Q,
) -> Result<A, Status>
where
    Q: prost::Message + Send + Sync + 'static,
    A: prost::Message + Default + Send + Sync + 'static,
{
    grpc.ready().await.unwrap();
    let codec = ProstCodec::<Q, A>::default();
    let path = http::uri::PathAndQuery::from_static(path);
    let answer =
        tokio::time::timeout(TEST_TIMEOUT, grpc.unary(Request::new(asked), path, codec)).await;
    answer
        .expect("an answer in time")
        .map(tonic::Response::into_inner)
}

fn make_descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entries = entries.iter().map(|(key, value)| Entry {
        key: (*key).into(),
        value: (*value).into(),
    });
    RateLimitDescriptor {
        entries: entries.collect(),
        ..Default::default()
    }
}

fn with_hits(descriptor: &RateLimitDescriptor, value: u64) -> RateLimitDescriptor {
    RateLimitDescriptor {
        hits_addend: Some(UInt64Value { value }),
        ..descriptor.clone()
    }
}

fn make_request(descriptors: &[RateLimitDescriptor]) -> RateLimitRequest {
    RateLimitRequest {
        domain: "edge".into(),
        descriptors: descriptors.to_vec(),
        hits_addend: 0,
    }
}

fn single_descriptor_request(descriptor: &RateLimitDescriptor) -> RateLimitRequest {
    make_request(std::slice::from_ref(descriptor))
}

fn response_header<'a>(answer: &'a RateLimitResponse, name: &str) -> Option<&'a str> {
    let found = answer
        .response_headers_to_add
        .iter()
        .find(|header| header.key == name);
    found.map(|header| header.value.as_str())
}

fn single_status(answer: &RateLimitResponse) -> &DescriptorStatus {
    assert_eq!(answer.statuses.len(), 1);
    &answer.statuses[0]
}

#[tokio::test]
async fn a_descriptor_is_limited_by_its_values() {
    let mut service = ServiceClient::start(&format!("{RLS_LISTENER}{USER_POLICY}")).await;
    let first = service.ask_one_descriptor(&[("user", "ann")]).await;
    assert_eq!(
        (first.overall_code(), single_status(&first).code()),
        (Is::Ok, Is::Ok)
    );
    let limit = single_status(&first).current_limit.clone().unwrap();
    assert_eq!(
        (limit.name.as_str(), limit.requests_per_unit, limit.unit()),
        ("user", 2, Unit::Hour)
    );
    assert_eq!(single_status(&first).limit_remaining, 1);
    assert!(
        response_header(&first, "ratelimit")
            .unwrap()
            .starts_with("\"user\";r=1;t="),
        "{first:?}"
    );
    assert_eq!(
        response_header(&first, "ratelimit-policy"),
        Some("\"user\";q=2;w=3600")
    );
    assert_eq!(
        (
            response_header(&first, "x-ratelimit-remaining"),
            response_header(&first, "retry-after")
        ),
        (Some("1"), None)
    );

    assert_eq!(
        service
            .ask_one_descriptor(&[("user", "ann")])
            .await
            .overall_code(),
        Is::Ok
    );
    let over = service.ask_one_descriptor(&[("user", "ann")]).await;
    assert_eq!(
        (over.overall_code(), single_status(&over).code()),
        (Is::OverLimit, Is::OverLimit)
    );
    assert_eq!(single_status(&over).limit_remaining, 0);
    let reset_s = single_status(&over).duration_until_reset.unwrap().seconds;
    assert!((3000..=3600).contains(&reset_s), "{reset_s}");
    let retry_after: i64 = response_header(&over, "retry-after")
        .unwrap()
        .parse()
        .unwrap();
    assert!(
        (reset_s..=reset_s + 1).contains(&retry_after),
        "{retry_after} {reset_s}"
    );

    assert_eq!(
        service
            .ask_one_descriptor(&[("user", "bob")])
            .await
            .overall_code(),
        Is::Ok
    );
    for (code, count) in [
        ("ok", 3.0),
        ("over_limit", 1.0),
        ("unavailable", 0.0),
        ("invalid", 0.0),
    ] {
        let series = format!("tidegate_rls_calls_total{{result=\"{code}\"}}");
        assert_eq!(service.proxy.read_metric(&series).await, count, "{code}");
    }
    let rejected = "tidegate_requests_total{policy=\"user\",decision=\"rejected\"}";
    assert_eq!(service.proxy.read_metric(rejected).await, 1.0);
}

/// A rule of Envoy's own service is reached by all entries of a descriptor; one that says more is another.
#[tokio::test]
async fn unmatched_descriptors_are_allowed_and_counted() {
    let mut service = ServiceClient::start(&format!("{RLS_LISTENER}{USER_POLICY}")).await;
    for _ in 0..3 {
        let more = service
            .ask_one_descriptor(&[("user", "ann"), ("path", "/")])
            .await;
        assert_eq!(
            (
                more.overall_code(),
                single_status(&more).current_limit.clone()
            ),
            (Is::Ok, None)
        );
        let other = RateLimitRequest {
            domain: "other".into(),
            ..make_request(&[make_descriptor(&[("user", "ann")])])
        };
        assert_eq!(
            service
                .should_rate_limit(other)
                .await
                .unwrap()
                .overall_code(),
            Is::Ok
        );
    }
    assert_eq!(
        service
            .proxy
            .read_metric("tidegate_rls_descriptors_unmet_total")
            .await,
        6.0
    );
}

#[tokio::test]
async fn requests_and_descriptors_have_separate_policies() {
    let upstream = Upstream::echo().await;
    let config = format!(
        "{RLS_LISTENER}{USER_POLICY}[[policy]]\nname = 'all'\nlimit = {{ requests = 1, per = '1h' }}\n"
    );
    let mut service = ServiceClient::from_proxy(
        Proxy::builder()
            .config(&config)
            .upstream(upstream.address)
            .start()
            .await,
    )
    .await;
    assert_eq!(
        service
            .repeat_for_codes(&make_descriptor(&[("user", "ann")]), 2)
            .await,
        [Is::Ok, Is::Ok]
    );
    assert_eq!(
        service.proxy.get_statuses("/?user=ann", 2).await,
        [200, 429]
    );
    assert_eq!(
        service
            .ask_one_descriptor(&[("user", "ann")])
            .await
            .overall_code(),
        Is::OverLimit
    );
}

#[tokio::test]
async fn hits_addend_of_a_descriptor_overrides_that_of_the_request() {
    let config = USER_POLICY.replace("requests = 2", "requests = 10");
    let mut service = ServiceClient::start(&format!("{RLS_LISTENER}{config}cost = 2\n")).await;
    let ann = make_descriptor(&[("user", "ann")]);
    let of_call = RateLimitRequest {
        hits_addend: 2,
        ..single_descriptor_request(&ann)
    };
    assert_eq!(
        service
            .should_rate_limit(of_call.clone())
            .await
            .unwrap()
            .statuses[0]
            .limit_remaining,
        6
    );
    let of_descriptor = RateLimitRequest {
        descriptors: vec![with_hits(&ann, 3)],
        ..of_call.clone()
    };
    assert_eq!(
        service
            .should_rate_limit(of_descriptor)
            .await
            .unwrap()
            .statuses[0]
            .limit_remaining,
        0
    );
    assert_eq!(
        service
            .should_rate_limit(of_call)
            .await
            .unwrap()
            .overall_code(),
        Is::OverLimit
    );
    let endless = make_request(&[with_hits(&make_descriptor(&[("user", "eve")]), u64::MAX)]);
    assert_eq!(
        service
            .should_rate_limit(endless)
            .await
            .unwrap()
            .overall_code(),
        Is::OverLimit
    );
    assert_eq!(
        service
            .ask_one_descriptor(&[("user", "eve")])
            .await
            .statuses[0]
            .limit_remaining,
        8
    );
}

/// What a budget of tokens needs: look before, charge when the response has told.
#[tokio::test]
async fn zero_hits_charge_nothing() {
    let config = format!(
        "{RLS_LISTENER}{USER_POLICY}count_rejected = true\n[[policy]]\nname = 'path'\nmatch = {{ domain = 'edge', descriptors = {{ path = '*' }} }}\nkey = ['descriptor:path']\nlimit = {{ requests = 5, per = '1h' }}\n"
    );
    let mut service = ServiceClient::start(&config).await;
    let (ann, path) = (
        make_descriptor(&[("user", "ann")]),
        make_descriptor(&[("path", "/")]),
    );
    for _ in 0..3 {
        let looked = service
            .should_rate_limit(make_request(&[with_hits(&ann, 0)]))
            .await
            .unwrap();
        assert_eq!(
            (
                looked.overall_code(),
                single_status(&looked).limit_remaining
            ),
            (Is::Ok, 2)
        );
    }
    // A call that says 0 says nothing.
    let silent = RateLimitRequest {
        hits_addend: 0,
        ..single_descriptor_request(&make_descriptor(&[("user", "eve")]))
    };
    assert_eq!(
        service.should_rate_limit(silent).await.unwrap().statuses[0].limit_remaining,
        1
    );
    let both = RateLimitRequest {
        hits_addend: 2,
        ..make_request(&[with_hits(&make_descriptor(&[("user", "eve")]), 0)])
    };
    assert_eq!(
        service.should_rate_limit(both).await.unwrap().statuses[0].limit_remaining,
        1
    );
    // More than there is: refused, and all of it is used.
    assert_eq!(
        service.repeat_for_codes(&with_hits(&ann, 1), 1).await,
        [Is::Ok]
    );
    assert_eq!(
        service.repeat_for_codes(&with_hits(&ann, 2), 1).await,
        [Is::OverLimit]
    );
    let looked = service
        .should_rate_limit(make_request(&[with_hits(&ann, 0), path.clone()]))
        .await
        .unwrap();
    assert_eq!(looked.overall_code(), Is::OverLimit);
    assert_eq!(
        (looked.statuses[0].code(), looked.statuses[1].code()),
        (Is::OverLimit, Is::Ok)
    );
    assert!(
        response_header(&looked, "retry-after").is_some(),
        "{looked:?}"
    );
    // Nobody was charged for what was refused, and a look that finds something lets the others be charged.
    let both = service
        .should_rate_limit(make_request(&[
            with_hits(&make_descriptor(&[("user", "bob")]), 0),
            path,
        ]))
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
        "{RLS_LISTENER}{USER_POLICY}[[policy]]\nname = 'all'\nmatch = {{ domain = 'edge', descriptors = {{ generic_key = 'all' }} }}\nlimit = {{ requests = 3, per = '1h' }}\n"
    );
    let mut service = ServiceClient::start(&config).await;
    let call = make_request(&[
        make_descriptor(&[("user", "ann")]),
        make_descriptor(&[("generic_key", "all")]),
    ]);
    for left in [2, 1] {
        let answer = service.should_rate_limit(call.clone()).await.unwrap();
        assert_eq!(
            (answer.overall_code(), answer.statuses[1].limit_remaining),
            (Is::Ok, left)
        );
    }
    for _ in 0..3 {
        let answer = service.should_rate_limit(call.clone()).await.unwrap();
        assert_eq!(answer.overall_code(), Is::OverLimit);
        assert_eq!(
            (answer.statuses[0].code(), answer.statuses[1].code()),
            (Is::OverLimit, Is::Ok)
        );
    }
    assert_eq!(
        service
            .ask_one_descriptor(&[("generic_key", "all")])
            .await
            .statuses[0]
            .limit_remaining,
        0
    );
    // The same quota twice in one call is used twice.
    let twice = make_request(&[
        make_descriptor(&[("user", "bob")]),
        make_descriptor(&[("user", "bob")]),
    ]);
    let answer = service.should_rate_limit(twice.clone()).await.unwrap();
    assert_eq!(
        (answer.overall_code(), answer.statuses[0].limit_remaining),
        (Is::Ok, 0)
    );
    assert_eq!(
        service
            .should_rate_limit(twice)
            .await
            .unwrap()
            .overall_code(),
        Is::OverLimit
    );
}

#[tokio::test]
async fn a_descriptor_may_carry_its_own_limit() {
    let mut service = ServiceClient::start(&format!("{RLS_LISTENER}{USER_POLICY}")).await;
    let bringing = |user: &str, requests_per_unit, unit: Unit| RateLimitDescriptor {
        limit: Some(RateLimitOverride {
            requests_per_unit,
            unit: unit.into(),
        }),
        ..make_descriptor(&[("user", user)])
    };
    let five = bringing("ann", 5, Unit::Hour);
    let codes = service.repeat_for_codes(&five, 6).await;
    assert_eq!(
        codes,
        [Is::Ok, Is::Ok, Is::Ok, Is::Ok, Is::Ok, Is::OverLimit]
    );
    let answer = service
        .should_rate_limit(make_request(&[five]))
        .await
        .unwrap();
    let limit = single_status(&answer).current_limit.clone().unwrap();
    assert_eq!(
        (limit.requests_per_unit, limit.unit(), limit.name.as_str()),
        (5, Unit::Hour, "user")
    );
    // Its counter is its own.
    assert_eq!(
        service
            .repeat_for_codes(&make_descriptor(&[("user", "ann")]), 3)
            .await,
        [Is::Ok, Is::Ok, Is::OverLimit]
    );
    assert_eq!(
        service
            .repeat_for_codes(&bringing("bob", 0, Unit::Day), 1)
            .await,
        [Is::OverLimit]
    );
    assert_eq!(
        service
            .repeat_for_codes(&bringing("bob", u32::MAX, Unit::Year), 1)
            .await,
        [Is::Ok]
    );
    let unknown = service
        .should_rate_limit(make_request(&[bringing("bob", 1, Unit::Unknown)]))
        .await
        .unwrap_err();
    assert_eq!(unknown.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn allow_deny_override_and_shadow_policies_apply_to_descriptors() {
    let config = format!(
        "{RLS_LISTENER}[[policy]]\nname = 'free'\nmatch = {{ domain = 'edge', descriptors = {{ user = 'root' }} }}\naction = 'allow'\n
        [[policy]]\nname = 'banned'\nmatch = {{ domain = 'edge', descriptors = {{ user = {{ regex = '^bad' }} }} }}\naction = 'deny'\nreject = {{ body = 'go away', content_type = 'text/plain', headers = {{ x-why = 'banned' }} }}\n
        {USER_POLICY}override = [{{ key = ['acme'], limit = {{ requests = 4, per = '1h' }} }}]\n
        [[policy]]\nname = 'candidate'\nmode = 'shadow'\nmatch = {{ domain = 'edge', descriptors = {{ user = '*' }} }}\nlimit = {{ requests = 1, per = '1h' }}\n"
    );
    let mut service = ServiceClient::start(&config).await;
    assert_eq!(
        service
            .repeat_for_codes(&make_descriptor(&[("user", "root")]), 5)
            .await,
        [Is::Ok; 5]
    );
    let banned = service.ask_one_descriptor(&[("user", "bad guy")]).await;
    assert_eq!(
        (banned.overall_code(), single_status(&banned).code()),
        (Is::OverLimit, Is::OverLimit)
    );
    assert_eq!(
        (&*banned.raw_body, response_header(&banned, "x-why")),
        (&b"go away"[..], Some("banned"))
    );
    assert_eq!(response_header(&banned, "content-type"), Some("text/plain"));
    let acme = service
        .repeat_for_codes(&make_descriptor(&[("user", "acme")]), 5)
        .await;
    assert_eq!(acme, [Is::Ok, Is::Ok, Is::Ok, Is::Ok, Is::OverLimit]);
    let shadow = "tidegate_requests_total{policy=\"candidate\",decision=\"shadow_rejected\"}";
    assert!(service.proxy.read_metric(shadow).await >= 3.0);
}

#[tokio::test]
async fn invalid_calls_are_rejected() {
    let mut service = ServiceClient::start(&format!("{RLS_LISTENER}{USER_POLICY}")).await;
    let ann = make_descriptor(&[("user", "ann")]);
    let negative = RateLimitDescriptor {
        is_negative_hits: true,
        ..ann.clone()
    };
    for wrong in [
        RateLimitRequest {
            domain: String::new(),
            ..single_descriptor_request(&ann)
        },
        make_request(&[]),
        make_request(&[negative]),
        make_request(&vec![ann.clone(); 65]),
        make_request(&[make_descriptor(&[("user", "ann"); 65])]),
    ] {
        assert_eq!(
            service.should_rate_limit(wrong).await.unwrap_err().code(),
            Code::InvalidArgument
        );
    }
    let long = "x".repeat(100_000);
    let large = service
        .should_rate_limit(make_request(&[make_descriptor(&[("user", &long)])]))
        .await
        .unwrap_err();
    assert_eq!(large.code(), Code::ResourceExhausted);
    let other = call_unary::<_, RateLimitResponse>(
        &mut service.grpc,
        "/envoy.service.ratelimit.v3.RateLimitService/Other",
        make_request(&[ann]),
    );
    assert_eq!(other.await.unwrap_err().code(), Code::Unimplemented);
    let address = service
        .proxy
        .logged_address("rate-limit service listening")
        .unwrap();
    assert_eq!(
        ClientRequest::new(address, "GET", "/").send().await.status,
        505
    );
    assert_eq!(
        service
            .proxy
            .read_metric("tidegate_rls_calls_total{result=\"invalid\"}")
            .await,
        7.0
    );
}

/// A message as it stands on the wire.
fn encode_grpc_message(message: impl Message) -> Vec<u8> {
    with_grpc_prefix(0, &message.encode_to_vec())
}

fn with_grpc_prefix(flags: u8, message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[flags], &length[..], message].concat()
}

/// Sends these bytes as a call: the HTTP status, that of gRPC wherever it stands, and the answer.
async fn send_raw_call(
    client: &mut SendRequest<crate::support::client::ClientBody>,
    content_type: &str,
    body: Vec<u8>,
) -> (u16, Option<String>, Vec<u8>) {
    let request = hyper::Request::post(format!("http://tidegate{SHOULD_RATE_LIMIT}"));
    let request = request
        .header("content-type", content_type)
        .body(Full::new(Bytes::from(body)).boxed())
        .unwrap();
    let response = await_response(client.send_request(request)).await;
    let status = response.status().as_u16();
    let code = |headers: &http::HeaderMap| {
        headers
            .get("grpc-status")
            .map(|code| code.to_str().unwrap().to_owned())
    };
    let in_head = code(response.headers());
    let body = tokio::time::timeout(TEST_TIMEOUT, response.into_body().collect())
        .await
        .unwrap()
        .unwrap();
    let code = in_head.or_else(|| body.trailers().and_then(code));
    (status, code, body.to_bytes().to_vec())
}

/// What one call over this connection is answered.
async fn call_over_stream(stream: impl crate::support::client::ByteStream + 'static) -> Is {
    let mut client = open_http2_over_stream(stream).await;
    let (status, code, body) = send_raw_call(
        &mut client,
        "application/grpc",
        encode_grpc_message(single_descriptor_request(&make_descriptor(&[(
            "user", "ann",
        )]))),
    )
    .await;
    assert_eq!((status, code.as_deref()), (200, Some("0")));
    RateLimitResponse::decode(&body[5..])
        .unwrap()
        .overall_code()
}

#[tokio::test]
async fn malformed_messages_are_rejected_and_the_next_call_is_served() {
    let service = ServiceClient::start(&format!("{RLS_LISTENER}{USER_POLICY}")).await;
    let good = single_descriptor_request(&make_descriptor(&[("user", "ann")])).encode_to_vec();
    let mut client = open_http2_connection(service.address()).await;
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
            [with_grpc_prefix(0, &good), with_grpc_prefix(0, &good)].concat(),
        ),
        (
            "a compressed one",
            unimplemented,
            with_grpc_prefix(1, &good),
        ),
        (
            "an empty one, without a domain",
            invalid,
            with_grpc_prefix(0, &[]),
        ),
        (
            "a field that is longer than the message",
            invalid,
            with_grpc_prefix(0, &[10, 200, 1, b'x']),
        ),
        (
            "a text that is no UTF-8",
            invalid,
            with_grpc_prefix(0, &[10, 2, 0xc3, 0x28]),
        ),
        (
            "an endless number",
            invalid,
            with_grpc_prefix(
                0,
                &[24, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1],
            ),
        ),
        (
            "groups in groups",
            invalid,
            with_grpc_prefix(0, &[0x7b; 60_000]),
        ),
        ("too much", exhausted, with_grpc_prefix(0, &[0; 64 << 10])),
    ] {
        let (status, told, answer) = send_raw_call(&mut client, "application/grpc", bytes).await;
        assert_eq!(
            (status, told.as_deref(), answer),
            (200, Some(code), vec![]),
            "{what}"
        );
    }
    // What it doesn't know it leaves alone.
    let more = [&good[..], &[0xfa, 0x3e, 1, b'x']].concat();
    assert_eq!(
        send_raw_call(&mut client, "application/grpc", with_grpc_prefix(0, &more))
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
        let (status, ..) =
            send_raw_call(&mut client, content_type, with_grpc_prefix(0, &good)).await;
        assert_eq!(status, expected, "{content_type}");
    }
}

/// A call about ann, on this stream.
fn encode_call_frames(stream: u32) -> Vec<u8> {
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "tidegate"),
        (":path", SHOULD_RATE_LIMIT),
        ("content-type", "application/grpc"),
    ];
    let message = encode_grpc_message(single_descriptor_request(&make_descriptor(&[(
        "user", "ann",
    )])));
    [
        request_head_frame(stream, &fields),
        encode_frame(h2_frames::DATA, h2_frames::END_STREAM, stream, message),
    ]
    .concat()
}

/// Envoy gives up a call when its `timeout` is over, 20 ms if it says nothing. All that it has asked of a process that
/// did not get a turn for so long is given up before it is read.
#[tokio::test]
async fn cancelled_calls_do_not_affect_other_calls() {
    let config = USER_POLICY.replace("requests = 2", "requests = 100000");
    let service = ServiceClient::start(&format!("{RLS_LISTENER}{config}")).await;
    let mut envoy = FrameClient::connect(service.address(), &[]).await;
    let late = (0..900).map(|nth| 2 * nth + 1);
    assert!(
        envoy
            .send(
                late.flat_map(|id| [encode_call_frames(id), rst_stream_frame(id)].concat())
                    .collect::<Vec<_>>()
            )
            .await
    );
    assert!(envoy.send(encode_call_frames(2001)).await);
    let wanted =
        |frame: &h2_frames::RawFrame| frame.kind == h2_frames::GOAWAY || frame.stream == 2001;
    let answer = envoy.wait_for_frame("an answer", wanted).await;
    assert_eq!(
        (answer.kind, answer.status()),
        (h2_frames::HEADERS, Some(200)),
        "{answer:?}"
    );
    // What is no call is a flood here, too.
    let pings: Vec<u8> = (0..20_000)
        .flat_map(|_| encode_frame(h2_frames::PING, 0, 0, [0; 8]))
        .collect();
    envoy.send(pings).await;
    let (closed, code) = envoy.wait_for_close(TEST_TIMEOUT).await;
    assert!(
        closed && code.is_none_or(|code| code == h2_frames::ENHANCE_YOUR_CALM),
        "{code:?}"
    );
}

#[tokio::test]
async fn a_call_cancelled_during_the_store_call_is_counted() {
    let redis = RedisServer::start();
    let config = format!("{}\n{RLS_LISTENER}{USER_POLICY}", redis.store_config());
    let service = ServiceClient::start(&config).await;
    service.proxy.wait_for_store().await;
    redis.pause();
    let mut envoy = FrameClient::connect(service.address(), &[]).await;
    assert!(envoy.send(encode_call_frames(1)).await);
    // Once for it to be read, once more for it to be under way.
    for round in [1_u8, 2] {
        envoy
            .send(encode_frame(h2_frames::PING, 0, 0, [round; 8]))
            .await;
        envoy
            .wait_for_frame("the ping's echo", |frame| {
                frame.kind == h2_frames::PING && frame.payload == [round; 8]
            })
            .await;
    }
    envoy.send(rst_stream_frame(1)).await;
    let deadline = Instant::now() + TEST_TIMEOUT;
    while service
        .proxy
        .read_metric("tidegate_rls_calls_total{result=\"given_up\"}")
        .await
        != 1.0
    {
        assert!(Instant::now() < deadline, "{}", service.proxy.log_text());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    redis.resume();
    assert_eq!(
        service
            .proxy
            .read_metric("tidegate_rls_calls_total{result=\"unavailable\"}")
            .await,
        0.0
    );
}

#[tokio::test]
async fn the_health_check_reports_serving_and_draining() {
    let mut service = ServiceClient::start(&format!(
        "[shutdown]\ndelay = '1h'\n{RLS_LISTENER}{USER_POLICY}"
    ))
    .await;
    let (serving, not_serving) = (1, 2);
    for known in [
        "",
        "envoy.service.ratelimit.v3.RateLimitService",
        "ratelimit",
    ] {
        assert_eq!(service.check_health(known).await, Ok(serving), "{known}");
    }
    assert_eq!(service.check_health("other").await, Err(Code::NotFound));
    let mark = service.proxy.log_mark();
    service.proxy.send_sigterm();
    service
        .proxy
        .wait_for_log("the drain", mark, TEST_TIMEOUT, |line| {
            line.message_starts_with("stopping")
        })
        .await;
    assert_eq!(service.check_health("").await, Ok(not_serving));
    assert_eq!(service.check_health("ratelimit").await, Ok(not_serving));
    // Until everybody knows, it serves.
    assert_eq!(
        service
            .ask_one_descriptor(&[("user", "ann")])
            .await
            .overall_code(),
        Is::Ok
    );
    let address = service.address();
    let path = "/grpc.health.v1.Health/Check";
    let asked = messages::HealthCheckRequest::default();
    let told: messages::HealthCheckResponse = call_unary(&mut connect(address).await, path, asked)
        .await
        .unwrap();
    assert_eq!(told.status, not_serving, "a new connection is told too");
}

#[tokio::test]
async fn tls_callers_must_present_a_client_certificate() {
    let (ca, others) = (CertificateAuthority::new(), CertificateAuthority::new());
    ca.sign("rls", "rls.internal");
    ca.sign("envoy", "envoy");
    others.sign("envoy", "envoy");
    let tls = format!(
        "[rls.tls]\ncert = {:?}\nkey = {:?}\nclient_ca = {:?}\nclient_auth = 'require'\n",
        ca.path_string("rls.pem"),
        ca.path_string("rls.key"),
        ca.path_string("ca.pem")
    );
    let proxy = Proxy::builder()
        .config(&format!("{RLS_LISTENER}{tls}{USER_POLICY}"))
        .start()
        .await;
    let address = proxy
        .logged_address("rate-limit service listening")
        .unwrap();
    let envoy = |signer: &CertificateAuthority| {
        TlsClient::with_certificate(&ca, signer, "envoy").with_alpn(&["h2"])
    };
    for expected in [Is::Ok, Is::Ok, Is::OverLimit] {
        let stream = envoy(&ca).connect(address, "rls.internal").await.unwrap();
        assert_eq!(call_over_stream(stream).await, expected);
    }
    // By TLS 1.3 a client learns with the first answer that it was not let in.
    for (stranger, kind) in [
        (TlsClient::new(&ca).with_alpn(&["h2"]), "no_certificate"),
        (envoy(&others), "bad_certificate"),
    ] {
        if let Ok(stream) = stranger.connect(address, "rls.internal").await {
            let mut client = RawClient::from_stream(stream);
            client
                .send(
                    [
                        h2_frames::PREFACE,
                        &encode_frame(h2_frames::SETTINGS, 0, 0, []),
                    ]
                    .concat(),
                )
                .await;
            assert_eq!(client.read_first_bytes().await, Vec::<u8>::new(), "{kind}");
        }
        let series = format!("tidegate_tls_handshake_errors_total{{kind=\"{kind}\"}}");
        let deadline = Instant::now() + TEST_TIMEOUT;
        while proxy.read_metric(&series).await != 1.0 {
            assert!(Instant::now() < deadline, "{kind}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    let in_the_clear = RawClient::connect(address)
        .await
        .send(h2_frames::PREFACE)
        .await
        .read_to_close()
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
        .wait_for_log("them", mark, TEST_TIMEOUT, |line| {
            line.message_starts_with("TLS settings changed")
        })
        .await;
    assert_eq!(told.field("address"), address.to_string());
    assert!(
        envoy(&ca).connect(address, "rls.internal").await.is_err(),
        "another authority signed it"
    );
    let renewed = TlsClient::with_certificate(&others, &ca, "envoy").with_alpn(&["h2"]);
    let stream = renewed.connect(address, "rls.internal").await.unwrap();
    assert_eq!(
        call_over_stream(stream).await,
        Is::OverLimit,
        "the counters are the same"
    );
}

/// A process that only serves calls and questions, at sockets in `dir`.
async fn start_without_upstream(dir: &Path, config: &str) -> ChildProcess {
    let path = dir.join("config.toml");
    std::fs::write(
        &path,
        format!("admin = {{ address = '127.0.0.1:0' }}\n{config}"),
    )
    .unwrap();
    let process =
        ChildProcess::start(tidegate_command().arg("run").arg("--config").arg(&path)).unwrap();
    let listens = |text: &str| text.contains("\"listening\"").then_some(());
    process
        .wait_for("it to listen", 0, TEST_TIMEOUT, |line| listens(&line.text))
        .await;
    process
}

#[tokio::test]
async fn calls_are_accepted_on_a_unix_socket() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("rls.sock");
    let config = format!(
        "[rls]\naddress = 'unix:{}'\n{USER_POLICY}",
        socket.display()
    );
    let mut process = start_without_upstream(dir.path(), &config).await;
    for expected in [Is::Ok, Is::Ok, Is::OverLimit] {
        assert_eq!(
            call_over_stream(UnixStream::connect(&socket).await.unwrap()).await,
            expected
        );
    }
    process.send_signal("TERM");
    assert!(process.wait_for_exit(TEST_TIMEOUT).await.status.success());
    assert!(!socket.exists(), "the socket is gone");
}

#[tokio::test]
async fn a_call_is_in_the_access_log_with_its_trace() {
    let config = format!("[log]\naccess = 'all'\n{RLS_LISTENER}{USER_POLICY}");
    let service = ServiceClient::start(&config).await;
    let mark = service.proxy.log_mark();
    let mut client = open_http2_connection(service.address()).await;
    let request = hyper::Request::post(format!("http://tidegate{SHOULD_RATE_LIMIT}"))
        .header("content-type", "application/grpc")
        .header(
            "traceparent",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        );
    let call = single_descriptor_request(&make_descriptor(&[("user", "ann")]));
    assert_eq!(
        await_response(
            client.send_request(
                request
                    .body(Full::new(Bytes::from(encode_grpc_message(call))).boxed())
                    .unwrap()
            )
        )
        .await
        .status(),
        200
    );
    let line = service
        .proxy
        .wait_for_log("the call", mark, TEST_TIMEOUT, |line| {
            line.message_starts_with("request")
        })
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
async fn the_service_runs_without_an_upstream() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.toml");
    std::fs::write(
        &path,
        format!("admin = {{ address = '127.0.0.1:0' }}\n{RLS_LISTENER}{USER_POLICY}"),
    )
    .unwrap();
    let mut command = crate::support::process::tidegate_command();
    let process =
        crate::support::process::ChildProcess::start(command.arg("run").arg("--config").arg(&path))
            .unwrap();
    let address: SocketAddr = process
        .wait_for("the service to listen", 0, TEST_TIMEOUT, |line| {
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
    let answer: RateLimitResponse = call_unary(
        &mut grpc,
        SHOULD_RATE_LIMIT,
        make_request(&[make_descriptor(&[("user", "ann")])]),
    )
    .await
    .unwrap();
    assert_eq!(answer.overall_code(), Is::Ok);
}

/// Then Envoy does what its own `failure_mode_deny` says; a policy that is `local` goes on.
#[tokio::test]
async fn without_its_store_calls_are_unavailable_unless_a_policy_is_local() {
    let mut redis = RedisServer::start();
    let port = redis.port();
    let config = format!(
        "{RLS_LISTENER}[store]\nkind = 'redis'\n[store.redis]\nurl = 'redis://127.0.0.1:{port}/0'\nkey_prefix = 'test'\ninstances = 1\ntimeout = '1s'\n{USER_POLICY}[[policy]]\nname = 'path'\nmatch = {{ domain = 'edge', descriptors = {{ path = '*' }} }}\nlimit = {{ requests = 2, per = '1h' }}\non_store_failure = 'local'\n"
    );
    let mut service = ServiceClient::start(&config).await;
    service.proxy.wait_for_store().await;
    let (ann, path) = (
        make_descriptor(&[("user", "ann")]),
        make_descriptor(&[("path", "/")]),
    );
    assert_eq!(service.repeat_for_codes(&ann, 1).await, [Is::Ok]);
    redis.kill();
    let away = service
        .should_rate_limit(single_descriptor_request(&ann))
        .await
        .unwrap_err();
    assert_eq!(
        (away.code(), away.message()),
        (Code::Unavailable, "the store gave no answer")
    );
    assert_eq!(
        service.repeat_for_codes(&path, 3).await,
        [Is::Ok, Is::Ok, Is::OverLimit]
    );
    // One that can't be decided is enough.
    let both = service
        .should_rate_limit(make_request(&[path, ann.clone()]))
        .await
        .unwrap_err();
    assert_eq!(both.code(), Code::Unavailable);
    assert_eq!(
        service
            .proxy
            .read_metric("tidegate_rls_calls_total{result=\"unavailable\"}")
            .await,
        2.0
    );
    redis.restart_async().await;
    let deadline = Instant::now() + TEST_TIMEOUT;
    while service
        .should_rate_limit(single_descriptor_request(&ann))
        .await
        .is_err()
    {
        assert!(Instant::now() < deadline, "{}", service.proxy.log_text());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Several processes count together.
#[tokio::test]
async fn a_limit_is_shared_through_redis() {
    let redis = RedisServer::start();
    let config = format!(
        "{}\n{RLS_LISTENER}{}",
        redis.store_config(),
        USER_POLICY.replace("requests = 2", "requests = 20")
    );
    let mut services = vec![
        ServiceClient::start(&config).await,
        ServiceClient::start(&config).await,
    ];
    for service in &services {
        service.proxy.wait_for_store().await;
    }
    let mut admitted = 0;
    for at in 0..30 {
        let answer = services[at % 2]
            .ask_one_descriptor(&[("user", "ann")])
            .await;
        admitted += usize::from(answer.overall_code() == Is::Ok);
    }
    assert_eq!(admitted, 20);
}

/// Whoever calls waits for nobody: calls of one connection are answered beside each other, and a drain ends in good order.
#[tokio::test]
async fn calls_are_multiplexed_and_a_drain_closes_the_connection() {
    let mut service = ServiceClient::start(&format!(
        "{RLS_LISTENER}{}",
        USER_POLICY.replace("requests = 2", "requests = 50")
    ))
    .await;
    let calls = (0..100).map(|_| {
        let mut grpc = service.grpc.clone();
        tokio::spawn(async move {
            let asked = make_request(&[make_descriptor(&[("user", "ann")])]);
            call_unary::<_, RateLimitResponse>(&mut grpc, SHOULD_RATE_LIMIT, asked)
                .await
                .unwrap()
        })
    });
    let mut ok = 0;
    for call in calls.collect::<Vec<_>>() {
        ok += usize::from(call.await.unwrap().overall_code() == Is::Ok);
    }
    assert_eq!(ok, 50);
    service.proxy.send_sigterm();
    let ended = service.proxy.wait_for_exit(TEST_TIMEOUT).await;
    assert!(ended.status.success(), "{}", service.proxy.log_text());
    let log = eventually("the end to be told", TEST_TIMEOUT, || {
        Some(service.proxy.log_text())
    })
    .await;
    assert!(
        log.contains("\"connections_cut\":0") || log.contains("connections_cut=0"),
        "{log}"
    );
}
