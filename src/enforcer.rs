//! The centre: one question about a request, one verdict.
//!
//! Facts go in, the table says which limits apply, the store decides them, and what comes out says
//! whether to forward, what to answer if not, and which limits to tell the client about.

mod explain;
mod live;

pub use explain::{Explanation, Limits, Step, explain};
pub use live::{Live, Rules};

use crate::limiter::{Algorithm, Charge, Decision, Key, Limit, Refusal, Standing};
use crate::policy::{Action, Facts, KeyFault, NamedLimit, OnStoreFailure, Policy, PolicyTable, Reject};
use crate::store::{Store, Unavailable};
use crate::telemetry::metrics::{Decision as Did, Shard, Source};
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Decides requests by the policies that hold now, and counts what they did; one per worker.
#[derive(Clone, Debug)]
pub struct Enforcer {
    live: Live,
    store: Store,
    shard: Arc<Shard>,
}

/// What is to become of a request. Borrows the table that decided it.
#[derive(Debug)]
pub struct Verdict<'t> {
    pub outcome: Outcome<'t>,
    /// Every enforced limit that applied, in the order of the policies; empty if none was decided.
    pub limits: SmallVec<[Reported<'t>; 4]>,
    /// The store's clock when it decided (µs since the epoch).
    pub now_us: u64,
    /// When the store answered, or was found not to; `None`: it was not asked.
    pub at: Option<Instant>,
    /// How long the request is to be held before it is forwarded.
    pub delay: Duration,
    /// An enforced limit applied, and was decided without the store.
    pub degraded: bool,
    /// Shadow policies that would have refused.
    pub shadow_rejected: SmallVec<[&'t str; 1]>,
}

#[derive(Debug)]
pub enum Outcome<'t> {
    Forward,
    /// Over a limit: 429.
    Limited(Limited<'t>),
    /// A policy with `action = "deny"`: 403.
    Denied {
        policy: &'t str,
        reject: Option<&'t Reject>,
    },
    /// The request cannot be keyed: 400.
    BadKey {
        policy: &'t str,
        fault: KeyFault,
    },
    /// The store is away and a policy is `closed`: 503.
    Unavailable {
        policy: &'t str,
        retry_after_us: u64,
    },
}

/// A refusal by one or more limits.
#[derive(Debug)]
pub struct Limited<'t> {
    /// The policy of the limit that stays closed longest.
    pub policy: &'t str,
    /// The field names of all limits that refused.
    pub violated: SmallVec<[&'t str; 2]>,
    /// Microseconds until the same request would be admitted; `None`: never.
    pub retry_after_us: Option<u64>,
    /// A block that began earlier was met.
    pub blocked: bool,
    pub reject: Option<&'t Reject>,
}

/// One limit as it goes into the rate-limit fields.
#[derive(Clone, Copy, Debug)]
pub struct Reported<'t> {
    pub limit: &'t NamedLimit,
    pub standing: Standing,
}

impl Enforcer {
    /// Counts with a worker's own shard.
    pub fn new(live: Live, store: Store, shard: Arc<Shard>) -> Self {
        Self { live, store, shard }
    }

    /// The policies that hold now. A request keeps those that it started with.
    pub fn rules(&self) -> Arc<Rules> {
        self.live.rules()
    }

    /// Decides one request, which arrived just now, by `rules`.
    pub async fn decide<'t>(&self, rules: &'t Rules, facts: &Facts<'_>, arrived: Instant) -> Verdict<'t> {
        let count = |at, did| rules.count(at, &self.shard, did);
        let plan = match Plan::of(&rules.table, facts, count) {
            Ok(plan) => plan,
            Err(outcome) => return Verdict::of(outcome),
        };
        if plan.claims.is_empty() {
            return Verdict { shadow_rejected: plan.shadow_denied, ..Verdict::of(Outcome::Forward) };
        }
        let answer = self.store.answer(&plan.charges(1), arrived).await;
        let (mut verdict, source) = match answer {
            Ok((decision, source)) => {
                plan.count(&decision, count);
                (plan.into_verdict(&decision), source)
            }
            Err(unavailable) => {
                plan.count_degraded(count);
                (plan.into_degraded(&unavailable), Source::Degraded)
            }
        };
        let at = Instant::now();
        self.shard.decided(source, at.saturating_duration_since(arrived));
        verdict.at = Some(at);
        verdict
    }
}

