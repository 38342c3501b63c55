//! The reply to a client that asks for its own limits.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};
use std::time::Duration;

use super::problem_reply::{ProblemReply, build_response_with_optional_body};
use super::reply_style::ReplyStyle;
use crate::enforcer::{LimitReport, OwnLimits};
use crate::policy::RateLimitHeaderSettings;
use crate::proxy::http::rate_limit_headers;

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
    if let Some(rejection) = super::build_verdict_reply(&own.verdict, HEADER_SETTINGS, style) {
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

/// Builds the reply to a client without a verified key.
pub(crate) fn build_unidentified_client_reply(style: ReplyStyle<'_>) -> Response<Bytes> {
    let detail = "No policy has a key that identifies the client of this request. Expected a valid \
                  token or client certificate.";
    let challenge = (header::WWW_AUTHENTICATE, "Bearer");
    build_error_reply(StatusCode::UNAUTHORIZED, detail, challenge, style)
}

/// Builds the reply to a method other than GET and HEAD.
pub(crate) fn build_method_not_allowed_reply(style: ReplyStyle<'_>) -> Response<Bytes> {
    let (detail, allowed) = ("Limits can only be read.", (header::ALLOW, "GET, HEAD"));
    build_error_reply(StatusCode::METHOD_NOT_ALLOWED, detail, allowed, style)
}

fn build_error_reply(
    status: StatusCode,
    detail: &str,
    (name, value): (HeaderName, &'static str),
    style: ReplyStyle<'_>,
) -> Response<Bytes> {
    let problem = ProblemReply::new(status, "http_request_error", detail.to_owned());
    let mut response = problem.build_standard(style);
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
