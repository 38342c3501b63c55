//! What commands answer when something is missing or wrong, and the audit lines of changes.

use crate::support::prelude::*;

const TWO_LIMITS: &str = r#"
[[policy]]
name = "api"
dynamic = true
key = ["header:x-user"]
block_for = "1h"
limits = [
  { requests = 9, per = "1m", name = "minute" },
  { requests = 10, per = "month", algorithm = "fixed_window", tz = "UTC", name = "month" },
]
"#;

/// Resets one limit by the command and by the admin port; the other keeps its usage.
async fn assert_one_limit_can_be_reset(proxy: &Proxy) {
    let used = async || {
        let report = proxy.get_json("/keys?policy=api&key=ann").await;
        let limits = report["limits"].as_array().unwrap();
        [0, 1].map(|at: usize| limits[at]["used"].as_u64().unwrap())
    };
    for _ in 0..3 {
        assert_eq!(proxy.status_for_user("ann", "/").await, 200);
    }
    assert_eq!(used().await, [3, 3]);
    let reset = proxy
        .run_command(&["keys", "reset", "api", "ann", "--limit", "minute"])
        .await;
    assert_eq!(
        reset.stdout, "api/ann: reset 1 limit (minute)\n",
        "{}",
        reset.stderr
    );
    assert_eq!(used().await, [0, 3]);
    assert_eq!(proxy.status_for_user("ann", "/").await, 200);
    let target = "/keys?policy=api&key=ann&limit=month";
    let request = proxy.authorized_request("DELETE", target);
    let answer = request.send().await.json();
    assert_eq!(answer["counters_forgotten"], 1, "{answer}");
    assert_eq!(answer["limits"], json!(["month"]), "{answer}");
    assert_eq!(used().await, [1, 0]);
    let unknown = proxy
        .run_command(&["keys", "reset", "api", "ann", "--limit", "day"])
        .await;
    assert!(!unknown.status.success());
    unknown.expect_stderr("unknown limit \"day\" of policy api; expected one of minute, month");
    let reset = proxy.run_command(&["keys", "reset", "api", "ann"]).await;
    assert_eq!(
        reset.stdout, "api/ann: reset 1 limit (minute)\n",
        "{}",
        reset.stderr
    );
    let reset = proxy.run_command(&["keys", "reset", "api", "ann"]).await;
    assert_eq!(
        reset.stdout, "api/ann: no counter to reset\n",
        "{}",
        reset.stderr
    );
}

#[tokio::test]
async fn one_limit_of_a_key_can_be_reset_in_every_store() {
    assert_one_limit_can_be_reset(&Proxy::with_token(TWO_LIMITS).await).await;
    let redis = RedisServer::start();
    let proxy = Proxy::with_token(&format!("{}\n{TWO_LIMITS}", redis.store_config())).await;
    proxy.wait_for_store().await;
    assert_one_limit_can_be_reset(&proxy).await;
    let cluster = RedisCluster::start().await;
    let lines = cluster.config_lines();
    let store = format!("[store]\nkind = 'redis'\n[store.redis]\n{lines}\n");
    let proxy = Proxy::with_token(&format!("{store}{TWO_LIMITS}")).await;
    proxy.wait_for_store().await;
    assert_one_limit_can_be_reset(&proxy).await;
}

#[tokio::test]
async fn a_reset_of_one_limit_says_that_the_block_stays() {
    let redis = RedisServer::start();
    let policy = TWO_LIMITS.replace("requests = 9", "requests = 1");
    for store in [String::new(), redis.store_config()] {
        let proxy = Proxy::with_token(&format!("{store}\n{policy}")).await;
        if !store.is_empty() {
            proxy.wait_for_store().await;
        }
        for status in [200, 429] {
            assert_eq!(proxy.status_for_user("ann", "/").await, status);
        }
        let words = ["keys", "reset", "api", "ann", "--limit", "minute"];
        let reset = proxy.run_command(&words).await.stdout;
        assert!(
            reset.starts_with("api/ann: reset 1 limit (minute)\nThe key stays blocked for ")
                && reset.ends_with("; reset it without --limit to end the block.\n"),
            "{reset}"
        );
        let reset = proxy.run_command(&words[..4]).await.stdout;
        assert_eq!(reset, "api/ann: reset 1 limit (month) and the block\n");
    }
}

