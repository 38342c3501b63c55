//! `tidegate replay`: simulates policies over the requests of a past access log.

use crate::support::generated_log::{self, ExpectedReport};
use crate::support::prelude::*;
use std::process::Stdio;

fn write_sample_log(dir: &Path, requests: u64) -> ExpectedReport {
    let mut log = Vec::new();
    let expected_report = generated_log::generate_log(&mut log, requests, 11).unwrap();
    fs::write(dir.join("access.log"), log).unwrap();
    fs::write(dir.join("config.toml"), generated_log::POLICIES).unwrap();
    expected_report
}

async fn run_replay(dir: &Path, args: &[&str]) -> ProcessOutput {
    let mut process =
        ChildProcess::start(tidegate_command().current_dir(dir).arg("replay").args(args)).unwrap();
    // The log has many lines for a debug build.
    process.wait_for_exit(Duration::from_secs(60)).await
}

fn parse_report(ended: &ProcessOutput) -> Value {
    assert!(ended.status.success(), "{}", ended.stderr);
    ended.json()
}

#[tokio::test]
async fn the_report_has_the_known_answers_of_a_sample_log() {
    let dir = TempDir::new().unwrap();
    let expected_report = write_sample_log(dir.path(), 50_000);
    assert!(
        expected_report.malformed > 0
            && expected_report.limited > 1000
            && expected_report.forwarded > 1000,
        "the sample log is too uniform"
    );
    let report =
        parse_report(&run_replay(dir.path(), &["--json", "--top=1000000", "access.log"]).await);
    let set = &report["sets"][0];
    assert_eq!(report["lines"], expected_report.lines);
    assert_eq!(report["requests"], expected_report.requests);
    assert_eq!(report["logs"][0]["broken"], expected_report.malformed);
    assert_fields(
        set,
        json!({ "forwarded": expected_report.forwarded, "limited": expected_report.limited }),
    );
    for policy in set["policies"].as_array().unwrap() {
        let name = policy["name"].as_str().unwrap();
        let expected = &expected_report.policies[name];
        assert_eq!(policy["matched"], expected.matched, "{name}");
        let refused =
            policy["rejected"].as_u64().unwrap() + policy["shadow_rejected"].as_u64().unwrap();
        assert_eq!(refused, expected.refused, "{name}");
        assert_eq!(policy["keys"], expected.keys.len(), "{name}");
        assert_eq!(policy["keys_touched"], expected.limited_keys(), "{name}");
        let items = set["top"].as_array().unwrap().iter();
        let top_keys = items.filter(|top| top["policy"] == name);
        let top_keys = top_keys.map(|top| {
            let [_, a, b, c] = top["key"]
                .as_str()
                .unwrap()
                .parse::<std::net::Ipv4Addr>()
                .unwrap()
                .octets();
            let client = u32::from_be_bytes([0, a, b, c]);
            assert_eq!((top["requests"].as_u64(), top["refused"].as_u64()), {
                let (requests, refused) = expected.keys[&client];
                (Some(requests), Some(refused))
            });
        });
        assert_eq!(top_keys.count() as u64, expected.limited_keys(), "{name}");
    }
}

#[tokio::test]
async fn replay_writes_a_text_report_and_an_html_page() {
    let dir = TempDir::new().unwrap();
    write_sample_log(dir.path(), 10_000);
    let more = generated_log::POLICIES.replace("requests = 20", "requests = 200");
    fs::write(dir.path().join("more.toml"), more).unwrap();
    let args = [
        "--suggest",
        "--compare=more.toml",
        "--html=report.html",
        "access.log",
    ];
    let ended = run_replay(dir.path(), &args).await;
    assert!(ended.status.success(), "{}", ended.stderr);
    assert!(ended.stderr.is_empty(), "{}", ended.stderr);
    for text in [
        "10,000 requests in",
        "SIDE BY SIDE",
        "BY more.toml",
        "WHEN:",
        "MOST LIMITED KEYS",
        "SUGGESTED",
        "█",
    ] {
        ended.expect_stdout(text);
    }
    assert!(
        !ended.stdout.contains('\u{1b}'),
        "stdout is not a terminal, so the report has no escape sequences"
    );
    let page = fs::read_to_string(dir.path().join("report.html")).unwrap();
    for text in [
        "Content-Security-Policy",
        "<svg",
        "10.0.0.1",
        "more.toml",
        "\\u{1b}[31m",
        "a bar is ",
        ">touched</small>",
    ] {
        assert!(page.contains(text), "{text}");
    }
    for external in ["http://", "https://", "<script", "<link", "url("] {
        assert!(!page.contains(external), "{external}");
    }
}

