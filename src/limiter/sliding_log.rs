//! `sliding_log`: at most `requests` units are admitted in any window of length `per`, wherever it
//! starts.
//!
//! Rule: an entry counts while it is in (now − per, now]; admit if used + cost ≤ requests.
//! Worst case: exact, no window has more. A client that uses all units at once waits one whole
//! period.
//! Retry: when enough of the oldest entries have expired for this cost to fit.
//! Memory: 16 bytes per charge that still counts (charges in the same microsecond share one entry).
//! Time: a read is a binary search. A charge adds one entry and removes at most
//! [`MAX_TRIMMED_ENTRIES`] expired ones. A credit finds its charge by the time and lowers the totals
//! of all later entries, in memory a subtraction each.

use super::{Limit, MAX_UNITS};
use std::collections::VecDeque;

/// Maximum entries that one charge removes, so that a long idle log does not block the store.
const MAX_TRIMMED_ENTRIES: usize = 64;

/// The state of `sliding_log`, and of `sliding_window`: the charges in order of time. Times and
/// totals increase from entry to entry. Only the newest entry may have 0 units, after a credit.
#[derive(Clone, Debug)]
pub(super) struct ChargeLog {
    /// A charge is recorded at the last instant of its sub-window; 1: at its own time.
    pub(super) width_us: u64,
    entries: VecDeque<ChargeLogEntry>,
    /// The running total before the first counted unit. It includes all removed entries, and those
    /// units of the first entry that do not count.
    dropped_total: u64,
    /// How far the newest entry is ahead of the time that is proven to have passed. The lead is
    /// above 0 if the entry belongs to a lease, or was charged after one.
    lead_us: u64,
}

#[derive(Clone, Copy, Debug)]
struct ChargeLogEntry {
    at_us: u64,
    /// Units of all entries up to and including this one, also of removed entries. The total may
    /// wrap: only differences count, and at most 2^53 units count at a time.
    running_total: u64,
}

impl ChargeLog {
    pub(super) fn new(width_us: u64) -> Self {
        Self {
            width_us,
            entries: VecDeque::new(),
            dropped_total: 0,
            lead_us: 0,
        }
    }

    /// Used units in the window that ends at `now_us`.
    pub(super) fn used_units(&self, limit: &Limit, now_us: u64) -> u64 {
        let expired_count = self.expired_entry_count(limit, now_us);
        self.running_total()
            .wrapping_sub(self.total_before(expired_count))
    }

    pub(super) fn charge(&mut self, limit: &Limit, cost: u64, now_us: u64) {
        self.add_entry(limit, cost, now_us, now_us);
    }

    /// Records leased units at `until_us`.
    pub(super) fn grant_lease(&mut self, limit: &Limit, units: u64, now_us: u64, until_us: u64) {
        self.add_entry(limit, units, now_us, until_us);
        let at_us = self.sub_window_end_us(now_us);
        self.lead_us = self.newest_entry_us().saturating_sub(at_us);
    }

    /// Takes `cost` units of a rejected request. They replace the oldest units if they exceed the
    /// capacity.
    pub(super) fn charge_rejected(&mut self, limit: &Limit, cost: u64, now_us: u64) {
        let (used, capacity) = (self.used_units(limit, now_us), limit.capacity());
        let cost = cost.min(capacity);
        if cost > 0 {
            self.add_entry(limit, cost, now_us, now_us);
            let max_units = used.max(capacity.min(used.saturating_add(cost)));
            self.keep_newest_units(limit, now_us, max_units);
        }
    }

    /// Removes up to `units` from the entry of a charge made at `at_us`, if it still counts.
    pub(super) fn credit(&mut self, limit: &Limit, units: u64, at_us: u64, now_us: u64) {
        let at_us = self.sub_window_end_us(at_us);
        let nth = self.entries.partition_point(|entry| entry.at_us < at_us);
        let Some(entry) = self.entries.get(nth).copied() else {
            return;
        };
        if entry.at_us != at_us || at_us.saturating_add(limit.per_us) <= now_us {
            return;
        }
        let entry_units = entry.running_total.wrapping_sub(self.total_before(nth));
        for entry in self.entries.range_mut(nth..) {
            entry.running_total = entry.running_total.wrapping_sub(units.min(entry_units));
        }
        if units >= entry_units && nth + 1 < self.entries.len() {
            self.entries.remove(nth);
        }
    }

