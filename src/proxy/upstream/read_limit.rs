//! Size of the reads from an HTTP/1.1 upstream: small, so that a slow client holds little memory,
//! and large for a client that takes a large response quickly.
//!
//! hyper doubles its read buffer, up to 256 KiB, as long as reads fill it. A limit of one byte less
//! than a power of two keeps the buffer at that size.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// Maximum bytes of one read.
const SMALL_READ_BYTES: u64 = 16 * 1024 - 1;

/// Maximum bytes of one read for a fast client. Larger reads take no less CPU time.
const LARGE_READ_BYTES: u64 = 32 * 1024 - 1;

/// A client is fast while it takes this many bytes of a response in this time: 5 MB/s.
const SAMPLE_BYTES: usize = 512 * 1024;
const FAST_SAMPLE_TIME: Duration = Duration::from_millis(100);

/// Bytes that a connection reads before its unread frames are collected. Bounds the unread
/// frames that h2 holds.
pub(super) const READ_ALLOWANCE_BYTES: usize = 64 * 1024;

/// Bytes that a connection has read since its unread frames were collected. One task uses it; it is
/// atomic because hyper requires sockets that are `Send`.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReadAllowance(Arc<AtomicUsize>);

/// Whether the next reads from one connection may be large.
#[derive(Clone, Debug, Default)]
pub(super) struct ReadLimit(Arc<AtomicBool>);

/// Rate at which the client takes the current response of a connection, which sets the limit.
#[derive(Debug)]
pub(crate) struct ResponseRate {
    limit: ReadLimit,
    /// Bytes since the last sample.
    bytes: usize,
    sampled_at: Option<Instant>,
}

impl ReadLimit {
    /// Maximum bytes of a read.
    pub(super) fn bytes(&self) -> u64 {
        if self.0.load(Ordering::Relaxed) {
            LARGE_READ_BYTES
        } else {
            SMALL_READ_BYTES
        }
    }
}

impl ReadAllowance {
    /// Records read bytes.
    pub(crate) fn spend(&self, bytes: usize) {
        let spent = self.0.load(Ordering::Relaxed).saturating_add(bytes);
        self.0.store(spent, Ordering::Relaxed);
    }

    pub(crate) fn is_spent(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= READ_ALLOWANCE_BYTES
    }

    pub(crate) fn renew(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

impl ResponseRate {
    pub(super) fn new(limit: ReadLimit) -> Self {
        Self {
            limit,
            bytes: 0,
            sampled_at: None,
        }
    }

    /// Records bytes that the client is about to take, after it took all bytes before them. Adjusts
    /// the limit after each sample.
    pub(super) fn record(&mut self, bytes: usize) {
        self.bytes += bytes;
        if self.bytes < SAMPLE_BYTES {
            return;
        }
        let now = Instant::now();
        let sampled_at = self.sampled_at.replace(now);
        let is_fast = sampled_at.is_some_and(|at| now.duration_since(at) <= FAST_SAMPLE_TIME);
        self.bytes = 0;
        self.limit.0.store(is_fast, Ordering::Relaxed);
    }

    /// Begins the next response, with the small limit.
    pub(super) fn restart(&mut self) {
        self.bytes = 0;
        if self.sampled_at.take().is_some() {
            self.limit.0.store(false, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn only_a_fast_client_of_a_large_response_gets_large_reads() {
        let limit = ReadLimit::default();
        let mut rate = ResponseRate::new(limit.clone());
        let mut limits = Vec::new();
        for part_ms in [0, 3, 4, 2, 1] {
            for _ in 0..SAMPLE_BYTES / 16_384 {
                advance(Duration::from_millis(part_ms)).await;
                rate.record(16_384);
            }
            limits.push(limit.bytes());
        }
        let (small, large) = (SMALL_READ_BYTES, LARGE_READ_BYTES);
        assert_eq!(limits, [small, large, small, large, large]);
        rate.restart();
        assert_eq!(limit.bytes(), small);
    }
}
