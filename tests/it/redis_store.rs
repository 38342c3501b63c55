//! Compares the Lua scripts with the Rust implementation: equal sequences at equal times get equal
//! answers.

use crate::lua::PERIOD_US;
use crate::support::prelude::*;
pub(crate) use crate::support::sliding_log;
use crate::support::store_harness::first_counter;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use redis::aio::MultiplexedConnection;
use std::collections::BTreeSet;
use std::sync::LazyLock;
use tidegate::clock::{Clock, ManualClock};
use tidegate::limiter::{
    Calendar, CalendarUnit, ChargeEffect, ChargeOutcome, CounterState, LeaseGrant, LeaseTerms,
    compute_lease_grant, determine_effects,
};
use tidegate::store::redis::ScriptLibrary;

pub(crate) fn make_key(policy: &str) -> Key {
    KeyBuilder::new(policy).finish()
}

pub(crate) fn fixed_window(requests: u64, per_us: u64, offset_us: u64) -> Limit {
    make_limit(requests, per_us, Algorithm::FixedWindow { offset_us })
}

/// Clocks change on two days of the year, at 01:00 UTC.
pub(crate) fn calendar_day(requests: u64) -> Limit {
    let calendar = Calendar::new(CalendarUnit::Day, "Europe/Berlin").unwrap();
    Limit::per_calendar_period(requests, calendar)
}

pub(crate) fn sliding_window(requests: u64, per_us: u64, buckets: u64) -> Limit {
    make_limit(requests, per_us, Algorithm::SlidingWindow { buckets })
}

/// The largest valid bucket: max(burst, requests) × per fits 2^53.
pub(crate) fn token_bucket(requests: u64, per_us: u64, burst: u64) -> Limit {
    warm_up_bucket(requests, per_us, burst, 0)
}

/// A bucket that starts with a third of its capacity.
pub(crate) fn warm_up_bucket(requests: u64, per_us: u64, burst: u64, warm_up_us: u64) -> Limit {
    let most = MAX_UNITS / per_us;
    let (requests, burst) = (requests.min(most), burst.clamp(1, most));
    make_limit(
        requests,
        per_us,
        Algorithm::TokenBucket { burst, warm_up_us },
    )
}

pub(crate) fn concurrency(requests: u64, lease_us: u64) -> Limit {
    make_limit(
        requests,
        lease_us,
        Algorithm::Concurrency { max_duration_us: 0 },
    )
}

/// The largest valid queue: max_delay × requests + per fits 2^53.
pub(crate) fn leaky_bucket(requests: u64, per_us: u64, max_delay_us: u64) -> Limit {
    let requests = requests.min((MAX_UNITS - per_us) / max_delay_us.max(1));
    make_limit(requests, per_us, Algorithm::LeakyBucket { max_delay_us })
}

pub(crate) fn make_charge<'a>(limit: &'a Limit, key: &'a Key, cost: u64) -> PolicyCharges<'a> {
    PolicyCharges::new(limit, key, cost)
}

/// Charges all limits or none by the Rust rules, as simply as possible: only a charge changes
/// state.
#[derive(Default)]
pub(crate) struct StateModel {
    states: HashMap<(u128, Algorithm, u64), CounterState>,
}

/// A state that is ahead of the clock by more than its period expires as if its time went on from
/// now.
fn bound_times(status: &mut LimitStatus, limit: &Limit, state: &CounterState, time_us: u64) {
    let newest_us = match limit.algorithm {
        Algorithm::Block => state.expires_at_us(limit).saturating_sub(limit.per_us),
        _ => state.now_lower_bound_us(),
    };
    let lead_us = newest_us.saturating_sub(time_us);
    if lead_us <= limit.per_us {
        return;
    }
    let expires_us = state.expires_at_us(limit) - lead_us;
    if let Some(Refusal::Until(until_us)) = &mut status.refusal {
        *until_us = expires_us.min(*until_us);
    }
    status.next_growth_us = status.next_growth_us.map(|us| expires_us.min(us - lead_us));
}

