//! State that all workers of the process share: settings, circuit breaker, counters.

use super::access::RedisAccess;
use super::circuit_breaker::{PROBLEM_LOG_INTERVAL, RedisCircuitBreaker, RedisOutage};
use super::hash_slot::{hash_slot_for_key, hash_slot_for_name};
use super::member_list::MemberDescription;
use super::scripts::ScriptLibrary;
use super::settings::{RedisSettings, RedisTopology};
use super::watched_value::WatchedValue;
use crate::clock::{Clock, saturating_micros};
use crate::limiter::{Charge, CounterRef, Key};
use crate::store::fallback::SINGLE_PARTITION;
use crate::store::fallback::usage_directory::UsageDirectory;
use crate::store::{FallbackStore, MemoryStore, StoreUnavailable};
use crate::telemetry::LogThrottle;
use crate::telemetry::metrics::RedisServerMetrics;
use parking_lot::Mutex;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Once, OnceLock};
use std::time::Duration;

/// A unique id of this process.
static INSTANCE_ID: LazyLock<String> = LazyLock::new(|| {
    let [high, low] = [0, 1].map(|half| RandomState::new().hash_one(half));
    format!("{high:016x}{low:016x}")
});

/// The unique id of this process: 32 hexadecimal digits, new with every start.
pub fn instance_id() -> &'static str {
    &INSTANCE_ID
}

/// State that the workers of one process share: settings, circuit breaker, counters.
#[derive(Debug)]
pub struct SharedRedisState {
    /// The settings at the start. Their logins and TLS may be outdated: connections use `access`.
    pub settings: RedisSettings,
    /// The logins and TLS in use.
    pub(super) access: WatchedValue<Arc<RedisAccess>>,
    pub(super) scripts: ScriptLibrary,
    pub(super) breaker: RedisCircuitBreaker,
    /// Calls to Redis since the start.
    pub(super) call_count: AtomicU64,
    /// Memory, eviction policy and clock of Redis, as last polled. Empty while no server answers.
    pub(super) server_info: Mutex<RedisServerMetrics>,
    /// Checks that found sentinels with different masters.
    pub(super) sentinel_disagreement_count: AtomicU64,
    pub(super) sentinel_disagreement_log: LogThrottle,
    pub(super) fallback: FallbackStore,
    /// The counters of `scope = "instance"`, shared by all workers.
    pub(super) instance_counters: Arc<MemoryStore>,
    /// `store.state_dir`, if it is set.
    pub(super) usage_directory: Option<UsageDirectory>,
    /// The process' own clock.
    pub(super) clock: Clock,
    /// The unique id of the process.
    pub(super) instance_id: Box<str>,
    /// The description of the process in its heartbeats, if it is set before the process joins.
    pub(super) member_description: OnceLock<MemberDescription>,
    /// Workers started so far.
    pub(super) worker_count: AtomicU64,
    /// Whether the servers are behind a proxy that accepts only commands with keys.
    pub(super) is_behind_proxy: AtomicBool,
    pub(super) script_text_notice: Once,
}

/// An empty fallback store with the partitions of the topology.
pub(super) fn new_fallback(settings: &RedisSettings, clock: Clock) -> FallbackStore {
    let fallback = FallbackStore::new(settings.initial_instances, clock);
    fallback.with_partitions(match settings.topology {
        RedisTopology::Cluster => hash_slot_for_key,
        _ => |_| SINGLE_PARTITION,
    })
}

impl SharedRedisState {
    pub fn new(settings: RedisSettings) -> Arc<Self> {
        Self::for_instance(settings, Clock::system(), instance_id())
    }

    /// [`Self::new`] with a chosen clock and a chosen id of the process: for simulations.
    pub fn for_instance(settings: RedisSettings, clock: Clock, instance_id: &str) -> Arc<Self> {
        Arc::new(Self::build(settings, clock, instance_id))
    }

    fn build(settings: RedisSettings, clock: Clock, instance_id: &str) -> Self {
        let counters = MemoryStore::new(settings.instance_counter_bounds, clock.clone());
        Self {
            instance_counters: Arc::new(counters),
            scripts: ScriptLibrary::with_clock(&settings.key_prefix, clock.clone()),
            breaker: RedisCircuitBreaker::new(
                Some(settings.to_string()),
                settings.breaker_failures,
            ),
            call_count: AtomicU64::new(0),
            server_info: Mutex::default(),
            sentinel_disagreement_count: AtomicU64::new(0),
            sentinel_disagreement_log: LogThrottle::new(PROBLEM_LOG_INTERVAL),
            fallback: new_fallback(&settings, clock.clone()),
            usage_directory: settings.state_dir.as_ref().map(|path| {
                let is_cluster = settings.topology == RedisTopology::Cluster;
                let service = format!("{} {is_cluster}", settings.key_prefix);
                UsageDirectory::new(path, &service, instance_id, clock.clone())
            }),
            clock,
            instance_id: instance_id.into(),
            member_description: OnceLock::new(),
            worker_count: AtomicU64::new(0),
            is_behind_proxy: AtomicBool::new(false),
            script_text_notice: Once::new(),
            access: WatchedValue::new(Arc::new(RedisAccess::new(settings.clone()))),
            settings,
        }
    }

    /// Sets the description of the process in its heartbeats. Call it before any worker joins the
    /// membership; later calls have no effect.
    pub fn describe_member(&self, description: MemberDescription) {
        self.member_description.get_or_init(|| description);
    }

    /// The settings with the logins and TLS in use.
    pub fn settings_in_use(&self) -> RedisSettings {
        self.access.get().settings.clone()
    }

