//! The cost of one request against one limit, and later corrections of it.

use super::{Algorithm, Key, Limit, LimitName};

/// A request's cost against one limit and one key.
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    pub limit: &'a Limit,
    pub key: &'a Key,
    /// Requested units, 0..=[`super::MAX_UNITS`].
    pub cost: u64,
    /// Number of the policy within the request. Charges of one policy are adjacent within a
    /// request.
    pub policy_number: u32,
    /// A shadow policy is charged only if every enforced charge and all its own charges are
    /// admitted. It never affects other policies.
    pub shadow: bool,
    /// The policy counts rejected requests: [`super::ChargeEffect::ChargeRejected`].
    pub counts_rejected: bool,
    /// The final cost is settled later: [`Amendment::Credit`].
    pub is_estimate: bool,
    /// The charge reads the response counter (`count_when` with `block_for`). Only settlements
    /// charge it. If it is full, a refusal by the policy starts the block.
    pub is_counted: bool,
    /// The slot that a charge of [`Algorithm::Concurrency`] takes: unique among all instances.
    pub slot_id: u128,
    /// While the store is unreachable, the policy is decided by this process.
    pub has_fallback: bool,
    /// While the store is unreachable, the policy rejects the request.
    pub fails_closed: bool,
    /// The server of the counter was unreachable when the local share was checked. Redis must not
    /// decide the charge, even if it can be reached now: it may lack charges of the key.
    pub is_held_back: bool,
    /// How many counters of a cluster share the limit ([`Limit::shard_limit`]). Other topologies
    /// use one counter and ignore it.
    pub shard_count: u16,
    /// How the policy leases units, if it does; the same for all charges of a policy.
    pub lease: Option<LeaseTerms>,
    /// Units to lease if the request is admitted; 0: none. The same for all charges of a policy.
    pub requested_lease_units: u64,
    /// The name of the limit if overrides in the store apply to the key (`dynamic`). A block has
    /// any name of its policy.
    pub dynamic: Option<&'a LimitName>,
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
    /// The request cost less than the charge at `at_us` ([`super::Decision::charged_at_us`]):
    /// returns those of the units that still count.
    Credit { units: u64, at_us: u64 },
    /// The request is in flight: renews its slot, or takes an expired slot again.
    Renew { slot: u128 },
    /// The request has ended: releases its slot.
    Release { slot: u128 },
}

impl<'a> Charge<'a> {
    /// Returns an enforced charge of the first policy.
    pub fn new(limit: &'a Limit, key: &'a Key, cost: u64) -> Self {
        Self {
            limit,
            key,
            cost,
            policy_number: 0,
            shadow: false,
            counts_rejected: false,
            is_estimate: false,
            is_counted: false,
            slot_id: 0,
            has_fallback: false,
            fails_closed: false,
            is_held_back: false,
            shard_count: 1,
            lease: None,
            requested_lease_units: 0,
            dynamic: None,
        }
    }

    /// The amendment that returns this charge, which was made under the time `at_us`.
    pub fn return_amendment(&self, at_us: u64) -> Amendment {
        match self.limit.algorithm {
            Algorithm::Concurrency { .. } => Amendment::Release { slot: self.slot_id },
            _ => Amendment::Credit {
                units: self.cost,
                at_us,
            },
        }
    }

    /// The lease terms, if this charge requests units in advance.
    pub fn requested_lease(&self) -> Option<LeaseTerms> {
        self.lease.filter(|_| self.requested_lease_units > 0)
    }

    /// Whether the counter is in the memory of this process, whatever the store is.
    pub fn is_instance_scoped(&self) -> bool {
        self.key.is_instance_scoped()
    }

    pub fn is_block(&self) -> bool {
        self.limit.algorithm == Algorithm::Block
    }

    /// Whether this charge, if refused, refuses the request.
    pub fn is_enforced(&self) -> bool {
        !self.shadow && !self.is_counted
    }

    /// Whether this charge can refuse the request, and for a known time.
    pub fn has_retry_time(&self) -> bool {
        self.is_enforced() && !matches!(self.limit.algorithm, Algorithm::Concurrency { .. })
    }

    /// The charge such that its counter is only read, with the refusal of its cost.
    #[must_use]
    pub fn to_read(self) -> Self {
        Self {
            is_counted: true,
            is_estimate: false,
            fails_closed: false,
            ..self
        }
    }

    #[must_use]
    pub fn without_override(self) -> Self {
        Self {
            dynamic: None,
            ..self
        }
    }

    /// Whether both charges belong to the same policy.
    pub fn is_same_policy(&self, other: &Self) -> bool {
        (self.policy_number, self.shadow) == (other.policy_number, other.shadow)
    }
}
