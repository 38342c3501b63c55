//! `token_bucket`: `requests` units per `per` on average, up to `burst` at once.
//!
//! Rule: used units are a debt that is paid back at requests / per; admit if debt + cost ≤ burst.
//! This is the generic cell rate algorithm (ITU-T I.371): no background task is needed. The debt is
//! in units of 1 / per_us, so that one microsecond pays back `requests` of them. All numbers are
//! exact integers as long as max(burst, requests) × per_us ≤ 2^53, which is required. After a rate
//! change, a debt is paid back at the higher of two rates: that of its last charge and the present
//! one. A higher limit takes effect at once, and no debt lasts longer than was announced when it
//! was made.
//! Worst case: burst + requests × t / per units in any time t.
//! Retry: when enough of the debt is paid back for this cost to fit, rounded up to the microsecond.
//! Memory: three numbers; one more with `warm_up`; with costs that are settled later up to 66 more;
//! two per lease.
//!
//! `warm_up`: a bucket that was not charged for so long, or never, is cold. It holds a third of
//! `burst` (at least one unit) and fills at a third of the rate. Both grow evenly from the first
//! charge on (see [`warm_up`]). Units missing from the capacity are owed; the charge that ends the
//! cold state turns them into debt. So a warm-up never loosens the limit: after a cold start a
//! client gets at most a third of `burst` plus the inflow.

mod history;
mod warm_up;

use super::{Algorithm, Limit, MAX_TIME_US, MAX_UNITS};
use history::ChargeHistory;
use std::borrow::Cow;
use std::collections::VecDeque;
use warm_up::WarmUpRamp;

/// The state of `token_bucket`, and of `leaky_bucket`.
#[derive(Clone, Debug, Default)]
pub(super) struct TokenBucketState {
    /// Time of the last charge. 0: never charged.
    pub(super) charged_at_us: u64,
    /// The debt at the last charge, in units of 1 / per_us.
    pub(super) debt: u64,
    /// Debt that a microsecond paid back at the last charge.
    rate: u64,
    /// Start of the last warm-up. 0: long ago.
    warm_up_start_us: u64,
    /// Recent charges, if some of their units may be credited.
    history: Option<Box<ChargeHistory>>,
    /// Leases whose units have not become debt.
    leases: Option<Box<OutstandingLeases>>,
}

/// Leases as (end, units), ordered by their end. A lease's units are absent from the bucket until
/// its end, and then become a debt made at that moment.
#[derive(Clone, Debug)]
struct OutstandingLeases(VecDeque<(u64, u64)>);

/// Maximum leases of one bucket at a time: every read visits all of them.
const MAX_OUTSTANDING_LEASES: usize = 64;

impl TokenBucketState {
    /// Used units of the capacity at `now_us`, rounded up: a part of a unit can't be taken.
    pub(super) fn used_units(&self, limit: &Limit, now_us: u64) -> u64 {
        let bucket = self.with_expired_leases_as_debt(limit, now_us);
        bucket
            .total_owed(limit, now_us)
            .saturating_sub(limit.max_delay_remainder())
            .div_ceil(limit.per_us)
            .saturating_add(bucket.leased_units())
    }

    /// With `is_estimate`, records the history that [`TokenBucketState::credit`] needs.
    pub(super) fn charge(&mut self, limit: &Limit, cost: u64, now_us: u64, is_estimate: bool) {
        self.convert_expired_leases_to_debt(limit, now_us);
        self.take_units(limit, cost, now_us, is_estimate);
    }

    fn take_units(&mut self, limit: &Limit, cost: u64, now_us: u64, is_estimate: bool) {
        let debt = self
            .total_owed(limit, now_us)
            .saturating_add(cost.saturating_mul(limit.per_us));
        self.set_debt(limit, debt, cost, now_us, is_estimate);
    }

