//! Concurrency slots held by requests in flight: their renewals and releases in the store.
//!
//! A slot is an entry with a TTL in the store (see `limiter/concurrency.rs`). The slot is renewed
//! every third of its TTL while its [`ConcurrencySlotGuard`] lives. Dropping the guard releases the
//! slot: the response has ended, the client has disconnected, or the store did not answer. A failed
//! renewal is repeated while the slot is held, a failed release until the slot has expired in the
//! store.
//!
//! One task sends renewals and releases, one batch at a time. A renewal that overtook the release
//! of its slot would take the slot again.

use super::{FLUSH_TIMEOUT, LimitAndKey, Settlement, Store};
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

/// Maximum number of slots of one worker that wait for their release: about 4 MiB. Further slots
/// are not released: they expire in the store.
const MAX_ENDED_SLOTS: usize = 1 << 14;

/// Maximum number of releases, and of renewals, in a batch. A release waits for at most one batch,
/// however many renewals are due.
const MAX_BATCH_SLOTS: usize = 512;

/// Bounds of the pause before a failed call is repeated: as long as the call is overdue.
const MIN_RETRY_PAUSE: Duration = Duration::from_millis(25);
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Slots held by the requests of one worker. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ConcurrencySlots(Arc<ConcurrencySlotsInner>);

/// The slots of one request; dropping it releases them.
#[derive(Debug)]
pub struct ConcurrencySlotGuard {
    slots: ConcurrencySlots,
    slot_id: u128,
    /// Time at which the request has to be ended, if any.
    request_ends_at: Option<Instant>,
}

#[derive(Debug)]
struct ConcurrencySlotsInner {
    store: Store,
    /// Random; makes slot ids unique in the fleet.
    instance_id: u64,
    next_slot_serial: AtomicU64,
    /// Locked by one worker only. It is a mutex because `Store` is `Send`.
    state: Mutex<ConcurrencySlotsState>,
    /// Wakes the task when a call is due earlier than the task expects.
    changed: Notify,
    /// Notified when all releases are sent.
    drained: Notify,
}

#[derive(Debug, Default)]
struct ConcurrencySlotsState {
    /// Slots by entry id, which is the slot id. A slot that the store may have taken at counters
    /// that the decision did not grant has a separate entry with a new id.
    slots: HashMap<u128, SlotEntry, foldhash::fast::RandomState>,
    /// Held slots by the time of their next renewal.
    renewals: BTreeSet<(Instant, u128)>,
    /// Ended slots by the time of their next release.
    releases: BTreeSet<(Instant, u128)>,
    /// Slots whose request has ended.
    ended_count: usize,
    /// Whether a task is sending renewals and releases.
    is_task_running: bool,
}

/// What to do with those slots of a request that the decision did not grant.
#[derive(Clone, Copy, Debug)]
pub enum UntakenSlotAction {
    /// Forget the slots: the store has decided, so they are certainly not taken.
    Forget,
    /// Release the slots: the store has not answered, so it may have taken them.
    Release,
}

/// One request's slot at each of its counters.
#[derive(Debug)]
struct SlotEntry {
    /// The slot's id in the store.
    slot_id: u128,
    counters: SmallVec<[LimitAndKey; 1]>,
    /// Whether the request has ended. If so, the next call is a release, otherwise a renewal.
    is_ended: bool,
    /// Time since which the call is due. A failure of the call does not change it.
    due_since: Instant,
    /// Time of the scheduled call. `None` while the call is being sent.
    call_at: Option<Instant>,
}

