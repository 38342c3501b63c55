//! The policies of the test: one per combination of algorithm and fallback, each with one key on
//! every master; and those of the load phases, with one key each.

use crate::masters::{MASTER_COUNT, RedisMasters};
use std::fmt::Write;
use std::time::Duration;
use tidegate::limiter::{Algorithm, CounterRef, Limit};
use tidegate::policy::{KeyPart, KeyTemplate, path};
use tidegate::store::redis::ScriptLibrary;

pub(crate) const LIMIT_PERIOD: Duration = Duration::from_secs(2);
const HOUR: Duration = Duration::from_secs(3600);
/// Longest time for which a slot of a concurrency limit stays taken without a renewal.
pub(crate) const SLOT_TTL: Duration = Duration::from_secs(3);
pub(crate) const PREFIX: &str = "fleet";
/// Units of a limit that is never reached.
const HOURLY_UNITS: u64 = 30_000;
/// As [`HOURLY_UNITS`], for the policy with settlements.
const SETTLED_UNITS: u64 = 1_000_000;
/// The instances that a sidecar assumes until Redis reports them.
pub(crate) const INITIAL_INSTANCES: u64 = 2;
/// A directory of each node, below its configuration.
pub(crate) const STATE_DIRECTORY: &str = "state";

/// Behaviour without Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreFailureMode {
    Open,
    Closed,
    Local,
}

/// A second limit that is never reached, of [`HOURLY_UNITS`] per hour. Its counter in Redis shows
/// how many units were charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HourlyLimit {
    Absent,
    /// A limit of the same policy: both counters are in one hash slot.
    SamePolicy,
    /// A policy of its own, with its key on the next master: a request is decided by two masters.
    NextMaster,
}

#[derive(Debug)]
pub(crate) struct FleetPolicy {
    pub(crate) name: &'static str,
    pub(crate) path: &'static str,
    pub(crate) requests: u64,
    pub(crate) period: Duration,
    /// The algorithm, as configuration text and as a value.
    pub(crate) algorithm_name: &'static str,
    pub(crate) algorithm: Algorithm,
    pub(crate) hourly_limit: HourlyLimit,
    /// Further lines of the configuration.
    pub(crate) settings: &'static str,
    pub(crate) on_store_failure: StoreFailureMode,
    /// Minimum share of the possible admissions, in percent, while nothing is unavailable. 0: not
    /// checked.
    pub(crate) min_used_percent: u64,
    /// Clients of each key; 0 for the policies of the load phases, which start their own.
    pub(crate) clients_per_key: usize,
}

const SLIDING_LOG_POLICY: FleetPolicy = FleetPolicy {
    name: "log",
    path: "/log",
    requests: 30,
    period: LIMIT_PERIOD,
    algorithm_name: "sliding_log",
    algorithm: Algorithm::SlidingLog,
    hourly_limit: HourlyLimit::Absent,
    settings: "",
    on_store_failure: StoreFailureMode::Local,
    min_used_percent: 75,
    clients_per_key: 4,
};

pub(crate) const HOSTILE_POLICY_NAME: &str = "hostile";
pub(crate) const SETTLED_POLICY_NAME: &str = "settled";

pub(crate) static POLICIES: [FleetPolicy; 11] = [
    SLIDING_LOG_POLICY,
    // Up to two leased units may stay unused on each of six nodes.
    FleetPolicy {
        name: "leased",
        path: "/leased",
        requests: 40,
        settings: "lease = { size = 2, ttl = '100ms' }",
        min_used_percent: 50,
        ..SLIDING_LOG_POLICY
    },
    FleetPolicy {
        name: "window",
        path: "/window",
        algorithm_name: "sliding_window",
        algorithm: Algorithm::SlidingWindow { buckets: 10 },
        on_store_failure: StoreFailureMode::Closed,
        // The algorithm itself costs about a tenth.
        min_used_percent: 65,
        ..SLIDING_LOG_POLICY
    },
    FleetPolicy {
        name: "fixed",
        path: "/fixed",
        algorithm_name: "fixed_window",
        algorithm: Algorithm::FixedWindow { offset_us: 0 },
        on_store_failure: StoreFailureMode::Closed,
        ..SLIDING_LOG_POLICY
    },
    FleetPolicy {
        name: "open",
        path: "/open",
        on_store_failure: StoreFailureMode::Open,
        ..SLIDING_LOG_POLICY
    },
    FleetPolicy {
        name: "two_limits",
        path: "/two-limits",
        hourly_limit: HourlyLimit::SamePolicy,
        on_store_failure: StoreFailureMode::Closed,
        ..SLIDING_LOG_POLICY
    },
    FleetPolicy {
        name: "split_closed",
        path: "/split-closed",
        hourly_limit: HourlyLimit::NextMaster,
        on_store_failure: StoreFailureMode::Closed,
        ..SLIDING_LOG_POLICY
    },
    FleetPolicy {
        name: "split_local",
        path: "/split-local",
        hourly_limit: HourlyLimit::NextMaster,
        ..SLIDING_LOG_POLICY
    },
    FleetPolicy {
        name: "slots",
        path: "/slots",
        requests: 4,
        period: SLOT_TTL,
        algorithm_name: "concurrency",
        algorithm: Algorithm::Concurrency { max_duration_us: 0 },
        on_store_failure: StoreFailureMode::Closed,
        min_used_percent: 0,
        clients_per_key: 10,
        ..SLIDING_LOG_POLICY
    },
    FleetPolicy {
        name: HOSTILE_POLICY_NAME,
        path: "/hostile",
        requests: 5,
        period: HOUR,
        hourly_limit: HourlyLimit::NextMaster,
        on_store_failure: StoreFailureMode::Closed,
        min_used_percent: 0,
        clients_per_key: 0,
        ..SLIDING_LOG_POLICY
    },
    FleetPolicy {
        name: SETTLED_POLICY_NAME,
        path: "/settled",
        requests: SETTLED_UNITS,
        period: HOUR,
        settings: "cost = { estimate = 3, actual = 'response_header:x-cost' }",
        on_store_failure: StoreFailureMode::Closed,
        min_used_percent: 0,
        clients_per_key: 0,
        ..SLIDING_LOG_POLICY
    },
];

