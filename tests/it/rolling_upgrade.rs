//! Instances of 767e699 and of today share one Redis, in a rolling upgrade and a rollback.
//!
//! The old version is its own scripts, keys and arguments (`previous_version`). If a change makes
//! the formats incompatible, these tests fail. Then change the version in the keys (`v1`), document
//! that an upgrade admits at most one further limit, and start these tests from that version.

use crate::support::prelude::*;
use crate::support::previous_version::{self, PreviousVersion, status_numbers};
use crate::support::upgrade::{
    INSTANCE_COUNT, PHASES, REQUESTS_PER_PHASE, TOTAL_UNITS, client_request, upgrade_config,
};
use redis::Value;
use redis::aio::MultiplexedConnection;
use tidegate::limiter::LeaseTerms;
use tidegate::store::redis::ScriptLibrary;

/// The prefix of the keys in the test settings.
const PREFIX: &str = "t";
const HOUR_US: u64 = 3_600_000_000;
const MONTH_US: u64 = 30 * 24 * HOUR_US;

fn make_key(name: &str) -> Key {
    KeyBuilder::new(name).finish()
}

/// Limits without a noticeable refill during a test: the guarantee is a plain total.
fn month_limits() -> [Limit; 5] {
    [
        Algorithm::SlidingLog,
        Algorithm::SlidingWindow { buckets: 7 },
        Algorithm::FixedWindow { offset_us: 0 },
        plain_bucket(TOTAL_UNITS),
        Algorithm::LeakyBucket {
            max_delay_us: MONTH_US * (TOTAL_UNITS - 1),
        },
    ]
    .map(|algorithm| {
        make_limit(
            match algorithm {
                Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket { .. } => 1,
                _ => TOTAL_UNITS,
            },
            MONTH_US,
            algorithm,
        )
    })
}

/// One instance of either version.
enum Instance {
    Previous(PreviousVersion, Option<PreviousLease>),
    Current(Store),
}

/// Units that an instance of 767e699 holds.
#[derive(Clone, Copy)]
struct PreviousLease {
    units: u64,
    until_us: u64,
}

impl Instance {
    async fn start(server: &RedisServer, is_current: bool) -> Self {
        if is_current {
            let shared = SharedRedisState::new(server.settings());
            let redis = RedisStore::start(&shared);
            redis.wait_until_ready().await;
            return Self::Current(Store::from_redis(redis));
        }
        let connection = server.connection().await;
        Self::Previous(PreviousVersion::new(connection, PREFIX), None)
    }

    /// Whether a request with this charge is admitted.
    async fn admits(&mut self, charge: PolicyCharges<'_>) -> bool {
        match self {
            Self::Current(store) => {
                store
                    .decide(std::slice::from_ref(&charge))
                    .await
                    .unwrap()
                    .admitted
            }
            Self::Previous(_, Some(lease @ PreviousLease { units: 1.., .. })) => {
                lease.units -= 1;
                true
            }
            Self::Previous(client, held) => {
                let requested_lease_units = charge
                    .lease
                    .and_then(|lease| lease.size)
                    .unwrap_or_default();
                let charge = PolicyCharges {
                    requested_lease_units,
                    ..charge
                };
                let decision = client
                    .decide(std::slice::from_ref(&charge), None)
                    .await
                    .unwrap();
                *held = decision
                    .grant
                    .map(|(units, until_us)| PreviousLease { units, until_us });
                decision.is_admitted()
            }
        }
    }

    /// Stops as at SIGTERM: unused leased units are returned.
    async fn stop(self, charge: &PolicyCharges<'_>) {
        match self {
            Self::Current(store) => store.return_units_and_leave_membership().await,
            Self::Previous(
                mut client,
                Some(PreviousLease {
                    units: units @ 1..,
                    until_us,
                }),
            ) => {
                let amendment = Amendment::Credit {
                    units,
                    at_us: until_us,
                };
                client.amend(charge, amendment, None).await.unwrap();
            }
            Self::Previous(..) => {}
        }
    }
}

