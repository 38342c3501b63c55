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

use super::{Algorithm, Limit, MAX_TIME_US, MAX_UNITS};
use std::borrow::Cow;
use std::collections::VecDeque;

#[derive(Clone, Debug, Default)]
pub(super) struct TokenBucketState {
    /// Time of the last charge. 0: never charged.
    charged_at_us: u64,
    /// In units of 1 / per_us.
    debt: u64,
    /// Debt that a microsecond paid back at the last charge.
    rate: u64,
    /// Start of the last warm-up. 0: long ago.
    warm_up_start_us: u64,
    /// Recent charges, if some of their units may be credited.
    history: Option<Box<ChargeHistory>>,
    /// Leases that have not ended.
    leases: Option<Box<OutstandingLeases>>,
}

/// Leases as (end, units), ordered by their end. Their units are absent from the bucket until the
/// end, and then become a debt made at that moment.
#[derive(Clone, Debug)]
struct OutstandingLeases(VecDeque<(u64, u64)>);

/// Maximum leases of one bucket at a time: every read visits all of them.
const MAX_OUTSTANDING_LEASES: usize = 64;

impl TokenBucketState {
    /// Used units at `now_us`, rounded up: a part of a unit can't be taken.
    pub(super) fn used(&self, limit: &Limit, now_us: u64) -> u64 {
        let bucket = self.with_expired_leases(limit, now_us);
        bucket
            .total_owed(limit, now_us)
            .div_ceil(limit.per_us)
            .saturating_add(bucket.leased_units())
    }

    /// With `settles`, records the history that [`TokenBucketState::credit`] needs.
    pub(super) fn charge(&mut self, limit: &Limit, cost: u64, now_us: u64, settles: bool) {
        self.apply_expired_leases(limit, now_us);
        self.take_units(limit, cost, now_us, settles);
    }

    fn take_units(&mut self, limit: &Limit, cost: u64, now_us: u64, settles: bool) {
        let debt = self
            .total_owed(limit, now_us)
            .saturating_add(cost.saturating_mul(limit.per_us));
        self.set_debt(limit, debt, cost, now_us, settles);
    }

    /// Takes the available units, up to `cost`.
    pub(super) fn charge_rejected(&mut self, limit: &Limit, cost: u64, now_us: u64, settles: bool) {
        let mut bucket = self.with_expired_leases(limit, now_us).into_owned();
        let owed = bucket.total_owed(limit, now_us);
        let available_units = limit.capacity().saturating_sub(bucket.leased_units());
        let max_debt = available_units
            .saturating_mul(limit.per_us)
            .saturating_add(limit.delay_remainder());
        let debt = owed
            .saturating_add(cost.saturating_mul(limit.per_us))
            .min(max_debt);
        if debt > owed {
            bucket.set_debt(
                limit,
                debt,
                (debt - owed).div_ceil(limit.per_us),
                now_us,
                settles,
            );
            *self = bucket;
        }
    }

    /// Whether units can be leased until `until_us`.
    pub(super) fn can_grant(&self, limit: &Limit, now_us: u64, until_us: u64) -> bool {
        let bucket = self.with_expired_leases(limit, now_us);
        let is_in_order = |leases: &OutstandingLeases| {
            leases.0.len() < MAX_OUTSTANDING_LEASES
                && leases
                    .0
                    .back()
                    .is_none_or(|(last_us, _)| *last_us <= until_us)
        };
        WarmUpRamp::from_limit(limit).is_none() && bucket.leases.as_deref().is_none_or(is_in_order)
    }

    /// Takes units that are absent until `until_us`.
    pub(super) fn grant_lease(&mut self, limit: &Limit, units: u64, now_us: u64, until_us: u64) {
        self.apply_expired_leases(limit, now_us);
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
        let mut bucket = self.with_expired_leases(limit, now_us).into_owned();
        if bucket.return_leased_units(units, at_us)
            || bucket.reduce_debt(limit, units, at_us, now_us)
        {
            *self = bucket;
        }
    }

