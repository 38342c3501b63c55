//! One worker's upstream connections, and what all workers share.
//!
//! By HTTP/1.1 a connection carries one request at a time. The last used one is used first, so that the others grow
//! old and are closed. A connection counts against `max_connections` until its socket is closed, idle ones too; so a
//! request that has to wait makes every worker close idle connections. A connection that becomes free goes straight
//! to a request waiting in its own worker, except that every few times it is closed for the one that waits longest
//! anywhere: a worker without connections must not starve beside a busy one.
//!
//! By HTTP/2 a connection carries many requests. The first with room is used. When none has, as many are opened as
//! those who wait need, in the background: who leaves meanwhile spoils it for nobody.

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

/// Of the connections that become free, one in this many is closed for other workers' requests
/// if some wait.
const HANDOVERS_PER_CLOSE: u32 = 8;
/// Idle connections are looked through this often at most.
const SWEEP_INTERVAL_RANGE: (Duration, Duration) =
    (Duration::from_millis(50), Duration::from_secs(5));
/// Fields in the head of a response: some frameworks send a line per cookie or preload. hyper's own limit is 100; each
/// more costs some bytes per response.
const MAX_RESPONSE_HEADERS: usize = 256;

#[derive(Debug)]
pub(super) struct UpstreamPool {
    shared: Arc<UpstreamSharedState>,
    /// By HTTP/1.1; the longest idle one in front.
    idle_http1: RefCell<VecDeque<Box<UpstreamConnection>>>,
    /// By HTTP/2.
    http2_connections: RefCell<Vec<Rc<Http2Connection>>>,
    /// Whether the upstream chose HTTP/2 when it was last asked.
    negotiated_http2: Cell<Option<bool>>,
    /// Links on their way, and how many requests each is expected to carry.
    opening_http2_connections: Cell<usize>,
    streams_per_connection: Cell<usize>,
    /// This worker's waiting requests.
    waiters: RefCell<VecDeque<ConnectionWaiter>>,
    handover_count: Cell<u32>,
    addresses: RefCell<ResolvedAddresses>,
}

type ConnectionWaiter = oneshot::Sender<Result<Box<UpstreamConnection>, WaiterRejection>>;

/// What a waiting request may be told instead.
#[derive(Clone, Debug)]
enum WaiterRejection {
    /// There are no connections to be had.
    Failed(UpstreamError),
    /// What it waited for will not come; there may be other ways.
    Retry,
}

/// A connection, or room on one, that no request is using, or one alone. Dropping it ends that request.
#[derive(Debug)]
pub(super) struct UpstreamConnection {
    pub(super) protocol: ConnectionProtocol,
    /// For the one request that uses the connection.
    pub(super) timer: LazyTimer,
    /// When it was last given back; `None`: it is new.
    idle_since: Option<Instant>,
}

#[derive(Debug)]
pub(super) enum ConnectionProtocol {
    Http1(Http1Connection),
    Http2(http2::StreamSlot),
}

/// Dropping it closes the connection.
#[derive(Debug)]
pub(super) struct Http1Connection {
    pub(super) sender: SendRequest<RequestBody>,
    pub(super) informational: Arc<InformationalResponseQueue>,
    peer: Option<IpAddr>,
    task: AbortHandle,
}

