//! HTTP/2 as RFC 9113 has it: what a client does wrong ends its stream or its connection, with the right code.

use crate::support::frames::*;
use crate::support::proxy::Proxy;
use crate::support::upstream::{Upstream, echo};
use std::future::pending;
use std::net::SocketAddr;

/// What becomes of a stream or a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// A response on stream 1.
    Answered,
    /// RST_STREAM on stream 1; the connection goes on.
    Reset(u32),
    /// GOAWAY, and the end.
    Gone(u32),
}
use Outcome::{Answered, Gone, Reset};

async fn upstream() -> Upstream {
    Upstream::serving(|request| async move {
        match request.uri().path() {
            "/never" => pending().await,
            _ => echo(request).await,
        }
    })
    .await
}

/// What comes of these frames, after a connection has begun as usual.
async fn outcome(address: SocketAddr, name: &str, frames: &[u8]) -> Outcome {
    let mut client = Framed::connect(address, &[]).await;
    client
        .find("settings", |frame| frame.kind == SETTINGS)
        .await;
    client.send(frame(SETTINGS, ACK, 0, "")).await;
    client.send(frames).await;
    let told = client.find(name, |frame| match frame.kind {
        HEADERS | RST_STREAM => frame.stream == 1,
        kind => kind == GOAWAY,
    });
    let told = told.await;
    match (told.kind, told.code()) {
        (GOAWAY, Some(code)) => {
            assert!(
                client.end(crate::support::SOON).await.0,
                "{name}: it stays open"
            );
            Gone(code)
        }
        (RST_STREAM, Some(code)) => {
            client.send(get(101, "/")).await;
            client
                .find("another answer", |frame| {
                    (frame.kind, frame.stream) == (HEADERS, 101)
                })
                .await;
            Reset(code)
        }
        _ => Answered,
    }
}

