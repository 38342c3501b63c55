//! `mode = "mark"` forwards requests over a limit with a header for the app, and `report = false`
//! keeps a policy out of the responses.

use crate::support::prelude::*;
use crate::support::rls_client::{response_header, single_status};

const MARK_POLICIES: &str = r#"
[[policy]]
name = "soft"
mode = "mark"
key = ["header:x-user"]
limit = { requests = 2, per = "1h" }
[[policy]]
name = "hard"
key = ["header:x-user"]
limit = { requests = 4, per = "1h" }
"#;

const OVER: &str = "x-tidegate-over";

async fn ask(proxy: &Proxy, user: &str) -> RawResponse {
    proxy.get_with("/", "X-User", user).await
}

#[tokio::test]
async fn a_request_over_the_limit_reaches_the_app_with_the_name_of_the_policy() {
    for redis in [None, Some(RedisServer::start())] {
        let store = redis
            .as_ref()
            .map(RedisServer::store_config)
            .unwrap_or_default();
        let log_all = format!("{store}\nadmin.address = '127.0.0.1:0'\n{MARK_POLICIES}");
        let proxy = Proxy::with_echo(&log_all).await;
        for (left, marks) in [(1, &[][..]), (0, &[]), (0, &["soft"]), (0, &["soft"])] {
            // The client's own mark never reaches the app.
            let request = proxy.request("GET", "/").header("X-User", "ann");
            let reply = request
                .header("X-Tidegate-Over", "forged")
                .header("x-tidegate-over", "soft")
                .send()
                .await;
            assert_eq!(reply.status, 200);
            assert_eq!(proxy.echo().last_request().header_values(OVER), marks);
            assert_eq!(reply.remaining("soft"), Some(left));
            assert_eq!(reply.header(OVER), None);
            assert_eq!(reply.header("retry-after"), None);
        }
        let status = ask(&proxy, "ann").await.status;
        assert_eq!(status, 429, "the other policy enforces");
        assert_eq!(ask(&proxy, "bob").await.status, 200);
        assert!(proxy.echo().last_request().header_values(OVER).is_empty());
        let count = async |decision: &str| {
            let labels = format!("{{policy=\"soft\",decision=\"{decision}\"}}");
            proxy
                .read_metric(&format!("tidegate_requests_total{labels}"))
                .await
        };
        // The request that "hard" rejected is over the limit of "soft" too, and charged by neither.
        assert_eq!((count("allowed").await, count("marked").await), (3.0, 3.0));
        let line = proxy.wait_for_field("marked", "soft", 0).await;
        assert_eq!(line.field("decision"), "allowed");
    }
}

#[tokio::test]
async fn a_cost_that_does_not_fit_is_marked_and_costs_nothing() {
    let proxy = Proxy::with_echo(
        "[[policy]]\nname = 'big'\nmode = 'mark'\nlimit = { requests = 5, per = '1h' }\ncost = { header = 'x-cost', max = 9 }\n
         [[policy]]\nname = 'never'\nmode = 'mark'\naction = 'deny'\nmatch = { path = '/old/**' }\n
         [[policy]]\nname = 'keyed'\nmode = 'mark'\nmatch = { path = '/keyed' }\nkey = ['header:x-user']\nmissing_key = 'reject'\nlimit = { requests = 9, per = '1h' }\n",
    )
    .await;
    let send = async |target: &str, cost: &str| {
        let reply = proxy.get_with(target, "X-Cost", cost).await;
        let marks = proxy.echo().last_request().header_values(OVER).join("|");
        (reply.status, reply.remaining("big"), marks)
    };
    assert_eq!(send("/", "3").await, (200, Some(2), String::new()));
    assert_eq!(send("/", "3").await, (200, Some(2), "big".to_owned()));
    let answer = send("/old/x", "9").await;
    assert_eq!(answer, (200, Some(2), "never, big".to_owned()));
    let answer = send("/keyed", "2").await;
    assert_eq!(answer, (200, Some(0), "keyed".to_owned()));
}

