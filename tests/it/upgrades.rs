//! WebSockets and other upgrades, from the handshake to the last byte, by HTTP/1.1 and HTTP/2.

use crate::support::client::{Ask, ClientBody, RawClient, Reply, answered, http2};
use crate::support::proxy::Proxy;
use crate::support::upstream::{RawSocket, RawUpstream, Upstream};
use crate::support::{SOON, eventually, noise};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper::ext::Protocol;
use hyper::upgrade::Upgraded;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

/// The handshake of RFC 6455, 1.3, and what proves that it was understood.
const HANDSHAKE: &str = "GET /chat HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\n\
    Connection: keep-alive, Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAA\r\n\
    Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: chat\r\n\r\n";
const PROOF: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";
const TWO_AN_HOUR: &str = "log.access = 'all'\n[[policy]]\nname = 'sockets'\nmatch = { methods = ['GET'], path = '/chat' }\nlimit = { requests = 2, per = '1h' }";

/// An upstream that opens every WebSocket, and sends back what comes.
async fn websockets() -> RawUpstream {
    RawUpstream::scripted(|_, mut socket| async move {
        let Some(head) = socket.request().await else {
            return;
        };
        socket.send(switch(&proof_for(&head)).as_bytes()).await;
        echo(socket).await;
    })
    .await
}

async fn echo(mut socket: RawSocket) {
    let (mut reads, mut writes) = socket.stream().split();
    tokio::io::copy(&mut reads, &mut writes)
        .await
        .unwrap_or_default();
    writes.shutdown().await.unwrap_or_default();
}

fn switch(proof: &str) -> String {
    format!(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Accept: {proof}\r\nSec-WebSocket-Protocol: chat\r\nContent-Length: 5\r\n\r\n"
    )
}

fn proof_for(head: &[u8]) -> String {
    let head = String::from_utf8_lossy(head);
    proof_of(
        head.lines()
            .find_map(|line| line.strip_prefix("sec-websocket-key: "))
            .unwrap(),
    )
}

/// What proves that a key was understood.
pub fn proof_of(key: &str) -> String {
    let hash = sha1_smol::Sha1::from(format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
        .digest()
        .bytes();
    base64(&hash)
}

/// Bit by bit, so as to share no mistake with what is tested.
fn base64(bytes: &[u8]) -> String {
    let signs: Vec<char> = ('A'..='Z')
        .chain('a'..='z')
        .chain('0'..='9')
        .chain(['+', '/'])
        .collect();
    let mut bits: Vec<u8> = bytes
        .iter()
        .flat_map(|byte| (0..8).rev().map(move |n| byte >> n & 1))
        .collect();
    bits.resize(bits.len().next_multiple_of(6), 0);
    let mut text: String = bits
        .chunks(6)
        .map(|six| signs[six.iter().fold(0, |sum, bit| sum * 2 + usize::from(*bit))])
        .collect();
    text.extend(std::iter::repeat_n(
        '=',
        text.len().next_multiple_of(4) - text.len(),
    ));
    text
}

fn count(metrics: &str, series: &str) -> u64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(series));
    line.unwrap_or_else(|| panic!("no {series}"))
        .trim()
        .parse()
        .unwrap()
}

async fn metrics(proxy: &Proxy) -> String {
    Ask::new(proxy.admin(), "GET", "/metrics")
        .header("Host", "localhost")
        .send()
        .await
        .text()
}

async fn shake(proxy: &Proxy) -> (RawClient, Reply) {
    let mut client = RawClient::connect(proxy.address).await;
    let reply = client.send(HANDSHAKE).await.any_reply(false).await;
    (client, reply)
}

#[tokio::test]
async fn a_websocket_is_opened_and_counted_and_carries_bytes() {
    let upstream = websockets().await;
    let proxy = Proxy::start(TWO_AN_HOUR, upstream.address).await;
    let (mut client, reply) = shake(&proxy).await;
    assert_eq!(reply.status, 101);
    for (name, value) in [
        ("upgrade", Some("websocket")),
        ("connection", Some("upgrade")),
        ("sec-websocket-accept", Some(PROOF)),
        ("sec-websocket-protocol", Some("chat")),
        ("content-length", None),
        ("x-ratelimit-remaining", Some("1")),
    ] {
        assert_eq!(reply.header(name), value, "{name}");
    }
    let head = String::from_utf8(upstream.received()).unwrap();
    for line in [
        "upgrade: websocket",
        "connection: upgrade",
        "sec-websocket-version: 13",
        "via: 1.1 tidegate",
    ] {
        assert!(head.lines().any(|had| had == line), "{line} in {head}");
    }
    assert!(
        !head.to_ascii_lowercase().contains("http2-settings"),
        "{head}"
    );

    let bytes = noise(100_000);
    client.send(&bytes).await;
    assert!(client.read_past(&bytes[bytes.len() - 20..]).await == bytes);
    let line = proxy
        .wait_for_log("an access line", 0, SOON, |line| line.says("request"))
        .await;
    assert_eq!(
        (
            line.field("status").as_str(),
            line.field("decision").as_str()
        ),
        ("101", "allowed")
    );
    let metrics = metrics(&proxy).await;
    assert_eq!(
        count(&metrics, "tidegate_http_requests_total{code=\"101\"}"),
        1
    );
    assert_eq!(count(&metrics, "tidegate_connections_active"), 1);
}

