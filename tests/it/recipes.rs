//! `docs/RECIPES.md`: each recipe runs with the traffic that its text names. `tests/envoy.sh` runs
//! the recipes for Traefik and Envoy with these programs.

mod budgets;

use super::documentation::read_code_blocks;
use crate::support::jwt_issuer::write_jwks;
use crate::support::nginx::Nginx;
use crate::support::prelude::*;
use crate::support::proxy::{Setup, UpstreamUrl};
use jsonwebtoken::Algorithm;
use tokio::net::TcpSocket;

const PAGE: &str = "docs/RECIPES.md";

/// The recipes that a test in this file or in `recipes/budgets.rs` runs.
const TESTED_RECIPES: [&str; 31] = [
    "Per API key",
    "Per user of a JWT",
    "Alternatives in a key",
    "Login protection",
    "Failed logins only",
    "Introduce a limit softly",
    "A limit that clients do not see",
    "Plans: free, pro, partner",
    "Requests per month",
    "Warn at 80 %",
    "Concurrency per pod and a rate for all pods",
    "One quota for several policies",
    "Limits for single customers",
    "The amount from a token",
    "Limits by pattern",
    "Plans from a gateway's header",
    "Exempt health checks and partners",
    "Express",
    "FastAPI",
    "gRPC",
    "WebSocket",
    "OpenAI",
    "Anthropic",
    "Gemini",
    "MCP",
    "Money",
    "Webhooks",
    "Behind nginx",
    "Behind Traefik",
    "Behind Envoy",
    "Behind an AWS load balancer",
];

/// A proxy with the configuration of one recipe. Requests come from a trusted proxy.
struct RecipeRun {
    proxy: Proxy,
    issuer: TokenIssuer,
    _dir: TempDir,
}

impl RecipeRun {
    async fn start(heading: &str) -> Self {
        let upstream = Upstream::echo().await;
        Self::start_with(heading, |setup| setup.owned_upstream(upstream)).await
    }

    async fn before(heading: &str, upstream: impl Into<UpstreamUrl>) -> Self {
        Self::start_with(heading, |setup| setup.upstream(upstream)).await
    }

    async fn start_with(heading: &str, complete: impl FnOnce(Setup) -> Setup) -> Self {
        let issuer = TokenIssuer::new("k", Algorithm::ES256);
        let dir = TempDir::new().unwrap();
        let keys = dir.path().join("jwks.json");
        write_jwks(&keys, &[&issuer]);
        let config = recipe_text(heading, "toml")
            .replace("/etc/tidegate/jwks.json", &keys.display().to_string())
            .replace("127.0.0.1:9091", "127.0.0.1:0")
            // Addresses of the load balancer, which is this process.
            .replace("10.0.0.0/16", "127.0.0.0/8");
        let mut setup = complete(Proxy::setup(&config));
        if !config.contains("trusted_proxies") {
            setup = setup.env("TIDEGATE_CLIENT__TRUSTED_PROXIES", "127.0.0.1");
        }
        Self {
            proxy: setup.start().await,
            issuer,
            _dir: dir,
        }
    }

    /// A request of the client with this address.
    fn request(&self, client: &str, method: &str, target: &str) -> ClientRequest {
        let request = self.proxy.request(method, target);
        request.header("X-Forwarded-For", client)
    }

    async fn statuses(&self, times: usize, client: &str, method: &str, target: &str) -> Vec<u16> {
        self.request(client, method, target).send_times(times).await
    }

    /// As [`Self::statuses`], of one client's GET with a header.
    async fn statuses_with(&self, times: usize, name: &str, value: &str) -> Vec<u16> {
        let request = self.request("192.0.2.1", "GET", "/api/x");
        request.header(name, value).send_times(times).await
    }

    /// Sends a GET of each of so many clients, through a load balancer with this address.
    async fn statuses_of_clients(&self, clients: usize, balancer: &str, target: &str) -> Vec<u16> {
        let mut statuses = Vec::new();
        for n in 0..clients {
            let client = format!("198.51.100.{n}, {balancer}");
            statuses.extend(self.statuses(1, &client, "GET", target).await);
        }
        statuses
    }

