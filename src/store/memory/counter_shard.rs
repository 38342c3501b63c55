//! One shard of the memory store: its counters, their expiry and eviction.

use crate::limiter::{Algorithm, Charge, CounterState, CounterView, Key, Limit};
use foldhash::fast::RandomState;
use indexmap::IndexMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Under pressure this fraction of a shard is evicted at once, so that a flood of keys causes few
/// scans.
const EVICTION_DIVISOR: usize = 64;

/// Identity of a counter: the id of its key, and [`Limit::counter_identity`].
pub(in crate::store) type CounterId = (u128, Algorithm, u64);

/// Totals over all shards.
#[derive(Debug, Default)]
pub(super) struct MemoryUsage {
    pub key_count: AtomicUsize,
    /// Estimated.
    pub byte_count: AtomicUsize,
    /// Counters evicted before they expired.
    pub evictions: AtomicU64,
}

#[derive(Debug, Default)]
pub(super) struct CounterShard {
    pub counters: IndexMap<CounterId, StoredCounter, RandomState>,
    /// Position at which [`CounterShard::sweep`] continues.
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
    bytes: usize,
}

pub(super) fn charge_counter_id(charge: &Charge<'_>) -> CounterId {
    counter_id(charge.limit, charge.key)
}

pub(in crate::store) fn counter_id(limit: &Limit, key: &Key) -> CounterId {
    let (algorithm, per_us) = limit.counter_identity();
    (key.id(), algorithm, per_us)
}

/// Estimated bytes of one counter in the map: its slot and its part of the hash index.
pub(super) const COUNTER_BYTES: usize =
    size_of::<CounterId>() + size_of::<StoredCounter>() + 3 * size_of::<usize>();

fn fullness(used: u64, limit: &Limit) -> u32 {
    let share = u128::from(used) * 65_536 / u128::from(limit.capacity().max(1));
    u32::try_from(share).unwrap_or(u32::MAX)
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
        let counter = self
            .counters
            .entry(charge_counter_id(charge))
            .or_insert_with(|| {
                usage.key_count.fetch_add(1, Ordering::Relaxed);
                usage.byte_count.fetch_add(COUNTER_BYTES, Ordering::Relaxed);
                StoredCounter {
                    state: limit.initial_state(),
                    expires_at_us: 0,
                    fullness: 0,
                    bytes: COUNTER_BYTES,
                }
            });
        change(&mut counter.state);
        counter.expires_at_us = counter.state.expires_at_us(limit);
        let bytes = COUNTER_BYTES + counter.state.heap_bytes();
        if bytes != counter.bytes {
            usage.byte_count.fetch_add(bytes, Ordering::Relaxed);
            usage.byte_count.fetch_sub(
                std::mem::replace(&mut counter.bytes, bytes),
                Ordering::Relaxed,
            );
        }
        let view = counter.state.view_at(limit, now_us);
        counter.fullness = fullness(view.used(), limit);
        view
    }

    /// Removes the expired counters among the next `max_counters`.
    pub(super) fn sweep(&mut self, usage: &MemoryUsage, now_us: u64, max_counters: usize) {
        for _ in 0..max_counters.min(self.counters.len()) {
            if self.sweep_index >= self.counters.len() {
                self.sweep_index = 0;
            }
            match self.counters.get_index(self.sweep_index) {
                Some((_, counter)) if counter.expires_at_us <= now_us => {
                    self.remove(usage, self.sweep_index)
                }
                _ => self.sweep_index += 1,
            }
        }
    }

    /// Evicts the counters with the least of their quota used; of equals, those that expire first.
    /// Returns `false` if the shard is empty.
    pub(super) fn evict_least_used(&mut self, usage: &MemoryUsage) -> bool {
        let count = (self.counters.len() / EVICTION_DIVISOR).max(1);
        let mut order: Vec<(u32, u64, CounterId)> = self
            .counters
            .iter()
            .map(|(id, counter)| (counter.fullness, counter.expires_at_us, *id))
            .collect();
        if order.is_empty() {
            return false;
        }
        let count = count.min(order.len());
        order.select_nth_unstable_by_key(count - 1, |(fullness, expires_at_us, _)| {
            (*fullness, *expires_at_us)
        });
        for (_, _, id) in order.iter().take(count) {
            if let Some(at) = self.counters.get_index_of(id) {
                self.remove(usage, at);
                usage.evictions.fetch_add(1, Ordering::Relaxed);
            }
        }
        true
    }

    pub(super) fn remove(&mut self, usage: &MemoryUsage, at: usize) {
        if let Some((_, counter)) = self.counters.swap_remove_index(at) {
            usage.key_count.fetch_sub(1, Ordering::Relaxed);
            usage.byte_count.fetch_sub(counter.bytes, Ordering::Relaxed);
        }
    }
}
