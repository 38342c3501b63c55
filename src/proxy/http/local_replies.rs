//! Local replies: every response that the proxy generates itself, with its public text.
//!
//! The body is JSON problem details (RFC 9457), or plain text if the client prefers it. gRPC
//! clients get a status without a body. A local reply never echoes request data.

use super::headers::integer_header_value;
use super::inbound_request::InboundRequestError;
use super::rate_limit_headers;
use super::request_validation::RequestValidationError;
use crate::enforcer::{LimitRejection, RequestOutcome, RetryHint, Verdict};
use crate::policy::{CorsOrigins, RateLimitHeaderSettings, RejectResponse};
use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Version, header, request,
};

static PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");
static GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
static GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// Prefix of all media types of gRPC.
const GRPC_MEDIA_TYPE: &[u8] = b"application/grpc";
/// Header count of a typical rejection. Reserving it once is cheaper than growing the map.
const TYPICAL_HEADER_COUNT: usize = 10;
const ABOUT_BLANK: &str = "about:blank";
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str =
    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

/// Properties of a request that determine the format of a local reply. Must be read before the
/// request is forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proxy) struct ReplyStyle<'t> {
    format: ReplyFormat,
    is_head_request: bool,
    version: Version,
    cors: CorsDecision<'t>,
}

/// Access of a browser script from the request's origin to a local reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CorsDecision<'t> {
    /// No origins are configured; local replies have no CORS headers.
    NotConfigured,
    Refused,
    Allowed(&'t HeaderValue),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplyFormat {
    Json,
    Text,
    Grpc,
}

/// Public kind of a failure of the upstream, of a body or of the request's deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proxy) enum ProxyErrorType {
    ConnectRefused,
    ConnectTimeout,
    DnsError,
    TlsError,
    /// The connection ended before a response.
    ConnectionTerminated,
    /// The upstream's response is not valid.
    ProtocolError,
    /// The upstream's HTTP version or settings do not allow WebSockets.
    UpgradeFailed,
    ResponseTimeout,
    /// The `max_duration` of a limit has elapsed.
    MaxDurationExceeded,
    /// No upstream connection became free in time, or too many requests are waiting for one.
    QueueFull,
    /// The request body is larger than allowed.
    BodyTooLarge,
    /// The request body did not arrive in time.
    BodyTimeout,
    /// The request body has invalid framing or is incomplete.
    BodyInvalid,
    /// The request has more headers than allowed.
    TooManyHeaders,
}

impl<'t> ReplyStyle<'t> {
    /// Reads the head of a request before validation changes it.
    pub(in crate::proxy) fn from_request(parts: &request::Parts, cors: &'t CorsOrigins) -> Self {
        let grpc = parts
            .headers
            .get(header::CONTENT_TYPE)
            .and_then(|kind| kind.as_bytes().get(..GRPC_MEDIA_TYPE.len()))
            .is_some_and(|kind| kind.eq_ignore_ascii_case(GRPC_MEDIA_TYPE));
        let format = match grpc {
            true => ReplyFormat::Grpc,
            false if prefers_text(&parts.headers) => ReplyFormat::Text,
            false => ReplyFormat::Json,
        };
        let cors = if cors.is_empty() {
            CorsDecision::NotConfigured
        } else {
            cors.allowed_origin(&parts.headers)
                .map_or(CorsDecision::Refused, CorsDecision::Allowed)
        };
        Self {
            format,
            is_head_request: parts.method == Method::HEAD,
            version: parts.version,
            cors,
        }
    }

    /// Replaces the gRPC format with JSON, for callers that read the HTTP status: gRPC errors have
    /// status 200.
    pub(in crate::proxy) fn without_grpc(self) -> Self {
        match self.format {
            ReplyFormat::Grpc => Self {
                format: ReplyFormat::Json,
                ..self
            },
            ReplyFormat::Json | ReplyFormat::Text => self,
        }
    }
}

