//! Byte stream of a client, with or without TLS, below HTTP and below TLS. It reports to the
//! connection's monitor, and lingers on shutdown.

use bytes::Bytes;
use http::StatusCode;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};
use tokio_util::either::Either;

use super::parse_error_reply::describe_parse_error;
use super::transport::{ClientTransport, socket_below_tls};
use crate::proxy::client_connection::connection_monitor::ConnectionMonitor;
use crate::proxy::client_connection::connection_output::{NEXT_TLS_WRITE_BYTES, NEXT_WRITE_BYTES};
use crate::proxy::connection_io::{LazyTimer, move_buffered_bytes, poll_write_all};
use crate::proxy::http::query_escaper::QueryEscaper;
use crate::proxy::http2_frames::frame_scanner::FrameScanner;
use crate::proxy::http2_frames::frame_splitter::return_window;

/// Maximum bytes discarded after a close. Unread bytes would make the kernel send a reset, which
/// can destroy the last response before the client reads it. After these bytes the client has to
/// wait for the close.
const MAX_LINGER_BYTES: usize = 16 * 1024 * 1024;

/// Maximum time to discard input after a close.
const MAX_LINGER_TIME: Duration = Duration::from_secs(2);

/// Time from the half-close of a client to the probe. A quick response needs no probe.
const PROBE_DELAY: Duration = Duration::from_millis(200);

/// Time without output after which a half-closed client that cannot be probed counts as
/// disconnected.
const HALF_CLOSE_GRACE: Duration = Duration::from_millis(500);

/// Minimum and maximum interval between checks of a half-closed connection for a reset. In between
/// it is half of the time without output: the machine of a disconnected client answers the probe at
/// once.
const RESET_CHECK_INTERVAL: Duration = Duration::from_millis(100);
const MAX_RESET_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Interval between checks whether a read may use memory again, and the maximum number of checks:
/// a connection may be slow to close.
const MEMORY_CHECK_INTERVAL: Duration = Duration::from_millis(10);
const MAX_MEMORY_CHECKS: u8 = 10;

/// Bytes of HTTP/2 field blocks in one read after which h2 accepts the requests before it reads on.
/// h2 otherwise decodes all heads that the client sends, up to 144 bytes for each byte.
const MIN_PAUSED_HEAD_BYTES: usize = 4 * 1024;

/// Size of reads that do not enlarge hyper's buffer: just below its initial size, because it doubles
/// when a read fills it. So read the first head after an idle time, and bodies that policies read.
const MAX_SMALL_READ_BYTES: usize = 8 * 1024 - 1;

/// Output without effect on an HTTP/1.1 client. The machine of a disconnected client answers with a
/// reset.
const PROBE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// GOAWAY with ENHANCE_YOUR_CALM: any stream may have been processed.
const GOAWAY_CALM: &[u8] = &[
    0, 0, 8, 7, 0, 0, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 11,
];

/// Client byte stream that records its state in a [`ConnectionMonitor`]. Reads first return the
/// bytes that were put back. Shutdown lingers: it discards input for a limited time.
pub(crate) struct MonitoredSocket {
    transport: ClientTransport,
    monitor: Rc<ConnectionMonitor>,
    read_ahead: Bytes,
    /// Set with the first bytes of HTTP/2. Boxed, because most connections are HTTP/1.
    frame_scanner: Option<Box<FrameScanner>>,
    max_head_bytes: usize,
    query_escaper: QueryEscaper,
    /// Input behind a request head, which hyper has not asked for yet.
    pipelined: Bytes,
    /// An error of the transport. hyper gets the input before it first, and the error with its next
    /// read.
    read_error: Option<io::Error>,
    /// Number of reads to be delayed: see [`MIN_PAUSED_HEAD_BYTES`].
    remaining_pauses: u32,
    /// Whether shutdown ends only the write direction.
    pub(super) is_half_close: bool,
    /// Whether both directions have ended. Further input is discarded: it must not be parsed as
    /// another request, nor be read as if it came from TLS.
    is_closed: bool,
    linger: Option<LingerState>,
    half_close: Option<HalfCloseState>,
    /// Progress of a read that waits until other connections have freed memory.
    memory_wait: Option<Pin<Box<dyn Future<Output = ()>>>>,
    /// Status of the response to input that is not a valid request. `None`: hyper's.
    pub(super) parse_error_status: Option<StatusCode>,
}

