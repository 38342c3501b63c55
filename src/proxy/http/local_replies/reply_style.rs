//! Format of a local reply, chosen from the request head.

use http::{HeaderMap, HeaderValue, Method, Version, header, request};

use crate::policy::CorsOrigins;
use crate::proxy::http::header_lines::{header_values, list_elements};

/// Prefix of all media types of gRPC.
const GRPC_MEDIA_TYPE_PREFIX: &[u8] = b"application/grpc";

/// Properties of a request that determine the format of a local reply. They are read before
/// validation changes the request head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReplyStyle<'t> {
    pub(crate) format: ReplyFormat,
    pub(crate) is_head_request: bool,
    /// The client's HTTP version; validation replaces the version in the request head.
    pub(crate) version: Version,
    pub(crate) cors: CorsDecision<'t>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyFormat {
    Json,
    Text,
    Grpc,
}

impl<'t> ReplyStyle<'t> {
    /// Reads the style from a request head, which validation must not have changed yet. `origin` is
    /// a copy of its `Origin`, which a reply may repeat.
    pub(crate) fn from_request(
        parts: &request::Parts,
        origin: Option<&'t HeaderValue>,
        cors: &'t CorsOrigins,
    ) -> Self {
        let is_grpc = header_values(&parts.headers, &header::CONTENT_TYPE)
            .next()
            .and_then(|media_type| media_type.as_bytes().get(..GRPC_MEDIA_TYPE_PREFIX.len()))
            .is_some_and(|prefix| prefix.eq_ignore_ascii_case(GRPC_MEDIA_TYPE_PREFIX));
        let format = if is_grpc {
            ReplyFormat::Grpc
        } else if prefers_plain_text(&parts.headers) {
            ReplyFormat::Text
        } else {
            ReplyFormat::Json
        };
        Self {
            format,
            is_head_request: parts.method == Method::HEAD,
            version: parts.version,
            cors: CorsDecision::from_origin(origin, cors),
        }
    }

    /// Replaces the gRPC format with JSON, for clients that read the HTTP status: gRPC errors have
    /// HTTP status 200.
    pub(crate) fn replace_grpc_with_json(mut self) -> Self {
        if self.format == ReplyFormat::Grpc {
            self.format = ReplyFormat::Json;
        }
        self
    }
}

/// Whether `Accept` prefers plain text to JSON. `false` if `Accept` is absent, malformed or
/// neutral.
fn prefers_plain_text(headers: &HeaderMap) -> bool {
    // The specificity of the most specific matching range (RFC 9110, 12.5.1), and its weight.
    let (mut text, mut json) = ((0, 0), (0, 0));
    for line in header_values(headers, &header::ACCEPT) {
        let Ok(line) = line.to_str() else {
            return false;
        };
        if line == "*/*" {
            text = text.max((1, 1000));
            json = json.max((1, 1000));
            continue;
        }
        for element in line.split(',') {
            let mut pieces = element.split(';').map(str::trim);
            let range = pieces.next().unwrap_or("");
            let weight = pieces.find_map(|piece| piece.strip_prefix(['q', 'Q'])?.strip_prefix('='));
            let Some(weight) = weight.map_or(Some(1000), parse_qvalue) else {
                return false;
            };
            let is_range = |name: &str| range.eq_ignore_ascii_case(name);
            if is_range("text/plain") {
                text = text.max((3, weight));
            } else if is_range("application/problem+json") || is_range("application/json") {
                json = json.max((3, weight));
            } else if is_range("text/*") {
                text = text.max((2, weight));
            } else if is_range("application/*") {
                json = json.max((2, weight));
            } else if is_range("*/*") {
                text = text.max((1, weight));
                json = json.max((1, weight));
            }
        }
    }
    text.1 > json.1
}

/// Parses a weight from 0 to 1 with at most three decimal places. Returns thousandths.
fn parse_qvalue(text: &str) -> Option<u16> {
    let (whole, places) = text.split_once('.').unwrap_or((text, ""));
    if !matches!(whole, "0" | "1")
        || places.len() > 3
        || !places.bytes().all(|b| b.is_ascii_digit())
    {
        return None;
    }
    let weight = format!("{whole}{places:0<3}").parse().ok()?;
    (weight <= 1000).then_some(weight)
}

/// The fields with the client's quota.
const RATE_LIMIT_FIELDS: [&str; 6] = [
    "RateLimit",
    "RateLimit-Policy",
    "X-RateLimit-Limit",
    "X-RateLimit-Remaining",
    "X-RateLimit-Reset",
    "X-Tidegate-Notify",
];

/// Whether a browser script of the request's origin may read a local reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CorsDecision<'t> {
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
    pub(crate) fn from_origin(origin: Option<&'t HeaderValue>, origins: &'t CorsOrigins) -> Self {
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
    pub(crate) fn expose_rate_limit_fields(self, headers: &mut HeaderMap) {
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
    pub(crate) fn write_headers(self, headers: &mut HeaderMap) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn style_for_headers(fields: &[(&str, &str)]) -> ReplyStyle<'static> {
        static NO_CORS: std::sync::LazyLock<CorsOrigins> =
            std::sync::LazyLock::new(CorsOrigins::default);
        let mut builder = http::Request::get("/");
        for (name, value) in fields {
            builder = builder.header(*name, *value);
        }
        ReplyStyle::from_request(&builder.body(()).unwrap().into_parts().0, None, &NO_CORS)
    }

    #[test]
    fn the_format_follows_accept() {
        for (accept, format) in [
            ("*/*", ReplyFormat::Json),
            ("", ReplyFormat::Json),
            ("text/plain", ReplyFormat::Text),
            ("text/html", ReplyFormat::Json),
            (
                "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
                ReplyFormat::Json,
            ),
            ("application/json, text/plain", ReplyFormat::Json),
            (
                "application/json;q=0.5, text/plain;q=0.51",
                ReplyFormat::Text,
            ),
            (
                "TEXT/Plain ; Q=0.9, application/problem+json; q=0.899",
                ReplyFormat::Text,
            ),
            ("text/plain, */*;q=0.1", ReplyFormat::Text),
            ("*/*, text/plain;q=0.1", ReplyFormat::Json),
            ("text/plain, application/*;q=0.2", ReplyFormat::Text),
            ("text/*, application/json;q=0.9", ReplyFormat::Text),
            ("text/plain;q=0", ReplyFormat::Json),
            ("text/plain;q=2", ReplyFormat::Json),
            ("text/plain;q=0.0001", ReplyFormat::Json),
            ("text/plain;q=x", ReplyFormat::Json),
        ] {
            assert_eq!(
                style_for_headers(&[("accept", accept)]).format,
                format,
                "{accept}"
            );
        }
        assert_eq!(style_for_headers(&[]).format, ReplyFormat::Json);
        let lines = [
            ("accept", "application/json;q=0.1"),
            ("accept", "text/plain"),
        ];
        assert_eq!(style_for_headers(&lines).format, ReplyFormat::Text);
        let grpc = [
            ("content-type", "Application/grpc+proto"),
            ("accept", "text/plain"),
        ];
        assert_eq!(style_for_headers(&grpc).format, ReplyFormat::Grpc);
    }

    proptest! {
        #[test]
        fn any_accept_header_is_parsed_without_panic(accept in prop::collection::vec(any::<u8>(), 0..40)) {
            let Ok(accept) = HeaderValue::from_bytes(&accept) else { return Ok(()) };
            prefers_plain_text(&HeaderMap::from_iter([(header::ACCEPT, accept)]));
        }
    }
}
