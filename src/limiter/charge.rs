//! The charges of one request: policies, each with its limits, and later corrections of them.

use super::{Algorithm, Key, Limit, LimitName};
use smallvec::{SmallVec, smallvec};
use std::borrow::Cow;
use std::sync::Arc;

/// What one policy charges for a request: units of its limits, for one key.
///
/// A request is a list of policies with different keys. All its enforced charges are made, or none.
#[derive(Clone, Debug)]
pub struct PolicyCharges<'a> {
    pub key: Cow<'a, Key>,
    /// The key of the response counters ([`LimitCharge::counts_responses`]), if there are any.
    pub response_key: Option<Arc<Key>>,
    /// A shadow policy is charged only if every enforced charge and all its own charges are
    /// admitted. It never affects other policies.
    pub shadow: bool,
    /// The policy counts rejected requests: [`super::ChargeEffect::ChargeRejected`].
    pub counts_rejected: bool,
    /// The slot that a charge of [`Algorithm::Concurrency`] takes: unique among all instances.
    pub slot_id: u128,
    /// While the store is unreachable, the policy is decided by this process.
    pub has_fallback: bool,
    /// While the store is unreachable, the policy rejects the request.
    pub fails_closed: bool,
    /// The server of the counters was unreachable when the local share was checked. Redis must not
    /// decide the policy, even if it can be reached now: it may lack charges of the key.
    pub is_held_back: bool,
    /// How many counters of a cluster share each limit ([`Limit::shard_limit`]). Other topologies
    /// use one counter and ignore it.
    pub shard_count: u16,
    /// How the policy leases units, if it does.
    pub lease: Option<LeaseTerms>,
    /// Units to lease if the request is admitted; 0: none.
    pub requested_lease_units: u64,
    /// The block of the policy, its limits, and its response counters, in this order.
    pub limits: SmallVec<[LimitCharge<'a>; 1]>,
}

/// The cost of a request against one limit of a policy.
#[derive(Clone, Debug)]
pub struct LimitCharge<'a> {
    pub limit: Limit,
    /// Requested units, 0..=[`super::MAX_UNITS`].
    pub cost: u64,
    /// The name of the limit if overrides in the store apply to the key (`dynamic`). A block has
    /// any name of its policy.
    pub name: Option<Cow<'a, LimitName>>,
    /// The final cost is settled later: [`Amendment::Credit`].
    pub is_estimate: bool,
    /// The decision only reads the counter, and the charge refuses nothing.
    pub is_read: bool,
    /// The charge reads the response counter (`count_when` with `block_for`). Only settlements
    /// charge it. If it is full, a refusal by the policy starts the block.
    pub counts_responses: bool,
}

/// One charge of a request: a [`LimitCharge`] with what it shares with the policy's other charges.
#[derive(Clone, Copy, Debug)]
pub struct Charge<'r, 'a> {
    pub policy: &'r PolicyCharges<'a>,
    /// The key of the counter.
    pub key: &'r Key,
    pub limit: &'r Limit,
    pub cost: u64,
    pub name: Option<&'r LimitName>,
    pub is_estimate: bool,
    pub is_read: bool,
}

/// A counter: the limit and the key that identify it.
#[derive(Clone, Copy, Debug)]
pub struct CounterRef<'a> {
    pub limit: &'a Limit,
    pub key: &'a Key,
}

/// How an instance takes units in advance, to admit requests without a call to the store.
///
/// Granted units count from the moment of the grant, and as if used at the last moment of the
/// lease. So no limit is exceeded, whenever the units are used during the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeaseTerms {
    /// Maximum leased units that are not used yet, at least 1. `None`: by the rate of requests, and
    /// at most one in [`AUTO_LEASE_DIVISOR`] of the free units.
    pub size: Option<u64>,
    /// How long the units may be used, in microseconds: at least 1 and at most half of the policy's
    /// shortest period.
    pub ttl_us: u64,
}

impl LeaseTerms {
    /// The divisor of the free units for one grant.
    pub fn divisor(&self) -> u64 {
        self.size.map_or(AUTO_LEASE_DIVISOR, |_| 1)
    }
}

/// The divisor of the free units for one grant of automatic size. Near the limit no units are
/// granted, and the store decides each request exactly.
const AUTO_LEASE_DIVISOR: u64 = 4;

/// A change of a counter after the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Amendment {
    /// The request cost more: charges further units now, even beyond the capacity.
    Charge(u64),
    /// Charges units that were used `age_us` ago without the store. The charge is recorded at that
    /// age, but not before the newest charge, because a state can't insert earlier ones.
    BackdatedCharge { units: u64, age_us: u64 },
    /// The request cost less than the charge at `at_us` ([`super::ChargeOutcome::charged_at_us`]):
    /// returns those of the units that still count.
    Credit { units: u64, at_us: u64 },
    /// The request is in flight: renews its slot, or takes an expired slot again.
    Renew { slot: u128 },
    /// The request has ended: releases its slot.
    Release { slot: u128 },
}

impl<'a> PolicyCharges<'a> {
    /// The charge of an enforced policy with one limit.
    pub fn new(limit: &Limit, key: &'a Key, cost: u64) -> Self {
        Self::with_limits(Cow::Borrowed(key), smallvec![LimitCharge::new(limit, cost)])
    }

