//! What is in hand: units that the store has lent, by policy and key. Pure: whoever asks brings the time.
//!
//! Nothing is handed out after the end of its lease, which counts from the moment at which the question was sent: then
//! the store's own end can't come earlier. What is left over goes back.

use crate::limiter::{Amendment, Charge, Decision, Key, Lease, Limit, LimitStatus};
use crate::store::Settlement;
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::time::Instant;

/// Parts of the book, each with a lock.
const SHARD_COUNT: usize = 16;

/// Keys in one part: about 4 MiB in all. What strangers make up beyond them is asked of the store one by one.
const MAX_KEYS_PER_SHARD: usize = 512;

/// Returns that wait for their way back at most: a few megabytes. Others count until they have left.
const MAX_RETURNS: usize = 1 << 14;

/// Our clock may run slower than the store's by one part in so many.
const CLOCK_DRIFT_DIVISOR: u32 = 256;

/// Units in hand at most, if the size is our own choice.
const MAX_AUTO_UNITS: u64 = 1000;

/// So many units in the time of a lease make a key worth one.
const MIN_DEMAND_UNITS: u64 = 4;

/// What one process has been lent.
#[derive(Debug, Default)]
pub(super) struct LeaseTable {
    shards: [Mutex<LeaseShard>; SHARD_COUNT],
    /// What was not used, on its way back.
    returns: Mutex<Vec<LeaseReturn>>,
    /// There may be something to give back earlier than was known.
    changed: Notify,
    /// Units that were lent, not used and not given back.
    lost_units: AtomicU64,
}

#[derive(Debug, Default)]
struct LeaseShard {
    keys: HashMap<u128, LeaseEntry, foldhash::fast::RandomState>,
    /// Nothing is lent any more.
    is_closed: bool,
}

/// What a policy has for one key.
#[derive(Debug)]
struct LeaseEntry {
    owner: Arc<LeaseOwner>,
    /// In the order of their ends.
    grants: SmallVec<[LeasedUnits; 2]>,
    /// One is asking for more; he tells those who wait.
    renewal: Option<Arc<Notify>>,
    /// Who asked last got nothing.
    is_last_grant_empty: bool,
    last_answer: Option<LastStoreAnswer>,
    demand: LeaseDemand,
}

/// For whom and for what it was lent: other limits are another policy's, or another configuration's.
#[derive(Debug)]
struct LeaseOwner {
    key: Key,
    limits: SmallVec<[Limit; 2]>,
}

#[derive(Clone, Copy, Debug)]
struct LeasedUnits {
    /// Units.
    remaining_units: u64,
    /// The end by the store's clock (µs), and by ours.
    until_us: u64,
    expires_at: Instant,
}

/// The store's last answer for the key.
#[derive(Debug)]
struct LastStoreAnswer {
    store_now_us: u64,
    received_at: Instant,
    /// One per limit.
    standings: SmallVec<[LimitStatus; 2]>,
    /// Units handed out since.
    issued_units: u64,
}

/// How many units are asked for, in this and in the last stretch as long as a lease.
#[derive(Clone, Copy, Debug)]
struct LeaseDemand {
    interval_start: Instant,
    current_units: u64,
    previous_units: u64,
}

/// What was lent and not used.
#[derive(Clone, Debug)]
pub(super) struct LeaseReturn {
    owner: Arc<LeaseOwner>,
    units: u64,
    until_us: u64,
}

/// Units handed out to one request.
#[derive(Debug)]
pub(super) struct LeasePermit {
    owner: Arc<LeaseOwner>,
    pub units: u64,
    until_us: u64,
    /// The request has to be decided by then.
    pub expires_at: Instant,
    /// The store's clock now, at the earliest.
    pub store_now_us: u64,
    /// How the limits stand, at the least.
    pub standings: SmallVec<[LimitStatus; 2]>,
}

/// What to do for a request.
#[derive(Debug)]
pub(super) enum LeaseAction {
    /// Go on, and if units are wanted, ask the store for so many meanwhile.
    Permit {
        permit: LeasePermit,
        units_to_request: u64,
    },
    /// Ask the store, and if units are wanted, for so many in advance.
    QueryStore { units_to_request: u64 },
    /// Somebody asks just now: look again when he has got something.
    WaitForRenewal(OwnedNotified),
}

/// What whoever looks can do if there is nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnLeaseExhausted {
    WaitForRenewal,
    QueryStore,
    /// The store is not to be asked for more.
    SkipRenewal,
}

