//! The proxy forwards every byte unchanged, in order and without delay, and reports broken
//! transfers as broken.

use crate::support::client::open_http1_connection;
use crate::support::nginx::Nginx;
use crate::support::prelude::*;
use crate::support::upstream::hash_body;
use hyper::body::{Body, Frame};
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::sync::{mpsc, oneshot};

const OK_RESPONSE: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const LARGE_BODY_BYTES: usize = 100 << 20;

/// Returns the value to the first caller.
fn take_once<T>(value: T) -> impl Fn() -> T {
    let value = Mutex::new(Some(value));
    move || value.lock().unwrap().take().expect("one caller")
}

#[tokio::test]
async fn a_response_streams_its_first_byte_before_its_last() {
    let (feeder, upstream) = Upstream::streaming().await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    feeder.send("first").await;
    client.read_past(b"first").await;
    feeder.send("last").await;
    drop(feeder);
    client.read_past(b"last").await;
    client.read_past(b"0\r\n\r\n").await;
}

#[tokio::test]
async fn a_request_streams_its_first_byte_before_its_last() {
    let (first_chunk_sender, first_seen) = oneshot::channel();
    let first_chunk_sender = take_once(first_chunk_sender);
    let upstream = Upstream::with_handler(move |request: Request<Incoming>| {
        let first_chunk_sender = first_chunk_sender();
        async move {
            let mut body = request.into_body();
            let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
            first_chunk_sender.send(first).unwrap();
            let (rest, _) = hash_body(body).await;
            Response::new(full_body(rest.to_string()))
        }
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = proxy
        .send_raw("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        .await;
    assert_eq!(in_time(first_seen).await.unwrap(), "first");
    client.send("4\r\nlast\r\n0\r\n\r\n").await;
    assert_eq!(client.read_response().await.text(), "4");
}

#[tokio::test]
async fn a_hundred_megabytes_come_down_from_nginx_unchanged() {
    let nginx = Nginx::start().await;
    let content = pseudo_random_bytes(LARGE_BODY_BYTES);
    nginx.write_file("big", &content);
    let proxy = Proxy::start("", nginx.address).await;
    let (len, sha) = download(proxy.address, "/big").await;
    assert_eq!((len, sha), (LARGE_BODY_BYTES as u64, sha256(&content)));
}

#[tokio::test]
async fn a_hundred_megabytes_go_up_to_nginx_unchanged() {
    let nginx = Nginx::start().await;
    let proxy = Proxy::start("", nginx.address).await;
    let content = Bytes::from(pseudo_random_bytes(LARGE_BODY_BYTES));
    let request = Request::put("/up")
        .header("host", "a")
        .body(Full::new(content.clone()).boxed())
        .unwrap();
    let answered = await_response(
        open_http1_connection(proxy.address)
            .await
            .send_request(request),
    )
    .await;
    assert_eq!(answered.status(), 201);
    assert_eq!(sha256(&nginx.uploaded_file("up")), sha256(&content));
}

#[tokio::test]
async fn chunked_bodies_of_any_size_pass_both_ways_unchanged() {
    let content = Bytes::from(pseudo_random_bytes(10 << 20));
    let served = content.clone();
    let upstream = Upstream::with_handler(move |request: Request<Incoming>| {
        let served = served.clone();
        async move {
            if request.uri() == "/up" {
                return echo(request).await;
            }
            let (feeder, body) = channel_body();
            tokio::spawn(async move {
                for piece in served.chunks(77_777) {
                    feeder.send(Bytes::copy_from_slice(piece)).await;
                }
            });
            Response::new(body)
        }
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    let downloaded = download(proxy.address, "/down").await;
    assert_eq!(downloaded, (10 << 20, sha256(&content)));
    let (sender, body) = streamed_body();
    let sending = content.clone();
    tokio::spawn(async move {
        for piece in sending.chunks(33_333) {
            sender.send(Bytes::copy_from_slice(piece)).await.unwrap();
        }
    });
    let request = Request::post("/up").header("host", "a").body(body).unwrap();
    let mut sender = open_http1_connection(proxy.address).await;
    let answer = await_response(sender.send_request(request)).await;
    let report = answer.into_body().collect().await.unwrap().to_bytes();
    assert!(String::from_utf8_lossy(&report).contains(&sha256(&content)));
}

/// Length and SHA-256 of the response body of a GET.
async fn download(address: SocketAddr, target: &str) -> (u64, String) {
    let request = Request::get(target)
        .header("host", "a")
        .body(ClientBody::default())
        .unwrap();
    let mut sender = open_http1_connection(address).await;
    let answer = await_response(sender.send_request(request)).await;
    assert_eq!(answer.status(), 200);
    timeout(Duration::from_secs(60), hash_body(answer.into_body()))
        .await
        .unwrap()
}

/// A request body of unknown length, fed through a channel.
fn streamed_body() -> (mpsc::Sender<Bytes>, ClientBody) {
    struct ChannelBody(mpsc::Receiver<Bytes>);
    impl Body for ChannelBody {
        type Data = Bytes;
        type Error = Infallible;
        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            self.0
                .poll_recv(context)
                .map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
        }
    }
    let (sender, receiver) = mpsc::channel(1);
    (sender, ChannelBody(receiver).boxed())
}

#[tokio::test]
async fn hop_by_hop_headers_are_removed_and_forwarding_headers_added() {
    let proxy = Proxy::with_echo("").await;
    let mut ask = proxy.request("GET", "/");
    for (name, value) in [
        ("Host", "shop.example"),
        ("Connection", "keep-alive, X-Hop"),
        ("X-Hop", "1"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Connection", "keep-alive"),
        ("TE", "gzip"),
        ("X-End", "kept"),
        ("Proxy-Authorization", "Basic x"),
        ("Via", "1.0 front"),
    ] {
        ask = ask.header(name, value);
    }
    assert_eq!(ask.send_for_status().await, 200);
    let seen = proxy.echo().last_request();
    for name in [
        "x-hop",
        "keep-alive",
        "proxy-connection",
        "te",
        "upgrade",
        "transfer-encoding",
    ] {
        assert!(seen.header_values(name).is_empty(), "{name} in {seen:?}");
    }
    seen.expect_header("host", "shop.example");
    seen.expect_header("x-end", "kept");
    assert_eq!(seen.single_header("x-forwarded-for"), "127.0.0.1");
    seen.expect_header("x-forwarded-proto", "http");
    seen.expect_header("x-forwarded-host", "shop.example");
    let via = seen.header_values("via").join(", ");
    assert_starts(&via, "1.0 front, 1.1 ");
    assert_contains(&via, &["tidegate"]);
}

#[tokio::test]
async fn forwarding_headers_are_extended_for_trusted_peers_and_replaced_for_others() {
    let upstream = Upstream::echo().await;
    for (trusted, list, proto) in [
        ("127.0.0.0/8", "1.2.3.4, 127.0.0.1", "https"),
        ("10.0.0.0/8", "127.0.0.1", "http"),
    ] {
        let config = format!("[client]\ntrusted_proxies = ['{trusted}']");
        let proxy = Proxy::start(&config, upstream.address).await;
        let ask = proxy
            .request("GET", "/")
            .header("X-Forwarded-For", "1.2.3.4")
            .header("X-Forwarded-Proto", "https");
        assert_eq!(ask.send_for_status().await, 200);
        let seen = upstream.last_request();
        let found = seen.header_values("x-forwarded-for").join(", ");
        assert_eq!(found, list, "from {trusted}");
        seen.expect_header("x-forwarded-proto", proto);
    }
}

#[tokio::test]
async fn hop_by_hop_headers_of_responses_are_removed() {
    let answer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: X-Hop, keep-alive\r\nX-Hop: 1\r\n\
                  Keep-Alive: timeout=5\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n\r\nok";
    let upstream = RawUpstream::with_response(answer).await;
    let proxy = Proxy::start("", upstream.address).await;
    let reply = proxy.get("/").await;
    assert_eq!((reply.status, reply.text().as_str()), (200, "ok"));
    assert!(reply.header("x-hop").is_none() && reply.header("keep-alive").is_none());
    assert_contains(reply.header("via").unwrap(), &["tidegate"]);
    let cookies = reply
        .headers
        .iter()
        .filter(|(name, _)| name == "set-cookie");
    assert_eq!(cookies.count(), 2, "separate lines must stay separate");
}

#[tokio::test]
async fn trailers_are_forwarded_to_clients_that_accept_them() {
    let (feeder, body) = channel_body();
    let body = take_once(body);
    let upstream = Upstream::with_handler(move |_| {
        let mut response = Response::new(body());
        set_header(&mut response, "trailer", "x-sum");
        async { response }
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = proxy
        .send_raw("GET / HTTP/1.1\r\nHost: a\r\nTE: trailers\r\nConnection: TE\r\n\r\n")
        .await;
    feeder.send("body").await;
    let trailer = ("x-sum".parse().unwrap(), "42".parse().unwrap());
    feeder.send_trailers([trailer].into_iter().collect()).await;
    client.read_past(b"\r\n0\r\n").await;
    let trailers = client.read_past(b"\r\n\r\n").await;
    let trailers = String::from_utf8(trailers).unwrap().to_lowercase();
    assert_eq!(trailers, "x-sum: 42\r\n\r\n");
}

#[tokio::test]
async fn an_unreachable_upstream_is_a_502() {
    // The port was bound and released, so no process listens on it.
    let unused_address = unused_address();
    let config = "[[policy]]\nname = 'p'\nlimit = { requests = 9, per = '1h' }";
    let proxy = Proxy::start(config, unused_address).await;
    let reply = proxy.get("/").await;
    reply
        .expect_status(502)
        .expect_header("content-type", "application/problem+json");
    let status = reply.header("proxy-status").unwrap();
    assert_contains(status, &["error=connection_refused"]);
    assert_eq!(reply.json()["status"], 502);
    // The response must not contain the upstream's port.
    assert_lacks(&reply.text(), &[&unused_address.port().to_string()]);
}

#[tokio::test]
async fn an_upstream_that_does_not_answer_is_a_504() {
    let upstream = RawUpstream::silent().await;
    let proxy = Proxy::start("[upstream]\nresponse_timeout = '200ms'", upstream.address).await;
    let reply = proxy.get("/").await;
    assert_eq!((reply.status, &reply.json()["status"]), (504, &504.into()));
    let status = reply.header("proxy-status").unwrap();
    assert_contains(status, &["error=connection_read_timeout"]);
}

#[tokio::test]
async fn an_upload_to_an_unreachable_upstream_keeps_the_connection_open() {
    let unused_address = unused_address();
    let proxy = Proxy::start("", unused_address).await;
    let mut client = RawClient::connect(proxy.address).await;
    for _ in 0..3 {
        client
            .send("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n")
            .await;
        client.send(vec![b'x'; 40_000]).await;
        let reply = client.read_response().await;
        assert_eq!((reply.status, reply.header("connection")), (502, None));
        client.send(vec![b'x'; 60_000]).await;
    }
}

#[tokio::test]
async fn a_response_that_is_not_http_is_a_502() {
    for nonsense in [
        "SSH-2.0-OpenSSH\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        "",
    ] {
        let upstream = RawUpstream::answering_once(nonsense).await;
        let proxy = Proxy::start("", upstream.address).await;
        let status = proxy.request("POST", "/").send_for_status().await;
        assert_eq!(status, 502, "{nonsense:?}");
    }
}

#[tokio::test]
async fn a_truncated_response_never_looks_complete() {
    for cut in [
        "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\na\r\nshort",
    ] {
        let upstream = RawUpstream::answering_once(cut).await;
        let proxy = Proxy::start("", upstream.address).await;
        let reply = proxy.get("/").await;
        assert!(!reply.complete, "{cut:?}: {reply:?}");
        let mut h2 = open_http2_connection(proxy.address).await;
        let request = get_request("http://a/");
        let answer = await_response(h2.send_request(request)).await;
        let body = in_time(answer.into_body().collect()).await;
        assert!(body.is_err(), "{cut:?} over HTTP/2");
    }
}

#[tokio::test]
async fn a_truncated_upload_never_looks_complete() {
    let upstream = RawUpstream::silent().await;
    let proxy = Proxy::start("", upstream.address).await;
    let heads = [
        "Content-Length: 10\r\n\r\nshort",
        "Transfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n",
    ];
    for (before, head) in heads.into_iter().enumerate() {
        let client = proxy
            .send_raw(format!("POST / HTTP/1.1\r\nHost: a\r\n{head}"))
            .await;
        wait_until("the upload to begin", async || {
            let received = String::from_utf8(upstream.received_bytes()).unwrap();
            received.matches("short").count() > before
        })
        .await;
        drop(client);
    }
    sleep(Duration::from_millis(200)).await;
    // The proxy must not end a body that the client did not end.
    let received = String::from_utf8(upstream.received_bytes()).unwrap();
    assert_lacks(&received, &["0\r\n\r\n"]);
}

#[tokio::test]
async fn an_upload_reset_by_its_client_never_looks_complete() {
    let (upload_sender, mut uploads) = mpsc::channel(4);
    let upstream = RawUpstream::with_script(move |_, mut socket| {
        let upload_sender = upload_sender.clone();
        async move {
            let mut all = Vec::new();
            let read = socket.stream().read_to_end(&mut all).await;
            read.unwrap_or_default();
            upload_sender.send(all).await.unwrap();
        }
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    let stream = TcpStream::connect(proxy.address).await.unwrap();
    let (sender, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    // hyper treats a reset with `NO_ERROR` as the end of the body.
    let reasons = [h2::Reason::NO_ERROR, h2::Reason::CANCEL];
    for (attempt, reason) in reasons.into_iter().enumerate() {
        let mut sender = sender.clone().ready().await.unwrap();
        let request = Request::post("http://a/up").body(()).unwrap();
        let (_answer, mut sending) = sender.send_request(request, false).unwrap();
        sending.send_data("half".into(), false).unwrap();
        wait_until("the upload to begin", async || {
            upstream.connection_count() > attempt
        })
        .await;
        sending.send_reset(reason);
        let upload = in_time(uploads.recv()).await.unwrap();
        let text = String::from_utf8_lossy(&upload);
        assert!(!text.ends_with("0\r\n\r\n"), "{reason:?}: {text:?}");
    }
}

#[tokio::test]
async fn http_1_0_clients_are_served() {
    let (feeder, upstream) = Upstream::streaming().await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = proxy.send_raw("GET / HTTP/1.0\r\nHost: a\r\n\r\n").await;
    feeder.send("streamed").await;
    drop(feeder);
    let reply = client.read_response().await;
    assert_eq!((reply.status, reply.text().as_str()), (200, "streamed"));
    assert!(
        reply.header("transfer-encoding").is_none(),
        "HTTP/1.0 does not support chunked encoding"
    );
    assert!(
        client.read_to_close().await.is_empty(),
        "the body must end with the connection"
    );
}

#[tokio::test]
async fn http_2_clients_are_served_limited_and_forwarded_as_http_1() {
    let config = "[[policy]]\nname = 'p'\nmatch = { hosts = ['shop.example'] }\nlimit = { requests = 3, per = '1h' }";
    let proxy = Proxy::with_echo(config).await;
    let h2 = open_http2_connection(proxy.address).await;
    for status in [200, 200, 200, 429] {
        let request = Request::post("http://shop.example/x?y");
        let request = request.body(Full::from("body").boxed()).unwrap();
        let reply = await_response(h2.clone().send_request(request)).await;
        assert_eq!(reply.status(), status);
    }
    let seen = proxy.echo().last_request();
    assert_eq!(seen.target.as_str(), "/x?y");
    assert_eq!(seen.single_header("host"), "shop.example");
    assert!(seen.single_header("via").starts_with("2"), "{seen:?}");
}

#[tokio::test]
async fn http_2_streams_do_not_wait_for_each_other() {
    let (feeder, body) = channel_body();
    let body = take_once(body);
    let upstream = Upstream::with_handler(move |request: Request<Incoming>| {
        let slow = (request.uri() == "/slow").then(&body);
        async { Response::new(slow.unwrap_or_else(|| full_body("quick"))) }
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    let h2 = open_http2_connection(proxy.address).await;
    let get = |path: &str| get_request(format!("http://a{path}"));
    let slow = await_response(h2.clone().send_request(get("/slow"))).await;
    let quick = await_response(h2.clone().send_request(get("/quick"))).await;
    let quick = quick.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(quick, "quick");
    feeder.send("slow").await;
    drop(feeder);
    assert_eq!(slow.into_body().collect().await.unwrap().to_bytes(), "slow");
}

#[tokio::test]
async fn a_refused_upload_is_not_asked_to_continue() {
    let config = "[[policy]]\nname = 'p'\nlimit = { requests = 1, per = '1h' }";
    let proxy = Proxy::with_echo(config).await;
    let head = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n";
    let mut client = proxy.send_raw(head).await;
    assert_eq!(client.read_any_response(false).await.status, 100);
    client.send("body").await;
    assert_eq!(client.read_any_response(false).await.status, 200);
    assert!(
        proxy
            .echo()
            .last_request()
            .header_values("expect")
            .is_empty(),
        "the proxy must answer `Expect` itself"
    );
    let mut rejected = proxy.send_raw(head).await;
    assert_eq!(rejected.read_any_response(false).await.status, 429);
    // The client may send the body anyway. The proxy must not parse those bytes as a request.
    rejected.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert_eq!(rejected.read_to_close().await, Vec::<u8>::new());
}

#[tokio::test]
async fn a_refusal_reaches_a_client_that_is_still_uploading() {
    let proxy = Proxy::with_echo("[[policy]]\nname = 'p'\naction = 'deny'").await;
    let head = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1048576\r\n\r\n";
    let mut client = proxy.send_raw(head).await;
    client.send(pseudo_random_bytes(256 << 10)).await;
    assert_eq!(client.read_response().await.status, 403);
}

#[tokio::test]
async fn an_early_response_ends_the_upload_and_closes_the_connection() {
    let upstream = RawUpstream::with_script(|_, mut socket| async move {
        while !socket.read_chunk().await {}
        socket
            .send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nearly")
            .await;
        socket.read_to_close().await;
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = proxy
        .send_raw("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        .await;
    let early = client.read_response().await;
    assert_eq!(early.text(), "early");
    early.expect_header("connection", "close");
    // The proxy does not read the rest of the upload.
    assert!(client.closes_within(TEST_TIMEOUT).await);
}

/// Without `Connection: close`, the client would send its next request on a connection that the
/// proxy no longer reads.
#[tokio::test]
async fn an_unfinished_upload_to_a_dead_upstream_gets_connection_close() {
    let upstream = RawUpstream::with_script(|nth, mut socket| async move {
        match nth {
            0 => drop(socket.read_chunk().await),
            _ => drop(socket.read_request().await),
        }
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    for (sent, connection) in [(400_000, Some("close")), (1_000_000, None)] {
        let mut client = proxy
            .send_raw("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
            .await;
        client.send(pseudo_random_bytes(sent)).await;
        let broken = client.read_response().await;
        assert_eq!(broken.status, 502, "{sent} bytes sent");
        assert_eq!(broken.header("connection"), connection, "{sent} bytes sent");
    }
}

#[tokio::test]
async fn a_disconnected_client_aborts_its_upstream_request() {
    let (entered, mut enter) = mpsc::channel::<oneshot::Receiver<()>>(1);
    let upstream = Upstream::with_handler(move |_| {
        let entered = entered.clone();
        async move {
            // Dropped when the upstream drops the request.
            let (_alive, gone) = oneshot::channel::<()>();
            entered.send(gone).await.unwrap();
            std::future::pending().await
        }
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    let client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let gone = in_time(enter.recv()).await.unwrap();
    drop(client);
    // The upstream request was aborted.
    assert!(in_time(gone).await.is_err());
}

#[tokio::test]
async fn a_disconnect_during_the_response_aborts_the_upstream_response() {
    let (feeder, upstream) = Upstream::streaming().await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    feeder.send("first").await;
    client.read_past(b"first").await;
    drop(client);
    // The upstream response is aborted.
    in_time(feeder.wait_until_dropped()).await;
}

#[tokio::test]
async fn a_slow_reader_slows_the_upstream_down() {
    let (feeder, upstream) = Upstream::streaming().await;
    let proxy = Proxy::start("", upstream.address).await;
    let _client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let piece = Bytes::from(vec![b'x'; 1 << 20]);
    let mut accepted = 0;
    // Sockets and buffers on the path hold some megabytes. Then the proxy must stop reading.
    while timeout(Duration::from_millis(500), feeder.send(piece.clone()))
        .await
        .is_ok()
    {
        accepted += 1;
        assert!(accepted < 64, "the proxy buffers {accepted} MiB");
    }
}

#[tokio::test]
async fn connections_are_reused_on_both_sides() {
    let upstream = RawUpstream::with_response(OK_RESPONSE).await;
    let proxy = Proxy::start("[listen]\nthreads = 1", upstream.address).await;
    let mut client = RawClient::connect(proxy.address).await;
    for _ in 0..10 {
        client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert_eq!(client.read_response().await.text(), "ok");
    }
    assert_eq!(upstream.connection_count(), 1);
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let proxy = Proxy::with_echo("").await;
    let mut client = RawClient::connect(proxy.address).await;
    let requests: String = (0..5)
        .map(|n| format!("GET /{n} HTTP/1.1\r\nHost: a\r\n\r\n"))
        .collect();
    client.send(requests).await;
    for n in 0..5 {
        let reply = client.read_response().await;
        assert_eq!(reply.json()["target"], format!("/{n}"));
    }
}

/// Each connection answers one request, receives a second one, and closes without an answer.
async fn start_upstream_that_closes() -> RawUpstream {
    RawUpstream::with_script(|_, mut socket| async move {
        socket.read_request().await;
        socket.send(OK_RESPONSE.as_bytes()).await;
        socket.read_request().await;
    })
    .await
}

#[tokio::test]
async fn requests_are_retried_when_the_upstream_closes_idle_connections() {
    let upstream = start_upstream_that_closes().await;
    let proxy = Proxy::start("[listen]\nthreads = 1", upstream.address).await;
    assert_eq!(proxy.get_statuses("/", 6).await, [200; 6]);
}

#[tokio::test]
async fn non_idempotent_requests_are_never_sent_twice() {
    let upstream = start_upstream_that_closes().await;
    let proxy = Proxy::start("[listen]\nthreads = 1", upstream.address).await;
    assert_eq!(proxy.get("/").await.status, 200);
    let request = proxy.request("POST", "/once").body("x");
    request.expect_status(502).await;
    let received = String::from_utf8(upstream.received_bytes()).unwrap();
    assert_eq!(received.matches("POST /once").count(), 1, "{received}");
}

#[tokio::test]
async fn preserve_host_false_sends_the_upstreams_own_name() {
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start("[upstream]\npreserve_host = false", upstream.address).await;
    assert_eq!(proxy.get("/").await.status, 200);
    upstream
        .last_request()
        .expect_header("host", upstream.address.to_string());
}

#[tokio::test]
async fn a_304_keeps_its_content_length() {
    let answer = "HTTP/1.1 304 Not Modified\r\nContent-Length: 1234\r\nETag: \"a\"\r\n\r\n";
    let upstream = RawUpstream::with_response(answer).await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = RawClient::connect(proxy.address).await;
    for _ in 0..2 {
        client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let head = client.read_past(b"\r\n\r\n").await;
        let head = String::from_utf8_lossy(&head).to_lowercase();
        assert!(head.starts_with("http/1.1 304 "), "{head}");
        assert!(head.contains("content-length: 1234\r\n"), "{head}");
    }
}
