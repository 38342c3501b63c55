//! Logs that clients make long or many, and a reader of stderr that stops.

use crate::support::prelude::*;
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::time::Duration;

const DENY_ALL: &str = "[[policy]]\nname = 'deny'\naction = 'deny'\n";

/// Reads lines until the address in the line with this message.
async fn read_address(
    lines: &mut tokio::io::Lines<BufReader<tokio::process::ChildStderr>>,
    message: &str,
) -> SocketAddr {
    loop {
        let line = lines.next_line().await.unwrap().expect("the proxy starts");
        let line: Value = serde_json::from_str(&line).unwrap();
        if line["message"].as_str().unwrap().starts_with(message) {
            return line["address"].as_str().unwrap().parse().unwrap();
        }
    }
}

#[tokio::test]
async fn a_stopped_reader_of_stderr_delays_no_request() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.toml");
    fs::write(&config, format!("log.access = 'all'\n{DENY_ALL}")).unwrap();
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
            ClientRequest::new(proxy, "GET", &path)
                .expect_status(403)
                .await;
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
async fn rejections_write_short_lines_ten_a_second_and_all_are_counted() {
    let proxy = Proxy::with_echo(DENY_ALL).await;
    let path = format!("/{}", "a".repeat(50_000));
    let started = Instant::now();
    let mut sent = 0;
    // Several connections, so that all workers write.
    while started.elapsed() < Duration::from_secs(5) {
        for _ in 0..20 {
            assert_eq!(proxy.get(&path).await.status, 403);
        }
        sent += 20;
    }
    let seconds = started.elapsed().as_secs();
    let count = || {
        let lines = proxy.log_since(0);
        let items = lines.iter();
        let rejected = items.filter(|line| line.field("message") == "request");
        let rejected: Vec<_> = rejected.map(|line| line.field("path").to_owned()).collect();
        let summaries = lines
            .iter()
            .filter(|line| line.field("message") == "rejected requests not logged");
        let omitted: Vec<usize> = summaries
            .map(|line| line.field("lines").parse().unwrap())
            .collect();
        (rejected, omitted)
    };
    let (rejected, omitted) = eventually("all rejections in the log", TEST_TIMEOUT, async || {
        let (rejected, omitted) = count();
        (rejected.len() + omitted.iter().sum::<usize>() == sent).then_some((rejected, omitted))
    })
    .await;
    for logged in &rejected {
        assert!(logged.ends_with("…[49489 bytes more]"), "{logged}");
        assert!(logged.len() < 600, "{}", logged.len());
    }
    // A burst of 50 and 5 a second, and what the last summary takes.
    let most = 50 + 5 * (usize::try_from(seconds).unwrap() + 2);
    let lines = rejected.len() + omitted.len();
    assert!(
        lines <= most,
        "{lines} lines in {seconds} s for {sent} requests"
    );
    assert!(rejected.len() >= 40, "{}", rejected.len());
}
