//! Traces: which one a request belongs to, what is recorded of it, and where that goes.
//!
//! Whether a request is recorded is decided when it arrives: by its caller if that says so, else by lot. Of one that
//! is not, nothing is kept, made up or changed. Recording never waits: what was recorded is put into a queue when its
//! request has ended, and a thread of its own hands it to a collector.

mod collector;
mod context;
mod exporter;
mod span;

pub use crate::telemetry::trace::collector::CollectorUrl;
pub use crate::telemetry::trace::context::{SpanId, TraceContext, TraceId};
pub use crate::telemetry::trace::exporter::SpanExporter;
pub use crate::telemetry::trace::span::{RequestRecording, TracedRequest, TracedResponse};

use crate::clock::Clock;
use crate::telemetry::metrics::SpanExportCounts;
use crate::telemetry::trace::collector::CollectorClient;
use crate::telemetry::trace::exporter::{QUEUE_CAPACITY, SpanExportCounters};
use crate::telemetry::trace::span::{RequestSpans, string_attribute};
use crate::tls::ClientTls;
use http::HeaderMap;
use opentelemetry_proto::tonic::resource::v1::Resource;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// What is recorded, and for whom.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSettings {
    pub collector: CollectorUrl,
    /// Go with every export.
    pub headers: HeaderMap,
    /// For https; there if and only if the URL says so.
    pub tls: Option<ClientTls>,
    /// Of requests whose caller says nothing, this share is recorded, 0 to 1.
    pub sample_ratio: f64,
}

impl TraceSettings {
    /// What messages are written with, and HTTP/2 doesn't know: nobody else sets these.
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

/// Records requests; cheap to clone, shared by all workers.
#[derive(Clone, Debug)]
pub struct Tracer(Arc<TracerInner>);

struct TracerInner {
    sample_ratio: f64,
    clock: Clock,
    queue: mpsc::Sender<RequestSpans>,
    counters: Arc<SpanExportCounters>,
}

impl Tracer {
    /// Starts the export. `instance` tells this process apart from others.
    ///
    /// # Errors
    /// When there can't be another thread.
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
        let inner = TracerInner {
            sample_ratio: settings.sample_ratio,
            clock: Clock::system(),
            queue,
            counters,
        };
        Ok((Self(Arc::new(inner)), exporter))
    }

    /// A recording of the request, if it is to be recorded. `said` is what its headers say of its trace.
    pub fn start_recording(
        &self,
        caller: Option<TraceContext>,
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

    /// What became of all spans so far.
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
