//! Key parts with alternatives, end to end: the first present one counts, and no value of one
//! source shares a counter with a value of another.

use crate::support::prelude::*;

/// The key of the tokens.
const SECRET: &str = "0123456789abcdef0123456789abcdef";

const POLICIES: &str = r#"
[client]
trusted_proxies = ["127.0.0.1"]
trusted_headers = ["x-api-key"]
jwt.secret_file = "FILE"

[[policy]]
name = "api"
dynamic = true
match = { path = "/api" }
key = ["header:x-api-key | jwt:sub | client_ip"]
limit = { requests = 1, per = "1h" }

[[policy.override]]
key = ["header:x-api-key=partner"]
limit = { requests = 2, per = "1h" }

[[policy]]
name = "strict"
match = { path = "/strict" }
key = ["header:x-tenant|query:tenant"]
limit = { requests = 1, per = "1h" }
missing_key = "reject"
"#;

struct AlternativesFixture {
    config: ConfigFile,
    redis: RedisServer,
    upstream: Upstream,
    issuer: TokenIssuer,
}

/// Where a request names its client.
#[derive(Clone, Copy, Default)]
struct Identity<'i> {
    key: Option<&'i str>,
    user: Option<&'i str>,
    address: &'i str,
}

impl AlternativesFixture {
    async fn start() -> Self {
        Self {
            config: ConfigFile::new(""),
            redis: RedisServer::start(),
            upstream: Upstream::echo().await,
            issuer: TokenIssuer::with_secret(SECRET),
        }
    }

    async fn start_proxy(&self, policies: &str) -> Proxy {
        let secret = self.config.beside("secret");
        fs::write(&secret, SECRET).unwrap();
        let policies = policies.replace("FILE", &secret.display().to_string());
        let text = format!("{}\n{policies}", self.redis.store_config());
        self.config.write(&text);
        Proxy::start_connected(&text, self.upstream.address).await
    }

    async fn send(&self, proxy: &Proxy, from: Identity<'_>) -> RawResponse {
        let mut request = proxy.request("GET", "/api");
        if let Some(key) = from.key {
            request = request.header("x-api-key", key);
        }
        if let Some(user) = from.user {
            let claims = json!({ "sub": user, "exp": unix_s() + 600 });
            request = request.header("authorization", &self.issuer.bearer(&claims));
        }
        request.header("x-forwarded-for", from.address).send().await
    }
}

#[tokio::test]
async fn the_first_present_alternative_counts_and_none_shares_a_counter() {
    let fixture = AlternativesFixture::start().await;
    let proxy = fixture.start_proxy(POLICIES).await;
    // The same text from each source.
    let text = "192.0.2.1";
    let by_key = Identity {
        key: Some(text),
        user: Some(text),
        address: text,
    };
    let by_user = Identity {
        key: None,
        ..by_key
    };
    let by_address = Identity {
        user: None,
        ..by_user
    };
    let empty = Identity {
        key: Some(""),
        ..by_address
    };
    for (source, from) in [("key", by_key), ("user", by_user), ("address", by_address)] {
        assert_eq!(fixture.send(&proxy, from).await.status, 200, "{source}");
        assert_eq!(fixture.send(&proxy, from).await.status, 429, "{source}");
    }
    let answered = fixture.send(&proxy, empty).await.status;
    assert_eq!(answered, 429, "empty is absent");
    let partner = Identity {
        key: Some("partner"),
        ..by_address
    };
    for status in [200, 200, 429] {
        assert_eq!(fixture.send(&proxy, partner).await.status, status);
    }
}

#[tokio::test]
async fn an_ambiguous_alternative_is_not_skipped_and_missing_key_needs_all_absent() {
    let fixture = AlternativesFixture::start().await;
    let proxy = fixture.start_proxy(POLICIES).await;
    let send = async |target: &str, headers: &[(&str, &str)]| {
        let mut request = proxy.request("GET", target);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        request.send().await.status
    };
    let twice = [("x-tenant", "a"), ("x-tenant", "b")];
    assert_eq!(send("/strict?tenant=c", &twice).await, 400);
    assert_eq!(send("/strict", &twice).await, 400);
    assert_eq!(send("/strict", &[]).await, 400, "missing_key = reject");
    assert_eq!(send("/strict?tenant=c", &[]).await, 200);
    assert_eq!(send("/strict?tenant=c&tenant=d", &[]).await, 400);
    let with_header = [("x-tenant", "c")];
    assert_eq!(send("/strict?tenant=c&tenant=d", &with_header).await, 200);
    assert_eq!(send("/strict?tenant=c", &with_header).await, 429);
}

