//! Label values of counters that workers record by index.

/// Lengths of tables in [`MetricLabels`]. They are constants because the counters of each request
/// and the history are plain arrays.
pub(in crate::telemetry) const DECISION_SOURCES: usize = 5;
/// Number of counters and of labels.
pub(in crate::telemetry) const REQUEST_DECISIONS: usize = 8;
pub(in crate::telemetry) const RLS_CALL_RESULTS: usize = 5;
pub(in crate::telemetry) const POLICY_HISTORY_SERIES: usize = 9;

/// A label value, and the indices of the counters that it sums.
pub type LabelledCounters = (&'static str, &'static [usize]);

/// Label values of counters. The modules that decide on an index define its labels.
#[derive(Debug, Default)]
pub struct MetricLabels {
    /// For [`record_decision_time`](super::WorkerMetrics::record_decision_time).
    pub decision_sources: [&'static str; DECISION_SOURCES],
    /// For [`record_request_decision`](super::WorkerMetrics::record_request_decision).
    pub request_decisions: [LabelledCounters; REQUEST_DECISIONS],
    /// For [`record_policy_decision`](super::WorkerMetrics::record_policy_decision), like the next
    /// two.
    pub policy_decisions: &'static [LabelledCounters],
    /// Decisions of an enforced policy without the store, by outcome.
    pub degraded_outcomes: &'static [LabelledCounters],
    /// What the history keeps of each policy.
    pub policy_history: [LabelledCounters; POLICY_HISTORY_SERIES],
    /// For [`record_upstream_error`](super::WorkerMetrics::record_upstream_error).
    pub upstream_errors: &'static [&'static str],
    /// For [`record_tls_error`](super::WorkerMetrics::record_tls_error).
    pub tls_errors: &'static [&'static str],
    /// For [`record_proxy_header_error`](super::WorkerMetrics::record_proxy_header_error).
    pub proxy_header_errors: &'static [&'static str],
    /// For [`record_connection_closed`](super::WorkerMetrics::record_connection_closed).
    pub close_reasons: &'static [&'static str],
    /// For [`record_rls_call`](super::WorkerMetrics::record_rls_call).
    pub rls_call_results: [&'static str; RLS_CALL_RESULTS],
}

/// The sum of the counts at `indices`.
pub(super) fn sum_selected(counts: &[u64], indices: &[usize]) -> u64 {
    indices.iter().filter_map(|index| counts.get(*index)).sum()
}
