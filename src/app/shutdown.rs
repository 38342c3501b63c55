//! Shutdown by signal or by the admin endpoint.

use crate::proxy::ShutdownSignal;
use std::io;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Starts a drain. Does nothing if a shutdown has already begun.
pub(super) fn begin_drain(shutdown: &watch::Sender<ShutdownSignal>, asked_by: &str) {
    let is_first_request = shutdown.send_if_modified(|state| {
        let is_first_request = *state < ShutdownSignal::Drain;
        if is_first_request {
            *state = ShutdownSignal::Drain;
        }
        is_first_request
    });
    if is_first_request {
        tracing::info!(asked_by, "stopping; requests in flight may finish");
    }
}

/// Installs the handlers of SIGTERM and SIGINT: the first signal starts a drain, the second one an
/// immediate stop.
pub(super) fn install_signal_handlers() -> io::Result<(
    watch::Sender<ShutdownSignal>,
    watch::Receiver<ShutdownSignal>,
)> {
    let (sender, stop) = watch::channel(ShutdownSignal::Run);
    let shutdown = sender.clone();
    let (mut term, mut interrupt) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    tokio::task::spawn_local(async move {
        for stop_mode in [ShutdownSignal::Drain, ShutdownSignal::Immediate] {
            let name = tokio::select! {
                _ = term.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            match stop_mode {
                ShutdownSignal::Immediate => tracing::info!(signal = name, "stopping at once"),
                _ => tracing::info!(signal = name, "stopping; requests in flight may finish"),
            }
            sender.send_replace(stop_mode);
        }
        // This task keeps the sender alive, because dropping it would start a drain.
        std::future::pending::<()>().await;
    });
    Ok((shutdown, stop))
}
