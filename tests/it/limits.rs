//! Limits end to end: admission, remaining units, refusals, and correct response fields.

use crate::support::prelude::*;
use tidegate::clock::Clock;
use tokio::time::sleep_until;

const HOURLY_POLICY: &str = r#"
[[policy]]
name = "api"
match = { path = "/api/**" }
key = ["header:x-user"]
limit = { requests = 3, per = "1h" }
"#;

#[tokio::test]
async fn remaining_counts_down_and_the_429_has_an_exact_retry_after() {
    let proxy = Proxy::with_echo(HOURLY_POLICY).await;
    for left in [2, 1, 0] {
        let reply = proxy.get("/api/x").await;
        assert_eq!(reply.status, 200);
        let parameter = |name| reply.list_parameter("ratelimit-policy", "api", name);
        assert_eq!([parameter("q"), parameter("w")], [Some(3), Some(3600)]);
        assert_eq!(reply.remaining("api"), Some(left));
        assert_eq!(reply.header("x-ratelimit-limit"), Some("3"));
        reply.expect_header("x-ratelimit-remaining", left.to_string().as_str());
        assert!(reply.header("retry-after").is_none(), "{reply:?}");
    }
    let reply = proxy.get("/api/x").await;
    assert_eq!(reply.status, 429);
    let retry_after: u64 = reply.retry_after_s();
    assert!((3_500..=3_600).contains(&retry_after), "{retry_after}");
    let rounded_up = reply.retry_after_us().div_ceil(1_000_000);
    assert_eq!(retry_after, rounded_up);
    assert_eq!(reply.remaining("api"), Some(0));
    assert!(reply.list_parameter("ratelimit", "api", "t").unwrap() <= retry_after);
    assert_eq!(reply.header("x-ratelimit-remaining"), Some("0"));
    reply.expect_header("x-ratelimit-reset", retry_after.to_string());
    assert_eq!(reply.header("cache-control"), Some("no-store"));
    reply.expect_header("content-type", "application/problem+json");
    let problem = reply.json();
    assert_fields(&problem, json!({ "status": 429, "policy": "api" }));
    let kind = "https://iana.org/assignments/http-problem-types#quota-exceeded";
    assert_eq!(problem["type"], kind);
    for name in ["title", "detail"] {
        let text = problem[name].as_str().unwrap_or_default();
        assert!(!text.is_empty(), "{name} in {problem}");
    }
    // The refused request has not reached the upstream.
    assert_eq!(proxy.echo().requests().len(), 3);
}

#[tokio::test]
async fn other_paths_and_other_users_are_not_limited() {
    let proxy = Proxy::with_echo(HOURLY_POLICY).await;
    assert_eq!(proxy.get_statuses("/api/x", 4).await, [200, 200, 200, 429]);
    let other = proxy.get("/other").await;
    assert_eq!(other.status, 200);
    assert!(other.header("ratelimit").is_none() && other.header("x-ratelimit-limit").is_none());
    assert_eq!(proxy.get_with("/api/x", "X-User", "u").await.status, 200);
}

#[tokio::test]
async fn trap_10_requests_are_admitted_after_retry_after_and_not_before() {
    let config = "[[policy]]\nname = 'p'\nlimit = { requests = 2, per = '3s' }";
    let proxy = Proxy::with_echo(config).await;
    assert_eq!(proxy.get("/").await.status, 200);
    // The end of the wait is then less than a period away.
    sleep_until((Instant::now() + Duration::from_millis(400)).into()).await;
    assert_eq!(proxy.get("/").await.status, 200);
    let sent = Instant::now();
    let refused = proxy.get("/").await;
    let received = Instant::now();
    assert_eq!(refused.status, 429);
    // The decision, and so the start of the wait, lies between sent and received.
    let wait = Duration::from_micros(refused.retry_after_us());
    loop {
        let asked = Instant::now();
        let status = proxy.get("/").await.status;
        if Instant::now() < sent + wait {
            assert_eq!(status, 429, "too early");
        } else if asked >= received + wait {
            assert_eq!(status, 200, "admitted after retry_after");
            break;
        } else if status == 200 {
            break;
        }
        sleep_until((Instant::now() + Duration::from_millis(40)).into()).await;
    }
}