impl LeaseTable {
    /// Hands out what the charges of one policy take, all with a lease and of the same cost. Who is told to ask for units
    /// says when he is done: [`LeaseTable::asked`].
    pub(super) fn take_permit(
        &self,
        charges: &[Charge<'_>],
        now: Instant,
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
        let Some(entry) = self.get_or_insert_entry(&mut shard, charges, charge, now) else {
            return LeaseAction::QueryStore {
                units_to_request: 0,
            };
        };
        entry.demand.record_units(charge.cost, now, &lease);
        entry.expire_grants(now, self);
        let in_hand = entry.grants.iter().map(|lot| lot.remaining_units).sum();
        let units_to_request =
            if entry.renewal.is_some() || on_exhausted == OnLeaseExhausted::SkipRenewal {
                0
            } else {
                entry.units_to_request(&lease, in_hand)
            };
        let is_renewal_pending = entry.renewal.is_some();
        if units_to_request > 0 {
            entry.renewal = Some(Arc::default());
        }
        if let Some(permit) = entry.issue_permit(charge, now) {
            return LeaseAction::Permit {
                permit,
                units_to_request,
            };
        }
        match &entry.renewal {
            Some(asking)
                if is_renewal_pending
                    && on_exhausted == OnLeaseExhausted::WaitForRenewal
                    && !entry.is_last_grant_empty =>
            {
                LeaseAction::WaitForRenewal(Arc::clone(asking).notified_owned())
            }
            _ => LeaseAction::QueryStore { units_to_request },
        }
    }

    /// The store has answered the question of one policy, sent at `sent`, that wanted units.
    pub(super) fn record_grant(
        &self,
        charges: &[Charge<'_>],
        standings: &[Option<LimitStatus>],
        decision: &Decision,
        (sent_at, received_at): (Instant, Instant),
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
            if let Some(lot) = lease_grant {
                self.queue_return(lot.into_return(&LeaseOwner::from_charges(charges, charge.key)));
            }
            return self.changed.notify_one();
        };
        entry.is_last_grant_empty = lease_grant.is_none();
        if let Some(lot) = lease_grant {
            let at = entry
                .grants
                .partition_point(|other| other.expires_at <= lot.expires_at);
            entry.grants.insert(at, lot);
            self.changed.notify_one();
            let standings = standings.iter().copied().flatten().collect();
            entry.last_answer = Some(LastStoreAnswer {
                store_now_us: decision.now_us,
                received_at,
                standings,
                issued_units: 0,
            });
        }
    }

    /// Whoever asked for a key is done, whatever came of it.
    pub(super) fn finish_renewal(&self, key: u128) {
        let renewal = self
            .lock_shard(key)
            .keys
            .get_mut(&key)
            .and_then(|entry| entry.renewal.take());
        if let Some(asking) = renewal {
            asking.notify_waiters();
        }
    }

    /// The request that got it was not admitted.
    pub(super) fn return_permit(&self, permit: &LeasePermit) {
        let mut shard = self.lock_shard(permit.owner.key.id());
        // Another configuration's entry has nothing to do with it.
        let entry = shard.keys.get_mut(&permit.owner.key.id());
        let mut entry = entry.filter(|entry| Arc::ptr_eq(&entry.owner, &permit.owner));
        if let Some(seen) = entry.as_mut().and_then(|entry| entry.last_answer.as_mut()) {
            seen.issued_units = seen.issued_units.saturating_sub(permit.units);
        }
        let matching_grant = entry.and_then(|entry| {
            entry
                .grants
                .iter_mut()
                .find(|lot| lot.until_us == permit.until_us)
        });
        match matching_grant {
            Some(lot) => lot.remaining_units += permit.units,
            None => {
                let LeasePermit {
                    units,
                    until_us,
                    expires_at: ends,
                    ..
                } = *permit;
                self.queue_return(
                    LeasedUnits {
                        remaining_units: units,
                        until_us,
                        expires_at: ends,
                    }
                    .into_return(&permit.owner),
                );
                self.changed.notify_one();
            }
        }
    }

    /// Ends when [`LeaseTable::due`] may say something new.
    pub(super) async fn wait_for_change(&self) {
        self.changed.notified().await;
    }

    /// So many units could not be given back.
    pub(super) fn record_lost_units(&self, units: u64) {
        self.lost_units.fetch_add(units, Ordering::Relaxed);
    }

    /// How many that were since the start.
    pub(super) fn lost_units(&self) -> u64 {
        self.lost_units.load(Ordering::Relaxed)
    }

    fn queue_return(&self, lease_return: LeaseReturn) {
        let mut returns = self.returns.lock();
        match returns.len() < MAX_RETURNS {
            true => returns.push(lease_return),
            false => self.record_lost_units(lease_return.units),
        }
    }

    /// What has to go back to the store at `now`, and when there will be more, if ever.
    pub(super) fn take_due_returns(&self, now: Instant) -> (Vec<LeaseReturn>, Option<Instant>) {
        let mut next: Option<Instant> = None;
        for shard in &self.shards {
            let mut shard = shard.lock();
            for entry in shard
                .keys
                .values_mut()
                .filter(|entry| !entry.grants.is_empty())
            {
                entry.expire_grants(now, self);
                let ends = entry.grants.first().map(|lot| lot.expires_at);
                next = next.into_iter().chain(ends).min();
            }
        }
        (std::mem::take(&mut *self.returns.lock()), next)
    }

    /// Ends all leases: everything goes back, and nothing is lent any more.
    pub(super) fn close(&self) -> Vec<LeaseReturn> {
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.is_closed = true;
            for entry in shard.keys.values_mut() {
                entry.revoke_all_grants(self);
            }
        }
        std::mem::take(&mut *self.returns.lock())
    }

