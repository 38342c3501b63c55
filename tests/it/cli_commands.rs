//! The commands as users and scripts run them: request formats, JSON, help, completions, the
//! manual.

use crate::support::prelude::*;

const POLICIES: &str = r#"
[[policy]]
name = "login"
match = { methods = ["POST"], path = "/api/login" }
key = ["client_ip"]
limit = { requests = 5, per = "1m" }

[[policy]]
name = "api"
match = { path = "/api/**" }
key = ["header:x-user-id"]
limit = { requests = 100, per = "1m" }
"#;

struct ConfigDir(TempDir);

impl ConfigDir {
    fn new() -> Self {
        let config_dir = Self(TempDir::new().unwrap());
        fs::write(config_dir.0.path().join("config.toml"), POLICIES).unwrap();
        config_dir
    }

    async fn explain(&self, args: &[&str]) -> ProcessOutput {
        run_command(
            tidegate_command()
                .current_dir(self.0.path())
                .arg("explain")
                .args(args),
        )
        .await
    }
}

#[tokio::test]
async fn a_request_in_any_of_four_formats_gets_the_same_explanation() {
    let config_dir = ConfigDir::new();
    let plain = config_dir
        .explain(&[
            "POST",
            "http://shop.example/api/login",
            "-H",
            "x-user-id: ann",
        ])
        .await;
    plain.expect_stdout("api              matches: key api/ann, cost 1");
    let line = "curl -X POST http://shop.example/api/login -H 'x-user-id: ann'";
    let curl = config_dir.explain(&["--curl", line]).await;
    let words = [
        "--",
        "curl",
        "-d",
        "pw=x",
        "http://shop.example/api/login",
        "-H",
        "x-user-id: ann",
    ];
    let split = config_dir.explain(&words).await;
    let har = json!({ "log": { "entries": [{}, { "request": {
        "method": "POST", "url": "http://shop.example/api/login",
        "headers": [{ "name": "X-User-Id", "value": "ann" }],
    } }] } });
    fs::write(config_dir.0.path().join("session.har"), har.to_string()).unwrap();
    let from_har = config_dir
        .explain(&["--har", "session.har", "--entry", "2"])
        .await;
    for other in [&curl, &split, &from_har] {
        assert_eq!(other.stdout, plain.stdout, "{}", other.stderr);
    }
    assert_eq!(curl.stderr.as_str(), "");
    assert_eq!(from_har.stderr.as_str(), "note: entry 2 of 2\n");
}

#[tokio::test]
async fn invalid_requests_are_reported_on_stderr() {
    let config_dir = ConfigDir::new();
    fs::write(config_dir.0.path().join("no.har"), "{}").unwrap();
    for (args, code, why) in [
        (
            vec!["--curl", "wget x"],
            1,
            "a curl line must begin with curl",
        ),
        (
            vec!["--har", "no.har"],
            1,
            "not a HAR file: log.entries is missing",
        ),
        (vec!["--har", "none.har"], 1, "can't be read"),
        (vec!["POST", "a", "b"], 1, "expected METHOD and URL"),
        (vec![], 2, "required"),
        (
            vec!["--curl", "curl h", "GET", "/"],
            2,
            "cannot be used with",
        ),
        (vec!["--entry", "1", "GET", "/"], 2, "--entry"),
    ] {
        let output = config_dir.explain(&args).await;
        assert_eq!(
            (output.status.code(), output.stdout.as_str()),
            (Some(code), ""),
            "{args:?}: {}",
            output.stderr
        );
        output.expect_stderr(why);
    }
    // Control characters of pasted input do not reach the terminal.
    let output = config_dir
        .explain(&["--curl", "curl /api/x --frob\u{1b}[31m"])
        .await;
    output.expect_stderr("note: ignored: --frob\\u{1b}[31m");
}

