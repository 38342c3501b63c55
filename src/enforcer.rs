//! Rate limiting of one request: facts in, one verdict out.
//!
//! The policy table selects the limits, the store decides them. The verdict says whether to forward
//! the request, how to reject it, and which limits to report to the client.

mod active_policies;
mod dry_run;
mod estimated_charge;
mod explain;
mod rate_limit_call;
mod settlements;

pub use active_policies::{ActivePolicies, PolicySnapshot};
pub use dry_run::{DryRunOutcome, DryRunResult, PolicyOutcome, QuotaUsage, dry_run_request};
pub use estimated_charge::EstimatedCharge;
pub use explain::{PolicyExplanation, PolicyLimits, PolicyStep, explain_request};
pub use rate_limit_call::{CallVerdict, DescriptorVerdict};
pub use settlements::ConcurrencySlotGuard;

use settlements::{CounterRef, SettlementQueue};

use crate::limiter::{
    Algorithm, Charge, Decision, Key, Lease, Limit, LimitStatus, MAX_UNITS, Refusal,
};
use crate::policy::{
    Descriptor, EstimateCost, Facts, KeyFault, NamedLimit, OnStoreFailure, Policy, PolicyAction,
    PolicyTable, RejectResponse,
};
use crate::store::{Store, StoreUnavailable};
use crate::telemetry::metrics::{DecisionSource, PolicyDecision, WorkerMetrics};
use smallvec::SmallVec;
use std::mem::take;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Decides requests by the active policies and counts the decisions. Each worker has one.
#[derive(Clone, Debug)]
pub struct Enforcer {
    active_policies: ActivePolicies,
    store: Store,
    shard: Arc<WorkerMetrics>,
    settlements: SettlementQueue,
}

