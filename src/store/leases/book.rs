//! What is in hand: units that the store has lent, by policy and key. Pure: whoever asks brings the time.
//!
//! Nothing is handed out after the end of its lease, which counts from the moment at which the question was sent: then
//! the store's own end can't come earlier. What is left over goes back.

use crate::limiter::{Amendment, Charge, Decision, Key, Lease, Limit, Standing};
use crate::store::Late;
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
const SHARDS: usize = 16;

/// Keys in one part: about 4 MiB in all. What strangers make up beyond them is asked of the store one by one.
const MAX_KEYS: usize = 512;

/// Returns that wait for their way back at most: a few megabytes. Others count until they have left.
const MAX_RETURNS: usize = 1 << 14;

/// Our clock may run slower than the store's by one part in so many.
const DRIFT: u32 = 256;

/// Units in hand at most, if the size is our own choice.
const MOST: u64 = 1000;

/// So many units in the time of a lease make a key worth one.
const FEW: u64 = 4;

/// What one process has been lent.
#[derive(Debug, Default)]
pub(super) struct Book {
    shards: [Mutex<Shard>; SHARDS],
    /// What was not used, on its way back.
    returns: Mutex<Vec<Return>>,
    /// There may be something to give back earlier than was known.
    changed: Notify,
    /// Units that were lent, not used and not given back.
    lost: AtomicU64,
}

#[derive(Debug, Default)]
struct Shard {
    keys: HashMap<u128, Entry, foldhash::fast::RandomState>,
    /// Nothing is lent any more.
    is_closed: bool,
}

/// What a policy has for one key.
#[derive(Debug)]
struct Entry {
    owner: Arc<Owner>,
    /// In the order of their ends.
    lots: SmallVec<[Lot; 2]>,
    /// One is asking for more; he tells those who wait.
    asking: Option<Arc<Notify>>,
    /// Who asked last got nothing.
    is_dry: bool,
    seen: Option<Seen>,
    pace: Pace,
}

/// For whom and for what it was lent: other limits are another policy's, or another configuration's.
#[derive(Debug)]
struct Owner {
    key: Key,
    limits: SmallVec<[Limit; 2]>,
}

#[derive(Clone, Copy, Debug)]
struct Lot {
    /// Units.
    left: u64,
    /// The end by the store's clock (µs), and by ours.
    until_us: u64,
    ends: Instant,
}

/// The store's last answer for the key.
#[derive(Debug)]
struct Seen {
    now_us: u64,
    received: Instant,
    /// One per limit.
    standings: SmallVec<[Standing; 2]>,
    /// Units handed out since.
    handed: u64,
}

/// How many units are asked for, in this and in the last stretch as long as a lease.
#[derive(Clone, Copy, Debug)]
struct Pace {
    since: Instant,
    now: u64,
    before: u64,
}

/// What was lent and not used.
#[derive(Clone, Debug)]
pub(super) struct Return {
    owner: Arc<Owner>,
    units: u64,
    at_us: u64,
}

/// Units handed out to one request.
#[derive(Debug)]
pub(super) struct Permit {
    owner: Arc<Owner>,
    pub units: u64,
    until_us: u64,
    /// The request has to be decided by then.
    pub ends: Instant,
    /// The store's clock now, at the earliest.
    pub now_us: u64,
    /// How the limits stand, at the least.
    pub standings: SmallVec<[Standing; 2]>,
}

/// What to do for a request.
#[derive(Debug)]
pub(super) enum Taken {
    /// Go on, and if units are wanted, ask the store for so many meanwhile.
    Permit { permit: Permit, wanted: u64 },
    /// Ask the store, and if units are wanted, for so many in advance.
    Ask { wanted: u64 },
    /// Somebody asks just now: look again when he has got something.
    Wait(OwnedNotified),
}

/// What whoever looks can do if there is nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Else {
    Wait,
    Ask,
    /// The store is not to be asked for more.
    Nothing,
}

