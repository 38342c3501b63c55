//! Decisions of the rate limit service, tested with an independent gRPC client. `tests/envoy.sh`
//! tests it with Envoy.

use crate::support::prelude::*;
use crate::support::rls_client::messages::rate_limit_descriptor::RateLimitOverride;
use crate::support::rls_client::messages::rate_limit_response::{
    Code as LimitCode, rate_limit::Unit,
};
use crate::support::rls_client::messages::{
    RateLimitDescriptor, RateLimitRequest, RateLimitResponse,
};
use crate::support::rls_client::{
    USER_POLICY, call_unary, response_header, single_status, with_hits,
};
use tonic::Code;

#[tokio::test]
async fn a_descriptor_is_limited_by_its_values() {
    let mut service = ServiceClient::start(&format!("{RLS_LISTENER}{USER_POLICY}")).await;
    let first = service.ask_one_descriptor(&[("user", "ann")]).await;
    assert_eq!(
        (first.overall_code(), single_status(&first).code()),
        (LimitCode::Ok, LimitCode::Ok)
    );
    let limit = single_status(&first).current_limit.clone().unwrap();
    assert_eq!(
        (limit.name.as_str(), limit.requests_per_unit, limit.unit()),
        ("user", 2, Unit::Hour)
    );
    assert_eq!(single_status(&first).limit_remaining, 1);
    assert!(
        response_header(&first, "ratelimit")
            .unwrap()
            .starts_with("\"user\";r=1;t="),
        "{first:?}"
    );
    assert_eq!(
        response_header(&first, "ratelimit-policy"),
        Some("\"user\";q=2;w=3600")
    );
    assert_eq!(
        (
            response_header(&first, "x-ratelimit-remaining"),
            response_header(&first, "retry-after")
        ),
        (Some("1"), None)
    );

    assert_eq!(
        service
            .ask_one_descriptor(&[("user", "ann")])
            .await
            .overall_code(),
        LimitCode::Ok
    );
    let over = service.ask_one_descriptor(&[("user", "ann")]).await;
    assert_eq!(
        (over.overall_code(), single_status(&over).code()),
        (LimitCode::OverLimit, LimitCode::OverLimit)
    );
    assert_eq!(single_status(&over).limit_remaining, 0);
    let reset_s = single_status(&over).duration_until_reset.unwrap().seconds;
    assert!((3000..=3600).contains(&reset_s), "{reset_s}");
    let retry_after: i64 = response_header(&over, "retry-after")
        .unwrap()
        .parse()
        .unwrap();
    assert!(
        (reset_s..=reset_s + 1).contains(&retry_after),
        "{retry_after} {reset_s}"
    );

    assert_eq!(
        service
            .ask_one_descriptor(&[("user", "bob")])
            .await
            .overall_code(),
        LimitCode::Ok
    );
    for (code, count) in [
        ("ok", 3.0),
        ("over_limit", 1.0),
        ("unavailable", 0.0),
        ("invalid", 0.0),
    ] {
        let series = format!("tidegate_rls_calls_total{{result=\"{code}\"}}");
        assert_eq!(service.proxy.read_metric(&series).await, count, "{code}");
    }
    let rejected = "tidegate_requests_total{policy=\"user\",decision=\"rejected\"}";
    assert_eq!(service.proxy.read_metric(rejected).await, 1.0);
}

/// As in Envoy's reference service, a policy must match all entries of a descriptor. A descriptor
/// with more entries does not match.
#[tokio::test]
async fn unmatched_descriptors_are_allowed_and_counted() {
    let mut service = ServiceClient::start(&format!("{RLS_LISTENER}{USER_POLICY}")).await;
    for _ in 0..3 {
        let more = service
            .ask_one_descriptor(&[("user", "ann"), ("path", "/")])
            .await;
        assert_eq!(
            (
                more.overall_code(),
                single_status(&more).current_limit.clone()
            ),
            (LimitCode::Ok, None)
        );
        let other = RateLimitRequest {
            domain: "other".into(),
            ..make_request(&[make_descriptor(&[("user", "ann")])])
        };
        assert_eq!(
            service
                .should_rate_limit(other)
                .await
                .unwrap()
                .overall_code(),
            LimitCode::Ok
        );
    }
    assert_eq!(
        service
            .proxy
            .read_metric("tidegate_rls_descriptors_unmet_total")
            .await,
        6.0
    );
}

