//! Leased units by policy and key. The callers pass the current time.
//!
//! No unit is issued after the end of its lease. The TTL counts from sending the refill call, so
//! the lease ends here before it ends in the store, also if the machine is suspended meanwhile.
//! Unused units are returned to the store.

use super::lease_entry::{
    ClockReading, LastGrantAnswer, Lease, LeaseCreditQueue, LeaseEntry, LeasePermit, LeasedCounters,
};
use crate::limiter::{Charge, Decision, PolicyCharges};
use crate::store::PendingSettlement;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::time::Instant;

/// Number of shards, each with a lock.
const SHARD_COUNT: usize = 16;

/// Maximum number of keys per shard: about 4 MiB for all shards. Further keys have no leases: each
/// of their charges asks the store.
const MAX_KEYS_PER_SHARD: usize = 512;

/// When a shard is full, its entries without a lease and without requests for this long are
/// removed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

/// Each lease ends early by 1/256 of its time, because the local clock may run slower than the
/// store's.
const CLOCK_DRIFT_DIVISOR: u32 = 256;

/// The leases of one process, in shards with a lock each.
#[derive(Debug, Default)]
pub(super) struct LeaseTable {
    shards: [Mutex<LeaseShard>; SHARD_COUNT],
    /// Unused units to be returned to the store.
    pub credits: LeaseCreditQueue,
    /// Wakes the credit task when [`LeaseTable::take_due_credits`] may have new results: a lease
    /// may end earlier than the task expects.
    pub changed: Notify,
}

#[derive(Debug, Default)]
struct LeaseShard {
    keys: HashMap<u128, LeaseEntry, foldhash::fast::RandomState>,
    /// Set at shutdown: no further units are issued.
    is_closed: bool,
}

/// What a caller does when no units are left and another caller's refill is in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnLeaseExhausted {
    /// Wait for the refill in progress.
    Wait,
    /// Ask the store at once. Without a refill in progress, also request a lease.
    RefillWithoutWaiting,
    /// Ask the store at once, and request no lease.
    NeverRefill,
}

impl LeaseTable {
    /// Issues units for the charges of one policy, which all have a lease and the same cost.
    /// Without a permit, the caller asks the store. If the returned number is above 0, the caller
    /// also requests a lease of that many units, and calls [`LeaseTable::finish_refill`] when its
    /// lease request has ended.
    ///
    /// # Errors
    /// A notification that fires when the refill in progress has ended. Then the caller tries
    /// again.
    pub(super) fn take_permit(
        &self,
        policy: &PolicyCharges<'_>,
        now: ClockReading,
        on_exhausted: OnLeaseExhausted,
    ) -> Result<(Option<LeasePermit>, u64), OwnedNotified> {
        let cost = policy.limits.first().map_or(0, |charge| charge.cost);
        let Some(terms) = policy.lease.filter(|_| cost > 0) else {
            return Ok((None, 0));
        };
        let mut shard = self.lock_shard(policy.key.id());
        let Some(entry) = self.get_or_insert_entry(&mut shard, policy, now.instant) else {
            return Ok((None, 0));
        };
        entry.demand.record_units(cost, now.instant, &terms);
        entry.remove_expired_leases(now, &self.credits);
        let available_units = entry.leases.iter().map(|lease| lease.remaining_units).sum();
        let is_refill_pending = entry.refill.is_some();
        let mut units_to_request = 0;
        if !is_refill_pending && on_exhausted != OnLeaseExhausted::NeverRefill {
            units_to_request = entry.units_to_request(&terms, available_units);
        }
        if units_to_request > 0 {
            entry.refill = Some(Arc::default());
        }
        let permit = entry.issue_permit(cost, now.instant);
        let may_wait = permit.is_none()
            && is_refill_pending
            && on_exhausted == OnLeaseExhausted::Wait
            && !entry.is_last_grant_empty;
        match &entry.refill {
            Some(refill) if may_wait => Err(Arc::clone(refill).notified_owned()),
            _ => Ok((permit, units_to_request)),
        }
    }

