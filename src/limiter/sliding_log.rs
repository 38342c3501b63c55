//! `sliding_log`: in no window of length `per`, wherever it starts, are more than `requests` units admitted.
//!
//! Rule: an entry counts while it is in (now − per, now]; admit if used + cost ≤ requests.
//! Worst case: exact; a client that spent everything at once waits one whole period.
//! Retry: when the oldest entries that must leave for this cost to fit have left.
//! Memory: 16 bytes per charge that still counts (charges in the same microsecond share one entry).

use super::Limit;
use std::collections::VecDeque;

#[derive(Clone, Debug, Default)]
pub(super) struct Log {
    entries: VecDeque<Entry>,
    /// Of all entries, those included that have left and were not dropped yet.
    units: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    at_us: u64,
    units: u64,
}

impl Log {
    /// Units in the window that ends at `now_us`.
    pub(super) fn used(&self, limit: &Limit, now_us: u64) -> u64 {
        self.units - self.left(limit, now_us).map(|entry| entry.units).sum::<u64>()
    }

    /// Adds an entry, and drops those that have left for good: time does not go back behind an entry.
    pub(super) fn charge(&mut self, limit: &Limit, cost: u64, now_us: u64) {
        let left = self.left(limit, now_us).count();
        for entry in self.entries.drain(..left) {
            self.units -= entry.units;
        }
        self.units += cost;
        match self.entries.back_mut() {
            Some(newest) if newest.at_us == now_us => newest.units += cost,
            _ => self.entries.push_back(Entry { at_us: now_us, units: cost }),
        }
    }

    pub(super) fn newest_us(&self) -> u64 {
        self.entries.back().map_or(0, |newest| newest.at_us)
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
    }

    /// When enough of the oldest have left that at most `units` are in use.
    pub(super) fn at_most_at_us(&self, limit: &Limit, now_us: u64, units: u64) -> u64 {
        let mut in_use = self.units;
        for entry in &self.entries {
            in_use -= entry.units;
            let leaves_at_us = entry.at_us.saturating_add(limit.per_us);
            if in_use <= units && leaves_at_us > now_us {
                return leaves_at_us;
            }
        }
        now_us
    }

    /// The entries that have left the window that ends at `now_us`.
    fn left(&self, limit: &Limit, now_us: u64) -> impl Iterator<Item = &Entry> {
        self.entries.iter().take_while(move |entry| entry.at_us.saturating_add(limit.per_us) <= now_us)
    }
}
