//! Limits that h2 keeps per connection: a slow or abusive stream ends no other stream.

use crate::support::h2_frames::*;
use crate::support::prelude::*;
use h2::server::Builder;
use std::collections::VecDeque;
use std::future::{pending, poll_fn};

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
    reader.send(setting_frame(4, 1 << 20)).await;
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

/// An app over h2c that answers its second request with these frames before the first one. It sends
/// DATA only within the windows. Each request gives a permit.
async fn start_frame_upstream(
    frames: fn(u32) -> Vec<Vec<u8>>,
    arrived: &Arc<Semaphore>,
) -> RawUpstream {
    let arrived = Arc::clone(arrived);
    RawUpstream::with_script(move |_, socket| serve_frames(socket, frames, Arc::clone(&arrived)))
        .await
}

async fn serve_frames(
    mut socket: RawSocket,
    frames: fn(u32) -> Vec<Vec<u8>>,
    arrived: Arc<Semaphore>,
) {
    let socket = socket.stream();
    let (mut requests, mut windows) = (Vec::new(), HashMap::from([(0, 65_535)]));
    let mut answer: VecDeque<Vec<u8>> = VecDeque::new();
    let opening = setting_frame(3, 100);
    if socket.read_exact(&mut [0; 24]).await.is_err() || socket.write_all(&opening).await.is_err() {
        return;
    }
    let mut stream_window = 65_535;
    loop {
        let mut fixed = [0; 9];
        if socket.read_exact(&mut fixed).await.is_err() {
            return;
        }
        let [a, b, c, kind, flags, s, t, r, e] = fixed;
        let stream = u32::from_be_bytes([s, t, r, e]);
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        socket.read_exact(&mut payload).await.unwrap();
        match (kind, flags & ACK) {
            (SETTINGS, 0) => {
                for setting in payload.chunks(6).filter(|setting| setting[1] == 4) {
                    stream_window = i64::from(u32::from_be_bytes(setting[2..].try_into().unwrap()));
                }
                answer.push_back(encode_frame(SETTINGS, ACK, 0, []));
            }
            (PING, 0) => answer.push_back(encode_frame(PING, ACK, 0, payload)),
            (WINDOW_UPDATE, _) => {
                let by = u32::from_be_bytes(payload.try_into().unwrap());
                *windows.entry(stream).or_insert(stream_window) += i64::from(by);
            }
            (HEADERS, _) => {
                requests.push(stream);
                arrived.add_permits(1);
                windows.insert(stream, stream_window);
                if let [first, second] = requests[..] {
                    answer.extend(frames(second));
                    answer.push_back(headers_frame(END_STREAM, first, [0x88]));
                }
            }
            _ => {}
        }
        while let Some(frame) = answer.front() {
            let taken = if frame[3] == DATA {
                frame.len() as i64 - 9
            } else {
                0
            };
            let stream = u32::from_be_bytes(frame[5..9].try_into().unwrap());
            if [0, stream]
                .iter()
                .any(|id| *windows.entry(*id).or_default() < taken)
            {
                break;
            }
            for id in [0, stream] {
                *windows.entry(id).or_default() -= taken;
            }
            if socket.write_all(frame).await.is_err() {
                return;
            }
            answer.pop_front();
        }
    }
}

/// A DATA frame with padding.
fn padded_data_frame(flags: u8, stream: u32, data: &[u8], padding: u8) -> Vec<u8> {
    let payload = [&[padding][..], data, &vec![0; usize::from(padding)]].concat();
    encode_frame(DATA, flags | PADDED, stream, payload)
}

