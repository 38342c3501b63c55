//! A Redis server for benchmarks, and helpers shared by their clients.

#![allow(dead_code, reason = "not every benchmark uses all of it")]

pub(crate) mod client;

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tidegate::store::MemorySettings;
use tidegate::store::redis::{RedisAddress, RedisCredentials, RedisSettings, RedisTopology};

pub(crate) const KEY_PREFIX: &str = "bench";

/// A Redis server owned by the benchmark; killed on drop.
pub(crate) struct RedisServer {
    child: Child,
    port: u16,
}

impl RedisServer {
    pub(crate) fn start() -> Self {
        Self::start_with_args(&[])
    }

    /// Starts a server with further arguments.
    pub(crate) fn start_with_args(args: &[&str]) -> Self {
        let port = find_free_port();
        Self {
            child: spawn_redis(port, args),
            port,
        }
    }

    /// Kills the server like `kill -9`: it saves nothing, and connections break.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Restarts a killed server, empty, on the same port.
    pub(crate) fn restart(&mut self) {
        self.child = spawn_redis(self.port, &[]);
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Deletes all keys.
    pub(crate) fn delete_all_keys(&self) {
        let flushed = Command::new("redis-cli")
            .args(["-p", &self.port.to_string(), "FLUSHALL"])
            .stdout(Stdio::null())
            .status();
        assert!(flushed.unwrap().success());
    }

    /// Returns the number of script calls so far.
    pub(crate) fn count_script_calls(&self) -> f64 {
        let mut connection = self.connection();
        let text: String = redis::cmd("INFO")
            .arg("commandstats")
            .query(&mut connection)
            .unwrap();
        let calls = text
            .lines()
            .find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        calls
            .and_then(|rest| rest.split(',').next()?.parse().ok())
            .unwrap_or(0.0)
    }

    /// Opens a direct connection, without the proxy.
    pub(crate) fn connection(&self) -> redis::Connection {
        redis::Client::open(("127.0.0.1", self.port))
            .unwrap()
            .get_connection()
            .unwrap()
    }

    pub(crate) fn settings(&self) -> RedisSettings {
        standalone_settings(self.port, KEY_PREFIX)
    }
}

/// Settings of one server on this machine.
pub(crate) fn standalone_settings(port: u16, key_prefix: &str) -> RedisSettings {
    RedisSettings {
        topology: RedisTopology::Standalone,
        servers: vec![RedisAddress::Tcp {
            host: "127.0.0.1".to_owned(),
            port,
        }],
        database: 0,
        credentials: RedisCredentials::default(),
        tls: None,
        key_prefix: key_prefix.to_owned(),
        initial_instances: 1,
        instance_counter_bounds: MemorySettings {
            max_keys: 1_000_000,
            max_bytes: 256 << 20,
        },
        state_dir: None,
        timeout: Duration::from_secs(1),
        connect_timeout: Duration::from_secs(1),
        breaker_failures: 5,
        probe_interval: Duration::from_millis(500),
        dialer: tidegate::store::redis::RedisDialer::Network,
    }
}

/// Returns a free port below the ephemeral range, so that it is still free after a restart.
pub(crate) fn find_free_port() -> u16 {
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    std::iter::repeat_with(|| fastrand::u16(20_000..32_000))
        .find(is_free)
        .unwrap()
}

/// Waits until the server accepts connections.
fn spawn_redis(port: u16, args: &[&str]) -> Child {
    let child = Command::new("redis-server")
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
        .args(args)
        .stdout(Stdio::null())
        .spawn();
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        std::thread::sleep(Duration::from_millis(10));
    }
    child.unwrap()
}

/// Sends a signal, named as in `kill -TERM`.
pub(crate) fn send_signal(pid: u32, name: &str) {
    // Uses the shell's builtin, because not every image has a `kill` binary.
    let sent = Command::new("sh")
        .args(["-c", "kill -$1 $2", "sh", name, &pid.to_string()])
        .status();
    assert!(sent.unwrap().success(), "kill -{name} {pid}");
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
