//! What is limited, and how: one policy per way to count and to go on without Redis, each with one key on every master.

use crate::masters::{MASTER_COUNT, RedisMasters};
use std::fmt::Write;
use std::time::Duration;
use tidegate::limiter::{Algorithm, Charge, KeyBuilder, Limit};
use tidegate::store::redis::ScriptLibrary;

pub(crate) const LIMIT_PERIOD: Duration = Duration::from_secs(2);
const PREFIX: &str = "fleet";

/// What becomes of a request without Redis.
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
    /// How it counts, as the configuration says it, and as the code does.
    pub(crate) algorithm_name: &'static str,
    pub(crate) algorithm: Algorithm,
    pub(crate) lease: &'static str,
    pub(crate) on_store_failure: StoreFailureMode,
    /// Of what is possible, at least so much is to be admitted while nothing is away, in percent.
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
    // Six nodes with two units each may idle.
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
        // A tenth or so is what the algorithm costs.
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

/// Whose quota a client uses.
#[derive(Debug)]
pub(crate) struct FleetKey {
    /// `None`: nothing is limited there.
    pub(crate) policy: Option<&'static FleetPolicy>,
    user: String,
    /// What Redis calls it, and which of them keeps it.
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
    /// Units in a period; in some versions of the configuration fewer.
    pub(crate) fn requests_per_period(&self, lowered: bool) -> u64 {
        if lowered {
            self.requests * 3 / 5
        } else {
            self.requests
        }
    }

    /// Whether periods begin when the clock says so.
    pub(crate) fn is_aligned(&self) -> bool {
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
        key.push_part(Some(user.as_bytes()));
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

/// One of each policy on every master, and one that is not limited.
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

/// All of the configuration but what is a node's own.
pub(crate) fn fleet_config(urls: &str, lowered: bool) -> String {
    // Patient, so that a busy machine is no outage.
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
