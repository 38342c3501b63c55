//! Configurations that are large, malformed, or made of files that are no configuration.

use crate::support::prelude::*;
use crate::support::process::command_for;
use std::os::unix::fs::symlink;
use std::process::Command;

/// CPU time of a debug build; a release build takes a tenth. Work that grew by the square took
/// 10 s and more.
const MAX_CPU_TIME: Duration = Duration::from_secs(5);

const LIMIT: &str = "key = ['client_ip']\nlimit = { requests = 5, per = '1s' }";

/// Runs `check` and returns whether the file is valid, and the CPU time.
async fn measure_check(path: &Path) -> (bool, Duration) {
    let mut shell = command_for(Path::new("/bin/bash"));
    let script = r#""$0" check "$1" >/dev/null 2>&1; echo $?; times"#;
    shell.args(["-c", script, env!("CARGO_BIN_EXE_tidegate")]);
    let output = run_command(shell.arg(path)).await.stdout;
    let lines: Vec<&str> = output.lines().collect();
    // The last line has the user and system time of the children, such as "0m0.740s 0m0.150s".
    let seconds = lines[2].split_whitespace().map(|time| {
        let (minutes, seconds) = time.trim_end_matches('s').split_once('m').unwrap();
        minutes.parse::<f64>().unwrap() * 60.0 + seconds.parse::<f64>().unwrap()
    });
    (lines[0] == "0", Duration::from_secs_f64(seconds.sum()))
}

async fn check_config(dir: &TempDir, text: &str) -> ProcessOutput {
    let path = dir.path().join("config.toml");
    fs::write(&path, text).unwrap();
    run_command(tidegate_command().arg("check").arg(&path)).await
}

fn make_fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[tokio::test]
async fn large_and_malformed_files_are_checked_in_linear_time() {
    let dir = TempDir::new().unwrap();
    let repeat = |count: usize, policy: &dyn Fn(usize) -> String| {
        let policies: String = (0..count)
            .map(|n| {
                let conditions = policy(n);
                format!("[[policy]]\nname = 'p{n}'\nmatch = {{ {conditions} }}\n{LIMIT}\n")
            })
            .collect();
        format!("upstream.url = 'http://a'\n{policies}")
    };
    let shared_path = |action: &str| {
        repeat(10_000, &|n| {
            format!("path = '/x/**', not = {{ headers = {{ x-a = 'v{n}' }} }}")
        })
        .replace(LIMIT, action)
    };
    for (name, text, is_valid) in [
        (
            "paths",
            repeat(10_000, &|n| format!("path = '/a{n}/x'")),
            true,
        ),
        (
            "headers",
            repeat(5_000, &|n| format!("headers = {{ x-a = 'v{n}' }}")),
            true,
        ),
        (
            "keys that may be missing",
            repeat(10_000, &|n| format!("path = '/a{n}'")).replace(
                "key = ['client_ip']",
                "missing_key = 'skip'\nkey = ['header:x-user-id']",
            ),
            true,
        ),
        (
            "headers with limits",
            repeat(5_000, &|n| format!("path = '/a{n}', headers = {{ x-a = 'v{n}' }}"))
                .replace("requests = 5, per", "name = 'same', requests = 5, per"),
            true,
        ),
        (
            "excluded headers",
            repeat(5_000, &|n| {
                format!("path = '/a{n}', not = {{ headers = {{ x-a = 'v{n}' }} }}")
            }),
            true,
        ),
        ("denials below one path", shared_path("action = 'deny'"), true),
        ("exemptions below one path", shared_path("action = 'allow'"), true),
        ("limits below one path", shared_path(LIMIT), true),
        (
            "limits with one name below one path",
            shared_path(&LIMIT.replace("requests", "name = 'same', requests")),
            true,
        ),
        (
            "skippable keys below one path",
            shared_path(&LIMIT.replace("'client_ip'", "'header:x-user-id'"))
                .replace("match =", "missing_key = 'skip'\nmatch ="),
            true,
        ),
        (
            "headers that must be present",
            repeat(10_000, &|n| format!("path = '/x/**', headers = {{ x-a{n} = {{ present = true }} }}"))
                .replace(LIMIT, "action = 'deny'"),
            true,
        ),
        (
            "exceptions without a path",
            repeat(10_000, &|n| format!("not = {{ headers = {{ x-a = 'v{n}' }} }}")),
            true,
        ),
        (
            "exemptions before limits",
            repeat(5_000, &|n| format!("path = '/x/**', not = {{ path = '/x/p{n}' }}"))
                .replace(LIMIT, "action = 'allow'")
                + repeat(5_000, &|n| format!("path = '/x/p{n}'"))
                    .replace("name = 'p", "name = 'q")
                    .split_once('\n')
                    .unwrap()
                    .1,
            true,
        ),
        (
            "descriptors",
            repeat(10_000, &|n| {
                format!("domain = 'd', descriptors = {{ a = '*' }}, not = {{ descriptors = {{ a = 'v{n}' }} }}")
            })
            .replace("['client_ip']", "['descriptor']"),
            true,
        ),
        (
            "one counter",
            repeat(5_000, &|n| format!("path = '/a{n}'"))
                .replace("limit =", "counter = 'c'\nlimit ="),
            true,
        ),
        (
            "counters of one policy",
            format!(
                "upstream.url = 'http://a'\n{}",
                (0..5_000)
                    .map(|n| format!("[[policy]]\nname = 'p{n}'\ncounter = 'c{n}'\nlimit = {{ requests = 5, per = '1s' }}\n"))
                    .collect::<String>()
            ),
            true,
        ),
        (
            "one line",
            format!(
                "upstream.url = 'http://a'\npolicy = [{}]\n",
                (0..5_000)
                    .map(|n| format!("{{ name = 'p{n}', match = {{ path = '/a{n}' }}, key = ['header:x-user-id'], limit = {{ requests = 5, per = '1s' }} }}, "))
                    .collect::<String>()
            ),
            true,
        ),
        ("bad lines", "= \n".repeat(78 * 1024 / 3), false),
        ("a bad line", "= ".repeat(78 * 1024 / 2), false),
        (
            "unknown keys",
            (0..8_000).map(|n| format!("k{n}=1\n")).collect(),
            false,
        ),
    ] {
        let path = dir.path().join("large.toml");
        fs::write(&path, text).unwrap();
        let (was_valid, cpu_time) = measure_check(&path).await;
        println!("{name}: {cpu_time:?}");
        assert_eq!(was_valid, is_valid, "{name}");
        assert!(cpu_time < MAX_CPU_TIME, "{name}: {cpu_time:?}");
    }
}

