//! The ext_authz listener: requests in the formats of nginx, Traefik and Envoy, and by nginx
//! itself. `tests/envoy.sh` runs Traefik and Envoy.

use super::documentation::{CodeBlock, read_code_blocks};
use crate::support::nginx::Nginx;
use crate::support::prelude::*;
use tokio::net::UnixStream;

const CHECK_LISTENER: &str =
    "client.trusted_proxies = ['127.0.0.1']\n[check]\naddress = '127.0.0.1:0'\n";

const API_POLICY: &str = "[[policy]]
name = 'api'
match = { methods = ['POST'], hosts = ['shop.example'], path = '/api/**' }
key = ['client_ip']
limit = { requests = 2, per = '1h' }\n";

async fn start_check_listener(config: &str) -> (Proxy, SocketAddr) {
    let proxy = Proxy::setup(config).start().await;
    let check = proxy
        .logged_address("check listening")
        .expect("the listener logs its address");
    (proxy, check)
}

fn traefik_request(at: SocketAddr, method: &str, target: &str) -> ClientRequest {
    ClientRequest::new(at, "GET", "/check/traefik")
        .header("Host", "tidegate:8082")
        .header("X-Forwarded-Method", method)
        .header("X-Forwarded-Proto", "https")
        .header("X-Forwarded-Host", "Shop.Example:443")
        .header("X-Forwarded-Uri", target)
        .header("X-Forwarded-For", "10.1.1.1")
}

fn nginx_request(at: SocketAddr, method: &str, target: &str) -> ClientRequest {
    ClientRequest::new(at, "GET", "/check/nginx")
        .header("Host", "shop.example")
        .header("X-Original-Method", method)
        .header("X-Original-URI", target)
        .header("X-Forwarded-For", "10.1.1.1")
}

fn envoy_request(at: SocketAddr, method: &str, target: &str) -> ClientRequest {
    ClientRequest::new(at, method, &format!("/check/envoy{target}"))
        .header("Host", "shop.example")
        .header("Content-Length", "0")
        .header("X-Forwarded-For", "10.1.1.1")
}

#[tokio::test]
async fn each_proxy_describes_the_request_in_its_own_format() {
    for question in [traefik_request, nginx_request, envoy_request] {
        let (proxy, at) = start_check_listener(&format!("{CHECK_LISTENER}{API_POLICY}")).await;
        let passes = question(at, "POST", "/api/x?y=1").send().await;
        assert_eq!(passes.status, 200, "{passes:?}");
        assert_eq!(passes.text().as_str(), "", "{passes:?}");
        assert!(
            header_or_empty(&passes, "ratelimit").starts_with("\"api\";r=1;t="),
            "{passes:?}"
        );
        question(at, "POST", "/x/..//api/%78")
            .expect_status(200)
            .await;
        for spelling in [
            "/api/x",
            "/API/../api/x",
            "/%61pi/",
            "/api",
            "/x/%2e%2e/api/y",
            "/x%2f..%2fapi%2fy",
        ] {
            let refused = question(at, "POST", spelling).send().await;
            assert_eq!(
                (
                    refused.status,
                    header_or_empty(&refused, "x-tidegate-status")
                ),
                (429, "429"),
                "{spelling}"
            );
            assert!(
                !header_or_empty(&refused, "retry-after").is_empty(),
                "{refused:?}"
            );
        }
        for (method, target) in [("GET", "/api/x"), ("POST", "/other"), ("PUT", "/api")] {
            let status = question(at, method, target).send().await.status;
            assert_eq!(status, 200, "{method} {target}");
        }
        // The calling proxy and this proxy share the quota.
        let request = proxy.request("POST", "/api/x");
        let proxied = request.header("Host", "shop.example");
        proxied
            .header("X-Forwarded-For", "10.1.1.1")
            .expect_status(429)
            .await;
    }
}

