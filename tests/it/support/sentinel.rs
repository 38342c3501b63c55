//! A master, its replicas, and sentinels that watch over them.

use super::redis::{Server, free_port, ping, settings, tcp};
use super::{SOON, eventually};
use redis::FromRedisValue;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tidegate::store::redis::{Login, RedisSettings, Topology};

/// What the sentinels call the master.
pub const MASTER: &str = "shop";

/// How long a server is silent before it counts as down.
const DOWN_AFTER_MS: u32 = 300;

pub struct Watched {
    /// The first one is the master at the start.
    pub servers: Vec<Server>,
    pub sentinels: Vec<Sentinel>,
}

/// One process; killed on drop.
pub struct Sentinel {
    child: Child,
    pub port: u16,
    _folder: TempDir,
}

impl Watched {
    /// Starts a master, `replicas`, and three sentinels, and waits until all know each other.
    pub async fn start(replicas: usize) -> Self {
        // Else a master waits some seconds for further replicas.
        let prompt = ["--repl-diskless-sync-delay", "0"];
        let mut servers = vec![Server::with(&prompt)];
        for _ in 0..replicas {
            let port = servers[0].port().to_string();
            servers.push(Server::with(&[&prompt[..], &["--replicaof", "127.0.0.1", &port]].concat()));
        }
        let sentinels = (0..3).map(|_| Sentinel::start(servers[0].port())).collect();
        let watched = Self { servers, sentinels };
        watched.is_whole(replicas).await;
        watched
    }

    pub fn settings(&self) -> RedisSettings {
        RedisSettings {
            topology: Topology::Sentinel { master: MASTER.to_owned(), login: Login::default() },
            servers: self.sentinels.iter().map(|sentinel| tcp(sentinel.port)).collect(),
            ..settings(0)
        }
    }

    /// The same for a configuration file.
    pub fn lines(&self) -> String {
        let urls: Vec<_> =
            self.sentinels.iter().map(|one| format!("\"redis://127.0.0.1:{}\"", one.port)).collect();
        format!("topology = \"sentinel\"\nsentinel_master = \"{MASTER}\"\nurls = [{}]", urls.join(", "))
    }

    /// The port of whom the first sentinel that lives takes for the master.
    pub async fn master(&self) -> u16 {
        let mut asked = redis::cmd("SENTINEL");
        asked.arg("GET-MASTER-ADDR-BY-NAME").arg(MASTER);
        for sentinel in &self.sentinels {
            let Ok(client) = redis::Client::open(("127.0.0.1", sentinel.port)) else { continue };
            let Ok(mut connection) = client.get_multiplexed_async_connection().await else { continue };
            let (_, port): (String, u16) = asked.query_async(&mut connection).await.unwrap();
            return port;
        }
        panic!("no sentinel lives");
    }

    pub fn server(&mut self, port: u16) -> &mut Server {
        self.servers.iter_mut().find(|server| server.port() == port).unwrap()
    }

    async fn is_whole(&self, replicas: usize) {
        let mut states = Vec::new();
        for sentinel in &self.sentinels {
            let client = redis::Client::open(("127.0.0.1", sentinel.port)).unwrap();
            states.push(client.get_connection().unwrap());
        }
        eventually("sentinels and replicas to know each other", SOON, || {
            let all = states.iter_mut().all(|connection| {
                let state: redis::RedisResult<std::collections::HashMap<String, String>> =
                    redis::cmd("SENTINEL").arg("MASTER").arg(MASTER).query(connection);
                state.is_ok_and(|state| {
                    state["num-slaves"] == replicas.to_string()
                        && state["num-other-sentinels"] == "2"
                        && state["flags"] == "master"
                })
            });
            all.then_some(())
        })
        .await;
        let mut master = self.servers[0].connection().await;
        // Until replicas are in step, none can be promoted.
        let wanted = i64::try_from(replicas).unwrap();
        redis::cmd("SET").arg("x").arg(1).exec_async(&mut master).await.unwrap();
        let deadline = Instant::now() + SOON;
        loop {
            let acknowledged: i64 =
                redis::cmd("WAIT").arg(replicas).arg(100).query_async(&mut master).await.unwrap();
            if acknowledged == wanted {
                break;
            }
            assert!(Instant::now() < deadline, "replicas do not follow");
        }
    }
}

impl Sentinel {
    fn start(master: u16) -> Self {
        // Somebody else may take the free port before it does.
        for _ in 0..20 {
            let (port, folder) = (free_port(), TempDir::new().unwrap());
            let file = folder.path().join("sentinel.conf");
            let text = format!(
                "port {port}\nbind 127.0.0.1\ndir {}\nsentinel monitor {MASTER} 127.0.0.1 {master} 2\n\
                 sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}\n\
                 sentinel failover-timeout {MASTER} 1000\n",
                folder.path().display()
            );
            fs::write(&file, text).unwrap();
            let child = Command::new("redis-server")
                .arg(&file)
                .arg("--sentinel")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let mut sentinel = Self { child, port, _folder: folder };
            if sentinel.answers() {
                return sentinel;
            }
        }
        panic!("no sentinel starts");
    }

    /// Runs one command, on a connection of its own.
    pub async fn command<T: FromRedisValue>(&self, words: &str) -> T {
        let client = redis::Client::open(("127.0.0.1", self.port)).unwrap();
        let mut words = words.split(' ');
        let mut command = redis::cmd(words.next().unwrap());
        command.arg(words.collect::<Vec<_>>());
        command.query_async(&mut client.get_multiplexed_async_connection().await.unwrap()).await.unwrap()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn answers(&mut self) -> bool {
        let deadline = Instant::now() + SOON;
        while Instant::now() < deadline && self.child.try_wait().unwrap().is_none() {
            if ping(self.port) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
