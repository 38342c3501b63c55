//! The policies of the test: one per combination of algorithm and fallback, each with one key on
//! every master.

use crate::masters::{MASTER_COUNT, RedisMasters};
use std::fmt::Write;
use std::time::Duration;
use tidegate::limiter::{Algorithm, Charge, KeyBuilder, Limit};
use tidegate::store::redis::ScriptLibrary;

pub(crate) const LIMIT_PERIOD: Duration = Duration::from_secs(2);
const PREFIX: &str = "fleet";

/// Behaviour without Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreFailureMode {
    Open,
    Closed,
    Local,
}

#[derive(Debug)]
pub(crate) struct FleetPolicy {
    pub(crate) name: &'static str,
    pub(crate) path: &'static str,
    pub(crate) requests: u64,
    /// The algorithm, as configuration text and as a value.
    pub(crate) algorithm_name: &'static str,
    pub(crate) algorithm: Algorithm,
    pub(crate) lease: &'static str,
    pub(crate) on_store_failure: StoreFailureMode,
    /// Minimum share of the possible admissions, in percent, while nothing is unavailable.
    pub(crate) min_used_percent: u64,
}

const SLIDING_LOG_POLICY: FleetPolicy = FleetPolicy {
    name: "log",
    path: "/log",
    requests: 30,
    algorithm_name: "sliding_log",
    algorithm: Algorithm::SlidingLog,
    lease: "",
    on_store_failure: StoreFailureMode::Local,
    min_used_percent: 75,
};

pub(crate) static POLICIES: [FleetPolicy; 5] = [
    SLIDING_LOG_POLICY,
    // Up to two leased units may stay unused on each of six nodes.
    FleetPolicy {
        name: "leased",
        path: "/leased",
        requests: 40,
        lease: "lease = { size = 2, ttl = '100ms' }",
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
];

/// The quota that a client uses.
#[derive(Debug)]
pub(crate) struct FleetKey {
    /// `None` for requests without a limit.
    pub(crate) policy: Option<&'static FleetPolicy>,
    user: String,
    /// The key in Redis, and the master that owns it.
    pub(crate) redis_key: String,
    pub(crate) master: usize,
}

impl FleetKey {
    /// Path and user of a request.
    pub(crate) fn path_and_user(&self) -> (&str, &str) {
        (
            self.policy.map_or("/free", |policy| policy.path),
            &self.user,
        )
    }
}

impl FleetPolicy {
    /// Units per period; some configuration versions have fewer.
    pub(crate) fn requests_per_period(&self, lowered: bool) -> u64 {
        if lowered {
            self.requests * 3 / 5
        } else {
            self.requests
        }
    }

    /// Returns whether periods are aligned to the clock.
    pub(crate) fn has_aligned_periods(&self) -> bool {
        matches!(self.algorithm, Algorithm::FixedWindow { .. })
    }

    fn make_key(&'static self, user: String, masters: &RedisMasters) -> FleetKey {
        let per_us = u64::try_from(LIMIT_PERIOD.as_micros()).unwrap();
        let limit = Limit {
            requests: self.requests,
            per_us,
            algorithm: self.algorithm,
        };
        let mut key = KeyBuilder::new(self.name);
        key.push_key_value(Some(user.as_bytes()));
        let name = ScriptLibrary::new(PREFIX).counter_key(&Charge::new(&limit, &key.finish(), 1));
        let master = masters.master_of_key(&name);
        FleetKey {
            policy: Some(self),
            user,
            redis_key: name,
            master,
        }
    }
}

/// Makes one key of each policy on every master, and one key without a limit.
pub(crate) fn make_keys(masters: &RedisMasters) -> Vec<FleetKey> {
    let mut keys = vec![FleetKey {
        policy: None,
        user: "u".to_owned(),
        redis_key: String::new(),
        master: 0,
    }];
    for policy in &POLICIES {
        for master in 0..MASTER_COUNT {
            let mut all = (0..).map(|user| policy.make_key(format!("u{user}"), masters));
            keys.extend(all.find(|key| key.master == master));
        }
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
[store.redis]
topology = 'cluster'
urls = [{urls}]
key_prefix = '{PREFIX}'
timeout = '2s'
connect_timeout = '2s'
instances = 2
"
    );
    for policy in &POLICIES {
        let FleetPolicy {
            name,
            path,
            algorithm_name: counts,
            lease,
            on_store_failure: without,
            ..
        } = policy;
        let (requests, per) = (policy.requests_per_period(lowered), LIMIT_PERIOD.as_secs());
        let without = format!("{without:?}").to_lowercase();
        writeln!(
            text,
            "[[policy]]
name = '{name}'
match.path = '{path}'
key = ['header:x-user']
limit = {{ requests = {requests}, per = '{per}s', algorithm = '{counts}' }}
on_store_failure = '{without}'
{lease}"
        )
        .unwrap();
    }
    text
}
