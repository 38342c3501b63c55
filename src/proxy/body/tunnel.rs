//! Copies bytes in both directions after a protocol switch, until both sides close, one fails or a
//! timeout elapses.
//!
//! Each chunk is written before the next is read, so the slower side sets the pace. A tunnel
//! without traffic holds no buffer.

use bytes::{Buf, Bytes};
use std::fmt::Debug;
use std::future::poll_fn;
use std::io;
use std::mem::{MaybeUninit, take};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use crate::enforcer::ConcurrencySlotGuard;
use crate::proxy::client_connection::connection_monitor::ConnectionMonitor;
use crate::proxy::connection_io::LazyTimer;

/// Maximum bytes buffered per direction of a tunnel.
const MAX_CHUNK_BYTES: usize = 16 * 1024;

/// The upstream side of a tunnel: an HTTP/1.1 connection or an HTTP/2 stream.
pub(crate) trait TunnelUpstream: AsyncRead + AsyncWrite + Debug + Unpin {}

impl<T: AsyncRead + AsyncWrite + Debug + Unpin> TunnelUpstream for T {}

/// An upstream connection or stream after a protocol switch. Dropping the tunnel closes it.
#[derive(Debug)]
pub struct Tunnel {
    upstream: Box<dyn TunnelUpstream>,
    /// Maximum time without traffic in either direction; `None` for no limit.
    idle_timeout: Option<Duration>,
    slot_guard: Option<ConcurrencySlotGuard>,
    /// Guards that end with the tunnel: counts of it, its trace recording and its metrics.
    guards: Vec<Box<dyn Debug>>,
    client_to_upstream: TunnelDirection,
    upstream_to_client: TunnelDirection,
    last_activity_at: Instant,
    /// Time since which the client has not read, or not closed after the upstream closed.
    client_stalled_since: Option<Instant>,
    /// Time since which the upstream has not read data from the client. Set only with
    /// `shares_window`.
    upstream_stalled_since: Option<Instant>,
    timer: LazyTimer,
}

/// Why a tunnel ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TunnelEndReason {
    /// Both sides closed their direction.
    #[error("both sides closed the tunnel")]
    Completed,
    /// The client connection failed.
    #[error("the client connection failed: {0}")]
    ClientDisconnected(io::Error),
    /// The upstream connection failed. The client received all earlier data.
    #[error("the upstream connection failed: {0}")]
    UpstreamDisconnected(io::Error),
    /// No traffic for the upstream's `tunnel_idle_timeout` or `body_idle_timeout`.
    #[error("no traffic within the idle timeout")]
    IdleTimeout,
    /// The request exceeded the `max_duration` of a concurrency limit.
    #[error("the tunnel took longer than allowed")]
    MaxDurationExceeded,
    /// The client does not read, or does not close its direction after the upstream closed its own.
    #[error("the client does not read, or does not close its side")]
    ClientStalled,
    /// The upstream does not read, which blocks other streams of the client.
    #[error("the upstream does not read, which blocks other streams of the client")]
    UpstreamStalled,
    /// The server shuts down. Both sides of a WebSocket received a Close frame, if possible.
    #[error("the server shuts down")]
    ShuttingDown,
}

impl TunnelEndReason {
    /// Whether the client did not cause the end, so that its side is to be closed gracefully.
    pub(crate) fn leaves_client_open(&self) -> bool {
        let is_client = matches!(self, Self::Completed | Self::ClientDisconnected(_));
        !is_client && !self.is_stall()
    }

    pub(crate) fn is_stall(&self) -> bool {
        matches!(self, Self::ClientStalled | Self::UpstreamStalled)
    }
}

impl Tunnel {
    pub(crate) fn new(
        upstream: impl TunnelUpstream + 'static,
        idle_timeout: Option<Duration>,
    ) -> Self {
        Self {
            upstream: Box::new(upstream),
            idle_timeout,
            slot_guard: None,
            guards: Vec::new(),
            client_to_upstream: TunnelDirection::default(),
            upstream_to_client: TunnelDirection::default(),
            last_activity_at: Instant::now(),
            client_stalled_since: None,
            upstream_stalled_since: None,
            timer: LazyTimer::default(),
        }
    }

