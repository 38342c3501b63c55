//! Limits that h2 keeps per connection: a slow or abusive stream ends no other stream.

use crate::support::h2_frames::*;
use crate::support::h2_upstream::{H2Exchange, H2Upstream};
use crate::support::prelude::*;
use bytes::Bytes;
use h2::server::Builder;
use hyper::Response;
use std::future::{pending, poll_fn};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

const ONE_WORKER: &str = "listen.threads = 1\n";

/// Number of requests that wait while other clients do not read.
const HELD: usize = 5;

async fn start_proxy(upstream: &H2Upstream) -> Proxy {
    Proxy::start(ONE_WORKER, &upstream.url()).await
}

/// Sends DATA frames of these sizes in turn until the proxy grants no window for some time, or the
/// stream ends.
async fn send_until_stalled(mut exchange: H2Exchange, sizes: &[usize]) {
    let head = Response::builder().status(200).body(()).unwrap();
    let mut stream = exchange.respond.send_response(head, false).unwrap();
    for size in sizes.iter().copied().cycle() {
        stream.reserve_capacity(size.max(1));
        while stream.capacity() < size {
            let more = timeout(
                Duration::from_millis(300),
                poll_fn(|cx| stream.poll_capacity(cx)),
            );
            match more.await {
                Ok(Some(Ok(_))) => {}
                Ok(_) => return,
                Err(_stalled) => {
                    tokio::spawn(async move { (stream, pending::<()>().await) });
                    return;
                }
            }
        }
        if stream
            .send_data(Bytes::from(vec![b'x'; size]), false)
            .is_err()
        {
            return;
        }
        tokio::task::yield_now().await;
    }
}

/// Answers `/hold` when `stalled` other requests make no progress, and all others with an endless
/// body of DATA frames with these sizes.
async fn start_endless_upstream(sizes: &'static [usize], stalled: u32) -> H2Upstream {
    let release = Arc::new(Semaphore::new(0));
    let mut builder = Builder::new();
    builder.enable_connect_protocol();
    H2Upstream::with_handler(builder, move |exchange| {
        let release = Arc::clone(&release);
        async move {
            if exchange.request.uri().path() == "/hold" {
                drop(release.acquire_many(stalled).await.unwrap());
                return exchange.respond_with(200, "held");
            }
            send_until_stalled(exchange, sizes).await;
            release.add_permits(1);
        }
    })
    .await
}

fn spawn_held_requests(proxy: &Proxy) -> Vec<tokio::task::JoinHandle<u16>> {
    (0..HELD)
        .map(|_| tokio::spawn(proxy.request("GET", "/hold").send_for_status()))
        .collect()
}

async fn assert_all_are_answered(held: Vec<tokio::task::JoinHandle<u16>>, what: &str) {
    let mut statuses = Vec::new();
    for request in held {
        statuses.push(request.await.unwrap());
    }
    assert_eq!(statuses, [200; HELD], "{what}");
}

#[tokio::test]
async fn clients_that_do_not_read_small_frames_end_no_other_request() {
    for sizes in [&[7][..], &[1], &[255, 1], &[300, 1, 1], &[7, 7, 9_000]] {
        let upstream = start_endless_upstream(sizes, 4).await;
        let proxy = start_proxy(&upstream).await;
        let held = spawn_held_requests(&proxy);
        let mut readers = Vec::new();
        for head in [
            "GET /endless HTTP/1.1\r\nHost: a\r\n\r\n",
            "GET /socket HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        ] {
            let reader = proxy.send_raw(head).await;
            readers.push(reader);
        }
        let mut reader = FrameClient::connect(proxy.address, &encode_setting(4, 0)).await;
        reader.send(get_frame(1, "/endless")).await;
        reader.send(get_frame(3, "/endless")).await;
        assert_all_are_answered(held, &format!("frames of {sizes:?} bytes")).await;
        assert_eq!(upstream.connection_count(), 1);
    }
}

