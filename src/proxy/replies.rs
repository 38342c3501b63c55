//! Every answer that we make ourselves, and its public text.
//!
//! Problem details (RFC 9457) as JSON, or plain text for clients that rather have it; for gRPC a status
//! without a body. Nothing that a client sent gets into an answer.

use super::fields;
use super::gate::GateFault;
use super::inbound::InboundFault;
use crate::enforcer::{Limited, Outcome, Verdict};
use crate::policy::{Fields, Reject};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Version, header, request};

static PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");
static GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
static GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

const BLANK: &str = "about:blank";
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

/// How a client wants to be answered. Read it before the request is given away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Style {
    format: Format,
    head: bool,
    version: Version,
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
    ResponseTimeout,
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

impl Style {
    /// Reads a request's head as it came, before the gate.
    pub(super) fn of(parts: &request::Parts) -> Self {
        let grpc = parts
            .headers
            .get(header::CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().to_ascii_lowercase().starts_with(b"application/grpc"));
        let format = match grpc {
            true => Format::Grpc,
            false if prefers_text(&parts.headers) => Format::Text,
            false => Format::Json,
        };
        Self { format, head: parts.method == Method::HEAD, version: parts.version }
    }
}

/// The answer to a request that a verdict refuses, rate-limit fields included; `None` if it is to be forwarded.
pub(super) fn refusal(verdict: &Verdict<'_>, shown: Fields, style: Style) -> Option<Response<Bytes>> {
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
            let detail = format!("Policy \"{policy}\" cannot tell whose quota this request uses: {fault}.");
            let problem = Problem::new(StatusCode::BAD_REQUEST, "http_request_error", detail);
            Problem { policy: Some(policy), ..problem }.reply(style)
        }
        Outcome::Unavailable { policy, retry_after_us } => {
            let detail = format!("Policy \"{policy}\" cannot be decided at the moment.");
            Problem {
                kind: REDUCED_CAPACITY,
                policy: Some(policy),
                retry_after_us: Some(*retry_after_us),
                ..Problem::new(StatusCode::SERVICE_UNAVAILABLE, "proxy_internal_error", detail)
            }
            .reply(style)
        }
    };
    fields::write(verdict, shown, response.headers_mut());
    Some(response)
}

/// The answer to a request that is refused before any policy sees it. The connection closes after it.
pub(super) fn inbound_fault(fault: InboundFault, style: Style) -> Response<Bytes> {
    let status = match fault {
        InboundFault::Gate(fault) => fault.status(),
        InboundFault::Path(_) => StatusCode::BAD_REQUEST,
    };
    let problem = Problem::new(status, "http_request_error", sentence(&fault.to_string()));
    let mut response = problem.reply(style);
    close(&mut response, style);
    if fault == InboundFault::Gate(GateFault::Connect) {
        let allowed = HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, TRACE");
        response.headers_mut().insert(header::ALLOW, allowed);
    }
    response
}

