//! Accepts client connections and distributes them over the worker threads until shutdown.
//!
//! Each worker is a thread with its own runtime. A connection and all its requests stay on one
//! worker. One acceptor per listener assigns each connection to the worker with the fewest
//! connections. `SO_REUSEPORT` was rejected: the kernel distributes by address hash, which is
//! uneven for the few long-lived connections of an ingress.

pub(in crate::proxy) mod accept;
pub(in crate::proxy) mod allocator_trim;
pub(in crate::proxy) mod connection;
pub(in crate::proxy) mod connection_timeouts;
pub(in crate::proxy) mod frame_limits;
pub(in crate::proxy) mod lazy_timer;
pub(in crate::proxy) mod listener;
pub(in crate::proxy) mod transport;
use futures_util::future::{join_all, select_all};
use http::{Request, Response, StatusCode};
use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::{ListenSettings, ShutdownSettings};
use crate::listen::{BoundSocket, ListenAddress, SocketListener};
use crate::proxy::http::body::{RequestBody, ResponseBody};
use crate::proxy::http::headers::AddressText;
use crate::proxy::http::informational_responses::InformationalForwarder;
use crate::proxy::server::accept::{HandshakeAcceptor, HandshakeError};
use crate::proxy::server::allocator_trim::AllocatorTrim;
use crate::proxy::server::connection::{HttpProtocols, serve_connection};
use crate::proxy::server::connection_timeouts::ConnectionMonitor;
use crate::proxy::server::listener::AcceptedSocket;
use crate::proxy::server::transport::RawSocket;
use crate::telemetry::metrics::WorkerMetrics;
use crate::tls::{self, CertificateSubject};

/// Capacity of a worker's queue of accepted connections.
const WORKER_QUEUE_CAPACITY: usize = 256;
/// Delay before accepting again after an error such as running out of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);
/// DNS lookup threads per worker. A lookup can block its thread long after its request timed out.
const DNS_LOOKUP_THREADS: usize = 16;

/// Handles the requests of one worker.
pub trait RequestHandler: 'static {
    /// Handles one request. If the client disconnects, the future is dropped. `interim` sends
    /// informational (1xx) responses before the final one.
    fn handle(
        self: Rc<Self>,
        request: Request<RequestBody>,
        peer: Arc<ConnectionPeer>,
        interim: InformationalForwarder,
    ) -> impl Future<Output = Response<ResponseBody>> + 'static;

    /// Records a connection that failed before its first request.
    fn record_handshake_error(&self, _fault: HandshakeError) {}

    /// Records that the server answered an unreadable request head with `status`.
    fn record_unreadable_request(&self, _status: StatusCode, _peer: &ConnectionPeer) {}

    /// Metrics shard of this worker.
    fn metrics_shard(&self) -> Option<Arc<WorkerMetrics>> {
        None
    }

    /// Finishes outstanding work after the worker's last request. The worker thread ends
    /// afterwards.
    fn finish(&self) -> impl Future<Output = ()> {
        std::future::ready(())
    }
}

/// Protocol that a listener serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ListenerKind {
    /// Requests that are forwarded to the upstream.
    #[default]
    Proxy,
    /// Calls of Envoy's rate limit service (RLS).
    RateLimitService,
    /// Authorization checks for requests that another proxy forwards.
    ExtAuthz,
}

impl ListenerKind {
    /// Whether untrusted clients connect here. The other kinds serve the operator's own proxies.
    pub(super) fn is_public(self) -> bool {
        self == Self::Proxy
    }
}

/// Client end of a connection.
#[derive(Debug)]
pub struct ConnectionPeer {
    pub listener_kind: ListenerKind,
    /// Client address. A PROXY header overrides the socket's address. IPv4-mapped IPv6 addresses
    /// appear as IPv4, and Unix socket clients as 127.0.0.1.
    pub addr: SocketAddr,
    pub is_tls: bool,
    /// Subject of the client certificate, if the client presented one.
    pub certificate_subject: Option<CertificateSubject>,
    /// Client IP formatted for forwarding headers, once per connection.
    pub(super) address_text: AddressText,
}

