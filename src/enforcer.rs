//! The centre: one question about a request, one verdict.
//!
//! Facts go in, the table says which limits apply, the store decides them, and what comes out says
//! whether to forward, what to answer if not, and which limits to tell the client about.

mod call;
mod estimate;
mod explain;
mod keeper;
mod live;
mod rehearsal;

pub use call::{Called, Status};
pub use estimate::Estimate;
pub use explain::{Explanation, Limits, Step, explain};
pub use keeper::Hold;
pub use live::{Live, Rules};
pub use rehearsal::{Claimed, Past, Rehearsed, Told, rehearse};

use keeper::{Keeper, Place};

use crate::limiter::{
    Algorithm, Charge, Decision, Key, Lease, Limit, MAX_UNITS, Refusal, Standing,
};
use crate::policy::{
    Action, Descriptor, EstimateCost, Facts, KeyFault, NamedLimit, OnStoreFailure, Policy,
    PolicyTable, Reject,
};
use crate::store::{Store, Unavailable};
use crate::telemetry::metrics::{Decision as Did, Shard, Source};
use smallvec::SmallVec;
use std::mem::take;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Decides requests by the policies that hold now, and counts what they did; one per worker.
#[derive(Clone, Debug)]
pub struct Enforcer {
    live: Live,
    store: Store,
    shard: Arc<Shard>,
    keeper: Keeper,
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
    /// Who answered.
    pub source: Option<Source>,
    /// How long the request is to be held before it is forwarded.
    pub delay: Duration,
    /// An enforced limit applied, and was decided without the store.
    pub degraded: bool,
    /// What the request keeps until it has ended wholly.
    pub hold: Option<Hold>,
    /// What its response is to settle.
    pub estimates: Vec<Estimate>,
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
    pub retry: Retry,
    /// A block that began earlier was met.
    pub blocked: bool,
    pub reject: Option<&'t Reject>,
}

/// When the same request would be admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// After so many microseconds.
    After(u64),
    Never,
    /// When others have ended, and nobody knows when that is.
    Unknown,
}

/// One limit as it goes into the rate-limit fields.
#[derive(Clone, Copy, Debug)]
pub struct Reported<'t> {
    pub limit: &'t NamedLimit,
    pub standing: Standing,
    /// Whose quota it is: [`Key::id`].
    pub key: u128,
}

impl Reported<'_> {
    /// The one that refused, or that is nearest to refusing.
    pub fn tightest(limits: &[Self]) -> Option<&Self> {
        limits
            .iter()
            .min_by_key(|one| (one.standing.refusal.is_none(), one.standing.remaining))
    }
}

impl Enforcer {
    /// Counts with a worker's own shard.
    pub fn new(live: Live, store: Store, shard: Arc<Shard>) -> Self {
        Self {
            live,
            keeper: Keeper::new(store.clone(), Arc::clone(&shard)),
            store,
            shard,
        }
    }

    /// The policies that hold now. A request keeps those that it started with.
    pub fn rules(&self) -> Arc<Rules> {
        self.live.rules()
    }

