//! Rate-limit fields: what every answer tells the client about its quota.
//!
//! Standard: `RateLimit-Policy` and `RateLimit` as of draft-ietf-httpapi-ratelimit-headers-11, Lists of
//! Strings with parameters (RFC 9651), all limits in one line each. Legacy: the `X-RateLimit-*` trio, for
//! the tightest limit. An upstream's own fields are never loosened or removed.

use super::headers::{append_to_list, number};
use crate::enforcer::{Outcome, Reported, Retry, Verdict};
use crate::limiter::{Algorithm, Refusal};
use crate::policy::Fields;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use std::cmp::Ordering;

static RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
static RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
static LEGACY_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
static LEGACY_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
static LEGACY_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

const SECOND_US: u64 = 1_000_000;

/// The largest Integer of a structured field (RFC 9651, 3.3.1).
const MAX_INTEGER: u64 = 999_999_999_999_999;

/// Writes the fields that `fields` asks for into the head of an answer; nothing if no limit applied.
pub(super) fn write(verdict: &Verdict<'_>, fields: Fields, headers: &mut HeaderMap) {
    if verdict.limits.is_empty() {
        return;
    }
    // Mostly it has none, and one look at all names costs less than one for each of ours.
    let has_theirs = headers.keys().any(|name| {
        let name = name.as_str();
        name.strip_prefix("x-")
            .unwrap_or(name)
            .starts_with("ratelimit")
    });
    if fields.standard && !(has_theirs && headers.get(&RATELIMIT).is_some_and(is_dictionary)) {
        write_standard(verdict, headers);
    }
    if fields.legacy {
        write_legacy(verdict, fields.legacy_reset_epoch, has_theirs, headers);
    }
}

/// What `Retry-After` says for a wait of so many microseconds.
fn retry_after_s(retry_after_us: u64) -> u64 {
    retry_after_us.div_ceil(SECOND_US).max(1)
}

impl Retry {
    /// What `Retry-After` says: of what nobody knows, that it may be soon.
    pub(super) fn header_s(self) -> Option<u64> {
        match self {
            Self::After(us) => Some(retry_after_s(us)),
            Self::Unknown => Some(1),
            Self::Never => None,
        }
    }
}

fn write_standard(verdict: &Verdict<'_>, headers: &mut HeaderMap) {
    // No later than Retry-After: a client that waits that long is admitted.
    let latest_s = match &verdict.outcome {
        Outcome::Limited(limited) => limited.retry.header_s(),
        _ => None,
    };
    // Both in one buffer, which is two allocations instead of four.
    let mut text = Vec::with_capacity(96 * verdict.limits.len());
    for (nth, reported) in verdict.limits.iter().enumerate() {
        push_policy(&mut text, nth, reported);
    }
    let policies = text.len();
    for (nth, reported) in verdict.limits.iter().enumerate() {
        push_standing(&mut text, nth, reported, verdict.now_us, latest_s);
    }
    let mut standings = Bytes::from(text);
    let policies = standings.split_to(policies);
    for (name, text) in [(&RATELIMIT_POLICY, policies), (&RATELIMIT, standings)] {
        // Only visible ASCII was pushed.
        if let Ok(value) = HeaderValue::from_maybe_shared(text) {
            append_to_list(headers, name, value);
        }
    }
}

/// Whether an upstream's field is of the draft's versions up to 07, `limit=10, remaining=5, reset=3`: a
/// Dictionary, which together with a List would be neither, so that clients would lose both.
fn is_dictionary(value: &HeaderValue) -> bool {
    let first = value
        .as_bytes()
        .split(|byte| matches!(byte, b';' | b',' | b'"'))
        .next();
    first.is_some_and(|member| member.contains(&b'='))
}

/// `"login";q=5;w=60`
fn push_policy(out: &mut Vec<u8>, nth: usize, reported: &Reported<'_>) {
    let named = reported.limit;
    push_item(out, nth, &named.name);
    push_parameter(out, b";q=", named.limit.capacity());
    // Whole seconds only, so a window below one has no `w`; others are rounded up to promise no more.
    let has_window = !matches!(named.limit.algorithm, Algorithm::Concurrency { .. });
    if has_window && named.limit.per_us >= SECOND_US {
        push_parameter(out, b";w=", named.limit.per_us.div_ceil(SECOND_US));
    }
    if let Some(unit) = &named.unit {
        out.extend_from_slice(b";qu=");
        push_string(out, unit);
    }
}

