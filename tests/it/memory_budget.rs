//! `listen.max_memory`: the memory of all client connections stays below a limit.

use crate::support::h2_frames::*;
use crate::support::prelude::*;

/// Sends requests on new connections until `stop`. All are answered with 200.
async fn keep_requesting(address: SocketAddr, stop: Arc<AtomicBool>) {
    while !stop.load(Ordering::Relaxed) {
        let status = ClientRequest::new(address, "GET", "/")
            .send_for_status()
            .await;
        assert_eq!(status, 200);
        sleep(Duration::from_millis(5)).await;
    }
}

/// The process stays below 256 MiB, without pages of the binary, which a debug build has many of.
/// Without a limit, the heads take 400 MiB.
#[tokio::test]
async fn partial_heads_on_all_connections_stay_below_the_memory_limit() {
    const CONNECTIONS: usize = 5_000;
    let config = format!(
        "[listen]\nmax_memory = '153MiB'\nmax_connections = {CONNECTIONS}\n[listen.http]\nheader_timeout = '60s'"
    );
    let mut proxy = Proxy::with_echo(&config).await;
    assert_eq!(proxy.get("/").await.status, 200);
    let stop = Arc::new(AtomicBool::new(false));
    let good = tokio::spawn(keep_requesting(proxy.address, Arc::clone(&stop)));
    let head = format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}", "x".repeat(60_000));
    let (mut attackers, mut largest_kib) = (Vec::new(), 0);
    for n in 0..CONNECTIONS {
        let attacker = proxy.send_raw(&head).await;
        attackers.push(attacker);
        if n % 100 == 0 {
            largest_kib = largest_kib.max(proxy.anonymous_kib());
        }
    }
    sleep(Duration::from_millis(500)).await;
    stop.store(true, Ordering::Relaxed);
    largest_kib = largest_kib.max(proxy.anonymous_kib());
    good.await.unwrap();
    let mut times = Vec::new();
    for _ in 0..100 {
        let start = Instant::now();
        assert_eq!(proxy.get("/").await.status, 200);
        times.push(start.elapsed());
    }
    times.sort();
    println!(
        "{largest_kib} KiB, good clients: p50 {:?}, p99 {:?}",
        times[50], times[98]
    );
    assert!(proxy.is_running());
    assert!(largest_kib < 256 << 10, "{largest_kib} KiB");
    assert!(times[98] < Duration::from_secs(1), "{:?}", times[98]);
    let closed = "tidegate_connections_closed_total{reason=\"memory\"}";
    assert!(proxy.read_metric(closed).await > 1_000.0);
}

const CLOSED_FOR_MEMORY: &str = "tidegate_connections_closed_total{reason=\"memory\"}";

/// Idle connections alone fill the budget. They give way to requests, one by one.
#[tokio::test]
async fn idle_connections_are_closed_for_requests() {
    const IDLE: usize = 400;
    let proxy = Proxy::with_echo("[listen]\nmax_memory = '1MiB'").await;
    let mut idle = Vec::new();
    for _ in 0..IDLE {
        idle.push(RawClient::connect(proxy.address).await);
    }
    sleep(Duration::from_millis(500)).await;
    let before = proxy.read_metric(CLOSED_FOR_MEMORY).await;
    for n in 0..20 {
        let status = proxy.request("GET", "/").send_for_status();
        assert_eq!(status.await, 200, "request {n}");
    }
    let closed = proxy.read_metric(CLOSED_FOR_MEMORY).await;
    assert!(closed > 100.0, "{closed}");
    assert!(
        closed - before < 50.0,
        "{} more are closed",
        closed - before
    );
}

