//! The charges of one request: which limits apply, by which key and at which cost.

use super::decisions::PolicyDecision;
use super::verdict::UnenforcedRejections;
use super::{EstimatedCharge, RequestOutcome};
use crate::limiter::{
    Algorithm, ChargeOutcome, Decision, Key, LeaseTerms, Limit, LimitCharge, LimitStatus,
    MAX_UNITS, PolicyCharges, PolicyOutcome,
};
use crate::policy::{
    ClientQuota, Descriptor, EstimateCost, Facts, KeyDigests, KeyError, MatchingPolicies,
    NamedLimit, OnStoreFailure, OverrideRule, Policy, PolicyAction, PolicyTable, SlotRelease,
};
use crate::store::{
    ConcurrencySlotGuard, ConcurrencySlots, DecisionSource, LimitAndKey, SettlementQueue,
};
use smallvec::SmallVec;
use std::borrow::Cow;
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
        let mut digests = KeyDigests::default();
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
    ) -> SmallVec<[PolicyCharges<'_>; 2]> {
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
        settlements: &SettlementQueue,
    ) -> Vec<EstimatedCharge> {
        let mut planned = self.planned_policies.iter();
        if !decision.admitted || planned.all(|planned_policy| planned_policy.estimate.is_none()) {
            return Vec::new();
        }
        let policies = self.policies_with_statuses(decision);
        let estimates = policies.filter_map(|(planned_policy, statuses)| {
            let cost = planned_policy.estimate.filter(|_| statuses.is_charged)?;
            let limits = planned_policy.own.limits.iter().zip(statuses.limits);
            let limits = limits.filter(|(named, _)| !named.limit.algorithm.counts_slots());
            let exhausts_limit = limits.clone().any(|(_, outcome)| {
                let status = outcome.status;
                status.is_some_and(|status| status.remaining < cost.estimate)
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
                cost: Arc::clone(cost),
                counters: counters.collect(),
                counted: response_counters.collect(),
                settlements: settlements.clone(),
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

/// The outcomes of a policy's charges in a decision.
#[derive(Clone, Copy, Default)]
pub(super) struct PolicyStatuses<'d> {
    /// `None` if the policy has no block, or if its status is unknown.
    pub block: Option<LimitStatus>,
    pub limits: &'d [ChargeOutcome],
    pub response_counters: &'d [ChargeOutcome],
    /// Whether the policy charged its block and its limits.
    pub is_charged: bool,
}

/// How long a request may hold its concurrency slots, and what frees them. Only enforced policies
/// set terms: a shadow policy does not change the request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SlotTerms {
    /// Maximum duration of the request (µs); `None` if unbounded.
    pub max_duration_us: Option<u64>,
    pub release: SlotRelease,
}

impl SlotTerms {
    /// The stricter terms of both.
    pub(super) fn combine(self, other: Self) -> Self {
        let durations = self
            .max_duration_us
            .into_iter()
            .chain(other.max_duration_us);
        Self {
            max_duration_us: durations.min(),
            release: match self.release {
                SlotRelease::Upstream => SlotRelease::Upstream,
                SlotRelease::Response => other.release,
            },
        }
    }
}

/// The charges of one matching policy, for the request's key.
pub(super) struct PlannedPolicy<'t> {
    pub own: ClientQuota<'t>,
    /// The block of the policy, charged before the limits. A shadow policy has none, because it
    /// never blocks a request.
    pub block: Option<&'t Limit>,
    pub cost: u64,
    /// The cost is an estimate until the response reports the actual one.
    pub estimate: Option<&'t Arc<EstimateCost>>,
    /// The key of the response counters, if only those start the block.
    pub counted_key: Option<Arc<Key>>,
    counts_rejected: bool,
    lease: Option<LeaseTerms>,
    /// Whether overrides of the key in the store apply.
    pub is_dynamic: bool,
}

impl<'t> PlannedPolicy<'t> {
    /// Plans the charges of a request.
    pub(super) fn new(own: ClientQuota<'t>, facts: &Facts<'_>) -> Self {
        let quota = own.quota;
        let read = Self::new_read_only(own);
        let counts_responses = read.block.is_some() && quota.counts_responses();
        let response_key = || Arc::new(read.own.key.to_response_counter_key());
        Self {
            cost: quota.cost.compute_units(facts),
            estimate: quota.cost.as_estimate(),
            counted_key: counts_responses.then(response_key),
            counts_rejected: quota.count_rejected,
            lease: quota.lease.filter(|_| read.own.mode.is_enforced()),
            ..read
        }
    }

    /// Plans charges of cost 0, which read the counters of a policy and change none.
    pub(super) fn new_read_only(own: ClientQuota<'t>) -> Self {
        Self {
            block: (own.quota.block.as_ref()).filter(|_| own.mode.is_enforced()),
            cost: 0,
            estimate: None,
            counted_key: None,
            counts_rejected: false,
            lease: None,
            is_dynamic: own.quota.is_dynamic,
            own,
        }
    }

    /// Whether both charge the same counters: the same policy by several descriptors, or policies
    /// with the same `counter`.
    pub(super) fn shares_counters_with(&self, other: &Self) -> bool {
        let identities = |planned_policy: &Self| {
            let limits = planned_policy.own.limits.iter();
            limits.map(|named| named.limit.counter_identity())
        };
        self.own.key.id() == other.own.key.id() && identities(self).eq(identities(other))
    }

    /// Replaces two charges of the same counters by one of `cost`. The policy with the tighter
    /// limits decides. (Equal descriptors can carry different limits, too.)
    pub(super) fn merge(&mut self, other: PlannedPolicy<'t>, cost: u64) {
        let mut pairs = self.own.limits.iter().zip(other.own.limits).enumerate();
        if pairs.any(|(index, (own, others))| {
            let other_limit = other.limit_at(index, others);
            other_limit.is_tighter_than(self.limit_at(index, own))
        }) {
            *self = other;
        }
        self.cost = cost;
    }

    /// A limit of the policy, with the amount that the request states, if any.
    pub(super) fn limit_at<'l>(&'l self, index: usize, named: &'l NamedLimit) -> &'l Limit {
        let amounts = self.own.amounts.as_ref();
        amounts
            .and_then(|amounts| amounts.get(index))
            .unwrap_or(&named.limit)
    }

    /// The charges of the policy: of its block, its limits, and its response counters.
    pub(super) fn charges(
        &self,
        cost_of_blocks_and_slots: u64,
        slot_id: u128,
    ) -> PolicyCharges<'_> {
        let new_charge = |limit, cost, named: &'t NamedLimit| LimitCharge {
            name: self.is_dynamic.then_some(Cow::Borrowed(&named.name)),
            ..LimitCharge::new(limit, cost)
        };
        let block = self.block.into_iter().zip(self.own.limits);
        let block = block.map(|(block, named)| new_charge(block, cost_of_blocks_and_slots, named));
        let limits = self.own.limits.iter().enumerate().map(|(index, named)| {
            let limit = self.limit_at(index, named);
            // A request takes one slot, whatever its cost.
            let cost = if limit.algorithm.counts_slots() {
                cost_of_blocks_and_slots
            } else {
                self.cost
            };
            LimitCharge {
                is_estimate: self.estimate.is_some(),
                ..new_charge(limit, cost, named)
            }
        });
        let response_counters = self.counted_limits().map(|(index, named)| LimitCharge {
            is_read: true,
            counts_responses: true,
            ..new_charge(self.limit_at(index, named), self.cost, named)
        });
        let charges = block.chain(limits).chain(response_counters).collect();
        let on_store_failure = self.own.policy.on_store_failure;
        PolicyCharges {
            response_key: self.counted_key.clone(),
            shadow: !self.own.mode.is_enforced(),
            counts_rejected: self.counts_rejected,
            slot_id,
            has_fallback: on_store_failure == OnStoreFailure::Local,
            fails_closed: on_store_failure == OnStoreFailure::Closed,
            shard_count: self.own.quota.shards,
            lease: self.lease,
            ..PolicyCharges::with_limits(Cow::Borrowed(&self.own.key), charges)
        }
    }

    /// The outcomes of the policy's charges, as [`PlannedPolicy::charges`] orders them.
    pub(super) fn statuses<'d>(&self, outcome: &'d PolicyOutcome) -> PolicyStatuses<'d> {
        let own = outcome.limits.as_slice();
        let block_count = usize::from(self.block.is_some());
        let (charged, response_counters) = own
            .split_at_checked(block_count + self.own.limits.len())
            .unwrap_or_default();
        let (block, limits) = charged.split_at_checked(block_count).unwrap_or_default();
        PolicyStatuses {
            block: block.first().and_then(|outcome| outcome.status),
            limits,
            response_counters,
            is_charged: !charged.is_empty() && charged.iter().all(ChargeOutcome::is_charged),
        }
    }

    /// The outcomes of the policy's limits, to be changed.
    pub(super) fn limits_mut<'d>(&self, outcome: &'d mut PolicyOutcome) -> &'d mut [ChargeOutcome] {
        let first = usize::from(self.block.is_some());
        let limits = first..first + self.own.limits.len();
        outcome.limits.get_mut(limits).unwrap_or_default()
    }

    /// The limits with response counters and their indices. Their charges follow those of the
    /// limits.
    pub(super) fn counted_limits(&self) -> impl Iterator<Item = (usize, &'t NamedLimit)> {
        let has_counters = self.counted_key.is_some();
        let limits = self.own.limits.iter().enumerate();
        limits.filter(move |(_, named)| has_counters && !named.limit.algorithm.counts_slots())
    }

    /// The counters of requests in flight, in which a request takes a slot.
    pub(super) fn slot_counters(&self) -> impl Iterator<Item = LimitAndKey> {
        let limits = self.own.limits.iter().enumerate();
        let limits = limits.map(|(index, named)| self.limit_at(index, named));
        let slots = limits.filter(|limit| limit.algorithm.counts_slots());
        slots.map(|limit| (*limit, self.own.key.clone()))
    }

    /// The terms on which a request holds a slot of this policy.
    pub(super) fn slot_terms(&self) -> SlotTerms {
        let slots = self
            .own
            .limits
            .iter()
            .filter(|_| self.own.mode.is_enforced());
        let terms = slots.filter_map(|named| match named.limit.algorithm {
            Algorithm::Concurrency { max_duration_us } => Some(SlotTerms {
                max_duration_us: Some(max_duration_us).filter(|us| *us > 0),
                release: named.release,
            }),
            _ => None,
        });
        terms.fold(SlotTerms::default(), SlotTerms::combine)
    }

    /// Whether the policy may delay requests.
    pub(super) fn may_delay_requests(&self) -> bool {
        let mut limits = self.own.limits.iter();
        limits.any(|named| named.limit.algorithm.is_queue())
    }
}
