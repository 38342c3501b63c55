//! A local reply as problem details (RFC 9457), plain text, gRPC status or custom rejection.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, header};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use super::reply_style::{ReplyFormat, ReplyStyle};
use crate::enforcer::RetryHint;
use crate::policy::RejectResponse;
use crate::proxy::http::headers::integer_header_value;

static PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");
pub(crate) static GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
static GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// Header count of a typical rejection. Space for as many is reserved, which is cheaper than
/// growing the header map.
const TYPICAL_HEADER_COUNT: usize = 10;

const ABOUT_BLANK_TYPE: &str = "about:blank";
pub(crate) const QUOTA_EXCEEDED_TYPE: &str =
    "https://iana.org/assignments/http-problem-types#quota-exceeded";
pub(crate) const REDUCED_CAPACITY_TYPE: &str =
    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

/// gRPC status code `PERMISSION_DENIED`.
pub(crate) const GRPC_PERMISSION_DENIED: u8 = 7;
/// gRPC status code `RESOURCE_EXHAUSTED`.
pub(crate) const GRPC_RESOURCE_EXHAUSTED: u8 = 8;

/// Contents of a local reply.
pub(crate) struct ProblemReply<'a> {
    pub(crate) status: StatusCode,
    pub(crate) type_uri: &'static str,
    pub(crate) title: &'static str,
    pub(crate) detail: String,
    /// Error type in `Proxy-Status` (RFC 9209, 2.3).
    pub(crate) error: &'static str,
    pub(crate) grpc_status: u8,
    pub(crate) policy: Option<&'a str>,
    /// Names of the limits that refused. The JSON calls limits policies, as the rate-limit header
    /// draft does.
    pub(crate) violated_limits: &'a [&'a str],
    pub(crate) retry: Option<RetryHint>,
    /// Custom response of the policy, instead of the standard one.
    pub(crate) custom_response: Option<&'a RejectResponse>,
}

impl<'a> ProblemReply<'a> {
    pub(crate) fn new(status: StatusCode, error: &'static str, detail: String) -> Self {
        Self {
            status,
            type_uri: ABOUT_BLANK_TYPE,
            title: status.canonical_reason().unwrap_or("Error"),
            detail,
            error,
            grpc_status: grpc_status_from_http(status),
            policy: None,
            violated_limits: &[],
            retry: None,
            custom_response: None,
        }
    }

    /// Builds the reply with the policy's custom response, if any. A gRPC client always gets a gRPC
    /// status.
    pub(crate) fn build(&self, style: ReplyStyle<'_>) -> Response<Bytes> {
        let custom_response = self.custom_response;
        let build = |content_type, body| {
            let custom_status = custom_response.and_then(|custom| custom.status);
            build_response_with_optional_body(
                custom_status.unwrap_or(self.status),
                content_type,
                body,
                style,
            )
        };
        let mut response = match (style.format, custom_response) {
            (ReplyFormat::Grpc, _) => build_grpc_error(self.grpc_status, &self.detail),
            (_, Some(custom)) => build(custom.content_type.clone(), custom.body.clone()),
            (ReplyFormat::Json, None) => build(
                HeaderValue::from_static("application/problem+json"),
                self.to_json().into(),
            ),
            (ReplyFormat::Text, None) => {
                let text = format!("{}\n{}\n", self.title, self.detail);
                build(
                    HeaderValue::from_static("text/plain; charset=utf-8"),
                    text.into(),
                )
            }
        };
        let headers = response.headers_mut();
        for (name, value) in custom_response.map_or(&[][..], |custom| &custom.headers) {
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

    fn to_json(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(320);
        // Type and title are not escaped: they are constants without special characters.
        for piece in [
            "{\"type\":\"",
            self.type_uri,
            "\",\"title\":\"",
            self.title,
            "\",\"status\":",
            self.status.as_str(),
            ",\"detail\":",
        ] {
            out.extend_from_slice(piece.as_bytes());
        }
        // Writing texts to a vector cannot fail.
        serde_json::to_writer(&mut out, &self.detail).ok();
        if let Some(policy) = self.policy {
            out.extend_from_slice(b",\"policy\":");
            serde_json::to_writer(&mut out, policy).ok();
        }
        if !self.violated_limits.is_empty() {
            out.extend_from_slice(b",\"violated-policies\":");
            serde_json::to_writer(&mut out, self.violated_limits).ok();
        }
        if let Some(RetryHint::After(retry_after_us)) = self.retry {
            out.extend_from_slice(b",\"retry_after\":");
            push_us_as_seconds(&mut out, retry_after_us);
        }
        out.push(b'}');
        out
    }
}

/// Builds a gRPC Trailers-Only response: HTTP status 200, the gRPC status in the headers and no
/// body.
pub(crate) fn build_grpc_error(status: u8, message: &str) -> Response<Bytes> {
    let mut response = Response::new(Bytes::new());
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/grpc"),
    );
    headers.insert(&GRPC_STATUS, HeaderValue::from(u16::from(status)));
    if let Ok(message) = HeaderValue::try_from(percent_encode_grpc_message(message)) {
        headers.insert(&GRPC_MESSAGE, message);
    }
    response
}

pub(crate) fn build_response_with_optional_body(
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
        // The length is set here because the response to a HEAD request has the length but no body.
        headers.insert(header::CONTENT_LENGTH, integer_header_value(body.len()));
        if !style.is_head_request {
            *response.body_mut() = body;
        }
    }
    response
}

