//! TLS with clients: certificate selection, client certificates, and traffic. `reload` covers
//! changes at run time.

mod reload;

use crate::support::client::open_http2_over_stream;
use crate::support::prelude::*;
use crate::support::tls::certificate_params;
use hyper::ext::Protocol;
use hyper_util::rt::TokioIo;
use rcgen::{CertificateParams, SanType, date_time_ymd};
use tokio_rustls::rustls::version;

const GET_REQUEST: &str = "GET / HTTP/1.1\r\nHost: a.example\r\n\r\n";

/// `[listen.tls]` with the certificate named `a`.
fn tls_config(ca: &CertificateAuthority, more: &str) -> String {
    format!(
        "[listen.tls]\ncert = {:?}\nkey = {:?}\n{more}\n",
        ca.path_string("a.pem"),
        ca.path_string("a.key")
    )
}

/// The number of failed handshakes of a kind.
async fn failed_handshakes(proxy: &Proxy, kind: &str) -> f64 {
    proxy.read_present_metric(&handshake_errors(kind)).await
}

fn handshake_errors(kind: &str) -> String {
    format!("tidegate_tls_handshake_errors_total{{kind=\"{kind}\"}}")
}

/// Waits until this many handshakes of a kind have failed.
async fn wait_for_failed_handshakes(proxy: &Proxy, kind: &str, times: f64) {
    proxy.wait_for_metric(&handshake_errors(kind), times).await;
}

/// Waits until this many connections are open.
async fn wait_for_open_connections(proxy: &Proxy, connections: f64) {
    proxy
        .wait_for_metric("tidegate_connections_active", connections)
        .await;
}

fn get_request(path: &str) -> Request<ClientBody> {
    crate::support::client::get_request(format!("https://a.example{path}"))
}

#[tokio::test]
async fn alpn_selects_http1_or_http2() {
    let ca = CertificateAuthority::with_certificate();
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start(&tls_config(&ca, ""), upstream.address).await;
    for versions in [[&version::TLS13], [&version::TLS12]] {
        let client = TlsClient::with_versions(&ca, &versions, None);
        for offered in [vec![], vec!["http/1.1"]] {
            let mut http1 = client
                .clone()
                .with_alpn(&offered)
                .connect_http1(proxy.address, "a.example")
                .await;
            for _ in 0..2 {
                assert_eq!(http1.request(GET_REQUEST).await.status, 200);
            }
            let seen = upstream.last_request();
            assert_eq!(seen.single_header("x-forwarded-proto"), "https");
            seen.expect_header("forwarded", "for=127.0.0.1;host=\"a.example\";proto=https");
            assert_eq!(seen.single_header("via"), "1.1 tidegate");
        }
        let h2 = client
            .clone()
            .with_alpn(&["h2", "http/1.1"])
            .connect(proxy.address, "a.example")
            .await
            .unwrap();
        assert_eq!(h2.get_ref().1.alpn_protocol(), Some(b"h2".as_slice()));
        let mut h2 = open_http2_over_stream(h2).await;
        let answered = await_response(h2.send_request(get_request("/"))).await;
        assert_eq!(answered.status(), 200);
        upstream
            .last_request()
            .expect_header("x-forwarded-proto", "https");
        upstream.last_request().expect_header("via", "2 tidegate");
    }
    // The negotiated protocol applies, whatever bytes the client sends.
    let mut h2 = TlsClient::new(&ca)
        .with_alpn(&["h2"])
        .connect(proxy.address, "a.example")
        .await
        .unwrap();
    h2.write_all(GET_REQUEST.as_bytes()).await.unwrap();
    let mut received = Vec::new();
    let ended = timeout(TEST_TIMEOUT, h2.read_to_end(&mut received)).await;
    assert!(
        ended.is_ok() && !String::from_utf8_lossy(&received).contains("HTTP/1.1"),
        "{ended:?} {received:?}"
    );
    let client = TlsClient::new(&ca).with_alpn(&["http/1.1"]);
    let mut http1 = client.connect(proxy.address, "a.example").await.unwrap();
    http1
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .await
        .unwrap();
    let ended = timeout(TEST_TIMEOUT, http1.read_to_end(&mut Vec::new())).await;
    assert!(
        ended.is_ok(),
        "the connection speaks HTTP/2 despite the negotiated http/1.1"
    );
    let strange = TlsClient::new(&ca)
        .with_alpn(&["spdy/3"])
        .connect(proxy.address, "a.example")
        .await;
    assert_contains(
        &strange.unwrap_err().to_string(),
        &["NoApplicationProtocol"],
    );
    wait_for_failed_handshakes(&proxy, "no_protocol", 1.0).await;
}

