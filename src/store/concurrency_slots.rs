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

use super::{LimitAndKey, Settlement, Store, wait_until_drained};
use crate::clock::monotonic_now;
use crate::limiter::Amendment;
use crate::policy::SlotRelease;
use crate::telemetry::LogThrottle;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// Maximum number of slots of one worker that wait for their release: about 4 MiB. Further slots
/// are not released: they expire in the store.
const MAX_ENDED_SLOTS: usize = 1 << 14;

/// Maximum number of slots of one worker that stay taken after their exchange: about 8 MiB. Further
/// slots are released at the end of the exchange.
const MAX_KEPT_SLOTS: usize = 10_000;

/// Minimum time between log lines about slots that were released for this reason.
const KEPT_SLOT_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Maximum number of releases, and of renewals, in a batch. A release waits for at most one batch,
/// however many renewals are due.
const MAX_BATCH_SLOTS: usize = 512;

/// Bounds of the pause before a failed call is repeated: as long as the call is overdue.
const MIN_RETRY_PAUSE: Duration = Duration::from_millis(25);
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(1);

/// The slots of one request; dropping it releases them.
#[derive(Debug)]
pub struct ConcurrencySlotGuard {
    slots: Arc<ConcurrencySlots>,
    /// The slot's id at all its counters.
    pub slot_id: u128,
    /// Time at which the request has to be ended, if any.
    pub request_ends_at: Option<Instant>,
    /// What ends the request before.
    pub release: SlotRelease,
}

/// Slots held by the requests of one worker.
#[derive(Debug)]
pub struct ConcurrencySlots {
    store: Store,
    /// Random; makes slot ids unique in the fleet.
    instance_id: u64,
    next_serial: AtomicU64,
    /// Locked by one worker only. It is a mutex because `Store` is `Send`.
    state: Mutex<ConcurrencySlotsState>,
    /// Wakes the task when a call is due earlier than the task expects.
    changed: Notify,
    /// Notified when all releases are sent.
    drained: Notify,
    early_release_log: LogThrottle,
}

#[derive(Debug, Default)]
struct ConcurrencySlotsState {
    /// The slots of requests in flight, by id.
    held: HashMap<u128, SlotEntry, foldhash::fast::RandomState>,
    /// Ids of held slots by the time of their next renewal, except those that are being renewed.
    renewals: BTreeSet<(Instant, u128)>,
    /// Ended slots by the time of their next release and a serial number.
    releases: BTreeMap<(Instant, u64), SlotEntry>,
    /// Number of releases that the task is sending; `None` without a task.
    sending: Option<usize>,
    /// Number of slots that stay taken after their exchange.
    kept_count: usize,
}

/// One request's slot at each of its counters.
#[derive(Clone, Debug)]
struct SlotEntry {
    /// The slot's id in the store.
    slot_id: u128,
    counters: SmallVec<[LimitAndKey; 1]>,
    /// Time since which its renewal or release is due. A failed call does not change it.
    due_since: Instant,
    /// Time of its next call.
    call_at: Instant,
}

/// The renewal or release of a slot at all its counters.
type SlotCall = (SlotEntry, Amendment);

impl ConcurrencySlots {
    pub fn new(store: Store) -> Arc<Self> {
        Arc::new(Self {
            instance_id: match &store {
                Store::Memory(_) => RandomState::new().hash_one(()),
                Store::Redis(path) => path.redis.worker_id(),
            },
            store,
            next_serial: AtomicU64::new(0),
            state: Mutex::default(),
            changed: Notify::new(),
            drained: Notify::new(),
            early_release_log: LogThrottle::new(KEPT_SLOT_LOG_INTERVAL),
        })
    }

    /// Creates the guard of a new slot at these counters, and schedules its renewals. The slot is
    /// not taken yet: the caller charges the counters with the guard's slot id.
    pub fn create_slot_guard(
        self: &Arc<Self>,
        counters: SmallVec<[LimitAndKey; 1]>,
    ) -> ConcurrencySlotGuard {
        let slot_id = u128::from(self.instance_id) << 64 | u128::from(self.new_serial());
        let renew_at = next_renewal_at(&counters, Instant::now());
        let slot = SlotEntry::new(slot_id, counters, renew_at);
        let mut state = self.state.lock();
        state.held.insert(slot_id, slot);
        state.renewals.insert((renew_at, slot_id));
        if state.renewals.first() == Some(&(renew_at, slot_id)) {
            self.wake_or_spawn_task(&mut state);
        }
        ConcurrencySlotGuard {
            slots: Arc::clone(self),
            slot_id,
            request_ends_at: None,
            release: SlotRelease::default(),
        }
    }

    /// Waits until all queued releases are sent, for at most [`super::FLUSH_TIMEOUT`].
    pub async fn wait_until_releases_sent(&self) {
        wait_until_drained(&self.drained, || self.state.lock().ended_count() == 0).await;
    }

