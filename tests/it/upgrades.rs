//! WebSockets and other upgrades over HTTP/1.1 and HTTP/2, from the handshake to the last byte.

use crate::support::prelude::*;
use hyper::client::conn::http2::SendRequest;
use hyper::ext::Protocol;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::sync::mpsc;

/// The handshake of RFC 6455, section 1.3, with its expected accept key.
const WEBSOCKET_HANDSHAKE: &str = "GET /chat HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\n\
    Connection: keep-alive, Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAA\r\n\
    Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: chat\r\n\r\n";
const ACCEPT_KEY: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";
const TWO_PER_HOUR_POLICY: &str = "log.access = 'all'\n[[policy]]\nname = 'sockets'\nmatch = { methods = ['GET'], path = '/chat' }\nlimit = { requests = 2, per = '1h' }";

/// An upstream that accepts every WebSocket and echoes its bytes.
async fn start_websocket_upstream() -> RawUpstream {
    start_upgraded_upstream(echo_bytes).await
}

/// An upstream that accepts every WebSocket and then runs `script`.
async fn start_upgraded_upstream<F>(
    script: impl Fn(RawSocket) -> F + Clone + Send + 'static,
) -> RawUpstream
where
    F: Future<Output = ()> + Send + 'static,
{
    RawUpstream::with_script(move |_, mut socket| {
        let script = script.clone();
        async move {
            if switch_protocols(&mut socket).await {
                script(socket).await;
            }
        }
    })
    .await
}

async fn echo_bytes(mut socket: RawSocket) {
    let (mut reads, mut writes) = socket.stream().split();
    tokio::io::copy(&mut reads, &mut writes)
        .await
        .unwrap_or_default();
    writes.shutdown().await.unwrap_or_default();
}

fn switching_protocols_response(accept_key: &str) -> String {
    format!(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Accept: {accept_key}\r\nSec-WebSocket-Protocol: chat\r\nContent-Length: 5\r\n\r\n"
    )
}

fn accept_key_for_head(head: &[u8]) -> String {
    let head = String::from_utf8_lossy(head);
    accept_key_for(
        head.lines()
            .find_map(|line| line.strip_prefix("sec-websocket-key: "))
            .unwrap(),
    )
}

