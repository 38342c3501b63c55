//! One instance: the real enforcer and store on a runtime of its own, and its requests.

use crate::sim::network::{InstanceNetwork, InstanceTime, SimulatedTransport};
use crate::sim::operator::{load_config, run_operators, with_facts};
use crate::sim::redis_server::{NEW_PASSWORD, PASSWORD};
use crate::sim::scenario::{HOUR, RequestSpec, Scenario};
use crate::sim::stream::{StreamRecord, pass_stream};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tidegate::clock::Clock;
use tidegate::config::StoreSettings;
use tidegate::enforcer::DecisionSource;
use tidegate::enforcer::{ActivePolicies, Enforcer, RequestOutcome, RetryHint, Verdict};
use tidegate::limiter::{Algorithm, CounterScope, Key, KeyBuilder, Limit, PolicyCharges};
use tidegate::policy::{ActualCost, Descriptor};
use tidegate::store::redis::{
    RedisCredentials, RedisDialer, RedisPassword, RedisSettings, RedisStore, SharedRedisState,
};
use tidegate::store::{LeasePool, MemoryStore, Store};
use tidegate::telemetry::metrics::{MetricLabels, Metrics};
use tokio::runtime::{Builder, Runtime};
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// Connection ids of one process start at a multiple of this.
const IDS_PER_PROCESS: u64 = 1 << 32;

/// A timer fires at most so much later than it should.
const TIMER_TICK: Duration = Duration::from_millis(1);

/// What happened to one request.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestRecord {
    pub(crate) arrived_us: Option<u64>,
    pub(crate) decided_us: Option<u64>,
    pub(crate) outcome: Outcome,
    pub(crate) is_degraded: bool,
    pub(crate) is_from_redis: bool,
    pub(crate) is_from_lease: bool,
    pub(crate) forwarded_us: Option<u64>,
    pub(crate) ended_us: Option<u64>,
    /// The response was complete, so that the actual cost is known.
    pub(crate) is_settled: bool,
    /// What passed of a response that may be cut off.
    pub(crate) stream: Option<StreamRecord>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It did not arrive, its client left, or its instance ended.
    #[default]
    Unknown,
    Forwarded,
    Refused {
        retry_after_us: Option<u64>,
    },
    /// 503.
    Unavailable,
}

pub(crate) type RequestLog = Arc<Mutex<Vec<RequestRecord>>>;

pub(crate) struct Instance {
    /// `None` after the end.
    runtime: Option<Runtime>,
    pub(crate) network: Arc<InstanceNetwork>,
    shared: Arc<InstanceState>,
    pub(crate) is_frozen: bool,
    /// SIGTERM arrived at this time.
    terminating_us: Option<u64>,
}

pub(crate) struct InstanceState {
    enforcers: Mutex<Vec<Enforcer>>,
    pub(crate) redis: Option<Arc<SharedRedisState>>,
    log: RequestLog,
    pub(crate) network: Arc<InstanceNetwork>,
    is_rate_limit_service: bool,
    has_pod_policy: bool,
    is_stopping: Mutex<bool>,
}

