//! What the log tells of a request, and what a client can't make it tell.

use crate::support::TEST_TIMEOUT;
use crate::support::client::RawClient;
use crate::support::proxy::Proxy;
use crate::support::redis::RedisServer;
use crate::support::upstream::Upstream;
use regex::Regex;
use std::collections::BTreeSet;
use std::path::Path;
use walkdir::WalkDir;

const ACCESS_LOG_CONFIG: &str = r#"
log.access = "all"
[[policy]]
name = "p"
key = ["header:x-user"]
limits = [{ requests = 2, per = "1h" }, { requests = 100, per = "1h", algorithm = "fixed_window" }]
"#;

#[tokio::test]
async fn an_access_log_line_has_the_key_remaining_source_and_latency() {
    let (upstream, redis) = (Upstream::echo().await, RedisServer::start());
    let proxy = Proxy::start(
        &format!("{}\n{ACCESS_LOG_CONFIG}", redis.store_config()),
        upstream.address,
    )
    .await;
    proxy.wait_for_store().await;
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    for _ in 0..3 {
        let ask = proxy.request("GET", "/a?secret=1").header("x-user", "ann");
        ask.header("traceparent", &format!("00-{trace}-00f067aa0ba902b7-00"))
            .send()
            .await;
    }
    let mut lines = Vec::new();
    for remaining in ["1", "0"] {
        let line = proxy.wait_for_log("a line", 0, TEST_TIMEOUT, |line| {
            line.field("remaining") == remaining && line.field("decision") == "allowed"
        });
        lines.push(line.await);
    }
    lines.push(
        proxy
            .wait_for_log("a refusal", 0, TEST_TIMEOUT, |line| {
                line.field("decision") == "rejected"
            })
            .await,
    );
    for line in &lines {
        assert_eq!(
            (
                line.field("limit").as_str(),
                line.field("trace_id").as_str()
            ),
            ("p", trace)
        );
        assert!(
            !line.contains("ann") && !line.contains("secret"),
            "{line:?}"
        );
        let [decision, head] =
            ["decision_ms", "head_ms"].map(|field| line.field(field).parse::<f64>().unwrap());
        assert!(0.0 < decision && decision <= head, "{line:?}");
        let keys: Vec<String> = redis.command("KEYS *").await;
        let key = format!("{{{}}}", line.field("key"));
        assert!(
            keys.iter().any(|name| name.contains(&key)),
            "{key} is in none of {keys:?}"
        );
    }
    let sources: Vec<_> = lines.iter().map(|line| line.field("source")).collect();
    assert_eq!(sources[..2], ["redis", "redis"]);
}

#[tokio::test]
async fn client_input_cannot_inject_log_lines_or_terminal_escapes() {
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start(ACCESS_LOG_CONFIG, upstream.address).await;
    let hostile = "\u{9b}31m\u{85}\u{202e}\u{2028}{\"forged\":1}";
    let mut client = RawClient::connect(proxy.address).await;
    client
        .send(format!(
            "GET /{hostile} HTTP/1.1\r\nHost: a\r\nx-user: {hostile}\r\n\r\n"
        ))
        .await;
    let status = client.read_response().await.status.to_string();
    let line = proxy
        .wait_for_log("its line", 0, TEST_TIMEOUT, |line| {
            line.field("status") == status
        })
        .await;
    assert!(
        line.field("path").ends_with("1}"),
        "nothing is lost: {line:?}"
    );
    let log = proxy.log_text();
    let unseen = |letter: &char| {
        letter.is_control() && *letter != '\n' || ('\u{2028}'..='\u{202e}').contains(letter)
    };
    assert_eq!(log.chars().filter(unseen).count(), 0, "{log:?}");
}

/// Messages of the sources: the last text of each line that is logged, up to what is filled in.
fn find_log_messages() -> BTreeSet<String> {
    let logged = Regex::new(r"tracing::(?:info|warn|error)!\(").unwrap();
    let text = Regex::new(r#""((?:[^"\\]|\\(?s:.))*)"(?:,?\s*)$"#).unwrap();
    let joint = Regex::new(r"\\\n\s*").unwrap();
    let mut messages = BTreeSet::new();
    for entry in WalkDir::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")) {
        let path = entry.unwrap().into_path();
        let is_source = path.extension().is_some_and(|extension| extension == "rs");
        let is_test = path.components().any(|part| {
            ["tests", "tests.rs"]
                .iter()
                .any(|name| part.as_os_str() == *name)
        });
        // What commands print is no log.
        if !is_source || is_test || path.components().any(|part| part.as_os_str() == "cli") {
            continue;
        }
        let source = std::fs::read_to_string(&path).unwrap();
        let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap();
        for call in logged
            .find_iter(source)
            .map(|start| call_arguments(&source[start.end()..]))
        {
            // What has no text of its own is told of as a whole: warnings of a configuration.
            let Some(message) = text.captures(call) else {
                assert!(
                    call.ends_with("warning.to_line()"),
                    "no message in {}: {call}",
                    path.display()
                );
                continue;
            };
            let message = joint.replace_all(&message[1], "").into_owned();
            messages.insert(message.split('{').next().unwrap().to_owned());
        }
    }
    messages.remove("");
    messages
}

/// What stands before the parenthesis that ends a call.
fn call_arguments(rest: &str) -> &str {
    let (mut depth, mut quoted, mut escaped) = (1, false, false);
    for (at, letter) in rest.char_indices() {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => quoted = !quoted,
            '(' if !quoted => depth += 1,
            ')' if !quoted => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &rest[..at];
        }
    }
    panic!("a call without an end: {rest}");
}

#[test]
fn the_operations_page_lists_exactly_the_logged_messages() {
    let operations = include_str!("../../docs/operations/observe.md");
    let row = Regex::new(r"(?m)^\| (?:info|warn|error) \| ([^|]*) \|").unwrap();
    let quoted = Regex::new("`([^`]+)`").unwrap();
    let told: BTreeSet<String> = row
        .captures_iter(operations)
        .flat_map(|row| {
            quoted
                .captures_iter(&row[1])
                .map(|found| found[1].to_owned())
                .collect::<Vec<_>>()
        })
        // As far as it is the same in every line.
        .map(|told| {
            told.split(['…', ':'])
                .next()
                .unwrap()
                .trim_end_matches(['"', ' '])
                .to_owned()
        })
        .collect();
    let messages = find_log_messages();
    let alike = |told: &str, message: &str| {
        message.starts_with(told) || told.starts_with(message.trim_end_matches([':', ' ']))
    };
    let untold: Vec<_> = messages
        .iter()
        .filter(|message| !told.iter().any(|told| alike(told, message)))
        .collect();
    let unsaid: Vec<_> = told
        .iter()
        .filter(|told| {
            !["FILE"].contains(&told.as_str())
                && !messages.iter().any(|message| alike(told, message))
        })
        .collect();
    assert!(
        untold.is_empty() && unsaid.is_empty(),
        "not told: {untold:#?}\nnot said: {unsaid:#?}"
    );
    assert!(messages.len() > 20, "{messages:#?}");
}