/// State of a client that ended its sending direction during an HTTP/1 request. The client may read
/// the response or have disconnected: the proxy cannot distinguish the two before it sends output.
struct HalfCloseState {
    /// Time of the half-close, or of the last output since.
    last_output_at: Instant,
    is_probed: bool,
    timer: LazyTimer,
}

/// Remaining limits of discarding input after a close.
struct LingerState {
    remaining_bytes: usize,
    timer: Pin<Box<Sleep>>,
}

impl MonitoredSocket {
    /// `max_head_bytes` is the limit of h2 for a list of fields.
    pub(crate) fn new(
        transport: ClientTransport,
        monitor: Rc<ConnectionMonitor>,
        max_head_bytes: usize,
    ) -> Self {
        Self {
            transport,
            monitor,
            read_ahead: Bytes::new(),
            frame_scanner: None,
            max_head_bytes,
            query_escaper: QueryEscaper::default(),
            pipelined: Bytes::new(),
            read_error: None,
            remaining_pauses: 0,
            is_half_close: false,
            is_closed: false,
            linger: None,
            half_close: None,
            memory_wait: None,
            parse_error_status: None,
        }
    }

    /// Puts back bytes, which the next reads return first.
    pub(crate) fn put_back(&mut self, bytes: &[u8]) {
        self.read_ahead = [bytes, &self.read_ahead].concat().into();
    }

    /// Waits until the client sends more bytes, which stay readable. Returns `false` if the client
    /// disconnected.
    pub(crate) fn poll_for_input(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        let mut bytes = [0; 512];
        let mut into = ReadBuf::new(&mut bytes);
        let is_open = ready!(Pin::new(&mut *self).poll_read(cx, &mut into)).is_ok();
        self.put_back(into.filled());
        if !into.filled().is_empty() {
            // Recorded here because reading bytes that were put back earlier records nothing.
            self.monitor.record_read(0);
        }
        Poll::Ready(is_open && !into.filled().is_empty())
    }

    /// Closes with a reset. The client cannot mistake a partial response for a complete one, and
    /// unsent output holds no memory. Unix sockets have no reset: their client reads an end of
    /// file.
    pub(crate) fn abort(mut self) {
        if let Either::Left(socket) = &socket_below_tls(&mut self.transport).stream
            && let Err(error) = socket.set_zero_linger()
        {
            tracing::debug!(%error, "failed to prepare a connection reset");
        }
    }

    /// Writes the queued informational heads before hyper's output.
    fn poll_write_informational_heads(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.monitor.output.has_queued() {
            return Poll::Ready(Ok(()));
        }
        let mut heads = self.monitor.output.pending_informational_heads();
        poll_write_all(&mut self.transport, cx, &mut heads)
    }

    /// Whether policies read the body of an HTTP/1 request.
    fn is_body_start_read(&self) -> bool {
        !self.monitor.is_http2.get() && self.monitor.memory.body_start_bytes.get() > 0
    }

    /// Waits while the memory budget is exceeded and other connections are being closed for it, for
    /// a limited time.
    fn poll_memory(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.memory_wait.is_none() && !self.monitor.is_budget_being_freed() {
            return Poll::Ready(());
        }
        let monitor = &self.monitor;
        let wait = self.memory_wait.get_or_insert_with(|| {
            let monitor = Rc::clone(monitor);
            Box::pin(async move {
                let mut checks = 0..MAX_MEMORY_CHECKS;
                while monitor.is_budget_being_freed() && checks.next().is_some() {
                    sleep(MEMORY_CHECK_INTERVAL).await;
                }
            })
        });
        ready!(wait.as_mut().poll(cx));
        self.memory_wait = None;
        Poll::Ready(())
    }

