//! Idle time and memory of each open connection, and the choice of the one that is idle longest.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use tokio::time::Instant;

/// Value of [`ConnectionActivity::idle_since_ms`] while a request is active.
const BUSY: u64 = u64::MAX;
/// Connections found in one scan. Those that stay idle remain the ones that are idle longest, so a
/// scan serves this many new connections.
const CANDIDATES_PER_SCAN: usize = 256;
/// Number of entries from which ended connections are removed.
const MIN_PRUNE_LEN: usize = 1024;

/// Idle time and memory of one connection. Its worker writes them; the acceptor and the other
/// workers read them.
#[derive(Debug)]
pub(crate) struct ConnectionActivity {
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
}

impl ConnectionActivity {
    /// Activity of a new connection, in milliseconds since `epoch`.
    pub(super) fn new(epoch: Instant) -> Self {
        let activity = Self {
            epoch,
            idle_since_ms: AtomicU64::new(BUSY),
            memory_bytes: AtomicUsize::new(0),
            closing_bytes: AtomicUsize::new(0),
            is_unclosable: AtomicBool::new(false),
            is_from_trusted_proxy: AtomicBool::new(false),
        };
        activity.set_idle(Instant::now());
        activity
    }

    pub(super) fn set_busy(&self) {
        self.idle_since_ms.store(BUSY, Ordering::Relaxed);
    }

    pub(super) fn set_idle(&self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.epoch).as_millis();
        let since = u64::try_from(elapsed).unwrap_or(BUSY - 1);
        self.idle_since_ms.store(since, Ordering::Relaxed);
    }

    /// Start of the idle time. `None` while a request is active.
    pub(super) fn idle_since_ms(&self) -> Option<u64> {
        Some(self.idle_since_ms.load(Ordering::Relaxed)).filter(|since| *since != BUSY)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.memory_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn set_memory_bytes(&self, bytes: usize) {
        self.memory_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Part of the memory that is being freed by closing the connection.
    pub(super) fn closing_bytes(&self) -> usize {
        self.closing_bytes.load(Ordering::Relaxed)
    }

    /// Records that the connection must not be closed to free its memory.
    pub(super) fn set_unclosable(&self) {
        self.is_unclosable.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_unclosable(&self) -> bool {
        self.is_unclosable.load(Ordering::Relaxed)
    }

    /// Records that the peer is a trusted proxy.
    pub(super) fn set_from_trusted_proxy(&self) {
        self.is_from_trusted_proxy.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_from_trusted_proxy(&self) -> bool {
        self.is_from_trusted_proxy.load(Ordering::Relaxed)
    }

    /// Memory that closing the connection frees. `None` if it must not be closed or is being
    /// closed.
    pub(super) fn closable_bytes(&self) -> Option<usize> {
        let is_closable = self.closing_bytes() == 0 && !self.is_unclosable();
        is_closable.then(|| self.memory_bytes())
    }

    /// Records that the connection is to be closed to free this memory. Returns `false` if it is
    /// being closed already.
    pub(super) fn begin_memory_close(&self, bytes: usize) -> bool {
        let closing = &self.closing_bytes;
        let claim = closing.compare_exchange(0, bytes, Ordering::Relaxed, Ordering::Relaxed);
        claim.is_ok() && bytes > 0
    }
}

/// Open connection, as its acceptor knows it.
#[derive(Clone, Debug)]
pub(super) struct OpenConnection {
    /// Identifies the connection in its worker.
    pub(super) id: u64,
    /// Index of the worker.
    pub(super) worker: usize,
    pub(super) activity: Arc<ConnectionActivity>,
}

/// Open connections of one listener.
#[derive(Debug, Default)]
pub(super) struct IdleConnections {
    /// Connections in the order of their accept; some may have ended.
    connections: Vec<OpenConnection>,
    prune_len: usize,
    /// Result of the last scan, longest idle last.
    candidates: Vec<(u64, OpenConnection)>,
}

impl IdleConnections {
    pub(super) fn add(&mut self, connection: OpenConnection) {
        if self.connections.len() >= self.prune_len.max(MIN_PRUNE_LEN) {
            self.remove_ended();
        }
        self.connections.push(connection);
    }

    /// Removes connections that their worker has dropped.
    fn remove_ended(&mut self) {
        let is_open = |open: &OpenConnection| Arc::strong_count(&open.activity) > 1;
        self.candidates.clear();
        self.connections.retain(is_open);
        self.prune_len = 2 * self.connections.len();
    }

    /// Takes the connection that is idle longest. `None` if all have active requests.
    pub(super) fn take_longest_idle(&mut self) -> Option<OpenConnection> {
        if let Some(found) = self.take_candidate() {
            return Some(found);
        }
        self.remove_ended();
        let idle = self.connections.iter();
        self.candidates = idle
            .filter_map(|open| Some((open.activity.idle_since_ms()?, open.clone())))
            .collect();
        let order = |(since, open): &(u64, OpenConnection)| std::cmp::Reverse((*since, open.id));
        let surplus = self.candidates.len().saturating_sub(CANDIDATES_PER_SCAN);
        if surplus > 0 {
            self.candidates.select_nth_unstable_by_key(surplus, order);
            self.candidates.drain(..surplus);
        }
        self.candidates.sort_unstable_by_key(order);
        self.take_candidate()
    }

    /// Takes the next candidate that is open and has been idle since the scan.
    fn take_candidate(&mut self) -> Option<OpenConnection> {
        while let Some((since, open)) = self.candidates.pop() {
            // The list of connections holds one more reference, and the worker the third.
            if Arc::strong_count(&open.activity) > 2 && open.activity.idle_since_ms() == Some(since)
            {
                return Some(open);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn the_connection_that_is_idle_longest_is_taken() {
        let epoch = Instant::now();
        let mut idle = IdleConnections::default();
        let mut held = Vec::new();
        for id in 0..2_000 {
            let activity = Arc::new(ConnectionActivity::new(epoch));
            held.push(Some(Arc::clone(&activity)));
            let worker = usize::try_from(id % 2).unwrap();
            idle.add(OpenConnection {
                id,
                worker,
                activity,
            });
            advance(Duration::from_millis(1)).await;
        }
        held[0].as_ref().unwrap().set_busy();
        held[1] = None;
        held[3].as_ref().unwrap().set_idle(Instant::now());
        let mut taken = Vec::new();
        for _ in 0..3 {
            taken.push(idle.take_longest_idle().unwrap().id);
        }
        held[6].as_ref().unwrap().set_busy();
        taken.push(idle.take_longest_idle().unwrap().id);
        assert_eq!(taken, [2, 4, 5, 7]);
        held.iter()
            .flatten()
            .for_each(|activity| activity.set_busy());
        assert!(idle.take_longest_idle().is_none());
        held.clear();
        for id in 0..2_000 {
            let activity = Arc::new(ConnectionActivity::new(epoch));
            idle.add(OpenConnection {
                id,
                worker: 0,
                activity,
            });
        }
        assert!(
            idle.connections.len() <= MIN_PRUNE_LEN,
            "ended connections are removed"
        );
    }
}
