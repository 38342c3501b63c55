//! The charges of one request: which limits apply, by which key and at which cost.

use super::decisions::PolicyDecision;
use super::planned_policy::{PlannedPolicy, PolicyStatuses, SlotTerms};
use super::verdict::UnenforcedRejections;
use super::{EstimatedCharge, RequestOutcome};
use crate::limiter::{Decision, Key, MAX_UNITS, PolicyCharges};
use crate::policy::{
    ClientQuota, Descriptor, Facts, KeyError, MatchingPolicies, OnStoreFailure, OverrideRule,
    Policy, PolicyAction, PolicyTable, ValueDigests,
};
use crate::store::{
    ConcurrencySlotGuard, ConcurrencySlots, DecisionSource, LimitAndKey, SettlementQueue,
};
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The charges of one request.
#[derive(Default)]
pub(super) struct ChargePlan<'t> {
    /// The inline capacity is small: the plan is moved with every request, and a planned policy is
    /// large.
    pub planned_policies: SmallVec<[PlannedPolicy<'t>; 1]>,
    /// Policies that would have rejected the request before any charge.
    pub unenforced_rejections: UnenforcedRejections<'t>,
    /// The terms of all policies whose charges were merged, if any were. Boxed, because it is rare.
    pub merged_slot_terms: Option<Box<SlotTerms>>,
}

impl<'t> ChargePlan<'t> {
    /// Evaluates the policies that match `facts`, in order, until one allows or denies the request.
    /// Limits before an allowing policy apply; a denied request charges nothing. A shadow policy
    /// does not end the evaluation. Policies for whose index `is_included` returns false do not
    /// apply. Decisions that need no counter are passed to `record_decision`. `descriptor` is that
    /// of `facts`, if any.
    pub(super) fn from_facts(
        table: &'t PolicyTable,
        matching: MatchingPolicies<'t>,
        (facts, descriptor): (&Facts<'_>, Option<&'t Descriptor<'t>>),
        is_included: impl Fn(usize) -> bool,
        mut record_decision: impl FnMut(usize, Option<&Key>, PolicyDecision),
    ) -> Result<Self, RequestOutcome<'t>> {
        let mut plan = Self::default();
        let mut digests = ValueDigests::default();
        for (index, policy) in matching
            .into_iter()
            .filter(|(index, _)| is_included(*index))
        {
            let mut reject = |key: Option<&Key>, error: Option<KeyError>| {
                plan.reject((index, policy), key, error, &mut record_decision)
            };
            if let Some(error) = policy.find_ambiguity(facts, table.client.value_checks) {
                reject(None, Some(error))?;
                continue;
            }
            let quota = match &policy.action {
                PolicyAction::Limit(quota) => quota,
                PolicyAction::Allow => {
                    record_decision(index, None, PolicyDecision::Exempt);
                    if !policy.is_enforced() {
                        continue;
                    }
                    break;
                }
                PolicyAction::Deny => {
                    reject(None, None)?;
                    continue;
                }
            };
            let context = table.key_context(policy);
            let (name, seen) = (&*policy.name, &mut digests);
            match quota.key_and_limits_for_facts(name, (facts, descriptor), &context, seen) {
                Ok(Some((key, selected))) => match selected.rule {
                    OverrideRule::Off => {}
                    OverrideRule::Allow => {
                        record_decision(index, Some(&key), PolicyDecision::Exempt);
                    }
                    OverrideRule::Deny => reject(Some(&key), None)?,
                    OverrideRule::Limit(_) => {
                        let own = ClientQuota::new((index, policy), quota, (key, selected), facts);
                        let mut planned_policy = PlannedPolicy::new(own, facts);
                        // No override in the store replaces the limit of a descriptor.
                        planned_policy.is_dynamic &=
                            descriptor.is_none_or(|one| one.limit_override.is_none());
                        // A request is charged once by the policies of one `counter`.
                        plan.add_planned_policy(planned_policy, u64::max);
                    }
                },
                Ok(None) => {}
                Err(error) => reject(None, Some(error))?,
            }
        }
        Ok(plan)
    }

