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
    let first = service.ask_user("ann").await;
    assert_eq!(first.overall_code(), LimitCode::Ok);
    assert_eq!(single_status(&first).code(), LimitCode::Ok);
    let limit = single_status(&first).current_limit.clone().unwrap();
    assert_eq!(limit.name.as_str(), "user");
    assert_eq!(limit.requests_per_unit, 2);
    assert_eq!(limit.unit(), Unit::Hour);
    assert_eq!(single_status(&first).limit_remaining, 1);
    assert!(
        response_header(&first, "ratelimit")
            .unwrap()
            .starts_with("\"user\";r=1;t="),
        "{first:?}"
    );
    let found = response_header(&first, "ratelimit-policy");
    assert_eq!(found, Some("\"user\";q=2;w=3600"));
    assert_eq!(response_header(&first, "x-ratelimit-remaining"), Some("1"));
    assert_eq!(response_header(&first, "retry-after"), None);

    service.expect_code(user_call("ann"), LimitCode::Ok).await;
    let over = service.ask_user("ann").await;
    assert_eq!(over.overall_code(), LimitCode::OverLimit);
    assert_eq!(single_status(&over).code(), LimitCode::OverLimit);
    assert_eq!(single_status(&over).limit_remaining, 0);
    let reset_s = single_status(&over).duration_until_reset.unwrap().seconds;
    assert!((3000..=3600).contains(&reset_s), "{reset_s}");
    let retry_after: i64 = response_header(&over, "retry-after")
        .unwrap()
        .parse()
        .unwrap();
    let range = reset_s..=reset_s + 1;
    assert!(range.contains(&retry_after), "{retry_after} {reset_s}");

    service.expect_code(user_call("bob"), LimitCode::Ok).await;
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
        assert_eq!(more.overall_code(), LimitCode::Ok);
        assert_eq!(single_status(&more).current_limit.clone(), None);
        let other = RateLimitRequest {
            domain: "other".into(),
            ..user_call("ann")
        };
        service.expect_code(other, LimitCode::Ok).await;
    }
    service
        .proxy
        .assert_metric("tidegate_rls_descriptors_unmet_total", 6.0)
        .await;
}

#[tokio::test]
async fn requests_and_descriptors_have_separate_policies() {
    let config = format!(
        "{RLS_LISTENER}{USER_POLICY}[[policy]]\nname = 'all'\nlimit = {{ requests = 1, per = '1h' }}\n"
    );
    let mut service = ServiceClient::from_proxy(Proxy::with_echo(&config).await).await;
    let answer = service.repeat_for_codes(&user_descriptor("ann"), 2).await;
    assert_eq!(answer, [LimitCode::Ok, LimitCode::Ok]);
    let statuses = service.proxy.get_statuses("/?user=ann", 2).await;
    assert_eq!(statuses, [200, 429]);
    service
        .expect_code(user_call("ann"), LimitCode::OverLimit)
        .await;
}

#[tokio::test]
async fn hits_addend_of_a_descriptor_overrides_that_of_the_request() {
    let config = USER_POLICY.replace("requests = 2", "requests = 10");
    let mut service = ServiceClient::start(&format!("{RLS_LISTENER}{config}cost = 2\n")).await;
    let ann = user_descriptor("ann");
    let of_call = RateLimitRequest {
        hits_addend: 2,
        ..single_descriptor_request(&ann)
    };
    service.expect_left(of_call.clone(), 6).await;
    let of_descriptor = RateLimitRequest {
        descriptors: vec![with_hits(&ann, 3)],
        ..of_call.clone()
    };
    service.expect_left(of_descriptor, 0).await;
    service.expect_code(of_call, LimitCode::OverLimit).await;
    let endless = make_request(&[with_hits(&user_descriptor("eve"), u64::MAX)]);
    service.expect_code(endless, LimitCode::OverLimit).await;
    service.expect_left(user_call("eve"), 8).await;
}

