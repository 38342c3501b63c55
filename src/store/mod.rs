//! Counters of all limits, and the decisions made by them: in this process or in Redis.
//!
//! [`decision_path`] shows the steps from charges to a decision.

mod concurrency_slots;
mod decision_path;
mod decision_source;
mod deny_cache;
mod fallback;
mod leases;
mod memory;
mod partial_decision;
pub mod redis;
mod settlements;

pub use concurrency_slots::{ConcurrencySlotGuard, ConcurrencySlots, UntakenSlots};
pub use decision_source::DecisionSource;
pub use fallback::{FallbackStore, Share};
pub use leases::LeasePool;
pub use memory::{MemorySettings, MemoryStore};
pub use partial_decision::{DecisionFailure, PartialDecision};
pub use settlements::SettlementQueue;

use crate::limiter::{Amendment, Key, Limit};
use deny_cache::DenyCache;
use redis::RedisStore;
use std::sync::Arc;
use std::time::Duration;

/// The longest that shutdown waits for each kind of message to the store.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Holds the counters and decides charges: in this process or in Redis. Cheap to clone; each worker
/// has its own clone.
#[derive(Clone, Debug)]
pub enum Store {
    Memory(Arc<MemoryStore>),
    Redis {
        redis: RedisStore,
        deny_cache: Arc<DenyCache>,
        leases: Arc<LeasePool>,
    },
}

/// A counter: the limit and the key that identify it.
pub type CounterRef = (Limit, Key);

/// A change of one counter that becomes known after the decision.
#[derive(Clone, Copy, Debug)]
pub struct Settlement<'a> {
    pub limit: &'a Limit,
    pub key: &'a Key,
    pub amendment: Amendment,
}

/// The store is unavailable: the request has to be decided without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the store gave no answer ({kind})")]
pub struct StoreUnavailable {
    /// Stable name of the failure for logs and metrics.
    pub kind: &'static str,
    /// Suggested wait: the probe interval, in microseconds.
    pub retry_after_us: u64,
}

/// Settlements that the store has not confirmed. It may have applied some of them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{cause}; {} settlements are unconfirmed", unconfirmed_indices.len())]
pub struct SettlementError {
    pub cause: StoreUnavailable,
    /// Indices into the list of settlements, ascending and unique.
    pub unconfirmed_indices: Vec<usize>,
}

impl<'a> Settlement<'a> {
    fn from_pending(((limit, key), amendment): &'a (CounterRef, Amendment)) -> Self {
        Self {
            limit,
            key,
            amendment: *amendment,
        }
    }
}

impl Store {
    /// A worker's store in Redis, with leases of its own.
    pub fn redis(redis: RedisStore) -> Self {
        Self::Redis {
            redis,
            deny_cache: Arc::default(),
            leases: Arc::default(),
        }
    }

    /// Replaces the leases by those shared by all workers of the process.
    pub fn with_leases(self, shared: &Arc<LeasePool>) -> Self {
        match self {
            Self::Redis {
                redis, deny_cache, ..
            } => Self::Redis {
                redis,
                deny_cache,
                leases: Arc::clone(shared),
            },
            store @ Self::Memory(_) => store,
        }
    }

    /// Applies settlements one by one; those of one counter in their order.
    ///
    /// # Errors
    /// [`SettlementError`] if the store is unavailable. Whether the listed settlements were applied
    /// is then unknown.
    pub async fn apply_settlements(
        &self,
        settlements: &[Settlement<'_>],
    ) -> Result<(), SettlementError> {
        let redis = match self {
            Self::Memory(memory) => {
                memory.apply_settlements(settlements);
                return Ok(());
            }
            Self::Redis { redis, .. } => redis,
        };
        redis.fallback().apply_settlements(settlements);
        let result = if redis.is_breaker_open() {
            Err(SettlementError {
                cause: redis.unavailable_error("breaker_open"),
                unconfirmed_indices: (0..settlements.len()).collect(),
            })
        } else {
            redis.apply_settlements(settlements).await
        };
        result.or_else(|mut error| {
            let is_lost = |index: &usize| {
                settlements
                    .get(*index)
                    .is_some_and(|settlement| !redis.fallback().defer_settlement(settlement))
            };
            error.unconfirmed_indices.retain(is_lost);
            if error.unconfirmed_indices.is_empty() {
                Ok(())
            } else {
                Err(error)
            }
        })
    }

    /// Returns all leases and leaves the membership. Both have a time limit.
    pub async fn shut_down(&self) {
        if let Self::Redis { redis, leases, .. } = self {
            leases.shut_down(redis).await;
            redis.leave_membership().await;
        }
    }
}
