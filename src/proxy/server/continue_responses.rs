//! `100 Continue` over HTTP/2, which hyper cannot send: the client socket writes it between two
//! frames of h2. See `docs/decisions/0095-decoded-field-blocks.md`.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::frame_splitter::{END_HEADERS, HEADERS};

/// `:status: 100` as a literal that enters no dynamic table. Entry 8 of the static table is
/// `:status`.
const STATUS_100: [u8; 5] = [8, 3, b'1', b'0', b'0'];

/// Default and maximum size of h2's HPACK table for responses (RFC 9113, 6.5.2).
const MAX_TABLE_BYTES: u32 = 4096;

/// Streams of an HTTP/2 connection whose clients wait for `100 Continue`.
#[derive(Debug)]
pub(crate) struct ContinueQueue {
    /// Size of the client's HPACK table.
    table_bytes: Cell<u32>,
    permits: RefCell<Vec<ContinuePermit>>,
}

/// Stream that may still get a `100 Continue`.
#[derive(Clone, Debug)]
pub(crate) struct ContinuePermit(Rc<Cell<PermitState>>);

/// Progress of a `100 Continue`, with its stream.
#[derive(Clone, Copy, Debug)]
enum PermitState {
    Unused(u32),
    Queued(u32),
    Revoked,
}

impl ContinuePermit {
    pub(super) fn new(stream: u32) -> Self {
        Self(Rc::new(Cell::new(PermitState::Unused(stream))))
    }

    /// Forbids the response: the final response begins, or the stream has ended.
    pub(crate) fn revoke(&self) {
        self.0.set(PermitState::Revoked);
    }
}

impl Default for ContinueQueue {
    fn default() -> Self {
        Self {
            table_bytes: Cell::new(MAX_TABLE_BYTES),
            permits: RefCell::default(),
        }
    }
}

impl ContinueQueue {
    /// Records a table size from the client's SETTINGS.
    pub(super) fn set_table_bytes(&self, bytes: u32) {
        self.table_bytes.set(bytes.min(MAX_TABLE_BYTES));
    }

    /// Queues the response, unless it was queued before. Returns whether the task that writes it
    /// must be woken.
    pub(super) fn push(&self, permit: &ContinuePermit) -> bool {
        let PermitState::Unused(stream) = permit.0.get() else {
            return false;
        };
        permit.0.set(PermitState::Queued(stream));
        self.permits.borrow_mut().push(permit.clone());
        true
    }

    /// Appends the frames of all queued responses that are still permitted.
    pub(super) fn drain_frames(&self, into: &mut Vec<u8>) {
        if self.permits.borrow().is_empty() {
            return;
        }
        for permit in self.permits.take() {
            if let PermitState::Queued(stream) = permit.0.replace(PermitState::Revoked) {
                let block = [&*encode_table_size(self.table_bytes.get()), &STATUS_100].concat();
                // A block has fewer than 10 bytes.
                let length = u8::try_from(block.len()).unwrap_or_default();
                into.extend_from_slice(&[0, 0, length, HEADERS, END_HEADERS]);
                into.extend_from_slice(&stream.to_be_bytes());
                into.extend_from_slice(&block);
            }
        }
    }
}

/// A table size update, if the client's table is smaller than by default: the first block after
/// the client's SETTINGS must have one (RFC 7541, 4.2). h2 repeats it, which changes nothing.
fn encode_table_size(bytes: u32) -> Vec<u8> {
    let mut update = Vec::new();
    let low_byte = |value: u32| value.to_le_bytes().first().copied().unwrap_or_default();
    match bytes.checked_sub(31) {
        _ if bytes == MAX_TABLE_BYTES => {}
        None => update.push(0x20 | low_byte(bytes)),
        Some(mut rest) => {
            update.push(0x3f);
            while rest >= 0x80 {
                update.push(0x80 | low_byte(rest));
                rest >>= 7;
            }
            update.push(low_byte(rest));
        }
    }
    update
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_sizes_are_encoded_as_in_rfc_7541() {
        for (bytes, expected) in [
            (0, &[0x20][..]),
            (30, &[0x3e]),
            (31, &[0x3f, 0]),
            (1337, &[0x3f, 0x9a, 0x0a]),
            (4095, &[0x3f, 0xe0, 0x1f]),
            (4096, &[]),
        ] {
            assert_eq!(encode_table_size(bytes), expected, "{bytes}");
        }
    }

    #[test]
    fn a_revoked_permit_sends_nothing() {
        let (queue, mut output) = (ContinueQueue::default(), Vec::new());
        let permits = [1, 3].map(ContinuePermit::new);
        for permit in &permits {
            assert!(queue.push(permit) && !queue.push(permit));
        }
        permits[0].revoke();
        queue.drain_frames(&mut output);
        assert!(!queue.push(&permits[1]), "sent already");
        queue.drain_frames(&mut output);
        assert_eq!(output, b"\0\0\x05\x01\x04\0\0\0\x03\x08\x03100");
    }
}
