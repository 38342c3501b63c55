//! Buffer that replays a request body if the upstream refused the request unprocessed.

use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;
use smallvec::SmallVec;

/// Maximum bytes and number of parts in the buffer. More parts are joined, because each chunk may
/// keep a larger allocation alive.
const MAX_REPLAY_BYTES: usize = 64 * 1024;
const MAX_REPLAY_PARTS: usize = 16;

/// The start of a request body, kept for a retry.
#[derive(Debug, Default)]
pub(crate) struct ReplayBuffer {
    parts: SmallVec<[BodyReplayPart; 2]>,
    bytes: usize,
    /// Number of recorded parts handed over since the last rewind.
    position: usize,
    state: BodyRecordingState,
}

#[derive(Debug)]
enum BodyReplayPart {
    Data(Bytes),
    Trailers(Box<HeaderMap>),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum BodyRecordingState {
    /// Nothing of the body was read, and recording has not started.
    #[default]
    Idle,
    /// Everything read of the body is in the buffer.
    Complete,
    /// Some of what was read is not in the buffer; a rewind is impossible.
    Incomplete,
}

impl ReplayBuffer {
    /// Starts recording, unless part of the body was already read.
    pub(crate) fn start_recording(&mut self) {
        if self.state == BodyRecordingState::Idle {
            self.state = BodyRecordingState::Complete;
        }
    }

    /// Stops recording. Parts to be replayed remain until all are handed over.
    pub(crate) fn stop_recording(&mut self) {
        if self.state == BodyRecordingState::Complete {
            self.state = BodyRecordingState::Incomplete;
        }
        self.release_if_fully_replayed();
    }

    /// Adds a frame that was read ahead, and is still to be handed over.
    pub(crate) fn append_frame(&mut self, frame: &Frame<Bytes>) {
        self.start_recording();
        self.push_part(frame);
    }

    /// Records a frame that is handed over, if recording. A frame that exceeds the maximum stops
    /// the recording.
    pub(crate) fn record_frame(&mut self, frame: &Frame<Bytes>) {
        let length = frame.data_ref().map_or(0, Bytes::len);
        if self.state != BodyRecordingState::Complete {
            self.state = BodyRecordingState::Incomplete;
            return;
        }
        if self.bytes + length > MAX_REPLAY_BYTES {
            return self.stop_recording();
        }
        self.push_part(frame);
        self.position = self.parts.len();
    }

    fn push_part(&mut self, frame: &Frame<Bytes>) {
        if self.parts.len() >= MAX_REPLAY_PARTS {
            self.join_parts();
        }
        let trailers = frame
            .trailers_ref()
            .map(|trailers| BodyReplayPart::Trailers(Box::new(trailers.clone())));
        if let Some(data) = frame.data_ref() {
            self.bytes += data.len();
            self.parts.push(BodyReplayPart::Data(data.clone()));
        }
        self.parts.extend(trailers);
    }

    /// Joins the parts, which are data: trailers end a body.
    fn join_parts(&mut self) {
        let mut joined = Vec::with_capacity(self.bytes);
        for part in self.parts.drain(..) {
            if let BodyReplayPart::Data(data) = part {
                joined.extend_from_slice(&data);
            }
        }
        self.parts.push(BodyReplayPart::Data(joined.into()));
    }

    /// Returns the next recorded frame to be replayed; `None` if none remains.
    pub(crate) fn next_replay_frame(&mut self) -> Option<Frame<Bytes>> {
        let part = self.parts.get(self.position)?;
        let frame = match part {
            BodyReplayPart::Data(data) => Frame::data(data.clone()),
            BodyReplayPart::Trailers(trailers) => Frame::trailers(HeaderMap::clone(trailers)),
        };
        self.position += 1;
        if self.state == BodyRecordingState::Incomplete {
            self.release_if_fully_replayed();
        }
        Some(frame)
    }

    fn release_if_fully_replayed(&mut self) {
        if self.is_fully_replayed() {
            (self.parts, self.position) = (SmallVec::new(), 0);
        }
    }

    /// Whether no recorded frame remains to be replayed, so that the next is read from the client.
    pub(crate) fn is_fully_replayed(&self) -> bool {
        self.position == self.parts.len()
    }

    /// Number of recorded data bytes that remain to be replayed.
    pub(crate) fn bytes_left_to_replay(&self) -> usize {
        let pending = self.parts.iter().skip(self.position);
        pending
            .map(|part| match part {
                BodyReplayPart::Data(data) => data.len(),
                BodyReplayPart::Trailers(_) => 0,
            })
            .sum()
    }

    /// Rewinds to the start of the body. Returns `false`, without a rewind, if the buffer is
    /// incomplete.
    pub(crate) fn rewind(&mut self) -> bool {
        let can_rewind = self.state != BodyRecordingState::Incomplete;
        if can_rewind {
            self.position = 0;
        }
        can_rewind
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

    /// Replays all remaining frames and returns their lengths; 0 for trailers.
    fn replay_frame_lengths(buffer: &mut ReplayBuffer) -> Vec<usize> {
        std::iter::from_fn(|| buffer.next_replay_frame())
            .map(|frame| frame.data_ref().map_or(0, Bytes::len))
            .collect()
    }

    #[test]
    fn recorded_frames_can_be_replayed_repeatedly() {
        let mut buffer = ReplayBuffer::default();
        assert!(buffer.rewind(), "nothing was read");
        buffer.start_recording();
        record_frames(&mut buffer, [data_frame(3), data_frame(4)]);
        for _ in 0..2 {
            assert!(buffer.rewind());
            assert_eq!(buffer.bytes_left_to_replay(), 7);
            assert_eq!(replay_frame_lengths(&mut buffer), [3, 4]);
        }
        record_frames(&mut buffer, [Frame::trailers(HeaderMap::new())]);
        assert!(buffer.rewind());
        // Frames that remain to be replayed must survive the end of the recording.
        buffer.stop_recording();
        assert_eq!(replay_frame_lengths(&mut buffer), [3, 4, 0]);
        assert!(!buffer.rewind() && buffer.parts.is_empty());
    }

    #[test]
    fn replay_buffer_is_bounded() {
        for (frames, can_replay) in [
            (vec![data_frame(MAX_REPLAY_BYTES)], true),
            (vec![data_frame(MAX_REPLAY_BYTES), data_frame(1)], false),
            ((0..MAX_REPLAY_PARTS).map(|_| data_frame(1)).collect(), true),
            ((0..1000).map(|_| data_frame(1)).collect(), true),
        ] {
            let mut buffer = ReplayBuffer::default();
            buffer.start_recording();
            record_frames(&mut buffer, frames);
            assert_eq!(buffer.rewind(), can_replay);
            assert!(buffer.parts.len() <= MAX_REPLAY_PARTS);
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
        buffer.start_recording();
        record_frames(&mut buffer, [data_frame(3)]);
        assert!(!buffer.rewind() && buffer.parts.is_empty());
    }

    #[test]
    fn a_large_frame_that_was_read_ahead_is_handed_over() {
        let mut buffer = ReplayBuffer::default();
        buffer.append_frame(&data_frame(5_000));
        buffer.append_frame(&data_frame(MAX_REPLAY_BYTES));
        buffer.stop_recording();
        let mut replayed = 0;
        while let Some(frame) = buffer.next_replay_frame() {
            replayed += frame.data_ref().unwrap().len();
        }
        assert_eq!(replayed, 5_000 + MAX_REPLAY_BYTES);
    }
}
