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

use super::addresses::{self, Addresses};
use super::connect::{Offer, Stream};
use super::early::Early;
use super::http2::{self, Link};
use super::shared::{Held, Shared};
use super::{MAX_RESPONSE_HEAD_BYTES, UpstreamError, UpstreamErrorKind};
use crate::proxy::alarm::Alarm;
use crate::proxy::body::RequestBody;
use crate::proxy::{Scheme, UpstreamSettings, UpstreamUrl};
use crate::telemetry::Throttle;

/// Of the connections that become free, one in this many is closed for other workers' requests
/// if some wait.
const HANDOVERS_PER_CLOSE: u32 = 8;
/// Idle connections are looked through this often at most.
const SWEEP_INTERVAL: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// Fields in the head of a response: some frameworks send a line per cookie or preload. hyper's own limit is 100; each
/// more costs some bytes per response.
const MAX_RESPONSE_HEADERS: usize = 256;

#[derive(Debug)]
pub(super) struct Pool {
    shared: Arc<Shared>,
    /// By HTTP/1.1; the longest idle one in front.
    idle: RefCell<VecDeque<Box<Connection>>>,
    /// By HTTP/2.
    links: RefCell<Vec<Rc<Link>>>,
    /// Whether the upstream chose HTTP/2 when it was last asked.
    chose_http2: Cell<Option<bool>>,
    /// Links on their way, and how many requests each is expected to carry.
    opening: Cell<usize>,
    link_capacity: Cell<usize>,
    /// This worker's waiting requests.
    waiters: RefCell<VecDeque<Waiter>>,
    handovers: Cell<u32>,
    addresses: RefCell<Addresses>,
}

type Waiter = oneshot::Sender<Result<Box<Connection>, Turned>>;

/// What a waiting request may be told instead.
#[derive(Clone, Debug)]
enum Turned {
    /// There are no connections to be had.
    Away(UpstreamError),
    /// What it waited for will not come; there may be other ways.
    Back,
}

/// A connection, or room on one, that no request is using, or one alone. Dropping it ends that request.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) wire: Wire,
    /// For the one request that uses the connection.
    pub(super) alarm: Alarm,
    /// When it was last given back; `None`: it is new.
    idle_since: Option<Instant>,
}

#[derive(Debug)]
pub(super) enum Wire {
    Http1(Http1),
    Http2(http2::Place),
}

/// Dropping it closes the connection.
#[derive(Debug)]
pub(super) struct Http1 {
    pub(super) sender: SendRequest<RequestBody>,
    pub(super) early: Arc<Early>,
    peer: Option<IpAddr>,
    task: AbortHandle,
}

/// A connection whose response is being read.
#[derive(Debug)]
pub(crate) struct Lease {
    pool: Rc<Pool>,
    connection: Box<Connection>,
}

impl Pool {
    pub(super) fn new(shared: Arc<Shared>) -> Rc<Self> {
        let chose_http2 = match &shared.settings.url {
            UpstreamUrl::Net {
                scheme: Scheme::H2c,
                ..
            } => Some(true),
            UpstreamUrl::Net {
                scheme: Scheme::Https,
                ..
            } => None,
            _ => Some(false),
        };
        let pool = Rc::new(Self {
            shared,
            idle: RefCell::default(),
            links: RefCell::default(),
            chose_http2: Cell::new(chose_http2),
            opening: Cell::new(0),
            link_capacity: Cell::new(http2::MAX_STREAMS),
            waiters: RefCell::default(),
            handovers: Cell::new(0),
            addresses: RefCell::default(),
        });
        tokio::task::spawn_local(sweep(Rc::downgrade(&pool), pool.shared.wanted.subscribe()));
        if addresses::has_name(&pool.shared.settings.url) {
            tokio::task::spawn_local(follow(Rc::downgrade(&pool)));
        }
        pool
    }

    pub(super) fn settings(&self) -> &UpstreamSettings {
        &self.shared.settings
    }

    pub(super) fn authority(&self) -> &HeaderValue {
        &self.shared.authority
    }

    pub(super) fn trouble(&self) -> &Throttle {
        &self.shared.trouble
    }

