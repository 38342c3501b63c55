//! The proxy as a user runs it: the binary with a configuration file.

use super::prelude::*;
use super::process::{OutputLine, command_for};

/// A running proxy. It is killed on drop.
#[derive(Debug)]
pub struct Proxy {
    pub address: SocketAddr,
    process: ChildProcess,
    config: PathBuf,
    dir: TempDir,
    echo: Option<Upstream>,
}

/// A proxy to be started: its configuration, upstream, store and environment.
#[derive(Debug)]
pub struct Setup {
    config: String,
    config_file: Option<PathBuf>,
    upstream: UpstreamUrl,
    owned_upstream: Option<Upstream>,
    has_token: bool,
    env: Vec<(String, String)>,
    program: Option<PathBuf>,
}

/// A URL of an upstream, or the address of an HTTP/1.1 upstream.
#[derive(Debug)]
pub struct UpstreamUrl(String);

impl From<SocketAddr> for UpstreamUrl {
    fn from(address: SocketAddr) -> Self {
        Self(format!("http://{address}"))
    }
}

impl<T: AsRef<str>> From<&T> for UpstreamUrl
where
    T: ?Sized,
{
    fn from(url: &T) -> Self {
        Self(url.as_ref().to_owned())
    }
}

/// One line of the proxy's log.
#[derive(Clone, Debug)]
pub struct LogLine(Value);

impl Proxy {
    /// A proxy with the text of its configuration file. No upstream answers unless one is given.
    pub fn setup(config: &str) -> Setup {
        Setup {
            config: config.to_owned(),
            config_file: None,
            upstream: "http://127.0.0.1:9".into(),
            owned_upstream: None,
            has_token: false,
            env: Vec::new(),
            program: None,
        }
    }

    /// Starts a proxy with an upstream, policies, and otherwise defaults.
    pub async fn start(config: &str, upstream: impl Into<UpstreamUrl>) -> Self {
        Self::setup(config).upstream(upstream).start().await
    }

    /// As [`Self::start`], and waits until every worker is connected to the store.
    pub async fn start_connected(config: &str, upstream: impl Into<UpstreamUrl>) -> Self {
        let proxy = Self::start(config, upstream).await;
        proxy.wait_for_store().await;
        proxy
    }

    /// As [`Self::start_connected`], with its own [`Upstream::echo`].
    pub async fn echo_connected(config: &str) -> Self {
        let proxy = Self::with_echo(config).await;
        proxy.wait_for_store().await;
        proxy
    }

    /// As [`Self::start`], with its own [`Upstream::echo`].
    pub async fn with_echo(config: &str) -> Self {
        let setup = Self::setup(config).owned_upstream(Upstream::echo().await);
        setup.start().await
    }

    /// As [`Self::with_echo`]. The admin listener requires a token.
    pub async fn with_token(config: &str) -> Self {
        let setup = Self::setup(config).owned_upstream(Upstream::echo().await);
        setup.token().start().await
    }

    /// The upstream of [`Self::with_echo`].
    pub fn echo(&self) -> &Upstream {
        self.echo.as_ref().expect("a proxy started by with_echo")
    }

    pub fn request(&self, method: &str, target: &str) -> ClientRequest {
        ClientRequest::new(self.address, method, target)
    }

    /// Connects and sends these bytes.
    pub async fn send_raw(&self, bytes: impl AsRef<[u8]>) -> RawClient {
        RawClient::connect_and_send(self.address, bytes).await
    }

    /// Sends an upgrade request. Returns the connection and the first response, perhaps 101.
    pub async fn upgrade(&self, handshake: &str) -> (RawClient, RawResponse) {
        let mut client = self.send_raw(handshake).await;
        let reply = client.read_any_response(false).await;
        (client, reply)
    }

    pub async fn get(&self, target: &str) -> RawResponse {
        self.request("GET", target).send().await
    }

    /// Asserts the status of a GET. `why` says what is wrong otherwise.
    pub async fn expect_status(&self, target: &str, status: u16, why: &str) {
        assert_eq!(self.get(target).await.status, status, "{target}: {why}");
    }

    /// Sends a GET with one header.
    pub async fn get_with(&self, target: &str, name: &str, value: &str) -> RawResponse {
        self.request("GET", target).header(name, value).send().await
    }

