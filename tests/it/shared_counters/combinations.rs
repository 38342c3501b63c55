//! `counter` together with calendar periods, `count_when`, `block_for` and `requests_from`.

use super::{POLICIES, assert_usage_is_shared};
use crate::calendar_limits::zone_far_from_midnight;
use crate::support::prelude::*;

/// `/both` matches both policies. The counter is one, and each policy has its own limit.
const LOCKOUT_POLICIES: &str = "
[[policy]]
name = 'login'
counter = 'passwords'
match = { path = ['/login', '/both'] }
key = ['header:x-user']
limit = { requests = 5, per = '100d' }
count_when = { status = [401] }

[[policy]]
name = 'reset'
counter = 'passwords'
match = { path = ['/reset', '/both'] }
key = ['header:x-user']
limit = { requests = 3, per = '100d' }
count_when = { status = [401] }
";

/// A wait of more than this is a block: no unit of the limits returns so late.
const BLOCK_SECONDS: u64 = 100 * 86_400;

fn with_block() -> String {
    LOCKOUT_POLICIES.replace("counter = ", "block_for = '200d'\ncounter = ")
}

/// Policies in memory, and in Redis for two proxies.
struct SharedProxies {
    proxies: Vec<Proxy>,
    redis: Option<RedisServer>,
}

impl SharedProxies {
    async fn start(in_redis: bool, policies: &str, upstream: SocketAddr) -> Self {
        let redis = in_redis.then(RedisServer::start);
        let store = redis.as_ref().map(RedisServer::store_config);
        let config = format!("{}\n{policies}", store.unwrap_or_default());
        let mut proxies = Vec::new();
        for _ in 0..=usize::from(in_redis) {
            let proxy = Proxy::start_connected(&config, upstream).await;
            proxies.push(proxy);
        }
        Self { proxies, redis }
    }

    fn ends(&self) -> (&Proxy, &Proxy) {
        (&self.proxies[0], &self.proxies[self.proxies.len() - 1])
    }
}

/// Status, and whether the response is that of a block.
async fn try_password(proxy: &Proxy, path: &str, user: &str, password: &str) -> (u16, bool) {
    let reply = log_in(proxy, path, user, password).await;
    let wait = reply.header("retry-after");
    let is_block = wait.is_some_and(|wait| wait.parse::<u64>().unwrap() > BLOCK_SECONDS);
    (reply.status, is_block)
}

/// Repeats a request until its result is this. Settlements reach Redis a moment later, and workers
/// cache refusals for a second.
async fn await_result(proxy: &Proxy, path: &str, user: &str, expected: (u16, bool)) {
    wait_until(format!("{path} {user}: {expected:?}"), async || {
        try_password(proxy, path, user, "right").await == expected
    })
    .await;
}

#[tokio::test]
async fn policies_share_a_month() {
    let (zone, upstream) = (zone_far_from_midnight(), Upstream::echo().await);
    let month = format!("per = \"month\", tz = \"{zone}\", algorithm = \"fixed_window\"");
    let policies = POLICIES.replace("per = \"1h\"", &month);
    for in_redis in [false, true] {
        let shared = SharedProxies::start(in_redis, &policies, upstream.address).await;
        let proxies: Vec<&Proxy> = shared.proxies.iter().collect();
        assert_usage_is_shared(&proxies).await;
        if let Some(redis) = &shared.redis {
            let counters = list_counter_keys(redis).await;
            let month = format!(":fixed_window:month+{zone}:@units/ann");
            let is_shared = |key: &String| key.ends_with(&month);
            assert!(counters.iter().any(is_shared), "{counters:?}");
            assert_eq!(counters.len(), 2, "{counters:?}");
        }
    }
}

/// Failures of both policies fill one counter, which each compares with its own limit.
#[tokio::test]
async fn policies_share_the_count_of_their_responses() {
    let app = Upstream::with_handler(check_password).await;
    for in_redis in [false, true] {
        let shared = SharedProxies::start(in_redis, LOCKOUT_POLICIES, app.address).await;
        let (one, two) = shared.ends();
        // Right passwords cost nothing, also where both policies match.
        for path in ["/login", "/reset", "/both"].repeat(3) {
            await_result(two, path, "bob", (200, false)).await;
        }
        for (proxy, path) in [(one, "/login"), (two, "/reset"), (one, "/both")] {
            let answer = try_password(proxy, path, "ann", "wrong").await;
            assert_eq!(answer, (401, false));
        }
        // Three failures are used: all that `reset` has, and three of the five of `login`.
        for path in ["/reset", "/both"] {
            assert_eq!(
                try_password(two, path, "ann", "right").await.0,
                429,
                "{path}"
            );
        }
        let attempts = (0..20).map(|_| try_password(one, "/login", "ann", "wrong"));
        let attempts = join_all(attempts).await;
        let failed = attempts.iter().filter(|(status, _)| *status == 401);
        assert_eq!(failed.count(), 2, "in Redis: {in_redis}");
        assert_eq!(try_password(two, "/login", "ann", "right").await.0, 429);
        await_result(two, "/login", "bob", (200, false)).await;
    }
}

