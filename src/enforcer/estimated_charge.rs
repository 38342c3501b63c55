//! Puts right what was charged before anybody knew the cost.

use super::settlements::{CounterRef, SettlementQueue};
use crate::limiter::Amendment;
use crate::policy::{ActualCostSource, EstimateCost};
use smallvec::SmallVec;
use std::sync::Arc;

/// What one policy has charged by estimate. Dropped, the estimate stands.
#[derive(Debug)]
pub struct EstimatedCharge {
    cost: Arc<EstimateCost>,
    /// Where it was charged, and at which time that stands there (µs, store's clock).
    counters: SmallVec<[(CounterRef, u64); 1]>,
    settlements: SettlementQueue,
}

impl EstimatedCharge {
    pub(super) fn new(
        cost: Arc<EstimateCost>,
        counters: SmallVec<[(CounterRef, u64); 1]>,
        settlements: SettlementQueue,
    ) -> Self {
        Self {
            cost,
            counters,
            settlements,
        }
    }

    /// Where the actual cost is said.
    pub fn cost(&self) -> &Arc<EstimateCost> {
        &self.cost
    }

    /// Whether the response's body says it.
    pub fn reads_body(&self) -> bool {
        matches!(self.cost.actual_source, ActualCostSource::Json(_))
    }

    /// The estimate, which stands until it is settled.
    pub fn estimated_units(&self) -> u64 {
        self.cost.estimate
    }

    /// The request took so many units: charges what is missing, or gives back what was too much. The store hears of
    /// it soon.
    pub fn settle(self, actual_units: u64) {
        let estimate = self.cost.estimate;
        if actual_units == estimate {
            return;
        }
        let amendment = |at_us| match actual_units.checked_sub(estimate) {
            Some(units) => Amendment::Charge(units),
            None => Amendment::Credit {
                units: estimate.saturating_sub(actual_units),
                at_us,
            },
        };
        self.settlements.enqueue(
            self.counters
                .into_iter()
                .map(|(place, at_us)| (place, amendment(at_us))),
        );
    }
}
