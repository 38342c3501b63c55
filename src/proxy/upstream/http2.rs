//! HTTP/2 connections to the upstream. One connection carries many requests.
//!
//! h2 is used directly instead of hyper's client. hyper would run two tasks per request. It also
//! cannot cancel an upload after the response was read, nor report that the upstream refused a
//! request unprocessed.

use bytes::Bytes;
use h2::client::{Builder, ResponseFuture, SendRequest};
use h2::{Ping, PingPong, RecvStream, SendStream};
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
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::connector::UpstreamSocket;
use super::http2_stream::BodyUpload;
use super::pool::UpstreamPool;
use super::{
    ExchangeFailure, MAX_RESPONSE_HEAD_BYTES, UpstreamError, UpstreamErrorKind, format_error_chain,
};
use crate::proxy::server::lazy_timer::LazyTimer;

/// Maximum streams per connection, even if the upstream allows more.
pub(super) const MAX_CONCURRENT_STREAMS: usize = 100;
/// Receive windows per stream and per connection. The connection window holds as many full stream
/// windows as there can be streams, so a slow client delays only its own response.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 100 * STREAM_WINDOW_BYTES;
/// Size of the send buffer for data that exceeds the upstream's window.
const SEND_BUFFER_BYTES: usize = 64 * 1024;
/// Cancelled requests to remember. Frames that the upstream already sent for them are not protocol
/// errors.
const MAX_REMEMBERED_RESETS: usize = 1000;

/// Requests that may be cancelled before the upstream responds to others. At zero the connection is
/// retired.
///
/// Servers treat frequent cancellation as an attack (CVE-2023-44487) and close the connection with
/// all its requests; h2 and hyper tolerate 20 unprocessed ones. So one client's disconnects cannot
/// end the requests of other clients.
const CANCELLATION_BUDGET: u32 = 10;
/// Cancellations beyond the budget are delayed this long, so that the upstream has processed the
/// requests by then.
const DEFERRED_CANCEL_DELAY: Duration = Duration::from_secs(1);

/// Quiet time before each successive PING to a silent upstream. gRPC servers treat more than two
/// PINGs within five minutes as abuse.
const PING_INTERVALS: [Duration; 3] = [
    Duration::from_secs(20),
    Duration::from_secs(60),
    Duration::from_secs(330),
];
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// An open connection. Dropping it closes it.
pub(super) struct Http2Connection {
    sender: SendRequest<Bytes>,
    /// IP address of the upstream.
    pub(super) peer: Option<IpAddr>,
    /// Requests in progress.
    active_streams: Cell<usize>,
    /// Takes no new requests, and closes after the last one ends.
    closing: Cell<bool>,
    /// A response timed out, and nothing was received since.
    is_suspect: Cell<bool>,
    was_used: Cell<bool>,
    /// Remaining cancellations; see [`CANCELLATION_BUDGET`].
    cancellation_budget: Cell<u32>,
    deferred_cancels: RefCell<DeferredCancels>,
    idle_since: Cell<Instant>,
    driver_waker: RefCell<Option<Waker>>,
    task: Cell<Option<AbortHandle>>,
}

/// A reserved stream on an [`Http2Connection`]. Dropping it ends the request.
#[derive(Debug)]
pub(super) struct StreamSlot {
    connection: Rc<Http2Connection>,
    pool: Rc<UpstreamPool>,
    is_first: bool,
    upload: Option<BodyUpload>,
}

/// Future of the response head. Dropping it before completion cancels the request.
pub(super) struct Http2ResponseFuture {
    response: Option<ResponseFuture>,
    connection: Rc<Http2Connection>,
}

/// Abandoned requests that have not been cancelled yet.
#[derive(Default)]
struct DeferredCancels {
    requests: Vec<ResponseFuture>,
    since: Option<Instant>,
}

/// A request that could not be sent; nothing of it was written.
pub(super) struct StreamOpenError {
    /// The connection takes no more requests.
    pub(super) is_connection_closed: bool,
    pub(super) error: h2::Error,
}

