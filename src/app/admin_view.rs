//! Connects the admin endpoint to the other modules.

use super::SharedState;
use super::key_status::{
    ResolvedKey, describe_policy, find_limiting_policy, resolve_key, resolve_override_key,
};
use super::listener_set::ListenerSet;
use super::override_store::{OverrideChange, OverrideStore, sort_listing};
use super::overrides::{
    OverrideInput, describe_stored_override, override_from_json, resolve_override,
};
use super::shutdown::begin_drain;
use super::store_backend::{StoreBackend, connect};
use super::{doctor, explanation};
use crate::admin::{
    AdminBackend, AdminError, AdminFuture, AdminSettings, AdminState, AdvertisedAddress,
    DoctorReport, DrainDocument, ExplainRequest, ExplanationDocument, FleetInstanceDocument,
    FleetMembers, KeyDocument, KeyQuery, KeyResetDocument, OverrideDocument, OverrideListDocument,
    OverrideRemovalDocument, OverviewInstance, PolicyDocument, PolicyPage, PolicySelection,
};
use crate::clock::{self, Clock};
use crate::config::Config;
use crate::listen::ListenAddress;
use crate::policy::{OnStoreFailure, Policy, PolicyTable};
use crate::proxy::{ListenerKind, OpenConnections, ShutdownSignal};
use crate::reload;
use crate::store::redis::{self, MemberDescription, MemberList, RedisOutage, SharedRedisState};
use crate::telemetry::history::TrafficHistory;
use crate::telemetry::metrics::{
    ConnectionCounts, MemoryStoreUsage, ProcessPhase, ProcessStatus, StoreOutage, StoreStatus,
};
use crate::telemetry::trace::Tracer;
use parking_lot::Mutex;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap};
use std::env;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};
use tokio::task::spawn_local;
use tokio::time::timeout;

/// Maximum number of concurrent store lookups. Each lookup may open connections of its own.
const MAX_CONCURRENT_LOOKUPS: usize = 4;

/// Minimum time between two examinations of the store. Until then, the last report is returned.
const DOCTOR_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum duration of a listing, which scans all keys of Redis: less than the deadline of a
/// response, so that the reason reaches the caller.
const LISTING_TIMEOUT: Duration = Duration::from_secs(8);

/// Handles to the state that the admin endpoint reads, and to the shutdown that it can start.
pub(super) struct AdminViewState {
    pub(super) shutdown: watch::Sender<ShutdownSignal>,
    /// The configuration at the start.
    pub(super) config: Arc<Config>,
    pub(super) shared: Arc<SharedState>,
    /// Set once clients can connect.
    pub(super) is_listening: Arc<AtomicBool>,
    pub(super) load: Arc<OpenConnections>,
    pub(super) reload_status: Arc<Mutex<reload::ReloadStatus>>,
    pub(super) listeners: ListenerSet,
    pub(super) started_at: Instant,
    pub(super) lookups: StoreLookups,
}

/// Selects the permits for a kind of lookups.
type SelectPermits = fn(&StoreLookups) -> &Semaphore;

const LISTINGS: SelectPermits = |own| &own.listings;
const EXAMINATIONS: SelectPermits = |own| &own.examinations;
const OTHERS: SelectPermits = |own| &own.others;

/// Bounds concurrent store lookups. A listing takes long, so it must not delay a change.
pub(super) struct StoreLookups {
    last_examination: Mutex<Option<(Instant, DoctorReport)>>,
    listings: Semaphore,
    examinations: Semaphore,
    others: Semaphore,
}

impl Default for StoreLookups {
    fn default() -> Self {
        Self {
            last_examination: Mutex::default(),
            listings: Semaphore::new(1),
            examinations: Semaphore::new(1),
            others: Semaphore::new(MAX_CONCURRENT_LOOKUPS),
        }
    }
}

