//! From the store's decision about a plan to a verdict, and to the decision of each policy.

use super::charge_plan::ChargePlan;
use super::decisions::PolicyDecision;
use super::planned_policy::PlannedPolicy;
use super::{LimitRejection, LimitReport, RequestOutcome, RetryHint, Verdict};
use crate::limiter::{Decision, Key, LimitStatus, Refusal};
use crate::policy::{NamedLimit, OnStoreFailure, Policy, PolicyMode};
use crate::store::StoreUnavailable;
use smallvec::SmallVec;
use std::slice::Iter;
use std::time::Duration;

impl<'t> ChargePlan<'t> {
    /// Builds the verdict from a decision with one status per charge.
    pub(super) fn into_verdict(self, decision: &Decision) -> Verdict<'t> {
        let mut verdict = Verdict::from_outcome(RequestOutcome::Forward);
        verdict.now_us = decision.now_us;
        verdict.delay = Duration::from_micros(decision.delay_us);
        verdict.unenforced_rejections = self.unenforced_rejections;
        let mut refusals = RefusalSummary::default();
        let mut statuses = decision.statuses.iter();
        for planned_policy in &self.planned_policies {
            let block = planned_policy.block.and_then(|_| *statuses.next()?);
            refusals.is_blocked |= block.is_some_and(|block| block.refusal.is_some());
            let blocked_until_us = block.and_then(|block| block.next_growth_us);
            for (limit, status) in planned_policy.limits.iter().zip(&mut statuses) {
                let (policy, mode) = (planned_policy.policy, planned_policy.mode);
                let status = match (*status, blocked_until_us) {
                    (Some(status), _) if !mode.is_enforced() => {
                        if status.refusal.is_some() {
                            verdict.unenforced_rejections.add_policy(policy, mode);
                        }
                        Some(marked_status(status)).filter(|_| mode == PolicyMode::Mark)
                    }
                    (status, Some(until_us)) => Some(blocked_status(status, until_us)),
                    (status, None) => status,
                };
                let Some(status) = status.filter(|status| !status.is_unlimited()) else {
                    continue;
                };
                verdict.limits.push(LimitReport {
                    limit,
                    status,
                    key_id: planned_policy.key.id(),
                });
                if let Some(refusal) = status.refusal {
                    refusals.add_refusal(planned_policy.policy, limit, refusal);
                }
            }
            planned_policy.skip_counted_statuses(&mut statuses);
        }
        debug_assert!(
            decision.admitted || refusals.longest_refusal.is_some(),
            "a refused request has a limit that refuses: {decision:?}"
        );
        if let Some(limited) = refusals.into_rejection(decision.now_us) {
            verdict.outcome = RequestOutcome::Limited(limited);
        }
        verdict
    }

    /// Builds the verdict when the store is unavailable. One `closed` policy rejects the request;
    /// otherwise the decision of the `local` policies applies, if any.
    pub(super) fn into_degraded_verdict(
        self,
        unavailable: &StoreUnavailable,
        fallback_decision: Option<&Decision>,
    ) -> Verdict<'t> {
        let is_degraded = self
            .enforced_policies()
            .any(|policy| !policy.is_instance_scoped());
        if let Some(policy) = self.first_fail_closed_policy() {
            let outcome = RequestOutcome::Unavailable {
                policy: &policy.name,
                is_reported: policy.is_reported,
                retry_after_us: unavailable.retry_after_us,
            };
            return Verdict {
                is_degraded,
                unenforced_rejections: self.unenforced_rejections,
                ..Verdict::from_outcome(outcome)
            };
        }
        match fallback_decision {
            Some(decision) => Verdict {
                is_degraded,
                ..self.into_verdict(decision)
            },
            None => Verdict {
                is_degraded,
                unenforced_rejections: self.unenforced_rejections,
                ..Verdict::from_outcome(RequestOutcome::Forward)
            },
        }
    }

    /// Records the decision of each policy. A policy without a known status, as in an answer of the
    /// deny cache, is not recorded.
    pub(super) fn record_decisions(
        &self,
        decision: &Decision,
        mut count: impl FnMut(usize, Option<&Key>, PolicyDecision),
    ) {
        let mut statuses = decision.statuses.iter();
        for planned_policy in &self.planned_policies {
            let is_delayed = decision.delay_us > 0;
            if let Some(decision_label) = planned_policy.read_decision(&mut statuses, is_delayed) {
                count(
                    planned_policy.policy_index,
                    Some(&planned_policy.key),
                    decision_label,
                );
            }
        }
    }

    /// Records the decision of each policy when the store is unavailable; `fallback_decision` is
    /// the decision made without the store, if any.
    pub(super) fn record_degraded_decisions(
        &self,
        fallback_decision: Option<&Decision>,
        record_decision: impl Fn(usize, Option<&Key>, PolicyDecision),
    ) {
        let mut statuses = fallback_decision.map(|decision| decision.statuses.iter());
        let is_delayed = fallback_decision.is_some_and(|decision| decision.delay_us > 0);
        for planned_policy in &self.planned_policies {
            let decision_label = if planned_policy.key.is_instance_scoped() {
                let read = |statuses| planned_policy.read_decision(statuses, is_delayed);
                statuses.as_mut().and_then(read)
            } else {
                let is_decided = fallback_decision.is_some();
                Some(planned_policy.read_degraded_decision(statuses.as_mut(), is_decided))
            };
            if let Some(decision_label) = decision_label {
                record_decision(
                    planned_policy.policy_index,
                    Some(&planned_policy.key),
                    decision_label,
                );
            }
        }
    }
}

