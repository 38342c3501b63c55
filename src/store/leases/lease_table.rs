//! Leased units by policy and key. The caller passes the time.
//!
//! No unit is issued after the end of its lease. The TTL counts from sending the request, so the
//! lease ends here before it ends in the store, also if the machine is suspended meanwhile. Unused units are returned to the store.

use super::clock_reading::ClockReading;
use super::lease_entry::{LastStoreAnswer, LeaseEntry, LeasePermit, LeasedUnits};
use super::lease_return::{LeaseOwner, LeaseReturn, LeaseReturnQueue};
use crate::limiter::{Charge, Decision, LimitStatus};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::time::Instant;

/// Number of shards, each with a lock.
const SHARD_COUNT: usize = 16;

/// Keys per shard: about 4 MiB in all. Charges of further keys ask the store one by one.
const MAX_KEYS_PER_SHARD: usize = 512;

/// The local clock may run slower than the store's by this fraction.
const CLOCK_DRIFT_DIVISOR: u32 = 256;

/// The leases of one process.
#[derive(Debug, Default)]
pub(super) struct LeaseTable {
    shards: [Mutex<LeaseShard>; SHARD_COUNT],
    /// Unused units to be returned to the store.
    returns: LeaseReturnQueue,
    /// Wakes the return task when a return may be due earlier than it expects.
    changed: Notify,
}

#[derive(Debug, Default)]
struct LeaseShard {
    keys: HashMap<u128, LeaseEntry, foldhash::fast::RandomState>,
    /// Set at shutdown: no further units are issued.
    is_closed: bool,
}

/// How the caller proceeds with a request.
#[derive(Debug)]
pub(super) enum LeaseAction {
    /// Admit the request. If `units_to_request` is not 0, also request that many units in the
    /// background.
    Permit {
        permit: LeasePermit,
        units_to_request: u64,
    },
    /// Ask the store. If `units_to_request` is not 0, also request a lease of that many units.
    QueryStore { units_to_request: u64 },
    /// Wait for the renewal in progress, then try again.
    WaitForRenewal(OwnedNotified),
}

/// What a caller may do when no units are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnLeaseExhausted {
    WaitForRenewal,
    QueryStore,
    /// Decide without requesting a lease.
    SkipRenewal,
}