    /// Releases a slot of counters in memory at once, and of those in Redis soon.
    fn release_slot(self: &Arc<Self>, slot_id: u128) {
        let mut state = self.state.lock();
        let Some(slot) = state.held.remove(&slot_id) else {
            return;
        };
        state.renewals.remove(&(slot.call_at, slot_id));
        let mut in_redis = SmallVec::new();
        for counter in slot.counters {
            let release = (counter, Amendment::Release { slot: slot_id });
            if !self
                .store
                .apply_in_memory(&Settlement::from_pending(&release))
            {
                in_redis.push(release.0);
            }
        }
        self.enqueue_release(&mut state, slot_id, in_redis);
    }

    /// Queues the release of a slot at these counters. Does nothing if the queue is full.
    fn enqueue_release(
        self: &Arc<Self>,
        state: &mut ConcurrencySlotsState,
        slot_id: u128,
        counters: SmallVec<[LimitAndKey; 1]>,
    ) {
        if !counters.is_empty() && state.ended_count() < MAX_ENDED_SLOTS {
            let slot = SlotEntry::new(slot_id, counters, Instant::now());
            let position = (slot.call_at, self.new_serial());
            state.releases.insert(position, slot);
            self.wake_or_spawn_task(state);
        }
    }

    /// Counts a slot that stays taken after its exchange. Returns whether that is possible.
    fn try_count_kept_slot(&self) -> bool {
        let mut state = self.state.lock();
        let has_room = state.kept_count < MAX_KEPT_SLOTS;
        if has_room {
            state.kept_count += 1;
        } else if let Some(slots) = self.early_release_log.record_occurrence(monotonic_now()) {
            tracing::warn!(
                slots,
                max = MAX_KEPT_SLOTS,
                "too many concurrency slots outlive their exchange; released before max_duration"
            );
        }
        has_room
    }

    fn wake_or_spawn_task(self: &Arc<Self>, state: &mut ConcurrencySlotsState) {
        if state.sending.is_some() {
            return self.changed.notify_one();
        }
        state.sending = Some(0);
        tokio::spawn(send_renewals_and_releases(Arc::clone(self)));
    }

    fn new_serial(&self) -> u64 {
        self.next_serial.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends a batch, and schedules the next calls of its slots.
    async fn send_batch(&self, batch: Vec<SlotCall>, sent_at: Instant) {
        let failed_calls = self.send_calls(&batch).await;
        let (mut state, now) = (self.state.lock(), Instant::now());
        for (slot, amendment) in batch {
            let has_failed = failed_calls.contains(&amendment);
            let retry_at = slot.retry_at(now);
            match amendment {
                Amendment::Renew { .. } if has_failed => {
                    state.schedule_renewal(slot.slot_id, slot.due_since, retry_at);
                }
                Amendment::Renew { .. } => {
                    let renew_at = next_renewal_at(&slot.counters, sent_at);
                    state.schedule_renewal(slot.slot_id, renew_at, renew_at);
                }
                _ if has_failed && !slot.is_expired(now) => {
                    state.releases.insert((retry_at, self.new_serial()), slot);
                }
                _ => {}
            }
        }
        state.sending = Some(0);
        if state.releases.is_empty() {
            self.drained.notify_waiters();
        }
    }

    /// Sends a batch. Returns the amendments that failed at any counter.
    async fn send_calls(&self, batch: &[SlotCall]) -> HashSet<Amendment> {
        let settlements = batch.iter().flat_map(|(slot, amendment)| {
            let counters = slot.counters.iter();
            counters.map(|(limit, key)| Settlement {
                limit,
                key,
                amendment: *amendment,
            })
        });
        let settlements: Vec<Settlement<'_>> = settlements.collect();
        let Err(error) = self.store.apply_settlements(&settlements).await else {
            return HashSet::new();
        };
        tracing::debug!(
            why = %error,
            "failed to send concurrency-slot renewals or releases to the store"
        );
        let unconfirmed = error.unconfirmed.iter();
        unconfirmed.map(|settlement| settlement.amendment).collect()
    }
}

impl ConcurrencySlotGuard {
    /// Keeps only the counters for which `is_taken` holds. If Redis may hold slots at the other
    /// counters, these slots are released; otherwise they are forgotten. Returns `None` if no
    /// counter is kept.
    pub fn retain_taken_counters(
        self,
        is_taken: impl Fn(&LimitAndKey) -> bool,
        may_hold_ungranted: bool,
    ) -> Option<Self> {
        let mut state = self.slots.state.lock();
        let slot = state.held.get_mut(&self.slot_id)?;
        let (taken, rest) = std::mem::take(&mut slot.counters)
            .into_iter()
            .partition(is_taken);
        slot.counters = taken;
        let is_held = !slot.counters.is_empty();
        if may_hold_ungranted {
            self.slots.enqueue_release(&mut state, self.slot_id, rest);
        }
        drop(state);
        is_held.then_some(self)
    }

