//! Trouble that comes with every request is told now and then, not with every request.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Lets something be told at most once per pause, and counts what was not told.
#[derive(Debug)]
pub struct Throttle {
    pause: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    told: Option<Instant>,
    untold: u64,
}

impl Throttle {
    pub fn new(pause: Duration) -> Self {
        Self {
            pause,
            state: Mutex::default(),
        }
    }

    /// How often it happened since it was last told, this time included, if it is time to tell it again.
    pub fn tell(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock();
        state.untold += 1;
        if state
            .told
            .is_some_and(|told| now.saturating_duration_since(told) < self.pause)
        {
            return None;
        }
        state.told = Some(now);
        Some(std::mem::take(&mut state.untold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_told_at_once_and_the_rest_in_sums() {
        let start = Instant::now();
        let throttle = Throttle::new(Duration::from_secs(10));
        let tell = |seconds| throttle.tell(start + Duration::from_secs(seconds));
        assert_eq!(
            [tell(0), tell(1), tell(9), tell(10), tell(11)],
            [Some(1), None, None, Some(3), None]
        );
        assert_eq!(tell(60), Some(2));
    }
}