    /// Sends this many GETs in sequence and returns their statuses.
    pub async fn get_statuses(&self, target: &str, times: usize) -> Vec<u16> {
        self.request("GET", target).send_times(times).await
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

    /// A temporary directory. It is removed on drop.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The address of the admin listener.
    pub fn admin_address(&self) -> SocketAddr {
        self.logged_address("admin listening")
            .expect("the admin port listens before the proxy does")
    }

    /// Returns one value of the metrics page, by name and labels, or 0 if it is absent.
    pub async fn read_metric(&self, series: &str) -> f64 {
        find_metric(&self.read_metrics_page().await, series).unwrap_or(0.0)
    }

    /// As [`Self::read_metric`], of a series that must exist.
    pub async fn read_present_metric(&self, series: &str) -> f64 {
        let page = self.read_metrics_page().await;
        let value = find_metric(&page, series);
        value.unwrap_or_else(|| panic!("no {series} in {page}"))
    }

    /// Asserts one value of the metrics page, see [`Self::read_metric`].
    pub async fn assert_metric(&self, series: &str, value: f64) {
        assert_eq!(self.read_metric(series).await, value, "{series}");
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

    pub async fn read_metrics_page(&self) -> String {
        let page = self.admin_request("GET", "/metrics").send().await;
        page.text()
    }

    /// A request to the admin listener.
    pub fn admin_request(&self, method: &str, target: &str) -> ClientRequest {
        ClientRequest::new(self.admin_address(), method, target).header("Host", "localhost")
    }

    /// Waits until a value of the metrics page equals this number.
    pub async fn wait_for_metric(&self, series: &str, wanted: f64) {
        let is_reached = async || self.read_metric(series).await == wanted;
        wait_until(format!("{series} {wanted}"), is_reached).await;
    }

    /// Waits until every worker is connected to the store. On a busy machine the proxy may start
    /// without a connection.
    pub async fn wait_for_store(&self) {
        self.wait_for_metric("tidegate_store_up", 1.0).await;
    }

    /// The address of the probe listener, if there is one.
    pub fn probe_address(&self) -> Option<SocketAddr> {
        self.logged_address("probes listening")
    }

    /// Returns the address in the log line that starts with this message, if it was logged.
    pub fn logged_address(&self, message: &str) -> Option<SocketAddr> {
        let lines = self.process.lines();
        lines.iter().find_map(|line| line.address(message))
    }

    /// Returns the number of lines logged so far, as a mark for later searches.
    pub fn log_mark(&self) -> usize {
        self.process.lines().len()
    }

    /// Returns the first line after the mark with a message that starts with these words.
    pub async fn wait_for_message(&self, words: &str, mark: usize) -> LogLine {
        let wanted = |line: &LogLine| line.message_starts_with(words);
        self.wait_for_log(words, mark, TEST_TIMEOUT, wanted).await
    }

    /// Returns the first line after the mark that contains this text.
    pub async fn wait_for_text(&self, text: &str, mark: usize) -> LogLine {
        let wanted = |line: &LogLine| line.contains(text);
        self.wait_for_log(text, mark, TEST_TIMEOUT, wanted).await
    }

    /// Returns the first line after the mark with this field.
    pub async fn wait_for_field(&self, name: &str, value: &str, mark: usize) -> LogLine {
        let (what, wanted) = (format!("{name} {value}"), |line: &LogLine| {
            line.field(name) == value
        });
        self.wait_for_log(&what, mark, TEST_TIMEOUT, wanted).await
    }

    /// Returns the first line after the mark that `wanted` accepts.
    pub async fn wait_for_log(
        &self,
        what: &str,
        mark: usize,
        within: Duration,
        wanted: impl Fn(&LogLine) -> bool,
    ) -> LogLine {
        let found = |line: &OutputLine| LogLine::parse(&line.text).filter(|line| wanted(line));
        self.process.wait_for(what, mark, within, found).await
    }

    /// The log after the mark, so far.
    pub fn log_since(&self, mark: usize) -> Vec<LogLine> {
        let lines = self.process.lines();
        let lines = lines.iter().skip(mark);
        lines
            .filter_map(|line| LogLine::parse(&line.text))
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

    /// Waits for the end of the process.
    pub async fn assert_exit_code(&mut self, code: i32) {
        self.process.assert_exit_code(code).await;
    }
}

fn find_metric(page: &str, series: &str) -> Option<f64> {
    let mut lines = page.lines();
    let value = lines.find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))?;
    Some(value.parse().unwrap())
}

impl Setup {
    /// Uses an existing file instead of the text.
    pub fn config_file(mut self, path: &Path) -> Self {
        self.config_file = Some(path.to_owned());
        self
    }

    pub fn upstream(mut self, upstream: impl Into<UpstreamUrl>) -> Self {
        self.upstream = upstream.into();
        self
    }

    /// An upstream that ends with the proxy.
    pub fn owned_upstream(mut self, upstream: Upstream) -> Self {
        self.upstream = upstream.address.into();
        self.owned_upstream = Some(upstream);
        self
    }

    /// The admin listener requires a token.
    pub fn token(mut self) -> Self {
        self.has_token = true;
        self
    }

    /// Counts in this server, see [`RedisServer::store_config`].
    pub fn redis(mut self, server: &RedisServer) -> Self {
        self.config = format!("{}\n{}", server.store_config(), self.config);
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
        let mut text = self.config;
        if self.has_token {
            let token = dir.path().join("token");
            fs::write(&token, "s3cret\n").unwrap();
            text = format!("admin.token_file = {token:?}\n{text}");
        }
        let config = self.config_file.unwrap_or_else(|| {
            let path = dir.path().join("config.toml");
            fs::write(&path, &text).unwrap();
            path
        });
        let mut command = match &self.program {
            Some(program) => command_for(program),
            None => tidegate_command(),
        };
        command.arg("run").arg("--config").arg(&config);
        command.args(["--listen", "127.0.0.1:0", "--upstream", &self.upstream.0]);
        command.envs(self.env);
        let process = ChildProcess::start(&mut command).unwrap();
        let address = process.wait_for_address("listening").await;
        Proxy {
            address,
            process,
            config,
            dir,
            echo: self.owned_upstream,
        }
    }
}

impl LogLine {
    /// Parses a line of the log. Other output is no line of the log.
    pub fn parse(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok().map(Self)
    }

    /// Whether the message equals or starts with these words.
    pub fn message_starts_with(&self, words: &str) -> bool {
        self.field("message").starts_with(words)
    }

    #[track_caller]
    pub fn expect_fields(&self, fields: &[(&str, &str)]) {
        for (name, value) in fields {
            assert_eq!(self.field(name), *value, "{name}: {self:?}");
        }
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
