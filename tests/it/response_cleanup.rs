//! Responses that the upstream ends or frames wrongly, from HTTP/1.1 and h2c upstreams to HTTP/1.1
//! and HTTP/2 clients.

use crate::support::h2_frames::*;
use crate::support::prelude::*;
use hyper::{HeaderMap, Method};
use tokio::time::Duration;

/// Fields and frames (kind, flags, payload) of a response of an h2c upstream.
type H2cCase = (
    &'static [(&'static str, &'static str)],
    &'static [(u8, u8, &'static [u8])],
);

/// A response as an HTTP/2 client sees it: head and body, or the error of either.
struct Http2Response {
    status: u16,
    headers: HeaderMap,
    body: Result<(Vec<u8>, HeaderMap), String>,
}

async fn request_over_http2(proxy: &Proxy, method: Method) -> Http2Response {
    let mut sender = open_http2_connection(proxy.address).await;
    let request = Request::builder()
        .method(method)
        .uri("http://a/")
        .body(ClientBody::default())
        .unwrap();
    let (head, body) = await_response(sender.send_request(request))
        .await
        .into_parts();
    let body = in_time(body.collect()).await;
    Http2Response {
        status: head.status.as_u16(),
        headers: head.headers,
        body: body.map_err(|error| error.to_string()).map(|body| {
            let trailers = body.trailers().cloned().unwrap_or_default();
            (body.to_bytes().to_vec(), trailers)
        }),
    }
}

async fn start_http1(response: &'static str, closes: bool) -> (RawUpstream, Proxy) {
    let upstream = RawUpstream::with_script(move |_, mut socket| async move {
        while socket.read_request().await.is_some() {
            socket.send(response.as_bytes()).await;
            if closes {
                return;
            }
        }
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    (upstream, proxy)
}

/// Reads frames up to the next request head, and returns its stream.
async fn read_request_stream(socket: &mut RawSocket) -> Option<[u8; 4]> {
    loop {
        let mut head = [0; 9];
        socket.stream().read_exact(&mut head).await.ok()?;
        let length = usize::from(head[1]) << 8 | usize::from(head[2]);
        let mut payload = vec![0; length];
        socket.stream().read_exact(&mut payload).await.ok()?;
        if head[3] == HEADERS {
            return head[5..].try_into().ok();
        }
    }
}

/// Answers each request with these fields and frames: kind, flags and payload.
async fn start_h2c(
    fields: &'static [(&'static str, &'static str)],
    frames: &'static [(u8, u8, &'static [u8])],
) -> (RawUpstream, Proxy) {
    let upstream = RawUpstream::with_script(move |_, mut socket| async move {
        socket.send(&encode_frame(SETTINGS, 0, 0, "")).await;
        let mut preface = [0; 24];
        if socket.stream().read_exact(&mut preface).await.is_err() {
            return;
        }
        while let Some(stream) = read_request_stream(&mut socket).await {
            let stream = u32::from_be_bytes(stream);
            let ends = if frames.is_empty() { END_STREAM } else { 0 };
            let block = encode_header_block(fields);
            let mut bytes = encode_frame(HEADERS, END_HEADERS | ends, stream, block);
            for (kind, flags, payload) in frames {
                bytes.extend(encode_frame(*kind, *flags, stream, payload));
            }
            socket.send(&bytes).await;
        }
    })
    .await;
    let url = format!("h2c://{}", upstream.address);
    let proxy = Proxy::start("", &url).await;
    (upstream, proxy)
}

async fn assert_is_bad_gateway(proxy: &Proxy, case: &str) {
    let mut client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let reply = client.read_response_or_close().await;
    let reply = reply.unwrap_or_else(|| panic!("{case}: closed without a byte"));
    assert_eq!(reply.status, 502, "{case}");
    reply.expect_header("content-type", "application/problem+json");
    assert!(reply.complete, "{case}");
    let reply = request_over_http2(proxy, Method::GET).await;
    assert_eq!(reply.status, 502, "{case} over HTTP/2");
    assert!(reply.body.is_ok(), "{case} over HTTP/2");
}

const RESET: &[u8] = &[0, 0, 0, 2];
const LENGTH_5: &[(&str, &str)] = &[(":status", "200"), ("content-length", "5")];

