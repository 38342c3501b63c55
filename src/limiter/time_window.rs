//! A window in time.

/// A window in time: from `start_us` until just before `end_us`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeWindow {
    pub start_us: u64,
    pub end_us: u64,
}

impl TimeWindow {
    pub fn contains(self, at_us: u64) -> bool {
        (self.start_us..self.end_us).contains(&at_us)
    }

    pub fn length_us(self) -> u64 {
        self.end_us.saturating_sub(self.start_us)
    }
}
