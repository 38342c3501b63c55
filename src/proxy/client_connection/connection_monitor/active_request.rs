//! What keeps a connection busy: its requests.

use std::rc::Rc;
use tokio::time::Instant;

use super::{ConnectionMonitor, ConnectionPhase};

/// Guard that keeps a request active until all its clones are dropped.
#[derive(Debug)]
pub(crate) struct ActiveRequestGuard(pub(super) Rc<ConnectionMonitor>);

impl ActiveRequestGuard {
    pub(crate) fn monitor(&self) -> &Rc<ConnectionMonitor> {
        &self.0
    }
}

impl Clone for ActiveRequestGuard {
    fn clone(&self) -> Self {
        self.0.active_requests.update(|value| value + 1);
        Self(Rc::clone(&self.0))
    }
}

impl Drop for ActiveRequestGuard {
    fn drop(&mut self) {
        let monitor = &self.0;
        let active_requests = &monitor.active_requests;
        active_requests.update(|value| value - 1);
        if active_requests.get() == 0 {
            let now = Instant::now();
            monitor.phase.set(ConnectionPhase::Idle(now));
            monitor.connection.set_idle(now);
            // HTTP/2 streams end in their own tasks, so the driving task must be woken to read the
            // deadline.
            if monitor.is_http2.get() {
                monitor.connection.driver.wake();
            }
        }
    }
}
