//! Returns freed memory to the system after a burst of connections.
//!
//! mimalloc returns freed pages only during later allocations: its slow path looks for them every
//! [`ALLOCATIONS_PER_ROUND`] allocations. A worker with idle clients allocates nothing and would
//! keep the memory of the burst. A trim makes allocations and frees them at once, to trigger the
//! collection.

use std::cell::Cell;
use std::hint::black_box;
use std::rc::Rc;
use std::time::Duration;
use tokio::time::sleep;

/// Number of released connections, about 20 KiB each, from which a trim is worthwhile.
const TRIM_THRESHOLD_CONNECTIONS: usize = 64;
/// Interval of the checks whether the burst is over, and of the rounds of a trim. A worker that
/// releases [`TRIM_THRESHOLD_CONNECTIONS`] connections per interval is busy and will soon reuse the
/// memory.
const CALM_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Rounds of allocations in one trim. mimalloc returns freed memory after 10 ms, plus 1 ms for each
/// piece freed meanwhile, including pieces that the trim itself frees.
const TRIM_ROUNDS: usize = 5;
/// Allocations in a round: mimalloc's `generic_collect` interval, rounded up.
const ALLOCATIONS_PER_ROUND: usize = 10_100;
/// Size of a trim's allocations. mimalloc's slow path serves every allocation above 1 KiB.
const SLOW_PATH_ALLOCATION_BYTES: usize = 2048;

/// Trim state of one worker.
#[derive(Debug, Default)]
pub(crate) struct AllocatorTrim {
    /// Connections released since the last check.
    released_connections: Cell<usize>,
    is_scheduled: Cell<bool>,
}

impl AllocatorTrim {
    /// Records a connection that ended, or became idle and released its buffers. Schedules a trim
    /// after a burst of such connections.
    pub(crate) fn record_released_connection(self: &Rc<Self>) {
        self.released_connections.update(|value| value + 1);
        if self.released_connections.get() >= TRIM_THRESHOLD_CONNECTIONS
            && !self.is_scheduled.replace(true)
        {
            tokio::task::spawn_local(Rc::clone(self).trim_when_calm());
        }
    }

    async fn trim_when_calm(self: Rc<Self>) {
        while self.released_connections.take() >= TRIM_THRESHOLD_CONNECTIONS {
            sleep(CALM_CHECK_INTERVAL).await;
        }
        for _ in 0..TRIM_ROUNDS {
            // A round takes at most half a millisecond.
            for _ in 0..ALLOCATIONS_PER_ROUND {
                drop(black_box(Vec::<u8>::with_capacity(
                    SLOW_PATH_ALLOCATION_BYTES,
                )));
            }
            sleep(CALM_CHECK_INTERVAL).await;
        }
        self.is_scheduled.set(false);
    }
}
