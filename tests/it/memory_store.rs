//! Tests of the memory store: it agrees with the reference model, enforces limits and stays
//! bounded.

use crate::reference_model::NaiveModel;
use crate::support::prelude::*;
use proptest::prelude::*;
use std::thread;
use tidegate::clock::{Clock, ManualClock};
use tidegate::store::{MemorySettings, MemoryStore};

const START_US: u64 = 1_800_000_000_000_123;
const LARGE_SETTINGS: MemorySettings = MemorySettings {
    max_keys: 10_000,
    max_bytes: 64 << 20,
};
const SLIDING_LOG: Algorithm = Algorithm::SlidingLog;
const HOUR_US: u64 = 3_600_000_000;

/// Policy name, whether the policy is in shadow mode, and its limits.
type PolicySpec = (&'static str, bool, &'static [(Algorithm, u64)]);

/// Policies that share one store: several limits, shadow mode, short and long periods.
const POLICIES: [PolicySpec; 9] = [
    ("log", false, &[(SLIDING_LOG, 1_000)]),
    (
        "both",
        false,
        &[
            (SLIDING_LOG, 50_000),
            (Algorithm::FixedWindow { offset_us: 0 }, 10_000),
        ],
    ),
    (
        "shadow",
        true,
        &[
            (SLIDING_LOG, 1_000),
            (Algorithm::FixedWindow { offset_us: 300 }, 700),
        ],
    ),
    (
        "window",
        false,
        &[(Algorithm::FixedWindow { offset_us: 123 }, 700)],
    ),
    (
        "sub",
        false,
        &[
            (Algorithm::SlidingWindow { buckets: 10 }, 1_000),
            (Algorithm::SlidingWindow { buckets: 3 }, 700),
        ],
    ),
    (
        "bucket",
        false,
        &[(plain_bucket(6), 1_000), (plain_bucket(3), 70)],
    ),
    (
        "leaky_bucket",
        false,
        &[
            (
                Algorithm::LeakyBucket {
                    max_delay_us: 1_100,
                },
                1_000,
            ),
            (Algorithm::LeakyBucket { max_delay_us: 0 }, 7),
        ],
    ),
    // Even a cold bucket has capacity for every generated cost.
    (
        "warm",
        false,
        &[(
            Algorithm::TokenBucket {
                burst: 24,
                warm_up_us: 800,
            },
            90,
        )],
    ),
    // The block lasts longer than the limits, so that early retries do not start a new block.
    (
        "blocks",
        false,
        &[
            (Algorithm::Block, 1_500),
            (SLIDING_LOG, 1_000),
            (Algorithm::FixedWindow { offset_us: 0 }, 900),
        ],
    ),
];
/// Index of the policy whose rejections change state.
const BLOCK_POLICY: usize = 8;
const USER_COUNT: usize = 2;

#[derive(Clone, Debug)]
enum StoreStep {
    MoveClock(ClockChange),
    /// One request: a user and a cost for each policy that matches it.
    Decide(Vec<(usize, usize, u64)>),
    /// A reload sets the number of requests in this policy's limits.
    ChangeLimit(usize, u64),
}

#[derive(Clone, Debug)]
enum ClockChange {
    Forward(u64),
    Back(u64),
    /// Moves to within a few microseconds of a time at which units are returned.
    Edge {
        which: prop::sample::Index,
        offset_us: i64,
    },
    JumpAhead,
}

fn generate_steps() -> impl Strategy<Value = Vec<StoreStep>> {
    prop::collection::vec(
        prop_oneof![5 => generate_clock_moves().prop_map(StoreStep::MoveClock), 12 => generate_requests(), 1 => generate_limit_changes()],
        1..60,
    )
}

fn generate_steps_without_limit_changes() -> impl Strategy<Value = Vec<StoreStep>> {
    prop::collection::vec(
        prop_oneof![5 => generate_clock_moves().prop_map(StoreStep::MoveClock), 12 => generate_requests()],
        1..60,
    )
}

