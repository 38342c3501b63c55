//! The export: a thread of its own collects what is recorded, and hands it over in batches.
//!
//! Nothing that serves clients waits for it. What does not fit into the queue is dropped, and counted.

use super::collector::{CollectorClient, SpanExportError};
use super::span::RequestSpans;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::InstrumentationScope;
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;
use tokio::runtime::Builder;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

/// Requests that wait for their export: some MiB at most.
pub(super) const QUEUE_CAPACITY: usize = 2048;
/// Requests whose spans go together.
const MAX_BATCH_REQUESTS: usize = 256;
/// How long the first of a batch waits for others.
const MAX_BATCH_DELAY: Duration = Duration::from_secs(1);
/// Of one batch, connecting included.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// What the end of the process waits for.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// What became of spans.
#[derive(Debug, Default)]
pub(super) struct SpanExportCounters {
    pub(super) exported: AtomicU64,
    pub(super) dropped: AtomicU64,
    pub(super) failed: AtomicU64,
}

/// The end of the export.
#[derive(Debug)]
pub struct SpanExporter {
    stop: oneshot::Sender<()>,
    done: oneshot::Receiver<()>,
}

/// What the thread works with.
struct SpanExportWorker {
    collector: CollectorClient,
    resource: Resource,
    counters: Arc<SpanExportCounters>,
    has_failed: bool,
}

impl SpanExporter {
    /// Starts the thread.
    pub(super) fn start(
        collector: CollectorClient,
        resource: Resource,
        counters: Arc<SpanExportCounters>,
        queue: mpsc::Receiver<RequestSpans>,
    ) -> io::Result<Self> {
        let (stop, stopped) = oneshot::channel();
        let (done_sender, done) = oneshot::channel();
        let runtime = Builder::new_current_thread().enable_all().build()?;
        thread::Builder::new()
            .name("trace".to_owned())
            .spawn(move || {
                let worker = SpanExportWorker {
                    collector,
                    resource,
                    counters,
                    has_failed: false,
                };
                runtime.block_on(worker.run(queue, stopped));
                drop(done_sender);
            })?;
        Ok(Self { stop, done })
    }

    /// Has what is recorded exported, and waits for that a little.
    pub async fn finish(self) {
        let Self { stop, done } = self;
        drop(stop);
        // Both ends are told by the other's end.
        if timeout(SHUTDOWN_TIMEOUT, done).await.is_err() {
            tracing::warn!("the last spans were not exported");
        }
    }
}

/// Ends when a batch is full, or nothing more will come.
async fn fill_batch(batch: &mut Vec<RequestSpans>, queue: &mut mpsc::Receiver<RequestSpans>) {
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
        mut queue: mpsc::Receiver<RequestSpans>,
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

    async fn export(&mut self, batch: Vec<RequestSpans>) {
        let spans: Vec<_> = batch
            .into_iter()
            .flat_map(|recorded| recorded.into_spans())
            .collect();
        let span_count = u64::try_from(spans.len()).unwrap_or(u64::MAX);
        let scope = InstrumentationScope {
            name: "tidegate".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..InstrumentationScope::default()
        };
        let scope_spans = vec![ScopeSpans {
            scope: Some(scope),
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
        let result = timeout(EXPORT_TIMEOUT, self.collector.export(&request)).await;
        match result.unwrap_or_else(|_| Err("no answer in time".to_owned())) {
            Ok(rejected) => {
                let rejected = rejected.min(span_count);
                self.counters.failed.fetch_add(rejected, Ordering::Relaxed);
                self.counters
                    .exported
                    .fetch_add(span_count - rejected, Ordering::Relaxed);
                if std::mem::replace(&mut self.has_failed, false) {
                    tracing::info!("spans are exported again");
                }
            }
            Err(refused) => self.record_failure(span_count, &refused),
        }
    }

    fn record_failure(&mut self, span_count: u64, error: &SpanExportError) {
        self.counters
            .failed
            .fetch_add(span_count, Ordering::Relaxed);
        if !std::mem::replace(&mut self.has_failed, true) {
            tracing::warn!(error, "spans can't be exported");
        }
    }
}