impl LeaseTable {
    /// Issues units for the charges of one policy, which all have a lease and the same cost. A
    /// caller that gets `units_to_request` has to call [`LeaseTable::finish_renewal`] when that
    /// request has ended.
    pub(super) fn take_permit(
        &self,
        charges: &[Charge<'_>],
        now: ClockReading,
        on_exhausted: OnLeaseExhausted,
    ) -> LeaseAction {
        let Some((charge, lease)) = charges
            .first()
            .and_then(|charge| Some((charge, charge.lease?)))
        else {
            return LeaseAction::QueryStore {
                units_to_request: 0,
            };
        };
        let mut shard = self.lock_shard(charge.key.id());
        if charge.cost == 0 || shard.is_closed {
            return LeaseAction::QueryStore {
                units_to_request: 0,
            };
        }
        let Some(entry) = self.get_or_insert_entry(&mut shard, charges, charge, now.instant) else {
            return LeaseAction::QueryStore {
                units_to_request: 0,
            };
        };
        entry.demand.record_units(charge.cost, now.instant, &lease);
        entry.expire_grants(now, &self.returns);
        let available_units = entry
            .grants
            .iter()
            .map(|leased| leased.remaining_units)
            .sum();
        let units_to_request =
            if entry.renewal.is_some() || on_exhausted == OnLeaseExhausted::SkipRenewal {
                0
            } else {
                entry.units_to_request(&lease, available_units)
            };
        let is_renewal_pending = entry.renewal.is_some();
        if units_to_request > 0 {
            entry.renewal = Some(Arc::default());
        }
        if let Some(permit) = entry.issue_permit(charge, now.instant) {
            return LeaseAction::Permit {
                permit,
                units_to_request,
            };
        }
        match &entry.renewal {
            Some(renewal)
                if is_renewal_pending
                    && on_exhausted == OnLeaseExhausted::WaitForRenewal
                    && !entry.is_last_grant_empty =>
            {
                LeaseAction::WaitForRenewal(Arc::clone(renewal).notified_owned())
            }
            _ => LeaseAction::QueryStore { units_to_request },
        }
    }

    /// Records the store's answer to a lease request for one policy, sent at `sent_at`.
    pub(super) fn record_grant(
        &self,
        charges: &[Charge<'_>],
        statuses: &[Option<LimitStatus>],
        decision: &Decision,
        (sent_at, received_at): (ClockReading, Instant),
    ) {
        let Some(charge) = charges.first() else {
            return;
        };
        let grant = decision
            .grants
            .iter()
            .find(|grant| grant.group == charge.group && decision.admitted);
        let lifetime_us = grant.map_or(0, |grant| {
            (grant.until_us + 1).saturating_sub(decision.now_us)
        });
        let lifetime = Duration::from_micros(lifetime_us);
        let lease_grant = grant.map(|grant| LeasedUnits {
            remaining_units: grant.units,
            until_us: grant.until_us,
            expires_at: sent_at + lifetime.saturating_sub(lifetime / CLOCK_DRIFT_DIVISOR),
        });
        let mut shard = self.lock_shard(charge.key.id());
        let is_closed = shard.is_closed;
        let entry = shard
            .keys
            .get_mut(&charge.key.id())
            .filter(|entry| entry.matches_limits(charges) && !is_closed);
        let Some(entry) = entry else {
            if let Some(leased) = lease_grant {
                self.returns
                    .push(leased.into_return(&LeaseOwner::from_charges(charges, charge.key)));
            }
            return self.changed.notify_one();
        };
        entry.is_last_grant_empty = lease_grant.is_none();
        if let Some(leased) = lease_grant {
            let at = entry
                .grants
                .partition_point(|other| other.expires_at.instant <= leased.expires_at.instant);
            entry.grants.insert(at, leased);
            self.changed.notify_one();
            let statuses = statuses.iter().copied().flatten().collect();
            entry.last_answer = Some(LastStoreAnswer {
                store_now_us: decision.now_us,
                received_at,
                statuses,
                issued_units: 0,
            });
        }
    }

    /// Ends a renewal, whatever its result, and wakes the callers that wait for it.
    pub(super) fn finish_renewal(&self, key: u128) {
        let renewal = self
            .lock_shard(key)
            .keys
            .get_mut(&key)
            .and_then(|entry| entry.renewal.take());
        if let Some(renewal) = renewal {
            renewal.notify_waiters();
        }
    }

    /// Takes back the units of a request that was not admitted.
    pub(super) fn return_permit(&self, permit: &LeasePermit) {
        let mut shard = self.lock_shard(permit.owner.key.id());
        // An entry of another configuration does not own this permit.
        let entry = shard.keys.get_mut(&permit.owner.key.id());
        let mut entry = entry.filter(|entry| Arc::ptr_eq(&entry.owner, &permit.owner));
        if let Some(answer) = entry.as_mut().and_then(|entry| entry.last_answer.as_mut()) {
            answer.issued_units = answer.issued_units.saturating_sub(permit.units);
        }
        let matching_grant = entry.and_then(|entry| {
            entry
                .grants
                .iter_mut()
                .find(|leased| leased.until_us == permit.until_us)
        });
        match matching_grant {
            Some(leased) => leased.remaining_units += permit.units,
            None => {
                let LeasePermit {
                    units,
                    until_us,
                    expires_at,
                    ..
                } = *permit;
                self.returns.push(
                    LeasedUnits {
                        remaining_units: units,
                        until_us,
                        expires_at,
                    }
                    .into_return(&permit.owner),
                );
                self.changed.notify_one();
            }
        }
    }

    /// Waits until [`LeaseTable::take_due_returns`] may have new results.
    pub(super) async fn wait_for_change(&self) {
        self.changed.notified().await;
    }

    /// Counts units that could not be returned.
    pub(super) fn record_lost_units(&self, units: u64) {
        self.returns.record_lost_units(units);
    }

    /// Units that could not be returned since the start.
    pub(super) fn lost_units(&self) -> u64 {
        self.returns.lost_units()
    }

    /// Returns the unused units of leases that have expired, and the time of the next expiry, if
    /// any.
    pub(super) fn take_due_returns(
        &self,
        now: ClockReading,
    ) -> (Vec<LeaseReturn>, Option<Instant>) {
        let mut next: Option<Instant> = None;
        for shard in &self.shards {
            let mut shard = shard.lock();
            for entry in shard
                .keys
                .values_mut()
                .filter(|entry| !entry.grants.is_empty())
            {
                entry.expire_grants(now, &self.returns);
                let ends = entry.grants.iter().map(|leased| leased.expires_at.instant);
                next = next.into_iter().chain(ends).min();
            }
        }
        (self.returns.take_all(), next)
    }

    /// Ends all leases and returns their unused units. Issues no units afterwards.
    pub(super) fn close(&self) -> Vec<LeaseReturn> {
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.is_closed = true;
            for entry in shard.keys.values_mut() {
                entry.revoke_all_grants(&self.returns);
            }
        }
        self.returns.take_all()
    }

    /// Selects a shard by the low bits of a cryptographic hash.
    fn lock_shard(&self, key: u128) -> MutexGuard<'_, LeaseShard> {
        let [first, ..] = &self.shards;
        let at = usize::try_from(key & 0xffff).unwrap_or(0) % SHARD_COUNT;
        self.shards.get(at).unwrap_or(first).lock()
    }

