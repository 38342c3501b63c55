use super::*;
use crate::config::{self, Config, ConfigSources, FileSource, FlagOverrides};
use serde_json::Value;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// A configuration and log files in a temporary directory.
struct ReplayFixture {
    config: Config,
    dir: TempDir,
    settings: Settings,
}

impl ReplayFixture {
    fn new(policies: &str) -> Self {
        let file = FileSource::Text {
            name: "test.toml".into(),
            text: policies.into(),
        };
        let flags = FlagOverrides {
            needs_no_upstream: true,
            ..FlagOverrides::default()
        };
        let config = config::load(&ConfigSources {
            file,
            env: Vec::new(),
            flags,
            skips_key_files: false,
        })
        .unwrap();
        let settings = Settings {
            logs: Vec::new(),
            format: None,
            field_mappings: Vec::new(),
            spread_within_second: true,
            suggest_percent: None,
            top_keys: 10,
        };
        Self {
            config,
            dir: TempDir::new().unwrap(),
            settings,
        }
    }

    fn with_log(mut self, name: &str, bytes: impl AsRef<[u8]>) -> Self {
        let path = self.dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        self.settings.logs.push(path);
        self
    }

    fn run_replay(&self) -> ReplayReport {
        replay_logs(
            &self.settings,
            &[("test.toml".to_owned(), &*self.config.policy_table)],
            |_, _| {},
        )
        .unwrap()
    }

    fn run_replay_as_json(&self) -> Value {
        serde_json::from_str(&self.run_replay().render_json()).unwrap()
    }
}

fn log_line(at_s: u64, client: &str, request: &str) -> String {
    format!(
        "{client} - - [18/Nov/2026:11:{:02}:{:02} +0000] \"{request} HTTP/1.1\" 200 5\n",
        at_s / 60,
        at_s % 60
    )
}

fn repeated_log_line(at_s: u64, client: &str, request: &str, count: usize) -> String {
    log_line(at_s, client, request).repeat(count)
}

const ONE_LIMIT: &str =
    "[[policy]]\nname = 'all'\nkey = ['client_ip']\nlimit = { requests = 3, per = '10s' }\n";

fn refused_request_count(json: &Value, policy: usize) -> u64 {
    let policy = &json["sets"][0]["policies"][policy];
    ["rejected", "blocked", "denied", "shadow_rejected"]
        .iter()
        .map(|word| policy[word].as_u64().unwrap())
        .sum()
}

#[test]
fn reports_the_limited_keys_and_when_they_were_refused() {
    let log = repeated_log_line(0, "1.1.1.1", "GET /", 5)
        + &repeated_log_line(5, "2.2.2.2", "GET /", 3)
        + &repeated_log_line(10, "1.1.1.1", "GET /", 3);
    let json = ReplayFixture::new(ONE_LIMIT)
        .with_log("a.log", log)
        .run_replay_as_json();
    // Two of the five requests in the first second are refused. Ten seconds later, the admitted
    // requests leave the window one by one, so none is refused.
    assert_eq!(refused_request_count(&json, 0), 2, "{json:#}");
    let top = &json["sets"][0]["top"][0];
    assert_eq!(
        (&top["key"], &top["refused"], &top["requests"]),
        (&"1.1.1.1".into(), &2.into(), &8.into())
    );
    assert_eq!(top["first"], 1_794_999_600.6);
    assert_eq!(json["sets"][0]["policies"][0]["keys"], 2);
    assert_eq!(json["sets"][0]["policies"][0]["keys_touched"], 1);
}

#[test]
fn merges_unordered_lines_and_files_into_one_log() {
    let in_order: String = (0..40)
        .map(|second| repeated_log_line(second, "1.1.1.1", "GET /", 1))
        .collect();
    let expected = refused_request_count(
        &ReplayFixture::new(ONE_LIMIT)
            .with_log("a", &in_order)
            .run_replay_as_json(),
        0,
    );
    let mut shuffled: Vec<&str> = in_order.lines().collect();
    shuffled.chunks_mut(5).for_each(<[_]>::reverse);
    let late = ReplayFixture::new(ONE_LIMIT)
        .with_log("a", shuffled.join("\n"))
        .run_replay_as_json();
    assert_eq!(
        (refused_request_count(&late, 0), &late["sets"][0]["late"]),
        (expected, &0.into())
    );
    let (first, second) = in_order.split_at(in_order.len() / 2);
    assert_eq!(
        refused_request_count(
            &ReplayFixture::new(ONE_LIMIT)
                .with_log("b", second)
                .with_log("a", first)
                .run_replay_as_json(),
            0
        ),
        expected
    );
    let evens = in_order.lines().step_by(2).collect::<Vec<_>>().join("\n");
    let odds = in_order
        .lines()
        .skip(1)
        .step_by(2)
        .collect::<Vec<_>>()
        .join("\n");
    assert_eq!(
        refused_request_count(
            &ReplayFixture::new(ONE_LIMIT)
                .with_log("a", odds)
                .with_log("b", evens)
                .run_replay_as_json(),
            0
        ),
        expected
    );
}

