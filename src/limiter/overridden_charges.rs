//! Charges under the overrides of their keys.

use super::{Charge, Decision, KeyOverride, Limit, LimitStatus, OverrideInEffect};
use smallvec::SmallVec;

/// The charges of a request of which some have an override, with the limits in effect.
#[derive(Debug)]
pub struct OverriddenCharges {
    charges: SmallVec<[(Limit, Option<OverrideInEffect>); 4]>,
    has_estimates: bool,
}

impl KeyOverride {
    /// The override for a charge. A block (`block_for`) has no amounts, but an unlimited key has no
    /// block.
    pub fn for_charge(&self, charge: &Charge<'_>) -> Option<OverrideInEffect> {
        let in_effect = self.for_limit(charge.dynamic?)?;
        let applies = !charge.is_block() || in_effect == OverrideInEffect::Unlimited;
        applies.then(|| in_effect.clamp_to(charge.limit))
    }
}

impl OverriddenCharges {
    /// Finds the overrides of charges. `None` if no charge has one.
    pub fn resolve(
        charges: &[Charge<'_>],
        mut find: impl FnMut(&Charge<'_>) -> Option<OverrideInEffect>,
    ) -> Option<Self> {
        let mut is_overridden = false;
        let has_estimates = charges.iter().any(|charge| charge.is_estimate);
        let charges = charges.iter().map(|charge| {
            let in_effect = charge.dynamic.and_then(|_| find(charge));
            is_overridden |= in_effect.is_some();
            (charge.limit.with_override(in_effect), in_effect)
        });
        let charges = charges.collect();
        is_overridden.then_some(Self {
            charges,
            has_estimates,
        })
    }

    /// The charges with their limits in effect, and their positions in the request. Charges of
    /// unlimited keys are left out.
    pub fn limited_charges<'c>(
        &'c self,
        charges: &[Charge<'c>],
    ) -> SmallVec<[(usize, Charge<'c>); 4]> {
        let numbered = charges.iter().zip(&self.charges).enumerate();
        let limited = numbered.filter(|(_, (_, (_, in_effect)))| {
            !in_effect.is_some_and(OverrideInEffect::is_unlimited)
        });
        limited
            .map(|(position, (charge, (limit, _)))| (position, Charge { limit, ..*charge }))
            .collect()
    }

    /// The decision about the whole request, from the one about
    /// [`OverriddenCharges::limited_charges`].
    pub fn complete_decision(&self, positions: &[usize], decision: Decision) -> Decision {
        let positions = positions.iter().copied();
        let mut decision = decision.expand_to_request(positions, self.charges.len());
        if !self.has_estimates {
            decision.charged_at_us.clear();
        }
        for (status, (_, in_effect)) in decision.statuses.iter_mut().zip(&self.charges) {
            match in_effect {
                Some(OverrideInEffect::Unlimited) => *status = Some(LimitStatus::UNLIMITED),
                in_effect => {
                    if let Some(status) = status {
                        status.in_effect = *in_effect;
                    }
                }
            }
        }
        decision
    }
}
