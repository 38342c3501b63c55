//! Retry times are exact: the same request is admitted at the reported time and not before. Covers
//! each algorithm, and policies with several limits and `block_for`, with and without
//! `count_rejected`. Each runs 1,000 random cases in both stores.

use crate::support::prelude::*;

const CASES_PER_STORE: usize = 1_000;

/// One policy and the requests of one client. The last one was rejected with a retry time.
#[derive(Debug)]
struct RefusalCase {
    limits: Vec<Limit>,
    /// `count_rejected`.
    counts_rejected: bool,
    /// Time and cost of each request.
    requests: Vec<(u64, u64)>,
}

impl RefusalCase {
    /// Sends random requests until one is rejected, and then some retries.
    fn generate(
        store: &mut StoreUnderTest,
        limits: Vec<Limit>,
        counts: bool,
        rng: &mut Rng,
    ) -> Self {
        store.reset();
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
        let (mut at_us, mut retries) = (start_us, rng.usize(..3));
        loop {
            at_us += match rng.u8(..4) {
                _ if case.requests.len() > gaps => 0,
                0 => 0,
                1 => rng.u64(..=per_us / 2),
                _ => rng.u64(..=2 * apart_us),
            };
            let cost = if rng.bool() { 1 } else { rng.u64(1..=most) };
            case.requests.push((at_us, cost));
            if !case.decide(store, at_us, cost).1.admitted {
                if retries == 0 {
                    return case;
                }
                retries -= 1;
            }
            assert!(
                case.requests.len() < 20_000,
                "no request is rejected: {case:?}"
            );
        }
    }

    fn unit_limits(&self) -> impl Iterator<Item = &Limit> {
        self.limits
            .iter()
            .filter(|limit| limit.algorithm != Algorithm::Block)
    }

    /// Returns the decision, and the time at which a rejected request would be admitted.
    fn decide(&self, store: &mut StoreUnderTest, at_us: u64, cost: u64) -> (Option<u64>, Decision) {
        let key = make_key();
        let charge = |limit| PolicyCharges {
            counts_rejected: self.counts_rejected,
            ..PolicyCharges::new(limit, &key, cost)
        };
        let charges = self
            .limits
            .iter()
            .map(charge)
            .map(|charge| (0, with_block_cost(charge)));
        let charges = join_policies(charges);
        let decision = store.decide(&charges, at_us);
        (admissible_at_us(&charges, &decision), decision)
    }

    /// Replays the history from an empty store. Returns the retry time of the last request.
    fn replay(&self, store: &mut StoreUnderTest) -> u64 {
        store.reset();
        let last_retry_at_us = self
            .requests
            .iter()
            .map(|(at_us, cost)| self.decide(store, *at_us, *cost).0)
            .last();
        last_retry_at_us
            .flatten()
            .expect("the last request was rejected with a retry time")
    }

    /// One client waits as reported, two others retry too early. Each replays the history from an
    /// empty store, because an early retry may change state.
    fn check_retry_after(&self, store: &mut StoreUnderTest) {
        let (now_us, cost) = *self.requests.last().unwrap();
        for early_us in [1_000, 1] {
            let until_us = self.replay(store);
            let early_us = until_us - early_us;
            let (_, early) = self.decide(store, early_us.max(now_us), cost);
            assert!(
                !early.admitted,
                "{} µs too early: {early:?}",
                until_us - early_us
            );
        }
        let until_us = self.replay(store);
        let (_, waited) = self.decide(store, until_us, cost);
        assert!(
            waited.admitted,
            "waited until {until_us} as reported: {waited:?}"
        );
    }
}

/// A block always costs one unit, whatever the request costs.
fn with_block_cost(charge: PolicyCharges<'_>) -> PolicyCharges<'_> {
    charge.map_limits(|charge| {
        if charge.is_block() {
            charge.cost = 1;
        }
    })
}

fn make_key() -> Key {
    KeyBuilder::new("p").finish()
}

/// `policy` draws the limits of one policy. `counts` is its `count_rejected`.
fn check_retry_after_of_policies(counts: bool, policy: impl Fn(&mut Rng) -> Vec<Limit>) {
    let seed = test_seed();
    for mut store in StoreUnderTest::both_stores() {
        let mut rng = Rng::with_seed(seed);
        for number in 0..CASES_PER_STORE {
            let limits = policy(&mut rng);
            let case = RefusalCase::generate(&mut store, limits, counts, &mut rng);
            // Printed only if the case fails.
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                case.check_retry_after(&mut store)
            }));
            assert!(
                outcome.is_ok(),
                "TIDEGATE_TEST_SEED={seed}, case {number} in {store:?}: {case:?}"
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

/// One test per algorithm, and one for several limits: the wait is the longest of all limits and
/// the block.
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
        limits.push(make_limit(1, draw_duration_us(rng), Algorithm::Block));
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
