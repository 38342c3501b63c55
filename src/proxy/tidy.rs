//! Memory that a burst of connections leaves behind.
//!
//! mimalloc gives freed pages back to the system only when it is asked for memory again, and often: its slow path looks
//! for them every [`EVERY`] times. A worker whose clients all rest asks for none, and would keep the burst's memory.

use std::cell::Cell;
use std::hint::black_box;
use std::rc::Rc;
use std::time::Duration;
use tokio::time::sleep;

/// Connections that came to rest or to an end, at some 20 KiB each, for which it is worth its while.
const MANY: usize = 64;
/// While so many do in such a time, the worker is at work, and the memory soon used again.
const CALM: Duration = Duration::from_millis(200);
/// What is freed is given back after 10 ms, and 1 ms more for each piece freed meanwhile; tidying frees some, too.
const ROUNDS: usize = 5;
/// mimalloc's `generic_collect`, and some of its rounding.
const EVERY: usize = 10_100;
/// What isn't served from its lists at once goes the slow path: everything above 1 KiB.
const SLOW_BYTES: usize = 2048;

/// One worker's.
#[derive(Debug, Default)]
pub(super) struct Tidy {
    /// Since the last look.
    freed: Cell<usize>,
    is_planned: Cell<bool>,
}

impl Tidy {
    /// A connection needs its memory no more, or no more than a little.
    pub(super) fn freed(self: &Rc<Self>) {
        self.freed.set(self.freed.get() + 1);
        if self.freed.get() >= MANY && !self.is_planned.replace(true) {
            tokio::task::spawn_local(Rc::clone(self).when_calm());
        }
    }

    async fn when_calm(self: Rc<Self>) {
        while self.freed.take() >= MANY {
            sleep(CALM).await;
        }
        for _ in 0..ROUNDS {
            // Half a millisecond at most.
            for _ in 0..EVERY {
                drop(black_box(Vec::<u8>::with_capacity(SLOW_BYTES)));
            }
            sleep(CALM).await;
        }
        self.is_planned.set(false);
    }
}
