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
mod otlp_output;
mod page;
mod registry;
mod status;

pub use exporter::{MetricExportSettings, start_metric_export};
pub use exposition::ExpositionFormat;
pub use histogram::{HistogramSnapshot, SingleWriterCounter};
pub use http_server::ActiveHttpRequest;
pub use registry::{
    LabelledCounterIndices, LabelledCounters, MetricLabels, Metrics, PolicyCounters, WorkerMetrics,
};
pub(super) use registry::{POLICY_HISTORY_SERIES_COUNT, REQUEST_DECISION_COUNT};
pub use status::{
    CertificateExpiry, ConnectionCounts, KeyFetchCounts, LastReload, MemoryStoreUsage,
    ProcessPhase, ProcessStatus, RedisServerMetrics, StoreOutage, StoreStatus,
};

#[cfg(test)]
mod tests;