    /// Decides one request, which arrived just now, by `rules`.
    pub async fn decide<'t>(
        &self,
        rules: &'t Rules,
        facts: &Facts<'_>,
        arrived: Instant,
    ) -> Verdict<'t> {
        let count = |at, key: Option<&Key>, did: Did| {
            rules.count(at, &self.shard, did, (key, facts.place()))
        };
        let mut plan = match Plan::of(&rules.table, facts, count) {
            Ok(plan) => plan,
            Err(outcome) => return Verdict::of(outcome),
        };
        self.ask(&mut plan, count, arrived).await
    }

    /// Has the store decide what a plan asks, and leaves nothing of it: by value it would take its room twice.
    async fn ask<'t>(
        &self,
        plan: &mut Plan<'t>,
        count: impl Fn(usize, Option<&Key>, Did) + Copy,
        arrived: Instant,
    ) -> Verdict<'t> {
        if plan.claims.is_empty() {
            let shadow_rejected = take(&mut plan.shadow_denied);
            return Verdict {
                shadow_rejected,
                ..Verdict::of(Outcome::Forward)
            };
        }
        // Before the store is asked: who leaves meanwhile gives back what he may have got.
        let hold = plan.hold(&self.keeper);
        let charges = plan.charges(1, hold.as_ref().map_or(0, Hold::slot));
        let answer = self.store.answer(&charges, arrived).await;
        let (mut verdict, source) = match answer {
            // Refused beside the store: it does not know all yet.
            Ok((decision, Source::Degraded)) => {
                drop(charges);
                plan.count_degraded(Some(&decision), count);
                (
                    Verdict {
                        degraded: true,
                        ..take(plan).into_verdict(&decision)
                    },
                    Source::Degraded,
                )
            }
            Ok((decision, source)) => {
                let hold = hold.and_then(|hold| plan.held(hold, &charges, &decision));
                drop(charges);
                plan.count(&decision, count);
                let estimates = plan.estimates(&decision, &self.keeper);
                (
                    Verdict {
                        hold,
                        estimates,
                        ..take(plan).into_verdict(&decision)
                    },
                    source,
                )
            }
            Err(unavailable) => {
                let alone = plan
                    .goes_on()
                    .then(|| self.store.decide_alone(&charges))
                    .flatten();
                let hold = hold.and_then(|hold| plan.held(hold, &charges, alone.as_ref()?));
                drop(charges);
                plan.count_degraded(alone.as_ref(), count);
                let estimates = |alone| plan.estimates(alone, &self.keeper);
                let estimates = alone.as_ref().map(estimates).unwrap_or_default();
                let verdict = take(plan).into_degraded(&unavailable, alone.as_ref());
                (
                    Verdict {
                        hold,
                        estimates,
                        ..verdict
                    },
                    Source::Degraded,
                )
            }
        };
        let at = Instant::now();
        self.shard
            .decided(source, at.saturating_duration_since(arrived));
        (verdict.at, verdict.source) = (Some(at), Some(source));
        verdict
    }

    /// Waits, but not for long, until the store knows of all requests that have ended, and that this process ends.
    pub async fn finish(&self) {
        self.keeper.flush().await;
        self.store.leave().await;
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
            source: None,
            delay: Duration::ZERO,
            degraded: false,
            hold: None,
            estimates: Vec::new(),
            shadow_rejected: SmallVec::new(),
        }
    }
}

/// What one request asks of the store.
#[derive(Default)]
struct Plan<'t> {
    /// With room for few: it is moved with every request, and a claim is large.
    claims: SmallVec<[Claim<'t>; 2]>,
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
    /// The cost is one until the response has told it.
    estimate: Option<&'t Arc<EstimateCost>>,
    counts_rejected: bool,
    shards: u16,
    lease: Option<Lease>,
}

impl<'t> Claim<'t> {
    fn counts_with(&self, other: &Self) -> bool {
        let identities = |claim: &Self| claim.limits.iter().map(|named| named.limit.identity());
        self.at == other.at
            && self.key.id() == other.key.id()
            && identities(self).eq(identities(other))
    }

    /// Takes over what another asks of the same counters. Limits differ only if descriptors that are the same bring
    /// different ones along: the tighter one holds.
    fn join(&mut self, other: &Claim<'t>) {
        self.cost = self.cost.saturating_add(other.cost).min(MAX_UNITS);
        let least = |claim: &Claim<'t>| claim.limits.iter().map(|named| named.limit.requests).min();
        if least(other) < least(self) {
            self.limits = other.limits;
        }
    }

