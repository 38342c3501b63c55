//! Every metric: counted where it happens, added up when somebody asks.
//!
//! Counting must not be felt. Each worker writes to atomics of its own ([`Shard`], and its [`Tally`] of each
//! policy): no lock, no allocation, no look-up, and no cache line that another core writes to. Labels come from
//! the configuration or from closed sets, never from a request, so nobody can make the page grow.

mod histogram;
mod page;
mod store;
mod tally;

pub use histogram::Buckets;
pub use page::Format;
pub use store::RedisVitals;
pub use tally::{Answer, DECISIONS, DEGRADED_REFUSED, Decision, PAST, Tally};

use super::top::{Limited, Top};
use histogram::{Count, DECISION_BOUNDS, Histogram, REQUEST_BOUNDS, Summed};
use page::{Kind, Page};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// The process's metrics. Shared by all that count and all that ask.
#[derive(Debug)]
pub struct Metrics {
    shards: Box<[Arc<Shard>]>,
    /// By policy name. A policy that is gone keeps its place: counters that vanish and come back lower would
    /// be taken for a restart. What is ever in here was once configured.
    tallies: Mutex<BTreeMap<Arc<str>, Arc<Tally>>>,
    kinds: Kinds,
    top: Top,
}

/// The kinds of what is counted by kind.
#[derive(Clone, Copy, Debug, Default)]
pub struct Kinds {
    /// Of [`Shard::upstream_error`].
    pub upstream_errors: &'static [&'static str],
    /// Of [`Shard::tls_fault`].
    pub tls_faults: &'static [&'static str],
    /// Of [`Shard::proxy_header_fault`].
    pub proxy_header_faults: &'static [&'static str],
}

/// Who answered the question about a request's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
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
pub enum Call {
    Ok,
    OverLimit,
    /// The store gave no answer.
    Unavailable,
    /// It could not be read, or asks for what there isn't.
    Invalid,
    /// Nothing: the caller did not wait for it.
    GivenUp,
}

impl Call {
    const ALL: [Self; 5] = [
        Self::Ok,
        Self::OverLimit,
        Self::Unavailable,
        Self::Invalid,
        Self::GivenUp,
    ];

    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::OverLimit => "over_limit",
            Self::Unavailable => "unavailable",
            Self::Invalid => "invalid",
            Self::GivenUp => "given_up",
        }
    }
}

/// Why we ended a client's connection, or one of its streams, before the client did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
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
pub struct Observed {
    pub phase: Phase,
    /// Seconds since the start.
    pub uptime_s: u64,
    /// In effect.
    pub policies: usize,
    pub connections: usize,
    /// How many there may be.
    pub connections_max: usize,
    /// How often there were so many, and new ones had to wait.
    pub connections_full: u64,
    /// Connections, and requests by HTTP/2, that ended in a bug of ours.
    pub panics: u64,
    pub store_up: bool,
    pub breaker_open: bool,
    /// Failures of the store so far, by kind.
    pub store_errors: Vec<(&'static str, u64)>,
    /// Instances that share the limits, if they are counted.
    pub instances: Option<u32>,
    /// Units of leases that were not given back, if there may be leases.
    pub lease_units_lost: Option<u64>,
    /// Of Redis, if that is used.
    pub redis: Option<RedisVitals>,
    /// Of the memory store, if that is used.
    pub memory: Option<MemoryUse>,
    /// Grows by one with every configuration that took effect, from 1.
    pub generation: u64,
    /// If spans are exported.
    pub spans: Option<Spans>,
    /// Configurations that were refused.
    pub reloads_refused: u64,
    /// When a configuration was last loaded, in effect or not: seconds since the Unix epoch.
    pub loaded_s: u64,
    /// When the configuration in effect was taken, in seconds since the Unix epoch.
    pub configured_at_s: u64,
    /// Of what every replica should have alike; 48 bits, which a double holds exactly.
    pub config_hash: u64,
    /// Why the newest files are not in effect; empty if they are.
    pub reload_errors: Vec<String>,
    /// Where each certificate that clients see comes from, and when it ends: seconds since the Unix epoch.
    pub certificates: Vec<(String, u64)>,
}

/// Where the process is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Clients cannot connect yet.
    Starting,
    Serving,
    /// Told to stop; perhaps still serving.
    Stopping,
}

/// What became of spans so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spans {
    pub exported: u64,
    /// The queue was full.
    pub dropped: u64,
    /// The collector was away, or refused them.
    pub failed: u64,
}

