//! State and deadlines of a client connection.
//!
//! hyper has only one timeout, which cuts idle connections as well. Instead, the socket and the
//! requests of a connection record their state in a [`ConnectionMonitor`], from which the driving
//! task reads the next deadline. The state consists of cells on one thread: the request path never
//! touches a timer.

mod active_request;

pub(crate) use active_request::ActiveRequestGuard;

use std::cell::Cell;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::ConnectionCloseReason;
use super::connection_memory::ConnectionMemory;
use super::connection_output::{ConnectionOutput, FIRST_WRITE_BYTES};
use super::open_connections::{OpenConnection, OpenConnections};
use crate::proxy::http::query_escaper::ParsedInput;
use crate::proxy::http2_frames::frame_limits::FrameBudget;
use crate::proxy::http2_frames::frame_scanner::FrameScan;
use crate::telemetry::metrics::WorkerMetrics;

/// Time limit for a client without requests to close its end after the connection was asked to
/// close.
const CLIENT_CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Idle time after which a connection releases its request buffers. Allocating the buffers again
/// costs about 2 µs, little for a client with less than ten requests per second.
pub(crate) const BUFFER_RELEASE_DELAY: Duration = Duration::from_millis(100);

/// Timeouts of a client connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionTimeouts {
    /// Time limit for a connection without a request.
    pub(crate) idle: Duration,
    /// Time limit from the first byte of a request to the end of its head.
    pub(crate) request_head: Duration,
    /// Time limit for a client that reads none of the pending output.
    pub(crate) write_stall: Duration,
}

/// Kind of a connection timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TimeoutKind {
    /// No request arrived for a short time: the connection stays open but releases its request
    /// buffers.
    IdleBuffers,
    /// No request arrived for too long: the connection closes gracefully.
    Idle,
    /// The request head is not complete in time.
    SlowHead,
    /// The client does not read, or does not close its end.
    Stalled,
    /// The client grants no window for the rest of a complete HTTP/2 response: the connection
    /// closes gracefully, and after the same time by force.
    UnsentResponse,
    /// The connection is older than `max_connection_age`: its next response is the last one.
    Age,
    /// The connection was asked to close early and does not end by itself.
    CloseRequested,
}

/// What a stream of a response waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamProgress {
    /// The next part of the response is not available yet.
    AwaitsUpstream,
    /// A part was passed to hyper.
    AwaitsClient,
}

/// State of one connection, from which its next deadline follows.
#[derive(Debug)]
pub(crate) struct ConnectionMonitor {
    pub(crate) timeouts: ConnectionTimeouts,
    phase: Cell<ConnectionPhase>,
    /// Requests with an unfinished handler, request body or response body.
    active_requests: Cell<usize>,
    /// Start of an incomplete HTTP/2 field block: the head or the trailers of a request.
    field_block_since: Cell<Option<Instant>>,
    closing_since: Cell<Option<Instant>>,
    pub(crate) is_http2: Cell<bool>,
    /// Whether the connection holds buffers that it can release when it is idle.
    pub(crate) has_buffers: Cell<bool>,
    pub(crate) exchange: ExchangeState,
    /// Last progress of a stream, until the driving task takes it.
    pub(crate) stream_progress: Cell<Option<StreamProgress>>,
    pub(crate) drain: DrainState,
    /// Credit of an HTTP/2 client for costly frames.
    pub(crate) frame_budget: FrameBudget,
    metrics: Option<Arc<WorkerMetrics>>,
    pub(crate) output: ConnectionOutput,
    /// Whether an HTTP/2 request head had a mark.
    pub(crate) has_head_marks: Cell<bool>,
    /// The connection, as other threads see it.
    pub(crate) connection: Arc<OpenConnection>,
    pub(crate) memory: ConnectionMemory,
    pub(crate) connections: Arc<OpenConnections>,
}

/// How a draining connection ends. Its next response is the last one; HTTP/2 clients are told by
/// GOAWAY.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionDrain {
    /// Time before which a connection without requests stays open.
    pub(crate) closes_from: Instant,
    /// Time for one more request from the start of the connection's drain. Closing an idle
    /// connection earlier would lose a request that is on its way.
    pub(crate) request_delay: Duration,
    /// Time from which WebSockets are closed with 1001, "going away" (RFC 6455, 7.4.1). `None`:
    /// they stay open.
    pub(crate) websockets_close_at: Option<Instant>,
}

