//! Pool of one worker's connections to the upstream.
//!
//! HTTP/1.1 connections carry one request at a time. The pool reuses the most recently used
//! HTTP/1.1 connection, so that surplus connections stay idle and are closed. HTTP/2 connections
//! carry many requests; the pool uses the first with capacity and opens more in the background.
//!
//! Every open connection counts against `max_connections`, which all workers share.
//! `HANDOVERS_PER_CLOSE` keeps a busy worker from starving the others. See
//! `docs/decisions/0020-upstream-connections.md`.

mod idle;
mod opening;
mod share;

pub(super) use share::ConnectionShare;

use futures_util::future::LocalBoxFuture;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::ready;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Waker;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use super::UpstreamSharedState;
use super::connector::AlpnOffer;
use super::http1::Http1Connection;
use super::http2;
use super::http2::Http2Connection;
use super::pool::idle::ResolvedAddresses;
use super::pool::opening::ConnectionWaiter;
use crate::proxy::connection_io::LazyTimer;
use crate::proxy::upstream_error::{UpstreamError, UpstreamErrorKind};
use crate::proxy::{UpstreamScheme, UpstreamSettings, UpstreamUrl};

/// Sends requests to the upstream over one worker's connections, and pools these.
#[derive(Debug)]
pub struct UpstreamClient {
    pub(super) shared: Arc<UpstreamSharedState>,
    /// Idle HTTP/1.1 connections; the longest idle one is in front.
    idle_http1: RefCell<VecDeque<Box<UpstreamConnection>>>,
    /// Wakes the task that closes idle connections.
    sweeper: Waker,
    /// Whether that task waits for a connection.
    is_sweeper_resting: Cell<bool>,
    /// Open HTTP/2 connections.
    http2_connections: RefCell<Vec<Rc<Http2Connection>>>,
    /// Whether the upstream uses HTTP/2: fixed without TLS, otherwise as in the last handshake.
    /// `None` before the first.
    negotiated_http2: Cell<Option<bool>>,
    /// Number of HTTP/2 connections being opened, and the number of streams expected on each.
    opening_http2_connections: Cell<usize>,
    streams_per_connection: Cell<usize>,
    /// Waiting requests of this worker, oldest first.
    waiters: RefCell<VecDeque<ConnectionWaiter>>,
    handover_count: Cell<u32>,
    addresses: RefCell<ResolvedAddresses>,
}

impl UpstreamClient {
    /// Creates the upstream client of one worker. Must be called inside the worker's runtime,
    /// because it spawns the tasks that close idle connections and watch DNS.
    pub fn new(shared: Arc<UpstreamSharedState>) -> Rc<Self> {
        let chose_http2 = match &shared.settings.url {
            UpstreamUrl::Net {
                scheme: UpstreamScheme::H2c,
                ..
            } => Some(true),
            UpstreamUrl::Net {
                scheme: UpstreamScheme::Https,
                ..
            } => None,
            _ => Some(false),
        };
        let sweep_signal = Arc::<idle::SweepSignal>::default();
        let pool = Rc::new(Self {
            shared,
            idle_http1: RefCell::default(),
            sweeper: Arc::clone(&sweep_signal).into(),
            is_sweeper_resting: Cell::new(false),
            http2_connections: RefCell::default(),
            negotiated_http2: Cell::new(chose_http2),
            opening_http2_connections: Cell::new(0),
            streams_per_connection: Cell::new(http2::MAX_CONCURRENT_STREAMS),
            waiters: RefCell::default(),
            handover_count: Cell::new(0),
            addresses: RefCell::default(),
        });
        tokio::task::spawn_local(idle::run_idle_sweeper(
            Rc::downgrade(&pool),
            pool.shared.queue_signal.subscribe(),
            sweep_signal,
        ));
        if idle::has_dns_name(&pool.shared.settings.url) {
            tokio::task::spawn_local(idle::watch_dns_addresses(Rc::downgrade(&pool)));
        }
        pool
    }

    pub(crate) fn settings(&self) -> &UpstreamSettings {
        &self.shared.settings
    }