/// A counter that is never full: it shows what was charged.
#[derive(Debug)]
pub(crate) struct HourlyCounter {
    pub(crate) redis_key: String,
    pub(crate) master: usize,
}

/// The quota that a client uses.
#[derive(Debug)]
pub(crate) struct FleetKey {
    /// `None` for requests without a limit.
    pub(crate) policy: Option<&'static FleetPolicy>,
    /// Values of the policy's key, and of the key of its [`HourlyLimit::NextMaster`].
    user: String,
    hourly_user: String,
    /// The key in Redis, and the master that owns it.
    pub(crate) redis_key: String,
    pub(crate) master: usize,
    pub(crate) hourly_counter: Option<HourlyCounter>,
}

impl FleetKey {
    pub(crate) fn path(&self) -> &'static str {
        self.policy.map_or("/free", |policy| policy.path)
    }

    /// Starts a request of this quota.
    pub(crate) fn request_builder(&self) -> hyper::http::request::Builder {
        hyper::Request::get(self.path())
            .header("host", "fleet.test")
            .header("x-user", &self.user)
            .header("x-hourly-user", &self.hourly_user)
    }

    /// Whether a request of this quota is decided by the master.
    pub(crate) fn uses_master(&self, master: usize) -> bool {
        let hourly_master = self.hourly_counter.as_ref().map(|counter| counter.master);
        self.master == master || hourly_master == Some(master)
    }
}

impl FleetPolicy {
    /// Units per period; some configuration versions have fewer.
    pub(crate) fn requests_per_period(&self, lowered: bool) -> u64 {
        if lowered && self.is_window_limit() {
            self.requests * 3 / 5
        } else {
            self.requests
        }
    }

    /// Returns whether periods are aligned to the clock.
    pub(crate) fn has_aligned_periods(&self) -> bool {
        matches!(self.algorithm, Algorithm::FixedWindow { .. })
    }

    /// Returns whether the policy limits each window of [`LIMIT_PERIOD`].
    pub(crate) fn is_window_limit(&self) -> bool {
        self.period == LIMIT_PERIOD
    }

    pub(crate) fn is_concurrency_limit(&self) -> bool {
        matches!(self.algorithm, Algorithm::Concurrency { .. })
    }

    /// Returns whether the app's response decides the cost.
    pub(crate) fn has_costs(&self) -> bool {
        self.settings.contains("cost")
    }

    fn limit(&self) -> Limit {
        Limit {
            requests: self.requests,
            per_us: u64::try_from(self.period.as_micros()).unwrap(),
            algorithm: self.algorithm,
        }
    }

