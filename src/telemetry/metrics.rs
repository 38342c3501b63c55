//! Every metric: counted where it happens, added up when somebody asks.
//!
//! Counting must not be felt. Each worker writes to atomics of its own ([`Shard`], and its [`PolicyCounters`] of each
//! policy): no lock, no allocation, no look-up, and no cache line that another core writes to. Labels come from
//! the configuration or from closed sets, never from a request, so nobody can make the page grow.

mod exposition;
mod histogram;
mod policy_counters;
mod store;

pub use exposition::ExpositionFormat;
pub use histogram::HistogramSnapshot;
pub use policy_counters::{
    DECISION_LABELS, DEGRADED_REFUSED, HISTORY_DECISION_LABELS, PolicyCounters, PolicyDecision,
    RequestDecision,
};
pub use store::RedisServerMetrics;

use super::top_refusals::{TopRefusals, WorkerRefusals};
use exposition::{ExpositionWriter, MetricKind};
use histogram::{
    CumulativeBuckets, DECISION_BOUNDS, DurationHistogram, REQUEST_BOUNDS, SingleWriterCounter,
};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// The process's metrics. Shared by all that count and all that ask.
#[derive(Debug)]
pub struct Metrics {
    workers: Box<[Arc<WorkerMetrics>]>,
    /// By policy name. A policy that is gone keeps its place: counters that vanish and come back lower would
    /// be taken for a restart. What is ever in here was once configured.
    policy_counters: Mutex<BTreeMap<Arc<str>, Arc<PolicyCounters>>>,
    error_kinds: ErrorKindLabels,
    top_refusals: TopRefusals,
}

/// The kinds of what is counted by kind.
#[derive(Clone, Copy, Debug, Default)]
pub struct ErrorKindLabels {
    /// Of [`Shard::record_upstream_error`].
    pub upstream_errors: &'static [&'static str],
    /// Of [`Shard::record_tls_error`].
    pub tls_errors: &'static [&'static str],
    /// Of [`Shard::record_proxy_header_error`].
    pub proxy_header_errors: &'static [&'static str],
}

/// Who answered the question about a request's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionSource {
    Redis,
    Memory,
    DenyCache,
    /// What was taken from the store in advance.
    Lease,
    /// Nobody: the policies' `on_store_failure` did.
    Degraded,
}

/// What a call of the rate-limit service was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RlsCallResult {
    Ok,
    OverLimit,
    /// The store gave no answer.
    Unavailable,
    /// It could not be read, or asks for what there isn't.
    Invalid,
    /// Nothing: the caller did not wait for it.
    Cancelled,
}

impl RlsCallResult {
    const ALL: [Self; 5] = [
        Self::Ok,
        Self::OverLimit,
        Self::Unavailable,
        Self::Invalid,
        Self::Cancelled,
    ];

    fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::OverLimit => "over_limit",
            Self::Unavailable => "unavailable",
            Self::Invalid => "invalid",
            Self::Cancelled => "given_up",
        }
    }
}

/// Why we ended a client's connection, or one of its streams, before the client did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionCloseReason {
    /// No request for `idle_timeout`.
    Idle,
    /// A request's head that did not come to its end within `header_timeout`.
    HeaderTimeout,
    /// A request's body of which nothing came for `body_idle_timeout`.
    BodyTimeout,
    /// A client that left what we sent alone for `body_idle_timeout`, or did not leave when told to.
    SlowRead,
    /// More frames, or requests given up at once, than anybody needs.
    Flood,
    /// What came is not HTTP.
    Protocol,
    /// A tunnel in which nothing moved for `upstream.body_idle_timeout`.
    TunnelIdle,
}

