//! External authorization for nginx (`auth_request`), Traefik (`forwardAuth`) and Envoy
//! (`ext_authz` over HTTP).
//!
//! The original request is restored from the authorization request, then validated and decided like
//! a proxied one. Each kind of proxy describes the original request in headers of its own, and may
//! pass on client headers that another kind uses. The path of the authorization request therefore
//! states the kind of proxy, and nothing is guessed.

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Uri, Version, header, request,
};
use tokio::time::Instant;

use super::ResponseBody;
use super::body::RequestBody;
use super::http::local_replies;
use super::http::query_escaper::escape_query;
use super::http::rate_limit_headers::{self, add_mark_header};
use super::http::request_validation::RequestValidationError;
use super::server::handler::ConnectionPeer;
use super::service::ProxyService;
use super::service::request_summary::{RequestContext, RequestSummary};
use super::service::validation::replace_status;
use crate::policy::path::ForwardedPath;
use crate::telemetry::trace::TraceParent;

/// Path prefix of Envoy's authorization requests. The original path follows the prefix.
const ENVOY_CHECK_PATH_PREFIX: &str = "/check/envoy";

/// Headers that describe the authorization request, not the original one, and are therefore
/// removed.
static REMOVED_AUTH_REQUEST_HEADERS: [HeaderName; 7] = [
    header::CONTENT_LENGTH,
    header::EXPECT,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
];

/// Kind of the proxy that sends the authorization request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AuthProxyKind {
    Nginx,
    Traefik,
    Envoy,
}