impl ConnectionPeer {
    pub(super) fn new(addr: SocketAddr) -> Self {
        let addr = SocketAddr::new(addr.ip().to_canonical(), addr.port());
        Self {
            listener_kind: ListenerKind::Proxy,
            addr,
            is_tls: false,
            certificate_subject: None,
            address_text: AddressText::new(addr.ip()),
        }
    }
}

/// Requested run state of the server. The state only moves forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ShutdownSignal {
    Run,
    /// Finish active requests within the limits of [`ShutdownSettings`].
    Drain,
    /// Stop immediately and cut all connections.
    Immediate,
}

/// Bound listeners. Clients cannot connect before [`ProxyServer::run`].
#[derive(Debug)]
pub struct ProxyServer {
    /// Workers refer to a listener by its index here.
    listeners: Vec<ServerListener>,
    threads: usize,
    load: ServerLoad,
}

/// Bound address with its settings.
#[derive(Debug)]
struct ServerListener {
    kind: ListenerKind,
    socket: BoundSocket,
    settings: ListenSettings,
    tls: tls::ReloadableServerTls,
}

/// Live counters of the server, shared with metrics.
#[derive(Clone, Debug)]
pub struct ServerLoad(Arc<LoadCounters>);

#[derive(Debug)]
struct LoadCounters {
    open_connections: Box<[AtomicUsize]>,
    panics: AtomicU64,
    connection_limit_hits: AtomicU64,
}

impl ProxyServer {
    /// Binds the proxy listener. `tls` may be replaced while the server runs.
    ///
    /// # Errors
    /// Fails if the address is in use, not local, or not permitted.
    pub fn bind(settings: &ListenSettings, tls: tls::ReloadableServerTls) -> io::Result<Self> {
        let mut server = Self::with_threads(settings.threads);
        server.add_listener(ListenerKind::Proxy, settings, tls)?;
        Ok(server)
    }

    /// Creates a server with `threads` workers, at least 1, and no listener.
    pub fn with_threads(threads: usize) -> Self {
        let threads = threads.max(1);
        let open_connections = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        let load = ServerLoad(Arc::new(LoadCounters {
            open_connections,
            panics: AtomicU64::new(0),
            connection_limit_hits: AtomicU64::new(0),
        }));
        Self {
            listeners: Vec::new(),
            threads,
            load,
        }
    }

    /// Binds one more listener for the same workers. Returns its address, with the port that the
    /// system chose for port 0.
    ///
    /// # Errors
    /// Fails as [`ProxyServer::bind`] does.
    pub fn add_listener(
        &mut self,
        kind: ListenerKind,
        settings: &ListenSettings,
        tls: tls::ReloadableServerTls,
    ) -> io::Result<ListenAddress> {
        let socket = listener::bind(&settings.address)?;
        let address = socket.address()?;
        self.listeners.push(ServerListener {
            kind,
            socket,
            settings: settings.clone(),
            tls,
        });
        Ok(address)
    }

    /// Address of the first listener, with the port that the system chose for port 0.
    ///
    /// # Errors
    /// Fails if the server has no listener, or if the system cannot report the socket's address.
    pub fn address(&self) -> io::Result<ListenAddress> {
        let first = self
            .listeners
            .first()
            .ok_or_else(|| io::Error::other("the server has no listener"))?;
        first.socket.address()
    }

    /// Starts listening. Connections wait in the kernel's backlog until they are accepted.
    pub(super) fn listen(&self) -> io::Result<()> {
        self.listeners
            .iter()
            .try_for_each(|listener| listener.socket.listen(listener::BACKLOG))
    }

    /// Live counters, for metrics.
    pub fn load(&self) -> ServerLoad {
        self.load.clone()
    }

