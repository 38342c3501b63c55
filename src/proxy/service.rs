//! One request, top to bottom. The order is the documentation.

use super::server::handler::RequestHandler;
use super::server::peer::ConnectionPeer;
use super::server::shutdown::ShutdownSignal;
use super::settings::{ListenSettings, ListenerKind};
use super::upstream::{UpstreamClient, UpstreamError, UpstreamErrorKind};
use super::{RequestBody, ResponseBody};
use crate::enforcer::{
    ConcurrencySlotGuard, Enforcer, EstimatedCharge, ReportedLimit, RequestOutcome, Verdict,
};
use crate::policy::PolicyTable;
use crate::policy::client::ClientIdentity;
use crate::proxy::http::access_log::{AccessLog, AccessLogEntry};
use crate::proxy::http::headers::{self, ForwardingContext};
use crate::proxy::http::inbound_request::InboundRequest;
use crate::proxy::http::informational_responses::InformationalForwarder;
use crate::proxy::http::local_replies::{self, ProxyErrorType, ReplyStyle};
use crate::proxy::http::rate_limit_headers;
use crate::proxy::http::request_validation::RequestTarget;
use crate::proxy::http::response_cost::CostMeter;
use crate::proxy::http::upgrade::UpgradeRequest;
use crate::proxy::server::handshake_error::HandshakeError;
use crate::telemetry::LogSettings;
use crate::telemetry::metrics::{DecisionSource, RequestDecision, WorkerMetrics};
use crate::telemetry::trace::{self, RequestRecording, TraceContext, TraceId, Tracer};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, header, request};
use ipnet::IpNet;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

/// Answers requests: asks the enforcer, then forwards or refuses. One per worker, with its counts.
#[derive(Debug)]
pub struct ProxyService {
    pub(super) enforcer: Enforcer,
    pub(super) upstream: UpstreamClient,
    max_headers: usize,
    max_body_bytes: Option<u64>,
    pub(super) access_log: AccessLog,
    pub(super) metrics: Arc<WorkerMetrics>,
    tracer: Option<Tracer>,
    /// Of all refusals by [`Service::check`]; `None`: their own.
    pub(super) denied_status: Option<StatusCode>,
    /// `None`: it runs for ever.
    shutdown_signal: Option<watch::Receiver<ShutdownSignal>>,
}

impl ProxyService {
    pub fn new(
        enforcer: Enforcer,
        upstream: UpstreamClient,
        listen: &ListenSettings,
        log: &LogSettings,
        shard: Arc<WorkerMetrics>,
    ) -> Self {
        Self {
            enforcer,
            upstream,
            max_headers: listen.max_headers,
            max_body_bytes: listen.max_body_bytes,
            access_log: AccessLog::new(log),
            metrics: shard,
            tracer: None,
            denied_status: None,
            shutdown_signal: None,
        }
    }

    /// The same, and who only asks whether a request may pass is told so by this status if not.
    pub fn with_denied_status(self, status: Option<StatusCode>) -> Self {
        Self {
            denied_status: status,
            ..self
        }
    }

    /// The same, and who asks for its health is told that it is about to end.
    pub fn with_shutdown_signal(self, shutdown_signal: watch::Receiver<ShutdownSignal>) -> Self {
        Self {
            shutdown_signal: Some(shutdown_signal),
            ..self
        }
    }

    /// Whether it was asked to end, and so serves for a little while only.
    pub(super) fn is_shutting_down(&self) -> bool {
        self.shutdown_signal
            .as_ref()
            .is_some_and(|stop| *stop.borrow() > ShutdownSignal::Run)
    }

    /// The same, and some requests are recorded.
    pub fn with_tracer(self, tracer: Option<Tracer>) -> Self {
        Self { tracer, ..self }
    }