impl AdminViewState {
    /// Wraps the handles for the admin endpoint.
    pub(super) fn into_backend(self, history: Arc<TrafficHistory>) -> AdminBackend {
        let instance = OverviewInstance {
            id: redis::instance_id().to_owned(),
            host: instance_name(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started_s: clock::unix_time_s(),
            uptime_s: 0,
            workers: self.config.listen.threads,
        };
        AdminBackend {
            instance,
            metrics: Arc::clone(&self.shared.metrics),
            history,
            state: Arc::new(self),
        }
    }
}

impl AdminState for AdminViewState {
    fn read_status(&self) -> ProcessStatus {
        let redis = self.shared.store_backend.redis();
        let snapshot = self.shared.active_policies.load_snapshot();
        let policies = snapshot.table.policies();
        let counts_here = redis.is_none() || policies.iter().any(Policy::is_instance_scoped);
        let memory = self.shared.store_backend.memory();
        let memory = counts_here.then(|| MemoryStoreUsage {
            keys: memory.key_count(),
            bytes: memory.byte_count(),
            evictions: memory.eviction_count(),
        });
        let reload = self.reload_status.lock();
        ProcessStatus {
            phase: self.current_phase(),
            uptime_s: self.started_at.elapsed().as_secs(),
            policy_count: policies.len(),
            connections: ConnectionCounts {
                open: self.load.open_connections(),
                max: self.config.listen.max_connections,
                full: self.load.connection_limit_hits(),
            },
            panics: self.load.panic_count(),
            store: StoreStatus {
                kind: redis.map_or("memory", |_| "redis").into(),
                address: redis.map_or_else(String::new, |redis| redis.settings.to_string()),
                up: redis.is_none_or(SharedRedisState::is_up),
                breaker_open: redis.is_some_and(SharedRedisState::is_breaker_open),
                outage: self.describe_outage(),
                errors: BTreeMap::new(),
                instances: redis.map(SharedRedisState::instance_count),
                lease_units_lost: match &self.shared.store_backend {
                    StoreBackend::Memory(_) => None,
                    StoreBackend::Redis(_, leases) => Some(leases.lost_units()),
                },
                memory,
            },
            store_errors: redis.map_or(Vec::new(), |redis| redis.error_counts().collect()),
            key_fetches: self.shared.key_fetcher.fetch_counts(),
            spans: self.shared.tracer.as_ref().map(Tracer::span_counts),
            redis: redis.map(SharedRedisState::server_info),
            config_generation: reload.generation,
            last_reload: reload.last.clone(),
            config_json: Arc::clone(&reload.effective_json),
            config_applied_at_s: reload.applied_at_unix_s,
            config_hash: reload.config_hash,
            config_warnings: reload.warnings.clone(),
            certificates: self.listeners.certificate_expiries(),
        }
    }

    fn start_drain(&self) -> DrainDocument {
        begin_drain(&self.shutdown, "admin");
        let shutdown = &self.config.shutdown;
        DrainDocument {
            status: "stopping".to_owned(),
            delay_s: shutdown.delay.as_secs_f64(),
            grace_s: shutdown.grace.as_secs_f64(),
        }
    }

    /// Returns the selected policies in the order in which they apply; disabled ones come last.
    fn select_policies(&self, selection: &PolicySelection) -> PolicyPage {
        let (snapshot, descriptions) = (
            self.shared.active_policies.load_snapshot(),
            self.shared.policy_descriptions.load(),
        );
        let search = selection.search.to_lowercase();
        let is_selected = |name: &str| {
            (selection.names.is_empty() || selection.names.iter().any(|selected| selected == name))
                && (search.is_empty() || name.to_lowercase().contains(&search))
        };
        let sentences: HashMap<&str, &str> = descriptions
            .iter()
            .map(|described| (&*described.policy, described.sentence.as_str()))
            .collect();
        let policies = snapshot.table.policies().iter();
        let active = policies.zip(snapshot.counters());
        let active = active.map(|(policy, counters)| (&*policy.name, Some((policy, counters))));
        let disabled = descriptions.iter().filter(|described| described.is_off);
        let disabled = disabled.map(|described| (&*described.policy, None));
        let mut selected: Vec<_> = active
            .chain(disabled)
            .filter(|(name, _)| is_selected(name))
            .collect();
        let last = usize::MAX;
        selected.sort_by_key(|(name, _)| selection.ranks.get(*name).map_or(last, |at| *at));
        let total = selected.len();
        let page = selected.into_iter().skip(selection.offset);
        let page = page.take(selection.limit).map(|(name, active)| {
            let described = PolicyDocument {
                name: name.to_owned(),
                mode: "off".to_owned(),
                words: sentences.get(name).copied().unwrap_or_default().to_owned(),
                ..PolicyDocument::default()
            };
            match active {
                Some((policy, counters)) => (
                    describe_policy(policy, described),
                    Some(Arc::clone(counters)),
                ),
                None => (described, None),
            }
        });
        PolicyPage {
            total,
            policies: page.collect(),
        }
    }

    fn list_members(self: Arc<Self>) -> AdminFuture<FleetMembers> {
        self.look_up(OTHERS, async move |view, _| {
            let Some(redis) = view.shared.store_backend.redis() else {
                return Ok(FleetMembers::default());
            };
            let list = connect(redis).await?.list_members().await?;
            Ok(to_fleet_members(list))
        })
    }

