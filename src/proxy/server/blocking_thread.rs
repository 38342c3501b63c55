//! The thread of a runtime for blocking work: files and DNS lookups.

use std::time::Duration;
use std::{io, thread};
use tokio::task::spawn_blocking;

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

pub(super) fn describe_spawn_error(what: &str, error: &io::Error) -> io::Error {
    let text = format!(
        "cannot start {what}: {error}; lower listen.threads, or raise the limit on threads (ulimit -u, pids.max of the container)"
    );
    io::Error::new(error.kind(), text)
}
