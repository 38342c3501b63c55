//! The open connections of all workers, their memory, and counters of the server.
//!
//! The sizes of connections are estimates: see [`super::connection_memory`]. They change when a head
//! takes several reads, when a client does not read, and when a connection becomes idle; other
//! requests cost nothing here. While connections are being closed for the memory budget, no other
//! connection reads.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::open_connection::{ENDED, LARGE_CONNECTION_BYTES, OpenConnection};
use crate::proxy::client_counts::ClientCounts;
use crate::telemetry::LogThrottle;

/// Connections found in one scan of the table: it serves as many closes.
const MAX_FOUND: usize = 1024;
/// Minimum interval between warnings about the memory budget.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Live counters of the server, shared with metrics.
#[derive(Clone, Debug)]
pub struct ServerLoad(Arc<LoadState>);

/// The open connections of one worker, by id.
type ConnectionTable = HashMap<u64, Arc<OpenConnection>>;

#[derive(Debug)]
struct LoadState {
    /// One table per worker.
    workers: Box<[Mutex<ConnectionTable>]>,
    /// Start of the clock of [`OpenConnection`].
    epoch: Instant,
    last_connection_id: AtomicU64,
    /// Maximum bytes of all connections. Unset for no limit.
    memory_limit: OnceLock<usize>,
    /// Held by the worker that chooses connections to close for memory.
    memory_choice: Mutex<()>,
    memory_log: LogThrottle,
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

impl ServerLoad {
    /// Creates counters for `threads` workers.
    pub(crate) fn new(threads: usize) -> Self {
        Self(Arc::new(LoadState {
            workers: (0..threads).map(|_| Mutex::default()).collect(),
            epoch: Instant::now(),
            last_connection_id: AtomicU64::new(0),
            memory_limit: OnceLock::new(),
            memory_choice: Mutex::default(),
            memory_log: LogThrottle::new(LOG_INTERVAL),
            client_counts: ClientCounts::default(),
            connection_bytes: AtomicUsize::new(0),
            closing_bytes: AtomicUsize::new(0),
            unclosable_bytes: AtomicUsize::new(0),
            panics: AtomicU64::new(0),
            connection_limit_hits: AtomicU64::new(0),
        }))
    }

    /// Number of open client connections.
    pub fn open_connections(&self) -> usize {
        let workers = self.0.workers.iter();
        workers.map(|connections| connections.lock().len()).sum()
    }

    /// Number of connections and HTTP/2 streams that ended by a panic.
    pub fn panic_count(&self) -> u64 {
        self.0.panics.load(Ordering::Relaxed)
    }

    /// Number of connections that arrived while `max_connections` were open.
    pub fn connection_limit_hits(&self) -> u64 {
        self.0.connection_limit_hits.load(Ordering::Relaxed)
    }

    /// Index of the worker with the fewest connections.
    pub(crate) fn least_loaded_worker(&self) -> Option<usize> {
        let workers = self.0.workers.iter().enumerate();
        let least = workers.min_by_key(|(_, connections)| connections.lock().len());
        least.map(|(worker, _)| worker)
    }

    /// Adds a connection to the table, until the entry is dropped.
    pub(crate) fn add_connection(
        &self,
        worker: usize,
        listener_index: usize,
        permit: OwnedSemaphorePermit,
    ) -> ConnectionEntry {
        let id = self.0.last_connection_id.fetch_add(1, Ordering::Relaxed);
        let connection = Arc::new(OpenConnection::new(id, listener_index, self.0.epoch));
        if let Some(connections) = self.0.workers.get(worker) {
            connections.lock().insert(id, Arc::clone(&connection));
        }
        ConnectionEntry {
            connection,
            load: self.clone(),
            worker,
            _permit: permit,
        }
    }

    /// Finds the connections with the smallest keys, at most [`MAX_FOUND`], in the order of their
    /// keys. Leaves out those without a key.
    pub(crate) fn find_connections<K: Ord + Copy>(
        &self,
        key: impl Fn(&OpenConnection) -> Option<K>,
    ) -> Vec<(K, Arc<OpenConnection>)> {
        let mut found = Vec::new();
        for connections in &self.0.workers {
            let connections = connections.lock();
            let open = connections.values();
            found.extend(open.filter_map(|open| Some((key(open)?, Arc::clone(open)))));
        }
        if found.len() > MAX_FOUND {
            found.select_nth_unstable_by_key(MAX_FOUND, |(key, _)| *key);
            found.truncate(MAX_FOUND);
        }
        found.sort_unstable_by_key(|(key, _)| *key);
        found
    }

