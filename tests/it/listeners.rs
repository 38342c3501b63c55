//! Other listeners: Unix sockets, and load balancers with the PROXY protocol.

use crate::support::prelude::*;
use std::os::unix::fs::PermissionsExt;
use tokio::net::UnixStream;

const GET_REQUEST: &str = "GET / HTTP/1.1\r\nHost: a.example\r\n\r\n";
const PER_CLIENT_POLICY: &str =
    "[[policy]]\nname = 'p'\nkey = ['client_ip']\nlimit = { requests = 1, per = '1h' }\n";
const PROXY_PROTOCOL_CONFIG: &str =
    "[listen]\nproxy_protocol = 'require'\nproxy_protocol_from = ['127.0.0.1/32']\n";

/// Version 2: from 192.0.2.1:56324, TCP over IPv4.
const V2_HEADER: &[u8] =
    b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xc0\0\x02\x01\xc6\x33\x64\x01\xdc\x04\x01\xbb";
const V2_LOCAL_HEADER: &[u8] = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";

async fn wait_for_proxy_protocol_errors(proxy: &Proxy, kind: &str, times: u64) {
    let series = format!("tidegate_proxy_protocol_errors_total{{kind=\"{kind}\"}}");
    proxy.wait_for_metric(&series, times as f64).await;
}

/// A connection that starts with these bytes.
async fn connect_and_send(address: SocketAddr, header: &[u8]) -> RawClient {
    RawClient::connect_and_send(address, header).await
}

#[tokio::test]
async fn the_proxy_header_sets_the_client_address() {
    let upstream = Upstream::echo().await;
    let config = format!("{PROXY_PROTOCOL_CONFIG}{PER_CLIENT_POLICY}");
    let proxy = Proxy::start(&config, upstream.address).await;
    let v1 = b"PROXY TCP4 192.0.2.1 198.51.100.1 56324 443\r\n".as_slice();
    let v1_v6 = b"PROXY TCP6 2001:db8::1 2001:db8::2 1 2\r\n".as_slice();
    for (header, client_ip, status) in [
        (v1, "192.0.2.1", 200),
        (V2_HEADER, "192.0.2.1", 429),
        (
            b"PROXY TCP4 192.0.2.9 198.51.100.1 1 2\r\n",
            "192.0.2.9",
            200,
        ),
        (v1_v6, "2001:db8::1", 200),
        (b"PROXY UNKNOWN\r\n", "127.0.0.1", 200),
        (V2_LOCAL_HEADER, "127.0.0.1", 429),
    ] {
        let mut client = connect_and_send(proxy.address, header).await;
        let answered = client.request(GET_REQUEST).await.status;
        assert_eq!(answered, status, "{client_ip}");
        // The header applies to the connection, not to one request.
        assert_eq!(client.request(GET_REQUEST).await.status, 429, "{client_ip}");
        if status == 200 {
            upstream
                .last_request()
                .expect_header("x-forwarded-for", client_ip);
        }
    }
    // Also if it arrives byte by byte.
    for header in [v1, V2_HEADER] {
        let socket = TcpStream::connect(proxy.address).await.unwrap();
        socket.set_nodelay(true).unwrap();
        let mut client = RawClient::from_stream(socket);
        for byte in header {
            client.send([*byte]).await;
        }
        assert_eq!(client.request(GET_REQUEST).await.status, 429);
        let mut client = connect_and_send(
            proxy.address,
            &[header, GET_REQUEST.as_bytes(), GET_REQUEST.as_bytes()].concat(),
        )
        .await;
        assert_eq!(
            (
                client.read_response().await.status,
                client.read_response().await.status
            ),
            (429, 429)
        );
    }
}

#[tokio::test]
async fn the_address_in_the_proxy_header_replaces_the_peer_address() {
    let upstream = Upstream::echo().await;
    let config = format!(
        "{PROXY_PROTOCOL_CONFIG}[client]\ntrusted_proxies = ['192.0.2.0/24']\n{PER_CLIENT_POLICY}"
    );
    let proxy = Proxy::start(&config, upstream.address).await;
    let asked = "GET / HTTP/1.1\r\nHost: a.example\r\nX-Forwarded-For: 203.0.113.7\r\n\r\n";
    assert_eq!(
        connect_and_send(proxy.address, V2_HEADER)
            .await
            .request(asked)
            .await
            .status,
        200
    );
    upstream
        .last_request()
        .expect_header("x-forwarded-for", "203.0.113.7, 192.0.2.1");
    // The load balancer is trusted for its PROXY header and for nothing else.
    assert_eq!(
        connect_and_send(proxy.address, V2_LOCAL_HEADER)
            .await
            .request(asked)
            .await
            .status,
        200
    );
    upstream
        .last_request()
        .expect_header("x-forwarded-for", "127.0.0.1");
}

