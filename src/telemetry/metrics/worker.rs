//! The counters of one worker.

use super::histogram::{
    DECISION_TIME_BOUNDS, DurationHistogram, RESPONSE_TIME_BOUNDS, SingleWriterCounter,
};
use super::http_server::{ActiveHttpRequest, HttpServerMetrics};
use super::labels::{MetricLabels, REQUEST_DECISION_COUNT};
use super::policy_counters::PolicyCounters;
use crate::telemetry::top_rejections::WorkerRejections;
use http::Method;
use parking_lot::Mutex;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// The counters of one worker. Only that worker writes them.
///
/// The alignment keeps workers from sharing cache lines.
#[derive(Debug)]
#[repr(align(128))]
pub struct WorkerMetrics {
    worker: usize,
    pub(super) decisions: Box<[DurationHistogram]>,
    pub(super) requests: DurationHistogram,
    pub(super) request_decisions: [SingleWriterCounter; REQUEST_DECISION_COUNT],
    pub(super) rejections: Arc<WorkerRejections>,
    /// Responses by status code, starting at [`FIRST_STATUS_CODE`].
    pub(super) status_counts: [SingleWriterCounter; STATUS_CODE_COUNT],
    pub upstream_errors: LabelledCounters,
    pub(super) app_errors: SingleWriterCounter,
    pub tls_errors: LabelledCounters,
    pub proxy_header_errors: LabelledCounters,
    /// Connections that were closed.
    pub close_reasons: LabelledCounters,
    pub(super) untrusted_forwarding: SingleWriterCounter,
    /// The last peer counted in `untrusted_forwarding`.
    pub(super) last_untrusted_peer: Mutex<Option<IpAddr>>,
    pub(super) rejected_tokens: SingleWriterCounter,
    /// Calls of the rate-limit service by result.
    pub rls_calls: LabelledCounters,
    pub(super) unmatched_descriptors: SingleWriterCounter,
    pub(super) lost_settlements: SingleWriterCounter,
    /// Present if metrics are exported by OTLP.
    pub(super) http_server: Option<Arc<HttpServerMetrics>>,
}

pub(super) const FIRST_STATUS_CODE: u16 = 100;
/// Number of status codes that a response can have: 100 to 999.
pub(super) const STATUS_CODE_COUNT: usize = 900;

impl WorkerMetrics {
    pub(super) fn new(worker: usize, labels: &MetricLabels, is_exported: bool) -> Self {
        Self {
            worker,
            decisions: labels
                .decision_sources
                .iter()
                .map(|_| DurationHistogram::new(&DECISION_TIME_BOUNDS))
                .collect(),
            requests: DurationHistogram::new(&RESPONSE_TIME_BOUNDS),
            request_decisions: std::array::from_fn(|_| SingleWriterCounter::default()),
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
            http_server: is_exported.then(Arc::default),
        }
    }

    /// Records the decision of a policy on a request. `decision` is the index of a counter;
    /// [`MetricLabels::policy_decisions`] labels the counters.
    pub fn record_policy_decision(&self, counters: &PolicyCounters, decision: usize) {
        counters.increment(self.worker, decision);
    }

    /// Records the decision on a request by all policies together. `decision` is the index of a
    /// counter; [`MetricLabels::request_decisions`] labels the counters.
    pub fn record_request_decision(&self, decision: usize) {
        increment_counter_at(&self.request_decisions, decision);
    }

    /// The rejected keys and paths of this worker.
    pub fn rejections(&self) -> &WorkerRejections {
        &self.rejections
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

    /// Records a request with a rejected token, while a policy reads a claim.
    pub fn record_rejected_token(&self) {
        self.rejected_tokens.add(1);
    }

    /// Records a number of descriptors that no policy matches.
    pub fn record_unmatched_descriptors(&self, descriptors: usize) {
        if descriptors > 0 {
            self.unmatched_descriptors
                .add(u64::try_from(descriptors).unwrap_or(u64::MAX));
        }
    }

    /// Records a number of settlements that could not be sent to the store.
    pub fn record_lost_settlements(&self, count: usize) {
        self.lost_settlements
            .add(u64::try_from(count).unwrap_or(u64::MAX));
    }
}

/// The counters of one metric, one per label value.
#[derive(Debug)]
pub struct LabelledCounters {
    pub(super) labels: &'static [&'static str],
    pub(super) counters: Box<[SingleWriterCounter]>,
}

impl LabelledCounters {
    fn new(labels: &'static [&'static str]) -> Self {
        Self {
            labels,
            counters: labels
                .iter()
                .map(|_| SingleWriterCounter::default())
                .collect(),
        }
    }

    /// Counts one event. `label` is the index of its label value.
    pub fn increment(&self, label: usize) {
        increment_counter_at(&self.counters, label);
    }
}

fn increment_counter_at(counters: &[SingleWriterCounter], index: usize) {
    if let Some(counter) = counters.get(index) {
        counter.add(1);
    }
}
