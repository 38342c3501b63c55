//! Worker threads: each serves its connections on a runtime of its own.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinSet, spawn_blocking};

use super::accept::run_handshake;
use super::allocator_trim::AllocatorTrim;
use super::connection::protocols::WorkerListener;
use super::connection::serve_connection;
use super::handler::RequestHandler;
use super::listener::{AcceptedSocket, ServerListener};
use super::transport::SocketBelowTls;
use crate::proxy::client_connection::ConnectionCloseReason;
use crate::proxy::client_connection::connection_load::{ConnectionEntry, ServerLoad};
use crate::proxy::client_connection::connection_monitor::{ConnectionDrain, ConnectionMonitor};

/// Capacity of a worker's queue of accepted connections.
const WORKER_QUEUE_CAPACITY: usize = 256;

/// DNS lookup threads per worker. A lookup can block its thread long after its request timed out.
const DNS_LOOKUP_THREADS: usize = 16;

/// Accepted connection on its way to a worker.
pub(crate) struct QueuedConnection {
    pub(crate) socket: AcceptedSocket,
    pub(crate) addr: SocketAddr,
    pub(crate) entry: ConnectionEntry,
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
    /// Returns the number of connections that it cut.
    pub(crate) thread: JoinHandle<usize>,
    pub(crate) queue: mpsc::Sender<QueuedConnection>,
    ready: oneshot::Receiver<io::Result<()>>,
}

impl WorkerThread {
    /// Starts a worker thread. The worker is ready once `make_handler` has run in the thread's
    /// runtime.
    pub(super) fn spawn<H, M, F>(
        index: usize,
        listeners: &[ServerListener],
        load: &ServerLoad,
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
        let load = load.clone();
        let listeners = listeners.iter();
        let configs: Vec<_> = listeners
            .map(|listener| Arc::clone(&listener.config))
            .collect();
        let thread = std::thread::Builder::new()
            .name(format!("tidegate-worker-{index}"))
            .spawn(move || {
                let runtime = match Builder::new_current_thread()
                    .enable_all()
                    .max_blocking_threads(DNS_LOOKUP_THREADS)
                    .thread_keep_alive(BLOCKING_THREAD_KEEP_ALIVE)
                    .build_local(LocalOptions::default())
                {
                    Ok(runtime) => runtime,
                    Err(error) => {
                        drop(ready_tx.send(Err(error)));
                        return 0;
                    }
                };
                let cut = runtime.block_on(async {
                    if let Err(error) = start_blocking_thread() {
                        drop(ready_tx.send(Err(error)));
                        return 0;
                    }
                    let handler = make_handler(index).await;
                    drop(ready_tx.send(Ok(())));
                    let trim = Rc::<AllocatorTrim>::default();
                    let new_listener = |config| {
                        Rc::new(WorkerListener::new(config, load.clone(), Rc::clone(&trim)))
                    };
                    let listeners = configs.into_iter().map(new_listener).collect();
                    let cut =
                        run_worker(Rc::clone(&handler), listeners, queued, phase, &load).await;
                    // Lets the runtime drop the aborted connection tasks, which releases their
                    // requests.
                    tokio::task::yield_now().await;
                    handler.finish_outstanding_work().await;
                    cut
                });
                // The runtime is not dropped here, because dropping it would wait for pending DNS
                // lookups.
                runtime.shutdown_background();
                cut
            })
            .map_err(|error| {
                describe_spawn_error(&format!("worker thread {}", index + 1), &error)
            })?;
        Ok(Self {
            thread,
            queue,
            ready,
        })
    }
}

