//! Output of one client connection: informational (1xx) responses that hyper does not know of,
//! blocked writes, and complete HTTP/2 responses that the client has no window for.
//!
//! hyper ends the task of a stream once h2 has taken its last chunk. A client that grants less
//! window than the chunk needs would keep the chunk and its stream for as long as the connection is
//! busy. The age of the oldest response is known to within one timeout: responses are counted in
//! two generations.
//!
//! The client socket writes `100 Continue` over HTTP/2 between two frames of h2. See
//! `docs/decisions/0095-decoded-field-blocks.md`.

use std::cell::{Cell, RefCell, RefMut};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::time::Instant;

use super::open_connections::OpenConnection;
use crate::proxy::http2_frames::field_block_filter::encode_frames;
use crate::proxy::http2_frames::hpack::push_integer;

/// Bytes of an HTTP/1 response that hyper collects for its first write, beside a last chunk: 64 KiB
/// arrive in four full reads and the rest. The kernel takes as much of a client that reads nothing.
pub(super) const FIRST_WRITE_BYTES: usize = 4 * (16 * 1024 - 1);
/// The same for later writes: what the proxy keeps for a slow client. TLS keeps a copy.
pub(crate) const NEXT_WRITE_BYTES: usize = FIRST_WRITE_BYTES / 4 * 3;
pub(crate) const NEXT_TLS_WRITE_BYTES: usize = FIRST_WRITE_BYTES / 4;

/// What hyper has written, and what is written beside it.
#[derive(Debug)]
pub(crate) struct ConnectionOutput {
    connection: Arc<OpenConnection>,
    /// Informational heads to be written before the next response.
    informational_heads: RefCell<Vec<u8>>,
    /// HTTP/2 streams whose clients wait for `100 Continue`.
    pub(super) continue_queue: ContinueQueue,
    /// Whether hyper has output that it has not written and flushed.
    pub(super) has_unflushed: Cell<bool>,
    /// Bytes of an HTTP/1 response that hyper may collect until its next write, beside a last chunk.
    pub(crate) collectable_bytes: Cell<usize>,
    /// Whether the next output may continue a response: a request began since all output was
    /// flushed. May be `true` for a while after a response.
    pub(crate) may_be_within_response: Cell<bool>,
    pub(super) blocked_since: Cell<Option<Instant>>,
    /// Tasks whose response bodies wait for the end of a blocked write.
    write_waiters: RefCell<Vec<Waker>>,
    pub(crate) unsent_responses: Rc<UnsentResponses>,
}

impl ConnectionOutput {
    pub(super) fn new(connection: Arc<OpenConnection>) -> Self {
        Self {
            connection,
            informational_heads: RefCell::default(),
            continue_queue: ContinueQueue::default(),
            has_unflushed: Cell::new(false),
            collectable_bytes: Cell::new(0),
            may_be_within_response: Cell::new(false),
            blocked_since: Cell::new(None),
            write_waiters: RefCell::default(),
            unsent_responses: Rc::default(),
        }
    }

    /// Whether informational heads may have to be written.
    pub(crate) fn has_queued(&self) -> bool {
        !self.informational_heads.borrow().is_empty()
            || !self.continue_queue.permits.borrow().is_empty()
    }

    /// Queues an informational head for an HTTP/1.1 client, ahead of all later output of hyper. The
    /// head is dropped if output of earlier responses is still unwritten.
    ///
    /// hyper flushes the socket if and only if it has written all its output.
    pub(crate) fn queue_informational_head(&self, head: &[u8]) {
        if !self.has_unflushed.get() {
            self.informational_heads
                .borrow_mut()
                .extend_from_slice(head);
            self.connection.driver.wake();
        }
    }

    /// Queues `100 Continue` for the client of an HTTP/2 stream.
    pub(crate) fn queue_continue(&self, permit: &ContinuePermit) {
        if self.continue_queue.push(permit) {
            self.connection.driver.wake();
        }
    }

    /// Informational heads that are not written yet. Those for HTTP/2 are added only between two
    /// frames of h2, which also flushes if and only if it has written all its output.
    pub(crate) fn pending_informational_heads(&self) -> RefMut<'_, Vec<u8>> {
        let mut heads = self.informational_heads.borrow_mut();
        if !self.has_unflushed.get() {
            self.continue_queue.drain_frames(&mut heads);
        }
        heads
    }

    /// Records whether a write is blocked.
    pub(crate) fn record_write_result<T>(&self, result: &Poll<io::Result<T>>) {
        if result.is_ready() {
            if self.blocked_since.take().is_some() {
                self.write_waiters.take().into_iter().for_each(Waker::wake);
            }
        } else if !self.is_blocked() {
            self.blocked_since.set(Some(Instant::now()));
        }
    }

    /// Whether a write is blocked.
    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked_since.get().is_some()
    }

    /// Returns ready while no write is blocked. A pending task is woken when the write succeeds.
    pub(crate) fn poll_write_progress(&self, cx: &Context<'_>) -> Poll<()> {
        if !self.is_blocked() {
            return Poll::Ready(());
        }
        let mut waiters = self.write_waiters.borrow_mut();
        if !waiters.iter().any(|waiter| waiter.will_wake(cx.waker())) {
            waiters.push(cx.waker().clone());
        }
        Poll::Pending
    }
}