/// Why an authorization request is invalid, usually because the proxy in front is misconfigured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum AuthRequestError {
    #[error("unknown path: expected /check/nginx, /check/traefik or /check/envoy/PATH")]
    UnknownPath,
    #[error("the header {0} must be present exactly once")]
    HeaderMissing(&'static str),
    #[error("the header {0} is not valid")]
    HeaderInvalid(&'static str),
    #[error("the header host differs from the host of the request target")]
    HostMismatch,
    /// The original request of the client has an invalid target.
    #[error("the request target is not valid")]
    TargetInvalid,
}

impl ProxyService {
    /// Responds with 200 if the request may pass. Otherwise responds as to a proxied request, with
    /// a status that the proxy in front understands.
    pub(super) async fn answer_auth_request(
        &self,
        parts: &mut request::Parts,
        body: RequestBody,
        peer: &ConnectionPeer,
    ) -> Response<ResponseBody> {
        body.discard();
        let snapshot = self.enforcer.policy_snapshot();
        let table = &*snapshot.table;
        let origin = table.cors.copy_origin(&parts.headers);
        let mut context = RequestContext::new(parts, origin.as_ref(), peer, table);
        context.style = context.style.replace_grpc_with_json();
        let RequestContext {
            style, arrived_at, ..
        } = context;
        let proxy_kind = match AuthProxyKind::from_path(parts.uri.path()) {
            Ok(kind) => kind,
            Err(error) => return reject_invalid_auth_request(error, peer),
        };
        let inbound = match restore_original_request(parts, proxy_kind) {
            // The proxy in front forwards the path, as the client sent it.
            Ok(()) => self.validate_request_head(parts, &context, ForwardedPath::Unchanged, false),
            Err(AuthRequestError::TargetInvalid) => {
                let error = RequestValidationError::Target.into();
                Err(local_replies::build_invalid_request_reply(error, style).into())
            }
            Err(error) => return reject_invalid_auth_request(error, peer),
        };
        let inbound = match inbound {
            Ok(inbound) => inbound,
            Err(reply) => {
                let body = RequestBody::default();
                let reply = self.reject_invalid_request(parts, body, &context, *reply);
                return self.translate_denial_status(reply, proxy_kind);
            }
        };
        // No client certificate: the peer's certificate identifies the proxy in front.
        let mut facts = inbound.facts(parts, None, None);
        facts.has_joined_headers = !self.ext_authz.accepts_joined_headers;
        let verdict = self.enforcer.decide_request(&snapshot, &facts, arrived_at);
        let verdict = verdict.await;
        let decided_at = verdict.decided_at.unwrap_or(arrived_at);
        self.record_decision(&verdict, &inbound, peer);
        let denial =
            match local_replies::build_verdict_reply(&verdict, table.rate_limit_headers, style) {
                Some(denial) => Some(denial),
                // A request that a `leaky_bucket` limit delays waits here as it does in the proxy.
                None => {
                    let admission = self.upstream.delay_request(verdict.delay, decided_at).await;
                    admission
                        .err()
                        .map(|full| local_replies::build_proxy_error_reply(full.kind, style))
                }
            };
        let status = denial.as_ref().map_or(StatusCode::OK, Response::status);
        let trace = TraceParent::from_headers(&parts.headers);
        let mut summary = RequestSummary::new(context, parts, inbound, trace, None);
        self.log_and_trace_request(&mut summary, &verdict, status, Instant::now());
        self.metrics
            .record_response(status.as_u16(), arrived_at.elapsed());
        match denial {
            Some(denial) => {
                self.translate_denial_status(denial.map(ResponseBody::Full), proxy_kind)
            }
            // Lets the proxy in front forward the request, with the rate-limit fields and the mark,
            // which it may copy into the request.
            None => {
                let mut allowed = Response::new(ResponseBody::Empty);
                let headers = allowed.headers_mut();
                rate_limit_headers::write_headers(&verdict, table.rate_limit_headers, headers);
                add_mark_header(headers, table, &verdict);
                allowed
            }
        }
    }

    /// Sets the status code that the proxy in front needs for a rejection, and records the original
    /// status in a header.
    fn translate_denial_status(
        &self,
        mut denial: Response<ResponseBody>,
        proxy_kind: AuthProxyKind,
    ) -> Response<ResponseBody> {
        let status = denial.status();
        // Envoy treats 5xx as a failed check, so `failure_mode_allow` would let the rejected
        // request pass. 429 rejects it, and also permits a retry.
        let is_failed_check = proxy_kind == AuthProxyKind::Envoy && status.is_server_error();
        let translated = if is_failed_check {
            StatusCode::TOO_MANY_REQUESTS
        } else {
            status
        };
        let status = self.ext_authz.denied_status.unwrap_or(translated);
        replace_status(&mut denial, status);
        denial
    }
}

fn reject_invalid_auth_request(
    error: AuthRequestError,
    peer: &ConnectionPeer,
) -> Response<ResponseBody> {
    /// Limits the warning to one per process: every request of a misconfigured proxy has this
    /// error.
    static WARNED_OF_MISCONFIGURATION: std::sync::Once = std::sync::Once::new();
    WARNED_OF_MISCONFIGURATION.call_once(|| {
        tracing::warn!(unclear = %error, peer = %peer.addr, "authorization request rejected; configure the proxy in front as docs/ENVOY.md describes");
    });
    let mut response = Response::new(ResponseBody::Full(Bytes::from(format!("{error}\n"))));
    *response.status_mut() = match error {
        AuthRequestError::UnknownPath => StatusCode::NOT_FOUND,
        _ => StatusCode::BAD_REQUEST,
    };
    response
}

impl AuthProxyKind {
    fn from_path(path: &str) -> Result<Self, AuthRequestError> {
        match path {
            "/check/nginx" => Ok(Self::Nginx),
            "/check/traefik" => Ok(Self::Traefik),
            _ if path.starts_with("/check/envoy/") => Ok(Self::Envoy),
            _ => Err(AuthRequestError::UnknownPath),
        }
    }
}

/// Replaces the head of an authorization request with that of the original request.
fn restore_original_request(
    parts: &mut request::Parts,
    proxy_kind: AuthProxyKind,
) -> Result<(), AuthRequestError> {
    if let Some(authority) = parts.uri.authority() {
        let authority = HeaderValue::from_str(authority.as_str())
            .map_err(|_invalid| AuthRequestError::HostMismatch)?;
        let host = parts.headers.entry(header::HOST);
        let host = host.or_insert_with(|| authority.clone());
        if !host.as_bytes().eq_ignore_ascii_case(authority.as_bytes()) {
            return Err(AuthRequestError::HostMismatch);
        }
    }
    let (target, method) = match proxy_kind {
        AuthProxyKind::Nginx => {
            let target = get_single_header(&parts.headers, "x-original-uri")?;
            (target, get_method(&parts.headers, "x-original-method")?)
        }
        AuthProxyKind::Traefik => {
            let target = get_single_header(&parts.headers, "x-forwarded-uri")?;
            let host = get_single_header(&parts.headers, "x-forwarded-host")?;
            parts.headers.insert(header::HOST, host);
            (target, get_method(&parts.headers, "x-forwarded-method")?)
        }
        AuthProxyKind::Envoy => {
            let check_path = parts.uri.path_and_query().map_or("", PathAndQuery::as_str);
            let target = check_path
                .strip_prefix(ENVOY_CHECK_PATH_PREFIX)
                .unwrap_or_default();
            let target = HeaderValue::from_bytes(target.as_bytes())
                .map_err(|_invalid| AuthRequestError::TargetInvalid)?;
            (target, parts.method.clone())
        }
    };
    // tidegate would drop the fragment, while an application without fragment support would use it
    // as part of the path.
    if target.as_bytes().contains(&b'#') {
        return Err(AuthRequestError::TargetInvalid);
    }
    // The target is a path or an absolute URL, as in a request line.
    parts.uri = Uri::from_maybe_shared(Bytes::from(escape_query(target.as_bytes()).into_owned()))
        .map_err(|_invalid| AuthRequestError::TargetInvalid)?;
    parts.method = method;
    parts.version = Version::HTTP_11;
    for name in &REMOVED_AUTH_REQUEST_HEADERS {
        parts.headers.remove(name);
    }
    Ok(())
}

fn get_single_header(
    headers: &HeaderMap,
    name: &'static str,
) -> Result<HeaderValue, AuthRequestError> {
    let mut values = headers.get_all(name).into_iter();
    match (values.next(), values.next()) {
        (Some(value), None) => Ok(value.clone()),
        _ => Err(AuthRequestError::HeaderMissing(name)),
    }
}

fn get_method(headers: &HeaderMap, name: &'static str) -> Result<Method, AuthRequestError> {
    let value = get_single_header(headers, name)?;
    Method::from_bytes(value.as_bytes()).map_err(|_invalid| AuthRequestError::HeaderInvalid(name))
}
