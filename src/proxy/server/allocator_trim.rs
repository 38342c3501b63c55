//! Returns freed memory to the system after a burst of connections.
//!
//! mimalloc returns freed pages only during later allocations: its slow path looks for them every
//! [`ALLOCATIONS_PER_ROUND`] allocations. A worker with idle clients allocates nothing and would
//! keep the memory of the burst.

use std::cell::Cell;
use std::hint::black_box;
use std::rc::Rc;
use std::time::Duration;
use tokio::time::sleep;

/// Number of released connections, about 20 KiB each, from which a trim is worthwhile.
const TRIM_THRESHOLD: usize = 64;
/// Check interval. While [`TRIM_THRESHOLD`] connections are released per interval, the worker is
/// busy and will soon reuse the memory.
const CALM_INTERVAL: Duration = Duration::from_millis(200);
/// Rounds of one trim. mimalloc returns freed memory after 10 ms, plus 1 ms for each piece freed
/// meanwhile. The trim itself frees some pieces.
const TRIM_ROUNDS: usize = 5;
/// mimalloc's `generic_collect` interval, rounded up.
const ALLOCATIONS_PER_ROUND: usize = 10_100;
/// Size of the allocations. mimalloc's slow path serves everything above 1 KiB.
const SLOW_PATH_BYTES: usize = 2048;

/// Trim state of one worker.
#[derive(Debug, Default)]
pub(in crate::proxy) struct AllocatorTrim {
    /// Connections released since the last check.
    released_connections: Cell<usize>,
    is_scheduled: Cell<bool>,
}

impl AllocatorTrim {
    /// Records a connection that ended, or became idle and released its buffers.
    pub(in crate::proxy) fn record_release(self: &Rc<Self>) {
        self.released_connections
            .set(self.released_connections.get() + 1);
        if self.released_connections.get() >= TRIM_THRESHOLD && !self.is_scheduled.replace(true) {
            tokio::task::spawn_local(Rc::clone(self).trim_when_calm());
        }
    }

    async fn trim_when_calm(self: Rc<Self>) {
        while self.released_connections.take() >= TRIM_THRESHOLD {
            sleep(CALM_INTERVAL).await;
        }
        for _ in 0..TRIM_ROUNDS {
            // A round takes at most half a millisecond.
            for _ in 0..ALLOCATIONS_PER_ROUND {
                drop(black_box(Vec::<u8>::with_capacity(SLOW_PATH_BYTES)));
            }
            sleep(CALM_INTERVAL).await;
        }
        self.is_scheduled.set(false);
    }
}
