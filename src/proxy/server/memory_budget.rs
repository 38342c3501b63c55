//! Budget for the memory of client connections.
//!
//! The sizes are estimates: see [`super::connection_memory`]. They change when a head takes several
//! reads, when a client does not read, and when a connection becomes idle; other requests cost
//! nothing here. While connections are being closed for the budget, no other connection reads.

use std::time::{Duration, Instant};

use super::connection_load::{ConnectionBytes, ServerLoad};
use crate::telemetry::LogThrottle;

/// Minimum interval between warnings about the budget.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// One worker's access to the budget that all workers share.
#[derive(Debug)]
pub(crate) struct WorkerMemory {
    load: ServerLoad,
    /// Maximum bytes of all connections. `None` for no limit.
    limit: Option<usize>,
    log: LogThrottle,
}

impl WorkerMemory {
    pub(super) fn new(load: ServerLoad, limit: Option<usize>) -> Self {
        Self {
            load,
            limit,
            log: LogThrottle::new(LOG_INTERVAL),
        }
    }

    /// Closes connections of all workers until those that remain are within the limit, the largest
    /// first. Of large ones a tenth more is freed, of others a hundredth, so that the next byte
    /// does not cause another scan.
    fn close_largest(&self, limit: usize) {
        let registry = self.load.connection_registry();
        // A worker that did not wait for another's choice would read on above the limit.
        let _choice = self.load.lock_memory_choice();
        let excess = self.load.connection_bytes().excess(limit);
        if excess == 0 {
            return;
        }
        let (mut freed, mut closed) = (0, 0_u64);
        for connection in registry.closable_connections() {
            let surplus = match connection.is_large() {
                true => limit / 10,
                false => limit / 100,
            };
            if freed >= excess + surplus {
                break;
            }
            if registry.close(&connection, |bytes| self.load.begin_memory_close(bytes)) {
                freed += connection.bytes;
                closed += 1;
            }
        }
        if closed > 0 && self.log.record_occurrence(Instant::now()).is_some() {
            tracing::warn!(
                closed,
                "listen.max_memory reached; the largest client connections are closed"
            );
        }
    }
}

impl ConnectionBytes {
    /// Bytes that must be freed of connections that can be closed. They may use what the others
    /// leave of the limit, and always half of it: otherwise tunnels that fill the limit would end
    /// all other connections.
    fn excess(&self, limit: usize) -> usize {
        let kept = self.used.saturating_sub(self.closing);
        kept.saturating_sub(self.unclosable)
            .saturating_sub(self.closable_share(limit))
    }

    /// Whether too much is used until the connections that are being closed have ended.
    fn exceeds_with_closing(&self, limit: usize) -> bool {
        self.used.saturating_sub(self.unclosable) > self.closable_share(limit)
    }

    fn closable_share(&self, limit: usize) -> usize {
        limit.saturating_sub(self.unclosable).max(limit / 2)
    }
}

impl WorkerMemory {
    /// Records that a connection holds `after` instead of `before` bytes. Above the limit, the
    /// largest connections are closed.
    pub(super) fn update(&self, before: usize, after: usize) {
        let used = self.load.update_connection_bytes(before, after);
        if let Some(limit) = self.limit.filter(|limit| after > before && used > *limit)
            && self.load.connection_bytes().excess(limit) > 0
        {
            self.close_largest(limit);
        }
    }

    /// Whether the budget is exceeded while connections are being closed for it.
    pub(super) fn is_being_freed(&self) -> bool {
        self.limit.is_some_and(|limit| {
            let bytes = self.load.connection_bytes();
            bytes.closing > 0 && bytes.exceeds_with_closing(limit)
        })
    }

    /// Records that a connection that is not closed for the budget holds `after` instead of
    /// `before` bytes. Called before [`WorkerMemory::update`].
    pub(super) fn update_unclosable(&self, before: usize, after: usize) {
        self.load.update_unclosable_bytes(before, after);
    }

    /// Records that a connection which was closed for the budget has freed its bytes.
    pub(super) fn record_freed(&self, bytes: usize) {
        self.load.end_memory_close(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::{ServerLoad, WorkerMemory};
    use crate::proxy::server::connection_activity::OpenConnection;

    fn open_connection(memory: &WorkerMemory, bytes: usize) -> OpenConnection {
        let open = memory.load.open_connection(0);
        memory.load.connection_registry().insert(&open);
        open.activity.set_memory_bytes(bytes);
        memory.update(0, bytes);
        open
    }

    fn is_closing(open: &OpenConnection) -> bool {
        open.activity.closing_bytes() > 0
    }

    #[test]
    fn ordinary_connections_are_closed_with_a_small_surplus() {
        let memory = WorkerMemory::new(ServerLoad::new(1), Some(1_000_000));
        let open: Vec<_> = (0..251).map(|_| open_connection(&memory, 4_000)).collect();
        let closing = open.iter().filter(|open| is_closing(open)).count();
        assert_eq!(closing, 4, "1 % and what is too much");
    }

    #[test]
    fn connections_that_cannot_be_closed_leave_half_of_the_limit_to_others() {
        let memory = WorkerMemory::new(ServerLoad::new(1), Some(100_000));
        let tunnel = open_connection(&memory, 0);
        tunnel.activity.set_unclosable();
        tunnel.activity.set_memory_bytes(150_000);
        memory.update_unclosable(0, 150_000);
        memory.update(0, 150_000);
        let ordinary: Vec<_> = (0..12).map(|_| open_connection(&memory, 4_000)).collect();
        assert!(!ordinary.iter().any(is_closing));
        assert!(!memory.is_being_freed());
        let more: Vec<_> = (0..3).map(|_| open_connection(&memory, 4_000)).collect();
        let all = ordinary.iter().chain(&more);
        assert_eq!(all.filter(|open| is_closing(open)).count(), 3);
        assert!(memory.is_being_freed());
        assert!(!is_closing(&tunnel));
    }
}
