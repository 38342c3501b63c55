//! Divides a request with charges in several slots.

use crate::limiter::{PolicyCharges, RequestPart, each_charge};
use crate::store::redis::hash_slot::hash_slot_for_key;

/// The charges of one request that are in one slot.
pub(super) struct HashSlotPart {
    pub(super) hash_slot: u16,
    pub(super) part: RequestPart<'static>,
}

/// The charges marked as estimates, so that they can be credited later, and without a lease,
/// because units granted by one slot can't be revoked when another slot refuses. They outlive their
/// caller.
pub(super) fn to_creditable_charges(request: &[PolicyCharges<'_>]) -> Vec<PolicyCharges<'static>> {
    let policies = request.iter().map(|policy| PolicyCharges {
        requested_lease_units: 0,
        ..policy.to_owned_charges()
    });
    let creditable = policies.map(|policy| policy.map_limits(|charge| charge.is_estimate = true));
    creditable.collect()
}

impl HashSlotPart {
    /// Groups the charges of a request by slot.
    pub(super) fn from_request(request: &[PolicyCharges<'static>]) -> Vec<Self> {
        let slots = request
            .iter()
            .map(|policy| (hash_slot_for_key(&policy.key), ()));
        let slots = group_by_hash_slot(slots, |(hash_slot, ())| *hash_slot).into_iter();
        let parts = slots.map(|(hash_slot, _)| Self {
            hash_slot,
            part: RequestPart::new(request, |charge| {
                hash_slot_for_key(&charge.policy.key) == hash_slot
            }),
        });
        parts.collect()
    }

    /// Divides the charges into calls with one key each: the only ones that Redis accepts while the
    /// slot moves.
    pub(super) fn split_by_charge(&self, request: &[PolicyCharges<'static>]) -> Vec<Self> {
        let included = self.part.included().enumerate();
        let own = included.filter(|(_, is_included)| *is_included);
        let parts = own.map(|(selected, _)| {
            let mut positions = 0..;
            Self {
                hash_slot: self.hash_slot,
                part: RequestPart::new(request, |_| positions.next() == Some(selected)),
            }
        });
        parts.collect()
    }

    /// Whether the part is one charge.
    pub(super) fn is_one_charge(&self) -> bool {
        each_charge(&self.part.policies).count() == 1
    }

    /// Whether the slot counts as unreachable for this request.
    pub(super) fn is_held_back(&self) -> bool {
        self.part.policies.iter().any(|policy| policy.is_held_back)
    }

    fn enforced_policies(&self) -> impl Iterator<Item = &PolicyCharges<'static>> {
        self.part.policies.iter().filter(|policy| !policy.shadow)
    }

    /// Whether these charges can refuse the request.
    pub(super) fn has_enforced_charges(&self) -> bool {
        self.enforced_policies().next().is_some()
    }

    /// Whether the request is rejected if these charges can't be decided.
    pub(super) fn fails_closed(&self) -> bool {
        self.enforced_policies().any(|policy| policy.fails_closed)
    }

    /// Whether Redis must see the request although other charges may refuse it: to count a rejected
    /// request, or to start a block.
    pub(super) fn counts_refused_requests(&self) -> bool {
        self.enforced_policies().any(|policy| {
            let mut charges = policy.charges();
            policy.counts_rejected || charges.any(|charge| charge.is_read || charge.is_block())
        })
    }

    /// The smallest capacity of the enforced limits.
    pub(super) fn min_capacity(&self) -> u64 {
        let limits = self.enforced_policies().flat_map(PolicyCharges::charges);
        let capacities = limits.map(|charge| charge.limit.capacity());
        capacities.min().unwrap_or(u64::MAX)
    }
}

/// Groups items by their slot. Items of one slot stay in order.
pub(super) fn group_by_hash_slot<T>(
    items: impl Iterator<Item = T>,
    hash_slot_of: impl Fn(&T) -> u16,
) -> Vec<(u16, Vec<T>)> {
    let mut groups: Vec<(u16, Vec<T>)> = Vec::new();
    for item in items {
        let hash_slot = hash_slot_of(&item);
        match groups.iter_mut().find(|(other, _)| *other == hash_slot) {
            Some((_, group)) => group.push(item),
            None => groups.push((hash_slot, vec![item])),
        }
    }
    groups
}
