//! Counted rejections and settlements in both stores. Logs and windows must match the reference
//! model. No algorithm may admit more than if all costs had been known from the start.

use crate::redis_store::calendar_day;
use crate::reference_model::NaiveModel;
use crate::support::prelude::*;

/// Number of sequences for the memory store and for Redis.
const SEQUENCE_COUNTS: [usize; 2] = [400, 100];
const STEPS_PER_SEQUENCE: usize = 60;

/// Runs a test in both stores with random values, and reports the seed on failure.
fn run_random_sequences(sequences: [usize; 2], test: impl Fn(&mut StoreUnderTest, &mut Rng)) {
    let seed = test_seed();
    for (mut store, sequences) in StoreUnderTest::both_stores().into_iter().zip(sequences) {
        let mut rng = Rng::with_seed(seed);
        for number in 0..sequences {
            store.reset();
            let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                test(&mut store, &mut rng)
            }));
            assert!(
                run.is_ok(),
                "TIDEGATE_TEST_SEED={seed}, sequence {number} in {store:?}"
            );
        }
    }
}

fn test_key() -> Key {
    KeyBuilder::new("p").finish()
}

/// Three policies, one of them in shadow mode, with different limits.
fn random_policies(rng: &mut Rng) -> Vec<(u32, Limit)> {
    let mut limits = Vec::<(u32, Limit)>::new();
    for group in [0, 0, 1, 2, 2] {
        let algorithm = match rng.u8(..3) {
            0 => Algorithm::SlidingLog,
            1 => Algorithm::SlidingWindow {
                buckets: rng.u64(2..6),
            },
            _ => Algorithm::FixedWindow {
                offset_us: rng.u64(..100),
            },
        };
        let limit = make_limit(rng.u64(1..12), rng.u64(100..1_000), algorithm);
        let limit = match rng.u8(..5) {
            0 => calendar_day(limit.requests),
            _ => limit,
        };
        if limits
            .iter()
            .all(|(_, other)| other.counter_identity() != limit.counter_identity())
        {
            limits.push((group, limit));
        }
    }
    limits
}

#[test]
fn counted_rejections_and_settlements_match_the_reference_model() {
    run_random_sequences(SEQUENCE_COUNTS, |store, rng| {
        let (mut model, key, policies) = (NaiveModel::default(), test_key(), random_policies(rng));
        let (counting, mut now_us, mut times) = (rng.u8(..8), START_US, vec![START_US]);
        for step in 0..STEPS_PER_SEQUENCE {
            now_us = match (
                rng.u8(..4),
                model
                    .boundary_times_us()
                    .into_iter()
                    .find(|at_us| *at_us > now_us),
            ) {
                (0, Some(edge_us)) => now_us.max(edge_us + rng.u64(..3) - 1),
                (1, _) => now_us + rng.u64(..1_000),
                (2, _) => now_us + rng.u64(..50),
                _ => now_us,
            };
            if rng.bool() {
                let (_, limit) = &policies[rng.usize(..policies.len())];
                let amendment = match rng.u8(..3) {
                    0 => Amendment::Charge(rng.u64(1..9)),
                    _ => Amendment::Credit {
                        units: rng.u64(1..6),
                        at_us: times[rng.usize(..times.len())],
                    },
                };
                store.apply_amendment(limit, &key, amendment, now_us);
                model.apply_amendment(now_us, &PolicyCharges::new(limit, &key, 0), amendment);
            }
            let cost = if rng.u8(..6) == 0 {
                rng.u64(..15)
            } else {
                rng.u64(1..4)
            };
            let charges = policies.iter().map(|(group, limit)| {
                let charge = PolicyCharges {
                    shadow: *group == 2,
                    counts_rejected: counting >> group & 1 == 1,
                    ..PolicyCharges::new(limit, &key, cost)
                };
                (
                    *group,
                    charge.map_limits(|charge| charge.is_estimate = true),
                )
            });
            let charges = join_policies(charges);
            let (ours, expected) = (
                store.decide(&charges, now_us),
                model.decide(now_us, &charges),
            );
            assert_eq!(ours, expected, "step {step} at {now_us} of {charges:?}");
            times.push(now_us);
        }
    });
}

