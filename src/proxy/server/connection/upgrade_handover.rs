//! From a request that was upgraded to the tunnel that takes its place.
//!
//! hyper gives an upgraded client's bytes to whoever drives the connection, or runs its streams; the tunnel's
//! other end comes with the response. Both meet in the [`UpgradeHandover`].

use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::close_gracefully;
use crate::proxy::http::tunnel::{Tunnel, TunnelEndReason};
use crate::proxy::server::connection_timeouts::{
    ActiveRequest, ConnectionMonitor, MonitoredSocket,
};
use crate::telemetry::metrics::ConnectionCloseReason;

/// Where a request leaves a tunnel for whoever gets the client's bytes from hyper.
#[derive(Debug, Default)]
pub(super) struct UpgradeHandover {
    upgraded_request: RefCell<Option<UpgradedRequest>>,
    upgrade_requested: Cell<bool>,
}

impl UpgradeHandover {
    pub(super) fn put(&self, request: UpgradedRequest) {
        self.upgraded_request.replace(Some(request));
    }

    pub(super) fn take(&self) -> Option<UpgradedRequest> {
        self.upgraded_request.take()
    }

    /// A request has come that could have been upgraded.
    pub(super) fn set_upgrade_requested(&self) {
        self.upgrade_requested.set(true);
    }

    /// Whether hyper takes the end of the connection for an upgrade, and so does not close it.
    pub(super) fn was_upgrade_requested(&self) -> bool {
        self.upgrade_requested.get()
    }
}

/// A request that was answered by switching protocols.
#[derive(Debug)]
pub(super) struct UpgradedRequest {
    tunnel: Box<Tunnel>,
    client: OnUpgrade,
    active: ActiveRequest,
}

impl UpgradedRequest {
    /// `client`: hyper's promise of the client's bytes.
    pub(super) fn new(tunnel: Box<Tunnel>, client: OnUpgrade, active: ActiveRequest) -> Self {
        Self {
            tunnel,
            client,
            active,
        }
    }

    /// Goes on with the whole connection.
    pub(super) async fn serve_http1_tunnel(
        mut self,
        mut socket: MonitoredSocket,
        stall_timeout: Duration,
    ) {
        socket.set_half_close(true);
        let over = self.tunnel.run(&mut socket, stall_timeout, false).await;
        record_tunnel_end(&over, self.active.monitor());
        match over {
            TunnelEndReason::Completed | TunnelEndReason::ClientDisconnected(_) => {}
            TunnelEndReason::ClientStalled | TunnelEndReason::UpstreamStalled => socket.abort(),
            TunnelEndReason::UpstreamDisconnected(_)
            | TunnelEndReason::IdleTimeout
            | TunnelEndReason::MaxDurationExceeded => {
                socket.set_half_close(false);
                socket.ignore_remaining_input();
                close_gracefully(&mut socket).await;
            }
        }
    }

    /// Goes on with one stream, whose `sending` half hyper wants to be run.
    pub(super) async fn serve_http2_tunnel(
        mut self,
        sending: impl Future<Output = ()>,
        stall_timeout: Duration,
    ) {
        let io = match self.client.await {
            Ok(upgraded) => TokioIo::new(upgraded),
            Err(error) => return tracing::debug!(%error, "a stream ended before its tunnel began"),
        };
        let mut stream = TunnelStream {
            io,
            sending: Some(Box::pin(sending)),
            active: self.active,
        };
        let over = self.tunnel.run(&mut stream, stall_timeout, true).await;
        record_tunnel_end(&over, stream.active.monitor());
        if matches!(
            over,
            TunnelEndReason::UpstreamDisconnected(_)
                | TunnelEndReason::IdleTimeout
                | TunnelEndReason::MaxDurationExceeded
        ) {
            close_gracefully(&mut stream).await;
        }
    }
}

fn record_tunnel_end(over: &TunnelEndReason, monitor: &ConnectionMonitor) {
    tracing::debug!(%over, "a tunnel ended");
    match over {
        TunnelEndReason::ClientStalled => monitor.record_close(ConnectionCloseReason::SlowRead),
        TunnelEndReason::IdleTimeout | TunnelEndReason::UpstreamStalled => {
            monitor.record_close(ConnectionCloseReason::TunnelIdle)
        }
        TunnelEndReason::Completed
        | TunnelEndReason::ClientDisconnected(_)
        | TunnelEndReason::UpstreamDisconnected(_)
        | TunnelEndReason::MaxDurationExceeded => {}
    }
}

/// An HTTP/2 stream as bytes. hyper's sending half is a task that ends early when the client resets the
/// stream; run from here, that is noticed even while there is nothing to send.
struct TunnelStream<S> {
    io: TokioIo<Upgraded>,
    /// `None`: over.
    sending: Option<Pin<Box<S>>>,
    active: ActiveRequest,
}

impl<S: Future<Output = ()>> TunnelStream<S> {
    fn poll_sending(&mut self, cx: &mut Context<'_>) {
        if self
            .sending
            .as_mut()
            .is_some_and(|sending| sending.as_mut().poll(cx).is_ready())
        {
            self.sending = None;
        }
    }
}

impl<S: Future<Output = ()>> AsyncRead for TunnelStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_read(cx, into)
    }
}

impl<S: Future<Output = ()>> AsyncWrite for TunnelStream<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.io).poll_write(cx, bytes);
        if written.is_ready() {
            this.active.monitor().frame_budget().credit_response();
        }
        this.poll_sending(cx);
        written
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.poll_sending(cx);
        Pin::new(&mut this.io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        // Closes the way to the sending half, which then ends, which is what this waits for.
        if let Poll::Ready(done) = Pin::new(&mut this.io).poll_shutdown(cx) {
            return Poll::Ready(done);
        }
        this.poll_sending(cx);
        Pin::new(&mut this.io).poll_shutdown(cx)
    }
}