    /// Serves until `shutdown_signal` requests shutdown. A dropped sender counts as
    /// [`ShutdownSignal::Drain`].
    ///
    /// `make_handler` runs once in each worker's runtime, with the worker's index. When all
    /// handlers are ready, the server starts listening and calls `on_listening`.
    ///
    /// Returns the number of connections that were cut at the end.
    ///
    /// # Errors
    /// Fails if a worker cannot start or dies.
    pub async fn run<H, M, F>(
        self,
        make_handler: M,
        shutdown: ShutdownSettings,
        mut shutdown_signal: watch::Receiver<ShutdownSignal>,
        on_listening: impl FnOnce(),
    ) -> io::Result<usize>
    where
        H: RequestHandler,
        M: Fn(usize) -> F + Clone + Send + 'static,
        F: Future<Output = Rc<H>> + 'static,
    {
        let (cut, cut_rx) = watch::channel(false);
        let mut workers = Vec::new();
        for index in 0..self.threads {
            workers.push(WorkerThread::spawn(
                index,
                &self.listeners,
                &self.load,
                make_handler.clone(),
                cut_rx.clone(),
            )?);
        }
        let mut drain_signal = shutdown_signal.clone();
        tokio::select! {
            biased;
            () = wait_for_signal(&mut drain_signal, ShutdownSignal::Drain) => return Ok(0),
            ready = wait_until_ready(&mut workers) => ready?,
        }
        self.listen()?;
        on_listening();
        let listeners = self.listeners.into_iter().enumerate();
        let acceptors =
            listeners.map(|(index, listener)| ListenerAcceptor::new(index, listener, &workers));
        let mut acceptors = acceptors.collect::<io::Result<Vec<_>>>()?;
        let drain = async {
            wait_for_signal(&mut drain_signal, ShutdownSignal::Drain).await;
            sleep(shutdown.delay).await;
        };
        let accept_error = tokio::select! {
            biased;
            () = wait_for_signal(&mut shutdown_signal, ShutdownSignal::Immediate) => None,
            () = drain => None,
            (error, ..) = select_all(acceptors.iter_mut().map(|one| Box::pin(one.run(&self.load)))) => Some(error),
        };
        let pending: Vec<PendingConnections> = acceptors
            .into_iter()
            .map(ListenerAcceptor::into_pending_connections)
            .collect();
        // The listeners are closed. Waiting for a busy worker counts against the grace period.
        let drain_started = Instant::now();
        tokio::select! {
            biased;
            () = wait_for_signal(&mut shutdown_signal, ShutdownSignal::Immediate) => {}
            dispatched = timeout(shutdown.grace, join_all(pending.into_iter().map(|rest| rest.dispatch_all(&self.load)))) => {
                if dispatched.is_err() {
                    tracing::warn!("accepted connections dropped at shutdown; no worker took them within the grace period");
                }
            }
        }
        // The queues are closed: each worker finishes its connections and ends.
        let threads: Vec<_> = workers.into_iter().map(|worker| worker.thread).collect();
        let mut joined_workers = tokio::task::spawn_blocking(|| {
            threads
                .into_iter()
                .map(JoinHandle::join)
                .collect::<Vec<_>>()
        });
        let joined_in_time = tokio::select! {
            biased;
            () = wait_for_signal(&mut shutdown_signal, ShutdownSignal::Immediate) => None,
            ended = timeout_at(drain_started + shutdown.grace, &mut joined_workers) => ended.ok(),
        };
        let counts = match joined_in_time {
            Some(counts) => counts,
            None => {
                cut.send_replace(true);
                joined_workers.await
            }
        };
        match accept_error {
            Some(error) => Err(error),
            None => counts?
                .into_iter()
                .map(|count| count.map_err(|_panic| worker_died_error()))
                .sum(),
        }
    }
}

/// Waits for the state `at_least` or a later one.
async fn wait_for_signal(signal: &mut watch::Receiver<ShutdownSignal>, at_least: ShutdownSignal) {
    // The sender is gone: drain, but never escalate to an immediate stop.
    if signal
        .wait_for(|current| *current >= at_least)
        .await
        .is_err()
        && at_least > ShutdownSignal::Drain
    {
        std::future::pending().await
    }
}

fn worker_died_error() -> io::Error {
    io::Error::other("a worker thread ended unexpectedly")
}

impl ServerLoad {
    /// Number of open connections.
    pub fn open_connections(&self) -> usize {
        self.0
            .open_connections
            .iter()
            .map(|live| live.load(Ordering::Relaxed))
            .sum()
    }

    /// Number of connection tasks and HTTP/2 stream tasks that panicked. Each panic is a bug.
    pub fn panics(&self) -> u64 {
        self.0.panics.load(Ordering::Relaxed)
    }

    /// Number of times that accepting paused because `max_connections` were open.
    pub fn connection_limit_hits(&self) -> u64 {
        self.0.connection_limit_hits.load(Ordering::Relaxed)
    }

    pub(super) fn record_panic(&self) {
        self.0.panics.fetch_add(1, Ordering::Relaxed);
    }