impl Instance {
    /// Starts the process number `process` of the run. `requests` have their indexes in the log.
    pub(crate) fn start(
        scenario: &Scenario,
        (process, now_us): (u64, u64),
        state_dir: Option<PathBuf>,
        requests: Vec<(usize, RequestSpec)>,
        log: RequestLog,
    ) -> Self {
        let runtime = Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        let guard = runtime.enter();
        let time = InstanceTime::starting_at(now_us);
        let network = Arc::new(InstanceNetwork::new(time, process * IDS_PER_PROCESS));
        let (state, stores) =
            runtime.block_on(async { build_state(scenario, (process, state_dir), &network, log) });
        let shared = Arc::new(state);
        let workers = stores
            .first()
            .cloned()
            .zip(shared.enforcers.lock().unwrap().first().cloned());
        let is_operated = process & 0xff == 0 && !scenario.operations.is_empty();
        if let (Some((store, enforcer)), true) = (workers, is_operated) {
            let mut scenario = scenario.clone();
            scenario
                .operations
                .retain(|operation| operation.at_us >= now_us);
            runtime.spawn(run_operators(
                Arc::clone(&shared),
                (enforcer, store),
                scenario,
            ));
        }
        let redis_stores = stores.into_iter().filter_map(|store| match store {
            Store::Redis(path) => Some(path.redis),
            Store::Memory(_) => None,
        });
        runtime.spawn(serve_requests(
            Arc::clone(&shared),
            redis_stores.collect(),
            requests,
        ));
        drop(guard);
        Self {
            runtime: Some(runtime),
            network,
            shared,
            is_frozen: false,
            terminating_us: None,
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.runtime.is_some()
    }

    pub(crate) fn now_us(&self) -> u64 {
        match &self.runtime {
            Some(runtime) => {
                let _guard = runtime.enter();
                self.network.time.now_us()
            }
            None => u64::MAX,
        }
    }

    /// Runs until a time, or until the instance acts at a connection.
    pub(crate) fn run_until(&mut self, at_us: u64) {
        let (Some(runtime), network) = (&self.runtime, &self.network) else {
            return;
        };
        let horizon = network.time.instant_at(at_us);
        runtime.block_on(async {
            tokio::select! {
                biased;
                () = network.acted.notified() => {}
                () = sleep_until(horizon) => {}
            }
        });
    }

    /// Continues after a pause of the whole process: all its timers are late. The monotonic clock
    /// does not include the pause of a suspended machine.
    pub(crate) fn thaw(&mut self, at_us: u64, is_suspended: bool) {
        self.is_frozen = false;
        let late_us = at_us.saturating_sub(self.now_us());
        if is_suspended && self.is_running() {
            let suspended_us = &self.network.time.steps.suspended_us;
            suspended_us.fetch_add(late_us, Ordering::Relaxed);
            return;
        }
        if let (Some(runtime), true) = (&self.runtime, late_us > 0) {
            runtime.block_on(tokio::time::advance(Duration::from_micros(late_us)));
        }
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.runtime = None;
        self.shared.enforcers.lock().unwrap().clear();
        self.network.sort_actions();
    }

    /// SIGTERM: accepts no further requests, and ends.
    pub(crate) fn terminate(&mut self, at_us: u64) {
        *self.shared.is_stopping.lock().unwrap() = true;
        self.terminating_us = Some(at_us);
        if let Some(runtime) = &self.runtime {
            let shared = Arc::clone(&self.shared);
            runtime.spawn(async move {
                let enforcers = shared.enforcers.lock().unwrap().clone();
                futures_util::future::join_all(enforcers.iter().map(Enforcer::shut_down)).await;
                if let Some(redis) = &shared.redis {
                    redis.store_usage();
                }
            });
        }
    }

    /// As after a change of the file with the password.
    pub(crate) fn load_new_login(&self) {
        if let (Some(runtime), Some(redis)) = (&self.runtime, &self.shared.redis) {
            let _guard = runtime.enter();
            redis.update_logins(&RedisSettings {
                credentials: build_login(NEW_PASSWORD),
                ..redis.settings_in_use()
            });
        }
    }

    /// The slots and units in use of the policy `pod`. `None` without that policy or a process.
    pub(crate) fn pod_usage(&self) -> Option<(u64, u64)> {
        if !self.shared.has_pod_policy {
            return None;
        }
        let key = KeyBuilder::with_scope("pod", CounterScope::Instance).finish();
        let used = |per_us: u64, algorithm: Algorithm| {
            let limit = Limit {
                requests: 1 << 40,
                per_us,
                algorithm,
            };
            self.used_units(&key, &limit)
        };
        let slots = used(HOUR, Algorithm::Concurrency { max_duration_us: 0 })?;
        let units = used(300 * 24 * HOUR, Algorithm::SlidingLog)?;
        Some((slots, units))
    }

    /// The units in use of a counter of this process.
    pub(crate) fn used_units(&self, key: &Key, limit: &Limit) -> Option<u64> {
        let counters = self.shared.redis.as_ref()?.instance_counters();
        let _guard = self.runtime.as_ref()?.enter();
        let decision = counters.decide(&[PolicyCharges::new(limit, key, 0)]);
        decision
            .outcomes()
            .next()
            .unwrap()
            .status
            .map(|status| limit.capacity() - status.remaining)
    }

    /// The instances that share the limits, as this one has counted them.
    pub(crate) fn instance_count(&self) -> Option<u32> {
        self.shared
            .redis
            .as_ref()
            .map(|shared| shared.instance_count())
    }

    pub(crate) fn is_redis_up(&self) -> bool {
        self.shared
            .redis
            .as_ref()
            .is_none_or(|shared| shared.is_up())
    }
}

fn build_state(
    scenario: &Scenario,
    (process, state_dir): (u64, Option<PathBuf>),
    network: &Arc<InstanceNetwork>,
    log: RequestLog,
) -> (InstanceState, Vec<Store>) {
    let config = load_config(scenario);
    let clock = Clock::simulated(
        crate::sim::redis_server::EPOCH_US + network.time.now_us(),
        network.time.steps.clone(),
    );
    let metrics = Metrics::new(scenario.workers, MetricLabels::default());
    let policies = ActivePolicies::new(&config.policy_table, Arc::clone(&metrics), 1);
    let leases = Arc::new(LeasePool::new(clock.clone()));
    let (memory, redis) = match config.store {
        StoreSettings::Memory(settings) => {
            (Some(Arc::new(MemoryStore::new(settings, clock))), None)
        }
        StoreSettings::Redis(mut settings) => {
            settings.dialer =
                RedisDialer::Simulated(Arc::new(SimulatedTransport(Arc::clone(network))));
            let id = format!("{:032x}", u128::from(process) * 0x9e37_79b9_7f4a_7c15_f39c);
            settings.state_dir = state_dir;
            if scenario.has_login() {
                settings.credentials = build_login(PASSWORD);
            }
            let shared = SharedRedisState::for_instance(*settings, clock, &id);
            shared.restore_usage();
            (None, Some(shared))
        }
    };
    let mut stores = Vec::new();
    let enforcers = (0..scenario.workers).map(|worker| {
        let store = match (&memory, &redis) {
            (Some(memory), _) => Store::Memory(Arc::clone(memory)),
            (None, Some(shared)) => {
                let redis = RedisStore::start(shared).join_membership();
                Store::from_redis(redis).with_shared_leases(&leases)
            }
            (None, None) => unreachable!("a store is configured"),
        };
        stores.push(store.clone());
        Enforcer::new(policies.clone(), store, metrics.worker_metrics(worker))
    });
    let enforcers = Mutex::new(enforcers.collect());
    let state = InstanceState {
        enforcers,
        redis,
        log,
        network: Arc::clone(network),
        is_rate_limit_service: scenario.is_rate_limit_service,
        has_pod_policy: scenario.has_pod_policy(),
        is_stopping: Mutex::new(false),
    };
    (state, stores)
}

fn build_login(password: &str) -> RedisCredentials {
    RedisCredentials {
        username: None,
        password: Some(RedisPassword::new(password.to_owned())),
    }
}

/// Starts each request at its time; late after a pause.
async fn serve_requests(
    state: Arc<InstanceState>,
    stores: Vec<RedisStore>,
    requests: Vec<(usize, RequestSpec)>,
) {
    // As a proxy, which listens when its stores are connected, or after the timeout.
    for store in stores {
        store.wait_until_ready().await;
    }
    for (index, request) in requests {
        sleep_until(state.network.time.instant_at(request.at_us)).await;
        if *state.is_stopping.lock().unwrap() {
            return;
        }
        let enforcer = {
            let enforcers = state.enforcers.lock().unwrap();
            match enforcers.get(request.worker % enforcers.len().max(1)) {
                Some(enforcer) => enforcer.clone(),
                None => return,
            }
        };
        let state = Arc::clone(&state);
        tokio::spawn(async move {
            let served = serve_request(&state, &enforcer, index, &request);
            match request.leaves_after_us {
                None => served.await,
                Some(after_us) => drop(timeout(Duration::from_micros(after_us), served).await),
            }
            state.record(index, |record, now_us| record.ended_us = Some(now_us));
        });
    }
}

async fn serve_request(
    state: &InstanceState,
    enforcer: &Enforcer,
    index: usize,
    request: &RequestSpec,
) {
    // Timers fire once per millisecond, but requests do not arrive together.
    let expected_at = state.network.time.instant_at(request.at_us);
    let arrived = expected_at.max(Instant::now() - TIMER_TICK);
    state.record(index, |record, now_us| record.arrived_us = Some(now_us));
    if request.pause_us > 0 {
        sleep(Duration::from_micros(request.pause_us)).await;
    }
    let policies = enforcer.policy_snapshot();
    let (client, route) = (request.client.to_string(), request.route.to_string());
    let entries = [("route", route.as_str()), ("client", client.as_str())];
    let descriptors = [Descriptor::new("sim", &entries, request.cost, None)];
    let mut verdict = if state.is_rate_limit_service {
        let call = enforcer.decide_call(&policies, &descriptors, arrived).await;
        call.verdict
    } else {
        with_facts(&policies.table, request, async |facts| {
            enforcer.decide_request(&policies, facts, arrived).await
        })
        .await
    };
    state.record(index, |record, now_us| record.set_verdict(&verdict, now_us));
    if !matches!(verdict.outcome, RequestOutcome::Forward) {
        return;
    }
    let slot_guard = verdict.slot_guard.take();
    let estimates = std::mem::take(&mut verdict.estimated_charges);
    sleep(verdict.delay).await;
    state.record(index, |record, now_us| record.forwarded_us = Some(now_us));
    sleep(Duration::from_micros(request.service_us)).await;
    let (streamed, estimates): (Vec<_>, Vec<_>) =
        estimates.into_iter().partition(|one| one.slices.is_some());
    for estimate in estimates {
        if let Some(actual) = request.actual {
            state.record(index, |record, _| record.is_settled = true);
            match estimate.cost.actual {
                ActualCost::Status(_) => estimate.settle_by_status(request.status()),
                _ => estimate.settle(actual),
            }
        }
    }
    if let (Some(stream), false) = (request.stream, streamed.is_empty()) {
        let record = |change: &dyn Fn(&mut StreamRecord, u64)| {
            state.record(index, |record, now_us| {
                change(record.stream.get_or_insert_default(), now_us);
            });
        };
        pass_stream(stream, streamed, record).await;
    }
    state.record(index, |record, now_us| record.ended_us = Some(now_us));
    drop(slot_guard);
}

impl InstanceState {
    fn record(&self, index: usize, change: impl FnOnce(&mut RequestRecord, u64)) {
        change(
            &mut self.log.lock().unwrap()[index],
            self.network.time.now_us(),
        );
    }
}

impl RequestRecord {
    fn set_verdict(&mut self, verdict: &Verdict<'_>, now_us: u64) {
        self.decided_us = Some(now_us);
        self.is_degraded = verdict.is_degraded;
        self.is_from_redis = verdict.source == Some(DecisionSource::Redis);
        self.is_from_lease = verdict.source == Some(DecisionSource::Lease);
        self.outcome = match &verdict.outcome {
            RequestOutcome::Forward => Outcome::Forwarded,
            RequestOutcome::Limited(rejection) => Outcome::Refused {
                retry_after_us: match rejection.retry {
                    RetryHint::After(us) => Some(us),
                    _ => None,
                },
            },
            RequestOutcome::Unavailable { .. } => Outcome::Unavailable,
            other => panic!("unexpected verdict {other:?}"),
        };
    }
}