#[tokio::test]
async fn the_proxy_header_precedes_the_tls_handshake() {
    let ca = CertificateAuthority::new();
    ca.sign("a", "a.example");
    let tls = ca.listen_tls("a");
    let proxy = Proxy::with_echo(&format!("{PROXY_PROTOCOL_CONFIG}{tls}")).await;
    for header in [V2_HEADER, b"PROXY TCP4 192.0.2.1 198.51.100.1 1 2\r\n"] {
        let mut socket = TcpStream::connect(proxy.address).await.unwrap();
        socket.write_all(header).await.unwrap();
        let stream = TlsClient::new(&ca).handshake(socket, "a.example").await;
        let mut client = RawClient::from_stream(stream.unwrap());
        assert_eq!(client.request(GET_REQUEST).await.status, 200);
        let seen = proxy.echo().last_request();
        seen.expect_header("x-forwarded-for", "192.0.2.1");
        seen.expect_header("x-forwarded-proto", "https");
    }
    let without = TlsClient::new(&ca)
        .connect(proxy.address, "a.example")
        .await;
    assert!(without.is_err());
    wait_for_proxy_protocol_errors(&proxy, "absent", 1).await;
}

#[tokio::test]
async fn connections_without_a_valid_proxy_header_are_closed_and_counted() {
    let upstream = Upstream::echo().await;
    let config = format!("{PROXY_PROTOCOL_CONFIG}[listen.http]\nheader_timeout = '400ms'\n");
    let proxy = Proxy::start(&config, upstream.address).await;
    let mark = proxy.log_mark();
    let mut wrong_sum = V2_HEADER.to_vec();
    wrong_sum[15] += 7;
    wrong_sum.extend(b"\x03\0\x04abcd");
    let long = [V2_HEADER.get(..14).unwrap(), &[0xff, 0xff]].concat();
    for (kind, times, header) in [
        ("absent", 1, GET_REQUEST.as_bytes()),
        ("malformed", 1, b"PROXY TCP4 1.1.1.1 2.2.2.2 1\r\n"),
        ("malformed", 2, b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\n"),
        ("malformed", 3, b"\r\n\r\n\0\r\nQUIT\n\x11"),
        ("too_long", 1, &long),
        ("checksum", 1, &wrong_sum),
        ("timeout", 1, b"PROXY TCP4 1.1.1.1"),
    ] {
        let mut client = connect_and_send(
            proxy.address,
            &[header, GET_REQUEST.as_bytes()].concat()[..header.len().max(18)],
        )
        .await;
        assert_eq!(client.read_to_close().await, Vec::<u8>::new(), "{kind}");
        wait_for_proxy_protocol_errors(&proxy, kind, times).await;
    }
    drop(connect_and_send(proxy.address, b"PROXY ").await);
    wait_for_proxy_protocol_errors(&proxy, "closed", 1).await;
    assert!(upstream.requests().is_empty() && proxy.log_since(mark).is_empty());

    let others = PROXY_PROTOCOL_CONFIG.replace("127.0.0.1/32", "10.0.0.0/8");
    let proxy = Proxy::start(&others, upstream.address).await;
    let mut client = connect_and_send(proxy.address, V2_HEADER).await;
    let answer = client.send(GET_REQUEST).await.read_to_close().await;
    assert_eq!(answer, Vec::<u8>::new());
    wait_for_proxy_protocol_errors(&proxy, "not_allowed", 1).await;
    assert!(upstream.requests().is_empty());
}

#[tokio::test]
async fn requiring_the_proxy_protocol_without_allowed_networks_is_an_error() {
    let check = async |listen: &str| {
        let config = ConfigFile::new(&format!(
            "upstream.url = 'http://a'\nupstream.max_tunnels_per_client = 64\n[listen]\n{listen}\n\
                 [[policy]]\nname = 'all'\nkey = []\nlimit = {{ requests = 5, per = '1s' }}\n"
        ));
        let ended = config.run(&["check"]).await;
        (ended.status.code(), ended.stderr)
    };
    let (code, output) = check("proxy_protocol = 'require'").await;
    assert!(
        code == Some(1) && output.contains("expected the networks of your load balancers"),
        "{output}"
    );
    let (code, output) = check("proxy_protocol_from = ['10.0.0.0/8']").await;
    assert!(
        code == Some(0) && output.contains("without effect: proxy_protocol is"),
        "{output}"
    );
    assert_eq!(
        check("proxy_protocol = 'require'\nproxy_protocol_from = ['10.0.0.0/8']").await,
        (Some(0), String::new())
    );
}

/// A proxy on a Unix socket.
async fn start_on_socket(
    path: &Path,
    folder: &TempDir,
    config: &str,
    upstream: SocketAddr,
) -> ChildProcess {
    let process = spawn_on_socket(path, folder, config, upstream);
    process.wait_for_text("\"listening\"").await;
    process
}

fn spawn_on_socket(
    path: &Path,
    folder: &TempDir,
    config: &str,
    upstream: SocketAddr,
) -> ChildProcess {
    let file = folder.path().join("config.toml");
    fs::write(&file, config).unwrap();
    let mut command = tidegate_command();
    command
        .arg("run")
        .arg("--config")
        .arg(file)
        .arg("--listen")
        .arg(format!("unix:{}", path.display()));
    ChildProcess::start(command.arg("--upstream").arg(format!("http://{upstream}"))).unwrap()
}

async fn connect_to_socket(path: &Path) -> RawClient {
    RawClient::from_stream(UnixStream::connect(path).await.unwrap())
}

#[tokio::test]
async fn a_client_of_a_unix_socket_has_the_loopback_address() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("t.sock");
    let upstream = Upstream::echo().await;
    let config = format!("[client]\ntrusted_proxies = ['127.0.0.1/32']\n{PER_CLIENT_POLICY}");
    let mut process = start_on_socket(&path, &folder, &config, upstream.address).await;
    assert_contains(
        &process.transcript(),
        &[&format!("\"address\":\"unix:{}\"", path.display())],
    );
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o666
    );
    let mut client = connect_to_socket(&path).await;
    assert_eq!(client.request(GET_REQUEST).await.status, 200);
    upstream
        .last_request()
        .expect_header("x-forwarded-for", "127.0.0.1");
    assert_eq!(client.request(GET_REQUEST).await.status, 429);
    let from = "GET / HTTP/1.1\r\nHost: a.example\r\nX-Forwarded-For: 192.0.2.7\r\n\r\n";
    let status = connect_to_socket(&path).await.request(from).await.status;
    assert_eq!(status, 200);
    upstream
        .last_request()
        .expect_header("x-forwarded-for", "192.0.2.7, 127.0.0.1");
    process.send_signal("TERM");
    assert!(client.closes_within(TEST_TIMEOUT).await);
    process.assert_exit_code(0).await;
    assert!(!path.exists(), "the socket file was not removed");
}

