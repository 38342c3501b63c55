//! CORS: browser scripts may read responses that tidegate generates.

use crate::support::prelude::*;

const APP_ORIGIN: &str = "https://app.example";

const POLICIES: &str = r#"
[[policy]]
name = "closed"
match = { path = "/denied" }
action = "deny"
[[policy]]
name = "p"
match = { path = "/limited" }
limit = { requests = 0, per = "1h" }
[[policy]]
name = "own"
match = { path = "/own" }
limit = { requests = 0, per = "1h" }
reject = { status = 420, body = "no", headers = { access-control-allow-origin = "https://own.example" } }
"#;

fn cors_headers(reply: &RawResponse) -> [Option<&str>; 3] {
    [
        "access-control-allow-origin",
        "access-control-allow-credentials",
        "vary",
    ]
    .map(|name| reply.header(name))
}

fn request_from_origin(proxy: &Proxy, target: &str, origin: &str) -> ClientRequest {
    proxy.request("GET", target).header("Origin", origin)
}

#[tokio::test]
async fn only_listed_origins_may_read_generated_responses() {
    let upstream = Upstream::with_handler(|_| async {
        let mut answer = Response::new(full_body("ok"));
        set_header(&mut answer, "vary", "Accept");
        answer
    })
    .await;
    let cors = format!(
        "[response.cors]\nallow_origins = ['{APP_ORIGIN}', 'http://localhost:3000']\n{POLICIES}"
    );
    let proxy = Proxy::start(&cors, upstream.address).await;
    for (target, status) in [("/limited", 429), ("/denied", 403), ("/a%00", 400)] {
        let reply = request_from_origin(&proxy, target, APP_ORIGIN).send().await;
        assert_eq!(
            (reply.status, cors_headers(&reply)),
            (status, [Some(APP_ORIGIN), Some("true"), Some("Origin")]),
            "{target}"
        );
        let exposed = reply.header("access-control-expose-headers").unwrap();
        for name in [
            "Retry-After",
            "RateLimit",
            "RateLimit-Policy",
            "X-RateLimit-Limit",
            "X-RateLimit-Remaining",
            "X-RateLimit-Reset",
        ] {
            assert!(
                exposed.split(", ").any(|exposed| exposed == name),
                "{exposed}"
            );
        }
        for stranger in [
            "https://app.example.evil",
            "https://app.example:8443",
            "http://app.example",
            "null",
            "",
        ] {
            let reply = request_from_origin(&proxy, target, stranger).send().await;
            let found = cors_headers(&reply);
            assert_eq!(found, [None, None, Some("Origin")], "{target} {stranger}");
            assert_eq!(reply.header("access-control-expose-headers"), None);
        }
        let reply = proxy.get(target).await;
        assert_eq!(cors_headers(&reply), [None, None, Some("Origin")]);
    }
    let own = request_from_origin(&proxy, "/own", APP_ORIGIN).send().await;
    assert_eq!(
        (own.status, cors_headers(&own)),
        (420, [Some("https://own.example"), None, None])
    );
    let theirs = request_from_origin(&proxy, "/", APP_ORIGIN).send().await;
    assert_eq!(
        (theirs.status, cors_headers(&theirs)),
        (200, [None, None, Some("Accept")]),
        "the upstream's own response"
    );
}

#[tokio::test]
async fn scripts_of_allowed_origins_read_the_rate_limit_fields_of_admitted_responses() {
    let upstream = Upstream::with_handler(|request| async move {
        let mut answer = Response::new(full_body("ok"));
        let headers = answer.headers_mut();
        headers.insert("access-control-allow-origin", "*".parse().unwrap());
        if request.uri().path() == "/own" {
            let own = "X-Total, ratelimit".parse().unwrap();
            headers.insert("access-control-expose-headers", own);
            headers.insert("vary", "Accept, origin".parse().unwrap());
        }
        answer
    })
    .await;
    let config = "[response.cors]\nallow_origins = ['https://*.example.com']\n[response]\nheaders = 'both'\n\
        [[policy]]\nname = 'p'\nmatch = { path = ['/own', '/plain'] }\nlimit = { requests = 99, per = '1h' }\n";
    let proxy = Proxy::start(config, upstream.address).await;
    let legacy = "X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset";
    let all = format!("RateLimit, RateLimit-Policy, {legacy}");
    let merged = format!("X-Total, ratelimit, RateLimit-Policy, {legacy}");
    let (origin, own) = (Some("Origin"), Some("Accept, origin"));
    for (target, from, exposed, vary) in [
        ("/plain", "https://a.b.example.com", Some(&*all), origin),
        ("/own", "https://a.example.com", Some(&*merged), own),
        ("/plain", "https://evil-example.com", None, origin),
        (
            "/own",
            "https://example.com",
            Some("X-Total, ratelimit"),
            own,
        ),
        ("/unlimited", "https://a.example.com", None, None),
    ] {
        let reply = request_from_origin(&proxy, target, from).send().await;
        let cors = [Some("*"), None, vary];
        assert_eq!((reply.status, cors_headers(&reply)), (200, cors));
        let name = "access-control-expose-headers";
        assert_eq!(reply.header(name), exposed, "{target} {from}");
    }
    let without_origin = proxy.get("/plain").await;
    assert_eq!(
        cors_headers(&without_origin),
        [Some("*"), None, origin],
        "a cache must not serve it to an origin that may read the fields"
    );
}