/// Many requests in flight, whose units return in any order, many at once.
#[test]
fn returns_after_hundreds_of_charges_match_the_reference_model() {
    const CHARGE_COUNT: usize = 600;
    run_random_sequences([3, 3], |store, rng| {
        let limit = sliding_log([400, 4_000][rng.usize(..2)], 1_000_000);
        let (mut model, key, mut now_us) = (NaiveModel::default(), test_key(), START_US);
        let mut in_flight = Vec::new();
        for _ in 0..CHARGE_COUNT {
            now_us += rng.u64(..1_500);
            let charge = PolicyCharges {
                counts_rejected: true,
                ..PolicyCharges::new(&limit, &key, rng.u64(1..4))
            };
            let charge = [charge.map_limits(|charge| charge.is_estimate = true)];
            let decision = store.decide(&charge, now_us);
            assert_eq!(decision, model.decide(now_us, &charge));
            in_flight.extend(
                decision
                    .outcomes()
                    .next()
                    .unwrap()
                    .charged_at_us
                    .map(|at_us| (charge[0].limits[0].cost, at_us)),
            );
        }
        rng.shuffle(&mut in_flight);
        for responses in in_flight.chunks(rng.usize(1..64)) {
            now_us += rng.u64(..2_000);
            let credits = responses.iter().map(|(cost, at_us)| Amendment::Credit {
                units: cost - u64::from(rng.u8(..4) == 0),
                at_us: *at_us,
            });
            let credits: Vec<_> = credits.collect();
            store.apply_amendments(&limit, &key, &credits, now_us);
            for credit in credits {
                model.apply_amendment(now_us, &PolicyCharges::new(&limit, &key, 0), credit);
            }
            let cost = rng.u64(..3);
            let charge = [PolicyCharges::new(&limit, &key, cost)];
            let decided = store.decide(&charge, now_us);
            assert_eq!(decided, model.decide(now_us, &charge), "{charge:?}");
        }
    });
}

/// The admitted charges with their currently known costs.
struct AdmittedCharges {
    limit: Limit,
    key: Key,
    /// Time and units of each charge.
    charged_units: Vec<(u64, u64)>,
}

impl AdmittedCharges {
    /// Units that would remain if every charge had had its known cost from the start.
    fn remaining_if_known(&self, now_us: u64) -> u64 {
        let (mut model, charge) = (
            NaiveModel::default(),
            PolicyCharges::new(&self.limit, &self.key, 0),
        );
        for (at_us, units) in self.charged_units.iter().filter(|(_, units)| *units > 0) {
            model.apply_amendment(*at_us, &charge, Amendment::Charge(*units));
        }
        model.remaining(now_us, &charge)
    }

    /// How many fewer units may remain if no cost exceeded its estimate.
    fn allowed_shortfall(&self) -> u64 {
        match self.limit.algorithm {
            // The refill of a part of a 64th of the period, and rounding.
            Algorithm::TokenBucket { warm_up_us: 0, .. } => {
                (self.limit.requests * self.limit.per_us.div_ceil(64)).div_ceil(self.limit.per_us)
                    + 1
            }
            // A queue returns only the position of a request that does not leave.
            Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket { .. } => u64::MAX,
            _ => 0,
        }
    }
}

