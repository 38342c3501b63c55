//! Concurrency slots held by requests in flight: their renewals and releases in the store.
//!
//! A slot is a lease in the store (see `limiter/concurrency.rs`). It is renewed at a third of its
//! TTL while its [`ConcurrencySlotGuard`] lives. Dropping the guard releases it: the response has
//! ended, the client has disconnected, or the store did not answer. Failed calls are not retried:
//! a slot that was not released expires, and the next renewal takes a lapsed slot again.
//!
//! One task sends renewals and releases in turn. A renewal that overtook the release of its slot
//! would take the slot again.

use super::{CounterRef, FLUSH_TIMEOUT, Settlement, Store};
use crate::limiter::Amendment;
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

/// Maximum number of queued releases of one worker: about 4 MiB. Further slots expire in the store.
const MAX_PENDING_RELEASES: usize = 1 << 14;

/// Slots held by the requests of one worker. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ConcurrencySlots(Arc<ConcurrencySlotsInner>);

/// The slots of one request; dropping it releases them.
#[derive(Debug)]
pub struct ConcurrencySlotGuard {
    slots: ConcurrencySlots,
    slot_id: u128,
    /// Time at which the request has to be ended.
    ends_at: Option<Instant>,
}

#[derive(Debug)]
struct ConcurrencySlotsInner {
    store: Store,
    /// Random; makes slot ids unique in the fleet.
    instance_id: u64,
    next_slot_serial: AtomicU64,
    state: Mutex<ConcurrencySlotsState>,
    /// Wakes the task when work is due earlier than it expects.
    changed: Notify,
    /// Notified when all releases are sent.
    drained: Notify,
}

#[derive(Debug, Default)]
struct ConcurrencySlotsState {
    held_slots: HashMap<u128, HeldSlot, foldhash::fast::RandomState>,
    /// Slots by the time of their next renewal.
    renewals: BTreeSet<(Instant, u128)>,
    /// Releases to send next.
    releases: Vec<(CounterRef, Amendment)>,
    /// Whether a task sends renewals and releases.
    is_task_running: bool,
    /// Whether that task waits for the store.
    is_sending: bool,
}

/// One request's slot at each of its counters.
#[derive(Debug)]
struct HeldSlot {
    counters: SmallVec<[CounterRef; 1]>,
    renew_at: Instant,
}

impl ConcurrencySlots {
    pub fn new(store: Store) -> Self {
        Self(Arc::new(ConcurrencySlotsInner {
            instance_id: match &store {
                Store::Memory(_) => RandomState::new().hash_one(()),
                Store::Redis { redis, .. } => redis.draw_worker_id(),
            },
            store,
            next_slot_serial: AtomicU64::new(0),
            state: Mutex::default(),
            changed: Notify::new(),
            drained: Notify::new(),
        }))
    }

    /// Reserves a slot at each of the counters. The caller then charges it with the guard's id.
    pub fn reserve_slots(&self, counters: SmallVec<[CounterRef; 1]>) -> ConcurrencySlotGuard {
        let slot_id = u128::from(self.0.instance_id) << 64
            | u128::from(self.0.next_slot_serial.fetch_add(1, Ordering::Relaxed));
        let mut state = self.0.state.lock();
        if state.insert_slot(slot_id, counters, Instant::now()) {
            self.ensure_task(&mut state);
        }
        ConcurrencySlotGuard {
            slots: self.clone(),
            slot_id,
            ends_at: None,
        }
    }

    /// Waits until all queued releases are sent, for at most [`FLUSH_TIMEOUT`].
    pub async fn flush(&self) {
        let all_sent = async {
            loop {
                let drained = self.0.drained.notified();
                if self.0.state.lock().is_drained() {
                    return;
                }
                drained.await;
            }
        };
        drop(timeout(FLUSH_TIMEOUT, all_sent).await);
    }

    /// Releases a slot in the memory store at once, and in Redis soon.
    fn release_slot(&self, slot_id: u128) {
        let mut state = self.0.state.lock();
        let Some(counters) = state.remove_slot(slot_id) else {
            return;
        };
        let amendment = Amendment::Release { slot: slot_id };
        let releases = counters.into_iter().map(|counter| (counter, amendment));
        if let Store::Memory(memory) = &self.0.store {
            drop(state);
            for release in releases {
                memory.apply_settlements(&[Settlement::from_pending(&release)]);
            }
            return;
        }
        let free_places = MAX_PENDING_RELEASES.saturating_sub(state.releases.len());
        state.releases.extend(releases.take(free_places));
        if !state.releases.is_empty() {
            self.ensure_task(&mut state);
        }
    }

