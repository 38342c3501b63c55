//! Naive reference model: the rules of `docs/ALGORITHMS.md` as plain Rust, slow and easy to verify.
//!
//! It discards nothing. Each counter keeps every unit ever charged with its time, and each query
//! looks at all of them. The stores are compared with it.

use crate::support::prelude::*;
use tidegate::limiter::ChargeOutcome;

#[derive(Debug, Default)]
pub struct NaiveModel {
    counters: HashMap<CounterId, Vec<SpentUnits>>,
}

/// Identifies a counter: the key, the algorithm with its offset, and the period. The number of
/// requests is not part of it, so a changed limit keeps its usage.
type CounterId = (u128, Algorithm, u64);

#[derive(Clone, Copy, Debug)]
struct SpentUnits {
    at_us: u64,
    units: u64,
    /// Units that the limit returned per period when these units were charged.
    units_per_period: u64,
    per_us: u64,
    warm_up_us: u64,
}

fn is_same_policy(one: &Charge<'_, '_>, other: &Charge<'_, '_>) -> bool {
    let address = |charge: &Charge<'_, '_>| std::ptr::from_ref(charge.policy).cast::<()>();
    address(one) == address(other)
}

impl NaiveModel {
    /// Decides one request at the store's time. Charges all limits or none.
    pub fn decide(&mut self, clock_us: u64, request: &[PolicyCharges<'_>]) -> Decision {
        let charges: Vec<Charge<'_, '_>> = each_charge(request).collect();
        let refusals: Vec<_> = charges
            .iter()
            .map(|charge| self.find_refusal(clock_us, charge))
            .collect();
        let admits = |wanted: &dyn Fn(&Charge<'_, '_>) -> bool| {
            charges
                .iter()
                .zip(&refusals)
                .all(|(charge, refusal)| !wanted(charge) || refusal.is_none())
        };
        let admitted = admits(&|charge| !charge.policy.shadow && !charge.is_read);
        let mut delay_us = 0;
        // A block starts when another limit of its policy rejects the request. A cost that never
        // fits starts no block. If the policy counts responses, those must fill a limit, too.
        let is_full = |block: &Charge<'_, '_>, is_counted: bool| {
            charges.iter().zip(&refusals).any(|(charge, refusal)| {
                is_same_policy(charge, block)
                    && charge.limit.algorithm != Algorithm::Block
                    && charge.is_read == is_counted
                    && matches!(refusal, Some(Refusal::Until(_)))
            })
        };
        let is_over = |block: &Charge<'_, '_>| {
            let mut own = charges.iter();
            let counts = own.any(|one| one.is_read && is_same_policy(one, block));
            is_full(block, false) && (!counts || is_full(block, true))
        };
        let mut final_refusals = refusals.clone();
        let mut charged_at_us: Vec<Option<u64>> = vec![None; charges.len()];
        for (n, (charge, refusal)) in charges.iter().zip(&refusals).enumerate() {
            let charged = match charge.limit.algorithm {
                Algorithm::Block => refusal.is_none() && is_over(charge),
                _ if charge.is_read => false,
                _ => admitted && admits(&|other| is_same_policy(other, charge) && !other.is_read),
            };
            if charged {
                self.charge(clock_us, charge);
                if charge.is_estimate && charge.cost > 0 {
                    charged_at_us[n] = Some(self.charge_name_us(clock_us, charge));
                }
                if !charge.policy.shadow && charge.cost > 0 {
                    delay_us = delay_us.max(self.delay_us(clock_us, charge));
                }
            } else if charge.policy.counts_rejected
                && (admitted || !charge.policy.shadow)
                && !charge.is_read
                && !admits(&|other| is_same_policy(other, charge) && !other.is_read)
            {
                // The rejected request delays the next one.
                self.charge_rejected(clock_us, charge);
                final_refusals[n] = self.find_refusal(clock_us, charge);
            }
        }
        let statuses = charges
            .iter()
            .zip(final_refusals)
            .map(|(charge, refusal)| LimitStatus {
                remaining: self.remaining_at(charge, self.now_us(clock_us, charge)),
                next_growth_us: self.next_growth_us(clock_us, charge),
                refusal,
                in_effect: None,
            });
        let outcomes = statuses.zip(charged_at_us);
        let outcomes = outcomes.map(|(status, charged_at_us)| ChargeOutcome {
            status: Some(status),
            charged_at_us,
            ..ChargeOutcome::default()
        });
        let mut decision = Decision {
            now_us: clock_us,
            admitted,
            delay_us,
            ..Decision::without_outcomes(request)
        };
        for (outcome, decided) in decision.outcomes_mut().zip(outcomes) {
            *outcome = decided;
        }
        decision
    }

    /// Corrects an earlier charge. A credit reduces units charged at the same time, or in the same
    /// sub-window or window, as far as they still count. Buckets do not support credits here.
    pub fn apply_amendment(
        &mut self,
        clock_us: u64,
        policy: &PolicyCharges<'_>,
        amendment: Amendment,
    ) {
        let charge = &first_charge(policy);
        let (units, charged_us) = match amendment {
            Amendment::Charge(units) => {
                return self.charge(
                    clock_us,
                    &Charge {
                        cost: units,
                        ..*charge
                    },
                );
            }
            Amendment::BackdatedCharge { units, age_us } => {
                return self.charge(
                    clock_us - age_us,
                    &Charge {
                        cost: units,
                        ..*charge
                    },
                );
            }
            Amendment::Credit { units, at_us } => (units, at_us),
            Amendment::Renew { .. } | Amendment::Release { .. } => {
                unreachable!("concurrency slot amendments are not modelled")
            }
        };
        let (
            Limit {
                per_us, algorithm, ..
            },
            now_us,
        ) = (*charge.limit, self.now_us(clock_us, charge));
        let window_id = |at_us: u64| match algorithm {
            Algorithm::SlidingLog => i128::from(at_us),
            Algorithm::SlidingWindow { buckets } => {
                i128::from(sub_window_end_us(per_us, buckets, at_us))
            }
            Algorithm::FixedWindow { offset_us } => window_number(per_us, offset_us, at_us),
            Algorithm::CalendarWindow { calendar } => {
                i128::from(calendar.period_at(at_us).start_us)
            }
            _ => unreachable!("buckets do not record single charges"),
        };
        let in_same_window = |spent: &SpentUnits| window_id(spent.at_us) == window_id(charged_us);
        self.remove_units(charge, units, |spent| {
            in_same_window(spent) && is_counted(charge.limit, spent, now_us)
        });
    }

    /// Units that a further request could still use.
    pub fn remaining(&self, clock_us: u64, policy: &PolicyCharges<'_>) -> u64 {
        let charge = &first_charge(policy);
        self.remaining_at(charge, self.now_us(clock_us, charge))
    }

    /// Every time at which units are returned, where off-by-one errors would show.
    pub fn boundary_times_us(&self) -> Vec<u64> {
        let mut edges: Vec<_> = self
            .counters
            .iter()
            .flat_map(|((_, algorithm, per_us), spent)| {
                spent.iter().map(|spent| match algorithm {
                    _ if spent.warm_up_us > 0 => spent.at_us + spent.warm_up_us,
                    Algorithm::Block | Algorithm::Concurrency { .. } => spent.at_us + spent.per_us,
                    _ => expires_at_us(*algorithm, *per_us, spent.at_us),
                })
            })
            .collect();
        edges.sort_unstable();
        edges.dedup();
        edges
    }

    fn find_refusal(&self, clock_us: u64, charge: &Charge<'_, '_>) -> Option<Refusal> {
        let limit = charge.limit;
        if limit.requests == 0 || charge.cost > limit.capacity() {
            return Some(Refusal::Never);
        }
        let now_us = self.now_us(clock_us, charge);
        let fits_at = |at_us: u64| self.used_at(charge, at_us) + charge.cost <= limit.capacity();
        if fits_at(now_us) {
            return None;
        }
        if let Algorithm::Concurrency { .. } = limit.algorithm {
            return Some(Refusal::Unknown);
        }
        let until = self
            .times_after(now_us, charge)
            .into_iter()
            .find(|at_us| fits_at(*at_us));
        Some(Refusal::Until(until.expect("all charged units return")))
    }

    fn next_growth_us(&self, clock_us: u64, charge: &Charge<'_, '_>) -> Option<u64> {
        if let Algorithm::Concurrency { .. } = charge.limit.algorithm {
            return None;
        }
        let now_us = self.now_us(clock_us, charge);
        let remaining = self.remaining_at(charge, now_us);
        self.times_after(now_us, charge)
            .into_iter()
            .find(|at_us| self.remaining_at(charge, *at_us) > remaining)
    }

    /// Delay of the last charged request: until the queue ahead of its last unit is empty.
    fn delay_us(&self, clock_us: u64, charge: &Charge<'_, '_>) -> u64 {
        let Limit {
            requests,
            per_us,
            algorithm,
        } = *charge.limit;
        let Algorithm::LeakyBucket { .. } = algorithm else {
            return 0;
        };
        let debt = debt_at(
            self.spent_units(charge),
            self.now_us(clock_us, charge),
            requests,
            per_us,
        );
        debt.saturating_sub(u128::from(per_us))
            .div_ceil(u128::from(requests)) as u64
    }

    /// The time that a credit of the last charge names: in a queue, the end of its position.
    fn charge_name_us(&self, clock_us: u64, charge: &Charge<'_, '_>) -> u64 {
        let Limit {
            requests,
            per_us,
            algorithm,
        } = *charge.limit;
        let now_us = self.now_us(clock_us, charge);
        let Algorithm::LeakyBucket { .. } = algorithm else {
            return now_us;
        };
        let debt = debt_at(self.spent_units(charge), now_us, requests, per_us);
        now_us + debt.div_ceil(u128::from(requests)) as u64
    }

    fn remaining_at(&self, charge: &Charge<'_, '_>, at_us: u64) -> u64 {
        charge
            .limit
            .capacity()
            .saturating_sub(self.used_at(charge, at_us))
    }

    /// The units that count at `at_us`, which must not be before the newest of them.
    fn used_at(&self, charge: &Charge<'_, '_>, at_us: u64) -> u64 {
        let Limit {
            requests,
            per_us,
            algorithm,
        } = *charge.limit;
        if let Algorithm::TokenBucket {
            warm_up_us: 1.., ..
        } = algorithm
        {
            let owed = debt_while_warming_up(self.spent_units(charge), at_us, charge.limit);
            return owed.div_ceil(u128::from(per_us)) as u64;
        }
        if let Algorithm::TokenBucket { .. } = algorithm {
            return debt_at(self.spent_units(charge), at_us, requests, per_us)
                .div_ceil(u128::from(per_us)) as u64;
        }
        if let Algorithm::LeakyBucket { .. } = algorithm {
            let debt = debt_at(self.spent_units(charge), at_us, requests, per_us);
            // A unit is used if it does not fit the queue. The queue holds one unit plus those
            // covered by `max_delay`.
            let most = u128::from(per_us) + max_delay_debt(charge.limit);
            let free = |used: &u64| {
                debt + u128::from(charge.limit.capacity().saturating_sub(*used) * per_us) <= most
            };
            return (0..=charge.limit.capacity())
                .find(free)
                .unwrap_or(charge.limit.capacity() + 1);
        }
        let spent = self
            .spent_units(charge)
            .iter()
            .filter(|spent| is_counted(charge.limit, spent, at_us));
        spent.map(|spent| spent.units).sum()
    }

    fn times_after(&self, now_us: u64, charge: &Charge<'_, '_>) -> Vec<u64> {
        let Limit {
            requests,
            per_us,
            algorithm,
        } = *charge.limit;
        if let Algorithm::TokenBucket {
            warm_up_us: 1.., ..
        } = algorithm
        {
            return self.return_times_while_warming_up(now_us, charge);
        }
        if let Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket { .. } = algorithm {
            // A unit returns whenever the debt is a whole number of units above the free debt of
            // `max_delay`.
            let slack = max_delay_debt(charge.limit) % u128::from(per_us);
            let debt =
                debt_at(self.spent_units(charge), now_us, requests, per_us).saturating_sub(slack);
            let units = (0..debt.div_ceil(u128::from(per_us))).rev();
            let rate = self
                .spent_units(charge)
                .last()
                .map_or(requests, |last| last.units_per_period.max(requests))
                .max(1);
            let paid =
                units.map(|left| (debt - left * u128::from(per_us)).div_ceil(u128::from(rate)));
            return paid.map(|after_us| now_us + after_us as u64).collect();
        }
        let mut moments: Vec<_> = self
            .spent_units(charge)
            .iter()
            .map(|spent| match algorithm {
                Algorithm::Block | Algorithm::Concurrency { .. } => spent.at_us + spent.per_us,
                _ => expires_at_us(algorithm, per_us, spent.at_us),
            })
            .filter(|at_us| *at_us > now_us)
            .collect();
        moments.sort_unstable();
        moments
    }

    /// Units return until the bucket turns cold, and again from then on.
    fn return_times_while_warming_up(&self, now_us: u64, charge: &Charge<'_, '_>) -> Vec<u64> {
        let drained_us = now_us + charge.limit.capacity() * charge.limit.per_us + 1_000;
        let cold_us = self
            .spent_units(charge)
            .last()
            .map_or(now_us, |last| last.at_us + last.warm_up_us);
        let cold_us = cold_us.clamp(now_us, drained_us);
        let mut moments = Vec::new();
        for units in 0..self.used_at(charge, now_us) {
            for (from_us, to_us) in [(now_us, cold_us), (cold_us, drained_us)] {
                let is_back = |at_us: u64| self.used_at(charge, at_us) <= units;
                let (mut low_us, mut high_us) = (from_us, to_us);
                while low_us < high_us {
                    let middle_us = (low_us + high_us) / 2;
                    if is_back(middle_us) {
                        high_us = middle_us
                    } else {
                        low_us = middle_us + 1
                    }
                }
                if low_us < to_us {
                    moments.push(low_us);
                }
            }
        }
        moments.sort_unstable();
        moments
    }

    /// Time never steps back for a key: it is at least the newest time in the key's state, and for
    /// a fixed window that window's start.
    fn now_us(&self, clock_us: u64, charge: &Charge<'_, '_>) -> u64 {
        let Limit {
            per_us, algorithm, ..
        } = *charge.limit;
        let newest = self
            .spent_units(charge)
            .iter()
            .map(|spent| match algorithm {
                Algorithm::SlidingLog
                | Algorithm::TokenBucket { .. }
                | Algorithm::LeakyBucket { .. } => spent.at_us,
                // A block or slot lasts until its end, wherever the clock goes.
                Algorithm::Block | Algorithm::Concurrency { .. } => 0,
                Algorithm::SlidingWindow { buckets } => {
                    sub_window_end_us(per_us, buckets, spent.at_us) + 1 - per_us.div_ceil(buckets)
                }
                Algorithm::FixedWindow { offset_us } => window_start_us(
                    per_us,
                    offset_us,
                    window_number(per_us, offset_us, spent.at_us),
                ),
                Algorithm::CalendarWindow { calendar } => calendar.period_at(spent.at_us).start_us,
            });
        newest
            .max()
            .map_or(clock_us, |newest_us| newest_us.max(clock_us))
    }

    fn charge(&mut self, clock_us: u64, charge: &Charge<'_, '_>) {
        let at_us = self.now_us(clock_us, charge);
        if charge.cost > 0 {
            self.counters
                .entry(counter_id(charge))
                .or_default()
                .push(SpentUnits {
                    at_us,
                    units: charge.cost,
                    units_per_period: charge.limit.requests,
                    per_us: charge.limit.per_us,
                    warm_up_us: match charge.limit.algorithm {
                        Algorithm::TokenBucket { warm_up_us, .. } => warm_up_us,
                        _ => 0,
                    },
                });
        }
    }

    /// Charges a rejected request up to the capacity. A fixed window takes the units that are left.
    /// The logs take the whole cost and drop their oldest units.
    fn charge_rejected(&mut self, clock_us: u64, charge: &Charge<'_, '_>) {
        let now_us = self.now_us(clock_us, charge);
        let (before, capacity) = (self.used_at(charge, now_us), charge.limit.capacity());
        let cost = charge.cost.min(capacity);
        let most = before.max(capacity.min(before + cost));
        match charge.limit.algorithm {
            Algorithm::FixedWindow { .. } | Algorithm::CalendarWindow { .. } => self.charge(
                clock_us,
                &Charge {
                    cost: most - before,
                    ..*charge
                },
            ),
            Algorithm::SlidingLog | Algorithm::SlidingWindow { .. } => {
                self.charge(clock_us, &Charge { cost, ..*charge });
                let beyond = self.used_at(charge, now_us) - most;
                self.remove_units(charge, beyond, |spent| {
                    is_counted(charge.limit, spent, now_us)
                });
            }
            Algorithm::Block => {}
            _ => unreachable!("buckets do not count rejected requests in this model"),
        }
    }

    /// Removes units from the oldest charges that match.
    fn remove_units(
        &mut self,
        charge: &Charge<'_, '_>,
        units: u64,
        matches: impl Fn(&SpentUnits) -> bool,
    ) {
        let spent = self.counters.entry(counter_id(charge)).or_default();
        for _ in 0..units {
            if let Some(oldest) = spent
                .iter_mut()
                .find(|spent| spent.units > 0 && matches(spent))
            {
                oldest.units -= 1;
            }
        }
    }

    fn spent_units(&self, charge: &Charge<'_, '_>) -> &[SpentUnits] {
        self.counters
            .get(&counter_id(charge))
            .map_or(&[], Vec::as_slice)
    }
}

fn counter_id(charge: &Charge<'_, '_>) -> CounterId {
    let (algorithm, per_us) = charge.limit.counter_identity();
    (charge.key.id(), algorithm, per_us)
}

/// Whether a charge still counts, for algorithms that expire charges as a whole.
fn is_counted(limit: &Limit, spent: &SpentUnits, at_us: u64) -> bool {
    let per_us = limit.per_us;
    match limit.algorithm {
        // The window is (now − per, now]: an entry exactly one period old is out.
        Algorithm::SlidingLog => spent.at_us + per_us > at_us,
        Algorithm::FixedWindow { offset_us } => {
            window_number(per_us, offset_us, spent.at_us) == window_number(per_us, offset_us, at_us)
        }
        Algorithm::CalendarWindow { calendar } => calendar.period_at(spent.at_us).contains(at_us),
        // A sub-window counts whole while its last instant is in the window.
        Algorithm::SlidingWindow { buckets } => {
            sub_window_end_us(per_us, buckets, spent.at_us) + per_us > at_us
        }
        Algorithm::Block | Algorithm::Concurrency { .. } => spent.at_us + spent.per_us > at_us,
        Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket { .. } => {
            unreachable!("buckets count by their debt")
        }
    }
}

fn expires_at_us(algorithm: Algorithm, per_us: u64, at_us: u64) -> u64 {
    match algorithm {
        // For a bucket this is only a candidate time.
        Algorithm::SlidingLog
        | Algorithm::TokenBucket { .. }
        | Algorithm::LeakyBucket { .. }
        | Algorithm::Concurrency { .. }
        | Algorithm::Block => at_us + per_us,
        Algorithm::SlidingWindow { buckets } => sub_window_end_us(per_us, buckets, at_us) + per_us,
        Algorithm::FixedWindow { offset_us } => window_start_us(
            per_us,
            offset_us,
            window_number(per_us, offset_us, at_us) + 1,
        ),
        Algorithm::CalendarWindow { calendar } => calendar.period_at(at_us).end_us,
    }
}

/// The last instant of the sub-window that holds `at_us`.
fn sub_window_end_us(per_us: u64, buckets: u64, at_us: u64) -> u64 {
    let width_us = per_us.div_ceil(buckets);
    (at_us / width_us + 1) * width_us - 1
}

/// Debt that is free beside the unit that leaves at once, in units of 1 / per. Zero except for a
/// leaky bucket.
fn max_delay_debt(limit: &Limit) -> u128 {
    match limit.algorithm {
        Algorithm::LeakyBucket { max_delay_us } => {
            u128::from(max_delay_us) * u128::from(limit.requests)
        }
        _ => 0,
    }
}

/// Debt at a time, in units of 1 / per: all charged units minus those returned since.
fn debt_at(spent: &[SpentUnits], at_us: u64, rate: u64, per_us: u64) -> u128 {
    let (mut debt, mut since_us, mut last_rate) = (0_u128, 0, rate);
    for one in spent.iter().chain([&SpentUnits {
        at_us,
        units: 0,
        units_per_period: rate,
        per_us,
        warm_up_us: 0,
    }]) {
        // Units charged at a faster rate return at that rate.
        let paid = u128::from(one.at_us.saturating_sub(since_us))
            * u128::from(last_rate.max(one.units_per_period));
        debt = debt.saturating_sub(paid) + u128::from(one.units) * u128::from(per_us);
        (since_us, last_rate) = (one.at_us, one.units_per_period);
    }
    debt
}

/// As [`debt_at`] for a bucket with a warm-up. The missing capacity is a lower bound of the debt.
fn debt_while_warming_up(spent: &[SpentUnits], at_us: u64, limit: &Limit) -> u128 {
    let Algorithm::TokenBucket { burst, warm_up_us } = limit.algorithm else {
        return 0;
    };
    let width_us = warm_up_us.div_ceil(100);
    let lacks = burst - (burst / 3).max(1);
    // Refill since the start of a warm-up. Step n refills at (100 + 2n) / 300 of the rate.
    let worth_us = |since_us: u64| {
        let step_us = |n: u64| since_us.saturating_sub(n * width_us).min(width_us) * (100 + 2 * n);
        // After the warm-up, a third of the refill is lost, less the rounding of the steps.
        let steps = if since_us < 100 * width_us {
            (0..100).map(step_us).sum()
        } else {
            19_900 * width_us
        };
        steps / 300 + since_us.saturating_sub(100 * width_us)
    };
    let (mut debt, mut start_us, mut last): (u128, u64, Option<&SpentUnits>) = (0, 0, None);
    for one in spent.iter().chain([&SpentUnits {
        at_us,
        units: 0,
        units_per_period: limit.requests,
        per_us: 0,
        warm_up_us,
    }]) {
        if let Some(last) = last {
            let worth_us = worth_us(one.at_us - start_us) - worth_us(last.at_us - start_us);
            debt = debt.saturating_sub(u128::from(
                worth_us * last.units_per_period.max(one.units_per_period),
            ));
        }
        if last.is_none_or(|last| one.at_us >= last.at_us + warm_up_us) {
            start_us = one.at_us;
        }
        let lacking = lacks - lacks * ((one.at_us - start_us) / width_us).min(100) / 100;
        debt = debt.max(u128::from(lacking * limit.per_us)) + u128::from(one.units * limit.per_us);
        last = Some(one);
    }
    debt
}

/// The number of the window that holds `at_us`: floor((at − offset) / per).
fn window_number(per_us: u64, offset_us: u64, at_us: u64) -> i128 {
    (i128::from(at_us) - i128::from(offset_us)).div_euclid(i128::from(per_us))
}

fn window_start_us(per_us: u64, offset_us: u64, window: i128) -> u64 {
    let start = window * i128::from(per_us) + i128::from(offset_us);
    u64::try_from(start.max(0)).expect("tests stay below the year 500000")
}

/// Tests of the model itself, with sequences small enough to compute by hand.
mod hand_computed {
    use super::*;
    use tidegate::limiter::{Key, KeyBuilder};