#[tokio::test]
async fn sni_selects_the_certificate() {
    let ca = CertificateAuthority::with_certificate();
    for (file, name) in [
        ("b", "b.example"),
        ("wild", "*.wild.example"),
        ("ip", "127.0.0.1"),
    ] {
        ca.sign(file, name);
    }
    let more = ["wild", "b"].map(|file| {
        format!(
            "[[listen.tls.certificates]]\ncert = {:?}\nkey = {:?}\n",
            ca.path_string(&format!("{file}.pem")),
            ca.path_string(&format!("{file}.key"))
        )
    });
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start(&tls_config(&ca, &more.concat()), upstream.address).await;
    // The client verifies that the certificate is valid for the name.
    for name in ["a.example", "b.example", "B.Example", "c.wild.example"] {
        let mut client = TlsClient::new(&ca).connect_http1(proxy.address, name).await;
        assert_eq!(client.request(GET_REQUEST).await.status, 200, "{name}");
    }
    for name in ["x.c.wild.example", "wild.example", "other.test"] {
        let error = TlsClient::new(&ca)
            .connect(proxy.address, name)
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("a.example"),
            "{name} gets the first certificate: {error}"
        );
    }
    wait_for_failed_handshakes(&proxy, "refused", 3.0).await;
    // A client that connects to an address sends no SNI.
    let error = TlsClient::new(&ca)
        .connect(proxy.address, "127.0.0.1")
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("a.example"), "{error}");
    let config =
        tls_config(&ca, &more.concat()).replace(&ca.path_string("a."), &ca.path_string("ip."));
    let proxy = Proxy::start(&config, upstream.address).await;
    let mut client = TlsClient::new(&ca)
        .connect_http1(proxy.address, "127.0.0.1")
        .await;
    assert_eq!(client.request(GET_REQUEST).await.status, 200);
}

/// A certificate for `cn` with these alternative names.
fn client_certificate(cn: &str, names: Vec<SanType>) -> CertificateParams {
    let mut params = certificate_params(cn, Vec::new());
    params.subject_alt_names = names;
    params
}

#[tokio::test]
async fn client_certificates_are_verified_and_used_as_keys() {
    let (ca, other) = (
        CertificateAuthority::with_certificate(),
        CertificateAuthority::new(),
    );
    let uri = |uri: &str| SanType::URI(uri.try_into().unwrap());
    ca.sign_params(
        "ann",
        client_certificate("Ann", vec![uri("spiffe://mesh/ann")]),
    );
    ca.sign_params(
        "bob",
        client_certificate("Ann", vec![uri("spiffe://mesh/bob")]),
    );
    ca.sign_params("nameless", client_certificate("", Vec::new()));
    other.sign_params(
        "eve",
        client_certificate("Ann", vec![uri("spiffe://mesh/ann")]),
    );
    let policies = "[[policy]]\nname = 'san'\nmatch = { path = '/san' }\nkey = ['client_cert:san']\nlimit = { requests = 1, per = '1h' }\nmissing_key = 'reject'\n\
                    [[policy]]\nname = 'cn'\nmatch = { path = '/cn' }\nkey = ['client_cert:cn']\nlimit = { requests = 1, per = '1h' }\n";
    let config = |auth: &str| {
        tls_config(
            &ca,
            &format!(
                "client_ca = {:?}\nclient_auth = '{auth}'\n{policies}",
                ca.path_string("ca.pem")
            ),
        )
    };
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start(&config("optional"), upstream.address).await;
    let with = |signer, file| TlsClient::with_certificate(&ca, signer, file);
    async fn send_request(client: TlsClient, address: SocketAddr, path: &str) -> u16 {
        let mut client = client.connect_http1(address, "a.example").await;
        client
            .request(format!("GET {path} HTTP/1.1\r\nHost: a.example\r\n\r\n"))
            .await
            .status
    }
    let without = || TlsClient::new(&ca);
    for (client, path, status, why) in [
        (with(&ca, "ann"), "/san", 200, "her first request"),
        (with(&ca, "ann"), "/san", 429, "her second request"),
        (with(&ca, "bob"), "/san", 200, "another SAN"),
        (with(&ca, "ann"), "/cn", 200, "her first request by CN"),
        (with(&ca, "bob"), "/cn", 429, "the quota of the same CN"),
        (without(), "/cn", 200, "the quota of no certificate"),
        (
            with(&ca, "nameless"),
            "/cn",
            429,
            "without a CN, as without a certificate",
        ),
        (without(), "/san", 400, "no certificate"),
    ] {
        let found = send_request(client, proxy.address, path).await;
        assert_eq!(found, status, "{path}: {why}");
    }
    let explained = run_command(
        tidegate_command()
            .args(["explain", "--config"])
            .arg(proxy.config_path())
            .args(["GET", "/san", "--client-cert-san", "spiffe://mesh/ann"]),
    )
    .await;
    assert!(
        explained.stdout.contains("key san/spiffe:%2F%2Fmesh%2Fann"),
        "{explained:?}"
    );

    assert_handshake_rejected(&proxy, &with(&other, "eve"), "bad_certificate").await;
    let strict = Proxy::start(&config("require"), upstream.address).await;
    let admitted = send_request(with(&ca, "ann"), strict.address, "/san").await;
    assert_eq!(admitted, 200);
    assert_handshake_rejected(&strict, &TlsClient::new(&ca), "no_certificate").await;
    assert_handshake_rejected(&strict, &with(&other, "eve"), "bad_certificate").await;
}

