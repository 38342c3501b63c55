//! A master, its replicas, and sentinels that watch over them.

use super::redis::{Server, free_port, ping, settings, tcp};
use super::tls::Authority;
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
    speaks_tls: bool,
}

/// One process; killed on drop.
pub struct Sentinel {
    child: Child,
    pub port: u16,
    /// If it speaks TLS.
    tls_port: u16,
    _folder: TempDir,
}

impl Watched {
    /// Starts a master, `replicas`, and three sentinels, and waits until all know each other.
    pub async fn start(replicas: usize) -> Self {
        Self::of(replicas, None).await
    }

    /// The same, and all speak TLS to each other, and to whoever has a certificate.
    pub async fn with_tls(authority: &Authority, replicas: usize) -> Self {
        authority.sign("server", "127.0.0.1");
        Self::of(replicas, Some(authority)).await
    }

    async fn of(replicas: usize, authority: Option<&Authority>) -> Self {
        // Else a master waits some seconds for further replicas.
        let prompt = ["--repl-diskless-sync-delay", "0"];
        let server = |args: &[&str]| match authority {
            None => Server::with(&[&prompt, args].concat()),
            Some(authority) => Server::with_tls(
                authority,
                &[&prompt, &["--tls-replication", "yes"], args].concat(),
            ),
        };
        let speaks_tls = authority.is_some();
        let mut servers = vec![server(&[])];
        let master = port_of(&servers[0], speaks_tls);
        for _ in 0..replicas {
            servers.push(server(&["--replicaof", "127.0.0.1", &master.to_string()]));
        }
        let sentinels = (0..3).map(|_| Sentinel::start(master, authority)).collect();
        let watched = Self {
            servers,
            sentinels,
            speaks_tls,
        };
        watched.is_whole(replicas).await;
        watched
    }

    pub fn settings(&self) -> RedisSettings {
        RedisSettings {
            topology: Topology::Sentinel {
                master: MASTER.to_owned(),
                login: Login::default(),
            },
            servers: self
                .sentinels
                .iter()
                .map(|sentinel| tcp(sentinel.port))
                .collect(),
            ..settings(0)
        }
    }

    /// The same for a configuration file.
    pub fn lines(&self) -> String {
        let url = |one: &Sentinel| match self.speaks_tls {
            true => format!("\"rediss://127.0.0.1:{}\"", one.tls_port),
            false => format!("\"redis://127.0.0.1:{}\"", one.port),
        };
        let urls: Vec<_> = self.sentinels.iter().map(url).collect();
        format!(
            "topology = \"sentinel\"\nsentinel_master = \"{MASTER}\"\nurls = [{}]",
            urls.join(", ")
        )
    }

    /// The port of whom the first sentinel that lives takes for the master.
    pub async fn master(&self) -> u16 {
        let mut asked = redis::cmd("SENTINEL");
        asked.arg("GET-MASTER-ADDR-BY-NAME").arg(MASTER);
        for sentinel in &self.sentinels {
            let Ok(client) = redis::Client::open(("127.0.0.1", sentinel.port)) else {
                continue;
            };
            let Ok(mut connection) = client.get_multiplexed_async_connection().await else {
                continue;
            };
            let (_, port): (String, u16) = asked.query_async(&mut connection).await.unwrap();
            return port;
        }
        panic!("no sentinel lives");
    }

    pub fn server(&mut self, port: u16) -> &mut Server {
        let speaks_tls = self.speaks_tls;
        self.servers
            .iter_mut()
            .find(|server| port_of(server, speaks_tls) == port)
            .unwrap()
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
                    redis::cmd("SENTINEL")
                        .arg("MASTER")
                        .arg(MASTER)
                        .query(connection);
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
        redis::cmd("SET")
            .arg("x")
            .arg(1)
            .exec_async(&mut master)
            .await
            .unwrap();
        let deadline = Instant::now() + SOON;
        loop {
            let acknowledged: i64 = redis::cmd("WAIT")
                .arg(replicas)
                .arg(100)
                .query_async(&mut master)
                .await
                .unwrap();
            if acknowledged == wanted {
                break;
            }
            assert!(Instant::now() < deadline, "replicas do not follow");
        }
    }
}

/// By which the others know it.
fn port_of(server: &Server, speaks_tls: bool) -> u16 {
    if speaks_tls {
        server.tls_port()
    } else {
        server.port()
    }
}

impl Sentinel {
    fn start(master: u16, authority: Option<&Authority>) -> Self {
        // Somebody else may take the free port before it does.
        for _ in 0..20 {
            let (port, tls_port, folder) = (free_port(), free_port(), TempDir::new().unwrap());
            let tls = authority.map(|authority| {
                let [cert, key, ca] = ["server.pem", "server.key", "ca.pem"].map(|file| authority.text(file));
                format!(
                    "tls-port {tls_port}\ntls-replication yes\ntls-cert-file {cert}\ntls-key-file {key}\n\
                     tls-ca-cert-file {ca}\n"
                )
            });
            let file = folder.path().join("sentinel.conf");
            let text = format!(
                "port {port}\nbind 127.0.0.1\ndir {}\n{}sentinel monitor {MASTER} 127.0.0.1 {master} 2\n\
                 sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}\n\
                 sentinel failover-timeout {MASTER} 1000\n",
                folder.path().display(),
                tls.unwrap_or_default()
            );
            fs::write(&file, text).unwrap();
            let child = Command::new("redis-server")
                .arg(&file)
                .arg("--sentinel")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let mut sentinel = Self {
                child,
                port,
                tls_port,
                _folder: folder,
            };
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
        command
            .query_async(&mut client.get_multiplexed_async_connection().await.unwrap())
            .await
            .unwrap()
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
