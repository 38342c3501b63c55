//! One shard of the memory store: its counters by policy, their expiry and eviction.

use crate::limiter::{Algorithm, Charge, CounterState, CounterView, Key, Limit};
use foldhash::fast::RandomState;
use indexmap::IndexMap;
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
    /// Policies with counters, by [`Key::encoded_policy_name`].
    policies: IndexMap<Box<[u8]>, PolicyCounters, RandomState>,
    random: fastrand::Rng,
    /// Indices of the policy and of its counter at which [`CounterShard::sweep_expired`] continues.
    sweep_position: (usize, usize),
    /// Latest time of a decision in this shard (µs).
    pub newest_us: u64,
}

/// The counters of one policy, the newest one last.
#[derive(Debug, Default)]
struct PolicyCounters {
    counters: IndexMap<CounterId, StoredCounter, RandomState>,
    byte_count: usize,
}

#[derive(Debug)]
pub(super) struct StoredCounter {
    pub state: CounterState,
    expires_at_us: u64,
    /// Used part of the quota at the last charge, in 1/65536.
    fullness: u32,
}

/// A bound of the memory store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreBound {
    Keys,
    Bytes,
}

impl StoredCounter {
    fn estimated_bytes(&self) -> usize {
        COUNTER_BYTES + self.state.heap_bytes()
    }
}

pub(in crate::store) fn counter_id(limit: &Limit, key: &Key) -> CounterId {
    let (algorithm, per_us) = limit.counter_identity();
    (key.id(), algorithm, per_us)
}

/// Estimated bytes of one counter: its slot in the map and its part of the hash index.
pub(super) const COUNTER_BYTES: usize =
    size_of::<CounterId>() + size_of::<StoredCounter>() + 3 * size_of::<usize>();

fn fullness(used: u64, limit: &Limit) -> u32 {
    let share = u128::from(used) * 65_536 / u128::from(limit.capacity().max(1));
    u32::try_from(share).unwrap_or(u32::MAX)
}

impl Default for CounterShard {
    fn default() -> Self {
        Self {
            policies: IndexMap::default(),
            // The seed is fixed, so that the same calls always evict the same counters.
            random: fastrand::Rng::with_seed(0),
            sweep_position: (0, 0),
            newest_us: 0,
        }
    }
}

impl CounterShard {
    pub(super) fn get_counter(&self, charge: &Charge<'_>) -> Option<&StoredCounter> {
        let policy = self.policies.get(charge.key.encoded_policy_name())?;
        policy.counters.get(&counter_id(charge.limit, charge.key))
    }

