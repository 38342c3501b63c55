//! The truth of a refusal: the same request is admitted at the time that it names, and not before. For each algorithm,
//! and for several limits and `block_for` in one policy, with refusals that count and without; both stores; 1,000
//! cases each, drawn anew in every run.

use crate::support::judge::{EVERY_ALGORITHM, Judge, START_US, any_time_us, draw, seed, until_us};
use fastrand::Rng;
use tidegate::limiter::{Algorithm, Charge, Decision, Key, KeyBuilder, Limit};

const CASES: usize = 1_000;

/// One policy, and what one client asked of it, the last of which was refused for some time.
#[derive(Debug)]
struct Case {
    limits: Vec<Limit>,
    /// `count_rejected`.
    counts: bool,
    /// When, and at which cost.
    asks: Vec<(u64, u64)>,
}

impl Case {
    /// Asks at random until something is refused, and then goes on knocking.
    fn draw(judge: &mut Judge, limits: Vec<Limit>, counts: bool, rng: &mut Rng) -> Self {
        judge.forget();
        let mut case = Self {
            limits,
            counts,
            asks: Vec::new(),
        };
        let few = case
            .limits
            .iter()
            .min_by_key(|limit| limit.per_us / limit.requests)
            .unwrap();
        let (per_us, apart_us) = (few.per_us, (few.per_us / few.requests).max(1));
        let most = case.costly().map(Limit::cold_capacity).min().unwrap();
        let (start_us, gaps) = (START_US + rng.u64(..per_us), rng.usize(..12));
        let (mut at_us, mut knocks) = (start_us, rng.usize(..3));
        loop {
            at_us += match rng.u8(..4) {
                _ if case.asks.len() > gaps => 0,
                0 => 0,
                1 => rng.u64(..=per_us / 2),
                _ => rng.u64(..=2 * apart_us),
            };
            let cost = if rng.bool() { 1 } else { rng.u64(1..=most) };
            case.asks.push((at_us, cost));
            if !case.ask(judge, at_us, cost).1.admitted {
                if knocks == 0 {
                    return case;
                }
                knocks -= 1;
            }
            assert!(case.asks.len() < 20_000, "nothing is refused: {case:?}");
        }
    }

    fn costly(&self) -> impl Iterator<Item = &Limit> {
        self.limits
            .iter()
            .filter(|limit| limit.algorithm != Algorithm::Block)
    }

    /// When it would be admitted, if it wasn't, and the decision.
    fn ask(&self, judge: &mut Judge, at_us: u64, cost: u64) -> (Option<u64>, Decision) {
        let key = key();
        let charge = |limit| Charge {
            counts_rejected: self.counts,
            ..Charge::new(limit, &key, cost)
        };
        let charges: Vec<_> = self.limits.iter().map(charge).map(as_asked).collect();
        let decision = judge.decide(&charges, at_us);
        (until_us(&charges, &decision), decision)
    }

    /// The same history again; returns what the last one is told.
    fn replay(&self, judge: &mut Judge) -> u64 {
        judge.forget();
        let told = self
            .asks
            .iter()
            .map(|(at_us, cost)| self.ask(judge, *at_us, *cost).0)
            .last();
        told.flatten()
            .expect("the last one was refused for some time")
    }

    /// One client waits as told, two others come too early. Each has the history for himself: who comes early may
    /// have used something by it.
    fn is_true(&self, judge: &mut Judge) {
        let (now_us, cost) = *self.asks.last().unwrap();
        for early_us in [1_000, 1] {
            let until_us = self.replay(judge);
            let early_us = until_us - early_us;
            let (_, early) = self.ask(judge, early_us.max(now_us), cost);
            assert!(
                !early.admitted,
                "{} µs too early: {early:?}",
                until_us - early_us
            );
        }
        let until_us = self.replay(judge);
        let (_, waited) = self.ask(judge, until_us, cost);
        assert!(
            waited.admitted,
            "waited until {until_us} as told: {waited:?}"
        );
    }
}

/// A block is asked for one unit, whatever the request costs.
fn as_asked(charge: Charge<'_>) -> Charge<'_> {
    if charge.is_block() {
        Charge { cost: 1, ..charge }
    } else {
        charge
    }
}

fn key() -> Key {
    KeyBuilder::new("p").finish()
}

/// `policy` draws the limits of one, which may count what it refuses.
fn tells_the_truth(counts: bool, policy: impl Fn(&mut Rng) -> Vec<Limit>) {
    let seed = seed();
    for mut judge in Judge::both() {
        let mut rng = Rng::with_seed(seed);
        for number in 0..CASES {
            let limits = policy(&mut rng);
            let case = Case::draw(&mut judge, limits, counts, &mut rng);
            // Said only if the case fails.
            let said =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case.is_true(&mut judge)));
            assert!(
                said.is_ok(),
                "TIDEGATE_TEST_SEED={seed}, case {number} in {judge:?}: {case:?}"
            );
        }
    }
}

macro_rules! each {
    ($counts:literal: $($algorithm:ident)*) => { $(
        #[test]
        fn $algorithm() {
            tells_the_truth($counts, |rng| vec![draw(stringify!($algorithm), rng)]);
        }
    )* };
}

/// A test per algorithm, and one of several limits together: the wait is the longest of all, that of the block included.
macro_rules! truth {
    ($($module:ident: $counts:literal)*) => { $(
        mod $module {
            use super::*;

            each!($counts: sliding_log sliding_window fixed_window token_bucket warm_up leaky_bucket);

            #[test]
            fn several_limits_and_block_for() {
                tells_the_truth($counts, several);
            }
        }
    )* };
}

fn several(rng: &mut Rng) -> Vec<Limit> {
    let mut limits: Vec<Limit> = Vec::new();
    if rng.bool() {
        limits.push(Limit {
            requests: 1,
            per_us: any_time_us(rng),
            algorithm: Algorithm::Block,
        });
    }
    for _ in 0..rng.usize(2..=3) {
        let (_, draw) = EVERY_ALGORITHM[rng.usize(..EVERY_ALGORITHM.len())];
        let limit = draw(rng);
        if limits
            .iter()
            .all(|other| other.identity() != limit.identity())
        {
            limits.push(limit);
        }
    }
    limits
}

truth! {
    trap_10_retry_is_the_truth: false
    trap_10_retry_is_the_truth_also_where_refusals_count: true
}
