//! Every metric: counted where it happens, added up when somebody asks.
//!
//! Counting must not be felt. Each worker writes to atomics of its own ([`Shard`], and its [`Tally`] of each
//! policy): no lock, no allocation, no look-up, and no cache line that another core writes to. Labels come from
//! the configuration or from closed sets, never from a request, so nobody can make the page grow.

mod page;

pub use page::Format;

use page::{Kind, Page};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The process's metrics. Shared by all that count and all that ask.
#[derive(Debug)]
pub struct Metrics {
    shards: Box<[Arc<Shard>]>,
    /// By policy name. A policy that is gone keeps its place: counters that vanish and come back lower would
    /// be taken for a restart. What is ever in here was once configured.
    tallies: Mutex<BTreeMap<Box<str>, Arc<Tally>>>,
    kinds: Kinds,
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

/// What one policy did with one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Its limits had room. A shadow policy's too.
    Allowed,
    /// The same, of a policy with a `leaky_bucket`, and the request was held.
    Delayed,
    Rejected,
    /// By a block that an earlier refusal began.
    Blocked,
    /// Refused whatever the quota: `action = "deny"`, or a request that cannot be keyed.
    Denied,
    Exempt,
    /// A shadow policy would have refused it.
    ShadowRejected,
    /// A shadow policy had no store to ask.
    Degraded,
    /// The same, of a policy that let the request through.
    DegradedOpen,
    /// The same, of one that refused.
    DegradedClosed,
    /// The same, of one whose share of its limits had room.
    DegradedLocalAllowed,
    /// The same, of one whose share was used up.
    DegradedLocalRejected,
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
    pub connections: usize,
    /// How many there may be.
    pub connections_max: usize,
    /// How often there were so many, and new ones had to wait.
    pub connections_full: u64,
    pub store_up: bool,
    pub breaker_open: bool,
    /// Failures of the store so far, by kind.
    pub store_errors: Vec<(&'static str, u64)>,
    /// Instances that share the limits, if they are counted.
    pub instances: Option<u32>,
    /// Units of leases that were not given back, if there may be leases.
    pub lease_units_lost: Option<u64>,
    /// Of the memory store, if that is used.
    pub memory: Option<MemoryUse>,
    /// Grows by one with every configuration that took effect, from 1.
    pub generation: u64,
    /// Configurations that were refused.
    pub reloads_refused: u64,
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

/// How full the memory store is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    pub keys: usize,
    pub bytes: usize,
    /// Counters dropped while they still mattered.
    pub evictions: u64,
}

/// A count that one thread writes and any may read: without a second writer, adding needs no locked instruction.
#[derive(Debug, Default)]
struct Count(AtomicU64);

/// One worker's counts. Written by that worker only.
///
/// On lines of its own: what another worker counts must not slow this one down.
#[repr(align(128))]
pub struct Shard {
    worker: usize,
    decisions: [Histogram; Source::ALL.len()],
    requests: Histogram,
    /// By status, from [`FIRST_CODE`] on.
    codes: [Count; CODES],
    /// In the order of [`Kinds`].
    upstream_errors: Box<[Count]>,
    tls_faults: Box<[Count]>,
    proxy_header_faults: Box<[Count]>,
    closed: [Count; Closed::ALL.len()],
    untrusted_forwarding: Count,
    tokens_refused: Count,
    settlements_lost: Count,
}

/// One policy's counts, each worker's in cache lines of their own.
#[derive(Debug)]
pub struct Tally(Box<[Line]>);

#[derive(Debug, Default)]
#[repr(align(64))]
struct Line([Count; Decision::COUNT]);

/// How often something took how long.
#[derive(Debug)]
struct Histogram {
    bounds: &'static [Bound],
    /// One more than bounds: what is above all of them. Not cumulative.
    counts: [Count; BUCKETS + 1],
    sum_ns: Count,
}

/// A bucket's upper end, and how it is written.
type Bound = (Duration, &'static str);

/// As many for every histogram.
const BUCKETS: usize = 16;

/// From a look into memory to the longest that anybody configures for a round trip.
static DECISION_BOUNDS: [Bound; BUCKETS] = [
    (Duration::from_micros(2), "0.000002"),
    (Duration::from_micros(5), "0.000005"),
    (Duration::from_micros(10), "0.00001"),
    (Duration::from_micros(25), "0.000025"),
    (Duration::from_micros(50), "0.00005"),
    (Duration::from_micros(100), "0.0001"),
    (Duration::from_micros(250), "0.00025"),
    (Duration::from_micros(500), "0.0005"),
    (Duration::from_millis(1), "0.001"),
    (Duration::from_micros(2_500), "0.0025"),
    (Duration::from_millis(5), "0.005"),
    (Duration::from_millis(10), "0.01"),
    (Duration::from_millis(25), "0.025"),
    (Duration::from_millis(50), "0.05"),
    (Duration::from_millis(100), "0.1"),
    (Duration::from_secs(1), "1"),
];

/// From an answer of our own to the default `upstream.response_timeout`.
static REQUEST_BOUNDS: [Bound; BUCKETS] = [
    (Duration::from_micros(100), "0.0001"),
    (Duration::from_micros(250), "0.00025"),
    (Duration::from_micros(500), "0.0005"),
    (Duration::from_millis(1), "0.001"),
    (Duration::from_micros(2_500), "0.0025"),
    (Duration::from_millis(5), "0.005"),
    (Duration::from_millis(10), "0.01"),
    (Duration::from_millis(25), "0.025"),
    (Duration::from_millis(50), "0.05"),
    (Duration::from_millis(100), "0.1"),
    (Duration::from_millis(250), "0.25"),
    (Duration::from_secs(1), "1"),
    (Duration::from_millis(2_500), "2.5"),
    (Duration::from_secs(10), "10"),
    (Duration::from_secs(30), "30"),
    (Duration::from_secs(60), "60"),
];

const FIRST_CODE: u16 = 100;
/// Status codes 100 to 999: all that a response can have.
const CODES: usize = 900;

impl Metrics {
    /// For so many workers.
    pub fn new(workers: usize, kinds: Kinds) -> Arc<Self> {
        let shards = (0..workers).map(|worker| Arc::new(Shard::new(worker, kinds)));
        Arc::new(Self { shards: shards.collect(), tallies: Mutex::default(), kinds })
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
            None => Arc::clone(tallies.entry(name.into()).or_insert_with(|| Arc::new(self.new_tally()))),
        });
        tally.collect()
    }

