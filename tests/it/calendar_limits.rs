//! Limits per day, week and month of a time zone, end to end and in the script of Redis.

use crate::redis_store::{
    CLOCK, SCRIPT, StateModel, calendar_day, decide_in_redis, make_charge, make_key, run_script,
};
use crate::support::prelude::*;
use tidegate::limiter::{Calendar, CalendarUnit};
use tidegate::store::redis::DecisionBatch;

const HOUR_S: u64 = 3_600;
const DAY_S: u64 = 24 * HOUR_S;
const HOUR_US: u64 = HOUR_S * 1_000_000;
const DAY_US: u64 = 24 * HOUR_US;

/// A time zone in which the current day, and so week and month, has at least an hour left. It has
/// no daylight saving time.
pub(crate) fn zone_far_from_midnight() -> &'static str {
    if unix_s() % DAY_S < 22 * HOUR_S {
        "UTC"
    } else {
        "Asia/Kolkata"
    }
}

/// The current period: its length, and the seconds until its end.
fn current_period_s(unit: CalendarUnit, zone: &str) -> (u64, u64) {
    let now_us = unix_s() * 1_000_000;
    let period = Calendar::new(unit, zone).unwrap().period_at(now_us);
    (
        period.length_us() / 1_000_000,
        period.end_us / 1_000_000 - unix_s(),
    )
}

fn config_text(store: &str, zone: &str) -> String {
    format!(
        r#"{store}
[[policy]]
name = "plan"
match = {{ path = "/plan" }}
key = ["header:x-user-id"]
limits = [
  {{ requests = 3, per = "month", tz = "{zone}", algorithm = "fixed_window" }},
  {{ requests = 100, per = "day", tz = "{zone}", algorithm = "fixed_window", name = "daily" }},
]

[[policy]]
name = "day"
match = {{ path = "/day" }}
limit = {{ requests = 2, per = "day", tz = "{zone}", algorithm = "fixed_window" }}
on_store_failure = "closed"

[[policy]]
name = "week"
match = {{ path = "/week" }}
limit = {{ requests = 2, per = "week", tz = "{zone}", algorithm = "fixed_window" }}
on_store_failure = "closed"

[[policy]]
name = "hour"
match = {{ path = "/hour" }}
limit = {{ requests = 100, per = "1h" }}
on_store_failure = "closed"
"#
    )
}

async fn get(proxy: &Proxy, path: &str) -> RawResponse {
    let request = proxy.request("GET", path).header("x-user-id", "ann");
    request.send().await
}

/// Asserts that a value is as expected, or less by the seconds that the test took since.
fn assert_about(value: u64, expected: u64) {
    let range = expected.saturating_sub(60)..=expected + 1;
    assert!(range.contains(&value), "{value} instead of {expected}");
}

#[tokio::test]
async fn a_month_is_counted_for_all_proxies_and_reported_with_its_length() {
    let (zone, server) = (zone_far_from_midnight(), RedisServer::start());
    let config = config_text(&server.store_config(), zone);
    let one = Proxy::with_echo(&config).await;
    let other = Proxy::start(&config, one.echo().address).await;
    for (proxy, remaining) in [(&one, 2), (&other, 1), (&one, 0)] {
        let response = get(proxy, "/plan").await;
        assert_eq!(response.status, 200);
        let parameter = |field, item, name| response.list_parameter(field, item, name);
        assert_eq!(parameter("ratelimit", "plan", "r"), Some(remaining));
        let (month_s, left_s) = current_period_s(CalendarUnit::Month, zone);
        assert_eq!(parameter("ratelimit-policy", "plan", "q"), Some(3));
        assert_eq!(parameter("ratelimit-policy", "plan", "w"), Some(month_s));
        assert_eq!(parameter("ratelimit-policy", "daily", "w"), Some(DAY_S));
        assert_about(parameter("ratelimit", "plan", "t").unwrap(), left_s);
        let (_, day_left_s) = current_period_s(CalendarUnit::Day, zone);
        assert_about(parameter("ratelimit", "daily", "t").unwrap(), day_left_s);
    }
    let refused = get(&other, "/plan").await;
    assert_eq!(refused.status, 429);
    let (_, left_s) = current_period_s(CalendarUnit::Month, zone);
    for field in ["retry-after", "x-ratelimit-reset"] {
        assert_about(refused.header(field).unwrap().parse().unwrap(), left_s);
    }

    let keys = list_counter_keys(&server).await;
    let month = format!("}}:fixed_window:month+{zone}:plan/ann");
    let key = keys.iter().find(|key| key.ends_with(&month));
    let key = key.unwrap_or_else(|| panic!("{keys:?}"));
    let expires_at_s: u64 = server.command(&format!("EXPIRETIME {key}")).await;
    assert_about(expires_at_s - unix_s(), left_s);
}

