//! The commands for operators: `explain` and `keys`.

use crate::support::prelude::*;

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
    config: ConfigFile,
    redis: RedisServer,
}

impl CommandFixture {
    fn start() -> Self {
        let redis = RedisServer::start();
        let text = format!(
            "[store]\nkind = 'redis'\n[store.redis]\nurl = 'redis://127.0.0.1:{}'\nkey_prefix = 'shop'\n\
             {POLICIES}",
            redis.port()
        );
        Self {
            config: ConfigFile::new(&text),
            redis,
        }
    }

    fn config_text(&self) -> String {
        fs::read_to_string(self.config.path()).unwrap()
    }

    /// Uses up ann's limit at the pay service.
    async fn exhaust_limit(&self) -> Proxy {
        let proxy = Proxy::with_echo(&self.config_text()).await;
        for expected in [200, 200, 200, 429] {
            let status = proxy
                .get_with("/api/pay/1", "x-user-id", "ann")
                .await
                .status;
            assert_eq!(status, expected);
        }
        proxy
    }
}

#[tokio::test]
async fn explain_says_why_each_policy_applies_or_not() {
    let office = CommandFixture::start();
    let output = office
        .config
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
        .config
        .run_successfully(&["explain", "GET", "/health"])
        .await;
    assert_contains(
        &output,
        &["matches: exempt", "api              not reached"],
    );
    let output = office
        .config
        .run_successfully(&["explain", "POST", "/api/x", "--ip", "2001:db8::1:2:3:4"])
        .await;
    assert_contains(&output, &["key writes/2001:db8::%2F64, cost 1"]);
}

#[tokio::test]
async fn explain_and_keys_read_the_counters_without_changing_them() {
    let office = CommandFixture::start();
    let proxy = office.exhaust_limit().await;
    let is_refusal = |line: &LogLine| line.field("status") == "429";
    let refusal = proxy
        .wait_for_log("a refusal", 0, TEST_TIMEOUT, is_refusal)
        .await;
    let hash_line = format!("{} in the log", refusal.field("key"));
    for _ in 0..3 {
        let output = office
            .config
            .run_successfully(&["explain", "GET", "/api/pay/2", "-H", "X-User-Id: ann"])
            .await;
        assert_contains(
            &output,
            &["3 per 10m, sliding_log           0 left, more in "],
        );
        assert!(output.contains("97 left"), "{output}");
        assert!(output.contains("Rejected by api: 429."), "{output}");
        let shown = office
            .config
            .run_successfully(&["keys", "show", "api", "ann", "pay"])
            .await;
        assert_contains(&shown, &["0 left", "Rejected now."]);
        for text in [&output, &shown] {
            assert!(text.contains(&hash_line), "{hash_line}\n{text}");
        }
    }
    let listed = office.config.run_successfully(&["keys", "list"]).await;
    let lines: Vec<&str> = listed.lines().collect();
    assert_eq!(
        lines.len(),
        4,
        "expected a title, two limits and the shadow limit, without a probe:\n{listed}"
    );
    assert!(lines[1].contains("3  "), "{listed}");
    assert!(lines[1].ends_with("api/ann/pay"), "{listed}");
    let listed = office
        .config
        .run_successfully(&["keys", "list", "--policy", "api"])
        .await;
    let count = listed.lines().count();
    assert_eq!(count, 3, "api-new is another policy:\n{listed}");
}

/// Overrides lie beside the counters in Redis, and are no counters.
#[tokio::test]
async fn keys_are_listed_if_redis_holds_only_overrides() {
    let office = CommandFixture::start();
    let policy = "[[policy]]\nname = 'plan'\nkey = ['header:x-user-id']\ndynamic = true\n\
                  limit = { requests = 9, per = '1h' }";
    let config = format!("{}\n{policy}", office.config_text());
    fs::write(office.config.path(), config).unwrap();
    office
        .config
        .run_successfully(&["overrides", "set", "plan", "ann", "--block"])
        .await;
    let listed = office.config.run_successfully(&["keys", "list"]).await;
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
        office.config.path(),
        format!("{}\n{buckets}", office.config_text()),
    )
    .unwrap();
    let upstream = Upstream::echo().await;
    let proxy = Proxy::setup("")
        .config_file(&office.config.path())
        .upstream(upstream.address)
        .start()
        .await;
    assert_eq!(proxy.get_statuses("/b", 2).await, [200, 429]);
    let listed = office
        .config
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
    let proxy = office.exhaust_limit().await;
    let output = office
        .config
        .run_successfully(&["keys", "reset", "api", "ann", "pay"])
        .await;
    assert!(output.contains("reset 2 limits (api, daily)"), "{output}");
    // The deny cache of the proxy may hold the key for up to a second.
    let within = Duration::from_millis(1500);
    wait_until_within("the request to be admitted", within, async || {
        proxy
            .get_with("/api/pay/1", "x-user-id", "ann")
            .await
            .status
            == 200
    })
    .await;
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
        .config
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
        office
            .config
            .run(words)
            .await
            .expect_code(1)
            .expect_stderr(help);
    }
    office.redis.kill();
    let ended = office.config.run(&["keys", "list"]).await;
    ended.expect_code(1);
    assert_starts(&ended.stderr, "error: Redis gave no answer (refused): ");
    let output = office
        .config
        .run_successfully(&["explain", "GET", "/api/pay/1"])
        .await;
    assert_contains(
        &output,
        &["The state of the limits is unknown: Redis gave no answer (refused)"],
    );
}

#[tokio::test]
async fn keys_of_a_memory_store_are_read_by_the_admin_port() {
    let admin_proxy = Proxy::with_token(&POLICIES.replace("x-user-id", "x-user")).await;
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
    shown.expect_code(0);
    let lines: Vec<&str> = shown.stdout.lines().collect();
    assert_eq!(lines[0], "api/ann/pay");
    assert!(lines[1].contains("3 per 10m, sliding_log"), "{lines:?}");
    assert!(lines[1].contains("0 left, more in "), "{lines:?}");
    assert_eq!(lines.last(), Some(&"Rejected now."));

    let listed = keys(&["list", "--policy", "api"]).await.stdout;
    let row: Vec<&str> = listed.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row, ["1", "api", "api/ann/pay"]);

    let reset = keys(&["reset", "api", "ann", "pay"]).await;
    assert_eq!(reset.stdout, "api/ann/pay: reset 2 limits (api, daily)\n");
    let shown = keys(&["show", "api", "ann", "pay"]).await;
    assert_ends(&shown.stdout, "Admitted now.\n");

    let unknown = keys(&["show", "apy"]).await;
    unknown
        .expect_code(1)
        .expect_stderr("unknown policy \"apy\"");
}
