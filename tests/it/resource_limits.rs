//! Bounds on the resources that an untrusted client can consume.

use crate::support::h2_frames::*;
use crate::support::prelude::*;

#[tokio::test]
async fn a_body_above_the_limit_is_a_413() {
    let upstream = RawUpstream::with_response("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    let proxy = Proxy::start("[listen.http]\nmax_body_bytes = '1KiB'", upstream.address).await;
    proxy
        .request("POST", "/")
        .body(vec![b'x'; 1_024])
        .expect_status(200)
        .await;
    let before = upstream.received_bytes().len();
    let reply = proxy
        .request("POST", "/")
        .body(vec![b'x'; 1_025])
        .send()
        .await;
    reply
        .expect_status(413)
        .expect_header("content-type", "application/problem+json");
    assert_eq!(
        upstream.received_bytes().len(),
        before,
        "a body announced as too large must not reach the upstream"
    );
    let mut client = proxy
        .send_raw("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        .await;
    client
        .send(format!(
            "400\r\n{}\r\n1\r\nx\r\n0\r\n\r\n",
            "x".repeat(1_024)
        ))
        .await;
    assert_eq!(
        client.read_response().await.status,
        413,
        "a body without a length is rejected once it is too large"
    );
    assert!(
        !upstream.received_bytes()[before..].ends_with(b"0\r\n\r\n"),
        "the upstream must not see a complete request"
    );
    let mut h2 = open_http2_connection(proxy.address).await;
    let body = Full::from(vec![b'x'; 2_000]).boxed();
    let request = Request::post("http://a/").body(body).unwrap();
    assert_eq!(await_response(h2.send_request(request)).await.status(), 413);
}

#[tokio::test]
async fn headers_above_the_limit_are_a_431() {
    let proxy = Proxy::with_echo("[listen.http]\nmax_headers = 10").await;
    let request = |name: &'static str, count| {
        let mut request = Request::get("http://a/")
            .body(Full::default().boxed())
            .unwrap();
        for _ in 0..count {
            request.headers_mut().append(name, "y=1".parse().unwrap());
        }
        request
    };
    let mut h2 = open_http2_connection(proxy.address).await;
    for (name, count, status) in [("x", 10, 200), ("x", 11, 431), ("cookie", 30, 200)] {
        assert_eq!(
            await_response(h2.send_request(request(name, count)))
                .await
                .status(),
            status,
            "{count} {name}"
        );
    }
    let lines = "x: y\r\n".repeat(10);
    let mut client = proxy
        .send_raw(format!("GET / HTTP/1.1\r\nHost: a\r\n{lines}\r\n"))
        .await;
    assert_eq!(client.read_response().await.status, 431);
}

#[tokio::test]
async fn a_stalled_body_times_out() {
    let upstream = RawUpstream::silent().await;
    let config = "[listen.http]\nbody_idle_timeout = '300ms'";
    let proxy = Proxy::start(config, upstream.address).await;
    let mut client = proxy
        .send_raw("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nshort")
        .await;
    let start = Instant::now();
    let reply = client.read_response_or_close().await;
    assert_faster_than(TEST_TIMEOUT / 2, start);
    assert!(
        reply.is_none_or(|reply| matches!(reply.status, 400 | 408)),
        "a timeout of the client's body is a 4xx"
    );
    client.read_to_close().await;
}

#[tokio::test]
async fn a_slow_but_steady_body_is_accepted() {
    let proxy = Proxy::with_echo("[listen.http]\nbody_idle_timeout = '1s'").await;
    let mut client = proxy
        .send_raw("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 8\r\n\r\n")
        .await;
    for _ in 0..8 {
        sleep(Duration::from_millis(200)).await;
        client.send("x").await;
    }
    assert_eq!(client.read_response().await.json()["body_len"], 8);
}

#[tokio::test]
async fn an_idle_connection_is_closed_after_its_timeout() {
    let proxy = Proxy::with_echo("[listen.http]\nidle_timeout = '300ms'").await;
    let mut client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert_eq!(client.read_response().await.status, 200);
    assert!(client.closes_within(TEST_TIMEOUT).await);
}

/// The first connections reuse memory that idle connections have released, so only the later ones
/// are counted.
#[tokio::test]
async fn an_idle_connection_uses_little_memory() {
    const CONNECTIONS_PER_ROUND: u64 = 100;
    let proxy = Proxy::with_echo("[listen]\nthreads = 1").await;
    let mut clients = Vec::new();
    let mut after_first = None;
    for _ in 0..6 {
        for _ in 0..CONNECTIONS_PER_ROUND {
            let mut client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
            assert_eq!(client.read_response().await.status, 200);
            clients.push(client);
        }
        sleep(Duration::from_millis(300)).await;
        after_first.get_or_insert_with(|| proxy.rss_kib());
    }
    let each_kib =
        proxy.rss_kib().saturating_sub(after_first.unwrap()) / (5 * CONNECTIONS_PER_ROUND);
    assert!(each_kib < 12, "{each_kib} KiB per idle connection");
}

#[tokio::test]
async fn memory_is_released_after_a_burst_of_connections() {
    let proxy = Proxy::with_echo("[listen]\nthreads = 1").await;
    assert_eq!(proxy.get("/").await.status, 200);
    let before = proxy.anonymous_kib();
    let mut clients = Vec::new();
    for _ in 0..1_000 {
        let mut client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert_eq!(client.read_response().await.status, 200);
        clients.push(client);
    }
    let burst = proxy.anonymous_kib() - before;
    drop(clients);
    wait_until(
        format!("the memory of the burst, {burst} KiB, to be freed"),
        async || proxy.anonymous_kib() <= before + 2_500,
    )
    .await;
}

/// The rest of the body arrives after the response: only then the connection is idle.
#[tokio::test]
async fn a_connection_is_idle_after_a_discarded_body() {
    let config = "[listen.http]\nidle_timeout = '300ms'\n\
        [[policy]]\nname = 'deny'\nmatch = { path = '/deny' }\naction = 'deny'";
    let proxy = Proxy::with_echo(config).await;
    let mut client = RawClient::connect(proxy.address).await;
    let head = "POST /deny HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n";
    assert_eq!(client.request(head).await.status, 403);
    client.send("0123456789").await;
    assert!(client.closes_within(Duration::from_secs(5)).await);
}

#[tokio::test]
async fn a_short_head_timeout_does_not_cut_idle_connections() {
    let config = "[listen.http]\nheader_timeout = '200ms'\nidle_timeout = '30s'";
    let proxy = Proxy::with_echo(config).await;
    let mut client = RawClient::connect(proxy.address).await;
    for _ in 0..2 {
        client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert_eq!(client.read_response().await.status, 200);
        sleep(Duration::from_millis(600)).await;
    }
}

#[tokio::test]
async fn upstream_connections_and_the_wait_for_one_are_bounded() {
    let upstream = Upstream::with_handler(|_| std::future::pending()).await;
    let config = "[listen]\nthreads = 1\n[upstream]\nmax_connections = 2\nqueue_timeout = '200ms'";
    let proxy = Proxy::start(config, upstream.address).await;
    let mut held = Vec::new();
    for n in 1..=2 {
        let client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        wait_until("the request to arrive", async || {
            upstream.requests().len() == n
        })
        .await;
        held.push(client);
    }
    let reply = proxy.get("/").await;
    assert_eq!(reply.status, 503, "{reply:?}");
    assert_contains(
        reply.header("proxy-status").unwrap(),
        &["error=connection_limit_reached"],
    );
    assert_eq!(upstream.connection_count(), 2);
}

/// Frames of an HTTP/2 request head that never ends, 60 KB in all.
fn unfinished_h2_head() -> Vec<u8> {
    let field = encode_header_block(&[("x-filler", &"a".repeat(15_000))]);
    let mut frames = encode_frame(
        HEADERS,
        0,
        1,
        encode_header_block(&get_fields_with("a", "b")),
    );
    for _ in 0..4 {
        frames.extend(encode_frame(CONTINUATION, 0, 1, &field));
    }
    frames
}

#[tokio::test]
async fn an_unfinished_http2_head_is_closed_after_header_timeout() {
    let config = "[listen]\nthreads = 1\n[listen.http]\nheader_timeout = '1s'";
    let proxy = Proxy::with_echo(config).await;
    assert_eq!(proxy.get("/").await.status, 200);
    let before = proxy.rss_kib();
    let mut held = Vec::new();
    for _ in 0..200 {
        let mut client = FrameClient::connect(proxy.address, &[]).await;
        client.send(unfinished_h2_head()).await;
        held.push(client);
    }
    let last = held.last_mut().unwrap();
    last.wait_for_kind(SETTINGS).await;
    println!(
        "{} KiB for each unfinished head",
        (proxy.rss_kib() - before) / 200
    );
    for client in &mut held {
        assert!(client.wait_for_close(Duration::from_secs(5)).await.0);
    }
    let closed = "tidegate_connections_closed_total{reason=\"header_timeout\"}";
    assert_eq!(proxy.read_metric(closed).await, 200.0);
    // The same holds beside an active request, and for trailers.
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    client
        .send(request_head_frame(
            1,
            &[
                (":method", "POST"),
                (":scheme", "http"),
                (":path", "/"),
                (":authority", "a"),
            ],
        ))
        .await;
    client.send(encode_frame(HEADERS, 1, 1, [])).await;
    assert!(client.wait_for_close(Duration::from_secs(5)).await.0);
    assert_eq!(proxy.get("/").await.status, 200);
}

/// Requests a large body on each connection and reads only its start.
async fn open_slow_readers(
    proxy: &Proxy,
    count: usize,
    tls: Option<&TlsClient>,
    http2: bool,
) -> Vec<RawClient> {
    let mut readers = Vec::new();
    for _ in 0..count {
        let mut client = match tls {
            Some(tls) => tls.connect_http1(proxy.address, "a.example").await,
            None => RawClient::connect(proxy.address).await,
        };
        if http2 {
            let settings = [encode_setting(4, 1 << 20)].concat();
            let frames = [
                PREFACE,
                &encode_frame(SETTINGS, 0, 0, settings),
                &window_update_frame(0, 64 << 20),
                &get_frame(1, "/big"),
            ];
            client.send(frames.concat()).await;
        } else {
            client.send("GET /big HTTP/1.1\r\nHost: a\r\n\r\n").await;
        }
        client.read_first_bytes().await;
        readers.push(client);
    }
    sleep(Duration::from_millis(500)).await;
    readers
}

#[tokio::test]
async fn a_slow_reader_of_a_large_answer_uses_little_memory() {
    const READERS: usize = 100;
    const MAX_KIB_EACH: u64 = 96;
    let body = bytes::Bytes::from(vec![b'x'; 20 << 20]);
    let upstream = Upstream::with_handler(move |request| {
        let body = body.clone();
        async move {
            match request.uri().path() {
                "/big" => Response::new(full_body(body)),
                _ => echo(request).await,
            }
        }
    })
    .await;
    let ca = CertificateAuthority::new();
    ca.sign("a", "a.example");
    let tls_config = ca.listen_tls("a");
    let tls = TlsClient::new(&ca);
    for (name, tls, http2) in [
        ("HTTP/1.1", None, false),
        ("HTTP/2", None, true),
        ("HTTP/1.1 over TLS", Some(&tls), false),
    ] {
        let config = if tls.is_some() {
            tls_config.as_str()
        } else {
            ""
        };
        let config = format!("[listen]\nthreads = 1\n{config}");
        let proxy = Proxy::start(&config, upstream.address).await;
        drop(open_slow_readers(&proxy, 5, tls, http2).await);
        let before = proxy.anonymous_kib();
        let kernel_before = kernel_tcp_kib();
        let readers = open_slow_readers(&proxy, READERS, tls, http2).await;
        let each = proxy.anonymous_kib().saturating_sub(before) / READERS as u64;
        let kernel = kernel_tcp_kib().saturating_sub(kernel_before) / READERS as u64;
        println!("{name}: {each} KiB for each slow reader, {kernel} KiB in kernel sockets");
        assert!(each <= MAX_KIB_EACH, "{name}: {each} KiB");
        drop(readers);
    }
}

#[tokio::test]
async fn a_slow_upload_that_policies_read_uses_little_memory() {
    const UPLOADS: usize = 200;
    const MAX_KIB_EACH: u64 = 64 + 32;
    const BYTES: usize = 64 * 1000;
    let upstream = Upstream::echo().await;
    let policy = "[[policy]]\nname = \"a\"\nkey = [\"body:/model\"]\n\
        limit = { requests = 1000000, per = \"1h\" }\n";
    let proxy = Proxy::start(
        &format!("[listen]\nthreads = 1\n{policy}"),
        upstream.address,
    )
    .await;
    let head = format!(
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
         Content-Length: {BYTES}\r\n\r\n{{\"model\":\""
    );
    let start = [head.into_bytes(), vec![b'x'; BYTES - 4000]].concat();
    let mut uploads = Vec::new();
    let mut open_uploads = async |count: usize| {
        for _ in 0..count {
            let mut client = RawClient::connect(proxy.address).await;
            client.send(&start).await;
            uploads.push(client);
        }
        sleep(Duration::from_millis(500)).await;
    };
    // Without what the first connections of a process need.
    open_uploads(50).await;
    let before = proxy.anonymous_kib();
    open_uploads(UPLOADS).await;
    let each = proxy.anonymous_kib().saturating_sub(before) / UPLOADS as u64;
    println!("{each} KiB for each upload");
    assert!(each >= 50, "the uploads were not kept: {each} KiB");
    assert!(each <= MAX_KIB_EACH, "{each} KiB");
}

/// Memory of all TCP sockets of this machine.
fn kernel_tcp_kib() -> u64 {
    let text = fs::read_to_string("/proc/net/sockstat").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("TCP:"));
    let pages = line.and_then(|line| line.split_whitespace().last()?.parse::<u64>().ok());
    pages.unwrap_or_default() * 4
}