impl PlannedPolicy<'_> {
    /// The decision of the policy, from the next statuses, which are its own. `None` if a status is
    /// unknown.
    fn read_decision(
        &self,
        statuses: &mut Iter<'_, Option<LimitStatus>>,
        is_delayed: bool,
    ) -> Option<PolicyDecision> {
        let block = self.block.and_then(|_| *statuses.next()?);
        let blocked = block.is_some_and(|block| block.refusal.is_some());
        let (mut refused, mut known) = (false, true);
        for status in statuses.by_ref().take(self.limits.len()) {
            refused |= status.is_some_and(|status| status.refusal.is_some());
            known &= status.is_some();
        }
        self.skip_counted_statuses(statuses);
        let mode = self.mode;
        match (refused, mode) {
            _ if blocked => Some(PolicyDecision::Blocked),
            (true, PolicyMode::Enforce) => Some(PolicyDecision::Rejected),
            (true, _) => Some(PolicyDecision::from_mode(mode)),
            (false, PolicyMode::Enforce) if is_delayed && self.may_delay_requests() => {
                Some(PolicyDecision::Delayed)
            }
            (false, _) => known.then_some(PolicyDecision::Allowed),
        }
    }

    /// The decision of the policy while the store is unavailable. `statuses` starts with its own,
    /// if `is_decided`: a decision was made without the store.
    fn read_degraded_decision(
        &self,
        mut statuses: Option<&mut Iter<'_, Option<LimitStatus>>>,
        is_decided: bool,
    ) -> PolicyDecision {
        let charges = self.limits.len() + usize::from(self.block.is_some());
        // Consumes all statuses of this policy, also after the first refusal.
        let refused = statuses
            .iter_mut()
            .flat_map(|statuses| statuses.by_ref().take(charges))
            .flatten()
            .filter(|status| status.refusal.is_some())
            .count()
            > 0;
        if let Some(statuses) = statuses {
            self.skip_counted_statuses(statuses);
        }
        match self.policy.on_store_failure {
            _ if !self.mode.is_enforced() => PolicyDecision::DegradedUndecided,
            OnStoreFailure::Open => PolicyDecision::DegradedOpen,
            OnStoreFailure::Closed => PolicyDecision::DegradedClosed,
            // Another policy is closed: nothing was decided.
            OnStoreFailure::Local if !is_decided => PolicyDecision::DegradedUndecided,
            OnStoreFailure::Local if refused => PolicyDecision::DegradedLocalRejected,
            OnStoreFailure::Local => PolicyDecision::DegradedLocalAllowed,
        }
    }
}

/// The reported status of a limit that does not reject: without units if it would refuse.
fn marked_status(status: LimitStatus) -> LimitStatus {
    match status.refusal {
        None => status,
        Some(refusal) => LimitStatus {
            remaining: 0,
            next_growth_us: match refusal {
                Refusal::Until(at_us) => Some(at_us),
                Refusal::Never | Refusal::Unknown => None,
            },
            refusal: None,
            in_effect: status.in_effect,
        },
    }
}

/// The reported status of a limit while a block holds: no units before the block ends.
fn blocked_status(status: Option<LimitStatus>, until_us: u64) -> LimitStatus {
    let grows_at_us = status.and_then(|status| status.next_growth_us).unwrap_or(0);
    let refusal = match status.and_then(|status| status.refusal) {
        Some(Refusal::Never) => Refusal::Never,
        Some(Refusal::Until(at_us)) => Refusal::Until(at_us.max(until_us)),
        Some(Refusal::Unknown) | None => Refusal::Until(until_us),
    };
    LimitStatus {
        remaining: 0,
        next_growth_us: Some(grows_at_us.max(until_us)),
        refusal: Some(refusal),
        in_effect: status.and_then(|status| status.in_effect),
    }
}

/// Collects the refusals of a request.
#[derive(Default)]
struct RefusalSummary<'t> {
    longest_refusal: Option<(&'t Policy, Refusal)>,
    violated_limits: SmallVec<[&'t str; 2]>,
    is_blocked: bool,
}

impl<'t> RefusalSummary<'t> {
    fn add_refusal(&mut self, policy: &'t Policy, limit: &'t NamedLimit, refusal: Refusal) {
        if policy.is_reported {
            self.violated_limits.push(&limit.name);
        }
        if self
            .longest_refusal
            .is_none_or(|(_, longest)| refusal > longest)
        {
            self.longest_refusal = Some((policy, refusal));
        }
    }

    /// Builds the rejection, if any limit refused. The policy with the longest refusal wins: it
    /// determines the retry time and the response.
    fn into_rejection(self, now_us: u64) -> Option<LimitRejection<'t>> {
        let (policy, refusal) = self.longest_refusal?;
        let retry = match refusal {
            Refusal::Until(at_us) => RetryHint::After(at_us.saturating_sub(now_us)),
            Refusal::Never => RetryHint::Never,
            Refusal::Unknown => RetryHint::Unknown,
        };
        Some(LimitRejection {
            policy: &policy.name,
            is_reported: policy.is_reported,
            violated_limits: self.violated_limits,
            retry,
            is_blocked: self.is_blocked,
            custom_response: policy.reject_response.as_ref(),
        })
    }
}