    /// Takes the available units, up to `cost`.
    pub(super) fn charge_rejected(
        &mut self,
        limit: &Limit,
        cost: u64,
        now_us: u64,
        is_estimate: bool,
    ) {
        let mut bucket = self.with_expired_leases_as_debt(limit, now_us).into_owned();
        let owed = bucket.total_owed(limit, now_us);
        let available_units = limit.capacity().saturating_sub(bucket.leased_units());
        let max_debt = available_units
            .saturating_mul(limit.per_us)
            .saturating_add(limit.max_delay_remainder());
        let debt = owed
            .saturating_add(cost.saturating_mul(limit.per_us))
            .min(max_debt);
        if debt > owed {
            let units = (debt - owed).div_ceil(limit.per_us);
            bucket.set_debt(limit, debt, units, now_us, is_estimate);
            *self = bucket;
        }
    }

    /// Whether units can be leased until `until_us`.
    pub(super) fn can_grant_lease(&self, limit: &Limit, now_us: u64, until_us: u64) -> bool {
        let bucket = self.with_expired_leases_as_debt(limit, now_us);
        let is_in_order = |leases: &OutstandingLeases| {
            let mut later = leases.0.back().into_iter();
            leases.0.len() < MAX_OUTSTANDING_LEASES
                && later.all(|(last_us, _)| *last_us <= until_us)
        };
        matches!(
            limit.algorithm,
            Algorithm::TokenBucket { warm_up_us: 0, .. }
        ) && bucket.leases.as_deref().is_none_or(is_in_order)
    }

    /// Takes units that are absent until `until_us`.
    pub(super) fn grant_lease(&mut self, limit: &Limit, units: u64, now_us: u64, until_us: u64) {
        self.convert_expired_leases_to_debt(limit, now_us);
        let leases = &mut self
            .leases
            .get_or_insert_with(|| Box::new(OutstandingLeases(VecDeque::new())))
            .0;
        match leases.back_mut() {
            Some((last_us, leased_units)) if *last_us == until_us => *leased_units += units,
            _ => leases.push_back((until_us, units)),
        }
    }

    /// Returns those of the `units` charged at `at_us` that still count. The debt drops at most to
    /// its value without that charge. A credit is not a charge: it does not end the cold state.
    pub(super) fn credit(&mut self, limit: &Limit, units: u64, at_us: u64, now_us: u64) {
        if limit.algorithm.is_queue() {
            return self.return_last_position(limit, units, at_us, now_us);
        }
        let mut bucket = self.with_expired_leases_as_debt(limit, now_us).into_owned();
        if bucket.return_leased_units(units, at_us)
            || bucket.reduce_debt(limit, units, at_us, now_us)
        {
            *self = bucket;
        }
    }

    /// Reduces the debt by units charged at `at_us`. Returns `false` if there is no debt.
    fn reduce_debt(&mut self, limit: &Limit, units: u64, at_us: u64, now_us: u64) -> bool {
        let debt = self.usage_debt_at(limit, now_us);
        if debt == 0 {
            return false;
        }
        // All payments since the charge may have been for these units.
        let paid_back = now_us
            .saturating_sub(at_us)
            .saturating_mul(self.debt_payment_rate(limit));
        let debt_without_history =
            || debt.saturating_sub(units.saturating_mul(limit.per_us).saturating_sub(paid_back));
        let history = self.history.as_mut();
        let remaining_debt = (history.filter(|_| self.rate == limit.requests))
            .and_then(|history| history.credit_and_recompute_debt(limit, units, at_us, now_us))
            .unwrap_or_else(debt_without_history);
        self.debt -= debt.saturating_sub(remaining_debt);
        true
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let history_bytes = |history: &ChargeHistory| {
            size_of::<ChargeHistory>() + history.part_units.capacity() * size_of::<u64>()
        };
        let lease_bytes = |leases: &OutstandingLeases| {
            size_of::<OutstandingLeases>() + leases.0.capacity() * size_of::<(u64, u64)>()
        };
        self.history.as_deref().map_or(0, history_bytes)
            + self.leases.as_deref().map_or(0, lease_bytes)
    }

