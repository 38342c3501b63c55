//! Local replies: every response that the proxy generates itself, with its public text.
//!
//! The body of a local reply is JSON problem details (RFC 9457), or plain text if the client
//! prefers that. gRPC clients get a gRPC status without a body. A local reply never contains
//! request data.

mod problem_reply;
mod reply_style;
#[cfg(test)]
mod tests;

pub(crate) use problem_reply::{GRPC_STATUS, build_grpc_error};
pub(crate) use reply_style::ReplyStyle;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, Version, header};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::time::Duration;

use super::inbound_request::InboundRequestError;
use super::local_replies::problem_reply::{
    GRPC_PERMISSION_DENIED, GRPC_RESOURCE_EXHAUSTED, ProblemReply, QUOTA_EXCEEDED_TYPE,
    REDUCED_CAPACITY_TYPE, build_response_with_optional_body, to_sentence,
};
use super::rate_limit_headers;
use super::request_validation::RequestValidationError;
use crate::enforcer::{
    LimitRejection, LimitReport, OwnLimits, RejectionReason, RequestOutcome, RetryHint, Verdict,
};
use crate::policy::RateLimitHeaderSettings;
use crate::proxy::UpstreamErrorKind;

/// Builds the reply to a request that the verdict does not forward, with rate-limit headers: status
/// 400, 403, 429 or 503, or a policy's custom response. Returns `None` if the verdict forwards the
/// request.
pub(crate) fn build_verdict_reply(
    verdict: &Verdict<'_>,
    header_settings: RateLimitHeaderSettings,
    style: ReplyStyle<'_>,
) -> Option<Response<Bytes>> {
    let problem = match &verdict.outcome {
        RequestOutcome::Forward => return None,
        RequestOutcome::Limited(limited) => describe_limit_rejection(limited),
        RequestOutcome::Denied {
            policy,
            is_reported,
            custom_response,
        } => ProblemReply {
            error: "http_request_denied",
            grpc_status: GRPC_PERMISSION_DENIED,
            custom_response: *custom_response,
            ..new_policy_problem(
                StatusCode::FORBIDDEN,
                (policy, *is_reported),
                "denies this request.",
            )
        },
        RequestOutcome::InvalidKey {
            policy,
            is_reported,
            error,
        } => {
            let what = format!("cannot determine the quota of this request: {error}.");
            new_policy_problem(StatusCode::BAD_REQUEST, (policy, *is_reported), &what)
        }
        RequestOutcome::Unavailable {
            policy,
            is_reported,
            retry_after_us,
        } => ProblemReply {
            error: "proxy_internal_error",
            type_uri: REDUCED_CAPACITY_TYPE,
            retry: Some(RetryHint::After(*retry_after_us)),
            ..new_policy_problem(
                StatusCode::SERVICE_UNAVAILABLE,
                (policy, *is_reported),
                "cannot be evaluated at the moment.",
            )
        },
    };
    let mut response = problem.build(style);
    rate_limit_headers::write_headers(verdict, header_settings, response.headers_mut());
    Some(response)
}

/// A problem of a policy, and whether the response may contain its name.
fn new_policy_problem<'v>(
    status: StatusCode,
    (policy, is_reported): (&'v str, bool),
    what: &str,
) -> ProblemReply<'v> {
    let detail = format!("{} {what}", describe_policy(policy, is_reported));
    ProblemReply {
        policy: is_reported.then_some(policy),
        ..ProblemReply::new(status, "http_request_error", detail)
    }
}

/// The subject of a sentence about the policy, with its name if the response may contain it.
fn describe_policy(policy: &str, is_reported: bool) -> Cow<'static, str> {
    if is_reported {
        format!("Policy \"{policy}\"").into()
    } else {
        "A policy".into()
    }
}

