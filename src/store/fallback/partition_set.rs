//! A set of store partitions: the single partition of a store without slots, or slots of a cluster.

use std::sync::atomic::{AtomicU64, Ordering};

/// 64 partitions per word: 16,384 slots.
const WORD_COUNT: usize = 256;

#[derive(Debug)]
pub(super) struct PartitionSet([AtomicU64; WORD_COUNT]);

impl Default for PartitionSet {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; WORD_COUNT])
    }
}

impl PartitionSet {
    pub(super) fn insert(&self, partition: u16) {
        // Read first: in an outage every request calls this, and a write would contend.
        if let Some(word) = self.word_for_partition(partition)
            && !self.contains(partition)
        {
            word.fetch_or(1 << (partition % 64), Ordering::Relaxed);
        }
    }

    pub(super) fn contains(&self, partition: u16) -> bool {
        self.word_for_partition(partition)
            .is_some_and(|word| word.load(Ordering::Relaxed) >> (partition % 64) & 1 == 1)
    }

    pub(super) fn to_vec(&self) -> Vec<u16> {
        let words = (0..).step_by(64).zip(&self.0);
        words
            .filter(|(_, word)| word.load(Ordering::Relaxed) != 0)
            .flat_map(|(first, _)| first..first + 64)
            .filter(|partition| self.contains(*partition))
            .collect()
    }

    pub(super) fn clear(&self) {
        self.0
            .iter()
            .for_each(|word| word.store(0, Ordering::Relaxed));
    }

    fn word_for_partition(&self, partition: u16) -> Option<&AtomicU64> {
        self.0.get(usize::from(partition / 64))
    }
}