impl<'t> Verdict<'t> {
    /// A verdict for which no limit was asked.
    fn of(outcome: Outcome<'t>) -> Self {
        Self {
            outcome,
            limits: SmallVec::new(),
            now_us: 0,
            at: None,
            delay: Duration::ZERO,
            degraded: false,
            shadow_rejected: SmallVec::new(),
        }
    }
}

/// What one request asks of the store.
struct Plan<'t> {
    claims: SmallVec<[Claim<'t>; 4]>,
    /// Shadow policies that would have denied it.
    shadow_denied: SmallVec<[&'t str; 1]>,
}

/// The limits of one matching policy, for the key that the request has there.
struct Claim<'t> {
    /// The policy's place in the table.
    at: usize,
    policy: &'t Policy,
    key: Key,
    limits: &'t [NamedLimit],
    /// Asked before the limits. A shadow policy has none: it blocks nobody.
    block: Option<&'t Limit>,
    cost: u64,
}

impl Claim<'_> {
    /// Whether the policy is one of those for which requests are held.
    fn holds(&self) -> bool {
        let is_line = |named: &NamedLimit| matches!(named.limit.algorithm, Algorithm::LeakyBucket { .. });
        self.limits.iter().any(is_line)
    }
}

impl<'t> Plan<'t> {
    /// Walks the matching policies in order until one exempts or denies; limits met before it apply,
    /// but a denied request charges nothing. A shadow policy stops nothing. `count` hears what the policies
    /// without limits did.
    fn of(
        table: &'t PolicyTable,
        facts: &Facts<'_>,
        count: impl Fn(usize, Did),
    ) -> Result<Self, Outcome<'t>> {
        let (mut claims, mut shadow_denied) = (SmallVec::new(), SmallVec::new());
        for (at, policy) in table.matching(facts) {
            let quota = match &policy.action {
                Action::Limit(quota) => quota,
                Action::Allow => {
                    count(at, Did::Exempt);
                    if policy.shadow {
                        continue;
                    }
                    break;
                }
                Action::Deny if policy.shadow => {
                    count(at, Did::ShadowRejected);
                    shadow_denied.push(&*policy.name);
                    continue;
                }
                Action::Deny => {
                    count(at, Did::Denied);
                    return Err(Outcome::Denied { policy: &policy.name, reject: policy.reject.as_ref() });
                }
            };
            match quota.select(&policy.name, facts, &table.client) {
                Ok(Some((key, limits))) => {
                    let block = quota.block.as_ref().filter(|_| !policy.shadow);
                    claims.push(Claim { at, policy, key, limits, block, cost: quota.cost.of(facts) });
                }
                Ok(None) => {}
                Err(_) if policy.shadow => count(at, Did::ShadowRejected),
                Err(fault) => {
                    count(at, Did::Denied);
                    return Err(Outcome::BadKey { policy: &policy.name, fault });
                }
            }
        }
        Ok(Self { claims, shadow_denied })
    }

    /// `knock` is what a block is asked for: 1, also by a request that costs nothing, or 0 to look only.
    fn charges(&self, knock: u64) -> SmallVec<[Charge<'_>; 4]> {
        (0..)
            .zip(&self.claims)
            .flat_map(|(group, claim)| {
                let block = claim.block.map(|block| (block, knock));
                let limits = claim.limits.iter().map(|named| (&named.limit, claim.cost));
                block.into_iter().chain(limits).map(move |(limit, cost)| Charge {
                    limit,
                    key: &claim.key,
                    cost,
                    group,
                    shadow: claim.policy.shadow,
                })
            })
            .collect()
    }

    /// Puts the answer, one standing per charge, back beside the policies that asked.
    fn into_verdict(self, decision: &Decision) -> Verdict<'t> {
        let mut verdict = Verdict::of(Outcome::Forward);
        verdict.now_us = decision.now_us;
        verdict.delay = Duration::from_micros(decision.delay_us);
        verdict.shadow_rejected = self.shadow_denied;
        let mut refusals = Refusals::default();
        let mut standings = decision.standings.iter();
        for claim in &self.claims {
            let block = claim.block.and_then(|_| *standings.next()?);
            refusals.blocked |= block.is_some_and(|block| block.refusal.is_some());
            let blocked_until_us = block.and_then(|block| block.grows_at_us);
            for (limit, standing) in claim.limits.iter().zip(&mut standings) {
                if claim.policy.shadow {
                    let name = &*claim.policy.name;
                    let refused = standing.is_some_and(|standing| standing.refusal.is_some());
                    if refused && verdict.shadow_rejected.last() != Some(&name) {
                        verdict.shadow_rejected.push(name);
                    }
                    continue;
                }
                let standing = match blocked_until_us {
                    Some(until_us) => Some(shut(*standing, until_us)),
                    None => *standing,
                };
                let Some(standing) = standing else { continue };
                verdict.limits.push(Reported { limit, standing });
                if let Some(refusal) = standing.refusal {
                    refusals.add(claim.policy, limit, refusal);
                }
            }
        }
        if let Some(limited) = refusals.into_limited(decision.now_us) {
            verdict.outcome = Outcome::Limited(limited);
        }
        verdict
    }

    /// The store gave no answer: one `closed` policy is enough to refuse.
    fn into_degraded(self, unavailable: &Unavailable) -> Verdict<'t> {
        let mut enforced =
            self.claims.iter().map(|claim| claim.policy).filter(|policy| !policy.shadow).peekable();
        let degraded = enforced.peek().is_some();
        let outcome = match enforced.find(|policy| policy.on_store_failure == OnStoreFailure::Closed) {
            Some(policy) => {
                Outcome::Unavailable { policy: &policy.name, retry_after_us: unavailable.retry_after_us }
            }
            None => Outcome::Forward,
        };
        Verdict { degraded, shadow_rejected: self.shadow_denied, ..Verdict::of(outcome) }
    }

    /// Counts what each policy did with a request that was decided; of one about whose limits the deny cache
    /// knows nothing, that is nothing.
    fn count(&self, decision: &Decision, count: impl Fn(usize, Did)) {
        let mut standings = decision.standings.iter();
        for claim in &self.claims {
            let block = claim.block.and_then(|_| *standings.next()?);
            let blocked = block.is_some_and(|block| block.refusal.is_some());
            let (mut refused, mut known) = (false, true);
            for standing in standings.by_ref().take(claim.limits.len()) {
                refused |= standing.is_some_and(|standing| standing.refusal.is_some());
                known &= standing.is_some();
            }
            match (refused, claim.policy.shadow) {
                _ if blocked => count(claim.at, Did::Blocked),
                (true, true) => count(claim.at, Did::ShadowRejected),
                (true, false) => count(claim.at, Did::Rejected),
                (false, false) if decision.delay_us > 0 && claim.holds() => count(claim.at, Did::Delayed),
                (false, _) if known => count(claim.at, Did::Allowed),
                (false, _) => {}
            }
        }
    }

    /// The same without an answer.
    fn count_degraded(&self, count: impl Fn(usize, Did)) {
        for claim in &self.claims {
            let did = match claim.policy.on_store_failure {
                _ if claim.policy.shadow => Did::Degraded,
                OnStoreFailure::Open => Did::DegradedOpen,
                OnStoreFailure::Closed => Did::DegradedClosed,
            };
            count(claim.at, did);
        }
    }
}