/// The decision about a request. Borrows the policy table that it was decided by.
#[derive(Debug)]
pub struct Verdict<'t> {
    pub outcome: RequestOutcome<'t>,
    /// Every enforced limit that applied, in the order of the policies; empty if none was decided.
    pub limits: SmallVec<[ReportedLimit<'t>; 4]>,
    /// The store's clock at the decision (µs since the epoch).
    pub now_us: u64,
    /// Time of the decision; `None` if the store was not charge_of_policy.
    pub decided_at: Option<Instant>,
    /// Source of the decision.
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

#[derive(Debug)]
pub enum RequestOutcome<'t> {
    Forward,
    /// A limit is exceeded: 429.
    Limited(LimitRejection<'t>),
    /// A policy with `action = "deny"` matched: 403.
    Denied {
        policy: &'t str,
        reject: Option<&'t RejectResponse>,
    },
    /// A policy cannot form its key: 400.
    InvalidKey {
        policy: &'t str,
        fault: KeyFault,
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
    pub reject: Option<&'t RejectResponse>,
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
pub struct ReportedLimit<'t> {
    pub limit: &'t NamedLimit,
    pub standing: LimitStatus,
    /// Key of the quota: [`Key::id`](crate::limiter::Key::id).
    pub key_id: u128,
}

impl ReportedLimit<'_> {
    /// The limit that refused, or the one with the fewest remaining units.
    pub fn find_tightest(limits: &[Self]) -> Option<&Self> {
        limits
            .iter()
            .min_by_key(|one| (one.standing.refusal.is_none(), one.standing.remaining))
    }
}

impl Enforcer {
    /// Counts in the worker's own `shard`.
    pub fn new(active_policies: ActivePolicies, store: Store, shard: Arc<WorkerMetrics>) -> Self {
        Self {
            active_policies,
            settlements: SettlementQueue::new(store.clone(), Arc::clone(&shard)),
            store,
            shard,
        }
    }

    /// The active policies. A request keeps the snapshot that it started with.
    pub fn policy_snapshot(&self) -> Arc<PolicySnapshot> {
        self.active_policies.load_snapshot()
    }

    /// Decides one request by `policies`. `arrived` is its arrival time.
    pub async fn decide<'t>(
        &self,
        policies: &'t PolicySnapshot,
        facts: &Facts<'_>,
        arrived: Instant,
    ) -> Verdict<'t> {
        let record_decision = |at, key: Option<&Key>, decision: PolicyDecision| {
            policies.record_decision(at, &self.shard, decision, (key, facts.target()))
        };
        let mut plan = match ChargePlan::from_facts(&policies.table, facts, record_decision) {
            Ok(plan) => plan,
            Err(outcome) => return Verdict::from_outcome(outcome),
        };
        self.decide_plan(&mut plan, record_decision, arrived).await
    }

    /// Decides a plan and leaves it empty. Takes `&mut` so that the plan is not stored twice in the
    /// future.
    async fn decide_plan<'t>(
        &self,
        plan: &mut ChargePlan<'t>,
        record_decision: impl Fn(usize, Option<&Key>, PolicyDecision) + Copy,
        arrived: Instant,
    ) -> Verdict<'t> {
        if plan.policy_charges.is_empty() {
            let shadow_rejected = take(&mut plan.shadow_denials);
            return Verdict {
                shadow_rejected,
                ..Verdict::from_outcome(RequestOutcome::Forward)
            };
        }
        // Reserved before the store is asked: if the request is cancelled, the guard releases slots
        // that the store may have taken.
        let slot_guard = plan.reserve_slots(&self.settlements);
        let charges = plan.build_charges(
            1,
            slot_guard.as_ref().map_or(0, ConcurrencySlotGuard::slot_id),
        );
        let answer = self.store.decide_with_source(&charges, arrived).await;
        let (mut verdict, source) = match answer {
            // Refused by the local share while an outage ends.
            Ok((decision, DecisionSource::Degraded)) => {
                drop(charges);
                plan.record_degraded_decisions(Some(&decision), record_decision);
                (
                    Verdict {
                        is_degraded: true,
                        ..take(plan).into_verdict(&decision)
                    },
                    DecisionSource::Degraded,
                )
            }
            Ok((decision, source)) => {
                let slot_guard = slot_guard.and_then(|slot_guard| {
                    plan.retain_taken_slots(slot_guard, &charges, &decision)
                });
                drop(charges);
                plan.record_decisions(&decision, record_decision);
                let estimated_charges = plan.estimated_charges(&decision, &self.settlements);
                (
                    Verdict {
                        slot_guard,
                        estimated_charges,
                        ..take(plan).into_verdict(&decision)
                    },
                    source,
                )
            }
            Err(unavailable) => {
                let fallback_decision = plan
                    .allows_fallback()
                    .then(|| self.store.decide_by_fallback(&charges))
                    .flatten();
                let slot_guard = slot_guard.and_then(|slot_guard| {
                    plan.retain_taken_slots(slot_guard, &charges, fallback_decision.as_ref()?)
                });
                drop(charges);
                plan.record_degraded_decisions(fallback_decision.as_ref(), record_decision);
                let to_estimated_charges = |fallback_decision| {
                    plan.estimated_charges(fallback_decision, &self.settlements)
                };
                let estimated_charges = fallback_decision
                    .as_ref()
                    .map(to_estimated_charges)
                    .unwrap_or_default();
                let verdict = take(plan).into_degraded(&unavailable, fallback_decision.as_ref());
                (
                    Verdict {
                        slot_guard,
                        estimated_charges,
                        ..verdict
                    },
                    DecisionSource::Degraded,
                )
            }
        };
        let at = Instant::now();
        self.shard
            .record_decision_time(source, at.saturating_duration_since(arrived));
        (verdict.decided_at, verdict.source) = (Some(at), Some(source));
        verdict
    }

    /// Waits, for a bounded time, until settlements and slot releases are sent, leases are
    /// returned, and the instance has left the membership.
    pub async fn shut_down(&self) {
        self.settlements.flush().await;
        self.store.shut_down().await;
    }
}