    /// Returns the first user whose key is on the master.
    fn make_key(&'static self, master: usize, masters: &RedisMasters) -> FleetKey {
        let (user, redis_key) = find_user_on_master(self.name, &self.limit(), master, masters);
        let hourly = Limit {
            requests: HOURLY_UNITS,
            per_us: u64::try_from(HOUR.as_micros()).unwrap(),
            algorithm: Algorithm::SlidingLog,
        };
        let next = (master + 1) % MASTER_COUNT;
        let (hourly_user, hourly_counter) = match self.hourly_limit {
            // The counter of the settled policy itself is never full.
            HourlyLimit::Absent if self.requests == SETTLED_UNITS => {
                let redis_key = redis_key.clone();
                (String::new(), Some(HourlyCounter { redis_key, master }))
            }
            HourlyLimit::Absent => (String::new(), None),
            HourlyLimit::SamePolicy => {
                let redis_key = counter_key(self.name, &user, &hourly);
                (String::new(), Some(HourlyCounter { redis_key, master }))
            }
            HourlyLimit::NextMaster => {
                let policy = self.hourly_policy_name();
                let (user, redis_key) = find_user_on_master(&policy, &hourly, next, masters);
                let master = next;
                (user, Some(HourlyCounter { redis_key, master }))
            }
        };
        FleetKey {
            policy: Some(self),
            user,
            hourly_user,
            redis_key,
            master,
            hourly_counter,
        }
    }

    fn hourly_policy_name(&self) -> String {
        format!("{}_hourly", self.name)
    }

    fn format_config(&self, lowered: bool) -> String {
        let (name, path, settings) = (self.name, self.path, self.settings);
        let (requests, seconds) = (self.requests_per_period(lowered), self.period.as_secs());
        let duration_key = if self.is_concurrency_limit() {
            "lease_ttl"
        } else {
            "per"
        };
        let limit = format!(
            "{{ requests = {requests}, {duration_key} = '{seconds}s', algorithm = '{}' }}",
            self.algorithm_name
        );
        let hourly = format!(
            "{{ requests = {HOURLY_UNITS}, per = '1h', algorithm = 'sliding_log', name = '{name}-hourly' }}"
        );
        let limits = match self.hourly_limit {
            HourlyLimit::SamePolicy => format!("limits = [{limit}, {hourly}]"),
            HourlyLimit::Absent | HourlyLimit::NextMaster => format!("limit = {limit}"),
        };
        let mode = format!("{:?}", self.on_store_failure).to_lowercase();
        let mut text = format!(
            "[[policy]]
name = '{name}'
match.path = '{path}'
key = ['header:x-user']
{limits}
on_store_failure = '{mode}'
{settings}
"
        );
        if self.hourly_limit == HourlyLimit::NextMaster {
            let name = self.hourly_policy_name();
            write!(
                text,
                "[[policy]]
name = '{name}'
match.path = '{path}'
key = ['header:x-hourly-user']
limit = {hourly}
on_store_failure = '{mode}'
"
            )
            .unwrap();
        }
        text
    }
}

fn counter_key(policy: &str, user: &str, limit: &Limit) -> String {
    let header = match policy.ends_with("hourly") {
        true => "header:x-hourly-user",
        false => "header:x-user",
    };
    let part = KeyPart::parse(header, &path::Settings::DEFAULT).unwrap();
    let mut key = KeyTemplate::new(vec![part]).start_key(policy);
    key.push_key_value(Some(user.as_bytes()));
    ScriptLibrary::new(PREFIX).counter_key(CounterRef {
        limit,
        key: &key.finish(),
    })
}

/// Returns a user of the policy whose counter is on the master, and the counter's key.
fn find_user_on_master(
    policy: &str,
    limit: &Limit,
    master: usize,
    masters: &RedisMasters,
) -> (String, String) {
    (0..)
        .map(|number| {
            let user = format!("u{number}");
            let redis_key = counter_key(policy, &user, limit);
            (user, redis_key)
        })
        .find(|(_, redis_key)| masters.master_of_key(redis_key) == master)
        .unwrap()
}

/// Makes one key of each policy on every master, and one key without a limit. The policies of the
/// load phases have one key each.
pub(crate) fn make_keys(masters: &RedisMasters) -> Vec<FleetKey> {
    let mut keys = vec![FleetKey {
        policy: None,
        user: "u".to_owned(),
        hourly_user: String::new(),
        redis_key: String::new(),
        master: 0,
        hourly_counter: None,
    }];
    for policy in &POLICIES {
        let count = if policy.clients_per_key == 0 {
            1
        } else {
            MASTER_COUNT
        };
        keys.extend((0..count).map(|master| policy.make_key(master, masters)));
    }
    keys
}

/// The configuration, except for the parts specific to a node.
pub(crate) fn format_fleet_config(urls: &str, lowered: bool) -> String {
    // A long timeout, so that a busy machine does not cause an outage.
    let mut text = format!(
        "log.access = 'off'
shutdown = {{ delay = '2s', grace = '5s' }}
[store]
kind = 'redis'
state_dir = '{STATE_DIRECTORY}'
[store.redis]
topology = 'cluster'
urls = [{urls}]
key_prefix = '{PREFIX}'
timeout = '2s'
connect_timeout = '2s'
instances = {INITIAL_INSTANCES}
"
    );
    for policy in &POLICIES {
        text.push_str(&policy.format_config(lowered));
    }
    text
}
