//! JWT claims as keys and match conditions, end to end.

use crate::support::jwt_issuer::write_jwks;
use crate::support::prelude::*;
use jsonwebtoken::Algorithm;

/// One request per user. All requests without a user share one.
const PER_USER_POLICY: &str = r#"
[[policy]]
name = "per-user"
key = ["jwt:sub"]
limit = { requests = 1, per = "1h" }
"#;

fn config_with_keys_file(file: &Path) -> String {
    format!("[client.jwt]\nkeys_file = {file:?}\n{PER_USER_POLICY}")
}

async fn get_status(proxy: &Proxy, bearer: &str) -> u16 {
    proxy.get_with("/", "Authorization", bearer).await.status
}

#[tokio::test]
async fn every_verified_user_has_a_quota_and_all_others_share_one() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("jwks.json");
    let issuers = [Algorithm::RS256, Algorithm::ES256, Algorithm::EdDSA]
        .map(|alg| TokenIssuer::new(&format!("{alg:?}"), alg));
    write_jwks(&file, &issuers.each_ref());
    let proxy = Proxy::with_echo(&config_with_keys_file(&file)).await;
    for (issuer, user) in issuers.iter().zip(["ann", "bob", "cid"]) {
        let status = get_status(&proxy, &issuer.bearer_for_subject(user)).await;
        assert_eq!(status, 200, "{user}");
    }
    for user in ["ann", "bob", "cid"] {
        let status = get_status(&proxy, &issuers[1].bearer_for_subject(user)).await;
        assert_eq!(status, 429, "{user}, with another token");
    }
    proxy.expect_status("/", 200, "the anonymous quota").await;
    let (ann, stranger) = (
        issuers[0].bearer_for_subject("dan"),
        TokenIssuer::new("RS256", Algorithm::RS256),
    );
    let expired = issuers[0].bearer(&json!({ "sub": "eve", "exp": unix_s() - 60 }));
    for (what, bearer) in [
        ("no token", String::new()),
        ("a stranger's", stranger.bearer_for_subject("dan")),
        (
            "HMAC",
            TokenIssuer::with_secret("RS256").bearer_for_subject("dan"),
        ),
        ("expired", expired),
        ("cut", ann[..ann.len() - 4].to_owned()),
        ("nonsense", "Bearer x".to_owned()),
        ("too large", format!("Bearer {}", "x".repeat(20 << 10))),
    ] {
        assert_eq!(
            get_status(&proxy, &bearer).await,
            429,
            "{what}: requests without a valid token share one quota"
        );
    }
    let status = get_status(&proxy, &ann).await;
    assert_eq!(status, 200, "the user's quota is unused");
    assert_eq!(
        proxy.echo().last_request().single_header("authorization"),
        ann,
        "the token is forwarded unchanged"
    );
    let request = proxy.request("GET", "/").header("Authorization", &ann);
    let twice = request.header("authorization", "Bearer x");
    assert_eq!(twice.send_for_status().await, 400);
    assert_eq!(proxy.echo().requests().len(), 5);
    let page = proxy.admin_request("GET", "/metrics");
    let page = page.send().await.text();
    assert_contains(&page, &["\ntidegate_tokens_refused_total 6\n"]);
}

/// Two issuers may give two users the same `sub`.
#[tokio::test]
async fn users_of_several_issuers_share_no_quota_and_no_override() {
    let dir = TempDir::new().unwrap();
    let issuers = ["https://main", "https://partner"].map(|name| {
        let secret = format!("{name}-0123456789abcdef0123456789abcdef");
        let file = dir.path().join(name.trim_start_matches("https://"));
        fs::write(&file, &secret).unwrap();
        let table = format!("{{ issuer = \"{name}\", secret_file = {file:?} }}");
        (name, TokenIssuer::with_secret(&secret), table)
    });
    let tables = [issuers[0].2.as_str(), &issuers[1].2].join(", ");
    let policies = r#"
[self_service]
path = "/limits"
[[policy]]
name = "user"
match = { path = "/user" }
key = ["jwt:sub"]
limit = { requests = 2, per = "1h" }
override = [{ key = ["https://main vip"], limit = { requests = 3, per = "1h" } }]
[[policy]]
name = "hashed"
match = { path = "/hashed" }
key = ["jwt:sub;hash | client_ip"]
limit = { requests = 1, per = "1h" }
[[policy]]
name = "listed"
match = { path = "/listed" }
key = ["jwt:iss", "jwt:sub"]
limit = { requests = 1, per = "1h" }
override = [{ key = ["https://partner", "vip"], limit = { requests = 2, per = "1h" } }]
"#;
    let config = format!("[client.jwt]\nissuers = [{tables}]\n{policies}");
    let proxy = Proxy::with_echo(&config).await;
    let bearer = |at: usize, sub: &str| {
        let (name, issuer, _) = &issuers[at];
        issuer.bearer(&json!({ "iss": name, "sub": sub, "exp": unix_s() + 3600 }))
    };
    for (path, issuer, user, limit) in [
        ("/user", 0, "alice", 2),
        ("/user", 1, "alice", 2),
        ("/user", 0, "vip", 3),
        ("/user", 1, "vip", 2),
        ("/hashed", 0, "alice", 1),
        ("/hashed", 1, "alice", 1),
        ("/listed", 0, "vip", 1),
        ("/listed", 1, "vip", 2),
    ] {
        for count in 1..=limit + 1 {
            let request = proxy.request("GET", path);
            let request = request.header("authorization", &bearer(issuer, user));
            let expected = if count > limit { 429 } else { 200 };
            let status = request.send_for_status().await;
            assert_eq!(status, expected, "{path} {issuer} {user} {count}");
        }
    }
    let limits = async |issuer: usize, user: &str| {
        let request = proxy.request("GET", "/limits");
        let request = request.header("authorization", &bearer(issuer, user));
        request.send().await.text()
    };
    let (used, unused) = (limits(1, "alice").await, limits(1, "bob").await);
    assert!(used.contains("\"remaining\":0"), "{used}");
    assert_eq!(limits(0, "bob").await, unused, "nobody has used these");
    assert!(!unused.contains("\"remaining\":0"), "{unused}");
}