/// How a limit stands towards clients while a block holds: it gives nothing before its end.
fn shut(standing: Option<Standing>, until_us: u64) -> Standing {
    let grows_at_us = standing.and_then(|standing| standing.grows_at_us).unwrap_or(0);
    let refusal = match standing.and_then(|standing| standing.refusal) {
        Some(Refusal::Never) => Refusal::Never,
        Some(Refusal::Until(at_us)) => Refusal::Until(at_us.max(until_us)),
        None => Refusal::Until(until_us),
    };
    Standing { remaining: 0, grows_at_us: Some(grows_at_us.max(until_us)), refusal: Some(refusal) }
}

/// Gathers refusals; the one that lasts longest speaks for all.
#[derive(Default)]
struct Refusals<'t> {
    longest: Option<(&'t Policy, Refusal)>,
    violated: SmallVec<[&'t str; 2]>,
    blocked: bool,
}

impl<'t> Refusals<'t> {
    fn add(&mut self, policy: &'t Policy, limit: &'t NamedLimit, refusal: Refusal) {
        self.violated.push(&limit.name);
        let longer = match (self.longest, refusal) {
            (None, _) => true,
            (Some((_, Refusal::Until(known))), Refusal::Until(new)) => new > known,
            (Some((_, known)), Refusal::Never) => known != Refusal::Never,
            (Some((_, Refusal::Never)), Refusal::Until(_)) => false,
        };
        if longer {
            self.longest = Some((policy, refusal));
        }
    }

    fn into_limited(self, now_us: u64) -> Option<Limited<'t>> {
        let (policy, refusal) = self.longest?;
        let retry_after_us = match refusal {
            Refusal::Until(at_us) => Some(at_us.saturating_sub(now_us)),
            Refusal::Never => None,
        };
        Some(Limited {
            policy: &policy.name,
            violated: self.violated,
            retry_after_us,
            blocked: self.blocked,
            reject: policy.reject.as_ref(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{Clock, Hands};
    use crate::limiter::{KeyBuilder, Limit};
    use crate::policy::path::{EscapedSlashes, Readings, Settings};
    use crate::policy::{
        Cost, Fields, KeyPart, KeyTemplate, Matcher, MissingKey, Override, Overrides, Quota, client,
    };
    use crate::store::redis::{Redis, RedisSettings, Shared};
    use crate::store::{Memory, MemorySettings};
    use crate::telemetry::metrics::Metrics;
    use http::{HeaderMap, Method};

    const PATH: Settings = Settings {
        normalize: true,
        merge_slashes: true,
        escaped_slashes: EscapedSlashes::Both,
        ignore_trailing_slash: true,
        strip_parameters: true,
        case_sensitive: true,
    };

    /// Nobody is asked before a connection is there.
    const NOBODY: RedisSettings = RedisSettings {
        host: String::new(),
        port: 0,
        database: 0,
        username: None,
        password: None,
        key_prefix: String::new(),
        timeout: Duration::from_millis(50),
        connect_timeout: Duration::from_secs(1),
        breaker_failures: 5,
        probe_interval: Duration::from_millis(500),
    };

    fn limit(name: &str, requests: u64) -> NamedLimit {
        let limit = Limit { requests, per_us: 10_000_000, algorithm: Algorithm::SlidingLog };
        NamedLimit { name: name.into(), unit: None, limit }
    }

    fn by_user(name: &str, requests: u64) -> Policy {
        Policy {
            name: name.into(),
            priority: 0,
            matcher: Matcher::default(),
            action: Action::Limit(Quota {
                key: KeyTemplate::new(vec![KeyPart::Header("x-user".parse().unwrap())]),
                missing_key: MissingKey::Shared,
                cost: Cost::Fixed(1),
                limits: vec![limit(name, requests)],
                block: None,
                overrides: Overrides::default(),
            }),
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
            let fields = Fields { standard: true, legacy: true, legacy_reset_epoch: false };
            let table = PolicyTable::new(policies, PATH, client, fields);
            let (clock, hands) = Clock::manual(1_700_000_000_000_000);
            let memory = Memory::new(MemorySettings { max_keys: 1000, max_bytes: 1 << 20 }, clock);
            let metrics = Metrics::new(1, &[]);
            let live = Live::new(table.into(), Arc::clone(&metrics));
            let enforcer = Enforcer::new(live, Store::Memory(Arc::new(memory)), metrics.shard(0));
            Self { enforcer, hands, away: false }
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
            };
            let rules = self.enforcer.rules();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
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
            self.ask(&[user], |verdict| matches!(verdict.outcome, Outcome::Forward))
        }
    }

    #[test]
    fn trap_11_a_refused_request_charges_no_policy() {
        let bench = Bench::new(vec![by_user("wide", 10), by_user("narrow", 2)]);
        let passed = (0..5).filter(|_| bench.passes("ann")).count();
        assert_eq!(passed, 2);
        bench.ask(&["ann"], |verdict| {
            let remaining: Vec<u64> = verdict.limits.iter().map(|l| l.standing.remaining).collect();
            assert_eq!(remaining, [8, 0]);
            let Outcome::Limited(limited) = verdict.outcome else { panic!("{:?}", verdict.outcome) };
            assert_eq!((limited.policy, limited.violated.as_slice()), ("narrow", ["narrow"].as_slice()));
            assert_eq!(limited.retry_after_us, Some(10_000_000));
        });
        bench.hands.advance_us(10_000_000);
        assert!(bench.passes("ann"));
    }

    #[test]
    fn a_block_shuts_its_own_policy_until_it_ends() {
        let mut narrow = by_user("narrow", 1);
        let block = Limit { requests: 1, per_us: 60_000_000, algorithm: Algorithm::Block };
        quota(&mut narrow).block = Some(block);
        let bench = Bench::new(vec![by_user("wide", 10), narrow.clone()]);
        assert!(bench.passes("ann"));
        for (blocked, waits_us) in [(false, 60_000_000), (true, 20_000_000)] {
            bench.ask(&["ann"], |verdict| {
                let Outcome::Limited(limited) = verdict.outcome else { panic!("{:?}", verdict.outcome) };
                assert_eq!((limited.policy, limited.blocked), ("narrow", blocked));
                assert_eq!(limited.violated.as_slice(), ["narrow"]);
                assert_eq!(limited.retry_after_us, Some(waits_us));
                let remaining: Vec<u64> = verdict.limits.iter().map(|l| l.standing.remaining).collect();
                assert_eq!(remaining, if blocked { [10, 0] } else { [9, 0] });
            });
            assert!(bench.passes(&format!("other {blocked}")));
            bench.hands.advance_us(40_000_000);
        }
        assert!(bench.passes("ann"));

        let shadow = Bench::new(vec![Policy { shadow: true, ..narrow }]);
        assert!(shadow.passes("ann") && shadow.passes("ann"));
        shadow.hands.advance_us(10_000_000);
        shadow.ask(&["ann"], |verdict| assert!(verdict.shadow_rejected.is_empty(), "it blocks nobody"));
    }

    #[test]
    fn trap_20_without_the_store_nobody_is_told_to_be_over_a_limit() {
        let outcome = |policies: &[Policy]| {
            let key = KeyBuilder::new("p").finish();
            let claim = |policy| Claim { at: 0, policy, key: key.clone(), limits: &[], block: None, cost: 1 };
            let plan = Plan { claims: policies.iter().map(claim).collect(), shadow_denied: SmallVec::new() };
            let verdict = plan.into_degraded(&Unavailable { kind: "timeout", retry_after_us: 7 });
            assert!(verdict.degraded && verdict.limits.is_empty() && verdict.delay.is_zero());
            match verdict.outcome {
                Outcome::Forward => None,
                Outcome::Unavailable { policy, retry_after_us: 7 } => Some(policy.to_owned()),
                other => panic!("{other:?}"),
            }
        };
        let closed = |shadow| Policy { on_store_failure: OnStoreFailure::Closed, shadow, ..by_user("c", 1) };
        assert_eq!(outcome(&[by_user("open", 1)]), None);
        assert_eq!(outcome(&[by_user("open", 1), closed(false)]).as_deref(), Some("c"));
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
            let Outcome::BadKey { fault, .. } = verdict.outcome else { panic!("{:?}", verdict.outcome) };
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
            assert!(matches!(verdict.outcome, Outcome::BadKey { fault: KeyFault::Repeated(_), .. }));
        });
    }

    #[test]
    fn the_first_override_that_fits_replaces_all_limits() {
        let mut policy = by_user("p", 1);
        let entry = |value: Option<&str>, requests| Override {
            values: vec![value.map(Into::into)],
            limits: vec![limit("o", requests)],
        };
        quota(&mut policy).overrides =
            Overrides::new("p", vec![entry(Some("ann"), 3), entry(None, 2), entry(Some("bob"), 9)]);
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
            assert_eq!(verdict.limits.len(), 1, "shadow limits are not told to clients");
        });
        assert!(bench.passes("ann"));
        assert!(!bench.passes("ann"));
    }

    #[test]
    fn shadow_policies_that_would_deny_are_reported() {
        let shadow = Policy { action: Action::Deny, shadow: true, ..by_user("shadow", 0) };
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
            let policies = modes.iter().enumerate().map(|(n, (on_store_failure, shadow))| Policy {
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
        assert_eq!(modes(&[(Closed, true)]), (true, false), "no limit was to be enforced");
    }

    #[test]
    fn allow_stops_the_walk_and_deny_charges_nothing() {
        let act = |action, priority| Policy { action, priority, ..by_user("act", 0) };
        let exempt = Bench::new(vec![by_user("before", 2), act(Action::Allow, 0), by_user("after", 0)]);
        assert_eq!((0..5).filter(|_| exempt.passes("ann")).count(), 2);

        let denied = Bench::new(vec![by_user("before", 1), act(Action::Deny, 0)]);
        for _ in 0..3 {
            denied.ask(&["ann"], |verdict| {
                assert!(matches!(verdict.outcome, Outcome::Denied { policy: "act", .. }))
            });
        }
    }
}
