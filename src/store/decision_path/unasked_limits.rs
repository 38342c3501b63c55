//! Reads the limits that a refused request did not ask: `Retry-After` covers all of them.

use super::{ChargePositions, IndexedCharges, RedisDecisionPath, strip_indices};
use crate::limiter::{Charge, Decision, Refusal};
use crate::store::fallback::find_positions;
use smallvec::SmallVec;
use tokio::time::Instant;

/// The limits that may refuse for longer than a refusal says. Charges with a time were admitted:
/// their units are being returned.
pub(super) fn find_unasked_limits(charges: &[Charge<'_>], refusal: &Decision) -> ChargePositions {
    let has_status = |at: &usize| refusal.statuses.get(*at).is_some_and(Option::is_some);
    let was_charged = |at: &usize| refusal.charged_at_us.get(*at).is_some_and(Option::is_some);
    let mut unasked = find_positions(charges, |charge| charge.has_retry_time());
    unasked.retain(|at| !has_status(at) && !was_charged(at));
    unasked
}

impl RedisDecisionPath<'_> {
    /// Adds the refusals of the limits at `unknown` to a refusal, so that the client retries when
    /// all limits admit. Reads the counters without a charge. Limits whose counters give no answer
    /// stay unknown.
    pub(super) async fn complete_refusal(
        self,
        charges: &[Charge<'_>],
        refusal: Decision,
        unknown: &[usize],
        requested_at: Instant,
    ) -> Decision {
        let unknown = unknown
            .iter()
            .filter_map(|at| Some((*at, *charges.get(*at)?)));
        let unknown: IndexedCharges<'_> = unknown
            .filter(|(_, charge)| !self.leases.has_units_for(charge))
            .collect();
        if unknown.is_empty() {
            return refusal;
        }
        let statuses = refusal.statuses.iter().flatten();
        let waits = statuses.map(|status| match status.refusal {
            Some(Refusal::Until(at_us)) => at_us.saturating_sub(refusal.now_us),
            _ => 0,
        });
        let wait_us = waits.max().unwrap_or(0);
        // Boxed, because most refusals need no reading.
        let read = self.read_statuses(strip_indices(&unknown), requested_at, wait_us);
        let read = Box::pin(read).await;
        let indices = unknown.iter().map(|(index, _)| *index);
        refusal.merge_refusals(read.expand_to_request(indices, charges.len()))
    }

    /// Reads counters in Redis without a charge, or their statuses in the deny cache.
    async fn read_statuses(
        self,
        charges: SmallVec<[Charge<'_>; 4]>,
        requested_at: Instant,
        wait_us: u64,
    ) -> Decision {
        let cached = self
            .deny_cache
            .find_fresh_statuses(&charges, Instant::now());
        let (known, unknown) = match cached {
            Some(cached) => (cached.decision, cached.unknown),
            None => (
                Decision {
                    statuses: SmallVec::from_elem(None, charges.len()),
                    ..Decision::default()
                },
                (0..charges.len()).collect(),
            ),
        };
        if unknown.is_empty() {
            return known;
        }
        let asked = unknown.iter().filter_map(|at| charges.get(*at).copied());
        let asked: SmallVec<[Charge<'_>; 4]> = asked.collect();
        let reads: SmallVec<[Charge<'_>; 4]> = asked.iter().copied().map(Charge::to_read).collect();
        let read = match self.redis.decide(&reads, requested_at).await {
            Ok(read) => Some(read),
            Err(failure) => failure.partial.map(|partial| partial.decision),
        };
        let Some(mut read) = read else {
            return known;
        };
        read.admitted = false;
        self.redis
            .fallback()
            .cache_statuses(&asked, &read, requested_at.into_std());
        self.deny_cache
            .record_reading(&asked, &read, (requested_at, Instant::now()), wait_us);
        let read = read.expand_to_request(unknown.iter().copied(), charges.len());
        match known.now_us {
            0 => read,
            _ => known.merge_refusals(read),
        }
    }
}
