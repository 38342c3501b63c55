//! The commands for operators: `explain` and `keys`.

use crate::support::TEST_TIMEOUT;
use crate::support::admin_proxy::AdminProxy;
use crate::support::process::{ProcessOutput, run_command, tidegate_command};
use crate::support::proxy::{LogLine, Proxy};
use crate::support::redis::RedisServer;
use crate::support::upstream::Upstream;
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

const POLICIES: &str = r#"
[[policy]]
name = "health"
match = { path = "/health" }
action = "allow"

[[policy]]
name = "writes"
match = { methods = ["POST"], path = "/api/**" }
key = ["client_ip"]
limit = { requests = 50, per = "1m" }

[[policy]]
name = "api"
match = { path = "/api/**" }
key = ["header:x-user-id", "path:/api/{service}/**"]
limits = [
  { requests = 3, per = "10m" },
  { requests = 100, per = "1d", algorithm = "fixed_window", offset = "6h", name = "daily" },
]
[[policy.override]]
key = ["acme", "*"]
limit = { requests = 9, per = "10m" }

[[policy]]
name = "api-new"
mode = "shadow"
match = { path = "/api/**" }
limit = { requests = 1, per = "10m" }
"#;

/// A configuration file for a Redis server, and the commands that read it.
struct CommandFixture {
    dir: TempDir,
    redis: RedisServer,
}

impl CommandFixture {
    fn start() -> Self {
        let office = Self {
            dir: TempDir::new().unwrap(),
            redis: RedisServer::start(),
        };
        fs::write(office.config_path(), office.config_text()).unwrap();
        office
    }

    fn config_text(&self) -> String {
        let port = self.redis.port();
        format!(
            "[store]\nkind = 'redis'\n[store.redis]\nurl = 'redis://127.0.0.1:{port}'\nkey_prefix = 'shop'\n\
             {POLICIES}"
        )
    }

    fn config_path(&self) -> PathBuf {
        self.dir.path().join("config.toml")
    }

    async fn run_command(&self, words: &[&str]) -> ProcessOutput {
        run_command(
            tidegate_command()
                .args(words)
                .arg("--config")
                .arg(self.config_path()),
        )
        .await
    }

    async fn run_successfully(&self, words: &[&str]) -> String {
        let ended = self.run_command(words).await;
        assert_eq!(ended.status.code(), Some(0), "{words:?}: {}", ended.stderr);
        ended.stdout
    }

    /// Uses up ann's limit at the pay service.
    async fn exhaust_limit(&self) -> (Proxy, Upstream) {
        let upstream = Upstream::echo().await;
        let proxy = Proxy::start(&self.config_text(), upstream.address).await;
        for expected in [200, 200, 200, 429] {
            assert_eq!(
                proxy
                    .request("GET", "/api/pay/1")
                    .header("x-user-id", "ann")
                    .send_for_status()
                    .await,
                expected
            );
        }
        (proxy, upstream)
    }
}

#[tokio::test]
async fn explain_says_why_each_policy_applies_or_not() {
    let office = CommandFixture::start();
    let output = office
        .run_successfully(&[
            "explain",
            "GET",
            "http://shop.example//api//p%61y/1?x",
            "-H",
            "x-user-id: acme",
        ])
        .await;
    for line in [
        "health           not for this path",
        "writes           not for this method",
        "api              matches: key api/acme/pay, cost 1",
        "9 per 10m, sliding_log           9 left",
        "api-new          matches: key api-new, cost 1 (shadow)",
        "Admitted.",
    ] {
        assert!(output.contains(line), "{line:?} is not in\n{output}");
    }
    assert!(
        !output.contains("daily"),
        "the override replaces all limits:\n{output}"
    );

    let output = office
        .run_successfully(&["explain", "GET", "/health"])
        .await;
    assert!(
        output.contains("matches: exempt") && output.contains("api              not reached"),
        "{output}"
    );
    let output = office
        .run_successfully(&["explain", "POST", "/api/x", "--ip", "2001:db8::1:2:3:4"])
        .await;
    assert!(
        output.contains("key writes/2001:db8::%2F64, cost 1"),
        "{output}"
    );
}