    async fn handle_proxy_request(
        &self,
        request: Request<RequestBody>,
        peer: &ConnectionPeer,
        interim: &mut InformationalForwarder,
    ) -> Response<ResponseBody> {
        let arrived_at = Instant::now();
        let (mut parts, body) = request.into_parts();
        let version_in = parts.version;
        let rules = self.enforcer.policy_snapshot();
        let table = &*rules.table;
        let style = ReplyStyle::from_request(&parts, &table.cors);

        // 1. Only what front and back read alike gets further.
        let inbound = match self.read_request(&mut parts, peer, table, style) {
            Ok(inbound) => inbound,
            Err(reply) => return self.reject_unreadable(&parts, body, peer, *reply, arrived_at),
        };

        let incoming_trace = TraceContext::from_headers(&parts.headers);
        let recording = self.start_recording(incoming_trace, &parts, &inbound, peer, arrived_at);

        // 2. One question, one verdict.
        let mut verdict = self
            .enforcer
            .decide(
                &rules,
                &inbound.facts(&parts, peer.certificate_subject.as_ref()),
                arrived_at,
            )
            .await;
        let decided_at = verdict.decided_at.unwrap_or(arrived_at);
        self.metrics
            .record_request_decision(classify_verdict(&verdict));
        if let Some(fault) = inbound.token_error() {
            self.metrics.record_rejected_token();
            tracing::debug!(%fault, peer = %peer.addr, "a request's token is not believed");
        }
        let trace_id = recording
            .as_ref()
            .and_then(|recording| recording.context())
            .or(incoming_trace)
            .map(|context| context.trace);
        let (target, client) = inbound.into_target_and_client();
        let mut summary = RequestSummary {
            method: parts.method.clone(),
            target,
            client,
            arrived_at,
            trace_id,
            recording,
        };
        if let Some(reply) =
            local_replies::build_rejection(&verdict, table.rate_limit_headers, style)
        {
            self.log_request(&mut summary, &verdict, reply.status(), decided_at);
            return self.respond_without_upstream(body, reply, decided_at - arrived_at);
        }

        // What it holds is given back when its response has ended, or this future is dropped.
        let hold = verdict.slot_guard.take();
        let estimates = std::mem::take(&mut verdict.estimated_charges);
        let ends_at = hold.as_ref().and_then(ConcurrencySlotGuard::ends_at);

        // 3. Its turn comes; a client that leaves before ends this future, and his place in the line stays taken.
        let queue_turn = pin!(self.upstream.delay_request(verdict.delay, decided_at));
        let ready = match complete_before(ends_at, queue_turn).await {
            Some(Ok(ready)) => ready,
            not_ready => {
                body.discard();
                let response = match not_ready {
                    Some(Err(error)) => self.respond_to_upstream_error(&error, estimates, style),
                    _ => {
                        local_replies::build_proxy_error(ProxyErrorType::MaxDurationExceeded, style)
                            .map(ResponseBody::Full)
                    }
                };
                return self.complete_response(response, &mut summary, &verdict, table);
            }
        };

        // 4. Forward, and say how much is left.
        let hop = ForwardingContext {
            peer: &peer.address_text,
            client: summary.client,
            is_https: peer.is_tls,
            version_in,
            ip_header: &table.client.ip_header,
            has_body: !body.is_empty(),
            preserve_host: self.upstream.settings().preserve_host,
            upstream_authority: self.upstream.authority(),
        };
        headers::forward_request(&mut parts, &summary.target, &hop);
        if estimates.iter().any(EstimatedCharge::reads_body) {
            headers::request_full_identity_body(&mut parts.headers);
        }
        if let Some(recording) = &mut summary.recording {
            recording.start_upstream_span(
                &mut parts.headers,
                self.upstream.authority().to_str().unwrap_or_default(),
            );
        }
        let request_body = body.clone_handle();
        let send = pin!(
            self.upstream
                .send(Request::from_parts(parts, body), ready, interim)
        );
        let upgrade = summary.target.upgrade_request.as_ref();
        let upstream_result = complete_before(ends_at, send).await;
        if let Some(recording) = &mut summary.recording {
            recording.finish_upstream_span(match &upstream_result {
                Some(Ok(response)) => Ok(response.status().as_u16()),
                Some(Err(error)) => Err(error.kind.name()),
                None => Err("overlong"),
            });
        }
        let mut response = match upstream_result {
            Some(Ok(response)) => {
                request_body.mark_rest_unread();
                self.forward_response(response, estimates, version_in, upgrade, style)
            }
            Some(Err(error)) => {
                if error.kind.is_unsent() {
                    request_body.discard();
                } else {
                    request_body.mark_rest_unread();
                }
                self.respond_to_upstream_error(&error, estimates, style)
            }
            None => {
                request_body.mark_rest_unread();
                local_replies::build_proxy_error(ProxyErrorType::MaxDurationExceeded, style)
                    .map(ResponseBody::Full)
            }
        };
        match response.body_mut() {
            ResponseBody::Upstream(body) => body.attach_slot_guard(hold),
            ResponseBody::Tunnel(tunnel) => tunnel.attach_slot_guard(hold),
            ResponseBody::Empty | ResponseBody::Full(_) | ResponseBody::FullWithTrailers(..) => {}
        }
        let mut response = self.complete_response(response, &mut summary, &verdict, table);
        match response.body_mut() {
            ResponseBody::Upstream(body) => body.attach_recording(summary.recording.take()),
            ResponseBody::Tunnel(tunnel) => tunnel.attach_recording(summary.recording.take()),
            ResponseBody::Empty | ResponseBody::Full(_) | ResponseBody::FullWithTrailers(..) => {}
        }
        response
    }