#[tokio::test]
async fn an_upgrade_over_the_limit_is_a_429_and_the_connection_goes_on() {
    let upstream = websockets().await;
    let proxy = Proxy::start(TWO_AN_HOUR, upstream.address).await;
    for _ in 0..2 {
        assert_eq!(shake(&proxy).await.1.status, 101);
    }
    let (mut client, reply) = shake(&proxy).await;
    assert_eq!((reply.status, reply.header("upgrade")), (429, None));
    assert_eq!(upstream.connections(), 2, "nobody was asked");
    assert_eq!(client.send(HANDSHAKE).await.reply().await.status, 429);
    assert_eq!(
        count(
            &metrics(&proxy).await,
            "tidegate_http_requests_total{code=\"429\"}"
        ),
        2
    );
}

#[tokio::test]
async fn what_is_no_upgrade_of_ours_reaches_the_upstream_as_a_plain_request() {
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start("", upstream.address).await;
    for (version, fields, body) in [
        ("1.1", "Connection: upgrade\r\nUpgrade: h2c\r\n", ""),
        (
            "1.1",
            "Connection: upgrade\r\nUpgrade: websocket, h2c\r\n",
            "",
        ),
        ("1.1", "Connection: upgrade\r\nUpgrade: TLS/1.0\r\n", ""),
        ("1.1", "Upgrade: websocket\r\n", ""),
        ("1.1", "Connection: upgrade\r\n", ""),
        ("1.1", "Connection: upgrade\r\nUpgrade: a b\r\n", ""),
        ("1.0", "Connection: upgrade\r\nUpgrade: websocket\r\n", ""),
        (
            "1.1",
            "Connection: upgrade\r\nUpgrade: websocket\r\nContent-Length: 1\r\n",
            "x",
        ),
        (
            "1.1",
            "Connection: upgrade\r\nUpgrade: websocket\r\nTransfer-Encoding: chunked\r\n",
            "0\r\n\r\n",
        ),
    ] {
        let mut client = RawClient::connect(proxy.address).await;
        client
            .send(format!(
                "POST / HTTP/{version}\r\nHost: a\r\n{fields}\r\n{body}"
            ))
            .await;
        assert_eq!(client.reply().await.status, 200, "{fields}");
        let seen = upstream.last();
        let of_upgrades = |(name, _): &&(String, String)| name == "upgrade" || name == "connection";
        assert_eq!(seen.headers.iter().find(of_upgrades), None, "{fields}");
    }
}

#[tokio::test]
async fn a_required_upgrade_is_told() {
    let answer = "HTTP/1.1 426 Upgrade Required\r\nUpgrade: chat/2\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\nno";
    let upstream = RawUpstream::answering(answer).await;
    let proxy = Proxy::start("", upstream.address).await;
    let reply = proxy.get("/").await;
    assert_eq!((reply.status, reply.text().as_str()), (426, "no"));
    assert_eq!(
        (reply.header("upgrade"), reply.header("connection")),
        (Some("chat/2"), Some("upgrade"))
    );
}

#[tokio::test]
async fn sigterm_leaves_tunnels_open_until_the_grace_is_over() {
    let upstream = websockets().await;
    let mut proxy = Proxy::start("[shutdown]\ngrace = '30s'", upstream.address).await;
    let (mut client, _) = shake(&proxy).await;
    let mut idle = RawClient::connect(proxy.address).await;
    proxy.sigterm();
    assert!(idle.closes(SOON).await);
    client
        .send("still open")
        .await
        .read_past(b"still open")
        .await;
    assert!(proxy.is_running());
    drop(client);
    assert_eq!(proxy.ended(SOON).await.status.code(), Some(0));

    let mut proxy = Proxy::start("[shutdown]\ngrace = '100ms'", upstream.address).await;
    let (mut client, _) = shake(&proxy).await;
    proxy.sigterm();
    assert!(client.closes(SOON).await);
    proxy.ended(SOON).await;
}

