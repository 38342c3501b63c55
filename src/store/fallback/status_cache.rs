//! The last status that Redis reported for each key of a policy with `on_store_failure = "local"`,
//! and the last overrides. In an outage, the counters of this process start from these statuses.

use super::{FallbackStore, Share, uses_fallback};
use crate::limiter::{
    Algorithm, Amendment, Charge, CounterRef, Decision, Limit, OverrideInEffect, PolicyCharges,
};
use crate::store::memory::{CounterId, counter_id};
use crate::store::override_end_us;
use parking_lot::Mutex;
use std::collections::HashMap;
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

/// The last override that Redis reported for a counter.
#[derive(Clone, Copy, Debug)]
pub(super) struct CachedOverride {
    pub(super) in_effect: OverrideInEffect,
    /// When it ends by itself, by the local clock (µs).
    pub(super) ends_us: Option<u64>,
}

impl FallbackStore {
    /// Caches the statuses reported by Redis, from which a later outage starts.
    pub fn cache_statuses(
        &self,
        request: &[PolicyCharges<'_>],
        decision: &Decision,
        received_at: Instant,
    ) {
        let received_us = self.clock.instant_to_unix_us(received_at);
        let to_local_us =
            |at_us: u64| received_us.saturating_add(at_us.saturating_sub(decision.now_us));
        let policies = request.iter().zip(&decision.policies);
        let charges = policies.flat_map(|(policy, decided)| {
            let charges = policy.charges().zip(&decided.limits);
            charges.map(move |(charge, outcome)| (charge, outcome, decided.grant))
        });
        let mut changed_key = None;
        for (charge, outcome, grant) in charges {
            let Some(mut status) = outcome.status else {
                continue;
            };
            let id = counter_id(charge.counter());
            if charge.name.is_some() {
                let ends_us = outcome.override_expires_at_ms.map(override_end_us);
                let ends_us = ends_us.map(to_local_us);
                let in_effect = status.in_effect;
                let cached = in_effect.map(|in_effect| CachedOverride { in_effect, ends_us });
                let last = self.override_cache.replace(id, cached);
                // All counters of a key have the same override.
                if last.map(|last| last.in_effect) != in_effect
                    && changed_key.replace(charge.key.id()) != Some(charge.key.id())
                {
                    self.override_change_count.fetch_add(1, Ordering::Relaxed);
                }
            }
            if !uses_fallback(charge.policy) {
                continue;
            }
            if let Some(grant) = grant {
                // Each instance uses only its share of the remaining units, so the units that this
                // instance has just leased are deducted once per instance.
                let instances = self.share().instance_count().into();
                let leased_units = grant.units.saturating_mul(instances);
                status.remaining = status.remaining.saturating_sub(leased_units);
            }
            match charge.limit.algorithm {
                _ if status.is_unlimited() => {}
                // The slots in use are counted in this process; the number reported by Redis is not
                // needed.
                Algorithm::Concurrency { .. } => {
                    let amendment = Amendment::Renew {
                        slot: charge.policy.slot_id,
                    };
                    // A charge without cost reads the slots, and takes none.
                    if decision.admitted && charge.cost > 0 {
                        self.amend_share(charge.counter(), amendment);
                    }
                }
                _ if self.may_be_stale(charge.policy) => {}
                // A block that is not in effect.
                Algorithm::Block if status.next_growth_us.is_none() => {}
                _ => {
                    let block_ends_us = status.next_growth_us.filter(|_| charge.is_block());
                    let cached = CachedStatus {
                        remaining: status.remaining,
                        received_at_us: received_us,
                        block_ends_us: block_ends_us.map(to_local_us),
                    };
                    self.status_cache.replace(id, Some(cached));
                }
            }
        }
    }

    /// Starts the local counter from a status of Redis.
    ///
    /// A status from soon after an outage can only reduce the remaining units. Instances without a
    /// status still use the rest of their shares, so a new share of all remaining units would
    /// exceed the limit.
    pub(super) fn apply_status(
        &self,
        charge: &Charge<'_, '_>,
        status: CachedStatus,
        requested_at: Instant,
    ) {
        let share = self.share();
        let limit = share.scale_limit(charge.limit);
        let ended_us = self.outage_ended_us.load(Ordering::Relaxed);
        let is_soon = status.received_at_us.saturating_sub(ended_us) < STATUS_EXCHANGE_US;
        let used_units = || self.usage_of_share(charge.counter()).0;
        if !is_soon || status.used_units(share, &limit) >= used_units() {
            let now_us = self.clock.instant_to_unix_us(requested_at);
            let counter = CounterRef {
                limit: &limit,
                key: charge.key,
            };
            self.memory.remove_counters([counter]);
            self.amend_share(counter, status.to_amendment(share, &limit, now_us));
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
        let (units, charged_at_us) = match self.block_ends_us {
            // A block lasts for `per_us` from its start.
            Some(ends_us) => (1, ends_us.saturating_sub(limit.per_us)),
            None => (self.used_units(share, limit), self.received_at_us),
        };
        Amendment::BackdatedCharge {
            units,
            age_us: now_us.saturating_sub(charged_at_us),
        }
    }
}

const SHARD_COUNT: usize = 16;

/// The newest values by counter. Process-wide, in shards with a lock each.
#[derive(Debug)]
pub(super) struct CounterCache<V, const MAX_GENERATION_ENTRIES: usize>(
    [Mutex<CacheGenerations<V>>; SHARD_COUNT],
);

/// The current and the previous generation of a shard. When the current one is full, it replaces
/// the previous one, which is dropped.
type CacheGenerations<V> = [HashMap<CounterId, V, foldhash::fast::RandomState>; 2];

impl<V, const MAX_GENERATION_ENTRIES: usize> Default for CounterCache<V, MAX_GENERATION_ENTRIES> {
    fn default() -> Self {
        Self(Default::default())
    }
}

impl<V: Copy, const MAX_GENERATION_ENTRIES: usize> CounterCache<V, MAX_GENERATION_ENTRIES> {
    /// Sets or removes the value of a counter. Returns the value before, if it was in the cache.
    pub(super) fn replace(&self, id: CounterId, value: Option<V>) -> Option<V> {
        let [current, previous] = &mut *self.shard_for_counter(id).lock();
        let older = previous.remove(&id);
        let Some(value) = value else {
            return current.remove(&id).or(older);
        };
        if current.len() >= MAX_GENERATION_ENTRIES && !current.contains_key(&id) {
            *previous = std::mem::take(current);
        }
        current.insert(id, value).or(older)
    }

    pub(super) fn find(&self, id: CounterId) -> Option<V> {
        let [current, previous] = &*self.shard_for_counter(id).lock();
        current.get(&id).or_else(|| previous.get(&id)).copied()
    }

    /// Removes the value of a counter and passes it to `apply`. The shard stays locked meanwhile.
    pub(super) fn remove_and_apply(&self, id: CounterId, apply: impl FnOnce(V)) {
        let [current, previous] = &mut *self.shard_for_counter(id).lock();
        let older = previous.remove(&id);
        if let Some(value) = current.remove(&id).or(older) {
            apply(value);
        }
    }

    pub(super) fn to_vec(&self) -> Vec<(CounterId, V)> {
        let mut values = Vec::new();
        for shard in &self.0 {
            let generations = shard.lock();
            values.extend(
                generations
                    .iter()
                    .flatten()
                    .map(|(id, value)| (*id, *value)),
            );
        }
        values
    }

    fn shard_for_counter(&self, id: CounterId) -> &Mutex<CacheGenerations<V>> {
        let [first, ..] = &self.0;
        let index = usize::try_from(id.0 % SHARD_COUNT as u128).unwrap_or(0);
        self.0.get(index).unwrap_or(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::Algorithm;

    #[test]
    fn the_oldest_values_are_dropped_and_a_removed_one_is_forgotten() {
        let cache = CounterCache::<usize, 10>::default();
        let id = |n: usize| ((n * SHARD_COUNT) as u128, Algorithm::SlidingLog, 1);
        (0..=20).for_each(|n| assert_eq!(cache.replace(id(n), Some(n)), None));
        assert_eq!(cache.replace(id(20), Some(21)), Some(20));
        assert_eq!(cache.replace(id(20), None), Some(21));
        assert_eq!(cache.replace(id(20), Some(20)), None);
        let found = |n| cache.find(id(n));
        assert_eq!([0, 9, 10, 20].map(found), [None, None, Some(10), Some(20)]);
        let mut removed = None;
        cache.remove_and_apply(id(10), |value| removed = Some(value));
        assert_eq!((removed, found(10)), (Some(10), None));
        assert_eq!(cache.to_vec().len(), 10);
    }
}
