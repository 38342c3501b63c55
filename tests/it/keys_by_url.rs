//! Token keys from a URL: an issuer that rotates, misbehaves and disappears.

use crate::support::jwt_issuer::jwks_text;
use crate::support::prelude::*;
use jsonwebtoken::Algorithm;

/// Requests without a verified user get 400.
const PER_USER_POLICY: &str = "[[policy]]\nname = \"per-user\"\nkey = [\"jwt:sub\"]\nmissing_key = \"reject\"\nlimit = { requests = 1000000, per = \"1h\", algorithm = \"token_bucket\" }\n";

/// How an issuer answers.
#[derive(Clone, Debug)]
enum KeyResponse {
    /// The keys, and a value of `Cache-Control`.
    Keys(String, Option<&'static str>),
    Status(u16),
    Body(String),
    /// A part of the keys, then an error.
    Truncated(String),
    Hanging,
}

/// A server of keys.
struct KeyServer {
    upstream: Upstream,
    response: Arc<Mutex<KeyResponse>>,
}

impl KeyServer {
    async fn start(response: KeyResponse) -> Self {
        let response = Arc::new(Mutex::new(response));
        let present = Arc::clone(&response);
        let upstream = Upstream::with_handler(move |_request| {
            let response = present.lock().unwrap().clone();
            async move { build_response(response).await }
        })
        .await;
        Self { upstream, response }
    }

    /// Serves the keys of issuers.
    async fn with_keys(issuers: &[&TokenIssuer]) -> Self {
        Self::start(KeyResponse::Keys(jwks_text(issuers), None)).await
    }

    fn set(&self, response: KeyResponse) {
        *self.response.lock().unwrap() = response;
    }

    fn url(&self) -> String {
        format!("http://{}/keys", self.upstream.address)
    }

