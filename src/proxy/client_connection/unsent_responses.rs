//! Complete responses that an HTTP/2 connection holds while the client grants no flow-control
//! window.
//!
//! hyper ends the task of a stream once h2 has taken its last chunk. A client that grants less
//! window than the chunk needs would keep the chunk and its stream for as long as the connection is
//! busy. The age of the oldest response is known to within one timeout: responses are counted in
//! two generations.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;
use tokio::time::Instant;

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

/// Chunks of one stream.
#[derive(Debug)]
struct StreamChunks {
    responses: Rc<UnsentResponses>,
    unsent: Cell<usize>,
    /// Generation of the response, if it is complete and unsent.
    generation: Cell<Option<u64>>,
}

/// Guard of a chunk, dropped when h2 has written the chunk or reset the stream.
#[derive(Debug)]
pub(crate) struct UnsentChunkGuard(Rc<StreamChunks>);

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
            unsent: Cell::new(0),
            generation: Cell::new(None),
        }))
    }

    /// Counts a chunk as unsent until the guard is dropped.
    pub(crate) fn begin_chunk(&self) -> UnsentChunkGuard {
        self.0.unsent.update(|value| value + 1);
        UnsentChunkGuard(Rc::clone(&self.0))
    }
}

impl Drop for StreamOutput {
    fn drop(&mut self) {
        if self.0.unsent.get() > 0 {
            self.0.generation.set(Some(self.0.responses.add()));
        }
    }
}

impl Drop for UnsentChunkGuard {
    fn drop(&mut self) {
        let chunks = &self.0;
        chunks.unsent.update(|value| value - 1);
        if chunks.unsent.get() == 0
            && let Some(generation) = chunks.generation.take()
        {
            chunks.responses.remove(generation);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{StreamOutput, UnsentChunkGuard, UnsentResponses};
    use std::rc::Rc;
    use std::time::Duration;
    use tokio::time::{Instant, advance};

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
