//! Closes client connections.

use http::StatusCode;
use std::time::Duration;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use crate::proxy::client_connection::connection_monitor::{ConnectionMonitor, TimeoutKind};
use crate::proxy::server::monitored_socket::MonitoredSocket;

const REQUEST_TIMEOUT_RESPONSE: &[u8] =
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

/// Time limit for writing a final response and closing the connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// Closes a connection that exceeded a timeout: after a 408 response, or with a reset.
pub(super) async fn close_timed_out_connection(
    mut socket: MonitoredSocket,
    overdue: TimeoutKind,
    monitor: &ConnectionMonitor,
    record_unreadable: impl Fn(StatusCode),
) {
    tracing::debug!(?overdue, "client connection timed out");
    if let Some(reason) = overdue.close_reason() {
        monitor.record_close(reason);
    }
    if overdue != TimeoutKind::SlowHead {
        return socket.abort();
    }
    record_unreadable(StatusCode::REQUEST_TIMEOUT);
    socket.record_unread_input();
    let response_sent = timeout(CLOSE_TIMEOUT, async {
        socket.write_all(REQUEST_TIMEOUT_RESPONSE).await?;
        socket.shutdown().await
    });
    if !matches!(response_sent.await, Ok(Ok(()))) {
        tracing::debug!("408 response not delivered");
    }
}

/// Shuts a connection down within [`CLOSE_TIMEOUT`].
pub(super) async fn close_gracefully(socket: &mut (impl AsyncWrite + Unpin)) {
    if !matches!(timeout(CLOSE_TIMEOUT, socket.shutdown()).await, Ok(Ok(()))) {
        tracing::debug!("client did not close within the limit");
    }
}
