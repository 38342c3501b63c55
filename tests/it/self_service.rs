//! Clients ask for their own limits, and only for their own.

use crate::support::jwt_issuer::write_jwks;
use crate::support::prelude::*;
use jsonwebtoken::Algorithm;

const PATH: &str = "/.well-known/ratelimit";

/// Two limits by user, one by address, and policies that are not shown.
const POLICIES: &str = r#"
[[policy]]
name = "api"
match = { methods = ["POST"], path = "/api/**" }
key = ["jwt:sub"]
limits = [
  { requests = 3, per = "1h" },
  { requests = 100, per = "1d", algorithm = "fixed_window", name = "api-daily" },
]
[[policy]]
name = "pro"
match = { jwt = { plan = "pro" } }
key = ["jwt:sub"]
limit = { requests = 50, per = "1h", unit = "tokens" }
[[policy]]
name = "login"
match = { path = "/login" }
key = ["client_ip"]
limit = { requests = 5, per = "1m" }
[[policy]]
name = "by-header"
match = { path = "/internal/**" }
key = ["header:x-user"]
limit = { requests = 7, per = "1m" }
[[policy]]
name = "by-query"
match = { path = "/search" }
key = ["jwt:sub", "query:tenant"]
limit = { requests = 7, per = "1m" }
[[policy]]
name = "everyone"
match = { path = "/api/**" }
limit = { requests = 1000, per = "1m" }
[[policy]]
name = "candidate"
mode = "shadow"
key = ["jwt:sub"]
limit = { requests = 1, per = "1m" }
"#;

struct SelfServiceProxy {
    proxy: Proxy,
    upstream: Upstream,
    issuer: TokenIssuer,
    _dir: TempDir,
}

impl SelfServiceProxy {
    async fn start(settings: &str) -> Self {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("jwks.json");
        let issuer = TokenIssuer::new("k1", Algorithm::EdDSA);
        write_jwks(&file, &[&issuer]);
        let upstream = Upstream::echo().await;
        let config = format!("client.jwt.keys_file = {file:?}\n{settings}\n{POLICIES}");
        Self {
            proxy: Proxy::start(&config, upstream.address).await,
            upstream,
            issuer,
            _dir: dir,
        }
    }

    async fn ask(&self, headers: &[(&str, &str)]) -> RawResponse {
        let mut request = self.proxy.request("GET", PATH);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        request.send().await
    }

    async fn ask_as(&self, bearer: &str) -> RawResponse {
        self.ask(&[("Authorization", bearer)]).await
    }
}

/// The names of the reported policies.
fn policy_names(reply: &RawResponse) -> Vec<String> {
    let json = reply.json();
    let policies = json["policies"].as_array().unwrap().iter();
    policies
        .map(|policy| policy["policy"].as_str().unwrap().to_owned())
        .collect()
}

#[tokio::test]
async fn a_client_gets_its_own_limits_and_charges_none_of_them() {
    let redis = RedisServer::start();
    for store in [String::new(), redis.store_config()] {
        let settings = format!("{store}\nself_service = {{ path = '{PATH}' }}");
        let fixture = SelfServiceProxy::start(&settings).await;
        let ann = fixture.issuer.bearer_for_subject("ann");
        let post = fixture.proxy.request("POST", "/api/orders");
        post.header("Authorization", &ann).expect_status(200).await;
        let forwarded = fixture.upstream.requests().len();
        for _ in 0..2 {
            let reply = fixture.ask_as(&ann).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
            assert_eq!(policy_names(&reply), ["api", "login"]);
            let api = &reply.json()["policies"][0];
            assert_eq!(api["blocked_s"], json!(null));
            assert_eq!(api["limits"][0]["name"], "api");
            assert_eq!(api["limits"][0]["quota"], 3);
            assert_eq!(api["limits"][0]["remaining"], 2);
            assert_eq!(api["limits"][0]["window_s"], 3600.0);
            assert!(api["limits"][0]["reset_s"].as_f64().unwrap() > 3_500.0);
            assert_eq!(api["limits"][1]["remaining"], 99);
            assert_eq!(reply.remaining("api"), Some(2));
            assert_eq!(reply.remaining("api-daily"), Some(99));
            let found = reply.list_parameter("ratelimit-policy", "api", "q");
            assert_eq!(found, Some(3));
            assert_eq!(reply.remaining("login"), Some(5));
            assert_eq!(reply.header("cache-control"), Some("no-store"));
            assert_eq!(reply.header("content-type"), Some("application/json"));
        }
        let bob = fixture
            .issuer
            .bearer(&json!({ "sub": "bob", "plan": "pro" }));
        let reply = fixture.ask_as(&bob).await;
        assert_eq!(policy_names(&reply), ["api", "pro", "login"]);
        assert_eq!(reply.json()["policies"][0]["limits"][0]["remaining"], 3);
        assert_eq!(reply.json()["policies"][1]["limits"][0]["unit"], "tokens");
        assert_eq!(fixture.upstream.requests().len(), forwarded);
    }
}