/// `:status: 100` as a literal that enters no dynamic table. Entry 8 of the static table is
/// `:status`.
const STATUS_100: [u8; 5] = [8, 3, b'1', b'0', b'0'];

/// Default and maximum size of h2's HPACK table for responses (RFC 9113, 6.5.2).
const MAX_TABLE_BYTES: u32 = 4096;

/// Streams of an HTTP/2 connection whose clients wait for `100 Continue`.
#[derive(Debug, Default)]
pub(super) struct ContinueQueue {
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
                into.extend_from_slice(&encode_frames(stream, false, &block));
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

/// Counts of the unsent responses of one connection.
#[derive(Debug, Default)]
pub(crate) struct UnsentResponses {
    /// Responses of the last generation.
    newer: Cell<usize>,
    /// Responses of the generation before.
    older: Cell<usize>,
    generation: Cell<u64>,
    /// Start of the last generation. `None` while there are no responses.
    since: Cell<Option<Instant>>,
    /// Time at which the last response was sent, if it was ever unsent.
    pub(crate) emptied_at: Cell<Option<Instant>>,
}

/// Output of one stream. When it is dropped, the response is complete.
#[derive(Debug)]
pub(crate) struct StreamOutput(Rc<StreamChunks>);

/// Guard of a chunk, dropped when h2 has written the chunk or reset the stream.
pub(crate) type UnsentChunkGuard = Rc<StreamChunks>;

/// Chunks of one stream, until they are sent.
#[derive(Debug)]
pub(crate) struct StreamChunks {
    responses: Rc<UnsentResponses>,
    /// Generation of the response, if it is complete and unsent.
    generation: Cell<Option<u64>>,
}

impl UnsentResponses {
    /// Counts a response. Returns its generation.
    fn add(&self) -> u64 {
        if self.is_empty() {
            self.older.set(1);
            return self.generation.get();
        }
        self.newer.update(|value| value + 1);
        self.generation.get() + 1
    }

    fn remove(&self, generation: u64) {
        let is_older = generation <= self.generation.get();
        let count = if is_older { &self.older } else { &self.newer };
        count.update(|value| value - 1);
        if self.is_empty() {
            self.emptied_at.set(Some(Instant::now()));
        }
    }

    /// Number of complete responses that are not sent.
    pub(crate) fn len(&self) -> usize {
        self.newer.get() + self.older.get()
    }

    /// Whether all complete responses were sent.
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Restarts the timeout of all responses.
    pub(crate) fn restart_timeout(&self) {
        self.since.set(None);
    }

    /// Time at which the oldest response is older than `timeout`.
    pub(crate) fn deadline(&self, timeout: Duration) -> Option<Instant> {
        if self.is_empty() {
            self.since.set(None);
            return None;
        }
        let now = Instant::now();
        let mut since = self.since.get().unwrap_or(now);
        if self.older.get() == 0 && now >= since + timeout {
            self.older.set(self.newer.take());
            self.generation.update(|value| value + 1);
            since = now;
        }
        self.since.set(Some(since));
        Some(since + timeout)
    }
}

impl StreamOutput {
    pub(crate) fn new(responses: &Rc<UnsentResponses>) -> Self {
        Self(Rc::new(StreamChunks {
            responses: Rc::clone(responses),
            generation: Cell::new(None),
        }))
    }

    /// Counts a chunk as unsent until the guard is dropped.
    pub(crate) fn begin_chunk(&self) -> UnsentChunkGuard {
        Rc::clone(&self.0)
    }
}

impl Drop for StreamOutput {
    fn drop(&mut self) {
        let chunks = &self.0;
        if Rc::strong_count(chunks) > 1 {
            chunks.generation.set(Some(chunks.responses.add()));
        }
    }
}

impl Drop for StreamChunks {
    fn drop(&mut self) {
        if let Some(generation) = self.generation.take() {
            self.responses.remove(generation);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

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

    const TIMEOUT: Duration = Duration::from_secs(30);

    fn complete_response(responses: &Rc<UnsentResponses>) -> UnsentChunkGuard {
        StreamOutput::new(responses).begin_chunk()
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_is_that_of_the_oldest_complete_response() {
        let responses = Rc::<UnsentResponses>::default();
        let output = StreamOutput::new(&responses);
        let sent = output.begin_chunk();
        let incomplete = output.begin_chunk();
        assert_eq!(responses.deadline(TIMEOUT), None);
        drop(sent);
        drop(output);
        let start = Instant::now();
        assert_eq!(responses.deadline(TIMEOUT), Some(start + TIMEOUT));
        for _ in 0..9 {
            advance(TIMEOUT / 10).await;
            let _sent = complete_response(&responses);
            assert_eq!(responses.deadline(TIMEOUT), Some(start + TIMEOUT));
        }
        let second = complete_response(&responses);
        drop(incomplete);
        advance(TIMEOUT / 10).await;
        let second_deadline = start + 2 * TIMEOUT;
        assert_eq!(responses.deadline(TIMEOUT), Some(second_deadline));
        let third = complete_response(&responses);
        advance(TIMEOUT).await;
        let expired = responses.deadline(TIMEOUT);
        assert_eq!(expired, Some(second_deadline));
        drop((second, third));
        assert_eq!(responses.deadline(TIMEOUT), None);
    }
}