    /// By the low bits of a cryptographic hash.
    fn lock_shard(&self, key: u128) -> MutexGuard<'_, LeaseShard> {
        let [first, ..] = &self.shards;
        let at = usize::try_from(key & 0xffff).unwrap_or(0) % SHARD_COUNT;
        self.shards.get(at).unwrap_or(first).lock()
    }

    /// The entry of a policy and key as it is now configured; `None`: there is no room for another.
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
            entry.revoke_all_grants(self);
            self.changed.notify_one();
            // Who is asking for the old one tells those who wait.
            let asking = entry.renewal.take();
            *entry = LeaseEntry {
                renewal: asking,
                ..LeaseEntry::new(charges, charge.key, now)
            };
        }
        Some(entry)
    }
}

/// A key that was not asked for so long makes room for another.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

impl LeaseEntry {
    fn new(charges: &[Charge<'_>], key: &Key, now: Instant) -> Self {
        Self {
            owner: LeaseOwner::from_charges(charges, key),
            grants: SmallVec::new(),
            renewal: None,
            is_last_grant_empty: false,
            last_answer: None,
            demand: LeaseDemand {
                interval_start: now,
                current_units: 0,
                previous_units: 0,
            },
        }
    }

    fn matches_limits(&self, charges: &[Charge<'_>]) -> bool {
        self.owner
            .limits
            .iter()
            .eq(charges.iter().map(|charge| charge.limit))
    }

    fn is_in_use(&self) -> bool {
        !self.grants.is_empty() || self.renewal.is_some()
    }

    /// How many units to ask for, with so many in hand: early, since requests go on meanwhile.
    fn units_to_request(&self, lease: &Lease, in_hand: u64) -> u64 {
        let size = lease.size.unwrap_or_else(|| {
            match self.demand.current_units.max(self.demand.previous_units) {
                0..MIN_DEMAND_UNITS => 0,
                units => units.min(MAX_AUTO_UNITS),
            }
        });
        // When the store has nothing to lend, what is in hand is used up first.
        if in_hand <= size / 4 && !(self.is_last_grant_empty && in_hand > 0) {
            size - in_hand
        } else {
            0
        }
    }

    fn issue_permit(&mut self, charge: &Charge<'_>, now: Instant) -> Option<LeasePermit> {
        let units = charge.cost;
        let grant = self
            .grants
            .iter_mut()
            .find(|lot| lot.remaining_units >= units)?;
        let seen = self.last_answer.as_mut()?;
        grant.remaining_units -= units;
        seen.issued_units = seen.issued_units.saturating_add(units);
        let now_us = seen
            .store_now_us
            .saturating_add(micros(now.saturating_duration_since(seen.received_at)));
        let standing = |standing: &LimitStatus| LimitStatus {
            remaining: standing.remaining.saturating_sub(seen.issued_units),
            next_growth_us: standing.next_growth_us.map(|at_us| at_us.max(now_us)),
            refusal: None,
        };
        Some(LeasePermit {
            owner: Arc::clone(&self.owner),
            units,
            until_us: grant.until_us,
            expires_at: grant.expires_at,
            store_now_us: now_us,
            standings: seen.standings.iter().map(standing).collect(),
        })
    }

    /// Ends the leases whose time has come.
    fn expire_grants(&mut self, now: Instant, book: &LeaseTable) {
        while let Some(lot) = self
            .grants
            .first()
            .copied()
            .filter(|lot| lot.expires_at <= now)
        {
            self.grants.remove(0);
            if lot.remaining_units > 0 {
                book.queue_return(lot.into_return(&self.owner));
            }
        }
    }

    fn revoke_all_grants(&mut self, book: &LeaseTable) {
        let unused = self.grants.drain(..).filter(|lot| lot.remaining_units > 0);
        unused.for_each(|lot| book.queue_return(lot.into_return(&self.owner)));
    }
}

impl LeaseOwner {
    fn from_charges(charges: &[Charge<'_>], key: &Key) -> Arc<Self> {
        let limits = charges.iter().map(|charge| *charge.limit).collect();
        Arc::new(Self {
            key: key.clone(),
            limits,
        })
    }
}

impl LeasedUnits {
    fn into_return(self, owner: &Arc<LeaseOwner>) -> LeaseReturn {
        LeaseReturn {
            owner: Arc::clone(owner),
            units: self.remaining_units,
            until_us: self.until_us,
        }
    }
}

impl LeaseDemand {
    fn record_units(&mut self, units: u64, now: Instant, lease: &Lease) {
        let ttl = Duration::from_micros(lease.ttl_us);
        let since = now.saturating_duration_since(self.interval_start);
        if since >= ttl {
            let before = if since < 2 * ttl {
                self.current_units
            } else {
                0
            };
            *self = Self {
                interval_start: now,
                current_units: 0,
                previous_units: before,
            };
        }
        self.current_units = self.current_units.saturating_add(units);
    }
}

impl LeaseReturn {
    pub(super) fn settlements(&self) -> impl Iterator<Item = Settlement<'_>> {
        let amendment = Amendment::Credit {
            units: self.units,
            at_us: self.until_us,
        };
        self.owner.limits.iter().map(move |limit| Settlement {
            limit,
            key: &self.owner.key,
            amendment,
        })
    }

    pub(super) fn units(&self) -> u64 {
        self.units
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{Algorithm, GrantedUnits, KeyBuilder};

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

    /// As the store answers who asks for a lease.
    fn store_answer(units: u64) -> Decision {
        let standing = LimitStatus {
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
            statuses: SmallVec::from_elem(Some(standing), 1),
            delay_us: 0,
            grants: SmallVec::from_elem(grant, usize::from(units > 0)),
            charged_at_us: SmallVec::new(),
        }
    }

    fn renew_lease(book: &LeaseTable, charge: Charge<'_>, units: u64, now: Instant) {
        let answer = store_answer(units);
        book.record_grant(&[charge], &answer.statuses, &answer, (now, now));
        book.finish_renewal(charge.key.id());
    }

    #[test]
    fn trap_26_keys_are_bounded_and_idle_keys_are_evicted() {
        let (book, start) = (LeaseTable::default(), Instant::now());
        let max_keys = SHARD_COUNT * MAX_KEYS_PER_SHARD;
        let key_count = || {
            book.shards
                .iter()
                .map(|shard| shard.lock().keys.len())
                .sum::<usize>()
        };
        for name in 0..2 * max_keys {
            book.take_permit(
                &[charge(&LIMIT, &key(name), None)],
                start,
                OnLeaseExhausted::WaitForRenewal,
            );
        }
        assert_eq!(key_count(), max_keys);
        let new_key = key(2 * max_keys);
        book.take_permit(
            &[charge(&LIMIT, &new_key, None)],
            start + IDLE_TIMEOUT,
            OnLeaseExhausted::WaitForRenewal,
        );
        assert!(key_count() <= max_keys - MAX_KEYS_PER_SHARD + 1);
    }

    #[test]
    fn a_cold_key_requests_no_lease_and_a_hot_key_requests_its_demand() {
        let (book, key, start) = (LeaseTable::default(), key(0), Instant::now());
        for nth in 1..=10 {
            let action = book.take_permit(
                &[charge(&LIMIT, &key, None)],
                start,
                OnLeaseExhausted::QueryStore,
            );
            let LeaseAction::QueryStore {
                units_to_request: wanted,
            } = action
            else {
                panic!("{action:?}")
            };
            assert_eq!(
                wanted,
                if nth < MIN_DEMAND_UNITS { 0 } else { nth },
                "{nth}"
            );
            book.finish_renewal(key.id());
        }
    }

    #[test]
    fn callers_wait_for_a_renewal_unless_the_last_grant_was_empty() {
        let (book, key, now) = (LeaseTable::default(), key(0), Instant::now());
        let leased_charge = charge(&LIMIT, &key, Some(8));
        let take = || book.take_permit(&[leased_charge], now, OnLeaseExhausted::WaitForRenewal);
        assert!(matches!(
            take(),
            LeaseAction::QueryStore {
                units_to_request: 8
            }
        ));
        assert!(matches!(take(), LeaseAction::WaitForRenewal(_)));
        renew_lease(&book, leased_charge, 3, now);
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
            "a quarter is left"
        );
        assert!(
            matches!(
                take(),
                LeaseAction::Permit {
                    units_to_request: 0,
                    ..
                }
            ),
            "somebody asks already"
        );
        assert!(matches!(take(), LeaseAction::WaitForRenewal(_)));
        renew_lease(&book, leased_charge, 0, now);
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
            "near the limit each asks for himself"
        );
    }

    #[test]
    fn nothing_is_issued_after_expiry_or_for_changed_limits_and_unused_units_are_returned() {
        let (book, key, now) = (LeaseTable::default(), key(0), Instant::now());
        let leased_charge = charge(&LIMIT, &key, Some(8));
        let units_and_ends = |returns: Vec<LeaseReturn>| {
            returns
                .iter()
                .map(|one| (one.units, one.until_us))
                .collect::<Vec<_>>()
        };
        renew_lease(&book, leased_charge, 8, now);
        assert_eq!(
            units_and_ends(book.take_due_returns(now).0),
            [(8, 5_100_000)],
            "it did not ask"
        );

        book.take_permit(&[leased_charge], now, OnLeaseExhausted::QueryStore);
        renew_lease(&book, leased_charge, 8, now);
        assert!(matches!(
            book.take_permit(&[leased_charge], now, OnLeaseExhausted::QueryStore),
            LeaseAction::Permit { .. }
        ));
        let end = now + Duration::from_micros(100_001);
        assert!(matches!(
            book.take_permit(
                &[leased_charge],
                end - Duration::from_micros(390),
                OnLeaseExhausted::QueryStore
            ),
            LeaseAction::QueryStore { .. }
        ));
        assert_eq!(
            units_and_ends(book.take_due_returns(now).0),
            [(7, 5_100_000)]
        );

        renew_lease(&book, leased_charge, 8, now);
        let raised = Limit {
            requests: 2000,
            ..LIMIT
        };
        assert!(matches!(
            book.take_permit(
                &[charge(&raised, &key, Some(8))],
                now,
                OnLeaseExhausted::QueryStore
            ),
            LeaseAction::QueryStore { .. }
        ));
        assert_eq!(
            units_and_ends(book.take_due_returns(now).0),
            [(8, 5_100_000)]
        );
        assert_eq!(book.take_due_returns(now).1, None);
    }

    #[test]
    fn a_returned_permit_is_credited_to_the_limits_it_was_taken_from() {
        let (book, key, now) = (LeaseTable::default(), key(0), Instant::now());
        let leased_charge = charge(&LIMIT, &key, Some(8));
        book.take_permit(&[leased_charge], now, OnLeaseExhausted::QueryStore);
        renew_lease(&book, leased_charge, 8, now);
        let LeaseAction::Permit { permit, .. } =
            book.take_permit(&[leased_charge], now, OnLeaseExhausted::QueryStore)
        else {
            panic!("it is there")
        };
        // The configuration is replaced while the request is decided: a second limit was charged nothing.
        let window = Limit {
            algorithm: Algorithm::FixedWindow { offset_us: 0 },
            ..LIMIT
        };
        let both = [leased_charge, charge(&window, &key, Some(8))];
        book.take_permit(&both, now, OnLeaseExhausted::QueryStore);
        let answer = store_answer(8);
        book.record_grant(&both, &answer.statuses, &answer, (now, now));
        book.return_permit(&permit);
        let (returns, _) = book.take_due_returns(now);
        let limits = returns
            .iter()
            .flat_map(LeaseReturn::settlements)
            .map(|late| (*late.limit, late.amendment));
        let credit_of = |units| {
            (
                LIMIT,
                Amendment::Credit {
                    units,
                    at_us: 5_100_000,
                },
            )
        };
        assert_eq!(limits.collect::<Vec<_>>(), [credit_of(7), credit_of(1)]);
    }

    #[test]
    fn queued_returns_are_bounded_and_dropped_units_are_counted() {
        let (book, key, now) = (LeaseTable::default(), key(0), Instant::now());
        let leased_charge = charge(&LIMIT, &key, Some(8));
        for _ in 0..MAX_RETURNS + 3 {
            renew_lease(&book, leased_charge, 8, now);
        }
        assert_eq!(book.take_due_returns(now).0.len(), MAX_RETURNS);
        assert_eq!(book.lost_units(), 3 * 8);
    }
}