/// The largest connections of all workers are closed, not those of the worker that grows.
#[tokio::test]
async fn the_largest_connections_of_all_workers_are_closed_first() {
    let config =
        "[listen]\nmax_memory = '2MiB'\nthreads = 2\n[listen.http]\nheader_timeout = '60s'";
    let proxy = Proxy::with_echo(config).await;
    let head = |bytes| format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}", "x".repeat(bytes));
    // The proxy gives each connection to the worker with the fewest.
    let (mut large, mut small) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        large.push(RawClient::connect(proxy.address).await);
        small.push(RawClient::connect(proxy.address).await);
        sleep(Duration::from_millis(5)).await;
    }
    for client in &mut large {
        client.send(head(60_000)).await;
    }
    sleep(Duration::from_millis(300)).await;
    assert_eq!(proxy.read_metric(CLOSED_FOR_MEMORY).await, 0.0);
    for client in &mut small {
        client.send(head(30_000)).await;
    }
    sleep(Duration::from_millis(500)).await;
    let closed = proxy.read_metric(CLOSED_FOR_MEMORY).await;
    assert!((5.0..15.0).contains(&closed), "{closed}");
    let mut open = 0;
    for client in &mut small {
        open += usize::from(!client.closes_within(Duration::from_millis(10)).await);
    }
    assert_eq!(open, 20, "smaller connections are still open");
}

/// Uploads that are refused, and streams that the client resets, hold no memory.
#[tokio::test]
async fn a_busy_http2_connection_is_not_closed_for_bodies_of_earlier_requests() {
    let upstream = Upstream::with_handler(|_| std::future::pending()).await;
    let config = "[listen]\nmax_memory = '3MiB'\n\
        [[policy]]\nname = 'deny'\nmatch = { path = '/deny' }\naction = 'deny'";
    let proxy = Proxy::start(config, upstream.address).await;
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    client.send(get_frame(1, "/never")).await;
    for n in 0..100 {
        let stream = 3 + 2 * n;
        let path = if n % 2 == 0 { "/deny" } else { "/never" };
        let head = request_head_frame(stream, &get_fields_with(":path", path));
        let mut frames = head;
        for _ in 0..4 {
            frames.extend(data_frame(stream, [0; 16_000]));
        }
        if n % 2 == 1 {
            frames.extend(rst_stream_frame(stream));
        } else {
            frames.extend(last_data_frame(stream, ""));
        }
        assert!(client.send(frames).await, "request {n}");
        sleep(Duration::from_millis(20)).await;
        assert!(!client.is_closed(), "request {n}");
    }
    assert_eq!(proxy.read_metric(CLOSED_FOR_MEMORY).await, 0.0);
}

/// A proxy with TLS, whose certificate the authority has signed.
async fn start_tls_proxy(authority: &CertificateAuthority, max_memory: &str) -> Proxy {
    authority.sign("server", "localhost");
    let config = format!(
        "[listen]\nmax_memory = '{max_memory}'\n[listen.http]\nheader_timeout = '60s'\n\
         [listen.tls]\ncert = '{}'\nkey = '{}'",
        authority.path_string("server.pem"),
        authority.path_string("server.key")
    );
    Proxy::with_echo(&config).await
}

/// Waits until at least this many connections are closed for memory.
async fn wait_for_closes(proxy: &Proxy, wanted: f64) {
    wait_until_within(
        format!("{wanted} closes"),
        Duration::from_secs(20),
        async || proxy.read_metric(CLOSED_FOR_MEMORY).await >= wanted,
    )
    .await;
}

/// The TLS layer keeps a partial message of the handshake.
#[tokio::test]
async fn partial_tls_handshakes_count() {
    let authority = CertificateAuthority::new();
    let proxy = start_tls_proxy(&authority, "4MiB").await;
    // A ClientHello of 65,000 bytes in records of 10,000, of which six arrive.
    let mut hello = vec![1, 0, 0xfd, 0xe8];
    hello.resize(60_000, 0);
    let records: Vec<u8> = hello
        .chunks(10_000)
        .flat_map(|part| [&[0x16, 3, 1, 0x27, 0x10][..], part].concat())
        .collect();
    let mut attackers = Vec::new();
    for _ in 0..200 {
        let attacker = proxy.send_raw(&records).await;
        attackers.push(attacker);
    }
    wait_for_closes(&proxy, 100.0).await;
    let client = TlsClient::new(&authority);
    let mut client = client.connect_http1(proxy.address, "localhost").await;
    let head = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    assert_eq!(client.request(head).await.status, 200);
}

