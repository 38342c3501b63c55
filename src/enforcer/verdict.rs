//! The verdict about one request.

use super::EstimatedCharge;
use crate::limiter::LimitStatus;
use crate::policy::{KeyError, NamedLimit, RejectResponse};
use crate::store::{ConcurrencySlotGuard, DecisionSource};
use smallvec::SmallVec;
use std::time::Duration;
use tokio::time::Instant;

/// The decision about a request. Borrows the policy table that it was decided by.
#[derive(Debug)]
pub struct Verdict<'t> {
    pub outcome: RequestOutcome<'t>,
    /// Every enforced limit that applied, in the order of the policies; empty if none was decided.
    pub limits: SmallVec<[LimitReport<'t>; 4]>,
    /// The store's clock at the decision (µs since the epoch).
    pub now_us: u64,
    /// Time of the decision; `Retry` if the store was not asked.
    pub decided_at: Option<Instant>,
    /// Source of the decision; `Retry` if the store was not asked.
    pub source: Option<DecisionSource>,
    /// Time to hold the request before it is forwarded.
    pub delay: Duration,
    /// Whether an enforced limit applied and was decided without the store.
    pub is_degraded: bool,
    /// Slots to hold until the request has ended completely.
    pub slot_guard: Option<ConcurrencySlotGuard>,
    /// Estimated charges to settle from the response.
    pub estimated_charges: Vec<EstimatedCharge>,
    /// Shadow policies that would have rejected the request.
    pub shadow_rejected: SmallVec<[&'t str; 1]>,
}

/// What happens to the request. In this project a limit *refuses*, a request is *rejected*, and
/// `deny` is the action of a policy.
#[derive(Debug)]
pub enum RequestOutcome<'t> {
    Forward,
    /// A limit is exceeded: 429, unless the policy's `reject.status` or gRPC says otherwise.
    Limited(LimitRejection<'t>),
    /// A policy with `action = "deny"` matched: 403, unless its `reject.status` or gRPC says
    /// otherwise.
    Denied {
        policy: &'t str,
        custom_response: Option<&'t RejectResponse>,
    },
    /// A policy cannot form its key: 400.
    InvalidKey {
        policy: &'t str,
        error: KeyError,
    },
    /// The store is unavailable and a policy is `closed`: 503.
    Unavailable {
        policy: &'t str,
        retry_after_us: u64,
    },
}

/// A rejection by one or more limits.
#[derive(Debug)]
pub struct LimitRejection<'t> {
    /// The policy of the limit with the longest wait.
    pub policy: &'t str,
    /// The names of all limits that refused, as in the rate-limit headers.
    pub violated_limits: SmallVec<[&'t str; 2]>,
    pub retry: RetryHint,
    /// Whether a block was already in effect.
    pub is_blocked: bool,
    pub custom_response: Option<&'t RejectResponse>,
}

/// Time after which the same request would be admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryHint {
    /// After this number of microseconds.
    After(u64),
    Never,
    /// After other requests have ended, at an unknown time.
    Unknown,
}

/// One limit as reported in the rate-limit headers.
#[derive(Clone, Copy, Debug)]
pub struct LimitReport<'t> {
    pub limit: &'t NamedLimit,
    pub status: LimitStatus,
    /// Key of the quota: [`Key::id`](crate::limiter::Key::id).
    pub key_id: u128,
}

impl LimitReport<'_> {
    /// The limit that refused, or the one with the fewest remaining units.
    pub fn find_tightest_limit(limits: &[Self]) -> Option<&Self> {
        limits
            .iter()
            .min_by_key(|one| (one.status.refusal.is_none(), one.status.remaining))
    }
}

impl<'t> Verdict<'t> {
    /// Creates a verdict without limits.
    pub(super) fn from_outcome(outcome: RequestOutcome<'t>) -> Self {
        Self {
            outcome,
            limits: SmallVec::new(),
            now_us: 0,
            decided_at: None,
            source: None,
            delay: Duration::ZERO,
            is_degraded: false,
            slot_guard: None,
            estimated_charges: Vec::new(),
            shadow_rejected: SmallVec::new(),
        }
    }
}

impl RequestOutcome<'_> {
    /// Whether a policy rejects the request: by a limit, `deny` or an invalid key. False if it is
    /// rejected because the store is unavailable.
    pub fn rejects_client(&self) -> bool {
        matches!(
            self,
            Self::Limited(_) | Self::Denied { .. } | Self::InvalidKey { .. }
        )
    }
}
