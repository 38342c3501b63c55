//! The task of an HTTP/2 connection.

use bytes::Bytes;
use h2::client::Builder;
use h2::{Ping, PingPong};
use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;

use super::connection::Http2Connection;
use super::received_stream::DATA_FRAME_BUDGET_BYTES;
use crate::proxy::connection_io::LazyTimer;
use crate::proxy::upstream::MAX_RESPONSE_HEAD_BYTES;
use crate::proxy::upstream::connector::UpstreamSocket;
use crate::proxy::upstream::read_limit::ReadAllowance;
use crate::proxy::upstream_error::{UpstreamError, UpstreamErrorKind, format_error_chain};

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
    let http2_connection = Rc::new(Http2Connection::new(sender, peer));
    let ping_monitor = connection
        .ping_pong()
        .map(|pings| PingMonitor::new(pings, read_activity));
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
    pub(crate) fn new(ping_pong: PingPong, read_activity: Arc<AtomicBool>) -> Self {
        Self {
            ping_pong,
            read_activity,
            pings_since_read: 0,
            quiet_since: Instant::now(),
            pong_deadline: None,
            timer: LazyTimer::default(),
        }
    }

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
