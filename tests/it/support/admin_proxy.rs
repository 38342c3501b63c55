//! Requests to the admin listener of a proxy, and commands with its configuration.

use super::prelude::*;

impl Proxy {
    /// As [`Self::admin_request`], with the token of [`Proxy::with_token`].
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

    /// Returns the policy once `holds` returns true. The counts are updated once a second.
    pub async fn wait_for_policy(&self, name: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let target = format!("/policies?policy={name}");
        eventually(&target, TEST_TIMEOUT, async || {
            let policy = self.get_json(&target).await["policies"][0].clone();
            holds(&policy).then_some(policy)
        })
        .await
    }

    pub async fn status_for_user(&self, user: &str, target: &str) -> u16 {
        self.get_with(target, "x-user", user).await.status
    }

    /// Runs the `tidegate` binary as a command, with the configuration of the running proxy.
    pub async fn run_command(&self, words: &[&str]) -> ProcessOutput {
        run_command(
            tidegate_command()
                .args(words)
                .arg("--config")
                .arg(self.config_path())
                .env("TIDEGATE_ADMIN__ADDRESS", self.admin_address().to_string()),
        )
        .await
    }
}