/// Maps an HTTP status to a gRPC status code.
fn grpc_status_from_http(status: StatusCode) -> u8 {
    const INVALID_ARGUMENT: u8 = 3;
    const DEADLINE_EXCEEDED: u8 = 4;
    const UNIMPLEMENTED: u8 = 12;
    const UNAVAILABLE: u8 = 14;
    match status {
        StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => UNIMPLEMENTED,
        StatusCode::REQUEST_TIMEOUT | StatusCode::GATEWAY_TIMEOUT => DEADLINE_EXCEEDED,
        StatusCode::PAYLOAD_TOO_LARGE => GRPC_RESOURCE_EXHAUSTED,
        status if status.is_client_error() => INVALID_ARGUMENT,
        _ => UNAVAILABLE,
    }
}

/// Appends microseconds as decimal seconds with six places, exact where a float would round.
pub(crate) fn push_us_as_seconds(out: &mut Vec<u8>, us: u64) {
    let mut buffer = itoa::Buffer::new();
    out.extend_from_slice(buffer.format(us / 1_000_000).as_bytes());
    out.push(b'.');
    let fraction = buffer.format(us % 1_000_000).as_bytes();
    out.extend((fraction.len()..6).map(|_| b'0'));
    out.extend_from_slice(fraction);
}

/// Bytes that are escaped in a `grpc-message`, apart from those outside ASCII.
const GRPC_ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

/// Percent-encodes a `grpc-message`: keeps spaces and visible ASCII other than `%`, and encodes
/// every other byte.
pub(crate) fn percent_encode_grpc_message(text: &str) -> String {
    utf8_percent_encode(text, GRPC_ESCAPED).to_string()
}

/// Capitalizes an error text and adds a full stop.
pub(crate) fn to_sentence(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .into_iter()
        .flat_map(char::to_uppercase)
        .chain(chars)
        .chain(['.'])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn grpc_messages_are_percent_encoded() {
        assert_eq!(
            percent_encode_grpc_message("100% \u{e9}\n"),
            "100%25 %C3%A9%0A"
        );
    }

    proptest! {
        #[test]
        fn push_us_as_seconds_is_exact(us: u64) {
            let mut out = Vec::new();
            push_us_as_seconds(&mut out, us);
            let out = String::from_utf8(out).unwrap();
            let (whole, fraction) = out.split_once('.').unwrap();
            prop_assert_eq!(fraction.len(), 6);
            let back = whole.parse::<u128>().unwrap() * 1_000_000 + fraction.parse::<u128>().unwrap();
            prop_assert_eq!(back, u128::from(us));
        }
    }
}