#[tokio::test]
async fn an_override_names_the_issuer_where_there_are_several() {
    let (_dir, file) = write_temp_file("secret", "0123456789abcdef0123456789abcdef");
    let issuer = |name: &str| format!("{{ issuer = \"{name}\", secret_file = {file:?} }}");
    let check = async |issuers: &str, value: &str| {
        let text = format!(
            "upstream.url = \"http://a\"\n[client.jwt]\nissuers = [{issuers}]\n{PER_USER_POLICY}override = [{{ key = [\"{value}\"], action = \"deny\" }}]\n"
        );
        ConfigFile::new(&text).run(&["check"]).await
    };
    let both = format!("{}, {}", issuer("https://a"), issuer("https://b"));
    for (issuers, value, is_valid) in [
        (&both, "alice", false),
        (&both, "alice*", false),
        (&both, "https://c alice", false),
        (&both, "https://aa alice", false),
        (&both, "https://a alice", true),
        (&both, "https://b *", true),
        (&both, "https://*", true),
        (&both, "*", true),
        (&issuer("https://a"), "alice", true),
    ] {
        let output = check(issuers, value).await;
        assert_eq!(
            output.status.success(),
            is_valid,
            "{value}: {}",
            output.stderr
        );
        assert_eq!(output.stderr.contains("requires the issuer"), !is_valid);
    }
}

#[tokio::test]
async fn policies_match_token_claims() {
    let dir = TempDir::new().unwrap();
    let secret = "a secret that is long enough to be one";
    let file = dir.path().join("secret");
    fs::write(&file, format!("{secret}\n")).unwrap();
    let config = format!(
        r#"
[client.jwt]
secret_file = {file:?}
header = "x-identity"
[[policy]]
name = "staff"
match = {{ jwt = {{ "/realm_access/roles" = "staff", aud = {{ regex = "^api" }} }} }}
action = "allow"
[[policy]]
name = "suspended"
match = {{ jwt = {{ suspended = true }} }}
action = "deny"
[[policy]]
name = "anonymous"
match = {{ jwt = {{ sub = {{ present = false }} }} }}
limit = {{ requests = 1, per = "1h" }}
[[policy]]
name = "tenant"
match = {{ not = {{ jwt = {{ plan = "gold" }} }} }}
key = ["jwt:/org/id"]
missing_key = "reject"
limit = {{ requests = 1, per = "1h" }}
"#
    );
    let proxy = Proxy::with_echo(&config).await;
    let issuer = TokenIssuer::with_secret(secret);
    let status = async |claims: Value| {
        let token = issuer.bearer(&claims);
        let ask = proxy
            .request("GET", "/")
            .header("X-Identity", token.strip_prefix("Bearer ").unwrap());
        ask.send_for_status().await
    };
    let staff = json!({ "realm_access": { "roles": ["user", "staff"] }, "aud": ["x", "api-1"], "suspended": true });
    assert_eq!(
        (status(staff.clone()).await, status(staff).await),
        (200, 200)
    );
    assert_eq!(
        status(json!({ "realm_access": { "roles": ["staff"] }, "aud": "y", "suspended": true }))
            .await,
        403
    );
    assert_eq!(status(json!({ "sub": "a", "org": { "id": 7 } })).await, 200);
    assert_eq!(
        status(json!({ "sub": "b", "org": { "id": 7 } })).await,
        429,
        "one organization"
    );
    assert_eq!(
        status(json!({ "sub": "b", "org": { "id": 8 }, "suspended": false })).await,
        200
    );
    assert_eq!(status(json!({ "sub": "a", "plan": "gold" })).await, 200);
    assert_eq!(
        status(json!({ "sub": "a", "org": { "id": { "x": 1 } } })).await,
        400,
        "no key"
    );
    assert_eq!(
        status(json!({ "plan": "gold" })).await,
        200,
        "the single anonymous request"
    );
    assert_eq!(status(json!({ "plan": "gold" })).await, 429);
}