/// Each calling proxy forwards client headers that are named like another proxy's own headers.
#[tokio::test]
async fn the_calling_proxy_is_determined_by_the_path_and_not_by_headers() {
    let (_proxy, at) = start_check_listener(&format!("{CHECK_LISTENER}{API_POLICY}")).await;
    let statuses = |asks: Vec<ClientRequest>| async {
        let mut statuses = Vec::new();
        for ask in asks {
            statuses.push(ask.send().await.status);
        }
        statuses
    };
    let forged = |ask: ClientRequest| {
        ask.header("X-Original-URI", "/free")
            .header("X-Original-Method", "GET")
    };
    let asks = (0..3).map(|_| forged(traefik_request(at, "POST", "/api/x")));
    assert_eq!(statuses(asks.collect()).await, [200, 200, 429]);
    let forged = |ask: ClientRequest| {
        ask.header("X-Forwarded-Uri", "/free")
            .header("X-Forwarded-Method", "GET")
    };
    let answers = statuses(vec![forged(nginx_request(at, "POST", "/api/x"))]).await;
    assert_eq!(answers, [429]);
    let answers = statuses(vec![forged(envoy_request(at, "POST", "/api/x"))]).await;
    assert_eq!(answers, [429]);
    // A header that occurs twice counts as absent.
    assert_eq!(
        statuses(vec![
            nginx_request(at, "POST", "/api/x").header("X-Original-URI", "/free")
        ])
        .await,
        [400]
    );
}

#[tokio::test]
async fn an_incomplete_check_request_is_rejected() {
    let (proxy, at) = start_check_listener(&format!(
        "{CHECK_LISTENER}refused_status = 403\n{API_POLICY}"
    ))
    .await;
    let ask = |path: &str| ClientRequest::new(at, "GET", path).header("Host", "shop.example");
    let bare = ask("/check/nginx").send().await;
    assert_eq!(
        (bare.status, bare.text().as_str()),
        (
            400,
            "the header x-original-uri must be present exactly once\n"
        )
    );
    ask("/check/nginx")
        .header("X-Original-URI", "/")
        .expect_status(400)
        .await;
    assert_eq!(ask("/check/traefik").send().await.status, 400);
    for path in [
        "/",
        "/check",
        "/check/",
        "/check/other",
        "/check/envoy",
        "/check/envoyapi",
        "/api/x",
    ] {
        assert_eq!(ask(path).send().await.status, 404, "{path}");
    }
    let hints = |line: &LogLine| {
        line.is_level("WARN") && line.message_starts_with("authorization request rejected")
    };
    let hint = proxy.wait_for_log("the hint", 0, TEST_TIMEOUT, hints).await;
    assert_eq!(
        hint.field("unclear"),
        "the header x-original-uri must be present exactly once"
    );
    assert_eq!(
        proxy.log_since(0).iter().filter(|line| hints(line)).count(),
        1,
        "once"
    );
    // An invalid client request gets the refusal status, which the calling proxy understands.
    for (method, target) in [
        ("post", "/api"),
        ("CONNECT", "/"),
        ("GET", "no-path"),
        ("GET", "/%00"),
        ("GET", "/api x"),
        ("GET", "/free#/../api"),
    ] {
        let refused = nginx_request(at, method, target).send().await;
        assert_eq!(refused.status, 403, "{method} {target}: {refused:?}");
        assert!(
            ["400", "405"].contains(&header_or_empty(&refused, "x-tidegate-status")),
            "{refused:?}"
        );
    }
}

/// gRPC denials have status 200, which the calling proxy would take for permission.
#[tokio::test]
async fn a_grpc_request_is_denied_with_an_http_error_status() {
    for question in [traefik_request, nginx_request, envoy_request] {
        let (_proxy, at) = start_check_listener(&format!("{CHECK_LISTENER}{API_POLICY}")).await;
        for kind in ["application/grpc", "Application/grpc-web+proto"] {
            let asks = async || {
                question(at, "POST", "/api/x")
                    .header("Content-Type", kind)
                    .send()
                    .await
            };
            if kind == "application/grpc" {
                assert_eq!((asks().await.status, asks().await.status), (200, 200));
            }
            let refused = asks().await;
            assert_eq!(
                (
                    refused.status,
                    header_or_empty(&refused, "x-tidegate-status")
                ),
                (429, "429"),
                "{refused:?}"
            );
            assert_eq!(refused.json()["status"], 429);
            // Also for denials by request validation.
            let odd = question(at, "post", "/api/x")
                .header("Content-Type", kind)
                .send()
                .await;
            assert_eq!(odd.status, 400, "{odd:?}");
        }
    }
}

