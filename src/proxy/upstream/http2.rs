//! HTTP/2 connections to the upstream, each with many concurrent requests.
//!
//! The h2 library is used directly instead of hyper's client. hyper would run two tasks per
//! request. hyper also cannot cancel an upload after the response was read, nor report that the
//! upstream refused a request unprocessed.

pub(super) mod streams;

use bytes::Bytes;
use h2::client::{Builder, ResponseFuture, SendRequest};
use h2::{Ping, PingPong, SendStream};
use http::{Request, Response};
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::MAX_RESPONSE_HEAD_BYTES;
use super::connector::ReadAllowance;
use super::connector::UpstreamSocket;
use super::http2::streams::{DATA_FRAME_BUDGET_BYTES, ReceivedStream, ReceivedStreams};
use crate::proxy::connection_io::LazyTimer;
use crate::proxy::upstream_error::{UpstreamError, UpstreamErrorKind};
use crate::text::format_error_chain;

/// Maximum streams per connection, even if the upstream allows more.
pub(crate) const MAX_CONCURRENT_STREAMS: usize = 100;
/// Number of requests that may be cancelled. Each response head restores one, up to this number. At
/// zero the connection is retired.
///
/// Servers treat frequent cancellation as an attack (CVE-2023-44487) and close the connection with
/// all its requests; h2 and hyper tolerate 20 unprocessed cancelled requests. The budget keeps one
/// client's disconnects from ending the requests of other clients.
const CANCELLATION_BUDGET: u32 = 10;
/// Delay of cancellations beyond the budget, in which the upstream can process the abandoned
/// requests.
const DEFERRED_CANCEL_DELAY: Duration = Duration::from_secs(1);

/// An open HTTP/2 connection. Dropping the last handle closes it.
pub(crate) struct Http2Connection {
    sender: SendRequest<Bytes>,
    /// IP address of the upstream.
    pub(crate) peer: Option<IpAddr>,
    /// Number of reserved streams, one per request in progress.
    active_streams: Cell<usize>,
    /// Whether the connection takes no new requests and closes after the last one ends.
    pub(crate) closing: Cell<bool>,
    /// Whether a response timed out and no PONG has arrived since. A suspect connection takes no
    /// new requests.
    pub(super) is_suspect: Cell<bool>,
    pub(crate) was_used: Cell<bool>,
    /// Remaining cancellations; see [`CANCELLATION_BUDGET`].
    cancellation_budget: Cell<u32>,
    deferred_cancels: RefCell<DeferredCancels>,
    received_streams: ReceivedStreams,
    idle_since: Cell<Instant>,
    pub(super) driver_waker: RefCell<Option<Waker>>,
    pub(crate) task: Cell<Option<AbortOnDropHandle<()>>>,
}

/// Future of the response head. Dropping it before completion cancels the request, possibly with a
/// delay.
pub(crate) struct Http2ResponseFuture {
    response: Option<ResponseFuture>,
    connection: Rc<Http2Connection>,
}

/// Abandoned requests that will be cancelled after [`DEFERRED_CANCEL_DELAY`].
#[derive(Default)]
struct DeferredCancels {
    requests: Vec<ResponseFuture>,
    since: Option<Instant>,
}

impl Http2Connection {
    /// Reserves a stream if the connection has capacity. Returns whether a stream was reserved.
    pub(crate) fn try_reserve_stream(&self) -> bool {
        let max_streams = self
            .sender
            .current_max_send_streams()
            .min(MAX_CONCURRENT_STREAMS);
        let is_available = !self.closing.get()
            && !self.is_suspect.get()
            && self.active_streams.get() < max_streams;
        if is_available {
            self.active_streams.update(|value| value + 1);
        }
        is_available
    }

    /// Releases a stream that [`Http2Connection::try_reserve_stream`] reserved.
    pub(crate) fn release_stream(&self) {
        self.active_streams.update(|value| value - 1);
        if self.active_streams.get() == 0 {
            self.idle_since.set(Instant::now());
        }
    }

    /// Whether the upstream announced support for extended CONNECT (RFC 8441, 3).
    pub(crate) fn supports_extended_connect(&self) -> bool {
        self.sender.is_extended_connect_protocol_enabled()
    }

