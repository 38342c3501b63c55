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

use super::deny_cache::DenyCache;
use super::instance_counters::{InstanceReservation, list_returns, mark_returnable};
use super::leases::{LeasePermitGuard, LeasePool, has_small_costs};
use super::redis::RedisStore;
use super::{DecisionFailure, PartialDecision, Store, StoreUnavailable};
use crate::clock::monotonic_now;
use crate::limiter::{Charge, Decision, PolicyCharges, Refusal, RequestPart, each_charge};
use smallvec::SmallVec;
use std::sync::Arc;
use strum::{IntoStaticStr, VariantNames};
use tokio::time::Instant;

/// The component that decided on a request's limits. The names are those in metrics, logs and
/// spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum DecisionSource {
    Redis,
    Memory,
    DenyCache,
    /// Units leased from the store in advance.
    Lease,
    /// The `on_store_failure` setting of the policies, because the store was unavailable.
    Degraded,
}

/// The parts that decide when the counters are in Redis. Cheap to clone.
#[derive(Clone, Debug)]
pub struct RedisDecisionPath {
    pub redis: RedisStore,
    pub(super) deny_cache: Arc<DenyCache>,
    pub(super) leases: Arc<LeasePool>,
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
            Self::Redis(path) => path,
        };
        // Boxed so that other requests need no space for these futures.
        if request.iter().any(PolicyCharges::is_instance_scoped) {
            return Box::pin(path.decide_by_scope(request, requested_at)).await;
        }
        if request.iter().any(|policy| policy.lease.is_some()) {
            let decide = Box::pin(path.decide_with_permits(request, requested_at, false));
            let (result, permits) = decide.await;
            if result.as_ref().is_ok_and(|(decision, _)| decision.admitted) {
                permits.into_iter().for_each(LeasePermitGuard::use_units);
            }
            return result;
        }
        Box::pin(path.check_and_decide(request, requested_at, false, || ())).await
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
        let Self::Redis(RedisDecisionPath { redis, .. }) = self else {
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

impl RedisDecisionPath {
    /// Step 0: decides charges of `scope = "instance"` in this process, and all others in Redis: in
    /// this order if Redis probably admits the request. Charges of both are made, or none.
    async fn decide_by_scope(
        &self,
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
        let decide = self.decide_with_permits(shared_charges, requested_at, is_returnable);
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
    /// `is_returnable`: the charges may be returned after the decision.
    async fn check_and_decide(
        &self,
        request: &[PolicyCharges<'_>],
        requested_at: Instant,
        is_returnable: bool,
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
                self.decide_in_redis(request, requested_at, is_returnable)
                    .await
            }
        }
    }

    /// Steps 1 to 7: uses leased units. Charges without leased units take the further steps.
    /// Returns the leased units, too: the caller uses or returns them.
    async fn decide_with_permits<'s>(
        &'s self,
        request: &[PolicyCharges<'_>],
        requested_at: Instant,
        is_returnable: bool,
    ) -> (
        Result<(Decision, DecisionSource), DecisionFailure>,
        Option<LeasePermitGuard<'s>>,
    ) {
        if request.iter().all(|policy| policy.lease.is_none()) {
            let decide = self.check_and_decide(request, requested_at, is_returnable, || ());
            return (decide.await, None);
        }
        let taking = self.leases.take_permits(&self.redis, request, requested_at);
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
            .check_and_decide(&unleased.policies, requested_at, is_returnable, on_passed)
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
        &self,
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
        &self,
        request: &[PolicyCharges<'_>],
        requested_at: Instant,
        is_returnable: bool,
    ) -> Result<(Decision, DecisionSource), DecisionFailure> {
        let marked = is_returnable.then(|| mark_returnable(request));
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

    /// Adds the refusals of `unknown` limits, one flag per charge, to a refusal, so that the client
    /// retries when all limits admit. Reads the counters without a charge. Limits whose counters
    /// give no answer stay unknown.
    async fn complete_refusal(
        &self,
        request: &[PolicyCharges<'_>],
        refusal: Decision,
        unknown: &[bool],
        requested_at: Instant,
    ) -> Decision {
        let mut unknown = unknown.iter();
        let unknown = RequestPart::new(request, |charge| {
            unknown.next() == Some(&true) && !self.leases.has_units_for(charge)
        });
        if unknown.is_empty() {
            return refusal;
        }
        let waits = refusal.outcomes().map(|outcome| match outcome.refusal() {
            Some(Refusal::Until(at_us)) => at_us.saturating_sub(refusal.now_us),
            _ => 0,
        });
        let wait_us = waits.max().unwrap_or(0);
        // Boxed, because most refusals need no reading.
        let read = self.read_statuses(&unknown.policies, requested_at, wait_us);
        refusal.merge_refusals(unknown.expand(Box::pin(read).await))
    }

    /// Reads counters in Redis without a charge, or their statuses in the deny cache.
    async fn read_statuses(
        &self,
        request: &[PolicyCharges<'_>],
        requested_at: Instant,
        wait_us: u64,
    ) -> Decision {
        let cached = self.deny_cache.find_fresh_statuses(request, Instant::now());
        let mut unknown = cached.iter().flat_map(|cached| &cached.unknown);
        let is_asked = |_: &Charge<'_, '_>| unknown.next().is_none_or(|is_unknown| *is_unknown);
        let asked = RequestPart::new(request, is_asked);
        let known = cached.map(|cached| cached.decision).unwrap_or_default();
        if asked.is_empty() {
            return known;
        }
        let reads = asked.policies.iter().map(PolicyCharges::to_read);
        let reads: SmallVec<[PolicyCharges<'_>; 2]> = reads.collect();
        let read = self.redis.decide(&reads, requested_at).await;
        let mut read = read.unwrap_or_else(|failure| {
            let partial = failure.partial.map(|partial| partial.decision);
            partial.unwrap_or_else(|| Decision::without_outcomes(&reads))
        });
        read.admitted = false;
        self.redis
            .fallback()
            .cache_statuses(&asked.policies, &read, requested_at.into_std());
        let times = (requested_at, Instant::now());
        self.deny_cache
            .record_reading(&asked.policies, &read, times, wait_us);
        let read = asked.expand(read);
        match known.now_us {
            0 => read,
            _ => known.merge_refusals(read),
        }
    }
}

/// Finds the limits that may refuse for longer than a refusal says, with one flag per charge.
/// Charges with a time were admitted: their units are being returned.
fn find_unasked_limits(request: &[PolicyCharges<'_>], refusal: &Decision) -> SmallVec<[bool; 8]> {
    let outcomes = each_charge(request).zip(refusal.outcomes());
    let is_unasked =
        outcomes.map(|(charge, outcome)| charge.has_retry_time() && outcome.is_unknown());
    is_unasked.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_match_discriminants() {
        assert_eq!(
            DecisionSource::VARIANTS.len(),
            DecisionSource::Degraded as usize + 1
        );
        for one in [
            DecisionSource::Redis,
            DecisionSource::Memory,
            DecisionSource::DenyCache,
            DecisionSource::Lease,
            DecisionSource::Degraded,
        ] {
            assert_eq!(DecisionSource::VARIANTS[one as usize], <&str>::from(one));
        }
    }
}
