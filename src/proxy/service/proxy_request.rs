//! Handles one proxied request. The functions stand in the order of its steps.

use bytes::Bytes;
use http::{Method, Response, StatusCode, header, request};
use http_body::Body as _;
use std::cell::Cell;
use std::net::IpAddr;
use std::pin::pin;
use std::rc::Rc;
use tokio::time::Instant;

use super::ProxyService;
use super::held_exchange::{HeldExchange, await_until_deadline};
use super::request_summary::{RequestContext, RequestSummary};
use crate::enforcer::{ConcurrencySlotGuard, EstimatedCharge, Verdict};
use crate::policy::{PolicyTable, SelfServiceSettings};
use crate::proxy::body::informational_responses::InformationalForwarder;
use crate::proxy::client_counts::ClientCountGuard;
use crate::proxy::http::headers::ForwardingContext;
use crate::proxy::http::headers::{add_client_cert, take_head};
use crate::proxy::http::inbound_request::InboundRequest;
use crate::proxy::http::local_replies::ReplyStyle;
use crate::proxy::http::rate_limit_headers::add_mark_header;
use crate::proxy::http::response_cost::CostMeter;
use crate::proxy::http::{headers, local_replies, rate_limit_headers, upgrade};
use crate::proxy::server::handler::ConnectionPeer;
use crate::proxy::{RequestBody, ResponseBody, UpstreamError, UpstreamErrorKind};
use crate::telemetry::trace::TraceParent;

impl ProxyService {
    pub(super) async fn handle_proxy_request(
        &self,
        parts: &mut request::Parts,
        body: RequestBody,
        peer: &ConnectionPeer,
        interim: &mut InformationalForwarder,
    ) -> Response<ResponseBody> {
        let policies = self.enforcer.policy_snapshot();
        let table = &*policies.table;
        let origin = table.cors.copy_origin(&parts.headers);
        let context = RequestContext::new(parts, origin.as_ref(), peer, table);

        // 1. Read and validate: only requests with one possible reading are accepted.
        let (forward, has_body) = (table.path.forward, !body.is_end_stream());
        let inbound = match self.validate_request_head(parts, &context, forward, has_body) {
            Ok(inbound) => inbound,
            Err(reply) => return self.reject_invalid_request(parts, body, &context, *reply),
        };
        if let Some(settings) = table.self_service_at(inbound.target.path()) {
            let answer = self.answer_own_limits(settings, context, parts, inbound, body);
            return Box::pin(answer).await;
        }
        let trace = TraceParent::from_headers(&parts.headers);
        let recording = self.start_trace_recording(trace, parts, &inbound, &context);

        // 2. Decide. Nothing is charged for a tunnel too many, or for a body that ends early.
        let mut admission = self.count_tunnel(&inbound, table);
        let (mut body_facts, mut asked_at) = (None, context.arrived_at);
        if has_body && table.reads_bodies() && admission.is_ok() {
            let reading = self.read_body((parts, &inbound), &context, &body, &mut admission);
            (body_facts, asked_at) = Box::pin(reading).await;
        }
        let mut verdict = Verdict::default();
        if admission.is_ok() {
            let certificate = peer.certificate_subject.as_ref();
            let facts = inbound.facts(parts, certificate, body_facts.as_deref());
            let decision = self.enforcer.decide_request(&policies, &facts, asked_at);
            verdict = decision.await;
        }
        self.record_decision(&verdict, &inbound, peer);
        let mut summary = RequestSummary::new(context, parts, inbound, trace, recording);
        let fields = table.rate_limit_headers;
        if let Some(reply) = local_replies::build_verdict_reply(&verdict, fields, context.style) {
            return self.reject_request(body, reply, &mut summary, &verdict);
        }
        let mut slot_guard = verdict.slot_guard.take();
        let estimates = std::mem::take(&mut verdict.estimated_charges);
        let deadline = (slot_guard.as_ref()).and_then(|guard| guard.request_ends_at);

        // 3. Wait.
        let turn = self.wait_for_turn(&verdict, &mut summary, admission, deadline);
        let ready_at = match turn.await {
            Ok(ready_at) => ready_at,
            Err(error) => {
                let unsent = (body, estimates);
                return self.respond_to_unsent_request(unsent, &error, &mut summary, &verdict);
            }
        };

        // 4. Forward.
        self.prepare_upstream_request(parts, &mut summary, &estimates, &body);
        add_mark_header(&mut parts.headers, table, &verdict);
        let (mut sent_body, was_sent) = (body.clone_handle(), Cell::new(false));
        let is_upgrade = summary.target.upgrade_request.is_some();
        let request = (parts, &mut sent_body, is_upgrade);
        let (slot, client) = ((&mut slot_guard, deadline), (summary.client.ip, table));
        let sending = self.forward(request, client, ready_at, interim, slot, &was_sent);

        // 5. Finish.
        let (result, sent) = (sending.await, (body, was_sent.get()));
        let mut response = self.respond_to_result(result, sent, estimates, &mut summary);
        if summary.awaits_returned_units {
            Box::pin(self.enforcer.wait_for_returned_units()).await;
        }
        self.complete_response(&mut response, &mut summary, &verdict);
        let recording = summary.recording.take();
        response.body_mut().attach_guards(slot_guard, recording);
        response
    }

