//! Further charges of a response while it streams (`cut_off`).

use crate::limiter::{Decision, PolicyCharges, Refusal};
use crate::store::Store;
use smallvec::SmallVec;
use std::future::Future;
use tokio::time::Instant;

/// Maximum slices of a response that are recorded with their own times: about 32 KiB.
const MAX_TAKEN_SLICES: usize = 1024;

/// After so many slices, the next ones are larger by one `slice`: a long response has few.
const SLICES_PER_STEP: usize = 16;

/// The slices of one policy in which a response is charged beyond its estimate. The store decides
/// each one, as it decides requests.
#[derive(Clone, Debug)]
pub struct StreamSlices {
    pub(super) store: Store,
    /// The limits of the policy. They have the cost of the next slice.
    pub(super) charges: PolicyCharges<'static>,
    /// The name of the policy, unless responses must not have it.
    pub(super) reported_policy: Option<Box<str>>,
    /// Units of the first slices.
    pub(super) size: u64,
    pub(super) taken: Vec<TakenSlice>,
}

/// A slice that was charged, to be recorded by [`StreamSlices::record`].
#[derive(Clone, Debug)]
pub struct TakenSlice {
    pub(super) units: u64,
    /// The time at which the charge of each limit counts (µs, store's clock).
    pub(super) charged_at_us: SmallVec<[u64; 1]>,
}

/// The decision about a slice.
#[derive(Debug)]
pub enum SliceDecision {
    Charged(TakenSlice),
    /// The store did not decide, and the policy lets requests through then. The response settles
    /// what it used.
    Uncharged {
        units: u64,
    },
    /// The limits have fewer units left than the slice.
    Refused {
        remaining: u64,
        /// Seconds until the slice would fit; 0 if unknown.
        retry_after_s: u64,
    },
}

impl StreamSlices {
    /// Units of the next slice.
    pub fn next_size(&self) -> u64 {
        let step = 1 + self.taken.len() / SLICES_PER_STEP;
        self.size
            .saturating_mul(u64::try_from(step).unwrap_or(u64::MAX))
    }

    /// The name of the policy, unless responses must not have it.
    pub fn reported_policy(&self) -> Option<&str> {
        self.reported_policy.as_deref()
    }

    /// Asks the store for `units`.
    pub fn decide(&self, units: u64) -> impl Future<Output = SliceDecision> + use<> {
        let charges = [self.charges.map_limits(|limit| limit.cost = units)];
        let store = self.store.clone();
        async move {
            let decided = store.decide_with_source(&charges, Instant::now()).await;
            let decision = match decided {
                Ok((decision, _)) => Some(decision),
                Err(_) if charges.iter().any(|one| one.fails_closed) => {
                    let (remaining, retry_after_s) = (0, 0);
                    return SliceDecision::Refused {
                        remaining,
                        retry_after_s,
                    };
                }
                Err(failure) => store.decide_by_fallback(&charges, failure.partial),
            };
            match decision {
                Some(decision) => SliceDecision::from_decision(&decision, units),
                None => SliceDecision::Uncharged { units },
            }
        }
    }

    /// Records a charged slice, which the settlement corrects. Returns its units.
    pub fn record(&mut self, slice: TakenSlice) -> u64 {
        let units = slice.units;
        let is_full = self.taken.len() == MAX_TAKEN_SLICES;
        match self.taken.last_mut().filter(|_| is_full) {
            // Under the older time, units that are returned count for less, never for more.
            Some(last) => last.units = last.units.saturating_add(units),
            None => self.taken.push(slice),
        }
        units
    }

    /// The units of all recorded slices.
    pub(super) fn taken_units(&self) -> u64 {
        let units = self.taken.iter().map(|slice| slice.units);
        units.fold(0, u64::saturating_add)
    }
}

impl SliceDecision {
    fn from_decision(decision: &Decision, units: u64) -> Self {
        let outcomes = decision.outcomes();
        if decision.admitted {
            let times = outcomes.map(|outcome| outcome.charged_at_us.unwrap_or_default());
            return Self::Charged(TakenSlice {
                units,
                charged_at_us: times.collect(),
            });
        }
        let remaining = decision.statuses().map(|status| status.remaining).min();
        let refusals = decision.statuses().filter_map(|status| status.refusal);
        let until_us = refusals.map(|refusal| match refusal {
            Refusal::Until(until_us) => until_us.saturating_sub(decision.now_us),
            Refusal::Unknown | Refusal::Never => 0,
        });
        Self::Refused {
            remaining: remaining.unwrap_or_default().min(units.saturating_sub(1)),
            retry_after_s: until_us.max().unwrap_or_default().div_ceil(1_000_000),
        }
    }
}
