//! Spreads one hot key over several counters, so that several servers share its load.
//!
//! The limits of the shards sum to exactly the whole limit, so no distribution of requests exceeds
//! it. A request tries one shard after the other until one admits it, so free units in any shard
//! can be used.

use super::Limit;

impl Limit {
    /// The limit of shard `number` of `shard_count`; `number` is below `shard_count`. The limits
    /// sum to the whole. None is 0 if the whole is at least `shard_count`.
    pub fn shard_limit(&self, number: u16, shard_count: u16) -> Self {
        let (number, shard_count) = (u64::from(number), u64::from(shard_count.max(1)));
        let part = |whole: u64| whole / shard_count + u64::from(number < whole % shard_count);
        self.with_amounts(part(self.requests), part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::Algorithm;

    #[test]
    fn shard_limits_sum_to_the_whole_limit_and_none_is_zero() {
        for (requests, of) in [
            (1, 1),
            (7, 3),
            (64, 64),
            (100, 7),
            (super::super::MAX_UNITS, 64),
        ] {
            let whole = Limit {
                requests,
                per_us: 1000,
                algorithm: Algorithm::SlidingLog,
            };
            let shards: Vec<u64> = (0..of)
                .map(|number| whole.shard_limit(number, of).requests)
                .collect();
            assert_eq!(shards.iter().sum::<u64>(), requests);
            assert!(shards.iter().all(|shard| *shard >= 1), "{shards:?}");
            assert!(shards[0] - shards[shards.len() - 1] <= 1, "{shards:?}");
        }
    }
}
