//! Every answer that we make ourselves, and its public text.
//!
//! Problem details (RFC 9457) as JSON, or plain text for clients that rather have it; for gRPC a status
//! without a body. Nothing that a client sent gets into an answer.

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

/// What gRPC's media types begin with.
const GRPC_MEDIA_TYPE: &[u8] = b"application/grpc";
/// As many as a refusal has; room that is made piece by piece costs more than all of them.
const TYPICAL_HEADER_COUNT: usize = 10;
const ABOUT_BLANK: &str = "about:blank";
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str =
    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

/// How a client wants to be answered. Read it before the request is given away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proxy) struct ReplyStyle<'t> {
    format: ReplyFormat,
    is_head_request: bool,
    version: Version,
    cors: CorsDecision<'t>,
}

/// The script in a browser that may want to read an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CorsDecision<'t> {
    /// Nobody set up which may: no answer speaks of it.
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

/// What went wrong between us and the upstream, or with a body, as the client may know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proxy) enum ProxyErrorType {
    ConnectRefused,
    ConnectTimeout,
    DnsError,
    TlsError,
    /// The connection ended before a response.
    ConnectionTerminated,
    /// The upstream's response made no sense.
    ProtocolError,
    /// The upstream opens no WebSockets by the protocol that it speaks.
    UpgradeFailed,
    ResponseTimeout,
    /// A limit's `max_duration` is over.
    MaxDurationExceeded,
    /// No upstream connection became free in time, or too many requests wait for one.
    QueueFull,
    /// The request's body is larger than allowed.
    BodyTooLarge,
    /// The request's body stopped coming.
    BodyTimeout,
    /// The request's body is not framed as it should be.
    BodyInvalid,
    /// The request has more headers than allowed.
    TooManyHeaders,
}

impl<'t> ReplyStyle<'t> {
    /// Reads a request's head as it came, before the gate.
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

    /// For who goes by the status: gRPC says no with a 200.
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

/// The answer to a request that a verdict refuses, rate-limit fields included; `None` if it is to be forwarded.
pub(in crate::proxy) fn build_rejection(
    verdict: &Verdict<'_>,
    fields: RateLimitHeaderSettings,
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
                format!("Policy \"{policy}\" cannot tell whose quota this request uses: {fault}.");
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
            let detail = format!("Policy \"{policy}\" cannot be decided at the moment.");
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
    rate_limit_headers::write_headers(verdict, fields, response.headers_mut());
    Some(response)
}

/// The answer to a request that is refused before any policy sees it. The connection closes after it.
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

/// The answer when forwarding failed.
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
        // The rest of the body stands between us and the next request.
        set_connection_close(&mut response, style);
    }
    response
}

impl ProxyErrorType {
    /// Status, error of `Proxy-Status` (RFC 9209, 2.3), and text.
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
                "The upstream does not open WebSockets by HTTP/2.",
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
                "Too many requests wait, or no connection to the upstream became free in time.",
            ),
            Self::BodyTooLarge => (
                S::PAYLOAD_TOO_LARGE,
                "http_request_error",
                "The request's body is larger than allowed.",
            ),
            Self::BodyTimeout => (
                S::REQUEST_TIMEOUT,
                "http_request_error",
                "The request's body did not arrive in time.",
            ),
            Self::BodyInvalid => (
                S::BAD_REQUEST,
                "http_request_error",
                "The request's body is not valid HTTP, or broke off.",
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
                "Policy \"{policy}\" has no room for this request now, and nobody can tell when it will."
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
            "Policy \"{policy}\" never allows this request: it asks for more than the limit. Trying again will not help."
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
        // Not even the owner's: there is no time at which this request would be admitted.
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
        // An owner who says it in a policy's own headers knows better.
        if self == Self::NotConfigured || headers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN)
        {
            return;
        }
        headers.append(header::VARY, HeaderValue::from_static("Origin"));
        let Self::Allowed(origin) = self else { return };
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        if origin != "*" {
            // Scripts that send cookies could not read the answer otherwise; with "*" browsers forbid it.
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
    /// Of `Proxy-Status`.
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

    /// Makes the response, in the policy owner's words if there are any.
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

    /// A response of headers only, which is how gRPC says no.
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
        // Type and title are words of ours, in which nothing needs an escape.
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
        // Said here because a response to HEAD has it without the body.
        headers.insert(header::CONTENT_LENGTH, integer_header_value(body.len()));
        if !style.is_head_request {
            *response.body_mut() = body;
        }
    }
    response
}

/// HTTP/2 has no `Connection`; there the stream ends and the connection may live.
fn set_connection_close(response: &mut Response<Bytes>, style: ReplyStyle<'_>) {
    if style.version != Version::HTTP_2 {
        response
            .headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
}

/// The code that gRPC knows for a status.
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

/// Decimal seconds with all six places: a number in JSON, exact where a float would round.
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
    // What needs no escape, mostly all of it, goes as a whole.
    while let Some((plain, special)) = rest
        .bytes()
        .position(is_special)
        .map(|at| rest.split_at(at))
    {
        out.push_str(plain);
        let mut signs = special.chars();
        match signs.next() {
            Some(sign @ ('"' | '\\')) => out.extend(['\\', sign]),
            control => {
                let code = control.map_or(0, u32::from);
                out.push_str("\\u00");
                out.extend([code >> 4, code & 15].map(hex_digit));
            }
        }
        rest = signs.as_str();
    }
    out.push_str(rest);
    out.push('"');
}

fn hex_digit(nibble: u32) -> char {
    char::from_digit(nibble, 16).map_or('0', |digit| digit.to_ascii_uppercase())
}

/// As `grpc-message` wants it: all but visible ASCII and the space, and the percent sign itself.
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

/// A fault's text with a capital and a full stop.
fn to_sentence(text: &str) -> String {
    let mut signs = text.chars();
    signs
        .next()
        .into_iter()
        .flat_map(char::to_uppercase)
        .chain(signs)
        .chain(['.'])
        .collect()
}

/// Whether `Accept` ranks plain text above JSON. Absent, unreadable, or no preference: JSON.
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

/// How much a type is wanted: the most specific range that covers it says so (RFC 9110, 12.5.1).
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

/// A weight from 0 to 1 with at most three places, times a thousand.
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
