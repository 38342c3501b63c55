//! Rate limits for abusive HTTP/2 control frames.
//!
//! h2 limits the frames that leave state behind: reset streams, empty and small DATA, CONTINUATION.
//! h2 processes all other frames without limit: PING, SETTINGS, PRIORITY, RST_STREAM, WINDOW_UPDATE
//! of single bytes, unknown types. A client may also cancel each request as soon as it has started.
//! Each connection therefore has a [`FrameBudget`]: abusive frames spend credit, sent responses
//! earn credit, and an exhausted budget ends the connection. Each upload has one for its tiny DATA
//! frames, which ends the upload.

use std::cell::Cell;
use std::time::Duration;
use tokio::time::Instant;

/// Initial and maximum credit of a connection. A burst of this many frames costs a few
/// milliseconds.
const MAX_BUDGET: u32 = 10_000;
/// Credit refilled per second. Keep-alives and occasional cancellations need less credit.
const REFILL_PER_SECOND: u32 = 100;
/// Credit earned by a response head and by each body chunk sent. Some clients answer a chunk of 16
/// KiB with a WINDOW_UPDATE per 4 KiB, for the stream and for the connection, and with a PING to
/// measure latency.
const RESPONSE_CREDIT: u32 = 16;
/// Credit spent for a request that the client cancels early, although it was decided and perhaps
/// forwarded. The budget allows 500 early cancellations in a burst, then 5 per second, and more in
/// proportion to the responses sent.
const EARLY_RESET_COST: u32 = 20;
/// Credit spent for a request with a malformed head, which is answered with a head and a body: as
/// for an early cancellation, beyond the credit that the answer earns.
pub(crate) const MALFORMED_HEAD_COST: u32 = EARLY_RESET_COST + 2 * RESPONSE_CREDIT;
/// Age of a request from which its cancellation is free. Late cancellations are limited by the
/// number of concurrent streams.
const EARLY_RESET_WINDOW: Duration = Duration::from_secs(1);

/// Remaining credit of a client connection for costly frames, or of an upload for tiny ones.
#[derive(Debug)]
pub(crate) struct FrameBudget {
    remaining: Cell<u32>,
    /// Time of the last refill.
    refilled_at: Cell<Instant>,
    /// Whether more than the credit was spent, so that the connection must be closed.
    pub(crate) is_exhausted: Cell<bool>,
}

impl FrameBudget {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            remaining: Cell::new(MAX_BUDGET),
            refilled_at: Cell::new(now),
            is_exhausted: Cell::new(false),
        }
    }

    /// Earns credit for a response head or body chunk that was sent.
    pub(crate) fn credit_response(&self) {
        self.remaining
            .update(|credit| (credit + RESPONSE_CREDIT).min(MAX_BUDGET));
    }

    /// Spends credit for a request that the client cancelled at this `age`, before its response was
    /// complete. A late cancellation is free.
    pub(crate) fn charge_early_reset(&self, age: Duration) {
        if age < EARLY_RESET_WINDOW {
            self.charge_frames(EARLY_RESET_COST);
        }
    }

    /// Spends one credit for each costly frame.
    pub(crate) fn charge_frames(&self, frames: u32) {
        if self.remaining.get() < frames {
            // The credit is refilled only when it runs out, so that well-behaved clients cause no
            // clock reads.
            let now = Instant::now();
            let idle = now.saturating_duration_since(self.refilled_at.replace(now));
            let idle_ms = u32::try_from(idle.as_millis()).unwrap_or(u32::MAX);
            let refill = idle_ms.saturating_mul(REFILL_PER_SECOND) / 1000;
            self.remaining
                .update(|value| value.saturating_add(refill).min(MAX_BUDGET));
        }
        match self.remaining.get().checked_sub(frames) {
            Some(left) => self.remaining.set(left),
            None => self.is_exhausted.set(true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn a_budget_is_spent_credited_and_refilled() {
        let budget = FrameBudget::new(Instant::now());
        budget.credit_response();
        budget.charge_frames(MAX_BUDGET);
        assert!(!budget.is_exhausted.get(), "the whole budget can be spent");
        budget.credit_response();
        budget.charge_frames(RESPONSE_CREDIT);
        advance(Duration::from_millis(500)).await;
        budget.charge_frames(REFILL_PER_SECOND / 2);
        assert!(!budget.is_exhausted.get());
        budget.charge_early_reset(EARLY_RESET_WINDOW);
        assert!(!budget.is_exhausted.get(), "a late cancellation is free");
        budget.charge_early_reset(Duration::ZERO);
        assert!(budget.is_exhausted.get());
        let budget = FrameBudget::new(Instant::now());
        advance(Duration::from_secs(3600)).await;
        budget.charge_frames(MAX_BUDGET);
        budget.charge_frames(MAX_BUDGET + 1);
        assert!(
            budget.is_exhausted.get(),
            "a refill does not exceed the maximum"
        );
    }
}
