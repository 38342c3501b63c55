//! `leaky_bucket`: requests leave evenly, `requests` units per `per`; what comes too early is held, at most `max_delay`.
//!
//! Rule: every admitted unit takes the next free place in a line whose places are per / requests apart; a request
//! goes at its last unit's place, and is refused if that is more than `max_delay` away. The line is the debt of
//! `token_bucket`, paid back at requests / per: a request may go once no more than one unit is owed, so admit if
//! debt + cost ≤ 1 + max_delay × requests / per. It must be exact in integers: max_delay × requests + per ≤ 2^53.
//! Capacity: 1 + floor(max_delay × requests / per) units, as many as an idle line takes at once.
//! Worst case: none leaves early. Who leaves the line while he waits keeps his place: too strict, never lax. After
//! the rate was raised, those already in line leave when they were told, beside the newcomers.
//! Retry: when the line has become short enough for this cost, rounded up to the microsecond.
//! Memory: three numbers; with costs that are settled later as `token_bucket`.

use super::Limit;
use super::token_bucket::TokenBucketState;

#[derive(Clone, Debug, Default)]
pub(super) struct LeakyBucketQueue(TokenBucketState);

impl LeakyBucketQueue {
    /// Units of the capacity that are not free at `now_us`.
    pub(super) fn used(&self, limit: &Limit, now_us: u64) -> u64 {
        self.0
            .debt_at(limit, now_us)
            .saturating_sub(limit.delay_remainder())
            .div_ceil(limit.per_us)
    }

    pub(super) fn charge(&mut self, limit: &Limit, cost: u64, now_us: u64, settles: bool) {
        self.0.charge(limit, cost, now_us, settles);
    }

    /// Takes what room there is, up to `cost`. Nobody stands there: it only keeps newcomers out.
    pub(super) fn charge_rejected(&mut self, limit: &Limit, cost: u64, now_us: u64, settles: bool) {
        self.0.charge_rejected(limit, cost, now_us, settles);
    }

    /// Gives places back, as [`TokenBucketState::credit`] says. Those in line keep their turns, beside which newcomers may go.
    pub(super) fn credit(&mut self, limit: &Limit, units: u64, at_us: u64, now_us: u64) {
        self.0.credit(limit, units, at_us, now_us);
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.0.heap_bytes()
    }

    /// How long whoever came last has to be held.
    pub(super) fn delay_us(&self, limit: &Limit, now_us: u64) -> u64 {
        self.0
            .debt_drop_time_us(limit, now_us, limit.per_us)
            .saturating_sub(now_us)
    }

    pub(super) fn latest_proven_us(&self) -> u64 {
        self.0.newest_us()
    }

    /// When at most `units` of the capacity are not free.
    pub(super) fn usage_drop_time_us(&self, limit: &Limit, now_us: u64, units: u64) -> u64 {
        let debt = units
            .saturating_mul(limit.per_us)
            .saturating_add(limit.delay_remainder());
        self.0.debt_drop_time_us(limit, now_us, debt)
    }

    pub(super) fn expires_at_us(&self, limit: &Limit) -> u64 {
        self.0.expires_at_us(limit)
    }
}
