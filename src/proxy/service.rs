//! The proxy service: handles each request from its head to its response.

mod body_reading;
mod held_exchange;
mod proxy_request;
pub(crate) mod request_summary;
pub(crate) mod validation;

use http::{Response, StatusCode, request};
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use tokio::sync::watch;

use super::body::informational_responses::InformationalForwarder;
use super::http::access_log::{AccessLog, AccessLogEntry};
use super::http::request_validation::RequestValidationError;
use super::server::ShutdownSignal;
use super::server::handler::HandshakeError;
use super::server::handler::{ConnectionPeer, RequestHandler};
use super::settings::{ExtAuthzSettings, ListenSettings, ListenerKind};
use super::upstream::UpstreamClient;
use super::{RequestBody, ResponseBody};
use crate::enforcer::{Enforcer, RequestDecision};
use crate::telemetry::LogSettings;
use crate::telemetry::metrics::WorkerMetrics;
use crate::telemetry::trace::Tracer;

/// Handles the requests of one worker: asks the enforcer, then forwards or rejects.
#[derive(Debug)]
pub struct ProxyService {
    pub(crate) enforcer: Enforcer,
    pub(crate) upstream: Rc<UpstreamClient>,
    max_headers: usize,
    max_body_bytes: Option<u64>,
    pub(crate) access_log: AccessLog,
    pub(crate) metrics: Arc<WorkerMetrics>,
    tracer: Option<Tracer>,
    pub(crate) ext_authz: ExtAuthzSettings,
    /// State of the process shutdown.
    shutdown_signal: watch::Receiver<ShutdownSignal>,
}

impl ProxyService {
    /// `shutdown_signal` makes health checks report the coming shutdown. With a `tracer`, sampled
    /// requests are recorded.
    pub fn new(
        enforcer: Enforcer,
        upstream: Rc<UpstreamClient>,
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
    pub(crate) fn is_shutting_down(&self) -> bool {
        *self.shutdown_signal.borrow() > ShutdownSignal::Run
    }
}

impl RequestHandler for ProxyService {
    async fn handle(
        &self,
        head: &mut request::Parts,
        body: RequestBody,
        peer: &ConnectionPeer,
        interim: &mut InformationalForwarder,
    ) -> Response<ResponseBody> {
        let active = self.metrics.begin_http_request(&head.method, peer.is_https);
        let malformed = head.extensions.remove::<RequestValidationError>();
        let mut response = match (malformed, peer.listener_kind) {
            (Some(error), _) => self.reject_malformed_head(head, body, peer, error),
            (None, ListenerKind::Proxy) => {
                self.handle_proxy_request(head, body, peer, interim).await
            }
            // The futures of the other listeners are boxed: unboxed they would enlarge the future
            // of every request.
            (None, ListenerKind::RateLimitService) => {
                Box::pin(self.answer_grpc_call(head, body, peer)).await
            }
            (None, ListenerKind::ExtAuthz) => {
                Box::pin(self.answer_auth_request(head, body, peer)).await
            }
        };
        if let Some(mut active) = active {
            active.set_status(response.status().as_u16());
            response.body_mut().attach_active_request(active);
        }
        response
    }

    fn record_connection_setup_error(&self, error: HandshakeError) {
        match error {
            HandshakeError::ProxyHeader(error) => {
                self.metrics.proxy_header_errors.increment(error as usize)
            }
            HandshakeError::Tls(error) => self.metrics.tls_errors.increment(error as usize),
        }
    }

    fn record_unreadable_request(&self, status: StatusCode, peer: &ConnectionPeer) {
        self.metrics.record_status(status.as_u16());
        let decision = RequestDecision::Malformed;
        self.metrics.record_request_decision(decision as usize);
        let entry = AccessLogEntry::for_unreadable_request(peer.addr.ip(), status);
        self.access_log.write(&entry);
    }

    fn unreadable_request_status(&self, peer: &ConnectionPeer) -> Option<StatusCode> {
        let status = self.ext_authz.denied_status;
        status.filter(|_| peer.listener_kind == ListenerKind::ExtAuthz)
    }

    fn counted_client(&self, peer: IpAddr) -> Option<IpAddr> {
        let policies = self.enforcer.policy_snapshot();
        let clients = &policies.table.client;
        let peer = peer.to_canonical();
        (!clients.trusts_proxy(peer)).then(|| clients.client_prefix(peer))
    }

    fn worker_metrics(&self) -> Option<Arc<WorkerMetrics>> {
        Some(Arc::clone(&self.metrics))
    }

    async fn finish_outstanding_work(&self) {
        self.enforcer.shut_down().await;
    }
}

#[cfg(test)]
mod tests {
    use super::{ProxyService, RequestBody, RequestHandler};

    /// A large request future costs memory in every connection and a copy for every request.
    #[test]
    fn request_future_stays_below_its_size_limit() {
        fn future_size<S, H, P, I, F>(_handle: fn(S, H, RequestBody, P, I) -> F) -> usize {
            size_of::<F>()
        }
        let bytes = future_size(<ProxyService as RequestHandler>::handle);
        assert!(
            bytes <= 3_328,
            "{bytes} bytes: is a rare future awaited without a box?"
        );
    }
}
