//! Response bodies that are streamed from the upstream.

mod cut_off;

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use std::future::{pending, poll_fn};
use std::io;
use std::mem::take;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::task::spawn_local;
use tokio::time::{Instant, timeout_at};

use super::http2::streams::Http2ResponseBody;
use super::pool::{ConnectionProtocol, UpstreamClient, UpstreamConnection};
use crate::enforcer::ConcurrencySlotGuard;
use crate::proxy::body::tunnel::Tunnel;
use crate::proxy::body::{BodyError, add_to_size_hint};
use crate::proxy::http::response_cost::CostMeter;
use crate::proxy::upstream_error::{UpstreamError, UpstreamErrorKind};
use crate::telemetry::metrics::ActiveHttpRequest;
use crate::telemetry::trace::RequestRecording;

/// Maximum time that a response head with a `Content-Length` waits for the start of its body. A
/// body that fails by then is answered with a 502.
const FIRST_FRAME_WAIT: Duration = Duration::from_millis(250);

/// HTTP-version-specific part of a streamed response body.
#[derive(Debug, Default)]
pub(crate) enum UpstreamBodySource {
    Http1(Incoming),
    Http2(Http2ResponseBody),
    /// The body was moved elsewhere.
    #[default]
    Moved,
}

impl UpstreamBodySource {
    /// Polls for the next frame of a body that `connection` receives.
    fn poll_frame(
        &mut self,
        connection: Option<&UpstreamConnection>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UpstreamError>>> {
        match self {
            Self::Http1(incoming) => match connection.map(|connection| &connection.protocol) {
                Some(ConnectionProtocol::Http1(http1)) => {
                    http1.poll_with(cx, |cx| Pin::new(&mut *incoming).poll_frame(cx))
                }
                _ => Pin::new(incoming).poll_frame(cx),
            }
            .map_err(|error| classify_http1_body_error(&error).with_cause(&error)),
            Self::Http2(body) => body
                .poll_frame(cx)
                .map_err(|error| UpstreamErrorKind::from_h2(&error).with_cause(&error)),
            Self::Moved => Poll::Ready(None),
        }
    }

    /// Fails if what has arrived of the body is already known to be incomplete or invalid. hyper
    /// reads ahead of an HTTP/1 body by one frame at most.
    fn check_received(&self) -> Result<(), UpstreamError> {
        match self {
            Self::Http2(body) => body
                .check_received()
                .map_err(|error| UpstreamErrorKind::from_h2(&error).with_cause(&error)),
            Self::Http1(_) | Self::Moved => Ok(()),
        }
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        match self {
            Self::Http1(incoming) => incoming.is_end_stream(),
            Self::Http2(body) => body.is_end_stream(),
            Self::Moved => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Http1(incoming) => incoming.size_hint(),
            Self::Http2(body) => body.size_hint(),
            Self::Moved => SizeHint::with_exact(0),
        }
    }
}

fn classify_http1_body_error(error: &hyper::Error) -> UpstreamErrorKind {
    use io::ErrorKind::{InvalidData, InvalidInput};
    let cause =
        std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<io::Error>());
    match cause.map(io::Error::kind) {
        Some(InvalidInput | InvalidData) => UpstreamErrorKind::Protocol,
        _ => UpstreamErrorKind::ConnectionTerminated,
    }
}

/// The next frame of a body: the first one, read before the response head is forwarded, or the rest
/// of a frame that was held back.
#[derive(Debug, Default)]
enum FirstFrame {
    /// Not read yet, or handed over.
    #[default]
    None,
    Data(Bytes),
    Trailers(Box<HeaderMap>),
}