#[test]
fn counts_and_reports_requests_that_are_far_out_of_order() {
    let mut log: String = (0..50)
        .map(|second| repeated_log_line(second, "1.1.1.1", "GET /", 200))
        .collect();
    log += &repeated_log_line(3, "2.2.2.2", "GET /", 4);
    let fixture = ReplayFixture::new(ONE_LIMIT).with_log("a", log);
    assert_eq!(fixture.run_replay_as_json()["sets"][0]["late"], 4);
    assert!(
        fixture
            .run_replay()
            .render_text(80, false)
            .contains("4 requests more than 10 s out of order")
    );
}

#[test]
fn applies_every_policy_action_and_algorithm() {
    let fixture = ReplayFixture::new(
        "[[policy]]\nname = 'health'\nmatch = { path = '/health' }\naction = 'allow'\n\
         [[policy]]\nname = 'admin'\nmatch = { path = '/admin/**' }\naction = 'deny'\n\
         [[policy]]\nname = 'login'\nmatch = { path = '/login' }\nkey = ['client_ip']\n\
         limit = { requests = 2, per = '1s' }\nblock_for = '20s'\n\
         [[policy]]\nname = 'slow'\nmatch = { path = '/slow' }\n\
         limit = { requests = 2, per = '1s', algorithm = 'leaky_bucket', max_delay = '1s' }\n\
         [[policy]]\nname = 'try'\nmode = 'shadow'\nmatch = { path = '/try' }\nlimit = { requests = 1, per = '1h' }\n\
         [[policy]]\nname = 'vip'\nmatch = { path = '/vip' }\nkey = ['client_ip']\nlimit = { requests = 1, per = '1h' }\n\
         [[policy.override]]\nkey = ['9.9.9.9']\nlimit = { requests = 3, per = '1h' }\n",
    );
    let log = [
        repeated_log_line(0, "1.1.1.1", "GET /health", 4),
        repeated_log_line(0, "1.1.1.1", "GET /admin/x", 2),
        repeated_log_line(1, "1.1.1.1", "POST /login", 3),
        repeated_log_line(20, "1.1.1.1", "POST /login", 1),
        repeated_log_line(22, "1.1.1.1", "POST /login", 1),
        repeated_log_line(23, "1.1.1.1", "GET /slow", 4),
        repeated_log_line(24, "1.1.1.1", "GET /try", 3),
        repeated_log_line(25, "1.1.1.1", "GET /vip", 3),
        repeated_log_line(26, "9.9.9.9", "GET /vip", 4),
        repeated_log_line(27, "9.9.9.9", "GET /%00", 1),
    ];
    let json = fixture.with_log("a", log.concat()).run_replay_as_json();
    let policies = &json["sets"][0]["policies"];
    let count = |at: usize, word: &str| policies[at][word].as_u64().unwrap();
    assert_eq!((count(0, "exempt"), count(1, "denied")), (4, 2));
    assert_eq!(
        (
            count(2, "allowed"),
            count(2, "rejected"),
            count(2, "blocked")
        ),
        (3, 1, 1)
    );
    assert_eq!(
        (
            count(3, "allowed"),
            count(3, "delayed"),
            count(3, "rejected")
        ),
        (1, 3, 0)
    );
    assert_eq!((count(4, "allowed"), count(4, "shadow_rejected")), (1, 2));
    assert_eq!((count(5, "allowed"), count(5, "rejected")), (4, 3));
    let set = &json["sets"][0];
    assert_eq!(
        (&set["denied"], &set["malformed"], &set["delayed"]),
        (&2.into(), &1.into(), &3.into())
    );
    assert_eq!(set["limited"], 2 + 3);
}

#[test]
fn simulates_concurrency_limits_from_request_durations() {
    let policies = "[[policy]]\nname = 'p'\nlimit = { requests = 2, algorithm = 'concurrency' }\n";
    let line = |at_s: u64, took_s: u64| {
        format!(
            "{{\"ts\":{},\"duration\":{took_s},\"status\":200,\"request\":{{\"remote_ip\":\"1.1.1.1\",\"method\":\"GET\",\"uri\":\"/\"}}}}\n",
            at_s + took_s
        )
    };
    // Two requests last a minute, longer than a slot without renewal. A third request arrives while
    // both run, and a fourth one after their end.
    let json = ReplayFixture::new(policies)
        .with_log(
            "a",
            [
                line(1_795_000_000, 60),
                line(1_795_000_000, 60),
                line(1_795_000_055, 1),
                line(1_795_000_060, 1),
            ]
            .concat(),
        )
        .run_replay_as_json();
    assert_eq!(
        (refused_request_count(&json, 0), &json["sets"][0]["late"]),
        (1, &0.into()),
        "{json:#}"
    );
    let without =
        ReplayFixture::new(policies).with_log("a", repeated_log_line(0, "1.1.1.1", "GET /", 9));
    assert_eq!(refused_request_count(&without.run_replay_as_json(), 0), 0);
    assert!(
        without.run_replay_as_json()["sets"][0]["lacks"][0]
            .as_str()
            .unwrap()
            .contains("no duration")
    );
}

