//! Serves one client connection: protocol detection, HTTP/1, HTTP/2, timeouts and drain.

mod streams;
mod upgrade_handover;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, Version, header};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1::Parts;
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::error::Error as _;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::{Instant, timeout};

use super::accept::AcceptedConnection;
use super::allocator_trim::AllocatorTrim;
use super::connection_timeouts::{
    ActiveRequest, ConnectionMonitor, ConnectionTimeouts, MonitoredSocket, TimeoutKind,
};
use super::lazy_timer::LazyTimer;
use crate::proxy::ListenSettings;
use crate::proxy::http::body::{BodyError, BodyLimits, RequestBody, ResponseBody};
use crate::proxy::http::informational_responses::InformationalForwarder;
use crate::proxy::server::connection::streams::StreamTasks;
use crate::proxy::server::connection::upgrade_handover::{UpgradeHandover, UpgradedRequest};
use crate::proxy::server::{ConnectionPeer, ListenerKind, RequestHandler, ServerLoad};
use crate::telemetry::metrics::ConnectionCloseReason;

/// HTTP/2 client connection preface (RFC 9113, 3.4).
const HTTP2_PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const REQUEST_TIMEOUT_RESPONSE: &[u8] =
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
/// Limit for writing a final response and closing the connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// Delay before a drain closes an idle connection. A request may have arrived that the runtime has
/// not read yet.
const DRAIN_IDLE_DELAY: Duration = Duration::from_millis(5);
/// The same delay for a connection that is in its handshake when the drain begins. Its first
/// request may be a round trip away.
const DRAIN_HANDSHAKE_DELAY: Duration = Duration::from_secs(1);

/// hyper's parser keeps this many headers on the stack. Any other limit costs an allocation.
const HYPER_STACK_MAX_HEADERS: usize = 100;
/// Minimum limit of an HTTP/1 connection's buffers, per direction.
const MIN_BUFFER_BYTES: usize = 64 * 1024;
/// Response bytes buffered per stream while the client's flow-control window is exhausted.
const H2_SEND_BUFFER_BYTES: usize = 64 * 1024;
/// Maximum size of a response chunk passed to HTTP/2. A request for the next chunk shows that the
/// client reads, even if slowly.
const H2_CHUNK_BYTES: usize = 16 * 1024;
/// Flow-control windows granted to the client, per stream and per connection.
const H2_STREAM_WINDOW_BYTES: u32 = 256 * 1024;
const H2_CONNECTION_WINDOW_BYTES: u32 = 1024 * 1024;
/// Limit of streams that a client resets before the server accepts them ("rapid reset").
const H2_MAX_PENDING_RESETS: usize = 20;
/// Limit of streams that the server resets for client errors before it closes the connection.
const H2_MAX_LOCAL_RESETS: usize = 256;
/// PINGs detect a peer that disappeared without closing the connection.
const H2_PING_INTERVAL: Duration = Duration::from_secs(20);
const H2_PING_TIMEOUT: Duration = Duration::from_secs(10);

/// HTTP settings of one listener, on one worker.
#[derive(Clone, Debug)]
pub(in crate::proxy) struct HttpProtocols {
    http1: http1::Builder,
    settings: ListenSettings,
    listener_kind: ListenerKind,
    load: ServerLoad,
    allocator_trim: Rc<AllocatorTrim>,
}

impl HttpProtocols {
    /// Panics of HTTP/2 stream tasks are counted in `load`.
    pub(in crate::proxy) fn new(
        settings: &ListenSettings,
        listener_kind: ListenerKind,
        load: ServerLoad,
        allocator_trim: Rc<AllocatorTrim>,
    ) -> Self {
        let mut http1 = http1::Builder::new();
        http1
            .half_close(false)
            .max_header_size(settings.max_header_bytes);
        http1.max_buf_size(
            settings
                .max_header_bytes
                .saturating_add(1)
                .max(MIN_BUFFER_BYTES),
        );
        if settings.max_headers != HYPER_STACK_MAX_HEADERS {
            http1.max_headers(settings.max_headers);
        }
        Self {
            http1,
            settings: settings.clone(),
            listener_kind,
            load,
            allocator_trim,
        }
    }

    pub(in crate::proxy) fn timeouts(&self) -> ConnectionTimeouts {
        ConnectionTimeouts {
            idle: self.settings.idle_timeout,
            request_head: self.settings.header_timeout,
            write_stall: self.settings.body_idle_timeout,
        }
    }

