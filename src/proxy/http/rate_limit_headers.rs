//! Rate-limit headers, which report quota and usage to the client on every response.
//!
//! Standard headers are `RateLimit-Policy` and `RateLimit`; legacy headers are `X-RateLimit-*`.
//! The upstream's own rate-limit headers are never removed or made less strict.

#[cfg(test)]
mod tests;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use std::cmp::Ordering;

use super::header_lines::append_to_list_header;
use super::headers::integer_header_value;
use crate::enforcer::{LimitReport, RetryHint, Verdict};
use crate::limiter::Refusal;
use crate::policy::{PolicyMode, PolicyTable, RateLimitHeaderSettings};

/// Adds the configured rate-limit headers to a response head, if any limit may be reported.
pub(crate) fn write_headers(
    verdict: &Verdict<'_>,
    settings: RateLimitHeaderSettings,
    headers: &mut HeaderMap,
) {
    if !verdict.reached_thresholds.is_empty() {
        write_notify_header(verdict, headers);
    }
    if !verdict.limits.iter().any(|limit| limit.limit.is_reported) {
        return;
    }
    // Upstreams rarely send rate-limit headers. One scan of all names is cheaper than five lookups.
    let has_upstream_headers = headers.keys().any(|name| {
        let name = name.as_str();
        let name = name.strip_prefix("x-").unwrap_or(name);
        name.starts_with("ratelimit")
    });
    let has_dictionary = |headers: &HeaderMap| {
        let value = headers.get(&RATELIMIT);
        value.is_some_and(is_structured_dictionary)
    };
    if settings.standard && !(has_upstream_headers && has_dictionary(headers)) {
        write_standard_headers(verdict, headers);
    }
    if settings.legacy {
        write_legacy_headers(
            verdict,
            settings.legacy_reset_epoch,
            has_upstream_headers,
            headers,
        );
    }
}

pub(crate) static RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
static RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// Largest Integer of a structured field (RFC 9651, 3.3.1).
const MAX_STRUCTURED_INTEGER: u64 = 999_999_999_999_999;