    /// A connection, used before if there is one. `retries`: how often connecting may be tried again.
    ///
    /// Boxed, as are its sisters: few requests connect, and all would have room for it.
    pub(super) fn acquire<'p>(self: &'p Rc<Self>, retries: &'p mut u32) -> Acquire<'p> {
        Box::pin(async move {
            let mut queued_since = None;
            loop {
                if let Some(connection) = self.take_idle(Instant::now()) {
                    return Ok(connection);
                }
                if self.chose_http2.get() == Some(false) {
                    return match self.slot().await? {
                        Slot::Connection(connection) => Ok(connection),
                        Slot::Permit(permit) => self.open(permit, retries, Offer::Both).await,
                        Slot::None => continue,
                    };
                }
                if let Some(connection) = self.share(&mut queued_since).await? {
                    return Ok(connection);
                }
            }
        })
    }

    /// A connection that was never used, or, by HTTP/2, another one.
    pub(super) fn acquire_new<'p>(self: &'p Rc<Self>, retries: &'p mut u32) -> Acquire<'p> {
        if self.chose_http2.get() != Some(false) {
            return self.acquire(retries);
        }
        Box::pin(async move {
            let permit = self.permit().await?;
            self.open(permit, retries, Offer::Both).await
        })
    }

    /// A connection by HTTP/1.1, of an upstream that prefers HTTP/2.
    pub(super) fn acquire_http1<'p>(self: &'p Rc<Self>, retries: &'p mut u32) -> Acquire<'p> {
        Box::pin(async move {
            if let Some(connection) = self.take_idle_http1(Instant::now()) {
                return Ok(connection);
            }
            let permit = self.permit().await?;
            self.open(permit, retries, Offer::Http1).await
        })
    }

    /// Waits until a request's turn has come. Ended early, it leaves nothing behind.
    pub(super) async fn hold_until(&self, due: Instant) -> Result<(), UpstreamError> {
        let _place = Held::take(&self.shared)?;
        sleep_until(due).await;
        Ok(())
    }

    /// A connection that is there, or room on one; `now` is when the caller looked at the clock last.
    pub(super) fn take_idle(self: &Rc<Self>, now: Instant) -> Option<Box<Connection>> {
        let max_age = self.settings().pool_idle_timeout;
        let is_young = |link: &&Rc<Link>| {
            link.idle_since()
                .is_none_or(|since| now.duration_since(since) < max_age)
        };
        let place = self
            .links
            .borrow()
            .iter()
            .filter(is_young)
            .find_map(|link| link.place(self));
        place
            .map(|place| Box::new(Connection::new(Wire::Http2(place))))
            .or_else(|| self.take_idle_http1(now))
    }

    fn take_idle_http1(&self, now: Instant) -> Option<Box<Connection>> {
        let mut idle = self.idle.borrow_mut();
        let max_age = self.settings().pool_idle_timeout;
        std::iter::from_fn(|| idle.pop_back()).find(|connection| connection.is_usable(max_age, now))
    }

    /// Room for one more connection, or one that became free.
    async fn slot(&self) -> Result<Slot, UpstreamError> {
        if let Ok(permit) = Arc::clone(&self.shared.open).try_acquire_owned() {
            return Ok(Slot::Permit(permit));
        }
        let (sender, mut receiver) = oneshot::channel();
        let queued = self.queue(Some(sender));
        tokio::select! {
            biased;
            Ok(offered) = &mut receiver => match offered {
                Ok(connection) => Ok(Slot::Connection(connection)),
                Err(Turned::Away(error)) => Err(error),
                Err(Turned::Back) => Ok(Slot::None),
            },
            permit = queued => permit.map(Slot::Permit),
        }
    }

    /// Room for a new connection, which nothing that becomes free could replace.
    async fn permit(&self) -> Result<OwnedSemaphorePermit, UpstreamError> {
        match Arc::clone(&self.shared.open).try_acquire_owned() {
            Ok(permit) => Ok(permit),
            Err(_none_left) => {
                // Swapping one of our idle connections for a new one needs nobody else's.
                drop(self.idle.borrow_mut().pop_front());
                self.queue(None).await
            }
        }
    }