#[test]
fn warns_about_fields_missing_from_the_log() {
    let fixture = ReplayFixture::new(
        "[client]\ntrusted_proxies = ['10.0.0.0/8']\n\
         [[policy]]\nname = 'users'\nkey = ['header:x-user-id', 'client_ip']\nlimit = { requests = 1, per = '1h' }\n\
         [[policy]]\nname = 'host'\nmatch = { hosts = ['a.example'], headers = { x-beta = '1' } }\nkey = ['client_ip']\n\
         cost = { header = 'x-cost', default = 2 }\nlimit = { requests = 9, per = '1h' }\n",
    )
    .with_log("a", repeated_log_line(0, "10.0.0.1", "GET /", 2));
    let text = fixture
        .run_replay()
        .render_text(80, false)
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ");
    for sentence in [
        "policy users: left out of the result, because header x-user-id of its key is not in the log; --header-from x-user-id=FIELD",
        "policy host: fields are missing from the log: its conditions on header x-beta, the host were evaluated as if",
        "every request cost 2, because x-cost is missing",
        "2 of 2 requests came from a trusted proxy",
        "--header-from x-forwarded-for=FIELD",
    ] {
        assert!(text.contains(sentence), "{sentence}\n{text}");
    }
}

#[test]
fn counts_and_escapes_broken_lines() {
    let hostile = "\u{1b}[2J\u{202e}<script>alert(1)</script>";
    let mut log = repeated_log_line(0, "1.1.1.1", "GET /", 5).into_bytes();
    log.extend(format!("{hostile}\r\n\r\n\n").as_bytes());
    log.extend(b"\xff\x00\x80\n");
    log.extend("x".repeat(1 << 20).as_bytes());
    log.extend(b"\n");
    log.extend(log_line(1, &format!("1.1.1.1 {hostile}"), "GET /<b>\u{1b}[31m").as_bytes());
    log.extend(
        repeated_log_line(2, "1.1.1.1", "GET /", 1)
            .trim_end()
            .as_bytes(),
    );
    let fixture = ReplayFixture::new(ONE_LIMIT).with_log("<i>.log", &log);
    let json = fixture.run_replay_as_json();
    assert_eq!(
        (
            &json["logs"][0]["broken"],
            &json["lines"],
            &json["requests"]
        ),
        (&3.into(), &10.into(), &7.into())
    );
    let report = fixture.run_replay();
    let (text, html) = (report.render_text(80, true), report.render_html());
    assert!(
        !text
            .replace("\u{1b}[1m", "")
            .replace("\u{1b}[0m", "")
            .contains(['\u{1b}', '\u{202e}']),
        "{text:?}"
    );
    assert!(text.contains("line 6: \\u{1b}[2J"), "{text}");
    assert!(
        !html.contains("<script") && !html.contains("<i>.log") && html.contains("&lt;script&gt;"),
        "{html}"
    );
    assert!(!html.contains(['\u{1b}', '\u{202e}']));
}

#[test]
fn decompresses_gzip_logs_and_reads_truncated_ones_to_the_break() {
    use std::io::Write;
    let mut packed = Vec::new();
    // Two gzip members, as in a log that was appended to.
    for half in 0..2 {
        let mut out = flate2::write::GzEncoder::new(&mut packed, flate2::Compression::fast());
        for second in 0..1000 {
            out.write_all(
                repeated_log_line(
                    half * 1000 + second,
                    &format!("1.1.{}.{}", second / 250, second % 250),
                    "GET /",
                    1,
                )
                .as_bytes(),
            )
            .unwrap();
        }
        out.finish().unwrap();
    }
    let whole = ReplayFixture::new(ONE_LIMIT)
        .with_log("a.gz", &packed)
        .run_replay_as_json();
    assert_eq!(
        (&whole["requests"], &whole["logs"][0]["fault"]),
        (&2000.into(), &Value::Null)
    );
    let cut = ReplayFixture::new(ONE_LIMIT).with_log("a.gz", &packed[..packed.len() * 3 / 4]);
    let (json, text) = (
        cut.run_replay_as_json(),
        cut.run_replay().render_text(80, false),
    );
    assert!(
        (1000..2000).contains(&json["requests"].as_u64().unwrap()),
        "{json:#}"
    );
    assert!(text.contains("the log ended early"), "{text}");
}