    /// Keeps the concurrency slot until the tunnel ends, and ends the tunnel at the slot's
    /// `ends_at`.
    pub(crate) fn attach_slot_guard(&mut self, slot_guard: Option<ConcurrencySlotGuard>) {
        self.slot_guard = slot_guard.or(self.slot_guard.take());
    }

    /// Follows the frames of a WebSocket, to close it properly at a shutdown.
    pub(crate) fn track_websocket_frames(&mut self) {
        self.client_to_upstream.frames = Some(WebSocketFrames::default());
        self.upstream_to_client.frames = Some(WebSocketFrames::default());
    }

    /// Keeps a guard until the tunnel ends.
    pub(crate) fn keep(&mut self, guard: impl Debug + 'static) {
        self.guards.push(Box::new(guard));
    }

    /// Copies bytes until the tunnel ends. A side that closes its sending direction still receives
    /// data from its peer.
    ///
    /// `stall_timeout` limits how long the client may leave data unread, or stay open after the
    /// upstream closed. `shares_window` means that the client's streams share one flow-control
    /// window, which unread bytes occupy; `stall_timeout` then also limits how long the upstream
    /// may not read. `monitor` tells when a WebSocket must close for a shutdown.
    pub(crate) async fn run(
        &mut self,
        client: &mut (impl AsyncRead + AsyncWrite + Unpin),
        monitor: &ConnectionMonitor,
        stall_timeout: Duration,
        shares_window: bool,
    ) -> TunnelEndReason {
        let (mut shutdown, mut is_closing) = (pin!(monitor.wait_for_websocket_close()), false);
        poll_fn(|cx| {
            let is_websocket = self.upstream_to_client.frames.is_some();
            is_closing = is_closing || is_websocket && shutdown.as_mut().poll(cx).is_ready();
            if is_closing {
                return self.poll_close_websocket(client, cx);
            }
            // The direction to the client is copied first, so that the upstream's last data reaches
            // the client before a failed write to the upstream ends the tunnel.
            let (down, up) = (&mut self.upstream_to_client, &mut self.client_to_upstream);
            let down = down.poll_copy(&mut self.upstream, client, cx);
            let is_down_closed = match down.map_err(|error| error.into_end_reason(true)) {
                Poll::Ready(Err(end_reason)) => return Poll::Ready(end_reason),
                down => down.is_ready(),
            };
            let up = up.poll_copy(client, &mut self.upstream, cx);
            let is_up_closed = match up.map_err(|error| error.into_end_reason(false)) {
                Poll::Ready(Err(end_reason)) => return Poll::Ready(end_reason),
                up => up.is_ready(),
            };
            if is_down_closed && is_up_closed {
                return Poll::Ready(TunnelEndReason::Completed);
            }
            self.poll_timeouts(stall_timeout, shares_window, cx)
        })
        .await
    }