    /// Reduces the debt by units charged at `at_us`. Returns `false` without a debt.
    fn reduce_debt(&mut self, limit: &Limit, units: u64, at_us: u64, now_us: u64) -> bool {
        let debt = self.debt_at(limit, now_us);
        if debt == 0 {
            return false;
        }
        // All payments since then may have been for these units.
        let paid_back = now_us
            .saturating_sub(at_us)
            .saturating_mul(self.rate(limit));
        let debt_without_history =
            || debt.saturating_sub(units.saturating_mul(limit.per_us).saturating_sub(paid_back));
        let history = self
            .history
            .as_mut()
            .filter(|_| self.rate == limit.requests);
        let remaining_debt = history
            .and_then(|history| history.recompute_debt(limit, units, at_us, now_us))
            .unwrap_or_else(debt_without_history);
        self.debt -= debt.saturating_sub(remaining_debt);
        true
    }

    pub(super) fn newest_us(&self) -> u64 {
        self.charged_at_us
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

    /// When at most `units` are in use; `None` if only further charges can warm up the bucket so
    /// far.
    pub(super) fn usage_drop_time_us(&self, limit: &Limit, now_us: u64, units: u64) -> Option<u64> {
        let (mut bucket, mut now_us) = (self.with_expired_leases(limit, now_us), now_us);
        while let Some((until_us, leased_units)) = bucket.first_lease() {
            if let Some(units) = units.checked_sub(bucket.leased_units()) {
                let at_us = bucket.owed_units_drop_time_us(limit, now_us, units)?;
                if at_us <= until_us {
                    return Some(at_us);
                }
            }
            bucket
                .to_mut()
                .expire_first_lease(limit, until_us, leased_units);
            now_us = until_us;
        }
        bucket.owed_units_drop_time_us(limit, now_us, units)
    }

    /// [`Self::usage_drop_time_us`] without leases.
    fn owed_units_drop_time_us(&self, limit: &Limit, now_us: u64, units: u64) -> Option<u64> {
        let paid_back_at_us =
            self.debt_drop_time_us(limit, now_us, units.saturating_mul(limit.per_us));
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

    /// When the debt is at most `debt`, in units of 1 / per_us.
    pub(super) fn debt_drop_time_us(&self, limit: &Limit, now_us: u64, debt: u64) -> u64 {
        let wait_us = self
            .debt_at(limit, now_us)
            .saturating_sub(debt)
            .div_ceil(self.rate(limit));
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

    /// When the debt is paid and the bucket is cold again.
    pub(super) fn expires_at_us(&self, limit: &Limit) -> u64 {
        let bucket = self.with_expired_leases(limit, u64::MAX);
        let cold_at_us = WarmUpRamp::from_limit(limit).map_or(0, |ramp| bucket.cold_at_us(&ramp));
        bucket
            .debt_drop_time_us(limit, bucket.charged_at_us, 0)
            .max(cold_at_us)
    }

    /// Returns the bucket with all leases that ended before `now_us` turned into debt.
    fn with_expired_leases(&self, limit: &Limit, now_us: u64) -> Cow<'_, Self> {
        let mut bucket = Cow::Borrowed(self);
        while let Some((until_us, units)) = bucket
            .first_lease()
            .filter(|(until_us, _)| *until_us < now_us)
        {
            bucket.to_mut().expire_first_lease(limit, until_us, units);
        }
        bucket
    }

    fn apply_expired_leases(&mut self, limit: &Limit, now_us: u64) {
        if let Cow::Owned(bucket) = self.with_expired_leases(limit, now_us) {
            *self = bucket;
        }
    }

    fn expire_first_lease(&mut self, limit: &Limit, until_us: u64, units: u64) {
        self.leases = self.leases.take().filter(|leases| leases.0.len() > 1);
        if let Some(leases) = &mut self.leases {
            leases.0.pop_front();
        }
        self.take_units(limit, units, until_us, false);
    }

    /// Returns units of the lease that ends at `at_us`. Returns `false` if it has ended.
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
    fn first_lease(&self) -> Option<(u64, u64)> {
        self.leases
            .as_deref()
            .and_then(|leases| leases.0.front().copied())
    }

    fn leased_units(&self) -> u64 {
        self.leases
            .as_deref()
            .map_or(0, |leases| leases.0.iter().map(|(_, units)| units).sum())
    }

    /// The debt at `now_us`, in units of 1 / per_us.
    pub(super) fn debt_at(&self, limit: &Limit, now_us: u64) -> u64 {
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
            .saturating_sub(paying_us.saturating_mul(self.rate(limit)))
    }

    /// The debt, or the units missing from a cold bucket's capacity if those are more: they can't
    /// be taken.
    fn total_owed(&self, limit: &Limit, now_us: u64) -> u64 {
        let missing_units =
            WarmUpRamp::from_limit(limit).map_or(0, |ramp| match now_us < self.cold_at_us(&ramp) {
                true => ramp.missing_units_after(now_us - self.warm_up_start_us),
                false => ramp.missing_units,
            });
        self.debt_at(limit, now_us)
            .max(missing_units.saturating_mul(limit.per_us))
    }

    /// Sets the debt after a charge of at most `units`, up to the largest integer that is exact in
    /// Lua.
    fn set_debt(&mut self, limit: &Limit, debt: u64, units: u64, now_us: u64, settles: bool) {
        let before = self.total_owed(limit, now_us);
        let warm_up_start_us = match WarmUpRamp::from_limit(limit) {
            Some(ramp) if now_us < self.cold_at_us(&ramp) => self.warm_up_start_us,
            Some(_) => now_us,
            None => 0,
        };
        let history = (settles && WarmUpRamp::from_limit(limit).is_none()).then(|| {
            let known = self
                .history
                .take()
                .filter(|_| before > 0 && self.rate == limit.requests);
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

    fn rate(&self, limit: &Limit) -> u64 {
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

/// How a bucket warms up: in a hundred steps, so that integers suffice. After n steps it holds cold
/// + n / 100 × (burst − cold) units, rounded down, and fills at (100 + 2n) / 300 of the rate.
struct WarmUpRamp {
    warm_up_us: u64,
    /// Duration of one step, rounded up.
    step_us: u64,
    /// Units missing from the capacity of a cold bucket.
    missing_units: u64,
}

const RAMP_STEPS: u64 = 100;

impl WarmUpRamp {
    fn from_limit(limit: &Limit) -> Option<Self> {
        match limit.algorithm {
            Algorithm::TokenBucket { burst, warm_up_us } if warm_up_us > 0 => Some(Self {
                warm_up_us,
                step_us: warm_up_us.div_ceil(RAMP_STEPS),
                missing_units: burst - limit.cold_capacity(),
            }),
            _ => None,
        }
    }

    /// Converts the time since the start of the warm-up to the time in which the full rate adds as
    /// many units.
    fn full_rate_equivalent_us(&self, since_us: u64) -> u64 {
        let over_us = since_us.saturating_sub(RAMP_STEPS * self.step_us);
        let since_us = since_us - over_us;
        let steps = since_us / self.step_us;
        let rest_us = since_us - steps * self.step_us;
        over_us
            + (self.whole_steps_equivalent(steps) + rest_us * (RAMP_STEPS + 2 * steps))
                / (3 * RAMP_STEPS)
    }

    /// The shortest time since the start that is equivalent to `worth_us` at the full rate.
    fn shortest_elapsed_us(&self, worth_us: u64) -> u64 {
        let (all_us, all_worth_us) = (
            RAMP_STEPS * self.step_us,
            self.full_rate_equivalent_us(RAMP_STEPS * self.step_us),
        );
        if worth_us >= all_worth_us {
            return (worth_us - all_worth_us).saturating_add(all_us);
        }
        // The step is the largest n with whole_steps(n) ≤ worth: a quadratic equation.
        let worth = worth_us * 3 * RAMP_STEPS;
        let steps =
            (((RAMP_STEPS - 1).pow(2) + 4 * worth / self.step_us).isqrt() + 1 - RAMP_STEPS) / 2;
        steps * self.step_us
            + (worth - self.whole_steps_equivalent(steps)).div_ceil(RAMP_STEPS + 2 * steps)
    }

    /// The full-rate equivalent of the first `steps` steps, in 300ths of a microsecond.
    fn whole_steps_equivalent(&self, steps: u64) -> u64 {
        self.step_us * steps * (RAMP_STEPS - 1 + steps)
    }

    /// Units missing from the capacity `since_us` after the start.
    fn missing_units_after(&self, since_us: u64) -> u64 {
        self.missing_units
            - self.missing_units * (since_us / self.step_us).min(RAMP_STEPS) / RAMP_STEPS
    }

    /// How long after the start at most `units` are missing; `units` is less than at the start.
    fn missing_units_drop_us(&self, units: u64) -> u64 {
        ((self.missing_units - units) * RAMP_STEPS).div_ceil(self.missing_units) * self.step_us
    }
}

/// Units charged in each of the last 64 parts of a period, to recompute the debt with a smaller
/// charge. All charges of a part count as made at its end, so that the result is never too lax. It
/// is too strict by at most the payment of one part, however many units are credited.
#[derive(Clone, Debug)]
struct ChargeHistory {
    /// Start of the first part.
    start_us: u64,
    /// Debt at the start, in units of 1 / per_us.
    start_debt: u64,
    /// Units charged in each part.
    part_units: VecDeque<u64>,
}

const HISTORY_PARTS: u64 = 64;

impl ChargeHistory {
    fn new(debt: u64, now_us: u64) -> Self {
        Self {
            start_us: now_us,
            start_debt: debt,
            part_units: VecDeque::new(),
        }
    }

    fn record_charge(&mut self, limit: &Limit, units: u64, now_us: u64) {
        let part_us = limit.per_us.div_ceil(HISTORY_PARTS);
        let mut part_index = (now_us - self.start_us) / part_us;
        while part_index >= HISTORY_PARTS {
            let (parts, units) = match self.part_units.pop_front() {
                Some(units) => (1, units),
                None => (part_index + 1 - HISTORY_PARTS, 0),
            };
            self.start_debt = apply_payment_and_charge(
                self.start_debt,
                limit,
                parts.saturating_mul(part_us),
                units,
            );
            self.start_us += parts * part_us;
            part_index -= parts;
        }
        let part_index = usize::try_from(part_index).unwrap_or_default();
        if self.part_units.len() <= part_index {
            self.part_units.resize(part_index + 1, 0);
        }
        if let Some(part) = self.part_units.back_mut() {
            *part = part.saturating_add(units).min(MAX_UNITS);
        }
    }

    /// Removes `units` from the charge at `at_us` and returns the debt at `now_us`; `None` if the
    /// charge is too old.
    fn recompute_debt(
        &mut self,
        limit: &Limit,
        units: u64,
        at_us: u64,
        now_us: u64,
    ) -> Option<u64> {
        let part_us = limit.per_us.div_ceil(HISTORY_PARTS);
        let part_index = usize::try_from(at_us.checked_sub(self.start_us)? / part_us).ok()?;
        let part = self.part_units.get_mut(part_index)?;
        *part = part.saturating_sub(units);
        let (mut debt, mut from_us) = (self.start_debt, self.start_us);
        for units in &self.part_units {
            debt = apply_payment_and_charge(
                debt,
                limit,
                now_us.saturating_sub(from_us).min(part_us),
                *units,
            );
            from_us += part_us;
        }
        Some(apply_payment_and_charge(
            debt,
            limit,
            now_us.saturating_sub(from_us),
            0,
        ))
    }
}

fn apply_payment_and_charge(debt: u64, limit: &Limit, paying_us: u64, units: u64) -> u64 {
    let remaining_debt = debt.saturating_sub(paying_us.saturating_mul(limit.requests));
    remaining_debt
        .saturating_add(units.saturating_mul(limit.per_us))
        .min(MAX_UNITS)
}

#[cfg(test)]
mod tests {
    use super::super::{Amendment, Charge, KeyBuilder, MAX_WARM_UP_US, Refusal};
    use super::*;
    use proptest::prelude::*;

    const START_US: u64 = 1_800_000_000_000_123;

    fn limit(requests: u64, per_us: u64, burst: u64, warm_up_us: u64) -> Limit {
        Limit {
            requests,
            per_us,
            algorithm: Algorithm::TokenBucket { burst, warm_up_us },
        }
    }

    /// Simulates a warm-up microsecond by microsecond. Missing units are owed; the inflow is
    /// counted in 300ths.
    struct ReferenceWarmUp {
        limit: Limit,
        warm_up_us: u64,
        debt: u64,
        inflow_300ths: u64,
        last_us: Option<u64>,
        start_us: u64,
        now_us: u64,
    }

    impl ReferenceWarmUp {
        fn new(limit: Limit, warm_up_us: u64) -> Self {
            Self {
                limit,
                warm_up_us,
                debt: 0,
                inflow_300ths: 0,
                last_us: None,
                start_us: 0,
                now_us: START_US,
            }
        }

        fn step(&self) -> u64 {
            ((self.now_us - self.start_us) / self.warm_up_us.div_ceil(100)).min(100)
        }

        fn is_cold(&self) -> bool {
            self.last_us
                .is_none_or(|last_us| self.now_us >= last_us + self.warm_up_us)
        }

        fn advance_one_us(&mut self) {
            self.inflow_300ths += 100 + 2 * self.step();
            if self.inflow_300ths >= 300 {
                self.inflow_300ths -= 300;
                self.debt = self.debt.saturating_sub(self.limit.requests);
            }
            self.now_us += 1;
        }

        fn owed(&self) -> u64 {
            let missing_units = self.limit.capacity() - self.limit.cold_capacity();
            let warmed_up_units = if self.is_cold() {
                0
            } else {
                missing_units * self.step() / 100
            };
            self.debt
                .max((missing_units - warmed_up_units) * self.limit.per_us)
        }

        fn charge(&mut self, cost: u64) {
            self.debt = self.owed() + cost * self.limit.per_us;
            if self.is_cold() {
                (self.start_us, self.inflow_300ths) = (self.now_us, 0);
            }
            self.last_us = Some(self.now_us);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn a_warm_up_matches_a_simulation_of_every_microsecond(
            requests in 1u64..30, per_us in 1u64..900, burst in 1u64..40, warm_up_us in 1u64..700,
            requested in prop::collection::vec((0u64..300, 1u64..12), 1..40),
        ) {
            let limit = limit(requests, per_us, burst, warm_up_us);
            let (mut reference, mut bucket) = (ReferenceWarmUp::new(limit, warm_up_us), TokenBucketState::default());
            // The announced end of a refusal and the usage that ends it, if known.
            let mut waits: Option<(u64, u64)> = None;
            for (after_us, cost) in requested {
                for _ in 0..after_us {
                    reference.advance_one_us();
                    let now_us = reference.now_us;
                    prop_assert_eq!(bucket.used(&limit, now_us), reference.owed().div_ceil(per_us), "at {}", now_us);
                    if let Some((until_us, max_used)) = waits {
                        prop_assert_eq!(bucket.used(&limit, now_us) <= max_used, now_us >= until_us, "{} {}", until_us, now_us);
                    }
                }
                let now_us = reference.now_us;
                let cost = cost.min(limit.cold_capacity());
                let max_used = burst - cost;
                if bucket.used(&limit, now_us) <= max_used {
                    reference.charge(cost);
                    bucket.charge(&limit, cost, now_us, false);
                    waits = None;
                } else {
                    waits = Some((bucket.usage_drop_time_us(&limit, now_us, max_used).unwrap(), max_used));
                }
            }
        }
    }

    #[test]
    fn shortest_elapsed_time_inverts_the_full_rate_equivalent() {
        for warm_up_us in [1, 99, 100, 101, 12_345, 999_999, MAX_WARM_UP_US] {
            let ramp = WarmUpRamp {
                warm_up_us,
                step_us: warm_up_us.div_ceil(RAMP_STEPS),
                missing_units: 1,
            };
            let all_us = RAMP_STEPS * ramp.step_us;
            for n in 0..10_000 {
                let since_us = u64::try_from(u128::from(all_us) * n / 9_000).unwrap();
                let worth_us = ramp.full_rate_equivalent_us(since_us);
                let least_us = ramp.shortest_elapsed_us(worth_us);
                assert!(
                    least_us <= since_us && ramp.full_rate_equivalent_us(least_us) == worth_us,
                    "{warm_up_us} {since_us}"
                );
                assert!(
                    least_us == 0 || ramp.full_rate_equivalent_us(least_us - 1) < worth_us,
                    "{warm_up_us} {since_us}"
                );
            }
        }
    }

    /// Charges as (time, cost, final cost). The debt is recomputed from the start.
    struct ReferenceDebt(Vec<(u64, u64, u64)>);

    impl ReferenceDebt {
        fn debt_at(&self, limit: &Limit, now_us: u64) -> u64 {
            let paid = |debt: u64, from_us, to_us: u64| {
                debt.saturating_sub((to_us - from_us) * limit.requests)
            };
            let owed = self
                .0
                .iter()
                .fold((0, START_US), |(debt, from_us), (at_us, _, units)| {
                    (paid(debt, from_us, *at_us) + units * limit.per_us, *at_us)
                });
            paid(owed.0, owed.1, now_us)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]
        /// The debt is never below the debt with all final costs charged at once. If credits arrive
        /// within a period, it is above by at most the payment of a 64th.
        #[test]
        fn a_credit_lowers_the_debt_as_if_the_units_had_not_been_charged(
            requests in 1u64..300, per_us in 64u64..5_000, burst in 1u64..400, late in any::<bool>(),
            steps in prop::collection::vec((0u64..2_000, 1u64..60, 0u64..60, any::<prop::sample::Index>()), 1..150),
        ) {
            let limit = limit(requests, per_us, burst, 0);
            let (mut bucket, mut reference, mut open, mut now_us) = (TokenBucketState::default(), ReferenceDebt(Vec::new()), Vec::new(), START_US);
            for (after, cost, less, which) in steps {
                now_us += after * per_us / 16_000;
                if less % 2 == 0 {
                    bucket.charge(&limit, cost, now_us, true);
                    open.push(reference.0.len());
                    reference.0.push((now_us, cost, cost));
                } else if !open.is_empty() {
                    let at = open.swap_remove(which.index(open.len()));
                    let (at_us, cost, units) = &mut reference.0[at];
                    let less = less.min(*cost);
                    if late || now_us - *at_us < (HISTORY_PARTS - 1) * per_us.div_ceil(HISTORY_PARTS) {
                        *units -= less;
                        bucket.credit(&limit, less, *at_us, now_us);
                    }
                }
                let (actual, exact) = (bucket.debt_at(&limit, now_us), reference.debt_at(&limit, now_us));
                prop_assert!(actual >= exact, "{} < {}", actual, exact);
                if !late {
                    prop_assert!(actual <= exact + requests * per_us.div_ceil(HISTORY_PARTS), "{} > {}", actual, exact);
                }
            }
        }
    }

    /// 100,000 tokens a minute, with as many requests in flight as fit: 4,000 tokens reserved, 500
    /// used, after ten seconds.
    #[test]
    fn a_saturated_bucket_credits_nearly_all_unused_units() {
        const SECOND_US: u64 = 1_000_000;
        let limit = limit(100_000, 60 * SECOND_US, 100_000, 0);
        let (mut bucket, mut in_flight, mut reference) = (
            TokenBucketState::default(),
            VecDeque::new(),
            ReferenceDebt(Vec::new()),
        );
        let (mut settled, mut credited, mut reference_credited) = (0, 0, 0);
        for tick in 0..6_000 {
            let now_us = START_US + tick * SECOND_US / 10;
            while in_flight
                .front()
                .is_some_and(|at_us| at_us + 10 * SECOND_US <= now_us)
            {
                let at_us = in_flight.pop_front().unwrap();
                let before = (
                    bucket.debt_at(&limit, now_us),
                    reference.debt_at(&limit, now_us),
                );
                bucket.credit(&limit, 3_500, at_us, now_us);
                reference.0[settled].2 = 500;
                settled += 1;
                credited += before.0 - bucket.debt_at(&limit, now_us);
                reference_credited += before.1 - reference.debt_at(&limit, now_us);
            }
            while bucket.used(&limit, now_us) + 4_000 <= 100_000 {
                bucket.charge(&limit, 4_000, now_us, true);
                reference.0.push((now_us, 4_000, 4_000));
                in_flight.push_back(now_us);
            }
        }
        let requested = u64::try_from(settled).unwrap() * 3_500 * limit.per_us;
        assert!(
            settled > 1_600 && credited > requested / 100 * 97,
            "{credited} of {requested}, {settled} times"
        );
        assert!(
            credited > reference_credited / 1_000 * 999,
            "{credited} credited instead of {reference_credited}"
        );
        assert!(bucket.heap_bytes() < 1_024);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]
        /// For any charges, settlements and refusals: a rejected charge takes the available units
        /// and no more, and each announced time is the first at which it is true.
        #[test]
        fn a_rejected_charge_takes_the_available_units_only(
            requests in 1u64..30, per_us in 1u64..900, burst in 1u64..40, warm_up_us in prop::sample::select(vec![0, 300]),
            max_delay_us in prop::option::of(0u64..2_000),
            steps in prop::collection::vec((0u64..200, 1u64..60, 0u8..3), 1..40),
        ) {
            let algorithm = match max_delay_us {
                None => Algorithm::TokenBucket { burst, warm_up_us },
                Some(max_delay_us) => Algorithm::LeakyBucket { max_delay_us },
            };
            let limit = Limit { requests, per_us, algorithm };
            let (capacity, key) = (limit.capacity(), KeyBuilder::new("p").finish());
            let (mut state, mut now_us) = (limit.initial_state(), START_US);
            for (after_us, cost, operation) in steps {
                now_us += after_us;
                let charge = Charge { settles: operation == 0, ..Charge::new(&limit, &key, cost) };
                let before = state.view_at(&limit, now_us).used();
                match operation {
                    0 if before + cost <= capacity => state.charge(&charge, now_us),
                    1 => state.amend(&limit, Amendment::Charge(cost), now_us),
                    _ => {
                        state.charge_rejected(&charge, now_us);
                        let used = state.view_at(&limit, now_us).used();
                        let most = before.max(capacity.min(before + cost));
                        // A queue shorter than its slack has all of its capacity free.
                        let least = if max_delay_us.is_some() { most.saturating_sub(1).max(before) } else { most };
                        prop_assert!((least..=most).contains(&used), "{} used, {} rejected: {} used", before, cost, used);
                        if before < capacity && cost > capacity && warm_up_us == 0 {
                            let next_unit_us = now_us + per_us.div_ceil(requests);
                            prop_assert_eq!(state.view_at(&limit, now_us).refusal(1), Some(Refusal::Until(next_unit_us)));
                        }
                    }
                }
                let view = state.view_at(&limit, now_us);
                if let Some(Refusal::Until(until_us)) = view.refusal(1) {
                    prop_assert!(until_us > now_us);
                    prop_assert!(state.view_at(&limit, until_us - 1).refusal(1).is_some());
                    prop_assert!(state.view_at(&limit, until_us).refusal(1).is_none());
                }
                let expires_us = state.expires_at_us(&limit);
                let fresh = limit.initial_state().view_at(&limit, expires_us).used();
                prop_assert_eq!(state.view_at(&limit, expires_us).used(), fresh);
            }
        }
    }

    #[test]
    fn a_debt_saturates_at_the_largest_exact_number() {
        let limit = limit(1, 34_560_000_000_000, 260, 0);
        let mut bucket = TokenBucketState::default();
        for _ in 0..3 {
            bucket.charge(&limit, MAX_UNITS, START_US, true);
            assert_eq!(bucket.debt_at(&limit, START_US), MAX_UNITS);
            assert_eq!(
                bucket.usage_drop_time_us(&limit, START_US, 259),
                Some(START_US + MAX_UNITS - 259 * limit.per_us)
            );
            assert_eq!(bucket.expires_at_us(&limit), MAX_TIME_US);
        }
        bucket.credit(&limit, MAX_UNITS, START_US, START_US);
        assert!(bucket.debt_at(&limit, START_US) <= MAX_UNITS);
    }
}