    fn worker_connections(&self, worker: usize) -> usize {
        self.0
            .open_connections
            .get(worker)
            .map_or(usize::MAX, |live| live.load(Ordering::Relaxed))
    }
}

/// Accepted connection on its way to a worker.
struct QueuedConnection {
    /// Index of the listener in the server.
    listener_index: usize,
    socket: AcceptedSocket,
    addr: SocketAddr,
    count_guard: ConnectionCountGuard,
}

struct ConnectionCountGuard {
    load: ServerLoad,
    worker: usize,
    _permit: OwnedSemaphorePermit,
}

impl ConnectionCountGuard {
    fn new(load: &ServerLoad, worker: usize, permit: OwnedSemaphorePermit) -> Self {
        if let Some(live) = load.0.open_connections.get(worker) {
            live.fetch_add(1, Ordering::Relaxed);
        }
        Self {
            load: load.clone(),
            worker,
            _permit: permit,
        }
    }
}

impl Drop for ConnectionCountGuard {
    fn drop(&mut self) {
        if let Some(live) = self.load.0.open_connections.get(self.worker) {
            live.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

struct ListenerAcceptor {
    listener_index: usize,
    listener: SocketListener,
    connection_slots: Arc<Semaphore>,
    worker_queues: Vec<mpsc::Sender<QueuedConnection>>,
    is_failing: bool,
    /// Accepted connection that no worker has taken yet.
    unassigned: Option<UnassignedConnection>,
}

type UnassignedConnection = (AcceptedSocket, SocketAddr, OwnedSemaphorePermit);

/// Connections accepted before the listener closed that no worker has taken yet.
struct PendingConnections {
    listener_index: usize,
    connections: Vec<UnassignedConnection>,
    worker_queues: Vec<mpsc::Sender<QueuedConnection>>,
}

impl ListenerAcceptor {
    fn new(
        listener_index: usize,
        listener: ServerListener,
        workers: &[WorkerThread],
    ) -> io::Result<Self> {
        Ok(Self {
            listener_index,
            listener: listener.socket.into_listener()?,
            connection_slots: Arc::new(Semaphore::new(
                listener
                    .settings
                    .max_connections
                    .clamp(1, Semaphore::MAX_PERMITS),
            )),
            worker_queues: workers.iter().map(|worker| worker.queue.clone()).collect(),
            is_failing: false,
            unassigned: None,
        })
    }

    /// Accepts and dispatches connections. Returns only if a worker died.
    async fn run(&mut self, load: &ServerLoad) -> io::Error {
        loop {
            let Some(permit) = self.acquire_slot(load).await else {
                return worker_died_error();
            };
            let (socket, addr) = self.accept().await;
            // Stored in `self`: if shutdown drops this future while the worker's queue is full, the
            // connection is still dispatched during the drain.
            self.unassigned = Some((socket, addr, permit));
            if !dispatch_connection(
                &self.worker_queues,
                load,
                self.listener_index,
                &mut self.unassigned,
            )
            .await
            {
                return worker_died_error();
            }
        }
    }

    /// Accepts the connections in the kernel's backlog, up to the connection limit, and closes the
    /// listener. These clients may have sent a request already. Closing without accepting would
    /// reset their connections.
    fn into_pending_connections(self) -> PendingConnections {
        let Self {
            listener_index,
            listener,
            connection_slots,
            worker_queues,
            unassigned,
            ..
        } = self;
        let mut connections = Vec::from_iter(unassigned);
        listener.drain_backlog(|socket, addr| {
            let Ok(permit) = Arc::clone(&connection_slots).try_acquire_owned() else {
                return false;
            };
            connections.push((socket, addr, permit));
            true
        });
        PendingConnections {
            listener_index,
            connections,
            worker_queues,
        }
    }

    /// Waits for a free connection slot. Connections above the limit stay in the kernel's backlog.
    async fn acquire_slot(&self, load: &ServerLoad) -> Option<OwnedSemaphorePermit> {
        if let Ok(permit) = Arc::clone(&self.connection_slots).try_acquire_owned() {
            return Some(permit);
        }
        load.0.connection_limit_hits.fetch_add(1, Ordering::Relaxed);
        Arc::clone(&self.connection_slots)
            .acquire_owned()
            .await
            .ok()
    }

    /// Accepts the next connection. Errors are never fatal: either resources are exhausted or the
    /// client disconnected early.
    async fn accept(&mut self) -> (AcceptedSocket, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok(accepted) => {
                    if std::mem::take(&mut self.is_failing) {
                        tracing::info!("accepting connections resumed");
                    }
                    return accepted;
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    if !std::mem::replace(&mut self.is_failing, true) {
                        tracing::error!(%error, "failed to accept connections; retrying");
                    }
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }
}

impl PendingConnections {
    async fn dispatch_all(self, load: &ServerLoad) {
        for connection in self.connections {
            if !dispatch_connection(
                &self.worker_queues,
                load,
                self.listener_index,
                &mut Some(connection),
            )
            .await
            {
                return;
            }
        }
    }
}

/// Sends a connection to the least loaded worker and takes it out of `unassigned`. Returns `false`
/// if that worker is gone.
async fn dispatch_connection(
    worker_queues: &[mpsc::Sender<QueuedConnection>],
    load: &ServerLoad,
    listener_index: usize,
    unassigned: &mut Option<UnassignedConnection>,
) -> bool {
    let Some((worker, queue)) = select_least_loaded_worker(worker_queues, load) else {
        return false;
    };
    let Ok(queue_slot) = queue.reserve().await else {
        return false;
    };
    if let Some((socket, addr, permit)) = unassigned.take() {
        queue_slot.send(QueuedConnection {
            listener_index,
            socket,
            addr,
            count_guard: ConnectionCountGuard::new(load, worker, permit),
        });
    }
    true
}

/// Finds the worker with the fewest connections.
fn select_least_loaded_worker<'q>(
    worker_queues: &'q [mpsc::Sender<QueuedConnection>],
    load: &ServerLoad,
) -> Option<(usize, &'q mpsc::Sender<QueuedConnection>)> {
    worker_queues
        .iter()
        .enumerate()
        .min_by_key(|(worker, _)| load.worker_connections(*worker))
}

/// Handle of a worker thread.
struct WorkerThread {
    thread: JoinHandle<usize>,
    queue: mpsc::Sender<QueuedConnection>,
    ready: oneshot::Receiver<io::Result<()>>,
}

impl WorkerThread {
    fn spawn<H, M, F>(
        index: usize,
        listeners: &[ServerListener],
        load: &ServerLoad,
        make_handler: M,
        cut: watch::Receiver<bool>,
    ) -> io::Result<Self>
    where
        H: RequestHandler,
        M: Fn(usize) -> F + Send + 'static,
        F: Future<Output = Rc<H>> + 'static,
    {
        let (queue, queued) = mpsc::channel(WORKER_QUEUE_CAPACITY);
        let (ready_tx, ready) = oneshot::channel();
        let load = load.clone();
        let listener_configs: Vec<_> = listeners
            .iter()
            .map(|listener| {
                (
                    listener.kind,
                    HandshakeAcceptor::new(&listener.settings, &listener.tls),
                    listener.settings.clone(),
                )
            })
            .collect();
        let thread = std::thread::Builder::new()
            .name(format!("tidegate-worker-{index}"))
            .spawn(move || {
                let runtime = match Builder::new_current_thread()
                    .enable_all()
                    .max_blocking_threads(DNS_LOOKUP_THREADS)
                    .build_local(LocalOptions::default())
                {
                    Ok(runtime) => runtime,
                    Err(error) => {
                        drop(ready_tx.send(Err(error)));
                        return 0;
                    }
                };
                let cut = runtime.block_on(async {
                    let handler = make_handler(index).await;
                    drop(ready_tx.send(Ok(())));
                    let allocator_trim = Rc::<AllocatorTrim>::default();
                    let worker_listeners =
                        listener_configs
                            .into_iter()
                            .map(|(kind, acceptor, settings)| {
                                let allocator_trim = Rc::clone(&allocator_trim);
                                let protocols = Rc::new(HttpProtocols::new(
                                    &settings,
                                    kind,
                                    load.clone(),
                                    allocator_trim,
                                ));
                                WorkerListener {
                                    kind,
                                    acceptor: acceptor.into(),
                                    protocols,
                                }
                            });
                    let cut = run_worker(
                        Rc::clone(&handler),
                        worker_listeners.collect(),
                        queued,
                        cut,
                        &load,
                    )
                    .await;
                    // Lets the runtime drop the aborted connection tasks, which releases their
                    // requests.
                    tokio::task::yield_now().await;
                    handler.finish().await;
                    cut
                });
                // Dropping the runtime would wait for pending DNS lookups.
                runtime.shutdown_background();
                cut
            })?;
        Ok(Self {
            thread,
            queue,
            ready,
        })
    }
}

async fn wait_until_ready(workers: &mut [WorkerThread]) -> io::Result<()> {
    for worker in workers {
        (&mut worker.ready)
            .await
            .unwrap_or_else(|_dropped| Err(worker_died_error()))?;
    }
    Ok(())
}

/// Handshake and HTTP settings of one listener, on one worker.
struct WorkerListener {
    kind: ListenerKind,
    acceptor: Rc<HandshakeAcceptor>,
    protocols: Rc<HttpProtocols>,
}

/// Serves the worker's connections until its queue closes and they end. Returns the number of
/// connections that were cut.
async fn run_worker<H: RequestHandler>(
    handler: Rc<H>,
    listeners: Vec<WorkerListener>,
    mut queued: mpsc::Receiver<QueuedConnection>,
    mut cut: watch::Receiver<bool>,
    load: &ServerLoad,
) -> usize {
    let mut connections = JoinSet::new();
    let monitors: Rc<RefCell<HashMap<u64, Rc<ConnectionMonitor>>>> = Rc::default();
    let mut last_id = 0;
    loop {
        tokio::select! {
            next = queued.recv() => {
                let Some(next) = next else { break };
                let Some(WorkerListener { kind, acceptor, protocols }) = listeners.get(next.listener_index) else { continue };
                let monitor = ConnectionMonitor::new(protocols.timeouts(), handler.metrics_shard());
                last_id += 1;
                monitors.borrow_mut().insert(last_id, Rc::clone(&monitor));
                let registration = MonitorRegistration { monitors: Rc::clone(&monitors), id: last_id };
                let (handler, protocols) = (Rc::clone(&handler), Rc::clone(protocols));
                let (kind, acceptor) = (*kind, Rc::clone(acceptor));
                connections.spawn_local(async move {
                    let _registration = registration;
                    let QueuedConnection { socket, addr, count_guard: _counted, .. } = next;
                    let socket = match socket.into_client_stream() {
                        Ok(socket) => RawSocket::new(socket, Rc::clone(&monitor)),
                        Err(error) => return tracing::debug!(%error, "failed to register an accepted socket"),
                    };
                    match acceptor.accept(socket, addr).await {
                        Ok(mut connection) => {
                            connection.peer.listener_kind = kind;
                            serve_connection(connection, handler, protocols, monitor).await;
                        }
                        Err(failed) => {
                            if let Some(fault) = failed.fault {
                                handler.record_handshake_error(fault);
                            }
                            Box::pin(failed.close()).await;
                        }
                    }
                });
            }
            Some(ended) = connections.join_next() => record_connection_end(ended, load),
            _ = cut.wait_for(|cut| *cut) => return count_unfinished(connections),
        }
    }
    for monitor in monitors.borrow().values() {
        monitor.start_drain();
    }
    loop {
        tokio::select! {
            biased;
            ended = connections.join_next() => match ended {
                Some(ended) => record_connection_end(ended, load),
                None => return 0,
            },
            _ = cut.wait_for(|cut| *cut) => return count_unfinished(connections),
        }
    }
}

fn count_unfinished(mut connections: JoinSet<()>) -> usize {
    while connections.try_join_next().is_some() {}
    connections.len()
}

/// Counts and logs a panic, which ends only its own connection.
fn record_connection_end(ended: Result<(), JoinError>, load: &ServerLoad) {
    if let Err(error) = ended {
        load.record_panic();
        tracing::error!(%error, "connection task panicked");
    }
}

/// Removes the monitor of a connection from the drain list when the connection ends.
struct MonitorRegistration {
    monitors: Rc<RefCell<HashMap<u64, Rc<ConnectionMonitor>>>>,
    id: u64,
}

impl Drop for MonitorRegistration {
    fn drop(&mut self) {
        self.monitors.borrow_mut().remove(&self.id);
    }
}
