//! Rate limiting of one request: facts in, one verdict out.
//!
//! The policy table selects the limits, the store decides them. The verdict says whether to forward
//! the request, how to reject it, and which limits to report to the client.

mod active_policies;
mod charge_plan;
mod decisions;
mod dry_run;
mod estimated_charge;
mod explain;
mod notifications;
mod own_limits;
mod plan_verdict;
mod planned_policy;
mod rate_limit_call;
mod stream_slices;
mod verdict;

pub use crate::store::{ConcurrencySlotGuard, DecisionSource};
pub use active_policies::{ActivePolicies, PolicySnapshot};
pub use decisions::{PolicyDecision, RequestDecision};
pub use dry_run::{DryRunOutcome, DryRunResult, PolicyOutcome, QuotaUsage, dry_run_request};
pub use estimated_charge::EstimatedCharge;
pub use explain::{PolicyExplanation, PolicyLimits, PolicyStep, explain_request};
pub use own_limits::OwnLimits;
pub use rate_limit_call::{CallVerdict, DescriptorVerdict};
pub use stream_slices::{SliceDecision, StreamSlices};
pub use verdict::{
    LimitRejection, LimitReport, RejectionReason, RequestOutcome, RetryHint, UnenforcedRejections,
    Verdict,
};

use charge_plan::ChargePlan;
use notifications::SentNotifications;

use crate::limiter::{Decision, Key, PolicyCharges};
use crate::policy::Facts;
use crate::store::{ConcurrencySlots, DecisionFailure, FLUSH_TIMEOUT, SettlementQueue, Store};
use crate::telemetry::metrics::WorkerMetrics;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Decides requests by the active policies and counts the decisions. Each worker has one.
#[derive(Clone, Debug)]
pub struct Enforcer {
    active_policies: ActivePolicies,
    store: Store,
    metrics: Arc<WorkerMetrics>,
    settlements: Arc<SettlementQueue>,
    slots: Arc<ConcurrencySlots>,
    sent_notifications: Arc<SentNotifications>,
}

/// The decision about a plan, by the store or without it.
struct StoreAnswer {
    /// `None` if the store is unavailable and nothing decides without it.
    decision: Option<Decision>,
    source: DecisionSource,
    /// Suggested wait before a retry, if the store is unavailable (µs).
    retry_after_us: u64,
}

impl Enforcer {
    /// Counts decisions in the worker's own `metrics`.
    pub fn new(active_policies: ActivePolicies, store: Store, metrics: Arc<WorkerMetrics>) -> Self {
        Self {
            active_policies,
            settlements: SettlementQueue::new(store.clone(), Arc::clone(&metrics)),
            slots: ConcurrencySlots::new(store.clone()),
            sent_notifications: Arc::default(),
            store,
            metrics,
        }
    }

    /// The active policies. A request keeps the snapshot that it started with.
    pub fn policy_snapshot(&self) -> Arc<PolicySnapshot> {
        self.active_policies.load_snapshot()
    }

