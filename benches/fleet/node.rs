//! A fleet node: a machine with an app, a sidecar in front of it, and the mounted configuration
//! directory.

use crate::FleetContext;
use crate::net::{BridgeNetwork, NetworkMachine};
use crate::policies::STATE_DIRECTORY;
use crate::support::client::{MetricsPage, PROMPT_TIMEOUT};
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

const PROXY_PORT: u16 = 8080;
const PROBE_PORT: u16 = 9091;

pub(crate) struct FleetNode {
    pub(crate) id: u8,
    pub(crate) machine: NetworkMachine,
    mount: ConfigMount,
    app: Child,
    app_url: String,
    sidecar: Child,
    probe_task: JoinHandle<()>,
    context: Arc<FleetContext>,
}

/// A ConfigMap as the kubelet mounts it: the file is a link through `..data`, which is swapped
/// atomically.
struct ConfigMount {
    folder: TempDir,
    version: u32,
}

impl FleetNode {
    /// A node accepts requests when its probes succeed.
    pub(crate) async fn start(id: u8, context: &Arc<FleetContext>, config: &str) -> Self {
        let machine = NetworkMachine::new(id, &[BridgeNetwork::Front, BridgeNetwork::Back]);
        let mut app = machine
            .command_in_namespace(std::env::current_exe().unwrap())
            .arg("app")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(app.stdout.take().unwrap()).lines();
        let app_url = timeout(PROMPT_TIMEOUT, said.next_line())
            .await
            .expect("in time")
            .unwrap()
            .expect("its address");
        let reading = Arc::clone(context);
        tokio::spawn(async move { reading.forwarded.read_reports(said).await });
        let mut mount = ConfigMount {
            folder: TempDir::new().unwrap(),
            version: 0,
        };
        fs::create_dir(mount.folder.path().join(STATE_DIRECTORY)).unwrap();
        mount.write_version(&format_node_config(&app_url, config));
        let sidecar = spawn_sidecar(id, &machine, &mount, context);
        let front = |port: u16| SocketAddr::from((machine.address(BridgeNetwork::Front), port));
        let probing = tokio::spawn(Arc::clone(context).probe_readiness(
            id,
            front(PROBE_PORT),
            front(PROXY_PORT),
        ));
        Self {
            id,
            machine,
            mount,
            app,
            app_url,
            sidecar,
            probe_task: probing,
            context: Arc::clone(context),
        }
    }

    /// Writes another configuration.
    pub(crate) fn write_config(&mut self, config: &str) {
        self.mount
            .write_version(&format_node_config(&self.app_url, config));
    }

    /// Sends the sidecar a shutdown signal and waits for its exit.
    pub(crate) async fn stop_sidecar(&mut self) -> ExitStatus {
        crate::support::send_signal(self.sidecar.id().expect("it has not ended"), "TERM");
        timeout(3 * PROMPT_TIMEOUT, self.sidecar.wait())
            .await
            .expect("it ends in time")
            .unwrap()
    }

    /// Starts a new sidecar in place of the old one.
    pub(crate) fn start_sidecar(&mut self) {
        self.sidecar = spawn_sidecar(self.id, &self.machine, &self.mount, &self.context);
    }

    /// Stops the sidecar's process; its connections stay open.
    pub(crate) fn freeze_sidecar(&self) {
        crate::support::send_signal(self.sidecar.id().expect("it has not ended"), "STOP");
    }

    pub(crate) fn continue_sidecar(&self) {
        crate::support::send_signal(self.sidecar.id().expect("it has not ended"), "CONT");
    }

    /// Kills all processes of the node at once.
    pub(crate) async fn kill(&mut self) {
        let (app, sidecar) = tokio::join!(self.app.kill(), self.sidecar.kill());
        app.and(sidecar).unwrap();
    }

    pub(crate) async fn metrics(&self) -> MetricsPage {
        MetricsPage::fetch((self.machine.address(BridgeNetwork::Front), PROBE_PORT).into()).await
    }
}

impl Drop for FleetNode {
    fn drop(&mut self) {
        self.probe_task.abort();
        self.context.balancer.remove_node(self.id);
    }
}

impl ConfigMount {
    fn write_version(&mut self, text: &str) {
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

fn format_node_config(app_url: &str, config: &str) -> String {
    format!(
        "upstream.url = '{app_url}'
listen = {{ address = '0.0.0.0:{PROXY_PORT}', threads = 1 }}
admin.probes = '0.0.0.0:{PROBE_PORT}'
{config}"
    )
}

fn spawn_sidecar(
    id: u8,
    machine: &NetworkMachine,
    mount: &ConfigMount,
    context: &Arc<FleetContext>,
) -> Child {
    let mut sidecar = machine
        .command_in_namespace(env!("CARGO_BIN_EXE_tidegate"))
        .args(["run", "--config"])
        .arg(mount.folder.path().join("config.toml"))
        // The directory for usage of an outage outlives the sidecar, as on a volume of the pod.
        .current_dir(mount.folder.path())
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    tokio::spawn(record_sidecar_log(
        id,
        sidecar.stderr.take().unwrap(),
        Arc::clone(context),
    ));
    sidecar
}

async fn record_sidecar_log(id: u8, log: ChildStderr, context: Arc<FleetContext>) {
    let mut log = BufReader::new(log).lines();
    while let Ok(Some(text)) = log.next_line().await {
        let line: Value = serde_json::from_str(&text).unwrap_or_default();
        let field = |name| line.get(name).and_then(Value::as_str);
        if field("level") != Some("INFO") {
            context
                .ledger
                .record_log_line(id, field("message").unwrap_or_default(), &text);
        }
    }
}
