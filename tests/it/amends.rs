//! Refusals that count and costs that are settled later, in both stores: as the naive model has them where it is short,
//! and never laxer than had all been known from the start.

use crate::model::Model;
use crate::support::judge::{EVERY_ALGORITHM, Judge, START_US, seed};
use fastrand::Rng;
use tidegate::limiter::{Algorithm, Amendment, Charge, Key, KeyBuilder, Limit, MAX_UNITS};

/// Sequences for the memory store and for Redis.
const SEQUENCES: [usize; 2] = [400, 100];
const STEPS: usize = 60;

/// Runs a test in both stores with drawn values, and says how to draw them again.
fn drawn(sequences: [usize; 2], test: impl Fn(&mut Judge, &mut Rng)) {
    let seed = seed();
    for (mut judge, sequences) in Judge::both().into_iter().zip(sequences) {
        let mut rng = Rng::with_seed(seed);
        for number in 0..sequences {
            judge.forget();
            let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                test(&mut judge, &mut rng)
            }));
            assert!(
                run.is_ok(),
                "TIDEGATE_TEST_SEED={seed}, sequence {number} in {judge:?}"
            );
        }
    }
}

fn key() -> Key {
    KeyBuilder::new("p").finish()
}

/// Three policies, one of them a shadow, with limits that differ.
fn policies(rng: &mut Rng) -> Vec<(u32, Limit)> {
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
        let limit = Limit {
            requests: rng.u64(1..12),
            per_us: rng.u64(100..1_000),
            algorithm,
        };
        if limits
            .iter()
            .all(|(_, other)| other.identity() != limit.identity())
        {
            limits.push((group, limit));
        }
    }
    limits
}

#[test]
fn what_is_refused_and_counted_and_settled_is_as_if_each_unit_were_kept_apart() {
    drawn(SEQUENCES, |judge, rng| {
        let (mut model, key, policies) = (Model::default(), key(), policies(rng));
        let (counting, mut now_us, mut times) = (rng.u8(..8), START_US, vec![START_US]);
        for step in 0..STEPS {
            now_us = match (
                rng.u8(..4),
                model.edges_us().into_iter().find(|at_us| *at_us > now_us),
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
                judge.amend(limit, &key, amendment, now_us);
                model.amend(now_us, &Charge::new(limit, &key, 0), amendment);
            }
            let cost = if rng.u8(..6) == 0 {
                rng.u64(..15)
            } else {
                rng.u64(1..4)
            };
            let charges = policies.iter().map(|(group, limit)| Charge {
                group: *group,
                shadow: *group == 2,
                counts_rejected: counting >> group & 1 == 1,
                settles: true,
                ..Charge::new(limit, &key, cost)
            });
            let charges: Vec<_> = charges.collect();
            let (ours, expected) = (
                judge.decide(&charges, now_us),
                model.decide(now_us, &charges),
            );
            assert_eq!(ours, expected, "step {step} at {now_us} of {charges:?}");
            times.push(now_us);
        }
    });
}

/// What was admitted, and what each of it is known to have taken.
struct Ledger {
    limit: Limit,
    key: Key,
    /// When, and how many units.
    taken: Vec<(u64, u64)>,
}

impl Ledger {
    /// What would be left had each taken from the start what is known now.
    fn left(&self, now_us: u64) -> u64 {
        let (mut model, charge) = (Model::default(), Charge::new(&self.limit, &self.key, 0));
        for (at_us, units) in self.taken.iter().filter(|(_, units)| *units > 0) {
            model.amend(*at_us, &charge, Amendment::Charge(*units));
        }
        model.remaining(now_us, &charge)
    }

    /// How much less may be left than that, if nothing took more than its estimate.
    fn too_strict_by(&self) -> u64 {
        match self.limit.algorithm {
            // What a part of a 64th pays back, and what is rounded.
            Algorithm::TokenBucket { warm_up_us: 0, .. } | Algorithm::LeakyBucket { .. } => {
                (self.limit.requests * self.limit.per_us.div_ceil(64)).div_ceil(self.limit.per_us)
                    + 1
            }
            Algorithm::TokenBucket { .. } => u64::MAX,
            _ => 0,
        }
    }
}

#[test]
fn what_is_settled_is_never_laxer_than_had_it_been_known_and_hardly_stricter() {
    drawn([100, 25], |judge, rng| {
        for (name, draw) in EVERY_ALGORITHM {
            judge.forget();
            let drawn = draw(rng);
            let limit = Limit {
                requests: drawn.requests.min(60),
                ..drawn
            };
            // Near the largest limits a debt passes 2^53, and the rest is forgotten.
            let is_large = limit.capacity() > MAX_UNITS / 2 / limit.per_us;
            let (most, only_down) = (
                limit.cold_capacity(),
                is_large || name == "warm_up" || rng.bool(),
            );
            let mut ledger = Ledger {
                limit,
                key: key(),
                taken: Vec::new(),
            };
            let (mut in_flight, mut now_us) = (
                Vec::<(usize, u64)>::new(),
                START_US + rng.u64(..limit.per_us),
            );
            for step in 0..STEPS {
                now_us += match rng.u8(..6) {
                    0 => rng.u64(..limit.per_us),
                    1..4 => rng.u64(..=limit.per_us / limit.requests),
                    _ => 0,
                };
                let estimate = rng.u64(1..=most.div_ceil(4));
                let charge = Charge {
                    settles: true,
                    ..Charge::new(&ledger.limit, &ledger.key, estimate)
                };
                if judge.decide(&[charge], now_us).admitted {
                    in_flight.push((ledger.taken.len(), estimate));
                    ledger.taken.push((now_us, estimate));
                }
                for _ in 0..rng.usize(..3).min(in_flight.len()) {
                    let (nth, estimate) = in_flight.swap_remove(rng.usize(..in_flight.len()));
                    let at_us = ledger.taken[nth].0;
                    // What took nothing would not have warmed the bucket up.
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
                    // Later than that a bucket gives back less.
                    let late = at_us + limit.per_us.div_ceil(64) * 62 < now_us;
                    if !(late && only_down) {
                        judge.amend(&limit, &ledger.key, amendment, now_us);
                        ledger.taken[nth].1 = actual;
                    }
                }
                let look = Charge::new(&ledger.limit, &ledger.key, 0);
                let left = judge.decide(&[look], now_us).standings[0]
                    .unwrap()
                    .remaining;
                let known = ledger.left(now_us);
                let what = format!(
                    "{name}, step {step} at {now_us} of {limit:?}: {left} are left, {known} should be"
                );
                assert!(left <= known, "laxer: {what}");
                assert!(
                    !only_down || left.saturating_add(ledger.too_strict_by()) >= known,
                    "stricter: {what}"
                );
            }
        }
    });
}
