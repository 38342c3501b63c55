//! From the store's decision about a plan to a verdict, and to the decision of each policy.

use super::charge_plan::ChargePlan;
use super::decisions::PolicyDecision;
use super::planned_policy::{PlannedPolicy, PolicyStatuses};
use super::{LimitRejection, LimitReport, RejectionReason, RequestOutcome, RetryHint, Verdict};
use crate::limiter::{Decision, LimitStatus, Refusal};
use crate::policy::{OnStoreFailure, PolicyMode};
use smallvec::SmallVec;
use std::mem::take;
use std::time::Duration;

impl<'t> ChargePlan<'t> {
    /// Builds the verdict from a decision with one status per charge. Of the limits that refuse, the
    /// one with the longest refusal determines the retry time and the response. Takes the plan's
    /// unenforced rejections.
    pub(super) fn build_verdict(&mut self, decision: &Decision) -> Verdict<'t> {
        let mut verdict = Verdict {
            now_us: decision.now_us,
            delay: Duration::from_micros(decision.delay_us),
            unenforced_rejections: take(&mut self.unenforced_rejections),
            ..Verdict::default()
        };
        let (mut longest, mut violated_limits) = (None, SmallVec::new());
        let mut is_blocked = false;
        for (planned_policy, statuses) in self.policies_with_statuses(decision) {
            let (policy, mode) = (planned_policy.own.policy, planned_policy.own.mode);
            let is_penalty = statuses.is_blocked();
            is_blocked |= is_penalty;
            let blocked_until_us = statuses.blocked_until_us();
            for (limit, outcome) in planned_policy.own.limits.iter().zip(statuses.limits) {
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
                    key_id: planned_policy.own.key.id(),
                });
                let Some(refusal) = status.refusal else {
                    continue;
                };
                if policy.is_reported {
                    violated_limits.push(&*limit.name);
                }
                if longest.is_none_or(|(_, longest, _)| refusal > longest) {
                    let reason = RejectionReason::from_status(&limit.limit, &status, is_penalty);
                    longest = Some((&planned_policy.own, refusal, reason));
                }
            }
        }
        debug_assert!(
            decision.admitted || longest.is_some(),
            "a refused request has a limit that refuses: {decision:?}"
        );
        if let Some((own, refusal, reason)) = longest {
            let has_parts = own.quota.key.value_count() > 1;
            verdict.outcome = RequestOutcome::Limited(LimitRejection {
                policy: &own.policy.name,
                is_reported: own.policy.is_reported,
                violated_limits,
                retry: RetryHint::from_refusal(refusal, decision.now_us),
                reason,
                is_blocked,
                custom_response: own.policy.reject_response.as_ref(),
                key: has_parts.then(|| Box::new(own.key.clone())),
            });
        }
        verdict
    }

    /// Builds the verdict if the store is unavailable and nothing was decided without it: one
    /// `closed` policy rejects the request.
    pub(super) fn build_undecided_verdict(&mut self, retry_after_us: u64) -> Verdict<'t> {
        let closed = self.first_fail_closed_policy();
        Verdict {
            outcome: closed.map_or(RequestOutcome::Forward, |policy| {
                RequestOutcome::Unavailable {
                    policy: &policy.name,
                    is_reported: policy.is_reported,
                    retry_after_us,
                }
            }),
            unenforced_rejections: take(&mut self.unenforced_rejections),
            ..Verdict::default()
        }
    }

    /// Records the decision of each policy. A policy without a known status, as in an answer of the
    /// deny cache, is not recorded. `is_degraded`: `decision` was made without the store, `None` if
    /// nothing was decided.
    pub(super) fn record_decisions(
        &self,
        decision: Option<&Decision>,
        is_degraded: bool,
        mut record_decision: impl FnMut(&PlannedPolicy<'t>, PolicyDecision),
    ) {
        let mut outcomes = decision.into_iter().flat_map(|decided| &decided.policies);
        let is_delayed = decision.is_some_and(|decided| decided.delay_us > 0);
        for planned_policy in &self.planned_policies {
            let statuses = outcomes.next();
            let statuses = statuses.map(|outcome| planned_policy.statuses(outcome));
            let decided = if is_degraded && !planned_policy.own.key.is_instance_scoped() {
                Some(planned_policy.read_degraded_decision(statuses))
            } else {
                statuses.and_then(|statuses| planned_policy.read_decision(statuses, is_delayed))
            };
            if let Some(decided) = decided {
                record_decision(planned_policy, decided);
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
        let mode = self.own.mode;
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
        match (self.own.policy.on_store_failure, statuses) {
            _ if !self.own.mode.is_enforced() => PolicyDecision::DegradedUndecided,
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
