//! State that all workers of the process share.

use super::RedisSettings;
use super::circuit_breaker::RedisCircuitBreaker;
use super::scripts::ScriptLibrary;
use crate::clock::Clock;
use crate::limiter::Charge;
use crate::store::FallbackStore;
use crate::store::fallback::usage_directory::UsageDirectory;
use crate::telemetry::metrics::RedisServerMetrics;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// State that all connections of the process share.
#[derive(Debug)]
pub(super) struct RedisContext {
    pub(super) settings: RedisSettings,
    pub(super) scripts: ScriptLibrary,
    pub(super) breaker: RedisCircuitBreaker,
    /// Calls to Redis since the start.
    pub(super) call_count: AtomicU64,
    /// Memory, eviction policy and clock of Redis, as last polled. Empty while no server answers.
    pub(super) server_info: Mutex<RedisServerMetrics>,
    pub(super) fallback: FallbackStore,
    /// `store.state_dir`, if it is set.
    pub(super) usage_directory: Option<UsageDirectory>,
    /// The process' own clock.
    pub(super) clock: Clock,
    /// The unique id of the process.
    pub(super) instance_id: Box<str>,
    /// How many workers have drawn an id.
    pub(super) worker_count: AtomicU64,
    /// Whether a worker maintains the membership of the process.
    pub(super) has_joined_membership: AtomicBool,
}

impl RedisContext {
    /// Records that the counter of a charge holds a foreign value. `position` counts from 1.
    pub(super) fn record_foreign_value(&self, charges: &[Charge<'_>], position: usize) {
        self.breaker
            .record_foreign_value(|| self.scripts.counter_name_by_position(charges, position));
    }
}