impl StateModel {
    pub(crate) fn decide(&mut self, request: &[PolicyCharges<'_>], time_us: u64) -> Decision {
        let charges: Vec<Charge<'_, '_>> = each_charge(request).collect();
        let mut checked: Vec<(CounterState, Option<Refusal>)> = charges
            .iter()
            .map(|charge| {
                let (algorithm, per_us) = charge.limit.counter_identity();
                let kept = self.states.get(&(charge.key.id(), algorithm, per_us));
                let state = kept
                    .cloned()
                    .unwrap_or_else(|| charge.limit.initial_state());
                let refusal = state.view_at(charge.limit, time_us).refusal(charge.cost);
                (state, refusal)
            })
            .collect();
        let refusals: Vec<_> = checked.iter().map(|(_, refusal)| *refusal).collect();
        let admitted = charges
            .iter()
            .zip(&refusals)
            .all(|(charge, refusal)| !charge.is_enforced() || refusal.is_none());
        // A longer step back than the period of a key: the keys of the request expire earlier.
        let has_clock_stepped_back = charges
            .iter()
            .zip(&checked)
            .any(|(charge, (state, _))| state.now_lower_bound_us() > time_us + charge.limit.per_us);
        let mut decision = Decision {
            now_us: time_us,
            admitted,
            ..Decision::without_outcomes(request)
        };
        let mut delay_us = 0;
        let decided = charges
            .iter()
            .zip(&mut checked)
            .zip(decision.outcomes_mut());
        let decided = decided.zip(determine_effects(request, &refusals));
        for (((charge, (state, refusal)), outcome), effect) in decided {
            match effect {
                ChargeEffect::NoChange => {}
                ChargeEffect::Charge => {
                    state.charge(charge, time_us);
                    if !charge.policy.shadow {
                        delay_us = state
                            .view_at(charge.limit, time_us)
                            .delay_us()
                            .max(delay_us);
                    }
                }
                ChargeEffect::ChargeRejected => {
                    state.charge_rejected(charge, time_us);
                    *refusal = state.view_at(charge.limit, time_us).refusal(charge.cost);
                }
            }
            let is_reported = charge.is_estimate && effect == ChargeEffect::Charge;
            let charged_at_us =
                is_reported.then(|| state.view_at(charge.limit, time_us).charged_at_us());
            let (algorithm, per_us) = charge.limit.counter_identity();
            self.states
                .insert((charge.key.id(), algorithm, per_us), state.clone());
            let mut status = state.view_at(charge.limit, time_us).limit_status(*refusal);
            if has_clock_stepped_back {
                bound_times(&mut status, charge.limit, state, time_us);
            }
            *outcome = ChargeOutcome {
                status: Some(status),
                charged_at_us,
                ..ChargeOutcome::default()
            };
        }
        decision.delay_us = delay_us;
        for (policy, outcome) in request.iter().zip(&mut decision.policies) {
            outcome.grant = admitted
                .then(|| self.grant_lease(policy, time_us))
                .flatten();
        }
        decision
    }

    pub(crate) fn grant_lease(
        &mut self,
        policy: &PolicyCharges<'_>,
        time_us: u64,
    ) -> Option<LeaseGrant> {
        let id = |charge: &Charge<'_, '_>| {
            (
                charge.key.id(),
                charge.limit.counter_identity().0,
                charge.limit.counter_identity().1,
            )
        };
        let grant = compute_lease_grant(policy, time_us, |charge, until_us| {
            self.states[&id(charge)]
                .view_at(charge.limit, time_us)
                .grantable_units(time_us, until_us)
        })?;
        for charge in policy.charges().filter(|_| !policy.shadow) {
            let state = self.states.get_mut(&id(&charge)).unwrap();
            state.grant_lease(charge.limit, grant.units, time_us, grant.until_us);
        }
        Some(grant)
    }

    pub(crate) fn apply_settlements(&mut self, late: &[Settlement<'_>], time_us: u64) {
        for late in late {
            let (algorithm, per_us) = late.limit.counter_identity();
            let state = self.states.entry((late.key.id(), algorithm, per_us));
            state.or_insert_with(|| late.limit.initial_state()).amend(
                late.limit,
                late.amendment,
                time_us,
            );
        }
    }
}

pub(crate) async fn decide_in_redis(
    connection: &mut MultiplexedConnection,
    charges: &[PolicyCharges<'_>],
    time_us: u64,
) -> Decision {
    let reply = run_script(connection, &SCRIPT.decide_command(charges, Some(time_us))).await;
    ScriptLibrary::parse_decision_reply(&reply, charges)
        .unwrap_or_else(|| panic!("{reply:?} for {charges:?}"))
}

pub(crate) static SCRIPT: LazyLock<ScriptLibrary> =
    LazyLock::new(|| ScriptLibrary::with_clock("t", CLOCK.0.clone()));

/// Selects the periods of calendars that a batch names.
pub(crate) static CLOCK: LazyLock<(Clock, ManualClock)> = LazyLock::new(|| Clock::manual(START_US));

/// Runs a script and loads it first if needed.
pub(crate) async fn run_script(
    connection: &mut MultiplexedConnection,
    command: &redis::Cmd,
) -> redis::Value {
    match connection.send_packed_command(command).await {
        Ok(redis::Value::ServerError(error)) if error.code() == "NOSCRIPT" => {}
        reply => return reply.unwrap(),
    }
    let loads = SCRIPT.load_commands_for_used_programs();
    connection
        .send_packed_commands(&loads, 0, loads.len())
        .await
        .unwrap();
    connection.send_packed_command(command).await.unwrap()
}

#[tokio::test]
async fn charges_of_max_units_expire_and_can_be_repeated() {
    let server = RedisServer::start();
    let mut connection = server.connection().await;
    let (owner, limit, mut model) = (
        make_key("most"),
        sliding_log(MAX_UNITS, 1_000),
        StateModel::default(),
    );
    for n in 0..6 {
        let charges = [make_charge(
            &limit,
            &owner,
            if n == 4 { 1 } else { MAX_UNITS },
        )];
        for time_us in [START_US + n * 1_000, START_US + n * 1_000 + 1] {
            let answer = decide_in_redis(&mut connection, &charges, time_us).await;
            assert_eq!(answer, model.decide(&charges, time_us));
        }
    }
}

/// Long logs are trimmed in batches, and the search for the expiring unit stays exact.
#[tokio::test]
async fn long_logs_are_trimmed_in_portions_and_stay_exact() {
    let server = RedisServer::start();
    let mut connection = server.connection().await;
    let (key, mut model, mut time_us) = (make_key("long"), StateModel::default(), START_US);
    let name = ScriptLibrary::new("t").counter_key(first_counter(&make_charge(
        &sliding_log(1, 1_000_000),
        &key,
        1,
    )));
    for round in 0..3u64 {
        for n in 0..700u64 {
            time_us += 3;
            let limit = sliding_log(if n % 5 == 0 { 40 } else { 2_000 }, 1_000_000);
            let charges = [make_charge(
                &limit,
                &key,
                [1, 1, 3, 7][usize::try_from(n % 4).unwrap()],
            )];
            let expected = model.decide(&charges, time_us);
            let answer = decide_in_redis(&mut connection, &charges, time_us).await;
            assert_eq!(answer, expected, "round {round}, {n}");
        }
        // All but the last few charges expire at once.
        time_us += 1_000_000 - 10;
    }
    let limit = sliding_log(2_000, 1_000_000);
    let mut entries: u64 = redis::cmd("ZCARD")
        .arg(&name)
        .query_async(&mut connection)
        .await
        .unwrap();
    while entries > 20 {
        time_us += 1;
        let charges = [make_charge(&limit, &key, 1)];
        let answer = decide_in_redis(&mut connection, &charges, time_us).await;
        assert_eq!(answer, model.decide(&charges, time_us));
        let left: u64 = redis::cmd("ZCARD")
            .arg(&name)
            .query_async(&mut connection)
            .await
            .unwrap();
        assert!(left < entries, "{entries} became {left}");
        assert!(entries - left <= 64, "{entries} became {left}");
        entries = left;
    }
}

/// The oldest charges that count are in the middle of a bundle most of the time.
#[tokio::test]
async fn a_log_of_bundles_is_exact_while_it_slides() {
    let server = RedisServer::start();
    let mut connection = server.connection().await;
    let (key, mut model, mut time_us) = (make_key("slides"), StateModel::default(), START_US);
    let limit = sliding_log(400, 1_000_000);
    let (seed, mut refused) = (test_seed(), 0);
    println!("TIDEGATE_TEST_SEED={seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    for n in 0..2_500 {
        time_us += rng.u64(1..4_800);
        // A single unit has a plain program.
        let cost = if rng.u8(..8) == 0 { 2 } else { 1 };
        let charges = [make_charge(&limit, &key, cost)];
        let answer = decide_in_redis(&mut connection, &charges, time_us).await;
        assert_eq!(answer, model.decide(&charges, time_us), "{n}");
        refused += u32::from(!answer.admitted);
    }
    assert!((100..1_500).contains(&refused), "{refused}");
}

/// Applies `count_rejected` decisions, settlements and leases to one counter in both
/// implementations.
async fn compare_amended_decisions(
    connection: &mut MultiplexedConnection,
    limit: &Limit,
    steps: &[(u8, u64, u64, usize)],
) -> Result<(), TestCaseError> {
    let _: () = redis::cmd("FLUSHALL")
        .query_async(connection)
        .await
        .unwrap();
    let (owner, mut model, mut time_us, mut times) = (
        make_key("k"),
        StateModel::default(),
        START_US,
        vec![START_US],
    );
    for (n, (what, after_us, units, back)) in steps.iter().enumerate() {
        time_us += after_us;
        let lease = (*what == 7).then_some(LeaseTerms {
            size: Some(1),
            ttl_us: 1 + units * 7,
        });
        let charges = [PolicyCharges {
            counts_rejected: true,
            lease,
            requested_lease_units: *units,
            ..make_charge(limit, &owner, *units)
        }];
        let at_us = times[times.len().saturating_sub(back + 1)];
        let amendment = match what {
            0 => Some(Amendment::Credit {
                units: *units,
                at_us,
            }),
            1 => Some(Amendment::Charge(*units)),
            _ => None,
        };
        let look = [make_charge(limit, &owner, 0)];
        let charges = if let Some(amendment) = amendment {
            let settlements = [Settlement {
                limit,
                key: &owner,
                amendment,
            }];
            run_script(
                connection,
                &SCRIPT.settle_command(&settlements, Some(time_us)),
            )
            .await;
            model.apply_settlements(&settlements, time_us);
            &look
        } else {
            times.push(time_us);
            &charges
        };
        let expected = model.decide(charges, time_us);
        let grants = expected.policies.iter().filter_map(|outcome| outcome.grant);
        times.extend(grants.map(|grant| grant.until_us));
        prop_assert_eq!(
            decide_in_redis(connection, charges, time_us).await,
            expected,
            "step {} at {}",
            n,
            time_us
        );
    }
    Ok(())
}

#[test]
fn lua_counts_rejected_requests_and_settles_costs_as_rust_does() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let server = RedisServer::start();
    let connection = runtime.block_on(server.connection());
    // The long period keeps some hundred charges in the log, so some entries are merged.
    let limits = [
        sliding_log(5, PERIOD_US),
        sliding_log(300, 20 * PERIOD_US),
        sliding_log(2_000, 20 * PERIOD_US),
        sliding_window(40, PERIOD_US, 10),
    ];
    let units = prop_oneof![18 => Just(1u64), 4 => 2..6u64, 1 => 6..90u64];
    let step = (
        0..9u8,
        prop_oneof![1 => Just(0u64), 9 => 1..5u64, 1 => 0..500u64],
        units,
        0..400usize,
    );
    let cases = (0..limits.len(), prop::collection::vec(step, 1..700));
    let config = Config {
        cases: 60,
        failure_persistence: None,
        ..Config::default()
    };
    let checked = TestRunner::new(config).run(&cases, |(limit, steps)| {
        runtime.block_on(compare_amended_decisions(
            &mut connection.clone(),
            &limits[limit],
            &steps,
        ))
    });
    if let Err(failure) = checked {
        panic!("{failure}");
    }
}

#[tokio::test]
async fn a_small_log_has_one_entry_per_charge_and_a_large_one_is_compressed() {
    let server = RedisServer::start();
    let mut connection = server.connection().await;
    let (limit, owner) = (sliding_log(10_000, 60_000_000), make_key("k"));
    let charges = [make_charge(&limit, &owner, 1)];
    let name = ScriptLibrary::new("t").counter_key(first_counter(&charges[0]));
    for n in 1..=10_000 {
        assert!(
            decide_in_redis(&mut connection, &charges, START_US + n * 1_000)
                .await
                .admitted
        );
        let (bytes, entries): (u64, u64) = match n {
            128 | 1_000 | 10_000 => redis::pipe()
                .cmd("MEMORY")
                .arg("USAGE")
                .arg(&name)
                .arg("SAMPLES")
                .arg(0)
                .cmd("ZCARD")
                .arg(&name)
                .query_async(&mut connection)
                .await
                .unwrap(),
            _ => continue,
        };
        match n {
            128 => assert!(
                entries == 128 && bytes < 128 * 25,
                "{entries} entries, {bytes} bytes"
            ),
            1_000 => assert!(bytes < 1_000 * 20, "{bytes} bytes"),
            _ => assert!(bytes < 10_000 * 8, "{bytes} bytes"),
        }
    }
}

#[tokio::test]
async fn a_clock_that_ran_ahead_for_one_key_does_not_affect_others() {
    let server = RedisServer::start();
    let mut connection = server.connection().await;
    let (limit, ahead, here) = (sliding_log(1, 1_000), make_key("ahead"), make_key("here"));
    decide_in_redis(&mut connection, &[make_charge(&limit, &here, 1)], START_US).await;
    decide_in_redis(
        &mut connection,
        &[make_charge(&limit, &ahead, 1)],
        START_US + 10_000,
    )
    .await;
    let both = [
        make_charge(&limit, &ahead, 1),
        make_charge(&limit, &here, 1),
    ];
    let answer = decide_in_redis(&mut connection, &both, START_US + 1).await;
    let until =
        |answer: &Decision, n: usize| answer.outcomes().nth(n).unwrap().status.unwrap().refusal;
    // The state is ten periods ahead: its key now expires after one.
    assert_eq!(until(&answer, 0), Some(Refusal::Until(START_US + 1_001)));
    assert_eq!(until(&answer, 1), Some(Refusal::Until(START_US + 1_000)));
}

/// Without a given time, a unit of a window that has begun is charged by one command, which reads no
/// clock: the expiry of the key ends the window.
#[tokio::test]
async fn windows_end_with_their_keys_as_the_rule_says() {
    let server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    let (owner, mut model) = (make_key("window"), StateModel::default());
    // The second one is never full.
    let limits = [40, 8_000].map(|requests| fixed_window(requests, 20_000, 7_000));
    let owners = [owner, make_key("not full")];
    let (end, mut windows) = (Instant::now() + Duration::from_secs(1), BTreeSet::new());
    let (mut admitted, mut refused, mut rng) = (0, 0, fastrand::Rng::new());
    while Instant::now() < end {
        let nth = usize::from(rng.bool());
        let (limit, owner) = (limits[nth], &owners[nth]);
        let charges = [make_charge(&limit, owner, 1 + admitted % 2)];
        let at = tokio::time::Instant::now();
        // Redis runs on this machine.
        let window = |now_us: u64| now_us.saturating_sub(7_000) / limit.per_us;
        let before = window(Clock::system().now_us());
        let decision = redis.decide(&charges, at).await.unwrap();
        let possible = before..=window(Clock::system().now_us());
        assert!(
            possible.contains(&window(decision.now_us)),
            "{possible:?}: {decision:?}"
        );
        let expected = model.decide(&charges, decision.now_us);
        assert_eq!(decision, expected);
        windows.insert(window(decision.now_us));
        admitted += u64::from(decision.admitted);
        refused += u64::from(!decision.admitted);
    }
    println!(
        "{admitted} admitted, {refused} refused in {} windows",
        windows.len()
    );
    assert!(windows.len() > 10 && admitted > 200 && refused > 100);
}

#[tokio::test]
async fn keys_expire_exactly_when_their_state_is_fresh_again() {
    let server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    let (log, window, owner) = (
        sliding_log(5, 60_000_000),
        fixed_window(5, 60_000_000, 7_000_000),
        make_key("ttl"),
    );
    let line = leaky_bucket(5, 60_000_000, 1_000_000);
    let charges = [
        make_charge(&log, &owner, 1),
        make_charge(&window, &owner, 1),
        make_charge(&line, &owner, 1),
    ];
    let answer = redis
        .decide(&charges, tokio::time::Instant::now())
        .await
        .unwrap();
    let script = ScriptLibrary::new("t");
    for (charge, ends_us) in [
        (&charges[0], answer.now_us + 60_000_000),
        (&charges[2], answer.now_us + 12_000_000),
        (
            &charges[1],
            // The last millisecond in which the key exists is that before the next window.
            answer.now_us - (answer.now_us - 7_000_000) % 60_000_000 + 60_000_000 - 1_000,
        ),
    ] {
        let expires_ms: u64 = server
            .command(&format!(
                "PEXPIRETIME {}",
                script.counter_key(first_counter(charge))
            ))
            .await;
        assert_eq!(expires_ms, ends_us.div_ceil(1000));
    }
}

#[tokio::test]
async fn a_refusal_writes_nothing_and_every_key_expires() {
    let server = RedisServer::start();
    let mut connection = server.connection().await;
    let (one, none, owner, other) = (
        sliding_log(1, 1_000_000),
        sliding_log(0, 1_000_000),
        make_key("a"),
        make_key("b"),
    );
    let charges = [make_charge(&one, &owner, 1), make_charge(&none, &other, 1)];
    assert!(
        !decide_in_redis(&mut connection, &charges, START_US)
            .await
            .admitted
    );
    assert_eq!(list_counter_keys(&server).await, Vec::<String>::new());
    assert!(
        decide_in_redis(&mut connection, &charges[..1], START_US)
            .await
            .admitted
    );
    let before: u64 = server
        .command(&format!(
            "PEXPIRETIME {}",
            list_counter_keys(&server).await[0]
        ))
        .await;
    assert!(
        !decide_in_redis(&mut connection, &charges[..1], START_US + 500_000)
            .await
            .admitted
    );
    let after: u64 = server
        .command(&format!(
            "PEXPIRETIME {}",
            list_counter_keys(&server).await[0]
        ))
        .await;
    assert_eq!(before, (START_US + 1_000_000) / 1000);
    assert_eq!(after, (START_US + 1_000_000) / 1000);
}

#[tokio::test]
async fn there_is_one_script_per_set_of_algorithms() {
    let server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    // The script for an empty charge list, and the script that verifies the connection.
    let number = server
        .read_info_number("memory", "number_of_cached_scripts")
        .await;
    assert_eq!(number, 2);
    for n in 1..50 {
        let (limit, owner) = (sliding_log(n, n * 1_000_000), make_key(&n.to_string()));
        redis
            .decide(
                &[make_charge(&limit, &owner, n)],
                tokio::time::Instant::now(),
            )
            .await
            .unwrap();
    }
    let number = server
        .read_info_number("memory", "number_of_cached_scripts")
        .await;
    // With the plain section, which is for one unit of a log, and without it.
    assert_eq!(number, 4);
}

/// Real time and real contention: no window exceeds the limit, and at least 99 % of it is used.
#[tokio::test]
async fn many_tasks_on_one_key_use_up_the_limit_and_never_exceed_it() {
    const LIMIT: u64 = 400;
    const PER_US: u64 = 500_000;
    const SECONDS: u64 = 3;
    let server = RedisServer::start();
    let handles = [server.connect().await.1, server.connect().await.1];
    let end = Instant::now() + Duration::from_secs(SECONDS);
    let tasks: Vec<_> = (0..64)
        .map(|n| {
            tokio::spawn(decide_until(
                handles[n % 2].clone(),
                sliding_log(LIMIT, PER_US),
                end,
            ))
        })
        .collect();
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await.unwrap());
    }
    times.sort_unstable();
    let limit = usize::try_from(LIMIT).unwrap();
    for (nth, first) in times.iter().enumerate() {
        if let Some(beyond) = times.get(nth + limit) {
            assert!(
                beyond - first >= PER_US,
                "{} units in {} µs",
                limit + 1,
                beyond - first
            );
        }
    }
    let possible = LIMIT * (SECONDS * 1_000_000 / PER_US);
    let admitted = u64::try_from(times.len()).unwrap();
    assert!(admitted * 100 >= possible * 99, "{admitted} of {possible}");
}

