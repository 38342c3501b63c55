//! The admin listener: metrics, health, and access control.

use crate::support::prelude::*;

/// A metrics page, parsed strictly: anything that Prometheus would reject fails the test.
#[derive(Debug)]
struct MetricsPage(BTreeMap<String, f64>);

impl MetricsPage {
    async fn fetch(proxy: &Proxy) -> Self {
        let reply = proxy.admin_request("GET", "/metrics").send().await;
        reply.expect_header("content-type", "text/plain; version=0.0.4; charset=utf-8");
        Self::parse(&reply.text())
    }

    /// Parses Prometheus' text format. Each metric has its help and type before its samples, and no
    /// series occurs twice.
    fn parse(text: &str) -> Self {
        assert!(text.ends_with('\n'), "the last line has a line feed");
        let (mut samples, mut families) = (BTreeMap::new(), BTreeMap::new());
        let (mut helped, mut current) = (String::new(), String::new());
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                rest.split_once(' ').unwrap().0.clone_into(&mut helped);
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert_eq!(name, helped, "HELP precedes TYPE");
                assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
                assert!(kind != "counter" || name.ends_with("_total"), "{line}");
                assert!(
                    families.insert(name.to_owned(), kind.to_owned()).is_none(),
                    "{name} twice"
                );
                name.clone_into(&mut current);
            } else {
                let (series, value) = line.rsplit_once(' ').unwrap();
                let name = series.split('{').next().unwrap();
                let endings: &[&str] = match families[&current].as_str() {
                    "histogram" => &["_bucket", "_sum", "_count"],
                    _ => &[""],
                };
                assert!(
                    endings
                        .iter()
                        .any(|ending| name == format!("{current}{ending}")),
                    "{line}"
                );
                assert_labels(series);
                let value = value.parse().unwrap_or_else(|_| panic!("{line}"));
                assert!(
                    samples.insert(series.to_owned(), value).is_none(),
                    "{series} twice"
                );
            }
        }
        Self(samples)
    }

    fn expect(&self, counts: &[(&str, f64)]) {
        for (series, count) in counts {
            assert_eq!(self.value(series), *count, "{series}");
        }
    }

    fn value(&self, series: &str) -> f64 {
        *self
            .0
            .get(series)
            .unwrap_or_else(|| panic!("no {series} in {:#?}", self.0))
    }

    /// The nonzero counts of a policy.
    fn policy_counts(&self, name: &str) -> Vec<(&str, f64)> {
        let prefix = format!("tidegate_requests_total{{policy=\"{name}\",decision=\"");
        let counts = self.0.iter().filter_map(|(series, count)| {
            Some((series.strip_prefix(&prefix)?.strip_suffix("\"}")?, *count))
        });
        counts.filter(|(_, count)| *count > 0.0).collect()
    }

    fn series_names(&self) -> BTreeSet<&String> {
        self.0.keys().collect()
    }
}

/// Checks `{a="b",c="d"}`, with escaped quotes in values.
fn assert_labels(series: &str) {
    let Some((_, labels)) = series.split_once('{') else {
        return;
    };
    let label = r#"[a-z_]+="(?:[^"\\\n]|\\["\\n])*""#;
    let labels_are = regex::Regex::new(&format!("^{label}(?:,{label})*}}$")).unwrap();
    assert!(labels_are.is_match(labels), "{series}");
}

impl ClientRequest {
    async fn send_to_localhost(self) -> RawResponse {
        self.header("Host", "localhost").send().await
    }
}

async fn admin_get(proxy: &Proxy, target: &str) -> RawResponse {
    proxy.admin_request("GET", target).send().await
}

async fn get_readiness(proxy: &Proxy) -> (u16, Value) {
    let reply = admin_get(proxy, "/readyz").await;
    (reply.status, reply.json())
}

