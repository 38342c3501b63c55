//! Every answer that we make ourselves, and its public text.
//!
//! Problem details (RFC 9457) as JSON, or plain text for clients that rather have it; for gRPC a status
//! without a body. Nothing that a client sent gets into an answer.

use super::fields;
use super::gate::GateFault;
use super::headers::number;
use super::inbound::InboundFault;
use crate::enforcer::{Limited, Outcome, Retry, Verdict};
use crate::policy::{Cors, Fields, Reject};
use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Version, header, request,
};

static PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");
static GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
static GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// What gRPC's media types begin with.
const GRPC: &[u8] = b"application/grpc";
/// As many as a refusal has; room that is made piece by piece costs more than all of them.
const USUAL_FIELDS: usize = 10;
const BLANK: &str = "about:blank";
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str =
    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

/// How a client wants to be answered. Read it before the request is given away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Style<'t> {
    format: Format,
    head: bool,
    version: Version,
    cors: Reader<'t>,
}

/// The script in a browser that may want to read an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reader<'t> {
    /// Nobody set up which may: no answer speaks of it.
    Unknown,
    Refused,
    Allowed(&'t HeaderValue),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Json,
    Text,
    Grpc,
}

/// What went wrong between us and the upstream, or with a body, as the client may know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Local {
    ConnectRefused,
    ConnectTimeout,
    Dns,
    Tls,
    /// The connection ended before a response.
    Terminated,
    /// The upstream's response made no sense.
    Protocol,
    /// The upstream opens no WebSockets by the protocol that it speaks.
    Upgrade,
    ResponseTimeout,
    /// A limit's `max_duration` is over.
    Overlong,
    /// No upstream connection became free in time, or too many requests wait for one.
    QueueFull,
    /// The request's body is larger than allowed.
    BodyTooLarge,
    /// The request's body stopped coming.
    BodyTimeout,
    /// The request's body is not framed as it should be.
    BodyBroken,
    /// The request has more headers than allowed.
    TooManyHeaders,
}

impl<'t> Style<'t> {
    /// Reads a request's head as it came, before the gate.
    pub(super) fn of(parts: &request::Parts, cors: &'t Cors) -> Self {
        let grpc = parts
            .headers
            .get(header::CONTENT_TYPE)
            .and_then(|kind| kind.as_bytes().get(..GRPC.len()))
            .is_some_and(|kind| kind.eq_ignore_ascii_case(GRPC));
        let format = match grpc {
            true => Format::Grpc,
            false if prefers_text(&parts.headers) => Format::Text,
            false => Format::Json,
        };
        let cors = if cors.is_empty() {
            Reader::Unknown
        } else {
            cors.allowed(&parts.headers)
                .map_or(Reader::Refused, Reader::Allowed)
        };
        Self {
            format,
            head: parts.method == Method::HEAD,
            version: parts.version,
            cors,
        }
    }

    /// For who goes by the status: gRPC says no with a 200.
    pub(super) fn by_status(self) -> Self {
        match self.format {
            Format::Grpc => Self {
                format: Format::Json,
                ..self
            },
            Format::Json | Format::Text => self,
        }
    }
}

/// The answer to a request that a verdict refuses, rate-limit fields included; `None` if it is to be forwarded.
pub(super) fn refusal(
    verdict: &Verdict<'_>,
    shown: Fields,
    style: Style<'_>,
) -> Option<Response<Bytes>> {
    let mut response = match &verdict.outcome {
        Outcome::Forward => return None,
        Outcome::Limited(limited) => limited_reply(limited, style),
        Outcome::Denied { policy, reject } => {
            let problem = Problem {
                grpc_status: 7,
                policy: Some(policy),
                ..Problem::new(
                    StatusCode::FORBIDDEN,
                    "http_request_denied",
                    format!("Policy \"{policy}\" denies this request."),
                )
            };
            problem.reply_with(*reject, style)
        }
        Outcome::BadKey { policy, fault } => {
            let detail =
                format!("Policy \"{policy}\" cannot tell whose quota this request uses: {fault}.");
            let problem = Problem::new(StatusCode::BAD_REQUEST, "http_request_error", detail);
            Problem {
                policy: Some(policy),
                ..problem
            }
            .reply(style)
        }
        Outcome::Unavailable {
            policy,
            retry_after_us,
        } => {
            let detail = format!("Policy \"{policy}\" cannot be decided at the moment.");
            Problem {
                kind: REDUCED_CAPACITY,
                policy: Some(policy),
                retry: Some(Retry::After(*retry_after_us)),
                ..Problem::new(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "proxy_internal_error",
                    detail,
                )
            }
            .reply(style)
        }
    };
    fields::write(verdict, shown, response.headers_mut());
    Some(response)
}

