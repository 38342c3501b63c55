//! Soft thresholds of limits (`notify`).

use std::fmt;

/// A share of a limit's capacity, in thousandths: from 1 to 1000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Threshold(u16);

impl Threshold {
    /// `None` unless the fraction is above 0, at most 1, and has at most three decimals.
    pub fn from_fraction(fraction: f64) -> Option<Self> {
        let thousandths = (1..=1000).map(Self);
        thousandths.rev().find(|one| one.as_fraction() == fraction)
    }

    fn as_fraction(self) -> f64 {
        f64::from(self.0) / 1000.0
    }

    /// Whether so many units of a capacity reach the threshold.
    pub fn is_reached(self, used: u64, capacity: u64) -> bool {
        u128::from(used) * 1000 >= u128::from(capacity) * u128::from(self.0)
    }
}

/// Writes the fraction with at least one decimal, as a Decimal of RFC 9651.
impl fmt::Display for Threshold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_fraction())
    }
}

#[cfg(test)]
mod tests {
    use super::Threshold;

    #[test]
    fn a_threshold_is_a_fraction_of_three_decimals() {
        for (fraction, text) in [
            (0.8, "0.8"),
            (1.0, "1.0"),
            (0.001, "0.001"),
            (0.125, "0.125"),
        ] {
            let threshold = Threshold::from_fraction(fraction).unwrap();
            assert_eq!(threshold.to_string(), text);
        }
        for fraction in [0.0, -0.5, 0.0005, 0.8005, 1.001, f64::NAN, f64::INFINITY] {
            assert_eq!(Threshold::from_fraction(fraction), None, "{fraction}");
        }
    }

    #[test]
    fn a_threshold_is_reached_by_its_exact_share() {
        let threshold = Threshold::from_fraction(0.8).unwrap();
        for (used, capacity, expected) in [
            (7, 10, false),
            (8, 10, true),
            (3, 4, false),
            (4, 4, true),
            (u64::MAX / 10 * 8, u64::MAX / 10 * 10, true),
            (u64::MAX / 10 * 8 - 1, u64::MAX / 10 * 10, false),
        ] {
            assert_eq!(threshold.is_reached(used, capacity), expected, "{used}");
        }
    }
}
