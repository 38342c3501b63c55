//! Both stores with a test-controlled clock, and randomly drawn limits.

use super::prelude::*;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, Value};
use std::fmt;
use tidegate::clock::{Clock, ManualClock};
use tidegate::limiter::{Calendar, CalendarUnit, MAX_WARM_UP_US};
use tidegate::store::redis::ScriptLibrary;
use tidegate::store::{MemorySettings, MemoryStore, StoredOverride};
use tokio::runtime::{Builder, Runtime};

/// In the year 2100, so far ahead that no key of Redis expires while a test advances the clock.
pub const START_US: u64 = 4_102_444_800_000_000;

pub const DAY_US: u64 = 86_400_000_000;
/// The longest period that `check` accepts.
pub const MAX_PER_US: u64 = 400 * DAY_US;

const MEMORY_SETTINGS: MemorySettings = MemorySettings {
    max_keys: 10_000,
    max_bytes: 256 << 20,
};

/// A store with a test-controlled clock.
pub enum StoreUnderTest {
    Memory {
        store: MemoryStore,
        hands: ManualClock,
    },
    Redis(Box<RedisUnderTest>),
}

/// The field order matters: the connection is dropped before its runtime.
pub struct RedisUnderTest {
    connection: MultiplexedConnection,
    runtime: Runtime,
    script: ScriptLibrary,
    _server: RedisServer,
}

impl StoreUnderTest {
    pub fn memory() -> Self {
        let (clock, hands) = Clock::manual(START_US);
        Self::Memory {
            store: MemoryStore::new(MEMORY_SETTINGS, clock),
            hands,
        }
    }

    /// Starts a separate server, which is stopped on drop.
    pub fn redis() -> Self {
        let server = RedisServer::start();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let connection = runtime.block_on(server.connection_without_timeout());
        Self::Redis(Box::new(RedisUnderTest {
            connection,
            runtime,
            script: ScriptLibrary::new("t"),
            _server: server,
        }))
    }

    pub fn both_stores() -> [Self; 2] {
        [Self::memory(), Self::redis()]
    }

    /// Clears all counters and resets the clock.
    pub fn reset(&mut self) {
        match self {
            Self::Memory { .. } => *self = Self::memory(),
            Self::Redis(_) => self.command::<()>(redis::cmd("FLUSHALL")),
        }
    }

