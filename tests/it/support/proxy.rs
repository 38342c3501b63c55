//! The proxy as a user runs it: the binary with a configuration file.

use super::TEST_TIMEOUT;
use super::client::{ClientRequest, RawResponse};
use super::process::{ChildProcess, ProcessOutput, command_for, tidegate_command};
use serde_json::Value;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

/// A running proxy. It is killed on drop.
#[derive(Debug)]
pub struct Proxy {
    pub address: SocketAddr,
    process: ChildProcess,
    config: PathBuf,
    _dir: TempDir,
}

#[derive(Debug)]
pub struct ProxyBuilder {
    config: String,
    config_file: Option<PathBuf>,
    upstream: String,
    env: Vec<(String, String)>,
    program: Option<PathBuf>,
}

/// One line of the proxy's log.
#[derive(Clone, Debug)]
pub struct LogLine(Value);

impl Proxy {
    pub fn builder() -> ProxyBuilder {
        ProxyBuilder {
            config: String::new(),
            config_file: None,
            upstream: "http://127.0.0.1:9".into(),
            env: Vec::new(),
            program: None,
        }
    }

    /// Starts a proxy with an upstream, policies, and otherwise defaults.
    pub async fn start(config: &str, upstream: SocketAddr) -> Self {
        Self::builder()
            .config(config)
            .upstream(upstream)
            .start()
            .await
    }

    pub fn request(&self, method: &str, target: &str) -> ClientRequest {
        ClientRequest::new(self.address, method, target)
    }

    pub async fn get(&self, target: &str) -> RawResponse {
        self.request("GET", target).send().await
    }

    /// Sends this many GETs in sequence and returns their statuses.
    pub async fn get_statuses(&self, target: &str, times: usize) -> Vec<u16> {
        let mut statuses = Vec::new();
        for _ in 0..times {
            statuses.push(self.get(target).await.status);
        }
        statuses
    }

    /// Breaks the log pipe: later log lines are lost.
    pub async fn break_log_pipe(&mut self) {
        self.process.close_output_pipes().await;
    }

    pub fn write_config(&self, text: &str) {
        fs::write(&self.config, text).unwrap();
    }

    pub fn config_path(&self) -> &Path {
        &self.config
    }

    /// The address of the admin listener.
    pub fn admin_address(&self) -> SocketAddr {
        self.logged_address("admin listening")
            .expect("the admin port listens before the proxy does")
    }

    /// Returns one value of the metrics page, by name and labels, or 0 if it is absent.
    pub async fn read_metric(&self, series: &str) -> f64 {
        let page = self.read_metrics_page().await;
        let value = page
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.map_or(0.0, |value| value.parse().unwrap())
    }

    /// Returns the lines of `tidegate_store_errors_total` on the metrics page that are not 0.
    pub async fn read_store_error_lines(&self) -> Vec<String> {
        let page = self.read_metrics_page().await;
        page.lines()
            .filter(|line| {
                line.starts_with("tidegate_store_errors_total{") && !line.ends_with(" 0")
            })
            .map(str::to_owned)
            .collect()
    }

    async fn read_metrics_page(&self) -> String {
        ClientRequest::new(self.admin_address(), "GET", "/metrics")
            .header("Host", "localhost")
            .send()
            .await
            .text()
    }

