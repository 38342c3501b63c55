//! Worker threads: each serves its connections on a runtime of its own.

use futures_util::FutureExt as _;
use socket2::Socket;
use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinSet, spawn_blocking};
use tokio_util::either::Either;

use super::accept::run_handshake;
use super::allocator_trim::AllocatorTrim;
use super::connection::serve_connection;
use super::handler::RequestHandler;
use super::listener::{ListenerConfig, WorkerListener};
use super::transport::{ClientSocket, SocketBelowTls};
use crate::listen::ListenAddress;
use crate::proxy::client_connection::ConnectionCloseReason;
use crate::proxy::client_connection::connection_monitor::{
    ConnectionDrain, ConnectionMonitor, ConnectionTimeouts,
};
use crate::proxy::client_connection::open_connections::{OpenConnectionGuard, OpenConnections};

/// Capacity of a worker's queue of accepted connections.
const WORKER_QUEUE_CAPACITY: usize = 256;

/// DNS lookup threads per worker. A lookup can block its thread long after its request timed out.
const DNS_LOOKUP_THREADS: usize = 16;

/// Accepted connection on its way to a worker.
pub(crate) struct QueuedConnection {
    /// Registered with no runtime yet.
    pub(crate) socket: Socket,
    pub(crate) addr: SocketAddr,
    pub(crate) entry: OpenConnectionGuard,
}

/// What the workers do with their connections. The phase only moves forward.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WorkerPhase {
    Serve,
    /// New connections are accepted, and each response is the last one of its connection.
    Drain(ConnectionDrain),
    /// End all connections.
    Cut,
}

/// Handle of a worker thread.
pub(crate) struct WorkerThread {
    /// Receives the number of connections that the worker cut, at its end.
    pub(crate) ended: oneshot::Receiver<usize>,
    pub(crate) queue: mpsc::Sender<QueuedConnection>,
    pub(crate) ready: oneshot::Receiver<io::Result<()>>,
}

impl WorkerThread {
    /// Starts a worker thread. The worker is ready once `make_handler` has run in the thread's
    /// runtime.
    pub(super) fn spawn<H, M, F>(
        index: usize,
        configs: Vec<Arc<ListenerConfig>>,
        connections: Arc<OpenConnections>,
        make_handler: M,
        phase: watch::Receiver<WorkerPhase>,
    ) -> io::Result<Self>
    where
        H: RequestHandler,
        M: Fn(usize) -> F + Send + 'static,
        F: Future<Output = Rc<H>> + 'static,
    {
        let (queue, queued) = mpsc::channel(WORKER_QUEUE_CAPACITY);
        let (ready_tx, ready) = oneshot::channel();
        let (ended_tx, ended) = oneshot::channel();
        thread::Builder::new()
            .name(format!("tidegate-worker-{index}"))
            .spawn(move || {
                let runtime = Builder::new_current_thread()
                    .enable_all()
                    .max_blocking_threads(DNS_LOOKUP_THREADS)
                    .thread_keep_alive(BLOCKING_THREAD_KEEP_ALIVE)
                    .build_local(LocalOptions::default());
                let runtime = match runtime {
                    Ok(runtime) => runtime,
                    Err(error) => return drop(ready_tx.send(Err(error))),
                };
                let cut = runtime.block_on(async {
                    if let Err(error) = start_blocking_thread() {
                        drop(ready_tx.send(Err(error)));
                        return 0;
                    }
                    let handler = make_handler(index).await;
                    drop(ready_tx.send(Ok(())));
                    let trim = Rc::<AllocatorTrim>::default();
                    let new_listener =
                        |config| Rc::new(WorkerListener::new(config, Rc::clone(&trim)));
                    let listeners = configs.into_iter().map(new_listener).collect();
                    let cut =
                        run_worker(Rc::clone(&handler), listeners, queued, phase, connections)
                            .await;
                    // Lets the runtime drop the aborted connection tasks, which releases their
                    // requests.
                    tokio::task::yield_now().await;
                    handler.finish_outstanding_work().await;
                    cut
                });
                // The runtime is not dropped here, because dropping it would wait for pending DNS
                // lookups.
                runtime.shutdown_background();
                _ = ended_tx.send(cut);
            })
            .map_err(|error| {
                describe_spawn_error(&format!("worker thread {}", index + 1), &error)
            })?;
        Ok(Self {
            ended,
            queue,
            ready,
        })
    }
}

pub(crate) fn worker_died_error() -> io::Error {
    io::Error::other("a worker thread ended unexpectedly")
}

