//! Request bodies, received from the client.

mod http2_rest;
mod read_ahead;

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::replay_buffer::ReplayBuffer;
use super::{BodyError, add_to_size_hint};
use crate::proxy::client_connection::ConnectionCloseReason;
use crate::proxy::client_connection::connection_memory::UNREAD_FRAME_BYTES;
use crate::proxy::client_connection::connection_monitor::ActiveRequestGuard;
use crate::proxy::client_connection::connection_output::ContinuePermit;
use crate::proxy::connection_io::LazyTimer;
use crate::proxy::http::header_lines::is_message_stream;
use crate::proxy::http::request_validation::has_outer_white_space;
use crate::proxy::{UpstreamError, UpstreamErrorKind};
use http2_rest::discard_http2_rest;

/// Maximum bytes of an unwanted request body that are read and dropped, so that the HTTP/1
/// connection can be reused.
const MAX_DISCARD_BYTES: u64 = 256 * 1024;

const DISCARD_TIMEOUT: Duration = Duration::from_secs(1);

/// Limits of request bodies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestBodyLimits {
    /// Maximum time without data from the client.
    pub(crate) idle_timeout: Duration,
    /// Minimum bytes per second while the client is awaited; 0 for none. The client may fall
    /// `idle_timeout` behind.
    pub(crate) min_rate: u64,
    /// Maximum size of the body; `None` for no limit.
    pub(crate) max_bytes: Option<u64>,
}

/// A request body, received from the client.
///
/// If a body is dropped unread, an HTTP/1 connection closes after the response, which has
/// `Connection: close`. See [`RequestBody::discard`]. The rest of an HTTP/2 body is discarded for a
/// limited time: see [`discard_http2_rest`].
#[derive(Debug, Default)]
pub struct RequestBody(Option<Rc<RefCell<RequestBodyStream>>>);

#[derive(Debug)]
struct RequestBodyStream {
    incoming: Incoming,
    limits: RequestBodyLimits,
    received: u64,
    /// Whether the client waits for `100 Continue`. Over HTTP/1, hyper sends it when the body is
    /// first read.
    expects_continue: bool,
    multiplexed: bool,
    is_message_stream: bool,
    /// Bytes that were read ahead, and still count as unread.
    read_ahead_bytes: usize,
    /// Memory of the start of the body, which policies have read.
    start_bytes: usize,
    replay_buffer: ReplayBuffer,
    /// Whether the whole body was read from the client.
    is_complete: bool,
    pending_since: Option<Instant>,
    /// Time by which the client is behind the minimum rate.
    lag: Duration,
    idle_timer: LazyTimer,
    progress: Rc<RequestBodyProgress>,
    active: ActiveRequestGuard,
}

/// Progress of a request body, for timeouts that depend on the progress.
#[derive(Debug)]
pub(crate) struct RequestBodyProgress {
    pub(crate) state: Cell<RequestBodyState>,
    pub(crate) last_progress_at: Cell<Instant>,
    /// `100 Continue` over HTTP/2, which is sent when the body is awaited.
    continue_permit: Option<ContinuePermit>,
    response_ended: Notify,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestBodyState {
    /// The upstream can take more of the body, but the client sends nothing.
    AwaitingClient,
    /// The upstream must take the next chunk of the body.
    Transferring,
    /// The whole body was handed over to the upstream, or the rest is not wanted.
    Finished,
    /// The client ended or spoiled the body.
    Failed(UpstreamErrorKind),
}

impl RequestBody {
    pub(crate) fn new(
        request: &http::request::Parts,
        incoming: Incoming,
        mut limits: RequestBodyLimits,
        continue_permit: Option<ContinuePermit>,
        active: &ActiveRequestGuard,
    ) -> Self {
        if incoming.is_end_stream() {
            return Self(None);
        }
        let is_message_stream = is_message_stream(&request.headers);
        if is_message_stream {
            // Messages of a call may be small and rare.
            limits.min_rate = 0;
        }
        let multiplexed = request.version == http::Version::HTTP_2;
        active.monitor().exchange.awaits_body.set(!multiplexed);
        if multiplexed {
            active.monitor().memory.begin_http2_body();
        }
        let progress = RequestBodyProgress {
            state: Cell::new(RequestBodyState::Transferring),
            last_progress_at: Cell::new(Instant::now()),
            continue_permit,
            response_ended: Notify::new(),
        };
        Self(Some(Rc::new(RefCell::new(RequestBodyStream {
            incoming,
            limits,
            received: 0,
            expects_continue: request.headers.contains_key(http::header::EXPECT),
            multiplexed,
            is_message_stream,
            read_ahead_bytes: 0,
            start_bytes: 0,
            replay_buffer: ReplayBuffer::default(),
            is_complete: false,
            pending_since: None,
            lag: Duration::ZERO,
            idle_timer: LazyTimer::default(),
            progress: Rc::new(progress),
            active: active.clone(),
        }))))
    }