/// Four instances, replaced one by one.
struct InstanceGroup(Vec<Instance>);

impl InstanceGroup {
    async fn start(server: &RedisServer) -> Self {
        let mut instances = Vec::new();
        for _ in 0..INSTANCE_COUNT {
            instances.push(Instance::start(server, false).await);
        }
        Self(instances)
    }

    /// Replaces one instance, so that this many run today's version.
    async fn roll_to(
        &mut self,
        server: &RedisServer,
        current_count: usize,
        charge: &PolicyCharges<'_>,
    ) {
        let is_current = |instance: &Instance| matches!(instance, Instance::Current(_));
        let running = self
            .0
            .iter()
            .filter(|instance| is_current(instance))
            .count();
        if running == current_count {
            return;
        }
        let adds_current = current_count > running;
        let at = self
            .0
            .iter()
            .position(|one| is_current(one) != adds_current);
        let replacement = Instance::start(server, adds_current).await;
        let stopped = std::mem::replace(&mut self.0[at.unwrap()], replacement);
        stopped.stop(charge).await;
    }

    /// All instances send requests at the same time. Returns how many were admitted.
    async fn send_requests(&mut self, charge: &PolicyCharges<'_>, requests_each: u64) -> u64 {
        let calls = self.0.iter_mut().map(async |instance| {
            let mut admitted = 0;
            for _ in 0..requests_each {
                admitted += u64::from(instance.admits(charge.clone()).await);
            }
            admitted
        });
        futures_util::future::join_all(calls).await.iter().sum()
    }
}

/// Every unit of a limit is used once, whichever versions share it; of a fixed window, once by each
/// version at most.
#[tokio::test]
async fn a_limit_holds_and_is_used_up_in_an_upgrade_and_a_rollback() {
    let server = RedisServer::start();
    for limit in &month_limits() {
        let (slow_key, hot_key) = (make_key("slow"), make_key("hot"));
        let (slow, hot) = (
            PolicyCharges::new(limit, &slow_key, 1),
            PolicyCharges::new(limit, &hot_key, 1),
        );
        let mut group = InstanceGroup::start(&server).await;
        let (mut slow_admitted, mut hot_admitted) = (0, 0);
        for current_count in PHASES {
            group.roll_to(&server, current_count, &slow).await;
            slow_admitted += group.send_requests(&slow, REQUESTS_PER_PHASE).await;
            hot_admitted += group.send_requests(&hot, 3 * REQUESTS_PER_PHASE).await;
        }
        for admitted in [slow_admitted, hot_admitted] {
            if matches!(limit.algorithm, Algorithm::FixedWindow { .. }) {
                // The versions store it in different forms, under different keys.
                assert!(
                    (TOTAL_UNITS..=2 * TOTAL_UNITS).contains(&admitted),
                    "{admitted}"
                );
            } else {
                assert_eq!(admitted, TOTAL_UNITS, "{limit:?}");
                assert_eq!(group.send_requests(&slow, 3).await, 0, "{limit:?}");
            }
        }
    }
}

/// Leased units of one version count for the other, and are returned when an instance stops.
#[tokio::test]
async fn leases_of_both_versions_share_a_limit() {
    let server = RedisServer::start();
    let lease = Some(LeaseTerms {
        size: Some(3),
        ttl_us: HOUR_US,
    });
    let limits = month_limits();
    let is_shared = |limit: &&Limit| !matches!(limit.algorithm, Algorithm::FixedWindow { .. });
    for limit in limits[..4].iter().filter(is_shared) {
        let (slow_key, hot_key) = (make_key("slow-lease"), make_key("hot-lease"));
        for (key, requests_each) in [(&slow_key, 2), (&hot_key, 20)] {
            let charge = PolicyCharges {
                lease,
                ..PolicyCharges::new(limit, key, 1)
            };
            let mut group = InstanceGroup::start(&server).await;
            let mut admitted = 0;
            for current_count in PHASES {
                group.roll_to(&server, current_count, &charge).await;
                admitted += group.send_requests(&charge, requests_each).await;
                assert!(admitted <= TOTAL_UNITS, "{admitted} of {limit:?}");
            }
            // Each instance uses up its lease.
            while admitted < TOTAL_UNITS {
                let further = group.send_requests(&charge, 1).await;
                assert!(further > 0, "only {admitted} of {limit:?}");
                admitted += further;
            }
            assert_eq!(admitted, TOTAL_UNITS, "{limit:?}");
            assert_eq!(group.send_requests(&charge, 3).await, 0, "{limit:?}");
        }
    }
}