#[tokio::test]
async fn a_stalled_response_passes_unchanged_once_the_client_reads() {
    let body: Vec<u8> = (0..50_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    let expected = body.clone();
    let sent = Arc::new(Semaphore::new(0));
    let all_sent = Arc::clone(&sent);
    let upstream = H2Upstream::with_handler(Builder::new(), move |mut exchange| {
        let (body, sent) = (body.clone(), Arc::clone(&sent));
        async move {
            let head = Response::builder().status(200).body(()).unwrap();
            let mut stream = exchange.respond.send_response(head, false).unwrap();
            for chunk in body.chunks(11) {
                stream
                    .send_data(Bytes::copy_from_slice(chunk), false)
                    .unwrap();
                tokio::task::yield_now().await;
            }
            let trailers = hyper::HeaderMap::from_iter([(
                hyper::header::HeaderName::from_static("x-end"),
                hyper::header::HeaderValue::from_static("1"),
            )]);
            stream.send_trailers(trailers).unwrap();
            sent.add_permits(1);
        }
    })
    .await;
    let proxy = start_proxy(&upstream).await;
    let mut reader = FrameClient::connect(proxy.address, &encode_setting(4, 0)).await;
    reader.send(get_frame(1, "/")).await;
    reader.wait_for_kind(HEADERS).await;
    all_sent.acquire().await.unwrap().forget();
    assert_eq!(proxy.get("/livez-of-nobody").await.status, 200);
    reader
        .send(encode_frame(SETTINGS, 0, 0, encode_setting(4, 1 << 20)))
        .await;
    let mut received = Vec::new();
    loop {
        let frame = reader
            .wait_for_frame("DATA", |frame| matches!(frame.kind, DATA | HEADERS))
            .await;
        if frame.kind == HEADERS {
            assert!(frame.flags & END_STREAM != 0, "trailers");
            break;
        }
        received.extend(frame.payload);
    }
    assert!(received == expected, "{} bytes", received.len());
}

#[tokio::test]
async fn empty_frames_of_an_upstream_end_no_request() {
    let upstream = H2Upstream::with_handler(Builder::new(), |mut exchange| async move {
        let head = Response::builder().status(200).body(()).unwrap();
        let mut stream = exchange.respond.send_response(head, false).unwrap();
        for _ in 0..60 {
            stream.send_data(Bytes::new(), false).unwrap();
            stream.send_data(Bytes::from_static(b"x"), false).unwrap();
        }
        stream.send_data(Bytes::new(), true).unwrap();
    })
    .await;
    let proxy = start_proxy(&upstream).await;
    for n in 0..5 {
        let response = proxy.get("/").await;
        assert_eq!(response.body, [b'x'; 60], "request {n}");
    }
    assert_eq!(upstream.connection_count(), 1);
}

/// Connections of a trusted proxy carry many clients: what one client sends ends no other request.
#[tokio::test]
async fn malformed_requests_through_a_trusted_proxy_end_no_other_request() {
    let upstream = H2Upstream::echo().await;
    let config = format!("{ONE_WORKER}[client]\ntrusted_proxies = ['127.0.0.0/8']\n");
    let proxy = Proxy::start(&config, &upstream.url()).await;
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    client.send(window_update_frame(0, 1 << 30)).await;
    for n in 0..600 {
        let malformed = get_fields_with("connection", "close");
        client.send(request_frame(1 + 2 * n, &malformed)).await;
        client
            .wait_for_frame("a rejection", |frame| frame.status() == Some(400))
            .await;
    }
    client.send(get_frame(2_001, "/")).await;
    let answer = client
        .wait_for_frame("an answer", |frame| {
            frame.stream == 2_001 || frame.kind == GOAWAY
        })
        .await;
    assert_eq!(answer.status(), Some(200));
    assert!(!client.wait_for_close(TEST_TIMEOUT / 50).await.0);
}

fn post_head_frame(stream: u32, path: &str) -> Vec<u8> {
    let fields = [
        &[(":method", "POST")],
        &GET_FIELDS[1..3],
        &[(":path", path)],
    ]
    .concat();
    request_head_frame(stream, &fields)
}

/// Answers `/hold` with the next permit, never reads `/upload`, and grants no window for uploads.
async fn start_unreading_upstream(release: &Arc<Semaphore>) -> H2Upstream {
    let held = Arc::clone(release);
    let mut builder = Builder::new();
    builder.initial_window_size(0);
    H2Upstream::with_handler(builder, move |exchange| {
        let held = Arc::clone(&held);
        async move {
            match exchange.request.uri().path() {
                "/hold" => {
                    held.acquire().await.unwrap().forget();
                    exchange.respond_with(200, "held");
                }
                "/upload" => {
                    // Holds the stream open without reading.
                    pending::<()>().await;
                    drop(exchange);
                }
                _ => exchange.respond_with(200, "at once"),
            }
        }
    })
    .await
}

#[tokio::test]
async fn an_upload_of_small_frames_ends_no_other_stream_of_its_client() {
    let release = Arc::new(Semaphore::new(0));
    let upstream = start_unreading_upstream(&release).await;
    let proxy = start_proxy(&upstream).await;
    for size in [5, 30, 200] {
        let mut client = FrameClient::connect(proxy.address, &[]).await;
        let opening = [post_head_frame(1, "/upload"), get_frame(3, "/hold")].concat();
        client.send(opening).await;
        // Before it acknowledges the SETTINGS, a client has a window of 64 KiB.
        client.send(encode_frame(SETTINGS, ACK, 0, [])).await;
        let count = 240_000_usize.div_ceil(size).min(20_000);
        for n in 0..20_u32 {
            let frames = encode_frame(DATA, 0, 1, vec![b'x'; size]).repeat(count / 20);
            assert!(client.send(frames).await, "{size} bytes");
            let stream = 5 + 2 * n;
            client.send(get_frame(stream, "/")).await;
            let answer = client
                .wait_for_frame("an answer", |frame| {
                    frame.kind == GOAWAY || frame.kind == HEADERS && frame.stream == stream
                })
                .await;
            assert_eq!(answer.status(), Some(200), "{size} bytes, request {n}");
        }
        release.add_permits(1);
        let answer = client
            .wait_for_frame("the held response", |frame| {
                frame.kind == GOAWAY || frame.kind == HEADERS && frame.stream == 3
            })
            .await;
        assert_eq!(answer.status(), Some(200), "{size} bytes");
    }
}

/// Tiny frames end their upload. Only a stranger who goes on loses the connection, after a GOAWAY.
#[tokio::test]
async fn an_upload_of_tiny_frames_is_reset_alone() {
    const TRUSTED: &str = "client.trusted_proxies = ['127.0.0.0/8']\n";
    let release = Arc::new(Semaphore::new(0));
    let upstream = start_unreading_upstream(&release).await;
    for (is_trusted, size) in [(true, 0), (true, 1), (true, 4), (false, 1), (false, 4)] {
        let proxy = Proxy::start(
            &format!("{}{ONE_WORKER}", if is_trusted { TRUSTED } else { "" }),
            &upstream.url(),
        )
        .await;
        let mut client = FrameClient::connect(proxy.address, &[]).await;
        let opening = [post_head_frame(1, "/upload"), get_frame(3, "/hold")].concat();
        client.send(opening).await;
        client.send(encode_frame(SETTINGS, ACK, 0, [])).await;
        let tiny = encode_frame(DATA, 0, 1, vec![b'x'; size]).repeat(1_000);
        for _ in 0..12 {
            assert!(client.send(&tiny).await, "{size} bytes");
        }
        let name = format!("trusted {is_trusted}, {size} bytes");
        let reset = client
            .wait_for_frame(&name, |frame| matches!(frame.kind, GOAWAY | RST_STREAM))
            .await;
        assert_eq!((reset.kind, reset.stream), (RST_STREAM, 1), "{name}");
        let goes_on = if is_trusted { 20 } else { 0 };
        for _ in 0..goes_on {
            assert!(client.send(&tiny).await, "{size} bytes");
        }
        release.add_permits(1);
        let answer = client
            .wait_for_frame(&name, |frame| {
                frame.kind == GOAWAY || frame.kind == HEADERS && frame.stream == 3
            })
            .await;
        assert_eq!(answer.status(), Some(200), "{name}");
        if !is_trusted {
            let mut sent = 0;
            while sent < 20 && client.send(&tiny).await {
                sent += 1;
            }
            let goaway = client.wait_for_frame(&name, |frame| frame.kind == GOAWAY);
            assert_eq!(goaway.await.error_code(), Some(ENHANCE_YOUR_CALM), "{name}");
        }
    }
}