#[tokio::test]
async fn the_origin_is_added_once_to_what_a_response_varies_by() {
    let upstream = Upstream::with_handler(|request| async move {
        let mut answer = Response::new(full_body("ok"));
        let query = request.uri().query().unwrap_or_default();
        for line in query.split('&').filter(|line| !line.is_empty()) {
            answer.headers_mut().append("vary", line.parse().unwrap());
        }
        answer
    })
    .await;
    let config = "[response.cors]\nallow_origins = ['https://app.example']\n\
        [[policy]]\nname = 'p'\nlimit = { requests = 99, per = '1h' }\n\
        reject = { headers = { vary = 'Origin' } }\n\
        [[policy]]\nname = 'none'\nmatch = { path = '/none' }\nlimit = { requests = 0, per = '1h' }\n\
        reject = { headers = { vary = 'Accept, ORIGIN' } }\n";
    let proxy = Proxy::start(config, upstream.address).await;
    for (target, expected) in [
        ("/", vec!["Origin"]),
        ("/?Accept", vec!["Accept", "Origin"]),
        ("/?Accept&X-Origin", vec!["Accept", "X-Origin", "Origin"]),
        ("/?Accept&origin,Cookie", vec!["Accept", "origin,Cookie"]),
        ("/?*", vec!["*"]),
        ("/none", vec!["Accept, ORIGIN"]),
    ] {
        for from in [APP_ORIGIN, "https://stranger.example"] {
            let reply = request_from_origin(&proxy, target, from).send().await;
            let lines = reply.headers.iter().filter(|(name, _)| name == "vary");
            let lines: Vec<_> = lines.map(|(_, value)| value.as_str()).collect();
            assert_eq!(lines, expected, "{target} {from}");
        }
    }
}

#[tokio::test]
async fn a_wildcard_origin_allows_reads_without_credentials() {
    let any = format!("[response.cors]\nallow_origins = ['*']\n{POLICIES}");
    // No process listens on the upstream's port.
    let proxy = Proxy::setup(&any).start().await;
    for (target, status) in [("/limited", 429), ("/", 502)] {
        let reply = request_from_origin(&proxy, target, "https://anywhere.example")
            .send()
            .await;
        assert_eq!(
            (reply.status, cors_headers(&reply)),
            (status, [Some("*"), None, Some("Origin")]),
            "{target}"
        );
    }
    let proxy = Proxy::setup(POLICIES).start().await;
    assert_eq!(
        cors_headers(
            &request_from_origin(&proxy, "/limited", APP_ORIGIN)
                .send()
                .await
        ),
        [None; 3],
        "a request without an Origin gets no CORS headers"
    );
}

#[tokio::test]
async fn a_rejection_during_a_store_outage_has_cors_headers() {
    let config = format!(
        "[response.cors]\nallow_origins = '{APP_ORIGIN}'\n[store]\nkind = 'redis'\nredis.url = 'redis://127.0.0.1:9'\n\
         [[policy]]\nname = 'p'\nlimit = {{ requests = 9, per = '1h' }}\non_store_failure = 'closed'\n"
    );
    let proxy = Proxy::setup(&config).start().await;
    let reply = request_from_origin(&proxy, "/", APP_ORIGIN).send().await;
    assert_eq!(
        (reply.status, cors_headers(&reply)),
        (503, [Some(APP_ORIGIN), Some("true"), Some("Origin")])
    );
}
