//! One shard of the memory store: its counters by policy, their expiry and eviction.

use crate::clock::Clock;
use crate::limiter::{Algorithm, CounterRef, CounterState, CounterView, Limit, TimeWindow};
use foldhash::fast::RandomState;
use indexmap::IndexMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Number of counters of a policy that are compared to evict one.
const EVICTION_SAMPLE_SIZE: usize = 16;

/// Identity of a counter: the id of its key, and [`Limit::counter_identity`].
pub(crate) type CounterId = (u128, Algorithm, u64);

/// Totals over all shards.
#[derive(Debug, Default)]
pub(super) struct MemoryUsage {
    pub key_count: AtomicUsize,
    /// Estimated size of all counters.
    pub byte_count: AtomicUsize,
    /// Counters evicted before they expired.
    pub evictions: AtomicU64,
}

#[derive(Debug, Default)]
pub(super) struct CounterShard {
    /// Policies with counters, by [`Key::encoded_policy_name`].
    policies: IndexMap<Box<[u8]>, PolicyCounters, RandomState>,
    /// Evictions so far: the seed of the next one, so that the same calls always evict the same
    /// counters.
    eviction_count: u64,
    /// Indices of the policy and of its counter at which [`CounterShard::sweep_expired`] continues.
    sweep_position: (usize, usize),
    /// Latest time of a decision in this shard (µs), and of the wall clock then.
    pub newest_us: u64,
    pub newest_wall_us: u64,
}

/// The counters of one policy, the newest one last.
#[derive(Debug)]
struct PolicyCounters {
    counters: IndexMap<CounterId, StoredCounter, RandomState>,
    /// Estimated size of the policy and its counters.
    byte_count: usize,
}

#[derive(Debug)]
pub(super) struct StoredCounter {
    pub state: CounterState,
    /// When the state expires, if the wall clock makes no step.
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

/// The time of a decision.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StoreTime {
    /// The store's clock, which never steps.
    pub now_us: u64,
    /// The wall clock, for limits whose windows follow it.
    pub wall_us: u64,
    /// The latest time of the wall clock.
    pub newest_wall_us: u64,
}

impl StoreTime {
    /// Reads a counter. A missing one, and one that has ended, reads as a new one.
    pub(super) fn view_counter<T>(
        self,
        counter: Option<&StoredCounter>,
        limit: &Limit,
        read_view: impl FnOnce(CounterView<'_>) -> T,
    ) -> T {
        let view = |state: &CounterState, at_us| {
            let view = state.view_at(limit, at_us);
            read_view(view.with_reported_clock(self.wall_us))
        };
        match (counter, self.of_counter(limit, counter)) {
            (Some(counter), Some(at_us)) => view(&counter.state, at_us),
            (_, at_us) => view(&self.initial_state(limit), at_us.unwrap_or(self.wall_us)),
        }
    }

    /// The state of a new counter. Its earlier state may be removed already, so that no window that
    /// has ended begins again: after a step back, it begins with the window of the latest time.
    fn initial_state(self, limit: &Limit) -> CounterState {
        if limit.algorithm.follows_wall_clock() && self.newest_wall_us > self.wall_us {
            let window = limit.window_at(self.newest_wall_us);
            if self.wall_us < window.start_us && !is_long_before(self.wall_us, window) {
                return CounterState::from_window(window);
            }
        }
        limit.initial_state()
    }

    /// The time of a limit's counter. `None` if the state of the counter has ended.
    ///
    /// A window lasts until its end by the wall clock. If that clock was set back to more than a
    /// window's length before its start, the window lasts as long as it would have without that,
    /// and then until the next window of the wall clock begins.
    fn of_counter(self, limit: &Limit, counter: Option<&StoredCounter>) -> Option<u64> {
        if !limit.algorithm.follows_wall_clock() {
            return Some(self.now_us);
        }
        let window = counter.and_then(|counter| counter.state.wall_clock_window());
        match (counter, window) {
            (Some(counter), Some(window)) if is_long_before(self.wall_us, window) => {
                let end_us = (self.wall_us + counter.expires_at_us).saturating_sub(self.now_us + 1);
                let left_us = limit.window_at(end_us).end_us.saturating_sub(self.wall_us);
                (left_us > 0).then(|| window.end_us.saturating_sub(left_us))
            }
            _ => Some(self.wall_us),
        }
    }
}

/// Whether a time is more than a window's length before its start.
fn is_long_before(at_us: u64, window: TimeWindow) -> bool {
    at_us.saturating_add(window.length_us()) < window.start_us
}

impl StoredCounter {
    /// Whether the state equals that of a new counter, also if the wall clock was set back.
    fn is_expired(&self, now_us: u64, clock: &Clock) -> bool {
        self.expires_at_us <= now_us
            && self.state.wall_clock_window().is_none_or(|window| {
                let wall_us = now_us.saturating_add_signed(clock.wall_shift_us());
                let is_over = self.expires_at_us.saturating_add(window.length_us()) <= now_us;
                wall_us >= window.end_us || is_over && is_long_before(wall_us, window)
            })
    }

