//! What the app learns of the client's TLS: `Client-Cert` (RFC 9440), and the protocol of clients
//! whose TLS ends at a load balancer.

use crate::support::client::open_http2_over_stream;
use crate::support::prelude::*;
use crate::support::upstream::ReceivedRequest;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::version;

const FIELDS: [&str; 2] = ["client-cert", "client-cert-chain"];
const GET_REQUEST: &str = "GET / HTTP/1.1\r\nHost: a.example\r\n\r\n";
const FORGED_REQUEST: &str = "GET / HTTP/1.1\r\nHost: a.example\r\nClient-Cert: :Zm9yZ2Vk:\r\n\
     client-cert: :Zm9yZ2Vk:\r\nClient-Cert-Chain: :Zm9yZ2Vk:\r\n\r\n";

fn tls_config(ca: &CertificateAuthority, more: &str) -> String {
    let [cert, key, root] = ["a.pem", "a.key", "ca.pem"].map(|file| ca.path_string(file));
    format!("[listen.tls]\ncert = {cert:?}\nkey = {key:?}\nclient_ca = {root:?}\n{more}\n")
}

/// The certificates of a PEM file as the byte sequences of structured fields.
fn byte_sequences(ca: &CertificateAuthority, file: &str) -> Vec<String> {
    CertificateDer::pem_file_iter(ca.path(file))
        .unwrap()
        .map(|der| format!(":{}:", STANDARD.encode(der.unwrap())))
        .collect()
}

/// Both fields, joined if there are several lines.
fn client_cert_of(seen: &ReceivedRequest) -> [String; 2] {
    FIELDS.map(|name| seen.header_values(name).join(" + "))
}

/// Writes `<file>.pem`: the certificates of these files, one after the other.
fn write_chain(ca: &CertificateAuthority, file: &str, parts: &[(&CertificateAuthority, &str)]) {
    let texts = parts
        .iter()
        .map(|(ca, part)| fs::read_to_string(ca.path(part)).unwrap());
    fs::write(
        ca.path(&format!("{file}.pem")),
        texts.collect::<Vec<_>>().concat(),
    )
    .unwrap();
}

#[tokio::test]
async fn the_app_receives_the_certificate_and_its_issuers() {
    let ca = CertificateAuthority::with_certificate();
    let middle = ca.sign_authority("an intermediate");
    middle.sign("ann", "ann.example");
    ca.sign("bob", "bob.example");
    fs::copy(ca.path("bob.pem"), middle.path("bob.pem")).unwrap();
    fs::copy(ca.path("bob.key"), middle.path("bob.key")).unwrap();
    fs::copy(ca.path("bob.key"), middle.path("padded.key")).unwrap();
    for name in ["chain", "more"] {
        fs::copy(middle.path("ann.key"), middle.path(&format!("{name}.key"))).unwrap();
    }
    write_chain(
        &middle,
        "chain",
        &[(&middle, "ann.pem"), (&middle, "ca.pem")],
    );
    // TLS verifies no certificates beyond those that it needs.
    write_chain(
        &middle,
        "more",
        &[
            (&middle, "ann.pem"),
            (&middle, "ca.pem"),
            (&middle, "bob.pem"),
        ],
    );
    write_chain(&middle, "padded", &[(&ca, "bob.pem"), (&middle, "ca.pem")]);
    let upstream = Upstream::echo().await;
    let on = "client_auth = 'optional'\nclient_cert_header = true";
    let proxy = Proxy::start(&tls_config(&ca, on), upstream.address).await;
    let issuer = byte_sequences(&middle, "ca.pem").remove(0);
    for (file, chain) in [
        ("chain", &*issuer),
        ("more", &*issuer),
        ("padded", ""),
        ("bob", ""),
    ] {
        let certificate = byte_sequences(&middle, &format!("{file}.pem")).remove(0);
        let expected = [certificate, chain.to_owned()];
        for versions in [[&version::TLS13], [&version::TLS12]] {
            let client = TlsClient::with_versions(&ca, &versions, Some((&middle, file)));
            // The second handshake resumes the session of the first one.
            for _ in 0..2 {
                let mut http1 = client.connect_http1(proxy.address, "a.example").await;
                for request in [GET_REQUEST, FORGED_REQUEST] {
                    assert_eq!(http1.request(request).await.status, 200);
                    let seen = upstream.last_request();
                    assert_eq!(client_cert_of(&seen), expected, "{file}: {request}");
                }
            }
            let h2 = client.clone().with_alpn(&["h2"]);
            let h2 = h2.connect(proxy.address, "a.example").await.unwrap();
            let mut h2 = open_http2_over_stream(h2).await;
            let request = Request::get("https://a.example/").header("client-cert", ":Zm9y:");
            let request = request.body(ClientBody::default()).unwrap();
            assert_eq!(await_response(h2.send_request(request)).await.status(), 200);
            assert_eq!(client_cert_of(&upstream.last_request()), expected, "{file}");
        }
    }
    let mut without = connect_tls_http1(&ca, &proxy).await;
    assert_eq!(without.request(FORGED_REQUEST).await.status, 200);
    assert_eq!(client_cert_of(&upstream.last_request()), ["", ""]);
    // A reload turns the fields off for new connections.
    proxy.write_config(&tls_config(&ca, "client_auth = 'optional'"));
    proxy.send_sighup();
    proxy.wait_for_message("TLS settings changed", 0).await;
    let client = TlsClient::with_certificate(&ca, &middle, "chain");
    let mut client = client.connect_http1(proxy.address, "a.example").await;
    assert_eq!(client.request(FORGED_REQUEST).await.status, 200);
    assert_eq!(client_cert_of(&upstream.last_request()), ["", ""]);
}

