//! CORS headers of local replies (Fetch standard, "CORS protocol").

use crate::policy::CorsOrigins;
use http::{HeaderMap, HeaderValue, header};

/// Whether a browser script of the request's origin may read a local reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CorsDecision<'t> {
    /// No origins are configured; local replies have no CORS headers.
    NotConfigured,
    /// The request has no `Origin` header, or an origin that is not configured.
    NotAllowed,
    /// The origin has access. Contains the value of `Access-Control-Allow-Origin`: the origin or
    /// `*`.
    Allowed(&'t HeaderValue),
}

impl<'t> CorsDecision<'t> {
    /// Looks up the request's `Origin` in the configured origins.
    pub(super) fn from_request(headers: &HeaderMap, origins: &'t CorsOrigins) -> Self {
        if origins.is_empty() {
            return Self::NotConfigured;
        }
        headers
            .get(header::ORIGIN)
            .and_then(|origin| origins.match_origin(origin))
            .map_or(Self::NotAllowed, Self::Allowed)
    }

    /// Adds the CORS headers of the decision, unless the reply already has
    /// `Access-Control-Allow-Origin`.
    pub(super) fn write_headers(self, headers: &mut HeaderMap) {
        const EXPOSED_HEADERS: HeaderValue = HeaderValue::from_static(
            "Retry-After, RateLimit, RateLimit-Policy, X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset, \
             Proxy-Status, Grpc-Status, Grpc-Message",
        );
        // CORS headers from a policy's custom response take precedence.
        if self == Self::NotConfigured || headers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN)
        {
            return;
        }
        headers.append(header::VARY, HeaderValue::from_static("Origin"));
        let Self::Allowed(origin) = self else { return };
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED_HEADERS);
        if origin != "*" {
            // Requests with credentials need this header; browsers do not accept it together with
            // `*`.
            headers.insert(
                header::ACCESS_CONTROL_ALLOW_CREDENTIALS,
                HeaderValue::from_static("true"),
            );
        }
    }
}