/// Checks that the handshake is rejected with an alert and counted.
async fn assert_handshake_rejected(proxy: &Proxy, client: &TlsClient, kind: &str) {
    let before = failed_handshakes(proxy, kind).await;
    // In TLS 1.3 the client finishes its handshake before the server verifies its certificate.
    let outcome = match client.connect(proxy.address, "a.example").await {
        Ok(mut stream) => {
            stream
                .write_all(GET_REQUEST.as_bytes())
                .await
                .unwrap_or_default();
            stream.read_to_end(&mut Vec::new()).await.unwrap_err()
        }
        Err(error) => error,
    };
    assert!(outcome.to_string().contains("alert"), "{outcome}");
    wait_for_failed_handshakes(proxy, kind, before + 1.0).await;
}

#[tokio::test]
async fn failed_handshakes_end_in_time_and_are_counted_by_kind() {
    let ca = CertificateAuthority::with_certificate();
    let config = tls_config(&ca, "[listen.http]\nheader_timeout = '300ms'\n");
    let proxy = Proxy::start(&config, "http://127.0.0.1:9").await;
    let mark = proxy.log_mark();
    // A connection without any bytes, such as a port probe, is not a failed handshake.
    drop(RawClient::connect(proxy.address).await);
    let mut plain = proxy.send_raw(GET_REQUEST).await;
    assert!(!String::from_utf8_lossy(&plain.read_to_close().await).contains("HTTP/"));
    wait_for_failed_handshakes(&proxy, "invalid", 1.0).await;
    let mut silent = RawClient::connect(proxy.address).await;
    let mut slow = proxy.send_raw(b"\x16\x03\x01\x02\x00\x01").await;
    assert_eq!(
        (silent.read_to_close().await, slow.read_to_close().await),
        (vec![], vec![])
    );
    wait_for_failed_handshakes(&proxy, "timeout", 2.0).await;
    proxy.send_raw(b"\x16\x03\x01\x02\x00\x01").await;
    wait_for_failed_handshakes(&proxy, "closed", 1.0).await;
    assert!(proxy.log_since(mark).is_empty());
    let expiry = proxy.read_metrics_page().await;
    assert_contains(
        &expiry,
        &[&format!(
            "tidegate_certificate_expiry_seconds{{file=\"{}\"}} ",
            ca.path_string("a.pem")
        )],
    );
}

/// An upstream that accepts an upgrade and echoes all bytes.
async fn start_echo_upstream() -> RawUpstream {
    RawUpstream::with_script(|_, mut socket| async move {
        let Some(head) = socket.read_request().await else { return };
        let head = String::from_utf8_lossy(&head).into_owned();
        let key = head.lines().find_map(|line| line.strip_prefix("sec-websocket-key: "));
        let proof = key.map(crate::upgrades::accept_key_for).unwrap_or_default();
        let switch = format!("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {proof}\r\n\r\n");
        socket.send(switch.as_bytes()).await;
        let (mut reads, mut writes) = socket.stream().split();
        tokio::io::copy(&mut reads, &mut writes).await.unwrap_or_default();
        writes.shutdown().await.unwrap_or_default();
    })
    .await
}

