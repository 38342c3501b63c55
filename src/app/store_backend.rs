//! The store chosen by the configuration, and the stores that workers and inspections open on it.

use crate::clock::Clock;
use crate::config::StoreSettings;
use crate::limiter::Key;
use crate::store::redis::{
    CounterInspector, MemberDescription, MemberList, RedisConnectionError, RedisStore,
    SharedRedisState,
};
use crate::store::{LeasePool, MemoryStore, Store};
use crate::telemetry::metrics::RedisServerMetrics;
use std::sync::Arc;

/// State that the stores of all workers share.
#[derive(Clone)]
pub(crate) enum StoreBackend {
    Memory(Arc<MemoryStore>),
    Redis(Arc<SharedRedisState>, Arc<LeasePool>),
}

impl StoreBackend {
    pub(crate) fn new(settings: &StoreSettings) -> Self {
        match settings {
            StoreSettings::Memory(settings) => {
                Self::Memory(Arc::new(MemoryStore::new(*settings, Clock::system())))
            }
            StoreSettings::Redis(settings) => {
                Self::Redis(SharedRedisState::new((**settings).clone()), Arc::default())
            }
        }
    }

    /// Restores the usage of an outage of Redis in which an earlier process stopped. Must be called
    /// before the first request.
    pub(super) fn restore_outage_usage(&self) {
        if let Self::Redis(shared, _) = self {
            shared.restore_usage();
        }
    }

    /// Saves the usage of an outage, which Redis lacks, for the next process. Must be called after
    /// the last request.
    pub(super) fn save_outage_usage(&self) {
        if let Self::Redis(shared, _) = self {
            shared.store_usage();
        }
    }

    /// Opens a store for an operator's command. This store has its own connections and does not
    /// count as an instance that shares limits.
    pub(crate) async fn open_for_inspection(&self) -> Store {
        match self {
            Self::Memory(memory) => Store::Memory(Arc::clone(memory)),
            Self::Redis(shared, _) => {
                let redis = RedisStore::start(&shared.for_inspection());
                redis.wait_until_ready().await;
                Store::from_redis(redis)
            }
        }
    }

    /// Opens a store for an operator's command about one key.
    pub(crate) async fn open_for_key(&self, key: &Key) -> Store {
        match self {
            Self::Redis(shared, _) if key.is_instance_scoped() => {
                Store::Memory(Arc::clone(shared.instance_counters()))
            }
            _ => self.open_for_inspection().await,
        }
    }

    /// Opens one worker's store on the worker's runtime. Waits for Redis up to `connect_timeout`;
    /// if Redis is not ready by then, the worker starts degraded.
    pub(crate) async fn open_for_worker(&self) -> Store {
        match self {
            Self::Memory(memory) => Store::Memory(Arc::clone(memory)),
            Self::Redis(shared, leases) => {
                let redis = RedisStore::start(shared).join_membership();
                redis.wait_until_ready().await;
                Store::from_redis(redis).with_shared_leases(leases)
            }
        }
    }

    /// Sets the description of this process in its heartbeats. Must be called before a worker opens
    /// its store.
    pub(super) fn describe_member(&self, description: MemberDescription) {
        if let Self::Redis(shared, _) = self {
            shared.describe_member(description);
        }
    }

    /// Lists the instances that share the limits; `None` if no others can.
    pub(super) async fn list_members(&self) -> Result<Option<MemberList>, RedisConnectionError> {
        match self {
            Self::Memory(_) => Ok(None),
            Self::Redis(shared, _) => {
                // A new connection: each worker owns its connections, on a runtime of its own.
                let inspector = CounterInspector::connect_with(shared.for_inspection()).await?;
                inspector.list_members().await.map(Some)
            }
        }
    }

    /// The last INFO reply of Redis, if Redis is the store.
    pub(super) fn redis_server_info(&self) -> Option<RedisServerMetrics> {
        match self {
            Self::Memory(_) => None,
            Self::Redis(redis, _) => Some(redis.server_info()),
        }
    }
}
