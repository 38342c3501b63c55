//! HTTP/2 frames that cost us work and get nobody anywhere.
//!
//! h2 bounds what it has to remember (streams that were reset before we saw them, streams that we reset, empty and
//! small DATA, CONTINUATIONs). It answers, or skips, without end what leaves no trace: PING, SETTINGS, PRIORITY,
//! RST_STREAM, WINDOW_UPDATE by the byte, frames of unknown types. And nothing in HTTP/2 keeps a client from giving up
//! every request as soon as we have begun it. So each connection has a [`Budget`]: such frames spend, what we
//! manage to send earns, and whoever runs out of it ends.

use std::cell::Cell;
use std::time::Duration;
use tokio::time::Instant;

/// A connection begins with this much and never has more. A burst of so many frames costs some milliseconds.
const MOST: u32 = 10_000;
/// What comes back by itself, per second: keepalives and the odd cancellation need less.
const PER_SECOND: u32 = 100;
/// For the head of a response, and for each part of a body that is on its way. Some clients answer a part of 16 KiB
/// with a WINDOW_UPDATE per 4 KiB, for the stream and for the connection, and measure with a PING.
const EARNED: u32 = 16;
/// A request that the client gives up at once, though it has been decided and perhaps forwarded: 500 in a burst,
/// then 5 in a second, and as many more as three out of four answered ones allow.
const EARLY_RESET: u32 = 20;
/// Giving up later is impatience, and bounded by the streams that there may be at a time.
const EARLY: Duration = Duration::from_secs(1);

/// What a client may still waste.
#[derive(Debug)]
pub(super) struct Budget {
    left: Cell<u32>,
    /// When something last came back by itself.
    refilled: Cell<Instant>,
    exhausted: Cell<bool>,
}

impl Budget {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            left: Cell::new(MOST),
            refilled: Cell::new(now),
            exhausted: Cell::new(false),
        }
    }

    /// A part of a response is on its way.
    pub(super) fn earn(&self) {
        self.left.set((self.left.get() + EARNED).min(MOST));
    }

    /// The client gave a request up, so long after it had come, before it was answered.
    pub(super) fn given_up(&self, after: Duration) {
        if after < EARLY {
            self.spend(EARLY_RESET);
        }
    }

    /// So many frames got nobody anywhere.
    pub(super) fn spend(&self, frames: u32) {
        if self.left.get() < frames {
            // The clock is looked at only by those who waste much.
            let now = Instant::now();
            let idle_ms = now
                .saturating_duration_since(self.refilled.replace(now))
                .as_millis();
            let back = u32::try_from(idle_ms)
                .unwrap_or(u32::MAX)
                .saturating_mul(PER_SECOND)
                / 1000;
            self.left
                .set(self.left.get().saturating_add(back).min(MOST));
        }
        match self.left.get().checked_sub(frames) {
            Some(left) => self.left.set(left),
            None => self.exhausted.set(true),
        }
    }

    /// Whether the client has to go.
    pub(super) fn is_exhausted(&self) -> bool {
        self.exhausted.get()
    }
}

/// Length, type, flags and stream (RFC 9113, 4.1).
const HEAD_BYTES: usize = 9;
/// The preface, read as a frame's head; the rest of it is [`PREFACE_REST`].
const PREFACE_HEAD: [u8; HEAD_BYTES] = *b"PRI * HTT";
const PREFACE_REST: usize = 24 - HEAD_BYTES;

/// Finds the frames in what a client sends, without keeping any of it.
#[derive(Debug, Default)]
pub(super) struct Frames {
    head: [u8; HEAD_BYTES],
    /// Bytes of `head` that have come.
    known: usize,
    /// Bytes of the payload that are still to come.
    payload: usize,
}

impl Frames {
    /// Reads on. Returns how many frames began that a [`Budget`] has to pay for.
    pub(super) fn wasted(&mut self, mut bytes: &[u8]) -> u32 {
        let mut wasted = 0;
        loop {
            let skipped = self.payload.min(bytes.len());
            self.payload -= skipped;
            bytes = bytes.get(skipped..).unwrap_or_default();
            if bytes.is_empty() {
                return wasted;
            }
            for (into, byte) in self.head.iter_mut().skip(self.known).zip(bytes) {
                *into = *byte;
            }
            let taken = (HEAD_BYTES - self.known).min(bytes.len());
            self.known += taken;
            bytes = bytes.get(taken..).unwrap_or_default();
            if self.known == HEAD_BYTES {
                self.known = 0;
                if self.head == PREFACE_HEAD {
                    self.payload = PREFACE_REST;
                    continue;
                }
                let [a, b, c, kind, ..] = self.head;
                self.payload = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
                wasted += u32::from(is_wasted(kind));
            }
        }
    }
}

/// DATA, HEADERS and CONTINUATION are requests, and bounded as such or by h2.
fn is_wasted(kind: u8) -> bool {
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
    fn frames_are_found_however_the_bytes_are_cut() {
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
                let mut found = Frames::default();
                let wasted: u32 = bytes
                    .chunks(step.min(bytes.len()))
                    .map(|part| found.wasted(part))
                    .sum();
                assert_eq!(wasted, 5, "in steps of {step}: 4, 6, 8, 3 and 200");
                assert_eq!((found.known, found.payload), (0, 0));
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_budget_is_spent_earned_and_comes_back() {
        let budget = Budget::new(Instant::now());
        budget.earn();
        budget.spend(MOST);
        assert!(!budget.is_exhausted(), "all that there is");
        budget.earn();
        budget.spend(EARNED);
        advance(Duration::from_millis(500)).await;
        budget.spend(PER_SECOND / 2);
        assert!(!budget.is_exhausted());
        budget.given_up(EARLY);
        assert!(!budget.is_exhausted(), "who has waited may go");
        budget.given_up(Duration::ZERO);
        assert!(budget.is_exhausted());
        let budget = Budget::new(Instant::now());
        advance(Duration::from_secs(3600)).await;
        budget.spend(MOST);
        budget.spend(MOST + 1);
        assert!(budget.is_exhausted(), "time makes nobody rich");
    }
}