    fn new_tally(&self) -> Tally {
        Tally(self.shards.iter().map(|_| Line::default()).collect())
    }

    /// Requests whose forwarding header was not believed, while clients have quotas of their own.
    pub fn untrusted_forwarding(&self) -> u64 {
        self.sum(|shard| &shard.untrusted_forwarding)
    }

    /// All metrics as a page for Prometheus.
    pub fn page(&self, observed: &Observed, format: Format) -> String {
        let mut page = Page::new(format);
        self.write_policies(&mut page);
        self.write_traffic(&mut page, observed);
        write_store(&mut page, observed);
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
            for (decision, count) in tally.requests() {
                requests.sample(&[("policy", policy), ("decision", decision)], count);
            }
        }
        let mut degraded = page.family(
            Kind::Counter,
            "tidegate_degraded",
            "Requests that an enforced policy decided without the store, by its on_store_failure.",
        );
        for (policy, tally) in tallies.iter() {
            for (outcome, decision) in [
                ("open", Decision::DegradedOpen),
                ("closed", Decision::DegradedClosed),
                ("local_allowed", Decision::DegradedLocalAllowed),
                ("local_rejected", Decision::DegradedLocalRejected),
            ] {
                degraded.sample(&[("policy", policy), ("outcome", outcome)], tally.sum(decision));
            }
        }
        drop(tallies);
        let mut seconds = page.family(
            Kind::Histogram,
            "tidegate_decision_seconds",
            "From a request's arrival to its verdict, if limits were asked, by who answered.",
        );
        for source in Source::ALL {
            let parts = self.shards.iter().filter_map(|shard| shard.decisions.get(source as usize));
            seconds.histogram(&[("source", source.word())], &Summed::of(&DECISION_BOUNDS, parts));
        }
    }

    fn write_traffic(&self, page: &mut Page, observed: &Observed) {
        let mut requests = page.family(Kind::Counter, "tidegate_http_requests", "Responses by status code.");
        for (code, at) in (FIRST_CODE..).zip(0..CODES) {
            let count = self.sum_opt(|shard| shard.codes.get(at));
            if count > 0 {
                requests.sample(&[("code", itoa::Buffer::new().format(code))], count);
            }
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
        for (at, kind) in self.kinds.upstream_errors.iter().enumerate() {
            errors.sample(&[("kind", kind)], self.sum_opt(|shard| shard.upstream_errors.get(at)));
        }
        page.family(Kind::Gauge, "tidegate_connections_active", "Client connections that are open.")
            .sample(&[], observed.connections as u64);
        let mut faults = page.family(
            Kind::Counter,
            "tidegate_tls_handshake_errors",
            "Client connections that ended in their TLS handshake, by kind.",
        );
        for (at, kind) in self.kinds.tls_faults.iter().enumerate() {
            faults.sample(&[("kind", kind)], self.sum_opt(|shard| shard.tls_faults.get(at)));
        }
        let mut faults = page.family(
            Kind::Counter,
            "tidegate_proxy_protocol_errors",
            "Client connections that were closed for their PROXY header, by kind.",
        );
        for (at, kind) in self.kinds.proxy_header_faults.iter().enumerate() {
            faults.sample(&[("kind", kind)], self.sum_opt(|shard| shard.proxy_header_faults.get(at)));
        }
        page.family(Kind::Gauge, "tidegate_connections_max", "listen.max_connections.")
            .sample(&[], observed.connections_max as u64);
        page.family(
            Kind::Counter,
            "tidegate_connections_full",
            "Times that listen.max_connections were open, and new ones had to wait.",
        )
        .sample(&[], observed.connections_full);
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
    }

    fn sum(&self, count: impl Fn(&Shard) -> &Count) -> u64 {
        self.sum_opt(|shard| Some(count(shard)))
    }

    fn sum_opt(&self, count: impl Fn(&Shard) -> Option<&Count>) -> u64 {
        self.shards.iter().filter_map(|shard| count(shard)).map(Count::get).sum()
    }
}