/// The field repeats with each request, and the client chooses its length.
#[tokio::test]
async fn a_long_chain_is_left_out() {
    let (ca, upstream) = (
        CertificateAuthority::with_certificate(),
        Upstream::echo().await,
    );
    let on = "client_auth = 'optional'\nclient_cert_header = true";
    let proxy = Proxy::start(&tls_config(&ca, on), upstream.address).await;
    ca.sign("ann", "ann.example");
    // Each has the name of the authority, as subject and as issuer.
    let other = CertificateAuthority::new();
    let mut chain = vec![(&other, "ca.pem"); 60];
    chain.insert(0, (&ca, "ann.pem"));
    write_chain(&ca, "long", &chain);
    fs::copy(ca.path("ann.key"), ca.path("long.key")).unwrap();
    let client = TlsClient::with_certificate(&ca, &ca, "long");
    let mut client = client.connect_http1(proxy.address, "a.example").await;
    assert_eq!(client.request(GET_REQUEST).await.status, 200);
    let [certificate, chain] = client_cert_of(&upstream.last_request());
    assert_eq!(certificate, byte_sequences(&ca, "ann.pem")[0]);
    assert_eq!(chain, "");
}

#[tokio::test]
async fn a_clients_own_fields_never_reach_the_app() {
    let policy =
        "[[policy]]\nname = 'p'\nmatch = { headers = { client-cert = 'x' } }\naction = 'deny'\n";
    for trusted in ["", "client.trusted_proxies = ['127.0.0.1']\n"] {
        let upstream =
            RawUpstream::with_response("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
        let proxy = Proxy::start(&format!("{trusted}{policy}"), upstream.address).await;
        for (head, status) in [
            (
                "GET / HTTP/1.1\r\nClient-Cert: x\r\nClient-Cert-Chain: x, y\r\n",
                200,
            ),
            (
                "GET / HTTP/1.1\r\nCLIENT-CERT: x\r\nclient-cert: x\r\n",
                200,
            ),
            ("GET / HTTP/1.0\r\nClient-Cert-Chain: x\r\n", 200),
            ("GET / HTTP/1.1\r\nClient_Cert: x\r\n", 400),
            ("GET / HTTP/1.1\r\nClient-Cert_Chain: x\r\n", 400),
            ("GET / HTTP/1.1\r\nclient.cert: x\r\n", 400),
            (
                "GET / HTTP/1.1\r\nConnection: client-cert\r\nClient-Cert: x\r\n",
                400,
            ),
            (
                "GET / HTTP/1.1\r\nConnection: close, Client-Cert-Chain\r\n",
                400,
            ),
            (
                "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTrailer: Client-Cert\r\n",
                400,
            ),
            (
                "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTrailer: client_cert_chain\r\n",
                400,
            ),
        ] {
            let mut client = RawClient::connect(proxy.address).await;
            let body = match head.contains("chunked") {
                true => "0\r\nx-sum: 1\r\nClient-Cert: x\r\nClient_Cert_Chain: x\r\n\r\n",
                false => "",
            };
            client
                .send(format!("{head}Host: a.example\r\n\r\n{body}"))
                .await;
            let response = client.read_response().await;
            assert_eq!(response.status, status, "{trusted}{head}");
        }
        let received = String::from_utf8(upstream.received_bytes()).unwrap();
        assert!(
            !received
                .to_ascii_lowercase()
                .replace('_', "-")
                .contains("client-cert"),
            "{received}"
        );
    }
}

/// Trailers that the client has not declared are not forwarded.
#[tokio::test]
async fn trailers_state_no_certificate() {
    let upstream = Upstream::with_handler(|request: Request<Incoming>| async move {
        let body = request.into_body().collect().await.unwrap();
        let names = body
            .trailers()
            .into_iter()
            .flat_map(|trailers| trailers.keys());
        let names: Vec<_> = names.map(ToString::to_string).collect();
        Response::new(full_body(names.join(" ")))
    })
    .await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = RawClient::connect(proxy.address).await;
    let request = "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\
                   Trailer: x-sum\r\n\r\n0\r\nx-sum: 1\r\nClient-Cert: x\r\nClient_Cert_Chain: x\r\n\r\n";
    let response = client.request(request).await;
    assert_eq!((response.status, response.text().as_str()), (200, "x-sum"));
}

/// A gateway that ends TLS itself sets the fields, as `client.trusted_headers` states.
#[tokio::test]
async fn a_trusted_gateway_may_state_the_certificate() {
    let (ca, upstream) = (
        CertificateAuthority::with_certificate(),
        Upstream::echo().await,
    );
    ca.sign("gateway", "gateway.example");
    let gateway = byte_sequences(&ca, "gateway.pem").remove(0);
    for (trusted, named, of_gateway, of_plain) in [
        (
            "127.0.0.1",
            "['client-cert']",
            [":Zm9yZ2Vk: + :Zm9yZ2Vk:", ""],
            ["", ""],
        ),
        ("127.0.0.1", "['x-plan']", [&*gateway, ""], [&*gateway, ""]),
        (
            "10.0.0.0/8",
            "['client-cert']",
            [&*gateway, ""],
            [&*gateway, ""],
        ),
    ] {
        let config = format!(
            "[client]\ntrusted_proxies = ['{trusted}']\ntrusted_headers = {named}\n{}",
            tls_config(&ca, "client_auth = 'require'\nclient_cert_header = true")
        );
        let proxy = Proxy::start(&config, upstream.address).await;
        let client = TlsClient::with_certificate(&ca, &ca, "gateway");
        let mut client = client.connect_http1(proxy.address, "a.example").await;
        for (request, expected) in [(FORGED_REQUEST, of_gateway), (GET_REQUEST, of_plain)] {
            assert_eq!(client.request(request).await.status, 200);
            let seen = client_cert_of(&upstream.last_request());
            assert_eq!(seen, expected, "{trusted} {named} {request}");
        }
    }
}

/// Policies that the check listener applies do not see the client's fields either.
#[tokio::test]
async fn checks_ignore_the_fields() {
    let config = "[check]\naddress = '127.0.0.1:0'\n[[policy]]\nname = 'p'\n\
                  match = { headers = { client-cert = 'x' } }\naction = 'deny'\n";
    let proxy = Proxy::setup(config).start().await;
    let at = proxy.logged_address("check listening").unwrap();
    let check = |name: &str| {
        let request = ClientRequest::new(at, "GET", "/check/nginx");
        request
            .header("Host", "shop.example")
            .header("X-Original-Method", "GET")
            .header("X-Original-URI", "/")
            .header(name, "x")
    };
    assert_eq!(check("Client-Cert").send_for_status().await, 200);
    assert_eq!(check("Client_Cert").send_for_status().await, 400);
}

#[tokio::test]
async fn settings_without_effect_are_warnings() {
    let ca = CertificateAuthority::with_certificate();
    let [cert, key] = ["a.pem", "a.key"].map(|file| ca.path_string(file));
    let tls = format!("cert = {cert:?}\nkey = {key:?}\nclient_cert_header = true\n");
    for (config, warning) in [
        (format!("[listen.tls]\n{tls}"), "client_cert_header: without effect: client_auth is"),
        (format!("[check.tls]\n{tls}"), "without effect: only [listen] forwards requests"),
        (
            format!("[listen]\nforwarded_proto = 'https'\n[listen.tls]\n{}", tls.replace("true", "false")),
            "forwarded_proto: without effect: with [listen.tls], all clients use https",
        ),
        (
            "[[policy]]\nname = 'p'\nkey = ['header:client-cert']\nlimit = { requests = 1, per = '1s' }\n".to_owned(),
            "never present: tidegate removes this header",
        ),
    ] {
        let checked = run_check(&config).await;
        assert!(checked.status.code() == Some(0), "{config}: {checked:?}");
        assert!(checked.stderr.contains(warning), "{config}: {checked:?}");
    }
    let checked = run_check("listen.forwarded_proto = 'http'\n").await;
    assert!(
        checked.status.code() == Some(1)
            && checked.stderr.contains("expected \"auto\" or \"https\""),
        "{checked:?}"
    );
}

/// A version 2 header from 192.0.2.1 with these extensions.
fn v2_header(command: u8, family: u8, extensions: &[u8]) -> Vec<u8> {
    let addresses: &[u8] = match family {
        0 => &[],
        0x31 => &[7; 216],
        _ => b"\xc0\0\x02\x01\xc6\x33\x64\x01\xdc\x04\x01\xbb",
    };
    let len = u16::try_from(addresses.len() + extensions.len()).unwrap();
    let fixed = [command, family, len.to_be_bytes()[0], len.to_be_bytes()[1]];
    [
        b"\r\n\r\n\0\r\nQUIT\n".as_slice(),
        &fixed,
        addresses,
        extensions,
    ]
    .concat()
}

#[tokio::test]
async fn the_proxy_header_states_whether_the_client_uses_tls() {
    let upstream = Upstream::echo().await;
    let config = |proto: &str| {
        format!(
            "[listen]\nproxy_protocol = 'require'\nproxy_protocol_from = ['127.0.0.1/32']\nforwarded_proto = '{proto}'\n"
        )
    };
    let (auto, constant) = (config("auto"), config("https"));
    let auto = Proxy::start(&auto, upstream.address).await;
    let constant = Proxy::start(&constant, upstream.address).await;
    // PP2_CLIENT_SSL, a verified certificate, and the subtype with the version of TLS.
    let tls = b"\x20\0\x0f\x07\0\0\0\0\x21\0\x07TLSv1.3";
    let no_tls = b"\x20\0\x05\x00\0\0\0\x01";
    let certificate_only = b"\x20\0\x05\x06\0\0\0\0";
    let others_first = [b"\x01\0\x02h2".as_slice(), tls, b"\x04\0\0"].concat();
    for (header, expected, expected_constant) in [
        (v2_header(0x21, 0x11, tls), "https", "https"),
        (v2_header(0x21, 0x11, &others_first), "https", "https"),
        (v2_header(0x21, 0x00, tls), "https", "https"),
        (v2_header(0x21, 0x31, tls), "https", "https"),
        (v2_header(0x21, 0x11, no_tls), "http", "http"),
        (v2_header(0x21, 0x11, certificate_only), "http", "http"),
        (v2_header(0x21, 0x11, b""), "http", "https"),
        // The block of LOCAL is ignored, and that of an unknown family may be anything.
        (v2_header(0x20, 0x11, tls), "http", "https"),
        (v2_header(0x21, 0x00, b"\x20\0\x05\x01\0"), "http", "https"),
        (
            b"PROXY TCP4 192.0.2.1 198.51.100.1 1 2\r\n".to_vec(),
            "http",
            "https",
        ),
        (b"PROXY UNKNOWN\r\n".to_vec(), "http", "https"),
    ] {
        for (proxy, expected) in [(&auto, expected), (&constant, expected_constant)] {
            let mut client = proxy.send_raw(&header).await;
            client.send("GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-Proto: ftp\r\nForwarded: proto=ftp\r\n\r\n").await;
            assert_eq!(client.read_response().await.status, 200, "{header:?}");
            let seen = upstream.last_request();
            assert_eq!(
                seen.single_header("x-forwarded-proto"),
                expected,
                "{header:?}"
            );
            let forwarded = seen.single_header("forwarded");
            assert_ends(forwarded, format!(";proto={expected}"));
        }
    }
    let mut client =
        RawClient::connect_and_send(auto.address, v2_header(0x21, 0x11, b"\x20\0\x04\x01\0\0\0"))
            .await;
    assert_eq!(client.send(GET_REQUEST).await.read_to_close().await, b"");
}

/// Also without the PROXY protocol: a load balancer may end TLS and forward TCP.
#[tokio::test]
async fn a_constant_protocol_applies_to_cleartext_connections() {
    let upstream = Upstream::echo().await;
    let config = "listen.forwarded_proto = 'https'\nclient.trusted_proxies = ['127.0.0.1']\n";
    let proxy = Proxy::start(config, upstream.address).await;
    assert_eq!(proxy.get("/").await.status, 200);
    upstream
        .last_request()
        .expect_header("x-forwarded-proto", "https");
    // A trusted proxy knows better.
    let request = proxy
        .request("GET", "/")
        .header("X-Forwarded-Proto", "http");
    assert_eq!(request.send_for_status().await, 200);
    upstream
        .last_request()
        .expect_header("x-forwarded-proto", "http");
}
