//! The migration pages for rate limit services and gateways that the tests cannot run. The
//! products' own documentation gives their examples; models of their documented rules judge seeded
//! traffic.

use super::documentation::read_code_blocks;
use crate::support::prelude::*;
use crate::support::rls_client::messages::rate_limit_response::Code as LimitCode;

/// The entries of one descriptor.
type Entries<'a> = Vec<(&'a str, &'a str)>;

/// Counts of rules by key, within one window.
#[derive(Default)]
struct WindowCounts(HashMap<String, u32>);

impl WindowCounts {
    /// Charges all counters, or none if one has no units left.
    fn charge_all(&mut self, counters: &[(String, u32)]) -> bool {
        let has_room = |(name, most): &(String, u32)| self.0.get(name).unwrap_or(&0) < most;
        let admitted = counters.iter().all(has_room);
        if admitted {
            for (name, _) in counters {
                *self.0.entry(name.clone()).or_default() += 1;
            }
        }
        admitted
    }
}

/// A reproducible sequence of choices.
pub struct SeededChoices(pub u64);

impl SeededChoices {
    pub fn choose<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        &from[(self.0 >> 33) as usize % from.len()]
    }
}

/// The first configuration below `heading`. Short periods become long ones, so that no window ends
/// during the test.
fn page_config(page: &str, heading: &str) -> String {
    let blocks = read_code_blocks(page);
    let found = blocks
        .iter()
        .find(|block| block.heading == heading && block.language == "toml");
    let text = &found
        .unwrap_or_else(|| panic!("{page} has no toml below {heading:?}"))
        .text;
    ["60s", "10s", "1m", "1s", "1d"]
        .iter()
        .fold(text.clone(), |text, per| {
            text.replace(&format!("per = \"{per}\""), "per = \"30d\"")
        })
        .replace("[rls]\n", "[rls]\naddress = '127.0.0.1:0'\n")
}

