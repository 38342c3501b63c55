use super::*;
use crate::enforcer::{
    LimitRejection, LimitReport, RejectionReason, RequestOutcome, RetryHint, UnenforcedRejections,
};
use crate::limiter::{Algorithm, Limit, LimitStatus, Refusal};
use crate::policy::NamedLimit;
use http::HeaderName;
use proptest::prelude::*;
use smallvec::smallvec;
use std::time::Duration;

const NOW_US: u64 = 1_700_000_000_500_000;
const STANDARD_AND_LEGACY: RateLimitHeaderSettings = RateLimitHeaderSettings {
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
        amount: None,
        is_reported: true,
        release: crate::policy::SlotRelease::default(),
    }
}

fn build_reported_limit(
    limit: &NamedLimit,
    remaining: u64,
    grows_in_us: Option<u64>,
) -> LimitReport<'_> {
    let grows_at_us = grows_in_us.map(|us| NOW_US + us);
    LimitReport {
        limit,
        status: LimitStatus {
            remaining,
            next_growth_us: grows_at_us,
            refusal: None,
            in_effect: None,
        },
        key_id: 7,
    }
}

fn build_reported_refusing_limit(
    limit: &NamedLimit,
    remaining: u64,
    refusal: Refusal,
) -> LimitReport<'_> {
    let grows_at_us = match refusal {
        Refusal::Until(at_us) => Some(at_us),
        Refusal::Never | Refusal::Unknown => None,
    };
    LimitReport {
        limit,
        status: LimitStatus {
            remaining,
            next_growth_us: grows_at_us,
            refusal: Some(refusal),
            in_effect: None,
        },
        key_id: 7,
    }
}

fn write_headers_for_limits(
    limits: &[LimitReport<'_>],
    fields: RateLimitHeaderSettings,
    headers: HeaderMap,
) -> HeaderMap {
    write_headers_for_outcome(RequestOutcome::Forward, limits, fields, headers)
}

fn write_headers_for_outcome<'t>(
    outcome: RequestOutcome<'t>,
    limits: &[LimitReport<'t>],
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
        unenforced_rejections: UnenforcedRejections::default(),
        reached_thresholds: Vec::new(),
    };
    write_headers(&verdict, fields, &mut headers);
    headers
}

