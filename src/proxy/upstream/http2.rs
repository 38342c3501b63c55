//! HTTP/2 towards the upstream: one connection that carries many requests.
//!
//! h2 is used directly, not through hyper's client: that would run two tasks per request, and could not
//! take back an upload whose answer has been read, nor tell a request that the upstream refused unseen.

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

/// Requests at a time on one connection, if the upstream allows as many.
pub(super) const MAX_CONCURRENT_STREAMS: usize = 100;
/// What an upstream may send before the client has taken it: per request, and per connection. The second is so
/// large that clients who don't read hold up nobody but themselves.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 100 * STREAM_WINDOW_BYTES;
/// A request's part that waits for the upstream's window.
const SEND_BUFFER_BYTES: usize = 64 * 1024;
/// Requests that were given up lately: what the upstream had already sent for them is not its fault.
const MAX_REMEMBERED_RESETS: usize = 1000;

/// How many requests may be given up before the upstream has answered as many others, until a connection gets no more
/// of them. Servers take a peer who sends requests and takes them back for an attacker and end the connection with all
/// that is on it (CVE-2023-44487; h2 and hyper allow 20 that nobody has looked at yet): no client's doing may end the
/// requests of others.
const CANCELLATION_BUDGET: u32 = 10;
/// What is given up beyond that is so after this long only: by then the upstream has looked at it.
const DEFERRED_CANCEL_DELAY: Duration = Duration::from_secs(1);

/// A silent upstream is asked for a sign of life. gRPC servers take more than two PINGs in a row for abuse if
/// they come within five minutes of each other.
const PING_INTERVALS: [Duration; 3] = [
    Duration::from_secs(20),
    Duration::from_secs(60),
    Duration::from_secs(330),
];
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection. Dropping it closes it.
pub(super) struct Http2Connection {
    sender: SendRequest<Bytes>,
    /// The address at the other end.
    pub(super) peer: Option<IpAddr>,
    /// Requests on it.
    active_streams: Cell<usize>,
    /// It is over, or is to be when its last request is.
    closing: Cell<bool>,
    /// It was slow to answer, and hasn't been heard of since.
    is_suspect: Cell<bool>,
    was_used: Cell<bool>,
    /// Requests that may still be given up, see [`PATIENCE`].
    cancellation_budget: Cell<u32>,
    deferred_cancels: RefCell<DeferredCancels>,
    idle_since: Cell<Instant>,
    driver_waker: RefCell<Option<Waker>>,
    task: Cell<Option<AbortHandle>>,
}

/// Room for one request on a [`Link`]; dropping it ends the request.
#[derive(Debug)]
pub(super) struct StreamSlot {
    connection: Rc<Http2Connection>,
    pool: Rc<UpstreamPool>,
    is_first: bool,
    upload: Option<BodyUpload>,
}

/// What the upstream says to a request. Dropped before that, the request is given up.
pub(super) struct Http2ResponseFuture {
    response: Option<ResponseFuture>,
    connection: Rc<Http2Connection>,
}

/// Requests that nobody waits for any more and that are not taken back yet.
#[derive(Default)]
struct DeferredCancels {
    requests: Vec<ResponseFuture>,
    since: Option<Instant>,
}

/// A request of which nothing was sent.
pub(super) struct StreamOpenError {
    /// The connection takes no more requests.
    pub(super) is_connection_closed: bool,
    pub(super) error: h2::Error,
}

/// Speaks HTTP/2 on a new connection. It is open when the upstream has said what it allows: who doesn't speak HTTP/2
/// is found out before there is a request that it could have seen.
///
/// # Errors
/// When the upstream says anything else, or nothing within `limit`.
pub(super) async fn handshake(
    stream: UpstreamSocket,
    limit: Duration,
) -> Result<(Rc<Http2Connection>, Http2Driver), UpstreamError> {
    let (read_activity, peer) = (stream.read_activity(), stream.peer());
    let mut builder = Builder::new();
    builder
        .enable_push(false)
        // None until it says how many.
        .initial_max_send_streams(0)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_header_list_size(MAX_RESPONSE_HEAD_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .max_concurrent_reset_streams(MAX_REMEMBERED_RESETS)
        // Counted over the connection's life, which may be long.
        .max_local_error_reset_streams(None);
    let failed = |error: h2::Error| UpstreamError {
        kind: error_kind(&error),
        detail: format!("no HTTP/2: {}", format_error_chain(&error)),
    };
    let handshake_future = async {
        let (sender, mut connection) = builder.handshake(stream).await.map_err(failed)?;
        poll_fn(|cx| match Pin::new(&mut connection).poll(cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(failed(error))),
            Poll::Ready(Ok(())) => Poll::Ready(Err(UpstreamError {
                kind: UpstreamErrorKind::ConnectionTerminated,
                detail: "closed before it spoke HTTP/2".to_owned(),
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
            let detail = format!("it did not begin to speak HTTP/2 within {limit:?}");
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
    /// Lets `driver` run the connection until its end, which the pool is told of.
    pub(super) fn spawn_driver(&self, driver: Http2Driver, pool: Weak<UpstreamPool>) {
        let task = tokio::task::spawn_local(driver.run(pool));
        self.task.set(Some(task.abort_handle()));
    }

    /// Room for one more request, if there is.
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

    /// How many requests the upstream allows on one connection, and we do.
    pub(super) fn capacity(&self) -> usize {
        self.sender
            .current_max_send_streams()
            .clamp(1, MAX_CONCURRENT_STREAMS)
    }

    /// No request will be added; the connection ends with its last one.
    pub(super) fn retire(&self) {
        self.closing.set(true);
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.get()
    }

    /// Takes a request back, or leaves that for later if there were many of late.
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
                        "an upstream connection gets no more requests: too many were given up"
                    );
                    self.retire();
                }
            }
        }
    }

    /// Takes back what was left for later, when it is time.
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

    /// Since when it has had no request, if it has none.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        (self.active_streams.get() == 0).then(|| self.idle_since.get())
    }
}

