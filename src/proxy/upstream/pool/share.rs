//! Shares of the HTTP/1.1 connections: one client leaves some for the others.
//!
//! Half of `max_connections` are for any request. Of the other half each client takes at most
//! `max_connections_per_client`; its further requests wait. See
//! `docs/decisions/0020-upstream-connections.md`.

use std::net::{IpAddr, Ipv6Addr};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use tokio::time::timeout;

use super::{QueueSlotGuard, UpstreamClient};
use crate::proxy::client_counts::ClientCountGuard;
use crate::proxy::upstream_error::UpstreamError;

/// Smallest `max_connections` that is divided into shares.
const MIN_SHARED_CONNECTIONS: usize = 4;

/// Counted as the client of the uploads whose start did not arrive in time. No client has this
/// address, which is of multicast.
const SLOW_UPLOADS: IpAddr = IpAddr::V6(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0));

/// The right of one request to use a connection. Refers to the worker's client, so that requests of
/// several workers share no reference count.
#[derive(Debug)]
pub(crate) enum ConnectionShare {
    /// Connections are not shared out.
    Unlimited,
    FirstHalf(Rc<UpstreamClient>),
    /// Counts a connection of the second half for its client.
    SecondHalf(Rc<UpstreamClient>, Option<ClientCountGuard>),
}

impl UpstreamClient {
    /// Whether half of the connections are open: others may need the rest.
    pub(crate) fn is_scarce(&self) -> bool {
        let max = self.settings().max_connections;
        max >= MIN_SHARED_CONNECTIONS
            && self.negotiated_http2.get() != Some(true)
            && self.shared.connection_permits.available_permits() <= max / 2
    }

    /// Takes a share for a request of the client. `None` if the client uses its share, and the
    /// first half is in use.
    pub(crate) fn try_take_share(
        self: &Rc<Self>,
        client: impl FnOnce() -> IpAddr,
    ) -> Option<ConnectionShare> {
        let settings = self.settings();
        let quarter = settings.max_connections / 4;
        self.take_share_of(settings.max_connections_per_client.min(quarter), client)
    }

    /// Takes a share of the first half, or one of `limit` shares of the client.
    fn take_share_of(
        self: &Rc<Self>,
        limit: usize,
        client: impl FnOnce() -> IpAddr,
    ) -> Option<ConnectionShare> {
        if limit == 0 || self.negotiated_http2.get() != Some(false) {
            return Some(ConnectionShare::Unlimited);
        }
        let shared = &self.shared;
        let first_half = self.settings().max_connections.div_ceil(2);
        let take = |count| (count < first_half).then_some(count + 1);
        let taken = shared
            .first_half_in_use
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take);
        if taken.is_ok() {
            return Some(ConnectionShare::FirstHalf(Rc::clone(self)));
        }
        let counted = shared.client_connections.try_acquire(client(), limit)?;
        Some(ConnectionShare::SecondHalf(Rc::clone(self), Some(counted)))
    }

    /// Takes a share for an upload whose start did not arrive in time. Besides the first half, all
    /// such uploads have a quarter of the connections.
    pub(crate) fn try_take_slow_upload_share(self: &Rc<Self>) -> Option<ConnectionShare> {
        self.take_share_of(self.settings().max_connections / 4, || SLOW_UPLOADS)
    }

    /// Waits for a share, in the queue of `max_requests_waiting` and for at most `queue_timeout`.
    pub(crate) async fn wait_for_share(
        self: &Rc<Self>,
        client: IpAddr,
    ) -> Result<ConnectionShare, UpstreamError> {
        if let Some(share) = self.try_take_share(|| client) {
            return Ok(share);
        }
        let limit = self.settings().queue_timeout;
        let _slot = QueueSlotGuard::acquire(self, |shared| &shared.delayed_requests)?;
        let share = async {
            loop {
                let freed = self.shared.share_freed.notified();
                if let Some(share) = self.try_take_share(|| client) {
                    return share;
                }
                freed.await;
            }
        };
        let share = timeout(limit, share).await;
        share.map_err(|_elapsed| UpstreamError::queue_timeout(limit))
    }
}

impl Drop for ConnectionShare {
    fn drop(&mut self) {
        match self {
            Self::Unlimited => {}
            // Any waiting request may be one of the client's.
            Self::SecondHalf(upstream, counted) => {
                drop(counted.take());
                upstream.shared.share_freed.notify_waiters();
            }
            Self::FirstHalf(upstream) => {
                let shared = &upstream.shared;
                shared.first_half_in_use.fetch_sub(1, Ordering::SeqCst);
                if shared.delayed_requests.load(Ordering::SeqCst) > 0 {
                    shared.share_freed.notify_one();
                }
            }
        }
    }
}