/// Requests in flight of one version occupy slots of the other.
#[tokio::test]
async fn concurrency_slots_of_both_versions_share_a_limit() {
    const LEASE_TTL_US: u64 = 10_000_000;
    let server = RedisServer::start();
    let limit = make_limit(
        2,
        LEASE_TTL_US,
        Algorithm::Concurrency { max_duration_us: 0 },
    );
    let key = make_key("slots");
    let charge = |slot_id| PolicyCharges {
        slot_id,
        ..PolicyCharges::new(&limit, &key, 1)
    };
    let mut previous = PreviousVersion::new(server.connection().await, PREFIX);
    let (_shared, redis) = server.connect().await;
    let current = Store::from_redis(redis);
    let settle = async |amendment| {
        let settlement = Settlement {
            limit: &limit,
            key: &key,
            amendment,
        };
        current.apply_settlements(&[settlement]).await.unwrap();
    };
    for round in 0..3 {
        let [first, second, third] = [1, 2, 3].map(|n| 10 * round + n);
        assert!(
            previous
                .decide(&[charge(first)], None)
                .await
                .unwrap()
                .is_admitted()
        );
        assert!(current.decide(&[charge(second)]).await.unwrap().admitted);
        for _ in 0..2 {
            assert!(!current.decide(&[charge(third)]).await.unwrap().admitted);
            let refused = previous.decide(&[charge(third)], None).await.unwrap();
            assert!(!refused.is_admitted());
            let renewal = Amendment::Renew { slot: first };
            previous.amend(&charge(0), renewal, None).await.unwrap();
            settle(Amendment::Renew { slot: second }).await;
        }
        settle(Amendment::Release { slot: second }).await;
        assert!(
            previous
                .decide(&[charge(third)], None)
                .await
                .unwrap()
                .is_admitted(),
            "the released slot is free"
        );
        for slot in [first, third] {
            let release = Amendment::Release { slot };
            previous.amend(&charge(0), release, None).await.unwrap();
        }
    }
}

/// The state of both versions at controlled times.
struct SharedState {
    connection: MultiplexedConnection,
    previous: PreviousVersion,
    scripts: ScriptLibrary,
}

impl SharedState {
    async fn run_current(&mut self, command: impl Fn(&ScriptLibrary) -> redis::Cmd) -> Value {
        let reply = command(&self.scripts)
            .query_async::<Value>(&mut self.connection)
            .await;
        match reply {
            Err(error) if error.code() == Some("NOSCRIPT") => {
                let _: () = self
                    .scripts
                    .load_commands_for_used_programs()
                    .query_async(&mut self.connection)
                    .await
                    .unwrap();
                command(&self.scripts)
                    .query_async(&mut self.connection)
                    .await
                    .unwrap()
            }
            reply => reply.unwrap(),
        }
    }