    /// Decides all charges at the given time.
    pub fn decide(&mut self, charges: &[PolicyCharges<'_>], at_us: u64) -> Decision {
        match self {
            Self::Memory { store, hands } => {
                hands.set_us(at_us);
                store.decide(charges)
            }
            Self::Redis(there) => {
                let reply = there.run_script(|script| script.decide_command(charges, Some(at_us)));
                ScriptLibrary::parse_decision_reply(&reply, charges)
                    .unwrap_or_else(|| panic!("{reply:?} for {charges:?}"))
            }
        }
    }

    /// Sets or removes the override of a key.
    pub fn change_override(&mut self, key: &Key, stored: Option<&StoredOverride>) {
        match self {
            Self::Memory { store, .. } => match stored {
                Some(stored) => assert!(store.set_override(stored.clone())),
                None => drop(store.remove_override(key)),
            },
            Self::Redis(there) => {
                let name = there.script.override_key(key);
                self.command::<()>(match stored {
                    Some(stored) => redis::cmd("SET").arg(name).arg(stored.to_text()).clone(),
                    None => redis::cmd("DEL").arg(name).clone(),
                });
            }
        }
    }

    /// Applies an amendment to one counter at the given time.
    pub fn apply_amendment(&mut self, limit: &Limit, key: &Key, amendment: Amendment, at_us: u64) {
        self.apply_amendments(limit, key, &[amendment], at_us);
    }

    /// Applies amendments to one counter at the given time, in one call.
    pub fn apply_amendments(
        &mut self,
        limit: &Limit,
        key: &Key,
        amendments: &[Amendment],
        at_us: u64,
    ) {
        let late = amendments.iter().map(|amendment| Settlement {
            limit,
            key,
            amendment: *amendment,
        });
        let late: Vec<_> = late.collect();
        match self {
            Self::Memory { store, hands } => {
                hands.set_us(at_us);
                store.apply_settlements(&late);
            }
            Self::Redis(there) => {
                let reply = there.run_script(|script| script.settle_command(&late, Some(at_us)));
                assert_eq!(reply, Value::Int(1), "{late:?}");
            }
        }
    }

    /// Bytes taken by a counter, including its share of the table. Removes it from the memory
    /// store.
    pub fn counter_bytes(&mut self, charge: &PolicyCharges<'_>) -> u64 {
        match self {
            Self::Memory { store, hands } => {
                // A second counter of the policy, so that the policy itself does not count.
                let limit = Limit {
                    requests: 1,
                    per_us: DAY_US + 1,
                    algorithm: Algorithm::SlidingLog,
                };
                let second = PolicyCharges::new(&limit, &charge.key, 1);
                store.decide(&[second]);
                let bytes = store.byte_count();
                assert_eq!(
                    store.remove_counters([first_counter(charge)]),
                    1,
                    "{hands:?}"
                );
                (bytes - store.byte_count()) as u64
            }
            Self::Redis(there) => {
                let key = there.script.counter_key(first_counter(charge));
                self.command(
                    redis::cmd("MEMORY")
                        .arg("USAGE")
                        .arg(key)
                        .arg("SAMPLES")
                        .arg(0)
                        .clone(),
                )
            }
        }
    }

    /// When Redis expires a charge's counter, in ms since the epoch.
    pub fn expires_at_ms(&mut self, charge: &PolicyCharges<'_>) -> u64 {
        let Self::Redis(there) = self else {
            panic!("the memory store has no expiry time")
        };
        let key = there.script.counter_key(first_counter(charge));
        self.command(redis::cmd("PEXPIRETIME").arg(key).clone())
    }

    fn command<T: redis::FromRedisValue>(&mut self, command: Cmd) -> T {
        let Self::Redis(there) = self else {
            panic!("only Redis takes commands")
        };
        there
            .runtime
            .block_on(command.query_async(&mut there.connection))
            .unwrap()
    }
}

impl RedisUnderTest {
    /// Runs a script, and loads it first if necessary.
    fn run_script(&mut self, ask: impl Fn(&ScriptLibrary) -> Cmd) -> Value {
        let (connection, command) = (&mut self.connection, ask(&self.script));
        self.runtime.block_on(async {
            match connection.send_packed_command(&command).await {
                Ok(Value::ServerError(error)) if error.code() == "NOSCRIPT" => {}
                reply => return reply.unwrap(),
            }
            let loads = self.script.load_commands_for_used_programs();
            connection
                .send_packed_commands(&loads, 0, loads.len())
                .await
                .unwrap();
            connection.send_packed_command(&command).await.unwrap()
        })
    }
}

impl fmt::Debug for StoreUnderTest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory { .. } => "memory",
            Self::Redis(_) => "Redis",
        })
    }
}

/// Joins neighbouring charges with one number to one policy.
pub fn join_policies<'a>(
    charges: impl IntoIterator<Item = (u32, PolicyCharges<'a>)>,
) -> Vec<PolicyCharges<'a>> {
    let mut joined: Vec<(u32, PolicyCharges<'a>)> = Vec::new();
    for (number, charge) in charges {
        match joined.last_mut() {
            Some((last, policy)) if *last == number => policy.limits.extend(charge.limits),
            _ => joined.push((number, charge)),
        }
    }
    joined.into_iter().map(|(_, policy)| policy).collect()
}

/// The charge of a policy with one limit.
pub fn first_charge<'r, 'a>(policy: &'r PolicyCharges<'a>) -> Charge<'r, 'a> {
    policy.charges().next().unwrap()
}

/// The counter of a policy with one limit.
pub fn first_counter<'r>(policy: &'r PolicyCharges<'_>) -> CounterRef<'r> {
    first_charge(policy).counter()
}