    /// Sends a request head. With `has_body`, the stream stays open for the body.
    ///
    /// # Errors
    /// Fails, without sending anything, if the head is invalid, or the connection takes no more
    /// requests: then it is `closing`.
    pub(crate) fn send_request_head(
        self: &Rc<Self>,
        request: Request<()>,
        has_body: bool,
    ) -> Result<(Http2ResponseFuture, SendStream<Bytes>), h2::Error> {
        // Each request uses its own clone of the sender, so that requests waiting for capacity do
        // not block each other.
        let mut sender = self.sender.clone();
        if let Poll::Ready(Err(error)) = sender.poll_ready(&mut Context::from_waker(Waker::noop()))
        {
            self.closing.set(true);
            return Err(error);
        }
        let (response, send_stream) = sender.send_request(request, !has_body)?;
        let response = Http2ResponseFuture {
            response: Some(response),
            connection: Rc::clone(self),
        };
        Ok((response, send_stream))
    }

    /// Records that a response timed out. The connection takes no new requests until the upstream
    /// answers a PING.
    pub(crate) fn mark_suspect(&self) {
        self.is_suspect.set(true);
        self.wake_driver();
    }

    /// Maximum concurrent streams that both the upstream and the proxy allow on this connection, at
    /// least 1.
    pub(crate) fn max_streams(&self) -> usize {
        let allowed = self.sender.current_max_send_streams();
        allowed.clamp(1, MAX_CONCURRENT_STREAMS)
    }

    /// Cancels a request, or defers the cancellation if the cancellation budget is used up.
    fn cancel_or_defer_request(&self, request: ResponseFuture) {
        let Some(remaining) = self.cancellation_budget.get().checked_sub(1) else {
            let mut deferred = self.deferred_cancels.borrow_mut();
            deferred.requests.push(request);
            if deferred.since.is_none() {
                deferred.since = Some(Instant::now());
                self.wake_driver();
            }
            return;
        };
        self.cancellation_budget.set(remaining);
        if remaining == 0 {
            tracing::debug!("upstream connection retired after too many cancelled requests");
            self.closing.set(true);
        }
    }

    /// Cancels all deferred requests if [`DEFERRED_CANCEL_DELAY`] has passed since the first one.
    pub(super) fn cancel_deferred_if_due(&self, timer: &mut LazyTimer, cx: &mut Context<'_>) {
        let Some(since) = self.deferred_cancels.borrow().since else {
            return;
        };
        if timer.poll(since + DEFERRED_CANCEL_DELAY, cx).is_ready() {
            drop(self.deferred_cancels.take());
        }
    }

    /// Takes the unread frames of all streams out of h2, and cancels the abandoned requests that
    /// the upstream has answered: their responses have no reader.
    pub(super) fn collect_unread_frames(&self) {
        self.received_streams.collect();
        let mut cx = Context::from_waker(Waker::noop());
        let requests = &mut self.deferred_cancels.borrow_mut().requests;
        requests.retain_mut(|request| Pin::new(request).poll(&mut cx).is_pending());
    }

    fn wake_driver(&self) {
        if let Some(driver) = &*self.driver_waker.borrow() {
            driver.wake_by_ref();
        }
    }

    /// Start of the connection's idle time; `None` while it has requests.
    pub(crate) fn idle_since(&self) -> Option<Instant> {
        (self.active_streams.get() == 0).then(|| self.idle_since.get())
    }
}

impl Http2ResponseFuture {
    /// Polls for informational (1xx) response heads.
    pub(crate) fn poll_informational_response(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Response<()>, h2::Error>>> {
        match &mut self.response {
            Some(response) => response.poll_informational(cx),
            None => Poll::Ready(None),
        }
    }
}

impl Future for Http2ResponseFuture {
    type Output = Result<Response<Rc<RefCell<ReceivedStream>>>, h2::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(response) = &mut self.response else {
            return Poll::Pending;
        };
        let answer = ready!(Pin::new(response).poll(cx));
        self.response = None;
        let budget = &self.connection.cancellation_budget;
        budget.set((budget.get() + 1).min(CANCELLATION_BUDGET));
        let streams = &self.connection.received_streams;
        Poll::Ready(answer.map(|response| response.map(|stream| streams.add(stream))))
    }
}

impl Drop for Http2ResponseFuture {
    fn drop(&mut self) {
        if let Some(response) = self.response.take() {
            self.connection.cancel_or_defer_request(response);
        }
    }
}