/// Token budgets need this: query the remaining quota first and charge once the response reports
/// its cost.
#[tokio::test]
async fn zero_hits_charge_nothing() {
    let config = format!(
        "{RLS_LISTENER}{USER_POLICY}count_rejected = true\n[[policy]]\nname = 'path'\nmatch = {{ domain = 'edge', descriptors = {{ path = '*' }} }}\nkey = ['descriptor:path']\nlimit = {{ requests = 5, per = '1h' }}\n"
    );
    let mut service = ServiceClient::start(&config).await;
    let (ann, path) = (user_descriptor("ann"), make_descriptor(&[("path", "/")]));
    for _ in 0..3 {
        let probe = service.call(make_request(&[with_hits(&ann, 0)])).await;
        assert_eq!(probe.overall_code(), LimitCode::Ok);
        assert_eq!(single_status(&probe).limit_remaining, 2);
    }
    // `hits_addend: 0` on the request means that the field is not set, so the call costs 1.
    let silent = RateLimitRequest {
        hits_addend: 0,
        ..user_call("eve")
    };
    service.expect_left(silent, 1).await;
    let both = RateLimitRequest {
        hits_addend: 2,
        ..make_request(&[with_hits(&user_descriptor("eve"), 0)])
    };
    service.expect_left(both, 1).await;
    // A cost above the remaining quota is rejected. With `count_rejected` it uses up the rest.
    let answer = service.repeat_for_codes(&with_hits(&ann, 1), 1).await;
    assert_eq!(answer, [LimitCode::Ok]);
    let answer = service.repeat_for_codes(&with_hits(&ann, 2), 1).await;
    assert_eq!(answer, [LimitCode::OverLimit]);
    let probe = service
        .call(make_request(&[with_hits(&ann, 0), path.clone()]))
        .await;
    assert_eq!(probe.overall_code(), LimitCode::OverLimit);
    assert_eq!(probe.statuses[0].code(), LimitCode::OverLimit);
    assert_eq!(probe.statuses[1].code(), LimitCode::Ok);
    assert!(
        response_header(&probe, "retry-after").is_some(),
        "{probe:?}"
    );
    // Rejected calls charge the other policies nothing. A probe that finds quota does not stop the
    // other charges.
    let both = service
        .call(make_request(&[with_hits(&user_descriptor("bob"), 0), path]))
        .await;
    assert_eq!(both.overall_code(), LimitCode::Ok);
    assert_eq!(both.statuses[1].limit_remaining, 4);
}

#[tokio::test]
async fn all_descriptors_of_a_call_are_charged_or_none() {
    let config = format!(
        "{RLS_LISTENER}{USER_POLICY}[[policy]]\nname = 'all'\nmatch = {{ domain = 'edge', descriptors = {{ generic_key = 'all' }} }}\nlimit = {{ requests = 3, per = '1h' }}\n"
    );
    let mut service = ServiceClient::start(&config).await;
    let call = make_request(&[
        user_descriptor("ann"),
        make_descriptor(&[("generic_key", "all")]),
    ]);
    for left in [2, 1] {
        let answer = service.call(call.clone()).await;
        assert_eq!(answer.overall_code(), LimitCode::Ok);
        assert_eq!(answer.statuses[1].limit_remaining, left);
    }
    for _ in 0..3 {
        let answer = service.call(call.clone()).await;
        assert_eq!(answer.overall_code(), LimitCode::OverLimit);
        assert_eq!(answer.statuses[0].code(), LimitCode::OverLimit);
        assert_eq!(answer.statuses[1].code(), LimitCode::Ok);
    }
    service
        .expect_left(
            make_request(&[make_descriptor(&[("generic_key", "all")])]),
            0,
        )
        .await;
    // Two equal descriptors in one call are charged twice.
    let twice = make_request(&[user_descriptor("bob"), user_descriptor("bob")]);
    let answer = service.call(twice.clone()).await;
    assert_eq!(answer.overall_code(), LimitCode::Ok);
    assert_eq!(answer.statuses[0].limit_remaining, 0);
    service.expect_code(twice, LimitCode::OverLimit).await;
}

