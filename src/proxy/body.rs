//! What flows: request bodies toward the upstream, response bodies toward the client.
//!
//! Both stream frame by frame without a buffer of their own. Both make sure that what was cut off
//! never looks complete on the other side: an error in a body closes the connection that carries it.

mod kept;

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, timeout};

use super::alarm::Alarm;
use super::meter::Bill;
use super::tunnel::Tunnel;
use super::upstream::{Lease, Receiving, with_causes};
use super::watch::Active;
use crate::enforcer::Hold;
use crate::telemetry::metrics::Closed;
use crate::trace::Recording;
use kept::Kept;

/// An unwanted request body is read up to here so that its connection can be used again.
const DISCARD_BYTES: u64 = 256 * 1024;
const DISCARD_TIME: Duration = Duration::from_secs(1);
/// Why a body broke off.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The client sent nothing for `body_idle_timeout`.
    #[error("the client stopped sending the request body")]
    ClientTimeout,
    /// More than `max_body_bytes`.
    #[error("the request body is larger than allowed")]
    TooLarge,
    /// The client went away, or sent something that is no body.
    #[error("the client broke off the request body: {0}")]
    ClientGone(String),
    /// The upstream sent nothing for `body_idle_timeout`.
    #[error("the upstream stopped sending the response body")]
    UpstreamTimeout,
    /// The request took longer than a limit allows.
    #[error("the request took longer than allowed")]
    Overlong,
    /// The upstream closed before the end, or broke the protocol.
    #[error("the upstream broke off the response body: {0}")]
    Upstream(String),
}

impl BodyError {
    /// A stable word, for spans.
    fn name(&self) -> &'static str {
        match self {
            Self::ClientTimeout => "client_timeout",
            Self::TooLarge => "too_large",
            Self::ClientGone(_) => "client_gone",
            Self::UpstreamTimeout => "upstream_timeout",
            Self::Overlong => "overlong",
            Self::Upstream(_) => "upstream_broken",
        }
    }
}

/// What a client may send as a request body.
#[derive(Clone, Copy, Debug)]
pub(super) struct BodyLimits {
    /// No progress for this long is an error.
    pub(super) idle: Duration,
    /// `None`: any size.
    pub(super) max_bytes: Option<u64>,
}

/// The body of a request as it comes from the client. Dropping it unread makes an HTTP/1 connection
/// end with its response, which says so; see [`RequestBody::discard`].
#[derive(Debug, Default)]
pub struct RequestBody(Option<Rc<RefCell<Streaming>>>);

#[derive(Debug)]
struct Streaming {
    incoming: Incoming,
    limits: BodyLimits,
    received: u64,
    /// Reading anything makes hyper ask the client for the body with `100 Continue`.
    expects_continue: bool,
    multiplexed: bool,
    kept: Kept,
    /// The client has sent all of it.
    over: bool,
    pending_since: Option<Instant>,
    alarm: Alarm,
    progress: Rc<Progress>,
    active: Active,
}

/// How far a request body has come, for those who wait for what follows it.
#[derive(Debug)]
pub(super) struct Progress {
    state: Cell<Sending>,
    moved: Cell<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sending {
    /// The upstream could have more, the client does not send.
    AwaitsClient,
    /// The next part is for the upstream to take.
    Moving,
    /// All of it has been handed over, or nobody wants the rest.
    Over,
    ClientTimeout,
    TooLarge,
    ClientGone,
}

impl RequestBody {
    pub(super) fn new(
        request: &http::request::Parts,
        incoming: Incoming,
        limits: BodyLimits,
        active: &Active,
    ) -> Self {
        if incoming.is_end_stream() {
            return Self(None);
        }
        let progress = Progress {
            state: Cell::new(Sending::Moving),
            moved: Cell::new(Instant::now()),
        };
        Self(Some(Rc::new(RefCell::new(Streaming {
            incoming,
            limits,
            received: 0,
            expects_continue: request.headers.contains_key(http::header::EXPECT),
            multiplexed: request.version == http::Version::HTTP_2,
            kept: Kept::default(),
            over: false,
            pending_since: None,
            alarm: Alarm::default(),
            progress: Rc::new(progress),
            active: active.clone(),
        }))))
    }