/// Builds the reply to a request that the verdict rejects, with rate-limit headers. Returns `None`
/// if the request is to be forwarded.
pub(in crate::proxy) fn build_rejection(
    verdict: &Verdict<'_>,
    header_settings: RateLimitHeaderSettings,
    style: ReplyStyle<'_>,
) -> Option<Response<Bytes>> {
    let mut response = match &verdict.outcome {
        RequestOutcome::Forward => return None,
        RequestOutcome::Limited(limited) => build_limit_rejection(limited, style),
        RequestOutcome::Denied { policy, reject } => {
            let problem = ProblemReply {
                grpc_status: 7,
                policy: Some(policy),
                ..ProblemReply::new(
                    StatusCode::FORBIDDEN,
                    "http_request_denied",
                    format!("Policy \"{policy}\" denies this request."),
                )
            };
            problem.to_custom_response(*reject, style)
        }
        RequestOutcome::InvalidKey { policy, fault } => {
            let detail =
                format!("Policy \"{policy}\" cannot determine the quota of this request: {fault}.");
            let problem = ProblemReply::new(StatusCode::BAD_REQUEST, "http_request_error", detail);
            ProblemReply {
                policy: Some(policy),
                ..problem
            }
            .to_response(style)
        }
        RequestOutcome::Unavailable {
            policy,
            retry_after_us,
        } => {
            let detail = format!("Policy \"{policy}\" cannot be evaluated at the moment.");
            ProblemReply {
                type_uri: REDUCED_CAPACITY,
                policy: Some(policy),
                retry: Some(RetryHint::After(*retry_after_us)),
                ..ProblemReply::new(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "proxy_internal_error",
                    detail,
                )
            }
            .to_response(style)
        }
    };
    rate_limit_headers::write_headers(verdict, header_settings, response.headers_mut());
    Some(response)
}

/// Builds the reply to a request that failed validation. An HTTP/1 connection closes after it.
pub(in crate::proxy) fn build_inbound_error(
    fault: InboundRequestError,
    style: ReplyStyle<'_>,
) -> Response<Bytes> {
    let status = match fault {
        InboundRequestError::Validation(fault) => fault.status(),
        InboundRequestError::Path(_) | InboundRequestError::RepeatedTokenHeader => {
            StatusCode::BAD_REQUEST
        }
    };
    let problem = ProblemReply::new(
        status,
        "http_request_error",
        to_sentence(&fault.to_string()),
    );
    let mut response = problem.to_response(style);
    set_connection_close(&mut response, style);
    if fault == InboundRequestError::Validation(RequestValidationError::Connect) {
        let allowed =
            HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, TRACE");
        response.headers_mut().insert(header::ALLOW, allowed);
    }
    response
}

/// Builds the reply to a request that could not be forwarded or completed.
pub(in crate::proxy) fn build_proxy_error(
    error_type: ProxyErrorType,
    style: ReplyStyle<'_>,
) -> Response<Bytes> {
    let (status, error, detail) = error_type.reply_parts();
    let mut problem = ProblemReply::new(status, error, detail.to_owned());
    if error_type == ProxyErrorType::QueueFull {
        problem.type_uri = REDUCED_CAPACITY;
        problem.retry = Some(RetryHint::After(1_000_000));
    }
    let mut response = problem.to_response(style);
    if matches!(
        error_type,
        ProxyErrorType::BodyTooLarge | ProxyErrorType::BodyTimeout | ProxyErrorType::BodyInvalid
    ) {
        // The unread rest of the body precedes the next request on the connection.
        set_connection_close(&mut response, style);
    }
    response
}

