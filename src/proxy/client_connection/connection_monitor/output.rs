//! Output of one connection, and informational (1xx) responses that hyper does not know of.

use std::cell::{Cell, RefCell, RefMut};

use super::ConnectionMonitor;
use crate::proxy::client_connection::continue_responses::{ContinuePermit, ContinueQueue};
use crate::proxy::http2_frames::frame_scanner::FrameScan;

/// What hyper has written, and what is written beside it.
#[derive(Debug, Default)]
pub(crate) struct OutputState {
    /// Informational heads to be written before the next response.
    informational_heads: RefCell<Vec<u8>>,
    /// HTTP/2 streams whose clients wait for `100 Continue`.
    continue_queue: ContinueQueue,
    /// Whether an HTTP/2 request head had a mark.
    pub(crate) has_head_marks: Cell<bool>,
    /// Whether hyper has output that it has not written and flushed.
    pub(crate) has_unflushed: Cell<bool>,
    /// Whether the next output may continue a response: a request began since all output was
    /// flushed. May be `true` for a while after a response.
    pub(crate) may_be_within_response: Cell<bool>,
}

impl OutputState {
    /// Whether informational heads may have to be written.
    pub(crate) fn has_queued(&self) -> bool {
        !self.informational_heads.borrow().is_empty() || self.continue_queue.has_permits()
    }
}

impl ConnectionMonitor {
    /// Queues an informational head for an HTTP/1.1 client, ahead of all later output of hyper. The
    /// head is dropped if output of earlier responses is still unwritten.
    ///
    /// hyper flushes the socket if and only if it has written all its output.
    pub(crate) fn queue_informational_head(&self, head: &[u8]) {
        if !self.output.has_unflushed.get() {
            let mut heads = self.output.informational_heads.borrow_mut();
            heads.extend_from_slice(head);
            self.connection.wake_driver();
        }
    }

    /// Queues `100 Continue` for the client of an HTTP/2 stream.
    pub(crate) fn queue_continue(&self, permit: &ContinuePermit) {
        if self.output.continue_queue.push(permit) {
            self.connection.wake_driver();
        }
    }

    /// Informational heads that are not written yet. Those for HTTP/2 are added only between two
    /// frames of h2, which also flushes if and only if it has written all its output.
    pub(crate) fn pending_informational_heads(&self) -> RefMut<'_, Vec<u8>> {
        let mut heads = self.output.informational_heads.borrow_mut();
        if !self.output.has_unflushed.get() {
            self.output.continue_queue.drain_frames(&mut heads);
        }
        heads
    }

    pub(crate) fn record_response_start(&self) {
        self.frame_budget.credit_response();
        self.exchange.is_responding.set(true);
        self.output.continue_queue.keep_present_table_size();
    }

    /// Records what the frame scanner found for the requests and responses of the connection.
    pub(crate) fn record_scan(&self, scan: &FrameScan) {
        if scan.has_head_mark {
            self.output.has_head_marks.set(true);
        }
        if let Some(bytes) = scan.table_bytes {
            self.output.continue_queue.set_table_bytes(bytes);
        }
    }
}