fn generate_clock_moves() -> impl Strategy<Value = ClockChange> {
    prop_oneof![
        3 => (0u64..1_500).prop_map(ClockChange::Forward),
        1 => (0u64..60_000).prop_map(ClockChange::Forward),
        1 => (1u64..2_500).prop_map(ClockChange::Back),
        6 => (any::<prop::sample::Index>(), -1i64..=1).prop_map(|(which, by)| ClockChange::Edge { which, offset_us: by }),
        1 => Just(ClockChange::JumpAhead),
    ]
}

fn generate_requests() -> impl Strategy<Value = StoreStep> {
    let one = (0..USER_COUNT, prop_oneof![6 => Just(1u64), 4 => 0u64..8]);
    prop::collection::btree_map(0..POLICIES.len(), one, 1..=POLICIES.len()).prop_map(|charges| {
        StoreStep::Decide(
            charges
                .into_iter()
                .map(|(policy, (user, cost))| (policy, user, cost))
                .collect(),
        )
    })
}

fn generate_limit_changes() -> impl Strategy<Value = StoreStep> {
    (0..POLICIES.len(), 0u64..7)
        .prop_map(|(policy, requests)| StoreStep::ChangeLimit(policy, requests))
}

/// A memory store with a manual clock, and the policies that use it.
struct StoreFixture {
    store: MemoryStore,
    clock: Clock,
    manual_clock: ManualClock,
    limits: Vec<Vec<Limit>>,
    keys: Vec<Vec<Key>>,
}

impl StoreFixture {
    fn new() -> Self {
        let (clock, manual_clock) = Clock::manual(START_US);
        let limits = POLICIES.iter().map(|(_, _, limits)| {
            let amount = |algorithm| if algorithm == Algorithm::Block { 1 } else { 4 };
            limits
                .iter()
                .map(|(algorithm, per_us)| make_limit(amount(*algorithm), *per_us, *algorithm))
                .collect()
        });
        let keys = POLICIES.iter().map(|(name, ..)| {
            (0..USER_COUNT)
                .map(|user| make_key(name, &user.to_string()))
                .collect()
        });
        let store = MemoryStore::new(LARGE_SETTINGS, clock.clone());
        Self {
            store,
            manual_clock,
            limits: limits.collect(),
            keys: keys.collect(),
            clock,
        }
    }

    fn make_charges(&self, requests: &[(usize, usize, u64)]) -> Vec<PolicyCharges<'_>> {
        requests
            .iter()
            .map(|(policy, user, cost)| {
                let limits = self.limits[*policy].iter().map(|limit| {
                    let is_block = limit.algorithm == Algorithm::Block;
                    LimitCharge::new(limit, if is_block { 1 } else { *cost })
                });
                let key = Cow::Borrowed(&self.keys[*policy][*user]);
                PolicyCharges {
                    shadow: POLICIES[*policy].1,
                    ..PolicyCharges::with_limits(key, limits.collect())
                }
            })
            .collect()
    }

    fn change_limit(&mut self, policy: usize, requests: u64) {
        for limit in &mut self.limits[policy] {
            if limit.algorithm != Algorithm::Block {
                limit.requests = requests;
            }
        }
    }

    /// `edges_us` are the times that [`ClockChange::Edge`] chooses from.
    fn move_clock(&self, step: &ClockChange, edges_us: &[u64]) {
        let now_us = self.clock.now_us();
        self.manual_clock.set_us(match step {
            ClockChange::Forward(by_us) => now_us + by_us,
            ClockChange::Back(by_us) => now_us - by_us,
            ClockChange::Edge {
                which,
                offset_us: by,
            } if !edges_us.is_empty() => which.get(edges_us).saturating_add_signed(*by),
            ClockChange::Edge { .. } => now_us,
            ClockChange::JumpAhead => now_us + 40 * HOUR_US,
        });
    }
}

fn make_key(policy: &str, user: &str) -> Key {
    let mut key = KeyBuilder::new(policy);
    key.push_key_value(Some(user.as_bytes()));
    key.finish()
}

