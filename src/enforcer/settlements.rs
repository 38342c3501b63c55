//! Keeps the slots that requests in flight have taken, and gives them back. What else is known late goes to the store
//! the same way.
//!
//! A slot is a lease in the store (see `limiter/concurrency.rs`). It is renewed at a third of its time for as long as
//! its [`ConcurrencySlotGuard`] lives, and given back when that is dropped, whatever the reason: the response has ended, the client
//! has left, or nobody knows whether the store has heard the question. What fails is not tried again: a slot that was
//! not given back ends by itself, and the next renewal takes back one that has lapsed.

use crate::limiter::{Amendment, Key, Limit};
use crate::store::{Settlement, Store};
use crate::telemetry::metrics::WorkerMetrics;
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
pub(super) struct SettlementQueue(Arc<SettlementQueueInner>);

/// The slots of one request; dropped, they are given back.
#[derive(Debug)]
pub struct ConcurrencySlotGuard {
    settlements: SettlementQueue,
    slot_id: u128,
    /// When the request has to be ended.
    ends_at: Option<Instant>,
}

/// A counter of slots.
pub(super) type CounterRef = (Limit, Key);

#[derive(Debug)]
struct SettlementQueueInner {
    store: Store,
    metrics_shard: Arc<WorkerMetrics>,
    /// Distinguishes this keeper from all others of the fleet.
    instance_id: u64,
    next_slot_serial: AtomicU64,
    state: Mutex<SettlementQueueState>,
    /// There is something to do earlier than was known.
    changed: Notify,
    /// What was to be said has been said.
    drained: Notify,
}

/// One request's slot.
#[derive(Debug)]
struct HeldSlot {
    counters: SmallVec<[CounterRef; 1]>,
    /// When it is to be renewed.
    renew_at: Instant,
}

#[derive(Debug, Default)]
struct SettlementQueueState {
    held_slots: HashMap<u128, HeldSlot, foldhash::fast::RandomState>,
    /// When to renew which.
    renewals: BTreeSet<(Instant, u128)>,
    /// What the store is to be told next.
    pending: Vec<(CounterRef, Amendment)>,
    /// Whether a task looks after them.
    is_task_running: bool,
    /// Whether it is just telling the store.
    is_sending: bool,
}

impl SettlementQueue {
    /// Counts what is lost with the worker's own shard.
    pub(super) fn new(store: Store, metrics_shard: Arc<WorkerMetrics>) -> Self {
        Self(Arc::new(SettlementQueueInner {
            store,
            metrics_shard,
            instance_id: RandomState::new().hash_one(()),
            next_slot_serial: AtomicU64::new(0),
            state: Mutex::default(),
            changed: Notify::new(),
            drained: Notify::new(),
        }))
    }

    /// Begins to hold a slot at each of the places, which it is about to take there.
    pub(super) fn reserve_slots(
        &self,
        counters: SmallVec<[CounterRef; 1]>,
    ) -> ConcurrencySlotGuard {
        let slot = u128::from(self.0.instance_id) << 64
            | u128::from(self.0.next_slot_serial.fetch_add(1, Ordering::Relaxed));
        let mut state = self.0.state.lock();
        if state.insert_slot(slot, counters, Instant::now()) {
            self.ensure_task(&mut state);
        }
        ConcurrencySlotGuard {
            settlements: self.clone(),
            slot_id: slot,
            ends_at: None,
        }
    }

    /// Waits until what is known so far has been told to the store, but not for long.
    pub(super) async fn flush(&self) {
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

    /// Tells the store, memory at once and Redis soon.
    pub(super) fn enqueue(&self, settlements: impl IntoIterator<Item = (CounterRef, Amendment)>) {
        if let Store::Memory(memory) = &self.0.store {
            for ((limit, key), amendment) in settlements {
                memory.apply_settlements(&[Settlement {
                    limit: &limit,
                    key: &key,
                    amendment,
                }]);
            }
            return;
        }
        let mut state = self.0.state.lock();
        let lost: usize = settlements
            .into_iter()
            .map(|(place, amendment)| state.push_pending(place, amendment))
            .sum();
        self.0.metrics_shard.record_lost_settlements(lost);
        if !state.pending.is_empty() {
            self.ensure_task(&mut state);
        }
    }

    fn ensure_task(&self, state: &mut SettlementQueueState) {
        if std::mem::replace(&mut state.is_task_running, true) {
            self.0.changed.notify_one();
        } else {
            tokio::spawn(run_settlement_task(self.clone()));
        }
    }
}

/// What waits to be told at most, of one worker: about 4 MiB. Redis hears of some thousands per second even where it is
/// 5 ms away. Beyond half of that nothing is given back any more, which is strict: debts, of which none should be
/// missing, have the rest.
const MAX_PENDING: usize = 1 << 14;

/// The longest that an ending process waits for what it still has to tell.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

impl ConcurrencySlotGuard {
    /// The slot's id at all its places.
    pub(super) fn slot_id(&self) -> u128 {
        self.slot_id
    }

    /// Forgets the places where the slot was certainly not taken. `None` if that is everywhere.
    pub(super) fn retain_taken(self, is_taken: impl Fn(&CounterRef) -> bool) -> Option<Self> {
        let mut slots = self.settlements.0.state.lock();
        let HeldSlot { counters, .. } = slots.held_slots.get_mut(&self.slot_id)?;
        counters.retain(|place| is_taken(place));
        let is_held = !counters.is_empty();
        drop(slots);
        is_held.then_some(self)
    }

    pub(super) fn set_end(&mut self, ends_at: Option<Instant>) {
        self.ends_at = ends_at;
    }

