//! How much a unit counts: factors, also by a value of the request.

use crate::limiter::MAX_UNITS;
use crate::policy::value_pattern::ValuePattern;
use crate::policy::{Facts, KeyPart, ValueChecks};
use std::fmt;
use std::sync::Arc;

/// How much one unit of a source counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    pub factor: Factor,
    /// A further factor by a value of the request.
    pub by: Option<Arc<WeightsByValue>>,
}

/// A factor in millionths, so that the product of two with three decimals is exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Factor(pub(super) i64);

/// Factors by a value of the request, such as the model in its body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightsByValue {
    pub(super) part: KeyPart,
    /// The first pattern that matches counts.
    factors: Box<[(ValuePattern, Factor)]>,
    /// The factor of other values, and of requests without the value.
    default: Factor,
}

impl Weight {
    pub const ONE: Self = Self {
        factor: Factor::ONE,
        by: None,
    };

    pub(super) fn factor_for(&self, facts: &Facts<'_>) -> Factor {
        match self.by.as_ref().map(|by| by.factor_for(facts)) {
            None => self.factor,
            Some(Some(by)) => self.factor.times(by),
            Some(None) => self.highest(),
        }
    }

    /// Whether the weighted units are at most the counter's maximum.
    pub fn fits(&self, units: u64) -> bool {
        let product = i128::from(units) * i128::from(self.highest().0);
        product <= i128::from(MAX_UNITS) * i128::from(Factor::ONE.0)
    }

    /// The highest factor of a request.
    pub fn highest(&self) -> Factor {
        let by = self.by.as_ref().map(|by| by.factors());
        let products = by.map(|all| all.map(|by| self.factor.times(by)).max());
        products.flatten().unwrap_or(self.factor)
    }
}

/// The factor before what it multiplies: `4 × `; nothing if it is 1.
impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.factor != Factor::ONE {
            write!(f, "{} × ", self.factor)?;
        }
        match &self.by {
            Some(by) => write!(f, "weight by {} × ", by.part),
            None => Ok(()),
        }
    }
}

impl Factor {
    pub const ONE: Self = Self(1_000_000);

    /// A factor from a number of at most three decimals, between -1,000,000 and 1,000,000.
    pub fn from_number(number: f64) -> Option<Self> {
        let thousandths = (number * 1000.0).round();
        // The nearest double to a decimal of three places is the one it was read as.
        let is_exact = thousandths / 1000.0 == number;
        #[expect(clippy::cast_possible_truncation, reason = "checked against the range")]
        (is_exact && thousandths.abs() <= 1e9).then(|| Self(thousandths as i64 * 1000))
    }

    /// The highest of the factors of a request, at least 0.
    pub fn highest_of(factors: &[Self]) -> Self {
        factors
            .iter()
            .copied()
            .max()
            .unwrap_or(Self::ONE)
            .max(Self(0))
    }

    /// The product with units, rounded up.
    pub fn times_units(self, units: u64) -> u64 {
        sum_weighted([(units, self)].into_iter())
    }

    /// The most units whose product is within a number of units.
    pub fn units_within(self, most: u64) -> u64 {
        let units = u128::from(most) * 1_000_000 / u128::from(self.0.unsigned_abs()).max(1);
        u64::try_from(units).unwrap_or(u64::MAX)
    }

    #[must_use]
    fn times(self, other: Self) -> Self {
        let product = i128::from(self.0) * i128::from(other.0) / 1_000_000;
        let saturated = if product < 0 { i64::MIN } else { i64::MAX };
        Self(i64::try_from(product).unwrap_or(saturated))
    }
}

impl fmt::Display for Factor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        let magnitude = self.0.unsigned_abs();
        let decimals = format!("{:06}", magnitude % 1_000_000);
        let decimals = decimals.trim_end_matches('0');
        let point = if decimals.is_empty() { "" } else { "." };
        write!(f, "{sign}{}{point}{decimals}", magnitude / 1_000_000)
    }
}

impl WeightsByValue {
    /// Creates factors by the values of a part. The patterns have the precedence of those of
    /// overrides: exact values first, then the longest literal text.
    pub fn new(part: KeyPart, mut factors: Vec<(ValuePattern, Factor)>, default: Factor) -> Self {
        factors.sort_by_key(|(pattern, _)| pattern.rank());
        Self {
            part,
            factors: factors.into(),
            default,
        }
    }

    /// The factor for a request; `None` if apps may read another value.
    fn factor_for(&self, facts: &Facts<'_>) -> Option<Factor> {
        let part = &self.part;
        let is_ambiguous =
            part.is_unreadable_in(facts) || part.find_ambiguity(facts, ValueChecks::ALL).is_some();
        let value = part.single_value(facts).ok().filter(|_| !is_ambiguous)?;
        let mut factors = self.factors.iter();
        let found = factors.find(|(pattern, _)| pattern.matches(value.as_deref()));
        Some(found.map_or(self.default, |(_, factor)| *factor))
    }

    fn factors(&self) -> impl Iterator<Item = Factor> {
        let listed = self.factors.iter().map(|(_, factor)| *factor);
        listed.chain([self.default])
    }
}

/// The sum of weighted units, rounded up: never below 0, and at most the counter's maximum.
pub(super) fn sum_weighted(parts: impl Iterator<Item = (u64, Factor)>) -> u64 {
    let sum: i128 = parts
        .map(|(units, factor)| i128::from(units) * i128::from(factor.0))
        .fold(0, i128::saturating_add);
    let units = u64::try_from(sum.max(0).unsigned_abs().div_ceil(1_000_000)).unwrap_or(MAX_UNITS);
    units.min(MAX_UNITS)
}