fn with_cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(with_cases(600))]

    /// The store's clock is the newest time that it has read, because the store drops expired
    /// state. A clock that steps back must not make expired units count again.
    #[test]
    fn decisions_agree_with_the_model(steps in generate_steps()) {
        let mut fixture = StoreFixture::new();
        let mut newest_us = 0;
        let mut model = NaiveModel::default();
        for step in &steps {
            match step {
                StoreStep::MoveClock(step) => fixture.move_clock(step, &model.boundary_times_us()),
                StoreStep::ChangeLimit(policy, requests) => fixture.change_limit(*policy, *requests),
                StoreStep::Decide(requests) => {
                    let charges = fixture.make_charges(requests);
                    newest_us = newest_us.max(fixture.clock.now_us());
                    let expected = model.decide(newest_us, &charges);
                    prop_assert_eq!(fixture.store.decide(&charges), expected, "charges {:?}", charges);
                }
            }
        }
    }

    /// Checks the admitted requests alone, so that an error shared by model and store is found.
    #[test]
    fn trap_9_and_14_no_window_ever_holds_more_than_the_limit(steps in generate_steps_without_limit_changes()) {
        let fixture = StoreFixture::new();
        let mut admitted: HashMap<(usize, usize), Vec<(u64, u64)>> = HashMap::new();
        let mut edges = Vec::new();
        for step in &steps {
            match step {
                StoreStep::MoveClock(step) => fixture.move_clock(step, &edges),
                StoreStep::Decide(requests) => {
                    let decision = fixture.store.decide(&fixture.make_charges(requests));
                    for (policy, user, cost) in requests {
                        if !decision.admitted || POLICIES[*policy].1 || *cost == 0 {
                            continue;
                        }
                        let log = admitted.entry((*policy, *user)).or_default();
                        let newest = log.last().map_or(0, |(at_us, _)| *at_us);
                        log.push((decision.now_us.max(newest), *cost));
                        edges.extend(POLICIES[*policy].2.iter().map(|(_, per_us)| decision.now_us + per_us));
                    }
                }
                StoreStep::ChangeLimit(..) => {}
            }
        }
        for ((policy, _), log) in &admitted {
            for limit in fixture.limits[*policy].iter().filter(|limit| limit.algorithm != Algorithm::Block) {
                prop_assert!(max_units_in_any_window(log, limit) <= limit.capacity(), "{limit:?} admitted {log:?}");
            }
        }
    }

    /// Admitted requests leave at least one interval per unit apart, and never later than
    /// `max_delay`.
    #[test]
    fn a_leaky_bucket_releases_requests_evenly(
        requests in 1u64..20, per_us in 1u64..3_000, max_delay_us in 0u64..5_000,
        requests_sent in prop::collection::vec((0u64..400, 1u64..4), 1..80),
    ) {
        let (clock, manual_clock) = Clock::manual(START_US);
        let store = MemoryStore::new(LARGE_SETTINGS, clock.clone());
        let (limit, key) = (make_limit(requests, per_us, Algorithm::LeakyBucket { max_delay_us }), make_key("leaky_bucket", ""));
        let mut last_us = None;
        for (after_us, cost) in requests_sent {
            manual_clock.advance_us(after_us);
            let charge = PolicyCharges::new(&limit, &key, cost);
            let decision = store.decide(&[charge]);
            if !decision.admitted {
                prop_assert_eq!(decision.delay_us, 0);
                continue;
            }
            prop_assert!(decision.delay_us <= max_delay_us);
            let leaves_us = decision.now_us + decision.delay_us;
            if let Some(last_us) = last_us {
                // Delays are whole microseconds, so rounding may shorten an interval by one
                // microsecond.
                let interval_us = cost * per_us / requests;
                prop_assert!(leaves_us >= last_us + interval_us, "{last_us} and then {leaves_us}");
            }
            last_us = Some(leaves_us);
        }
    }

    #[test]
    fn trap_2_and_11_a_rejected_request_leaves_no_trace(steps in generate_steps_without_limit_changes()) {
        let (with, without) = (StoreFixture::new(), StoreFixture::new());
        let mut edges = Vec::new();
        for step in &steps {
            match step {
                StoreStep::MoveClock(step) => {
                    with.move_clock(step, &edges);
                    without.manual_clock.set_us(with.clock.now_us());
                }
                StoreStep::Decide(requests) => {
                    let requests: Vec<_> = requests.iter().copied().filter(|(policy, ..)| *policy != BLOCK_POLICY).collect();
                    let requests = requests.as_slice();
                    let decision = with.store.decide(&with.make_charges(requests));
                    edges.extend(decision.statuses().filter_map(|status| status.next_growth_us));
                    if decision.admitted {
                        prop_assert_eq!(without.store.decide(&without.make_charges(requests)), decision);
                    } else {
                        // A charge of cost 0 consumes nothing, but lets this store read the clock
                        // too.
                        let zero_cost_charges = without.make_charges(requests).into_iter().map(|policy| policy.map_limits(|charge| charge.cost = 0));
                        without.store.decide(&zero_cost_charges.collect::<Vec<_>>());
                    }
                }
                StoreStep::ChangeLimit(..) => {}
            }
        }
    }

    #[test]
    fn trap_10_retry_after_is_exact_to_the_microsecond(steps in generate_steps()) {
        let mut fixture = StoreFixture::new();
        let mut edges = Vec::new();
        for step in &steps {
            match step {
                StoreStep::MoveClock(step) => fixture.move_clock(step, &edges),
                StoreStep::ChangeLimit(policy, requests) => fixture.change_limit(*policy, *requests),
                StoreStep::Decide(requests) => {
                    let charges = fixture.make_charges(requests);
                    let decision = fixture.store.decide(&charges);
                    edges.extend(decision.statuses().filter_map(|status| status.next_growth_us));
                    let Some(until_us) = retry_at_us(&charges, &decision) else { continue };
                    fixture.manual_clock.set_us(until_us - 1);
                    prop_assert!(!fixture.store.decide(&charges).admitted, "admitted before {until_us}");
                    fixture.manual_clock.set_us(until_us);
                    prop_assert!(fixture.store.decide(&charges).admitted, "still refused at {until_us}");
                }
            }
        }
    }

    #[test]
    fn remaining_grows_at_the_reported_time(steps in generate_steps()) {
        let mut fixture = StoreFixture::new();
        let mut edges = Vec::new();
        for step in &steps {
            match step {
                StoreStep::MoveClock(step) => fixture.move_clock(step, &edges),
                StoreStep::ChangeLimit(policy, requests) => fixture.change_limit(*policy, *requests),
                StoreStep::Decide(requests) => {
                    let charges = fixture.make_charges(requests);
                    let decision = fixture.store.decide(&charges);
                    let grows = |(_, status): &(Charge<'_, '_>, LimitStatus)| status.next_growth_us;
                    let first = each_charge(&charges).zip(decision.statuses()).filter(|it| grows(it).is_some()).min_by_key(grows);
                    let Some((charge, status)) = first else { continue };
                    let grows_at_us = status.next_growth_us.unwrap();
                    edges.push(grows_at_us);
                    let look = [PolicyCharges::new(charge.limit, charge.key, 0)];
                    fixture.manual_clock.set_us(grows_at_us - 1);
                    prop_assert_eq!(fixture.store.decide(&look).statuses().next().unwrap().remaining, status.remaining);
                    fixture.manual_clock.set_us(grows_at_us);
                    prop_assert!(fixture.store.decide(&look).statuses().next().unwrap().remaining > status.remaining);
                }
            }
        }
    }
}