    /// Waits while a half-closed client may read the response. Ready with `Ok` if the client counts
    /// as disconnected, and with an error if the connection was reset.
    fn poll_half_closed(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let half_close = self.half_close.get_or_insert_with(|| HalfCloseState {
            last_output_at: Instant::now(),
            is_probed: false,
            timer: LazyTimer::default(),
        });
        loop {
            if let Some(error) = socket_below_tls(&mut self.transport).take_error()? {
                return Poll::Ready(Err(error));
            }
            let now = Instant::now();
            let silence = now.saturating_duration_since(half_close.last_output_at);
            let exchange = &self.monitor.exchange;
            if silence >= PROBE_DELAY && exchange.awaits_body.get() {
                return Poll::Ready(Ok(()));
            }
            let can_be_probed = !exchange.is_responding.get() && !exchange.is_close_delimited.get();
            if silence >= PROBE_DELAY && can_be_probed && !half_close.is_probed {
                half_close.is_probed = true;
                self.monitor.output.queue_informational_head(PROBE);
            }
            if silence >= HALF_CLOSE_GRACE && !can_be_probed {
                return Poll::Ready(Ok(()));
            }
            let wait = (silence / 2).clamp(RESET_CHECK_INTERVAL, MAX_RESET_CHECK_INTERVAL);
            ready!(half_close.timer.poll(now + wait, cx));
        }
    }

    /// Returns bytes that were read before or replace read ones. What does not fit counts as
    /// memory.
    fn read_from_buffer(&mut self, into: &mut ReadBuf<'_>) {
        move_buffered_bytes(&mut self.read_ahead, into);
        self.report_read_ahead();
    }

    fn report_read_ahead(&self) {
        let bytes = self.read_ahead.len() + self.pipelined.len();
        self.monitor.memory.read_ahead_bytes.set(bytes);
    }

    /// Sends GOAWAY to a client that has spent its credit, unless it does not read earlier output.
    /// h2 takes the result for the end of the input, and closes.
    fn end_flood(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.monitor.output.queue_informational_head(GOAWAY_CALM);
        let is_queued = !self.monitor.output.pending_informational_heads().is_empty();
        let is_sent = is_queued && self.poll_write_informational_heads(cx)?.is_ready();
        Poll::Ready(if is_sent {
            Ok(())
        } else {
            Err(io::ErrorKind::QuotaExceeded.into())
        })
    }

    /// Accounts for what was read of HTTP/1 after `before`, and escapes the query of a request
    /// line. Bytes after the first head wait until hyper has parsed it.
    fn follow_http1(&mut self, into: &mut ReadBuf<'_>, before: usize, is_pipelined: bool) {
        let received = into.filled().get(before..).unwrap_or_default();
        let parsed = self.monitor.parsed_input().filter(|parsed| {
            (parsed.is_idle || is_pipelined) && self.query_escaper.is_at_request_line(*parsed)
        });
        if parsed.is_some() {
            self.monitor.exchange.heads.set(0);
        }
        let length = self.query_escaper.follow(received, parsed.is_some());
        let (received, next) = received.split_at(length);
        self.monitor.record_read(received.len());
        if !next.is_empty() {
            self.pipelined = [next, &self.pipelined].concat().into();
            self.report_read_ahead();
        }
        let mut escaped = Vec::new();
        if self.query_escaper.scan(received, &mut escaped) {
            into.set_filled(before);
            self.read_ahead = escaped.into();
            self.read_from_buffer(into);
        } else {
            into.set_filled(before + length);
        }
    }

    /// If hyper responds to input that is not a valid request, queues a response that says so
    /// instead. The next flush writes it.
    fn queue_parse_error_reply(&self, output: &[u8]) -> bool {
        if self.monitor.is_http2.get() || self.monitor.output.may_be_within_response.get() {
            return false;
        }
        let Some(reply) = describe_parse_error(output, self.parse_error_status) else {
            return false;
        };
        self.monitor
            .output
            .queue_informational_head(reply.as_bytes());
        true
    }

