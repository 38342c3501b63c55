//! Rate-limit headers, which report quota and usage to the client on every response.
//!
//! Standard headers are `RateLimit-Policy` and `RateLimit`; legacy headers are `X-RateLimit-*`.
//! The upstream's own rate-limit headers are never removed or made less strict.

use super::headers::{append_to_list, integer_header_value};
use crate::enforcer::{ReportedLimit, RequestOutcome, RetryHint, Verdict};
use crate::limiter::{Algorithm, Refusal};
use crate::policy::RateLimitHeaderSettings;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use std::cmp::Ordering;

static RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
static RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
static LEGACY_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
static LEGACY_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
static LEGACY_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

const SECOND_US: u64 = 1_000_000;

/// Largest Integer of a structured field (RFC 9651, 3.3.1).
const MAX_STRUCTURED_INTEGER: u64 = 999_999_999_999_999;

/// Adds the configured rate-limit headers to a response head, if any limit applied.
pub(in crate::proxy) fn write_headers(
    verdict: &Verdict<'_>,
    settings: RateLimitHeaderSettings,
    headers: &mut HeaderMap,
) {
    if verdict.limits.is_empty() {
        return;
    }
    // Upstreams rarely send such headers. One scan of all names is cheaper than five lookups.
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

/// Converts a wait in microseconds to `Retry-After` seconds: rounded up, at least 1.
fn retry_after_from_us(retry_after_us: u64) -> u64 {
    retry_after_us.div_ceil(SECOND_US).max(1)
}

impl RetryHint {
    /// Returns the `Retry-After` seconds: 1 if the wait is unknown, `None` if no retry can succeed.
    pub(in crate::proxy) fn retry_after_s(self) -> Option<u64> {
        match self {
            Self::After(us) => Some(retry_after_from_us(us)),
            Self::Unknown => Some(1),
            Self::Never => None,
        }
    }
}

fn write_standard_headers(verdict: &Verdict<'_>, headers: &mut HeaderMap) {
    // At most Retry-After: a client that waits that long is admitted.
    let max_reset_s = match &verdict.outcome {
        RequestOutcome::Limited(limited) => limited.retry.retry_after_s(),
        _ => None,
    };
    // One buffer for both headers saves two of four allocations.
    let mut text = Vec::with_capacity(96 * verdict.limits.len());
    for (nth, reported) in verdict.limits.iter().enumerate() {
        push_policy_item(&mut text, nth, reported);
    }
    let policies = text.len();
    for (nth, reported) in verdict.limits.iter().enumerate() {
        push_limit_status(&mut text, nth, reported, verdict.now_us, max_reset_s);
    }
    let mut statuses = Bytes::from(text);
    let policies = statuses.split_to(policies);
    for (name, text) in [(&RATELIMIT_POLICY, policies), (&RATELIMIT, statuses)] {
        // Only visible ASCII was pushed.
        if let Ok(value) = HeaderValue::from_maybe_shared(text) {
            append_to_list(headers, name, value);
        }
    }
}

/// Whether an upstream's header is a Dictionary such as `limit=10, remaining=5, reset=3`.
///
/// Drafts up to 07 use this format. Appending a List item to it would make the header invalid.
fn is_structured_dictionary(value: &HeaderValue) -> bool {
    let first = value
        .as_bytes()
        .split(|byte| matches!(byte, b';' | b',' | b'"'))
        .next();
    first.is_some_and(|member| member.contains(&b'='))
}

/// Appends an item such as `"login";q=5;w=60`.
fn push_policy_item(out: &mut Vec<u8>, index: usize, reported: &ReportedLimit<'_>) {
    let named_limit = reported.limit;
    push_list_item(out, index, &named_limit.name);
    push_parameter(out, b";q=", named_limit.limit.capacity());
    // `w` is in whole seconds. A window below one second has none; others are rounded up, so that
    // the header never promises more quota.
    let has_window = !matches!(named_limit.limit.algorithm, Algorithm::Concurrency { .. });
    if has_window && named_limit.limit.per_us >= SECOND_US {
        push_parameter(out, b";w=", named_limit.limit.per_us.div_ceil(SECOND_US));
    }
    if let Some(unit) = &named_limit.unit {
        out.extend_from_slice(b";qu=");
        push_structured_string(out, unit);
    }
}

/// Appends an item such as `"login";r=0;t=42`.
fn push_limit_status(
    out: &mut Vec<u8>,
    index: usize,
    reported: &ReportedLimit<'_>,
    now_us: u64,
    max_reset_s: Option<u64>,
) {
    push_list_item(out, index, &reported.limit.name);
    push_parameter(out, b";r=", reported.standing.remaining);
    if let Some(grows_at_us) = reported.standing.next_growth_us {
        let wait_s = grows_at_us.saturating_sub(now_us).div_ceil(SECOND_US);
        push_parameter(
            out,
            b";t=",
            max_reset_s.map_or(wait_s, |max_s| wait_s.min(max_s)),
        );
    }
}

fn push_list_item(out: &mut Vec<u8>, index: usize, name: &str) {
    if index > 0 {
        out.extend_from_slice(b", ");
    }
    push_structured_string(out, name);
}

fn push_parameter(out: &mut Vec<u8>, key: &[u8], value: u64) {
    out.extend_from_slice(key);
    out.extend_from_slice(
        itoa::Buffer::new()
            .format(value.min(MAX_STRUCTURED_INTEGER))
            .as_bytes(),
    );
}

/// Appends a String (RFC 9651, 3.3.3). Characters other than printable ASCII become `?`.
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

fn write_legacy_headers(
    verdict: &Verdict<'_>,
    reset_as_epoch: bool,
    has_upstream_headers: bool,
    headers: &mut HeaderMap,
) {
    let Some(tightest) = find_tightest_limit(&verdict.limits) else {
        return;
    };
    if has_upstream_headers && is_upstream_as_tight(headers, tightest.standing.remaining) {
        return;
    }
    let reset_us = reset_at_us(tightest, verdict.now_us);
    let from_us = if reset_as_epoch { 0 } else { verdict.now_us };
    let reset_s = reset_us.saturating_sub(from_us).div_ceil(SECOND_US);
    headers.insert(
        &LEGACY_LIMIT,
        integer_header_value(tightest.limit.limit.capacity()),
    );
    headers.insert(
        &LEGACY_REMAINING,
        integer_header_value(tightest.standing.remaining),
    );
    headers.insert(&LEGACY_RESET, integer_header_value(reset_s));
}

/// Time (µs) at which the limit's remaining units next grow or, if it refuses, suffice.
pub(in crate::proxy) fn reset_at_us(reported: &ReportedLimit<'_>, now_us: u64) -> u64 {
    match reported.standing.refusal {
        Some(Refusal::Until(at_us)) => at_us,
        // Consistent with `Retry-After: 1`.
        Some(Refusal::Unknown) => now_us.saturating_add(SECOND_US),
        _ => reported.standing.next_growth_us.unwrap_or(now_us),
    }
}

/// Returns the refusing limit with the longest wait. If none refuses, returns the limit with the
/// lowest remaining share of its capacity. Ties go to the first.
fn find_tightest_limit<'a, 't>(limits: &'a [ReportedLimit<'t>]) -> Option<&'a ReportedLimit<'t>> {
    limits.iter().reduce(|best, next| {
        if compare_tightness(next, best) == Ordering::Greater {
            next
        } else {
            best
        }
    })
}

