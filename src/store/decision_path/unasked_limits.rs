//! Reads the limits that a refused request did not ask: `Retry-After` covers all of them.

use super::RedisDecisionPath;
use crate::limiter::{Charge, Decision, PolicyCharges, Refusal, RequestPart, each_charge};
use smallvec::SmallVec;
use tokio::time::Instant;

/// Finds the limits that may refuse for longer than a refusal says, with one flag per charge.
/// Charges with a time were admitted: their units are being returned.
pub(super) fn find_unasked_limits(
    request: &[PolicyCharges<'_>],
    refusal: &Decision,
) -> SmallVec<[bool; 8]> {
    let outcomes = each_charge(request).zip(refusal.outcomes());
    let is_unasked =
        outcomes.map(|(charge, outcome)| charge.has_retry_time() && outcome.is_unknown());
    is_unasked.collect()
}

impl RedisDecisionPath<'_> {
    /// Adds the refusals of `unknown` limits, one flag per charge, to a refusal, so that the client
    /// retries when all limits admit. Reads the counters without a charge. Limits whose counters
    /// give no answer stay unknown.
    pub(super) async fn complete_refusal(
        self,
        request: &[PolicyCharges<'_>],
        refusal: Decision,
        unknown: &[bool],
        requested_at: Instant,
    ) -> Decision {
        let mut unknown = unknown.iter();
        let unknown = RequestPart::new(request, |charge| {
            unknown.next() == Some(&true) && !self.leases.has_units_for(charge)
        });
        if unknown.is_empty() {
            return refusal;
        }
        let waits = refusal.outcomes().map(|outcome| match outcome.refusal() {
            Some(Refusal::Until(at_us)) => at_us.saturating_sub(refusal.now_us),
            _ => 0,
        });
        let wait_us = waits.max().unwrap_or(0);
        // Boxed, because most refusals need no reading.
        let read = self.read_statuses(&unknown.policies, requested_at, wait_us);
        refusal.merge_refusals(unknown.expand(Box::pin(read).await))
    }

    /// Reads counters in Redis without a charge, or their statuses in the deny cache.
    async fn read_statuses(
        self,
        request: &[PolicyCharges<'_>],
        requested_at: Instant,
        wait_us: u64,
    ) -> Decision {
        let cached = self.deny_cache.find_fresh_statuses(request, Instant::now());
        let mut unknown = cached.iter().flat_map(|cached| &cached.unknown);
        let is_asked = |_: &Charge<'_, '_>| unknown.next().is_none_or(|is_unknown| *is_unknown);
        let asked = RequestPart::new(request, is_asked);
        let known = cached.map(|cached| cached.decision).unwrap_or_default();
        if asked.is_empty() {
            return known;
        }
        let reads = asked.policies.iter().map(PolicyCharges::to_read);
        let reads: SmallVec<[PolicyCharges<'_>; 2]> = reads.collect();
        let read = self.redis.decide(&reads, requested_at).await;
        let mut read = read.unwrap_or_else(|failure| {
            let partial = failure.partial.map(|partial| partial.decision);
            partial.unwrap_or_else(|| Decision::without_outcomes(&reads))
        });
        read.admitted = false;
        self.redis
            .fallback()
            .cache_statuses(&asked.policies, &read, requested_at.into_std());
        let times = (requested_at, Instant::now());
        self.deny_cache
            .record_reading(&asked.policies, &read, times, wait_us);
        let read = asked.expand(read);
        match known.now_us {
            0 => read,
            _ => known.merge_refusals(read),
        }
    }
}
