use super::*;
use http::HeaderName;
use serde_json::{Value, json};
use smallvec::{SmallVec, smallvec};
use std::time::Duration;

use super::reply_style::{CorsDecision, ReplyFormat};
use crate::enforcer::{RejectionReason, UnenforcedRejections};
use crate::policy::path::PathError;
use crate::policy::{KeyError, RejectResponse};
use crate::proxy::UpstreamErrorKind;

const JSON_STYLE: ReplyStyle<'_> = ReplyStyle {
    format: ReplyFormat::Json,
    is_head_request: false,
    version: Version::HTTP_11,
    cors: CorsDecision::NotConfigured,
};
const TEXT_STYLE: ReplyStyle<'_> = ReplyStyle {
    format: ReplyFormat::Text,
    ..JSON_STYLE
};
const GRPC_STYLE: ReplyStyle<'_> = ReplyStyle {
    format: ReplyFormat::Grpc,
    ..JSON_STYLE
};
const STANDARD_AND_LEGACY: RateLimitHeaderSettings = RateLimitHeaderSettings {
    standard: true,
    legacy: true,
    legacy_reset_epoch: false,
};

fn build_outcome_reply(outcome: RequestOutcome<'_>, style: ReplyStyle<'_>) -> Response<Bytes> {
    let verdict = Verdict {
        slot_guard: None,
        estimated_charges: Vec::new(),
        outcome,
        limits: SmallVec::new(),
        now_us: 0,
        decided_at: None,
        source: None,
        delay: Duration::ZERO,
        is_degraded: false,
        unenforced_rejections: UnenforcedRejections::default(),
        reached_thresholds: Vec::new(),
    };
    build_verdict_reply(&verdict, STANDARD_AND_LEGACY, style).unwrap()
}

fn limited_outcome(
    retry: RetryHint,
    custom_response: Option<&RejectResponse>,
) -> RequestOutcome<'_> {
    RequestOutcome::Limited(LimitRejection {
        policy: "login",
        is_reported: true,
        violated_limits: smallvec!["login", "login-2"],
        retry,
        reason: RejectionReason::TooFewUnits,
        is_blocked: false,
        custom_response,
        key: None,
    })
}

fn parse_json_body(response: &Response<Bytes>) -> Value {
    serde_json::from_slice(response.body()).unwrap()
}

fn header_or_empty<'r>(response: &'r Response<Bytes>, name: &str) -> &'r str {
    response
        .headers()
        .get(name)
        .map_or("", |value| value.to_str().unwrap())
}

#[test]
fn limit_rejection_is_429_with_retry_headers_and_details() {
    let response = build_outcome_reply(
        limited_outcome(RetryHint::After(41_000_001), None),
        JSON_STYLE,
    );
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(
        header_or_empty(&response, "content-type"),
        "application/problem+json"
    );
    assert_eq!(header_or_empty(&response, "retry-after"), "42");
    assert_eq!(header_or_empty(&response, "cache-control"), "no-store");
    assert_eq!(
        header_or_empty(&response, "proxy-status"),
        "tidegate; error=http_request_error"
    );
    assert_eq!(
        header_or_empty(&response, "content-length"),
        response.body().len().to_string()
    );
    let raw = std::str::from_utf8(response.body()).unwrap();
    assert!(raw.contains("\"retry_after\":41.000001}"), "{raw}");
    let expected = json!({
        "type": QUOTA_EXCEEDED_TYPE, "title": "Quota Exceeded", "status": 429, "policy": "login",
        "detail": "Over the limit of policy \"login\". Try again in 42 s.",
        "violated-policies": ["login", "login-2"], "retry_after": 41.000001,
    });
    assert_eq!(parse_json_body(&response), expected);
}

#[test]
fn a_request_above_capacity_has_no_retry_after() {
    let response = build_outcome_reply(limited_outcome(RetryHint::Never, None), JSON_STYLE);
    assert_eq!(header_or_empty(&response, "retry-after"), "");
    let body = parse_json_body(&response);
    assert!(body.get("retry_after").is_none());
    assert!(body["detail"].as_str().unwrap().contains("never"));
}