    const BASE_US: u64 = 1_800_000_000_000_000;

    struct ModelFixture {
        model: NaiveModel,
        key: Key,
        limit: Limit,
    }

    impl ModelFixture {
        fn new(requests: u64, per_us: u64, algorithm: Algorithm) -> Self {
            let key = KeyBuilder::new("p").finish();
            Self {
                model: NaiveModel::default(),
                key,
                limit: make_limit(requests, per_us, algorithm),
            }
        }

        fn decide(&mut self, at_us: u64, cost: u64) -> LimitStatus {
            let charge = PolicyCharges::new(&self.limit, &self.key, cost);
            self.model
                .decide(at_us, &[charge])
                .statuses()
                .next()
                .unwrap()
        }
    }

    #[test]
    fn a_sliding_log_frees_units_when_the_oldest_needed_charge_expires() {
        let mut fixture = ModelFixture::new(3, 100, Algorithm::SlidingLog);
        assert_eq!(
            fixture.decide(BASE_US, 1),
            LimitStatus {
                remaining: 2,
                next_growth_us: Some(BASE_US + 100),
                refusal: None,
                in_effect: None
            }
        );
        assert_eq!(fixture.decide(BASE_US + 10, 2).remaining, 0);
        assert_eq!(
            fixture.decide(BASE_US + 20, 1).refusal,
            Some(Refusal::Until(BASE_US + 100))
        );
        assert_eq!(
            fixture.decide(BASE_US + 20, 2).refusal,
            Some(Refusal::Until(BASE_US + 110))
        );
        assert_eq!(
            fixture.decide(BASE_US + 20, 4).refusal,
            Some(Refusal::Never)
        );
        assert_eq!(
            fixture.decide(BASE_US + 99, 1).refusal,
            Some(Refusal::Until(BASE_US + 100))
        );
        assert_eq!(fixture.decide(BASE_US + 100, 1).refusal, None);
    }

