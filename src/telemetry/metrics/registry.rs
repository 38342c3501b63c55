//! The counters that workers write, with their labels, and the metrics of the process: the sums of
//! all workers and policies.

use super::histogram::{
    DECISION_TIME_BOUNDS, DurationHistogram, HistogramSnapshot, RESPONSE_TIME_BOUNDS,
    SingleWriterCounter,
};
use super::http_server::{ActiveHttpRequest, HttpServerMetrics};
use crate::telemetry::top_rejections::{TopRejections, WorkerRejections};
use http::Method;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

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
    /// Labels for [`WorkerMetrics::record_decision_time`].
    pub decision_sources: &'static [&'static str],
    /// Labels for [`WorkerMetrics::record_request_decision`].
    pub request_decisions: [LabelledCounterIndices; REQUEST_DECISION_COUNT],
    /// Labels for [`WorkerMetrics::record_policy_decision`].
    pub policy_decisions: &'static [LabelledCounterIndices],
    /// Labels of the decisions of an enforced policy without the store, by outcome.
    pub degraded_outcomes: &'static [LabelledCounterIndices],
    /// Labels of the policy decisions that the traffic history keeps.
    pub policy_history: [LabelledCounterIndices; POLICY_HISTORY_SERIES_COUNT],
    /// Labels of [`WorkerMetrics::upstream_errors`].
    pub upstream_errors: &'static [&'static str],
    /// Indices of the upstream errors that the client did not cause.
    pub upstream_faults: &'static [usize],
    pub tls_errors: &'static [&'static str],
    pub proxy_header_errors: &'static [&'static str],
    pub close_reasons: &'static [&'static str],
    pub rls_call_results: &'static [&'static str],
}

/// The counters of one worker. Only that worker writes them.
///
/// The alignment keeps workers from sharing cache lines.
#[derive(Debug)]
#[repr(align(128))]
pub struct WorkerMetrics {
    worker: usize,
    decisions: Box<[DurationHistogram]>,
    requests: DurationHistogram,
    request_decisions: [SingleWriterCounter; REQUEST_DECISION_COUNT],
    /// The rejected keys and paths of this worker.
    pub rejections: Arc<WorkerRejections>,
    /// Responses by status code, starting at [`FIRST_STATUS_CODE`].
    status_counts: [SingleWriterCounter; STATUS_CODE_COUNT],
    pub upstream_errors: LabelledCounters,
    app_errors: SingleWriterCounter,
    pub tls_errors: LabelledCounters,
    pub proxy_header_errors: LabelledCounters,
    /// Connections that were closed.
    pub close_reasons: LabelledCounters,
    untrusted_forwarding: SingleWriterCounter,
    /// The last peer counted in `untrusted_forwarding`.
    last_untrusted_peer: Mutex<Option<IpAddr>>,
    /// Requests with a rejected token, while a policy reads a claim.
    pub rejected_tokens: SingleWriterCounter,
    /// Calls of the rate-limit service by result.
    pub rls_calls: LabelledCounters,
    /// Descriptors that no policy matches.
    pub unmatched_descriptors: SingleWriterCounter,
    /// Settlements that could not be sent to the store.
    pub lost_settlements: SingleWriterCounter,
    /// Responses that did not report their cost.
    pub unreported_costs: SingleWriterCounter,
    /// Responses that were ended because their key had nothing left.
    pub cut_offs: SingleWriterCounter,
    /// Notified thresholds, of all workers.
    pub notifications: Arc<NotificationCounters>,
    /// Present if metrics are exported by OTLP.
    http_server: Option<Arc<HttpServerMetrics>>,
}

const FIRST_STATUS_CODE: u16 = 100;
/// Number of status codes that a response can have: 100 to 999.
const STATUS_CODE_COUNT: usize = 900;

