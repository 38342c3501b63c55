//! The verdict about one request.

use super::EstimatedCharge;
use crate::limiter::{Key, Limit, LimitStatus, OverrideInEffect, Refusal};
use crate::policy::{KeyError, NamedLimit, Policy, PolicyMode, RejectResponse, Threshold};
use crate::store::{ConcurrencySlotGuard, DecisionSource};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::time::Duration;
use tokio::time::Instant;

/// The decision about a request. Borrows the policy table that it was decided by. The default
/// forwards a request about which nothing was decided.
#[derive(Debug, Default)]
pub struct Verdict<'t> {
    pub outcome: RequestOutcome<'t>,
    /// Every enforced limit that applied, in the order of the policies; empty if none was decided.
    /// The inline capacity is small: the verdict is moved with every request.
    pub limits: SmallVec<[LimitReport<'t>; 1]>,
    /// The store's clock at the decision (µs since the epoch).
    pub now_us: u64,
    /// Time of the decision; `None` if the store was not asked.
    pub decided_at: Option<Instant>,
    /// Source of the decision; `None` if the store was not asked.
    pub source: Option<DecisionSource>,
    /// Time to hold the request before it is forwarded.
    pub delay: Duration,
    /// Whether an enforced limit applied and was decided without the store.
    pub is_degraded: bool,
    /// Slots to hold until the request has ended completely.
    pub slot_guard: Option<ConcurrencySlotGuard>,
    /// Estimated charges to settle from the response.
    pub estimated_charges: Vec<EstimatedCharge>,
    /// Policies that would have rejected the request if they were enforced.
    pub unenforced_rejections: UnenforcedRejections<'t>,
    /// Thresholds that the request is the first to reach (`notify`), and that may be reported.
    pub reached_thresholds: Vec<(&'t NamedLimit, Threshold)>,
}

/// The policies that would have rejected a request, in their order.
#[derive(Debug, Default)]
pub struct UnenforcedRejections<'t>(Vec<(&'t Policy, PolicyMode)>);

impl<'t> UnenforcedRejections<'t> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The names of the policies in a mode.
    pub fn names_in_mode(&self, mode: PolicyMode) -> impl Iterator<Item = &'t str> {
        let in_mode = self.0.iter().filter(move |(_, own)| *own == mode);
        in_mode.map(|(policy, _)| &*policy.name)
    }

    /// Adds a policy that is not enforced, but in this mode. One that was added just before is not
    /// added again.
    pub(super) fn add_policy(&mut self, policy: &'t Policy, mode: PolicyMode) {
        let is_last = |last: &(&'t Policy, PolicyMode)| std::ptr::eq(last.0, policy);
        if !self.0.last().is_some_and(is_last) {
            self.0.push((policy, mode));
        }
    }

    /// Adds the policies of `other`.
    pub(super) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }
}

/// What happens to the request. In this project a limit *refuses*, a request is *rejected*, and
/// `deny` is the action of a policy.
#[derive(Debug, Default)]
pub enum RequestOutcome<'t> {
    #[default]
    Forward,
    /// A limit is exceeded: 429, unless the policy's `reject.status` or gRPC says otherwise.
    Limited(LimitRejection<'t>),
    /// A policy with `action = "deny"` matched: 403, unless its `reject.status` or gRPC says
    /// otherwise.
    Denied {
        policy: &'t str,
        /// As [`LimitRejection::is_reported`].
        is_reported: bool,
        custom_response: Option<&'t RejectResponse>,
    },
    /// A policy cannot form its key: 400.
    InvalidKey {
        policy: &'t str,
        /// As [`LimitRejection::is_reported`].
        is_reported: bool,
        error: KeyError,
    },
    /// The store is unavailable and a policy is `closed`: 503.
    Unavailable {
        policy: &'t str,
        /// As [`LimitRejection::is_reported`].
        is_reported: bool,
        retry_after_us: u64,
    },
}

/// A rejection by one or more limits.
#[derive(Debug)]
pub struct LimitRejection<'t> {
    /// The policy of the limit with the longest wait.
    pub policy: &'t str,
    /// Whether the response may name the policy.
    pub is_reported: bool,
    /// The names of all reported limits that refused, as in the rate-limit headers.
    pub violated_limits: SmallVec<[&'t str; 1]>,
    pub retry: RetryHint,
    /// Why the limit with the longest wait refuses.
    pub reason: RejectionReason,
    /// Whether a block was already in effect.
    pub is_blocked: bool,
    pub custom_response: Option<&'t RejectResponse>,
    /// The key at that policy, if it has several values. Boxed, because the verdict is moved with
    /// every request.
    pub key: Option<Box<Key>>,
}