/// The block of one policy is that of the other, and it starts by responses only.
#[tokio::test]
async fn policies_share_a_lockout() {
    let app = Upstream::with_handler(check_password).await;
    for in_redis in [false, true] {
        let shared = SharedProxies::start(in_redis, &with_block(), app.address).await;
        let (one, two) = shared.ends();
        for (proxy, path) in [(one, "/login"), (two, "/both"), (one, "/reset")] {
            let answer = try_password(proxy, path, "ann", "wrong").await;
            assert_eq!(answer, (401, false));
        }
        // `login` has two units left, so it starts no block.
        await_result(two, "/login", "ann", (200, false)).await;
        await_result(two, "/reset", "ann", (429, true)).await;
        for path in ["/login", "/both"] {
            await_result(one, path, "ann", (429, true)).await;
        }
        assert_eq!(try_password(two, "/login", "bob", "right").await.0, 200);
        if let Some(redis) = &shared.redis {
            // The block, the request counter and the response counter of ann.
            let counters = list_counter_keys(redis).await;
            let items = counters.iter();
            let of_ann = items.filter(|key| key.ends_with("@passwords/ann"));
            assert_eq!(of_ann.count(), 3, "{counters:?}");
        }
    }
}

/// Right passwords in flight fill the limit of both policies, and lock nobody out.
#[tokio::test]
async fn reservations_of_both_policies_start_no_block() {
    for in_redis in [false, true] {
        let app = GatedUpstream::start().await;
        let shared = SharedProxies::start(in_redis, &with_block(), app.address).await;
        let (one, two) = shared.ends();
        let paths = ["/login", "/reset", "/both", "/login", "/login"];
        let in_order = async {
            let mut held = Vec::new();
            for (number, path) in (1..).zip(paths) {
                held.push(Box::pin(try_password(one, path, "ann", "right")));
                let arrived = app.wait_for_requests(number);
                tokio::select! {
                    _ = join_all(&mut held) => panic!("nothing is answered yet"),
                    () = arrived => {}
                }
            }
            for path in ["/login", "/reset", "/both"] {
                assert_eq!(try_password(two, path, "ann", "right").await, (429, false));
            }
            app.answer(1_000);
            join_all(held).await
        };
        let held = in_time(in_order).await;
        assert_eq!(held, [(200, false); 5]);
        for path in paths {
            await_result(two, path, "ann", (200, false)).await;
        }
    }
}

/// Amounts of one source are equal for all policies, so the stricter policy is the same for every
/// request. `check` refuses two sources beside a second limit.
#[tokio::test]
async fn the_stricter_policy_decides_whatever_amount_a_request_states() {
    let policy = |name: &str, source: &str, long: u64| {
        format!(
            "[[policy]]\nname = '{name}'\ncounter = 'units'\nkey = ['header:x-user']\nlimits = [\n\
             {{ requests_from = 'header:{source}', default = 5, max = 9, per = '30d' }},\n\
             {{ requests = {long}, per = '100d', name = 'long' }},\n]\n"
        )
    };
    let trust =
        "[client]\ntrusted_proxies = ['127.0.0.1']\ntrusted_headers = ['x-a', 'x-b', 'x-user']\n";
    let crossing = format!("{trust}{}{}", policy("a", "x-a", 2), policy("b", "x-b", 9));
    let refused = run_check(&crossing).await;
    assert!(
        refused
            .stderr
            .contains("neither policy is the stricter one"),
        "{refused:?}"
    );
    let upstream = Upstream::echo().await;
    let policies = format!("{}{}", policy("a", "x-a", 4), policy("b", "x-a", 9));
    for in_redis in [false, true] {
        let config = format!("{trust}{policies}");
        let shared = SharedProxies::start(in_redis, &config, upstream.address).await;
        let (one, two) = shared.ends();
        for (proxy, amount, expected) in [
            (one, "1", 200),
            (two, "1", 429),
            (one, "3", 200),
            (two, "2", 429),
            (two, "9", 200),
            (one, "9", 200),
            (two, "9", 429),
            (one, "1", 429),
        ] {
            let request = proxy.request("GET", "/").header("x-user", "ann");
            let reply = request.header("x-a", amount).send().await;
            assert_eq!(reply.status, expected, "{amount}, in Redis: {in_redis}");
        }
    }
}