    /// The time at which at most `units` are in use; `None` if only further charges can warm up the
    /// bucket so far.
    pub(super) fn usage_drop_time_us(&self, limit: &Limit, now_us: u64, units: u64) -> Option<u64> {
        let (mut bucket, mut now_us) = (self.with_expired_leases_as_debt(limit, now_us), now_us);
        while let Some((until_us, leased_units)) = bucket.first_ending_lease() {
            if let Some(units) = units.checked_sub(bucket.leased_units()) {
                let at_us = bucket.owed_units_drop_time_us(limit, now_us, units)?;
                if at_us <= until_us {
                    return Some(at_us);
                }
            }
            bucket
                .to_mut()
                .convert_first_lease_to_debt(limit, until_us, leased_units);
            now_us = until_us;
        }
        bucket.owed_units_drop_time_us(limit, now_us, units)
    }

    /// The time at which at most `units` are in use, apart from leases; `None` if only further
    /// charges can warm up the bucket so far.
    fn owed_units_drop_time_us(&self, limit: &Limit, now_us: u64, units: u64) -> Option<u64> {
        let debt = units.saturating_mul(limit.per_us);
        let debt = debt.saturating_add(limit.max_delay_remainder());
        let paid_back_at_us = self.debt_drop_time_us(limit, now_us, debt);
        match WarmUpRamp::from_limit(limit) {
            Some(ramp) if ramp.missing_units > units => {
                let at_us = paid_back_at_us.max(
                    self.warm_up_start_us
                        .saturating_add(ramp.missing_units_drop_us(units)),
                );
                (at_us < self.cold_at_us(&ramp)).then_some(at_us)
            }
            _ => Some(paid_back_at_us),
        }
    }

    /// The time at which the debt is at most `debt`, in units of 1 / per_us.
    pub(super) fn debt_drop_time_us(&self, limit: &Limit, now_us: u64, debt: u64) -> u64 {
        let wait_us = self
            .usage_debt_at(limit, now_us)
            .saturating_sub(debt)
            .div_ceil(self.debt_payment_rate(limit));
        let at_us = match WarmUpRamp::from_limit(limit) {
            Some(ramp) if wait_us > 0 => {
                let worth_us = ramp
                    .full_rate_equivalent_us(now_us - self.warm_up_start_us)
                    .saturating_add(wait_us);
                self.warm_up_start_us
                    .saturating_add(ramp.shortest_elapsed_us(worth_us))
            }
            _ => now_us.saturating_add(wait_us),
        };
        at_us.min(MAX_TIME_US)
    }

    /// The time at which the debt is paid and the bucket is cold again. A later limit may be lower
    /// than `limit`, so only the rate of the last charge counts.
    pub(super) fn expires_at_us(&self, limit: &Limit) -> u64 {
        let bucket = self.with_expired_leases_as_debt(limit, u64::MAX);
        let cold_at_us = WarmUpRamp::from_limit(limit).map_or(0, |ramp| bucket.cold_at_us(&ramp));
        let slowest_limit = Limit {
            requests: bucket.rate,
            ..*limit
        };
        bucket
            .debt_drop_time_us(&slowest_limit, bucket.charged_at_us, 0)
            .max(cold_at_us)
    }

