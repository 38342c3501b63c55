//! The metrics of the process: the counters of all workers and policies, and their sums.

use super::histogram::{DECISION_BOUNDS, HistogramSnapshot, REQUEST_BOUNDS, SingleWriterCounter};
use super::labels::{MetricLabels, REQUEST_DECISIONS, sum_selected};
use super::policy_counters::PolicyCounters;
use super::worker::{FIRST_STATUS_CODE, STATUS_CODE_COUNT, WorkerMetrics};
use crate::telemetry::top_rejections::TopRejections;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

/// The metrics of the process.
#[derive(Debug)]
pub struct Metrics {
    pub(super) workers: Box<[Arc<WorkerMetrics>]>,
    /// By policy name. A removed policy keeps its counters: if they disappeared and returned with
    /// lower values, Prometheus would assume a restart. Only configured names are ever added.
    pub(super) policy_counters: Mutex<BTreeMap<Arc<str>, Arc<PolicyCounters>>>,
    pub(super) labels: MetricLabels,
    top_rejections: TopRejections,
}

impl Metrics {
    /// Creates the counters of `workers` workers.
    pub fn new(workers: usize, labels: MetricLabels) -> Arc<Self> {
        let worker_metrics: Box<[Arc<WorkerMetrics>]> = (0..workers)
            .map(|index| Arc::new(WorkerMetrics::new(index, &labels)))
            .collect();
        let top_rejections = TopRejections::from_workers(
            worker_metrics
                .iter()
                .map(|worker| Arc::clone(&worker.refusals))
                .collect(),
        );
        Arc::new(Self {
            workers: worker_metrics,
            policy_counters: Mutex::default(),
            labels,
            top_rejections,
        })
    }

    /// The counters of a worker. Those of a worker beyond the number given to [`Metrics::new`] do
    /// not appear in the metrics.
    pub fn worker_metrics(&self, worker: usize) -> Arc<WorkerMetrics> {
        let unregistered = || Arc::new(WorkerMetrics::new(worker, &self.labels));
        self.workers
            .get(worker)
            .map_or_else(unregistered, Arc::clone)
    }

    /// The counters of policies by name, which survive a reload.
    pub fn policy_counters<'n>(
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

    /// The most rejected keys and paths.
    pub fn top_rejections(&self) -> &TopRejections {
        &self.top_rejections
    }

    /// The label values of the counters.
    pub fn labels(&self) -> &MetricLabels {
        &self.labels
    }

    /// Requests so far, by [`MetricLabels::request_decisions`].
    pub fn request_decisions(&self) -> [u64; REQUEST_DECISIONS] {
        let totals: [u64; REQUEST_DECISIONS] = std::array::from_fn(|index| {
            self.sum_optional_counter(|worker| worker.request_decisions.get(index))
        });
        let labels = self.labels.request_decisions;
        labels.map(|(_, indices)| sum_selected(&totals, indices))
    }

    /// Responses so far by status code, without codes that did not occur.
    pub fn status_counts(&self) -> Vec<(u16, u64)> {
        let codes = (FIRST_STATUS_CODE..).zip(0..STATUS_CODE_COUNT);
        let counts = codes.map(|(code, at)| {
            (
                code,
                self.sum_optional_counter(|worker| worker.status_counts.get(at)),
            )
        });
        counts.filter(|(_, count)| *count > 0).collect()
    }

    /// Requests so far without a response from the upstream, by kind.
    pub fn upstream_errors(&self) -> Vec<(&'static str, u64)> {
        let kinds = self.labels.upstream_errors.iter().enumerate();
        kinds
            .map(|(at, kind)| {
                (
                    *kind,
                    self.sum_optional_counter(|worker| worker.upstream_errors.get(at)),
                )
            })
            .collect()
    }

    /// Time to a decision so far, by decision source.
    pub fn decision_durations(&self) -> Vec<(&'static str, HistogramSnapshot)> {
        let sources = self.labels.decision_sources.iter().enumerate();
        let snapshots = sources.map(|(at, source)| {
            let parts = self
                .workers
                .iter()
                .filter_map(|worker| worker.decisions.get(at));
            (
                *source,
                HistogramSnapshot::from_histograms(&DECISION_BOUNDS, parts),
            )
        });
        snapshots.collect()
    }

    /// Time to the response head so far.
    pub fn response_durations(&self) -> HistogramSnapshot {
        HistogramSnapshot::from_histograms(
            &REQUEST_BOUNDS,
            self.workers.iter().map(|worker| &worker.requests),
        )
    }

    /// Requests so far with a forwarding header from an untrusted peer, while a policy depends on
    /// the client's address.
    pub fn untrusted_forwarding(&self) -> u64 {
        self.sum_counter(|worker| &worker.untrusted_forwarding)
    }

    /// The last such peer of each worker.
    pub fn untrusted_peers(&self) -> BTreeSet<IpAddr> {
        self.workers
            .iter()
            .filter_map(|worker| *worker.last_untrusted_peer.lock())
            .collect()
    }

    pub(super) fn sum_counter(
        &self,
        count: impl Fn(&WorkerMetrics) -> &SingleWriterCounter,
    ) -> u64 {
        self.sum_optional_counter(|worker| Some(count(worker)))
    }

    pub(super) fn sum_optional_counter(
        &self,
        count: impl Fn(&WorkerMetrics) -> Option<&SingleWriterCounter>,
    ) -> u64 {
        self.workers
            .iter()
            .filter_map(|worker| count(worker))
            .map(SingleWriterCounter::get)
            .sum()
    }
}