    pub(crate) fn client_counts(&self) -> &ClientCounts {
        &self.0.client_counts
    }

    pub(crate) fn record_panic(&self) {
        self.0.panics.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn record_connection_limit_hit(&self) {
        self.0.connection_limit_hits.fetch_add(1, Ordering::Relaxed);
    }

    /// Sets the maximum bytes of all connections, once.
    pub(crate) fn set_memory_limit(&self, limit: usize) {
        self.0.memory_limit.get_or_init(|| limit);
    }

    /// Records the memory of a connection. Above the limit, the largest connections are closed.
    pub(crate) fn set_memory(&self, connection: &OpenConnection, bytes: usize) {
        let before = connection.memory_bytes.swap(bytes, Ordering::Relaxed);
        if connection.is_unclosable() {
            update_sum(&self.0.unclosable_bytes, before, bytes);
        }
        let used = update_sum(&self.0.connection_bytes, before, bytes);
        if let Some(limit) = self.0.memory_limit.get()
            && bytes > before
            && used > *limit
            && self.excess_bytes(*limit) > 0
        {
            self.close_largest(*limit);
        }
    }

    /// Records that the connection must not be closed to free its memory.
    pub(crate) fn set_unclosable(&self, connection: &OpenConnection) {
        if !connection.is_unclosable.swap(true, Ordering::Relaxed) {
            update_sum(&self.0.unclosable_bytes, 0, connection.memory_bytes());
        }
    }

    /// Subtracts the memory of a connection that has ended. Nothing closes it for memory any more.
    pub(crate) fn remove_memory(&self, connection: &OpenConnection) {
        let closing = connection.closing_bytes.swap(ENDED, Ordering::AcqRel);
        self.set_memory(connection, 0);
        self.0.closing_bytes.fetch_sub(closing, Ordering::Relaxed);
    }

    /// Whether the budget is exceeded while connections are being closed for it.
    pub(crate) fn is_memory_being_freed(&self) -> bool {
        self.0.memory_limit.get().is_some_and(|limit| {
            load(&self.0.closing_bytes) > 0 && self.closable_bytes() > self.closable_share(*limit)
        })
    }

    /// Closes connections of all workers until those that remain are within the limit, the largest
    /// first. Of large ones a tenth more is freed, of others a hundredth, so that the next byte
    /// does not cause another scan.
    fn close_largest(&self, limit: usize) {
        // A worker that did not wait for another's choice would read on above the limit.
        let _choice = self.0.memory_choice.lock();
        let excess = self.excess_bytes(limit);
        if excess == 0 {
            return;
        }
        let (mut freed, mut closed) = (0, 0_u64);
        for (_, connection) in self.find_connections(OpenConnection::memory_close_order) {
            let bytes = connection.memory_bytes();
            let surplus = limit
                / if bytes > LARGE_CONNECTION_BYTES {
                    10
                } else {
                    100
                };
            if freed >= excess + surplus {
                break;
            }
            // Added first: the end of the connection subtracts what it finds.
            self.0.closing_bytes.fetch_add(bytes, Ordering::Relaxed);
            if connection.close_for_memory(bytes) {
                freed += bytes;
                closed += 1;
            } else {
                self.0.closing_bytes.fetch_sub(bytes, Ordering::Relaxed);
            }
        }
        let now = std::time::Instant::now();
        if closed > 0 && self.0.memory_log.record_occurrence(now).is_some() {
            tracing::warn!(
                closed,
                "listen.max_memory reached; the largest client connections are closed"
            );
        }
    }

    /// Bytes that must be freed of connections that can be closed. They may use what the others
    /// leave of the limit, and always half of it: otherwise tunnels that fill the limit would end
    /// all other connections.
    fn excess_bytes(&self, limit: usize) -> usize {
        let kept = self
            .closable_bytes()
            .saturating_sub(load(&self.0.closing_bytes));
        kept.saturating_sub(self.closable_share(limit))
    }

    /// Memory of the connections that can be closed or are being closed.
    fn closable_bytes(&self) -> usize {
        load(&self.0.connection_bytes).saturating_sub(load(&self.0.unclosable_bytes))
    }

    fn closable_share(&self, limit: usize) -> usize {
        let rest = limit.saturating_sub(load(&self.0.unclosable_bytes));
        rest.max(limit / 2)
    }
}

fn load(sum: &AtomicUsize) -> usize {
    sum.load(Ordering::Relaxed)
}

/// Replaces a part of a sum and returns the sum.
fn update_sum(sum: &AtomicUsize, before: usize, after: usize) -> usize {
    // Both operations wrap around.
    let change = after.wrapping_sub(before);
    sum.fetch_add(change, Ordering::Relaxed)
        .wrapping_add(change)
}

/// Keeps a connection in the table, and its connection slot, until it is dropped.
pub(crate) struct ConnectionEntry {
    pub(crate) connection: Arc<OpenConnection>,
    load: ServerLoad,
    worker: usize,
    _permit: OwnedSemaphorePermit,
}

impl Drop for ConnectionEntry {
    fn drop(&mut self) {
        if let Some(connections) = self.load.0.workers.get(self.worker) {
            connections.lock().remove(&self.connection.id);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use tokio::sync::Semaphore;
    use tokio::time::advance;

    pub(crate) fn add_connection(load: &ServerLoad, worker: usize) -> ConnectionEntry {
        let slots = Arc::new(Semaphore::new(1));
        load.add_connection(worker, 0, slots.try_acquire_owned().unwrap())
    }

    fn connection_of(load: &ServerLoad, bytes: usize) -> ConnectionEntry {
        let entry = add_connection(load, 0);
        load.set_memory(&entry.connection, bytes);
        entry
    }

    fn limited_load(limit: usize) -> ServerLoad {
        let load = ServerLoad::new(1);
        load.set_memory_limit(limit);
        load
    }

    fn is_closing(entry: &ConnectionEntry) -> bool {
        entry.connection.is_closed_for_memory()
    }

    #[tokio::test(start_paused = true)]
    async fn large_connections_come_first_and_requests_last() {
        let load = ServerLoad::new(2);
        let kib = |n: usize| n * 1024;
        let sizes = [kib(4), kib(84), kib(24), kib(4), kib(24), kib(84), kib(99)];
        let mut entries = Vec::new();
        for (id, bytes) in sizes.into_iter().enumerate() {
            advance(Duration::from_millis(1)).await;
            let entry = add_connection(&load, id % 2);
            load.set_memory(&entry.connection, bytes);
            entries.push(entry);
        }
        entries[2].connection.set_busy();
        entries[5].connection.set_busy();
        let order = || {
            let found = load.find_connections(OpenConnection::memory_close_order);
            found.iter().map(|(_, one)| one.id).collect::<Vec<_>>()
        };
        assert_eq!(order(), [6, 1, 5, 4, 0, 3, 2]);
        load.set_unclosable(&entries[6].connection);
        assert!(entries[1].connection.close_for_memory(kib(84)));
        assert!(
            !entries[1].connection.close_for_memory(kib(84)),
            "closed twice"
        );
        entries.remove(4);
        assert_eq!(order(), [5, 0, 3, 2]);
        entries[4].connection.set_from_trusted_proxy();
        assert_eq!(order(), [0, 3, 2, 5]);
    }

    #[test]
    fn ordinary_connections_are_closed_with_a_small_surplus() {
        let load = limited_load(1_000_000);
        let open: Vec<_> = (0..251).map(|_| connection_of(&load, 4_000)).collect();
        let closing = open.iter().filter(|open| is_closing(open)).count();
        assert_eq!(closing, 4, "1 % and what is too much");
    }

    #[test]
    fn connections_that_cannot_be_closed_leave_half_of_the_limit_to_others() {
        let load = limited_load(100_000);
        let tunnel = connection_of(&load, 1);
        load.set_unclosable(&tunnel.connection);
        load.set_memory(&tunnel.connection, 150_000);
        let ordinary: Vec<_> = (0..12).map(|_| connection_of(&load, 4_000)).collect();
        assert!(!ordinary.iter().any(is_closing));
        assert!(!load.is_memory_being_freed());
        let more: Vec<_> = (0..3).map(|_| connection_of(&load, 4_000)).collect();
        let all = ordinary.iter().chain(&more);
        assert_eq!(all.filter(|open| is_closing(open)).count(), 3);
        assert!(load.is_memory_being_freed());
        assert!(!is_closing(&tunnel));
        for open in ordinary.iter().chain(&more).chain([&tunnel]) {
            load.remove_memory(&open.connection);
            assert!(!open.connection.close_for_memory(1), "it has ended");
        }
        assert_eq!(
            (super::load(&load.0.closing_bytes), load.closable_bytes()),
            (0, 0)
        );
        assert_eq!(super::load(&load.0.unclosable_bytes), 0);
    }
}
