use super::planned_policy::PlannedPolicy;
use super::*;
use crate::clock::{Clock, ManualClock};
use crate::limiter::{Algorithm, KeyBuilder, KeyOverride, Limit, LimitAmounts, LimitStatus};
use crate::policy::path::{PathInterpretations, Settings};
use crate::policy::{
    ActualCost, ClientQuota, CostSource, CountedStatuses, Estimate, EstimateCost, KeyError,
    KeyPart, KeyTemplate, LimitOverride, LimitOverrides, Matcher, MissingKeyAction, NamedLimit,
    OnStoreFailure, OverrideRule, Policy, PolicyAction, PolicyMode, PolicyTable, Quota,
    RateLimitHeaderSettings, ReportSource, SlotRelease, ValuePattern, Weight, client,
};
use crate::store::redis::{
    RedisCredentials, RedisDialer, RedisSettings, RedisStore, RedisTopology, SharedRedisState,
};
use crate::store::{MemorySettings, MemoryStore, StoredOverride};
use crate::telemetry::metrics::{MetricLabels, Metrics};
use http::{HeaderMap, Method, StatusCode};
use std::time::Duration;

const PATH_SETTINGS: Settings = Settings::DEFAULT;

/// Every call fails at once, because no connection exists yet.
const UNREACHABLE_REDIS: RedisSettings = RedisSettings {
    topology: RedisTopology::Standalone,
    servers: Vec::new(),
    database: 0,
    credentials: RedisCredentials {
        username: None,
        password: None,
    },
    tls: None,
    key_prefix: String::new(),
    initial_instances: 1,
    instance_counter_bounds: MemorySettings {
        max_keys: 100,
        max_bytes: 1 << 20,
    },
    state_dir: None,
    timeout: Duration::from_millis(50),
    connect_timeout: Duration::from_secs(1),
    breaker_failures: 5,
    probe_interval: Duration::from_millis(500),
    dialer: RedisDialer::Network,
};

fn make_limit(name: &str, requests: u64) -> NamedLimit {
    let limit = Limit {
        requests,
        per_us: 10_000_000,
        algorithm: Algorithm::SlidingLog,
    };
    NamedLimit {
        name: name.into(),
        unit: None,
        limit,
        amount: None,
        is_reported: true,
        release: SlotRelease::default(),
    }
}

fn make_policy_by_user(name: &str, requests: u64) -> Policy {
    Policy {
        name: name.into(),
        priority: 0,
        matcher: Matcher::default(),
        action: PolicyAction::Limit(Box::new(Quota {
            count_rejected: false,
            shards: 1,
            lease: None,
            key: KeyTemplate::new(vec![KeyPart::Header("x-user".parse().unwrap())]),
            missing_key: MissingKeyAction::Shared,
            cost: CostSource::Fixed(1),
            limits: vec![make_limit(name, requests)],
            block: None,
            overrides: LimitOverrides::default(),
            is_dynamic: false,
            notify: Box::default(),
        })),
        mode: PolicyMode::Enforce,
        is_reported: true,
        on_store_failure: OnStoreFailure::Open,
        max_scan: 0,
        reject_response: None,
    }
}

fn quota_mut(policy: &mut Policy) -> &mut Quota {
    match &mut policy.action {
        PolicyAction::Limit(quota) => quota,
        _ => panic!("not a limit"),
    }
}

mod notifications;

struct EnforcerFixture {
    enforcer: Enforcer,
    manual_clock: ManualClock,
    /// Decides with an unreachable Redis instead of the memory store.
    is_store_unreachable: bool,
}