    /// State of its own for inspections, with the logins and TLS in use, and the same counters of
    /// this process. It logs nothing: the caller reports errors.
    #[must_use]
    pub fn for_inspection(&self) -> Arc<Self> {
        let access = self.access.get();
        let mut shared = Self::build(access.settings.clone(), Clock::system(), instance_id());
        shared.instance_counters = Arc::clone(&self.instance_counters);
        shared.breaker.log_address = None;
        shared.script_text_notice.call_once(|| ());
        shared.access = WatchedValue::new(access);
        shared.is_behind_proxy = AtomicBool::new(self.is_behind_proxy());
        Arc::new(shared)
    }

    /// Uses the logins and TLS of `newer` from now on. New connections use both, and live
    /// connections log in again.
    pub fn update_logins(&self, newer: &RedisSettings) {
        if let Some(access) = self.access.get().with_logins_of(newer) {
            tracing::info!("redis logins or TLS settings changed");
            drop(self.access.set(Arc::new(access)));
        }
    }

    /// The keys of the counters of a charge: several keys if the charge is spread over shards.
    pub fn counter_keys(&self, charge: &Charge<'_, '_>) -> Vec<String> {
        let counter_name = |key: &Key| {
            let counter = charge.counter();
            self.scripts.counter_key(CounterRef { key, ..counter })
        };
        let shard_count = charge.policy.shard_count;
        match self.settings.topology {
            RedisTopology::Cluster if shard_count > 1 => (0..shard_count)
                .map(|number| counter_name(&charge.key.shard_key(number)))
                .collect(),
            _ => vec![counter_name(charge.key)],
        }
    }

    /// The counters of `scope = "instance"`.
    pub fn instance_counters(&self) -> &Arc<MemoryStore> {
        &self.instance_counters
    }

    /// Whether Redis was reached, no worker has lost its connection, and the circuit breaker is
    /// closed.
    pub fn is_up(&self) -> bool {
        self.breaker.is_up()
    }

    /// Why [`Self::is_up`] is false, if a connection or a decision has failed.
    pub fn outage(&self) -> Option<RedisOutage> {
        self.breaker.outage()
    }

    /// Whether the circuit breaker is open: requests are not sent to Redis.
    pub fn is_breaker_open(&self) -> bool {
        self.breaker.is_open()
    }

    /// Instances that share the limits, as last counted.
    pub fn instance_count(&self) -> u32 {
        self.fallback.share().instance_count()
    }

    /// The last polled server info.
    pub fn server_info(&self) -> RedisServerMetrics {
        RedisServerMetrics {
            calls: self.call_count.load(Ordering::Relaxed),
            sentinel_disagreements: self.sentinel_disagreement_count.load(Ordering::Relaxed),
            override_changes: self.fallback.override_change_count.load(Ordering::Relaxed),
            foreign_overrides: self.breaker.foreign_override_count.load(Ordering::Relaxed),
            ..*self.server_info.lock()
        }
    }

    /// Failures since the start, by the stable name of their kind.
    pub fn error_counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.breaker.failure_counts()
    }

    /// The store that decides while Redis is unreachable.
    pub fn fallback(&self) -> &FallbackStore {
        &self.fallback
    }

    /// Maximum duration of a decision.
    pub fn decision_timeout(&self) -> Duration {
        self.settings.timeout
    }

    /// The error when Redis gave no reply. The next attempt is useful after the next probe at the
    /// earliest.
    pub fn unavailable_error(&self, kind: &'static str) -> StoreUnavailable {
        StoreUnavailable {
            kind,
            retry_after_us: saturating_micros(self.settings.probe_interval),
        }
    }

    pub fn is_cluster(&self) -> bool {
        self.settings.topology == RedisTopology::Cluster
    }

    /// The slot of all counters of a key, which is also their partition in the fallback store.
    pub(super) fn hash_slot_for_key(&self, key: &Key) -> u16 {
        self.fallback.partition(key)
    }

    /// The slot of a Redis key.
    pub(super) fn hash_slot_for_name(&self, name: &str) -> u16 {
        if self.is_cluster() {
            hash_slot_for_name(name)
        } else {
            SINGLE_PARTITION
        }
    }

    /// The entry of the process in the membership sets. It never changes while the process is a
    /// member.
    pub(super) fn member_entry(&self) -> String {
        let id = &*self.instance_id;
        let description = self.member_description.get();
        description.map_or_else(|| id.to_owned(), |description| description.entry_for(id))
    }

    /// Continues the outage in which an earlier process stopped, if `store.state_dir` has its file.
    /// Call it before the first request.
    pub fn restore_usage(&self) {
        let Some(directory) = &self.usage_directory else {
            return;
        };
        if let Some((file, usage, downtime_us)) = directory.lock_and_read_newest_file() {
            tracing::info!(
                counters = usage.counter_count(),
                age_s = downtime_us / 1_000_000,
                "restored usage that an earlier process admitted without redis"
            );
            self.fallback.restore_usage(usage, downtime_us);
            *directory.restored_file.lock() = Some(file);
        }
    }

    /// Stores the usage that Redis lacks in `store.state_dir`. Call it after the last request.
    pub fn store_usage(&self) {
        let Some(directory) = &self.usage_directory else {
            return;
        };
        if let Some(usage) = self.fallback.export_usage(self.clock.wall_us()) {
            match directory.save_usage(&usage) {
                Ok(path) => tracing::info!(
                    file = %path.display(),
                    counters = usage.counter_count(),
                    "stored usage admitted without redis"
                ),
                Err(error) => {
                    tracing::warn!(directory = %directory.path.display(), %error, "cannot store usage admitted without redis");
                    return;
                }
            }
        }
        directory.remove_restored_file();
    }
}