    fn bearer(&self, sub: &str, plan: impl Into<Value>) -> String {
        let plan = plan.into();
        self.issuer
            .bearer(&json!({ "sub": sub, "plan": plan, "exp": unix_s() + 3600 }))
    }
}

fn recipe_text(heading: &str, language: &str) -> String {
    let blocks = read_code_blocks(PAGE);
    let found: Vec<_> = blocks
        .iter()
        .filter(|block| block.heading == heading && block.language == language)
        .collect();
    assert_eq!(found.len(), 1, "{language} below {heading:?}");
    found[0].text.clone()
}

/// `admitted` times 200 and then `refused` times 429.
fn expected(admitted: usize, refused: usize) -> Vec<u16> {
    [vec![200; admitted], vec![429; refused]].concat()
}

#[test]
fn every_recipe_is_tested() {
    let blocks = read_code_blocks(PAGE);
    let mut headings: Vec<_> = blocks.iter().map(|block| &*block.heading).collect();
    headings.dedup();
    assert_eq!(headings, TESTED_RECIPES);
}

#[tokio::test]
async fn per_api_key() {
    let run = RecipeRun::start("Per API key").await;
    let ask = |key, times| run.statuses_with(times, "X-Api-Key", key);
    let began = Instant::now();
    let statuses = ask("key-of-ann", 30).await;
    let refilled = (began.elapsed().as_secs_f64() * 10.0).ceil() as usize;
    let admitted = statuses.iter().filter(|status| **status == 200).count();
    assert!((10..=10 + refilled).contains(&admitted), "{statuses:?}");
    assert_eq!(ask("key-of-bob", 5).await, [200; 5]);
    assert_eq!(ask("key-of-acme", 30).await, [200; 30]);
    let without = run.statuses(1, "192.0.2.1", "GET", "/api/x").await;
    assert_eq!(without, [400]);
}

#[tokio::test]
async fn per_user_of_a_token() {
    let run = RecipeRun::start("Per user of a JWT").await;
    let ask = async |bearer: &str, times| run.statuses_with(times, "Authorization", bearer).await;
    // Each with a token of its own.
    let mut statuses = Vec::new();
    for n in 0..101 {
        statuses.extend(ask(&run.bearer("ann", n.to_string()), 1).await);
    }
    assert_eq!(statuses, expected(100, 1));
    assert_eq!(ask(&run.bearer("bob", "free"), 1).await, [200]);
    assert_eq!(ask("Bearer nonsense", 21).await, expected(20, 1));
    let elsewhere = run.statuses(1, "192.0.2.2", "GET", "/api/x").await;
    assert_eq!(elsewhere, [200]);
}

#[tokio::test]
async fn a_key_with_a_fallback() {
    let run = RecipeRun::start("Alternatives in a key").await;
    let send = async |name: &str, value: &str, times: usize| {
        let mut statuses = Vec::new();
        for nth in 0..times {
            // Several addresses, so that only the policy "api" refuses.
            let client = format!("192.0.2.{}", 10 + nth % 2);
            let request = run.request(&client, "GET", "/api/x").header(name, value);
            statuses.push(request.send().await.status);
        }
        statuses
    };
    assert_eq!(send("X-Api-Key", "ann", 62).await, expected(60, 2));
    let alice = run.bearer("alice", "free");
    assert_eq!(send("Authorization", &alice, 91).await, expected(90, 1));
    let by_address = run.statuses(61, "192.0.2.77", "GET", "/api/x").await;
    assert_eq!(by_address, expected(60, 1));
    let pretender = run.statuses(1, "192.0.2.78", "GET", "/api/x").await;
    assert_eq!(pretender, [200]);
}

