//! `fixed_window`: at most `requests` units per window of length `per`, aligned to the epoch plus
//! `offset`.
//!
//! Rule: window number = floor((now − offset) / per); admit if used in this window + cost ≤
//! requests.
//! Worst case: at most 2 × `requests` in a time shorter than `per`, half before and half after a
//! window boundary.
//! Retry: the next boundary.
//! Memory: one number and the start of its window.

use super::{Limit, MAX_UNITS};

#[derive(Clone, Debug)]
pub(super) struct FixedWindowState {
    offset_us: u64,
    start_us: u64,
    used: u64,
}

impl FixedWindowState {
    pub(super) fn new(offset_us: u64) -> Self {
        Self {
            offset_us,
            start_us: 0,
            used: 0,
        }
    }

    /// Used units in the window that contains `now_us`.
    pub(super) fn used_units(&self, limit: &Limit, now_us: u64) -> u64 {
        if self.window_start_us(limit, now_us) == self.start_us {
            self.used
        } else {
            0
        }
    }

    pub(super) fn charge(&mut self, limit: &Limit, cost: u64, now_us: u64) {
        self.used = self
            .used_units(limit, now_us)
            .saturating_add(cost)
            .min(MAX_UNITS);
        self.start_us = self.window_start_us(limit, now_us);
    }

    /// Takes the available units of a rejected request, up to `cost`.
    pub(super) fn charge_rejected(&mut self, limit: &Limit, cost: u64, now_us: u64) {
        let free_units = limit
            .capacity()
            .saturating_sub(self.used_units(limit, now_us));
        if free_units > 0 {
            self.charge(limit, cost.min(free_units), now_us);
        }
    }

    /// Returns units that were charged at `at_us`, if the window of `at_us` has not ended.
    pub(super) fn credit(&mut self, limit: &Limit, units: u64, at_us: u64, now_us: u64) {
        if self.window_start_us(limit, at_us) == self.start_us
            && self.window_start_us(limit, now_us) == self.start_us
        {
            self.used = self.used.saturating_sub(units);
        }
    }

    /// The start of the window: the latest time that the state proves to have passed.
    pub(super) fn now_lower_bound_us(&self) -> u64 {
        self.start_us
    }

    /// The end of the window that contains `now_us`.
    pub(super) fn window_end_us(&self, limit: &Limit, now_us: u64) -> u64 {
        match now_us.checked_sub(self.offset_us) {
            Some(since_offset_us) => {
                now_us.saturating_add(limit.per_us - since_offset_us % limit.per_us.max(1))
            }
            None => self.offset_us,
        }
    }

    /// The start of the window that contains `now_us`. Before the first offset there is a short
    /// window from 0.
    fn window_start_us(&self, limit: &Limit, now_us: u64) -> u64 {
        now_us
            .checked_sub(self.offset_us)
            .map_or(0, |since_offset_us| {
                now_us - since_offset_us % limit.per_us.max(1)
            })
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
        let mut window = FixedWindowState::new(30);
        window.charge(&limit, 6, 1_031);
        window.credit(&limit, 2, 1_031, 1_129);
        assert_eq!(window.used_units(&limit, 1_129), 4);
        window.charge_rejected(&limit, 3, 1_129);
        assert_eq!(window.used_units(&limit, 1_129), 7);
        window.charge_rejected(&limit, 9, 1_129);
        assert_eq!(window.used_units(&limit, 1_129), 10);
        // A settlement may exceed the capacity.
        window.charge(&limit, 5, 1_129);
        window.charge_rejected(&limit, 1, 1_129);
        assert_eq!(window.used_units(&limit, 1_129), 15);
        window.credit(&limit, 2, 1_031, 1_130);
        assert_eq!(window.used_units(&limit, 1_130), 0);
        window.charge(&limit, 3, 1_130);
        window.credit(&limit, 2, 1_129, 1_140);
        assert_eq!(
            window.used_units(&limit, 1_140),
            3,
            "the credit belongs to the previous window"
        );
        window.charge(&limit, MAX_UNITS, 1_140);
        assert_eq!(window.used_units(&limit, 1_140), MAX_UNITS);
    }
}