#[tokio::test]
async fn explain_prints_json_for_scripts() {
    let config_dir = ConfigDir::new();
    let output = config_dir.explain(&["--json", "POST", "/api/login"]).await;
    let report: Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!(
        report["request"],
        json!({ "method": "POST", "url": "/api/login", "ip": "127.0.0.1" })
    );
    assert_eq!(report["policies"][0]["key"], "login/127.0.0.1");
    assert_eq!(report["policies"][0]["limits"][0]["requests"], 5);
    // The counters of the running proxy are not read here, so the output says nothing about them.
    assert_eq!(report["expected"]["decision"], Value::Null);
    assert_eq!(report["policies"][0]["limits"][0]["remaining"], Value::Null);
    let output = config_dir
        .explain(&["--json", "CONNECT", "http://h/"])
        .await;
    let report: Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!(report["expected"]["status"], 400);
}

const COMMANDS: [&str; 14] = [
    "run",
    "demo",
    "check",
    "schema",
    "explain",
    "doctor",
    "health",
    "drain",
    "replay",
    "why",
    "top",
    "keys",
    "completions",
    "man",
];

#[tokio::test]
async fn completions_and_the_manual_cover_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let script = run_command(tidegate_command().args(["completions", shell])).await;
        assert!(
            script.status.success() && COMMANDS.iter().all(|name| script.stdout.contains(name)),
            "{shell}"
        );
    }
    // bash is always installed, so the test checks that the script is valid bash and completes.
    let script = run_command(tidegate_command().args(["completions", "bash"]))
        .await
        .stdout;
    let ask = "COMP_WORDS=(tidegate expl); COMP_CWORD=1; _tidegate tidegate expl tidegate; echo \"${COMPREPLY[@]}\"";
    let mut bash = tokio::process::Command::new("bash");
    let completed = run_command(bash.args(["-c", &format!("{script}\n{ask}")])).await;
    assert_eq!(completed.stdout, "explain\n", "{}", completed.stderr);

    let page = run_command(tidegate_command().arg("man")).await.stdout;
    assert!(page.contains(".TH tidegate 1"), "{page}");
    for name in COMMANDS {
        assert!(
            page.contains(&format!(".SH COMMAND {}\n", name.to_uppercase())),
            "{name}"
        );
    }
}

/// Every example in the help is a command with valid arguments.
#[tokio::test]
async fn the_examples_in_the_help_are_valid_commands() {
    let mut tried = 0;
    for name in [""].into_iter().chain(COMMANDS) {
        let args: Vec<&str> = [name, "--help"]
            .into_iter()
            .filter(|arg| !arg.is_empty())
            .collect();
        let help = run_command(tidegate_command().args(&args)).await.stdout;
        let examples = help.lines().skip_while(|line| *line != "Examples:").skip(1);
        let examples = examples
            .map(str::trim_start)
            .take_while(|line| !line.is_empty());
        let mut any = false;
        for example in examples.filter(|line| line.contains("tidegate ")) {
            // Text after two spaces is a remark.
            let command = example.split("  ").next().unwrap();
            let words = shlex::split(command).unwrap_or_else(|| panic!("{command}"));
            let ours = words.iter().skip_while(|word| *word != "tidegate").skip(1);
            let ours = ours.take_while(|word| !["|", ">"].contains(&word.as_str()));
            let mut ours: Vec<&str> = ours.map(String::as_str).collect();
            // After `--`, an argument is not a flag.
            ours.insert(
                ours.iter()
                    .position(|word| *word == "--")
                    .unwrap_or(ours.len()),
                "--no-such-flag",
            );
            let output = run_command(tidegate_command().args(&ours)).await;
            // With `--json` the error is on stdout.
            let printed = output.stdout + &output.stderr;
            assert!(
                printed.contains("unexpected argument '--no-such-flag'"),
                "{command}: {printed}"
            );
            (any, tried) = (true, tried + 1);
        }
        assert!(any, "{name} has no examples:\n{help}");
    }
    assert!(tried > 15, "{tried}");
}
