//! `sliding_log`: in no window of length `per`, wherever it starts, are more than `requests` units admitted.
//!
//! Rule: an entry counts while it is in (now − per, now]; admit if used + cost ≤ requests.
//! Worst case: exact; a client that spent everything at once waits one whole period.
//! Retry: when the oldest entries that must leave for this cost to fit have left.
//! Memory: 16 bytes per charge that still counts (charges in the same microsecond share one entry).
//! Time: a look is a binary search; a charge adds one entry and drops at most [`TRIM`] that have left.

use super::Limit;
use std::collections::VecDeque;

/// Entries that one charge drops at most: a long log that was idle must not stop the store at once.
const TRIM: usize = 64;

/// Both times and sums grow from entry to entry.
#[derive(Clone, Debug, Default)]
pub(super) struct Log {
    entries: VecDeque<Entry>,
    /// Units of all entries that were dropped.
    dropped: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    at_us: u64,
    /// Units of all entries so far, this one and the dropped ones included. It may wrap: only differences count,
    /// and at most 2^53 units live at once.
    sum: u64,
}

impl Log {
    /// Units in the window that ends at `now_us`.
    pub(super) fn used(&self, limit: &Limit, now_us: u64) -> u64 {
        let left = self.left(limit, now_us);
        let before =
            left.checked_sub(1).and_then(|last| self.entries.get(last)).map_or(self.dropped, |e| e.sum);
        self.sum().wrapping_sub(before)
    }

    pub(super) fn charge(&mut self, limit: &Limit, cost: u64, now_us: u64) {
        self.enter(limit, cost, now_us, now_us);
    }

    /// Adds an entry that stands at `at_us`, not before any other, and drops some that have left for good:
    /// time does not go back behind an entry.
    pub(super) fn enter(&mut self, limit: &Limit, cost: u64, now_us: u64, at_us: u64) {
        let sum = self.sum().wrapping_add(cost);
        match self.entries.back_mut() {
            Some(newest) if newest.at_us == at_us => newest.sum = sum,
            _ => self.entries.push_back(Entry { at_us, sum }),
        }
        if let Some(last) = self.entries.drain(..self.left(limit, now_us).min(TRIM)).next_back() {
            self.dropped = last.sum;
        }
        if self.entries.len().max(TRIM) < self.entries.capacity() / 4 {
            self.entries.shrink_to(self.entries.len() * 2);
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
        let sum = self.sum();
        let enough = self.entries.partition_point(|entry| sum.wrapping_sub(entry.sum) > units);
        let last = self.entries.get(enough.max(self.left(limit, now_us)));
        last.map_or(now_us, |last| last.at_us.saturating_add(limit.per_us))
    }

    /// How many entries have left the window that ends at `now_us`.
    fn left(&self, limit: &Limit, now_us: u64) -> usize {
        match self.entries.front() {
            // Most looks find the window full or filling up.
            Some(oldest) if oldest.at_us.saturating_add(limit.per_us) > now_us => 0,
            _ => self.entries.partition_point(|entry| entry.at_us.saturating_add(limit.per_us) <= now_us),
        }
    }

    fn sum(&self) -> u64 {
        self.entries.back().map_or(self.dropped, |newest| newest.sum)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Algorithm;
    use super::*;

    #[test]
    fn a_long_log_is_dropped_in_portions_counts_nothing_of_what_left_and_gives_its_memory_back() {
        const MANY: u64 = 10_000;
        let limit = Limit { requests: MANY, per_us: 1_000_000, algorithm: Algorithm::SlidingLog };
        let mut log = Log::default();
        for now_us in 1..=MANY {
            log.charge(&limit, 2, now_us);
        }
        let full = (log.entries.len(), log.heap_bytes());
        let idle_us = MANY + limit.per_us;
        assert_eq!(log.used(&limit, idle_us), 0);
        for rounds in 1..=MANY / 64 {
            log.charge(&limit, 1, idle_us + rounds);
            assert_eq!(log.used(&limit, idle_us + rounds), rounds);
            assert!(full.0 - log.entries.len() <= TRIM * usize::try_from(rounds).unwrap());
        }
        assert!(
            log.entries.len() < 300 && log.heap_bytes() < full.1 / 8,
            "{:?} from {full:?}",
            log.heap_bytes()
        );
    }
}