#[tokio::test]
async fn only_a_stale_socket_file_is_replaced() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("t.sock");
    let upstream = Upstream::echo().await;
    let killed = start_on_socket(&path, &folder, "", upstream.address).await;
    drop(killed);
    wait_until("the end of the killed process", async || {
        UnixStream::connect(&path).await.is_err()
    })
    .await;
    assert!(path.exists(), "a killed process leaves its socket file");
    let mut first = start_on_socket(&path, &folder, "", upstream.address).await;
    assert_eq!(
        connect_to_socket(&path)
            .await
            .request(GET_REQUEST)
            .await
            .status,
        200
    );

    let second = spawn_on_socket(&path, &folder, "", upstream.address)
        .wait_for_exit(TEST_TIMEOUT)
        .await;
    second.expect_code(1).expect_stderr(&format!(
        "cannot listen on unix:{}: another process answers on it",
        path.display()
    ));
    assert_eq!(
        connect_to_socket(&path)
            .await
            .request(GET_REQUEST)
            .await
            .status,
        200,
        "the first instance keeps serving"
    );

    // A file of another kind at the socket's path is not removed.
    fs::remove_file(&path).unwrap();
    fs::write(&path, "mine").unwrap();
    first.send_signal("TERM");
    first.wait_for_exit(TEST_TIMEOUT).await;
    assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
    let third = spawn_on_socket(&path, &folder, "", upstream.address)
        .wait_for_exit(TEST_TIMEOUT)
        .await;
    third.expect_stderr("not a socket");
    assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
}

#[tokio::test]
async fn a_unix_socket_accepts_tls_and_proxy_headers_and_logs_settings_that_need_a_restart() {
    let ca = CertificateAuthority::new();
    ca.sign("a", "a.example");
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("t.sock");
    let upstream = Upstream::echo().await;
    let tls = ca.listen_tls("a");
    let config = format!("{PROXY_PROTOCOL_CONFIG}{tls}");
    let process = start_on_socket(&path, &folder, &config, upstream.address).await;
    let mut socket = UnixStream::connect(&path).await.unwrap();
    socket.write_all(V2_HEADER).await.unwrap();
    let stream = TlsClient::new(&ca).handshake(socket, "a.example").await;
    let mut client = RawClient::from_stream(stream.unwrap());
    assert_eq!(client.request(GET_REQUEST).await.status, 200);
    let seen = upstream.last_request();
    seen.expect_header("x-forwarded-for", "192.0.2.1");
    seen.expect_header("x-forwarded-proto", "https");

    let mark = process.lines().len();
    fs::write(
        folder.path().join("config.toml"),
        config
            .replace("require", "off")
            .replace("proxy_protocol_from = ['127.0.0.1/32']", ""),
    )
    .unwrap();
    let says = |setting: &'static str| {
        move |text: &str| (text.contains("after a restart") && text.contains(setting)).then_some(())
    };
    for setting in ["listen.proxy_protocol\"", "listen.proxy_protocol_from"] {
        process
            .wait_for(setting, mark, TEST_TIMEOUT, |line| {
                says(setting)(&line.text)
            })
            .await;
    }
}
