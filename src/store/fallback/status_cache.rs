//! The last status that Redis reported for each key of a policy with `on_store_failure = "local"`.
//! In an outage, the counters of this process start from these statuses.

use super::counter_cache::CounterCache;
use super::{FallbackStore, Share};
use crate::limiter::{Algorithm, Amendment, Charge, Limit, LimitStatus};
use crate::store::memory::counter_id;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Within this time after an outage, other instances may have no status of a key yet (µs). Outages
/// with a shorter pause count as one.
pub const STATUS_EXCHANGE_US: u64 = 5_000_000;

/// The last status of each counter: 2 × 4096 entries in each of 16 shards, of about 100 bytes each,
/// so 16 MiB at most.
pub(super) type StatusCache = CounterCache<CachedStatus, 4096>;

/// The remaining units of a counter, with times on the local clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CachedStatus {
    pub(super) remaining: u64,
    pub(super) received_at_us: u64,
    /// End of the block, by the local clock (µs).
    pub(super) block_ends_us: Option<u64>,
}

impl FallbackStore {
    /// Stores the status received at `received_at_us`, when the clock of Redis showed `now_us`.
    pub(super) fn cache_status(
        &self,
        charge: &Charge<'_>,
        status: LimitStatus,
        now_us: u64,
        received_at_us: u64,
    ) {
        let is_block = charge.limit.algorithm == Algorithm::Block;
        let ends = status.next_growth_us.filter(|_| is_block);
        if is_block && ends.is_none() {
            return;
        }
        let ends_us =
            ends.map(|ends_us| received_at_us.saturating_add(ends_us.saturating_sub(now_us)));
        let cached = CachedStatus {
            remaining: status.remaining,
            received_at_us,
            block_ends_us: ends_us,
        };
        let id = counter_id(charge.limit, charge.key);
        self.status_cache.insert(id, cached);
    }

    /// Starts the local counter from a status of Redis.
    ///
    /// A status from soon after an outage can only reduce the remaining units. Instances without a
    /// status still use the rest of their shares, so a new share of all remaining units would
    /// exceed the limit.
    pub(super) fn apply_status(
        &self,
        charge: &Charge<'_>,
        status: CachedStatus,
        requested_at: Instant,
    ) {
        let share = self.share();
        let limit = share.scale_limit(charge.limit);
        let ended_us = self.outage_ended_us.load(Ordering::Relaxed);
        let is_soon = status.received_at_us.saturating_sub(ended_us) < STATUS_EXCHANGE_US;
        let used_units = || self.usage_of_share(charge.limit, charge.key).0;
        if !is_soon || status.used_units(share, &limit) >= used_units() {
            let now_us = self.clock.instant_to_unix_us(requested_at);
            self.memory.remove_counters(&[Charge {
                limit: &limit,
                ..*charge
            }]);
            self.amend_share(
                &limit,
                charge.key,
                status.to_amendment(share, &limit, now_us),
            );
        }
        self.record_counter(charge);
    }
}

impl CachedStatus {
    /// Used units of this instance's share, where `limit` is its share of the limit.
    pub(super) fn used_units(self, share: Share, limit: &Limit) -> u64 {
        limit
            .capacity()
            .saturating_sub(share.scale_units(self.remaining))
    }

    /// The amendment after which this instance may use its share of the units that remained, where
    /// `limit` is its share of the limit.
    ///
    /// The age of the used units is unknown, so they count as charged when the answer arrived.
    /// Counted from then, they are too strict for a sliding window, and exact for all other
    /// algorithms.
    pub(super) fn to_amendment(self, share: Share, limit: &Limit, now_us: u64) -> Amendment {
        let age_us = now_us.saturating_sub(self.received_at_us);
        if let Some(ends_us) = self.block_ends_us {
            // A block lasts for `per_us` from its start.
            let block_start_us = ends_us.saturating_sub(limit.per_us);
            return Amendment::BackdatedCharge {
                units: 1,
                age_us: now_us.saturating_sub(block_start_us),
            };
        }
        Amendment::BackdatedCharge {
            units: self.used_units(share, limit),
            age_us,
        }
    }
}
