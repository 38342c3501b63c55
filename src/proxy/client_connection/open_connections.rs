//! The open connections of all workers, their memory, and counters of the server.
//!
//! The sizes of connections are estimates: see [`super::connection_memory`]. They change when a
//! head takes several reads, when a client does not read, and when a connection becomes idle; other
//! requests cost nothing here. While connections are being closed for the memory budget, no other
//! connection reads.

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use crate::proxy::client_counts::ClientCounts;
use crate::telemetry::LogThrottle;

/// Connections found in one scan of the table: it serves as many closes.
const MAX_FOUND: usize = 1024;
/// Minimum interval between warnings about the memory budget.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Value of [`OpenConnection::idle_since_ms`] while a request is active.
const BUSY: u64 = u64::MAX;

/// Size above which a connection holds more than an ordinary request needs.
const LARGE_CONNECTION_BYTES: usize = 32 * 1024;

/// Value of [`OpenConnection::closing_bytes`] after the connection's memory was subtracted.
const ENDED: usize = usize::MAX;

type ConnectionsById = HashMap<u64, Arc<OpenConnection>>;

/// The open connections of all workers, and counters of the server, which metrics show.
#[derive(Debug)]
pub struct OpenConnections {
    /// The connections of each worker.
    workers: Box<[Mutex<ConnectionsById>]>,
    /// Start of the clock of [`OpenConnection`].
    epoch: Instant,
    last_connection_id: AtomicU64,
    /// Maximum bytes of all connections, [`usize::MAX`] for no limit.
    pub(crate) memory_limit: AtomicUsize,
    /// Held by the worker that chooses connections to close for memory.
    memory_choice: Mutex<()>,
    memory_log: LogThrottle,
    /// Connections of each client to the proxy listener.
    pub(crate) client_counts: ClientCounts,
    /// Estimated memory of all client connections.
    connection_bytes: AtomicUsize,
    /// The part of `connection_bytes` that belongs to connections being closed to free memory.
    closing_bytes: AtomicUsize,
    /// The part of `connection_bytes` that belongs to connections which are not closed to free it.
    unclosable_bytes: AtomicUsize,
    panics: AtomicU64,
    connection_limit_hits: AtomicU64,
}

impl OpenConnections {
    /// Creates counters for `threads` workers.
    pub(crate) fn new(threads: usize) -> Arc<Self> {
        Arc::new(Self {
            workers: (0..threads).map(|_| Mutex::default()).collect(),
            epoch: Instant::now(),
            last_connection_id: AtomicU64::new(0),
            memory_limit: AtomicUsize::new(usize::MAX),
            memory_choice: Mutex::default(),
            memory_log: LogThrottle::new(LOG_INTERVAL),
            client_counts: ClientCounts::default(),
            connection_bytes: AtomicUsize::new(0),
            closing_bytes: AtomicUsize::new(0),
            unclosable_bytes: AtomicUsize::new(0),
            panics: AtomicU64::new(0),
            connection_limit_hits: AtomicU64::new(0),
        })
    }

    /// Number of open client connections.
    pub fn open_connections(&self) -> usize {
        let workers = self.workers.iter();
        workers.map(|connections| connections.lock().len()).sum()
    }

    /// Number of connections and HTTP/2 streams that ended by a panic.
    pub fn panic_count(&self) -> u64 {
        self.panics.load(Ordering::Relaxed)
    }

    /// Number of connections that arrived while `max_connections` were open.
    pub fn connection_limit_hits(&self) -> u64 {
        self.connection_limit_hits.load(Ordering::Relaxed)
    }

    /// Index of the worker with the fewest connections.
    pub(crate) fn least_loaded_worker(&self) -> Option<usize> {
        let workers = self.workers.iter().enumerate();
        let least = workers.min_by_key(|(_, connections)| connections.lock().len());
        least.map(|(worker, _)| worker)
    }

