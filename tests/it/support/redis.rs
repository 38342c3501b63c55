//! A real redis-server per test: own process, own port, no persistence.

use super::clock_offset::ClockOffset;
use super::prelude::*;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, FromRedisValue, Value};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use tidegate::store::MemorySettings;
use tidegate::store::redis::{RedisAddress, RedisCredentials};

/// A running server. It is killed on drop.
pub(crate) struct RedisServer {
    child: Child,
    port: u16,
    directory: TempDir,
    args: Vec<String>,
    clock: Option<ClockOffset>,
}

impl RedisServer {
    /// Starts a server on a free port and waits until it answers.
    pub(crate) fn start() -> Self {
        Self::start_with::<&str>(&[])
    }

    /// As [`Self::start`], with further arguments, for example `["--requirepass", "x"]`.
    pub(crate) fn start_with<S: AsRef<str>>(args: &[S]) -> Self {
        Self::start_process(args, None)
    }

    /// Starts a server with a clock that [`Self::set_clock_offset`] sets.
    pub(crate) fn start_with_clock() -> Self {
        Self::start_process::<&str>(&[], Some(ClockOffset::new()))
    }

    /// As [`Self::start_with_clock`], with further arguments.
    pub(crate) fn start_with_clock_and<S: AsRef<str>>(args: &[S]) -> Self {
        Self::start_process(args, Some(ClockOffset::new()))
    }

    /// Sets how many seconds the server's clock is ahead.
    pub(crate) fn set_clock_offset(&self, secs: u64) {
        self.clock.as_ref().unwrap().set_secs(secs);
    }

    fn start_process<S: AsRef<str>>(args: &[S], mut clock: Option<ClockOffset>) -> Self {
        let args: Vec<String> = args.iter().map(|arg| arg.as_ref().to_owned()).collect();
        // Another process may take the free port before the server does. The server then exits, and
        // another port is tried.
        for _ in 0..20 {
            let (port, directory) = (free_port(), tempfile::tempdir().unwrap());
            let child = spawn_server(port, &directory, &args, clock.as_ref());
            let mut server = Self {
                child,
                port,
                directory,
                args: args.clone(),
                clock: clock.take(),
            };
            if server.wait_until_ready() {
                return server;
            }
            clock = server.clock.take();
        }
        panic!("redis-server did not start");
    }

    /// As [`Self::start_with`], with a second port for TLS that uses the authority's `server.pem`,
    /// also between servers.
    pub(crate) fn start_with_tls<S: AsRef<str>>(
        authority: &CertificateAuthority,
        args: &[S],
    ) -> Self {
        let port = free_port().to_string();
        let files = ["server.pem", "server.key", "ca.pem"].map(|file| authority.path_string(file));
        let names = ["--tls-cert-file", "--tls-key-file", "--tls-ca-cert-file"];
        let files = names
            .iter()
            .zip(&files)
            .flat_map(|(name, file)| [*name, file.as_str()]);
        let tls = ["--tls-port", &port]
            .into_iter()
            .chain(files)
            .chain(args.iter().map(AsRef::as_ref));
        Self::start_with(&tls.collect::<Vec<_>>())
    }

