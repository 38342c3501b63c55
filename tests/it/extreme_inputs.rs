//! Extreme settings: every option with every algorithm, limits of 0 and 2^53, periods of 1 ms and
//! 400 days, invalid costs. The results are defined and the same in both stores.

use crate::support::prelude::*;
use tidegate::config::{ConfigSources, FileSource, load};

/// Each algorithm with its own options. `concurrency` has no period.
const ALGORITHMS: [(&str, &[&str]); 6] = [
    ("sliding_log", &[]),
    ("sliding_window", &["buckets = 5"]),
    ("fixed_window", &["offset = \"1ms\""]),
    // Cold, this bucket holds the largest cost that a header may have.
    ("token_bucket", &["burst = 300", "warm_up = \"10s\""]),
    ("leaky_bucket", &["max_delay = \"1ms\""]),
    (
        "concurrency",
        &["lease_ttl = \"5s\"", "max_duration = \"1m\""],
    ),
];

/// The limit of an algorithm with an extra option.
fn limit_with_option(algorithm: &str, beside: &str) -> String {
    let per = if algorithm == "concurrency" {
        ""
    } else {
        "per = \"1s\", "
    };
    format!("requests = 5, {per}algorithm = \"{algorithm}\"{beside}")
}

/// The algorithms with a period.
fn time_based_algorithms() -> impl Iterator<Item = &'static str> {
    ALGORITHMS
        .iter()
        .map(|(algorithm, _)| *algorithm)
        .filter(|algorithm| *algorithm != "concurrency")
}

/// Policy options beside the limit.
const POLICY_OPTIONS: [&str; 11] = [
    "",
    "cost = 2",
    "cost = { header = \"x-cost\" }",
    "cost = { estimate = 2, actual = \"response_header:x-units\" }",
    "cost = { estimate = 2, actual = \"response_json:/units\" }",
    "block_for = \"1m\"",
    "count_rejected = true",
    "mode = \"shadow\"",
    "missing_key = \"reject\"",
    "on_store_failure = \"closed\"",
    "override = [{ key = [\"ann\"], limit = { requests = 9, per = \"2s\" } }]",
];

/// Each rejected pair of an option and an algorithm, with the reason.
const REJECTED_COMBINATIONS: [(&str, &str, &str); 2] = [
    (
        "concurrency",
        "count_rejected",
        "policy[0].count_rejected: algorithm = \"concurrency\" can't count",
    ),
    (
        "concurrency",
        "cost = { estimate",
        "policy[0].cost: never settled",
    ),
];

/// Runs `check` on one policy and returns its error, if any.
fn check_errors(limit: &str, beside: &str) -> Option<String> {
    let text = format!(
        "upstream.url = \"http://127.0.0.1:3000\"\n[[policy]]\nname = \"p\"\nkey = [\"header:x-user\"]\n\
         limit = {{ {limit} }}\n{beside}\n"
    );
    let file = FileSource::Text {
        name: "test.toml".into(),
        text,
    };
    load(&ConfigSources {
        file,
        ..ConfigSources::default()
    })
    .err()
    .map(|report| report.to_string())
}

#[test]
fn an_option_of_another_algorithm_is_rejected_naming_its_own_algorithm() {
    for (algorithm, _) in ALGORITHMS {
        for (owner, options) in ALGORITHMS {
            for option in options {
                let limit = limit_with_option(algorithm, &format!(", {option}"));
                let error = check_errors(&limit, "");
                if owner == algorithm {
                    assert_eq!(error, None, "{limit}");
                    continue;
                }
                let (key, _) = option.split_once(' ').unwrap();
                let error = error.unwrap_or_else(|| panic!("{limit} is accepted"));
                let reason = format!("policy[0].limit.{key}: only for algorithm = \"{owner}\"");
                assert!(error.contains(&reason), "{limit}: {error}");
                assert!(error.ends_with("1 error\n"), "{limit}: {error}");
            }
        }
    }
    let error = check_errors(&limit_with_option("concurrency", ", per = \"1s\""), "").unwrap();
    assert_contains(&error, &["per: not for algorithm = \"concurrency\""]);
    let error = check_errors("requests = 5", "").unwrap();
    assert!(error.contains("per: missing"), "{error}");
}