#[test]
fn compares_two_policy_sets_side_by_side() {
    let strict = ReplayFixture::new(ONE_LIMIT).with_log(
        "a",
        repeated_log_line(0, "1.1.1.1", "GET /", 5) + &repeated_log_line(1, "2.2.2.2", "GET /", 4),
    );
    let unmatched = "\n[[policy]]\nname = \"none\"\nmatch = { path = \"/none\" }\n\
                     limit = { requests = 1, per = \"1m\" }\n";
    let lax = ONE_LIMIT.replace("requests = 3", "requests = 4") + unmatched;
    let lax = ReplayFixture::new(&lax);
    let sets = [
        ("old".to_owned(), &*strict.config.policy_table),
        ("new".to_owned(), &*lax.config.policy_table),
    ];
    let report = replay_logs(&strict.settings, &sets, |_, _| {}).unwrap();
    let json: Value = serde_json::from_str(&report.render_json()).unwrap();
    assert_eq!(
        (
            &json["refused_by_first_only"],
            &json["refused_by_second_only"]
        ),
        (&2.into(), &0.into())
    );
    assert_eq!(
        (&json["sets"][0]["limited"], &json["sets"][1]["limited"]),
        (&3.into(), &1.into())
    );
    assert!(
        report.render_text(80, false).contains("SIDE BY SIDE")
            && report.render_html().contains("Side by side")
    );
    for page in [report.render_text(80, false), report.render_html()] {
        assert!(!page.contains("0 of 0"), "{page}");
    }
}

#[test]
fn a_suggested_limit_touches_as_many_keys_as_it_predicts() {
    let log: String = (1..=100)
        .map(|client| repeated_log_line(0, &format!("1.1.1.{client}"), "GET /", client))
        .collect();
    let mut fixture = ReplayFixture::new(ONE_LIMIT).with_log("a", &log);
    fixture.settings.suggest_percent = Some(5.0);
    let json = fixture.run_replay_as_json();
    let drawn = &json["sets"][0]["policies"][0]["suggested"][0]["drawn"];
    assert_eq!(
        (&drawn["requests"], &drawn["touched"], &drawn["touched_now"]),
        (&150.into(), &0.into(), &97.into())
    );
    assert_eq!(drawn["peak"], 95);
    assert_eq!(json["sets"][0]["policies"][0]["keys_touched"], 97);
    // A limit at the peak must affect as many keys as the percentage.
    let tried = ReplayFixture::new(&ONE_LIMIT.replace("requests = 3", "requests = 95"))
        .with_log("a", &log)
        .run_replay_as_json();
    assert_eq!(tried["sets"][0]["policies"][0]["keys_touched"], 5);
}

#[test]
fn thirty_keys_get_no_suggestion() {
    let log: String = (1..=30)
        .map(|client| repeated_log_line(0, &format!("1.1.1.{client}"), "GET /", 1))
        .collect();
    let mut fixture = ReplayFixture::new(ONE_LIMIT).with_log("a", &log);
    fixture.settings.suggest_percent = Some(1.0);
    let suggested = &fixture.run_replay_as_json()["sets"][0]["policies"][0]["suggested"][0];
    assert_eq!(suggested["drawn"], Value::Null);
    let reason = "the log has 30 keys, and at least 100 are needed";
    assert_eq!(suggested["reason"], reason);
    let report = fixture.run_replay();
    assert!(
        report.render_text(80, false).contains(reason) && report.render_html().contains(reason)
    );
}

#[test]
fn rejects_files_that_are_not_logs() {
    let fails = |fixture: ReplayFixture| {
        replay_logs(
            &fixture.settings,
            &[("t".to_owned(), &*fixture.config.policy_table)],
            |_, _| {},
        )
        .unwrap_err()
    };
    let unknown = fails(ReplayFixture::new(ONE_LIMIT).with_log("a", "hello\nworld\n"));
    assert!(
        unknown.contains("none of the first lines is a request"),
        "{unknown}"
    );
    let mut missing = ReplayFixture::new(ONE_LIMIT);
    missing
        .settings
        .logs
        .push(Path::new("/nowhere/\u{1b}[1m").into());
    assert!(fails(missing).contains("\\u{1b}"));
    assert!(
        fails(ReplayFixture::new(ONE_LIMIT).with_log("a", "")).contains("none of the first lines")
    );
    let mut without_requests = ReplayFixture::new(ONE_LIMIT).with_log("a", "hello\nworld\n");
    without_requests.settings.format = Some(AccessLogFormat::Combined);
    let error = fails(without_requests);
    assert!(
        error.contains("no request in 2 lines: 2 are not in the format, e.g. line 1: hello"),
        "{error}"
    );
    let mut unmatched =
        ReplayFixture::new(ONE_LIMIT).with_log("a", repeated_log_line(0, "1.1.1.1", "GET /", 2));
    unmatched.settings.field_mappings = vec![("x-user".to_owned(), "extra3".to_owned())];
    let error = fails(unmatched);
    assert!(
        error.contains("--header-from x-user=extra3: no request"),
        "{error}"
    );
}

