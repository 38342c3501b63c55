//! Overrides of single keys, stored beside the counters, which change without a reload (`dynamic`).

use super::{Algorithm, Charge, Decision, Limit, LimitStatus, MAX_UNITS};
use smallvec::SmallVec;
use std::sync::Arc;

/// What applies to a key instead of the limits of its policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyOverride {
    /// Every request is admitted, and nothing is charged.
    Unlimited,
    /// Every request is refused.
    Blocked,
    /// Other amounts for some of the limits, by name, never empty.
    Limits(Vec<LimitAmounts>),
}

/// The amounts of one limit in an override.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitAmounts {
    /// The name of the limit.
    pub limit: Box<str>,
    pub requests: u64,
    /// The burst of a token bucket; `None`: as `requests`.
    pub burst: Option<u64>,
}

/// The override by which a store decided one charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverrideInEffect {
    Unlimited,
    Blocked,
    /// `burst` counts only for a token bucket.
    Amounts {
        requests: u64,
        burst: u64,
    },
}

/// The charges of a request of which some have an override, with the limits in effect.
#[derive(Debug)]
pub struct OverriddenCharges {
    charges: SmallVec<[(Limit, Option<OverrideInEffect>); 4]>,
    has_estimates: bool,
}

impl KeyOverride {
    /// The override for the limit of this name, if it has one.
    pub fn for_limit(&self, name: &str) -> Option<OverrideInEffect> {
        match self {
            Self::Unlimited => Some(OverrideInEffect::Unlimited),
            Self::Blocked => Some(OverrideInEffect::Blocked),
            Self::Limits(limits) => {
                let amounts = limits.iter().find(|amounts| *amounts.limit == *name)?;
                Some(OverrideInEffect::Amounts {
                    requests: amounts.requests,
                    burst: amounts.burst.unwrap_or(amounts.requests),
                })
            }
        }
    }

    /// The override for a charge. A block (`block_for`) has no amounts, but an unlimited key has no
    /// block.
    pub fn for_charge(&self, charge: &Charge<'_>) -> Option<OverrideInEffect> {
        let in_effect = self.for_limit(charge.dynamic?)?;
        let applies = !charge.is_block() || in_effect == OverrideInEffect::Unlimited;
        applies.then(|| in_effect.clamp_to(charge.limit))
    }
}

impl OverrideInEffect {
    pub fn is_unlimited(self) -> bool {
        self == Self::Unlimited
    }

    /// Amounts that the algorithm computes exactly: larger ones become [`Limit::max_amount`].
    #[must_use]
    pub fn clamp_to(self, limit: &Limit) -> Self {
        match self {
            Self::Amounts { requests, burst } => {
                let max_amount = limit.max_amount();
                Self::Amounts {
                    requests: requests.min(max_amount),
                    burst: burst.min(max_amount),
                }
            }
            other => other,
        }
    }
}

impl Limit {
    /// The largest `requests` and burst with which the algorithm is exact.
    pub fn max_amount(&self) -> u64 {
        let per_us = self.per_us.max(1);
        match self.algorithm {
            Algorithm::TokenBucket { .. } => MAX_UNITS / per_us,
            Algorithm::LeakyBucket {
                max_delay_us: max_delay_us @ 1..,
            } => MAX_UNITS.saturating_sub(per_us) / max_delay_us,
            _ => MAX_UNITS,
        }
    }

    /// The limit with the amounts of an override. A blocked limit has no units. An unlimited one
    /// stays as it is: it is not charged.
    #[must_use]
    pub fn with_override(&self, in_effect: Option<OverrideInEffect>) -> Self {
        let (requests, new_burst) = match in_effect {
            None | Some(OverrideInEffect::Unlimited) => return *self,
            Some(OverrideInEffect::Blocked) => {
                return Self {
                    requests: 0,
                    ..*self
                };
            }
            Some(OverrideInEffect::Amounts { requests, burst }) => (requests, burst),
        };
        let algorithm = match self.algorithm {
            Algorithm::Block => return *self,
            Algorithm::TokenBucket { warm_up_us, .. } => Algorithm::TokenBucket {
                burst: new_burst,
                warm_up_us,
            },
            algorithm => algorithm,
        };
        Self {
            requests,
            algorithm,
            ..*self
        }
    }
}

impl LimitStatus {
    /// The status of a charge that was not made because its key is unlimited.
    pub const UNLIMITED: Self = Self {
        remaining: MAX_UNITS,
        next_growth_us: None,
        refusal: None,
        in_effect: Some(OverrideInEffect::Unlimited),
    };

    pub fn is_unlimited(&self) -> bool {
        self.in_effect.is_some_and(OverrideInEffect::is_unlimited)
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

/// The name of a limit whose overrides apply to a charge.
pub type DynamicLimitName = Arc<str>;