    /// Sends a request until the deadline of its slot, if it has one. An exchange that may outlive
    /// its client takes the slot.
    #[allow(
        clippy::manual_async_fn,
        reason = "an async fn stores and copies its arguments twice"
    )]
    fn forward<'a>(
        &'a self,
        (head, body, is_upgrade): (&'a mut request::Parts, &'a mut RequestBody, bool),
        (client_ip, table): (IpAddr, &'a PolicyTable),
        ready_at: Instant,
        interim: &'a mut InformationalForwarder,
        (slot_guard, deadline): (&'a mut Option<ConcurrencySlotGuard>, Option<Instant>),
        was_sent: &'a Cell<bool>,
    ) -> impl Future<Output = Result<Response<ResponseBody>, UpstreamError>> {
        async move {
            let client = || table.client.client_prefix(client_ip);
            let is_held = |guard: &mut ConcurrencySlotGuard| guard.held_until().is_some();
            if let Some(guard) = slot_guard.take_if(is_held) {
                let (upstream, interim) = (Rc::clone(&self.upstream), std::mem::take(interim));
                let request = (take_head(head), std::mem::take(body), is_upgrade);
                let exchange =
                    HeldExchange::new(upstream, request, client(), ready_at, interim, guard);
                let (result, sent) = exchange.await;
                was_sent.set(sent);
                return result;
            }
            let upstream = &self.upstream;
            let request = (head, body, is_upgrade);
            let send = upstream.send(request, client, ready_at, interim, was_sent);
            await_until_deadline(deadline, pin!(send)).await
        }
    }

    /// Responds to a request that a policy rejected.
    fn reject_request(
        &self,
        body: RequestBody,
        reply: Response<Bytes>,
        summary: &mut RequestSummary<'_>,
        verdict: &Verdict<'_>,
    ) -> Response<ResponseBody> {
        let arrived_at = summary.context.arrived_at;
        let decided_at = verdict.decided_at.unwrap_or(arrived_at);
        self.log_and_trace_request(summary, verdict, reply.status(), decided_at);
        self.respond_without_upstream(body, reply, decided_at - arrived_at)
    }

    /// Counts the tunnel that the request asks for, if any. The result is boxed, because tunnels
    /// are rare and every request's future includes its size.
    fn count_tunnel(
        &self,
        inbound: &InboundRequest,
        table: &PolicyTable,
    ) -> Result<Option<Box<ClientCountGuard>>, Box<UpstreamError>> {
        if inbound.target.upgrade_request.is_none() {
            return Ok(None);
        }
        let client = table.client.client_prefix(inbound.client.ip);
        let counted = self.upstream.count_tunnel(client).map_err(Box::new)?;
        Ok(counted.map(Box::new))
    }

    /// Waits as long as a `leaky_bucket` limit delays the request, at most until `deadline`. If the
    /// client disconnects, the request is dropped but its place in the bucket's queue stays
    /// consumed.
    async fn wait_for_turn(
        &self,
        verdict: &Verdict<'_>,
        summary: &mut RequestSummary<'_>,
        admission: Result<Option<Box<ClientCountGuard>>, Box<UpstreamError>>,
        deadline: Option<Instant>,
    ) -> Result<Instant, UpstreamError> {
        summary.tunnel_count = admission.map_err(|error| *error)?;
        let decided_at = verdict.decided_at.unwrap_or(summary.context.arrived_at);
        let turn = pin!(self.upstream.delay_request(verdict.delay, decided_at));
        await_until_deadline(deadline, turn).await
    }

    /// Rewrites the request head for the upstream, and starts the trace span of the exchange.
    fn prepare_upstream_request(
        &self,
        parts: &mut request::Parts,
        summary: &mut RequestSummary<'_>,
        estimates: &[EstimatedCharge],
        body: &RequestBody,
    ) {
        let RequestContext {
            peer, table, style, ..
        } = summary.context;
        let forwarding = ForwardingContext {
            peer: &peer.address_text,
            client: summary.client,
            is_https: peer.is_https,
            version_in: style.version,
            ip_header: &table.client.ip_header,
            has_body: !body.is_empty(),
            preserve_host: self.upstream.settings().preserve_host,
            upstream_authority: self.upstream.authority(),
        };
        headers::rewrite_request_headers(parts, &summary.target, &forwarding);
        if let Some(fields) = &peer.client_cert_fields {
            add_client_cert(&mut parts.headers, fields, &summary.client, table);
        }
        if estimates.iter().any(EstimatedCharge::reads_body) {
            headers::ask_upstream_for_full_identity_body(&mut parts.headers);
        }
        if let Some(recording) = &mut summary.recording {
            let authority = self.upstream.authority().to_str().unwrap_or_default();
            recording.start_upstream_span(&mut parts.headers, authority);
        }
    }

    /// Responds with the upstream's response, or to the failure.
    fn respond_to_result(
        &self,
        result: Result<Response<ResponseBody>, UpstreamError>,
        (body, was_sent): (RequestBody, bool),
        estimates: Vec<EstimatedCharge>,
        summary: &mut RequestSummary<'_>,
    ) -> Response<ResponseBody> {
        let style = summary.context.style;
        if was_sent {
            // The upstream may have read a part of the body. The rest stays unread.
            body.mark_rest_unread();
        } else {
            body.discard();
        }
        if let Some(recording) = &mut summary.recording {
            recording.finish_upstream_span(match &result {
                Ok(response) => Ok(response.status().as_u16()),
                Err(error) => Err(error.kind.into_str()),
            });
        }
        match result {
            Ok(response) => {
                summary.awaits_returned_units =
                    estimates.iter().any(EstimatedCharge::delays_response);
                self.prepare_client_response(response, estimates, summary)
            }
            Err(error) if was_sent => self.respond_to_forward_error(&error, Vec::new(), style),
            Err(error) => self.respond_to_forward_error(&error, estimates, style),
        }
    }

    /// Rewrites the response head for the client, and attaches the meter of the response cost. If
    /// the response is invalid, the charges stand.
    fn prepare_client_response(
        &self,
        response: Response<ResponseBody>,
        estimates: Vec<EstimatedCharge>,
        summary: &RequestSummary<'_>,
    ) -> Response<ResponseBody> {
        let style = summary.context.style;
        let (mut parts, mut body) = response.into_parts();
        if let ResponseBody::Tunnel(tunnel) = &mut body
            && upgrade::upgrade_names_websocket(&parts.headers)
        {
            tunnel.track_websocket_frames();
        }
        let upgrade = summary.target.upgrade_request.as_ref();
        match headers::rewrite_response_head(&mut parts, style.version, upgrade) {
            Ok(()) => {
                if parts.status.is_server_error() {
                    self.metrics.record_app_error(summary.target.path());
                }
                let cost_meter = CostMeter::settle_head_and_create(estimates, &parts);
                if let ResponseBody::Upstream(body) = &mut body {
                    if cost_meter
                        .as_ref()
                        .is_some_and(|meter| meter.may_add_event())
                    {
                        parts.headers.remove(header::CONTENT_LENGTH);
                    }
                    body.cost_meter = cost_meter;
                }
                Response::from_parts(parts, body)
            }
            Err(error) => {
                let errors = &self.metrics.upstream_errors;
                errors.increment(UpstreamErrorKind::Protocol as usize);
                tracing::warn!(fault = %error, "upstream response rejected");
                local_replies::build_proxy_error_reply(UpstreamErrorKind::Protocol, style)
                    .map(ResponseBody::Full)
            }
        }
    }

    /// Responds to a request that ended before it was sent. Its estimates are returned.
    fn respond_to_unsent_request(
        &self,
        (body, estimates): (RequestBody, Vec<EstimatedCharge>),
        error: &UpstreamError,
        summary: &mut RequestSummary<'_>,
        verdict: &Verdict<'_>,
    ) -> Response<ResponseBody> {
        body.discard();
        for estimate in estimates {
            estimate.settle(0);
        }
        let style = summary.context.style;
        let mut response = self.respond_to_forward_error(error, Vec::new(), style);
        self.complete_response(&mut response, summary, verdict);
        response
    }

    /// Responds to a request without a response. `unsent` are the estimates of a request of which
    /// nothing was sent. Of any other request they stand: only the app's status can return them.
    fn respond_to_forward_error(
        &self,
        error: &UpstreamError,
        unsent: Vec<EstimatedCharge>,
        style: ReplyStyle<'_>,
    ) -> Response<ResponseBody> {
        self.metrics.upstream_errors.increment(error.kind as usize);
        self.upstream.log_error(error);
        let is_caused_by_client = error.kind.is_caused_by_client();
        // If the client ended the request, the charge stays. Otherwise clients could leave early to
        // avoid it.
        for estimate in unsent.into_iter().filter(|_| !is_caused_by_client) {
            estimate.settle_unsent(local_replies::status_error_and_detail(error.kind).0);
        }
        local_replies::build_proxy_error_reply(error.kind, style).map(ResponseBody::Full)
    }

    /// Adds the rate-limit headers, and logs and counts an admitted request.
    fn complete_response(
        &self,
        response: &mut Response<ResponseBody>,
        summary: &mut RequestSummary<'_>,
        verdict: &Verdict<'_>,
    ) {
        let RequestContext {
            table,
            style,
            arrived_at,
            ..
        } = summary.context;
        if let ResponseBody::Tunnel(tunnel) = response.body_mut() {
            tunnel.keep(summary.tunnel_count.take());
        }
        let headers = response.headers_mut();
        rate_limit_headers::write_headers(verdict, table.rate_limit_headers, headers);
        style.cors.expose_rate_limit_fields(headers);
        let responded_at = Instant::now();
        self.log_and_trace_request(summary, verdict, response.status(), responded_at);
        let status = response.status().as_u16();
        self.metrics
            .record_response(status, responded_at - arrived_at);
    }

    /// Answers a client that asks for its limits. The caller boxes the future: every request's
    /// future would include its size otherwise.
    pub(super) async fn answer_own_limits(
        &self,
        settings: &SelfServiceSettings,
        context: RequestContext<'_>,
        parts: &request::Parts,
        inbound: InboundRequest,
        body: RequestBody,
    ) -> Response<ResponseBody> {
        let arrived_at = context.arrived_at;
        let style = context.style.replace_grpc_with_json();
        if ![Method::GET, Method::HEAD].contains(&parts.method) {
            let (status, allowed) = (StatusCode::METHOD_NOT_ALLOWED, (header::ALLOW, "GET, HEAD"));
            let reply = local_replies::build_own_limits_error(
                status,
                "Limits can only be read.",
                allowed,
                style,
            );
            return self.respond_without_upstream(body, reply, arrived_at.elapsed());
        }
        let certificate = context.peer.certificate_subject.as_ref();
        let facts = inbound.facts(parts, certificate, None);
        let is_trusted = inbound.client.is_peer_trusted;
        let Some(client) = context.table.client_quotas(&facts, is_trusted) else {
            let detail = "No policy has a key that identifies the client of this request. Expected a valid \
                          token or client certificate.";
            let challenge = (header::WWW_AUTHENTICATE, "Bearer");
            let status = StatusCode::UNAUTHORIZED;
            let reply = local_replies::build_own_limits_error(status, detail, challenge, style);
            return self.respond_without_upstream(body, reply, arrived_at.elapsed());
        };
        let own = self.enforcer.read_own_limits(settings, &client, arrived_at);
        let own = own.await;
        let reply = local_replies::build_own_limits_reply(&own, style);
        let trace = TraceParent::from_headers(&parts.headers);
        let mut summary = RequestSummary::new(context, parts, inbound, trace, None);
        self.log_and_trace_request(&mut summary, &own.verdict, reply.status(), Instant::now());
        self.respond_without_upstream(body, reply, arrived_at.elapsed())
    }
}