impl Book {
    /// Hands out what the charges of one policy take, all with a lease and of the same cost. Who is told to ask for units
    /// says when he is done: [`Book::asked`].
    pub(super) fn take(&self, charges: &[Charge<'_>], now: Instant, or: Else) -> Taken {
        let Some((charge, lease)) = charges
            .first()
            .and_then(|charge| Some((charge, charge.lease?)))
        else {
            return Taken::Ask { wanted: 0 };
        };
        let mut shard = self.shard(charge.key.id());
        if charge.cost == 0 || shard.is_closed {
            return Taken::Ask { wanted: 0 };
        }
        let Some(entry) = self.entry(&mut shard, charges, charge, now) else {
            return Taken::Ask { wanted: 0 };
        };
        entry.pace.count(charge.cost, now, &lease);
        entry.end_lots(now, self);
        let in_hand = entry.lots.iter().map(|lot| lot.left).sum();
        let wanted = if entry.asking.is_some() || or == Else::Nothing {
            0
        } else {
            entry.wants(&lease, in_hand)
        };
        let is_asked = entry.asking.is_some();
        if wanted > 0 {
            entry.asking = Some(Arc::default());
        }
        if let Some(permit) = entry.hand_out(charge, now) {
            return Taken::Permit { permit, wanted };
        }
        match &entry.asking {
            Some(asking) if is_asked && or == Else::Wait && !entry.is_dry => {
                Taken::Wait(Arc::clone(asking).notified_owned())
            }
            _ => Taken::Ask { wanted },
        }
    }

    /// The store has answered the question of one policy, sent at `sent`, that wanted units.
    pub(super) fn lent(
        &self,
        charges: &[Charge<'_>],
        standings: &[Option<Standing>],
        decision: &Decision,
        (sent, received): (Instant, Instant),
    ) {
        let Some(charge) = charges.first() else {
            return;
        };
        let grant = decision
            .grants
            .iter()
            .find(|grant| grant.group == charge.group && decision.admitted);
        let lasts_us = grant.map_or(0, |grant| {
            (grant.until_us + 1).saturating_sub(decision.now_us)
        });
        let lasts = Duration::from_micros(lasts_us);
        let lot = grant.map(|grant| Lot {
            left: grant.units,
            until_us: grant.until_us,
            ends: sent + lasts.saturating_sub(lasts / DRIFT),
        });
        let mut shard = self.shard(charge.key.id());
        let is_closed = shard.is_closed;
        let entry = shard
            .keys
            .get_mut(&charge.key.id())
            .filter(|entry| entry.is_of(charges) && !is_closed);
        let Some(entry) = entry else {
            if let Some(lot) = lot {
                self.give_back(lot.back(&Owner::of(charges, charge.key)));
            }
            return self.changed.notify_one();
        };
        entry.is_dry = lot.is_none();
        if let Some(lot) = lot {
            let at = entry.lots.partition_point(|other| other.ends <= lot.ends);
            entry.lots.insert(at, lot);
            self.changed.notify_one();
            let standings = standings.iter().copied().flatten().collect();
            entry.seen = Some(Seen {
                now_us: decision.now_us,
                received,
                standings,
                handed: 0,
            });
        }
    }

    /// Whoever asked for a key is done, whatever came of it.
    pub(super) fn asked(&self, key: u128) {
        let asking = self
            .shard(key)
            .keys
            .get_mut(&key)
            .and_then(|entry| entry.asking.take());
        if let Some(asking) = asking {
            asking.notify_waiters();
        }
    }

    /// The request that got it was not admitted.
    pub(super) fn put_back(&self, permit: &Permit) {
        let mut shard = self.shard(permit.owner.key.id());
        // Another configuration's entry has nothing to do with it.
        let entry = shard.keys.get_mut(&permit.owner.key.id());
        let mut entry = entry.filter(|entry| Arc::ptr_eq(&entry.owner, &permit.owner));
        if let Some(seen) = entry.as_mut().and_then(|entry| entry.seen.as_mut()) {
            seen.handed = seen.handed.saturating_sub(permit.units);
        }
        let lot = entry.and_then(|entry| {
            entry
                .lots
                .iter_mut()
                .find(|lot| lot.until_us == permit.until_us)
        });
        match lot {
            Some(lot) => lot.left += permit.units,
            None => {
                let Permit {
                    units,
                    until_us,
                    ends,
                    ..
                } = *permit;
                self.give_back(
                    Lot {
                        left: units,
                        until_us,
                        ends,
                    }
                    .back(&permit.owner),
                );
                self.changed.notify_one();
            }
        }
    }

    /// Ends when [`Book::due`] may say something new.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// So many units could not be given back.
    pub(super) fn lose(&self, units: u64) {
        self.lost.fetch_add(units, Ordering::Relaxed);
    }

    /// How many that were since the start.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    fn give_back(&self, back: Return) {
        let mut returns = self.returns.lock();
        match returns.len() < MAX_RETURNS {
            true => returns.push(back),
            false => self.lose(back.units),
        }
    }

    /// What has to go back to the store at `now`, and when there will be more, if ever.
    pub(super) fn due(&self, now: Instant) -> (Vec<Return>, Option<Instant>) {
        let mut next: Option<Instant> = None;
        for shard in &self.shards {
            let mut shard = shard.lock();
            for entry in shard
                .keys
                .values_mut()
                .filter(|entry| !entry.lots.is_empty())
            {
                entry.end_lots(now, self);
                let ends = entry.lots.first().map(|lot| lot.ends);
                next = next.into_iter().chain(ends).min();
            }
        }
        (std::mem::take(&mut *self.returns.lock()), next)
    }

    /// Ends all leases: everything goes back, and nothing is lent any more.
    pub(super) fn close(&self) -> Vec<Return> {
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.is_closed = true;
            for entry in shard.keys.values_mut() {
                entry.end_all(self);
            }
        }
        std::mem::take(&mut *self.returns.lock())
    }