impl StreamSlot {
    /// Whether earlier requests were sent on the connection.
    pub(super) fn is_reused(&self) -> bool {
        !self.is_first
    }

    pub(super) fn connection(&self) -> &Rc<Http2Connection> {
        &self.connection
    }

    /// Whether a stream may become a tunnel (RFC 8441, 3).
    pub(super) fn allows_tunnels(&self) -> bool {
        self.connection
            .sender
            .is_extended_connect_protocol_enabled()
    }

    /// Sends a request's head. Its body, if it has one, is to follow.
    ///
    /// # Errors
    /// When the connection takes no more, or the request is one that can't be sent; nothing of it was.
    pub(super) fn send_request_head(
        &self,
        request: Request<()>,
        has_body: bool,
    ) -> Result<(Http2ResponseFuture, SendStream<Bytes>), StreamOpenError> {
        // A clone of its own: of those that wait for their turn, none stands in the way of the next.
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

    /// Keeps the sending of the request's body, which is given up when this is dropped.
    pub(super) fn attach_upload(&mut self, upload: BodyUpload) {
        self.upload = Some(upload);
    }

    /// The answer did not come in time. Perhaps nobody is there any more: until there is a sign of life,
    /// no further request is sent.
    pub(super) fn mark_suspect(&self) {
        self.connection.is_suspect.set(true);
        self.connection.wake_driver();
    }
}

impl Http2ResponseFuture {
    /// Heads that come before the answer's.
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
        f.debug_struct("Link")
            .field("streams", &self.active_streams)
            .finish_non_exhaustive()
    }
}

/// What an error means for the request that met it.
pub(super) fn error_kind(error: &h2::Error) -> UpstreamErrorKind {
    match error.is_remote() {
        true if error.is_reset() => UpstreamErrorKind::StreamReset,
        // h2 tells a request of a GOAWAY only if the upstream says that it never saw the request.
        true => UpstreamErrorKind::ConnectionTerminated,
        false if error.is_library() => UpstreamErrorKind::Protocol,
        false => UpstreamErrorKind::ConnectionTerminated,
    }
}

/// Whether the upstream says that it did nothing about a request (RFC 9113, 8.7).
pub(super) fn classify_failure(error: &h2::Error) -> ExchangeFailure {
    match error.is_remote() {
        true if error.is_go_away() => ExchangeFailure::GoAway,
        true if error.reason() == Some(h2::Reason::REFUSED_STREAM) => {
            ExchangeFailure::RefusedStream
        }
        _ => ExchangeFailure::MaybeProcessed,
    }
}

/// What reads and writes for all requests of a connection.
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
                .map(|()| Err("it does not answer a PING".to_owned()))
        });
        match end.await {
            Ok(()) => tracing::debug!("an upstream connection ended"),
            Err(error) => tracing::debug!(error, "an upstream connection ended"),
        }
        // Its requests learn of it.
        drop(self.connection);
        if let (Some(http2_connection), Some(pool)) =
            (self.http2_connection.upgrade(), pool.upgrade())
        {
            http2_connection.retire();
            pool.handle_stream_end(&http2_connection);
        }
    }
}

/// Finds out whether a silent upstream is still there.
struct PingMonitor {
    ping_pong: PingPong,
    read_activity: Arc<AtomicBool>,
    /// PINGs since anything else was heard.
    pings_since_read: usize,
    /// When the last one was answered, or something else was last heard of.
    quiet_since: Instant,
    /// Until when the PING under way has to be answered.
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

    /// Ready when the upstream is gone. Whoever is `suspect` is asked at once.
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
                        // The connection says so, too.
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
                // Busy with much to say, and the answer stands behind all that.
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

    /// Silence begins anew.
    fn restart_quiet_period(&mut self, pings_since_read: usize) {
        self.read_activity.store(false, Ordering::Relaxed);
        self.quiet_since = Instant::now();
        self.pings_since_read = pings_since_read;
    }
}