impl<'t> Verdict<'t> {
    /// A verdict without limits.
    fn from_outcome(outcome: RequestOutcome<'t>) -> Self {
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

/// The charges of one request.
#[derive(Default)]
struct ChargePlan<'t> {
    /// The inline capacity is small: the plan is moved with every request, and a policy charge is
    /// large.
    policy_charges: SmallVec<[PolicyCharge<'t>; 2]>,
    /// Shadow policies that would have denied the request.
    shadow_denials: SmallVec<[&'t str; 1]>,
}

/// The limits of one matching policy, for the request's key.
struct PolicyCharge<'t> {
    /// Index of the policy in the table.
    policy_index: usize,
    policy: &'t Policy,
    key: Key,
    limits: &'t [NamedLimit],
    /// Charged before the limits. A shadow policy has none, because it never blocks a request.
    block: Option<&'t Limit>,
    cost: u64,
    /// The cost is an estimate until the response reports the actual one.
    estimate: Option<&'t Arc<EstimateCost>>,
    counts_rejected: bool,
    shards: u16,
    lease: Option<Lease>,
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
    fn delays_requests(&self) -> bool {
        let is_leaky_bucket =
            |named: &NamedLimit| matches!(named.limit.algorithm, Algorithm::LeakyBucket { .. });
        self.limits.iter().any(is_leaky_bucket)
    }
}

impl<'t> ChargePlan<'t> {
    /// Evaluates the matching policies in order until one allows or denies the request. Limits
    /// before an allowing policy apply; a denied request charges nothing. A shadow policy ends
    /// nothing. Decisions of policies without limits are passed to `record_decision`.
    fn from_facts(
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
    fn add_matching_policies(
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
    fn add_policy_charge(&mut self, policy_charge: PolicyCharge<'t>) {
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
    fn build_charges(&self, fixed_cost: u64, slot: u128) -> SmallVec<[Charge<'_>; 4]> {
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
                        shard_count: policy_charge.shards,
                        lease: policy_charge.lease,
                        ..Charge::new(limit, &policy_charge.key, cost)
                    })
            })
            .collect()
    }

    /// Reserves a slot for each concurrency limit.
    fn reserve_slots(&self, settlements: &SettlementQueue) -> Option<ConcurrencySlotGuard> {
        let counters = self.policy_charges.iter().flat_map(|policy_charge| {
            let limits = policy_charge
                .limits
                .iter()
                .filter(|named| is_concurrency(&named.limit));
            limits.map(|named| (named.limit, policy_charge.key.clone()))
        });
        let counters: SmallVec<[CounterRef; 1]> = counters.collect();
        (!counters.is_empty()).then(|| settlements.reserve_slots(counters))
    }

    /// Keeps the slots that the store has granted, and sets the maximum duration of the request.
    fn retain_taken_slots(
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
    fn estimated_charges(
        &self,
        decision: &Decision,
        settlements: &SettlementQueue,
    ) -> Vec<EstimatedCharge> {
        let (mut estimates, mut next) = (Vec::new(), 0);
        for policy_charge in self.policy_charges.iter().filter(|_| decision.admitted) {
            let first = next + usize::from(policy_charge.block.is_some());
            let own = next..first + policy_charge.limits.len();
            next = own.end;
            let passes = |standing: &Option<LimitStatus>| {
                standing.is_some_and(|standing| standing.refusal.is_none())
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

    /// Builds the verdict from a decision with one status per charge.
    fn into_verdict(self, decision: &Decision) -> Verdict<'t> {
        let mut verdict = Verdict::from_outcome(RequestOutcome::Forward);
        verdict.now_us = decision.now_us;
        verdict.delay = Duration::from_micros(decision.delay_us);
        verdict.shadow_rejected = self.shadow_denials;
        let mut refusals = RefusalSummary::default();
        let mut standings = decision.statuses.iter();
        for policy_charge in &self.policy_charges {
            let block = policy_charge.block.and_then(|_| *standings.next()?);
            refusals.is_blocked |= block.is_some_and(|block| block.refusal.is_some());
            let blocked_until_us = block.and_then(|block| block.next_growth_us);
            for (limit, standing) in policy_charge.limits.iter().zip(&mut standings) {
                if policy_charge.policy.shadow {
                    let name = &*policy_charge.policy.name;
                    let refused = standing.is_some_and(|standing| standing.refusal.is_some());
                    if refused && verdict.shadow_rejected.last() != Some(&name) {
                        verdict.shadow_rejected.push(name);
                    }
                    continue;
                }
                let standing = match blocked_until_us {
                    Some(until_us) => Some(blocked_standing(*standing, until_us)),
                    None => *standing,
                };
                let Some(standing) = standing else { continue };
                verdict.limits.push(ReportedLimit {
                    limit,
                    standing,
                    key_id: policy_charge.key.id(),
                });
                if let Some(refusal) = standing.refusal {
                    refusals.add_refusal(policy_charge.policy, limit, refusal);
                }
            }
        }
        if let Some(limited) = refusals.into_rejection(decision.now_us) {
            verdict.outcome = RequestOutcome::Limited(limited);
        }
        verdict
    }

    /// The enforced policies, in order.
    fn enforced_policies(&self) -> impl Iterator<Item = &'t Policy> {
        self.policy_charges
            .iter()
            .map(|policy_charge| policy_charge.policy)
            .filter(|policy| !policy.shadow)
    }

    /// The first enforced policy with `on_store_failure = "closed"`.
    fn first_closed_policy(&self) -> Option<&'t Policy> {
        self.enforced_policies()
            .find(|policy| policy.on_store_failure == OnStoreFailure::Closed)
    }

    /// Whether a decision without the store has an effect.
    fn allows_fallback(&self) -> bool {
        let mut enforced = self.enforced_policies();
        self.first_closed_policy().is_none()
            && enforced.any(|policy| policy.on_store_failure == OnStoreFailure::Local)
    }

    /// Builds the verdict when the store is unavailable. One `closed` policy rejects the request;
    /// otherwise the decision of the `local` policies applies, if any.
    fn into_degraded(
        self,
        unavailable: &StoreUnavailable,
        fallback_decision: Option<&Decision>,
    ) -> Verdict<'t> {
        let is_degraded = self.enforced_policies().next().is_some();
        if let Some(policy) = self.first_closed_policy() {
            let outcome = RequestOutcome::Unavailable {
                policy: &policy.name,
                retry_after_us: unavailable.retry_after_us,
            };
            return Verdict {
                is_degraded,
                shadow_rejected: self.shadow_denials,
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
                shadow_rejected: self.shadow_denials,
                ..Verdict::from_outcome(RequestOutcome::Forward)
            },
        }
    }

    /// Records the decision of each policy. A policy without a known status, as in an answer of the
    /// deny cache, is not recorded.
    fn record_decisions(
        &self,
        decision: &Decision,
        mut count: impl FnMut(usize, Option<&Key>, PolicyDecision),
    ) {
        let mut standings = decision.statuses.iter();
        for policy_charge in &self.policy_charges {
            let block = policy_charge.block.and_then(|_| *standings.next()?);
            let blocked = block.is_some_and(|block| block.refusal.is_some());
            let (mut refused, mut known) = (false, true);
            for standing in standings.by_ref().take(policy_charge.limits.len()) {
                refused |= standing.is_some_and(|standing| standing.refusal.is_some());
                known &= standing.is_some();
            }
            let decision_label = match (refused, policy_charge.policy.shadow) {
                _ if blocked => PolicyDecision::Blocked,
                (true, true) => PolicyDecision::ShadowRejected,
                (true, false) => PolicyDecision::Rejected,
                (false, false) if decision.delay_us > 0 && policy_charge.delays_requests() => {
                    PolicyDecision::Delayed
                }
                (false, _) if known => PolicyDecision::Allowed,
                (false, _) => continue,
            };
            count(
                policy_charge.policy_index,
                Some(&policy_charge.key),
                decision_label,
            );
        }
    }

    /// Records the decision of each policy when the store is unavailable; `fallback_decision` is
    /// the one made without it.
    fn record_degraded_decisions(
        &self,
        fallback_decision: Option<&Decision>,
        record_decision: impl Fn(usize, Option<&Key>, PolicyDecision),
    ) {
        let mut standings = fallback_decision.map(|decision| decision.statuses.iter());
        for policy_charge in &self.policy_charges {
            let charges = policy_charge.limits.len() + usize::from(policy_charge.block.is_some());
            let own = standings
                .iter_mut()
                .flat_map(|standings| standings.by_ref().take(charges));
            // Counted, not searched: the iterator has to pass all statuses of this policy.
            let refused = own
                .flatten()
                .filter(|standing| standing.refusal.is_some())
                .count()
                > 0;
            let decision_label = match policy_charge.policy.on_store_failure {
                _ if policy_charge.policy.shadow => PolicyDecision::Degraded,
                OnStoreFailure::Open => PolicyDecision::DegradedOpen,
                OnStoreFailure::Closed => PolicyDecision::DegradedClosed,
                // Another policy is closed: nothing was decided.
                OnStoreFailure::Local if fallback_decision.is_none() => PolicyDecision::Degraded,
                OnStoreFailure::Local if refused => PolicyDecision::DegradedLocalRejected,
                OnStoreFailure::Local => PolicyDecision::DegradedLocalAllowed,
            };
            record_decision(
                policy_charge.policy_index,
                Some(&policy_charge.key),
                decision_label,
            );
        }
    }
}

/// The charges that took slots, and the maximum duration of the request (µs), if it is bounded.
fn taken_slots<'c, 'k>(
    charges: &'c [Charge<'k>],
    decision: &Decision,
) -> (SmallVec<[&'c Charge<'k>; 1]>, Option<u64>) {
    let is_refused =
        |standing: &Option<LimitStatus>| standing.is_none_or(|standing| standing.refusal.is_some());
    let is_policy_refused = |charge_of_policy: &Charge<'_>| {
        let mut policy_statuses = charges
            .iter()
            .zip(&decision.statuses)
            .filter(|(charge, _)| charge_of_policy.is_same_policy(charge));
        policy_statuses.any(|(_, standing)| is_refused(standing))
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

/// The reported status of a limit while a block holds: no units before the block ends.
fn blocked_standing(standing: Option<LimitStatus>, until_us: u64) -> LimitStatus {
    let grows_at_us = standing
        .and_then(|standing| standing.next_growth_us)
        .unwrap_or(0);
    let refusal = match standing.and_then(|standing| standing.refusal) {
        Some(Refusal::Never) => Refusal::Never,
        Some(Refusal::Until(at_us)) => Refusal::Until(at_us.max(until_us)),
        Some(Refusal::Unknown) | None => Refusal::Until(until_us),
    };
    LimitStatus {
        remaining: 0,
        next_growth_us: Some(grows_at_us.max(until_us)),
        refusal: Some(refusal),
    }
}

/// Collects refusals; the longest one determines the retry time.
#[derive(Default)]
struct RefusalSummary<'t> {
    longest_refusal: Option<(&'t Policy, Refusal)>,
    violated_limits: SmallVec<[&'t str; 2]>,
    is_blocked: bool,
}

impl<'t> RefusalSummary<'t> {
    fn add_refusal(&mut self, policy: &'t Policy, limit: &'t NamedLimit, refusal: Refusal) {
        self.violated_limits.push(&limit.name);
        if self
            .longest_refusal
            .is_none_or(|(_, longest)| refusal > longest)
        {
            self.longest_refusal = Some((policy, refusal));
        }
    }

    fn into_rejection(self, now_us: u64) -> Option<LimitRejection<'t>> {
        let (policy, refusal) = self.longest_refusal?;
        let retry = match refusal {
            Refusal::Until(at_us) => RetryHint::After(at_us.saturating_sub(now_us)),
            Refusal::Never => RetryHint::Never,
            Refusal::Unknown => RetryHint::Unknown,
        };
        Some(LimitRejection {
            policy: &policy.name,
            violated_limits: self.violated_limits,
            retry,
            is_blocked: self.is_blocked,
            reject: policy.reject_response.as_ref(),
        })
    }
}

#[cfg(test)]
mod tests;