#[tokio::test]
async fn only_regular_files_of_limited_size_are_read() {
    let dir = TempDir::new().unwrap();
    make_fifo(&dir.path().join("pipe.toml"));
    let large = fs::File::create(dir.path().join("large.toml")).unwrap();
    large.set_len(17 << 20).unwrap();
    for (file, problem) in [
        ("/dev/zero", "not a regular file"),
        ("pipe.toml", "not a regular file"),
        (".", "not a regular file"),
        ("large.toml", "larger than 16 MiB"),
    ] {
        let text = format!("upstream.url = 'http://a'\ninclude = ['{file}']");
        let checked = timeout(TEST_TIMEOUT, check_config(&dir, &text)).await;
        let output = checked.unwrap_or_else(|_| panic!("{file} is read without end"));
        assert!(output.stderr.contains(problem), "{file}: {}", output.stderr);
    }
}

#[tokio::test]
async fn a_pipe_in_the_configuration_stops_neither_reload_nor_shutdown() {
    let deny = "[[policy]]\nname = 'deny'\naction = 'deny'\n";
    let mut proxy = Proxy::with_echo(deny).await;
    let pipe = proxy.config_path().with_file_name("pipe.toml");
    make_fifo(&pipe);
    let mark = proxy.log_mark();
    proxy.write_config("include = ['pipe.toml', '/dev/zero']");
    proxy.send_sighup();
    let is_rejection = |line: &LogLine| line.contains("not a regular file");
    proxy
        .wait_for_log("a rejection", mark, TEST_TIMEOUT, is_rejection)
        .await;
    assert!(proxy.rss_kib() < 300 * 1024, "{} KiB", proxy.rss_kib());
    proxy.write_config("");
    proxy.send_sighup();
    proxy.wait_for_message("configuration reloaded", mark).await;
    assert_eq!(proxy.get("/").await.status, 200);
    proxy.send_sigterm();
    let output = proxy.wait_for_exit(Duration::from_secs(15)).await;
    assert!(output.status.success());
}

#[tokio::test]
async fn secrets_are_never_printed() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("secret"), "hunter2-line\nb = 'hunter2'\n").unwrap();
    fs::write(dir.path().join("key.pem"), "hunter2 = { x = 'hunter2' \n").unwrap();
    symlink("secret", dir.path().join("link.toml")).unwrap();
    for text in [
        "include = ['secret']",
        "include = ['key.pem']",
        "include = ['link.toml']",
        "include = ['*.toml']",
        "store.backend = 'redis'\nstore.redis.url = 'user:hunter2@host:6379'",
        "store.backend = 'redis'\nstore.redis.url = ':hunter2@host'",
        "upstream.url = 'user:hunter2@host'",
        "upstream.url = 'user:hunter2aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa@host'",
        "trace.otlp = 'user:hunter2@host'",
    ] {
        let text = format!("upstream.url = 'http://a'\n{text}");
        let text = match text.matches("upstream.url").count() {
            2 => text.split_once('\n').unwrap().1,
            _ => &text,
        };
        let output = check_config(&dir, text).await;
        assert!(!output.status.success(), "{text}");
        let printed = output.stdout + &output.stderr;
        assert!(!printed.contains("hunter2"), "{text}: {printed}");
    }
}