    /// Whether the policy is one of those for which requests are held.
    fn holds(&self) -> bool {
        let is_line =
            |named: &NamedLimit| matches!(named.limit.algorithm, Algorithm::LeakyBucket { .. });
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
        count: impl FnMut(usize, Option<&Key>, Did),
    ) -> Result<Self, Outcome<'t>> {
        let mut plan = Self::default();
        plan.add(table, facts, None, count)?;
        Ok(plan)
    }

    /// The same beside what is planned already. `descriptor` is that of `facts`, if they are about one. Says whether any
    /// policy applies.
    fn add(
        &mut self,
        table: &'t PolicyTable,
        facts: &Facts<'_>,
        descriptor: Option<&'t Descriptor<'t>>,
        mut count: impl FnMut(usize, Option<&Key>, Did),
    ) -> Result<bool, Outcome<'t>> {
        let matching = table.matching(facts);
        let is_met = !matching.is_empty();
        for (at, policy) in matching {
            let quota = match &policy.action {
                Action::Limit(quota) => quota,
                Action::Allow => {
                    count(at, None, Did::Exempt);
                    if policy.shadow {
                        continue;
                    }
                    break;
                }
                Action::Deny if policy.shadow => {
                    count(at, None, Did::ShadowRejected);
                    self.shadow_denied.push(&*policy.name);
                    continue;
                }
                Action::Deny => {
                    count(at, None, Did::Denied);
                    return Err(Outcome::Denied {
                        policy: &policy.name,
                        reject: policy.reject.as_ref(),
                    });
                }
            };
            let selected = match descriptor {
                Some(descriptor) => quota.select_for(&policy.name, descriptor, &table.client),
                None => quota.select(&policy.name, facts, &table.client),
            };
            match selected {
                Ok(Some((key, limits))) => {
                    let block = quota.block.as_ref().filter(|_| !policy.shadow);
                    let (cost, estimate) = (quota.cost.of(facts), quota.cost.estimate());
                    let (counts_rejected, shards) = (quota.count_rejected, quota.shards);
                    let lease = quota.lease;
                    self.claim(Claim {
                        at,
                        policy,
                        key,
                        limits,
                        block,
                        cost,
                        estimate,
                        counts_rejected,
                        shards,
                        lease,
                    });
                }
                Ok(None) => {}
                Err(_) if policy.shadow => count(at, None, Did::ShadowRejected),
                Err(fault) => {
                    count(at, None, Did::Denied);
                    return Err(Outcome::BadKey {
                        policy: &policy.name,
                        fault,
                    });
                }
            }
        }
        Ok(is_met)
    }

    /// Asks for one more. Several descriptors of a call may use one counter, of which only one charge may be asked.
    fn claim(&mut self, claim: Claim<'t>) {
        let same = self
            .claims
            .iter_mut()
            .find(|other| other.counts_with(&claim));
        match same {
            Some(same) => same.join(&claim),
            None => self.claims.push(claim),
        }
    }

    /// `knock` is what a block or a slot is asked for: 1, also by a request that costs nothing, or 0 to look only. `slot` is the
    /// one that the request takes.
    fn charges(&self, knock: u64, slot: u128) -> SmallVec<[Charge<'_>; 4]> {
        (0..)
            .zip(&self.claims)
            .flat_map(|(group, claim)| {
                let block = claim.block.map(|block| (block, knock));
                // A request takes one slot, whatever it costs.
                let cost = |limit| {
                    if is_concurrency(limit) {
                        knock
                    } else {
                        claim.cost
                    }
                };
                let limits = claim
                    .limits
                    .iter()
                    .map(move |named| (&named.limit, cost(&named.limit)));
                block
                    .into_iter()
                    .chain(limits)
                    .map(move |(limit, cost)| Charge {
                        group,
                        shadow: claim.policy.shadow,
                        counts_rejected: claim.counts_rejected,
                        settles: claim.estimate.is_some(),
                        slot,
                        local: claim.policy.on_store_failure == OnStoreFailure::Local,
                        shards: claim.shards,
                        lease: claim.lease,
                        ..Charge::new(limit, &claim.key, cost)
                    })
            })
            .collect()
    }

    /// Holds a slot for each limit that wants one.
    fn hold(&self, keeper: &Keeper) -> Option<Hold> {
        let places = self.claims.iter().flat_map(|claim| {
            let limits = claim
                .limits
                .iter()
                .filter(|named| is_concurrency(&named.limit));
            limits.map(|named| (named.limit, claim.key.clone()))
        });
        let places: SmallVec<[Place; 1]> = places.collect();
        (!places.is_empty()).then(|| keeper.hold(places))
    }

    /// What is left of a hold once the store has decided.
    fn held(&self, hold: Hold, charges: &[Charge<'_>], decision: &Decision) -> Option<Hold> {
        let (taken, longest_us) = taken(charges, decision);
        let mut hold = hold.taken_at(|(limit, key)| {
            taken
                .iter()
                .any(|charge| *charge.limit == *limit && charge.key.id() == key.id())
        })?;
        hold.end_at(longest_us.map(|us| Instant::now() + Duration::from_micros(us)));
        Some(hold)
    }

    /// What was charged by estimate. A shadow policy that refused has charged nothing.
    fn estimates(&self, decision: &Decision, keeper: &Keeper) -> Vec<Estimate> {
        let (mut estimates, mut next) = (Vec::new(), 0);
        for claim in self.claims.iter().filter(|_| decision.admitted) {
            let first = next + usize::from(claim.block.is_some());
            let own = next..first + claim.limits.len();
            next = own.end;
            let passes = |standing: &Option<Standing>| {
                standing.is_some_and(|standing| standing.refusal.is_none())
            };
            let is_charged = decision
                .standings
                .get(own)
                .is_some_and(|own| own.iter().all(passes));
            if let Some(cost) = claim.estimate.filter(|_| is_charged) {
                // Of what is not told nothing is given back.
                let at_us = |at: usize| {
                    decision
                        .stands_us
                        .get(at)
                        .copied()
                        .flatten()
                        .unwrap_or_default()
                };
                let limits = (first..).zip(claim.limits.iter());
                let places = limits
                    .filter(|(_, named)| !is_concurrency(&named.limit))
                    .map(|(at, named)| ((named.limit, claim.key.clone()), at_us(at)))
                    .collect();
                estimates.push(Estimate::new(Arc::clone(cost), places, keeper.clone()));
            }
        }
        estimates
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
                verdict.limits.push(Reported {
                    limit,
                    standing,
                    key: claim.key.id(),
                });
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

    /// The enforced policies, in order.
    fn enforced(&self) -> impl Iterator<Item = &'t Policy> {
        self.claims
            .iter()
            .map(|claim| claim.policy)
            .filter(|policy| !policy.shadow)
    }

    /// The first that refuses whatever it limits while the store is away.
    fn closed(&self) -> Option<&'t Policy> {
        self.enforced()
            .find(|policy| policy.on_store_failure == OnStoreFailure::Closed)
    }

    /// Whether it is worth deciding without the store.
    fn goes_on(&self) -> bool {
        let mut enforced = self.enforced();
        self.closed().is_none()
            && enforced.any(|policy| policy.on_store_failure == OnStoreFailure::Local)
    }

    /// The store gave no answer: one `closed` policy is enough to refuse, else those that go on without it have
    /// decided `alone`.
    fn into_degraded(self, unavailable: &Unavailable, alone: Option<&Decision>) -> Verdict<'t> {
        let degraded = self.enforced().next().is_some();
        if let Some(policy) = self.closed() {
            let outcome = Outcome::Unavailable {
                policy: &policy.name,
                retry_after_us: unavailable.retry_after_us,
            };
            return Verdict {
                degraded,
                shadow_rejected: self.shadow_denied,
                ..Verdict::of(outcome)
            };
        }
        match alone {
            Some(decision) => Verdict {
                degraded,
                ..self.into_verdict(decision)
            },
            None => Verdict {
                degraded,
                shadow_rejected: self.shadow_denied,
                ..Verdict::of(Outcome::Forward)
            },
        }
    }

    /// Counts what each policy did with a request that was decided; of one about whose limits the deny cache
    /// knows nothing, that is nothing.
    fn count(&self, decision: &Decision, mut count: impl FnMut(usize, Option<&Key>, Did)) {
        let mut standings = decision.standings.iter();
        for claim in &self.claims {
            let block = claim.block.and_then(|_| *standings.next()?);
            let blocked = block.is_some_and(|block| block.refusal.is_some());
            let (mut refused, mut known) = (false, true);
            for standing in standings.by_ref().take(claim.limits.len()) {
                refused |= standing.is_some_and(|standing| standing.refusal.is_some());
                known &= standing.is_some();
            }
            let did = match (refused, claim.policy.shadow) {
                _ if blocked => Did::Blocked,
                (true, true) => Did::ShadowRejected,
                (true, false) => Did::Rejected,
                (false, false) if decision.delay_us > 0 && claim.holds() => Did::Delayed,
                (false, _) if known => Did::Allowed,
                (false, _) => continue,
            };
            count(claim.at, Some(&claim.key), did);
        }
    }

    /// The same without an answer; `alone` is what was decided without it.
    fn count_degraded(&self, alone: Option<&Decision>, count: impl Fn(usize, Option<&Key>, Did)) {
        let mut standings = alone.map(|decision| decision.standings.iter());
        for claim in &self.claims {
            let charges = claim.limits.len() + usize::from(claim.block.is_some());
            let own = standings
                .iter_mut()
                .flat_map(|standings| standings.by_ref().take(charges));
            // All of them are to be passed by.
            let refused = own
                .flatten()
                .filter(|standing| standing.refusal.is_some())
                .count()
                > 0;
            let did = match claim.policy.on_store_failure {
                _ if claim.policy.shadow => Did::Degraded,
                OnStoreFailure::Open => Did::DegradedOpen,
                OnStoreFailure::Closed => Did::DegradedClosed,
                // Another policy is closed: nothing was decided.
                OnStoreFailure::Local if alone.is_none() => Did::Degraded,
                OnStoreFailure::Local if refused => Did::DegradedLocalRejected,
                OnStoreFailure::Local => Did::DegradedLocalAllowed,
            };
            count(claim.at, Some(&claim.key), did);
        }
    }
}

