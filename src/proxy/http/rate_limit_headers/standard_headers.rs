//! `RateLimit-Policy` and `RateLimit` of draft-ietf-httpapi-ratelimit-headers-11.
//!
//! Both headers are Lists of Strings with parameters (RFC 9651). Each header has all limits on one
//! line.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::retry_after::SECOND_US;
use crate::enforcer::{LimitReport, Verdict};
use crate::limiter::Algorithm;
use crate::proxy::http::header_lines::append_to_list_header;

pub(super) static RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
static RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// Largest Integer of a structured field (RFC 9651, 3.3.1).
const MAX_STRUCTURED_INTEGER: u64 = 999_999_999_999_999;

pub(super) fn write_standard_headers(verdict: &Verdict<'_>, headers: &mut HeaderMap) {
    let reported_limits = || {
        verdict
            .limits
            .iter()
            .filter(|limit| limit.limit.is_reported)
    };
    // Both headers share one buffer, which saves two of four allocations.
    let mut text = Vec::with_capacity(96 * verdict.limits.len());
    for (index, reported) in reported_limits().enumerate() {
        push_policy_item(&mut text, index, reported, verdict.now_us);
    }
    let policies_length = text.len();
    for (index, reported) in reported_limits().enumerate() {
        push_limit_status(&mut text, index, reported, verdict.now_us);
    }
    let mut statuses = Bytes::from(text);
    let policies = statuses.split_to(policies_length);
    for (name, text) in [(&RATELIMIT_POLICY, policies), (&RATELIMIT, statuses)] {
        // The buffer contains printable ASCII only.
        if let Ok(value) = HeaderValue::from_maybe_shared(text) {
            append_to_list_header(headers, name, value);
        }
    }
}

/// Whether an upstream's `RateLimit` is a Dictionary such as `limit=10, remaining=5, reset=3`.
///
/// Drafts up to 07 use a Dictionary. A List item appended to a Dictionary would make the whole
/// header invalid.
pub(super) fn is_structured_dictionary(value: &HeaderValue) -> bool {
    let first = value
        .as_bytes()
        .split(|byte| matches!(byte, b';' | b',' | b'"'))
        .next();
    first.is_some_and(|member| member.contains(&b'='))
}

/// Appends an item of `RateLimit-Policy`, such as `"login";q=5;w=60`.
fn push_policy_item(out: &mut Vec<u8>, index: usize, reported: &LimitReport<'_>, now_us: u64) {
    let named_limit = reported.limit;
    push_item_name(out, index, &named_limit.name);
    push_integer_parameter(out, b";q=", reported.limit_in_effect().capacity());
    // `w` is the current window in whole seconds: omitted below one second, otherwise rounded up,
    // so that the header never promises more quota.
    let has_window = !matches!(named_limit.limit.algorithm, Algorithm::Concurrency { .. });
    let window_us = named_limit.limit.period_length_us(now_us);
    if has_window && window_us >= SECOND_US {
        push_integer_parameter(out, b";w=", window_us.div_ceil(SECOND_US));
    }
    if let Some(unit) = &named_limit.unit {
        out.extend_from_slice(b";qu=");
        push_structured_string(out, unit);
    }
}

/// Appends an item of `RateLimit`, such as `"login";r=0;t=42`: `r` grows in 42 s, also if another
/// limit refuses for less or more time.
fn push_limit_status(out: &mut Vec<u8>, index: usize, reported: &LimitReport<'_>, now_us: u64) {
    push_item_name(out, index, &reported.limit.name);
    push_integer_parameter(out, b";r=", reported.status.remaining);
    if let Some(grows_at_us) = reported.status.next_growth_us {
        let wait_s = grows_at_us.saturating_sub(now_us).div_ceil(SECOND_US);
        push_integer_parameter(out, b";t=", wait_s);
    }
}

fn push_item_name(out: &mut Vec<u8>, index: usize, name: &str) {
    if index > 0 {
        out.extend_from_slice(b", ");
    }
    push_structured_string(out, name);
}

fn push_integer_parameter(out: &mut Vec<u8>, key: &[u8], value: u64) {
    out.extend_from_slice(key);
    out.extend_from_slice(
        itoa::Buffer::new()
            .format(value.min(MAX_STRUCTURED_INTEGER))
            .as_bytes(),
    );
}

/// Appends a structured-field String (RFC 9651, 3.3.3). Characters other than printable ASCII
/// become `?`.
fn push_structured_string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    for character in text.chars() {
        match u8::try_from(character) {
            Ok(byte @ (b'"' | b'\\')) => out.extend_from_slice(&[b'\\', byte]),
            Ok(byte @ b' '..=b'~') => out.push(byte),
            _ => out.push(b'?'),
        }
    }
    out.push(b'"');
}