/// Performs the HTTP/2 handshake on a new connection.
///
/// It completes when the upstream's SETTINGS have arrived. So a peer without HTTP/2 is detected
/// before it sees a request.
///
/// # Errors
/// If the upstream sends anything else, or nothing within `limit`.
pub(super) async fn handshake(
    stream: UpstreamSocket,
    limit: Duration,
) -> Result<(Rc<Http2Connection>, Http2Driver), UpstreamError> {
    let (read_activity, peer) = (stream.read_activity(), stream.peer());
    let mut builder = Builder::new();
    builder
        .enable_push(false)
        // No streams until the upstream's SETTINGS say how many.
        .initial_max_send_streams(0)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_header_list_size(MAX_RESPONSE_HEAD_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .max_concurrent_reset_streams(MAX_REMEMBERED_RESETS)
        // h2 counts these over the whole life of a connection, which may be long.
        .max_local_error_reset_streams(None);
    let failed = |error: h2::Error| UpstreamError {
        kind: error_kind(&error),
        detail: format!("HTTP/2 handshake failed: {}", format_error_chain(&error)),
    };
    let handshake_future = async {
        let (sender, mut connection) = builder.handshake(stream).await.map_err(failed)?;
        poll_fn(|cx| match Pin::new(&mut connection).poll(cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(failed(error))),
            Poll::Ready(Ok(())) => Poll::Ready(Err(UpstreamError {
                kind: UpstreamErrorKind::ConnectionTerminated,
                detail: "the upstream closed the connection before its HTTP/2 SETTINGS".to_owned(),
            })),
            Poll::Pending if sender.current_max_send_streams() > 0 => Poll::Ready(Ok(())),
            Poll::Pending => Poll::Pending,
        })
        .await?;
        Ok((sender, connection))
    };
    let (sender, mut connection) = tokio::time::timeout(limit, handshake_future)
        .await
        .unwrap_or_else(|_elapsed| {
            let detail = format!("no HTTP/2 SETTINGS from the upstream within {limit:?}");
            Err(UpstreamError {
                kind: UpstreamErrorKind::ConnectTimeout,
                detail,
            })
        })?;
    let link = Rc::new(Http2Connection {
        sender,
        peer,
        active_streams: Cell::new(0),
        closing: Cell::new(false),
        is_suspect: Cell::new(false),
        was_used: Cell::new(false),
        cancellation_budget: Cell::new(CANCELLATION_BUDGET),
        deferred_cancels: RefCell::default(),
        idle_since: Cell::new(Instant::now()),
        driver_waker: RefCell::default(),
        task: Cell::default(),
    });
    let ping_monitor = connection
        .ping_pong()
        .map(|pings| PingMonitor::new(pings, read_activity));
    let driver = Http2Driver {
        connection,
        ping_monitor,
        http2_connection: Rc::downgrade(&link),
        deferred_cancel_timer: LazyTimer::default(),
    };
    Ok((link, driver))
}

impl Http2Connection {
    /// Spawns the task that runs the connection until it closes.
    pub(super) fn spawn_driver(&self, driver: Http2Driver, pool: Weak<UpstreamPool>) {
        let task = tokio::task::spawn_local(driver.run(pool));
        self.task.set(Some(task.abort_handle()));
    }

    /// Reserves a stream, if the connection has capacity.
    pub(super) fn try_reserve_stream(
        self: &Rc<Self>,
        pool: &Rc<UpstreamPool>,
    ) -> Option<StreamSlot> {
        let is_available = !self.closing.get() && !self.is_suspect.get();
        if !is_available
            || self.active_streams.get()
                >= self
                    .sender
                    .current_max_send_streams()
                    .min(MAX_CONCURRENT_STREAMS)
        {
            return None;
        }
        self.active_streams.set(self.active_streams.get() + 1);
        let is_first = !self.was_used.replace(true);
        Some(StreamSlot {
            connection: Rc::clone(self),
            pool: Rc::clone(pool),
            is_first,
            upload: None,
        })
    }

