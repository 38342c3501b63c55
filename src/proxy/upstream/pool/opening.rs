//! New connections, and requests that wait for a connection: permits, the queue, and the handover
//! of freed connections.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use super::{ConnectionProtocol, StreamSlot, UpstreamConnection};
use super::{QueueSlotGuard, UpstreamClient};
use crate::proxy::upstream::connector::{AlpnOffer, UpstreamSocket};
use crate::proxy::upstream::http1::Http1Connection;
use crate::proxy::upstream::http2;
use crate::proxy::upstream::http2::Http2Connection;
use crate::proxy::upstream_error::{UpstreamError, UpstreamErrorKind};

impl UpstreamClient {
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
            self.begin_sweeps();
            let no_streams = "the upstream allows no concurrent streams";
            return slot.ok_or_else(|| UpstreamErrorKind::Protocol.with_detail(no_streams));
        }
        let opened = Http1Connection::new(stream, &self.sweeper).await;
        opened
            .map(ConnectionProtocol::Http1)
            .map_err(|error| UpstreamErrorKind::ConnectionTerminated.with_detail(error.to_string()))
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
        let task = AbortOnDropHandle::new(task);
        connection.task.set(Some(task));
    }

    /// Opens an HTTP/1.1 connection, or waits for a freed one, whichever is possible first. Returns
    /// `None` if the caller must try again.
    pub(super) async fn wait_for_http1_connection(
        self: &Rc<Self>,
        retries: &mut u32,
    ) -> Result<Option<Box<UpstreamConnection>>, UpstreamError> {
        let permit = match Arc::clone(&self.shared.connection_permits).try_acquire_owned() {
            Ok(permit) => permit,
            Err(_none_left) => {
                let (sender, mut offered) = oneshot::channel();
                tokio::select! {
                    biased;
                    Ok(offered) = &mut offered => return offered,
                    permit = self.wait_for_permit(Some(sender)) => permit?,
                }
            }
        };
        let opened = self.open_connection(permit, retries, AlpnOffer::Http2AndHttp1);
        opened.await.map(Some)
    }

    /// Acquires a permit to open a connection. Used where a freed connection would not do.
    pub(super) async fn acquire_permit(&self) -> Result<OwnedSemaphorePermit, UpstreamError> {
        match Arc::clone(&self.shared.connection_permits).try_acquire_owned() {
            Ok(permit) => Ok(permit),
            Err(_none_left) => {
                // Closing one idle connection of this worker frees the permit that the new
                // connection needs.
                drop(self.idle_http1.borrow_mut().pop_front());
                self.wait_for_permit(None).await
            }
        }
    }

    /// Waits for a permit, in one queue with the requests of all workers. If `waiter` is given, it
    /// can receive a freed connection of this worker during the wait.
    pub(super) async fn wait_for_permit(
        &self,
        waiter: Option<ConnectionWaiter>,
    ) -> Result<OwnedSemaphorePermit, UpstreamError> {
        let settings = self.settings();
        let _slot = QueueSlotGuard::acquire(self, |shared| &shared.queued_requests)?;
        if let Some(waiter) = waiter {
            self.waiters.borrow_mut().push_back(waiter);
        }
        self.shared.queue_signal.send_replace(());
        let permit = Arc::clone(&self.shared.connection_permits).acquire_owned();
        match timeout(settings.queue_timeout, permit).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(UpstreamError::queue_timeout(settings.queue_timeout)),
        }
    }

    /// Waits for a stream of an HTTP/2 connection, and opens connections if needed. Returns `None`
    /// if the caller must try again.
    ///
    /// The wait for the worker's first HTTP/2 connection lasts until it opens or fails. With HTTP/2
    /// connections open, `queue_timeout`, counted from `queued_since`, limits the wait.
    pub(super) async fn wait_for_http2_stream(
        self: &Rc<Self>,
        queued_since: &mut Option<Instant>,
    ) -> Result<Option<Box<UpstreamConnection>>, UpstreamError> {
        let (waiter, offered) = oneshot::channel();
        let is_full = !self.http2_connections.borrow().is_empty();
        let slot = || QueueSlotGuard::acquire(self, |shared| &shared.queued_requests);
        let _slot = is_full.then(slot).transpose()?;
        self.waiters.borrow_mut().push_back(waiter);
        self.open_http2_if_needed();
        let offered = if is_full {
            let limit = self.settings().queue_timeout;
            let until = *queued_since.get_or_insert_with(Instant::now) + limit;
            timeout_at(until, offered)
                .await
                .map_err(|_elapsed| UpstreamError::queue_timeout(limit))?
        } else {
            offered.await
        };
        offered.unwrap_or(Ok(None))
    }

    pub(super) fn give_streams_to_waiters(self: &Rc<Self>, http2_connection: &Rc<Http2Connection>) {
        while let Some(waiter) = self.pop_waiter() {
            match StreamSlot::reserve(http2_connection, self) {
                Some(slot) => {
                    let connection = UpstreamConnection::new(ConnectionProtocol::Http2(slot));
                    drop(waiter.send(Ok(Some(Box::new(connection)))));
                }
                None => return self.waiters.borrow_mut().push_front(waiter),
            }
        }
    }

    /// Removes and returns the request that has waited longest, and removes abandoned ones before
    /// it.
    pub(super) fn pop_waiter(&self) -> Option<ConnectionWaiter> {
        let mut waiters = self.waiters.borrow_mut();
        std::iter::from_fn(|| waiters.pop_front()).find(|waiter| !waiter.is_closed())
    }

    /// Lets all waiting requests fail with `error`, or try again without one.
    pub(super) fn reject_waiters(&self, error: Option<&UpstreamError>) {
        while let Some(waiter) = self.pop_waiter() {
            drop(waiter.send(error.map_or(Ok(None), |error| Err(error.clone()))));
        }
    }

    /// Counts a freed connection, and returns whether to close it for the requests of other
    /// workers: true for one in [`HANDOVERS_PER_CLOSE`] if any wait.
    pub(super) fn should_yield_to_other_workers(&self) -> bool {
        self.handover_count.update(|value| value.wrapping_add(1));
        let queued = self.shared.queued_requests.load(Ordering::SeqCst);
        queued > self.waiters.borrow().len()
            && self
                .handover_count
                .get()
                .is_multiple_of(HANDOVERS_PER_CLOSE)
    }
}

/// While requests of other workers wait, one of this many freed connections is closed, which frees
/// its permit for them.
const HANDOVERS_PER_CLOSE: u32 = 8;

/// Receives a connection for a waiting request, or the error with which the request fails. `None`
/// if the request must try again: the new connection has no free stream left, or the last one
/// closed.
pub(super) type ConnectionWaiter =
    oneshot::Sender<Result<Option<Box<UpstreamConnection>>, UpstreamError>>;
