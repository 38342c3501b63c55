//! A master, its replicas and its sentinels.

use super::fake_redis::read_command_words;
use super::prelude::*;
use super::redis::{local_address, ping, run_redis_command, server_command};
use redis::FromRedisValue;
use std::process::{Child, Stdio};
use tidegate::store::redis::RedisCredentials;
use tokio::io::BufReader;

/// The master's name in the sentinels.
pub const MASTER_NAME: &str = "shop";

/// A server counts as down after this time without a reply.
const DOWN_AFTER_MS: u32 = 300;

pub struct SentinelDeployment {
    /// The first server is the master at the start.
    pub servers: Vec<RedisServer>,
    pub sentinels: Vec<SentinelProcess>,
    uses_tls: bool,
}

/// One sentinel process. It is killed on drop.
pub struct SentinelProcess {
    child: Child,
    pub port: u16,
    /// The port for TLS, if enabled.
    tls_port: u16,
    _folder: TempDir,
}

impl SentinelDeployment {
    /// Starts a master, `replicas` replicas and three sentinels. Waits until all of them know each
    /// other.
    pub async fn start(replicas: usize) -> Self {
        Self::launch(replicas, None).await
    }

    /// As [`Self::start`], with TLS between all servers and a client certificate required.
    pub async fn with_tls(authority: &CertificateAuthority, replicas: usize) -> Self {
        authority.sign("server", "127.0.0.1");
        Self::launch(replicas, Some(authority)).await
    }

    async fn launch(replicas: usize, authority: Option<&CertificateAuthority>) -> Self {
        // Otherwise a master waits some seconds for further replicas.
        let prompt = ["--repl-diskless-sync-delay", "0"];
        let server = |args: &[&str]| match authority {
            None => RedisServer::start_with(&[&prompt, args].concat()),
            Some(authority) => RedisServer::start_with_tls(
                authority,
                &[&prompt, &["--tls-replication", "yes"], args].concat(),
            ),
        };
        let speaks_tls = authority.is_some();
        let mut servers = vec![server(&[])];
        let master = server_port(&servers[0], speaks_tls);
        for _ in 0..replicas {
            servers.push(server(&["--replicaof", "127.0.0.1", &master.to_string()]));
        }
        let sentinels = (0..3)
            .map(|_| SentinelProcess::start(master, authority))
            .collect();
        let watched = Self {
            servers,
            sentinels,
            uses_tls: speaks_tls,
        };
        watched.wait_until_synchronized(replicas).await;
        watched
    }

    pub fn settings(&self) -> RedisSettings {
        RedisSettings {
            topology: RedisTopology::Sentinel {
                master: MASTER_NAME.to_owned(),
                credentials: RedisCredentials::default(),
            },
            servers: self
                .sentinels
                .iter()
                .map(|sentinel| local_address(sentinel.port))
                .collect(),
            ..redis_settings(0)
        }
    }

    /// The same settings as lines of a configuration file.
    pub fn config_lines(&self) -> String {
        let url = |one: &SentinelProcess| match self.uses_tls {
            true => format!("\"rediss://127.0.0.1:{}\"", one.tls_port),
            false => format!("\"redis://127.0.0.1:{}\"", one.port),
        };
        let urls: Vec<_> = self.sentinels.iter().map(url).collect();
        format!(
            "topology = \"sentinel\"\nsentinel_master = \"{MASTER_NAME}\"\nurls = [{}]",
            urls.join(", ")
        )
    }

    /// The port of the master according to the first sentinel that is alive.
    pub async fn master_port(&self) -> u16 {
        let mut asked = redis::cmd("SENTINEL");
        asked.arg("GET-MASTER-ADDR-BY-NAME").arg(MASTER_NAME);
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
        panic!("no sentinel is alive");
    }

    pub fn server_by_port(&mut self, port: u16) -> &mut RedisServer {
        let speaks_tls = self.uses_tls;
        self.servers
            .iter_mut()
            .find(|server| server_port(server, speaks_tls) == port)
            .unwrap()
    }

    async fn wait_until_synchronized(&self, replicas: usize) {
        let mut states = Vec::new();
        for sentinel in &self.sentinels {
            let client = redis::Client::open(("127.0.0.1", sentinel.port)).unwrap();
            states.push(client.get_connection().unwrap());
        }
        eventually(
            "sentinels and replicas to know each other",
            TEST_TIMEOUT,
            async || {
                let all = states.iter_mut().all(|connection| {
                    let state: redis::RedisResult<std::collections::HashMap<String, String>> =
                        redis::cmd("SENTINEL")
                            .arg("MASTER")
                            .arg(MASTER_NAME)
                            .query(connection);
                    state.is_ok_and(|state| {
                        state["num-slaves"] == replicas.to_string()
                            && state["num-other-sentinels"] == "2"
                            && state["flags"] == "master"
                    })
                });
                all.then_some(())
            },
        )
        .await;
        let mut master = self.servers[0].connection().await;
        // A replica can be promoted only when it is synchronized.
        let wanted = i64::try_from(replicas).unwrap();
        redis::cmd("SET")
            .arg("x")
            .arg(1)
            .exec_async(&mut master)
            .await
            .unwrap();
        let deadline = Instant::now() + TEST_TIMEOUT;
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
            assert!(
                Instant::now() < deadline,
                "the replicas did not synchronize in time"
            );
        }
    }
}

