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
//! Memory: three numbers; one more with `warm_up`; with costs that are settled later up to 66 more; two per lease.
//!
//! `warm_up`: a bucket that was not charged for so long, or never, is cold. It holds a third of `burst` (at least a
//! unit) and fills at a third of the rate; both grow evenly from the first charge on ([`Ramp`]). What its capacity
//! lacks is owed: the charge that ends the cold makes it a debt. So it is never laxer than without, and from a cold
//! start on no more than a third of burst, and what flows in meanwhile, is taken.

use super::{Algorithm, LAST_US, Limit, MAX_UNITS};
use std::borrow::Cow;
use std::collections::VecDeque;

#[derive(Clone, Debug, Default)]
pub(super) struct Bucket {
    /// When the debt was last charged. 0: never.
    at_us: u64,
    /// In units of 1 / per_us.
    debt: u64,
    /// What a microsecond paid back then.
    rate: u64,
    /// When the last warm-up began. 0: long ago.
    start_us: u64,
    /// What was charged lately, where some of it may come back.
    past: Option<Box<Past>>,
    /// What is lent.
    lent: Option<Box<Lent>>,
}

/// Units that are absent from the bucket until their lease ends, and then become a debt made at that moment. In the
/// order of their ends.
#[derive(Clone, Debug)]
struct Lent(VecDeque<(u64, u64)>);

/// Leases that one bucket bears at a time: every look passes them.
const MAX_LENT: usize = 64;

impl Bucket {
    /// Whole units in debt at `now_us`: a part of one cannot be taken again.
    pub(super) fn used(&self, limit: &Limit, now_us: u64) -> u64 {
        let bucket = self.settled(limit, now_us);
        bucket
            .owed(limit, now_us)
            .div_ceil(limit.per_us)
            .saturating_add(bucket.lent_units())
    }

    /// With `settles`, remembers what [`Bucket::credit`] has to know later.
    pub(super) fn charge(&mut self, limit: &Limit, cost: u64, now_us: u64, settles: bool) {
        self.settle(limit, now_us);
        self.take(limit, cost, now_us, settles);
    }

    fn take(&mut self, limit: &Limit, cost: u64, now_us: u64, settles: bool) {
        let debt = self
            .owed(limit, now_us)
            .saturating_add(cost.saturating_mul(limit.per_us));
        self.owe(limit, debt, cost, now_us, settles);
    }

    /// Takes what there is, up to `cost`.
    pub(super) fn press(&mut self, limit: &Limit, cost: u64, now_us: u64, settles: bool) {
        let mut bucket = self.settled(limit, now_us).into_owned();
        let owed = bucket.owed(limit, now_us);
        let room = limit.capacity().saturating_sub(bucket.lent_units());
        let most = room
            .saturating_mul(limit.per_us)
            .saturating_add(limit.slack());
        let debt = owed
            .saturating_add(cost.saturating_mul(limit.per_us))
            .min(most);
        if debt > owed {
            bucket.owe(
                limit,
                debt,
                (debt - owed).div_ceil(limit.per_us),
                now_us,
                settles,
            );
            *self = bucket;
        }
    }

    /// Whether units can be lent until a time.
    pub(super) fn lends(&self, limit: &Limit, now_us: u64, until_us: u64) -> bool {
        let bucket = self.settled(limit, now_us);
        let is_in_order = |lent: &Lent| {
            lent.0.len() < MAX_LENT
                && lent
                    .0
                    .back()
                    .is_none_or(|(last_us, _)| *last_us <= until_us)
        };
        Ramp::of(limit).is_none() && bucket.lent.as_deref().is_none_or(is_in_order)
    }

    /// Takes units that are absent until a time.
    pub(super) fn lend(&mut self, limit: &Limit, units: u64, now_us: u64, until_us: u64) {
        self.settle(limit, now_us);
        let lent = &mut self
            .lent
            .get_or_insert_with(|| Box::new(Lent(VecDeque::new())))
            .0;
        match lent.back_mut() {
            Some((last_us, lent)) if *last_us == until_us => *lent += units,
            _ => lent.push_back((until_us, units)),
        }
    }

