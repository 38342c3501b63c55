//! Checks the metrics with a real Prometheus server and with `promtool`.

use crate::support::prelude::*;
use crate::support::process::OutputLine;
use regex::Regex;
use std::io::Write as _;
use std::process::{Command, Stdio};

const POLICIES: &str = r#"
[[policy]]
name = "few"
match = { path = "/few" }
limit = { requests = 2, per = "1h" }
[[policy]]
name = "many"
limit = { requests = 1000, per = "1h" }
"#;

const EXPORTS: &str =
    "[trace]\notlp = 'http://127.0.0.1:9'\n[metrics]\notlp = 'http://127.0.0.1:9'\n";

/// A Prometheus server that scrapes one address five times per second. It is killed on drop.
struct PrometheusServer {
    address: SocketAddr,
    _process: ChildProcess,
    _folder: TempDir,
}

impl PrometheusServer {
    async fn start_scraping(target: SocketAddr) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("prometheus.yml");
        let text = format!(
            "scrape_configs: [{{ job_name: tidegate, scrape_interval: 200ms, scrape_timeout: 200ms, \
             static_configs: [{{ targets: ['{target}'] }}] }}]"
        );
        fs::write(&config, text).unwrap();
        let mut command = tokio::process::Command::new("prometheus");
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!(
            "--storage.tsdb.path={}",
            folder.path().join("data").display()
        ));
        command.arg("--web.listen-address=127.0.0.1:0");
        let process = ChildProcess::start(&mut command)
            .expect("prometheus, of the Debian package prometheus");
        let listens = Regex::new(r#"msg="Listening on" address=(\S+)"#).unwrap();
        let address = process
            .wait_for("Prometheus to listen", 0, TEST_TIMEOUT, |line| {
                Some(listens.captures(&line.text)?[1].parse().unwrap())
            })
            .await;
        let ready = |line: &OutputLine| line.text.contains("Server is ready").then_some(());
        process
            .wait_for("Prometheus to be ready", 0, TEST_TIMEOUT, ready)
            .await;
        Self {
            address,
            _process: process,
            _folder: folder,
        }
    }

    async fn query_api(&self, path: &str) -> Value {
        let reply = ClientRequest::new(self.address, "GET", &format!("/api/v1/{path}"))
            .send()
            .await
            .json();
        assert_eq!(reply["status"], "success", "{path}: {reply}");
        reply["data"].clone()
    }

    /// The result of a query, once it has a value.
    async fn query_number(&self, query: &str) -> f64 {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        eventually(
            format!("a value of {query}"),
            2 * TEST_TIMEOUT,
            async || {
                let found = self.query_api(&format!("query?query={encoded}")).await;
                found["result"][0]["value"][1]
                    .as_str()
                    .map(|value| value.parse().unwrap())
            },
        )
        .await
    }

    /// Waits until the query returns `wanted`.
    async fn wait_for_value(&self, query: &str, wanted: f64) {
        wait_until_within(
            format!("{query} to be {wanted}"),
            2 * TEST_TIMEOUT,
            async || self.query_number(query).await == wanted,
        )
        .await;
    }
}

/// Name and type of every metric on the page.
fn parse_metric_types(page: &str) -> BTreeMap<String, String> {
    let kinds = page
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    kinds
        .map(|(name, kind)| (name.to_owned(), kind.to_owned()))
        .collect()
}

/// A proxy with TLS and a Redis store, after requests that set every metric.
async fn start_full_proxy(
    redis: &RedisServer,
    authority: &CertificateAuthority,
    upstream: &Upstream,
) -> Proxy {
    authority.sign("server", "127.0.0.1");
    let tls = authority.listen_tls("server");
    let store = redis.store_config();
    Proxy::start_connected(&format!("{store}\n{tls}{POLICIES}"), upstream.address).await
}

