//! API keys do not stand in the clear in the store, in the log or at the admin port, and operators
//! use the clear value.

use crate::support::prelude::*;
use crate::support::secret_volume::SecretVolume;

const SECRET: &str = "sk_live_hunter2";
const OTHER: &str = "sk_live_other";
const PARTNER: &str = "sk_live_partner";

const POLICIES: &str = r#"
[client]
trusted_proxies = ["127.0.0.1"]
trusted_headers = ["x-api-key"]

[self_service]

[[policy]]
name = "by-key"
match = { path = "/api/**" }
key = ["header:x-api-key"]
limit = { requests = 3, per = "1h" }

[[policy.override]]
key = ["sk_live_partner"]
limit = { requests = 5, per = "1h" }

[[policy]]
name = "daily"
match = { path = "/api/**" }
key = ["header:X-API-Key;hash", "method"]
limit = { requests = 100, per = "1d" }

[[policy]]
name = "by-token"
match = { path = "/query" }
key = ["query:access_token"]
limit = { requests = 2, per = "1h" }

[[policy]]
name = "plain"
match = { path = "/plain" }
key = ["header:x-session;plain"]
limit = { requests = 2, per = "1h" }
"#;

struct HashingFixture {
    redis: Option<RedisServer>,
    proxy: Proxy,
}

impl HashingFixture {
    async fn start(redis: Option<RedisServer>, settings: &str) -> Self {
        let upstream = Upstream::echo().await;
        let store = redis.as_ref().map(RedisServer::store_config);
        let text = format!(
            "log.access = 'all'\nupstream.url = 'http://{}'\n{}\n{}",
            upstream.address,
            store.unwrap_or_default(),
            POLICIES.replace("[client]", &format!("[client]\n{settings}"))
        );
        let proxy = Proxy::setup(&text).owned_upstream(upstream).start().await;
        Self { redis, proxy }
    }

    async fn statuses(&self, header: (&str, &str), path: &str, times: usize) -> Vec<u16> {
        let mut statuses = Vec::new();
        for _ in 0..times {
            let request = self.proxy.request("GET", path).header(header.0, header.1);
            statuses.push(request.send_for_status().await);
        }
        statuses
    }

    async fn run_successfully(&self, words: &[&str]) -> String {
        self.proxy.run_command(words).await.into_stdout()
    }

    async fn admin(&self, target: &str) -> String {
        let reply = self.proxy.admin_request("GET", target).send().await;
        assert_eq!(reply.status, 200, "{target}: {}", reply.text());
        reply.text()
    }
}

async fn assert_no_clear_value(redis: Option<RedisServer>, settings: &str) {
    let fixture = HashingFixture::start(redis, settings).await;
    // The override and any spelling of the header's name work with the clear value.
    let key = ("X-API-KEY", SECRET);
    assert_eq!(fixture.statuses(key, "/api/a", 2).await, [200; 2]);
    let key = ("x-api-key", SECRET);
    assert_eq!(fixture.statuses(key, "/api/a", 2).await, [200, 429]);
    let other = ("x-api-key", OTHER);
    let statuses = fixture.statuses(other, "/api/a", 4).await;
    assert_eq!(statuses, [200, 200, 200, 429]);
    let partner = ("x-api-key", PARTNER);
    let statuses = fixture.statuses(partner, "/api/a", 6).await;
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429]);
    let none = ("x-none", "");
    let target = format!("/query?access_token={SECRET}");
    assert_eq!(fixture.statuses(none, &target, 3).await, [200, 200, 429]);

    let shown = fixture
        .run_successfully(&["keys", "show", "by-key", SECRET])
        .await;
    assert!(shown.contains("0 left"), "{shown}");
    let hash = shown
        .split_whitespace()
        .find(|word| word.starts_with("by-key/#"))
        .unwrap_or_else(|| panic!("{shown}"))
        .to_owned();
    let refusal = |line: &LogLine| line.field("status") == "429";
    let refusal = fixture
        .proxy
        .wait_for_log("a refusal", 0, TEST_TIMEOUT, refusal)
        .await;
    let in_log = format!("{} in the log", refusal.field("key"));
    assert!(shown.contains(&in_log), "{in_log}\n{shown}");
    let listed = fixture.run_successfully(&["keys", "list"]).await;
    assert!(listed.contains(&hash), "{hash}\n{listed}");

    let header = format!("x-api-key: {SECRET}");
    let explained = fixture
        .run_successfully(&["explain", "GET", "/api/a", "-H", &header])
        .await;
    assert!(explained.contains(&hash), "{explained}");
    let log = fixture.proxy.dir().join("log");
    fs::write(&log, fixture.proxy.log_text()).unwrap();
    let why = fixture
        .run_successfully(&["why", "--key", SECRET, log.to_str().unwrap()])
        .await;
    assert!(why.contains("by-key"), "{why}");
    let checked = fixture.run_successfully(&["check"]).await;
    assert_contains(&checked, &["per header x-api-key (hashed)", "; for #"]);

    let config = fixture.admin("/config").await;
    assert!(config.contains("\"override\":[{\"key\":[\"#"), "{config}");
    let top = fixture.admin("/top").await;
    assert!(top.contains(&hash), "{hash}\n{top}");
    let mut texts = vec![
        shown,
        listed,
        explained,
        checked,
        fixture.proxy.log_text(),
        top,
        config,
        fixture.admin("/policies").await,
        fixture.admin("/overview").await,
    ];
    if let Some(redis) = &fixture.redis {
        let names: Vec<String> = redis.command("KEYS *").await;
        assert!(names.iter().any(|name| name.contains(&hash)), "{names:?}");
        texts.push(names.join("\n"));
    }
    for text in &texts {
        for value in [SECRET, OTHER, PARTNER] {
            assert!(!text.contains(value), "{value} in\n{text}");
        }
    }
    // The operator wants to see this value.
    let session = ("x-session", "visible");
    let statuses = fixture.statuses(session, "/plain", 3).await;
    assert_eq!(statuses, [200, 200, 429]);
    let listed = fixture.run_successfully(&["keys", "list"]).await;
    assert!(listed.contains("plain/visible"), "{listed}");
}