impl WorkerMetrics {
    fn new(worker: usize, labels: &MetricLabels, is_exported: bool) -> Self {
        let decisions = labels.decision_sources.iter();
        Self {
            worker,
            decisions: decisions
                .map(|_| DurationHistogram::new(&DECISION_TIME_BOUNDS))
                .collect(),
            requests: DurationHistogram::new(&RESPONSE_TIME_BOUNDS),
            request_decisions: Default::default(),
            rejections: Arc::default(),
            status_counts: std::array::from_fn(|_| SingleWriterCounter::default()),
            upstream_errors: LabelledCounters::new(labels.upstream_errors),
            app_errors: SingleWriterCounter::default(),
            tls_errors: LabelledCounters::new(labels.tls_errors),
            proxy_header_errors: LabelledCounters::new(labels.proxy_header_errors),
            close_reasons: LabelledCounters::new(labels.close_reasons),
            untrusted_forwarding: SingleWriterCounter::default(),
            last_untrusted_peer: Mutex::default(),
            rejected_tokens: SingleWriterCounter::default(),
            rls_calls: LabelledCounters::new(labels.rls_call_results),
            unmatched_descriptors: SingleWriterCounter::default(),
            lost_settlements: SingleWriterCounter::default(),
            unreported_costs: SingleWriterCounter::default(),
            cut_offs: SingleWriterCounter::default(),
            notifications: Arc::default(),
            http_server: is_exported.then(Arc::default),
        }
    }

    /// Records the decision of a policy on a request. `decision` is the index of a counter;
    /// [`MetricLabels::policy_decisions`] labels the counters.
    pub fn record_policy_decision(&self, counters: &PolicyCounters, decision: usize) {
        if let Some(own_part) = counters.workers.get(self.worker) {
            increment_counter_at(&own_part.0, decision);
        }
    }

    /// Records the decision on a request by all policies together. `decision` is the index of a
    /// counter; [`MetricLabels::request_decisions`] labels the counters.
    pub fn record_request_decision(&self, decision: usize) {
        increment_counter_at(&self.request_decisions, decision);
    }

    /// Records the time to a decision on a request's limits. `source` is an index into
    /// [`MetricLabels::decision_sources`].
    pub fn record_decision_time(&self, source: usize, time: Duration) {
        if let Some(histogram) = self.decisions.get(source) {
            histogram.observe(time);
        }
    }

    /// Begins a request, if its metrics are exported.
    pub fn begin_http_request(
        &self,
        method: &Method,
        is_https: bool,
    ) -> Option<Box<ActiveHttpRequest>> {
        let metrics = self.http_server.as_ref()?;
        Some(Box::new(ActiveHttpRequest::begin(
            metrics, method, is_https,
        )))
    }

    /// Records a response and the time until its head was ready.
    pub fn record_response(&self, code: u16, time: Duration) {
        self.record_status(code);
        self.requests.observe(time);
    }

    /// Records the status code of a response, without a duration, as for an unreadable request.
    pub fn record_status(&self, code: u16) {
        let index = usize::from(code.saturating_sub(FIRST_STATUS_CODE));
        increment_counter_at(&self.status_counts, index);
    }

    /// Records a response of the upstream with a status from 500 on.
    pub fn record_app_error(&self, path: &str) {
        self.app_errors.add(1);
        self.rejections.record_app_error(path);
    }

    /// Records a forwarding header from an untrusted peer, while a policy depends on the client's
    /// address.
    pub fn record_untrusted_forwarding(&self, peer: IpAddr) {
        self.untrusted_forwarding.add(1);
        *self.last_untrusted_peer.lock() = Some(peer);
    }
}

/// The counters of one metric, one per label value.
#[derive(Debug)]
pub struct LabelledCounters(pub(super) Box<[SingleWriterCounter]>);

impl LabelledCounters {
    fn new(labels: &[&str]) -> Self {
        let counters = labels.iter().map(|_| SingleWriterCounter::default());
        Self(counters.collect())
    }

    /// Counts one event. `label` is the index of its label value.
    pub fn increment(&self, label: usize) {
        increment_counter_at(&self.0, label);
    }
}

/// The counters of one policy. Workers do not share cache lines, and each writes only its own part.
#[derive(Debug)]
pub struct PolicyCounters {
    pub policy_name: Arc<str>,
    workers: Box<[WorkerPolicyCounters]>,
}

/// Number of counters per policy and worker; they fill two cache lines.
const COUNTERS_PER_WORKER: usize = 16;

#[derive(Debug, Default)]
#[repr(align(64))]
struct WorkerPolicyCounters([SingleWriterCounter; COUNTERS_PER_WORKER]);

impl PolicyCounters {
    fn new(policy_name: Arc<str>, workers: usize) -> Self {
        let workers = (0..workers).map(|_| WorkerPolicyCounters::default());
        Self {
            policy_name,
            workers: workers.collect(),
        }
    }

