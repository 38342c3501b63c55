//! The next deadline of a client connection, from its state.

use std::time::Duration;
use tokio::time::Instant;

use super::{ConnectionMonitor, ConnectionPhase, TimeoutKind};

/// Time limit for a client without requests to close its end after the connection was asked to
/// close.
const CLIENT_CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Idle time after which a connection releases its request buffers. Allocating the buffers again
/// costs about 2 µs, little for a client with less than ten requests per second.
pub(crate) const BUFFER_RELEASE_DELAY: Duration = Duration::from_millis(100);

impl ConnectionMonitor {
    /// Next deadline and the timeout that expires then.
    pub(crate) fn next_deadline(&self) -> Option<(Instant, TimeoutKind)> {
        // A connection with a blocked write or an incomplete field block is not idle, whatever its
        // requests do.
        let (stall, head) = (self.timeouts.write_stall, self.timeouts.request_head);
        let stalled = self.write_blocked_since.get();
        let stalled = stalled.map(|since| (since + stall, TimeoutKind::Stalled));
        let slow_block = self.field_block_since.get();
        let slow_block = slow_block.map(|since| (since + head, TimeoutKind::SlowHead));
        if let Some(next) = stalled
            .into_iter()
            .chain(slow_block)
            .min_by_key(|next| next.0)
        {
            return Some(next);
        }
        let unsent_kind = match self.closing_since.get() {
            Some(_) => TimeoutKind::Stalled,
            None => TimeoutKind::UnsentResponse,
        };
        // The client may read the rest of a response, also while the connection closes.
        let unsent = self.unsent_responses.deadline(self.timeouts.write_stall);
        let unsent = unsent.map(|at| (at, unsent_kind));
        unsent.or_else(|| self.phase_deadline())
    }

    /// Deadline of a connection without active requests.
    fn phase_deadline(&self) -> Option<(Instant, TimeoutKind)> {
        if self.has_active_requests() {
            return None;
        }
        match (self.phase.get(), self.closing_since.get()) {
            (ConnectionPhase::RequestHead(since), _) => {
                Some((since + self.timeouts.request_head, TimeoutKind::SlowHead))
            }
            (ConnectionPhase::Idle(since), None)
                if self.has_buffers.get() && self.timeouts.idle > BUFFER_RELEASE_DELAY =>
            {
                Some((since + BUFFER_RELEASE_DELAY, TimeoutKind::IdleBuffers))
            }
            (ConnectionPhase::Idle(since), None) => {
                Some((since + self.timeouts.idle, TimeoutKind::Idle))
            }
            // A connection that was asked to close and has no requests gives the client a short
            // time to close.
            (ConnectionPhase::Idle(since), Some(closing_since)) => {
                let emptied_at = self.unsent_responses.emptied_at.get().unwrap_or(since);
                let since = closing_since.max(since).max(emptied_at);
                Some((since + CLIENT_CLOSE_TIMEOUT, TimeoutKind::Stalled))
            }
        }
    }
}
