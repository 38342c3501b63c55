//! HTTP/2 frames that cost us work and get nobody anywhere.
//!
//! h2 bounds what it has to remember (streams that were reset before we saw them, streams that we reset, empty and
//! small DATA, CONTINUATIONs). It answers, or skips, without end what leaves no trace: PING, SETTINGS, PRIORITY,
//! RST_STREAM, WINDOW_UPDATE by the byte, frames of unknown types. And nothing in HTTP/2 keeps a client from giving up
//! every request as soon as we have begun it. So each connection has a [`FrameBudget`]: such frames spend, what we
//! manage to send earns, and whoever runs out of it ends.

use std::cell::Cell;
use std::time::Duration;
use tokio::time::Instant;

/// A connection begins with this much and never has more. A burst of so many frames costs some milliseconds.
const MAX_BUDGET: u32 = 10_000;
/// What comes back by itself, per second: keepalives and the odd cancellation need less.
const REFILL_PER_SECOND: u32 = 100;
/// For the head of a response, and for each part of a body that is on its way. Some clients answer a part of 16 KiB
/// with a WINDOW_UPDATE per 4 KiB, for the stream and for the connection, and measure with a PING.
const RESPONSE_CREDIT: u32 = 16;
/// A request that the client gives up at once, though it has been decided and perhaps forwarded: 500 in a burst,
/// then 5 in a second, and as many more as three out of four answered ones allow.
const EARLY_RESET_COST: u32 = 20;
/// Giving up later is impatience, and bounded by the streams that there may be at a time.
const EARLY_RESET_WINDOW: Duration = Duration::from_secs(1);

/// What a client may still waste.
#[derive(Debug)]
pub(in crate::proxy) struct FrameBudget {
    remaining: Cell<u32>,
    /// When something last came back by itself.
    refilled_at: Cell<Instant>,
    is_exhausted: Cell<bool>,
}

impl FrameBudget {
    pub(in crate::proxy) fn new(now: Instant) -> Self {
        Self {
            remaining: Cell::new(MAX_BUDGET),
            refilled_at: Cell::new(now),
            is_exhausted: Cell::new(false),
        }
    }

    /// A part of a response is on its way.
    pub(in crate::proxy) fn credit_response(&self) {
        self.remaining
            .set((self.remaining.get() + RESPONSE_CREDIT).min(MAX_BUDGET));
    }

    /// The client gave a request up, so long after it had come, before it was answered.
    pub(in crate::proxy) fn charge_reset(&self, age: Duration) {
        if age < EARLY_RESET_WINDOW {
            self.charge_frames(EARLY_RESET_COST);
        }
    }

    /// So many frames got nobody anywhere.
    pub(in crate::proxy) fn charge_frames(&self, frames: u32) {
        if self.remaining.get() < frames {
            // The clock is looked at only by those who waste much.
            let now = Instant::now();
            let idle_ms = now
                .saturating_duration_since(self.refilled_at.replace(now))
                .as_millis();
            let refill = u32::try_from(idle_ms)
                .unwrap_or(u32::MAX)
                .saturating_mul(REFILL_PER_SECOND)
                / 1000;
            self.remaining
                .set(self.remaining.get().saturating_add(refill).min(MAX_BUDGET));
        }
        match self.remaining.get().checked_sub(frames) {
            Some(left) => self.remaining.set(left),
            None => self.is_exhausted.set(true),
        }
    }

    /// Whether the client has to go.
    pub(in crate::proxy) fn is_exhausted(&self) -> bool {
        self.is_exhausted.get()
    }
}

/// Length, type, flags and stream (RFC 9113, 4.1).
const FRAME_HEAD_BYTES: usize = 9;
/// The preface, read as a frame's head; the rest of it is [`PREFACE_REST_BYTES`].
const PREFACE_HEAD: [u8; FRAME_HEAD_BYTES] = *b"PRI * HTT";
const PREFACE_REST_BYTES: usize = 24 - FRAME_HEAD_BYTES;

