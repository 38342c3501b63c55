//! Label values of counters that workers record by index.

/// Lengths of tables in [`MetricLabels`]. They are constants because the counters and the history
/// are stored in arrays of these lengths.
/// Number of request decisions, both as counters and as labels.
pub(crate) const REQUEST_DECISION_COUNT: usize = 8;
pub(crate) const POLICY_HISTORY_SERIES_COUNT: usize = 10;

/// A label value, and the indices of the counters that it sums.
pub type LabelledCounterIndices = (&'static str, &'static [usize]);

/// Label values of counters. The module that defines the indices of a counter also defines their
/// labels.
#[derive(Debug, Default)]
pub struct MetricLabels {
    /// Labels for [`record_decision_time`](super::WorkerMetrics::record_decision_time).
    pub decision_sources: &'static [&'static str],
    /// Labels for [`record_request_decision`](super::WorkerMetrics::record_request_decision).
    pub request_decisions: [LabelledCounterIndices; REQUEST_DECISION_COUNT],
    /// Labels for [`record_policy_decision`](super::WorkerMetrics::record_policy_decision).
    pub policy_decisions: &'static [LabelledCounterIndices],
    /// Labels of the decisions of an enforced policy without the store, by outcome.
    pub degraded_outcomes: &'static [LabelledCounterIndices],
    /// Labels of the policy decisions that the traffic history keeps.
    pub policy_history: [LabelledCounterIndices; POLICY_HISTORY_SERIES_COUNT],
    /// Labels of [`WorkerMetrics::upstream_errors`](super::WorkerMetrics::upstream_errors).
    pub upstream_errors: &'static [&'static str],
    /// Indices of the upstream errors that the client did not cause.
    pub upstream_faults: &'static [usize],
    pub tls_errors: &'static [&'static str],
    pub proxy_header_errors: &'static [&'static str],
    pub close_reasons: &'static [&'static str],
    pub rls_call_results: &'static [&'static str],
}

/// The sum of the counts at `indices`.
pub(super) fn sum_at_indices(counts: &[u64], indices: &[usize]) -> u64 {
    indices.iter().filter_map(|index| counts.get(*index)).sum()
}
