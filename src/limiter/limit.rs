//! A limit: an amount per period, and the algorithm that enforces it.

use super::calendar::{Calendar, TimeWindow};
use strum::IntoStaticStr;

/// An amount per period, with the algorithm that enforces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    /// Units that may be used in one period, 0..=[`super::MAX_UNITS`]. A limit of 0 refuses
    /// everything.
    pub requests: u64,
    /// The period, in microseconds, at least 1. For [`Algorithm::Concurrency`]: how long a slot is
    /// kept unless it is renewed. For [`Algorithm::CalendarWindow`]: the nominal length.
    pub per_us: u64,
    pub algorithm: Algorithm,
}

/// How the units of a [`Limit`] become free again. Each algorithm's module documents its
/// guarantees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum Algorithm {
    SlidingLog,
    /// With `buckets` sub-windows, 2..=100.
    SlidingWindow {
        buckets: u64,
    },
    /// Windows start at `offset_us` (below `per_us`) after multiples of the period since the epoch.
    FixedWindow {
        offset_us: u64,
    },
    /// The windows of a fixed window are the periods of a calendar.
    #[strum(serialize = "fixed_window")]
    CalendarWindow {
        calendar: Calendar,
    },
    /// Up to `burst` units at once, at least 1; max(burst, requests) × per_us is at most
    /// [`super::MAX_UNITS`]. The bucket is cold if it was not charged for `warm_up_us`, at most
    /// [`super::MAX_WARM_UP_US`]; 0: never cold.
    TokenBucket {
        burst: u64,
        warm_up_us: u64,
    },
    /// Delays a request by up to `max_delay_us`; max_delay_us × requests + per_us is at most
    /// [`super::MAX_UNITS`].
    LeakyBucket {
        max_delay_us: u64,
    },
    /// At most `requests` requests at a time. A request is aborted after `max_duration_us`; 0:
    /// never.
    Concurrency {
        max_duration_us: u64,
    },
    /// Not a limit: the policy stays closed for `per_us` after one of its limits refused.
    /// `requests` is 1.
    Block,
}

impl Algorithm {
    /// Whether the counter is a level that falls at the rate of the limit.
    pub fn is_bucket(self) -> bool {
        matches!(self, Self::TokenBucket { .. } | Self::LeakyBucket { .. })
    }

    /// Whether it delays requests.
    pub fn is_queue(self) -> bool {
        matches!(self, Self::LeakyBucket { .. })
    }

    /// Whether it limits requests in flight, not requests per period.
    pub fn counts_slots(self) -> bool {
        matches!(self, Self::Concurrency { .. })
    }

    /// Whether windows begin at certain times of the wall clock.
    pub fn follows_wall_clock(self) -> bool {
        matches!(self, Self::FixedWindow { .. } | Self::CalendarWindow { .. })
    }
}

impl Limit {
    /// A limit per period of a calendar.
    pub fn per_calendar_period(requests: u64, calendar: Calendar) -> Self {
        Self {
            requests,
            per_us: calendar.unit().nominal_us(),
            algorithm: Algorithm::CalendarWindow { calendar },
        }
    }

    /// The part of a limit that identifies a counter beside its key. A changed amount keeps the
    /// usage; a changed algorithm or period starts a new counter.
    pub fn counter_identity(&self) -> (Algorithm, u64) {
        let algorithm = match self.algorithm {
            // A changed `block_for` ends no block.
            Algorithm::Block => return (Algorithm::Block, 0),
            Algorithm::TokenBucket { .. } => Algorithm::TokenBucket {
                burst: 0,
                warm_up_us: 0,
            },
            Algorithm::LeakyBucket { .. } => Algorithm::LeakyBucket { max_delay_us: 0 },
            // A changed `lease_ttl` keeps the slots of requests in flight.
            Algorithm::Concurrency { .. } => {
                return (Algorithm::Concurrency { max_duration_us: 0 }, 0);
            }
            algorithm => algorithm,
        };
        (algorithm, self.per_us)
    }

