//! Pool of one worker's connections to the upstream.
//!
//! HTTP/1.1 connections carry one request at a time. The pool reuses the most recently used one, so
//! that surplus connections become idle and are closed. HTTP/2 connections carry many requests; the
//! first one with capacity is used, and more are opened in the background.
//!
//! Every open connection counts against `max_connections`, which all workers share.
//! [`HANDOVERS_PER_CLOSE`] keeps a busy worker from starving the others. See
//! `docs/decisions/upstream-connection-pool.md`.

use futures_util::future::LocalBoxFuture;
use http::HeaderValue;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::net::IpAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use super::addresses::{self, ResolvedAddresses};
use super::connector::{AlpnOffer, UpstreamSocket};
use super::http2::{self, Http2Connection};
use super::informational_responses::InformationalResponseQueue;
use super::shared_state::{DelaySlotGuard, UpstreamSharedState};
use super::{MAX_RESPONSE_HEAD_BYTES, UpstreamError, UpstreamErrorKind};
use crate::proxy::http::body::RequestBody;
use crate::proxy::server::lazy_timer::LazyTimer;
use crate::proxy::{UpstreamScheme, UpstreamSettings, UpstreamUrl};
use crate::telemetry::LogThrottle;

/// One in this many freed connections is closed if other workers' requests wait for a permit.
const HANDOVERS_PER_CLOSE: u32 = 8;
/// Bounds of the interval between sweeps of idle connections.
const SWEEP_INTERVAL_RANGE: (Duration, Duration) =
    (Duration::from_millis(50), Duration::from_secs(5));
/// Maximum header lines of a response. hyper's default is 100, but some frameworks send one line
/// per cookie or preload. Each further line costs a few bytes per response.
const MAX_RESPONSE_HEADERS: usize = 256;

#[derive(Debug)]
pub(super) struct UpstreamPool {
    shared: Arc<UpstreamSharedState>,
    /// Idle HTTP/1.1 connections; the longest idle one is in front.
    idle_http1: RefCell<VecDeque<Box<UpstreamConnection>>>,
    /// Open HTTP/2 connections.
    http2_connections: RefCell<Vec<Rc<Http2Connection>>>,
    /// Whether the upstream chose HTTP/2 in the last handshake; `None` before the first.
    negotiated_http2: Cell<Option<bool>>,
    /// HTTP/2 connections being opened, and the streams expected on each.
    opening_http2_connections: Cell<usize>,
    streams_per_connection: Cell<usize>,
    /// Waiting requests of this worker, oldest first.
    waiters: RefCell<VecDeque<ConnectionWaiter>>,
    handover_count: Cell<u32>,
    addresses: RefCell<ResolvedAddresses>,
}

type ConnectionWaiter = oneshot::Sender<Result<Box<UpstreamConnection>, WaiterRejection>>;

/// Sent to a waiting request instead of a connection.
#[derive(Clone, Debug)]
enum WaiterRejection {
    /// No connection could be opened.
    Failed(UpstreamError),
    /// The expected connection does not come; the request tries again.
    Retry,
}

/// An HTTP/1.1 connection or a stream of an HTTP/2 connection, for one request at a time. Dropping
/// it ends the request.
#[derive(Debug)]
pub(super) struct UpstreamConnection {
    pub(super) protocol: ConnectionProtocol,
    /// Response and idle timeouts of the current request.
    pub(super) timer: LazyTimer,
    /// Time of the last return to the pool; `None` for a new connection.
    idle_since: Option<Instant>,
}

#[derive(Debug)]
pub(super) enum ConnectionProtocol {
    Http1(Http1Connection),
    Http2(http2::StreamSlot),
}

/// An HTTP/1.1 connection. Dropping it closes the connection.
#[derive(Debug)]
pub(super) struct Http1Connection {
    pub(super) sender: SendRequest<RequestBody>,
    pub(super) informational: Arc<InformationalResponseQueue>,
    peer: Option<IpAddr>,
    task: AbortHandle,
}

/// A connection with its response body still being read.
#[derive(Debug)]
pub(crate) struct PooledConnection {
    pool: Rc<UpstreamPool>,
    connection: Box<UpstreamConnection>,
}

