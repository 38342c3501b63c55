//! `fixed_window`: at most `requests` units per window of length `per`, aligned to the epoch plus `offset`.
//!
//! Rule: window number = floor((now − offset) / per); admit if used in this window + cost ≤ requests.
//! Worst case: 2 × requests across an edge, half before and half after it.
//! Retry: the next edge.
//! Memory: one number and the window it belongs to.

use super::{Limit, MAX_UNITS};

#[derive(Clone, Debug)]
pub(super) struct Window {
    offset_us: u64,
    start_us: u64,
    used: u64,
}

impl Window {
    pub(super) fn new(offset_us: u64) -> Self {
        Self {
            offset_us,
            start_us: 0,
            used: 0,
        }
    }

    /// Units in the window that holds `now_us`.
    pub(super) fn used(&self, limit: &Limit, now_us: u64) -> u64 {
        if self.start_us_at(limit, now_us) == self.start_us {
            self.used
        } else {
            0
        }
    }

    pub(super) fn charge(&mut self, limit: &Limit, cost: u64, now_us: u64) {
        self.used = self.used(limit, now_us).saturating_add(cost).min(MAX_UNITS);
        self.start_us = self.start_us_at(limit, now_us);
    }

    /// As [`super::Effect::Press`] says.
    pub(super) fn press(&mut self, limit: &Limit, cost: u64, now_us: u64) {
        let room = limit.capacity().saturating_sub(self.used(limit, now_us));
        if room > 0 {
            self.charge(limit, cost.min(room), now_us);
        }
    }

    /// Gives back units that were taken at `at_us`, if that window still holds.
    pub(super) fn credit(&mut self, limit: &Limit, units: u64, at_us: u64, now_us: u64) {
        if self.start_us_at(limit, at_us) == self.start_us
            && self.start_us_at(limit, now_us) == self.start_us
        {
            self.used = self.used.saturating_sub(units);
        }
    }

    /// The window's start: the latest time that the state proves to have passed.
    pub(super) fn newest_us(&self) -> u64 {
        self.start_us
    }

    /// The end of the window that holds `now_us`.
    pub(super) fn end_us(&self, limit: &Limit, now_us: u64) -> u64 {
        match now_us.checked_sub(self.offset_us) {
            Some(since) => now_us.saturating_add(limit.per_us - since % limit.per_us.max(1)),
            None => self.offset_us,
        }
    }

    /// The start of the window that holds `now_us`. Before the first offset there is a short one from 0.
    fn start_us_at(&self, limit: &Limit, now_us: u64) -> u64 {
        now_us
            .checked_sub(self.offset_us)
            .map_or(0, |since| now_us - since % limit.per_us.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Algorithm;
    use super::*;

    #[test]
    fn what_was_not_used_comes_back_while_the_window_lasts_and_a_refusal_takes_what_there_is() {
        let limit = Limit {
            requests: 10,
            per_us: 100,
            algorithm: Algorithm::FixedWindow { offset_us: 30 },
        };
        let mut window = Window::new(30);
        window.charge(&limit, 6, 1_031);
        window.credit(&limit, 2, 1_031, 1_129);
        assert_eq!(window.used(&limit, 1_129), 4);
        window.press(&limit, 3, 1_129);
        assert_eq!(window.used(&limit, 1_129), 7);
        window.press(&limit, 9, 1_129);
        assert_eq!(window.used(&limit, 1_129), 10);
        // Settled: more than there is.
        window.charge(&limit, 5, 1_129);
        window.press(&limit, 1, 1_129);
        assert_eq!(window.used(&limit, 1_129), 15);
        window.credit(&limit, 2, 1_031, 1_130);
        assert_eq!(window.used(&limit, 1_130), 0);
        window.charge(&limit, 3, 1_130);
        window.credit(&limit, 2, 1_129, 1_140);
        assert_eq!(
            window.used(&limit, 1_140),
            3,
            "what was charged in the last window"
        );
        window.charge(&limit, MAX_UNITS, 1_140);
        assert_eq!(window.used(&limit, 1_140), MAX_UNITS);
    }
}
