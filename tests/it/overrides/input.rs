//! What the commands do with input that is wrong, or that has only a part of an override.

use super::{OverrideFixture, POLICIES};
use crate::support::prelude::*;

/// Imports a file with errors. Returns stderr.
async fn import_errors(fixture: &OverrideFixture, name: &str, text: &str) -> String {
    let path = fixture.config.beside(name);
    fs::write(&path, text).unwrap();
    fixture.error_of(&["import", path.to_str().unwrap()]).await
}

#[tokio::test]
async fn a_line_with_a_field_that_has_no_effect_is_not_imported() {
    let fixture = OverrideFixture::start(POLICIES).await;
    let text = r#"{"policy": "several", "key": ["a", "b"], "limits": {"minute": {"requests": 5, "brust": 50}}}
        {"policy": "several", "key": ["a", "b"], "limits": {"minute": {"requests": 5}}, "burst": 50}
        {"policy": "several", "key": ["a", "b"], "limits": {"minute": {"requests": 5}}, "limit": "minute"}
        {"policy": "several", "key": ["a", "b"], "limits": {"minute": {"burst": 5}}}
        {"policy": "api", "key": "a", "blocked": true, "expires": "200000000000d"}
        {"policy": "api", "key": "last", "blocked": true}"#;
    let errors = import_errors(&fixture, "wrong.jsonl", text).await;
    assert_contains(
        &errors,
        &[
            "line 1: limits.minute: unknown field \"brust\"; expected requests, burst",
            "line 2: burst: expected it inside limits",
            "line 3: limit: expected it inside limits",
            "line 4: limits.minute: requests: missing",
            "line 5: the expiry is after 2255-06-05",
            "5 lines are wrong and were not set; 1 override was set",
        ],
    );
    let text = "policy,key,key2,limit,burst,limits,blocked,expires\n\
        several,a,b,,50,minute=5,,\n\
        several,a,b,minute,,minute=5,,\n\
        api,a,,,,,true,200000000000d\n\
        api,last,,,,,true,\n";
    let errors = import_errors(&fixture, "wrong.csv", text).await;
    assert_contains(
        &errors,
        &[
            "line 2: burst: expected it inside limits",
            "line 3: limit: expected it inside limits",
            "line 4: the expiry is after 2255-06-05",
            "3 lines are wrong and were not set; 1 override was set",
        ],
    );
}

#[tokio::test]
async fn a_csv_record_over_several_lines_is_reported_with_all_of_them() {
    let fixture = OverrideFixture::start(POLICIES).await;
    let mut text = "policy,key,blocked,note\n\
        api,first,true,\n\
        api,\"open,true,\n\
        api,swallowed,true,\n\
        api,\"b, c\",true,\n\
        \n\
        api,next,true,\"two\nlines\"\n"
        .to_owned();
    text.push_str("api,long,true,\"");
    text.push_str(&"swallowed\n".repeat(20_000));
    text.push_str("\"\napi,last,true,\napi,\"unclosed,true,\napi,end,true,\n");
    let errors = import_errors(&fixture, "wrong.csv", &text).await;
    assert_contains(
        &errors,
        &[
            "lines 3 to 5: text after a closing \"",
            "lines 7 to 8: note: expected one line",
            "lines 9 to 20009: longer than 65536 bytes",
            "lines 20011 to 20012: the closing \" is missing",
            "4 lines are wrong and were not set; 2 overrides were set",
        ],
    );
    let listed = fixture.run_successfully(&["list"]).await;
    assert!(listed.contains("api/first") && listed.contains("api/last"));
}

#[tokio::test]
async fn setting_one_limit_changes_no_expiry_of_another_one() {
    let redis = OverrideFixture::start(POLICIES).await;
    let memory = Proxy::with_token(POLICIES).await;
    for is_redis in [true, false] {
        let run = async |words: &[&str]| match is_redis {
            true => redis.run_command(words).await,
            false => memory.run_command(&[&["overrides"], words].concat()).await,
        };
        let set = async |limit: &str, words: &[&str]| {
            let set = ["set", "several", "ann", "k", "--requests", "7", "--limit"];
            run(&[&set[..], &[limit], words].concat()).await
        };
        let show = async || {
            let shown = run(&["show", "several", "ann", "k", "--json"]).await;
            serde_json::from_str::<Value>(&shown.stdout).unwrap()
        };
        let until = "2099-01-31T00:00:00Z";
        let remarks = ["--note", "contract 17", "--author", "bob"];
        let words = [&["--expires", until][..], &remarks].concat();
        assert_eq!(set("day", &words).await.status.code(), Some(0));
        let before = show().await;

        let refused = set("minute", &[]).await;
        refused.expect_code(1);
        let expected = format!(
            "the override of this key has other limits (day), which end at {until}; the new \
             amounts would never end; expected --expires {until}, or remove the override first"
        );
        refused.expect_stderr(&expected);
        assert_eq!(show().await, before);

        let ended = set("minute", &["--expires", until]).await;
        ended.expect_code(0);
        let stored = show().await;
        assert_eq!(stored["expires_at"], until);
        assert_fields(&stored, json!({ "note": "contract 17", "author": "bob" }));
        assert_eq!(stored["limits"].as_object().unwrap().len(), 2);

        // An override with only this limit takes the new expiry.
        run(&["remove", "several", "ann", "k"]).await;
        for words in [&[][..], &["--expires", until]] {
            let ended = set("day", words).await;
            ended.expect_code(0);
        }
        let refused = set("minute", &[]).await;
        refused.expect_code(1);
        set("day", &[]).await;
        let refused = set("minute", &["--expires", until]).await;
        let expected =
            format!("which never end; the new amounts would end at {until}; expected no --expires");
        refused.expect_stderr(&expected);
    }
}

/// The configuration of the commands may be newer than that of the proxy.
#[tokio::test]
async fn the_admin_ports_overrides_are_listed_if_a_limit_has_left_the_configuration() {
    let proxy = Proxy::with_token(POLICIES).await;
    for (user, limit) in [("ann", "day"), ("bob", "minute")] {
        let words = ["overrides", "set", "several", user, "k", "--limit", limit];
        let ended = proxy
            .run_command(&[&words[..], &["--requests", "3"]].concat())
            .await;
        ended.expect_code(0);
    }
    let path = proxy.dir().join("newer.toml");
    fs::write(&path, POLICIES.replace("\"day\"", "\"daily\"")).unwrap();
    for (words, expected) in [
        (&["list"][..], "day 3"),
        (&["show", "several", "ann", "k"], "day 3"),
        (&["export"], r#""day":{"requests":3}"#),
    ] {
        let mut command = tidegate_command();
        command.arg("overrides").args(words).arg("--config");
        let address = proxy.admin_address().to_string();
        let command = command.arg(&path).env("TIDEGATE_ADMIN__ADDRESS", address);
        let ended = run_command(command).await;
        ended.expect_stdout(expected);
    }
}
