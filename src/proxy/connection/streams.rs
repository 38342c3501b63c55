//! The streams of an HTTP/2 connection.

use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::task::Poll;
use tokio::time::Instant;

use super::handover::Handover;
use crate::proxy::alarm::Alarm;
use crate::proxy::server::Load;
use crate::proxy::watch::Watch;
use crate::telemetry::metrics::Closed;

/// Runs the streams of an HTTP/2 connection, each in its own task, and resets those whose client
/// does not read: it can keep the connection busy while it grants a stream no window.
///
/// What a stream itself wants to be run is the sending half of its tunnel.
#[derive(Clone, Debug)]
pub(super) struct StreamTasks {
    watch: Rc<Watch>,
    handover: Rc<Handover>,
    load: Load,
}

impl StreamTasks {
    pub(super) fn new(watch: Rc<Watch>, handover: Rc<Handover>, load: Load) -> Self {
        Self {
            watch,
            handover,
            load,
        }
    }
}

/// Tells of a panic: nobody waits for the end of these tasks.
struct Witness(Load);

impl Drop for Witness {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.note_panic();
            tracing::error!("a request ended in a panic");
        }
    }
}

impl<F: Future<Output = ()> + 'static> hyper::rt::Executor<F> for StreamTasks {
    fn execute(&self, stream: F) {
        let (watch, handover) = (Rc::clone(&self.watch), Rc::clone(&self.handover));
        let witness = Witness(self.load.clone());
        if let Some(switched) = handover.take() {
            let tunnel = switched.serve_http2(stream, watch.stall_limit());
            tokio::task::spawn_local(async move {
                let _witness = witness;
                tunnel.await;
            });
            return;
        }
        tokio::task::spawn_local(async move {
            let _witness = witness;
            let (mut stream, mut alarm) = (Box::pin(stream), Alarm::default());
            let mut stalled_since = None;
            poll_fn(|cx| {
                watch.take_excused();
                let done = stream.as_mut().poll(cx);
                // Not taken up: the client left at the last moment.
                drop(handover.take());
                if done.is_ready() {
                    return Poll::Ready(());
                }
                if watch.take_excused() {
                    stalled_since = None;
                    return Poll::Pending;
                }
                let since = *stalled_since.get_or_insert_with(Instant::now);
                alarm
                    .poll(since + watch.stall_limit(), cx)
                    .map(|()| watch.count(Closed::SlowRead))
            })
            .await;
        });
    }
}