/// Makes decisions as fast as possible. Returns the times of the admitted ones on the store's
/// clock.
async fn decide_until(redis: RedisStore, limit: Limit, end: Instant) -> Vec<u64> {
    let (owner, mut admitted) = (make_key("hot"), Vec::new());
    while Instant::now() < end {
        let answer = redis
            .decide(
                &[make_charge(&limit, &owner, 1)],
                tokio::time::Instant::now(),
            )
            .await;
        let answer = answer.expect("nothing fails here");
        if answer.admitted {
            admitted.push(answer.now_us);
        }
    }
    admitted
}

/// A client that waits for the reported time is admitted, also when the deny cache reported it.
#[tokio::test]
async fn a_request_is_admitted_after_the_reported_wait() {
    const PER: Duration = Duration::from_millis(60);
    let server = RedisServer::start();
    let store = Store::from_redis(server.connect().await.1);
    for (name, limit) in [
        ("log", sliding_log(3, 60_000)),
        ("window", fixed_window(3, 60_000, 0)),
        ("line", leaky_bucket(3, 60_000, 45_000)),
    ] {
        let owner = make_key(name);
        for round in 0..20 {
            let charges = [make_charge(&limit, &owner, 1)];
            let mut refusals = 0;
            // The first rejection comes from Redis, the next ones from the deny cache. The wait is
            // that of the last one.
            let wait = loop {
                let answer = store.decide(&charges).await.unwrap();
                match answer.statuses().next().unwrap().refusal {
                    Some(Refusal::Until(until_us)) if refusals == 2 => {
                        break until_us - answer.now_us;
                    }
                    Some(_) => refusals += 1,
                    None => {}
                }
            };
            let wait = Duration::from_micros(wait);
            assert!(wait <= PER, "round {round}: {wait:?}");
            // A thread's sleep is never shorter than requested.
            std::thread::sleep(wait);
            let answer = store.decide(&charges).await.unwrap();
            assert!(answer.admitted, "round {round}: {answer:?}");
        }
    }
}