const EVERY_POLICY_KIND: &str = r#"
[listen]
threads = 2
[[policy]]
name = "free"
match = { path = "/free" }
action = "allow"
[[policy]]
name = "closed"
match = { path = "/closed" }
action = "deny"
[[policy]]
name = "candidate"
mode = "shadow"
limit = { requests = 2, per = "1h" }
[[policy]]
name = "live"
limit = { requests = 3, per = "1h" }
"#;

#[tokio::test]
async fn queued_requests_count_as_delayed() {
    let line = "limit = { requests = 1, per = '1s', algorithm = 'leaky_bucket', max_delay = '5s' }";
    let policies = format!(
        "log.access = 'all'\n[[policy]]\nname = 'line'\n{line}\n\
         [[policy]]\nname = 'shadow'\nmode = 'shadow'\nlimit = {{ requests = 1, per = '1h', algorithm = 'leaky_bucket', max_delay = '1h' }}\n\
         [[policy]]\nname = 'other'\nlimit = {{ requests = 9, per = '1h' }}"
    );
    let proxy = Proxy::with_echo(&policies).await;
    let start = Instant::now();
    let _ = tokio::join!(proxy.get("/"), proxy.get("/"), proxy.get("/"));
    assert!(
        start.elapsed() < TEST_TIMEOUT,
        "a shadow policy delays no request"
    );
    let metrics = MetricsPage::fetch(&proxy).await;
    assert_eq!(
        metrics.policy_counts("line"),
        [("allowed", 1.0), ("delayed", 2.0)]
    );
    assert_eq!(metrics.policy_counts("other"), [("allowed", 3.0)]);
    let _ = proxy.wait_for_field("decision", "delayed", 0).await;
}

#[tokio::test]
async fn metrics_match_the_requests_served() {
    let proxy = Proxy::with_echo(EVERY_POLICY_KIND).await;
    assert_eq!(proxy.get_statuses("/", 5).await, [200, 200, 200, 429, 429]);
    assert_eq!(proxy.get_statuses("/free", 2).await, [200, 200]);
    assert_eq!(proxy.get_statuses("/closed", 4).await, [403; 4]);
    assert_eq!(proxy.get_with("/", "Host", "a b").await.status, 400);
    let metrics = MetricsPage::fetch(&proxy).await;
    assert_eq!(metrics.policy_counts("free"), [("exempt", 2.0)]);
    assert_eq!(metrics.policy_counts("closed"), [("denied", 4.0)]);
    assert_eq!(
        metrics.policy_counts("live"),
        [("allowed", 3.0), ("rejected", 2.0)]
    );
    // A shadow policy is charged only for admitted requests, so its two units are used after the
    // second.
    assert_eq!(
        metrics.policy_counts("candidate"),
        [("allowed", 2.0), ("shadow_rejected", 3.0)]
    );
    metrics.expect(&[
        ("tidegate_http_requests_total{code=\"200\"}", 5.0),
        ("tidegate_http_requests_total{code=\"429\"}", 2.0),
        ("tidegate_http_requests_total{code=\"403\"}", 4.0),
        ("tidegate_http_requests_total{code=\"400\"}", 1.0),
        ("tidegate_http_request_seconds_count", 12.0),
        ("tidegate_http_request_seconds_bucket{le=\"+Inf\"}", 12.0),
        ("tidegate_decision_seconds_count{source=\"memory\"}", 5.0),
        ("tidegate_decision_seconds_count{source=\"degraded\"}", 0.0),
        ("tidegate_store_up", 1.0),
        ("tidegate_store_memory_keys", 2.0),
        ("tidegate_store_memory_evictions_total", 0.0),
        ("tidegate_config_generation", 1.0),
    ]);
    assert!(metrics.value("tidegate_http_request_seconds_sum") > 0.0);
}