/// What is not counted but looked at when somebody asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessStatus {
    pub phase: ProcessPhase,
    /// Seconds since the start.
    pub uptime_s: u64,
    /// In effect.
    pub policy_count: usize,
    pub open_connections: usize,
    /// How many there may be.
    pub max_connections: usize,
    /// How often there were so many, and new ones had to wait.
    pub connection_limit_hits: u64,
    /// Connections, and requests by HTTP/2, that ended in a bug of ours.
    pub panics: u64,
    pub store_up: bool,
    pub breaker_open: bool,
    /// Failures of the store so far, by kind.
    pub store_errors: Vec<(&'static str, u64)>,
    /// Instances that share the limits, if they are counted.
    pub instance_count: Option<u32>,
    /// Units of leases that were not given back, if there may be leases.
    pub lease_units_lost: Option<u64>,
    /// Of Redis, if that is used.
    pub redis: Option<RedisServerMetrics>,
    /// Of the memory store, if that is used.
    pub memory: Option<MemoryStoreUsage>,
    /// Grows by one with every configuration that took effect, from 1.
    pub config_generation: u64,
    /// If spans are exported.
    pub spans: Option<SpanExportCounts>,
    /// Configurations that were refused.
    pub rejected_reloads: u64,
    /// When a configuration was last loaded, in effect or not: seconds since the Unix epoch.
    pub last_load_at_s: u64,
    /// When the configuration in effect was taken, in seconds since the Unix epoch.
    pub config_applied_at_s: u64,
    /// Of what every replica should have alike; 48 bits, which a double holds exactly.
    pub config_hash: u64,
    /// Why the newest files are not in effect; empty if they are.
    pub reload_errors: Vec<String>,
    /// Where each certificate that clients see comes from, and when it ends: seconds since the Unix epoch.
    pub certificates: Vec<(String, u64)>,
}

/// Where the process is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessPhase {
    /// Clients cannot connect yet.
    Starting,
    Serving,
    /// Told to stop; perhaps still serving.
    Stopping,
}

/// What became of spans so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanExportCounts {
    pub exported: u64,
    /// The queue was full.
    pub dropped: u64,
    /// The collector was away, or refused them.
    pub failed: u64,
}

/// How full the memory store is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryStoreUsage {
    pub keys: usize,
    pub bytes: usize,
    /// Counters dropped while they still mattered.
    pub evictions: u64,
}

/// One worker's counts. Written by that worker only.
///
/// On lines of its own: what another worker counts must not slow this one down.
#[repr(align(128))]
pub struct WorkerMetrics {
    worker: usize,
    decisions: [DurationHistogram; DecisionSource::ALL.len()],
    requests: DurationHistogram,
    request_decisions: [SingleWriterCounter; RequestDecision::ALL.len()],
    refusals: Arc<WorkerRefusals>,
    /// By status, from [`FIRST_STATUS_CODE`] on.
    status_counts: [SingleWriterCounter; STATUS_CODE_COUNT],
    /// In the order of [`ErrorKindLabels`].
    upstream_errors: Box<[SingleWriterCounter]>,
    tls_errors: Box<[SingleWriterCounter]>,
    proxy_header_errors: Box<[SingleWriterCounter]>,
    close_reasons: [SingleWriterCounter; ConnectionCloseReason::ALL.len()],
    untrusted_forwarding: SingleWriterCounter,
    /// Who caused the last of them.
    last_untrusted_peer: Mutex<Option<IpAddr>>,
    rejected_tokens: SingleWriterCounter,
    rls_calls: [SingleWriterCounter; RlsCallResult::ALL.len()],
    unmatched_descriptors: SingleWriterCounter,
    lost_settlements: SingleWriterCounter,
}

const FIRST_STATUS_CODE: u16 = 100;
/// Status codes 100 to 999: all that a response can have.
const STATUS_CODE_COUNT: usize = 900;

impl Metrics {
    /// For so many workers.
    pub fn new(workers: usize, error_kinds: ErrorKindLabels) -> Arc<Self> {
        let shards: Box<[Arc<WorkerMetrics>]> = (0..workers)
            .map(|worker| Arc::new(WorkerMetrics::new(worker, error_kinds)))
            .collect();
        let top_refusals = TopRefusals::from_workers(
            shards
                .iter()
                .map(|shard| Arc::clone(&shard.refusals))
                .collect(),
        );
        Arc::new(Self {
            workers: shards,
            policy_counters: Mutex::default(),
            error_kinds,
            top_refusals,
        })
    }

    /// What a worker counts with. Nobody sees the counts of one that [`Metrics::new`] was not told of.
    pub fn worker_metrics(&self, worker: usize) -> Arc<WorkerMetrics> {
        let unregistered = || Arc::new(WorkerMetrics::new(worker, self.error_kinds));
        self.workers
            .get(worker)
            .map_or_else(unregistered, Arc::clone)
    }

