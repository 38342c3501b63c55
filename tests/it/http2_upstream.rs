//! HTTP/2 to the upstream: many requests on one connection, each with its own end. `bodies` covers
//! their bodies.

mod bodies;

use crate::support::h2_frames;
use crate::support::nginx::Nginx;
use crate::support::prelude::*;
use h2::Reason;
use h2::server::Builder;
use std::io::Write;
use tokio::sync::mpsc;

/// One worker, so that all connections belong to the same pool.
const ONE_WORKER: &str = "listen.threads = 1\n";

async fn start_proxy(upstream: &H2Upstream, config: &str) -> Proxy {
    Proxy::start(&format!("{ONE_WORKER}{config}"), &upstream.url()).await
}

/// Answers once the test releases the semaphore.
fn respond_when_released(
    release: &Arc<Semaphore>,
) -> impl Fn(H2Exchange) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> + Clone + use<> {
    let release = Arc::clone(release);
    move |exchange| {
        let release = Arc::clone(&release);
        Box::pin(async move {
            release.acquire().await.unwrap().forget();
            exchange.respond_with(200, "ok");
        })
    }
}

fn spawn_get(proxy: &Proxy, target: &str) -> tokio::task::JoinHandle<u16> {
    tokio::spawn(proxy.request("GET", target).send_for_status())
}

#[tokio::test]
async fn a_request_is_translated_to_http2() {
    let upstream = H2Upstream::echo().await;
    let proxy = start_proxy(&upstream, "").await;
    let ask = proxy
        .request("POST", "/a//b?x=1&y")
        .header("Host", "shop.example:81")
        .header("TE", "trailers");
    let ask = ask
        .header("Connection", "TE, X-Hop, keep-alive")
        .header("X-Hop", "1")
        .header("Upgrade", "other");
    let reply = ask.header("Cookie", "a=1; b=2").body("body").send().await;
    let text = reply.text();
    assert!(
        text.starts_with("POST http://shop.example:81/a//b?x=1&y\n") && text.ends_with("\n\nbody"),
        "{text}"
    );
    for line in [
        "te: trailers",
        "cookie: a=1; b=2",
        "content-length: 4",
        "x-forwarded-for: 127.0.0.1",
        "via: 1.1 tidegate",
    ] {
        assert!(text.lines().any(|had| had == line), "no {line} in {text}");
    }
    for name in [
        "host",
        "connection",
        "x-hop",
        "keep-alive",
        "upgrade",
        "transfer-encoding",
    ] {
        assert!(
            !text
                .lines()
                .any(|line| line.starts_with(&format!("{name}: "))),
            "{name} in {text}"
        );
    }
    assert_eq!(reply.header("via"), Some("2 tidegate"));

    // HTTP/2 on both sides: cookie fields are joined.
    let mut request = get_request("http://shop.example/");
    for crumb in ["a=1", "b=2"] {
        request
            .headers_mut()
            .append("cookie", crumb.parse().unwrap());
    }
    let answer = await_response(
        open_http2_connection(proxy.address)
            .await
            .send_request(request),
    )
    .await;
    let text = String::from_utf8(
        answer
            .into_body()
            .collect()
            .await
            .unwrap()
            .to_bytes()
            .to_vec(),
    )
    .unwrap();
    assert!(
        text.lines().any(|line| line == "cookie: a=1; b=2"),
        "{text}"
    );
    assert_eq!(upstream.connection_count(), 1);

    let proxy = start_proxy(&upstream, "upstream.preserve_host = false").await;
    let text = proxy.get("/").await.text();
    assert_starts(&text, format!("GET http://{}/\n", upstream.address));
    assert!(text.contains("x-forwarded-host: shop.example\n"), "{text}");
}

#[tokio::test]
async fn one_connection_carries_many_concurrent_requests() {
    let release = Arc::new(Semaphore::new(0));
    let upstream = H2Upstream::with_handler(Builder::new(), respond_when_released(&release)).await;
    let proxy = start_proxy(&upstream, "").await;
    let asked: Vec<_> = (0..60).map(|_| spawn_get(&proxy, "/")).collect();
    release.add_permits(60);
    for asked in asked {
        assert_eq!(in_time(asked).await.unwrap(), 200);
    }
    let count = upstream.connection_count();
    assert_eq!(count, 1, "concurrent requests share the first connection");
}