    /// The port for TLS of [`Self::start_with_tls`].
    pub(crate) fn tls_port(&self) -> u16 {
        self.args[1].parse().unwrap()
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Store settings for a proxy. The long timeout keeps a busy machine from being taken for an
    /// outage.
    pub(crate) fn store_config(&self) -> String {
        let port = self.port;
        format!(
            "store = {{ kind = 'redis', redis = {{ url = 'redis://127.0.0.1:{port}/0', timeout = '5s', key_prefix = 'test' }} }}"
        )
    }

    /// As `kill -9`: nothing is saved, connections break.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Restarts a killed server, empty, on the same port.
    pub(crate) fn restart(&mut self) {
        self.respawn();
        assert!(self.wait_until_ready(), "redis-server did not restart");
    }

    /// As [`Self::restart`], without blocking the test's other tasks.
    pub(crate) async fn restart_async(&mut self) {
        self.respawn();
        let client = redis::Client::open(("127.0.0.1", self.port)).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while client.get_multiplexed_async_connection().await.is_err() {
            assert!(Instant::now() < deadline, "redis-server did not restart");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// As [`Self::restart`], without waiting until the server answers.
    pub(crate) fn respawn(&mut self) {
        let clock = self.clock.as_ref();
        self.child = spawn_server(self.port, &self.directory, &self.args, clock);
    }

    /// Sends SIGSTOP: sockets stay open, and the server answers nothing.
    pub(crate) fn pause(&self) {
        self.send_signal("-STOP");
    }

    pub(crate) fn resume(&self) {
        self.send_signal("-CONT");
    }

    /// A connection for commands of the test.
    pub(crate) async fn connection(&self) -> MultiplexedConnection {
        connect_to_port(self.port, Some(Duration::from_secs(5))).await
    }

    /// As [`Self::connection`], without a response timeout, for thousands of commands on a busy
    /// machine.
    pub(crate) async fn connection_without_timeout(&self) -> MultiplexedConnection {
        connect_to_port(self.port, None).await
    }

    /// Runs one command, for example `"CONFIG SET maxmemory 1"`, on its own connection.
    pub(crate) async fn command<T: FromRedisValue>(&self, words: &str) -> T {
        run_redis_command(self.port, words).await
    }

    /// Runs a command whose reply is OK.
    pub(crate) async fn run(&self, words: impl AsRef<str>) {
        self.command(words.as_ref()).await
    }

    /// Returns one number of INFO, such as `("memory", "number_of_cached_scripts")`.
    pub(crate) async fn read_info_number(&self, section: &str, name: &str) -> u64 {
        let text: String = self.command(&format!("INFO {section}")).await;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let number = line
            .unwrap_or("0")
            .split(|c: char| !c.is_ascii_digit())
            .find(|part| !part.is_empty());
        number.unwrap().parse().unwrap()
    }

    /// The open connections, with that of this call.
    pub(crate) async fn connected_clients(&self) -> u64 {
        self.read_info_number("clients", "connected_clients").await
    }

    /// All connections so far, with that of this call.
    pub(crate) async fn connections_received(&self) -> u64 {
        self.read_info_number("stats", "total_connections_received")
            .await
    }

    pub(crate) fn settings(&self) -> RedisSettings {
        redis_settings(self.port)
    }

    /// Connects with settings for tests.
    pub(crate) async fn connect(&self) -> (Arc<SharedRedisState>, RedisStore) {
        connect_redis(self.settings()).await
    }

    fn send_signal(&self, signal: &str) {
        let status = Command::new("kill")
            .args([signal, &self.child.id().to_string()])
            .status()
            .unwrap();
        assert!(status.success());
    }

    fn wait_until_ready(&mut self) -> bool {
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            if self.child.try_wait().unwrap().is_some() {
                return false;
            }
            if ping(self.port) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Connects with this timeout for replies.
async fn connect_to_port(port: u16, reply_timeout: Option<Duration>) -> MultiplexedConnection {
    let client = redis::Client::open(("127.0.0.1", port)).unwrap();
    let patient = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(Duration::from_secs(5)))
        .set_response_timeout(reply_timeout);
    let connected = client.get_multiplexed_async_connection_with_config(&patient);
    connected.await.unwrap()
}

/// Runs one command, such as `"CONFIG SET maxmemory 1"`, on its own connection.
pub(crate) async fn run_redis_command<T: FromRedisValue>(port: u16, words: &str) -> T {
    let mut command = Cmd::new();
    for word in words.split(' ') {
        command.arg(word);
    }
    let mut connection = connect_to_port(port, Some(Duration::from_secs(5))).await;
    command.query_async(&mut connection).await.unwrap()
}

/// Settings for tests, with timeouts that a busy machine can meet.
pub(crate) fn redis_settings(port: u16) -> RedisSettings {
    RedisSettings {
        topology: RedisTopology::Standalone,
        servers: vec![local_address(port)],
        database: 0,
        credentials: RedisCredentials::default(),
        tls: None,
        key_prefix: "t".to_owned(),
        initial_instances: 1,
        instance_counter_bounds: MemorySettings {
            max_keys: 10_000,
            max_bytes: 16 << 20,
        },
        state_dir: None,
        timeout: Duration::from_millis(200),
        connect_timeout: Duration::from_secs(1),
        breaker_failures: 5,
        probe_interval: Duration::from_millis(100),
        dialer: tidegate::store::redis::RedisDialer::Network,
    }
}

/// The address of a local port.
pub(crate) fn local_address(port: u16) -> RedisAddress {
    RedisAddress::Tcp {
        host: "127.0.0.1".to_owned(),
        port,
    }
}

/// Connects, and waits until the first connection is ready.
pub(crate) async fn connect_redis(settings: RedisSettings) -> (Arc<SharedRedisState>, RedisStore) {
    let shared = SharedRedisState::new(settings);
    let redis = RedisStore::start(&shared);
    redis.wait_until_ready().await;
    (shared, redis)
}

/// Lists all keys of a server except the membership sets.
pub(crate) async fn list_counter_keys(server: &RedisServer) -> Vec<String> {
    let keys: Vec<String> = server.command("KEYS *").await;
    keys.into_iter()
        .filter(|key| !key.contains(":v1:instances"))
        .collect()
}

pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

pub(crate) fn ping(port: u16) -> bool {
    let Ok(client) = redis::Client::open(("127.0.0.1", port)) else {
        return false;
    };
    let Ok(mut connection) = client.get_connection_with_timeout(Duration::from_millis(200)) else {
        return false;
    };
    // A server that requires a password answers with an error.
    match redis::cmd("PING").query::<Value>(&mut connection) {
        Ok(_) => true,
        Err(error) => error.code() == Some("NOAUTH"),
    }
}

/// The server program. `TIDEGATE_TEST_REDIS_SERVER` replaces `redis-server`, to test with another
/// version of Redis, or with Valkey.
pub(crate) fn server_command() -> Command {
    Command::new(
        std::env::var_os("TIDEGATE_TEST_REDIS_SERVER").unwrap_or_else(|| "redis-server".into()),
    )
}

fn spawn_server(
    port: u16,
    directory: &TempDir,
    args: &[String],
    clock: Option<&ClockOffset>,
) -> Child {
    let mut command = server_command();
    if let Some(clock) = clock {
        clock.apply_to(&mut command);
    }
    let child = command
        .args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ])
        .arg("--dir")
        .arg(directory.path())
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    child.unwrap_or_else(|error| {
        panic!("these tests need redis-server 7 (Debian and Ubuntu: apt-get install redis-server): {error}")
    })
}
