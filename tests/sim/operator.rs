//! What operators do beside the requests: they explain requests, list and reset counters, query a
//! quota by a call with no hits, examine the servers, override keys, and replay requests in memory.
//! Clients ask for their own limits.

use super::instance::InstanceState;
use super::overrides::change_overrides;
use super::redis_server::EPOCH_US;
use super::scenario::{CLOSED_ROUTES, OperatorAction, RequestSpec, Scenario};
use http::{HeaderMap, Method};
use std::sync::Arc;
use std::time::Instant as StdInstant;
use tidegate::clock::Clock;
use tidegate::config::{self, Config, ConfigSources, FileSource};
use tidegate::enforcer::{Enforcer, PolicySnapshot, dry_run_request, explain_request};
use tidegate::limiter::{Algorithm, KeyBuilder, Limit, PolicyCharges};
use tidegate::policy::path::PathInterpretations;
use tidegate::policy::{Descriptor, Facts, PolicyTable, jwt::RequestToken};
use tidegate::store::redis::{CounterInspector, RedisSettings, diagnose_redis};
use tidegate::store::{MemorySettings, MemoryStore, SettlementQueue, Store};
use tidegate::telemetry::metrics::{MetricLabels, Metrics};
use tokio::time::{Instant, sleep_until};

/// The configuration of each instance.
pub(crate) fn load_config(scenario: &Scenario) -> Config {
    let text = scenario.config_text();
    let source = FileSource::Text {
        name: "sim.toml".to_owned(),
        text: text.clone(),
    };
    let sources = ConfigSources {
        file: source,
        ..ConfigSources::default()
    };
    config::load(&sources).unwrap_or_else(|errors| panic!("{errors}\n{text}"))
}

