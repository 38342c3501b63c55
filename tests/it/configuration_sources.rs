//! The flags that all commands share: configuration files, stdin, `TIDEGATE_CONFIG`, `--json`.

use crate::support::prelude::*;
use std::process::Stdio;
use tokio::process::Command;

const VALID: &str = "upstream.url = 'http://127.0.0.1:3000'\n[[policy]]\nname = 'login'\nkey = ['client_ip']\nlimit = { requests = 5, per = '1m' }\n";
const INVALID: &str = "upstream.url = 'http://127.0.0.1:3000'\n[log]\nlevel = 'loud'\n";

/// A command in an empty directory.
fn command_in(dir: &TempDir, words: &[&str]) -> Command {
    let mut command = tidegate_command();
    command.current_dir(dir.path()).args(words);
    command
}

async fn run_in(dir: &TempDir, words: &[&str]) -> ProcessOutput {
    run_command(&mut command_in(dir, words)).await
}

async fn run_with_stdin(command: &mut Command, text: &str) -> std::process::Output {
    let pipes = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = pipes.kill_on_drop(true).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(text.as_bytes()).await.unwrap();
    drop(stdin);
    child.wait_with_output().await.unwrap()
}

fn write(dir: &TempDir, name: &str, text: &str) {
    fs::write(dir.path().join(name), text).unwrap();
}

#[tokio::test]
async fn check_reads_several_files_flags_stdin_and_the_variable() {
    let dir = TempDir::new().unwrap();
    write(&dir, "a.toml", VALID);
    write(&dir, "b.toml", &VALID.replace("login", "other"));
    write(&dir, "bad.toml", INVALID);

    let both = run_in(&dir, &["check", "a.toml", "--config", "b.toml"]).await;
    assert!(both.status.success(), "{}", both.stderr);
    for text in ["a.toml:\n", "b.toml:\n", "login: ", "other: "] {
        both.expect_stdout(text);
    }

    let one_bad = run_in(&dir, &["check", "a.toml", "bad.toml"]).await;
    one_bad.expect_code(1).expect_stdout("login: ");
    one_bad.expect_stderr("bad.toml:3:9: log.level");

    let json = run_in(&dir, &["check", "--json", "a.toml", "bad.toml"]).await;
    let report: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!((json.status.code(), json.stderr.as_str()), (Some(1), ""));
    assert_eq!(report["ok"], false);
    assert_eq!(report["files"][0]["ok"], true);
    assert_eq!(report["files"][1]["file"], "bad.toml");
    assert_eq!(report["files"][1]["errors"][0]["key"], "log.level");

    let mut from_variable = command_in(&dir, &["check"]);
    let from_variable = run_command(from_variable.env("TIDEGATE_CONFIG", "b.toml")).await;
    from_variable.expect_stdout("other: ");

    for words in [["check", "-"].as_slice(), &["check", "--config", "-"]] {
        let output = run_with_stdin(&mut command_in(&dir, words), INVALID).await;
        assert_eq!(output.status.code(), Some(1));
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(
            stderr.starts_with("error: <stdin>:3:9: log.level: found 'loud'")
                && stderr.contains("    3 | level = 'loud'"),
            "{stderr}"
        );
    }
    let several = run_in(
        &dir,
        &[
            "explain", "--config", "a.toml", "--config", "b.toml", "GET", "/",
        ],
    )
    .await;
    several.expect_stderr("only check reads several");
}

#[tokio::test]
async fn commands_work_without_a_file_in_the_working_directory() {
    let dir = TempDir::new().unwrap();
    let explained = run_in(&dir, &["explain", "GET", "/"]).await;
    explained.expect_stdout("no limit applies");

    let redis = RedisServer::start();
    let mut keys = command_in(&dir, &["keys", "list"]);
    let url = format!("redis://127.0.0.1:{}", redis.port());
    let listed = run_command(keys.env("TIDEGATE_STORE__REDIS__URL", url)).await;
    assert!(listed.status.success(), "{}", listed.stderr);
    assert!(listed.stdout.contains("COUNTED BY"), "{}", listed.stderr);

    // Without a proxy, `top` and `health` fail because of the admin port, not of the file.
    for command in ["top", "health", "drain"] {
        let mut command = command_in(&dir, &[command]);
        let output = run_command(command.env("TIDEGATE_ADMIN__ADDRESS", "127.0.0.1:1")).await;
        output.expect_code(1);
        assert_starts(&output.stderr, "error: 127.0.0.1:1: ");
    }
}