    /// Lets a request through the gate, or says what to answer.
    pub(super) fn read_request(
        &self,
        parts: &mut request::Parts,
        peer: &ConnectionPeer,
        table: &PolicyTable,
        style: ReplyStyle<'_>,
    ) -> Result<InboundRequest, Box<Response<Bytes>>> {
        if exceeds_header_count(&parts.headers, self.max_headers) {
            return Err(
                local_replies::build_proxy_error(ProxyErrorType::TooManyHeaders, style).into(),
            );
        }
        let inbound =
            InboundRequest::from_parts(parts, peer.addr.ip(), table).map_err(|fault| {
                tracing::debug!(%fault, peer = %peer.addr, "request refused at the gate");
                local_replies::build_inbound_error(fault, style)
            })?;
        if self
            .max_body_bytes
            .is_some_and(|most| inbound.target.content_length > Some(most))
        {
            return Err(
                local_replies::build_proxy_error(ProxyErrorType::BodyTooLarge, style).into(),
            );
        }
        if table.ignores_forwarding_headers(&inbound.client, &parts.headers) {
            self.metrics
                .record_untrusted_forwarding(peer.addr.ip().to_canonical());
            warn_about_untrusted_proxy(peer, table);
        }
        Ok(inbound)
    }

    fn respond_to_upstream_error(
        &self,
        error: &UpstreamError,
        estimates: Vec<EstimatedCharge>,
        style: ReplyStyle<'_>,
    ) -> Response<ResponseBody> {
        if error.kind.is_unsent() {
            estimates
                .into_iter()
                .for_each(|estimate| estimate.settle(0));
        }
        self.metrics.record_upstream_error(error.kind as usize);
        self.upstream.log_error(error);
        build_upstream_error_response(error, style)
    }

    /// Says how much is left, and writes down what became of an admitted request.
    fn complete_response(
        &self,
        mut response: Response<ResponseBody>,
        summary: &mut RequestSummary,
        verdict: &Verdict<'_>,
        table: &PolicyTable,
    ) -> Response<ResponseBody> {
        rate_limit_headers::write_headers(
            verdict,
            table.rate_limit_headers,
            response.headers_mut(),
        );
        let responded_at = Instant::now();
        self.log_request(summary, verdict, response.status(), responded_at);
        self.metrics.record_response(
            response.status().as_u16(),
            responded_at - summary.arrived_at,
        );
        response
    }

