//! Puts right what was charged before anybody knew the cost.

use super::keeper::{Keeper, Place};
use crate::limiter::Amendment;
use crate::policy::{Actual, EstimateCost};
use smallvec::SmallVec;
use std::sync::Arc;

/// What one policy has charged by estimate. Dropped, the estimate stands.
#[derive(Debug)]
pub struct Estimate {
    cost: Arc<EstimateCost>,
    /// Where it was charged, and at which time that stands there (µs, store's clock).
    places: SmallVec<[(Place, u64); 1]>,
    keeper: Keeper,
}

impl Estimate {
    pub(super) fn new(
        cost: Arc<EstimateCost>,
        places: SmallVec<[(Place, u64); 1]>,
        keeper: Keeper,
    ) -> Self {
        Self {
            cost,
            places,
            keeper,
        }
    }

    /// Where the actual cost is said.
    pub fn cost(&self) -> &Arc<EstimateCost> {
        &self.cost
    }

    /// Whether the response's body says it.
    pub fn reads_body(&self) -> bool {
        matches!(self.cost.actual, Actual::Json(_))
    }

    /// The estimate, which stands until it is settled.
    pub fn units(&self) -> u64 {
        self.cost.estimate
    }

    /// The request took so many units: charges what is missing, or gives back what was too much. The store hears of
    /// it soon.
    pub fn settle(self, actual: u64) {
        let estimate = self.cost.estimate;
        if actual == estimate {
            return;
        }
        let amendment = |at_us| match actual.checked_sub(estimate) {
            Some(units) => Amendment::Charge(units),
            None => Amendment::Credit {
                units: estimate.saturating_sub(actual),
                at_us,
            },
        };
        self.keeper.tell(
            self.places
                .into_iter()
                .map(|(place, at_us)| (place, amendment(at_us))),
        );
    }
}