#[tokio::test]
async fn upstream_errors_and_connections_are_counted() {
    let (feeder, upstream) = Upstream::streaming().await;
    let proxy = Proxy::start("", upstream.address).await;
    let mut client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    feeder.send("x").await;
    client.read_past(b"x").await;
    let metrics = MetricsPage::fetch(&proxy).await;
    metrics.expect(&[("tidegate_connections_active", 1.0)]);

    let unreachable = Proxy::setup("").start().await;
    assert_eq!(unreachable.get_statuses("/", 2).await, [502, 502]);
    let metrics = MetricsPage::fetch(&unreachable).await;
    metrics.expect(&[
        (
            "tidegate_upstream_errors_total{kind=\"connect_refused\"}",
            2.0,
        ),
        ("tidegate_upstream_errors_total{kind=\"dns\"}", 0.0),
        ("tidegate_http_requests_total{code=\"502\"}", 2.0),
    ]);
}

fn redis_config(port: u16) -> String {
    format!(
        "[store]\nkind = \"redis\"\n[store.redis]\nurl = \"redis://127.0.0.1:{port}/0\"\nkey_prefix = \"t\"\n\
         timeout = \"2s\"\n[store.redis.breaker]\nfailures = 2\nprobe_interval = \"20ms\"\n\
         [[policy]]\nname = \"open\"\nlimit = {{ requests = 100, per = \"1h\" }}\n\
         [[policy]]\nname = \"shut\"\nmatch = {{ path = \"/shut\" }}\non_store_failure = \"closed\"\n\
         limit = {{ requests = 1, per = \"1h\" }}\n\
         [[policy]]\nname = \"shadow\"\nmode = \"shadow\"\nlimit = {{ requests = 100, per = \"1h\" }}\n"
    )
}

#[tokio::test]
async fn a_redis_outage_is_counted_and_reported_while_the_instance_stays_ready() {
    let mut redis = RedisServer::start();
    let proxy = Proxy::with_echo(&redis_config(redis.port())).await;
    assert_eq!(proxy.get_statuses("/shut", 1).await, [200]);
    // Redis decides the first refusal. The next may come from the deny cache, if the same worker
    // serves it.
    assert_eq!(proxy.get_statuses("/shut", 3).await, [429; 3]);
    let metrics = MetricsPage::fetch(&proxy).await;
    let by_source = |source: &str| {
        metrics.value(&format!(
            "tidegate_decision_seconds_count{{source=\"{source}\"}}"
        ))
    };
    assert_eq!(by_source("redis") + by_source("deny_cache"), 4.0);
    assert_eq!(
        metrics.policy_counts("shut"),
        [("allowed", 1.0), ("rejected", 3.0)]
    );
    metrics.expect(&[("tidegate_store_up", 1.0), ("tidegate_breaker_open", 0.0)]);
    let (status, readiness) = get_readiness(&proxy).await;
    assert_eq!(status, 200, "{readiness}");
    assert_eq!(readiness["store"], "up", "{readiness}");

    redis.kill();
    wait_for_store_status(&proxy, "degraded").await;
    assert_eq!(proxy.get_statuses("/", 3).await, [200; 3]);
    let metrics = MetricsPage::fetch(&proxy).await;
    for policy in ["open", "shadow"] {
        let counts = metrics.policy_counts(policy);
        assert!(counts.contains(&("degraded", 3.0)), "{policy}: {counts:?}");
    }
    metrics.expect(&[
        (
            "tidegate_degraded_total{policy=\"open\",outcome=\"open\"}",
            3.0,
        ),
        (
            "tidegate_degraded_total{policy=\"open\",outcome=\"closed\"}",
            0.0,
        ),
        (
            "tidegate_degraded_total{policy=\"shadow\",outcome=\"open\"}",
            0.0,
        ),
        ("tidegate_decision_seconds_count{source=\"degraded\"}", 3.0),
        ("tidegate_store_up", 0.0),
    ]);
    // The error depends on timing: a broken connection, or a refused new connection.
    let errors = ["connection", "refused"]
        .map(|kind| format!("tidegate_store_errors_total{{kind=\"{kind}\"}}"));
    assert!(
        errors
            .iter()
            .map(|series| metrics.value(series))
            .sum::<f64>()
            > 0.0
    );
    let (status, readiness) = get_readiness(&proxy).await;
    assert_eq!(status, 200, "a degraded instance stays ready: {readiness}");

    redis.restart();
    wait_for_store_status(&proxy, "up").await;
    let decided =
        |metrics: &MetricsPage| metrics.value("tidegate_decision_seconds_count{source=\"redis\"}");
    let before = decided(&MetricsPage::fetch(&proxy).await);
    assert_eq!(proxy.get_statuses("/", 1).await, [200]);
    assert_eq!(
        decided(&MetricsPage::fetch(&proxy).await) - before,
        1.0,
        "Redis did not decide again"
    );
}