    fn forward_response(
        &self,
        response: Response<ResponseBody>,
        estimates: Vec<EstimatedCharge>,
        version_in: http::Version,
        upgrade: Option<&UpgradeRequest>,
        style: ReplyStyle<'_>,
    ) -> Response<ResponseBody> {
        let (mut parts, mut body) = response.into_parts();
        match headers::forward_response(&mut parts, version_in, upgrade) {
            Ok(()) => {
                let cost_meter = CostMeter::from_response_head(estimates, &parts);
                if let ResponseBody::Upstream(body) = &mut body {
                    body.attach_cost_meter(cost_meter);
                }
                Response::from_parts(parts, body)
            }
            Err(fault) => {
                self.metrics
                    .record_upstream_error(UpstreamErrorKind::Protocol as usize);
                tracing::warn!(%fault, "upstream response refused");
                local_replies::build_proxy_error(ProxyErrorType::ProtocolError, style)
                    .map(ResponseBody::Full)
            }
        }
    }

    /// Answers a request that no policy gets to see.
    pub(super) fn reject_unreadable(
        &self,
        parts: &request::Parts,
        body: RequestBody,
        peer: &ConnectionPeer,
        reply: Response<Bytes>,
        arrived_at: Instant,
    ) -> Response<ResponseBody> {
        let elapsed = arrived_at.elapsed();
        self.metrics
            .record_request_decision(RequestDecision::Malformed);
        self.access_log.write(&AccessLogEntry {
            method: parts.method.as_str(),
            host: parts
                .headers
                .get(header::HOST)
                .and_then(|host| host.to_str().ok())
                .unwrap_or_default(),
            path: parts.uri.path(),
            time_to_head: elapsed,
            trace_id: TraceContext::from_headers(&parts.headers).map(|context| context.trace),
            ..AccessLogEntry::for_unreadable_request(peer.addr.ip(), reply.status())
        });
        self.respond_without_upstream(body, reply, elapsed)
    }

    /// Answers without the upstream; what the client still sends of its body is nobody's business.
    fn respond_without_upstream(
        &self,
        body: RequestBody,
        reply: Response<Bytes>,
        elapsed: Duration,
    ) -> Response<ResponseBody> {
        body.discard();
        self.metrics
            .record_response(reply.status().as_u16(), elapsed);
        reply.map(ResponseBody::Full)
    }

    pub(super) fn log_request(
        &self,
        summary: &mut RequestSummary,
        verdict: &Verdict<'_>,
        status: StatusCode,
        responded_at: Instant,
    ) {
        let policy = match &verdict.outcome {
            RequestOutcome::Forward => None,
            RequestOutcome::Limited(limited) => Some(limited.policy),
            RequestOutcome::Denied { policy, .. }
            | RequestOutcome::InvalidKey { policy, .. }
            | RequestOutcome::Unavailable { policy, .. } => Some(*policy),
        };
        let is_rejected = policy.is_some() || !verdict.shadow_rejected.is_empty();
        if summary.recording.is_none() && !self.access_log.is_enabled_for(is_rejected) {
            return;
        }
        let entry = AccessLogEntry {
            method: summary.method.as_str(),
            host: summary.target.host(),
            path: summary.target.path(),
            client_ip: summary.client.ip,
            status,
            time_to_head: responded_at - summary.arrived_at,
            decision: classify_verdict(verdict).label(),
            policy,
            shadow_rejected: &verdict.shadow_rejected,
            limits: &verdict.limits,
            source: verdict.source,
            time_to_decision: verdict.decided_at.map(|at| at - summary.arrived_at),
            trace_id: summary.trace_id,
        };
        self.access_log.write(&entry);
        if let Some(recording) = &mut summary.recording {
            let tightest = ReportedLimit::find_tightest(&verdict.limits);
            recording.set_response(&trace::TracedResponse {
                status: status.as_u16(),
                decision: entry.decision,
                policy,
                limit: tightest.map(|one| (&*one.limit.name, one.key_id, one.standing.remaining)),
                source: verdict
                    .source
                    .map(DecisionSource::label)
                    .zip(verdict.decided_at),
            });
        }
    }

