//! A Redis Cluster of three masters without replicas, each on its own machine.

use crate::net::{BridgeNetwork, NetworkMachine};
use crate::policies::PREFIX;
use std::net::Ipv4Addr;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tidegate::store::redis::{RedisAddress, RedisSettings, RedisTopology};
use tokio::process::{Child, Command};
use tokio::time::sleep;

pub(crate) const MASTER_COUNT: usize = 3;
pub(crate) const REDIS_PORT: u16 = 6379;
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
        initial_master_of_slot(self.key_slot(key))
    }

    pub(crate) fn key_slot(&self, key: &str) -> u16 {
        redis::cmd("CLUSTER")
            .arg("KEYSLOT")
            .arg(key)
            .query(&mut self.connection(0))
            .unwrap()
    }

    pub(crate) fn has_key(&self, master: usize, key: &str) -> bool {
        redis::cmd("EXISTS")
            .arg(key)
            .query(&mut self.connection(master))
            .unwrap_or(false)
    }

    pub(crate) fn connection(&self, master: usize) -> redis::Connection {
        let address = self.0[master].address().to_string();
        redis::Client::open((address, REDIS_PORT))
            .unwrap()
            .get_connection()
            .unwrap()
    }

    /// Returns the settings of a client that reads counters.
    pub(crate) fn client_settings(&self) -> RedisSettings {
        let servers = self.0.iter().map(|master| RedisAddress::Tcp {
            host: master.address().to_string(),
            port: REDIS_PORT,
        });
        RedisSettings {
            topology: RedisTopology::Cluster,
            servers: servers.collect(),
            ..crate::support::standalone_settings(REDIS_PORT, PREFIX)
        }
    }

    /// Returns a number of `INFO`, added up over all masters.
    pub(crate) fn sum_of_info(&self, section: &str, line_start: &str, field: &str) -> u64 {
        (0..MASTER_COUNT)
            .map(|master| {
                let info: String = redis::cmd("INFO")
                    .arg(section)
                    .query(&mut self.connection(master))
                    .unwrap();
                let fields = info.lines().find_map(|line| line.strip_prefix(line_start));
                fields.map_or(0, |fields| parse_field(fields, field))
            })
            .sum()
    }

    /// Waits until every master reports the cluster as healthy.
    pub(crate) async fn wait_for_cluster_ok(&self) {
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

/// Returns the master that owns a slot, by the slot ranges that redis-cli assigns.
pub(crate) fn initial_master_of_slot(slot: u16) -> usize {
    match slot {
        0..=5460 => 0,
        5461..=10_922 => 1,
        _ => 2,
    }
}

impl RedisMaster {
    pub(crate) fn address(&self) -> Ipv4Addr {
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

/// Parses `field=number` in a list separated by commas.
fn parse_field(fields: &str, name: &str) -> u64 {
    fields
        .split(',')
        .find_map(|field| field.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
        .unwrap_or(0)
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