#[tokio::test]
async fn a_token_bucket_admits_its_burst_and_refills_evenly() {
    let config = r#"
[[policy]]
name = "p"
limit = { requests = 10, per = "5s", algorithm = "token_bucket", burst = 3 }
"#;
    let proxy = Proxy::with_echo(config).await;
    assert_eq!(proxy.get_statuses("/", 3).await, [200, 200, 200]);
    let refused = proxy.get("/").await;
    assert_eq!(refused.status, 429);
    assert_eq!(refused.header("ratelimit-policy"), Some("\"p\";q=3;w=5"));
    assert_eq!(refused.header("x-ratelimit-limit"), Some("3"));
    let wait_us = refused.retry_after_us();
    // One unit returns after half a second.
    assert!(wait_us <= 500_000, "{wait_us}");
    sleep(Duration::from_micros(wait_us + 2_000)).await;
    assert_eq!(proxy.get_statuses("/", 2).await, [200, 429]);
}

#[tokio::test]
async fn a_sliding_window_never_exceeds_its_limit_and_reports_retry_after() {
    let config = r#"
[[policy]]
name = "p"
limit = { requests = 4, per = "1s", algorithm = "sliding_window", buckets = 5 }
"#;
    let proxy = Proxy::with_echo(config).await;
    let clock = Clock::system();
    let first_us = clock.now_us();
    assert_eq!(proxy.get_statuses("/", 4).await, [200; 4]);
    let refused = proxy.get("/").await;
    assert_eq!(refused.status, 429);
    // The last instant of the oldest sub-window must be a whole period old.
    let sent_us = clock.now_us();
    let wait_us = refused.retry_after_us();
    let passed_us = (sent_us + wait_us).saturating_sub(first_us);
    assert!(passed_us >= 1_000_000 && wait_us < 1_200_000, "{wait_us}");
    sleep(Duration::from_micros(wait_us + 2_000)).await;
    assert_eq!(proxy.get("/").await.status, 200);
}

#[tokio::test]
async fn a_fixed_window_ends_at_a_multiple_of_its_length() {
    let config = r#"
[[policy]]
name = "p"
limit = { requests = 2, per = "2s", algorithm = "fixed_window" }
"#;
    let proxy = Proxy::with_echo(config).await;
    let clock = Clock::system();
    let mut asked = 0;
    let edge_us = loop {
        asked += 1;
        assert!(asked < 1_000, "no request was refused");
        let sent_us = clock.now_us();
        let reply = proxy.get("/").await;
        let received_us = clock.now_us();
        let edge_us = (sent_us / 2_000_000 + 1) * 2_000_000;
        if reply.status == 429 && received_us < edge_us {
            let told_us = reply.retry_after_us();
            let possible = edge_us - received_us..=edge_us - sent_us;
            assert!(possible.contains(&told_us), "{told_us}");
            break edge_us;
        }
    };
    let wait = Duration::from_micros(edge_us.saturating_sub(clock.now_us()) + 2_000);
    sleep(wait).await;
    proxy.expect_status("/", 200, "after the edge").await;
}

#[tokio::test]
async fn all_limits_are_in_the_headers_and_the_tightest_applies() {
    let config = r#"
[[policy]]
name = "p"
limits = [
  { requests = 9, per = "1m" },
  { requests = 2, per = "1h" },
  { requests = 5, per = "1d", name = "daily", unit = "tokens" },
]
"#;
    let proxy = Proxy::with_echo(config).await;
    let reply = proxy.get("/").await;
    let left = ["p", "p-2", "daily"].map(|name| reply.remaining(name));
    assert_eq!(left, [Some(8), Some(1), Some(4)]);
    let width_s = reply.list_parameter("ratelimit-policy", "p-2", "w");
    assert_eq!(width_s, Some(3_600));
    let policies = reply.header("ratelimit-policy").unwrap();
    assert_contains(policies, &["qu=\"tokens\""]);
    // The limit with the lowest r/q.
    reply.expect_header("x-ratelimit-limit", "2");
    assert_eq!(proxy.get_statuses("/", 2).await, [200, 429]);
}

