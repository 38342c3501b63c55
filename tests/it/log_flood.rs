//! Logs that clients make long or many, and a reader of stderr that stops.

use crate::support::TEST_TIMEOUT;
use crate::support::client::ClientRequest;
use crate::support::process::tidegate_command;
use crate::support::proxy::Proxy;
use crate::support::upstream::Upstream;
use std::net::SocketAddr;
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::time::{Duration, timeout};

const DENY_ALL: &str = "[[policy]]\nname = 'deny'\naction = 'deny'\n";

/// Reads lines until the address in the line with this message.
async fn read_address(
    lines: &mut tokio::io::Lines<BufReader<tokio::process::ChildStderr>>,
    message: &str,
) -> SocketAddr {
    loop {
        let line = lines.next_line().await.unwrap().expect("the proxy starts");
        let line: serde_json::Value = serde_json::from_str(&line).unwrap();
        if line["message"].as_str().unwrap().starts_with(message) {
            return line["address"].as_str().unwrap().parse().unwrap();
        }
    }
}

#[tokio::test]
async fn a_stopped_reader_of_stderr_delays_no_request() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.toml");
    std::fs::write(&config, format!("log.access = 'all'\n{DENY_ALL}")).unwrap();
    let mut process = tidegate_command()
        .args([
            "run",
            "--listen",
            "127.0.0.1:0",
            "--upstream",
            "http://127.0.0.1:9",
        ])
        .arg("--config")
        .arg(&config)
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
    let admin = read_address(&mut lines, "admin listening").await;
    let proxy = read_address(&mut lines, "listening").await;
    // From here on, nothing reads stderr. The pipe holds 64 KiB and the queue 1 MiB.
    let path = format!("/{}", "a".repeat(2000));
    let requests = async {
        for _ in 0..3000 {
            assert_eq!(
                ClientRequest::new(proxy, "GET", &path).send().await.status,
                403
            );
        }
    };
    timeout(TEST_TIMEOUT * 3, requests)
        .await
        .expect("requests are answered");
    let metrics = ClientRequest::new(admin, "GET", "/metrics").header("Host", "localhost");
    let metrics = metrics.send().await.text();
    let dropped = metrics
        .lines()
        .find_map(|line| line.strip_prefix("tidegate_log_lines_dropped_total "))
        .expect("the counter is exported");
    assert!(dropped.parse::<u64>().unwrap() > 100, "{dropped}");
    let pid = process.id().unwrap();
    crate::support::process::send_signal_to(pid, "TERM");
    let exited = timeout(Duration::from_secs(15), process.wait()).await;
    assert!(exited.expect("SIGTERM is heard").unwrap().success());
}

#[tokio::test]
async fn rejections_write_short_and_few_lines() {
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start(DENY_ALL, upstream.address).await;
    let path = format!("/{}", "a".repeat(50_000));
    for _ in 0..1000 {
        assert_eq!(proxy.get(&path).await.status, 403);
    }
    tokio::time::sleep(Duration::from_millis(1100)).await;
    // One request per worker at least, so that each writes its summary.
    let mark = proxy.log_mark();
    for _ in 0..20 {
        proxy.get("/last").await;
    }
    let lines = proxy.log_since(0);
    let rejected: Vec<_> = lines
        .iter()
        .filter(|line| line.field("message") == "request" && line.field("path") != "/last")
        .collect();
    assert!(rejected.len() >= 100, "{}", rejected.len());
    for line in &rejected {
        let logged = line.field("path");
        assert!(logged.ends_with("…[49489 bytes more]"), "{logged}");
        assert!(logged.len() < 600, "{}", logged.len());
    }
    let omitted: usize = lines
        .iter()
        .filter(|line| line.field("message") == "rejected requests not logged")
        .map(|line| line.field("lines").parse::<usize>().unwrap())
        .sum();
    proxy
        .wait_for_log("the last line", mark, TEST_TIMEOUT, |line| {
            line.field("path") == "/last"
        })
        .await;
    assert!(omitted + rejected.len() <= 1000);
    println!("{} lines, {omitted} omitted", rejected.len());
}