/// Each option alone, and each pair of options.
#[test]
fn every_algorithm_accepts_every_policy_option_or_check_gives_the_reason() {
    let key = |beside: &str| beside.split(' ').next().unwrap().to_owned();
    for (algorithm, options) in ALGORITHMS {
        let options: String = options.iter().map(|option| format!(", {option}")).collect();
        let limit = limit_with_option(algorithm, &options);
        for (n, one) in POLICY_OPTIONS.iter().enumerate() {
            for other in POLICY_OPTIONS[n + 1..]
                .iter()
                .filter(|other| key(other) != key(one))
            {
                let reasons = REJECTED_COMBINATIONS.iter().filter(|(of, beside, _)| {
                    *of == algorithm && (one.starts_with(beside) || other.starts_with(beside))
                });
                let reasons: Vec<&str> = reasons.map(|(.., reason)| *reason).collect();
                let error = check_errors(&limit, &format!("{one}\n{other}")).unwrap_or_default();
                let both = format!("{limit} beside {one:?} and {other:?}: {error}");
                assert!(
                    reasons.iter().all(|reason| error.contains(reason)),
                    "{both}"
                );
                let ends = ["", "1 error\n", "2 errors\n"];
                assert!(error.ends_with(ends[reasons.len()]), "{both}");
                assert!(error.is_empty() == reasons.is_empty(), "{both}");
            }
        }
    }
}

/// A client with only such requests would never warm the bucket up.
#[test]
fn a_cost_above_the_cold_capacity_of_a_bucket_is_rejected() {
    let limit = limit_with_option("token_bucket", ", burst = 9, warm_up = \"10s\"");
    for beside in [
        "cost = 4",
        "cost = { header = \"x-cost\", max = 4 }",
        "cost = { estimate = 4, actual = \"response_json:/a\" }",
    ] {
        let error = check_errors(&limit, beside).unwrap_or_default();
        assert!(
            error.contains("a third of burst; expected at most 3"),
            "{beside}: {error}"
        );
        let found = check_errors(&limit, &beside.replace('4', "3"));
        assert_eq!(found, None, "{beside}");
    }
}

/// 2^53 units and one more, 400 days and one more. If a bucket cannot count a limit exactly, the
/// error names the largest possible limit.
#[test]
fn the_largest_limits_are_defined_for_every_algorithm() {
    const MAX_REQUESTS: u64 = 1 << 53;
    for algorithm in time_based_algorithms() {
        let error = |requests: u64, per: &str| {
            check_errors(
                &format!("requests = {requests}, per = \"{per}\", algorithm = \"{algorithm}\""),
                "",
            )
        };
        for (requests, per, reason) in [
            (MAX_REQUESTS + 1, "1s", "from 0 to 9007199254740992"),
            (1, "0ms", "from 1ms to 400d"),
            (1, "401d", "from 1ms to 400d"),
            (1, "9600h1ms", "expected a duration"),
        ] {
            let error = error(requests, per).unwrap_or_default();
            assert!(
                error.contains(reason),
                "{algorithm}, {requests} per {per}: {error}"
            );
        }
        // A token bucket counts in units of 1 / per. A leaky bucket is limited by its longest
        // delay.
        let (most_short, most_long) = match algorithm {
            "token_bucket" => (MAX_REQUESTS / 1_000, MAX_REQUESTS / (400 * 86_400_000_000)),
            "leaky_bucket" => (
                (MAX_REQUESTS - 1_000) / 1_000_000,
                (MAX_REQUESTS - 400 * 86_400_000_000) / 1_000_000,
            ),
            _ => (MAX_REQUESTS, MAX_REQUESTS),
        };
        for (most, per) in [(most_short, "1ms"), (most_long, "400d")] {
            for requests in [0, 1, most] {
                let found = error(requests, per);
                assert_eq!(found, None, "{algorithm}, {requests} per {per}");
            }
            if most < MAX_REQUESTS {
                let error = error(most + 1, per).unwrap();
                assert!(
                    error.contains(&format!("expected at most {most}")),
                    "{algorithm} per {per}: {error}"
                );
            }
        }
    }
}

/// One policy per algorithm and extreme, selected by path.
fn extreme_policies() -> String {
    let policy = |path: &str, algorithm: &str, limit: &str, beside: &str| {
        let held = if algorithm == "leaky_bucket" {
            ", max_delay = \"0s\""
        } else {
            ""
        };
        format!(
            "[[policy]]\nname = \"{path}-{algorithm}\"\nmatch = {{ path = \"/{path}/{algorithm}\" }}\n\
             limit = {{ {limit}, algorithm = \"{algorithm}\"{held} }}\n{beside}\n"
        )
    };
    let each = |algorithm: &str| {
        [
            policy("none", algorithm, "requests = 0, per = \"1s\"", ""),
            policy("short", algorithm, "requests = 1, per = \"1ms\"", ""),
            policy("long", algorithm, "requests = 1, per = \"400d\"", ""),
        ]
        .concat()
    };
    let most = |algorithm: &str| {
        let cost = "cost = { header = \"x-cost\", max = 9007199254740992 }";
        policy(
            "most",
            algorithm,
            "requests = 9007199254740992, per = \"400d\"",
            cost,
        )
    };
    time_based_algorithms()
        .map(each)
        .chain(time_based_algorithms().take(3).map(most))
        .collect()
}

