//! Divides a request with charges in several slots.

use super::slot_map::hash_slot_for_key;
use crate::limiter::{Charge, Key, Limit};
use smallvec::SmallVec;

/// The charges of one request that are in one slot.
pub(super) struct HashSlotCharges {
    pub(super) hash_slot: u16,
    pub(super) charges: SmallVec<[OwnedCharge; 2]>,
    /// The indexes of the charges in the request.
    pub(super) positions: SmallVec<[usize; 2]>,
}

/// An owned charge, which outlives its caller.
pub(super) struct OwnedCharge {
    limit: Limit,
    key: Key,
    cost: u64,
    policy_number: u32,
    shadow: bool,
    counts_rejected: bool,
    fails_closed: bool,
    slot_id: u128,
}

impl HashSlotCharges {
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
        let pairs = self.charges.into_iter().zip(self.positions);
        pairs.map(move |(charge, position)| Self {
            hash_slot,
            charges: SmallVec::from_iter([charge]),
            positions: SmallVec::from_iter([position]),
        })
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
        let mut enforced = self.enforced_charges();
        enforced.any(|charge| charge.counts_rejected || charge.to_creditable_charge().is_block())
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
    fn from_charge(charge: &Charge<'_>) -> Self {
        let Charge {
            limit,
            key,
            cost,
            policy_number,
            shadow,
            counts_rejected,
            fails_closed,
            slot_id,
            ..
        } = *charge;
        Self {
            limit: *limit,
            key: key.clone(),
            cost,
            policy_number,
            shadow,
            counts_rejected,
            fails_closed,
            slot_id,
        }
    }

    /// Returns the charge marked as an estimate, so that it can be credited later, and without a
    /// lease, because units granted by one slot can't be revoked when another slot refuses.
    fn to_creditable_charge(&self) -> Charge<'_> {
        Charge {
            policy_number: self.policy_number,
            shadow: self.shadow,
            counts_rejected: self.counts_rejected,
            is_estimate: true,
            slot_id: self.slot_id,
            ..Charge::new(&self.limit, &self.key, self.cost)
        }
    }
}

/// Groups the charges by slot.
pub(super) fn group_by_hash_slot(charges: &[Charge<'_>]) -> Vec<HashSlotCharges> {
    let mut hash_slots: Vec<HashSlotCharges> = Vec::new();
    for (position, charge) in charges.iter().enumerate() {
        let (hash_slot, charge) = (
            hash_slot_for_key(charge.key),
            OwnedCharge::from_charge(charge),
        );
        match hash_slots
            .iter_mut()
            .find(|part| part.hash_slot == hash_slot)
        {
            Some(part) => {
                part.charges.push(charge);
                part.positions.push(position);
            }
            None => hash_slots.push(HashSlotCharges {
                hash_slot,
                charges: SmallVec::from_iter([charge]),
                positions: SmallVec::from_iter([position]),
            }),
        }
    }
    hash_slots
}