    /// The counts of policies, found by name, so that they outlive a reload.
    pub fn policy_counters<'n>(
        &self,
        names: impl Iterator<Item = &'n str>,
    ) -> Box<[Arc<PolicyCounters>]> {
        let mut tallies = self.policy_counters.lock();
        let tally = names.map(|name| match tallies.get(name) {
            Some(tally) => Arc::clone(tally),
            None => {
                let name: Arc<str> = name.into();
                let tally = Arc::new(PolicyCounters::new(Arc::clone(&name), self.workers.len()));
                Arc::clone(tallies.entry(name).or_insert(tally))
            }
        });
        tally.collect()
    }

    /// Whose requests were refused most.
    pub fn top_refusals(&self) -> &TopRefusals {
        &self.top_refusals
    }

    /// Requests so far, by [`Answer::ALL`].
    pub fn request_decisions(&self) -> [u64; RequestDecision::ALL.len()] {
        RequestDecision::ALL.map(|answer| {
            self.sum_optional_counter(|shard| shard.request_decisions.get(answer as usize))
        })
    }

    /// Responses so far, by status; only statuses that occurred.
    pub fn status_counts(&self) -> Vec<(u16, u64)> {
        let codes = (FIRST_STATUS_CODE..).zip(0..STATUS_CODE_COUNT);
        let counted = codes.map(|(code, at)| {
            (
                code,
                self.sum_optional_counter(|shard| shard.status_counts.get(at)),
            )
        });
        counted.filter(|(_, count)| *count > 0).collect()
    }

    /// Requests so far that got no response from the upstream, by kind.
    pub fn upstream_errors(&self) -> Vec<(&'static str, u64)> {
        let kinds = self.error_kinds.upstream_errors.iter().enumerate();
        kinds
            .map(|(at, kind)| {
                (
                    *kind,
                    self.sum_optional_counter(|shard| shard.upstream_errors.get(at)),
                )
            })
            .collect()
    }

    /// How long decisions took so far, by who answered.
    pub fn decision_durations(
        &self,
    ) -> [(&'static str, HistogramSnapshot); DecisionSource::ALL.len()] {
        DecisionSource::ALL.map(|source| {
            let parts = self
                .workers
                .iter()
                .filter_map(|shard| shard.decisions.get(source as usize));
            (
                source.label(),
                HistogramSnapshot::from_histograms(&DECISION_BOUNDS, parts),
            )
        })
    }

    /// How long it took so far until the head of a response was ready.
    pub fn response_durations(&self) -> HistogramSnapshot {
        HistogramSnapshot::from_histograms(
            &REQUEST_BOUNDS,
            self.workers.iter().map(|shard| &shard.requests),
        )
    }

    /// Requests whose forwarding header was not believed, while clients have quotas of their own.
    pub fn untrusted_forwarding(&self) -> u64 {
        self.sum_counter(|shard| &shard.untrusted_forwarding)
    }

    /// Who sent such a header, most lately: one per worker at most.
    pub fn untrusted_peers(&self) -> BTreeSet<IpAddr> {
        self.workers
            .iter()
            .filter_map(|shard| *shard.last_untrusted_peer.lock())
            .collect()
    }

    /// All metrics as a page for Prometheus.
    pub fn render_page(&self, status: &ProcessStatus, format: ExpositionFormat) -> String {
        let mut page = ExpositionWriter::new(format);
        self.write_policy_metrics(&mut page);
        self.write_traffic_metrics(&mut page, status);
        store::write_store_metrics(&mut page, status);
        page.begin_family(
            MetricKind::Counter,
            "tidegate_settlements_lost",
            "Costs known from the response that the store was not told of, as far as is known: the estimate stands.",
        )
        .write_sample(&[], self.sum_counter(|shard| &shard.lost_settlements));
        write_process_metrics(&mut page, status);
        page.finish()
    }

    fn write_policy_metrics(&self, page: &mut ExpositionWriter) {
        let tallies = self.policy_counters.lock();
        let mut requests = page.begin_family(
            MetricKind::Counter,
            "tidegate_requests",
            "Requests by policy and what it did with them. A shadow policy counts allowed for what it would admit.",
        );
        for (policy, tally) in tallies.iter() {
            for (decision, count) in DECISION_LABELS
                .into_iter()
                .zip(tally.requests_by_decision())
            {
                requests.write_sample(&[("policy", policy), ("decision", decision)], count);
            }
        }
        let mut degraded = page.begin_family(
            MetricKind::Counter,
            "tidegate_degraded",
            "Requests that an enforced policy decided without the store, by its on_store_failure.",
        );
        for (policy, tally) in tallies.iter() {
            for (outcome, count) in tally.degraded_by_outcome() {
                degraded.write_sample(&[("policy", policy), ("outcome", outcome)], count);
            }
        }
        drop(tallies);
        let mut seconds = page.begin_family(
            MetricKind::Histogram,
            "tidegate_decision_seconds",
            "From a request's arrival to its verdict, if limits were asked, by who answered.",
        );
        for source in DecisionSource::ALL {
            let parts = self
                .workers
                .iter()
                .filter_map(|shard| shard.decisions.get(source as usize));
            seconds.write_histogram(
                &[("source", source.label())],
                &CumulativeBuckets::from_histograms(&DECISION_BOUNDS, parts),
            );
        }
    }

    fn write_traffic_metrics(&self, page: &mut ExpositionWriter, status: &ProcessStatus) {
        let mut requests = page.begin_family(
            MetricKind::Counter,
            "tidegate_http_requests",
            "Responses by status code.",
        );
        for (code, count) in self.status_counts() {
            requests.write_sample(&[("code", itoa::Buffer::new().format(code))], count);
        }
        let mut seconds = page.begin_family(
            MetricKind::Histogram,
            "tidegate_http_request_seconds",
            "From a request's arrival to the head of its response.",
        );
        let parts = self.workers.iter().map(|shard| &shard.requests);
        seconds.write_histogram(
            &[],
            &CumulativeBuckets::from_histograms(&REQUEST_BOUNDS, parts),
        );
        let mut errors = page.begin_family(
            MetricKind::Counter,
            "tidegate_upstream_errors",
            "Requests that got no response from the upstream, by kind.",
        );
        for (kind, count) in self.upstream_errors() {
            errors.write_sample(&[("kind", kind)], count);
        }
        page.begin_family(
            MetricKind::Gauge,
            "tidegate_connections_active",
            "Client connections that are open.",
        )
        .write_sample(&[], status.open_connections as u64);
        let mut faults = page.begin_family(
            MetricKind::Counter,
            "tidegate_tls_handshake_errors",
            "Client connections that ended in their TLS handshake, by kind.",
        );
        for (at, kind) in self.error_kinds.tls_errors.iter().enumerate() {
            faults.write_sample(
                &[("kind", kind)],
                self.sum_optional_counter(|shard| shard.tls_errors.get(at)),
            );
        }
        let mut faults = page.begin_family(
            MetricKind::Counter,
            "tidegate_proxy_protocol_errors",
            "Client connections that were closed for their PROXY header, by kind.",
        );
        for (at, kind) in self.error_kinds.proxy_header_errors.iter().enumerate() {
            faults.write_sample(
                &[("kind", kind)],
                self.sum_optional_counter(|shard| shard.proxy_header_errors.get(at)),
            );
        }
        page.begin_family(
            MetricKind::Gauge,
            "tidegate_connections_max",
            "listen.max_connections.",
        )
        .write_sample(&[], status.max_connections as u64);
        page.begin_family(
            MetricKind::Counter,
            "tidegate_connections_full",
            "Times that listen.max_connections were open, and new ones had to wait.",
        )
        .write_sample(&[], status.connection_limit_hits);
        page.begin_family(
            MetricKind::Counter,
            "tidegate_panics",
            "Connections, and requests by HTTP/2, that ended in a panic: each is a bug in tidegate.",
        )
        .write_sample(&[], status.panics);
        let mut closed = page.begin_family(
            MetricKind::Counter,
            "tidegate_connections_closed",
            "Connections, and streams of HTTP/2, that we ended before the client did, by reason.",
        );
        for reason in ConnectionCloseReason::ALL {
            let count = self.sum_optional_counter(|shard| shard.close_reasons.get(reason as usize));
            closed.write_sample(&[("reason", reason.label())], count);
        }
        page.begin_family(
            MetricKind::Counter,
            "tidegate_untrusted_forwarding",
            "Requests with a forwarding header from a peer outside client.trusted_proxies, while a policy asks for the client's address.",
        )
        .write_sample(&[], self.untrusted_forwarding());
        page.begin_family(
            MetricKind::Counter,
            "tidegate_tokens_refused",
            "Requests with a token that was not believed, though a policy asked for a claim.",
        )
        .write_sample(&[], self.sum_counter(|shard| &shard.rejected_tokens));
        let mut calls = page.begin_family(
            MetricKind::Counter,
            "tidegate_rls_calls",
            "Calls of the rate-limit service by what they were answered.",
        );
        for call in RlsCallResult::ALL {
            let count = self.sum_optional_counter(|shard| shard.rls_calls.get(call as usize));
            calls.write_sample(&[("result", call.label())], count);
        }
        page.begin_family(
            MetricKind::Counter,
            "tidegate_rls_descriptors_unmet",
            "Descriptors of such calls that no policy is about: they are not limited.",
        )
        .write_sample(&[], self.sum_counter(|shard| &shard.unmatched_descriptors));
    }

    fn sum_counter(&self, count: impl Fn(&WorkerMetrics) -> &SingleWriterCounter) -> u64 {
        self.sum_optional_counter(|shard| Some(count(shard)))
    }

    fn sum_optional_counter(
        &self,
        count: impl Fn(&WorkerMetrics) -> Option<&SingleWriterCounter>,
    ) -> u64 {
        self.workers
            .iter()
            .filter_map(|shard| count(shard))
            .map(SingleWriterCounter::get)
            .sum()
    }
}

