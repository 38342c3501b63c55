//! The store chosen by the configuration, and the stores that workers and inspections open on it.

use crate::admin::AdminError;
use crate::clock::Clock;
use crate::config::StoreSettings;
use crate::store::redis::{
    CounterInspector, RedisConnectionError, RedisOutage, RedisSettings, RedisStore,
    SharedRedisState,
};
use crate::store::{LeasePool, MemoryStore, Store, StoreUnavailable};
use std::sync::Arc;
use std::time::Duration;

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
    pub(crate) fn memory(&self) -> &Arc<MemoryStore> {
        match self {
            Self::Memory(memory) => memory,
            Self::Redis(shared, _) => shared.instance_counters(),
        }
    }

    /// Opens a store for an operator's command. This store has its own connections and does not
    /// count as an instance that shares limits. [`Self::describe_failure`] explains its errors.
    pub(crate) async fn open_for_inspection(&self) -> Store {
        match self {
            Self::Memory(memory) => Store::Memory(Arc::clone(memory)),
            Self::Redis(shared, _) => {
                let redis = RedisStore::start(&shared.for_inspection());
                // In an outage of the running store, waiting would only delay the answer.
                if shared.outage().is_none() {
                    drop(redis.wait_for_first_attempts().await);
                }
                Store::from_redis(redis)
            }
        }
    }

    /// Describes why a store did not reply: address, cause and remedy. The duration of the outage
    /// is known only for the running store.
    pub(crate) fn describe_failure(&self, opened: &Store, error: &StoreUnavailable) -> String {
        let own_outage = opened.outage().zip(self.redis());
        let own_error = own_outage
            .map(|(outage, redis)| describe_redis_failure(&redis.settings, &outage.cause, None));
        let known = self.describe_outage().or(own_error);
        known.unwrap_or_else(|| error.to_string())
    }

    /// Why Redis is unavailable to the running store, where, since when, and what to do.
    fn describe_outage(&self) -> Option<String> {
        let redis = self.redis()?;
        let RedisOutage { since, cause } = redis.outage()?;
        let lasts = Some(since.elapsed());
        Some(describe_redis_failure(&redis.settings, &cause, lasts))
    }

    /// Connects to Redis for an operator's command. In an outage of the running store, it fails at
    /// once.
    pub(crate) async fn connect_inspector(
        &self,
        redis: &SharedRedisState,
    ) -> Result<CounterInspector, AdminError> {
        match self.describe_outage() {
            Some(outage) => Err(AdminError::Unavailable(outage)),
            None => connect(redis).await,
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
}

/// Connects to Redis anew: each worker owns its connections, on a runtime of its own.
pub(super) async fn connect(redis: &SharedRedisState) -> Result<CounterInspector, AdminError> {
    let connected = CounterInspector::connect_with(redis).await;
    connected.map_err(|error| {
        AdminError::Unavailable(describe_redis_failure(&redis.settings, &error, None))
    })
}

/// Describes a Redis failure: cause, address, duration if known, and remedy.
fn describe_redis_failure(
    redis: &RedisSettings,
    error: &RedisConnectionError,
    lasts: Option<Duration>,
) -> String {
    let lasts = lasts.map(|lasts| format!(", for {} s", lasts.as_secs()));
    let (lasts, remedy) = (lasts.unwrap_or_default(), error.remedy());
    format!("{error} at {redis}{lasts}; {remedy}")
}
