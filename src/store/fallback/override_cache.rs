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

type OverrideGeneration = HashMap<CounterId, CachedOverride, foldhash::fast::RandomState>;

#[derive(Clone, Copy, Debug)]
struct CachedOverride {
    in_effect: OverrideInEffect,
    /// When it ends by itself, by the local clock (µs).
    ends_us: Option<u64>,
}

impl OverrideCache {
    /// Remembers what Redis reported for a counter: its override and when that ends by itself, or
    /// that it has none.
    pub(super) fn record(
        &self,
        id: CounterId,
        in_effect: Option<OverrideInEffect>,
        ends_us: Option<u64>,
    ) {
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
        let cached = CachedOverride { in_effect, ends_us };
        generations.current.insert(id, cached);
    }

    pub(super) fn find(&self, id: CounterId, now_us: u64) -> Option<OverrideInEffect> {
        let generations = self.shard_for_counter(id)?.lock();
        let current = generations.current.get(&id);
        let cached = current.or_else(|| generations.previous.get(&id))?;
        let is_current = cached.ends_us.is_none_or(|ends_us| now_us < ends_us);
        is_current.then_some(cached.in_effect)
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
            cache.record(id(n), blocked, None);
        }
        assert_eq!(cache.find(id(0), 0), None);
        assert_eq!(cache.find(id(MAX_GENERATION_ENTRIES), 0), blocked);
        assert_eq!(cache.find(id(2 * MAX_GENERATION_ENTRIES), 0), blocked);
        cache.record(id(MAX_GENERATION_ENTRIES), None, None);
        assert_eq!(cache.find(id(MAX_GENERATION_ENTRIES), 0), None);
    }
    #[test]
    fn an_override_that_has_expired_is_not_found() {
        let (cache, id) = (OverrideCache::default(), (0, Algorithm::SlidingLog, 1));
        let blocked = Some(OverrideInEffect::Blocked);
        cache.record(id, blocked, Some(100));
        assert_eq!(cache.find(id, 99), blocked);
        assert_eq!(cache.find(id, 100), None);
    }
}