/// Finds the frames in what a client sends, without keeping any of it.
#[derive(Debug, Default)]
pub(in crate::proxy) struct FrameScanner {
    head: [u8; FRAME_HEAD_BYTES],
    /// Bytes of `head` that have come.
    head_len: usize,
    /// Bytes of the payload that are still to come.
    remaining_payload: usize,
}

impl FrameScanner {
    /// Reads on. Returns how many frames began that a [`FrameBudget`] has to pay for.
    pub(in crate::proxy) fn count_costly_frames(&mut self, mut bytes: &[u8]) -> u32 {
        let mut costly_frames = 0;
        loop {
            let skipped = self.remaining_payload.min(bytes.len());
            self.remaining_payload -= skipped;
            bytes = bytes.get(skipped..).unwrap_or_default();
            if bytes.is_empty() {
                return costly_frames;
            }
            for (into, byte) in self.head.iter_mut().skip(self.head_len).zip(bytes) {
                *into = *byte;
            }
            let taken = (FRAME_HEAD_BYTES - self.head_len).min(bytes.len());
            self.head_len += taken;
            bytes = bytes.get(taken..).unwrap_or_default();
            if self.head_len == FRAME_HEAD_BYTES {
                self.head_len = 0;
                if self.head == PREFACE_HEAD {
                    self.remaining_payload = PREFACE_REST_BYTES;
                    continue;
                }
                let [a, b, c, kind, ..] = self.head;
                self.remaining_payload =
                    usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
                costly_frames += u32::from(is_costly(kind));
            }
        }
    }
}

/// DATA, HEADERS and CONTINUATION are requests, and bounded as such or by h2.
fn is_costly(kind: u8) -> bool {
    const DATA: u8 = 0;
    const HEADERS: u8 = 1;
    const CONTINUATION: u8 = 9;
    !matches!(kind, DATA | HEADERS | CONTINUATION)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    fn frame(kind: u8, payload: usize) -> Vec<u8> {
        let [.., a, b, c] = u32::try_from(payload).unwrap().to_be_bytes();
        [vec![a, b, c, kind, 0, 0, 0, 0, 1], vec![0xff; payload]].concat()
    }

    #[test]
    fn counts_frames_however_the_bytes_are_split() {
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        let kinds = [
            (4, 18),
            (1, 300),
            (9, 0),
            (0, 70_000),
            (6, 8),
            (8, 4),
            (0, 0),
            (3, 4),
            (200, 17),
        ];
        let frames: Vec<u8> = kinds
            .into_iter()
            .flat_map(|(kind, len)| frame(kind, len))
            .collect();
        for bytes in [[preface, frames.clone()].concat(), frames] {
            for step in [1, 2, 3, 8, 9, 10, 1000, usize::MAX] {
                let mut found = FrameScanner::default();
                let wasted: u32 = bytes
                    .chunks(step.min(bytes.len()))
                    .map(|part| found.count_costly_frames(part))
                    .sum();
                assert_eq!(wasted, 5, "in steps of {step}: 4, 6, 8, 3 and 200");
                assert_eq!((found.head_len, found.remaining_payload), (0, 0));
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_budget_is_spent_credited_and_refilled() {
        let budget = FrameBudget::new(Instant::now());
        budget.credit_response();
        budget.charge_frames(MAX_BUDGET);
        assert!(!budget.is_exhausted(), "all that there is");
        budget.credit_response();
        budget.charge_frames(RESPONSE_CREDIT);
        advance(Duration::from_millis(500)).await;
        budget.charge_frames(REFILL_PER_SECOND / 2);
        assert!(!budget.is_exhausted());
        budget.charge_reset(EARLY_RESET_WINDOW);
        assert!(!budget.is_exhausted(), "who has waited may go");
        budget.charge_reset(Duration::ZERO);
        assert!(budget.is_exhausted());
        let budget = FrameBudget::new(Instant::now());
        advance(Duration::from_secs(3600)).await;
        budget.charge_frames(MAX_BUDGET);
        budget.charge_frames(MAX_BUDGET + 1);
        assert!(budget.is_exhausted(), "time makes nobody rich");
    }
}