    /// Returns the number of requests since the start, by label. Each counter is read once, so that
    /// labels that share counters are consistent.
    pub fn requests_by_label<'l>(
        &self,
        labels: &'l [LabelledCounterIndices],
    ) -> impl Iterator<Item = (&'static str, u64)> + use<'l> {
        let mut totals = [0; COUNTERS_PER_WORKER];
        for worker in &self.workers {
            add_counters(&mut totals, &worker.0);
        }
        labels
            .iter()
            .map(move |(label, indices)| (*label, sum_at_indices(&totals, indices)))
    }
}

/// The notified thresholds by policy, limit and threshold. They are rare, so that the lock costs
/// nothing. The labels come from the configuration; removed ones keep their counts.
#[derive(Debug, Default)]
pub struct NotificationCounters(Mutex<BTreeMap<[Box<str>; 3], u64>>);

impl NotificationCounters {
    /// Adds to a count. Adding 0 makes it appear in the metrics.
    pub fn add(&self, labels: [&str; 3], count: u64) {
        *self.0.lock().entry(labels.map(Into::into)).or_default() += count;
    }

    /// A copy of all counts.
    pub fn counts(&self) -> BTreeMap<[Box<str>; 3], u64> {
        self.0.lock().clone()
    }
}

fn increment_counter_at(counters: &[SingleWriterCounter], index: usize) {
    if let Some(counter) = counters.get(index) {
        counter.add(1);
    }
}

/// Adds the counters of a worker to the sums of all workers.
fn add_counters(sums: &mut [u64], counters: &[SingleWriterCounter]) {
    for (sum, counter) in sums.iter_mut().zip(counters) {
        *sum += counter.get();
    }
}

/// The sum of the counts at `indices`.
fn sum_at_indices(counts: &[u64], indices: &[usize]) -> u64 {
    indices.iter().filter_map(|index| counts.get(*index)).sum()
}

/// The metrics of the process.
#[derive(Debug)]
pub struct Metrics {
    workers: Box<[Arc<WorkerMetrics>]>,
    /// Counters by policy name. A removed policy keeps its counters: if they disappeared and
    /// returned with lower values, Prometheus would assume a restart. Only names of configured
    /// policies are added.
    pub(super) policy_counters: Mutex<BTreeMap<Arc<str>, Arc<PolicyCounters>>>,
    /// The label values of the counters.
    pub labels: MetricLabels,
    /// Successful and failed exports by OTLP, if there are any exports.
    pub(super) export_counts: Option<[AtomicU64; 2]>,
    /// The most rejected keys and paths.
    pub top_rejections: TopRejections,
    /// Notified thresholds.
    pub notifications: Arc<NotificationCounters>,
}

impl Metrics {
    /// Creates the counters of `workers` workers.
    pub fn new(workers: usize, labels: MetricLabels) -> Arc<Self> {
        Self::with_export(workers, labels, false)
    }

    /// As [`Metrics::new`]. `is_exported` adds the counters that only an export by OTLP has.
    pub fn with_export(workers: usize, labels: MetricLabels, is_exported: bool) -> Arc<Self> {
        let notifications = Arc::<NotificationCounters>::default();
        let new_worker = |index| WorkerMetrics {
            notifications: Arc::clone(&notifications),
            ..WorkerMetrics::new(index, &labels, is_exported)
        };
        let worker_metrics: Box<[Arc<WorkerMetrics>]> = (0..workers)
            .map(|index| Arc::new(new_worker(index)))
            .collect();
        let rejections = worker_metrics.iter();
        let rejections = rejections.map(|worker| Arc::clone(&worker.rejections));
        let top_rejections = TopRejections::from_workers(rejections.collect());
        Arc::new(Self {
            workers: worker_metrics,
            policy_counters: Mutex::default(),
            labels,
            export_counts: is_exported.then(Default::default),
            top_rejections,
            notifications,
        })
    }

    /// Returns the counters of a worker. Counters of a worker beyond the number given to
    /// [`Metrics::new`] do not appear in the metrics.
    pub fn worker_metrics(&self, worker: usize) -> Arc<WorkerMetrics> {
        let unregistered = || Arc::new(WorkerMetrics::new(worker, &self.labels, false));
        self.workers
            .get(worker)
            .map_or_else(unregistered, Arc::clone)
    }