/// `"login";r=0;t=42`
fn push_standing(
    out: &mut Vec<u8>,
    nth: usize,
    reported: &Reported<'_>,
    now_us: u64,
    latest_s: Option<u64>,
) {
    push_item(out, nth, &reported.limit.name);
    push_parameter(out, b";r=", reported.standing.remaining);
    if let Some(grows_at_us) = reported.standing.grows_at_us {
        let wait_s = grows_at_us.saturating_sub(now_us).div_ceil(SECOND_US);
        push_parameter(
            out,
            b";t=",
            latest_s.map_or(wait_s, |latest_s| wait_s.min(latest_s)),
        );
    }
}

fn push_item(out: &mut Vec<u8>, nth: usize, name: &str) {
    if nth > 0 {
        out.extend_from_slice(b", ");
    }
    push_string(out, name);
}

fn push_parameter(out: &mut Vec<u8>, key: &[u8], value: u64) {
    out.extend_from_slice(key);
    out.extend_from_slice(
        itoa::Buffer::new()
            .format(value.min(MAX_INTEGER))
            .as_bytes(),
    );
}

/// A String (RFC 9651, 3.3.3), which knows ASCII only.
fn push_string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    for sign in text.chars() {
        match u8::try_from(sign) {
            Ok(byte @ (b'"' | b'\\')) => out.extend_from_slice(&[b'\\', byte]),
            Ok(byte @ b' '..=b'~') => out.push(byte),
            _ => out.push(b'?'),
        }
    }
    out.push(b'"');
}

fn write_legacy(
    verdict: &Verdict<'_>,
    reset_as_epoch: bool,
    has_theirs: bool,
    headers: &mut HeaderMap,
) {
    let Some(tightest) = tightest(&verdict.limits) else {
        return;
    };
    if has_theirs && upstream_is_as_tight(headers, tightest.standing.remaining) {
        return;
    }
    let reset_us = reset_at_us(tightest, verdict.now_us);
    let from_us = if reset_as_epoch { 0 } else { verdict.now_us };
    let reset_s = reset_us.saturating_sub(from_us).div_ceil(SECOND_US);
    headers.insert(&LEGACY_LIMIT, number(tightest.limit.limit.capacity()));
    headers.insert(&LEGACY_REMAINING, number(tightest.standing.remaining));
    headers.insert(&LEGACY_RESET, number(reset_s));
}

/// When more is left of a limit, or, if it refuses, enough.
pub(super) fn reset_at_us(reported: &Reported<'_>, now_us: u64) -> u64 {
    match reported.standing.refusal {
        Some(Refusal::Until(at_us)) => at_us,
        // As Retry-After says.
        Some(Refusal::Unknown) => now_us.saturating_add(SECOND_US),
        _ => reported.standing.grows_at_us.unwrap_or(now_us),
    }
}

/// Of the limits that refuse, the one that does so longest; if none does, the one with the least left for
/// its size. The first of equals.
fn tightest<'a, 't>(limits: &'a [Reported<'t>]) -> Option<&'a Reported<'t>> {
    limits.iter().reduce(|best, next| {
        if tighter(next, best) == Ordering::Greater {
            next
        } else {
            best
        }
    })
}

fn tighter(one: &Reported<'_>, two: &Reported<'_>) -> Ordering {
    let lasts = |reported: &Reported<'_>| reported.standing.refusal;
    let left = |of: &Reported<'_>, other: &Reported<'_>| {
        u128::from(of.standing.remaining) * u128::from(other.limit.limit.capacity().max(1))
    };
    lasts(one).cmp(&lasts(two)).then_with(|| match lasts(one) {
        // r1/q1 against r2/q2 without a division; less left is tighter.
        None => left(two, one).cmp(&left(one, two)),
        Some(_) => Ordering::Equal,
    })
}

