//! Distributed tracing: trace context, recording of requests, and span export.
//!
//! Whether a request is recorded is decided at its arrival: by its caller's trace context,
//! otherwise by random sampling. An unrecorded request gets no trace context, and its headers stay
//! unchanged. Recording never blocks: a finished request enters a queue, and a separate thread
//! exports its spans.

mod context;
mod exporter;
mod span;

pub use context::{SpanId, TraceId, TraceParent};
pub use span::{RequestRecording, TracedRequest, TracedResponse};

use super::otlp::{CollectorClient, CollectorSettings, ExportHandle, OtlpSignal};
use crate::clock::Clock;
use exporter::{QUEUE_CAPACITY, SpanExportCounters, start_export};
use http::HeaderMap;
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::Span;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Settings of tracing: the collector, and the sampling of requests.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSettings {
    pub collector: CollectorSettings,
    /// The recorded share of requests without a trace context, 0 to 1.
    pub sample_ratio: f64,
}

/// Records requests for tracing. All workers share one tracer, which is cheap to clone.
#[derive(Clone, Debug)]
pub struct Tracer(Arc<SharedTracer>);

struct SharedTracer {
    sample_ratio: f64,
    clock: Clock,
    queue: mpsc::Sender<Vec<Span>>,
    counters: Arc<SpanExportCounters>,
}

impl Tracer {
    /// Starts the export thread. `resource` identifies this process in its traces.
    ///
    /// # Errors
    /// Fails if the thread or its runtime cannot be created.
    pub fn start(settings: &TraceSettings, resource: Resource) -> io::Result<(Self, ExportHandle)> {
        let (queue, recorded) = mpsc::channel(QUEUE_CAPACITY);
        let counters = Arc::<SpanExportCounters>::default();
        let collector = CollectorClient::new(OtlpSignal::Traces, settings.collector.clone());
        let exporter = start_export(collector, resource, Arc::clone(&counters), recorded)?;
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
    pub fn span_counts(&self) -> [(&'static str, u64); 3] {
        let counters = &self.0.counters;
        let counters = [
            ("exported", &counters.exported),
            ("dropped", &counters.dropped),
            ("failed", &counters.failed),
        ];
        counters.map(|(result, count)| (result, count.load(Ordering::Relaxed)))
    }
}