fn write_store(page: &mut Page, observed: &Observed) {
    page.family(Kind::Gauge, "tidegate_store_up", "Whether the store answers: 1, or 0.")
        .sample(&[], observed.store_up.into());
    page.family(
        Kind::Gauge,
        "tidegate_breaker_open",
        "Whether failures keep requests from asking Redis: 1, or 0.",
    )
    .sample(&[], observed.breaker_open.into());
    let mut errors = page.family(Kind::Counter, "tidegate_store_errors", "Failures of the store by kind.");
    for (kind, count) in &observed.store_errors {
        errors.sample(&[("kind", kind)], *count);
    }
    if let Some(instances) = observed.instances {
        page.family(
            Kind::Gauge,
            "tidegate_instances",
            "Instances that share this one's limits, as last seen in Redis; before that store.redis.instances.",
        )
        .sample(&[], instances.into());
    }
    if let Some(units) = observed.lease_units_lost {
        page.family(
            Kind::Counter,
            "tidegate_lease_units_lost",
            "Units lent and not used of whose return Redis was not told, as far as is known: they count until they leave.",
        )
        .sample(&[], units);
    }
    let Some(memory) = observed.memory else { return };
    page.family(Kind::Gauge, "tidegate_store_memory_keys", "Counters in the memory store.")
        .sample(&[], memory.keys as u64);
    page.family(Kind::Gauge, "tidegate_store_memory_bytes", "Bytes that they take, estimated.")
        .sample(&[], memory.bytes as u64);
    page.family(
        Kind::Counter,
        "tidegate_store_memory_evictions",
        "Counters that the memory store dropped while they still mattered.",
    )
    .sample(&[], memory.evictions);
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
    let mut reloads = page.family(
        Kind::Counter,
        "tidegate_config_reloads",
        "New configurations by result: success took effect, failure changed nothing.",
    );
    reloads.sample(&[("result", "success")], observed.generation.saturating_sub(1));
    reloads.sample(&[("result", "failure")], observed.reloads_refused);
    page.family(
        Kind::Gauge,
        "tidegate_config_generation",
        "The configuration in effect; that of the start is 1.",
    )
    .sample(&[], observed.generation);
    page.family(Kind::Gauge, "tidegate_build_info", "Always 1; the labels tell what runs.")
        .sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
}