/// The charges by which a request took slots, and how long it may keep them (µs), if that is bounded.
fn taken<'c, 'k>(
    charges: &'c [Charge<'k>],
    decision: &Decision,
) -> (SmallVec<[&'c Charge<'k>; 1]>, Option<u64>) {
    let is_refused =
        |standing: &Option<Standing>| standing.is_none_or(|standing| standing.refusal.is_some());
    let refuses = |asked: &Charge<'_>| {
        let mut of_policy = charges
            .iter()
            .zip(&decision.standings)
            .filter(|(charge, _)| asked.is_of_policy_of(charge));
        of_policy.any(|(_, standing)| is_refused(standing))
    };
    let mut longest_us = None;
    let taken = charges
        .iter()
        .filter(|charge| decision.admitted && is_concurrency(charge.limit));
    let taken: SmallVec<[&Charge<'_>; 1]> = taken.filter(|charge| !refuses(charge)).collect();
    for charge in taken.iter().filter(|charge| !charge.shadow) {
        if let Algorithm::Concurrency {
            max_duration_us: most_us @ 1..,
        } = charge.limit.algorithm
        {
            longest_us =
                Some(longest_us.map_or(most_us, |longest_us: u64| longest_us.min(most_us)));
        }
    }
    (taken, longest_us)
}

