//! Handover from an upgraded request to the tunnel that replaces it.
//!
//! hyper passes the client's bytes to the connection driver (HTTP/1) or to a stream task (HTTP/2).
//! The tunnel to the upstream comes with the response. [`UpgradeHandover`] brings the tunnel to the
//! client's bytes.

use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::driver::close_gracefully;
use crate::proxy::body::tunnel::{Tunnel, TunnelEndReason};
use crate::proxy::client_connection::ConnectionCloseReason;
use crate::proxy::client_connection::connection_monitor::{ActiveRequestGuard, ConnectionMonitor};
use crate::proxy::server::monitored_socket::MonitoredSocket;

/// Slot in which a request leaves its tunnel for the connection driver or the stream task.
#[derive(Debug, Default)]
pub(super) struct UpgradeHandover {
    pub(super) request: RefCell<Option<UpgradedRequest>>,
    /// Whether a request arrived that could be upgraded: then hyper treats the end of the connection
    /// as an upgrade and leaves the socket open.
    pub(super) was_upgrade_requested: Cell<bool>,
}

/// Request that was answered by switching protocols.
#[derive(Debug)]
pub(super) struct UpgradedRequest {
    pub(super) tunnel: Box<Tunnel>,
    /// hyper's future of the client's byte stream.
    pub(super) client: OnUpgrade,
    pub(super) active: ActiveRequestGuard,
}

impl UpgradedRequest {
    /// Runs the tunnel over the whole HTTP/1 connection.
    pub(super) async fn serve_http1_tunnel(
        mut self,
        mut socket: MonitoredSocket,
        stall_timeout: Duration,
    ) {
        socket.is_half_close = true;
        // hyper and its buffers have ended.
        self.active.monitor().has_buffers.set(false);
        self.active.monitor().set_unclosable();
        self.active.monitor().report_memory();
        let (tunnel, monitor) = (&mut self.tunnel, self.active.monitor());
        let end_reason = tunnel.run(&mut socket, monitor, stall_timeout, false).await;
        record_tunnel_end(&end_reason, self.active.monitor());
        if end_reason.leaves_client_open() {
            socket.is_half_close = false;
            self.active.monitor().exchange.has_unread_input.set(true);
            close_gracefully(&mut socket).await;
        } else if end_reason.is_stall() {
            socket.abort();
        }
    }

    /// Runs the tunnel over one HTTP/2 stream, and meanwhile polls `sending`, hyper's sending half
    /// of the stream.
    pub(super) async fn serve_http2_tunnel(
        mut self,
        sending: impl Future<Output = ()>,
        stall_timeout: Duration,
    ) {
        let io = match self.client.await {
            Ok(upgraded) => TokioIo::new(upgraded),
            Err(error) => {
                return tracing::debug!(%error, "http/2 stream ended before its tunnel started");
            }
        };
        self.active.monitor().memory.begin_stream();
        let mut stream = Http2TunnelStream {
            io,
            sending: Some(Box::pin(sending)),
            active: self.active,
        };
        let monitor = Rc::clone(stream.active.monitor());
        let tunnel = &mut self.tunnel;
        let end_reason = tunnel.run(&mut stream, &monitor, stall_timeout, true).await;
        record_tunnel_end(&end_reason, stream.active.monitor());
        if end_reason.leaves_client_open() {
            close_gracefully(&mut stream).await;
        }
    }
}

fn record_tunnel_end(end_reason: &TunnelEndReason, monitor: &ConnectionMonitor) {
    tracing::debug!(over = %end_reason, "tunnel ended");
    match end_reason {
        TunnelEndReason::ClientStalled => monitor.record_close(ConnectionCloseReason::SlowRead),
        TunnelEndReason::IdleTimeout | TunnelEndReason::UpstreamStalled => {
            monitor.record_close(ConnectionCloseReason::TunnelIdle)
        }
        _ => {}
    }
}

/// HTTP/2 stream as a byte stream. hyper's sending half ends early when the client resets the
/// stream. Polling the sending half detects a reset even while there is nothing to send.
struct Http2TunnelStream<S> {
    io: TokioIo<Upgraded>,
    /// hyper's sending half of the stream. `None` once the sending half has ended.
    sending: Option<Pin<Box<S>>>,
    active: ActiveRequestGuard,
}

impl<S> Drop for Http2TunnelStream<S> {
    fn drop(&mut self) {
        self.active.monitor().memory.end_stream();
    }
}

impl<S: Future<Output = ()>> Http2TunnelStream<S> {
    fn poll_sending_half(&mut self, cx: &mut Context<'_>) {
        self.sending
            .take_if(|sending| sending.as_mut().poll(cx).is_ready());
    }
}

impl<S: Future<Output = ()>> AsyncRead for Http2TunnelStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_read(cx, into)
    }
}

impl<S: Future<Output = ()>> AsyncWrite for Http2TunnelStream<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.io).poll_write(cx, bytes);
        if written.is_ready() {
            this.active.monitor().frame_budget.credit_response();
        }
        this.poll_sending_half(cx);
        written
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.poll_sending_half(cx);
        Pin::new(&mut this.io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        // Shutdown closes the channel to the sending half and waits for the end of the sending
        // half, which is therefore polled in between.
        if let Poll::Ready(done) = Pin::new(&mut this.io).poll_shutdown(cx) {
            return Poll::Ready(done);
        }
        this.poll_sending_half(cx);
        Pin::new(&mut this.io).poll_shutdown(cx)
    }
}
