//! Settlements of costs that become known after the decision, on their way to the store.
//!
//! The memory store applies settlements at once. For Redis, settlements are queued and sent in the
//! background. If sending fails, further charges of `local` policies are kept and written back
//! after the outage ([`Store::apply_settlements`]). All other settlements that failed are lost and
//! counted.

use super::{LimitAndKey, Settlement, Store, wait_until_drained};
use crate::limiter::Amendment;
use crate::telemetry::metrics::WorkerMetrics;
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::sync::Notify;

/// Maximum number of queued settlements of one worker: about 4 MiB. Redis takes some thousands of
/// settlements per second even at a distance of 5 ms. Credits may use only half of the queue,
/// because a lost credit makes a limit too strict, but a lost charge makes it too lax.
const MAX_PENDING_SETTLEMENTS: usize = 1 << 14;

/// Queue of one worker's settlements. Cheap to clone.
#[derive(Clone, Debug)]
pub struct SettlementQueue(Arc<SharedSettlementQueue>);

#[derive(Debug)]
struct SharedSettlementQueue {
    store: Store,
    metrics: Arc<WorkerMetrics>,
    /// Locked by one worker only. It is a mutex because `Store` is `Send`.
    state: Mutex<SettlementQueueState>,
    /// Notified when the queue is empty and all settlements are sent.
    drained: Notify,
}

#[derive(Debug, Default)]
struct SettlementQueueState {
    pending: Vec<(LimitAndKey, Amendment)>,
    /// Whether a task is sending settlements. The task ends when the queue is empty.
    is_task_running: bool,
}

impl SettlementQueue {
    /// Creates an empty queue that counts lost settlements in the worker's own `metrics`.
    pub fn new(store: Store, metrics: Arc<WorkerMetrics>) -> Self {
        Self(Arc::new(SharedSettlementQueue {
            store,
            metrics,
            state: Mutex::default(),
            drained: Notify::new(),
        }))
    }

    /// Applies settlements to the memory store at once. Settlements for Redis are queued and sent
    /// soon.
    pub fn apply_or_enqueue(
        &self,
        settlements: impl IntoIterator<Item = (LimitAndKey, Amendment)>,
    ) {
        if let Store::Memory(memory) = &self.0.store {
            for settlement in settlements {
                memory.apply_settlements(&[Settlement::from_pending(&settlement)]);
            }
            return;
        }
        let mut state = self.0.state.lock();
        let lost_count = settlements
            .into_iter()
            .map(|(counter, amendment)| state.push(counter, amendment))
            .filter(|is_queued| !is_queued)
            .count();
        self.0.metrics.record_lost_settlements(lost_count);
        if !state.pending.is_empty() && !std::mem::replace(&mut state.is_task_running, true) {
            tokio::spawn(send_settlements(Arc::clone(&self.0)));
        }
    }

    /// Waits until all queued settlements are sent, for at most [`super::FLUSH_TIMEOUT`].
    pub async fn wait_until_all_sent(&self) {
        let is_idle = || !self.0.state.lock().is_task_running;
        wait_until_drained(&self.0.drained, is_idle).await;
    }
}

impl SettlementQueueState {
    /// Queues a settlement if there is space. Returns whether it was queued.
    fn push(&mut self, counter: LimitAndKey, amendment: Amendment) -> bool {
        let max_pending = match amendment {
            Amendment::Credit { .. } => MAX_PENDING_SETTLEMENTS / 2,
            _ => MAX_PENDING_SETTLEMENTS,
        };
        let is_queued = self.pending.len() < max_pending;
        if is_queued {
            self.pending.push((counter, amendment));
        }
        is_queued
    }
}

/// Sends settlements until the queue is empty.
async fn send_settlements(queue: Arc<SharedSettlementQueue>) {
    loop {
        let batch = {
            let mut state = queue.state.lock();
            state.is_task_running = !state.pending.is_empty();
            std::mem::take(&mut state.pending)
        };
        if batch.is_empty() {
            return queue.drained.notify_waiters();
        }
        let settlements: Vec<_> = batch.iter().map(Settlement::from_pending).collect();
        if let Err(error) = queue.store.apply_settlements(&settlements).await {
            tracing::debug!(why = %error, "failed to send settlements to the store");
            let lost_count = error.unconfirmed_indices.len();
            queue.metrics.record_lost_settlements(lost_count);
        }
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
        let mut state = SettlementQueueState::default();
        let mut push_many = |amendment: Amendment, times: usize| -> usize {
            let counter = || (limit, KeyBuilder::new("p").finish());
            (0..times)
                .filter(|_| state.push(counter(), amendment))
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
        assert_eq!(state.pending.len(), MAX_PENDING_SETTLEMENTS);
        state.pending.clear();
        assert!(
            state.push((limit, KeyBuilder::new("p").finish()), credit),
            "an empty queue takes credits again"
        );
    }
}