    /// Rejects the request because the policy denies it, or cannot form its key because of `error`,
    /// unless the policy is not enforced.
    fn reject(
        &mut self,
        (index, policy): (usize, &'t Policy),
        key: Option<&Key>,
        error: Option<KeyError>,
        record_decision: &mut impl FnMut(usize, Option<&Key>, PolicyDecision),
    ) -> Result<(), RequestOutcome<'t>> {
        if !policy.is_enforced() {
            record_decision(index, key, PolicyDecision::from_mode(policy.mode));
            self.unenforced_rejections.add_policy(policy, policy.mode);
            return Ok(());
        }
        record_decision(index, key, PolicyDecision::Denied);
        let custom_response = policy.reject_response.as_ref();
        let (policy, is_reported) = (&*policy.name, policy.is_reported);
        Err(match error {
            Some(error) => RequestOutcome::InvalidKey {
                policy,
                is_reported,
                error,
            },
            None => RequestOutcome::Denied {
                policy,
                is_reported,
                custom_response,
            },
        })
    }

    /// Adds a planned policy. A counter must be charged only once, so the costs of policies with
    /// the same counter are combined.
    pub(super) fn add_planned_policy(
        &mut self,
        planned_policy: PlannedPolicy<'t>,
        combine_costs: impl Fn(u64, u64) -> u64,
    ) {
        let existing = self
            .planned_policies
            .iter_mut()
            .find(|other| other.shares_counters_with(&planned_policy));
        match existing {
            Some(same) => {
                let terms = self.merged_slot_terms.get_or_insert_default();
                for merged in [&*same, &planned_policy] {
                    **terms = terms.combine(merged.slot_terms());
                }
                let cost = combine_costs(same.cost, planned_policy.cost);
                same.merge(planned_policy, cost.min(MAX_UNITS));
            }
            None => self.planned_policies.push(planned_policy),
        }
    }

    /// Builds the charges in the order of the policies. `cost_of_blocks_and_slots` is 1, even for a
    /// request of cost 0, or 0 to only read blocks and slots. `slot` is the id of the request's
    /// slot.
    pub(super) fn build_charges(
        &self,
        cost_of_blocks_and_slots: u64,
        slot: u128,
    ) -> SmallVec<[PolicyCharges<'_>; 1]> {
        let policies = self.planned_policies.iter();
        policies
            .map(|planned_policy| planned_policy.charges(cost_of_blocks_and_slots, slot))
            .collect()
    }

    /// Enters the amounts that the request states into the statuses of its charges, so that
    /// responses and settlements use them. An override in the store wins.
    pub(super) fn report_amounts(&self, decision: &mut Decision) {
        for (planned_policy, outcome) in self.planned_policies.iter().zip(&mut decision.policies) {
            if let Some(amounts) = &planned_policy.own.amounts {
                let own = planned_policy.limits_mut(outcome);
                for (index, outcome) in own.iter_mut().enumerate() {
                    if let Some(status) = &mut outcome.status
                        && status.in_effect.is_none()
                    {
                        status.in_effect = amounts.in_effect(index);
                    }
                }
            }
        }
    }

