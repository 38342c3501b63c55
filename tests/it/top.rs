//! `tidegate top`: the table, the JSON output, and the live view, which must restore the terminal.

use crate::support::prelude::*;
use crate::support::process::send_signal_to;
use std::process::Stdio;
use tokio::process::{Child, Command};

const TIDEGATE_BINARY: &str = env!("CARGO_BIN_EXE_tidegate");

const POLICIES: &str = r#"
path.control_characters = "allow"
[[policy]]
name = "api"
key = ["header:x-user"]
limit = { requests = 2, per = "1h" }
[[policy]]
name = "candidate"
mode = "shadow"
limit = { requests = 100, per = "1h" }
"#;

const HOSTILE_USER: &[u8] = b"\x1b[2Jann\xc2\x9b31m";

/// A proxy whose policy has rejected a user with terminal escapes in its name.
async fn start_fixture() -> Proxy {
    let fixture = Proxy::with_token(POLICIES).await;
    // A header value cannot hold control characters, so the escape is sent in the path only.
    for _ in 0..5 {
        let value = String::from_utf8_lossy(HOSTILE_USER).replace('\u{1b}', "~");
        fixture.get_with("/%1b%5b2J", "x-user", &value).await;
    }
    fixture
        .wait_for_policy("api", |policy| !policy["last_hour"]["rejected"].is_null())
        .await;
    fixture
}

async fn run_top(fixture: &Proxy, words: &[&str]) -> ProcessOutput {
    fixture.run_command(&[&["top"], words].concat()).await
}

/// `tidegate top` in a terminal of 100 columns and 30 lines, created by `script`. `output` holds
/// everything printed.
struct Terminal {
    child: Child,
    output: String,
    /// Holds the process id of the child that runs in the terminal.
    pid_file: PathBuf,
}

impl Terminal {
    fn open(fixture: &Proxy) -> Self {
        let pid = fixture.dir().join("pid");
        let line = format!(
            "stty cols 100 rows 30; echo $$ > {pid:?}; exec {TIDEGATE_BINARY:?} top --every 1 --config {:?}",
            fixture.config_path(),
        );
        let child = Command::new("script")
            .args(["-qfec", &line, "/dev/null"])
            .env(
                "TIDEGATE_ADMIN__ADDRESS",
                fixture.admin_address().to_string(),
            )
            .env("TERM", "xterm")
            .env("LC_ALL", "C")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("script is part of every Debian");
        Self {
            child,
            output: String::new(),
            pid_file: pid,
        }
    }

    /// The process id of the child that runs in the terminal.
    fn child_pid(&self) -> u32 {
        fs::read_to_string(&self.pid_file)
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    }

    async fn wait_for_output(&mut self, text: &str) {
        let found = async {
            while !self.output.contains(text) {
                let mut bytes = [0; 4096];
                let read = self
                    .child
                    .stdout
                    .as_mut()
                    .unwrap()
                    .read(&mut bytes)
                    .await
                    .unwrap();
                assert!(
                    read > 0,
                    "the terminal closed without {text:?}: {:?}",
                    self.output
                );
                self.output
                    .push_str(&String::from_utf8_lossy(&bytes[..read]));
            }
        };
        if timeout(TEST_TIMEOUT, found).await.is_err() {
            panic!("waited for {text:?}: {:?}", self.output);
        }
    }

    async fn type_keys(&mut self, keys: &str) {
        self.output.clear();
        self.child
            .stdin
            .as_mut()
            .unwrap()
            .write_all(keys.as_bytes())
            .await
            .unwrap();
    }

    /// Checks that the alternate screen was left, the cursor is visible, and the process succeeded.
    async fn assert_restored(mut self) {
        self.wait_for_output("\u{1b}[?25h").await;
        self.wait_for_output("\u{1b}[?1049l").await;
        assert!(
            timeout(TEST_TIMEOUT, self.child.wait())
                .await
                .expect("the process must exit")
                .unwrap()
                .success(),
            "{:?}",
            self.output
        );
    }
}

/// Killing `script` alone may leave its child running: the tests check exactly that.
impl Drop for Terminal {
    fn drop(&mut self) {
        let Some(pid) = fs::read_to_string(&self.pid_file)
            .ok()
            .and_then(|pid| pid.trim().parse().ok())
        else {
            return;
        };
        // Another process may have this id by now.
        if fs::read_link(format!("/proc/{pid}/exe"))
            .is_ok_and(|exe| exe == Path::new(TIDEGATE_BINARY))
        {
            send_signal_to(pid, "KILL");
        }
    }
}

fn is_printable_ascii(text: &str) -> bool {
    text.chars()
        .all(|letter| letter == '\n' || (' '..='~').contains(&letter))
}

#[tokio::test]
async fn without_a_terminal_it_prints_a_table_once() {
    let fixture = start_fixture().await;
    for words in [&["--once"][..], &[]] {
        let ended = run_top(&fixture, words).await;
        assert!(ended.status.success(), "{}", ended.stderr);
        let table = ended.stdout;
        assert!(is_printable_ascii(&table), "{table:?}");
        let line = |start: &str| {
            table
                .lines()
                .find(|line| line.starts_with(start))
                .unwrap_or_else(|| panic!("{table}"))
        };
        assert!(line("tidegate ").contains("  ready  instance "), "{table}");
        assert!(line("store ").contains("memory up"), "{table}");
        let cells: Vec<&str> = line("api ").split_whitespace().take(4).collect();
        assert_eq!(cells, ["api", "2", "3", "60.0%"], "{table}");
        assert!(line("candidate ").contains("shadow"), "{table}");
        assert!(
            table.to_ascii_lowercase().contains("3 api  /%1b"),
            "{table}"
        );
    }
}