/// The TLS layer keeps a partial record.
#[tokio::test]
async fn partial_tls_records_count() {
    let authority = CertificateAuthority::new();
    let proxy = start_tls_proxy(&authority, "1MiB").await;
    let client = TlsClient::new(&authority);
    let mut record = vec![0x17, 3, 3, 0x40, 0];
    record.resize(15_000, 0);
    let mut attackers = Vec::new();
    for _ in 0..100 {
        let mut attacker = client.connect(proxy.address, "localhost").await.unwrap();
        let (socket, _) = attacker.get_mut();
        socket.write_all(&record).await.unwrap();
        attackers.push(attacker);
    }
    wait_for_closes(&proxy, 30.0).await;
}

/// The input of TLS counts only until the proxy reads it.
#[tokio::test]
async fn uploads_over_tls_hold_no_memory() {
    let authority = CertificateAuthority::new();
    let proxy = start_tls_proxy(&authority, "1MiB").await;
    let client = TlsClient::new(&authority);
    let upload = format!(
        "PUT / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{}",
        "x".repeat(100_000)
    );
    let mut idle = Vec::new();
    for _ in 0..25 {
        let mut client = client.connect_http1(proxy.address, "localhost").await;
        assert_eq!(client.request(&upload).await.status, 200);
        idle.push(client);
    }
    assert_eq!(proxy.read_metric(CLOSED_FOR_MEMORY).await, 0.0);
}

/// The proxies in front of `[check]` would let requests pass without an answer.
#[tokio::test]
async fn connections_of_the_operators_proxies_stay_open() {
    let config = "[check]\naddress = '127.0.0.1:0'\n\
        [listen]\nmax_memory = '1MiB'\n[listen.http]\nheader_timeout = '60s'";
    let proxy = Proxy::with_echo(config).await;
    let check = proxy.logged_address("check listening").unwrap();
    let head = |bytes| format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}", "x".repeat(bytes));
    let mut operator = RawClient::connect_and_send(check, head(60_000)).await;
    let mut attackers = Vec::new();
    for _ in 0..40 {
        let attacker = proxy.send_raw(head(50_000)).await;
        attackers.push(attacker);
    }
    wait_for_closes(&proxy, 10.0).await;
    assert!(!operator.closes_within(Duration::from_millis(200)).await);
}

/// A head of indexed cookie crumbs takes one byte per line on the wire, and 100 decoded.
fn push_crumbs_head(into: &mut Vec<u8>, stream: u32, flags: u8) {
    let block = [
        encode_header_block(&GET_FIELDS),
        encode_indexed_literal("cookie", "a"),
        vec![0xbe; 1_500],
    ];
    into.extend(encode_frame(HEADERS, flags, stream, block.concat()));
}

/// Without counting decoded heads, they take 383 MiB.
#[tokio::test]
async fn decoded_heads_of_cookie_crumbs_stay_below_the_memory_limit() {
    let upstream = Upstream::with_handler(|_| std::future::pending()).await;
    let config = "[listen]\nmax_memory = '153MiB'\n\
        [[policy]]\nname = 'deny'\nmatch = { path = '/deny' }\naction = 'deny'";
    let proxy = Proxy::start(config, upstream.address).await;
    assert_eq!(proxy.get("/deny").await.status, 403);
    let mut clients = Vec::new();
    for _ in 0..16 {
        let mut client = FrameClient::connect(proxy.address, &[]).await;
        let mut frames = Vec::new();
        for n in 0..200 {
            push_crumbs_head(&mut frames, 2 * n + 1, END_STREAM | END_HEADERS);
        }
        client.send(frames).await;
        assert_eq!(proxy.get("/deny").await.status, 403);
        clients.push(client);
    }
    sleep(Duration::from_millis(500)).await;
    let kib = proxy.anonymous_kib();
    println!("{kib} KiB");
    assert!(kib < 200 << 10, "{kib} KiB");
    assert_eq!(proxy.get("/deny").await.status, 403);
}