    /// Adds an entry for `at_us`, or to the newest entry if that is later, and removes some expired
    /// ones. So entries stay in order of time.
    fn add_entry(&mut self, limit: &Limit, cost: u64, now_us: u64, at_us: u64) {
        let at_us = self.sub_window_end_us(at_us);
        self.lead_us = self.newest_entry_us().saturating_sub(at_us);
        let at_us = at_us.max(self.newest_entry_us());
        let sum = self.running_total().wrapping_add(cost);
        let last = self.entries.len().saturating_sub(1);
        let previous_total = self.total_before(last);
        let entry = ChargeLogEntry {
            at_us,
            running_total: sum,
        };
        match self.entries.back_mut() {
            Some(newest) if newest.at_us == at_us || newest.running_total == previous_total => {
                *newest = entry;
            }
            _ => self.entries.push_back(entry),
        }
        let expired_count = self.expired_entry_count(limit, now_us);
        let trimmed_count = expired_count.min(MAX_TRIMMED_ENTRIES);
        if let Some(last) = self.entries.drain(..trimmed_count).next_back() {
            self.dropped_total = last.running_total;
        }
        if self.entries.len().max(MAX_TRIMMED_ENTRIES) < self.entries.capacity() / 4 {
            self.entries.shrink_to(self.entries.len() * 2);
        }
        self.keep_newest_units(limit, now_us, MAX_UNITS);
    }

    /// Drops the oldest units, so that at most `max_units` (at least 1) count.
    fn keep_newest_units(&mut self, limit: &Limit, now_us: u64, max_units: u64) {
        if self.used_units(limit, now_us) > max_units {
            let sum = self.running_total();
            let removed_count = self
                .entries
                .partition_point(|entry| sum.wrapping_sub(entry.running_total) >= max_units);
            self.entries.drain(..removed_count);
            self.dropped_total = sum.wrapping_sub(max_units);
        }
    }

    /// The latest time that the entries prove to have passed: the start of a sub-window.
    pub(super) fn now_lower_bound_us(&self) -> u64 {
        let end_us = self.newest_entry_us().saturating_sub(self.lead_us);
        (end_us + 1).saturating_sub(self.width_us)
    }

    pub(super) fn expires_at_us(&self, limit: &Limit) -> u64 {
        self.newest_entry_us().saturating_add(limit.per_us)
    }

    /// The time of the newest entry.
    pub(super) fn newest_entry_us(&self) -> u64 {
        self.entries.back().map_or(0, |newest| newest.at_us)
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<ChargeLogEntry>()
    }

    /// The time at which so many of the oldest units have expired that at most `units` are in use.
    pub(super) fn usage_drop_time_us(&self, limit: &Limit, now_us: u64, units: u64) -> u64 {
        let sum = self.running_total();
        let expiring_count = self
            .entries
            .partition_point(|entry| sum.wrapping_sub(entry.running_total) > units);
        let last = self
            .entries
            .get(expiring_count.max(self.expired_entry_count(limit, now_us)));
        last.map_or(now_us, |last| last.at_us.saturating_add(limit.per_us))
    }

    /// How many entries have left the window that ends at `now_us`.
    fn expired_entry_count(&self, limit: &Limit, now_us: u64) -> usize {
        match self.entries.front() {
            // Usually no entry has expired.
            Some(oldest) if oldest.at_us.saturating_add(limit.per_us) > now_us => 0,
            _ => self
                .entries
                .partition_point(|entry| entry.at_us.saturating_add(limit.per_us) <= now_us),
        }
    }

    /// The running total before the `nth` entry.
    fn total_before(&self, nth: usize) -> u64 {
        nth.checked_sub(1)
            .and_then(|last| self.entries.get(last))
            .map_or(self.dropped_total, |last| last.running_total)
    }