    /// Gives back what still counts of `units` charged at `at_us`: never more than what the debt would be less by,
    /// had they not been charged. It is no charge: a bucket stays as cold as it is.
    pub(super) fn credit(&mut self, limit: &Limit, units: u64, at_us: u64, now_us: u64) {
        let mut bucket = self.settled(limit, now_us).into_owned();
        if bucket.take_back(units, at_us) || bucket.lower(limit, units, at_us, now_us) {
            *self = bucket;
        }
    }

    /// Takes units off a debt. `false` if there is none.
    fn lower(&mut self, limit: &Limit, units: u64, at_us: u64, now_us: u64) -> bool {
        let debt = self.debt_at(limit, now_us);
        if debt == 0 {
            return false;
        }
        // Perhaps all that was paid since was paid for it.
        let paid = now_us
            .saturating_sub(at_us)
            .saturating_mul(self.rate(limit));
        let without =
            || debt.saturating_sub(units.saturating_mul(limit.per_us).saturating_sub(paid));
        let past = self.past.as_mut().filter(|_| self.rate == limit.requests);
        let left = past
            .and_then(|past| past.debt_without(limit, units, at_us, now_us))
            .unwrap_or_else(without);
        self.debt -= debt.saturating_sub(left);
        true
    }

    pub(super) fn newest_us(&self) -> u64 {
        self.at_us
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let past = |past: &Past| size_of::<Past>() + past.units.capacity() * size_of::<u64>();
        let lent = |lent: &Lent| size_of::<Lent>() + lent.0.capacity() * size_of::<(u64, u64)>();
        self.past.as_deref().map_or(0, past) + self.lent.as_deref().map_or(0, lent)
    }

    /// When at most `units` are in debt; `None` if only charges can warm the bucket up for that.
    pub(super) fn at_most_at_us(&self, limit: &Limit, now_us: u64, units: u64) -> Option<u64> {
        let (mut bucket, mut now_us) = (self.settled(limit, now_us), now_us);
        while let Some((until_us, lent)) = bucket.first_lent() {
            if let Some(units) = units.checked_sub(bucket.lent_units()) {
                let at_us = bucket.owes_at_most_at_us(limit, now_us, units)?;
                if at_us <= until_us {
                    return Some(at_us);
                }
            }
            bucket.to_mut().end_lease(limit, until_us, lent);
            now_us = until_us;
        }
        bucket.owes_at_most_at_us(limit, now_us, units)
    }

    /// The same of the debt alone.
    fn owes_at_most_at_us(&self, limit: &Limit, now_us: u64, units: u64) -> Option<u64> {
        let paid_at_us = self.pays_down_at_us(limit, now_us, units.saturating_mul(limit.per_us));
        match Ramp::of(limit) {
            Some(ramp) if ramp.lacks > units => {
                let at_us =
                    paid_at_us.max(self.start_us.saturating_add(ramp.lacks_at_most_us(units)));
                (at_us < self.cold_at_us(&ramp)).then_some(at_us)
            }
            _ => Some(paid_at_us),
        }
    }

    /// When the debt is at most this, in units of 1 / per_us.
    pub(super) fn pays_down_at_us(&self, limit: &Limit, now_us: u64, debt: u64) -> u64 {
        let wait_us = self
            .debt_at(limit, now_us)
            .saturating_sub(debt)
            .div_ceil(self.rate(limit));
        let at_us = match Ramp::of(limit) {
            Some(ramp) if wait_us > 0 => {
                let worth_us = ramp
                    .worth_us(now_us - self.start_us)
                    .saturating_add(wait_us);
                self.start_us.saturating_add(ramp.lasts_us(worth_us))
            }
            _ => now_us.saturating_add(wait_us),
        };
        at_us.min(LAST_US)
    }

