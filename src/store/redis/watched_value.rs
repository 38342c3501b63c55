//! A value that tasks wait for.
//!
//! Waiting tasks continue in the order in which they began to wait. `tokio::sync::watch` wakes them
//! in a random order, so a simulation could not repeat a run.

use parking_lot::Mutex;
use std::sync::Arc;
use tokio::sync::Notify;

/// A value that tasks can wait for. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(super) struct WatchedValue<T>(Arc<WatchedValueInner<T>>);

#[derive(Debug, Default)]
struct WatchedValueInner<T> {
    value: Mutex<T>,
    changed: Notify,
}

impl<T: Clone> WatchedValue<T> {
    pub(super) fn new(value: T) -> Self {
        Self(Arc::new(WatchedValueInner {
            value: Mutex::new(value),
            changed: Notify::new(),
        }))
    }

    pub(super) fn get(&self) -> T {
        self.0.value.lock().clone()
    }

    pub(super) fn set(&self, value: T) {
        *self.0.value.lock() = value;
        self.0.changed.notify_waiters();
    }

    /// Waits for a value that meets a condition, and returns it.
    pub(super) async fn wait_for(&self, is_met: impl Fn(&T) -> bool) -> T {
        loop {
            let changed = self.0.changed.notified();
            let value = self.get();
            if is_met(&value) {
                return value;
            }
            changed.await;
        }
    }
}