#[tokio::test]
async fn a_descriptor_may_carry_its_own_limit() {
    let mut service = ServiceClient::start(&format!("{RLS_LISTENER}{USER_POLICY}")).await;
    let bringing = |user: &str, requests_per_unit, unit: Unit| RateLimitDescriptor {
        limit: Some(RateLimitOverride {
            requests_per_unit,
            unit: unit.into(),
        }),
        ..user_descriptor(user)
    };
    let five = bringing("ann", 5, Unit::Hour);
    let codes = service.repeat_for_codes(&five, 6).await;
    assert_eq!(codes, admitted_then_over(5, 1));
    let answer = service.call(make_request(&[five])).await;
    let limit = single_status(&answer).current_limit.clone().unwrap();
    assert_eq!(limit.requests_per_unit, 5);
    assert_eq!(limit.unit(), Unit::Hour);
    assert_eq!(limit.name.as_str(), "user");
    // A descriptor with its own limit has its own counter.
    let found = service.repeat_for_codes(&user_descriptor("ann"), 3).await;
    assert_eq!(found, admitted_then_over(2, 1));
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
    let answer = service.repeat_for_codes(&user_descriptor("root"), 5).await;
    assert_eq!(answer, [LimitCode::Ok; 5]);
    let banned = service.ask_user("bad guy").await;
    assert_eq!(banned.overall_code(), LimitCode::OverLimit);
    assert_eq!(single_status(&banned).code(), LimitCode::OverLimit);
    assert_eq!(&*banned.raw_body, &b"go away"[..]);
    assert_eq!(response_header(&banned, "x-why"), Some("banned"));
    assert_eq!(response_header(&banned, "content-type"), Some("text/plain"));
    let acme = service.repeat_for_codes(&user_descriptor("acme"), 5).await;
    assert_eq!(acme, admitted_then_over(4, 1));
    let shadow = "tidegate_requests_total{policy=\"candidate\",decision=\"shadow_rejected\"}";
    assert!(service.proxy.read_metric(shadow).await >= 3.0);
}

#[tokio::test]
async fn invalid_calls_are_rejected() {
    let mut service = ServiceClient::start(&format!("{RLS_LISTENER}{USER_POLICY}")).await;
    let ann = user_descriptor("ann");
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
        let found = service.should_rate_limit(wrong).await.unwrap_err().code();
        assert_eq!(found, Code::InvalidArgument);
    }
    let long = "x".repeat(100_000);
    let large = service
        .should_rate_limit(make_request(&[user_descriptor(&long)]))
        .await
        .unwrap_err();
    assert_eq!(large.code(), Code::ResourceExhausted);
    let other = call_unary::<_, RateLimitResponse>(
        &mut service.grpc,
        "/envoy.service.ratelimit.v3.RateLimitService/Other",
        make_request(&[ann]),
    );
    assert_eq!(other.await.unwrap_err().code(), Code::Unimplemented);
    let address = service.address();
    ClientRequest::new(address, "GET", "/")
        .expect_status(505)
        .await;
    service
        .proxy
        .assert_metric("tidegate_rls_calls_total{result=\"invalid\"}", 6.0)
        .await;
}

/// An error for the whole call would let Envoy pass all of its descriptors.
#[tokio::test]
async fn descriptors_that_cannot_be_decided_leave_the_others_limited() {
    let mut service = ServiceClient::start(&format!("{RLS_LISTENER}{USER_POLICY}")).await;
    let negative = RateLimitDescriptor {
        is_negative_hits: true,
        ..user_descriptor("refunded")
    };
    let long = make_descriptor(&[("user", "long"); 65]);
    let calls = [
        ("negative", vec![negative, user_descriptor("a")]),
        ("long", vec![long, user_descriptor("b")]),
        (
            "many",
            [
                vec![make_descriptor(&[("other", "x")]); 63],
                vec![user_descriptor("c"); 3],
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