#[tokio::test]
async fn requests_per_month() {
    let (upstream, server) = (Upstream::echo().await, RedisServer::start());
    let setup = Proxy::setup(&recipe_text("Requests per month", "toml")).owned_upstream(upstream);
    let url = format!("redis://127.0.0.1:{}/0", server.port());
    let setup = setup.env("TIDEGATE_STORE__REDIS__URL", &url);
    let proxy = setup.start().await;
    let ask = |key| proxy.get_with("/api/x", "X-Api-Key", key);
    // The month of Berlin has 28 to 31 days, perhaps with an hour more or less.
    let response = ask("key-of-ann").await;
    let window_s = |name| response.list_parameter("ratelimit-policy", name, "w");
    let month_s = window_s("month").unwrap();
    assert!((28 * 86_400 - 3600..=31 * 86_400 + 3600).contains(&month_s));
    assert!((23..=25).contains(&(window_s("day").unwrap() / 3600)));
    for (limit, remaining) in [("month", 99_999), ("day", 9_999)] {
        let left = response.remaining(limit);
        assert_eq!(left, Some(remaining));
    }
    for expected in [200, 200, 200, 429] {
        assert_eq!(ask("key-of-zoe").await.status, expected);
    }
    let without = proxy.get("/api/x").await;
    assert_eq!(without.status, 400);
}

/// `tests/it/notifications.rs` has Redis and several instances.
#[tokio::test]
async fn warn_at_80_percent() {
    let run = RecipeRun::start("Warn at 80 %").await;
    let mut notified = Vec::new();
    for nth in 1..=6 {
        let reply = run
            .proxy
            .get_with("/api/x", "X-Api-Key", "key-of-zoe")
            .await;
        let field = reply.header("x-tidegate-notify").map(str::to_owned);
        notified.extend(field.map(|field| (nth, field)));
    }
    let expected = [(4, "0.8"), (5, "1.0")];
    let expected = expected.map(|(nth, at)| (nth, format!("\"plan\";threshold={at}")));
    assert_eq!(notified, expected);
}

#[tokio::test]
async fn log_in_protection() {
    let run = RecipeRun::start("Login protection").await;
    let statuses = run.statuses(6, "192.0.2.1", "POST", "/login").await;
    assert_eq!(statuses, expected(5, 1));
    let refused = run.request("192.0.2.1", "POST", "/login").send().await;
    let retry_after: u64 = refused.retry_after_s();
    assert!((890..=900).contains(&retry_after), "{refused:?}");
    let form = run.statuses(1, "192.0.2.1", "GET", "/login").await;
    assert_eq!(form, [200]);
    // 295 of 300 logins remain for all other clients.
    let mut admitted = 0;
    for n in 0..75 {
        let client = format!("198.51.100.{n}");
        let statuses = run.statuses(4, &client, "POST", "/login").await;
        admitted += statuses.iter().filter(|status| **status == 200).count();
    }
    assert_eq!(admitted, 295);
}

#[tokio::test]
async fn failed_log_ins() {
    let app = Upstream::with_handler(crate::support::login_app::check_password).await;
    let run = RecipeRun::before("Failed logins only", app.address).await;
    let attempt = || run.request("192.0.2.1", "POST", "/login");
    let log_in = |password| attempt().header("X-Password", password).send_for_status();
    for _ in 0..10 {
        assert_eq!(log_in("right").await, 200);
    }
    let statuses = join_all((0..64).map(|_| log_in("wrong"))).await;
    let failed = statuses.iter().filter(|status| **status == 401).count();
    assert_eq!(failed, 5);
    assert_eq!(log_in("right").await, 429);
    // Once the app's responses are counted, a rejection lasts for 15 minutes.
    let is_locked_out = async || attempt().send().await.retry_after_us() > 60_000_000;
    while !is_locked_out().await {}
}

#[tokio::test]
async fn a_soft_limit() {
    let run = RecipeRun::start("Introduce a limit softly").await;
    let statuses = run.statuses(21, "192.0.2.1", "GET", "/search").await;
    assert_eq!(statuses, [200; 21]);
    let marked = run.proxy.echo().requests();
    let marks = |at: usize| marked[at].header_values("x-tidegate-over");
    assert_eq!((marks(19), marks(20)), (vec![], vec!["search"]));
}

