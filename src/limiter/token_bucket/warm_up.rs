//! The warm-up of a token bucket.

use crate::limiter::{Algorithm, Limit};

/// How a bucket warms up: in a hundred steps, so that integers suffice. After n steps it holds cold
/// + n / 100 × (burst − cold) units, rounded down, and fills at (100 + 2n) / 300 of the rate.
pub(super) struct WarmUpRamp {
    pub(super) warm_up_us: u64,
    /// Duration of one step, rounded up.
    pub(super) step_us: u64,
    /// Units missing from the capacity of a cold bucket.
    pub(super) missing_units: u64,
}

pub(super) const RAMP_STEP_COUNT: u64 = 100;

impl WarmUpRamp {
    pub(super) fn from_limit(limit: &Limit) -> Option<Self> {
        match limit.algorithm {
            Algorithm::TokenBucket { burst, warm_up_us } if warm_up_us > 0 => Some(Self {
                warm_up_us,
                step_us: warm_up_us.div_ceil(RAMP_STEP_COUNT),
                missing_units: burst - limit.cold_capacity(),
            }),
            _ => None,
        }
    }

    /// Converts the time since the start of the warm-up to the time in which the full rate adds as
    /// many units.
    pub(super) fn full_rate_equivalent_us(&self, since_us: u64) -> u64 {
        let over_us = since_us.saturating_sub(RAMP_STEP_COUNT * self.step_us);
        let since_us = since_us - over_us;
        let steps = since_us / self.step_us;
        let rest_us = since_us - steps * self.step_us;
        over_us
            + (self.whole_steps_equivalent_300ths(steps) + rest_us * (RAMP_STEP_COUNT + 2 * steps))
                / (3 * RAMP_STEP_COUNT)
    }

    /// The shortest time since the start that is equivalent to `worth_us` at the full rate.
    pub(super) fn shortest_elapsed_us(&self, worth_us: u64) -> u64 {
        let (all_us, all_worth_us) = (
            RAMP_STEP_COUNT * self.step_us,
            self.full_rate_equivalent_us(RAMP_STEP_COUNT * self.step_us),
        );
        if worth_us >= all_worth_us {
            return (worth_us - all_worth_us).saturating_add(all_us);
        }
        // The step is the largest n with whole_steps(n) ≤ worth: a quadratic equation.
        let worth = worth_us * 3 * RAMP_STEP_COUNT;
        let steps = (((RAMP_STEP_COUNT - 1).pow(2) + 4 * worth / self.step_us).isqrt() + 1
            - RAMP_STEP_COUNT)
            / 2;
        steps * self.step_us
            + (worth - self.whole_steps_equivalent_300ths(steps))
                .div_ceil(RAMP_STEP_COUNT + 2 * steps)
    }

    /// The full-rate equivalent of the first `steps` steps, in 300ths of a microsecond.
    pub(super) fn whole_steps_equivalent_300ths(&self, steps: u64) -> u64 {
        self.step_us * steps * (RAMP_STEP_COUNT - 1 + steps)
    }

    /// Units missing from the capacity `since_us` after the start.
    pub(super) fn missing_units_after(&self, since_us: u64) -> u64 {
        self.missing_units
            - self.missing_units * (since_us / self.step_us).min(RAMP_STEP_COUNT) / RAMP_STEP_COUNT
    }

    /// How long after the start at most `units` are missing. At the start more than `units` are
    /// missing.
    pub(super) fn missing_units_drop_us(&self, units: u64) -> u64 {
        ((self.missing_units - units) * RAMP_STEP_COUNT).div_ceil(self.missing_units) * self.step_us
    }
}