/// A request head with too many headers gets its 431 before any policy. nginx would turn it into
/// 500.
#[tokio::test]
async fn an_unreadable_head_gets_the_refused_status() {
    let ask = |at| {
        let crowded = (0..101)
            .map(|n| format!("x-{n}: 1\r\n"))
            .collect::<String>();
        async move {
            let text = format!("GET /check/nginx HTTP/1.1\r\nHost: a\r\n{crowded}\r\n");
            let mut client = RawClient::connect_and_send(at, text).await;
            String::from_utf8(client.read_to_close().await).unwrap()
        }
    };
    let (_proxy, at) = start_check_listener(CHECK_LISTENER).await;
    let reply = ask(at).await;
    assert!(reply.starts_with("HTTP/1.1 431 "), "{reply}");
    let (proxy, at) =
        start_check_listener(&format!("{CHECK_LISTENER}refused_status = 403\n")).await;
    let reply = ask(at).await;
    assert!(reply.starts_with("HTTP/1.1 403 "), "{reply}");
    assert!(reply.contains("x-tidegate-status: 431\r\n"), "{reply}");
    // The proxy's own listener keeps its status.
    let reply = ask(proxy.address).await;
    assert!(reply.starts_with("HTTP/1.1 431 "), "{reply}");
}

/// Envoy joins the lines of a repeated header for the check and forwards both to the app.
#[tokio::test]
async fn a_key_header_that_may_be_joined_is_rejected_unless_allowed() {
    let by_header = "[[policy]]
name = 'user'
match = { path = '/api/**' }
key = ['header:x-user-id']
limit = { requests = 1, per = '1h' }
[[policy]]
name = 'free'
match = { path = '/free', headers = { x-plan = 'free' } }
limit = { requests = 1, per = '1h' }\n";
    let (proxy, at) = start_check_listener(&format!("{CHECK_LISTENER}{by_header}")).await;
    for question in [envoy_request, traefik_request, nginx_request] {
        for value in ["ann,bob", "ann, bob", "ann,", ","] {
            let reply = question(at, "GET", "/api/x").header("X-User-Id", value);
            let reply = reply.send().await;
            assert_eq!(reply.status, 400, "{value}: {reply:?}");
            assert!(reply.text().contains("check.joined_headers"), "{reply:?}");
        }
    }
    // A condition on a header reads each part, as it reads each line.
    let free = |plan: &str| envoy_request(at, "GET", "/free").header("X-Plan", plan);
    assert_eq!(free("free").send().await.status, 200);
    assert_eq!(free("free,pro").send().await.status, 429);
    assert_eq!(free("pro").send().await.status, 200);
    // A proxied request has the lines that the client sent.
    let ask = || {
        proxy
            .request("GET", "/api/x")
            .header("X-User-Id", "ann,bob")
    };
    assert_ne!(ask().send().await.status, 400);

    let (_proxy, at) = start_check_listener(&format!(
        "{CHECK_LISTENER}joined_headers = 'allow'\n{by_header}"
    ))
    .await;
    let ask = || envoy_request(at, "GET", "/api/x").header("X-User-Id", "ann,bob");
    assert_eq!(ask().send().await.status, 200);
    assert_eq!(ask().send().await.status, 429);
}

