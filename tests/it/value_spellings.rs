//! Values of keys, conditions and overrides that a client spells in another way than the app reads
//! them: they are malformed, rejected, or share one canonical form.

use crate::support::h2_frames::*;
use crate::support::prelude::*;

/// Sends a GET with one field, over HTTP/1.1.
async fn ask_http1(proxy: &Proxy, target: &str, name: &str, value: &[u8]) -> (u16, String) {
    let mut client = RawClient::connect(proxy.address).await;
    let head = format!("GET {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{name}: ");
    client
        .send([head.as_bytes(), value, b"\r\n\r\n"].concat())
        .await;
    let reply = client.read_response().await;
    (reply.status, reply.text())
}

/// The status of a GET with these fields over HTTP/2, or `None` if the stream or connection ended
/// without a response.
async fn ask_http2(proxy: &Proxy, fields: &[(&str, &[u8])]) -> Option<u16> {
    let mut client = FrameClient::connect(proxy.address, &[]).await;
    client.send(request_frame(1, fields)).await;
    let end = client.wait_for_frame("an answer", |frame| {
        matches!(frame.kind, HEADERS | RST_STREAM | GOAWAY)
    });
    let end = end.await;
    // A status outside of HPACK's static table is another rejection.
    (end.kind == HEADERS).then(|| end.status().unwrap_or(429))
}

fn with_field<'f>(name: &'f str, value: &'f [u8]) -> Vec<(&'f str, &'f [u8])> {
    let items = GET_FIELDS.iter();
    let base = items.map(|(name, value)| (*name, value.as_bytes()));
    base.chain([(name, value)]).collect()
}