/// How full the memory store is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    pub keys: usize,
    pub bytes: usize,
    /// Counters dropped while they still mattered.
    pub evictions: u64,
}

/// One worker's counts. Written by that worker only.
///
/// On lines of its own: what another worker counts must not slow this one down.
#[repr(align(128))]
pub struct Shard {
    worker: usize,
    decisions: [Histogram; Source::ALL.len()],
    requests: Histogram,
    answers: [Count; Answer::ALL.len()],
    limited: Arc<Limited>,
    /// By status, from [`FIRST_CODE`] on.
    codes: [Count; CODES],
    /// In the order of [`Kinds`].
    upstream_errors: Box<[Count]>,
    tls_faults: Box<[Count]>,
    proxy_header_faults: Box<[Count]>,
    closed: [Count; Closed::ALL.len()],
    untrusted_forwarding: Count,
    /// Who caused the last of them.
    untrusted_peer: Mutex<Option<IpAddr>>,
    tokens_refused: Count,
    calls: [Count; Call::ALL.len()],
    descriptors_unmet: Count,
    settlements_lost: Count,
}

const FIRST_CODE: u16 = 100;
/// Status codes 100 to 999: all that a response can have.
const CODES: usize = 900;

impl Metrics {
    /// For so many workers.
    pub fn new(workers: usize, kinds: Kinds) -> Arc<Self> {
        let shards: Box<[Arc<Shard>]> = (0..workers)
            .map(|worker| Arc::new(Shard::new(worker, kinds)))
            .collect();
        let top = Top::of(
            shards
                .iter()
                .map(|shard| Arc::clone(&shard.limited))
                .collect(),
        );
        Arc::new(Self {
            shards,
            tallies: Mutex::default(),
            kinds,
            top,
        })
    }

    /// What a worker counts with. Nobody sees the counts of one that [`Metrics::new`] was not told of.
    pub fn shard(&self, worker: usize) -> Arc<Shard> {
        let unseen = || Arc::new(Shard::new(worker, self.kinds));
        self.shards.get(worker).map_or_else(unseen, Arc::clone)
    }