impl UpstreamPool {
    pub(super) fn new(shared: Arc<UpstreamSharedState>) -> Rc<Self> {
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
        let pool = Rc::new(Self {
            shared,
            idle_http1: RefCell::default(),
            http2_connections: RefCell::default(),
            negotiated_http2: Cell::new(chose_http2),
            opening_http2_connections: Cell::new(0),
            streams_per_connection: Cell::new(http2::MAX_CONCURRENT_STREAMS),
            waiters: RefCell::default(),
            handover_count: Cell::new(0),
            addresses: RefCell::default(),
        });
        tokio::task::spawn_local(run_idle_sweeper(
            Rc::downgrade(&pool),
            pool.shared.queue_signal.subscribe(),
        ));
        if addresses::has_dns_name(&pool.shared.settings.url) {
            tokio::task::spawn_local(watch_dns_addresses(Rc::downgrade(&pool)));
        }
        pool
    }

    pub(super) fn settings(&self) -> &UpstreamSettings {
        &self.shared.settings
    }

    pub(super) fn authority(&self) -> &HeaderValue {
        &self.shared.authority
    }

    pub(super) fn error_log_throttle(&self) -> &LogThrottle {
        &self.shared.error_log_throttle
    }

    /// Returns a connection, preferably a used one. `retries` is the number of further connection
    /// attempts allowed.
    ///
    /// This future and those of the other `acquire` methods are boxed. Few requests open a
    /// connection, and the unboxed future would enlarge the future of every request.
    pub(super) fn acquire<'p>(self: &'p Rc<Self>, retries: &'p mut u32) -> AcquireFuture<'p> {
        Box::pin(async move {
            let mut queued_since = None;
            loop {
                if let Some(connection) = self.take_idle(Instant::now()) {
                    return Ok(connection);
                }
                if self.negotiated_http2.get() == Some(false) {
                    return match self.acquire_permit_or_connection().await? {
                        AcquireOutcome::Connection(connection) => Ok(connection),
                        AcquireOutcome::Permit(permit) => {
                            self.open_connection(permit, retries, AlpnOffer::Http2AndHttp1)
                                .await
                        }
                        AcquireOutcome::Retry => continue,
                    };
                }
                if let Some(connection) = self.wait_for_http2_stream(&mut queued_since).await? {
                    return Ok(connection);
                }
            }
        })
    }

    /// Returns a connection that has never been used; for HTTP/2, a stream of a suitable
    /// connection.
    pub(super) fn acquire_new<'p>(self: &'p Rc<Self>, retries: &'p mut u32) -> AcquireFuture<'p> {
        if self.negotiated_http2.get() != Some(false) {
            return self.acquire(retries);
        }
        Box::pin(async move {
            let permit = self.acquire_permit().await?;
            self.open_connection(permit, retries, AlpnOffer::Http2AndHttp1)
                .await
        })
    }

    /// Returns an HTTP/1.1 connection to an upstream that prefers HTTP/2.
    pub(super) fn acquire_http1<'p>(self: &'p Rc<Self>, retries: &'p mut u32) -> AcquireFuture<'p> {
        Box::pin(async move {
            if let Some(connection) = self.take_idle_http1(Instant::now()) {
                return Ok(connection);
            }
            let permit = self.acquire_permit().await?;
            self.open_connection(permit, retries, AlpnOffer::Http1Only)
                .await
        })
    }

    /// Waits until `due`, counted as a delayed request. Dropping the future releases the slot.
    pub(super) async fn delay_until(&self, due: Instant) -> Result<(), UpstreamError> {
        let _slot = DelaySlotGuard::acquire(&self.shared)?;
        sleep_until(due).await;
        Ok(())
    }

    /// Returns an idle connection or a free stream. `now` is the caller's latest clock reading.
    pub(super) fn take_idle(self: &Rc<Self>, now: Instant) -> Option<Box<UpstreamConnection>> {
        let max_age = self.settings().pool_idle_timeout;
        let is_young = |http2_connection: &&Rc<Http2Connection>| {
            http2_connection
                .idle_since()
                .is_none_or(|since| now.duration_since(since) < max_age)
        };
        let slot = self
            .http2_connections
            .borrow()
            .iter()
            .filter(is_young)
            .find_map(|http2_connection| http2_connection.try_reserve_stream(self));
        slot.map(|slot| Box::new(UpstreamConnection::new(ConnectionProtocol::Http2(slot))))
            .or_else(|| self.take_idle_http1(now))
    }