fn describe_limit_rejection<'v>(limited: &'v LimitRejection<'_>) -> ProblemReply<'v> {
    let reported_name = limited.is_reported.then_some(limited.policy);
    let policy = || describe_policy(limited.policy, limited.is_reported);
    let detail = match (limited.reason, limited.retry, limited.retry.retry_after_s()) {
        (RejectionReason::TooFewUnits, RetryHint::Unknown, _) => {
            format!(
                "{} has no free slot for this request. It is not known when one becomes free.",
                policy()
            )
        }
        (RejectionReason::TooFewUnits, _, Some(seconds)) => {
            let mut buffer = itoa::Buffer::new();
            let [before, name, after] = match reported_name {
                Some(name) => ["Over the limit of policy \"", name, "\". Try again in "],
                None => ["Over the limit. Try again in ", "", ""],
            };
            [before, name, after, buffer.format(seconds), " s."].concat()
        }
        (RejectionReason::TooFewUnits, ..) => format!(
            "{} never allows this request: its cost is more than the limit. Retrying will not help.",
            policy()
        ),
        (reason, _, seconds) => {
            let why = match reason {
                RejectionReason::Override => "blocks this client",
                RejectionReason::Penalty => "blocks this client after requests over the limit",
                _ => "allows no request of this client: its limit is 0",
            };
            let retry = match seconds {
                Some(seconds) => format!("Try again in {seconds} s."),
                None => "Retrying will not help.".to_owned(),
            };
            format!("{} {why}. {retry}", policy())
        }
    };
    ProblemReply {
        type_uri: QUOTA_EXCEEDED_TYPE,
        title: "Quota Exceeded",
        grpc_status: GRPC_RESOURCE_EXHAUSTED,
        policy: reported_name,
        violated_limits: &limited.violated_limits,
        retry: Some(limited.retry),
        custom_response: limited.custom_response,
        ..ProblemReply::new(StatusCode::TOO_MANY_REQUESTS, "http_request_error", detail)
    }
}

/// Builds the reply to a request that failed validation. An HTTP/1 connection closes after the
/// reply.
pub(crate) fn build_invalid_request_reply(
    error: InboundRequestError,
    style: ReplyStyle<'_>,
) -> Response<Bytes> {
    let validation_error = match error {
        InboundRequestError::Validation(error) => Some(error),
        _ => None,
    };
    let status = validation_error.map_or(StatusCode::BAD_REQUEST, RequestValidationError::status);
    let detail = to_sentence(&error.to_string());
    let mut response = ProblemReply::new(status, "http_request_error", detail).build(style);
    // A head with too many lines was read to its end.
    if validation_error != Some(RequestValidationError::TooManyHeaders) {
        set_connection_close(&mut response, style);
    }
    if validation_error == Some(RequestValidationError::Connect) {
        let allowed =
            HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, TRACE");
        response.headers_mut().insert(header::ALLOW, allowed);
    }
    response
}

/// Builds the reply to a request that could not be forwarded or completed.
pub(crate) fn build_proxy_error_reply(
    kind: UpstreamErrorKind,
    style: ReplyStyle<'_>,
) -> Response<Bytes> {
    let (status, error, detail) = status_error_and_detail(kind);
    let mut problem = ProblemReply::new(status, error, detail.to_owned());
    if status == StatusCode::SERVICE_UNAVAILABLE {
        problem.type_uri = REDUCED_CAPACITY_TYPE;
        problem.retry = Some(RetryHint::After(1_000_000));
    }
    let mut response = problem.build(style);
    if kind.is_caused_by_client() {
        // The connection must close: the unread rest of the body precedes the next request on it.
        set_connection_close(&mut response, style);
    }
    response
}

