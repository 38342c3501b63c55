//! Leases: units charged in advance in Redis and issued here, without a call per request, until
//! they expire (see docs/ALGORITHMS.md).
//!
//! A lease that runs low is refilled in the background. When a lease is exhausted, one caller
//! refills it and further callers wait for the refill. If Redis grants no units, each caller asks
//! Redis directly, so that decisions near the limit are exact.
//!
//! How a lease ends:
//!
//! - Its time ends: on the local clock 1/256 early. The key's next request or the credit task
//!   removes the lease, and its unused units go back to Redis as a credit.
//! - Its units are used up. The empty lease stays until its time ends.
//! - The key's next request after a reload that changed its limits revokes it. Without one, it ends
//!   by time. In both cases its unused units are credited.
//! - Shutdown: all unused units are credited, for at most a second. A grant that arrives after the
//!   shutdown is credited at once.
//!
//! Units of a failed credit are counted as lost and stay charged until they expire. Units that
//! Redis granted to a refill that timed out stay charged too, but are not counted as lost.

mod lease_entry;
mod lease_table;

use super::redis::RedisStore;
use super::{FLUSH_TIMEOUT, PendingSettlement, Settlement, StoreUnavailable};
use crate::clock::Clock;
use crate::limiter::{Amendment, Charge, Decision, LimitCharge, PolicyCharges, RequestPart};
use lease_entry::{ClockReading, LeasePermit};
use lease_table::{LeaseTable, OnLeaseExhausted};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::futures::OwnedNotified;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

/// Minimum interval between two searches for expired leases.
const SWEEP_INTERVAL: Duration = Duration::from_millis(10);

/// The leases shared by the workers of one process.
#[derive(Debug)]
pub struct LeasePool {
    /// Read again for each attempt to take permits: a request may have waited since its arrival.
    clock: Clock,
    table: LeaseTable,
    /// Whether the credit task runs.
    is_credit_task_running: Mutex<bool>,
}

/// Units issued to a request. Dropping the guard before the request is admitted returns the units.
#[derive(Debug)]
pub(super) struct LeasePermitGuard<'l> {
    leases: &'l Arc<LeasePool>,
    redis: &'l RedisStore,
    permits: SmallVec<[LeasePermit; 1]>,
    /// Refills to start.
    refills: SmallVec<[LeaseRefill; 1]>,
}

/// The refill of a policy's lease for one key. Dropping it ends the refill.
#[derive(Debug)]
struct LeaseRefill {
    leases: Arc<LeasePool>,
    /// Charges of cost 0, which request the units.
    policy: PolicyCharges<'static>,
}

impl Default for LeasePool {
    fn default() -> Self {
        Self::new(Clock::system())
    }
}

impl LeasePool {
    /// Creates an empty pool. Leases also end by the boot time of `clock`, which goes on while the
    /// machine is suspended.
    pub fn new(clock: Clock) -> Self {
        Self {
            clock,
            table: LeaseTable::default(),
            is_credit_task_running: Mutex::default(),
        }
    }

