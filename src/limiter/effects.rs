//! The effects of a decision on the counters of its charges.

use super::{Charge, LeaseGrant, Refusal};
use smallvec::SmallVec;

/// The effect of a decision on the counter of a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChargeEffect {
    NoChange,
    /// The units are charged.
    Charge,
    /// The units of a rejected request are charged up to the capacity: the used units become
    /// max(before, min(capacity, before + cost)), with the newest units kept.
    ChargeRejected,
}

/// Determines the effect on the counter of the charge at `index`. `refusals` has the refusals of
/// all charges, read before any counter changed.
pub fn determine_effect(
    charges: &[Charge<'_>],
    refusals: &[Option<Refusal>],
    index: usize,
) -> ChargeEffect {
    let changes = |charge: &&Charge<'_>| charge.cost > 0 && !charge.is_counted;
    let Some(charge) = charges.get(index).filter(changes) else {
        return ChargeEffect::NoChange;
    };
    if charge.is_block() {
        let is_inactive = refusals.get(index).is_some_and(Option::is_none);
        return if is_inactive && has_reason_to_block(charge, charges, refusals) {
            ChargeEffect::Charge
        } else {
            ChargeEffect::NoChange
        };
    }
    let refusing = || {
        let limits = charges.iter().zip(refusals);
        limits.filter(|(other, refusal)| refusal.is_some() && !other.is_counted)
    };
    let is_policy_refused = || refusing().any(|(other, _)| charge.is_same_policy(other));
    let is_admitted = refusing().all(|(other, _)| other.shadow);
    if is_admitted && !(charge.shadow && is_policy_refused()) {
        return ChargeEffect::Charge;
    }
    if charge.counts_rejected && (is_admitted || !charge.shadow) && is_policy_refused() {
        ChargeEffect::ChargeRejected
    } else {
        ChargeEffect::NoChange
    }
}

/// Whether a limit of the policy is full, so that an inactive block starts. With response counters,
/// one of those must be full, too.
fn has_reason_to_block(
    block: &Charge<'_>,
    charges: &[Charge<'_>],
    refusals: &[Option<Refusal>],
) -> bool {
    let own = charges.iter().zip(refusals);
    let own = own.filter(|(other, _)| block.is_same_policy(other) && !other.is_block());
    let (counted, limits): (SmallVec<[_; 4]>, SmallVec<[_; 4]>) =
        own.partition(|(other, _)| other.is_counted);
    let is_full = |(_, refusal): &(&Charge<'_>, &Option<Refusal>)| {
        matches!(refusal, Some(Refusal::Until(_) | Refusal::Unknown))
    };
    limits.iter().any(is_full) && (counted.is_empty() || counted.iter().any(is_full))
}

/// Computes the grants for an admitted request, after its own units were charged. `grantable_units`
/// is [`super::CounterView::grantable_units`] for a charge's counter.
pub fn compute_lease_grants(
    charges: &[Charge<'_>],
    now_us: u64,
    grantable_units: impl Fn(&Charge<'_>, u64) -> Option<(u64, u64)>,
) -> SmallVec<[LeaseGrant; 1]> {
    let grant = |policy: &[Charge<'_>]| {
        let first = policy.first()?;
        let lease = first.requested_lease()?;
        let mut units = first.requested_lease_units;
        let mut until_us = now_us.saturating_add(lease.ttl_us.saturating_sub(1));
        for charge in policy {
            let (free, ends_us) = grantable_units(charge, until_us)?;
            (units, until_us) = (units.min(free / lease.divisor()), ends_us);
        }
        (units > 0).then_some(LeaseGrant {
            policy_number: first.policy_number,
            units,
            until_us,
        })
    };
    let policies = charges.chunk_by(Charge::is_same_policy);
    policies.filter_map(grant).collect()
}