/// Sends seeded calls and compares each overall code with the model's.
async fn compare_calls(
    config: &str,
    domain: &str,
    calls: &[Vec<Entries<'_>>],
    mut model: impl FnMut(&[Entries<'_>]) -> bool,
) {
    for seed in 1..=3 {
        let mut service = ServiceClient::start(config).await;
        let mut choices = SeededChoices(seed);
        let mut refused = 0;
        for n in 0..400 {
            let call = choices.choose(calls);
            let items = call.iter();
            let descriptors: Vec<_> = items.map(|entries| make_descriptor(entries)).collect();
            let mut request = make_request(&descriptors);
            domain.clone_into(&mut request.domain);
            let answer = service.should_rate_limit(request).await.unwrap();
            let expected = model(call);
            let admitted = answer.overall_code() == LimitCode::Ok;
            assert_eq!(admitted, expected, "seed {seed}, call {n}: {call:?}");
            refused += usize::from(!admitted);
        }
        assert!((20..380).contains(&refused), "seed {seed}: {refused}");
        // The next seed starts with full quotas.
        model(&[]);
    }
}

/// The sandbox's limits of Limitador, by its documented rule: a limit applies to each descriptor
/// that has at least its entries.
#[tokio::test]
async fn limitador_limits_are_translated() {
    let config = page_config("docs/migration/limitador.md", "Example");
    // (entry, whether it must equal, value), variable, units
    type SandboxLimit = (
        &'static [(&'static str, bool, &'static str)],
        Option<&'static str>,
        u32,
    );
    let limits: [SandboxLimit; 4] = [
        (
            &[("req.method", true, "GET"), ("req.path", false, "/json")],
            None,
            10,
        ),
        (
            &[("req.method", true, "POST"), ("req.path", false, "/json")],
            None,
            5,
        ),
        (
            &[("req.method", true, "GET"), ("req.path", true, "/json")],
            None,
            50_000,
        ),
        (&[("keyA", true, "valueA")], Some("varA"), 3),
    ];
    let mut counts = WindowCounts::default();
    let model = |call: &[Entries<'_>]| {
        let Some(entries) = call.first() else {
            counts = WindowCounts::default();
            return true;
        };
        let entries: HashMap<_, _> = entries.iter().copied().collect();
        let applies = |conditions: &[(&str, bool, &str)]| {
            conditions.iter().all(|(name, equal, value)| {
                entries
                    .get(name)
                    .is_some_and(|found| (found == value) == *equal)
            })
        };
        let counters: Vec<_> = limits
            .iter()
            .enumerate()
            .filter(|(_, (conditions, variable, _))| {
                applies(conditions) && variable.is_none_or(|name| entries.contains_key(name))
            })
            .map(|(index, (_, variable, most))| {
                let value = variable.map_or("", |name| entries[name]);
                (format!("{index} {value}"), *most)
            })
            .collect();
        counts.charge_all(&counters)
    };
    let mut calls = Vec::new();
    for method in ["GET", "POST", "PUT"] {
        for path in ["/json", "/get", "/"] {
            calls.push(vec![vec![("req.method", method), ("req.path", path)]]);
        }
    }
    calls.push(vec![vec![
        ("req.method", "GET"),
        ("region", "eu"),
        ("req.path", "/get"),
    ]]);
    calls.push(vec![vec![
        ("req.path", "/json"),
        ("req.method", "POST"),
        ("region", "eu"),
    ]]);
    for value in ["a", "b", "c", "d"] {
        calls.push(vec![vec![
            ("keyA", "valueA"),
            ("region", "eu"),
            ("varA", value),
        ]]);
        calls.push(vec![vec![("keyA", "valueA"), ("varA", value)]]);
        calls.push(vec![vec![("keyA", "valueB"), ("varA", value)]]);
    }
    compare_calls(&config, "test_namespace", &calls, model).await;
}

/// One policy for descriptors with different other entries.
#[tokio::test]
async fn a_limitador_variable_in_any_set_of_entries_has_one_quota() {
    let config = page_config("docs/migration/limitador.md", "Subset matching")
        .replace("requests = 100", "requests = 6");
    let mut counts = WindowCounts::default();
    let model = |call: &[Entries<'_>]| {
        let Some(entries) = call.first() else {
            counts = WindowCounts::default();
            return true;
        };
        let user = entries.iter().find(|(name, _)| *name == "user_id");
        let counters = user.map(|(_, user)| ((*user).to_owned(), 6));
        counts.charge_all(&Vec::from_iter(counters))
    };
    let mut calls = vec![vec![vec![("other", "x")]]];
    for user in ["1", "2"] {
        calls.push(vec![vec![("user_id", user)]]);
        calls.push(vec![vec![("user_id", user), ("region", "eu")]]);
        calls.push(vec![vec![("plan", "free"), ("user_id", user)]]);
    }
    compare_calls(&config, "test_namespace", &calls, model).await;
}

/// The example of Envoy's service, by its documented rule: a descriptor follows the tree of keys,
/// and an entry with the value wins over one without.
#[tokio::test]
async fn rules_of_the_envoy_service_are_translated() {
    let config = page_config("docs/migration/envoy-ratelimit.md", "Only the service")
        .replace("requests = 100,", "requests = 12,")
        .replace("requests = 1000,", "requests = 30,");
    let find_rule = |entries: &Entries<'_>| -> Option<(String, u32)> {
        match entries.as_slice() {
            [("message_type", "marketing"), ("to_number", number)] => {
                Some((format!("marketing {number}"), 5))
            }
            [("to_number", "2065550100")] => Some(("number 2065550100".to_owned(), 30)),
            [("to_number", number)] => Some((format!("number {number}"), 12)),
            _ => None,
        }
    };
    let mut counts = WindowCounts::default();
    let model = |call: &[Entries<'_>]| {
        if call.is_empty() {
            counts = WindowCounts::default();
        }
        // A rejected call charges nothing, as the page says.
        let counters: Vec<_> = call.iter().filter_map(find_rule).collect();
        counts.charge_all(&counters)
    };
    let mut calls = Vec::new();
    for number in ["2065550100", "2065550101", "2065550102"] {
        let to_number = vec![("to_number", number)];
        for kind in ["marketing", "service"] {
            let typed = vec![("message_type", kind), ("to_number", number)];
            // As in the documentation: two descriptors in one call.
            calls.push(vec![typed.clone(), to_number.clone()]);
            calls.push(vec![typed]);
        }
        calls.push(vec![to_number]);
        calls.push(vec![vec![("message_type", "marketing")]]);
    }
    compare_calls(&config, "messaging", &calls, model).await;
}

/// The configuration with counters in memory.
fn without_store(config: &str) -> String {
    match (config.find("[store]"), config.find("[[policy]]")) {
        (Some(store), Some(policies)) if store < policies => {
            format!("{}{}", &config[..store], &config[policies..])
        }
        _ => config.to_owned(),
    }
}

/// A proxy in place of Envoy's filter with its service: each request has the descriptors that the
/// route's actions build.
#[tokio::test]
async fn a_tree_of_descriptors_is_translated() {
    let config = page_config("docs/migration/envoy-ratelimit.md", "A tree of descriptors")
        .replace("requests = 60,", "requests = 40,")
        .replace("requests = 1000,", "requests = 15,")
        .replace("requests = 50000,", "requests = 30,");
    let upstream = Upstream::echo().await;
    let proxy = Proxy::setup(&without_store(&config))
        .upstream(upstream.address)
        .env("TIDEGATE_CLIENT__TRUSTED_PROXIES", "127.0.0.1");
    let proxy = proxy.start().await;
    let (mut counts, mut choices) = (WindowCounts::default(), SeededChoices(5));
    let mut refused = 0;
    for n in 0..300 {
        let client = *choices.choose(&["192.0.2.1", "192.0.2.2", "192.0.2.3"]);
        let user = *choices.choose(&["", "ann", "bob", "acme"]);
        let mut request = proxy.request("GET", "/").header("X-Forwarded-For", client);
        let mut counters = vec![(client.to_owned(), 40)];
        if !user.is_empty() {
            request = request.header("X-User-Id", user);
            counters.push((user.to_owned(), if user == "acme" { 30 } else { 15 }));
        }
        let admitted = request.send().await.status == 200;
        assert_eq!(admitted, counts.charge_all(&counters), "{n}: {counters:?}");
        refused += usize::from(!admitted);
    }
    assert!((50..280).contains(&refused), "{refused}");
}

/// Rules of a `BackendTrafficPolicy`, by their documentation: a request is refused if any rule whose
/// conditions hold is exceeded, and a header that is absent fits no condition.
#[tokio::test]
async fn rules_of_envoy_gateway_are_translated() {
    let config = page_config("docs/migration/envoy-ratelimit.md", "Envoy Gateway")
        .replace("requests = 1000,", "requests = 120,")
        .replace("requests = 100,", "requests = 9,");
    let config = config.replace("[client]\n", "[client]\ntrusted_proxies = ['127.0.0.1']\n");
    let proxy = Proxy::with_echo(&config).await;
    let (mut counts, mut choices, mut refused) = (WindowCounts::default(), SeededChoices(21), 0);
    for n in 0..300 {
        let client = *choices.choose(&["192.0.2.1", "192.0.2.2", "192.0.2.3"]);
        let user = *choices.choose(&["", "", "ann", "bob", "cid"]);
        let plan = *choices.choose(&["", "free", "gold"]);
        let mut counters = vec![("route".to_owned(), 120)];
        let mut request = proxy.request("GET", "/").header("X-Forwarded-For", client);
        if !user.is_empty() {
            request = request.header("X-User-Id", user);
            counters.push((format!("user {user}"), 9));
        }
        if !plan.is_empty() {
            request = request.header("X-Plan", plan);
        }
        if plan == "free" {
            counters.push((format!("free {client}"), 10));
        }
        let expected = counts.charge_all(&counters);
        let status = request.send().await.status;
        assert_eq!(status, if expected { 200 } else { 429 }, "request {n}");
        refused += usize::from(!expected);
    }
    assert!((100..250).contains(&refused), "{refused}");
}

/// Status of the n-th request, for the examples in the documentation of Kong and APISIX.
async fn statuses_of_page(page: &str, heading: &str, target: &str, times: usize) -> Vec<u16> {
    let config = without_store(&page_config(page, heading));
    let proxy = Proxy::with_echo(&config).await;
    proxy.get_statuses(target, times).await
}

#[tokio::test]
async fn examples_of_kong_and_apisix_admit_the_documented_number() {
    let statuses = statuses_of_page("docs/migration/kong.md", "Example", "/orders/1", 7).await;
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429, 429]);
    let statuses = statuses_of_page("docs/migration/kong.md", "Example", "/other", 7).await;
    assert_eq!(statuses, [200; 7], "another route");
    let page = "docs/migration/apisix.md";
    let statuses = statuses_of_page(page, "limit-count", "/", 4).await;
    assert_eq!(statuses, [200, 200, 503, 503]);
    let statuses = statuses_of_page(page, "limit-req", "/", 4).await;
    assert_eq!(
        statuses,
        [200, 200, 200, 503],
        "rate, and burst without delay"
    );
}