    /// Whether the request has no body.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Discards the body of a request that is answered without it.
    ///
    /// On HTTP/1, a small rest of known length is read in the background, so that the connection
    /// can be reused. Nothing is read if the client waits for `100 Continue`.
    pub fn discard(mut self) {
        let is_discarded = |body: &mut Rc<RefCell<RequestBodyStream>>| {
            let body = body.borrow();
            let is_small = body
                .size_hint()
                .upper()
                .is_some_and(|rest| rest <= MAX_DISCARD_BYTES);
            is_small && !body.expects_continue && !body.multiplexed
        };
        let Some(body) = self.0.take_if(is_discarded) else {
            return;
        };
        let monitor = Rc::clone(body.borrow().active.monitor());
        let rest = timeout(DISCARD_TIMEOUT, async move {
            while let Some(Ok(_)) = poll_fn(|cx| body.borrow_mut().poll_frame(cx)).await {}
        });
        tokio::task::spawn_local(async move {
            drop(rest.await);
            // The body may have kept the request active. Now the idle timeout begins.
            monitor.connection.driver.wake();
        });
    }

    /// Marks the rest of an HTTP/1 body as unread, so that the client connection closes after the
    /// response. Called when the response head arrives: the upstream may not want the rest.
    pub(crate) fn mark_rest_unread(&self) {
        if let Some(body) = &self.0 {
            body.borrow().mark_rest_unread();
        }
    }

    /// The progress of the transfer; `None` without a body.
    pub(crate) fn progress(&self) -> Option<Rc<RequestBodyProgress>> {
        let body = self.0.as_ref();
        body.map(|body| Rc::clone(&body.borrow().progress))
    }

    /// Returns another handle to the same body, for a retry. The body is dropped with its last
    /// handle.
    pub(crate) fn clone_handle(&self) -> Self {
        Self(self.0.clone())
    }

    /// Starts or stops recording the body, up to a maximum size, for a retry.
    pub(crate) fn set_replay(&self, is_enabled: bool) {
        if let Some(body) = &self.0 {
            let buffer = &mut body.borrow_mut().replay_buffer;
            if is_enabled {
                buffer.start_recording();
            } else {
                buffer.stop_recording();
            }
        }
    }

    /// Rewinds the body to its start for a retry. Returns `false` if the start was not recorded, or
    /// the body failed or is too large.
    pub(crate) fn rewind(&self) -> bool {
        let body = self.0.as_ref();
        body.is_none_or(|body| body.borrow_mut().rewind())
    }

    /// The failure of a request whose body the client did not send.
    pub(crate) fn client_error(&self, error: &BodyError) -> UpstreamError {
        let state = self.progress().map(|progress| progress.state.get());
        let kind = match state {
            Some(RequestBodyState::Failed(kind)) => kind,
            _ => UpstreamErrorKind::ClientDisconnected,
        };
        kind.with_detail(error.to_string())
    }
}

impl RequestBodyProgress {
    /// Records that the final response begins: `100 Continue` must not follow it.
    pub(crate) fn record_response_start(&self) {
        if let Some(permit) = &self.continue_permit {
            permit.revoke();
        }
    }