    fn body_limits(&self) -> BodyLimits {
        BodyLimits {
            idle_timeout: self.settings.body_idle_timeout,
            max_bytes: self.settings.max_body_bytes,
        }
    }

    /// Limit of pending stream resets. The operator's own proxies have timeouts of milliseconds and
    /// reset all their streams when a reply is late, so they may reset every stream.
    fn max_pending_resets(&self) -> usize {
        match self.listener_kind.is_public() {
            true => H2_MAX_PENDING_RESETS,
            false => usize::try_from(self.settings.max_concurrent_streams).unwrap_or(usize::MAX),
        }
    }

    fn build_http2(
        &self,
        monitor: &Rc<ConnectionMonitor>,
        handover: &Rc<UpgradeHandover>,
    ) -> http2::Builder<StreamTasks> {
        let tasks = StreamTasks::new(Rc::clone(monitor), Rc::clone(handover), self.load.clone());
        let mut http2 = http2::Builder::new(tasks);
        http2
            .timer(TokioTimer::new())
            .enable_connect_protocol()
            .max_concurrent_streams(self.settings.max_concurrent_streams)
            .max_header_list_size(u32::try_from(self.settings.max_header_bytes).unwrap_or(u32::MAX))
            .initial_stream_window_size(H2_STREAM_WINDOW_BYTES)
            .initial_connection_window_size(H2_CONNECTION_WINDOW_BYTES)
            .max_send_buf_size(H2_SEND_BUFFER_BYTES)
            .max_pending_accept_reset_streams(self.max_pending_resets())
            .max_local_error_reset_streams(H2_MAX_LOCAL_RESETS)
            .keep_alive_interval(H2_PING_INTERVAL)
            .keep_alive_timeout(H2_PING_TIMEOUT);
        http2
    }
}

/// Serves one connection until it ends.
pub(in crate::proxy) async fn serve_connection<H: RequestHandler>(
    connection: AcceptedConnection,
    handler: Rc<H>,
    protocols: Rc<HttpProtocols>,
    monitor: Rc<ConnectionMonitor>,
) {
    let AcceptedConnection {
        socket,
        peer,
        negotiated_http2: http2,
    } = connection;
    let peer = Arc::new(peer);
    monitor.set_accepted();
    let mut driver = ConnectionDriver::new(Rc::clone(&monitor));
    let mut socket = MonitoredSocket::new(socket, Rc::clone(&monitor));
    let mut first_bytes = Vec::with_capacity(HTTP2_PREFACE.len());
    let detected = driver
        .drive(|cx, close| poll_detect_protocol(&mut socket, &mut first_bytes, cx, close))
        .await;
    socket.put_back(&first_bytes);
    let limits = protocols.body_limits();
    let handover = Rc::<UpgradeHandover>::default();
    // A request future takes about 4 KiB. Constructing it in its box avoids a copy.
    let requests = service_fn(|request| {
        let allocation = Box::new_uninit();
        let handling = handle_request(
            request,
            Arc::clone(&peer),
            &handler,
            limits,
            &monitor,
            &handover,
        );
        Box::into_pin(Box::write(allocation, handling))
    });
    let detected = detected.map(|sniffed| match (sniffed, http2) {
        // The protocol negotiated by ALPN wins over the client's first bytes.
        (DetectedProtocol::Http2, Some(false)) => DetectedProtocol::Http1,
        (DetectedProtocol::Http1, Some(true)) => DetectedProtocol::Http2,
        (sniffed, _) => sniffed,
    });
    let record_unreadable = |status| handler.record_unreadable_request(status, &peer);
    match detected {
        Ok(DetectedProtocol::Http1) => {
            serve_http1(
                socket,
                &protocols,
                driver,
                requests,
                &handover,
                record_unreadable,
            )
            .await
        }
        Ok(DetectedProtocol::Http2) => {
            monitor.set_http2();
            // Boxed, so that the connection's future does not reserve space for it.
            Box::pin(serve_http2(socket, &protocols, driver, requests, &handover)).await;
        }
        // A TLS client treats a close without close_notify as a truncated connection.
        Ok(DetectedProtocol::Disconnected) => close_gracefully(&mut socket).await,
        Err(overdue) => close_timed_out(socket, overdue, &monitor, record_unreadable).await,
    }
    protocols.allocator_trim.record_release();
}