async fn wait_for_store_status(proxy: &Proxy, wanted: &str) {
    wait_until(format!("the store to be {wanted}"), async || {
        get_readiness(proxy).await.1["store"] == wanted
    })
    .await;
}

#[tokio::test]
async fn fail_closed_policies_count_degraded_rejections() {
    let mut redis = RedisServer::start();
    let proxy = Proxy::with_echo(&redis_config(redis.port())).await;
    redis.kill();
    wait_for_store_status(&proxy, "degraded").await;
    assert_eq!(proxy.get_statuses("/shut", 2).await, [503; 2]);
    let metrics = MetricsPage::fetch(&proxy).await;
    metrics.expect(&[(
        "tidegate_degraded_total{policy=\"shut\",outcome=\"closed\"}",
        2.0,
    )]);
    assert_eq!(metrics.policy_counts("shut"), [("degraded", 2.0)]);
    // These requests are refused, and the response says so.
    assert_eq!(proxy.get_statuses("/", 3).await, [200; 3]);
    let total = |column: &Value| {
        let counts = column.as_array().into_iter().flatten();
        counts.filter_map(Value::as_u64).sum::<u64>()
    };
    wait_until("the counts of the outage", async || {
        let overview = admin_get(&proxy, "/overview").await.json();
        let policies = admin_get(&proxy, "/policies").await.json();
        let seconds = &overview["requests"]["seconds"];
        let seen = [&seconds["degraded"], &seconds["degraded_refused"]].map(total);
        let hour = |at: usize| {
            let hour = &policies["policies"][at]["last_hour"];
            [&hour["degraded"], &hour["degraded_refused"]].map(total)
        };
        overview["requests"]["total"]["degraded_refused"] == 2
            && (seen, hour(0), hour(1)) == ([5, 2], [5, 0], [2, 2])
    })
    .await;
    let table = proxy.run_command(&["top", "--once"]).await.stdout;
    let line = table.lines().find(|line| line.starts_with("shut "));
    let words = line.unwrap_or_else(|| panic!("{table}")).split_whitespace();
    let words: Vec<_> = words.take(4).collect();
    assert_eq!(words, ["shut", "0", "2", "100.0%"], "{table}");
}

#[tokio::test]
async fn readiness_fails_before_the_delay_and_the_admin_port_stays_open_until_exit() {
    let (feeder, upstream) = Upstream::streaming().await;
    let mut proxy = Proxy::start("[shutdown]\ndelay = '700ms'", upstream.address).await;
    let mut busy = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    feeder.send("x").await;
    busy.read_past(b"x").await;
    assert_eq!(get_readiness(&proxy).await.1["status"], "ready");
    let mark = proxy.log_mark();
    proxy.send_sigterm();
    proxy.wait_for_text("SIGTERM", mark).await;
    let (status, readiness) = get_readiness(&proxy).await;
    assert_eq!(status, 503);
    assert_eq!(readiness["status"], "stopping");
    proxy
        .expect_status("/", 200, "the proxy still serves during the delay")
        .await;
    assert_eq!(admin_get(&proxy, "/livez").await.status, 200);
    let address = proxy.address;
    wait_until("the listener to close", async || {
        std::net::TcpStream::connect(address).is_err()
    })
    .await;
    let answered = admin_get(&proxy, "/livez").await.status;
    assert_eq!(answered, 200, "the admin listener stays open");
    drop(feeder);
    proxy.assert_exit_code(0).await;
}