/// Serves the worker's connections until its queue closes and they end. Returns the number of
/// connections that were cut.
async fn run_worker<H: RequestHandler>(
    handler: Rc<H>,
    listeners: Vec<Rc<WorkerListener>>,
    mut queued: mpsc::Receiver<QueuedConnection>,
    mut phase: watch::Receiver<WorkerPhase>,
    connections: Arc<OpenConnections>,
) -> usize {
    let mut tasks = JoinSet::new();
    let mut drain = None;
    let monitors = Rc::<RefCell<HashMap<u64, Weak<ConnectionMonitor>>>>::default();
    let mut is_queue_open = true;
    while is_queue_open || !tasks.is_empty() {
        tokio::select! {
            next = queued.recv(), if is_queue_open => {
                let Some(next) = next else {
                    is_queue_open = false;
                    continue;
                };
                let open = Arc::clone(&next.entry.connection);
                let Some(listener) = listeners.get(open.listener_index) else { continue };
                let id = open.id;
                let settings = &listener.config.settings;
                let timeouts = ConnectionTimeouts {
                    idle: settings.idle_timeout,
                    request_head: settings.header_timeout,
                    write_stall: settings.body_idle_timeout,
                };
                let metrics = handler.worker_metrics();
                let monitor = ConnectionMonitor::new(timeouts, metrics, open, Arc::clone(&connections));
                monitors.borrow_mut().insert(id, Rc::downgrade(&monitor));
                monitor.report_memory();
                monitor.set_age_limit(listener.connection_age_limit(id));
                if let Some(drain) = drain {
                    monitor.request_drain(drain);
                }
                if !listener.config.kind.is_public() {
                    monitor.connections.set_unclosable(&monitor.connection);
                }
                let serving =
                    serve_queued_connection(next, Rc::clone(listener), Rc::clone(&handler), monitor);
                let monitors = Rc::clone(&monitors);
                // Not an async block: it would reserve the space of this large future twice.
                tasks.spawn_local(serving.map(move |()| drop(monitors.borrow_mut().remove(&id))));
            }
            Some(ended) = tasks.join_next() => if let Err(error) = ended {
                // A panic ends only its own connection.
                connections.record_panic();
                tracing::error!(%error, "connection task panicked");
            },
            changed = phase.changed() => match *phase.borrow_and_update() {
                WorkerPhase::Serve if changed.is_ok() => {}
                WorkerPhase::Drain(begun) if changed.is_ok() => {
                    drain = Some(begun);
                    let monitors = monitors.borrow();
                    for monitor in monitors.values().filter_map(Weak::upgrade) {
                        monitor.request_drain(begun);
                    }
                }
                // Also if the server has ended.
                _ => {
                    while tasks.try_join_next().is_some() {}
                    return tasks.len();
                }
            },
        }
    }
    0
}

/// Runs the handshake of a connection and serves it until it ends.
async fn serve_queued_connection<H: RequestHandler>(
    queued: QueuedConnection,
    listener: Rc<WorkerListener>,
    handler: Rc<H>,
    monitor: Rc<ConnectionMonitor>,
) {
    let QueuedConnection {
        socket,
        addr,
        entry: _entry,
    } = queued;
    let is_unix = matches!(listener.config.settings.address, ListenAddress::Unix(_));
    let socket = match register_socket(socket, is_unix) {
        Ok(socket) => SocketBelowTls::new(socket, Rc::clone(&monitor)),
        Err(error) => return tracing::debug!(%error, "failed to register an accepted socket"),
    };
    let limit = listener.config.settings.max_connections_per_client;
    let mut client_count = None;
    let admit = |client: SocketAddr| {
        // Clients of a Unix socket have no address of their own.
        if is_unix && client == addr {
            return true;
        }
        let Some(client) = handler.counted_client(client.ip()) else {
            monitor.connection.set_from_trusted_proxy();
            return true;
        };
        if limit == 0 {
            return true;
        }
        client_count = monitor.connections.client_counts.try_acquire(client, limit);
        if client_count.is_none() {
            monitor.record_close(ConnectionCloseReason::ClientLimit);
        }
        client_count.is_some()
    };
    let handshake = tokio::select! {
        biased;
        done = run_handshake(&listener.config, socket, addr, admit) => done,
        reason = monitor.wait_for_close_request() => return monitor.record_close(reason),
    };
    match handshake {
        Ok(mut connection) => {
            connection.peer.listener_kind = listener.config.kind;
            serve_connection(connection, handler, listener, monitor).await;
        }
        Err(failed) => {
            drop(client_count);
            if let Some(error) = failed.error {
                handler.record_connection_setup_error(error);
            }
            Box::pin(failed.close()).await;
        }
    }
}

/// Registers an accepted socket with the current runtime.
fn register_socket(socket: Socket, is_unix: bool) -> io::Result<ClientSocket> {
    if is_unix {
        return UnixStream::from_std(socket.into()).map(Either::Right);
    }
    let socket = TcpStream::from_std(socket.into())?;
    socket.set_nodelay(true)?;
    Ok(Either::Left(socket))
}

/// Idle time after which a thread for blocking work ends. The first one has to stay: tokio panics
/// where it has none and cannot start one, for instance in a pod that is out of process ids.
pub const BLOCKING_THREAD_KEEP_ALIVE: Duration = Duration::from_secs(365 * 24 * 3600);

/// Starts the first thread for blocking work of the current runtime.
///
/// # Errors
/// Fails if the system has no more threads.
pub fn start_blocking_thread() -> io::Result<()> {
    // Unlike tokio, this returns an error.
    let probe = thread::Builder::new().spawn(|| ());
    let probe =
        probe.map_err(|error| describe_spawn_error("a thread for files and DNS", &error))?;
    drop(probe.join());
    drop(spawn_blocking(|| ()));
    Ok(())
}

pub(crate) fn describe_spawn_error(what: &str, error: &io::Error) -> io::Error {
    let text = format!(
        "cannot start {what}: {error}; lower listen.threads, or raise the limit on threads (ulimit -u, pids.max of the container)"
    );
    io::Error::new(error.kind(), text)
}