    /// The counts of policies, found by name, so that they outlive a reload.
    pub fn tallies<'n>(&self, names: impl Iterator<Item = &'n str>) -> Box<[Arc<Tally>]> {
        let mut tallies = self.tallies.lock();
        let tally = names.map(|name| match tallies.get(name) {
            Some(tally) => Arc::clone(tally),
            None => {
                let name: Arc<str> = name.into();
                let tally = Arc::new(Tally::new(Arc::clone(&name), self.shards.len()));
                Arc::clone(tallies.entry(name).or_insert(tally))
            }
        });
        tally.collect()
    }

    /// Whose requests were refused most.
    pub fn top(&self) -> &Top {
        &self.top
    }

    /// Requests so far, by [`Answer::ALL`].
    pub fn answers(&self) -> [u64; Answer::ALL.len()] {
        Answer::ALL.map(|answer| self.sum_opt(|shard| shard.answers.get(answer as usize)))
    }

    /// Responses so far, by status; only statuses that occurred.
    pub fn codes(&self) -> Vec<(u16, u64)> {
        let codes = (FIRST_CODE..).zip(0..CODES);
        let counted = codes.map(|(code, at)| (code, self.sum_opt(|shard| shard.codes.get(at))));
        counted.filter(|(_, count)| *count > 0).collect()
    }

    /// Requests so far that got no response from the upstream, by kind.
    pub fn upstream_errors(&self) -> Vec<(&'static str, u64)> {
        let kinds = self.kinds.upstream_errors.iter().enumerate();
        kinds
            .map(|(at, kind)| (*kind, self.sum_opt(|shard| shard.upstream_errors.get(at))))
            .collect()
    }

    /// How long decisions took so far, by who answered.
    pub fn decisions(&self) -> [(&'static str, Buckets); Source::ALL.len()] {
        Source::ALL.map(|source| {
            let parts = self
                .shards
                .iter()
                .filter_map(|shard| shard.decisions.get(source as usize));
            (source.word(), Buckets::of(&DECISION_BOUNDS, parts))
        })
    }

    /// How long it took so far until the head of a response was ready.
    pub fn responses(&self) -> Buckets {
        Buckets::of(
            &REQUEST_BOUNDS,
            self.shards.iter().map(|shard| &shard.requests),
        )
    }

    /// Requests whose forwarding header was not believed, while clients have quotas of their own.
    pub fn untrusted_forwarding(&self) -> u64 {
        self.sum(|shard| &shard.untrusted_forwarding)
    }

    /// Who sent such a header, most lately: one per worker at most.
    pub fn untrusted_peers(&self) -> BTreeSet<IpAddr> {
        self.shards
            .iter()
            .filter_map(|shard| *shard.untrusted_peer.lock())
            .collect()
    }

    /// All metrics as a page for Prometheus.
    pub fn page(&self, observed: &Observed, format: Format) -> String {
        let mut page = Page::new(format);
        self.write_policies(&mut page);
        self.write_traffic(&mut page, observed);
        store::write(&mut page, observed);
        page.family(
            Kind::Counter,
            "tidegate_settlements_lost",
            "Costs known from the response that the store was not told of, as far as is known: the estimate stands.",
        )
        .sample(&[], self.sum(|shard| &shard.settlements_lost));
        write_process(&mut page, observed);
        page.finish()
    }

    fn write_policies(&self, page: &mut Page) {
        let tallies = self.tallies.lock();
        let mut requests = page.family(
            Kind::Counter,
            "tidegate_requests",
            "Requests by policy and what it did with them. A shadow policy counts allowed for what it would admit.",
        );
        for (policy, tally) in tallies.iter() {
            for (decision, count) in DECISIONS.into_iter().zip(tally.requests()) {
                requests.sample(&[("policy", policy), ("decision", decision)], count);
            }
        }
        let mut degraded = page.family(
            Kind::Counter,
            "tidegate_degraded",
            "Requests that an enforced policy decided without the store, by its on_store_failure.",
        );
        for (policy, tally) in tallies.iter() {
            for (outcome, count) in tally.degraded() {
                degraded.sample(&[("policy", policy), ("outcome", outcome)], count);
            }
        }
        drop(tallies);
        let mut seconds = page.family(
            Kind::Histogram,
            "tidegate_decision_seconds",
            "From a request's arrival to its verdict, if limits were asked, by who answered.",
        );
        for source in Source::ALL {
            let parts = self
                .shards
                .iter()
                .filter_map(|shard| shard.decisions.get(source as usize));
            seconds.histogram(
                &[("source", source.word())],
                &Summed::of(&DECISION_BOUNDS, parts),
            );
        }
    }

    fn write_traffic(&self, page: &mut Page, observed: &Observed) {
        let mut requests = page.family(
            Kind::Counter,
            "tidegate_http_requests",
            "Responses by status code.",
        );
        for (code, count) in self.codes() {
            requests.sample(&[("code", itoa::Buffer::new().format(code))], count);
        }
        let mut seconds = page.family(
            Kind::Histogram,
            "tidegate_http_request_seconds",
            "From a request's arrival to the head of its response.",
        );
        let parts = self.shards.iter().map(|shard| &shard.requests);
        seconds.histogram(&[], &Summed::of(&REQUEST_BOUNDS, parts));
        let mut errors = page.family(
            Kind::Counter,
            "tidegate_upstream_errors",
            "Requests that got no response from the upstream, by kind.",
        );
        for (kind, count) in self.upstream_errors() {
            errors.sample(&[("kind", kind)], count);
        }
        page.family(
            Kind::Gauge,
            "tidegate_connections_active",
            "Client connections that are open.",
        )
        .sample(&[], observed.connections as u64);
        let mut faults = page.family(
            Kind::Counter,
            "tidegate_tls_handshake_errors",
            "Client connections that ended in their TLS handshake, by kind.",
        );
        for (at, kind) in self.kinds.tls_faults.iter().enumerate() {
            faults.sample(
                &[("kind", kind)],
                self.sum_opt(|shard| shard.tls_faults.get(at)),
            );
        }
        let mut faults = page.family(
            Kind::Counter,
            "tidegate_proxy_protocol_errors",
            "Client connections that were closed for their PROXY header, by kind.",
        );
        for (at, kind) in self.kinds.proxy_header_faults.iter().enumerate() {
            faults.sample(
                &[("kind", kind)],
                self.sum_opt(|shard| shard.proxy_header_faults.get(at)),
            );
        }
        page.family(
            Kind::Gauge,
            "tidegate_connections_max",
            "listen.max_connections.",
        )
        .sample(&[], observed.connections_max as u64);
        page.family(
            Kind::Counter,
            "tidegate_connections_full",
            "Times that listen.max_connections were open, and new ones had to wait.",
        )
        .sample(&[], observed.connections_full);
        page.family(
            Kind::Counter,
            "tidegate_panics",
            "Connections, and requests by HTTP/2, that ended in a panic: each is a bug in tidegate.",
        )
        .sample(&[], observed.panics);
        let mut closed = page.family(
            Kind::Counter,
            "tidegate_connections_closed",
            "Connections, and streams of HTTP/2, that we ended before the client did, by reason.",
        );
        for reason in Closed::ALL {
            let count = self.sum_opt(|shard| shard.closed.get(reason as usize));
            closed.sample(&[("reason", reason.word())], count);
        }
        page.family(
            Kind::Counter,
            "tidegate_untrusted_forwarding",
            "Requests with a forwarding header from a peer outside client.trusted_proxies, while a policy asks for the client's address.",
        )
        .sample(&[], self.untrusted_forwarding());
        page.family(
            Kind::Counter,
            "tidegate_tokens_refused",
            "Requests with a token that was not believed, though a policy asked for a claim.",
        )
        .sample(&[], self.sum(|shard| &shard.tokens_refused));
        let mut calls = page.family(
            Kind::Counter,
            "tidegate_rls_calls",
            "Calls of the rate-limit service by what they were answered.",
        );
        for call in Call::ALL {
            let count = self.sum_opt(|shard| shard.calls.get(call as usize));
            calls.sample(&[("result", call.word())], count);
        }
        page.family(
            Kind::Counter,
            "tidegate_rls_descriptors_unmet",
            "Descriptors of such calls that no policy is about: they are not limited.",
        )
        .sample(&[], self.sum(|shard| &shard.descriptors_unmet));
    }

    fn sum(&self, count: impl Fn(&Shard) -> &Count) -> u64 {
        self.sum_opt(|shard| Some(count(shard)))
    }

    fn sum_opt(&self, count: impl Fn(&Shard) -> Option<&Count>) -> u64 {
        self.shards
            .iter()
            .filter_map(|shard| count(shard))
            .map(Count::get)
            .sum()
    }
}

