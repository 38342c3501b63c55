use super::*;
use crate::clock::{Clock, Hands};
use crate::limiter::{KeyBuilder, Limit};
use crate::policy::path::{Readings, Settings};
use crate::policy::{
    Actual, Cost, EstimateCost, Fields, KeyPart, KeyTemplate, Matcher, MissingKey, Override,
    Overrides, Quota, client,
};
use crate::store::redis::{Login, Redis, RedisSettings, Shared, Topology};
use crate::store::{Memory, MemorySettings};
use crate::telemetry::metrics::{Kinds, Metrics};
use http::{HeaderMap, Method};

const PATH: Settings = Settings::USUAL;

/// Nobody is asked before a connection is there.
const NOBODY: RedisSettings = RedisSettings {
    topology: Topology::Standalone,
    servers: Vec::new(),
    database: 0,
    login: Login {
        username: None,
        password: None,
    },
    tls: None,
    key_prefix: String::new(),
    instances: 1,
    timeout: Duration::from_millis(50),
    connect_timeout: Duration::from_secs(1),
    breaker_failures: 5,
    probe_interval: Duration::from_millis(500),
};

fn limit(name: &str, requests: u64) -> NamedLimit {
    let limit = Limit {
        requests,
        per_us: 10_000_000,
        algorithm: Algorithm::SlidingLog,
    };
    NamedLimit {
        name: name.into(),
        unit: None,
        limit,
    }
}

fn by_user(name: &str, requests: u64) -> Policy {
    Policy {
        name: name.into(),
        priority: 0,
        matcher: Matcher::default(),
        action: Action::Limit(Box::new(Quota {
            count_rejected: false,
            shards: 1,
            lease: None,
            key: KeyTemplate::new(vec![KeyPart::Header("x-user".parse().unwrap())]),
            missing_key: MissingKey::Shared,
            cost: Cost::Fixed(1),
            limits: vec![limit(name, requests)],
            block: None,
            overrides: Overrides::default(),
        })),
        shadow: false,
        on_store_failure: OnStoreFailure::Open,
        reject: None,
    }
}

fn quota(policy: &mut Policy) -> &mut Quota {
    match &mut policy.action {
        Action::Limit(quota) => quota,
        _ => panic!("not a limit"),
    }
}

struct Bench {
    enforcer: Enforcer,
    hands: Hands,
    /// Decide by a Redis that is not there instead.
    away: bool,
}

impl Bench {
    fn new(policies: Vec<Policy>) -> Self {
        let client = client::Settings {
            trusted_proxies: Vec::new(),
            ip_header: "x-forwarded-for".parse().unwrap(),
            ipv4_prefix: 32,
            ipv6_prefix: 64,
        };
        let fields = Fields {
            standard: true,
            legacy: true,
            legacy_reset_epoch: false,
        };
        let table = PolicyTable::new(policies, PATH, client, fields);
        let (clock, hands) = Clock::manual(1_700_000_000_000_000);
        let memory = Memory::new(
            MemorySettings {
                max_keys: 1000,
                max_bytes: 1 << 20,
            },
            clock,
        );
        let metrics = Metrics::new(1, Kinds::default());
        let live = Live::new(table.into(), Arc::clone(&metrics));
        let enforcer = Enforcer::new(live, Store::Memory(Arc::new(memory)), metrics.shard(0));
        Self {
            enforcer,
            hands,
            away: false,
        }
    }

