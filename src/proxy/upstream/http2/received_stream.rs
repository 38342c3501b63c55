//! Received data of HTTP/2 streams, copied out of h2 while the client does not read.
//!
//! h2 keeps every unread DATA frame and closes a connection with too many small ones, although they
//! belong to the response of one slow client. See `docs/decisions/0083-library-guards.md`.

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use http::{HeaderMap, header};
use http_body::{Frame, SizeHint};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker, ready};

use crate::proxy::upstream::read_limit::READ_ALLOWANCE_BYTES;

/// Budget of h2 for the overhead of unread DATA frames, 256 bytes each. Two allowances of the
/// smallest frames, which have 10 bytes, do not exhaust it.
pub(crate) const DATA_FRAME_BUDGET_BYTES: usize = 2 * READ_ALLOWANCE_BYTES / 10 * 256;

/// Size up to which an unread frame is copied. h2 passes slices of its read buffer, which stays
/// allocated as long as one slice.
const MAX_COPIED_FRAME_BYTES: usize = 4 * 1024;

/// Number of streams from which the list of streams is cleaned of ended ones.
const MIN_LISTED_STREAMS: usize = 256;

/// The streams of one connection whose data has not ended.
#[derive(Debug, Default)]
pub(crate) struct ReceivedStreams(RefCell<Vec<Weak<RefCell<StreamState>>>>);

/// The receiving half of a stream, for the reader of its data.
#[derive(Debug)]
pub(crate) struct ReceivedStream(Rc<RefCell<StreamState>>);

#[derive(Debug)]
struct StreamState {
    stream: RecvStream,
    /// Data that was collected, oldest first.
    collected: VecDeque<Bytes>,
    /// Copies of small frames, after `collected`.
    copied: BytesMut,
    /// Error of the stream, after the collected data.
    error: Option<h2::Error>,
    /// Waker of the reader that waits for data.
    reader: Option<Waker>,
}

impl ReceivedStreams {
    pub(crate) fn add(&self, stream: RecvStream) -> ReceivedStream {
        let state = Rc::new(RefCell::new(StreamState {
            stream,
            collected: VecDeque::new(),
            copied: BytesMut::new(),
            error: None,
            reader: None,
        }));
        let mut streams = self.0.borrow_mut();
        if streams.len() >= MIN_LISTED_STREAMS {
            streams.retain(|stream| stream.strong_count() > 0);
        }
        streams.push(Rc::downgrade(&state));
        ReceivedStream(state)
    }

    /// Takes the unread frames of all streams out of h2. Flow control bounds their bytes.
    pub(crate) fn collect(&self) {
        self.0.borrow_mut().retain(|stream| {
            let Some(stream) = stream.upgrade() else {
                return false;
            };
            stream.borrow_mut().collect();
            true
        });
    }
}

impl ReceivedStream {
    /// Polls for data. The caller releases the capacity of the data that it used.
    pub(crate) fn poll_data(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, h2::Error>>> {
        self.0.borrow_mut().poll_data(cx)
    }

    /// Takes the unread frames out of h2. Fails if the stream has failed after them.
    pub(crate) fn check_received(&self) -> Result<(), h2::Error> {
        let mut state = self.0.borrow_mut();
        state.collect();
        state.error.take().map_or(Ok(()), Err)
    }

    pub(crate) fn poll_trailers(
        &self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<HeaderMap>, h2::Error>> {
        self.0.borrow_mut().stream.poll_trailers(cx)
    }

    pub(crate) fn release_capacity(&self, bytes: usize) -> Result<(), h2::Error> {
        let mut state = self.0.borrow_mut();
        state.stream.flow_control().release_capacity(bytes)
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        let state = self.0.borrow();
        state.stream.is_end_stream()
            && state.collected.is_empty()
            && state.copied.is_empty()
            && state.error.is_none()
    }
}

impl StreamState {
    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, h2::Error>>> {
        if let Some(data) = self.collected.pop_front() {
            return Poll::Ready(Some(Ok(data)));
        }
        if !self.copied.is_empty() {
            return Poll::Ready(Some(Ok(std::mem::take(&mut self.copied).freeze())));
        }
        if let Some(error) = self.error.take() {
            return Poll::Ready(Some(Err(error)));
        }
        let polled = self.stream.poll_data(cx);
        if polled.is_pending() {
            match &mut self.reader {
                Some(reader) => reader.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
        }
        Poll::Ready(ready!(polled))
    }

    fn collect(&mut self) {
        if self.error.is_some() {
            return;
        }
        // h2 remembers one waker per stream: that of the last poll.
        let reader = self.reader.clone();
        let mut cx = Context::from_waker(reader.as_ref().unwrap_or(Waker::noop()));
        while let Poll::Ready(Some(data)) = self.stream.poll_data(&mut cx) {
            match data {
                Ok(data) if data.len() <= MAX_COPIED_FRAME_BYTES => {
                    self.copied.extend_from_slice(&data);
                }
                Ok(data) => {
                    if !self.copied.is_empty() {
                        let copied = std::mem::take(&mut self.copied).freeze();
                        self.collected.push_back(copied);
                    }
                    self.collected.push_back(data);
                }
                Err(error) => {
                    self.error = Some(error);
                    return;
                }
            }
        }
    }
}

/// A response body, received from an HTTP/2 stream.
#[derive(Debug)]
pub(crate) struct Http2ResponseBody {
    stream: ReceivedStream,
    /// Unreceived bytes of the declared `Content-Length`; `None` without a length.
    remaining_bytes: Option<u64>,
    data_ended: bool,
}

impl Http2ResponseBody {
    pub(crate) fn new(stream: ReceivedStream, headers: &HeaderMap) -> Self {
        let length = headers.get(header::CONTENT_LENGTH);
        let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
        Self {
            stream,
            remaining_bytes: length,
            data_ended: false,
        }
    }

    /// Polls for the next frame. A stream reset is an error whatever its reason code, because only
    /// END_STREAM ends a body.
    pub(crate) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        if !self.data_ended {
            match ready!(self.stream.poll_data(cx)) {
                Some(Ok(data)) => {
                    self.stream.release_capacity(data.len())?;
                    if let Some(remaining) = &mut self.remaining_bytes {
                        *remaining = remaining.saturating_sub(data.len() as u64);
                    }
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => self.data_ended = true,
            }
        }
        self.stream
            .poll_trailers(cx)
            .map(|trailers| trailers.map(|some| some.map(Frame::trailers)).transpose())
    }

    /// # Errors
    /// Fails if the stream has failed by now, also if data before it is unread.
    pub(crate) fn check_received(&self) -> Result<(), h2::Error> {
        if self.stream.is_end_stream() {
            Ok(())
        } else {
            self.stream.check_received()
        }
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        self.remaining_bytes
            .map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}