fn write_process_metrics(page: &mut ExpositionWriter, status: &ProcessStatus) {
    let mut expiry = page.begin_family(
        MetricKind::Gauge,
        "tidegate_certificate_expiry_seconds",
        "When a certificate that clients see ends, or the first of its chain: seconds since 1970.",
    );
    for (file, at) in &status.certificates {
        expiry.write_sample(&[("file", file)], *at);
    }
    if let Some(SpanExportCounts {
        exported,
        dropped,
        failed,
    }) = status.spans
    {
        let mut spans = page.begin_family(
            MetricKind::Counter,
            "tidegate_trace_spans",
            "Spans by what became of them.",
        );
        for (result, count) in [
            ("exported", exported),
            ("dropped", dropped),
            ("failed", failed),
        ] {
            spans.write_sample(&[("result", result)], count);
        }
    }
    let mut reloads = page.begin_family(
        MetricKind::Counter,
        "tidegate_config_reloads",
        "New configurations by result: success took effect, failure changed nothing.",
    );
    reloads.write_sample(
        &[("result", "success")],
        status.config_generation.saturating_sub(1),
    );
    reloads.write_sample(&[("result", "failure")], status.rejected_reloads);
    page.begin_family(
        MetricKind::Gauge,
        "tidegate_config_generation",
        "The configuration in effect; that of the start is 1.",
    )
    .write_sample(&[], status.config_generation);
    page.begin_family(
        MetricKind::Gauge,
        "tidegate_config_last_reload_success_timestamp_seconds",
        "When the configuration in effect was taken, at start or later: seconds since 1970.",
    )
    .write_sample(&[], status.config_applied_at_s);
    page.begin_family(
        MetricKind::Gauge,
        "tidegate_config_last_reload_successful",
        "Whether the newest files are in effect: 1, or 0.",
    )
    .write_sample(&[], status.reload_errors.is_empty().into());
    page.begin_family(
        MetricKind::Gauge,
        "tidegate_config_hash",
        "A number made of the configuration in effect, without listen, admin, log, trace and shutdown: equal where that is.",
    )
    .write_sample(&[], status.config_hash);
    page.begin_family(
        MetricKind::Gauge,
        "tidegate_build_info",
        "Always 1; the labels tell what runs.",
    )
    .write_sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
}

