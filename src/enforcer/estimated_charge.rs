//! Settles charges that were made by an estimate of the cost.

use crate::limiter::{Amendment, Limit};
use crate::policy::{ActualCost, EstimateCost, FactorsOfRequest, ReportSource};
use crate::store::{LimitAndKey, SettlementQueue};
use crate::telemetry::LogThrottle;
use http::StatusCode;
use smallvec::SmallVec;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// Minimum time between log lines about responses without a cost.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The estimated charge of one policy. If it is dropped before the response, the estimate stands,
/// and the request counts.
#[derive(Debug)]
pub struct EstimatedCharge {
    /// Where the actual cost comes from.
    pub cost: Arc<EstimateCost>,
    /// The factors of its parts for this request.
    pub(super) factors: Box<FactorsOfRequest>,
    /// The estimated units, which stand until the charge is settled.
    pub estimate: u64,
    /// The charged counters, each with the time at which the charge counts (µs, store's clock).
    pub(super) counters: SmallVec<[(LimitAndKey, u64); 1]>,
    /// The response counters, if only those start the block of the policy.
    pub(super) counted: Vec<LimitAndKey>,
    pub(super) settlements: Arc<SettlementQueue>,
    /// Whether a limit has fewer units left than the estimate. It then rejects the key's next such
    /// request until units are returned.
    pub(super) exhausts_limit: bool,
}

impl EstimatedCharge {
    /// The actual units, if the response reports any. `read` reads a source.
    pub fn reported_units(&self, read: impl Fn(&ReportSource) -> Option<u64>) -> Option<u64> {
        self.cost.actual.reported_units(&self.factors, read)
    }

    /// Whether the actual cost is in the response body.
    pub fn is_settled_from_body(&self) -> bool {
        let mut sources = self.cost.actual.sources();
        sources.any(|source| matches!(source, ReportSource::Json(_)))
    }

    /// Whether the key's next request depends on the units that the head of the response returns.
    pub fn delays_response(&self) -> bool {
        self.exhausts_limit && !self.is_settled_from_body()
    }

    /// Keeps the estimate, because the response reports no cost.
    pub fn keep_unreported(self) {
        self.settlements.record_unreported_cost();
        static LOG: LazyLock<LogThrottle> = LazyLock::new(|| LogThrottle::new(LOG_INTERVAL));
        if let Some(count) = LOG.record_occurrence(Instant::now()) {
            let policy = self
                .counters
                .first()
                .map_or("", |((_, key), _)| key.policy_name());
            let (estimate, actual) = (self.estimate, &self.cost.actual);
            tracing::warn!(policy, estimate, %actual, responses = count, "the response does not report its cost; the estimate stands");
        }
    }

    /// Settles the charge of a request that was not sent: by the status of the reply if the status
    /// decides (`count_when`). Otherwise it is returned.
    pub fn settle_unsent(self, status: StatusCode) {
        match self.cost.actual {
            ActualCost::Status(_) => self.settle_by_status(status),
            ActualCost::Sum(_) => self.settle(0),
        }
    }

    /// Settles a charge for which the status of the response decides. Any other charge stands.
    pub fn settle_by_status(self, status: StatusCode) {
        if let Some(units) = self.cost.units_of_status(status, self.estimate) {
            self.settle(units);
        }
    }

    /// Settles the charge by the actual units: charges the missing ones or credits the excess. The
    /// settlement is queued, and not yet sent to Redis when this returns.
    pub fn settle(mut self, actual_units: u64) {
        let estimate = self.estimate;
        if actual_units == estimate {
            return;
        }
        // A response that costs less than its reservation does not count.
        self.counted.clear();
        // The request has left its queue, so the next one keeps its distance.
        let is_changed = |limit: &Limit| actual_units > estimate || !limit.algorithm.is_queue();
        let amendment = |at_us| match actual_units.checked_sub(estimate) {
            Some(units) => Amendment::Charge(units),
            None => Amendment::Credit {
                units: estimate.saturating_sub(actual_units),
                at_us,
            },
        };
        self.settlements.apply_or_enqueue(
            std::mem::take(&mut self.counters)
                .into_iter()
                .filter(|((limit, _), _)| is_changed(limit))
                .map(|(place, at_us)| (place, amendment(at_us))),
        );
    }
}

impl Drop for EstimatedCharge {
    fn drop(&mut self) {
        let amendment = Amendment::Charge(self.estimate);
        let counted = self.counted.drain(..);
        self.settlements
            .apply_or_enqueue(counted.map(|counter| (counter, amendment)));
    }
}
