//! `token_bucket`: `requests` units per `per` on average, up to `burst` at once.
//!
//! Rule: what was taken is a debt that is paid back at requests / per; admit if debt + cost ≤ burst. This is
//! the generic cell rate algorithm (ITU-T I.371): nothing runs in the background.
//! The debt is kept in units of 1 / per_us, so that a microsecond pays back `requests` of them: all is exact
//! in integers as long as max(burst, requests) × per_us ≤ 2^53, which is required. When the rate changes, a
//! debt is paid back at the faster of the rates under which it was last charged and looked at: a higher limit
//! frees at once, and a debt is never owed longer than was said when it was made.
//! Worst case: burst + requests × t / per units in any time t.
//! Retry: when enough of the debt is paid back for this cost to fit, rounded up to the microsecond.
//! Memory: three numbers.

use super::Limit;

#[derive(Clone, Debug, Default)]
pub(super) struct Bucket {
    /// When the debt was last charged.
    at_us: u64,
    /// In units of 1 / per_us.
    debt: u64,
    /// What a microsecond paid back then.
    rate: u64,
}

impl Bucket {
    /// Whole units in debt at `now_us`: a part of one cannot be taken again.
    pub(super) fn used(&self, limit: &Limit, now_us: u64) -> u64 {
        self.debt_at(limit, now_us).div_ceil(limit.per_us)
    }

    pub(super) fn charge(&mut self, limit: &Limit, cost: u64, now_us: u64) {
        let debt = self.debt_at(limit, now_us).saturating_add(cost.saturating_mul(limit.per_us));
        *self = Self { at_us: now_us, debt, rate: limit.requests };
    }

    pub(super) fn newest_us(&self) -> u64 {
        self.at_us
    }

    /// When at most `units` are in debt.
    pub(super) fn at_most_at_us(&self, limit: &Limit, now_us: u64, units: u64) -> u64 {
        self.pays_down_at_us(limit, now_us, units.saturating_mul(limit.per_us))
    }

    /// When the debt is at most this, in units of 1 / per_us.
    pub(super) fn pays_down_at_us(&self, limit: &Limit, now_us: u64, debt: u64) -> u64 {
        let over = self.debt_at(limit, now_us).saturating_sub(debt);
        now_us.saturating_add(over.div_ceil(self.rate(limit)))
    }

    pub(super) fn expires_at_us(&self, limit: &Limit) -> u64 {
        self.at_most_at_us(limit, self.at_us, 0)
    }

    /// In units of 1 / per_us.
    pub(super) fn debt_at(&self, limit: &Limit, now_us: u64) -> u64 {
        let paid = now_us.saturating_sub(self.at_us).saturating_mul(self.rate(limit));
        self.debt.saturating_sub(paid)
    }

    fn rate(&self, limit: &Limit) -> u64 {
        self.rate.max(limit.requests).max(1)
    }
}