    fn estimated_bytes(&self) -> usize {
        COUNTER_BYTES + self.state.heap_bytes()
    }
}

pub(crate) fn counter_id(counter: CounterRef<'_>) -> CounterId {
    let (algorithm, per_us) = counter.limit.counter_identity();
    (counter.key.id(), algorithm, per_us)
}

/// Estimated bytes of one counter: its slot in the map and its part of the hash index.
pub(super) const COUNTER_BYTES: usize =
    estimate_slot_bytes(size_of::<(usize, CounterId, StoredCounter)>());

/// Estimated bytes of a policy without its counters: its slot in the map of policies, its name, and
/// the smallest hash index of its counters.
fn policy_bytes(name: &[u8]) -> usize {
    const SLOT_BYTES: usize = estimate_slot_bytes(size_of::<(usize, Box<[u8]>, PolicyCounters)>());
    const SMALLEST_INDEX_BYTES: usize = 64;
    SLOT_BYTES + SMALLEST_INDEX_BYTES + name.len()
}

/// Estimated bytes of a map per entry: a slot, half of the free slots that [`reserve_slot`] and
/// [`release_free_slots`] leave, and the hash index, which has 10 to 26 bytes per entry.
const fn estimate_slot_bytes(slot_bytes: usize) -> usize {
    const INDEX_BYTES: usize = 18;
    slot_bytes + slot_bytes / 8 + INDEX_BYTES
}

/// Makes room for one more entry. By itself, the map would double, and have up to as many free
/// slots as entries.
fn reserve_slot<K, V>(map: &mut IndexMap<K, V, RandomState>) {
    if map.len() == map.capacity() {
        map.reserve_exact((map.len() / 8).max(1));
    }
}

/// Frees memory if more than a quarter of the slots in use are free.
fn release_free_slots<K, V>(map: &mut IndexMap<K, V, RandomState>) {
    let len = map.len();
    if map.capacity() > len + (len / 4).max(1) {
        map.shrink_to(len + len / 8);
    }
}

fn fullness(used: u64, limit: &Limit) -> u32 {
    let share = u128::from(used) * 65_536 / u128::from(limit.capacity().max(1));
    u32::try_from(share).unwrap_or(u32::MAX)
}

impl CounterShard {
    pub(super) fn get_counter(&self, counter: CounterRef<'_>) -> Option<&StoredCounter> {
        let policy = self.policies.get(counter.key.encoded_policy_name())?;
        policy.counters.get(&counter_id(counter))
    }

