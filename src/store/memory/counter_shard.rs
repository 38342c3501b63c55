//! One shard of the memory store: its counters, their expiry and eviction.

use super::policy_index::{CountersByPolicy, PolicyCounterPosition, StoreBound};
use crate::limiter::{Algorithm, Charge, CounterState, CounterView, Key, Limit};
use foldhash::fast::RandomState;
use indexmap::IndexMap;
use indexmap::map::Entry;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Number of counters of a policy that are compared to evict one.
const EVICTION_SAMPLE_SIZE: usize = 16;

/// Identity of a counter: the id of its key, and [`Limit::counter_identity`].
pub(in crate::store) type CounterId = (u128, Algorithm, u64);

/// Totals over all shards.
#[derive(Debug, Default)]
pub(super) struct MemoryUsage {
    pub key_count: AtomicUsize,
    /// Estimated size of all counters.
    pub byte_count: AtomicUsize,
    /// Counters evicted before they expired.
    pub evictions: AtomicU64,
}

#[derive(Debug)]
pub(super) struct CounterShard {
    pub counters: IndexMap<CounterId, StoredCounter, RandomState>,
    policies: CountersByPolicy,
    random: fastrand::Rng,
    /// Position at which [`CounterShard::sweep_expired`] continues.
    sweep_index: usize,
    /// Latest time of a decision in this shard (µs).
    pub newest_us: u64,
}

#[derive(Debug)]
pub(super) struct StoredCounter {
    pub state: CounterState,
    expires_at_us: u64,
    /// Used part of the quota at the last charge, in 1/65536.
    fullness: u32,
    policy_position: PolicyCounterPosition,
}

impl StoredCounter {
    fn estimated_bytes(&self) -> usize {
        COUNTER_BYTES + self.state.heap_bytes()
    }
}

pub(super) fn counter_id_for_charge(charge: &Charge<'_>) -> CounterId {
    counter_id(charge.limit, charge.key)
}

pub(in crate::store) fn counter_id(limit: &Limit, key: &Key) -> CounterId {
    let (algorithm, per_us) = limit.counter_identity();
    (key.id(), algorithm, per_us)
}

/// Estimated bytes of one counter: its slot in the map and its part of the hash and policy indexes.
pub(super) const COUNTER_BYTES: usize =
    size_of::<CounterId>() + size_of::<StoredCounter>() + 3 * size_of::<usize>() + size_of::<u32>();

fn fullness(used: u64, limit: &Limit) -> u32 {
    let share = u128::from(used) * 65_536 / u128::from(limit.capacity().max(1));
    u32::try_from(share).unwrap_or(u32::MAX)
}

impl Default for CounterShard {
    fn default() -> Self {
        Self {
            counters: IndexMap::default(),
            policies: CountersByPolicy::default(),
            // The seed is fixed, so that the same calls always evict the same counters.
            random: fastrand::Rng::with_seed(0),
            sweep_index: 0,
            newest_us: 0,
        }
    }
}

