//! SIGTERM under load: no request that was sent in time is lost.

use crate::support::client::open_http2_over_stream;
use crate::support::h2_frames::*;
use crate::support::prelude::*;
use hyper::StatusCode;
use tokio::sync::watch;

const SHUTDOWN_DELAY: Duration = Duration::from_millis(800);

/// Results collected by the clients.
#[derive(Clone, Default)]
struct ClientResults {
    answered: Arc<AtomicU64>,
    /// Send times of the requests without a complete response.
    lost: Arc<std::sync::Mutex<Vec<(&'static str, Instant)>>>,
}

impl ClientResults {
    fn record(&self, client_name: &'static str, sent: Instant, whole: bool) {
        match whole {
            true => _ = self.answered.fetch_add(1, Ordering::Relaxed),
            false => self.lost.lock().unwrap().push((client_name, sent)),
        }
    }
}

/// Answers after some milliseconds, and echoes bytes after an upgrade.
async fn start_upstream() -> RawUpstream {
    RawUpstream::with_script(|_, mut socket| async move {
        while let Some(request) = socket.read_request().await {
            if request
                .windows(8)
                .any(|part| part.eq_ignore_ascii_case(b"upgrade:"))
            {
                socket
                    .send(b"HTTP/1.1 101 S\r\nUpgrade: chat\r\nConnection: upgrade\r\n\r\n")
                    .await;
                let (mut reads, mut writes) = socket.stream().split();
                tokio::io::copy(&mut reads, &mut writes)
                    .await
                    .unwrap_or_default();
                return;
            }
            sleep(Duration::from_millis(3)).await;
            socket
                .send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
                .await;
        }
    })
    .await
}

/// Connects until the listener is closed, and returns the time of the last connection.
async fn connect_until_refused(address: SocketAddr) -> Instant {
    let mut last = Instant::now();
    loop {
        let start = Instant::now();
        if TcpStream::connect(address).await.is_err() {
            return last;
        }
        last = start;
        sleep(Duration::from_millis(2)).await;
    }
}

/// Sends one request after the other. A connection with `Connection: close` is replaced.
async fn run_http1_client(address: SocketAddr, pause: Duration, seen: ClientResults) {
    while let Ok(socket) = TcpStream::connect(address).await {
        let mut client = RawClient::from_stream(socket);
        loop {
            // A close between requests loses nothing if the client sees it before its next request.
            if client
                .closes_within(pause.max(Duration::from_micros(1)))
                .await
            {
                break;
            }
            let sent = Instant::now();
            let reply = client
                .send("GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                .await
                .read_response_or_close()
                .await;
            seen.record(
                "h1",
                sent,
                reply
                    .as_ref()
                    .is_some_and(|reply| reply.status == 200 && reply.complete),
            );
            if reply.is_none_or(|reply| reply.header("connection") == Some("close")) {
                break;
            }
        }
    }
}

/// As [`run_http1_client`], over HTTP/2. A request that GOAWAY prevented was not sent, so it is not
/// lost.
async fn run_http2_client(address: SocketAddr, seen: ClientResults) {
    while let Ok(stream) = TcpStream::connect(address).await {
        let mut sender = open_http2_over_stream(stream).await;
        while sender.ready().await.is_ok() {
            let sent = Instant::now();
            match sender.send_request(get_request("http://a/")).await {
                Ok(answer) => seen.record("h2", sent, answer.status() == StatusCode::OK),
                Err(error) if error.is_canceled() => break,
                Err(_) => seen.record("h2", sent, false),
            }
        }
    }
}

/// Sends bytes through a tunnel until it is stopped, then closes it cleanly.
async fn run_tunnel_client(
    address: SocketAddr,
    mut end: watch::Receiver<bool>,
    seen: ClientResults,
) {
    let mut client = RawClient::connect(address).await;
    let upgrade = "GET /chat HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: chat\r\n\r\n";
    assert_eq!(
        client
            .send(upgrade)
            .await
            .read_any_response(false)
            .await
            .status,
        101
    );
    while !*end.borrow_and_update() {
        let sent = Instant::now();
        client.send("hello?").await;
        seen.record(
            "tunnel",
            sent,
            client.read_past(b"hello?").await == b"hello?",
        );
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn mixed_traffic_loses_no_request_sent_before_the_listener_closed() {
    let upstream = start_upstream().await;
    let config = format!(
        "[shutdown]\ndelay = '{}ms'\ngrace = '20s'",
        SHUTDOWN_DELAY.as_millis()
    );
    let mut proxy = Proxy::start(&config, upstream.address).await;
    let (seen, (end, ended), address) = (
        ClientResults::default(),
        watch::channel(false),
        proxy.address,
    );
    let mut clients = JoinSet::new();
    for n in 0..6 {
        // Some clients send at once, others pause between requests.
        clients.spawn(run_http1_client(
            address,
            Duration::from_millis(n * 3),
            seen.clone(),
        ));
    }
    for _ in 0..3 {
        clients.spawn(run_http2_client(address, seen.clone()));
    }
    let mut chats = JoinSet::new();
    for _ in 0..3 {
        chats.spawn(run_tunnel_client(address, ended.clone(), seen.clone()));
    }
    let text = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nhalf";
    let mut upload = RawClient::connect_and_send(address, text).await;
    let answered = || seen.answered.load(Ordering::Relaxed);
    wait_until("all clients to be active", async || answered() > 100).await;

    let signalled_at = Instant::now();
    proxy.send_sigterm();
    let not_ready = async {
        wait_until("the end of the readiness", async || {
            proxy
                .admin_request("GET", "/readyz")
                .send_for_status()
                .await
                == 503
        })
        .await;
        signalled_at.elapsed()
    };
    let (closed, not_ready) = tokio::join!(connect_until_refused(address), not_ready);
    assert!(
        not_ready < SHUTDOWN_DELAY / 2,
        "readiness failed late, after {not_ready:?}"
    );
    assert!(
        closed >= signalled_at + SHUTDOWN_DELAY - Duration::from_millis(50),
        "the listener closed before the end of the delay"
    );
    clients.join_all().await;
    let lost = seen.lost.lock().unwrap().clone();
    let in_time: Vec<_> = lost
        .iter()
        .filter(|(_, sent)| *sent < closed)
        .map(|(client_name, sent)| (client_name, closed - *sent))
        .collect();
    assert!(
        in_time.is_empty(),
        "lost, by client and time before the close: {in_time:?}"
    );
    assert!(proxy.is_running(), "tunnels and the upload are still open");
    let before = answered();
    upload.send("-done!").await;
    let reply = upload.read_response().await;
    reply
        .expect_status(200)
        .expect_header("connection", "close");
    wait_until("tunnels to continue", async || answered() > before + 10).await;
    end.send_replace(true);
    chats.join_all().await;
    proxy.assert_exit_code(0).await;
    let log_text = proxy.log_text();
    assert!(log_text.contains("\"connections_cut\":0"), "{log_text}");
}

#[tokio::test]
async fn http2_clients_get_a_goaway_before_the_connection_closes() {
    let release = Arc::new(Semaphore::new(0));
    let opened = Arc::clone(&release);
    let upstream = Upstream::with_handler(move |request| {
        let release = Arc::clone(&release);
        async move {
            release.acquire().await.unwrap().forget();
            echo(request).await
        }
    })
    .await;
    let mut proxy = Proxy::start("", upstream.address).await;
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    client.send(get_frame(1, "/")).await;
    wait_until("the request to arrive", async || {
        upstream.requests().len() == 1
    })
    .await;
    proxy.send_sigterm();
    let first = client.wait_for_kind(GOAWAY).await;
    assert_eq!(first.error_code(), Some(0));
    assert_eq!(
        first.payload[..4],
        [0x7f, 0xff, 0xff, 0xff],
        "the first GOAWAY refuses no stream"
    );
    let ping = client
        .wait_for_frame("a PING", |frame| (frame.kind, frame.flags) == (PING, 0))
        .await;
    // Sent before the client saw the first GOAWAY.
    client.send(get_frame(3, "/")).await;
    wait_until("the second request to arrive", async || {
        upstream.requests().len() == 2
    })
    .await;
    client.send(encode_frame(PING, ACK, 0, &ping.payload)).await;
    let second = client.wait_for_kind(GOAWAY).await;
    assert_eq!(second.error_code(), Some(0));
    assert_eq!(&second.payload[..4], &[0, 0, 0, 3][..]);
    opened.add_permits(2);
    let mut ended = Vec::new();
    while ended.len() < 2 {
        let end = client
            .wait_for_frame("the ends of both streams", |frame| {
                frame.kind == DATA && frame.flags & END_STREAM != 0
            })
            .await;
        ended.push(end.stream);
    }
    assert!(client.wait_for_close(TEST_TIMEOUT).await.0);
    proxy.assert_exit_code(0).await;
}

/// Posts after pauses of 0 to 20 ms. The client does not look for a close before it sends.
async fn run_posting_client(address: SocketAddr, seed: u64, seen: ClientResults) {
    let mut pauses = (0..).map(|n: u64| Duration::from_millis((seed * 13 + n * 7) % 21));
    while let Ok(socket) = TcpStream::connect(address).await {
        let mut client = RawClient::from_stream(socket);
        loop {
            sleep(pauses.next().unwrap()).await;
            let sent = Instant::now();
            client
                .send("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi")
                .await;
            let reply = client.read_response_or_close().await;
            let is_whole = reply
                .as_ref()
                .is_some_and(|reply| reply.status == 200 && reply.complete);
            seen.record("post", sent, is_whole);
            if reply.is_none_or(|reply| reply.header("connection") == Some("close")) {
                break;
            }
        }
    }
}

#[tokio::test]
async fn clients_that_keep_posting_lose_no_request() {
    let upstream = start_upstream().await;
    let config = "[shutdown]\ndelay = '500ms'\ngrace = '20s'";
    let mut proxy = Proxy::start(config, upstream.address).await;
    let mut open = RawClient::connect(proxy.address).await;
    let get = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
    let before = open.request(get).await;
    assert_eq!((before.status, before.header("connection")), (200, None));
    let seen = ClientResults::default();
    let mut clients = JoinSet::new();
    for seed in 0..40 {
        clients.spawn(run_posting_client(proxy.address, seed, seen.clone()));
    }
    wait_until("all clients to be active", async || {
        seen.answered.load(Ordering::Relaxed) > 400
    })
    .await;
    let mark = proxy.log_mark();
    proxy.send_sigterm();
    proxy.wait_for_message("stopping", mark).await;
    let answer = open.request(get).await;
    assert_eq!(
        (answer.status, answer.header("connection")),
        (200, Some("close")),
        "a request on an open connection is answered, as the last one"
    );
    clients.join_all().await;
    let lost = seen.lost.lock().unwrap().len();
    assert_eq!(lost, 0, "of {}", seen.answered.load(Ordering::Relaxed));
    proxy.wait_for_exit(TEST_TIMEOUT).await;
}

/// Sends the head and the start of each body at once, and the rest with the next permit.
async fn start_pausing_upstream(rest: &Arc<Semaphore>) -> RawUpstream {
    let rest = Arc::clone(rest);
    RawUpstream::with_script(move |_, mut socket| {
        let rest = Arc::clone(&rest);
        async move {
            while socket.read_request().await.is_some() {
                let start = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n";
                socket.send(start).await;
                rest.acquire().await.unwrap().forget();
                socket.send(b"2\r\nbc\r\n0\r\n\r\n").await;
            }
        }
    })
    .await
}

/// The head of such a response has no `Connection: close`, so the client may send another request.
#[tokio::test]
async fn a_response_that_began_before_the_drain_does_not_end_the_connection() {
    const AGE: &str = "listen.max_connection_age = '500ms'";
    let post = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi";
    for (config, pause) in [
        ("[shutdown]\ndelay = '3s'", 100),
        ("", 100),
        // The response ends later than idle connections are closed.
        ("", 1_500),
        (AGE, 700),
    ] {
        let rest = Arc::new(Semaphore::new(0));
        let upstream = start_pausing_upstream(&rest).await;
        let mut proxy = Proxy::start(config, upstream.address).await;
        let mut client = proxy.send_raw(post).await;
        let head = client.read_past(b"\r\n\r\n1\r\na\r\n").await;
        let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
        assert!(!head.contains("\r\nconnection:"), "{head}");
        if config != AGE {
            let mark = proxy.log_mark();
            proxy.send_sigterm();
            proxy.wait_for_message("stopping", mark).await;
        }
        sleep(Duration::from_millis(pause)).await;
        rest.add_permits(1);
        client.read_past(b"0\r\n\r\n").await;
        // The connection stays open for a while, not only until the next request.
        let name = format!("{config}, {pause} ms");
        assert!(
            !client.closes_within(Duration::from_millis(200)).await,
            "{name}"
        );
        rest.add_permits(1);
        let reply = client.send(post).await.read_response_or_close().await;
        let reply = reply.unwrap_or_else(|| panic!("the request is lost: {name}"));
        let close = reply.header("connection");
        assert_eq!((reply.status, close), (200, Some("close")), "{name}");
        assert!(client.closes_within(TEST_TIMEOUT).await, "{name}");
        if config != AGE {
            proxy.assert_exit_code(0).await;
        }
    }
}

#[tokio::test]
async fn connections_end_gracefully_at_their_maximum_age() {
    let upstream = start_upstream().await;
    let config = "listen.max_connection_age = '500ms'";
    let proxy = Proxy::start(config, upstream.address).await;
    let began = Instant::now();
    let mut client = RawClient::connect(proxy.address).await;
    let mut http2 = FrameClient::connect(proxy.address, &[]).await;
    loop {
        let request = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
        let reply = client.request(request).await;
        assert_eq!(reply.status, 200);
        if reply.header("connection") == Some("close") {
            break;
        }
        assert!(began.elapsed() < TEST_TIMEOUT);
        sleep(Duration::from_millis(20)).await;
    }
    assert!(
        began.elapsed() >= Duration::from_millis(450),
        "{:?}",
        began.elapsed()
    );
    assert!(client.closes_within(TEST_TIMEOUT).await);
    let goaway = http2.wait_for_kind(GOAWAY).await;
    assert_eq!(goaway.error_code(), Some(0));
    assert_eq!(goaway.payload[..4], [0x7f, 0xff, 0xff, 0xff]);
    http2.send(get_frame(1, "/")).await;
    http2
        .wait_for_frame("a response", |frame| {
            frame.kind == DATA && frame.flags & END_STREAM != 0
        })
        .await;
}
