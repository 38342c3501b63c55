//! Answers clients that ask for their own limits. Such requests are not forwarded.

use super::ProxyService;
use super::request_summary::RequestSummary;
use crate::policy::{PolicyTable, SelfServiceSettings};
use crate::proxy::http::inbound_request::InboundRequest;
use crate::proxy::http::local_replies::{self, ReplyStyle};
use crate::proxy::server::peer::ConnectionPeer;
use crate::proxy::{RequestBody, ResponseBody};
use crate::telemetry::trace::TraceParent;
use http::{Method, Response, Version, request};
use tokio::time::Instant;

/// A request for the client's own limits.
pub(super) struct OwnLimitsRequest<'r> {
    /// The rewritten request head.
    pub(super) parts: &'r request::Parts,
    /// The version that the client used.
    pub(super) version: Version,
    pub(super) inbound: InboundRequest,
    pub(super) body: RequestBody,
    pub(super) peer: &'r ConnectionPeer,
    pub(super) arrived_at: Instant,
}

impl ProxyService {
    /// Answers a client that asks for its limits. The caller boxes the future: every request's
    /// future would include its size otherwise.
    pub(super) async fn answer_own_limits(
        &self,
        settings: &SelfServiceSettings,
        table: &PolicyTable,
        request: OwnLimitsRequest<'_>,
        style: ReplyStyle<'_>,
    ) -> Response<ResponseBody> {
        let OwnLimitsRequest {
            parts,
            version,
            inbound,
            body,
            peer,
            arrived_at,
        } = request;
        let style = style.replace_grpc_with_json();
        if ![Method::GET, Method::HEAD].contains(&parts.method) {
            let reply = local_replies::build_method_not_allowed_reply(style);
            return self.respond_without_upstream(body, reply, arrived_at.elapsed());
        }
        let certificate = peer.certificate_subject.as_ref();
        let client = {
            let facts = inbound.facts(parts, certificate);
            table.client_quotas(&facts, inbound.client.is_peer_trusted)
        };
        let Some(client) = client else {
            let reply = local_replies::build_unidentified_client_reply(style);
            return self.respond_without_upstream(body, reply, arrived_at.elapsed());
        };
        let own = self
            .enforcer
            .read_own_limits(settings, &client, arrived_at)
            .await;
        let reply = local_replies::build_own_limits_reply(&own, style);
        let trace = TraceParent::from_headers(&parts.headers);
        let mut summary = RequestSummary::new(parts, version, inbound, arrived_at, trace, None);
        self.log_and_trace_request(&mut summary, &own.verdict, reply.status(), Instant::now());
        self.respond_without_upstream(body, reply, arrived_at.elapsed())
    }
}
