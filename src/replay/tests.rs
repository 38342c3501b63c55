use super::*;
use crate::config::{self, Config, FileSource, Flags, Sources};
use serde_json::Value;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// A configuration and logs in a folder.
struct Office {
    config: Config,
    dir: TempDir,
    settings: Settings,
}

impl Office {
    fn of(policies: &str) -> Self {
        let file = FileSource::Text {
            name: "test.toml".into(),
            text: policies.into(),
        };
        let flags = Flags {
            upstream: Some("http://127.0.0.1".into()),
            listen: None,
        };
        let config = config::load(&Sources {
            file,
            env: Vec::new(),
            flags,
        })
        .unwrap();
        let settings = Settings {
            logs: Vec::new(),
            format: None,
            told: Vec::new(),
            spreads: true,
            suggest: None,
            top: 10,
        };
        Self {
            config,
            dir: TempDir::new().unwrap(),
            settings,
        }
    }

    fn log(mut self, name: &str, bytes: impl AsRef<[u8]>) -> Self {
        let path = self.dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        self.settings.logs.push(path);
        self
    }

    fn report(&self) -> Report {
        run(
            &self.settings,
            &[("test.toml".to_owned(), &*self.config.table)],
            |_| {},
        )
        .unwrap()
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.report().json()).unwrap()
    }
}

fn line(at_s: u64, client: &str, rest: &str) -> String {
    format!(
        "{client} - - [18/Nov/2026:11:{:02}:{:02} +0000] \"{rest} HTTP/1.1\" 200 5\n",
        at_s / 60,
        at_s % 60
    )
}

fn lines(at_s: u64, client: &str, rest: &str, count: usize) -> String {
    line(at_s, client, rest).repeat(count)
}

const ONE_LIMIT: &str =
    "[[policy]]\nname = 'all'\nkey = ['client_ip']\nlimit = { requests = 3, per = '10s' }\n";

fn refused(json: &Value, policy: usize) -> u64 {
    let policy = &json["sets"][0]["policies"][policy];
    ["rejected", "blocked", "denied", "shadow_rejected"]
        .iter()
        .map(|word| policy[word].as_u64().unwrap())
        .sum()
}

