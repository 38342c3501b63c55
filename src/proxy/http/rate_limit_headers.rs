//! Rate-limit headers, which report quota and usage to the client on every response.
//!
//! Standard headers are `RateLimit-Policy` and `RateLimit`; legacy headers are `X-RateLimit-*`.
//! The upstream's own rate-limit headers are never removed or made less strict.

mod legacy_headers;
mod retry_after;
mod standard_headers;
#[cfg(test)]
mod tests;

pub(crate) use legacy_headers::reset_at_us;

use http::HeaderMap;

use super::rate_limit_headers::legacy_headers::write_legacy_headers;
use super::rate_limit_headers::standard_headers::{
    RATELIMIT, is_structured_dictionary, write_standard_headers,
};
use crate::enforcer::Verdict;
use crate::policy::RateLimitHeaderSettings;

/// Adds the configured rate-limit headers to a response head, if any limit may be reported.
pub(crate) fn write_headers(
    verdict: &Verdict<'_>,
    settings: RateLimitHeaderSettings,
    headers: &mut HeaderMap,
) {
    if !verdict.limits.iter().any(|limit| limit.limit.is_reported) {
        return;
    }
    // Upstreams rarely send rate-limit headers. One scan of all names is cheaper than five lookups.
    let has_upstream_headers = headers.keys().any(|name| {
        let name = name.as_str();
        name.strip_prefix("x-")
            .unwrap_or(name)
            .starts_with("ratelimit")
    });
    if settings.standard
        && !(has_upstream_headers
            && headers
                .get(&RATELIMIT)
                .is_some_and(is_structured_dictionary))
    {
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