#[tokio::test]
async fn prometheus_scrapes_all_metrics() {
    let (upstream, redis) = (
        Upstream::echo().await,
        RedisServer::start_with(&["--maxmemory", "64mb"]),
    );
    let config = format!("{}\n{POLICIES}", redis.store_config());
    let proxy = Proxy::start_connected(&config, upstream.address).await;
    let statuses = proxy.get_statuses("/few", 5).await;
    assert_eq!(statuses, [200, 200, 429, 429, 429]);
    proxy
        .send_raw("no HTTP\r\n\r\n")
        .await
        .read_to_close()
        .await;
    let prometheus = PrometheusServer::start_scraping(proxy.admin_address()).await;
    prometheus.wait_for_value("up", 1.0).await;
    prometheus
        .wait_for_value(
            "tidegate_requests_total{policy=\"few\",decision=\"rejected\"}",
            3.0,
        )
        .await;
    // Two admitted requests and the first refusal. Later refusals may come from the deny cache,
    // which knows only the limits that refuse.
    prometheus
        .wait_for_value(
            "tidegate_requests_total{policy=\"many\",decision=\"allowed\"} >= bool 3",
            1.0,
        )
        .await;
    prometheus
        .wait_for_value("tidegate_http_requests_total{code=\"400\"}", 1.0)
        .await;
    prometheus
        .wait_for_value("sum(tidegate_decision_seconds_count)", 5.0)
        .await;
    let median = prometheus
        .query_number("histogram_quantile(0.5, sum by (le) (tidegate_decision_seconds_bucket))");
    assert!((0.000_001..1.0).contains(&median.await));
    let used = prometheus
        .query_number("tidegate_redis_memory_bytes / tidegate_redis_memory_max_bytes")
        .await;
    assert!((0.001..1.0).contains(&used), "{used}");
    let skew = prometheus
        .query_number("tidegate_redis_clock_skew_seconds")
        .await;
    assert!(
        skew.abs() < 1.0,
        "Redis runs on the same machine; clock skew is {skew}"
    );
    prometheus
        .wait_for_value("tidegate_redis_may_evict", 0.0)
        .await;
    prometheus
        .wait_for_value("tidegate_config_last_reload_successful", 1.0)
        .await;
    let age = prometheus
        .query_number("time() - tidegate_config_last_reload_success_timestamp_seconds")
        .await;
    assert!((-5.0..60.0).contains(&age), "{age}");
    // The expression of the alert TidegateReplicasDisagree.
    prometheus
        .wait_for_value("count(count_values(\"hash\", tidegate_config_hash))", 1.0)
        .await;
    let metadata = prometheus.query_api("metadata").await;
    for (name, kind) in parse_metric_types(&proxy.read_metrics_page().await) {
        // Prometheus asks for OpenMetrics, where only the samples have the suffix `_total`.
        let family = name.strip_suffix("_total").unwrap_or(&name);
        let known = &metadata[family][0];
        assert_eq!(known["type"], kind, "{name}: {known}");
        assert!(
            known["help"]
                .as_str()
                .is_some_and(|help| help.ends_with('.')),
            "{name}: {known}"
        );
    }
}

#[tokio::test]
async fn promtool_reports_no_problems() {
    let (upstream, redis, authority) = (
        Upstream::echo().await,
        RedisServer::start(),
        CertificateAuthority::new(),
    );
    let proxy = start_full_proxy(&redis, &authority, &upstream).await;
    let mut checker = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool, of the Debian package prometheus");
    checker
        .stdin
        .take()
        .unwrap()
        .write_all(proxy.read_metrics_page().await.as_bytes())
        .unwrap();
    let output = checker.wait_with_output().unwrap();
    let messages = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() && messages.is_empty(), "{messages}");
}

#[tokio::test]
async fn the_operations_page_lists_exactly_the_exported_metrics() {
    let redis = RedisServer::start_with(&["--maxmemory", "64mb"]);
    let (upstream, authority) = (Upstream::echo().await, CertificateAuthority::new());
    let in_redis = start_full_proxy(&redis, &authority, &upstream).await;
    let config = format!(
        "[client.jwt]\nkeys_url = 'http://127.0.0.1:9/keys'\n{EXPORTS}
        [[policy]]\nname = 'users'\nkey = ['jwt:sub']\nlimit = {{ requests = 1, per = '1h' }}\nnotify = [1.0]\n"
    );
    let in_memory = Proxy::start(&config, upstream.address).await;
    assert_eq!(in_memory.get("/").await.status, 200);
    let pages = [
        in_redis.read_metrics_page().await,
        in_memory.read_metrics_page().await,
    ];
    let mut exported: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let label = Regex::new(r#"[{,]([a-z_]+)=""#).unwrap();
    for page in &pages {
        for name in parse_metric_types(page).into_keys() {
            let samples = page.lines().filter(|line| line.starts_with(&name));
            let labels =
                samples.flat_map(|line| label.captures_iter(line).map(|found| found[1].to_owned()));
            // `le` is part of the histogram format, not a label of the product.
            let labels: Vec<_> = labels.filter(|label| label != "le").collect();
            exported.entry(name).or_default().extend(labels);
        }
    }
    let operations = include_str!("../../docs/operations/observe.md");
    let row = Regex::new(r"(?m)^\| `(tidegate_[a-z_]+)` \|([^|]*)\| [^|]{8,} \|$").unwrap();
    let word = Regex::new("`([a-z_]+)`").unwrap();
    let documented = row.captures_iter(operations).map(|row| {
        let labels = word
            .captures_iter(&row[2])
            .map(|label| label[1].to_owned())
            .collect();
        (row[1].to_owned(), labels)
    });
    let documented: BTreeMap<String, BTreeSet<String>> = documented.collect();
    let differs = |one: &BTreeMap<String, BTreeSet<String>>,
                   other: &BTreeMap<String, BTreeSet<String>>| {
        one.iter()
            .filter(|(name, labels)| other.get(*name) != Some(labels))
            .map(|row| format!("{row:?}"))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (
            differs(&exported, &documented),
            differs(&documented, &exported)
        ),
        (vec![], vec![]),
        "exported, documented"
    );
}
