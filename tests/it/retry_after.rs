//! The truth of a refusal: the same request is admitted at the time that it names, and not before. For each algorithm,
//! and for several limits and `block_for` in one policy, with refusals that count and without; both stores; 1,000
//! cases each, drawn anew in every run.

use crate::support::store_harness::{
    EVERY_ALGORITHM, START_US, StoreUnderTest, admissible_at_us, draw_duration_us, draw_limit_for,
    test_seed,
};
use fastrand::Rng;
use tidegate::limiter::{Algorithm, Charge, Decision, Key, KeyBuilder, Limit};

const CASES_PER_STORE: usize = 1_000;

/// One policy, and what one client asked of it, the last of which was refused for some time.
#[derive(Debug)]
struct RefusalCase {
    limits: Vec<Limit>,
    /// `count_rejected`.
    counts_rejected: bool,
    /// When, and at which cost.
    requests: Vec<(u64, u64)>,
}

impl RefusalCase {
    /// Asks at random until something is refused, and then goes on knocking.
    fn generate(
        judge: &mut StoreUnderTest,
        limits: Vec<Limit>,
        counts: bool,
        rng: &mut Rng,
    ) -> Self {
        judge.reset();
        let mut case = Self {
            limits,
            counts_rejected: counts,
            requests: Vec::new(),
        };
        let few = case
            .limits
            .iter()
            .min_by_key(|limit| limit.per_us / limit.requests)
            .unwrap();
        let (per_us, apart_us) = (few.per_us, (few.per_us / few.requests).max(1));
        let most = case.unit_limits().map(Limit::cold_capacity).min().unwrap();
        let (start_us, gaps) = (START_US + rng.u64(..per_us), rng.usize(..12));
        let (mut at_us, mut knocks) = (start_us, rng.usize(..3));
        loop {
            at_us += match rng.u8(..4) {
                _ if case.requests.len() > gaps => 0,
                0 => 0,
                1 => rng.u64(..=per_us / 2),
                _ => rng.u64(..=2 * apart_us),
            };
            let cost = if rng.bool() { 1 } else { rng.u64(1..=most) };
            case.requests.push((at_us, cost));
            if !case.decide(judge, at_us, cost).1.admitted {
                if knocks == 0 {
                    return case;
                }
                knocks -= 1;
            }
            assert!(case.requests.len() < 20_000, "nothing is refused: {case:?}");
        }
    }

    fn unit_limits(&self) -> impl Iterator<Item = &Limit> {
        self.limits
            .iter()
            .filter(|limit| limit.algorithm != Algorithm::Block)
    }

    /// When it would be admitted, if it wasn't, and the decision.
    fn decide(&self, judge: &mut StoreUnderTest, at_us: u64, cost: u64) -> (Option<u64>, Decision) {
        let key = make_key();
        let charge = |limit| Charge {
            counts_rejected: self.counts_rejected,
            ..Charge::new(limit, &key, cost)
        };
        let charges: Vec<_> = self
            .limits
            .iter()
            .map(charge)
            .map(with_block_cost)
            .collect();
        let decision = judge.decide(&charges, at_us);
        (admissible_at_us(&charges, &decision), decision)
    }

    /// The same history again; returns what the last one is told.
    fn replay(&self, judge: &mut StoreUnderTest) -> u64 {
        judge.reset();
        let told = self
            .requests
            .iter()
            .map(|(at_us, cost)| self.decide(judge, *at_us, *cost).0)
            .last();
        told.flatten()
            .expect("the last one was refused for some time")
    }

    /// One client waits as told, two others come too early. Each has the history for himself: who comes early may
    /// have used something by it.
    fn check_retry_after(&self, judge: &mut StoreUnderTest) {
        let (now_us, cost) = *self.requests.last().unwrap();
        for early_us in [1_000, 1] {
            let until_us = self.replay(judge);
            let early_us = until_us - early_us;
            let (_, early) = self.decide(judge, early_us.max(now_us), cost);
            assert!(
                !early.admitted,
                "{} µs too early: {early:?}",
                until_us - early_us
            );
        }
        let until_us = self.replay(judge);
        let (_, waited) = self.decide(judge, until_us, cost);
        assert!(
            waited.admitted,
            "waited until {until_us} as told: {waited:?}"
        );
    }
}

/// A block is asked for one unit, whatever the request costs.
fn with_block_cost(charge: Charge<'_>) -> Charge<'_> {
    if charge.is_block() {
        Charge { cost: 1, ..charge }
    } else {
        charge
    }
}

fn make_key() -> Key {
    KeyBuilder::new("p").finish()
}

/// `policy` draws the limits of one, which may count what it refuses.
fn check_retry_after_of_policies(counts: bool, policy: impl Fn(&mut Rng) -> Vec<Limit>) {
    let seed = test_seed();
    for mut judge in StoreUnderTest::both_stores() {
        let mut rng = Rng::with_seed(seed);
        for number in 0..CASES_PER_STORE {
            let limits = policy(&mut rng);
            let case = RefusalCase::generate(&mut judge, limits, counts, &mut rng);
            // Said only if the case fails.
            let said = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                case.check_retry_after(&mut judge)
            }));
            assert!(
                said.is_ok(),
                "TIDEGATE_TEST_SEED={seed}, case {number} in {judge:?}: {case:?}"
            );
        }
    }
}

macro_rules! algorithm_tests {
    ($counts:literal: $($algorithm:ident)*) => { $(
        #[test]
        fn $algorithm() {
            check_retry_after_of_policies($counts, |rng| vec![draw_limit_for(stringify!($algorithm), rng)]);
        }
    )* };
}

/// A test per algorithm, and one of several limits together: the wait is the longest of all, that of the block included.
macro_rules! retry_after_tests {
    ($($module:ident: $counts:literal)*) => { $(
        mod $module {
            use super::*;

            algorithm_tests!($counts: sliding_log sliding_window fixed_window token_bucket warm_up leaky_bucket);

            #[test]
            fn several_limits_and_block_for() {
                check_retry_after_of_policies($counts, several_limits);
            }
        }
    )* };
}

fn several_limits(rng: &mut Rng) -> Vec<Limit> {
    let mut limits: Vec<Limit> = Vec::new();
    if rng.bool() {
        limits.push(Limit {
            requests: 1,
            per_us: draw_duration_us(rng),
            algorithm: Algorithm::Block,
        });
    }
    for _ in 0..rng.usize(2..=3) {
        let (_, draw) = EVERY_ALGORITHM[rng.usize(..EVERY_ALGORITHM.len())];
        let limit = draw(rng);
        if limits
            .iter()
            .all(|other| other.counter_identity() != limit.counter_identity())
        {
            limits.push(limit);
        }
    }
    limits
}

retry_after_tests! {
    trap_10_retry_after_is_exact: false
    trap_10_retry_after_is_exact_with_count_rejected: true
}