/// A renewal or release at one counter, with the id of its entry.
type SlotCall = (u128, (LimitAndKey, Amendment));

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

    /// Creates the guard of a new slot at these counters, and schedules its renewals. The slot is
    /// not taken yet: the caller charges the counters with the guard's slot id.
    pub fn create_slot_guard(&self, counters: SmallVec<[LimitAndKey; 1]>) -> ConcurrencySlotGuard {
        let slot_id = self.0.new_slot_id();
        let mut state = self.0.state.lock();
        if state.insert_slot(slot_id, counters, Instant::now()) {
            self.wake_or_spawn_task(&mut state);
        }
        ConcurrencySlotGuard {
            slots: self.clone(),
            slot_id,
            request_ends_at: None,
        }
    }

    /// The counters of all queued releases.
    #[cfg(test)]
    pub fn counters_of_queued_releases(&self) -> Vec<LimitAndKey> {
        let state = self.0.state.lock();
        let queued = state.releases.iter();
        queued
            .filter_map(|(_, entry_id)| state.slots.get(entry_id))
            .flat_map(|slot| slot.counters.iter().cloned())
            .collect()
    }

    /// Waits until all queued releases are sent, for at most [`FLUSH_TIMEOUT`].
    pub async fn wait_until_releases_sent(&self) {
        let all_sent = async {
            loop {
                let drained = self.0.drained.notified();
                if self.0.state.lock().ended_count == 0 {
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
        if let Store::Memory(memory) = &self.0.store {
            let counters = state.remove_slot(slot_id);
            drop(state);
            let amendment = Amendment::Release { slot: slot_id };
            for counter in counters.into_iter().flatten() {
                memory.apply_settlements(&[Settlement::from_pending(&(counter, amendment))]);
            }
            return;
        }
        if state.schedule_release(slot_id, Instant::now()) {
            self.wake_or_spawn_task(&mut state);
        }
    }

    fn wake_or_spawn_task(&self, state: &mut ConcurrencySlotsState) {
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

    /// Keeps only the counters for which `is_taken` holds; `untaken` decides what happens to the
    /// slots at all others. Returns `None` if no counter is kept.
    pub fn retain_taken_counters(
        self,
        is_taken: impl Fn(&LimitAndKey) -> bool,
        untaken: UntakenSlotAction,
    ) -> Option<Self> {
        let mut state = self.slots.0.state.lock();
        let slot = state.slots.get_mut(&self.slot_id)?;
        let (taken, rest) = std::mem::take(&mut slot.counters)
            .into_iter()
            .partition(is_taken);
        slot.counters = taken;
        let is_held = !slot.counters.is_empty();
        if let UntakenSlotAction::Release = untaken {
            let entry_id = self.slots.0.new_slot_id();
            if state.insert_ended_slot(entry_id, self.slot_id, rest, Instant::now()) {
                self.slots.wake_or_spawn_task(&mut state);
            }
        }
        drop(state);
        is_held.then_some(self)
    }

    /// Sets the time at which the request has to be ended, if any.
    pub fn set_request_end(&mut self, ends_at: Option<Instant>) {
        self.request_ends_at = ends_at;
    }

    /// Time at which the request has to be ended, if any.
    pub fn request_ends_at(&self) -> Option<Instant> {
        self.request_ends_at
    }
}

impl Drop for ConcurrencySlotGuard {
    fn drop(&mut self) {
        self.slots.release_slot(self.slot_id);
    }
}

impl ConcurrencySlotsState {
    /// Inserts a slot and schedules its renewal. Returns whether it is the next slot to renew.
    fn insert_slot(
        &mut self,
        slot_id: u128,
        counters: SmallVec<[LimitAndKey; 1]>,
        now: Instant,
    ) -> bool {
        let renew_at = next_renewal_at(&counters, now);
        let slot = SlotEntry {
            slot_id,
            counters,
            is_ended: false,
            due_since: renew_at,
            call_at: Some(renew_at),
        };
        self.slots.insert(slot_id, slot);
        self.renewals.insert((renew_at, slot_id));
        self.renewals.first() == Some(&(renew_at, slot_id))
    }

    /// Adds an entry that only releases a slot. Returns whether there is anything to release.
    fn insert_ended_slot(
        &mut self,
        entry_id: u128,
        slot_id: u128,
        counters: SmallVec<[LimitAndKey; 1]>,
        now: Instant,
    ) -> bool {
        let entry = SlotEntry {
            slot_id,
            counters,
            is_ended: false,
            due_since: now,
            call_at: None,
        };
        self.slots.insert(entry_id, entry);
        self.schedule_release(entry_id, now)
    }

    /// Schedules the release of a slot. Returns whether there is anything to release.
    fn schedule_release(&mut self, slot_id: u128, now: Instant) -> bool {
        let Some(slot) = self.slots.get_mut(&slot_id) else {
            return false;
        };
        if slot.counters.is_empty() || self.ended_count >= MAX_ENDED_SLOTS {
            self.remove_slot(slot_id);
            return false;
        }
        if let Some(renew_at) = slot.call_at.replace(now) {
            self.renewals.remove(&(renew_at, slot_id));
        }
        slot.is_ended = true;
        slot.due_since = now;
        self.releases.insert((now, slot_id));
        self.ended_count += 1;
        true
    }

    fn remove_slot(&mut self, slot_id: u128) -> Option<SmallVec<[LimitAndKey; 1]>> {
        let slot = self.slots.remove(&slot_id)?;
        if let Some(renew_at) = slot.call_at {
            self.renewals.remove(&(renew_at, slot_id));
        }
        self.ended_count -= usize::from(slot.is_ended);
        Some(slot.counters)
    }

    /// Time of the next scheduled call, if any.
    fn next_call_at(&self) -> Option<Instant> {
        let queues = [&self.releases, &self.renewals];
        let firsts = queues.iter().filter_map(|queue| queue.first());
        firsts.map(|(call_at, _)| *call_at).min()
    }

    /// Takes a batch of the calls that are due at `now`.
    fn take_due_calls(&mut self, now: Instant) -> Vec<SlotCall> {
        let mut batch = Vec::new();
        for queue in [&mut self.releases, &mut self.renewals] {
            for _ in 0..MAX_BATCH_SLOTS {
                let Some(first) = queue.first().copied().filter(|(at, _)| *at <= now) else {
                    break;
                };
                queue.remove(&first);
                let (_, entry_id) = first;
                let Some(slot) = self.slots.get_mut(&entry_id) else {
                    continue;
                };
                slot.call_at = None;
                let amendment = match slot.is_ended {
                    true => Amendment::Release { slot: slot.slot_id },
                    false => Amendment::Renew { slot: slot.slot_id },
                };
                let calls = slot.counters.iter().cloned();
                batch.extend(calls.map(|counter| (entry_id, (counter, amendment))));
            }
        }
        batch
    }

    /// Schedules the next call of each slot in a batch that was sent at `sent_at`.
    fn schedule_next_calls(
        &mut self,
        batch: &[SlotCall],
        failed_indices: &[usize],
        sent_at: Instant,
    ) {
        let now = Instant::now();
        for (slot_id, _) in failed_indices.iter().filter_map(|index| batch.get(*index)) {
            self.schedule_call_or_remove_slot(*slot_id, |slot| slot.retry_at(now));
        }
        for (slot_id, _) in batch {
            self.schedule_call_or_remove_slot(*slot_id, |slot| {
                slot.due_since = next_renewal_at(&slot.counters, sent_at);
                (!slot.is_ended).then_some(slot.due_since)
            });
        }
    }

    /// Schedules the next call of a slot, or removes the slot if no call follows. Does nothing if a
    /// call is already scheduled: after a failure at another counter, or if the request has ended
    /// during a renewal.
    fn schedule_call_or_remove_slot(
        &mut self,
        slot_id: u128,
        next_call: impl FnOnce(&mut SlotEntry) -> Option<Instant>,
    ) {
        let slot = self.slots.get_mut(&slot_id);
        let Some(slot) = slot.filter(|slot| slot.call_at.is_none()) else {
            return;
        };
        slot.call_at = next_call(slot);
        let Some(call_at) = slot.call_at else {
            self.remove_slot(slot_id);
            return;
        };
        match slot.is_ended {
            true => self.releases.insert((call_at, slot_id)),
            false => self.renewals.insert((call_at, slot_id)),
        };
    }
}

impl SlotEntry {
    /// Time at which a failed call is repeated. `None` for the release of a slot that has expired
    /// in the store.
    fn retry_at(&self, now: Instant) -> Option<Instant> {
        let overdue = now.saturating_duration_since(self.due_since);
        let longest_us = self.counters.iter().map(|(limit, _)| limit.per_us).max();
        let is_expired = overdue > Duration::from_micros(longest_us.unwrap_or_default());
        let pause = overdue.clamp(MIN_RETRY_PAUSE, MAX_RETRY_PAUSE);
        (!self.is_ended || !is_expired).then_some(now + pause)
    }
}

/// Time of the next renewal: a third of the shortest slot TTL after `now`.
fn next_renewal_at(counters: &[LimitAndKey], now: Instant) -> Instant {
    let shortest_us = counters
        .iter()
        .map(|(limit, _)| limit.per_us)
        .min()
        .unwrap_or_default();
    now + Duration::from_micros(shortest_us) / 3
}

/// Renews and releases slots until there are none.
async fn send_renewals_and_releases(slots: Arc<ConcurrencySlotsInner>) {
    loop {
        let now = Instant::now();
        let (batch, next_call) = {
            let mut state = slots.state.lock();
            let batch = state.take_due_calls(now);
            let next_call = state.next_call_at();
            state.is_task_running = !batch.is_empty() || next_call.is_some();
            (batch, next_call)
        };
        if !batch.is_empty() {
            slots.send_batch(&batch, now).await;
        } else if let Some(next_call) = next_call {
            tokio::select! {
                biased;
                () = sleep_until(next_call) => {}
                () = slots.changed.notified() => {}
            }
        } else {
            return;
        }
    }
}

impl ConcurrencySlotsInner {
    fn new_slot_id(&self) -> u128 {
        u128::from(self.instance_id) << 64
            | u128::from(self.next_slot_serial.fetch_add(1, Ordering::Relaxed))
    }

    async fn send_batch(&self, batch: &[SlotCall], now: Instant) {
        let settlements: Vec<_> = batch
            .iter()
            .map(|(_, call)| Settlement::from_pending(call))
            .collect();
        let mut failed_indices = Vec::new();
        if let Err(error) = self.store.apply_settlements(&settlements).await {
            tracing::debug!(
                why = %error,
                "failed to send concurrency-slot renewals or releases to the store"
            );
            failed_indices = error.unconfirmed_indices;
        }
        let mut state = self.state.lock();
        state.schedule_next_calls(batch, &failed_indices, now);
        if state.ended_count == 0 {
            self.drained.notify_waiters();
        }
    }
}
