//! Requests that wait for a connection: permits, the queue, and the handover of freed connections.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

use super::connection::{ConnectionProtocol, StreamSlot, UpstreamConnection};
use super::{QueueSlotGuard, UpstreamPool};
use crate::proxy::upstream::connector::AlpnOffer;
use crate::proxy::upstream::http2::Http2Connection;
use crate::proxy::upstream_error::UpstreamError;

/// While requests of other workers wait, one of this many freed connections is closed, which frees
/// its permit for them.
const HANDOVERS_PER_CLOSE: u32 = 8;

/// Receives a connection for a waiting request, or the error with which the request fails. `None`
/// if the request must try again: the new connection has no free stream left, or the last one
/// closed.
pub(super) type ConnectionWaiter =
    oneshot::Sender<Result<Option<Box<UpstreamConnection>>, UpstreamError>>;

impl UpstreamPool {
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

    pub(super) fn hand_to_waiter_or_close(&self, connection: Box<UpstreamConnection>) {
        if self.should_yield_to_other_workers() {
            return;
        }
        if let Some(waiter) = self.pop_waiter() {
            drop(waiter.send(Ok(Some(connection))));
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
