//! Worker threads: each serves its connections on a runtime of its own.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::thread::JoinHandle;
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinSet};

use super::accept::HandshakeAcceptor;
use super::allocator_trim::AllocatorTrim;
use super::connection::protocols::HttpServerSettings;
use super::connection::serve_connection;
use super::connection_load::{ConnectionCountGuard, ServerLoad};
use super::connection_timeouts::ConnectionMonitor;
use super::handler::RequestHandler;
use super::listener::{AcceptedSocket, ServerListener};
use super::transport::SocketBelowTls;
use crate::proxy::settings::{ListenSettings, ListenerKind};

/// Capacity of a worker's queue of accepted connections.
const WORKER_QUEUE_CAPACITY: usize = 256;

/// DNS lookup threads per worker. A lookup can block its thread long after its request timed out.
const DNS_LOOKUP_THREADS: usize = 16;

/// Accepted connection on its way to a worker.
pub(super) struct QueuedConnection {
    /// Index of the listener in the server.
    pub(super) listener_index: usize,
    pub(super) socket: AcceptedSocket,
    pub(super) addr: SocketAddr,
    pub(super) count_guard: ConnectionCountGuard,
}

/// Handle of a worker thread.
pub(super) struct WorkerThread {
    thread: JoinHandle<usize>,
    queue: mpsc::Sender<QueuedConnection>,
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
                    let listeners = build_worker_listener_settings(listener_configs, &load);
                    let cut = run_worker(Rc::clone(&handler), listeners, queued, cut, &load).await;
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
            })?;
        Ok(Self {
            thread,
            queue,
            ready,
        })
    }

    pub(super) fn queue_sender(&self) -> mpsc::Sender<QueuedConnection> {
        self.queue.clone()
    }

    /// Closes this handle's end of the queue. The thread returns the number of connections that it
    /// cut.
    pub(super) fn into_join_handle(self) -> JoinHandle<usize> {
        self.thread
    }
}

/// Waits until all workers have their handlers.
pub(super) async fn wait_until_workers_ready(workers: &mut [WorkerThread]) -> io::Result<()> {
    for worker in workers {
        (&mut worker.ready)
            .await
            .unwrap_or_else(|_dropped| Err(worker_died_error()))?;
    }
    Ok(())
}

pub(super) fn worker_died_error() -> io::Error {
    io::Error::other("a worker thread ended unexpectedly")
}

/// Handshake and HTTP settings of one listener, on one worker.
struct WorkerListenerSettings {
    kind: ListenerKind,
    acceptor: Rc<HandshakeAcceptor>,
    protocols: Rc<HttpServerSettings>,
}

fn build_worker_listener_settings(
    configs: Vec<(ListenerKind, HandshakeAcceptor, ListenSettings)>,
    load: &ServerLoad,
) -> Vec<WorkerListenerSettings> {
    let allocator_trim = Rc::<AllocatorTrim>::default();
    let listeners = configs
        .into_iter()
        .map(|(kind, acceptor, settings)| WorkerListenerSettings {
            kind,
            acceptor: acceptor.into(),
            protocols: Rc::new(HttpServerSettings::new(
                &settings,
                kind,
                load.clone(),
                Rc::clone(&allocator_trim),
            )),
        });
    listeners.collect()
}

/// Serves the worker's connections until its queue closes and they end. Returns the number of
/// connections that were cut.
async fn run_worker<H: RequestHandler>(
    handler: Rc<H>,
    listeners: Vec<WorkerListenerSettings>,
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
                let Some(WorkerListenerSettings { kind, acceptor, protocols }) = listeners.get(next.listener_index) else { continue };
                let monitor = ConnectionMonitor::new(protocols.connection_timeouts(), handler.worker_metrics());
                last_id += 1;
                monitors.borrow_mut().insert(last_id, Rc::clone(&monitor));
                let registration = MonitorRegistration { monitors: Rc::clone(&monitors), id: last_id };
                let (handler, protocols) = (Rc::clone(&handler), Rc::clone(protocols));
                let (kind, acceptor) = (*kind, Rc::clone(acceptor));
                connections.spawn_local(async move {
                    let _registration = registration;
                    let QueuedConnection { socket, addr, count_guard: _counted, .. } = next;
                    let socket = match socket.into_client_socket() {
                        Ok(socket) => SocketBelowTls::new(socket, Rc::clone(&monitor)),
                        Err(error) => return tracing::debug!(%error, "failed to register an accepted socket"),
                    };
                    match acceptor.run_handshake(socket, addr).await {
                        Ok(mut connection) => {
                            connection.peer.listener_kind = kind;
                            serve_connection(connection, handler, protocols, monitor).await;
                        }
                        Err(failed) => {
                            if let Some(error) = failed.error {
                                handler.record_connection_setup_error(error);
                            }
                            Box::pin(failed.close()).await;
                        }
                    }
                });
            }
            Some(ended) = connections.join_next() => record_connection_panic(ended, load),
            _ = cut.wait_for(|cut| *cut) => return cut_and_count_connections(connections),
        }
    }
    for monitor in monitors.borrow().values() {
        monitor.request_drain();
    }
    loop {
        tokio::select! {
            biased;
            ended = connections.join_next() => match ended {
                Some(ended) => record_connection_panic(ended, load),
                None => return 0,
            },
            _ = cut.wait_for(|cut| *cut) => return cut_and_count_connections(connections),
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
