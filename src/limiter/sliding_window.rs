//! `sliding_window`: the bound of `sliding_log` with memory that does not grow with `requests`.
//!
//! Rule: time is divided into sub-windows of width ceil(per / buckets) µs, aligned to the epoch.
//! All units of a sub-window count while any instant of it is in (now − per, now]; admit if used +
//! cost ≤ requests. This is a sliding log that records all entries at the last instant of their
//! sub-window.
//! Worst case: never too lax. Units become free up to one width late, so a client that always takes
//! all it can gets at least buckets / (buckets + 1) of the limit.
//! Retry: when enough of the oldest sub-windows have expired for this cost to fit.
//! Memory: at most buckets + 1 sub-windows; 16 bytes each here, about 4 to 8 in Redis.

use super::Limit;
use super::sliding_log::ChargeLog;

#[derive(Clone, Debug)]
pub(super) struct SubWindowLog {
    width_us: u64,
    log: ChargeLog,
}

impl SubWindowLog {
    pub(super) fn new(width_us: u64) -> Self {
        Self {
            width_us,
            log: ChargeLog::default(),
        }
    }

    /// Units in the sub-windows that overlap the window that ends at `now_us`.
    pub(super) fn used_units(&self, limit: &Limit, now_us: u64) -> u64 {
        self.log.used_units(limit, now_us)
    }

    pub(super) fn charge(&mut self, limit: &Limit, cost: u64, now_us: u64) {
        self.log
            .add_entry(limit, cost, now_us, self.sub_window_end_us(now_us));
    }

    /// Takes units in the sub-window of `until_us`: the current one or a later one.
    pub(super) fn grant_lease(&mut self, limit: &Limit, units: u64, now_us: u64, until_us: u64) {
        self.log.grant_lease(
            limit,
            units,
            now_us,
            self.sub_window_end_us(now_us),
            self.sub_window_end_us(until_us),
        );
    }

    /// Whether the newest sub-window has begun at `at_us`.
    pub(super) fn has_newest_sub_window_begun_by(&self, at_us: u64) -> bool {
        self.log.newest_entry_us() <= self.sub_window_end_us(at_us)
    }

    /// Takes `cost` units of a rejected request. They replace the oldest units if they exceed the
    /// capacity.
    pub(super) fn charge_rejected(&mut self, limit: &Limit, cost: u64, now_us: u64) {
        self.log
            .charge_rejected_at(limit, cost, now_us, self.sub_window_end_us(now_us));
    }

    /// Removes up to `units` from the sub-window of `at_us`, if it still counts.
    pub(super) fn credit(&mut self, limit: &Limit, units: u64, at_us: u64, now_us: u64) {
        self.log
            .credit(limit, units, self.sub_window_end_us(at_us), now_us);
    }

    /// The start of the newest sub-window that is proven to have begun.
    pub(super) fn now_lower_bound_us(&self) -> u64 {
        (self.log.now_lower_bound_us() + 1).saturating_sub(self.width_us)
    }

    /// The start of the newest sub-window.
    pub(super) fn newest_sub_window_start_us(&self) -> u64 {
        (self.log.newest_entry_us() + 1).saturating_sub(self.width_us)
    }

    pub(super) fn usage_drop_time_us(&self, limit: &Limit, now_us: u64, units: u64) -> u64 {
        self.log.usage_drop_time_us(limit, now_us, units)
    }

    pub(super) fn expires_at_us(&self, limit: &Limit) -> u64 {
        self.log.newest_entry_us().saturating_add(limit.per_us)
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.log.heap_bytes()
    }

    /// The last instant of the sub-window of `at_us`.
    fn sub_window_end_us(&self, at_us: u64) -> u64 {
        (at_us - at_us % self.width_us).saturating_add(self.width_us - 1)
    }
}
