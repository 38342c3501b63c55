//! HTTP/2 handshake with the upstream.

use h2::client::Builder;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::connection::Http2Connection;
use super::driver::run_driver;
use super::ping_monitor::PingMonitor;
use super::received_stream::DATA_FRAME_BUDGET_BYTES;
use crate::proxy::upstream::MAX_RESPONSE_HEAD_BYTES;
use crate::proxy::upstream::connector::UpstreamSocket;
use crate::proxy::upstream::read_limit::ReadAllowance;
use crate::proxy::upstream_error::{UpstreamError, UpstreamErrorKind, format_error_chain};

/// Receive windows per stream and per connection. The connection window holds one full stream
/// window per possible stream, so a slow client delays only its own response.
const STREAM_WINDOW_BYTES: u32 = 56 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 100 * STREAM_WINDOW_BYTES;
/// Maximum bytes that h2 buffers per stream for sending.
const SEND_BUFFER_BYTES: usize = 64 * 1024;
/// Number of cancelled streams that h2 remembers. Late frames for them are not protocol errors.
const MAX_REMEMBERED_RESETS: usize = 1000;

/// Performs the HTTP/2 handshake on a new connection.
///
/// Returns the connection and the future that drives it. The handshake completes when the
/// upstream's SETTINGS have arrived, so that an upstream without HTTP/2 is detected before any
/// request is sent.
///
/// # Errors
/// Returns an error if the upstream does not send valid SETTINGS within `limit`.
pub(crate) async fn perform_http2_handshake(
    mut stream: UpstreamSocket,
    limit: Duration,
) -> Result<(Rc<Http2Connection>, impl Future<Output = ()> + use<>), UpstreamError> {
    let (read_activity, peer) = (Arc::clone(&stream.read_activity), stream.peer_ip());
    let allowance = ReadAllowance::default();
    stream.filter_http2(allowance.clone());
    let mut builder = Builder::new();
    builder
        .enable_push(false)
        // No request is sent until the upstream's SETTINGS allow streams.
        .initial_max_send_streams(0)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_header_list_size(MAX_RESPONSE_HEAD_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .max_concurrent_reset_streams(MAX_REMEMBERED_RESETS)
        .data_frame_budget(DATA_FRAME_BUDGET_BYTES)
        // No limit of resets for protocol errors, which h2 counts over the connection's whole life.
        .max_local_error_reset_streams(None);
    let failed = |error: h2::Error| {
        let detail = format!("HTTP/2 handshake failed: {}", format_error_chain(&error));
        UpstreamErrorKind::from_h2(&error).with_detail(detail)
    };
    let handshake_future = async {
        let (sender, mut connection) = builder.handshake(stream).await.map_err(failed)?;
        poll_fn(|cx| match Pin::new(&mut connection).poll(cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(failed(error))),
            Poll::Ready(Ok(())) => Poll::Ready(Err(UpstreamErrorKind::ConnectionTerminated
                .with_detail("the upstream closed the connection before its HTTP/2 SETTINGS"))),
            Poll::Pending if sender.current_max_send_streams() > 0 => Poll::Ready(Ok(())),
            Poll::Pending => {
                allowance.renew();
                Poll::Pending
            }
        })
        .await?;
        Ok((sender, connection))
    };
    let (sender, mut connection) = tokio::time::timeout(limit, handshake_future)
        .await
        .unwrap_or_else(|_elapsed| {
            let detail = format!("no HTTP/2 SETTINGS from the upstream within {limit:?}");
            Err(UpstreamErrorKind::ConnectTimeout.with_detail(detail))
        })?;
    let http2_connection = Rc::new(Http2Connection::new(sender, peer));
    let ping_monitor = connection
        .ping_pong()
        .map(|pings| PingMonitor::new(pings, read_activity));
    let weak_connection = Rc::downgrade(&http2_connection);
    let driver = run_driver(connection, ping_monitor, allowance, weak_connection);
    Ok((http2_connection, driver))
}
