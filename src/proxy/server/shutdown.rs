//! Shutdown: dispatches the last connections, drains the workers, and cuts connections that exceed
//! the grace period.

use futures_util::future::join_all;
use std::io;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};

use super::acceptor::ListenerAcceptor;
use super::worker::{WorkerPhase, WorkerThread, worker_died_error};
use crate::proxy::client_connection::connection_load::ServerLoad;

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
pub(super) async fn wait_for_signal(
    signal: &mut watch::Receiver<ShutdownSignal>,
    at_least: ShutdownSignal,
) {
    // A dropped sender requests a drain, but never an immediate stop.
    if signal
        .wait_for(|current| *current >= at_least)
        .await
        .is_err()
        && at_least > ShutdownSignal::Drain
    {
        std::future::pending().await
    }
}

/// Closes the listeners, dispatches the last connections, and waits until all workers have ended.
/// After `grace`, or at [`ShutdownSignal::Immediate`], makes the workers cut their connections by
/// [`WorkerPhase::Cut`]. Returns the number of cut connections.
pub(super) async fn drain_workers(
    acceptors: Vec<ListenerAcceptor>,
    workers: Vec<WorkerThread>,
    load: &ServerLoad,
    grace: Duration,
    mut shutdown_signal: watch::Receiver<ShutdownSignal>,
    phase: &watch::Sender<WorkerPhase>,
) -> io::Result<usize> {
    // Waiting for a busy worker counts against the grace period.
    let drain_started = Instant::now();
    let acceptors = acceptors.into_iter();
    let dispatch_pending = join_all(acceptors.map(|acceptor| acceptor.drain_backlog(load)));
    tokio::select! {
        biased;
        () = wait_for_signal(&mut shutdown_signal, ShutdownSignal::Immediate) => {}
        dispatched = timeout(grace, dispatch_pending) => {
            if dispatched.is_err() {
                tracing::warn!(
                    "accepted connections dropped at shutdown; no worker took them within the grace period"
                );
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
        ended = timeout_at(drain_started + grace, &mut joined_workers) => ended.ok(),
    };
    let counts = match joined_in_time {
        Some(counts) => counts,
        None => {
            phase.send_replace(WorkerPhase::Cut);
            joined_workers.await
        }
    };
    counts?
        .into_iter()
        .map(|count| count.map_err(|_panic| worker_died_error()))
        .sum()
}
