//! Keeps the slots that requests in flight have taken, and gives them back. What else is known late goes to the store
//! the same way.
//!
//! A slot is a lease in the store (see `limiter/concurrency.rs`). It is renewed at a third of its time for as long as
//! its [`Hold`] lives, and given back when that is dropped, whatever the reason: the response has ended, the client
//! has left, or nobody knows whether the store has heard the question. What fails is not tried again: a slot that was
//! not given back ends by itself, and the next renewal takes back one that has lapsed.

use crate::limiter::{Amendment, Key, Limit};
use crate::store::{Late, Store};
use crate::telemetry::metrics::Shard;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::hash_map::RandomState;
use std::collections::{BTreeSet, HashMap};
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};

/// A worker's keeper; cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Keeper(Arc<Shared>);

/// The slots of one request; dropped, they are given back.
#[derive(Debug)]
pub struct Hold {
    keeper: Keeper,
    slot: u128,
    /// When the request has to be ended.
    ends_at: Option<Instant>,
}

/// A counter of slots.
pub(super) type Place = (Limit, Key);

#[derive(Debug)]
struct Shared {
    store: Store,
    counts: Arc<Shard>,
    /// Distinguishes this keeper from all others of the fleet.
    instance: u64,
    serial: AtomicU64,
    slots: Mutex<Slots>,
    /// There is something to do earlier than was known.
    changed: Notify,
    /// What was to be said has been said.
    told: Notify,
}

/// One request's slot.
#[derive(Debug)]
struct Held {
    places: SmallVec<[Place; 1]>,
    /// When it is to be renewed.
    due: Instant,
}

#[derive(Debug, Default)]
struct Slots {
    held: HashMap<u128, Held, foldhash::fast::RandomState>,
    /// When to renew which.
    due: BTreeSet<(Instant, u128)>,
    /// What the store is to be told next.
    late: Vec<(Place, Amendment)>,
    /// Whether a task looks after them.
    is_attended: bool,
    /// Whether it is just telling the store.
    is_telling: bool,
}

impl Keeper {
    /// Counts what is lost with the worker's own shard.
    pub(super) fn new(store: Store, counts: Arc<Shard>) -> Self {
        Self(Arc::new(Shared {
            store,
            counts,
            instance: RandomState::new().hash_one(()),
            serial: AtomicU64::new(0),
            slots: Mutex::default(),
            changed: Notify::new(),
            told: Notify::new(),
        }))
    }

    /// Begins to hold a slot at each of the places, which it is about to take there.
    pub(super) fn hold(&self, places: SmallVec<[Place; 1]>) -> Hold {
        let slot = u128::from(self.0.instance) << 64
            | u128::from(self.0.serial.fetch_add(1, Ordering::Relaxed));
        let mut slots = self.0.slots.lock();
        if slots.hold(slot, places, Instant::now()) {
            self.attend(&mut slots);
        }
        Hold {
            keeper: self.clone(),
            slot,
            ends_at: None,
        }
    }

    /// Waits until what is known so far has been told to the store, but not for long.
    pub(super) async fn flush(&self) {
        let told = async {
            loop {
                let told = self.0.told.notified();
                if self.0.slots.lock().is_all_told() {
                    return;
                }
                told.await;
            }
        };
        drop(timeout(FLUSH, told).await);
    }

    /// Tells the store, memory at once and Redis soon.
    pub(super) fn tell(&self, late: impl IntoIterator<Item = (Place, Amendment)>) {
        if let Store::Memory(memory) = &self.0.store {
            for ((limit, key), amendment) in late {
                memory.amend(&[Late {
                    limit: &limit,
                    key: &key,
                    amendment,
                }]);
            }
            return;
        }
        let mut slots = self.0.slots.lock();
        let lost: usize = late
            .into_iter()
            .map(|(place, amendment)| slots.tell(place, amendment))
            .sum();
        self.0.counts.settlements_lost(lost);
        if !slots.late.is_empty() {
            self.attend(&mut slots);
        }
    }

    fn attend(&self, slots: &mut Slots) {
        if std::mem::replace(&mut slots.is_attended, true) {
            self.0.changed.notify_one();
        } else {
            tokio::spawn(attend(self.clone()));
        }
    }
}

/// What waits to be told at most, of one worker: about 4 MiB. Redis hears of some thousands per second even where it is
/// 5 ms away. Beyond half of that nothing is given back any more, which is strict: debts, of which none should be
/// missing, have the rest.
const MAX_LATE: usize = 1 << 14;

/// The longest that an ending process waits for what it still has to tell.
const FLUSH: Duration = Duration::from_secs(1);

impl Hold {
    /// The slot's id at all its places.
    pub(super) fn slot(&self) -> u128 {
        self.slot
    }

    /// Forgets the places where the slot was certainly not taken. `None` if that is everywhere.
    pub(super) fn taken_at(self, is_taken: impl Fn(&Place) -> bool) -> Option<Self> {
        let mut slots = self.keeper.0.slots.lock();
        let Held { places, .. } = slots.held.get_mut(&self.slot)?;
        places.retain(|place| is_taken(place));
        let is_held = !places.is_empty();
        drop(slots);
        is_held.then_some(self)
    }