#[tokio::test]
async fn explain_and_keys_read_the_counters_without_changing_them() {
    let office = CommandFixture::start();
    let (proxy, _upstream) = office.exhaust_limit().await;
    let is_refusal = |line: &LogLine| line.field("status") == "429";
    let refusal = proxy
        .wait_for_log("a refusal", 0, TEST_TIMEOUT, is_refusal)
        .await;
    let hash_line = format!("{} in the log", refusal.field("key"));
    for _ in 0..3 {
        let output = office
            .run_successfully(&["explain", "GET", "/api/pay/2", "-H", "X-User-Id: ann"])
            .await;
        assert!(
            output.contains("3 per 10m, sliding_log           0 left, more in "),
            "{output}"
        );
        assert!(output.contains("97 left"), "{output}");
        assert!(output.contains("Rejected by api: 429."), "{output}");
        let shown = office
            .run_successfully(&["keys", "show", "api", "ann", "pay"])
            .await;
        assert!(
            shown.contains("0 left") && shown.contains("Rejected now."),
            "{shown}"
        );
        for text in [&output, &shown] {
            assert!(text.contains(&hash_line), "{hash_line}\n{text}");
        }
    }
    let listed = office.run_successfully(&["keys", "list"]).await;
    let lines: Vec<&str> = listed.lines().collect();
    assert_eq!(
        lines.len(),
        4,
        "expected a title, two limits and the shadow limit, without a probe:\n{listed}"
    );
    assert!(
        lines[1].contains("3  ") && lines[1].ends_with("api/ann/pay"),
        "{listed}"
    );
    let listed = office
        .run_successfully(&["keys", "list", "--policy", "api"])
        .await;
    assert_eq!(
        listed.lines().count(),
        3,
        "api-new is another policy:\n{listed}"
    );
}

/// Overrides lie beside the counters in Redis, and are no counters.
#[tokio::test]
async fn keys_are_listed_if_redis_holds_only_overrides() {
    let office = CommandFixture::start();
    let policy = "[[policy]]\nname = 'plan'\nkey = ['header:x-user-id']\ndynamic = true\n\
                  limit = { requests = 9, per = '1h' }";
    let config = format!("{}\n{policy}", office.config_text());
    fs::write(office.config_path(), config).unwrap();
    office
        .run_successfully(&["overrides", "set", "plan", "ann", "--block"])
        .await;
    let listed = office.run_successfully(&["keys", "list"]).await;
    assert!(!listed.contains("plan/ann"), "{listed}");
}

/// At the current rate, the bucket would have refilled long ago.
#[tokio::test]
async fn a_listed_bucket_refills_at_the_rate_it_was_charged_with() {
    let office = CommandFixture::start();
    let buckets = "[[policy]]\nname = 'b'\nmatch = { path = '/b' }\nlimits = [\
        { requests = 9, per = '1h', algorithm = 'token_bucket' }, \
        { requests = 9, per = '1h', algorithm = 'leaky_bucket', max_delay = '0s' }]";
    fs::write(
        office.config_path(),
        format!("{}\n{buckets}", office.config_text()),
    )
    .unwrap();
    let upstream = Upstream::echo().await;
    let proxy = Proxy::builder()
        .config_file(&office.config_path())
        .upstream(upstream.address)
        .start()
        .await;
    assert_eq!(proxy.get_statuses("/b", 2).await, [200, 429]);
    let listed = office
        .run_successfully(&["keys", "list", "--policy", "b"])
        .await;
    let counted: Vec<Vec<&str>> = listed
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().take(4).collect())
        .collect();
    assert_eq!(
        counted,
        [
            ["1", "leaky_bucket", "per", "1h"],
            ["1", "token_bucket", "per", "1h"]
        ],
        "{listed}"
    );
    assert!(
        listed.lines().skip(1).all(|line| line.contains(" 6 m ")),
        "expected a ninth of an hour:\n{listed}"
    );
}