impl CounterShard {
    /// Changes a counter and returns its state afterwards.
    pub(super) fn change_counter<'a>(
        &'a mut self,
        usage: &MemoryUsage,
        charge: &Charge<'a>,
        now_us: u64,
        change: impl FnOnce(&mut CounterState),
    ) -> CounterView<'a> {
        let limit = charge.limit;
        let (counter, bytes_before) = match self.counters.entry(counter_id_for_charge(charge)) {
            Entry::Occupied(entry) => {
                let counter = entry.into_mut();
                let bytes = counter.estimated_bytes();
                (counter, bytes)
            }
            Entry::Vacant(entry) => {
                usage.key_count.fetch_add(1, Ordering::Relaxed);
                let counter = StoredCounter {
                    state: limit.initial_state(),
                    expires_at_us: 0,
                    fullness: 0,
                    policy_position: self.policies.insert_counter(charge.key, entry.index()),
                };
                (entry.insert(counter), 0)
            }
        };
        change(&mut counter.state);
        counter.expires_at_us = counter.state.expires_at_us(limit);
        let bytes = counter.estimated_bytes();
        if bytes != bytes_before {
            usage.byte_count.fetch_add(bytes, Ordering::Relaxed);
            usage.byte_count.fetch_sub(bytes_before, Ordering::Relaxed);
            self.policies
                .change_bytes(counter.policy_position, bytes_before, bytes);
        }
        let view = counter.state.view_at(limit, now_us);
        counter.fullness = fullness(view.used_units(), limit);
        view
    }

    /// Removes the expired counters among the next `max_counters`.
    pub(super) fn sweep_expired(&mut self, usage: &MemoryUsage, now_us: u64, max_counters: usize) {
        for _ in 0..max_counters.min(self.counters.len()) {
            if self.sweep_index >= self.counters.len() {
                self.sweep_index = 0;
            }
            match self.counters.get_index(self.sweep_index) {
                Some((_, counter)) if counter.expires_at_us <= now_us => {
                    self.remove_at_index(usage, self.sweep_index)
                }
                _ => self.sweep_index += 1,
            }
        }
    }

    /// Evicts a counter of the policy that uses the most of a bound: an expired one, else one with
    /// little of its quota used; of equals, one that expires early. Returns `false` if the shard is
    /// empty.
    pub(super) fn evict_counter(
        &mut self,
        usage: &MemoryUsage,
        now_us: u64,
        bound: StoreBound,
    ) -> bool {
        // The newest counter stays: if all older ones are exhausted, it would never count anything.
        let candidates = match self.policies.counters_of_largest_policy(bound) {
            [] => return false,
            [only] => std::slice::from_ref(only),
            [older @ .., _] => older,
        };
        let sample = (0..EVICTION_SAMPLE_SIZE).filter_map(|_| {
            let index = *candidates.get(self.random.usize(..candidates.len()))? as usize;
            let (_, counter) = self.counters.get_index(index)?;
            let is_live = counter.expires_at_us > now_us;
            Some((is_live, counter.fullness, counter.expires_at_us, index))
        });
        let Some((is_live, _, _, index)) = sample.min() else {
            return false;
        };
        usage
            .evictions
            .fetch_add(u64::from(is_live), Ordering::Relaxed);
        self.remove_at_index(usage, index);
        true
    }

    pub(super) fn remove_at_index(&mut self, usage: &MemoryUsage, at: usize) {
        let Some((_, counter)) = self.counters.get_index(at) else {
            return;
        };
        let (bytes, place) = (counter.estimated_bytes(), counter.policy_position);
        usage.key_count.fetch_sub(1, Ordering::Relaxed);
        usage.byte_count.fetch_sub(bytes, Ordering::Relaxed);
        self.policies.change_bytes(place, bytes, 0);
        // The policy's last counter takes the position, and the shard's last counter the index.
        let moved = self.policies.remove_counter(place);
        if let Some((_, counter)) = moved.and_then(|index| self.counters.get_index_mut(index)) {
            counter.policy_position = place;
        }
        self.counters.swap_remove_index(at);
        if let Some((_, moved)) = self.counters.get_index(at) {
            self.policies.set_counter_index(moved.policy_position, at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::KeyBuilder;

    impl CounterShard {
        fn assert_consistent(&self, usage: &MemoryUsage) {
            for (index, (_, counter)) in self.counters.iter().enumerate() {
                assert_eq!(self.policies.counter_index(counter.policy_position), index);
            }
            let bytes: usize = self
                .counters
                .values()
                .map(StoredCounter::estimated_bytes)
                .sum();
            let totals = (self.counters.len(), bytes);
            assert_eq!(self.policies.totals(), totals);
            let usage = (&usage.key_count, &usage.byte_count);
            assert_eq!(
                (
                    usage.0.load(Ordering::Relaxed),
                    usage.1.load(Ordering::Relaxed)
                ),
                totals
            );
        }
    }

    #[test]
    fn the_policy_index_follows_every_change() {
        let (mut shard, usage) = (CounterShard::default(), MemoryUsage::default());
        let mut random = fastrand::Rng::with_seed(11);
        for now_us in 1..20_000 {
            // Policies come and go: about ten of them have counters at a time.
            let policy = now_us / 500 + random.u64(..10);
            let mut key = KeyBuilder::new(&policy.to_string());
            key.push_key_value(Some(&random.u8(..40).to_be_bytes()));
            let (limit, key) = (
                Limit {
                    requests: 50,
                    per_us: 1_000,
                    algorithm: Algorithm::SlidingLog,
                },
                key.finish(),
            );
            let charge = Charge::new(&limit, &key, 1);
            match random.u8(..10) {
                0 => shard.sweep_expired(&usage, now_us, 20),
                1 if !shard.counters.is_empty() => {
                    shard.remove_at_index(&usage, random.usize(..shard.counters.len()));
                }
                2 => drop(shard.evict_counter(&usage, now_us, StoreBound::Keys)),
                3 => drop(shard.evict_counter(&usage, now_us, StoreBound::Bytes)),
                _ => {
                    shard.change_counter(&usage, &charge, now_us, |state| {
                        state.charge(&charge, now_us);
                    });
                }
            }
            if now_us % 50 == 0 {
                shard.assert_consistent(&usage);
            }
        }
        assert!(shard.policies.totals().0 > 100);
        while shard.evict_counter(&usage, 0, StoreBound::Keys) {}
        shard.assert_consistent(&usage);
        assert_eq!(shard.policies.totals(), (0, 0));
        assert!(shard.policies.policy_count() < 40);
    }
}