    /// The charges of an enforced policy.
    pub fn with_limits(key: Cow<'a, Key>, limits: SmallVec<[LimitCharge<'a>; 1]>) -> Self {
        Self {
            key,
            response_key: None,
            shadow: false,
            counts_rejected: false,
            slot_id: 0,
            has_fallback: false,
            fails_closed: false,
            is_held_back: false,
            shard_count: 1,
            lease: None,
            requested_lease_units: 0,
            limits,
        }
    }

    /// The charges, in the order of [`PolicyCharges::limits`].
    pub fn charges(&self) -> impl Iterator<Item = Charge<'_, 'a>> + Clone {
        self.limits.iter().map(|limit| Charge {
            policy: self,
            key: match &self.response_key {
                Some(key) if limit.counts_responses => key,
                _ => &self.key,
            },
            limit: &limit.limit,
            cost: limit.cost,
            name: limit.name.as_deref(),
            is_estimate: limit.is_estimate,
            is_read: limit.is_read,
        })
    }

    /// A copy whose charges are changed.
    #[must_use]
    pub fn map_limits(&self, change: impl FnMut(&mut LimitCharge<'a>)) -> Self {
        let mut mapped = self.clone();
        mapped.limits.iter_mut().for_each(change);
        mapped
    }

    /// A copy that only reads the counters, with the refusals of its costs.
    #[must_use]
    pub fn to_read(&self) -> Self {
        let read = self.map_limits(|limit| (limit.is_read, limit.is_estimate) = (true, false));
        Self {
            fails_closed: false,
            ..read
        }
    }

    /// A copy that outlives its caller.
    pub fn to_owned_charges(&self) -> PolicyCharges<'static> {
        let limits = self.limits.iter().map(|charge| LimitCharge {
            name: charge.name.as_deref().cloned().map(Cow::Owned),
            limit: charge.limit,
            cost: charge.cost,
            is_estimate: charge.is_estimate,
            is_read: charge.is_read,
            counts_responses: charge.counts_responses,
        });
        PolicyCharges {
            key: Cow::Owned(self.key.as_ref().clone()),
            response_key: self.response_key.clone(),
            shadow: self.shadow,
            counts_rejected: self.counts_rejected,
            slot_id: self.slot_id,
            has_fallback: self.has_fallback,
            fails_closed: self.fails_closed,
            is_held_back: self.is_held_back,
            shard_count: self.shard_count,
            lease: self.lease,
            requested_lease_units: self.requested_lease_units,
            limits: limits.collect(),
        }
    }

    /// The lease terms, if the policy requests units in advance.
    pub fn requested_lease(&self) -> Option<LeaseTerms> {
        self.lease.filter(|_| self.requested_lease_units > 0)
    }
}

impl LimitCharge<'_> {
    pub fn new(limit: &Limit, cost: u64) -> Self {
        Self {
            limit: *limit,
            cost,
            name: None,
            is_estimate: false,
            is_read: false,
            counts_responses: false,
        }
    }

    pub fn is_block(&self) -> bool {
        self.limit.algorithm == Algorithm::Block
    }
}

/// All charges of a request, in order.
pub fn each_charge<'r, 'a>(
    request: &'r [PolicyCharges<'a>],
) -> impl Iterator<Item = Charge<'r, 'a>> + Clone {
    request.iter().flat_map(PolicyCharges::charges)
}

impl<'r> Charge<'r, '_> {
    pub fn counter(&self) -> CounterRef<'r> {
        CounterRef {
            limit: self.limit,
            key: self.key,
        }
    }

    /// The amendment that returns this charge, which was made under the time `at_us`.
    pub fn return_amendment(&self, at_us: u64) -> Amendment {
        if self.limit.algorithm.counts_slots() {
            let slot = self.policy.slot_id;
            return Amendment::Release { slot };
        }
        let units = self.cost;
        Amendment::Credit { units, at_us }
    }

    pub fn is_block(&self) -> bool {
        self.limit.algorithm == Algorithm::Block
    }

    /// Whether this charge, if refused, refuses the request.
    pub fn is_enforced(&self) -> bool {
        !self.policy.shadow && !self.is_read
    }

    /// Whether this charge can refuse the request, and for a known time.
    pub fn has_retry_time(&self) -> bool {
        self.is_enforced() && !self.limit.algorithm.counts_slots()
    }
}

#[cfg(test)]
mod test_builders {
    use super::{LimitCharge, PolicyCharges};
    use crate::limiter::{ChargeOutcome, Decision, Limit, PolicyOutcome};
    use smallvec::smallvec;

    impl PolicyCharges<'_> {
        pub fn with_cost(&self, cost: u64) -> Self {
            self.map_limits(|charge| charge.cost = cost)
        }

        pub fn with_limit(&self, limit: &Limit) -> Self {
            self.map_limits(|charge| charge.limit = *limit)
        }

        pub fn with_estimate(&self) -> Self {
            self.map_limits(|charge| charge.is_estimate = true)
        }

        pub fn and_limit(mut self, limit: &Limit, cost: u64) -> Self {
            self.limits.push(LimitCharge::new(limit, cost));
            self
        }
    }

    impl Decision {
        /// A decision about policies with one limit each.
        pub fn with_outcomes(self, outcomes: impl IntoIterator<Item = ChargeOutcome>) -> Self {
            let policies = outcomes.into_iter().map(|outcome| PolicyOutcome {
                limits: smallvec![outcome],
                grant: None,
            });
            Self {
                policies: policies.collect(),
                ..self
            }
        }
    }
}