    fn take_idle_http1(&self, now: Instant) -> Option<Box<UpstreamConnection>> {
        let mut idle = self.idle_http1.borrow_mut();
        let max_age = self.settings().pool_idle_timeout;
        std::iter::from_fn(|| idle.pop_back()).find(|connection| connection.is_usable(max_age, now))
    }

    /// Acquires a permit for a new connection, or a connection that becomes free first.
    async fn acquire_permit_or_connection(&self) -> Result<AcquireOutcome, UpstreamError> {
        if let Ok(permit) = Arc::clone(&self.shared.connection_permits).try_acquire_owned() {
            return Ok(AcquireOutcome::Permit(permit));
        }
        let (sender, mut receiver) = oneshot::channel();
        let queued = self.wait_for_permit(Some(sender));
        tokio::select! {
            biased;
            Ok(offered) = &mut receiver => match offered {
                Ok(connection) => Ok(AcquireOutcome::Connection(connection)),
                Err(WaiterRejection::Failed(error)) => Err(error),
                Err(WaiterRejection::Retry) => Ok(AcquireOutcome::Retry),
            },
            permit = queued => permit.map(AcquireOutcome::Permit),
        }
    }

    /// Acquires a permit for a new connection, which no freed connection could replace.
    async fn acquire_permit(&self) -> Result<OwnedSemaphorePermit, UpstreamError> {
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

    /// Waits for a permit, in one queue with the requests of all workers. Meanwhile `waiter` can
    /// receive a freed connection of this worker.
    async fn wait_for_permit(
        &self,
        waiter: Option<ConnectionWaiter>,
    ) -> Result<OwnedSemaphorePermit, UpstreamError> {
        let settings = self.settings();
        let _slot = QueueSlotGuard::acquire(self)?;
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
    /// if the caller should try again.
    ///
    /// The wait for the first connection lasts until that connects or fails. With connections open,
    /// the wait is limited by `queue_timeout`, counted from `queued_since`.
    async fn wait_for_http2_stream(
        self: &Rc<Self>,
        queued_since: &mut Option<Instant>,
    ) -> Result<Option<Box<UpstreamConnection>>, UpstreamError> {
        let (waiter, offered) = oneshot::channel();
        let is_full = !self.http2_connections.borrow().is_empty();
        let _slot = if is_full {
            Some(QueueSlotGuard::acquire(self)?)
        } else {
            None
        };
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
        match offered {
            Ok(Ok(connection)) => Ok(Some(connection)),
            Ok(Err(WaiterRejection::Failed(error))) => Err(error),
            Ok(Err(WaiterRejection::Retry)) | Err(_) => Ok(None),
        }
    }

    fn open_http2_if_needed(self: &Rc<Self>) {
        let waiter_count = {
            let mut waiters = self.waiters.borrow_mut();
            waiters.retain(|waiter| !waiter.is_closed());
            waiters.len()
        };
        if self
            .opening_http2_connections
            .get()
            .saturating_mul(self.streams_per_connection.get())
            >= waiter_count
        {
            return;
        }
        self.opening_http2_connections
            .set(self.opening_http2_connections.get() + 1);
        let pool = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let mut retries = pool.settings().retry_connect;
            let opened = match pool.acquire_permit().await {
                Ok(permit) => {
                    pool.open_connection(permit, &mut retries, AlpnOffer::Http2AndHttp1)
                        .await
                }
                Err(error) => Err(error),
            };
            pool.opening_http2_connections
                .set(pool.opening_http2_connections.get() - 1);
            match opened {
                Ok(connection) => pool.distribute_connection(connection),
                // A stream of the other connections may become free.
                Err(error) if !pool.http2_connections.borrow().is_empty() => {
                    tracing::debug!(%error, "failed to open another upstream connection");
                }
                Err(error) => pool.reject_waiters(&WaiterRejection::Failed(error)),
            }
        });
    }