#[tokio::test]
async fn operators_name_the_source_of_a_value() {
    let fixture = AlternativesFixture::start().await;
    let proxy = fixture.start_proxy(POLICIES).await;
    let by_user = Identity {
        user: Some("ann"),
        address: "192.0.2.7",
        ..Identity::default()
    };
    assert_eq!(fixture.send(&proxy, by_user).await.status, 200);
    for words in [
        ["keys", "show", "api", "jwt:sub=ann"],
        ["overrides", "set", "api", "jwt:sub=ann"],
    ] {
        let more: &[&str] = if words[0] == "overrides" {
            &["--requests", "3"]
        } else {
            &[]
        };
        let shown = fixture
            .config
            .run_successfully(&[&words, more].concat())
            .await;
        assert!(
            words[0] == "overrides" || shown.contains("jwt:sub=ann"),
            "{shown}"
        );
    }
    let listed = fixture
        .config
        .run_successfully(&["overrides", "list"])
        .await;
    assert!(listed.contains("jwt:sub=ann"), "{listed}");
    let exported = fixture
        .config
        .run_successfully(&["overrides", "export"])
        .await;
    assert!(exported.contains("\"jwt:sub=ann\""), "{exported}");
    for status in [200, 200, 429] {
        assert_eq!(fixture.send(&proxy, by_user).await.status, status);
    }
    fixture
        .config
        .run_successfully(&["keys", "reset", "api", "jwt:sub=ann"])
        .await;

    // A hashed value is shown by its digest, which the commands take too.
    let secret = "header:x-api-key=sk_live_1";
    let words = ["overrides", "set", "api", secret, "--block"];
    fixture.config.run_successfully(&words).await;
    let exported = fixture
        .config
        .run_successfully(&["overrides", "export"])
        .await;
    assert!(!exported.contains("sk_live_1"), "{exported}");
    let at = exported.find("header:x-api-key=#").unwrap();
    let digest = exported[at..].split('"').next().unwrap().to_owned();
    let by_key = Identity {
        key: Some("sk_live_1"),
        address: "192.0.2.8",
        ..Identity::default()
    };
    assert_eq!(fixture.send(&proxy, by_key).await.status, 429);
    fixture
        .config
        .run_successfully(&["overrides", "remove", "api", &digest])
        .await;
    let listed = fixture
        .config
        .run_successfully(&["overrides", "list"])
        .await;
    assert!(!listed.contains("x-api-key"), "{listed}");

    let unnamed = fixture.config.run(&["keys", "show", "api", "ann"]).await;
    unnamed.expect_stderr("expected header:x-api-key=VALUE or jwt:sub=VALUE or client_ip=VALUE");
    let explained = fixture
        .config
        .run_successfully(&["explain", "http://localhost/api", "--ip", "192.0.2.9"])
        .await;
    assert!(explained.contains("client_ip=192.0.2.9"), "{explained}");
}

#[tokio::test]
async fn a_reload_to_another_source_starts_other_counters() {
    let fixture = AlternativesFixture::start().await;
    let policies = |key: &str| {
        format!(
            "client.trusted_proxies = ['127.0.0.1']\n[[policy]]\nname = 'p'\nkey = ['{key}']\nlimit = {{ requests = 1, per = '1h' }}\n"
        )
    };
    let proxy = fixture.start_proxy(&policies("client_ip")).await;
    let send = async || {
        let request = proxy.request("GET", "/");
        let request = request.header("x-forwarded-for", "192.0.2.1");
        let request = request
            .header("x-a", "192.0.2.1")
            .header("x-b", "192.0.2.1");
        request.send().await.status
    };
    let reload = async |key: &str| {
        let mark = proxy.log_mark();
        proxy.write_config(&format!(
            "{}\n{}",
            fixture.redis.store_config(),
            policies(key)
        ));
        proxy.send_sighup();
        let is_reloaded = |line: &LogLine| line.message_starts_with("configuration reloaded");
        proxy
            .wait_for_log("the reload", mark, TEST_TIMEOUT, is_reloaded)
            .await;
    };
    assert_eq!([send().await, send().await], [200, 429]);
    for key in ["header:x-a", "header:x-b", "header:x-a | client_ip"] {
        reload(key).await;
        assert_eq!([send().await, send().await], [200, 429], "{key}");
    }
    reload("client_ip").await;
    assert_eq!(send().await, 429, "the counter of the address is kept");
}
