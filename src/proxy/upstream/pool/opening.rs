//! Opening of new connections.

use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use std::rc::Rc;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::UpstreamPool;
use super::connection::{ConnectionProtocol, Http1Connection, StreamSlot, UpstreamConnection};
use crate::proxy::upstream::MAX_RESPONSE_HEAD_BYTES;
use crate::proxy::upstream::connector::{AlpnOffer, UpstreamSocket};
use crate::proxy::upstream::http2::{self, Http2Connection};
use crate::proxy::upstream::read_limit::ResponseRate;
use crate::proxy::upstream_error::{UpstreamError, UpstreamErrorKind};

/// Maximum header lines of an HTTP/1.1 response. hyper's default of 100 is too few for frameworks
/// that send one line per cookie or preload.
const MAX_RESPONSE_HEADERS: usize = 256;

impl UpstreamPool {
    pub(super) fn open_http2_if_needed(self: &Rc<Self>) {
        self.waiters
            .borrow_mut()
            .retain(|waiter| !waiter.is_closed());
        let streams = self.streams_per_connection.get();
        let expected = self.opening_http2_connections.get().saturating_mul(streams);
        if expected >= self.waiters.borrow().len() {
            return;
        }
        self.opening_http2_connections.update(|value| value + 1);
        let pool = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let mut retries = pool.settings().retry_connect;
            let opened = pool.open_new(&mut retries, AlpnOffer::Http2AndHttp1).await;
            pool.opening_http2_connections.update(|value| value - 1);
            match opened {
                Ok(connection) => pool.distribute_connection(connection),
                // The waiting requests stay queued for streams of the other connections.
                Err(error) if !pool.http2_connections.borrow().is_empty() => {
                    tracing::debug!(%error, "failed to open another upstream connection");
                }
                Err(error) => pool.reject_waiters(Some(&error)),
            }
        });
    }

    pub(super) async fn open_connection(
        self: &Rc<Self>,
        permit: OwnedSemaphorePermit,
        retries: &mut u32,
        offer: AlpnOffer,
    ) -> Result<Box<UpstreamConnection>, UpstreamError> {
        let mut permit = Some(permit);
        loop {
            let started_at = Instant::now();
            let opened = match self.shared.connect(offer).await {
                Ok(stream) => {
                    self.perform_handshake(stream, &mut permit, started_at)
                        .await
                }
                Err(error) => Err(error),
            };
            match opened {
                Ok(protocol) => {
                    if offer == AlpnOffer::Http2AndHttp1 {
                        let is_http2 = matches!(protocol, ConnectionProtocol::Http2(_));
                        self.negotiated_http2.set(Some(is_http2));
                    }
                    return Ok(Box::new(UpstreamConnection::new(protocol)));
                }
                Err(error) if *retries > 0 => {
                    *retries -= 1;
                    tracing::debug!(%error, "upstream connection attempt failed; retrying");
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Performs the handshake of the negotiated protocol.
    ///
    /// The connection takes `permit`. On a retry `permit` is empty, because the failed connection
    /// took and released it; a new permit is then acquired.
    pub(super) async fn perform_handshake(
        self: &Rc<Self>,
        stream: UpstreamSocket,
        permit: &mut Option<OwnedSemaphorePermit>,
        started_at: Instant,
    ) -> Result<ConnectionProtocol, UpstreamError> {
        let connection_permit = match permit.take() {
            Some(permit) => permit,
            None => self.acquire_permit().await?,
        };
        let stream = stream.with_permit(connection_permit);
        if stream.is_http2 {
            let limit = self.settings().connect_timeout;
            let limit = limit.saturating_sub(started_at.elapsed());
            let (http2_connection, driver) = http2::perform_http2_handshake(stream, limit).await?;
            self.spawn_driver(&http2_connection, driver);
            self.streams_per_connection
                .set(http2_connection.max_streams());
            let slot = StreamSlot::reserve(&http2_connection, self).map(ConnectionProtocol::Http2);
            self.http2_connections.borrow_mut().push(http2_connection);
            let no_streams = "the upstream allows no concurrent streams";
            return slot.ok_or_else(|| UpstreamErrorKind::Protocol.with_detail(no_streams));
        }
        let peer = stream.peer_ip();
        let response_rate = ResponseRate::new(stream.read_limit.clone());
        let handshake = http1::Builder::new()
            .max_buf_size(MAX_RESPONSE_HEAD_BYTES as usize)
            .max_headers(MAX_RESPONSE_HEADERS)
            .handshake(TokioIo::new(stream))
            .await;
        let failed = |error: hyper::Error| {
            UpstreamErrorKind::ConnectionTerminated.with_detail(error.to_string())
        };
        let (sender, connection) = handshake.map_err(failed)?;
        let task = tokio::task::spawn_local(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "upstream connection closed");
            }
        });
        Ok(ConnectionProtocol::Http1(Http1Connection {
            sender,
            informational: Arc::default(),
            response_rate,
            peer,
            task: task.abort_handle(),
        }))
    }

    /// Gives a new connection, and for HTTP/2 its further streams, to waiting requests.
    pub(super) fn distribute_connection(self: &Rc<Self>, connection: Box<UpstreamConnection>) {
        let http2_connection = match &connection.protocol {
            ConnectionProtocol::Http2(slot) => Some(Rc::clone(&slot.connection)),
            ConnectionProtocol::Http1(_) => None,
        };
        match self.pop_waiter() {
            Some(waiter) => drop(waiter.send(Ok(Some(connection)))),
            None if http2_connection.is_none() => self.keep_idle(connection),
            None => {}
        }
        if let Some(http2_connection) = http2_connection {
            self.give_streams_to_waiters(&http2_connection);
        }
        // The remaining requests must retry, so that another connection is opened for them.
        self.reject_waiters(None);
    }

    /// Spawns the task that runs an HTTP/2 connection until it closes.
    fn spawn_driver(
        self: &Rc<Self>,
        connection: &Rc<Http2Connection>,
        driver: impl Future<Output = ()> + 'static,
    ) {
        let (pool, weak_connection) = (Rc::downgrade(self), Rc::downgrade(connection));
        let task = tokio::task::spawn_local(async move {
            driver.await;
            if let (Some(connection), Some(pool)) = (weak_connection.upgrade(), pool.upgrade()) {
                connection.closing.set(true);
                pool.handle_stream_end(&connection);
            }
        });
        connection.task.set(Some(task.abort_handle()));
    }
}
