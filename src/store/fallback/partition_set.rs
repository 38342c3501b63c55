//! A set of store partitions: the single partition of a store without slots, or slots of a cluster.

use std::sync::atomic::{AtomicBool, Ordering};

/// Number of slots of a cluster.
const MAX_PARTITIONS: u16 = 1 << 14;

/// Whether each partition is in the set.
#[derive(Debug)]
pub(super) struct PartitionSet(Box<[AtomicBool]>);

impl Default for PartitionSet {
    fn default() -> Self {
        Self(
            (0..MAX_PARTITIONS)
                .map(|_| AtomicBool::new(false))
                .collect(),
        )
    }
}

impl PartitionSet {
    pub(super) fn insert(&self, partition: u16) {
        // Read first: in an outage every request calls this, and a write would contend.
        if let Some(is_member) = self.0.get(usize::from(partition))
            && !is_member.load(Ordering::Relaxed)
        {
            is_member.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn contains(&self, partition: u16) -> bool {
        let is_member = self.0.get(usize::from(partition));
        is_member.is_some_and(|is_member| is_member.load(Ordering::Relaxed))
    }

    pub(super) fn to_vec(&self) -> Vec<u16> {
        (0..MAX_PARTITIONS)
            .filter(|partition| self.contains(*partition))
            .collect()
    }

    pub(super) fn clear(&self) {
        for is_member in &self.0 {
            is_member.store(false, Ordering::Relaxed);
        }
    }
}
