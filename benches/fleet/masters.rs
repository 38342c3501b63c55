//! A Redis Cluster of three masters without replicas, each on its own machine.

use crate::net::{BridgeNetwork, NetworkMachine};
use std::net::Ipv4Addr;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::sleep;

pub(crate) const MASTER_COUNT: usize = 3;
const REDIS_PORT: u16 = 6379;
const HASH_SLOTS: u16 = 16_384;
const FIRST_MACHINE: u8 = 201;

pub(crate) struct RedisMaster {
    pub(crate) machine: NetworkMachine,
    folder: TempDir,
    server: Child,
}

pub(crate) struct RedisMasters(pub(crate) Vec<RedisMaster>);

impl RedisMasters {
    pub(crate) async fn start() -> Self {
        let mut masters = Vec::new();
        for number in (FIRST_MACHINE..).take(MASTER_COUNT) {
            let (machine, folder) = (
                NetworkMachine::new(number, &[BridgeNetwork::Back]),
                TempDir::new().unwrap(),
            );
            let server = start_redis(&machine, &folder).await;
            masters.push(RedisMaster {
                machine,
                folder,
                server,
            });
        }
        let mut create = Command::new("redis-cli");
        create.args(["--cluster", "create"]);
        create.args(
            masters
                .iter()
                .map(|master| format!("{}:{REDIS_PORT}", master.address())),
        );
        let created = create
            .arg("--cluster-yes")
            .stdin(Stdio::null())
            .output()
            .await
            .unwrap();
        assert!(
            created.status.success(),
            "{}",
            String::from_utf8_lossy(&created.stdout)
        );
        let masters = Self(masters);
        masters.wait_for_cluster_ok().await;
        masters
    }

    /// Returns the addresses for a configuration file.
    pub(crate) fn urls(&self) -> String {
        let urls = self
            .0
            .iter()
            .map(|master| format!("'redis://{}:{REDIS_PORT}'", master.address()));
        urls.collect::<Vec<_>>().join(", ")
    }

    /// Returns the master that owns a key.
    pub(crate) fn master_of_key(&self, key: &str) -> usize {
        let mut command = redis::cmd("CLUSTER");
        let slot: u16 = command
            .arg("KEYSLOT")
            .arg(key)
            .query(&mut self.connection(0))
            .unwrap();
        // The slot ranges that redis-cli assigns.
        (usize::from(slot) * MASTER_COUNT / usize::from(HASH_SLOTS)).min(MASTER_COUNT - 1)
    }

    pub(crate) fn has_key(&self, master: usize, key: &str) -> bool {
        redis::cmd("EXISTS")
            .arg(key)
            .query(&mut self.connection(master))
            .unwrap_or(false)
    }

    fn connection(&self, master: usize) -> redis::Connection {
        let address = self.0[master].address().to_string();
        redis::Client::open((address, REDIS_PORT))
            .unwrap()
            .get_connection()
            .unwrap()
    }

    /// Waits until every master reports the cluster as healthy.
    async fn wait_for_cluster_ok(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        let is_well = |master: usize| {
            let info: String = redis::cmd("CLUSTER")
                .arg("INFO")
                .query(&mut self.connection(master))
                .unwrap();
            info.contains("cluster_state:ok") && info.contains("assigned:16384")
        };
        while !(0..MASTER_COUNT).all(is_well) {
            assert!(Instant::now() < deadline, "the masters do not agree");
            sleep(Duration::from_millis(50)).await;
        }
    }
}

impl RedisMaster {
    fn address(&self) -> Ipv4Addr {
        self.machine.address(BridgeNetwork::Back)
    }

    /// Kills the master like `kill -9`: it keeps only its cluster configuration.
    pub(crate) async fn kill(&mut self) {
        self.server.kill().await.unwrap();
    }

    /// Restarts the master, empty.
    pub(crate) async fn restart(&mut self) {
        self.server = start_redis(&self.machine, &self.folder).await;
    }
}

async fn start_redis(machine: &NetworkMachine, folder: &TempDir) -> Child {
    let server = machine
        .command_in_namespace("redis-server")
        .args([
            "--port",
            &REDIS_PORT.to_string(),
            "--protected-mode",
            "no",
            "--save",
            "",
            "--appendonly",
            "no",
        ])
        // The other masters keep serving their slots if one is unavailable.
        .args([
            "--cluster-enabled",
            "yes",
            "--cluster-require-full-coverage",
            "no",
        ])
        .args([
            "--cluster-node-timeout",
            "2000",
            "--maxmemory-policy",
            "noeviction",
        ])
        .arg("--dir")
        .arg(folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let address = (machine.address(BridgeNetwork::Back), REDIS_PORT);
    while tokio::net::TcpStream::connect(address).await.is_err() {
        sleep(Duration::from_millis(10)).await;
    }
    server
}