/// Serves HTTP/1 until the connection ends. hyper and its buffers, about 20 KiB, exist only while
/// the client sends requests: connections are idle most of the time.
///
/// `record_unreadable` receives the status sent for input that is not a valid request.
async fn serve_http1<S, F>(
    mut socket: MonitoredSocket,
    protocols: &HttpProtocols,
    mut driver: ConnectionDriver,
    mut requests: S,
    handover: &UpgradeHandover,
    record_unreadable: impl Fn(StatusCode),
) where
    S: Service<
            Request<Incoming>,
            Response = Response<TrackedResponseBody>,
            Error = Infallible,
            Future = F,
        >,
    F: Future<Output = Result<Response<TrackedResponseBody>, Infallible>>,
{
    loop {
        driver.monitor.set_has_buffers(true);
        let idle_connection = Box::pin(serve_http1_until_idle(
            socket,
            protocols,
            &mut driver,
            requests,
            handover,
            &record_unreadable,
        ))
        .await;
        driver.monitor.set_has_buffers(false);
        match idle_connection {
            Some(idle) => {
                (socket, requests) = idle;
                protocols.allocator_trim.record_release();
            }
            None => return,
        }
        let next_request = driver.drive(|cx, close| match socket.poll_next_request(cx) {
            Poll::Pending if close => Poll::Ready(false),
            begun => begun,
        });
        match next_request.await {
            Ok(true) => {}
            Ok(false) => return close_gracefully(&mut socket).await,
            Err(overdue) => {
                return close_timed_out(socket, overdue, &driver.monitor, record_unreadable).await;
            }
        }
    }
}

/// Serves HTTP/1 until the connection ends or becomes idle. Returns the socket and the service of
/// an idle connection.
async fn serve_http1_until_idle<S, F>(
    socket: MonitoredSocket,
    protocols: &HttpProtocols,
    driver: &mut ConnectionDriver,
    requests: S,
    handover: &UpgradeHandover,
    record_unreadable: &impl Fn(StatusCode),
) -> Option<(MonitoredSocket, S)>
where
    S: Service<
            Request<Incoming>,
            Response = Response<TrackedResponseBody>,
            Error = Infallible,
            Future = F,
        >,
    F: Future<Output = Result<Response<TrackedResponseBody>, Infallible>>,
{
    let mut connection = protocols
        .http1
        .serve_connection(TokioIo::new(socket), requests);
    let end = driver.drive(|cx, close| {
        if close {
            Pin::new(&mut connection).graceful_shutdown();
        }
        Pin::new(&mut connection).poll(cx)
    });
    match end.await {
        Ok(Ok(())) => {
            let Parts { io, read_buf, .. } = connection.into_parts();
            let mut socket = io.into_inner();
            socket.put_back(&read_buf);
            drop(read_buf);
            match handover.take() {
                // If the 101 head is still blocked, the client would read tunnel bytes as a
                // response.
                Some(switched) if driver.monitor.has_no_blocked_write() => {
                    // Boxed, so that the connection's future does not reserve space for it.
                    Box::pin(
                        switched.serve_http1_tunnel(socket, protocols.settings.body_idle_timeout),
                    )
                    .await;
                }
                // hyper does not close the socket after a request that could have been upgraded.
                None if handover.was_upgrade_requested() => close_gracefully(&mut socket).await,
                _ => {}
            }
        }
        Ok(Err(error)) => {
            tracing::debug!(%error, "client connection failed");
            if let Some(status) = parse_error_status(&error) {
                driver.monitor.record_close(ConnectionCloseReason::Protocol);
                record_unreadable(status);
            }
            if error.is_user() && driver.monitor.is_close_delimited() {
                connection.into_parts().io.into_inner().abort();
            }
        }
        Err(TimeoutKind::IdleBuffers) => {
            let Parts {
                io,
                read_buf,
                service,
                ..
            } = connection.into_parts();
            let mut socket = io.into_inner();
            socket.put_back(&read_buf);
            return Some((socket, service));
        }
        Err(overdue) => {
            close_timed_out(
                connection.into_parts().io.into_inner(),
                overdue,
                &driver.monitor,
                record_unreadable,
            )
            .await;
        }
    }
    None
}

/// Status that hyper sent for input that is not a valid HTTP/1 request. `None` if it sent no
/// response.
fn parse_error_status(error: &hyper::Error) -> Option<StatusCode> {
    match () {
        () if !error.is_parse() || error.is_parse_version_h2() => None,
        () if !error.is_parse_too_large() => Some(StatusCode::BAD_REQUEST),
        // hyper distinguishes the two errors only by their message.
        () if error.to_string().starts_with("URI") => Some(StatusCode::URI_TOO_LONG),
        () => Some(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE),
    }
}

