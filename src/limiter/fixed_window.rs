//! `fixed_window`: at most `requests` units per window of length `per`, aligned to the epoch plus
//! `offset`; or per day, week or month of a time zone.
//!
//! Rule: window number = floor((now − offset) / per), or the period of the calendar; admit if used
//! in this window + cost ≤ requests. A window that has begun lasts until its end, even if another
//! instance began it by other time zone data. The next one begins there at the earliest.
//! Worst case: at most 2 × `requests` in a time shorter than `per`, half before and half after a
//! window boundary.
//! Retry: the next boundary.
//! Memory: one number and the window.

use super::{Limit, MAX_UNITS, TimeWindow};

#[derive(Clone, Debug, Default)]
pub(super) struct FixedWindowState {
    /// The last window with charges; empty without any.
    pub(super) window: TimeWindow,
    used: u64,
}

impl FixedWindowState {
    /// An unused window.
    pub(super) fn from_window(window: TimeWindow) -> Self {
        Self { window, used: 0 }
    }

    /// Used units in the window that contains `now_us`.
    pub(super) fn used_units(&self, now_us: u64) -> u64 {
        if self.window.contains(now_us) {
            self.used
        } else {
            0
        }
    }

    pub(super) fn charge(&mut self, limit: &Limit, cost: u64, now_us: u64) {
        self.used = self.used_units(now_us).saturating_add(cost).min(MAX_UNITS);
        self.window = self.window_at(limit, now_us);
    }

    /// Takes the available units of a rejected request, up to `cost`.
    pub(super) fn charge_rejected(&mut self, limit: &Limit, cost: u64, now_us: u64) {
        let free_units = limit.capacity().saturating_sub(self.used_units(now_us));
        if free_units > 0 {
            self.charge(limit, cost.min(free_units), now_us);
        }
    }

    /// Returns units that were charged at `at_us`, if the window of `at_us` has not ended.
    pub(super) fn credit(&mut self, units: u64, at_us: u64, now_us: u64) {
        if self.window.contains(at_us) && self.window.contains(now_us) {
            self.used = self.used.saturating_sub(units);
        }
    }

    /// The window that contains `now_us`, which is not before the start of the last window.
    pub(super) fn window_at(&self, limit: &Limit, now_us: u64) -> TimeWindow {
        if self.window.contains(now_us) {
            return self.window;
        }
        let TimeWindow { start_us, end_us } = limit.window_at(now_us);
        TimeWindow {
            start_us: start_us.max(self.window.end_us),
            end_us,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Algorithm;
    use super::*;

    #[test]
    fn credits_count_in_the_same_window_only_and_rejected_charges_stop_at_the_capacity() {
        let limit = Limit {
            requests: 10,
            per_us: 100,
            algorithm: Algorithm::FixedWindow { offset_us: 30 },
        };
        let mut window = FixedWindowState::default();
        window.charge(&limit, 6, 1_031);
        window.credit(2, 1_031, 1_129);
        assert_eq!(window.used_units(1_129), 4);
        window.charge_rejected(&limit, 3, 1_129);
        assert_eq!(window.used_units(1_129), 7);
        window.charge_rejected(&limit, 9, 1_129);
        assert_eq!(window.used_units(1_129), 10);
        // A settlement may exceed the capacity.
        window.charge(&limit, 5, 1_129);
        window.charge_rejected(&limit, 1, 1_129);
        assert_eq!(window.used_units(1_129), 15);
        window.credit(2, 1_031, 1_130);
        assert_eq!(window.used_units(1_130), 0);
        window.charge(&limit, 3, 1_130);
        window.credit(2, 1_129, 1_140);
        assert_eq!(
            window.used_units(1_140),
            3,
            "the credit belongs to the previous window"
        );
        window.charge(&limit, MAX_UNITS, 1_140);
        assert_eq!(window.used_units(1_140), MAX_UNITS);
    }

    /// As if another instance had begun the window by other time zone data.
    #[test]
    fn a_window_that_has_begun_lasts_until_its_end_and_the_next_begins_there() {
        const HOUR_US: u64 = 3_600_000_000;
        const MIDNIGHT_US: u64 = 1_700_006_400_000_000;
        let day_in = |zone| {
            let calendar = super::super::Calendar::new(super::super::CalendarUnit::Day, zone);
            Limit::per_calendar_period(10, calendar.unwrap())
        };
        let (utc, other) = (day_in("UTC"), day_in("Etc/GMT+1"));
        let mut window = FixedWindowState::default();
        window.charge(&utc, 6, MIDNIGHT_US);
        assert_eq!(window.used_units(MIDNIGHT_US + 2 * HOUR_US), 6);
        window.charge(&other, 1, MIDNIGHT_US + 2 * HOUR_US);
        let end_us = MIDNIGHT_US + 24 * HOUR_US;
        assert_eq!(window.window.end_us, end_us);
        // The day of the other instance began before this window ended.
        window.charge(&other, 1, end_us);
        assert_eq!(window.used_units(end_us), 1);
        assert_eq!(window.window.start_us, end_us);
        assert_eq!(window.window.end_us, end_us + HOUR_US);
        // A charge of the window before is not returned to this one.
        window.credit(1, end_us - 1, end_us);
        assert_eq!(window.used_units(end_us), 1);
        window.credit(1, end_us, end_us + HOUR_US - 1);
        assert_eq!(window.used_units(end_us), 0);
    }
}
