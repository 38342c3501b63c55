//! Where counters live, and the one question that is asked of them.

mod deny_cache;
mod leases;
mod local;
mod memory;
pub mod redis;

pub use leases::Leases;
pub use local::{Local, Share};
pub use memory::{Memory, MemorySettings};

use crate::limiter::{Amendment, Charge, Decision, Key, Limit};
use crate::telemetry::metrics::Source;
use deny_cache::{DenyCache, Fit};
use redis::Redis;
use std::borrow::Cow;
use std::sync::Arc;
use tokio::time::Instant;

/// Decides charges; cheap to clone, one per worker.
#[derive(Clone, Debug)]
pub enum Store {
    Memory(Arc<Memory>),
    Redis {
        redis: Redis,
        refusals: Arc<DenyCache>,
        leases: Arc<Leases>,
    },
}

/// What decides by asking Redis.
#[derive(Clone, Copy, Debug)]
struct Ask<'s> {
    redis: &'s Redis,
    refusals: &'s DenyCache,
}

/// What became known of a charge after its request was decided.
#[derive(Clone, Copy, Debug)]
pub struct Late<'a> {
    pub limit: &'a Limit,
    pub key: &'a Key,
    pub amendment: Amendment,
}

/// The store gave no answer: the request has to be decided without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the store gave no answer ({kind})")]
pub struct Unavailable {
    /// A stable word for logs and metrics.
    pub kind: &'static str,
    /// When it is worth asking again, in microseconds.
    pub retry_after_us: u64,
}

/// What the store was not told, as far as is known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}, {} untold", places.len())]
pub struct Untold {
    pub why: Unavailable,
    /// Which of those that were to be told, in order, each once.
    pub places: Vec<usize>,
}

impl Store {
    /// A worker's store in Redis, with leases of its own.
    pub fn redis(redis: Redis) -> Self {
        Self::Redis {
            redis,
            refusals: Arc::default(),
            leases: Arc::default(),
        }
    }

    /// The same with the leases of its process.
    pub fn sharing(self, shared: &Arc<Leases>) -> Self {
        match self {
            Self::Redis {
                redis, refusals, ..
            } => Self::Redis {
                redis,
                refusals,
                leases: Arc::clone(shared),
            },
            store @ Self::Memory(_) => store,
        }
    }