#[tokio::test]
async fn tunnels_carry_every_byte_over_tls() {
    let ca = CertificateAuthority::with_certificate();
    let upstream = start_echo_upstream().await;
    let proxy = Proxy::start(&tls_config(&ca, ""), upstream.address).await;
    let bytes = pseudo_random_bytes(300_000);
    let shake = "GET /chat HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n";
    let mut stream = connect_tls(&ca, &proxy).await;
    // Sent together with the end of the handshake: bytes that TLS has read ahead must not be lost.
    stream
        .write_all(&[shake.as_bytes(), &bytes[..100]].concat())
        .await
        .unwrap();
    let (mut reads, mut writes) = tokio::io::split(stream);
    let sent = bytes.clone();
    let sending = tokio::spawn(async move {
        writes.write_all(&sent[100..]).await.unwrap();
        // Closing one direction must not close the other.
        writes.shutdown().await.unwrap();
    });
    let mut got = Vec::new();
    in_time(reads.read_to_end(&mut got))
        .await
        .expect("the tunnel closes cleanly");
    sending.await.unwrap();
    let text = got.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
    assert!(got.starts_with(b"HTTP/1.1 101") && got[text + 4..] == bytes);

    let h2 = TlsClient::new(&ca)
        .with_alpn(&["h2"])
        .connect(proxy.address, "a.example")
        .await
        .unwrap();
    let mut h2 = open_http2_over_stream(h2).await;
    let mut connect = Request::connect("https://a.example/chat")
        .header("sec-websocket-version", "13")
        .body(ClientBody::default())
        .unwrap();
    connect
        .extensions_mut()
        .insert(Protocol::from_static("websocket"));
    let response = await_response(h2.send_request(connect)).await;
    assert_eq!(response.status(), 200);
    let mut tunnel = TokioIo::new(hyper::upgrade::on(response).await.unwrap());
    tunnel.write_all(&bytes[..50_000]).await.unwrap();
    let mut echoed = vec![0; 50_000];
    in_time(tunnel.read_exact(&mut echoed)).await.unwrap();
    assert!(echoed == bytes[..50_000]);
}

#[tokio::test]
async fn a_drain_closes_tls_connections_with_close_notify() {
    let ca = CertificateAuthority::with_certificate();
    let (feeder, body) = channel_body();
    let body = Mutex::new(Some(body));
    let upstream = Upstream::with_handler(move |request| {
        let body = if request.uri().path() == "/slow" {
            body.lock().unwrap().take()
        } else {
            None
        };
        async { Response::new(body.unwrap_or_default()) }
    })
    .await;
    let mut proxy = Proxy::start(&tls_config(&ca, ""), upstream.address).await;
    let client = TlsClient::new(&ca);
    let mut idle = client.connect_http1(proxy.address, "a.example").await;
    assert_eq!(idle.request(GET_REQUEST).await.status, 200);
    let mut fresh = client.connect_http1(proxy.address, "a.example").await;
    let stream = client
        .clone()
        .with_alpn(&["h2"])
        .connect(proxy.address, "a.example")
        .await
        .unwrap();
    let (mut h2, connection) = hyper::client::conn::http2::handshake(
        hyper_util::rt::TokioExecutor::new(),
        TokioIo::new(stream),
    )
    .await
    .unwrap();
    let connection = tokio::spawn(connection);
    let slow = await_response(h2.send_request(get_request("/slow"))).await;
    // A client in the middle of its handshake when the drain begins.
    let socket = TcpStream::connect(proxy.address).await.unwrap();
    wait_for_open_connections(&proxy, 4.0).await;
    proxy.send_sigterm();
    // Reading `rest` fails without a close_notify.
    assert_eq!(
        (idle.read_to_close().await, fresh.read_to_close().await),
        (vec![], vec![])
    );
    let mut late = RawClient::from_stream(client.handshake(socket, "a.example").await.unwrap());
    let reply = late.request(GET_REQUEST).await;
    reply
        .expect_status(200)
        .expect_header("connection", "close");
    assert!(late.read_to_close().await.is_empty());
    assert!(proxy.is_running(), "the proxy must wait for the stream");
    feeder.send("the rest").await;
    drop(feeder);
    let whole = http_body_util::BodyExt::collect(slow.into_body())
        .await
        .unwrap()
        .to_bytes();
    assert_eq!(whole, "the rest");
    in_time(connection)
        .await
        .unwrap()
        .expect("the client receives a GOAWAY");
    proxy.assert_exit_code(0).await;
}

