//! The admin API: policy counts, the most limited keys, its errors, and the log level.

use crate::support::prelude::*;

pub(crate) const POLICIES: &str = r#"
[[policy]]
name = "free"
match = { path = "/free" }
action = "allow"
[[policy]]
name = "shut"
match = { path = "/shut/**" }
action = "deny"
[[policy]]
name = "api"
match = { path = "/api/**" }
key = ["header:x-user", "path:/api/{service}/**"]
block_for = "1h"
limits = [
  { requests = 2, per = "1h" },
  { requests = 100, per = "1d", algorithm = "token_bucket", burst = 50, name = "daily" },
]
[[policy]]
name = "all"
match = { path = "/all" }
limit = { requests = 2, per = "1h" }
[[policy]]
name = "candidate"
mode = "shadow"
match = { path = "/all" }
limit = { requests = 1, per = "1h" }
[[policy]]
name = "asleep"
mode = "off"
limit = { requests = 1, per = "1s" }
"#;

pub(crate) fn sum_series(series: &Value) -> u64 {
    series
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_u64)
        .sum()
}

pub(crate) fn assert_problem(reply: &RawResponse, status: u16) -> String {
    let body = reply.json();
    assert_eq!(
        (reply.status, reply.header("content-type"), &body["status"]),
        (status, Some("application/problem+json"), &json!(status)),
        "{body}"
    );
    body["detail"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn policies_report_their_settings_and_counts() {
    let proxy = Proxy::with_token(POLICIES).await;
    assert_eq!(proxy.get_statuses("/all", 3).await, [200, 200, 429]);
    assert_eq!(proxy.get_statuses("/free", 1).await, [200]);
    assert_eq!(proxy.get_statuses("/shut/x", 2).await, [403, 403]);
    let all = proxy
        .wait_for_policy("all", |report| {
            sum_series(&report["last_hour"]["rejected"]) == 1
        })
        .await;
    assert_fields(&all, json!({ "allowed": 2, "rejected": 1, "degraded": 0 }));
    assert_eq!(sum_series(&all["last_hour"]["allowed"]), 2);
    assert_eq!(sum_series(&all["last_day"]["allowed"]), 2);
    assert_eq!(sum_series(&all["last_day"]["rejected"]), 1);
    assert_eq!(
        all["last_hour"]["blocked"],
        Value::Null,
        "a count of zero has no series"
    );
    assert_fields(
        &all,
        json!({ "mode": "enforce", "action": "limit", "key": [] }),
    );
    assert_eq!(
        all["limits"],
        json!([{ "name": "all", "algorithm": "sliding_log", "requests": 2, "per": "1h", "per_s": 3600.0 }])
    );
    let api = proxy.wait_for_policy("api", |_| true).await;
    assert_eq!(api["key"], json!(["header x-user", "path segment"]));
    assert_eq!(api["block_s"], 3600.0);
    assert_eq!(api["limits"][1]["burst"], 50);

    let report = proxy.get_json("/policies").await;
    let items = report["policies"].as_array().unwrap().iter();
    let names: Vec<&str> = items.map(|p| p["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["free", "shut", "api", "all", "candidate", "asleep"]);
    assert_eq!(report["total"], 6);
    assert_eq!(report["policies"][5]["mode"], "off");
    let (minutes, hours) = (
        report["minutes"].as_array().unwrap(),
        report["hours"].as_array().unwrap(),
    );
    assert_eq!((minutes.len(), hours.len()), (60, 24));
    let newest = minutes[59].as_u64().unwrap();
    assert!(newest.is_multiple_of(60), "{newest}");
    assert!(newest.abs_diff(unix_s()) < 120, "{newest}");
    // The same words as in the output of `check`.
    let checked = run_command(tidegate_command().arg("check").arg(proxy.config_path())).await;
    let items = report["policies"].as_array().unwrap().iter();
    let words: Vec<&str> = items.map(|p| p["words"].as_str().unwrap()).collect();
    for line in checked.stdout.lines() {
        assert!(words.contains(&line), "{line:?} is not in {words:#?}");
    }

    let page = proxy
        .get_json("/policies?limit=2&offset=1&history=false")
        .await;
    assert_eq!(page["total"], 6);
    assert_eq!(page["policies"].as_array().unwrap().len(), 2);
    assert_eq!(page["policies"][0]["name"], "shut");
    assert_eq!(page["minutes"], Value::Null);
    assert_eq!(page["policies"][0]["denied"], 2);
}

#[tokio::test]
async fn a_reload_shows_the_new_policies_and_keeps_the_history_of_the_old() {
    let text = |requests: u32, name: &str| {
        format!("[[policy]]\nname = {name:?}\nlimit = {{ requests = {requests}, per = '1h' }}\n")
    };
    let proxy = Proxy::with_echo(&text(9, "p")).await;
    assert_eq!(proxy.get_statuses("/", 2).await, [200; 2]);
    proxy
        .wait_for_policy("p", |report| {
            sum_series(&report["last_hour"]["allowed"]) == 2
        })
        .await;
    let mark = proxy.log_mark();
    proxy.write_config(&format!("{}{}", text(30, "p"), text(40, "q")));
    proxy.wait_for_message("configuration reloaded", mark).await;
    assert_eq!(proxy.get_statuses("/", 1).await, [200]);
    let p = proxy
        .wait_for_policy("p", |report| {
            sum_series(&report["last_hour"]["allowed"]) == 3
        })
        .await;
    assert_eq!(p["limits"][0]["requests"], 30);
    assert!(
        p["words"].as_str().unwrap().contains("at most 30 requests"),
        "{p}"
    );
    proxy
        .wait_for_policy("q", |report| {
            sum_series(&report["last_hour"]["allowed"]) == 1
        })
        .await;
    let overview = proxy.get_json("/overview").await;
    assert_fields(&overview, json!({ "generation": 2, "policies": 2 }));
    assert!(
        overview["last_reload"]["at_s"]
            .as_u64()
            .unwrap()
            .abs_diff(unix_s())
            < 30,
        "{overview}"
    );
    let mark = proxy.log_mark();
    proxy.write_config("nonsense = 1");
    proxy
        .wait_for_message("new configuration rejected", mark)
        .await;
    let overview = proxy.get_json("/overview").await;
    assert!(
        overview["last_reload"]["errors"][0]
            .as_str()
            .unwrap()
            .contains("nonsense"),
        "{overview}"
    );
    assert_eq!(overview["last_reload"]["refused"], 1);
}

#[tokio::test]
async fn the_overview_has_the_fields_of_the_dashboard() {
    let proxy = Proxy::with_token(POLICIES).await;
    assert_eq!(proxy.get_statuses("/all", 3).await, [200, 200, 429]);
    assert_eq!(proxy.get_with("/", "Host", "a b").await.status, 400);
    let report = eventually("the malformed request", TEST_TIMEOUT, async || {
        let report = proxy.get_json("/overview?seconds=600").await;
        (sum_series(&report["requests"]["seconds"]["malformed"]) == 1).then_some(report)
    })
    .await;
    let seconds = &report["requests"]["seconds"];
    for (name, count) in [
        ("allowed", 2),
        ("rejected", 1),
        ("malformed", 1),
        ("2xx", 2),
        ("4xx", 2),
        ("5xx", 0),
    ] {
        assert_eq!(sum_series(&seconds[name]), count, "{name}: {seconds}");
    }
    assert_eq!(seconds["at"].as_array().unwrap().len(), 600);
    assert_fields(
        &report,
        json!({ "requests": { "total": { "allowed": 2 } }, "http": { "codes": { "429": 1 } } }),
    );
    assert_fields(&report, json!({ "status": "ready", "generation": 1 }));
    assert_fields(&report["store"], json!({ "kind": "memory", "up": true }));
    assert!(
        report["store"]["memory"]["keys"].as_u64().unwrap() >= 1,
        "{report}"
    );
    assert_eq!(report["instance"]["id"].as_str().unwrap().len(), 32);
    assert_eq!(report["instance"]["version"], env!("CARGO_PKG_VERSION"));
    assert_fields(
        &report,
        json!({ "connections": { "max": 10_000 }, "hints": [] }),
    );
    assert!(report["latency"]["window_s"].is_u64(), "{report}");
    assert_eq!(
        proxy.get_json("/overview?seconds=0").await["requests"]["seconds"]["at"],
        json!([])
    );
}

#[tokio::test]
async fn the_most_limited_keys_are_listed_with_hostile_values_escaped() {
    let proxy = Proxy::with_token(POLICIES).await;
    let hostile = "<img src=x>\u{e9}\"";
    for (user, times) in [("ann", 6), ("bob", 3), (hostile, 4)] {
        for _ in 0..times {
            proxy.status_for_user(user, "/api/pay/1").await;
        }
    }
    assert_eq!(
        proxy
            .get_statuses("/shut/%C2%9B31m/%3Cb%3E?secret=1", 2)
            .await,
        [403; 2]
    );
    assert_eq!(proxy.get_statuses("/all", 3).await, [200, 200, 429]);
    let reply = proxy.admin_request("GET", "/top?n=2").send().await;
    assert!(
        reply
            .body
            .iter()
            .all(|byte| *byte == b'\n' || (b' '..=b'~').contains(byte))
    );
    assert!(!reply.text().contains(['<', '>']), "{}", reply.text());
    let report = reply.json();
    // Two requests of each key were admitted. A shadow policy's refusals count too.
    assert_eq!(report["keys"]["refused"], 4 + 1 + 2 + 1 + 2);
    let worst =
        |key: &str, count: u64| json!({ "policy": "api", "key": key, "count": count, "error": 0 });
    let entries = report["keys"]["entries"].as_array().unwrap();
    assert_eq!(entries[0], worst("api/ann/pay", 4));
    assert_eq!(entries.len(), 2);
    let of_api = proxy.get_json("/top?policy=api").await;
    let items = of_api["keys"]["entries"].as_array().unwrap().iter();
    let keys: Vec<&str> = items.map(|e| e["key"].as_str().unwrap()).collect();
    assert_eq!(
        keys,
        [
            "api/ann/pay",
            "api/%3Cimg%20src%3Dx%3E%C3%A9%22/pay",
            "api/bob/pay"
        ]
    );
    assert_eq!(
        of_api["paths"]["entries"],
        json!([{ "policy": "api", "path": "/api/pay/1", "count": 7, "error": 0 }])
    );
    let of_shut = proxy.get_json("/top?policy=shut").await;
    assert_eq!(
        of_shut["keys"]["entries"],
        json!([]),
        "the policy shut has no keys"
    );
    assert_eq!(of_shut["paths"]["entries"][0]["count"], 2);
    assert!(!of_shut.to_string().contains("secret"), "{of_shut}");
    assert!(
        report["keys"]["since_s"]
            .as_u64()
            .unwrap()
            .abs_diff(unix_s())
            < 60,
        "{report}"
    );
}

#[tokio::test]
async fn invalid_requests_get_a_descriptive_problem() {
    let proxy = Proxy::with_token(POLICIES).await;
    for (target, status, words) in [
        ("/keys", 400, "policy=NAME is missing"),
        (
            "/keys?policy=nope&key=x",
            404,
            "unknown policy \"nope\"; expected one of all, api",
        ),
        (
            "/keys?policy=api&key=x",
            400,
            "has 2 values (header x-user, path segment), not 1",
        ),
        ("/keys?policy=all&key=", 400, "has 0 values, not 1"),
        ("/keys?policy=free", 400, "policy free has no limits"),
        ("/keys?policy=api&policy=all", 400, "more than once"),
        (
            "/keys?polcy=api",
            400,
            "unknown parameter \"polcy\"; expected policy, key",
        ),
        ("/policies?limit=1001", 400, "from 0 to 1000"),
        ("/policies?history=maybe", 400, "expected true or false"),
        ("/top?n=-1", 400, "from 0 to 500"),
        ("/overview?seconds=601", 400, "from 0 to 600"),
        (
            "/config?x",
            400,
            "unknown parameter \"x\"; expected no parameter",
        ),
        ("/nowhere", 404, "/nowhere does not exist"),
        ("/policies/", 404, "/openapi.json"),
    ] {
        let detail = assert_problem(&proxy.admin_request("GET", target).send().await, status);
        assert!(detail.contains(words), "{target}: {detail}");
    }
    let wrong = proxy.admin_request("PATCH", "/keys").send().await;
    assert_problem(&wrong, 405);
    assert_eq!(wrong.header("allow"), Some("GET,HEAD,DELETE"));
    let post = |body: &str| {
        let body = body.to_owned().into_bytes();
        proxy
            .admin_request("POST", "/explain")
            .header("Content-Type", "application/json")
            .body(body)
    };
    for (body, words) in [
        ("", "the body is not JSON"),
        ("[]", "expected a JSON object"),
        ("{\"url\": 1}", "url: expected a string"),
        ("{}", "url is missing"),
        ("{\"url\":\"/\",\"uri\":1}", "unknown field \"uri\""),
        ("{\"url\":\"/\",\"ip\":\"x\"}", "invalid IP address"),
        (
            "{\"url\":\"/\",\"headers\":[1]}",
            "expected an object of texts",
        ),
        (
            "{\"url\":\"/\",\"headers\":{\"a b\":\"\"}}",
            "header name \"a b\"",
        ),
        (
            "{\"url\":\"/\",\"headers\":{\"a\":\"\\n\"}}",
            "header value",
        ),
        ("{\"url\":\"/\",\"method\":\"G T\"}", "method \"G T\""),
        ("{\"url\":\"http://\"}", "no URL"),
    ] {
        let detail = assert_problem(&post(body).send().await, 400);
        assert!(detail.contains(words), "{body}: {detail}");
    }
    assert_problem(
        &proxy
            .admin_request("POST", "/explain")
            .body(b"{}".to_vec())
            .send()
            .await,
        415,
    );
    assert_problem(
        &post(&format!("{{\"url\":\"/{}\"}}", "x".repeat(70_000)))
            .send()
            .await,
        413,
    );
}

#[tokio::test]
async fn each_route_accepts_exactly_the_methods_in_the_openapi_document() {
    let proxy = Proxy::with_token(POLICIES).await;
    let document = proxy.get_json("/openapi.json").await;
    for (path, methods) in document["paths"].as_object().unwrap() {
        let items = methods.as_object().unwrap().keys();
        let mut documented: Vec<String> = items.map(|method| method.to_uppercase()).collect();
        if documented.contains(&"GET".to_owned()) {
            documented.push("HEAD".to_owned());
        }
        let target = path.replace("{policy}", "api");
        let other = proxy.admin_request("TRACE", &target).send().await;
        assert_problem(&other, 405);
        let mut allowed: Vec<&str> = other.header("allow").unwrap().split(',').collect();
        documented.sort();
        allowed.sort_unstable();
        assert_eq!(documented, allowed, "{path}");
    }
}

#[tokio::test]
async fn cross_site_requests_are_rejected_and_security_headers_are_set() {
    let proxy = Proxy::with_token(POLICIES).await;
    let order = |lines: &[(&str, &str)]| {
        let request = proxy.authorized_request("PUT", "/log-level");
        let ask = request.header("Content-Type", "application/json");
        let ask = lines
            .iter()
            .fold(ask, |ask, (name, value)| ask.header(name, value));
        ask.body(b"{\"level\":\"debug\"}".to_vec()).send()
    };
    for foreign in [
        ("Origin", "http://evil.example"),
        ("Origin", "null"),
        ("Sec-Fetch-Site", "cross-site"),
    ] {
        let detail = assert_problem(&order(&[foreign]).await, 403);
        assert!(detail.contains("another page"), "{detail}");
    }
    assert_eq!(proxy.get_json("/log-level").await["level"], "info");
    let own = [
        ("Origin", "http://localhost"),
        ("Sec-Fetch-Site", "same-origin"),
    ];
    assert_eq!(order(&own).await.status, 200);
    assert_eq!(proxy.get_json("/log-level").await["level"], "debug");
    // Cross-site subresource requests are rejected too. A navigation from a link is accepted.
    let foreign = |mode: &str, dest: &str| {
        let request = proxy.admin_request("GET", "/keys?policy=all");
        let ask = request.header("Sec-Fetch-Site", "cross-site");
        ask.header("Sec-Fetch-Mode", mode)
            .header("Sec-Fetch-Dest", dest)
            .send()
    };
    assert!(assert_problem(&foreign("no-cors", "script").await, 403).contains("another page"));
    assert_eq!(foreign("navigate", "document").await.status, 200);
    for target in ["/livez", "/config", "/nowhere", "/policies"] {
        let reply = proxy.admin_request("GET", target).send().await;
        for (name, value) in [
            ("x-content-type-options", "nosniff"),
            ("cache-control", "no-store"),
            ("x-frame-options", "DENY"),
            ("cross-origin-resource-policy", "same-origin"),
            ("referrer-policy", "no-referrer"),
        ] {
            assert_eq!(reply.header(name), Some(value), "{target}");
        }
        let policy = reply.header("content-security-policy").unwrap();
        assert_contains(policy, &["default-src 'none'", "frame-ancestors 'none'"]);
    }
}

#[tokio::test]
async fn the_log_level_can_be_changed_at_run_time() {
    let proxy = Proxy::with_token("").await;
    let level = |level: &str| {
        let body = json!({ "level": level }).to_string().into_bytes();
        proxy
            .authorized_request("PUT", "/log-level")
            .header("Content-Type", "application/json")
            .body(body)
            .send()
    };
    let debugged = |mark: usize| {
        proxy
            .log_since(mark)
            .iter()
            .any(|line| line.is_level("DEBUG"))
    };
    let refuse = || {
        proxy
            .request("GET", "/")
            .header("Host", "a b")
            .send_for_status()
    };
    let mark = proxy.log_mark();
    refuse().await;
    assert!(!debugged(mark));
    assert_eq!(level("debug,hyper=off").await.status, 200);
    refuse().await;
    proxy
        .wait_for_log("a debug line", mark, TEST_TIMEOUT, |line| {
            line.is_level("DEBUG")
        })
        .await;
    assert!(assert_problem(&level("loud").await, 400).contains("expected \"error\""));
    assert_eq!(
        proxy.get_json("/log-level").await["level"],
        "debug,hyper=off"
    );
    assert_eq!(level("off").await.status, 200);
    let mark = proxy.log_mark();
    assert_eq!(level("info").await.status, 200);
    refuse().await;
    assert!(!debugged(mark));
    let without = proxy
        .admin_request("PUT", "/log-level")
        .body(b"{\"level\":\"debug\"}".to_vec());
    assert_problem(
        &without
            .header("Content-Type", "application/json")
            .send()
            .await,
        401,
    );
}

#[tokio::test]
async fn without_a_token_only_drain_is_accepted() {
    let mut proxy = Proxy::with_echo(POLICIES).await;
    let admin = proxy.admin_address();
    let ask = |method: &str, target: &str| {
        ClientRequest::new(admin, method, target).header("Host", "localhost")
    };
    for (method, target) in [("DELETE", "/keys?policy=all"), ("PUT", "/log-level")] {
        let detail = assert_problem(&ask(method, target).send().await, 403);
        assert!(detail.contains("admin.token_file"), "{detail}");
    }
    let by_a_page = ask("POST", "/drain")
        .header("Origin", "http://localhost")
        .send()
        .await;
    assert!(assert_problem(&by_a_page, 403).contains("browser"));
    assert!(proxy.is_running());
    let accepted = ask("POST", "/drain").send().await;
    assert_eq!(accepted.status, 202);
    assert_eq!(accepted.json()["status"], "stopping");
    proxy.assert_exit_code(0).await;
}
