//! The metrics that OpenTelemetry's semantic conventions define for HTTP servers.
//!
//! Only the export by OTLP has them, and workers record them only if it is on.

use super::histogram::{DurationHistogram, HTTP_SERVER_TIME_BOUNDS, HistogramSnapshot};
use crate::telemetry::otlp::standard_method_name;
use http::Method;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::time::Instant;

/// Maximum number of duration histograms per worker. Methods are a fixed set, but the upstream
/// chooses the status codes. Further requests share one histogram.
const MAX_HISTOGRAMS: usize = 256;
/// The value that stands for all methods outside the semantic conventions.
const OTHER_METHOD: &str = "_OTHER";

/// Method, and whether the client used TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct HttpRequestAttributes {
    pub(super) method: &'static str,
    pub(super) is_https: bool,
}

/// What selects a histogram: the request, and the status of its response, if there was one. `None`
/// stands for all requests beyond [`MAX_HISTOGRAMS`].
type HistogramKey = Option<(HttpRequestAttributes, Option<u16>)>;

/// The HTTP metrics of one worker. Its lock is contended only while an export reads them.
#[derive(Debug, Default)]
pub(super) struct HttpServerMetrics(Mutex<HttpServerCounts>);

#[derive(Debug, Default)]
struct HttpServerCounts {
    durations: BTreeMap<HistogramKey, DurationHistogram>,
    active: BTreeMap<HttpRequestAttributes, i64>,
}

/// A request in flight. Dropping it records the end of the request.
#[derive(Debug)]
pub struct ActiveHttpRequest {
    metrics: Arc<HttpServerMetrics>,
    attributes: HttpRequestAttributes,
    started_at: Instant,
    status: Option<u16>,
}

impl ActiveHttpRequest {
    pub(super) fn begin(metrics: &Arc<HttpServerMetrics>, method: &Method, is_https: bool) -> Self {
        let attributes = HttpRequestAttributes {
            method: standard_method_name(method).unwrap_or(OTHER_METHOD),
            is_https,
        };
        *metrics.0.lock().active.entry(attributes).or_default() += 1;
        Self {
            metrics: Arc::clone(metrics),
            attributes,
            started_at: Instant::now(),
            status: None,
        }
    }

    /// Sets the status of the response. Without one, the client cancelled the request.
    pub fn set_status(&mut self, status: u16) {
        self.status = Some(status);
    }
}

impl Drop for ActiveHttpRequest {
    fn drop(&mut self) {
        let mut counts = self.metrics.0.lock();
        *counts.active.entry(self.attributes).or_default() -= 1;
        let key = Some((self.attributes, self.status));
        let has_room =
            counts.durations.len() < MAX_HISTOGRAMS || counts.durations.contains_key(&key);
        counts
            .durations
            .entry(key.filter(|_| has_room))
            .or_insert_with(|| DurationHistogram::new(&HTTP_SERVER_TIME_BOUNDS))
            .observe(self.started_at.elapsed());
    }
}

/// The durations of all finished requests of all workers.
pub(super) fn merge_request_durations(
    workers: &[&HttpServerMetrics],
) -> Vec<(HistogramKey, HistogramSnapshot)> {
    let locks: Vec<_> = workers.iter().map(|worker| worker.0.lock()).collect();
    let keys: BTreeSet<HistogramKey> = locks
        .iter()
        .flat_map(|counts| counts.durations.keys().copied())
        .collect();
    let snapshots = keys.into_iter().map(|key| {
        let parts = locks.iter().filter_map(|counts| counts.durations.get(&key));
        let sum = HistogramSnapshot::from_histograms(&HTTP_SERVER_TIME_BOUNDS, parts);
        (key, sum)
    });
    snapshots.collect()
}

/// The number of requests in flight in all workers.
pub(super) fn sum_active_requests(
    workers: &[&HttpServerMetrics],
) -> BTreeMap<HttpRequestAttributes, i64> {
    let mut sums = BTreeMap::new();
    for metrics in workers {
        for (attributes, count) in &metrics.0.lock().active {
            *sums.entry(*attributes).or_default() += count;
        }
    }
    sums
}