#[tokio::test]
async fn with_json_errors_are_json_on_stdout() {
    let dir = TempDir::new().unwrap();
    write(
        &dir,
        "bad.toml",
        &format!("{INVALID}[admin]\nprobes = 'x'\n"),
    );
    fs::write(dir.path().join("log"), "").unwrap();
    for words in [
        ["run"].as_slice(),
        &["demo"],
        &["check"],
        &["explain", "GET", "/"],
        &["health"],
        &["drain"],
        &["replay", "log"],
        &["top"],
        &["keys", "list"],
    ] {
        for placement in [
            [words, &["--json", "--config", "bad.toml"]].concat(),
            [&words[..1], &["--config=bad.toml", "--json"], &words[1..]].concat(),
        ] {
            let output = run_in(&dir, &placement).await;
            assert_eq!(output.status.code(), Some(1), "{placement:?}");
            assert_eq!(output.stderr.as_str(), "", "{placement:?}");
            let report: Value = serde_json::from_str(&output.stdout).unwrap();
            let items = report["errors"].as_array().unwrap().iter();
            let keys: Vec<&str> = items.map(|error| error["key"].as_str().unwrap()).collect();
            assert_eq!(report["ok"], false, "{placement:?}");
            assert!(
                keys.contains(&"admin.probes"),
                "{placement:?}: {}",
                output.stdout
            );
            assert_eq!(report["errors"][0]["source"], "bad.toml");
        }
    }
    // Other failures, and errors of the command line.
    for (words, code, problem) in [
        (["keys", "list", "--json"].as_slice(), 1, "127.0.0.1:1: "),
        (&["top", "--json"], 1, "127.0.0.1:1: "),
        (
            &["check", "--json", "--frob"],
            2,
            "unexpected argument '--frob'",
        ),
    ] {
        let mut command = command_in(&dir, words);
        let output = run_command(command.env("TIDEGATE_ADMIN__ADDRESS", "127.0.0.1:1")).await;
        assert_eq!(output.status.code(), Some(code), "{words:?}");
        assert_eq!(output.stderr.as_str(), "", "{words:?}");
        let report: Value = serde_json::from_str(&output.stdout).unwrap();
        let found = report["errors"][0]["problem"].as_str().unwrap();
        assert!(found.contains(problem), "{found}");
    }
}

/// Commands that never connect to the upstream need no URL, and one in the file counts: settings of
/// TLS are for https only.
#[tokio::test]
async fn commands_without_a_proxy_read_the_upstream_of_the_file() {
    let dir = TempDir::new().unwrap();
    let authority = CertificateAuthority::new();
    let ca = authority.path_string("ca.pem");
    let policy =
        "[[policy]]\nname = 'api'\nkey = ['client_ip']\nlimit = { requests = 9, per = '1h' }\n";
    let with_tls = format!("[upstream]\nurl = 'https://a.test'\n[upstream.tls]\nca = {ca:?}\n");
    for upstream in [with_tls.as_str(), ""] {
        fs::write(dir.path().join("config.toml"), [upstream, policy].concat()).unwrap();
        for words in [["explain", "GET", "/"].as_slice(), &["doctor"]] {
            let output = run_command(&mut command_in(&dir, words)).await;
            let found = output.status.code();
            assert_eq!(found, Some(0), "{words:?}: {}", output.stderr);
        }
    }
}

#[tokio::test]
async fn strict_fails_on_every_warning() {
    let dir = TempDir::new().unwrap();
    for (text, warning) in [
        (
            "upstream.url = 'http://a'\n".to_owned(),
            "there is no [[policy]]",
        ),
        (
            format!("include = ['x/*.toml']\n{VALID}"),
            "\"x/*.toml\" matches no file",
        ),
        (
            VALID.replace("key =", "match = { methods = ['PSOT'] }\nkey ="),
            "did you mean \"POST\"?",
        ),
        (
            VALID.replace("key =", "match = { path = '/users/:id' }\nkey ="),
            "did you mean \"/users/{id}\"?",
        ),
        (
            format!("{VALID}[store.redis]\ntimeout = '1s'\n"),
            "not used: the store is \"memory\"",
        ),
        (
            VALID.replace("'client_ip'", "'client_ip', 'header:x-plan'")
                + "[[policy.override]]\nkey = ['*', 'pro']\nlimit = { requests = 6, per = '1m' }\n",
            "a client that sends this x-plan gets the higher limit",
        ),
        (
            VALID.replace(
                "key =",
                "match = { not = { headers = { x-plan = 'pro' } } }\nkey =",
            ),
            "a client that sends the header x-plan avoids this policy",
        ),
        (
            VALID.replace(
                "key = ['client_ip']\nlimit = { requests = 5, per = '1m' }",
                "action = 'allow'\nmatch = { headers = { x-internal = '1' } }",
            ),
            "a client that sends the header x-internal is exempt",
        ),
    ] {
        write(&dir, "config.toml", &text);
        for (flags, code) in [(["check"].as_slice(), 0), (&["check", "--strict"], 1)] {
            let output = run_in(&dir, flags).await;
            let found = output.status.code();
            assert_eq!(found, Some(code), "{flags:?} {}", output.stderr);
            assert_contains(&output.stderr, &["warning: ", warning]);
        }
    }
}

