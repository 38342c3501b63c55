//! An open client connection, as all threads see it.

use parking_lot::Mutex;
use std::cmp::Reverse;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::Waker;
use tokio::time::Instant;

/// Value of [`OpenConnection::idle_since_ms`] while a request is active.
const BUSY: u64 = u64::MAX;

/// Size above which a connection holds more than an ordinary request needs.
pub(super) const LARGE_CONNECTION_BYTES: usize = 32 * 1024;

/// Value of [`OpenConnection::closing_bytes`] after the connection's memory was subtracted.
pub(super) const ENDED: usize = usize::MAX;

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
    pub(super) memory_bytes: AtomicUsize,
    /// Part of the memory that is being freed by closing the connection. 0 while it stays open.
    pub(super) closing_bytes: AtomicUsize,
    /// Whether the connection must not be closed to free its memory.
    pub(super) is_unclosable: AtomicBool,
    /// Whether the peer is a trusted proxy, whose connection carries requests of many clients.
    is_from_trusted_proxy: AtomicBool,
    /// Whether the connection is to make place for another one, if it is idle.
    is_idle_close_requested: AtomicBool,
    /// Waker of the task that drives the connection.
    driver: Mutex<Option<Waker>>,
}

impl OpenConnection {
    /// A new connection, with a clock in milliseconds since `epoch`.
    pub(crate) fn new(id: u64, listener_index: usize, epoch: Instant) -> Self {
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
            driver: Mutex::new(None),
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
            self.wake_driver();
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
        self.wake_driver();
    }

    /// Takes the request of [`OpenConnection::close_if_idle`].
    pub(crate) fn take_idle_close_request(&self) -> bool {
        self.is_idle_close_requested.load(Ordering::Relaxed)
            && self.is_idle_close_requested.swap(false, Ordering::Relaxed)
    }

    pub(crate) fn set_driver_waker(&self, waker: &Waker) {
        let mut driver = self.driver.lock();
        match &mut *driver {
            Some(known) => known.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }

    /// Wakes the task that drives the connection.
    pub(crate) fn wake_driver(&self) {
        if let Some(driver) = &*self.driver.lock() {
            driver.wake_by_ref();
        }
    }
}