impl ProxyErrorType {
    /// Returns the status, the `Proxy-Status` error type (RFC 9209, 2.3) and the detail text.
    fn reply_parts(self) -> (StatusCode, &'static str, &'static str) {
        use StatusCode as S;
        match self {
            Self::ConnectRefused => (
                S::BAD_GATEWAY,
                "connection_refused",
                "The upstream does not accept connections.",
            ),
            Self::ConnectTimeout => (
                S::GATEWAY_TIMEOUT,
                "connection_timeout",
                "The upstream did not accept a connection in time.",
            ),
            Self::DnsError => (
                S::BAD_GATEWAY,
                "dns_error",
                "The upstream's name could not be resolved.",
            ),
            Self::TlsError => (
                S::BAD_GATEWAY,
                "tls_protocol_error",
                "No secure connection to the upstream could be made.",
            ),
            Self::ConnectionTerminated => (
                S::BAD_GATEWAY,
                "connection_terminated",
                "The upstream closed the connection without a response.",
            ),
            Self::ProtocolError => (
                S::BAD_GATEWAY,
                "http_protocol_error",
                "The upstream sent a response that is not valid.",
            ),
            Self::UpgradeFailed => (
                S::BAD_GATEWAY,
                "http_upgrade_failed",
                "The upstream does not support WebSockets over HTTP/2.",
            ),
            Self::ResponseTimeout => (
                S::GATEWAY_TIMEOUT,
                "connection_read_timeout",
                "The upstream did not respond in time.",
            ),
            Self::MaxDurationExceeded => (
                S::GATEWAY_TIMEOUT,
                "http_response_timeout",
                "The request took longer than its policy allows.",
            ),
            Self::QueueFull => (
                S::SERVICE_UNAVAILABLE,
                "connection_limit_reached",
                "Too many requests are waiting, or no connection to the upstream became free in time.",
            ),
            Self::BodyTooLarge => (
                S::PAYLOAD_TOO_LARGE,
                "http_request_error",
                "The request body is larger than allowed.",
            ),
            Self::BodyTimeout => (
                S::REQUEST_TIMEOUT,
                "http_request_error",
                "The request body did not arrive in time.",
            ),
            Self::BodyInvalid => (
                S::BAD_REQUEST,
                "http_request_error",
                "The request body is not valid HTTP or is incomplete.",
            ),
            Self::TooManyHeaders => (
                S::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "http_request_error",
                "The request has more headers than allowed.",
            ),
        }
    }
}

fn build_limit_rejection(limited: &LimitRejection<'_>, style: ReplyStyle<'_>) -> Response<Bytes> {
    let policy = limited.policy;
    let detail = match (limited.retry, limited.retry.retry_after_s()) {
        (RetryHint::Unknown, _) => {
            format!(
                "Policy \"{policy}\" has no free slot for this request. It is not known when one becomes free."
            )
        }
        (_, Some(seconds)) => {
            let mut buffer = itoa::Buffer::new();
            [
                "Over the limit of policy \"",
                policy,
                "\". Try again in ",
                buffer.format(seconds),
                " s.",
            ]
            .concat()
        }
        (_, None) => format!(
            "Policy \"{policy}\" never allows this request: its cost is more than the limit. Retrying will not help."
        ),
    };
    let mut response = ProblemReply {
        type_uri: QUOTA_EXCEEDED,
        title: "Quota Exceeded",
        grpc_status: 8,
        policy: Some(policy),
        violated: &limited.violated_limits,
        retry: Some(limited.retry),
        ..ProblemReply::new(StatusCode::TOO_MANY_REQUESTS, "http_request_error", detail)
    }
    .to_custom_response(limited.reject, style);
    if limited.retry == RetryHint::Never {
        // Removes a `Retry-After` from the policy's custom headers too: no retry can succeed.
        response.headers_mut().remove(header::RETRY_AFTER);
    }
    response
}

impl CorsDecision<'_> {
    fn write_headers(self, headers: &mut HeaderMap) {
        const EXPOSED: HeaderValue = HeaderValue::from_static(
            "Retry-After, RateLimit, RateLimit-Policy, X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset, \
             Proxy-Status, Grpc-Status, Grpc-Message",
        );
        // A policy's custom headers take precedence.
        if self == Self::NotConfigured || headers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN)
        {
            return;
        }
        headers.append(header::VARY, HeaderValue::from_static("Origin"));
        let Self::Allowed(origin) = self else { return };
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        if origin != "*" {
            // Requests with credentials need this; browsers do not accept it together with "*".
            headers.insert(
                header::ACCESS_CONTROL_ALLOW_CREDENTIALS,
                HeaderValue::from_static("true"),
            );
        }
    }
}

struct ProblemReply<'a> {
    status: StatusCode,
    type_uri: &'static str,
    title: &'static str,
    detail: String,
    /// Error type in `Proxy-Status` (RFC 9209, 2.3).
    error: &'static str,
    grpc_status: u8,
    policy: Option<&'a str>,
    violated: &'a [&'a str],
    retry: Option<RetryHint>,
}

impl<'a> ProblemReply<'a> {
    fn new(status: StatusCode, error: &'static str, detail: String) -> Self {
        Self {
            status,
            type_uri: ABOUT_BLANK,
            title: status.canonical_reason().unwrap_or("Error"),
            detail,
            error,
            grpc_status: grpc_status_from_http(status),
            policy: None,
            violated: &[],
            retry: None,
        }
    }