    /// Waits for a permit, in one line with all workers' requests; `waiter` is known to this
    /// worker's connections meanwhile.
    async fn queue(&self, waiter: Option<Waiter>) -> Result<OwnedSemaphorePermit, UpstreamError> {
        let settings = self.settings();
        let _place = Place::take(self)?;
        if let Some(waiter) = waiter {
            self.waiters.borrow_mut().push_back(waiter);
        }
        self.shared.wanted.send_replace(());
        let permit = Arc::clone(&self.shared.open).acquire_owned();
        match timeout(settings.queue_timeout, permit).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(UpstreamError::queue_timeout(settings.queue_timeout)),
        }
    }

    /// Waits for room on a connection by HTTP/2, and sees to it that there will be some. `None`: look again.
    ///
    /// Who waits for the first connection waits as long as that takes to succeed or to fail. After that it is a wait
    /// for one's turn, `queued_since` then.
    async fn share(
        self: &Rc<Self>,
        queued_since: &mut Option<Instant>,
    ) -> Result<Option<Box<Connection>>, UpstreamError> {
        let (waiter, offered) = oneshot::channel();
        let is_full = !self.links.borrow().is_empty();
        let _place = if is_full {
            Some(Place::take(self)?)
        } else {
            None
        };
        self.waiters.borrow_mut().push_back(waiter);
        self.open_as_needed();
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
            Ok(Err(Turned::Away(error))) => Err(error),
            Ok(Err(Turned::Back)) | Err(_) => Ok(None),
        }
    }

    fn open_as_needed(self: &Rc<Self>) {
        let waiting = {
            let mut waiters = self.waiters.borrow_mut();
            waiters.retain(|waiter| !waiter.is_closed());
            waiters.len()
        };
        if self.opening.get().saturating_mul(self.link_capacity.get()) >= waiting {
            return;
        }
        self.opening.set(self.opening.get() + 1);
        let pool = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let mut retries = pool.settings().retry_connect;
            let opened = match pool.permit().await {
                Ok(permit) => pool.open(permit, &mut retries, Offer::Both).await,
                Err(error) => Err(error),
            };
            pool.opening.set(pool.opening.get() - 1);
            match opened {
                Ok(connection) => pool.hand_out(connection),
                // Others may become free.
                Err(error) if !pool.links.borrow().is_empty() => {
                    tracing::debug!(%error, "no further connection to the upstream");
                }
                Err(error) => pool.turn(&Turned::Away(error)),
            }
        });
    }

    async fn open(
        self: &Rc<Self>,
        permit: OwnedSemaphorePermit,
        retries: &mut u32,
        offer: Offer,
    ) -> Result<Box<Connection>, UpstreamError> {
        let mut permit = Some(permit);
        loop {
            let begun = Instant::now();
            let opened = match self.shared.connector.connect(self.settings(), offer).await {
                Ok(stream) => self.begin(stream, &mut permit, begun).await,
                Err(error) => Err(error),
            };
            match opened {
                Ok(wire) => {
                    if offer == Offer::Both {
                        self.chose_http2.set(Some(matches!(wire, Wire::Http2(_))));
                    }
                    return Ok(Box::new(Connection::new(wire)));
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
    async fn begin(
        self: &Rc<Self>,
        stream: Stream,
        permit: &mut Option<OwnedSemaphorePermit>,
        begun: Instant,
    ) -> Result<Wire, UpstreamError> {
        let held = match permit.take() {
            Some(permit) => permit,
            None => self.permit().await?,
        };
        let stream = stream.counted(held);
        if stream.is_http2() {
            let limit = self
                .settings()
                .connect_timeout
                .saturating_sub(begun.elapsed());
            let (link, driver) = http2::open(stream, limit).await?;
            link.run(driver, Rc::downgrade(self));
            self.link_capacity.set(link.capacity());
            self.links.borrow_mut().push(Rc::clone(&link));
            return link
                .place(self)
                .map(Wire::Http2)
                .ok_or_else(|| UpstreamError {
                    kind: UpstreamErrorKind::Protocol,
                    detail: "it allows no requests".to_owned(),
                });
        }
        let peer = stream.peer();
        let shaken = http1::Builder::new()
            .max_buf_size(MAX_RESPONSE_HEAD_BYTES as usize)
            .max_headers(MAX_RESPONSE_HEADERS)
            .handshake(TokioIo::new(stream))
            .await;
        let (sender, connection) = shaken.map_err(|error| UpstreamError {
            kind: UpstreamErrorKind::Terminated,
            detail: error.to_string(),
        })?;
        let task = tokio::task::spawn_local(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "an upstream connection ended");
            }
        });
        Ok(Wire::Http1(Http1 {
            sender,
            early: Arc::default(),
            peer,
            task: task.abort_handle(),
        }))
    }

    /// Gives a new connection to those who wait for it.
    fn hand_out(self: &Rc<Self>, connection: Box<Connection>) {
        let link = match &connection.wire {
            Wire::Http2(place) => Some(Rc::clone(place.link())),
            Wire::Http1(_) => None,
        };
        match self.next_waiter() {
            Some(waiter) => drop(waiter.send(Ok(connection))),
            None if link.is_none() => self.keep_idle(connection),
            None => {}
        }
        if let Some(link) = link {
            self.serve(&link);
        }
        // Whoever is left has to wait for something else.
        self.turn(&Turned::Back);
    }

    fn serve(self: &Rc<Self>, link: &Rc<Link>) {
        while let Some(waiter) = self.next_waiter() {
            match link.place(self) {
                Some(place) => drop(waiter.send(Ok(Box::new(Connection::new(Wire::Http2(place)))))),
                None => return self.waiters.borrow_mut().push_front(waiter),
            }
        }
    }

    /// The one that waits longest, of those that still do.
    fn next_waiter(&self) -> Option<Waiter> {
        let mut waiters = self.waiters.borrow_mut();
        std::iter::from_fn(|| waiters.pop_front()).find(|waiter| !waiter.is_closed())
    }

    fn turn(&self, turned: &Turned) {
        while let Some(waiter) = self.next_waiter() {
            drop(waiter.send(Err(turned.clone())));
        }
    }

    /// A request on `link` is over, or the whole connection.
    pub(super) fn freed(self: &Rc<Self>, link: &Rc<Link>) {
        if self.shared.waiting.load(Ordering::SeqCst) > 0 {
            let is_unneeded = link.idle_since().is_some() && self.waiters.borrow().is_empty();
            if is_unneeded || self.is_others_turn() {
                link.retire();
            }
        }
        if link.is_closing() {
            self.forget(link);
            if self.links.borrow().is_empty() {
                self.turn(&Turned::Back);
            }
            return;
        }
        self.serve(link);
        if link.idle_since().is_some() && self.idle_count() > self.shared.max_idle_per_worker {
            self.forget(link);
        }
    }

    fn forget(&self, link: &Rc<Link>) {
        self.links
            .borrow_mut()
            .retain(|known| !Rc::ptr_eq(known, link));
    }

    fn idle_count(&self) -> usize {
        let links = self
            .links
            .borrow()
            .iter()
            .filter(|link| link.idle_since().is_some())
            .count();
        links + self.idle.borrow().len()
    }

    fn put_back(&self, mut connection: Box<Connection>) {
        let Wire::Http1(http1) = &connection.wire else {
            return;
        };
        // Not ready: the upstream closes, or a request body is still on its way and nobody is
        // left to read the answer's end. Dropping closes.
        if !http1.sender.is_ready() || self.addresses.borrow().have_lost(http1.peer) {
            return;
        }
        connection.idle_since = Some(Instant::now());
        if self.shared.waiting.load(Ordering::SeqCst) > 0 {
            self.hand_over(connection);
        } else {
            self.keep_idle(connection);
        }
    }

    fn keep_idle(&self, connection: Box<Connection>) {
        let mut idle = self.idle.borrow_mut();
        idle.push_back(connection);
        if idle.len() > self.shared.max_idle_per_worker {
            idle.pop_front();
        }
    }

    fn hand_over(&self, connection: Box<Connection>) {
        if self.is_others_turn() {
            return;
        }
        if let Some(waiter) = self.next_waiter() {
            drop(waiter.send(Ok(connection)));
        }
    }

    /// Whether what became free should go to another worker.
    fn is_others_turn(&self) -> bool {
        self.handovers.set(self.handovers.get().wrapping_add(1));
        let others_wait = self.shared.waiting.load(Ordering::SeqCst) > self.waiters.borrow().len();
        others_wait && self.handovers.get().is_multiple_of(HANDOVERS_PER_CLOSE)
    }

    /// Connections to addresses that the upstream's name has lost are used no more, even if somebody still listens there.
    fn follow(&self, found: Vec<IpAddr>) {
        self.addresses.borrow_mut().learn(found);
        let addresses = self.addresses.borrow();
        self.idle
            .borrow_mut()
            .retain(|connection| match &connection.wire {
                Wire::Http1(http1) => !addresses.have_lost(http1.peer),
                Wire::Http2(_) => true,
            });
        self.links.borrow_mut().retain(|link| {
            let stays = !addresses.have_lost(link.peer);
            if !stays {
                link.retire();
            }
            stays
        });
    }

    /// Closes idle connections that are dead, old, or needed elsewhere.
    fn sweep(&self) {
        let (max_age, now) = (self.settings().pool_idle_timeout, Instant::now());
        let mut idle = self.idle.borrow_mut();
        idle.retain(|connection| connection.is_usable(max_age, now));
        let mut wanted = self.shared.waiting.load(Ordering::SeqCst);
        let closed = wanted.min(idle.len());
        idle.drain(..closed);
        wanted -= closed;
        self.links
            .borrow_mut()
            .retain(|link| match link.idle_since() {
                Some(_) if wanted > 0 => {
                    wanted -= 1;
                    false
                }
                idle_since => idle_since.is_none_or(|since| now.duration_since(since) < max_age),
            });
    }
}

