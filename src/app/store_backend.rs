//! The store chosen by the configuration, and the stores that workers and inspections open on it.

use crate::clock::Clock;
use crate::config::StoreSettings;
use crate::store::redis::{RedisStore, SharedRedisState};
use crate::store::{LeasePool, MemoryStore, Store};
use crate::telemetry::metrics::RedisServerMetrics;
use std::sync::Arc;

/// State that the stores of all workers share.
#[derive(Clone)]
pub(crate) enum StoreBackend {
    Memory(Arc<MemoryStore>),
    Redis(SharedRedisState, Arc<LeasePool>),
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

    /// Continues the outage in which an earlier process stopped. Call it before the first request.
    pub(super) fn restore_usage(&self) {
        if let Self::Redis(shared, _) = self {
            shared.restore_usage();
        }
    }

    /// Stores usage that Redis lacks for the next process. Call it after the last request.
    pub(super) fn store_usage(&self) {
        if let Self::Redis(shared, _) = self {
            shared.store_usage();
        }
    }

    /// Opens a store for reading counters by hand. It has connections of its own and does not count
    /// as an instance that shares limits.
    pub(crate) async fn open_for_inspection(&self) -> Store {
        match self {
            Self::Memory(memory) => Store::Memory(Arc::clone(memory)),
            Self::Redis(shared, _) => {
                let redis = RedisStore::start(&SharedRedisState::new(shared.settings().clone()));
                redis.wait_until_ready().await;
                Store::redis(redis)
            }
        }
    }

    /// Opens one worker's store on the worker's runtime. Waits for Redis up to `connect_timeout`;
    /// after that the worker starts degraded.
    pub(crate) async fn open_for_worker(&self) -> Store {
        match self {
            Self::Memory(memory) => Store::Memory(Arc::clone(memory)),
            Self::Redis(shared, leases) => {
                let redis = RedisStore::start(shared).join_membership();
                redis.wait_until_ready().await;
                Store::redis(redis).with_leases(leases)
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