#[tokio::test]
async fn it_is_live_but_not_ready_before_it_listens() {
    let redis = RedisServer::start();
    redis.pause();
    let config = redis_config(redis.port());
    let config = config.replace("timeout = \"2s\"", "connect_timeout = \"5s\"");
    let file = ConfigFile::new(&config);
    let process = file.start(&[
        "--listen",
        "127.0.0.1:0",
        "--upstream",
        "http://127.0.0.1:9",
    ]);
    let admin = process.wait_for_address("admin listening").await;
    let live = ClientRequest::new(admin, "GET", "/livez").send_to_localhost();
    assert_eq!(live.await.status, 200);
    let reply = ClientRequest::new(admin, "GET", "/readyz")
        .send_to_localhost()
        .await;
    assert_eq!(reply.status, 503);
    assert_eq!(reply.json()["status"], "starting");
    redis.resume();
}

#[tokio::test]
async fn config_generation_and_reload_results_are_reported() {
    let policies = |requests| {
        format!("[[policy]]\nname = \"p\"\nlimit = {{ requests = {requests}, per = \"1h\" }}\n")
    };
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start(&policies(10), upstream.address).await;
    assert_eq!(proxy.get("/").await.status, 200);
    for (text, logged) in [
        (policies(20), "configuration reloaded"),
        ("nonsense = 1".to_owned(), "new configuration rejected"),
    ] {
        let mark = proxy.log_mark();
        proxy.write_config(&text);
        proxy.wait_for_message(logged, mark).await;
    }
    let shown = admin_get(&proxy, "/config").await.json();
    assert_eq!(shown["generation"], 2);
    assert!(
        shown["reload_errors"].to_string().contains("nonsense"),
        "{shown}"
    );
    assert_eq!(shown["config"]["policy"][0]["limit"]["requests"], 20);
    assert_eq!(
        shown["config"]["upstream"]["url"],
        format!("http://{}", upstream.address)
    );
    assert_eq!(shown["config"]["listen"]["max_connections"], 10_000);
    let metrics = MetricsPage::fetch(&proxy).await;
    metrics.expect(&[
        ("tidegate_config_reloads_total{result=\"success\"}", 1.0),
        ("tidegate_config_reloads_total{result=\"failure\"}", 1.0),
        ("tidegate_config_generation", 2.0),
    ]);
    let (status, readiness) = get_readiness(&proxy).await;
    assert_eq!(status, 200);
    assert!(
        readiness["reload_errors"][0]
            .as_str()
            .unwrap()
            .contains("nonsense"),
        "{readiness}"
    );
    let mark = proxy.log_mark();
    proxy.write_config(&policies(30).replace("\"p\"", "\"q\""));
    proxy.wait_for_message("configuration reloaded", mark).await;
    assert_eq!(
        get_readiness(&proxy).await.1["reload_errors"],
        Value::Array(Vec::new())
    );
    assert_eq!(proxy.get("/").await.status, 200);
    let metrics = MetricsPage::fetch(&proxy).await;
    assert_eq!(metrics.policy_counts("p"), [("allowed", 1.0)]);
    assert_eq!(metrics.policy_counts("q"), [("allowed", 1.0)]);
}

#[tokio::test]
async fn secrets_are_not_shown() {
    let url = "redis://ann:hunter2@127.0.0.1:1/0";
    let text = format!(
        "[store]\nkind = \"redis\"\n[store.redis]\nkey_prefix = \"t\"\nconnect_timeout = \"50ms\"\nurl = \"{url}\"\n"
    );
    let proxy = Proxy::setup(&text).start().await;
    let reply = admin_get(&proxy, "/config").await;
    assert_eq!(
        reply.json()["config"]["store"]["redis"]["url"],
        "redis://***@127.0.0.1:1/0"
    );
    assert!(!reply.text().contains("hunter2") && !reply.text().contains("ann:"));
}

