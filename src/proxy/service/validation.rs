//! Validation of request heads, and the responses to requests that fail it.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header, request};
use ipnet::IpNet;
use std::time::Duration;

use super::ProxyService;
use super::request_summary::RequestContext;
use crate::enforcer::RequestDecision;
use crate::policy::PolicyTable;
use crate::policy::path::ForwardedPath;
use crate::proxy::http::access_log::AccessLogEntry;
use crate::proxy::http::inbound_request::InboundRequest;
use crate::proxy::http::local_replies;
use crate::proxy::http::request_validation::RequestValidationError;
use crate::proxy::server::handler::{ConnectionPeer, RequestHandler};
use crate::proxy::{RequestBody, ResponseBody, UpstreamErrorKind};
use crate::telemetry::trace::TraceParent;

/// Response header with the status of a denial before it is translated for the proxy in front.
static ORIGINAL_STATUS_HEADER: HeaderName = HeaderName::from_static("x-tidegate-status");

impl ProxyService {
    /// Validates the request head, or returns the error response. `has_body` is false if the body
    /// is known to be empty.
    pub(crate) fn validate_request_head(
        &self,
        parts: &mut request::Parts,
        context: &RequestContext<'_>,
        forward: ForwardedPath,
        has_body: bool,
    ) -> Result<InboundRequest, Box<Response<Bytes>>> {
        let RequestContext {
            peer, table, style, ..
        } = *context;
        let inbound = if exceeds_header_count(&parts.headers, self.max_headers) {
            Err(RequestValidationError::TooManyHeaders.into())
        } else if has_body && parts.method == Method::TRACE {
            Err(RequestValidationError::TraceBody.into())
        } else {
            InboundRequest::validate_and_rewrite(parts, peer.addr.ip(), table, forward)
        };
        let inbound = inbound.map_err(|error| {
            tracing::debug!(fault = %error, peer = %peer.addr, "request failed validation");
            local_replies::build_invalid_request_reply(error, style)
        })?;
        let is_too_large = |most| inbound.target.content_length > Some(most);
        if self.max_body_bytes.is_some_and(is_too_large) {
            let kind = UpstreamErrorKind::RequestBodyTooLarge;
            return Err(local_replies::build_proxy_error_reply(kind, style).into());
        }
        if table.ignores_forwarding_headers(&inbound.client, &parts.headers) {
            let ip = peer.addr.ip().to_canonical();
            self.metrics.record_untrusted_forwarding(ip);
            warn_once_about_untrusted_proxy(peer, table);
        }
        Ok(inbound)
    }

    /// Responds to an HTTP/2 request whose head was malformed. h2 got `parts` instead, a valid head.
    pub(super) fn reject_malformed_head(
        &self,
        parts: &request::Parts,
        body: RequestBody,
        peer: &ConnectionPeer,
        error: RequestValidationError,
    ) -> Response<ResponseBody> {
        let policies = self.enforcer.policy_snapshot();
        let origin = policies.table.cors.copy_origin(&parts.headers);
        let context = RequestContext::new(parts, origin.as_ref(), peer, &policies.table);
        tracing::debug!(fault = %error, peer = %peer.addr, "request failed validation");
        let mut reply = local_replies::build_invalid_request_reply(error.into(), context.style);
        if let Some(status) = self.unreadable_request_status(peer) {
            replace_status(&mut reply, status);
        }
        self.reject_invalid_request(parts, body, &context, reply)
    }

    /// Responds to a request that failed validation, before any policy applied.
    pub(crate) fn reject_invalid_request(
        &self,
        parts: &request::Parts,
        body: RequestBody,
        context: &RequestContext<'_>,
        reply: Response<Bytes>,
    ) -> Response<ResponseBody> {
        let elapsed = context.arrived_at.elapsed();
        let decision = RequestDecision::Malformed;
        self.metrics.record_request_decision(decision as usize);
        let host = parts.headers.get(header::HOST);
        let host = host.and_then(|host| host.to_str().ok());
        self.access_log.write(&AccessLogEntry {
            method: parts.method.as_str(),
            host: host.or_else(|| parts.uri.host()).unwrap_or_default(),
            path: parts.uri.path(),
            time_to_head: elapsed,
            trace_id: TraceParent::from_headers(&parts.headers).map(|context| context.trace),
            ..AccessLogEntry::for_unreadable_request(context.peer.addr.ip(), reply.status())
        });
        self.respond_without_upstream(body, reply, elapsed)
    }

    /// Responds without the upstream. The rest of the request body is discarded.
    pub(super) fn respond_without_upstream(
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
}

/// Replaces the status of a denial by one for the proxy in front, and records the original in a
/// header.
pub(crate) fn replace_status<B>(denial: &mut Response<B>, status: StatusCode) {
    let original = HeaderValue::from(denial.status().as_u16());
    let headers = denial.headers_mut();
    headers.insert(&ORIGINAL_STATUS_HEADER, original);
    *denial.status_mut() = status;
}

/// Whether there are too many header lines. hyper limits header lines for HTTP/1 only. HTTP/2
/// clients may send one line per cookie; all cookie lines count as one.
fn exceeds_header_count(headers: &HeaderMap, max: usize) -> bool {
    let cookies = || headers.get_all(header::COOKIE).iter().count();
    headers.len() > max && headers.len() - cookies().saturating_sub(1) > max
}

/// Warns once per process that the forwarding header of an untrusted proxy is ignored.
fn warn_once_about_untrusted_proxy(peer: &ConnectionPeer, table: &PolicyTable) {
    static WARNED_OF_UNTRUSTED_PROXY: std::sync::Once = std::sync::Once::new();
    WARNED_OF_UNTRUSTED_PROXY.call_once(|| {
        let ip = peer.addr.ip().to_canonical();
        tracing::warn!(
            peer = %ip,
            header = %table.client.ip_header,
            write = format!("[\"{}\"]", IpNet::from(ip)),
            "forwarding header ignored because the peer is not in client.trusted_proxies; the peer's address is \
             used. If the peer is your ingress, list its address or network there, or all its clients share one quota",
        );
    });
}