async fn assert_extremes_are_defined(proxy: &Proxy) {
    for algorithm in time_based_algorithms() {
        let never = proxy.get(&format!("/none/{algorithm}")).await;
        assert_eq!(never.status, 429, "{algorithm}");
        assert_eq!(never.header("retry-after"), None, "{algorithm}");
        assert!(never.json().get("retry_after").is_none(), "{algorithm}");

        let target = format!("/long/{algorithm}");
        assert_eq!(proxy.get(&target).await.status, 200, "{algorithm}");
        let refused = proxy.get(&target).await;
        assert_eq!(refused.status, 429, "{algorithm}");
        let (told_s, longest_s) = (refused.retry_after_us() / 1_000_000, 440 * 86_400);
        assert!(told_s <= longest_s, "{algorithm}: {told_s}");
        if algorithm != "fixed_window" {
            assert!(told_s >= 400 * 86_400 - 60, "{algorithm}: {told_s}");
        }

        // One request per millisecond. A client that retries constantly is admitted at most once
        // per millisecond.
        let (start, target) = (Instant::now(), format!("/short/{algorithm}"));
        let mut admitted = 0;
        while admitted < 20 {
            let reply = proxy.get(&target).await;
            admitted += u64::from(reply.status == 200);
            assert!(
                reply.status == 200 || reply.retry_after_us() <= 1_500,
                "{algorithm}"
            );
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "{algorithm}: requests stay refused"
            );
        }
        assert!(
            start.elapsed() >= Duration::from_millis(17),
            "{algorithm}: {:?}",
            start.elapsed()
        );
    }
    for algorithm in time_based_algorithms().take(3) {
        let ask = |cost: &'static str| {
            proxy
                .request("GET", &format!("/most/{algorithm}"))
                .header("x-cost", cost)
                .send()
        };
        let left = async |cost| ask(cost).await.remaining(&format!("most-{algorithm}"));
        assert_eq!(left("9007199254740990").await, Some(2), "{algorithm}");
        for nonsense in [
            "-1",
            "NaN",
            "1e30",
            "1000000000000000000000000000000",
            "9007199254740993",
            "",
        ] {
            let refused = ask(nonsense).await;
            assert_eq!(
                refused.status, 429,
                "{algorithm}: {nonsense:?} counts as the maximum"
            );
            assert!(
                refused.header("retry-after").is_some(),
                "{algorithm}: the maximum can be admitted later"
            );
        }
        let twice = proxy
            .request("GET", &format!("/most/{algorithm}"))
            .header("x-cost", "1")
            .header("x-cost", "1");
        assert_eq!(twice.send_for_status().await, 429, "{algorithm}: repeated");
        let answer = left("1").await;
        assert_eq!(answer, Some(1), "{algorithm}: an invalid cost was charged");
        proxy
            .expect_status(
                &format!("/most/{algorithm}"),
                200,
                &format!("{algorithm}: an absent cost is 1"),
            )
            .await;
        assert_eq!(ask("1").await.status, 429, "{algorithm}");
    }
}

#[tokio::test]
async fn extreme_limits_are_defined_in_memory() {
    assert_extremes_are_defined(&Proxy::with_echo(&extreme_policies()).await).await;
}

/// Redis expires keys at whole milliseconds. A period of 1 ms must neither be cut short nor leave
/// keys behind.
#[tokio::test]
async fn extreme_limits_are_defined_in_redis() {
    let server = RedisServer::start();
    let store = format!(
        "[store]\nkind = 'redis'\nredis.url = 'redis://127.0.0.1:{}/0'\nredis.timeout = '5s'\nredis.key_prefix = 'x'\n",
        server.port()
    );
    let proxy = Proxy::with_echo(&(store + &extreme_policies())).await;
    assert_extremes_are_defined(&proxy).await;
    let left = eventually(
        "the counters with a period of 1 ms to expire",
        TEST_TIMEOUT,
        async || {
            let left: Vec<String> = list_counter_keys(&server).await;
            left.iter()
                .all(|key| !key.contains(":short-"))
                .then_some(left)
        },
    )
    .await;
    assert!(
        left.iter()
            .any(|key| key.contains("sliding_log:34560000000000:long-")),
        "{left:?}"
    );
}