impl Shard {
    fn new(worker: usize, kinds: Kinds) -> Self {
        let counts = |kinds: &[&str]| kinds.iter().map(|_| Count::default()).collect();
        Self {
            worker,
            decisions: std::array::from_fn(|_| Histogram::new(&DECISION_BOUNDS)),
            requests: Histogram::new(&REQUEST_BOUNDS),
            codes: std::array::from_fn(|_| Count::default()),
            upstream_errors: counts(kinds.upstream_errors),
            tls_faults: counts(kinds.tls_faults),
            proxy_header_faults: counts(kinds.proxy_header_faults),
            closed: std::array::from_fn(|_| Count::default()),
            untrusted_forwarding: Count::default(),
            tokens_refused: Count::default(),
            settlements_lost: Count::default(),
        }
    }

    /// A policy did this with a request.
    pub fn policy(&self, tally: &Tally, decision: Decision) {
        if let Some(line) = tally.0.get(self.worker) {
            line.add(decision);
        }
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
    pub fn forwarding_not_trusted(&self) {
        self.untrusted_forwarding.add(1);
    }

    /// A policy asked for a claim, and the request's token was not believed.
    pub fn token_refused(&self) {
        self.tokens_refused.add(1);
    }

    /// So many times the store was not told what a request took.
    pub fn settlements_lost(&self, times: usize) {
        self.settlements_lost.add(u64::try_from(times).unwrap_or(u64::MAX));
    }
}

/// Nobody wants to read a thousand numbers.
impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard").field("worker", &self.worker).finish_non_exhaustive()
    }
}

impl Tally {
    /// The values of the label `decision`, with their counts.
    fn requests(&self) -> [(&'static str, u64); 8] {
        use Decision as D;
        let degraded = [
            D::Degraded,
            D::DegradedOpen,
            D::DegradedClosed,
            D::DegradedLocalAllowed,
            D::DegradedLocalRejected,
        ];
        [
            ("allowed", self.sum(D::Allowed)),
            ("delayed", self.sum(D::Delayed)),
            ("rejected", self.sum(D::Rejected)),
            ("blocked", self.sum(D::Blocked)),
            ("denied", self.sum(D::Denied)),
            ("exempt", self.sum(D::Exempt)),
            ("shadow_rejected", self.sum(D::ShadowRejected)),
            ("degraded", degraded.into_iter().map(|decision| self.sum(decision)).sum()),
        ]
    }

    fn sum(&self, decision: Decision) -> u64 {
        self.0.iter().filter_map(|line| line.0.get(decision as usize)).map(Count::get).sum()
    }
}

impl Line {
    fn add(&self, decision: Decision) {
        if let Some(count) = self.0.get(decision as usize) {
            count.add(1);
        }
    }
}

impl Decision {
    const COUNT: usize = 12;
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
    const ALL: [Self; 5] = [Self::Redis, Self::Memory, Self::DenyCache, Self::Lease, Self::Degraded];

    fn word(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Memory => "memory",
            Self::DenyCache => "deny_cache",
            Self::Lease => "lease",
            Self::Degraded => "degraded",
        }
    }
}

impl Count {
    fn add(&self, n: u64) {
        self.0.store(self.get().wrapping_add(n), Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Histogram {
    fn new(bounds: &'static [Bound; BUCKETS]) -> Self {
        Self { bounds, counts: std::array::from_fn(|_| Count::default()), sum_ns: Count::default() }
    }

    fn observe(&self, time: Duration) {
        let bucket = self.bounds.partition_point(|(bound, _)| *bound < time);
        if let Some(count) = self.counts.get(bucket) {
            count.add(1);
        }
        self.sum_ns.add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }
}

/// Histograms of the same bounds, added up.
struct Summed {
    /// Each bucket's upper end and all that was at most that.
    buckets: Vec<(&'static str, u64)>,
    /// The last bucket's, which has no end.
    count: u64,
    sum: Duration,
}

impl Summed {
    fn of<'a>(bounds: &'static [Bound], parts: impl Iterator<Item = &'a Histogram> + Clone) -> Self {
        let mut count = 0;
        let mut up_to = |bucket: usize| {
            count += parts.clone().filter_map(|part| part.counts.get(bucket)).map(Count::get).sum::<u64>();
            count
        };
        let buckets = bounds.iter().enumerate().map(|(at, (_, text))| (*text, up_to(at))).collect();
        let count = up_to(bounds.len());
        let sum_ns = parts.clone().map(|part| part.sum_ns.get()).fold(0, u64::saturating_add);
        Self { buckets, count, sum: Duration::from_nanos(sum_ns) }
    }
}

#[cfg(test)]
mod tests;
