//! Overrides by pattern, with an action or a mode of their own, end to end.

use crate::support::prelude::*;

const POLICIES: &str = r#"
[[policy]]
name = "api"
match = { path = "/api" }
key = ["header:x-user-id"]
limit = { requests = 1, per = "1h" }
reject = { body = "no" }

[[policy.override]]
key = ["*"]
limit = { requests = 2, per = "1h" }

[[policy.override]]
key = ["acme-*"]
limit = { requests = 3, per = "1h" }

[[policy.override]]
key = ["acme-eu"]
limit = { requests = 4, per = "1h" }

[[policy.override]]
key = ["monitor-*"]
action = "allow"

[[policy.override]]
key = ["banned"]
action = "deny"

[[policy.override]]
key = ["tester"]
mode = "mark"

[[policy.override]]
key = ["nobody"]
mode = "off"

[[policy]]
name = "total"
match = { path = "/api" }
limit = { requests = 20, per = "1h" }

[[policy]]
name = "candidate"
mode = "shadow"
match = { path = "/candidate" }
key = ["header:x-api-key"]
limit = { requests = 1, per = "1h" }

[[policy.override]]
key = ["sk_live_*"]
mode = "enforce"
"#;

struct PatternFixture {
    config: ConfigFile,
    proxy: Proxy,
    upstream: Upstream,
    _redis: RedisServer,
}

impl PatternFixture {
    async fn start() -> Self {
        let redis = RedisServer::start();
        let upstream = Upstream::echo().await;
        let text = format!("{}\n{POLICIES}", redis.store_config());
        let proxy = Proxy::start_connected(&text, upstream.address).await;
        Self {
            config: ConfigFile::new(&text),
            proxy,
            upstream,
            _redis: redis,
        }
    }

    async fn get(&self, user: &str) -> RawResponse {
        let request = self.proxy.request("GET", "/api");
        request.header("x-user-id", user).send().await
    }

    async fn admitted(&self, user: &str, times: usize) -> usize {
        let mut admitted = 0;
        for _ in 0..times {
            admitted += usize::from(self.get(user).await.status == 200);
        }
        admitted
    }
}

#[tokio::test]
async fn the_most_specific_override_applies_and_other_policies_stay() {
    let fixture = PatternFixture::start().await;
    for (user, expected) in [("acme-eu", 4), ("acme-us", 3), ("ann", 2)] {
        let answer = fixture.admitted(user, expected + 1).await;
        assert_eq!(answer, expected, "{user}");
    }
    assert_eq!(fixture.get("banned").await.status, 403);
    assert_eq!(fixture.get("nobody").await.header("x-tidegate-over"), None);
    assert_eq!(fixture.admitted("tester", 2).await, 2);
    let over = fixture.upstream.last_request();
    assert_eq!(over.single_header("x-tidegate-over"), "api", "a mark");
    // Nine, one and two requests are counted by the other policy, and an exempt key is too.
    assert_eq!(fixture.admitted("monitor-1", 9).await, 8);
    let refused = fixture.get("monitor-1").await;
    assert_eq!(refused.status, 429);
    assert!(refused.text().contains("total"), "{}", refused.text());
    let exempt = r#"tidegate_requests_total{policy="api",decision="exempt"}"#;
    assert_eq!(fixture.proxy.read_metric(exempt).await, 10.0);
}

#[tokio::test]
async fn one_key_is_enforced_while_its_policy_is_a_shadow() {
    let fixture = PatternFixture::start().await;
    let send = async |key: &str| {
        let request = fixture.proxy.request("GET", "/candidate");
        request.header("x-api-key", key).send().await.status
    };
    assert_eq!([send("other").await, send("other").await], [200, 200]);
    assert_eq!(
        [send("sk_live_1").await, send("sk_live_1").await],
        [200, 429]
    );
    assert_eq!(send("sk_live_2").await, 200, "each key has its own counter");
}

#[tokio::test]
async fn commands_explain_the_override_of_a_key() {
    let fixture = PatternFixture::start().await;
    let explain = async |user: &str| {
        let header = format!("x-user-id: {user}");
        fixture
            .config
            .run_successfully(&["explain", "/api", "-H", &header])
            .await
    };
    for (user, expected) in [
        ("monitor-7", "exempt from this policy by an override"),
        ("banned", "denied by an override"),
        ("tester", "(mark)"),
        ("acme-us", "3 per 1h"),
    ] {
        let text = explain(user).await;
        assert!(text.contains(expected), "{user}: {text}");
    }
    let denied = explain("banned").await;
    assert!(denied.contains("Denied by api: 403."), "{denied}");
    let shown = fixture
        .config
        .run_successfully(&["keys", "show", "api", "monitor-7"])
        .await;
    assert!(shown.contains("exempt by an override"), "{shown}");

    let log = fixture.config.beside("access.log");
    let line = |user: &str| {
        format!(
            "{{\"timestamp\":\"2026-11-20T09:00:00Z\",\"method\":\"GET\",\"path\":\"/api\",\"client_ip\":\"10.0.0.1\",\"status\":200,\"user\":\"{user}\"}}\n"
        )
    };
    let lines = [
        "acme-us",
        "acme-us",
        "acme-us",
        "acme-us",
        "monitor-1",
        "monitor-1",
        "monitor-1",
    ];
    fs::write(&log, lines.map(line).concat()).unwrap();
    let log = log.display().to_string();
    let words = ["replay", &log, "--header-from", "x-user-id=user", "--json"];
    let report: Value =
        serde_json::from_str(&fixture.config.run_successfully(&words).await).unwrap();
    let set = &report["sets"][0];
    assert_eq!(set["limited"], 1, "{report:#}");
    assert_eq!(set["policies"][0]["exempt"], 3, "{report:#}");
}
