//! The effects of a decision on the counters of its charges.

use super::{Charge, LeaseGrant, PolicyCharges, Refusal};
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

/// What the refusals of a policy's charges mean for its counters.
#[derive(Clone, Copy, Default)]
struct PolicyRefusals {
    /// Whether the policy refuses the request, or would if it were enforced.
    is_refusing: bool,
    /// Whether one of its limits is full.
    is_full: bool,
    /// Whether one of its response counters is full; `None` without any.
    is_response_counter_full: Option<bool>,
}

impl PolicyRefusals {
    /// The effect on a charge of the policy, whose own refusal is `refusal`. `is_admitted`: no
    /// enforced charge is refused.
    fn determine_effect(
        self,
        charge: &Charge<'_, '_>,
        refusal: Option<Refusal>,
        is_admitted: bool,
    ) -> ChargeEffect {
        let is_shadow = charge.policy.shadow;
        if charge.cost == 0 || charge.is_read {
            return ChargeEffect::NoChange;
        }
        if charge.is_block() {
            // An inactive block starts when a limit is full, and with response counters when one of
            // those is full, too.
            let starts =
                refusal.is_none() && self.is_full && self.is_response_counter_full != Some(false);
            return if starts {
                ChargeEffect::Charge
            } else {
                ChargeEffect::NoChange
            };
        }
        if is_admitted && !(is_shadow && self.is_refusing) {
            return ChargeEffect::Charge;
        }
        let counts_rejected = charge.policy.counts_rejected && (is_admitted || !is_shadow);
        if counts_rejected && self.is_refusing {
            ChargeEffect::ChargeRejected
        } else {
            ChargeEffect::NoChange
        }
    }
}

/// Determines the effects on the counters of all charges, in order. `refusals` has those of all
/// charges, read before any counter changed.
pub fn determine_effects(
    request: &[PolicyCharges<'_>],
    refusals: &[Option<Refusal>],
) -> SmallVec<[ChargeEffect; 4]> {
    let mut read = refusals.iter();
    let by_policy = request.iter().map(|policy| {
        let mut own = PolicyRefusals::default();
        for (charge, refusal) in policy.charges().zip(read.by_ref()) {
            let is_full = matches!(refusal, Some(Refusal::Until(_) | Refusal::Unknown));
            if charge.is_read {
                *own.is_response_counter_full.get_or_insert(false) |= is_full;
            } else {
                own.is_refusing |= refusal.is_some();
                own.is_full |= is_full && !charge.is_block();
            }
        }
        own
    });
    let by_policy: SmallVec<[PolicyRefusals; 2]> = by_policy.collect();
    let mut policies = request.iter().zip(&by_policy);
    let is_admitted = policies.all(|(policy, own)| policy.shadow || !own.is_refusing);
    let mut read = refusals.iter();
    let mut effects = SmallVec::new();
    for (policy, own) in request.iter().zip(by_policy) {
        for (charge, refusal) in policy.charges().zip(read.by_ref()) {
            effects.push(own.determine_effect(&charge, *refusal, is_admitted));
        }
    }
    effects
}

/// Computes the grant for a policy of an admitted request, after its own units were charged.
/// `grantable_units` is [`super::CounterView::grantable_units`] for a charge's counter.
pub fn compute_lease_grant(
    policy: &PolicyCharges<'_>,
    now_us: u64,
    grantable_units: impl Fn(&Charge<'_, '_>, u64) -> Option<(u64, u64)>,
) -> Option<LeaseGrant> {
    let lease = policy.requested_lease()?;
    let mut units = policy.requested_lease_units;
    let mut until_us = now_us.saturating_add(lease.ttl_us.saturating_sub(1));
    for charge in policy.charges() {
        let (free, ends_us) = grantable_units(&charge, until_us)?;
        (units, until_us) = (units.min(free / lease.divisor()), ends_us);
    }
    (units > 0).then_some(LeaseGrant { units, until_us })
}
