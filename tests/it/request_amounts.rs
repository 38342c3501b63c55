//! Amounts of limits that requests state, end to end.

use crate::reference_model::NaiveModel;
use crate::support::prelude::*;
use tidegate::limiter::OverrideInEffect;

/// The key of the tokens.
const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// The largest amount in the policies.
const MAX: u64 = 5;

const POLICIES: &str = r#"
[client]
trusted_proxies = ["127.0.0.1"]
trusted_headers = ["x-rpm", "x-tenant"]
jwt.secret_file = "FILE"

[[policy]]
name = "user"
match = { path = "/user" }
key = ["jwt:sub"]
limit = { requests_from = "jwt:/plan/rpm", default = 2, max = 5, per = "1h" }

[[policy]]
name = "tenant"
dynamic = true
match = { path = "/tenant" }
key = ["header:x-tenant"]
limit = { requests_from = "header:x-rpm", default = 2, max = 5, per = "1h" }

[[policy]]
name = "two"
match = { path = "/two" }
key = ["header:x-tenant"]
limits = [
  { requests_from = "header:x-rpm", default = 2, max = 5, per = "1h" },
  { requests = 100, per = "1d" },
]

[[policy]]
name = "bucket"
match = { path = "/bucket" }
key = ["header:x-tenant"]
limit = { requests_from = "header:x-rpm", default = 2, max = 5, per = "30d", algorithm = "token_bucket" }
"#;

struct AmountFixture {
    config: ConfigFile,
    upstream: Upstream,
    redis: RedisServer,
}

impl AmountFixture {
    async fn start() -> Self {
        Self {
            config: ConfigFile::new(""),
            upstream: Upstream::echo().await,
            redis: RedisServer::start(),
        }
    }

    async fn start_proxy(&self, store: &str, policies: &str) -> Proxy {
        let secret = self.config.beside("secret");
        fs::write(&secret, SECRET).unwrap();
        let policies = policies.replace("FILE", &secret.display().to_string());
        let text = format!("{store}\n{policies}");
        self.config.write(&text);
        Proxy::start_connected(&text, self.upstream.address).await
    }
}

async fn send(proxy: &Proxy, path: &str, tenant: &str, amount: Option<&str>) -> RawResponse {
    let mut request = proxy.request("GET", path).header("x-tenant", tenant);
    if let Some(amount) = amount {
        request = request.header("x-rpm", amount);
    }
    request.send().await
}

async fn admitted(proxy: &Proxy, path: &str, tenant: &str, amount: &str, times: usize) -> usize {
    let mut admitted = 0;
    for _ in 0..times {
        let response = send(proxy, path, tenant, Some(amount)).await;
        admitted += usize::from(response.status == 200);
    }
    admitted
}

#[tokio::test]
async fn a_verified_token_states_the_amount_within_bounds() {
    let fixture = AmountFixture::start().await;
    let proxy = fixture
        .start_proxy(&fixture.redis.store_config(), POLICIES)
        .await;
    let (issuer, forger) = (
        TokenIssuer::with_secret(SECRET),
        TokenIssuer::with_secret("another secret, which is as long"),
    );
    let admitted = async |issuer: &TokenIssuer, sub: &str, rpm: Value| {
        let claims = json!({ "sub": sub, "plan": { "rpm": rpm }, "exp": unix_s() + 600 });
        let bearer = issuer.bearer(&claims);
        let mut admitted = 0;
        for _ in 0..7 {
            let request = proxy
                .request("GET", "/user")
                .header("authorization", &bearer);
            admitted += usize::from(request.send().await.status == 200);
        }
        admitted
    };
    for (sub, rpm, expected) in [
        ("ann", json!(3), 3),
        ("bob", json!("4"), 4),
        ("cid", json!(1000), 5),
        ("dan", json!(0), 0),
        ("eve", json!(-1), 2),
        ("fay", json!("gold"), 2),
        ("gus", Value::Null, 2),
    ] {
        assert_eq!(admitted(&issuer, sub, rpm).await, expected, "{sub}");
    }
    let answer = admitted(&forger, "ann", json!(5)).await;
    assert_eq!(answer, 2, "a forged token");
}

