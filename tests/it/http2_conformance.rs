//! HTTP/2 conformance (RFC 9113): a client error ends its stream or its connection, with the
//! correct code.

use crate::support::h2_frames::*;
use crate::support::prelude::*;
use h2::server::Builder;
use http::{HeaderMap, Request};

/// How a stream or a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamOutcome {
    /// A response on stream 1.
    Answered,
    /// Status 400 on stream 1. The connection stays open.
    Rejected,
    /// RST_STREAM on stream 1. The connection stays open.
    StreamReset(u32),
    /// GOAWAY and a close.
    ConnectionClosed(u32),
}
use StreamOutcome::{Answered, ConnectionClosed, Rejected, StreamReset};

/// Sends these frames after a normal connection start, and returns the outcome.
async fn send_and_observe(address: SocketAddr, name: &str, frames: &[u8]) -> StreamOutcome {
    let mut client = FrameClient::connect(address, &[]).await;
    client.wait_for_kind(SETTINGS).await;
    client.send(settings_ack()).await;
    client.send(frames).await;
    let outcome = client.wait_for_frame(name, |frame| match frame.kind {
        HEADERS | RST_STREAM => frame.stream == 1,
        kind => kind == GOAWAY,
    });
    let outcome = outcome.await;
    match (outcome.kind, outcome.error_code()) {
        (GOAWAY, Some(code)) => {
            assert!(
                client.wait_for_close(TEST_TIMEOUT).await.0,
                "{name}: the connection stays open"
            );
            ConnectionClosed(code)
        }
        (RST_STREAM, Some(code)) => {
            expect_another_response(&mut client).await;
            StreamReset(code)
        }
        _ if outcome.status() == Some(400) => {
            expect_another_response(&mut client).await;
            Rejected
        }
        _ => Answered,
    }
}

async fn expect_another_response(client: &mut FrameClient) {
    client.send(get_frame(101, "/")).await;
    client
        .wait_for_frame("another response", |frame| {
            (frame.kind, frame.stream, frame.status()) == (HEADERS, 101, Some(200))
        })
        .await;
}

/// Frames, each with its name.
type NamedFrames<'n> = Vec<(&'n str, Vec<u8>)>;

