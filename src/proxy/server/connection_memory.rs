//! Estimated memory of one client connection, from its state and the bytes that its socket read.

use std::cell::{Cell, OnceCell};
use std::fmt::Debug;
use std::rc::Rc;

/// Measured memory of a connection that is idle, that has buffers for a request and an upstream
/// connection, and more for each HTTP/2 stream and for a client that does not read: 3, 20, 8 and at
/// most 60 KiB.
const IDLE_CONNECTION_BYTES: usize = 4 * 1024;
const CONNECTION_BUFFER_BYTES: usize = 20 * 1024;
const HTTP2_STREAM_BYTES: usize = 8 * 1024;
const BLOCKED_WRITE_BYTES: usize = 64 * 1024;

/// Adds up the memory of connections.
pub(in crate::proxy) trait MemoryBudget: Debug {
    /// Records that a connection holds `after` instead of `before` bytes.
    fn update(&self, before: usize, after: usize);

    /// Whether the budget is exceeded while connections are being closed for it.
    fn is_being_freed(&self) -> bool;

    /// Records that a connection which was closed for the budget has freed its bytes.
    fn record_freed(&self, bytes: usize);
}

/// State of a connection that determines its memory.
pub(super) struct ConnectionBuffers {
    /// Number of open streams. `Retry` for HTTP/1.
    pub(super) http2_streams: Option<usize>,
    /// Whether an HTTP/1 connection has buffers for a request.
    pub(super) has_buffers: bool,
    pub(super) is_write_blocked: bool,
}

/// Received bytes that a connection holds, and its memory as last reported to the budget.
#[derive(Debug, Default)]
pub(in crate::proxy) struct ConnectionMemory {
    /// Bytes of the incomplete request head.
    head_bytes: Cell<usize>,
    /// Bytes of HTTP/2 request bodies that were received and not read by the handler.
    unread_body_bytes: Cell<usize>,
    reported_bytes: Cell<usize>,
    /// Whether the connection is being closed to free its memory.
    is_closing: Cell<bool>,
    /// Whether the connection is a tunnel, which cannot be closed for the budget.
    is_tunnel: Cell<bool>,
    budget: OnceCell<Rc<dyn MemoryBudget>>,
}

impl ConnectionMemory {
    pub(super) fn set_budget(&self, budget: Rc<dyn MemoryBudget>) {
        // Set once per connection, so the cell is empty.
        drop(self.budget.set(budget));
    }

    pub(super) fn add_head_bytes(&self, bytes: usize) {
        self.head_bytes.set(self.head_bytes.get() + bytes);
    }

    pub(super) fn clear_head_bytes(&self) {
        self.head_bytes.set(0);
    }

    pub(super) fn add_unread_body_bytes(&self, bytes: usize) {
        self.unread_body_bytes
            .set(self.unread_body_bytes.get() + bytes);
    }

    /// Records that the handler read bytes of a request body.
    pub(in crate::proxy) fn remove_unread_body_bytes(&self, bytes: usize) {
        self.unread_body_bytes
            .set(self.unread_body_bytes.get().saturating_sub(bytes));
    }

    pub(super) fn clear_unread_body_bytes(&self) {
        self.unread_body_bytes.set(0);
    }

    /// Records that the connection is a tunnel.
    pub(in crate::proxy) fn set_tunnel(&self) {
        self.is_tunnel.set(true);
    }

    /// Whether the budget is exceeded while connections are being closed for it.
    pub(super) fn is_budget_being_freed(&self) -> bool {
        self.budget
            .get()
            .is_some_and(|budget| budget.is_being_freed())
    }

    /// Records that the connection is to be closed. Its memory counts until it is dropped. Returns
    /// its size.
    pub(super) fn begin_close(&self) -> usize {
        self.is_closing.set(true);
        self.reported_bytes.get()
    }

    /// Memory as last reported.
    pub(super) fn reported_bytes(&self) -> usize {
        self.reported_bytes.get()
    }

    /// Whether the connection can be closed, and holds more than an idle one.
    pub(super) fn can_be_freed(&self) -> bool {
        let is_closable = !self.is_closing.get() && !self.is_tunnel.get();
        is_closable && self.reported_bytes.get() > IDLE_CONNECTION_BYTES
    }

    /// Reports the memory to the budget, if it has changed and the connection stays open.
    pub(super) fn report(&self, buffers: &ConnectionBuffers) {
        let held = self.held_bytes(buffers);
        let reported = self.reported_bytes.get();
        if held != reported
            && !self.is_closing.get()
            && let Some(budget) = self.budget.get()
        {
            self.reported_bytes.set(held);
            budget.update(reported, held);
        }
    }

    /// An HTTP/2 field block is held twice: as received and decoded.
    fn held_bytes(&self, buffers: &ConnectionBuffers) -> usize {
        let head_bytes = self.head_bytes.get();
        let unsent = match buffers.is_write_blocked {
            true => BLOCKED_WRITE_BYTES,
            false => 0,
        };
        let received = match buffers.http2_streams {
            Some(streams) => {
                CONNECTION_BUFFER_BYTES
                    + streams * HTTP2_STREAM_BYTES
                    + 2 * head_bytes
                    + self.unread_body_bytes.get()
            }
            None if buffers.has_buffers => CONNECTION_BUFFER_BYTES + head_bytes,
            None => IDLE_CONNECTION_BYTES,
        };
        received + unsent
    }
}

impl Drop for ConnectionMemory {
    fn drop(&mut self) {
        if let Some(budget) = self.budget.get() {
            let bytes = self.reported_bytes.get();
            budget.update(bytes, 0);
            if self.is_closing.get() {
                budget.record_freed(bytes);
            }
        }
    }
}
