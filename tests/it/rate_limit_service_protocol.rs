//! The protocol of the rate limit service: malformed messages, cancellation and multiplexing.

use crate::support::h2_frames::{
    self, FrameClient, encode_frame, request_head_frame, rst_stream_frame,
};
use crate::support::prelude::*;
use crate::support::rls_client::messages::RateLimitResponse;
use crate::support::rls_client::messages::rate_limit_response::Code as LimitCode;
use crate::support::rls_client::{
    SHOULD_RATE_LIMIT, USER_POLICY, call_unary, encode_grpc_message, send_raw_call,
    with_grpc_prefix,
};
use prost::Message;

#[tokio::test]
async fn malformed_messages_are_rejected_and_the_next_call_is_served() {
    let service = ServiceClient::start(&format!("{RLS_LISTENER}{USER_POLICY}")).await;
    let good = user_call("ann").encode_to_vec();
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
        ("a length longer than the body", invalid, long(1)),
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
        let (status, grpc_status, answer) =
            send_raw_call(&mut client, "application/grpc", bytes).await;
        assert_eq!(status, 200, "{what}");
        assert_eq!(grpc_status.as_deref(), Some(code), "{what}");
        assert!(answer.is_empty(), "{what}");
    }
    // Unknown fields are ignored.
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

/// The frames of a call for user `ann` on this stream.
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

/// Envoy cancels a call after its `timeout`, 20 ms by default. A process that was not scheduled for
/// that long finds all its pending calls cancelled.
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
    assert_eq!(answer.kind, h2_frames::HEADERS, "{answer:?}");
    assert_eq!(answer.status(), Some(200), "{answer:?}");
    // Frames that are not calls still count as a flood.
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
    // The first echo shows that the call was read, the second that it is in flight.
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
    let given_up = "tidegate_rls_calls_total{result=\"given_up\"}";
    service.proxy.wait_for_metric(given_up, 1.0).await;
    redis.resume();
    service
        .proxy
        .assert_metric("tidegate_rls_calls_total{result=\"unavailable\"}", 0.0)
        .await;
}

/// Calls on one connection are answered concurrently, and a drain closes the connection cleanly.
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
            let request = user_call("ann");
            call_unary::<_, RateLimitResponse>(&mut grpc, SHOULD_RATE_LIMIT, request)
                .await
                .unwrap()
        })
    });
    let mut ok = 0;
    for call in calls.collect::<Vec<_>>() {
        ok += usize::from(call.await.unwrap().overall_code() == LimitCode::Ok);
    }
    assert_eq!(ok, 50);
    service.proxy.send_sigterm();
    let ended = service.proxy.wait_for_exit(TEST_TIMEOUT).await;
    assert!(ended.status.success());
    let log = eventually("the shutdown log line", TEST_TIMEOUT, async || {
        Some(service.proxy.log_text())
    })
    .await;
    assert!(
        log.contains("\"connections_cut\":0") || log.contains("connections_cut=0"),
        "{log}"
    );
}