impl WorkerMetrics {
    fn new(worker: usize, error_kinds: ErrorKindLabels) -> Self {
        let counts = |kinds: &[&str]| {
            kinds
                .iter()
                .map(|_| SingleWriterCounter::default())
                .collect()
        };
        Self {
            worker,
            decisions: std::array::from_fn(|_| DurationHistogram::new(&DECISION_BOUNDS)),
            requests: DurationHistogram::new(&REQUEST_BOUNDS),
            request_decisions: std::array::from_fn(|_| SingleWriterCounter::default()),
            refusals: Arc::default(),
            status_counts: std::array::from_fn(|_| SingleWriterCounter::default()),
            upstream_errors: counts(error_kinds.upstream_errors),
            tls_errors: counts(error_kinds.tls_errors),
            proxy_header_errors: counts(error_kinds.proxy_header_errors),
            close_reasons: std::array::from_fn(|_| SingleWriterCounter::default()),
            untrusted_forwarding: SingleWriterCounter::default(),
            last_untrusted_peer: Mutex::default(),
            rejected_tokens: SingleWriterCounter::default(),
            rls_calls: Default::default(),
            unmatched_descriptors: SingleWriterCounter::default(),
            lost_settlements: SingleWriterCounter::default(),
        }
    }

    /// A policy did this with a request.
    pub fn record_policy_decision(&self, counters: &PolicyCounters, decision: PolicyDecision) {
        counters.increment(self.worker, decision);
    }