    async fn open_connection(
        self: &Rc<Self>,
        permit: OwnedSemaphorePermit,
        retries: &mut u32,
        offer: AlpnOffer,
    ) -> Result<Box<UpstreamConnection>, UpstreamError> {
        let mut permit = Some(permit);
        loop {
            let started_at = Instant::now();
            let opened = match self.shared.connector.connect(self.settings(), offer).await {
                Ok(stream) => {
                    self.perform_handshake(stream, &mut permit, started_at)
                        .await
                }
                Err(error) => Err(error),
            };
            match opened {
                Ok(protocol) => {
                    if offer == AlpnOffer::Http2AndHttp1 {
                        self.negotiated_http2
                            .set(Some(matches!(protocol, ConnectionProtocol::Http2(_))));
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
    /// The connection takes over `permit`. A retry finds it empty, as the failed connection
    /// released it, and acquires another.
    async fn perform_handshake(
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
        if stream.is_http2() {
            let limit = self
                .settings()
                .connect_timeout
                .saturating_sub(started_at.elapsed());
            let (http2_connection, driver) = http2::handshake(stream, limit).await?;
            http2_connection.spawn_driver(driver, Rc::downgrade(self));
            self.streams_per_connection.set(http2_connection.capacity());
            self.http2_connections
                .borrow_mut()
                .push(Rc::clone(&http2_connection));
            return http2_connection
                .try_reserve_stream(self)
                .map(ConnectionProtocol::Http2)
                .ok_or_else(|| UpstreamError {
                    kind: UpstreamErrorKind::Protocol,
                    detail: "the upstream allows no concurrent streams".to_owned(),
                });
        }
        let peer = stream.peer();
        let handshake = http1::Builder::new()
            .max_buf_size(MAX_RESPONSE_HEAD_BYTES as usize)
            .max_headers(MAX_RESPONSE_HEADERS)
            .handshake(TokioIo::new(stream))
            .await;
        let (sender, connection) = handshake.map_err(|error| UpstreamError {
            kind: UpstreamErrorKind::ConnectionTerminated,
            detail: error.to_string(),
        })?;
        let task = tokio::task::spawn_local(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "upstream connection closed");
            }
        });
        Ok(ConnectionProtocol::Http1(Http1Connection {
            sender,
            informational: Arc::default(),
            peer,
            task: task.abort_handle(),
        }))
    }

    /// Gives a new connection to waiting requests.
    fn distribute_connection(self: &Rc<Self>, connection: Box<UpstreamConnection>) {
        let http2_connection = match &connection.protocol {
            ConnectionProtocol::Http2(slot) => Some(Rc::clone(slot.connection())),
            ConnectionProtocol::Http1(_) => None,
        };
        match self.pop_waiter() {
            Some(waiter) => drop(waiter.send(Ok(connection))),
            None if http2_connection.is_none() => self.keep_idle(connection),
            None => {}
        }
        if let Some(http2_connection) = http2_connection {
            self.serve_waiters(&http2_connection);
        }
        // The remaining requests must wait for another connection.
        self.reject_waiters(&WaiterRejection::Retry);
    }

    fn serve_waiters(self: &Rc<Self>, http2_connection: &Rc<Http2Connection>) {
        while let Some(waiter) = self.pop_waiter() {
            match http2_connection.try_reserve_stream(self) {
                Some(slot) => drop(waiter.send(Ok(Box::new(UpstreamConnection::new(
                    ConnectionProtocol::Http2(slot),
                ))))),
                None => return self.waiters.borrow_mut().push_front(waiter),
            }
        }
    }

    /// Removes the longest waiting request, skipping abandoned ones.
    fn pop_waiter(&self) -> Option<ConnectionWaiter> {
        let mut waiters = self.waiters.borrow_mut();
        std::iter::from_fn(|| waiters.pop_front()).find(|waiter| !waiter.is_closed())
    }

    fn reject_waiters(&self, rejection: &WaiterRejection) {
        while let Some(waiter) = self.pop_waiter() {
            drop(waiter.send(Err(rejection.clone())));
        }
    }

    /// Handles the end of a request on `http2_connection`, or of the connection.
    pub(super) fn handle_stream_end(self: &Rc<Self>, http2_connection: &Rc<Http2Connection>) {
        if self.shared.queued_requests.load(Ordering::SeqCst) > 0 {
            let is_unneeded =
                http2_connection.idle_since().is_some() && self.waiters.borrow().is_empty();
            if is_unneeded || self.should_yield_to_other_workers() {
                http2_connection.retire();
            }
        }
        if http2_connection.is_closing() {
            self.remove_http2_connection(http2_connection);
            if self.http2_connections.borrow().is_empty() {
                self.reject_waiters(&WaiterRejection::Retry);
            }
            return;
        }
        self.serve_waiters(http2_connection);
        if http2_connection.idle_since().is_some()
            && self.idle_count() > self.shared.max_idle_per_worker
        {
            self.remove_http2_connection(http2_connection);
        }
    }

    fn remove_http2_connection(&self, http2_connection: &Rc<Http2Connection>) {
        self.http2_connections
            .borrow_mut()
            .retain(|known| !Rc::ptr_eq(known, http2_connection));
    }

    fn idle_count(&self) -> usize {
        let http2_idle = self
            .http2_connections
            .borrow()
            .iter()
            .filter(|http2_connection| http2_connection.idle_since().is_some())
            .count();
        http2_idle + self.idle_http1.borrow().len()
    }

    fn return_connection(&self, mut connection: Box<UpstreamConnection>) {
        let ConnectionProtocol::Http1(http1) = &connection.protocol else {
            return;
        };
        // Not ready: the upstream is closing, or the request body is still being sent and the
        // response is not read to its end. Dropping the connection closes it.
        if !http1.sender.is_ready() || self.addresses.borrow().is_stale(http1.peer) {
            return;
        }
        connection.idle_since = Some(Instant::now());
        if self.shared.queued_requests.load(Ordering::SeqCst) > 0 {
            self.hand_to_waiter(connection);
        } else {
            self.keep_idle(connection);
        }
    }

    fn keep_idle(&self, connection: Box<UpstreamConnection>) {
        let mut idle = self.idle_http1.borrow_mut();
        idle.push_back(connection);
        if idle.len() > self.shared.max_idle_per_worker {
            idle.pop_front();
        }
    }

    fn hand_to_waiter(&self, connection: Box<UpstreamConnection>) {
        if self.should_yield_to_other_workers() {
            return;
        }
        if let Some(waiter) = self.pop_waiter() {
            drop(waiter.send(Ok(connection)));
        }
    }

    /// Whether the freed connection should go to another worker.
    fn should_yield_to_other_workers(&self) -> bool {
        self.handover_count
            .set(self.handover_count.get().wrapping_add(1));
        let others_wait =
            self.shared.queued_requests.load(Ordering::SeqCst) > self.waiters.borrow().len();
        others_wait
            && self
                .handover_count
                .get()
                .is_multiple_of(HANDOVERS_PER_CLOSE)
    }

    /// Stops using connections to addresses that were removed from DNS, even if they still work.
    fn apply_resolved_addresses(&self, found: Vec<IpAddr>) {
        self.addresses.borrow_mut().update(found);
        let addresses = self.addresses.borrow();
        self.idle_http1
            .borrow_mut()
            .retain(|connection| match &connection.protocol {
                ConnectionProtocol::Http1(http1) => !addresses.is_stale(http1.peer),
                ConnectionProtocol::Http2(_) => true,
            });
        self.http2_connections
            .borrow_mut()
            .retain(|http2_connection| {
                let is_current = !addresses.is_stale(http2_connection.peer);
                if !is_current {
                    http2_connection.retire();
                }
                is_current
            });
    }

    /// Closes idle connections that are dead, too old, or needed by waiting requests.
    fn sweep_idle(&self) {
        let (max_age, now) = (self.settings().pool_idle_timeout, Instant::now());
        let mut idle = self.idle_http1.borrow_mut();
        idle.retain(|connection| connection.is_usable(max_age, now));
        let mut needed = self.shared.queued_requests.load(Ordering::SeqCst);
        let closed = needed.min(idle.len());
        idle.drain(..closed);
        needed -= closed;
        self.http2_connections
            .borrow_mut()
            .retain(|http2_connection| match http2_connection.idle_since() {
                Some(_) if needed > 0 => {
                    needed -= 1;
                    false
                }
                idle_since => idle_since.is_none_or(|since| now.duration_since(since) < max_age),
            });
    }
}

/// Future of an `acquire` method.
type AcquireFuture<'p> = LocalBoxFuture<'p, Result<Box<UpstreamConnection>, UpstreamError>>;

enum AcquireOutcome {
    Connection(Box<UpstreamConnection>),
    Permit(OwnedSemaphorePermit),
    /// The request tries again.
    Retry,
}

/// Counts a request that waits for a connection.
struct QueueSlotGuard<'p>(&'p UpstreamPool);

impl<'p> QueueSlotGuard<'p> {
    fn acquire(pool: &'p UpstreamPool) -> Result<Self, UpstreamError> {
        pool.shared
            .reserve_queue_slot(&pool.shared.queued_requests)?;
        Ok(Self(pool))
    }
}

impl Drop for QueueSlotGuard<'_> {
    fn drop(&mut self) {
        self.0.shared.queued_requests.fetch_sub(1, Ordering::SeqCst);
        self.0
            .waiters
            .borrow_mut()
            .retain(|waiter| !waiter.is_closed());
    }
}

