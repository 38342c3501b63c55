//! Budget for the memory of client connections.
//!
//! The sizes are estimates: see [`super::connection_memory`]. They change when a head takes several
//! reads, when a client does not read, and when a connection becomes idle; other requests cost
//! nothing here. While connections are being closed for the budget, no other connection reads.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::close_reason::ConnectionCloseReason;
use super::connection_load::ServerLoad;
use super::connection_memory::MemoryBudget;
use super::connection_timeouts::ConnectionMonitor;
use crate::telemetry::LogThrottle;

/// Minimum interval between warnings about the budget.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Monitors of a worker's connections, by connection id.
pub(super) type ConnectionMonitors = Rc<RefCell<HashMap<u64, Rc<ConnectionMonitor>>>>;

/// One worker's access to the budget that all workers share.
#[derive(Debug)]
pub(in crate::proxy) struct WorkerMemory {
    load: ServerLoad,
    /// Maximum bytes of all connections. `Retry` for no limit.
    limit: Option<usize>,
    monitors: ConnectionMonitors,
    log: LogThrottle,
}

impl WorkerMemory {
    pub(super) fn new(
        load: ServerLoad,
        limit: Option<usize>,
        monitors: ConnectionMonitors,
    ) -> Self {
        Self {
            load,
            limit,
            monitors,
            log: LogThrottle::new(LOG_INTERVAL),
        }
    }

    /// Closes the largest connections until `excess` bytes are freed. Of equal ones, a connection
    /// without a request is closed first.
    fn close_largest(&self, mut excess: usize) {
        let monitors = self.monitors.borrow();
        let mut by_size: Vec<_> = monitors
            .values()
            .filter(|monitor| monitor.memory().can_be_freed())
            .collect();
        by_size.sort_unstable_by_key(|monitor| {
            Reverse((
                monitor.memory().reported_bytes(),
                !monitor.has_active_requests(),
            ))
        });
        let mut closed = 0_u64;
        for monitor in by_size {
            if excess == 0 {
                break;
            }
            let bytes = monitor.memory().begin_close();
            self.load.begin_memory_close(bytes);
            excess = excess.saturating_sub(bytes);
            monitor.request_close(ConnectionCloseReason::Memory);
            closed += 1;
        }
        if closed > 0 && self.log.record_occurrence(Instant::now()).is_some() {
            tracing::warn!(
                closed,
                "listen.max_memory reached; the largest client connections are closed"
            );
        }
    }
}

impl MemoryBudget for WorkerMemory {
    /// Above the limit, closes the largest connections of this worker.
    fn update(&self, before: usize, after: usize) {
        let used = self.load.update_connection_bytes(before, after);
        let Some(limit) = self.limit.filter(|limit| after > before && used > *limit) else {
            return;
        };
        let (used, closing) = self.load.connection_bytes();
        let kept = used.saturating_sub(closing);
        if kept > limit {
            // A tenth more is freed, so that the next byte does not cause another scan.
            self.close_largest(kept - (limit - limit / 10));
        }
    }

    fn is_being_freed(&self) -> bool {
        self.limit.is_some_and(|limit| {
            let (used, closing) = self.load.connection_bytes();
            used > limit && closing > 0
        })
    }

    fn record_freed(&self, bytes: usize) {
        self.load.end_memory_close(bytes);
    }
}
