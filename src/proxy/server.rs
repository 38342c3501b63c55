//! Accepts client connections and distributes them over the worker threads until shutdown.
//!
//! Each worker is a thread with its own runtime. A connection and all its requests stay on one
//! worker. One acceptor per listener assigns each connection to the worker with the fewest
//! connections. `SO_REUSEPORT` is not used: with it the kernel distributes connections by address
//! hash, which is uneven for the few long-lived connections of an ingress.

pub(crate) mod accept;
mod acceptor;
mod allocator_trim;
mod connection;
pub(crate) mod handler;
mod listener;
mod monitored_socket;
mod parse_error_reply;
mod transport;
pub(crate) mod worker;

use futures_util::future::{join_all, select_all};
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use super::client_connection::connection_monitor::ConnectionDrain;
use super::client_connection::open_connections::OpenConnections;
use super::server::acceptor::ListenerAcceptor;
use super::server::handler::RequestHandler;
use super::server::listener::ListenerConfig;
use super::server::worker::{WorkerPhase, WorkerThread, worker_died_error};
use super::settings::{ListenSettings, ListenerKind, ShutdownSettings};
use crate::listen::{BoundSocket, ListenAddress, SocketListener};
use crate::tls::ReloadableServerTls;

/// Time from which a draining connection without a request closes: the next request may be a round
/// trip and a pause of the client away. At most half of the grace period.
const DRAIN_REQUEST_DELAY: Duration = Duration::from_secs(1);

/// Time before the end of the grace period from which WebSockets are closed. At most half of the
/// grace period.
const WEBSOCKET_CLOSE_TIME: Duration = Duration::from_secs(1);

/// Bound listeners. Clients cannot connect before [`ProxyServer::run`].
#[derive(Debug)]
pub struct ProxyServer {
    /// Workers refer to a listener by its index here.
    listeners: Vec<(BoundSocket, Arc<ListenerConfig>)>,
    threads: usize,
    connections: Arc<OpenConnections>,
}

impl ProxyServer {
    /// Creates a server with `threads` workers, at least 1, and no listener.
    pub fn with_worker_threads(threads: usize) -> Self {
        let threads = threads.max(1);
        Self {
            listeners: Vec::new(),
            threads,
            connections: OpenConnections::new(threads),
        }
    }

    /// Binds one more listener for the same workers. Returns its address, with the port that the
    /// system chose for port 0.
    ///
    /// # Errors
    /// Fails if the address cannot be bound.
    pub fn add_listener(
        &mut self,
        kind: ListenerKind,
        settings: &ListenSettings,
        tls: ReloadableServerTls,
    ) -> io::Result<ListenAddress> {
        let socket = listener::bind_with_keepalive(&settings.address)?;
        let address = socket.address()?;
        let config = ListenerConfig {
            kind,
            settings: settings.clone(),
            tls,
        };
        self.listeners.push((socket, Arc::new(config)));
        Ok(address)
    }

    /// Address of the first listener, with the port that the system chose for port 0.
    ///
    /// # Errors
    /// Fails if the server has no listener, or if the system cannot report the socket's address.
    pub fn first_listener_address(&self) -> io::Result<ListenAddress> {
        let first = self.listeners.first();
        let first = first.ok_or_else(|| io::Error::other("the server has no listener"))?;
        first.0.address()
    }

    /// Starts listening. Connections wait in the kernel's backlog until they are accepted.
    pub(crate) fn listen(&self) -> io::Result<()> {
        for (bound, _) in &self.listeners {
            bound.socket.listen(listener::LISTEN_BACKLOG)?;
        }
        listener::warn_if_backlog_is_cut();
        Ok(())
    }

