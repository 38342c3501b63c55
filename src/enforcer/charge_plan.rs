//! The charges of one request: which limits apply, by which key and at which cost.

use super::{EstimatedCharge, RequestOutcome};
use crate::limiter::{Algorithm, Charge, Decision, Key, Lease, Limit, LimitStatus, MAX_UNITS};
use crate::policy::{
    Descriptor, EstimateCost, Facts, NamedLimit, OnStoreFailure, Policy, PolicyAction, PolicyTable,
};
use crate::store::{ConcurrencySlotGuard, ConcurrencySlots, CounterRef, SettlementQueue};
use crate::telemetry::metrics::PolicyDecision;
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The charges of one request.
#[derive(Default)]
pub(super) struct ChargePlan<'t> {
    /// The inline capacity is small: the plan is moved with every request, and a policy charge is
    /// large.
    pub policy_charges: SmallVec<[PolicyCharge<'t>; 2]>,
    /// Shadow policies that would have denied the request.
    pub shadow_denials: SmallVec<[&'t str; 1]>,
}

/// The limits of one matching policy, for the request's key.
pub(super) struct PolicyCharge<'t> {
    /// Index of the policy in the table.
    pub policy_index: usize,
    pub policy: &'t Policy,
    pub key: Key,
    pub limits: &'t [NamedLimit],
    /// Charged before the limits. A shadow policy has none, because it never blocks a request.
    pub block: Option<&'t Limit>,
    pub cost: u64,
    /// The cost is an estimate until the response reports the actual one.
    pub estimate: Option<&'t Arc<EstimateCost>>,
    pub counts_rejected: bool,
    pub shards: u16,
    pub lease: Option<Lease>,
}

impl<'t> PolicyCharge<'t> {
    fn shares_counters_with(&self, other: &Self) -> bool {
        let identities = |policy_charge: &Self| {
            policy_charge
                .limits
                .iter()
                .map(|named| named.limit.counter_identity())
        };
        self.policy_index == other.policy_index
            && self.key.id() == other.key.id()
            && identities(self).eq(identities(other))
    }

    /// Adds another charge of the same counters. The limits differ only if equal descriptors carry
    /// different ones; the tighter limits apply.
    fn merge(&mut self, other: &PolicyCharge<'t>) {
        self.cost = self.cost.saturating_add(other.cost).min(MAX_UNITS);
        let min_requests = |policy_charge: &PolicyCharge<'t>| {
            policy_charge
                .limits
                .iter()
                .map(|named| named.limit.requests)
                .min()
        };
        if min_requests(other) < min_requests(self) {
            self.limits = other.limits;
        }
    }

    /// Whether the policy may delay requests.
    pub(super) fn delays_requests(&self) -> bool {
        let is_leaky_bucket =
            |named: &NamedLimit| matches!(named.limit.algorithm, Algorithm::LeakyBucket { .. });
        self.limits.iter().any(is_leaky_bucket)
    }
}