    fn fetch_count(&self) -> usize {
        self.upstream.requests().len()
    }
}

async fn build_response(response: KeyResponse) -> UpstreamResponse {
    match response {
        KeyResponse::Keys(text, cache_control) => {
            let mut response = Response::builder();
            if let Some(value) = cache_control {
                response = response.header("Cache-Control", value);
            }
            response.body(full_body(text)).unwrap()
        }
        KeyResponse::Status(status) => Response::builder()
            .status(status)
            .header("Location", "/elsewhere")
            .body(full_body(""))
            .unwrap(),
        KeyResponse::Body(text) => Response::new(full_body(text)),
        KeyResponse::Truncated(text) => {
            let (feeder, body) = channel_body();
            tokio::spawn(async move {
                feeder.send(text).await;
                feeder.send_error().await;
            });
            Response::new(body)
        }
        KeyResponse::Hanging => std::future::pending().await,
    }
}

async fn start_proxy(jwt: &str) -> Proxy {
    let config = format!("[client.jwt]\n{jwt}\n{PER_USER_POLICY}");
    Proxy::with_echo(&config).await
}

async fn get_status(proxy: &Proxy, bearer: &str) -> u16 {
    proxy.get_with("/", "Authorization", bearer).await.status
}

async fn wait_for_status(proxy: &Proxy, bearer: &str, wanted: u16, within: Duration) {
    wait_until_within(format!("{wanted}"), within, async || {
        get_status(proxy, bearer).await == wanted
    })
    .await;
}

fn new_issuer(kid: &str) -> TokenIssuer {
    TokenIssuer::new(kid, Algorithm::EdDSA)
}

#[tokio::test]
async fn a_thousand_bogus_key_ids_cause_one_fetch() {
    let issuer = new_issuer("k1");
    let server = KeyServer::with_keys(&[&issuer]).await;
    let proxy = start_proxy(&format!("keys_url = {:?}", server.url())).await;
    let status = get_status(&proxy, &issuer.bearer_for_subject("ann")).await;
    assert_eq!(status, 200);
    assert_eq!(server.fetch_count(), 1);
    for number in 0..1_000 {
        let bogus = new_issuer(&format!("bogus-{number}")).bearer_for_subject("eve");
        assert_eq!(get_status(&proxy, &bogus).await, 400);
    }
    wait_until("the fetch", async || server.fetch_count() == 2).await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(server.fetch_count(), 2);
    let status = get_status(&proxy, &issuer.bearer_for_subject("ann")).await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn a_rotated_key_is_used_with_its_first_token_and_the_removed_one_is_not() {
    let (old, new) = (new_issuer("k1"), new_issuer("k2"));
    let server = KeyServer::with_keys(&[&old]).await;
    let proxy = start_proxy(&format!(
        "keys_url = {:?}\nkeys_refresh = '1h'",
        server.url()
    ))
    .await;
    let old_token = old.bearer_for_subject("ann");
    assert_eq!(get_status(&proxy, &old_token).await, 200);
    server.set(KeyResponse::Keys(jwks_text(&[&new]), None));
    wait_for_status(&proxy, &new.bearer_for_subject("ann"), 200, TEST_TIMEOUT).await;
    assert_eq!(
        get_status(&proxy, &old_token).await,
        400,
        "a verified token is verified again after its key was removed"
    );
}

#[tokio::test]
async fn cache_control_sets_the_interval_within_bounds() {
    let issuer = new_issuer("k1");
    let text = jwks_text(&[&issuer]);
    let short = KeyServer::start(KeyResponse::Keys(text.clone(), Some("max-age=1"))).await;
    let long = KeyServer::start(KeyResponse::Keys(text, Some("max-age=600"))).await;
    let settings =
        |server: &KeyServer| format!("keys_url = {:?}\nkeys_refresh = '1s'", server.url());
    let _short_proxy = start_proxy(&settings(&short)).await;
    let _long_proxy = start_proxy(&settings(&long)).await;
    sleep(Duration::from_secs(3)).await;
    assert_eq!(short.fetch_count(), 1, "at most one fetch in 5 s");
    wait_until("the second fetch", async || short.fetch_count() == 2).await;
    assert_eq!(long.fetch_count(), 1);
}

#[tokio::test]
async fn keys_stay_in_use_while_the_issuer_misbehaves() {
    let faults = [
        (KeyResponse::Status(500), "status 500"),
        (KeyResponse::Status(302), "redirections are not followed"),
        (KeyResponse::Body("<html>".to_owned()), "invalid JSON"),
        (
            KeyResponse::Body("{\"keys\":[]}".to_owned()),
            "none of its keys",
        ),
        (
            KeyResponse::Body(r#"{"keys":[{"kty":"oct","k":"c2VjcmV0","kid":"k1"}]}"#.to_owned()),
            "it is a secret",
        ),
        (
            KeyResponse::Body("x".repeat(3 << 20)),
            "length limit exceeded",
        ),
        (KeyResponse::Truncated("{\"keys\":[".to_owned()), "body: "),
        (KeyResponse::Hanging, "no complete response within 5 s"),
    ];
    let checks = faults.into_iter().map(async |(fault, message)| {
        let (old, new) = (new_issuer("k1"), new_issuer("k2"));
        let server = KeyServer::with_keys(&[&old]).await;
        let settings = format!("keys_url = {:?}\nkeys_refresh = '1s'", server.url());
        let proxy = start_proxy(&settings).await;
        server.set(fault);
        let is_logged = |line: &LogLine| {
            line.message_starts_with("failed to fetch token keys")
                && line.field("error").contains(message)
        };
        proxy
            .wait_for_log(message, 0, 2 * TEST_TIMEOUT, is_logged)
            .await;
        let status = get_status(&proxy, &old.bearer_for_subject("ann")).await;
        assert_eq!(status, 200);
        server.set(KeyResponse::Keys(jwks_text(&[&new]), None));
        let token = new.bearer_for_subject("ann");
        wait_for_status(&proxy, &token, 200, 2 * TEST_TIMEOUT).await;
        for (result, least) in [("success", 2.0), ("failure", 1.0)] {
            let series = format!(
                "tidegate_jwks_fetches_total{{url={:?},result={result:?}}}",
                server.url()
            );
            let count = proxy.read_metric(&series).await;
            assert!(count >= least, "{series} {count}");
        }
    });
    join_all(checks).await;
}

#[tokio::test]
async fn keys_that_are_too_old_are_dropped() {
    let issuer = new_issuer("k1");
    let server = KeyServer::with_keys(&[&issuer]).await;
    let settings = format!(
        "keys_url = {:?}\nkeys_refresh = '1s'\nkeys_max_stale = '3s'",
        server.url()
    );
    let proxy = start_proxy(&settings).await;
    let token = issuer.bearer_for_subject("ann");
    server.set(KeyResponse::Status(503));
    let is_failure = |line: &LogLine| line.message_starts_with("failed to fetch token keys");
    proxy
        .wait_for_log("the failure", 0, TEST_TIMEOUT, is_failure)
        .await;
    assert_eq!(get_status(&proxy, &token).await, 200);
    wait_for_status(&proxy, &token, 400, TEST_TIMEOUT).await;
    server.set(KeyResponse::Keys(jwks_text(&[&issuer]), None));
    wait_for_status(&proxy, &token, 200, 2 * TEST_TIMEOUT).await;
}

#[tokio::test]
async fn a_hanging_issuer_delays_no_request_and_cached_keys_survive_a_restart() {
    let issuer = new_issuer("k1");
    let token = issuer.bearer_for_subject("ann");
    let server = KeyServer::with_keys(&[&issuer]).await;
    let dir = TempDir::new().unwrap();
    let settings = format!(
        "keys_url = {:?}\nkeys_cache_dir = {:?}",
        server.url(),
        dir.path()
    );
    let proxy = start_proxy(&settings).await;
    assert_eq!(get_status(&proxy, &token).await, 200);
    eventually("the cached keys", TEST_TIMEOUT, async || {
        let mut files = fs::read_dir(dir.path()).unwrap().flatten();
        files
            .any(|file| file.path().extension().is_some_and(|kind| kind == "json"))
            .then_some(())
    })
    .await;
    drop(proxy);

    server.set(KeyResponse::Hanging);
    let cached = start_proxy(&settings).await;
    assert_eq!(get_status(&cached, &token).await, 200);
    let without_cache = start_proxy(&format!("keys_url = {:?}", server.url())).await;
    let sent = Instant::now();
    assert_eq!(get_status(&without_cache, &token).await, 400);
    assert_faster_than(Duration::from_secs(1), sent);
}

#[tokio::test]
async fn a_reload_keeps_fetched_keys() {
    let issuer = new_issuer("k1");
    let token = issuer.bearer_for_subject("ann");
    let server = KeyServer::with_keys(&[&issuer]).await;
    let jwt = format!("[client.jwt]\nkeys_url = {:?}\n", server.url());
    let proxy = Proxy::with_echo(&format!("{jwt}{PER_USER_POLICY}")).await;
    assert_eq!(get_status(&proxy, &token).await, 200);
    server.set(KeyResponse::Status(500));
    let mark = proxy.log_mark();
    proxy.write_config(&format!(
        "{jwt}{}",
        PER_USER_POLICY.replace("1000000", "1000")
    ));
    proxy.send_sighup();
    let is_reload = |line: &LogLine| line.message_starts_with("configuration reloaded");
    proxy
        .wait_for_log("the reload", mark, TEST_TIMEOUT, is_reload)
        .await;
    assert_eq!(get_status(&proxy, &token).await, 200);
    assert_eq!(server.fetch_count(), 1, "the reload caused no fetch");
}

#[tokio::test]
async fn issuers_have_their_own_keys_and_audiences() {
    let (one, two) = (new_issuer("k1"), new_issuer("k2"));
    let server = KeyServer::with_keys(&[&one]).await;
    let (_dir, file) = write_temp_file("jwks.json", jwks_text(&[&two]));
    let settings = format!(
        "[[client.jwt.issuers]]\nissuer = 'https://one'\naudience = ['orders', 'billing']\nkeys_url = {:?}\n\
         [[client.jwt.issuers]]\nissuer = 'https://two'\nkeys_file = {file:?}",
        server.url()
    );
    let proxy = start_proxy(&settings).await;
    let claims = |iss: &str, aud: Value| json!({ "sub": "ann", "exp": unix_s() + 60, "iss": iss, "aud": aud });
    for (what, bearer, status) in [
        (
            "aud",
            one.bearer(&claims("https://one", json!("orders"))),
            200,
        ),
        (
            "one of aud",
            one.bearer(&claims("https://one", json!(["x", "billing"]))),
            200,
        ),
        (
            "any aud",
            two.bearer(&claims("https://two", json!("x"))),
            200,
        ),
        (
            "another aud",
            one.bearer(&claims("https://one", json!("x"))),
            400,
        ),
        (
            "no aud",
            one.bearer(&json!({ "sub": "ann", "iss": "https://one" })),
            400,
        ),
        ("no iss", one.bearer_for_subject("ann"), 400),
        (
            "another iss",
            one.bearer(&claims("https://three", json!("orders"))),
            400,
        ),
        (
            "the other's iss",
            one.bearer(&claims("https://two", json!("orders"))),
            400,
        ),
    ] {
        assert_eq!(get_status(&proxy, &bearer).await, status, "{what}");
    }
}

#[tokio::test]
async fn the_certificate_of_an_https_issuer_is_verified() {
    let issuer = new_issuer("k1");
    let token = issuer.bearer_for_subject("ann");
    let server = KeyServer::with_keys(&[&issuer]).await;
    let authority = CertificateAuthority::new();
    authority.sign("issuer", "localhost");
    let address = authority
        .start_tls_front("issuer", server.upstream.address)
        .await;
    let settings = |ca: &CertificateAuthority| {
        format!(
            "keys_url = 'https://localhost:{}/keys'\ntls = {{ ca = {:?} }}",
            address.port(),
            ca.path("ca.pem")
        )
    };
    let proxy = start_proxy(&settings(&authority)).await;
    assert_eq!(get_status(&proxy, &token).await, 200);
    let proxy = start_proxy(&settings(&CertificateAuthority::new())).await;
    let is_tls_error = |line: &LogLine| line.field("error").starts_with("TLS failed");
    proxy
        .wait_for_log("the TLS error", 0, TEST_TIMEOUT, is_tls_error)
        .await;
    assert_eq!(get_status(&proxy, &token).await, 400);
}