/// Waits until all workers have their handlers.
pub(crate) async fn wait_until_workers_ready(workers: &mut [WorkerThread]) -> io::Result<()> {
    for worker in workers {
        let ready = (&mut worker.ready).await;
        ready.unwrap_or_else(|_dropped| Err(worker_died_error()))?;
    }
    Ok(())
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
    load: &ServerLoad,
) -> usize {
    let mut connections = JoinSet::new();
    let mut drain = None;
    let monitors = ConnectionMonitors::default();
    let mut is_queue_open = true;
    while is_queue_open || !connections.is_empty() {
        tokio::select! {
            next = queued.recv(), if is_queue_open => {
                let Some(next) = next else {
                    is_queue_open = false;
                    continue;
                };
                let open = Arc::clone(&next.entry.connection);
                let Some(listener) = listeners.get(open.listener_index) else { continue };
                let id = open.id;
                let monitor = ConnectionMonitor::new(
                    listener.connection_timeouts(),
                    handler.worker_metrics(),
                    open,
                    load.clone(),
                );
                monitors.borrow_mut().insert(id, Rc::downgrade(&monitor));
                monitor.report_memory();
                monitor.set_age_limit(listener.connection_age_limit(id));
                if let Some(drain) = drain {
                    monitor.request_drain(drain);
                }
                if !listener.config.kind.is_public() {
                    monitor.set_unclosable();
                }
                let serving = serve_queued_connection(next, Rc::clone(listener), Rc::clone(&handler), monitor, load.clone());
                let monitors = Rc::clone(&monitors);
                connections.spawn_local(async move {
                    serving.await;
                    monitors.borrow_mut().remove(&id);
                });
            }
            Some(ended) = connections.join_next() => record_connection_panic(ended, load),
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
                _ => return cut_and_count_connections(connections),
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
    load: ServerLoad,
) {
    let QueuedConnection {
        socket,
        addr,
        entry: _entry,
    } = queued;
    let is_unix = matches!(socket, AcceptedSocket::Unix(_));
    let socket = match socket.into_client_socket() {
        Ok(socket) => SocketBelowTls::new(socket, Rc::clone(&monitor)),
        Err(error) => return tracing::debug!(%error, "failed to register an accepted socket"),
    };
    let limit = listener.config.settings.max_connections_per_client;
    let admit = |client: SocketAddr| {
        // Clients of a Unix socket have no address of their own.
        if is_unix && client == addr {
            return Ok(None);
        }
        let Some(client) = handler.counted_client(client.ip()) else {
            monitor.connection.set_from_trusted_proxy();
            return Ok(None);
        };
        if limit == 0 {
            return Ok(None);
        }
        let refuse = || monitor.record_close(ConnectionCloseReason::ClientLimit);
        let admitted = load.client_counts().try_acquire(client, limit);
        admitted.map(Some).ok_or_else(refuse)
    };
    let handshake = {
        let mut handshake = pin!(run_handshake(&listener.config, socket, addr, admit));
        let handshake = poll_fn(|cx| {
            let polled = handshake.as_mut().poll(cx);
            if polled.is_pending() {
                monitor.report_memory();
            }
            polled
        });
        tokio::select! {
            biased;
            done = handshake => done,
            reason = monitor.wait_for_close_request() => return monitor.record_close(reason),
        }
    };
    match handshake {
        Ok((mut connection, _client_count)) => {
            connection.peer.listener_kind = listener.config.kind;
            serve_connection(connection, handler, listener, monitor).await;
        }
        Err(failed) => {
            if let Some(error) = failed.error {
                handler.record_connection_setup_error(error);
            }
            Box::pin(failed.close()).await;
        }
    }
}

/// Cuts the unfinished connections and returns their number.
fn cut_and_count_connections(mut connections: JoinSet<()>) -> usize {
    while connections.try_join_next().is_some() {}
    connections.len()
}

/// Counts and logs the panic of a connection task. A panic ends only its own connection.
fn record_connection_panic(ended: Result<(), JoinError>, load: &ServerLoad) {
    if let Err(error) = ended {
        load.record_panic();
        tracing::error!(%error, "connection task panicked");
    }
}

/// Monitors of a worker's connections, by connection id.
type ConnectionMonitors = Rc<RefCell<HashMap<u64, Weak<ConnectionMonitor>>>>;

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