fn build_header_map(list: &[(&'static str, &str)]) -> HeaderMap {
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
    let headers = write_headers_for_limits(
        &[
            build_reported_limit(&login, 4, Some(59_000_001)),
            build_reported_limit(&daily, 1000, None),
        ],
        STANDARD_AND_LEGACY,
        HeaderMap::new(),
    );
    let expected = build_header_map(&[
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
    let limits = [build_reported_limit(&login, 4, Some(1))];
    let none = RateLimitHeaderSettings {
        standard: false,
        legacy: false,
        legacy_reset_epoch: false,
    };
    assert!(write_headers_for_limits(&limits, none, HeaderMap::new()).is_empty());
    assert!(write_headers_for_limits(&[], STANDARD_AND_LEGACY, HeaderMap::new()).is_empty());
    assert_eq!(
        write_headers_for_limits(
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
    let headers = write_headers_for_limits(&limits, epoch, HeaderMap::new());
    assert_eq!(
        (headers.len(), headers["x-ratelimit-reset"].as_bytes()),
        (3, &b"1700000001"[..])
    );
}

#[test]
fn handles_subsecond_windows_units_and_special_names() {
    let mut limit = named_limit("a\"b\\c\u{e9}\n", u64::MAX, 999_999);
    limit.unit = Some("tokens".into());
    let headers = write_headers_for_limits(
        &[build_reported_limit(&limit, 7, None)],
        STANDARD_AND_LEGACY,
        HeaderMap::new(),
    );
    assert_eq!(
        headers["ratelimit-policy"],
        "\"a\\\"b\\\\c??\";q=999999999999999;qu=\"tokens\""
    );
    assert_eq!(headers["ratelimit"], "\"a\\\"b\\\\c??\";r=7");
    assert_eq!(headers["x-ratelimit-reset"], "0");
}

/// A wait that ends nothing is stated nowhere.
#[test]
fn an_endless_refusal_has_no_reset() {
    let blocked = named_limit("login", 0, 60_000_000);
    let theirs = build_header_map(&[("x-ratelimit-remaining", "7"), ("x-ratelimit-reset", "7")]);
    let headers = write_headers_for_limits(
        &[build_reported_refusing_limit(&blocked, 0, Refusal::Never)],
        STANDARD_AND_LEGACY,
        theirs,
    );
    assert_eq!(headers["x-ratelimit-remaining"], "0");
    assert!(!headers.contains_key("x-ratelimit-reset"), "{headers:?}");
    assert_eq!(headers["ratelimit"], "\"login\";r=0");
}

#[test]
fn reset_parameter_is_that_of_its_own_limit() {
    let (slow, fast) = (
        named_limit("slow", 5, 60_000_000),
        named_limit("fast", 1, 1_000_000),
    );
    let limited = LimitRejection {
        policy: "fast",
        is_reported: true,
        violated_limits: smallvec!["fast"],
        retry: RetryHint::After(300_000),
        reason: RejectionReason::TooFewUnits,
        is_blocked: false,
        custom_response: None,
        key: None,
    };
    let limits = [
        build_reported_limit(&slow, 3, Some(50_000_000)),
        build_reported_refusing_limit(&fast, 0, Refusal::Until(NOW_US + 300_000)),
    ];
    let headers = write_headers_for_outcome(
        RequestOutcome::Limited(limited),
        &limits,
        STANDARD_AND_LEGACY,
        HeaderMap::new(),
    );
    assert_eq!(headers["ratelimit"], "\"slow\";r=3;t=50, \"fast\";r=0;t=1");
    assert_eq!(headers["x-ratelimit-limit"], "1");
}

#[test]
fn legacy_headers_show_the_tightest_limit() {
    let (a, b) = (
        named_limit("a", 10, 1_000_000),
        named_limit("b", 100, 1_000_000),
    );
    let limit = |limits: &[LimitReport<'_>]| {
        write_headers_for_limits(limits, STANDARD_AND_LEGACY, HeaderMap::new())["x-ratelimit-limit"]
            .to_str()
            .unwrap()
            .to_owned()
    };
    assert_eq!(
        limit(&[
            build_reported_limit(&a, 5, None),
            build_reported_limit(&b, 40, None)
        ]),
        "100"
    );
    assert_eq!(
        limit(&[
            build_reported_limit(&a, 5, None),
            build_reported_limit(&b, 50, None)
        ]),
        "10"
    );
    assert_eq!(
        limit(&[
            build_reported_limit(&b, 50, None),
            build_reported_limit(&a, 5, None)
        ]),
        "100"
    );
    let later = Refusal::Until(NOW_US + 2);
    assert_eq!(
        limit(&[
            build_reported_limit(&a, 0, None),
            build_reported_refusing_limit(&b, 50, later)
        ]),
        "100"
    );
    assert_eq!(
        limit(&[
            build_reported_refusing_limit(&a, 0, Refusal::Until(NOW_US + 1)),
            build_reported_refusing_limit(&b, 0, later)
        ]),
        "100"
    );
    assert_eq!(
        limit(&[
            build_reported_refusing_limit(&a, 3, Refusal::Never),
            build_reported_refusing_limit(&b, 0, later)
        ]),
        "10"
    );
    let zero = named_limit("zero", 0, 1);
    assert_eq!(
        limit(&[
            build_reported_limit(&a, 1, None),
            build_reported_refusing_limit(&zero, 0, Refusal::Never)
        ]),
        "0"
    );
}

#[test]
fn standard_headers_of_the_upstream_are_extended() {
    let login = named_limit("login", 5, 60_000_000);
    let own = build_header_map(&[
        ("ratelimit", "\"theirs\";r=1"),
        ("ratelimit-policy", "\"theirs\";q=9"),
    ]);
    let headers = write_headers_for_limits(
        &[build_reported_limit(&login, 4, None)],
        STANDARD_AND_LEGACY,
        own,
    );
    assert_eq!(headers["ratelimit"], "\"theirs\";r=1, \"login\";r=4");
    assert_eq!(
        headers["ratelimit-policy"],
        "\"theirs\";q=9, \"login\";q=5;w=60"
    );
}

#[test]
fn upstream_headers_of_an_older_draft_are_unchanged() {
    let login = named_limit("login", 5, 60_000_000);
    let theirs = build_header_map(&[
        ("ratelimit", "limit=10, remaining=5, reset=3"),
        ("ratelimit-policy", "10;w=60"),
    ]);
    let standard = RateLimitHeaderSettings {
        legacy: false,
        ..STANDARD_AND_LEGACY
    };
    let headers = write_headers_for_limits(
        &[build_reported_limit(&login, 4, Some(1_000_000))],
        standard,
        theirs.clone(),
    );
    assert_eq!(headers, theirs);
    let token = build_header_map(&[("ratelimit", "theirs;r=5;t=3")]);
    let headers = write_headers_for_limits(
        &[build_reported_limit(&login, 4, Some(1_000_000))],
        standard,
        token,
    );
    assert_eq!(headers["ratelimit"], "theirs;r=5;t=3, \"login\";r=4;t=1");
}

#[test]
fn upstream_legacy_headers_are_replaced_only_by_tighter_ones() {
    let login = named_limit("login", 5, 60_000_000);
    let limits = [build_reported_limit(&login, 4, Some(1_000_000))];
    for kept in [
        build_header_map(&[
            ("x-ratelimit-limit", "9"),
            ("x-ratelimit-remaining", "4"),
            ("x-ratelimit-reset", "7"),
        ]),
        build_header_map(&[
            ("x-ratelimit-limit", "9"),
            ("x-ratelimit-remaining", "many"),
        ]),
        build_header_map(&[("x-ratelimit-limit", "9")]),
        build_header_map(&[("x-ratelimit-reset", "9")]),
    ] {
        let legacy = RateLimitHeaderSettings {
            standard: false,
            ..STANDARD_AND_LEGACY
        };
        assert_eq!(
            write_headers_for_limits(&limits, legacy, kept.clone()),
            kept
        );
    }
    let looser = build_header_map(&[("x-ratelimit-limit", "9"), ("x-ratelimit-remaining", "5")]);
    let headers = write_headers_for_limits(&limits, STANDARD_AND_LEGACY, looser);
    let legacy_names = [
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
    ];
    assert_eq!(
        legacy_names.map(|name| headers[name].to_str().unwrap()),
        ["5", "4", "1"]
    );
}

proptest! {
    #[test]
    fn any_limit_name_makes_a_valid_header(name in any::<String>(), requests: u64, per_us: u64, remaining: u64) {
        let limit = named_limit(&name, requests, per_us);
        let headers = write_headers_for_limits(&[build_reported_limit(&limit, remaining, None)], STANDARD_AND_LEGACY, HeaderMap::new());
        prop_assert!(headers["ratelimit"].to_str().unwrap().starts_with('"'));
        prop_assert!(headers["ratelimit-policy"].to_str().unwrap().contains("\";q="));
    }
}