/// An extended CONNECT (RFC 8441) on a connection that has been told that it may.
async fn connect(
    sender: &mut SendRequest<ClientBody>,
    protocol: &'static str,
) -> Response<Incoming> {
    let mut request = Request::connect("http://a/chat?x=1")
        .body(ClientBody::default())
        .unwrap();
    request
        .extensions_mut()
        .insert(Protocol::from_static(protocol));
    request
        .headers_mut()
        .insert("sec-websocket-version", "13".parse().unwrap());
    answered(sender.send_request(request)).await
}

/// A connection on which the server's settings have arrived.
async fn settled(proxy: &Proxy) -> SendRequest<ClientBody> {
    let mut sender = http2(proxy.address).await;
    let request = Request::get("http://a/a%00b")
        .body(ClientBody::default())
        .unwrap();
    assert_eq!(answered(sender.send_request(request)).await.status(), 400);
    sender
}

async fn opened(response: Response<Incoming>) -> TokioIo<Upgraded> {
    assert_eq!(response.status(), 200);
    TokioIo::new(
        timeout(SOON, hyper::upgrade::on(response))
            .await
            .unwrap()
            .unwrap(),
    )
}

#[tokio::test]
async fn a_websocket_on_a_stream_of_http2_is_an_http1_handshake_upstream() {
    let upstream = websockets().await;
    let proxy = Proxy::start(TWO_AN_HOUR, upstream.address).await;
    let mut sender = settled(&proxy).await;
    let response = connect(&mut sender, "websocket").await;
    assert_eq!(response.headers()["sec-websocket-protocol"], "chat");
    for name in [
        "upgrade",
        "connection",
        "sec-websocket-accept",
        "content-length",
    ] {
        assert!(!response.headers().contains_key(name), "{name}");
    }
    let head = String::from_utf8(upstream.received()).unwrap();
    assert!(head.starts_with("GET /chat?x=1 HTTP/1.1\r\n"), "{head}");
    for line in [
        "host: a",
        "upgrade: websocket",
        "connection: upgrade",
        "sec-websocket-version: 13",
    ] {
        assert!(head.lines().any(|had| had == line), "{line} in {head}");
    }

    let (mut reads, mut writes) = tokio::io::split(opened(response).await);
    let bytes = noise(8 << 20);
    let sent = bytes.clone();
    let sending = tokio::spawn(async move {
        writes.write_all(&sent).await.unwrap();
        writes.shutdown().await.unwrap();
    });
    let mut got = Vec::new();
    timeout(Duration::from_secs(30), reads.read_to_end(&mut got))
        .await
        .unwrap()
        .unwrap();
    sending.await.unwrap();
    assert!(got == bytes, "{} of {} bytes", got.len(), bytes.len());

    let keys = |head: &str| {
        head.lines()
            .find(|line| line.starts_with("sec-websocket-key"))
            .unwrap()
            .to_owned()
    };
    let first = keys(&head);
    drop(connect(&mut sender, "websocket").await);
    let second = String::from_utf8_lossy(&upstream.received()[head.len()..]).into_owned();
    assert_ne!(first, keys(&second), "each handshake has a key of its own");
    assert_eq!(connect(&mut sender, "websocket").await.status(), 429);
    let line = proxy
        .wait_for_log("an access line", 0, SOON, |line| {
            line.field("path") == "/chat"
        })
        .await;
    assert_eq!(
        (line.field("status").as_str(), line.field("method").as_str()),
        ("200", "GET")
    );
}

#[tokio::test]
async fn a_silent_websocket_on_http2_stays_and_others_go_on_beside_it() {
    let upstream = websockets().await;
    let config = "[listen.http]\nbody_idle_timeout = '100ms'\nidle_timeout = '100ms'";
    let proxy = Proxy::start(config, upstream.address).await;
    let mut sender = settled(&proxy).await;
    let mut sockets = Vec::new();
    for _ in 0..3 {
        sockets.push(opened(connect(&mut sender, "websocket").await).await);
    }
    sleep(Duration::from_millis(400)).await;
    for mut socket in sockets {
        socket.write_all(b"still here").await.unwrap();
        let mut got = [0; 10];
        timeout(SOON, socket.read_exact(&mut got))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(&got, b"still here");
    }
    opened(connect(&mut sender, "websocket").await).await;
}

