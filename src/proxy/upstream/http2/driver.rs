//! The task of an HTTP/2 connection.

use bytes::Bytes;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Weak;
use std::task::Poll;

use super::connection::Http2Connection;
use super::ping_monitor::PingMonitor;
use crate::proxy::connection_io::LazyTimer;
use crate::proxy::upstream::connector::UpstreamSocket;
use crate::proxy::upstream::read_limit::ReadAllowance;
use crate::proxy::upstream_error::format_error_chain;

/// Reads and writes for all requests of a connection until it closes, which fails its remaining
/// requests.
pub(super) async fn run_driver(
    mut connection: h2::client::Connection<UpstreamSocket, Bytes>,
    mut ping_monitor: Option<PingMonitor>,
    read_allowance: ReadAllowance,
    http2_connection: Weak<Http2Connection>,
) {
    let mut deferred_cancel_timer = LazyTimer::default();
    let end = poll_fn(|cx| {
        if let Poll::Ready(end) = Pin::new(&mut connection).poll(cx) {
            return Poll::Ready(end.map_err(|error| format_error_chain(&error)));
        }
        let Some(http2_connection) = http2_connection.upgrade() else {
            read_allowance.renew();
            return Poll::Pending;
        };
        if read_allowance.is_spent() {
            http2_connection.collect_unread_frames();
            read_allowance.renew();
        }
        let waker = cx.waker().clone();
        http2_connection.driver_waker.replace(Some(waker));
        http2_connection.cancel_deferred_if_due(&mut deferred_cancel_timer, cx);
        let Some(ping_monitor) = &mut ping_monitor else {
            return Poll::Pending;
        };
        ping_monitor
            .poll(&http2_connection.is_suspect, cx)
            .map(|()| Err("the upstream did not answer a PING".to_owned()))
    });
    match end.await {
        Ok(()) => tracing::debug!("upstream connection closed"),
        Err(error) => tracing::debug!(error, "upstream connection closed"),
    }
}
