//! Keywords of several tables that are no plain enum.

use crate::limiter::Algorithm;
use crate::policy::PolicyMode;

pub(super) const ALGORITHMS: [(&str, Algorithm); 6] = [
    ("sliding_log", Algorithm::SlidingLog),
    ("sliding_window", Algorithm::SlidingWindow { buckets: 10 }),
    ("fixed_window", Algorithm::FixedWindow { offset_us: 0 }),
    (
        "token_bucket",
        Algorithm::TokenBucket {
            burst: 1,
            warm_up_us: 0,
        },
    ),
    (
        "leaky_bucket",
        Algorithm::LeakyBucket {
            max_delay_us: 1_000_000,
        },
    ),
    ("concurrency", Algorithm::Concurrency { max_duration_us: 0 }),
];

/// The modes of a policy; `None`: the policy is only validated.
pub(super) const POLICY_MODES: [(&str, Option<PolicyMode>); 4] = [
    (PolicyMode::Enforce.name(), Some(PolicyMode::Enforce)),
    (PolicyMode::Mark.name(), Some(PolicyMode::Mark)),
    (PolicyMode::Shadow.name(), Some(PolicyMode::Shadow)),
    ("off", None),
];