const USER_AND_CLIENT: &str = "[[policy]]\nname = 'users'\nkey = ['header:x-user']\nlimit = { requests = 1, per = '1h' }\n\
     [[policy]]\nname = 'all'\nkey = ['client_ip']\nlimit = { requests = 4, per = '1h' }\n";

#[test]
fn a_policy_whose_key_is_not_in_the_log_stays_out_of_the_result() {
    let fixture = ReplayFixture::new(USER_AND_CLIENT)
        .with_log("a", repeated_log_line(0, "1.1.1.1", "GET /", 6));
    let set = &fixture.run_replay_as_json()["sets"][0];
    assert_eq!((&set["forwarded"], &set["limited"]), (&4.into(), &2.into()));
    let users = &set["policies"][0];
    assert_eq!(
        (&users["left_out"], &users["matched"]),
        (&true.into(), &0.into())
    );
    assert_eq!(set["policies"][1]["left_out"], false);
    let report = fixture.run_replay();
    let text = report.render_text(100, false);
    let at = |words: &str| {
        text.find(words)
            .unwrap_or_else(|| panic!("{words}: {text}"))
    };
    assert!(
        at("policy users: left out of the result") < at("4 forwarded"),
        "{text}"
    );
    assert!(text.contains("Without users."), "{text}");
    let html = report.render_html();
    assert!(html.find("left out of the result").unwrap() < html.find("forwarded").unwrap());
}

#[test]
fn a_policy_applies_to_requests_before_the_first_with_its_key() {
    let line = |user: &str| {
        format!(
            "{{\"msec\":1795000000.5,\"request_method\":\"GET\",\"request_uri\":\"/\",\"remote_addr\":\"1.1.1.1\",\"http_x_user\":\"{user}\"}}\n"
        )
    };
    // The third request is the first one with a user. All requests without one share a key.
    let log: String = ["-", "-", "ann", "ann", "-", "-"].map(line).concat();
    let set = &ReplayFixture::new(&USER_AND_CLIENT.replace("requests = 4", "requests = 40"))
        .with_log("a", log)
        .run_replay_as_json()["sets"][0];
    assert_eq!((&set["forwarded"], &set["limited"]), (&2.into(), &4.into()));
    assert_eq!(set["policies"][0]["left_out"], false);
    assert_eq!(set["lacks"], serde_json::json!([]));
}

/// The field of the key is first logged in the middle of the log, as that of a user who logs in.
#[test]
fn a_policy_is_judged_before_the_first_request_with_its_field() {
    let line = |at_s: u64, user: &str| {
        format!(
            "1.1.1.1 - - [18/Nov/2026:11:00:{at_s:02} +0000] \"GET / HTTP/1.1\" 200 5 \"-\" \"-\" \"{user}\"\n"
        )
    };
    let lines: Vec<String> = (0..6)
        .map(|at_s| line(at_s, if at_s < 4 { "-" } else { "ann" }))
        .collect();
    let policies = "[[policy]]\nname = 'users'\nkey = ['header:x-user']\nlimit = { requests = 1, per = '1h' }\n";
    let mapping = vec![("x-user".to_owned(), "extra1".to_owned())];
    let mut one_log = ReplayFixture::new(policies).with_log("a", lines.concat());
    one_log.settings.field_mappings = mapping.clone();
    let mut two_logs = ReplayFixture::new(policies)
        .with_log("a", lines[..4].concat())
        .with_log("b", lines[4..].concat());
    two_logs.settings.field_mappings = mapping;
    for fixture in [one_log, two_logs] {
        let set = &fixture.run_replay_as_json()["sets"][0];
        // One request without a user, and one of ann.
        assert_eq!(
            (&set["forwarded"], &set["limited"]),
            (&2.into(), &4.into()),
            "{set:#}"
        );
    }
    // A JSON log names the header itself.
    let json = |at_s: u64, user: &str| {
        format!(
            "{{\"time\": \"2026-11-18T11:00:{at_s:02}Z\", \"remote_addr\": \"1.1.1.1\", \"request\": \"GET / HTTP/1.1\", \
             \"status\": 200{user}}}\n"
        )
    };
    let user = ", \"http_x_user\": \"ann\"";
    let lines: Vec<String> = (0..6)
        .map(|at_s| json(at_s, if at_s < 4 { "" } else { user }))
        .collect();
    let set = &ReplayFixture::new(policies)
        .with_log("a", lines.concat())
        .run_replay_as_json()["sets"][0];
    assert_eq!(
        (&set["forwarded"], &set["limited"]),
        (&2.into(), &4.into()),
        "{set:#}"
    );
}

