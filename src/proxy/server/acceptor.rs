//! Accepts the connections of one listener and dispatches them to the workers.

use rustix::io::Errno;
use socket2::Socket;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use std::{io, vec};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{sleep, timeout};

use super::worker::{QueuedConnection, WorkerThread, worker_died_error};
use crate::listen::SocketListener;
use crate::proxy::client_connection::open_connections::OpenConnection;
use crate::proxy::client_connection::open_connections::OpenConnections;
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
    connections: Arc<OpenConnections>,
    listener_index: usize,
    connection_slots: Arc<Semaphore>,
    worker_queues: Vec<mpsc::Sender<QueuedConnection>>,
    /// Idle connections of the last scan, with the start of their idle time; the longest idle one
    /// is next.
    idle_connections: vec::IntoIter<((u64, u64), Arc<OpenConnection>)>,
    limit_log: LogThrottle,
    is_failing: bool,
    /// Accepted connection that no worker has taken yet.
    pending: Option<(Socket, SocketAddr)>,
}

impl ListenerAcceptor {
    pub(super) fn new(
        connections: Arc<OpenConnections>,
        listener_index: usize,
        max_connections: usize,
        workers: &[WorkerThread],
    ) -> Self {
        let max_connections = max_connections.clamp(1, Semaphore::MAX_PERMITS);
        Self {
            connections,
            listener_index,
            connection_slots: Arc::new(Semaphore::new(max_connections)),
            worker_queues: workers.iter().map(|worker| worker.queue.clone()).collect(),
            idle_connections: Vec::new().into_iter(),
            limit_log: LogThrottle::new(LIMIT_LOG_INTERVAL),
            is_failing: false,
            pending: None,
        }
    }

    /// Accepts and dispatches connections. Returns only if a worker died.
    pub(super) async fn run(&mut self, listener: &SocketListener) -> io::Error {
        loop {
            // The connection is stored in `self`, so that it is dispatched during the drain even if
            // shutdown drops this future while it waits.
            self.pending = Some(self.accept(listener).await);
            let Some(permit) = self.acquire_connection_slot().await else {
                return worker_died_error();
            };
            if self.dispatch_pending(permit).await.is_none() {
                return worker_died_error();
            }
        }
    }

    /// Closes the listener, after it has accepted the connections in the kernel's backlog, up to
    /// the connection limit, and dispatches these. Clients in the backlog may have sent a request
    /// already. Closing the listener without accepting them would reset their connections. Stops
    /// if a worker has died.
    pub(super) async fn drain_backlog(mut self, listener: SocketListener) {
        let mut accepted = Vec::new();
        let mut add_connection = |socket, addr| {
            let permit = Arc::clone(&self.connection_slots).try_acquire_owned();
            permit.is_ok_and(|permit| {
                accepted.push(((socket, addr), permit));
                true
            })
        };
        let pending = self.pending.take();
        let has_slots = pending.is_none_or(|(socket, addr)| add_connection(socket, addr));
        listener.drain_backlog(|socket, addr| has_slots && add_connection(socket, addr));
        for (connection, permit) in accepted {
            self.pending = Some(connection);
            if self.dispatch_pending(permit).await.is_none() {
                return;
            }
        }
    }

    /// Sends the pending connection to the least loaded worker. Returns `None` if that worker has
    /// ended.
    async fn dispatch_pending(&mut self, permit: OwnedSemaphorePermit) -> Option<()> {
        let worker = self.connections.least_loaded_worker()?;
        let queue_slot = self.worker_queues.get(worker)?.reserve().await.ok()?;
        let (socket, addr) = self.pending.take()?;
        let connections = &self.connections;
        queue_slot.send(QueuedConnection {
            socket,
            addr,
            entry: connections.add_connection(worker, self.listener_index, permit),
        });
        Some(())
    }

    /// Returns a free connection slot. At the limit, closes the connection that is idle longest. If
    /// all connections have requests, waits; further connections stay in the kernel's backlog.
    async fn acquire_connection_slot(&mut self) -> Option<OwnedSemaphorePermit> {
        if let Ok(permit) = Arc::clone(&self.connection_slots).try_acquire_owned() {
            return Some(permit);
        }
        self.connections.record_connection_limit_hit();
        if let Some(new_connections) = self.limit_log.record_occurrence(std::time::Instant::now()) {
            tracing::warn!(
                new_connections,
                "max_connections reached; idle connections are closed for new ones"
            );
        }
        loop {
            self.close_longest_idle();
            // The connection may get a request before it is closed.
            let slot = Arc::clone(&self.connection_slots).acquire_owned();
            if let Ok(permit) = timeout(SLOT_RETRY_INTERVAL, slot).await {
                return permit.ok();
            }
        }
    }

    /// Closes the connection that is idle longest, if any. Those that stay idle after a scan of all
    /// connections remain the ones that are idle longest, so one scan serves many closes.
    fn close_longest_idle(&mut self) {
        for is_scanned in [false, true] {
            if is_scanned {
                let found = self.connections.find_connections(|open| {
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
    async fn accept(&mut self, listener: &SocketListener) -> (Socket, SocketAddr) {
        loop {
            match listener.accept().await {
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
                    // The process or the machine has no file descriptor left.
                    let errno = Errno::from_io_error(&error);
                    if matches!(errno, Some(Errno::MFILE | Errno::NFILE)) {
                        for _ in 0..CLOSES_PER_SHORTAGE {
                            self.close_longest_idle();
                        }
                    }
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }
}
