//! Divides a request with charges in several slots.

use crate::limiter::{Charge, Key, Limit, LimitName};
use crate::store::redis::hash_slot::hash_slot_for_key;
use smallvec::SmallVec;

/// The charges of one request that are in one slot.
pub(super) struct HashSlotCharges {
    pub(super) hash_slot: u16,
    pub(super) charges: Vec<OwnedCharge>,
}

/// An owned charge, which outlives its caller.
pub(super) struct OwnedCharge {
    /// The index of the charge in the request.
    pub(super) position: usize,
    limit: Limit,
    key: Key,
    cost: u64,
    policy_number: u32,
    shadow: bool,
    counts_rejected: bool,
    is_counted: bool,
    fails_closed: bool,
    is_held_back: bool,
    slot_id: u128,
    dynamic: Option<LimitName>,
}

impl HashSlotCharges {
    /// Groups the charges of a request by slot.
    pub(super) fn from_request(charges: &[Charge<'_>]) -> Vec<Self> {
        let owned = charges.iter().enumerate();
        let owned = owned.map(|(position, charge)| OwnedCharge::from_charge(position, charge));
        group_by_hash_slot(owned, |charge| hash_slot_for_key(&charge.key))
            .into_iter()
            .map(|(hash_slot, charges)| Self { hash_slot, charges })
            .collect()
    }

    pub(super) fn to_creditable_charges(&self) -> SmallVec<[Charge<'_>; 4]> {
        self.charges
            .iter()
            .map(OwnedCharge::to_creditable_charge)
            .collect()
    }

    /// Divides the charges into calls with one key each: the only ones that Redis accepts while the
    /// slot moves.
    pub(super) fn split_by_charge(self) -> impl Iterator<Item = Self> {
        let hash_slot = self.hash_slot;
        self.charges.into_iter().map(move |charge| Self {
            hash_slot,
            charges: vec![charge],
        })
    }

    /// Whether the slot counts as unreachable for this request.
    pub(super) fn is_held_back(&self) -> bool {
        self.charges.iter().any(|charge| charge.is_held_back)
    }

    fn enforced_charges(&self) -> impl Iterator<Item = &OwnedCharge> {
        self.charges.iter().filter(|charge| !charge.shadow)
    }

    /// Whether these charges can refuse the request.
    pub(super) fn has_enforced_charges(&self) -> bool {
        self.enforced_charges().next().is_some()
    }

    /// Whether the request is rejected if these charges can't be decided.
    pub(super) fn fails_closed(&self) -> bool {
        self.enforced_charges().any(|charge| charge.fails_closed)
    }

    /// Whether Redis must see the request although other charges may refuse it: to count a rejected
    /// request, or to start a block.
    pub(super) fn counts_refused_requests(&self) -> bool {
        self.enforced_charges().any(|charge| {
            charge.counts_rejected || charge.is_counted || charge.to_creditable_charge().is_block()
        })
    }

    /// The smallest capacity of the enforced limits.
    pub(super) fn min_capacity(&self) -> u64 {
        let capacities = self
            .enforced_charges()
            .map(|charge| charge.limit.capacity());
        capacities.min().unwrap_or(u64::MAX)
    }
}

impl OwnedCharge {
    fn from_charge(position: usize, charge: &Charge<'_>) -> Self {
        Self {
            position,
            limit: *charge.limit,
            key: charge.key.clone(),
            cost: charge.cost,
            policy_number: charge.policy_number,
            shadow: charge.shadow,
            counts_rejected: charge.counts_rejected,
            is_counted: charge.is_counted,
            fails_closed: charge.fails_closed,
            is_held_back: charge.is_held_back,
            slot_id: charge.slot_id,
            dynamic: charge.dynamic.cloned(),
        }
    }

    /// Returns the charge marked as an estimate, so that it can be credited later, and without a
    /// lease, because units granted by one slot can't be revoked when another slot refuses.
    pub(super) fn to_creditable_charge(&self) -> Charge<'_> {
        Charge {
            policy_number: self.policy_number,
            shadow: self.shadow,
            counts_rejected: self.counts_rejected,
            is_estimate: true,
            is_counted: self.is_counted,
            slot_id: self.slot_id,
            dynamic: self.dynamic.as_ref(),
            ..Charge::new(&self.limit, &self.key, self.cost)
        }
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