/// The time at which the whole request would be admitted. `None` if it was admitted or never fits.
fn retry_at_us(charges: &[PolicyCharges<'_>], decision: &Decision) -> Option<u64> {
    let refusals = each_charge(charges)
        .zip(decision.statuses())
        .filter(|(charge, _)| !charge.policy.shadow);
    let mut latest_us = None;
    for (charge, status) in refusals {
        if charge.limit.algorithm == Algorithm::Block {
            // This rejection may have started the block.
            latest_us = latest_us.max(status.next_growth_us);
        }
        let Some(refusal) = status.refusal else {
            continue;
        };
        match refusal {
            Refusal::Until(at_us) => latest_us = latest_us.max(Some(at_us)),
            Refusal::Never | Refusal::Unknown => return None,
        }
    }
    latest_us
}

/// The largest number of units in one window. `log` holds admissions as (time, units), ordered by
/// time. For a bucket: the largest number of units taken in any interval, minus the refill of that
/// interval.
fn max_units_in_any_window(log: &[(u64, u64)], limit: &Limit) -> u64 {
    let held = |same_window: &dyn Fn(u64) -> bool| -> u64 {
        log.iter()
            .filter(|(at_us, _)| same_window(*at_us))
            .map(|(_, units)| units)
            .sum()
    };
    let windows = log.iter().map(|(end_us, _)| match limit.algorithm {
        // A leaky bucket admits its queue at once and releases it one request at a time.
        Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket { .. } => {
            let taken = |start_us: u64| held(&|at_us| (start_us..=*end_us).contains(&at_us));
            let paid = |start_us: u64| {
                (limit.requests * (end_us - start_us) + limit.max_delay_remainder()) / limit.per_us
            };
            log.iter()
                .filter(|(start_us, _)| start_us <= end_us)
                .map(|(start_us, _)| taken(*start_us).saturating_sub(paid(*start_us)))
                .max()
                .unwrap_or(0)
        }
        Algorithm::Block | Algorithm::Concurrency { .. } => 0,
        Algorithm::SlidingLog | Algorithm::SlidingWindow { .. } => {
            held(&|at_us| at_us <= *end_us && at_us > end_us - limit.per_us)
        }
        Algorithm::FixedWindow { offset_us } => {
            let number = |at_us: u64| (at_us - offset_us) / limit.per_us;
            held(&|at_us| number(at_us) == number(*end_us))
        }
        Algorithm::CalendarWindow { calendar } => {
            let period = calendar.period_at(*end_us);
            held(&|at_us| period.contains(at_us))
        }
    });
    windows.max().unwrap_or(0)
}

/// One limit applied to many keys, in a store with the given bounds.
struct ManyKeysFixture {
    store: MemoryStore,
    manual_clock: ManualClock,
    limit: Limit,
}

impl ManyKeysFixture {
    fn new(settings: MemorySettings, requests: u64, per_us: u64) -> Self {
        let (clock, manual_clock) = Clock::manual(START_US);
        Self {
            store: MemoryStore::new(settings, clock),
            manual_clock,
            limit: make_limit(requests, per_us, SLIDING_LOG),
        }
    }

    fn decide(&self, user: &str, cost: u64) -> Decision {
        let key = make_key("many_keys", user);
        self.store
            .decide(&[PolicyCharges::new(&self.limit, &key, cost)])
    }

    /// Units of this user that the store still counts. The charge of cost 0 consumes nothing.
    fn used_units(&self, user: &str) -> u64 {
        self.limit.requests - self.decide(user, 0).statuses().next().unwrap().remaining
    }
}

#[test]
fn the_longest_delay_applies_and_shadow_policies_delay_no_request() {
    let (clock, _manual_clock) = Clock::manual(START_US);
    let store = MemoryStore::new(LARGE_SETTINGS, clock);
    let line = |requests, max_delay_us| {
        make_limit(requests, 1_000_000, Algorithm::LeakyBucket { max_delay_us })
    };
    let (fast, slow, slowest) = (line(100, 50_000), line(10, 500_000), line(1, 9_000_000));
    let keys = ["fast", "slow", "slowest"].map(|name| make_key(name, "a"));
    let charge = |limit, key| PolicyCharges::new(limit, key, 1);
    let charges = [
        charge(&fast, &keys[0]),
        charge(&slow, &keys[1]),
        PolicyCharges {
            shadow: true,
            ..charge(&slowest, &keys[2])
        },
    ];
    let delays: Vec<u64> = (0..6).map(|_| store.decide(&charges).delay_us).collect();
    assert_eq!(delays, [0, 100_000, 200_000, 300_000, 400_000, 500_000]);
    let rejected = store.decide(&charges);
    assert!(!rejected.admitted && rejected.delay_us == 0);
}

#[test]
fn trap_26_keys_are_bounded_by_number() {
    let fixture = ManyKeysFixture::new(
        MemorySettings {
            max_keys: 100,
            ..LARGE_SETTINGS
        },
        5,
        HOUR_US,
    );
    for user in 0..2_000 {
        assert!(
            fixture.decide(&user.to_string(), 1).admitted,
            "a full store must still admit requests"
        );
    }
    let kept = (0..2_000)
        .filter(|user| fixture.used_units(&user.to_string()) > 0)
        .count();
    assert!(
        (50..=100).contains(&kept),
        "{kept} keys are stored; expected 50 to 100"
    );
}

#[test]
fn trap_26_keys_are_bounded_by_bytes() {
    let max_bytes = 256 << 10;
    let fixture = ManyKeysFixture::new(
        MemorySettings {
            max_bytes,
            ..LARGE_SETTINGS
        },
        1_000,
        HOUR_US,
    );
    for user in 0..100 {
        for _ in 0..400 {
            fixture.manual_clock.advance_us(1);
            fixture.decide(&user.to_string(), 1);
        }
    }
    // A sliding log stores at least an 8-byte time per charge.
    let entries: u64 = (0..100)
        .map(|user| fixture.used_units(&user.to_string()))
        .sum();
    assert!(
        entries * 8 <= max_bytes as u64,
        "{entries} log entries do not fit in {max_bytes} bytes"
    );
    assert!(
        entries > 1_000,
        "only {entries} log entries are stored; expected more than 1000"
    );
}

#[test]
fn new_keys_do_not_evict_an_exhausted_key() {
    let fixture = ManyKeysFixture::new(
        MemorySettings {
            max_keys: 64,
            ..LARGE_SETTINGS
        },
        5,
        HOUR_US,
    );
    fixture.decide("attacker", 5);
    for user in 0..5_000 {
        fixture.decide(&format!("invented-{user}"), 1);
        if user % 500 == 0 {
            assert!(
                !fixture.decide("attacker", 1).admitted,
                "the attacker was admitted again after {user} invented keys"
            );
        }
    }
    assert_eq!(fixture.used_units("attacker"), 5);
}

#[test]
fn new_keys_do_not_evict_a_long_log() {
    let fixture = ManyKeysFixture::new(
        MemorySettings {
            max_bytes: 128 << 10,
            ..LARGE_SETTINGS
        },
        1_000,
        HOUR_US,
    );
    for _ in 0..1_000 {
        fixture.manual_clock.advance_us(1);
        fixture.decide("attacker", 1);
    }
    for user in 0..5_000 {
        fixture.decide(&format!("invented-{user}"), 1);
    }
    assert!(!fixture.decide("attacker", 1).admitted);
}

#[test]
fn expired_keys_are_evicted_before_live_ones() {
    let mut fixture = ManyKeysFixture::new(
        MemorySettings {
            max_keys: 64,
            ..LARGE_SETTINGS
        },
        5,
        1_000_000,
    );
    for user in 0..32 {
        fixture.decide(&format!("old-{user}"), 5);
    }
    fixture.limit.per_us = HOUR_US;
    for user in 0..32 {
        fixture.decide(&format!("live-{user}"), 1);
    }
    fixture.manual_clock.advance_us(2_000_000);
    for user in 0..32 {
        fixture.decide(&format!("new-{user}"), 2);
    }
    let live = (0..32)
        .filter(|user| fixture.used_units(&format!("live-{user}")) == 1)
        .count();
    assert_eq!(
        live, 32,
        "live keys were evicted although 32 keys had expired"
    );
}

#[test]
fn trap_4_and_11_concurrent_decisions_charge_all_limits_or_none() {
    let (clock, _manual_clock) = Clock::manual(START_US);
    let store = Arc::new(MemoryStore::new(LARGE_SETTINGS, clock));
    let (wide, narrow) = (
        make_limit(100, HOUR_US, SLIDING_LOG),
        make_limit(60, HOUR_US, SLIDING_LOG),
    );
    let threads: Vec<_> = (0..8)
        .map(|thread| {
            let (store, wide, narrow) = (Arc::clone(&store), wide, narrow);
            thread::spawn(move || {
                let (a, b) = (make_key("wide", "a"), make_key("narrow", "b"));
                let charge = |limit, key| PolicyCharges::new(limit, key, 1);
                let mut charges = [charge(&wide, &a), charge(&narrow, &b)];
                // Half of the threads submit the charges in reverse order. Locking in submission
                // order would deadlock.
                if thread % 2 == 1 {
                    charges.reverse();
                }
                (0..500).filter(|_| store.decide(&charges).admitted).count()
            })
        })
        .collect();
    let items = threads.into_iter();
    let admitted: usize = items.map(|thread| thread.join().unwrap()).sum();
    assert_eq!(
        admitted, 60,
        "the number of admitted requests must equal the narrow limit"
    );
    let key = make_key("wide", "a");
    let look = PolicyCharges::new(&wide, &key, 0);
    assert_eq!(
        store.decide(&[look]).statuses().next().unwrap().remaining,
        40,
        "rejected requests must not consume the wide limit"
    );
}

#[test]
fn trap_1_all_charges_in_the_same_microsecond_are_counted() {
    let fixture = ManyKeysFixture::new(LARGE_SETTINGS, 5, 1_000);
    let admitted = (0..50)
        .filter(|_| fixture.decide("one", 1).admitted)
        .count();
    assert_eq!(admitted, 5);
}

#[test]
fn trap_12_cost_is_checked_before_it_is_added() {
    let fixture = ManyKeysFixture::new(LARGE_SETTINGS, 100, 1_000);
    assert!(fixture.decide("one", 99).admitted);
    assert!(!fixture.decide("one", 100).admitted);
    assert_eq!(fixture.used_units("one"), 99);
}

#[test]
fn trap_2_retries_do_not_prolong_a_block_and_a_reload_does_not_end_it() {
    let (clock, manual_clock) = Clock::manual(START_US);
    let store = MemoryStore::new(LARGE_SETTINGS, clock);
    let (key, log, mut block) = (
        make_key("p", "ann"),
        make_limit(2, 1_000, SLIDING_LOG),
        make_limit(1, 5_000, Algorithm::Block),
    );
    let ask = |block: &Limit| {
        let mut policy = PolicyCharges::new(block, &key, 1);
        policy.limits.push(LimitCharge::new(&log, 1));
        store.decide(&[policy]).admitted
    };
    assert_eq!([ask(&block), ask(&block), ask(&block)], [true, true, false]);
    for after_us in [1, 1_000, 2_500, 4_999] {
        manual_clock.set_us(START_US + after_us);
        block.per_us = 10_000 - after_us;
        assert!(!ask(&block), "after {after_us} µs");
    }
    manual_clock.set_us(START_US + 5_000);
    assert_eq!(
        [ask(&block), ask(&block)],
        [true, true],
        "rejected requests must not be charged"
    );
}

#[test]
fn trap_21_values_cannot_be_shifted_between_key_parts() {
    let build = |parts: [&str; 2]| {
        let mut key = KeyBuilder::new("pair");
        parts
            .iter()
            .for_each(|part| key.push_key_value(Some(part.as_bytes())));
        key.finish()
    };
    let (clock, _manual_clock) = Clock::manual(START_US);
    let store = MemoryStore::new(LARGE_SETTINGS, clock);
    let limit = make_limit(1, HOUR_US, SLIDING_LOG);
    let admitted = |key: &Key| store.decide(&[PolicyCharges::new(&limit, key, 1)]).admitted;
    assert!(admitted(&build(["a:b", "c"])));
    assert!(
        admitted(&build(["a", "b:c"])),
        "this key belongs to another client"
    );
    assert!(!admitted(&build(["a:b", "c"])));
}