    /// By the low bits of a cryptographic hash.
    fn shard(&self, key: u128) -> MutexGuard<'_, Shard> {
        let [first, ..] = &self.shards;
        let at = usize::try_from(key & 0xffff).unwrap_or(0) % SHARDS;
        self.shards.get(at).unwrap_or(first).lock()
    }

    /// The entry of a policy and key as it is now configured; `None`: there is no room for another.
    fn entry<'s>(
        &self,
        shard: &'s mut Shard,
        charges: &[Charge<'_>],
        charge: &Charge<'_>,
        now: Instant,
    ) -> Option<&'s mut Entry> {
        let id = charge.key.id();
        if shard.keys.len() >= MAX_KEYS && !shard.keys.contains_key(&id) {
            let ttl = |entry: &Entry| now.saturating_duration_since(entry.pace.since);
            shard
                .keys
                .retain(|_, entry| entry.is_used() || ttl(entry) < IDLE);
            if shard.keys.len() >= MAX_KEYS {
                return None;
            }
        }
        let entry = shard
            .keys
            .entry(id)
            .or_insert_with(|| Entry::new(charges, charge.key, now));
        if !entry.is_of(charges) {
            entry.end_all(self);
            self.changed.notify_one();
            // Who is asking for the old one tells those who wait.
            let asking = entry.asking.take();
            *entry = Entry {
                asking,
                ..Entry::new(charges, charge.key, now)
            };
        }
        Some(entry)
    }
}

/// A key that was not asked for so long makes room for another.
const IDLE: Duration = Duration::from_secs(1);