#[tokio::test]
async fn another_connection_is_opened_when_all_streams_are_in_use() {
    let release = Arc::new(Semaphore::new(0));
    let mut builder = Builder::new();
    builder.max_concurrent_streams(2);
    let (slow, seen) = (
        respond_when_released(&release),
        Arc::<AtomicUsize>::default(),
    );
    let seeing = Arc::clone(&seen);
    let upstream = H2Upstream::with_handler(builder, move |exchange| {
        seeing.fetch_add(1, Ordering::SeqCst);
        slow(exchange)
    })
    .await;
    let config = "upstream.max_connections = 2\nupstream.queue_timeout = '200ms'";
    let proxy = start_proxy(&upstream, config).await;
    let asked: Vec<_> = (0..4).map(|_| spawn_get(&proxy, "/")).collect();
    wait_until("four requests", async || seen.load(Ordering::SeqCst) == 4).await;
    proxy
        .expect_status("/", 503, "a fifth request has no stream")
        .await;
    release.add_permits(4);
    for asked in asked {
        assert_eq!(in_time(asked).await.unwrap(), 200);
    }
    assert_eq!(upstream.connection_count(), 2);

    // A request with a long queue timeout gets a stream later.
    let config = "upstream.max_connections = 1\nupstream.queue_timeout = '10s'";
    let proxy = start_proxy(&upstream, config).await;
    let asked: Vec<_> = (0..6).map(|_| spawn_get(&proxy, "/")).collect();
    release.add_permits(6);
    for asked in asked {
        assert_eq!(in_time(asked).await.unwrap(), 200);
    }
    // A connection may be closed for another worker while a request that just got a stream still
    // counts as waiting.
    assert!(
        (3..=4).contains(&upstream.connection_count()),
        "{}",
        upstream.connection_count()
    );
}

#[tokio::test]
async fn after_goaway_a_connection_only_finishes_its_open_streams() {
    let release = Arc::new(Semaphore::new(0));
    let slow = respond_when_released(&release);
    let upstream = H2Upstream::with_handler(Builder::new(), move |exchange| {
        let slow = (exchange.request.uri().path() == "/slow").then(|| slow.clone());
        async move {
            match slow {
                None => {
                    let connection = exchange.connection_index.to_string();
                    exchange.respond_with(200, connection);
                }
                Some(slow) => slow(exchange).await,
            }
        }
    })
    .await;
    let proxy = start_proxy(&upstream, "").await;
    let under_way = spawn_get(&proxy, "/slow");
    assert_eq!(proxy.get_with("/", "X-Go-Away", "1").await.text(), "0");
    // Which worker sees the GOAWAY first depends on timing. All requests are answered.
    for _ in 0..20 {
        let request = proxy.request("POST", "/").body("body");
        request.expect_status(200).await;
    }
    assert_eq!(proxy.get("/").await.text(), "1");
    release.add_permits(1);
    assert_eq!(in_time(under_way).await.unwrap(), 200);
}

#[tokio::test]
async fn a_refused_stream_is_retried_once() {
    let seen = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&seen);
    let upstream = H2Upstream::with_handler(Builder::new(), move |mut exchange| {
        let number = counted.fetch_add(1, Ordering::SeqCst);
        async move {
            let refusals: usize = exchange.request.headers()["x-refusals"]
                .to_str()
                .unwrap()
                .parse()
                .unwrap();
            let body = exchange.read_body().await.unwrap();
            if number < refusals {
                exchange.respond.send_reset(Reason::REFUSED_STREAM);
            } else {
                exchange.respond_with(200, body);
            }
        }
    })
    .await;
    let proxy = start_proxy(&upstream, "").await;
    for (method, length, refusals, status, times) in [
        ("GET", 0, "1", 200, 2),
        // The upstream has processed nothing, so even this request may be retried.
        ("POST", 0, "1", 200, 2),
        ("GET", 0, "2", 502, 2),
        ("POST", 4, "1", 200, 2),
        ("POST", 60_000, "1", 200, 2),
        ("POST", 4, "2", 502, 2),
        // The start of the body is no longer buffered.
        ("POST", 200_000, "1", 502, 1),
    ] {
        seen.store(0, Ordering::SeqCst);
        let body = pseudo_random_bytes(length);
        let request = proxy.request(method, "/").header("X-Refusals", refusals);
        let reply = request.body(body.clone()).send().await;
        assert_eq!(reply.status, status, "{method} {length}");
        assert!(status != 200 || reply.body == body, "{method} {length}");
        assert_eq!(seen.load(Ordering::SeqCst), times, "{method} {length}");
    }
    assert_eq!(upstream.connection_count(), 1);
}

/// A server's default SETTINGS, and the ACK of the client's SETTINGS.
const SERVER_SETTINGS: &[u8] = b"\0\0\0\x04\0\0\0\0\0\0\0\0\x04\x01\0\0\0\0";

/// GOAWAY with a last stream id of 0: no stream was processed.
const GOAWAY_NO_STREAMS: &[u8] = b"\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// Reads the preface and frames up to the first HEADERS frame.
async fn read_request_head(socket: &mut RawSocket) {
    let stream = socket.stream();
    stream.read_exact(&mut [0; 24]).await.unwrap();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.unwrap();
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        stream.read_exact(&mut vec![0; length]).await.unwrap();
        if head[3] == 1 {
            return;
        }
    }
}