    fn inspect_key(self: Arc<Self>, query: KeyQuery) -> AdminFuture<KeyDocument> {
        self.look_up(OTHERS, async move |view, table| {
            let resolved_key = resolve_key(table, &query.policy, &query.values)?;
            Ok(KeyDocument {
                counters: Some(view.redis_counter_keys(&resolved_key)),
                ..resolved_key.inspect(&view.shared.store_backend).await?
            })
        })
    }

    fn reset_key(self: Arc<Self>, query: KeyQuery) -> AdminFuture<KeyResetDocument> {
        self.look_up(OTHERS, async move |view, table| {
            let resolved_key = resolve_key(table, &query.policy, &query.values)?;
            let limit = query.limit.as_deref();
            let reset = resolved_key
                .reset_counters(&view.shared.store_backend, limit)
                .await?;
            // The log line omits the values of the key, because clients choose them.
            tracing::info!(
                policy = query.policy,
                key = format!("{:032x}", resolved_key.key.id()),
                limit,
                counters = reset.counters_forgotten,
                "key reset by an operator"
            );
            Ok(reset)
        })
    }

    fn list_overrides(
        self: Arc<Self>,
        policy: String,
        limit: usize,
    ) -> AdminFuture<OverrideListDocument> {
        self.look_up(LISTINGS, async move |view, table| {
            let store = OverrideStore::open(&view.shared.store_backend).await?;
            find_limiting_policy(table, &policy)?;
            let mut found = Vec::new();
            let visited = store.visit(|stored| {
                if stored.key.policy_name() == policy {
                    found.push(stored);
                }
                found.len() <= limit
            });
            let visited = timeout(LISTING_TIMEOUT, visited).await;
            visited.map_err(|_elapsed| AdminError::Unavailable(format!(
                "the listing did not finish within {} s, because Redis has too many keys; \
                 expected a single key, or the command `tidegate overrides list`, which has no timeout",
                LISTING_TIMEOUT.as_secs()
            )))??;
            let (listed, more) = sort_listing(found, limit);
            Ok(OverrideListDocument {
                overrides: listed.iter().map(describe_stored_override).collect(),
                more,
            })
        })
    }

    fn find_override(self: Arc<Self>, query: KeyQuery) -> AdminFuture<OverrideListDocument> {
        self.look_up(OTHERS, async move |view, table| {
            let store = OverrideStore::open(&view.shared.store_backend).await?;
            let key = resolve_override_key(table, &query.policy, &query.values)?;
            let found = store.find(&key).await?;
            Ok(OverrideListDocument {
                overrides: found.iter().map(describe_stored_override).collect(),
                more: false,
            })
        })
    }

    fn set_override(
        self: Arc<Self>,
        policy: String,
        fields: Map<String, Value>,
        keeps_other_limits: bool,
    ) -> AdminFuture<OverrideDocument> {
        self.look_up(OTHERS, async move |view, table| {
            let store = OverrideStore::open(&view.shared.store_backend).await?;
            let now_us = Clock::system().now_us();
            let input = override_from_json(&fields, now_us).map_err(AdminError::InvalidRequest)?;
            if !input.policy.is_empty() && input.policy != policy {
                return Err(AdminError::InvalidRequest(format!(
                    "policy: {:?}; expected {policy:?}, as in the path",
                    input.policy
                )));
            }
            let input = OverrideInput { policy, ..input };
            let entered = resolve_override(table, &input, now_us)?;
            let (stored, change) = if keeps_other_limits {
                store.merge(&entered, now_us).await?
            } else {
                let change = store.set(&entered).await?;
                (entered, change)
            };
            change.iter().for_each(OverrideChange::log);
            Ok(describe_stored_override(&stored))
        })
    }

    fn remove_override(self: Arc<Self>, query: KeyQuery) -> AdminFuture<OverrideRemovalDocument> {
        self.look_up(OTHERS, async move |view, table| {
            let store = OverrideStore::open(&view.shared.store_backend).await?;
            let key = resolve_override_key(table, &query.policy, &query.values)?;
            let (removed, change) = store.remove(&key).await?;
            change.iter().for_each(OverrideChange::log);
            Ok(OverrideRemovalDocument {
                policy: query.policy,
                key: key.value_texts(),
                removed,
            })
        })
    }

    fn explain_request(
        self: Arc<Self>,
        request: ExplainRequest,
    ) -> AdminFuture<ExplanationDocument> {
        self.look_up(OTHERS, async move |view, table| {
            let backend = &view.shared.store_backend;
            let explained = explanation::explain_request(backend, table, &request).await?;
            Ok(explained.describe(true))
        })
    }