    /// Returns an idle or freed connection if possible, otherwise a new one. `retries` is the
    /// number of connection attempts allowed after failed ones.
    ///
    /// The futures of the `acquire` methods are boxed: inline, they would enlarge the future of
    /// every request, while few requests open a connection.
    pub(super) fn acquire<'p>(self: &'p Rc<Self>, retries: &'p mut u32) -> AcquireFuture<'p> {
        Box::pin(async move {
            let mut queued_since = None;
            loop {
                if let Some(connection) = self.take_available_connection(Instant::now()) {
                    return Ok(connection);
                }
                let acquired = match self.negotiated_http2.get() {
                    Some(false) => self.wait_for_http1_connection(retries).await?,
                    _ => self.wait_for_http2_stream(&mut queued_since).await?,
                };
                if let Some(connection) = acquired {
                    return Ok(connection);
                }
            }
        })
    }

    /// Opens a new HTTP/1.1 connection. For HTTP/2, returns a stream of any connection that takes
    /// new requests.
    pub(super) fn acquire_new_or_http2<'p>(
        self: &'p Rc<Self>,
        retries: &'p mut u32,
    ) -> AcquireFuture<'p> {
        match self.negotiated_http2.get() {
            Some(false) => self.open_new(retries, AlpnOffer::Http2AndHttp1),
            _ => self.acquire(retries),
        }
    }

    /// Returns an HTTP/1.1 connection, idle or new, even if the upstream prefers HTTP/2.
    pub(super) fn acquire_http1<'p>(self: &'p Rc<Self>, retries: &'p mut u32) -> AcquireFuture<'p> {
        match self.take_idle_http1(Instant::now()) {
            Some(connection) => Box::pin(ready(Ok(connection))),
            None => self.open_new(retries, AlpnOffer::Http1Only),
        }
    }

    /// Opens a connection when `max_connections` allows it.
    fn open_new<'p>(
        self: &'p Rc<Self>,
        retries: &'p mut u32,
        offer: AlpnOffer,
    ) -> AcquireFuture<'p> {
        Box::pin(async move {
            let permit = self.acquire_permit().await?;
            self.open_connection(permit, retries, offer).await
        })
    }

    /// Waits until `delay` has passed since `since`, and returns the time at which the wait ended.
    ///
    /// A delayed request counts against `max_requests_waiting` while it waits.
    ///
    /// # Errors
    /// Fails immediately if `max_requests_waiting` requests already wait.
    pub(crate) async fn delay_request(
        &self,
        delay: Duration,
        since: Instant,
    ) -> Result<Instant, UpstreamError> {
        if delay.is_zero() {
            return Ok(since);
        }
        let _slot = QueueSlotGuard::acquire(self, |shared| &shared.delayed_requests)?;
        sleep_until(since + delay).await;
        Ok(Instant::now())
    }

    /// Returns an idle HTTP/1.1 connection or a free HTTP/2 stream, without waiting. `now` is the
    /// caller's latest clock reading.
    pub(super) fn take_available_connection(
        self: &Rc<Self>,
        now: Instant,
    ) -> Option<Box<UpstreamConnection>> {
        let max_age = self.settings().pool_idle_timeout;
        let is_young = |connection: &&Rc<Http2Connection>| {
            let since = connection.idle_since();
            since.is_none_or(|since| now.duration_since(since) < max_age)
        };
        let connections = self.http2_connections.borrow();
        let mut young = connections.iter().filter(is_young);
        let slot = young.find_map(|connection| StreamSlot::reserve(connection, self));
        slot.map(|slot| Box::new(UpstreamConnection::new(ConnectionProtocol::Http2(slot))))
            .or_else(|| self.take_idle_http1(now))
    }

    fn take_idle_http1(&self, now: Instant) -> Option<Box<UpstreamConnection>> {
        let mut idle = self.idle_http1.borrow_mut();
        let max_age = self.settings().pool_idle_timeout;
        let mut newest_first = std::iter::from_fn(|| idle.pop_back());
        newest_first.find(|connection| connection.is_reusable(max_age, now))
    }
}

/// Future of the pool's `acquire` methods: the connection or an error.
type AcquireFuture<'p> = LocalBoxFuture<'p, Result<Box<UpstreamConnection>, UpstreamError>>;