#[tokio::test]
async fn a_request_after_goaway_is_retried_on_another_connection() {
    let upstream = RawUpstream::with_script(|number, mut socket| async move {
        socket.send(SERVER_SETTINGS).await;
        read_request_head(&mut socket).await;
        if number == 0 {
            socket.send(GOAWAY_NO_STREAMS).await;
        } else {
            // :status 204 from HPACK's static table, with END_STREAM and END_HEADERS.
            socket.send(b"\0\0\x01\x01\x05\0\0\0\x01\x89").await;
        }
        socket.read_to_close().await;
    })
    .await;
    let proxy = Proxy::start(ONE_WORKER, &format!("h2c://{}", upstream.address)).await;
    assert_eq!(proxy.request("POST", "/").send_for_status().await, 204);
    assert_eq!(upstream.connection_count(), 2);
}

#[tokio::test]
async fn a_reset_instead_of_a_response_is_a_502() {
    let upstream = H2Upstream::with_handler(Builder::new(), |mut exchange| async move {
        exchange.respond.send_reset(Reason::INTERNAL_ERROR);
    })
    .await;
    let proxy = start_proxy(&upstream, "").await;
    let reply = proxy.get("/").await;
    assert_eq!(reply.status, 502);
    assert_contains(
        reply.header("proxy-status").unwrap(),
        &["connection_terminated"],
    );
    let metrics = proxy.read_metrics_page().await;
    assert_contains(
        &metrics,
        &["tidegate_upstream_errors_total{kind=\"reset\"} 1"],
    );
}

#[tokio::test]
async fn a_client_disconnect_cancels_only_its_own_request() {
    let (events, mut given_up) = mpsc::channel(8);
    let upstream = H2Upstream::with_handler(Builder::new(), move |mut exchange| {
        let events = events.clone();
        async move {
            let begins = exchange.request.uri().path() == "/begun";
            if exchange.request.uri().path() == "/" {
                return exchange.respond_with(200, "ok");
            }
            let mut stream = None;
            if begins {
                let mut begun = exchange
                    .respond
                    .send_response(Response::new(()), false)
                    .unwrap();
                begun.send_data("some".into(), false).unwrap();
                stream = Some(begun);
            }
            let reason = match &mut stream {
                Some(stream) => std::future::poll_fn(|cx| stream.poll_reset(cx)).await.ok(),
                None => exchange.wait_for_reset().await,
            };
            events.send(reason).await.unwrap();
        }
    })
    .await;
    let proxy = start_proxy(&upstream, "").await;
    for (target, framing) in [
        ("/begun", "\r\n"),
        ("/silent", "\r\n"),
        ("/begun", "Content-Length: 10\r\n\r\nhalf"),
        ("/silent", "Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"),
    ] {
        let mut client = proxy
            .send_raw(format!("POST {target} HTTP/1.1\r\nHost: a\r\n{framing}"))
            .await;
        if target == "/begun" {
            client.read_past(b"some").await;
        } else {
            assert_eq!(proxy.get("/").await.status, 200);
        }
        drop(client);
        let answer = in_time(given_up.recv()).await;
        assert_eq!(answer, Some(Some(Reason::CANCEL)), "{target} {framing}");
    }
    assert_eq!(proxy.get("/").await.status, 200);
    assert_eq!(upstream.connection_count(), 1);
}

/// Servers close a connection with many requests that were reset before they were processed.
#[tokio::test]
async fn a_client_that_cancels_many_requests_does_not_affect_others() {
    let (events, mut given_up) = mpsc::channel(100);
    let release = Arc::new(Semaphore::new(0));
    let slow = respond_when_released(&release);
    let upstream = H2Upstream::with_handler(Builder::new(), move |mut exchange| {
        let (slow, events) = (slow.clone(), events.clone());
        async move {
            if exchange.request.uri().path() == "/others" {
                return slow(exchange).await;
            }
            events.send(exchange.wait_for_reset().await).await.unwrap();
        }
    })
    .await;
    let proxy = start_proxy(&upstream, "").await;
    let others = spawn_get(&proxy, "/others");
    wait_until("a connection", async || upstream.connection_count() == 1).await;

    let mut attack = h2_frames::PREFACE.to_vec();
    attack.extend(h2_frames::encode_frame(h2_frames::SETTINGS, 0, 0, []));
    (0..60).for_each(|n| attack.extend(h2_frames::get_frame(2 * n + 1, "/")));
    let mut attacker = std::net::TcpStream::connect(proxy.address).unwrap();
    attacker.write_all(&attack).unwrap();
    // Blocks this thread, in which the upstream runs, so that all frames arrive at once afterwards.
    std::thread::sleep(Duration::from_millis(300));
    drop(attacker);
    std::thread::sleep(Duration::from_millis(300));

    for _ in 0..50 {
        assert_eq!(in_time(given_up.recv()).await, Some(Some(Reason::CANCEL)));
    }
    let next = spawn_get(&proxy, "/others");
    release.add_permits(2);
    assert_eq!((others.await.unwrap(), next.await.unwrap()), (200, 200));
    let count = upstream.connection_count();
    assert_eq!(count, 2, "the first connection gets no more requests");
}

