//! Trap 24: policies must match the path that the upstream serves.

use crate::support::prelude::*;

const GUARD_POLICY: &str = r#"
[[policy]]
name = "guard"
match = { path = ["/admin/**", "/exact", "/one/{word}"] }
action = "deny"
"#;

/// The response status of each target. 403 means that the guard policy matched.
async fn get_statuses<'a>(path_settings: &str, targets: &[&'a str]) -> Vec<(&'a str, u16)> {
    let proxy = Proxy::with_echo(&format!("[path]\n{path_settings}\n{GUARD_POLICY}")).await;
    let mut statuses = Vec::new();
    for target in targets {
        statuses.push((*target, proxy.get(target).await.status));
    }
    statuses
}

#[tokio::test]
async fn trap_24_no_path_spelling_bypasses_a_policy() {
    let targets = [
        "/admin",
        "/admin/",
        "/admin/x",
        "//admin/x",
        "/admin//x",
        "/./admin/x",
        "/a/../admin/x",
        "/a/b/../../admin",
        "/../admin/x",
        "/%61dmin/x",
        "/%61%64%6D%69%6e/x",
        "/%2e/admin/x",
        "/a/%2e%2E/admin/x",
        "/a/.%2e/admin/x",
        "/admin%2Fx",
        "/admin%2fx",
        "/%2Fadmin/x",
        "/a%2F..%2Fadmin/x",
        "/a/..%2Fadmin/x",
        "/admin%5Cx",
        "/admin;v=1/x",
        "/admin;/x",
        "/;x=1/admin/x",
        "/.;x/admin/y",
        "/a/..;/admin/x",
        // Spellings resolved by WHATWG URL parsers, by routers without path parameters, and by
        // Tomcat.
        "/admin/..;/x",
        "/admin/..;a=b/x",
        "/admin/%2e%2e;/x",
        "/admin/.;/x",
        "/admin//../x",
        "/admin/;x/../y",
        "/.%2e;x=y/admin/z",
        "/a;%2f..%2fadmin/x",
        "/a/%2e%2e%2fadmin/x",
        "/a%5c..%5cadmin/y",
        "/a\\..\\admin/y",
        "/admin/x%2f..%2f..%2fy",
        // Spellings that matter to apps that route by the unnormalized path.
        "/admin/../x",
        "/admin/x/../../y",
        "/admin/..",
        "/admin/%2e%2e/x",
        "/admin;x/../y",
        "/one/;word",
        "/one/.",
        // Encoded slashes and backslashes: each server decodes one or both kinds.
        "/admin%2Fx%5C..%5C..%5C..",
        "/admin%5Cx%2F..%2F..%2F..",
        "/admin%2Fx\\..\\..",
        "/admin?x=1",
        "/admin/x?/../../other",
        "/exact",
        "/exact/",
        "/exact;x",
        "/exac%74",
    ];
    for (target, status) in get_statuses("", &targets).await {
        assert_eq!(status, 403, "{target} bypassed the guard policy");
    }
}

#[tokio::test]
async fn trap_24_other_paths_do_not_match_the_policy() {
    let targets = [
        "/",
        "/administrator",
        "/ADMIN/x",
        "/x/admin",
        "/%2561dmin/x",
        "/exact/x",
        "/a/admin/../x",
        "/one/two/../three/four",
        "/one/two/three;x",
        "/x?/admin/x",
    ];
    for (target, status) in get_statuses("", &targets).await {
        assert_eq!(status, 200, "{target}");
    }
}

#[tokio::test]
async fn trap_24_path_normalization_is_configurable() {
    let cases = [
        ("escaped_slashes = 'reject'", "/admin%2Fx", 400),
        ("escaped_slashes = 'reject'", "/other%5Cx", 400),
        ("escaped_slashes = 'keep'", "/admin%2Fx", 200),
        ("escaped_slashes = 'decode'", "/admin%2Fx", 403),
        ("trailing_slash = 'significant'", "/exact/", 200),
        ("trailing_slash = 'significant'", "/exact", 403),
        ("path_parameters = 'keep'", "/exact;x", 200),
        ("merge_slashes = false", "//admin/x", 200),
        ("authority = 'ignore'", "//host/admin", 200),
        ("escaped_delimiters = 'keep'", "/exact%3Fx", 200),
        ("escaped_delimiters = 'reject'", "/other%3Fx", 400),
        ("control_characters = 'allow'", "/exact%0A", 200),
        ("invalid_utf8 = 'allow'", "/exact%FF", 200),
        ("max_readings_size = '0'", "/a/../b", 400),
        ("case_sensitive = false", "/ADMIN/x", 403),
        ("normalize = false", "/./admin/x", 200),
        ("normalize = false", "/admin/x", 403),
    ];
    for (settings, target, expected) in cases {
        let statuses = get_statuses(settings, &[target]).await;
        assert_eq!(statuses, [(target, expected)], "{settings}");
    }
}

