//! Counters of open connections, panics and connection limit hits.

use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::connection_activity::{ConnectionActivity, OpenConnection};
use super::connection_registry::ConnectionRegistry;
use crate::proxy::client_counts::ClientCounts;

/// Live counters of the server, shared with metrics.
#[derive(Clone, Debug)]
pub struct ServerLoad(Arc<LoadCounters>);

#[derive(Debug)]
struct LoadCounters {
    open_connections: Box<[AtomicUsize]>,
    /// Start of the clock of [`ConnectionActivity`].
    epoch: Instant,
    last_connection_id: AtomicU64,
    registry: ConnectionRegistry,
    /// Held by the worker that chooses connections to close for memory.
    memory_choice: Mutex<()>,
    /// Connections of each client to the proxy listener.
    client_counts: ClientCounts,
    /// Estimated memory of all client connections.
    connection_bytes: AtomicUsize,
    /// The part of `connection_bytes` that belongs to connections being closed to free memory.
    closing_bytes: AtomicUsize,
    /// The part of `connection_bytes` that belongs to connections which are not closed to free it.
    unclosable_bytes: AtomicUsize,
    panics: AtomicU64,
    connection_limit_hits: AtomicU64,
}

/// Estimated memory of the client connections.
pub(super) struct ConnectionBytes {
    /// Memory of all connections.
    pub(super) used: usize,
    /// The part that is being freed.
    pub(super) closing: usize,
    /// The part that cannot be freed by closing connections.
    pub(super) unclosable: usize,
}

impl ServerLoad {
    /// Creates counters for `threads` workers.
    pub(super) fn new(threads: usize) -> Self {
        let open_connections = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        Self(Arc::new(LoadCounters {
            open_connections,
            epoch: Instant::now(),
            last_connection_id: AtomicU64::new(0),
            registry: ConnectionRegistry::new(threads),
            memory_choice: Mutex::default(),
            client_counts: ClientCounts::default(),
            connection_bytes: AtomicUsize::new(0),
            closing_bytes: AtomicUsize::new(0),
            unclosable_bytes: AtomicUsize::new(0),
            panics: AtomicU64::new(0),
            connection_limit_hits: AtomicU64::new(0),
        }))
    }

    /// Number of open connections.
    pub fn open_connections(&self) -> usize {
        self.0
            .open_connections
            .iter()
            .map(|counter| counter.load(Ordering::Relaxed))
            .sum()
    }

    /// Number of connection tasks and HTTP/2 stream tasks that panicked. Each panic is a bug.
    pub fn panic_count(&self) -> u64 {
        self.0.panics.load(Ordering::Relaxed)
    }

    /// Number of times that a new connection met `max_connections` open ones.
    pub fn connection_limit_hits(&self) -> u64 {
        self.0.connection_limit_hits.load(Ordering::Relaxed)
    }

    /// Creates the entry of a new connection of `worker`.
    pub(super) fn open_connection(&self, worker: usize) -> OpenConnection {
        OpenConnection {
            id: self.0.last_connection_id.fetch_add(1, Ordering::Relaxed),
            worker,
            activity: Arc::new(ConnectionActivity::new(self.0.epoch)),
        }
    }

    /// Replaces the estimate of one connection and returns the sum of all.
    pub(super) fn update_connection_bytes(&self, before: usize, after: usize) -> usize {
        update_sum(&self.0.connection_bytes, before, after)
    }

    /// Replaces the estimate of one connection that is not closed to free its memory.
    pub(super) fn update_unclosable_bytes(&self, before: usize, after: usize) {
        update_sum(&self.0.unclosable_bytes, before, after);
    }

    /// Estimated memory of the client connections.
    pub(super) fn connection_bytes(&self) -> ConnectionBytes {
        let load = |sum: &AtomicUsize| sum.load(Ordering::Relaxed);
        ConnectionBytes {
            closing: load(&self.0.closing_bytes),
            unclosable: load(&self.0.unclosable_bytes),
            used: load(&self.0.connection_bytes),
        }
    }

    pub(super) fn connection_registry(&self) -> &ConnectionRegistry {
        &self.0.registry
    }

    /// Lets this worker choose connections to close, one worker at a time.
    pub(super) fn lock_memory_choice(&self) -> MutexGuard<'_, ()> {
        self.0.memory_choice.lock()
    }

    /// Records that a connection of this size is being closed to free its memory.
    pub(super) fn begin_memory_close(&self, bytes: usize) {
        self.0.closing_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Records that a connection of this size was closed.
    pub(super) fn end_memory_close(&self, bytes: usize) {
        self.0.closing_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn client_counts(&self) -> &ClientCounts {
        &self.0.client_counts
    }

    pub(super) fn record_panic(&self) {
        self.0.panics.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn record_connection_limit_hit(&self) {
        self.0.connection_limit_hits.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of open connections of one worker.
    pub(super) fn worker_open_connections(&self, worker: usize) -> usize {
        self.0
            .open_connections
            .get(worker)
            .map_or(usize::MAX, |counter| counter.load(Ordering::Relaxed))
    }
}

/// Replaces a part of a sum and returns the sum.
fn update_sum(sum: &AtomicUsize, before: usize, after: usize) -> usize {
    match after.checked_sub(before) {
        Some(more) => sum.fetch_add(more, Ordering::Relaxed) + more,
        None => {
            let less = before - after;
            sum.fetch_sub(less, Ordering::Relaxed) - less
        }
    }
}

/// Counts a connection of a worker, and holds its connection slot, until it is dropped.
pub(super) struct ConnectionCountGuard {
    load: ServerLoad,
    worker: usize,
    _permit: OwnedSemaphorePermit,
}

impl ConnectionCountGuard {
    pub(super) fn new(load: &ServerLoad, worker: usize, permit: OwnedSemaphorePermit) -> Self {
        if let Some(counter) = load.0.open_connections.get(worker) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        Self {
            load: load.clone(),
            worker,
            _permit: permit,
        }
    }
}

impl Drop for ConnectionCountGuard {
    fn drop(&mut self) {
        if let Some(counter) = self.load.0.open_connections.get(self.worker) {
            counter.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
