//! Traces: which one a request belongs to, what is recorded of it, and where that goes.
//!
//! Whether a request is recorded is decided when it arrives: by its caller if that says so, else by lot. Of one that
//! is not, nothing is kept, made up or changed. Recording never waits: what was recorded is put into a queue when its
//! request has ended, and a thread of its own hands it to a collector.

mod collector;
mod context;
mod exporter;
mod span;

pub use collector::CollectorUrl;
pub use context::{Context, SpanId, TraceId};
pub use exporter::Exporter;
pub use span::{Answered, Asked, Recording};

use crate::clock::Clock;
use crate::telemetry::metrics::Spans;
use crate::tls::ClientTls;
use collector::Collector;
use exporter::{Counts, QUEUE};
use http::HeaderMap;
use opentelemetry_proto::tonic::resource::v1::Resource;
use span::{Recorded, text};
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
    pub sample: f64,
}

impl TraceSettings {
    /// What messages are written with, and HTTP/2 doesn't know: nobody else sets these.
    pub const OWN_HEADERS: [&str; 10] = [
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
pub struct Tracer(Arc<Inner>);

struct Inner {
    sample: f64,
    clock: Clock,
    queue: mpsc::Sender<Recorded>,
    counts: Arc<Counts>,
}

impl Tracer {
    /// Starts the export. `instance` tells this process apart from others.
    ///
    /// # Errors
    /// When there can't be another thread.
    pub fn start(settings: &TraceSettings, instance: &str) -> io::Result<(Self, Exporter)> {
        let (queue, recorded) = mpsc::channel(QUEUE);
        let counts = Arc::<Counts>::default();
        let attributes = vec![
            text("service.name", "tidegate"),
            text("service.version", env!("CARGO_PKG_VERSION")),
            text("service.instance.id", instance),
        ];
        let resource = Resource {
            attributes,
            ..Resource::default()
        };
        let collector = Collector::new(settings.clone());
        let exporter = Exporter::start(collector, resource, Arc::clone(&counts), recorded)?;
        let inner = Inner {
            sample: settings.sample,
            clock: Clock::system(),
            queue,
            counts,
        };
        Ok((Self(Arc::new(inner)), exporter))
    }

    /// A recording of the request, if it is to be recorded. `said` is what its headers say of its trace.
    pub fn begin(
        &self,
        said: Option<Context>,
        headers: &HeaderMap,
        asked: &Asked<'_>,
        arrived: Instant,
    ) -> Option<Box<Recording>> {
        let is_wanted = match said {
            Some(caller) => caller.is_sampled(),
            None => fastrand::f64() < self.0.sample,
        };
        is_wanted.then(|| Box::new(Recording::begin(self, said, headers, asked, arrived)))
    }

    /// What became of all spans so far.
    pub fn spans(&self) -> Spans {
        let count = |count: fn(&Counts) -> &std::sync::atomic::AtomicU64| {
            count(&self.0.counts).load(Ordering::Relaxed)
        };
        Spans {
            exported: count(|counts| &counts.exported),
            dropped: count(|counts| &counts.dropped),
            failed: count(|counts| &counts.failed),
        }
    }
}