    /// A request of which no more is wanted.
    pub(super) fn summarize_request(
        &self,
        parts: &request::Parts,
        target: RequestTarget,
        client: ClientIdentity,
        arrived_at: Instant,
    ) -> RequestSummary {
        let trace_id = TraceContext::from_headers(&parts.headers).map(|context| context.trace);
        RequestSummary {
            method: parts.method.clone(),
            target,
            client,
            arrived_at,
            trace_id,
            recording: None,
        }
    }

    /// A recording of the request, if there is to be one.
    fn start_recording(
        &self,
        incoming_trace: Option<TraceContext>,
        parts: &request::Parts,
        inbound: &InboundRequest,
        peer: &ConnectionPeer,
        arrived_at: Instant,
    ) -> Option<Box<RequestRecording>> {
        let tracer = self.tracer.as_ref()?;
        let traced_request = trace::TracedRequest {
            method: &parts.method,
            host: inbound.target.host(),
            path: inbound.target.path(),
            client: inbound.client.ip,
            is_tls: peer.is_tls,
        };
        tracer.start_recording(incoming_trace, &parts.headers, &traced_request, arrived_at)
    }
}

impl RequestHandler for ProxyService {
    async fn handle(
        self: Rc<Self>,
        request: Request<RequestBody>,
        peer: Arc<ConnectionPeer>,
        mut interim: InformationalForwarder,
    ) -> Response<ResponseBody> {
        match peer.listener_kind {
            ListenerKind::Proxy => {
                self.handle_proxy_request(request, &peer, &mut interim)
                    .await
            }
            // Boxed, or every request would have room for them.
            ListenerKind::RateLimitService => {
                Box::pin(self.answer_rate_limit_call(request, &peer)).await
            }
            ListenerKind::ExtAuthz => Box::pin(self.check_authorization(request, &peer)).await,
        }
    }

    fn record_handshake_error(&self, fault: HandshakeError) {
        match fault {
            HandshakeError::ProxyHeader(fault) => {
                self.metrics.record_proxy_header_error(fault as usize)
            }
            HandshakeError::Tls(fault) => self.metrics.record_tls_error(fault as usize),
        }
    }

    fn record_unreadable_request(&self, status: StatusCode, peer: &ConnectionPeer) {
        self.metrics.record_status(status.as_u16());
        self.metrics
            .record_request_decision(RequestDecision::Malformed);
        self.access_log
            .write(&AccessLogEntry::for_unreadable_request(
                peer.addr.ip(),
                status,
            ));
    }

    fn metrics_shard(&self) -> Option<Arc<WorkerMetrics>> {
        Some(Arc::clone(&self.metrics))
    }

    async fn finish(&self) {
        self.enforcer.shut_down().await;
    }
}

/// What comes of `future` if it comes before `ends_at`.
///
/// Taken where it stays: as a value it would take its room three times, once per way through here.
async fn complete_before<F: Future>(
    ends_at: Option<Instant>,
    future: Pin<&mut F>,
) -> Option<F::Output> {
    match ends_at {
        None => Some(future.await),
        // What is late already is not even begun.
        Some(ends_at) if ends_at <= Instant::now() => None,
        Some(ends_at) => timeout_at(ends_at, future).await.ok(),
    }
}

