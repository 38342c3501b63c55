//! Handover from an upgraded request to the tunnel that replaces it.
//!
//! hyper passes the client's bytes to the connection driver (HTTP/1) or to a stream task (HTTP/2).
//! The tunnel to the upstream comes with the response. [`UpgradeHandover`] brings the tunnel to the
//! client's bytes.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use std::cell::{Cell, RefCell};
use std::future::pending;
use std::time::Duration;
use tokio_util::io::InspectWriter;

use super::driver::close_gracefully;
use crate::proxy::body::tunnel::{Tunnel, TunnelEndReason};
use crate::proxy::client_connection::ConnectionCloseReason;
use crate::proxy::client_connection::connection_monitor::{ActiveRequestGuard, ConnectionMonitor};
use crate::proxy::server::monitored_socket::MonitoredSocket;

/// Slot in which a request leaves its tunnel for the connection driver or the stream task.
#[derive(Debug, Default)]
pub(super) struct UpgradeHandover {
    pub(super) request: RefCell<Option<UpgradedRequest>>,
    /// Whether a request arrived that could be upgraded: then hyper treats the end of the
    /// connection as an upgrade and leaves the socket open.
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
        mut socket: Box<MonitoredSocket>,
        stall_timeout: Duration,
    ) {
        socket.is_half_close = true;
        let monitor = self.active.monitor();
        // hyper and its buffers have ended.
        monitor.has_buffers.set(false);
        monitor.connections.set_unclosable(&monitor.connection);
        monitor.report_memory();
        let tunnel = &mut self.tunnel;
        let end_reason = tunnel.run(&mut socket, monitor, stall_timeout, false).await;
        record_tunnel_end(&end_reason, monitor);
        if end_reason.leaves_client_open() {
            socket.is_half_close = false;
            monitor.exchange.has_unread_input.set(true);
            close_gracefully(&mut socket).await;
        } else if end_reason.is_stall() {
            socket.abort();
        }
    }

    /// Runs the tunnel over one HTTP/2 stream, and meanwhile polls `sending`, hyper's sending half
    /// of the stream. It ends early when the client resets the stream, which is detected even while
    /// there is nothing to send.
    pub(super) async fn serve_http2_tunnel(
        mut self,
        sending: impl Future<Output = ()>,
        stall_timeout: Duration,
    ) {
        let upgraded = match self.client.await {
            Ok(upgraded) => upgraded,
            Err(error) => {
                return tracing::debug!(%error, "http/2 stream ended before its tunnel started");
            }
        };
        let counted = CountedTunnel(self.active);
        let monitor = counted.0.monitor();
        monitor.memory.begin_stream();
        let credit_output = |_: &[u8]| monitor.frame_budget.credit_response();
        let mut stream = InspectWriter::new(TokioIo::new(upgraded), credit_output);
        let tunnel = async {
            let tunnel = &mut self.tunnel;
            let end_reason = tunnel.run(&mut stream, monitor, stall_timeout, true).await;
            record_tunnel_end(&end_reason, monitor);
            if end_reason.leaves_client_open() {
                close_gracefully(&mut stream).await;
            }
        };
        let sending = async {
            sending.await;
            pending().await
        };
        // The sending half is first: its end does not wake the tunnel, which has to see it.
        tokio::select! {
            biased;
            () = sending => {}
            () = tunnel => {}
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

/// Tunnel over an HTTP/2 stream, which counts for the memory budget until it is dropped.
struct CountedTunnel(ActiveRequestGuard);

impl Drop for CountedTunnel {
    fn drop(&mut self) {
        self.0.monitor().memory.end_stream();
    }
}
