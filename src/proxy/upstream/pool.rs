//! One worker's upstream connections, and what all workers share.
//!
//! The last used connection is used first, so that the others grow old and are closed. A connection
//! counts against `max_connections` until its socket is closed, idle ones too; so a request that has
//! to wait makes every worker close idle connections. A connection that becomes free goes straight to a
//! request waiting in its own worker, except that every few times it is closed for the one that
//! waits longest anywhere: a worker without connections must not starve beside a busy one.

use futures_util::future::LocalBoxFuture;
use http::HeaderValue;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::connect::{Connector, SetupError};
use super::{UpstreamError, UpstreamErrorKind};
use crate::proxy::UpstreamSettings;
use crate::proxy::alarm::Alarm;
use crate::proxy::body::RequestBody;
use crate::telemetry::Throttle;

/// Of the connections that become free, one in this many is closed for other workers' requests
/// if some wait.
const HANDOVERS_PER_CLOSE: u32 = 8;
/// While the upstream is away, the log says so this often.
const TROUBLE_PAUSE: Duration = Duration::from_secs(10);
/// Idle connections are looked through this often at most.
const SWEEP_INTERVAL: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// The head of a response; more is no answer.
const MAX_RESPONSE_HEAD_BYTES: usize = 256 * 1024;

/// What all workers may do together, and how to reach the upstream.
#[derive(Debug)]
pub struct Shared {
    settings: UpstreamSettings,
    /// The upstream's name in a `Host` field.
    authority: HeaderValue,
    connector: Connector,
    max_idle_per_worker: usize,
    /// A permit per open connection.
    open: Arc<Semaphore>,
    /// Requests that wait for one.
    waiting: AtomicUsize,
    /// Requests that wait for their turn first.
    held: AtomicUsize,
    /// Changes whenever a request begins to wait.
    wanted: watch::Sender<()>,
    /// For the log, when no request gets through.
    trouble: Throttle,
}

#[derive(Debug)]
pub(super) struct Pool {
    shared: Arc<Shared>,
    /// The longest idle one in front.
    idle: RefCell<VecDeque<Box<Connection>>>,
    /// This worker's waiting requests.
    waiters: RefCell<VecDeque<oneshot::Sender<Box<Connection>>>>,
    handovers: Cell<u32>,
}

/// A connection that no request is using, or one alone. Dropping it closes it.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) sender: SendRequest<RequestBody>,
    /// For the one request that uses the connection.
    pub(super) alarm: Alarm,
    task: AbortHandle,
    /// When it was last given back; `None`: it is new.
    idle_since: Option<Instant>,
}

/// A connection whose response is being read.
#[derive(Debug)]
pub(crate) struct Lease {
    pool: Rc<Pool>,
    connection: Box<Connection>,
}

impl Shared {
    /// Reads the trust anchors if the upstream speaks https. `workers`: how many will share.
    ///
    /// # Errors
    /// When certificates or names for https are missing or wrong.
    pub fn new(settings: UpstreamSettings, workers: usize) -> Result<Arc<Self>, SetupError> {
        let connector = Connector::new(&settings)?;
        let authority = settings.url.authority();
        let authority = HeaderValue::try_from(&authority).map_err(|_invalid| SetupError::Host(authority))?;
        Ok(Arc::new(Self {
            connector,
            authority,
            max_idle_per_worker: settings.pool_max_idle.div_ceil(workers.max(1)),
            open: Arc::new(Semaphore::new(settings.max_connections.min(Semaphore::MAX_PERMITS))),
            waiting: AtomicUsize::new(0),
            held: AtomicUsize::new(0),
            wanted: watch::Sender::new(()),
            trouble: Throttle::new(TROUBLE_PAUSE),
            settings,
        }))
    }
}

impl Shared {
    /// Counts one more in a queue, unless all queues together are full.
    fn enter(&self, queue: &AtomicUsize) -> Result<(), UpstreamError> {
        let limit = self.settings.max_requests_waiting;
        queue.fetch_add(1, Ordering::SeqCst);
        let all = self.waiting.load(Ordering::SeqCst) + self.held.load(Ordering::SeqCst);
        if all > limit {
            queue.fetch_sub(1, Ordering::SeqCst);
            return Err(UpstreamError::queue_full(limit));
        }
        Ok(())
    }
}

impl Pool {
    pub(super) fn new(shared: Arc<Shared>) -> Rc<Self> {
        let pool = Rc::new(Self {
            shared,
            idle: RefCell::default(),
            waiters: RefCell::default(),
            handovers: Cell::new(0),
        });
        tokio::task::spawn_local(sweep(Rc::downgrade(&pool), pool.shared.wanted.subscribe()));
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
    /// Boxed, as is [`Pool::acquire_new`]: few requests connect, and all would have room for it.
    pub(super) fn acquire<'p>(&'p self, retries: &'p mut u32) -> Acquire<'p> {
        Box::pin(async move {
            match self.take_idle() {
                Some(connection) => Ok(connection),
                None => match self.slot().await? {
                    Slot::Connection(connection) => Ok(connection),
                    Slot::Permit(permit) => self.open(permit, retries).await,
                },
            }
        })
    }

    /// A connection that was never used.
    pub(super) fn acquire_new<'p>(&'p self, retries: &'p mut u32) -> Acquire<'p> {
        Box::pin(async move {
            let permit = match Arc::clone(&self.shared.open).try_acquire_owned() {
                Ok(permit) => permit,
                Err(_none_left) => {
                    // Swapping one of our idle connections for a new one needs nobody else's.
                    drop(self.idle.borrow_mut().pop_front());
                    self.queue(None).await?
                }
            };
            self.open(permit, retries).await
        })
    }

    /// Waits until a request's turn has come. Ended early, it leaves nothing behind.
    pub(super) async fn hold_until(&self, due: Instant) -> Result<(), UpstreamError> {
        let _place = Held::take(&self.shared)?;
        sleep_until(due).await;
        Ok(())
    }

    /// A connection that is there and used before.
    pub(super) fn take_idle(&self) -> Option<Box<Connection>> {
        let mut idle = self.idle.borrow_mut();
        let max_age = self.settings().pool_idle_timeout;
        std::iter::from_fn(|| idle.pop_back()).find(|connection| connection.is_usable(max_age))
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
            Ok(connection) = &mut receiver => Ok(Slot::Connection(connection)),
            permit = queued => permit.map(Slot::Permit),
        }
    }

