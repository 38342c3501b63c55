//! The only source of time for decisions.
//!
//! Decisions use microseconds since the Unix epoch. A double holds these integers exactly until the
//! year 2255 (2^53 µs), so Rust and Lua compute with the same numbers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Reads the monotonic clock. In a runtime with paused time, it reads that runtime's time.
pub fn monotonic_now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Source of the current time: the system clock, or a time set by a test or a simulation.
#[derive(Clone, Debug)]
pub struct Clock(ClockSource);

#[derive(Clone, Debug)]
enum ClockSource {
    System {
        start: Instant,
        start_us: u64,
    },
    Simulated {
        start: Instant,
        start_us: u64,
        suspended_us: Arc<AtomicU64>,
    },
    Manual(Arc<AtomicU64>),
}

/// Moves a manual [`Clock`]. The time of a manual clock may go backwards, which a limiter has to
/// tolerate.
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<AtomicU64>);

impl Clock {
    /// The wall clock as read at this call, advanced monotonically afterwards. A later change of
    /// the machine's clock neither refills nor freezes a quota.
    #[allow(
        clippy::disallowed_methods,
        reason = "this is the one place that reads the system's clock"
    )]
    pub fn system() -> Self {
        let since_epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Self(ClockSource::System {
            start: monotonic_now(),
            start_us: saturating_micros(since_epoch),
        })
    }

    /// A clock that shows `start_us` now and advances with the runtime's time: for simulations.
    /// Its boot time also includes `suspended_us`, the time for which the machine was suspended.
    pub fn simulated(start_us: u64, suspended_us: Arc<AtomicU64>) -> Self {
        Self(ClockSource::Simulated {
            start: monotonic_now(),
            start_us,
            suspended_us,
        })
    }

    /// Starts a system clock anew from the current wall clock, so that it includes the steps made
    /// since. Returns a copy of any other clock.
    #[must_use]
    pub fn reread_system_clock(&self) -> Self {
        match &self.0 {
            ClockSource::System { .. } => Self::system(),
            _ => self.clone(),
        }
    }

    /// A clock that stands still until its [`ManualClock`] moves it.
    pub fn manual(start_us: u64) -> (Self, ManualClock) {
        let time = Arc::new(AtomicU64::new(start_us));
        (
            Self(ClockSource::Manual(Arc::clone(&time))),
            ManualClock(time),
        )
    }

    /// Microseconds since an arbitrary start. Unlike an `Instant`, this time advances while the
    /// machine is suspended (on Linux).
    pub fn boot_clock_us(&self) -> u64 {
        match &self.0 {
            ClockSource::System { start, .. } => read_boot_clock_us(*start),
            ClockSource::Simulated {
                start,
                suspended_us,
                ..
            } => saturating_micros(monotonic_now().saturating_duration_since(*start))
                .saturating_add(suspended_us.load(Ordering::Relaxed)),
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
        match &self.0 {
            ClockSource::System { start, start_us }
            | ClockSource::Simulated {
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

/// Seconds since the Unix epoch by the current wall clock, including its steps. Use it for dates
/// set outside of tidegate, such as the expiry of a token, and never for quotas.
#[allow(
    clippy::disallowed_methods,
    reason = "this is the one place that reads the system's clock"
)]
pub fn unix_time_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

fn saturating_micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl ManualClock {
    pub fn set_us(&self, now_us: u64) {
        self.0.store(now_us, Ordering::Relaxed);
    }

    pub fn advance_us(&self, by_us: u64) {
        self.0.fetch_add(by_us, Ordering::Relaxed);
    }
}
