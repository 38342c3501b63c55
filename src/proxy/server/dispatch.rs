//! Accepts the connections of one listener and dispatches them to the workers.

use rustix::io::Errno;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{sleep, timeout};

use super::connection_activity::{IdleConnections, OpenConnection};
use super::connection_load::{ConnectionCountGuard, ServerLoad};
use super::listener::{AcceptedSocket, ServerListener};
use super::worker::{QueuedConnection, WorkerMessage, WorkerThread, worker_died_error};
use crate::listen::SocketListener;
use crate::telemetry::LogThrottle;

/// Delay before accepting again after an error such as running out of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);
/// Idle connections closed for each failed accept when file descriptors are exhausted, so that the
/// admin endpoint and upstream connections get some too.
const CLOSES_PER_SHORTAGE: usize = 16;
/// Interval after which another connection is closed if the last one did not free its slot.
const SLOT_RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// Minimum interval between warnings about the connection limit.
const LIMIT_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Accepts the connections of one listener.
pub(super) struct ListenerAcceptor {
    listener_index: usize,
    listener: SocketListener,
    connection_slots: Arc<Semaphore>,
    worker_queues: Vec<mpsc::Sender<WorkerMessage>>,
    idle_connections: IdleConnections,
    limit_log: LogThrottle,
    is_failing: bool,
    /// Accepted connection that waits for a connection slot.
    without_slot: Option<(AcceptedSocket, SocketAddr)>,
    /// Accepted connection that no worker has taken yet.
    unassigned: Option<UnassignedConnection>,
}

type UnassignedConnection = (AcceptedSocket, SocketAddr, OwnedSemaphorePermit);

/// Connections accepted before the listener closed that no worker has taken yet.
pub(super) struct PendingConnections {
    listener_index: usize,
    connections: Vec<UnassignedConnection>,
    worker_queues: Vec<mpsc::Sender<WorkerMessage>>,
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
            idle_connections: IdleConnections::default(),
            limit_log: LogThrottle::new(LIMIT_LOG_INTERVAL),
            is_failing: false,
            without_slot: None,
            unassigned: None,
        })
    }

    /// Accepts and dispatches connections. Returns only if a worker died.
    pub(super) async fn run(&mut self, load: &ServerLoad) -> io::Error {
        loop {
            // The connection is stored in `self`, so that it is dispatched during the drain even if
            // shutdown drops this future while it waits.
            self.without_slot = Some(self.accept().await);
            let Some(permit) = self.acquire_connection_slot(load).await else {
                return worker_died_error();
            };
            self.unassigned = self
                .without_slot
                .take()
                .map(|(socket, addr)| (socket, addr, permit));
            let Some(open) = dispatch_connection(
                &self.worker_queues,
                load,
                self.listener_index,
                &mut self.unassigned,
            )
            .await
            else {
                return worker_died_error();
            };
            self.idle_connections.add(open);
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
            without_slot,
            unassigned,
            ..
        } = self;
        let mut connections = Vec::from_iter(unassigned);
        let mut add_connection = |socket, addr| {
            let Ok(permit) = Arc::clone(&connection_slots).try_acquire_owned() else {
                return false;
            };
            connections.push((socket, addr, permit));
            true
        };
        let has_slots = without_slot.is_none_or(|(socket, addr)| add_connection(socket, addr));
        listener.drain_backlog(|socket, addr| has_slots && add_connection(socket, addr));
        PendingConnections {
            listener_index,
            connections,
            worker_queues,
        }
    }

    /// Returns a free connection slot. At the limit, closes the connection that is idle longest. If
    /// all connections have requests, waits; further connections stay in the kernel's backlog.
    async fn acquire_connection_slot(&mut self, load: &ServerLoad) -> Option<OwnedSemaphorePermit> {
        if let Ok(permit) = Arc::clone(&self.connection_slots).try_acquire_owned() {
            return Some(permit);
        }
        load.record_connection_limit_hit();
        if let Some(new_connections) = self.limit_log.record_occurrence(std::time::Instant::now()) {
            tracing::warn!(
                new_connections,
                "max_connections reached; idle connections are closed for new ones"
            );
        }
        loop {
            self.close_longest_idle().await?;
            // The connection may get a request before it reads the message.
            let slot = Arc::clone(&self.connection_slots).acquire_owned();
            if let Ok(permit) = timeout(SLOT_RETRY_INTERVAL, slot).await {
                return permit.ok();
            }
        }
    }

    /// Closes the connection that is idle longest, if any. Returns `None` if its worker died.
    async fn close_longest_idle(&mut self) -> Option<()> {
        if let Some(idle) = self.idle_connections.take_longest_idle()
            && let Some(queue) = self.worker_queues.get(idle.worker)
        {
            queue.send(WorkerMessage::CloseIdle(idle.id)).await.ok()?;
        }
        Some(())
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
                    if is_descriptor_shortage(&error) {
                        for _ in 0..CLOSES_PER_SHORTAGE {
                            _ = self.close_longest_idle().await;
                        }
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
            let mut connection = Some(connection);
            let dispatched = dispatch_connection(
                &self.worker_queues,
                load,
                self.listener_index,
                &mut connection,
            );
            if dispatched.await.is_none() {
                return;
            }
        }
    }
}

/// Sends a connection to the least loaded worker and takes it out of `unassigned`. Returns `None`
/// if that worker has ended.
async fn dispatch_connection(
    worker_queues: &[mpsc::Sender<WorkerMessage>],
    load: &ServerLoad,
    listener_index: usize,
    unassigned: &mut Option<UnassignedConnection>,
) -> Option<OpenConnection> {
    let (worker, queue) = select_least_loaded_worker(worker_queues, load)?;
    let queue_slot = queue.reserve().await.ok()?;
    let (socket, addr, permit) = unassigned.take()?;
    let open = load.open_connection(worker);
    queue_slot.send(WorkerMessage::Connection(QueuedConnection {
        listener_index,
        socket,
        addr,
        open: open.clone(),
        count_guard: ConnectionCountGuard::new(load, worker, permit),
    }));
    Some(open)
}

/// Whether the process or the machine has no file descriptor left.
fn is_descriptor_shortage(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::MFILE | Errno::NFILE)
    )
}

/// Finds the worker with the fewest connections.
fn select_least_loaded_worker<'q>(
    worker_queues: &'q [mpsc::Sender<WorkerMessage>],
    load: &ServerLoad,
) -> Option<(usize, &'q mpsc::Sender<WorkerMessage>)> {
    worker_queues
        .iter()
        .enumerate()
        .min_by_key(|(worker, _)| load.worker_open_connections(*worker))
}