    fn ask<T>(&self, users: &[&str], look: impl FnOnce(Verdict<'_>) -> T) -> T {
        let mut headers = HeaderMap::new();
        for user in users {
            headers.append("x-user", user.parse().unwrap());
        }
        let paths = Readings::of("/", &PATH).unwrap();
        let facts = Facts {
            method: &Method::GET,
            host: "h",
            paths: &paths,
            query: None,
            headers: &headers,
            client_ip: [127, 0, 0, 1].into(),
            token: crate::policy::jwt::Token::none(),
            client_cert: None,
            descriptor: None,
        };
        let rules = self.enforcer.rules();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let verdict = runtime.block_on(async {
            let mut enforcer = self.enforcer.clone();
            if self.away {
                enforcer.store = Store::redis(Redis::start(&Shared::new(NOBODY)));
            }
            enforcer.decide(&rules, &facts, Instant::now()).await
        });
        look(verdict)
    }

    fn passes(&self, user: &str) -> bool {
        self.ask(&[user], |verdict| {
            matches!(verdict.outcome, Outcome::Forward)
        })
    }
}

#[test]
fn trap_11_a_refused_request_charges_no_policy() {
    let bench = Bench::new(vec![by_user("wide", 10), by_user("narrow", 2)]);
    let passed = (0..5).filter(|_| bench.passes("ann")).count();
    assert_eq!(passed, 2);
    bench.ask(&["ann"], |verdict| {
        let remaining: Vec<u64> = verdict
            .limits
            .iter()
            .map(|l| l.standing.remaining)
            .collect();
        assert_eq!(remaining, [8, 0]);
        let Outcome::Limited(limited) = verdict.outcome else {
            panic!("{:?}", verdict.outcome)
        };
        assert_eq!(
            (limited.policy, limited.violated.as_slice()),
            ("narrow", ["narrow"].as_slice())
        );
        assert_eq!(limited.retry, Retry::After(10_000_000));
    });
    bench.hands.advance_us(10_000_000);
    assert!(bench.passes("ann"));
}

#[test]
fn a_block_shuts_its_own_policy_until_it_ends() {
    let mut narrow = by_user("narrow", 1);
    let block = Limit {
        requests: 1,
        per_us: 60_000_000,
        algorithm: Algorithm::Block,
    };
    quota(&mut narrow).block = Some(block);
    let bench = Bench::new(vec![by_user("wide", 10), narrow.clone()]);
    assert!(bench.passes("ann"));
    for (blocked, waits_us) in [(false, 60_000_000), (true, 20_000_000)] {
        bench.ask(&["ann"], |verdict| {
            let Outcome::Limited(limited) = verdict.outcome else {
                panic!("{:?}", verdict.outcome)
            };
            assert_eq!((limited.policy, limited.blocked), ("narrow", blocked));
            assert_eq!(limited.violated.as_slice(), ["narrow"]);
            assert_eq!(limited.retry, Retry::After(waits_us));
            let remaining: Vec<u64> = verdict
                .limits
                .iter()
                .map(|l| l.standing.remaining)
                .collect();
            assert_eq!(remaining, if blocked { [10, 0] } else { [9, 0] });
        });
        assert!(bench.passes(&format!("other {blocked}")));
        bench.hands.advance_us(40_000_000);
    }
    assert!(bench.passes("ann"));

    let shadow = Bench::new(vec![Policy {
        shadow: true,
        ..narrow
    }]);
    assert!(shadow.passes("ann") && shadow.passes("ann"));
    shadow.hands.advance_us(10_000_000);
    shadow.ask(&["ann"], |verdict| {
        assert!(verdict.shadow_rejected.is_empty(), "it blocks nobody")
    });
}

#[test]
fn trap_20_without_the_store_nobody_is_told_to_be_over_a_limit() {
    let outcome = |policies: &[Policy]| {
        let key = KeyBuilder::new("p").finish();
        let claim = |policy| Claim {
            at: 0,
            policy,
            key: key.clone(),
            limits: &[],
            block: None,
            cost: 1,
            estimate: None,
            counts_rejected: false,
            shards: 1,
            lease: None,
        };
        let plan = Plan {
            claims: policies.iter().map(claim).collect(),
            shadow_denied: SmallVec::new(),
        };
        let verdict = plan.into_degraded(
            &Unavailable {
                kind: "timeout",
                retry_after_us: 7,
            },
            None,
        );
        assert!(verdict.degraded && verdict.limits.is_empty() && verdict.delay.is_zero());
        match verdict.outcome {
            Outcome::Forward => None,
            Outcome::Unavailable {
                policy,
                retry_after_us: 7,
            } => Some(policy.to_owned()),
            other => panic!("{other:?}"),
        }
    };
    let closed = |shadow| Policy {
        on_store_failure: OnStoreFailure::Closed,
        shadow,
        ..by_user("c", 1)
    };
    assert_eq!(outcome(&[by_user("open", 1)]), None);
    assert_eq!(
        outcome(&[by_user("open", 1), closed(false)]).as_deref(),
        Some("c")
    );
    assert_eq!(outcome(&[by_user("open", 1), closed(true)]), None);
}

#[test]
fn trap_25_a_missing_key_is_no_way_round() {
    let shared = Bench::new(vec![by_user("p", 1)]);
    assert_eq!((shared.passes(""), shared.passes("")), (true, false));
    assert!(shared.passes("ann"));

    let mut reject = by_user("p", 1);
    quota(&mut reject).missing_key = MissingKey::Reject;
    Bench::new(vec![reject]).ask(&[], |verdict| {
        let Outcome::BadKey { fault, .. } = verdict.outcome else {
            panic!("{:?}", verdict.outcome)
        };
        assert_eq!(fault, KeyFault::Missing("header x-user".to_owned()));
    });

    let mut skip = by_user("p", 1);
    quota(&mut skip).missing_key = MissingKey::Skip;
    let skip = Bench::new(vec![skip]);
    assert!(skip.passes("") && skip.passes(""));
}

#[test]
fn a_key_that_occurs_twice_is_refused() {
    Bench::new(vec![by_user("p", 1)]).ask(&["ann", "bob"], |verdict| {
        assert!(matches!(
            verdict.outcome,
            Outcome::BadKey {
                fault: KeyFault::Repeated(_),
                ..
            }
        ));
    });
}

#[test]
fn the_first_override_that_fits_replaces_all_limits() {
    let mut policy = by_user("p", 1);
    let entry = |value: Option<&str>, requests| Override {
        values: vec![value.map(Into::into)],
        limits: vec![limit("o", requests)],
    };
    quota(&mut policy).overrides = Overrides::new(
        "p",
        vec![entry(Some("ann"), 3), entry(None, 2), entry(Some("bob"), 9)],
    );
    let bench = Bench::new(vec![policy]);
    let passed = |user: &str| (0..12).filter(|_| bench.passes(user)).count();
    assert_eq!((passed("ann"), passed("bob"), passed("eve")), (3, 2, 2));
}

#[test]
fn shadow_policies_are_measured_and_stop_nothing() {
    let mut shadow = by_user("shadow", 1);
    shadow.shadow = true;
    let bench = Bench::new(vec![shadow, by_user("live", 3)]);
    assert!(bench.passes("ann"));
    bench.ask(&["ann"], |verdict| {
        assert!(matches!(verdict.outcome, Outcome::Forward));
        assert_eq!(verdict.shadow_rejected.as_slice(), ["shadow"]);
        assert_eq!(
            verdict.limits.len(),
            1,
            "shadow limits are not told to clients"
        );
    });
    assert!(bench.passes("ann"));
    assert!(!bench.passes("ann"));
}

#[test]
fn shadow_policies_that_would_deny_are_reported() {
    let shadow = Policy {
        action: Action::Deny,
        shadow: true,
        ..by_user("shadow", 0)
    };
    for others in [vec![], vec![by_user("live", 9)]] {
        let bench = Bench::new([vec![shadow.clone()], others].concat());
        bench.ask(&["ann"], |verdict| {
            assert!(matches!(verdict.outcome, Outcome::Forward));
            assert_eq!(verdict.shadow_rejected.as_slice(), ["shadow"]);
        });
    }
}

/// Nothing was ever connected when the question comes.
#[test]
fn what_is_decided_without_the_store_says_so() {
    let modes = |modes: &[(OnStoreFailure, bool)]| {
        let policies = modes
            .iter()
            .enumerate()
            .map(|(n, (on_store_failure, shadow))| Policy {
                on_store_failure: *on_store_failure,
                shadow: *shadow,
                ..by_user(&n.to_string(), 1)
            });
        let mut bench = Bench::new(policies.collect());
        bench.away = true;
        bench.ask(&["ann"], |verdict| {
            let passes = matches!(verdict.outcome, Outcome::Forward);
            assert!(passes || matches!(verdict.outcome, Outcome::Unavailable { .. }));
            (passes, verdict.degraded)
        })
    };
    use OnStoreFailure::{Closed, Open};
    assert_eq!(modes(&[(Open, false)]), (true, true));
    assert_eq!(modes(&[(Open, false), (Closed, false)]), (false, true));
    assert_eq!(modes(&[(Open, false), (Closed, true)]), (true, true));
    assert_eq!(
        modes(&[(Closed, true)]),
        (true, false),
        "no limit was to be enforced"
    );
}

#[test]
fn one_that_goes_on_alone_refuses_and_one_that_is_closed_decides() {
    let ask = |policies: &[(OnStoreFailure, u64, bool)]| {
        let policies =
            policies
                .iter()
                .enumerate()
                .map(|(n, (on_store_failure, requests, shadow))| Policy {
                    on_store_failure: *on_store_failure,
                    shadow: *shadow,
                    ..by_user(&n.to_string(), *requests)
                });
        let bench = Bench {
            away: true,
            ..Bench::new(policies.collect())
        };
        bench.ask(&["ann"], |verdict| {
            assert!(verdict.degraded);
            let status = match verdict.outcome {
                Outcome::Forward => 200,
                Outcome::Limited(limited) => {
                    assert_eq!(limited.violated.as_slice(), ["1"]);
                    429
                }
                Outcome::Unavailable { .. } => 503,
                other => panic!("{other:?}"),
            };
            let names = verdict
                .limits
                .iter()
                .map(|reported| reported.limit.name.to_string());
            (status, names.collect::<Vec<_>>().concat())
        })
    };
    use OnStoreFailure::{Closed, Local, Open};
    let told = |status, names: &str| (status, names.to_owned());
    assert_eq!(
        ask(&[(Open, 0, false), (Local, 1, false), (Local, 0, true)]),
        told(200, "1")
    );
    assert_eq!(
        ask(&[(Local, 1, false), (Local, 0, false), (Open, 1, false)]),
        told(429, "01")
    );
    assert_eq!(
        ask(&[(Local, 1, false), (Local, 0, false), (Closed, 1, true)]),
        told(429, "01")
    );
    assert_eq!(
        ask(&[(Local, 1, false), (Local, 0, false), (Closed, 1, false)]),
        told(503, "")
    );
}

#[test]
fn allow_stops_the_walk_and_deny_charges_nothing() {
    let act = |action, priority| Policy {
        action,
        priority,
        ..by_user("act", 0)
    };
    let exempt = Bench::new(vec![
        by_user("before", 2),
        act(Action::Allow, 0),
        by_user("after", 0),
    ]);
    assert_eq!((0..5).filter(|_| exempt.passes("ann")).count(), 2);

    let denied = Bench::new(vec![by_user("before", 1), act(Action::Deny, 0)]);
    for _ in 0..3 {
        denied.ask(&["ann"], |verdict| {
            assert!(matches!(
                verdict.outcome,
                Outcome::Denied { policy: "act", .. }
            ))
        });
    }
}

/// Reserves 4.
fn by_estimate(name: &str, requests: u64) -> Policy {
    let mut policy = by_user(name, requests);
    let actual = Actual::parse("response_header:x-units").unwrap();
    quota(&mut policy).cost = Cost::Estimate(Arc::new(EstimateCost {
        estimate: 4,
        actual,
    }));
    quota(&mut policy).limits[0].limit.algorithm = Algorithm::FixedWindow { offset_us: 0 };
    policy
}

#[test]
fn an_estimate_is_settled_up_and_down_or_stands() {
    let bench = Bench::new(vec![by_estimate("p", 20)]);
    let remaining_after = |settle: &dyn Fn(Estimate)| {
        bench.ask(&["ann"], |mut verdict| {
            verdict.estimates.drain(..).for_each(settle);
            verdict.limits[0].standing.remaining
        })
    };
    assert_eq!(remaining_after(&|estimate| estimate.settle(7)), 16);
    assert_eq!(remaining_after(&|estimate| estimate.settle(1)), 20 - 7 - 4);
    assert_eq!(remaining_after(&|estimate| estimate.settle(4)), 20 - 8 - 4);
    assert_eq!(remaining_after(&drop), 20 - 12 - 4);
    assert_eq!(
        remaining_after(&|estimate| estimate.settle(1 << 53)),
        20 - 16 - 4
    );
    assert!(!bench.passes("ann"));
    assert!(bench.passes("bob"));
    bench.hands.advance_us(10_000_000);
    assert!(bench.passes("ann"));
}

#[test]
fn only_what_was_charged_by_estimate_is_to_be_settled() {
    let shadow = |requests| Policy {
        shadow: true,
        ..by_estimate("shadow", requests)
    };
    let estimates = |policies: Vec<Policy>, away| {
        let bench = Bench {
            away,
            ..Bench::new(policies)
        };
        bench.ask(&["ann"], |verdict| verdict.estimates.len())
    };
    assert_eq!(
        estimates(vec![by_estimate("p", 4), by_user("q", 1), shadow(4)], false),
        2
    );
    assert_eq!(estimates(vec![by_user("q", 1)], false), 0);
    assert_eq!(
        estimates(vec![by_estimate("p", 4), by_user("q", 0), shadow(4)], false),
        0,
        "refused"
    );
    assert_eq!(
        estimates(vec![shadow(3), by_estimate("p", 4)], false),
        1,
        "the shadow charges nothing"
    );
    assert_eq!(
        estimates(vec![by_estimate("p", 4)], true),
        0,
        "decided without the store"
    );
}

#[test]
fn a_shadow_policy_settles_its_own_counter() {
    let bench = Bench::new(vec![Policy {
        shadow: true,
        ..by_estimate("p", 8)
    }]);
    let ask = |actual| {
        bench.ask(&["ann"], |mut verdict| {
            verdict
                .estimates
                .drain(..)
                .for_each(|estimate| estimate.settle(actual));
            verdict.shadow_rejected.len()
        })
    };
    assert_eq!([ask(0), ask(0), ask(0), ask(5), ask(0)], [0, 0, 0, 0, 1]);
}
