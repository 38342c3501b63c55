//! The recent charges of a token bucket, kept so that credits are exact.

use crate::limiter::{Limit, MAX_UNITS};
use std::collections::VecDeque;

/// Units charged in each of the last 64 parts of a period, to recompute the debt with a smaller
/// charge. All charges of a part count as made at its end, so that the result is never too lax. The
/// result is too strict by at most the payment of one part, however many units are credited.
#[derive(Clone, Debug)]
pub(super) struct ChargeHistory {
    /// Start of the first part.
    start_us: u64,
    /// Debt at the start, in units of 1 / per_us.
    start_debt: u64,
    /// Units charged in each part.
    pub(super) part_units: VecDeque<u64>,
}

pub(super) const HISTORY_PART_COUNT: u64 = 64;

impl ChargeHistory {
    pub(super) fn new(debt: u64, now_us: u64) -> Self {
        Self {
            start_us: now_us,
            start_debt: debt,
            part_units: VecDeque::new(),
        }
    }

    pub(super) fn record_charge(&mut self, limit: &Limit, units: u64, now_us: u64) {
        let part_us = limit.per_us.div_ceil(HISTORY_PART_COUNT);
        let mut part_index = (now_us - self.start_us) / part_us;
        while part_index >= HISTORY_PART_COUNT {
            let (parts, units) = match self.part_units.pop_front() {
                Some(units) => (1, units),
                None => (part_index + 1 - HISTORY_PART_COUNT, 0),
            };
            let paying_us = parts.saturating_mul(part_us);
            self.start_debt = apply_payment_and_charge(self.start_debt, limit, paying_us, units);
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
    pub(super) fn credit_and_recompute_debt(
        &mut self,
        limit: &Limit,
        units: u64,
        at_us: u64,
        now_us: u64,
    ) -> Option<u64> {
        let part_us = limit.per_us.div_ceil(HISTORY_PART_COUNT);
        let part_index = usize::try_from(at_us.checked_sub(self.start_us)? / part_us).ok()?;
        let part = self.part_units.get_mut(part_index)?;
        *part = part.saturating_sub(units);
        let (mut debt, mut from_us) = (self.start_debt, self.start_us);
        for units in &self.part_units {
            let paying_us = now_us.saturating_sub(from_us).min(part_us);
            debt = apply_payment_and_charge(debt, limit, paying_us, *units);
            from_us += part_us;
        }
        let paying_us = now_us.saturating_sub(from_us);
        Some(apply_payment_and_charge(debt, limit, paying_us, 0))
    }
}

fn apply_payment_and_charge(debt: u64, limit: &Limit, paying_us: u64, units: u64) -> u64 {
    let remaining_debt = debt.saturating_sub(paying_us.saturating_mul(limit.requests));
    remaining_debt
        .saturating_add(units.saturating_mul(limit.per_us))
        .min(MAX_UNITS)
}