    /// Live counters of the server, for metrics.
    pub fn server_load(&self) -> Arc<OpenConnections> {
        Arc::clone(&self.connections)
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
        let configs = self.listeners.iter().map(|(_, config)| Arc::clone(config));
        let configs: Vec<_> = configs.collect();
        if let Some(limit) = configs.first().and_then(|first| first.settings.max_memory) {
            self.connections
                .memory_limit
                .store(limit, Ordering::Relaxed);
        }
        let (phase, worker_phase) = watch::channel(WorkerPhase::Serve);
        let mut workers = Vec::new();
        for index in 0..self.threads {
            workers.push(WorkerThread::spawn(
                index,
                configs.clone(),
                Arc::clone(&self.connections),
                make_handler.clone(),
                worker_phase.clone(),
            )?);
        }
        let mut drain_signal = shutdown_signal.clone();
        for worker in &mut workers {
            tokio::select! {
                biased;
                () = wait_for_signal(&mut drain_signal, ShutdownSignal::Drain) => return Ok(0),
                ready = &mut worker.ready => ready.map_err(|_dropped| worker_died_error())??,
            }
        }
        self.listen()?;
        on_listening();
        let mut acceptors = Vec::new();
        for (index, (socket, config)) in self.listeners.into_iter().enumerate() {
            let (limit, connections) = (config.settings.max_connections, &self.connections);
            let acceptor = ListenerAcceptor::new(Arc::clone(connections), index, limit, &workers);
            acceptors.push((acceptor, socket.into_listener()?));
        }
        let drain_delay_over = async {
            wait_for_signal(&mut drain_signal, ShutdownSignal::Drain).await;
            begin_drain(&phase, shutdown.delay, shutdown.grace);
            sleep(shutdown.delay).await;
        };
        let running = acceptors
            .iter_mut()
            .map(|(acceptor, listener)| Box::pin(acceptor.run(listener)));
        let first_failure = select_all(running);
        let accept_error = tokio::select! {
            biased;
            () = wait_for_signal(&mut shutdown_signal, ShutdownSignal::Immediate) => None,
            () = drain_delay_over => None,
            (error, ..) = first_failure => Some(error),
        };
        // A failed acceptor drains without a delay.
        begin_drain(&phase, Duration::ZERO, shutdown.grace);
        let grace = shutdown.grace;
        let drained = drain_workers(acceptors, workers, grace, shutdown_signal, &phase).await;
        accept_error.map_or(drained, Err)
    }
}

/// Lets the workers drain their connections, unless they do already. Connections without requests
/// stay open for `delay`.
fn begin_drain(phase: &watch::Sender<WorkerPhase>, delay: Duration, grace: Duration) {
    phase.send_if_modified(|phase| {
        let is_serving = matches!(phase, WorkerPhase::Serve);
        if is_serving {
            let closes_from = Instant::now() + delay;
            let close_time = WEBSOCKET_CLOSE_TIME.min(grace / 2);
            *phase = WorkerPhase::Drain(ConnectionDrain {
                closes_from,
                request_delay: DRAIN_REQUEST_DELAY.min(grace / 2),
                websockets_close_at: Some(closes_from + grace - close_time),
            });
        }
        is_serving
    });
}

/// Requested run state of the server. The state only moves forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ShutdownSignal {
    Run,
    /// Finish active requests within the limits of
    /// [`ShutdownSettings`](crate::proxy::ShutdownSettings).
    Drain,
    /// Stop immediately and cut all connections.
    Immediate,
}

/// Waits for the state `at_least` or a later one.
async fn wait_for_signal(signal: &mut watch::Receiver<ShutdownSignal>, at_least: ShutdownSignal) {
    // A dropped sender requests a drain, but never an immediate stop.
    let is_reached = |current: &ShutdownSignal| *current >= at_least;
    let is_dropped = signal.wait_for(is_reached).await.is_err();
    if is_dropped && at_least > ShutdownSignal::Drain {
        std::future::pending().await
    }
}

/// Closes the listeners, dispatches the last connections, and waits until all workers have ended.
/// After `grace`, or at [`ShutdownSignal::Immediate`], makes the workers cut their connections by
/// [`WorkerPhase::Cut`]. Returns the number of cut connections.
async fn drain_workers(
    acceptors: Vec<(ListenerAcceptor, SocketListener)>,
    workers: Vec<WorkerThread>,
    grace: Duration,
    mut shutdown_signal: watch::Receiver<ShutdownSignal>,
    phase: &watch::Sender<WorkerPhase>,
) -> io::Result<usize> {
    // Waiting for a busy worker counts against the grace period.
    let deadline = Instant::now() + grace;
    let acceptors = acceptors.into_iter();
    let draining = acceptors.map(|(acceptor, listener)| acceptor.drain_backlog(listener));
    let dispatch_pending = join_all(draining);
    let mut ended = join_all(workers.into_iter().map(|worker| worker.ended));
    let ended_in_time = async {
        if timeout_at(deadline, dispatch_pending).await.is_err() {
            tracing::warn!(
                "accepted connections dropped at shutdown; no worker took them within the grace period"
            );
        }
        // The queues are closed: each worker finishes its connections and ends.
        timeout_at(deadline, &mut ended).await.ok()
    };
    let ended_in_time = tokio::select! {
        biased;
        () = wait_for_signal(&mut shutdown_signal, ShutdownSignal::Immediate) => None,
        ended = ended_in_time => ended,
    };
    let counts = match ended_in_time {
        Some(counts) => counts,
        None => {
            phase.send_replace(WorkerPhase::Cut);
            ended.await
        }
    };
    let counts = counts.into_iter();
    counts
        .map(|count| count.map_err(|_dropped| worker_died_error()))
        .sum()
}
