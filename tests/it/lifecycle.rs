//! Startup, shutdown, and the commands around them.

use crate::support::TEST_TIMEOUT;
use crate::support::client::{ClientRequest, RawClient};
use crate::support::process::{ChildProcess, run_command, tidegate_command};
use crate::support::proxy::Proxy;
use crate::support::upstream::{Upstream, channel_body};
use hyper::Response;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::net::TcpStream;

#[tokio::test]
async fn sigterm_lets_requests_in_flight_finish_and_exits_with_0() {
    let (feeder, body) = channel_body();
    let body = Mutex::new(Some(body));
    let upstream = Upstream::with_handler(move |_| {
        let body = body.lock().unwrap().take().unwrap_or_default();
        async { Response::new(body) }
    })
    .await;
    let mut proxy = Proxy::start("", upstream.address).await;
    let mut idle = RawClient::connect(proxy.address).await;
    let mut busy = RawClient::connect(proxy.address).await;
    busy.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    feeder.send("before").await;
    busy.read_past(b"before").await;
    idle.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert_eq!(idle.read_response().await.status, 200);
    proxy.send_sigterm();
    assert!(
        idle.closes_within(TEST_TIMEOUT).await,
        "an idle keep-alive connection is open"
    );
    assert!(
        TcpStream::connect(proxy.address).await.is_err(),
        "a new connection was accepted"
    );
    assert!(
        proxy.is_running(),
        "the proxy must wait for the request in flight"
    );
    feeder.send("after").await;
    drop(feeder);
    busy.read_past(b"after").await;
    busy.read_past(b"0\r\n\r\n").await;
    assert!(busy.closes_within(TEST_TIMEOUT).await);
    assert_eq!(
        proxy.wait_for_exit(TEST_TIMEOUT).await.status.code(),
        Some(0)
    );
}

#[tokio::test]
async fn sigterm_without_requests_in_flight_exits_quickly() {
    let upstream = Upstream::echo().await;
    let mut proxy = Proxy::start("", upstream.address).await;
    assert_eq!(proxy.get("/").await.status, 200);
    let start = Instant::now();
    proxy.send_sigterm();
    assert_eq!(
        proxy.wait_for_exit(TEST_TIMEOUT).await.status.code(),
        Some(0)
    );
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
}

