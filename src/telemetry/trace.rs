//! Distributed tracing: trace context, recording of requests, and span export.
//!
//! Whether a request is recorded is decided at its arrival: by its caller's trace context,
//! otherwise by random sampling. An unrecorded request gets no trace context, and its headers stay
//! unchanged. Recording never blocks: a finished request enters a queue, and a separate thread
//! exports its spans in batches. Spans that do not fit into the queue are dropped and counted.

mod context;
mod span;

pub use context::{TraceId, TraceParent};
pub use span::{RequestRecording, TracedRequest, TracedResponse};

use super::otlp::{
    CollectorClient, CollectorSettings, ExportHandle, OtlpSignal, instrumentation_scope,
};
use crate::clock::Clock;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span};
use prost::Message;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;
use tokio::runtime::Builder;
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;

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

#[derive(Debug)]
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
        let worker = SpanExportWorker {
            collector: CollectorClient::new(OtlpSignal::Traces, settings.collector.clone()),
            resource,
            counters: Arc::clone(&counters),
        };
        let (handle, stopped, done) = ExportHandle::new(OtlpSignal::Traces);
        let runtime = Builder::new_current_thread().enable_all().build()?;
        thread::Builder::new()
            .name("trace".to_owned())
            .spawn(move || {
                runtime.block_on(worker.run(recorded, stopped));
                drop(done);
            })?;
        let inner = SharedTracer {
            sample_ratio: settings.sample_ratio,
            clock: Clock::system(),
            queue,
            counters,
        };
        Ok((Self(Arc::new(inner)), handle))
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

/// Maximum number of finished requests that wait for their export; they take a few MiB at most.
const QUEUE_CAPACITY: usize = 2048;
/// Maximum number of requests in one batch.
const MAX_BATCH_REQUESTS: usize = 256;
/// Maximum time that the first request of a batch waits for others.
const MAX_BATCH_DELAY: Duration = Duration::from_secs(1);

/// Counters of spans by export result.
#[derive(Debug, Default)]
struct SpanExportCounters {
    exported: AtomicU64,
    /// Spans that were dropped because the queue was full.
    dropped: AtomicU64,
    /// Spans that were not exported because the collector was unavailable or rejected them.
    failed: AtomicU64,
}

/// State of the export thread.
struct SpanExportWorker {
    collector: CollectorClient,
    resource: Resource,
    counters: Arc<SpanExportCounters>,
}

/// Adds queued requests to the batch until the batch is full, or the queue is closed and empty.
async fn fill_batch(batch: &mut Vec<Vec<Span>>, queue: &mut mpsc::Receiver<Vec<Span>>) {
    while batch.len() < MAX_BATCH_REQUESTS {
        let remaining = MAX_BATCH_REQUESTS - batch.len();
        if queue.recv_many(batch, remaining).await == 0 {
            return;
        }
    }
}

impl SpanExportWorker {
    async fn run(
        mut self,
        mut queue: mpsc::Receiver<Vec<Span>>,
        mut stopped: oneshot::Receiver<()>,
    ) {
        let mut is_ending = false;
        loop {
            let mut batch = Vec::new();
            tokio::select! {
                taken = queue.recv_many(&mut batch, MAX_BATCH_REQUESTS) => if taken == 0 { return },
                _ = &mut stopped, if !is_ending => {
                    is_ending = true;
                    queue.close();
                    continue;
                }
            }
            if !is_ending {
                tokio::select! {
                    () = fill_batch(&mut batch, &mut queue) => {}
                    () = sleep(MAX_BATCH_DELAY) => {}
                    _ = &mut stopped => is_ending = true,
                }
                if is_ending {
                    queue.close();
                }
            }
            self.export(batch).await;
        }
    }

    async fn export(&mut self, batch: Vec<Vec<Span>>) {
        let spans: Vec<Span> = batch.into_iter().flatten().collect();
        let span_count = u64::try_from(spans.len()).unwrap_or(u64::MAX);
        let scope_spans = vec![ScopeSpans {
            scope: Some(instrumentation_scope()),
            spans,
            ..ScopeSpans::default()
        }];
        let resource = Some(self.resource.clone());
        let resource_spans = vec![ResourceSpans {
            resource,
            scope_spans,
            ..ResourceSpans::default()
        }];
        let request = ExportTraceServiceRequest { resource_spans };
        let (failed, error) = match self.collector.export(request.encode_to_vec().into()).await {
            Ok(rejected) => (rejected.min(span_count), None),
            Err(error) => (span_count, Some(error)),
        };
        let counters = &self.counters;
        counters.failed.fetch_add(failed, Ordering::Relaxed);
        let exported = span_count - failed;
        counters.exported.fetch_add(exported, Ordering::Relaxed);
        self.collector.log_result(error.as_deref());
    }
}