#[tokio::test]
async fn a_truncated_upload_never_looks_complete() {
    let ca = CertificateAuthority::with_certificate();
    let proxy = Proxy::with_echo(&tls_config(&ca, "")).await;
    let raw = RawUpstream::with_response("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    let chunked = Proxy::start(&tls_config(&ca, ""), raw.address).await;
    for orderly in [true, false] {
        let mut stream = connect_tls(&ca, &chunked).await;
        let head = "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        let seen = raw.connection_count();
        wait_until("the start of the upload", async || {
            String::from_utf8_lossy(&raw.received_bytes()).contains("hello")
        })
        .await;
        if orderly {
            stream.shutdown().await.unwrap();
        }
        drop(stream);
        wait_for_open_connections(&chunked, 0.0).await;
        assert!(
            !String::from_utf8_lossy(&raw.received_bytes()).contains("\r\n0\r\n"),
            "{orderly} {seen}"
        );
    }
    let mut client = connect_tls_http1(&ca, &proxy).await;
    let body = pseudo_random_bytes(200_000);
    client
        .send(
            [
                format!(
                    "PUT / HTTP/1.1\r\nHost: a.example\r\nContent-Length: {}\r\n\r\n",
                    body.len()
                )
                .as_bytes(),
                &body,
            ]
            .concat(),
        )
        .await;
    assert_eq!(
        client.read_response().await.json()["body_sha256"],
        sha256(&body)
    );
}

#[tokio::test]
async fn a_client_that_stops_reading_is_disconnected_and_a_slow_one_is_not() {
    let ca = CertificateAuthority::with_certificate();
    let upstream =
        Upstream::with_handler(|_| async { Response::new(full_body(vec![b'x'; 20 << 20])) }).await;
    let config = tls_config(&ca, "[listen.http]\nbody_idle_timeout = '700ms'\n");
    let proxy = Proxy::start(&config, upstream.address).await;
    let mut deaf = connect_tls(&ca, &proxy).await;
    deaf.write_all(GET_REQUEST.as_bytes()).await.unwrap();
    let mut slow = connect_tls(&ca, &proxy).await;
    slow.write_all(GET_REQUEST.as_bytes()).await.unwrap();
    let active = async || {
        proxy
            .read_metrics_page()
            .await
            .lines()
            .any(|line| line == "tidegate_connections_active 1")
    };
    let deadline = Instant::now() + TEST_TIMEOUT;
    let mut some = vec![0; 256 << 10];
    let mut read = 0;
    while !active().await {
        assert!(
            Instant::now() < deadline,
            "the client that does not read is still connected"
        );
        read += slow.read(&mut some).await.unwrap();
        sleep(Duration::from_millis(50)).await;
    }
    while read < 20 << 20 {
        match slow.read(&mut some).await.unwrap() {
            0 => panic!("disconnected after {read}"),
            n => read += n,
        }
    }
}

#[tokio::test]
async fn certificate_errors_are_reported_by_check() {
    let ca = CertificateAuthority::with_certificate();
    ca.sign("b", "b.example");
    let mut over = certificate_params("a.example", vec!["a.example".to_owned()]);
    over.not_after = date_time_ymd(2020, 1, 1);
    ca.sign_params("over", over);
    fs::write(ca.path("empty"), "").unwrap();
    fs::write(
        ca.path("locked"),
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
    )
    .unwrap();
    let check = async |cert: &str, key: &str, more: &str| {
        let (cert, key) = (ca.path_string(cert), ca.path_string(key));
        let text = format!(
            "upstream.url = 'http://a'\nupstream.max_tunnels_per_client = 64\n[listen.tls]\ncert = {cert:?}\nkey = {key:?}\n{more}\
             [[policy]]\nname = 'all'\nkey = []\nlimit = {{ requests = 5, per = '1s' }}\n"
        );
        fs::write(ca.path("config.toml"), text).unwrap();
        let ended = run_command(tidegate_command().arg("check").arg(ca.path("config.toml"))).await;
        (ended.status.code(), ended.stderr)
    };
    let ca_file = format!("client_ca = {:?}\n", ca.path_string("ca.pem"));
    for (cert, key, more, code, expected) in [
        ("a.pem", "a.key", "", 0, ""),
        (
            "a.pem",
            "b.key",
            "",
            1,
            "listen.tls.key: in the file: the key is not that of the certificate",
        ),
        (
            "none",
            "a.key",
            "",
            1,
            "listen.tls.cert: the file can't be read: No such file",
        ),
        (
            "empty",
            "a.key",
            "",
            1,
            "listen.tls.cert: in the file: there is no PEM certificate in it",
        ),
        (
            "a.pem",
            "a.pem",
            "",
            1,
            "listen.tls.key: in the file: there is no PEM private key in it",
        ),
        (
            "a.pem",
            "locked",
            "",
            1,
            "listen.tls.key: in the file: the private key is encrypted",
        ),
        ("over.pem", "over.key", "", 0, "warning: "),
        (
            "a.pem",
            "a.key",
            "client_auth = 'require'\n",
            1,
            "listen.tls.client_auth: no CA to verify client certificates",
        ),
        (
            "a.pem",
            "a.key",
            "client_auth = 'optional'\nclient_ca = 'none'\n",
            1,
            "listen.tls.client_ca: the file can't be read",
        ),
        (
            "a.pem",
            "a.key",
            &ca_file,
            0,
            "listen.tls.client_ca: without effect: client_auth is",
        ),
        (
            "a.pem",
            "a.key",
            "[[policy]]\nname = 'p'\nkey = ['client_cert:cn']\nlimit = { requests = 1, per = '1s' }\n",
            0,
            "the listener requests no client certificates",
        ),
        (
            "a.pem",
            "a.key",
            "certificates = [{ cert = 'x' }]\n",
            1,
            "listen.tls.certificates[0].key: missing",
        ),
    ] {
        let (ended, stderr) = check(cert, key, more).await;
        assert_eq!(ended, Some(code), "{expected}: {stderr}");
        assert!(
            stderr.contains(expected) && (code == 1 || !expected.is_empty() || stderr.is_empty()),
            "{expected}: {stderr}"
        );
    }
    assert_contains(&check("over.pem", "over.key", "").await.1, &["expired"]);
}

/// Captures the ClientHello for a server name.
async fn capture_client_hello(ca: &CertificateAuthority, name: &'static str) -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (client, address) = (TlsClient::new(ca), listener.local_addr().unwrap());
    let asking = tokio::spawn(async move { drop(client.connect(address, name).await) });
    let (mut socket, _) = listener.accept().await.unwrap();
    let mut record = vec![0; 5];
    socket.read_exact(&mut record).await.unwrap();
    record.resize(
        5 + usize::from(u16::from_be_bytes([record[3], record[4]])),
        0,
    );
    socket.read_exact(&mut record[5..]).await.unwrap();
    asking.abort();
    record
}

#[tokio::test]
async fn invalid_server_names_are_not_logged() {
    let ca = CertificateAuthority::with_certificate();
    let proxy = Proxy::start(&tls_config(&ca, ""), "http://127.0.0.1:9").await;
    let mark = proxy.log_mark();
    let (name, address) = ("abcdefghi", b"127.0.0.1");
    let mut hello = capture_client_hello(&ca, name).await;
    let at = hello
        .windows(name.len())
        .position(|part| part == name.as_bytes())
        .expect("the server name is in cleartext");
    hello[at..][..address.len()].copy_from_slice(address);
    let mut client = proxy.send_raw(&hello).await;
    // A handshake record: the ClientHello was read and answered.
    client.read_past(b"\x16\x03\x03").await;
    drop(client);
    wait_for_failed_handshakes(&proxy, "closed", 1.0).await;
    assert!(proxy.log_since(mark).is_empty());
}

#[tokio::test]
async fn data_sent_after_a_rejection_is_neither_a_request_nor_a_tls_error() {
    let ca = CertificateAuthority::with_certificate();
    let config = tls_config(&ca, "[listen.http]\nmax_body_bytes = '1KiB'\n");
    let proxy = Proxy::with_echo(&config).await;
    let mut client = connect_tls(&ca, &proxy).await;
    let head = "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 10000000\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    // Part of the data is read as TLS. The rest is discarded unread, including the start of a
    // record.
    client
        .write_all(&pseudo_random_bytes(700_000))
        .await
        .unwrap();
    let mut received = Vec::new();
    client.read_to_end(&mut received).await.unwrap();
    assert!(
        received.starts_with(b"HTTP/1.1 413"),
        "{}",
        String::from_utf8_lossy(&received)
    );
    sleep(Duration::from_millis(400)).await;
    client.write_all(GET_REQUEST.as_bytes()).await.unwrap();
    wait_for_open_connections(&proxy, 0.0).await;
    assert!(proxy.echo().requests().is_empty());
    assert!(!proxy.log_text().contains("panic"));
}