#[test]
fn rejections_carry_rate_limit_headers() {
    use crate::limiter::{Algorithm, Limit, LimitStatus, Refusal};
    let limit = Limit {
        requests: 5,
        per_us: 60_000_000,
        algorithm: Algorithm::SlidingLog,
    };
    let limit = crate::policy::NamedLimit {
        amount: None,
        is_reported: true,
        release: crate::policy::SlotRelease::default(),
        name: "login".into(),
        unit: None,
        limit,
    };
    let status = LimitStatus {
        remaining: 0,
        next_growth_us: Some(7),
        refusal: Some(Refusal::Until(42_000_000)),
        in_effect: None,
    };
    let reported = crate::enforcer::LimitReport {
        limit: &limit,
        status,
        key_id: 7,
    };
    let verdict = Verdict {
        slot_guard: None,
        estimated_charges: Vec::new(),
        is_degraded: false,
        outcome: limited_outcome(RetryHint::After(42_000_000), None),
        limits: smallvec![reported],
        now_us: 0,
        decided_at: None,
        source: None,
        delay: Duration::ZERO,
        unenforced_rejections: UnenforcedRejections::default(),
        reached_thresholds: Vec::new(),
    };
    let response = build_verdict_reply(&verdict, STANDARD_AND_LEGACY, JSON_STYLE).unwrap();
    assert_eq!(header_or_empty(&response, "ratelimit"), "\"login\";r=0;t=1");
    assert_eq!(header_or_empty(&response, "x-ratelimit-reset"), "42");
    let forwarded = Verdict {
        outcome: RequestOutcome::Forward,
        ..verdict
    };
    assert!(build_verdict_reply(&forwarded, STANDARD_AND_LEGACY, JSON_STYLE).is_none());
}

#[test]
fn denied_invalid_key_and_unavailable_are_403_400_and_503() {
    let denied = build_outcome_reply(
        RequestOutcome::Denied {
            policy: "blocked",
            is_reported: true,
            custom_response: None,
        },
        JSON_STYLE,
    );
    assert_eq!(
        (denied.status(), parse_json_body(&denied)["policy"].as_str()),
        (StatusCode::FORBIDDEN, Some("blocked"))
    );
    assert_eq!(
        header_or_empty(&denied, "proxy-status"),
        "tidegate; error=http_request_denied"
    );
    let error = KeyError::Repeated("header x".into());
    let bad = build_outcome_reply(
        RequestOutcome::InvalidKey {
            policy: "p",
            is_reported: true,
            error,
        },
        JSON_STYLE,
    );
    assert_eq!(bad.status(), StatusCode::BAD_REQUEST);
    assert!(
        parse_json_body(&bad)["detail"]
            .as_str()
            .unwrap()
            .ends_with("header x occurs more than once; expected one.")
    );
    let unavailable = build_outcome_reply(
        RequestOutcome::Unavailable {
            policy: "p",
            is_reported: true,
            retry_after_us: 500_000,
        },
        JSON_STYLE,
    );
    assert_eq!(unavailable.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        (
            header_or_empty(&unavailable, "retry-after"),
            &parse_json_body(&unavailable)["type"]
        ),
        ("1", &json!(REDUCED_CAPACITY_TYPE))
    );
    for response in [denied, bad, unavailable] {
        assert_eq!(header_or_empty(&response, "cache-control"), "no-store");
    }
}

#[test]
fn a_custom_reject_response_keeps_retry_and_cache_headers() {
    let reject = RejectResponse {
        status: Some(StatusCode::IM_A_TEAPOT),
        body: Bytes::from_static(b"<p>later"),
        content_type: HeaderValue::from_static("text/html"),
        headers: vec![
            (
                HeaderName::from_static("x-a"),
                HeaderValue::from_static("1"),
            ),
            (header::CACHE_CONTROL, HeaderValue::from_static("public")),
        ],
    };
    let response = build_outcome_reply(
        limited_outcome(RetryHint::After(2_000_000), Some(&reject)),
        TEXT_STYLE,
    );
    assert_eq!(
        (response.status(), &response.body()[..]),
        (StatusCode::IM_A_TEAPOT, &b"<p>later"[..])
    );
    let sent_headers = ["content-type", "x-a", "cache-control", "retry-after"]
        .map(|name| header_or_empty(&response, name));
    assert_eq!(sent_headers, ["text/html", "1", "no-store", "2"]);
    assert_eq!(response.headers().get_all("retry-after").iter().count(), 1);
    let never = build_outcome_reply(limited_outcome(RetryHint::Never, Some(&reject)), JSON_STYLE);
    assert!(!never.headers().contains_key("retry-after"));
    let denied = build_outcome_reply(
        RequestOutcome::Denied {
            policy: "p",
            is_reported: true,
            custom_response: Some(&reject),
        },
        JSON_STYLE,
    );
    assert!(!denied.headers().contains_key("retry-after"));
    let empty = RejectResponse {
        status: Some(StatusCode::NO_CONTENT),
        ..reject
    };
    let response = build_outcome_reply(
        RequestOutcome::Denied {
            policy: "p",
            is_reported: true,
            custom_response: Some(&empty),
        },
        JSON_STYLE,
    );
    assert!(response.body().is_empty() && !response.headers().contains_key("content-length"));
}