fn compare_tightness(one: &ReportedLimit<'_>, two: &ReportedLimit<'_>) -> Ordering {
    let refusal_of = |reported: &ReportedLimit<'_>| reported.standing.refusal;
    let scaled_remaining = |limit: &ReportedLimit<'_>, other: &ReportedLimit<'_>| {
        u128::from(limit.standing.remaining) * u128::from(other.limit.limit.capacity().max(1))
    };
    refusal_of(one)
        .cmp(&refusal_of(two))
        .then_with(|| match refusal_of(one) {
            // Compares r1/q1 with r2/q2 without a division; the lower share is tighter.
            None => scaled_remaining(two, one).cmp(&scaled_remaining(one, two)),
            Some(_) => Ordering::Equal,
        })
}

/// Whether the upstream sent its own `X-RateLimit-*` headers that are at least as strict, or that
/// cannot be compared.
fn is_upstream_as_tight(headers: &HeaderMap, remaining: u64) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::enforcer::LimitRejection;
    use crate::limiter::{Limit, LimitStatus};
    use crate::policy::NamedLimit;
    use proptest::prelude::*;
    use smallvec::{SmallVec, smallvec};
    use std::time::Duration;

    const NOW_US: u64 = 1_700_000_000_500_000;
    const BOTH: RateLimitHeaderSettings = RateLimitHeaderSettings {
        standard: true,
        legacy: true,
        legacy_reset_epoch: false,
    };

    fn named_limit(name: &str, requests: u64, per_us: u64) -> NamedLimit {
        let limit = Limit {
            requests,
            per_us,
            algorithm: Algorithm::SlidingLog,
        };
        NamedLimit {
            name: name.into(),
            unit: None,
            limit,
        }
    }

    fn report_open_limit(
        limit: &NamedLimit,
        remaining: u64,
        grows_in_us: Option<u64>,
    ) -> ReportedLimit<'_> {
        let grows_at_us = grows_in_us.map(|us| NOW_US + us);
        ReportedLimit {
            limit,
            standing: LimitStatus {
                remaining,
                next_growth_us: grows_at_us,
                refusal: None,
            },
            key_id: 7,
        }
    }

    fn report_refusing_limit(
        limit: &NamedLimit,
        remaining: u64,
        refusal: Refusal,
    ) -> ReportedLimit<'_> {
        let grows_at_us = match refusal {
            Refusal::Until(at_us) => Some(at_us),
            Refusal::Never | Refusal::Unknown => None,
        };
        ReportedLimit {
            limit,
            standing: LimitStatus {
                remaining,
                next_growth_us: grows_at_us,
                refusal: Some(refusal),
            },
            key_id: 7,
        }
    }

    fn headers_for_limits(
        limits: &[ReportedLimit<'_>],
        fields: RateLimitHeaderSettings,
        headers: HeaderMap,
    ) -> HeaderMap {
        headers_for_outcome(RequestOutcome::Forward, limits, fields, headers)
    }

    fn headers_for_outcome<'t>(
        outcome: RequestOutcome<'t>,
        limits: &[ReportedLimit<'t>],
        fields: RateLimitHeaderSettings,
        mut headers: HeaderMap,
    ) -> HeaderMap {
        let limits = limits.iter().copied().collect();
        let verdict = Verdict {
            slot_guard: None,
            estimated_charges: Vec::new(),
            outcome,
            limits,
            now_us: NOW_US,
            decided_at: None,
            source: None,
            delay: Duration::ZERO,
            is_degraded: false,
            shadow_rejected: SmallVec::new(),
        };
        write_headers(&verdict, fields, &mut headers);
        headers
    }

    fn header_map(list: &[(&'static str, &str)]) -> HeaderMap {
        list.iter()
            .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()))
            .collect()
    }

    #[test]
    fn all_limits_are_items_of_one_line() {
        let (login, daily) = (
            named_limit("login", 5, 60_000_000),
            named_limit("daily", 1000, 86_400_000_000),
        );
        let headers = headers_for_limits(
            &[
                report_open_limit(&login, 4, Some(59_000_001)),
                report_open_limit(&daily, 1000, None),
            ],
            BOTH,
            HeaderMap::new(),
        );
        let expected = header_map(&[
            (
                "ratelimit-policy",
                "\"login\";q=5;w=60, \"daily\";q=1000;w=86400",
            ),
            ("ratelimit", "\"login\";r=4;t=60, \"daily\";r=1000"),
            ("x-ratelimit-limit", "5"),
            ("x-ratelimit-remaining", "4"),
            ("x-ratelimit-reset", "60"),
        ]);
        assert_eq!(headers, expected);
    }

    #[test]
    fn writes_only_the_configured_headers() {
        let login = named_limit("login", 5, 60_000_000);
        let limits = [report_open_limit(&login, 4, Some(1))];
        let none = RateLimitHeaderSettings {
            standard: false,
            legacy: false,
            legacy_reset_epoch: false,
        };
        assert!(headers_for_limits(&limits, none, HeaderMap::new()).is_empty());
        assert!(headers_for_limits(&[], BOTH, HeaderMap::new()).is_empty());
        assert_eq!(
            headers_for_limits(
                &limits,
                RateLimitHeaderSettings {
                    standard: true,
                    ..none
                },
                HeaderMap::new()
            )
            .len(),
            2
        );
        let epoch = RateLimitHeaderSettings {
            legacy: true,
            legacy_reset_epoch: true,
            ..none
        };
        let headers = headers_for_limits(&limits, epoch, HeaderMap::new());
        assert_eq!(
            (headers.len(), headers["x-ratelimit-reset"].as_bytes()),
            (3, &b"1700000001"[..])
        );
    }

    #[test]
    fn handles_subsecond_windows_units_and_special_names() {
        let mut limit = named_limit("a\"b\\c\u{e9}\n", u64::MAX, 999_999);
        limit.unit = Some("tokens".into());
        let headers = headers_for_limits(
            &[report_open_limit(&limit, 7, None)],
            BOTH,
            HeaderMap::new(),
        );
        assert_eq!(
            headers["ratelimit-policy"],
            "\"a\\\"b\\\\c??\";q=999999999999999;qu=\"tokens\""
        );
        assert_eq!(headers["ratelimit"], "\"a\\\"b\\\\c??\";r=7");
        assert_eq!(headers["x-ratelimit-reset"], "0");
    }

    #[test]
    fn reset_parameter_never_exceeds_retry_after() {
        let (slow, fast) = (
            named_limit("slow", 5, 60_000_000),
            named_limit("fast", 1, 1_000_000),
        );
        let limited = LimitRejection {
            policy: "fast",
            violated_limits: smallvec!["fast"],
            retry: RetryHint::After(300_000),
            is_blocked: false,
            reject: None,
        };
        let limits = [
            report_open_limit(&slow, 3, Some(50_000_000)),
            report_refusing_limit(&fast, 0, Refusal::Until(NOW_US + 300_000)),
        ];
        let headers = headers_for_outcome(
            RequestOutcome::Limited(limited),
            &limits,
            BOTH,
            HeaderMap::new(),
        );
        assert_eq!(headers["ratelimit"], "\"slow\";r=3;t=1, \"fast\";r=0;t=1");
        assert_eq!(headers["x-ratelimit-limit"], "1");
    }

    #[test]
    fn legacy_headers_show_the_tightest_limit() {
        let (a, b) = (
            named_limit("a", 10, 1_000_000),
            named_limit("b", 100, 1_000_000),
        );
        let limit = |limits: &[ReportedLimit<'_>]| {
            headers_for_limits(limits, BOTH, HeaderMap::new())["x-ratelimit-limit"]
                .to_str()
                .unwrap()
                .to_owned()
        };
        assert_eq!(
            limit(&[
                report_open_limit(&a, 5, None),
                report_open_limit(&b, 40, None)
            ]),
            "100"
        );
        assert_eq!(
            limit(&[
                report_open_limit(&a, 5, None),
                report_open_limit(&b, 50, None)
            ]),
            "10"
        );
        assert_eq!(
            limit(&[
                report_open_limit(&b, 50, None),
                report_open_limit(&a, 5, None)
            ]),
            "100"
        );
        let later = Refusal::Until(NOW_US + 2);
        assert_eq!(
            limit(&[
                report_open_limit(&a, 0, None),
                report_refusing_limit(&b, 50, later)
            ]),
            "100"
        );
        assert_eq!(
            limit(&[
                report_refusing_limit(&a, 0, Refusal::Until(NOW_US + 1)),
                report_refusing_limit(&b, 0, later)
            ]),
            "100"
        );
        assert_eq!(
            limit(&[
                report_refusing_limit(&a, 3, Refusal::Never),
                report_refusing_limit(&b, 0, later)
            ]),
            "10"
        );
        let zero = named_limit("zero", 0, 1);
        assert_eq!(
            limit(&[
                report_open_limit(&a, 1, None),
                report_refusing_limit(&zero, 0, Refusal::Never)
            ]),
            "0"
        );
    }

    #[test]
    fn standard_headers_of_the_upstream_are_extended() {
        let login = named_limit("login", 5, 60_000_000);
        let own = header_map(&[
            ("ratelimit", "\"theirs\";r=1"),
            ("ratelimit-policy", "\"theirs\";q=9"),
        ]);
        let headers = headers_for_limits(&[report_open_limit(&login, 4, None)], BOTH, own);
        assert_eq!(headers["ratelimit"], "\"theirs\";r=1, \"login\";r=4");
        assert_eq!(
            headers["ratelimit-policy"],
            "\"theirs\";q=9, \"login\";q=5;w=60"
        );
    }

    #[test]
    fn upstream_headers_of_an_older_draft_are_unchanged() {
        let login = named_limit("login", 5, 60_000_000);
        let theirs = header_map(&[
            ("ratelimit", "limit=10, remaining=5, reset=3"),
            ("ratelimit-policy", "10;w=60"),
        ]);
        let standard = RateLimitHeaderSettings {
            legacy: false,
            ..BOTH
        };
        let headers = headers_for_limits(
            &[report_open_limit(&login, 4, Some(1_000_000))],
            standard,
            theirs.clone(),
        );
        assert_eq!(headers, theirs);
        let token = header_map(&[("ratelimit", "theirs;r=5;t=3")]);
        let headers = headers_for_limits(
            &[report_open_limit(&login, 4, Some(1_000_000))],
            standard,
            token,
        );
        assert_eq!(headers["ratelimit"], "theirs;r=5;t=3, \"login\";r=4;t=1");
    }

    #[test]
    fn upstream_legacy_headers_are_replaced_only_by_tighter_ones() {
        let login = named_limit("login", 5, 60_000_000);
        let limits = [report_open_limit(&login, 4, Some(1_000_000))];
        for kept in [
            header_map(&[
                ("x-ratelimit-limit", "9"),
                ("x-ratelimit-remaining", "4"),
                ("x-ratelimit-reset", "7"),
            ]),
            header_map(&[
                ("x-ratelimit-limit", "9"),
                ("x-ratelimit-remaining", "many"),
            ]),
            header_map(&[("x-ratelimit-limit", "9")]),
            header_map(&[("x-ratelimit-reset", "9")]),
        ] {
            let legacy = RateLimitHeaderSettings {
                standard: false,
                ..BOTH
            };
            assert_eq!(headers_for_limits(&limits, legacy, kept.clone()), kept);
        }
        let looser = header_map(&[("x-ratelimit-limit", "9"), ("x-ratelimit-remaining", "5")]);
        let headers = headers_for_limits(&limits, BOTH, looser);
        let trio = [
            "x-ratelimit-limit",
            "x-ratelimit-remaining",
            "x-ratelimit-reset",
        ];
        assert_eq!(
            trio.map(|name| headers[name].to_str().unwrap()),
            ["5", "4", "1"]
        );
    }

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
            assert_eq!(retry_after_from_us(us), seconds, "{us}");
        }
    }

    proptest! {
        #[test]
        fn any_limit_name_makes_a_valid_header(name in any::<String>(), requests: u64, per_us: u64, remaining: u64) {
            let limit = named_limit(&name, requests, per_us);
            let headers = headers_for_limits(&[report_open_limit(&limit, remaining, None)], BOTH, HeaderMap::new());
            prop_assert!(headers["ratelimit"].to_str().unwrap().starts_with('"'));
            prop_assert!(headers["ratelimit-policy"].to_str().unwrap().contains("\";q="));
        }
    }
}
