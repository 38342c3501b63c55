//! Whether a request may pass that somebody else forwards: nginx (`auth_request`), Traefik (`forwardAuth`), Envoy
//! (`ext_authz` by HTTP). The request is made again of what they tell, and then read and decided as if it had come here.
//!
//! Each tells it in its own way, and passes on what clients send in the others' ways: so the path that is asked says who
//! asks, and nothing is guessed.

use super::server::peer::ConnectionPeer;
use super::service::{ProxyService, classify_verdict};
use crate::proxy::http::body::{RequestBody, ResponseBody};
use crate::proxy::http::local_replies::{self, ProxyErrorType, ReplyStyle};
use crate::proxy::http::rate_limit_headers;
use crate::proxy::http::request_validation::RequestValidationError;
use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version,
    header, request,
};
use tokio::time::Instant;

/// The status that a refusal would have from the proxy itself.
static ORIGINAL_STATUS: HeaderName = HeaderName::from_static("x-tidegate-status");

const NGINX_PATH: &str = "/check/nginx";
const TRAEFIK_PATH: &str = "/check/traefik";
/// The path of the request stands behind it.
const ENVOY_PATH_PREFIX: &str = "/check/envoy";

/// They are about the question, not about the request that it is about.
static AUTH_REQUEST_HEADERS: [HeaderName; 8] = [
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::EXPECT,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
];

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AuthProxyKind {
    Nginx,
    Traefik,
    Envoy,
}