/// Why a limit refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectionReason {
    /// Too few units are left, or the cost is more than the limit.
    TooFewUnits,
    /// Earlier rejections block the key (`block_for`).
    Penalty,
    /// An override blocks the key.
    Override,
    /// The limit is 0.
    ZeroLimit,
}

impl RejectionReason {
    /// The reason of a refusal. `is_penalty` is whether `block_for` applies.
    pub(super) fn from_status(limit: &Limit, status: &LimitStatus, is_penalty: bool) -> Self {
        match status.in_effect {
            Some(OverrideInEffect::Blocked) => Self::Override,
            _ if status.limit_in_effect(limit).requests == 0 => Self::ZeroLimit,
            _ if is_penalty && status.refusal != Some(Refusal::Never) => Self::Penalty,
            _ => Self::TooFewUnits,
        }
    }
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

impl RetryHint {
    pub(super) fn from_refusal(refusal: Refusal, now_us: u64) -> Self {
        match refusal {
            Refusal::Until(at_us) => Self::After(at_us.saturating_sub(now_us)),
            Refusal::Never => Self::Never,
            Refusal::Unknown => Self::Unknown,
        }
    }
}

/// The status of one limit that applied to a request.
#[derive(Clone, Copy, Debug)]
pub struct LimitReport<'t> {
    pub limit: &'t NamedLimit,
    pub status: LimitStatus,
    /// Key of the quota: [`Key::id`](crate::limiter::Key::id).
    pub key_id: u128,
}

impl LimitReport<'_> {
    /// The limit that was decided: that of the policy, or with the amounts of the key's override.
    pub fn limit_in_effect(&self) -> Limit {
        self.status.limit_in_effect(&self.limit.limit)
    }

    /// The limit with the longest refusal, whose policy rejects the request. Of equal refusals, the
    /// first.
    /// Without a refusal, the one with the fewest remaining units.
    pub fn find_tightest_limit(limits: &[Self]) -> Option<&Self> {
        let remaining = |one: &Self| match one.status.refusal {
            Some(_) => 0,
            None => one.status.remaining,
        };
        limits
            .iter()
            .min_by_key(|one| (Reverse(one.status.refusal), remaining(one)))
    }
}

impl<'t> Verdict<'t> {
    /// Creates a verdict without limits.
    pub(super) fn from_outcome(outcome: RequestOutcome<'t>) -> Self {
        Self {
            outcome,
            ..Self::default()
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

    /// The wait until the same request would be admitted, if it was rejected and the wait is known.
    pub fn retry_after_us(&self) -> Option<u64> {
        match self {
            Self::Limited(LimitRejection {
                retry: RetryHint::After(wait_us),
                ..
            }) => Some(*wait_us),
            Self::Unavailable { retry_after_us, .. } => Some(*retry_after_us),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::Algorithm;

    #[test]
    fn of_equal_refusals_the_first_limit_is_the_tightest() {
        let named = ["first", "second"].map(|name| NamedLimit {
            name: name.into(),
            amount: None,
            is_reported: true,
            release: crate::policy::SlotRelease::default(),
            unit: None,
            limit: Limit {
                requests: 10,
                per_us: 1_000_000,
                algorithm: Algorithm::SlidingLog,
            },
        });
        let report = |limit, remaining, refusal| LimitReport {
            limit,
            status: LimitStatus {
                remaining,
                next_growth_us: None,
                refusal,
                in_effect: None,
            },
            key_id: 0,
        };
        let tightest = |refusals: [Option<Refusal>; 2]| {
            let [first, second] = refusals;
            let limits = [report(&named[0], 5, first), report(&named[1], 2, second)];
            let tightest = LimitReport::find_tightest_limit(&limits).unwrap();
            tightest.limit.name.to_string()
        };
        let until = |at_us| Some(Refusal::Until(at_us));
        assert_eq!(tightest([until(7), until(7)]), "first");
        assert_eq!(tightest([until(7), until(8)]), "second");
        assert_eq!(tightest([until(7), None]), "first");
        assert_eq!(tightest([None, None]), "second");
    }
}