#[tokio::test]
async fn requests_and_descriptors_have_separate_policies() {
    let config = format!(
        "{RLS_LISTENER}{USER_POLICY}[[policy]]\nname = 'all'\nlimit = {{ requests = 1, per = '1h' }}\n"
    );
    let mut service = ServiceClient::from_proxy(Proxy::with_echo(&config).await).await;
    assert_eq!(
        service
            .repeat_for_codes(&make_descriptor(&[("user", "ann")]), 2)
            .await,
        [LimitCode::Ok, LimitCode::Ok]
    );
    assert_eq!(
        service.proxy.get_statuses("/?user=ann", 2).await,
        [200, 429]
    );
    assert_eq!(
        service
            .ask_one_descriptor(&[("user", "ann")])
            .await
            .overall_code(),
        LimitCode::OverLimit
    );
}

#[tokio::test]
async fn hits_addend_of_a_descriptor_overrides_that_of_the_request() {
    let config = USER_POLICY.replace("requests = 2", "requests = 10");
    let mut service = ServiceClient::start(&format!("{RLS_LISTENER}{config}cost = 2\n")).await;
    let ann = make_descriptor(&[("user", "ann")]);
    let of_call = RateLimitRequest {
        hits_addend: 2,
        ..single_descriptor_request(&ann)
    };
    assert_eq!(
        service
            .should_rate_limit(of_call.clone())
            .await
            .unwrap()
            .statuses[0]
            .limit_remaining,
        6
    );
    let of_descriptor = RateLimitRequest {
        descriptors: vec![with_hits(&ann, 3)],
        ..of_call.clone()
    };
    assert_eq!(
        service
            .should_rate_limit(of_descriptor)
            .await
            .unwrap()
            .statuses[0]
            .limit_remaining,
        0
    );
    assert_eq!(
        service
            .should_rate_limit(of_call)
            .await
            .unwrap()
            .overall_code(),
        LimitCode::OverLimit
    );
    let endless = make_request(&[with_hits(&make_descriptor(&[("user", "eve")]), u64::MAX)]);
    assert_eq!(
        service
            .should_rate_limit(endless)
            .await
            .unwrap()
            .overall_code(),
        LimitCode::OverLimit
    );
    assert_eq!(
        service
            .ask_one_descriptor(&[("user", "eve")])
            .await
            .statuses[0]
            .limit_remaining,
        8
    );
}