/// The answer to a request that is refused before any policy sees it. The connection closes after it.
pub(super) fn inbound_fault(fault: InboundFault, style: Style<'_>) -> Response<Bytes> {
    let status = match fault {
        InboundFault::Gate(fault) => fault.status(),
        InboundFault::Path(_) | InboundFault::TokenRepeated => StatusCode::BAD_REQUEST,
    };
    let problem = Problem::new(status, "http_request_error", sentence(&fault.to_string()));
    let mut response = problem.reply(style);
    close(&mut response, style);
    if fault == InboundFault::Gate(GateFault::Connect) {
        let allowed =
            HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, TRACE");
        response.headers_mut().insert(header::ALLOW, allowed);
    }
    response
}

/// The answer when forwarding failed.
pub(super) fn local(what: Local, style: Style<'_>) -> Response<Bytes> {
    let (status, error, detail) = what.told();
    let mut problem = Problem::new(status, error, detail.to_owned());
    if what == Local::QueueFull {
        problem.kind = REDUCED_CAPACITY;
        problem.retry = Some(Retry::After(1_000_000));
    }
    let mut response = problem.reply(style);
    if matches!(
        what,
        Local::BodyTooLarge | Local::BodyTimeout | Local::BodyBroken
    ) {
        // The rest of the body stands between us and the next request.
        close(&mut response, style);
    }
    response
}

