//! Open connections of all workers, and the order in which they are closed to free memory.

use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::Notify;

use super::connection_activity::{ConnectionActivity, OpenConnection};

/// Connections above this size are closed first. An ordinary request takes less.
const LARGE_CONNECTION_BYTES: usize = 32 * 1024;

/// Connections chosen in one scan. If closing them does not free enough, the next growth causes
/// another scan.
const MAX_CLOSES_PER_SCAN: usize = 1024;

/// Open connections of all workers.
#[derive(Debug)]
pub(super) struct ConnectionRegistry {
    workers: Box<[WorkerConnections]>,
}

/// Open connections of one worker.
#[derive(Debug, Default)]
struct WorkerConnections {
    by_id: Mutex<HashMap<u64, Arc<ConnectionActivity>>>,
    /// Connections that the worker has to close.
    memory_closes: Mutex<Vec<u64>>,
    close_signal: Notify,
}

/// A connection that can be closed to free its memory.
#[derive(Debug)]
pub(super) struct ClosableConnection {
    id: u64,
    worker: usize,
    pub(super) bytes: usize,
    /// Start of the idle time, in milliseconds. The maximum while a request is active.
    idle_since_ms: u64,
    is_from_trusted_proxy: bool,
}

impl ClosableConnection {
    /// Whether the connection takes more than an ordinary request.
    pub(super) fn is_large(&self) -> bool {
        self.bytes > LARGE_CONNECTION_BYTES
    }

    /// Connections of trusted proxies come last. Large connections come first, then those without
    /// a request. Of both, the largest comes first, and of equal ones the one that is idle longest.
    fn close_order(&self) -> impl Ord + use<> {
        let has_request = self.idle_since_ms == u64::MAX;
        let rank = (
            self.is_from_trusted_proxy,
            !self.is_large(),
            !self.is_large() && has_request,
        );
        (rank, Reverse(self.bytes), self.idle_since_ms)
    }
}

impl ConnectionRegistry {
    pub(super) fn new(workers: usize) -> Self {
        Self {
            workers: (0..workers).map(|_| WorkerConnections::default()).collect(),
        }
    }

    pub(super) fn insert(&self, open: &OpenConnection) {
        if let Some(worker) = self.workers.get(open.worker) {
            let mut by_id = worker.by_id.lock();
            by_id.insert(open.id, Arc::clone(&open.activity));
        }
    }

    pub(super) fn remove(&self, worker: usize, id: u64) {
        if let Some(worker) = self.workers.get(worker) {
            worker.by_id.lock().remove(&id);
        }
    }

    /// Connections that can be closed, in the order in which they should be; at most
    /// [`MAX_CLOSES_PER_SCAN`].
    pub(super) fn closable_connections(&self) -> Vec<ClosableConnection> {
        let mut closable = Vec::new();
        for (worker, connections) in self.workers.iter().enumerate() {
            let by_id = connections.by_id.lock();
            closable.extend(by_id.iter().filter_map(|(id, activity)| {
                Some(ClosableConnection {
                    id: *id,
                    worker,
                    bytes: activity.closable_bytes()?,
                    idle_since_ms: activity.idle_since_ms().unwrap_or(u64::MAX),
                    is_from_trusted_proxy: activity.is_from_trusted_proxy(),
                })
            }));
        }
        if closable.len() > MAX_CLOSES_PER_SCAN {
            closable
                .select_nth_unstable_by_key(MAX_CLOSES_PER_SCAN, ClosableConnection::close_order);
            closable.truncate(MAX_CLOSES_PER_SCAN);
        }
        closable.sort_unstable_by_key(ClosableConnection::close_order);
        closable
    }

    /// Makes the worker close this connection, unless it has ended. `begin_close` is called with
    /// its size before the worker can close it. Returns whether the connection will be closed.
    pub(super) fn close(&self, chosen: &ClosableConnection, begin_close: impl Fn(usize)) -> bool {
        let Some(worker) = self.workers.get(chosen.worker) else {
            return false;
        };
        let by_id = worker.by_id.lock();
        let Some(activity) = by_id.get(&chosen.id) else {
            return false;
        };
        let is_claimed = activity.begin_memory_close(chosen.bytes);
        if is_claimed {
            begin_close(chosen.bytes);
            worker.memory_closes.lock().push(chosen.id);
            worker.close_signal.notify_one();
        }
        is_claimed
    }

    /// Waits for connections that this worker has to close.
    pub(super) async fn next_memory_closes(&self, worker: usize) -> Vec<u64> {
        match self.workers.get(worker) {
            Some(worker) => {
                worker.close_signal.notified().await;
                std::mem::take(&mut *worker.memory_closes.lock())
            }
            None => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::{Instant, advance};

    #[tokio::test(start_paused = true)]
    async fn large_connections_come_first_and_requests_last() {
        let epoch = Instant::now();
        let registry = ConnectionRegistry::new(2);
        let kib = |n: usize| n * 1024;
        let sizes = [kib(4), kib(84), kib(24), kib(4), kib(24), kib(84), kib(99)];
        let mut activities = Vec::new();
        for (id, bytes) in (0..).zip(sizes) {
            advance(Duration::from_millis(1)).await;
            let activity = Arc::new(ConnectionActivity::new(epoch));
            activity.set_memory_bytes(bytes);
            let worker = usize::try_from(id % 2).unwrap();
            registry.insert(&OpenConnection {
                id,
                worker,
                activity: Arc::clone(&activity),
            });
            activities.push(activity);
        }
        activities[2].set_busy();
        activities[5].set_busy();
        let order = |registry: &ConnectionRegistry| {
            let closable = registry.closable_connections();
            closable.iter().map(|one| one.id).collect::<Vec<_>>()
        };
        assert_eq!(order(&registry), [6, 1, 5, 4, 0, 3, 2]);
        activities[6].set_unclosable();
        let chosen = registry.closable_connections();
        assert!(registry.close(&chosen[0], |bytes| assert_eq!(bytes, kib(84))));
        assert!(!registry.close(&chosen[0], |_| panic!("closed twice")));
        registry.remove(0, 4);
        assert_eq!(order(&registry), [5, 0, 3, 2]);
        assert_eq!(registry.next_memory_closes(1).await, [1]);
        activities[5].set_from_trusted_proxy();
        assert_eq!(order(&registry), [0, 3, 2, 5]);
    }
}