async fn serve_http2<S, F>(
    socket: MonitoredSocket,
    protocols: &HttpProtocols,
    mut driver: ConnectionDriver,
    requests: S,
    handover: &Rc<UpgradeHandover>,
) where
    S: Service<
            Request<Incoming>,
            Response = Response<TrackedResponseBody>,
            Error = Infallible,
            Future = F,
        >,
    F: Future<Output = Result<Response<TrackedResponseBody>, Infallible>> + 'static,
{
    let http2 = protocols.build_http2(&driver.monitor, handover);
    let mut connection = http2.serve_connection(TokioIo::new(socket), requests);
    let end = driver.drive(|cx, close| {
        if close {
            Pin::new(&mut connection).graceful_shutdown();
        }
        Pin::new(&mut connection).poll(cx)
    });
    match end.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::debug!(%error, "client connection failed");
            if let Some(reason) = close_reason(&error, &driver.monitor) {
                driver.monitor.record_close(reason);
            }
        }
        Err(overdue) => {
            tracing::debug!(?overdue, "client connection timed out");
            driver.monitor.record_close(ConnectionCloseReason::SlowRead);
        }
    }
}

/// Classifies the error of an HTTP/2 connection. Returns `None` if the client did not cause it.
fn close_reason(
    error: &hyper::Error,
    monitor: &ConnectionMonitor,
) -> Option<ConnectionCloseReason> {
    if monitor.frame_budget().is_exhausted() {
        return Some(ConnectionCloseReason::Flood);
    }
    let error = error
        .source()?
        .downcast_ref::<h2::Error>()
        .filter(|error| error.is_library())?;
    match error.reason()? {
        h2::Reason::NO_ERROR => None,
        h2::Reason::ENHANCE_YOUR_CALM => Some(ConnectionCloseReason::Flood),
        _ => Some(ConnectionCloseReason::Protocol),
    }
}

