//! Computation of the `Retry-After` value.

use crate::enforcer::RetryHint;

pub(super) const SECOND_US: u64 = 1_000_000;

impl RetryHint {
    /// Returns the wait in seconds for `Retry-After`: 1 if unknown, `None` if no retry can succeed.
    pub(crate) fn retry_after_s(self) -> Option<u64> {
        match self {
            // Rounded up, at least 1.
            Self::After(us) => Some(us.div_ceil(SECOND_US).max(1)),
            Self::Unknown => Some(1),
            Self::Never => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_rounded_up_and_at_least_one() {
        let cases = [
            (0, 1),
            (1, 1),
            (999_999, 1),
            (1_000_000, 1),
            (1_000_001, 2),
            (60_000_000, 60),
        ];
        for (us, seconds) in cases {
            let hint = RetryHint::After(us);
            assert_eq!(hint.retry_after_s(), Some(seconds), "{us}");
        }
    }
}