impl Entry {
    fn new(charges: &[Charge<'_>], key: &Key, now: Instant) -> Self {
        Self {
            owner: Owner::of(charges, key),
            lots: SmallVec::new(),
            asking: None,
            is_dry: false,
            seen: None,
            pace: Pace {
                since: now,
                now: 0,
                before: 0,
            },
        }
    }

    fn is_of(&self, charges: &[Charge<'_>]) -> bool {
        self.owner
            .limits
            .iter()
            .eq(charges.iter().map(|charge| charge.limit))
    }

    fn is_used(&self) -> bool {
        !self.lots.is_empty() || self.asking.is_some()
    }

    /// How many units to ask for, with so many in hand: early, since requests go on meanwhile.
    fn wants(&self, lease: &Lease, in_hand: u64) -> u64 {
        let size = lease
            .size
            .unwrap_or_else(|| match self.pace.now.max(self.pace.before) {
                0..FEW => 0,
                units => units.min(MOST),
            });
        // When the store has nothing to lend, what is in hand is used up first.
        if in_hand <= size / 4 && !(self.is_dry && in_hand > 0) {
            size - in_hand
        } else {
            0
        }
    }

    fn hand_out(&mut self, charge: &Charge<'_>, now: Instant) -> Option<Permit> {
        let units = charge.cost;
        let lot = self.lots.iter_mut().find(|lot| lot.left >= units)?;
        let seen = self.seen.as_mut()?;
        lot.left -= units;
        seen.handed = seen.handed.saturating_add(units);
        let now_us = seen
            .now_us
            .saturating_add(micros(now.saturating_duration_since(seen.received)));
        let standing = |standing: &Standing| Standing {
            remaining: standing.remaining.saturating_sub(seen.handed),
            grows_at_us: standing.grows_at_us.map(|at_us| at_us.max(now_us)),
            refusal: None,
        };
        Some(Permit {
            owner: Arc::clone(&self.owner),
            units,
            until_us: lot.until_us,
            ends: lot.ends,
            now_us,
            standings: seen.standings.iter().map(standing).collect(),
        })
    }

    /// Ends the leases whose time has come.
    fn end_lots(&mut self, now: Instant, book: &Book) {
        while let Some(lot) = self.lots.first().copied().filter(|lot| lot.ends <= now) {
            self.lots.remove(0);
            if lot.left > 0 {
                book.give_back(lot.back(&self.owner));
            }
        }
    }

    fn end_all(&mut self, book: &Book) {
        let left = self.lots.drain(..).filter(|lot| lot.left > 0);
        left.for_each(|lot| book.give_back(lot.back(&self.owner)));
    }
}

impl Owner {
    fn of(charges: &[Charge<'_>], key: &Key) -> Arc<Self> {
        let limits = charges.iter().map(|charge| *charge.limit).collect();
        Arc::new(Self {
            key: key.clone(),
            limits,
        })
    }
}

impl Lot {
    fn back(self, owner: &Arc<Owner>) -> Return {
        Return {
            owner: Arc::clone(owner),
            units: self.left,
            at_us: self.until_us,
        }
    }
}

impl Pace {
    fn count(&mut self, units: u64, now: Instant, lease: &Lease) {
        let ttl = Duration::from_micros(lease.ttl_us);
        let since = now.saturating_duration_since(self.since);
        if since >= ttl {
            let before = if since < 2 * ttl { self.now } else { 0 };
            *self = Self {
                since: now,
                now: 0,
                before,
            };
        }
        self.now = self.now.saturating_add(units);
    }
}

impl Return {
    pub(super) fn late(&self) -> impl Iterator<Item = Late<'_>> {
        let amendment = Amendment::Credit {
            units: self.units,
            at_us: self.at_us,
        };
        self.owner.limits.iter().map(move |limit| Late {
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
    use crate::limiter::{Algorithm, Grant, KeyBuilder};

    const LIMIT: Limit = Limit {
        requests: 1000,
        per_us: 1_000_000,
        algorithm: Algorithm::SlidingLog,
    };

    fn key(name: usize) -> Key {
        let mut builder = KeyBuilder::new("p");
        builder.part(Some(name.to_string().as_bytes()));
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
    fn answer(units: u64) -> Decision {
        let standing = Standing {
            remaining: 999,
            grows_at_us: None,
            refusal: None,
        };
        let grant = Grant {
            group: 0,
            units,
            until_us: 5_100_000,
        };
        Decision {
            now_us: 5_000_000,
            admitted: true,
            standings: SmallVec::from_elem(Some(standing), 1),
            delay_us: 0,
            grants: SmallVec::from_elem(grant, usize::from(units > 0)),
            stands_us: SmallVec::new(),
        }
    }

    fn lend(book: &Book, charge: Charge<'_>, units: u64, now: Instant) {
        let answer = answer(units);
        book.lent(&[charge], &answer.standings, &answer, (now, now));
        book.asked(charge.key.id());
    }

    #[test]
    fn trap_26_keys_are_bounded_and_idle_ones_make_room() {
        let (book, start) = (Book::default(), Instant::now());
        let most = SHARDS * MAX_KEYS;
        let keys = || {
            book.shards
                .iter()
                .map(|shard| shard.lock().keys.len())
                .sum::<usize>()
        };
        for name in 0..2 * most {
            book.take(&[charge(&LIMIT, &key(name), None)], start, Else::Wait);
        }
        assert_eq!(keys(), most);
        let late = key(2 * most);
        book.take(&[charge(&LIMIT, &late, None)], start + IDLE, Else::Wait);
        assert!(keys() <= most - MAX_KEYS + 1);
    }

    #[test]
    fn a_cold_key_takes_nothing_in_advance_and_a_hot_one_what_it_needs() {
        let (book, key, start) = (Book::default(), key(0), Instant::now());
        for nth in 1..=10 {
            let taken = book.take(&[charge(&LIMIT, &key, None)], start, Else::Ask);
            let Taken::Ask { wanted } = taken else {
                panic!("{taken:?}")
            };
            assert_eq!(wanted, if nth < FEW { 0 } else { nth }, "{nth}");
            book.asked(key.id());
        }
    }

    #[test]
    fn others_wait_for_who_asks_unless_he_got_nothing_and_go_on_with_what_is_left() {
        let (book, key, now) = (Book::default(), key(0), Instant::now());
        let ask = charge(&LIMIT, &key, Some(8));
        let take = || book.take(&[ask], now, Else::Wait);
        assert!(matches!(take(), Taken::Ask { wanted: 8 }));
        assert!(matches!(take(), Taken::Wait(_)));
        lend(&book, ask, 3, now);
        assert!(matches!(take(), Taken::Permit { wanted: 0, .. }));
        assert!(
            matches!(take(), Taken::Permit { wanted: 6, .. }),
            "a quarter is left"
        );
        assert!(
            matches!(take(), Taken::Permit { wanted: 0, .. }),
            "somebody asks already"
        );
        assert!(matches!(take(), Taken::Wait(_)));
        lend(&book, ask, 0, now);
        assert!(matches!(take(), Taken::Ask { wanted: 8 }));
        assert!(
            matches!(take(), Taken::Ask { wanted: 0 }),
            "near the limit each asks for himself"
        );
    }

    #[test]
    fn nothing_is_handed_out_after_the_end_or_under_other_limits_and_all_goes_back() {
        let (book, key, now) = (Book::default(), key(0), Instant::now());
        let ask = charge(&LIMIT, &key, Some(8));
        let back = |returns: Vec<Return>| {
            returns
                .iter()
                .map(|one| (one.units, one.at_us))
                .collect::<Vec<_>>()
        };
        lend(&book, ask, 8, now);
        assert_eq!(back(book.due(now).0), [(8, 5_100_000)], "it did not ask");

        book.take(&[ask], now, Else::Ask);
        lend(&book, ask, 8, now);
        assert!(matches!(
            book.take(&[ask], now, Else::Ask),
            Taken::Permit { .. }
        ));
        let end = now + Duration::from_micros(100_001);
        assert!(matches!(
            book.take(&[ask], end - Duration::from_micros(390), Else::Ask),
            Taken::Ask { .. }
        ));
        assert_eq!(back(book.due(now).0), [(7, 5_100_000)]);

        lend(&book, ask, 8, now);
        let raised = Limit {
            requests: 2000,
            ..LIMIT
        };
        assert!(matches!(
            book.take(&[charge(&raised, &key, Some(8))], now, Else::Ask),
            Taken::Ask { .. }
        ));
        assert_eq!(back(book.due(now).0), [(8, 5_100_000)]);
        assert_eq!(book.due(now).1, None);
    }

    #[test]
    fn what_is_put_back_goes_to_the_limits_that_it_came_from() {
        let (book, key, now) = (Book::default(), key(0), Instant::now());
        let ask = charge(&LIMIT, &key, Some(8));
        book.take(&[ask], now, Else::Ask);
        lend(&book, ask, 8, now);
        let Taken::Permit { permit, .. } = book.take(&[ask], now, Else::Ask) else {
            panic!("it is there")
        };
        // The configuration is replaced while the request is decided: a second limit was charged nothing.
        let window = Limit {
            algorithm: Algorithm::FixedWindow { offset_us: 0 },
            ..LIMIT
        };
        let both = [ask, charge(&window, &key, Some(8))];
        book.take(&both, now, Else::Ask);
        let answer = answer(8);
        book.lent(&both, &answer.standings, &answer, (now, now));
        book.put_back(&permit);
        let (returns, _) = book.due(now);
        let limits = returns
            .iter()
            .flat_map(Return::late)
            .map(|late| (*late.limit, late.amendment));
        let back = |units| {
            (
                LIMIT,
                Amendment::Credit {
                    units,
                    at_us: 5_100_000,
                },
            )
        };
        assert_eq!(limits.collect::<Vec<_>>(), [back(7), back(1)]);
    }

    #[test]
    fn what_waits_for_its_way_back_is_bounded_and_the_rest_counted() {
        let (book, key, now) = (Book::default(), key(0), Instant::now());
        let ask = charge(&LIMIT, &key, Some(8));
        for _ in 0..MAX_RETURNS + 3 {
            lend(&book, ask, 8, now);
        }
        assert_eq!(book.due(now).0.len(), MAX_RETURNS);
        assert_eq!(book.lost(), 3 * 8);
    }
}