    /// Decides all charges of one request together: either every enforced one is made, or none.
    /// The charges name different counters: no two share key, algorithm and period.
    ///
    /// # Errors
    /// [`Unavailable`] if the store is away; whether the charges were made is then unknown.
    pub async fn decide(&self, charges: &[Charge<'_>]) -> Result<Decision, Unavailable> {
        self.answer(charges, Instant::now())
            .await
            .map(|(decision, _)| decision)
    }

    /// The same for who has just looked at the clock and wants to know whose answer it is.
    ///
    /// # Errors
    /// As [`Store::decide`]. What of it can be decided without the store is decided by [`Store::decide_alone`].
    pub async fn answer(
        &self,
        charges: &[Charge<'_>],
        asked: Instant,
    ) -> Result<(Decision, Source), Unavailable> {
        let (redis, refusals, leases) = match self {
            Self::Memory(memory) => {
                return Ok((memory.decide_at(charges, asked.into_std()), Source::Memory));
            }
            Self::Redis {
                redis,
                refusals,
                leases,
            } => (redis, refusals, leases),
        };
        let ask = Ask { redis, refusals };
        if charges.iter().any(|charge| charge.lease.is_some()) {
            // Boxed, or every request would have room for both ways.
            return Box::pin(leases.answer(ask, charges, asked)).await;
        }
        ask.decide(charges, asked).await
    }

    /// Decides what is `local` of charges that the store gave no answer about, by this instance's share. The others
    /// have no standing and stop nothing. `None`: the store is always there.
    pub fn decide_alone(&self, charges: &[Charge<'_>]) -> Option<Decision> {
        let Self::Redis { redis, .. } = self else {
            return None;
        };
        let missing = charges
            .iter()
            .filter(|charge| !redis.reaches(std::slice::from_ref(*charge)));
        redis
            .local()
            .fail(missing.map(|charge| redis.local().part(charge.key)));
        Some(redis.local().decide(charges, std::time::Instant::now()))
    }

    /// Waits, but not for long, until the store knows all that this process has to say, and that it ends.
    pub async fn leave(&self) {
        if let Self::Redis { redis, leases, .. } = self {
            leases.finish(redis).await;
            redis.leave().await;
        }
    }

    /// Puts charges right that were made before, one by one. Several of one counter are made in their order.
    ///
    /// # Errors
    /// [`Untold`] if the store is away: what is lost. Whether it was done is then unknown.
    pub async fn amend(&self, late: &[Late<'_>]) -> Result<(), Untold> {
        match self {
            Self::Memory(memory) => {
                memory.amend(late);
                Ok(())
            }
            Self::Redis { redis, .. } => {
                redis.local().amend(late);
                let told = match redis.breaker_open() {
                    true => Err(Untold {
                        why: redis.unavailable("breaker_open"),
                        places: (0..late.len()).collect(),
                    }),
                    false => redis.amend(late).await,
                };
                let is_lost = |place: &usize| {
                    late.get(*place)
                        .is_some_and(|late| !redis.local().amend_later(late))
                };
                match told {
                    Err(mut untold) => {
                        untold.places.retain(is_lost);
                        if untold.places.is_empty() {
                            Ok(())
                        } else {
                            Err(untold)
                        }
                    }
                    Ok(()) => Ok(()),
                }
            }
        }
    }
}

impl Ask<'_> {
    async fn decide(
        self,
        charges: &[Charge<'_>],
        asked: Instant,
    ) -> Result<(Decision, Source), Unavailable> {
        match self.refusal(charges, asked) {
            Some(refusal) => Ok(refusal),
            None => self.redis(charges, asked).await,
        }
    }

    /// A refusal for which Redis need not be asked: it is known, or this instance's share is used up while an outage ends.
    fn refusal(self, charges: &[Charge<'_>], asked: Instant) -> Option<(Decision, Source)> {
        if let Some(refusal) = self.refusals.recall(charges, asked, Fit::Whole) {
            return Some((refusal, Source::DenyCache));
        }
        let local = self.redis.local();
        if !local.is_away() || !self.redis.reaches(charges) {
            return None;
        }
        let gate = local
            .gate(charges, asked.into_std())
            .filter(|gate| !gate.admitted)?;
        Some((gate, Source::Degraded))
    }

    async fn redis(
        self,
        charges: &[Charge<'_>],
        asked: Instant,
    ) -> Result<(Decision, Source), Unavailable> {
        let Self { redis, refusals } = self;
        let answer = if redis.breaker_open() {
            Err(redis.unavailable("breaker_open"))
        } else {
            redis.decide(charges, asked).await
        };
        match answer {
            Ok(decision) => {
                let (local, sent) = (redis.local(), asked.into_std());
                local.remember(
                    charges,
                    &without_hand(charges, &decision, local.share()),
                    sent,
                );
                // A reservation that another slot's refusal undoes is no reason to refuse for longer.
                if !decision.admitted && !redis.is_split(charges) {
                    refusals.remember(charges, &decision, asked, Instant::now());
                }
                Ok((decision, Source::Redis))
            }
            // Without Redis, a refusal whose end isn't known for this cost is better than none.
            Err(unavailable) => {
                let refusal = refusals.recall(charges, Instant::now(), Fit::Any);
                refusal
                    .map(|refusal| (refusal, Source::DenyCache))
                    .ok_or(unavailable)
            }
        }
    }
}

/// What the store leaves of which a share may be used while it is away, if what was lent is used, too: all of that is in
/// this instance's hand, and none of it in the others'.
fn without_hand<'d>(
    charges: &[Charge<'_>],
    decision: &'d Decision,
    share: Share,
) -> Cow<'d, Decision> {
    let mut decision = Cow::Borrowed(decision);
    for grant in decision.grants.clone() {
        let standings = charges.iter().zip(&mut decision.to_mut().standings);
        for (_, standing) in standings.filter(|(charge, _)| charge.group == grant.group) {
            if let Some(standing) = standing {
                let units = grant.units.saturating_mul(share.live().into());
                standing.remaining = standing.remaining.saturating_sub(units);
            }
        }
    }
    decision
}
