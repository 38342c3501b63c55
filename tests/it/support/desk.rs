//! A proxy whose admin port has a token, and who asks it.

use super::SOON;
use super::client::Ask;
use super::process::{Ended, run, tidegate};
use super::proxy::Proxy;
use super::upstream::Upstream;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

#[derive(Debug)]
pub struct Desk {
    pub proxy: Proxy,
    _upstream: Upstream,
    dir: TempDir,
}

impl Desk {
    pub async fn open(config: &str) -> Self {
        Self::before(Upstream::echo().await, config).await
    }

    pub async fn before(upstream: Upstream, config: &str) -> Self {
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

    pub async fn without_token(config: &str) -> Self {
        let upstream = Upstream::echo().await;
        let proxy = Proxy::start(config, upstream.address).await;
        Self {
            proxy,
            _upstream: upstream,
            dir: TempDir::new().unwrap(),
        }
    }

    /// A folder that goes with it.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn ask(&self, method: &str, target: &str) -> Ask {
        Ask::new(self.proxy.admin(), method, target).header("Host", "localhost")
    }

    /// With the token.
    pub fn order(&self, method: &str, target: &str) -> Ask {
        self.ask(method, target)
            .header("Authorization", "Bearer s3cret")
    }

    pub async fn sees(&self, target: &str) -> Value {
        let reply = self.ask("GET", target).send().await;
        assert_eq!(
            (reply.status, reply.header("content-type")),
            (200, Some("application/json")),
            "{target}"
        );
        reply.json()
    }

    /// A policy, once `holds` is true of it: what is counted is noted once a second.
    pub async fn policy(&self, name: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + SOON;
        loop {
            let told = self.sees(&format!("/policies?policy={name}")).await["policies"][0].clone();
            if holds(&told) {
                return told;
            }
            assert!(Instant::now() < deadline, "{told:#}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub async fn as_user(&self, user: &str, target: &str) -> u16 {
        self.proxy
            .ask("GET", target)
            .header("x-user", user)
            .status()
            .await
    }

    /// Runs the binary beside it, with its configuration.
    pub async fn command(&self, words: &[&str]) -> Ended {
        run(tidegate()
            .args(words)
            .arg("--config")
            .arg(self.proxy.config_path())
            .env("TIDEGATE_ADMIN__ADDRESS", self.proxy.admin().to_string()))
        .await
    }
}
