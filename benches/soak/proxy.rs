//! The proxy under test: process, configuration, log, metrics and resource use.

use crate::ledger::SoakLedger;
use crate::support::client::PROMPT_TIMEOUT;
use crate::tls;
use serde_json::Value;
use std::fs;
use std::net::SocketAddr;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Requests of `/held` in flight, and of `/flooded` per hour.
pub(crate) const HELD_LIMIT: u64 = 5;
pub(crate) const FLOODED_LIMIT: u64 = 5;
/// Counters of this limit show what was charged.
const NEVER_REACHED: u64 = 100_000_000;

/// A running proxy; killed on drop.
pub(crate) struct ProxyProcess {
    child: Child,
    log: JoinHandle<()>,
    pub(crate) address: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) config: ProxyConfigFile,
    /// TLS configuration of the clients, if the listener uses TLS.
    pub(crate) tls: Option<tls::TlsConnectors>,
}

/// The proxy's configuration file, which the test rewrites repeatedly.
#[derive(Debug)]
pub(crate) struct ProxyConfigFile {
    directory: TempDir,
    name: &'static str,
    listen: String,
    upstream: String,
    redis_port: u16,
}

impl ProxyConfigFile {
    /// Effective versions differ by a policy that no request matches. `None` writes an invalid
    /// file.
    pub(crate) fn write_version(&self, version: Option<u64>) {
        let Self {
            directory,
            name,
            listen,
            upstream,
            redis_port: redis,
        } = self;
        let version = version.map_or("x".to_owned(), |version| version.to_string());
        let policies = format_policies(&version);
        let text = format!(
            "
upstream = {{ url = '{upstream}', pool_idle_timeout = '5s' }}
listen = {{ address = '127.0.0.1:0', http = {{ header_timeout = '2s', idle_timeout = '5s' }}{listen} }}
admin.address = '127.0.0.1:0'
log.access = 'off'
# A long timeout, so that a busy machine does not cause an outage.
store = {{ kind = 'redis', redis = {{ url = 'redis://127.0.0.1:{redis}/0', timeout = '1500ms', key_prefix = '{name}', instances = 1 }} }}
{policies}"
        );
        // Renamed into place, so that a reload never reads a partial file.
        let new = directory.path().join("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, directory.path().join("soak.toml")).unwrap();
    }
}

fn format_policies(version: &str) -> String {
    format!(
        "[[policy]]
name = 'log'
match.path = '/log'
key = ['header:x-user']
limit = {{ requests = 20, per = '2s', algorithm = 'sliding_log' }}
[[policy]]
name = 'bucket'
match.path = ['/bucket', '/upload']
key = ['header:x-user']
limit = {{ requests = 10, per = '1s', burst = 20, algorithm = 'token_bucket' }}
[[policy]]
name = 'leased'
match.path = '/leased'
limit = {{ requests = 20, per = '1s', algorithm = 'sliding_window' }}
lease = 'auto'
[[policy]]
name = 'local'
match.path = '/local'
key = ['header:x-user']
limit = {{ requests = 10, per = '1s' }}
on_store_failure = 'local'
[[policy]]
name = 'closed'
match.path = '/closed'
key = ['header:x-user']
limit = {{ requests = 10, per = '1s', algorithm = 'fixed_window' }}
on_store_failure = 'closed'
[[policy]]
name = 'slots'
match.path = '/slots'
limit = {{ requests = 2, algorithm = 'concurrency' }}
[[policy]]
name = 'line'
match.path = '/line'
limit = {{ requests = 50, per = '1s', algorithm = 'leaky_bucket', max_delay = '200ms' }}
[[policy]]
name = 'settled'
match.path = '/settled'
key = ['header:x-user']
cost = {{ estimate = 3, actual = 'response_header:x-cost' }}
limit = {{ requests = 40, per = '2s', algorithm = 'sliding_window' }}
[[policy]]
name = 'held'
match.path = '/held'
limit = {{ requests = {HELD_LIMIT}, algorithm = 'concurrency', lease_ttl = '1s' }}
on_store_failure = 'closed'
[[policy]]
name = 'metered'
match.path = '/metered'
cost = {{ estimate = 3, actual = 'response_header:x-cost' }}
limit = {{ requests = {NEVER_REACHED}, per = '1h', algorithm = 'sliding_log' }}
on_store_failure = 'closed'
[[policy]]
name = 'flooded'
match.path = '/flooded'
limit = {{ requests = {FLOODED_LIMIT}, per = '1h', algorithm = 'sliding_log' }}
on_store_failure = 'closed'
[[policy]]
name = 'flooded_total'
match.path = '/flooded'
limit = {{ requests = {NEVER_REACHED}, per = '1h', algorithm = 'sliding_log' }}
on_store_failure = 'closed'
[[policy]]
name = 'denied'
match.path = '/denied'
action = 'deny'
[[policy]]
name = 'client'
match.not = {{ path = ['/free', '/leased'] }}
key = ['client_ip']
limit = {{ requests = 100000, per = '1s', algorithm = 'token_bucket' }}
[[policy]]
name = 'version'
match.path = '/version'
limit = {{ requests = {version}, per = '1s' }}
"
    )
}

impl ProxyProcess {
    /// Starts the proxy and waits until it listens. Its warnings and errors go to the ledger.
    pub(crate) async fn start(
        name: &'static str,
        by_tls: bool,
        ledger: &Arc<SoakLedger>,
        upstream: String,
        redis: u16,
    ) -> Self {
        let directory = TempDir::new().unwrap();
        let tls = by_tls.then(|| tls::create_certificate(directory.path()));
        let at = directory.path().display();
        let listen = match by_tls {
            true => format!(", tls = {{ cert = '{at}/tls.crt', key = '{at}/tls.key' }}"),
            false => String::new(),
        };
        let config = ProxyConfigFile {
            directory,
            name,
            listen,
            upstream,
            redis_port: redis,
        };
        config.write_version(Some(1));
        let mut child = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .env_clear()
            .args(["run", "--config"])
            .arg(config.directory.path().join("soak.toml"))
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
        let admin = wait_for_logged_address(&mut log, "admin listening").await;
        let address = wait_for_logged_address(&mut log, "listening").await;
        let log = tokio::spawn(record_proxy_log(log, Arc::clone(ledger)));
        Self {
            child,
            log,
            address,
            admin,
            config,
            tls,
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id().expect("it has not ended")
    }

    /// Returns `VmRSS` in KiB.
    pub(crate) fn rss_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let rss = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:")?.strip_suffix(" kB"));
        rss.unwrap().trim().parse().unwrap()
    }