    /// The entry of a policy and key for the present limits. `None` if the shard is full.
    fn get_or_insert_entry<'s>(
        &self,
        shard: &'s mut LeaseShard,
        charges: &[Charge<'_>],
        charge: &Charge<'_>,
        now: Instant,
    ) -> Option<&'s mut LeaseEntry> {
        let id = charge.key.id();
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
            .or_insert_with(|| LeaseEntry::new(charges, charge.key, now));
        if !entry.matches_limits(charges) {
            entry.revoke_all_grants(&self.returns);
            self.changed.notify_one();
            // The renewal for the previous limits still wakes the waiting callers.
            let renewal = entry.renewal.take();
            *entry = LeaseEntry {
                renewal,
                ..LeaseEntry::new(charges, charge.key, now)
            };
        }
        Some(entry)
    }
}

/// An entry without requests for this long is removed when its shard is full.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::super::lease_entry::MIN_DEMAND_UNITS;
    use super::super::lease_return::MAX_RETURNS;
    use super::*;
    use crate::clock::Clock;
    use crate::limiter::{Algorithm, Amendment, GrantedUnits, Key, KeyBuilder, Lease, Limit};
    use smallvec::SmallVec;

    const LIMIT: Limit = Limit {
        requests: 1000,
        per_us: 1_000_000,
        algorithm: Algorithm::SlidingLog,
    };

    fn key(name: usize) -> Key {
        let mut builder = KeyBuilder::new("p");
        builder.push_part(Some(name.to_string().as_bytes()));
        builder.finish()
    }

    fn charge<'c>(limit: &'c Limit, key: &'c Key, size: Option<u64>) -> Charge<'c> {
        Charge {
            lease: Some(Lease {
                size,
                ttl_us: 100_000,
            }),
            ..Charge::new(limit, key, 1)
        }
    }

    /// The store's answer to a lease request.
    fn store_answer(units: u64) -> Decision {
        let status = LimitStatus {
            remaining: 999,
            next_growth_us: None,
            refusal: None,
        };
        let grant = GrantedUnits {
            group: 0,
            units,
            until_us: 5_100_000,
        };
        Decision {
            now_us: 5_000_000,
            admitted: true,
            statuses: SmallVec::from_elem(Some(status), 1),
            delay_us: 0,
            grants: SmallVec::from_elem(grant, usize::from(units > 0)),
            charged_at_us: SmallVec::new(),
        }
    }

    fn renew_lease(table: &LeaseTable, charge: Charge<'_>, units: u64, now: ClockReading) {
        let answer = store_answer(units);
        table.record_grant(&[charge], &answer.statuses, &answer, (now, now.instant));
        table.finish_renewal(charge.key.id());
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
            table.take_permit(
                &[charge(&LIMIT, &key(name), None)],
                start,
                OnLeaseExhausted::WaitForRenewal,
            );
        }
        assert_eq!(key_count(), max_keys);
        let new_key = key(2 * max_keys);
        table.take_permit(
            &[charge(&LIMIT, &new_key, None)],
            start + IDLE_TIMEOUT,
            OnLeaseExhausted::WaitForRenewal,
        );
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
                &[charge(&LIMIT, &key, None)],
                start,
                OnLeaseExhausted::QueryStore,
            );
            let LeaseAction::QueryStore { units_to_request } = action else {
                panic!("{action:?}")
            };
            assert_eq!(
                units_to_request,
                if nth < MIN_DEMAND_UNITS { 0 } else { nth },
                "{nth}"
            );
            table.finish_renewal(key.id());
        }
    }

    #[test]
    fn callers_wait_for_a_renewal_unless_the_last_grant_was_empty() {
        let (table, key, now) = (
            LeaseTable::default(),
            key(0),
            ClockReading::now(&Clock::manual(0).0),
        );
        let leased_charge = charge(&LIMIT, &key, Some(8));
        let take = || table.take_permit(&[leased_charge], now, OnLeaseExhausted::WaitForRenewal);
        assert!(matches!(
            take(),
            LeaseAction::QueryStore {
                units_to_request: 8
            }
        ));
        assert!(matches!(take(), LeaseAction::WaitForRenewal(_)));
        renew_lease(&table, leased_charge, 3, now);
        assert!(matches!(
            take(),
            LeaseAction::Permit {
                units_to_request: 0,
                ..
            }
        ));
        assert!(
            matches!(
                take(),
                LeaseAction::Permit {
                    units_to_request: 6,
                    ..
                }
            ),
            "a quarter of the lease remains"
        );
        assert!(
            matches!(
                take(),
                LeaseAction::Permit {
                    units_to_request: 0,
                    ..
                }
            ),
            "a renewal is in progress"
        );
        assert!(matches!(take(), LeaseAction::WaitForRenewal(_)));
        renew_lease(&table, leased_charge, 0, now);
        assert!(matches!(
            take(),
            LeaseAction::QueryStore {
                units_to_request: 8
            }
        ));
        assert!(
            matches!(
                take(),
                LeaseAction::QueryStore {
                    units_to_request: 0
                }
            ),
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
        let leased_charge = charge(&LIMIT, &key, Some(8));
        let units_and_ends = |returns: Vec<LeaseReturn>| {
            returns
                .iter()
                .map(|one| (one.units, one.until_us))
                .collect::<Vec<_>>()
        };
        renew_lease(&table, leased_charge, 8, now);
        assert_eq!(
            units_and_ends(table.take_due_returns(now).0),
            [(8, 5_100_000)],
            "the table has no entry for this key"
        );

        table.take_permit(&[leased_charge], now, OnLeaseExhausted::QueryStore);
        renew_lease(&table, leased_charge, 8, now);
        assert!(matches!(
            table.take_permit(&[leased_charge], now, OnLeaseExhausted::QueryStore),
            LeaseAction::Permit { .. }
        ));
        let almost_end = now + Duration::from_micros(100_001 - 390);
        assert!(matches!(
            table.take_permit(&[leased_charge], almost_end, OnLeaseExhausted::QueryStore),
            LeaseAction::QueryStore { .. }
        ));
        assert_eq!(
            units_and_ends(table.take_due_returns(now).0),
            [(7, 5_100_000)]
        );

        renew_lease(&table, leased_charge, 8, now);
        let raised = Limit {
            requests: 2000,
            ..LIMIT
        };
        assert!(matches!(
            table.take_permit(
                &[charge(&raised, &key, Some(8))],
                now,
                OnLeaseExhausted::QueryStore
            ),
            LeaseAction::QueryStore { .. }
        ));
        assert_eq!(
            units_and_ends(table.take_due_returns(now).0),
            [(8, 5_100_000)]
        );
        assert_eq!(table.take_due_returns(now).1, None);
    }

    #[test]
    fn a_lease_ends_while_the_machine_is_suspended() {
        let (clock, boot_clock) = Clock::manual(7);
        let (table, key, sent_at) = (LeaseTable::default(), key(0), ClockReading::now(&clock));
        let leased_charge = charge(&LIMIT, &key, Some(8));
        let take = || {
            table.take_permit(
                &[leased_charge],
                ClockReading::now(&clock),
                OnLeaseExhausted::QueryStore,
            )
        };
        take();
        // Suspended on the way to the store: the grant is shorter by that time.
        boot_clock.advance_us(60_000);
        renew_lease(&table, leased_charge, 8, sent_at);
        assert!(matches!(take(), LeaseAction::Permit { .. }));
        boot_clock.advance_us(40_000);
        assert!(matches!(take(), LeaseAction::QueryStore { .. }));
        let (returns, next) = table.take_due_returns(ClockReading::now(&clock));
        assert_eq!(returns.iter().map(LeaseReturn::units).sum::<u64>(), 7);
        assert_eq!(next, None, "no lease is left");
    }

    #[test]
    fn a_returned_permit_is_credited_to_the_limits_it_was_taken_from() {
        let (table, key, now) = (
            LeaseTable::default(),
            key(0),
            ClockReading::now(&Clock::manual(0).0),
        );
        let leased_charge = charge(&LIMIT, &key, Some(8));
        table.take_permit(&[leased_charge], now, OnLeaseExhausted::QueryStore);
        renew_lease(&table, leased_charge, 8, now);
        let LeaseAction::Permit { permit, .. } =
            table.take_permit(&[leased_charge], now, OnLeaseExhausted::QueryStore)
        else {
            panic!("the lease has units")
        };
        // A reload adds a second limit while the request is decided. That limit was charged
        // nothing.
        let window = Limit {
            algorithm: Algorithm::FixedWindow { offset_us: 0 },
            ..LIMIT
        };
        let both = [leased_charge, charge(&window, &key, Some(8))];
        table.take_permit(&both, now, OnLeaseExhausted::QueryStore);
        let answer = store_answer(8);
        table.record_grant(&both, &answer.statuses, &answer, (now, now.instant));
        table.return_permit(&permit);
        let (returns, _) = table.take_due_returns(now);
        let limits = returns
            .iter()
            .flat_map(LeaseReturn::settlements)
            .map(|settlement| (*settlement.limit, settlement.amendment));
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
    fn queued_returns_are_bounded_and_dropped_units_are_counted() {
        let (table, key, now) = (
            LeaseTable::default(),
            key(0),
            ClockReading::now(&Clock::manual(0).0),
        );
        let leased_charge = charge(&LIMIT, &key, Some(8));
        for _ in 0..MAX_RETURNS + 3 {
            renew_lease(&table, leased_charge, 8, now);
        }
        assert_eq!(table.take_due_returns(now).0.len(), MAX_RETURNS);
        assert_eq!(table.lost_units(), 3 * 8);
    }
}