/// `r` and `t` are those of the limit, whether it refuses, another limit refuses, or none does.
#[tokio::test]
async fn the_fields_of_a_limit_do_not_depend_on_refusals() {
    let policies = "
[[policy]]
name = 'soft'
mode = 'mark'
key = ['header:x-user']
limit = { requests = 10, per = '2h', algorithm = 'fixed_window' }
cost = { header = 'x-cost', default = 1, max = 50 }
[[policy]]
name = 'day'
key = ['header:x-user']
limit = { requests = 100, per = '1d', algorithm = 'fixed_window' }
[[policy]]
name = 'fast'
key = ['header:x-user']
limit = { requests = 2, per = '20s' }
";
    for redis in [None, Some(RedisServer::start())] {
        let store = redis.as_ref().map(RedisServer::store_config);
        let config = format!("{}\n{policies}", store.unwrap_or_default());
        let proxy = Proxy::echo_connected(&config).await;
        let send = async |cost: &str| {
            let request = proxy.request("GET", "/").header("X-User", "ann");
            let reply = request.header("X-Cost", cost).send().await;
            let field = |limit: &str, name: &str| reply.list_parameter("ratelimit", limit, name);
            let (soft_t, day_t) = (field("soft", "t").unwrap(), field("day", "t").unwrap());
            // To the end of the windows, which start at multiples of their length.
            let now_s = crate::support::unix_s();
            let is_end_of_window = |t: u64, length_s: u64| {
                (t + now_s) % length_s <= 2 || (t + now_s) % length_s >= length_s - 2
            };
            assert!(
                is_end_of_window(soft_t, 7_200),
                "{:?}",
                reply.header("ratelimit")
            );
            assert!(
                is_end_of_window(day_t, 86_400),
                "{:?}",
                reply.header("ratelimit")
            );
            (reply.status, field("soft", "r"), field("day", "r"))
        };
        assert_eq!(send("3").await, (200, Some(7), Some(99)));
        // The cost does not fit: marked, and nothing is charged. Seven units are left.
        assert_eq!(send("8").await, (200, Some(7), Some(98)));
        // `fast` refuses.
        assert_eq!(send("3").await, (429, Some(7), Some(98)));
    }
}

#[tokio::test]
async fn the_header_has_a_configurable_name_and_no_lookalike_passes() {
    let config = "defaults.mark_header = 'X-Quota-Over'\n[[policy]]\nname = 'soft'\nmode = 'mark'\nlimit = { requests = 1, per = '1h' }\n";
    let proxy = Proxy::with_echo(config).await;
    for marks in [&[][..], &["soft"]] {
        let request = proxy.request("GET", "/").header("x-quota-over", "soft");
        request
            .header("X-Tidegate-Over", "app")
            .expect_status(200)
            .await;
        let received = proxy.echo().last_request();
        assert_eq!(received.header_values("x-quota-over"), marks);
        assert_eq!(
            received.header_values(OVER),
            ["app"],
            "an ordinary header now"
        );
    }
    // A CGI-like app reads this as the same name.
    let lookalike = proxy.request("GET", "/").header("X_Quota_Over", "soft");
    assert_eq!(lookalike.send().await.status, 400);
    let request = proxy.request("GET", "/");
    let hidden = request.header("Connection", "x-quota-over");
    assert_eq!(hidden.send().await.status, 400);
}

#[tokio::test]
async fn proxies_in_front_get_the_mark_from_both_services() {
    let config = "client.trusted_proxies = ['127.0.0.1']\n[check]\naddress = '127.0.0.1:0'\n
        [[policy]]\nname = 'soft'\nmode = 'mark'\nlimit = { requests = 1, per = '1h' }\n";
    let proxy = Proxy::setup(config).start().await;
    let check = proxy.logged_address("check listening").unwrap();
    for mark in [None, Some("soft")] {
        let reply = ClientRequest::new(check, "GET", "/check/nginx")
            .header("Host", "shop.example")
            .header("X-Original-Method", "GET")
            .header("X-Original-URI", "/")
            .send()
            .await;
        assert_eq!((reply.status, reply.header(OVER)), (200, mark));
    }
    let config = "[rls]\naddress = '127.0.0.1:0'\n[[policy]]\nname = 'soft'\nmode = 'mark'\nmatch = { domain = 'edge' }\nkey = ['descriptor:user']\nlimit = { requests = 1, per = '1h' }\n";
    let mut service = ServiceClient::start(config).await;
    for mark in [None, Some("soft")] {
        let reply = service.ask_one_descriptor(&[("user", "ann")]).await;
        assert_eq!(reply.overall_code, single_status(&reply).code);
        assert_eq!(reply.overall_code, 1);
        assert_eq!(single_status(&reply).limit_remaining, 0);
        let added = reply.request_headers_to_add.first();
        assert_eq!(
            added.map(|header| (&*header.key, &*header.value)),
            mark.map(|mark| (OVER, mark))
        );
        assert_eq!(response_header(&reply, OVER), None);
    }
}

