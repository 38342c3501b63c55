//! `tidegate why`: when and why a client was limited, read from the proxy's own log.

use crate::support::prelude::*;
use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::Write;
use tidegate::policy::{KeyPart, KeyTemplate};

const POLICIES: &str = r#"
[client]
trusted_proxies = ["127.0.0.0/8"]

[[policy]]
name = "api"
match = { path = "/api/**" }
key = ["header:x-user-id", "path:/api/{service}/**"]
limits = [
  { requests = 3, per = "10m" },
  { requests = 100, per = "1d", algorithm = "fixed_window", name = "daily" },
]

[[policy]]
name = "login"
match = { path = "/login" }
key = ["client_ip"]
limit = { requests = 1, per = "1h" }
block_for = "2h"

[[policy]]
name = "all"
match = { path = "/flood" }
key = ["header:x-user-id"]
limit = { requests = 2, per = "1h" }

[[policy]]
name = "candidate"
mode = "shadow"
match = { path = "/flood" }
key = ["header:x-user-id"]
limit = { requests = 1, per = "1h" }
"#;

/// A configuration file, and logs beside it.
struct LogFixture(TempDir);

impl LogFixture {
    fn new() -> Self {
        let fixture = Self(TempDir::new().unwrap());
        fs::write(fixture.path("config.toml"), POLICIES).unwrap();
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    async fn run(&self, args: &[&str]) -> ProcessOutput {
        let mut command = tidegate_command();
        command.current_dir(self.0.path()).arg("why").args(args);
        run_command(&mut command).await
    }

    async fn run_for_report(&self, args: &[&str]) -> Value {
        let ended = self.run(&[args, &["--json"]].concat()).await;
        ended.expect_code(0);
        ended.json()
    }
}

async fn send_requests(proxy: &Proxy, target: &str, header: (&str, &str), times: usize) {
    for _ in 0..times {
        let request = proxy.request("GET", target).header(header.0, header.1);
        request.send_for_status().await;
    }
}

/// Waits until the proxy has written the lines about this number of refused requests.
async fn read_log(proxy: &Proxy, refused: usize) -> String {
    eventually(
        format!("{refused} access lines"),
        TEST_TIMEOUT,
        async || {
            let text = proxy.log_text();
            (text.matches("\"target\":\"access\"").count() >= refused).then_some(text)
        },
    )
    .await
}

fn write_gzip(path: &Path, text: &str) {
    let mut gzip = GzEncoder::new(fs::File::create(path).unwrap(), Compression::fast());
    gzip.write_all(text.as_bytes()).unwrap();
    gzip.finish().unwrap();
}

#[tokio::test]
async fn the_refusals_of_one_client_are_found_by_its_key() {
    let fixture = LogFixture::new();
    let proxy = Proxy::with_echo(POLICIES).await;
    send_requests(&proxy, "/api/pay/1", ("x-user-id", "acme"), 8).await;
    send_requests(&proxy, "/api/p%61y/2", ("x-user-id", "acme"), 1).await;
    send_requests(&proxy, "/api/ship/1", ("x-user-id", "acme"), 5).await;
    send_requests(&proxy, "/api/pay/1", ("x-user-id", "other"), 9).await;
    let address = ("x-forwarded-for", "2001:db8::7");
    send_requests(&proxy, "/login", address, 4).await;
    fs::write(fixture.path("log"), read_log(&proxy, 17).await).unwrap();

    // The service is in each line, so one value finds the client in all services.
    let report = fixture.run_for_report(&["--key", "acme", "log"]).await;
    assert_eq!(report["refused"], 5 + 1 + 2, "{report:#}");
    let report = fixture
        .run_for_report(&["--key", "acme", "--key", "pay", "--policy", "api", "log"])
        .await;
    assert_eq!(report["refused"], 6);
    let episode = &report["episodes"][0];
    assert_fields(
        episode,
        json!({ "policy": "api", "limit": "api", "decision": "rejected" }),
    );
    let wait_ms = episode["max_wait_ms"].as_u64().unwrap();
    assert!((500_000..=600_000).contains(&wait_ms), "{episode}");

    // Another address of the same /64 has the same key.
    let report = fixture
        .run_for_report(&["--key", "2001:db8::99", "--policy", "login", "log"])
        .await;
    assert_eq!(report["refused"], 3, "{report:#}");
    assert_eq!(report["searched"][0]["key"], "login/2001:db8::%2F64");
    let decisions: Vec<_> = report["episodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|episode| episode["decision"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(decisions, ["rejected", "blocked"]);
    let words = ["--key", "2001:db8::99", "--policy", "login", "log"];
    let table = fixture.run(&words).await.stdout;
    // A block is of the key, not of a limit.
    assert!(table.contains(" login (block_for)  "), "{table}");

    let table = fixture
        .run(&["--key", "acme", "--key", "ship", "log"])
        .await;
    table.expect_code(0);
    assert!(
        table
            .stdout
            .starts_with("Key \"acme\" \"ship\": refused 2 times.\n")
            && table.stdout.contains("api, 3 per 10m, sliding_log")
            && table.stdout.contains("GET /api/ship/1")
            && table
                .stdout
                .contains("login            not searched: its key has 1 value (client IP)\n"),
        "{}",
        table.stdout
    );
    let plot = fixture.run(&["--key", "acme", "--plot", "log"]).await;
    plot.expect_stdout("Refused requests per 1m (UTC)");
    plot.expect_stdout("█");
}

/// The access log writes few lines per second. All refusals are logged
/// or counted as left out.
#[tokio::test]
async fn refusals_that_the_log_left_out_are_counted() {
    let fixture = LogFixture::new();
    let proxy = Proxy::with_echo(POLICIES).await;
    send_requests(&proxy, "/flood", ("x-user-id", "acme"), 802).await;
    sleep(Duration::from_millis(1_100)).await;
    fs::write(fixture.path("log"), proxy.log_text()).unwrap();
    let report = fixture.run_for_report(&["--key", "acme", "log"]).await;
    let omitted = report["left_out"]["not_logged"]["all"].as_u64().unwrap();
    assert!(omitted > 0);
    assert_eq!(
        report["refused"].as_u64().unwrap() + omitted,
        800,
        "{report:#}"
    );
    assert_eq!(report["shadow_rejected"], 1, "{report:#}");
}

/// The key of the policies "all" and "candidate".
fn header_template() -> KeyTemplate {
    let header = hyper::header::HeaderName::from_static("x-user-id");
    KeyTemplate::new(vec![KeyPart::Header(header)])
}

#[tokio::test]
async fn logs_are_read_compressed_and_partly_and_broken_lines_are_reported() {
    let fixture = LogFixture::new();
    let line = |time: &str| {
        // SHA-256 of the framed policy and value; `keys show` prints the same hash.
        let mut key = header_template().start_key("all");
        key.push_key_value(Some(b"acme"));
        let id = key.finish().id();
        format!(
            "{{\"timestamp\":\"{time}\",\"level\":\"INFO\",\"message\":\"request\",\"method\":\"GET\",\"path\":\"/flood\",\"client_ip\":\"10.0.0.1\",\"status\":429,\"decision\":\"rejected\",\"policy\":\"all\",\"limit\":\"all\",\"key\":\"{id:032x}\",\"remaining\":0,\"target\":\"access\"}}\n"
        )
    };
    let denied = "{\"timestamp\":\"2026-11-21T09:00:00Z\",\"message\":\"request\",\"status\":503,\"decision\":\"degraded\",\"policy\":\"all\",\"target\":\"access\"}\n";
    let first = line("2026-11-20T09:00:00.5Z") + "not JSON\n" + &line("2026-11-21T09:00:00Z");
    write_gzip(&fixture.path("log.gz"), &first);
    fs::write(
        fixture.path("log"),
        line("2026-11-21T09:01:00Z") + denied + &"x".repeat(100_000),
    )
    .unwrap();
    let args = [
        "--key",
        "acme",
        "--since",
        "2026-11-21T00:00:00Z",
        "log.gz",
        "log",
    ];
    let report = fixture.run_for_report(&args).await;
    assert_eq!(report["refused"], 2);
    assert_eq!(
        report["episodes"][0]["max_wait_ms"],
        Value::Null,
        "an older version's line"
    );
    assert_eq!(
        report["range"],
        json!({ "from": "2026-11-21T09:00:00Z", "to": "2026-11-21T09:01:00Z" })
    );
    let lines = &report["lines"];
    assert_fields(
        lines,
        json!({ "read": 6, "unreadable": 2, "before_since": 1 }),
    );
    assert_eq!(lines["first_unreadable"]["line"], 2);
    assert_eq!(report["left_out"]["without_key"][0]["requests"], 1);

    // A damaged file ends the log, and the report says so.
    let gzip = fs::read(fixture.path("log.gz")).unwrap();
    fs::write(fixture.path("cut.gz"), &gzip[..gzip.len() - 12]).unwrap();
    let report = fixture
        .run_for_report(&["--key", "acme", "log", "cut.gz"])
        .await;
    assert_eq!(report["lines"]["read_errors"].as_array().unwrap().len(), 1);

    fs::write(
        fixture.path("foreign"),
        "127.0.0.1 - - \"GET / HTTP/1.1\"\n",
    )
    .unwrap();
    fs::write(fixture.path("empty"), "").unwrap();
    for (args, message) in [
        (["--key", "acme", "foreign"].as_slice(), "foreign:1: "),
        (&["--key", "acme", "empty"], "the log is empty"),
        (&["--key", "acme", "absent"], "absent: No such file"),
        (
            &["--key", "a", "--key", "b", "--key", "c", "log"],
            "fit no policy",
        ),
        (
            &["--key", "acme", "--policy", "alll", "log"],
            "unknown policy",
        ),
        (
            &["--key", "no-address", "--policy", "login", "log"],
            "client address",
        ),
    ] {
        fixture
            .run(args)
            .await
            .expect_code(1)
            .expect_stderr(message);
    }
    let ended = fixture
        .run(&["--key", "acme", "--since", "soon", "log"])
        .await;
    ended.expect_code(2);
}

/// A line about an admitted request that `candidate`, a shadow policy, would have refused.
fn shadow_line(limit_and_key: &str) -> String {
    format!(
        "{{\"timestamp\":\"2026-11-21T09:00:00Z\",\"message\":\"request\",\"method\":\"GET\",\"path\":\"/flood\",\"client_ip\":\"10.0.0.1\",\"status\":200,\"decision\":\"allowed\",\"shadow_rejected\":\"candidate\"{limit_and_key},\"target\":\"access\"}}\n"
    )
}

#[tokio::test]
async fn a_refusal_by_a_shadow_policy_counts_only_for_a_key_that_the_line_shows() {
    let fixture = LogFixture::new();
    let enforced_key = |user: &str| {
        let mut key = header_template().start_key("all");
        key.push_key_value(Some(user.as_bytes()));
        format!(",\"limit\":\"all\",\"key\":\"{:032x}\"", key.finish().id())
    };
    let log = [
        shadow_line(""),
        shadow_line(&enforced_key("acme")),
        shadow_line(&enforced_key("other")),
    ];
    fs::write(fixture.path("log"), log.concat()).unwrap();
    // The address is the key of another policy, and no line shows the header of `candidate`.
    for (key, refused) in [("acme", 1), ("10.0.0.1", 0)] {
        let report = fixture.run_for_report(&["--key", key, "log"]).await;
        assert_eq!(report["shadow_rejected"], refused, "{report:#}");
        let without_key = &report["left_out"]["without_key"][0];
        assert_eq!(without_key["policy"], "candidate", "{report:#}");
        assert_eq!(without_key["decision"], "shadow_rejected", "{report:#}");
        assert_eq!(without_key["requests"], 1, "{report:#}");
    }
}

#[tokio::test]
async fn absurd_numbers_in_a_log_are_reported_as_very_large() {
    let fixture = LogFixture::new();
    let omitted = format!(
        "{{\"timestamp\":\"2026-11-21T09:00:00Z\",\"message\":\"rejected requests not logged\",\"policy\":\"login\",\"lines\":{},\"target\":\"access\"}}\n",
        u64::MAX
    );
    let refused = format!(
        "{{\"timestamp\":\"2026-11-21T09:00:00Z\",\"message\":\"request\",\"path\":\"/login\",\"client_ip\":\"10.0.0.1\",\"status\":429,\"decision\":\"rejected\",\"policy\":\"login\",\"retry_after_ms\":{},\"target\":\"access\"}}\n",
        u64::MAX
    );
    fs::write(fixture.path("log"), omitted.repeat(2) + &refused).unwrap();
    let report = fixture.run(&["--key", "10.0.0.1", "log"]).await;
    report.expect_code(0).expect_stdout("refused once");
}

const TWO_PARTS: &str = r#"
[[policy]]
name = "plans"
key = ["header:x-user-id", "header:x-plan", "client_ip"]
limit = { requests = 1, per = "1h" }
"#;

#[tokio::test]
async fn a_part_of_a_key_finds_all_keys_that_have_it_and_says_so() {
    let fixture = LogFixture::new();
    fs::write(fixture.path("config.toml"), TWO_PARTS).unwrap();
    let proxy = Proxy::with_echo(TWO_PARTS).await;
    for (user, plan, times) in [
        ("ann", "free", 4),
        ("ann", "gold", 3),
        ("bob", "free", 3),
        ("free", "ann", 2),
    ] {
        for _ in 0..times {
            let request = proxy.request("GET", "/").header("x-user-id", user);
            request.header("x-plan", plan).send_for_status().await;
        }
    }
    fs::write(fixture.path("log"), read_log(&proxy, 8).await).unwrap();
    for (keys, refused, distinct) in [
        (&["ann"][..], 3 + 2 + 1, 3),
        (&["gold"], 2, 1),
        (&["free"], 3 + 2 + 1, 3),
        // The policy's order counts, and the address may be left out as in any line.
        (&["ann", "free"], 3, 1),
        (&["free", "ann"], 1, 1),
        (&["free", "127.0.0.1"], 3 + 2 + 1, 3),
        (&["127.0.0.1"], 8, 4),
        (&["ann", "free", "127.0.0.1"], 3, 0),
        (&["zed"], 0, 0),
    ] {
        let mut args: Vec<&str> = keys.iter().flat_map(|key| ["--key", key]).collect();
        args.push("log");
        let report = fixture.run_for_report(&args).await;
        assert_eq!(report["refused"], refused, "{keys:?}: {report:#}");
        let partial = report["partial_keys"].as_array().unwrap();
        assert_eq!(partial.len(), distinct, "{keys:?}: {report:#}");
        let items = partial.iter();
        let sum: u64 = items.filter_map(|key| key["refused"].as_u64()).sum();
        assert!(distinct == 0 || sum == refused, "{keys:?}: {report:#}");
    }
    let text = fixture.run(&["--key", "gold", "log"]).await.stdout;
    assert!(text.contains("part of a key"), "{text}");
    assert_contains(&text, &["partial match: header x-plan of the key "]);
    assert!(text.contains("2 refused"), "{text}");
}