/// Counts a request that waits, for a connection or because it is delayed, until the guard is
/// dropped.
struct QueueSlotGuard<'p> {
    pool: &'p UpstreamClient,
    count: &'p AtomicUsize,
}

impl<'p> QueueSlotGuard<'p> {
    /// Counts a request in `count`. Fails if waiting and delayed requests together would exceed
    /// `max_requests_waiting`.
    fn acquire(
        pool: &'p UpstreamClient,
        count: impl FnOnce(&'p UpstreamSharedState) -> &'p AtomicUsize,
    ) -> Result<Self, UpstreamError> {
        let (shared, limit) = (&pool.shared, pool.settings().max_requests_waiting);
        let guard = Self {
            pool,
            count: count(shared),
        };
        guard.count.fetch_add(1, Ordering::SeqCst);
        let total = shared.queued_requests.load(Ordering::SeqCst)
            + shared.delayed_requests.load(Ordering::SeqCst);
        if total > limit {
            let detail = format!("{limit} requests already wait for an upstream connection");
            return Err(UpstreamErrorKind::QueueFull.with_detail(detail));
        }
        Ok(guard)
    }
}

impl Drop for QueueSlotGuard<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::SeqCst);
        let mut waiters = self.pool.waiters.borrow_mut();
        waiters.retain(|waiter| !waiter.is_closed());
    }
}

/// An HTTP/1.1 connection or a stream of an HTTP/2 connection, for one request at a time. Dropping
/// it closes the HTTP/1.1 connection or ends the HTTP/2 stream.
#[derive(Debug)]
pub(crate) struct UpstreamConnection {
    pub(crate) protocol: ConnectionProtocol,
    /// Response and idle timeouts of the current request.
    pub(crate) timer: LazyTimer,
    /// The client's share, as long as the response body uses the connection.
    pub(crate) share: Option<ConnectionShare>,
    /// Time of an HTTP/1.1 connection's last return to the pool; `None` if there was none.
    pub(crate) idle_since: Option<Instant>,
}

#[derive(Debug)]
pub(crate) enum ConnectionProtocol {
    Http1(Http1Connection),
    Http2(StreamSlot),
}

impl UpstreamConnection {
    pub(crate) fn new(protocol: ConnectionProtocol) -> Self {
        Self {
            protocol,
            timer: LazyTimer::default(),
            share: None,
            idle_since: None,
        }
    }

    pub(crate) fn is_reused(&self) -> bool {
        match &self.protocol {
            ConnectionProtocol::Http1(_) => self.idle_since.is_some(),
            ConnectionProtocol::Http2(slot) => slot.is_reused,
        }
    }

    /// Whether an idle HTTP/1.1 connection is open and was idle for less than `max_idle`.
    pub(crate) fn is_reusable(&self, max_idle: Duration, now: Instant) -> bool {
        let ConnectionProtocol::Http1(http1) = &self.protocol else {
            return false;
        };
        let is_young = |since| now.duration_since(since) < max_idle;
        http1.is_ready() && self.idle_since.is_none_or(is_young)
    }
}

/// A reserved stream on an [`Http2Connection`]. Dropping it ends the request.
#[derive(Debug)]
pub(crate) struct StreamSlot {
    pub(crate) connection: Rc<Http2Connection>,
    client: Rc<UpstreamClient>,
    pub(crate) is_reused: bool,
    pub(crate) upload: Option<AbortOnDropHandle<Result<(), h2::Error>>>,
}

impl StreamSlot {
    /// Reserves a stream of `connection`, if it has capacity.
    pub(super) fn reserve(
        connection: &Rc<Http2Connection>,
        client: &Rc<UpstreamClient>,
    ) -> Option<Self> {
        connection.try_reserve_stream().then(|| Self {
            is_reused: connection.was_used.replace(true),
            connection: Rc::clone(connection),
            client: Rc::clone(client),
            upload: None,
        })
    }
}

impl Drop for StreamSlot {
    fn drop(&mut self) {
        self.upload = None;
        self.connection.release_stream();
        self.client.handle_stream_end(&self.connection);
    }
}

#[cfg(test)]
mod tests;
