use super::*;
use crate::policy::KeyFault;
use crate::policy::path::PathFault;
use proptest::prelude::*;
use serde_json::{Value, json};
use smallvec::{SmallVec, smallvec};
use std::time::Duration;

const JSON: Style<'_> = Style {
    format: Format::Json,
    head: false,
    version: Version::HTTP_11,
    cors: Reader::Unknown,
};
const TEXT: Style<'_> = Style {
    format: Format::Text,
    ..JSON
};
const GRPC: Style<'_> = Style {
    format: Format::Grpc,
    ..JSON
};
const BOTH: Fields = Fields {
    standard: true,
    legacy: true,
    legacy_reset_epoch: false,
};

fn style(fields: &[(&str, &str)]) -> Style<'static> {
    static NOBODY: std::sync::LazyLock<Cors> = std::sync::LazyLock::new(Cors::default);
    let mut builder = http::Request::get("/");
    for (name, value) in fields {
        builder = builder.header(*name, *value);
    }
    Style::of(&builder.body(()).unwrap().into_parts().0, &NOBODY)
}

fn refused(outcome: Outcome<'_>, style: Style<'_>) -> Response<Bytes> {
    let verdict = Verdict {
        hold: None,
        estimates: Vec::new(),
        outcome,
        limits: SmallVec::new(),
        now_us: 0,
        at: None,
        source: None,
        delay: Duration::ZERO,
        degraded: false,
        shadow_rejected: SmallVec::new(),
    };
    refusal(&verdict, BOTH, style).unwrap()
}

fn limited(retry: Retry, reject: Option<&Reject>) -> Outcome<'_> {
    Outcome::Limited(Limited {
        policy: "login",
        violated: smallvec!["login", "login-2"],
        retry,
        blocked: false,
        reject,
    })
}

fn body(response: &Response<Bytes>) -> Value {
    serde_json::from_slice(response.body()).unwrap()
}

fn text<'r>(response: &'r Response<Bytes>, name: &str) -> &'r str {
    response
        .headers()
        .get(name)
        .map_or("", |value| value.to_str().unwrap())
}

#[test]
fn over_a_limit_is_429_with_everything_a_client_needs() {
    let response = refused(limited(Retry::After(41_000_001), None), JSON);
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(text(&response, "content-type"), "application/problem+json");
    assert_eq!(text(&response, "retry-after"), "42");
    assert_eq!(text(&response, "cache-control"), "no-store");
    assert_eq!(
        text(&response, "proxy-status"),
        "tidegate; error=http_request_error"
    );
    assert_eq!(
        text(&response, "content-length"),
        response.body().len().to_string()
    );
    let raw = std::str::from_utf8(response.body()).unwrap();
    assert!(raw.contains("\"retry_after\":41.000001}"), "{raw}");
    let expected = json!({
        "type": QUOTA_EXCEEDED, "title": "Quota Exceeded", "status": 429, "policy": "login",
        "detail": "Over the limit of policy \"login\". Try again in 42 s.",
        "violated-policies": ["login", "login-2"], "retry_after": 41.000001,
    });
    assert_eq!(body(&response), expected);
}

#[test]
fn a_request_that_never_fits_is_told_so() {
    let response = refused(limited(Retry::Never, None), JSON);
    assert_eq!(text(&response, "retry-after"), "");
    let body = body(&response);
    assert!(body.get("retry_after").is_none());
    assert!(body["detail"].as_str().unwrap().contains("never"));
}

#[test]
fn rate_limit_fields_come_with_a_refusal() {
    use crate::limiter::{Algorithm, Limit, Refusal, Standing};
    let limit = Limit {
        requests: 5,
        per_us: 60_000_000,
        algorithm: Algorithm::SlidingLog,
    };
    let limit = crate::policy::NamedLimit {
        name: "login".into(),
        unit: None,
        limit,
    };
    let standing = Standing {
        remaining: 0,
        grows_at_us: Some(7),
        refusal: Some(Refusal::Until(42_000_000)),
    };
    let reported = crate::enforcer::Reported {
        limit: &limit,
        standing,
        key: 7,
    };
    let verdict = Verdict {
        hold: None,
        estimates: Vec::new(),
        degraded: false,
        outcome: limited(Retry::After(42_000_000), None),
        limits: smallvec![reported],
        now_us: 0,
        at: None,
        source: None,
        delay: Duration::ZERO,
        shadow_rejected: SmallVec::new(),
    };
    let response = refusal(&verdict, BOTH, JSON).unwrap();
    assert_eq!(text(&response, "ratelimit"), "\"login\";r=0;t=1");
    assert_eq!(text(&response, "x-ratelimit-reset"), "42");
    let forwarded = Verdict {
        outcome: Outcome::Forward,
        ..verdict
    };
    assert!(refusal(&forwarded, BOTH, JSON).is_none());
}