/// Why a question can't be understood: whoever set up the proxy that asks has to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum AuthRequestError {
    #[error("ask /check/nginx, /check/traefik or /check/envoy/PATH")]
    UnknownPath,
    #[error("the header {0} must be there, once")]
    HeaderMissing(&'static str),
    #[error("the header {0} can't be read")]
    HeaderInvalid(&'static str),
    #[error("the header host differs from the host that is asked")]
    HostMismatch,
    /// What the client has sent, and the proxy let through.
    #[error("the target can't be read")]
    TargetInvalid,
}

impl ProxyService {
    /// Answers 200 if the request may pass, else what the proxy itself would answer.
    pub(super) async fn check_authorization(
        &self,
        request: Request<RequestBody>,
        peer: &ConnectionPeer,
    ) -> Response<ResponseBody> {
        let arrived = Instant::now();
        let (mut parts, body) = request.into_parts();
        body.discard();
        let rules = self.enforcer.policy_snapshot();
        let table = &*rules.table;
        let style = ReplyStyle::from_request(&parts, &table.cors).without_grpc();
        let proxy_kind = match AuthProxyKind::from_path(parts.uri.path()) {
            Ok(asker) => asker,
            Err(unclear) => return reject_auth_request(unclear, peer),
        };
        let inbound = match restore_original_request(&mut parts, proxy_kind) {
            Ok(()) => self.read_request(&mut parts, peer, table, style),
            Err(AuthRequestError::TargetInvalid) => Err(local_replies::build_inbound_error(
                RequestValidationError::Target.into(),
                style,
            )
            .into()),
            Err(unclear) => return reject_auth_request(unclear, peer),
        };
        let inbound = match inbound {
            Ok(inbound) => inbound,
            Err(reply) => {
                let reply =
                    self.reject_unreadable(&parts, RequestBody::default(), peer, *reply, arrived);
                return self.translate_denial(reply, proxy_kind);
            }
        };
        // The peer's certificate is that of the proxy that asks.
        let facts = inbound.facts(&parts, None);
        let verdict = self.enforcer.decide(&rules, &facts, arrived).await;
        let decided_at = verdict.decided_at.unwrap_or(arrived);
        self.metrics
            .record_request_decision(classify_verdict(&verdict));
        if inbound.token_error().is_some() {
            self.metrics.record_rejected_token();
        }
        let (target, client) = inbound.into_target_and_client();
        let refusal =
            match local_replies::build_rejection(&verdict, table.rate_limit_headers, style) {
                Some(refusal) => Some(refusal),
                // Its turn comes as it does in the proxy.
                None => {
                    let admission = self.upstream.delay_request(verdict.delay, decided_at).await;
                    admission.err().map(|_full| {
                        local_replies::build_proxy_error(ProxyErrorType::QueueFull, style)
                    })
                }
            };
        let status = refusal.as_ref().map_or(StatusCode::OK, Response::status);
        let mut request_summary = self.summarize_request(&parts, target, client, arrived);
        self.log_request(&mut request_summary, &verdict, status, Instant::now());
        self.metrics
            .record_response(status.as_u16(), arrived.elapsed());
        match refusal {
            Some(refusal) => self.translate_denial(refusal.map(ResponseBody::Full), proxy_kind),
            None => {
                let mut allowed = Response::new(ResponseBody::Empty);
                rate_limit_headers::write_headers(
                    &verdict,
                    table.rate_limit_headers,
                    allowed.headers_mut(),
                );
                allowed
            }
        }
    }

    /// A refusal with the status that whoever asks understands.
    fn translate_denial(
        &self,
        mut denial: Response<ResponseBody>,
        proxy_kind: AuthProxyKind,
    ) -> Response<ResponseBody> {
        let status = denial.status();
        denial
            .headers_mut()
            .insert(&ORIGINAL_STATUS, HeaderValue::from(status.as_u16()));
        let client_status = self.denied_status.or(match proxy_kind {
            // To Envoy, these mean that it wasn't told: `failure_mode_allow` would let pass what is refused. Both say
            // that it may be tried again.
            AuthProxyKind::Envoy if status.is_server_error() => Some(StatusCode::TOO_MANY_REQUESTS),
            AuthProxyKind::Nginx | AuthProxyKind::Traefik | AuthProxyKind::Envoy => None,
        });
        *denial.status_mut() = client_status.unwrap_or(status);
        denial
    }
}

fn reject_auth_request(unclear: AuthRequestError, peer: &ConnectionPeer) -> Response<ResponseBody> {
    /// Once is enough: it is all of them, or none.
    static WARNED: std::sync::Once = std::sync::Once::new();
    WARNED.call_once(|| {
        tracing::warn!(%unclear, peer = %peer.addr, "a question can't be understood: is the proxy in front set up as docs/ENVOY.md says?");
    });
    let mut response = Response::new(ResponseBody::Full(Bytes::from(format!("{unclear}\n"))));
    *response.status_mut() = if unclear == AuthRequestError::UnknownPath {
        StatusCode::NOT_FOUND
    } else {
        StatusCode::BAD_REQUEST
    };
    response
}

impl AuthProxyKind {
    fn from_path(path: &str) -> Result<Self, AuthRequestError> {
        match path {
            NGINX_PATH => Ok(Self::Nginx),
            TRAEFIK_PATH => Ok(Self::Traefik),
            _ => {
                let rest = path
                    .strip_prefix(ENVOY_PATH_PREFIX)
                    .filter(|rest| rest.starts_with('/'));
                rest.map(|_| Self::Envoy)
                    .ok_or(AuthRequestError::UnknownPath)
            }
        }
    }
}

/// Makes of the head of a question that of the request which it is about.
fn restore_original_request(
    parts: &mut request::Parts,
    proxy_kind: AuthProxyKind,
) -> Result<(), AuthRequestError> {
    if let Some(authority) = parts.uri.authority() {
        match parts.headers.get(header::HOST) {
            Some(host)
                if !host
                    .as_bytes()
                    .eq_ignore_ascii_case(authority.as_str().as_bytes()) =>
            {
                return Err(AuthRequestError::HostMismatch);
            }
            Some(_) => {}
            None => {
                let host = HeaderValue::from_str(authority.as_str())
                    .map_err(|_odd| AuthRequestError::HostMismatch)?;
                parts.headers.insert(header::HOST, host);
            }
        }
    }
    let (target, method) = match proxy_kind {
        AuthProxyKind::Nginx => {
            let target = single_header(&parts.headers, "x-original-uri")?;
            (
                target,
                single_header(&parts.headers, "x-original-method")
                    .and_then(parse_method("x-original-method"))?,
            )
        }
        AuthProxyKind::Traefik => {
            let target = single_header(&parts.headers, "x-forwarded-uri")?;
            let host = single_header(&parts.headers, "x-forwarded-host")?;
            parts.headers.insert(header::HOST, host);
            (
                target,
                single_header(&parts.headers, "x-forwarded-method")
                    .and_then(parse_method("x-forwarded-method"))?,
            )
        }
        AuthProxyKind::Envoy => {
            let check_path = parts.uri.path_and_query().map_or("", PathAndQuery::as_str);
            let target = check_path
                .strip_prefix(ENVOY_PATH_PREFIX)
                .unwrap_or_default();
            let target = HeaderValue::from_bytes(target.as_bytes())
                .map_err(|_odd| AuthRequestError::TargetInvalid)?;
            (target, parts.method.clone())
        }
    };
    // Its begin would be the path here, and all of it to an app that knows no fragments.
    if target.as_bytes().contains(&b'#') {
        return Err(AuthRequestError::TargetInvalid);
    }
    // Like a request line: a path, or a URL.
    parts.uri = Uri::from_maybe_shared(Bytes::copy_from_slice(target.as_bytes()))
        .map_err(|_invalid| AuthRequestError::TargetInvalid)?;
    parts.method = method;
    parts.version = Version::HTTP_11;
    for name in &AUTH_REQUEST_HEADERS {
        parts.headers.remove(name);
    }
    Ok(())
}

fn single_header(headers: &HeaderMap, name: &'static str) -> Result<HeaderValue, AuthRequestError> {
    let mut values = headers.get_all(name).into_iter();
    match (values.next(), values.next()) {
        (Some(value), None) => Ok(value.clone()),
        _ => Err(AuthRequestError::HeaderMissing(name)),
    }
}

fn parse_method(name: &'static str) -> impl Fn(HeaderValue) -> Result<Method, AuthRequestError> {
    move |value| {
        Method::from_bytes(value.as_bytes())
            .map_err(|_invalid| AuthRequestError::HeaderInvalid(name))
    }
}
