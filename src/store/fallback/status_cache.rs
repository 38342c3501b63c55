//! The last status that Redis reported for each key of a policy with `on_store_failure = "local"`.
//! In an outage, the counters of this process start from these statuses.

use super::{FallbackStore, Share};
use crate::limiter::{Algorithm, Amendment, Charge, Limit, LimitStatus};
use crate::store::memory::{CounterId, counter_id};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Maximum number of entries in each generation of a shard, about 100 bytes each: 16 MiB in all.
/// The oldest entries are dropped first.
const MAX_GENERATION_ENTRIES: usize = 1 << 12;
const SHARD_COUNT: usize = 16;

/// Within this time after an outage, other instances may have no status of a key yet (µs). Outages
/// with a shorter pause count as one.
pub const STATUS_EXCHANGE_US: u64 = 5_000_000;

/// The last status of each limit and key. Process-wide, in shards with a lock each.
#[derive(Debug, Default)]
pub(super) struct StatusCache([Mutex<StatusGenerations>; SHARD_COUNT]);

/// Two generations of entries. When the current generation is full, it replaces the previous one,
/// which is dropped.
#[derive(Debug, Default)]
struct StatusGenerations {
    current: StatusGeneration,
    previous: StatusGeneration,
}

type StatusGeneration = HashMap<CounterId, CachedStatus, foldhash::fast::RandomState>;

/// The remaining units of a counter, with times on the local clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CachedStatus {
    pub(super) remaining: u64,
    pub(super) received_at_us: u64,
    /// End of the block, by the local clock (µs).
    pub(super) block_ends_us: Option<u64>,
}

impl StatusCache {
    /// Stores the status received at `received_at_us`, when the clock of Redis showed `now_us`.
    pub(super) fn insert(
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
        self.insert_status(counter_id(charge.limit, charge.key), cached);
    }

    /// Removes the entry of a charge and passes it to `apply`. The shard stays locked meanwhile: a
    /// concurrent charge must not be overwritten by the counter that `apply` creates.
    pub(super) fn remove_and_apply(&self, charge: &Charge<'_>, apply: impl FnOnce(CachedStatus)) {
        let id = counter_id(charge.limit, charge.key);
        let Some(shard) = self.shard_for_counter(id) else {
            return;
        };
        let mut generations = shard.lock();
        let previous = generations.previous.remove(&id);
        if let Some(cached) = generations.current.remove(&id).or(previous) {
            apply(cached);
        }
    }

    pub(super) fn to_vec(&self) -> Vec<(CounterId, CachedStatus)> {
        let mut statuses = Vec::new();
        for shard in &self.0 {
            let generations = shard.lock();
            let entries = generations.current.iter().chain(&generations.previous);
            statuses.extend(entries.map(|(id, status)| (*id, *status)));
        }
        statuses
    }

    pub(super) fn insert_status(&self, id: CounterId, status: CachedStatus) {
        if let Some(shard) = self.shard_for_counter(id) {
            let mut generations = shard.lock();
            if generations.current.len() >= MAX_GENERATION_ENTRIES {
                generations.previous = std::mem::take(&mut generations.current);
            }
            generations.current.insert(id, status);
        }
    }

    fn shard_for_counter(&self, id: CounterId) -> Option<&Mutex<StatusGenerations>> {
        self.0
            .get(usize::try_from(id.0 % SHARD_COUNT as u128).ok()?)
    }
}

impl FallbackStore {
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
