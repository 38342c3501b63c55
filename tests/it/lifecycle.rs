//! Startup, shutdown, and the commands around them.

use crate::support::prelude::*;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

#[tokio::test]
async fn sigterm_lets_requests_in_flight_finish_and_exits_with_0() {
    let (feeder, upstream) = Upstream::streaming().await;
    let mut proxy = Proxy::start("", upstream.address).await;
    let mut idle = RawClient::connect(proxy.address).await;
    let mut busy = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
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
    proxy.assert_exit_code(0).await;
}

#[tokio::test]
async fn sigterm_without_requests_in_flight_exits_quickly() {
    let mut proxy = Proxy::with_echo("").await;
    assert_eq!(proxy.get("/").await.status, 200);
    let start = Instant::now();
    proxy.send_sigterm();
    proxy.assert_exit_code(0).await;
    assert_faster_than(Duration::from_secs(5), start);
}

/// The log pipe breaks, as when a container runtime dies. The standard library's print macros would
/// panic.
#[tokio::test]
async fn a_broken_log_pipe_does_not_stop_the_proxy() {
    let config =
        "[log]\naccess = 'all'\n[[policy]]\nname = 'p'\nlimit = { requests = 1, per = '1h' }";
    let mut proxy = Proxy::with_echo(config).await;
    proxy.break_log_pipe().await;
    assert_eq!(proxy.get_statuses("/", 3).await, [200, 429, 429]);
    proxy.write_config("nonsense");
    proxy
        .wait_for_metric("tidegate_config_last_reload_successful", 0.0)
        .await;
    proxy.send_sigterm();
    proxy.assert_exit_code(0).await;
}

#[tokio::test]
async fn sigterm_waits_at_most_the_grace_period() {
    let upstream = Upstream::with_handler(|_| std::future::pending()).await;
    let mut proxy = Proxy::start("[shutdown]\ngrace = '200ms'", upstream.address).await;
    let _client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    eventually("the request to arrive", TEST_TIMEOUT, async || {
        upstream.requests().first().map(|_| ())
    })
    .await;
    proxy.send_sigterm();
    proxy.wait_for_exit(TEST_TIMEOUT).await;
}