    /// Time until which the slot stays taken without its client, unless the upstream's response
    /// ends before. `None` if the slot does not outlive its client.
    pub fn held_until(&self) -> Option<Instant> {
        let ends_at = self.request_ends_at;
        ends_at.filter(|_| self.release == SlotRelease::Upstream)
    }

    /// Keeps a slot that outlives its client until [`Self::held_until`], because the upstream may
    /// still work on the request. Releases any other slot, and those of the worker beyond
    /// [`MAX_KEPT_SLOTS`].
    pub fn keep_without_exchange(self) {
        let held_until = self.held_until();
        let Some(held_until) = held_until.filter(|_| self.slots.try_count_kept_slot()) else {
            return;
        };
        tokio::spawn(async move {
            sleep_until(held_until).await;
            self.slots.state.lock().kept_count -= 1;
            drop(self);
        });
    }
}

impl Drop for ConcurrencySlotGuard {
    fn drop(&mut self) {
        self.slots.release_slot(self.slot_id);
    }
}

impl ConcurrencySlotsState {
    /// Number of slots whose request has ended.
    fn ended_count(&self) -> usize {
        self.releases.len() + self.sending.unwrap_or(0)
    }

    /// Time of the next scheduled call, if any.
    fn next_call_at(&self) -> Option<Instant> {
        let release = self.releases.keys().next().map(|(at, _)| *at);
        let renewal = self.renewals.first().map(|(at, _)| *at);
        release.into_iter().chain(renewal).min()
    }

    /// Takes the releases and renewals that are due at `now`, up to the size of a batch. Without
    /// any call, the task ends.
    fn take_due_calls(&mut self, now: Instant) -> Vec<SlotCall> {
        let mut batch = Vec::new();
        while let Some(first) = self.releases.first_entry()
            && first.key().0 <= now
            && batch.len() < MAX_BATCH_SLOTS
        {
            let slot = first.remove();
            let slot_id = slot.slot_id;
            batch.push((slot, Amendment::Release { slot: slot_id }));
        }
        let releases = batch.len();
        for _ in 0..MAX_BATCH_SLOTS {
            let due = self
                .renewals
                .first()
                .filter(|(renew_at, _)| *renew_at <= now);
            let Some((_, slot)) = due.copied() else {
                break;
            };
            self.renewals.pop_first();
            let held = self.held.get(&slot).cloned();
            batch.extend(held.map(|held| (held, Amendment::Renew { slot })));
        }
        let has_calls = !batch.is_empty() || self.next_call_at().is_some();
        self.sending = has_calls.then_some(releases);
        batch
    }

    /// Schedules the next renewal of a slot, unless its request has ended.
    fn schedule_renewal(&mut self, slot_id: u128, due_since: Instant, call_at: Instant) {
        if let Some(slot) = self.held.get_mut(&slot_id) {
            (slot.due_since, slot.call_at) = (due_since, call_at);
            self.renewals.insert((call_at, slot_id));
        }
    }
}

impl SlotEntry {
    fn new(slot_id: u128, counters: SmallVec<[LimitAndKey; 1]>, due_since: Instant) -> Self {
        Self {
            slot_id,
            counters,
            due_since,
            call_at: due_since,
        }
    }

    /// Time at which a failed call is repeated.
    fn retry_at(&self, now: Instant) -> Instant {
        let overdue = now.saturating_duration_since(self.due_since);
        now + overdue.clamp(MIN_RETRY_PAUSE, MAX_RETRY_PAUSE)
    }

    /// Whether an ended slot has expired in the store, which nothing renewed since.
    fn is_expired(&self, now: Instant) -> bool {
        let longest_us = self.counters.iter().map(|(limit, _)| limit.per_us).max();
        now.saturating_duration_since(self.due_since)
            > Duration::from_micros(longest_us.unwrap_or_default())
    }
}

/// Time of the next renewal: a third of the shortest slot TTL after `now`.
fn next_renewal_at(counters: &[LimitAndKey], now: Instant) -> Instant {
    let shortest_us = counters.iter().map(|(limit, _)| limit.per_us).min();
    now + Duration::from_micros(shortest_us.unwrap_or_default()) / 3
}

/// Renews and releases slots until there are none.
async fn send_renewals_and_releases(slots: Arc<ConcurrencySlots>) {
    loop {
        let now = Instant::now();
        let (batch, next_call) = {
            let mut state = slots.state.lock();
            (state.take_due_calls(now), state.next_call_at())
        };
        if !batch.is_empty() {
            slots.send_batch(batch, now).await;
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

#[cfg(test)]
mod test_access {
    use super::*;

    impl ConcurrencySlots {
        /// The counters of all queued releases.
        pub fn counters_of_queued_releases(&self) -> Vec<LimitAndKey> {
            let state = self.state.lock();
            let queued = state.releases.values();
            queued.flat_map(|slot| slot.counters.clone()).collect()
        }
    }
}