/// Token budgets need this: query the remaining quota first and charge once the response reports
/// its cost.
#[tokio::test]
async fn zero_hits_charge_nothing() {
    let config = format!(
        "{RLS_LISTENER}{USER_POLICY}count_rejected = true\n[[policy]]\nname = 'path'\nmatch = {{ domain = 'edge', descriptors = {{ path = '*' }} }}\nkey = ['descriptor:path']\nlimit = {{ requests = 5, per = '1h' }}\n"
    );
    let mut service = ServiceClient::start(&config).await;
    let (ann, path) = (
        make_descriptor(&[("user", "ann")]),
        make_descriptor(&[("path", "/")]),
    );
    for _ in 0..3 {
        let probe = service
            .should_rate_limit(make_request(&[with_hits(&ann, 0)]))
            .await
            .unwrap();
        assert_eq!(
            (probe.overall_code(), single_status(&probe).limit_remaining),
            (LimitCode::Ok, 2)
        );
    }
    // `hits_addend: 0` on the request means that the field is not set, so the call costs 1.
    let silent = RateLimitRequest {
        hits_addend: 0,
        ..single_descriptor_request(&make_descriptor(&[("user", "eve")]))
    };
    assert_eq!(
        service.should_rate_limit(silent).await.unwrap().statuses[0].limit_remaining,
        1
    );
    let both = RateLimitRequest {
        hits_addend: 2,
        ..make_request(&[with_hits(&make_descriptor(&[("user", "eve")]), 0)])
    };
    assert_eq!(
        service.should_rate_limit(both).await.unwrap().statuses[0].limit_remaining,
        1
    );
    // A cost above the remaining quota is rejected. With `count_rejected` it uses up the rest.
    assert_eq!(
        service.repeat_for_codes(&with_hits(&ann, 1), 1).await,
        [LimitCode::Ok]
    );
    assert_eq!(
        service.repeat_for_codes(&with_hits(&ann, 2), 1).await,
        [LimitCode::OverLimit]
    );
    let probe = service
        .should_rate_limit(make_request(&[with_hits(&ann, 0), path.clone()]))
        .await
        .unwrap();
    assert_eq!(probe.overall_code(), LimitCode::OverLimit);
    assert_eq!(
        (probe.statuses[0].code(), probe.statuses[1].code()),
        (LimitCode::OverLimit, LimitCode::Ok)
    );
    assert!(
        response_header(&probe, "retry-after").is_some(),
        "{probe:?}"
    );
    // Rejected calls charge the other policies nothing. A probe that finds quota does not stop the
    // other charges.
    let both = service
        .should_rate_limit(make_request(&[
            with_hits(&make_descriptor(&[("user", "bob")]), 0),
            path,
        ]))
        .await
        .unwrap();
    assert_eq!(
        (both.overall_code(), both.statuses[1].limit_remaining),
        (LimitCode::Ok, 4)
    );
}

#[tokio::test]
async fn all_descriptors_of_a_call_are_charged_or_none() {
    let config = format!(
        "{RLS_LISTENER}{USER_POLICY}[[policy]]\nname = 'all'\nmatch = {{ domain = 'edge', descriptors = {{ generic_key = 'all' }} }}\nlimit = {{ requests = 3, per = '1h' }}\n"
    );
    let mut service = ServiceClient::start(&config).await;
    let call = make_request(&[
        make_descriptor(&[("user", "ann")]),
        make_descriptor(&[("generic_key", "all")]),
    ]);
    for left in [2, 1] {
        let answer = service.should_rate_limit(call.clone()).await.unwrap();
        assert_eq!(
            (answer.overall_code(), answer.statuses[1].limit_remaining),
            (LimitCode::Ok, left)
        );
    }
    for _ in 0..3 {
        let answer = service.should_rate_limit(call.clone()).await.unwrap();
        assert_eq!(answer.overall_code(), LimitCode::OverLimit);
        assert_eq!(
            (answer.statuses[0].code(), answer.statuses[1].code()),
            (LimitCode::OverLimit, LimitCode::Ok)
        );
    }
    assert_eq!(
        service
            .ask_one_descriptor(&[("generic_key", "all")])
            .await
            .statuses[0]
            .limit_remaining,
        0
    );
    // Two equal descriptors in one call are charged twice.
    let twice = make_request(&[
        make_descriptor(&[("user", "bob")]),
        make_descriptor(&[("user", "bob")]),
    ]);
    let answer = service.should_rate_limit(twice.clone()).await.unwrap();
    assert_eq!(
        (answer.overall_code(), answer.statuses[0].limit_remaining),
        (LimitCode::Ok, 0)
    );
    assert_eq!(
        service
            .should_rate_limit(twice)
            .await
            .unwrap()
            .overall_code(),
        LimitCode::OverLimit
    );
}

