//! Export of metrics: a task sends all metrics to a collector at an interval.

use super::registry::Metrics;
use super::status::ProcessStatus;
use crate::clock::Clock;
use crate::telemetry::otlp::{CollectorClient, CollectorSettings, ExportHandle, OtlpSignal};
use bytes::Bytes;
use opentelemetry_proto::tonic::resource::v1::Resource;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};

/// Settings of the export of metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricExportSettings {
    pub collector: CollectorSettings,
    pub interval: Duration,
}

/// Reads the state of the process for an export.
type ReadProcessStatus = Arc<dyn Fn() -> ProcessStatus + Send + Sync>;

/// A message of an export. The next one is encoded once the sender has sent a value, so that there
/// is one message in memory at a time.
type MessageToSend = (Bytes, oneshot::Sender<()>);

/// State of the export task.
struct MetricExportWorker {
    collector: CollectorClient,
    resource: Arc<Resource>,
    metrics: Arc<Metrics>,
    read_status: ReadProcessStatus,
    clock: Clock,
    started_ns: u64,
}

/// Starts the export on the current runtime. Its end is one more export.
pub fn start_metric_export(
    settings: MetricExportSettings,
    resource: Resource,
    metrics: Arc<Metrics>,
    read_status: ReadProcessStatus,
) -> ExportHandle {
    let clock = Clock::system();
    let worker = MetricExportWorker {
        collector: CollectorClient::new(OtlpSignal::Metrics, settings.collector),
        resource: Arc::new(resource),
        metrics,
        read_status,
        started_ns: clock.now_us().saturating_mul(1000),
        clock,
    };
    let (handle, stopped, done) = ExportHandle::new(OtlpSignal::Metrics);
    tokio::spawn(async move {
        worker.run(settings.interval, stopped).await;
        drop(done);
    });
    handle
}

impl MetricExportWorker {
    async fn run(mut self, export_interval: Duration, mut stopped: oneshot::Receiver<()>) {
        let mut ticks = interval(export_interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick is due at once.
        ticks.tick().await;
        loop {
            let is_ending = tokio::select! {
                _ = ticks.tick() => false,
                _ = &mut stopped => true,
            };
            let result = self.export().await;
            self.record_result(result);
            if is_ending {
                return;
            }
        }
    }

    async fn export(&mut self) -> Result<(), String> {
        let (metrics, read_status) = (Arc::clone(&self.metrics), Arc::clone(&self.read_status));
        let (started_ns, now_ns) = (self.started_ns, self.clock.now_us().saturating_mul(1000));
        let resource = Arc::clone(&self.resource);
        let (sender, mut messages) = mpsc::channel::<MessageToSend>(1);
        // Encoding takes milliseconds with many policies, and this thread accepts connections.
        let encoder = spawn_blocking(move || {
            let send_message = |message| {
                let (sent, is_sent) = oneshot::channel();
                sender.blocking_send((message, sent)).is_ok() && is_sent.blocking_recv().is_ok()
            };
            let times = (started_ns, now_ns);
            metrics.send_otlp_messages(&read_status(), &resource, times, send_message);
        });
        while let Some((message, sent)) = messages.recv().await {
            // An error drops `sent` and the channel, which ends the encoding.
            let rejected = self.collector.export(message).await?;
            if rejected > 0 {
                return Err(format!("the collector rejected {rejected} data points"));
            }
            sent.send(()).ok();
        }
        encoder.await.map_err(|error| error.to_string())
    }

    fn record_result(&mut self, result: Result<(), String>) {
        if let Some([successes, failures]) = &self.metrics.export_counts {
            let count = if result.is_ok() { successes } else { failures };
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.collector.log_result(result.err().as_deref());
    }
}
