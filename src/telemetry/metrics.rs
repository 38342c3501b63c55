//! Metrics: workers count where events happen, and the counts are summed on request.
//!
//! Counting must be cheap. Each worker writes to its own atomics ([`WorkerMetrics`], and its part
//! of each policy's [`PolicyCounters`]), without locks, allocation or shared cache lines. Labels
//! come from the configuration or from fixed sets, never from requests, so clients cannot make the
//! metrics page grow.

mod exporter;
mod exposition;
mod histogram;
mod http_server;
mod labels;
mod otlp_output;
mod output;
mod page;
mod policy_counters;
mod registry;
mod status;
mod worker;

pub use exporter::{MetricExportSettings, MetricExporter};
pub use exposition::ExpositionFormat;
pub use histogram::HistogramSnapshot;
pub use http_server::ActiveHttpRequest;
pub use labels::{LabelledCounterIndices, MetricLabels};
pub(super) use labels::{POLICY_HISTORY_SERIES_COUNT, REQUEST_DECISION_COUNT};
pub use policy_counters::PolicyCounters;
pub use registry::Metrics;
pub use status::{
    KeyFetchCounts, MemoryStoreUsage, ProcessPhase, ProcessStatus, RedisServerMetrics,
    SpanExportCounts, StoreOutage,
};
pub use worker::{LabelledCounters, WorkerMetrics};

#[cfg(test)]
mod tests;
