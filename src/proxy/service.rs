//! The proxy service: handles each request from its head to its response.

mod dispatch;
mod held_exchange;
mod proxy_request;
mod request_deadline;
pub(super) mod request_summary;
mod self_service;
pub(super) mod validation;

use super::http::access_log::AccessLog;
use super::server::shutdown::ShutdownSignal;
use super::settings::{ExtAuthzSettings, ListenSettings};
use super::upstream::UpstreamClient;
use crate::enforcer::Enforcer;
use crate::telemetry::LogSettings;
use crate::telemetry::metrics::WorkerMetrics;
use crate::telemetry::trace::Tracer;
use std::sync::Arc;
use tokio::sync::watch;

/// Handles the requests of one worker: asks the enforcer, then forwards or rejects.
#[derive(Debug)]
pub struct ProxyService {
    pub(super) enforcer: Enforcer,
    pub(super) upstream: UpstreamClient,
    max_headers: usize,
    max_body_bytes: Option<u64>,
    pub(super) access_log: AccessLog,
    pub(super) metrics: Arc<WorkerMetrics>,
    tracer: Option<Tracer>,
    pub(super) ext_authz: ExtAuthzSettings,
    /// State of the process shutdown.
    shutdown_signal: watch::Receiver<ShutdownSignal>,
}

impl ProxyService {
    /// `shutdown_signal` makes health checks report the coming shutdown. With a `tracer`, sampled
    /// requests are recorded.
    pub fn new(
        enforcer: Enforcer,
        upstream: UpstreamClient,
        (listen, ext_authz): (&ListenSettings, ExtAuthzSettings),
        log: &LogSettings,
        (metrics, tracer): (Arc<WorkerMetrics>, Option<Tracer>),
        shutdown_signal: watch::Receiver<ShutdownSignal>,
    ) -> Self {
        Self {
            enforcer,
            upstream,
            max_headers: listen.max_headers,
            max_body_bytes: listen.max_body_bytes,
            access_log: AccessLog(log.clone()),
            metrics,
            tracer,
            ext_authz,
            shutdown_signal,
        }
    }

    /// Whether the process was asked to shut down.
    pub(super) fn is_shutting_down(&self) -> bool {
        *self.shutdown_signal.borrow() > ShutdownSignal::Run
    }
}