    /// No body at all: the only kind of request that can be sent twice.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// For a request that is answered without its body: reads and forgets a rest that is known to be small in the
    /// background, so that the connection can be used again. A client that waits for `100 Continue` is not asked to
    /// send; an HTTP/2 stream simply ends.
    pub fn discard(self) {
        let Some(body) = self.0 else { return };
        {
            let body = body.borrow();
            let is_small = body
                .size_hint()
                .upper()
                .is_some_and(|rest| rest <= DISCARD_BYTES);
            if body.expects_continue || body.multiplexed || !is_small {
                return;
            }
        }
        tokio::task::spawn_local(timeout(DISCARD_TIME, async move {
            while let Some(Ok(_)) = poll_fn(|cx| body.borrow_mut().poll_frame(cx)).await {}
        }));
    }

    /// The answer is there. If the body is not over yet, nobody may read its rest: an upstream that has answered may
    /// want no more of it.
    pub(super) fn outrun(&self) {
        if let Some(body) = &self.0 {
            body.borrow().leave_unread();
        }
    }

    /// Where the transfer stands; `None` for no body.
    pub(super) fn progress(&self) -> Option<Rc<Progress>> {
        self.0
            .as_ref()
            .map(|body| Rc::clone(&body.borrow().progress))
    }

    /// Another handle on the same body, for whoever may have to send it elsewhere. The body is dropped with the
    /// last one.
    pub(super) fn another(&self) -> Self {
        Self(self.0.clone())
    }

    /// From here on what is read is kept, as far as there is room, so that it can be sent once more.
    pub(super) fn keep(&self) {
        if let Some(body) = &self.0 {
            body.borrow_mut().kept.begin();
        }
    }

    /// It will not have to be sent once more.
    pub(super) fn forget(&self) {
        if let Some(body) = &self.0 {
            body.borrow_mut().kept.end();
        }
    }

    /// Goes back to the beginning. `false`: that can't be had again, or the client is at fault.
    pub(super) fn rewind(&self) -> bool {
        self.0
            .as_ref()
            .is_none_or(|body| body.borrow_mut().rewind())
    }
}

impl Progress {
    pub(super) fn state(&self) -> Sending {
        self.state.get()
    }