    /// Discards input until the client closes or [`MAX_LINGER_TIME`] has passed, but no more than
    /// [`MAX_LINGER_BYTES`]. Waits only if unread input is expected.
    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let linger = self.linger.get_or_insert_with(|| LingerState {
            remaining_bytes: MAX_LINGER_BYTES,
            timer: Box::pin(sleep(MAX_LINGER_TIME)),
        });
        let has_unread_input = &self.monitor.exchange.has_unread_input;
        let mut scratch = [0; 8192];
        while linger.remaining_bytes > 0 {
            let mut into = ReadBuf::new(&mut scratch);
            match Pin::new(socket_below_tls(&mut self.transport)).poll_read(cx, &mut into) {
                Poll::Ready(Ok(())) if !into.filled().is_empty() => {
                    has_unread_input.set(true);
                    let discarded = into.filled().len();
                    linger.remaining_bytes = linger.remaining_bytes.saturating_sub(discarded);
                }
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending if !has_unread_input.get() => return Poll::Ready(()),
                Poll::Pending => break,
            }
        }
        linger.timer.as_mut().poll(cx)
    }

    /// Returns input that was kept back behind a head, or reads from the transport: `most` bytes at
    /// most, if there is such a limit.
    fn poll_read_transport(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
        most: Option<usize>,
    ) -> Poll<io::Result<()>> {
        if let Some(error) = self.read_error.take() {
            return Poll::Ready(Err(error));
        }
        ready!(self.poll_memory(cx));
        if self.remaining_pauses > 0 {
            self.remaining_pauses -= 1;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        loop {
            let before = into.filled().len();
            let is_pipelined = !self.pipelined.is_empty();
            if is_pipelined {
                move_buffered_bytes(&mut self.pipelined, into);
                self.report_read_ahead();
            } else if most.is_some() || self.is_body_start_read() {
                let room = most.unwrap_or(MAX_SMALL_READ_BYTES).min(into.remaining());
                let mut part = ReadBuf::new(into.initialize_unfilled_to(room));
                ready!(Pin::new(&mut self.transport).poll_read(cx, &mut part))?;
                let length = part.filled().len();
                into.advance(length);
            } else {
                ready!(Pin::new(&mut self.transport).poll_read(cx, into))?;
            }
            let received = into.filled().get(before..).unwrap_or_default();
            if received.is_empty() {
                let may_read_response = self.monitor.has_active_requests()
                    && !self.monitor.is_http2.get()
                    && !self.is_half_close;
                return if may_read_response && into.remaining() > 0 {
                    self.poll_half_closed(cx)
                } else {
                    Poll::Ready(Ok(()))
                };
            }
            // TLS has read its input, up to a part of a record.
            self.monitor.memory.tls_input_bytes.set(0);
            if !self.monitor.is_http2.get() {
                self.follow_http1(into, before, is_pipelined);
                return Poll::Ready(Ok(()));
            }
            self.monitor.record_read(received.len());
            let max_head_bytes = self.max_head_bytes;
            let new_scanner = || Box::new(FrameScanner::new(max_head_bytes));
            let scanner = self.frame_scanner.get_or_insert_with(new_scanner);
            let mut replacement = Vec::new();
            let scan = scanner.scan(received, &mut replacement)?;
            self.monitor.record_scan(&scan);
            if self.monitor.frame_budget.is_exhausted.get() {
                into.set_filled(before);
                return self.end_flood(cx);
            }
            if scan.head_bytes >= MIN_PAUSED_HEAD_BYTES {
                self.remaining_pauses = scan.heads;
            }
            if !scan.is_rewritten {
                return Poll::Ready(Ok(()));
            }
            into.set_filled(before);
            if !replacement.is_empty() {
                self.read_ahead = replacement.into();
                self.read_from_buffer(into);
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl AsyncRead for MonitoredSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.is_closed {
            return Poll::Ready(Ok(()));
        }
        if this.read_ahead.is_empty() {
            return this.poll_read_transport(cx, into, None);
        }
        this.read_from_buffer(into);
        // hyper doubles its buffer when it has read only a part of a head.
        let is_part = this.read_ahead.is_empty() && this.query_escaper.is_within_head();
        let most = MAX_SMALL_READ_BYTES.saturating_sub(into.filled().len());
        if is_part
            && most.min(into.remaining()) > 0
            && !this.monitor.is_http2.get()
            && let Poll::Ready(Err(error)) = this.poll_read_transport(cx, into, Some(most))
        {
            this.read_error = Some(error);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for MonitoredSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[io::IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_write_informational_heads(cx))?;
        if let [head] = bytes
            && this.queue_parse_error_reply(head)
        {
            return Poll::Ready(Ok(head.len()));
        }
        this.monitor.set_flushed(false);
        this.monitor
            .output
            .collectable_bytes
            .set(match this.transport {
                Either::Left(_) => NEXT_WRITE_BYTES,
                Either::Right(_) => NEXT_TLS_WRITE_BYTES,
            });
        if let Some(half_close) = &mut this.half_close {
            half_close.last_output_at = Instant::now();
        }
        Pin::new(&mut this.transport).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.transport.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.monitor.set_flushed(true);
        let mut scanner = this.frame_scanner.iter();
        let has_hidden = scanner.any(|scanner| !scanner.hidden_padding.is_empty());
        if has_hidden || this.monitor.output.has_queued() {
            // Twice, because what was added up while earlier output waited follows it.
            for _ in 0..2 {
                if let Some(scanner) = &mut this.frame_scanner {
                    let mut heads = this.monitor.output.pending_informational_heads();
                    return_window(&mut scanner.hidden_padding, &mut heads);
                }
                ready!(this.poll_write_informational_heads(cx))?;
            }
        }
        Pin::new(&mut this.transport).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.is_closed |= !this.is_half_close;
        if this.linger.is_none() {
            ready!(Pin::new(&mut this.transport).poll_shutdown(cx))?;
        }
        if this.is_half_close {
            return Poll::Ready(Ok(()));
        }
        this.poll_linger(cx).map(Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::MonitoredSocket;
    use crate::proxy::client_connection::connection_monitor::{
        ConnectionMonitor, ConnectionTimeouts,
    };
    use crate::proxy::client_connection::open_connections::OpenConnections;
    use crate::proxy::client_connection::open_connections::tests::add_connection;
    use crate::proxy::server::transport::SocketBelowTls;
    use std::future::poll_fn;
    use std::pin::Pin;
    use std::rc::Rc;
    use std::sync::Arc;
    use std::task::Poll;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
    use tokio::net::UnixStream;
    use tokio_util::either::Either;

    const TIMEOUTS: ConnectionTimeouts = ConnectionTimeouts {
        idle: Duration::from_secs(75),
        request_head: Duration::from_secs(10),
        write_stall: Duration::from_secs(30),
    };

    #[tokio::test]
    async fn informational_heads_are_written_between_responses() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let connections = OpenConnections::new(1);
        let connection = Arc::clone(&add_connection(&connections, 0).connection);
        let monitor = ConnectionMonitor::new(TIMEOUTS, None, connection, connections);
        let raw = SocketBelowTls::new(Either::Right(ours), Rc::clone(&monitor));
        let mut socket = MonitoredSocket::new(Either::Left(raw), Rc::clone(&monitor), 0);
        monitor.output.queue_informational_head(b"<1>");
        socket.flush().await.unwrap();
        monitor.output.queue_informational_head(b"<2>");
        let mut sent = 0;
        // Fills the socket buffer, so that the rest of the response has to wait.
        poll_fn(|cx| {
            while let Poll::Ready(written) = Pin::new(&mut socket).poll_write(cx, &[b'a'; 4096]) {
                sent += written.unwrap();
            }
            Poll::Ready(())
        })
        .await;
        monitor.output.queue_informational_head(b"<dropped>");
        let mut got = vec![0; 6 + sent];
        theirs.read_exact(&mut got).await.unwrap();
        socket.write_all(b"end").await.unwrap();
        monitor.output.queue_informational_head(b"<dropped>");
        socket.flush().await.unwrap();
        monitor.output.queue_informational_head(b"<3>");
        socket.write_all(b"next").await.unwrap();
        drop(socket);
        theirs.read_to_end(&mut got).await.unwrap();
        let text = String::from_utf8(got).unwrap();
        assert_eq!(text, format!("<1><2>{}end<3>next", "a".repeat(sent)));
    }

    #[tokio::test]
    async fn input_after_shutdown_is_not_read() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let connections = OpenConnections::new(1);
        let connection = Arc::clone(&add_connection(&connections, 0).connection);
        let monitor = ConnectionMonitor::new(TIMEOUTS, None, connection, connections);
        let raw = SocketBelowTls::new(Either::Right(ours), Rc::clone(&monitor));
        let mut socket = MonitoredSocket::new(Either::Left(raw), Rc::clone(&monitor), 0);
        socket.put_back(b"read too early");
        monitor.exchange.has_unread_input.set(true);
        let lingers =
            poll_fn(|cx| Poll::Ready(Pin::new(&mut socket).poll_shutdown(cx).is_pending())).await;
        assert!(lingers);
        theirs.write_all(b"GET / HTTP/1.1").await.unwrap();
        assert_eq!(socket.read(&mut [0; 32]).await.unwrap(), 0);
        assert!(!poll_fn(|cx| socket.poll_for_input(cx)).await);
    }
}