    async fn decide_by_current(&mut self, charges: &[PolicyCharges<'_>], at_us: u64) -> Decision {
        let reply = self
            .run_current(|scripts| scripts.decide_command(charges, Some(at_us)))
            .await;
        ScriptLibrary::parse_decision_reply(&reply, charges)
            .unwrap_or_else(|| panic!("{reply:?} for {charges:?}"))
    }

    /// Copies the counter of a charge to the same charge with another key.
    async fn copy_counter(&mut self, from: CounterRef<'_>, to: CounterRef<'_>) {
        let (from, to) = (self.scripts.counter_key(from), self.scripts.counter_key(to));
        let _: () = redis::pipe()
            .cmd("DEL")
            .arg(&to)
            .cmd("COPY")
            .arg(&from)
            .arg(&to)
            .query_async(&mut self.connection)
            .await
            .unwrap();
    }

    /// Decides equal charges on equal states with both versions, and compares the results.
    async fn assert_equal_decisions(&mut self, charges: &[PolicyCharges<'_>], at_us: u64) {
        let (previous_key, current_key) = (make_key("previous"), make_key("current"));
        let previous: Vec<_> = charges
            .iter()
            .map(|charge| PolicyCharges {
                key: Cow::Owned(previous_key.clone()),
                ..charge.to_owned_charges()
            })
            .collect();
        let current: Vec<_> = charges
            .iter()
            .map(|charge| PolicyCharges {
                key: Cow::Owned(current_key.clone()),
                ..charge.to_owned_charges()
            })
            .collect();
        for copies in [&previous, &current] {
            for (from, to) in each_charge(charges).zip(each_charge(copies)) {
                self.copy_counter(from.counter(), to.counter()).await;
            }
        }
        let expected = self.previous.decide(&previous, Some(at_us)).await.unwrap();
        let decision = self.decide_by_current(&current, at_us).await;
        let grant = decision.policies[0].grant;
        let charged_at_us = each_charge(&current).zip(decision.outcomes());
        let charged_at_us = charged_at_us.filter(|(charge, _)| charge.is_estimate);
        assert_eq!(
            previous_version::PreviousDecision {
                statuses: status_numbers(&decision),
                charged_at_us: charged_at_us
                    .map(|(_, outcome)| outcome.charged_at_us.unwrap_or(0))
                    .collect(),
                grant: grant.map(|grant| (grant.units, grant.until_us)),
                delay_us: decision.delay_us,
            },
            expected,
            "{charges:?}"
        );
    }
}

/// The amendments that fit an algorithm, of charges made so far.
fn draw_amendment(rng: &mut Rng, limit: &Limit, charged_at_us: &[u64]) -> Amendment {
    if matches!(limit.algorithm, Algorithm::Concurrency { .. }) {
        let slot = u128::from(rng.u8(1..=4));
        return match rng.bool() {
            true => Amendment::Renew { slot },
            false => Amendment::Release { slot },
        };
    }
    let units = rng.u64(1..=limit.capacity().min(50));
    // The versions return positions of a queue by different rules.
    let is_queue = matches!(limit.algorithm, Algorithm::LeakyBucket { .. });
    match rng.u8(..if is_queue { 2 } else { 3 }) {
        0 => Amendment::Charge(units),
        1 => Amendment::BackdatedCharge {
            units,
            age_us: rng.u64(..limit.per_us),
        },
        _ => Amendment::Credit {
            units,
            at_us: rng.choice(charged_at_us).copied().unwrap_or(START_US),
        },
    }
}

/// Charges of a request: one limit, or with a block also that.
fn draw_charges<'a>(
    rng: &mut Rng,
    limit: &'a Limit,
    block: Option<&'a Limit>,
    key: &'a Key,
) -> Vec<PolicyCharges<'a>> {
    let is_slot = matches!(limit.algorithm, Algorithm::Concurrency { .. });
    let is_queue = matches!(limit.algorithm, Algorithm::LeakyBucket { .. });
    let can_lease = match limit.algorithm {
        Algorithm::TokenBucket { warm_up_us, .. } => warm_up_us == 0,
        Algorithm::LeakyBucket { .. } | Algorithm::Concurrency { .. } => false,
        _ => block.is_none(),
    };
    let lease = (can_lease && rng.u8(..4) == 0).then(|| LeaseTerms {
        size: rng.bool().then(|| rng.u64(1..=20)),
        ttl_us: (limit.per_us / 2).max(1),
    });
    let counts_rejected = !is_slot && rng.u8(..4) == 0;
    let is_estimate = !is_slot && !is_queue && rng.bool();
    let slot_id = u128::from(rng.u8(1..=4));
    let requested_lease_units = lease.map_or(0, |_| rng.u64(1..=20));
    let cost = if is_slot {
        1
    } else {
        rng.u64(1..=limit.capacity().div_ceil(3))
    };
    let mut charges = PolicyCharges {
        counts_rejected,
        slot_id,
        lease,
        requested_lease_units,
        ..PolicyCharges::new(limit, key, cost)
    };
    charges.limits[0].is_estimate = is_estimate;
    charges
        .limits
        .extend(block.map(|block| LimitCharge::new(block, 1)));
    vec![charges]
}