    fn ensure_task(&self, state: &mut ConcurrencySlotsState) {
        if std::mem::replace(&mut state.is_task_running, true) {
            self.0.changed.notify_one();
        } else {
            tokio::spawn(send_renewals_and_releases(Arc::clone(&self.0)));
        }
    }
}

impl ConcurrencySlotGuard {
    /// The slot's id at all its counters.
    pub fn slot_id(&self) -> u128 {
        self.slot_id
    }

    /// Removes the counters at which the slot was certainly not taken. `None` if none remains.
    pub fn retain_taken(self, is_taken: impl Fn(&CounterRef) -> bool) -> Option<Self> {
        let mut state = self.slots.0.state.lock();
        let counters = &mut state.held_slots.get_mut(&self.slot_id)?.counters;
        counters.retain(|counter| is_taken(counter));
        let is_held = !counters.is_empty();
        drop(state);
        is_held.then_some(self)
    }

    /// Sets the time at which the request has to be ended, if any.
    pub fn set_end(&mut self, ends_at: Option<Instant>) {
        self.ends_at = ends_at;
    }

    /// Time at which the request has to be ended, if any.
    pub fn ends_at(&self) -> Option<Instant> {
        self.ends_at
    }
}

impl Drop for ConcurrencySlotGuard {
    fn drop(&mut self) {
        self.slots.release_slot(self.slot_id);
    }
}

impl ConcurrencySlotsState {
    fn is_drained(&self) -> bool {
        self.releases.is_empty() && !self.is_sending
    }

    /// Returns whether this slot is the next one to renew.
    fn insert_slot(
        &mut self,
        slot_id: u128,
        counters: SmallVec<[CounterRef; 1]>,
        now: Instant,
    ) -> bool {
        let renew_at = next_renewal(&counters, now);
        self.renewals.insert((renew_at, slot_id));
        let held_slot = HeldSlot { counters, renew_at };
        self.held_slots.insert(slot_id, held_slot);
        self.renewals.first() == Some(&(renew_at, slot_id))
    }

    fn remove_slot(&mut self, slot_id: u128) -> Option<SmallVec<[CounterRef; 1]>> {
        let HeldSlot { counters, renew_at } = self.held_slots.remove(&slot_id)?;
        self.renewals.remove(&(renew_at, slot_id));
        Some(counters)
    }

    /// Takes the queued releases, and the renewals that are due at `now`.
    fn take_due(&mut self, now: Instant) -> Vec<(CounterRef, Amendment)> {
        let mut due = std::mem::take(&mut self.releases);
        while let Some(&(at, slot)) = self.renewals.first().filter(|(at, _)| *at <= now) {
            self.renewals.remove(&(at, slot));
            let Some(held_slot) = self.held_slots.get_mut(&slot) else {
                continue;
            };
            held_slot.renew_at = next_renewal(&held_slot.counters, now);
            self.renewals.insert((held_slot.renew_at, slot));
            let renewal = |counter: &CounterRef| (counter.clone(), Amendment::Renew { slot });
            due.extend(held_slot.counters.iter().map(renewal));
        }
        due
    }
}

/// A third of the shortest slot TTL after `now`.
fn next_renewal(counters: &[CounterRef], now: Instant) -> Instant {
    let shortest_us = counters
        .iter()
        .map(|(limit, _)| limit.per_us)
        .min()
        .unwrap_or_default();
    now + Duration::from_micros(shortest_us) / 3
}

/// Renews and releases slots until none is held.
async fn send_renewals_and_releases(slots: Arc<ConcurrencySlotsInner>) {
    loop {
        let (batch, next_renewal) = {
            let mut state = slots.state.lock();
            let due = state.take_due(Instant::now());
            let next = state.renewals.first().map(|(renew_at, _)| *renew_at);
            state.is_sending = !due.is_empty();
            state.is_task_running = state.is_sending || next.is_some();
            (due, next)
        };
        if !batch.is_empty() {
            let amendments: Vec<_> = batch.iter().map(Settlement::from_pending).collect();
            if let Err(error) = slots.store.apply_settlements(&amendments).await {
                tracing::debug!(
                    why = %error,
                    "failed to send concurrency-slot renewals or releases to the store"
                );
            }
            continue;
        }
        slots.drained.notify_waiters();
        let Some(next_renewal) = next_renewal else {
            return;
        };
        tokio::select! {
            biased;
            () = sleep_until(next_renewal) => {}
            () = slots.changed.notified() => {}
        }
    }
}
