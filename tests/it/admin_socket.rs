//! The admin listener on a Unix socket: file permissions decide which processes may connect.

use crate::support::prelude::*;
use std::os::unix::fs::PermissionsExt;
use tokio::net::UnixStream;

const POLICY: &str = "[[policy]]\nname = 'all'\nlimit = { requests = 2, per = '1h' }\n";

/// A proxy with its admin listener on a Unix socket, and requests to it.
struct UnixAdminProxy {
    proxy: Proxy,
    _upstream: Upstream,
    path: PathBuf,
    _dir: TempDir,
}

impl UnixAdminProxy {
    async fn start() -> Self {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("admin.sock");
        let upstream = Upstream::echo().await;
        let proxy = Proxy::setup(POLICY).upstream(upstream.address);
        let proxy = proxy
            .env(
                "TIDEGATE_ADMIN__ADDRESS",
                &format!("unix:{}", path.display()),
            )
            .start()
            .await;
        Self {
            proxy,
            _upstream: upstream,
            path,
            _dir: dir,
        }
    }

    async fn send_request(&self, line: &str, host: &str) -> RawResponse {
        let mut client = RawClient::from_stream(UnixStream::connect(&self.path).await.unwrap());
        client
            .send(format!("{line} HTTP/1.1\r\nHost: {host}\r\n\r\n"))
            .await;
        client.read_response().await
    }

    async fn run_command(&self, words: &[&str]) -> ProcessOutput {
        let mut command = tidegate_command();
        command
            .args(words)
            .arg("--config")
            .arg(self.proxy.config_path());
        run_command(command.env(
            "TIDEGATE_ADMIN__ADDRESS",
            format!("unix:{}", self.path.display()),
        ))
        .await
    }
}

#[tokio::test]
async fn clients_with_write_access_to_the_socket_are_treated_as_local() {
    let admin_proxy = UnixAdminProxy::start().await;
    assert_eq!(
        fs::metadata(&admin_proxy.path)
            .unwrap()
            .permissions()
            .mode()
            & 0o777,
        0o660
    );
    let log = admin_proxy.proxy.log_text();
    assert_contains(
        &log,
        &[&format!(
            "\"address\":\"unix:{}\"",
            admin_proxy.path.display()
        )],
    );
    assert_eq!(
        admin_proxy
            .send_request("GET /livez", "localhost")
            .await
            .status,
        200
    );
    let reply = admin_proxy.send_request("GET /policies", "localhost").await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.json()["policies"][0]["name"], "all");
    // A reverse proxy in front of the socket may use any host name.
    assert_eq!(
        admin_proxy
            .send_request("GET /policies", "evil.example")
            .await
            .status,
        403
    );
    let refused = admin_proxy
        .send_request("DELETE /keys?policy=all", "localhost")
        .await;
    assert!(
        refused.status == 403 && refused.text().contains("admin.token_file"),
        "{}",
        refused.text()
    );
}

#[tokio::test]
async fn commands_connect_through_the_socket() {
    let mut admin_proxy = UnixAdminProxy::start().await;
    let statuses = admin_proxy.proxy.get_statuses("/", 3).await;
    assert_eq!(statuses, [200, 200, 429]);
    let health = admin_proxy.run_command(&["health"]).await;
    assert_eq!(health.status.code(), Some(0), "{}", health.stderr);
    assert_eq!(health.stdout, "ok\n", "{}", health.stderr);
    let top = admin_proxy.run_command(&["top", "--once"]).await;
    assert!(
        top.status.success() && top.stdout.contains("\nall "),
        "{}{}",
        top.stdout,
        top.stderr
    );
    let drained = admin_proxy.run_command(&["drain"]).await;
    assert!(
        drained.stdout.starts_with("drained in "),
        "{}{}",
        drained.stdout,
        drained.stderr
    );
    admin_proxy.proxy.assert_exit_code(0).await;
    assert!(
        !admin_proxy.path.exists(),
        "the socket file was not removed"
    );
    let gone = admin_proxy.run_command(&["health"]).await;
    gone.expect_code(1);
    assert_starts(
        &gone.stderr,
        format!("error: unix:{}: No such file", admin_proxy.path.display()),
    );
}

#[tokio::test]
async fn a_socket_in_use_is_named_in_the_error() {
    let admin_proxy = UnixAdminProxy::start().await;
    let ended = admin_proxy
        .run_command(&[
            "run",
            "--upstream",
            "http://127.0.0.1:9",
            "--listen",
            "127.0.0.1:0",
        ])
        .await;
    ended.expect_code(1);
    let wanted = format!(
        "cannot listen on unix:{}: another process answers on it",
        admin_proxy.path.display()
    );
    ended.expect_stderr(&wanted);
    ended.expect_stderr("Set another admin.address");
    assert_eq!(
        admin_proxy
            .send_request("GET /livez", "localhost")
            .await
            .status,
        200,
        "the first instance keeps serving"
    );
}