/// When the whole request would be admitted, if it was refused but not forever. Clients receive
/// this time as `retry_after`.
pub fn admissible_at_us(charges: &[PolicyCharges<'_>], decision: &Decision) -> Option<u64> {
    if decision.admitted {
        return None;
    }
    let mut latest_us = None;
    for (charge, status) in each_charge(charges).zip(decision.statuses()) {
        if charge.policy.shadow {
            continue;
        }
        match status.refusal {
            Some(Refusal::Never | Refusal::Unknown) => return None,
            Some(Refusal::Until(at_us)) => latest_us = latest_us.max(Some(at_us)),
            None => {}
        }
        if charge.is_block() {
            // The block may have begun with this refusal.
            latest_us = latest_us.max(status.next_growth_us);
        }
    }
    latest_us
}

/// Draws a random limit.
pub type LimitGenerator = fn(&mut Rng) -> Limit;

/// Every algorithm with units that return over time, with random values that `check` accepts. A
/// bucket with a warm-up counts as a separate algorithm. A new algorithm adds one line.
pub const EVERY_ALGORITHM: [(&str, LimitGenerator); 7] = [
    ("sliding_log", |rng| draw_limit(rng, Algorithm::SlidingLog)),
    ("sliding_window", |rng| {
        let buckets = rng.u64(2..=100);
        draw_limit(rng, Algorithm::SlidingWindow { buckets })
    }),
    ("fixed_window", |rng| {
        let limit = draw_limit(rng, Algorithm::SlidingLog);
        let offset_us = if rng.bool() {
            0
        } else {
            rng.u64(..limit.per_us)
        };
        with_algorithm(limit, Algorithm::FixedWindow { offset_us })
    }),
    ("calendar_window", |rng| {
        let zones = [
            "UTC",
            "Europe/Berlin",
            "America/New_York",
            "Australia/Lord_Howe",
        ];
        let units = [CalendarUnit::Day, CalendarUnit::Week, CalendarUnit::Month];
        let unit = units[rng.usize(..3)];
        let calendar = Calendar::new(unit, zones[rng.usize(..zones.len())]);
        let amount = draw_limit(rng, Algorithm::SlidingLog).requests;
        Limit::per_calendar_period(amount, calendar.expect("a known zone"))
    }),
    ("token_bucket", |rng| draw_token_bucket(rng, 0)),
    ("warm_up", |rng| {
        let warm_up_us = if rng.u8(..8) == 0 {
            MAX_WARM_UP_US
        } else {
            draw_duration_us(rng).min(MAX_WARM_UP_US)
        };
        draw_token_bucket(rng, warm_up_us)
    }),
    ("leaky_bucket", |rng| {
        let limit = draw_limit(rng, Algorithm::SlidingLog);
        let longest_us = (3 * limit.per_us)
            .min(DAY_US)
            .min((MAX_UNITS - limit.per_us) / limit.requests);
        let max_delay_us = if rng.u8(..4) == 0 {
            0
        } else {
            rng.u64(..=longest_us)
        };
        with_algorithm(limit, Algorithm::LeakyBucket { max_delay_us })
    }),
];

/// Draws a limit for the algorithm of [`EVERY_ALGORITHM`] with this name.
pub fn draw_limit_for(name: &str, rng: &mut Rng) -> Limit {
    EVERY_ALGORITHM
        .iter()
        .find(|(of, _)| *of == name)
        .expect("an algorithm")
        .1(rng)
}

fn draw_token_bucket(rng: &mut Rng, warm_up_us: u64) -> Limit {
    let limit = draw_limit(rng, Algorithm::SlidingLog);
    let most = MAX_UNITS / limit.per_us;
    let burst = rng.u64(1..=3 * limit.requests).min(most);
    let algorithm = Algorithm::TokenBucket { burst, warm_up_us };
    Limit {
        requests: limit.requests.min(most),
        algorithm,
        ..limit
    }
}

fn draw_limit(rng: &mut Rng, algorithm: Algorithm) -> Limit {
    let per_us = match rng.u8(..8) {
        0 => 1_000,
        1 => MAX_PER_US,
        _ => draw_duration_us(rng),
    };
    let magnitude = rng.u32(0..=4);
    make_limit(rng.u64(1..=10_u64.pow(magnitude)), per_us, algorithm)
}

/// From one millisecond to some months, evenly over the orders of magnitude.
pub fn draw_duration_us(rng: &mut Rng) -> u64 {
    let magnitude = rng.u32(4..=13);
    rng.u64(1_000..10_u64.pow(magnitude))
}

/// The seed for random tests. `TIDEGATE_TEST_SEED=n` repeats a failed run.
pub fn test_seed() -> u64 {
    std::env::var("TIDEGATE_TEST_SEED")
        .map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap())
}