/// The clock of Redis decides, not that of the proxy.
#[tokio::test]
async fn the_clock_of_redis_decides_the_day() {
    let (zone, server) = (zone_far_from_midnight(), RedisServer::start_with_clock());
    let proxy = Proxy::echo_connected(&config_text(&server.store_config(), zone)).await;
    let statuses = async |path: &'static str| {
        // Workers cache refusals for up to one second.
        sleep(Duration::from_millis(1_050)).await;
        let mut statuses = Vec::new();
        for _ in 0..3 {
            statuses.push(get(&proxy, path).await.status);
        }
        statuses
    };
    assert_eq!(statuses("/day").await, [200, 200, 429]);
    let (_, left_s) = current_period_s(CalendarUnit::Day, zone);
    server.set_clock_offset(left_s - 300);
    assert_eq!(statuses("/day").await, [429, 429, 429], "before midnight");
    server.set_clock_offset(left_s + 60);
    assert_eq!(statuses("/day").await, [200, 200, 429], "after midnight");
    let refused = get(&proxy, "/day").await;
    assert_about(refused.retry_after_s(), DAY_S - 60);
    // The counter proves that the next day began, so the day before does not come back.
    server.set_clock_offset(0);
    assert_eq!(statuses("/day").await, [429, 429, 429], "right again");

    // In none of the weeks that the proxy names.
    server.set_clock_offset(30 * DAY_S);
    assert_eq!(statuses("/week").await, [503, 503, 503]);
    assert_eq!(statuses("/hour").await, [200, 200, 200], "Redis works");
    let errors = "tidegate_store_errors_total{kind=\"period\"}";
    assert!(proxy.read_metric(errors).await >= 1.0);
    server.set_clock_offset(0);
    assert_eq!(statuses("/week").await, [200, 200, 429], "right again");
}

/// Decides by a batch whose boundaries come from a proxy with another clock.
async fn decide_apart(
    connection: &mut redis::aio::MultiplexedConnection,
    charge: &PolicyCharges<'_>,
    (proxy_us, redis_us): (u64, u64),
) -> Result<Decision, String> {
    CLOCK.1.set_us(proxy_us);
    let mut batch = DecisionBatch::default();
    // Two identical requests become one that is repeated.
    for _ in 0..2 {
        assert_eq!(
            batch.add_or_merge_request(&SCRIPT, std::slice::from_ref(charge)),
            0
        );
    }
    let command = batch.build_command(&SCRIPT, &[1], Some(redis_us));
    let reply = match connection.send_packed_command(&command).await {
        Ok(redis::Value::ServerError(error)) if error.code() == "NOSCRIPT" => {
            run_script(connection, &command).await
        }
        Ok(redis::Value::ServerError(error)) => return Err(error.code().to_owned()),
        reply => reply.unwrap(),
    };
    let answers = DecisionBatch::parse_reply(reply, &[1]).unwrap();
    answers[0]
        .parse_decision(std::slice::from_ref(charge))
        .map_err(|error| error.into_str().to_owned())
}

