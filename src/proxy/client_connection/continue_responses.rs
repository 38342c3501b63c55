//! `100 Continue` over HTTP/2, which hyper cannot send: the client socket writes it between two
//! frames of h2. See `docs/decisions/0095-decoded-field-blocks.md`.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::proxy::http2_frames::frame_splitter::{END_HEADERS, HEADERS};
use crate::proxy::http2_frames::hpack::push_integer;

/// `:status: 100` as a literal that enters no dynamic table. Entry 8 of the static table is
/// `:status`.
const STATUS_100: [u8; 5] = [8, 3, b'1', b'0', b'0'];

/// Default and maximum size of h2's HPACK table for responses (RFC 9113, 6.5.2).
const MAX_TABLE_BYTES: u32 = 4096;

/// Streams of an HTTP/2 connection whose clients wait for `100 Continue`.
#[derive(Debug, Default)]
pub(crate) struct ContinueQueue {
    /// Smallest size of the client's HPACK table since the last block, and the present size. `None`
    /// if the client has not changed it.
    table_bytes: Cell<Option<(u32, u32)>>,
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
    pub(crate) fn new(stream: u32) -> Self {
        Self(Rc::new(Cell::new(PermitState::Unused(stream))))
    }

    /// Forbids the response: the final response begins, or the stream has ended.
    pub(crate) fn revoke(&self) {
        self.0.set(PermitState::Revoked);
    }
}

impl ContinueQueue {
    /// Records the smallest and the last table size in SETTINGS of the client.
    pub(crate) fn set_table_bytes(&self, (smallest, last): (u32, u32)) {
        let known = self
            .table_bytes
            .get()
            .map_or(MAX_TABLE_BYTES, |(known, _)| known);
        let sizes = (smallest.min(known), last.min(MAX_TABLE_BYTES));
        self.table_bytes.set(Some(sizes));
    }

    /// Forgets smaller table sizes: a response of h2 begins, which may fill the client's table. An
    /// update to a smaller size would empty it again.
    pub(crate) fn keep_present_table_size(&self) {
        self.table_bytes
            .update(|sizes| sizes.map(|(_, present)| (present, present)));
    }

    /// Queues the response, unless it was queued before. Returns whether the task that writes it
    /// must be woken.
    pub(crate) fn push(&self, permit: &ContinuePermit) -> bool {
        let PermitState::Unused(stream) = permit.0.get() else {
            return false;
        };
        permit.0.set(PermitState::Queued(stream));
        self.permits.borrow_mut().push(permit.clone());
        true
    }

    pub(crate) fn has_permits(&self) -> bool {
        !self.permits.borrow().is_empty()
    }

    /// Appends the frames of all queued responses that are still permitted.
    pub(crate) fn drain_frames(&self, into: &mut Vec<u8>) {
        for permit in self.permits.take() {
            if let PermitState::Queued(stream) = permit.0.replace(PermitState::Revoked) {
                let mut block = Vec::new();
                if let Some(sizes) = self.table_bytes.get() {
                    push_table_sizes(sizes, &mut block);
                }
                self.keep_present_table_size();
                block.extend_from_slice(&STATUS_100);
                // A block has at most 11 bytes.
                let length = u8::try_from(block.len()).unwrap_or_default();
                into.extend_from_slice(&[0, 0, length, HEADERS, END_HEADERS]);
                into.extend_from_slice(&stream.to_be_bytes());
                into.extend_from_slice(&block);
            }
        }
    }
}

/// Table size updates, if the client's table is or was smaller than by default: the first block
/// after the client's SETTINGS must have them (RFC 7541, 4.2). h2 repeats them, which changes
/// nothing.
fn push_table_sizes((smallest, present): (u32, u32), block: &mut Vec<u8>) {
    let mut push = |bytes: u32| push_integer(bytes as usize, 5, 0x20, block);
    if smallest < present {
        push(smallest);
    }
    if smallest < MAX_TABLE_BYTES {
        push(present);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_sizes_are_encoded_as_in_rfc_7541() {
        for (sizes, expected) in [
            ((0, 0), &[0x20][..]),
            ((30, 30), &[0x3e]),
            ((31, 31), &[0x3f, 0]),
            ((1337, 1337), &[0x3f, 0x9a, 0x0a]),
            ((4095, 4095), &[0x3f, 0xe0, 0x1f]),
            ((4096, 4096), &[]),
            ((0, 4096), &[0x20, 0x3f, 0xe1, 0x1f]),
            ((30, 31), &[0x3e, 0x3f, 0]),
        ] {
            let mut block = Vec::new();
            push_table_sizes(sizes, &mut block);
            assert_eq!(block, expected, "{sizes:?}");
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
