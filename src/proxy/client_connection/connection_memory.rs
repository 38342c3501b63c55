//! Estimated memory of one client connection, from its state and the bytes that its socket read.

use std::cell::Cell;

use crate::proxy::http2_frames::frame_scanner::FrameScan;

/// Measured memory of a connection that is idle, that has buffers for a request and an upstream
/// connection, and more for each HTTP/2 stream and for a client that does not read: 3, 20, 8 and at
/// most 60 KiB.
const IDLE_CONNECTION_BYTES: usize = 4 * 1024;
const CONNECTION_BUFFER_BYTES: usize = 20 * 1024;
const HTTP2_STREAM_BYTES: usize = 8 * 1024;
const BLOCKED_WRITE_BYTES: usize = 64 * 1024;

/// Maximum input that TLS keeps: a partial message of the handshake. A partial record is smaller.
const MAX_TLS_INPUT_BYTES: usize = 64 * 1024;

/// Maximum memory of a decoded field line of one byte, with the spare capacity of its map.
const DECODED_BYTES_PER_BYTE: usize = 144;

/// Memory of the decoded lines of the largest head, by the default of `max_header_bytes`: each line
/// counts 32 bytes or more towards that (RFC 9113, 6.5.2).
const MAX_DECODED_BYTES: usize = 64 * 1024 / 32 * DECODED_BYTES_PER_BYTE;

/// Maximum field list size (RFC 9113, 6.5.2: 32 bytes more per field) of an HTTP/2 head that is not
/// counted separately from its stream.
const MAX_UNCOUNTED_LIST_BYTES: usize = 2 * 1024;

/// Unit in which the heads of active requests are counted.
const HEAD_STEP_BYTES: usize = 4 * 1024;

/// Flow-control windows granted to an HTTP/2 client, per stream and per connection: the bytes of
/// request bodies that it may send before a handler reads them. Half of the connection's window is
/// also what h2 lets small frames take before it ends all streams of the connection, so it is
/// large: `listen.max_memory` bounds what clients hold.
pub(crate) const H2_STREAM_WINDOW_BYTES: u32 = 256 * 1024;
pub(crate) const H2_CONNECTION_WINDOW_BYTES: u32 = 256 * 1024 * 1024;

/// What h2 keeps for an unread DATA frame beside its payload.
pub(crate) const UNREAD_FRAME_BYTES: usize = 256;

/// Received bytes that a connection holds.
#[derive(Debug, Default)]
pub(crate) struct ConnectionMemory {
    /// Bytes of the incomplete request head.
    head_bytes: Cell<usize>,
    /// Bytes that replace read ones and are not processed.
    pub(crate) read_ahead_bytes: Cell<usize>,
    /// Bytes of complete HTTP/2 heads whose requests have not begun.
    complete_head_bytes: Cell<usize>,
    /// Bytes of the heads of active requests.
    active_head_bytes: Cell<usize>,
    /// Whether an HTTP/2 field list was larger, so that all heads count.
    pub(crate) has_large_lists: Cell<bool>,
    /// Active requests and HTTP/2 tunnels.
    pub(crate) streams: Cell<usize>,
    /// Bytes of HTTP/2 request bodies that were received and not read by the handler.
    unread_body_bytes: Cell<usize>,
    /// Starts of bodies that policies read, until the upstream takes them.
    pub(crate) body_start_bytes: Cell<usize>,
    /// HTTP/2 request trailers that no handler read, and their memory.
    trailers: Cell<usize>,
    trailer_bytes: Cell<usize>,
    /// Open HTTP/2 request bodies.
    http2_bodies: Cell<usize>,
    /// Bytes that TLS received since it last returned plaintext or ended its handshake.
    pub(crate) tls_input_bytes: Cell<usize>,
}

impl ConnectionMemory {
    pub(crate) fn add_head_bytes(&self, bytes: usize) {
        self.head_bytes.update(|value| value + bytes);
    }

    /// Records received HTTP/2 frames.
    pub(crate) fn record_scan(&self, scan: &FrameScan) {
        if !scan.is_within_field_block || scan.ends_field_block {
            let bytes = self.head_bytes.take();
            self.complete_head_bytes.update(|complete| complete + bytes);
        }
        if scan.is_within_field_block {
            self.add_head_bytes(scan.field_block_bytes);
        }
        self.add_unread_frames(scan.data_frames, scan.data_bytes);
        if scan.list_bytes > MAX_UNCOUNTED_LIST_BYTES {
            self.has_large_lists.set(true);
        }
        self.add_trailers(scan.trailers, scan.trailer_bytes);
    }

    /// Records that the request of a complete head begins, with the memory of its decoded fields.
    /// Returns the size of the head, which is to be passed to [`ConnectionMemory::end_head`]. A
    /// small HTTP/2 head that arrived in one read counts as part of its stream.
    pub(crate) fn begin_head(&self, is_http2: bool, decoded_bytes: usize) -> usize {
        self.begin_stream();
        let head = if is_http2 {
            &self.complete_head_bytes
        } else {
            &self.head_bytes
        };
        let bytes = head.take().max(decoded_bytes);
        self.active_head_bytes.update(|value| value + bytes);
        bytes
    }