#[tokio::test]
async fn near_midnight_both_clocks_may_be_on_different_days() {
    let server = RedisServer::start();
    let mut connection = server.connection().await;
    let limit = calendar_day(1_000);
    let midnight_us = limit.window_at(START_US).end_us;
    for (n, (proxy_us, redis_us, day_start_us)) in [
        (midnight_us - 1, midnight_us - 1, midnight_us - DAY_US),
        (midnight_us - 1, midnight_us, midnight_us),
        (midnight_us, midnight_us - 1, midnight_us - DAY_US),
        (midnight_us, midnight_us, midnight_us),
        (midnight_us - DAY_US, midnight_us + DAY_US - 1, midnight_us),
        (
            midnight_us + DAY_US - 1,
            midnight_us - DAY_US,
            midnight_us - DAY_US,
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let key = make_key(&format!("n{n}"));
        let charge = make_charge(&limit, &key, 1);
        let clocks = (proxy_us, redis_us);
        for remaining in [999, 998] {
            let decision = decide_apart(&mut connection, &charge, clocks)
                .await
                .unwrap();
            let status = decision.statuses().next().unwrap();
            let expected = (remaining, Some(day_start_us + DAY_US));
            assert_eq!(
                (status.remaining, status.next_growth_us),
                expected,
                "case {n}"
            );
        }
    }
    let key = make_key("outside");
    let charge = make_charge(&limit, &key, 1);
    for (proxy_us, redis_us) in [
        (midnight_us - 1, midnight_us + DAY_US),
        (midnight_us, midnight_us - DAY_US - 1),
    ] {
        let outside = decide_apart(&mut connection, &charge, (proxy_us, redis_us)).await;
        assert_eq!(outside.err().as_deref(), Some("PERIOD"));
    }
    assert!(
        list_counter_keys(&server)
            .await
            .iter()
            .all(|key| !key.contains("outside"))
    );
}

/// Another instance, with other time zone data, began a day that ends an hour later.
#[tokio::test]
async fn a_day_that_another_instance_began_lasts_until_its_end() {
    let server = RedisServer::start();
    let mut connection = server.connection().await;
    let (limit, key) = (calendar_day(5), make_key("k"));
    let charge = make_charge(&limit, &key, 1);
    let name = SCRIPT.counter_key(first_counter(&charge));
    let day = limit.window_at(START_US);
    let (other_start_us, other_end_us) = (day.start_us + HOUR_US, day.end_us + HOUR_US);
    let value = format!("{other_start_us}:4:{other_end_us}");
    let () = redis::cmd("SET")
        .arg(&name)
        .arg(&value)
        .query_async(&mut connection)
        .await
        .unwrap();
    let mut status_at = async |at_us: u64| {
        let decision = decide_in_redis(&mut connection, std::slice::from_ref(&charge), at_us).await;
        let status = decision.statuses().next().unwrap();
        (decision.admitted, status.remaining, status.next_growth_us)
    };
    // Time is at least the start of the stored day.
    assert_eq!(status_at(day.start_us).await, (true, 0, Some(other_end_us)));
    // The own calendar has a new day, which the stored day still covers.
    let refused = (false, 0, Some(other_end_us));
    assert_eq!(status_at(day.end_us).await, refused);
    assert_eq!(status_at(other_end_us - 1).await, refused);
    // The next day begins where the stored day ends.
    let next_end_us = limit.window_at(day.end_us).end_us;
    assert_eq!(status_at(other_end_us).await, (true, 4, Some(next_end_us)));
    let stored: String = redis::cmd("GET")
        .arg(&name)
        .query_async(&mut server.connection().await)
        .await
        .unwrap();
    assert_eq!(stored, format!("{other_end_us}:1:{next_end_us}"));

    // A foreign value is recognized.
    for foreign in ["5:1", "9:1:5", "a:b:c", "1:1:9007199254740994"] {
        let () = redis::cmd("SET")
            .arg(&name)
            .arg(foreign)
            .query_async(&mut server.connection().await)
            .await
            .unwrap();
        let mut other = server.connection().await;
        let error = other
            .send_packed_command(
                &SCRIPT.decide_command(std::slice::from_ref(&charge), Some(day.start_us)),
            )
            .await;
        let is_foreign =
            matches!(&error, Ok(redis::Value::ServerError(error)) if error.code() == "FOREIGN");
        assert!(is_foreign, "{foreign}: {error:?}");
    }
}

/// Settlements: of a day that has ended, and of times before all named days.
#[tokio::test]
async fn settlements_find_the_day_of_their_charge() {
    let server = RedisServer::start();
    let mut connection = server.connection().await;
    let (limit, key, mut model) = (calendar_day(10), make_key("k"), StateModel::default());
    let charge = make_charge(&limit, &key, 4);
    let midnight_us = limit.window_at(START_US).end_us;
    let backdated = |age_us| Amendment::BackdatedCharge { units: 1, age_us };
    let credit = |at_us| Amendment::Credit { units: 1, at_us };
    for (at_us, amendment) in [
        (midnight_us - 2, credit(midnight_us - 2)),
        (midnight_us - 1, backdated(HOUR_US)),
        (midnight_us, credit(midnight_us - 1)),
        (midnight_us + 1, credit(midnight_us)),
        (midnight_us + 2, Amendment::Charge(1)),
        (midnight_us + 3, backdated(3 * HOUR_US)),
        (midnight_us + 2 * DAY_US, backdated(30 * HOUR_US)),
        (midnight_us + 2 * DAY_US, backdated(80 * HOUR_US)),
    ] {
        let expected = model.decide(std::slice::from_ref(&charge), at_us);
        assert_eq!(
            decide_in_redis(&mut connection, std::slice::from_ref(&charge), at_us).await,
            expected
        );
        let settlements = [Settlement {
            limit: &limit,
            key: &key,
            amendment,
        }];
        model.apply_settlements(&settlements, at_us);
        let command = SCRIPT.settle_command(&settlements, Some(at_us));
        let answer = run_script(&mut connection, &command).await;
        assert_eq!(answer, redis::Value::Int(1));
        let look = [make_charge(&limit, &key, 0)];
        let answer = decide_in_redis(&mut connection, &look, at_us).await;
        assert_eq!(answer, model.decide(&look, at_us), "{amendment:?}");
    }
}

/// In the memory store, in `explain` and `keys`, and for Envoy's service: one period, one name.
#[tokio::test]
async fn the_commands_name_unit_and_time_zone() {
    let (zone, server) = (zone_far_from_midnight(), RedisServer::start());
    let (dir, upstream) = (TempDir::new().unwrap(), Upstream::echo().await);
    let path = dir.path().join("config.toml");
    let config = config_text(&server.store_config(), zone);
    let proxy = Proxy::start(&config, upstream.address).await;
    assert_eq!(get(&proxy, "/plan").await.status, 200);
    let text = format!(
        "{config}\n[upstream]\nurl = 'http://{}'\n",
        upstream.address
    );
    fs::write(&path, text).unwrap();
    let run = async |words: &[&str]| {
        let mut command = tidegate_command();
        command.args(words).arg("--config").arg(&path);
        let ended = run_command(&mut command).await;
        assert!(ended.status.success(), "{words:?}: {}", ended.stderr);
        ended.stdout
    };
    let limit = format!("3 per month {zone}, fixed_window");
    let explained = run(&["explain", "GET", "/plan", "-H", "x-user-id: ann"]).await;
    assert!(explained.contains(&limit), "{explained}");
    let shown = run(&["keys", "show", "plan", "ann"]).await;
    assert!(shown.contains(&limit), "{shown}");
    assert!(shown.contains("2 left"), "{shown}");
    let listed = run(&["keys", "list", "--policy", "plan"]).await;
    let counter = format!("fixed_window per month {zone}");
    assert!(listed.contains(&counter), "{listed}");
    let reset = run(&["keys", "reset", "plan", "ann"]).await;
    assert!(reset.contains("reset 2 limits"), "{reset}");
    let keys = list_counter_keys(&server).await;
    assert!(
        keys.iter().all(|key| !key.ends_with("plan/ann")),
        "{keys:?}"
    );
}

/// The months of Berlin, in the time of the log: the second began on 2026-01-31 at 23:00 UTC.
#[tokio::test]
async fn replay_counts_in_the_months_of_the_log() {
    let dir = TempDir::new().unwrap();
    let config = r#"
[upstream]
url = "http://127.0.0.1:1"
[[policy]]
name = "plan"
limit = { requests = 2, per = "month", tz = "Europe/Berlin", algorithm = "fixed_window" }
"#;
    fs::write(dir.path().join("config.toml"), config).unwrap();
    let times = [
        "01/Jan/2026:00:00:00 +0100",
        "31/Jan/2026:22:00:00 +0000",
        "31/Jan/2026:22:59:59 +0000",
        "31/Jan/2026:23:00:00 +0000",
        "01/Feb/2026:00:00:01 +0100",
        "28/Feb/2026:22:59:59 +0000",
        "01/Mar/2026:00:00:00 +0100",
    ];
    let lines = times.map(|time| format!("10.0.0.1 - - [{time}] \"GET / HTTP/1.1\" 200 5\n"));
    fs::write(dir.path().join("access.log"), lines.concat()).unwrap();
    let mut command = tidegate_command();
    command.current_dir(dir.path());
    command.args(["replay", "--json", "access.log"]);
    let ended = run_command(&mut command).await;
    assert!(ended.status.success(), "{}", ended.stderr);
    let report: Value = ended.json();
    let set = &report["sets"][0];
    assert_eq!(set["forwarded"].as_u64(), Some(5));
    assert_eq!(set["limited"].as_u64(), Some(2));
}
