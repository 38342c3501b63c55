//! An instance's part of every limit while each counts for itself.

use crate::limiter::{Algorithm, Limit};

/// How many instances share the limits, and which of them this is.
///
/// Of `units` each gets floor(units / live), and those with the lowest places one of what remains: together exactly
/// `units`, if all know the same number. With more instances than units those behind get nothing. Who doesn't know
/// his place is behind all others: too strict, never lax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    live: u32,
    place: Option<u32>,
}

impl Share {
    /// Before the fleet was ever seen.
    pub fn assumed(live: u32) -> Self {
        Self {
            live: live.max(1),
            place: if live <= 1 { Some(0) } else { None },
        }
    }

    /// As it was seen: the instance with the `place`-th lowest id, from 0.
    pub fn seen(live: u32, place: u32) -> Self {
        Self {
            live: live.max(1),
            place: Some(place),
        }
    }

    /// Instances that share, at least 1.
    pub fn live(self) -> u32 {
        self.live
    }

    /// This instance's part of so many units.
    pub fn of(self, units: u64) -> u64 {
        let live = u64::from(self.live);
        let has_more = self
            .place
            .is_some_and(|place| u64::from(place) < units % live);
        units / live + u64::from(has_more)
    }

    /// This instance's part of a limit. It uses the same counter: only amounts differ.
    pub fn limit(self, limit: &Limit) -> Limit {
        let algorithm = match limit.algorithm {
            // Everybody blocks whom he refuses himself.
            Algorithm::Block => return *limit,
            Algorithm::TokenBucket { burst, warm_up_us } => Algorithm::TokenBucket {
                burst: self.of(burst),
                warm_up_us,
            },
            // The line gets shorter with the rate.
            algorithm => algorithm,
        };
        Limit {
            requests: self.of(limit.requests),
            algorithm,
            ..*limit
        }
    }

    pub(super) fn packed(self) -> u64 {
        u64::from(self.live) << 32 | u64::from(self.place.unwrap_or(u32::MAX))
    }

    pub(super) fn unpacked(packed: u64) -> Self {
        let half = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(u32::MAX);
        Self {
            live: half(packed >> 32).max(1),
            place: Some(half(packed)).filter(|place| *place != u32::MAX),
        }
    }
}
