//! A reading of the two clocks that decide when leases end.

use crate::clock::{Clock, saturating_micros};
use std::ops::Add;
use std::time::Duration;
use tokio::time::Instant;

/// One moment on two clocks. [`Instant`] drives timers, but stops while the machine is suspended.
/// The boot time goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClockReading {
    pub instant: Instant,
    pub boot_us: u64,
}

impl ClockReading {
    pub(super) fn now(clock: &Clock) -> Self {
        Self {
            instant: Instant::now(),
            boot_us: clock.boot_clock_us(),
        }
    }

    /// Whether this moment is at or after `end` on either clock.
    pub(super) fn has_reached(&self, end: &Self) -> bool {
        self.instant >= end.instant || self.boot_us >= end.boot_us
    }
}

impl Add<Duration> for ClockReading {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self {
            instant: self.instant + duration,
            boot_us: self.boot_us.saturating_add(saturating_micros(duration)),
        }
    }
}