/// Log-ins of one client, one a second, with these statuses.
fn login_log(statuses: &[u16]) -> String {
    let lines = statuses.iter().zip(0..);
    lines
        .map(|(status, at_s)| {
            log_line(at_s, "1.1.1.1", "POST /login").replace(" 200 ", &format!(" {status} "))
        })
        .collect()
}

/// The access log contains by default only what was rejected.
#[test]
fn a_log_without_admitted_requests_is_a_caveat() {
    let policy =
        "[[policy]]\nname = 'login'\nkey = ['client_ip']\nlimit = { requests = 9, per = '1h' }\n";
    for (statuses, is_caveat) in [
        (&[429, 403, 503, 400][..], true),
        (&[429, 403, 200], false),
        (&[200], false),
    ] {
        let fixture = ReplayFixture::new(policy).with_log("a", login_log(statuses));
        let report = fixture.run_replay().render_text(100, false);
        let caveat = "no request in the log succeeded: a log of rejections";
        let words: Vec<_> = report.split_whitespace().collect();
        assert_eq!(words.join(" ").contains(caveat), is_caveat, "{report}");
    }
}

#[test]
fn the_logged_status_decides_what_counts_and_what_blocks() {
    let policy = |limit: &str| {
        format!(
            "[[policy]]\nname = 'login'\nkey = ['client_ip']\ncount_when = {{ status = [401, 403] }}\n{limit}\n"
        )
    };
    let mixed = [200, 200, 200, 200, 401, 200, 403, 200, 401, 200, 401];
    for (limit, statuses, refused) in [
        // Three of the failures fill the limit; everything after them is refused.
        ("limit = { requests = 3, per = '1h' }", &mixed[..], 2),
        ("limit = { requests = 9, per = '1h' }", &mixed, 0),
        ("limit = { requests = 3, per = '1h' }", &[200; 20], 0),
        ("limit = { requests = 3, per = '1h' }", &[401; 5], 2),
        // The cost of those that count.
        ("limit = { requests = 6, per = '1h' }\ncost = 2", &mixed, 2),
        // The limit has ended when the last request comes, and the block has not.
        (
            "limit = { requests = 1, per = '2s' }\nblock_for = '1h'",
            &[401, 200, 200, 200, 200, 200],
            5,
        ),
        (
            "limit = { requests = 1, per = '2s' }\nblock_for = '1h'",
            &[200, 200, 200, 200, 401, 500],
            1,
        ),
        (
            "limit = { requests = 1, per = '2s' }\nblock_for = '1h'",
            &[200; 6],
            0,
        ),
    ] {
        let fixture = ReplayFixture::new(&policy(limit)).with_log("a", login_log(statuses));
        let set = &fixture.run_replay_as_json()["sets"][0];
        assert_eq!(set["limited"], refused, "{limit} {statuses:?}: {set:#}");
        assert_eq!(set["lacks"], serde_json::json!([]), "{limit}");
    }
    // Without a status, each request counts, and the report says so.
    let line = "{\"msec\":1795000000.5,\"request_method\":\"GET\",\"request_uri\":\"/\",\"remote_addr\":\"1.1.1.1\"}\n";
    let fixture = ReplayFixture::new(&policy("limit = { requests = 3, per = '1h' }"));
    let set = &fixture.with_log("a", line.repeat(5)).run_replay_as_json()["sets"][0];
    assert_eq!(set["limited"], 2, "{set:#}");
    let lacks = set["lacks"][0].as_str().unwrap();
    assert!(
        lacks.contains(
            "5 of 5 requests have no status, so each counted as if it had one of 401, 403"
        ),
        "{lacks}"
    );
}

/// A response counts when it has been given, not when its request arrives.
#[test]
fn a_status_counts_at_the_end_of_its_request() {
    let line = |at_s: u64, status: u16| {
        format!(
            "{{\"ts\":{},\"duration\":30,\"status\":{status},\"request\":{{\"remote_ip\":\"1.1.1.1\",\"method\":\"GET\",\"uri\":\"/\"}}}}\n",
            1_795_000_030 + at_s
        )
    };
    let policy = "[[policy]]\nname = 'p'\nkey = ['client_ip']\ncount_when = { status = [401] }\nlimit = { requests = 2, per = '1h' }\n";
    // Two requests in flight reserve the limit, so the third is refused; the fourth comes later.
    let log = [line(0, 200), line(1, 200), line(2, 200), line(40, 200)].concat();
    let set = &ReplayFixture::new(policy)
        .with_log("a", log)
        .run_replay_as_json()["sets"][0];
    assert_eq!((&set["forwarded"], &set["limited"]), (&3.into(), &1.into()));
}

