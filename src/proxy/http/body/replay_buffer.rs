//! Replay buffer of a request body, for upstreams that may refuse a request unprocessed.

use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;
use smallvec::SmallVec;

/// Limits of the buffer. Chunks are kept as received, and each may hold a larger allocation, so
/// their number is limited too.
const MAX_REPLAY_BYTES: usize = 64 * 1024;
const MAX_REPLAY_PARTS: usize = 16;

/// The start of a request body, kept for a retry.
#[derive(Debug, Default)]
pub(super) struct ReplayBuffer {
    parts: SmallVec<[BodyReplayPart; 2]>,
    bytes: usize,
    /// Parts handed over since the last rewind.
    position: usize,
    state: BodyReplayState,
}

#[derive(Debug)]
enum BodyReplayPart {
    Data(Bytes),
    Trailers(Box<HeaderMap>),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum BodyReplayState {
    /// Nothing was read yet.
    #[default]
    Idle,
    /// Everything that was read is in the buffer.
    Complete,
    /// Some of what was read is not in the buffer.
    Incomplete,
}

impl ReplayBuffer {
    /// Starts recording.
    pub(super) fn enable(&mut self) {
        if self.state == BodyReplayState::Idle {
            self.state = BodyReplayState::Complete;
        }
    }

    /// Stops recording. Parts that were rewound but not handed over yet remain.
    pub(super) fn disable(&mut self) {
        if self.state == BodyReplayState::Complete {
            self.state = BodyReplayState::Incomplete;
        }
        self.release_replayed();
    }

    /// Records a frame that was read and handed over.
    pub(super) fn record_frame(&mut self, frame: &Frame<Bytes>) {
        let length = frame.data_ref().map_or(0, Bytes::len);
        if self.state != BodyReplayState::Complete {
            self.state = BodyReplayState::Incomplete;
            return;
        }
        if self.bytes + length > MAX_REPLAY_BYTES || self.parts.len() >= MAX_REPLAY_PARTS {
            return self.disable();
        }
        self.bytes += length;
        let trailers = || {
            frame
                .trailers_ref()
                .map(|trailers| BodyReplayPart::Trailers(Box::new(trailers.clone())))
        };
        self.parts.extend(
            frame
                .data_ref()
                .cloned()
                .map(BodyReplayPart::Data)
                .or_else(trailers),
        );
        self.position = self.parts.len();
    }

    /// Returns the next recorded frame after a rewind.
    pub(super) fn next_frame(&mut self) -> Option<Frame<Bytes>> {
        let part = self.parts.get(self.position)?;
        let frame = match part {
            BodyReplayPart::Data(data) => Frame::data(data.clone()),
            BodyReplayPart::Trailers(trailers) => Frame::trailers(HeaderMap::clone(trailers)),
        };
        self.position += 1;
        if self.state == BodyReplayState::Incomplete {
            self.release_replayed();
        }
        Some(frame)
    }

    fn release_replayed(&mut self) {
        if self.is_fully_replayed() {
            (self.parts, self.position) = (SmallVec::new(), 0);
        }
    }

    /// Whether the next frame must be read from the client.
    pub(super) fn is_fully_replayed(&self) -> bool {
        self.position == self.parts.len()
    }

    /// Recorded data bytes that were not handed over again yet.
    pub(super) fn pending_bytes(&self) -> u64 {
        let pending = self.parts.iter().skip(self.position);
        pending
            .map(|part| {
                if let BodyReplayPart::Data(data) = part {
                    data.len() as u64
                } else {
                    0
                }
            })
            .sum()
    }

    /// Rewinds to the start. Returns `false` if the buffer is incomplete.
    pub(super) fn rewind(&mut self) -> bool {
        self.position = if self.state == BodyReplayState::Incomplete {
            self.position
        } else {
            0
        };
        self.state != BodyReplayState::Incomplete
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_REPLAY_BYTES, MAX_REPLAY_PARTS, ReplayBuffer};
    use bytes::Bytes;
    use http::HeaderMap;
    use http_body::Frame;

    fn data_frame(length: usize) -> Frame<Bytes> {
        Frame::data(vec![b'x'; length].into())
    }

    fn record_frames(buffer: &mut ReplayBuffer, frames: impl IntoIterator<Item = Frame<Bytes>>) {
        frames
            .into_iter()
            .for_each(|frame| buffer.record_frame(&frame));
    }

    /// Lengths of the replayed frames; 0 for trailers.
    fn replayed_lengths(buffer: &mut ReplayBuffer) -> Vec<usize> {
        std::iter::from_fn(|| buffer.next_frame())
            .map(|frame| frame.data_ref().map_or(0, Bytes::len))
            .collect()
    }

    #[test]
    fn recorded_frames_can_be_replayed_repeatedly() {
        let mut buffer = ReplayBuffer::default();
        assert!(buffer.rewind(), "nothing was read");
        buffer.enable();
        record_frames(&mut buffer, [data_frame(3), data_frame(4)]);
        for _ in 0..2 {
            assert!(buffer.rewind());
            assert_eq!(buffer.pending_bytes(), 7);
            assert_eq!(replayed_lengths(&mut buffer), [3, 4]);
        }
        record_frames(&mut buffer, [Frame::trailers(HeaderMap::new())]);
        assert!(buffer.rewind());
        // Frames that were not replayed yet must survive.
        buffer.disable();
        assert_eq!(replayed_lengths(&mut buffer), [3, 4, 0]);
        assert!(!buffer.rewind() && buffer.parts.is_empty());
    }

    #[test]
    fn replay_buffer_is_bounded() {
        for (frames, can_replay) in [
            (vec![data_frame(MAX_REPLAY_BYTES)], true),
            (vec![data_frame(MAX_REPLAY_BYTES), data_frame(1)], false),
            ((0..MAX_REPLAY_PARTS).map(|_| data_frame(1)).collect(), true),
            (
                (0..=MAX_REPLAY_PARTS).map(|_| data_frame(1)).collect(),
                false,
            ),
        ] {
            let mut buffer = ReplayBuffer::default();
            buffer.enable();
            record_frames(&mut buffer, frames);
            assert_eq!(buffer.rewind(), can_replay);
            assert_eq!(
                buffer.parts.is_empty(),
                !can_replay,
                "an incomplete buffer releases its parts"
            );
        }
    }

    #[test]
    fn records_nothing_before_replay_is_enabled() {
        let mut buffer = ReplayBuffer::default();
        record_frames(&mut buffer, [data_frame(3)]);
        buffer.enable();
        record_frames(&mut buffer, [data_frame(3)]);
        assert!(!buffer.rewind() && buffer.parts.is_empty());
    }
}