    /// Changes a counter and returns its state afterwards.
    pub(super) fn change_counter<'a>(
        &'a mut self,
        usage: &MemoryUsage,
        counter_ref: CounterRef<'a>,
        time: StoreTime,
        change: impl FnOnce(&mut CounterState, u64),
    ) -> Option<CounterView<'a>> {
        let CounterRef { limit, key } = counter_ref;
        let name = key.encoded_policy_name();
        let policy_index = match self.policies.get_index_of(name) {
            Some(index) => index,
            None => {
                let policy = PolicyCounters {
                    counters: IndexMap::default(),
                    byte_count: policy_bytes(name),
                };
                usage
                    .byte_count
                    .fetch_add(policy.byte_count, Ordering::Relaxed);
                reserve_slot(&mut self.policies);
                self.policies.insert_full(name.into(), policy).0
            }
        };
        let (_, policy) = self.policies.get_index_mut(policy_index)?;
        reserve_slot(&mut policy.counters);
        let mut bytes_before = None;
        let counter = policy
            .counters
            .entry(counter_id(counter_ref))
            .and_modify(|counter| bytes_before = Some(counter.estimated_bytes()))
            .or_insert_with(|| StoredCounter {
                state: time.initial_state(limit),
                expires_at_us: 0,
                fullness: 0,
            });
        let at_us = time.of_counter(limit, Some(&*counter)).unwrap_or_else(|| {
            counter.state = time.initial_state(limit);
            time.wall_us
        });
        change(&mut counter.state, at_us);
        let view = counter.state.view_at(limit, at_us);
        let expires_us = counter.state.expires_at_us(limit);
        counter.expires_at_us = view
            .with_reported_clock(time.now_us)
            .reported_time_us(expires_us);
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
        let view = view.with_reported_clock(time.wall_us);
        counter.fullness = fullness(view.used_units(), limit);
        Some(view)
    }

    /// Removes a counter. Returns whether it existed.
    pub(super) fn remove_counter(&mut self, usage: &MemoryUsage, counter: CounterRef<'_>) -> bool {
        let id = counter_id(counter);
        let policy = self.policies.get_full(counter.key.encoded_policy_name());
        let index =
            policy.and_then(|(index, _, policy)| Some((index, policy.counters.get_index_of(&id)?)));
        if let Some((policy_index, counter_index)) = index {
            self.remove_at_index(usage, policy_index, counter_index);
        }
        index.is_some()
    }

    /// Removes the expired counters among the next `max_counters`.
    pub(super) fn sweep_expired(
        &mut self,
        usage: &MemoryUsage,
        (now_us, clock): (u64, &Clock),
        max_counters: usize,
    ) {
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
                Some((_, counter)) if counter.is_expired(now_us, clock) => {
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
        self.eviction_count += 1;
        let mut random = fastrand::Rng::with_seed(self.eviction_count);
        // The newest counter stays: if all older ones are exhausted, it would never count anything.
        let candidate_count = counters.len().saturating_sub(1).max(1);
        let sample = (0..EVICTION_SAMPLE_SIZE).filter_map(|_| {
            let index = random.usize(..candidate_count);
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
        let Some((_, counter)) = policy.counters.swap_remove_index(counter_index) else {
            return;
        };
        let bytes = counter.estimated_bytes();
        usage.key_count.fetch_sub(1, Ordering::Relaxed);
        usage.byte_count.fetch_sub(bytes, Ordering::Relaxed);
        policy.byte_count = policy.byte_count.saturating_sub(bytes);
        if policy.counters.is_empty() {
            let byte_count = policy.byte_count;
            usage.byte_count.fetch_sub(byte_count, Ordering::Relaxed);
            self.policies.swap_remove_index(policy_index);
            release_free_slots(&mut self.policies);
        } else {
            release_free_slots(&mut policy.counters);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{Amendment, KeyBuilder};

    impl CounterShard {
        /// The number of all counters, and of all bytes.
        fn totals(&self) -> (usize, usize) {
            let counters = || self.policies.values().flat_map(|one| one.counters.values());
            let bytes: usize = counters().map(StoredCounter::estimated_bytes).sum();
            let policies = self.policies.keys().map(|name| policy_bytes(name));
            (counters().count(), bytes + policies.sum::<usize>())
        }

        /// The allocated bytes of all maps, names and states, by their capacities.
        fn allocated_bytes(&self) -> usize {
            let policies = self.policies.iter().map(|(name, policy)| {
                let states = policy.counters.values();
                let states = states.map(|counter| counter.state.heap_bytes());
                name.len() + map_bytes(&policy.counters) + states.sum::<usize>()
            });
            map_bytes(&self.policies) + policies.sum::<usize>()
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

    /// The entries are a vector. The index has a power of two of buckets, of 8 bytes and a control
    /// byte, up to 7/8 of which are in use; 16 more control bytes follow.
    fn map_bytes<K, V>(map: &IndexMap<K, V, RandomState>) -> usize {
        let buckets = match map.capacity() {
            0 => return 0,
            1..4 => 4,
            4..8 => 8,
            capacity => (capacity * 8 / 7).next_power_of_two(),
        };
        map.capacity() * size_of::<(usize, K, V)>() + buckets * (size_of::<usize>() + 1) + 16
    }

    /// The estimate is at most 10 % below the allocated memory, also for policies with few counters
    /// in a shard, and after removals.
    fn time_at(now_us: u64) -> StoreTime {
        StoreTime {
            now_us,
            wall_us: now_us,
            newest_wall_us: now_us,
        }
    }

    #[test]
    fn the_estimate_covers_the_allocated_memory() {
        let algorithms = [
            Algorithm::SlidingLog,
            Algorithm::SlidingWindow { buckets: 10 },
            Algorithm::FixedWindow { offset_us: 0 },
            Algorithm::TokenBucket {
                burst: 10,
                warm_up_us: 0,
            },
            Algorithm::LeakyBucket { max_delay_us: 1000 },
            Algorithm::Concurrency { max_duration_us: 0 },
            Algorithm::Block,
        ];
        for algorithm in algorithms {
            let limit = Limit {
                requests: 10,
                per_us: 1_000_000,
                algorithm,
            };
            for (policies, keys) in [(1, 1), (500, 1), (300, 3), (100, 20), (3, 500), (1, 3000)] {
                let (mut shard, usage) = (CounterShard::default(), MemoryUsage::default());
                let check = |shard: &CounterShard, state: &str| {
                    let estimated = usage.byte_count.load(Ordering::Relaxed);
                    let allocated = shard.allocated_bytes();
                    assert!(
                        estimated * 10 >= allocated * 9,
                        "{algorithm:?}, {policies}×{keys}, {state}: {estimated} of {allocated}"
                    );
                };
                for number in 0..policies * keys {
                    let mut key = KeyBuilder::new(&format!("policy-{}", number % policies));
                    key.push_key_value(Some(number.to_string().as_bytes()));
                    let key = key.finish();
                    let counter = CounterRef {
                        limit: &limit,
                        key: &key,
                    };
                    let charge = |state: &mut CounterState, at_us| {
                        state.amend(&limit, Amendment::Charge(1), at_us)
                    };
                    shard.change_counter(&usage, counter, time_at(5), charge);
                }
                check(&shard, "filled");
                while shard.totals().0 > policies * keys / 3 {
                    shard.evict_counter(&usage, 5, StoreBound::Keys);
                }
                if shard.totals().0 > 0 {
                    check(&shard, "partly evicted");
                }
            }
        }
    }

    #[test]
    fn the_totals_follow_every_change() {
        let (mut shard, usage) = (CounterShard::default(), MemoryUsage::default());
        let mut random = fastrand::Rng::with_seed(11);
        let (clock, _) = Clock::manual(0);
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
            let counter = CounterRef {
                limit: &limit,
                key: &key,
            };
            match random.u8(..10) {
                0 => shard.sweep_expired(&usage, (now_us, &clock), 20),
                1 => drop(shard.remove_counter(&usage, counter)),
                2 => drop(shard.evict_counter(&usage, now_us, StoreBound::Keys)),
                3 => drop(shard.evict_counter(&usage, now_us, StoreBound::Bytes)),
                _ => {
                    let charge = |state: &mut CounterState, at_us| {
                        state.amend(&limit, Amendment::Charge(1), at_us)
                    };
                    shard.change_counter(&usage, counter, time_at(now_us), charge);
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
