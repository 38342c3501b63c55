//! Rate limits for abusive HTTP/2 control frames.
//!
//! h2 limits the frames that leave state behind: reset streams, empty and small DATA, CONTINUATION.
//! h2 processes all other frames without limit: PING, SETTINGS, PRIORITY, RST_STREAM, WINDOW_UPDATE
//! of single bytes, unknown types. A client may also cancel each request as soon as it has started.
//! Each connection therefore has a [`FrameBudget`]: abusive frames spend credit, sent responses
//! earn credit, and an exhausted budget ends the connection.

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
/// Age of a request from which its cancellation is free. Late cancellations are limited by the
/// number of concurrent streams.
const EARLY_RESET_WINDOW: Duration = Duration::from_secs(1);

/// Remaining credit of a client connection for costly frames.
#[derive(Debug)]
pub(in crate::proxy) struct FrameBudget {
    remaining: Cell<u32>,
    /// Time of the last refill.
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

    /// Earns credit for a response head or body chunk that was sent.
    pub(in crate::proxy) fn credit_response(&self) {
        self.remaining
            .set((self.remaining.get() + RESPONSE_CREDIT).min(MAX_BUDGET));
    }

    /// Spends credit for a request that the client cancelled at this `age`, before its response was
    /// complete. A late cancellation is free.
    pub(in crate::proxy) fn charge_early_reset(&self, age: Duration) {
        if age < EARLY_RESET_WINDOW {
            self.charge_frames(EARLY_RESET_COST);
        }
    }

    /// Spends one credit for each costly frame.
    pub(in crate::proxy) fn charge_frames(&self, frames: u32) {
        if self.remaining.get() < frames {
            // The credit is refilled only when it runs out, so that well-behaved clients cause no
            // clock reads.
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

    /// Whether more than the credit was spent, so that the connection must be closed.
    pub(in crate::proxy) fn is_exhausted(&self) -> bool {
        self.is_exhausted.get()
    }
}

/// Length of a frame header: length, type, flags and stream (RFC 9113, 4.1).
const FRAME_HEAD_BYTES: usize = 9;
/// First bytes of the client preface, parsed as a frame header. The other [`PREFACE_REST_BYTES`] of
/// the preface follow.
const PREFACE_AS_FRAME_HEAD: [u8; FRAME_HEAD_BYTES] = *b"PRI * HTT";
const PREFACE_REST_BYTES: usize = 24 - FRAME_HEAD_BYTES;

/// Counts the costly frames in a client's byte stream by their headers, without keeping payloads.
#[derive(Debug, Default)]
pub(in crate::proxy) struct FrameScanner {
    head: [u8; FRAME_HEAD_BYTES],
    /// Received bytes of `head`.
    head_len: usize,
    /// Payload bytes still to be skipped.
    remaining_payload: usize,
    /// Whether the last frame head belongs to a field block that a later CONTINUATION ends.
    is_block_open: bool,
    /// Whether the remaining payload is part of a field block.
    is_block_payload: bool,
    /// Bytes of DATA payloads since the last [`FrameScanner::take_data_bytes`].
    data_bytes: usize,
}

impl FrameScanner {
    /// Scans the next bytes. Returns the number of costly frames whose header ends in these bytes.
    pub(in crate::proxy) fn count_costly_frames(&mut self, mut bytes: &[u8]) -> u32 {
        let mut costly_frames = 0;
        loop {
            let skipped = self.remaining_payload.min(bytes.len());
            self.remaining_payload -= skipped;
            let [_, _, _, kind, ..] = self.head;
            if kind == DATA {
                self.data_bytes += skipped;
            }
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
                if self.head == PREFACE_AS_FRAME_HEAD {
                    self.remaining_payload = PREFACE_REST_BYTES;
                    continue;
                }
                let [a, b, c, kind, flags, ..] = self.head;
                self.remaining_payload =
                    usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
                self.is_block_payload = matches!(kind, HEADERS | CONTINUATION);
                self.is_block_open = self.is_block_payload && flags & END_HEADERS == 0;
                costly_frames += u32::from(is_costly_frame_type(kind));
            }
        }
    }

    /// Returns the bytes of DATA payloads since the last call.
    pub(in crate::proxy) fn take_data_bytes(&mut self) -> usize {
        std::mem::take(&mut self.data_bytes)
    }

    /// Whether the bytes so far end within a field block: the head or the trailers of a request.
    pub(in crate::proxy) fn is_within_field_block(&self) -> bool {
        self.is_block_open || self.is_block_payload && self.remaining_payload > 0
    }
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
/// Flag of the last frame of a field block.
const END_HEADERS: u8 = 4;

/// Whether frames of this type spend credit. DATA, HEADERS and CONTINUATION do not: they belong to
/// requests, which are limited as requests or by h2.
fn is_costly_frame_type(kind: u8) -> bool {
    !matches!(kind, DATA | HEADERS | CONTINUATION)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    fn build_frame(kind: u8, payload: usize) -> Vec<u8> {
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
            .flat_map(|(kind, len)| build_frame(kind, len))
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

    #[test]
    fn a_field_block_ends_with_the_payload_that_has_end_headers() {
        let with_flags = |kind, flags, payload| {
            let mut frame = build_frame(kind, payload);
            frame[4] = flags;
            frame
        };
        let steps = [
            (with_flags(SETTINGS, 0, 6), false),
            (with_flags(HEADERS, 0, 30), true),
            (with_flags(CONTINUATION, 0, 0), true),
            (with_flags(CONTINUATION, END_HEADERS, 5), false),
            (with_flags(DATA, 0, 9), false),
            (with_flags(HEADERS, END_HEADERS | 1, 4), false),
        ];
        let mut scanner = FrameScanner::default();
        for (frame, is_within_at_end) in steps {
            let (last, rest) = frame.split_last().unwrap();
            scanner.count_costly_frames(rest);
            let is_block = matches!(frame[3], HEADERS | CONTINUATION);
            assert!(frame.len() == FRAME_HEAD_BYTES || scanner.is_within_field_block() == is_block);
            scanner.count_costly_frames(&[*last]);
            assert_eq!(scanner.is_within_field_block(), is_within_at_end);
        }
    }

    const SETTINGS: u8 = 4;

    #[tokio::test(start_paused = true)]
    async fn a_budget_is_spent_credited_and_refilled() {
        let budget = FrameBudget::new(Instant::now());
        budget.credit_response();
        budget.charge_frames(MAX_BUDGET);
        assert!(!budget.is_exhausted(), "the whole budget can be spent");
        budget.credit_response();
        budget.charge_frames(RESPONSE_CREDIT);
        advance(Duration::from_millis(500)).await;
        budget.charge_frames(REFILL_PER_SECOND / 2);
        assert!(!budget.is_exhausted());
        budget.charge_early_reset(EARLY_RESET_WINDOW);
        assert!(!budget.is_exhausted(), "a late cancellation is free");
        budget.charge_early_reset(Duration::ZERO);
        assert!(budget.is_exhausted());
        let budget = FrameBudget::new(Instant::now());
        advance(Duration::from_secs(3600)).await;
        budget.charge_frames(MAX_BUDGET);
        budget.charge_frames(MAX_BUDGET + 1);
        assert!(
            budget.is_exhausted(),
            "a refill does not exceed the maximum"
        );
    }
}