    /// Issues leased units for charges of which some have a lease. Waits for a refill if waiting
    /// may help. Also returns the charges that leased units do not cover.
    pub(super) async fn take_permits<'l, 'c>(
        self: &'l Arc<Self>,
        redis: &'l RedisStore,
        request: &[PolicyCharges<'c>],
        requested_at: Instant,
    ) -> (LeasePermitGuard<'l>, RequestPart<'c>) {
        let deadline = requested_at + redis.decision_timeout();
        // Waiting for a refill ends early enough to ask Redis afterwards.
        let wait_deadline = requested_at + redis.decision_timeout() / 2;
        // While an outage ends, Redis lacks the charges that other instances have not written back,
        // so it would grant too many units.
        let may_refill = !redis.is_breaker_open() && !redis.fallback().is_in_outage_for(request);
        let mut on_exhausted = match may_refill {
            true if has_small_costs(request) => OnLeaseExhausted::Wait,
            true => OnLeaseExhausted::RefillWithoutWaiting,
            false => OnLeaseExhausted::NeverRefill,
        };
        loop {
            let mut guard = LeasePermitGuard {
                leases: self,
                redis,
                permits: SmallVec::new(),
                refills: SmallVec::new(),
            };
            match guard.take_permits(request, deadline, on_exhausted) {
                Ok(unleased) => return (guard, unleased),
                Err(refill_done) => {
                    drop(guard);
                    drop(timeout_at(wait_deadline, refill_done).await);
                    if Instant::now() >= wait_deadline {
                        on_exhausted = OnLeaseExhausted::RefillWithoutWaiting;
                    }
                }
            }
        }
    }

    /// Whether leased units of this process would admit a charge now.
    pub(super) fn has_units_for(&self, charge: &Charge<'_, '_>) -> bool {
        charge.policy.lease.is_some()
            && self
                .table
                .has_units_for(charge, ClockReading::now(&self.clock))
    }

    /// Ends all leases and sends credits for their unused units, for at most [`FLUSH_TIMEOUT`]. No
    /// units are issued afterwards. The first worker that stops ends the leases of all workers.
    pub(super) async fn end_leases_and_send_credits(&self, redis: &RedisStore) {
        let credits = self.table.close_and_end_all_leases();
        drop(timeout(FLUSH_TIMEOUT, self.send_credits(redis, credits)).await);
    }

    /// Number of leased units that were not used and could not be returned.
    pub fn lost_units(&self) -> u64 {
        self.table.credits.lost_units.load(Ordering::Relaxed)
    }

    /// Sends credits to Redis. A failed credit is not retried: its units stay charged until they
    /// expire.
    async fn send_credits(&self, redis: &RedisStore, credits: Vec<PendingSettlement>) {
        let settlements: Vec<_> = credits.iter().map(Settlement::from_pending).collect();
        let Err(mut error) = redis.apply_settlements(&settlements).await else {
            return;
        };
        // A credit that failed for several limits counts once.
        error.unconfirmed.dedup_by(|next, first| {
            let is_same_credit = (first.key, first.amendment) == (next.key, next.amendment);
            is_same_credit && first.limit != next.limit
        });
        let lost_units = error.unconfirmed.iter().map(|lost| match lost.amendment {
            Amendment::Credit { units, .. } => units,
            _ => 0,
        });
        let lost = &self.table.credits.lost_units;
        lost.fetch_add(lost_units.sum(), Ordering::Relaxed);
    }

    /// Takes the due credits, as [`LeaseTable::take_due_credits`] does. Returns `None` if nothing
    /// is leased: the credit task ends, and a later lease starts a new task.
    fn take_due_credits(&self) -> Option<(Vec<PendingSettlement>, Option<Instant>)> {
        let mut is_running = self.is_credit_task_running.lock();
        let (credits, next) = self.table.take_due_credits(ClockReading::now(&self.clock));
        *is_running = next.is_some() || !credits.is_empty();
        is_running.then_some((credits, next))
    }

    fn ensure_credit_task(self: &Arc<Self>, redis: &RedisStore) {
        if !std::mem::replace(&mut *self.is_credit_task_running.lock(), true) {
            tokio::spawn(run_credit_task(Arc::clone(self), redis.clone()));
        }
    }
}

impl LeaseRefill {
    /// Prepares to request a lease of `units` for one policy.
    fn new(leases: &Arc<LeasePool>, policy: &PolicyCharges<'_>, units: u64) -> Self {
        let own = policy.to_owned_charges();
        let limits = own.limits.into_iter().map(|charge| LimitCharge {
            name: charge.name,
            ..LimitCharge::new(&charge.limit, 0)
        });
        Self {
            leases: Arc::clone(leases),
            policy: PolicyCharges {
                lease: policy.lease,
                requested_lease_units: units,
                has_fallback: policy.has_fallback,
                ..PolicyCharges::with_limits(own.key, limits.collect())
            },
        }
    }