#[tokio::test]
async fn an_exhausted_key_is_refused_without_calling_redis() {
    let mut server = RedisServer::start();
    let shared = SharedRedisState::new(server.settings());
    let redis = RedisStore::start(&shared);
    redis.wait_until_ready().await;
    let store = Store::from_redis(redis);
    let (limit, owner) = (sliding_log(1, 10_000_000), make_key("spent"));
    let charges = [make_charge(&limit, &owner, 1)];
    assert!(store.decide(&charges).await.unwrap().admitted);
    let refused = store.decide(&charges).await.unwrap();
    let calls = server
        .read_info_number("commandstats", "cmdstat_evalsha")
        .await;
    let again = store.decide(&charges).await.unwrap();
    assert_eq!(
        server
            .read_info_number("commandstats", "cmdstat_evalsha")
            .await,
        calls
    );
    let wait = |decision: &Decision| match decision.outcomes().next().unwrap().status {
        Some(LimitStatus {
            refusal: Some(Refusal::Until(until_us)),
            ..
        }) => until_us - decision.now_us,
        status => panic!("{status:?}"),
    };
    assert!(!again.admitted && wait(&again) <= wait(&refused) && wait(&again) > 9_000_000);
    server.kill();
    assert!(
        !store.decide(&charges).await.unwrap().admitted,
        "the deny cache must answer although Redis is down"
    );
    let other = make_key("other");
    assert!(
        store
            .decide(&[make_charge(&limit, &other, 1)])
            .await
            .is_err()
    );
}