    /// When the last part was handed over.
    pub(super) fn moved(&self) -> Instant {
        self.moved.get()
    }
}

impl Streaming {
    fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if let Some(part) = self.kept.again() {
            self.progress.moved.set(Instant::now());
            if self.is_end_stream() {
                self.progress.state.set(Sending::Over);
            }
            return Poll::Ready(Some(Ok(part)));
        }
        if self.over {
            return Poll::Ready(None);
        }
        let Poll::Ready(frame) = Pin::new(&mut self.incoming).poll_frame(cx) else {
            self.progress.state.set(Sending::AwaitsClient);
            let due = *self.pending_since.get_or_insert_with(Instant::now) + self.limits.idle;
            return self.alarm.poll(due, cx).map(|()| {
                self.progress.state.set(Sending::ClientTimeout);
                self.active.watch().count(Closed::BodyTimeout);
                Some(Err(BodyError::ClientTimeout))
            });
        };
        self.pending_since = None;
        self.progress.moved.set(Instant::now());
        self.progress.state.set(Sending::Moving);
        Poll::Ready(match frame {
            Some(Ok(frame)) => Some(self.count(frame)),
            Some(Err(error)) => Some(Err(self.gone(error.to_string()))),
            // hyper takes a stream that was reset with NO_ERROR for one that ended.
            None if self.multiplexed && !self.incoming.is_end_stream() => {
                Some(Err(self.gone("stream reset".to_owned())))
            }
            None => {
                self.over = true;
                self.progress.state.set(Sending::Over);
                None
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        self.kept.is_told() && (self.over || self.incoming.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let (mut hint, kept) = (self.incoming.size_hint(), self.kept.untold_bytes());
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper.saturating_add(kept));
        }
        hint.set_lower(hint.lower().saturating_add(kept));
        hint
    }

    fn rewind(&mut self) -> bool {
        match self.progress.state() {
            // What the client broke off must not look complete the second time.
            Sending::ClientTimeout | Sending::TooLarge | Sending::ClientGone => return false,
            Sending::AwaitsClient | Sending::Moving | Sending::Over => {}
        }
        let is_there = self.kept.rewind();
        if is_there {
            self.progress.state.set(Sending::Moving);
            self.progress.moved.set(Instant::now());
        }
        is_there
    }

    fn count(&mut self, frame: Frame<Bytes>) -> Result<Frame<Bytes>, BodyError> {
        let bytes = frame.data_ref().map_or(0, Bytes::len);
        self.received = self
            .received
            .saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
        if self.limits.max_bytes.is_some_and(|max| self.received > max) {
            self.progress.state.set(Sending::TooLarge);
            return Err(BodyError::TooLarge);
        }
        self.over |= frame.is_trailers();
        if self.over || self.incoming.is_end_stream() {
            self.progress.state.set(Sending::Over);
        }
        self.kept.add(&frame);
        Ok(frame)
    }

    fn leave_unread(&self) {
        // The rest of an HTTP/2 stream is in nobody's way.
        if !self.multiplexed && self.progress.state() != Sending::Over {
            self.active.watch().set_unread();
        }
    }

    fn gone(&self, why: String) -> BodyError {
        self.progress.state.set(Sending::ClientGone);
        BodyError::ClientGone(why)
    }
}

impl Drop for Streaming {
    fn drop(&mut self) {
        self.leave_unread();
        match self.progress.state() {
            Sending::AwaitsClient | Sending::Moving => self.progress.state.set(Sending::Over),
            Sending::Over | Sending::ClientTimeout | Sending::TooLarge | Sending::ClientGone => {}
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
        self.0
            .as_ref()
            .is_none_or(|body| body.borrow().is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.0
            .as_ref()
            .map_or_else(|| SizeHint::with_exact(0), |body| body.borrow().size_hint())
    }
}

/// The body of a response.
#[derive(Debug, Default)]
pub enum ResponseBody {
    #[default]
    Empty,
    /// Made here.
    Full(Bytes),
    /// The same, and what follows it.
    Message(Bytes, Option<HeaderMap>),
    /// Passed on from the upstream.
    Upstream(UpstreamBody),
    /// None: what follows the head is another protocol.
    Tunnel(Box<Tunnel>),
}

/// Where a response body comes from.
#[derive(Debug)]
pub(super) enum Source {
    Http1(Incoming),
    Http2(Receiving),
}

impl Source {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, String>>> {
        match self {
            Self::Http1(incoming) => Pin::new(incoming)
                .poll_frame(cx)
                .map_err(|error| with_causes(&error)),
            Self::Http2(receiving) => receiving
                .poll_frame(cx)
                .map_err(|error| with_causes(&error)),
        }
    }

    pub(super) fn is_end_stream(&self) -> bool {
        match self {
            Self::Http1(incoming) => incoming.is_end_stream(),
            Self::Http2(receiving) => receiving.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Http1(incoming) => incoming.size_hint(),
            Self::Http2(receiving) => receiving.size_hint(),
        }
    }
}

/// A response body as it comes from the upstream. At its end the connection goes back to the pool;
/// dropped before, it closes the connection, and the upstream learns that nobody listens.
#[derive(Debug)]
pub struct UpstreamBody {
    source: Source,
    lease: Option<Lease>,
    idle: Option<Duration>,
    pending_since: Option<Instant>,
    hold: Option<Box<Hold>>,
    recording: Option<Box<Recording>>,
    bill: Option<Box<Bill>>,
}

impl UpstreamBody {
    pub(super) fn new(source: Source, lease: Lease, idle: Option<Duration>) -> Self {
        let pending_since = None;
        Self {
            source,
            lease: Some(lease),
            idle,
            pending_since,
            hold: None,
            recording: None,
            bill: None,
        }
    }

    /// Keeps what the request holds until the end of the body, and ends the body when that has to end.
    pub(super) fn keep(&mut self, hold: Option<Hold>) {
        self.hold = hold.map(Box::new);
    }

    /// The request's recording ends with the body.
    pub(super) fn record(&mut self, recording: Option<Box<Recording>>) {
        self.recording = recording
            .filter(|_| !self.is_all_there())
            .map(Recording::streaming);
    }

    /// hyper asks for no end of what has none, nor of what has come in full: an HTTP/2 stream may say later that it has
    /// ended.
    fn is_all_there(&self) -> bool {
        self.source.is_end_stream() || self.source.size_hint().exact() == Some(0)
    }

    /// Reads the body for what is to be settled by its end. Broken off or dropped, it settles nothing.
    pub(super) fn meter(&mut self, bill: Option<Box<Bill>>) {
        self.bill = bill;
    }

    fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let ends_at = self.hold.as_ref().and_then(|hold| hold.ends_at());
        if ends_at.is_some_and(|ends_at| ends_at <= Instant::now()) {
            return Poll::Ready(Some(Err(self.broken(BodyError::Overlong))));
        }
        let Poll::Ready(frame) = self.source.poll_frame(cx) else {
            return self
                .poll_overdue(ends_at, cx)
                .map(|error| Some(Err(self.broken(error))));
        };
        self.pending_since = None;
        Poll::Ready(match frame {
            Some(Ok(frame)) => {
                if let Some(bill) = &mut self.bill {
                    bill.read(&frame);
                }
                // hyper asks no further then.
                if frame.is_trailers() || self.source.is_end_stream() {
                    self.end();
                } else if self.recording.is_some() && self.is_all_there() {
                    self.recorded(Ok(()));
                }
                Some(Ok(frame))
            }
            Some(Err(error)) => Some(Err(self.broken(BodyError::Upstream(error)))),
            None => {
                self.end();
                None
            }
        })
    }

    /// Ready when the upstream is silent for too long, or the request has to end.
    fn poll_overdue(&mut self, ends_at: Option<Instant>, cx: &mut Context<'_>) -> Poll<BodyError> {
        let idle_at = match self.idle {
            Some(idle) => Some(*self.pending_since.get_or_insert_with(Instant::now) + idle),
            None => None,
        };
        let Some(due) = idle_at.into_iter().chain(ends_at).min() else {
            return Poll::Pending;
        };
        let Some(lease) = &mut self.lease else {
            return Poll::Pending;
        };
        lease
            .alarm()
            .poll(due, cx)
            .map(|()| match ends_at == Some(due) {
                true => BodyError::Overlong,
                false => BodyError::UpstreamTimeout,
            })
    }

    fn broken(&mut self, error: BodyError) -> BodyError {
        self.lease = None;
        self.hold = None;
        self.bill = None;
        self.recorded(Err(error.name()));
        error
    }

    fn recorded(&mut self, result: Result<(), &'static str>) {
        if let Some(recording) = self.recording.take() {
            recording.streamed(result);
        }
    }

    fn end(&mut self) {
        if let Some(bill) = self.bill.take() {
            bill.settle();
        }
        self.hold = None;
        self.recorded(Ok(()));
        if let Some(lease) = self.lease.take() {
            lease.give_back();
        }
    }
}

impl ResponseBody {
    /// Takes out what follows a head that switches protocols.
    pub(super) fn take_tunnel(&mut self) -> Option<Box<Tunnel>> {
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
            Self::Full(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Self::Message(bytes, trailers) if bytes.is_empty() => Poll::Ready(
                trailers
                    .take()
                    .map(|trailers| Ok(Frame::trailers(trailers))),
            ),
            Self::Message(bytes, _) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Self::Upstream(body) => body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Empty | Self::Tunnel(_) => true,
            Self::Full(bytes) => bytes.is_empty(),
            Self::Message(bytes, trailers) => bytes.is_empty() && trailers.is_none(),
            Self::Upstream(body) => body.source.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Empty | Self::Tunnel(_) => SizeHint::with_exact(0),
            Self::Full(bytes) | Self::Message(bytes, _) => {
                SizeHint::with_exact(u64::try_from(bytes.len()).unwrap_or(u64::MAX))
            }
            Self::Upstream(body) => body.source.size_hint(),
        }
    }
}
