//! The last override that Redis reported for each counter of a `dynamic` policy with
//! `on_store_failure = "local"`. It applies while Redis is unavailable.

use crate::limiter::OverrideInEffect;
use crate::store::memory::CounterId;
use parking_lot::Mutex;
use std::collections::HashMap;

/// Maximum number of entries in each generation of a shard, about 80 bytes each: 5 MiB in all. The
/// oldest entries are dropped first, and their keys get the limits of the file.
const MAX_GENERATION_ENTRIES: usize = 1 << 11;
const SHARD_COUNT: usize = 16;

/// Overrides by counter. Process-wide, in shards with a lock each.
#[derive(Debug, Default)]
pub(super) struct OverrideCache([Mutex<OverrideGenerations>; SHARD_COUNT]);

/// Two generations of entries. When the current one is full, it replaces the previous one.
#[derive(Debug, Default)]
struct OverrideGenerations {
    current: OverrideGeneration,
    previous: OverrideGeneration,
}

type OverrideGeneration = HashMap<CounterId, OverrideInEffect, foldhash::fast::RandomState>;

impl OverrideCache {
    /// Remembers what Redis reported for a counter: its override, or that it has none.
    pub(super) fn record(&self, id: CounterId, in_effect: Option<OverrideInEffect>) {
        let Some(shard) = self.shard_for_counter(id) else {
            return;
        };
        let mut generations = shard.lock();
        let Some(in_effect) = in_effect else {
            generations.current.remove(&id);
            generations.previous.remove(&id);
            return;
        };
        let is_known = generations.current.contains_key(&id);
        if generations.current.len() >= MAX_GENERATION_ENTRIES && !is_known {
            generations.previous = std::mem::take(&mut generations.current);
        }
        generations.current.insert(id, in_effect);
    }

    pub(super) fn find(&self, id: CounterId) -> Option<OverrideInEffect> {
        let generations = self.shard_for_counter(id)?.lock();
        let current = generations.current.get(&id);
        current.or_else(|| generations.previous.get(&id)).copied()
    }

    fn shard_for_counter(&self, id: CounterId) -> Option<&Mutex<OverrideGenerations>> {
        self.0
            .get(usize::try_from(id.0 % SHARD_COUNT as u128).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::Algorithm;

    #[test]
    fn the_oldest_overrides_are_dropped_and_a_removed_one_is_forgotten() {
        let cache = OverrideCache::default();
        let id = |n: usize| ((n * SHARD_COUNT) as u128, Algorithm::SlidingLog, 1);
        let blocked = Some(OverrideInEffect::Blocked);
        for n in 0..=2 * MAX_GENERATION_ENTRIES {
            cache.record(id(n), blocked);
        }
        assert_eq!(cache.find(id(0)), None);
        assert_eq!(cache.find(id(MAX_GENERATION_ENTRIES)), blocked);
        assert_eq!(cache.find(id(2 * MAX_GENERATION_ENTRIES)), blocked);
        cache.record(id(MAX_GENERATION_ENTRIES), None);
        assert_eq!(cache.find(id(MAX_GENERATION_ENTRIES)), None);
    }
}