    #[test]
    fn a_fixed_window_resets_at_its_end() {
        let mut fixture = ModelFixture::new(2, 100, Algorithm::FixedWindow { offset_us: 30 });
        assert_eq!(fixture.decide(BASE_US + 129, 2).refusal, None);
        assert_eq!(
            fixture.decide(BASE_US + 129, 1).refusal,
            Some(Refusal::Until(BASE_US + 130))
        );
        assert_eq!(fixture.decide(BASE_US + 130, 2).refusal, None);
        assert_eq!(
            fixture.decide(BASE_US + 229, 1).refusal,
            Some(Refusal::Until(BASE_US + 230))
        );
    }

    #[test]
    fn a_leaky_bucket_reports_the_delay_of_each_request() {
        // A unit leaves every 10 µs, and no request waits longer than 25 µs.
        let mut fixture = ModelFixture::new(10, 100, Algorithm::LeakyBucket { max_delay_us: 25 });
        let mut ask = |at_us: u64, cost| {
            let charge = PolicyCharges::new(&fixture.limit, &fixture.key, cost);
            let decision = fixture.model.decide(at_us, &[charge]);
            let status = decision.statuses().next().unwrap();
            (status.refusal.ok_or(decision.delay_us), status.remaining)
        };
        assert_eq!(ask(BASE_US, 1), (Err(0), 2));
        assert_eq!(ask(BASE_US, 1), (Err(10), 1));
        assert_eq!(ask(BASE_US, 1), (Err(20), 0));
        assert_eq!(ask(BASE_US, 1), (Ok(Refusal::Until(BASE_US + 5)), 0));
        assert_eq!(ask(BASE_US + 4, 1), (Ok(Refusal::Until(BASE_US + 5)), 0));
        assert_eq!(ask(BASE_US + 5, 1), (Err(25), 0));
        assert_eq!(ask(BASE_US + 40, 4), (Ok(Refusal::Never), 3));
        // The queue is empty at T + 40. This request takes the positions at 40, 50 and 60 and
        // leaves at the last.
        assert_eq!(ask(BASE_US + 40, 3), (Err(20), 0));
    }