    /// When the request has to be ended, if ever.
    pub fn ends_at(&self) -> Option<Instant> {
        self.ends_at
    }
}

impl Drop for ConcurrencySlotGuard {
    fn drop(&mut self) {
        let Some(counters) = self.settlements.0.state.lock().remove_slot(self.slot_id) else {
            return;
        };
        let amendment = Amendment::Release { slot: self.slot_id };
        self.settlements
            .enqueue(counters.into_iter().map(|place| (place, amendment)));
    }
}

/// When to renew what is held at places since `now`.
fn next_renewal(counters: &[CounterRef], now: Instant) -> Instant {
    let shortest_us = counters
        .iter()
        .map(|(limit, _)| limit.per_us)
        .min()
        .unwrap_or_default();
    now + Duration::from_micros(shortest_us) / 3
}

/// Renews and gives back until there is nothing left to keep.
async fn run_settlement_task(keeper: SettlementQueue) {
    let shared = &*keeper.0;
    loop {
        let (batch, next) = {
            let mut state = shared.state.lock();
            let late = state.take_due(Instant::now());
            let next = state.renewals.first().map(|(due, _)| *due);
            state.is_sending = !late.is_empty();
            state.is_task_running = state.is_sending || next.is_some();
            (late, next)
        };
        if !batch.is_empty() {
            let settlements: Vec<_> = batch
                .iter()
                .map(|((limit, key), amendment)| Settlement {
                    limit,
                    key,
                    amendment: *amendment,
                })
                .collect();
            if let Err(error) = shared.store.apply_settlements(&settlements).await {
                tracing::debug!(why = %error, "slots or settlements were not told");
                let lost = error
                    .unsent_indices
                    .iter()
                    .filter_map(|place| settlements.get(*place))
                    .filter(|late| is_cost_settlement(late.amendment));
                shared.metrics_shard.record_lost_settlements(lost.count());
            }
            continue;
        }
        shared.drained.notify_waiters();
        let Some(next) = next else { return };
        tokio::select! {
            () = sleep_until(next) => {}
            () = shared.changed.notified() => {}
        }
    }
}

/// Whether it is what an estimate turned out to be, and no slot.
fn is_cost_settlement(amendment: Amendment) -> bool {
    matches!(amendment, Amendment::Charge(_) | Amendment::Credit { .. })
}

impl SettlementQueueState {
    fn is_drained(&self) -> bool {
        self.pending.is_empty() && !self.is_sending
    }

    /// Whether it is the next to be renewed.
    fn insert_slot(
        &mut self,
        slot: u128,
        counters: SmallVec<[CounterRef; 1]>,
        now: Instant,
    ) -> bool {
        let due = next_renewal(&counters, now);
        self.renewals.insert((due, slot));
        self.held_slots.insert(
            slot,
            HeldSlot {
                counters,
                renew_at: due,
            },
        );
        self.renewals.first() == Some(&(due, slot))
    }

    fn remove_slot(&mut self, slot: u128) -> Option<SmallVec<[CounterRef; 1]>> {
        let HeldSlot {
            counters,
            renew_at: due,
        } = self.held_slots.remove(&slot)?;
        self.renewals.remove(&(due, slot));
        Some(counters)
    }

    /// Has the store told, if there is room. Returns how many settlements are lost: one or none.
    fn push_pending(&mut self, counter: CounterRef, amendment: Amendment) -> usize {
        let is_credit = matches!(amendment, Amendment::Credit { .. });
        let max_pending = if is_credit {
            MAX_PENDING / 2
        } else {
            MAX_PENDING
        };
        if self.pending.len() >= max_pending {
            return usize::from(is_cost_settlement(amendment));
        }
        self.pending.push((counter, amendment));
        0
    }

    /// What the store has to be told at `now`.
    fn take_due(&mut self, now: Instant) -> Vec<(CounterRef, Amendment)> {
        let mut settlements = std::mem::take(&mut self.pending);
        while let Some(&(at, slot)) = self.renewals.first().filter(|(at, _)| *at <= now) {
            self.renewals.remove(&(at, slot));
            let Some(held) = self.held_slots.get_mut(&slot) else {
                continue;
            };
            held.renew_at = next_renewal(&held.counters, now);
            self.renewals.insert((held.renew_at, slot));
            settlements.extend(
                held.counters
                    .iter()
                    .map(|place| (place.clone(), Amendment::Renew { slot })),
            );
        }
        settlements
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{Algorithm, KeyBuilder};

    #[test]
    fn a_full_queue_drops_credits_before_further_charges() {
        let limit = Limit {
            requests: 9,
            per_us: 1_000_000,
            algorithm: Algorithm::SlidingLog,
        };
        let mut state = SettlementQueueState::default();
        let mut enqueue_times = |amendment: Amendment, times: usize| -> usize {
            let counter = || (limit, KeyBuilder::new("p").finish());
            (0..times)
                .map(|_| state.push_pending(counter(), amendment))
                .sum()
        };
        let credit = Amendment::Credit { units: 1, at_us: 1 };
        assert_eq!(enqueue_times(credit, MAX_PENDING), MAX_PENDING / 2);
        assert_eq!(
            enqueue_times(Amendment::Charge(1), MAX_PENDING),
            MAX_PENDING / 2
        );
        assert_eq!(
            enqueue_times(Amendment::Release { slot: 1 }, 1),
            0,
            "no settlement"
        );
        assert_eq!(state.take_due(Instant::now()).len(), MAX_PENDING);
        assert_eq!(
            state.push_pending((limit, KeyBuilder::new("p").finish()), credit),
            0,
            "there is room again"
        );
    }
}
