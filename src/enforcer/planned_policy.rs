//! The charges of one policy for one request.

use super::StreamSlices;
use crate::limiter::{
    Algorithm, ChargeOutcome, Key, LeaseTerms, Limit, LimitCharge, LimitStatus, PolicyCharges,
    PolicyOutcome,
};
use crate::policy::{
    ClientQuota, EstimateCost, FactorsOfRequest, Facts, NamedLimit, OnStoreFailure, SlotRelease,
};
use crate::store::{LimitAndKey, Store};
use std::borrow::Cow;
use std::sync::Arc;

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

/// An estimate that the response settles.
#[derive(Clone)]
pub(super) struct PlannedEstimate<'t> {
    pub cost: &'t Arc<EstimateCost>,
    pub factors: Box<FactorsOfRequest>,
    /// The least units that a reported cost counts: the cost of another policy of the same counter.
    pub least: u64,
}

/// The charges of one matching policy, for the request's key.
pub(super) struct PlannedPolicy<'t> {
    pub own: ClientQuota<'t>,
    /// The block of the policy, charged before the limits. A shadow policy has none, because it
    /// never blocks a request.
    pub block: Option<&'t Limit>,
    pub cost: u64,
    /// The cost is an estimate until the response reports the actual one.
    pub estimate: Option<PlannedEstimate<'t>>,
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
            estimate: quota.cost.as_estimate().map(|cost| PlannedEstimate {
                cost,
                factors: Box::new(cost.actual.factors_for(facts)),
                least: 0,
            }),
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
    /// limits decides, and no reported cost is less than the cost of the other. (Equal descriptors
    /// can carry different limits, too.)
    pub(super) fn merge(&mut self, mut other: PlannedPolicy<'t>, cost: u64) {
        let fixed = [&*self, &other].map(|one| match one.estimate {
            Some(_) => 0,
            None => one.cost,
        });
        let estimate = self.estimate.take().or(other.estimate.take());
        let estimate = estimate.map(|estimate| PlannedEstimate {
            least: fixed.into_iter().fold(estimate.least, u64::max),
            ..estimate
        });
        let mut pairs = self.own.limits.iter().zip(other.own.limits).enumerate();
        if pairs.any(|(index, (own, others))| {
            let other_limit = other.limit_at(index, others);
            other_limit.is_tighter_than(self.limit_at(index, own))
        }) {
            *self = other;
        }
        (self.cost, self.estimate) = (cost, estimate);
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

    /// The further charges of a response that is cut off when nothing is left.
    pub(super) fn stream_slices(&self, store: &Store) -> Option<StreamSlices> {
        let estimate = self.estimate.as_ref();
        let cut_off = estimate.and_then(|estimate| estimate.cost.cut_off);
        let cut_off = cut_off.filter(|_| self.own.mode.is_enforced())?;
        let mut charges = self.charges(0, 0);
        charges.counts_rejected = false;
        charges.limits.retain(|charge| {
            let counts_slots = charge.limit.algorithm.counts_slots();
            !charge.is_block() && !charge.counts_responses && !counts_slots
        });
        let policy = self.own.policy;
        Some(StreamSlices {
            store: store.clone(),
            charges: charges.to_owned_charges(),
            reported_policy: policy.is_reported.then(|| policy.name.clone()),
            size: cut_off.slice,
            taken: Vec::new(),
        })
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
