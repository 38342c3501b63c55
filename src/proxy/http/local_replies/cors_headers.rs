//! CORS headers of local replies (Fetch standard, "CORS protocol").

use http::{HeaderMap, HeaderValue, header};

use crate::policy::CorsOrigins;
use crate::proxy::http::hop_by_hop::list_elements;

/// The fields with the client's quota.
const RATE_LIMIT_FIELDS: [&str; 5] = [
    "RateLimit",
    "RateLimit-Policy",
    "X-RateLimit-Limit",
    "X-RateLimit-Remaining",
    "X-RateLimit-Reset",
];

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
    pub(super) fn from_origin(origin: Option<&'t HeaderValue>, origins: &'t CorsOrigins) -> Self {
        if origins.is_empty() {
            return Self::NotConfigured;
        }
        origin
            .and_then(|origin| origins.match_origin(origin))
            .map_or(Self::NotAllowed, Self::Allowed)
    }

    /// Lets scripts of an allowed origin read the rate-limit fields of the upstream's response.
    /// Keeps what the upstream exposes; whether the response may be read at all is its decision.
    /// A cache must not serve the response to another origin, whether that one is allowed or not.
    pub(super) fn expose_rate_limit_fields(self, headers: &mut HeaderMap) {
        if self == Self::NotConfigured {
            return;
        }
        let own = headers.get_all(header::ACCESS_CONTROL_EXPOSE_HEADERS);
        let mut exposed: Vec<&str> = own.iter().filter_map(|line| line.to_str().ok()).collect();
        let is_exposed = |name: &str| {
            let mut names = exposed.iter().flat_map(|line| line.split(','));
            names.any(|exposed| exposed.trim().eq_ignore_ascii_case(name))
        };
        let added = RATE_LIMIT_FIELDS.into_iter();
        let added: Vec<_> = added
            .filter(|name| headers.contains_key(*name) && !is_exposed(name))
            .collect();
        if added.is_empty() {
            return;
        }
        exposed.extend(added);
        let exposed = HeaderValue::try_from(exposed.join(", "));
        add_vary_origin(headers);
        if let (Self::Allowed(_), Ok(exposed)) = (self, exposed) {
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
        }
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
        add_vary_origin(headers);
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

/// States that the response depends on the origin of the request, unless it does already.
fn add_vary_origin(headers: &mut HeaderMap) {
    let lines = headers.get_all(header::VARY).iter();
    let is_origin = |field: &[u8]| field == b"*" || field.eq_ignore_ascii_case(b"origin");
    if !lines.flat_map(list_elements).any(is_origin) {
        headers.append(header::VARY, HeaderValue::from_static("Origin"));
    }
}