/// A connection that is being waited for or opened.
type Acquire<'p> = LocalBoxFuture<'p, Result<Box<Connection>, UpstreamError>>;

enum Slot {
    Connection(Box<Connection>),
    Permit(OwnedSemaphorePermit),
    /// Look again.
    None,
}

/// A place in the queue for connections.
struct Place<'p>(&'p Pool);

impl<'p> Place<'p> {
    fn take(pool: &'p Pool) -> Result<Self, UpstreamError> {
        pool.shared.enter(&pool.shared.waiting)?;
        Ok(Self(pool))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.shared.waiting.fetch_sub(1, Ordering::SeqCst);
        self.0
            .waiters
            .borrow_mut()
            .retain(|waiter| !waiter.is_closed());
    }
}

async fn sweep(pool: Weak<Pool>, mut wanted: watch::Receiver<()>) {
    let Some(interval) = pool
        .upgrade()
        .map(|pool| pool.settings().pool_idle_timeout / 2)
    else {
        return;
    };
    let interval = interval.clamp(SWEEP_INTERVAL.0, SWEEP_INTERVAL.1);
    while let Some(pool) = pool.upgrade() {
        pool.sweep();
        drop(pool);
        tokio::select! {
            changed = wanted.changed() => if changed.is_err() { return },
            () = sleep(interval) => {}
        }
    }
}