    /// When all is paid, and the bucket cold again.
    pub(super) fn expires_at_us(&self, limit: &Limit) -> u64 {
        let bucket = self.settled(limit, u64::MAX);
        let cold_at_us = Ramp::of(limit).map_or(0, |ramp| bucket.cold_at_us(&ramp));
        bucket
            .pays_down_at_us(limit, bucket.at_us, 0)
            .max(cold_at_us)
    }

    /// With the leases that have ended before a time made debts.
    fn settled(&self, limit: &Limit, now_us: u64) -> Cow<'_, Self> {
        let mut bucket = Cow::Borrowed(self);
        while let Some((until_us, units)) = bucket
            .first_lent()
            .filter(|(until_us, _)| *until_us < now_us)
        {
            bucket.to_mut().end_lease(limit, until_us, units);
        }
        bucket
    }

    fn settle(&mut self, limit: &Limit, now_us: u64) {
        if let Cow::Owned(bucket) = self.settled(limit, now_us) {
            *self = bucket;
        }
    }

    fn end_lease(&mut self, limit: &Limit, until_us: u64, units: u64) {
        self.lent = self.lent.take().filter(|lent| lent.0.len() > 1);
        if let Some(lent) = &mut self.lent {
            lent.0.pop_front();
        }
        self.take(limit, units, until_us, false);
    }

    /// Gives back what was lent until `at_us`; `false` if that isn't lent any more.
    fn take_back(&mut self, units: u64, at_us: u64) -> bool {
        let Some(lent) = &mut self.lent else {
            return false;
        };
        let Some(nth) = lent.0.iter().position(|(until_us, _)| *until_us == at_us) else {
            return false;
        };
        if let Some((_, left)) = lent.0.get_mut(nth) {
            *left = left.saturating_sub(units);
        }
        lent.0.retain(|(_, left)| *left > 0);
        self.lent = self.lent.take().filter(|lent| !lent.0.is_empty());
        true
    }

    /// The lease that ends first: when, and how many units.
    fn first_lent(&self) -> Option<(u64, u64)> {
        self.lent
            .as_deref()
            .and_then(|lent| lent.0.front().copied())
    }

    fn lent_units(&self) -> u64 {
        self.lent
            .as_deref()
            .map_or(0, |lent| lent.0.iter().map(|(_, units)| units).sum())
    }

    /// In units of 1 / per_us.
    pub(super) fn debt_at(&self, limit: &Limit, now_us: u64) -> u64 {
        let paying_us = match Ramp::of(limit) {
            None => now_us.saturating_sub(self.at_us),
            Some(ramp) => {
                let worth_us = |at_us: u64| ramp.worth_us(at_us.saturating_sub(self.start_us));
                worth_us(now_us).saturating_sub(worth_us(self.at_us))
            }
        };
        self.debt
            .saturating_sub(paying_us.saturating_mul(self.rate(limit)))
    }

    /// The debt, and what the capacity lacks: what was not there can't be taken.
    fn owed(&self, limit: &Limit, now_us: u64) -> u64 {
        let lacks = Ramp::of(limit).map_or(0, |ramp| match now_us < self.cold_at_us(&ramp) {
            true => ramp.lacks_after(now_us - self.start_us),
            false => ramp.lacks,
        });
        self.debt_at(limit, now_us)
            .max(lacks.saturating_mul(limit.per_us))
    }

    /// Makes the debt so large, by `units` or a little less. Not above what Lua counts exactly.
    fn owe(&mut self, limit: &Limit, debt: u64, units: u64, now_us: u64, settles: bool) {
        let before = self.owed(limit, now_us);
        let start_us = match Ramp::of(limit) {
            Some(ramp) if now_us < self.cold_at_us(&ramp) => self.start_us,
            Some(_) => now_us,
            None => 0,
        };
        let past = (settles && Ramp::of(limit).is_none()).then(|| {
            let known = self
                .past
                .take()
                .filter(|_| before > 0 && self.rate == limit.requests);
            let mut past = known.unwrap_or_else(|| Box::new(Past::new(before, now_us)));
            past.add(limit, units, now_us);
            past
        });
        let (debt, lent) = (debt.min(MAX_UNITS), self.lent.take());
        *self = Self {
            at_us: now_us,
            debt,
            rate: limit.requests,
            start_us,
            past,
            lent,
        };
    }

    fn rate(&self, limit: &Limit) -> u64 {
        self.rate.max(limit.requests).max(1)
    }

    fn cold_at_us(&self, ramp: &Ramp) -> u64 {
        if self.at_us == 0 {
            0
        } else {
            self.at_us.saturating_add(ramp.warm_up_us)
        }
    }
}