fn write_process(page: &mut Page, observed: &Observed) {
    let mut expiry = page.family(
        Kind::Gauge,
        "tidegate_certificate_expiry_seconds",
        "When a certificate that clients see ends, or the first of its chain: seconds since 1970.",
    );
    for (file, at) in &observed.certificates {
        expiry.sample(&[("file", file)], *at);
    }
    if let Some(Spans {
        exported,
        dropped,
        failed,
    }) = observed.spans
    {
        let mut spans = page.family(
            Kind::Counter,
            "tidegate_trace_spans",
            "Spans by what became of them.",
        );
        for (result, count) in [
            ("exported", exported),
            ("dropped", dropped),
            ("failed", failed),
        ] {
            spans.sample(&[("result", result)], count);
        }
    }
    let mut reloads = page.family(
        Kind::Counter,
        "tidegate_config_reloads",
        "New configurations by result: success took effect, failure changed nothing.",
    );
    reloads.sample(
        &[("result", "success")],
        observed.generation.saturating_sub(1),
    );
    reloads.sample(&[("result", "failure")], observed.reloads_refused);
    page.family(
        Kind::Gauge,
        "tidegate_config_generation",
        "The configuration in effect; that of the start is 1.",
    )
    .sample(&[], observed.generation);
    page.family(
        Kind::Gauge,
        "tidegate_config_last_reload_success_timestamp_seconds",
        "When the configuration in effect was taken, at start or later: seconds since 1970.",
    )
    .sample(&[], observed.configured_at_s);
    page.family(
        Kind::Gauge,
        "tidegate_config_last_reload_successful",
        "Whether the newest files are in effect: 1, or 0.",
    )
    .sample(&[], observed.reload_errors.is_empty().into());
    page.family(
        Kind::Gauge,
        "tidegate_config_hash",
        "A number made of the configuration in effect, without listen, admin, log, trace and shutdown: equal where that is.",
    )
    .sample(&[], observed.config_hash);
    page.family(
        Kind::Gauge,
        "tidegate_build_info",
        "Always 1; the labels tell what runs.",
    )
    .sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
}