/// Each list has frames with their names, and one outcome.
async fn assert_outcomes<const N: usize>(groups: [(StreamOutcome, NamedFrames<'_>); N]) {
    let upstream = Upstream::echo_or_slow().await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut wrong = Vec::new();
    for (expected, cases) in &groups {
        for (name, frames) in cases {
            let got = send_and_observe(proxy.address, name, frames).await;
            if got != *expected {
                wrong.push(format!("{name}: {got:?} instead of {expected:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let bad: Vec<_> = upstream
        .requests()
        .into_iter()
        .filter(|seen| seen.target == "/bad")
        .collect();
    assert!(bad.is_empty(), "the upstream saw {bad:?}");
}

/// RFC 9113 requires a more specific code here (FRAME_SIZE_ERROR, COMPRESSION_ERROR,
/// STREAM_CLOSED), or only a stream error. h2 ends the connection with PROTOCOL_ERROR.
const STRICTER_THAN_RFC: StreamOutcome = ConnectionClosed(PROTOCOL_ERROR);

#[tokio::test]
async fn a_first_frame_other_than_settings_ends_the_connection() {
    let proxy = Proxy::with_echo("").await;
    for (name, frame) in [
        ("PING", encode_frame(PING, 0, 0, [0; 8])),
        ("HEADERS", get_frame(1, "/bad")),
        ("WINDOW_UPDATE", window_update_frame(0, 1)),
    ] {
        let settings = encode_frame(SETTINGS, 0, 0, "");
        let mut client = proxy.send_raw([PREFACE, &frame, &settings].concat()).await;
        let received = client.read_to_close().await;
        let kinds = received.get(3).into_iter().collect::<Vec<_>>();
        assert!(
            kinds.is_empty() || kinds == [&SETTINGS],
            "{name}: {received:?}"
        );
    }
    assert_eq!(proxy.echo().requests().len(), 0);
}

/// The proxy marks trailers for h2 with a `host` field, which must not reach the upstream.
#[tokio::test]
async fn trailers_reach_the_upstream_unchanged() {
    let upstream = H2Upstream::with_handler(Builder::new(), |mut exchange| async move {
        exchange.read_body().await.unwrap();
        let trailers = exchange.request.body_mut().trailers().await.unwrap();
        exchange.respond_with(200, format!("{trailers:?}"));
    })
    .await;
    let proxy = Proxy::start("", &upstream.url()).await;
    let (client, connection) =
        h2::client::handshake(TcpStream::connect(proxy.address).await.unwrap())
            .await
            .unwrap();
    tokio::spawn(connection);
    let request = Request::post("http://a/").header("trailer", "x-sum");
    let (response, mut body) = client
        .ready()
        .await
        .unwrap()
        .send_request(request.body(()).unwrap(), false)
        .unwrap();
    body.send_data("abc".into(), false).unwrap();
    let mut trailers = HeaderMap::new();
    trailers.insert("x-sum", "1".parse().unwrap());
    body.send_trailers(trailers).unwrap();
    let text = response.await.unwrap().into_body().data().await.unwrap();
    assert_eq!(text.unwrap(), r#"Some({"x-sum": "1"})"#);
}

/// A GET without its end, and a frame after it.
fn after_get(frame: Vec<u8>) -> Vec<u8> {
    [request_head_frame(1, &GET_FIELDS), frame].concat()
}

/// A POST that the upstream never answers.
fn post_head_frame(fields: &[(&str, &str)]) -> Vec<u8> {
    let post = request_fields("POST", "/never");
    request_head_frame(1, &[&post, fields].concat())
}

#[tokio::test]
async fn malformed_frames_end_the_stream_or_connection() {
    assert_outcomes([
        (
            STRICTER_THAN_RFC,
            vec![
                ("SETTINGS of 5 bytes", encode_frame(SETTINGS, 0, 0, [0; 5])),
                (
                    "an ACK with settings",
                    encode_frame(SETTINGS, ACK, 0, encode_setting(4, 1)),
                ),
                ("PING of 7 bytes", encode_frame(PING, 0, 0, [0; 7])),
                (
                    "RST_STREAM of 3 bytes",
                    [
                        get_frame(1, "/never"),
                        encode_frame(RST_STREAM, 0, 1, [0; 3]),
                    ]
                    .concat(),
                ),
                (
                    "WINDOW_UPDATE of 3 bytes",
                    encode_frame(WINDOW_UPDATE, 0, 0, [0; 3]),
                ),
                ("a window of 2^31", setting_frame(4, 1 << 31)),
                (
                    "an index beyond both header tables",
                    encode_frame(HEADERS, END_HEADERS, 1, [0xff, 0x7f]),
                ),
                (
                    "a truncated field",
                    headers_frame(END_STREAM, 1, [0x40, 10, b'x']),
                ),
            ],
        ),
        (
            ConnectionClosed(FRAME_SIZE_ERROR),
            vec![("a frame of 16,385 bytes", data_frame(1, vec![0; 16_385]))],
        ),
        (
            ConnectionClosed(PROTOCOL_ERROR),
            vec![
                (
                    "padding longer than the DATA frame",
                    [
                        post_head_frame(&[]),
                        encode_frame(DATA, PADDED, 1, [5, 0, 0]),
                    ]
                    .concat(),
                ),
                (
                    "padding longer than the HEADERS frame",
                    headers_frame(PADDED, 1, [9, 0]),
                ),
                ("SETTINGS_ENABLE_PUSH of 2", setting_frame(2, 2)),
                ("SETTINGS_MAX_FRAME_SIZE of 100", setting_frame(5, 100)),
            ],
        ),
        (
            Answered,
            vec![
                (
                    "an unknown setting",
                    [setting_frame(999, 9), get_frame(1, "/")].concat(),
                ),
                (
                    "an unknown frame",
                    [encode_frame(77, 255, 1, "?"), get_frame(1, "/")].concat(),
                ),
            ],
        ),
    ])
    .await;
}

#[tokio::test]
async fn frames_on_invalid_streams() {
    let never = get_frame(1, "/never");
    let after = |frame: Vec<u8>| [never.clone(), frame].concat();
    let begun = encode_frame(HEADERS, END_STREAM, 1, encode_header_block(&GET_FIELDS));
    assert_outcomes([
        (
            ConnectionClosed(PROTOCOL_ERROR),
            vec![
                ("DATA on 0", data_frame(0, "x")),
                (
                    "HEADERS on 0",
                    encode_frame(HEADERS, END_HEADERS, 0, encode_header_block(&GET_FIELDS)),
                ),
                ("PRIORITY on 0", encode_frame(PRIORITY, 0, 0, [0; 5])),
                ("RST_STREAM on 0", rst_stream_frame(0)),
                ("CONTINUATION on 0", encode_frame(CONTINUATION, 0, 0, "")),
                ("SETTINGS on a stream", encode_frame(SETTINGS, 0, 1, "")),
                ("PING on a stream", encode_frame(PING, 0, 1, [0; 8])),
                ("GOAWAY on a stream", encode_frame(GOAWAY, 0, 1, [0; 8])),
                (
                    "PUSH_PROMISE by a client",
                    after(encode_frame(PUSH_PROMISE, END_HEADERS, 1, [0, 0, 0, 2])),
                ),
                ("a stream with an even id", get_frame(2, "/")),
                (
                    "streams in the wrong order",
                    [get_frame(5, "/never"), get_frame(1, "/")].concat(),
                ),
                ("DATA on an idle stream", data_frame(9, "x")),
                ("RST_STREAM on an idle stream", rst_stream_frame(9)),
                ("WINDOW_UPDATE on an idle stream", window_update_frame(9, 1)),
                (
                    "CONTINUATION without HEADERS",
                    after(encode_frame(CONTINUATION, END_HEADERS, 1, "")),
                ),
                (
                    "DATA inside a header block",
                    [begun.clone(), data_frame(1, "x")].concat(),
                ),
                (
                    "PING inside a header block",
                    [begun.clone(), encode_frame(PING, 0, 0, [0; 8])].concat(),
                ),
                (
                    "CONTINUATION of another stream",
                    [
                        begun.clone(),
                        encode_frame(CONTINUATION, END_HEADERS, 3, ""),
                    ]
                    .concat(),
                ),
                (
                    "a stream WINDOW_UPDATE of 0",
                    after(window_update_frame(1, 0)),
                ),
                ("a connection WINDOW_UPDATE of 0", window_update_frame(0, 0)),
                ("an unexpected SETTINGS ACK", settings_ack()),
            ],
        ),
        (
            Answered,
            vec![
                (
                    "PRIORITY on an idle stream",
                    [encode_frame(PRIORITY, 0, 9, [0; 5]), get_frame(1, "/")].concat(),
                ),
                (
                    "a header block in several frames",
                    [
                        begun,
                        encode_frame(
                            CONTINUATION,
                            END_HEADERS,
                            1,
                            encode_header_block(&[("a", "b")]),
                        ),
                    ]
                    .concat(),
                ),
            ],
        ),
        (
            STRICTER_THAN_RFC,
            vec![
                ("DATA after END_STREAM", after(last_data_frame(1, "x"))),
                (
                    "HEADERS after END_STREAM",
                    after(request_frame(1, &GET_FIELDS)),
                ),
            ],
        ),
        (
            StreamReset(FLOW_CONTROL_ERROR),
            vec![(
                "a stream window above 2^31 - 1",
                after(window_update_frame(1, (1 << 31) - 1)),
            )],
        ),
        (
            ConnectionClosed(FLOW_CONTROL_ERROR),
            vec![(
                "a connection window above 2^31 - 1",
                window_update_frame(0, (1 << 31) - 1),
            )],
        ),
        (
            StreamReset(PROTOCOL_ERROR),
            vec![(
                "a stream that depends on itself",
                encode_frame(
                    HEADERS,
                    END_STREAM | END_HEADERS | PRIORITY_FLAG,
                    1,
                    [&[0, 0, 0, 1, 0][..], &encode_header_block(&GET_FIELDS)].concat(),
                ),
            )],
        ),
    ])
    .await;
}

#[tokio::test]
async fn malformed_header_blocks_and_bodies() {
    let bad = get_fields_with(":path", "/bad");
    let and = |name, value| request_frame(1, &[&bad[..], &[(name, value)]].concat());
    let without = |name| {
        request_frame(
            1,
            &bad.iter()
                .copied()
                .filter(|(given, _)| *given != name)
                .collect::<Vec<_>>(),
        )
    };
    let trace = request_fields("TRACE", "/bad");
    let wrong = StreamReset(PROTOCOL_ERROR);
    assert_outcomes([
        (
            Rejected,
            vec![
                ("an upper-case name", and("X-Upper", "1")),
                ("a name with a space", and("x y", "1")),
                ("an empty name", and("", "1")),
                ("a value with a line feed", and("x", "1\n2")),
                ("a value with NUL", and("x", "1\0")),
                ("an unknown pseudo-field", and(":proto", "1")),
                (":status in a request", and(":status", "200")),
                (
                    "a pseudo-field after a regular field",
                    request_frame(1, &[&[("x", "1")], &bad[..]].concat()),
                ),
                (
                    "TRACE with a body",
                    [request_head_frame(1, &trace), last_data_frame(1, "x")].concat(),
                ),
                (":method twice", and(":method", "GET")),
                (":path twice", and(":path", "/other")),
                (":scheme twice", and(":scheme", "http")),
                (":authority twice", and(":authority", "b")),
                ("no :method", without(":method")),
                ("no :scheme", without(":scheme")),
                ("no :path", without(":path")),
                (
                    "an empty :path",
                    request_frame(1, &get_fields_with(":path", "")),
                ),
                ("connection", and("connection", "keep-alive")),
                ("keep-alive", and("keep-alive", "5")),
                ("proxy-connection", and("proxy-connection", "close")),
                ("transfer-encoding", and("transfer-encoding", "chunked")),
                ("upgrade", and("upgrade", "websocket")),
                ("te", and("te", "gzip")),
                ("a length, and no body", and("content-length", "1")),
                ("two lengths", and("content-length", "1, 2")),
                (
                    "trailers with pseudo-fields",
                    after_get(request_frame(1, &[(":path", "/bad")])),
                ),
                (
                    "trailers with a pseudo-field of HPACK's static table",
                    after_get(headers_frame(END_STREAM, 1, [0x83])),
                ),
                (
                    "trailers with a pseudo-field of HPACK's dynamic table",
                    [
                        encode_frame(
                            HEADERS,
                            END_HEADERS,
                            1,
                            [
                                encode_header_block(&GET_FIELDS[..3]),
                                encode_indexed_literal(":path", "/never"),
                            ]
                            .concat(),
                        ),
                        headers_frame(END_STREAM, 1, [0x80 | 62]),
                    ]
                    .concat(),
                ),
                (
                    "padded trailers with a pseudo-field",
                    after_get(headers_frame(PADDED | END_STREAM, 1, [2, 0x83, 0, 0])),
                ),
                (
                    "trailers with a priority and a pseudo-field",
                    after_get(headers_frame(
                        PRIORITY_FLAG | END_STREAM,
                        1,
                        [0, 0, 0, 0, 15, 0x83],
                    )),
                ),
            ],
        ),
        (
            Answered,
            vec![
                (
                    "te: trailers",
                    request_frame(1, &[&GET_FIELDS[..], &[("te", "trailers")]].concat()),
                ),
                (
                    "padded trailers with a priority",
                    after_get(headers_frame(
                        PADDED | PRIORITY_FLAG | END_STREAM,
                        1,
                        [
                            &[3, 0, 0, 0, 0, 15],
                            &encode_header_block(&[("x", "1")])[..],
                            &[0; 3],
                        ]
                        .concat(),
                    )),
                ),
                (
                    "trailers without pseudo-fields",
                    after_get(request_frame(1, &[("x", "1")])),
                ),
                (
                    "trailers in two frames",
                    [
                        request_head_frame(1, &GET_FIELDS),
                        encode_frame(HEADERS, END_STREAM, 1, [0]),
                        encode_frame(CONTINUATION, END_HEADERS, 1, [1, b'x', 1, b'1']),
                    ]
                    .concat(),
                ),
            ],
        ),
        (
            wrong,
            vec![
                (
                    "less DATA than content-length",
                    [
                        post_head_frame(&[("content-length", "5")]),
                        last_data_frame(1, "123"),
                    ]
                    .concat(),
                ),
                (
                    "more DATA than content-length",
                    [
                        post_head_frame(&[("content-length", "2")]),
                        data_frame(1, "123"),
                    ]
                    .concat(),
                ),
                (
                    "trailers without END_STREAM",
                    [post_head_frame(&[]), request_head_frame(1, &[("x", "1")])].concat(),
                ),
            ],
        ),
        (
            ConnectionClosed(PROTOCOL_ERROR),
            vec![(
                "trailers with too much padding",
                after_get(headers_frame(PADDED | END_STREAM, 1, [9, 0, 0])),
            )],
        ),
    ])
    .await;
}

/// A PING and valid SETTINGS are acknowledged at once and in order.
#[tokio::test]
async fn pings_and_settings_are_acknowledged() {
    let upstream = Upstream::echo_or_slow().await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = FrameClient::connect(proxy.address, &encode_setting(3, 50)).await;
    client.send(encode_frame(PING, 0, 0, "abcdefgh")).await;
    client
        .wait_for_frame("an ACK", |frame| {
            (frame.kind, frame.flags) == (SETTINGS, ACK)
        })
        .await;
    let pong = client
        .wait_for_frame("a PING ACK", |frame| {
            (frame.kind, frame.flags) == (PING, ACK)
        })
        .await;
    assert_eq!(pong.payload, b"abcdefgh");
}

/// Stock clients such as curl 7.88 lose a response that arrives together with a reset.
#[tokio::test]
async fn an_early_response_is_not_followed_by_a_reset_at_once() {
    let policy = "[[policy]]\nname = 'deny'\naction = 'deny'";
    let proxy = Proxy::with_echo(policy).await;
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    let put = |stream| {
        let fields = [&GET_FIELDS[..], &[("content-length", "300000")]].concat();
        request_head_frame(stream, &fields)
    };
    let is_end = |frame: &RawFrame| frame.flags & END_STREAM != 0 && frame.kind == DATA;
    let is_reset = |frame: &RawFrame| frame.kind == RST_STREAM;
    // The client sends its whole body after the response: the stream ends without a reset.
    client.send(put(1)).await;
    client.wait_for_frame("response", is_end).await;
    for part in 0..30 {
        let flags = if part == 29 { END_STREAM } else { 0 };
        client.send(encode_frame(DATA, flags, 1, [0; 10_000])).await;
    }
    // The client sends no more: the stream is reset later.
    client.send(put(3)).await;
    client.wait_for_frame("response", is_end).await;
    let answered_at = Instant::now();
    let reset = client.wait_for_frame("reset", is_reset).await;
    assert_eq!((reset.stream, reset.error_code()), (3, Some(0)));
    let delay = answered_at.elapsed();
    assert!(delay > Duration::from_millis(500), "{delay:?}");
    assert!(delay < Duration::from_secs(5), "{delay:?}");
}

/// However much the client uploads after the response, the reset comes later.
#[tokio::test]
async fn an_early_response_to_a_large_upload_is_not_followed_by_a_reset_at_once() {
    let policy = "[[policy]]\nname = 'deny'\naction = 'deny'";
    let proxy = Proxy::with_echo(policy).await;
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    client.send(request_head_frame(1, &GET_FIELDS)).await;
    let mut answered_at = None;
    let (mut stream_window, mut connection_window, mut sent) = (65_535_i64, 65_535_i64, 0);
    let reset_at = loop {
        if stream_window.min(connection_window) >= 16_384 {
            client.send(data_frame(1, [0; 16_384])).await;
            (stream_window, connection_window) =
                (stream_window - 16_384, connection_window - 16_384);
            sent += 16_384;
            if !client.has_frame() {
                continue;
            }
        }
        let frame = client.wait_for_frame("a frame", |_| true).await;
        let first_four = || u32::from_be_bytes(frame.payload[..4].try_into().unwrap());
        match (frame.kind, frame.stream) {
            (WINDOW_UPDATE, 0) => connection_window += i64::from(first_four()),
            (WINDOW_UPDATE, _) => stream_window += i64::from(first_four()),
            (SETTINGS, _) if frame.flags & ACK == 0 => {
                let initial = frame
                    .payload
                    .chunks(6)
                    .find(|setting| setting[..2] == [0, 4])
                    .map_or(65_535, |setting| {
                        i64::from(u32::from_be_bytes(setting[2..].try_into().unwrap()))
                    });
                stream_window += initial - 65_535;
                client.send(settings_ack()).await;
            }
            (HEADERS, 1) => answered_at = Some(Instant::now()),
            (RST_STREAM, 1) => break Instant::now(),
            _ => {}
        }
    };
    assert!(sent > 16 << 20, "{sent} bytes sent");
    let delay = reset_at - answered_at.unwrap();
    assert!(delay > Duration::from_millis(900), "{delay:?}");
}

/// Fields of a GET, of which some are replaced or added.
fn altered_fields<'a>(altered: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let is_altered = |name: &str| altered.iter().any(|(given, _)| *given == name);
    let get = [
        (":method", "GET"),
        (":scheme", "http"),
        (":authority", "shop.example"),
        (":path", "/items?a=1"),
    ];
    let kept = get.into_iter().filter(|(name, _)| !is_altered(name));
    kept.chain(altered.iter().copied()).collect()
}

/// h2 rejects these heads without a response.
#[tokio::test]
async fn a_malformed_head_has_a_reason_and_a_log_line() {
    let upstream = Upstream::echo_or_slow().await;
    let proxy = Proxy::start("log.access = 'all'\n", upstream.address).await;
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    let long = "x".repeat(70_000);
    let mut stream = 1;
    let usual = ["GET", "shop.example", "/items"];
    for (altered, reason, logged) in [
        (vec![("X-Upper", "1")], "header name", usual),
        (vec![("a b", "1")], "header name", usual),
        (vec![("x", "a\u{1}b")], "control characters", usual),
        (vec![("connection", "close")], "Connection", usual),
        (vec![("te", "gzip")], "TE", usual),
        (
            vec![(":path", "/a<b")],
            "path",
            ["GET", "shop.example", "/"],
        ),
        (
            vec![(":path", "/a b?c")],
            "path",
            ["GET", "shop.example", "/"],
        ),
        (vec![(":path", "")], "path", ["GET", "shop.example", "/"]),
        (vec![(":path", "#")], "path", ["GET", "shop.example", "/"]),
        (
            vec![(":path", "?a=1")],
            "path",
            ["GET", "shop.example", "/"],
        ),
        (vec![(":path", "*#")], "path", ["GET", "shop.example", "/"]),
        (vec![(":authority", "a b")], "Host", ["GET", "", "/items"]),
        (vec![(":method", "G T")], "method", usual),
        (
            vec![(":method", "PUT"), ("y", "1"), (":late", "1")],
            "pseudo",
            ["PUT", "shop.example", "/items"],
        ),
        (
            vec![(":scheme", "http"), (":scheme", "http")],
            "pseudo",
            usual,
        ),
        (vec![("content-length", "1")], "Content-Length", usual),
        (vec![("content-length", "x")], "Content-Length", usual),
        (vec![("x", &long)], "too large", usual),
    ] {
        let status = if reason == "too large" { 431 } else { 400 };
        for splits in [false, true] {
            let block = encode_header_block(&altered_fields(&altered));
            let parts: Vec<_> = block.chunks(if splits { 50 } else { 16_384 }).collect();
            let mark = proxy.log_mark();
            for (index, part) in parts.iter().enumerate() {
                let kind = if index == 0 { HEADERS } else { CONTINUATION };
                let end = if index + 1 == parts.len() {
                    END_HEADERS
                } else {
                    0
                };
                let ends_stream = if index == 0 { END_STREAM } else { 0 };
                client
                    .send(encode_frame(kind, end | ends_stream, stream, part))
                    .await;
            }
            let name = format!("{:?} {splits}", altered.first().map(|(name, _)| name));
            let head = client.wait_for_frame(&name, |frame| {
                frame.stream == stream && matches!(frame.kind, HEADERS | RST_STREAM)
            });
            let head = head.await;
            assert_eq!(head.kind, HEADERS, "{name}: {head:?}");
            let body =
                client.wait_for_frame(&name, |frame| (frame.kind, frame.stream) == (DATA, stream));
            let body: Value = serde_json::from_slice(&body.await.payload).unwrap();
            let detail = body["detail"].as_str().unwrap();
            assert!(detail.contains(reason), "{name}: {body}");
            assert_eq!(body["status"], status, "{name}");
            let line = proxy.wait_for_text("malformed", mark);
            let line = line.await;
            assert_eq!(line.field("status"), status.to_string(), "{name}");
            let seen = [line.field("method"), line.field("host"), line.field("path")];
            assert_eq!(seen, logged, "{name}");
            stream += 2;
        }
    }
    assert_eq!(upstream.requests().len(), 0);
    // h2 has not seen these heads, but the dynamic table is that of the client.
    let indexed = [
        encode_header_block(&GET_FIELDS),
        encode_indexed_literal("x-a", "1"),
        encode_indexed_literal("X-B", "2"),
    ];
    client
        .send(headers_frame(END_STREAM, 1001, indexed.concat()))
        .await;
    let repeated = [encode_header_block(&GET_FIELDS), vec![0xbf]];
    client
        .send(headers_frame(END_STREAM, 1003, repeated.concat()))
        .await;
    client
        .wait_for_frame("a response", |frame| {
            (frame.kind, frame.stream, frame.status()) == (HEADERS, 1003, Some(200))
        })
        .await;
    assert_eq!(upstream.last_request().single_header("x-a"), "1");
}

/// A malformed head that comes with a body, and malformed trailers.
#[tokio::test]
async fn malformed_uploads_are_rejected() {
    let upstream = Upstream::echo_or_slow().await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    let post = request_fields("POST", "/");
    client
        .send(request_head_frame(
            1,
            &[&post[..], &[("Upper", "1")]].concat(),
        ))
        .await;
    client.send(data_frame(1, vec![b'x'; 10_000])).await;
    client.send(last_data_frame(1, vec![b'x'; 10_000])).await;
    for (stream, trailers) in [
        (3, ("Upper", "1")),
        (5, ("x", "\u{1}")),
        (7, ("connection", "x")),
    ] {
        client.send(request_head_frame(stream, &post)).await;
        client.send(data_frame(stream, "body")).await;
        client.send(request_frame(stream, &[trailers])).await;
    }
    for stream in [1, 3, 5, 7] {
        let head = client.wait_for_frame("a response", |frame| {
            (frame.kind, frame.stream) == (HEADERS, stream)
        });
        assert_eq!(head.await.status(), Some(400), "{stream}");
    }
}

/// Each head gets a response, whatever it consists of.
#[tokio::test]
async fn no_head_is_reset() {
    const NAMES: [&str; 16] = [
        ":method",
        ":scheme",
        ":path",
        ":authority",
        ":protocol",
        ":status",
        ":x",
        "",
        "te",
        "cookie",
        "expect",
        "content-length",
        "connection",
        "x-a",
        "X",
        "a b",
    ];
    const VALUES: [&str; 19] = [
        "", "5", "GET", "CONNECT", "G\"T", "http", "ht tp", "1x", "/", "/\"?\"", "//", "*", "?",
        "a", "a:b:c", "[::1]", "u@a", "trailers", "\u{e9}\n",
    ];
    let upstream = Upstream::echo_or_slow().await;
    let proxy = Proxy::start("", upstream.address).await;
    let random = pseudo_random_bytes(60_000);
    let mut random = random.iter().map(|byte| usize::from(*byte));
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    for index in 0..1500 {
        // A connection may have some hundred malformed heads.
        if index % 150 == 0 {
            client = FrameClient::connect(proxy.address, &[]).await;
            client.send(window_update_frame(0, 1 << 30)).await;
        }
        let mut fields = GET_FIELDS.to_vec();
        for _ in 0..random.next().unwrap() % 3 {
            let at = random.next().unwrap() % 4;
            fields[at].1 = VALUES[random.next().unwrap() % VALUES.len()];
        }
        for _ in 0..random.next().unwrap() % 4 {
            let at = random.next().unwrap() % (fields.len() + 1);
            let name = NAMES[random.next().unwrap() % NAMES.len()];
            fields.insert(at, (name, VALUES[random.next().unwrap() % VALUES.len()]));
        }
        if random.next().unwrap() % 4 == 0 {
            fields.remove(random.next().unwrap() % fields.len());
        }
        let stream = 2 * (index % 150) + 1;
        let block = fields
            .iter()
            .flat_map(|field| match random.next().unwrap() % 2 {
                0 => encode_header_block(&[*field]),
                _ => encode_indexed_literal(field.0, field.1),
            });
        let block: Vec<u8> = block.collect();
        client.send(headers_frame(END_STREAM, stream, block)).await;
        let answer = client.wait_for_frame("an answer", |frame| {
            frame.stream == stream && matches!(frame.kind, HEADERS | RST_STREAM)
                || frame.kind == GOAWAY
        });
        let answer = answer.await;
        assert_eq!(answer.kind, HEADERS, "{index}: {fields:?} {answer:?}");
    }
}
