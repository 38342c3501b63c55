//! What all workers' connections to the upstream have in common.

use http::HeaderValue;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{Semaphore, watch};

use super::UpstreamError;
use super::connect::{Connector, SetupError};
use crate::proxy::UpstreamSettings;
use crate::telemetry::Throttle;
use crate::tls::ClientTls;

/// While the upstream is away, the log says so this often.
const TROUBLE_PAUSE: Duration = Duration::from_secs(10);

/// What all workers may do together, and how to reach the upstream.
#[derive(Debug)]
pub struct Shared {
    pub(super) settings: UpstreamSettings,
    /// The upstream's name in a `Host` field.
    pub(super) authority: HeaderValue,
    pub(super) connector: Connector,
    pub(super) max_idle_per_worker: usize,
    /// A permit per open connection.
    pub(super) open: Arc<Semaphore>,
    /// Requests that wait for one.
    pub(super) waiting: AtomicUsize,
    /// Requests that wait for their turn first.
    pub(super) held: AtomicUsize,
    /// Changes whenever a request begins to wait.
    pub(super) wanted: watch::Sender<()>,
    /// For the log, when no request gets through.
    pub(super) trouble: Throttle,
}

impl Shared {
    /// `workers`: how many will share.
    ///
    /// # Errors
    /// When the URL names no valid host.
    pub fn new(settings: UpstreamSettings, workers: usize) -> Result<Arc<Self>, SetupError> {
        let connector = Connector::new(&settings);
        let authority = settings.url.authority();
        let authority =
            HeaderValue::try_from(&authority).map_err(|_invalid| SetupError(authority))?;
        Ok(Arc::new(Self {
            connector,
            authority,
            max_idle_per_worker: settings.pool_max_idle.div_ceil(workers.max(1)),
            open: Arc::new(Semaphore::new(
                settings.max_connections.min(Semaphore::MAX_PERMITS),
            )),
            waiting: AtomicUsize::new(0),
            held: AtomicUsize::new(0),
            wanted: watch::Sender::new(()),
            trouble: Throttle::new(TROUBLE_PAUSE),
            settings,
        }))
    }

    /// What a reload brings: new connections show and trust these certificates.
    pub fn renew(&self, tls: Option<&ClientTls>) {
        if let Some(tls) = tls {
            self.connector.renew(tls);
        }
    }
}

impl Shared {
    /// Counts one more in a queue, unless all queues together are full.
    pub(super) fn enter(&self, queue: &AtomicUsize) -> Result<(), UpstreamError> {
        let limit = self.settings.max_requests_waiting;
        queue.fetch_add(1, Ordering::SeqCst);
        let all = self.waiting.load(Ordering::SeqCst) + self.held.load(Ordering::SeqCst);
        if all > limit {
            queue.fetch_sub(1, Ordering::SeqCst);
            return Err(UpstreamError::queue_full(limit));
        }
        Ok(())
    }
}

/// A place among the held.
pub(super) struct Held<'s>(&'s Shared);

impl<'s> Held<'s> {
    pub(super) fn take(shared: &'s Shared) -> Result<Self, UpstreamError> {
        shared.enter(&shared.held)?;
        Ok(Self(shared))
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::SeqCst);
    }
}
