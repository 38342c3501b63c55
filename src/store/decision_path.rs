//! The steps from the charges of one request to a decision, in order:
//!
//! 0. Instance ([`InstanceReservation`]): this process decides charges of `scope = "instance"`. If
//!    it refuses, the request is decided; otherwise the steps below decide all other charges.
//! 1. Lease ([`LeasePool::take_permits`]): units charged in advance admit without a call.
//! 2. Deny cache ([`DenyCache::find_statuses`]): a refusal that still holds refuses without a call.
//! 3. Local share ([`super::FallbackStore::check_share_during_recovery`]): while an outage ends, it
//!    may refuse.
//! 4. Circuit breaker (`is_breaker_open`): while it is open, the call fails at once.
//! 5. Batcher ([`RedisStore::decide`]): charges of concurrent requests share a round trip.
//! 6. Redis script (`redis/decide.lua`): decides and charges in one atomic step.
//! 7. Deny cache again, if the call failed: one cached refusal of any limit refuses the request.
//! 8. If a step before Redis, or one slot of a cluster, refuses: the counters that were not asked
//!    are read without a charge, because `Retry-After` covers all limits
//!    ([decision 97](../../docs/decisions/0097-retry-after-covers-every-limit.md)).
//! 9. Fallback ([`Store::decide_by_fallback`]): the enforcer calls it if the policies allow it.
//!
//! After a timeout it is unknown whether Redis made the charges: they stay until they expire, and a
//! `local` policy also counts the request here and writes it back, so it may count twice.
//! Concurrency slots that the fallback does not grant are released.
//!
//! The main locks on this path:
//!
//! | lock | shared by |
//! |---|---|
//! | lease shard, one of 16 | all workers of the process |
//! | deny cache | none: one per worker |
//! | batcher | none: one per worker |
//! | status cache shard, one of 16, for `local` policies | all workers of the process |
//! | write-back table, stale partitions and fallback counters, in an outage | all workers |
//!
//! The memory store replaces all of these steps.

mod unasked_limits;

use super::decision_source::DecisionSource;
use super::deny_cache::DenyCache;
use super::instance_counters::{InstanceReservation, list_returns, mark_returnable};
use super::leases::{LeasePermitGuard, LeasePool, has_small_costs};
use super::redis::RedisStore;
use super::{DecisionFailure, PartialDecision, Store, StoreUnavailable};
use crate::clock::monotonic_now;
use crate::limiter::{Decision, PolicyCharges, RequestPart, each_charge};
use smallvec::SmallVec;
use std::sync::Arc;
use tokio::time::Instant;
use unasked_limits::find_unasked_limits;

/// The parts that decide when the counters are in Redis.
#[derive(Clone, Copy, Debug)]
struct RedisDecisionPath<'s> {
    leases: &'s Arc<LeasePool>,
    deny_cache: &'s DenyCache,
    redis: &'s RedisStore,
    /// Whether the charges may be returned after the decision.
    is_returnable: bool,
}

/// The result of the checks before a call of Redis.
#[allow(
    clippy::large_enum_variant,
    reason = "taken apart where it is returned"
)]
enum LocalCheck<'c> {
    /// With one flag per charge: whether its limit may refuse for longer.
    Refused(Decision, DecisionSource, SmallVec<[bool; 8]>),
    /// In an outage, with the policies of which some may be [held
    /// back](PolicyCharges::is_held_back). The fallback decides those.
    Passed(Option<Vec<PolicyCharges<'c>>>),
}

