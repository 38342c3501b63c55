//! A value that tasks wait for.
//!
//! Waiting tasks continue in the order in which they began to wait. `tokio::sync::watch` wakes them
//! in a random order, so a simulation could not repeat a run.

use parking_lot::Mutex;
use tokio::sync::Notify;

/// A value that tasks can wait for.
#[derive(Debug, Default)]
pub(crate) struct WatchedValue<T> {
    value: Mutex<T>,
    changed: Notify,
}

impl<T: Clone> WatchedValue<T> {
    pub(super) fn new(value: T) -> Self {
        Self {
            value: Mutex::new(value),
            changed: Notify::new(),
        }
    }

    pub(super) fn get(&self) -> T {
        self.value.lock().clone()
    }

    /// Returns the previous value.
    pub(super) fn set(&self, value: T) -> T {
        let previous = std::mem::replace(&mut *self.value.lock(), value);
        self.changed.notify_waiters();
        previous
    }

    /// Waits for a value that meets a condition, and returns it.
    pub(super) async fn wait_for(&self, is_met: impl Fn(&T) -> bool) -> T {
        loop {
            let changed = self.changed.notified();
            let value = self.get();
            if is_met(&value) {
                return value;
            }
            changed.await;
        }
    }
}
