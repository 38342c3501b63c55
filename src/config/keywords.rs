//! The algorithms by their keywords.

use crate::limiter::Algorithm;

/// The algorithms with the defaults of their options.
pub(super) const ALGORITHMS: [Algorithm; 6] = [
    Algorithm::SlidingLog,
    Algorithm::SlidingWindow { buckets: 10 },
    Algorithm::FixedWindow { offset_us: 0 },
    Algorithm::TokenBucket {
        burst: 1,
        warm_up_us: 0,
    },
    Algorithm::LeakyBucket {
        max_delay_us: 1_000_000,
    },
    Algorithm::Concurrency { max_duration_us: 0 },
];