#[tokio::test]
async fn http2_values_with_outer_white_space_are_malformed() {
    let config = r#"
[[policy]]
name = "deny"
match = { headers = { x-plan = "free" } }
action = "deny"
[[policy]]
name = "key"
key = ["header:x-api-key"]
limit = { requests = 2, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    for name in ["x-api-key", "x-plan", "accept", "cookie", "x-other"] {
        for value in [
            "free ", " free", "free  ", "\tfree", "free\t", " ", "\t", " free ",
        ] {
            let status = ask_http2(&proxy, &with_field(name, value.as_bytes())).await;
            assert_eq!(status, Some(400), "{name}: {value:?}");
        }
    }
    assert_eq!(proxy.echo().requests().len(), 0);
    let status = ask_http2(&proxy, &with_field("x-other", b"free text")).await;
    assert_eq!(status, Some(200));
    let status = ask_http2(&proxy, &with_field("x-other", b"")).await;
    assert_eq!(status, Some(200));
    // The parser of HTTP/1 trims: one quota.
    let spelled = ["secret", " secret", "secret \t"];
    for (value, expected) in spelled.into_iter().zip([200, 200, 429]) {
        let (status, _) = ask_http1(&proxy, "/", "x-api-key", value.as_bytes()).await;
        assert_eq!(status, expected, "{value:?}");
    }
}

#[tokio::test]
async fn http2_trailers_with_outer_white_space_end_the_upload() {
    let proxy = Proxy::with_echo("").await;
    for (value, is_valid) in [("1", true), ("1 ", false), (" 1", false), ("\t", false)] {
        let mut client = FrameClient::connect(proxy.address, &[]).await;
        let mut fields = get_fields_with(":method", "POST");
        fields.push(("trailer", "x-sum"));
        client.send(request_head_frame(1, &fields)).await;
        client.send(request_frame(1, &[("x-sum", value)])).await;
        let end = client.wait_for_frame("an answer", |frame| {
            matches!(frame.kind, HEADERS | RST_STREAM)
        });
        let status = end.await.status();
        assert_eq!(status == Some(200), is_valid, "{value:?}: {status:?}");
    }
    let finished = proxy.echo().requests().len();
    assert!(finished <= 4, "{finished}");
}

/// What the parser of HTTP/1 rejects must be rejected over HTTP/2 too.
#[tokio::test]
async fn both_versions_reject_the_same_fields_and_targets() {
    let proxy = Proxy::with_echo("").await;
    for (name, value) in [
        ("x", &b"a\0b"[..]),
        ("x", b"a\rb"),
        ("x", b"a\x01b"),
        ("x", b"a\x7fb"),
        ("x y", b"1"),
        ("x(", b"1"),
        ("\u{e9}", b"1"),
    ] {
        let (status, _) = ask_http1(&proxy, "/", name, value).await;
        assert_eq!(status, 400, "{name}: {}", value.escape_ascii());
        let status = ask_http2(&proxy, &with_field(name, value)).await;
        assert_eq!(status, Some(400), "{name}: {}", value.escape_ascii());
    }
    for path in [
        "",
        "x",
        "*",
        "?x",
        "/a b",
        "/a\u{1}",
        "/a\0",
        "http://a/x",
        "//",
    ] {
        let status = ask_http2_path(&proxy, path).await;
        let is_valid = path == "//";
        assert_eq!(status == Some(200), is_valid, "{path:?}: {status:?}");
    }
    for authority in [
        "", "u@a", "a b", "a,b", "a\t", "a:x", "a/b", "[::1", "b\u{e9}",
    ] {
        let fields = get_fields_with(":authority", authority);
        let fields: Vec<_> = fields
            .iter()
            .map(|(name, value)| (*name, value.as_bytes()))
            .collect();
        let status = ask_http2(&proxy, &fields).await;
        assert!(status != Some(200), "{authority:?}");
    }
    let status = ask_http2(&proxy, &with_field("host", b"b")).await;
    assert_eq!(status, Some(400), "a host that differs from :authority");
    assert_eq!(proxy.echo().requests().len(), 1);
}

async fn ask_http2_path(proxy: &Proxy, path: &str) -> Option<u16> {
    let fields = get_fields_with(":path", path);
    let fields: Vec<_> = fields
        .iter()
        .map(|(name, value)| (*name, value.as_bytes()))
        .collect();
    ask_http2(proxy, &fields).await
}

/// Cookie crumbs are one header for policies and the upstream.
#[tokio::test]
async fn cookies_in_several_fields_are_read_together() {
    let config = r#"
[[policy]]
name = "deny"
match = { cookies = { plan = "free" } }
action = "deny"
[[policy]]
name = "key"
key = ["cookie:sid"]
limit = { requests = 1, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    let ask = |crumbs: Vec<&'static [u8]>| {
        let items = GET_FIELDS.iter();
        let base = items.map(|(name, value)| (*name, value.as_bytes()));
        let crumbs = crumbs.into_iter().map(|crumb| ("cookie", crumb));
        let fields: Vec<(&str, &[u8])> = base.chain(crumbs).collect();
        let proxy = &proxy;
        async move { ask_http2(proxy, &fields).await }
    };
    assert_eq!(ask(vec![b"a=1", b"sid=x"]).await, Some(200));
    assert_eq!(ask(vec![b"a=1", b"b=2", b"sid=x"]).await, Some(429));
    assert_eq!(ask(vec![b"sid=x", b"sid=y"]).await, Some(400));
    assert_eq!(ask(vec![b"sid=x,y"]).await, Some(400));
    let answer = ask(vec![b"a=1", b"plan=free"]).await;
    assert_eq!(answer, Some(429), "denied: 403");
    assert_eq!(ask(vec![b"a=1", b"plan=free "]).await, Some(400));
}

#[tokio::test]
async fn conditions_and_overrides_see_the_credentials_of_keys() {
    let config = r#"
[[policy]]
name = "leaked"
match = { path = "/exact", headers = { authorization = "bearer  leaked-key" } }
action = "deny"
[[policy]]
name = "pattern"
match = { path = "/regex", headers = { authorization = { regex = "^Bearer leaked-" } } }
action = "deny"
[[policy]]
name = "exempt"
match = { path = "/limited", headers = { authorization = "Token staff" } }
action = "allow"
[[policy]]
name = "others"
match = { path = "/not", not = { headers = { authorization = "Bearer good" } } }
action = "deny"
[[policy]]
name = "quota"
match = { path = ["/quota", "/limited"] }
key = ["header:authorization"]
limit = { requests = 0, per = "1h" }
[[policy.override]]
key = ["Token stolen"]
action = "deny"
[[policy.override]]
key = ["basic YWxpY2U6c2VjcmV0"]
limit = { requests = 100, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    for (target, value, expected) in [
        ("/exact", "Bearer leaked-key", 403),
        ("/exact", "bearer leaked-key", 403),
        ("/exact", "BEARER \t leaked-key", 403),
        ("/exact", "Bearer other", 200),
        ("/exact", "Bearer leaked-key x", 400),
        ("/regex", "bEARER   leaked-1", 403),
        ("/regex", "bEARER fresh-1", 200),
        ("/limited", "token   staff", 200),
        ("/limited", "token stranger", 429),
        ("/not", "bearer  good", 200),
        ("/not", "bearer  bad", 403),
        ("/quota", "Token stolen", 403),
        ("/quota", "token stolen", 403),
        ("/quota", "TOKEN  stolen", 403),
        ("/quota", "Token fresh", 429),
        ("/quota", "BASIC  YWxpY2U6c2VjcmV0=", 200),
    ] {
        let (status, text) = ask_http1(&proxy, target, "authorization", value.as_bytes()).await;
        assert_eq!(status, expected, "{target} {value}: {text}");
    }
}

/// Each regex is written as the client sends the value, or as it is usually written.
#[tokio::test]
async fn regexes_match_values_in_each_spelling_that_apps_read_alike() {
    let cases = [
        (
            "authorization",
            "^ApiKey leaked$",
            "ApiKey leaked",
            "ApiKey Leaked",
        ),
        (
            "authorization",
            "^ApiKey leaked$",
            "APIKEY  leaked",
            "ApiKeys leaked",
        ),
        ("authorization", "^apikey", "ApiKey leaked", "Token apikey"),
        (
            "authorization",
            "^bearer leaked$",
            "Bearer leaked",
            "Bearer LEAKED",
        ),
        ("authorization", "^BEARER", "bearer leaked", "Token BEARER"),
        ("authorization", "^OAuth x", "oauth x", "OAuth X"),
        ("authorization", "^DPoP x", "DPoP x", "DPoP y"),
        (
            "authorization",
            "^GoogleLogin auth=",
            "GoogleLogin auth=x",
            "GoogleLogin Auth=x",
        ),
        (
            "authorization",
            r"^SharedAccess\w+ sr=a",
            "SharedAccessSignature sr=a",
            "SharedKey sr=a",
        ),
        (
            "authorization",
            "^AWS4-HMAC-SHA256 Credential=AKIA",
            "AWS4-HMAC-SHA256 Credential=AKIA7",
            "AWS4-HMAC-SHA256 Credential=akia",
        ),
        ("authorization", "^(HOBA|OAuth) x$", "hoba x", "hobax x"),
        ("authorization", "^basic YTo$", "Basic YTo=", "Basic YTpi"),
        ("authorization", "^Basic YTo=$", "basic YTo", "Basic YTpi"),
        ("authorization", "^LEAKED$", "LEAKED", "leaked"),
        ("host", r"^Shop\.", "shop.example", "a.shop.example"),
        (
            "host",
            r"^shop\.example$",
            "SHOP.example.:8443",
            "shop.example.org",
        ),
        ("host", ":8443$", "shop.example:8443", "shop.example:443"),
        (
            "host",
            r"^Shop\.Example:8443$",
            "sHop.example.:8443",
            "shop.example",
        ),
        ("host", r"^\[::1\]:80$", "[0::1]:80", "[::1]:81"),
    ];
    let mut config = String::new();
    for (at, (name, regex, ..)) in cases.iter().enumerate() {
        let condition = format!("headers = {{ {name} = {{ regex = '{regex}' }} }}");
        for (target, conditions) in [
            ("denied", condition.clone()),
            ("excluded", format!("not = {{ {condition} }}")),
            (
                "either",
                format!("any = [{{ query = {{ x = '1' }} }}, {{ {condition} }}]"),
            ),
        ] {
            config += &format!(
                "[[policy]]\nname = '{target}-{at}'\nmatch = {{ path = '/{target}/{at}', {conditions} }}\naction = 'deny'\n"
            );
        }
    }
    let proxy = Proxy::with_echo(&config).await;
    for (at, (name, regex, meant, other)) in cases.into_iter().enumerate() {
        let proxy = &proxy;
        let ask = |target: &str, value: &'static str| {
            let target = format!("/{target}/{at}");
            async move {
                let head = match name {
                    "host" => format!("GET {target} HTTP/1.1\r\nhost: {value}\r\n"),
                    name => format!("GET {target} HTTP/1.1\r\nhost: a\r\n{name}: {value}\r\n"),
                };
                let mut client = RawClient::connect(proxy.address).await;
                client.send(head + "connection: close\r\n\r\n").await;
                client.read_response().await.status
            }
        };
        assert_eq!(ask("denied", meant).await, 403, "{regex}: {meant}");
        assert_eq!(ask("either", meant).await, 403, "{regex}: {meant}");
        assert_eq!(ask("excluded", meant).await, 200, "{regex}: {meant}");
        assert_eq!(ask("denied", other).await, 200, "{regex}: {other}");
        assert_eq!(ask("excluded", other).await, 403, "{regex}: {other}");
    }
    let fields = with_field("authorization", b"apiKEY leaked");
    let fields: Vec<(&str, &[u8])> = fields
        .into_iter()
        .map(|(name, value)| match name {
            ":path" => (name, &b"/denied/0"[..]),
            ":authority" => (name, &b"shop.example"[..]),
            _ => (name, value),
        })
        .collect();
    assert_eq!(ask_http2(&proxy, &fields).await, Some(429), "denied: 403");
}

#[tokio::test]
async fn hosts_in_conditions_and_overrides_have_the_form_of_requests() {
    let config = r#"
[[policy]]
name = "header"
match = { path = "/header", headers = { host = "Shop.Example:443" } }
action = "deny"
[[policy]]
name = "literal"
match = { path = "/literal", hosts = ["[2001:DB8:0::1]"] }
action = "deny"
[[policy]]
name = "key"
match = { path = "/key" }
key = ["header:host"]
limit = { requests = 1, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    let ask = |target: &'static str, host: &'static str| {
        proxy
            .request("GET", target)
            .header("Host", host)
            .send_for_status()
    };
    for host in ["shop.example", "SHOP.example.", "shop.example:8080"] {
        assert_eq!(ask("/header", host).await, 403, "{host}");
    }
    assert_eq!(ask("/header", "b.example").await, 200);
    assert_eq!(ask("/literal", "[2001:db8::0001]:80").await, 403);
    assert_eq!(ask("/key", "a.example").await, 200);
    for host in ["A.example", "a.example.", "a.example:80"] {
        assert_eq!(ask("/key", host).await, 429, "{host}");
    }
}

const SOURCES: &str = r#"
[[policy]]
name = "keys"
match = { path = "/key/**" }
key = ["header:x-user | query:user | cookie:sid | path:/key/{user}"]
limit = { requests = 1000, per = "1h" }
[[policy]]
name = "header"
match = { path = "/deny", headers = { x-plan = "free" } }
action = "deny"
[[policy]]
name = "query"
match = { path = "/deny", query = { plan = "free" } }
action = "deny"
[[policy]]
name = "cookie"
match = { path = "/deny", cookies = { plan = "free" } }
action = "deny"
[[policy]]
name = "absent"
match = { path = "/absent", cookies = { plan = { present = false } } }
action = "deny"
"#;

const HEADER_VALUES: [&[u8]; 10] = [
    b"free\xa0",
    b"\x85free",
    b"free\xc2\xa0",
    b"free\xe2\x80\x83",
    b"\xe3\x80\x80free",
    b"\xef\xbb\xbffree",
    b"free\xc2\x85",
    b"x, free\xa0",
    b"=?utf-8?q?free?=",
    b"=?UTF-8?B?ZnJlZQ==?=",
];

const QUERY_VALUES: [&str; 12] = [
    "free%20",
    "+free",
    "free%0a",
    "free%0D%0A",
    "free%09",
    "free%00",
    "%00free",
    "fr%07ee",
    "free%C2%A0",
    "%E3%80%80free",
    "free%E2%80%8B",
    "%EF%BB%BFfree",
];

const COOKIE_VALUES: [&[u8]; 10] = [
    b"free%20",
    b"free%C2%A0",
    b"free%00",
    b"free,x",
    b"free]",
    b"free[x",
    b"free\"",
    b"f\"ree",
    b"free%7F",
    b"\"free\"x",
];

#[tokio::test]
async fn values_that_apps_trim_or_decode_are_bad_requests() {
    let proxy = Proxy::with_echo(SOURCES).await;
    for value in HEADER_VALUES {
        for (target, name) in [("/key/a", "x-user"), ("/deny", "x-plan")] {
            let (status, text) = ask_http1(&proxy, target, name, value).await;
            assert_eq!(status, 400, "{name}: {}: {text}", value.escape_ascii());
            assert!(text.contains("setting client."), "{text}");
        }
        let status = ask_http2(&proxy, &with_field("x-user", value)).await;
        assert_eq!(status, Some(400), "{}", value.escape_ascii());
    }
    for value in QUERY_VALUES {
        for target in [
            format!("/key/a?user={value}"),
            format!("/deny?plan={value}"),
        ] {
            let reply = proxy.get(&target).await;
            assert_eq!(reply.status, 400, "{target}");
            assert!(reply.text().contains("client.outer_white_space"));
            assert_eq!(ask_http2_path(&proxy, &target).await, Some(400), "{target}");
        }
    }
    for value in COOKIE_VALUES {
        for (target, name) in [
            ("/key/a", "sid="),
            ("/deny", "a=1; plan="),
            ("/absent", "plan="),
        ] {
            let cookie = [name.as_bytes(), value].concat();
            let (status, text) = ask_http1(&proxy, target, "cookie", &cookie).await;
            assert_eq!(status, 400, "{}: {text}", cookie.escape_ascii());
            assert!(text.contains("setting client."), "{text}");
        }
    }
    for cookie in [
        "__Host-sid=x",
        "__secure-sid=x",
        "a=1; __Host-SID=x",
        "a __Secure-sid=x",
    ] {
        let (status, text) = ask_http1(&proxy, "/key/a", "cookie", cookie.as_bytes()).await;
        assert_eq!(status, 400, "{cookie}");
        assert!(text.contains("client.cookie_prefixes"), "{text}");
    }
    for segment in ["alice%20", "%C2%A0alice", "alice%E2%80%83"] {
        let reply = proxy.get(&format!("/key/{segment}")).await;
        assert_eq!(reply.status, 400, "{segment}");
    }
    assert_eq!(proxy.echo().requests().len(), 0);
}

#[tokio::test]
async fn plain_values_and_unused_sources_are_not_rejected() {
    let proxy = Proxy::with_echo(SOURCES).await;
    for value in [
        &b"alice"[..],
        b"al ice",
        b"\xc3\xa9t\xc3\xa9",
        b"a=?b",
        b"a,b",
    ] {
        let (status, text) = ask_http1(&proxy, "/key/a", "x-user", value).await;
        assert_eq!(status, 200, "{}: {text}", value.escape_ascii());
    }
    for value in HEADER_VALUES {
        let (status, _) = ask_http1(&proxy, "/key/a", "x-other", value).await;
        assert_eq!(status, 200, "no policy reads the header");
    }
    for value in QUERY_VALUES {
        let answered = proxy.get(&format!("/key/a?q={value}")).await.status;
        assert_eq!(answered, 200, "{value}");
        let answered = proxy.get(&format!("/x?user={value}")).await.status;
        assert_eq!(answered, 200, "{value}");
    }
    for cookie in [
        "other=a,b",
        "sid=\"x\"",
        "sid=a%20b",
        "__Host-other=1",
        "sid=j:{}",
    ] {
        let (status, text) = ask_http1(&proxy, "/key/a", "cookie", cookie.as_bytes()).await;
        assert_eq!(status, 200, "{cookie}: {text}");
    }
    let (status, _) = ask_http1(&proxy, "/deny", "x-plan", b"gold").await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn each_rejection_of_a_value_has_its_setting() {
    for (setting, target, name, value) in [
        ("outer_white_space", "/key/a", "x-user", &b"free\xa0"[..]),
        ("outer_white_space", "/key/a?user=free%20", "x-other", b"x"),
        ("outer_white_space", "/key/a", "cookie", b"sid=free%20"),
        ("outer_white_space", "/key/a%20", "x-other", b"x"),
        ("ambiguous_header", "/deny", "x-plan", b"=?utf-8?q?free?="),
        ("cookie_octets", "/key/a", "cookie", b"sid=a,b"),
        ("cookie_octets", "/key/a", "cookie", b"sid=a]"),
        ("cookie_prefixes", "/key/a", "cookie", b"__Host-sid=a"),
        ("ambiguous_cookie", "/key/a", "cookie", b"__Host-sid=a"),
        ("ambiguous_cookie", "/key/a", "cookie", b"sid=a]"),
    ] {
        let config = format!("client.{setting} = 'allow'\n{SOURCES}");
        let lenient = Proxy::with_echo(&config).await;
        let (status, text) = ask_http1(&lenient, target, name, value).await;
        assert_eq!(status, 200, "{setting}: {}: {text}", value.escape_ascii());
    }
}

/// A policy that is not enforced never rejects.
#[tokio::test]
async fn a_shadow_policy_rejects_no_value() {
    let config = SOURCES.replace("[[policy]]\n", "[[policy]]\nmode = \"shadow\"\n");
    let proxy = Proxy::with_echo(&config).await;
    for (target, name, value) in [
        ("/key/a", "x-user", &b"free\xa0"[..]),
        ("/key/a?user=free%20", "x-other", b"x"),
        ("/key/a", "cookie", b"sid=a]"),
        ("/deny", "x-plan", b"=?utf-8?q?free?="),
    ] {
        let (status, text) = ask_http1(&proxy, target, name, value).await;
        assert_eq!(status, 200, "{}: {text}", value.escape_ascii());
    }
}

#[tokio::test]
async fn similar_names_of_trusted_headers_are_bad_requests() {
    let config = "client.trusted_headers = ['x-plan', 'x-tenant-id']\n";
    let proxy = Proxy::with_echo(config).await;
    for name in ["X_Plan", "x_plan", "X.Plan", "x-tenant_id", "X_Tenant_Id"] {
        let (status, _) = ask_http1(&proxy, "/", name, b"gold").await;
        assert_eq!(status, 400, "{name}");
        let lower = name.to_ascii_lowercase();
        let status = ask_http2(&proxy, &with_field(&lower, b"gold")).await;
        assert_eq!(status, Some(400), "{name}");
    }
    for options in ["x-plan", "close, X-Plan", "keep-alive,x-tenant-id"] {
        let mut client = RawClient::connect(proxy.address).await;
        let head =
            format!("GET / HTTP/1.1\r\nHost: a\r\nX-Plan: a\r\nConnection: {options}\r\n\r\n");
        let status = client.request(head).await.status;
        assert_eq!(status, 400, "{options}");
    }
    let (status, _) = ask_http1(&proxy, "/", "trailer", b"x-plan").await;
    assert_eq!(status, 400);
    assert_eq!(proxy.echo().requests().len(), 0);
    let (status, _) = ask_http1(&proxy, "/", "x-plan", b"gold").await;
    assert_eq!(status, 200);
    let (status, _) = ask_http1(&proxy, "/", "x_other", b"gold").await;
    assert_eq!(status, 200);
}

/// WSGI apps read `X-Plan` and `x_plan` as one header.
#[tokio::test]
async fn other_spellings_of_headers_with_underscores_are_bad_requests() {
    let config = "client.trusted_proxies = ['127.0.0.1']
        client.trusted_headers = ['x_gw']
        client.ip_header = 'x_real_client'
        defaults.mark_header = 'x-tide_over'
        [[policy]]
        name = 'denied'
        match = { headers = { x_plan = 'free' } }
        action = 'deny'
        [[policy]]
        name = 'keyed'
        key = ['header:x_tenant']
        cost = { header = 'x_cost' }
        limit = { requests = 1000, per = '1h' }";
    let proxy = Proxy::with_echo(config).await;
    for name in [
        "X-Plan",
        "x.plan",
        "X-Gw",
        "X-Real-Client",
        "x-real_client",
        "x-tenant",
        "X-Cost",
        "X-Tide-Over",
    ] {
        let (status, _) = ask_http1(&proxy, "/", name, b"1").await;
        assert_eq!(status, 400, "{name}");
        let lower = name.to_ascii_lowercase();
        let status = ask_http2(&proxy, &with_field(&lower, b"1")).await;
        assert_eq!(status, Some(400), "{name}");
    }
    assert_eq!(proxy.echo().requests().len(), 0);
    for name in [
        "x_plan",
        "x_gw",
        "x_tenant",
        "x_cost",
        "x-tide_over",
        "x_other",
        "x-other",
    ] {
        let (status, _) = ask_http1(&proxy, "/", name, b"1").await;
        assert_eq!(status, 200, "{name}");
    }
    let (status, _) = ask_http1(&proxy, "/", "x_plan", b"free").await;
    assert_eq!(status, 403);
}

#[tokio::test]
async fn the_check_listener_rejects_the_same_values() {
    let config = format!(
        "client.trusted_proxies = ['127.0.0.1']\n[check]\naddress = '127.0.0.1:0'\n{SOURCES}"
    );
    let proxy = Proxy::setup(&config).start().await;
    let check = proxy.logged_address("check listening").unwrap();
    for (value, expected) in [
        (&b"free"[..], 200),
        (b"free\xa0", 400),
        (b"free\xa0,x", 400),
        (b"=?utf-8?q?free?=", 400),
    ] {
        let mut client = RawClient::connect(check).await;
        let head = b"GET /check/envoy/key/a HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-User: ";
        client.send([head, value, b"\r\n\r\n"].concat()).await;
        let reply = client.read_response().await;
        assert_eq!(reply.status, expected, "{}", value.escape_ascii());
    }
    let mut client = FrameClient::connect(check, &[]).await;
    let mut fields = get_fields_with(":path", "/check/envoy/key/a");
    fields.push(("x-user", "free "));
    client.send(request_frame(1, &fields)).await;
    let answer = client.wait_for_kind(HEADERS).await;
    assert_eq!(answer.status(), Some(400));
}

/// Envoy may pass on a header as the client sent it, while the app reads it trimmed.
#[tokio::test]
async fn descriptor_values_are_trimmed() {
    let config = format!(
        "{RLS_LISTENER}
[[policy]]
name = 'user'
match = {{ domain = 'edge', descriptors = {{ user = '*' }} }}
key = ['descriptor:user']
limit = {{ requests = 1, per = '1h' }}
[[policy.override]]
key = ['stolen ']
action = 'deny'
[[policy]]
name = 'plan'
match = {{ domain = 'edge', descriptors = {{ plan = 'free ' }} }}
action = 'deny'\n"
    );
    let mut client = ServiceClient::start(&config).await;
    let mut ask = async |name: &str, value: &str| {
        let answer = client.ask_one_descriptor(&[(name, value)]).await;
        answer.overall_code().as_str_name().to_owned()
    };
    assert_eq!(ask("user", "alice").await, "OK");
    for value in [
        "alice ",
        " alice",
        "alice\u{a0}",
        "\talice",
        "alice\0",
        "alice",
    ] {
        assert_eq!(ask("user", value).await, "OVER_LIMIT", "{value:?}");
    }
    for value in ["free", "free ", "\u{3000}free"] {
        assert_eq!(ask("plan", value).await, "OVER_LIMIT", "{value:?}");
    }
    assert_eq!(ask("user", "stolen\u{2003}").await, "OVER_LIMIT");
    assert_eq!(ask("user", "bob").await, "OK");
}