    #[test]
    fn a_clock_that_steps_back_frees_no_units() {
        let mut log = ModelFixture::new(1, 100, Algorithm::SlidingLog);
        assert_eq!(log.decide(BASE_US, 1).refusal, None);
        assert_eq!(
            log.decide(BASE_US - 1_000, 1).refusal,
            Some(Refusal::Until(BASE_US + 100))
        );
        let mut window = ModelFixture::new(1, 100, Algorithm::FixedWindow { offset_us: 0 });
        assert_eq!(window.decide(BASE_US + 50, 1).refusal, None);
        assert_eq!(
            window.decide(BASE_US - 1, 1).refusal,
            Some(Refusal::Until(BASE_US + 100))
        );
    }

    #[test]
    fn a_lowered_limit_refuses_and_a_raised_one_admits_at_once() {
        let mut fixture = ModelFixture::new(4, 100, Algorithm::SlidingLog);
        for at_us in [BASE_US, BASE_US + 1, BASE_US + 2, BASE_US + 3] {
            fixture.decide(at_us, 1);
        }
        fixture.limit.requests = 2;
        let status = fixture.decide(BASE_US + 4, 1);
        assert_eq!(status.refusal, Some(Refusal::Until(BASE_US + 102)));
        assert_eq!(status.remaining, 0);
        assert_eq!(status.next_growth_us, Some(BASE_US + 102));
        fixture.limit.requests = 5;
        assert_eq!(fixture.decide(BASE_US + 4, 1).refusal, None);
    }