#[tokio::test]
async fn trap_26_nothing_that_a_client_sends_becomes_a_label() {
    let keyed = "[[policy]]\nname = \"p\"\nkey = [\"header:x-user\"]\nlimit = { requests = 9, per = \"1h\" }\n";
    let proxy = Proxy::with_echo(keyed).await;
    assert_eq!(proxy.get_with("/first", "x-user", "a").await.status, 200);
    let before = MetricsPage::fetch(&proxy).await;
    for user in 0..20 {
        let hostile = format!("u{user}\"}} 1\\n# HELP x");
        let ask = proxy
            .request("PURGE", &format!("/{user}/%22%7D"))
            .header("x-user", &hostile);
        ask.header("User-Agent", &hostile).expect_status(200).await;
    }
    let after = MetricsPage::fetch(&proxy).await;
    assert_eq!(before.series_names(), after.series_names());
    assert_eq!(after.policy_counts("p"), [("allowed", 21.0)]);
}

#[tokio::test]
async fn an_untrusted_ingress_is_reported_as_a_hint() {
    let keyed =
        "[[policy]]\nname = \"p\"\nkey = [\"client_ip\"]\nlimit = { requests = 9, per = \"1h\" }\n";
    let proxy = Proxy::with_echo(keyed).await;
    assert_eq!(proxy.get("/").await.status, 200);
    assert_eq!(
        get_readiness(&proxy).await.1["hints"],
        Value::Array(Vec::new())
    );
    let status = proxy
        .get_with("/", "X-Forwarded-For", "192.0.2.1")
        .await
        .status;
    assert_eq!(status, 200);
    let metrics = MetricsPage::fetch(&proxy).await;
    metrics.expect(&[("tidegate_untrusted_forwarding_total", 1.0)]);
    let (status, readiness) = get_readiness(&proxy).await;
    assert_eq!(status, 200);
    let hint = readiness["hints"][0].as_str().unwrap();
    assert!(hint.contains("client.trusted_proxies"), "{readiness}");
    assert!(hint.contains("[client] trusted_proxies = ["), "{readiness}");
    // An authorized caller sees the hint, and so does the log. (The dashboard is tested in
    // tests/browser.)
    let overview = admin_get(&proxy, "/overview").await.json();
    assert_eq!(
        [&overview["untrusted_peers"], &overview["hints"]],
        [&json!(["127.0.0.1"]), &readiness["hints"]]
    );
    assert_eq!(overview["untrusted_forwarding"], 1);
    let has_hint = |line: &LogLine| line.contains("client.trusted_proxies");
    let line = proxy
        .wait_for_log("a hint", 0, TEST_TIMEOUT, has_hint)
        .await;
    assert_eq!(
        [line.field("peer"), line.field("write")],
        ["127.0.0.1", "[\"127.0.0.1/32\"]"]
    );
}

#[tokio::test]
async fn the_dashboard_page_needs_no_token_and_contains_no_data() {
    let dir = TempDir::new().unwrap();
    let token = dir.path().join("token");
    fs::write(&token, "s3cret").unwrap();
    let config = format!("[admin]\ntoken_file = {token:?}\nprobes = \"127.0.0.1:0\"");
    let builder = Proxy::setup(&config).env("TIDEGATE_ADMIN__ADDRESS", "0.0.0.0:0");
    let proxy = builder.start().await;
    let page = admin_get(&proxy, "/").await;
    page.expect_status(200)
        .expect_header("content-type", "text/html; charset=utf-8");
    let policy = page.header("content-security-policy").unwrap();
    assert_contains(
        policy,
        &[
            "default-src 'none'",
            "script-src 'sha256-",
            "frame-ancestors 'none'",
            "trusted-types 'none'",
        ],
    );
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_eq!(page.header("cache-control"), Some("no-store"));
    let status = admin_get(&proxy, "/overview").await.status;
    assert_eq!(status, 401, "the data requires the token");
    let ask = |address, method, host| {
        ClientRequest::new(address, method, "/")
            .header("Host", host)
            .send_for_status()
    };
    assert_eq!(ask(proxy.admin_address(), "POST", "localhost").await, 405);
    assert_eq!(ask(proxy.admin_address(), "GET", "evil.example").await, 403);
    let answer = ask(proxy.probe_address().unwrap(), "GET", "localhost").await;
    assert_eq!(answer, 404);
}

