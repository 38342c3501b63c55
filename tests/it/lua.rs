//! The Lua scripts decide as the Rust code does, for all inputs.

use crate::redis_store::*;
use crate::support::prelude::*;
use crate::support::store_harness::join_policies;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use redis::aio::MultiplexedConnection;
use tidegate::limiter::*;
use tidegate::store::redis::DecisionBatch;

/// One call: a clock move, and charges to some of a few counters.
#[derive(Clone, Debug)]
struct DecisionStep {
    clock: ClockMove,
    charges: Vec<ChargeSpec>,
    /// The policies that count refused requests: one bit per group, enforced and shadow.
    counts_rejected_bits: u8,
    /// The lease request of the first policy.
    lease: Option<(LeaseTerms, u64)>,
    settlements: Vec<(usize, SettlementSpec)>,
}

/// A later correction of a charge from a number of steps ago.
#[derive(Clone, Copy, Debug)]
enum SettlementSpec {
    ChargeMore(u64),
    ChargeInThePast {
        units: u64,
        age_us: u64,
    },
    CreditCharged {
        units: u64,
        steps: usize,
    },
    /// For leased units.
    CreditLeased {
        units: u64,
        steps: usize,
    },
    Renew(u128),
    Release(u128),
}

#[derive(Clone, Copy, Debug)]
enum ClockMove {
    Stay,
    Forward(u64),
    Back(u64),
    /// To an edge of the period, plus this many µs (or minus).
    Edge(i64),
}

#[derive(Clone, Copy, Debug)]
struct ChargeSpec {
    counter: usize,
    cost: u64,
    requests: u64,
    group: u32,
    shadow: bool,
    settles: bool,
}

impl ClockMove {
    fn apply(self, time_us: u64) -> u64 {
        match self {
            Self::Stay => time_us,
            Self::Forward(us) => time_us + us,
            Self::Back(us) => time_us - us,
            Self::Edge(off) => {
                (time_us - time_us % PERIOD_US + PERIOD_US).saturating_add_signed(off)
            }
        }
    }
}

impl ChargeSpec {
    /// A number that differs for the policies of a request.
    fn policy_number(self) -> u32 {
        (2 * self.group + u32::from(self.shadow)) * KEY_COUNT + key_number(self.counter)
    }

    fn to_charge<'a>(self, limit: &'a Limit, keys: &'a [Key]) -> PolicyCharges<'a> {
        let key = &keys[key_number(self.counter) as usize];
        let charge = PolicyCharges {
            shadow: self.shadow,
            ..PolicyCharges::new(limit, key, self.cost)
        };
        charge.map_limits(|charge| charge.is_estimate = self.settles)
    }
}

pub(crate) const PERIOD_US: u64 = 1_000;
const COUNTER_COUNT: usize = 20;

/// Keys that a request may have.
const KEY_COUNT: u32 = 3;

fn make_keys() -> Vec<Key> {
    let keys = (0..KEY_COUNT).map(|n| KeyBuilder::new(&format!("k{n}")).finish());
    keys.collect()
}

/// The key of a counter: counters of one algorithm and period have different keys.
fn key_number(counter: usize) -> u32 {
    match counter {
        15..=18 => 1,
        19 => 2,
        _ => 0,
    }
}

/// The charges of a request by policy. Those of a policy stay in order.
fn sort_by_policy(asks: &[ChargeSpec]) -> Vec<ChargeSpec> {
    let mut sorted = asks.to_vec();
    sorted.sort_by_key(|ask| ask.policy_number());
    sorted
}