#[tokio::test]
async fn no_api_key_stands_in_the_clear_in_redis() {
    assert_no_clear_value(Some(RedisServer::start()), "").await;
}

#[tokio::test]
async fn no_api_key_stands_in_the_clear_with_the_memory_store() {
    assert_no_clear_value(None, "").await;
}

#[tokio::test]
async fn no_api_key_stands_in_the_clear_with_a_secret() {
    let volume = SecretVolume::mount(&[("secret", "0123456789abcdef0123456789abcdef\n")]);
    let settings = format!("hash_secret_file = {:?}", volume.path("secret"));
    assert_no_clear_value(Some(RedisServer::start()), &settings).await;
}

#[tokio::test]
async fn the_clear_value_resets_the_counters() {
    let fixture = HashingFixture::start(Some(RedisServer::start()), "").await;
    let key = ("x-api-key", SECRET);
    assert_eq!(fixture.statuses(key, "/api/a", 3).await, [200; 3]);
    let output = fixture
        .run_successfully(&["keys", "reset", "by-key", SECRET])
        .await;
    assert!(output.contains("reset 1 limit"), "{output}");
    assert_eq!(fixture.statuses(key, "/api/a", 3).await, [200; 3]);
}

#[tokio::test]
async fn self_service_stores_no_clear_value() {
    let fixture = HashingFixture::start(Some(RedisServer::start()), "").await;
    let key = ("x-api-key", SECRET);
    assert_eq!(fixture.statuses(key, "/api/a", 1).await, [200]);
    let request = fixture.proxy.request("GET", "/.well-known/ratelimit");
    let reply = request.header(key.0, key.1).send().await;
    let json = reply.json();
    let by_key = json["policies"].as_array().unwrap().iter();
    let by_key: Vec<_> = by_key.filter(|one| one["policy"] == "by-key").collect();
    assert_eq!(by_key[0]["limits"][0]["remaining"], 2, "{json}");
    let names: Vec<String> = fixture.redis.as_ref().unwrap().command("KEYS *").await;
    assert!(names.len() > 1, "{names:?}");
    assert!(!names.join("\n").contains(SECRET), "{names:?}");
}

/// Another secret gives other keys, so their counters start anew.
#[tokio::test]
async fn a_new_secret_takes_effect_without_a_restart() {
    let volume = SecretVolume::mount(&[("secret", "the first secret of 32 characters")]);
    let settings = format!("hash_secret_file = {:?}", volume.path("secret"));
    let fixture = HashingFixture::start(None, &settings).await;
    let key = ("x-api-key", SECRET);
    let statuses = fixture.statuses(key, "/api/a", 4).await;
    assert_eq!(statuses, [200, 200, 200, 429]);
    let plain = ("x-session", "visible");
    assert_eq!(fixture.statuses(plain, "/plain", 3).await, [200, 200, 429]);
    let mark = fixture.proxy.log_mark();
    volume.swap(&[("secret", "the second secret of 32 characters")]);
    let is_reload = |line: &LogLine| line.contains("configuration reloaded");
    fixture
        .proxy
        .wait_for_log("a reload", mark, TEST_TIMEOUT, is_reload)
        .await;
    let statuses = fixture.statuses(key, "/api/a", 4).await;
    assert_eq!(statuses, [200, 200, 200, 429]);
    assert_eq!(fixture.statuses(plain, "/plain", 1).await, [429]);
}

#[tokio::test]
async fn mistakes_about_hashing_are_reported() {
    let dir = TempDir::new().unwrap();
    let (secret, short) = (dir.path().join("secret"), dir.path().join("short"));
    fs::write(&secret, "0123456789abcdef").unwrap();
    fs::write(&short, "hunter2").unwrap();
    let policy = |key: &str| {
        format!(
            "upstream.url = 'http://a'\n[[policy]]\nname = 'p'\nkey = [{key:?}]\nlimit = {{ requests = 1, per = '1m' }}\n"
        )
    };
    for (text, code, found) in [
        (
            policy("header:x-api-key;hsah"),
            1,
            "policy[0].key[0]: found \"header:x-api-key;hsah\"; unknown option \";hsah\"; expected \"header:x-api-key;hash\""
                .to_owned(),
        ),
        (
            policy("client_ip;hash"),
            1,
            "client_ip is never hashed".to_owned(),
        ),
        (
            format!(
                "client.hash_secret_file = {short:?}\n{}",
                policy("header:x-api-key")
            ),
            1,
            "the secret has 7 bytes; expected at least 16".to_owned(),
        ),
        (
            format!(
                "client.hash_secret_file = {secret:?}\n{}",
                policy("client_ip")
            ),
            0,
            "warning: config.toml:1:27: client.hash_secret_file: without effect".to_owned(),
        ),
    ] {
        fs::write(dir.path().join("config.toml"), text).unwrap();
        let output = run_command(tidegate_command().current_dir(dir.path()).arg("check")).await;
        output.expect_code(code).expect_stderr(&found);
        assert!(!output.stderr.contains("hunter2"), "{}", output.stderr);
    }
}