    /// Streams that both the upstream and the proxy allow on this connection.
    pub(super) fn capacity(&self) -> usize {
        self.sender
            .current_max_send_streams()
            .clamp(1, MAX_CONCURRENT_STREAMS)
    }

    /// Stops adding requests. The connection closes after its last one.
    pub(super) fn retire(&self) {
        self.closing.set(true);
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.get()
    }

    /// Cancels a request, or defers that once the cancellation budget is used up.
    fn cancel_request(&self, request: ResponseFuture) {
        match self.cancellation_budget.get() {
            0 => {
                let mut deferred = self.deferred_cancels.borrow_mut();
                deferred.requests.push(request);
                if deferred.since.is_none() {
                    deferred.since = Some(Instant::now());
                    self.wake_driver();
                }
            }
            remaining => {
                self.cancellation_budget.set(remaining - 1);
                if remaining == 1 {
                    tracing::debug!(
                        "upstream connection retired after too many cancelled requests"
                    );
                    self.retire();
                }
            }
        }
    }

    /// Cancels the deferred requests once [`DEFERRED_CANCEL_DELAY`] has passed.
    fn flush_deferred_cancels(&self, timer: &mut LazyTimer, cx: &mut Context<'_>) {
        let Some(since) = self.deferred_cancels.borrow().since else {
            return;
        };
        if timer.poll(since + DEFERRED_CANCEL_DELAY, cx).is_ready() {
            drop(self.deferred_cancels.take());
        }
    }

    fn wake_driver(&self) {
        if let Some(driver) = &*self.driver_waker.borrow() {
            driver.wake_by_ref();
        }
    }

    /// Time since which the connection has had no requests; `None` while it has some.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        (self.active_streams.get() == 0).then(|| self.idle_since.get())
    }
}

impl StreamSlot {
    /// Whether the connection carried earlier requests.
    pub(super) fn is_reused(&self) -> bool {
        !self.is_first
    }

    pub(super) fn connection(&self) -> &Rc<Http2Connection> {
        &self.connection
    }

    /// Whether the upstream supports extended CONNECT (RFC 8441, 3).
    pub(super) fn allows_tunnels(&self) -> bool {
        self.connection
            .sender
            .is_extended_connect_protocol_enabled()
    }

    /// Sends a request head. With `has_body`, the stream stays open for the body.
    ///
    /// # Errors
    /// If the connection takes no more requests, or the head is invalid; nothing was sent then.
    pub(super) fn send_request_head(
        &self,
        request: Request<()>,
        has_body: bool,
    ) -> Result<(Http2ResponseFuture, SendStream<Bytes>), StreamOpenError> {
        // Each request uses its own clone, so requests that wait for capacity do not block each
        // other.
        let mut sender = self.connection.sender.clone();
        match sender.poll_ready(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Err(error)) => {
                self.connection.retire();
                Err(StreamOpenError {
                    is_connection_closed: true,
                    error,
                })
            }
            _ => match sender.send_request(request, !has_body) {
                Ok((response, send_stream)) => Ok((
                    Http2ResponseFuture {
                        response: Some(response),
                        connection: Rc::clone(&self.connection),
                    },
                    send_stream,
                )),
                Err(error) => Err(StreamOpenError {
                    is_connection_closed: false,
                    error,
                }),
            },
        }
    }

    /// Attaches the upload of the request body. Dropping the slot aborts it.
    pub(super) fn attach_upload(&mut self, upload: BodyUpload) {
        self.upload = Some(upload);
    }

    /// Records that a response timed out. The connection takes no new requests until the upstream
    /// answers a PING.
    pub(super) fn mark_suspect(&self) {
        self.connection.is_suspect.set(true);
        self.connection.wake_driver();
    }
}

impl Http2ResponseFuture {
    /// Polls for informational (1xx) response heads.
    pub(super) fn poll_informational(
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
    type Output = Result<Response<RecvStream>, h2::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(response) = &mut self.response else {
            return Poll::Pending;
        };
        let answer = ready!(Pin::new(response).poll(cx));
        self.response = None;
        let budget = &self.connection.cancellation_budget;
        budget.set((budget.get() + 1).min(CANCELLATION_BUDGET));
        Poll::Ready(answer)
    }
}

