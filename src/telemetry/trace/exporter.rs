//! Span export: a separate thread collects finished requests and exports their spans in batches.
//!
//! Request processing never waits for the export. Spans that do not fit into the queue are dropped
//! and counted.

use crate::telemetry::otlp::{CollectorClient, ExportHandle, instrumentation_scope};
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

/// Maximum number of finished requests that wait for their export; they take a few MiB at most.
pub(super) const QUEUE_CAPACITY: usize = 2048;
/// Maximum number of requests in one batch.
const MAX_BATCH_REQUESTS: usize = 256;
/// Maximum time that the first request of a batch waits for others.
const MAX_BATCH_DELAY: Duration = Duration::from_secs(1);

/// Counters of spans by export result.
#[derive(Debug, Default)]
pub(super) struct SpanExportCounters {
    pub(super) exported: AtomicU64,
    /// Spans that were dropped because the queue was full.
    pub(super) dropped: AtomicU64,
    /// Spans that were not exported because the collector was unavailable or rejected them.
    pub(super) failed: AtomicU64,
}

/// State of the export thread.
struct SpanExportWorker {
    collector: CollectorClient,
    resource: Resource,
    counters: Arc<SpanExportCounters>,
}

/// Starts the export thread, which exports what is queued.
pub(super) fn start_export(
    collector: CollectorClient,
    resource: Resource,
    counters: Arc<SpanExportCounters>,
    queue: mpsc::Receiver<Vec<Span>>,
) -> io::Result<ExportHandle> {
    let (handle, stopped, done) = ExportHandle::new("span");
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let worker = SpanExportWorker {
        collector,
        resource,
        counters,
    };
    thread::Builder::new()
        .name("trace".to_owned())
        .spawn(move || {
            runtime.block_on(worker.run(queue, stopped));
            drop(done);
        })?;
    Ok(handle)
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
