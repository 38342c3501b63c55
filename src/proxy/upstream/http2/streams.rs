//! Both halves of an HTTP/2 stream: uploads and response bodies.
//!
//! Received data is copied out of h2 while the client does not read. h2 keeps every unread DATA
//! frame and closes a connection with too many small ones, although they belong to the response of
//! one slow client. See `docs/decisions/0083-library-guards.md`.

use bytes::{Bytes, BytesMut};
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, header};
use http_body::{Body, Frame, SizeHint};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker, ready};
use tokio_util::task::AbortOnDropHandle;

use crate::proxy::body::request::RequestBody;
use crate::proxy::http::header_lines::{self, remove_headers};
use crate::proxy::upstream::connector::READ_ALLOWANCE_BYTES;

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
pub(crate) struct ReceivedStreams(RefCell<Vec<Weak<RefCell<ReceivedStream>>>>);

/// The receiving half of a stream. The connection and the reader of the data share it.
#[derive(Debug)]
pub(crate) struct ReceivedStream {
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
    pub(crate) fn add(&self, stream: RecvStream) -> Rc<RefCell<ReceivedStream>> {
        let state = Rc::new(RefCell::new(ReceivedStream {
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
        state
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
    /// Takes the unread frames out of h2. Fails if the stream has failed after them.
    fn check_received(&mut self) -> Result<(), h2::Error> {
        self.collect();
        self.error.take().map_or(Ok(()), Err)
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
            && self.collected.is_empty()
            && self.copied.is_empty()
            && self.error.is_none()
    }

    pub(crate) fn release_capacity(&mut self, bytes: usize) -> Result<(), h2::Error> {
        self.stream.flow_control().release_capacity(bytes)
    }

    /// Polls for data. The caller releases the capacity of the data that it used.
    pub(crate) fn poll_data(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, h2::Error>>> {
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
    stream: Rc<RefCell<ReceivedStream>>,
    /// Unreceived bytes of the declared `Content-Length`; `None` without a length.
    remaining_bytes: Option<u64>,
    data_ended: bool,
}

impl Http2ResponseBody {
    pub(crate) fn new(stream: Rc<RefCell<ReceivedStream>>, headers: &HeaderMap) -> Self {
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
        let mut stream = self.stream.borrow_mut();
        if !self.data_ended {
            match ready!(stream.poll_data(cx)) {
                Some(Ok(data)) => {
                    stream.release_capacity(data.len())?;
                    if let Some(remaining) = &mut self.remaining_bytes {
                        *remaining = remaining.saturating_sub(data.len() as u64);
                    }
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => self.data_ended = true,
            }
        }
        stream
            .stream
            .poll_trailers(cx)
            .map(|trailers| trailers.map(|some| some.map(Frame::trailers)).transpose())
    }

    /// # Errors
    /// Fails if the stream has failed by now, also if data before it is unread.
    pub(crate) fn check_received(&self) -> Result<(), h2::Error> {
        let mut stream = self.stream.borrow_mut();
        if stream.is_end_stream() {
            Ok(())
        } else {
            stream.check_received()
        }
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        self.stream.borrow().is_end_stream()
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        self.remaining_bytes
            .map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// Sends as much of `body` as the upstream's window allows, then spawns a task for the rest.
/// Returns `None` if no rest remains. Removes trailers that are not named in `declared_trailers`,
/// the validated `Trailer` values.
pub(crate) async fn start_upload(
    body: RequestBody,
    stream: SendStream<Bytes>,
    declared_trailers: SmallVec<[HeaderValue; 1]>,
) -> Option<AbortOnDropHandle<Result<(), h2::Error>>> {
    let mut upload = BodyUploadFuture {
        body,
        stream,
        declared_trailers,
        pending_chunk: Bytes::new(),
        is_last: false,
    };
    let first = poll_fn(|cx| Poll::Ready(Pin::new(&mut upload).poll(cx))).await;
    let spawn = || AbortOnDropHandle::new(tokio::task::spawn_local(upload));
    first.is_pending().then(spawn)
}

struct BodyUploadFuture {
    body: RequestBody,
    stream: SendStream<Bytes>,
    declared_trailers: SmallVec<[HeaderValue; 1]>,
    /// The rest of the chunk read last from the body, not sent yet.
    pending_chunk: Bytes,
    /// Whether `pending_chunk` ends the body.
    is_last: bool,
}

impl Future for BodyUploadFuture {
    /// Stream errors are ignored, because the response future reports them.
    type Output = Result<(), h2::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        loop {
            // The upload ends if the upstream reset the stream to stop reading the body.
            if this.stream.poll_reset(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            while !this.pending_chunk.is_empty() {
                let pending = this.pending_chunk.len();
                let capacity = ready!(poll_send_capacity(&mut this.stream, pending, cx))?;
                let chunk = this.pending_chunk.split_to(capacity.min(pending));
                let ends_stream = this.is_last && this.pending_chunk.is_empty();
                this.stream.send_data(chunk, ends_stream)?;
                if ends_stream {
                    return Poll::Ready(Ok(()));
                }
            }
            match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(chunk) => {
                        this.is_last = this.body.is_end_stream();
                        if chunk.is_empty() && this.is_last {
                            return Poll::Ready(this.stream.send_data(chunk, true));
                        }
                        this.pending_chunk = chunk;
                    }
                    Err(frame) => {
                        let mut trailers = frame.into_trailers().unwrap_or_default();
                        remove_headers(&mut trailers, |name| {
                            let declared = this.declared_trailers.iter();
                            let mut declared = declared.flat_map(header_lines::list_elements);
                            !declared
                                .any(|item| item.eq_ignore_ascii_case(name.as_str().as_bytes()))
                        });
                        return Poll::Ready(if trailers.is_empty() {
                            this.stream.send_data(Bytes::new(), true)
                        } else {
                            this.stream.send_trailers(trailers)
                        });
                    }
                },
                None => return Poll::Ready(this.stream.send_data(Bytes::new(), true)),
                // The stream is reset after a body error: a truncated body must not look complete.
                Some(Err(_reported_by_progress)) => {
                    this.stream.send_reset(Reason::CANCEL);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

/// Polls until the stream's send window allows at least one byte, and returns the capacity. At most
/// `requested_bytes` are reserved.
pub(crate) fn poll_send_capacity(
    stream: &mut SendStream<Bytes>,
    requested_bytes: usize,
    cx: &mut Context<'_>,
) -> Poll<Result<usize, h2::Error>> {
    stream.reserve_capacity(requested_bytes);
    loop {
        match stream.capacity() {
            0 => match ready!(stream.poll_capacity(cx)) {
                Some(capacity) => drop(capacity?),
                None => return Poll::Ready(Err(Reason::STREAM_CLOSED.into())),
            },
            capacity => return Poll::Ready(Ok(capacity)),
        }
    }
}