    /// Whether a lease has units for this charge.
    pub(super) fn has_units_for(&self, charge: &Charge<'_, '_>, now: ClockReading) -> bool {
        let shard = self.lock_shard(charge.key.id());
        let entry = shard.keys.get(&charge.key.id());
        entry.is_some_and(|entry| {
            let mut leases = entry.leases.iter();
            leases.any(|lease| {
                lease.remaining_units >= charge.cost && !now.has_reached(&lease.expires_at)
            })
        })
    }

    /// Records the store's answer to a lease request for one policy, sent at `sent_at`.
    pub(super) fn record_lease_answer(
        &self,
        policy: &PolicyCharges<'_>,
        decision: &Decision,
        (sent_at, received_at): (ClockReading, Instant),
    ) {
        let grant = decision.policies.first().and_then(|outcome| outcome.grant);
        let grant = grant.filter(|_| decision.admitted);
        let lifetime_us = grant.map_or(0, |grant| {
            (grant.until_us + 1).saturating_sub(decision.now_us)
        });
        let lifetime = Duration::from_micros(lifetime_us);
        let lease = grant.map(|grant| Lease {
            remaining_units: grant.units,
            store_end_us: grant.until_us,
            expires_at: sent_at + lifetime.saturating_sub(lifetime / CLOCK_DRIFT_DIVISOR),
        });
        let mut shard = self.lock_shard(policy.key.id());
        let is_closed = shard.is_closed;
        let entry = shard
            .keys
            .get_mut(&policy.key.id())
            .filter(|entry| entry.matches_limits(policy) && !is_closed);
        let Some(entry) = entry else {
            if let Some(lease) = lease {
                let counters = LeasedCounters::from_policy(policy);
                (self.credits).push(&counters, lease.remaining_units, lease.store_end_us);
            }
            return self.changed.notify_one();
        };
        entry.is_last_grant_empty = lease.is_none();
        if let Some(lease) = lease {
            let at = entry
                .leases
                .partition_point(|other| other.expires_at.instant <= lease.expires_at.instant);
            entry.leases.insert(at, lease);
            self.changed.notify_one();
            entry.last_grant_answer = Some(LastGrantAnswer {
                store_now_us: decision.now_us,
                received_at,
                statuses: decision.statuses().collect(),
                issued_units: 0,
            });
        }
    }

    /// Ends a refill, whatever its result, and wakes the callers that wait for it.
    pub(super) fn finish_refill(&self, key: u128) {
        let refill = self
            .lock_shard(key)
            .keys
            .get_mut(&key)
            .and_then(|entry| entry.refill.take());
        if let Some(refill) = refill {
            refill.notify_waiters();
        }
    }

    /// Returns the units of a request that was not admitted: to their lease, or to the store if the
    /// lease has ended.
    pub(super) fn return_permit(&self, permit: &LeasePermit) {
        let mut shard = self.lock_shard(permit.counters.key.id());
        // An entry for other limits does not own this permit.
        let entry = shard.keys.get_mut(&permit.counters.key.id());
        let entry = entry.filter(|entry| Arc::ptr_eq(&entry.counters, &permit.counters));
        let lease = entry.and_then(|entry| {
            if let Some(answer) = &mut entry.last_grant_answer {
                answer.issued_units = answer.issued_units.saturating_sub(permit.units);
            }
            let mut leases = entry.leases.iter_mut();
            leases.find(|lease| lease.store_end_us == permit.store_end_us)
        });
        match lease {
            Some(lease) => lease.remaining_units += permit.units,
            None => {
                (self.credits).push(&permit.counters, permit.units, permit.store_end_us);
                self.changed.notify_one();
            }
        }
    }

    /// Returns the unused units of leases that have expired, and the time of the next expiry, if
    /// any.
    pub(super) fn take_due_credits(
        &self,
        now: ClockReading,
    ) -> (Vec<PendingSettlement>, Option<Instant>) {
        let mut next: Option<Instant> = None;
        for shard in &self.shards {
            let mut shard = shard.lock();
            for entry in shard
                .keys
                .values_mut()
                .filter(|entry| !entry.leases.is_empty())
            {
                entry.remove_expired_leases(now, &self.credits);
                let ends = entry.leases.iter().map(|lease| lease.expires_at.instant);
                next = next.into_iter().chain(ends).min();
            }
        }
        (self.credits.take_all(), next)
    }