#[test]
fn the_other_refusals() {
    let denied = refused(
        Outcome::Denied {
            policy: "wall",
            reject: None,
        },
        JSON,
    );
    assert_eq!(
        (denied.status(), body(&denied)["policy"].as_str()),
        (StatusCode::FORBIDDEN, Some("wall"))
    );
    assert_eq!(
        text(&denied, "proxy-status"),
        "tidegate; error=http_request_denied"
    );
    let fault = KeyFault::Repeated("header x".into());
    let bad = refused(Outcome::BadKey { policy: "p", fault }, JSON);
    assert_eq!(bad.status(), StatusCode::BAD_REQUEST);
    assert!(
        body(&bad)["detail"]
            .as_str()
            .unwrap()
            .ends_with("header x occurs more than once.")
    );
    let away = refused(
        Outcome::Unavailable {
            policy: "p",
            retry_after_us: 500_000,
        },
        JSON,
    );
    assert_eq!(away.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        (text(&away, "retry-after"), &body(&away)["type"]),
        ("1", &json!(REDUCED_CAPACITY))
    );
    for response in [denied, bad, away] {
        assert_eq!(text(&response, "cache-control"), "no-store");
    }
}

#[test]
fn an_owners_words_replace_ours_but_not_the_facts() {
    let reject = Reject {
        status: StatusCode::IM_A_TEAPOT,
        body: Bytes::from_static(b"<p>later"),
        content_type: HeaderValue::from_static("text/html"),
        headers: vec![
            (
                HeaderName::from_static("x-a"),
                HeaderValue::from_static("1"),
            ),
            (header::CACHE_CONTROL, HeaderValue::from_static("public")),
            (header::RETRY_AFTER, HeaderValue::from_static("0")),
        ],
    };
    let response = refused(limited(Retry::After(2_000_000), Some(&reject)), TEXT);
    assert_eq!(
        (response.status(), &response.body()[..]),
        (StatusCode::IM_A_TEAPOT, &b"<p>later"[..])
    );
    let told =
        ["content-type", "x-a", "cache-control", "retry-after"].map(|name| text(&response, name));
    assert_eq!(told, ["text/html", "1", "no-store", "2"]);
    assert_eq!(response.headers().get_all("retry-after").iter().count(), 1);
    let never = refused(limited(Retry::Never, Some(&reject)), JSON);
    assert!(!never.headers().contains_key("retry-after"));
    let denied = refused(
        Outcome::Denied {
            policy: "p",
            reject: Some(&reject),
        },
        JSON,
    );
    assert_eq!(text(&denied, "retry-after"), "0");
    let empty = Reject {
        status: StatusCode::NO_CONTENT,
        ..reject
    };
    let response = refused(
        Outcome::Denied {
            policy: "p",
            reject: Some(&empty),
        },
        JSON,
    );
    assert!(response.body().is_empty() && !response.headers().contains_key("content-length"));
}

#[test]
fn a_fault_at_the_gate_closes_the_connection() {
    let response = inbound_fault(GateFault::HostMissing.into(), JSON);
    assert_eq!(
        (response.status(), text(&response, "connection")),
        (StatusCode::BAD_REQUEST, "close")
    );
    assert_eq!(body(&response)["detail"], "A request needs a Host.");
    assert_eq!(body(&response)["type"], "about:blank");
    assert!(text(&inbound_fault(GateFault::Connect.into(), JSON), "allow").contains("GET"));
    let response = inbound_fault(
        GateFault::Expect.into(),
        Style {
            version: Version::HTTP_2,
            ..JSON
        },
    );
    assert_eq!(
        (response.status().as_u16(), text(&response, "connection")),
        (417, "")
    );
    let response = inbound_fault(PathFault::Nul.into(), TEXT);
    assert_eq!(text(&response, "connection"), "close");
    assert_eq!(
        response.body(),
        "Bad Request\nThe path holds an escaped NUL.\n"
    );
}

#[test]
fn upstream_trouble_has_its_status_and_error() {
    for (what, status, error, grpc) in [
        (Local::ConnectRefused, 502, "connection_refused", "14"),
        (Local::ConnectTimeout, 504, "connection_timeout", "4"),
        (Local::Dns, 502, "dns_error", "14"),
        (Local::Tls, 502, "tls_protocol_error", "14"),
        (Local::Terminated, 502, "connection_terminated", "14"),
        (Local::Protocol, 502, "http_protocol_error", "14"),
        (Local::ResponseTimeout, 504, "connection_read_timeout", "4"),
        (Local::QueueFull, 503, "connection_limit_reached", "14"),
        (Local::BodyTooLarge, 413, "http_request_error", "8"),
        (Local::BodyTimeout, 408, "http_request_error", "4"),
        (Local::BodyBroken, 400, "http_request_error", "3"),
        (Local::TooManyHeaders, 431, "http_request_error", "3"),
    ] {
        let response = local(what, JSON);
        assert_eq!(response.status().as_u16(), status, "{what:?}");
        assert_eq!(
            text(&response, "proxy-status"),
            format!("tidegate; error={error}")
        );
        assert_eq!(body(&response)["status"], status);
        assert_eq!(
            text(&response, "connection"),
            if matches!(status, 400 | 408 | 413) {
                "close"
            } else {
                ""
            }
        );
        assert_eq!(text(&local(what, GRPC), "grpc-status"), grpc, "{what:?}");
    }
    assert_eq!(text(&local(Local::QueueFull, JSON), "retry-after"), "1");
}

