//! A bounded cache with a value per counter.

use crate::store::memory::CounterId;
use parking_lot::Mutex;
use std::collections::HashMap;

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