/// Calls `use_facts` with the facts of a request.
pub(crate) async fn with_facts<R>(
    table: &PolicyTable,
    request: &RequestSpec,
    use_facts: impl AsyncFnOnce(&Facts<'_>) -> R,
) -> R {
    let mut headers = HeaderMap::new();
    headers.insert("x-client", request.client.to_string().parse().unwrap());
    headers.insert("x-cost", request.cost.to_string().parse().unwrap());
    if let Some(amount) = request.stated_amount() {
        headers.insert("x-amount", amount.parse().unwrap());
    }
    if let Some(value) = RequestSpec::api_header(request.client) {
        headers.insert("x-api", value.parse().unwrap());
    }
    let path = format!("/r{}", request.route);
    let paths = PathInterpretations::parse(&path, &table.path).unwrap();
    let facts = Facts {
        method: &Method::GET,
        host: "sim",
        paths: &paths,
        query: None,
        headers: &headers,
        client_ip: [127, 0, 0, 1].into(),
        token: RequestToken::without_token_reader(),
        client_cert: None,
        has_joined_headers: false,
        is_peer_trusted: true,
        body: None,
        unreadable_holds: true,
        descriptor: None,
    };
    use_facts(&facts).await
}

/// Runs the operators' actions at one instance. They charge nothing.
pub(crate) async fn run_operators(
    state: Arc<InstanceState>,
    (enforcer, store): (Enforcer, Store),
    scenario: Scenario,
) {
    for operation in &scenario.operations {
        sleep_until(state.network.time.instant_at(operation.at_us)).await;
        let policies = enforcer.policy_snapshot();
        let request = &operation.request;
        match operation.action {
            OperatorAction::Explain => {
                with_facts(&policies.table, request, async |facts| {
                    drop(explain_request(&store, &policies.table, facts).await);
                })
                .await;
                send_to_closed_routes(&enforcer, &policies, request).await;
            }
            OperatorAction::Query => {
                let (route, client) = (request.route.to_string(), request.client.to_string());
                let entries = [("route", route.as_str()), ("client", client.as_str())];
                // Equal descriptors use one counter.
                let descriptors = [(); 2].map(|()| Descriptor::new("sim", &entries, 0, None));
                drop(
                    enforcer
                        .decide_call(&policies, &descriptors, Instant::now())
                        .await,
                );
            }
            OperatorAction::Inspect => inspect_counters(&state).await,
            OperatorAction::OwnLimits => read_own_limits(&enforcer, &policies.table, request).await,
            OperatorAction::Examine => examine_servers(&state).await,
            OperatorAction::Override => {
                change_overrides(&state, &store, &scenario, request).await;
            }
            OperatorAction::Replay => replay_requests(&scenario, &policies.table).await,
        }
    }
}

/// Sends requests that policies reject without a counter.
async fn send_to_closed_routes(
    enforcer: &Enforcer,
    policies: &Arc<PolicySnapshot>,
    request: &RequestSpec,
) {
    for route in CLOSED_ROUTES {
        let request = RequestSpec {
            route,
            ..request.clone()
        };
        with_facts(&policies.table, &request, async |facts| {
            let verdict = enforcer.decide_request(policies, facts, Instant::now());
            drop(verdict.await);
        })
        .await;
    }
}

/// The settings of the simulated servers; `None` for counters in memory.
fn redis_settings(state: &InstanceState) -> Option<RedisSettings> {
    state.redis.as_ref().map(|shared| shared.settings_in_use())
}

/// Reads the limits of the client, charged only to the limit of such questions.
async fn read_own_limits(enforcer: &Enforcer, table: &PolicyTable, request: &RequestSpec) {
    let settings = table.self_service_at("/limits").unwrap();
    with_facts(table, request, async |facts| {
        if let Some(client) = table.client_quotas(facts, true) {
            drop(
                enforcer
                    .read_own_limits(settings, &client, Instant::now())
                    .await,
            );
        }
    })
    .await;
}

/// Examines all servers, and lists the instances.
async fn examine_servers(state: &InstanceState) {
    let Some(settings) = redis_settings(state) else {
        return;
    };
    let algorithms = [
        Algorithm::SlidingLog,
        Algorithm::FixedWindow { offset_us: 0 },
    ];
    drop(diagnose_redis(&settings, &algorithms).await);
    if let Ok(inspector) = CounterInspector::connect(settings).await {
        drop(inspector.list_members().await);
    }
}

/// Lists all counters and those of one policy, and resets a counter that no client uses.
async fn inspect_counters(state: &InstanceState) {
    let Some(settings) = redis_settings(state) else {
        return;
    };
    let Ok(inspector) = CounterInspector::connect(settings).await else {
        return;
    };
    drop(inspector.list_counters(None, 1_000).await);
    drop(inspector.list_counters(Some("p0"), 5).await);
    let limit = Limit {
        requests: 1,
        per_us: 1_000_000,
        algorithm: Algorithm::SlidingLog,
    };
    let key = KeyBuilder::new("unused").finish();
    drop(
        inspector
            .reset_counters(PolicyCharges::new(&limit, &key, 1).charges())
            .await,
    );
}

/// Decides the first requests of the run on counters in memory, at their times.
async fn replay_requests(scenario: &Scenario, table: &PolicyTable) {
    const REPLAYED: usize = 50;
    let (clock, manual_clock) = Clock::manual(EPOCH_US);
    let settings = MemorySettings {
        max_keys: 10_000,
        max_bytes: 1 << 24,
    };
    let memory = Arc::new(MemoryStore::new(settings, clock));
    let metrics = Metrics::new(0, MetricLabels::default()).worker_metrics(0);
    let settlements = SettlementQueue::new(Store::Memory(Arc::clone(&memory)), metrics);
    let now = StdInstant::now();
    for (slot, request) in (1..).zip(scenario.requests.iter().take(REPLAYED)) {
        manual_clock.set_us(EPOCH_US + request.at_us);
        with_facts(table, request, async |facts| {
            drop(dry_run_request(
                (&memory, &settlements),
                table,
                facts,
                (slot, now),
                |_| true,
                |_| {},
            ));
        })
        .await;
    }
}