    #[test]
    fn a_block_begins_with_a_refusal_and_is_not_prolonged() {
        let key = KeyBuilder::new("p").finish();
        let limits = [(1, 500, Algorithm::Block), (2, 100, Algorithm::SlidingLog)];
        let limits =
            limits.map(|(requests, per_us, algorithm)| make_limit(requests, per_us, algorithm));
        let mut model = NaiveModel::default();
        let mut ask = |at_us, cost| {
            let mut policy = PolicyCharges::new(&limits[0], &key, 1);
            policy.limits.push(LimitCharge::new(&limits[1], cost));
            model.decide(at_us, &[policy])
        };
        assert!(ask(BASE_US, 2).admitted);
        assert_eq!(
            ask(BASE_US, 3).statuses().next().unwrap().next_growth_us,
            None,
            "a cost that never fits must not start a block"
        );
        let first_rejection = ask(BASE_US + 10, 1);
        let blocked = |refusal| LimitStatus {
            remaining: 0,
            next_growth_us: Some(BASE_US + 510),
            refusal,
            in_effect: None,
        };
        assert_eq!(
            first_rejection.outcomes().next().unwrap().status,
            Some(blocked(None))
        );
        let until = Some(Refusal::Until(BASE_US + 510));
        for at_us in [BASE_US + 11, BASE_US + 200, BASE_US + 509] {
            let retry = ask(at_us, 1);
            assert_eq!(
                (retry.admitted, retry.outcomes().next().unwrap().status),
                (false, Some(blocked(until)))
            );
        }
        assert!(ask(BASE_US + 510, 1).admitted);
    }