#[tokio::test]
async fn a_body_that_fails_at_once_is_answered_with_502() {
    for (response, case) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "no body"),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            "invalid chunk",
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
            "two lengths",
        ),
    ] {
        let (_upstream, proxy) = start_http1(response, true).await;
        assert_is_bad_gateway(&proxy, case).await;
    }
    const TRAILERS: (u8, u8, &[u8]) = (HEADERS, END_STREAM | END_HEADERS, b"\x00\x01x\x01y");
    const NO_LENGTH: &[(&str, &str)] = &[(":status", "200")];
    const LARGE: (u8, u8, &[u8]) = (DATA, 0, &[b'a'; 16_000]);
    let cases: [H2cCase; 18] = [
        (LENGTH_5, &[(DATA, 0, b"o"), (DATA, END_STREAM, b"")]),
        (
            LENGTH_5,
            &[(DATA, 0, b"o"), (DATA, 0, b"k"), (DATA, END_STREAM, b"")],
        ),
        (
            LENGTH_5,
            &[(DATA, PADDED, b"\x03ok\0\0\0"), (DATA, END_STREAM, b"k")],
        ),
        (LENGTH_5, &[(DATA, 0, b"hell"), (DATA, END_STREAM, b"ox")]),
        (LENGTH_5, &[(DATA, 0, b"hello"), (DATA, END_STREAM, b"x")]),
        (LENGTH_5, &[(DATA, 0, b"ok"), TRAILERS]),
        (LENGTH_5, &[(DATA, 0, b"ok"), (RST_STREAM, 0, RESET)]),
        (LENGTH_5, &[(DATA, 0, b"ok"), (RST_STREAM, 0, &[0; 4])]),
        (NO_LENGTH, &[(DATA, 0, b"ok"), (RST_STREAM, 0, RESET)]),
        (NO_LENGTH, &[(DATA, 0, b"ok"), (RST_STREAM, 0, &[0; 4])]),
        (NO_LENGTH, &[LARGE, LARGE, LARGE, (RST_STREAM, 0, RESET)]),
        (LENGTH_5, &[(DATA, END_STREAM, b"ok")]),
        (LENGTH_5, &[(DATA, END_STREAM, b"too long")]),
        (LENGTH_5, &[(DATA, END_STREAM, b"")]),
        (LENGTH_5, &[(RST_STREAM, 0, RESET)]),
        (LENGTH_5, &[(RST_STREAM, 0, &[0; 4])]),
        (NO_LENGTH, &[(RST_STREAM, 0, RESET)]),
        (
            &[
                (":status", "200"),
                ("content-length", "5"),
                ("content-length", "6"),
            ],
            &[(DATA, END_STREAM, b"hello")],
        ),
    ];
    for (fields, frames) in cases {
        let (_upstream, proxy) = start_h2c(fields, frames).await;
        assert_is_bad_gateway(&proxy, &format!("{fields:?} {frames:?}")).await;
    }
}

/// The start of the body may come late; a stream without a length may not start for long.
#[tokio::test]
async fn a_head_does_not_wait_long_for_its_body() {
    for (head, case) in [
        ("Content-Length: 5", "a length"),
        ("Content-Type: text/event-stream", "no length"),
    ] {
        let upstream = RawUpstream::with_script(move |_, mut socket| async move {
            socket.read_request().await;
            let head = format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n");
            socket.send(head.as_bytes()).await;
            socket.read_to_close().await;
        })
        .await;
        let proxy = Proxy::start("", upstream.address).await;
        let mut client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let head = timeout(Duration::from_secs(5), client.read_past(b"\r\n\r\n")).await;
        assert!(
            head.is_ok_and(|head| head.starts_with(b"HTTP/1.1 200")),
            "{case}"
        );
    }
}

/// What the upstream sent before it failed reaches the client, also if it arrives with the failure.
#[tokio::test]
async fn a_body_that_breaks_later_is_passed_on_and_never_looks_complete() {
    for (length, received) in [(Some("9"), "def"), (None, "3\r\ndef\r\n")] {
        let breaks = Arc::new(Semaphore::new(0));
        let waiting = Arc::clone(&breaks);
        let upstream = RawUpstream::with_script(move |_, mut socket| {
            let breaks = Arc::clone(&waiting);
            async move {
                socket.send(&encode_frame(SETTINGS, 0, 0, "")).await;
                let mut preface = [0; 24];
                socket.stream().read_exact(&mut preface).await.unwrap();
                while let Some(stream) = read_request_stream(&mut socket).await {
                    let stream = u32::from_be_bytes(stream);
                    let mut fields = vec![(":status", "200")];
                    fields.extend(length.map(|length| ("content-length", length)));
                    let head = encode_header_block(&fields);
                    socket
                        .send(&encode_frame(HEADERS, END_HEADERS, stream, head))
                        .await;
                    socket.send(&data_frame(stream, "abc")).await;
                    breaks.acquire().await.unwrap().forget();
                    let data = data_frame(stream, "def");
                    let reset = encode_frame(RST_STREAM, 0, stream, RESET);
                    socket.send(&[data, reset].concat()).await;
                }
            }
        })
        .await;
        let url = format!("h2c://{}", upstream.address);
        let proxy = Proxy::start("", &url).await;
        let mut client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let head = client.read_past(b"abc").await;
        assert!(head.starts_with(b"HTTP/1.1 200"), "{head:?}");
        breaks.add_permits(1);
        let rest = client.read_to_close().await;
        assert_eq!(String::from_utf8_lossy(&rest).trim_start(), received);

        let mut sender = open_http2_connection(proxy.address).await;
        let request = Request::get("http://a/").body(ClientBody::default());
        let response = await_response(sender.send_request(request.unwrap())).await;
        let (mut body, mut data) = (response.into_body(), Vec::new());
        let mut end = None;
        while end.is_none() {
            match in_time(body.frame()).await {
                Some(Ok(frame)) => {
                    data.extend(frame.into_data().unwrap());
                    breaks.add_permits(usize::from(data == b"abc"));
                }
                ended => end = Some(ended.is_some()),
            }
        }
        assert_eq!((&data[..], end), (&b"abcdef"[..], Some(true)), "{length:?}");
    }
}

