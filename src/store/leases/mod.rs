//! Leases remove Redis from the hot path (see docs/ALGORITHMS.md). Units are charged in advance in
//! Redis, and issued here until the lease expires.
//!
//! A lease that runs low is renewed in the background. When it is exhausted, one caller renews it
//! and the others wait. If the grant is empty, each caller asks Redis directly, so that decisions
//! near the limit are exact.

mod lease_entry;
mod lease_return;
mod lease_table;

use super::redis::RedisStore;
use super::{FLUSH_TIMEOUT, Settlement};
use crate::limiter::{Charge, Decision, Limit, LimitStatus};
use lease_entry::LeasePermit;
use lease_return::LeaseReturn;
use lease_table::{LeaseAction, LeaseTable, OnLeaseExhausted};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

/// Minimum interval between two searches for expired leases.
const SWEEP_INTERVAL: Duration = Duration::from_millis(10);

/// The leases shared by the workers of one process.
#[derive(Debug, Default)]
pub struct LeasePool {
    table: LeaseTable,
    /// Whether the return task runs.
    is_return_task_running: Mutex<bool>,
}

/// Units issued to a request. They are taken back if this is dropped before the request is
/// admitted.
#[derive(Debug)]
pub(super) struct LeasePermitGuard<'l> {
    leases: &'l Arc<LeasePool>,
    redis: &'l RedisStore,
    /// Each with the index of its policy's first charge.
    permits: SmallVec<[(usize, LeasePermit); 1]>,
    renewals: SmallVec<[LeaseRenewalGuard; 1]>,
}

/// Charges that the store has to decide, with their indices in the request.
type UnleasedCharges<'c> = SmallVec<[(usize, Charge<'c>); 4]>;

/// A renewal of one key; dropping it ends the renewal.
#[derive(Debug)]
struct LeaseRenewalGuard {
    leases: Arc<LeasePool>,
    key: u128,
}