#[tokio::test]
async fn a_policy_that_is_not_reported_is_in_no_response() {
    let config = r#"
admin.address = "127.0.0.1:0"
[self_service]
path = "/limits"
[[policy]]
name = "cryptic"
report = false
key = ["client_ip"]
match = { path = "/api/**" }
limit = { requests = 2, per = "1h" }
[[policy]]
name = "seen"
key = ["client_ip"]
limit = { requests = 9, per = "1h" }
[[policy]]
name = "cryptic-ban"
report = false
action = "deny"
match = { path = "/ban" }
[[policy]]
name = "cryptic-key"
report = false
match = { path = "/keyed" }
key = ["header:x-user"]
missing_key = "reject"
limit = { requests = 9, per = "1h" }
"#;
    let proxy = Proxy::with_echo(config).await;
    let check_reply = |reply: &RawResponse| {
        let everything = format!("{:?} {}", reply.headers, reply.text());
        assert!(!everything.contains("cryptic"), "{everything}");
    };
    for target in ["/api/a", "/api/a", "/limits", "/api/a", "/ban", "/keyed"] {
        for accept in ["application/json", "text/plain", "application/grpc"] {
            let mut request = proxy.request("GET", target).header("Accept", accept);
            if accept == "application/grpc" {
                request = request.header("Content-Type", accept);
            }
            check_reply(&request.send().await);
        }
    }
    let refused = proxy.get("/api/a").await;
    assert_eq!(refused.status, 429);
    assert_eq!(refused.json()["policy"], Value::Null);
    assert_eq!(refused.json()["violated-policies"], Value::Null);
    // A retry time is the truth that every refused client gets.
    assert!(refused.retry_after_us() > 3_000_000_000);
    assert_eq!(refused.remaining("seen"), Some(7));
    assert_eq!(refused.header("x-ratelimit-limit"), Some("9"));
    let line = proxy.wait_for_field("policy", "cryptic", 0).await;
    assert_eq!(line.field("limit"), "cryptic");
    let refusals = "tidegate_requests_total{policy=\"cryptic\",decision=\"rejected\"}";
    assert!(proxy.read_metric(refusals).await >= 1.0);
}

#[tokio::test]
async fn a_rate_limit_call_reports_no_hidden_limit() {
    let config = "[rls]\naddress = '127.0.0.1:0'\n[[policy]]\nname = 'cryptic'\nreport = false\nmatch = { domain = 'edge' }\nlimit = { requests = 1, per = '1h' }\n";
    let mut service = ServiceClient::start(config).await;
    let ann = make_descriptor(&[("user", "ann")]);
    for code in [1, 2] {
        let reply = service
            .should_rate_limit(single_descriptor_request(&ann))
            .await
            .unwrap();
        assert_eq!(reply.overall_code, code);
        assert_eq!(single_status(&reply).code, code);
        assert!(!format!("{reply:?}").contains("cryptic"), "{reply:?}");
    }
}

#[tokio::test]
async fn check_says_what_a_mark_does_and_refuses_what_it_cannot_do() {
    for (policy, expected) in [
        ("mode = 'mark'\naction = 'allow'\n", "has no limit to mark"),
        (
            "mode = 'mark'\nblock_for = '1m'\nlimit = { requests = 1, per = '1h' }\n",
            "a policy in mode \"mark\" blocks no key",
        ),
        (
            "mode = 'mark'\nlimit = { requests = 1, per = '1h' }\n",
            "p (mark): ",
        ),
        (
            "report = false\nlimit = { requests = 1, per = '1h' }\n",
            "; not reported to clients",
        ),
        (
            "report = false\naction = 'allow'\n",
            "no response has this policy",
        ),
        (
            "match = { headers = { x-tidegate-over = 'p' } }\nlimit = { requests = 1, per = '1h' }\n",
            "tidegate removes this header before policies see it",
        ),
    ] {
        let ended = run_check(&format!("[[policy]]\nname = 'p'\n{policy}")).await;
        let output = ended.stdout + &ended.stderr;
        assert!(output.contains(expected), "{policy}: {output}");
    }
}
