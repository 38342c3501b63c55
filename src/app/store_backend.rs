//! The store chosen by the configuration, and the stores that workers and inspections open on it.

use crate::clock::Clock;
use crate::config::StoreSettings;
use crate::limiter::Key;
use crate::store::redis::{
    CounterInspector, MemberList, RedisConnectionError, RedisStore, SharedRedisState,
};
use crate::store::{LeasePool, MemoryStore, Store};
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

    /// Redis, if it is the store.
    pub(crate) fn redis(&self) -> Option<&SharedRedisState> {
        match self {
            Self::Memory(_) => None,
            Self::Redis(shared, _) => Some(shared),
        }
    }

    /// The counters of this process: all, or with Redis those of policies that count by instance.
    pub(super) fn memory(&self) -> &Arc<MemoryStore> {
        match self {
            Self::Memory(memory) => memory,
            Self::Redis(shared, _) => shared.instance_counters(),
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
        match key.is_instance_scoped() {
            true => Store::Memory(Arc::clone(self.memory())),
            false => self.open_for_inspection().await,
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

    /// Lists the instances that share the limits; `None` if no others can.
    pub(super) async fn list_members(&self) -> Result<Option<MemberList>, RedisConnectionError> {
        let Some(shared) = self.redis() else {
            return Ok(None);
        };
        // A new connection: each worker owns its connections, on a runtime of its own.
        let inspector = CounterInspector::connect_with(shared.for_inspection()).await?;
        inspector.list_members().await.map(Some)
    }
}
