//! A real nginx that serves files and accepts uploads.

use super::prelude::*;
use std::net::{TcpListener, TcpStream};
use tokio::process::Command;

/// A running nginx with its own document root. It is killed on drop.
#[derive(Debug)]
pub struct Nginx {
    pub address: SocketAddr,
    root: PathBuf,
    _process: ChildProcess,
    _dir: TempDir,
}

impl Nginx {
    pub async fn start() -> Self {
        Self::launch("", "", "").await
    }

    /// With limits: directives for `http` and for `server`.
    pub async fn start_with_config(zones: &str, limits: &str) -> Self {
        Self::launch("", zones, limits).await
    }

    /// Cleartext HTTP/2 with prior knowledge.
    pub async fn start_http2() -> Self {
        Self::launch("http2", "", "").await
    }

    async fn launch(how: &str, zones: &str, limits: &str) -> Self {
        let dir = TempDir::new().unwrap();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        // nginx cannot bind to port 0, so it gets a port that was free just before.
        let address = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        let config = dir.path().join("nginx.conf");
        fs::write(&config, render_config(address, how, zones, limits)).unwrap();
        let mut command = Command::new("nginx");
        command
            .arg("-p")
            .arg(dir.path())
            .arg("-c")
            .arg(&config)
            .args(["-e", "stderr"]);
        let process = ChildProcess::start(&mut command).unwrap_or_else(|error| {
            panic!("cannot run nginx ({error}); install it: apt-get install nginx")
        });
        eventually("nginx to accept connections", TEST_TIMEOUT, async || {
            assert!(
                !process.transcript().contains("[emerg]"),
                "nginx: {}",
                process.transcript()
            );
            TcpStream::connect(address).ok()
        })
        .await;
        Self {
            address,
            root,
            _process: process,
            _dir: dir,
        }
    }

    /// Makes a file available at `/name`.
    pub fn write_file(&self, name: &str, content: &[u8]) {
        fs::write(self.root.join(name), content).unwrap();
    }

    /// The content that was uploaded with `PUT /name`.
    pub fn uploaded_file(&self, name: &str) -> Vec<u8> {
        fs::read(self.root.join(name)).unwrap()
    }
}

/// Runs as one process, so that killing it leaves nothing behind. Uploads use the WebDAV module,
/// which the Debian package includes.
fn render_config(address: SocketAddr, how: &str, zones: &str, limits: &str) -> String {
    let temp = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("{kind}_temp_path tmp/{kind};"))
        .join(" ");
    format!(
        "daemon off; master_process off; pid nginx.pid; error_log stderr warn;
         events {{ worker_connections 256; }}
         http {{
             access_log off; {temp}
             {zones}
             server {{
                 listen {address} {how};
                 root root;
                 client_max_body_size 0;
                 dav_methods PUT;
                 {limits}
             }}
         }}"
    )
}