#[tokio::test]
async fn a_header_counts_only_from_a_trusted_proxy_and_a_larger_amount_is_not_refused() {
    let fixture = AmountFixture::start().await;
    let store = fixture.redis.store_config();
    let proxy = fixture.start_proxy(&store, POLICIES).await;
    assert_eq!(admitted(&proxy, "/tenant", "a", "2", 4).await, 2);
    let response = send(&proxy, "/tenant", "a", Some("4")).await;
    let status = response.status;
    assert_eq!(status, 200, "a cached refusal of 2 is not one of 4");
    let found = response.list_parameter("ratelimit-policy", "tenant", "q");
    assert_eq!(found, Some(4));
    assert_eq!(response.remaining("tenant"), Some(1));
    assert_eq!(send(&proxy, "/tenant", "a", Some("2")).await.status, 429);
    let answer = admitted(&proxy, "/tenant", "a", "4", 3).await;
    assert_eq!(answer, 1, "no refusal was charged");
    let answer = admitted(&proxy, "/bucket", "a", "3", 5).await;
    assert_eq!(answer, 3, "the burst is the amount");

    let explain = async |path: &str, more: &[&str]| {
        let words = ["explain", path, "-H", "x-tenant: a", "-H", "x-rpm: 5"];
        fixture
            .config
            .run_successfully(&[&words[..], more].concat())
            .await
    };
    let shown = explain("/tenant", &[]).await;
    assert_contains(&shown, &["5 per 1h", "1 left"]);
    let two_limits = explain("/two", &[]).await;
    assert!(!two_limits.contains("override"), "{two_limits}");
    fixture
        .config
        .run_successfully(&["overrides", "set", "tenant", "a", "--requests", "9"])
        .await;
    let shown = explain("/tenant", &[]).await;
    assert!(shown.contains("by an override"), "{shown}");
    let shown = explain("/tenant", &["--json"]).await;
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert!(
        shown.to_string().contains(r#""override":"limits""#),
        "{shown}"
    );
    let response = send(&proxy, "/tenant", "a", Some("5")).await;
    let found = response.list_parameter("ratelimit-policy", "tenant", "q");
    assert_eq!(found, Some(9));

    let untrusting = POLICIES.replace("[\"127.0.0.1\"]", "[\"192.0.2.1\"]");
    let untrusting = fixture.start_proxy(&store, &untrusting).await;
    let answer = admitted(&untrusting, "/tenant", "b", "5", 4).await;
    assert_eq!(answer, 2, "the default");
}

#[tokio::test]
async fn the_ext_authz_listener_believes_the_proxy_in_front() {
    let fixture = AmountFixture::start().await;
    let policies = POLICIES
        .replace("/tenant", "/app")
        .replace("dynamic = true\n", "");
    let listener = "[check]\naddress = '127.0.0.1:0'\n";
    let (store, policies) = (
        fixture.redis.store_config(),
        format!("{listener}{policies}"),
    );
    let proxy = fixture.start_proxy(&store, &policies).await;
    let check = proxy.logged_address("check listening").unwrap();
    let ask = async || {
        let request = ClientRequest::new(check, "GET", "/check/nginx")
            .header("Host", "shop.example")
            .header("X-Original-Method", "GET")
            .header("X-Original-URI", "/app")
            .header("X-Forwarded-For", "10.1.1.1");
        let request = request.header("x-tenant", "a").header("x-rpm", "3");
        request.send().await.status
    };
    for expected in [200, 200, 200] {
        assert_eq!(ask().await, expected);
    }
    assert_ne!(ask().await, 200);
}

/// A request is admitted if the key's usage is below the amount of this request.
#[tokio::test]
async fn any_sequence_of_amounts_is_decided_as_by_the_model() {
    let fixture = AmountFixture::start().await;
    let (redis, memory) = (fixture.redis.store_config(), "store = { kind = 'memory' }");
    let mut rng = fastrand::Rng::with_seed(7);
    for store in [redis.as_str(), memory] {
        let proxy = fixture.start_proxy(store, POLICIES).await;
        let mut used = [0; 4];
        for _ in 0..120 {
            let (tenant, amount) = (rng.usize(..used.len()), rng.u64(..8));
            let is_admitted = used[tenant] < amount.min(MAX);
            used[tenant] += u64::from(is_admitted);
            let response = send(
                &proxy,
                "/tenant",
                &format!("t{tenant}"),
                Some(&amount.to_string()),
            )
            .await;
            let expected = if is_admitted { 200 } else { 429 };
            let status = response.status;
            assert_eq!(status, expected, "{store}: {amount} after {used:?}");
        }
    }
}

/// The amount of one key changes from request to request, up and down, under every algorithm: the
/// memory store and the script of Redis agree, and the model keeps all usage.
#[test]
fn both_stores_keep_the_usage_while_amounts_change() {
    let seed = test_seed();
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut stores = StoreUnderTest::both_stores();
    let key = KeyBuilder::new("tenant").finish();
    for round in 0..70 {
        stores.iter_mut().for_each(StoreUnderTest::reset);
        let algorithm = round % EVERY_ALGORITHM.len();
        let file_limit = EVERY_ALGORITHM[algorithm].1(&mut rng);
        let is_modelled = !matches!(
            file_limit.algorithm,
            Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket { .. }
        );
        let (mut model, mut at_us, mut charged) = (NaiveModel::default(), START_US, Vec::new());
        for step in 0..40 {
            at_us += match rng.u8(..4) {
                0 => rng.u64(..=file_limit.per_us / 3),
                1 => rng.u64(..1_000),
                _ => 0,
            };
            let amount = rng.u64(..file_limit.max_amount().min(12) + 1);
            let stated = OverrideInEffect::StatedAmounts {
                requests: amount,
                burst: amount,
            };
            let limit = file_limit.with_override(Some(stated));
            let charge = PolicyCharges::new(&limit, &key, rng.u64(1..4));
            let charge = [charge.map_limits(|charge| charge.is_estimate = true)];
            let [memory, redis] = stores.each_mut().map(|store| store.decide(&charge, at_us));
            let context = format!("seed {seed}, round {round}, step {step}: {charge:?}");
            assert_eq!(memory, redis, "{context}");
            if is_modelled {
                assert_eq!(memory, model.decide(at_us, &charge), "{context}");
            }
            charged.extend(
                memory
                    .outcomes()
                    .next()
                    .unwrap()
                    .charged_at_us
                    .map(|at_us| (charge[0].limits[0].cost, at_us)),
            );
            // A response returns units under the amount of a later request.
            if rng.u8(..4) == 0 && !charged.is_empty() {
                let (units, charged_at_us) = charged.swap_remove(rng.usize(..charged.len()));
                let credit = Amendment::Credit {
                    units,
                    at_us: charged_at_us,
                };
                for store in &mut stores {
                    store.apply_amendment(&limit, &key, credit, at_us);
                }
                if is_modelled {
                    model.apply_amendment(at_us, &PolicyCharges::new(&limit, &key, 0), credit);
                }
            }
        }
    }
}

/// A response settles its charge under its own amount. The state lasts for requests with a lower
/// one, whose rate is that of the last charge.
#[test]
fn a_settlement_under_a_larger_amount_does_not_end_the_usage_of_a_smaller_one() {
    const SECOND_US: u64 = 1_000_000;
    let key = KeyBuilder::new("tenant").finish();
    let bucket = |requests| make_limit(requests, 60 * SECOND_US, plain_bucket(2));
    let (large, small) = (bucket(10), bucket(1));
    for mut store in StoreUnderTest::both_stores() {
        for limit in [&large, &small] {
            let charge = PolicyCharges::new(limit, &key, 1);
            let charge = charge.map_limits(|charge| charge.is_estimate = true);
            assert!(store.decide(&[charge], START_US).admitted);
        }
        // One unit is left, paid back in 60 seconds at one per minute, or in 6 at ten.
        let credit = Amendment::Credit {
            units: 1,
            at_us: START_US,
        };
        store.apply_amendment(&large, &key, credit, START_US);
        let both_units = PolicyCharges::new(&small, &key, 2);
        if let StoreUnderTest::Redis(_) = store {
            let expires_at_ms = store.expires_at_ms(&both_units);
            assert_eq!(expires_at_ms, (START_US + 60 * SECOND_US) / 1_000);
        }
        let decision = store.decide(&[both_units], START_US + 8 * SECOND_US);
        let refusal = decision.statuses().next().unwrap().refusal;
        let until_us = START_US + 60 * SECOND_US;
        assert_eq!(refusal, Some(Refusal::Until(until_us)), "{store:?}");
    }
}

/// Without Redis, no amount counts: `open` admits all requests, and `closed` none. Redis does not
/// count them afterwards. (`check` refuses `"local"`.)
#[tokio::test]
async fn an_outage_admits_by_on_store_failure_whatever_the_amount() {
    let mut fixture = AmountFixture::start().await;
    let policies = POLICIES
        .replace(
            "name = \"tenant\"",
            "name = \"tenant\"\non_store_failure = \"open\"",
        )
        .replace(
            "name = \"bucket\"",
            "name = \"bucket\"\non_store_failure = \"closed\"",
        );
    let proxy = fixture
        .start_proxy(&fixture.redis.store_config(), &policies)
        .await;
    for path in ["/tenant", "/bucket"] {
        assert_eq!(admitted(&proxy, path, "a", "3", 4).await, 3, "{path}");
    }
    fixture.redis.kill();
    for amount in ["1", "5", "0", "gold", "1000"] {
        let open = send(&proxy, "/tenant", "b", Some(amount)).await;
        assert_eq!((open.status, open.header("ratelimit")), (200, None));
        let closed = send(&proxy, "/bucket", "b", Some(amount)).await;
        assert_eq!(closed.status, 503, "{amount}");
    }
    fixture.redis.respawn();
    proxy.wait_for_store().await;
    for path in ["/tenant", "/bucket"] {
        for (amount, expected) in [("1", 1), ("4", 3), ("2", 0), ("5", 1)] {
            let admitted = admitted(&proxy, path, "b", amount, 4).await;
            assert_eq!(admitted, expected, "{path}: {amount}");
        }
    }
}

#[tokio::test]
async fn replay_reads_amounts_from_the_log_or_says_that_it_cannot() {
    let fixture = AmountFixture::start().await;
    fixture
        .start_proxy("store = { kind = 'memory' }", POLICIES)
        .await;
    let log = fixture.config.beside("access.log");
    let line = "{\"timestamp\":\"2026-11-20T09:00:00Z\",\"method\":\"GET\",\"path\":\"/tenant\",\"client_ip\":\"127.0.0.1\",\"status\":200,\"tenant\":\"a\",\"rpm\":\"4\"}\n";
    fs::write(&log, line.repeat(6)).unwrap();
    let log = log.display().to_string();
    let tenant = ["replay", &log, "--header-from", "x-tenant=tenant", "--json"];
    let text = fixture.config.run_successfully(&tenant).await;
    assert_contains(
        &text,
        &["every request had the default amount 2, because header x-rpm is missing"],
    );
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["sets"][0]["limited"], 4, "{report:#}");
    let both = [&tenant[..], &["--header-from", "x-rpm=rpm"]].concat();
    let report: Value =
        serde_json::from_str(&fixture.config.run_successfully(&both).await).unwrap();
    assert_eq!(report["sets"][0]["limited"], 2, "{report:#}");
}