#[tokio::test]
async fn no_client_asks_about_another() {
    let fixture = SelfServiceProxy::start("[self_service]").await;
    let stranger = TokenIssuer::new("k1", Algorithm::EdDSA).bearer_for_subject("ann");
    for (what, headers) in [
        ("no token", vec![]),
        ("a forged token", vec![("Authorization", stranger.as_str())]),
        ("a header of an untrusted peer", vec![("X-User", "ann")]),
        ("a forged address", vec![("X-Forwarded-For", "10.9.9.9")]),
    ] {
        let reply = fixture.ask(&headers).await;
        assert_eq!(policy_names(&reply), ["login"], "{what}");
    }
    let query = fixture
        .proxy
        .request("GET", &format!("{PATH}?tenant=acme&sub=ann"));
    assert_eq!(policy_names(&query.send().await), ["login"]);
    let post = fixture.proxy.request("POST", PATH).body("x").send().await;
    post.expect_status(405).expect_header("allow", "GET, HEAD");
    assert_eq!(fixture.upstream.requests().len(), 0);
}

#[tokio::test]
async fn clients_without_a_token_have_no_common_answer() {
    let policies = "[self_service]
[[policy]]
name = 'user'
key = ['jwt:sub | const:anonymous']
limit = { requests = 3, per = '1h' }";
    let fixture = SelfServiceProxy::start(policies).await;
    let anonymous = fixture.ask(&[]).await;
    assert_eq!(policy_names(&anonymous), ["login"]);
    let bearer = fixture.issuer.bearer_for_subject("ann");
    let ann = fixture.ask_as(&bearer).await;
    assert!(policy_names(&ann).contains(&"user".to_owned()));
}

#[tokio::test]
async fn without_a_verified_key_the_answer_is_401() {
    let upstream = Upstream::echo().await;
    let policy = "[[policy]]\nname = \"p\"\nkey = [\"header:x-user\"]\nlimit = { requests = 5, per = \"1m\" }\n";
    let proxy = Proxy::start(&format!("[self_service]\n{policy}"), upstream.address).await;
    let reply = proxy.get_with(PATH, "X-User", "ann").await;
    assert_eq!(reply.status, 401);
    reply.expect_header("content-type", "application/problem+json");
    assert!(reply.header("www-authenticate").is_some());

    let trusting = format!("client.trusted_proxies = ['127.0.0.0/8']\n[self_service]\n{policy}");
    let proxy = Proxy::start(&trusting, upstream.address).await;
    let victim = proxy.request("GET", PATH).header("X-User", "ann");
    let status = victim.send_for_status().await;
    assert_eq!(status, 401, "the proxy may pass the client's own header on");

    let direct = format!("client.trusted_headers = ['x-user']\n[self_service]\n{policy}");
    let proxy = Proxy::start(&direct, upstream.address).await;
    let victim = proxy.request("GET", PATH).header("X-User", "ann");
    assert_eq!(victim.send_for_status().await, 401, "no proxy in front");

    let config = format!("client.trusted_headers = ['x-user']\n{trusting}");
    let proxy = Proxy::start(&config, upstream.address).await;
    let charged = proxy.get_with("/", "X-User", "ann").await;
    assert_eq!(charged.status, 200);
    for (user, remaining) in [("ann", 4), ("bob", 5)] {
        let reply = proxy.get_with(PATH, "X-User", user).await;
        assert_eq!(reply.remaining("p"), Some(remaining), "{user}");
    }
}

