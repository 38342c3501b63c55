//! Draining an instance by its admin API and by `tidegate drain`.

use crate::admin_api::assert_problem;
use crate::support::TEST_TIMEOUT;
use crate::support::admin_proxy::AdminProxy;
use crate::support::client::RawClient;
use crate::support::process::{run_command, tidegate_command};
use crate::support::upstream::{BodySender, Upstream, channel_body};
use hyper::Response;
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Instant;
use tempfile::TempDir;

/// A proxy with a request in flight. The request ends when the body sender is dropped.
async fn start_with_request_in_flight(shutdown: &str) -> (AdminProxy, RawClient, BodySender) {
    let (feeder, body) = channel_body();
    let body = Mutex::new(Some(body));
    let upstream = Upstream::with_handler(move |_| {
        let body = body.lock().unwrap().take().unwrap_or_default();
        async { Response::new(body) }
    })
    .await;
    let admin_proxy =
        AdminProxy::start_with_upstream(upstream, &format!("[shutdown]\n{shutdown}")).await;
    let mut client = RawClient::connect(admin_proxy.proxy.address).await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    feeder.send("x").await;
    client.read_past(b"x").await;
    (admin_proxy, client, feeder)
}

#[tokio::test]
async fn drain_lets_requests_finish_and_waits_for_the_exit() {
    let (mut admin_proxy, mut client, feeder) =
        start_with_request_in_flight("delay = '300ms'\ngrace = '20s'").await;
    assert_problem(
        &admin_proxy.admin_request("POST", "/drain").send().await,
        401,
    );
    let rest = async {
        admin_proxy
            .proxy
            .wait_for_log("the drain to begin", 0, TEST_TIMEOUT, |line| {
                line.field("asked_by") == "admin"
            })
            .await;
        assert_eq!(
            admin_proxy
                .admin_request("GET", "/readyz")
                .send()
                .await
                .status,
            503
        );
        assert_eq!(
            admin_proxy
                .authorized_request("POST", "/drain")
                .send()
                .await
                .json()["grace_s"],
            20.0,
            "asked again"
        );
        drop(feeder);
        client.read_to_close().await
    };
    let (drained, rest) = tokio::join!(admin_proxy.run_command(&["drain"]), rest);
    assert_eq!(drained.status.code(), Some(0), "{}", drained.stderr);
    assert!(
        drained.stdout.starts_with("drained in "),
        "{}",
        drained.stdout
    );
    assert!(rest.ends_with(b"0\r\n\r\n"), "{rest:?}");
    assert_eq!(
        admin_proxy
            .proxy
            .wait_for_exit(TEST_TIMEOUT)
            .await
            .status
            .code(),
        Some(0)
    );
    let log = admin_proxy.proxy.log_text();
    assert!(log.contains("\"connections_cut\":0"), "{log}");
    assert_eq!(
        log.matches("requests in flight may finish").count(),
        1,
        "{log}"
    );

    let unreachable = admin_proxy.run_command(&["drain"]).await;
    assert_eq!(unreachable.status.code(), Some(1));
    assert!(
        unreachable.stderr.starts_with("error: 127.0.0.1:"),
        "{}",
        unreachable.stderr
    );
}

#[tokio::test]
async fn drain_stops_waiting_after_its_timeout() {
    let (admin_proxy, _client, _feeder) = start_with_request_in_flight("grace = '60s'").await;
    let impatient = admin_proxy.run_command(&["drain", "--timeout", "1"]).await;
    assert_eq!(impatient.status.code(), Some(1));
    assert!(
        impatient.stderr.contains("still running after 1.0 s"),
        "{}",
        impatient.stderr
    );
}

#[tokio::test]
async fn drain_rejects_servers_that_are_not_a_tidegate_admin_port() {
    let upstream = Upstream::echo().await;
    let dir = TempDir::new().unwrap();
    let config: PathBuf = dir.path().join("config.toml");
    fs::write(&config, "").unwrap();
    let drain = async |address: &str| {
        let mut command = tidegate_command();
        command
            .arg("drain")
            .arg("--config")
            .arg(&config)
            .env("TIDEGATE_ADMIN__ADDRESS", address);
        let ended = run_command(&mut command).await;
        assert_eq!(ended.status.code(), Some(1), "{}", ended.stdout);
        ended.stderr
    };
    let other = drain(&upstream.address.to_string()).await;
    assert!(other.contains("answered 200"), "{other}");
    assert!(
        drain("127.0.0.1:0")
            .await
            .contains("admin.address has port 0")
    );
    let mute = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let start = Instant::now();
    drain(&mute.local_addr().unwrap().to_string()).await;
    assert!(
        start.elapsed() < TEST_TIMEOUT,
        "drain does not wait for a silent server"
    );
}