    /// Changes a counter and returns its state afterwards.
    pub(super) fn change_counter<'a>(
        &'a mut self,
        usage: &MemoryUsage,
        charge: &Charge<'a>,
        now_us: u64,
        change: impl FnOnce(&mut CounterState),
    ) -> Option<CounterView<'a>> {
        let (limit, name) = (charge.limit, charge.key.encoded_policy_name());
        let policy_index = match self.policies.get_index_of(name) {
            Some(index) => index,
            None => {
                self.policies
                    .insert_full(name.into(), PolicyCounters::default())
                    .0
            }
        };
        let (_, policy) = self.policies.get_index_mut(policy_index)?;
        let mut bytes_before = None;
        let counter = policy
            .counters
            .entry(counter_id(limit, charge.key))
            .and_modify(|counter| bytes_before = Some(counter.estimated_bytes()))
            .or_insert_with(|| StoredCounter {
                state: limit.initial_state(),
                expires_at_us: 0,
                fullness: 0,
            });
        change(&mut counter.state);
        counter.expires_at_us = counter.state.expires_at_us(limit);
        let bytes = counter.estimated_bytes();
        if bytes_before.is_none() {
            usage.key_count.fetch_add(1, Ordering::Relaxed);
        }
        if bytes_before != Some(bytes) {
            let bytes_before = bytes_before.unwrap_or(0);
            usage.byte_count.fetch_add(bytes, Ordering::Relaxed);
            usage.byte_count.fetch_sub(bytes_before, Ordering::Relaxed);
            policy.byte_count = (policy.byte_count + bytes).saturating_sub(bytes_before);
        }
        let view = counter.state.view_at(limit, now_us);
        counter.fullness = fullness(view.used_units(), limit);
        Some(view)
    }

    /// Removes a charge's counter. Returns whether it existed.
    pub(super) fn remove_counter(&mut self, usage: &MemoryUsage, charge: &Charge<'_>) -> bool {
        let id = counter_id(charge.limit, charge.key);
        let policy = self.policies.get_full(charge.key.encoded_policy_name());
        let index =
            policy.and_then(|(index, _, policy)| Some((index, policy.counters.get_index_of(&id)?)));
        if let Some((policy_index, counter_index)) = index {
            self.remove_at_index(usage, policy_index, counter_index);
        }
        index.is_some()
    }

    /// Removes the expired counters among the next `max_counters`.
    pub(super) fn sweep_expired(&mut self, usage: &MemoryUsage, now_us: u64, max_counters: usize) {
        for _ in 0..max_counters {
            let (mut policy_index, mut counter_index) = self.sweep_position;
            let policy = self.policies.get_index(policy_index);
            if policy.is_none_or(|(_, policy)| counter_index >= policy.counters.len()) {
                let is_last = policy_index + 1 >= self.policies.len();
                policy_index = if is_last { 0 } else { policy_index + 1 };
                counter_index = 0;
            }
            let policy = self.policies.get_index(policy_index);
            match policy.and_then(|(_, policy)| policy.counters.get_index(counter_index)) {
                Some((_, counter)) if counter.expires_at_us <= now_us => {
                    self.remove_at_index(usage, policy_index, counter_index);
                }
                _ => counter_index += 1,
            }
            self.sweep_position = (policy_index, counter_index);
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
        let policies = self.policies.values().enumerate();
        let largest = policies.max_by_key(|(_, policy)| match bound {
            StoreBound::Keys => policy.counters.len(),
            StoreBound::Bytes => policy.byte_count,
        });
        let Some((policy_index, PolicyCounters { counters, .. })) = largest else {
            return false;
        };
        // The newest counter stays: if all older ones are exhausted, it would never count anything.
        let candidate_count = counters.len().saturating_sub(1).max(1);
        let sample = (0..EVICTION_SAMPLE_SIZE).filter_map(|_| {
            let index = self.random.usize(..candidate_count);
            let (_, counter) = counters.get_index(index)?;
            let is_live = counter.expires_at_us > now_us;
            Some((is_live, counter.fullness, counter.expires_at_us, index))
        });
        let Some((is_live, _, _, counter_index)) = sample.min() else {
            return false;
        };
        usage
            .evictions
            .fetch_add(u64::from(is_live), Ordering::Relaxed);
        self.remove_at_index(usage, policy_index, counter_index);
        true
    }

    fn remove_at_index(&mut self, usage: &MemoryUsage, policy_index: usize, counter_index: usize) {
        let Some((_, policy)) = self.policies.get_index_mut(policy_index) else {
            return;
        };
        let PolicyCounters {
            counters,
            byte_count,
        } = policy;
        let Some((_, counter)) = counters.swap_remove_index(counter_index) else {
            return;
        };
        let bytes = counter.estimated_bytes();
        usage.key_count.fetch_sub(1, Ordering::Relaxed);
        usage.byte_count.fetch_sub(bytes, Ordering::Relaxed);
        *byte_count = byte_count.saturating_sub(bytes);
        if counters.is_empty() {
            self.policies.swap_remove_index(policy_index);
        } else if counters.len() < counters.capacity() / 4 {
            counters.shrink_to(counters.len() * 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::KeyBuilder;

    impl CounterShard {
        /// The number of all counters, and of all bytes.
        fn totals(&self) -> (usize, usize) {
            let counters = || self.policies.values().flat_map(|one| one.counters.values());
            let bytes = counters().map(StoredCounter::estimated_bytes);
            (counters().count(), bytes.sum())
        }

        fn assert_consistent(&self, usage: &MemoryUsage) {
            let policies = self.policies.values();
            assert!(policies.clone().all(|policy| !policy.counters.is_empty()));
            let policy_bytes = policies.map(|policy| policy.byte_count).sum::<usize>();
            let (counters, bytes) = self.totals();
            assert_eq!(policy_bytes, bytes);
            assert_eq!(usage.key_count.load(Ordering::Relaxed), counters);
            assert_eq!(usage.byte_count.load(Ordering::Relaxed), bytes);
        }
    }

    #[test]
    fn the_totals_follow_every_change() {
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
                1 => drop(shard.remove_counter(&usage, &charge)),
                2 => drop(shard.evict_counter(&usage, now_us, StoreBound::Keys)),
                3 => drop(shard.evict_counter(&usage, now_us, StoreBound::Bytes)),
                _ => {
                    let charge_state = |state: &mut CounterState| state.charge(&charge, now_us);
                    shard.change_counter(&usage, &charge, now_us, charge_state);
                }
            }
            if now_us % 50 == 0 {
                shard.assert_consistent(&usage);
            }
        }
        assert!(shard.totals().0 > 100);
        while shard.evict_counter(&usage, 0, StoreBound::Keys) {}
        shard.assert_consistent(&usage);
        assert_eq!(shard.totals(), (0, 0));
    }
}