/// Whichever version wrote a state, both decide the next request alike.
#[tokio::test]
async fn both_versions_read_each_others_states_alike() {
    const LIMITS_PER_KIND: usize = 6;
    const STEPS: usize = 40;
    let server = RedisServer::start();
    let connection = server.connection_without_timeout().await;
    let mut state = SharedState {
        previous: PreviousVersion::new(connection.clone(), PREFIX),
        connection,
        scripts: ScriptLibrary::new(PREFIX),
    };
    let seed = test_seed();
    println!("TIDEGATE_TEST_SEED={seed}");
    let mut rng = Rng::with_seed(seed);
    let kinds = EVERY_ALGORITHM.iter().map(|(name, _)| *name);
    // The previous version had no limits per calendar period, and another form of fixed windows.
    let kinds = kinds.filter(|name| !["calendar_window", "fixed_window"].contains(name));
    for kind in kinds.chain(["concurrency", "block"]) {
        for number in 0..LIMITS_PER_KIND {
            let limit = match kind {
                "concurrency" => make_limit(
                    3,
                    draw_duration_us(&mut rng),
                    Algorithm::Concurrency { max_duration_us: 0 },
                ),
                "block" => draw_limit_for("sliding_log", &mut rng),
                name => draw_limit_for(name, &mut rng),
            };
            let block = (kind == "block")
                .then(|| make_limit(1, draw_duration_us(&mut rng), Algorithm::Block));
            let key = make_key(&format!("{kind}-{number}"));
            let (mut at_us, mut charged_at_us) = (START_US, Vec::new());
            for _ in 0..STEPS {
                at_us += match rng.u8(..8) {
                    0 => 0,
                    1 => limit.per_us,
                    _ => rng.u64(..=2 * limit.per_us / limit.capacity()),
                };
                let charges = draw_charges(&mut rng, &limit, block.as_ref(), &key);
                state.assert_equal_decisions(&charges, at_us).await;
                let (is_current, amends) = (rng.bool(), rng.u8(..3) == 0);
                if amends {
                    let amendment = draw_amendment(&mut rng, &limit, &charged_at_us);
                    if is_current {
                        let settlement = Settlement {
                            limit: &limit,
                            key: &key,
                            amendment,
                        };
                        state
                            .run_current(|scripts| {
                                scripts.settle_command(&[settlement], Some(at_us))
                            })
                            .await;
                    } else {
                        state
                            .previous
                            .amend(&charges[0], amendment, Some(at_us))
                            .await
                            .unwrap();
                    }
                } else if is_current {
                    let decision = state.decide_by_current(&charges, at_us).await;
                    let outcomes = decision.outcomes();
                    charged_at_us.extend(outcomes.filter_map(|outcome| outcome.charged_at_us));
                    let grants = decision.policies.iter().filter_map(|outcome| outcome.grant);
                    charged_at_us.extend(grants.map(|grant| grant.until_us));
                } else {
                    let decision = state.previous.decide(&charges, Some(at_us)).await.unwrap();
                    charged_at_us.extend(decision.charged_at_us.iter().filter(|at_us| **at_us > 0));
                    charged_at_us.extend(decision.grant.map(|(_, until_us)| until_us));
                }
            }
        }
    }
}