    /// Ends all leases and returns their unused units. Issues no units afterwards.
    pub(super) fn close_and_end_all_leases(&self) -> Vec<PendingSettlement> {
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.is_closed = true;
            for entry in shard.keys.values_mut() {
                entry.revoke_all_leases(&self.credits);
            }
        }
        self.credits.take_all()
    }

    /// Selects a shard by the low bits of a cryptographic hash.
    fn lock_shard(&self, key: u128) -> MutexGuard<'_, LeaseShard> {
        let [first, ..] = &self.shards;
        let index = usize::try_from(key & 0xffff).unwrap_or(0) % SHARD_COUNT;
        self.shards.get(index).unwrap_or(first).lock()
    }

    /// Gets or creates the entry of a policy and key, and revokes its leases if the limits have
    /// changed. Returns `None` if the shard is full or closed.
    fn get_or_insert_entry<'s>(
        &self,
        shard: &'s mut LeaseShard,
        policy: &PolicyCharges<'_>,
        now: Instant,
    ) -> Option<&'s mut LeaseEntry> {
        let id = policy.key.id();
        if shard.is_closed {
            return None;
        }
        if shard.keys.len() >= MAX_KEYS_PER_SHARD && !shard.keys.contains_key(&id) {
            let idle_time =
                |entry: &LeaseEntry| now.saturating_duration_since(entry.demand.interval_start);
            shard
                .keys
                .retain(|_, entry| entry.is_in_use() || idle_time(entry) < IDLE_TIMEOUT);
            if shard.keys.len() >= MAX_KEYS_PER_SHARD {
                return None;
            }
        }
        let entry = shard
            .keys
            .entry(id)
            .or_insert_with(|| LeaseEntry::new(policy, now));
        if !entry.matches_limits(policy) {
            entry.revoke_all_leases(&self.credits);
            self.changed.notify_one();
            // The refill for the previous limits still wakes the waiting callers.
            let refill = entry.refill.take();
            *entry = LeaseEntry {
                refill,
                ..LeaseEntry::new(policy, now)
            };
        }
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::super::lease_entry::{MAX_QUEUED_CREDITS, MIN_DEMAND_UNITS};
    use super::super::tests::credited_units_and_time;
    use super::*;
    use crate::clock::Clock;
    use crate::limiter::{
        Algorithm, Amendment, ChargeOutcome, Key, KeyBuilder, LeaseGrant, LeaseTerms, Limit,
        LimitStatus, PolicyOutcome,
    };
    use smallvec::smallvec;
    use std::sync::atomic::Ordering;

    const LIMIT: Limit = Limit {
        requests: 1000,
        per_us: 1_000_000,
        algorithm: Algorithm::SlidingLog,
    };

    fn key(name: usize) -> Key {
        let mut builder = KeyBuilder::new("p");
        builder.push_key_value(Some(name.to_string().as_bytes()));
        builder.finish()
    }

    fn charge_with_lease<'c>(
        limit: &'c Limit,
        key: &'c Key,
        size: Option<u64>,
    ) -> PolicyCharges<'c> {
        PolicyCharges {
            lease: Some(LeaseTerms {
                size,
                ttl_us: 100_000,
            }),
            ..PolicyCharges::new(limit, key, 1)
        }
    }

    /// The store's answer to a lease request.
    fn make_store_decision(units: u64) -> Decision {
        let status = LimitStatus {
            remaining: 999,
            next_growth_us: None,
            refusal: None,
            in_effect: None,
        };
        let grant = LeaseGrant {
            units,
            until_us: 5_100_000,
        };
        Decision {
            now_us: 5_000_000,
            admitted: true,
            policies: smallvec![PolicyOutcome {
                limits: smallvec![ChargeOutcome {
                    status: Some(status),
                    ..ChargeOutcome::default()
                }],
                grant: (units > 0).then_some(grant),
            }],
            ..Decision::default()
        }
    }

    fn finish_refill_with_units(
        table: &LeaseTable,
        charge: &PolicyCharges<'_>,
        units: u64,
        now: ClockReading,
    ) {
        let answer = make_store_decision(units);
        table.record_lease_answer(charge, &answer, (now, now.instant));
        table.finish_refill(charge.key.id());
    }

    #[test]
    fn trap_26_keys_are_bounded_and_idle_keys_are_evicted() {
        let (table, start) = (
            LeaseTable::default(),
            ClockReading::now(&Clock::manual(0).0),
        );
        let max_keys = SHARD_COUNT * MAX_KEYS_PER_SHARD;
        let key_count = || {
            table
                .shards
                .iter()
                .map(|shard| shard.lock().keys.len())
                .sum::<usize>()
        };
        for name in 0..2 * max_keys {
            let key = key(name);
            let charge = charge_with_lease(&LIMIT, &key, None);
            drop(table.take_permit(&charge, start, OnLeaseExhausted::Wait));
        }
        assert_eq!(key_count(), max_keys);
        let new_key = key(2 * max_keys);
        let charge = charge_with_lease(&LIMIT, &new_key, None);
        drop(table.take_permit(&charge, start + IDLE_TIMEOUT, OnLeaseExhausted::Wait));
        assert!(key_count() <= max_keys - MAX_KEYS_PER_SHARD + 1);
    }

    #[test]
    fn a_cold_key_requests_no_lease_and_a_hot_key_requests_its_demand() {
        let (table, key, start) = (
            LeaseTable::default(),
            key(0),
            ClockReading::now(&Clock::manual(0).0),
        );
        for nth in 1..=10 {
            let action = table.take_permit(
                &charge_with_lease(&LIMIT, &key, None),
                start,
                OnLeaseExhausted::RefillWithoutWaiting,
            );
            let (permit, units_to_request) = action.unwrap();
            assert!(permit.is_none());
            assert_eq!(
                units_to_request,
                if nth < MIN_DEMAND_UNITS { 0 } else { nth },
                "{nth}"
            );
            table.finish_refill(key.id());
        }
    }

    #[test]
    fn callers_wait_for_a_refill_unless_the_last_grant_was_empty() {
        let (table, key, now) = (
            LeaseTable::default(),
            key(0),
            ClockReading::now(&Clock::manual(0).0),
        );
        let leased_charge = charge_with_lease(&LIMIT, &key, Some(8));
        // Whether the caller has a permit, and the units that it has to request.
        let take = || {
            let answer = table.take_permit(&leased_charge, now, OnLeaseExhausted::Wait);
            answer.map(|(permit, units)| (permit.is_some(), units)).ok()
        };
        assert_eq!(take(), Some((false, 8)));
        assert_eq!(take(), None, "the caller waits");
        finish_refill_with_units(&table, &leased_charge, 3, now);
        assert_eq!(take(), Some((true, 0)));
        assert_eq!(take(), Some((true, 6)), "a quarter of the lease remains");
        assert_eq!(take(), Some((true, 0)), "a refill is in progress");
        assert_eq!(take(), None, "the caller waits");
        finish_refill_with_units(&table, &leased_charge, 0, now);
        assert_eq!(take(), Some((false, 8)));
        assert_eq!(
            take(),
            Some((false, 0)),
            "after an empty grant each caller asks the store"
        );
    }

    #[test]
    fn nothing_is_issued_after_expiry_or_for_changed_limits_and_unused_units_are_returned() {
        let (table, key, now) = (
            LeaseTable::default(),
            key(0),
            ClockReading::now(&Clock::manual(0).0),
        );
        let leased_charge = charge_with_lease(&LIMIT, &key, Some(8));
        let units_and_ends = |credits: Vec<PendingSettlement>| {
            let credits = credits.iter().map(credited_units_and_time);
            credits.collect::<Vec<_>>()
        };
        finish_refill_with_units(&table, &leased_charge, 8, now);
        assert_eq!(
            units_and_ends(table.take_due_credits(now).0),
            [(8, 5_100_000)],
            "the table has no entry for this key"
        );

        drop(table.take_permit(&leased_charge, now, OnLeaseExhausted::RefillWithoutWaiting));
        finish_refill_with_units(&table, &leased_charge, 8, now);
        let has_permit = |charge: &PolicyCharges<'_>, at| {
            let on_exhausted = OnLeaseExhausted::RefillWithoutWaiting;
            let answer = table.take_permit(charge, at, on_exhausted);
            answer.unwrap().0.is_some()
        };
        assert!(has_permit(&leased_charge, now));
        let almost_end = now + Duration::from_micros(100_001 - 390);
        assert!(!has_permit(&leased_charge, almost_end));
        assert_eq!(
            units_and_ends(table.take_due_credits(now).0),
            [(7, 5_100_000)]
        );

        finish_refill_with_units(&table, &leased_charge, 8, now);
        let raised = Limit {
            requests: 2000,
            ..LIMIT
        };
        assert!(!has_permit(&charge_with_lease(&raised, &key, Some(8)), now));
        assert_eq!(
            units_and_ends(table.take_due_credits(now).0),
            [(8, 5_100_000)]
        );
        assert_eq!(table.take_due_credits(now).1, None);
    }

    #[test]
    fn a_lease_ends_while_the_machine_is_suspended() {
        let (clock, boot_clock) = Clock::manual(7);
        let (table, key, sent_at) = (LeaseTable::default(), key(0), ClockReading::now(&clock));
        let leased_charge = charge_with_lease(&LIMIT, &key, Some(8));
        let take_permit = || {
            let now = ClockReading::now(&clock);
            let on_exhausted = OnLeaseExhausted::RefillWithoutWaiting;
            let answer = table.take_permit(&leased_charge, now, on_exhausted);
            answer.unwrap().0
        };
        take_permit();
        // The machine is suspended on the way to the store, so the lease is shorter by that time.
        boot_clock.advance_us(60_000);
        finish_refill_with_units(&table, &leased_charge, 8, sent_at);
        assert!(take_permit().is_some());
        boot_clock.advance_us(40_000);
        assert!(take_permit().is_none());
        let (returns, next) = table.take_due_credits(ClockReading::now(&clock));
        let returned = returns.iter().map(credited_units_and_time);
        assert_eq!(returned.map(|(units, _)| units).sum::<u64>(), 7);
        assert_eq!(next, None, "no lease is left");
    }

    #[test]
    fn a_returned_permit_is_credited_to_the_limits_it_was_taken_from() {
        let (table, key, now) = (
            LeaseTable::default(),
            key(0),
            ClockReading::now(&Clock::manual(0).0),
        );
        let leased_charge = charge_with_lease(&LIMIT, &key, Some(8));
        let take_permit = |policy: &PolicyCharges<'_>| {
            let answer = table.take_permit(policy, now, OnLeaseExhausted::RefillWithoutWaiting);
            answer.unwrap().0
        };
        take_permit(&leased_charge);
        finish_refill_with_units(&table, &leased_charge, 8, now);
        let permit = take_permit(&leased_charge).expect("the lease has units");
        // A reload adds a second limit while the request is decided. That limit was charged
        // nothing.
        let window = Limit {
            algorithm: Algorithm::FixedWindow { offset_us: 0 },
            ..LIMIT
        };
        let both = leased_charge.and_limit(&window, 1);
        take_permit(&both);
        let answer = make_store_decision(8);
        table.record_lease_answer(&both, &answer, (now, now.instant));
        table.return_permit(&permit);
        let (credits, _) = table.take_due_credits(now);
        let limits = credits.iter();
        let limits = limits.map(|((limit, _), amendment)| (*limit, *amendment));
        let credit = |units| {
            (
                LIMIT,
                Amendment::Credit {
                    units,
                    at_us: 5_100_000,
                },
            )
        };
        assert_eq!(limits.collect::<Vec<_>>(), [credit(7), credit(1)]);
    }

    #[test]
    fn queued_credits_are_bounded_and_units_of_dropped_credits_are_counted() {
        let (table, key, now) = (
            LeaseTable::default(),
            key(0),
            ClockReading::now(&Clock::manual(0).0),
        );
        let leased_charge = charge_with_lease(&LIMIT, &key, Some(8));
        for _ in 0..MAX_QUEUED_CREDITS + 3 {
            finish_refill_with_units(&table, &leased_charge, 8, now);
        }
        assert_eq!(table.take_due_credits(now).0.len(), MAX_QUEUED_CREDITS);
        assert_eq!(table.credits.lost_units.load(Ordering::Relaxed), 3 * 8);
    }
}