/// As at the main listener. A proxy that removes the header would hide it from the app only.
#[tokio::test]
async fn a_connection_header_that_lists_a_header_of_a_policy_is_rejected() {
    let config = format!(
        "client.trusted_headers = ['x-plan']
{CHECK_LISTENER}[[policy]]
name = 'free'
match = {{ headers = {{ x-plan = 'free' }} }}
action = 'deny'\n"
    );
    let (proxy, at) = start_check_listener(&config).await;
    for question in [envoy_request, traefik_request, nginx_request] {
        for (connection, status) in [
            ("x-plan", 400),
            ("close, X-Plan", 400),
            ("authorization", 400),
            ("x-other, close", 200),
            ("upgrade", 200),
            ("keep-alive", 200),
        ] {
            let request = question(at, "GET", "/a").header("X-Plan", "gold");
            let reply = request.header("Connection", connection).send().await;
            assert_eq!(reply.status, status, "{connection}: {reply:?}");
        }
    }
    let listed = proxy.request("GET", "/a").header("X-Plan", "gold");
    listed
        .header("Connection", "x-plan")
        .expect_status(400)
        .await;
}

/// Envoy takes a 5xx status for a failed call, and `failure_mode_allow` then lets the request pass.
#[tokio::test]
async fn envoy_never_gets_a_denial_with_a_5xx_status() {
    let away = "[store]\nkind = 'redis'\n[store.redis]\nurl = 'redis://127.0.0.1:1/0'\nkey_prefix = 'x'\nconnect_timeout = '100ms'\n";
    let closed = format!("{API_POLICY}on_store_failure = 'closed'\n");
    let sold = "[[policy]]\nname = 'sold'\nmatch = { path = '/sold' }\naction = 'deny'\nreject = { status = 503, body = 'sold out' }\n";
    let (_proxy, at) = start_check_listener(&format!("{CHECK_LISTENER}{closed}{sold}{away}")).await;
    for (question, status) in [
        (envoy_request as fn(_, &str, &str) -> ClientRequest, 429),
        (traefik_request, 503),
        (nginx_request, 503),
    ] {
        let refused = question(at, "POST", "/api/x").send().await;
        assert_eq!(
            (
                refused.status,
                header_or_empty(&refused, "x-tidegate-status")
            ),
            (status, "503"),
            "{refused:?}"
        );
        assert_eq!(header_or_empty(&refused, "retry-after"), "1");
        assert_eq!(refused.json()["status"], 503);
        let denied = question(at, "GET", "/sold").send().await;
        assert_eq!(denied.status, status);
        assert_eq!(header_or_empty(&denied, "x-tidegate-status"), "503");
        assert_eq!(denied.text(), "sold out");
    }
    let (_proxy, at) = start_check_listener(&format!(
        "{CHECK_LISTENER}refused_status = 403\n{closed}{away}"
    ))
    .await;
    assert_eq!(envoy_request(at, "POST", "/api/x").send().await.status, 403);
}

#[tokio::test]
async fn a_check_request_has_exactly_one_host() {
    let (_proxy, at) = start_check_listener(&format!("{CHECK_LISTENER}{API_POLICY}")).await;
    let ask =
        |target: &str, host: &str| ClientRequest::new(at, "POST", target).header("Host", host);
    let other = ask("http://shop.example/check/envoy/api/x", "other.example")
        .send()
        .await;
    assert_eq!(
        (other.status, other.text().as_str()),
        (
            400,
            "the header host differs from the host of the request target\n"
        )
    );
    let same = ask("http://shop.example/check/envoy/api/x", "Shop.Example")
        .send()
        .await;
    assert!(
        same.status == 200 && header_or_empty(&same, "ratelimit").contains("r=1"),
        "{same:?}"
    );
    let twice = ask("/check/envoy/api/x", "shop.example")
        .header("Host", "other.example")
        .send()
        .await;
    assert_eq!(twice.status, 400);
    // Traefik addresses the check request to this listener, and sends the client's host in a
    // header.
    let asked = traefik_request(at, "POST", "/api/x").send().await;
    assert!(
        asked.status == 200 && header_or_empty(&asked, "ratelimit").contains("r=1"),
        "{asked:?}"
    );
}