impl Store {
    /// Decides all policies of one request together: all enforced charges are made, or none. No two
    /// charges may share key, algorithm and period.
    ///
    /// # Errors
    /// [`StoreUnavailable`] if the store is unavailable. Charges that were sent may have been made;
    /// unsent ones were not.
    pub async fn decide(
        &self,
        request: &[PolicyCharges<'_>],
    ) -> Result<Decision, StoreUnavailable> {
        self.decide_with_source(request, Instant::now())
            .await
            .map(|(decision, _)| decision)
            .map_err(|failure| failure.unavailable)
    }

    /// Like [`Store::decide`], for a caller that has just read the clock. Also returns the source
    /// of the decision.
    ///
    /// # Errors
    /// [`DecisionFailure`] if the store is unavailable, as for [`Store::decide`]. Then the caller
    /// may use [`Store::decide_by_fallback`].
    pub async fn decide_with_source(
        &self,
        request: &[PolicyCharges<'_>],
        requested_at: Instant,
    ) -> Result<(Decision, DecisionSource), DecisionFailure> {
        let path = match self {
            Self::Memory(memory) => {
                let decision = memory.decide_at(request, requested_at.into_std());
                return Ok((decision, DecisionSource::Memory));
            }
            Self::Redis {
                redis,
                deny_cache,
                leases,
            } => RedisDecisionPath {
                leases,
                deny_cache,
                redis,
                is_returnable: false,
            },
        };
        // Boxed so that other requests need no space for these futures.
        if request.iter().any(PolicyCharges::is_instance_scoped) {
            return Box::pin(path.decide_by_scope(request, requested_at)).await;
        }
        if request.iter().any(|policy| policy.lease.is_some()) {
            let decide = Box::pin(path.decide_with_permits(request, requested_at));
            let (result, permits) = decide.await;
            if result.as_ref().is_ok_and(|(decision, _)| decision.admitted) {
                permits.into_iter().for_each(LeasePermitGuard::use_units);
            }
            return result;
        }
        Box::pin(path.check_and_decide(request, requested_at, || ())).await
    }

    /// Decides charges of `local` policies that Redis left undecided, by this instance's share.
    /// Undecided charges of other policies get no status and refuse nothing. Keeps the charges of
    /// `partial` if the request is admitted, and returns them to Redis otherwise. Returns `None`
    /// for a memory store, and without `partial` if no policy is `local`.
    pub fn decide_by_fallback(
        &self,
        request: &[PolicyCharges<'_>],
        partial: Option<Box<PartialDecision>>,
    ) -> Option<Decision> {
        let Self::Redis { redis, .. } = self else {
            return None;
        };
        let Some(partial) = partial else {
            return decide_locally(redis, request);
        };
        let undecided = partial.undecided_charges(request);
        Some(match decide_locally(redis, &undecided.policies) {
            Some(local) => partial.complete(undecided.expand(local)),
            None => partial.confirm_charges(),
        })
    }
}

/// Decides charges by this instance's share. `None` if no policy among them is `local`.
fn decide_locally(redis: &RedisStore, request: &[PolicyCharges<'_>]) -> Option<Decision> {
    let fallback = redis.fallback();
    if !request
        .iter()
        .any(|policy| policy.has_fallback && !policy.shadow)
    {
        return None;
    }
    let unreachable = request
        .iter()
        .filter(|policy| !redis.is_reachable_for(policy));
    let partitions = unreachable.map(|policy| fallback.partition(&policy.key));
    fallback.mark_partitions_unreachable(partitions);
    Some(fallback.decide(request, monotonic_now()))
}

impl<'s> RedisDecisionPath<'s> {
    /// Step 0: decides charges of `scope = "instance"` in this process, and all others in Redis: in
    /// this order if Redis probably admits the request. Charges of both are made, or none.
    async fn decide_by_scope(
        self,
        request: &[PolicyCharges<'_>],
        requested_at: Instant,
    ) -> Result<(Decision, DecisionSource), DecisionFailure> {
        let own = RequestPart::new(request, |charge| charge.policy.is_instance_scoped());
        let shared = RequestPart::new(request, |charge| !charge.policy.is_instance_scoped());
        let (own_charges, shared_charges) = (&own.policies, &shared.policies);
        let memory = self.redis.instance_counters();
        if shared_charges.is_empty() {
            let decision = memory.decide_at(own_charges, requested_at.into_std());
            return Ok((decision, DecisionSource::Memory));
        }
        let reserve = |at: Instant| InstanceReservation::decide(memory, own_charges, at.into_std());
        let hints = &self.redis.worker.hints;
        // Reads of counters, which charge nothing, need the statuses of all.
        let is_read = each_charge(request).all(|charge| charge.cost == 0);
        // A decision about shards does not name the counters that it charged.
        let preview = (shared_charges.iter().all(|policy| policy.shard_count == 1)
            && !hints.expects_admission(shared_charges))
        .then(|| InstanceReservation::preview(memory, own_charges))
        .flatten();
        let is_returnable = preview.is_some();
        let (mut own_decision, mut reservation) = preview.unwrap_or_else(|| reserve(requested_at));
        if !own_decision.admitted && !is_read {
            let refusal = own.expand(own_decision);
            let unknown = find_unasked_limits(request, &refusal);
            let refusal = self.complete_refusal(request, refusal, &unknown, requested_at);
            return Ok((refusal.await, DecisionSource::Memory));
        }
        hints.deduct_charges(shared_charges);
        let path = RedisDecisionPath {
            is_returnable,
            ..self
        };
        let decide = path.decide_with_permits(shared_charges, requested_at);
        let (result, permits) = decide.await;
        let decided = result.as_ref().ok().map(|(decision, _)| decision);
        if let Some(decision) = decided {
            hints.record_remaining(shared_charges, decision);
        }
        if is_returnable && decided.is_none_or(|decision| decision.admitted) {
            (own_decision, reservation) = reserve(Instant::now());
            if !own_decision.admitted {
                let returns = decided.map(|decision| list_returns(shared_charges, decision));
                self.redis.return_charges(returns.unwrap_or_default());
                own_decision.may_have_charged = decided.is_none();
                return Ok((own.expand(own_decision), DecisionSource::Memory));
            }
        }
        if decided.is_some_and(|decision| decision.admitted) {
            permits.into_iter().for_each(LeasePermitGuard::use_units);
        }
        match result {
            Ok((decision, source)) => {
                let own_decision = if decision.admitted {
                    reservation.keep_charges();
                    own_decision
                } else {
                    reservation.return_charges(own_charges, own_decision)
                };
                let decision = shared.expand(decision).merge(own.expand(own_decision));
                Ok((decision, source))
            }
            Err(failure) => Err(failure
                .expand(&shared)
                .with_instance_charges(own.expand(own_decision), reservation)),
        }
    }

    /// Steps 2 to 7. Calls `on_passed` if the local checks pass, before Redis decides.
    async fn check_and_decide(
        self,
        request: &[PolicyCharges<'_>],
        requested_at: Instant,
        on_passed: impl FnOnce(),
    ) -> Result<(Decision, DecisionSource), DecisionFailure> {
        match self.check_locally(request, requested_at) {
            LocalCheck::Refused(decision, source, unknown) => {
                let refusal = self.complete_refusal(request, decision, &unknown, requested_at);
                Ok((refusal.await, source))
            }
            LocalCheck::Passed(marked) => {
                on_passed();
                let request = marked.as_deref().unwrap_or(request);
                self.decide_in_redis(request, requested_at).await
            }
        }
    }

    /// Steps 1 to 7: uses leased units. Charges without leased units take the further steps.
    /// Returns the leased units, too: the caller uses or returns them.
    async fn decide_with_permits(
        self,
        request: &[PolicyCharges<'_>],
        requested_at: Instant,
    ) -> (
        Result<(Decision, DecisionSource), DecisionFailure>,
        Option<LeasePermitGuard<'s>>,
    ) {
        if request.iter().all(|policy| policy.lease.is_none()) {
            let decided = self.check_and_decide(request, requested_at, || ()).await;
            return (decided, None);
        }
        let taking = self.leases.take_permits(self.redis, request, requested_at);
        let (mut permits, unleased) = taking.await;
        if unleased.is_empty() {
            let decision = permits.decide_request(request);
            return (Ok((decision, DecisionSource::Lease)), Some(permits));
        }
        // The request's own units come first: a lease takes what is left. On one connection, both
        // share a batch in this order. In a cluster, a call about several slots is queued later.
        // If a request for several units is rejected, some units may be left. Smaller requests need
        // them, so no lease may take them.
        let has_small_costs = has_small_costs(request);
        let (starts_at_once, mut is_passed) = (has_small_costs && !self.redis.is_cluster(), false);
        let on_passed = || {
            if starts_at_once {
                permits.start_refills()
            } else {
                is_passed = true
            }
        };
        let decided = self
            .check_and_decide(&unleased.policies, requested_at, on_passed)
            .await;
        let is_admitted = |(decision, _): &(Decision, _)| decision.admitted;
        if is_passed && (has_small_costs || decided.as_ref().is_ok_and(is_admitted)) {
            permits.start_refills();
        }
        let (decision, source) = match decided {
            Ok(decided) => decided,
            Err(failure) => return (Err(failure.expand(&unleased)), None),
        };
        if let Err(expired) = permits.check_expiry() {
            return (Err(expired.into()), None);
        }
        let decision = permits.add_statuses(request, unleased.expand(decision));
        (Ok((decision, source)), Some(permits))
    }

    /// Steps 2 and 3: the deny cache, and the local share while an outage ends.
    fn check_locally<'c>(
        self,
        request: &[PolicyCharges<'c>],
        requested_at: Instant,
    ) -> LocalCheck<'c> {
        // If the limit of a block is unknown, Redis decides, because a refusal may start the block.
        let can_be_read = |unknown: &[bool]| {
            let mut limits = each_charge(request).zip(unknown);
            !limits.any(|(charge, is_unknown)| *is_unknown && charge.is_block())
        };
        let cached = self.deny_cache.find_statuses(request, requested_at);
        if let Some(cached) =
            cached.filter(|cached| cached.is_certain && can_be_read(&cached.unknown))
        {
            let source = DecisionSource::DenyCache;
            return LocalCheck::Refused(cached.decision, source, cached.unknown);
        }
        let fallback = self.redis.fallback();
        if !fallback.is_in_outage() {
            return LocalCheck::Passed(None);
        }
        let is_reachable = |policy: &PolicyCharges<'_>| self.redis.is_reachable_for(policy);
        let marked = request.iter().map(|policy| PolicyCharges {
            is_held_back: fallback.uses_share_for(policy) && !is_reachable(policy),
            ..policy.clone()
        });
        let marked: Vec<PolicyCharges<'c>> = marked.collect();
        let checked = fallback.check_share_during_recovery(&marked, requested_at.into_std());
        match checked.filter(|decision| !decision.admitted) {
            Some(decision) => {
                let unknown = each_charge(request)
                    .map(|charge| charge.has_retry_time() && is_reachable(charge.policy));
                let unknown = unknown.collect();
                LocalCheck::Refused(decision, DecisionSource::Degraded, unknown)
            }
            None => LocalCheck::Passed(Some(marked)),
        }
    }

    /// Steps 4 to 7: Redis decides, unless its circuit breaker is open.
    async fn decide_in_redis(
        self,
        request: &[PolicyCharges<'_>],
        requested_at: Instant,
    ) -> Result<(Decision, DecisionSource), DecisionFailure> {
        let marked = self.is_returnable.then(|| mark_returnable(request));
        let requested = marked.as_deref().unwrap_or(request);
        let result = self.redis.decide(requested, requested_at).await;
        let cache_statuses = |decision: &Decision| {
            let fallback = self.redis.fallback();
            fallback.cache_statuses(request, decision, requested_at.into_std());
        };
        match result {
            Ok(decision) if decision.admitted => {
                cache_statuses(&decision);
                self.deny_cache.forget_refusals(request, &decision);
                Ok((decision, DecisionSource::Redis))
            }
            Ok(decision) => {
                cache_statuses(&decision);
                self.deny_cache
                    .record_refusal(request, &decision, requested_at, Instant::now());
                let unknown = find_unasked_limits(request, &decision);
                let refusal = self.complete_refusal(request, decision, &unknown, requested_at);
                Ok((refusal.await, DecisionSource::Redis))
            }
            // After a failed call, a cached refusal without an exact retry time is better than no
            // decision.
            Err(failure) => {
                if let Some(partial) = &failure.partial {
                    cache_statuses(&partial.decision);
                }
                let now = Instant::now();
                if !(request.iter()).all(|policy| self.redis.is_reachable_for(policy)) {
                    self.deny_cache.forget_outdated(request, now);
                }
                let mut refusal = self
                    .deny_cache
                    .find_any_refusal(request, now)
                    .ok_or(failure)?;
                refusal.may_have_charged = true;
                Ok((refusal, DecisionSource::DenyCache))
            }
        }
    }
}
