use super::history::HISTORY_PART_COUNT;
use super::warm_up::{RAMP_STEP_COUNT, WarmUpRamp};
use super::*;
use crate::limiter::{Algorithm, Amendment, KeyBuilder, MAX_WARM_UP_US, PolicyCharges, Refusal};
use proptest::prelude::*;

const START_US: u64 = 1_800_000_000_000_123;

fn make_limit(requests: u64, per_us: u64, burst: u64, warm_up_us: u64) -> Limit {
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

    fn current_step(&self) -> u64 {
        ((self.now_us - self.start_us) / self.warm_up_us.div_ceil(100)).min(100)
    }

    fn is_cold(&self) -> bool {
        self.last_us
            .is_none_or(|last_us| self.now_us >= last_us + self.warm_up_us)
    }

    fn advance_one_us(&mut self) {
        self.inflow_300ths += 100 + 2 * self.current_step();
        if self.inflow_300ths >= 300 {
            self.inflow_300ths -= 300;
            self.debt = self.debt.saturating_sub(self.limit.requests);
        }
        self.now_us += 1;
    }

    fn total_owed(&self) -> u64 {
        let missing_units = self.limit.capacity() - self.limit.cold_capacity();
        let warmed_up_units = if self.is_cold() {
            0
        } else {
            missing_units * self.current_step() / 100
        };
        self.debt
            .max((missing_units - warmed_up_units) * self.limit.per_us)
    }

    fn charge(&mut self, cost: u64) {
        self.debt = self.total_owed() + cost * self.limit.per_us;
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
        let limit = make_limit(requests, per_us, burst, warm_up_us);
        let (mut reference, mut bucket) = (ReferenceWarmUp::new(limit, warm_up_us), TokenBucketState::default());
        // The announced end of a refusal and the usage that ends it, if known.
        let mut waits: Option<(u64, u64)> = None;
        for (after_us, cost) in requested {
            for _ in 0..after_us {
                reference.advance_one_us();
                let now_us = reference.now_us;
                prop_assert_eq!(bucket.used_units(&limit, now_us), reference.total_owed().div_ceil(per_us), "at {}", now_us);
                if let Some((until_us, max_used)) = waits {
                    prop_assert_eq!(bucket.used_units(&limit, now_us) <= max_used, now_us >= until_us, "{} {}", until_us, now_us);
                }
            }
            let now_us = reference.now_us;
            let cost = cost.min(limit.cold_capacity());
            let max_used = burst - cost;
            if bucket.used_units(&limit, now_us) <= max_used {
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
            step_us: warm_up_us.div_ceil(RAMP_STEP_COUNT),
            missing_units: 1,
        };
        let all_us = RAMP_STEP_COUNT * ramp.step_us;
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
    fn usage_debt_at(&self, limit: &Limit, now_us: u64) -> u64 {
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
        let limit = make_limit(requests, per_us, burst, 0);
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
                if late || now_us - *at_us < (HISTORY_PART_COUNT - 1) * per_us.div_ceil(HISTORY_PART_COUNT) {
                    *units -= less;
                    bucket.credit(&limit, less, *at_us, now_us);
                }
            }
            let (actual, exact) = (bucket.usage_debt_at(&limit, now_us), reference.usage_debt_at(&limit, now_us));
            prop_assert!(actual >= exact, "{} < {}", actual, exact);
            if !late {
                prop_assert!(actual <= exact + requests * per_us.div_ceil(HISTORY_PART_COUNT), "{} > {}", actual, exact);
            }
        }
    }
}

/// 100,000 tokens a minute, with as many requests in flight as fit: 4,000 tokens reserved, 500
/// used, after ten seconds.
#[test]
fn a_saturated_bucket_credits_nearly_all_unused_units() {
    const SECOND_US: u64 = 1_000_000;
    let limit = make_limit(100_000, 60 * SECOND_US, 100_000, 0);
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
                bucket.usage_debt_at(&limit, now_us),
                reference.usage_debt_at(&limit, now_us),
            );
            bucket.credit(&limit, 3_500, at_us, now_us);
            reference.0[settled].2 = 500;
            settled += 1;
            credited += before.0 - bucket.usage_debt_at(&limit, now_us);
            reference_credited += before.1 - reference.usage_debt_at(&limit, now_us);
        }
        while bucket.used_units(&limit, now_us) + 4_000 <= 100_000 {
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
            let policy = PolicyCharges::new(&limit, &key, cost)
                .map_limits(|charge| charge.is_estimate = operation == 0);
            let charge = policy.charges().next().unwrap();
            let before = state.view_at(&limit, now_us).used_units();
            match operation {
                0 if before + cost <= capacity => state.charge(&charge, now_us),
                1 => state.amend(&limit, Amendment::Charge(cost), now_us),
                _ => {
                    state.charge_rejected(&charge, now_us);
                    let used = state.view_at(&limit, now_us).used_units();
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
            let fresh = limit.initial_state().view_at(&limit, expires_us).used_units();
            prop_assert_eq!(state.view_at(&limit, expires_us).used_units(), fresh);
        }
    }
}

#[test]
fn a_debt_saturates_at_the_largest_exact_number() {
    let limit = make_limit(1, 34_560_000_000_000, 260, 0);
    let mut bucket = TokenBucketState::default();
    for _ in 0..3 {
        bucket.charge(&limit, MAX_UNITS, START_US, true);
        assert_eq!(bucket.usage_debt_at(&limit, START_US), MAX_UNITS);
        assert_eq!(
            bucket.usage_drop_time_us(&limit, START_US, 259),
            Some(START_US + MAX_UNITS - 259 * limit.per_us)
        );
        assert_eq!(bucket.expires_at_us(&limit), MAX_TIME_US);
    }
    bucket.credit(&limit, MAX_UNITS, START_US, START_US);
    assert!(bucket.usage_debt_at(&limit, START_US) <= MAX_UNITS);
}