/// A connection whose response is being read.
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

    /// A connection, used before if there is one. `retries`: how often connecting may be tried again.
    ///
    /// Boxed, as are its sisters: few requests connect, and all would have room for it.
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

    /// A connection that was never used, or, by HTTP/2, another one.
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

    /// A connection by HTTP/1.1, of an upstream that prefers HTTP/2.
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

    /// Waits until a request's turn has come. Ended early, it leaves nothing behind.
    pub(super) async fn delay_until(&self, due: Instant) -> Result<(), UpstreamError> {
        let _slot = DelaySlotGuard::acquire(&self.shared)?;
        sleep_until(due).await;
        Ok(())
    }

    /// A connection that is there, or room on one; `now` is when the caller looked at the clock last.
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

    /// Room for one more connection, or one that became free.
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

    /// Room for a new connection, which nothing that becomes free could replace.
    async fn acquire_permit(&self) -> Result<OwnedSemaphorePermit, UpstreamError> {
        match Arc::clone(&self.shared.connection_permits).try_acquire_owned() {
            Ok(permit) => Ok(permit),
            Err(_none_left) => {
                // Swapping one of our idle connections for a new one needs nobody else's.
                drop(self.idle_http1.borrow_mut().pop_front());
                self.wait_for_permit(None).await
            }
        }
    }

    /// Waits for a permit, in one line with all workers' requests; `waiter` is known to this
    /// worker's connections meanwhile.
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

    /// Waits for room on a connection by HTTP/2, and sees to it that there will be some. `None`: look again.
    ///
    /// Who waits for the first connection waits as long as that takes to succeed or to fail. After that it is a wait
    /// for one's turn, `queued_since` then.
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
                // Others may become free.
                Err(error) if !pool.http2_connections.borrow().is_empty() => {
                    tracing::debug!(%error, "no further connection to the upstream");
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
                Ok(wire) => {
                    if offer == AlpnOffer::Http2AndHttp1 {
                        self.negotiated_http2
                            .set(Some(matches!(wire, ConnectionProtocol::Http2(_))));
                    }
                    return Ok(Box::new(UpstreamConnection::new(wire)));
                }
                Err(error) if *retries > 0 => {
                    *retries -= 1;
                    tracing::debug!(%error, "connecting to the upstream once more");
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Speaks what was agreed upon. The connection holds the permit from now on; without one, it has got lost with a
    /// connection that failed, and there is another to be had.
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
                    detail: "it allows no requests".to_owned(),
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
                tracing::debug!(%error, "an upstream connection ended");
            }
        });
        Ok(ConnectionProtocol::Http1(Http1Connection {
            sender,
            informational: Arc::default(),
            peer,
            task: task.abort_handle(),
        }))
    }

    /// Gives a new connection to those who wait for it.
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
        // Whoever is left has to wait for something else.
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

    /// The one that waits longest, of those that still do.
    fn pop_waiter(&self) -> Option<ConnectionWaiter> {
        let mut waiters = self.waiters.borrow_mut();
        std::iter::from_fn(|| waiters.pop_front()).find(|waiter| !waiter.is_closed())
    }

    fn reject_waiters(&self, rejection: &WaiterRejection) {
        while let Some(waiter) = self.pop_waiter() {
            drop(waiter.send(Err(rejection.clone())));
        }
    }

    /// A request on `link` is over, or the whole connection.
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
        let links = self
            .http2_connections
            .borrow()
            .iter()
            .filter(|http2_connection| http2_connection.idle_since().is_some())
            .count();
        links + self.idle_http1.borrow().len()
    }

    fn return_connection(&self, mut connection: Box<UpstreamConnection>) {
        let ConnectionProtocol::Http1(http1) = &connection.protocol else {
            return;
        };
        // Not ready: the upstream closes, or a request body is still on its way and nobody is
        // left to read the answer's end. Dropping closes.
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

    /// Whether what became free should go to another worker.
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

    /// Connections to addresses that the upstream's name has lost are used no more, even if somebody still listens there.
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

    /// Closes idle connections that are dead, old, or needed elsewhere.
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

/// A connection that is being waited for or opened.
type AcquireFuture<'p> = LocalBoxFuture<'p, Result<Box<UpstreamConnection>, UpstreamError>>;

enum AcquireOutcome {
    Connection(Box<UpstreamConnection>),
    Permit(OwnedSemaphorePermit),
    /// Look again.
    Retry,
}

/// A place in the queue for connections.
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

/// Looks the upstream's name up now and then, for as long as it has one and the pool is in use.
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
    fn new(wire: ConnectionProtocol) -> Self {
        Self {
            protocol: wire,
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

    /// As an idle one.
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
        // hyper would wait for the rest of a request or a response that nobody needs any more.
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

    /// The response has been read to its end.
    pub(crate) fn return_to_pool(self) {
        self.pool.return_connection(self.connection);
    }
}

#[cfg(test)]
mod tests;
