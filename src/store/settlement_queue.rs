//! Settlements of costs that become known after the decision, on their way to the store.
//!
//! Settlements of counters in memory are applied at once. For Redis, settlements are queued and
//! sent in the background. If sending fails, further charges of `local` policies are kept and
//! written back after the outage ([`Store::apply_settlements`]). All other settlements that failed
//! are lost and counted.

use super::{PendingSettlement, Settlement, Store};
use crate::limiter::Amendment;
use crate::telemetry::metrics::WorkerMetrics;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::timeout;

/// Maximum number of queued settlements of one worker: about 4 MiB. Redis takes some thousands of
/// settlements per second even at a distance of 5 ms. Credits may use only half of the queue,
/// because a lost credit makes a limit too strict, but a lost charge makes it too lax.
const MAX_PENDING_SETTLEMENTS: usize = 1 << 14;

/// Queue of one worker's settlements.
#[derive(Debug)]
pub struct SettlementQueue {
    store: Store,
    metrics: Arc<WorkerMetrics>,
    /// Locked by one worker only. It is a mutex because `Store` is `Send`.
    queued: Mutex<QueuedSettlements>,
    /// The number of the newest batch that Redis has answered, or that has failed.
    answered_batch: watch::Sender<u64>,
}

/// The next batch of settlements. Batches are numbered from 1.
#[derive(Debug, Default)]
struct QueuedSettlements {
    pending: Vec<PendingSettlement>,
    /// Number of the batch with the pending settlements, or of the last batch if none are pending.
    last_batch: u64,
}

impl SettlementQueue {
    /// Creates an empty queue that counts lost settlements in the worker's own `metrics`.
    pub fn new(store: Store, metrics: Arc<WorkerMetrics>) -> Arc<Self> {
        Arc::new(Self {
            store,
            metrics,
            queued: Mutex::default(),
            answered_batch: watch::Sender::default(),
        })
    }

    /// Applies settlements of counters in memory at once. Settlements for Redis are queued and sent
    /// soon.
    pub fn apply_or_enqueue(
        self: &Arc<Self>,
        settlements: impl IntoIterator<Item = PendingSettlement>,
    ) {
        let is_in_redis = |pending: &PendingSettlement| {
            !(self.store).apply_in_memory(&Settlement::from_pending(pending))
        };
        let mut settlements = settlements.into_iter().filter(is_in_redis).peekable();
        if settlements.peek().is_none() {
            return;
        }
        let mut queued = self.queued.lock();
        if queued.pending.is_empty() {
            if *self.answered_batch.borrow() == queued.last_batch {
                tokio::spawn(send_settlements(Arc::clone(self)));
            }
            queued.last_batch += 1;
        }
        let is_lost = |settlement| !enqueue_settlement(&mut queued.pending, settlement);
        let lost_count = settlements.map(is_lost).filter(|is_lost| *is_lost).count();
        self.metrics.lost_settlements.add(lost_count as u64);
    }

    /// The store that settlements go to.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Counts a response that does not report its cost.
    pub fn record_unreported_cost(&self) {
        self.metrics.unreported_costs.add(1);
    }

    /// Counts a response that was cut off.
    pub fn record_cut_off(&self) {
        self.metrics.cut_offs.add(1);
    }

    /// Waits until the settlements that are queued now are applied or lost.
    pub async fn wait_until_applied(&self, at_most: Duration) {
        let last_batch = self.queued.lock().last_batch;
        let mut answered = self.answered_batch.subscribe();
        let is_applied = answered.wait_for(|answered| *answered >= last_batch);
        drop(timeout(at_most, is_applied).await);
    }
}

/// Queues a settlement if there is space. Returns whether it was queued.
fn enqueue_settlement(pending: &mut Vec<PendingSettlement>, settlement: PendingSettlement) -> bool {
    let max_pending = match settlement.1 {
        Amendment::Credit { .. } => MAX_PENDING_SETTLEMENTS / 2,
        _ => MAX_PENDING_SETTLEMENTS,
    };
    let is_queued = pending.len() < max_pending;
    if is_queued {
        pending.push(settlement);
    }
    is_queued
}

/// Sends settlements until the queue is empty.
async fn send_settlements(queue: Arc<SettlementQueue>) {
    loop {
        let (mut batch, number) = {
            let mut queued = queue.queued.lock();
            (std::mem::take(&mut queued.pending), queued.last_batch)
        };
        if batch.is_empty() {
            return;
        }
        // Credits of one counter, side by side, take Redis as long as one of them.
        batch.sort_by_key(|((limit, key), _)| (key.id(), limit.per_us));
        let settlements: Vec<_> = batch.iter().map(Settlement::from_pending).collect();
        if let Err(error) = queue.store.apply_settlements(&settlements).await {
            tracing::debug!(why = %error, "failed to send settlements to the store");
            let lost_count = error.unconfirmed.len();
            queue.metrics.lost_settlements.add(lost_count as u64);
        }
        queue.answered_batch.send_replace(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{Algorithm, KeyBuilder, Limit};

    #[test]
    fn a_full_queue_drops_credits_before_further_charges() {
        let limit = Limit {
            requests: 9,
            per_us: 1_000_000,
            algorithm: Algorithm::SlidingLog,
        };
        let mut pending = Vec::new();
        let mut push_many = |amendment: Amendment, times: usize| -> usize {
            let counter = || (limit, KeyBuilder::new("p").finish());
            (0..times)
                .filter(|_| enqueue_settlement(&mut pending, (counter(), amendment)))
                .count()
        };
        let credit = Amendment::Credit { units: 1, at_us: 1 };
        assert_eq!(
            push_many(credit, MAX_PENDING_SETTLEMENTS),
            MAX_PENDING_SETTLEMENTS / 2
        );
        assert_eq!(
            push_many(Amendment::Charge(1), MAX_PENDING_SETTLEMENTS),
            MAX_PENDING_SETTLEMENTS / 2
        );
        assert_eq!(pending.len(), MAX_PENDING_SETTLEMENTS);
        pending.clear();
        assert!(
            enqueue_settlement(
                &mut pending,
                ((limit, KeyBuilder::new("p").finish()), credit)
            ),
            "an empty queue takes credits again"
        );
    }
}
