//! A proxy with a token on its admin listener, and requests to that listener.

use super::TEST_TIMEOUT;
use super::client::ClientRequest;
use super::process::{ProcessOutput, run_command, tidegate_command};
use super::proxy::Proxy;
use super::upstream::Upstream;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

#[derive(Debug)]
pub struct AdminProxy {
    pub proxy: Proxy,
    _upstream: Upstream,
    dir: TempDir,
}

impl AdminProxy {
    pub async fn start(config: &str) -> Self {
        Self::start_with_upstream(Upstream::echo().await, config).await
    }

    pub async fn start_with_upstream(upstream: Upstream, config: &str) -> Self {
        let dir = TempDir::new().unwrap();
        let token = dir.path().join("token");
        fs::write(&token, "s3cret\n").unwrap();
        let config = format!("admin.token_file = {token:?}\n{config}");
        let proxy = Proxy::start(&config, upstream.address).await;
        Self {
            proxy,
            _upstream: upstream,
            dir,
        }
    }

    pub async fn start_without_token(config: &str) -> Self {
        let upstream = Upstream::echo().await;
        let proxy = Proxy::start(config, upstream.address).await;
        Self {
            proxy,
            _upstream: upstream,
            dir: TempDir::new().unwrap(),
        }
    }

    /// The temporary folder of this fixture.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn admin_request(&self, method: &str, target: &str) -> ClientRequest {
        ClientRequest::new(self.proxy.admin_address(), method, target).header("Host", "localhost")
    }

    /// A request with the token.
    pub fn authorized_request(&self, method: &str, target: &str) -> ClientRequest {
        self.admin_request(method, target)
            .header("Authorization", "Bearer s3cret")
    }

    pub async fn get_json(&self, target: &str) -> Value {
        let reply = self.admin_request("GET", target).send().await;
        assert_eq!(
            (reply.status, reply.header("content-type")),
            (200, Some("application/json")),
            "{target}"
        );
        reply.json()
    }

    /// Waits until a policy's statistics satisfy `holds`. They are updated once per second.
    pub async fn wait_for_policy(&self, name: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            let policy =
                self.get_json(&format!("/policies?policy={name}")).await["policies"][0].clone();
            if holds(&policy) {
                return policy;
            }
            assert!(Instant::now() < deadline, "{policy:#}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub async fn status_for_user(&self, user: &str, target: &str) -> u16 {
        self.proxy
            .request("GET", target)
            .header("x-user", user)
            .send_for_status()
            .await
    }

    /// Runs a command of the binary with the configuration of this proxy.
    pub async fn run_command(&self, words: &[&str]) -> ProcessOutput {
        run_command(
            tidegate_command()
                .args(words)
                .arg("--config")
                .arg(self.proxy.config_path())
                .env(
                    "TIDEGATE_ADMIN__ADDRESS",
                    self.proxy.admin_address().to_string(),
                ),
        )
        .await
    }
}