    /// The fixed window that contains a time. Other algorithms use offset 0. A time before the
    /// first offset is in a short window that starts at 0.
    pub fn window_at(&self, now_us: u64) -> TimeWindow {
        let offset_us = match self.algorithm {
            Algorithm::CalendarWindow { calendar } => return calendar.period_at(now_us),
            Algorithm::FixedWindow { offset_us } => offset_us,
            _ => 0,
        };
        let (start_us, end_us) = match now_us.checked_sub(offset_us) {
            Some(since_offset_us) => {
                let start_us = now_us - since_offset_us % self.per_us.max(1);
                (start_us, start_us.saturating_add(self.per_us))
            }
            None => (0, offset_us),
        };
        TimeWindow { start_us, end_us }
    }

    /// The length of the period at a time.
    pub fn period_length_us(&self, now_us: u64) -> u64 {
        match self.algorithm {
            Algorithm::CalendarWindow { calendar } => calendar.period_at(now_us).length_us(),
            _ => self.per_us,
        }
    }

    /// The usual lengths of the shortest and of the longest period.
    pub fn period_range_us(&self) -> (u64, u64) {
        match self.algorithm {
            Algorithm::CalendarWindow { calendar } => calendar.unit().length_range_us(),
            _ => (self.per_us, self.per_us),
        }
    }

    /// Units that can be in use at once: the largest cost that is ever admitted.
    pub fn capacity(&self) -> u64 {
        match self.algorithm {
            _ if self.requests == 0 => 0,
            Algorithm::TokenBucket { burst, .. } => burst,
            Algorithm::LeakyBucket { max_delay_us } => {
                let queue_length = u128::from(max_delay_us) * u128::from(self.requests)
                    / u128::from(self.per_us.max(1));
                u64::try_from(queue_length)
                    .unwrap_or(u64::MAX)
                    .saturating_add(1)
            }
            _ => self.requests,
        }
    }

    /// Whether this limit refuses earlier than another one of the same counter.
    pub fn is_tighter_than(&self, other: &Self) -> bool {
        let capacity = |limit: &Self| (limit.capacity(), limit.max_delay_remainder());
        self.requests < other.requests || capacity(self) < capacity(other)
    }

    /// The largest cost that is admitted when no units are in use: the capacity, or less for a
    /// bucket with a warm-up.
    pub fn cold_capacity(&self) -> u64 {
        match self.algorithm {
            Algorithm::TokenBucket { burst, warm_up_us } if warm_up_us > 0 => {
                (burst / 3).max(1).min(burst)
            }
            _ => self.capacity(),
        }
    }

    /// The longest delay of [`Algorithm::LeakyBucket`]; 0 for other algorithms.
    pub fn max_delay_us(&self) -> u64 {
        match self.algorithm {
            Algorithm::LeakyBucket { max_delay_us } => max_delay_us,
            _ => 0,
        }
    }

    /// The part of the longest delay of [`Algorithm::LeakyBucket`] beyond whole units, in units of
    /// 1 / per_us; 0 for other algorithms.
    pub fn max_delay_remainder(&self) -> u64 {
        let remainder = u128::from(self.max_delay_us()) * u128::from(self.requests)
            % u128::from(self.per_us.max(1));
        u64::try_from(remainder).unwrap_or_default()
    }

    /// The width of the sub-windows of [`Algorithm::SlidingWindow`], in microseconds; else the
    /// period.
    pub fn sub_window_width_us(&self) -> u64 {
        match self.algorithm {
            Algorithm::SlidingWindow { buckets } => self.per_us.div_ceil(buckets.max(1)).max(1),
            _ => self.per_us,
        }
    }

    /// The limit of shard `number` of `shard_count` counters over which one hot key is spread, so
    /// that several servers share its load; `number` is below `shard_count`. The limits sum to the
    /// whole, and a request tries one shard after the other, so free units in any can be used. None
    /// is 0 if the whole is at least `shard_count`.
    pub fn shard_limit(&self, number: u16, shard_count: u16) -> Self {
        let (number, shard_count) = (u64::from(number), u64::from(shard_count.max(1)));
        let part = |whole: u64| whole / shard_count + u64::from(number < whole % shard_count);
        self.with_amounts(part(self.requests), part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