/// The overrides of a memory store are in the proxy, not in the process of the command.
#[tokio::test]
async fn explain_considers_the_overrides_of_a_running_proxy() {
    let proxy = Proxy::with_token(TWO_LIMITS).await;
    let ann = ["-H", "x-user: ann"];
    for (rule, expected) in [
        (
            &["--block"][..],
            ["blocked by an override", "Rejected by api: 429.\n"],
        ),
        (
            &["--unlimited"],
            ["unlimited by an override", "Admitted.\n"],
        ),
        (
            &["--requests", "0", "--limit", "minute"],
            [
                "0 per 1m, sliding_log, by an override",
                "Rejected by api: 429.\n",
            ],
        ),
        (
            &["--requests", "7", "--limit", "minute"],
            ["7 per 1m, sliding_log, by an override", "Admitted unless"],
        ),
    ] {
        let words = [&["overrides", "set", "api", "ann"], rule].concat();
        proxy.run_command(&words).await.expect_code(0);
        let words = [&["explain", "GET", "/"][..], &ann].concat();
        let explained = proxy.run_command(&words).await.stdout;
        assert_contains(&explained, &expected);
    }
    let mut command = tidegate_command();
    let address = format!("127.0.0.1:{}", free_port());
    command.env("TIDEGATE_ADMIN__ADDRESS", &address);
    let config = ConfigFile::new(TWO_LIMITS);
    command.args(["explain", "GET", "/", "--config"]);
    let explained = run_command(command.arg(config.path()).args(ann)).await;
    assert_contains(
        &explained.stdout,
        &[
            "Admitted unless one of these limits is exhausted.",
            "unknown: overrides of keys are known only to the running proxy: 127.0.0.1:",
            "Connection refused",
        ],
    );
}

#[tokio::test]
async fn a_refused_change_names_where_commands_find_their_token() {
    let proxy = Proxy::with_echo(TWO_LIMITS).await;
    let ended = proxy.run_command(&["keys", "reset", "api", "ann"]).await;
    ended.expect_code(1);
    ended.expect_stderr("answered 403: nothing can be changed here without a token");
    ended.expect_stderr("(--config, or TIDEGATE_ADMIN__TOKEN_FILE)");
    assert!(!ended.stderr.contains("Authorization"), "{}", ended.stderr);
}

#[tokio::test]
async fn an_unknown_policy_is_an_error_of_every_command() {
    let redis = RedisServer::start();
    let log = TempDir::new().unwrap();
    let log = log.path().join("tidegate.log");
    fs::write(&log, "").unwrap();
    for store in [String::new(), redis.store_config()] {
        let proxy = Proxy::with_token(&format!("{store}\n{TWO_LIMITS}")).await;
        for words in [
            ["keys", "list", "--policy", "nope"].as_slice(),
            &["keys", "show", "nope", "ann"],
            &["keys", "reset", "nope", "ann"],
            &["overrides", "list", "nope"],
            &["overrides", "export", "nope"],
            &["overrides", "show", "nope", "ann"],
            &["overrides", "remove", "nope", "ann"],
            &["overrides", "set", "nope", "ann", "--block"],
            &[
                "why",
                "--policy",
                "nope",
                "--key",
                "ann",
                log.to_str().unwrap(),
            ],
        ] {
            let ended = proxy.run_command(words).await;
            assert_eq!(ended.status.code(), Some(1), "{words:?}: {}", ended.stdout);
            assert_eq!(ended.stdout, "", "{words:?}");
            assert!(
                ended.stderr.starts_with("error: ")
                    && ended
                        .stderr
                        .ends_with("unknown policy \"nope\"; expected one of api\n"),
                "{words:?}: {}",
                ended.stderr
            );
        }
    }
}