    /// Decides one request by `policies`. `arrived` is its arrival time.
    pub async fn decide_request<'t>(
        &self,
        policies: &'t PolicySnapshot,
        facts: &Facts<'_>,
        arrived: Instant,
    ) -> Verdict<'t> {
        let record_decision = |index, key: Option<&Key>, decision: PolicyDecision| {
            policies.record_decision(
                index,
                &self.metrics,
                decision,
                (key, facts.path_or_domain()),
            )
        };
        let table = &policies.table;
        let matching = table.matching_policies(facts);
        // Returns before the plan and its future are built: a request without a policy needs
        // neither.
        if matching.is_empty() {
            return Verdict::default();
        }
        let facts_only = (facts, None);
        let planned =
            ChargePlan::from_facts(table, matching, facts_only, |_| true, record_decision);
        let mut plan = match planned {
            Ok(plan) => plan,
            Err(outcome) => return Verdict::from_outcome(outcome),
        };
        self.decide_plan(&mut plan, record_decision, arrived).await
    }

    /// Decides a plan and takes its unenforced rejections. Takes `&mut` so that the returned future
    /// stores the plan only once.
    async fn decide_plan<'t>(
        &self,
        plan: &mut ChargePlan<'t>,
        record_decision: impl Fn(usize, Option<&Key>, PolicyDecision) + Copy,
        arrived: Instant,
    ) -> Verdict<'t> {
        if plan.planned_policies.is_empty() {
            return plan.build_undecided_verdict(0);
        }
        // Slots are reserved before the store is asked: if the request is cancelled, the guard
        // releases slots that the store may have taken.
        let slot_guard = plan.reserve_slots(&self.slots);
        let slot = slot_guard.as_ref().map_or(0, |guard| guard.slot_id);
        let StoreAnswer {
            mut decision,
            source,
            retry_after_us,
        } = {
            let charges = plan.build_charges(1, slot);
            let answer = self.store.decide_with_source(&charges, arrived).await;
            self.complete_answer(plan, &charges, answer)
        };
        let is_degraded = source == DecisionSource::Degraded;
        if let Some(decision) = &mut decision {
            plan.report_amounts(decision);
        }
        plan.record_decisions(decision.as_ref(), is_degraded, |planned_policy, decided| {
            let own = &planned_policy.own;
            record_decision(own.policy_index, Some(&own.key), decided);
        });
        // The share of an instance says nothing about the usage of a key.
        let is_usage_known = !is_degraded;
        let is_degraded = is_degraded && plan.has_enforced_shared_policy();
        let mut verdict = match &decision {
            Some(decision) => plan.build_verdict(decision),
            None => plan.build_undecided_verdict(retry_after_us),
        };
        if let Some(decision) = &decision {
            let retain = |guard| plan.retain_taken_slots(guard, decision, source);
            verdict.slot_guard = slot_guard.and_then(retain);
            verdict.estimated_charges = plan.estimated_charges(decision, &self.settlements);
        }
        verdict.is_degraded = is_degraded;
        self.complete_verdict(&mut verdict, source, arrived);
        if is_usage_known
            && plan.has_thresholds()
            && let Some(decision) = &decision
        {
            // Boxed so that other requests need no space for this future.
            verdict.reached_thresholds = Box::pin(self.notify_thresholds(plan, decision)).await;
        }
        verdict
    }

    /// Decides by the fallback if the store gave no answer. A closed policy rejects the request,
    /// whatever the others would decide.
    fn complete_answer(
        &self,
        plan: &ChargePlan<'_>,
        charges: &[PolicyCharges<'_>],
        answer: Result<(Decision, DecisionSource), DecisionFailure>,
    ) -> StoreAnswer {
        match answer {
            Ok((decision, source)) => StoreAnswer {
                decision: Some(decision),
                source,
                retry_after_us: 0,
            },
            Err(failure) => StoreAnswer {
                decision: match plan.first_fail_closed_policy() {
                    Some(_) => None,
                    None => self.store.decide_by_fallback(charges, failure.partial),
                },
                source: DecisionSource::Degraded,
                retry_after_us: failure.unavailable.retry_after_us,
            },
        }
    }

    /// Records the time of a decision made just now, and sets its time and source in the verdict.
    fn complete_verdict(
        &self,
        verdict: &mut Verdict<'_>,
        source: DecisionSource,
        arrived: Instant,
    ) {
        let decided_at = Instant::now();
        self.metrics.record_decision_time(
            source as usize,
            decided_at.saturating_duration_since(arrived),
        );
        verdict.decided_at = Some(decided_at);
        verdict.source = Some(source);
    }

    /// Waits, for at most 100 ms, until the store has the units that a response returned: the next
    /// request of its client finds them.
    pub async fn wait_for_returned_units(&self) {
        let at_most = Duration::from_millis(100);
        self.settlements.wait_until_applied(at_most).await;
    }

    /// Waits, for a bounded time, until settlements and slot releases are sent, leases are
    /// returned, and the instance has left the membership.
    pub async fn shut_down(&self) {
        tokio::join!(
            self.settlements.wait_until_applied(FLUSH_TIMEOUT),
            self.slots.wait_until_releases_sent()
        );
        self.store.return_units_and_leave_membership().await;
    }
}

#[cfg(test)]
mod tests;
