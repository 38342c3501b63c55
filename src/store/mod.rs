//! Where counters live, and the one question that is asked of them.

mod deny_cache;
mod fallback;
mod leases;
mod memory;
pub mod redis;

pub use fallback::{FallbackStore, Share};
pub use leases::LeasePool;
pub use memory::{MemorySettings, MemoryStore};

use crate::limiter::{Amendment, Charge, Decision, Key, Limit};
use crate::telemetry::metrics::DecisionSource;
use deny_cache::{DenyCache, DenyMatchScope};
use redis::RedisStore;
use std::borrow::Cow;
use std::sync::Arc;
use tokio::time::Instant;

/// Decides charges; cheap to clone, one per worker.
#[derive(Clone, Debug)]
pub enum Store {
    Memory(Arc<MemoryStore>),
    Redis {
        redis: RedisStore,
        deny_cache: Arc<DenyCache>,
        leases: Arc<LeasePool>,
    },
}

/// What decides by asking Redis.
#[derive(Clone, Copy, Debug)]
struct RedisDecider<'s> {
    redis: &'s RedisStore,
    deny_cache: &'s DenyCache,
}

/// What became known of a charge after its request was decided.
#[derive(Clone, Copy, Debug)]
pub struct Settlement<'a> {
    pub limit: &'a Limit,
    pub key: &'a Key,
    pub amendment: Amendment,
}

/// The store gave no answer: the request has to be decided without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the store gave no answer ({kind})")]
pub struct StoreUnavailable {
    /// A stable word for logs and metrics.
    pub kind: &'static str,
    /// When it is worth asking again, in microseconds.
    pub retry_after_us: u64,
}

/// What the store was not told, as far as is known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{cause}, {} untold", unsent_indices.len())]
pub struct SettlementError {
    pub cause: StoreUnavailable,
    /// Which of those that were to be told, in order, each once.
    pub unsent_indices: Vec<usize>,
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

    /// The same with the leases of its process.
    pub fn with_leases(self, shared: &Arc<LeasePool>) -> Self {
        match self {
            Self::Redis {
                redis,
                deny_cache: refusals,
                ..
            } => Self::Redis {
                redis,
                deny_cache: refusals,
                leases: Arc::clone(shared),
            },
            store @ Self::Memory(_) => store,
        }
    }