#[test]
fn settled_costs_are_never_laxer_than_costs_known_upfront_and_barely_stricter() {
    run_random_sequences([100, 25], |store, rng| {
        for (name, draw) in EVERY_ALGORITHM {
            store.reset();
            let drawn = draw(rng);
            let limit = Limit {
                requests: drawn.requests.min(60),
                ..drawn
            };
            // Near the largest limits a debt passes 2^53, and the excess is dropped.
            let is_large = limit.capacity() > MAX_UNITS / 2 / limit.per_us;
            let (most, only_down) = (
                limit.cold_capacity(),
                is_large || name == "warm_up" || rng.bool(),
            );
            let mut ledger = AdmittedCharges {
                limit,
                key: test_key(),
                charged_units: Vec::new(),
            };
            let (mut in_flight, mut now_us) = (
                Vec::<(usize, u64)>::new(),
                START_US + rng.u64(..limit.per_us),
            );
            for step in 0..STEPS_PER_SEQUENCE {
                now_us += match rng.u8(..6) {
                    0 => rng.u64(..limit.per_us),
                    1..4 => rng.u64(..=limit.per_us / limit.requests),
                    _ => 0,
                };
                let estimate = rng.u64(1..=most.div_ceil(4));
                let charge = PolicyCharges::new(&ledger.limit, &ledger.key, estimate);
                let charge = charge.map_limits(|charge| charge.is_estimate = true);
                if store.decide(&[charge], now_us).admitted {
                    in_flight.push((ledger.charged_units.len(), estimate));
                    ledger.charged_units.push((now_us, estimate));
                }
                for _ in 0..rng.usize(..3).min(in_flight.len()) {
                    let (nth, estimate) = in_flight.swap_remove(rng.usize(..in_flight.len()));
                    let at_us = ledger.charged_units[nth].0;
                    // A cost of zero would not have warmed the bucket up.
                    let least = u64::from(name == "warm_up");
                    let actual = if only_down {
                        rng.u64(least..=estimate)
                    } else {
                        rng.u64(..=2 * estimate)
                    };
                    let amendment = match actual.checked_sub(estimate) {
                        Some(0) => continue,
                        Some(more) => Amendment::Charge(more),
                        None => Amendment::Credit {
                            units: estimate - actual,
                            at_us,
                        },
                    };
                    // A later credit returns fewer units to a bucket.
                    let late = at_us + limit.per_us.div_ceil(64) * 62 < now_us;
                    if !(late && only_down) {
                        store.apply_amendment(&limit, &ledger.key, amendment, now_us);
                        ledger.charged_units[nth].1 = actual;
                    }
                }
                let look = PolicyCharges::new(&ledger.limit, &ledger.key, 0);
                let left = store
                    .decide(&[look], now_us)
                    .statuses()
                    .next()
                    .unwrap()
                    .remaining;
                let known = ledger.remaining_if_known(now_us);
                let what = format!(
                    "{name}, step {step} at {now_us} of {limit:?}: {left} are left, {known} should be"
                );
                assert!(left <= known, "laxer: {what}");
                assert!(
                    !only_down || left.saturating_add(ledger.allowed_shortfall()) >= known,
                    "stricter: {what}"
                );
            }
        }
    });
}
/// Requests that do not leave return their positions. All others leave at a distance, and a return
/// at once leaves nothing behind.
#[test]
fn a_queue_keeps_its_distance_whatever_is_returned() {
    run_random_sequences([200, 50], |store, rng| {
        let limit = make_limit(
            rng.u64(1..20),
            rng.u64(100..10_000),
            Algorithm::LeakyBucket {
                max_delay_us: 50_000,
            },
        );
        let (key, mut now_us) = (test_key(), START_US);
        // The departure, the cost and the name of each charge.
        let mut queued = Vec::<(u64, u64, u64)>::new();
        for step in 0..STEPS_PER_SEQUENCE {
            now_us += rng.u64(..limit.per_us);
            let cost = rng.u64(1..3);
            let charge = PolicyCharges::new(&limit, &key, cost);
            let charge = [charge.map_limits(|charge| charge.is_estimate = true)];
            let look = [PolicyCharges::new(&limit, &key, 0)];
            let before = store.decide(&look, now_us).policies;
            let decision = store.decide(&charge, now_us);
            if !decision.admitted {
                continue;
            }
            let name_us = decision.outcomes().next().unwrap().charged_at_us.unwrap();
            let amendment = first_charge(&charge[0]).return_amendment(name_us);
            if rng.u8(..4) == 0 {
                store.apply_amendment(&limit, &key, amendment, now_us);
                let after = store.decide(&look, now_us).policies;
                assert_eq!(after, before, "step {step} of {limit:?}");
                continue;
            }
            queued.push((now_us + decision.delay_us, cost, name_us));
            // Not the last one: others are promised behind it, so its position stays empty.
            if rng.u8(..4) == 0 && queued.len() > 1 {
                let (_, units, at_us) = queued.remove(rng.usize(..queued.len() - 1));
                let credit = Amendment::Credit { units, at_us };
                store.apply_amendment(&limit, &key, credit, now_us);
            }
        }
        for pair in queued.windows(2) {
            let ((earlier_us, ..), (later_us, cost, _)) = (pair[0], pair[1]);
            let distance_us = cost * limit.per_us / limit.requests;
            assert!(
                later_us - earlier_us >= distance_us,
                "{pair:?} of {limit:?}"
            );
        }
    });
}