    #[test]
    fn a_counted_refusal_replaces_the_oldest_units() {
        let key = KeyBuilder::new("p").finish();
        let mut model = NaiveModel::default();
        let limit = |algorithm| make_limit(3, 100, algorithm);
        let mut decide_counting_rejections = |limit: &Limit, at_us, cost| {
            let charge = PolicyCharges {
                counts_rejected: true,
                ..PolicyCharges::new(limit, &key, cost)
            };
            let status = model.decide(at_us, &[charge]).statuses().next().unwrap();
            (status.remaining, status.refusal)
        };
        let log = limit(Algorithm::SlidingLog);
        assert_eq!(decide_counting_rejections(&log, BASE_US, 1), (2, None));
        assert_eq!(decide_counting_rejections(&log, BASE_US + 10, 1), (1, None));
        // One unit of T, one of T + 10 and two of T + 20 exceed the limit, so the unit of T is
        // dropped.
        let found = decide_counting_rejections(&log, BASE_US + 20, 2);
        assert_eq!(found, (0, Some(Refusal::Until(BASE_US + 120))));
        let found = decide_counting_rejections(&log, BASE_US + 30, 9);
        assert_eq!(found, (0, Some(Refusal::Never)));
        let found = decide_counting_rejections(&log, BASE_US + 129, 1);
        assert_eq!(found, (0, Some(Refusal::Until(BASE_US + 130))));
        let window = limit(Algorithm::FixedWindow { offset_us: 0 });
        assert_eq!(decide_counting_rejections(&window, BASE_US, 2), (1, None));
        let found = decide_counting_rejections(&window, BASE_US, 2);
        assert_eq!(found, (0, Some(Refusal::Until(BASE_US + 100))));
    }