#[tokio::test]
async fn a_descriptor_may_carry_its_own_limit() {
    let mut service = ServiceClient::start(&format!("{RLS_LISTENER}{USER_POLICY}")).await;
    let bringing = |user: &str, requests_per_unit, unit: Unit| RateLimitDescriptor {
        limit: Some(RateLimitOverride {
            requests_per_unit,
            unit: unit.into(),
        }),
        ..make_descriptor(&[("user", user)])
    };
    let five = bringing("ann", 5, Unit::Hour);
    let codes = service.repeat_for_codes(&five, 6).await;
    assert_eq!(
        codes,
        [
            LimitCode::Ok,
            LimitCode::Ok,
            LimitCode::Ok,
            LimitCode::Ok,
            LimitCode::Ok,
            LimitCode::OverLimit
        ]
    );
    let answer = service
        .should_rate_limit(make_request(&[five]))
        .await
        .unwrap();
    let limit = single_status(&answer).current_limit.clone().unwrap();
    assert_eq!(
        (limit.requests_per_unit, limit.unit(), limit.name.as_str()),
        (5, Unit::Hour, "user")
    );
    // A descriptor with its own limit has its own counter.
    assert_eq!(
        service
            .repeat_for_codes(&make_descriptor(&[("user", "ann")]), 3)
            .await,
        [LimitCode::Ok, LimitCode::Ok, LimitCode::OverLimit]
    );
    assert_eq!(
        service
            .repeat_for_codes(&bringing("bob", 0, Unit::Day), 1)
            .await,
        [LimitCode::OverLimit]
    );
    assert_eq!(
        service
            .repeat_for_codes(&bringing("bob", u32::MAX, Unit::Year), 1)
            .await,
        [LimitCode::Ok]
    );
    let unknown = service
        .should_rate_limit(make_request(&[bringing("bob", 1, Unit::Unknown)]))
        .await
        .unwrap_err();
    assert_eq!(unknown.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn allow_deny_override_and_shadow_policies_apply_to_descriptors() {
    let config = format!(
        "{RLS_LISTENER}[[policy]]\nname = 'free'\nmatch = {{ domain = 'edge', descriptors = {{ user = 'root' }} }}\naction = 'allow'\n
        [[policy]]\nname = 'banned'\nmatch = {{ domain = 'edge', descriptors = {{ user = {{ regex = '^bad' }} }} }}\naction = 'deny'\nreject = {{ body = 'go away', content_type = 'text/plain', headers = {{ x-why = 'banned' }} }}\n
        {USER_POLICY}override = [{{ key = ['acme'], limit = {{ requests = 4, per = '1h' }} }}]\n
        [[policy]]\nname = 'candidate'\nmode = 'shadow'\nmatch = {{ domain = 'edge', descriptors = {{ user = '*' }} }}\nlimit = {{ requests = 1, per = '1h' }}\n"
    );
    let mut service = ServiceClient::start(&config).await;
    assert_eq!(
        service
            .repeat_for_codes(&make_descriptor(&[("user", "root")]), 5)
            .await,
        [LimitCode::Ok; 5]
    );
    let banned = service.ask_one_descriptor(&[("user", "bad guy")]).await;
    assert_eq!(
        (banned.overall_code(), single_status(&banned).code()),
        (LimitCode::OverLimit, LimitCode::OverLimit)
    );
    assert_eq!(
        (&*banned.raw_body, response_header(&banned, "x-why")),
        (&b"go away"[..], Some("banned"))
    );
    assert_eq!(response_header(&banned, "content-type"), Some("text/plain"));
    let acme = service
        .repeat_for_codes(&make_descriptor(&[("user", "acme")]), 5)
        .await;
    assert_eq!(
        acme,
        [
            LimitCode::Ok,
            LimitCode::Ok,
            LimitCode::Ok,
            LimitCode::Ok,
            LimitCode::OverLimit
        ]
    );
    let shadow = "tidegate_requests_total{policy=\"candidate\",decision=\"shadow_rejected\"}";
    assert!(service.proxy.read_metric(shadow).await >= 3.0);
}

#[tokio::test]
async fn invalid_calls_are_rejected() {
    let mut service = ServiceClient::start(&format!("{RLS_LISTENER}{USER_POLICY}")).await;
    let ann = make_descriptor(&[("user", "ann")]);
    let negative = RateLimitDescriptor {
        is_negative_hits: true,
        ..ann.clone()
    };
    for wrong in [
        RateLimitRequest {
            domain: String::new(),
            ..single_descriptor_request(&ann)
        },
        make_request(&[]),
        make_request(&[negative]),
        make_request(&[make_descriptor(&[("user", "ann"); 65])]),
    ] {
        assert_eq!(
            service.should_rate_limit(wrong).await.unwrap_err().code(),
            Code::InvalidArgument
        );
    }
    let long = "x".repeat(100_000);
    let large = service
        .should_rate_limit(make_request(&[make_descriptor(&[("user", &long)])]))
        .await
        .unwrap_err();
    assert_eq!(large.code(), Code::ResourceExhausted);
    let other = call_unary::<_, RateLimitResponse>(
        &mut service.grpc,
        "/envoy.service.ratelimit.v3.RateLimitService/Other",
        make_request(&[ann]),
    );
    assert_eq!(other.await.unwrap_err().code(), Code::Unimplemented);
    let address = service
        .proxy
        .logged_address("rate-limit service listening")
        .unwrap();
    assert_eq!(
        ClientRequest::new(address, "GET", "/").send().await.status,
        505
    );
    assert_eq!(
        service
            .proxy
            .read_metric("tidegate_rls_calls_total{result=\"invalid\"}")
            .await,
        6.0
    );
}

/// An error for the whole call would let Envoy pass all of its descriptors.
#[tokio::test]
async fn descriptors_that_cannot_be_decided_leave_the_others_limited() {
    let mut service = ServiceClient::start(&format!("{RLS_LISTENER}{USER_POLICY}")).await;
    let negative = RateLimitDescriptor {
        is_negative_hits: true,
        ..make_descriptor(&[("user", "refunded")])
    };
    let long = make_descriptor(&[("user", "long"); 65]);
    let calls = [
        (
            "negative",
            vec![negative, make_descriptor(&[("user", "a")])],
        ),
        ("long", vec![long, make_descriptor(&[("user", "b")])]),
        (
            "many",
            [
                vec![make_descriptor(&[("other", "x")]); 63],
                vec![make_descriptor(&[("user", "c")]); 3],
            ]
            .concat(),
        ),
    ];
    for (what, descriptors) in calls {
        let limited = if what == "many" { 63 } else { 1 };
        for (round, expected) in [LimitCode::Ok, LimitCode::Ok, LimitCode::OverLimit]
            .into_iter()
            .enumerate()
        {
            let answer = service
                .should_rate_limit(make_request(&descriptors))
                .await
                .unwrap_or_else(|status| panic!("{what}: {status}"));
            assert_eq!(answer.statuses.len(), descriptors.len(), "{what}");
            assert_eq!(answer.overall_code(), expected, "{what} {round}");
            for (position, status) in answer.statuses.iter().enumerate() {
                let is_limited = position == limited;
                assert_eq!(
                    (status.code(), status.current_limit.is_some()),
                    (
                        if is_limited { expected } else { LimitCode::Ok },
                        is_limited
                    ),
                    "{what} {round} {position}"
                );
            }
        }
    }
    let unmet = service
        .proxy
        .read_metric("tidegate_rls_descriptors_unmet_total")
        .await;
    assert_eq!(unmet, f64::from(3 * (1 + 1 + 65)));
    let warnings = service.proxy.log_text();
    let count = warnings.matches("descriptors without a decision").count();
    assert_eq!(count, 1, "{warnings}");
}
