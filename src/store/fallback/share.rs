//! The part of every limit that an instance enforces while Redis is unavailable.

use crate::limiter::Limit;

/// The number of instances that share the limits, and the rank of this one.
///
/// Each instance gets floor(units / instances); the instances with the lowest ranks get one unit of
/// the remainder each. The shares sum to exactly `units` if all instances use the same instance
/// count. With more instances than units, the highest ranks get nothing. An instance of unknown
/// rank gets no unit of the remainder: too strict, never too lax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub(super) instances: u32,
    pub(super) rank: Option<u32>,
}

impl Share {
    /// The share before the instances were counted.
    pub fn with_unknown_rank(instances: u32) -> Self {
        Self {
            instances: instances.max(1),
            rank: if instances <= 1 { Some(0) } else { None },
        }
    }

    /// The share of the instance with the `rank`-th lowest id, counted from 0.
    pub fn with_rank(instances: u32, rank: u32) -> Self {
        Self {
            instances: instances.max(1),
            rank: Some(rank),
        }
    }

    /// This share with the higher of the two ranks, or with its own if that of `earlier` is
    /// unknown. If the instance count is not below that of `earlier`, every limit gets at most the
    /// units that a known rank of `earlier` gave it: with a higher rank or count,
    /// ceil((units - rank) / instances) does not grow.
    pub fn with_higher_rank(self, earlier: Self) -> Self {
        let rank = self.rank.map(|rank| rank.max(earlier.rank.unwrap_or(0)));
        Self { rank, ..self }
    }

    /// Number of instances that share the limits, at least 1.
    pub fn instance_count(self) -> u32 {
        self.instances
    }

    /// This instance's part of `units`.
    pub fn scale_units(self, units: u64) -> u64 {
        let instances = u64::from(self.instances);
        let gets_remainder = self
            .rank
            .is_some_and(|rank| u64::from(rank) < units % instances);
        units / instances + u64::from(gets_remainder)
    }

    /// This instance's part of a limit. The counter of the limit stays the same: only amounts
    /// differ.
    pub fn scale_limit(self, limit: &Limit) -> Limit {
        // The queue of a leaky bucket shrinks with its rate. Each instance blocks the clients that
        // it rejected itself.
        limit.with_amounts(self.scale_units(limit.requests), |burst| {
            self.scale_units(burst)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_share() -> impl Strategy<Value = Share> {
        let counts = (1..12_u32).prop_flat_map(|count| (Just(count), 0..count));
        counts.prop_map(|(count, rank)| Share::with_rank(count, rank))
    }

    proptest! {
        #[test]
        fn the_higher_rank_gains_no_unit(
            earlier in any_share(),
            newest in any_share(),
            units in 0..40_u64,
        ) {
            let next_share = newest.with_higher_rank(earlier);
            prop_assert!(next_share.scale_units(units) <= newest.scale_units(units));
            if newest.instance_count() >= earlier.instance_count() {
                prop_assert!(next_share.scale_units(units) <= earlier.scale_units(units));
            }
            let unknown = Share::with_unknown_rank(12);
            prop_assert_eq!(newest.with_higher_rank(unknown), newest);
        }
    }
}