#[tokio::test]
async fn http2_clients_get_only_what_http2_allows() {
    const STATUS_204: &str = "HTTP/1.1 204 No Content\r\nContent-Length: 4\r\n\r\n";
    const FIELDS: &str = "HTTP/1.1 200 OK\r\nConnection: x-hop, keep-alive\r\nX-Hop: 1\r\n\
        Keep-Alive: timeout=5\r\nProxy-Connection: close\r\nUpgrade: h2c\r\nTE: gzip\r\n\
        X-End: 1\r\nContent-Length: 5, 5\r\n\r\nhello";
    const TRAILERS: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\
        Trailer: x-sum, connection\r\n\r\n5\r\nhello\r\n0\r\nConnection: close\r\n\
        Keep-Alive: 5\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\nX-Sum: 1\r\n\r\n";
    for (response, method, status, body) in [
        (STATUS_204, Method::GET, 204, ""),
        (
            "HTTP/1.1 205 Reset Content\r\nContent-Length: 4\r\n\r\nabcd",
            Method::GET,
            205,
            "abcd",
        ),
        (
            "HTTP/1.1 304 Not Modified\r\nContent-Length: 4\r\n\r\n",
            Method::GET,
            304,
            "",
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n",
            Method::HEAD,
            200,
            "",
        ),
        (FIELDS, Method::GET, 200, "hello"),
        (TRAILERS, Method::GET, 200, "hello"),
    ] {
        let (_upstream, proxy) = start_http1(response, false).await;
        let reply = request_over_http2(&proxy, method).await;
        assert_eq!(reply.status, status, "{response}");
        let (received, trailers) = reply.body.unwrap_or_else(|e| panic!("{response}: {e}"));
        assert_eq!(received, body.as_bytes(), "{response}");
        for name in [
            "connection",
            "keep-alive",
            "content-length",
            "transfer-encoding",
        ] {
            assert!(!trailers.contains_key(name), "{name} in {trailers:?}");
        }
        assert_eq!(trailers.contains_key("x-sum"), response == TRAILERS);
        for name in [
            "connection",
            "x-hop",
            "keep-alive",
            "proxy-connection",
            "upgrade",
            "te",
        ] {
            assert!(
                !reply.headers.contains_key(name),
                "{name} in {:?}",
                reply.headers
            );
        }
        let length = reply.headers.get("content-length");
        let found = length.is_none();
        assert_eq!(found, status == 204 || response == TRAILERS, "{response}");
    }
    let cases: [H2cCase; 5] = [
        (
            &[(":status", "204"), ("x-a", " b ")],
            &[(DATA, END_STREAM, b"abcd")],
        ),
        (&[(":status", "204"), ("content-length", "4")], &[]),
        (&[(":status", "304"), ("content-length", "4")], &[]),
        (&[(":status", "304")], &[(DATA, END_STREAM, b"abcd")]),
        (&[(":status", "205"), ("x-a", "b\t")], &[]),
    ];
    for (fields, frames) in cases {
        let (_upstream, proxy) = start_h2c(fields, frames).await;
        let case = format!("{fields:?} {frames:?}");
        let reply = request_over_http2(&proxy, Method::GET).await;
        assert_eq!(reply.status.to_string(), fields[0].1, "{case}");
        assert_eq!(reply.body.expect(&case).0, b"", "{case}");
        if reply.status == 204 {
            assert!(!reply.headers.contains_key("content-length"), "{case}");
        }
        if let Some(value) = reply.headers.get("x-a") {
            assert_eq!(value, "b", "{case}");
        }
        let mut client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let reply = client.read_response().await;
        assert_eq!(reply.status.to_string(), fields[0].1, "{case}");
        assert!(reply.complete && !client.has_buffered_bytes(), "{case}");
    }
}

/// A HEAD is answered without a body also by the proxy itself.
#[tokio::test]
async fn own_replies_to_head_have_no_body() {
    let deny = "[[policy]]\nname = 'deny'\naction = 'deny'";
    let proxy = Proxy::start(deny, "http://127.0.0.1:9").await;
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    let mut fields = GET_FIELDS;
    for (name, value) in &mut fields {
        if *name == ":method" {
            *value = "HEAD";
        }
    }
    client.send(request_frame(1, &fields)).await;
    let head = client.wait_for_kind(HEADERS).await;
    assert_ne!(
        head.flags & END_STREAM,
        0,
        "the response to a HEAD has a body"
    );
}
