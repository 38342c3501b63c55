//! Draining an instance by its admin API and by `tidegate drain`.

use crate::admin_api::assert_problem;
use crate::support::prelude::*;

/// A proxy with a request in flight. The request ends when the body sender is dropped.
async fn start_with_request_in_flight(shutdown: &str) -> (Proxy, RawClient, BodySender) {
    let (feeder, upstream) = Upstream::streaming().await;
    let proxy = Proxy::setup(&format!("[shutdown]\n{shutdown}"))
        .token()
        .owned_upstream(upstream)
        .start()
        .await;
    let mut client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    feeder.send("x").await;
    client.read_past(b"x").await;
    (proxy, client, feeder)
}

#[tokio::test]
async fn drain_lets_requests_finish_and_waits_for_the_exit() {
    let (mut proxy, mut client, feeder) =
        start_with_request_in_flight("delay = '300ms'\ngrace = '20s'").await;
    assert_problem(&proxy.admin_request("POST", "/drain").send().await, 401);
    let rest = async {
        proxy.wait_for_field("asked_by", "admin", 0).await;
        let request = proxy.admin_request("GET", "/readyz");
        request.expect_status(503).await;
        assert_eq!(
            proxy
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
    let (drained, rest) = tokio::join!(proxy.run_command(&["drain"]), rest);
    drained.expect_code(0);
    assert_starts(&drained.stdout, "drained in ");
    assert!(rest.ends_with(b"0\r\n\r\n"), "{rest:?}");
    proxy.assert_exit_code(0).await;
    let log = proxy.log_text();
    assert!(log.contains("\"connections_cut\":0"), "{log}");
    let count = log.matches("requests in flight may finish").count();
    assert_eq!(count, 1, "{log}");

    let unreachable = proxy.run_command(&["drain"]).await;
    unreachable.expect_code(1);
    assert_starts(&unreachable.stderr, "error: 127.0.0.1:");
}

#[tokio::test]
async fn drain_stops_waiting_after_its_timeout() {
    let (proxy, _client, _feeder) = start_with_request_in_flight("grace = '60s'").await;
    let impatient = proxy.run_command(&["drain", "--timeout", "1"]).await;
    impatient
        .expect_code(1)
        .expect_stderr("still running after 1.0 s");
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
        ended.expect_code(1);
        ended.stderr
    };
    let other = drain(&upstream.address.to_string()).await;
    assert!(other.contains("answered 200"), "{other}");
    assert_contains(&drain("127.0.0.1:0").await, &["admin.address has port 0"]);
    let mute = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let start = Instant::now();
    drain(&mute.local_addr().unwrap().to_string()).await;
    assert!(
        start.elapsed() < TEST_TIMEOUT,
        "drain does not wait for a silent server"
    );
}