impl<'t> ChargePlan<'t> {
    /// Evaluates the matching policies in order until one allows or denies the request. Limits
    /// before an allowing policy apply; a denied request charges nothing. A shadow policy ends
    /// nothing. Decisions of policies without limits are passed to `record_decision`.
    pub(super) fn from_facts(
        table: &'t PolicyTable,
        facts: &Facts<'_>,
        record_decision: impl FnMut(usize, Option<&Key>, PolicyDecision),
    ) -> Result<Self, RequestOutcome<'t>> {
        let mut plan = Self::default();
        plan.add_matching_policies(table, facts, None, record_decision)?;
        Ok(plan)
    }

    /// Adds the matching policies of `facts` to the plan. `descriptor` is that of `facts`, if any.
    /// Returns whether any policy matches.
    pub(super) fn add_matching_policies(
        &mut self,
        table: &'t PolicyTable,
        facts: &Facts<'_>,
        descriptor: Option<&'t Descriptor<'t>>,
        mut record_decision: impl FnMut(usize, Option<&Key>, PolicyDecision),
    ) -> Result<bool, RequestOutcome<'t>> {
        let matching = table.matching_policies(facts);
        let is_matched = !matching.is_empty();
        for (at, policy) in matching {
            let quota = match &policy.action {
                PolicyAction::Limit(quota) => quota,
                PolicyAction::Allow => {
                    record_decision(at, None, PolicyDecision::Exempt);
                    if policy.shadow {
                        continue;
                    }
                    break;
                }
                PolicyAction::Deny if policy.shadow => {
                    record_decision(at, None, PolicyDecision::ShadowRejected);
                    self.shadow_denials.push(&*policy.name);
                    continue;
                }
                PolicyAction::Deny => {
                    record_decision(at, None, PolicyDecision::Denied);
                    return Err(RequestOutcome::Denied {
                        policy: &policy.name,
                        reject: policy.reject_response.as_ref(),
                    });
                }
            };
            let selected = match descriptor {
                Some(descriptor) => {
                    quota.select_for_descriptor(&policy.name, descriptor, &table.client)
                }
                None => quota.select_for_request(&policy.name, facts, &table.client),
            };
            match selected {
                Ok(Some((key, limits))) => {
                    let block = quota.block.as_ref().filter(|_| !policy.shadow);
                    let (cost, estimate) =
                        (quota.cost.compute_units(facts), quota.cost.as_estimate());
                    let (counts_rejected, shards) = (quota.count_rejected, quota.shards);
                    let lease = quota.lease;
                    self.add_policy_charge(PolicyCharge {
                        policy_index: at,
                        policy,
                        key,
                        limits,
                        block,
                        cost,
                        estimate,
                        counts_rejected,
                        shards,
                        lease,
                    });
                }
                Ok(None) => {}
                Err(_) if policy.shadow => {
                    record_decision(at, None, PolicyDecision::ShadowRejected)
                }
                Err(fault) => {
                    record_decision(at, None, PolicyDecision::Denied);
                    return Err(RequestOutcome::InvalidKey {
                        policy: &policy.name,
                        fault,
                    });
                }
            }
        }
        Ok(is_matched)
    }

    /// Adds a policy charge. Several descriptors of a call may use one counter, which must be
    /// charged only once.
    pub(super) fn add_policy_charge(&mut self, policy_charge: PolicyCharge<'t>) {
        let existing = self
            .policy_charges
            .iter_mut()
            .find(|other| other.shares_counters_with(&policy_charge));
        match existing {
            Some(same) => same.merge(&policy_charge),
            None => self.policy_charges.push(policy_charge),
        }
    }

    /// Builds the charges in the order of the policies. `fixed_cost` is the cost at blocks and
    /// slots: 1, even for a request of cost 0, or 0 to only read them. `slot` is the id of the
    /// request's slot.
    pub(super) fn build_charges(&self, fixed_cost: u64, slot: u128) -> SmallVec<[Charge<'_>; 4]> {
        (0..)
            .zip(&self.policy_charges)
            .flat_map(|(group, policy_charge)| {
                let block = policy_charge.block.map(|block| (block, fixed_cost));
                // A request takes one slot, whatever its cost.
                let cost = |limit| {
                    if is_concurrency(limit) {
                        fixed_cost
                    } else {
                        policy_charge.cost
                    }
                };
                let limits = policy_charge
                    .limits
                    .iter()
                    .map(move |named| (&named.limit, cost(&named.limit)));
                block
                    .into_iter()
                    .chain(limits)
                    .map(move |(limit, cost)| Charge {
                        group,
                        shadow: policy_charge.policy.shadow,
                        counts_rejected: policy_charge.counts_rejected,
                        settles: policy_charge.estimate.is_some(),
                        slot_id: slot,
                        has_fallback: policy_charge.policy.on_store_failure
                            == OnStoreFailure::Local,
                        fails_closed: policy_charge.policy.on_store_failure
                            == OnStoreFailure::Closed,
                        shard_count: policy_charge.shards,
                        lease: policy_charge.lease,
                        ..Charge::new(limit, &policy_charge.key, cost)
                    })
            })
            .collect()
    }

    /// Reserves a slot for each concurrency limit.
    pub(super) fn reserve_slots(&self, slots: &ConcurrencySlots) -> Option<ConcurrencySlotGuard> {
        let counters = self.policy_charges.iter().flat_map(|policy_charge| {
            let limits = policy_charge
                .limits
                .iter()
                .filter(|named| is_concurrency(&named.limit));
            limits.map(|named| (named.limit, policy_charge.key.clone()))
        });
        let counters: SmallVec<[CounterRef; 1]> = counters.collect();
        (!counters.is_empty()).then(|| slots.reserve_slots(counters))
    }

    /// Keeps the slots that the store has granted, and sets the maximum duration of the request.
    pub(super) fn retain_taken_slots(
        &self,
        slot_guard: ConcurrencySlotGuard,
        charges: &[Charge<'_>],
        decision: &Decision,
    ) -> Option<ConcurrencySlotGuard> {
        let (taken, max_duration_us) = taken_slots(charges, decision);
        let mut slot_guard = slot_guard.retain_taken(|(limit, key)| {
            taken
                .iter()
                .any(|charge| *charge.limit == *limit && charge.key.id() == key.id())
        })?;
        slot_guard.set_end(max_duration_us.map(|us| Instant::now() + Duration::from_micros(us)));
        Some(slot_guard)
    }

    /// The charges made by estimate. A shadow policy that refused has charged nothing.
    pub(super) fn estimated_charges(
        &self,
        decision: &Decision,
        settlements: &SettlementQueue,
    ) -> Vec<EstimatedCharge> {
        let (mut estimates, mut next) = (Vec::new(), 0);
        for policy_charge in self.policy_charges.iter().filter(|_| decision.admitted) {
            let first = next + usize::from(policy_charge.block.is_some());
            let own = next..first + policy_charge.limits.len();
            next = own.end;
            let passes = |status: &Option<LimitStatus>| {
                status.is_some_and(|status| status.refusal.is_none())
            };
            let is_charged = decision
                .statuses
                .get(own)
                .is_some_and(|own| own.iter().all(passes));
            if let Some(cost) = policy_charge.estimate.filter(|_| is_charged) {
                // Without a time no units are credited.
                let at_us = |at: usize| {
                    decision
                        .charged_at_us
                        .get(at)
                        .copied()
                        .flatten()
                        .unwrap_or_default()
                };
                let limits = (first..).zip(policy_charge.limits.iter());
                let counters = limits
                    .filter(|(_, named)| !is_concurrency(&named.limit))
                    .map(|(at, named)| ((named.limit, policy_charge.key.clone()), at_us(at)))
                    .collect();
                estimates.push(EstimatedCharge::new(
                    Arc::clone(cost),
                    counters,
                    settlements.clone(),
                ));
            }
        }
        estimates
    }

    /// The enforced policies, in order.
    pub(super) fn enforced_policies(&self) -> impl Iterator<Item = &'t Policy> {
        self.policy_charges
            .iter()
            .map(|policy_charge| policy_charge.policy)
            .filter(|policy| !policy.shadow)
    }

    /// The first enforced policy with `on_store_failure = "closed"`.
    pub(super) fn first_closed_policy(&self) -> Option<&'t Policy> {
        self.enforced_policies()
            .find(|policy| policy.on_store_failure == OnStoreFailure::Closed)
    }
}

