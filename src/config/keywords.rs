//! Keywords that no other module has as a type.

use crate::limiter::Algorithm;
use strum::{EnumString, IntoStaticStr, VariantNames};

/// The action of a policy or of an override.
#[derive(Clone, Copy, PartialEq, Eq, EnumString, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub(super) enum PolicyActionKind {
    Limit,
    Allow,
    Deny,
}

#[derive(Clone, Copy, PartialEq, Eq, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub(super) enum RedisTopologyKind {
    Standalone,
    Sentinel,
    Cluster,
}

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