    /// A request was answered so.
    pub fn record_request_decision(&self, answer: RequestDecision) {
        if let Some(count) = self.request_decisions.get(answer as usize) {
            count.add(1);
        }
    }

    /// Where this worker notes who is refused.
    pub fn refusals(&self) -> &WorkerRefusals {
        &self.refusals
    }

    /// A request's limits were decided in this time.
    pub fn record_decision_time(&self, source: DecisionSource, time: Duration) {
        if let Some(histogram) = self.decisions.get(source as usize) {
            histogram.observe(time);
        }
    }

    /// A response's head was ready after this time.
    pub fn record_response(&self, code: u16, time: Duration) {
        self.record_status(code);
        self.requests.observe(time);
    }

    /// Something was answered that could not be read as a request.
    pub fn record_status(&self, code: u16) {
        if let Some(count) = self
            .status_counts
            .get(usize::from(code.saturating_sub(FIRST_STATUS_CODE)))
        {
            count.add(1);
        }
    }

    /// A client's connection ended in its TLS handshake; `kind` is a place in [`ErrorKindLabels::tls_errors`].
    pub fn record_tls_error(&self, kind: usize) {
        if let Some(count) = self.tls_errors.get(kind) {
            count.add(1);
        }
    }

    /// A client's connection was closed for its PROXY header; `kind` is a place in [`ErrorKindLabels::proxy_header_errors`].
    pub fn record_proxy_header_error(&self, kind: usize) {
        if let Some(count) = self.proxy_header_errors.get(kind) {
            count.add(1);
        }
    }

    /// The upstream gave no response; `kind` is a place in [`ErrorKindLabels::upstream_errors`].
    pub fn record_upstream_error(&self, kind: usize) {
        if let Some(count) = self.upstream_errors.get(kind) {
            count.add(1);
        }
    }

    /// A client's connection, or a stream of it, had to end.
    pub fn record_connection_closed(&self, reason: ConnectionCloseReason) {
        if let Some(count) = self.close_reasons.get(reason as usize) {
            count.add(1);
        }
    }

    /// A forwarding header was not believed, while clients have quotas of their own.
    pub fn record_untrusted_forwarding(&self, peer: IpAddr) {
        self.untrusted_forwarding.add(1);
        *self.last_untrusted_peer.lock() = Some(peer);
    }

    /// A policy asked for a claim, and the request's token was not believed.
    pub fn record_rejected_token(&self) {
        self.rejected_tokens.add(1);
    }

    /// A call of the rate-limit service was answered.
    pub fn record_rls_call(&self, call: RlsCallResult) {
        if let Some(count) = self.rls_calls.get(call as usize) {
            count.add(1);
        }
    }

    /// So many descriptors met no policy.
    pub fn record_unmatched_descriptors(&self, descriptors: usize) {
        if descriptors > 0 {
            self.unmatched_descriptors
                .add(u64::try_from(descriptors).unwrap_or(u64::MAX));
        }
    }

    /// So many times the store was not told what a request took.
    pub fn record_lost_settlements(&self, count: usize) {
        self.lost_settlements
            .add(u64::try_from(count).unwrap_or(u64::MAX));
    }
}

/// Nobody wants to read a thousand numbers.
impl fmt::Debug for WorkerMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard")
            .field("worker", &self.worker)
            .finish_non_exhaustive()
    }
}

impl ConnectionCloseReason {
    const ALL: [Self; 7] = [
        Self::Idle,
        Self::HeaderTimeout,
        Self::BodyTimeout,
        Self::SlowRead,
        Self::Flood,
        Self::Protocol,
        Self::TunnelIdle,
    ];

    fn label(self) -> &'static str {
        match self {
            Self::Idle => "idle_timeout",
            Self::HeaderTimeout => "header_timeout",
            Self::BodyTimeout => "body_timeout",
            Self::SlowRead => "slow_read",
            Self::Flood => "flood",
            Self::Protocol => "protocol",
            Self::TunnelIdle => "tunnel_idle",
        }
    }
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