#[tokio::test]
async fn keys_are_reloaded_and_invalid_key_files_change_nothing() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("jwks.json");
    let (old, new) = (
        TokenIssuer::new("old", Algorithm::ES256),
        TokenIssuer::new("new", Algorithm::ES256),
    );
    write_jwks(&file, &[&old]);
    let proxy = Proxy::with_echo(&format!(
        "[defaults]\nmissing_key = 'reject'\n{}",
        config_with_keys_file(&file)
    ))
    .await;
    let status = get_status(&proxy, &old.bearer_for_subject("ann")).await;
    assert_eq!(status, 200);
    let status = get_status(&proxy, &new.bearer_for_subject("bob")).await;
    assert_eq!(status, 400, "not yet");
    for bad in ["{", r#"{"keys":[]}"#, ""] {
        let mark = proxy.log_mark();
        fs::write(&file, bad).unwrap();
        let is_error =
            |line: &LogLine| line.is_level("ERROR") && line.contains("client.jwt.keys_file");
        proxy
            .wait_for_log("the error about the keys", mark, TEST_TIMEOUT, is_error)
            .await;
        let status = get_status(&proxy, &old.bearer_for_subject("ann")).await;
        assert_eq!(status, 429, "the old keys stay active");
    }
    write_jwks(&file, &[&new]);
    let within = Duration::from_millis(2_500);
    wait_until_within("the new key", within, async || {
        get_status(&proxy, &new.bearer_for_subject("bob")).await != 400
    })
    .await;
    assert_eq!(
        get_status(&proxy, &old.bearer_for_subject("ann")).await,
        400,
        "a token of a removed key is no longer accepted"
    );
    let status = get_status(&proxy, &new.bearer_for_subject("ann")).await;
    assert_eq!(status, 429, "her counter is unchanged");
}

#[tokio::test]
async fn unverified_tokens_cause_a_warning_and_secrets_are_never_logged() {
    let (_dir, file) = write_temp_file("secret", "hunter2");
    let upstream = Upstream::echo().await;
    let settings = format!("[client.jwt]\nverify = false\n{PER_USER_POLICY}");
    let proxy = Proxy::start(&settings, upstream.address).await;
    let is_warning = |line: &LogLine| line.is_level("WARN") && line.contains("unverified JWT");
    proxy
        .wait_for_log("a warning", 0, TEST_TIMEOUT, is_warning)
        .await;
    let (one, other) = (
        TokenIssuer::with_secret("a").bearer_for_subject("ann"),
        TokenIssuer::with_secret("b").bearer_for_subject("ann"),
    );
    assert_eq!(
        (
            get_status(&proxy, &one).await,
            get_status(&proxy, &other).await
        ),
        (200, 429)
    );

    let config =
        format!("[log]\nlevel = 'trace'\n[client.jwt]\nsecret_file = {file:?}\n{PER_USER_POLICY}");
    let proxy = Proxy::start(&config, upstream.address).await;
    let token = TokenIssuer::with_secret("hunter2").bearer_for_subject("ann");
    assert_eq!(get_status(&proxy, &token).await, 200);
    assert_eq!(get_status(&proxy, &format!("{token}x")).await, 200);
    let shown = proxy.admin_request("GET", "/config");
    let shown = shown.send().await.text();
    assert_contains(&shown, &["secret_file"]);
    assert_lacks(&shown, &["hunter2"]);
    let log = proxy.log_text();
    let signature = token.rsplit('.').next().unwrap();
    assert_contains(&log, &["7 bytes", "the signature matches no trusted key"]);
    assert_lacks(&log, &["hunter2", signature]);
}

/// Apps that split the header leniently read a token there.
#[tokio::test]
async fn a_token_among_several_credentials_is_a_400() {
    let issuer = TokenIssuer::new("k1", Algorithm::EdDSA);
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("jwks.json");
    write_jwks(&file, &[&issuer]);
    let config = config_with_keys_file(&file) + "missing_key = 'skip'\n";
    let proxy = Proxy::with_echo(&config).await;
    let ann = issuer.bearer_for_subject("ann");
    let token = ann.trim_start_matches("Bearer ");
    for (credentials, status) in [
        (ann.clone(), 200),
        (ann.clone(), 429),
        (format!("x {token}"), 429),
        (token.to_owned(), 429),
        (format!("Basic x, {ann}"), 400),
        (format!("Bearer x {token}"), 400),
        ("Basic YTpi".to_owned(), 200),
    ] {
        let request = proxy.request("GET", "/");
        let request = request.header("Authorization", &credentials);
        assert_eq!(request.send_for_status().await, status, "{credentials}");
    }
}