    /// Pairs each planned policy with the statuses of its charges in `decision`.
    pub(super) fn policies_with_statuses<'d>(
        &self,
        decision: &'d Decision,
    ) -> impl Iterator<Item = (&PlannedPolicy<'t>, PolicyStatuses<'d>)> {
        let decided = self.planned_policies.iter().zip(&decision.policies);
        decided.map(|(planned_policy, outcome)| (planned_policy, planned_policy.statuses(outcome)))
    }

    /// Reserves a slot for each concurrency limit.
    pub(super) fn reserve_slots(
        &self,
        slots: &Arc<ConcurrencySlots>,
    ) -> Option<ConcurrencySlotGuard> {
        let policies = self.planned_policies.iter();
        let counters: SmallVec<[LimitAndKey; 1]> =
            policies.flat_map(PlannedPolicy::slot_counters).collect();
        (!counters.is_empty()).then(|| slots.create_slot_guard(counters))
    }

    /// Keeps the slots that the decision has granted, and sets the maximum duration of the request.
    pub(super) fn retain_taken_slots(
        &self,
        slot_guard: ConcurrencySlotGuard,
        decision: &Decision,
        source: DecisionSource,
    ) -> Option<ConcurrencySlotGuard> {
        // The store may hold slots that the decision did not grant. A split decision has no status
        // for charges that are being returned, were not made, or got no reply. After a call without
        // a reply, Redis may hold all slots.
        let may_hold_ungranted = decision.may_have_charged
            || match source {
                DecisionSource::Degraded => true,
                DecisionSource::Redis => {
                    (decision.outcomes()).any(|outcome| outcome.status.is_none())
                }
                _ => false,
            };
        let (taken, terms) = self.taken_slots(decision);
        let is_taken = |(limit, key): &LimitAndKey| {
            let mut taken = taken.iter();
            taken.any(|(other, other_key)| other == limit && other_key.id() == key.id())
        };
        let mut slot_guard = slot_guard.retain_taken_counters(is_taken, may_hold_ungranted)?;
        let max_duration = terms.max_duration_us.map(Duration::from_micros);
        slot_guard.request_ends_at = max_duration.map(|duration| Instant::now() + duration);
        slot_guard.release = terms.release;
        Some(slot_guard)
    }

    /// The counters in which the request took slots, and the terms on which it holds them. A policy
    /// takes them if it charges all its limits.
    pub(super) fn taken_slots(
        &self,
        decision: &Decision,
    ) -> (SmallVec<[LimitAndKey; 1]>, SlotTerms) {
        let (mut taken, mut terms) = (SmallVec::new(), SlotTerms::default());
        for (planned_policy, statuses) in self.policies_with_statuses(decision) {
            let taken_before = taken.len();
            if decision.admitted && statuses.is_charged {
                taken.extend(planned_policy.slot_counters());
            }
            if taken.len() > taken_before {
                terms = terms.combine(planned_policy.slot_terms());
            }
        }
        if let Some(merged) = self
            .merged_slot_terms
            .as_deref()
            .filter(|_| !taken.is_empty())
        {
            terms = terms.combine(*merged);
        }
        (taken, terms)
    }

    /// The charges made by estimate. A shadow policy that refused has charged nothing.
    pub(super) fn estimated_charges(
        &self,
        decision: &Decision,
        settlements: &Arc<SettlementQueue>,
    ) -> Vec<EstimatedCharge> {
        let mut planned = self.planned_policies.iter();
        if !decision.admitted || planned.all(|planned_policy| planned_policy.estimate.is_none()) {
            return Vec::new();
        }
        let policies = self.policies_with_statuses(decision);
        let estimates = policies.filter_map(|(planned_policy, statuses)| {
            let estimate = planned_policy.estimate.as_ref();
            let estimate = estimate.filter(|_| statuses.is_charged)?;
            let limits = planned_policy.own.limits.iter().zip(statuses.limits);
            let limits = limits.filter(|(named, _)| !named.limit.algorithm.counts_slots());
            let exhausts_limit = limits.clone().any(|(_, outcome)| {
                let status = outcome.status;
                status.is_some_and(|status| status.remaining < planned_policy.cost)
            });
            let counters = limits.map(|(named, outcome)| {
                let limit = outcome.limit_in_effect(&named.limit);
                // Without a recorded time, no units are credited.
                let charged_at_us = outcome.charged_at_us.unwrap_or_default();
                ((limit, planned_policy.own.key.clone()), charged_at_us)
            });
            let responses = planned_policy.counted_limits();
            let responses = responses.zip(statuses.response_counters);
            let counted_key = planned_policy.counted_key.as_deref();
            let response_counters = responses.filter_map(|((_, named), outcome)| {
                Some((outcome.limit_in_effect(&named.limit), counted_key?.clone()))
            });
            Some(EstimatedCharge {
                cost: Arc::clone(estimate.cost),
                factors: estimate.factors.clone(),
                least: estimate.least,
                estimate: planned_policy.cost,
                slices: planned_policy
                    .stream_slices(settlements.store())
                    .map(Box::new),
                counters: counters.collect(),
                counted: response_counters.collect(),
                settlements: Arc::clone(settlements),
                exhausts_limit,
            })
        });
        estimates.collect()
    }

    /// Whether an enforced policy is decided by the store.
    pub(super) fn has_enforced_shared_policy(&self) -> bool {
        let mut policies = self.enforced_policies();
        policies.any(|policy| !policy.is_instance_scoped())
    }

    /// The enforced policies, in order.
    fn enforced_policies(&self) -> impl Iterator<Item = &'t Policy> {
        self.planned_policies
            .iter()
            .filter(|planned_policy| planned_policy.own.mode.is_enforced())
            .map(|planned_policy| planned_policy.own.policy)
    }

    /// The first enforced policy with `on_store_failure = "closed"`.
    pub(super) fn first_fail_closed_policy(&self) -> Option<&'t Policy> {
        self.enforced_policies()
            .find(|policy| policy.on_store_failure == OnStoreFailure::Closed)
    }
}
