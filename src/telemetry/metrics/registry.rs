//! The metrics of the process: the counters of all workers and policies, and their sums.

use super::histogram::{
    DECISION_TIME_BOUNDS, HistogramSnapshot, RESPONSE_TIME_BOUNDS, SingleWriterCounter,
};
use super::http_server::HttpServerMetrics;
use super::worker::{
    FIRST_STATUS_CODE, MetricLabels, PolicyCounters, REQUEST_DECISION_COUNT, WorkerMetrics,
    add_counters, sum_at_indices,
};
use crate::telemetry::top_rejections::TopRejections;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// The metrics of the process.
#[derive(Debug)]
pub struct Metrics {
    pub(super) workers: Box<[Arc<WorkerMetrics>]>,
    /// Counters by policy name. A removed policy keeps its counters: if they disappeared and
    /// returned with lower values, Prometheus would assume a restart. Only names of configured
    /// policies are added.
    pub(super) policy_counters: Mutex<BTreeMap<Arc<str>, Arc<PolicyCounters>>>,
    /// The label values of the counters.
    pub labels: MetricLabels,
    /// Present if metrics are exported by OTLP.
    pub(super) export_counts: Option<MetricExportCounts>,
    /// The most rejected keys and paths.
    pub top_rejections: TopRejections,
}

/// Exports by OTLP since the start, by result.
#[derive(Debug, Default)]
pub(super) struct MetricExportCounts {
    pub(super) successes: AtomicU64,
    pub(super) failures: AtomicU64,
}

impl Metrics {
    /// Creates the counters of `workers` workers.
    pub fn new(workers: usize, labels: MetricLabels) -> Arc<Self> {
        Self::with_export(workers, labels, false)
    }

    /// As [`Metrics::new`]. `is_exported` adds the counters that only an export by OTLP has.
    pub fn with_export(workers: usize, labels: MetricLabels, is_exported: bool) -> Arc<Self> {
        let new_worker = |index| WorkerMetrics::new(index, &labels, is_exported);
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
            export_counts: is_exported.then(MetricExportCounts::default),
            top_rejections,
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