/// Sends seeded requests of several clients, and compares each decision with the model: the counter
/// and the limit of a path and a client.
async fn compare_with_most_specific(
    page: &str,
    heading: &str,
    paths: &[&str],
    rejected: u16,
    model: impl Fn(&str, &str) -> (String, u32),
) {
    let config = format!(
        "client.trusted_proxies = ['127.0.0.1']\n{}",
        page_config(page, heading)
    );
    let proxy = Proxy::with_echo(&config).await;
    let (mut counts, mut choices, mut refused) = (WindowCounts::default(), SeededChoices(9), 0);
    for n in 0..80 {
        let path = *choices.choose(paths);
        let client = *choices.choose(&["192.0.2.1", "192.0.2.2", "192.0.2.3"]);
        let request = proxy.request("GET", path).header("X-Forwarded-For", client);
        let expected = counts.charge_all(&[model(path, client)]);
        let status = request.send().await.status;
        let wanted = if expected { 200 } else { rejected };
        assert_eq!(status, wanted, "{page}, request {n}: {path} from {client}");
        refused += usize::from(!expected);
    }
    assert!((5..75).contains(&refused), "{page}: {refused}");
}

/// Kong's documented precedence and its handler: a request is counted by one plugin instance.
#[tokio::test]
async fn kong_plugins_do_not_add_up() {
    let page = "docs/migration/kong.md";
    let paths = ["/orders/1", "/orders/2/items", "/", "/other"];
    let model = |path: &str, client: &str| match path.starts_with("/orders/") {
        true => (format!("orders {client}"), 12),
        false => (format!("global {client}"), 8),
    };
    compare_with_most_specific(page, "The most specific plugin", &paths, 429, model).await;
    let model = |path: &str, client: &str| match path {
        "/login" => ("/login".to_owned(), 5),
        _ => (client.to_owned(), 5),
    };
    let paths = ["/login", "/login/x", "/", "/other"];
    compare_with_most_specific(page, "limit_by: path", &paths, 429, model).await;
}