/// Looks the upstream's name up now and then, for as long as it has one and the pool is in use.
async fn follow(pool: Weak<Pool>) {
    loop {
        sleep(addresses::LOOKUP_INTERVAL).await;
        let Some(shared) = pool.upgrade().map(|pool| Arc::clone(&pool.shared)) else {
            return;
        };
        let found = addresses::look_up(&shared.settings.url).await;
        if let (Some(found), Some(pool)) = (found, pool.upgrade()) {
            pool.follow(found);
        }
    }
}

impl Connection {
    fn new(wire: Wire) -> Self {
        Self {
            wire,
            alarm: Alarm::default(),
            idle_since: None,
        }
    }

    pub(super) fn is_reused(&self) -> bool {
        match &self.wire {
            Wire::Http1(_) => self.idle_since.is_some(),
            Wire::Http2(place) => place.is_reused(),
        }
    }

    /// As an idle one.
    fn is_usable(&self, max_idle: Duration, now: Instant) -> bool {
        let Wire::Http1(http1) = &self.wire else {
            return false;
        };
        http1.sender.is_ready()
            && self
                .idle_since
                .is_none_or(|since| now.duration_since(since) < max_idle)
    }
}

impl Drop for Http1 {
    fn drop(&mut self) {
        // hyper would wait for the rest of a request or a response that nobody needs any more.
        self.task.abort();
    }
}

impl Lease {
    pub(super) fn new(pool: Rc<Pool>, connection: Box<Connection>) -> Self {
        Self { pool, connection }
    }

    pub(crate) fn alarm(&mut self) -> &mut Alarm {
        &mut self.connection.alarm
    }

    /// The response has been read to its end.
    pub(crate) fn give_back(self) {
        self.pool.put_back(self.connection);
    }
}

#[cfg(test)]
mod tests;
