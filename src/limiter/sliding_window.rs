//! `sliding_window`: the bound of `sliding_log` with memory that does not grow with `requests`.
//!
//! Rule: time is divided into sub-windows of width ceil(per / buckets) µs, aligned to the epoch.
//! All units of a sub-window count while any instant of it is in (now − per, now]; admit if used +
//! cost ≤ requests. This is a sliding log that records all entries at the last instant of their
//! sub-window.
//! Worst case: never too lax. Units become free up to one width late, so a client that always takes
//! all it can gets at least buckets / (buckets + 1) of the limit.
//! `sliding_log` is the same with a width of 1 µs.
//! Retry: when enough of the oldest sub-windows have expired for this cost to fit.
//! Memory: at most buckets + 1 sub-windows; 16 bytes each here, about 4 to 8 in Redis.

use super::sliding_log::ChargeLog;

impl ChargeLog {
    /// Whether the newest sub-window has begun at `at_us`.
    pub(super) fn has_newest_sub_window_begun_by(&self, at_us: u64) -> bool {
        self.newest_entry_us() <= self.sub_window_end_us(at_us)
    }

    /// The start of the newest sub-window.
    pub(super) fn newest_sub_window_start_us(&self) -> u64 {
        (self.newest_entry_us() + 1).saturating_sub(self.width_us)
    }

    /// The last instant of the sub-window of `at_us`.
    pub(super) fn sub_window_end_us(&self, at_us: u64) -> u64 {
        (at_us - at_us % self.width_us).saturating_add(self.width_us - 1)
    }
}