const TOKEN_LIMIT: &str = "[[policy]]\nname = 'tokens'\nkey = ['KEY']\nlimit = { requests = 2000, per = '1h' }\n\
     [policy.cost]\nestimate = { request_json = '/max_tokens', default = 90, max = 200 }\n\
     actual = [{ response_json = '/usage/prompt_tokens', weights = { by = 'body:/model', 'big*' = 2, default = 1 } }, \
     { response_json = ['/usage/completion_tokens', '/usage/output_tokens'], weight = 1.5 }]\n";

/// A call of a model API. Numbers of 0 are not in the log.
#[derive(Clone, Copy, Debug)]
struct ModelCall {
    model: &'static str,
    max_tokens: u64,
    prompt_tokens: u64,
    output_tokens: u64,
}

impl ModelCall {
    fn to_json_line(self, at_s: usize) -> String {
        let mut line = serde_json::json!({
            "msec": 1_795_000_000.5 + at_s as f64, "request_time": 0.2, "request": "POST / HTTP/1.1",
            "remote_addr": "1.1.1.1", "status": 200, "llm": { "model": self.model }, "usage": {},
        });
        if self.model.is_empty() {
            line["llm"]["model"] = Value::Null;
        }
        if self.max_tokens > 0 {
            line["llm"]["max_tokens"] = self.max_tokens.into();
        }
        if self.prompt_tokens > 0 {
            line["usage"]["in"] = self.prompt_tokens.into();
        }
        if self.output_tokens > 0 {
            line["usage"]["out"] = self.output_tokens.into();
        }
        format!("{line}\n")
    }

    /// nginx's combined format with four more fields.
    fn to_text_line(self, at_s: usize) -> String {
        let field = |number: u64| match number {
            0 => "-".to_owned(),
            number => number.to_string(),
        };
        let numbers = [self.max_tokens, self.prompt_tokens, self.output_tokens].map(field);
        let line = log_line(at_s as u64, "1.1.1.1", "POST /");
        format!(
            "{} \"-\" \"-\" \"{}\" {}\n",
            line.trim_end(),
            self.model,
            numbers.join(" ")
        )
    }
}

fn model_calls() -> Vec<ModelCall> {
    let mut random = fastrand::Rng::with_seed(35);
    let mut number = |highest: u64| {
        if random.u8(..5) == 0 {
            0
        } else {
            random.u64(1..highest)
        }
    };
    let mut calls = Vec::new();
    for index in 0..120 {
        calls.push(ModelCall {
            model: ["big-1", "small", "big-2", ""][index * index % 7 % 4],
            max_tokens: number(300),
            prompt_tokens: number(60),
            output_tokens: number(150),
        });
    }
    calls
}

/// The calls that the limit rejects, computed without a limiter: each is settled before the next.
fn rejected_calls(calls: &[ModelCall], key_of: impl Fn(&ModelCall) -> &'static str) -> u64 {
    let mut used = std::collections::HashMap::new();
    let mut rejected = 0;
    for call in calls {
        let used: &mut u64 = used.entry(key_of(call)).or_default();
        let estimate = match call.max_tokens {
            0 => 90,
            tokens => tokens.min(200),
        };
        if *used + estimate > 2000 {
            rejected += 1;
            continue;
        }
        let weight = if call.model.starts_with("big") { 2 } else { 1 };
        *used += match (call.prompt_tokens, call.output_tokens) {
            (0, 0) => estimate,
            (prompt, output) => (prompt * weight * 2 + output * 3).div_ceil(2),
        };
    }
    rejected
}

fn token_fixture(key: &str, mappings: &[(&str, &str)]) -> ReplayFixture {
    let mut fixture = ReplayFixture::new(&TOKEN_LIMIT.replace("KEY", key));
    let mappings = mappings.iter();
    let mappings = mappings.map(|(source, field)| ((*source).to_owned(), (*field).to_owned()));
    fixture.settings.field_mappings = mappings.collect();
    fixture
}

const TOKEN_FIELDS: [(&str, &str); 4] = [
    ("body:/model", "llm.model"),
    ("body:/max_tokens", "llm.max_tokens"),
    ("response_json:/usage/prompt_tokens", "usage.in"),
    ("response_json:/usage/output_tokens", "usage.out"),
];

#[test]
fn mapped_fields_are_bodies_and_reported_costs() {
    let calls = model_calls();
    let lines = calls.iter().enumerate();
    let json_log: String = lines
        .clone()
        .map(|(at, call)| call.to_json_line(at))
        .collect();
    let text_log: String = lines.map(|(at, call)| call.to_text_line(at)).collect();
    let text_fields = TOKEN_FIELDS
        .iter()
        .zip(["extra1", "extra2", "extra3", "extra4"]);
    let text_fields: Vec<_> = text_fields
        .map(|((source, _), field)| (*source, field))
        .collect();
    for (log, fields) in [(&json_log, &TOKEN_FIELDS[..]), (&text_log, &text_fields)] {
        for (key, by_model) in [("body:/model", true), ("client_ip", false)] {
            let set = &token_fixture(key, fields)
                .with_log("a", log)
                .run_replay_as_json()["sets"][0];
            let expected = rejected_calls(&calls, |call| if by_model { call.model } else { "" });
            assert!(expected > 10, "{expected}");
            assert_eq!(set["policies"][0]["rejected"], expected, "{key}: {set:#}");
            assert_eq!(set["lacks"], serde_json::json!([]), "{key}");
        }
    }
}

