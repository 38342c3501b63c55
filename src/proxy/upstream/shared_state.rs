//! State that the upstream clients of all workers share.

use arc_swap::ArcSwap;
use http::HeaderValue;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;
use tokio::sync::{Notify, Semaphore, watch};

use crate::proxy::UpstreamSettings;
use crate::proxy::client_counts::ClientCounts;
use crate::telemetry::LogThrottle;
use crate::tls::ClientTls;

/// Minimum interval between warnings about requests that are not forwarded.
const ERROR_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The upstream URL has a host that is not valid in a `Host` header.
#[derive(Debug, thiserror::Error)]
#[error("upstream.url: {0:?} is not valid in a Host header")]
pub struct UpstreamUrlError(String);

/// Settings, limits and counters of the upstream, shared by all workers.
#[derive(Debug)]
pub struct UpstreamSharedState {
    pub(super) settings: UpstreamSettings,
    /// The upstream's authority, as used in a `Host` header.
    pub(super) authority: HeaderValue,
    /// TLS settings of new connections; a reload replaces them. `None` for a cleartext upstream.
    pub(super) tls: Option<ArcSwap<ClientTls>>,
    pub(super) max_idle_per_worker: usize,
    /// One permit per open connection.
    pub(super) connection_permits: Arc<Semaphore>,
    /// Number of requests waiting for a connection.
    pub(super) queued_requests: AtomicUsize,
    /// Number of requests delayed by a `leaky_bucket` limit.
    pub(super) delayed_requests: AtomicUsize,
    /// Tunnels of each client.
    pub(super) client_tunnels: ClientCounts,
    /// Requests on the first half of the HTTP/1.1 connections, and those of each client on the
    /// second half.
    pub(super) first_half_in_use: AtomicUsize,
    pub(super) client_connections: ClientCounts,
    /// Notifies requests that wait for one of these when one ends.
    pub(super) share_freed: Notify,
    /// Notifies all workers when a request starts to wait for a connection.
    pub(super) queue_signal: watch::Sender<()>,
    /// Throttles the warnings about failed requests.
    pub(super) error_log_throttle: LogThrottle,
}

impl UpstreamSharedState {
    /// Creates the state for `workers` workers.
    ///
    /// # Errors
    /// Returns an error if the host of the upstream URL is not valid in a `Host` header.
    pub fn new(settings: UpstreamSettings, workers: usize) -> Result<Arc<Self>, UpstreamUrlError> {
        let authority = settings.url.authority();
        let authority =
            HeaderValue::try_from(&authority).map_err(|_invalid| UpstreamUrlError(authority))?;
        Ok(Arc::new(Self {
            tls: settings.tls.clone().map(ArcSwap::from_pointee),
            authority,
            max_idle_per_worker: settings.pool_max_idle.div_ceil(workers.max(1)),
            connection_permits: Arc::new(Semaphore::new(
                settings.max_connections.min(Semaphore::MAX_PERMITS),
            )),
            queued_requests: AtomicUsize::new(0),
            delayed_requests: AtomicUsize::new(0),
            client_tunnels: ClientCounts::default(),
            first_half_in_use: AtomicUsize::new(0),
            client_connections: ClientCounts::default(),
            share_freed: Notify::new(),
            queue_signal: watch::Sender::new(()),
            error_log_throttle: LogThrottle::new(ERROR_LOG_INTERVAL),
            settings,
        }))
    }
}