    /// Returns the bucket with all leases that ended before `now_us` turned into debt.
    fn with_expired_leases_as_debt(&self, limit: &Limit, now_us: u64) -> Cow<'_, Self> {
        let mut bucket = Cow::Borrowed(self);
        while let Some((until_us, units)) = bucket
            .first_ending_lease()
            .filter(|(until_us, _)| *until_us < now_us)
        {
            bucket
                .to_mut()
                .convert_first_lease_to_debt(limit, until_us, units);
        }
        bucket
    }

    fn convert_expired_leases_to_debt(&mut self, limit: &Limit, now_us: u64) {
        if let Cow::Owned(bucket) = self.with_expired_leases_as_debt(limit, now_us) {
            *self = bucket;
        }
    }

    fn convert_first_lease_to_debt(&mut self, limit: &Limit, until_us: u64, units: u64) {
        self.leases = self.leases.take().filter(|leases| leases.0.len() > 1);
        if let Some(leases) = &mut self.leases {
            leases.0.pop_front();
        }
        self.take_units(limit, units, until_us, false);
    }

    /// Returns units of the lease that ends at `at_us`. Returns `false` if no lease ends then.
    fn return_leased_units(&mut self, units: u64, at_us: u64) -> bool {
        let Some(leases) = &mut self.leases else {
            return false;
        };
        let Some(nth) = leases.0.iter().position(|(until_us, _)| *until_us == at_us) else {
            return false;
        };
        if let Some((_, lease_units)) = leases.0.get_mut(nth) {
            *lease_units = lease_units.saturating_sub(units);
        }
        leases.0.retain(|(_, lease_units)| *lease_units > 0);
        self.leases = self.leases.take().filter(|leases| !leases.0.is_empty());
        true
    }

    /// The end and units of the lease that ends first.
    fn first_ending_lease(&self) -> Option<(u64, u64)> {
        self.leases
            .as_deref()
            .and_then(|leases| leases.0.front().copied())
    }

    fn leased_units(&self) -> u64 {
        self.leases
            .as_deref()
            .map_or(0, |leases| leases.0.iter().map(|(_, units)| units).sum())
    }

    /// The debt at `now_us`: used units that are not paid back yet, in units of 1 / per_us.
    pub(super) fn usage_debt_at(&self, limit: &Limit, now_us: u64) -> u64 {
        let paying_us = match WarmUpRamp::from_limit(limit) {
            None => now_us.saturating_sub(self.charged_at_us),
            Some(ramp) => {
                let worth_us = |at_us: u64| {
                    ramp.full_rate_equivalent_us(at_us.saturating_sub(self.warm_up_start_us))
                };
                worth_us(now_us).saturating_sub(worth_us(self.charged_at_us))
            }
        };
        self.debt
            .saturating_sub(paying_us.saturating_mul(self.debt_payment_rate(limit)))
    }

    /// The debt, or the units missing from a cold bucket's capacity if those are more: they can't
    /// be taken.
    fn total_owed(&self, limit: &Limit, now_us: u64) -> u64 {
        let missing_units = WarmUpRamp::from_limit(limit).map_or(0, |ramp| {
            if now_us < self.cold_at_us(&ramp) {
                ramp.missing_units_after(now_us - self.warm_up_start_us)
            } else {
                ramp.missing_units
            }
        });
        self.usage_debt_at(limit, now_us)
            .max(missing_units.saturating_mul(limit.per_us))
    }

    /// Sets the debt after a charge of at most `units`, up to the largest integer that is exact in
    /// Lua.
    fn set_debt(&mut self, limit: &Limit, debt: u64, units: u64, now_us: u64, is_estimate: bool) {
        let before = self.total_owed(limit, now_us);
        let warm_up_start_us = match WarmUpRamp::from_limit(limit) {
            Some(ramp) if now_us < self.cold_at_us(&ramp) => self.warm_up_start_us,
            Some(_) => now_us,
            None => 0,
        };
        let known = self
            .history
            .take()
            .filter(|_| before > 0 && self.rate == limit.requests);
        // While units may be credited, the history has every charge.
        let has_history = WarmUpRamp::from_limit(limit).is_none() && !limit.algorithm.is_queue();
        let history = (has_history && (is_estimate || known.is_some())).then(|| {
            let mut history = known.unwrap_or_else(|| Box::new(ChargeHistory::new(before, now_us)));
            history.record_charge(limit, units, now_us);
            history
        });
        let (debt, leases) = (debt.min(MAX_UNITS), self.leases.take());
        *self = Self {
            charged_at_us: now_us,
            debt,
            rate: limit.requests,
            warm_up_start_us,
            history,
            leases,
        };
    }

    /// The rate at which the debt is paid: the larger of the rate at the last charge and the
    /// current rate, at least 1.
    fn debt_payment_rate(&self, limit: &Limit) -> u64 {
        self.rate.max(limit.requests).max(1)
    }

    fn cold_at_us(&self, ramp: &WarmUpRamp) -> u64 {
        if self.charged_at_us == 0 {
            0
        } else {
            self.charged_at_us.saturating_add(ramp.warm_up_us)
        }
    }
}

#[cfg(test)]
mod tests;
