//! Informational (1xx) responses of one connection.

use std::cell::RefMut;

use super::ConnectionMonitor;
use crate::proxy::server::continue_responses::ContinuePermit;
use crate::proxy::server::frame_scanner::FrameScan;

impl ConnectionMonitor {
    /// Queues an informational head for an HTTP/1.1 client, ahead of all later output of hyper. The
    /// head is dropped if output of earlier responses is still unwritten.
    ///
    /// hyper flushes the socket if and only if it has written all its output.
    pub(in crate::proxy) fn queue_informational_head(&self, head: &[u8]) {
        if self.is_flushed.get() {
            self.informational_heads
                .borrow_mut()
                .extend_from_slice(head);
            self.wake_driver();
        }
    }

    /// Queues `100 Continue` for the client of an HTTP/2 stream.
    pub(in crate::proxy) fn queue_continue(&self, permit: &ContinuePermit) {
        if self.continue_queue.push(permit) {
            self.wake_driver();
        }
    }

    /// Informational heads that are not written yet. Those for HTTP/2 are added only between two
    /// frames of h2, which also flushes if and only if it has written all its output.
    pub(in crate::proxy::server) fn pending_informational_heads(&self) -> RefMut<'_, Vec<u8>> {
        let mut heads = self.informational_heads.borrow_mut();
        if self.is_flushed.get() {
            self.continue_queue.drain_frames(&mut heads);
        }
        heads
    }

    /// Records what the frame scanner found for the requests and responses of the connection.
    pub(in crate::proxy::server) fn record_scan(&self, scan: &FrameScan) {
        if scan.has_head_mark {
            self.has_head_marks.set(true);
        }
        if let Some(bytes) = scan.table_bytes {
            self.continue_queue.set_table_bytes(bytes);
        }
    }

    /// Whether an HTTP/2 request head had a mark.
    pub(in crate::proxy::server) fn has_head_marks(&self) -> bool {
        self.has_head_marks.get()
    }
}