#[tokio::test]
async fn a_hidden_limit() {
    let run = RecipeRun::start("A limit that clients do not see").await;
    let statuses = run.statuses(31, "192.0.2.1", "GET", "/catalog/1").await;
    assert_eq!(statuses, expected(30, 1));
    let refused = run.request("192.0.2.1", "GET", "/catalog/1").send().await;
    let everything = format!("{:?} {}", refused.headers, refused.text());
    assert!(!everything.contains("scrapers"), "{everything}");
    assert!(refused.header("retry-after").is_some());
    assert_eq!(refused.remaining("client"), Some(70));
}

#[tokio::test]
async fn plans() {
    let run = RecipeRun::start("Plans: free, pro, partner").await;
    let ask = async |bearer: &str, times| {
        let request = run.request("192.0.2.1", "GET", "/api/x");
        let request = request.header("Authorization", bearer);
        request.header("X-Plan", "pro").send_times(times).await
    };
    assert_eq!(ask(&run.bearer("ann", "free"), 11).await, expected(10, 1));
    let answer = ask(&run.bearer("bob", "nonsense"), 11).await;
    assert_eq!(answer, expected(10, 1));
    assert_eq!(ask(&run.bearer("cid", "pro"), 101).await, expected(100, 1));
    assert_eq!(ask(&run.bearer("dan", "partner"), 150).await, [200; 150]);
    assert_eq!(ask("", 11).await, expected(10, 1));
    let forged = TokenIssuer::new("k", Algorithm::ES256);
    let forged = forged.bearer(&json!({ "sub": "eve", "plan": "pro", "exp": unix_s() + 60 }));
    assert_eq!(ask(&forged, 1).await, [429], "the quota of no token");
}

/// `tests/it/instance_scope.rs` has the slots and Redis.
#[tokio::test]
async fn slots_of_one_pod() {
    let run = RecipeRun::start("Concurrency per pod and a rate for all pods").await;
    let statuses = run.statuses_with(1001, "X-Api-Key", "k").await;
    assert_eq!(statuses, expected(1000, 1));
    let without_key = run.statuses(1, "192.0.2.1", "GET", "/api/x").await;
    assert_eq!(without_key, [400]);
}

#[tokio::test]
async fn one_quota_for_several_policies() {
    let run = RecipeRun::start("One quota for several policies").await;
    let ask = async |path: &str, times| {
        let request = run.request("192.0.2.1", "GET", path);
        request.header("X-Api-Key", "k").send_times(times).await
    };
    assert_eq!(ask("/search", 40).await, [200; 40]);
    assert_eq!(ask("/export", 3).await, expected(2, 1));
    assert_eq!(ask("/search", 41).await, expected(40, 1));
}

/// `tests/it/overrides.rs` changes the overrides.
#[tokio::test]
async fn limits_for_single_customers() {
    let run = RecipeRun::start("Limits for single customers").await;
    let bearer = run.bearer("acme", "free");
    let statuses = run.statuses_with(101, "Authorization", &bearer).await;
    assert_eq!(statuses, expected(100, 1));
}

/// The client of the test is the gateway.
#[tokio::test]
async fn the_amount_from_a_token() {
    let run = RecipeRun::start("The amount from a token").await;
    let send = async |sub: &str, plan: Value, times| {
        let bearer = run.bearer(sub, plan);
        run.statuses_with(times, "Authorization", &bearer).await
    };
    assert_eq!(send("ann", json!({ "rpm": 30 }), 31).await, expected(30, 1));
    assert_eq!(send("bob", json!({}), 21).await, expected(20, 1));
    assert_eq!(
        send("cid", json!({ "rpm": "gold" }), 21).await,
        expected(20, 1)
    );
    assert_eq!(send("dan", json!({ "rpm": 0 }), 1).await, expected(0, 1));
}

#[tokio::test]
async fn limits_by_pattern() {
    let run = RecipeRun::start("Limits by pattern").await;
    let send = async |tenant: &str, times: usize| {
        let (mut statuses, mut marks) = (Vec::new(), 0);
        for _ in 0..times {
            let request = run.request("192.0.2.1", "GET", "/api/x");
            statuses.push(request.header("X-Tenant", tenant).send().await.status);
            let seen = run.proxy.echo().last_request();
            marks += usize::from(!seen.header_values("x-tidegate-over").is_empty());
        }
        (statuses, marks)
    };
    assert_eq!(send("acme-eu", 31).await, (expected(31, 0), 1));
    assert_eq!(send("acme-lab", 6).await.0, expected(5, 1));
    assert_eq!(send("beta-1", 11).await.0, expected(10, 1));
    assert_eq!(send("other", 12).await, (expected(12, 0), 2));
    assert_eq!(send("monitoring", 50).await, (expected(50, 0), 0));
}