/// The `Sec-WebSocket-Accept` value for a key (RFC 6455, section 4.2.2).
pub fn accept_key_for(key: &str) -> String {
    let hash = sha1_smol::Sha1::from(format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
        .digest()
        .bytes();
    encode_base64(&hash)
}

/// Encodes bit by bit, so that it shares no code with the product.
fn encode_base64(bytes: &[u8]) -> String {
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

/// Accepts the upgrade of the next request. Returns `false` if the peer closes.
async fn switch_protocols(socket: &mut RawSocket) -> bool {
    let Some(head) = socket.read_request().await else {
        return false;
    };
    let switch = switching_protocols_response(&accept_key_for_head(&head));
    socket.send(switch.as_bytes()).await;
    true
}

async fn open_websocket(proxy: &Proxy) -> (RawClient, RawResponse) {
    proxy.upgrade(WEBSOCKET_HANDSHAKE).await
}

#[tokio::test]
async fn a_websocket_is_opened_and_counted_and_carries_bytes() {
    let upstream = start_websocket_upstream().await;
    let proxy = Proxy::start(TWO_PER_HOUR_POLICY, upstream.address).await;
    let (mut client, reply) = open_websocket(&proxy).await;
    assert_eq!(reply.status, 101);
    for (name, value) in [
        ("upgrade", Some("websocket")),
        ("connection", Some("upgrade")),
        ("sec-websocket-accept", Some(ACCEPT_KEY)),
        ("sec-websocket-protocol", Some("chat")),
        ("content-length", None),
        ("x-ratelimit-remaining", Some("1")),
    ] {
        assert_eq!(reply.header(name), value, "{name}");
    }
    let head = String::from_utf8(upstream.received_bytes()).unwrap();
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

    let bytes = pseudo_random_bytes(100_000);
    client.send(&bytes).await;
    assert!(client.read_past(&bytes[bytes.len() - 20..]).await == bytes);
    let line = proxy.wait_for_message("request", 0).await;
    line.expect_fields(&[("status", "101"), ("decision", "allowed")]);
    let switched = "tidegate_http_requests_total{code=\"101\"}";
    proxy.assert_metric(switched, 1.0).await;
    let active = "tidegate_connections_active";
    proxy.assert_metric(active, 1.0).await;
}

#[tokio::test]
async fn an_upgrade_over_the_limit_is_a_429_and_the_connection_stays_open() {
    let upstream = start_websocket_upstream().await;
    let proxy = Proxy::start(TWO_PER_HOUR_POLICY, upstream.address).await;
    for _ in 0..2 {
        assert_eq!(open_websocket(&proxy).await.1.status, 101);
    }
    let (mut client, reply) = open_websocket(&proxy).await;
    assert_eq!((reply.status, reply.header("upgrade")), (429, None));
    assert_eq!(
        upstream.connection_count(),
        2,
        "the rejected handshake must not reach the upstream"
    );
    assert_eq!(client.request(WEBSOCKET_HANDSHAKE).await.status, 429);
    let rejected = "tidegate_http_requests_total{code=\"429\"}";
    proxy.assert_metric(rejected, 2.0).await;
}

#[tokio::test]
async fn unsupported_upgrades_are_forwarded_as_plain_requests() {
    let proxy = Proxy::with_echo("").await;
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
        let mut client = proxy
            .send_raw(format!(
                "POST / HTTP/{version}\r\nHost: a\r\n{fields}\r\n{body}"
            ))
            .await;
        assert_eq!(client.read_response().await.status, 200, "{fields}");
        let seen = proxy.echo().last_request();
        let is_upgrade_header =
            |(name, _): &&(String, String)| name == "upgrade" || name == "connection";
        assert_eq!(
            seen.headers.iter().find(is_upgrade_header),
            None,
            "{fields}"
        );
    }
}

#[tokio::test]
async fn an_upgrade_required_response_keeps_its_upgrade_header() {
    let answer = "HTTP/1.1 426 Upgrade Required\r\nUpgrade: chat/2\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\nno";
    let upstream = RawUpstream::with_response(answer).await;
    let proxy = Proxy::start("", upstream.address).await;
    let reply = proxy.get("/").await;
    assert_eq!((reply.status, reply.text().as_str()), (426, "no"));
    reply.expect_header("upgrade", "chat/2");
    reply.expect_header("connection", "upgrade");
}

#[tokio::test]
async fn sigterm_keeps_tunnels_open_during_the_grace_period() {
    let upstream = start_websocket_upstream().await;
    let mut proxy = Proxy::start("[shutdown]\ngrace = '30s'", upstream.address).await;
    let (mut client, _) = open_websocket(&proxy).await;
    let mut idle = RawClient::connect(proxy.address).await;
    proxy.send_sigterm();
    assert!(idle.closes_within(TEST_TIMEOUT).await);
    client.send("still open").await;
    client.read_past(b"still open").await;
    assert!(proxy.is_running());
    drop(client);
    proxy.assert_exit_code(0).await;

    let mut proxy = Proxy::start("[shutdown]\ngrace = '100ms'", upstream.address).await;
    let (mut client, _) = open_websocket(&proxy).await;
    proxy.send_sigterm();
    assert_eq!(client.read_to_close().await, CLOSE_FRAME);
    proxy.wait_for_exit(TEST_TIMEOUT).await;
}

/// An extended CONNECT (RFC 8441) on a connection whose settings allow it.
async fn extended_connect(
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
    await_response(sender.send_request(request)).await
}

/// A connection that has received the server's settings.
async fn connect_http2(proxy: &Proxy) -> SendRequest<ClientBody> {
    let mut sender = open_http2_connection(proxy.address).await;
    let request = get_request("http://a/a%00b");
    let answered = await_response(sender.send_request(request)).await;
    assert_eq!(answered.status(), 400);
    sender
}

async fn open_h2_websocket(sender: &mut SendRequest<ClientBody>) -> TokioIo<Upgraded> {
    upgraded_stream(extended_connect(sender, "websocket").await).await
}

async fn upgraded_stream(response: Response<Incoming>) -> TokioIo<Upgraded> {
    assert_eq!(response.status(), 200);
    TokioIo::new(in_time(hyper::upgrade::on(response)).await.unwrap())
}

#[tokio::test]
async fn a_websocket_on_a_stream_of_http2_is_an_http1_handshake_upstream() {
    let upstream = start_websocket_upstream().await;
    let proxy = Proxy::start(TWO_PER_HOUR_POLICY, upstream.address).await;
    let mut sender = connect_http2(&proxy).await;
    let response = extended_connect(&mut sender, "websocket").await;
    assert_eq!(response.headers()["sec-websocket-protocol"], "chat");
    for name in [
        "upgrade",
        "connection",
        "sec-websocket-accept",
        "content-length",
    ] {
        assert!(!response.headers().contains_key(name), "{name}");
    }
    let head = String::from_utf8(upstream.received_bytes()).unwrap();
    assert!(head.starts_with("GET /chat?x=1 HTTP/1.1\r\n"), "{head}");
    for line in [
        "host: a",
        "upgrade: websocket",
        "connection: upgrade",
        "sec-websocket-version: 13",
    ] {
        assert!(head.lines().any(|had| had == line), "{line} in {head}");
    }

    assert_echo(upgraded_stream(response).await, 8 << 20).await;

    let keys = |head: &str| {
        head.lines()
            .find(|line| line.starts_with("sec-websocket-key"))
            .unwrap()
            .to_owned()
    };
    let first = keys(&head);
    drop(extended_connect(&mut sender, "websocket").await);
    let second = String::from_utf8_lossy(&upstream.received_bytes()[head.len()..]).into_owned();
    assert_ne!(first, keys(&second), "each handshake must use its own key");
    let status = extended_connect(&mut sender, "websocket").await.status();
    assert_eq!(status, 429);
    let line = proxy.wait_for_field("path", "/chat", 0).await;
    line.expect_fields(&[("status", "200"), ("method", "GET")]);
}

#[tokio::test]
async fn an_idle_websocket_on_http2_stays_open_beside_others() {
    let upstream = start_websocket_upstream().await;
    let config = "[listen.http]\nbody_idle_timeout = '100ms'\nidle_timeout = '100ms'";
    let proxy = Proxy::start(config, upstream.address).await;
    let mut sender = connect_http2(&proxy).await;
    let mut sockets = Vec::new();
    for _ in 0..3 {
        sockets.push(open_h2_websocket(&mut sender).await);
    }
    sleep(Duration::from_millis(400)).await;
    for mut socket in sockets {
        socket.write_all(b"still here").await.unwrap();
        let mut got = [0; 10];
        in_time(socket.read_exact(&mut got)).await.unwrap();
        assert_eq!(&got, b"still here");
    }
    open_h2_websocket(&mut sender).await;
}

#[tokio::test]
async fn a_client_that_resets_its_stream_ends_the_tunnel_to_a_silent_upstream() {
    let upstream = start_upgraded_upstream(|mut socket| async move {
        // Treats the client's end as a half-close and keeps its own side open.
        socket.read_to_close().await;
        std::future::pending().await
    })
    .await;
    let config = "[upstream]\nmax_connections = 1\nqueue_timeout = '10s'";
    let proxy = Proxy::start(config, upstream.address).await;
    let mut sender = connect_http2(&proxy).await;
    for _ in 0..2 {
        drop(open_h2_websocket(&mut sender).await);
    }
}

#[tokio::test]
async fn an_upstream_reset_ends_the_stream_after_its_last_bytes() {
    let upstream = start_upgraded_upstream(|mut socket| async move {
        socket.read_chunk().await;
        socket.send(b"last words").await;
        // The kernel resets a connection that is closed with unread bytes.
        socket.stream().readable().await.unwrap();
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut sender = connect_http2(&proxy).await;
    let mut socket = open_h2_websocket(&mut sender).await;
    socket.write_all(b"a").await.unwrap();
    let mut got = vec![0; 10];
    in_time(socket.read_exact(&mut got)).await.unwrap();
    assert_eq!(got, b"last words");
    socket.write_all(b"b").await.unwrap();
    let end = in_time(socket.read(&mut [0; 10])).await;
    assert!(
        matches!(end, Ok(0)),
        "the stream must end without an error: {end:?}"
    );
}

/// A policy with one slot that is held for at most `max_duration`.
fn single_slot_policy(max_duration: &str) -> String {
    format!(
        "[[policy]]\nname = 'slots'\nmatch = {{ path = '/chat' }}\n\
         limit = {{ requests = 1, algorithm = 'concurrency', max_duration = '{max_duration}' }}"
    )
}

#[tokio::test]
async fn a_tunnel_keeps_its_slot_until_it_ends() {
    let upstream = start_websocket_upstream().await;
    let proxy = Proxy::start(&single_slot_policy("0"), upstream.address).await;
    let (client, reply) = open_websocket(&proxy).await;
    assert_eq!(reply.status, 101);
    let mut sender = connect_http2(&proxy).await;
    let status = extended_connect(&mut sender, "websocket").await.status();
    assert_eq!(status, 429);
    drop(client);
    let freed = eventually("the slot", TEST_TIMEOUT, async || {
        let response = extended_connect(&mut sender, "websocket").await;
        (response.status() != 429).then_some(response)
    });
    let socket = upgraded_stream(freed.await).await;
    assert_eq!(open_websocket(&proxy).await.1.status, 429);
    drop(socket);
    in_time(async { while open_websocket(&proxy).await.1.status == 429 {} }).await;
}

#[tokio::test]
async fn a_tunnel_is_closed_after_max_duration() {
    let upstream = start_websocket_upstream().await;
    let proxy = Proxy::start(&single_slot_policy("300ms"), upstream.address).await;
    let (mut client, reply) = open_websocket(&proxy).await;
    assert_eq!(reply.status, 101);
    client.send("still open").await;
    client.read_past(b"still open").await;
    assert!(client.closes_within(TEST_TIMEOUT).await);
    in_time(async { while open_websocket(&proxy).await.1.status == 429 {} }).await;
}

#[tokio::test]
async fn an_upstream_may_half_close_first_on_http2() {
    let (sender, mut counted) = mpsc::channel(1);
    let upstream = start_upgraded_upstream(move |mut socket| {
        let sender = sender.clone();
        async move {
            let socket = socket.stream();
            socket.shutdown().await.unwrap();
            let mut rest = Vec::new();
            socket.read_to_end(&mut rest).await.unwrap();
            sender.send(rest.len()).await.unwrap();
        }
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut sender = connect_http2(&proxy).await;
    let mut socket = open_h2_websocket(&mut sender).await;
    assert_eq!(in_time(socket.read(&mut [0; 10])).await.unwrap(), 0);
    socket.write_all(&vec![b'x'; 1 << 20]).await.unwrap();
    socket.shutdown().await.unwrap();
    assert_eq!(in_time(counted.recv()).await, Some(1 << 20));
}

#[tokio::test]
async fn a_stalled_http2_tunnel_is_reset_and_the_connection_stays_open() {
    let upstream = start_upgraded_upstream(|mut socket| async move {
        while socket.stream().write_all(&[b'x'; 10_000]).await.is_ok() {}
    })
    .await;
    let config = "[listen.http]\nbody_idle_timeout = '200ms'";
    let proxy = Proxy::start(config, upstream.address).await;
    let mut sender = connect_http2(&proxy).await;
    let mut unread = open_h2_websocket(&mut sender).await;
    sleep(Duration::from_millis(600)).await;
    let mut got = Vec::new();
    // The tunnel is reset.
    let end = in_time(unread.read_to_end(&mut got)).await;
    assert!(got.len() < 8 << 20, "{} bytes after {end:?}", got.len());
    open_h2_websocket(&mut sender).await;
}

#[tokio::test]
async fn a_stalled_upstream_does_not_hold_the_connection_window() {
    let upstream = RawUpstream::with_script(|_, mut socket| async move {
        let Some(head) = socket.read_request().await else {
            return;
        };
        if !String::from_utf8_lossy(&head).contains("websocket") {
            return socket
                .send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                .await;
        }
        socket
            .send(switching_protocols_response(&accept_key_for_head(&head)).as_bytes())
            .await;
        std::future::pending().await
    })
    .await;
    let proxy = Proxy::start("[listen.http]\nbody_idle_timeout = '1s'", upstream.address).await;
    let mut sender = connect_http2(&proxy).await;
    let mut tunnels = Vec::new();
    for _ in 0..5 {
        let (reads, mut writes) = tokio::io::split(open_h2_websocket(&mut sender).await);
        let writing =
            tokio::spawn(async move { while writes.write_all(&[b'x'; 16 << 10]).await.is_ok() {} });
        tunnels.push((reads, writing));
    }
    for (mut reads, writing) in tunnels {
        // The tunnel is reset.
        in_time(writing).await.unwrap();
        let read = in_time(reads.read_to_end(&mut Vec::new())).await;
        read.unwrap_or_default();
    }
    let body = Full::from(vec![b'x'; 300_000]).boxed();
    let request = Request::post("http://a/").body(body).unwrap();
    let answered = await_response(sender.send_request(request)).await;
    assert_eq!(answered.status(), 200);
}

#[tokio::test]
async fn a_failed_handshake_gets_a_response() {
    for (answer, status) in [
        (switching_protocols_response(ACCEPT_KEY), 502),
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
        let upstream = RawUpstream::with_response(answer.clone()).await;
        let proxy = Proxy::start("", upstream.address).await;
        let mut sender = connect_http2(&proxy).await;
        let answered = extended_connect(&mut sender, "websocket").await.status();
        assert_eq!(answered, status, "{answer}");
    }
}

#[tokio::test]
async fn other_connect_requests_are_rejected() {
    let upstream = RawUpstream::with_response("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut sender = connect_http2(&proxy).await;
    let status = extended_connect(&mut sender, "connect-udp").await.status();
    assert_eq!(status, 501);
    let plain = Request::connect("a:80")
        .body(ClientBody::default())
        .unwrap();
    let answered = await_response(sender.send_request(plain)).await;
    assert_eq!(answered.status(), 405);
    let mut client = RawClient::connect(proxy.address).await;
    assert_eq!(
        client
            .request("CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n")
            .await
            .status,
        405
    );
    assert_eq!(upstream.connection_count(), 0);
}

#[tokio::test]
async fn draining_keeps_websockets_on_http2_open() {
    let upstream = start_websocket_upstream().await;
    let mut proxy = Proxy::start("[shutdown]\ngrace = '30s'", upstream.address).await;
    let mut sender = connect_http2(&proxy).await;
    let mut socket = open_h2_websocket(&mut sender).await;
    proxy.send_sigterm();
    let closed = async || std::net::TcpStream::connect(proxy.address).is_err();
    wait_until("the listener to close", closed).await;
    socket.write_all(b"still open").await.unwrap();
    in_time(socket.read_exact(&mut [0; 10])).await.unwrap();
    assert!(proxy.is_running());
    drop(socket);
    proxy.assert_exit_code(0).await;
}

#[tokio::test]
async fn the_tunnels_of_one_client_are_limited() {
    let upstream = start_websocket_upstream().await;
    let config = "client.trusted_proxies = ['127.0.0.1']\n[upstream]\nmax_connections = 8\nmax_tunnels_per_client = 3\nqueue_timeout = '100ms'\n\
        [[policy]]\nname = 'all'\nlimit = { requests = 100, per = '1d', algorithm = 'fixed_window' }";
    let proxy = Proxy::start(config, upstream.address).await;
    let open = async |client: &str| {
        let mut connection = RawClient::connect(proxy.address).await;
        let handshake = WEBSOCKET_HANDSHAKE.replacen(
            "Host:",
            &format!("X-Forwarded-For: {client}\r\nHost:"),
            1,
        );
        let reply = connection
            .send(handshake)
            .await
            .read_any_response(false)
            .await;
        (connection, reply.status)
    };
    let mut held = Vec::new();
    for status in [101, 101, 101, 429, 429] {
        // One client, by its /64.
        let (connection, given) = open(&format!("2001:db8::{}", held.len())).await;
        assert_eq!(given, status);
        held.push(connection);
    }
    let reply = proxy.get("/").await;
    let remaining = reply.remaining("all");
    assert_eq!(remaining, Some(96), "a rejected request leaves no charge");
    let (_other, status) = open("2001:db8:0:1::1").await;
    assert_eq!(status, 101, "another client is not affected");
    let counted = "tidegate_upstream_errors_total{kind=\"tunnel_limit\"}";
    assert_eq!(proxy.read_metric(counted).await, 2.0);
    drop(held.remove(0));
    wait_until("the closed tunnel to be forgotten", async || {
        open("2001:db8::9").await.1 == 101
    })
    .await;
}

/// A tunnel keeps the share of the upstream connections that its request took.
#[tokio::test]
async fn the_tunnels_of_one_client_leave_connections_to_others() {
    let upstream = start_websocket_upstream().await;
    let config = "client.trusted_proxies = ['127.0.0.1']\n[upstream]\nmax_connections = 8\nqueue_timeout = '100ms'";
    let proxy = Proxy::start(config, upstream.address).await;
    let open = async |client: &str| {
        let mut connection = RawClient::connect(proxy.address).await;
        let field = format!("X-Forwarded-For: {client}\r\nHost:");
        let handshake = WEBSOCKET_HANDSHAKE.replacen("Host:", &field, 1);
        connection.send(handshake).await;
        let reply = connection.read_any_response(false).await;
        (connection, reply.status)
    };
    let mut held = Vec::new();
    // Half of the connections, and half of the rest.
    for status in [101, 101, 101, 101, 101, 101, 503, 503] {
        let (connection, given) = open("192.0.2.1").await;
        assert_eq!(given, status, "tunnel {}", held.len());
        held.push(connection);
    }
    let (_other, status) = open("192.0.2.2").await;
    assert_eq!(status, 101, "another client");
    drop(held.remove(0));
    let deadline = tokio::time::Instant::now() + TEST_TIMEOUT;
    while open("192.0.2.1").await.1 != 101 {
        let now = tokio::time::Instant::now();
        assert!(now < deadline, "a closed tunnel leaves its share");
    }
}

#[tokio::test]
async fn an_idle_tunnel_ends_after_its_own_timeout() {
    let upstream = start_websocket_upstream().await;
    let config = "[upstream]\ntunnel_idle_timeout = '300ms'";
    let proxy = Proxy::start(config, upstream.address).await;
    let (mut client, reply) = open_websocket(&proxy).await;
    assert_eq!(reply.status, 101);
    assert!(client.closes_within(TEST_TIMEOUT).await);
}

const TEXT_FRAME: &[u8] = b"\x81\x05hello";
/// 1001, "going away", from a server and from a client with the masking key 0.
const CLOSE_FRAME: &[u8] = b"\x88\x02\x03\xe9";
const MASKED_CLOSE_FRAME: &[u8] = b"\x88\x82\0\0\0\0\x03\xe9";

/// A WebSocket upstream that sends `before` at once and `after` when it has received `awaited`,
/// which it reports.
async fn start_closed_upstream(
    before: &[u8],
    awaited: &[u8],
    after: &[u8],
) -> (RawUpstream, mpsc::Receiver<Vec<u8>>) {
    let (reports, received) = mpsc::channel(1);
    let (before, after, length) = (before.to_vec(), after.to_vec(), awaited.len());
    let upstream = RawUpstream::with_script(move |_, mut socket| {
        let (reports, before, after) = (reports.clone(), before.clone(), after.clone());
        async move {
            let Some(head) = socket.read_request().await else {
                return;
            };
            let switch = switching_protocols_response(&accept_key_for_head(&head));
            socket.send(switch.as_bytes()).await;
            socket.send(&before).await;
            let mut bytes = vec![0; length];
            if socket.stream().read_exact(&mut bytes).await.is_ok() {
                reports.send(bytes).await.unwrap();
                socket.send(&after).await;
            }
            // Keeps the connection open.
            drop(socket.stream().read(&mut [0; 1]).await);
        }
    })
    .await;
    (upstream, received)
}

#[tokio::test]
async fn a_websocket_is_closed_with_1001_between_frames_at_the_end_of_a_drain() {
    let long = [b"\x82\x7e\x01\x2c".to_vec(), vec![b'x'; 300]].concat();
    let with_close = |bytes: &[u8]| [bytes, CLOSE_FRAME].concat();
    let cases = [
        (&b""[..], &b""[..], with_close(b"")),
        (TEXT_FRAME, b"", with_close(TEXT_FRAME)),
        (&TEXT_FRAME[..1], &TEXT_FRAME[1..], with_close(TEXT_FRAME)),
        (&TEXT_FRAME[..4], b"llo\x81\x02hi", with_close(TEXT_FRAME)),
        (&long[..3], &long[3..], with_close(&long)),
        (&long[..200], &long[200..], with_close(&long)),
        // The frame is never completed: nothing may be inserted.
        (&long[..200], b"", long[..200].to_vec()),
        // The upstream has sent a Close frame of its own.
        (b"\x88\x02\x03\xe8", b"", b"\x88\x02\x03\xe8".to_vec()),
    ];
    for (before, after, expected) in cases {
        let (upstream, mut received) =
            start_closed_upstream(before, MASKED_CLOSE_FRAME, after).await;
        let config = "[shutdown]\ngrace = '600ms'";
        let mut proxy = Proxy::start(config, upstream.address).await;
        let (mut client, reply) = open_websocket(&proxy).await;
        assert_eq!(reply.status, 101);
        proxy.send_sigterm();
        let answer = client.read_to_close().await;
        assert_eq!(answer, expected, "{before:?} {after:?}");
        assert_eq!(received.recv().await.unwrap(), MASKED_CLOSE_FRAME);
        proxy.wait_for_exit(TEST_TIMEOUT).await;
    }
}

#[tokio::test]
async fn a_frame_of_the_client_is_completed_before_the_upstream_receives_1001() {
    let frame = b"\x81\x82abcd12";
    let expected = [&frame[..], MASKED_CLOSE_FRAME].concat();
    let (upstream, mut received) = start_closed_upstream(b"", &expected, b"").await;
    let mut proxy = Proxy::start("[shutdown]\ngrace = '2s'", upstream.address).await;
    let (mut client, _) = open_websocket(&proxy).await;
    client.send(&frame[..7]).await;
    proxy.send_sigterm();
    assert_eq!(client.read_past(CLOSE_FRAME).await, CLOSE_FRAME);
    client.send(&frame[7..]).await;
    assert_eq!(received.recv().await.unwrap(), expected);
    proxy.wait_for_exit(TEST_TIMEOUT).await;
}

#[tokio::test]
async fn a_websocket_on_http2_is_closed_with_1001_at_the_end_of_a_drain() {
    let (upstream, mut received) =
        start_closed_upstream(&TEXT_FRAME[..3], MASKED_CLOSE_FRAME, &TEXT_FRAME[3..]).await;
    let mut proxy = Proxy::start("[shutdown]\ngrace = '600ms'", upstream.address).await;
    let mut sender = connect_http2(&proxy).await;
    let mut socket = open_h2_websocket(&mut sender).await;
    proxy.send_sigterm();
    let mut bytes = Vec::new();
    in_time(socket.read_to_end(&mut bytes)).await.unwrap();
    assert_eq!(bytes, [TEXT_FRAME, CLOSE_FRAME].concat());
    assert_eq!(received.recv().await.unwrap(), MASKED_CLOSE_FRAME);
    proxy.wait_for_exit(TEST_TIMEOUT).await;
}

#[tokio::test]
async fn other_protocols_receive_no_close_frame() {
    let text = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: chat\r\nConnection: Upgrade\r\n\r\n";
    let upstream = RawUpstream::with_response(text).await;
    let mut proxy = Proxy::start("[shutdown]\ngrace = '300ms'", upstream.address).await;
    let mut client = proxy
        .send_raw("GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: chat\r\n\r\n")
        .await;
    assert_eq!(client.read_any_response(true).await.status, 101);
    proxy.send_sigterm();
    assert_eq!(client.read_to_close().await, b"");
    proxy.wait_for_exit(TEST_TIMEOUT).await;
}
