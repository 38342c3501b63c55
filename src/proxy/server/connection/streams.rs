//! Tasks of an HTTP/2 connection's streams.

use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::task::Poll;
use tokio::time::Instant;

use super::upgrade_handover::UpgradeHandover;
use crate::proxy::client_connection::ConnectionCloseReason;
use crate::proxy::client_connection::connection_load::ServerLoad;
use crate::proxy::client_connection::connection_monitor::{ConnectionMonitor, StreamProgress};
use crate::proxy::connection_io::LazyTimer;

/// Runs each stream of an HTTP/2 connection in its own task and resets streams that make no
/// progress. A client can keep the connection active and still grant one stream no flow-control
/// window.
///
/// A future that hyper spawns while the handover holds a request is the sending half of that
/// request's tunnel.
#[derive(Clone, Debug)]
pub(super) struct StreamTaskExecutor {
    pub(super) monitor: Rc<ConnectionMonitor>,
    pub(super) handover: Rc<UpgradeHandover>,
    pub(super) load: ServerLoad,
}

/// Counts and logs the panic of a stream task on drop, because no other task joins the stream
/// tasks.
struct StreamPanicReporter(ServerLoad);

impl Drop for StreamPanicReporter {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.record_panic();
            tracing::error!("http/2 stream task panicked");
        }
    }
}

impl<F: Future<Output = ()> + 'static> hyper::rt::Executor<F> for StreamTaskExecutor {
    fn execute(&self, stream: F) {
        let (monitor, handover) = (Rc::clone(&self.monitor), Rc::clone(&self.handover));
        let panic_reporter = StreamPanicReporter(self.load.clone());
        if let Some(upgraded_request) = handover.request.take() {
            let tunnel = upgraded_request.serve_http2_tunnel(stream, monitor.timeouts.write_stall);
            tokio::task::spawn_local(async move {
                let _panic_reporter = panic_reporter;
                tunnel.await;
            });
            return;
        }
        tokio::task::spawn_local(async move {
            let _panic_reporter = panic_reporter;
            let (mut stream, mut timer) = (Box::pin(stream), LazyTimer::default());
            let mut stalled_since = None;
            poll_fn(|cx| {
                monitor.stream_progress.take();
                let done = stream.as_mut().poll(cx);
                // A request still in the handover is dropped: its client disconnected before the
                // upgrade.
                drop(handover.request.take());
                if done.is_ready() {
                    return Poll::Ready(());
                }
                match monitor.stream_progress.take() {
                    // The upstream wakes the task. Only later can the client delay the stream.
                    Some(StreamProgress::AwaitsUpstream) => {
                        stalled_since = None;
                        return Poll::Pending;
                    }
                    Some(StreamProgress::AwaitsClient) => stalled_since = None,
                    None => {}
                }
                let since = *stalled_since.get_or_insert_with(Instant::now);
                timer
                    .poll(since + monitor.timeouts.write_stall, cx)
                    .map(|()| monitor.record_close(ConnectionCloseReason::SlowRead))
            })
            .await;
        });
    }
}