/// Progress of a connection's drain.
#[derive(Debug, Default)]
pub(crate) struct DrainState {
    /// The last request of [`ConnectionMonitor::request_drain`]: the next response is the last one.
    pub(crate) requested: Cell<Option<ConnectionDrain>>,
    /// Whether the driving task has not seen the request.
    pub(crate) is_new: Cell<bool>,
    /// End of `max_connection_age`, until the drain that it causes.
    pub(crate) age_ends_at: Cell<Option<Instant>>,
    websocket_close_signal: Notify,
}

/// State of the active HTTP/1 request and its response.
#[derive(Debug, Default)]
pub(crate) struct ExchangeState {
    /// Whether the client sends input that will not be read.
    pub(crate) has_unread_input: Cell<bool>,
    /// Whether the rest of the request's body is still expected.
    pub(crate) awaits_body: Cell<bool>,
    /// Whether the response has begun.
    pub(crate) is_responding: Cell<bool>,
    /// Whether the client may take the end of the connection as the end of the response (HTTP/1.0).
    pub(crate) is_close_delimited: Cell<bool>,
    /// Received bytes of the request's body.
    pub(crate) body_bytes: Cell<u64>,
    /// Heads since the last request line that was found in the input.
    pub(crate) heads: Cell<u32>,
}

impl ExchangeState {
    fn reset(&self) {
        self.has_unread_input.set(false);
        self.awaits_body.set(false);
        self.is_responding.set(false);
        self.is_close_delimited.set(false);
        self.body_bytes.set(0);
        self.heads.update(|value| value.saturating_add(1));
    }
}

/// Phase of a connection without active requests.
#[derive(Clone, Copy, Debug)]
enum ConnectionPhase {
    Idle(Instant),
    RequestHead(Instant),
}

impl ConnectionMonitor {
    /// `metrics` counts the connections that the server closes.
    pub(crate) fn new(
        timeouts: ConnectionTimeouts,
        metrics: Option<Arc<WorkerMetrics>>,
        connection: Arc<OpenConnection>,
        connections: Arc<OpenConnections>,
    ) -> Rc<Self> {
        let now = Instant::now();
        Rc::new(Self {
            timeouts,
            phase: Cell::new(ConnectionPhase::Idle(now)),
            active_requests: Cell::new(0),
            field_block_since: Cell::new(None),
            closing_since: Cell::new(None),
            is_http2: Cell::new(false),
            has_buffers: Cell::new(false),
            exchange: ExchangeState::default(),
            stream_progress: Cell::new(None),
            drain: DrainState::default(),
            frame_budget: FrameBudget::new(now),
            metrics,
            output: ConnectionOutput::new(Arc::clone(&connection)),
            has_head_marks: Cell::new(false),
            memory: ConnectionMemory::default(),
            connection,
            connections,
        })
    }

    /// Reports the connection's memory to the budget, if it has changed and the connection stays
    /// open.
    pub(crate) fn report_memory(&self) {
        let (is_http2, has_buffers) = (self.is_http2.get(), self.has_buffers.get());
        let is_blocked = self.output.is_blocked();
        let held = self.memory.held_bytes(is_http2, has_buffers, is_blocked);
        if held != self.connection.memory_bytes() && !self.connection.is_closed_for_memory() {
            self.connections.set_memory(&self.connection, held);
        }
    }

    /// Whether the budget is exceeded while connections are being closed for it, and the connection
    /// has to wait.
    pub(crate) fn is_budget_being_freed(&self) -> bool {
        self.connections.is_memory_being_freed() && !self.connection.is_unclosable()
    }

    /// Registers a request as active until all clones of the returned guard are dropped.
    pub(crate) fn begin_request(self: &Rc<Self>) -> ActiveRequestGuard {
        if self.active_requests.get() == 0 || !self.is_http2.get() {
            self.exchange.reset();
            self.connection.set_busy();
        }
        self.output.may_be_within_response.set(true);
        self.output.collectable_bytes.set(FIRST_WRITE_BYTES);
        self.active_requests.update(|value| value + 1);
        ActiveRequestGuard(Rc::clone(self))
    }