#[tokio::test]
async fn apisix_plugins_do_not_add_up() {
    let model = |path: &str, client: &str| match path {
        "/search" => (format!("search {client}"), 7),
        _ => (format!("service {client}"), 4),
    };
    let paths = ["/search", "/search?q=1", "/", "/other"];
    let model = |path: &str, client: &str| model(path.split('?').next().unwrap(), client);
    let page = "docs/migration/apisix.md";
    compare_with_most_specific(page, "The most specific plugin", &paths, 503, model).await;
}

#[tokio::test]
async fn apisix_limit_conn_admits_one_request_at_a_time() {
    let silent = RawUpstream::silent().await;
    let config = page_config("docs/migration/apisix.md", "limit-conn");
    let proxy = Proxy::start(&config, silent.address).await;
    let _first = proxy
        .send_raw("GET / HTTP/1.1\r\nHost: a\r\nX-User: ann\r\n\r\n")
        .await;
    wait_until("the request", async || silent.connection_count() > 0).await;
    let ask = |user: &str| proxy.request("GET", "/").header("X-User", user);
    assert_eq!(ask("ann").send().await.status, 503);
    let other = timeout(Duration::from_millis(300), ask("bob").send()).await;
    assert!(other.is_err(), "another user's request waits for the app");
}

/// Requests behind Kong: each consumer has a quota, and all others share one per address.
#[tokio::test]
async fn kong_consumers_have_their_own_quotas() {
    let blocks = read_code_blocks("docs/migration/kong.md");
    let config = blocks
        .iter()
        .find(|block| block.text.contains("x-consumer-id"))
        .unwrap();
    let config = config
        .text
        .replace("per = \"1m\"", "per = \"1h\"")
        .replace("10.0.0.0/8", "127.0.0.1");
    let proxy = Proxy::with_echo(&config).await;
    let ask = async |consumer: Option<&str>, address: &str| {
        let mut request = proxy.request("GET", "/").header("X-Forwarded-For", address);
        if let Some(consumer) = consumer {
            request = request.header("X-Consumer-ID", consumer);
        }
        request.send().await.status
    };
    for n in 0..101 {
        let expected = if n < 100 { 200 } else { 429 };
        assert_eq!(ask(Some("ann"), &format!("192.0.2.{n}")).await, expected);
        assert_eq!(ask(None, "198.51.100.1").await, expected);
    }
    assert_eq!(ask(Some("bob"), "192.0.2.1").await, 200);
    assert_eq!(ask(None, "198.51.100.2").await, 200);
}