#[test]
fn who_would_have_been_limited_and_when() {
    let log = lines(0, "1.1.1.1", "GET /", 5)
        + &lines(5, "2.2.2.2", "GET /", 3)
        + &lines(10, "1.1.1.1", "GET /", 3);
    let json = Office::of(ONE_LIMIT).log("a.log", log).json();
    // Two of the five in the first second. Ten seconds later those that were let in have left one by one.
    assert_eq!(refused(&json, 0), 2, "{json:#}");
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
fn lines_out_of_order_and_files_in_any_order_are_one_log() {
    let in_order: String = (0..40)
        .map(|second| lines(second, "1.1.1.1", "GET /", 1))
        .collect();
    let expected = refused(&Office::of(ONE_LIMIT).log("a", &in_order).json(), 0);
    let mut shuffled: Vec<&str> = in_order.lines().collect();
    shuffled.chunks_mut(5).for_each(<[_]>::reverse);
    let late = Office::of(ONE_LIMIT).log("a", shuffled.join("\n")).json();
    assert_eq!(
        (refused(&late, 0), &late["sets"][0]["late"]),
        (expected, &0.into())
    );
    let (first, second) = in_order.split_at(in_order.len() / 2);
    assert_eq!(
        refused(
            &Office::of(ONE_LIMIT)
                .log("b", second)
                .log("a", first)
                .json(),
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
        refused(
            &Office::of(ONE_LIMIT).log("a", odds).log("b", evens).json(),
            0
        ),
        expected
    );
}

#[test]
fn what_is_much_too_late_is_counted_and_told() {
    let mut log: String = (0..50)
        .map(|second| lines(second, "1.1.1.1", "GET /", 200))
        .collect();
    log += &lines(3, "2.2.2.2", "GET /", 4);
    let office = Office::of(ONE_LIMIT).log("a", log);
    assert_eq!(office.json()["sets"][0]["late"], 4);
    assert!(
        office
            .report()
            .text(80, false)
            .contains("4 requests stand more than 10 s too late")
    );
}

#[test]
fn all_that_a_policy_says_holds() {
    let office = Office::of(
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
        lines(0, "1.1.1.1", "GET /health", 4),
        lines(0, "1.1.1.1", "GET /admin/x", 2),
        lines(1, "1.1.1.1", "POST /login", 3),
        lines(20, "1.1.1.1", "POST /login", 1),
        lines(22, "1.1.1.1", "POST /login", 1),
        lines(23, "1.1.1.1", "GET /slow", 4),
        lines(24, "1.1.1.1", "GET /try", 3),
        lines(25, "1.1.1.1", "GET /vip", 3),
        lines(26, "9.9.9.9", "GET /vip", 4),
        lines(27, "9.9.9.9", "GET /%00", 1),
    ];
    let json = office.log("a", log.concat()).json();
    let policies = &json["sets"][0]["policies"];
    let of = |at: usize, word: &str| policies[at][word].as_u64().unwrap();
    assert_eq!((of(0, "exempt"), of(1, "denied")), (4, 2));
    assert_eq!(
        (of(2, "allowed"), of(2, "rejected"), of(2, "blocked")),
        (3, 1, 1)
    );
    assert_eq!(
        (of(3, "allowed"), of(3, "delayed"), of(3, "rejected")),
        (1, 3, 0)
    );
    assert_eq!((of(4, "allowed"), of(4, "shadow_rejected")), (1, 2));
    assert_eq!((of(5, "allowed"), of(5, "rejected")), (4, 3));
    let set = &json["sets"][0];
    assert_eq!(
        (&set["denied"], &set["malformed"], &set["delayed"]),
        (&2.into(), &1.into(), &3.into())
    );
    assert_eq!(set["limited"], 2 + 3);
}

#[test]
fn concurrency_is_judged_by_durations() {
    let office = "[[policy]]\nname = 'p'\nlimit = { requests = 2, algorithm = 'concurrency' }\n";
    let line = |at_s: u64, took_s: u64| {
        format!(
            "{{\"ts\":{},\"duration\":{took_s},\"status\":200,\"request\":{{\"remote_ip\":\"1.1.1.1\",\"method\":\"GET\",\"uri\":\"/\"}}}}\n",
            at_s + took_s
        )
    };
    // Two that last for a minute, longer than a slot does by itself; one meanwhile, one after.
    let json = Office::of(office)
        .log(
            "a",
            [
                line(1_795_000_000, 60),
                line(1_795_000_000, 60),
                line(1_795_000_055, 1),
                line(1_795_000_060, 1),
            ]
            .concat(),
        )
        .json();
    assert_eq!(
        (refused(&json, 0), &json["sets"][0]["late"]),
        (1, &0.into()),
        "{json:#}"
    );
    let without = Office::of(office).log("a", lines(0, "1.1.1.1", "GET /", 9));
    assert_eq!(refused(&without.json(), 0), 0);
    assert!(
        without.json()["sets"][0]["lacks"][0]
            .as_str()
            .unwrap()
            .contains("no duration")
    );
}

#[test]
fn what_a_log_does_not_tell_is_said() {
    let office = Office::of(
        "[client]\ntrusted_proxies = ['10.0.0.0/8']\n\
         [[policy]]\nname = 'users'\nkey = ['header:x-user-id', 'client_ip']\nlimit = { requests = 1, per = '1h' }\n\
         [[policy]]\nname = 'host'\nmatch = { hosts = ['a.example'], headers = { x-beta = '1' } }\nkey = ['client_ip']\n\
         cost = { header = 'x-cost', default = 2 }\nlimit = { requests = 9, per = '1h' }\n",
    )
    .log("a", lines(0, "10.0.0.1", "GET /", 2));
    let text = office
        .report()
        .text(80, false)
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ");
    for sentence in [
        "policy users: the log doesn't tell all: of its key header x-user-id is missing, so all requests share that part",
        "policy host: the log doesn't tell all: its conditions on header x-beta, the host were judged as if",
        "every request cost 2, for want of x-cost",
        "2 of 2 requests came from a trusted proxy",
        "--header-from x-forwarded-for=FIELD",
    ] {
        assert!(text.contains(sentence), "{sentence}\n{text}");
    }
}

#[test]
fn broken_lines_are_counted_and_harmless() {
    let hostile = "\u{1b}[2J\u{202e}<script>alert(1)</script>";
    let mut log = lines(0, "1.1.1.1", "GET /", 5).into_bytes();
    log.extend(format!("{hostile}\r\n\r\n\n").as_bytes());
    log.extend(b"\xff\x00\x80\n");
    log.extend("x".repeat(1 << 20).as_bytes());
    log.extend(b"\n");
    log.extend(line(1, &format!("1.1.1.1 {hostile}"), "GET /<b>\u{1b}[31m").as_bytes());
    log.extend(lines(2, "1.1.1.1", "GET /", 1).trim_end().as_bytes());
    let office = Office::of(ONE_LIMIT).log("<i>.log", &log);
    let json = office.json();
    assert_eq!(
        (
            &json["logs"][0]["broken"],
            &json["lines"],
            &json["requests"]
        ),
        (&3.into(), &10.into(), &7.into())
    );
    let report = office.report();
    let (text, html) = (report.text(80, true), report.html());
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
fn packed_logs_are_unpacked_and_broken_ones_read_as_far_as_they_go() {
    use std::io::Write;
    let mut packed = Vec::new();
    // Two members, as logs that were appended to have.
    for half in 0..2 {
        let mut out = flate2::write::GzEncoder::new(&mut packed, flate2::Compression::fast());
        for second in 0..1000 {
            out.write_all(
                lines(
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
    let whole = Office::of(ONE_LIMIT).log("a.gz", &packed).json();
    assert_eq!(
        (&whole["requests"], &whole["logs"][0]["fault"]),
        (&2000.into(), &Value::Null)
    );
    let cut = Office::of(ONE_LIMIT).log("a.gz", &packed[..packed.len() * 3 / 4]);
    let (json, text) = (cut.json(), cut.report().text(80, false));
    assert!(
        (1000..2000).contains(&json["requests"].as_u64().unwrap()),
        "{json:#}"
    );
    assert!(text.contains("ended too early"), "{text}");
}

#[test]
fn two_sets_side_by_side() {
    let strict = Office::of(ONE_LIMIT).log(
        "a",
        lines(0, "1.1.1.1", "GET /", 5) + &lines(1, "2.2.2.2", "GET /", 4),
    );
    let lax = Office::of(&ONE_LIMIT.replace("requests = 3", "requests = 4"));
    let sets = [
        ("old".to_owned(), &*strict.config.table),
        ("new".to_owned(), &*lax.config.table),
    ];
    let report = run(&strict.settings, &sets, |_| {}).unwrap();
    let json: Value = serde_json::from_str(&report.json()).unwrap();
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
        report.text(80, false).contains("SIDE BY SIDE") && report.html().contains("Side by side")
    );
}

#[test]
fn a_suggested_limit_touches_as_few_as_it_says() {
    let log: String = (1..=100)
        .map(|client| lines(0, &format!("1.1.1.{client}"), "GET /", client))
        .collect();
    let mut office = Office::of(ONE_LIMIT).log("a", &log);
    office.settings.suggest = Some(5.0);
    let json = office.json();
    let drawn = &json["sets"][0]["policies"][0]["suggested"][0]["drawn"];
    assert_eq!(
        (&drawn["requests"], &drawn["touched"], &drawn["touched_now"]),
        (&95.into(), &5.into(), &97.into())
    );
    assert_eq!(json["sets"][0]["policies"][0]["keys_touched"], 97);
    // What it says of the future is what the present does.
    let tried = Office::of(&ONE_LIMIT.replace("requests = 3", "requests = 95"))
        .log("a", &log)
        .json();
    assert_eq!(tried["sets"][0]["policies"][0]["keys_touched"], 5);
}

#[test]
fn what_is_no_log_is_refused() {
    let fails = |office: Office| {
        run(
            &office.settings,
            &[("t".to_owned(), &*office.config.table)],
            |_| {},
        )
        .unwrap_err()
    };
    let unknown = fails(Office::of(ONE_LIMIT).log("a", "hello\nworld\n"));
    assert!(
        unknown.contains("none of the first lines is a request"),
        "{unknown}"
    );
    let mut missing = Office::of(ONE_LIMIT);
    missing
        .settings
        .logs
        .push(Path::new("/nowhere/\u{1b}[1m").into());
    assert!(fails(missing).contains("\\u{1b}"));
    assert!(fails(Office::of(ONE_LIMIT).log("a", "")).contains("none of the first lines"));
}
