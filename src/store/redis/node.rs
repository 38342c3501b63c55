//! A master that this worker is connected to.

use super::connection::SupervisedConnection;
use super::settings::RedisAddress;
use std::sync::atomic::{AtomicU32, Ordering};
use tokio::time::Instant;

/// A master, with this worker's connection to it.
#[derive(Debug)]
pub(crate) struct RedisNode {
    pub(super) connection: SupervisedConnection,
    /// Consecutive failures, after which the connection is replaced and probed: the circuit breaker
    /// of one node of a cluster.
    consecutive_failures: AtomicU32,
    /// Calls wait for the first connection until this time.
    connect_by: Instant,
}

impl RedisNode {
    pub(super) fn new(connection: SupervisedConnection, connect_by: Instant) -> Self {
        Self {
            connection,
            consecutive_failures: AtomicU32::new(0),
            connect_by,
        }
    }

    /// `None` if sentinels name the server.
    pub(super) fn address(&self) -> Option<&RedisAddress> {
        self.connection.address()
    }

    /// Whether the node is new and not connected yet. Calls wait for a connecting node of a
    /// cluster, so that no call fails because of a slot migration.
    pub(super) fn is_connecting(&self) -> bool {
        !self.connection.was_ready() && Instant::now() < self.connect_by
    }

    /// Whether calls would be sent to the node, or wait for it.
    pub(super) fn is_available(&self) -> bool {
        self.connection.live().is_ok() || self.is_connecting()
    }

    /// Returns the number of consecutive failures.
    pub(super) fn record_failure(&self) -> u32 {
        let failures = self.consecutive_failures.fetch_add(1, Ordering::Relaxed);
        failures.saturating_add(1)
    }

    pub(super) fn reset_failures(&self) {
        if self.consecutive_failures.load(Ordering::Relaxed) != 0 {
            self.consecutive_failures.store(0, Ordering::Relaxed);
        }
    }
}