impl Shard {
    fn new(worker: usize, kinds: Kinds) -> Self {
        let counts = |kinds: &[&str]| kinds.iter().map(|_| Count::default()).collect();
        Self {
            worker,
            decisions: std::array::from_fn(|_| Histogram::new(&DECISION_BOUNDS)),
            requests: Histogram::new(&REQUEST_BOUNDS),
            answers: std::array::from_fn(|_| Count::default()),
            limited: Arc::default(),
            codes: std::array::from_fn(|_| Count::default()),
            upstream_errors: counts(kinds.upstream_errors),
            tls_faults: counts(kinds.tls_faults),
            proxy_header_faults: counts(kinds.proxy_header_faults),
            closed: std::array::from_fn(|_| Count::default()),
            untrusted_forwarding: Count::default(),
            untrusted_peer: Mutex::default(),
            tokens_refused: Count::default(),
            calls: Default::default(),
            descriptors_unmet: Count::default(),
            settlements_lost: Count::default(),
        }
    }

    /// A policy did this with a request.
    pub fn policy(&self, tally: &Tally, decision: Decision) {
        tally.add(self.worker, decision);
    }

    /// A request was answered so.
    pub fn answer(&self, answer: Answer) {
        if let Some(count) = self.answers.get(answer as usize) {
            count.add(1);
        }
    }

    /// Where this worker notes who is refused.
    pub fn limited(&self) -> &Limited {
        &self.limited
    }

    /// A request's limits were decided in this time.
    pub fn decided(&self, source: Source, time: Duration) {
        if let Some(histogram) = self.decisions.get(source as usize) {
            histogram.observe(time);
        }
    }

    /// A response's head was ready after this time.
    pub fn responded(&self, code: u16, time: Duration) {
        self.answered(code);
        self.requests.observe(time);
    }

    /// Something was answered that could not be read as a request.
    pub fn answered(&self, code: u16) {
        if let Some(count) = self.codes.get(usize::from(code.saturating_sub(FIRST_CODE))) {
            count.add(1);
        }
    }

    /// A client's connection ended in its TLS handshake; `kind` is a place in [`Kinds::tls_faults`].
    pub fn tls_fault(&self, kind: usize) {
        if let Some(count) = self.tls_faults.get(kind) {
            count.add(1);
        }
    }

    /// A client's connection was closed for its PROXY header; `kind` is a place in [`Kinds::proxy_header_faults`].
    pub fn proxy_header_fault(&self, kind: usize) {
        if let Some(count) = self.proxy_header_faults.get(kind) {
            count.add(1);
        }
    }

    /// The upstream gave no response; `kind` is a place in [`Kinds::upstream_errors`].
    pub fn upstream_error(&self, kind: usize) {
        if let Some(count) = self.upstream_errors.get(kind) {
            count.add(1);
        }
    }

    /// A client's connection, or a stream of it, had to end.
    pub fn closed(&self, reason: Closed) {
        if let Some(count) = self.closed.get(reason as usize) {
            count.add(1);
        }
    }

    /// A forwarding header was not believed, while clients have quotas of their own.
    pub fn forwarding_not_trusted(&self, peer: IpAddr) {
        self.untrusted_forwarding.add(1);
        *self.untrusted_peer.lock() = Some(peer);
    }

    /// A policy asked for a claim, and the request's token was not believed.
    pub fn token_refused(&self) {
        self.tokens_refused.add(1);
    }

    /// A call of the rate-limit service was answered.
    pub fn call(&self, call: Call) {
        if let Some(count) = self.calls.get(call as usize) {
            count.add(1);
        }
    }

    /// So many descriptors met no policy.
    pub fn unmet(&self, descriptors: usize) {
        if descriptors > 0 {
            self.descriptors_unmet
                .add(u64::try_from(descriptors).unwrap_or(u64::MAX));
        }
    }

    /// So many times the store was not told what a request took.
    pub fn settlements_lost(&self, times: usize) {
        self.settlements_lost
            .add(u64::try_from(times).unwrap_or(u64::MAX));
    }
}

/// Nobody wants to read a thousand numbers.
impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard")
            .field("worker", &self.worker)
            .finish_non_exhaustive()
    }
}

impl Closed {
    const ALL: [Self; 7] = [
        Self::Idle,
        Self::HeaderTimeout,
        Self::BodyTimeout,
        Self::SlowRead,
        Self::Flood,
        Self::Protocol,
        Self::TunnelIdle,
    ];

    fn word(self) -> &'static str {
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

impl Source {
    const ALL: [Self; 5] = [
        Self::Redis,
        Self::Memory,
        Self::DenyCache,
        Self::Lease,
        Self::Degraded,
    ];

    pub fn word(self) -> &'static str {
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
