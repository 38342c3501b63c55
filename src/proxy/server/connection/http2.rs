//! HTTP/2 connections and the tasks of their streams.

use futures_util::FutureExt as _;
use hyper::rt::Executor;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::error::Error as _;
use std::future::{Future, poll_fn};
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;
use tokio::time::Instant;

use super::driver::ConnectionDriver;
use super::request::RequestContext;
use super::upgrade_handover::UpgradeHandover;
use crate::proxy::client_connection::ConnectionCloseReason;
use crate::proxy::client_connection::connection_memory::{
    H2_CONNECTION_WINDOW_BYTES, H2_STREAM_WINDOW_BYTES,
};
use crate::proxy::client_connection::connection_monitor::{ConnectionMonitor, StreamProgress};
use crate::proxy::connection_io::LazyTimer;
use crate::proxy::http2_frames::frame_scanner::INVALID_FRAME;
use crate::proxy::server::handler::RequestHandler;
use crate::proxy::server::listener::WorkerListener;
use crate::proxy::server::monitored_socket::MonitoredSocket;

/// Response bytes buffered per stream while the client's flow-control window is exhausted.
const H2_STREAM_SEND_BUFFER_BYTES: usize = 32 * 1024;

/// Maximum streams that a client has reset before the server accepted them ("rapid reset").
const H2_MAX_PENDING_RESETS: usize = 20;

/// Maximum streams that the server resets for client errors before it closes the connection.
const H2_MAX_LOCAL_RESETS: usize = 256;

/// Interval of PINGs, which detect a peer that disappeared without closing the connection.
const H2_PING_INTERVAL: Duration = Duration::from_secs(20);
const H2_PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves HTTP/2 until the connection ends.
pub(super) async fn serve_http2<H: RequestHandler>(
    socket: Box<MonitoredSocket>,
    context: &RequestContext<H>,
    mut driver: ConnectionDriver,
) {
    let http2 = new_builder(&context.listener, &context.monitor, &context.handover);
    let requests = service_fn(|request| context.handle(request));
    let mut connection = http2.serve_connection(TokioIo::new(socket), requests);
    let end = driver.drive(|cx, close| {
        if close {
            Pin::new(&mut connection).graceful_shutdown();
        }
        Pin::new(&mut connection).poll(cx)
    });
    let monitor = &context.monitor;
    match end.await {
        Ok(result) => {
            let is_flood = monitor.frame_budget.is_exhausted.get();
            let flood = is_flood.then_some(ConnectionCloseReason::Flood);
            let reason = match result {
                Ok(()) => flood,
                Err(error) => {
                    tracing::debug!(%error, "client connection failed");
                    flood.or_else(|| classify_connection_error(&error))
                }
            };
            monitor.record_close(reason);
        }
        Err(overdue) => monitor.record_timeout(overdue),
    }
}

fn new_builder(
    listener: &WorkerListener,
    monitor: &Rc<ConnectionMonitor>,
    handover: &Rc<UpgradeHandover>,
) -> http2::Builder<StreamTaskExecutor> {
    let mut http2 = http2::Builder::new(StreamTaskExecutor {
        monitor: Rc::clone(monitor),
        handover: Rc::clone(handover),
    });
    let settings = &listener.config.settings;
    let max_streams = settings.max_concurrent_streams;
    // The operator's own proxies may reset every stream: they have timeouts of milliseconds, and
    // carry many clients, of which one must not end the requests of others.
    if listener.config.kind.is_public() && !monitor.connection.is_from_trusted_proxy() {
        http2
            .max_pending_accept_reset_streams(H2_MAX_PENDING_RESETS)
            .max_local_error_reset_streams(H2_MAX_LOCAL_RESETS);
    } else {
        http2
            .max_pending_accept_reset_streams(usize::try_from(max_streams).unwrap_or(usize::MAX))
            .max_local_error_reset_streams(None);
    }
    http2
        .timer(TokioTimer::new())
        .enable_connect_protocol()
        .max_concurrent_streams(max_streams)
        .max_header_list_size(u32::try_from(settings.max_header_bytes).unwrap_or(u32::MAX))
        .initial_stream_window_size(H2_STREAM_WINDOW_BYTES)
        .initial_connection_window_size(H2_CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(H2_STREAM_SEND_BUFFER_BYTES)
        .keep_alive_interval(H2_PING_INTERVAL)
        .keep_alive_timeout(H2_PING_TIMEOUT);
    http2
}

/// Classifies the error of an HTTP/2 connection. Returns `None` if the client did not cause it.
fn classify_connection_error(error: &hyper::Error) -> Option<ConnectionCloseReason> {
    let error = error
        .source()?
        .downcast_ref::<h2::Error>()
        .filter(|error| error.is_library() || error.is_io())?;
    if let Some(error) = error.get_io() {
        return (error.kind() == INVALID_FRAME).then_some(ConnectionCloseReason::Protocol);
    }
    match error.reason()? {
        h2::Reason::NO_ERROR => None,
        h2::Reason::ENHANCE_YOUR_CALM => Some(ConnectionCloseReason::Flood),
        _ => Some(ConnectionCloseReason::Protocol),
    }
}

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
}

impl<F: Future<Output = ()> + 'static> Executor<F> for StreamTaskExecutor {
    fn execute(&self, stream: F) {
        let (this, upgraded) = (self.clone(), self.handover.request.take());
        tokio::task::spawn_local(async move {
            let work = async {
                match upgraded {
                    // Boxed, so that the tasks of other streams have no space for it.
                    Some(upgraded) => {
                        let stall_timeout = this.monitor.timeouts.write_stall;
                        Box::pin(upgraded.serve_http2_tunnel(stream, stall_timeout)).await;
                    }
                    None => this.run_stream(Box::pin(stream)).await,
                }
            };
            if AssertUnwindSafe(work).catch_unwind().await.is_err() {
                this.monitor.connections.record_panic();
                tracing::error!("http/2 stream task panicked");
            }
        });
    }
}

impl StreamTaskExecutor {
    async fn run_stream(&self, mut stream: Pin<Box<impl Future<Output = ()>>>) {
        let (monitor, mut timer, mut stalled_since) = (&self.monitor, LazyTimer::default(), None);
        poll_fn(|cx| {
            monitor.stream_progress.take();
            let done = stream.as_mut().poll(cx);
            // A request still in the handover is dropped: its client disconnected before the
            // upgrade.
            drop(self.handover.request.take());
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
    }
}