/// Limits by number, each with its own period.
fn counter_limit(counter: usize, requests: u64) -> Limit {
    match counter {
        // First, because a block precedes the limits of its policy.
        0 => make_limit(1, 1 + requests % 3_000, Algorithm::Block),
        13 => sliding_log(requests, PERIOD_US),
        14 => concurrency(requests, PERIOD_US),
        15 => concurrency(requests, 7),
        1 => fixed_window(requests, PERIOD_US, 333 * (1 - requests % 2)),
        2 => sliding_log(requests, 7),
        3 => calendar_day(requests),
        4 => sliding_log(requests, 86_400_000_000),
        5 => sliding_window(requests, PERIOD_US, 10),
        6 => sliding_window(requests, 7, 3),
        7 => token_bucket(requests, PERIOD_US, requests),
        8 => token_bucket(requests, 7, 4),
        9 => token_bucket(requests, 86_400_000_000, 3 * requests),
        10 => leaky_bucket(requests, PERIOD_US, 1_700),
        11 => leaky_bucket(requests, 7, 0),
        12 => leaky_bucket(requests, 86_400_000_000, 3_600_000_000),
        // Some reloads add and remove the warm-up.
        16 if requests % 4 == 3 => warm_up_bucket(requests, PERIOD_US, 9, 0),
        16 => warm_up_bucket(requests, PERIOD_US, 9, 1_700),
        17 => warm_up_bucket(requests, 7, 30, 250),
        18 => warm_up_bucket(requests, 86_400_000_000, 3 * requests, MAX_WARM_UP_US),
        // A debt that takes many periods to repay.
        _ => token_bucket(requests, PERIOD_US, 60),
    }
}

/// Counters that support leases.
const LEASABLE_COUNTERS: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13];

/// The number of a slot is the step that takes it.
const HASH_SLOT_COUNT: u128 = 20;

fn generate_steps() -> impl Strategy<Value = Vec<DecisionStep>> {
    let clock = prop_oneof![
        3 => Just(ClockMove::Stay),
        3 => (1..20u64).prop_map(ClockMove::Forward),
        3 => (1..2 * PERIOD_US).prop_map(ClockMove::Forward),
        1 => (1..200_000_000_000u64).prop_map(ClockMove::Forward),
        1 => (1..3 * PERIOD_US).prop_map(ClockMove::Back),
        3 => (-1..=1i64).prop_map(ClockMove::Edge),
    ];
    let cost = prop_oneof![
        6 => Just(1u64), 2 => 2..5u64, 1 => Just(0u64), 1 => 5..12u64,
        1 => Just(MAX_UNITS), 1 => MAX_UNITS - 3..MAX_UNITS, 1 => Just(MAX_UNITS / 2),
    ];
    let requests = prop_oneof![
        6 => Just(5u64), 2 => 0..9u64, 1 => Just(MAX_UNITS), 1 => MAX_UNITS - 3..MAX_UNITS,
    ];
    let ask = (
        cost,
        requests,
        prop_oneof![3 => Just(0u32), 1 => Just(1u32)],
        prop::bool::weighted(0.3),
        any::<bool>(),
    );
    let asks = prop::collection::vec((0..4usize, ask), 1..6).prop_map(|asks| {
        // Each counter occurs at most once in a call.
        let mut counter = 0;
        let mut taken = Vec::new();
        for (skip, (cost, requests, group, shadow, settles)) in asks {
            counter += skip;
            if counter >= COUNTER_COUNT {
                break;
            }
            let (cost, shadow) = match counter {
                0 => (cost.min(1), false),
                14..=15 => (cost.min(1), shadow),
                _ => (cost, shadow),
            };
            taken.push(ChargeSpec {
                counter,
                cost,
                requests,
                group,
                shadow,
                settles,
            });
            counter += 1;
        }
        taken
    });
    let units = prop_oneof![3 => 1..4u64, 1 => 4..20u64, 1 => 20..200u64];
    let change = prop_oneof![
        1 => units.clone().prop_map(SettlementSpec::ChargeMore),
        1 => (units.clone(), prop_oneof![0..3 * PERIOD_US, 0..200_000_000_000u64])
            .prop_map(|(units, age_us)| SettlementSpec::ChargeInThePast { units, age_us }),
        2 => (units.clone(), 0..6usize).prop_map(|(units, steps)| SettlementSpec::CreditCharged { units, steps }),
        2 => (units, 0..6usize).prop_map(|(units, steps)| SettlementSpec::CreditLeased { units, steps }),
    ];
    let slot = prop_oneof![
        (0..HASH_SLOT_COUNT).prop_map(SettlementSpec::Renew),
        (0..HASH_SLOT_COUNT).prop_map(SettlementSpec::Release)
    ];
    let settled = prop_oneof![1..14usize, 16..COUNTER_COUNT];
    let lending = prop::sample::select(LEASABLE_COUNTERS.to_vec());
    let late = prop_oneof![
        3 => (settled, change.clone()), 2 => (lending, change), 1 => (14..16usize, slot)
    ];
    let lease = prop::option::weighted(0.3, generate_leases());
    let step = (
        clock,
        asks,
        any::<u8>(),
        lease,
        prop::collection::vec(late, 0..3),
    );
    let step = step.prop_map(|(clock, mut asks, counting, lease, late)| {
        if lease.is_some() {
            // If a policy is leased, all its counters support leases, and they are adjacent.
            for ask in &mut asks {
                ask.group = u32::from(!LEASABLE_COUNTERS.contains(&ask.counter));
                ask.shadow &= ask.group == 1;
            }
            asks.sort_by_key(|ask| (ask.group, ask.shadow));
        }
        DecisionStep {
            clock,
            charges: asks,
            counts_rejected_bits: counting,
            lease,
            settlements: late,
        }
    });
    prop::collection::vec(step, 1..60)
}