    /// Records that the request with this size of its head has ended.
    pub(crate) fn end_head(&self, bytes: usize) {
        self.end_stream();
        self.active_head_bytes.update(|value| value - bytes);
    }

    /// Records a request, or an HTTP/2 tunnel that has replaced it.
    pub(crate) fn begin_stream(&self) {
        self.streams.update(|value| value + 1);
    }

    pub(crate) fn end_stream(&self) {
        self.streams.update(|value| value - 1);
    }

    /// Records received DATA frames of HTTP/2 request bodies, and the bytes of their payloads. What
    /// no handler reads, such as frames of a stream that was reset, stays counted until no body is
    /// open.
    pub(crate) fn add_unread_frames(&self, frames: usize, bytes: usize) {
        let added = bytes + frames * UNREAD_FRAME_BYTES;
        self.unread_body_bytes
            .update(|unread| (unread + added).min(H2_CONNECTION_WINDOW_BYTES as usize));
    }

    /// Records that the handler read DATA frames: their payloads, and [`UNREAD_FRAME_BYTES`] each.
    pub(crate) fn remove_unread_bytes(&self, bytes: usize) {
        self.unread_body_bytes
            .update(|value| value.saturating_sub(bytes));
    }

    /// Records received bytes of trailers, of which `count` begin in them. h2 keeps them decoded
    /// until a handler reads the body to its end.
    fn add_trailers(&self, count: usize, bytes: usize) {
        let decoded = (bytes * DECODED_BYTES_PER_BYTE).min(MAX_DECODED_BYTES * count.max(1));
        self.trailers.update(|value| value + count);
        self.trailer_bytes
            .update(|value| value + bytes.max(decoded));
    }

    /// Records that the handler read trailers. Which ones is unknown, so the mean counts.
    pub(crate) fn remove_trailers(&self) {
        let (count, bytes) = (self.trailers.get(), self.trailer_bytes.get());
        self.trailer_bytes
            .set(bytes - bytes.checked_div(count).unwrap_or(0));
        self.trailers.set(count.saturating_sub(1));
    }

    /// Records a new HTTP/2 request body.
    pub(crate) fn begin_http2_body(&self) {
        self.http2_bodies.update(|value| value + 1);
    }

    /// Records that an HTTP/2 request body was dropped.
    pub(crate) fn end_http2_body(&self) {
        self.http2_bodies.update(|value| value - 1);
        if self.http2_bodies.get() == 0 {
            self.unread_body_bytes.set(0);
            self.trailers.set(0);
            self.trailer_bytes.set(0);
        }
    }

    /// Memory of open HTTP/2 request bodies: at most that of frames of one byte, as many as flow
    /// control lets the client send, and trailers.
    fn unread_body_bytes(&self) -> usize {
        if self.http2_bodies.get() == 0 {
            return 0;
        }
        let window = H2_STREAM_WINDOW_BYTES as usize * (1 + UNREAD_FRAME_BYTES);
        let window = self.http2_bodies.get().saturating_mul(window);
        self.unread_body_bytes.get().min(window) + self.trailer_bytes.get()
    }

    /// Records bytes that TLS received and may keep.
    pub(crate) fn add_tls_input(&self, bytes: usize) {
        self.tls_input_bytes
            .update(|kept| (kept + bytes).min(MAX_TLS_INPUT_BYTES));
    }

    /// Memory of the connection. `has_buffers` is whether an HTTP/1 connection has buffers for a
    /// request.
    ///
    /// An incomplete HTTP/2 field block is held twice: as received and decoded.
    pub(crate) fn held_bytes(
        &self,
        is_http2: bool,
        has_buffers: bool,
        is_write_blocked: bool,
    ) -> usize {
        let head_bytes = self.head_bytes.get();
        let decoded_bytes = (head_bytes * DECODED_BYTES_PER_BYTE).min(MAX_DECODED_BYTES);
        // Small heads and TLS records are part of the buffers: ordinary requests report nothing.
        let active_head_bytes = self.active_head_bytes.get() & !(HEAD_STEP_BYTES - 1);
        let kept =
            self.tls_input_bytes.get() + self.read_ahead_bytes.get() + self.body_start_bytes.get();
        let kept_bytes = kept & !(HEAD_STEP_BYTES - 1);
        let unsent = if is_write_blocked {
            BLOCKED_WRITE_BYTES
        } else {
            0
        };
        let received = if is_http2 {
            CONNECTION_BUFFER_BYTES
                + self.streams.get() * HTTP2_STREAM_BYTES
                + head_bytes
                + head_bytes.max(decoded_bytes)
                + active_head_bytes
                + self.unread_body_bytes()
        } else if has_buffers {
            CONNECTION_BUFFER_BYTES + head_bytes + active_head_bytes
        } else {
            IDLE_CONNECTION_BYTES
        };
        received + unsent + kept_bytes
    }
}
