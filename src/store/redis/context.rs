//! State that all workers of the process share.

use super::access::RedisAccess;
use super::circuit_breaker::RedisCircuitBreaker;
use super::hash_slot::{hash_slot_for_key, hash_slot_for_name};
use super::member_list::MemberDescription;
use super::scripts::ScriptLibrary;
use super::sentinel::SentinelDisagreements;
use super::settings::{RedisSettings, RedisTopology};
use super::watched_value::WatchedValue;
use crate::clock::Clock;
use crate::limiter::{Charge, Key};
use crate::store::fallback::SINGLE_PARTITION;
use crate::store::fallback::usage_directory::UsageDirectory;
use crate::store::{FallbackStore, MemoryStore};
use crate::telemetry::metrics::RedisServerMetrics;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Once, OnceLock};

/// State that all connections of the process share.
#[derive(Debug)]
pub(super) struct RedisContext {
    /// The settings at the start. Their logins and TLS may be outdated: connections use `access`.
    pub(super) settings: RedisSettings,
    /// The logins and TLS in use.
    pub(super) access: WatchedValue<Arc<RedisAccess>>,
    pub(super) scripts: ScriptLibrary,
    pub(super) breaker: RedisCircuitBreaker,
    /// Calls to Redis since the start.
    pub(super) call_count: AtomicU64,
    /// Memory, eviction policy and clock of Redis, as last polled. Empty while no server answers.
    pub(super) server_info: Mutex<RedisServerMetrics>,
    pub(super) sentinel_disagreements: SentinelDisagreements,
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

impl RedisContext {
    pub(super) fn is_cluster(&self) -> bool {
        self.settings.topology == RedisTopology::Cluster
    }

    /// The slot of all counters of a key, which is also their partition in the fallback store.
    pub(super) fn hash_slot_for_key(&self, key: &Key) -> u16 {
        self.fallback.partition(key)
    }

    /// The slot of a Redis key.
    pub(super) fn hash_slot_for_name(&self, name: &str) -> u16 {
        match self.is_cluster() {
            true => hash_slot_for_name(name),
            false => SINGLE_PARTITION,
        }
    }

    /// The entry of the process in the membership sets. It never changes while the process is a
    /// member.
    pub(super) fn member_entry(&self) -> String {
        let id = &*self.instance_id;
        let description = self.member_description.get();
        description.map_or_else(|| id.to_owned(), |description| description.entry_for(id))
    }

    /// Records that the counter of a charge holds a foreign value. `position` counts from 1.
    pub(super) fn record_foreign_value(&self, charges: &[Charge<'_>], position: usize) {
        self.breaker
            .record_foreign_value(|| self.scripts.counter_name_by_position(charges, position));
    }
}