    /// Whether any request is active.
    pub(crate) fn has_active_requests(&self) -> bool {
        self.active_requests.get() > 0
    }

    /// Whether the head of an HTTP/1 response was passed on, and its end was not.
    pub(crate) fn is_within_http1_response(&self) -> bool {
        self.exchange.is_responding.get() && self.has_active_requests() && !self.is_http2.get()
    }

    /// Records the end of the handshake, which starts the idle timeout.
    pub(crate) fn record_handshake_end(&self) {
        self.memory.tls_input_bytes.set(0);
        self.phase.set(ConnectionPhase::Idle(Instant::now()));
    }

    /// Records that the connection is HTTP/2: received bytes are frames and do not begin a request
    /// head.
    pub(crate) fn set_http2(&self) {
        self.is_http2.set(true);
        self.phase.set(ConnectionPhase::Idle(Instant::now()));
    }

    /// Counts a connection or stream that the server closed, if it has a reason.
    pub(crate) fn record_close(&self, reason: impl Into<Option<ConnectionCloseReason>>) {
        if let (Some(counts), Some(reason)) = (&self.metrics, reason.into()) {
            counts.close_reasons.increment(reason as usize);
        }
    }

    /// Logs and counts a connection that is cut after a timeout.
    pub(crate) fn record_timeout(&self, overdue: TimeoutKind) {
        tracing::debug!(?overdue, "client connection timed out");
        self.record_close(match overdue {
            TimeoutKind::SlowHead => Some(ConnectionCloseReason::HeaderTimeout),
            // The reason was recorded before.
            TimeoutKind::CloseRequested => None,
            // Idle connections are closed gracefully first.
            _ => Some(ConnectionCloseReason::SlowRead),
        });
    }

    /// Takes the request to close. A connection with requests, or with responses that the client
    /// has not read, closes only to free memory.
    pub(crate) fn take_close_request(&self) -> Option<ConnectionCloseReason> {
        if self.connection.is_closed_for_memory() {
            return Some(ConnectionCloseReason::Memory);
        }
        let is_closed = self.connection.take_idle_close_request() && self.is_idle();
        is_closed.then_some(ConnectionCloseReason::ConnectionLimit)
    }

    /// Whether the connection has neither requests nor responses that the client has not read.
    fn is_idle(&self) -> bool {
        !self.has_active_requests()
            && !self.output.is_blocked()
            && self.output.unsent_responses.is_empty()
    }

    /// Updates what the acceptor knows: it closes a connection that is idle for a new one.
    pub(crate) fn update_activity(&self) {
        let is_idle = self.is_idle();
        if is_idle != self.connection.idle_since_ms().is_some() {
            if is_idle {
                self.connection.set_idle(Instant::now());
            } else {
                self.connection.set_busy();
            }
        }
    }