    pub(super) fn end_at(&mut self, ends_at: Option<Instant>) {
        self.ends_at = ends_at;
    }

    /// When the request has to be ended, if ever.
    pub fn ends_at(&self) -> Option<Instant> {
        self.ends_at
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let Some(places) = self.keeper.0.slots.lock().forget(self.slot) else {
            return;
        };
        let amendment = Amendment::Release { slot: self.slot };
        self.keeper
            .tell(places.into_iter().map(|place| (place, amendment)));
    }
}

/// When to renew what is held at places since `now`.
fn due(places: &[Place], now: Instant) -> Instant {
    let shortest_us = places
        .iter()
        .map(|(limit, _)| limit.per_us)
        .min()
        .unwrap_or_default();
    now + Duration::from_micros(shortest_us) / 3
}

/// Renews and gives back until there is nothing left to keep.
async fn attend(keeper: Keeper) {
    let shared = &*keeper.0;
    loop {
        let (late, next) = {
            let mut slots = shared.slots.lock();
            let late = slots.late(Instant::now());
            let next = slots.due.first().map(|(due, _)| *due);
            slots.is_telling = !late.is_empty();
            slots.is_attended = slots.is_telling || next.is_some();
            (late, next)
        };
        if !late.is_empty() {
            let late: Vec<_> = late
                .iter()
                .map(|((limit, key), amendment)| Late {
                    limit,
                    key,
                    amendment: *amendment,
                })
                .collect();
            if let Err(untold) = shared.store.amend(&late).await {
                tracing::debug!(why = %untold, "slots or settlements were not told");
                let lost = untold
                    .places
                    .iter()
                    .filter_map(|place| late.get(*place))
                    .filter(|late| is_settlement(late.amendment));
                shared.counts.settlements_lost(lost.count());
            }
            continue;
        }
        shared.told.notify_waiters();
        let Some(next) = next else { return };
        tokio::select! {
            () = sleep_until(next) => {}
            () = shared.changed.notified() => {}
        }
    }
}

/// Whether it is what an estimate turned out to be, and no slot.
fn is_settlement(amendment: Amendment) -> bool {
    matches!(amendment, Amendment::Charge(_) | Amendment::Credit { .. })
}

impl Slots {
    fn is_all_told(&self) -> bool {
        self.late.is_empty() && !self.is_telling
    }

    /// Whether it is the next to be renewed.
    fn hold(&mut self, slot: u128, places: SmallVec<[Place; 1]>, now: Instant) -> bool {
        let due = due(&places, now);
        self.due.insert((due, slot));
        self.held.insert(slot, Held { places, due });
        self.due.first() == Some(&(due, slot))
    }

    fn forget(&mut self, slot: u128) -> Option<SmallVec<[Place; 1]>> {
        let Held { places, due } = self.held.remove(&slot)?;
        self.due.remove(&(due, slot));
        Some(places)
    }

    /// Has the store told, if there is room. Returns how many settlements are lost: one or none.
    fn tell(&mut self, place: Place, amendment: Amendment) -> usize {
        let is_credit = matches!(amendment, Amendment::Credit { .. });
        let room = if is_credit { MAX_LATE / 2 } else { MAX_LATE };
        if self.late.len() >= room {
            return usize::from(is_settlement(amendment));
        }
        self.late.push((place, amendment));
        0
    }

    /// What the store has to be told at `now`.
    fn late(&mut self, now: Instant) -> Vec<(Place, Amendment)> {
        let mut late = std::mem::take(&mut self.late);
        while let Some(&(at, slot)) = self.due.first().filter(|(at, _)| *at <= now) {
            self.due.remove(&(at, slot));
            let Some(held) = self.held.get_mut(&slot) else {
                continue;
            };
            held.due = due(&held.places, now);
            self.due.insert((held.due, slot));
            late.extend(
                held.places
                    .iter()
                    .map(|place| (place.clone(), Amendment::Renew { slot })),
            );
        }
        late
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{Algorithm, KeyBuilder};

    #[test]
    fn a_store_that_hears_too_slowly_is_not_told_all_and_debts_go_first() {
        let limit = Limit {
            requests: 9,
            per_us: 1_000_000,
            algorithm: Algorithm::SlidingLog,
        };
        let mut slots = Slots::default();
        let mut lost = |amendment: Amendment, times: usize| -> usize {
            let place = || (limit, KeyBuilder::new("p").finish());
            (0..times).map(|_| slots.tell(place(), amendment)).sum()
        };
        let credit = Amendment::Credit { units: 1, at_us: 1 };
        assert_eq!(lost(credit, MAX_LATE), MAX_LATE / 2);
        assert_eq!(lost(Amendment::Charge(1), MAX_LATE), MAX_LATE / 2);
        assert_eq!(lost(Amendment::Release { slot: 1 }, 1), 0, "no settlement");
        assert_eq!(slots.late(Instant::now()).len(), MAX_LATE);
        assert_eq!(
            slots.tell((limit, KeyBuilder::new("p").finish()), credit),
            0,
            "there is room again"
        );
    }
}
