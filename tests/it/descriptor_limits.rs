//! Limits on open file descriptors below what the configuration needs.

use crate::support::prelude::*;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

/// Starts a proxy with a soft limit of 100 descriptors and this hard limit.
async fn start_limited_proxy(hard_limit: u32, upstream: &Upstream, dir: &TempDir) -> Proxy {
    let script = dir.path().join("limited.sh");
    let text = format!(
        "#!/bin/sh\nulimit -Sn 100\nulimit -Hn {hard_limit}\nexec {} \"$@\"\n",
        env!("CARGO_BIN_EXE_tidegate")
    );
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
    Proxy::setup("")
        .program(&script)
        .upstream(upstream.address)
        .start()
        .await
}

#[tokio::test]
async fn idle_connections_leave_descriptors_for_requests_admin_and_reloads() {
    let upstream = Upstream::echo().await;
    let dir = TempDir::new().unwrap();
    let proxy = start_limited_proxy(300, &upstream, &dir).await;
    let warning = proxy.wait_for_message("too few file descriptors", 0).await;
    assert_eq!(warning.field("descriptors"), "300");
    let mut idle = Vec::new();
    for _ in 0..400 {
        idle.push(RawClient::connect(proxy.address).await);
    }
    assert_eq!(proxy.get_statuses("/", 5).await, [200; 5]);
    for path in ["/livez", "/readyz"] {
        let probe = ClientRequest::new(proxy.admin_address(), "GET", path);
        let status = probe.header("Host", "localhost").send_for_status().await;
        assert_eq!(status, 200, "{path}");
    }
    proxy.write_config("[[policy]]\nname = 'closed'\naction = 'deny'");
    proxy.send_sighup();
    proxy.wait_for_message("configuration reloaded", 0).await;
    assert_eq!(proxy.get("/").await.status, 403);
}

#[tokio::test]
async fn the_soft_limit_is_raised() {
    let upstream = Upstream::echo().await;
    let dir = TempDir::new().unwrap();
    let proxy = start_limited_proxy(20_000, &upstream, &dir).await;
    let mut idle = Vec::new();
    for _ in 0..200 {
        idle.push(RawClient::connect(proxy.address).await);
    }
    assert_eq!(proxy.get("/").await.status, 200);
    assert!(!proxy.log_text().contains("too few file descriptors"));
    let open = proxy.read_metric("tidegate_connections_active").await;
    assert!(open >= 200.0, "{open}: no idle connection is closed");
}