/// The answer when forwarding failed.
pub(super) fn local(what: Local, style: Style) -> Response<Bytes> {
    let (status, error, detail) = what.told();
    let mut problem = Problem::new(status, error, detail.to_owned());
    if what == Local::QueueFull {
        problem.kind = REDUCED_CAPACITY;
        problem.retry_after_us = Some(1_000_000);
    }
    let mut response = problem.reply(style);
    if matches!(what, Local::BodyTooLarge | Local::BodyTimeout | Local::BodyBroken) {
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
            Self::ConnectRefused => {
                (S::BAD_GATEWAY, "connection_refused", "The upstream does not accept connections.")
            }
            Self::ConnectTimeout => (
                S::GATEWAY_TIMEOUT,
                "connection_timeout",
                "The upstream did not accept a connection in time.",
            ),
            Self::Dns => (S::BAD_GATEWAY, "dns_error", "The upstream's name could not be resolved."),
            Self::Tls => {
                (S::BAD_GATEWAY, "tls_protocol_error", "No secure connection to the upstream could be made.")
            }
            Self::Terminated => (
                S::BAD_GATEWAY,
                "connection_terminated",
                "The upstream closed the connection without a response.",
            ),
            Self::Protocol => {
                (S::BAD_GATEWAY, "http_protocol_error", "The upstream sent a response that is not valid.")
            }
            Self::ResponseTimeout => {
                (S::GATEWAY_TIMEOUT, "connection_read_timeout", "The upstream did not respond in time.")
            }
            Self::QueueFull => (
                S::SERVICE_UNAVAILABLE,
                "connection_limit_reached",
                "Too many requests wait, or no connection to the upstream became free in time.",
            ),
            Self::BodyTooLarge => {
                (S::PAYLOAD_TOO_LARGE, "http_request_error", "The request's body is larger than allowed.")
            }
            Self::BodyTimeout => {
                (S::REQUEST_TIMEOUT, "http_request_error", "The request's body did not arrive in time.")
            }
            Self::BodyBroken => {
                (S::BAD_REQUEST, "http_request_error", "The request's body is not valid HTTP, or broke off.")
            }
            Self::TooManyHeaders => (
                S::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "http_request_error",
                "The request has more headers than allowed.",
            ),
        }
    }
}

fn limited_reply(limited: &Limited<'_>, style: Style) -> Response<Bytes> {
    let policy = limited.policy;
    let detail = match limited.retry_after_us {
        Some(us) => {
            let seconds = fields::retry_after_s(us);
            format!("Over the limit of policy \"{policy}\". Try again in {seconds} s.")
        }
        None => format!(
            "Policy \"{policy}\" never allows this request: it asks for more than the limit. Trying again will not help."
        ),
    };
    let mut response = Problem {
        kind: QUOTA_EXCEEDED,
        title: "Quota Exceeded",
        grpc_status: 8,
        policy: Some(policy),
        violated: &limited.violated,
        retry_after_us: limited.retry_after_us,
        ..Problem::new(StatusCode::TOO_MANY_REQUESTS, "http_request_error", detail)
    }
    .reply_with(limited.reject, style);
    if limited.retry_after_us.is_none() {
        // Not even the owner's: there is no time at which this request would be admitted.
        response.headers_mut().remove(header::RETRY_AFTER);
    }
    response
}

struct Problem<'a> {
    status: StatusCode,
    kind: &'a str,
    title: &'a str,
    detail: String,
    /// Of `Proxy-Status`.
    error: &'static str,
    grpc_status: u8,
    policy: Option<&'a str>,
    violated: &'a [&'a str],
    retry_after_us: Option<u64>,
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
            retry_after_us: None,
        }
    }

    fn reply(&self, style: Style) -> Response<Bytes> {
        self.reply_with(None, style)
    }

    /// Makes the response, in the policy owner's words if there are any.
    fn reply_with(&self, reject: Option<&Reject>, style: Style) -> Response<Bytes> {
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
                with_body(self.status, kind, format!("{}\n{}\n", self.title, self.detail).into(), style)
            }
        };
        let headers = response.headers_mut();
        for (name, value) in reject.map_or(&[][..], |reject| &reject.headers) {
            headers.append(name, value.clone());
        }
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(retry_after_us) = self.retry_after_us {
            fields::write_retry_after(retry_after_us, headers);
        }
        if let Ok(status) = HeaderValue::try_from(format!("tidegate; error={}", self.error)) {
            headers.insert(&PROXY_STATUS, status);
        }
        response
    }

    /// A response of headers only, which is how gRPC says no.
    fn grpc(&self) -> Response<Bytes> {
        let mut response = Response::new(Bytes::new());
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(&GRPC_STATUS, HeaderValue::from(u16::from(self.grpc_status)));
        if let Ok(message) = HeaderValue::try_from(percent_encoded(&self.detail)) {
            headers.insert(&GRPC_MESSAGE, message);
        }
        response
    }

    fn json(&self) -> String {
        let mut out = String::with_capacity(320);
        out.push_str("{\"type\":");
        push_json_string(&mut out, self.kind);
        out.push_str(",\"title\":");
        push_json_string(&mut out, self.title);
        out.push_str(",\"status\":");
        out.push_str(self.status.as_str());
        out.push_str(",\"detail\":");
        push_json_string(&mut out, &self.detail);
        if let Some(policy) = self.policy {
            out.push_str(",\"policy\":");
            push_json_string(&mut out, policy);
        }
        for (place, name) in self.violated.iter().enumerate() {
            out.push_str(if place == 0 { ",\"violated-policies\":[" } else { "," });
            push_json_string(&mut out, name);
        }
        if !self.violated.is_empty() {
            out.push(']');
        }
        if let Some(retry_after_us) = self.retry_after_us {
            out.push_str(",\"retry_after\":");
            push_seconds(&mut out, retry_after_us);
        }
        out.push('}');
        out
    }
}

