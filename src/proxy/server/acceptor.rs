//! Accepts the connections of one listener and dispatches them to the workers.

use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use std::{io, vec};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{sleep, timeout};

use super::listener::{AcceptedSocket, ServerListener};
use super::worker::{QueuedConnection, WorkerThread, worker_died_error};
use crate::listen::SocketListener;
use crate::proxy::client_connection::connection_load::ServerLoad;
use crate::proxy::client_connection::open_connection::OpenConnection;
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
    worker_queues: Vec<mpsc::Sender<QueuedConnection>>,
    /// Idle connections of the last scan, with the start of their idle time; the longest idle one is
    /// next.
    idle_connections: vec::IntoIter<((u64, u64), Arc<OpenConnection>)>,
    limit_log: LogThrottle,
    is_failing: bool,
    /// Accepted connection that waits for a connection slot.
    without_slot: Option<(AcceptedSocket, SocketAddr)>,
    /// Accepted connection that no worker has taken yet.
    unassigned: Option<UnassignedConnection>,
}

type UnassignedConnection = (AcceptedSocket, SocketAddr, OwnedSemaphorePermit);

impl ListenerAcceptor {
    pub(super) fn new(
        listener_index: usize,
        listener: ServerListener,
        workers: &[WorkerThread],
    ) -> io::Result<Self> {
        let max_connections = listener.config.settings.max_connections;
        let max_connections = max_connections.clamp(1, Semaphore::MAX_PERMITS);
        Ok(Self {
            listener_index,
            listener: listener.socket.into_listener()?,
            connection_slots: Arc::new(Semaphore::new(max_connections)),
            worker_queues: workers.iter().map(|worker| worker.queue.clone()).collect(),
            idle_connections: Vec::new().into_iter(),
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
            self.without_slot = Some(self.accept(load).await);
            let Some(permit) = self.acquire_connection_slot(load).await else {
                return worker_died_error();
            };
            let accepted = self.without_slot.take();
            self.unassigned = accepted.map(|(socket, addr)| (socket, addr, permit));
            let Self {
                worker_queues,
                unassigned,
                ..
            } = self;
            let dispatched =
                dispatch_connection(worker_queues, load, self.listener_index, unassigned);
            if dispatched.await.is_none() {
                return worker_died_error();
            }
        }
    }

    /// Closes the listener, after it has accepted the connections in the kernel's backlog, up to
    /// the connection limit, and dispatches these. Clients in the backlog may have sent a request
    /// already. Closing the listener without accepting them would reset their connections. Stops
    /// if a worker has died.
    pub(super) async fn drain_backlog(self, load: &ServerLoad) {
        let mut connections = Vec::from_iter(self.unassigned);
        let mut add_connection = |socket, addr| {
            let Ok(permit) = Arc::clone(&self.connection_slots).try_acquire_owned() else {
                return false;
            };
            connections.push((socket, addr, permit));
            true
        };
        let without_slot = self.without_slot;
        let has_slots = without_slot.is_none_or(|(socket, addr)| add_connection(socket, addr));
        let listener = self.listener;
        listener.drain_backlog(|socket, addr| has_slots && add_connection(socket, addr));
        for connection in connections {
            let (queues, index) = (&self.worker_queues, self.listener_index);
            let mut connection = Some(connection);
            if dispatch_connection(queues, load, index, &mut connection)
                .await
                .is_none()
            {
                return;
            }
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
            self.close_longest_idle(load);
            // The connection may get a request before it is closed.
            let slot = Arc::clone(&self.connection_slots).acquire_owned();
            if let Ok(permit) = timeout(SLOT_RETRY_INTERVAL, slot).await {
                return permit.ok();
            }
        }
    }

    /// Closes the connection that is idle longest, if any. Those that stay idle after a scan of all
    /// connections remain the ones that are idle longest, so one scan serves many closes.
    fn close_longest_idle(&mut self, load: &ServerLoad) {
        for is_scanned in [false, true] {
            if is_scanned {
                let found = load.find_connections(|open| {
                    let since = open.idle_since_ms()?;
                    (open.listener_index == self.listener_index).then_some((since, open.id))
                });
                self.idle_connections = found.into_iter();
            }
            // A connection that has ended is in no table.
            let found = self.idle_connections.find(|((since, _), open)| {
                open.idle_since_ms() == Some(*since) && Arc::strong_count(open) > 1
            });
            if let Some((_, open)) = found {
                return open.close_if_idle();
            }
        }
    }

    /// Accepts the next connection. Errors are never fatal: either resources are exhausted or the
    /// client disconnected early.
    async fn accept(&mut self, load: &ServerLoad) -> (AcceptedSocket, SocketAddr) {
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
                            self.close_longest_idle(load);
                        }
                    }
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }
}

/// Sends a connection to the least loaded worker and takes it out of `unassigned`. Returns `None`
/// if that worker has ended.
async fn dispatch_connection(
    worker_queues: &[mpsc::Sender<QueuedConnection>],
    load: &ServerLoad,
    listener_index: usize,
    unassigned: &mut Option<UnassignedConnection>,
) -> Option<()> {
    let worker = load.least_loaded_worker()?;
    let queue_slot = worker_queues.get(worker)?.reserve().await.ok()?;
    let (socket, addr, permit) = unassigned.take()?;
    queue_slot.send(QueuedConnection {
        socket,
        addr,
        entry: load.add_connection(worker, listener_index, permit),
    });
    Some(())
}

/// Whether the process or the machine has no file descriptor left.
fn is_descriptor_shortage(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE))
}