    #[test]
    fn a_credit_is_taken_from_units_charged_at_that_time() {
        let mut fixture = ModelFixture::new(9, 100, Algorithm::SlidingWindow { buckets: 10 });
        fixture.decide(BASE_US + 1, 3);
        fixture.decide(BASE_US + 2, 2);
        fixture.decide(BASE_US + 11, 4);
        let charge = PolicyCharges::new(&fixture.limit, &fixture.key, 0);
        let mut credit = |units, at_us, now_us| {
            fixture
                .model
                .apply_amendment(now_us, &charge, Amendment::Credit { units, at_us });
            fixture.model.remaining(now_us, &charge)
        };
        assert_eq!(
            credit(4, BASE_US + 9, BASE_US + 20),
            4,
            "the credit must reduce the units of its sub-window"
        );
        let found = credit(4, BASE_US + 9, BASE_US + 20);
        assert_eq!(found, 5, "the credit must not reduce other units");
        let found = credit(1, BASE_US + 11, BASE_US + 119);
        assert_eq!(found, 9, "the expired sub-window must not be credited");
    }

    #[test]
    fn a_limit_of_zero_admits_nothing() {
        let mut fixture = ModelFixture::new(0, 100, Algorithm::SlidingLog);
        let never = LimitStatus {
            remaining: 0,
            next_growth_us: None,
            refusal: Some(Refusal::Never),
            in_effect: None,
        };
        assert_eq!(fixture.decide(BASE_US, 1), never);
        assert_eq!(fixture.decide(BASE_US, 0), never);
    }
}
