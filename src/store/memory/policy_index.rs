//! The counters of one shard by policy, so that a policy evicts its own counters.

use crate::limiter::Key;
use foldhash::fast::RandomState;
use std::collections::HashMap;

/// The counters of a shard, by the policy of their key. Counters are named by their index in the
/// shard's map.
#[derive(Debug, Default)]
pub(super) struct CountersByPolicy {
    /// The place in `policies` by [`Key::encoded_policy_name`].
    numbers: HashMap<Box<[u8]>, u32, RandomState>,
    policies: Vec<PolicyCounters>,
}

#[derive(Debug, Default)]
struct PolicyCounters {
    byte_count: usize,
    counters: Vec<u32>,
}

/// Where a counter is listed in [`CountersByPolicy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PolicyCounterPosition {
    policy: u32,
    position: u32,
}

/// A bound of the memory store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreBound {
    Keys,
    Bytes,
}

impl CountersByPolicy {
    /// Adds a new counter to the list of its policy.
    pub(super) fn insert_counter(
        &mut self,
        key: &Key,
        counter_index: usize,
    ) -> PolicyCounterPosition {
        let number = match self.numbers.get(key.encoded_policy_name()) {
            Some(number) => *number,
            None => self.add_policy(key.encoded_policy_name()),
        };
        let mut position = 0;
        if let Some(policy) = self.policies.get_mut(number as usize) {
            position = to_u32(policy.counters.len());
            policy.counters.push(to_u32(counter_index));
        }
        PolicyCounterPosition {
            policy: number,
            position,
        }
    }

    /// Removes a counter from its list. Returns the index of the counter that takes its position,
    /// if any.
    pub(super) fn remove_counter(&mut self, at: PolicyCounterPosition) -> Option<usize> {
        let counters = &mut self.policies.get_mut(at.policy as usize)?.counters;
        let position = at.position as usize;
        if position < counters.len() {
            counters.swap_remove(position);
        }
        if counters.len() < counters.capacity() / 4 {
            counters.shrink_to(counters.len() * 2);
        }
        counters.get(position).map(|index| *index as usize)
    }

    /// Updates the entry at `at` after its counter moved to `counter_index` in the shard.
    pub(super) fn set_counter_index(&mut self, at: PolicyCounterPosition, counter_index: usize) {
        let policy = self.policies.get_mut(at.policy as usize);
        if let Some(index) = policy.and_then(|p| p.counters.get_mut(at.position as usize)) {
            *index = to_u32(counter_index);
        }
    }

    pub(super) fn change_bytes(&mut self, at: PolicyCounterPosition, before: usize, after: usize) {
        if let Some(policy) = self.policies.get_mut(at.policy as usize) {
            policy.byte_count = (policy.byte_count + after).saturating_sub(before);
        }
    }

    /// The counters of the policy that uses the most of a bound, the newest one last.
    pub(super) fn counters_of_largest_policy(&self, bound: StoreBound) -> &[u32] {
        let largest = self.policies.iter().max_by_key(|policy| match bound {
            StoreBound::Keys => policy.counters.len(),
            StoreBound::Bytes => policy.byte_count,
        });
        largest.map_or(&[], |policy| &policy.counters)
    }

    /// Adds a policy, if possible in place of one without counters, which a reload may have
    /// removed.
    fn add_policy(&mut self, name: &[u8]) -> u32 {
        let vacant = self.policies.iter().position(|p| p.counters.is_empty());
        let number = to_u32(vacant.unwrap_or(self.policies.len()));
        if vacant.is_some() {
            self.numbers.retain(|_, other| *other != number);
        } else {
            self.policies.push(PolicyCounters::default());
        }
        self.numbers.insert(name.into(), number);
        number
    }
}

/// A shard has far fewer than 2^32 counters and policies.
fn to_u32(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

#[cfg(test)]
impl CountersByPolicy {
    pub(super) fn counter_index(&self, at: PolicyCounterPosition) -> usize {
        self.policies[at.policy as usize].counters[at.position as usize] as usize
    }

    /// The number of all counters, and of all bytes.
    pub(super) fn totals(&self) -> (usize, usize) {
        let counters = self.policies.iter().map(|policy| policy.counters.len());
        let bytes = self.policies.iter().map(|policy| policy.byte_count);
        (counters.sum(), bytes.sum())
    }

    pub(super) fn policy_count(&self) -> usize {
        assert_eq!(self.numbers.len(), self.policies.len());
        self.policies.len()
    }
}