    /// Returns the number of open file descriptors.
    pub(crate) fn open_file_count(&self) -> u64 {
        fs::read_dir(format!("/proc/{}/fd", self.pid()))
            .unwrap()
            .map(|_| 1)
            .sum()
    }

    /// Sends a shutdown signal, waits for the exit, and reads the remaining log lines.
    pub(crate) async fn stop(mut self) -> ExitStatus {
        crate::support::send_signal(self.pid(), "TERM");
        let status = timeout(3 * PROMPT_TIMEOUT, self.child.wait())
            .await
            .expect("it ends in time")
            .unwrap();
        self.log.await.unwrap();
        status
    }
}

async fn wait_for_logged_address(
    log: &mut Lines<BufReader<ChildStderr>>,
    message: &str,
) -> SocketAddr {
    loop {
        let line = timeout(PROMPT_TIMEOUT, log.next_line())
            .await
            .expect("it starts in time")
            .unwrap();
        let text = line.expect("it starts at all");
        let line: Value = serde_json::from_str(&text).unwrap_or_default();
        let field = |name| line.get(name).and_then(Value::as_str);
        if field("message") == Some(message) {
            return field("address").unwrap().parse().unwrap();
        }
        println!("{text}");
    }
}

async fn record_proxy_log(mut log: Lines<BufReader<ChildStderr>>, ledger: Arc<SoakLedger>) {
    while let Ok(Some(text)) = log.next_line().await {
        let line: Value = serde_json::from_str(&text).unwrap_or_default();
        let field = |name| line.get(name).and_then(Value::as_str);
        match field("level") {
            Some("INFO") => {}
            level => ledger.record_log_line(
                level.unwrap_or("?"),
                field("message").unwrap_or_default(),
                &text,
            ),
        }
    }
}