    /// Returns the counters of the named policies, and creates missing ones. Counters survive a
    /// reload.
    pub fn get_or_create_policy_counters<'n>(
        &self,
        names: impl Iterator<Item = &'n str>,
    ) -> Box<[Arc<PolicyCounters>]> {
        let mut counters = self.policy_counters.lock();
        let found = names.map(|name| match counters.get(name) {
            Some(policy_counters) => Arc::clone(policy_counters),
            None => {
                let name: Arc<str> = name.into();
                let policy_counters =
                    Arc::new(PolicyCounters::new(Arc::clone(&name), self.workers.len()));
                Arc::clone(counters.entry(name).or_insert(policy_counters))
            }
        });
        found.collect()
    }

    /// Number of requests since the start, by [`MetricLabels::request_decisions`].
    pub fn request_decision_counts(&self) -> [u64; REQUEST_DECISION_COUNT] {
        let totals = self.sum_counters(|worker| &worker.request_decisions);
        let labels = self.labels.request_decisions;
        labels.map(|(_, indices)| sum_at_indices(&totals, indices))
    }

    /// Number of responses since the start by status code, without codes that did not occur.
    pub fn status_counts(&self) -> Vec<(u16, u64)> {
        let counts = self.sum_counters(|worker| &worker.status_counts);
        let counts = (FIRST_STATUS_CODE..).zip(counts);
        counts.filter(|(_, count)| *count > 0).collect()
    }

    /// Number of requests since the start without a response from the upstream, by kind of error.
    pub fn upstream_error_counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = self.sum_counters(|worker| &worker.upstream_errors.0);
        self.labels.upstream_errors.iter().copied().zip(counts)
    }

    /// Number of requests since the start that failed at the upstream by no fault of the client.
    pub fn upstream_fault_count(&self) -> u64 {
        let counts = self.sum_counters(|worker| &worker.upstream_errors.0);
        sum_at_indices(&counts, self.labels.upstream_faults)
    }

    /// Number of responses of the upstream since the start with a status from 500 on.
    pub fn app_error_count(&self) -> u64 {
        self.sum_counter(|worker| &worker.app_errors)
    }

    /// Histograms of the time to a decision since the process started, by decision source.
    pub fn decision_durations(&self) -> Vec<(&'static str, HistogramSnapshot)> {
        let sources = self.labels.decision_sources.iter().enumerate();
        let snapshots = sources.map(|(at, source)| {
            let workers = self.workers.iter();
            let parts = workers.filter_map(|worker| worker.decisions.get(at));
            let sum = HistogramSnapshot::from_histograms(&DECISION_TIME_BOUNDS, parts);
            (*source, sum)
        });
        snapshots.collect()
    }

    /// Histogram of the time to the response head, over all requests since the process started.
    pub fn response_durations(&self) -> HistogramSnapshot {
        let parts = self.workers.iter().map(|worker| &worker.requests);
        HistogramSnapshot::from_histograms(&RESPONSE_TIME_BOUNDS, parts)
    }

    /// Number of requests since the start with a forwarding header from an untrusted peer, while a
    /// policy depended on the client's address.
    pub fn untrusted_forwarding_count(&self) -> u64 {
        self.sum_counter(|worker| &worker.untrusted_forwarding)
    }

    /// The untrusted peers that sent forwarding headers: the last one of each worker.
    pub fn last_untrusted_peers(&self) -> BTreeSet<IpAddr> {
        let workers = self.workers.iter();
        workers
            .filter_map(|worker| *worker.last_untrusted_peer.lock())
            .collect()
    }

    /// The HTTP metrics of all workers; empty if metrics are not exported.
    pub(super) fn http_server_metrics(&self) -> Vec<&HttpServerMetrics> {
        let workers = self.workers.iter();
        workers
            .filter_map(|worker| worker.http_server.as_deref())
            .collect()
    }

    pub(super) fn sum_counter(&self, of: fn(&WorkerMetrics) -> &SingleWriterCounter) -> u64 {
        self.workers.iter().map(|worker| of(worker).get()).sum()
    }

    pub(super) fn sum_counters(
        &self,
        of: fn(&WorkerMetrics) -> &[SingleWriterCounter],
    ) -> Vec<u64> {
        let mut sums = Vec::new();
        for worker in &self.workers {
            let counters = of(worker);
            sums.resize(counters.len(), 0);
            add_counters(&mut sums, counters);
        }
        sums
    }
}