impl std::fmt::Debug for Http2Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Http2Connection")
            .field("streams", &self.active_streams)
            .finish_non_exhaustive()
    }
}

/// Reads and writes for all requests of a connection until it closes, which fails its remaining
/// requests.
pub(crate) async fn run_driver(
    mut connection: h2::client::Connection<UpstreamSocket, Bytes>,
    mut ping_monitor: Option<PingMonitor>,
    read_allowance: ReadAllowance,
    http2_connection: Weak<Http2Connection>,
) {
    let mut deferred_cancel_timer = LazyTimer::default();
    let end = poll_fn(|cx| {
        if let Poll::Ready(end) = Pin::new(&mut connection).poll(cx) {
            return Poll::Ready(end.map_err(|error| format_error_chain(&error)));
        }
        let Some(http2_connection) = http2_connection.upgrade() else {
            read_allowance.renew();
            return Poll::Pending;
        };
        if read_allowance.is_spent() {
            http2_connection.collect_unread_frames();
            read_allowance.renew();
        }
        let waker = cx.waker().clone();
        http2_connection.driver_waker.replace(Some(waker));
        http2_connection.cancel_deferred_if_due(&mut deferred_cancel_timer, cx);
        let Some(ping_monitor) = &mut ping_monitor else {
            return Poll::Pending;
        };
        ping_monitor
            .poll(&http2_connection.is_suspect, cx)
            .map(|()| Err("the upstream did not answer a PING".to_owned()))
    });
    match end.await {
        Ok(()) => tracing::debug!("upstream connection closed"),
        Err(error) => tracing::debug!(error, "upstream connection closed"),
    }
}

/// Receive windows per stream and per connection. The connection window holds one full stream
/// window per possible stream, so a slow client delays only its own response.
const STREAM_WINDOW_BYTES: u32 = 56 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 100 * STREAM_WINDOW_BYTES;
/// Maximum bytes that h2 buffers per stream for sending.
const SEND_BUFFER_BYTES: usize = 64 * 1024;
/// Number of cancelled streams that h2 remembers. Late frames for them are not protocol errors.
const MAX_REMEMBERED_RESETS: usize = 1000;

/// Performs the HTTP/2 handshake on a new connection.
///
/// Returns the connection and the future that drives it. The handshake completes when the
/// upstream's SETTINGS have arrived, so that an upstream without HTTP/2 is detected before any
/// request is sent.
///
/// # Errors
/// Returns an error if the upstream does not send valid SETTINGS within `limit`.
pub(crate) async fn perform_http2_handshake(
    mut stream: UpstreamSocket,
    limit: Duration,
) -> Result<(Rc<Http2Connection>, impl Future<Output = ()> + use<>), UpstreamError> {
    let (read_activity, peer) = (Arc::clone(&stream.read_activity), stream.peer_ip());
    let allowance = ReadAllowance::default();
    stream.filter_http2(allowance.clone());
    let mut builder = Builder::new();
    builder
        .enable_push(false)
        // No request is sent until the upstream's SETTINGS allow streams.
        .initial_max_send_streams(0)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_header_list_size(MAX_RESPONSE_HEAD_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .max_concurrent_reset_streams(MAX_REMEMBERED_RESETS)
        .data_frame_budget(DATA_FRAME_BUDGET_BYTES)
        // No limit of resets for protocol errors, which h2 counts over the connection's whole life.
        .max_local_error_reset_streams(None);
    let failed = |error: h2::Error| {
        let detail = format!("HTTP/2 handshake failed: {}", format_error_chain(&error));
        UpstreamErrorKind::from_h2(&error).with_detail(detail)
    };
    let handshake_future = async {
        let (sender, mut connection) = builder.handshake(stream).await.map_err(failed)?;
        poll_fn(|cx| match Pin::new(&mut connection).poll(cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(failed(error))),
            Poll::Ready(Ok(())) => Poll::Ready(Err(UpstreamErrorKind::ConnectionTerminated
                .with_detail("the upstream closed the connection before its HTTP/2 SETTINGS"))),
            Poll::Pending if sender.current_max_send_streams() > 0 => Poll::Ready(Ok(())),
            Poll::Pending => {
                allowance.renew();
                Poll::Pending
            }
        })
        .await?;
        Ok((sender, connection))
    };
    let (sender, mut connection) = tokio::time::timeout(limit, handshake_future)
        .await
        .unwrap_or_else(|_elapsed| {
            let detail = format!("no HTTP/2 SETTINGS from the upstream within {limit:?}");
            Err(UpstreamErrorKind::ConnectTimeout.with_detail(detail))
        })?;
    let http2_connection = Rc::new(Http2Connection {
        sender,
        peer,
        active_streams: Cell::new(0),
        closing: Cell::new(false),
        is_suspect: Cell::new(false),
        was_used: Cell::new(false),
        cancellation_budget: Cell::new(CANCELLATION_BUDGET),
        deferred_cancels: RefCell::default(),
        received_streams: ReceivedStreams::default(),
        idle_since: Cell::new(Instant::now()),
        driver_waker: RefCell::default(),
        task: Cell::default(),
    });
    let ping_monitor = connection.ping_pong().map(|ping_pong| PingMonitor {
        ping_pong,
        read_activity,
        pings_since_read: 0,
        quiet_since: Instant::now(),
        pong_deadline: None,
        timer: LazyTimer::default(),
    });
    let weak_connection = Rc::downgrade(&http2_connection);
    let driver = run_driver(connection, ping_monitor, allowance, weak_connection);
    Ok((http2_connection, driver))
}