impl EnforcerFixture {
    fn new(policies: Vec<Policy>) -> Self {
        let client = client::Settings {
            trusted_proxies: Vec::new(),
            ip_header: "x-forwarded-for".parse().unwrap(),
            ipv4_prefix: 32,
            ipv6_prefix: 64,
            nat64_prefixes: Vec::new(),
            value_checks: crate::policy::ValueChecks::ALL,
        };
        let fields = RateLimitHeaderSettings {
            standard: true,
            legacy: true,
            legacy_reset_epoch: false,
        };
        let table = PolicyTable::new(policies, PATH_SETTINGS, client, fields);
        let (clock, manual_clock) = Clock::manual(1_700_000_000_000_000);
        let memory = MemoryStore::new(
            MemorySettings {
                max_keys: 1000,
                max_bytes: 1 << 20,
            },
            clock,
        );
        let metrics = Metrics::new(1, MetricLabels::default());
        let live = ActivePolicies::new(&table.into(), Arc::clone(&metrics), 1);
        let enforcer = Enforcer::new(
            live,
            Store::Memory(Arc::new(memory)),
            metrics.worker_metrics(0),
        );
        Self {
            enforcer,
            manual_clock,
            is_store_unreachable: false,
        }
    }

    fn decide_request_with_users<T>(
        &self,
        users: &[&str],
        inspect: impl FnOnce(Verdict<'_>) -> T,
    ) -> T {
        let mut headers = HeaderMap::new();
        for user in users {
            headers.append("x-user", user.parse().unwrap());
        }
        let paths = PathInterpretations::parse("/", &PATH_SETTINGS).unwrap();
        let facts = Facts {
            method: &Method::GET,
            host: "h",
            paths: &paths,
            query: None,
            headers: &headers,
            client_ip: [127, 0, 0, 1].into(),
            token: crate::policy::jwt::RequestToken::without_token_reader(),
            client_cert: None,
            has_joined_headers: false,
            is_peer_trusted: false,
            body: None,
            unreadable_holds: true,
            descriptor: None,
        };
        let policies = self.enforcer.policy_snapshot();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let verdict = runtime.block_on(async {
            let mut enforcer = self.enforcer.clone();
            if self.is_store_unreachable {
                enforcer.store =
                    Store::from_redis(RedisStore::start(&SharedRedisState::new(UNREACHABLE_REDIS)));
            }
            enforcer
                .decide_request(&policies, &facts, Instant::now())
                .await
        });
        inspect(verdict)
    }

    fn is_forwarded(&self, user: &str) -> bool {
        self.decide_request_with_users(&[user], |verdict| {
            matches!(verdict.outcome, RequestOutcome::Forward)
        })
    }
}

#[test]
fn trap_11_a_refused_request_charges_no_policy() {
    let fixture = EnforcerFixture::new(vec![
        make_policy_by_user("wide", 10),
        make_policy_by_user("narrow", 2),
    ]);
    let passed = (0..5).filter(|_| fixture.is_forwarded("ann")).count();
    assert_eq!(passed, 2);
    fixture.decide_request_with_users(&["ann"], |verdict| {
        let remaining: Vec<u64> = verdict.limits.iter().map(|l| l.status.remaining).collect();
        assert_eq!(remaining, [8, 0]);
        let RequestOutcome::Limited(limited) = verdict.outcome else {
            panic!("{:?}", verdict.outcome)
        };
        assert_eq!(
            (limited.policy, limited.violated_limits.as_slice()),
            ("narrow", ["narrow"].as_slice())
        );
        assert_eq!(limited.retry, RetryHint::After(10_000_000));
    });
    fixture.manual_clock.advance_us(10_000_000);
    assert!(fixture.is_forwarded("ann"));
}

#[test]
fn a_block_rejects_requests_of_its_own_policy_until_it_ends() {
    let mut narrow = make_policy_by_user("narrow", 1);
    let block = Limit {
        requests: 1,
        per_us: 60_000_000,
        algorithm: Algorithm::Block,
    };
    quota_mut(&mut narrow).block = Some(block);
    let fixture = EnforcerFixture::new(vec![make_policy_by_user("wide", 10), narrow.clone()]);
    assert!(fixture.is_forwarded("ann"));
    for (blocked, waits_us) in [(false, 60_000_000), (true, 20_000_000)] {
        fixture.decide_request_with_users(&["ann"], |verdict| {
            let RequestOutcome::Limited(limited) = verdict.outcome else {
                panic!("{:?}", verdict.outcome)
            };
            assert_eq!((limited.policy, limited.is_blocked), ("narrow", blocked));
            assert_eq!(limited.violated_limits.as_slice(), ["narrow"]);
            assert_eq!(limited.retry, RetryHint::After(waits_us));
            let remaining: Vec<u64> = verdict.limits.iter().map(|l| l.status.remaining).collect();
            assert_eq!(remaining, if blocked { [10, 0] } else { [9, 0] });
        });
        assert!(fixture.is_forwarded(&format!("other {blocked}")));
        fixture.manual_clock.advance_us(40_000_000);
    }
    assert!(fixture.is_forwarded("ann"));

    let shadow = EnforcerFixture::new(vec![Policy {
        mode: PolicyMode::Shadow,
        ..narrow
    }]);
    assert!(shadow.is_forwarded("ann") && shadow.is_forwarded("ann"));
    shadow.manual_clock.advance_us(10_000_000);
    shadow.decide_request_with_users(&["ann"], |verdict| {
        assert!(
            verdict.unenforced_rejections.is_empty(),
            "a shadow policy has no block"
        )
    });
}

#[test]
fn trap_20_a_store_failure_is_never_reported_as_over_limit() {
    let outcome = |policies: &[Policy]| {
        let key = KeyBuilder::new("p").finish();
        let planned_policies = policies.iter().map(|policy| {
            PlannedPolicy::new_read_only(ClientQuota {
                policy_index: 0,
                policy,
                quota: policy.quota().unwrap(),
                mode: policy.mode,
                key: key.clone(),
                limits: &[],
                amounts: None,
            })
        });
        let mut plan = ChargePlan {
            planned_policies: planned_policies.collect(),
            ..ChargePlan::default()
        };
        assert!(plan.has_enforced_shared_policy());
        let verdict = plan.build_undecided_verdict(7);
        assert!(verdict.limits.is_empty() && verdict.delay.is_zero());
        match verdict.outcome {
            RequestOutcome::Forward => None,
            RequestOutcome::Unavailable {
                policy,
                retry_after_us: 7,
                ..
            } => Some(policy.to_owned()),
            other => panic!("{other:?}"),
        }
    };
    let closed = |mode| Policy {
        on_store_failure: OnStoreFailure::Closed,
        mode,
        ..make_policy_by_user("c", 1)
    };
    assert_eq!(outcome(&[make_policy_by_user("open", 1)]), None);
    assert_eq!(
        outcome(&[make_policy_by_user("open", 1), closed(PolicyMode::Enforce)]).as_deref(),
        Some("c")
    );
    assert_eq!(
        outcome(&[make_policy_by_user("open", 1), closed(PolicyMode::Shadow)]),
        None
    );
}

#[test]
fn trap_25_a_missing_key_does_not_bypass_the_limit() {
    let shared = EnforcerFixture::new(vec![make_policy_by_user("p", 1)]);
    assert_eq!(
        (shared.is_forwarded(""), shared.is_forwarded("")),
        (true, false)
    );
    assert!(shared.is_forwarded("ann"));

    let mut reject = make_policy_by_user("p", 1);
    quota_mut(&mut reject).missing_key = MissingKeyAction::Reject;
    EnforcerFixture::new(vec![reject]).decide_request_with_users(&[], |verdict| {
        let RequestOutcome::InvalidKey { error, .. } = verdict.outcome else {
            panic!("{:?}", verdict.outcome)
        };
        assert_eq!(error, KeyError::Missing("header x-user".to_owned()));
    });

    let mut skip = make_policy_by_user("p", 1);
    quota_mut(&mut skip).missing_key = MissingKeyAction::Skip;
    let skip = EnforcerFixture::new(vec![skip]);
    assert!(skip.is_forwarded("") && skip.is_forwarded(""));
}

#[test]
fn a_repeated_key_header_is_rejected() {
    EnforcerFixture::new(vec![make_policy_by_user("p", 1)]).decide_request_with_users(
        &["ann", "bob"],
        |verdict| {
            assert!(matches!(
                verdict.outcome,
                RequestOutcome::InvalidKey {
                    error: KeyError::Repeated(_),
                    ..
                }
            ));
        },
    );
}

#[test]
fn an_exact_override_replaces_all_limits_before_any_value() {
    let mut policy = make_policy_by_user("p", 1);
    let entry = |value: Option<&str>, requests| LimitOverride {
        values: vec![value.map_or(ValuePattern::Any, |text| ValuePattern::Exact(text.into()))],
        limits: vec![make_limit("o", requests)],
        rule: OverrideRule::Limit(None),
    };
    let quota = quota_mut(&mut policy);
    quota.overrides = LimitOverrides::new(
        "p",
        &quota.key,
        vec![entry(Some("ann"), 3), entry(None, 2), entry(Some("bob"), 9)],
    );
    let fixture = EnforcerFixture::new(vec![policy]);
    let passed = |user: &str| (0..12).filter(|_| fixture.is_forwarded(user)).count();
    assert_eq!((passed("ann"), passed("bob"), passed("eve")), (3, 9, 2));
}

#[test]
fn shadow_policies_are_counted_and_never_reject() {
    let mut shadow = make_policy_by_user("shadow", 1);
    shadow.mode = PolicyMode::Shadow;
    let fixture = EnforcerFixture::new(vec![shadow, make_policy_by_user("live", 3)]);
    assert!(fixture.is_forwarded("ann"));
    fixture.decide_request_with_users(&["ann"], |verdict| {
        assert!(matches!(verdict.outcome, RequestOutcome::Forward));
        assert_eq!(
            verdict
                .unenforced_rejections
                .names_in_mode(PolicyMode::Shadow)
                .collect::<Vec<_>>(),
            ["shadow"]
        );
        assert_eq!(
            verdict.limits.len(),
            1,
            "shadow limits are not reported to clients"
        );
    });
    assert!(fixture.is_forwarded("ann"));
    assert!(!fixture.is_forwarded("ann"));
}

#[test]
fn shadow_policies_that_would_deny_are_reported() {
    let shadow = Policy {
        action: PolicyAction::Deny,
        mode: PolicyMode::Shadow,
        ..make_policy_by_user("shadow", 0)
    };
    for others in [vec![], vec![make_policy_by_user("live", 9)]] {
        let fixture = EnforcerFixture::new([vec![shadow.clone()], others].concat());
        fixture.decide_request_with_users(&["ann"], |verdict| {
            assert!(matches!(verdict.outcome, RequestOutcome::Forward));
            assert_eq!(
                verdict
                    .unenforced_rejections
                    .names_in_mode(PolicyMode::Shadow)
                    .collect::<Vec<_>>(),
                ["shadow"]
            );
        });
    }
}

/// The store is asked before any connection exists.
#[test]
fn verdicts_without_the_store_are_marked_degraded() {
    let modes = |modes: &[(OnStoreFailure, bool)]| {
        let policies = modes
            .iter()
            .enumerate()
            .map(|(n, (on_store_failure, shadow))| Policy {
                on_store_failure: *on_store_failure,
                mode: if *shadow {
                    PolicyMode::Shadow
                } else {
                    PolicyMode::Enforce
                },
                ..make_policy_by_user(&n.to_string(), 1)
            });
        let mut fixture = EnforcerFixture::new(policies.collect());
        fixture.is_store_unreachable = true;
        fixture.decide_request_with_users(&["ann"], |verdict| {
            let passes = matches!(verdict.outcome, RequestOutcome::Forward);
            assert!(passes || matches!(verdict.outcome, RequestOutcome::Unavailable { .. }));
            (passes, verdict.is_degraded)
        })
    };
    use OnStoreFailure::{Closed, Open};
    assert_eq!(modes(&[(Open, false)]), (true, true));
    assert_eq!(modes(&[(Open, false), (Closed, false)]), (false, true));
    assert_eq!(modes(&[(Open, false), (Closed, true)]), (true, true));
    assert_eq!(
        modes(&[(Closed, true)]),
        (true, false),
        "no enforced limit applies"
    );
}

#[test]
fn local_policies_reject_by_share_and_a_closed_policy_overrides_them() {
    let decide = |policies: &[(OnStoreFailure, u64, bool)]| {
        let policies =
            policies
                .iter()
                .enumerate()
                .map(|(n, (on_store_failure, requests, shadow))| Policy {
                    on_store_failure: *on_store_failure,
                    mode: if *shadow {
                        PolicyMode::Shadow
                    } else {
                        PolicyMode::Enforce
                    },
                    ..make_policy_by_user(&n.to_string(), *requests)
                });
        let fixture = EnforcerFixture {
            is_store_unreachable: true,
            ..EnforcerFixture::new(policies.collect())
        };
        fixture.decide_request_with_users(&["ann"], |verdict| {
            assert!(verdict.is_degraded);
            let status = match verdict.outcome {
                RequestOutcome::Forward => 200,
                RequestOutcome::Limited(limited) => {
                    assert_eq!(limited.violated_limits.as_slice(), ["1"]);
                    429
                }
                RequestOutcome::Unavailable { .. } => 503,
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
    let response = |status, names: &str| (status, names.to_owned());
    assert_eq!(
        decide(&[(Open, 0, false), (Local, 1, false), (Local, 0, true)]),
        response(200, "1")
    );
    assert_eq!(
        decide(&[(Local, 1, false), (Local, 0, false), (Open, 1, false)]),
        response(429, "01")
    );
    assert_eq!(
        decide(&[(Local, 1, false), (Local, 0, false), (Closed, 1, true)]),
        response(429, "01")
    );
    assert_eq!(
        decide(&[(Local, 1, false), (Local, 0, false), (Closed, 1, false)]),
        response(503, "")
    );
}

/// Redis may have taken the slots before the call failed.
#[test]
fn slots_that_the_fallback_does_not_grant_are_released_in_redis() {
    let queued_releases = |policies: &[(OnStoreFailure, u64)]| {
        let policies = policies
            .iter()
            .enumerate()
            .map(|(n, (on_store_failure, requests))| {
                let mut policy = make_policy_by_user(&n.to_string(), *requests);
                policy.on_store_failure = *on_store_failure;
                quota_mut(&mut policy).limits[0].limit.algorithm =
                    Algorithm::Concurrency { max_duration_us: 0 };
                policy
            });
        let mut fixture = EnforcerFixture::new(policies.collect());
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let store = {
            let _entered = runtime.enter();
            Store::from_redis(RedisStore::start(&SharedRedisState::new(UNREACHABLE_REDIS)))
        };
        fixture.enforcer.slots = ConcurrencySlots::new(store.clone());
        fixture.enforcer.store = store;
        fixture.decide_request_with_users(&["ann"], |_verdict| {
            let releases = fixture.enforcer.slots.counters_of_queued_releases();
            let capacities = releases.iter().map(|(limit, _)| limit.requests);
            capacities.collect::<Vec<_>>()
        })
    };
    use OnStoreFailure::{Local, Open};
    assert_eq!(
        queued_releases(&[(Local, 1), (Local, 0)]),
        [1, 0],
        "refused"
    );
    assert_eq!(queued_releases(&[(Local, 1), (Open, 2)]), [2], "admitted");
}

#[test]
fn a_status_stays_with_its_limit_if_that_of_an_earlier_one_is_unknown() {
    let mut policy = make_policy_by_user("first", 3);
    quota_mut(&mut policy).limits.push(make_limit("second", 5));
    let fixture = EnforcerFixture::new(vec![policy]);
    let snapshot = fixture.enforcer.active_policies.load_snapshot();
    let steps = explain::explain_policies(&snapshot.table, &Facts::placeholder());
    let Some((_, explain::PolicyStep::Limits(mut limits))) = steps.into_iter().next() else {
        panic!("the policy limits every request");
    };
    let known = LimitStatus {
        remaining: 5,
        in_effect: None,
        ..LimitStatus::UNLIMITED
    };
    limits.statuses = vec![None, Some(known)];
    let reported: Vec<_> = limits
        .reports()
        .map(|report| (&*report.limit.name, report.status.remaining))
        .collect();
    assert_eq!(reported, [("second", 5)]);
}

#[test]
fn allow_ends_policy_evaluation_and_deny_charges_nothing() {
    let act = |action, priority| Policy {
        action,
        priority,
        ..make_policy_by_user("act", 0)
    };
    let exempt = EnforcerFixture::new(vec![
        make_policy_by_user("before", 2),
        act(PolicyAction::Allow, 0),
        make_policy_by_user("after", 0),
    ]);
    assert_eq!((0..5).filter(|_| exempt.is_forwarded("ann")).count(), 2);

    let denied = EnforcerFixture::new(vec![
        make_policy_by_user("before", 1),
        act(PolicyAction::Deny, 0),
    ]);
    for _ in 0..3 {
        denied.decide_request_with_users(&["ann"], |verdict| {
            assert!(matches!(
                verdict.outcome,
                RequestOutcome::Denied { policy: "act", .. }
            ))
        });
    }
}

/// A policy with an estimate of 4 units.
fn make_policy_by_estimate(name: &str, requests: u64) -> Policy {
    let mut policy = make_policy_by_user(name, requests);
    let source = ReportSource::parse("response_header:x-units").unwrap();
    quota_mut(&mut policy).cost = CostSource::Estimate(Arc::new(EstimateCost {
        estimate: Estimate::Fixed(4),
        actual: ActualCost::from_source(source, Weight::ONE),
        cut_off: None,
    }));
    quota_mut(&mut policy).limits[0].limit.algorithm = Algorithm::FixedWindow { offset_us: 0 };
    policy
}

#[test]
fn an_estimate_is_settled_up_and_down_or_stands() {
    let fixture = EnforcerFixture::new(vec![make_policy_by_estimate("p", 20)]);
    let remaining_after = |settle: &dyn Fn(EstimatedCharge)| {
        fixture.decide_request_with_users(&["ann"], |mut verdict| {
            verdict.estimated_charges.drain(..).for_each(settle);
            verdict.limits[0].status.remaining
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
    assert!(!fixture.is_forwarded("ann"));
    assert!(fixture.is_forwarded("bob"));
    fixture.manual_clock.advance_us(10_000_000);
    assert!(fixture.is_forwarded("ann"));
}

#[test]
fn a_verdict_lists_only_estimates_that_were_charged() {
    let shadow = |requests| Policy {
        mode: PolicyMode::Shadow,
        ..make_policy_by_estimate("shadow", requests)
    };
    let estimates = |policies: Vec<Policy>, away| {
        let fixture = EnforcerFixture {
            is_store_unreachable: away,
            ..EnforcerFixture::new(policies)
        };
        fixture.decide_request_with_users(&["ann"], |verdict| verdict.estimated_charges.len())
    };
    assert_eq!(
        estimates(
            vec![
                make_policy_by_estimate("p", 4),
                make_policy_by_user("q", 1),
                shadow(4)
            ],
            false
        ),
        2
    );
    assert_eq!(estimates(vec![make_policy_by_user("q", 1)], false), 0);
    assert_eq!(
        estimates(
            vec![
                make_policy_by_estimate("p", 4),
                make_policy_by_user("q", 0),
                shadow(4)
            ],
            false
        ),
        0,
        "refused"
    );
    assert_eq!(
        estimates(vec![shadow(3), make_policy_by_estimate("p", 4)], false),
        1,
        "the shadow charges nothing"
    );
    assert_eq!(
        estimates(vec![make_policy_by_estimate("p", 4)], true),
        0,
        "decided without the store"
    );
}

#[test]
fn a_shadow_policy_settles_its_own_counter() {
    let fixture = EnforcerFixture::new(vec![Policy {
        mode: PolicyMode::Shadow,
        ..make_policy_by_estimate("p", 8)
    }]);
    let decide = |actual| {
        fixture.decide_request_with_users(&["ann"], |mut verdict| {
            verdict
                .estimated_charges
                .drain(..)
                .for_each(|estimate| estimate.settle(actual));
            verdict
                .unenforced_rejections
                .names_in_mode(PolicyMode::Shadow)
                .count()
        })
    };
    assert_eq!(
        [decide(0), decide(0), decide(0), decide(5), decide(0)],
        [0, 0, 0, 0, 1]
    );
}

/// A policy with `count_when = { status = [401] }`.
fn make_policy_by_responses(name: &str, requests: u64) -> Policy {
    let mut policy = make_policy_by_user(name, requests);
    let mut counted = CountedStatuses::default();
    counted.add_text("401").unwrap();
    quota_mut(&mut policy).cost = CostSource::Estimate(Arc::new(EstimateCost {
        estimate: Estimate::Fixed(1),
        actual: ActualCost::Status(counted),
        cut_off: None,
    }));
    policy
}

#[test]
fn in_10_000_rounds_of_parallel_requests_no_sixth_counted_response_gets_through() {
    let policy = make_policy_by_responses("login", 5);
    let fixture = EnforcerFixture::new(vec![policy]);
    let mut random = fastrand::Rng::with_seed(20);
    let decide = |user: &str| {
        fixture.decide_request_with_users(&[user], |mut verdict| {
            let is_forwarded = matches!(verdict.outcome, RequestOutcome::Forward);
            (is_forwarded, std::mem::take(&mut verdict.estimated_charges))
        })
    };
    for round in 0..10_000 {
        let user = round.to_string();
        let (mut failures, mut pending) = (0, Vec::new());
        for _ in 0..12 {
            let (is_forwarded, charges) = decide(&user);
            // A refusal needs five failures or requests without a response.
            assert_eq!(is_forwarded, failures + pending.len() < 5, "round {round}");
            if is_forwarded {
                pending.push(charges);
            }
            while !pending.is_empty() && random.bool() {
                let is_wrong = random.bool();
                failures += usize::from(is_wrong);
                let status = if is_wrong { 401 } else { 200 };
                for charge in pending.swap_remove(random.usize(..pending.len())) {
                    charge.settle_by_status(StatusCode::from_u16(status).unwrap());
                }
            }
            assert!(failures <= 5, "round {round}");
        }
    }
}

/// A dynamic policy with `count_when` and `block_for`: a bucket of 100, a log, and slots, which
/// have no response counter.
fn make_lockout_policy(name: &str, bucket_index: usize) -> Policy {
    let mut policy = make_policy_by_responses(name, 100);
    let mut bucket = make_limit("bucket", 100);
    bucket.limit.algorithm = Algorithm::TokenBucket {
        burst: 100,
        warm_up_us: 0,
    };
    let mut slots = make_limit("slots", 50);
    slots.limit.algorithm = Algorithm::Concurrency { max_duration_us: 0 };
    let quota = quota_mut(&mut policy);
    quota.limits = vec![make_limit("log", 1_000), slots];
    quota.limits.insert(bucket_index, bucket);
    quota.block = Some(Limit {
        requests: 1,
        per_us: 3_600_000_000,
        algorithm: Algorithm::Block,
    });
    quota.is_dynamic = true;
    policy
}

/// The response counter is charged by the limit that the override sets: a bucket of 4
/// does not refill at the rate of 100.
#[test]
fn counted_responses_are_charged_by_the_override_of_their_own_limit() {
    for bucket_index in 0..3 {
        let fixture = EnforcerFixture::new(vec![
            make_policy_by_user("before", 1_000),
            make_lockout_policy("login", bucket_index),
            make_lockout_policy("after", 0),
        ]);
        let mut key =
            KeyTemplate::new(vec![KeyPart::Header("x-user".parse().unwrap())]).start_key("login");
        key.push_key_value(Some(b"ann"));
        let amounts = LimitAmounts {
            limit: "bucket".into(),
            requests: 4,
            burst: None,
        };
        let Store::Memory(memory) = &fixture.enforcer.store else {
            panic!("the store is in memory")
        };
        assert!(memory.set_override(StoredOverride {
            key: key.finish(),
            rule: KeyOverride::Limits(vec![amounts]),
            expires_at_ms: None,
            author: None,
            note: None,
        }));
        let fail = || {
            fixture.decide_request_with_users(&["ann"], |mut verdict| {
                let charges = std::mem::take(&mut verdict.estimated_charges);
                for charge in charges {
                    charge.settle_by_status(StatusCode::UNAUTHORIZED);
                }
                verdict.outcome.retry_after_us()
            })
        };
        assert_eq!([fail(), fail(), fail(), fail()], [None; 4]);
        // By the rate of the file, nothing of the four responses is left after half a second, and
        // the rejection starts no block.
        fixture.manual_clock.advance_us(500_000);
        assert_eq!(fail(), Some(3_600_000_000), "bucket {bucket_index}");
    }
}
