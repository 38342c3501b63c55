//! The export: a thread of its own collects what is recorded, and hands it over in batches.
//!
//! Nothing that serves clients waits for it. What does not fit into the queue is dropped, and counted.

use super::collector::{Collector, Refused};
use super::span::Recorded;
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
pub(super) const QUEUE: usize = 2048;
/// Requests whose spans go together.
const BATCH: usize = 256;
/// How long the first of a batch waits for others.
const LINGER: Duration = Duration::from_secs(1);
/// Of one batch, connecting included.
const DEADLINE: Duration = Duration::from_secs(5);
/// What the end of the process waits for.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// What became of spans.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) exported: AtomicU64,
    pub(super) dropped: AtomicU64,
    pub(super) failed: AtomicU64,
}

/// The end of the export.
#[derive(Debug)]
pub struct Exporter {
    stop: oneshot::Sender<()>,
    done: oneshot::Receiver<()>,
}

/// What the thread works with.
struct Export {
    collector: Collector,
    resource: Resource,
    counts: Arc<Counts>,
    has_failed: bool,
}

impl Exporter {
    /// Starts the thread.
    pub(super) fn start(
        collector: Collector,
        resource: Resource,
        counts: Arc<Counts>,
        queue: mpsc::Receiver<Recorded>,
    ) -> io::Result<Self> {
        let (stop, stopped) = oneshot::channel();
        let (tell, done) = oneshot::channel();
        let runtime = Builder::new_current_thread().enable_all().build()?;
        thread::Builder::new()
            .name("trace".to_owned())
            .spawn(move || {
                let export = Export {
                    collector,
                    resource,
                    counts,
                    has_failed: false,
                };
                runtime.block_on(export.run(queue, stopped));
                drop(tell);
            })?;
        Ok(Self { stop, done })
    }

    /// Has what is recorded exported, and waits for that a little.
    pub async fn finish(self) {
        let Self { stop, done } = self;
        drop(stop);
        // Both ends are told by the other's end.
        if timeout(LAST_WORDS, done).await.is_err() {
            tracing::warn!("the last spans were not exported");
        }
    }
}

/// Ends when a batch is full, or nothing more will come.
async fn fill(batch: &mut Vec<Recorded>, queue: &mut mpsc::Receiver<Recorded>) {
    while batch.len() < BATCH {
        let room = BATCH - batch.len();
        if queue.recv_many(batch, room).await == 0 {
            return;
        }
    }
}

impl Export {
    async fn run(
        mut self,
        mut queue: mpsc::Receiver<Recorded>,
        mut stopped: oneshot::Receiver<()>,
    ) {
        let mut is_ending = false;
        loop {
            let mut batch = Vec::new();
            tokio::select! {
                taken = queue.recv_many(&mut batch, BATCH) => if taken == 0 { return },
                _ = &mut stopped, if !is_ending => {
                    is_ending = true;
                    queue.close();
                    continue;
                }
            }
            if !is_ending {
                tokio::select! {
                    () = fill(&mut batch, &mut queue) => {}
                    () = sleep(LINGER) => {}
                    _ = &mut stopped => is_ending = true,
                }
                if is_ending {
                    queue.close();
                }
            }
            self.export(batch).await;
        }
    }

    async fn export(&mut self, batch: Vec<Recorded>) {
        let spans: Vec<_> = batch
            .into_iter()
            .flat_map(|recorded| recorded.into_spans())
            .collect();
        let number = u64::try_from(spans.len()).unwrap_or(u64::MAX);
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
        let taken = timeout(DEADLINE, self.collector.export(&request)).await;
        match taken.unwrap_or_else(|_| Err("no answer in time".to_owned())) {
            Ok(rejected) => {
                let rejected = rejected.min(number);
                self.counts.failed.fetch_add(rejected, Ordering::Relaxed);
                self.counts
                    .exported
                    .fetch_add(number - rejected, Ordering::Relaxed);
                if std::mem::replace(&mut self.has_failed, false) {
                    tracing::info!("spans are exported again");
                }
            }
            Err(refused) => self.failed(number, &refused),
        }
    }

    fn failed(&mut self, number: u64, error: &Refused) {
        self.counts.failed.fetch_add(number, Ordering::Relaxed);
        if !std::mem::replace(&mut self.has_failed, true) {
            tracing::warn!(error, "spans can't be exported");
        }
    }
}