    /// Adds a connection to the table, until the entry is dropped.
    pub(crate) fn add_connection(
        self: &Arc<Self>,
        worker: usize,
        listener_index: usize,
        permit: OwnedSemaphorePermit,
    ) -> OpenConnectionGuard {
        let id = self.last_connection_id.fetch_add(1, Ordering::Relaxed);
        let connection = Arc::new(OpenConnection::new(id, listener_index, self.epoch));
        if let Some(connections) = self.workers.get(worker) {
            connections.lock().insert(id, Arc::clone(&connection));
        }
        OpenConnectionGuard {
            connection,
            connections: Arc::clone(self),
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
        for connections in &self.workers {
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

    pub(crate) fn record_panic(&self) {
        self.panics.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn record_connection_limit_hit(&self) {
        self.connection_limit_hits.fetch_add(1, Ordering::Relaxed);
    }

    /// Records the memory of a connection. Above the limit, the largest connections are closed.
    pub(crate) fn set_memory(&self, connection: &OpenConnection, bytes: usize) {
        let before = connection.memory_bytes.swap(bytes, Ordering::Relaxed);
        if connection.is_unclosable() {
            update_sum(&self.unclosable_bytes, before, bytes);
        }
        let used = update_sum(&self.connection_bytes, before, bytes);
        if bytes > before && used > load(&self.memory_limit) && self.excess_bytes() > 0 {
            self.close_largest();
        }
    }

    /// Records that the connection must not be closed to free its memory.
    pub(crate) fn set_unclosable(&self, connection: &OpenConnection) {
        if !connection.is_unclosable.swap(true, Ordering::Relaxed) {
            update_sum(&self.unclosable_bytes, 0, connection.memory_bytes());
        }
    }

    /// Subtracts the memory of a connection that has ended. Nothing closes it for memory any more.
    pub(crate) fn remove_memory(&self, connection: &OpenConnection) {
        let closing = connection.closing_bytes.swap(ENDED, Ordering::AcqRel);
        self.set_memory(connection, 0);
        self.closing_bytes.fetch_sub(closing, Ordering::Relaxed);
    }

    /// Whether the budget is exceeded while connections are being closed for it.
    pub(crate) fn is_memory_being_freed(&self) -> bool {
        load(&self.closing_bytes) > 0 && self.closable_bytes() > self.closable_share()
    }

    /// Closes connections of all workers until those that remain are within the limit, the largest
    /// first. Of large ones a tenth more is freed, of others a hundredth, so that the next byte
    /// does not cause another scan.
    fn close_largest(&self) {
        // A worker that did not wait for another's choice would read on above the limit.
        let _choice = self.memory_choice.lock();
        let excess = self.excess_bytes();
        if excess == 0 {
            return;
        }
        let (mut freed, mut closed) = (0, 0_u64);
        for (_, connection) in self.find_connections(OpenConnection::memory_close_order) {
            let bytes = connection.memory_bytes();
            let is_large = bytes > LARGE_CONNECTION_BYTES;
            let surplus = load(&self.memory_limit) / if is_large { 10 } else { 100 };
            if freed >= excess + surplus {
                break;
            }
            // Added first: the end of the connection subtracts what it finds.
            self.closing_bytes.fetch_add(bytes, Ordering::Relaxed);
            if connection.close_for_memory(bytes) {
                freed += bytes;
                closed += 1;
            } else {
                self.closing_bytes.fetch_sub(bytes, Ordering::Relaxed);
            }
        }
        let now = std::time::Instant::now();
        if closed > 0 && self.memory_log.record_occurrence(now).is_some() {
            tracing::warn!(
                closed,
                "listen.max_memory reached; the largest client connections are closed"
            );
        }
    }

    /// Bytes that must be freed of connections that can be closed. They may use what the others
    /// leave of the limit, and always half of it: otherwise tunnels that fill the limit would end
    /// all other connections.
    fn excess_bytes(&self) -> usize {
        let kept = self
            .closable_bytes()
            .saturating_sub(load(&self.closing_bytes));
        kept.saturating_sub(self.closable_share())
    }

    /// Memory of the connections that can be closed or are being closed.
    fn closable_bytes(&self) -> usize {
        load(&self.connection_bytes).saturating_sub(load(&self.unclosable_bytes))
    }

    fn closable_share(&self) -> usize {
        let limit = load(&self.memory_limit);
        let rest = limit.saturating_sub(load(&self.unclosable_bytes));
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

/// Keeps a connection among the open ones, and its connection slot, until it is dropped.
pub(crate) struct OpenConnectionGuard {
    pub(crate) connection: Arc<OpenConnection>,
    connections: Arc<OpenConnections>,
    worker: usize,
    _permit: OwnedSemaphorePermit,
}

impl Drop for OpenConnectionGuard {
    fn drop(&mut self) {
        if let Some(connections) = self.connections.workers.get(self.worker) {
            connections.lock().remove(&self.connection.id);
        }
    }
}

/// Idle time and memory of one connection, and requests to close it. Its worker writes the state;
/// the acceptor and the other workers read it.
#[derive(Debug)]
pub(crate) struct OpenConnection {
    pub(crate) id: u64,
    /// Index of the listener in the server.
    pub(crate) listener_index: usize,
    /// Start of the clock.
    epoch: Instant,
    /// End of the last request, or the time of the accept. [`BUSY`] while a request is active.
    idle_since_ms: AtomicU64,
    /// Estimated memory.
    memory_bytes: AtomicUsize,
    /// Part of the memory that is being freed by closing the connection. 0 while it stays open.
    closing_bytes: AtomicUsize,
    /// Whether the connection must not be closed to free its memory.
    is_unclosable: AtomicBool,
    /// Whether the peer is a trusted proxy, whose connection carries requests of many clients.
    is_from_trusted_proxy: AtomicBool,
    /// Whether the connection is to make place for another one, if it is idle.
    is_idle_close_requested: AtomicBool,
    /// The task that drives the connection.
    pub(crate) driver: AtomicWaker,
}

impl OpenConnection {
    /// A new connection, with a clock in milliseconds since `epoch`.
    fn new(id: u64, listener_index: usize, epoch: Instant) -> Self {
        let connection = Self {
            id,
            listener_index,
            epoch,
            idle_since_ms: AtomicU64::new(BUSY),
            memory_bytes: AtomicUsize::new(0),
            closing_bytes: AtomicUsize::new(0),
            is_unclosable: AtomicBool::new(false),
            is_from_trusted_proxy: AtomicBool::new(false),
            is_idle_close_requested: AtomicBool::new(false),
            driver: AtomicWaker::new(),
        };
        connection.set_idle(Instant::now());
        connection
    }

    pub(crate) fn set_busy(&self) {
        self.idle_since_ms.store(BUSY, Ordering::Relaxed);
    }

    pub(crate) fn set_idle(&self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.epoch).as_millis();
        let since = u64::try_from(elapsed).unwrap_or(BUSY - 1);
        self.idle_since_ms.store(since, Ordering::Relaxed);
    }

    /// Start of the idle time. `None` while a request is active.
    pub(crate) fn idle_since_ms(&self) -> Option<u64> {
        Some(self.idle_since_ms.load(Ordering::Relaxed)).filter(|since| *since != BUSY)
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.memory_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn is_unclosable(&self) -> bool {
        self.is_unclosable.load(Ordering::Relaxed)
    }

    /// Records that the peer is a trusted proxy, which carries many clients. Its connection is
    /// closed last for the budget.
    pub(crate) fn set_from_trusted_proxy(&self) {
        self.is_from_trusted_proxy.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_from_trusted_proxy(&self) -> bool {
        self.is_from_trusted_proxy.load(Ordering::Relaxed)
    }

    /// Order in which connections are closed to free memory: large ones first, then idle ones, then
    /// ordinary requests; of these by size, then by idle time; trusted proxies last. `None` if the
    /// connection must not be closed or is being closed.
    pub(crate) fn memory_close_order(&self) -> Option<impl Ord + Copy + use<>> {
        if self.is_closed_for_memory() || self.is_unclosable() {
            return None;
        }
        let (bytes, idle_since_ms) = (self.memory_bytes(), self.idle_since_ms());
        let is_small = bytes <= LARGE_CONNECTION_BYTES;
        let is_request = is_small && idle_since_ms.is_none();
        let rank = (self.is_from_trusted_proxy(), is_small, is_request);
        Some((rank, Reverse(bytes), idle_since_ms.unwrap_or(BUSY)))
    }

    /// Asks the driving task to close the connection, to free this memory. Returns `false` if it is
    /// being closed already or has ended.
    pub(crate) fn close_for_memory(&self, bytes: usize) -> bool {
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        let claim = self
            .closing_bytes
            .compare_exchange(0, bytes, success, failure);
        let is_claimed = claim.is_ok() && bytes > 0;
        if is_claimed {
            self.driver.wake();
        }
        is_claimed
    }

    /// Whether the connection is being closed to free its memory.
    pub(crate) fn is_closed_for_memory(&self) -> bool {
        self.closing_bytes.load(Ordering::Relaxed) > 0
    }

    /// Asks the driving task to close the connection, unless it has a request meanwhile.
    pub(crate) fn close_if_idle(&self) {
        self.is_idle_close_requested.store(true, Ordering::Relaxed);
        self.driver.wake();
    }

    /// Takes the request of [`OpenConnection::close_if_idle`].
    pub(crate) fn take_idle_close_request(&self) -> bool {
        self.is_idle_close_requested.load(Ordering::Relaxed)
            && self.is_idle_close_requested.swap(false, Ordering::Relaxed)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use tokio::sync::Semaphore;
    use tokio::time::advance;

    pub(crate) fn add_connection(
        connections: &Arc<OpenConnections>,
        worker: usize,
    ) -> OpenConnectionGuard {
        let slots = Arc::new(Semaphore::new(1));
        connections.add_connection(worker, 0, slots.try_acquire_owned().unwrap())
    }

    fn connection_of(connections: &Arc<OpenConnections>, bytes: usize) -> OpenConnectionGuard {
        let entry = add_connection(connections, 0);
        connections.set_memory(&entry.connection, bytes);
        entry
    }

    fn limited_load(limit: usize) -> Arc<OpenConnections> {
        let connections = OpenConnections::new(1);
        connections.memory_limit.store(limit, Ordering::Relaxed);
        connections
    }

    fn is_closing(entry: &OpenConnectionGuard) -> bool {
        entry.connection.is_closed_for_memory()
    }

    #[tokio::test(start_paused = true)]
    async fn large_connections_come_first_and_requests_last() {
        let connections = OpenConnections::new(2);
        let kib = |n: usize| n * 1024;
        let sizes = [kib(4), kib(84), kib(24), kib(4), kib(24), kib(84), kib(99)];
        let mut entries = Vec::new();
        for (id, bytes) in sizes.into_iter().enumerate() {
            advance(Duration::from_millis(1)).await;
            let entry = add_connection(&connections, id % 2);
            connections.set_memory(&entry.connection, bytes);
            entries.push(entry);
        }
        entries[2].connection.set_busy();
        entries[5].connection.set_busy();
        let order = || {
            let found = connections.find_connections(OpenConnection::memory_close_order);
            found.iter().map(|(_, one)| one.id).collect::<Vec<_>>()
        };
        assert_eq!(order(), [6, 1, 5, 4, 0, 3, 2]);
        connections.set_unclosable(&entries[6].connection);
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
        let connections = limited_load(1_000_000);
        let open: Vec<_> = (0..251)
            .map(|_| connection_of(&connections, 4_000))
            .collect();
        let closing = open.iter().filter(|open| is_closing(open)).count();
        assert_eq!(closing, 4, "1 % and what is too much");
    }

    #[test]
    fn connections_that_cannot_be_closed_leave_half_of_the_limit_to_others() {
        let connections = limited_load(100_000);
        let tunnel = connection_of(&connections, 1);
        connections.set_unclosable(&tunnel.connection);
        connections.set_memory(&tunnel.connection, 150_000);
        let ordinary: Vec<_> = (0..12)
            .map(|_| connection_of(&connections, 4_000))
            .collect();
        assert!(!ordinary.iter().any(is_closing));
        assert!(!connections.is_memory_being_freed());
        let more: Vec<_> = (0..3).map(|_| connection_of(&connections, 4_000)).collect();
        let all = ordinary.iter().chain(&more);
        assert_eq!(all.filter(|open| is_closing(open)).count(), 3);
        assert!(connections.is_memory_being_freed());
        assert!(!is_closing(&tunnel));
        for open in ordinary.iter().chain(&more).chain([&tunnel]) {
            connections.remove_memory(&open.connection);
            assert!(!open.connection.close_for_memory(1), "it has ended");
        }
        assert_eq!(
            (
                super::load(&connections.closing_bytes),
                connections.closable_bytes()
            ),
            (0, 0)
        );
        assert_eq!(super::load(&connections.unclosable_bytes), 0);
    }
}