impl Local {
    /// Status, error of `Proxy-Status` (RFC 9209, 2.3), and text.
    fn told(self) -> (StatusCode, &'static str, &'static str) {
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
            Self::Dns => (
                S::BAD_GATEWAY,
                "dns_error",
                "The upstream's name could not be resolved.",
            ),
            Self::Tls => (
                S::BAD_GATEWAY,
                "tls_protocol_error",
                "No secure connection to the upstream could be made.",
            ),
            Self::Terminated => (
                S::BAD_GATEWAY,
                "connection_terminated",
                "The upstream closed the connection without a response.",
            ),
            Self::Protocol => (
                S::BAD_GATEWAY,
                "http_protocol_error",
                "The upstream sent a response that is not valid.",
            ),
            Self::Upgrade => (
                S::BAD_GATEWAY,
                "http_upgrade_failed",
                "The upstream does not open WebSockets by HTTP/2.",
            ),
            Self::ResponseTimeout => (
                S::GATEWAY_TIMEOUT,
                "connection_read_timeout",
                "The upstream did not respond in time.",
            ),
            Self::Overlong => (
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
            Self::BodyBroken => (
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

fn limited_reply(limited: &Limited<'_>, style: Style<'_>) -> Response<Bytes> {
    let policy = limited.policy;
    let detail = match (limited.retry, limited.retry.header_s()) {
        (Retry::Unknown, _) => {
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
    let mut response = Problem {
        kind: QUOTA_EXCEEDED,
        title: "Quota Exceeded",
        grpc_status: 8,
        policy: Some(policy),
        violated: &limited.violated,
        retry: Some(limited.retry),
        ..Problem::new(StatusCode::TOO_MANY_REQUESTS, "http_request_error", detail)
    }
    .reply_with(limited.reject, style);
    if limited.retry == Retry::Never {
        // Not even the owner's: there is no time at which this request would be admitted.
        response.headers_mut().remove(header::RETRY_AFTER);
    }
    response
}

impl Reader<'_> {
    fn write(self, headers: &mut HeaderMap) {
        const EXPOSED: HeaderValue = HeaderValue::from_static(
            "Retry-After, RateLimit, RateLimit-Policy, X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset, \
             Proxy-Status, Grpc-Status, Grpc-Message",
        );
        // An owner who says it in a policy's own headers knows better.
        if self == Self::Unknown || headers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN) {
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

struct Problem<'a> {
    status: StatusCode,
    kind: &'static str,
    title: &'static str,
    detail: String,
    /// Of `Proxy-Status`.
    error: &'static str,
    grpc_status: u8,
    policy: Option<&'a str>,
    violated: &'a [&'a str],
    retry: Option<Retry>,
}

impl<'a> Problem<'a> {
    fn new(status: StatusCode, error: &'static str, detail: String) -> Self {
        Self {
            status,
            kind: BLANK,
            title: status.canonical_reason().unwrap_or("Error"),
            detail,
            error,
            grpc_status: grpc_status(status),
            policy: None,
            violated: &[],
            retry: None,
        }
    }

    fn reply(&self, style: Style<'_>) -> Response<Bytes> {
        self.reply_with(None, style)
    }

    /// Makes the response, in the policy owner's words if there are any.
    fn reply_with(&self, reject: Option<&Reject>, style: Style<'_>) -> Response<Bytes> {
        let mut response = match (style.format, reject) {
            (Format::Grpc, _) => self.grpc(),
            (_, Some(reject)) => {
                let kind = reject.content_type.clone();
                with_body(reject.status, kind, reject.body.clone(), style)
            }
            (Format::Json, None) => {
                let kind = HeaderValue::from_static("application/problem+json");
                with_body(self.status, kind, self.json().into(), style)
            }
            (Format::Text, None) => {
                let kind = HeaderValue::from_static("text/plain; charset=utf-8");
                with_body(
                    self.status,
                    kind,
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
        if let Some(seconds) = self.retry.and_then(Retry::header_s) {
            headers.insert(header::RETRY_AFTER, number(seconds));
        }
        if let Ok(status) = HeaderValue::try_from(["tidegate; error=", self.error].concat()) {
            headers.insert(&PROXY_STATUS, status);
        }
        style.cors.write(headers);
        response
    }

    /// A response of headers only, which is how gRPC says no.
    fn grpc(&self) -> Response<Bytes> {
        let mut response = Response::new(Bytes::new());
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/grpc"),
        );
        headers.insert(&GRPC_STATUS, HeaderValue::from(u16::from(self.grpc_status)));
        if let Ok(message) = HeaderValue::try_from(percent_encoded(&self.detail)) {
            headers.insert(&GRPC_MESSAGE, message);
        }
        response
    }

    fn json(&self) -> String {
        let mut out = String::with_capacity(320);
        // Type and title are words of ours, in which nothing needs an escape.
        for piece in [
            "{\"type\":\"",
            self.kind,
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
        for (place, name) in self.violated.iter().enumerate() {
            out.push_str(if place == 0 {
                ",\"violated-policies\":["
            } else {
                ","
            });
            push_json_string(&mut out, name);
        }
        if !self.violated.is_empty() {
            out.push(']');
        }
        if let Some(Retry::After(retry_after_us)) = self.retry {
            out.push_str(",\"retry_after\":");
            push_seconds(&mut out, retry_after_us);
        }
        out.push('}');
        out
    }
}

fn with_body(
    status: StatusCode,
    kind: HeaderValue,
    body: Bytes,
    style: Style<'_>,
) -> Response<Bytes> {
    let mut response = Response::new(Bytes::new());
    response.headers_mut().reserve(USUAL_FIELDS);
    *response.status_mut() = status;
    let may_have_body = !matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    if may_have_body {
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, kind);
        // Said here because a response to HEAD has it without the body.
        headers.insert(header::CONTENT_LENGTH, number(body.len()));
        if !style.head {
            *response.body_mut() = body;
        }
    }
    response
}

/// HTTP/2 has no `Connection`; there the stream ends and the connection may live.
fn close(response: &mut Response<Bytes>, style: Style<'_>) {
    if style.version != Version::HTTP_2 {
        response
            .headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
}

/// The code that gRPC knows for a status.
fn grpc_status(status: StatusCode) -> u8 {
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
fn percent_encoded(text: &str) -> String {
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
fn sentence(text: &str) -> String {
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
    let mut text = Rank::default();
    let mut json = Rank::default();
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
            let Some(weight) = weight.map_or(Some(1000), thousandths) else {
                return false;
            };
            let is = |name: &str| range.eq_ignore_ascii_case(name);
            if is("text/plain") {
                text.say(3, weight);
            } else if is("application/problem+json") || is("application/json") {
                json.say(3, weight);
            } else if is("text/*") {
                text.say(2, weight);
            } else if is("application/*") {
                json.say(2, weight);
            } else if is("*/*") {
                text.say(1, weight);
                json.say(1, weight);
            }
        }
    }
    text.weight > json.weight
}

/// How much a type is wanted: the most specific range that covers it says so (RFC 9110, 12.5.1).
#[derive(Default)]
struct Rank {
    specific: u8,
    weight: u16,
}

impl Rank {
    fn say(&mut self, specific: u8, weight: u16) {
        if (specific, weight) > (self.specific, self.weight) {
            *self = Self { specific, weight };
        }
    }
}

/// A weight from 0 to 1 with at most three places, times a thousand.
fn thousandths(text: &str) -> Option<u16> {
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