#[test]
fn an_invalid_request_closes_the_connection() {
    let response =
        build_invalid_request_reply(RequestValidationError::HostMissing.into(), JSON_STYLE);
    assert_eq!(
        (response.status(), header_or_empty(&response, "connection")),
        (StatusCode::BAD_REQUEST, "close")
    );
    assert_eq!(
        parse_json_body(&response)["detail"],
        "The Host header is missing."
    );
    assert_eq!(parse_json_body(&response)["type"], "about:blank");
    assert!(
        header_or_empty(
            &build_invalid_request_reply(RequestValidationError::Connect.into(), JSON_STYLE),
            "allow"
        )
        .contains("GET")
    );
    let response = build_invalid_request_reply(
        RequestValidationError::Expect.into(),
        ReplyStyle {
            version: Version::HTTP_2,
            ..JSON_STYLE
        },
    );
    assert_eq!(
        (
            response.status().as_u16(),
            header_or_empty(&response, "connection")
        ),
        (417, "")
    );
    let response = build_invalid_request_reply(PathError::Nul.into(), TEXT_STYLE);
    assert_eq!(header_or_empty(&response, "connection"), "close");
    assert_eq!(
        response.body(),
        "Bad Request\nThe path contains an escaped NUL.\n"
    );
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table of cases")]
fn proxy_errors_have_their_status_and_error_type() {
    for (kind, status, error, grpc) in [
        (
            UpstreamErrorKind::ConnectRefused,
            502,
            "connection_refused",
            "14",
        ),
        (
            UpstreamErrorKind::ConnectTimeout,
            504,
            "connection_timeout",
            "4",
        ),
        (UpstreamErrorKind::Dns, 502, "dns_error", "14"),
        (UpstreamErrorKind::Tls, 502, "tls_protocol_error", "14"),
        (
            UpstreamErrorKind::ConnectionTerminated,
            502,
            "connection_terminated",
            "14",
        ),
        (
            UpstreamErrorKind::Protocol,
            502,
            "http_protocol_error",
            "14",
        ),
        (
            UpstreamErrorKind::ResponseTimeout,
            504,
            "connection_read_timeout",
            "4",
        ),
        (
            UpstreamErrorKind::QueueFull,
            503,
            "connection_limit_reached",
            "14",
        ),
        (
            UpstreamErrorKind::RequestBodyTooLarge,
            413,
            "http_request_error",
            "8",
        ),
        (
            UpstreamErrorKind::RequestBodyTimeout,
            408,
            "http_request_error",
            "4",
        ),
        (
            UpstreamErrorKind::ClientDisconnected,
            400,
            "http_request_error",
            "3",
        ),
        (
            UpstreamErrorKind::MaxDurationExceeded,
            504,
            "http_response_timeout",
            "4",
        ),
    ] {
        let response = build_proxy_error_reply(kind, JSON_STYLE);
        assert_eq!(response.status().as_u16(), status, "{kind:?}");
        assert_eq!(
            header_or_empty(&response, "proxy-status"),
            format!("tidegate; error={error}")
        );
        assert_eq!(parse_json_body(&response)["status"], status);
        assert_eq!(
            header_or_empty(&response, "connection"),
            if matches!(status, 400 | 408 | 413) {
                "close"
            } else {
                ""
            }
        );
        assert_eq!(
            header_or_empty(&build_proxy_error_reply(kind, GRPC_STYLE), "grpc-status"),
            grpc,
            "{kind:?}"
        );
    }
    assert_eq!(
        header_or_empty(
            &build_proxy_error_reply(UpstreamErrorKind::QueueFull, JSON_STYLE),
            "retry-after"
        ),
        "1"
    );
}

#[test]
fn grpc_rejections_are_headers_only() {
    let response = build_outcome_reply(
        limited_outcome(RetryHint::After(2_000_000), None),
        GRPC_STYLE,
    );
    assert_eq!(
        (response.status(), response.body().len()),
        (StatusCode::OK, 0)
    );
    let header_names = [
        "content-type",
        "grpc-status",
        "grpc-message",
        "retry-after",
        "cache-control",
    ];
    assert_eq!(
        header_names.map(|name| header_or_empty(&response, name)),
        [
            "application/grpc",
            "8",
            "Over the limit of policy \"login\". Try again in 2 s.",
            "2",
            "no-store"
        ]
    );
    let code = |outcome| {
        header_or_empty(&build_outcome_reply(outcome, GRPC_STYLE), "grpc-status").to_owned()
    };
    assert_eq!(
        code(RequestOutcome::Denied {
            policy: "p",
            is_reported: true,
            custom_response: None
        }),
        "7"
    );
    assert_eq!(
        code(RequestOutcome::Unavailable {
            policy: "p",
            is_reported: true,
            retry_after_us: 1
        }),
        "14"
    );
    assert_eq!(
        code(RequestOutcome::InvalidKey {
            policy: "p",
            is_reported: true,
            error: KeyError::Missing("x".into())
        }),
        "3"
    );
}

#[test]
fn head_replies_have_the_headers_of_get() {
    let get = build_outcome_reply(limited_outcome(RetryHint::After(1), None), JSON_STYLE);
    let head = build_outcome_reply(
        limited_outcome(RetryHint::After(1), None),
        ReplyStyle {
            is_head_request: true,
            ..JSON_STYLE
        },
    );
    assert_eq!(head.headers(), get.headers());
    assert!(head.body().is_empty() && !get.body().is_empty());
}