#[tokio::test]
async fn a_refused_connection_names_the_address_and_the_remedy() {
    let dir = TempDir::new().unwrap();
    let (config, port) = (dir.path().join("config.toml"), free_port());
    let base = format!("upstream.url = 'http://127.0.0.1:1'\nadmin.address = '127.0.0.1:{port}'\n");
    let redis =
        format!("[store]\nkind = 'redis'\n[store.redis]\nurl = 'redis://127.0.0.1:{port}/0'\n");
    for (store, words, remedy) in [
        ("", ["keys", "list"].as_slice(), "set admin.address"),
        ("", &["keys", "show", "api", "ann"], "set admin.address"),
        ("", &["overrides", "list"], "set admin.address"),
        ("", &["drain"], "set admin.address"),
        ("", &["health"], "set admin.address"),
        (
            redis.as_str(),
            &["keys", "list"],
            "check host and port, or path, in store.redis.url",
        ),
        (
            &redis,
            &["overrides", "list"],
            "check host and port, or path, in store.redis.url",
        ),
    ] {
        fs::write(&config, format!("{base}{store}{TWO_LIMITS}")).unwrap();
        let mut command = tidegate_command();
        command.env_remove("TIDEGATE_ADMIN__ADDRESS");
        let ended = run_command(command.args(words).arg("--config").arg(&config)).await;
        ended.expect_code(1);
        let text = &ended.stderr;
        assert!(
            text.contains(&format!("127.0.0.1:{port}")),
            "{words:?}: {text}"
        );
        assert!(
            text.to_lowercase().contains("connection refused") && text.contains(remedy),
            "{words:?}: {text}"
        );
    }
}

#[tokio::test]
async fn a_command_without_a_configuration_says_that_there_are_no_policies() {
    let dir = TempDir::new().unwrap();
    for (code, words) in [
        (1, &["overrides", "set", "api", "ann", "--block"][..]),
        (1, &["overrides", "list"]),
        (1, &["why", "--key", "ann", "log"]),
        (1, &["replay", "log"]),
        (0, &["explain", "GET", "/"]),
    ] {
        let mut command = tidegate_command();
        command.env_remove("TIDEGATE_ADMIN__ADDRESS");
        command.current_dir(dir.path());
        run_command(command.args(words))
            .await
            .expect_code(code)
            .expect_stderr("the configuration has no policies; expected --config");
    }
}

#[tokio::test]
async fn the_demo_says_what_to_do_about_a_busy_port() {
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = busy.local_addr().unwrap().to_string();
    for flags in [
        ["--admin", "127.0.0.1:0", "--listen", &address],
        ["--listen", "127.0.0.1:0", "--admin", &address],
    ] {
        let ended = run_command(tidegate_command().arg("demo").args(flags)).await;
        ended.expect_code(1);
        let expected = format!("error: cannot listen on {address}: Address already in use");
        assert!(ended.stderr.starts_with(&expected), "{}", ended.stderr);
        ended.expect_stderr(&format!("tidegate demo {} 127.0.0.1:0", flags[2]));
    }
}

#[tokio::test]
async fn the_demo_has_an_upstream_of_its_own_and_prints_its_addresses_as_json() {
    let config =
        ConfigFile::new("upstream = { url = 'https://app', tls = { server_name = 'app' } }\n");
    let flags = [
        "--json",
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "127.0.0.1:0",
    ];
    let mut command = tidegate_command();
    command
        .args(["demo", "--config"])
        .arg(config.path())
        .args(flags);
    let demo = ChildProcess::start(&mut command).unwrap();
    let parse = |line: &str| serde_json::from_str(line).ok();
    let has_proxy = |line: &Value| line.get("proxy").is_some();
    let addresses: Value = demo
        .wait_for("the addresses", 0, TEST_TIMEOUT, |line| {
            parse(&line.text).filter(has_proxy)
        })
        .await;
    for name in ["proxy", "admin", "upstream"] {
        let address = addresses[name].as_str().unwrap();
        assert!(address.starts_with("127.0.0.1:"), "{addresses}");
    }
}

#[tokio::test]
async fn help_offers_json_only_where_it_is_printed() {
    for command in ["completions", "man", "demo", "check"] {
        let help = run_command(tidegate_command().args([command, "--help"])).await;
        let is_offered = ["demo", "check"].contains(&command);
        assert_eq!(help.stdout.contains("--json"), is_offered, "{command}");
    }
    let manual = run_command(tidegate_command().args(["man", "--json"])).await;
    manual.expect_code(0).expect_stdout(".TH tidegate");
}

/// The audit lines of a text: message, policy, key as text, old and new rule, author.
fn audit_lines(text: &str) -> Vec<[String; 6]> {
    let lines = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let lines = lines.filter(|line| line["message"].as_str().unwrap().starts_with("override "));
    let fields = ["message", "policy", "override_key", "old", "new", "author"];
    lines
        .map(|line| {
            assert_eq!(line["key"].as_str().unwrap().len(), 32, "{line}");
            fields.map(|name| line[name].as_str().unwrap_or("-").to_owned())
        })
        .collect()
}