#[tokio::test]
async fn sigterm_keeps_serving_during_the_shutdown_delay() {
    let mut proxy = Proxy::with_echo("[shutdown]\ndelay = '1s'").await;
    let start = Instant::now();
    proxy.send_sigterm();
    while start.elapsed() < Duration::from_millis(700) {
        let status = proxy.get("/").await.status;
        assert_eq!(status, 200);
        sleep(Duration::from_millis(50)).await;
    }
    proxy.assert_exit_code(0).await;
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

#[tokio::test]
async fn an_invalid_configuration_exits_with_1_and_lists_all_errors() {
    let config = ConfigFile::new(INVALID_CONFIG);
    let ended = config
        .run(&[
            "run",
            "--listen",
            "127.0.0.1:0",
            "--upstream",
            "http://127.0.0.1:9",
        ])
        .await;
    ended.expect_code(1);
    for expected in EXPECTED_ERROR_TEXTS {
        ended.expect_stderr(expected);
    }
}

#[tokio::test]
async fn check_reports_every_error_with_its_position() {
    let config = ConfigFile::new(INVALID_CONFIG);
    let ended = config.run(&["check"]).await;
    ended.expect_code(1);
    for expected in EXPECTED_ERROR_TEXTS {
        ended.expect_stderr(expected);
    }
    for place in [
        "config.toml:3:1",
        "config.toml:4:",
        "config.toml:8:",
        "config.toml:17:",
    ] {
        ended.expect_stderr(place);
    }
}

#[tokio::test]
async fn non_utf8_variables_are_errors_only_with_the_tidegate_prefix() {
    let config = ConfigFile::new("[upstream]\nurl = \"http://127.0.0.1:9\"\n");
    let odd = OsStr::from_bytes(b"\xff");
    let ended = run_command(
        tidegate_command()
            .arg("check")
            .arg(config.path())
            .env("SOMEBODYS", odd),
    )
    .await;
    ended.expect_code(0);
    let ended = run_command(
        tidegate_command()
            .arg("check")
            .arg(config.path())
            .env("TIDEGATE_LISTEN__ADDRESS", odd),
    )
    .await;
    ended.expect_code(1);
    assert_starts(
        &ended.stderr,
        "error: TIDEGATE_LISTEN__ADDRESS: listen.address: ",
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
    let config = ConfigFile::new(text);
    let ended = config.run(&["check"]).await;
    ended.expect_code(0);
    for expected in ["login", "POST", "/api/login", "5"] {
        ended.expect_stdout(expected);
    }
}

#[tokio::test]
async fn check_accepts_the_configuration_of_this_repository() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/config.toml");
    let ended = run_command(tidegate_command().args(["check", path])).await;
    ended.expect_code(0);
}

#[tokio::test]
async fn secrets_are_read_from_files_and_never_printed() {
    let (_dir, secret) = write_temp_file("password", "hunter2-in-a-file\n");
    let from_file = format!("url = \"redis://127.0.0.1:1/0\"\npassword_file = {secret:?}\n");
    let in_url = "url = \"redis://u:hunter2-in-a-url@127.0.0.1:1/0\"\n".to_owned();
    for redis in [from_file, in_url] {
        let head =
            "[upstream]\nurl = \"http://127.0.0.1:9\"\n[store]\nkind = \"redis\"\n[store.redis]\n";
        let config = ConfigFile::new(&format!("{head}key_prefix = \"t\"\n{redis}"));
        let ended = config.run(&["check"]).await;
        ended.expect_code(0);
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
    let builder = Proxy::setup(&text).upstream(upstream.address);
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
    let config = ConfigFile::new("");
    config
        .run(&["run", "--listen", "127.0.0.1:0"])
        .await
        .expect_code(1)
        .expect_stderr("upstream.url");
}

#[tokio::test]
async fn an_address_in_use_is_reported_with_the_address() {
    let taken = Upstream::echo().await;
    let config = ConfigFile::new("");
    let address = taken.address.to_string();
    let words = [
        "run",
        "--upstream",
        "http://127.0.0.1:9",
        "--listen",
        &address,
    ];
    config
        .run(&words)
        .await
        .expect_code(1)
        .expect_stderr(&taken.address.to_string());
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
        "no plain GET turns from 200 to 429 within 30 calls"
    );
    demo.send_signal("TERM");
    demo.assert_exit_code(0).await;
}

/// Returns address and path of the curl commands that send a plain GET.
fn find_plain_get_urls(text: &str) -> Vec<(String, String)> {
    let lines = text.lines();
    let curls = lines.filter_map(|line| Some(line.split_once("curl ")?.1));
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
    let proxy = Proxy::setup("").start().await;
    assert_eq!(proxy.get_statuses("/", 30).await, [502; 30]);
    let lines = proxy.log_text();
    let matching: Vec<&str> = lines
        .lines()
        .filter(|line| line.contains("requests are not forwarded"))
        .collect();
    assert_eq!(matching.len(), 1, "{lines}");
    assert!(matching[0].contains("connect_refused"), "{}", matching[0]);
    assert_contains(matching[0], &["\"upstream\":\"127.0.0.1:"]);
}

#[tokio::test]
async fn a_malformed_request_is_in_the_access_log() {
    let proxy = Proxy::setup("").start().await;
    assert_eq!(proxy.request("GET", "/a%00b").send_for_status().await, 400);
    let line = proxy.wait_for_message("request", 0).await;
    line.expect_fields(&[("decision", "malformed"), ("path", "/a%00b")]);
    assert_eq!(line.field("status"), "400");
}