    /// Waits for a permit, in one line with all workers' requests; `waiter` is known to this
    /// worker's connections meanwhile.
    async fn queue(
        &self,
        waiter: Option<oneshot::Sender<Box<Connection>>>,
    ) -> Result<OwnedSemaphorePermit, UpstreamError> {
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

    async fn open(
        &self,
        permit: OwnedSemaphorePermit,
        retries: &mut u32,
    ) -> Result<Box<Connection>, UpstreamError> {
        let stream = loop {
            match self.shared.connector.connect(self.settings()).await {
                Ok(stream) => break stream.counted(permit),
                Err(error) if *retries > 0 => {
                    *retries -= 1;
                    tracing::debug!(%error, "connecting to the upstream once more");
                }
                Err(error) => return Err(error),
            }
        };
        let (sender, connection) = http1::Builder::new()
            .max_buf_size(MAX_RESPONSE_HEAD_BYTES)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| UpstreamError {
                kind: UpstreamErrorKind::Terminated,
                detail: error.to_string(),
            })?;
        let task = tokio::task::spawn_local(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "an upstream connection ended");
            }
        });
        let task = task.abort_handle();
        Ok(Box::new(Connection { sender, alarm: Alarm::default(), task, idle_since: None }))
    }

    fn put_back(&self, mut connection: Box<Connection>) {
        // Not ready: the upstream closes, or a request body is still on its way and nobody is
        // left to read the answer's end. Dropping closes.
        if !connection.sender.is_ready() {
            return;
        }
        connection.idle_since = Some(Instant::now());
        if self.shared.waiting.load(Ordering::SeqCst) > 0 {
            self.hand_over(connection);
            return;
        }
        let mut idle = self.idle.borrow_mut();
        idle.push_back(connection);
        if idle.len() > self.shared.max_idle_per_worker {
            idle.pop_front();
        }
    }

    fn hand_over(&self, mut connection: Box<Connection>) {
        self.handovers.set(self.handovers.get().wrapping_add(1));
        let mut waiters = self.waiters.borrow_mut();
        let others_wait = self.shared.waiting.load(Ordering::SeqCst) > waiters.len();
        if others_wait && self.handovers.get().is_multiple_of(HANDOVERS_PER_CLOSE) {
            return;
        }
        while let Some(waiter) = waiters.pop_front() {
            match waiter.send(connection) {
                Ok(()) => return,
                Err(unwanted) => connection = unwanted,
            }
        }
    }

    /// Closes idle connections that are dead, old, or needed elsewhere.
    fn sweep(&self) {
        let mut idle = self.idle.borrow_mut();
        let max_age = self.settings().pool_idle_timeout;
        idle.retain(|connection| connection.is_usable(max_age));
        let wanted = self.shared.waiting.load(Ordering::SeqCst).min(idle.len());
        idle.drain(..wanted);
    }
}

/// A connection that is being waited for or opened.
type Acquire<'p> = LocalBoxFuture<'p, Result<Box<Connection>, UpstreamError>>;

enum Slot {
    Connection(Box<Connection>),
    Permit(OwnedSemaphorePermit),
}

/// A place in the queue for connections.
struct Place<'p>(&'p Pool);

impl<'p> Place<'p> {
    fn take(pool: &'p Pool) -> Result<Self, UpstreamError> {
        pool.shared.enter(&pool.shared.waiting)?;
        Ok(Self(pool))
    }
}

/// A place among the held.
struct Held<'s>(&'s Shared);

impl<'s> Held<'s> {
    fn take(shared: &'s Shared) -> Result<Self, UpstreamError> {
        shared.enter(&shared.held)?;
        Ok(Self(shared))
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.shared.waiting.fetch_sub(1, Ordering::SeqCst);
        self.0.waiters.borrow_mut().retain(|waiter| !waiter.is_closed());
    }
}

async fn sweep(pool: Weak<Pool>, mut wanted: watch::Receiver<()>) {
    let Some(interval) = pool.upgrade().map(|pool| pool.settings().pool_idle_timeout / 2) else { return };
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

impl Connection {
    pub(super) fn is_reused(&self) -> bool {
        self.idle_since.is_some()
    }

    fn is_usable(&self, max_idle: Duration) -> bool {
        self.sender.is_ready() && self.idle_since.is_none_or(|since| since.elapsed() < max_idle)
    }
}

impl Drop for Connection {
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
