//! Drain of one connection: at shutdown, or because of its age.

use std::cell::Cell;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::ConnectionMonitor;

/// How a draining connection ends. Its next response is the last one; HTTP/2 clients are told by
/// GOAWAY.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionDrain {
    /// Time before which a connection without requests stays open.
    pub(crate) closes_from: Instant,
    /// Time for one more request from the start of the connection's drain. Closing an idle
    /// connection earlier would lose a request that is on its way.
    pub(crate) request_delay: Duration,
    /// Time from which WebSockets are closed with 1001, "going away" (RFC 6455, 7.4.1). `None`:
    /// they stay open.
    pub(crate) websockets_close_at: Option<Instant>,
}

/// Progress of a connection's drain.
#[derive(Debug, Default)]
pub(crate) struct DrainState {
    /// The request of [`ConnectionMonitor::request_drain`], until the driving task takes it.
    pub(crate) requested: Cell<Option<ConnectionDrain>>,
    /// Whether a drain was requested: the next response is the last one.
    pub(crate) is_draining: Cell<bool>,
    /// End of `max_connection_age`, until the drain that it causes.
    pub(crate) age_ends_at: Cell<Option<Instant>>,
    websockets_close_at: Cell<Option<Instant>>,
    websocket_close_signal: Notify,
}

impl ConnectionMonitor {
    /// Asks the connection to close gracefully once its current work is finished.
    pub(crate) fn request_drain(&self, drain: ConnectionDrain) {
        let state = &self.drain;
        state.age_ends_at.set(None);
        state.requested.set(Some(drain));
        state.is_draining.set(true);
        if drain.websockets_close_at.is_some() {
            state.websockets_close_at.set(drain.websockets_close_at);
            state.websocket_close_signal.notify_waiters();
        }
        self.connection.wake_driver();
    }

    /// Waits for the time at which a WebSocket must close because the server shuts down.
    pub(crate) async fn wait_for_websocket_close(&self) {
        let signal = self.drain.websocket_close_signal.notified();
        if self.drain.websockets_close_at.get().is_none() {
            signal.await;
        }
        if let Some(at) = self.drain.websockets_close_at.get() {
            sleep_until(at).await;
        }
    }

    /// Sets the time after which the connection drains.
    pub(crate) fn set_age_limit(&self, limit: Option<Duration>) {
        let ends_at = limit.map(|limit| Instant::now() + limit);
        self.drain.age_ends_at.set(ends_at);
    }

    /// Starts the drain of a connection that is too old. Without a request it stays open until its
    /// idle timeout.
    pub(crate) fn drain_for_age(&self) {
        self.request_drain(ConnectionDrain {
            closes_from: Instant::now() + self.timeouts.idle,
            request_delay: Duration::ZERO,
            websockets_close_at: None,
        });
    }
}
