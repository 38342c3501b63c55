//! The metrics as Prometheus takes them: a real server, and its own checker.

use crate::support::SOON;
use crate::support::client::{Ask, RawClient};
use crate::support::process::{Line, Process};
use crate::support::proxy::Proxy;
use crate::support::redis::Server;
use crate::support::tls::Authority;
use crate::support::upstream::Upstream;
use regex::Regex;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

const POLICIES: &str = r#"
[[policy]]
name = "few"
match = { path = "/few" }
limit = { requests = 2, per = "1h" }
[[policy]]
name = "many"
limit = { requests = 1000, per = "1h" }
"#;

/// A server that scrapes one address five times a second; killed when dropped.
struct Prometheus {
    address: SocketAddr,
    _process: Process,
    _folder: TempDir,
}

impl Prometheus {
    async fn scraping(target: SocketAddr) -> Self {
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
        let process =
            Process::start(&mut command).expect("prometheus, of the Debian package prometheus");
        let listens = Regex::new(r#"msg="Listening on" address=(\S+)"#).unwrap();
        let address = process
            .wait_for("Prometheus to listen", 0, SOON, |line| {
                Some(listens.captures(&line.text)?[1].parse().unwrap())
            })
            .await;
        let ready = |line: &Line| line.text.contains("Server is ready").then_some(());
        process
            .wait_for("Prometheus to be ready", 0, SOON, ready)
            .await;
        Self {
            address,
            _process: process,
            _folder: folder,
        }
    }

    async fn api(&self, path: &str) -> Value {
        let reply = Ask::new(self.address, "GET", &format!("/api/v1/{path}"))
            .send()
            .await
            .json();
        assert_eq!(reply["status"], "success", "{path}: {reply}");
        reply["data"].clone()
    }

    /// What a query says, once it says something: one number.
    async fn number(&self, query: &str) -> f64 {
        let deadline = Instant::now() + 2 * SOON;
        loop {
            let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
            let found = self.api(&format!("query?query={encoded}")).await;
            if let Some(value) = found["result"][0]["value"][1].as_str() {
                return value.parse().unwrap();
            }
            assert!(
                Instant::now() < deadline,
                "{query} has no value; {}",
                self.api("targets").await
            );
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until a query says a number.
    async fn says(&self, query: &str, wanted: f64) {
        let deadline = Instant::now() + 2 * SOON;
        loop {
            let number = self.number(query).await;
            if number == wanted {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{query} is {number}, not {wanted}"
            );
            sleep(Duration::from_millis(50)).await;
        }
    }
}

async fn page(proxy: &Proxy) -> String {
    Ask::new(proxy.admin(), "GET", "/metrics")
        .header("Host", "localhost")
        .send()
        .await
        .text()
}

/// Name and kind of every metric of a page.
fn families(page: &str) -> BTreeMap<String, String> {
    let kinds = page
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    kinds
        .map(|(name, kind)| (name.to_owned(), kind.to_owned()))
        .collect()
}

/// A proxy that counts in Redis, has met everything once and speaks TLS.
async fn with_everything(redis: &Server, authority: &Authority, upstream: &Upstream) -> Proxy {
    authority.sign("server", "127.0.0.1");
    let tls = format!(
        "[listen.tls]\ncert = '{}'\nkey = '{}'\n",
        authority.text("server.pem"),
        authority.text("server.key")
    );
    let store = redis.as_store();
    let proxy = Proxy::start(&format!("{store}\n{tls}{POLICIES}"), upstream.address).await;
    proxy.store_up().await;
    proxy
}

#[tokio::test]
async fn a_real_server_takes_all_of_it() {
    let (upstream, redis) = (
        Upstream::echo().await,
        Server::with(&["--maxmemory", "64mb"]),
    );
    let proxy = Proxy::start(
        &format!("{}\n{POLICIES}", redis.as_store()),
        upstream.address,
    )
    .await;
    proxy.store_up().await;
    assert_eq!(proxy.statuses("/few", 5).await, [200, 200, 429, 429, 429]);
    RawClient::connect(proxy.address)
        .await
        .send("no HTTP\r\n\r\n")
        .await
        .rest()
        .await;
    let prometheus = Prometheus::scraping(proxy.admin()).await;
    prometheus.says("up", 1.0).await;
    prometheus
        .says(
            "tidegate_requests_total{policy=\"few\",decision=\"rejected\"}",
            3.0,
        )
        .await;
    prometheus
        .says(
            "tidegate_requests_total{policy=\"many\",decision=\"allowed\"}",
            5.0,
        )
        .await;
    prometheus
        .says("tidegate_http_requests_total{code=\"400\"}", 1.0)
        .await;
    prometheus
        .says("sum(tidegate_decision_seconds_count)", 5.0)
        .await;
    let median = prometheus
        .number("histogram_quantile(0.5, sum by (le) (tidegate_decision_seconds_bucket))");
    assert!((0.000_001..1.0).contains(&median.await));
    let used = prometheus
        .number("tidegate_redis_memory_bytes / tidegate_redis_memory_max_bytes")
        .await;
    assert!((0.001..1.0).contains(&used), "{used}");
    let skew = prometheus.number("tidegate_redis_clock_skew_seconds").await;
    assert!(skew.abs() < 1.0, "one machine has one clock, not {skew}");
    prometheus.says("tidegate_redis_may_evict", 0.0).await;
    prometheus
        .says("tidegate_config_last_reload_successful", 1.0)
        .await;
    let age = prometheus
        .number("time() - tidegate_config_last_reload_success_timestamp_seconds")
        .await;
    assert!((-5.0..60.0).contains(&age), "{age}");
    // An alert as OPERATIONS has it: replicas that disagree.
    prometheus
        .says("count(count_values(\"hash\", tidegate_config_hash))", 1.0)
        .await;
    let metadata = prometheus.api("metadata").await;
    for (name, kind) in families(&page(&proxy).await) {
        // OpenMetrics, which the server asks for, has the ending in the samples only.
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
async fn its_checker_finds_nothing_to_say() {
    let (upstream, redis, authority) = (Upstream::echo().await, Server::start(), Authority::new());
    let proxy = with_everything(&redis, &authority, &upstream).await;
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
        .write_all(page(&proxy).await.as_bytes())
        .unwrap();
    let said = checker.wait_with_output().unwrap();
    let words = String::from_utf8_lossy(&[said.stdout, said.stderr].concat()).into_owned();
    assert!(said.status.success() && words.is_empty(), "{words}");
}

#[tokio::test]
async fn the_operations_page_lists_exactly_what_there_is() {
    let redis = Server::with(&["--maxmemory", "64mb"]);
    let (upstream, authority) = (Upstream::echo().await, Authority::new());
    let in_redis = with_everything(&redis, &authority, &upstream).await;
    let in_memory = Proxy::start("[trace]\notlp = 'http://127.0.0.1:9'\n", upstream.address).await;
    assert_eq!(in_memory.get("/").await.status, 200);
    let pages = [page(&in_redis).await, page(&in_memory).await];
    let mut there: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let label = Regex::new(r#"[{,]([a-z_]+)=""#).unwrap();
    for page in &pages {
        for name in families(page).into_keys() {
            let samples = page.lines().filter(|line| line.starts_with(&name));
            let labels =
                samples.flat_map(|line| label.captures_iter(line).map(|found| found[1].to_owned()));
            // What makes a histogram is no label of ours.
            let labels: Vec<_> = labels.filter(|label| label != "le").collect();
            there.entry(name).or_default().extend(labels);
        }
    }
    let operations = include_str!("../../docs/OPERATIONS.md");
    let row = Regex::new(r"(?m)^\| `(tidegate_[a-z_]+)` \|([^|]*)\| [^|]{8,} \|$").unwrap();
    let word = Regex::new("`([a-z_]+)`").unwrap();
    let told = row.captures_iter(operations).map(|row| {
        let labels = word
            .captures_iter(&row[2])
            .map(|label| label[1].to_owned())
            .collect();
        (row[1].to_owned(), labels)
    });
    let told: BTreeMap<String, BTreeSet<String>> = told.collect();
    let differs = |one: &BTreeMap<String, BTreeSet<String>>,
                   other: &BTreeMap<String, BTreeSet<String>>| {
        one.iter()
            .filter(|(name, labels)| other.get(*name) != Some(labels))
            .map(|row| format!("{row:?}"))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (differs(&there, &told), differs(&told, &there)),
        (vec![], vec![]),
        "there, told"
    );
}
