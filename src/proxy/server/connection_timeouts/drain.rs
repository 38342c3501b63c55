//! Drain of one connection: at shutdown, or because of its age.

use std::time::Duration;
use tokio::time::{Instant, sleep_until};

use super::ConnectionMonitor;

/// How a draining connection ends. Its next response is the last one; HTTP/2 clients are told by
/// GOAWAY.
#[derive(Clone, Copy, Debug)]
pub(in crate::proxy) struct ConnectionDrain {
    /// Time before which a connection without requests stays open.
    pub(in crate::proxy) closes_from: Instant,
    /// Time for one more request from the start of the connection's drain. Closing an idle
    /// connection earlier would lose a request that is on its way.
    pub(in crate::proxy) request_delay: Duration,
    /// Time from which WebSockets are closed with 1001, "going away" (RFC 6455, 7.4.1). `None`:
    /// they stay open.
    pub(in crate::proxy) websockets_close_at: Option<Instant>,
}

impl ConnectionMonitor {
    /// Asks the connection to close gracefully once its current work is finished.
    pub(in crate::proxy) fn request_drain(&self, drain: ConnectionDrain) {
        self.age_ends_at.set(None);
        self.drain_requested.set(Some(drain));
        self.is_draining.set(true);
        if drain.websockets_close_at.is_some() {
            self.websockets_close_at.set(drain.websockets_close_at);
            self.websocket_close_signal.notify_waiters();
        }
        self.wake_driver();
    }

    /// Waits for the time at which a WebSocket must close because the server shuts down.
    pub(in crate::proxy) async fn wait_for_websocket_close(&self) {
        let signal = self.websocket_close_signal.notified();
        if self.websockets_close_at.get().is_none() {
            signal.await;
        }
        if let Some(at) = self.websockets_close_at.get() {
            sleep_until(at).await;
        }
    }

    /// Whether [`ConnectionMonitor::request_drain`] was called: the next response is the last one.
    pub(in crate::proxy) fn is_draining(&self) -> bool {
        self.is_draining.get()
    }

    /// Sets the time after which the connection drains.
    pub(in crate::proxy) fn set_age_limit(&self, limit: Option<Duration>) {
        self.age_ends_at
            .set(limit.map(|limit| Instant::now() + limit));
    }

    pub(in crate::proxy) fn age_ends_at(&self) -> Option<Instant> {
        self.age_ends_at.get()
    }

    /// Starts the drain of a connection that is too old. Without a request it stays open until its
    /// idle timeout.
    pub(in crate::proxy) fn drain_for_age(&self) {
        self.request_drain(ConnectionDrain {
            closes_from: Instant::now() + self.timeouts.idle,
            request_delay: Duration::ZERO,
            websockets_close_at: None,
        });
    }

    /// Whether a drain request is waiting for the driving task.
    pub(in crate::proxy) fn is_drain_pending(&self) -> bool {
        self.drain_requested.get().is_some()
    }

    /// Takes the request of [`ConnectionMonitor::request_drain`].
    pub(in crate::proxy) fn take_drain_request(&self) -> Option<ConnectionDrain> {
        self.drain_requested.take()
    }
}