async fn all_end_as_they_should(cases: Vec<(&str, Vec<u8>, Outcome)>) {
    let upstream = upstream().await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut wrong = Vec::new();
    for (name, frames, expected) in &cases {
        let got = outcome(proxy.address, name, frames).await;
        if got != *expected {
            wrong.push(format!("{name}: {got:?} instead of {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let bad: Vec<_> = upstream
        .seen()
        .into_iter()
        .filter(|seen| seen.target == "/bad")
        .collect();
    assert!(bad.is_empty(), "the upstream saw {bad:?}");
}

/// Where RFC 9113 asks for a more special code (FRAME_SIZE_ERROR, COMPRESSION_ERROR, STREAM_CLOSED), or for the end of
/// one stream only, h2 ends the connection with this one.
const STRICTER: Outcome = Gone(PROTOCOL_ERROR);

/// A POST that the upstream never answers.
fn post(fields: &[(&str, &str)]) -> Vec<u8> {
    let post = [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "a"),
        (":path", "/never"),
    ];
    head(1, &[&post, fields].concat())
}

#[tokio::test]
async fn frames_that_do_not_fit_their_type() {
    all_end_as_they_should(vec![
        (
            "SETTINGS of 5 bytes",
            frame(SETTINGS, 0, 0, [0; 5]),
            STRICTER,
        ),
        (
            "an ACK with settings",
            frame(SETTINGS, ACK, 0, setting(4, 1)),
            STRICTER,
        ),
        ("PING of 7 bytes", frame(PING, 0, 0, [0; 7]), STRICTER),
        (
            "RST_STREAM of 3 bytes",
            [get(1, "/never"), frame(RST_STREAM, 0, 1, [0; 3])].concat(),
            STRICTER,
        ),
        (
            "WINDOW_UPDATE of 3 bytes",
            frame(WINDOW_UPDATE, 0, 0, [0; 3]),
            STRICTER,
        ),
        (
            "a frame of 16,385 bytes",
            frame(DATA, 0, 1, vec![0; 16_385]),
            Gone(FRAME_SIZE_ERROR),
        ),
        (
            "more padding than DATA",
            [post(&[]), frame(DATA, PADDED, 1, [5, 0, 0])].concat(),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "more padding than HEADERS",
            frame(HEADERS, PADDED | END_HEADERS, 1, [9, 0]),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "SETTINGS_ENABLE_PUSH of 2",
            frame(SETTINGS, 0, 0, setting(2, 2)),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "a window of 2^31",
            frame(SETTINGS, 0, 0, setting(4, 1 << 31)),
            STRICTER,
        ),
        (
            "frames of at most 100 bytes",
            frame(SETTINGS, 0, 0, setting(5, 100)),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "an unknown setting",
            [frame(SETTINGS, 0, 0, setting(999, 9)), get(1, "/")].concat(),
            Answered,
        ),
        (
            "an unknown frame",
            [frame(77, 255, 1, "?"), get(1, "/")].concat(),
            Answered,
        ),
        (
            "a field that is in no table",
            frame(HEADERS, END_HEADERS, 1, [0xff, 0x7f]),
            STRICTER,
        ),
        (
            "half a field",
            frame(HEADERS, END_STREAM | END_HEADERS, 1, [0x40, 10, b'x']),
            STRICTER,
        ),
    ])
    .await;
}

#[tokio::test]
async fn frames_on_streams_that_are_not_theirs() {
    let never = get(1, "/never");
    let after = |frame: Vec<u8>| [never.clone(), frame].concat();
    let begun = frame(HEADERS, END_STREAM, 1, block(&GET));
    all_end_as_they_should(vec![
        ("DATA on 0", frame(DATA, 0, 0, "x"), Gone(PROTOCOL_ERROR)),
        (
            "HEADERS on 0",
            frame(HEADERS, END_HEADERS, 0, block(&GET)),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "PRIORITY on 0",
            frame(PRIORITY, 0, 0, [0; 5]),
            Gone(PROTOCOL_ERROR),
        ),
        ("RST_STREAM on 0", rst(0), Gone(PROTOCOL_ERROR)),
        (
            "CONTINUATION on 0",
            frame(CONTINUATION, 0, 0, ""),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "SETTINGS on a stream",
            frame(SETTINGS, 0, 1, ""),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "PING on a stream",
            frame(PING, 0, 1, [0; 8]),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "GOAWAY on a stream",
            frame(GOAWAY, 0, 1, [0; 8]),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "a promise by a client",
            after(frame(PUSH_PROMISE, END_HEADERS, 1, [0, 0, 0, 2])),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "a stream of the server's",
            get(2, "/"),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "streams in the wrong order",
            [get(5, "/never"), get(1, "/")].concat(),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "DATA on an idle stream",
            frame(DATA, 0, 9, "x"),
            Gone(PROTOCOL_ERROR),
        ),
        ("RST_STREAM on an idle stream", rst(9), Gone(PROTOCOL_ERROR)),
        (
            "WINDOW_UPDATE on an idle stream",
            window_update(9, 1),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "PRIORITY on an idle stream",
            [frame(PRIORITY, 0, 9, [0; 5]), get(1, "/")].concat(),
            Answered,
        ),
        (
            "CONTINUATION of nothing",
            after(frame(CONTINUATION, END_HEADERS, 1, "")),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "DATA inside a head",
            [begun.clone(), frame(DATA, 0, 1, "x")].concat(),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "PING inside a head",
            [begun.clone(), frame(PING, 0, 0, [0; 8])].concat(),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "somebody else's CONTINUATION",
            [begun.clone(), frame(CONTINUATION, END_HEADERS, 3, "")].concat(),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "a head in parts",
            [
                begun,
                frame(CONTINUATION, END_HEADERS, 1, block(&[("a", "b")])),
            ]
            .concat(),
            Answered,
        ),
        (
            "DATA after the end",
            after(frame(DATA, END_STREAM, 1, "x")),
            STRICTER,
        ),
        ("HEADERS after the end", after(request(1, &GET)), STRICTER),
        (
            "no window added to a stream",
            after(window_update(1, 0)),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "no window added to all",
            window_update(0, 0),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "too much window for a stream",
            after(window_update(1, (1 << 31) - 1)),
            Reset(FLOW_CONTROL_ERROR),
        ),
        (
            "too much window for all",
            window_update(0, (1 << 31) - 1),
            Gone(FLOW_CONTROL_ERROR),
        ),
        (
            "an ACK of nothing",
            frame(SETTINGS, ACK, 0, ""),
            Gone(PROTOCOL_ERROR),
        ),
        (
            "a stream that depends on itself",
            frame(
                HEADERS,
                END_STREAM | END_HEADERS | 0x20,
                1,
                [&[0, 0, 0, 1, 0][..], &block(&GET)].concat(),
            ),
            Reset(PROTOCOL_ERROR),
        ),
    ])
    .await;
}

#[tokio::test]
async fn heads_and_bodies_that_are_no_request() {
    let bad = with(":path", "/bad");
    let and = |name, value| request(1, &[&bad[..], &[(name, value)]].concat());
    let without = |name| {
        request(
            1,
            &bad.iter()
                .copied()
                .filter(|(given, _)| *given != name)
                .collect::<Vec<_>>(),
        )
    };
    let wrong = Reset(PROTOCOL_ERROR);
    all_end_as_they_should(vec![
        ("an upper-case name", and("X-Upper", "1"), STRICTER),
        ("a name with a space", and("x y", "1"), STRICTER),
        ("an empty name", and("", "1"), STRICTER),
        ("a value with a line feed", and("x", "1\n2"), STRICTER),
        ("a value with NUL", and("x", "1\0"), STRICTER),
        ("an unknown pseudo-field", and(":proto", "1"), STRICTER),
        (":status in a request", and(":status", "200"), wrong),
        (
            "a pseudo-field after others",
            request(1, &[&[("x", "1")], &bad[..]].concat()),
            wrong,
        ),
        (":method twice", and(":method", "GET"), wrong),
        (":path twice", and(":path", "/other"), wrong),
        (":scheme twice", and(":scheme", "http"), wrong),
        (":authority twice", and(":authority", "b"), wrong),
        ("no :method", without(":method"), wrong),
        ("no :scheme", without(":scheme"), wrong),
        ("no :path", without(":path"), wrong),
        ("an empty :path", request(1, &with(":path", "")), wrong),
        ("connection", and("connection", "keep-alive"), wrong),
        ("keep-alive", and("keep-alive", "5"), wrong),
        ("proxy-connection", and("proxy-connection", "close"), wrong),
        (
            "transfer-encoding",
            and("transfer-encoding", "chunked"),
            wrong,
        ),
        ("upgrade", and("upgrade", "websocket"), wrong),
        ("te", and("te", "gzip"), wrong),
        (
            "te: trailers",
            request(1, &[&GET[..], &[("te", "trailers")]].concat()),
            Answered,
        ),
        ("a length, and no body", and("content-length", "1"), wrong),
        ("two lengths", and("content-length", "1, 2"), wrong),
        (
            "less than its length",
            [
                post(&[("content-length", "5")]),
                frame(DATA, END_STREAM, 1, "123"),
            ]
            .concat(),
            wrong,
        ),
        (
            "more than its length",
            [post(&[("content-length", "2")]), frame(DATA, 0, 1, "123")].concat(),
            wrong,
        ),
        (
            "trailers that do not end it",
            [post(&[]), head(1, &[("x", "1")])].concat(),
            wrong,
        ),
        // h2 drops them, and so the upstream sees none.
        (
            "trailers with pseudo-fields",
            [head(1, &GET), request(1, &[(":path", "/bad")])].concat(),
            Answered,
        ),
    ])
    .await;
}

/// What is right is answered: a PING, and settings, at once and in order.
#[tokio::test]
async fn pings_and_settings_are_acknowledged() {
    let upstream = upstream().await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = Framed::connect(proxy.address, &setting(3, 50)).await;
    client.send(frame(PING, 0, 0, "abcdefgh")).await;
    client
        .find("an ACK", |frame| {
            (frame.kind, frame.flags) == (SETTINGS, ACK)
        })
        .await;
    let pong = client
        .find("a pong", |frame| (frame.kind, frame.flags) == (PING, ACK))
        .await;
    assert_eq!(pong.payload, b"abcdefgh");
}
