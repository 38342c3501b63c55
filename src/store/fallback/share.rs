//! An instance's part of every limit while each counts for itself.

use crate::limiter::{Algorithm, Limit};

/// How many instances share the limits, and which of them this is.
///
/// Of `units` each gets floor(units / live), and those with the lowest places one of what remains: together exactly
/// `units`, if all know the same number. With more instances than units those behind get nothing. Who doesn't know
/// his place is behind all others: too strict, never lax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    instances: u32,
    rank: Option<u32>,
}

impl Share {
    /// Before the fleet was ever seen.
    pub fn with_unknown_rank(instances: u32) -> Self {
        Self {
            instances: instances.max(1),
            rank: if instances <= 1 { Some(0) } else { None },
        }
    }

    /// As it was seen: the instance with the `place`-th lowest id, from 0.
    pub fn with_rank(instances: u32, rank: u32) -> Self {
        Self {
            instances: instances.max(1),
            rank: Some(rank),
        }
    }

    /// Instances that share, at least 1.
    pub fn instances(self) -> u32 {
        self.instances
    }

    /// This instance's part of so many units.
    pub fn scale_units(self, units: u64) -> u64 {
        let instances = u64::from(self.instances);
        let gets_remainder = self
            .rank
            .is_some_and(|place| u64::from(place) < units % instances);
        units / instances + u64::from(gets_remainder)
    }

    /// This instance's part of a limit. It uses the same counter: only amounts differ.
    pub fn scale_limit(self, limit: &Limit) -> Limit {
        let algorithm = match limit.algorithm {
            // Everybody blocks whom he refuses himself.
            Algorithm::Block => return *limit,
            Algorithm::TokenBucket { burst, warm_up_us } => Algorithm::TokenBucket {
                burst: self.scale_units(burst),
                warm_up_us,
            },
            // The line gets shorter with the rate.
            algorithm => algorithm,
        };
        Limit {
            requests: self.scale_units(limit.requests),
            algorithm,
            ..*limit
        }
    }

    pub(super) fn to_bits(self) -> u64 {
        u64::from(self.instances) << 32 | u64::from(self.rank.unwrap_or(u32::MAX))
    }

    pub(super) fn from_bits(bits: u64) -> Self {
        let half = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(u32::MAX);
        Self {
            instances: half(bits >> 32).max(1),
            rank: Some(half(bits)).filter(|place| *place != u32::MAX),
        }
    }
}