/// The charges that took slots, and the maximum duration of the request (µs), if it is bounded.
pub(super) fn taken_slots<'c, 'k>(
    charges: &'c [Charge<'k>],
    decision: &Decision,
) -> (SmallVec<[&'c Charge<'k>; 1]>, Option<u64>) {
    let is_refused =
        |status: &Option<LimitStatus>| status.is_none_or(|status| status.refusal.is_some());
    let is_policy_refused = |taken_charge: &Charge<'_>| {
        let mut policy_statuses = charges
            .iter()
            .zip(&decision.statuses)
            .filter(|(charge, _)| taken_charge.is_same_policy(charge));
        policy_statuses.any(|(_, status)| is_refused(status))
    };
    let mut max_duration_us = None;
    let taken = charges
        .iter()
        .filter(|charge| decision.admitted && is_concurrency(charge.limit));
    let taken: SmallVec<[&Charge<'_>; 1]> =
        taken.filter(|charge| !is_policy_refused(charge)).collect();
    for charge in taken.iter().filter(|charge| !charge.shadow) {
        if let Algorithm::Concurrency {
            max_duration_us: most_us @ 1..,
        } = charge.limit.algorithm
        {
            max_duration_us =
                Some(max_duration_us.map_or(most_us, |longest_us: u64| longest_us.min(most_us)));
        }
    }
    (taken, max_duration_us)
}

fn is_concurrency(limit: &Limit) -> bool {
    matches!(limit.algorithm, Algorithm::Concurrency { .. })
}
