//! What is limited, and how: one policy per way to count and to go on without Redis, each with one key on every master.

use crate::masters::{MASTERS, Masters};
use std::fmt::Write;
use std::time::Duration;
use tidegate::limiter::{Algorithm, Charge, KeyBuilder, Limit};
use tidegate::store::redis::Script;

pub(crate) const PER: Duration = Duration::from_secs(2);
const PREFIX: &str = "fleet";

/// What becomes of a request without Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Without {
    Open,
    Closed,
    Local,
}

#[derive(Debug)]
pub(crate) struct Policy {
    pub(crate) name: &'static str,
    pub(crate) path: &'static str,
    pub(crate) requests: u64,
    /// How it counts, as the configuration says it, and as the code does.
    pub(crate) counts: &'static str,
    pub(crate) algorithm: Algorithm,
    pub(crate) lease: &'static str,
    pub(crate) without: Without,
    /// Of what is possible, at least so much is to be admitted while nothing is away, in percent.
    pub(crate) used: u64,
}

const LOG: Policy = Policy {
    name: "log",
    path: "/log",
    requests: 30,
    counts: "sliding_log",
    algorithm: Algorithm::SlidingLog,
    lease: "",
    without: Without::Local,
    used: 75,
};

pub(crate) static POLICIES: [Policy; 5] = [
    LOG,
    // Six nodes with two units each may idle.
    Policy {
        name: "leased",
        path: "/leased",
        requests: 40,
        lease: "lease = { size = 2, ttl = '100ms' }",
        used: 50,
        ..LOG
    },
    Policy {
        name: "window",
        path: "/window",
        counts: "sliding_window",
        algorithm: Algorithm::SlidingWindow { buckets: 10 },
        without: Without::Closed,
        // A tenth or so is what the algorithm costs.
        used: 65,
        ..LOG
    },
    Policy {
        name: "fixed",
        path: "/fixed",
        counts: "fixed_window",
        algorithm: Algorithm::FixedWindow { offset_us: 0 },
        without: Without::Closed,
        ..LOG
    },
    Policy {
        name: "open",
        path: "/open",
        without: Without::Open,
        ..LOG
    },
];

/// Whose quota a client uses.
#[derive(Debug)]
pub(crate) struct Key {
    /// `None`: nothing is limited there.
    pub(crate) policy: Option<&'static Policy>,
    user: String,
    /// What Redis calls it, and which of them keeps it.
    pub(crate) name: String,
    pub(crate) master: usize,
}

impl Key {
    /// Path and user of a request.
    pub(crate) fn request(&self) -> (&str, &str) {
        (
            self.policy.map_or("/free", |policy| policy.path),
            &self.user,
        )
    }
}

impl Policy {
    /// Units in a period; in some versions of the configuration fewer.
    pub(crate) fn requests(&self, lowered: bool) -> u64 {
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

    fn key(&'static self, user: String, masters: &Masters) -> Key {
        let per_us = u64::try_from(PER.as_micros()).unwrap();
        let limit = Limit {
            requests: self.requests,
            per_us,
            algorithm: self.algorithm,
        };
        let mut key = KeyBuilder::new(self.name);
        key.part(Some(user.as_bytes()));
        let name = Script::new(PREFIX).key(&Charge::new(&limit, &key.finish(), 1));
        let master = masters.of(&name);
        Key {
            policy: Some(self),
            user,
            name,
            master,
        }
    }
}

/// One of each policy on every master, and one that is not limited.
pub(crate) fn keys(masters: &Masters) -> Vec<Key> {
    let mut keys = vec![Key {
        policy: None,
        user: "u".to_owned(),
        name: String::new(),
        master: 0,
    }];
    for policy in &POLICIES {
        for master in 0..MASTERS {
            let mut all = (0..).map(|user| policy.key(format!("u{user}"), masters));
            keys.extend(all.find(|key| key.master == master));
        }
    }
    keys
}

/// All of the configuration but what is a node's own.
pub(crate) fn config(urls: &str, lowered: bool) -> String {
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
        let Policy {
            name,
            path,
            counts,
            lease,
            without,
            ..
        } = policy;
        let (requests, per) = (policy.requests(lowered), PER.as_secs());
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
