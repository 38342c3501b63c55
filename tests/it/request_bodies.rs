//! Keys, conditions and estimates from the start of a request's body.

use crate::support::hex_encode;
use crate::support::prelude::*;
use crate::support::upstream::hash_body;
use serde_json::json;
use sha2::{Digest, Sha256};

/// Posts a body with a media type and returns the response.
async fn post(
    proxy: &Proxy,
    target: &str,
    media_type: &str,
    body: impl Into<Vec<u8>>,
) -> RawResponse {
    let request = proxy.request("POST", target);
    request
        .header("content-type", media_type)
        .body(body)
        .send()
        .await
}

async fn post_json(proxy: &Proxy, target: &str, body: impl Into<Vec<u8>>) -> RawResponse {
    post(proxy, target, "application/json", body).await
}

/// Checks that the upstream received the body unchanged.
fn expect_received(echo: &RawResponse, body: &str) {
    let sha256 = hex_encode(&Sha256::digest(body));
    assert_eq!(echo.json()["body_sha256"], sha256, "{body}");
}

const BY_MODEL: &str = r#"
[[policy]]
name = "model"
key = ["body:/model"]
limit = { requests = 100, per = "1h" }
"#;

#[tokio::test]
async fn each_value_in_the_body_has_its_own_quota_and_the_app_gets_the_body() {
    let proxy = Proxy::with_echo(BY_MODEL).await;
    let bodies = [
        (r#"{"model":"a","n":1}"#, 99),
        (r#"{"n":1,"model":"b"}"#, 99),
        ("{\"model\"\n:\t\"\\u0061\"}", 98),
        ("\u{feff}{\"model\":\"a\"}", 97),
        (r#"{"model":5}"#, 99),
        (r#"{"model":"5"}"#, 98),
        (r#"{"model":true}"#, 99),
    ];
    for (body, remaining) in bodies {
        let response = post_json(&proxy, "/", body).await;
        response.expect_status(200);
        assert_eq!(response.remaining("model"), Some(remaining), "{body}");
        expect_received(&response, body);
    }
    let form = post(
        &proxy,
        "/",
        "application/x-www-form-urlencoded",
        "x=1&model=%61",
    )
    .await;
    assert_eq!(form.remaining("model"), Some(96));
}

/// What apps may read differently shares one quota with requests without the value.
#[tokio::test]
async fn a_body_that_can_be_read_in_several_ways_lacks_the_value() {
    let proxy = Proxy::with_echo(BY_MODEL).await;
    let long = format!(r#"{{"model":"a","pad":"{}"}}"#, "x".repeat(65_536));
    let utf16: Vec<u8> = r#"{"model":"a"}"#.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let deep = format!(r#"{{"model":"a","x":{}}}"#, "[".repeat(10_000));
    let json = "application/json";
    let unreadable: [(&str, &[u8]); 34] = [
        (json, br#"{"model":"a","model":"b"}"#),
        (json, br#"{"model":"a","Model":"b"}"#),
        (json, br#"{"MODEL":"a"}"#),
        (json, br#"{"mo_del":"a"}"#),
        (json, br#"{"model":"a","\u006dodel":"b"}"#),
        (json, br#"{"model":["a"]}"#),
        (json, br#"{"model":{"a":1}}"#),
        (json, br#"{"model":1.5}"#),
        (json, br#"{"model":5.0}"#),
        (json, br#"{"model":-0}"#),
        (json, br#"{"model":1e400}"#),
        (json, br#"{"model":"\ud800"}"#),
        (json, br#"{"model":"a "}"#),
        (json, b"{\"model\":\"\xff\"}"),
        (json, br#"[{"model":"a"}]"#),
        (json, br#"{"model":"a"} {"model":"b"}"#),
        (json, br#"{"model":"a",}"#),
        (json, br#"{'model':'a'}"#),
        (json, br#"{"model":"a"/**/}"#),
        (json, br#"{"model":"a","x":01}"#),
        (json, br#"{"model":"a""#),
        (json, long.as_bytes()),
        (json, &utf16),
        (json, deep.as_bytes()),
        ("application/json; charset=utf-16", br#"{"model":"a"}"#),
        (
            "application/json; charset=utf-8; charset=utf-7",
            br#"{"model":"a"}"#,
        ),
        (json, br#""a""#),
        ("text/plain", br#"{"model":"a"}"#),
        ("application/x-www-form-urlencoded", b"model=a&model=b"),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\n"),
        ("application/x-www-form-urlencoded", br#"{"model":"a"}"#),
        ("application/x-www-form-urlencoded", br#"{"x":"&model=b&"}"#),
        ("application/x-www-form-urlencoded", b"model[]=a"),
        ("application/x-www-form-urlencoded", b"Model=a"),
    ];
    for (index, (media_type, body)) in (1..).zip(unreadable) {
        let response = post(&proxy, "/", media_type, body).await;
        let text = String::from_utf8_lossy(&body[..body.len().min(60)]);
        assert_eq!(
            response.remaining("model"),
            Some(100 - index),
            "{media_type} {text}"
        );
    }
    // The same quota as without a body.
    let used = u64::try_from(unreadable.len()).unwrap();
    let response = proxy.get("/").await;
    assert_eq!(response.remaining("model"), Some(99 - used));
    let gzip = proxy.request("POST", "/").header("content-type", json);
    let gzip = gzip
        .header("content-encoding", "gzip")
        .body(r#"{"model":"a"}"#);
    assert_eq!(gzip.send().await.remaining("model"), Some(98 - used));
}

fn tool_calls(missing_key: &str) -> String {
    format!(
        r#"
[[policy]]
name = "calls"
key = ["client_ip"]
match = {{ path = "/mcp", body = {{ "/method" = "tools/call", "/params/name" = ["search", "fetch"] }} }}
missing_key = "{missing_key}"
limit = {{ requests = 1, per = "1h" }}
"#
    )
}

/// Bodies of other calls, and of ones that apps may take for a limited call.
const OTHER_CALLS: [&str; 3] = [
    r#"{"method":"tools/list"}"#,
    r#"{"method":"tools/call","params":{"name":"other"}}"#,
    r#"{"params":{"name":"search"}}"#,
];
const DISGUISED_CALLS: [&str; 4] = [
    r#"{"method":"tools/list","method":"tools/call","params":{"name":"search"}}"#,
    r#"[{"method":"tools/call","params":{"name":"search"}}]"#,
    r#"{"Method":"tools/call","params":{"name":"search"}}"#,
    r#"{"method":"tools/call","params":{"name":"search"},}"#,
];

#[tokio::test]
async fn a_condition_on_the_body_selects_calls_and_no_spelling_evades_it() {
    let call = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"search"}}"#;
    for (missing_key, disguised) in [("shared", 429), ("skip", 200), ("reject", 400)] {
        let proxy = Proxy::with_echo(&tool_calls(missing_key)).await;
        for body in OTHER_CALLS {
            for _ in 0..2 {
                let response = post_json(&proxy, "/mcp", body).await;
                assert_eq!(response.status, 200, "{body}");
            }
        }
        post_json(&proxy, "/mcp", call).await.expect_status(200);
        post_json(&proxy, "/mcp", call).await.expect_status(429);
        post_json(&proxy, "/elsewhere", call)
            .await
            .expect_status(200);
        proxy.get("/mcp").await.expect_status(200);
        for body in DISGUISED_CALLS {
            let response = post_json(&proxy, "/mcp", body).await;
            assert_eq!(response.status, disguised, "{missing_key} {body}");
        }
    }
}

#[tokio::test]
async fn an_unreadable_body_gains_no_exemption() {
    let config = r#"
[[policy]]
name = "free"
priority = 1
action = "allow"
match = { body = { "/plan" = "free" } }
[[policy]]
name = "all"
match = { not = { body = { "/plan" = "trial" } } }
limit = { requests = 2, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    for body in [r#"{"plan":"free"}"#, r#"{"plan":"trial"}"#] {
        for _ in 0..4 {
            post_json(&proxy, "/", body).await.expect_status(200);
        }
    }
    for (body, status) in [
        (r#"{"plan":"free","Plan":"x"}"#, 200),
        (r#"{"plan":"trial","plan":"trial"}"#, 200),
        (r#"{"plan":"trial","plan":"trial"}"#, 429),
    ] {
        let response = post_json(&proxy, "/", body).await;
        assert_eq!(response.status, status, "{body}");
    }
}

/// A body that can't be read decides only if the result depends on it.
#[tokio::test]
async fn an_unreadable_body_is_irrelevant_where_another_alternative_matches() {
    for (missing_key, statuses) in [
        ("shared", [[200, 429], [200, 429], [200, 429]]),
        ("skip", [[200, 429], [200, 200], [200, 429]]),
        ("reject", [[200, 429], [400, 400], [200, 429]]),
    ] {
        let config = format!(
            r#"
[[policy]]
name = "some"
key = ["path"]
match = {{ any = [{{ path = "/a" }}, {{ body = {{ "/x" = "1" }} }}] }}
missing_key = "{missing_key}"
limit = {{ requests = 1, per = "1h" }}
"#
        );
        let proxy = Proxy::with_echo(&config).await;
        for (index, target) in ["/a", "/b", "/c"].into_iter().enumerate() {
            let (media_type, body) = match target {
                "/c" => ("application/json", r#"{"x":"1"}"#),
                _ => ("text/plain", "x"),
            };
            for status in statuses[index] {
                let response = post(&proxy, target, media_type, body).await;
                assert_eq!(response.status, status, "{missing_key} {target}");
            }
        }
    }
}

#[tokio::test]
async fn an_estimate_is_what_the_request_states() {
    let config = r#"
[[policy]]
name = "tokens"
limit = { requests = 100000, per = "100d" }
cost.actual = "response_header:x-units"
cost.estimate = [
    { request_json = "/max_tokens", default = 500, max = 8000 },
    { request_bytes_per_unit = 10, max = 1000, weight = 0.5 },
]
"#;
    let proxy = Proxy::with_echo(config).await;
    let mut left = 100_000;
    let number = "9".repeat(60_000);
    let padded = json!({ "max_tokens": 7, "pad": "x".repeat(70_000) }).to_string();
    // Half a unit for each 10 bytes, rounded up after the sum.
    for (body, units) in [
        (r#"{"max_tokens":100}"#.to_owned(), 101),
        (r#"{"max_tokens": 200, "x": 1}"#.to_owned(), 202),
        (r#"{"max_tokens": 2e2}"#.to_owned(), 8001),
        (r#"{"max_tokens":null}"#.to_owned(), 501),
        ("{}".to_owned(), 501),
        (r#"{"max_tokens":9000}"#.to_owned(), 8001),
        (r#"{"max_tokens":-1}"#.to_owned(), 8001),
        (r#"{"max_tokens":"100"}"#.to_owned(), 8001),
        (r#"{"max_tokens":100,"max_tokens":1}"#.to_owned(), 8002),
        (r#"{"max_tokens":1,"maxTokens":1}"#.to_owned(), 8002),
        (format!(r#"{{"max_tokens":{number}}}"#), 8500),
        (padded, 8500),
    ] {
        let response = post_json(&proxy, "/", body.as_str()).await;
        left -= units;
        let start = &body[..body.len().min(60)];
        assert_eq!(response.remaining("tokens"), Some(left), "{start}");
    }
    let response = proxy.get("/").await;
    assert_eq!(
        response.remaining("tokens"),
        Some(left - 500),
        "no body: the default"
    );
}

/// Starts a request with a body in chunks, of which `first` is sent.
async fn start_upload(proxy: &Proxy, first: &str) -> RawClient {
    let head = "POST / HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    proxy
        .send_raw(format!("{head}{:x}\r\n{first}\r\n", first.len()))
        .await
}

#[tokio::test]
async fn a_body_in_single_bytes_is_read_and_one_that_ends_early_costs_nothing() {
    let proxy = Proxy::with_echo(BY_MODEL).await;
    let mut client = start_upload(&proxy, "{").await;
    for byte in r#""model":"a"}"#.chars() {
        client.send(format!("1\r\n{byte}\r\n")).await;
    }
    client.send("0\r\n\r\n").await;
    let response = client.read_response().await;
    response.expect_status(200);
    assert_eq!(response.remaining("model"), Some(99));
    expect_received(&response, r#"{"model":"a"}"#);
    let received = proxy.echo().requests().len();
    let mut client = start_upload(&proxy, r#"{"model":"a""#).await;
    client.send("not a size\r\n").await;
    client.read_response().await.expect_status(400);
    assert_eq!(proxy.echo().requests().len(), received, "nothing was sent");
    let response = post_json(&proxy, "/", r#"{"model":"a"}"#).await;
    assert_eq!(response.remaining("model"), Some(98));
}

#[tokio::test]
async fn the_upstream_gets_the_start_of_a_long_body_before_its_end() {
    let config = BY_MODEL.to_owned() + "max_scan = \"1KiB\"\n";
    let (send, mut started) = tokio::sync::mpsc::channel(1);
    let upstream = Upstream::with_handler(move |request: Request<Incoming>| {
        let send = send.clone();
        async move {
            let mut body = request.into_body();
            let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
            send.send(first.len()).await.unwrap();
            let (length, _) = hash_body(body).await;
            let total = length + u64::try_from(first.len()).unwrap();
            Response::new(full_body(total.to_string()))
        }
    })
    .await;
    let proxy = Proxy::start(&config, upstream.address).await;
    let first = format!(r#"{{"model":"{}"#, "x".repeat(1500));
    let mut client = start_upload(&proxy, &first).await;
    assert!(in_time(started.recv()).await.unwrap() > 1024);
    client.send("2\r\n\"}\r\n0\r\n\r\n").await;
    let response = client.read_response().await;
    assert_eq!(response.text(), (first.len() + 2).to_string());
}

#[tokio::test]
async fn bodies_over_http2_and_after_100_continue_are_read() {
    let proxy = Proxy::with_echo(BY_MODEL).await;
    let mut h2 = open_http2_connection(proxy.address).await;
    for remaining in [99, 98] {
        let request = Request::post("http://a/").header("content-type", "application/json");
        let request = request
            .body(Full::from(r#"{"model":"a"}"#).boxed())
            .unwrap();
        let response = await_response(h2.send_request(request)).await;
        let limits = response.headers()["ratelimit"].to_str().unwrap().to_owned();
        assert!(limits.contains(&format!("r={remaining}")), "{limits}");
    }
    let head = "POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-type: application/json\r\ncontent-length: 13\r\n\r\n";
    let mut client = proxy.send_raw(head).await;
    let interim = client.read_any_response(true).await;
    assert_eq!(interim.status, 100);
    client.send(r#"{"model":"a"}"#).await;
    let response = client.read_response().await;
    assert_eq!(response.remaining("model"), Some(97));
}

#[tokio::test]
async fn explain_reads_the_body_of_a_curl_line_and_of_a_request_to_the_admin_port() {
    let config = ConfigFile::new(&tool_calls("shared"));
    let call = r#"{"method":"tools/call","params":{"name":"fetch"}}"#;
    let curl = format!("curl --json '{call}' http://a/mcp");
    let explained = config.run_successfully(&["explain", "--curl", &curl]).await;
    assert!(
        explained.contains("matches: key calls/127.0.0.1"),
        "{explained}"
    );
    let list = r#"{"method":"tools/list"}"#;
    let words = [
        "explain",
        "POST",
        "/mcp",
        "-H",
        "content-type: application/json",
        "--body",
        list,
    ];
    let explained = config.run_successfully(&words).await;
    assert!(
        explained.contains("the condition on body field /method does not hold"),
        "{explained}"
    );
    let proxy = Proxy::with_token(&tool_calls("shared")).await;
    let headers = json!({ "content-type": "application/json" });
    let described = json!({ "method": "POST", "url": "/mcp", "headers": headers, "body": call });
    let request = proxy.admin_request("POST", "/explain");
    let request = request.header("content-type", "application/json");
    let explained = request.body(described.to_string()).send().await.json();
    assert_eq!(explained["policies"][0]["result"], "limits", "{explained}");
}
