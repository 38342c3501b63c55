//! What logs, metrics and traces record about a request.

use http::{HeaderValue, Method, StatusCode, request};
use tokio::time::Instant;

use super::ProxyService;
use crate::enforcer::{DecisionSource, LimitReport, RequestOutcome, Verdict};
use crate::policy::PolicyTable;
use crate::policy::client::ClientAddress;
use crate::proxy::client_counts::ClientCountGuard;
use crate::proxy::http::access_log::{AccessLogEntry, classify_verdict};
use crate::proxy::http::inbound_request::InboundRequest;
use crate::proxy::http::local_replies::ReplyStyle;
use crate::proxy::http::request_validation::RequestTarget;
use crate::proxy::server::handler::ConnectionPeer;
use crate::telemetry::trace::{self, RequestRecording, TraceId, TraceParent};

/// What all steps of a request use: its client, policies, reply format and arrival.
#[derive(Clone, Copy)]
pub(crate) struct RequestContext<'r> {
    pub(crate) peer: &'r ConnectionPeer,
    pub(crate) table: &'r PolicyTable,
    pub(crate) style: ReplyStyle<'r>,
    pub(crate) arrived_at: Instant,
}

impl<'r> RequestContext<'r> {
    /// The context of a request that arrives now. `origin` is a copy of its `Origin`. Validation
    /// must not have changed the head yet.
    pub(crate) fn new(
        parts: &request::Parts,
        origin: Option<&'r HeaderValue>,
        peer: &'r ConnectionPeer,
        table: &'r PolicyTable,
    ) -> Self {
        Self {
            peer,
            table,
            style: ReplyStyle::from_request(parts, origin, &table.cors),
            arrived_at: Instant::now(),
        }
    }
}

/// The parts of a request that its log entry and trace need after it was forwarded.
pub(crate) struct RequestSummary<'r> {
    pub(super) context: RequestContext<'r>,
    pub(super) target: RequestTarget,
    pub(super) client: ClientAddress,
    pub(super) recording: Option<Box<RequestRecording>>,
    /// Counts the tunnel that the request asks for.
    pub(super) tunnel_count: Option<Box<ClientCountGuard>>,
    /// Whether the key's next request depends on units that the head of the response returns.
    pub(super) awaits_returned_units: bool,
    method: Method,
    trace_id: Option<TraceId>,
}

impl<'r> RequestSummary<'r> {
    /// `trace` is the client's trace context; the trace context of a `recording` takes precedence.
    pub(crate) fn new(
        context: RequestContext<'r>,
        parts: &request::Parts,
        inbound: InboundRequest,
        trace: Option<TraceParent>,
        recording: Option<Box<RequestRecording>>,
    ) -> Self {
        let recorded = recording.as_ref().map(|recording| recording.context);
        let trace_id = recorded.or(trace).map(|context| context.trace);
        let InboundRequest { target, client, .. } = inbound;
        Self {
            context,
            target,
            client,
            recording,
            tunnel_count: None,
            awaits_returned_units: false,
            method: parts.method.clone(),
            trace_id,
        }
    }
}

impl ProxyService {
    /// Starts a trace recording if the request is sampled.
    pub(super) fn start_trace_recording(
        &self,
        incoming_trace: Option<TraceParent>,
        parts: &request::Parts,
        inbound: &InboundRequest,
        context: &RequestContext<'_>,
    ) -> Option<Box<RequestRecording>> {
        let tracer = self.tracer.as_ref()?;
        let traced_request = trace::TracedRequest {
            method: &parts.method,
            host: inbound.target.host(),
            path: inbound.target.path(),
            client: inbound.client.ip,
            is_https: context.peer.is_https,
        };
        let arrived_at = context.arrived_at;
        tracer.start_recording_if_sampled(
            incoming_trace,
            &parts.headers,
            &traced_request,
            arrived_at,
        )
    }

    /// Counts the decision about a proxied request, and a token that was rejected.
    pub(crate) fn record_decision(
        &self,
        verdict: &Verdict<'_>,
        inbound: &InboundRequest,
        peer: &ConnectionPeer,
    ) {
        self.metrics
            .record_request_decision(classify_verdict(verdict) as usize);
        if let Some(error) = inbound.token_error() {
            self.metrics.rejected_tokens.add(1);
            tracing::debug!(fault = %error, peer = %peer.addr, "request token rejected");
        }
    }

    /// Writes the access log entry and adds the response head to the trace recording, if any.
    pub(crate) fn log_and_trace_request(
        &self,
        summary: &mut RequestSummary<'_>,
        verdict: &Verdict<'_>,
        status: StatusCode,
        responded_at: Instant,
    ) {
        let is_rejected = !matches!(verdict.outcome, RequestOutcome::Forward)
            || !verdict.unenforced_rejections.is_empty();
        if summary.recording.is_none() && !self.access_log.filter_allows_request(is_rejected) {
            return;
        }
        let (client_ip, arrived_at) = (summary.client.ip, summary.context.arrived_at);
        let entry = AccessLogEntry {
            method: summary.method.as_str(),
            host: summary.target.host(),
            path: summary.target.path(),
            time_to_head: responded_at - arrived_at,
            trace_id: summary.trace_id,
            ..AccessLogEntry::for_verdict(verdict, client_ip, status, arrived_at)
        };
        self.access_log.write(&entry);
        if let Some(recording) = &mut summary.recording {
            let tightest = LimitReport::find_tightest_limit(&verdict.limits);
            let source = verdict.source.as_ref();
            recording.set_response(&trace::TracedResponse {
                status: status.as_u16(),
                decision: entry.decision().into_str(),
                policy: entry.policy(),
                limit: tightest.map(|one| (&*one.limit.name, one.key_id, one.status.remaining)),
                source: source.map(DecisionSource::into_str).zip(verdict.decided_at),
            });
        }
    }
}