#[tokio::test]
async fn an_override_replaces_the_limits_of_its_key() {
    let config = r#"
[[policy]]
name = "p"
key = ["header:x-tenant", "header:x-user"]
limit = { requests = 1, per = "1h" }
[[policy.override]]
key = ["acme", "boss"]
limit = { requests = 3, per = "1h" }
[[policy.override]]
key = ["acme", "*"]
limit = { requests = 2, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    for (tenant, user, quota) in [
        ("acme", "boss", "3"),
        ("acme", "any", "2"),
        ("else", "boss", "1"),
    ] {
        let ask = proxy.request("GET", "/").header("x-tenant", tenant);
        let reply = ask.header("x-user", user).send().await;
        let limit = reply.header("x-ratelimit-limit");
        assert_eq!(limit, Some(quota), "{tenant} {user}");
    }
}

#[tokio::test]
async fn a_condition_with_a_list_holds_for_each_of_its_values() {
    let config = r#"
[[policy]]
name = "p"
match = { headers = { x-plan = ["free", "trial"] }, query = { v = ["1", "2"] }, cookies = { s = ["a", "b"] } }
limit = { requests = 1000, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    for (plan, target, cookie, is_limited) in [
        ("free", "/?v=1", "s=a", true),
        ("trial", "/?v=2", "s=b", true),
        ("paid", "/?v=1", "s=a", false),
        ("free", "/?v=3", "s=a", false),
        ("free", "/?v=1", "s=ab", false),
        ("free, trial", "/?v=1", "s=a", false),
    ] {
        let request = proxy.request("GET", target).header("x-plan", plan);
        let response = request.header("cookie", cookie).send().await;
        let has_limit = response.header("x-ratelimit-limit").is_some();
        assert_eq!(has_limit, is_limited, "{plan} {target} {cookie}");
    }
}

#[tokio::test]
async fn one_of_several_matches_suffices_beside_the_other_conditions() {
    let config = r#"
[[policy]]
name = "p"
limit = { requests = 1000, per = "1h" }

[policy.match]
methods = ["POST"]
any = [{ path = "/login" }, { path = "/token", query = { grant = "password" } }]
not = { headers = { x-internal = "1" } }
"#;
    let proxy = Proxy::with_echo(config).await;
    for (method, target, internal, outcome) in [
        ("POST", "/login", "0", "limited"),
        ("POST", "/token?grant=password", "0", "limited"),
        ("POST", "/token?grant=code", "0", "free"),
        ("POST", "/other", "0", "free"),
        ("GET", "/login", "0", "free"),
        ("POST", "/login", "1", "free"),
        // Ambiguous only where the result depends on the parameter.
        (
            "POST",
            "/token?grant=code&[grant]=password",
            "0",
            "ambiguous",
        ),
        ("POST", "/login?grant=code&[grant]=password", "0", "limited"),
        ("POST", "/other?grant=code&[grant]=password", "0", "free"),
    ] {
        let request = proxy.request(method, target).header("x-internal", internal);
        let response = request.send().await;
        let found = match (response.status, response.header("x-ratelimit-limit")) {
            (400, _) => "ambiguous",
            (_, Some(_)) => "limited",
            (_, None) => "free",
        };
        assert_eq!(found, outcome, "{method} {target} {internal}");
    }
}

#[tokio::test]
async fn a_shadow_policy_never_refuses_and_sends_no_headers() {
    let config = r#"
[[policy]]
name = "candidate"
mode = "shadow"
limit = { requests = 1, per = "1h" }
[[policy]]
name = "live"
limit = { requests = 4, per = "1h" }
[[policy]]
name = "ban"
mode = "shadow"
action = "deny"
priority = 9
[[policy]]
name = "gone"
mode = "off"
action = "deny"
"#;
    let proxy = Proxy::with_echo(config).await;
    for _ in 0..4 {
        let reply = proxy.get("/").await;
        assert_eq!(reply.status, 200);
        assert_lacks(&format!("{:?}", reply.headers), &["candidate"]);
    }
    assert_eq!(proxy.get("/").await.status, 429);
}

#[tokio::test]
async fn priority_orders_allow_and_deny_and_earlier_limits_still_apply() {
    let config = r#"
[[policy]]
name = "everyone"
limit = { requests = 1, per = "1h" }
[[policy]]
name = "health"
priority = 10
match = { path = "/health" }
action = "allow"
[[policy]]
name = "internal"
priority = 10
match = { path = "/internal/**" }
action = "deny"
[[policy]]
name = "beta"
priority = 20
match = { path = "/health", headers = { x-beta = "yes" } }
limit = { requests = 1, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    assert_eq!(proxy.get_statuses("/health", 5).await, [200; 5], "exempt");
    let denied = proxy.get("/internal/x").await;
    assert_eq!(denied.status, 403);
    denied.expect_header("content-type", "application/problem+json");
    assert_eq!(denied.json()["status"], 403);
    assert!(denied.header("retry-after").is_none());
    // The earlier limit applies before the exemption.
    let beta = proxy.request("GET", "/health").header("x-beta", "yes");
    assert_eq!(beta.send_times(2).await, [200, 429]);
    // The policies do not charge each other's quota.
    assert_eq!(proxy.get_statuses("/x", 2).await, [200, 429]);
    let mut seen = proxy.echo().requests().into_iter();
    assert!(seen.all(|seen| !seen.target.contains("internal")));
}

#[tokio::test]
async fn trap_25_a_missing_key_does_not_bypass_the_limit() {
    let config = r#"
[[policy]]
name = "shared"
match = { path = "/shared" }
key = ["header:x-user"]
limit = { requests = 1, per = "1h" }
[[policy]]
name = "skip"
match = { path = "/skip" }
key = ["header:x-user"]
missing_key = "skip"
limit = { requests = 1, per = "1h" }
[[policy]]
name = "reject"
match = { path = "/reject" }
key = ["header:x-user"]
missing_key = "reject"
limit = { requests = 1, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    assert_eq!(proxy.get_statuses("/shared", 2).await, [200, 429]);
    // An empty value counts as absent.
    assert_eq!(proxy.get_with("/shared", "x-user", "").await.status, 429);
    assert_eq!(proxy.get_statuses("/skip", 3).await, [200, 200, 200]);
    assert_eq!(proxy.get_statuses("/reject", 1).await, [400]);
    assert_eq!(proxy.get_with("/reject", "x-user", "u").await.status, 200);
}

#[tokio::test]
async fn trap_11_a_request_refused_by_one_policy_is_not_charged_to_another() {
    let config = r#"
[[policy]]
name = "wide"
limit = { requests = 3, per = "1h" }
[[policy]]
name = "narrow"
key = ["header:x-user"]
limit = { requests = 1, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    let ask = |user: &'static str| proxy.request("GET", "/").header("x-user", user).send();
    assert_eq!(ask("noisy").await.status, 200);
    for _ in 0..5 {
        let refused = ask("noisy").await;
        assert_eq!(refused.status, 429);
        assert_eq!(refused.json()["policy"], "narrow");
    }
    for (user, status) in [("b", 200), ("c", 200), ("d", 429)] {
        assert_eq!(ask(user).await.status, status, "{user}");
    }
}

#[tokio::test]
async fn trap_2_retrying_early_does_not_prolong_the_wait() {
    let config = "[[policy]]\nname = 'p'\nlimit = { requests = 1, per = '1s' }";
    let proxy = Proxy::with_echo(config).await;
    let start = Instant::now();
    assert_eq!(proxy.get("/").await.status, 200);
    while proxy.get("/").await.status == 429 {
        assert!(start.elapsed() < Duration::from_secs(5), "still refused");
    }
}

#[tokio::test]
async fn trap_21_keys_neither_collide_nor_are_truncated() {
    let config = r#"
[[policy]]
name = "p"
key = ["header:a", "header:b"]
limit = { requests = 1, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    let long = "x".repeat(3_000);
    let pairs = [
        ("a:b", "c"),
        ("a", "b:c"),
        ("a/b", "c"),
        ("{a}", "b"),
        ("-", "b"),
        ("", "b"),
        (&format!("{long}1"), ""),
        (&format!("{long}2"), ""),
    ];
    for (a, b) in pairs {
        let request = proxy.request("GET", "/").header("a", a).header("b", b);
        assert_eq!(request.send_times(2).await, [200, 429], "{a:.20} + {b:.20}");
    }
}

#[tokio::test]
async fn an_ambiguous_key_is_a_bad_request() {
    let config = r#"
[[policy]]
name = "p"
key = ["header:x-user", "query:tenant", "cookie:sid"]
limit = { requests = 1000, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    let twice = proxy.request("GET", "/").header("X-User", "a");
    let header = twice.header("x-user", "b").send().await;
    assert_eq!(header.status, 400);
    header.expect_header("content-type", "application/problem+json");
    // The second time, the same name in another spelling.
    for target in ["/?tenant=a&tenant=b", "/?tenant=a&t%65nant=b"] {
        assert_eq!(proxy.get(target).await.status, 400, "{target}");
    }
    let cookies = proxy.get_with("/", "cookie", "sid=1; sid=2").await;
    assert_eq!(cookies.status, 400);
    assert!(proxy.echo().requests().is_empty());
    // A parameter that is not part of the key.
    let other = proxy.get("/?tenant=a&other=b&other=c").await;
    assert_eq!(other.status, 200);
}

#[tokio::test]
async fn spellings_of_a_key_that_parsers_read_differently_are_bad_requests() {
    let config = r#"
[[policy]]
name = "p"
key = ["query:api_key", "cookie:sid"]
limit = { requests = 1, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    let many = format!("/?{}api_key=a", "x&".repeat(1000));
    for target in [
        "/?[api_key]=a",
        "/?%5Bapi_key%5D=a",
        "/?api_key[]=a",
        "/?api.key=a",
        "/?api%20key=a",
        "/?api+key=a",
        "/?API_KEY=a",
        "/?x=1;api_key=a",
        "/?api_key=a;x",
        "/?api_key=%FF",
        "/x%3Fapi_key=a?api_key=b",
        "/x;api_key=a?api_key=b",
        &many,
    ] {
        let reply = proxy.get(target).await;
        assert_eq!(reply.status, 400, "{target:.40}");
        assert!(reply.text().contains("client.ambiguous_query"));
    }
    for cookie in [
        &b"sid=\"\\163x\""[..],
        b"sid=a\\b",
        b"sid=x\xa0",
        b"sid=x\x85",
        b"sid\xa0=x",
    ] {
        let mut client = RawClient::connect(proxy.address).await;
        let head = b"GET / HTTP/1.1\r\nHost: a\r\nCookie: ";
        client.send([head, cookie, b"\r\n\r\n"].concat()).await;
        let reply = client.read_response().await;
        assert_eq!(reply.status, 400, "{}", cookie.escape_ascii());
        assert!(reply.text().contains("client.ambiguous_cookie"));
    }
    assert!(proxy.echo().requests().is_empty());
    let ask = |cookie| proxy.get_with("/?api_key=a%20b&x[y]=1", "cookie", cookie);
    assert_eq!(ask("sid=x").await.status, 200);
    for spelling in ["sid=\"x\"", "sid = %78", "a=\\; sid=x"] {
        assert_eq!(ask(spelling).await.status, 429, "{spelling}");
    }
    let lenient = Proxy::with_echo(&format!(
        "client.ambiguous_query = 'allow'\nclient.ambiguous_cookie = 'allow'\n{config}"
    ))
    .await;
    let request = lenient.request("GET", "/?[api_key]=a");
    let ambiguous = request.header("cookie", "sid=a\\b");
    assert_eq!(ambiguous.send_for_status().await, 200);
}

#[tokio::test]
async fn a_refusal_is_plain_text_if_the_client_prefers_it() {
    let proxy = Proxy::with_echo(HOURLY_POLICY).await;
    proxy.get_statuses("/api/x", 3).await;
    let ask = |accept| proxy.get_with("/api/x", "accept", accept);
    let plain = ask("text/plain").await;
    assert_eq!(plain.status, 429);
    assert_starts(plain.header("content-type").unwrap(), "text/plain");
    assert!(!plain.body.is_empty() && plain.body[0] != b'{');
    for accept in [
        "*/*",
        "application/json",
        "application/problem+json",
        "text/plain;q=0.1, application/json",
    ] {
        let reply = ask(accept).await;
        assert_ends(reply.header("content-type").unwrap(), "json");
    }
}

#[tokio::test]
async fn get_policies_apply_to_head_and_a_refused_head_has_no_body() {
    let config = "[[policy]]\nname = 'p'\nmatch = { methods = ['GET'] }\nlimit = { requests = 2, per = '1h' }";
    let proxy = Proxy::with_echo(config).await;
    assert_eq!(proxy.get("/").await.status, 200);
    assert_eq!(proxy.request("HEAD", "/").send_for_status().await, 200);
    let head = "HEAD / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    let mut client = proxy.send_raw(head).await;
    let refused = client.read_any_response(true).await;
    assert_eq!(refused.status, 429);
    assert!(refused.header("retry-after").is_some());
    assert_eq!(client.read_to_close().await, b"", "the response has a body");
    proxy.request("POST", "/").expect_status(200).await;
}

#[tokio::test]
async fn a_limit_of_zero_always_refuses_without_retry_after() {
    let config = r#"
[[policy]]
name = "closed"
match = { path = "/closed" }
limit = { requests = 0, per = "1h" }
[[policy]]
name = "dear"
match = { path = "/dear" }
cost = 3
limit = { requests = 7, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    let never = proxy.get("/closed").await;
    assert_eq!(never.status, 429);
    assert!(never.header("retry-after").is_none(), "{never:?}");
    let left = |reply: &RawResponse| reply.remaining("dear");
    assert_eq!(left(&proxy.get("/dear").await), Some(4));
    assert_eq!(left(&proxy.get("/dear").await), Some(1));
    let refused = proxy.get("/dear").await;
    // One unit remains, the cost is three.
    assert_eq!((refused.status, left(&refused)), (429, Some(1)));
}

#[tokio::test]
async fn the_refusal_response_is_configurable() {
    let config = r#"
[[policy]]
name = "p"
limit = { requests = 0, per = "1h" }
reject = { status = 420, body = "calm down", content_type = "text/html", headers = { x-help = "/quota" } }
"#;
    let proxy = Proxy::with_echo(config).await;
    let reply = proxy.get("/").await;
    assert_eq!((reply.status, reply.text().as_str()), (420, "calm down"));
    assert_eq!(reply.header("content-type"), Some("text/html"));
    assert_eq!(reply.header("x-help"), Some("/quota"));
}

#[tokio::test]
async fn the_configured_rate_limit_headers_are_sent() {
    for (chosen, standard, legacy) in [
        ("standard", true, false),
        ("legacy", false, true),
        ("both", true, true),
        ("none", false, false),
    ] {
        let config = format!("[response]\nheaders = \"{chosen}\"\n{HOURLY_POLICY}");
        let proxy = Proxy::with_echo(&config).await;
        let reply = proxy.get("/api/x").await;
        for (name, is_sent) in [
            ("ratelimit", standard),
            ("ratelimit-policy", standard),
            ("x-ratelimit-reset", legacy),
        ] {
            assert_eq!(reply.header(name).is_some(), is_sent, "{chosen}: {name}");
        }
    }
    let epoch = format!("[response]\nlegacy_reset = \"epoch\"\n{HOURLY_POLICY}");
    let proxy = Proxy::with_echo(&epoch).await;
    let reset: u64 = proxy.get("/api/x").await.header_number("x-ratelimit-reset");
    let now = Clock::system().now_us() / 1_000_000;
    assert!((now..=now + 3_601).contains(&reset), "{reset} at {now}");
}

#[tokio::test]
async fn the_upstreams_rate_limit_headers_are_kept() {
    let upstream = Upstream::with_handler(|_| async {
        let mut response = Response::new(full_body("ok"));
        set_header(&mut response, "ratelimit", "\"app\";r=1;t=5");
        set_header(&mut response, "ratelimit-policy", "\"app\";q=2;w=5");
        set_header(&mut response, "x-ratelimit-limit", "2");
        set_header(&mut response, "x-ratelimit-remaining", "1");
        set_header(&mut response, "x-ratelimit-reset", "5");
        response
    })
    .await;
    let config = "[[policy]]\nname = 'p'\nlimit = { requests = 90, per = '1h' }";
    let proxy = Proxy::start(config, upstream.address).await;
    let reply = proxy.get("/").await;
    let all = |name: &str| -> String {
        let lines = reply.headers.iter().filter(|(given, _)| given == name);
        lines.map(|(_, value)| format!("{value},")).collect()
    };
    assert_contains(&all("ratelimit"), &["\"app\";r=1;t=5", "\"p\";r=89"]);
    assert!(all("ratelimit-policy").contains("\"app\";q=2;w=5"));
    // The stricter of the two.
    reply.expect_header("x-ratelimit-remaining", "1");
}

/// One proxy, with one policy per condition. A matching policy answers 403.
#[tokio::test]
async fn every_match_condition_selects_the_expected_requests() {
    let conditions = [
        r#"{ path = "/methods", methods = ["POST", "DELETE"] }"#,
        r#"{ path = "/hosts", hosts = ["api.example", "*.wild.example"] }"#,
        r#"{ path = ["/list/a", "/list/b"] }"#,
        r#"{ path = "/one/{id}/*" }"#,
        r#"{ path_regex = "^/re/[0-9]+$" }"#,
        r#"{ path = "/headers", headers = { x-a = "1", x-b = { regex = "^v[0-9]$" }, x-c = { present = true } } }"#,
        r#"{ path = "/absent", headers = { x-c = { present = false } } }"#,
        r#"{ path = "/query", query = { q = "a b" } }"#,
        r#"{ path = "/cookies", cookies = { tier = "free" } }"#,
        r#"{ path = "/mine", client_ips = ["127.0.0.0/8"] }"#,
        r#"{ path = "/theirs", client_ips = ["10.0.0.0/8"] }"#,
        r#"{ path = "/not/**", not = { path = "/not/this" } }"#,
    ];
    let config: String = conditions
        .iter()
        .enumerate()
        .map(|(number, condition)| {
            format!("[[policy]]\nname = \"p{number}\"\nmatch = {condition}\naction = \"deny\"\n")
        })
        .collect();
    let proxy = Proxy::with_echo(&config).await;
    let get = |target: &str| proxy.request("GET", target);
    let abc = |b: &str| {
        get("/headers")
            .header("x-a", "1")
            .header("x-b", b)
            .header("X-C", "")
    };
    let cases = [
        (proxy.request("POST", "/methods"), 403),
        (get("/methods"), 200),
        (get("/hosts").header("host", "api.example"), 403),
        (get("/hosts").header("host", "API.example.:80"), 403),
        (get("/hosts").header("host", "a.wild.example"), 403),
        (get("/hosts").header("host", "wild.example"), 200),
        (get("/hosts").header("host", "notapi.example"), 200),
        (get("/list/a"), 403),
        (get("/list/b"), 403),
        (get("/list/c"), 200),
        (get("/one/1/2"), 403),
        (get("/one/1"), 200),
        (get("/one/1/2/3"), 200),
        (get("/re/42"), 403),
        (get("/re/x"), 200),
        (abc("v1"), 403),
        (abc("w1"), 200),
        (get("/headers").header("x-a", "1").header("x-b", "v1"), 200),
        (get("/absent"), 403),
        (get("/absent").header("x-c", "1"), 200),
        (get("/query?q=a%20b"), 403),
        (get("/query?q=a+b"), 403),
        (get("/query?q=ab"), 200),
        (get("/cookies").header("cookie", "x=1; tier=free"), 403),
        (get("/cookies").header("cookie", "tier=paid"), 200),
        (get("/mine"), 403),
        (get("/theirs"), 200),
        (get("/not/that"), 403),
        (get("/not/this"), 200),
    ];
    for (ask, expected) in cases {
        let asked = format!("{ask:?}");
        assert_eq!(ask.send_for_status().await, expected, "{asked}");
    }
}

#[tokio::test]
async fn a_refused_grpc_call_gets_a_grpc_status() {
    let config = "[[policy]]\nname = 'p'\nlimit = { requests = 0, per = '1h' }";
    let proxy = Proxy::with_echo(config).await;
    let call = proxy.request("POST", "/svc/Call");
    let reply = call.header("content-type", "application/grpc").send().await;
    reply.expect_status(200).expect_header("grpc-status", "8");
}

#[tokio::test]
async fn keys_of_one_policy_do_not_evict_an_exhausted_key_of_another() {
    let config = r#"
store = { kind = "memory", memory = { max_keys = 1000 } }

[[policy]]
name = "login"
match = { path = "/login" }
key = ["header:x-user"]
limit = { requests = 5, per = "1h" }

[[policy]]
name = "page"
match = { path = "/page" }
key = ["header:x-visitor"]
limit = { requests = 1, per = "1d" }
"#;
    let proxy = Proxy::with_echo(config).await;
    let count_logins = async || {
        let mut admitted = 0;
        for _ in 0..6 {
            let login = proxy.request("POST", "/login").header("x-user", "ann");
            admitted += u32::from(login.send_for_status().await == 200);
        }
        admitted
    };
    assert_eq!(count_logins().await, 5);
    for visitor in 0..1_050 {
        let visit = proxy.request("GET", "/page");
        let visit = visit.header("x-visitor", &visitor.to_string());
        assert_eq!(visit.send_for_status().await, 200);
    }
    assert_eq!(count_logins().await, 0);
    let evictions = proxy.read_metric("tidegate_store_memory_evictions_total");
    assert_eq!(evictions.await, 51.0);
}