/// Passes one request to the handler. The request stays active until its last body is dropped.
///
/// Inlined so that the future is constructed in place instead of being copied.
#[inline(always)]
fn handle_request<H: RequestHandler>(
    request: Request<Incoming>,
    peer: Arc<ConnectionPeer>,
    handler: &Rc<H>,
    limits: BodyLimits,
    monitor: &Rc<ConnectionMonitor>,
    handover: &Rc<UpgradeHandover>,
) -> impl Future<Output = Result<Response<TrackedResponseBody>, Infallible>> + use<H> {
    let active = monitor.begin_request();
    let (mut head, incoming) = request.into_parts();
    let upgrade = head.extensions.remove::<OnUpgrade>();
    if upgrade.is_some() {
        handover.set_upgrade_requested();
    }
    let handover = Rc::clone(handover);
    if head.version == Version::HTTP_10 {
        monitor.set_close_delimited();
    }
    let is_http2 = head.version == Version::HTTP_2;
    let max_frame_bytes = if is_http2 { H2_CHUNK_BYTES } else { usize::MAX };
    let body = RequestBody::new(&head, incoming, limits, &active);
    let charges_early_reset = is_http2 && peer.listener_kind.is_public();
    let mut guard = RequestGuard {
        request: active,
        arrived_at: charges_early_reset.then(Instant::now),
        is_complete: false,
    };
    let handler = Rc::clone(handler);
    let interim = InformationalForwarder::new(head.version, monitor);
    async move {
        // Constructed in place: the handler's future reserves space for everything that a request
        // may need. Constructed earlier, it would be stored twice per connection and copied for
        // each request.
        let mut handling = pin!(handler.handle(Request::from_parts(head, body), peer, interim));
        let response = poll_fn(|cx| {
            let polled = handling.as_mut().poll(cx);
            if polled.is_pending() {
                guard.request.monitor().mark_progress();
            }
            polled
        });
        let mut response = response.await;
        let monitor = guard.request.monitor();
        monitor.frame_budget().credit_response();
        if !is_http2
            && (monitor.is_draining() || monitor.has_unread_input())
            && response.status() != StatusCode::SWITCHING_PROTOCOLS
        {
            // Set before hyper knows of the close. hyper is asked to close only when no more input
            // is expected, and notices an unread body later. A request sent after a response
            // without this header is lost.
            response
                .headers_mut()
                .insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if let (Some(tunnel), Some(client)) = (response.body_mut().take_tunnel(), upgrade) {
            handover.put(UpgradedRequest::new(tunnel, client, guard.request.clone()));
        }
        Ok(response.map(|body| {
            guard.is_complete = body.is_end_stream();
            TrackedResponseBody {
                body,
                guard,
                max_frame_bytes,
                remainder: Bytes::new(),
            }
        }))
    }
}

/// Closes a connection that exceeded a timeout.
async fn close_timed_out(
    mut socket: MonitoredSocket,
    overdue: TimeoutKind,
    monitor: &ConnectionMonitor,
    record_unreadable: impl Fn(StatusCode),
) {
    tracing::debug!(?overdue, "client connection timed out");
    match overdue {
        TimeoutKind::SlowHead => monitor.record_close(ConnectionCloseReason::HeaderTimeout),
        TimeoutKind::Stalled => {
            monitor.record_close(ConnectionCloseReason::SlowRead);
            return socket.abort();
        }
        // Idle connections do not end here: they are closed gracefully or only release their
        // buffers.
        TimeoutKind::Idle | TimeoutKind::IdleBuffers => return socket.abort(),
    }
    record_unreadable(StatusCode::REQUEST_TIMEOUT);
    socket.ignore_remaining_input();
    let response_sent = timeout(CLOSE_TIMEOUT, async {
        socket.write_all(REQUEST_TIMEOUT_RESPONSE).await?;
        socket.shutdown().await
    });
    if !matches!(response_sent.await, Ok(Ok(()))) {
        tracing::debug!("408 response not delivered");
    }
}

/// Shuts a connection down within [`CLOSE_TIMEOUT`].
async fn close_gracefully(socket: &mut (impl AsyncWrite + Unpin)) {
    if !matches!(timeout(CLOSE_TIMEOUT, socket.shutdown()).await, Ok(Ok(()))) {
        tracing::debug!("client did not close within the limit");
    }
}

/// Polls the work of a connection and ends it at the deadlines of its [`ConnectionMonitor`].
struct ConnectionDriver {
    monitor: Rc<ConnectionMonitor>,
    timer: LazyTimer,
    /// Time at which the work is asked to close.
    close_at: Option<Instant>,
    is_closing: bool,
    drain_delay: Duration,
}

impl ConnectionDriver {
    fn new(monitor: Rc<ConnectionMonitor>) -> Self {
        let drain_delay = if monitor.is_drain_pending() {
            DRAIN_HANDSHAKE_DELAY
        } else {
            DRAIN_IDLE_DELAY
        };
        Self {
            monitor,
            timer: LazyTimer::default(),
            close_at: None,
            is_closing: false,
            drain_delay,
        }
    }

    /// Polls `work` until it is ready or a timeout expires. `work` is called with `true` once, when
    /// it should close gracefully.
    async fn drive<T>(
        &mut self,
        mut work: impl FnMut(&mut Context<'_>, bool) -> Poll<T>,
    ) -> Result<T, TimeoutKind> {
        // Earlier work was already asked to close, so this work is asked as well.
        if std::mem::take(&mut self.is_closing) {
            self.close_at = Some(Instant::now());
        }
        poll_fn(|cx| {
            self.monitor.set_driver_waker(cx.waker());
            if self.monitor.take_drain_request() && !self.is_closing {
                self.close_at = Some(Instant::now() + self.drain_delay);
            }
            // A response in progress can still announce that the connection closes.
            if let Poll::Ready(end) = self.close_if_active(cx, &mut work) {
                return Poll::Ready(Ok(end));
            }
            if let Poll::Ready(end) = work(cx, false) {
                return Poll::Ready(Ok(end));
            }
            if let Poll::Ready(end) = self.close_if_active(cx, &mut work) {
                return Poll::Ready(Ok(end));
            }
            while let Some((deadline, overdue)) = self.next_deadline() {
                if self.timer.poll(deadline, cx).is_pending() {
                    return Poll::Pending;
                }
                if overdue != TimeoutKind::Idle || self.is_closing {
                    return Poll::Ready(Err(overdue));
                }
                if self.close_at.is_none() {
                    self.monitor.record_close(ConnectionCloseReason::Idle);
                }
                if let Poll::Ready(end) = self.close(cx, &mut work) {
                    return Poll::Ready(Ok(end));
                }
            }
            Poll::Pending
        })
        .await
    }

    fn next_deadline(&self) -> Option<(Instant, TimeoutKind)> {
        self.close_at
            .map(|at| (at, TimeoutKind::Idle))
            .or_else(|| self.monitor.next_deadline())
    }

    fn close_if_active<T>(
        &mut self,
        cx: &mut Context<'_>,
        work: &mut impl FnMut(&mut Context<'_>, bool) -> Poll<T>,
    ) -> Poll<T> {
        if self.close_at.is_some() && self.monitor.has_active_requests() {
            self.close(cx, work)
        } else {
            Poll::Pending
        }
    }

    fn close<T>(
        &mut self,
        cx: &mut Context<'_>,
        work: &mut impl FnMut(&mut Context<'_>, bool) -> Poll<T>,
    ) -> Poll<T> {
        self.close_at = None;
        self.is_closing = true;
        self.monitor.set_closing();
        work(cx, true)
    }
}

enum DetectedProtocol {
    Http1,
    Http2,
    /// The client disconnected, or the connection was asked to close, before any byte arrived.
    Disconnected,
}

/// Reads until the first bytes are, or cannot be, the HTTP/2 preface. With `close`, does not wait
/// for the first byte.
fn poll_detect_protocol(
    socket: &mut MonitoredSocket,
    first_bytes: &mut Vec<u8>,
    cx: &mut Context<'_>,
    close: bool,
) -> Poll<DetectedProtocol> {
    loop {
        let mut bytes = [0; HTTP2_PREFACE.len()];
        let unfilled = bytes.get_mut(first_bytes.len()..).unwrap_or_default();
        let mut into = ReadBuf::new(unfilled);
        match Pin::new(&mut *socket).poll_read(cx, &mut into) {
            Poll::Pending if close && first_bytes.is_empty() => {
                return Poll::Ready(DetectedProtocol::Disconnected);
            }
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Err(_)) => return Poll::Ready(DetectedProtocol::Disconnected),
            Poll::Ready(Ok(())) if into.filled().is_empty() && first_bytes.is_empty() => {
                return Poll::Ready(DetectedProtocol::Disconnected);
            }
            // hyper handles a truncated request.
            Poll::Ready(Ok(())) if into.filled().is_empty() => {
                return Poll::Ready(DetectedProtocol::Http1);
            }
            Poll::Ready(Ok(())) => first_bytes.extend_from_slice(into.filled()),
        }
        if !HTTP2_PREFACE.starts_with(first_bytes) {
            return Poll::Ready(DetectedProtocol::Http1);
        }
        if first_bytes.len() == HTTP2_PREFACE.len() {
            return Poll::Ready(DetectedProtocol::Http2);
        }
    }
}

/// Guard of a request, from its arrival to the end of its response. An HTTP/2 request that ends
/// incomplete is charged to the frame budget.
struct RequestGuard {
    request: ActiveRequest,
    /// Set only for HTTP/2 clients of a public listener, which can cancel one request and continue
    /// with others. The operator's own proxies cancel requests when their timeouts expire.
    arrived_at: Option<Instant>,
    is_complete: bool,
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        if let Some(arrived) = self.arrived_at.filter(|_| !self.is_complete) {
            self.request
                .monitor()
                .frame_budget()
                .charge_reset(arrived.elapsed());
        }
    }
}

/// Response body that keeps its request active and marks the progress of the connection.
struct TrackedResponseBody {
    body: ResponseBody,
    guard: RequestGuard,
    /// Maximum bytes per frame.
    max_frame_bytes: usize,
    /// Rest of the last frame that was split.
    remainder: Bytes,
}

impl Body for TrackedResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        // hyper polls for more only when it can send more to the client.
        self.guard.request.monitor().mark_progress();
        if self.remainder.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.remainder = data,
                    Err(trailers) => {
                        self.guard.is_complete = true;
                        return Poll::Ready(Some(Ok(trailers)));
                    }
                },
                end => {
                    self.guard.is_complete = true;
                    return Poll::Ready(end);
                }
            }
        }
        self.guard
            .request
            .monitor()
            .frame_budget()
            .credit_response();
        let frame_bytes = self.max_frame_bytes.min(self.remainder.len());
        let frame = self.remainder.split_to(frame_bytes);
        self.guard.is_complete = self.is_end_stream();
        Poll::Ready(Some(Ok(Frame::data(frame))))
    }

    fn is_end_stream(&self) -> bool {
        self.remainder.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (mut hint, rest) = (
            self.body.size_hint(),
            u64::try_from(self.remainder.len()).unwrap_or(u64::MAX),
        );
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper.saturating_add(rest));
        }
        hint.set_lower(hint.lower().saturating_add(rest));
        hint
    }
}