    /// Waits for a request to close, before the connection has a driver. Reports the memory each
    /// time the task is woken.
    pub(crate) async fn wait_for_close_request(&self) -> ConnectionCloseReason {
        poll_fn(|cx| {
            self.report_memory();
            self.connection.driver.register(cx.waker());
            self.take_close_request().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Records that the connection was asked to close.
    pub(crate) fn set_closing(&self) {
        self.closing_since
            .set(Some(self.closing_since.get().unwrap_or_else(Instant::now)));
    }

    /// Sets whether hyper has written and flushed all its output.
    pub(crate) fn set_flushed(&self, is_flushed: bool) {
        self.output.has_unflushed.set(!is_flushed);
        if is_flushed && !self.has_active_requests() {
            self.output.may_be_within_response.set(false);
        }
    }

    /// Input of an HTTP/1 connection that hyper has parsed. `None` if the next bytes belong to a
    /// body, or are not read.
    pub(crate) fn parsed_input(&self) -> Option<ParsedInput> {
        let exchange = &self.exchange;
        let is_within_body = exchange.awaits_body.get() || exchange.has_unread_input.get();
        (!is_within_body).then(|| ParsedInput {
            heads: exchange.heads.get(),
            body_bytes: exchange.body_bytes.get(),
            is_idle: self.active_requests.get() == 0,
        })
    }

    /// Records received bytes, which may belong to a request head.
    pub(crate) fn record_read(&self, bytes: usize) {
        if self.active_requests.get() == 0 && !self.is_http2.get() {
            self.memory.add_head_bytes(bytes);
            if matches!(self.phase.get(), ConnectionPhase::Idle(_)) {
                self.phase.set(ConnectionPhase::RequestHead(Instant::now()));
            }
        }
    }

    /// Records what the frame scanner found. More frames of the same field block do not extend its
    /// deadline.
    pub(crate) fn record_scan(&self, scan: &FrameScan) {
        self.charge_frames(scan);
        if scan.has_head_mark {
            self.has_head_marks.set(true);
        }
        if let Some(bytes) = scan.table_bytes {
            self.output.continue_queue.set_table_bytes(bytes);
        }
        self.memory.record_scan(scan);
        let is_incomplete = scan.is_within_field_block;
        if is_incomplete != self.field_block_since.get().is_some() {
            self.field_block_since.set(is_incomplete.then(Instant::now));
        }
    }

    /// Spends credit for received frames. A frame for which h2 visits every stream costs as much as
    /// one frame per stream. The operator's proxies carry many clients: the DATA of one costs them
    /// nothing.
    fn charge_frames(&self, scan: &FrameScan) {
        let mut frames = scan.costly_frames;
        if scan.excess_data_frames > 0 && !self.connection.is_from_trusted_proxy() {
            frames = frames.saturating_add(scan.excess_data_frames);
        }
        if scan.connection_wide_frames > 0 {
            let streams = self.memory.streams.get() + self.output.unsent_responses.len();
            let streams = u32::try_from(streams).unwrap_or(u32::MAX);
            frames = frames.saturating_add(scan.connection_wide_frames.saturating_mul(streams));
        }
        self.frame_budget.charge_frames(frames);
    }

    pub(crate) fn record_response_start(&self) {
        self.frame_budget.credit_response();
        self.exchange.is_responding.set(true);
        self.output.continue_queue.keep_present_table_size();
    }

    /// Asks the connection to close gracefully once its current work is finished.
    pub(crate) fn request_drain(&self, drain: ConnectionDrain) {
        let state = &self.drain;
        state.age_ends_at.set(None);
        state.requested.set(Some(drain));
        state.is_new.set(true);
        if drain.websockets_close_at.is_some() {
            state.websocket_close_signal.notify_waiters();
        }
        self.connection.driver.wake();
    }

    /// Waits for the time at which a WebSocket must close because the server shuts down.
    pub(crate) async fn wait_for_websocket_close(&self) {
        let signal = self.drain.websocket_close_signal.notified();
        let close_at = || self.drain.requested.get()?.websockets_close_at;
        if close_at().is_none() {
            signal.await;
        }
        if let Some(at) = close_at() {
            sleep_until(at).await;
        }
    }

    /// Sets the time after which the connection drains.
    pub(crate) fn set_age_limit(&self, limit: Option<Duration>) {
        let ends_at = limit.map(|limit| Instant::now() + limit);
        self.drain.age_ends_at.set(ends_at);
    }

    /// Starts the drain of a connection that is too old. Without a request it stays open until its
    /// idle timeout.
    pub(crate) fn drain_for_age(&self) {
        self.request_drain(ConnectionDrain {
            closes_from: Instant::now() + self.timeouts.idle,
            request_delay: Duration::ZERO,
            websockets_close_at: None,
        });
    }

    /// Next deadline and the timeout that expires then.
    pub(crate) fn next_deadline(&self) -> Option<(Instant, TimeoutKind)> {
        let ConnectionTimeouts {
            idle,
            request_head,
            write_stall,
        } = self.timeouts;
        let closing_since = self.closing_since.get();
        // A connection with a blocked write or an incomplete field block is not idle, whatever its
        // requests do.
        let stalled = self.output.blocked_since.get();
        let stalled = stalled.map(|since| (since + write_stall, TimeoutKind::Stalled));
        let slow_block = self.field_block_since.get();
        let slow_block = slow_block.map(|since| (since + request_head, TimeoutKind::SlowHead));
        // The client may read the rest of a response, also while the connection closes.
        let responses = &self.output.unsent_responses;
        let unsent = || {
            let kind = match closing_since {
                Some(_) => TimeoutKind::Stalled,
                None => TimeoutKind::UnsentResponse,
            };
            responses.deadline(write_stall).map(|at| (at, kind))
        };
        let next = stalled
            .into_iter()
            .chain(slow_block)
            .min_by_key(|(at, _)| *at);
        let next = next.or_else(unsent);
        if next.is_some() || self.has_active_requests() {
            return next;
        }
        Some(match (self.phase.get(), closing_since) {
            (ConnectionPhase::RequestHead(since), _) => {
                (since + request_head, TimeoutKind::SlowHead)
            }
            (ConnectionPhase::Idle(since), None)
                if self.has_buffers.get() && idle > BUFFER_RELEASE_DELAY =>
            {
                (since + BUFFER_RELEASE_DELAY, TimeoutKind::IdleBuffers)
            }
            (ConnectionPhase::Idle(since), None) => (since + idle, TimeoutKind::Idle),
            // A connection that was asked to close and has no requests gives the client a short
            // time to close.
            (ConnectionPhase::Idle(since), Some(closing_since)) => {
                let emptied_at = responses.emptied_at.get().unwrap_or(since);
                let since = closing_since.max(since).max(emptied_at);
                (since + CLIENT_CLOSE_TIMEOUT, TimeoutKind::Stalled)
            }
        })
    }
}

impl Drop for ConnectionMonitor {
    fn drop(&mut self) {
        self.connections.remove_memory(&self.connection);
    }
}

#[cfg(test)]
mod tests {
    use super::{
        BUFFER_RELEASE_DELAY, ConnectionCloseReason, ConnectionMonitor, ConnectionTimeouts,
        FrameScan, TimeoutKind,
    };
    use crate::proxy::client_connection::connection_output::StreamOutput;
    use crate::proxy::client_connection::open_connections::OpenConnections;
    use crate::proxy::client_connection::open_connections::tests::add_connection;
    use std::rc::Rc;
    use std::sync::Arc;
    use std::task::Poll;
    use std::time::Duration;
    use tokio::time::{Instant, advance};

    const TIMEOUTS: ConnectionTimeouts = ConnectionTimeouts {
        idle: Duration::from_secs(75),
        request_head: Duration::from_secs(10),
        write_stall: Duration::from_secs(30),
    };

    fn new_monitor(timeouts: ConnectionTimeouts) -> Rc<ConnectionMonitor> {
        let connections = OpenConnections::new(1);
        let connection = Arc::clone(&add_connection(&connections, 0).connection);
        ConnectionMonitor::new(timeouts, None, connection, connections)
    }

    /// Frames that end within a field block, of which these bytes have arrived.
    fn scan_of(is_within_field_block: bool, field_block_bytes: usize) -> FrameScan {
        FrameScan {
            is_within_field_block,
            field_block_bytes,
            ..FrameScan::default()
        }
    }

    fn seconds_to_next_deadline(monitor: &ConnectionMonitor) -> Option<(u64, TimeoutKind)> {
        monitor
            .next_deadline()
            .map(|(at, kind)| ((at - Instant::now()).as_secs(), kind))
    }

    #[tokio::test(start_paused = true)]
    async fn each_phase_has_its_own_deadline() {
        let monitor = new_monitor(TIMEOUTS);
        assert_eq!(
            seconds_to_next_deadline(&monitor),
            Some((75, TimeoutKind::Idle))
        );
        advance(Duration::from_secs(5)).await;
        monitor.record_read(10);
        assert_eq!(
            seconds_to_next_deadline(&monitor),
            Some((10, TimeoutKind::SlowHead))
        );
        advance(Duration::from_secs(4)).await;
        monitor.record_read(10);
        assert_eq!(
            seconds_to_next_deadline(&monitor),
            Some((6, TimeoutKind::SlowHead)),
            "more bytes do not extend the deadline"
        );
        let request = monitor.begin_request();
        assert_eq!(seconds_to_next_deadline(&monitor), None);
        let body = request.clone();
        drop(request);
        assert_eq!(
            seconds_to_next_deadline(&monitor),
            None,
            "a body keeps its request active"
        );
        drop(body);
        assert_eq!(
            seconds_to_next_deadline(&monitor),
            Some((75, TimeoutKind::Idle))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_connection_releases_its_buffers_before_its_timeout() {
        let monitor = new_monitor(TIMEOUTS);
        monitor.has_buffers.set(true);
        assert_eq!(
            monitor.next_deadline(),
            Some((
                Instant::now() + BUFFER_RELEASE_DELAY,
                TimeoutKind::IdleBuffers
            ))
        );
        let request = monitor.begin_request();
        assert_eq!(seconds_to_next_deadline(&monitor), None);
        drop(request);
        monitor.set_closing();
        assert_eq!(
            seconds_to_next_deadline(&monitor),
            Some((2, TimeoutKind::Stalled)),
            "a closing connection does not release its buffers"
        );
        let short_idle = new_monitor(ConnectionTimeouts {
            idle: BUFFER_RELEASE_DELAY,
            ..TIMEOUTS
        });
        short_idle.has_buffers.set(true);
        assert_eq!(
            short_idle.next_deadline(),
            Some((Instant::now() + BUFFER_RELEASE_DELAY, TimeoutKind::Idle))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_blocked_write_has_a_deadline_in_any_phase() {
        let monitor = new_monitor(TIMEOUTS);
        let request = monitor.begin_request();
        monitor
            .output
            .record_write_result(&Poll::<std::io::Result<()>>::Pending);
        advance(Duration::from_secs(10)).await;
        monitor
            .output
            .record_write_result(&Poll::<std::io::Result<()>>::Pending);
        assert_eq!(
            seconds_to_next_deadline(&monitor),
            Some((20, TimeoutKind::Stalled))
        );
        drop(request);
        assert_eq!(
            seconds_to_next_deadline(&monitor),
            Some((20, TimeoutKind::Stalled))
        );
        monitor.output.record_write_result(&Poll::Ready(Ok(1)));
        assert_eq!(
            seconds_to_next_deadline(&monitor),
            Some((75, TimeoutKind::Idle))
        );
    }

    /// In HTTP/1, guards of the previous request may still live when a request begins.
    #[tokio::test(start_paused = true)]
    async fn a_request_that_begins_before_the_last_guard_is_dropped_starts_anew() {
        let monitor = new_monitor(TIMEOUTS);
        let first = monitor.begin_request();
        monitor.exchange.is_responding.set(true);
        let body = first.clone();
        drop(first);
        assert!(monitor.exchange.is_responding.get());
        let second = monitor.begin_request();
        assert!(!monitor.exchange.is_responding.get());
        monitor.exchange.is_responding.set(true);
        drop(body);
        assert!(monitor.has_active_requests());
        drop(second.clone());
        assert!(monitor.exchange.is_responding.get());
    }

    #[tokio::test(start_paused = true)]
    async fn an_incomplete_field_block_has_a_deadline_beside_active_requests() {
        let monitor = new_monitor(TIMEOUTS);
        monitor.set_http2();
        let _request = monitor.begin_request();
        monitor.record_scan(&scan_of(true, 9));
        advance(Duration::from_secs(4)).await;
        monitor.record_scan(&scan_of(true, 9));
        assert_eq!(
            seconds_to_next_deadline(&monitor),
            Some((6, TimeoutKind::SlowHead))
        );
        monitor
            .output
            .record_write_result(&Poll::<std::io::Result<()>>::Pending);
        assert_eq!(
            seconds_to_next_deadline(&monitor),
            Some((6, TimeoutKind::SlowHead)),
            "a client that does not read gains no time"
        );
        monitor.output.record_write_result(&Poll::Ready(Ok(1)));
        monitor.record_scan(&scan_of(false, 0));
        assert_eq!(seconds_to_next_deadline(&monitor), None);
    }

    #[tokio::test]
    async fn a_close_for_memory_is_not_replaced() {
        let monitor = new_monitor(TIMEOUTS);
        let _request = monitor.begin_request();
        monitor.connection.close_if_idle();
        assert_eq!(monitor.take_close_request(), None);
        assert!(monitor.connection.close_for_memory(1));
        monitor.connection.close_if_idle();
        let closed = Some(ConnectionCloseReason::Memory);
        assert_eq!(monitor.take_close_request(), closed);
    }

    #[tokio::test]
    async fn heads_and_unread_bodies_count_until_their_requests_end() {
        let monitor = new_monitor(TIMEOUTS);
        monitor.has_buffers.set(true);
        let kib = || {
            monitor.report_memory();
            monitor.connection.memory_bytes() / 1024
        };
        monitor.record_read(60 * 1024);
        assert_eq!(kib(), 80);
        let request = monitor.begin_request();
        let head = monitor.memory.begin_head(false, 0);
        assert_eq!(kib(), 80, "the request holds its head");
        monitor.memory.end_head(head);
        drop(request);
        assert_eq!(kib(), 20);
        monitor.set_http2();
        monitor.record_scan(&scan_of(true, 40 * 1024));
        assert_eq!(kib(), 60 + 288, "decoded fields count");
        monitor.record_scan(&scan_of(false, 0));
        let request = monitor.begin_request();
        let _body = request.clone();
        let head = monitor.memory.begin_head(true, 0);
        assert_eq!(kib(), 68, "a request with a body is one stream");
        monitor.memory.end_head(head);
        let _stream = monitor.memory.begin_head(true, 0);
        monitor.memory.begin_http2_body();
        for _ in 0..100 {
            monitor.memory.add_unread_frames(100 * 1024, 100 * 1024);
        }
        assert_eq!(kib(), 28 + 256 * 257, "frames of one byte fill the window");
        monitor.memory.end_http2_body();
        monitor.memory.begin_http2_body();
        assert_eq!(kib(), 28);
    }

    #[tokio::test(start_paused = true)]
    async fn http2_frames_start_no_head_timeout_and_closing_has_a_deadline() {
        let monitor = new_monitor(TIMEOUTS);
        monitor.set_http2();
        monitor.record_read(10);
        assert_eq!(
            seconds_to_next_deadline(&monitor),
            Some((75, TimeoutKind::Idle))
        );
        monitor.set_closing();
        assert_eq!(
            seconds_to_next_deadline(&monitor),
            Some((2, TimeoutKind::Stalled))
        );
    }

    /// A client that reads slowly may read the rest of its response.
    #[tokio::test(start_paused = true)]
    async fn a_closing_connection_waits_for_unsent_responses() {
        let monitor = new_monitor(TIMEOUTS);
        monitor.set_http2();
        let unsent = StreamOutput::new(&monitor.output.unsent_responses).begin_chunk();
        monitor.set_closing();
        assert_eq!(
            seconds_to_next_deadline(&monitor),
            Some((30, TimeoutKind::Stalled))
        );
        advance(Duration::from_secs(20)).await;
        assert_eq!(
            seconds_to_next_deadline(&monitor),
            Some((10, TimeoutKind::Stalled))
        );
        drop(unsent);
        assert_eq!(
            seconds_to_next_deadline(&monitor),
            Some((2, TimeoutKind::Stalled))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_is_not_closed_for_a_new_connection() {
        let monitor = new_monitor(TIMEOUTS);
        let is_kept = || {
            monitor.update_activity();
            monitor.connection.close_if_idle();
            let is_kept = monitor.take_close_request().is_none();
            assert_eq!(monitor.connection.idle_since_ms().is_none(), is_kept);
            is_kept
        };
        assert!(!is_kept());
        let unsent = StreamOutput::new(&monitor.output.unsent_responses).begin_chunk();
        assert!(is_kept());
        drop(unsent);
        assert!(!is_kept());
        monitor
            .output
            .record_write_result(&Poll::<std::io::Result<()>>::Pending);
        assert!(is_kept());
        monitor.output.record_write_result(&Poll::Ready(Ok(1)));
        assert!(!is_kept());
        monitor
            .output
            .record_write_result(&Poll::<std::io::Result<()>>::Pending);
        assert!(monitor.connection.close_for_memory(1));
        assert!(monitor.take_close_request().is_some());
    }
}