/// The calling proxy's certificate authenticates the call. It says nothing about the client.
#[tokio::test]
async fn the_certificate_of_the_calling_proxy_is_not_the_certificate_of_the_client() {
    let ca = CertificateAuthority::new();
    ca.sign("check", "check.internal");
    ca.sign("front", "front");
    let of_check = format!(
        "cert = {:?}, key = {:?}",
        ca.path_string("check.pem"),
        ca.path_string("check.key")
    );
    let asks = format!(
        "client_ca = {:?}, client_auth = 'require'",
        ca.path_string("ca.pem")
    );
    let policy = "[[policy]]\nname = 'cn'\nkey = ['client_cert:cn']\nmissing_key = 'skip'\nlimit = { requests = 1, per = '1h' }\n";
    let (_proxy, at) = start_check_listener(&format!(
        "{CHECK_LISTENER}tls = {{ {of_check}, {asks} }}\n{policy}{API_POLICY}"
    ))
    .await;
    let front = TlsClient::with_certificate(&ca, &ca, "front");
    let mut client = front.connect_http1(at, "check.internal").await;
    let question = "GET /check/nginx HTTP/1.1\r\nHost: shop.example\r\nX-Original-Method: POST\r\nX-Original-URI: /api/x\r\n\r\n";
    let mut statuses = Vec::new();
    for _ in 0..3 {
        statuses.push(client.request(question).await.status);
    }
    assert_eq!(
        statuses,
        [200, 200, 429],
        "limited by the client, not by the caller's certificate"
    );
    let stranger = TlsClient::new(&ca).connect(at, "check.internal").await;
    if let Ok(stranger) = stranger {
        let mut stranger = RawClient::from_stream(stranger);
        stranger.send(question).await;
        assert_eq!(stranger.read_first_bytes().await, Vec::<u8>::new());
    }
    let in_the_clear = RawClient::connect_and_send(at, question)
        .await
        .read_to_close()
        .await;
    assert!(!in_the_clear.starts_with(b"HTTP/"), "{in_the_clear:?}");
}

#[tokio::test]
async fn check_requests_are_accepted_on_a_unix_socket() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("check.sock");
    let config = format!(
        "admin = {{ address = '127.0.0.1:0' }}\n{}{API_POLICY}",
        CHECK_LISTENER.replace("127.0.0.1:0", &format!("unix:{}", socket.display()))
    );
    let file = ConfigFile::new(&config);
    let process = file.start(&[]);
    process.wait_for_text("\"listening\"").await;
    let ask = async |client: &str| {
        let question = format!(
            "POST /check/envoy/api/x HTTP/1.1\r\nHost: shop.example\r\nContent-Length: 0\r\nX-Forwarded-For: {client}\r\n\r\n"
        );
        let mut asker = RawClient::from_stream(UnixStream::connect(&socket).await.unwrap());
        asker.request(question).await.status
    };
    // A local process may name client addresses, as 127.0.0.1 may.
    assert_eq!(
        [
            ask("10.1.1.1").await,
            ask("10.1.1.1").await,
            ask("10.1.1.1").await
        ],
        [200, 200, 429]
    );
    assert_eq!(ask("10.1.1.2").await, 200);
}

/// Returns an empty string if the header is absent.
fn header_or_empty<'r>(reply: &'r RawResponse, header: &str) -> &'r str {
    reply.header(header).unwrap_or_default()
}

async fn get_through_nginx(nginx: &Nginx, path: &str) -> RawResponse {
    ClientRequest::new(nginx.address, "GET", path).send().await
}

/// nginx with the configuration from `docs/ENVOY.md`. A busy machine may need longer for an answer.
async fn start_nginx_from_page(page: &[CodeBlock], check: SocketAddr, app: SocketAddr) -> Nginx {
    let server = page
        .iter()
        .find(|block| block.language == "nginx" && block.text.contains("auth_request"));
    let server = server.expect("the page has this code block");
    let server = server
        .text
        .replace("127.0.0.1:8082", &check.to_string())
        .replace("127.0.0.1:3000", &app.to_string())
        .replace("_timeout 100ms", "_timeout 1s");
    Nginx::start_with_config("", &server).await
}

