//! Distributed tracing: trace context, recording of requests, and span export.
//!
//! Whether a request is recorded is decided at its arrival: by its caller's trace context,
//! otherwise by random sampling. An unrecorded request gets no trace context, and its headers stay
//! unchanged. Recording never blocks: a finished request enters a queue, and a separate thread
//! exports its spans.

mod collector;
mod context;
mod exporter;
mod span;

pub use collector::CollectorUrl;
pub use context::{SpanId, TraceId, TraceParent};
pub use exporter::SpanExporter;
pub use span::{RequestRecording, TracedRequest, TracedResponse};

use crate::clock::Clock;
use crate::telemetry::metrics::SpanExportCounts;
use crate::tls::ClientTls;
use collector::CollectorClient;
use exporter::{QUEUE_CAPACITY, SpanExportCounters};
use http::HeaderMap;
use opentelemetry_proto::tonic::resource::v1::Resource;
use span::{RequestSpans, string_attribute};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Settings of tracing: the collector, and the sampling of requests.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSettings {
    pub collector: CollectorUrl,
    /// Headers that are added to every export.
    pub headers: HeaderMap,
    /// TLS settings; present exactly if the URL's scheme is https.
    pub tls: Option<ClientTls>,
    /// The recorded share of requests without a trace context, 0 to 1.
    pub sample_ratio: f64,
}

impl TraceSettings {
    /// Headers that configuration must not set: the message framing sets them, or HTTP/2 does not
    /// allow them.
    pub const RESERVED_HEADERS: [&str; 10] = [
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "host",
        "keep-alive",
        "te",
        "transfer-encoding",
        "upgrade",
        "user-agent",
    ];
}

/// Records requests for tracing. All workers share one tracer, which is cheap to clone.
#[derive(Clone, Debug)]
pub struct Tracer(Arc<SharedTracer>);

struct SharedTracer {
    sample_ratio: f64,
    clock: Clock,
    queue: mpsc::Sender<RequestSpans>,
    counters: Arc<SpanExportCounters>,
}

impl Tracer {
    /// Starts the export thread. `instance` identifies this process in its traces.
    ///
    /// # Errors
    /// Fails if the thread or its runtime cannot be created.
    pub fn start(settings: &TraceSettings, instance: &str) -> io::Result<(Self, SpanExporter)> {
        let (queue, recorded) = mpsc::channel(QUEUE_CAPACITY);
        let counters = Arc::<SpanExportCounters>::default();
        let attributes = vec![
            string_attribute("service.name", "tidegate"),
            string_attribute("service.version", env!("CARGO_PKG_VERSION")),
            string_attribute("service.instance.id", instance),
        ];
        let resource = Resource {
            attributes,
            ..Resource::default()
        };
        let collector = CollectorClient::new(settings.clone());
        let exporter = SpanExporter::start(collector, resource, Arc::clone(&counters), recorded)?;
        let inner = SharedTracer {
            sample_ratio: settings.sample_ratio,
            clock: Clock::system(),
            queue,
            counters,
        };
        Ok((Self(Arc::new(inner)), exporter))
    }

    /// Returns a recording of the request if it is sampled. `caller` is the trace context of its
    /// headers.
    pub fn start_recording_if_sampled(
        &self,
        caller: Option<TraceParent>,
        headers: &HeaderMap,
        request: &TracedRequest<'_>,
        arrived: Instant,
    ) -> Option<Box<RequestRecording>> {
        let is_sampled = match caller {
            Some(caller) => caller.is_sampled(),
            None => fastrand::f64() < self.0.sample_ratio,
        };
        is_sampled.then(|| {
            Box::new(RequestRecording::new(
                self, caller, headers, request, arrived,
            ))
        })
    }

    /// Returns the numbers of spans since the start, by export result.
    pub fn span_counts(&self) -> SpanExportCounts {
        let load = |count: fn(&SpanExportCounters) -> &std::sync::atomic::AtomicU64| {
            count(&self.0.counters).load(Ordering::Relaxed)
        };
        SpanExportCounts {
            exported: load(|counts| &counts.exported),
            dropped: load(|counts| &counts.dropped),
            failed: load(|counts| &counts.failed),
        }
    }
}