    /// Records that the response is complete or dropped.
    pub(crate) fn record_response_end(&self) {
        self.record_response_start();
        self.response_ended.notify_one();
    }
}

/// What a frame counts while it is unread; 0 for trailers.
fn unread_bytes(frame: &Frame<Bytes>) -> usize {
    let data = frame.data_ref();
    data.map_or(0, |data| data.len() + UNREAD_FRAME_BYTES)
}

impl RequestBodyStream {
    fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if let Some(part) = self.replay_buffer.next_replay_frame() {
            self.release_read_ahead_bytes();
            // Since it was read ahead, the client waited for a connection.
            self.pending_since = None;
            self.progress.last_progress_at.set(Instant::now());
            let is_end = self.is_end_stream();
            self.progress.state.set(if is_end {
                RequestBodyState::Finished
            } else {
                RequestBodyState::Transferring
            });
            return Poll::Ready(Some(Ok(part)));
        }
        let frame = ready!(self.poll_client(cx));
        if let Some(Ok(frame)) = &frame {
            self.replay_buffer.record_frame(frame);
        }
        Poll::Ready(frame)
    }

    /// Polls for a frame from the client.
    fn poll_client(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.is_complete {
            return Poll::Ready(None);
        }
        let Poll::Ready(frame) = Pin::new(&mut self.incoming).poll_frame(cx) else {
            self.progress.state.set(RequestBodyState::AwaitingClient);
            if let Some(permit) = &self.progress.continue_permit {
                self.active.monitor().output.queue_continue(permit);
            }
            let allowed = self.limits.idle_timeout.saturating_sub(self.lag);
            let deadline = *self.pending_since.get_or_insert_with(Instant::now) + allowed;
            return self.idle_timer.poll(deadline, cx).map(|()| {
                self.record_failure(UpstreamErrorKind::RequestBodyTimeout);
                let monitor = self.active.monitor();
                monitor.record_close(ConnectionCloseReason::BodyTimeout);
                Some(Err(BodyError::ClientTimeout))
            });
        };
        let now = Instant::now();
        if let Some(since) = self.pending_since.take()
            && self.limits.min_rate > 0
        {
            self.lag += now - since;
        }
        self.progress.last_progress_at.set(now);
        self.progress.state.set(RequestBodyState::Transferring);
        Poll::Ready(match frame {
            Some(Ok(frame)) => Some(self.check_frame(frame)),
            Some(Err(error)) => Some(Err(self.record_client_abort(error.to_string()))),
            // hyper reports a stream that the client reset with NO_ERROR as ended; here it is an
            // error.
            None if self.multiplexed && !self.incoming.is_end_stream() => {
                Some(Err(self.record_client_abort("stream reset".to_owned())))
            }
            None => {
                self.is_complete = true;
                self.record_end();
                None
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        self.replay_buffer.is_fully_replayed()
            && (self.is_complete || self.incoming.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let recorded = self.replay_buffer.bytes_left_to_replay();
        add_to_size_hint(self.incoming.size_hint(), recorded)
    }

    fn rewind(&mut self) -> bool {
        // No retry after a failure of the body: a truncated body must not look complete.
        if let RequestBodyState::Failed(_) = self.progress.state.get() {
            return false;
        }
        let can_replay = self.replay_buffer.rewind();
        if can_replay {
            self.progress.state.set(RequestBodyState::Transferring);
            self.progress.last_progress_at.set(Instant::now());
        }
        can_replay
    }

    /// Counts a frame as read.
    fn release_frame(&self, frame: &Frame<Bytes>) {
        let memory = &self.active.monitor().memory;
        memory.remove_unread_bytes(unread_bytes(frame));
        if frame.is_trailers() {
            memory.remove_trailers();
        }
    }

    /// Checks a frame that was read, and counts it.
    fn check_frame(&mut self, frame: Frame<Bytes>) -> Result<Frame<Bytes>, BodyError> {
        let bytes = frame.data_ref().map_or(0, Bytes::len);
        self.release_frame(&frame);
        let received = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.received = self.received.saturating_add(received);
        if !self.multiplexed {
            self.active.monitor().exchange.body_bytes.set(self.received);
        }
        if !self.lag.is_zero() {
            let paid_ns = received.saturating_mul(1_000_000_000) / self.limits.min_rate.max(1);
            self.lag = self.lag.saturating_sub(Duration::from_nanos(paid_ns));
        }
        if self.limits.max_bytes.is_some_and(|max| self.received > max) {
            self.record_failure(UpstreamErrorKind::RequestBodyTooLarge);
            return Err(BodyError::TooLarge);
        }
        self.is_complete |= frame.is_trailers();
        let trailers = frame.trailers_ref().into_iter().flat_map(HeaderMap::values);
        if trailers.into_iter().any(has_outer_white_space) {
            return Err(self.record_client_abort("malformed trailers".to_owned()));
        }
        if self.is_complete || self.incoming.is_end_stream() {
            self.record_end();
        }
        Ok(frame)
    }

    /// Records that the client has sent the whole body.
    fn record_end(&self) {
        self.progress.state.set(RequestBodyState::Finished);
        self.active.monitor().exchange.awaits_body.set(false);
    }

    fn mark_rest_unread(&self) {
        // HTTP/2 is exempt: the unread rest of a stream blocks no other request.
        let is_read = self.is_complete || self.incoming.is_end_stream();
        if !self.multiplexed && !is_read && self.progress.state.get() != RequestBodyState::Finished
        {
            self.active.monitor().exchange.has_unread_input.set(true);
        }
    }

    fn record_client_abort(&self, reason: String) -> BodyError {
        self.record_failure(UpstreamErrorKind::ClientDisconnected);
        BodyError::ClientAborted(reason)
    }

    fn record_failure(&self, kind: UpstreamErrorKind) {
        self.progress.state.set(RequestBodyState::Failed(kind));
    }

    /// Records that the rest of the body is not wanted.
    fn record_drop(&self) {
        self.mark_rest_unread();
        self.active.monitor().exchange.awaits_body.set(false);
        if let RequestBodyState::AwaitingClient | RequestBodyState::Transferring =
            self.progress.state.get()
        {
            self.progress.state.set(RequestBodyState::Finished);
        }
    }

    /// Counts the memory of the start of the body that is kept for the upstream.
    fn set_start_bytes(&mut self, bytes: usize) {
        let before = std::mem::replace(&mut self.start_bytes, bytes);
        let memory = &self.active.monitor().memory;
        (memory.body_start_bytes).update(|all| all.saturating_sub(before).saturating_add(bytes));
    }

    /// Counts the bytes that were read ahead as read.
    pub(crate) fn release_read_ahead_bytes(&mut self) {
        self.set_start_bytes(0);
        let bytes = std::mem::take(&mut self.read_ahead_bytes);
        self.active.monitor().memory.remove_unread_bytes(bytes);
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        let last_handle = self.0.take().filter(|body| Rc::strong_count(body) == 1);
        let unread = last_handle.filter(|body| {
            let body = body.borrow();
            body.multiplexed && !body.incoming.is_end_stream()
        });
        if let Some(body) = unread {
            body.borrow().record_drop();
            tokio::task::spawn_local(discard_http2_rest(body));
        }
    }
}

impl Drop for RequestBodyStream {
    fn drop(&mut self) {
        self.record_drop();
        self.release_read_ahead_bytes();
        if self.multiplexed {
            self.active.monitor().memory.end_http2_body();
        }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &self.0 {
            Some(body) => body.borrow_mut().poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        let body = self.0.as_ref();
        body.is_none_or(|body| body.borrow().is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Some(body) => body.borrow().size_hint(),
            None => SizeHint::with_exact(0),
        }
    }
}

#[cfg(test)]
mod read_ahead_tests {
    use super::unread_bytes;
    use crate::proxy::client_connection::connection_memory::UNREAD_FRAME_BYTES;
    use bytes::Bytes;
    use http::HeaderMap;
    use http_body::Frame;

    #[test]
    fn only_data_frames_count_while_they_are_unread() {
        let data = Frame::data(Bytes::from_static(b"abc"));
        assert_eq!(unread_bytes(&data), 3 + UNREAD_FRAME_BYTES);
        assert_eq!(unread_bytes(&Frame::trailers(HeaderMap::new())), 0);
    }
}