/// A check that is stopped or hung lets requests pass, and the app's own errors stay.
#[tokio::test]
async fn nginx_forwards_requests_while_the_check_gives_no_answer() {
    let page = read_code_blocks("docs/ENVOY.md");
    let app = Upstream::echo().await;
    let config = "[check]\naddress = '127.0.0.1:0'\nrefused_status = 403\n[[policy]]\nname = 'one'\nlimit = { requests = 1, per = '1h' }\n";
    let proxy = Proxy::start(config, app.address).await;
    let check = proxy.logged_address("check listening").unwrap();
    let nginx = start_nginx_from_page(&page, check, app.address).await;
    let post = async |target: &str| {
        let request = ClientRequest::new(nginx.address, "POST", target).body("a body");
        request.send().await
    };
    assert_eq!(post("/a").await.status, 200);
    assert_eq!(post("/a").await.status, 429);

    proxy.pause();
    let began = Instant::now();
    let reply = post("/hung?x=1").await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_faster_than(Duration::from_secs(5), began);
    drop(proxy);
    let reply = post("/stopped").await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let seen: Vec<_> = app
        .requests()
        .iter()
        .map(|request| format!("{} {}", request.method, request.target))
        .collect();
    assert_eq!(seen, ["POST /a", "POST /hung?x=1", "POST /stopped"]);
}

/// The configuration from `docs/ENVOY.md`.
#[tokio::test]
async fn nginx_auth_request_enforces_the_decisions() {
    let page = read_code_blocks("docs/ENVOY.md");
    let text = |language: &str, word: &str| {
        let found = page
            .iter()
            .find(|block| block.language == language && block.text.contains(word));
        found.expect("the page has this code block").text.clone()
    };
    let config = text("toml", "[check]").replace("127.0.0.1:8082", "127.0.0.1:0");
    let denied = "[[policy]]\nname = 'no'\nmatch = { path = '/api/no' }\naction = 'deny'\n[[policy]]\nname = 'host'\nmatch = { hosts = ['secret.example'] }\naction = 'deny'\n";
    let app = Upstream::echo().await;
    let config = format!("{config}\n{denied}");
    let proxy = Proxy::start(&config, app.address).await;
    let check = proxy.logged_address("check listening").unwrap();
    let nginx = start_nginx_from_page(&page, check, app.address).await;
    for left in (0..10).rev() {
        let passes = get_through_nginx(&nginx, "/api/x").await;
        assert_eq!(passes.status, 200, "{passes:?}");
        assert!(
            header_or_empty(&passes, "ratelimit").contains(&format!("r={left}")),
            "{passes:?}"
        );
    }
    let forged = |name: &str, value: &str| {
        ClientRequest::new(nginx.address, "GET", "/api/x").header(name, value)
    };
    for ask in [
        forged("X-Original-URI", "/free"),
        forged("X-Forwarded-Uri", "/free"),
        forged("X-Original-Method", "HEAD"),
        forged("X-Forwarded-For", "10.9.9.9"),
        forged("Content-Type", "application/grpc"),
        ClientRequest::new(nginx.address, "GET", "/free/../api/x"),
        ClientRequest::new(nginx.address, "GET", "/api%2fx"),
        ClientRequest::new(nginx.address, "POST", "/api/x").body("some"),
    ] {
        let refused = ask.send().await;
        assert_eq!(refused.status, 429, "{refused:?}");
        assert!(!header_or_empty(&refused, "retry-after").is_empty());
        assert!(header_or_empty(&refused, "ratelimit").contains("r=0"));
    }
    assert_eq!(get_through_nginx(&nginx, "/api/no").await.status, 403);
    assert_eq!(get_through_nginx(&nginx, "/free").await.status, 200);
    // nginx accepts this target, but it is invalid here. The client gets a 400, not a 500.
    assert_eq!(get_through_nginx(&nginx, "/free#/../api").await.status, 400);
    // nginx takes the host from the request target, if it has one.
    let whole = ClientRequest::new(nginx.address, "GET", "http://secret.example/free")
        .header("Host", "shop.example");
    assert_eq!(whole.send().await.status, 403);
    assert!(
        app.requests()
            .iter()
            .all(|request| !request.target.contains("check"))
    );
}