async fn compare_decisions(
    connection: &mut MultiplexedConnection,
    steps: &[DecisionStep],
) -> Result<(), TestCaseError> {
    let _: () = redis::cmd("FLUSHALL")
        .query_async(connection)
        .await
        .unwrap();
    let keys = make_keys();
    let (mut model, mut time_us, mut times_us, mut lent_us) =
        (StateModel::default(), START_US, Vec::new(), vec![0]);
    for (n, step) in steps.iter().enumerate() {
        time_us = step.clock.apply(time_us);
        let asks = sort_by_policy(&step.charges);
        let limits: Vec<Limit> = asks
            .iter()
            .map(|ask| counter_limit(ask.counter, ask.requests))
            .collect();
        let charges = asks.iter().zip(&limits).map(|(ask, limit)| {
            let charge = PolicyCharges {
                counts_rejected: step.counts_rejected_bits
                    >> (2 * ask.group + u32::from(ask.shadow))
                    & 1
                    == 1,
                slot_id: n as u128,
                lease: step
                    .lease
                    .filter(|_| ask.group == 0)
                    .map(|(lease, _)| lease),
                requested_lease_units: step
                    .lease
                    .filter(|_| ask.group == 0)
                    .map_or(0, |(_, wanted)| wanted),
                ..ask.to_charge(limit, &keys)
            };
            (ask.policy_number(), charge)
        });

        let charges = join_policies(charges);
        let expected = model.decide(&charges, time_us);
        let expected_names_us: Vec<u64> = (expected.outcomes())
            .filter_map(|outcome| outcome.charged_at_us)
            .collect();
        let grants = expected.policies.iter().filter_map(|outcome| outcome.grant);
        lent_us.extend(grants.map(|grant| grant.until_us));
        let answer = decide_in_redis(connection, &charges, time_us).await;
        prop_assert_eq!(answer, expected, "step {} at {}", n, time_us);

        times_us.push(time_us);
        // In a queue, a charge is named by the end of its position.
        times_us.extend(expected_names_us);
        let limits: Vec<Limit> = step
            .settlements
            .iter()
            .map(|(counter, _)| counter_limit(*counter, 5))
            .collect();
        let late = step
            .settlements
            .iter()
            .zip(&limits)
            .map(|((counter, change), limit)| {
                let amendment = match *change {
                    SettlementSpec::ChargeMore(units) => Amendment::Charge(units),
                    SettlementSpec::ChargeInThePast { units, age_us } => {
                        Amendment::BackdatedCharge { units, age_us }
                    }
                    SettlementSpec::CreditCharged { units, steps } => Amendment::Credit {
                        units,
                        at_us: times_us[times_us.len().saturating_sub(steps + 1)],
                    },
                    SettlementSpec::CreditLeased { units, steps } => Amendment::Credit {
                        units,
                        at_us: lent_us[lent_us.len().saturating_sub(steps + 1)],
                    },
                    // A sidecar never takes a slot that it already holds.
                    SettlementSpec::Renew(slot) => Amendment::Renew {
                        slot: slot.min(n as u128),
                    },
                    SettlementSpec::Release(slot) => Amendment::Release {
                        slot: slot.min(n as u128),
                    },
                };
                Settlement {
                    limit,
                    key: &keys[key_number(*counter) as usize],
                    amendment,
                }
            });
        let late: Vec<_> = late.collect();
        if !late.is_empty() {
            model.apply_settlements(&late, time_us);
            run_script(connection, &SCRIPT.settle_command(&late, Some(time_us))).await;
        }
    }
    Ok(())
}