/// The cached wait of one limit must not be reported while another limit rejects the client for
/// longer.
#[tokio::test]
async fn the_longest_wait_is_reported_when_limits_were_exhausted_separately() {
    let server = RedisServer::start();
    let store = Store::from_redis(server.connect().await.1);
    let (short, long) = (sliding_log(1, 2_000_000), sliding_log(1, 60_000_000));
    let (one, other) = (make_key("one"), make_key("other"));
    let charges = [make_charge(&short, &one, 1), make_charge(&long, &other, 1)];
    for apart in [&charges[..1], &charges[1..]] {
        assert!(store.decide(apart).await.unwrap().admitted);
    }
    assert!(!store.decide(&charges[..1]).await.unwrap().admitted);
    for _ in 0..2 {
        let answer = store.decide(&charges).await.unwrap();
        let until_us = answer.statuses().filter_map(|status| match status.refusal {
            Some(Refusal::Until(until_us)) => Some(until_us),
            _ => None,
        });
        assert!(
            until_us.max().unwrap() - answer.now_us > 50_000_000,
            "{answer:?}"
        );
    }
}

#[tokio::test]
async fn a_block_is_one_more_key_in_the_same_slot_and_expires() {
    let server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    let (owner, one) = (make_key("p"), sliding_log(1, 60_000_000));
    let block = |per_us| make_limit(1, per_us, Algorithm::Block);
    let (short, long) = (block(90_000_000), block(900_000_000));
    let charges =
        |block| join_policies([block, &one].map(|limit| (0, make_charge(limit, &owner, 1))));
    let decide = async |block| {
        redis
            .decide(&charges(block), tokio::time::Instant::now())
            .await
            .unwrap()
    };
    assert!(decide(&short).await.admitted);
    // Excludes the key of the connection's own probe.
    let kept = async || -> Vec<String> {
        list_counter_keys(&server)
            .await
            .into_iter()
            .filter(|name| name.ends_with(":p"))
            .collect()
    };
    assert_eq!(kept().await.len(), 1, "there must be no block yet");
    let begins = decide(&short).await;
    let ends_us = begins.now_us + 90_000_000;
    let name = ScriptLibrary::new("t").counter_key(first_counter(&make_charge(&short, &owner, 1)));
    let tag = |name: &str| name[name.find('{').unwrap()..=name.find('}').unwrap()].to_owned();
    let kept = kept().await;
    assert!(kept.len() == 2 && kept.contains(&name), "{kept:?}");
    assert_eq!(tag(&kept[0]), tag(&kept[1]));
    // A longer `block_for` after a reload keeps the same block, and retries do not change it.
    assert_eq!(
        decide(&long).await.statuses().next().unwrap().refusal,
        Some(Refusal::Until(ends_us))
    );
    let expires_ms: u64 = server.command(&format!("PEXPIRETIME {name}")).await;
    assert_eq!(expires_ms, ends_us.div_ceil(1000));
}