#[tokio::test]
async fn only_known_hosts_and_known_routes_are_answered() {
    let proxy = Proxy::setup("[admin]\nallowed_hosts = [\"Admin.Internal\"]")
        .start()
        .await;
    let status = |host: &str| {
        ClientRequest::new(proxy.admin_address(), "GET", "/config")
            .header("Host", host)
            .send_for_status()
    };
    for host in [
        "localhost:9090",
        "127.0.0.1",
        "[::1]:1",
        "admin.internal:8080",
    ] {
        assert_eq!(status(host).await, 200, "{host}");
    }
    for host in ["evil.example", "localhost.evil.example", ""] {
        assert_eq!(status(host).await, 403, "{host}");
    }
    for target in ["/livez", "/metrics", "/nowhere"] {
        let ask =
            ClientRequest::new(proxy.admin_address(), "GET", target).header("Host", "evil.example");
        assert_eq!(ask.send_for_status().await, 403, "{target}");
    }
    assert_eq!(admin_get(&proxy, "/nowhere").await.status, 404);
    assert_eq!(
        ClientRequest::new(proxy.admin_address(), "POST", "/config")
            .send_to_localhost()
            .await
            .status,
        405
    );
    proxy
        .expect_status("/livez", 502, "the client listener serves no metrics")
        .await;
}

#[tokio::test]
async fn a_non_loopback_admin_address_requires_a_token_except_for_probes() {
    let (_dir, token) = write_temp_file("token", "s3cret\n");
    let text = format!("[admin]\nprobes = \"127.0.0.1:0\"\ntoken_file = {token:?}\n");
    let builder = Proxy::setup(&text).env("TIDEGATE_ADMIN__ADDRESS", "0.0.0.0:0");
    let proxy = builder.start().await;
    let local = |mut address: SocketAddr| {
        address.set_ip([127, 0, 0, 1].into());
        address
    };
    let admin = local(proxy.admin_address());
    let ask = |target: &str| ClientRequest::new(admin, "GET", target).header("Host", "localhost");
    let refused = ask("/config").send().await;
    refused
        .expect_status(401)
        .expect_header("www-authenticate", "Bearer");
    ask("/config")
        .header("Authorization", "Bearer wrong!")
        .expect_status(401)
        .await;
    let allowed = ask("/config")
        .header("Authorization", "Bearer s3cret")
        .send()
        .await;
    assert_eq!(allowed.status, 200);
    assert!(!allowed.text().contains("s3cret"));
    let probes = proxy.probe_address().unwrap();
    for target in ["/livez", "/readyz", "/metrics"] {
        assert_eq!(ask(target).send_for_status().await, 200, "{target}");
        assert_eq!(
            ClientRequest::new(probes, "GET", target)
                .header("Host", "orders.svc")
                .send_for_status()
                .await,
            200,
            "{target}"
        );
    }
    ClientRequest::new(probes, "GET", "/config")
        .header("Authorization", "Bearer s3cret")
        .expect_status(404)
        .await;

    let without = ConfigFile::new("[admin]\n");
    let mut command = without.command(&["run", "--upstream", "http://127.0.0.1:9"]);
    let ended = run_command(command.env("TIDEGATE_ADMIN__ADDRESS", "0.0.0.0:0")).await;
    ended.expect_code(1).expect_stderr("admin.token_file");
}