#[tokio::test]
async fn questions_have_a_limit_of_their_own() {
    let fixture =
        SelfServiceProxy::start("self_service = { limit = { requests = 2, per = '1h' } }").await;
    let ann = fixture.issuer.bearer_for_subject("ann");
    for _ in 0..2 {
        assert_eq!(fixture.ask_as(&ann).await.status, 200);
    }
    let reply = fixture.ask_as(&ann).await;
    assert_eq!(reply.status, 429, "{}", reply.text());
    assert!(reply.header("retry-after").is_some());
    assert_eq!(reply.remaining("self_service"), Some(0));
    let bob = fixture.issuer.bearer_for_subject("bob");
    assert_eq!(fixture.ask_as(&bob).await.status, 200);
    let post = fixture.proxy.request("POST", "/api/orders");
    post.header("Authorization", &ann).expect_status(200).await;
}

#[tokio::test]
async fn a_client_certificate_identifies_its_owner() {
    let authority = CertificateAuthority::new();
    authority.sign("server", "localhost");
    authority.sign("client", "orders");
    let path = |file: &str| authority.path_string(file);
    let config = format!(
        "[listen.tls]\ncert = '{}'\nkey = '{}'\nclient_ca = '{}'\nclient_auth = 'optional'\n[self_service]\n\
         [[policy]]\nname = \"by-cert\"\nkey = [\"client_cert:san\"]\nlimit = {{ requests = 9, per = \"1m\" }}\n",
        path("server.pem"),
        path("server.key"),
        path("ca.pem"),
    );
    let proxy = Proxy::with_echo(&config).await;
    let request = format!("GET {PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    for (client, status) in [
        (
            TlsClient::with_certificate(&authority, &authority, "client"),
            200,
        ),
        (TlsClient::new(&authority), 401),
    ] {
        let mut client = client.connect_http1(proxy.address, "localhost").await;
        let reply = client.request(&request).await;
        assert_eq!(reply.status, status, "{}", reply.text());
    }
}

/// Each policy of a counter has a limit of its own. The fields have the one with the fewest units.
#[tokio::test]
async fn all_policies_of_a_counter_are_listed() {
    let policy = |name: &str, requests: u64| {
        format!(
            "[[policy]]\nname = '{name}'\ncounter = 'units'\nmatch = {{ path = '/{name}' }}\n\
             key = ['client_ip']\nlimit = {{ requests = {requests}, per = '1h' }}\n"
        )
    };
    for (policies, expected) in [
        ([policy("loose", 5), policy("strict", 2)], [3, 0]),
        ([policy("strict", 2), policy("loose", 5)], [0, 3]),
    ] {
        let redis = RedisServer::start();
        for store in [String::new(), redis.store_config()] {
            let config = format!(
                "{store}\n[self_service]\npath = '{PATH}'\n{}",
                policies.concat()
            );
            let proxy = Proxy::echo_connected(&config).await;
            for (path, status) in [("/strict", 200), ("/loose", 200), ("/strict", 429)] {
                proxy.expect_status(path, status, "{path}").await;
            }
            let reply = proxy.get(PATH).await;
            let json = reply.json();
            let left = |index: usize| json["policies"][index]["limits"][0]["remaining"].as_u64();
            assert_eq!([left(0), left(1)], expected.map(Some), "{json}");
            assert_eq!(json["policies"].as_array().unwrap().len(), 2);
            assert_eq!(reply.remaining("units"), Some(0));
            let found = reply.list_parameter("ratelimit-policy", "units", "q");
            assert_eq!(found, Some(2));
            let count = reply.header("ratelimit").unwrap().matches("units").count();
            assert_eq!(count, 1);
        }
    }
}

#[tokio::test]
async fn without_the_table_the_path_is_forwarded() {
    let fixture = SelfServiceProxy::start("").await;
    let reply = fixture.ask(&[]).await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.json()["target"], PATH);
}
