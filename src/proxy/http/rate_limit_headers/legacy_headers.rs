//! `X-RateLimit-Limit`, `-Remaining` and `-Reset`, which describe the tightest limit.

use http::{HeaderMap, HeaderName};
use std::cmp::Ordering;

use super::retry_after::SECOND_US;
use crate::enforcer::{LimitReport, Verdict};
use crate::limiter::Refusal;
use crate::proxy::http::headers::integer_header_value;

static LEGACY_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
static LEGACY_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
static LEGACY_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

pub(super) fn write_legacy_headers(
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
    headers.insert(
        &LEGACY_LIMIT,
        integer_header_value(tightest.limit_in_effect().capacity()),
    );
    headers.insert(
        &LEGACY_REMAINING,
        integer_header_value(tightest.status.remaining),
    );
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
    reported.reduce(|best, next| {
        if compare_tightness(next, best) == Ordering::Greater {
            next
        } else {
            best
        }
    })
}

fn compare_tightness(one: &LimitReport<'_>, two: &LimitReport<'_>) -> Ordering {
    let refusal_of = |reported: &LimitReport<'_>| reported.status.refusal;
    let scaled_remaining = |limit: &LimitReport<'_>, other: &LimitReport<'_>| {
        u128::from(limit.status.remaining) * u128::from(other.limit_in_effect().capacity().max(1))
    };
    refusal_of(one)
        .cmp(&refusal_of(two))
        .then_with(|| match refusal_of(one) {
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
            let upstream_remaining = value
                .to_str()
                .ok()
                .and_then(|text| text.trim().parse::<u64>().ok());
            upstream_remaining.is_none_or(|upstream_remaining| upstream_remaining <= remaining)
        }
    }
}