/// Sets `Connection: close`, except for HTTP/2, where the connection stays open.
fn set_connection_close(response: &mut Response<Bytes>, style: ReplyStyle<'_>) {
    if style.version != Version::HTTP_2 {
        response
            .headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
}

/// Returns the HTTP status, the `Proxy-Status` error type (RFC 9209, 2.3) and the detail text.
pub(crate) fn status_error_and_detail(
    kind: UpstreamErrorKind,
) -> (StatusCode, &'static str, &'static str) {
    use StatusCode as S;
    use UpstreamErrorKind as Kind;
    let (status, error) = match kind {
        Kind::ConnectRefused | Kind::ConnectFailed => (S::BAD_GATEWAY, "connection_refused"),
        Kind::ConnectTimeout => (S::GATEWAY_TIMEOUT, "connection_timeout"),
        Kind::Dns => (S::BAD_GATEWAY, "dns_error"),
        Kind::Tls => (S::BAD_GATEWAY, "tls_protocol_error"),
        Kind::ConnectionTerminated | Kind::StreamReset => (S::BAD_GATEWAY, "connection_terminated"),
        Kind::Protocol => (S::BAD_GATEWAY, "http_protocol_error"),
        Kind::UpgradeUnsupported => (S::BAD_GATEWAY, "http_upgrade_failed"),
        Kind::ResponseTimeout => (S::GATEWAY_TIMEOUT, "connection_read_timeout"),
        Kind::LocalResources | Kind::QueueFull | Kind::QueueTimeout => {
            (S::SERVICE_UNAVAILABLE, "connection_limit_reached")
        }
        Kind::TunnelLimit => (S::TOO_MANY_REQUESTS, "connection_limit_reached"),
        Kind::RequestBodyTooLarge => (S::PAYLOAD_TOO_LARGE, "http_request_error"),
        Kind::MaxDurationExceeded => (S::GATEWAY_TIMEOUT, "http_response_timeout"),
        Kind::RequestBodyTimeout => (S::REQUEST_TIMEOUT, "http_request_error"),
        Kind::ClientDisconnected => (S::BAD_REQUEST, "http_request_error"),
    };
    let detail = match kind {
        Kind::ConnectRefused | Kind::ConnectFailed => "The upstream does not accept connections.",
        Kind::ConnectTimeout => "The upstream did not accept a connection in time.",
        Kind::Dns => "The upstream's name could not be resolved.",
        Kind::Tls => "No secure connection to the upstream could be made.",
        Kind::ConnectionTerminated | Kind::StreamReset => {
            "The upstream closed the connection without a response."
        }
        Kind::Protocol => "The upstream sent a response that is not valid.",
        Kind::UpgradeUnsupported => "The upstream does not support WebSockets over HTTP/2.",
        Kind::ResponseTimeout => "The upstream did not respond in time.",
        Kind::LocalResources | Kind::QueueFull | Kind::QueueTimeout => {
            "Too many requests are waiting, or no connection to the upstream became free in time."
        }
        Kind::TunnelLimit => {
            "Too many tunnels (WebSockets) of this client are open. See upstream.max_tunnels_per_client."
        }
        Kind::RequestBodyTooLarge => "The request body is larger than allowed.",
        Kind::MaxDurationExceeded => "The request took longer than its policy allows.",
        Kind::RequestBodyTimeout => "The request body did not arrive in time.",
        // Only a client that sent an invalid body reads this response; a disconnected client does
        // not.
        Kind::ClientDisconnected => "The request body is not valid HTTP or is incomplete.",
    };
    (status, error, detail)
}

/// The reply has the standard fields, whatever fields other responses have.
const HEADER_SETTINGS: RateLimitHeaderSettings = RateLimitHeaderSettings {
    standard: true,
    legacy: false,
    legacy_reset_epoch: false,
};

/// Builds the reply with the limits: the rate-limit fields, and JSON.
pub(crate) fn build_own_limits_reply(
    own: &OwnLimits<'_>,
    style: ReplyStyle<'_>,
) -> Response<Bytes> {
    if let Some(rejection) = build_verdict_reply(&own.verdict, HEADER_SETTINGS, style) {
        return rejection;
    }
    let now_us = own.verdict.now_us;
    let policies: Vec<Value> = own
        .policies
        .iter()
        .map(|policy| {
            let limits = policy.reports();
            let limits: Vec<Value> = limits.map(|limit| limit_to_json(&limit, now_us)).collect();
            json!({
                "policy": policy.own.policy.name,
                "blocked_s": policy.blocked_until_us.map(|until_us| seconds_until(until_us, now_us)),
                "limits": limits,
            })
        })
        .collect();
    let mut response = build_response_with_optional_body(
        StatusCode::OK,
        HeaderValue::from_static("application/json"),
        json!({ "policies": policies }).to_string().into(),
        style,
    );
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    rate_limit_headers::write_headers(&own.verdict, HEADER_SETTINGS, headers);
    style.cors.write_headers(headers);
    response
}

/// Builds the reply to a client that cannot read its limits by this request. The field says what
/// would be possible.
pub(crate) fn build_own_limits_error(
    status: StatusCode,
    detail: &str,
    (name, value): (HeaderName, &'static str),
    style: ReplyStyle<'_>,
) -> Response<Bytes> {
    let problem = ProblemReply::new(status, "http_request_error", detail.to_owned());
    let mut response = problem.build(style);
    let headers = response.headers_mut();
    headers.insert(name, HeaderValue::from_static(value));
    response
}

fn limit_to_json(reported: &LimitReport<'_>, now_us: u64) -> Value {
    let named = reported.limit;
    let has_window = !named.limit.algorithm.counts_slots();
    let window = Duration::from_micros(named.limit.period_length_us(now_us));
    let reset_us = reported.status.next_growth_us;
    json!({
        "name": &*named.name,
        "quota": reported.limit_in_effect().capacity(),
        "window_s": has_window.then_some(window.as_secs_f64()),
        "unit": named.unit,
        "remaining": reported.status.remaining,
        "reset_s": reset_us.map(|at_us| seconds_until(at_us, now_us)),
    })
}

fn seconds_until(at_us: u64, now_us: u64) -> f64 {
    Duration::from_micros(at_us.saturating_sub(now_us)).as_secs_f64()
}