/// How a bucket warms up: in a hundred steps, so that whole numbers suffice. After n of them it holds
/// cold + n / 100 × (burst − cold) units, rounded down, and fills at (100 + 2n) / 300 of the rate.
struct Ramp {
    warm_up_us: u64,
    /// Of one step, rounded up.
    width_us: u64,
    /// Units that the capacity of a cold bucket lacks.
    lacks: u64,
}

const STEPS: u64 = 100;

impl Ramp {
    fn of(limit: &Limit) -> Option<Self> {
        match limit.algorithm {
            Algorithm::TokenBucket { burst, warm_up_us } if warm_up_us > 0 => Some(Self {
                warm_up_us,
                width_us: warm_up_us.div_ceil(STEPS),
                lacks: burst - limit.cold_capacity(),
            }),
            _ => None,
        }
    }

    /// Microseconds at the full rate in which as much flows in as in so many from the start on.
    fn worth_us(&self, since_us: u64) -> u64 {
        let over_us = since_us.saturating_sub(STEPS * self.width_us);
        let since_us = since_us - over_us;
        let steps = since_us / self.width_us;
        let rest_us = since_us - steps * self.width_us;
        over_us + (self.whole_steps(steps) + rest_us * (STEPS + 2 * steps)) / (3 * STEPS)
    }

    /// The shortest time that is worth so much.
    fn lasts_us(&self, worth_us: u64) -> u64 {
        let (all_us, all_worth_us) = (STEPS * self.width_us, self.worth_us(STEPS * self.width_us));
        if worth_us >= all_worth_us {
            return (worth_us - all_worth_us).saturating_add(all_us);
        }
        // The step: the largest n with whole_steps(n) ≤ worth, a quadratic equation.
        let worth = worth_us * 3 * STEPS;
        let steps = (((STEPS - 1).pow(2) + 4 * worth / self.width_us).isqrt() + 1 - STEPS) / 2;
        steps * self.width_us + (worth - self.whole_steps(steps)).div_ceil(STEPS + 2 * steps)
    }

    /// What the first `steps` are worth, in 300ths of a microsecond.
    fn whole_steps(&self, steps: u64) -> u64 {
        self.width_us * steps * (STEPS - 1 + steps)
    }

    /// Units that the capacity lacks so long after the start.
    fn lacks_after(&self, since_us: u64) -> u64 {
        self.lacks - self.lacks * (since_us / self.width_us).min(STEPS) / STEPS
    }

    /// After how long it lacks at most `units`, which are less than at the start.
    fn lacks_at_most_us(&self, units: u64) -> u64 {
        ((self.lacks - units) * STEPS).div_ceil(self.lacks) * self.width_us
    }
}

/// What was charged in each of the last 64 parts of a period: who knows that can reckon the debt anew, with a charge
/// made smaller. To be no laxer than the truth it takes all charges of a part as made at its end; so it is at most
/// what one part pays back too strict, however much is settled.
#[derive(Clone, Debug)]
struct Past {
    /// Of the first part.
    start_us: u64,
    /// Debt at the start, in units of 1 / per_us.
    debt: u64,
    /// Charged in each part.
    units: VecDeque<u64>,
}

const PARTS: u64 = 64;

impl Past {
    fn new(debt: u64, now_us: u64) -> Self {
        Self {
            start_us: now_us,
            debt,
            units: VecDeque::new(),
        }
    }

