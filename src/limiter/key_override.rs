//! Overrides of single keys, stored beside the counters, which change without a reload (`dynamic`),
//! and charges under them.

use super::{
    Algorithm, Charge, Decision, Limit, LimitStatus, MAX_UNITS, PolicyCharges, RequestPart,
    each_charge,
};
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

/// What decided one charge instead of the limit of the configuration. `burst` counts only for a
/// token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OverrideInEffect {
    Unlimited,
    Blocked,
    Amounts {
        requests: u64,
        burst: u64,
    },
    /// The amounts that the request states (`requests_from`): no override.
    StatedAmounts {
        requests: u64,
        burst: u64,
    },
}

impl KeyOverride {
    /// The override for a charge. A block (`block_for`) has no amounts, but an unlimited key has no
    /// block.
    pub fn for_charge(&self, charge: &Charge<'_, '_>) -> Option<OverrideInEffect> {
        let name = charge.name?;
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
        match in_effect {
            None | Some(OverrideInEffect::Unlimited) => *self,
            Some(OverrideInEffect::Blocked) => Self {
                requests: 0,
                ..*self
            },
            Some(
                OverrideInEffect::Amounts { requests, burst }
                | OverrideInEffect::StatedAmounts { requests, burst },
            ) => self.with_amounts(requests, |_| burst),
        }
    }

    /// The limit with other amounts. `map_burst` changes the burst of a token bucket. A block has
    /// no amounts.
    #[must_use]
    pub fn with_amounts(&self, requests: u64, map_burst: impl Fn(u64) -> u64) -> Self {
        let algorithm = match self.algorithm {
            Algorithm::Block => return *self,
            Algorithm::TokenBucket { burst, warm_up_us } => Algorithm::TokenBucket {
                burst: map_burst(burst),
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

/// The name of a limit, by which overrides find it.
pub type LimitName = Arc<str>;

/// The charges of a request of which some have an override.
#[derive(Debug)]
pub struct OverriddenCharges<'r, 'c> {
    request: &'r [PolicyCharges<'c>],
    /// One per charge.
    overrides: SmallVec<[ChargeOverride; 4]>,
}

/// The override of a charge.
#[derive(Clone, Copy, Debug, Default)]
struct ChargeOverride {
    in_effect: Option<OverrideInEffect>,
    /// When the override ends by itself (µs).
    ends_us: Option<u64>,
}

impl ChargeOverride {
    fn is_unlimited(&self) -> bool {
        self.in_effect.is_some_and(OverrideInEffect::is_unlimited)
    }
}

impl<'r, 'c> OverriddenCharges<'r, 'c> {
    /// Finds the overrides of charges, and when they end by themselves (µs). `None` if no charge
    /// has one.
    pub fn resolve(
        request: &'r [PolicyCharges<'c>],
        mut find: impl FnMut(&Charge<'_, '_>) -> Option<(OverrideInEffect, Option<u64>)>,
    ) -> Option<Self> {
        let overrides = each_charge(request).map(|charge| {
            let (in_effect, ends_us) = charge.name.and_then(|_| find(&charge)).unzip();
            ChargeOverride {
                in_effect,
                ends_us: ends_us.flatten(),
            }
        });
        let overrides: SmallVec<[_; 4]> = overrides.collect();
        let is_overridden = overrides.iter().any(|own| own.in_effect.is_some());
        is_overridden.then_some(Self { request, overrides })
    }

    /// Decides the request. `decide` decides charges by their limits in effect. `read` reads the
    /// charges that the limits of the file decide after the end of an override.
    pub fn decide(
        &self,
        decide: impl FnOnce(&[PolicyCharges<'_>]) -> Decision,
        read: impl FnOnce(&[PolicyCharges<'_>]) -> Decision,
    ) -> Decision {
        let limited = self.limited_charges();
        let mut decision = self.complete_decision(&limited, decide(&limited.policies));
        let late = self.charges_after_ends(&decision);
        if !late.is_empty() {
            self.apply_ends(&mut decision, &late, read(&late.policies));
        }
        decision
    }

    /// The charges with their limits in effect, without those of unlimited keys.
    pub fn limited_charges(&self) -> RequestPart<'c> {
        let mut own = self.overrides.iter();
        let policies = self.request.iter().map(|policy| {
            policy.map_limits(|charge| {
                let in_effect = own.next().and_then(|own| own.in_effect);
                charge.limit = charge.limit.with_override(in_effect);
            })
        });
        let policies: SmallVec<[_; 2]> = policies.collect();
        let mut own = self.overrides.iter();
        RequestPart::new(&policies, |_| {
            own.next().is_some_and(|own| !own.is_unlimited())
        })
    }

    /// The decision about the whole request, from the one about `limited`, its
    /// [`OverriddenCharges::limited_charges`].
    pub fn complete_decision(&self, limited: &RequestPart<'_>, decision: Decision) -> Decision {
        let mut decision = limited.expand(decision);
        for (outcome, own) in decision.outcomes_mut().zip(&self.overrides) {
            if own.is_unlimited() {
                outcome.status = Some(LimitStatus::UNLIMITED);
            } else if let Some(status) = &mut outcome.status {
                status.in_effect = own.in_effect;
            }
        }
        decision
    }

    /// The charges whose statuses have times after the end of their override, to be read without
    /// it.
    pub fn charges_after_ends(&self, decision: &Decision) -> RequestPart<'c> {
        let reads = self.request.iter().map(|policy| {
            let read = policy.to_read();
            read.map_limits(|charge| charge.name = None)
        });
        let reads: SmallVec<[_; 2]> = reads.collect();
        let mut outcomes = decision.outcomes().zip(&self.overrides);
        RequestPart::new(&reads, |read| {
            outcomes.next().is_some_and(|(outcome, own)| {
                let times = outcome.status.zip(own.ends_us);
                times.is_some_and(|(status, ends_us)| {
                    !read.is_block() && !status.is_unlimited() && status.has_times_after(ends_us)
                })
            })
        })
    }

    /// Corrects the times after the ends of overrides: from then on the limits apply as `later` has
    /// read them, the decision about `late`, the [`OverriddenCharges::charges_after_ends`].
    pub fn apply_ends(&self, decision: &mut Decision, late: &RequestPart<'_>, later: Decision) {
        let (now_us, later) = (decision.now_us, late.expand(later));
        let outcomes = decision.outcomes_mut().zip(later.outcomes());
        for ((outcome, read), own) in outcomes.zip(&self.overrides) {
            if let (Some(ends_us), Some(status), Some(read)) =
                (own.ends_us, &mut outcome.status, read.status)
            {
                status.apply_override_end(ends_us, &read.convert_clock(later.now_us, now_us));
            }
        }
    }
}