/// What became of a request, in one word.
pub(super) fn classify_verdict(verdict: &Verdict<'_>) -> RequestDecision {
    match &verdict.outcome {
        RequestOutcome::Forward if verdict.is_degraded => RequestDecision::Degraded,
        RequestOutcome::Forward if !verdict.delay.is_zero() => RequestDecision::Delayed,
        RequestOutcome::Forward => RequestDecision::Allowed,
        RequestOutcome::Limited(limited) if limited.is_blocked => RequestDecision::Blocked,
        RequestOutcome::Limited(_) => RequestDecision::Rejected,
        RequestOutcome::Denied { .. } => RequestDecision::Denied,
        RequestOutcome::InvalidKey { .. } => RequestDecision::Malformed,
        RequestOutcome::Unavailable { .. } => RequestDecision::Unavailable,
    }
}

/// hyper counts for HTTP/1 only. HTTP/2 clients may send a line per cookie; together these count as one.
fn exceeds_header_count(headers: &HeaderMap, max: usize) -> bool {
    let cookies = || {
        headers
            .get_all(header::COOKIE)
            .iter()
            .count()
            .saturating_sub(1)
    };
    headers.len() > max && headers.len() - cookies() > max
}

/// Once is enough: after that it would only fill the log.
fn warn_about_untrusted_proxy(peer: &ConnectionPeer, table: &PolicyTable) {
    static WARNED: std::sync::Once = std::sync::Once::new();
    WARNED.call_once(|| {
        let ip = peer.addr.ip().to_canonical();
        tracing::warn!(
            peer = %ip,
            header = %table.client.ip_header,
            write = format!("[\"{}\"]", IpNet::from(ip)),
            "a peer that isn't in client.trusted_proxies names a client; the client's address is taken to be \
             the peer's. If the peer is your ingress, list it there, or its network, or everybody shares one quota",
        );
    });
}

/// What is still wanted of a request that is given away.
pub(super) struct RequestSummary {
    method: Method,
    target: RequestTarget,
    client: ClientIdentity,
    arrived_at: Instant,
    trace_id: Option<TraceId>,
    recording: Option<Box<RequestRecording>>,
}

/// The answer when the upstream gave none.
fn build_upstream_error_response(
    error: &UpstreamError,
    style: ReplyStyle<'_>,
) -> Response<ResponseBody> {
    use UpstreamErrorKind as Kind;
    let reply = match error.kind {
        Kind::ConnectRefused | Kind::ConnectFailed => ProxyErrorType::ConnectRefused,
        Kind::ConnectTimeout => ProxyErrorType::ConnectTimeout,
        Kind::Dns => ProxyErrorType::DnsError,
        Kind::Tls => ProxyErrorType::TlsError,
        Kind::QueueFull | Kind::QueueTimeout => ProxyErrorType::QueueFull,
        Kind::ResponseTimeout => ProxyErrorType::ResponseTimeout,
        Kind::ConnectionTerminated | Kind::StreamReset => ProxyErrorType::ConnectionTerminated,
        Kind::UpgradeUnsupported => ProxyErrorType::UpgradeFailed,
        Kind::Protocol => ProxyErrorType::ProtocolError,
        Kind::RequestBodyTooLarge => ProxyErrorType::BodyTooLarge,
        Kind::RequestBodyTimeout => ProxyErrorType::BodyTimeout,
        // A client that left reads no answer; one that sent nonsense does.
        Kind::ClientDisconnected => ProxyErrorType::BodyInvalid,
    };
    local_replies::build_proxy_error(reply, style).map(ResponseBody::Full)
}

#[cfg(test)]
mod tests {
    use super::{ProxyService, RequestHandler};

    /// Each connection keeps room for a request, and each request moves through it.
    #[test]
    fn request_future_stays_below_its_size_limit() {
        fn future_size<A, B, C, D, F>(_handle: impl FnOnce(A, B, C, D) -> F) -> usize {
            size_of::<F>()
        }
        let bytes = future_size(<ProxyService as RequestHandler>::handle);
        assert!(
            bytes <= 4_608,
            "{bytes}: is something rare awaited without a box?"
        );
    }
}