    fn add(&mut self, limit: &Limit, units: u64, now_us: u64) {
        let width_us = limit.per_us.div_ceil(PARTS);
        let mut place = (now_us - self.start_us) / width_us;
        while place >= PARTS {
            let (parts, units) = match self.units.pop_front() {
                Some(units) => (1, units),
                None => (place + 1 - PARTS, 0),
            };
            self.debt = pay_and_charge(self.debt, limit, parts.saturating_mul(width_us), units);
            self.start_us += parts * width_us;
            place -= parts;
        }
        let place = usize::try_from(place).unwrap_or_default();
        if self.units.len() <= place {
            self.units.resize(place + 1, 0);
        }
        if let Some(part) = self.units.back_mut() {
            *part = part.saturating_add(units).min(MAX_UNITS);
        }
    }

    /// The debt at `now_us`, with `units` taken off what was charged at `at_us`, if that is known.
    fn debt_without(&mut self, limit: &Limit, units: u64, at_us: u64, now_us: u64) -> Option<u64> {
        let width_us = limit.per_us.div_ceil(PARTS);
        let place = usize::try_from(at_us.checked_sub(self.start_us)? / width_us).ok()?;
        let part = self.units.get_mut(place)?;
        *part = part.saturating_sub(units);
        let (mut debt, mut from_us) = (self.debt, self.start_us);
        for units in &self.units {
            debt = pay_and_charge(
                debt,
                limit,
                now_us.saturating_sub(from_us).min(width_us),
                *units,
            );
            from_us += width_us;
        }
        Some(pay_and_charge(
            debt,
            limit,
            now_us.saturating_sub(from_us),
            0,
        ))
    }
}