async fn run_idle_sweeper(pool: Weak<UpstreamPool>, mut queue_signal: watch::Receiver<()>) {
    let Some(interval) = pool
        .upgrade()
        .map(|pool| pool.settings().pool_idle_timeout / 2)
    else {
        return;
    };
    let interval = interval.clamp(SWEEP_INTERVAL_RANGE.0, SWEEP_INTERVAL_RANGE.1);
    while let Some(pool) = pool.upgrade() {
        pool.sweep_idle();
        drop(pool);
        tokio::select! {
            changed = queue_signal.changed() => if changed.is_err() { return },
            () = sleep(interval) => {}
        }
    }
}

/// Resolves the upstream's name periodically for as long as the pool exists.
async fn watch_dns_addresses(pool: Weak<UpstreamPool>) {
    loop {
        sleep(addresses::LOOKUP_INTERVAL).await;
        let Some(shared) = pool.upgrade().map(|pool| Arc::clone(&pool.shared)) else {
            return;
        };
        let found = addresses::resolve_addresses(&shared.settings.url).await;
        if let (Some(found), Some(pool)) = (found, pool.upgrade()) {
            pool.apply_resolved_addresses(found);
        }
    }
}

impl UpstreamConnection {
    fn new(protocol: ConnectionProtocol) -> Self {
        Self {
            protocol: protocol,
            timer: LazyTimer::default(),
            idle_since: None,
        }
    }

    pub(super) fn is_reused(&self) -> bool {
        match &self.protocol {
            ConnectionProtocol::Http1(_) => self.idle_since.is_some(),
            ConnectionProtocol::Http2(slot) => slot.is_reused(),
        }
    }

    /// Whether the connection can be reused from the pool.
    fn is_usable(&self, max_idle: Duration, now: Instant) -> bool {
        let ConnectionProtocol::Http1(http1) = &self.protocol else {
            return false;
        };
        http1.sender.is_ready()
            && self
                .idle_since
                .is_none_or(|since| now.duration_since(since) < max_idle)
    }
}

impl Drop for Http1Connection {
    fn drop(&mut self) {
        // hyper would wait for the rest of a request or response that is no longer needed.
        self.task.abort();
    }
}

impl PooledConnection {
    pub(super) fn new(pool: Rc<UpstreamPool>, connection: Box<UpstreamConnection>) -> Self {
        Self { pool, connection }
    }

    pub(crate) fn timer(&mut self) -> &mut LazyTimer {
        &mut self.connection.timer
    }

    /// Returns the connection to the pool after the response was read to its end.
    pub(crate) fn return_to_pool(self) {
        self.pool.return_connection(self.connection);
    }
}

#[cfg(test)]
mod tests;