/// The port that the other servers use.
fn server_port(server: &RedisServer, speaks_tls: bool) -> u16 {
    if speaks_tls {
        server.tls_port()
    } else {
        server.port()
    }
}

impl SentinelProcess {
    fn start(master: u16, authority: Option<&CertificateAuthority>) -> Self {
        // Another process may take the free port before the sentinel does.
        for _ in 0..20 {
            let (port, tls_port, folder) = (free_port(), free_port(), TempDir::new().unwrap());
            let tls = authority.map(|authority| {
                let [cert, key, ca] = ["server.pem", "server.key", "ca.pem"].map(|file| authority.path_string(file));
                format!(
                    "tls-port {tls_port}\ntls-replication yes\ntls-cert-file {cert}\ntls-key-file {key}\n\
                     tls-ca-cert-file {ca}\n"
                )
            });
            let file = folder.path().join("sentinel.conf");
            let text = format!(
                "port {port}\nbind 127.0.0.1\ndir {}\n{}sentinel monitor {MASTER_NAME} 127.0.0.1 {master} 2\n\
                 sentinel down-after-milliseconds {MASTER_NAME} {DOWN_AFTER_MS}\n\
                 sentinel failover-timeout {MASTER_NAME} 1000\n",
                folder.path().display(),
                tls.unwrap_or_default()
            );
            fs::write(&file, text).unwrap();
            let child = server_command()
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
            if sentinel.wait_until_ready() {
                return sentinel;
            }
        }
        panic!("no sentinel started");
    }

    /// Runs one command on its own connection.
    pub async fn command<T: FromRedisValue>(&self, words: &str) -> T {
        run_redis_command(self.port, words).await
    }

    /// Runs a command whose reply is OK.
    pub async fn run(&self, words: impl AsRef<str>) {
        self.command(words.as_ref()).await
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn wait_until_ready(&mut self) -> bool {
        let deadline = Instant::now() + TEST_TIMEOUT;
        while Instant::now() < deadline && self.child.try_wait().unwrap().is_none() {
            if ping(self.port) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}

impl Drop for SentinelProcess {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A server that names a master with an epoch, as a sentinel does.
pub struct FakeSentinel {
    port: u16,
    /// Delay of the reply to `SENTINEL MASTER`.
    delay_ms: Arc<AtomicU64>,
}

impl FakeSentinel {
    pub async fn start(master_port: u16, config_epoch: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let sentinel = Self {
            port: listener.local_addr().unwrap().port(),
            delay_ms: Arc::default(),
        };
        let delay_ms = Arc::clone(&sentinel.delay_ms);
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let delay_ms = Arc::clone(&delay_ms);
                tokio::spawn(serve_sentinel(client, master_port, config_epoch, delay_ms));
            }
        });
        sentinel
    }

    pub fn delay_epoch(&self, by: Duration) {
        let delay_ms = u64::try_from(by.as_millis()).unwrap();
        self.delay_ms.store(delay_ms, Ordering::Relaxed);
    }

    pub fn settings(sentinels: &[Self]) -> RedisSettings {
        RedisSettings {
            topology: RedisTopology::Sentinel {
                master: MASTER_NAME.to_owned(),
                credentials: RedisCredentials::default(),
            },
            servers: sentinels
                .iter()
                .map(|sentinel| local_address(sentinel.port))
                .collect(),
            connect_timeout: Duration::from_secs(2),
            ..redis_settings(0)
        }
    }
}

async fn serve_sentinel(
    client: TcpStream,
    master_port: u16,
    config_epoch: u64,
    delay_ms: Arc<AtomicU64>,
) {
    let (from, mut to) = client.into_split();
    let mut from = BufReader::new(from);
    while let Some(words) = read_command_words(&mut from).await {
        let pair = |one: &str, two: String| {
            let (one_length, two_length) = (one.len(), two.len());
            format!("*2\r\n${one_length}\r\n{one}\r\n${two_length}\r\n{two}\r\n")
        };
        let reply = match words.get(1).map(String::as_str) {
            Some("MASTER") => {
                let delay = Duration::from_millis(delay_ms.load(Ordering::Relaxed));
                tokio::time::sleep(delay).await;
                pair("config-epoch", config_epoch.to_string())
            }
            Some("GET-MASTER-ADDR-BY-NAME") => pair("127.0.0.1", master_port.to_string()),
            _ => "+OK\r\n".to_owned(),
        };
        if to.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}
