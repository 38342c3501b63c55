//! Accepts the connections of one listener and dispatches them to the workers.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::sleep;

use super::connection_load::{ConnectionCountGuard, ServerLoad};
use super::listener::{AcceptedSocket, ServerListener};
use super::worker::{QueuedConnection, WorkerThread, worker_died_error};
use crate::listen::SocketListener;

/// Delay before accepting again after an error such as running out of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Accepts the connections of one listener.
pub(super) struct ListenerAcceptor {
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
pub(super) struct PendingConnections {
    listener_index: usize,
    connections: Vec<UnassignedConnection>,
    worker_queues: Vec<mpsc::Sender<QueuedConnection>>,
}

impl ListenerAcceptor {
    pub(super) fn new(
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
            worker_queues: workers.iter().map(WorkerThread::queue_sender).collect(),
            is_failing: false,
            unassigned: None,
        })
    }

    /// Accepts and dispatches connections. Returns only if a worker died.
    pub(super) async fn run(&mut self, load: &ServerLoad) -> io::Error {
        loop {
            let Some(permit) = self.acquire_connection_slot(load).await else {
                return worker_died_error();
            };
            let (socket, addr) = self.accept().await;
            // The connection is stored in `self`, so that it is dispatched during the drain even if
            // shutdown drops this future while the worker's queue is full.
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
    /// listener. Clients in the backlog may have sent a request already. Closing the listener
    /// without accepting them would reset their connections.
    pub(super) fn drain_backlog_and_close(self) -> PendingConnections {
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
    async fn acquire_connection_slot(&self, load: &ServerLoad) -> Option<OwnedSemaphorePermit> {
        if let Ok(permit) = Arc::clone(&self.connection_slots).try_acquire_owned() {
            return Some(permit);
        }
        load.record_connection_limit_hit();
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
    /// Dispatches the connections. Stops if a worker has died.
    pub(super) async fn dispatch_all(self, load: &ServerLoad) {
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
/// if that worker has ended.
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
        .min_by_key(|(worker, _)| load.worker_open_connections(*worker))
}
