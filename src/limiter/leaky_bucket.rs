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

#[derive(Clone, Debug, Default)]
pub(super) struct LeakyBucketQueue(TokenBucketState);

impl LeakyBucketQueue {
    /// Units of the capacity that are not free at `now_us`.
    pub(super) fn used_units(&self, limit: &Limit, now_us: u64) -> u64 {
        self.0
            .usage_debt_at(limit, now_us)
            .saturating_sub(limit.max_delay_remainder())
            .div_ceil(limit.per_us)
    }

    pub(super) fn charge(&mut self, limit: &Limit, cost: u64, now_us: u64) {
        self.0.charge(limit, cost, now_us, false);
    }

    /// Takes the available units, up to `cost`. The rejected request does not wait, but its units
    /// delay later requests.
    pub(super) fn charge_rejected(&mut self, limit: &Limit, cost: u64, now_us: u64) {
        self.0.charge_rejected(limit, cost, now_us, false);
    }

    /// Returns the units of a request that does not leave, if the queue still ends with its last
    /// position, at `end_us`.
    pub(super) fn credit(&mut self, limit: &Limit, units: u64, end_us: u64, now_us: u64) {
        if self.end_us(limit, now_us) == end_us {
            self.0.forgive_debt(limit, units, now_us);
        }
    }

    /// The end of the last position.
    pub(super) fn end_us(&self, limit: &Limit, now_us: u64) -> u64 {
        self.0.debt_drop_time_us(limit, now_us, 0)
    }

    /// How long the request that was charged last must wait.
    pub(super) fn delay_us(&self, limit: &Limit, now_us: u64) -> u64 {
        self.0
            .debt_drop_time_us(limit, now_us, limit.per_us)
            .saturating_sub(now_us)
    }

    pub(super) fn now_lower_bound_us(&self) -> u64 {
        self.0.newest_charge_us()
    }

    /// The time at which at most `units` of the capacity are in use.
    pub(super) fn usage_drop_time_us(&self, limit: &Limit, now_us: u64, units: u64) -> u64 {
        let debt = units
            .saturating_mul(limit.per_us)
            .saturating_add(limit.max_delay_remainder());
        self.0.debt_drop_time_us(limit, now_us, debt)
    }

    pub(super) fn expires_at_us(&self, limit: &Limit) -> u64 {
        self.0.expires_at_us(limit)
    }
}