fn pay_and_charge(debt: u64, limit: &Limit, paying_us: u64, units: u64) -> u64 {
    let left = debt.saturating_sub(paying_us.saturating_mul(limit.requests));
    left.saturating_add(units.saturating_mul(limit.per_us))
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

    /// A warm-up microsecond by microsecond: what is not there is owed, what flows in is counted in 300ths.
    struct Slow {
        limit: Limit,
        warm_up_us: u64,
        debt: u64,
        flow: u64,
        last_us: Option<u64>,
        start_us: u64,
        now_us: u64,
    }

    impl Slow {
        fn new(limit: Limit, warm_up_us: u64) -> Self {
            Self {
                limit,
                warm_up_us,
                debt: 0,
                flow: 0,
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

        fn tick(&mut self) {
            self.flow += 100 + 2 * self.step();
            if self.flow >= 300 {
                self.flow -= 300;
                self.debt = self.debt.saturating_sub(self.limit.requests);
            }
            self.now_us += 1;
        }

        fn owed(&self) -> u64 {
            let lacks = self.limit.capacity() - self.limit.cold_capacity();
            let there = if self.is_cold() {
                0
            } else {
                lacks * self.step() / 100
            };
            self.debt.max((lacks - there) * self.limit.per_us)
        }

        fn charge(&mut self, cost: u64) {
            self.debt = self.owed() + cost * self.limit.per_us;
            if self.is_cold() {
                (self.start_us, self.flow) = (self.now_us, 0);
            }
            self.last_us = Some(self.now_us);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn a_bucket_warms_up_as_if_every_microsecond_were_counted(
            requests in 1u64..30, per_us in 1u64..900, burst in 1u64..40, warm_up_us in 1u64..700,
            asks in prop::collection::vec((0u64..300, 1u64..12), 1..40),
        ) {
            let limit = limit(requests, per_us, burst, warm_up_us);
            let (mut slow, mut bucket) = (Slow::new(limit, warm_up_us), Bucket::default());
            // Refused: until when, if that is known.
            let mut waits: Option<(u64, u64)> = None;
            for (after_us, cost) in asks {
                for _ in 0..after_us {
                    slow.tick();
                    let now_us = slow.now_us;
                    prop_assert_eq!(bucket.used(&limit, now_us), slow.owed().div_ceil(per_us), "at {}", now_us);
                    if let Some((until_us, room)) = waits {
                        prop_assert_eq!(bucket.used(&limit, now_us) <= room, now_us >= until_us, "{} {}", until_us, now_us);
                    }
                }
                let now_us = slow.now_us;
                let cost = cost.min(limit.cold_capacity());
                let room = burst - cost;
                if bucket.used(&limit, now_us) <= room {
                    slow.charge(cost);
                    bucket.charge(&limit, cost, now_us, false);
                    waits = None;
                } else {
                    waits = Some((bucket.at_most_at_us(&limit, now_us, room).unwrap(), room));
                }
            }
        }
    }

    #[test]
    fn every_worth_of_a_warm_up_is_found_back() {
        for warm_up_us in [1, 99, 100, 101, 12_345, 999_999, MAX_WARM_UP_US] {
            let ramp = Ramp {
                warm_up_us,
                width_us: warm_up_us.div_ceil(STEPS),
                lacks: 1,
            };
            let all_us = STEPS * ramp.width_us;
            for n in 0..10_000 {
                let since_us = u64::try_from(u128::from(all_us) * n / 9_000).unwrap();
                let worth_us = ramp.worth_us(since_us);
                let least_us = ramp.lasts_us(worth_us);
                assert!(
                    least_us <= since_us && ramp.worth_us(least_us) == worth_us,
                    "{warm_up_us} {since_us}"
                );
                assert!(
                    least_us == 0 || ramp.worth_us(least_us - 1) < worth_us,
                    "{warm_up_us} {since_us}"
                );
            }
        }
    }

    /// Charges and what each turned out to be worth, reckoned anew from the start.
    struct Known(Vec<(u64, u64, u64)>);

    impl Known {
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
        /// Never laxer than had every charge been made with what it turned out to be; and what is settled within a
        /// period at most a 64th of that stricter.
        #[test]
        fn what_is_settled_comes_back_as_if_it_had_not_been_charged(
            requests in 1u64..300, per_us in 64u64..5_000, burst in 1u64..400, late in any::<bool>(),
            steps in prop::collection::vec((0u64..2_000, 1u64..60, 0u64..60, any::<prop::sample::Index>()), 1..150),
        ) {
            let limit = limit(requests, per_us, burst, 0);
            let (mut bucket, mut known, mut open, mut now_us) = (Bucket::default(), Known(Vec::new()), Vec::new(), START_US);
            for (after, cost, less, which) in steps {
                now_us += after * per_us / 16_000;
                if less % 2 == 0 {
                    bucket.charge(&limit, cost, now_us, true);
                    open.push(known.0.len());
                    known.0.push((now_us, cost, cost));
                } else if !open.is_empty() {
                    let at = open.swap_remove(which.index(open.len()));
                    let (at_us, cost, units) = &mut known.0[at];
                    let less = less.min(*cost);
                    if late || now_us - *at_us < (PARTS - 1) * per_us.div_ceil(PARTS) {
                        *units -= less;
                        bucket.credit(&limit, less, *at_us, now_us);
                    }
                }
                let (ours, truth) = (bucket.debt_at(&limit, now_us), known.debt_at(&limit, now_us));
                prop_assert!(ours >= truth, "{} < {}", ours, truth);
                if !late {
                    prop_assert!(ours <= truth + requests * per_us.div_ceil(PARTS), "{} > {}", ours, truth);
                }
            }
        }
    }

    /// 100,000 tokens a minute, always as many in flight as fit: 4,000 reserved, 500 used, after ten seconds.
    #[test]
    fn a_saturated_bucket_gives_nearly_all_back() {
        const SECOND_US: u64 = 1_000_000;
        let limit = limit(100_000, 60 * SECOND_US, 100_000, 0);
        let (mut bucket, mut in_flight, mut known) =
            (Bucket::default(), VecDeque::new(), Known(Vec::new()));
        let (mut settled, mut back, mut truly_back) = (0, 0, 0);
        for tick in 0..6_000 {
            let now_us = START_US + tick * SECOND_US / 10;
            while in_flight
                .front()
                .is_some_and(|at_us| at_us + 10 * SECOND_US <= now_us)
            {
                let at_us = in_flight.pop_front().unwrap();
                let before = (
                    bucket.debt_at(&limit, now_us),
                    known.debt_at(&limit, now_us),
                );
                bucket.credit(&limit, 3_500, at_us, now_us);
                known.0[settled].2 = 500;
                settled += 1;
                back += before.0 - bucket.debt_at(&limit, now_us);
                truly_back += before.1 - known.debt_at(&limit, now_us);
            }
            while bucket.used(&limit, now_us) + 4_000 <= 100_000 {
                bucket.charge(&limit, 4_000, now_us, true);
                known.0.push((now_us, 4_000, 4_000));
                in_flight.push_back(now_us);
            }
        }
        let asked = u64::try_from(settled).unwrap() * 3_500 * limit.per_us;
        assert!(
            settled > 1_600 && back > asked / 100 * 97,
            "{back} of {asked}, {settled} times"
        );
        assert!(
            back > truly_back / 1_000 * 999,
            "{back}, and it should be {truly_back}"
        );
        assert!(bucket.heap_bytes() < 1_024);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]
        /// Whatever is charged, settled and refused: a refusal takes what there is and no more, and every time that
        /// is told is the first at which it is so.
        #[test]
        fn a_refusal_that_counts_takes_what_there_is(
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
            let (mut state, mut now_us) = (limit.fresh(), START_US);
            for (after_us, cost, what) in steps {
                now_us += after_us;
                let charge = Charge { settles: what == 0, ..Charge::new(&limit, &key, cost) };
                let before = state.at(&limit, now_us).used();
                match what {
                    0 if before + cost <= capacity => state.charge(&charge, now_us),
                    1 => state.amend(&limit, Amendment::Charge(cost), now_us),
                    _ => {
                        state.press(&charge, now_us);
                        let used = state.at(&limit, now_us).used();
                        let most = before.max(capacity.min(before + cost));
                        // A line that is less than its slack long has all of its capacity free.
                        let least = if max_delay_us.is_some() { most.saturating_sub(1).max(before) } else { most };
                        prop_assert!((least..=most).contains(&used), "{} and {} are {}", before, cost, used);
                        if before < capacity && cost > capacity && warm_up_us == 0 {
                            let place_us = now_us + per_us.div_ceil(requests);
                            prop_assert_eq!(state.at(&limit, now_us).refusal(1), Some(Refusal::Until(place_us)));
                        }
                    }
                }
                let view = state.at(&limit, now_us);
                if let Some(Refusal::Until(until_us)) = view.refusal(1) {
                    prop_assert!(until_us > now_us);
                    prop_assert!(state.at(&limit, until_us - 1).refusal(1).is_some());
                    prop_assert!(state.at(&limit, until_us).refusal(1).is_none());
                }
                let expires_us = state.expires_at_us(&limit);
                let fresh = limit.fresh().at(&limit, expires_us).used();
                prop_assert_eq!(state.at(&limit, expires_us).used(), fresh);
            }
        }
    }

    #[test]
    fn a_debt_that_no_number_holds_is_as_large_as_one_can_be() {
        let limit = limit(1, 34_560_000_000_000, 260, 0);
        let mut bucket = Bucket::default();
        for _ in 0..3 {
            bucket.charge(&limit, MAX_UNITS, START_US, true);
            assert_eq!(bucket.debt_at(&limit, START_US), MAX_UNITS);
            assert_eq!(
                bucket.at_most_at_us(&limit, START_US, 259),
                Some(START_US + MAX_UNITS - 259 * limit.per_us)
            );
            assert_eq!(bucket.expires_at_us(&limit), LAST_US);
        }
        bucket.credit(&limit, MAX_UNITS, START_US, START_US);
        assert!(bucket.debt_at(&limit, START_US) <= MAX_UNITS);
    }
}
