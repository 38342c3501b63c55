//! A node of the fleet: a machine with an app, a sidecar in front of it, and the folder that the kubelet mounts.

use crate::World;
use crate::net::{Machine, Net};
use crate::support::client::{Metrics, SOON};
use serde_json::Value;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStderr};
use tokio::task::JoinHandle;
use tokio::time::timeout;

const PORT: u16 = 8080;
const PROBES: u16 = 9091;

pub(crate) struct Node {
    pub(crate) id: u8,
    pub(crate) machine: Machine,
    mount: Mount,
    app: Child,
    app_url: String,
    sidecar: Child,
    probing: JoinHandle<()>,
    world: Arc<World>,
}

/// A ConfigMap as the kubelet mounts it: the file is a link through `..data`, which is swapped as a whole.
struct Mount {
    folder: TempDir,
    version: u32,
}

impl Node {
    /// It takes requests when its probes say so.
    pub(crate) async fn start(id: u8, world: &Arc<World>, config: &str) -> Self {
        let machine = Machine::new(id, &[Net::Front, Net::Back]);
        let mut app = machine
            .command(std::env::current_exe().unwrap())
            .arg("app")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(app.stdout.take().unwrap()).lines();
        let app_url = timeout(SOON, said.next_line())
            .await
            .expect("in time")
            .unwrap()
            .expect("its address");
        let mut mount = Mount {
            folder: TempDir::new().unwrap(),
            version: 0,
        };
        mount.write(&in_front_of(&app_url, config));
        let sidecar = run(id, &machine, &mount, world);
        let front = |port: u16| SocketAddr::from((machine.address(Net::Front), port));
        let probing = tokio::spawn(Arc::clone(world).probe(id, front(PROBES), front(PORT)));
        Self {
            id,
            machine,
            mount,
            app,
            app_url,
            sidecar,
            probing,
            world: Arc::clone(world),
        }
    }

    /// Writes another configuration.
    pub(crate) fn mount(&mut self, config: &str) {
        self.mount.write(&in_front_of(&self.app_url, config));
    }

    /// Asks the sidecar to end, and waits.
    pub(crate) async fn end(&mut self) -> ExitStatus {
        crate::support::signal(self.sidecar.id().expect("it has not ended"), "TERM");
        timeout(3 * SOON, self.sidecar.wait())
            .await
            .expect("it ends in time")
            .unwrap()
    }

    /// Starts another sidecar in its place.
    pub(crate) fn begin(&mut self) {
        self.sidecar = run(self.id, &self.machine, &self.mount, &self.world);
    }

    /// Everything on it, at once.
    pub(crate) async fn kill(&mut self) {
        let (app, sidecar) = tokio::join!(self.app.kill(), self.sidecar.kill());
        app.and(sidecar).unwrap();
    }

    pub(crate) async fn metrics(&self) -> Metrics {
        Metrics::of((self.machine.address(Net::Front), PROBES).into()).await
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.probing.abort();
        self.world.balancer.forget(self.id);
    }
}

impl Mount {
    fn write(&mut self, text: &str) {
        let at = self.folder.path();
        self.version += 1;
        let data = format!("..v{}", self.version);
        fs::create_dir(at.join(&data)).unwrap();
        fs::write(at.join(&data).join("config.toml"), text).unwrap();
        symlink(&data, at.join("..new")).unwrap();
        fs::rename(at.join("..new"), at.join("..data")).unwrap();
        if self.version == 1 {
            symlink("..data/config.toml", at.join("config.toml")).unwrap();
        }
    }
}

fn in_front_of(app_url: &str, config: &str) -> String {
    format!(
        "upstream.url = '{app_url}'
listen = {{ address = '0.0.0.0:{PORT}', threads = 1 }}
admin.probes = '0.0.0.0:{PROBES}'
{config}"
    )
}

fn run(id: u8, machine: &Machine, mount: &Mount, world: &Arc<World>) -> Child {
    let mut sidecar = machine
        .command(env!("CARGO_BIN_EXE_tidegate"))
        .args(["run", "--config"])
        .arg(mount.folder.path().join("config.toml"))
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    tokio::spawn(keep_books(
        id,
        sidecar.stderr.take().unwrap(),
        Arc::clone(world),
    ));
    sidecar
}

async fn keep_books(id: u8, log: ChildStderr, world: Arc<World>) {
    let mut log = BufReader::new(log).lines();
    while let Ok(Some(text)) = log.next_line().await {
        let line: Value = serde_json::from_str(&text).unwrap_or_default();
        let field = |name| line.get(name).and_then(Value::as_str);
        if field("level") != Some("INFO") {
            world
                .books
                .logged(id, field("message").unwrap_or_default(), &text);
        }
    }
}
