//! The task of an HTTP/2 connection.

use bytes::Bytes;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Weak;
use std::task::Poll;

use super::connection::Http2Connection;
use super::ping_monitor::PingMonitor;
use crate::proxy::server::lazy_timer::LazyTimer;
use crate::proxy::upstream::connector::UpstreamSocket;
use crate::proxy::upstream::error::format_error_chain;
use crate::proxy::upstream::read_limit::ReadAllowance;

/// The task that reads and writes for all requests of a connection.
pub(crate) struct Http2Driver {
    pub(super) connection: h2::client::Connection<UpstreamSocket, Bytes>,
    pub(super) ping_monitor: Option<PingMonitor>,
    pub(super) read_allowance: ReadAllowance,
    pub(super) http2_connection: Weak<Http2Connection>,
    pub(super) deferred_cancel_timer: LazyTimer,
}

impl Http2Driver {
    /// Runs the connection until it closes, which fails its remaining requests.
    pub(crate) async fn run(mut self) {
        let end = poll_fn(|cx| {
            if let Poll::Ready(end) = Pin::new(&mut self.connection).poll(cx) {
                return Poll::Ready(end.map_err(|error| format_error_chain(&error)));
            }
            let Some(http2_connection) = self.http2_connection.upgrade() else {
                self.read_allowance.renew();
                return Poll::Pending;
            };
            if self.read_allowance.is_spent() {
                http2_connection.collect_unread_frames();
                self.read_allowance.renew();
            }
            let waker = cx.waker().clone();
            http2_connection.driver_waker.replace(Some(waker));
            http2_connection.cancel_deferred_if_due(&mut self.deferred_cancel_timer, cx);
            let Some(ping_monitor) = &mut self.ping_monitor else {
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
}