fn with_body(status: StatusCode, kind: HeaderValue, body: Bytes, style: Style) -> Response<Bytes> {
    let mut response = Response::new(Bytes::new());
    *response.status_mut() = status;
    let may_have_body = !matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    if may_have_body {
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, kind);
        // Said here because a response to HEAD has it without the body.
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
        if !style.head {
            *response.body_mut() = body;
        }
    }
    response
}

/// HTTP/2 has no `Connection`; there the stream ends and the connection may live.
fn close(response: &mut Response<Bytes>, style: Style) {
    if style.version != Version::HTTP_2 {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
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
    out.push('"');
    for sign in text.chars() {
        match sign {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            control if control < ' ' => {
                out.push_str("\\u00");
                out.extend([u32::from(control) >> 4, u32::from(control) & 15].map(hex_digit));
            }
            plain => out.push(plain),
        }
    }
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
    signs.next().into_iter().flat_map(char::to_uppercase).chain(signs).chain(['.']).collect()
}

/// Whether `Accept` ranks plain text above JSON. Absent, unreadable, or no preference: JSON.
fn prefers_text(headers: &HeaderMap) -> bool {
    let mut text = Rank::default();
    let mut json = Rank::default();
    for line in headers.get_all(header::ACCEPT) {
        let Ok(line) = line.to_str() else { return false };
        for element in line.split(',') {
            let mut pieces = element.split(';').map(str::trim);
            let range = pieces.next().unwrap_or("");
            let weight =
                pieces.find_map(|piece| piece.strip_prefix("q=").or_else(|| piece.strip_prefix("Q=")));
            let Some(weight) = weight.map_or(Some(1000), thousandths) else { return false };
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
    if !matches!(whole, "0" | "1") || places.len() > 3 || !places.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let weight = format!("{whole}{places:0<3}").parse().ok()?;
    (weight <= 1000).then_some(weight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::KeyFault;
    use crate::policy::path::PathFault;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use smallvec::{SmallVec, smallvec};
    use std::time::Duration;

    const JSON: Style = Style { format: Format::Json, head: false, version: Version::HTTP_11 };
    const TEXT: Style = Style { format: Format::Text, ..JSON };
    const GRPC: Style = Style { format: Format::Grpc, ..JSON };
    const BOTH: Fields = Fields { standard: true, legacy: true, legacy_reset_epoch: false };

    fn style(fields: &[(&str, &str)]) -> Style {
        let mut builder = http::Request::get("/");
        for (name, value) in fields {
            builder = builder.header(*name, *value);
        }
        Style::of(&builder.body(()).unwrap().into_parts().0)
    }

    fn refused(outcome: Outcome<'_>, style: Style) -> Response<Bytes> {
        let verdict = Verdict {
            outcome,
            limits: SmallVec::new(),
            now_us: 0,
            at: None,
            delay: Duration::ZERO,
            degraded: false,
            shadow_rejected: SmallVec::new(),
        };
        refusal(&verdict, BOTH, style).unwrap()
    }

    fn limited(retry_after_us: Option<u64>, reject: Option<&Reject>) -> Outcome<'_> {
        Outcome::Limited(Limited {
            policy: "login",
            violated: smallvec!["login", "login-2"],
            retry_after_us,
            blocked: false,
            reject,
        })
    }

    fn body(response: &Response<Bytes>) -> Value {
        serde_json::from_slice(response.body()).unwrap()
    }

    fn text<'r>(response: &'r Response<Bytes>, name: &str) -> &'r str {
        response.headers().get(name).map_or("", |value| value.to_str().unwrap())
    }

    #[test]
    fn over_a_limit_is_429_with_everything_a_client_needs() {
        let response = refused(limited(Some(41_000_001), None), JSON);
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(text(&response, "content-type"), "application/problem+json");
        assert_eq!(text(&response, "retry-after"), "42");
        assert_eq!(text(&response, "cache-control"), "no-store");
        assert_eq!(text(&response, "proxy-status"), "tidegate; error=http_request_error");
        assert_eq!(text(&response, "content-length"), response.body().len().to_string());
        let raw = std::str::from_utf8(response.body()).unwrap();
        assert!(raw.contains("\"retry_after\":41.000001}"), "{raw}");
        let expected = json!({
            "type": QUOTA_EXCEEDED, "title": "Quota Exceeded", "status": 429, "policy": "login",
            "detail": "Over the limit of policy \"login\". Try again in 42 s.",
            "violated-policies": ["login", "login-2"], "retry_after": 41.000001,
        });
        assert_eq!(body(&response), expected);
    }

    #[test]
    fn a_request_that_never_fits_is_told_so() {
        let response = refused(limited(None, None), JSON);
        assert_eq!(text(&response, "retry-after"), "");
        let body = body(&response);
        assert!(body.get("retry_after").is_none());
        assert!(body["detail"].as_str().unwrap().contains("never"));
    }

    #[test]
    fn rate_limit_fields_come_with_a_refusal() {
        use crate::limiter::{Algorithm, Limit, Refusal, Standing};
        let limit = Limit { requests: 5, per_us: 60_000_000, algorithm: Algorithm::SlidingLog };
        let limit = crate::policy::NamedLimit { name: "login".into(), unit: None, limit };
        let standing =
            Standing { remaining: 0, grows_at_us: Some(7), refusal: Some(Refusal::Until(42_000_000)) };
        let reported = crate::enforcer::Reported { limit: &limit, standing };
        let verdict = Verdict {
            degraded: false,
            outcome: limited(Some(42_000_000), None),
            limits: smallvec![reported],
            now_us: 0,
            at: None,
            delay: Duration::ZERO,
            shadow_rejected: SmallVec::new(),
        };
        let response = refusal(&verdict, BOTH, JSON).unwrap();
        assert_eq!(text(&response, "ratelimit"), "\"login\";r=0;t=1");
        assert_eq!(text(&response, "x-ratelimit-reset"), "42");
        let forwarded = Verdict { outcome: Outcome::Forward, ..verdict };
        assert!(refusal(&forwarded, BOTH, JSON).is_none());
    }

    #[test]
    fn the_other_refusals() {
        let denied = refused(Outcome::Denied { policy: "wall", reject: None }, JSON);
        assert_eq!(
            (denied.status(), body(&denied)["policy"].as_str()),
            (StatusCode::FORBIDDEN, Some("wall"))
        );
        assert_eq!(text(&denied, "proxy-status"), "tidegate; error=http_request_denied");
        let fault = KeyFault::Repeated("header x".into());
        let bad = refused(Outcome::BadKey { policy: "p", fault }, JSON);
        assert_eq!(bad.status(), StatusCode::BAD_REQUEST);
        assert!(body(&bad)["detail"].as_str().unwrap().ends_with("header x occurs more than once."));
        let away = refused(Outcome::Unavailable { policy: "p", retry_after_us: 500_000 }, JSON);
        assert_eq!(away.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!((text(&away, "retry-after"), &body(&away)["type"]), ("1", &json!(REDUCED_CAPACITY)));
        for response in [denied, bad, away] {
            assert_eq!(text(&response, "cache-control"), "no-store");
        }
    }

    #[test]
    fn an_owners_words_replace_ours_but_not_the_facts() {
        let reject = Reject {
            status: StatusCode::IM_A_TEAPOT,
            body: Bytes::from_static(b"<p>later"),
            content_type: HeaderValue::from_static("text/html"),
            headers: vec![
                (HeaderName::from_static("x-a"), HeaderValue::from_static("1")),
                (header::CACHE_CONTROL, HeaderValue::from_static("public")),
                (header::RETRY_AFTER, HeaderValue::from_static("0")),
            ],
        };
        let response = refused(limited(Some(2_000_000), Some(&reject)), TEXT);
        assert_eq!((response.status(), &response.body()[..]), (StatusCode::IM_A_TEAPOT, &b"<p>later"[..]));
        let told = ["content-type", "x-a", "cache-control", "retry-after"].map(|name| text(&response, name));
        assert_eq!(told, ["text/html", "1", "no-store", "2"]);
        assert_eq!(response.headers().get_all("retry-after").iter().count(), 1);
        let never = refused(limited(None, Some(&reject)), JSON);
        assert!(!never.headers().contains_key("retry-after"));
        let denied = refused(Outcome::Denied { policy: "p", reject: Some(&reject) }, JSON);
        assert_eq!(text(&denied, "retry-after"), "0");
        let empty = Reject { status: StatusCode::NO_CONTENT, ..reject };
        let response = refused(Outcome::Denied { policy: "p", reject: Some(&empty) }, JSON);
        assert!(response.body().is_empty() && !response.headers().contains_key("content-length"));
    }

    #[test]
    fn a_fault_at_the_gate_closes_the_connection() {
        let response = inbound_fault(GateFault::HostMissing.into(), JSON);
        assert_eq!((response.status(), text(&response, "connection")), (StatusCode::BAD_REQUEST, "close"));
        assert_eq!(body(&response)["detail"], "A request needs a Host.");
        assert_eq!(body(&response)["type"], "about:blank");
        assert!(text(&inbound_fault(GateFault::Connect.into(), JSON), "allow").contains("GET"));
        let response = inbound_fault(GateFault::Expect.into(), Style { version: Version::HTTP_2, ..JSON });
        assert_eq!((response.status().as_u16(), text(&response, "connection")), (417, ""));
        let response = inbound_fault(PathFault::Nul.into(), TEXT);
        assert_eq!(text(&response, "connection"), "close");
        assert_eq!(response.body(), "Bad Request\nThe path holds an escaped NUL.\n");
    }

    #[test]
    fn upstream_trouble_has_its_status_and_error() {
        for (what, status, error, grpc) in [
            (Local::ConnectRefused, 502, "connection_refused", "14"),
            (Local::ConnectTimeout, 504, "connection_timeout", "4"),
            (Local::Dns, 502, "dns_error", "14"),
            (Local::Tls, 502, "tls_protocol_error", "14"),
            (Local::Terminated, 502, "connection_terminated", "14"),
            (Local::Protocol, 502, "http_protocol_error", "14"),
            (Local::ResponseTimeout, 504, "connection_read_timeout", "4"),
            (Local::QueueFull, 503, "connection_limit_reached", "14"),
            (Local::BodyTooLarge, 413, "http_request_error", "8"),
            (Local::BodyTimeout, 408, "http_request_error", "4"),
            (Local::BodyBroken, 400, "http_request_error", "3"),
            (Local::TooManyHeaders, 431, "http_request_error", "3"),
        ] {
            let response = local(what, JSON);
            assert_eq!(response.status().as_u16(), status, "{what:?}");
            assert_eq!(text(&response, "proxy-status"), format!("tidegate; error={error}"));
            assert_eq!(body(&response)["status"], status);
            assert_eq!(
                text(&response, "connection"),
                if matches!(status, 400 | 408 | 413) { "close" } else { "" }
            );
            assert_eq!(text(&local(what, GRPC), "grpc-status"), grpc, "{what:?}");
        }
        assert_eq!(text(&local(Local::QueueFull, JSON), "retry-after"), "1");
    }

    #[test]
    fn grpc_gets_a_status_in_headers_only() {
        let response = refused(limited(Some(2_000_000), None), GRPC);
        assert_eq!((response.status(), response.body().len()), (StatusCode::OK, 0));
        let told = ["content-type", "grpc-status", "grpc-message", "retry-after", "cache-control"];
        assert_eq!(
            told.map(|name| text(&response, name)),
            [
                "application/grpc",
                "8",
                "Over the limit of policy \"login\". Try again in 2 s.",
                "2",
                "no-store"
            ]
        );
        let code = |outcome| text(&refused(outcome, GRPC), "grpc-status").to_owned();
        assert_eq!(code(Outcome::Denied { policy: "p", reject: None }), "7");
        assert_eq!(code(Outcome::Unavailable { policy: "p", retry_after_us: 1 }), "14");
        assert_eq!(code(Outcome::BadKey { policy: "p", fault: KeyFault::Missing("x".into()) }), "3");
        assert_eq!(percent_encoded("100% \u{e9}\n"), "100%25 %C3%A9%0A");
    }

    #[test]
    fn head_gets_the_headers_of_the_body_it_does_not_get() {
        let get = refused(limited(Some(1), None), JSON);
        let head = refused(limited(Some(1), None), Style { head: true, ..JSON });
        assert_eq!(head.headers(), get.headers());
        assert!(head.body().is_empty() && !get.body().is_empty());
    }

    #[test]
    fn the_format_follows_accept() {
        for (accept, format) in [
            ("*/*", Format::Json),
            ("", Format::Json),
            ("text/plain", Format::Text),
            ("text/html", Format::Json),
            ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", Format::Json),
            ("application/json, text/plain", Format::Json),
            ("application/json;q=0.5, text/plain;q=0.51", Format::Text),
            ("TEXT/Plain ; Q=0.9, application/problem+json; q=0.899", Format::Text),
            ("text/plain, */*;q=0.1", Format::Text),
            ("*/*, text/plain;q=0.1", Format::Json),
            ("text/plain, application/*;q=0.2", Format::Text),
            ("text/*, application/json;q=0.9", Format::Text),
            ("text/plain;q=0", Format::Json),
            ("text/plain;q=2", Format::Json),
            ("text/plain;q=0.0001", Format::Json),
            ("text/plain;q=x", Format::Json),
        ] {
            assert_eq!(style(&[("accept", accept)]).format, format, "{accept}");
        }
        assert_eq!(style(&[]).format, Format::Json);
        let lines = [("accept", "application/json;q=0.1"), ("accept", "text/plain")];
        assert_eq!(style(&lines).format, Format::Text);
        let grpc = [("content-type", "Application/grpc+proto"), ("accept", "text/plain")];
        assert_eq!(style(&grpc).format, Format::Grpc);
    }

    proptest! {
        #[test]
        fn seconds_are_exact(us: u64) {
            let mut out = String::new();
            push_seconds(&mut out, us);
            let (whole, fraction) = out.split_once('.').unwrap();
            prop_assert_eq!(fraction.len(), 6);
            let back = whole.parse::<u128>().unwrap() * 1_000_000 + fraction.parse::<u128>().unwrap();
            prop_assert_eq!(back, u128::from(us));
        }

        #[test]
        fn any_text_is_a_json_string(text: String) {
            let mut out = String::new();
            push_json_string(&mut out, &text);
            prop_assert_eq!(serde_json::from_str::<String>(&out).unwrap(), text);
        }

        #[test]
        fn no_accept_is_too_odd(accept in prop::collection::vec(any::<u8>(), 0..40)) {
            let Ok(accept) = HeaderValue::from_bytes(&accept) else { return Ok(()) };
            prefers_text(&HeaderMap::from_iter([(header::ACCEPT, accept)]));
        }
    }
}