    fn examine_store(self: Arc<Self>) -> AdminFuture<DoctorReport> {
        // One permit: there is one examination at a time.
        self.look_up(EXAMINATIONS, async move |view, table| {
            let last = view.lookups.last_examination.lock().clone();
            if let Some((examined_at, report)) = last
                && examined_at.elapsed() < DOCTOR_INTERVAL
            {
                return Ok(report);
            }
            let redis = view.shared.store_backend.redis();
            let redis = redis.map(SharedRedisState::settings_in_use);
            let serves_rls = view.listeners.has_kind(ListenerKind::RateLimitService);
            let report = doctor::examine_store(redis.as_ref(), table, serves_rls).await;
            *view.lookups.last_examination.lock() = Some((Instant::now(), report.clone()));
            Ok(report)
        })
    }
}

impl AdminViewState {
    /// Runs a store lookup on this thread, because stores are not `Send`. It takes one of the
    /// permits.
    fn look_up<T: Send + 'static>(
        self: Arc<Self>,
        permits: SelectPermits,
        lookup: impl AsyncFnOnce(&Self, &PolicyTable) -> Result<T, AdminError> + 'static,
    ) -> AdminFuture<T> {
        let task = spawn_local(async move {
            let _permit = permits(&self.lookups).acquire().await;
            let snapshot = self.shared.active_policies.load_snapshot();
            lookup(&self, &snapshot.table).await
        });
        Box::pin(async move {
            task.await
                .unwrap_or_else(|error| Err(AdminError::Unavailable(error.to_string())))
        })
    }

    fn describe_outage(&self) -> Option<StoreOutage> {
        let RedisOutage { since, cause } = self.shared.store_backend.redis()?.outage()?;
        let snapshot = self.shared.active_policies.load_snapshot();
        let select = |action: OnStoreFailure| {
            let policies = snapshot.table.policies().iter().filter(|policy| {
                let uses_store = policy.quota().is_some() && !policy.is_instance_scoped();
                uses_store && policy.is_enforced() && policy.on_store_failure == action
            });
            policies.map(|policy| policy.name.to_string()).collect()
        };
        Some(StoreOutage {
            kind: cause.kind.into_str().into(),
            remedy: cause.remedy().into(),
            lasts_s: since.elapsed().as_secs(),
            closed: select(OnStoreFailure::Closed),
            local: select(OnStoreFailure::Local),
            open: select(OnStoreFailure::Open),
            reason: cause.message,
        })
    }

    fn current_phase(&self) -> ProcessPhase {
        if *self.shutdown.borrow() != ShutdownSignal::Run {
            ProcessPhase::Stopping
        } else if self.is_listening.load(Ordering::Relaxed) {
            ProcessPhase::Serving
        } else {
            ProcessPhase::Starting
        }
    }

    /// Returns the Redis keys of a key's counters; empty if they are in memory.
    fn redis_counter_keys(&self, resolved_key: &ResolvedKey<'_>) -> Vec<String> {
        let redis = self.shared.store_backend.redis();
        let redis = redis.filter(|_| !resolved_key.key.is_instance_scoped());
        redis.map_or(Vec::new(), |shared| {
            let counters = resolved_key.all_counters();
            let keys = counters
                .charges()
                .map(|charge| shared.counter_keys(&charge));
            keys.flatten().collect()
        })
    }
}

fn to_fleet_members(list: MemberList) -> FleetMembers {
    let instances = list.members.into_iter().map(|member| {
        let state = if member.is_pending {
            "recovering"
        } else {
            "alive"
        };
        let mut instance = FleetInstanceDocument {
            id: member.id,
            heartbeat_age_s: Some(member.heartbeat_age.as_secs_f64()),
            state: state.to_owned(),
            ..FleetInstanceDocument::default()
        };
        if let Some(one) = member.description {
            (instance.name, instance.version) = (Some(one.name), Some(one.version));
            instance.admin = one.admin_address;
        }
        instance
    });
    FleetMembers {
        instances: instances.collect(),
        total: list.total,
    }
}

/// The name of the pod, or of the host.
fn instance_name() -> String {
    let pod = env::var("POD_NAME").ok().filter(|name| !name.is_empty());
    pod.unwrap_or_else(|| {
        let host = rustix::system::uname();
        host.nodename().to_string_lossy().into_owned()
    })
}

/// The description of this process in its heartbeats. `bound` is the address of the admin endpoint.
pub(super) fn describe_member(
    settings: &AdminSettings,
    bound: &ListenAddress,
) -> MemberDescription {
    let pod_ip = || env::var("POD_IP").ok()?.parse().ok();
    let advertised = settings
        .advertise
        .clone()
        .or_else(|| AdvertisedAddress::from_bound_address(bound, pod_ip()));
    MemberDescription {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        name: instance_name(),
        admin_address: advertised
            .and_then(|address| address.with_port_of(bound))
            .map(|address| address.to_string()),
    }
}