/// A head of one indexed field, repeated, takes 20 bytes on the wire and 60 KB decoded. The proxy
/// joins lists, and h2 shares no values after a head that was replaced.
#[tokio::test]
async fn decoded_heads_of_large_fields_stay_below_the_memory_limit() {
    // The proxy refuses more than 1 MiB of replaced heads in one read.
    for (name, first_field, connections, streams) in [
        ("cookie", "x", 24, 200),
        ("via", "x", 24, 200),
        ("x-a", "X", 250, 16),
    ] {
        let upstream = Upstream::with_handler(|_| std::future::pending()).await;
        let config = "[listen]\nmax_memory = '153MiB'\nhttp.max_requests_waiting = 10000\n\
            [upstream]\nqueue_timeout = '60s'\n\
            [[policy]]\nname = 'deny'\nmatch = { path = '/deny' }\naction = 'deny'";
        let proxy = Proxy::start(config, upstream.address).await;
        assert_eq!(proxy.get("/deny").await.status, 403);
        let value = "v".repeat(4_000);
        let mut clients = Vec::new();
        for _ in 0..connections {
            let mut client = FrameClient::connect(proxy.address, &[]).await;
            let first = [
                encode_header_block(&get_fields_with(first_field, "1")),
                encode_indexed_literal(name, &value),
            ];
            let ends = END_STREAM | END_HEADERS;
            client
                .send(encode_frame(HEADERS, ends, 1, first.concat()))
                .await;
            let block = [encode_header_block(&GET_FIELDS), vec![0xbe; 15]].concat();
            let heads = (1..streams).map(|n| encode_frame(HEADERS, ends, 2 * n + 1, &block));
            client.send(heads.collect::<Vec<_>>().concat()).await;
            assert_eq!(proxy.get("/deny").await.status, 403);
            clients.push(client);
        }
        wait_for_closes(&proxy, 5.0).await;
        let kib = proxy.anonymous_kib();
        println!("{name}: {kib} KiB");
        assert!(kib < 240 << 10, "{name}: {kib} KiB");
        assert_eq!(proxy.get("/deny").await.status, 403);
    }
}

/// Heads without END_HEADERS are decoded as far as they have arrived.
#[tokio::test]
async fn incomplete_decoded_heads_count() {
    let config = "[listen]\nmax_memory = '20MiB'\n[listen.http]\nheader_timeout = '60s'";
    let proxy = Proxy::with_echo(config).await;
    let mut clients = Vec::new();
    for _ in 0..200 {
        let mut client = FrameClient::connect(proxy.address, &[]).await;
        let mut frames = Vec::new();
        push_crumbs_head(&mut frames, 1, END_STREAM);
        client.send(frames).await;
        clients.push(client);
    }
    wait_for_closes(&proxy, 50.0).await;
    assert_eq!(proxy.get("/").await.status, 200);
}

/// Without counting decoded trailers, they take 385 MiB.
#[tokio::test]
async fn decoded_trailers_stay_below_the_memory_limit() {
    // Neither the start of a gRPC call nor trailers behind it are read before the request has an
    // upstream connection; the whole body of another request is.
    for content_type in ["application/grpc", "text/plain"] {
        let upstream = Upstream::with_handler(|_| std::future::pending()).await;
        let config = "[listen]\nmax_memory = '153MiB'\nhttp.max_requests_waiting = 10000\n\
            [upstream]\nmax_connections = 1\nqueue_timeout = '60s'\n\
            [[policy]]\nname = 'deny'\nmatch = { path = '/deny' }\naction = 'deny'";
        let proxy = Proxy::start(config, upstream.address).await;
        assert_eq!(proxy.get("/deny").await.status, 403);
        let mut clients = Vec::new();
        for _ in 0..16 {
            let mut client = FrameClient::connect(proxy.address, &[]).await;
            let mut fields = get_fields_with("content-type", content_type);
            fields[0].1 = "POST";
            let head = encode_header_block(&fields);
            let mut frames = Vec::new();
            for n in 0..200 {
                frames.extend(encode_frame(HEADERS, END_HEADERS, 2 * n + 1, &head));
            }
            client.send(frames).await;
            for n in 0..200 {
                let block = [encode_indexed_literal("cookie", "a"), vec![0xbe; 1_500]].concat();
                let trailers = headers_frame(END_STREAM, 2 * n + 1, block);
                client.send(trailers).await;
            }
            assert_eq!(proxy.get("/deny").await.status, 403);
            clients.push(client);
        }
        wait_for_closes(&proxy, 5.0).await;
        let kib = proxy.anonymous_kib();
        println!("{content_type}: {kib} KiB");
        assert!(kib < 200 << 10, "{content_type}: {kib} KiB");
        assert_eq!(proxy.get("/deny").await.status, 403);
    }
}
