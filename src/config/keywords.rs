//! Keywords that `[defaults]` and `[[policy]]` share.

use crate::limiter::Algorithm;
use crate::policy::{MissingKeyAction, OnStoreFailure, PolicyMode, SlotRelease};

pub(super) const ON_STORE_FAILURE_MODES: [(&str, OnStoreFailure); 3] = [
    ("open", OnStoreFailure::Open),
    ("closed", OnStoreFailure::Closed),
    ("local", OnStoreFailure::Local),
];

pub(super) const MISSING_KEY_MODES: [(&str, MissingKeyAction); 3] = [
    ("shared", MissingKeyAction::Shared),
    ("skip", MissingKeyAction::Skip),
    ("reject", MissingKeyAction::Reject),
];

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

pub(super) const SLOT_RELEASES: [(&str, SlotRelease); 2] = [
    (SlotRelease::Response.name(), SlotRelease::Response),
    (SlotRelease::Upstream.name(), SlotRelease::Upstream),
];

/// The modes of a policy; `None`: the policy is only validated.
pub(super) const POLICY_MODES: [(&str, Option<PolicyMode>); 4] = [
    (PolicyMode::Enforce.name(), Some(PolicyMode::Enforce)),
    (PolicyMode::Mark.name(), Some(PolicyMode::Mark)),
    (PolicyMode::Shadow.name(), Some(PolicyMode::Shadow)),
    ("off", None),
];