#[tokio::test]
async fn an_admin_address_in_use_is_a_clear_error() {
    let taken = Upstream::echo().await;
    let mut command = tidegate_command();
    command.args([
        "run",
        "--listen",
        "127.0.0.1:0",
        "--upstream",
        "http://127.0.0.1:9",
    ]);
    let ended =
        run_command(command.env("TIDEGATE_ADMIN__ADDRESS", taken.address.to_string())).await;
    ended.expect_code(1);
    for expected in [
        "admin.address",
        "TIDEGATE_ADMIN__ADDRESS",
        &taken.address.to_string(),
    ] {
        ended.expect_stderr(expected);
    }
}

#[tokio::test]
async fn silent_and_oversized_admin_clients_are_disconnected() {
    let proxy = Proxy::setup("").start().await;
    let text = format!(
        "GET /livez HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n",
        "x".repeat(20_000),
    );
    let mut large = RawClient::connect_and_send(proxy.admin_address(), text).await;
    let refused = large.read_response_or_close().await;
    assert!(
        refused.is_none_or(|reply| reply.status == 431),
        "the oversized head was accepted"
    );
    let mut silent =
        RawClient::connect_and_send(proxy.admin_address(), "GET /livez HTTP/1.1\r\n").await;
    let late = timeout(TEST_TIMEOUT + TEST_TIMEOUT, async {
        silent.read_to_close().await
    });
    assert!(late.await.is_ok());
}

#[tokio::test]
async fn the_health_command_ignores_errors_elsewhere_in_the_configuration() {
    let proxy = Proxy::with_echo("").await;
    let file = ConfigFile::new("nonsense = 1\n[listen]\naddress = \"nowhere\"\n[admin]\n");
    let run = async |words: &[&str], address: SocketAddr| {
        let mut command = file.command(words);
        run_command(command.env("TIDEGATE_ADMIN__ADDRESS", address.to_string())).await
    };
    let health = async |address| run(&["health"], address).await;
    let ended = health(proxy.admin_address()).await;
    assert_eq!(ended.status.code(), Some(0), "{}", ended.stderr);
    assert_eq!(ended.stdout, "ok\n", "{}", ended.stderr);
    // Another server, and no server at all.
    let found = health(proxy.address).await.status.code();
    assert_eq!(found, Some(0), "the upstream answers 200 to everything");
    let unreachable = "127.0.0.1:1".parse().unwrap();
    let ended = health(unreachable).await;
    ended.expect_code(1).expect_stderr("127.0.0.1:1");

    let in_json = async |address: SocketAddr| {
        let ended = run(&["health", "--json"], address).await;
        let report = ended.json();
        assert_eq!(report["address"], address.to_string());
        (
            ended.status.code(),
            report["healthy"].clone(),
            report["status"].clone(),
            report["error"].is_string(),
        )
    };
    let answer = in_json(proxy.admin_address()).await;
    assert_eq!(answer, (Some(0), true.into(), 200.into(), false));
    let answer = in_json(unreachable).await;
    assert_eq!(answer, (Some(1), false.into(), Value::Null, true));
}

/// Clients that send nothing, and clients that request but do not read, beyond the limit of
/// connections.
#[tokio::test]
async fn probes_are_answered_beside_idle_connections_and_slow_readers() {
    let config = "admin.probes = '127.0.0.1:0'";
    let proxy = Proxy::with_echo(config).await;
    for address in [proxy.admin_address(), proxy.probe_address().unwrap()] {
        let mut open = Vec::new();
        for n in 0..200 {
            let mut client = RawClient::connect(address).await;
            if n % 2 == 0 {
                let request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(50);
                client.send(request).await;
            }
            open.push(client);
        }
        let start = Instant::now();
        for _ in 0..20 {
            let probe = ClientRequest::new(address, "GET", "/readyz").header("Host", "localhost");
            assert_eq!(probe.send_for_status().await, 200);
        }
        println!("{:?} for a probe", start.elapsed() / 20);
        assert_faster_than(Duration::from_secs(4), start);
    }
}
