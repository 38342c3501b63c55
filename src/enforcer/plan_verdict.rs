//! From the store's decision about a plan to a verdict, and to the decision of each policy.

use super::charge_plan::ChargePlan;
use super::decisions::PolicyDecision;
use super::planned_policy::{PlannedPolicy, PolicyStatuses};
use super::{LimitRejection, LimitReport, RejectionReason, RequestOutcome, RetryHint, Verdict};
use crate::limiter::{Decision, Key, LimitStatus, Refusal};
use crate::policy::{NamedLimit, OnStoreFailure, PolicyMode};
use crate::store::StoreUnavailable;
use smallvec::SmallVec;
use std::mem::take;
use std::time::Duration;

impl<'t> ChargePlan<'t> {
    /// Builds the verdict from a decision with one status per charge.
    pub(super) fn into_verdict(mut self, decision: &Decision) -> Verdict<'t> {
        let mut verdict = Verdict {
            now_us: decision.now_us,
            delay: Duration::from_micros(decision.delay_us),
            unenforced_rejections: take(&mut self.unenforced_rejections),
            ..Verdict::default()
        };
        let mut refusals = RefusalSummary::default();
        for (planned_policy, statuses) in self.policies_with_statuses(decision) {
            refusals.is_blocked |= statuses.is_blocked();
            let blocked_until_us = statuses.blocked_until_us();
            for (limit, outcome) in planned_policy.limits.iter().zip(statuses.limits) {
                let (policy, mode) = (planned_policy.policy, planned_policy.mode);
                let status = match (outcome.status, blocked_until_us) {
                    (Some(status), _) if !mode.is_enforced() => {
                        if status.refusal.is_some() {
                            verdict.unenforced_rejections.add_policy(policy, mode);
                        }
                        // A limit that does not reject reports its units without the refusal.
                        let refusal = None;
                        Some(LimitStatus { refusal, ..status }).filter(|_| mode == PolicyMode::Mark)
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
                    let is_penalty = statuses.is_blocked();
                    let reason = RejectionReason::from_status(&limit.limit, &status, is_penalty);
                    refusals.add_refusal(planned_policy, limit, (refusal, reason));
                }
            }
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
        let verdict = match (self.first_fail_closed_policy(), fallback_decision) {
            (None, Some(decision)) => self.into_verdict(decision),
            (closed, _) => Verdict {
                unenforced_rejections: self.unenforced_rejections,
                outcome: closed.map_or(RequestOutcome::Forward, |policy| {
                    RequestOutcome::Unavailable {
                        policy: &policy.name,
                        is_reported: policy.is_reported,
                        retry_after_us: unavailable.retry_after_us,
                    }
                }),
                ..Verdict::default()
            },
        };
        Verdict {
            is_degraded,
            ..verdict
        }
    }

    /// Records the decision of each policy. A policy without a known status, as in an answer of the
    /// deny cache, is not recorded.
    pub(super) fn record_decisions(
        &self,
        decision: &Decision,
        mut count: impl FnMut(usize, Option<&Key>, PolicyDecision),
    ) {
        let is_delayed = decision.delay_us > 0;
        for (planned_policy, statuses) in self.policies_with_statuses(decision) {
            if let Some(decision_label) = planned_policy.read_decision(statuses, is_delayed) {
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
        let mut outcomes = fallback_decision
            .into_iter()
            .flat_map(|decided| &decided.policies);
        let is_delayed = fallback_decision.is_some_and(|decided| decided.delay_us > 0);
        for planned_policy in &self.planned_policies {
            let statuses = outcomes.next();
            let statuses = statuses.map(|outcome| planned_policy.statuses(outcome));
            let decision_label = if planned_policy.key.is_instance_scoped() {
                statuses.and_then(|statuses| planned_policy.read_decision(statuses, is_delayed))
            } else {
                Some(planned_policy.read_degraded_decision(statuses))
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
    /// The decision of the policy. `None` if a status is unknown.
    fn read_decision(
        &self,
        statuses: PolicyStatuses<'_>,
        is_delayed: bool,
    ) -> Option<PolicyDecision> {
        let mode = self.mode;
        match (statuses.has_refusing_limit(), mode) {
            _ if statuses.is_blocked() => Some(PolicyDecision::Blocked),
            (true, PolicyMode::Enforce) => Some(PolicyDecision::Rejected),
            (true, _) => Some(PolicyDecision::from_mode(mode)),
            (false, _) if statuses.known_limits().count() < statuses.limits.len() => None,
            (false, PolicyMode::Enforce) if is_delayed && self.may_delay_requests() => {
                Some(PolicyDecision::Delayed)
            }
            (false, _) => Some(PolicyDecision::Allowed),
        }
    }

    /// The decision of the policy while the store is unavailable. `statuses` come from the decision
    /// that was made without the store; `None` if none was made.
    fn read_degraded_decision(&self, statuses: Option<PolicyStatuses<'_>>) -> PolicyDecision {
        match (self.policy.on_store_failure, statuses) {
            _ if !self.mode.is_enforced() => PolicyDecision::DegradedUndecided,
            (OnStoreFailure::Open, _) => PolicyDecision::DegradedOpen,
            (OnStoreFailure::Closed, _) => PolicyDecision::DegradedClosed,
            // Another policy is closed: nothing was decided.
            (OnStoreFailure::Local, None) => PolicyDecision::DegradedUndecided,
            (OnStoreFailure::Local, Some(statuses))
                if statuses.is_blocked() || statuses.has_refusing_limit() =>
            {
                PolicyDecision::DegradedLocalRejected
            }
            (OnStoreFailure::Local, Some(_)) => PolicyDecision::DegradedLocalAllowed,
        }
    }
}

impl PolicyStatuses<'_> {
    fn is_blocked(&self) -> bool {
        self.block.is_some_and(|block| block.refusal.is_some())
    }

    /// End of the current block (µs, store's clock), if any.
    pub(super) fn blocked_until_us(&self) -> Option<u64> {
        self.block.and_then(|block| block.next_growth_us)
    }

    /// The known statuses of the limits.
    pub(super) fn known_limits(&self) -> impl Iterator<Item = LimitStatus> {
        self.limits.iter().filter_map(|outcome| outcome.status)
    }

    fn has_refusing_limit(&self) -> bool {
        let mut outcomes = self.limits.iter();
        outcomes.any(|outcome| outcome.refusal().is_some())
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
struct RefusalSummary<'t, 'p> {
    longest_refusal: Option<(&'p PlannedPolicy<'t>, Refusal, RejectionReason)>,
    violated_limits: SmallVec<[&'t str; 2]>,
    is_blocked: bool,
}

impl<'t, 'p> RefusalSummary<'t, 'p> {
    fn add_refusal(
        &mut self,
        planned_policy: &'p PlannedPolicy<'t>,
        limit: &'t NamedLimit,
        (refusal, reason): (Refusal, RejectionReason),
    ) {
        if planned_policy.policy.is_reported {
            self.violated_limits.push(&limit.name);
        }
        if self
            .longest_refusal
            .is_none_or(|(_, longest, _)| refusal > longest)
        {
            self.longest_refusal = Some((planned_policy, refusal, reason));
        }
    }

    /// Builds the rejection, if any limit refused. The policy with the longest refusal wins: it
    /// determines the retry time and the response.
    fn into_rejection(self, now_us: u64) -> Option<LimitRejection<'t>> {
        let (planned_policy, refusal, reason) = self.longest_refusal?;
        let (policy, key) = (planned_policy.policy, &planned_policy.key);
        let retry = match refusal {
            Refusal::Until(at_us) => RetryHint::After(at_us.saturating_sub(now_us)),
            Refusal::Never => RetryHint::Never,
            Refusal::Unknown => RetryHint::Unknown,
        };
        let has_parts = policy
            .quota()
            .is_some_and(|quota| quota.key.value_count() > 1);
        Some(LimitRejection {
            policy: &policy.name,
            is_reported: policy.is_reported,
            violated_limits: self.violated_limits,
            retry,
            reason,
            is_blocked: self.is_blocked,
            custom_response: policy.reject_response.as_ref(),
            key: has_parts.then(|| Box::new(key.clone())),
        })
    }
}
