//! Upstream connections beside plain TCP: Unix sockets, TLS with reloaded certificates, and
//! upgrades over HTTP/2.

use crate::support::prelude::*;
use crate::support::proxy::Setup;
use h2::server::Builder;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use tokio::net::UnixListener;

#[tokio::test]
async fn an_app_behind_a_unix_socket_is_served() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("app.sock");
    let url = format!("unix:{}", path.display());
    let proxy = Proxy::start("upstream.retry_connect = 0", &url).await;
    // First without the socket file, then with a file without a listener, then with a listener.
    for _ in 0..2 {
        let reply = proxy.get("/").await;
        assert_eq!(reply.status, 502);
        assert_contains(
            reply.header("proxy-status").unwrap(),
            &["error=connection_refused"],
        );
        assert!(
            !reply.text().contains("app.sock"),
            "the response must not contain the socket path: {}",
            reply.text()
        );
        drop(UnixListener::bind(&path));
    }
    fs::remove_file(&path).unwrap();
    let listener = UnixListener::bind(&path).unwrap();
    let serving = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service =
                service_fn(|request| async move { Ok::<_, Infallible>(echo(request).await) });
            let serving = hyper::server::conn::http1::Builder::new();
            tokio::spawn(serving.serve_connection(TokioIo::new(stream), service));
        }
    });
    let request = proxy.request("POST", "/a?b");
    let reply = request.body(pseudo_random_bytes(1 << 20)).send().await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.json()["body_len"].as_u64(), Some(1 << 20));
    let host = |reply: &Value| {
        let headers = reply["headers"].as_array().unwrap().clone();
        headers.iter().find(|header| header[0] == "host").unwrap()[1].clone()
    };
    assert_eq!(host(&reply.json()), "shop.example");
    let anonymous = Proxy::start("upstream.preserve_host = false", &url).await;
    let found = host(&anonymous.get("/").await.json());
    assert_eq!(found, "localhost", "a Unix socket has no host name");
    serving.abort();
}

fn build_https_proxy(authority: &CertificateAuthority, port: u16, config: &str) -> Setup {
    let config = format!(
        "{config}\n[upstream.tls]\nca = '{}'\n",
        authority.path_string("ca.pem")
    );
    Proxy::setup(&config).upstream(&format!("https://127.0.0.1:{port}"))
}

#[tokio::test]
async fn the_upstream_selects_the_protocol_by_alpn() {
    let authority = CertificateAuthority::new();
    authority.sign("server", "127.0.0.1");
    let upstream = H2Upstream::with_tls(
        authority.tls_acceptor("server", &["h2"], None),
        H2Exchange::echo,
    )
    .await;
    let proxy = build_https_proxy(&authority, upstream.address.port(), "listen.threads = 1")
        .start()
        .await;
    let calls: Vec<_> = (0..20)
        .map(|_| tokio::spawn(proxy.request("GET", "/").send()))
        .collect();
    for call in calls {
        let reply = call.await.unwrap();
        assert_starts(&reply.text(), "GET https://shop.example/\n");
        assert_eq!(reply.header("via"), Some("2 tidegate"));
    }
    assert_eq!(
        upstream.connection_count(),
        1,
        "requests must wait for the protocol of the first connection instead of opening others"
    );

    let (port, _serving) = start_alpn_server(&authority, &["http/1.1"]).await;
    let proxy = build_https_proxy(&authority, port, "").start().await;
    let reply = proxy.get("/").await;
    assert_eq!(reply.text().as_str(), "plain");
    assert_eq!(reply.header("via"), Some("1.1 tidegate"));
}

/// A TLS server for HTTP/2 and HTTP/1.1. It echoes over HTTP/2. Over HTTP/1.1 it answers "plain" or
/// opens the requested WebSocket.
async fn start_alpn_server(
    authority: &CertificateAuthority,
    protocols: &[&str],
) -> (u16, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let tls = authority.tls_acceptor("server", protocols, None);
    let serving = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let tls = tls.clone();
            tokio::spawn(async move {
                let Ok(mut stream) = tls.accept(stream).await else {
                    return;
                };
                if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
                    let mut h2 = h2::server::handshake(stream).await.unwrap();
                    while let Some(Ok((request, respond))) = h2.accept().await {
                        tokio::spawn(
                            H2Exchange {
                                connection_index: 0,
                                request,
                                respond,
                            }
                            .echo(),
                        );
                    }
                    return;
                }
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let Ok(byte) = stream.read_u8().await else {
                        return;
                    };
                    head.push(byte);
                }
                let head = String::from_utf8(head).unwrap();
                if !head.contains("upgrade: websocket") {
                    stream
                        .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nplain")
                        .await
                        .unwrap();
                    return;
                }
                stream
                    .write_all(SWITCHING_PROTOCOLS_RESPONSE.as_bytes())
                    .await
                    .unwrap();
                let (mut reads, mut writes) = tokio::io::split(stream);
                tokio::io::copy(&mut reads, &mut writes)
                    .await
                    .unwrap_or_default();
            });
        }
    });
    (port, serving)
}