#[tokio::test]
async fn a_policy_that_is_left_out_has_no_figures_in_the_page() {
    let dir = TempDir::new().unwrap();
    write_sample_log(dir.path(), 100);
    let policy = "[[policy]]\nname = 'absent'\nkey = ['header:x-absent']\nlimit = { requests = 1, per = '1m' }\n";
    fs::write(dir.path().join("config.toml"), policy).unwrap();
    let ended = run_replay(dir.path(), &["--html=report.html", "access.log"]).await;
    assert!(ended.status.success(), "{}", ended.stderr);
    let page = fs::read_to_string(dir.path().join("report.html")).unwrap();
    assert_contains(&page, &["absent", "x-absent"]);
    assert!(!page.contains("0 of 0"), "{page}");
}

#[tokio::test]
async fn a_log_is_read_from_stdin() {
    let dir = TempDir::new().unwrap();
    let expected_report = write_sample_log(dir.path(), 10_000);
    let mut command = tidegate_command();
    command
        .current_dir(dir.path())
        .args(["replay", "--json", "-"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let log = fs::read(dir.path().join("access.log")).unwrap();
    let (written, output) = tokio::join!(
        async move {
            stdin.write_all(&log).await.unwrap();
            drop(stdin);
        },
        child.wait_with_output()
    );
    let () = written;
    let report: Value = serde_json::from_slice(&output.unwrap().stdout).unwrap();
    assert_eq!(report["sets"][0]["limited"], expected_report.limited);
}

#[tokio::test]
async fn both_options_map_fields_of_the_log() {
    let dir = TempDir::new().unwrap();
    let policy = "[[policy]]\nname = 'tokens'\nkey = ['header:x-team', 'body:/model']\nlimit = { requests = 10, per = '1h' }\n\
                  cost = { estimate = 4, actual = 'response_json:/usage/total_tokens' }\n";
    fs::write(dir.path().join("config.toml"), policy).unwrap();
    let line = |at_s: u64, model: &str, tokens: u64| {
        format!(
            "1.1.1.1 - - [18/Nov/2026:11:00:{at_s:02} +0000] \"POST / HTTP/1.1\" 200 5 \"-\" \"-\" red {model} {tokens}\n"
        )
    };
    // After 7 units the estimate does not fit; after 2 it does, and 9 more are charged.
    let costs = [("a", 7), ("b", 2), ("a", 1), ("b", 9), ("b", 1), ("c", 1)];
    let lines = costs.iter().zip(0..);
    let log: String = lines
        .map(|((model, tokens), at_s)| line(at_s, model, *tokens))
        .collect();
    fs::write(dir.path().join("access.log"), log).unwrap();
    let team = ["--header-from", "x-team=extra1"];
    let fields = ["--field-from", "body:/model=extra2", "--json"];
    let tokens = "--field-from=response_json:/usage/total_tokens=extra3";
    for (more, limited) in [(&[tokens, "access.log"][..], 2), (&["access.log"], 1)] {
        let args = [&team[..], &fields, more].concat();
        let report = parse_report(&run_replay(dir.path(), &args).await);
        let set = &report["sets"][0];
        assert_eq!(set["limited"], limited, "{more:?}: {set:#}");
        let lacks = set["lacks"].to_string();
        assert_eq!(
            lacks.contains("cost its estimate, 4"),
            more.len() == 1,
            "{lacks}"
        );
    }
}

#[tokio::test]
async fn invalid_arguments_and_files_are_reported() {
    let dir = TempDir::new().unwrap();
    write_sample_log(dir.path(), 100);
    for (args, expected) in [
        (&["nowhere.log"][..], "nowhere.log: No such file"),
        (&["config.toml"], "none of the first lines is a request"),
        (&["--config=nowhere.toml", "access.log"], "nowhere.toml"),
        (&["--format=xml", "access.log"], "expected one of combined"),
        (&["--header-from=x", "access.log"], "expected HEADER=FIELD"),
        (&["--field-from=body:model=m", "access.log"], "begins with"),
        (
            &["--field-from=query:/model=m", "access.log"],
            "response_json:/POINTER",
        ),
        (
            &["--field-from=body:/model=nowhere", "access.log"],
            "--field-from body:/model=nowhere: no request in the log has this field",
        ),
        (&["--suggest=101", "access.log"], "expected a percentage"),
        (
            &["--format=$request", "access.log"],
            "the format has no time",
        ),
        (&["--format=alb", "access.log"], "no request in 1"),
        (
            &["--header-from=x-user=extra9", "access.log"],
            "--header-from x-user=extra9: no request in the log has this field",
        ),
        (&[], "ACCESS_LOG"),
    ] {
        let ended = run_replay(dir.path(), args).await;
        assert!(!ended.status.success(), "{args:?}");
        assert!(ended.stdout.is_empty(), "{args:?}");
        ended.expect_stderr(expected);
    }
}