/// A response body, streamed from the upstream. When the body ends, the connection returns to the
/// pool. Dropping the body earlier closes the HTTP/1.1 connection or cancels the HTTP/2 stream,
/// unless its slot is held for the upstream: then a task reads it to its end.
#[derive(Debug)]
pub struct UpstreamBody {
    source: UpstreamBodySource,
    first_frame: FirstFrame,
    /// Whether hyper may not have flushed the head or the last frame.
    is_unflushed: bool,
    /// Error that waits until hyper has flushed.
    delayed_error: Option<Box<BodyError>>,
    client: Rc<UpstreamClient>,
    /// Taken when the body ends or fails.
    pub(super) connection: Option<Box<UpstreamConnection>>,
    pending_since: Option<Instant>,
    slot_guard: Option<Box<ConcurrencySlotGuard>>,
    recording: Option<Box<RequestRecording>>,
    active_request: Option<Box<ActiveHttpRequest>>,
    /// Reads the response cost from the body and settles it at the end. If the body ends early,
    /// estimates are only ever raised.
    pub(crate) cost_meter: Option<Box<CostMeter>>,
}

impl UpstreamBody {
    pub(crate) fn is_end_stream(&self) -> bool {
        matches!(self.first_frame, FirstFrame::None) && self.source.is_end_stream()
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        let hint = self.source.size_hint();
        if self
            .cost_meter
            .as_ref()
            .is_some_and(|meter| meter.may_add_event())
        {
            return SizeHint::default();
        }
        match &self.first_frame {
            FirstFrame::Data(data) => add_to_size_hint(hint, data.len()),
            FirstFrame::None | FirstFrame::Trailers(_) => hint,
        }
    }

    pub(super) fn new(
        source: UpstreamBodySource,
        client: Rc<UpstreamClient>,
        connection: Box<UpstreamConnection>,
    ) -> Self {
        Self {
            source,
            first_frame: FirstFrame::None,
            is_unflushed: true,
            delayed_error: None,
            client,
            connection: Some(connection),
            pending_since: None,
            slot_guard: None,
            recording: None,
            active_request: None,
            cost_meter: None,
        }
    }

    /// Reads the first frame, so that a body that fails at once, or right after it, is noticed
    /// before its response head is forwarded. A body of unknown length may be a stream: only a
    /// frame that has arrived is read. Returns whether the body goes on.
    ///
    /// # Errors
    /// Fails if the body is invalid or ends too early.
    pub(crate) fn poll_first_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<bool, UpstreamError>> {
        match self.source.poll_frame(self.connection.as_deref(), cx)? {
            Poll::Ready(Some(frame)) => {
                self.first_frame = match frame.into_data().map_err(Frame::into_trailers) {
                    Ok(data) => FirstFrame::Data(data),
                    Err(trailers) => FirstFrame::Trailers(Box::new(trailers.unwrap_or_default())),
                };
                Poll::Ready(self.source.check_received().map(|()| true))
            }
            Poll::Ready(None) => {
                self.finish();
                Poll::Ready(Ok(false))
            }
            Poll::Pending
                if self.source.size_hint().exact().is_some()
                    && let Some(connection) = &mut self.connection =>
            {
                let due = *self.pending_since.get_or_insert_with(Instant::now) + FIRST_FRAME_WAIT;
                connection.timer.poll(due, cx).map(|()| Ok(true))
            }
            Poll::Pending => Poll::Ready(Ok(true)),
        }
    }

    /// Reads the body and discards it until it ends, or until `ends_at` if it stalls.
    async fn discard_until(mut self, ends_at: Instant) {
        let end = async {
            loop {
                match poll_fn(|cx| self.poll_frame(cx)).await {
                    Some(Ok(_)) => {}
                    Some(Err(BodyError::UpstreamTimeout)) => pending().await,
                    None | Some(Err(_)) => return,
                }
            }
        };
        drop(timeout_at(ends_at, end).await);
    }

    /// Whether all data has arrived, so that hyper may not poll again. An HTTP/2 stream may still
    /// signal its end later.
    fn is_fully_received(&self) -> bool {
        self.is_end_stream() || self.size_hint().exact() == Some(0)
    }

