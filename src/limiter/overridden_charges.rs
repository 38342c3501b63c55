//! Charges under the overrides of their keys.

use super::{Charge, Decision, KeyOverride, Limit, LimitStatus, OverrideInEffect};
use smallvec::SmallVec;

/// The charges of a request of which some have an override, with the limits in effect.
#[derive(Debug)]
pub struct OverriddenCharges {
    charges: SmallVec<[OverriddenCharge; 4]>,
    has_estimates: bool,
}

/// The limit of a charge with its override.
#[derive(Debug)]
struct OverriddenCharge {
    limit: Limit,
    in_effect: Option<OverrideInEffect>,
    /// When the override ends by itself (µs).
    ends_us: Option<u64>,
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
    /// Finds the overrides of charges, and when they end by themselves (µs). `None` if no charge
    /// has one.
    pub fn resolve(
        charges: &[Charge<'_>],
        mut find: impl FnMut(&Charge<'_>) -> Option<(OverrideInEffect, Option<u64>)>,
    ) -> Option<Self> {
        let mut is_overridden = false;
        let has_estimates = charges.iter().any(|charge| charge.is_estimate);
        let charges = charges.iter().map(|charge| {
            let (in_effect, ends_us) = charge.dynamic.and_then(|_| find(charge)).unzip();
            is_overridden |= in_effect.is_some();
            OverriddenCharge {
                limit: charge.limit.with_override(in_effect),
                in_effect,
                ends_us: ends_us.flatten(),
            }
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
        let limited = numbered.filter(|(_, (_, overridden))| {
            !(overridden.in_effect).is_some_and(OverrideInEffect::is_unlimited)
        });
        limited
            .map(|(position, (charge, OverriddenCharge { limit, .. }))| {
                (position, Charge { limit, ..*charge })
            })
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
        for (status, overridden) in decision.statuses.iter_mut().zip(&self.charges) {
            match overridden.in_effect {
                Some(OverrideInEffect::Unlimited) => *status = Some(LimitStatus::UNLIMITED),
                in_effect => {
                    if let Some(status) = status {
                        status.in_effect = in_effect;
                    }
                }
            }
        }
        decision
    }

    /// The charges whose statuses have times after the end of their override, with their positions,
    /// to be read without it. `charges` are those of the request.
    pub fn charges_after_ends<'c>(
        &self,
        decision: &Decision,
        charges: &[Charge<'c>],
    ) -> SmallVec<[(usize, Charge<'c>); 4]> {
        let statuses = decision.statuses.iter().zip(&self.charges).enumerate();
        let late = statuses.filter_map(|(position, (status, overridden))| {
            let ends_us = overridden.ends_us?;
            let charge = charges.get(position)?;
            let is_limited = !charge.is_block() && !status.as_ref()?.is_unlimited();
            let is_late = is_limited && status.as_ref()?.has_times_after(ends_us);
            is_late.then(|| (position, charge.to_read().without_override()))
        });
        late.collect()
    }

    /// Corrects the times after the ends of overrides: from then on the limits apply as `later` has
    /// read them, the decision about [`OverriddenCharges::charges_after_ends`].
    pub fn apply_ends(
        &self,
        decision: &mut Decision,
        reads: &[(usize, Charge<'_>)],
        later: &Decision,
    ) {
        for ((position, _), read) in reads.iter().zip(&later.statuses) {
            let ends_us = self
                .charges
                .get(*position)
                .and_then(|charge| charge.ends_us);
            let status = decision
                .statuses
                .get_mut(*position)
                .and_then(Option::as_mut);
            if let (Some(ends_us), Some(status), Some(read)) = (ends_us, status, read) {
                let read = read.convert_clock(later.now_us, decision.now_us);
                status.apply_override_end(ends_us, &read);
            }
        }
    }
}