/// Quiet times before the first, second and each further PING to a silent upstream. They grow
/// because gRPC servers treat more than two PINGs within five minutes as abuse.
const PING_INTERVALS: [Duration; 3] = [
    Duration::from_secs(20),
    Duration::from_secs(60),
    Duration::from_secs(330),
];
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Detects an unresponsive upstream by sending PINGs.
pub(crate) struct PingMonitor {
    ping_pong: PingPong,
    read_activity: Arc<AtomicBool>,
    /// Number of PINGs sent since data other than PONGs was received.
    pings_since_read: usize,
    /// Start of the current quiet period: the last PONG or the last other data.
    quiet_since: Instant,
    /// Deadline for the PONG that answers the current PING; `None` if no PING is pending.
    pong_deadline: Option<Instant>,
    timer: LazyTimer,
}

impl PingMonitor {
    /// Sends PINGs when due. Ready when a PONG is missing at its deadline and nothing else arrived.
    /// With `suspect` set, sends a PING immediately.
    pub(crate) fn poll(&mut self, suspect: &Cell<bool>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let deadline = match self.pong_deadline {
                Some(due) => {
                    match self.ping_pong.poll_pong(cx) {
                        Poll::Ready(Ok(_)) => {
                            self.pong_deadline = None;
                            self.restart_quiet_period(self.pings_since_read);
                            suspect.set(false);
                            continue;
                        }
                        // The error is ignored here because the connection future reports it too.
                        Poll::Ready(Err(_)) => return Poll::Pending,
                        Poll::Pending => due,
                    }
                }
                None if suspect.get() => {
                    self.send_ping();
                    continue;
                }
                None => {
                    let pause = PING_INTERVALS
                        .get(self.pings_since_read)
                        .or(PING_INTERVALS.last());
                    self.quiet_since + pause.copied().unwrap_or(PING_TIMEOUT)
                }
            };
            if self.timer.poll(deadline, cx).is_pending() {
                return Poll::Pending;
            }
            let has_read = self.read_activity.load(Ordering::Relaxed);
            match self.pong_deadline {
                // Other data arrived: the PONG may be queued behind it, so its deadline is
                // extended.
                Some(_) if has_read => {
                    self.restart_quiet_period(0);
                    self.pong_deadline = Some(self.quiet_since + PING_TIMEOUT);
                }
                Some(_) => return Poll::Ready(()),
                None if has_read => self.restart_quiet_period(0),
                None => self.send_ping(),
            }
        }
    }

    fn send_ping(&mut self) {
        if self.ping_pong.send_ping(Ping::opaque()).is_ok() {
            self.pings_since_read += 1;
        }
        self.read_activity.store(false, Ordering::Relaxed);
        self.pong_deadline = Some(Instant::now() + PING_TIMEOUT);
    }

    /// Starts a new quiet period.
    fn restart_quiet_period(&mut self, pings_since_read: usize) {
        self.read_activity.store(false, Ordering::Relaxed);
        self.quiet_since = Instant::now();
        self.pings_since_read = pings_since_read;
    }
}
