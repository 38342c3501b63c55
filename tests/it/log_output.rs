//! Log lines of a request, and protection against log injection by clients.

use crate::support::prelude::*;
use regex::Regex;
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
    let config = format!("{}\n{ACCESS_LOG_CONFIG}", redis.store_config());
    let proxy = Proxy::start_connected(&config, upstream.address).await;
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    for _ in 0..3 {
        let ask = proxy.request("GET", "/a?secret=1").header("x-user", "ann");
        ask.header("traceparent", &format!("00-{trace}-00f067aa0ba902b7-00"))
            .send()
            .await;
    }
    let mut lines = Vec::new();
    for remaining in ["1", "0"] {
        let line = proxy.wait_for_log("the access log line", 0, TEST_TIMEOUT, |line| {
            line.field("remaining") == remaining && line.field("decision") == "allowed"
        });
        lines.push(line.await);
    }
    lines.push(proxy.wait_for_field("decision", "rejected", 0).await);
    for line in &lines {
        assert_eq!(line.field("limit").as_str(), "p");
        assert_eq!(line.field("trace_id").as_str(), trace);
        assert_lacks(&format!("{line:?}"), &["ann", "secret"]);
        let [decision, head] =
            ["decision_ms", "head_ms"].map(|field| line.field(field).parse::<f64>().unwrap());
        assert!(0.0 < decision && decision <= head, "{line:?}");
        // Whole microseconds, without the noise of binary fractions.
        for name in ["decision_ms", "head_ms"] {
            let text = line.field(name);
            let digits = text.split_once('.').map_or("", |(_, digits)| digits);
            assert!(digits.len() <= 3 && !text.contains('e'), "{name}: {text}");
        }
        let keys: Vec<String> = redis.command("KEYS *").await;
        let key = format!("{{{}}}", line.field("key"));
        assert!(
            keys.iter().any(|name| name.contains(&key)),
            "{key} is not in {keys:?}"
        );
    }
    let sources: Vec<_> = lines.iter().map(|line| line.field("source")).collect();
    assert_eq!(sources[..2], ["redis", "redis"]);
}

#[tokio::test]
async fn client_input_cannot_inject_log_lines_or_terminal_escapes() {
    let proxy = Proxy::with_echo(ACCESS_LOG_CONFIG).await;
    let hostile = "\u{9b}31m\u{85}\u{202e}\u{2028}{\"forged\":1}";
    let mut client = proxy
        .send_raw(format!(
            "GET /{hostile} HTTP/1.1\r\nHost: a\r\nx-user: {hostile}\r\n\r\n"
        ))
        .await;
    let status = client.read_response().await.status.to_string();
    let line = proxy.wait_for_field("status", &status, 0).await;
    assert!(
        line.field("path").ends_with("1}"),
        "a part of the input is missing: {line:?}"
    );
    let log = proxy.log_text();
    let unseen = |letter: &char| {
        letter.is_control() && *letter != '\n' || ('\u{2028}'..='\u{202e}').contains(letter)
    };
    assert_eq!(log.chars().filter(unseen).count(), 0, "{log:?}");
}

/// The messages in the sources: the last string of each log call, up to its first placeholder.
fn find_log_messages() -> BTreeSet<String> {
    let logged = Regex::new(r"tracing::(?:info|warn|error)!\(").unwrap();
    let text = Regex::new(r#""((?:[^"\\]|\\(?s:.))*)"(?:,?\s*)$"#).unwrap();
    let joint = Regex::new(r"\\\n\s*").unwrap();
    let mut messages = BTreeSet::new();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for entry in WalkDir::new(&sources) {
        let path = entry.unwrap().into_path();
        // The checkout's own folder may have any name.
        let inside = path.strip_prefix(&sources).unwrap();
        let is_source = path.extension().is_some_and(|extension| extension == "rs");
        let is_test = inside.components().any(|part| {
            ["tests", "tests.rs"]
                .iter()
                .any(|name| part.as_os_str() == *name)
        });
        // Output of commands is not logged.
        if !is_source || is_test || inside.components().any(|part| part.as_os_str() == "cli") {
            continue;
        }
        let source = fs::read_to_string(&path).unwrap();
        let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap();
        for call in logged
            .find_iter(source)
            .map(|start| call_arguments(&source[start.end()..]))
        {
            // A call without a text of its own logs a complete configuration warning.
            let Some(message) = text.captures(call) else {
                assert!(
                    call.ends_with("warning.to_log_line()"),
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

/// Returns the text before the parenthesis that closes the call.
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
    let documented: BTreeSet<String> = row
        .captures_iter(operations)
        .flat_map(|row| {
            quoted
                .captures_iter(&row[1])
                .map(|found| found[1].to_owned())
                .collect::<Vec<_>>()
        })
        // The part of the message that is the same in every line.
        .map(|documented| {
            documented
                .split(['…', ':'])
                .next()
                .unwrap()
                .trim_end_matches(['"', ' '])
                .to_owned()
        })
        .collect();
    let messages = find_log_messages();
    let alike = |documented: &str, message: &str| {
        message.starts_with(documented)
            || documented.starts_with(message.trim_end_matches([':', ' ']))
    };
    let undocumented: Vec<_> = messages
        .iter()
        .filter(|message| {
            !documented
                .iter()
                .any(|documented| alike(documented, message))
        })
        .collect();
    let unlogged: Vec<_> = documented
        .iter()
        .filter(|documented| {
            !["FILE"].contains(&documented.as_str())
                && !messages.iter().any(|message| alike(documented, message))
        })
        .collect();
    assert!(
        undocumented.is_empty() && unlogged.is_empty(),
        "not documented: {undocumented:#?}\nnot logged: {unlogged:#?}"
    );
    assert!(messages.len() > 20, "{messages:#?}");
}
