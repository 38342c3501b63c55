//! Counters of all limits, and the decisions made by them: in this process or in Redis.
//!
//! [`decision_path`] shows the steps from charges to a decision.

mod concurrency_slots;
mod decision_path;
mod deny_cache;
mod fallback;
mod instance_counters;
mod leases;
mod memory;
mod partial_decision;
pub mod redis;
mod settlement_queue;
mod stored_override;

pub use concurrency_slots::{ConcurrencySlotGuard, ConcurrencySlots};
pub use decision_path::{DecisionSource, RedisDecisionPath};
pub use fallback::{FallbackStore, STATUS_EXCHANGE_US, Share};
pub use leases::LeasePool;
pub use memory::{MAX_MEMORY_OVERRIDES, MemorySettings, MemoryStore};
pub use partial_decision::{DecisionFailure, PartialDecision};
pub use settlement_queue::SettlementQueue;
pub use stored_override::{
    MAX_OVERRIDE_EXPIRY_MS, MAX_REMARK_BYTES, StoredOverride, override_end_us, parse_override_rule,
};

use crate::limiter::{Amendment, CounterRef, Key, Limit};
use redis::{RedisOutage, RedisStore};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::timeout;

/// Maximum time that shutdown waits until the queued messages of one kind are sent to the store.
pub(crate) const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Holds the counters and decides charges: in this process or in Redis. Cheap to clone; each worker
/// has its own clone.
#[derive(Clone, Debug)]
pub enum Store {
    Memory(Arc<MemoryStore>),
    Redis(RedisDecisionPath),
}

impl Store {
    /// Why Redis is unavailable, if it is.
    pub fn outage(&self) -> Option<RedisOutage> {
        match self {
            Self::Memory(_) => None,
            Self::Redis(path) => path.redis.outage(),
        }
    }
}

/// A counter: the limit and the key that identify it.
pub type LimitAndKey = (Limit, Key);

/// A settlement that owns its counter.
pub type PendingSettlement = (LimitAndKey, Amendment);

/// A change to one counter after the decision: further units, a credit, or a slot's renewal or
/// release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// Suggested wait before a retry, in microseconds: the interval of the store's probes.
    pub retry_after_us: u64,
}

/// Error with the settlements that the store has not confirmed. The store may have applied some of
/// them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{cause}; {} settlements are unconfirmed", unconfirmed.len())]
pub struct SettlementError<'a> {
    pub cause: StoreUnavailable,
    /// Those of one counter in the order of the caller.
    pub unconfirmed: Vec<Settlement<'a>>,
}

/// Waits until all queued messages are sent, for at most [`FLUSH_TIMEOUT`]. `drained` is notified
/// when `is_drained` becomes true.
async fn wait_until_drained(drained: &Notify, is_drained: impl Fn() -> bool) {
    let wait = async {
        loop {
            let notified = drained.notified();
            if is_drained() {
                return;
            }
            notified.await;
        }
    };
    drop(timeout(FLUSH_TIMEOUT, wait).await);
}

impl<'a> Settlement<'a> {
    fn counter(&self) -> CounterRef<'a> {
        CounterRef {
            limit: self.limit,
            key: self.key,
        }
    }

    fn from_pending(((limit, key), amendment): &'a PendingSettlement) -> Self {
        Self {
            limit,
            key,
            amendment: *amendment,
        }
    }
}

impl Store {
    /// Creates a worker's store in Redis, with a deny cache and leases of its own.
    pub fn from_redis(redis: RedisStore) -> Self {
        Self::Redis(RedisDecisionPath {
            redis,
            deny_cache: Arc::default(),
            leases: Arc::default(),
        })
    }

    /// Replaces the worker's own leases with `shared`, the leases of all workers of the process.
    pub fn with_shared_leases(mut self, shared: &Arc<LeasePool>) -> Self {
        if let Self::Redis(path) = &mut self {
            path.leases = Arc::clone(shared);
        }
        self
    }

    /// Applies settlements. Settlements of one counter are applied in the order of the list.
    ///
    /// # Errors
    /// [`SettlementError`] with the settlements that are neither confirmed nor kept for write-back.
    /// Whether they were applied is unknown.
    pub async fn apply_settlements<'a>(
        &self,
        settlements: &[Settlement<'a>],
    ) -> Result<(), SettlementError<'a>> {
        let mut in_redis = settlements.to_vec();
        in_redis.retain(|settlement| !self.apply_in_memory(settlement));
        let Self::Redis(path) = self else {
            return Ok(());
        };
        let fallback = path.redis.fallback();
        fallback.apply_settlements(&in_redis);
        let result = path.redis.apply_settlements(&in_redis).await;
        for settlement in &in_redis {
            path.deny_cache.forget_settled(settlement);
        }
        result.or_else(|mut error| {
            // Those of `local` policies are kept for write-back.
            let is_lost = |settlement: &Settlement<'_>| !fallback.defer_settlement(settlement);
            error.unconfirmed.retain(is_lost);
            if error.unconfirmed.is_empty() {
                Ok(())
            } else {
                Err(error)
            }
        })
    }

    /// Applies a settlement at once if its counter is in memory. Returns whether it is.
    fn apply_in_memory(&self, settlement: &Settlement<'_>) -> bool {
        let memory = match self {
            Self::Memory(memory) => memory,
            Self::Redis(path) => path.redis.instance_counters(),
        };
        let is_in_memory = matches!(self, Self::Memory(_)) || settlement.key.is_instance_scoped();
        if is_in_memory {
            memory.amend_counter(settlement, true);
        }
        is_in_memory
    }

    /// Waits until the reservations of requests that were not forwarded are returned, returns all
    /// leases to Redis, and removes the process from the membership, each within a time limit. Does
    /// nothing for a memory store.
    pub async fn return_units_and_leave_membership(&self) {
        if let Self::Redis(RedisDecisionPath { redis, leases, .. }) = self {
            redis.wait_until_reservations_returned().await;
            leases.end_leases_and_send_credits(redis).await;
            redis.leave_membership().await;
        }
    }
}