/// Sends a heartbeat as today's membership task does.
async fn send_heartbeat(server: &RedisServer, id: &str, operation: &str) -> [u64; 3] {
    let previous = PreviousVersion::new(server.connection().await, PREFIX);
    let [instances, ids] = previous.membership_keys();
    let script = redis::Script::new(include_str!("../../src/store/redis/membership.lua"));
    let (_now_us, live, rank, recovered): (u64, u64, u64, u64) = script
        .key(instances)
        .key(ids)
        .arg(id)
        .arg(operation)
        .arg(5_000_000)
        .arg("")
        .arg("")
        .invoke_async(&mut server.connection().await)
        .await
        .unwrap();
    [live, rank, recovered]
}

/// Each version counts the instances of the other, and whether they have usage to write back.
#[tokio::test]
async fn both_versions_count_each_others_instances() {
    let server = RedisServer::start();
    let mut previous = PreviousVersion::new(server.connection().await, PREFIX);
    let (shared, redis) = server.connect().await;
    let store = redis.join_membership();
    let deadline = Instant::now() + TEST_TIMEOUT;
    let mut live = [0; 3];
    while live[0] != 4 || shared.instance_count() != 4 {
        assert!(
            Instant::now() < deadline,
            "767e699 counts {live:?}, today's version {}",
            shared.instance_count()
        );
        for id in ["x", "y", "z"] {
            live = previous.heartbeat(id, "beat", None).await;
        }
        sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(
        live[1..],
        [3, 1],
        "only the last one was heard from just now"
    );
    let since_us = Some(1);
    assert_eq!(previous.heartbeat("z", "look", since_us).await, [4, 3, 4]);
    assert_eq!(send_heartbeat(&server, "y", "pending").await[0], 4);
    assert_eq!(
        previous.heartbeat("z", "look", since_us).await,
        [4, 3, 3],
        "today's pending instance has not recovered"
    );
    previous.heartbeat("x", "owe", None).await;
    assert_eq!(previous.heartbeat("z", "look", since_us).await, [4, 3, 2]);
    previous.heartbeat("y", "beat", None).await;
    assert_eq!(send_heartbeat(&server, "x", "heartbeat").await[0], 4);
    assert_eq!(previous.heartbeat("z", "look", since_us).await, [4, 3, 4]);
    previous.leave("z").await;
    assert_eq!(send_heartbeat(&server, "x", "read").await[0], 3);
    store.leave_membership().await;
    assert_eq!(previous.heartbeat("x", "look", None).await[0], 2);
}

/// The clients of the fixture `keys.txt`. Keys of other values start anew.
const FIXTURE_CLIENTS: [&str; 4] = ["192.0.2.1", "192.0.2.2", "198.51.100.3", "2001:db8::7"];

/// Today's binary names its counters as that of 767e699 did.
#[tokio::test]
async fn the_keys_in_redis_are_those_of_the_previous_version() {
    let (server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let proxy = Proxy::start(&upgrade_config(&server), upstream.address).await;
    for client in FIXTURE_CLIENTS {
        for path in [
            "log", "window", "fixed", "bucket", "queue", "blocked", "leased", "settled",
        ] {
            for _ in 0..if path == "blocked" { 2 } else { 1 } {
                client_request(&proxy, &format!("/{path}"), client)
                    .send()
                    .await;
            }
        }
    }
    // A slot exists only while its request is in flight.
    let expected = previous_version::KEYS
        .lines()
        .filter(|key| !key.contains("}:concurrency:"))
        .map(|key| {
            key.replace(
                ":fixed_window:2592000000000:",
                ":fixed_window:2592000000000@0:",
            )
        });
    let expected: Vec<String> = expected.collect();
    // The first heartbeat may be late.
    wait_until(format!("the keys {expected:#?}"), async || {
        let mut keys: Vec<String> = server.command("KEYS *").await;
        keys.retain(|key| !key.contains("-probe"));
        keys.sort_unstable();
        keys == expected
    })
    .await;
}