#[tokio::test]
async fn plans_from_a_header() {
    let run = RecipeRun::start("Plans from a gateway's header").await;
    let ask = async |user: &str, plan: &str, times| {
        let request = run.request("192.0.2.1", "GET", "/api/x");
        let request = request.header("X-User", user).header("X-Plan", plan);
        request.send_times(times).await
    };
    assert_eq!(ask("ann", "free", 11).await, expected(10, 1));
    assert_eq!(ask("bob", "pro", 101).await, expected(100, 1));
    let none = run.statuses(11, "192.0.2.1", "GET", "/api/x").await;
    assert_eq!(none, expected(10, 1));
}

#[tokio::test]
async fn exemptions() {
    let run = RecipeRun::start("Exempt health checks and partners").await;
    for path in ["/healthz", "/readyz"] {
        let answers = run.statuses(110, "203.0.113.9", "GET", path).await;
        assert_eq!(answers, [200; 110]);
    }
    for partner in ["192.0.2.77", "2001:db8:7:1::5"] {
        assert_eq!(run.statuses(110, partner, "GET", "/x").await, [200; 110]);
    }
    let statuses = run.statuses(101, "203.0.113.9", "POST", "/healthz").await;
    assert_eq!(statuses, expected(100, 1));
}

#[tokio::test]
async fn express() {
    let run = RecipeRun::start("Express").await;
    let files = run
        .statuses(110, "192.0.2.1", "GET", "/static/app.js")
        .await;
    assert_eq!(files, [200; 110]);
    let writes = run.statuses(21, "192.0.2.1", "POST", "/orders").await;
    assert_eq!(writes, expected(20, 1));
    let reads = run.statuses(81, "192.0.2.1", "GET", "/orders").await;
    assert_eq!(reads, expected(80, 1));
    // What `trust proxy` reads.
    let request = run.proxy.echo().last_request();
    request.expect_header("x-forwarded-for", "192.0.2.1, 127.0.0.1");
}

#[tokio::test]
async fn fast_api() {
    let (finish, finished) = tokio::sync::watch::channel(false);
    let silent = RawUpstream::with_script(move |_, mut socket| {
        let mut finished = finished.clone();
        async move {
            while socket.read_request().await.is_some() {
                finished.wait_for(|finished| *finished).await.unwrap();
                let done = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
                socket.send(done).await;
            }
        }
    })
    .await;
    let run = RecipeRun::before("FastAPI", silent.address).await;
    let mut reports = Vec::new();
    for n in 1..=2 {
        let client = run
            .proxy
            .send_raw("GET /reports/7 HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 192.0.2.1\r\n\r\n")
            .await;
        reports.push(client);
        wait_until("the request", async || silent.connection_count() >= n).await;
    }
    let ask = || {
        run.request("192.0.2.1", "GET", "/reports/8")
            .send_for_status()
    };
    assert_eq!(ask().await, 429);
    drop(reports);
    // The app works on without its clients.
    sleep(Duration::from_millis(200)).await;
    assert_eq!(ask().await, 429);
    finish.send(true).unwrap();
    wait_until("the slots of the ended reports", async || {
        ask().await == 200
    })
    .await;
}