    /// Starts a task that requests the lease.
    fn spawn(self, redis: &RedisStore) {
        let redis = redis.clone();
        tokio::spawn(async move {
            let leases = &self.leases;
            let request = std::slice::from_ref(&self.policy);
            let sent_at = ClockReading::now(&leases.clock);
            if let Ok(decision) = redis.decide(request, sent_at.instant).await {
                redis
                    .fallback()
                    .cache_statuses(request, &decision, sent_at.instant.into_std());
                let times = (sent_at, Instant::now());
                leases
                    .table
                    .record_lease_answer(&self.policy, &decision, times);
                leases.ensure_credit_task(&redis);
            }
        });
    }
}

/// Whether all charges with a lease cost at most one unit. Other requests ask the store at once
/// when a lease is exhausted, because only an admitted one refills it.
pub(super) fn has_small_costs(request: &[PolicyCharges<'_>]) -> bool {
    let is_small = |policy: &PolicyCharges<'_>| policy.limits.iter().all(|charge| charge.cost <= 1);
    let mut policies = request.iter();
    policies.all(|policy| policy.lease.is_none() || is_small(policy))
}

/// Credits the unused units of expired leases until nothing is leased.
async fn run_credit_task(leases: Arc<LeasePool>, redis: RedisStore) {
    while let Some((credits, next)) = leases.take_due_credits() {
        leases.send_credits(&redis, credits).await;
        sleep(SWEEP_INTERVAL).await;
        let Some(next) = next else { continue };
        tokio::select! {
            biased;
            () = sleep_until(next) => {}
            () = leases.table.changed.notified() => {}
        }
    }
}

impl LeasePermitGuard<'_> {
    /// Issues leased units for each policy with a lease. Returns the charges that the store has to
    /// decide.
    ///
    /// # Errors
    ///
    /// A notification that fires when the refill in progress has ended.
    fn take_permits<'c>(
        &mut self,
        request: &[PolicyCharges<'c>],
        deadline: Instant,
        on_exhausted: OnLeaseExhausted,
    ) -> Result<RequestPart<'c>, OwnedNotified> {
        let now = ClockReading::now(&self.leases.clock);
        let table = &self.leases.table;
        for policy in request.iter().filter(|policy| policy.lease.is_some()) {
            let (permit, units) = table.take_permit(policy, now, on_exhausted)?;
            let refill = (units > 0).then(|| LeaseRefill::new(self.leases, policy, units));
            match permit {
                Some(permit) => {
                    self.permits.push(permit);
                    refill
                        .into_iter()
                        .for_each(|refill| refill.spawn(self.redis));
                }
                None => self.refills.extend(refill),
            }
        }
        if !request.iter().all(|policy| self.covers(policy)) {
            // The store may take until the deadline, so permits that expire before it are returned,
            // and their charges are sent to the store.
            self.permits.retain(|permit| {
                let is_valid = permit.expires_at.instant > deadline;
                if !is_valid {
                    table.return_permit(permit);
                }
                is_valid
            });
        }
        Ok(RequestPart::new(request, |charge| {
            !self.covers(charge.policy)
        }))
    }

    /// Whether units were issued for a policy.
    fn covers(&self, policy: &PolicyCharges<'_>) -> bool {
        let mut permits = self.permits.iter();
        policy.lease.is_some() && permits.any(|permit| permit.is_for(policy))
    }

    /// Requests leases in calls of their own, because a lease serves all callers, even if this
    /// caller's request is refused.
    pub(super) fn start_refills(&mut self) {
        for refill in self.refills.drain(..) {
            refill.spawn(self.redis);
        }
    }

    /// Checks that no permit expired while the store decided the remaining charges. A permit
    /// expires meanwhile only if the machine was suspended, so the decision took longer than
    /// `timeout`.
    pub(super) fn check_expiry(&self) -> Result<(), StoreUnavailable> {
        let now = ClockReading::now(&self.leases.clock);
        let has_expired = |permit: &LeasePermit| now.has_reached(&permit.expires_at);
        if self.permits.iter().any(has_expired) {
            Err(self.redis.unavailable_error("timeout"))
        } else {
            Ok(())
        }
    }

    /// Keeps the units, because the request is admitted.
    pub(super) fn use_units(mut self) {
        self.permits.clear();
    }

    /// The decision about a request of which all charges have leased units.
    pub(super) fn decide_request(&self, request: &[PolicyCharges<'_>]) -> Decision {
        let decision = Decision {
            now_us: (self.permits.first()).map_or(0, |permit| permit.store_now_us),
            admitted: true,
            ..Decision::without_outcomes(request)
        };
        self.add_statuses(request, decision)
    }

    /// Adds the statuses of leased policies to the decision of the store about the request.
    pub(super) fn add_statuses(
        &self,
        request: &[PolicyCharges<'_>],
        mut decision: Decision,
    ) -> Decision {
        for permit in &self.permits {
            let mut policies = request.iter().zip(&mut decision.policies);
            let leased = policies.find(|(policy, _)| permit.is_for(policy));
            let outcomes = leased
                .into_iter()
                .flat_map(|(_, leased)| &mut leased.limits);
            for (outcome, status) in outcomes.zip(&permit.statuses) {
                outcome.status = Some(*status);
            }
        }
        decision
    }
}

impl Drop for LeasePermitGuard<'_> {
    fn drop(&mut self) {
        for permit in &self.permits {
            self.leases.table.return_permit(permit);
        }
    }
}

impl Drop for LeaseRefill {
    fn drop(&mut self) {
        self.leases.table.finish_refill(self.policy.key.id());
    }
}

#[cfg(test)]
mod tests;