#[test]
fn fields_that_are_not_mapped_are_named() {
    let log: String = (0..3)
        .map(|at| model_calls()[at].to_json_line(at))
        .collect();
    let lacks = |key: &str, fields: &[(&str, &str)]| {
        let json = token_fixture(key, fields)
            .with_log("a", &log)
            .run_replay_as_json();
        json["sets"][0]["lacks"][0]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    let suggestion = |source: &str| format!("; --field-from {source}=FIELD names the field");
    let left_out = lacks("body:/model", &[]);
    assert!(
        left_out.contains("left out") && left_out.ends_with(&suggestion("body:/model")),
        "{left_out}"
    );
    let prompt = suggestion("response_json:/usage/prompt_tokens");
    let completion = suggestion("response_json:/usage/completion_tokens");
    assert_eq!(
        lacks("client_ip", &[]),
        format!(
            "policy tokens: fields are missing from the log: \
             its cost was computed as if no request had body field /max_tokens{}; \
             its cost was computed as if no request had body field /model{}; \
             every request cost its estimate, the request's /max_tokens, at most 200, because the log has no response data{prompt}{completion}",
            suggestion("body:/max_tokens"),
            suggestion("body:/model"),
        )
    );
    assert_eq!(
        lacks("client_ip", &TOKEN_FIELDS[..3]),
        format!(
            "policy tokens: fields are missing from the log: parts of its reported cost are missing{completion}"
        )
    );
    let mut wrong = token_fixture("client_ip", &[("body:/model", "nowhere")]).with_log("a", &log);
    let sets = [("t".to_owned(), &*wrong.config.policy_table)];
    let error = replay_logs(&wrong.settings, &sets, |_, _| {}).unwrap_err();
    assert!(
        error.starts_with("error: --field-from body:/model=nowhere: no request"),
        "{error}"
    );
    // The other fields of the log do not make up for it.
    wrong.settings.field_mappings.clear();
    assert_eq!(refused_request_count(&wrong.run_replay_as_json(), 0), 0);
}

#[test]
fn conditions_sizes_and_response_headers_are_read_from_mapped_fields() {
    let policies = "[[policy]]\nname = 'tools'\nmatch = { body = { '/method' = 'tools/call', '/stream' = 'true' } }\n\
         limit = { requests = 100, per = '1h' }\n[policy.cost]\nestimate = { request_bytes_per_unit = 4, max = 50 }\n\
         actual = 'response_header:X-Units'\n";
    let line = |at_s: u64, method: &str, bytes: u64, units: u64| {
        format!(
            "{{\"time\": \"2026-11-18T11:00:{at_s:02}Z\", \"remote_addr\": \"1.1.1.1\", \"request\": \"POST / HTTP/1.1\", \
             \"status\": 200, \"method_\": \"{method}\", \"stream\": true, \"size\": {bytes}, \"units\": {units}}}\n"
        )
    };
    let log = [
        line(0, "tools/call", 80, 60),  // 20, then 60
        line(1, "tools/list", 80, 60),  // not counted
        line(2, "tools/call", 161, 1),  // 41: too many
        line(3, "tools/call", 160, 30), // 40, then 30
        line(4, "tools/call", 41, 1),   // 11: too many
        line(5, "tools/call", 40, 1),   // 10
    ];
    let mut fixture = ReplayFixture::new(policies).with_log("a", log.concat());
    fixture.settings.field_mappings = [
        ("body:/method", "method_"),
        ("body:/stream", "stream"),
        ("request_bytes", "size"),
        ("response_header:x-units", "units"),
    ]
    .map(|(source, field)| (source.to_owned(), field.to_owned()))
    .into();
    let set = &fixture.run_replay_as_json()["sets"][0];
    let policy = &set["policies"][0];
    assert_eq!(
        (&policy["matched"], &policy["rejected"]),
        (&5.into(), &2.into()),
        "{set:#}"
    );
    assert_eq!(set["lacks"], serde_json::json!([]));
    fixture.settings.field_mappings.remove(2);
    let lacks = fixture.run_replay_as_json()["sets"][0]["lacks"][0].to_string();
    assert!(
        lacks.contains(
            "as if no request had a body; --field-from request_bytes=FIELD names the field"
        ),
        "{lacks}"
    );
}