fn is_concurrency(limit: &Limit) -> bool {
    matches!(limit.algorithm, Algorithm::Concurrency { .. })
}

/// How a limit stands towards clients while a block holds: it gives nothing before its end.
fn shut(standing: Option<Standing>, until_us: u64) -> Standing {
    let grows_at_us = standing
        .and_then(|standing| standing.grows_at_us)
        .unwrap_or(0);
    let refusal = match standing.and_then(|standing| standing.refusal) {
        Some(Refusal::Never) => Refusal::Never,
        Some(Refusal::Until(at_us)) => Refusal::Until(at_us.max(until_us)),
        Some(Refusal::Unknown) | None => Refusal::Until(until_us),
    };
    Standing {
        remaining: 0,
        grows_at_us: Some(grows_at_us.max(until_us)),
        refusal: Some(refusal),
    }
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
        if self.longest.is_none_or(|(_, longest)| refusal > longest) {
            self.longest = Some((policy, refusal));
        }
    }

    fn into_limited(self, now_us: u64) -> Option<Limited<'t>> {
        let (policy, refusal) = self.longest?;
        let retry = match refusal {
            Refusal::Until(at_us) => Retry::After(at_us.saturating_sub(now_us)),
            Refusal::Never => Retry::Never,
            Refusal::Unknown => Retry::Unknown,
        };
        Some(Limited {
            policy: &policy.name,
            violated: self.violated,
            retry,
            blocked: self.blocked,
            reject: policy.reject.as_ref(),
        })
    }
}

#[cfg(test)]
mod tests;
