//! Throttling of log lines for errors that may occur with every request.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Allows one log line per interval, and counts the occurrences that were not logged.
#[derive(Debug)]
pub struct LogThrottle {
    interval: Duration,
    state: Mutex<ThrottleState>,
}

#[derive(Debug, Default)]
struct ThrottleState {
    last_logged: Option<Instant>,
    unlogged_count: u64,
}

impl LogThrottle {
    pub fn new(interval: Duration) -> Self {
        Self {
            interval,
            state: Mutex::default(),
        }
    }

    /// Counts one occurrence. Returns the number of occurrences since the last log line, including
    /// this one, if a new line is due.
    pub fn record_occurrence(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock();
        state.unlogged_count += 1;
        if state
            .last_logged
            .is_some_and(|last_logged| now.saturating_duration_since(last_logged) < self.interval)
        {
            return None;
        }
        state.last_logged = Some(now);
        Some(std::mem::take(&mut state.unlogged_count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_the_first_event_at_once_and_the_rest_as_counts() {
        let start = Instant::now();
        let throttle = LogThrottle::new(Duration::from_secs(10));
        let record = |seconds| throttle.record_occurrence(start + Duration::from_secs(seconds));
        assert_eq!(
            [record(0), record(1), record(9), record(10), record(11)],
            [Some(1), None, None, Some(3), None]
        );
        assert_eq!(record(60), Some(2));
    }
}