    /// Polls for the next frame. Before an error, returns pending once, because hyper drops what it
    /// has not flushed: the response head, or frames that the upstream sent before it failed.
    pub(crate) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if let Some(error) = self.delayed_error.take() {
            return Poll::Ready(Some(Err(*error)));
        }
        match self.poll_next(cx) {
            Poll::Ready(Some(Err(error))) if self.is_unflushed => {
                self.delayed_error = Some(Box::new(error));
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            polled => {
                self.is_unflushed = polled.is_ready();
                polled
            }
        }
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let slot_guard = self.slot_guard.as_ref();
        let ends_at = slot_guard.and_then(|guard| guard.request_ends_at);
        // What was read in time is passed on.
        if matches!(self.first_frame, FirstFrame::None)
            && ends_at.is_some_and(|ends_at| ends_at <= Instant::now())
        {
            return Poll::Ready(Some(Err(self.fail(BodyError::MaxDurationExceeded))));
        }
        let polled = match take(&mut self.first_frame) {
            FirstFrame::None => self.source.poll_frame(self.connection.as_deref(), cx),
            FirstFrame::Data(data) => Poll::Ready(Some(Ok(Frame::data(data)))),
            FirstFrame::Trailers(trailers) => Poll::Ready(Some(Ok(Frame::trailers(*trailers)))),
        };
        let Poll::Ready(frame) = polled else {
            let error = self.poll_deadlines(ends_at, cx);
            return error.map(|error| Some(Err(self.fail(error))));
        };
        self.pending_since = None;
        Poll::Ready(match frame {
            Some(Ok(frame)) => {
                let frame = match ready!(self.poll_flow(frame, cx)) {
                    Ok(frame) => frame,
                    Err(last_event) => return Poll::Ready(Some(self.cut_off(last_event))),
                };
                if let Some(meter) = &mut self.cost_meter {
                    meter.read_frame(&frame);
                }
                // hyper does not poll again after trailers or the end of the stream.
                if frame.is_trailers() || self.is_end_stream() {
                    self.finish();
                } else if (self.recording.is_some() || self.active_request.is_some())
                    && self.is_fully_received()
                {
                    self.finish_recording(Ok(()));
                }
                Some(Ok(frame))
            }
            Some(Err(error)) => Some(Err(self.fail(BodyError::UpstreamAborted(error.detail)))),
            None => {
                self.finish();
                None
            }
        })
    }

    /// Ready with an error when the upstream exceeds `body_idle_timeout`, or at `ends_at`.
    fn poll_deadlines(
        &mut self,
        ends_at: Option<Instant>,
        cx: &mut Context<'_>,
    ) -> Poll<BodyError> {
        let Some(connection) = &mut self.connection else {
            return Poll::Pending;
        };
        let idle = self.client.settings().body_idle_timeout;
        let idle_at = idle.map(|idle| *self.pending_since.get_or_insert_with(Instant::now) + idle);
        let Some(due) = idle_at.into_iter().chain(ends_at).min() else {
            return Poll::Pending;
        };
        connection.timer.poll(due, cx).map(|()| {
            if ends_at == Some(due) {
                BodyError::MaxDurationExceeded
            } else {
                BodyError::UpstreamTimeout
            }
        })
    }

    fn fail(&mut self, error: BodyError) -> BodyError {
        self.connection = None;
        let slot_guard = self.slot_guard.take();
        if let (Some(guard), BodyError::UpstreamTimeout) = (slot_guard, &error) {
            guard.keep_without_exchange();
        }
        self.cost_meter = None;
        self.finish_recording(Err((&error).into()));
        error
    }

    fn finish_recording(&mut self, result: Result<(), &'static str>) {
        self.active_request = None;
        if let Some(recording) = self.recording.take() {
            recording.finish_body(result);
        }
    }

    fn finish(&mut self) {
        if let Some(meter) = self.cost_meter.take() {
            meter.settle();
        }
        self.slot_guard = None;
        self.finish_recording(Ok(()));
        if let Some(connection) = self.connection.take() {
            self.client.return_connection(connection);
        }
    }
}