#[tokio::test]
async fn a_connection_whose_response_timed_out_is_not_reused() {
    // The first connection agrees to HTTP/2 and then goes silent.
    let upstream = RawUpstream::with_script(|number, mut socket| async move {
        socket.send(SERVER_SETTINGS).await;
        read_request_head(&mut socket).await;
        if number > 0 {
            socket.send(b"\0\0\x01\x01\x05\0\0\0\x01\x89").await;
        }
        socket.read_to_close().await;
    })
    .await;
    let url = format!("h2c://{}", upstream.address);
    let config = format!("{ONE_WORKER}upstream.response_timeout = '200ms'");
    let proxy = Proxy::start(&config, &url).await;
    assert_eq!(proxy.get("/").await.status, 504);
    assert_eq!(proxy.get("/").await.status, 204);
    let count = upstream.connection_count();
    assert_eq!(count, 2, "the silent connection got another request");
}

#[tokio::test]
async fn an_upstream_without_http2_is_detected_before_a_request_is_sent() {
    let upstream =
        RawUpstream::with_response("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").await;
    let silent = RawUpstream::silent().await;
    for (upstream, status) in [(upstream, 502), (silent, 504)] {
        let url = format!("h2c://{}", upstream.address);
        let config = "upstream.connect_timeout = '300ms'\nupstream.retry_connect = 0";
        let proxy = Proxy::start(config, &url).await;
        let asked: Vec<_> = (0..3).map(|_| spawn_get(&proxy, "/secret")).collect();
        for asked in asked {
            assert_eq!(in_time(asked).await.unwrap(), status);
        }
        assert!(!String::from_utf8_lossy(&upstream.received_bytes()).contains("secret"));
    }
    let closed_port = unused_address();
    let proxy = Proxy::start("", &format!("h2c://{closed_port}")).await;
    let reply = proxy.get("/").await;
    assert_eq!(reply.status, 502);
    assert_contains(
        reply.header("proxy-status").unwrap(),
        &["connection_refused"],
    );
}

#[tokio::test]
async fn an_idle_connection_is_kept_until_its_timeout() {
    let upstream = H2Upstream::echo().await;
    let proxy = start_proxy(&upstream, "upstream.pool_idle_timeout = '400ms'").await;
    for _ in 0..3 {
        assert_eq!(proxy.get("/").await.status, 200);
    }
    assert_eq!(upstream.connection_count(), 1);
    sleep(Duration::from_millis(900)).await;
    assert_eq!(proxy.get("/").await.status, 200);
    assert_eq!(upstream.connection_count(), 2);
    let none = start_proxy(&upstream, "upstream.pool_max_idle = 0").await;
    for _ in 0..2 {
        assert_eq!(none.get("/").await.status, 200);
    }
    assert_eq!(upstream.connection_count(), 4);
}

#[tokio::test]
async fn a_worker_gets_a_connection_while_another_worker_holds_the_only_one() {
    let upstream = H2Upstream::echo().await;
    let config = "listen.threads = 2\nupstream.max_connections = 1\nupstream.queue_timeout = '5s'";
    let proxy = Proxy::start(config, &upstream.url()).await;
    let (mut one, mut two) = (
        RawClient::connect(proxy.address).await,
        RawClient::connect(proxy.address).await,
    );
    let asking = async |client: &mut RawClient| {
        for _ in 0..30 {
            assert_eq!(
                client
                    .request("GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                    .await
                    .status,
                200
            );
        }
    };
    tokio::join!(asking(&mut one), asking(&mut two));
}

#[tokio::test]
async fn nginx_is_proxied_over_http2() {
    let nginx = Nginx::start_http2().await;
    let content = pseudo_random_bytes(5 << 20);
    nginx.write_file("big", &content);
    let proxy = Proxy::start("", &format!("h2c://{}", nginx.address)).await;
    let reply = proxy.get("/big").await;
    assert_eq!(sha256(&reply.body), sha256(&content));
    assert_eq!(reply.header("via"), Some("2 tidegate"));
    let request = proxy.request("PUT", "/up").body(content.clone());
    request.expect_status(201).await;
    assert_eq!(sha256(&nginx.uploaded_file("up")), sha256(&content));
}