    /// Decides all charges of one request together: either every enforced one is made, or none.
    /// The charges name different counters: no two share key, algorithm and period.
    ///
    /// # Errors
    /// [`StoreUnavailable`] if the store is away; whether the charges were made is then unknown.
    pub async fn decide(&self, charges: &[Charge<'_>]) -> Result<Decision, StoreUnavailable> {
        self.decide_with_source(charges, Instant::now())
            .await
            .map(|(decision, _)| decision)
    }

    /// The same for who has just looked at the clock and wants to know whose answer it is.
    ///
    /// # Errors
    /// As [`Store::decide`]. What of it can be decided without the store is decided by [`Store::decide_by_fallback`].
    pub async fn decide_with_source(
        &self,
        charges: &[Charge<'_>],
        requested_at: Instant,
    ) -> Result<(Decision, DecisionSource), StoreUnavailable> {
        let (redis, refusals, leases) = match self {
            Self::Memory(memory) => {
                return Ok((
                    memory.decide_at(charges, requested_at.into_std()),
                    DecisionSource::Memory,
                ));
            }
            Self::Redis {
                redis,
                deny_cache: refusals,
                leases,
            } => (redis, refusals, leases),
        };
        let decider = RedisDecider {
            redis,
            deny_cache: refusals,
        };
        if charges.iter().any(|charge| charge.lease.is_some()) {
            // Boxed, or every request would have room for both ways.
            return Box::pin(leases.decide(decider, charges, requested_at)).await;
        }
        decider.decide(charges, requested_at).await
    }

    /// Decides what is `local` of charges that the store gave no answer about, by this instance's share. The others
    /// have no status and stop nothing. `None`: the store is always there.
    pub fn decide_by_fallback(&self, charges: &[Charge<'_>]) -> Option<Decision> {
        let Self::Redis { redis, .. } = self else {
            return None;
        };
        let unreachable_charges = charges
            .iter()
            .filter(|charge| !redis.is_reachable_for(std::slice::from_ref(*charge)));
        redis.fallback().mark_unreachable(
            unreachable_charges.map(|charge| redis.fallback().partition(charge.key)),
        );
        Some(redis.fallback().decide(charges, std::time::Instant::now()))
    }

    /// Waits, but not for long, until the store knows all that this process has to say, and that it ends.
    pub async fn shut_down(&self) {
        if let Self::Redis { redis, leases, .. } = self {
            leases.shut_down(redis).await;
            redis.leave_membership().await;
        }
    }

    /// Puts charges right that were made before, one by one. Several of one counter are made in their order.
    ///
    /// # Errors
    /// [`SettlementError`] if the store is away: what is lost. Whether it was done is then unknown.
    pub async fn apply_settlements(
        &self,
        settlements: &[Settlement<'_>],
    ) -> Result<(), SettlementError> {
        match self {
            Self::Memory(memory) => {
                memory.apply_settlements(settlements);
                Ok(())
            }
            Self::Redis { redis, .. } => {
                redis.fallback().apply_settlements(settlements);
                let result = match redis.is_breaker_open() {
                    true => Err(SettlementError {
                        cause: redis.unavailable_error("breaker_open"),
                        unsent_indices: (0..settlements.len()).collect(),
                    }),
                    false => redis.amend(settlements).await,
                };
                let is_dropped = |index: &usize| {
                    settlements
                        .get(*index)
                        .is_some_and(|settlement| !redis.fallback().defer_settlement(settlement))
                };
                match result {
                    Err(mut error) => {
                        error.unsent_indices.retain(is_dropped);
                        if error.unsent_indices.is_empty() {
                            Ok(())
                        } else {
                            Err(error)
                        }
                    }
                    Ok(()) => Ok(()),
                }
            }
        }
    }
}

impl RedisDecider<'_> {
    async fn decide(
        self,
        charges: &[Charge<'_>],
        requested_at: Instant,
    ) -> Result<(Decision, DecisionSource), StoreUnavailable> {
        match self.find_local_refusal(charges, requested_at) {
            Some(refusal) => Ok(refusal),
            None => self.decide_in_redis(charges, requested_at).await,
        }
    }

    /// A refusal for which Redis need not be asked: it is known, or this instance's share is used up while an outage ends.
    fn find_local_refusal(
        self,
        charges: &[Charge<'_>],
        requested_at: Instant,
    ) -> Option<(Decision, DecisionSource)> {
        if let Some(refusal) =
            self.deny_cache
                .find_refusal(charges, requested_at, DenyMatchScope::AllLimits)
        {
            return Some((refusal, DecisionSource::DenyCache));
        }
        let local = self.redis.fallback();
        if !local.is_in_outage() || !self.redis.is_reachable_for(charges) {
            return None;
        }
        let share_decision = local
            .check_share(charges, requested_at.into_std())
            .filter(|gate| !gate.admitted)?;
        Some((share_decision, DecisionSource::Degraded))
    }

    async fn decide_in_redis(
        self,
        charges: &[Charge<'_>],
        requested_at: Instant,
    ) -> Result<(Decision, DecisionSource), StoreUnavailable> {
        let Self {
            redis,
            deny_cache: refusals,
        } = self;
        let answer = if redis.is_breaker_open() {
            Err(redis.unavailable_error("breaker_open"))
        } else {
            redis.decide(charges, requested_at).await
        };
        match answer {
            Ok(decision) => {
                let (local, sent_at) = (redis.fallback(), requested_at.into_std());
                local.cache_statuses(
                    charges,
                    &exclude_leased_units(charges, &decision, local.share()),
                    sent_at,
                );
                // A reservation that another slot's refusal undoes is no reason to refuse for longer.
                if !decision.admitted && !redis.is_split(charges) {
                    refusals.record_refusal(charges, &decision, requested_at, Instant::now());
                }
                Ok((decision, DecisionSource::Redis))
            }
            // Without Redis, a refusal whose end isn't known for this cost is better than none.
            Err(unavailable) => {
                let refusal =
                    refusals.find_refusal(charges, Instant::now(), DenyMatchScope::AnyLimit);
                refusal
                    .map(|refusal| (refusal, DecisionSource::DenyCache))
                    .ok_or(unavailable)
            }
        }
    }
}

/// What the store leaves of which a share may be used while it is away, if what was lent is used, too: all of that is in
/// this instance's hand, and none of it in the others'.
fn exclude_leased_units<'d>(
    charges: &[Charge<'_>],
    decision: &'d Decision,
    share: Share,
) -> Cow<'d, Decision> {
    let mut decision = Cow::Borrowed(decision);
    for grant in decision.grants.clone() {
        let statuses = charges.iter().zip(&mut decision.to_mut().statuses);
        for (_, status) in statuses.filter(|(charge, _)| charge.group == grant.group) {
            if let Some(status) = status {
                let units = grant.units.saturating_mul(share.instances().into());
                status.remaining = status.remaining.saturating_sub(units);
            }
        }
    }
    decision
}
