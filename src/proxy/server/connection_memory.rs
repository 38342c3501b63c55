//! Estimated memory of one client connection, from its state and the bytes that its socket has read.

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
}

/// State of a connection that determines its memory.
pub(super) struct ConnectionBuffers {
    /// Number of open streams. `None` for HTTP/1.
    pub(super) http2_streams: Option<usize>,
    /// Whether an HTTP/1 connection has buffers for a request.
    pub(super) has_buffers: bool,
    pub(super) is_write_blocked: bool,
}

/// Received bytes that a connection holds, and its memory as last reported to the budget.
#[derive(Debug, Default)]
pub(super) struct ConnectionMemory {
    /// Bytes of the incomplete request head.
    head_bytes: Cell<usize>,
    /// Bytes of HTTP/2 request bodies that were received and not read by the handler.
    unread_body_bytes: Cell<usize>,
    reported_bytes: Cell<usize>,
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

    pub(super) fn remove_unread_body_bytes(&self, bytes: usize) {
        self.unread_body_bytes
            .set(self.unread_body_bytes.get().saturating_sub(bytes));
    }

    pub(super) fn clear_unread_body_bytes(&self) {
        self.unread_body_bytes.set(0);
    }

    /// Memory as last reported.
    pub(super) fn reported_bytes(&self) -> usize {
        self.reported_bytes.get()
    }

    /// Whether closing the connection frees more than an idle connection holds.
    pub(super) fn exceeds_idle_connection(&self) -> bool {
        self.reported_bytes.get() > IDLE_CONNECTION_BYTES
    }

    /// Reports the memory to the budget, if it has changed. `None`: the connection is being closed.
    pub(super) fn report(&self, buffers: Option<ConnectionBuffers>) {
        let held = buffers.map_or(0, |buffers| self.held_bytes(&buffers));
        let reported = self.reported_bytes.get();
        if held != reported
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
        self.report(None);
    }
}
