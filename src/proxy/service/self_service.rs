//! Answers clients that ask for their own limits. Such requests are not forwarded.

use http::{Method, Response, request};
use tokio::time::Instant;

use super::ProxyService;
use super::request_summary::{RequestContext, RequestSummary};
use crate::policy::SelfServiceSettings;
use crate::proxy::http::inbound_request::InboundRequest;
use crate::proxy::http::local_replies;
use crate::proxy::{RequestBody, ResponseBody};
use crate::telemetry::trace::TraceParent;

impl ProxyService {
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
            let reply = local_replies::build_method_not_allowed_reply(style);
            return self.respond_without_upstream(body, reply, arrived_at.elapsed());
        }
        let certificate = context.peer.certificate_subject.as_ref();
        let facts = inbound.facts(parts, certificate);
        let is_trusted = inbound.client.is_peer_trusted;
        let Some(client) = context.table.client_quotas(&facts, is_trusted) else {
            let reply = local_replies::build_unidentified_client_reply(style);
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
