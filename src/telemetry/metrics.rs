//! Metrics: workers count where events happen, and the counts are summed on request.
//!
//! Counting must be cheap. Each worker writes to its own atomics ([`WorkerMetrics`], and its part
//! of each policy's [`PolicyCounters`]), without locks, allocation or shared cache lines. Labels
//! come from the configuration or from fixed sets, never from requests, so clients cannot make the
//! page grow.

mod exposition;
mod histogram;
mod labels;
mod page;
mod policy_counters;
mod process;
mod registry;
mod status;
mod store;
mod worker;

pub use exposition::ExpositionFormat;
pub use histogram::HistogramSnapshot;
pub use labels::{ConnectionCloseReason, ErrorKindLabels, RlsCallResult};
pub use policy_counters::{
    DECISION_LABELS, DEGRADED_REFUSED, HISTORY_DECISION_LABELS, PolicyCounters, PolicyDecision,
    RequestDecision,
};
pub use registry::Metrics;
pub use status::{
    MemoryStoreUsage, ProcessPhase, ProcessStatus, RedisServerMetrics, SpanExportCounts,
};
pub use worker::WorkerMetrics;

/// The component that decided on a request's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionSource {
    Redis,
    Memory,
    DenyCache,
    /// Units leased from the store in advance.
    Lease,
    /// The `on_store_failure` setting of the policies, because the store was unavailable.
    Degraded,
}

impl DecisionSource {
    const ALL: [Self; 5] = [
        Self::Redis,
        Self::Memory,
        Self::DenyCache,
        Self::Lease,
        Self::Degraded,
    ];

    pub fn label(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Memory => "memory",
            Self::DenyCache => "deny_cache",
            Self::Lease => "lease",
            Self::Degraded => "degraded",
        }
    }
}

#[cfg(test)]
mod tests;
