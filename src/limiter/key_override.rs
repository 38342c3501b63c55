//! Overrides of single keys, stored beside the counters, which change without a reload (`dynamic`).

use super::{Algorithm, Limit, MAX_UNITS};
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