#[tokio::test]
async fn trap_24_captures_are_read_from_the_normalized_path() {
    let config = r#"
[[policy]]
name = "p"
key = ["path:/t/{tenant}/**"]
limit = { requests = 1, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    assert_eq!(proxy.get("/t/acme/x").await.status, 200);
    for equivalent in ["/t/%61cme/y", "/t//acme", "/t/acme/./x", "/t/acme/x;v=2"] {
        assert_eq!(proxy.get(equivalent).await.status, 429, "{equivalent}");
    }
    assert_eq!(proxy.get("/t/other/x").await.status, 200);
}

#[tokio::test]
async fn a_key_that_differs_between_readings_is_a_bad_request() {
    let config = r#"
[[policy]]
name = "attempts"
match = { path = "/login/**" }
key = ["path:/login/{user}/**"]
limit = { requests = 1, per = "1h" }

[[policy]]
name = "each"
match = { path = "/each/**" }
key = ["path"]
limit = { requests = 1, per = "1h" }
"#;
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start(config, upstream.address).await;
    for ambiguous in [
        "/login/other/../victim",
        "/login/other;/../victim",
        "/login/victim;x=1",
        "/login/other/%2e%2e/victim",
        "/login/victim%2Fx/../other",
        "/login/victim%3Fx",
        "/each/a/../b",
        "/each/a;x",
    ] {
        let reply = proxy.get(ambiguous).await;
        assert_eq!(reply.status, 400, "{ambiguous}");
        let detail = reply.json()["detail"].to_string();
        assert!(detail.contains("path.ambiguous_key"), "{detail}");
    }
    assert!(upstream.requests().is_empty());
    // Readings that the policy does not match give no key.
    assert_eq!(proxy.get("/x/../login/victim").await.status, 200);
    for equivalent in [
        "/login/victim",
        "//login/victim",
        "/login//%76ictim/",
        "/login/victim/%2e/a",
    ] {
        assert_eq!(proxy.get(equivalent).await.status, 429, "{equivalent}");
    }
    let settings = format!("path.ambiguous_key = 'first'\n{config}");
    let first = Proxy::start(&settings, upstream.address).await;
    assert_eq!(first.get("/login/other/../victim").await.status, 200);
    assert_eq!(first.get("/login/victim").await.status, 429);
}

const LOGIN_POLICIES: &str = r#"
[[policy]]
name = "public"
match = { path = "/public/**" }
action = "allow"

[[policy]]
name = "login"
match = { path = "/login" }
action = "deny"

[[policy]]
name = "everything"
match = { not = { path = "/free/**" } }
limit = { requests = 1000, per = "1h" }
"#;

/// Node's `new URL(req.url, base)` and the JDK's HttpServer read `/login` from these targets.
const AUTHORITY_TARGETS: [&str; 9] = [
    "//host/login",
    "//public/login",
    "//public/login?a=b",
    "///public/login",
    "//user@host:80/login",
    "/\\host/login",
    "//host\\login",
    "//h/x/../login",
    "//h/%6cogin/",
];

#[tokio::test]
async fn a_host_in_front_of_the_path_bypasses_no_policy() {
    let config = format!("[check]\naddress = '127.0.0.1:0'\n{LOGIN_POLICIES}");
    let proxy = Proxy::with_echo(&config).await;
    let check = proxy.logged_address("check listening").unwrap();
    for target in AUTHORITY_TARGETS {
        assert_eq!(proxy.get(target).await.status, 403, "{target}");
        let nginx = ClientRequest::new(check, "GET", "/check/nginx")
            .header("X-Original-Method", "GET")
            .header("X-Original-URI", target);
        assert_eq!(nginx.send_for_status().await, 403, "nginx {target}");
        let envoy = ClientRequest::new(check, "GET", &format!("/check/envoy{target}"));
        assert_eq!(envoy.send_for_status().await, 403, "envoy {target}");
        let mut http2 = open_http2_connection(proxy.address).await;
        let uri = http::Uri::builder()
            .scheme("http")
            .authority("shop.example")
            .path_and_query(target)
            .build()
            .unwrap();
        let request = http::Request::get(uri).body(ClientBody::default()).unwrap();
        let reply = await_response(http2.send_request(request)).await;
        assert_eq!(reply.status(), 403, "HTTP/2 {target}");
    }
    // An exemption or exclusion needs all readings; a limit reports itself.
    for limited in [
        "//public/x",
        "//free/x",
        "/public/x/../../y",
        "//x/public/y",
    ] {
        let reply = proxy.get(limited).await;
        assert!(reply.header("ratelimit").is_some(), "{limited}");
    }
    for exempt in ["/public/x", "/public//x", "/free/x"] {
        let reply = proxy.get(exempt).await;
        assert_eq!((reply.status, reply.header("ratelimit")), (200, None));
    }
}

#[tokio::test]
async fn a_path_that_is_escaped_twice_gains_no_exemption() {
    let proxy = Proxy::with_echo(LOGIN_POLICIES).await;
    for target in [
        "/public/%252e%252e/login",
        "/public/%252E./login",
        "/public%252f..%252flogin",
        "/public/..%255clogin",
        "/public/%2525",
        "/free/%252e%252e/login",
        "/free/%%32%65%%32%65/login",
    ] {
        let reply = proxy.get(target).await;
        assert_eq!(reply.status, 200, "{target}");
        assert!(reply.header("ratelimit").is_some(), "{target}");
    }
    for target in ["/public/100%25", "/free/a%2541"] {
        let reply = proxy.get(target).await;
        assert_eq!((reply.status, reply.header("ratelimit")), (200, None));
    }
}

#[tokio::test]
async fn characters_that_servers_drop_or_cut_at_bypass_no_policy() {
    let cases = [
        ("/login%0A", 400, "path.control_characters"),
        ("/login%0d", 400, "path.control_characters"),
        ("/%01login", 400, "path.control_characters"),
        ("/login%1f", 400, "path.control_characters"),
        ("/login%7F", 400, "path.control_characters"),
        ("/login%80", 400, "path.invalid_utf8"),
        ("/lo%FFgin", 400, "path.invalid_utf8"),
        ("/login%c0%af", 400, "path.invalid_utf8"),
        ("/login%00", 400, "escaped NUL"),
        ("/login%3Fx", 403, "login"),
        ("/login%3f", 403, "login"),
        ("/login%23x", 403, "login"),
        ("//h/login%23%3F", 403, "login"),
        ("/login;x/y", 403, "login"),
    ];
    let proxy = Proxy::with_echo(LOGIN_POLICIES).await;
    for (target, status, named) in cases {
        let reply = proxy.get(target).await;
        assert_eq!(reply.status, status, "{target}");
        assert!(reply.text().contains(named), "{target}: {}", reply.text());
    }
    let hostile = format!("/{}", "%2f%5c;./".repeat(5000));
    let reply = proxy.get(&hostile).await;
    assert_eq!(reply.status, 400);
    assert!(reply.text().contains("path.max_readings_size"));
    assert!(proxy.echo().requests().is_empty());
    assert_eq!(proxy.get("/logi%C3%A9n").await.status, 200);
}

#[tokio::test]
async fn a_target_that_is_not_valid_gets_an_answer_that_says_so() {
    let proxy = Proxy::with_echo("").await;
    for target in ["/a<", "/a>b", "/`", "/<?<"] {
        for earlier_requests in [0, 2] {
            let mut client = RawClient::connect(proxy.address).await;
            for _ in 0..earlier_requests {
                client.send("GET /x HTTP/1.1\r\nHost: a\r\n\r\n").await;
                assert_eq!(client.read_response().await.status, 200);
            }
            let request = format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n");
            client.send(request).await;
            let reply = client.read_response().await;
            assert_eq!(reply.status, 400, "{target}");
            reply.expect_header("content-type", "application/problem+json");
            let detail = reply.json()["detail"].to_string();
            assert!(detail.contains("%3C") && detail.contains("%60"), "{detail}");
            assert!(client.read_to_close().await.is_empty());
        }
    }
    // As nginx, tidegate forwards these characters.
    for target in ["/\"", "/{a}", "/a|b^"] {
        assert_eq!(proxy.get(target).await.status, 200, "{target}");
    }
}

#[tokio::test]
async fn a_normalized_path_is_forwarded_as_it_was_matched() {
    let upstream = RawUpstream::with_response("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    let config = format!("path.forward = 'normalized'\n{LOGIN_POLICIES}");
    let proxy = Proxy::start(&config, upstream.address).await;
    for (target, forwarded) in [
        ("/a/../b/%7ex?q=/../%7e", "/b/~x?q=/../%7e"),
        ("//host/login", "/host/login"),
        ("/%61%2fb/./c;v=1/", "/a%2Fb/c;v=1/"),
        ("/public/%2e%2e/x", "/x"),
        ("/a/b?", "/a/b?"),
    ] {
        assert_eq!(proxy.get(target).await.status, 200, "{target}");
        let received = String::from_utf8(upstream.received_bytes()).unwrap();
        assert!(
            received.contains(&format!("GET {forwarded} HTTP/1.1\r\n")),
            "{target} was forwarded as {received}"
        );
    }
    for target in ["/a/../login", "/%6cogin", "/.//login/."] {
        assert_eq!(proxy.get(target).await.status, 403, "{target}");
    }
}

#[tokio::test]
async fn the_request_target_is_forwarded_unchanged() {
    let upstream = RawUpstream::with_response("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    let proxy = Proxy::start(GUARD_POLICY, upstream.address).await;
    let targets = [
        "//a/./b/%2e%2e/c%2Fd;p=1/?q=%20//&r=a+b",
        "/%41/~x",
        "/a/../b/",
        "/?",
        "/x??y",
        "/a|b[c]",
    ];
    for target in targets {
        let mut client = proxy
            .send_raw(format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n"))
            .await;
        assert_eq!(client.read_response().await.status, 200, "{target}");
        let received = String::from_utf8(upstream.received_bytes()).unwrap();
        assert!(
            received.contains(&format!("GET {target} HTTP/1.1\r\n")),
            "{target} was forwarded as {received}"
        );
    }
}