impl Drop for UpstreamBody {
    fn drop(&mut self) {
        let Some(slot_guard) = self.slot_guard.take() else {
            return;
        };
        if let (Some(held_until), Some(connection)) =
            (slot_guard.held_until(), self.connection.take())
        {
            let source = take(&mut self.source);
            let mut rest = Self::new(source, Rc::clone(&self.client), connection);
            rest.first_frame = take(&mut self.first_frame);
            rest.cost_meter = self.cost_meter.take();
            spawn_local(async move {
                rest.discard_until(held_until).await;
                drop(slot_guard);
            });
        }
    }
}

/// A response body, sent to the client.
#[derive(Debug, Default)]
pub enum ResponseBody {
    #[default]
    Empty,
    /// A locally generated body.
    Full(Bytes),
    /// A locally generated body with trailers.
    FullWithTrailers(Bytes, Option<HeaderMap>),
    /// A body streamed from the upstream.
    Upstream(UpstreamBody),
    /// No body: after the response head, a tunnel copies bytes of another protocol.
    Tunnel(Box<Tunnel>),
}

impl ResponseBody {
    /// Attaches the concurrency slot and the trace recording to the body, to end with it. A body
    /// from the upstream fails at the slot's `ends_at`. For a local body, which is already
    /// complete, they end immediately.
    pub(crate) fn attach_guards(
        &mut self,
        slot_guard: Option<ConcurrencySlotGuard>,
        recording: Option<Box<RequestRecording>>,
    ) {
        match self {
            Self::Upstream(body) => {
                body.slot_guard = slot_guard.map(Box::new).or(body.slot_guard.take());
                let recording = recording.filter(|_| !body.is_fully_received());
                body.recording = recording.map(RequestRecording::mark_streaming);
            }
            Self::Tunnel(tunnel) => {
                tunnel.attach_slot_guard(slot_guard);
                tunnel.keep(recording);
            }
            Self::Empty | Self::Full(_) | Self::FullWithTrailers(..) => {}
        }
    }

    /// Attaches the request's metrics to the body, to end with it. For a local body, they end
    /// immediately.
    pub(crate) fn attach_active_request(&mut self, active: Box<ActiveHttpRequest>) {
        match self {
            Self::Upstream(body) => {
                body.active_request = Some(active).filter(|_| !body.is_fully_received());
            }
            Self::Tunnel(tunnel) => tunnel.keep(active),
            Self::Empty | Self::Full(_) | Self::FullWithTrailers(..) => {}
        }
    }

    /// Takes the tunnel of a response that switches protocols.
    pub(crate) fn take_tunnel(&mut self) -> Option<Box<Tunnel>> {
        let Self::Tunnel(_) = self else { return None };
        match std::mem::take(self) {
            Self::Tunnel(tunnel) => Some(tunnel),
            _ => None,
        }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.get_mut() {
            Self::Empty | Self::Tunnel(_) => Poll::Ready(None),
            Self::Full(bytes) if bytes.is_empty() => Poll::Ready(None),
            Self::FullWithTrailers(bytes, trailers) if bytes.is_empty() => {
                let trailers = trailers.take().map(Frame::trailers);
                Poll::Ready(trailers.map(Ok))
            }
            Self::Full(bytes) | Self::FullWithTrailers(bytes, _) => {
                Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes)))))
            }
            Self::Upstream(body) => body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Empty | Self::Tunnel(_) => true,
            Self::Full(bytes) => bytes.is_empty(),
            Self::FullWithTrailers(bytes, trailers) => bytes.is_empty() && trailers.is_none(),
            Self::Upstream(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Empty | Self::Tunnel(_) => SizeHint::with_exact(0),
            Self::Full(bytes) | Self::FullWithTrailers(bytes, _) => {
                SizeHint::with_exact(u64::try_from(bytes.len()).unwrap_or(u64::MAX))
            }
            Self::Upstream(body) => body.size_hint(),
        }
    }
}
