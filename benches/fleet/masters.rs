//! A Redis Cluster of three masters without replicas, each on a machine of its own.

use crate::net::{Machine, Net};
use std::net::Ipv4Addr;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::sleep;

pub(crate) const MASTERS: usize = 3;
const PORT: u16 = 6379;
const SLOTS: u16 = 16_384;
const FIRST: u8 = 201;

pub(crate) struct Master {
    pub(crate) machine: Machine,
    folder: TempDir,
    server: Child,
}

pub(crate) struct Masters(pub(crate) Vec<Master>);

impl Masters {
    pub(crate) async fn start() -> Self {
        let mut masters = Vec::new();
        for number in (FIRST..).take(MASTERS) {
            let (machine, folder) = (Machine::new(number, &[Net::Back]), TempDir::new().unwrap());
            let server = serve(&machine, &folder).await;
            masters.push(Master {
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
                .map(|master| format!("{}:{PORT}", master.address())),
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
        masters.agree().await;
        masters
    }

    /// For a configuration file.
    pub(crate) fn urls(&self) -> String {
        let urls = self
            .0
            .iter()
            .map(|master| format!("'redis://{}:{PORT}'", master.address()));
        urls.collect::<Vec<_>>().join(", ")
    }

    /// Which of them keeps a key.
    pub(crate) fn of(&self, key: &str) -> usize {
        let mut asked = redis::cmd("CLUSTER");
        let slot: u16 = asked
            .arg("KEYSLOT")
            .arg(key)
            .query(&mut self.connection(0))
            .unwrap();
        // As redis-cli shares them out.
        (usize::from(slot) * MASTERS / usize::from(SLOTS)).min(MASTERS - 1)
    }

    pub(crate) fn has(&self, master: usize, key: &str) -> bool {
        redis::cmd("EXISTS")
            .arg(key)
            .query(&mut self.connection(master))
            .unwrap_or(false)
    }

    fn connection(&self, master: usize) -> redis::Connection {
        let address = self.0[master].address().to_string();
        redis::Client::open((address, PORT))
            .unwrap()
            .get_connection()
            .unwrap()
    }

    /// Waits until each of them thinks that all is well.
    async fn agree(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        let is_well = |master: usize| {
            let info: String = redis::cmd("CLUSTER")
                .arg("INFO")
                .query(&mut self.connection(master))
                .unwrap();
            info.contains("cluster_state:ok") && info.contains("assigned:16384")
        };
        while !(0..MASTERS).all(is_well) {
            assert!(Instant::now() < deadline, "the masters do not agree");
            sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Master {
    fn address(&self) -> Ipv4Addr {
        self.machine.address(Net::Back)
    }

    /// As `kill -9`: nothing is saved but who the others are.
    pub(crate) async fn kill(&mut self) {
        self.server.kill().await.unwrap();
    }

    /// Starts it again, empty.
    pub(crate) async fn restart(&mut self) {
        self.server = serve(&self.machine, &self.folder).await;
    }
}

async fn serve(machine: &Machine, folder: &TempDir) -> Child {
    let server = machine
        .command("redis-server")
        .args([
            "--port",
            &PORT.to_string(),
            "--protected-mode",
            "no",
            "--save",
            "",
            "--appendonly",
            "no",
        ])
        // They serve what they have if one is away.
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
    let address = (machine.address(Net::Back), PORT);
    while tokio::net::TcpStream::connect(address).await.is_err() {
        sleep(Duration::from_millis(10)).await;
    }
    server
}