#[tokio::test]
async fn grpc() {
    let app = Nginx::start_http2().await;
    let run = RecipeRun::before("gRPC", &format!("h2c://{}", app.address)).await;
    let call = |method| {
        let request = run
            .proxy
            .request("POST", &format!("/shop.v1.Catalog/{method}"));
        request.header("Content-Type", "application/grpc").send()
    };
    let began = Instant::now();
    let mut refused = Vec::new();
    for _ in 0..20 {
        let reply = call("Search").await;
        if reply.header("grpc-status") == Some("8") {
            assert!(reply.header("retry-after").is_some(), "{reply:?}");
            refused.push(reply);
        }
    }
    let most = 5 * (1 + began.elapsed().as_secs() as usize);
    let least = 20_usize.saturating_sub(most);
    assert!((least..=15).contains(&refused.len()), "{}", refused.len());
    assert_ne!(call("Get").await.header("grpc-status"), Some("8"));
}

#[tokio::test]
async fn web_sockets() {
    let app = RawUpstream::with_script(|_, mut socket| async move {
        if socket.read_request().await.is_some() {
            let switching = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";
            socket.send(switching.as_bytes()).await;
            socket.read_to_close().await;
        }
    })
    .await;
    let run = RecipeRun::before("WebSocket", app.address).await;
    let open = async || {
        let (client, reply) = run.proxy.upgrade("GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n").await;
        (client, reply.status)
    };
    let mut sockets = Vec::new();
    for _ in 0..5 {
        let (socket, status) = open().await;
        assert_eq!(status, 101);
        sockets.push(socket);
    }
    assert_eq!(open().await.1, 429);
    drop(sockets);
    wait_until("the slots of the closed sockets", async || {
        open().await.1 == 101
    })
    .await;
}

#[tokio::test]
async fn webhooks() {
    let run = RecipeRun::start("Webhooks").await;
    let began = Instant::now();
    let post = |target| run.request("192.0.2.1", "POST", target);
    let delivery = post("/webhooks/payments").body("{}");
    let deliveries = (0..15).map(|_| delivery.clone().send_for_status());
    assert_eq!(join_all(deliveries).await, [200; 15]);
    assert!(
        began.elapsed() >= Duration::from_millis(1350),
        "{:?}",
        began.elapsed()
    );
    let flood = (0..80).map(|_| post("/webhooks/shipping").send_for_status());
    let statuses = join_all(flood).await;
    assert!(statuses.contains(&429), "{statuses:?}");
    assert!(statuses.contains(&200), "{statuses:?}");
}

#[tokio::test]
async fn behind_nginx() {
    let run = RecipeRun::start("Behind nginx").await;
    let server = recipe_text("Behind nginx", "nginx")
        .replace("127.0.0.1:8080", &run.proxy.address.to_string());
    let nginx = Nginx::start_with_config("", &server).await;
    let ask = async |from: &str, forged: &str| {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
        let stream = socket.connect(nginx.address).await.unwrap();
        let mut client = RawClient::from_stream(stream);
        let head = format!("GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: {forged}\r\n\r\n");
        client.send(head).await;
        client.read_response().await.status
    };
    let mut statuses = Vec::new();
    for n in 0..11 {
        statuses.push(ask("127.0.0.1", &format!("198.51.100.{n}")).await);
    }
    assert_eq!(statuses, expected(10, 1));
    assert_eq!(ask("127.0.0.2", "198.51.100.1").await, 200);
}

/// Traefik and Envoy append the client's address to the forwarding header.
#[tokio::test]
async fn behind_traefik_and_envoy() {
    for heading in ["Behind Traefik", "Behind Envoy"] {
        let run = RecipeRun::start(heading).await;
        let statuses = run.statuses_of_clients(11, "203.0.113.5", "/api/x").await;
        assert_eq!(statuses, expected(10, 1), "{heading}");
        let other = run.statuses(1, "203.0.113.6", "GET", "/api/x").await;
        assert_eq!(other, [200], "{heading}");
        let free = run.statuses(1, "203.0.113.5", "GET", "/free").await;
        assert_eq!(free, [200], "{heading}");
    }
}

#[tokio::test]
async fn behind_an_aws_load_balancer() {
    let run = RecipeRun::start("Behind an AWS load balancer").await;
    let statuses = run
        .statuses_of_clients(101, "203.0.113.5", "/healthz")
        .await;
    assert_eq!(statuses, expected(100, 1), "clients have no exemption");
    let health = run.proxy.get_statuses("/healthz", 110).await;
    assert_eq!(health, [200; 110]);
}