#[tokio::test]
async fn each_change_of_an_override_has_an_audit_line_with_the_old_and_the_new_value() {
    let redis = RedisServer::start();
    let set = |rule: &[&'static str]| [&["overrides", "set", "api", "ann"], rule].concat();
    for store in [String::new(), redis.store_config()] {
        let proxy = Proxy::with_token(&format!("{store}\n{TWO_LIMITS}")).await;
        if !store.is_empty() {
            proxy.wait_for_store().await;
        }
        let mut written = String::new();
        for words in [
            set(&["--requests", "5", "--limit", "minute", "--author", "eve"]),
            set(&[
                "--block",
                "--author",
                "mallory",
                "--note",
                "abuse",
                "--expires",
                "2h",
            ]),
            ["overrides", "remove", "api", "ann"].to_vec(),
            ["overrides", "remove", "api", "ann"].to_vec(),
        ] {
            let ended = proxy.run_command(&words).await;
            assert!(ended.status.success(), "{words:?}: {}", ended.stderr);
            written.push_str(&ended.stderr);
        }
        // With Redis, the command changes the store itself; otherwise the proxy does.
        if store.is_empty() {
            assert_eq!(written, "");
            written = proxy.log_text();
        }
        let line = |message: &str, old: &str, new: &str, author: &str| {
            [message, "api", "api/ann", old, new, author].map(str::to_owned)
        };
        let (set, removed) = (
            "override set by an operator",
            "override removed by an operator",
        );
        assert_eq!(
            audit_lines(&written),
            [
                line(set, "none", "minute 5", "eve"),
                line(set, "minute 5", "blocked", "mallory"),
                line(removed, "blocked", "none", "mallory"),
            ],
            "{store}: {written}"
        );
        assert_contains(&written, &["\"note\":\"abuse\"", "\"expires_at\":\"20"]);
    }
}

/// What `import` and `keys reset` change in Redis has the lines of `set` and of the proxy.
#[tokio::test]
async fn each_command_that_writes_to_redis_has_an_audit_line() {
    let redis = RedisServer::start();
    let proxy = Proxy::with_token(&format!("{}\n{TWO_LIMITS}", redis.store_config())).await;
    proxy.wait_for_store().await;
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("overrides.csv");
    let import = async |rows: &str, flag: &[&str]| {
        fs::write(&file, format!("policy,key,blocked,limits,author\n{rows}")).unwrap();
        let words = [&["overrides", "import", file.to_str().unwrap()], flag].concat();
        let ended = proxy.run_command(&words).await;
        assert!(ended.status.success(), "{}", ended.stderr);
        ended.stderr
    };
    let dry_run = import("api,ann,true,,eve\n", &["--dry-run"]).await;
    assert_eq!(audit_lines(&dry_run), [[""; 6]; 0]);
    let first = import("api,ann,true,,eve\napi,bob,,minute=5,eve\n", &[]).await;
    let mut lines = audit_lines(&first);
    lines.sort();
    let set = "override set by an operator";
    assert_eq!(
        lines,
        [
            [set, "api", "api/ann", "none", "blocked", "eve"],
            [set, "api", "api/bob", "none", "minute 5", "eve"],
        ]
    );
    let second = import("api,ann,,minute=7,mallory\n", &[]).await;
    assert_eq!(
        audit_lines(&second),
        [[set, "api", "api/ann", "blocked", "minute 7", "mallory"]]
    );

    assert_eq!(proxy.status_for_user("carl", "/").await, 200);
    let words = [
        "keys", "reset", "api", "carl", "--limit", "minute", "--json",
    ];
    let ended = proxy.run_command(&words).await;
    assert!(ended.status.success(), "{}", ended.stderr);
    let line: Value = serde_json::from_str(&ended.stderr).unwrap();
    let fields = ["message", "policy", "limit", "target"].map(|name| line[name].as_str().unwrap());
    assert_eq!(
        fields,
        ["key reset by an operator", "api", "minute", "audit"]
    );
    assert_eq!(line["counters"], 1);
    assert_eq!(line["key"].as_str().unwrap().len(), 32);
}
