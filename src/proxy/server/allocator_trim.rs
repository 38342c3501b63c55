//! Memory that a burst of connections leaves behind.
//!
//! mimalloc gives freed pages back to the system only when it is asked for memory again, and often: its slow path looks
//! for them every [`ALLOCATIONS_PER_ROUND`] times. A worker whose clients all rest asks for none, and would keep the burst's memory.

use std::cell::Cell;
use std::hint::black_box;
use std::rc::Rc;
use std::time::Duration;
use tokio::time::sleep;

/// Connections that came to rest or to an end, at some 20 KiB each, for which it is worth its while.
const TRIM_THRESHOLD: usize = 64;
/// While so many do in such a time, the worker is at work, and the memory soon used again.
const CALM_INTERVAL: Duration = Duration::from_millis(200);
/// What is freed is given back after 10 ms, and 1 ms more for each piece freed meanwhile; tidying frees some, too.
const TRIM_ROUNDS: usize = 5;
/// mimalloc's `generic_collect`, and some of its rounding.
const ALLOCATIONS_PER_ROUND: usize = 10_100;
/// What isn't served from its lists at once goes the slow path: everything above 1 KiB.
const SLOW_PATH_BYTES: usize = 2048;

/// One worker's.
#[derive(Debug, Default)]
pub(in crate::proxy) struct AllocatorTrim {
    /// Since the last look.
    released_connections: Cell<usize>,
    is_scheduled: Cell<bool>,
}

impl AllocatorTrim {
    /// A connection needs its memory no more, or no more than a little.
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
            // Half a millisecond at most.
            for _ in 0..ALLOCATIONS_PER_ROUND {
                drop(black_box(Vec::<u8>::with_capacity(SLOW_PATH_BYTES)));
            }
            sleep(CALM_INTERVAL).await;
        }
        self.is_scheduled.set(false);
    }
}