/// The padding of frames without data takes window, which the app gets back.
#[tokio::test]
async fn padding_and_empty_continuations_of_an_upstream_end_no_request() {
    type FramesOfStream = fn(u32) -> Vec<Vec<u8>>;
    let answers: [FramesOfStream; 3] = [
        |stream| {
            let head = encode_frame(HEADERS, END_HEADERS, stream, [0x88]);
            let empty = vec![padded_data_frame(0, stream, b"", 5); 2_000];
            let last = padded_data_frame(END_STREAM, stream, b"e", 5);
            [vec![head], empty, vec![last]].concat()
        },
        |stream| {
            let head = encode_frame(HEADERS, END_HEADERS, stream, [0x88]);
            let empty = vec![padded_data_frame(0, stream, b"", 255); 30_000];
            let last = last_data_frame(stream, "e");
            [vec![head], empty, vec![last]].concat()
        },
        |stream| {
            let start = encode_frame(HEADERS, 0, stream, [0x88]);
            let empty = vec![encode_frame(CONTINUATION, 0, stream, []); 300];
            let end = encode_frame(CONTINUATION, END_HEADERS, stream, []);
            let last = last_data_frame(stream, "e");
            [vec![start], empty, vec![end, last]].concat()
        },
    ];
    for (n, frames) in answers.into_iter().enumerate() {
        let arrived = Arc::new(Semaphore::new(0));
        let upstream = start_frame_upstream(frames, &arrived).await;
        let url = format!("h2c://{}", upstream.address);
        let proxy = Proxy::start(ONE_WORKER, &url).await;
        let held = tokio::spawn(proxy.request("GET", "/hold").send_for_status());
        arrived.acquire().await.unwrap().forget();
        let response = proxy.get("/").await;
        assert_eq!(
            (response.status, response.text()),
            (200, "e".into()),
            "answer {n}"
        );
        assert_eq!(held.await.unwrap(), 200, "answer {n}");
        assert_eq!(upstream.connection_count(), 1);
    }
}

/// The window that a client's padding takes is returned.
#[tokio::test]
async fn padding_of_an_upload_ends_no_other_stream_of_its_client() {
    let upstream = H2Upstream::echo().await;
    let proxy = start_proxy(&upstream).await;
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    client.send(post_head_frame(1, "/")).await;
    client.send(encode_frame(SETTINGS, ACK, 0, [])).await;
    let mut windows = HashMap::from([(0, 0), (1, 0)]);
    for n in 0..8 {
        client
            .send(padded_data_frame(0, 1, b"", 255).repeat(500))
            .await;
        client.send(padded_data_frame(0, 1, b"d", 9)).await;
        let stream = 3 + 2 * n;
        client.send(get_frame(stream, "/")).await;
        let (wanted, mut is_answered) = (500 * 256 * (n + 1), false);
        while !is_answered || windows.values().any(|window| *window < wanted) {
            let is_relevant = |frame: &RawFrame| {
                matches!(frame.kind, GOAWAY | RST_STREAM | WINDOW_UPDATE)
                    || frame.kind == HEADERS && frame.stream == stream
            };
            let frame = client
                .wait_for_frame("answer and window", is_relevant)
                .await;
            if frame.kind == WINDOW_UPDATE {
                let by = u32::from_be_bytes(frame.payload.try_into().unwrap());
                *windows.entry(frame.stream).or_default() += by;
            } else {
                assert_eq!(frame.status(), Some(200), "request {n}: {frame:?}");
                is_answered = true;
            }
        }
    }
    client.send(last_data_frame(1, "e")).await;
    let (mut body, mut has_ended) = (Vec::new(), false);
    while !has_ended {
        let data = client.wait_for_frame("DATA", |frame| (frame.kind, frame.stream) == (DATA, 1));
        let data = data.await;
        has_ended = data.flags & END_STREAM != 0;
        body.extend(data.payload);
    }
    assert!(body.ends_with(b"\n\ndddddddde"), "{body:?}");
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
            let frames = data_frame(1, vec![b'x'; size]).repeat(count / 20);
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
    for (is_trusted, size, padding) in [
        (true, 0, None),
        (true, 0, Some(3)),
        (true, 1, None),
        (true, 4, None),
        (false, 0, Some(0)),
        (false, 1, None),
        (false, 1, Some(7)),
        (false, 4, None),
    ] {
        let config = format!("{}{ONE_WORKER}", if is_trusted { TRUSTED } else { "" });
        let proxy = Proxy::start(&config, &upstream.url()).await;
        let mut client = FrameClient::connect(proxy.address, &[]).await;
        let opening = [post_head_frame(1, "/upload"), get_frame(3, "/hold")].concat();
        client.send(opening).await;
        client.send(encode_frame(SETTINGS, ACK, 0, [])).await;
        let data = vec![b'x'; size];
        let tiny = match padding {
            Some(padding) => padded_data_frame(0, 1, &data, padding),
            None => data_frame(1, &data),
        };
        let tiny = tiny.repeat(1_000);
        for _ in 0..12 {
            assert!(client.send(&tiny).await, "{size} bytes");
        }
        let name = format!("trusted {is_trusted}, {size} bytes, padding {padding:?}");
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