/// The log pipe breaks, as when a container runtime dies. The standard library's print macros would
/// panic.
#[tokio::test]
async fn a_broken_log_pipe_does_not_stop_the_proxy() {
    let upstream = Upstream::echo().await;
    let config =
        "[log]\naccess = 'all'\n[[policy]]\nname = 'p'\nlimit = { requests = 1, per = '1h' }";
    let mut proxy = Proxy::start(config, upstream.address).await;
    proxy.break_log_pipe().await;
    assert_eq!(proxy.get_statuses("/", 3).await, [200, 429, 429]);
    proxy.write_config("nonsense");
    let deadline = Instant::now() + TEST_TIMEOUT;
    while proxy
        .read_metric("tidegate_config_last_reload_successful")
        .await
        != 0.0
    {
        assert!(
            Instant::now() < deadline,
            "the reload must fail and be logged"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    proxy.send_sigterm();
    assert_eq!(
        proxy.wait_for_exit(TEST_TIMEOUT).await.status.code(),
        Some(0)
    );
}

#[tokio::test]
async fn sigterm_waits_at_most_the_grace_period() {
    let upstream = Upstream::with_handler(|_| std::future::pending()).await;
    let mut proxy = Proxy::start("[shutdown]\ngrace = '200ms'", upstream.address).await;
    let mut client = RawClient::connect(proxy.address).await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    crate::support::eventually("the request to arrive", TEST_TIMEOUT, || {
        upstream.requests().first().map(|_| ())
    })
    .await;
    proxy.send_sigterm();
    proxy.wait_for_exit(TEST_TIMEOUT).await;
}

#[tokio::test]
async fn sigterm_keeps_serving_during_the_shutdown_delay() {
    let upstream = Upstream::echo().await;
    let mut proxy = Proxy::start("[shutdown]\ndelay = '1s'", upstream.address).await;
    let start = Instant::now();
    proxy.send_sigterm();
    while start.elapsed() < Duration::from_millis(700) {
        let status = proxy.get("/").await.status;
        assert_eq!(status, 200);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(
        proxy.wait_for_exit(TEST_TIMEOUT).await.status.code(),
        Some(0)
    );
    assert!(start.elapsed() >= Duration::from_secs(1));
}

/// A file with several errors, followed by their expected messages.
const INVALID_CONFIG: &str = r#"
[listen]
adress = "127.0.0.1:0"
max_connections = "many"

[[policy]]
name = "bad name!"
limit = { requests = -1, per = "1 fortnight" }

[[policy]]
name = "twice"
limit = { requests = 1, per = "1m" }

[[policy]]
name = "twice"
match = { path = "no-slash" }
limit = { requests = 1, per = "1m", algorithm = "sliding_lag" }
"#;
const EXPECTED_ERROR_TEXTS: [&str; 9] = [
    "adress",
    "address",
    "max_connections",
    "bad name!",
    "-1",
    "fortnight",
    "twice",
    "no-slash",
    "sliding_log",
];

fn write_config_file(text: &str) -> (TempDir, PathBuf) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("config.toml");
    fs::write(&path, text).unwrap();
    (dir, path)
}

#[tokio::test]
async fn an_invalid_configuration_exits_with_1_and_lists_all_errors() {
    let (_dir, path) = write_config_file(INVALID_CONFIG);
    let listen = [
        "--listen",
        "127.0.0.1:0",
        "--upstream",
        "http://127.0.0.1:9",
    ];
    let ended = run_command(
        tidegate_command()
            .arg("run")
            .arg("--config")
            .arg(&path)
            .args(listen),
    )
    .await;
    assert_eq!(ended.status.code(), Some(1));
    for expected in EXPECTED_ERROR_TEXTS {
        assert!(
            ended.stderr.contains(expected),
            "{expected:?} is not in {}",
            ended.stderr
        );
    }
}

#[tokio::test]
async fn check_reports_every_error_with_its_position() {
    let (_dir, path) = write_config_file(INVALID_CONFIG);
    let ended = run_command(tidegate_command().arg("check").arg(&path)).await;
    assert_eq!(ended.status.code(), Some(1));
    for expected in EXPECTED_ERROR_TEXTS {
        assert!(
            ended.stderr.contains(expected),
            "{expected:?} is not in {}",
            ended.stderr
        );
    }
    for place in [
        "config.toml:3:1",
        "config.toml:4:",
        "config.toml:8:",
        "config.toml:17:",
    ] {
        assert!(
            ended.stderr.contains(place),
            "{place:?} is not in {}",
            ended.stderr
        );
    }
}

#[tokio::test]
async fn non_utf8_variables_are_errors_only_with_the_tidegate_prefix() {
    let (_dir, path) = write_config_file("[upstream]\nurl = \"http://127.0.0.1:9\"\n");
    let odd = OsStr::from_bytes(b"\xff");
    let ended = run_command(
        tidegate_command()
            .arg("check")
            .arg(&path)
            .env("SOMEBODYS", odd),
    )
    .await;
    assert_eq!(ended.status.code(), Some(0), "{}", ended.stderr);
    let ended = run_command(
        tidegate_command()
            .arg("check")
            .arg(&path)
            .env("TIDEGATE_LISTEN__ADDRESS", odd),
    )
    .await;
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(
        ended
            .stderr
            .starts_with("error: TIDEGATE_LISTEN__ADDRESS: listen.address: "),
        "{}",
        ended.stderr
    );
}

#[tokio::test]
async fn check_describes_a_valid_file() {
    let text = r#"
[upstream]
url = "http://127.0.0.1:9"
[[policy]]
name = "login"
match = { methods = ["POST"], path = "/api/login" }
key = ["client_ip"]
limit = { requests = 5, per = "1m" }
"#;
    let (_dir, path) = write_config_file(text);
    let ended = run_command(tidegate_command().arg("check").arg(&path)).await;
    assert_eq!(ended.status.code(), Some(0), "{}", ended.stderr);
    for expected in ["login", "POST", "/api/login", "5"] {
        assert!(
            ended.stdout.contains(expected),
            "{expected:?} is not in {}",
            ended.stdout
        );
    }
}

#[tokio::test]
async fn check_accepts_the_configuration_of_this_repository() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/config.toml");
    let ended = run_command(tidegate_command().args(["check", path])).await;
    assert_eq!(ended.status.code(), Some(0), "{}", ended.stderr);
}

#[tokio::test]
async fn secrets_are_read_from_files_and_never_printed() {
    let dir = TempDir::new().unwrap();
    let secret = dir.path().join("password");
    fs::write(&secret, "hunter2-in-a-file\n").unwrap();
    let config = dir.path().join("config.toml");
    let from_file = format!("url = \"redis://127.0.0.1:1/0\"\npassword_file = {secret:?}\n");
    let in_url = "url = \"redis://u:hunter2-in-a-url@127.0.0.1:1/0\"\n".to_owned();
    for redis in [from_file, in_url] {
        let head =
            "[upstream]\nurl = \"http://127.0.0.1:9\"\n[store]\nkind = \"redis\"\n[store.redis]\n";
        fs::write(&config, format!("{head}key_prefix = \"t\"\n{redis}")).unwrap();
        let ended = run_command(tidegate_command().arg("check").arg(&config)).await;
        assert_eq!(ended.status.code(), Some(0), "{}", ended.stderr);
        let output = ended.stdout + &ended.stderr;
        assert!(!output.contains("hunter2"), "{output}");
    }
}

#[tokio::test]
async fn the_environment_overrides_the_file_and_flags_override_both() {
    let upstream = Upstream::echo().await;
    let closed_url = "http://127.0.0.1:1";
    let text = format!(
        "[upstream]\nurl = \"{closed_url}\"\nresponse_timeout = \"5s\"\n[response]\nheaders = \"none\"\n\
        [[policy]]\nname = \"p\"\nlimit = {{ requests = 9, per = \"1h\" }}\n"
    );
    let builder = Proxy::builder().config(&text).upstream(upstream.address);
    let builder = builder
        .env("TIDEGATE_RESPONSE__HEADERS", "standard")
        .env("TIDEGATE_UPSTREAM__URL", closed_url);
    // Variables that Kubernetes injects for a Service of this name are not settings.
    let builder = builder
        .env("TIDEGATE_PORT", "tcp://10.0.0.1:80")
        .env("TIDEGATE_SERVICE_HOST", "10.0.0.1");
    let proxy = builder.start().await;
    let reply = proxy.get("/").await;
    assert_eq!(reply.status, 200, "the flag sets the upstream");
    assert!(reply.header("ratelimit").is_some() && reply.header("x-ratelimit-limit").is_none());
}

#[tokio::test]
async fn a_configuration_without_an_upstream_names_the_missing_key() {
    let (_dir, path) = write_config_file("");
    let ended = run_command(
        tidegate_command()
            .arg("run")
            .arg("--config")
            .arg(&path)
            .args(["--listen", "127.0.0.1:0"]),
    )
    .await;
    assert_eq!(ended.status.code(), Some(1));
    assert!(ended.stderr.contains("upstream.url"), "{}", ended.stderr);
}

#[tokio::test]
async fn an_address_in_use_is_reported_with_the_address() {
    let taken = Upstream::echo().await;
    let (_dir, path) = write_config_file("");
    let mut command = tidegate_command();
    command.arg("run").arg("--config").arg(&path);
    command.args([
        "--upstream",
        "http://127.0.0.1:9",
        "--listen",
        &taken.address.to_string(),
    ]);
    let ended = run_command(&mut command).await;
    assert_eq!(ended.status.code(), Some(1));
    assert!(
        ended.stderr.contains(&taken.address.to_string()),
        "{}",
        ended.stderr
    );
}

#[tokio::test]
async fn the_demo_prints_curl_commands_that_reach_the_limit() {
    let mut command = tidegate_command();
    command
        .args(["demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    let mut demo = ChildProcess::start(&mut command).unwrap();
    demo.wait_for("a curl line", 0, TEST_TIMEOUT, |line| {
        line.text.contains("curl ").then_some(())
    })
    .await;
    let mut limited = false;
    for (address, path) in find_plain_get_urls(&demo.transcript()) {
        let mut statuses = Vec::new();
        for _ in 0..30 {
            statuses.push(
                ClientRequest::new(address.parse().unwrap(), "GET", &path)
                    .send_for_status()
                    .await,
            );
        }
        let first_refusal = statuses.iter().position(|status| *status == 429);
        limited |= statuses[0] == 200 && first_refusal.is_some();
    }
    assert!(
        limited,
        "no plain GET turns from 200 to 429 within 30 calls:\n{}",
        demo.transcript()
    );
    demo.send_signal("TERM");
    assert_eq!(
        demo.wait_for_exit(TEST_TIMEOUT).await.status.code(),
        Some(0)
    );
}

/// Returns address and path of the curl commands that send a plain GET.
fn find_plain_get_urls(text: &str) -> Vec<(String, String)> {
    let curls = text
        .lines()
        .filter_map(|line| Some(line.split_once("curl ")?.1));
    let plain = curls.filter(|line| {
        ![" -X", "-H", "-d", "--data", "-T"]
            .iter()
            .any(|flag| line.contains(flag))
    });
    plain
        .filter_map(|line| {
            let url = line
                .split(['\'', '"', ' '])
                .find_map(|word| word.strip_prefix("http://"))?;
            let url = url.split([';', ')']).next()?;
            let (address, path) = url.split_once('/').unwrap_or((url, ""));
            Some((
                address.replace("localhost", "127.0.0.1"),
                format!("/{path}"),
            ))
        })
        .collect()
}

#[tokio::test]
async fn an_unreachable_upstream_is_logged_once() {
    let proxy = Proxy::builder().start().await;
    assert_eq!(proxy.get_statuses("/", 30).await, [502; 30]);
    let lines = proxy.log_text();
    let matching: Vec<&str> = lines
        .lines()
        .filter(|line| line.contains("requests are not forwarded"))
        .collect();
    assert_eq!(matching.len(), 1, "{lines}");
    assert!(matching[0].contains("connect_refused"), "{}", matching[0]);
    assert!(
        matching[0].contains("\"upstream\":\"127.0.0.1:"),
        "{}",
        matching[0]
    );
}

#[tokio::test]
async fn a_malformed_request_is_in_the_access_log() {
    let proxy = Proxy::builder().start().await;
    assert_eq!(proxy.request("GET", "/a%00b").send_for_status().await, 400);
    let line = proxy
        .wait_for_log("an access line", 0, TEST_TIMEOUT, |line| {
            line.message_starts_with("request")
        })
        .await;
    assert_eq!(
        (line.field("decision").as_str(), line.field("path").as_str()),
        ("malformed", "/a%00b")
    );
    assert_eq!(line.field("status"), "400");
}
