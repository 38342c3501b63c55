//! Charges under the overrides of their keys.

use super::{Charge, ChargePart, Decision, KeyOverride, Limit, LimitStatus, OverrideInEffect};
use smallvec::SmallVec;

/// The charges of a request of which some have an override, with the limits in effect.
#[derive(Debug)]
pub struct OverriddenCharges<'c> {
    charges: &'c [Charge<'c>],
    /// One per charge.
    limits: SmallVec<[OverriddenLimit; 4]>,
}

/// The limit of a charge with its override.
#[derive(Debug)]
struct OverriddenLimit {
    limit: Limit,
    in_effect: Option<OverrideInEffect>,
    /// When the override ends by itself (µs).
    ends_us: Option<u64>,
}

impl OverriddenLimit {
    fn is_unlimited(&self) -> bool {
        self.in_effect == Some(OverrideInEffect::Unlimited)
    }
}

impl KeyOverride {
    /// The override for a charge. A block (`block_for`) has no amounts, but an unlimited key has no
    /// block.
    pub fn for_charge(&self, charge: &Charge<'_>) -> Option<OverrideInEffect> {
        let name = charge.dynamic?;
        let in_effect = match self {
            Self::Unlimited => return Some(OverrideInEffect::Unlimited),
            _ if charge.is_block() => return None,
            Self::Blocked => OverrideInEffect::Blocked,
            Self::Limits(limits) => {
                let amounts = limits.iter().find(|amounts| *amounts.limit == **name)?;
                OverrideInEffect::Amounts {
                    requests: amounts.requests,
                    burst: amounts.burst.unwrap_or(amounts.requests),
                }
            }
        };
        Some(in_effect.clamp_to(charge.limit))
    }
}

impl<'c> OverriddenCharges<'c> {
    /// Finds the overrides of charges, and when they end by themselves (µs). `None` if no charge
    /// has one.
    pub fn resolve(
        charges: &'c [Charge<'c>],
        mut find: impl FnMut(&Charge<'_>) -> Option<(OverrideInEffect, Option<u64>)>,
    ) -> Option<Self> {
        let limits = charges.iter().map(|charge| {
            let (in_effect, ends_us) = charge.dynamic.and_then(|_| find(charge)).unzip();
            OverriddenLimit {
                limit: charge.limit.with_override(in_effect),
                in_effect,
                ends_us: ends_us.flatten(),
            }
        });
        let limits: SmallVec<[_; 4]> = limits.collect();
        let is_overridden = limits.iter().any(|limit| limit.in_effect.is_some());
        is_overridden.then_some(Self { charges, limits })
    }

    /// Decides the request. `decide` decides charges by their limits in effect. `read` reads the
    /// charges that the limits of the file decide after the end of an override.
    pub fn decide(
        &self,
        decide: impl FnOnce(&[Charge<'_>]) -> Decision,
        read: impl FnOnce(&[Charge<'_>]) -> Decision,
    ) -> Decision {
        let limited = self.limited_charges();
        let decision = decide(&limited.charges);
        let mut decision = self.complete_decision(&limited, decision);
        let late = self.charges_after_ends(&decision);
        if !late.charges.is_empty() {
            self.apply_ends(&mut decision, &late, read(&late.charges));
        }
        decision
    }

    /// The charges with their limits in effect, without those of unlimited keys.
    pub fn limited_charges(&self) -> ChargePart<'_> {
        let charges = self.charges.iter().zip(&self.limits);
        let charges =
            charges.map(|(charge, OverriddenLimit { limit, .. })| Charge { limit, ..*charge });
        let charges: SmallVec<[Charge<'_>; 4]> = charges.collect();
        let is_limited = self.limits.iter().map(|limit| !limit.is_unlimited());
        ChargePart::new(&charges, is_limited)
    }

    /// The decision about the whole request, from the one about `limited`, its
    /// [`OverriddenCharges::limited_charges`].
    pub fn complete_decision(&self, limited: &ChargePart<'_>, decision: Decision) -> Decision {
        let mut decision = limited.expand(decision);
        for (outcome, overridden) in decision.outcomes.iter_mut().zip(&self.limits) {
            if overridden.is_unlimited() {
                outcome.status = Some(LimitStatus::UNLIMITED);
            } else if let Some(status) = &mut outcome.status {
                status.in_effect = overridden.in_effect;
            }
        }
        decision
    }

    /// The charges whose statuses have times after the end of their override, to be read without
    /// it.
    pub fn charges_after_ends(&self, decision: &Decision) -> ChargePart<'c> {
        let reads = self.charges.iter();
        let reads: SmallVec<[Charge<'c>; 4]> = reads
            .map(|charge| charge.to_read().without_override())
            .collect();
        let outcomes = decision.outcomes.iter().zip(&self.limits);
        let is_late = outcomes.zip(&reads).map(|((outcome, limit), read)| {
            let (Some(status), Some(ends_us)) = (outcome.status, limit.ends_us) else {
                return false;
            };
            !read.is_block() && !status.is_unlimited() && status.has_times_after(ends_us)
        });
        ChargePart::new(&reads, is_late)
    }

    /// Corrects the times after the ends of overrides: from then on the limits apply as `later` has
    /// read them, the decision about `late`, the [`OverriddenCharges::charges_after_ends`].
    pub fn apply_ends(&self, decision: &mut Decision, late: &ChargePart<'_>, later: Decision) {
        let later = late.expand(later);
        let outcomes = decision.outcomes.iter_mut().zip(&later.outcomes);
        for ((outcome, read), limit) in outcomes.zip(&self.limits) {
            if let (Some(ends_us), Some(status), Some(read)) =
                (limit.ends_us, &mut outcome.status, read.status)
            {
                let read = read.convert_clock(later.now_us, decision.now_us);
                status.apply_override_end(ends_us, &read);
            }
        }
    }
}