    fn to_response(&self, style: ReplyStyle<'_>) -> Response<Bytes> {
        self.to_custom_response(None, style)
    }

    /// Builds the response from the policy's custom rejection, or from the problem if it is `None`.
    fn to_custom_response(
        &self,
        reject: Option<&RejectResponse>,
        style: ReplyStyle<'_>,
    ) -> Response<Bytes> {
        let mut response = match (style.format, reject) {
            (ReplyFormat::Grpc, _) => self.to_grpc_response(),
            (_, Some(reject)) => {
                let content_type = reject.content_type.clone();
                response_with_body(reject.status, content_type, reject.body.clone(), style)
            }
            (ReplyFormat::Json, None) => {
                let content_type = HeaderValue::from_static("application/problem+json");
                response_with_body(self.status, content_type, self.to_json().into(), style)
            }
            (ReplyFormat::Text, None) => {
                let content_type = HeaderValue::from_static("text/plain; charset=utf-8");
                response_with_body(
                    self.status,
                    content_type,
                    format!("{}\n{}\n", self.title, self.detail).into(),
                    style,
                )
            }
        };
        let headers = response.headers_mut();
        for (name, value) in reject.map_or(&[][..], |reject| &reject.headers) {
            headers.append(name, value.clone());
        }
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(seconds) = self.retry.and_then(RetryHint::retry_after_s) {
            headers.insert(header::RETRY_AFTER, integer_header_value(seconds));
        }
        if let Ok(status) = HeaderValue::try_from(["tidegate; error=", self.error].concat()) {
            headers.insert(&PROXY_STATUS, status);
        }
        style.cors.write_headers(headers);
        response
    }

    /// Builds a gRPC Trailers-Only response: the status is in the headers and there is no body.
    fn to_grpc_response(&self) -> Response<Bytes> {
        let mut response = Response::new(Bytes::new());
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/grpc"),
        );
        headers.insert(&GRPC_STATUS, HeaderValue::from(u16::from(self.grpc_status)));
        if let Ok(message) = HeaderValue::try_from(percent_encode(&self.detail)) {
            headers.insert(&GRPC_MESSAGE, message);
        }
        response
    }

    fn to_json(&self) -> String {
        let mut out = String::with_capacity(320);
        // Type and title are constants without characters to escape.
        for piece in [
            "{\"type\":\"",
            self.type_uri,
            "\",\"title\":\"",
            self.title,
            "\",\"status\":",
        ] {
            out.push_str(piece);
        }
        out.push_str(self.status.as_str());
        out.push_str(",\"detail\":");
        push_json_string(&mut out, &self.detail);
        if let Some(policy) = self.policy {
            out.push_str(",\"policy\":");
            push_json_string(&mut out, policy);
        }
        for (index, name) in self.violated.iter().enumerate() {
            out.push_str(if index == 0 {
                ",\"violated-policies\":["
            } else {
                ","
            });
            push_json_string(&mut out, name);
        }
        if !self.violated.is_empty() {
            out.push(']');
        }
        if let Some(RetryHint::After(retry_after_us)) = self.retry {
            out.push_str(",\"retry_after\":");
            push_seconds(&mut out, retry_after_us);
        }
        out.push('}');
        out
    }
}

fn response_with_body(
    status: StatusCode,
    content_type: HeaderValue,
    body: Bytes,
    style: ReplyStyle<'_>,
) -> Response<Bytes> {
    let mut response = Response::new(Bytes::new());
    response.headers_mut().reserve(TYPICAL_HEADER_COUNT);
    *response.status_mut() = status;
    let may_have_body = !matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    if may_have_body {
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, content_type);
        // Set explicitly because a response to HEAD has the length but no body.
        headers.insert(header::CONTENT_LENGTH, integer_header_value(body.len()));
        if !style.is_head_request {
            *response.body_mut() = body;
        }
    }
    response
}