impl Drop for Http2ResponseFuture {
    fn drop(&mut self) {
        if let Some(response) = self.response.take() {
            self.connection.cancel_request(response);
        }
    }
}

impl Drop for StreamSlot {
    fn drop(&mut self) {
        self.upload = None;
        let connection = &self.connection;
        connection
            .active_streams
            .set(connection.active_streams.get() - 1);
        if connection.active_streams.get() == 0 {
            connection.idle_since.set(Instant::now());
        }
        self.pool.handle_stream_end(connection);
    }
}

impl Drop for Http2Connection {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
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

/// Returns the error kind for an h2 error.
pub(super) fn error_kind(error: &h2::Error) -> UpstreamErrorKind {
    match error.is_remote() {
        true if error.is_reset() => UpstreamErrorKind::StreamReset,
        // h2 reports GOAWAY only for requests that the upstream did not process.
        true => UpstreamErrorKind::ConnectionTerminated,
        false if error.is_library() => UpstreamErrorKind::Protocol,
        false => UpstreamErrorKind::ConnectionTerminated,
    }
}

/// Whether the upstream states that it did not process the request (RFC 9113, 8.7).
pub(super) fn classify_failure(error: &h2::Error) -> ExchangeFailure {
    match error.is_remote() {
        true if error.is_go_away() => ExchangeFailure::GoAway,
        true if error.reason() == Some(h2::Reason::REFUSED_STREAM) => {
            ExchangeFailure::RefusedStream
        }
        _ => ExchangeFailure::MaybeProcessed,
    }
}

/// The task that reads and writes for all requests of a connection.
pub(super) struct Http2Driver {
    connection: h2::client::Connection<UpstreamSocket, Bytes>,
    ping_monitor: Option<PingMonitor>,
    http2_connection: Weak<Http2Connection>,
    deferred_cancel_timer: LazyTimer,
}

impl Http2Driver {
    async fn run(mut self, pool: Weak<UpstreamPool>) {
        let end = poll_fn(|cx| {
            if let Poll::Ready(end) = Pin::new(&mut self.connection).poll(cx) {
                return Poll::Ready(end.map_err(|error| format_error_chain(&error)));
            }
            let Some(http2_connection) = self.http2_connection.upgrade() else {
                return Poll::Pending;
            };
            http2_connection
                .driver_waker
                .replace(Some(cx.waker().clone()));
            http2_connection.flush_deferred_cancels(&mut self.deferred_cancel_timer, cx);
            let Some(ping_monitor) = &mut self.ping_monitor else {
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
        // Completes the connection's requests with an error.
        drop(self.connection);
        if let (Some(http2_connection), Some(pool)) =
            (self.http2_connection.upgrade(), pool.upgrade())
        {
            http2_connection.retire();
            pool.handle_stream_end(&http2_connection);
        }
    }
}

/// Detects an unresponsive upstream by sending PINGs.
struct PingMonitor {
    ping_pong: PingPong,
    read_activity: Arc<AtomicBool>,
    /// PINGs sent since other data was received.
    pings_since_read: usize,
    /// Start of the current quiet period: the last PONG or the last other data.
    quiet_since: Instant,
    /// Deadline for the PONG of the current PING.
    pong_deadline: Option<Instant>,
    timer: LazyTimer,
}

impl PingMonitor {
    fn new(ping_pong: PingPong, read_activity: Arc<AtomicBool>) -> Self {
        Self {
            ping_pong,
            read_activity,
            pings_since_read: 0,
            quiet_since: Instant::now(),
            pong_deadline: None,
            timer: LazyTimer::default(),
        }
    }

    /// Ready when the upstream is unresponsive. A `suspect` connection is sent a PING immediately.
    fn poll(&mut self, suspect: &Cell<bool>, cx: &mut Context<'_>) -> Poll<()> {
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
                        // The connection future reports the same error.
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
                // The upstream is sending a lot of data, and the PONG is queued behind it.
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