    /// Sends a Close frame to both sides, each at the end of the frame that is on its way.
    fn poll_close_websocket(
        &mut self,
        client: &mut (impl AsyncRead + AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<TunnelEndReason> {
        let (down, up) = (&mut self.upstream_to_client, &mut self.client_to_upstream);
        // An error ends only its own direction.
        let is_down_pending = down
            .poll_send_close(&mut self.upstream, client, CLOSE_TO_CLIENT, cx)
            .is_pending();
        let is_up_pending = up
            .poll_send_close(client, &mut self.upstream, CLOSE_TO_UPSTREAM, cx)
            .is_pending();
        if is_down_pending || is_up_pending {
            Poll::Pending
        } else {
            Poll::Ready(TunnelEndReason::ShuttingDown)
        }
    }

    fn poll_timeouts(
        &mut self,
        stall_timeout: Duration,
        shares_window: bool,
        cx: &mut Context<'_>,
    ) -> Poll<TunnelEndReason> {
        let up_progressed = take(&mut self.client_to_upstream.has_progressed);
        let down_progressed = take(&mut self.upstream_to_client.has_progressed);
        if up_progressed || down_progressed {
            self.last_activity_at = Instant::now();
            self.client_stalled_since = None;
        }
        if up_progressed || !self.client_to_upstream.is_sink_blocked {
            self.upstream_stalled_since = None;
        }
        if shares_window && self.client_to_upstream.is_sink_blocked {
            self.upstream_stalled_since.get_or_insert_with(Instant::now);
        }
        let upstream_stalled = self
            .upstream_stalled_since
            .map(|since| (since + stall_timeout, TunnelEndReason::UpstreamStalled));
        let is_client_stalled = self.upstream_to_client.is_sink_blocked
            || self.upstream_to_client.state == TunnelDirectionState::Closed
                && !self.client_to_upstream.is_sink_blocked;
        self.client_stalled_since =
            is_client_stalled.then(|| self.client_stalled_since.unwrap_or_else(Instant::now));
        let client_stalled = self
            .client_stalled_since
            .map(|since| (since + stall_timeout, TunnelEndReason::ClientStalled));
        let idle = self
            .idle_timeout
            .map(|idle| (self.last_activity_at + idle, TunnelEndReason::IdleTimeout));
        let slot_guard = self.slot_guard.as_ref();
        let ends_at = slot_guard.and_then(|guard| guard.request_ends_at);
        let duration_exceeded = ends_at.map(|at| (at, TunnelEndReason::MaxDurationExceeded));
        let deadlines = [client_stalled, upstream_stalled, idle, duration_exceeded];
        match deadlines.into_iter().flatten().min_by_key(|(due, _)| *due) {
            Some((due, over)) => self.timer.poll(due, cx).map(|()| over),
            None => Poll::Pending,
        }
    }
}

/// State of one direction of a tunnel, from a source to a sink.
#[derive(Debug, Default)]
struct TunnelDirection {
    /// Data read from the source but not written to the sink yet.
    unsent: Bytes,
    state: TunnelDirectionState,
    /// Whether the direction waits for the sink instead of the source.
    is_sink_blocked: bool,
    /// Whether data moved or the state changed since the last check of the timeouts.
    has_progressed: bool,
    /// Position of the sink in the frames of a WebSocket.
    frames: Option<WebSocketFrames>,
    /// Whether `unsent` is the rest of a Close frame of the proxy.
    is_sending_close: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum TunnelDirectionState {
    #[default]
    Open,
    /// The source has closed; the sink must still be closed.
    Closing,
    Closed,
}

/// Error of copying in one direction, by the side that failed.
enum TunnelCopyError {
    Source(io::Error),
    Sink(io::Error),
}

impl TunnelCopyError {
    /// Why the tunnel ends, if its upstream is the source (`true`) or the sink.
    fn into_end_reason(self, is_from_upstream: bool) -> TunnelEndReason {
        match (self, is_from_upstream) {
            (Self::Source(error), true) | (Self::Sink(error), false) => {
                TunnelEndReason::UpstreamDisconnected(error)
            }
            (Self::Source(error), false) | (Self::Sink(error), true) => {
                TunnelEndReason::ClientDisconnected(error)
            }
        }
    }
}

impl TunnelDirection {
    /// Copies from source to sink. Ready when the source has closed and the sink was shut down.
    fn poll_copy(
        &mut self,
        source: &mut (impl AsyncRead + Unpin),
        sink: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), TunnelCopyError>> {
        self.is_sink_blocked = true;
        loop {
            while !self.unsent.is_empty() {
                let written = ready!(poll_write_some(sink, &self.unsent, &mut self.frames, cx))?;
                self.unsent.advance(written);
                self.has_progressed = true;
            }
            self.unsent = Bytes::new();
            match self.state {
                TunnelDirectionState::Open => {}
                TunnelDirectionState::Closing => {
                    ready!(Pin::new(&mut *sink).poll_shutdown(cx))
                        .map_err(TunnelCopyError::Sink)?;
                    (self.state, self.has_progressed) = (TunnelDirectionState::Closed, true);
                }
                TunnelDirectionState::Closed => {
                    self.is_sink_blocked = false;
                    return Poll::Ready(Ok(()));
                }
            }
            if self.state == TunnelDirectionState::Open
                && self.poll_copy_chunk(source, sink, cx)?.is_pending()
            {
                // Flushing also detects a failed sink while there is nothing to write.
                ready!(Pin::new(&mut *sink).poll_flush(cx)).map_err(TunnelCopyError::Sink)?;
                self.is_sink_blocked = false;
                return Poll::Pending;
            }
        }
    }

    /// Reads a chunk, writes as much of it as the sink takes at once, and buffers the rest.
    fn poll_copy_chunk(
        &mut self,
        source: &mut (impl AsyncRead + Unpin),
        sink: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), TunnelCopyError>> {
        let mut storage = [const { MaybeUninit::uninit() }; MAX_CHUNK_BYTES];
        let mut chunk = ReadBuf::uninit(&mut storage);
        ready!(Pin::new(source).poll_read(cx, &mut chunk)).map_err(TunnelCopyError::Source)?;
        self.has_progressed = true;
        if chunk.filled().is_empty() {
            self.state = TunnelDirectionState::Closing;
            return Poll::Ready(Ok(()));
        }
        let written = match poll_write_some(sink, chunk.filled(), &mut self.frames, cx)? {
            Poll::Ready(taken) => taken,
            Poll::Pending => 0,
        };
        self.unsent = Bytes::copy_from_slice(chunk.filled().get(written..).unwrap_or_default());
        Poll::Ready(Ok(()))
    }

    /// Copies the rest of the frame that is on its way to the sink, then sends `close_frame`. Sends
    /// none after an earlier Close frame or the end of the source.
    fn poll_send_close(
        &mut self,
        source: &mut (impl AsyncRead + Unpin),
        sink: &mut (impl AsyncWrite + Unpin),
        close_frame: &'static [u8],
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), TunnelCopyError>> {
        while let (Some(frames), TunnelDirectionState::Open) = (&self.frames, self.state) {
            let unsent = match frames.is_at_boundary() {
                true if self.is_sending_close || frames.has_close => {
                    return Pin::new(sink).poll_flush(cx).map_err(TunnelCopyError::Sink);
                }
                true => {
                    self.is_sending_close = true;
                    self.unsent = Bytes::from_static(close_frame);
                    self.unsent.clone()
                }
                false => {
                    let end = frames.clone().advance_to_boundary(&self.unsent);
                    self.unsent.slice(..end)
                }
            };
            if unsent.is_empty() {
                let mut storage = [0; 1024];
                let mut chunk = ReadBuf::new(&mut storage);
                ready!(Pin::new(&mut *source).poll_read(cx, &mut chunk))
                    .map_err(TunnelCopyError::Source)?;
                self.unsent = Bytes::copy_from_slice(chunk.filled());
                if self.unsent.is_empty() {
                    self.state = TunnelDirectionState::Closing;
                }
                continue;
            }
            let written = ready!(poll_write_some(&mut *sink, &unsent, &mut self.frames, cx))?;
            self.unsent.advance(written);
        }
        Poll::Ready(Ok(()))
    }
}

/// Polls to write to the sink, and advances its position in the frames. A write of zero bytes is an
/// error.
fn poll_write_some(
    sink: &mut (impl AsyncWrite + Unpin),
    bytes: &[u8],
    frames: &mut Option<WebSocketFrames>,
    cx: &mut Context<'_>,
) -> Poll<Result<usize, TunnelCopyError>> {
    let written = match ready!(Pin::new(sink).poll_write(cx, bytes)) {
        Ok(0) => Err(io::ErrorKind::WriteZero.into()),
        written => written,
    };
    if let (Ok(written), Some(frames)) = (&written, frames) {
        frames.advance(bytes.get(..*written).unwrap_or_default());
    }
    Poll::Ready(written.map_err(TunnelCopyError::Sink))
}

/// Close frame with status 1001, "going away" (RFC 6455, 7.4.1), from a server.
pub(crate) const CLOSE_TO_CLIENT: &[u8] = &[0x88, 2, 0x03, 0xe9];

/// The same from a client. The masking key is zero: no application chooses these bytes.
pub(crate) const CLOSE_TO_UPSTREAM: &[u8] = &[0x88, 0x82, 0, 0, 0, 0, 0x03, 0xe9];

/// Opcode of a Close frame.
const CLOSE: u8 = 8;

/// Position within the frames of one direction.
#[derive(Clone, Debug, Default)]
pub(crate) struct WebSocketFrames {
    /// Opcode, length and extended length of the current frame.
    header: [u8; 10],
    /// Received bytes of `header`.
    header_len: usize,
    /// Bytes of masking key and payload still to come.
    remaining: u64,
    pub(crate) has_close: bool,
}

impl WebSocketFrames {
    /// Whether the bytes so far end with a complete frame.
    pub(crate) fn is_at_boundary(&self) -> bool {
        self.header_len == 0 && self.remaining == 0
    }

    /// Passes over the next bytes.
    pub(crate) fn advance(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let passed = self.advance_to_boundary(bytes);
            bytes = bytes.get(passed..).unwrap_or_default();
        }
    }

    /// Passes over the next bytes up to the end of a frame. Returns their number.
    pub(crate) fn advance_to_boundary(&mut self, bytes: &[u8]) -> usize {
        let mut rest = bytes;
        while let [next, tail @ ..] = rest {
            if self.remaining > 0 {
                let missing = usize::try_from(self.remaining).unwrap_or(usize::MAX);
                let (skipped, tail) = rest.split_at(missing.min(rest.len()));
                self.remaining -= u64::try_from(skipped.len()).unwrap_or(self.remaining);
                rest = tail;
            } else {
                if let Some(byte) = self.header.get_mut(self.header_len) {
                    *byte = *next;
                }
                self.header_len += 1;
                rest = tail;
                self.parse_complete_header();
            }
            if self.is_at_boundary() {
                break;
            }
        }
        bytes.len() - rest.len()
    }

    fn parse_complete_header(&mut self) {
        let [first, second, extended @ ..] = self.header;
        let short = second & 0x7f;
        let wanted = match short {
            _ if self.header_len < 2 => return,
            126 => 4,
            127 => 10,
            _ => 2,
        };
        if self.header_len < wanted {
            return;
        }
        let payload = match short {
            126 => u64::from_be_bytes(extended) >> 48,
            127 => u64::from_be_bytes(extended),
            short => u64::from(short),
        };
        let masking_key = if second & 0x80 > 0 { 4 } else { 0 };
        self.remaining = payload.saturating_add(masking_key);
        self.has_close |= first & 0x0f == CLOSE;
        self.header_len = 0;
    }
}

#[cfg(test)]
mod websocket_frames_tests {
    use super::*;

    fn encode_frame(opcode: u8, mask: bool, payload: usize) -> Vec<u8> {
        let mask_bit = u8::from(mask) << 7;
        let length = match payload {
            0..126 => vec![mask_bit | u8::try_from(payload).unwrap()],
            126..0x1_0000 => {
                let length = u16::try_from(payload).unwrap();
                [&[mask_bit | 126][..], &length.to_be_bytes()].concat()
            }
            _ => [&[mask_bit | 127][..], &payload.to_be_bytes()].concat(),
        };
        let rest = vec![0xff; payload + 4 * usize::from(mask)];
        [vec![0x80 | opcode], length, rest].concat()
    }

    #[test]
    fn boundaries_are_found_however_the_bytes_are_split() {
        let lengths = [0, 1, 125, 126, 127, 128, 65_535, 65_536, 70_000, 0];
        for mask in [false, true] {
            let frames = lengths.map(|length| encode_frame(2, mask, length));
            let stream = frames.concat();
            for step in [1, 2, 3, 7, 1000, usize::MAX] {
                let (mut position, mut ends, mut at) = (WebSocketFrames::default(), vec![], 0);
                for part in stream.chunks(step.min(stream.len())) {
                    let mut part = part;
                    while !part.is_empty() {
                        let passed = position.advance_to_boundary(part);
                        at += passed;
                        part = &part[passed..];
                        if position.is_at_boundary() {
                            ends.push(at);
                        }
                    }
                }
                let mut end = 0;
                let expected = frames.each_ref().map(|frame| {
                    end += frame.len();
                    end
                });
                assert_eq!(ends, expected, "{mask}, steps of {step}");
                assert!(!position.has_close);
            }
        }
    }

    #[test]
    fn close_frames_are_recognized() {
        for close in [CLOSE_TO_CLIENT, CLOSE_TO_UPSTREAM] {
            let mut position = WebSocketFrames::default();
            position.advance(&encode_frame(1, true, 300));
            assert!(position.is_at_boundary() && !position.has_close);
            position.advance(&close[..3]);
            assert!(!position.is_at_boundary());
            position.advance(&close[3..]);
            assert!(position.is_at_boundary() && position.has_close);
        }
    }
}
