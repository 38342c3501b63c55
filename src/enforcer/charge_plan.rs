//! The charges of one request: which limits apply, by which key and at which cost.

use super::decisions::PolicyDecision;
use super::planned_policy::{
    ChargePositions, PlannedPolicy, PolicyStatuses, SlotTerms, is_concurrency_limit,
};
use super::verdict::UnenforcedRejections;
use super::{EstimatedCharge, RequestOutcome};
use crate::limiter::{Algorithm, Charge, Decision, Key, LimitStatus, MAX_UNITS};
use crate::policy::{
    Descriptor, Facts, KeyDigests, KeyError, MatchingPolicies, NamedLimit, OnStoreFailure,
    OverrideRule, Policy, PolicyAction, PolicyTable,
};
use crate::store::{
    ConcurrencySlotGuard, ConcurrencySlots, DecisionSource, LimitAndKey, SettlementQueue,
    UntakenSlotAction,
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
    pub planned_policies: SmallVec<[PlannedPolicy<'t>; 2]>,
    /// Policies that would have rejected the request before any charge.
    pub unenforced_rejections: UnenforcedRejections<'t>,
    /// The terms of all policies whose charges were merged, if any were. Boxed, because it is rare.
    pub merged_slot_terms: Option<Box<SlotTerms>>,
}

impl<'t> ChargePlan<'t> {
    /// Evaluates the policies that match `facts`, in order, until one allows or denies the request.
    /// Limits before an allowing policy apply; a denied request charges nothing. A shadow policy
    /// does not end the evaluation. Policies for whose index `is_included` returns false do not
    /// apply. Decisions that need no counter are passed to `record_decision`.
    pub(super) fn from_facts(
        table: &'t PolicyTable,
        matching: MatchingPolicies<'t>,
        facts: &Facts<'_>,
        is_included: impl Fn(usize) -> bool,
        record_decision: impl FnMut(usize, Option<&Key>, PolicyDecision),
    ) -> Result<Self, RequestOutcome<'t>> {
        let mut plan = Self::default();
        plan.add_policies(table, matching, facts, None, is_included, record_decision)?;
        Ok(plan)
    }

    /// Adds the policies that match `facts` to the plan. `descriptor` is that of `facts`, if any.
    pub(super) fn add_policies(
        &mut self,
        table: &'t PolicyTable,
        matching: MatchingPolicies<'t>,
        facts: &Facts<'_>,
        descriptor: Option<&'t Descriptor<'t>>,
        is_included: impl Fn(usize) -> bool,
        mut record_decision: impl FnMut(usize, Option<&Key>, PolicyDecision),
    ) -> Result<(), RequestOutcome<'t>> {
        let mut digests = KeyDigests::default();
        for (index, policy) in matching
            .into_iter()
            .filter(|(index, _)| is_included(*index))
        {
            if let Some(error) = policy.find_ambiguity(facts, &table.client) {
                self.record_invalid_key(index, policy, error, &mut record_decision)?;
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
                    self.deny(index, policy, None, &mut record_decision)?;
                    continue;
                }
            };
            let context = table.key_context(policy);
            let (name, seen) = (&*policy.name, &mut digests);
            let selected = match descriptor {
                Some(descriptor) => {
                    quota.key_and_limits_for_descriptor(name, descriptor, &context, seen)
                }
                None => quota.key_and_limits_for_request(name, facts, &context, seen),
            };
            match selected {
                Ok(Some((key, selected))) => {
                    if !self.is_limited_by(
                        index,
                        policy,
                        (&key, selected.rule),
                        &mut record_decision,
                    )? {
                        continue;
                    }
                    let has_own_limit = descriptor.is_some_and(Descriptor::has_own_limit);
                    let mut planned_policy =
                        PlannedPolicy::new((index, policy), quota, (key, selected), facts);
                    planned_policy.is_dynamic &= !has_own_limit;
                    // A request is charged once by the policies of one `counter`.
                    self.add_planned_policy(planned_policy, u64::max);
                }
                Ok(None) => {}
                Err(error) => {
                    self.record_invalid_key(index, policy, error, &mut record_decision)?
                }
            }
        }
        Ok(())
    }

    /// Whether the policy limits requests of a key, or an override says otherwise.
    fn is_limited_by(
        &mut self,
        index: usize,
        policy: &'t Policy,
        (key, rule): (&Key, OverrideRule),
        record_decision: &mut impl FnMut(usize, Option<&Key>, PolicyDecision),
    ) -> Result<bool, RequestOutcome<'t>> {
        match rule {
            OverrideRule::Limit(_) => return Ok(true),
            OverrideRule::Off => {}
            OverrideRule::Allow => record_decision(index, Some(key), PolicyDecision::Exempt),
            OverrideRule::Deny => self.deny(index, policy, Some(key), record_decision)?,
        }
        Ok(false)
    }

    /// Rejects the request, unless the policy is not enforced.
    fn deny(
        &mut self,
        index: usize,
        policy: &'t Policy,
        key: Option<&Key>,
        record_decision: &mut impl FnMut(usize, Option<&Key>, PolicyDecision),
    ) -> Result<(), RequestOutcome<'t>> {
        if !policy.is_enforced() {
            record_decision(index, key, PolicyDecision::from_mode(policy.mode));
            self.unenforced_rejections.add_policy(policy, policy.mode);
            return Ok(());
        }
        record_decision(index, key, PolicyDecision::Denied);
        Err(RequestOutcome::Denied {
            policy: &policy.name,
            is_reported: policy.is_reported,
            custom_response: policy.reject_response.as_ref(),
        })
    }

    /// Rejects the request because the policy cannot form its key, unless the policy is not
    /// enforced.
    fn record_invalid_key(
        &mut self,
        index: usize,
        policy: &'t Policy,
        error: KeyError,
        record_decision: &mut impl FnMut(usize, Option<&Key>, PolicyDecision),
    ) -> Result<(), RequestOutcome<'t>> {
        if !policy.is_enforced() {
            record_decision(index, None, PolicyDecision::from_mode(policy.mode));
            self.unenforced_rejections.add_policy(policy, policy.mode);
            return Ok(());
        }
        record_decision(index, None, PolicyDecision::Denied);
        Err(RequestOutcome::InvalidKey {
            policy: &policy.name,
            is_reported: policy.is_reported,
            error,
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
    ) -> SmallVec<[Charge<'_>; 4]> {
        (0..)
            .zip(&self.planned_policies)
            .flat_map(|(policy_number, planned_policy)| {
                let block = planned_policy.block.map(|block| {
                    let name = planned_policy.limits.first();
                    let name = name.and_then(|named| planned_policy.dynamic_name(named));
                    (block, cost_of_blocks_and_slots, name)
                });
                // A request takes one slot, whatever its cost.
                let cost = |limit| {
                    if is_concurrency_limit(limit) {
                        cost_of_blocks_and_slots
                    } else {
                        planned_policy.cost
                    }
                };
                let limits = planned_policy.limits.iter().enumerate();
                let limits = limits.map(move |(index, named)| {
                    let limit = planned_policy.limit_at(index, named);
                    (limit, cost(limit), planned_policy.dynamic_name(named))
                });
                let (key, counted_key) = (&planned_policy.key, &planned_policy.counted_key);
                let counted = counted_key.iter().flat_map(move |key| {
                    let name = |named| planned_policy.dynamic_name(named);
                    planned_policy.counted_limits().map(move |(index, named)| {
                        let limit = planned_policy.limit_at(index, named);
                        ((limit, planned_policy.cost, name(named)), &**key, true)
                    })
                });
                block
                    .into_iter()
                    .chain(limits)
                    .map(move |charge| (charge, key, false))
                    .chain(counted)
                    .map(move |((limit, cost, dynamic), key, is_counted)| Charge {
                        policy_number,
                        shadow: !planned_policy.mode.is_enforced(),
                        counts_rejected: planned_policy.counts_rejected,
                        // A block is not settled.
                        is_estimate: planned_policy.estimate.is_some()
                            && limit.algorithm != Algorithm::Block
                            && !is_counted,
                        is_counted,
                        slot_id: slot,
                        has_fallback: planned_policy.policy.on_store_failure
                            == OnStoreFailure::Local,
                        fails_closed: planned_policy.policy.on_store_failure
                            == OnStoreFailure::Closed,
                        shard_count: planned_policy.shards,
                        lease: planned_policy.lease,
                        dynamic,
                        ..Charge::new(limit, key, cost)
                    })
            })
            .collect()
    }

    /// Enters the amounts that the request states into the statuses of its charges, so that
    /// responses and settlements use them. An override in the store wins.
    pub(super) fn report_amounts(&self, decision: &mut Decision) {
        for (planned_policy, positions) in self.policies_with_positions() {
            if let Some(amounts) = &planned_policy.amounts {
                let own = decision.statuses.get_mut(positions.limits);
                for (index, status) in own.into_iter().flatten().enumerate() {
                    if let Some(status) = status
                        && status.in_effect.is_none()
                    {
                        status.in_effect = amounts.in_effect(index);
                    }
                }
            }
        }
    }

    /// Pairs each planned policy with the positions of its charges. A policy charges its block, then
    /// its limits, then its response counters.
    pub(super) fn policies_with_positions(
        &self,
    ) -> impl Iterator<Item = (&PlannedPolicy<'t>, ChargePositions)> {
        let mut first = 0;
        self.planned_policies.iter().map(move |planned_policy| {
            let positions = planned_policy.charge_positions(first);
            first = positions.response_counters.end;
            (planned_policy, positions)
        })
    }

    /// Pairs each planned policy with the statuses of its block and limits in `decision`.
    pub(super) fn policies_with_statuses<'d>(
        &self,
        decision: &'d Decision,
    ) -> impl Iterator<Item = (&PlannedPolicy<'t>, PolicyStatuses<'d>)> {
        let statuses = decision.statuses.as_slice();
        self.policies_with_positions()
            .map(move |(planned_policy, positions)| {
                let block = positions.block.and_then(|at| statuses.get(at)?.as_ref());
                let limits = statuses.get(positions.limits).unwrap_or_default();
                (planned_policy, PolicyStatuses { block, limits })
            })
    }

    /// Reserves a slot for each concurrency limit.
    pub(super) fn reserve_slots(&self, slots: &ConcurrencySlots) -> Option<ConcurrencySlotGuard> {
        let counters = self.planned_policies.iter().flat_map(|planned_policy| {
            let limits = planned_policy
                .limits
                .iter()
                .filter(|named| is_concurrency_limit(&named.limit));
            limits.map(|named| (named.limit, planned_policy.key.clone()))
        });
        let counters: SmallVec<[LimitAndKey; 1]> = counters.collect();
        (!counters.is_empty()).then(|| slots.create_slot_guard(counters))
    }

    /// Keeps the slots that the decision has granted, and sets the maximum duration of the request.
    pub(super) fn retain_taken_slots(
        &self,
        slot_guard: ConcurrencySlotGuard,
        charges: &[Charge<'_>],
        decision: &Decision,
        untaken: UntakenSlotAction,
    ) -> Option<ConcurrencySlotGuard> {
        let (taken, terms) = self.taken_slots(charges, decision);
        let is_taken = |(limit, key): &LimitAndKey| {
            taken
                .iter()
                .any(|charge| *charge.limit == *limit && charge.key.id() == key.id())
        };
        let mut slot_guard = slot_guard.retain_taken_counters(is_taken, untaken)?;
        let ends_at = terms
            .max_duration_us
            .map(|us| Instant::now() + Duration::from_micros(us));
        slot_guard.set_request_end(ends_at, terms.release);
        Some(slot_guard)
    }

    /// The charges that took slots, and the terms on which the request holds them.
    pub(super) fn taken_slots<'c, 'k>(
        &self,
        charges: &'c [Charge<'k>],
        decision: &Decision,
    ) -> (SmallVec<[&'c Charge<'k>; 1]>, SlotTerms) {
        // A key without limits takes no slot.
        let is_refused = |status: &Option<LimitStatus>| {
            status.is_none_or(|status| status.refusal.is_some() || status.is_unlimited())
        };
        let is_policy_refused = |taken_charge: &Charge<'_>| {
            let mut policy_statuses = charges
                .iter()
                .zip(&decision.statuses)
                .filter(|(charge, _)| taken_charge.is_same_policy(charge) && !charge.is_counted);
            policy_statuses.any(|(_, status)| is_refused(status))
        };
        let taken = charges
            .iter()
            .filter(|charge| decision.admitted && is_concurrency_limit(charge.limit));
        let taken: SmallVec<[&Charge<'_>; 1]> =
            taken.filter(|charge| !is_policy_refused(charge)).collect();
        let merged = self.merged_slot_terms.as_deref().copied();
        let mut terms = merged.filter(|_| !taken.is_empty()).unwrap_or_default();
        for charge in &taken {
            let policy = self.planned_policies.get(charge.policy_number as usize);
            terms = policy.map_or(terms, |policy| terms.combine(policy.slot_terms()));
        }
        (taken, terms)
    }

    /// The charges made by estimate. A shadow policy that refused has charged nothing.
    pub(super) fn estimated_charges(
        &self,
        decision: &Decision,
        settlements: &SettlementQueue,
    ) -> Vec<EstimatedCharge> {
        let mut estimates = Vec::new();
        if !decision.admitted {
            return estimates;
        }
        let status_at = |index: usize| decision.statuses.get(index).copied().flatten();
        let limit_in_effect = |named: &NamedLimit, index| {
            status_at(index).map_or(named.limit, |status| status.limit_in_effect(&named.limit))
        };
        // A charge without a recorded time gets the time 0, so that no units are credited.
        let charged_at_us = |index: usize| {
            decision
                .charged_at_us
                .get(index)
                .copied()
                .flatten()
                .unwrap_or_default()
        };
        let is_charged = |index| {
            status_at(index)
                .is_some_and(|status| status.refusal.is_none() && !status.is_unlimited())
        };
        for (planned_policy, positions) in self.policies_with_positions() {
            let mut block_and_limits = positions.block.into_iter().chain(positions.limits.clone());
            let Some(cost) = planned_policy
                .estimate
                .filter(|_| block_and_limits.all(is_charged))
            else {
                continue;
            };
            let limits = planned_policy.limits.iter().zip(positions.limits);
            let counters = limits
                .filter(|(named, _)| !is_concurrency_limit(&named.limit))
                .map(|(named, index)| {
                    let counter = (limit_in_effect(named, index), planned_policy.key.clone());
                    (counter, charged_at_us(index))
                });
            let response_counters = planned_policy.counted_key.iter().flat_map(|key| {
                let limits = planned_policy.counted_limits();
                let limits = limits.zip(positions.response_counters.clone());
                limits.map(|((_, named), index)| (limit_in_effect(named, index), Key::clone(key)))
            });
            estimates.push(EstimatedCharge::new(
                Arc::clone(cost),
                counters.collect(),
                response_counters.collect(),
                settlements.clone(),
            ));
        }
        estimates
    }

    /// The enforced policies, in order.
    pub(super) fn enforced_policies(&self) -> impl Iterator<Item = &'t Policy> {
        self.planned_policies
            .iter()
            .filter(|planned_policy| planned_policy.mode.is_enforced())
            .map(|planned_policy| planned_policy.policy)
    }

    /// The first enforced policy with `on_store_failure = "closed"`.
    pub(super) fn first_fail_closed_policy(&self) -> Option<&'t Policy> {
        self.enforced_policies()
            .find(|policy| policy.on_store_failure == OnStoreFailure::Closed)
    }
}

/// What to do with slots that a decision of the store has not granted. A split decision has no
/// status for charges that are being returned, were not made, or gave no answer.
pub(super) fn untaken_slot_action(
    decision: &Decision,
    source: DecisionSource,
) -> UntakenSlotAction {
    match source == DecisionSource::Redis && decision.statuses.iter().any(Option::is_none) {
        true => UntakenSlotAction::Release,
        false => UntakenSlotAction::Forget,
    }
}