fn run_differential_test(runner: &mut TestRunner) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let server = RedisServer::start();
    let connection = runtime.block_on(server.connection());
    let checked = runner.run(&generate_steps(), |steps| {
        runtime.block_on(compare_decisions(&mut connection.clone(), &steps))
    });
    if let Err(failure) = checked {
        panic!("{failure}");
    }
}

#[test]
fn lua_decides_as_rust_does() {
    let config = Config {
        cases: 400,
        failure_persistence: None,
        ..Config::default()
    };
    run_differential_test(&mut TestRunner::new_with_rng(
        config,
        TestRng::deterministic_rng(RngAlgorithm::ChaCha),
    ));
}

#[test]
fn lua_decides_as_rust_does_at_random() {
    let config = Config {
        cases: 200,
        failure_persistence: None,
        ..Config::default()
    };
    run_differential_test(&mut TestRunner::new(config));
}

fn generate_leases() -> impl Strategy<Value = (LeaseTerms, u64)> {
    let lease = (
        prop_oneof![Just(None), Just(Some(1u64))],
        1..PERIOD_US / 2,
        1..8u64,
    );
    lease.prop_map(|(size, ttl_us, wanted)| (LeaseTerms { size, ttl_us }, wanted))
}

/// Calls that are made at the same time.
#[derive(Clone, Debug)]
struct BatchRound {
    clock: ClockMove,
    decisions: Vec<Vec<ChargeSpec>>,
    counts_rejected_bits: u8,
    lease: Option<(LeaseTerms, u64)>,
}

impl BatchRound {
    /// The lease request of a call's first policy: one call in three has one, if all its counters
    /// support leases.
    fn lease_for(&self, question: usize) -> Option<(LeaseTerms, u64)> {
        let asks = self.decisions.get(question)?;
        let lends = |ask: &ChargeSpec| {
            ask.group > 0 || (LEASABLE_COUNTERS.contains(&ask.counter) && !ask.shadow)
        };
        let may = asks.iter().all(lends) && asks.is_sorted_by_key(|ask| ask.group);
        self.lease.filter(|_| question.is_multiple_of(3) && may)
    }
}

fn generate_rounds() -> impl Strategy<Value = Vec<BatchRound>> {
    // Counters that get identical calls, and few different costs.
    let counter = prop::sample::select(vec![1usize, 2, 3, 4, 5, 7, 9, 13]);
    let requests = prop_oneof![6 => Just(5u64), 1 => 0..9u64, 1 => Just(MAX_UNITS)];
    let single = (
        counter,
        prop_oneof![6 => Just(1u64), 1 => Just(2u64), 1 => Just(MAX_UNITS / 3)],
        requests,
    );
    let single = single.prop_map(|(counter, cost, requests)| {
        vec![ChargeSpec {
            counter,
            cost,
            requests,
            group: 0,
            shadow: false,
            settles: false,
        }]
    });
    let several = (single, 1..9usize).prop_map(|(question, times)| vec![question; times]);
    let mixed = generate_steps()
        .prop_map(|steps| steps.into_iter().take(2).map(|step| step.charges).collect());
    let questions = prop::collection::vec(prop_oneof![3 => several, 1 => mixed], 1..6);
    let clock = prop_oneof![
        Just(ClockMove::Stay),
        (1..20u64).prop_map(ClockMove::Forward),
        (1..2 * PERIOD_US).prop_map(ClockMove::Forward),
        (1..3 * PERIOD_US).prop_map(ClockMove::Back),
        (-1..=1i64).prop_map(ClockMove::Edge),
    ];
    let lease = prop::option::of(generate_leases());
    let round =
        (clock, questions, any::<u8>(), lease).prop_map(|(clock, questions, counting, lease)| {
            BatchRound {
                clock,
                decisions: questions.into_iter().flatten().collect(),
                counts_rejected_bits: counting,
                lease,
            }
        });
    prop::collection::vec(round, 1..20)
}

