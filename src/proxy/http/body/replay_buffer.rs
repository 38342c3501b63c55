//! The begin of a request body, for upstreams that may say that they have not looked at it.

use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;
use smallvec::SmallVec;

/// The begin of a request body is kept up to here while it may have to be sent once more. Parts are kept as they came,
/// so each may hold the buffer that it came in: they are counted, too.
const MAX_REPLAY_BYTES: usize = 64 * 1024;
const MAX_REPLAY_PARTS: usize = 16;

/// The begin of a request body, for the case that it has to be sent once more.
#[derive(Debug, Default)]
pub(super) struct ReplayBuffer {
    parts: SmallVec<[BodyReplayPart; 2]>,
    bytes: usize,
    /// How many of the parts have been handed over, this time.
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
    /// Nothing has been read.
    #[default]
    Idle,
    /// All that was read is there.
    Complete,
    /// Some of it isn't any more.
    Incomplete,
}

impl ReplayBuffer {
    /// From here on what is read is kept.
    pub(super) fn enable(&mut self) {
        if self.state == BodyReplayState::Idle {
            self.state = BodyReplayState::Complete;
        }
    }

    /// It need not come again, but for what is still to be told.
    pub(super) fn disable(&mut self) {
        if self.state == BodyReplayState::Complete {
            self.state = BodyReplayState::Incomplete;
        }
        self.release_replayed();
    }

    /// Something was read, and handed over.
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

    /// What stands before that which is still to come.
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

    /// Whether what comes next has to be read.
    pub(super) fn is_fully_replayed(&self) -> bool {
        self.position == self.parts.len()
    }

    /// Of data, before anything has to be read.
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

    /// Tells all from the beginning. `false`: some of it is not there any more.
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

    fn record_frames(kept: &mut ReplayBuffer, frames: impl IntoIterator<Item = Frame<Bytes>>) {
        frames
            .into_iter()
            .for_each(|frame| kept.record_frame(&frame));
    }

    /// The lengths of what is told again; trailers are 0.
    fn replayed_lengths(kept: &mut ReplayBuffer) -> Vec<usize> {
        std::iter::from_fn(|| kept.next_frame())
            .map(|frame| frame.data_ref().map_or(0, Bytes::len))
            .collect()
    }

    #[test]
    fn recorded_frames_can_be_replayed_repeatedly() {
        let mut kept = ReplayBuffer::default();
        assert!(kept.rewind(), "nothing was read");
        kept.enable();
        record_frames(&mut kept, [data_frame(3), data_frame(4)]);
        for _ in 0..2 {
            assert!(kept.rewind());
            assert_eq!(kept.pending_bytes(), 7);
            assert_eq!(replayed_lengths(&mut kept), [3, 4]);
        }
        record_frames(&mut kept, [Frame::trailers(HeaderMap::new())]);
        assert!(kept.rewind());
        // Nobody will ask for it again, but for what is not told yet.
        kept.disable();
        assert_eq!(replayed_lengths(&mut kept), [3, 4, 0]);
        assert!(!kept.rewind() && kept.parts.is_empty());
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
            let mut kept = ReplayBuffer::default();
            kept.enable();
            record_frames(&mut kept, frames);
            assert_eq!(kept.rewind(), can_replay);
            assert_eq!(
                kept.parts.is_empty(),
                !can_replay,
                "what is no use is let go"
            );
        }
    }

    #[test]
    fn records_nothing_before_replay_is_enabled() {
        let mut kept = ReplayBuffer::default();
        record_frames(&mut kept, [data_frame(3)]);
        kept.enable();
        record_frames(&mut kept, [data_frame(3)]);
        assert!(!kept.rewind() && kept.parts.is_empty());
    }
}