    fn running_total(&self) -> u64 {
        self.entries
            .back()
            .map_or(self.dropped_total, |newest| newest.running_total)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Algorithm;
    use super::*;

    #[test]
    fn an_idle_log_is_trimmed_gradually_counts_no_expired_units_and_releases_its_memory() {
        const CHARGE_COUNT: u64 = 10_000;
        let limit = Limit {
            requests: CHARGE_COUNT,
            per_us: 1_000_000,
            algorithm: Algorithm::SlidingLog,
        };
        let mut log = ChargeLog::new(1);
        for now_us in 1..=CHARGE_COUNT {
            log.charge(&limit, 2, now_us);
        }
        let full = (log.entries.len(), log.heap_bytes());
        let idle_us = CHARGE_COUNT + limit.per_us;
        assert_eq!(log.used_units(&limit, idle_us), 0);
        for rounds in 1..=CHARGE_COUNT / 64 {
            log.charge(&limit, 1, idle_us + rounds);
            assert_eq!(log.used_units(&limit, idle_us + rounds), rounds);
            assert!(
                full.0 - log.entries.len()
                    <= MAX_TRIMMED_ENTRIES * usize::try_from(rounds).unwrap()
            );
        }
        assert!(
            log.entries.len() < 300 && log.heap_bytes() < full.1 / 8,
            "{:?} from {full:?}",
            log.heap_bytes()
        );
    }

    /// Every charge with its remaining units, oldest first. Nothing is removed.
    #[derive(Default)]
    struct ReferenceLog(Vec<(u64, u64)>);

    impl ReferenceLog {
        fn counted_charges(&self, limit: &Limit, now_us: u64) -> impl Iterator<Item = &(u64, u64)> {
            self.0
                .iter()
                .filter(move |(at_us, _)| at_us + limit.per_us > now_us)
        }

        fn used_units(&self, limit: &Limit, now_us: u64) -> u64 {
            self.counted_charges(limit, now_us)
                .map(|(_, units)| units)
                .sum()
        }

        fn usage_drop_time_us(&self, limit: &Limit, now_us: u64, most: u64) -> u64 {
            let leave = self
                .counted_charges(limit, now_us)
                .map(|(at_us, _)| at_us + limit.per_us);
            let mut moments = [now_us].into_iter().chain(leave);
            moments
                .find(|moment_us| self.used_units(limit, *moment_us) <= most)
                .unwrap()
        }

        fn charge_rejected(&mut self, limit: &Limit, cost: u64, now_us: u64) {
            self.0.retain(|(at_us, _)| at_us + limit.per_us > now_us);
            let (before, cost) = (self.used_units(limit, now_us), cost.min(limit.requests));
            self.0.push((now_us, cost));
            let most = before.max(limit.requests.min(before + cost));
            while self.used_units(limit, now_us) > most {
                let oldest = self.0.iter_mut().find(|(_, units)| *units > 0).unwrap();
                oldest.1 -= 1;
            }
        }

        fn credit(&mut self, units: u64, at_us: u64) {
            for _ in 0..units {
                if let Some(charge) = self
                    .0
                    .iter_mut()
                    .find(|(at, units)| *at == at_us && *units > 0)
                {
                    charge.1 -= 1;
                }
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn rejected_charges_settlements_and_credits_match_a_reference_log(
            requests in 1..30u64,
            ops in proptest::collection::vec((0..4u8, 0..40u64, 1..12u64, 0..8usize), 1..120),
        ) {
            let limit = Limit { requests, per_us: 200, algorithm: Algorithm::SlidingLog };
            let (mut log, mut naive, mut now_us, mut times) = (ChargeLog::new(1), ReferenceLog::default(), 1_000, vec![0]);
            for (what, after_us, units, back) in ops {
                now_us += after_us;
                match what {
                    0 => {
                        log.charge_rejected(&limit, units, now_us);
                        naive.charge_rejected(&limit, units, now_us);
                    }
                    1 => {
                        let at_us = times[times.len().saturating_sub(back + 1)];
                        log.credit(&limit, units, at_us, now_us);
                        naive.credit(units, at_us);
                    }
                    // A settlement is charged whether it fits or not.
                    _ => {
                        log.charge(&limit, units, now_us);
                        naive.0.push((now_us, units));
                        times.push(now_us);
                    }
                }
                let used = naive.used_units(&limit, now_us);
                proptest::prop_assert_eq!(log.used_units(&limit, now_us), used);
                for most in 0..used {
                    let expected = naive.usage_drop_time_us(&limit, now_us, most);
                    proptest::prop_assert_eq!(log.usage_drop_time_us(&limit, now_us, most), expected);
                }
            }
        }
    }

    #[test]
    fn a_credit_reaches_its_charge_after_any_number_of_later_ones() {
        const CHARGE_COUNT: u64 = 5_000;
        let limit = Limit {
            requests: MAX_UNITS,
            per_us: 1_000_000,
            algorithm: Algorithm::SlidingLog,
        };
        let mut log = ChargeLog::new(1);
        for now_us in 1..=CHARGE_COUNT {
            log.charge(&limit, 3, now_us);
        }
        let (mut used, now_us) = (3 * CHARGE_COUNT, CHARGE_COUNT);
        let mut times: Vec<u64> = (1..=CHARGE_COUNT).collect();
        fastrand::Rng::with_seed(7).shuffle(&mut times);
        for at_us in times {
            let units = at_us % 5;
            log.credit(&limit, units, at_us, now_us);
            used -= units.min(3);
            assert_eq!(log.used_units(&limit, now_us), used, "{at_us}");
        }
        assert_eq!(log.used_units(&limit, limit.per_us + now_us), 0);
    }

    #[test]
    fn used_units_saturate_at_the_maximum() {
        let limit = Limit {
            requests: 1,
            per_us: 1_000,
            algorithm: Algorithm::SlidingLog,
        };
        let mut log = ChargeLog::new(1);
        log.charge(&limit, MAX_UNITS, 1);
        log.charge(&limit, 7, 2);
        assert_eq!(log.used_units(&limit, 2), MAX_UNITS);
        assert_eq!(log.used_units(&limit, 1_001), 7);
    }
}
