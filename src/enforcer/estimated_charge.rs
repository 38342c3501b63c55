//! Settles charges that were made by an estimate of the cost.

use super::stream_slices::StreamSlices;
use crate::limiter::{Amendment, Limit};
use crate::policy::{ActualCost, EstimateCost, Factor, FactorsOfRequest, ReportSource};
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
    /// The least units that a reported cost counts.
    pub(super) least: u64,
    /// The estimated units, which stand until the charge is settled.
    pub estimate: u64,
    /// Further charges while the response streams, if it may be cut off.
    pub slices: Option<Box<StreamSlices>>,
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
        let units = self.cost.actual.reported_units(&self.factors, read)?;
        Some(units.max(self.least))
    }

    /// The units charged by now: the estimate, and slices of the response.
    pub fn charged_units(&self) -> u64 {
        let slices = self.slices.as_ref();
        let taken = slices.map_or(0, |slices| slices.taken_units());
        self.estimate.saturating_add(taken)
    }

    /// The units that bytes of the response count, rounded up, while it reports none.
    pub fn units_of_bytes(&self, bytes: u64) -> u64 {
        self.cost.cut_off.map_or(0, |cut_off| {
            let units = bytes.div_ceil(cut_off.bytes_per_unit);
            Factor::highest_of(&self.factors).times_units(units)
        })
    }

    /// The bytes of the response that count as so many units.
    pub fn bytes_of_units(&self, units: u64) -> u64 {
        self.cost.cut_off.map_or(u64::MAX, |cut_off| {
            let units = Factor::highest_of(&self.factors).units_within(units);
            units.saturating_mul(cut_off.bytes_per_unit)
        })
    }

    /// Counts a response that was cut off.
    pub fn record_cut_off(&self) {
        self.settlements.record_cut_off();
        static LOG: LazyLock<LogThrottle> = LazyLock::new(|| LogThrottle::new(LOG_INTERVAL));
        if let Some(count) = LOG.record_occurrence(Instant::now()) {
            let (policy, charged) = (self.policy_name(), self.charged_units());
            tracing::info!(
                policy,
                charged,
                responses = count,
                "response cut off: its key has nothing left"
            );
        }
    }

    fn policy_name(&self) -> &str {
        let counter = self.counters.first();
        counter.map_or("", |((_, key), _)| key.policy_name())
    }

    /// Whether the response body has to be read: it reports the cost, or may be cut off.
    pub fn reads_body(&self) -> bool {
        let mut sources = self.cost.actual.sources();
        self.slices.is_some() || sources.any(|source| matches!(source, ReportSource::Json(_)))
    }

    /// Whether the key's next request depends on the units that the head of the response returns.
    pub fn delays_response(&self) -> bool {
        self.exhausts_limit && !self.reads_body()
    }

    /// Counts a response that does not report its cost.
    pub fn record_unreported(&self) {
        self.settlements.record_unreported_cost();
        static LOG: LazyLock<LogThrottle> = LazyLock::new(|| LogThrottle::new(LOG_INTERVAL));
        if let Some(count) = LOG.record_occurrence(Instant::now()) {
            let (policy, estimate, actual) = (self.policy_name(), self.estimate, &self.cost.actual);
            tracing::warn!(policy, estimate, %actual, responses = count, "the response does not report its cost");
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
        let charged = self.charged_units();
        if actual_units == charged {
            return;
        }
        // A response that costs less than its reservation does not count.
        self.counted.clear();
        let counters = std::mem::take(&mut self.counters);
        if let Some(missing) = actual_units.checked_sub(charged) {
            let charge = |(place, _)| (place, Amendment::Charge(missing));
            return (self.settlements).apply_or_enqueue(counters.into_iter().map(charge));
        }
        // The request has left its queue, so the next one keeps its distance.
        let is_queue = |limit: &Limit| limit.algorithm.is_queue();
        let mut excess = charged.saturating_sub(actual_units);
        let slices = self.slices.take().map(|slices| slices.taken);
        let slices = slices.unwrap_or_default().into_iter().rev();
        let slices = slices.map(|slice| (slice.units, slice.charged_at_us));
        let estimated_at = counters.iter().map(|(_, at_us)| *at_us).collect();
        // The newest charges are returned first.
        for (units, charged_at_us) in slices.chain([(self.estimate, estimated_at)]) {
            let units = units.min(excess);
            if units == 0 {
                break;
            }
            excess -= units;
            let credits = counters.iter().zip(charged_at_us);
            let credits = credits
                .filter(|(((limit, _), _), _)| !is_queue(limit))
                .map(|((place, _), at_us)| (place.clone(), Amendment::Credit { units, at_us }));
            self.settlements.apply_or_enqueue(credits);
        }
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