#[tokio::test]
async fn a_client_that_resets_its_stream_ends_the_tunnel_to_a_silent_upstream() {
    let upstream = RawUpstream::scripted(|_, mut socket| async move {
        let Some(head) = socket.request().await else {
            return;
        };
        socket.send(switch(&proof_for(&head)).as_bytes()).await;
        // It takes the client's end for half of one, and keeps its own side open.
        socket.drain().await;
        std::future::pending().await
    })
    .await;
    let config = "[upstream]\nmax_connections = 1\nqueue_timeout = '10s'";
    let proxy = Proxy::start(config, upstream.address).await;
    let mut sender = settled(&proxy).await;
    for _ in 0..2 {
        drop(opened(connect(&mut sender, "websocket").await).await);
    }
}

#[tokio::test]
async fn an_upstream_that_dies_ends_the_stream_after_its_last_words() {
    let upstream = RawUpstream::scripted(|_, mut socket| async move {
        let Some(head) = socket.request().await else {
            return;
        };
        socket.send(switch(&proof_for(&head)).as_bytes()).await;
        socket.read().await;
        socket.send(b"last words").await;
        // With bytes unread, the kernel resets.
        socket.stream().readable().await.unwrap();
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut sender = settled(&proxy).await;
    let mut socket = opened(connect(&mut sender, "websocket").await).await;
    socket.write_all(b"a").await.unwrap();
    let mut got = vec![0; 10];
    timeout(SOON, socket.read_exact(&mut got))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(got, b"last words");
    socket.write_all(b"b").await.unwrap();
    let end = timeout(SOON, socket.read(&mut [0; 10])).await.unwrap();
    assert!(matches!(end, Ok(0)), "an end in good order, not {end:?}");
}

/// One slot, and none of it for longer than asked for.
fn one_at_a_time(max_duration: &str) -> String {
    format!(
        "[[policy]]\nname = 'slots'\nmatch = {{ path = '/chat' }}\n\
         limit = {{ requests = 1, algorithm = 'concurrency', max_duration = '{max_duration}' }}"
    )
}

#[tokio::test]
async fn a_tunnel_keeps_its_slot_until_it_ends() {
    let upstream = websockets().await;
    let proxy = Proxy::start(&one_at_a_time("0"), upstream.address).await;
    let (client, reply) = shake(&proxy).await;
    assert_eq!(reply.status, 101);
    let mut sender = settled(&proxy).await;
    assert_eq!(connect(&mut sender, "websocket").await.status(), 429);
    drop(client);
    let free = async {
        loop {
            let response = connect(&mut sender, "websocket").await;
            if response.status() != 429 {
                return response;
            }
        }
    };
    let socket = opened(timeout(SOON, free).await.expect("a free slot")).await;
    assert_eq!(shake(&proxy).await.1.status, 429);
    drop(socket);
    timeout(SOON, async { while shake(&proxy).await.1.status == 429 {} })
        .await
        .unwrap();
}

#[tokio::test]
async fn a_tunnel_that_takes_longer_than_its_slot_lasts_is_ended() {
    let upstream = websockets().await;
    let proxy = Proxy::start(&one_at_a_time("300ms"), upstream.address).await;
    let (mut client, reply) = shake(&proxy).await;
    assert_eq!(reply.status, 101);
    client
        .send("still open")
        .await
        .read_past(b"still open")
        .await;
    assert!(client.closes(SOON).await);
    timeout(SOON, async { while shake(&proxy).await.1.status == 429 {} })
        .await
        .unwrap();
}

#[tokio::test]
async fn an_upstream_may_end_first_on_http2_too() {
    let (told, mut counted) = mpsc::channel(1);
    let upstream = RawUpstream::scripted(move |_, mut socket| {
        let told = told.clone();
        async move {
            let Some(head) = socket.request().await else {
                return;
            };
            socket.send(switch(&proof_for(&head)).as_bytes()).await;
            let socket = socket.stream();
            socket.shutdown().await.unwrap();
            let mut rest = Vec::new();
            socket.read_to_end(&mut rest).await.unwrap();
            told.send(rest.len()).await.unwrap();
        }
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut sender = settled(&proxy).await;
    let mut socket = opened(connect(&mut sender, "websocket").await).await;
    assert_eq!(
        timeout(SOON, socket.read(&mut [0; 10]))
            .await
            .unwrap()
            .unwrap(),
        0
    );
    socket.write_all(&vec![b'x'; 1 << 20]).await.unwrap();
    socket.shutdown().await.unwrap();
    assert_eq!(timeout(SOON, counted.recv()).await.unwrap(), Some(1 << 20));
}

#[tokio::test]
async fn an_http2_client_that_does_not_read_is_cut_and_the_connection_goes_on() {
    let upstream = RawUpstream::scripted(|_, mut socket| async move {
        let Some(head) = socket.request().await else {
            return;
        };
        socket.send(switch(&proof_for(&head)).as_bytes()).await;
        while socket.stream().write_all(&[b'x'; 10_000]).await.is_ok() {}
    })
    .await;
    let proxy = Proxy::start(
        "[listen.http]\nbody_idle_timeout = '200ms'",
        upstream.address,
    )
    .await;
    let mut sender = settled(&proxy).await;
    let mut unread = opened(connect(&mut sender, "websocket").await).await;
    sleep(Duration::from_millis(600)).await;
    let mut got = Vec::new();
    let end = timeout(SOON, unread.read_to_end(&mut got))
        .await
        .expect("must have been cut");
    assert!(got.len() < 8 << 20, "{} bytes after {end:?}", got.len());
    opened(connect(&mut sender, "websocket").await).await;
}

#[tokio::test]
async fn an_upstream_that_does_not_read_does_not_hold_the_window_of_all_streams_for_ever() {
    let upstream = RawUpstream::scripted(|_, mut socket| async move {
        let Some(head) = socket.request().await else {
            return;
        };
        if !String::from_utf8_lossy(&head).contains("websocket") {
            return socket
                .send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                .await;
        }
        socket.send(switch(&proof_for(&head)).as_bytes()).await;
        std::future::pending().await
    })
    .await;
    let proxy = Proxy::start("[listen.http]\nbody_idle_timeout = '1s'", upstream.address).await;
    let mut sender = settled(&proxy).await;
    let mut tunnels = Vec::new();
    for _ in 0..5 {
        let (reads, mut writes) =
            tokio::io::split(opened(connect(&mut sender, "websocket").await).await);
        let writing =
            tokio::spawn(async move { while writes.write_all(&[b'x'; 16 << 10]).await.is_ok() {} });
        tunnels.push((reads, writing));
    }
    for (mut reads, writing) in tunnels {
        timeout(SOON, writing)
            .await
            .expect("must have been cut")
            .unwrap();
        timeout(SOON, reads.read_to_end(&mut Vec::new()))
            .await
            .expect("must have been cut")
            .unwrap_or_default();
    }
    let body = http_body_util::BodyExt::boxed(http_body_util::Full::from(vec![b'x'; 300_000]));
    let request = Request::post("http://a/").body(body).unwrap();
    assert_eq!(answered(sender.send_request(request)).await.status(), 200);
}

#[tokio::test]
async fn a_handshake_that_fails_is_an_answer() {
    for (answer, status) in [
        (switch(PROOF), 502),
        (
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: other\r\n\r\n".to_owned(),
            502,
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok".to_owned(),
            502,
        ),
        (
            "HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno".to_owned(),
            403,
        ),
        (
            "HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n".to_owned(),
            302,
        ),
    ] {
        let upstream = RawUpstream::answering(answer.clone()).await;
        let proxy = Proxy::start("", upstream.address).await;
        let mut sender = settled(&proxy).await;
        assert_eq!(
            connect(&mut sender, "websocket").await.status(),
            status,
            "{answer}"
        );
    }
}

#[tokio::test]
async fn other_ways_to_connect_are_refused() {
    let upstream = RawUpstream::answering("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut sender = settled(&proxy).await;
    assert_eq!(connect(&mut sender, "connect-udp").await.status(), 501);
    let plain = Request::connect("a:80")
        .body(ClientBody::default())
        .unwrap();
    assert_eq!(answered(sender.send_request(plain)).await.status(), 405);
    let mut client = RawClient::connect(proxy.address).await;
    assert_eq!(
        client
            .send("CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n")
            .await
            .reply()
            .await
            .status,
        405
    );
    assert_eq!(upstream.connections(), 0);
}

#[tokio::test]
async fn draining_leaves_websockets_on_http2_open() {
    let upstream = websockets().await;
    let mut proxy = Proxy::start("[shutdown]\ngrace = '30s'", upstream.address).await;
    let mut sender = settled(&proxy).await;
    let mut socket = opened(connect(&mut sender, "websocket").await).await;
    proxy.sigterm();
    let closed = || {
        std::net::TcpStream::connect(proxy.address)
            .is_err()
            .then_some(())
    };
    eventually("nobody new to be let in", SOON, closed).await;
    socket.write_all(b"still open").await.unwrap();
    timeout(SOON, socket.read_exact(&mut [0; 10]))
        .await
        .unwrap()
        .unwrap();
    assert!(proxy.is_running());
    drop(socket);
    assert_eq!(proxy.ended(SOON).await.status.code(), Some(0));
}