#[tokio::test]
async fn json_output_has_the_admin_data() {
    let fixture = start_fixture().await;
    let ended = run_top(&fixture, &["--json"]).await;
    assert!(
        ended.status.success() && is_printable_ascii(&ended.stdout),
        "{}{}",
        ended.stdout,
        ended.stderr
    );
    let json: Value = ended.json();
    assert_eq!(json["overview"]["status"], "ready");
    assert_eq!(json["policies"]["policies"][0]["rejected"], 3);
    assert_eq!(json["top"]["keys"]["entries"][0]["count"], 3);
}

#[tokio::test]
async fn an_unreachable_admin_port_is_an_error_with_its_address() {
    let fixture = start_fixture().await;
    let mut command = tidegate_command();
    command
        .args(["top", "--once", "--config"])
        .arg(fixture.config_path());
    let ended = run_command(command.env("TIDEGATE_ADMIN__ADDRESS", "127.0.0.1:9")).await;
    assert_eq!((ended.status.code(), ended.stdout.as_str()), (Some(1), ""));
    assert_starts(&ended.stderr, "error: 127.0.0.1:9: ");
    for interval in ["0", "61", "500ms", "x"] {
        let ended = run_top(&fixture, &["--every", interval]).await;
        assert_eq!(ended.status.code(), Some(2));
        let expected = "expected a duration from 1s to 60s";
        assert!(ended.stderr.contains(expected), "{}", ended.stderr);
    }
    for words in [
        &["--once", "--json", "--every", "1s"][..],
        &["--json", "--every", "60"],
    ] {
        let json: Value = run_top(&fixture, words).await.json();
        assert_eq!(json["overview"]["status"], "ready");
    }
}

#[tokio::test]
async fn the_live_view_handles_keys_and_restores_the_terminal() {
    let fixture = start_fixture().await;
    let mut terminal = Terminal::open(&fixture);
    terminal.wait_for_output("\u{1b}[?1049h").await;
    terminal.wait_for_output("60.0%").await;
    // Rates are shown from the second refresh on.
    terminal.wait_for_output("refused/s").await;
    terminal.type_keys("s").await;
    terminal.wait_for_output("sort: requests").await;
    terminal.type_keys("p").await;
    terminal.wait_for_output("[paused]").await;
    assert!(
        !terminal.output.contains('\u{9b}') && !terminal.output.contains("\u{1b}[2Jann"),
        "{:?}",
        terminal.output
    );
    terminal.type_keys("q").await;
    terminal.assert_restored().await;
}

#[tokio::test]
async fn a_signal_restores_the_terminal() {
    let fixture = start_fixture().await;
    let mut terminal = Terminal::open(&fixture);
    terminal.wait_for_output("60.0%").await;
    terminal.output.clear();
    assert!(send_signal_to(terminal.child_pid(), "TERM"));
    terminal.assert_restored().await;
}

/// A closed terminal window does not leave a spinning process behind.
#[tokio::test]
async fn it_exits_when_its_terminal_closes() {
    let fixture = start_fixture().await;
    // The outcome depends on the state of the process at that moment, hence three attempts.
    for _ in 0..3 {
        let mut terminal = Terminal::open(&fixture);
        terminal.wait_for_output("60.0%").await;
        let stat = format!("/proc/{}/stat", terminal.child_pid());
        assert!(fs::read_to_string(&stat).is_ok());
        terminal.child.kill().await.unwrap();
        eventually("its end", TEST_TIMEOUT, async || {
            // The process may be a zombie, because nothing reaps it.
            fs::read_to_string(&stat).map_or(Some(()), |stat| stat.contains(") Z ").then_some(()))
        })
        .await;
    }
}

#[tokio::test]
async fn an_unreachable_instance_is_shown_and_the_last_data_stays() {
    let fixture = start_fixture().await;
    let mut terminal = Terminal::open(&fixture);
    terminal.wait_for_output("60.0%").await;
    fixture.send_sigterm();
    terminal.output.clear();
    terminal.wait_for_output("[NO ANSWER]").await;
    terminal.wait_for_output("60.0%").await;
    terminal.type_keys("q").await;
    terminal.assert_restored().await;
}

/// The system accepts the connection, and nothing answers.
#[tokio::test]
async fn an_admin_port_that_does_not_answer_is_an_error_within_seconds() {
    let fixture = start_fixture().await;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let run = async |words: &[&str]| {
        let mut command = tidegate_command();
        command.arg("top").args(words).arg("--config");
        command.arg(fixture.config_path());
        let started_at = Instant::now();
        let ended = run_command(command.env("TIDEGATE_ADMIN__ADDRESS", &address)).await;
        assert!(started_at.elapsed() < Duration::from_secs(6), "{words:?}");
        ended.expect_code(1);
        let expected = format!("{address}: no answer within 2 s");
        // With --json, errors are JSON on stdout.
        let text = ended.stdout + &ended.stderr;
        assert!(text.contains(&expected), "{words:?}: {text}");
    };
    tokio::join!(
        run(&["--once"]),
        run(&["--json"]),
        run(&["--fleet", "--once"])
    );
}

#[tokio::test]
async fn the_live_view_says_that_it_tries_again() {
    let fixture = start_fixture().await;
    let mut terminal = Terminal::open(&fixture);
    terminal.wait_for_output("60.0%").await;
    fixture.pause();
    terminal.output.clear();
    let address = fixture.admin_address();
    let expected = format!("{address}: no answer within 2 s; trying again every 1 s");
    terminal.wait_for_output(&expected).await;
    fixture.resume();
    terminal.output.clear();
    terminal.wait_for_output("60.0%").await;
    terminal.type_keys("q").await;
    terminal.assert_restored().await;
}