/// The example of RFC 6455, section 1.3.
const WEBSOCKET_HANDSHAKE: &str = "GET /chat?x HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
    Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n";
const ACCEPT_KEY: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";
const SWITCHING_PROTOCOLS_RESPONSE: &str = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
    Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";

#[tokio::test]
async fn a_client_certificate_is_presented_and_reloaded() {
    let (authority, old, new) = (
        CertificateAuthority::new(),
        CertificateAuthority::new(),
        CertificateAuthority::new(),
    );
    authority.sign("server", "127.0.0.1");
    old.sign("client", "us");
    new.sign("client", "us");
    let tls = authority.tls_acceptor("server", &["h2", "http/1.1"], Some(&new));
    let upstream = H2Upstream::with_tls(tls, H2Exchange::echo).await;
    let dir = TempDir::new().unwrap();
    let (cert, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
    let put = |authority: &CertificateAuthority| {
        fs::copy(authority.path("client.pem"), &cert).unwrap();
        fs::copy(authority.path("client.key"), &key).unwrap();
    };
    put(&old);
    let config = format!(
        "upstream.url = 'https://127.0.0.1:{}'\n[upstream.tls]\nca = '{}'\ncert = '{}'\nkey = '{}'\n",
        upstream.address.port(),
        authority.path_string("ca.pem"),
        cert.display(),
        key.display()
    );
    let url = format!("https://127.0.0.1:{}", upstream.address.port());
    let proxy = Proxy::start(&config, &url).await;
    let reply = proxy.get("/").await;
    assert_eq!(reply.status, 502);
    // A TLS 1.3 server may send an alert or just close.
    let proxy_status = reply.header("proxy-status").unwrap();
    assert!(
        ["error=tls_", "error=connection_terminated"]
            .iter()
            .any(|kind| proxy_status.contains(kind)),
        "{proxy_status}"
    );

    // A key that does not match the certificate changes nothing and is logged.
    let mark = proxy.log_mark();
    fs::copy(new.path("client.pem"), &cert).unwrap();
    let within = Duration::from_secs(5);
    let line = proxy
        .wait_for_log("an error", mark, within, |line| {
            line.contains("upstream.tls.cert")
        })
        .await;
    assert!(line.is_level("ERROR"), "{line:?}");
    assert_eq!(proxy.get("/").await.status, 502);

    put(&new);
    proxy
        .wait_for_log("upstream certificates reloaded", mark, within, |line| {
            line.contains("upstream certificates reloaded")
        })
        .await;
    assert_eq!(proxy.get("/").await.status, 200);
    let restarts = proxy
        .log_since(mark)
        .iter()
        .any(|line| line.contains("only after a restart"));
    assert!(!restarts);
}

/// Opens every WebSocket over HTTP/2 and echoes its bytes. Echoes other requests as text.
async fn serve_extended_connect(mut exchange: H2Exchange) {
    let protocol = exchange
        .request
        .extensions()
        .get::<h2::ext::Protocol>()
        .cloned();
    if protocol.is_none_or(|protocol| protocol.as_str() != "websocket") {
        return exchange.echo().await;
    }
    let head = &exchange.request;
    assert!(!head.headers().contains_key("sec-websocket-key"));
    assert!(!head.headers().contains_key("upgrade"));
    assert_eq!(head.uri().path_and_query().unwrap().as_str(), "/chat?x");
    assert_eq!(head.uri().authority().unwrap().as_str(), "a");
    assert_eq!(head.headers()["sec-websocket-version"], "13");
    let mut stream = exchange
        .respond
        .send_response(Response::new(()), false)
        .unwrap();
    let body = exchange.request.body_mut();
    while let Some(Ok(mut part)) = body.data().await {
        while !part.is_empty() {
            stream.reserve_capacity(part.len());
            let Some(Ok(capacity)) = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await
            else {
                return;
            };
            let now = part.split_to(capacity.min(part.len()));
            body.flow_control().release_capacity(now.len()).unwrap();
            stream.send_data(now, false).unwrap();
        }
    }
    stream
        .send_data(bytes::Bytes::new(), true)
        .unwrap_or_default();
}

#[tokio::test]
async fn a_websocket_is_an_http2_stream_if_the_upstream_supports_rfc_8441() {
    let mut builder = Builder::new();
    builder.enable_connect_protocol();
    let upstream = H2Upstream::with_handler(builder, serve_extended_connect).await;
    let proxy = Proxy::start("listen.threads = 1", &upstream.url()).await;

    let (mut client, reply) = proxy.upgrade(WEBSOCKET_HANDSHAKE).await;
    reply
        .expect_status(101)
        .expect_header("sec-websocket-accept", ACCEPT_KEY);
    reply.expect_header("upgrade", "websocket");
    reply.expect_header("connection", "upgrade");
    client.send("there").await.read_past(b"there").await;

    let mut sender = open_http2_connection(proxy.address).await;
    // The server's settings must arrive first.
    let first_request = get_request("http://a/");
    await_response(sender.send_request(first_request))
        .await
        .into_body()
        .collect()
        .await
        .unwrap();
    let mut request = Request::connect("http://a/chat?x")
        .body(ClientBody::default())
        .unwrap();
    request
        .extensions_mut()
        .insert(hyper::ext::Protocol::from_static("websocket"));
    request
        .headers_mut()
        .insert("sec-websocket-version", "13".parse().unwrap());
    let response = await_response(sender.send_request(request)).await;
    assert_eq!(response.status(), 200);
    let upgraded = in_time(hyper::upgrade::on(response)).await.unwrap();
    assert_echo(TokioIo::new(upgraded), 4 << 20).await;

    client.send("still").await.read_past(b"still").await;
    assert_eq!(upstream.connection_count(), 1);
    // Other upgrades stay plain requests: a server may ignore `Upgrade` (RFC 9110, section 7.8).
    let request = proxy.request("GET", "/").header("Upgrade", "other");
    let ask = request.header("Connection", "upgrade");
    assert_eq!(ask.send_for_status().await, 200);
}

#[tokio::test]
async fn a_websocket_is_a_502_if_the_upstream_lacks_rfc_8441() {
    let upstream = H2Upstream::echo().await;
    let proxy = Proxy::start("", &upstream.url()).await;
    let (mut client, reply) = proxy.upgrade(WEBSOCKET_HANDSHAKE).await;
    assert_eq!(reply.status, 502);
    assert_contains(
        reply.header("proxy-status").unwrap(),
        &["error=http_upgrade_failed"],
    );
    proxy.wait_for_text("RFC 8441", 0).await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert_eq!(client.read_response().await.status, 200);
}

#[tokio::test]
async fn a_websocket_over_tls_uses_an_http_1_1_connection() {
    let authority = CertificateAuthority::new();
    authority.sign("server", "127.0.0.1");
    let (port, _serving) = start_alpn_server(&authority, &["h2", "http/1.1"]).await;
    let proxy = build_https_proxy(&authority, port, "listen.threads = 1")
        .start()
        .await;
    assert_eq!(proxy.get("/").await.header("via"), Some("2 tidegate"));
    let (mut client, reply) = proxy.upgrade(WEBSOCKET_HANDSHAKE).await;
    reply
        .expect_status(101)
        .expect_header("sec-websocket-accept", ACCEPT_KEY);
    client.send("there").await.read_past(b"there").await;
    assert_eq!(proxy.get("/").await.header("via"), Some("2 tidegate"));
}

#[tokio::test]
async fn a_response_with_many_headers_is_forwarded() {
    let many = (0..200)
        .map(|n| format!("set-cookie: c{n}=1\r\n"))
        .collect::<String>();
    let answer = format!("HTTP/1.1 200 OK\r\n{many}Content-Length: 2\r\n\r\nok");
    let upstream = RawUpstream::with_response(answer).await;
    let proxy = Proxy::start("", upstream.address).await;
    let reply = proxy.get("/").await;
    assert_eq!(
        reply
            .headers
            .iter()
            .filter(|(name, _)| name == "set-cookie")
            .count(),
        200
    );
}