    /// Waits until every worker is connected to the store. On a busy machine the proxy may start
    /// without a connection.
    pub async fn wait_for_store(&self) {
        let deadline = Instant::now() + TEST_TIMEOUT;
        while self.read_metric("tidegate_store_up").await != 1.0 {
            assert!(
                Instant::now() < deadline,
                "the store is not connected: {}",
                self.log_text()
            );
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// The address of the probe listener, if there is one.
    pub fn probe_address(&self) -> Option<SocketAddr> {
        self.logged_address("probes listening")
    }

    /// Returns the address in the log line that starts with this message, if it was logged.
    pub fn logged_address(&self, message: &str) -> Option<SocketAddr> {
        self.process.lines().iter().find_map(|line| {
            let line = LogLine(serde_json::from_str(&line.text).ok()?);
            line.message_starts_with(message)
                .then(|| line.field("address").parse().unwrap())
        })
    }

    /// Returns the number of lines logged so far, as a mark for later searches.
    pub fn log_mark(&self) -> usize {
        self.process.lines().len()
    }

    /// Returns the first line after the mark that `wanted` accepts.
    pub async fn wait_for_log(
        &self,
        what: &str,
        mark: usize,
        within: Duration,
        wanted: impl Fn(&LogLine) -> bool,
    ) -> LogLine {
        let found = |text: &str| {
            serde_json::from_str(text)
                .ok()
                .map(LogLine)
                .filter(|line| wanted(line))
        };
        self.process
            .wait_for(what, mark, within, |line| found(&line.text))
            .await
    }

    /// The log after the mark, so far.
    pub fn log_since(&self, mark: usize) -> Vec<LogLine> {
        let lines = self.process.lines();
        lines
            .iter()
            .skip(mark)
            .filter_map(|line| serde_json::from_str(&line.text).ok().map(LogLine))
            .collect()
    }

    /// The complete log so far, for assertion messages.
    pub fn log_text(&self) -> String {
        self.process.transcript()
    }

    pub fn send_sigterm(&self) {
        self.process.send_signal("TERM");
    }

    /// Sends SIGSTOP.
    pub fn pause(&self) {
        self.process.send_signal("STOP");
    }

    /// Sends SIGCONT.
    pub fn resume(&self) {
        self.process.send_signal("CONT");
    }

    pub fn send_sighup(&self) {
        self.process.send_signal("HUP");
    }

    pub fn rss_kib(&self) -> u64 {
        self.process.rss_kib()
    }

    pub fn anonymous_kib(&self) -> u64 {
        self.process.anonymous_kib()
    }

    pub fn is_running(&mut self) -> bool {
        self.process.is_running()
    }

    pub async fn wait_for_exit(&mut self, within: Duration) -> ProcessOutput {
        self.process.wait_for_exit(within).await
    }
}

impl ProxyBuilder {
    /// The text of the configuration file.
    pub fn config(mut self, text: &str) -> Self {
        text.clone_into(&mut self.config);
        self
    }

    /// Uses an existing file instead.
    pub fn config_file(mut self, path: &Path) -> Self {
        self.config_file = Some(path.to_owned());
        self
    }

    pub fn upstream(mut self, address: SocketAddr) -> Self {
        self.upstream = format!("http://{address}");
        self
    }

    /// Accepts any upstream URL.
    pub fn upstream_url(mut self, url: &str) -> Self {
        url.clone_into(&mut self.upstream);
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Runs another version's binary.
    #[allow(dead_code, reason = "benches/upgrade.rs uses it")]
    pub fn program(mut self, path: &Path) -> Self {
        self.program = Some(path.to_owned());
        self
    }

    /// Starts the proxy and waits until it listens.
    pub async fn start(self) -> Proxy {
        let dir = TempDir::new().unwrap();
        let config = self.config_file.unwrap_or_else(|| {
            let path = dir.path().join("config.toml");
            fs::write(&path, &self.config).unwrap();
            path
        });
        let mut command = match &self.program {
            Some(program) => command_for(program),
            None => tidegate_command(),
        };
        command.arg("run").arg("--config").arg(&config);
        command.args(["--listen", "127.0.0.1:0", "--upstream", &self.upstream]);
        command.envs(self.env);
        let process = ChildProcess::start(&mut command).unwrap();
        let listening = |text: &str| {
            let line = LogLine(serde_json::from_str(text).ok()?);
            line.message_starts_with("listening")
                .then(|| line.field("address").parse().unwrap())
        };
        let address = process
            .wait_for("the proxy to listen", 0, TEST_TIMEOUT, |line| {
                listening(&line.text)
            })
            .await;
        Proxy {
            address,
            process,
            config,
            _dir: dir,
        }
    }
}

impl LogLine {
    /// Whether the message equals or starts with these words.
    pub fn message_starts_with(&self, words: &str) -> bool {
        self.field("message").starts_with(words)
    }

    pub fn is_level(&self, level: &str) -> bool {
        self.0["level"].as_str() == Some(level)
    }

    /// Whether the line contains these words.
    pub fn contains(&self, words: &str) -> bool {
        self.0.to_string().contains(words)
    }

    /// Returns a field as text, empty if it is absent.
    pub fn field(&self, name: &str) -> String {
        let value = self.0["fields"].get(name).or_else(|| self.0.get(name));
        value.map_or_else(String::new, |value| {
            value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_owned)
        })
    }
}