/// Sets `Connection: close`, except for HTTP/2, where only the stream ends.
fn set_connection_close(response: &mut Response<Bytes>, style: ReplyStyle<'_>) {
    if style.version != Version::HTTP_2 {
        response
            .headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
}

/// Maps an HTTP status to a gRPC status code.
fn grpc_status_from_http(status: StatusCode) -> u8 {
    const INVALID_ARGUMENT: u8 = 3;
    const DEADLINE_EXCEEDED: u8 = 4;
    const RESOURCE_EXHAUSTED: u8 = 8;
    const UNIMPLEMENTED: u8 = 12;
    const UNAVAILABLE: u8 = 14;
    match status {
        StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => UNIMPLEMENTED,
        StatusCode::REQUEST_TIMEOUT | StatusCode::GATEWAY_TIMEOUT => DEADLINE_EXCEEDED,
        StatusCode::PAYLOAD_TOO_LARGE => RESOURCE_EXHAUSTED,
        status if status.is_client_error() => INVALID_ARGUMENT,
        _ => UNAVAILABLE,
    }
}

/// Appends decimal seconds with six places, exact where a float would round.
fn push_seconds(out: &mut String, us: u64) {
    let mut buffer = itoa::Buffer::new();
    out.push_str(buffer.format(us / 1_000_000));
    out.push('.');
    let fraction = buffer.format(us % 1_000_000);
    for _ in fraction.len()..6 {
        out.push('0');
    }
    out.push_str(fraction);
}

fn push_json_string(out: &mut String, text: &str) {
    let is_special = |byte| matches!(byte, b'"' | b'\\' | ..b' ');
    let mut rest = text;
    out.push('"');
    // Copies runs without special characters, usually the whole text, at once.
    while let Some((plain, special)) = rest
        .bytes()
        .position(is_special)
        .map(|at| rest.split_at(at))
    {
        out.push_str(plain);
        let mut chars = special.chars();
        match chars.next() {
            Some(quoted @ ('"' | '\\')) => out.extend(['\\', quoted]),
            control => {
                let code = control.map_or(0, u32::from);
                out.push_str("\\u00");
                out.extend([code >> 4, code & 15].map(hex_digit));
            }
        }
        rest = chars.as_str();
    }
    out.push_str(rest);
    out.push('"');
}

fn hex_digit(nibble: u32) -> char {
    char::from_digit(nibble, 16).map_or('0', |digit| digit.to_ascii_uppercase())
}

/// Percent-encodes a `grpc-message`: every byte except space and visible ASCII other than `%`.
fn percent_encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => out.push(char::from(byte)),
            _ => {
                out.push('%');
                out.extend([u32::from(byte) >> 4, u32::from(byte) & 15].map(hex_digit));
            }
        }
    }
    out
}

/// Capitalizes an error text and adds a full stop.
fn to_sentence(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .into_iter()
        .flat_map(char::to_uppercase)
        .chain(chars)
        .chain(['.'])
        .collect()
}

/// Whether `Accept` prefers plain text to JSON. `false` if it is absent, malformed or neutral.
fn prefers_text(headers: &HeaderMap) -> bool {
    let mut text = AcceptWeight::default();
    let mut json = AcceptWeight::default();
    for line in headers.get_all(header::ACCEPT) {
        let Ok(line) = line.to_str() else {
            return false;
        };
        for element in line.split(',') {
            let mut pieces = element.split(';').map(str::trim);
            let range = pieces.next().unwrap_or("");
            let weight = pieces.find_map(|piece| {
                piece
                    .strip_prefix("q=")
                    .or_else(|| piece.strip_prefix("Q="))
            });
            let Some(weight) = weight.map_or(Some(1000), parse_qvalue) else {
                return false;
            };
            let is_range = |name: &str| range.eq_ignore_ascii_case(name);
            if is_range("text/plain") {
                text.apply_range(3, weight);
            } else if is_range("application/problem+json") || is_range("application/json") {
                json.apply_range(3, weight);
            } else if is_range("text/*") {
                text.apply_range(2, weight);
            } else if is_range("application/*") {
                json.apply_range(2, weight);
            } else if is_range("*/*") {
                text.apply_range(1, weight);
                json.apply_range(1, weight);
            }
        }
    }
    text.weight > json.weight
}

/// Weight of a media type, taken from the most specific matching range (RFC 9110, 12.5.1).
#[derive(Default)]
struct AcceptWeight {
    specificity: u8,
    weight: u16,
}

impl AcceptWeight {
    fn apply_range(&mut self, specificity: u8, weight: u16) {
        if (specificity, weight) > (self.specificity, self.weight) {
            *self = Self {
                specificity,
                weight,
            };
        }
    }
}

/// Parses a weight from 0 to 1 with at most three places, in thousandths.
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

#[cfg(test)]
mod tests;