/// A policy whose requests state their amount beside one with a fixed amount.
#[tokio::test]
async fn stated_and_fixed_amounts_limit_one_usage() {
    let policies = "
[client]
trusted_proxies = ['127.0.0.1']
trusted_headers = ['x-rpm', 'x-user']

[[policy]]
name = 'stated'
counter = 'units'
match = { path = ['/stated', '/both'] }
key = ['header:x-user']
limit = { requests_from = 'header:x-rpm', default = 2, max = 9, per = '100d' }

[[policy]]
name = 'fixed'
counter = 'units'
match = { path = ['/fixed', '/both'] }
key = ['header:x-user']
limit = { requests = 5, per = '100d' }
";
    let upstream = Upstream::echo().await;
    let mut rng = fastrand::Rng::with_seed(21);
    for in_redis in [false, true] {
        let shared = SharedProxies::start(in_redis, policies, upstream.address).await;
        for user in 0..12 {
            let mut used = 0;
            for step in 0..12 {
                let path = ["/stated", "/fixed", "/both"][rng.usize(..3)];
                let stated = rng.u64(..12);
                let amount = match path {
                    "/stated" => stated.min(9),
                    "/fixed" => 5,
                    _ => stated.min(5),
                };
                let is_admitted = used < amount;
                used += u64::from(is_admitted);
                let proxy = &shared.proxies[step % shared.proxies.len()];
                let request = proxy
                    .request("GET", path)
                    .header("x-user", &user.to_string());
                let reply = request.header("x-rpm", &stated.to_string()).send().await;
                let expected = if is_admitted { 200 } else { 429 };
                let context = format!("{path}: {amount} of {used}, in Redis: {in_redis}");
                assert_eq!(reply.status, expected, "{context}");
            }
        }
    }
}

/// Two policies of one counter, of which one is as strict as the other or stricter.
struct ModelPolicies {
    algorithm: &'static str,
    /// `requests` of both limits and the cost, per policy. The first is the stricter one.
    policies: [([u64; 2], u64); 2],
    /// Whether the stricter policy comes last.
    is_reversed: bool,
}

impl ModelPolicies {
    fn draw(rng: &mut fastrand::Rng) -> Self {
        let algorithms = [
            "sliding_log",
            "sliding_window",
            "fixed_window",
            "token_bucket",
        ];
        let strict = [rng.u64(1..12), rng.u64(1..16)];
        let loose = strict.map(|requests| requests + rng.u64(..6));
        Self {
            algorithm: algorithms[rng.usize(..algorithms.len())],
            policies: [(strict, rng.u64(1..4)), (loose, rng.u64(1..4))],
            is_reversed: rng.bool(),
        }
    }

    fn config(&self) -> String {
        let limit = |requests: u64, per: &str| match self.algorithm {
            // One rate: the policies differ in the burst. No unit returns during the test.
            "token_bucket" => format!("requests = 1, burst = {requests}, per = '{per}'"),
            _ => format!("requests = {requests}, per = '{per}'"),
        };
        let texts = self.policies.iter().enumerate().map(|(number, (requests, cost))| {
            let [one, two] = [limit(requests[0], "100d"), limit(requests[1], "200d")];
            format!(
                "[[policy]]\nname = 'p{number}'\ncounter = 'units'\nmatch = {{ path = ['/p{number}', '/both'] }}\n\
                 key = ['header:x-user']\ncost = {cost}\n\
                 limits = [{{ {one}, name = 'one' }}, {{ {two}, name = 'two' }}]\n"
            )
        });
        let mut texts: Vec<String> = texts.collect();
        if self.is_reversed {
            texts.reverse();
        }
        format!(
            "defaults.algorithm = '{}'\n{}",
            self.algorithm,
            texts.concat()
        )
    }

    /// Whether a request is admitted after `used` units, and its cost.
    fn decide(&self, path: &str, used: u64) -> (bool, u64) {
        let [strict, loose] = self.policies;
        let (limits, cost) = match path {
            "/p0" => strict,
            "/p1" => loose,
            // Charged once, at the greatest cost, by the strictest limits.
            _ => (strict.0, strict.1.max(loose.1)),
        };
        (limits.iter().all(|limit| used + cost <= *limit), cost)
    }
}

#[tokio::test]
async fn any_requests_of_either_policy_or_both_are_decided_as_by_the_model() {
    let seed = test_seed();
    let mut rng = fastrand::Rng::with_seed(seed);
    let upstream = Upstream::echo().await;
    for _ in 0..5 {
        let model = ModelPolicies::draw(&mut rng);
        let config = model.config();
        for in_redis in [false, true] {
            let shared = SharedProxies::start(in_redis, &config, upstream.address).await;
            let mut used = [0; 5];
            for _ in 0..60 {
                let (path, user) = (["/p0", "/p1", "/both"][rng.usize(..3)], rng.usize(..5));
                let (is_admitted, cost) = model.decide(path, used[user]);
                let proxy = &shared.proxies[rng.usize(..shared.proxies.len())];
                let request = proxy
                    .request("GET", path)
                    .header("x-user", &user.to_string());
                let status = request.send().await.status;
                let expected = if is_admitted { 200 } else { 429 };
                let context = format!("seed {seed}, {path} after {used:?} in Redis {in_redis}");
                assert_eq!(status, expected, "{context}: {config}");
                used[user] += if is_admitted { cost } else { 0 };
            }
        }
    }
}
