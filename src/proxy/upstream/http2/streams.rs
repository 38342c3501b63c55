//! Both halves of an HTTP/2 stream: uploads, response bodies and tunnels.
//!
//! Received data is copied out of h2 while the client does not read. h2 keeps every unread DATA
//! frame and closes a connection with too many small ones, although they belong to the response of
//! one slow client. See `docs/decisions/0083-library-guards.md`.

use bytes::{Buf, Bytes, BytesMut};
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, header};
use http_body::{Body, Frame, SizeHint};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::AbortHandle;

use crate::proxy::body::request::RequestBody;
use crate::proxy::connection_io::move_buffered_bytes;
use crate::proxy::http::header_lines;
use crate::proxy::http::header_lines::remove_headers;
use crate::proxy::upstream::connector::READ_ALLOWANCE_BYTES;
use crate::proxy::upstream::pool::UpstreamConnection;

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

/// Handle of a request body upload. Dropping it aborts the upload.
#[derive(Debug)]
pub(crate) struct BodyUpload(AbortHandle);

impl BodyUpload {
    /// Sends as much of `body` as the upstream's window allows, then spawns a task for the rest.
    /// Returns `None` if no rest remains. Removes trailers that are not named in
    /// `declared_trailers`, the validated `Trailer` values.
    pub(crate) async fn start(
        body: RequestBody,
        stream: SendStream<Bytes>,
        declared_trailers: SmallVec<[HeaderValue; 1]>,
    ) -> Option<Self> {
        let mut upload = BodyUploadFuture {
            body,
            stream,
            declared_trailers,
            pending_chunk: Bytes::new(),
            is_last: false,
        };
        let first = poll_fn(|cx| Poll::Ready(Pin::new(&mut upload).poll(cx))).await;
        let spawn = || tokio::task::spawn_local(upload).abort_handle();
        first.is_pending().then(|| Self(spawn()))
    }
}

impl Drop for BodyUpload {
    fn drop(&mut self) {
        self.0.abort();
    }
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
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        // Stream errors are ignored here because the response future reports them.
        this.poll_upload(cx).map(|_sent| ())
    }
}

impl BodyUploadFuture {
    fn poll_upload(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        loop {
            // The upload ends if the upstream reset the stream to stop reading the body.
            if self.stream.poll_reset(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            while !self.pending_chunk.is_empty() {
                let pending = self.pending_chunk.len();
                let capacity = ready!(poll_send_capacity(&mut self.stream, pending, cx))?;
                let chunk = self.pending_chunk.split_to(capacity.min(pending));
                let ends_stream = self.is_last && self.pending_chunk.is_empty();
                self.stream.send_data(chunk, ends_stream)?;
                if ends_stream {
                    return Poll::Ready(Ok(()));
                }
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(chunk) => {
                        self.is_last = self.body.is_end_stream();
                        if chunk.is_empty() && self.is_last {
                            return Poll::Ready(self.stream.send_data(chunk, true));
                        }
                        self.pending_chunk = chunk;
                    }
                    Err(frame) => return Poll::Ready(self.finish_with_declared_trailers(frame)),
                },
                None => return Poll::Ready(self.stream.send_data(Bytes::new(), true)),
                // The stream is reset after a body error: a truncated body must not look complete.
                Some(Err(_reported_by_progress)) => {
                    self.stream.send_reset(Reason::CANCEL);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }

    fn finish_with_declared_trailers(&mut self, frame: Frame<Bytes>) -> Result<(), h2::Error> {
        let mut trailers = frame.into_trailers().unwrap_or_default();
        remove_headers(&mut trailers, |name| {
            let declared = self.declared_trailers.iter();
            let mut declared = declared.flat_map(header_lines::list_elements);
            !declared.any(|item| item.eq_ignore_ascii_case(name.as_str().as_bytes()))
        });
        if trailers.is_empty() {
            self.stream.send_data(Bytes::new(), true)
        } else {
            self.stream.send_trailers(trailers)
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

/// Maximum size of one write to the HTTP/2 stream of a tunnel.
const MAX_TUNNEL_CHUNK_BYTES: usize = 16 * 1024;

/// An HTTP/2 stream as a bidirectional byte stream. Dropping it before both directions have ended
/// resets the HTTP/2 stream.
#[derive(Debug)]
pub(crate) struct Http2TunnelIo {
    send_stream: SendStream<Bytes>,
    recv_stream: ReceivedStream,
    read_buffer: Bytes,
    write_closed: bool,
    _connection: Box<UpstreamConnection>,
}

impl Http2TunnelIo {
    pub(crate) fn new(
        send_stream: SendStream<Bytes>,
        recv_stream: ReceivedStream,
        connection: Box<UpstreamConnection>,
    ) -> Self {
        Self {
            send_stream,
            recv_stream,
            read_buffer: Bytes::new(),
            write_closed: false,
            _connection: connection,
        }
    }
}

impl AsyncRead for Http2TunnelIo {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.read_buffer.is_empty() {
            match ready!(this.recv_stream.poll_data(cx)) {
                Some(data) => this.read_buffer = data.map_err(io::Error::other)?,
                None => return Poll::Ready(Ok(())),
            }
        }
        let before = this.read_buffer.len();
        move_buffered_bytes(&mut this.read_buffer, into);
        // The receive window reopens only for data that the reader has taken.
        let released = this
            .recv_stream
            .release_capacity(before - this.read_buffer.len());
        Poll::Ready(released.map_err(io::Error::other))
    }
}

impl AsyncWrite for Http2TunnelIo {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let requested_bytes = bytes.len().min(MAX_TUNNEL_CHUNK_BYTES);
        let capacity = ready!(poll_send_capacity(
            &mut this.send_stream,
            requested_bytes,
            cx
        ));
        let capacity = capacity.map_err(io::Error::other)?;
        let chunk = bytes.copy_to_bytes(capacity.min(requested_bytes));
        let taken = chunk.len();
        let sent = this.send_stream.send_data(chunk, false);
        Poll::Ready(sent.map(|()| taken).map_err(io::Error::other))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if std::mem::replace(&mut this.write_closed, true) {
            return Poll::Ready(Ok(()));
        }
        let sent = this.send_stream.send_data(Bytes::new(), true);
        Poll::Ready(sent.map_err(io::Error::other))
    }
}