#[test]
fn grpc_gets_a_status_in_headers_only() {
    let response = refused(limited(Retry::After(2_000_000), None), GRPC);
    assert_eq!(
        (response.status(), response.body().len()),
        (StatusCode::OK, 0)
    );
    let told = [
        "content-type",
        "grpc-status",
        "grpc-message",
        "retry-after",
        "cache-control",
    ];
    assert_eq!(
        told.map(|name| text(&response, name)),
        [
            "application/grpc",
            "8",
            "Over the limit of policy \"login\". Try again in 2 s.",
            "2",
            "no-store"
        ]
    );
    let code = |outcome| text(&refused(outcome, GRPC), "grpc-status").to_owned();
    assert_eq!(
        code(Outcome::Denied {
            policy: "p",
            reject: None
        }),
        "7"
    );
    assert_eq!(
        code(Outcome::Unavailable {
            policy: "p",
            retry_after_us: 1
        }),
        "14"
    );
    assert_eq!(
        code(Outcome::BadKey {
            policy: "p",
            fault: KeyFault::Missing("x".into())
        }),
        "3"
    );
    assert_eq!(percent_encoded("100% \u{e9}\n"), "100%25 %C3%A9%0A");
}

#[test]
fn head_gets_the_headers_of_the_body_it_does_not_get() {
    let get = refused(limited(Retry::After(1), None), JSON);
    let head = refused(limited(Retry::After(1), None), Style { head: true, ..JSON });
    assert_eq!(head.headers(), get.headers());
    assert!(head.body().is_empty() && !get.body().is_empty());
}

#[test]
fn the_format_follows_accept() {
    for (accept, format) in [
        ("*/*", Format::Json),
        ("", Format::Json),
        ("text/plain", Format::Text),
        ("text/html", Format::Json),
        (
            "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
            Format::Json,
        ),
        ("application/json, text/plain", Format::Json),
        ("application/json;q=0.5, text/plain;q=0.51", Format::Text),
        (
            "TEXT/Plain ; Q=0.9, application/problem+json; q=0.899",
            Format::Text,
        ),
        ("text/plain, */*;q=0.1", Format::Text),
        ("*/*, text/plain;q=0.1", Format::Json),
        ("text/plain, application/*;q=0.2", Format::Text),
        ("text/*, application/json;q=0.9", Format::Text),
        ("text/plain;q=0", Format::Json),
        ("text/plain;q=2", Format::Json),
        ("text/plain;q=0.0001", Format::Json),
        ("text/plain;q=x", Format::Json),
    ] {
        assert_eq!(style(&[("accept", accept)]).format, format, "{accept}");
    }
    assert_eq!(style(&[]).format, Format::Json);
    let lines = [
        ("accept", "application/json;q=0.1"),
        ("accept", "text/plain"),
    ];
    assert_eq!(style(&lines).format, Format::Text);
    let grpc = [
        ("content-type", "Application/grpc+proto"),
        ("accept", "text/plain"),
    ];
    assert_eq!(style(&grpc).format, Format::Grpc);
}

proptest! {
    #[test]
    fn seconds_are_exact(us: u64) {
        let mut out = String::new();
        push_seconds(&mut out, us);
        let (whole, fraction) = out.split_once('.').unwrap();
        prop_assert_eq!(fraction.len(), 6);
        let back = whole.parse::<u128>().unwrap() * 1_000_000 + fraction.parse::<u128>().unwrap();
        prop_assert_eq!(back, u128::from(us));
    }

    #[test]
    fn any_text_is_a_json_string(text: String) {
        let mut out = String::new();
        push_json_string(&mut out, &text);
        prop_assert_eq!(serde_json::from_str::<String>(&out).unwrap(), text);
    }

    #[test]
    fn no_accept_is_too_odd(accept in prop::collection::vec(any::<u8>(), 0..40)) {
        let Ok(accept) = HeaderValue::from_bytes(&accept) else { return Ok(()) };
        prefers_text(&HeaderMap::from_iter([(header::ACCEPT, accept)]));
    }
}