pub(crate) fn write_standard_headers(verdict: &Verdict<'_>, headers: &mut HeaderMap) {
    let limits = &verdict.limits;
    let reported_limits = || limits.iter().filter(|limit| limit.limit.is_reported);
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
pub(crate) fn is_structured_dictionary(value: &HeaderValue) -> bool {
    let is_delimiter = |byte: &u8| matches!(byte, b';' | b',' | b'"');
    let first = value.as_bytes().split(is_delimiter).next();
    first.is_some_and(|member| member.contains(&b'='))
}

/// Appends an item of `RateLimit-Policy`, such as `"login";q=5;w=60`.
fn push_policy_item(out: &mut Vec<u8>, index: usize, reported: &LimitReport<'_>, now_us: u64) {
    let named_limit = reported.limit;
    push_item_name(out, index, &named_limit.name);
    push_integer_parameter(out, b";q=", reported.limit_in_effect().capacity());
    // `w` is the current window in whole seconds: omitted below one second, otherwise rounded up,
    // so that the header never promises more quota.
    let has_window = !named_limit.limit.algorithm.counts_slots();
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
    let value = value.min(MAX_STRUCTURED_INTEGER);
    out.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
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

static NOTIFY: HeaderName = HeaderName::from_static("x-tidegate-notify");

/// Lists the thresholds that the request is the first to reach, such as `"login";threshold=0.8`.
fn write_notify_header(verdict: &Verdict<'_>, headers: &mut HeaderMap) {
    let mut text = Vec::new();
    for (index, (named, threshold)) in verdict.reached_thresholds.iter().enumerate() {
        push_item_name(&mut text, index, &named.name);
        text.extend_from_slice(format!(";threshold={threshold}").as_bytes());
    }
    // The text contains printable ASCII only.
    if let Ok(value) = HeaderValue::from_maybe_shared(Bytes::from(text)) {
        append_to_list_header(headers, &NOTIFY, value);
    }
}

static LEGACY_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
static LEGACY_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
static LEGACY_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

pub(crate) fn write_legacy_headers(
    verdict: &Verdict<'_>,
    reset_as_epoch: bool,
    has_upstream_headers: bool,
    headers: &mut HeaderMap,
) {
    let Some(tightest) = find_tightest_limit(&verdict.limits) else {
        return;
    };
    if has_upstream_headers && must_keep_upstream_headers(headers, tightest.status.remaining) {
        return;
    }
    let from_us = if reset_as_epoch { 0 } else { verdict.now_us };
    let (capacity, remaining) = (
        tightest.limit_in_effect().capacity(),
        tightest.status.remaining,
    );
    headers.insert(&LEGACY_LIMIT, integer_header_value(capacity));
    headers.insert(&LEGACY_REMAINING, integer_header_value(remaining));
    match reset_at_us(tightest, verdict.now_us) {
        Some(reset_us) => {
            let reset_s = reset_us.saturating_sub(from_us).div_ceil(SECOND_US);
            headers.insert(&LEGACY_RESET, integer_header_value(reset_s))
        }
        None => headers.remove(&LEGACY_RESET),
    };
}

/// Time (µs) at which the limit's units next grow, or will suffice if the limit refused.
/// `None` if they never will, as with `Retry-After`.
pub(crate) fn reset_at_us(reported: &LimitReport<'_>, now_us: u64) -> Option<u64> {
    match reported.status.refusal {
        Some(Refusal::Until(at_us)) => Some(at_us),
        // An unknown wait is reported as one second, consistent with `Retry-After: 1`.
        Some(Refusal::Unknown) => Some(now_us.saturating_add(SECOND_US)),
        Some(Refusal::Never) => None,
        None => Some(reported.status.next_growth_us.unwrap_or(now_us)),
    }
}

/// Returns the reported limit that refuses for longest or, if none refuses, the one with the lowest
/// remaining share of its capacity. Of equal limits, the first is returned.
fn find_tightest_limit<'a, 't>(limits: &'a [LimitReport<'t>]) -> Option<&'a LimitReport<'t>> {
    let reported = limits.iter().filter(|limit| limit.limit.is_reported);
    reported.reduce(|best, next| match compare_tightness(next, best) {
        Ordering::Greater => next,
        _ => best,
    })
}

fn compare_tightness(one: &LimitReport<'_>, two: &LimitReport<'_>) -> Ordering {
    let scaled_remaining = |limit: &LimitReport<'_>, other: &LimitReport<'_>| {
        u128::from(limit.status.remaining) * u128::from(other.limit_in_effect().capacity().max(1))
    };
    let refusal = one.status.refusal;
    refusal
        .cmp(&two.status.refusal)
        .then_with(|| match refusal {
            // Compares remaining/capacity of both limits without a division; the lower share is
            // tighter.
            None => scaled_remaining(two, one).cmp(&scaled_remaining(one, two)),
            Some(_) => Ordering::Equal,
        })
}

/// Whether the upstream's `X-RateLimit-*` headers must be kept, because they are at least as strict
/// as `remaining` or cannot be compared.
fn must_keep_upstream_headers(headers: &HeaderMap, remaining: u64) -> bool {
    match headers.get(&LEGACY_REMAINING) {
        None => headers.contains_key(&LEGACY_LIMIT) || headers.contains_key(&LEGACY_RESET),
        Some(value) => {
            let own: Option<u64> = value
                .to_str()
                .ok()
                .and_then(|text| text.trim().parse().ok());
            own.is_none_or(|own| own <= remaining)
        }
    }
}

pub(crate) const SECOND_US: u64 = 1_000_000;

impl RetryHint {
    /// Returns the wait in seconds for `Retry-After`: 1 if unknown, `None` if no retry can succeed.
    pub(crate) fn retry_after_s(self) -> Option<u64> {
        match self {
            // Rounded up, at least 1.
            Self::After(us) => Some(us.div_ceil(SECOND_US).max(1)),
            Self::Unknown => Some(1),
            Self::Never => None,
        }
    }
}

/// Adds the header if the request is marked.
pub(crate) fn add_mark_header(headers: &mut HeaderMap, table: &PolicyTable, verdict: &Verdict<'_>) {
    if let Some(value) = build_mark_value(verdict) {
        headers.insert(&table.mark_header, value);
    }
}

/// Builds the value: the names of the policies. Returns `None` if the request is not marked.
pub(crate) fn build_mark_value(verdict: &Verdict<'_>) -> Option<HeaderValue> {
    let unenforced = &verdict.unenforced_rejections;
    if unenforced.is_empty() {
        return None;
    }
    let names: Vec<&str> = unenforced.names_in_mode(PolicyMode::Mark).collect();
    // Names of policies are letters, digits, `_`, `.` and `-`.
    let value = HeaderValue::try_from(names.join(", ")).ok();
    value.filter(|_| !names.is_empty())
}

#[cfg(test)]
mod retry_after_tests {
    use super::*;

    #[test]
    fn retry_after_is_rounded_up_and_at_least_one() {
        let cases = [
            (0, 1),
            (1, 1),
            (999_999, 1),
            (1_000_000, 1),
            (1_000_001, 2),
            (60_000_000, 60),
        ];
        for (us, seconds) in cases {
            let hint = RetryHint::After(us);
            assert_eq!(hint.retry_after_s(), Some(seconds), "{us}");
        }
    }
}