#[tokio::test]
async fn a_reset_takes_effect_within_a_second() {
    let office = CommandFixture::start();
    let (proxy, _upstream) = office.exhaust_limit().await;
    let output = office
        .run_successfully(&["keys", "reset", "api", "ann", "pay"])
        .await;
    assert!(output.contains("reset 2 counters"), "{output}");
    // The deny cache of the proxy may hold the key for up to a second.
    let deadline = std::time::Instant::now() + std::time::Duration::from_millis(1500);
    while proxy
        .request("GET", "/api/pay/1")
        .header("x-user-id", "ann")
        .send_for_status()
        .await
        != 200
    {
        assert!(std::time::Instant::now() < deadline, "still refused");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn foreign_values_under_the_key_prefix_do_not_break_listing() {
    let office = CommandFixture::start();
    let _busy = office.exhaust_limit().await;
    let hash = "00".repeat(16);
    let _: u64 = office
        .redis
        .command(&format!(
            "LPUSH shop:v1:{{{hash}}}:sliding_log:1000:api/x a"
        ))
        .await;
    let _: String = office
        .redis
        .command(&format!("SET shop:v1:{{{hash}}}:tomorrow:1:api/y 1"))
        .await;
    let listed = office
        .run_successfully(&["keys", "list", "--policy", "api"])
        .await;
    assert_eq!(listed.lines().count(), 3, "{listed}");
}

#[tokio::test]
async fn invalid_arguments_get_helpful_errors() {
    let mut office = CommandFixture::start();
    for (words, help) in [
        (
            &["keys", "show", "api", "ann"][..],
            "the key of api has 2 values (header x-user-id, path segment), not 1",
        ),
        (
            &["keys", "show", "apy"],
            "unknown policy \"apy\"; expected one of api, api-new, health, writes",
        ),
        (&["keys", "reset", "health"], "policy health has no limits"),
        (&["keys", "show", "writes", "nobody"], "\"nobody\""),
        (
            &["explain", "GET", "/x", "-H", "nonsense"],
            "\"nonsense\" is not a header",
        ),
        (
            &["explain", "GET", "http://a/x", "-H", "Host: b"],
            "rejected before policies apply",
        ),
    ] {
        let ended = office.run_command(words).await;
        assert_eq!(ended.status.code(), Some(1), "{words:?}");
        assert!(ended.stderr.contains(help), "{words:?}: {}", ended.stderr);
    }
    office.redis.kill();
    let ended = office.run_command(&["keys", "list"]).await;
    assert_eq!(ended.status.code(), Some(1));
    assert!(
        ended
            .stderr
            .starts_with("error: Redis gave no answer (refused): "),
        "{}",
        ended.stderr
    );
    let output = office
        .run_successfully(&["explain", "GET", "/api/pay/1"])
        .await;
    assert!(
        output.contains("The state of the limits is unknown: the store gave no answer (refused)"),
        "{output}"
    );
}

#[tokio::test]
async fn keys_of_a_memory_store_are_read_by_the_admin_port() {
    let admin_proxy = AdminProxy::start(&POLICIES.replace("x-user-id", "x-user")).await;
    for expected in [200, 200, 200, 429] {
        let status = admin_proxy.status_for_user("ann", "/api/pay/1").await;
        assert_eq!(status, expected);
    }
    let keys = async |words: &[&str]| {
        let words: Vec<&str> = std::iter::once("keys")
            .chain(words.iter().copied())
            .collect();
        admin_proxy.run_command(&words).await
    };
    let shown = keys(&["show", "api", "ann", "pay"]).await;
    assert_eq!(shown.status.code(), Some(0), "{}", shown.stderr);
    let lines: Vec<&str> = shown.stdout.lines().collect();
    assert_eq!(lines[0], "api/ann/pay");
    assert!(lines[1].contains("3 per 10m, sliding_log"), "{lines:?}");
    assert!(lines[1].contains("0 left, more in "), "{lines:?}");
    assert_eq!(lines.last(), Some(&"Rejected now."));

    let listed = keys(&["list", "--policy", "api"]).await.stdout;
    let row: Vec<&str> = listed.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row, ["1", "api", "api/ann/pay"]);

    let reset = keys(&["reset", "api", "ann", "pay"]).await;
    assert_eq!(reset.stdout, "api/ann/pay: reset 2 counters\n");
    let shown = keys(&["show", "api", "ann", "pay"]).await;
    assert!(
        shown.stdout.ends_with("Admitted now.\n"),
        "{}",
        shown.stdout
    );

    let unknown = keys(&["show", "apy"]).await;
    assert_eq!(unknown.status.code(), Some(1));
    assert!(
        unknown.stderr.contains("unknown policy \"apy\""),
        "{}",
        unknown.stderr
    );
}