async fn compare_batched_decisions(
    connection: &mut MultiplexedConnection,
    rounds: &[BatchRound],
) -> Result<(), TestCaseError> {
    let _: () = redis::cmd("FLUSHALL")
        .query_async(connection)
        .await
        .unwrap();
    let keys = make_keys();
    let (mut model, mut time_us, mut slot) = (StateModel::default(), START_US, 0);
    for (n, round) in rounds.iter().enumerate() {
        time_us = round.clock.apply(time_us);
        let decisions: Vec<_> = (round.decisions.iter())
            .map(|asks| sort_by_policy(asks))
            .collect();
        let limits = decisions.iter().map(|asks| {
            asks.iter()
                .map(|ask| counter_limit(ask.counter, ask.requests))
                .collect::<Vec<Limit>>()
        });
        let limits: Vec<_> = limits.collect();
        let questions = decisions
            .iter()
            .zip(&limits)
            .enumerate()
            .map(|(at, (asks, limits))| {
                slot += 1;
                let (lease, wanted) = round.lease_for(at).unzip();
                let charges = asks.iter().zip(limits).map(|(ask, limit)| {
                    let charge = PolicyCharges {
                        counts_rejected: asks.len() > 1
                            && round.counts_rejected_bits >> ask.group & 1 == 1,
                        slot_id: slot,
                        lease: lease.filter(|_| ask.group == 0),
                        requested_lease_units: wanted.filter(|_| ask.group == 0).unwrap_or(0),
                        ..ask.to_charge(limit, &keys)
                    };
                    (ask.policy_number(), charge)
                });
                join_policies(charges)
            });
        let questions: Vec<_> = questions.collect();
        let expected: Vec<_> = questions
            .iter()
            .map(|charges| model.decide(charges, time_us))
            .collect();

        CLOCK.1.set_us(time_us);
        let mut batch = DecisionBatch::default();
        let (mut asked, mut times) = (Vec::new(), Vec::new());
        for charges in &questions {
            let number = batch.add_or_merge_request(&SCRIPT, charges);
            times.resize(batch.len(), 0);
            asked.push((number, times[number]));
            times[number] += 1;
        }
        let reply = run_script(
            connection,
            &batch.build_command(&SCRIPT, &times, Some(time_us)),
        )
        .await;
        let answers = DecisionBatch::parse_reply(reply, &times).unwrap();
        for (at, ((charges, (number, nth)), expected)) in
            questions.iter().zip(asked).zip(expected).enumerate()
        {
            let answer = answers[number].for_caller(nth).parse_decision(charges);
            prop_assert_eq!(
                answer,
                Ok(expected),
                "round {}, call {} at {}",
                n,
                at,
                time_us
            );
        }
    }
    Ok(())
}

#[test]
fn a_batch_decides_as_the_same_calls_in_sequence() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let server = RedisServer::start();
    let connection = runtime.block_on(server.connection());
    let config = Config {
        cases: 400,
        failure_persistence: None,
        ..Config::default()
    };
    let checked = TestRunner::new(config).run(&generate_rounds(), |rounds| {
        runtime.block_on(compare_batched_decisions(&mut connection.clone(), &rounds))
    });
    if let Err(failure) = checked {
        panic!("{failure}");
    }
}