impl LeasePool {
    /// Issues leased units for charges of which some have a lease. Waits for a renewal if that may
    /// help. Returns the charges that are not covered, with their indices.
    pub(super) async fn take_permits<'l, 'c>(
        self: &'l Arc<Self>,
        redis: &'l RedisStore,
        charges: &[Charge<'c>],
        requested_at: Instant,
    ) -> (LeasePermitGuard<'l>, UnleasedCharges<'c>) {
        let deadline = requested_at + redis.timeout();
        // Leaves time to ask Redis after waiting.
        let wait_deadline = requested_at + redis.timeout() / 2;
        // While an outage ends, Redis lacks the charges that other instances have not written back.
        // It would grant too much.
        let may_renew = !redis.is_breaker_open() && !redis.fallback().is_in_outage_for(charges);
        let mut on_exhausted = if may_renew {
            OnLeaseExhausted::WaitForRenewal
        } else {
            OnLeaseExhausted::SkipRenewal
        };
        let mut now = requested_at;
        loop {
            let mut guard = LeasePermitGuard {
                leases: self,
                redis,
                permits: SmallVec::new(),
                renewals: SmallVec::new(),
            };
            match guard.take_permits(charges, now, deadline, on_exhausted) {
                Ok(unleased) => return (guard, unleased),
                Err(renewal_done) => {
                    drop(guard);
                    drop(timeout_at(wait_deadline, renewal_done).await);
                    now = Instant::now();
                    on_exhausted = if now < wait_deadline {
                        OnLeaseExhausted::WaitForRenewal
                    } else {
                        OnLeaseExhausted::QueryStore
                    };
                }
            }
        }
    }

    /// Returns all unused units, for at most [`FLUSH_TIMEOUT`]. Issues no units afterwards.
    pub(super) async fn shut_down(&self, redis: &RedisStore) {
        drop(timeout(FLUSH_TIMEOUT, self.send_returns(redis, self.table.close())).await);
    }

    /// Units that were leased, not used, and could not be returned.
    pub fn lost_units(&self) -> u64 {
        self.table.lost_units()
    }

    /// A failed return is not retried: its units stay charged until they expire.
    async fn send_returns(&self, redis: &RedisStore, returns: Vec<LeaseReturn>) {
        let (returned, settlements): (Vec<&LeaseReturn>, Vec<Settlement<'_>>) = returns
            .iter()
            .flat_map(|unused| {
                unused
                    .settlements()
                    .map(move |settlement| (unused, settlement))
            })
            .unzip();
        if settlements.is_empty() {
            return;
        }
        let unsent_indices = match redis.is_breaker_open() {
            true => (0..settlements.len()).collect(),
            false => redis
                .amend(&settlements)
                .await
                .err()
                .map(|error| error.unsent_indices)
                .unwrap_or_default(),
        };
        let mut lost: Vec<&LeaseReturn> = unsent_indices
            .iter()
            .filter_map(|index| returned.get(*index).copied())
            .collect();
        // A return may have failed for several limits.
        lost.dedup_by(|first, second| std::ptr::eq(*first, *second));
        self.table
            .record_lost_units(lost.iter().map(|unused| unused.units()).sum());
    }

    /// As [`LeaseTable::take_due_returns`]. `None` if nothing is leased and the return task ends; a
    /// later lease starts a new task.
    fn take_due_returns(&self) -> Option<(Vec<LeaseReturn>, Option<Instant>)> {
        let mut is_running = self.is_return_task_running.lock();
        let (returns, next) = self.table.take_due_returns(Instant::now());
        *is_running = next.is_some() || !returns.is_empty();
        is_running.then_some((returns, next))
    }

    fn renewal_guard(self: &Arc<Self>, key: u128) -> LeaseRenewalGuard {
        LeaseRenewalGuard {
            leases: Arc::clone(self),
            key,
        }
    }

    /// Requests units in the background while the rest is issued.
    fn spawn_renewal(
        guard: LeaseRenewalGuard,
        redis: &RedisStore,
        policy: &[Charge<'_>],
        units: u64,
    ) {
        let Some(Charge {
            key,
            lease,
            has_fallback,
            ..
        }) = policy.first()
        else {
            return;
        };
        let (key, redis) = ((*key).clone(), redis.clone());
        let (lease, has_fallback) = (*lease, *has_fallback);
        let limits: SmallVec<[Limit; 2]> = policy.iter().map(|charge| *charge.limit).collect();
        tokio::spawn(async move {
            let charges = limits.iter().map(|limit| Charge {
                lease,
                requested_lease_units: units,
                has_fallback,
                ..Charge::new(limit, &key, 0)
            });
            let (charges, sent_at): (SmallVec<[_; 2]>, _) = (charges.collect(), Instant::now());
            if let Ok(decision) = redis.decide(&charges, sent_at).await {
                redis
                    .fallback()
                    .cache_statuses(&charges, &decision, sent_at.into_std());
                let leases = &guard.leases;
                leases.table.record_grant(
                    &charges,
                    &decision.statuses,
                    &decision,
                    (sent_at, Instant::now()),
                );
                leases.ensure_return_task(&redis);
            }
        });
    }

    fn ensure_return_task(self: &Arc<Self>, redis: &RedisStore) {
        if !std::mem::replace(&mut *self.is_return_task_running.lock(), true) {
            tokio::spawn(run_return_task(Arc::clone(self), redis.clone()));
        }
    }
}

/// Returns the unused units of expired leases until nothing is leased.
async fn run_return_task(leases: Arc<LeasePool>, redis: RedisStore) {
    while let Some((returns, next)) = leases.take_due_returns() {
        leases.send_returns(&redis, returns).await;
        sleep(SWEEP_INTERVAL).await;
        let Some(next) = next else { continue };
        tokio::select! {
            biased;
            () = sleep_until(next) => {}
            () = leases.table.wait_for_change() => {}
        }
    }
}

impl LeasePermitGuard<'_> {
    /// Issues leased units for each policy with a lease. Returns the charges that the store has to
    /// decide, with their indices.
    ///
    /// # Errors
    ///
    /// A notification of the renewal to wait for.
    fn take_permits<'c>(
        &mut self,
        charges: &[Charge<'c>],
        now: Instant,
        deadline: Instant,
        on_exhausted: OnLeaseExhausted,
    ) -> Result<SmallVec<[(usize, Charge<'c>); 4]>, tokio::sync::futures::OwnedNotified> {
        let mut remaining = SmallVec::new();
        let mut next = 0;
        for policy in charges.chunk_by(Charge::is_same_policy) {
            let first = next;
            next += policy.len();
            let mut units_to_request = 0;
            if let [
                Charge {
                    lease: Some(_),
                    key,
                    ..
                },
                ..,
            ] = policy
            {
                match self.leases.table.take_permit(policy, now, on_exhausted) {
                    LeaseAction::Permit {
                        permit,
                        units_to_request,
                    } => {
                        self.permits.push((first, permit));
                        if units_to_request > 0 {
                            LeasePool::spawn_renewal(
                                self.leases.renewal_guard(key.id()),
                                self.redis,
                                policy,
                                units_to_request,
                            );
                        }
                        continue;
                    }
                    LeaseAction::WaitForRenewal(renewal_done) => return Err(renewal_done),
                    LeaseAction::QueryStore {
                        units_to_request: units,
                    } => units_to_request = units,
                }
                if units_to_request > 0 {
                    self.renewals.push(self.leases.renewal_guard(key.id()));
                }
            }
            remaining.extend((first..).zip(policy).map(|(at, charge)| {
                (
                    at,
                    Charge {
                        requested_lease_units: units_to_request,
                        ..*charge
                    },
                )
            }));
        }
        if !remaining.is_empty() {
            // The store decides within the deadline: permits that expire before it are not used.
            let (valid, expiring): (SmallVec<[_; 1]>, SmallVec<[_; 1]>) = self
                .permits
                .drain(..)
                .partition(|(_, permit)| permit.expires_at > deadline);
            self.permits = valid;
            for (first, permit) in expiring {
                self.leases.table.return_permit(&permit);
                let policy = charges
                    .get(first..)
                    .and_then(|rest| rest.chunk_by(Charge::is_same_policy).next());
                remaining.extend(
                    (first..)
                        .zip(policy.unwrap_or_default())
                        .map(|(at, charge)| (at, *charge)),
                );
            }
            remaining.sort_unstable_by_key(|(at, _)| *at);
        }
        Ok(remaining)
    }

    /// Requests leases separately from the charges. The caller may disconnect, or another policy
    /// may refuse the request, but the lease serves all callers. On one connection both requests
    /// share a batch.
    pub(super) fn start_renewals(&mut self, charges: &mut [Charge<'_>]) {
        for policy in charges.chunk_by_mut(Charge::is_same_policy) {
            let units_to_request = policy
                .first()
                .map_or(0, |charge| charge.requested_lease_units);
            policy
                .iter_mut()
                .for_each(|charge| charge.requested_lease_units = 0);
            let key = policy.first().map(|charge| charge.key.id());
            if let Some(at) = self
                .renewals
                .iter()
                .position(|asking| Some(asking.key) == key)
            {
                LeasePool::spawn_renewal(
                    self.renewals.remove(at),
                    self.redis,
                    policy,
                    units_to_request,
                );
            }
        }
    }

    /// Combines the statuses of leased policies with the decision of the store.
    pub(super) fn into_decision(
        mut self,
        charges: &[Charge<'_>],
        store_decision: Option<(&[(usize, Charge<'_>)], Decision)>,
    ) -> Decision {
        let mut statuses: SmallVec<[Option<LimitStatus>; 4]> =
            SmallVec::from_elem(None, charges.len());
        for (first, permit) in &self.permits {
            for (target, status) in statuses.iter_mut().skip(*first).zip(&permit.statuses) {
                *target = Some(*status);
            }
        }
        let Some((rest, decision)) = store_decision else {
            let now_us = self
                .permits
                .first()
                .map_or(0, |(_, permit)| permit.store_now_us);
            self.permits.clear();
            return Decision {
                now_us,
                admitted: true,
                statuses,
                delay_us: 0,
                grants: SmallVec::new(),
                charged_at_us: SmallVec::new(),
            };
        };
        for ((at, _), status) in rest.iter().zip(decision.statuses) {
            if let Some(target) = statuses.get_mut(*at) {
                *target = status;
            }
        }
        let mut entry_times_us = SmallVec::from_elem(None, charges.len());
        for ((at, _), at_us) in rest.iter().zip(&decision.charged_at_us) {
            if let Some(target) = entry_times_us.get_mut(*at) {
                *target = *at_us;
            }
        }
        if decision.admitted {
            self.permits.clear();
        }
        Decision {
            statuses,
            charged_at_us: entry_times_us,
            ..decision
        }
    }
}

impl Drop for LeasePermitGuard<'_> {
    fn drop(&mut self) {
        for (_, permit) in &self.permits {
            self.leases.table.return_permit(permit);
        }
    }
}

impl Drop for LeaseRenewalGuard {
    fn drop(&mut self) {
        self.leases.table.finish_renewal(self.key);
    }
}

#[cfg(test)]
mod tests;