#[tokio::test]
async fn a_header_that_the_gateway_sets_is_no_warning() {
    let dir = TempDir::new().unwrap();
    let policy = VALID.replace("'client_ip'", "'client_ip', 'header:x-plan'")
        + "[[policy.override]]\nkey = ['*', 'pro']\nlimit = { requests = 6, per = '1m' }\n";
    write(
        &dir,
        "config.toml",
        &format!("client.trusted_headers = ['X-Plan']\n{policy}"),
    );
    let output = run_in(&dir, &["check", "--strict"]).await;
    output.expect_code(0);
}

const WITH_FILES: &str = "
upstream.url = 'https://app.internal:8443'
upstream.max_tunnels_per_client = 64
upstream.tls = { ca = '/none/ca', cert = '/none/cert', key = '/none/key' }
listen = { address = '0.0.0.0:8443', tls = { cert = '/none/cert', key = '/none/key', client_auth = 'require', client_ca = '/none/ca' } }
admin = { address = '0.0.0.0:9090', token_file = '/none/token', probes = '0.0.0.0:9091' }
client.jwt.keys_file = '/none/jwks.json'
client.hash_secret_file = '/none/hash'
metrics = { otlp = 'http://127.0.0.1:4317', headers_file = '/none/headers' }
[store]
state_dir = '/none/state'
redis = { url = 'rediss://ann:hunter2@redis.internal:6380/2', key_prefix = 'shop', ca = '/none/ca' }
[[policy]]
name = 'user'
key = ['jwt:sub']
limit = { requests = 5, per = '1m' }
missing_key = 'reject'
[[policy]]
name = 'key'
key = ['header:x-api-key', 'client_ip']
limit = { requests = 5, per = '1m' }
[[policy]]
name = 'tenant'
match = { query = { tenant = { present = true } } }
key = ['query:tenant']
limit = { requests = 5, per = '1m' }
missing_key = 'skip'
[[policy]]
name = 'client'
key = ['client_ip']
limit = { requests = 500, per = '1m' }
";

#[tokio::test]
async fn check_works_without_the_files_and_prints_addresses_and_missing_keys() {
    let dir = TempDir::new().unwrap();
    write(&dir, "config.toml", WITH_FILES);
    let without = run_in(&dir, &["check", "--no-files", "--strict"]).await;
    without.expect_code(0);
    for line in [
        "listen: 0.0.0.0:8443, TLS",
        "upstream: https://app.internal:8443",
        "store: redis, redis.internal:6380, database 2, TLS, key prefix \"shop\"",
        "probes: 0.0.0.0:9091",
    ] {
        let found = without.stdout.lines().any(|found| found == line);
        assert!(found, "{line}: {}", without.stdout);
    }
    for text in [
        "; without claim sub: rejected;",
        "; without header x-api-key: one quota for all such requests;",
    ] {
        without.expect_stdout(text);
    }
    assert_lacks(&without.stdout, &["without query"]);
    without.expect_stderr("--no-files");
    let all = without.stdout + &without.stderr;
    assert!(!all.contains("hunter2") && !all.contains("ann"), "{all}");

    let json = run_in(&dir, &["check", "--no-files", "--json"]).await;
    let json: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(json["addresses"]["upstream"], "https://app.internal:8443");
    assert_eq!(json["files_read"], false);

    let with = run_in(&dir, &["check"]).await;
    with.expect_code(1);
    for key in [
        "listen.tls.cert",
        "upstream.tls.ca",
        "admin.token_file",
        "client.jwt.keys_file",
        "client.hash_secret_file",
        "metrics.headers_file",
        "store.state_dir",
        "store.redis.ca",
    ] {
        with.expect_stderr(key);
    }
    // Mistakes other than absent files are still found.
    let mistake = WITH_FILES.replace("client_ca = '/none/ca'", "client_crl = '/none/crl'");
    write(&dir, "config.toml", &mistake);
    let mistaken = run_in(&dir, &["check", "--no-files"]).await;
    mistaken
        .expect_code(1)
        .expect_stderr("expected client_ca too");
}

#[tokio::test]
async fn the_schema_command_prints_the_shipped_schema() {
    let dir = TempDir::new().unwrap();
    let output = run_in(&dir, &["schema"]).await;
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("config.schema.json");
    assert_eq!(output.stdout, fs::read_to_string(shipped).unwrap());
}
