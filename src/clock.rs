//! The only source of time for decisions.
//!
//! Decisions use microseconds since the Unix epoch. A double holds these integers exactly until the
//! year 2255 (2^53 µs), so Rust and Lua compute with the same numbers.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Differences of the clocks up to here are those of reading them one after the other (µs).
const READING_TOLERANCE_US: u64 = 100_000;

/// Reads the monotonic clock. In a runtime with paused time, it reads that runtime's time.
pub fn monotonic_now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Source of the current time: the system clock, or a time set by a test or a simulation.
#[derive(Clone, Debug)]
pub struct Clock {
    source: ClockSource,
    is_system: bool,
    /// Of the system's clock, `wall_shift_us` is the last value of [`Clock::wall_shift_us`].
    steps: ClockSteps,
}

#[derive(Clone, Debug)]
enum ClockSource {
    /// The time of the system, or of a simulation, since `start`.
    Running {
        start: Instant,
        start_us: u64,
    },
    Manual(Arc<AtomicU64>),
}

/// Steps of a machine's clocks.
#[derive(Clone, Debug, Default)]
pub struct ClockSteps {
    /// How long a simulated machine was suspended.
    pub suspended_us: Arc<AtomicU64>,
    /// How far the wall clock was set forward since the start.
    pub wall_shift_us: Arc<AtomicI64>,
}

/// Moves a manual [`Clock`]. The time of a manual clock may go backwards, which a limiter has to
/// tolerate.
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<AtomicU64>, Arc<AtomicI64>);

impl Clock {
    /// The wall clock as read at this call, advanced monotonically afterwards. A later change of
    /// the machine's clock neither refills nor freezes a quota.
    pub fn system() -> Self {
        let start_us = saturating_micros(time_since_epoch());
        Self {
            is_system: true,
            ..Self::simulated(start_us, ClockSteps::default())
        }
    }

    /// A clock that shows `start_us` now and advances with the runtime's time: for simulations.
    /// Its boot time also includes the time for which the machine was suspended.
    pub fn simulated(start_us: u64, steps: ClockSteps) -> Self {
        Self {
            source: ClockSource::Running {
                start: monotonic_now(),
                start_us,
            },
            is_system: false,
            steps,
        }
    }

    /// The current wall clock, with the steps that it made since the start: microseconds since the
    /// Unix epoch.
    pub fn wall_us(&self) -> u64 {
        self.now_us().saturating_add_signed(self.wall_shift_us())
    }

    /// How far the wall clock was set forward since the start (µs), as last read.
    pub fn known_wall_shift_us(&self) -> i64 {
        self.steps.wall_shift_us.load(Ordering::Relaxed)
    }

    /// How far the wall clock was set forward since the start (µs).
    pub fn wall_shift_us(&self) -> i64 {
        let shift_us = self.known_wall_shift_us();
        if !self.is_system {
            return shift_us;
        }
        let expected_us = self.now_us().saturating_add_signed(shift_us);
        let wall_us = saturating_micros(time_since_epoch());
        if wall_us.abs_diff(expected_us) <= READING_TOLERANCE_US {
            return shift_us;
        }
        let step_us = i64::try_from(i128::from(wall_us) - i128::from(expected_us));
        let shift_us = shift_us.saturating_add(step_us.unwrap_or_default());
        self.steps.wall_shift_us.store(shift_us, Ordering::Relaxed);
        shift_us
    }

    /// A clock that stands still until its [`ManualClock`] moves it.
    pub fn manual(start_us: u64) -> (Self, ManualClock) {
        let time = Arc::new(AtomicU64::new(start_us));
        let clock = Self {
            source: ClockSource::Manual(Arc::clone(&time)),
            is_system: false,
            steps: ClockSteps::default(),
        };
        let shift = Arc::clone(&clock.steps.wall_shift_us);
        (clock, ManualClock(time, shift))
    }

    /// Microseconds since an arbitrary start. Unlike an `Instant`, this time advances while the
    /// machine is suspended (on Linux).
    pub fn boot_clock_us(&self) -> u64 {
        match &self.source {
            ClockSource::Running { start, .. } if self.is_system => read_boot_clock_us(*start),
            ClockSource::Running { start, .. } => {
                saturating_micros(monotonic_now().saturating_duration_since(*start))
                    .saturating_add(self.steps.suspended_us.load(Ordering::Relaxed))
            }
            ClockSource::Manual(time) => time.load(Ordering::Relaxed),
        }
    }

    /// Microseconds since the Unix epoch.
    pub fn now_us(&self) -> u64 {
        self.instant_to_unix_us(monotonic_now())
    }

    /// The time at `instant`, in microseconds since the Unix epoch. A caller that needs both an
    /// `Instant` and this time reads the system clock only once.
    pub fn instant_to_unix_us(&self, instant: Instant) -> u64 {
        match &self.source {
            ClockSource::Running {
                start, start_us, ..
            } => start_us
                .saturating_add(saturating_micros(instant.saturating_duration_since(*start))),
            ClockSource::Manual(time) => time.load(Ordering::Relaxed),
        }
    }
}

/// Time since the machine started. Like `Instant::now`, it makes no system call.
#[cfg(target_os = "linux")]
fn read_boot_clock_us(_start: Instant) -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    let nanos = u64::try_from(time.tv_nsec).unwrap_or_default();
    seconds
        .saturating_mul(1_000_000)
        .saturating_add(nanos / 1_000)
}

/// Time since `start`. Systems other than Linux may not count suspended time.
#[cfg(not(target_os = "linux"))]
fn read_boot_clock_us(start: Instant) -> u64 {
    saturating_micros(start.elapsed())
}

#[allow(
    clippy::disallowed_methods,
    reason = "this is the one place that reads the system's clock"
)]
fn time_since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Seconds since the Unix epoch by the current wall clock, including its steps. Use it for dates
/// set outside of tidegate, such as the expiry of a token, and never for quotas.
pub fn unix_time_s() -> u64 {
    time_since_epoch().as_secs()
}

/// A duration in microseconds, at most [`u64::MAX`].
pub fn saturating_micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl ManualClock {
    pub fn set_us(&self, now_us: u64) {
        self.0.store(now_us, Ordering::Relaxed);
    }

    pub fn advance_us(&self, by_us: u64) {
        self.0.fetch_add(by_us, Ordering::Relaxed);
    }

    /// Sets the wall clock forward, or back.
    pub fn step_wall_us(&self, by_us: i64) {
        self.1.fetch_add(by_us, Ordering::Relaxed);
    }
}