/// Whether the upstream sent a trio of its own that leaves the client no more than ours, or that we can't
/// read and so can't say is looser.
fn upstream_is_as_tight(headers: &HeaderMap, remaining: u64) -> bool {
    match headers.get(&LEGACY_REMAINING) {
        None => headers.contains_key(&LEGACY_LIMIT) || headers.contains_key(&LEGACY_RESET),
        Some(value) => {
            let theirs = value
                .to_str()
                .ok()
                .and_then(|text| text.trim().parse::<u64>().ok());
            theirs.is_none_or(|theirs| theirs <= remaining)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::enforcer::Limited;
    use crate::limiter::{Limit, Standing};
    use crate::policy::NamedLimit;
    use proptest::prelude::*;
    use smallvec::{SmallVec, smallvec};
    use std::time::Duration;

    const NOW_US: u64 = 1_700_000_000_500_000;
    const BOTH: Fields = Fields {
        standard: true,
        legacy: true,
        legacy_reset_epoch: false,
    };

    fn named(name: &str, requests: u64, per_us: u64) -> NamedLimit {
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

    fn stands(limit: &NamedLimit, remaining: u64, grows_in_us: Option<u64>) -> Reported<'_> {
        let grows_at_us = grows_in_us.map(|us| NOW_US + us);
        Reported {
            limit,
            standing: Standing {
                remaining,
                grows_at_us,
                refusal: None,
            },
            key: 7,
        }
    }

    fn refuses(limit: &NamedLimit, remaining: u64, refusal: Refusal) -> Reported<'_> {
        let grows_at_us = match refusal {
            Refusal::Until(at_us) => Some(at_us),
            Refusal::Never | Refusal::Unknown => None,
        };
        Reported {
            limit,
            standing: Standing {
                remaining,
                grows_at_us,
                refusal: Some(refusal),
            },
            key: 7,
        }
    }

    fn written(limits: &[Reported<'_>], fields: Fields, headers: HeaderMap) -> HeaderMap {
        written_for(Outcome::Forward, limits, fields, headers)
    }

    fn written_for<'t>(
        outcome: Outcome<'t>,
        limits: &[Reported<'t>],
        fields: Fields,
        mut headers: HeaderMap,
    ) -> HeaderMap {
        let limits = limits.iter().copied().collect();
        let verdict = Verdict {
            hold: None,
            estimates: Vec::new(),
            outcome,
            limits,
            now_us: NOW_US,
            at: None,
            source: None,
            delay: Duration::ZERO,
            degraded: false,
            shadow_rejected: SmallVec::new(),
        };
        write(&verdict, fields, &mut headers);
        headers
    }

    fn fields(list: &[(&'static str, &str)]) -> HeaderMap {
        list.iter()
            .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()))
            .collect()
    }

    #[test]
    fn all_limits_are_items_of_one_line() {
        let (login, daily) = (
            named("login", 5, 60_000_000),
            named("daily", 1000, 86_400_000_000),
        );
        let headers = written(
            &[
                stands(&login, 4, Some(59_000_001)),
                stands(&daily, 1000, None),
            ],
            BOTH,
            HeaderMap::new(),
        );
        let expected = fields(&[
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
    fn only_what_is_asked_for_is_written() {
        let login = named("login", 5, 60_000_000);
        let limits = [stands(&login, 4, Some(1))];
        let none = Fields {
            standard: false,
            legacy: false,
            legacy_reset_epoch: false,
        };
        assert!(written(&limits, none, HeaderMap::new()).is_empty());
        assert!(written(&[], BOTH, HeaderMap::new()).is_empty());
        assert_eq!(
            written(
                &limits,
                Fields {
                    standard: true,
                    ..none
                },
                HeaderMap::new()
            )
            .len(),
            2
        );
        let epoch = Fields {
            legacy: true,
            legacy_reset_epoch: true,
            ..none
        };
        let headers = written(&limits, epoch, HeaderMap::new());
        assert_eq!(
            (headers.len(), headers["x-ratelimit-reset"].as_bytes()),
            (3, &b"1700000001"[..])
        );
    }

    #[test]
    fn windows_below_a_second_and_units_and_odd_names() {
        let mut limit = named("a\"b\\c\u{e9}\n", u64::MAX, 999_999);
        limit.unit = Some("tokens".into());
        let headers = written(&[stands(&limit, 7, None)], BOTH, HeaderMap::new());
        assert_eq!(
            headers["ratelimit-policy"],
            "\"a\\\"b\\\\c??\";q=999999999999999;qu=\"tokens\""
        );
        assert_eq!(headers["ratelimit"], "\"a\\\"b\\\\c??\";r=7");
        assert_eq!(headers["x-ratelimit-reset"], "0");
    }

    #[test]
    fn t_is_never_later_than_retry_after() {
        let (slow, fast) = (named("slow", 5, 60_000_000), named("fast", 1, 1_000_000));
        let limited = Limited {
            policy: "fast",
            violated: smallvec!["fast"],
            retry: Retry::After(300_000),
            blocked: false,
            reject: None,
        };
        let limits = [
            stands(&slow, 3, Some(50_000_000)),
            refuses(&fast, 0, Refusal::Until(NOW_US + 300_000)),
        ];
        let headers = written_for(Outcome::Limited(limited), &limits, BOTH, HeaderMap::new());
        assert_eq!(headers["ratelimit"], "\"slow\";r=3;t=1, \"fast\";r=0;t=1");
        assert_eq!(headers["x-ratelimit-limit"], "1");
    }

    #[test]
    fn legacy_shows_the_tightest_limit() {
        let (a, b) = (named("a", 10, 1_000_000), named("b", 100, 1_000_000));
        let limit = |limits: &[Reported<'_>]| {
            written(limits, BOTH, HeaderMap::new())["x-ratelimit-limit"]
                .to_str()
                .unwrap()
                .to_owned()
        };
        assert_eq!(limit(&[stands(&a, 5, None), stands(&b, 40, None)]), "100");
        assert_eq!(limit(&[stands(&a, 5, None), stands(&b, 50, None)]), "10");
        assert_eq!(limit(&[stands(&b, 50, None), stands(&a, 5, None)]), "100");
        let later = Refusal::Until(NOW_US + 2);
        assert_eq!(limit(&[stands(&a, 0, None), refuses(&b, 50, later)]), "100");
        assert_eq!(
            limit(&[
                refuses(&a, 0, Refusal::Until(NOW_US + 1)),
                refuses(&b, 0, later)
            ]),
            "100"
        );
        assert_eq!(
            limit(&[refuses(&a, 3, Refusal::Never), refuses(&b, 0, later)]),
            "10"
        );
        let zero = named("zero", 0, 1);
        assert_eq!(
            limit(&[stands(&a, 1, None), refuses(&zero, 0, Refusal::Never)]),
            "0"
        );
    }

    #[test]
    fn an_upstreams_standard_fields_are_kept_and_continued() {
        let login = named("login", 5, 60_000_000);
        let own = fields(&[
            ("ratelimit", "\"theirs\";r=1"),
            ("ratelimit-policy", "\"theirs\";q=9"),
        ]);
        let headers = written(&[stands(&login, 4, None)], BOTH, own);
        assert_eq!(headers["ratelimit"], "\"theirs\";r=1, \"login\";r=4");
        assert_eq!(
            headers["ratelimit-policy"],
            "\"theirs\";q=9, \"login\";q=5;w=60"
        );
    }

    #[test]
    fn an_upstreams_fields_of_an_older_draft_stay_as_they_are() {
        let login = named("login", 5, 60_000_000);
        let theirs = fields(&[
            ("ratelimit", "limit=10, remaining=5, reset=3"),
            ("ratelimit-policy", "10;w=60"),
        ]);
        let standard = Fields {
            legacy: false,
            ..BOTH
        };
        let headers = written(
            &[stands(&login, 4, Some(1_000_000))],
            standard,
            theirs.clone(),
        );
        assert_eq!(headers, theirs);
        let token = fields(&[("ratelimit", "theirs;r=5;t=3")]);
        let headers = written(&[stands(&login, 4, Some(1_000_000))], standard, token);
        assert_eq!(headers["ratelimit"], "theirs;r=5;t=3, \"login\";r=4;t=1");
    }

    #[test]
    fn an_upstreams_legacy_fields_give_way_only_to_tighter_ones() {
        let login = named("login", 5, 60_000_000);
        let limits = [stands(&login, 4, Some(1_000_000))];
        for kept in [
            fields(&[
                ("x-ratelimit-limit", "9"),
                ("x-ratelimit-remaining", "4"),
                ("x-ratelimit-reset", "7"),
            ]),
            fields(&[
                ("x-ratelimit-limit", "9"),
                ("x-ratelimit-remaining", "many"),
            ]),
            fields(&[("x-ratelimit-limit", "9")]),
            fields(&[("x-ratelimit-reset", "9")]),
        ] {
            let legacy = Fields {
                standard: false,
                ..BOTH
            };
            assert_eq!(written(&limits, legacy, kept.clone()), kept);
        }
        let looser = fields(&[("x-ratelimit-limit", "9"), ("x-ratelimit-remaining", "5")]);
        let headers = written(&limits, BOTH, looser);
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
            assert_eq!(retry_after_s(us), seconds, "{us}");
        }
    }

    proptest! {
        #[test]
        fn any_name_makes_a_valid_field(name in any::<String>(), requests: u64, per_us: u64, remaining: u64) {
            let limit = named(&name, requests, per_us);
            let headers = written(&[stands(&limit, remaining, None)], BOTH, HeaderMap::new());
            prop_assert!(headers["ratelimit"].to_str().unwrap().starts_with('"'));
            prop_assert!(headers["ratelimit-policy"].to_str().unwrap().contains("\";q="));
        }
    }
}
