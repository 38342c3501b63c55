//! `leaky_bucket`: requests leave evenly, `requests` units per `per`. A request that comes too
//! early is delayed by at most `max_delay`.
//!
//! Rule: every admitted unit takes the next free position in a queue, with per / requests between
//! positions. A request leaves at the position of its last unit, and is refused if that is more
//! than `max_delay` away. The queue is the debt of `token_bucket`, paid back at requests / per. A
//! request may leave when the debt is at most one unit, so admit if debt + cost ≤ 1 + max_delay ×
//! requests / per. This is exact in integers: max_delay × requests + per ≤ 2^53 is required.
//! Capacity: 1 + floor(max_delay × requests / per) units, the largest burst that an empty queue
//! admits.
//! Worst case: no request leaves early. A client that disconnects while it waits leaves its
//! position taken: too strict, never lax. After a rate increase, queued requests leave at their old
//! times, beside new ones.
//! Retry: when the queue is short enough for this cost, rounded up to the microsecond.
//! Returns: a position can be returned only while it is the last one, by a request that does not
//! leave. All earlier ones are promised, and a request that has left keeps its distance to the next.
//! Memory: three numbers.

use super::Limit;
use super::token_bucket::TokenBucketState;

impl TokenBucketState {
    /// Returns the units of a request that does not leave, if the queue still ends with its last
    /// position, at `end_us`.
    pub(super) fn return_last_position(
        &mut self,
        limit: &Limit,
        units: u64,
        end_us: u64,
        now_us: u64,
    ) {
        if self.queue_end_us(limit, now_us) == end_us {
            let debt = self.usage_debt_at(limit, now_us);
            self.debt -= debt.min(units.saturating_mul(limit.per_us));
        }
    }

    /// The end of the last position.
    pub(super) fn queue_end_us(&self, limit: &Limit, now_us: u64) -> u64 {
        self.debt_drop_time_us(limit, now_us, 0)
    }

    /// How long the request that was charged last must wait.
    pub(super) fn delay_us(&self, limit: &Limit, now_us: u64) -> u64 {
        self.debt_drop_time_us(limit, now_us, limit.per_us)
            .saturating_sub(now_us)
    }
}