#[tokio::test]
async fn a_cached_block_reports_how_long_it_lasts() {
    let server = RedisServer::start();
    let (_shared, redis) = server.connect().await;
    let store = Store::from_redis(redis);
    let (owner, one) = (make_key("p"), sliding_log(1, 100_000));
    let block = make_limit(1, 60_000_000, Algorithm::Block);
    let charges = join_policies([&block, &one].map(|limit| (0, make_charge(limit, &owner, 1))));
    while store.decide(&charges).await.unwrap().admitted {}
    let again = store.decide(&charges).await.unwrap();
    let status = again.statuses().next().unwrap();
    assert!(!again.admitted && status.refusal.is_some(), "{status:?}");
    assert_eq!(status.refusal, status.next_growth_us.map(Refusal::Until));
}

#[tokio::test]
async fn a_foreign_value_in_place_of_a_block_is_an_error() {
    let server = RedisServer::start();
    let mut connection = server.connection().await;
    let (owner, one) = (make_key("p"), sliding_log(1, 1_000));
    let block = make_limit(1, 1_000, Algorithm::Block);
    let charges = join_policies([&block, &one].map(|limit| (0, make_charge(limit, &owner, 1))));
    decide_in_redis(&mut connection, &charges, START_US).await;
    let _: () = server.command("FLUSHDB").await;
    let name = SCRIPT.counter_key(first_counter(&charges[0]));
    for foreign in ["", "x", "-1", "1e3", "99999999999999999999", "1:2"] {
        let _: () = redis::cmd("SET")
            .arg(&name)
            .arg(foreign)
            .query_async(&mut connection)
            .await
            .unwrap();
        let reply = connection
            .send_packed_command(&SCRIPT.decide_command(&charges, Some(START_US)))
            .await;
        assert!(
            format!("{reply:?}").contains("FOREIGN"),
            "{foreign:?}: {reply:?}"
        );
        assert_eq!(
            list_counter_keys(&server).await,
            std::slice::from_ref(&name),
            "nothing must be written"
        );
    }
}
