//! `tidegate top`: as a table, as JSON, and live in a terminal that it gives back.

use crate::support::desk::Desk;
use crate::support::process::{Ended, run, signal, tidegate};
use crate::support::{SOON, eventually};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};
use tokio::time::timeout;

const TIDEGATE: &str = env!("CARGO_BIN_EXE_tidegate");

const POLICIES: &str = r#"
[[policy]]
name = "api"
key = ["header:x-user"]
limit = { requests = 2, per = "1h" }
[[policy]]
name = "candidate"
mode = "shadow"
limit = { requests = 100, per = "1h" }
"#;

const HOSTILE: &[u8] = b"\x1b[2Jann\xc2\x9b31m";

/// A proxy whose policy has refused somebody with a hostile name.
async fn desk() -> Desk {
    let desk = Desk::open(POLICIES).await;
    // A header's value may hold any byte but controls: an escape can't come this way, but in a path.
    for _ in 0..5 {
        let value = String::from_utf8_lossy(HOSTILE).replace('\u{1b}', "~");
        desk.proxy
            .ask("GET", "/%1b%5b2J")
            .header("x-user", &value)
            .status()
            .await;
    }
    desk.policy("api", |told| !told["last_hour"]["rejected"].is_null())
        .await;
    desk
}

async fn top(desk: &Desk, words: &[&str]) -> Ended {
    desk.command(&[&["top"], words].concat()).await
}

/// `tidegate top` in a terminal of 100 columns and 30 lines, made by `script`. What it is written is in what comes out.
struct Terminal {
    child: Child,
    seen: String,
    /// Holds the number of what runs in it.
    pid: PathBuf,
}

impl Terminal {
    fn open(desk: &Desk) -> Self {
        let pid = desk.dir().join("pid");
        let line = format!(
            "stty cols 100 rows 30; echo $$ > {pid:?}; exec {TIDEGATE:?} top --every 1 --config {:?}",
            desk.proxy.config_path(),
        );
        let child = Command::new("script")
            .args(["-qfec", &line, "/dev/null"])
            .env("TIDEGATE_ADMIN__ADDRESS", desk.proxy.admin().to_string())
            .env("TERM", "xterm")
            .env("LC_ALL", "C")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("script is part of every Debian");
        Self {
            child,
            seen: String::new(),
            pid,
        }
    }

    /// What runs in it.
    fn pid(&self) -> u32 {
        fs::read_to_string(&self.pid)
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    }

    async fn shows(&mut self, text: &str) {
        let found = async {
            while !self.seen.contains(text) {
                let mut bytes = [0; 4096];
                let read = self
                    .child
                    .stdout
                    .as_mut()
                    .unwrap()
                    .read(&mut bytes)
                    .await
                    .unwrap();
                assert!(read > 0, "it ended without {text:?}: {:?}", self.seen);
                self.seen.push_str(&String::from_utf8_lossy(&bytes[..read]));
            }
        };
        if timeout(SOON, found).await.is_err() {
            panic!("waited for {text:?}: {:?}", self.seen);
        }
    }

    async fn press(&mut self, keys: &str) {
        self.seen.clear();
        self.child
            .stdin
            .as_mut()
            .unwrap()
            .write_all(keys.as_bytes())
            .await
            .unwrap();
    }

    /// The other screen is left, the cursor is there again, and it has ended well.
    async fn comes_back(mut self) {
        self.shows("\u{1b}[?25h").await;
        self.shows("\u{1b}[?1049l").await;
        assert!(
            timeout(SOON, self.child.wait())
                .await
                .expect("it ends")
                .unwrap()
                .success(),
            "{:?}",
            self.seen
        );
    }
}

/// With `script` alone killed, what runs in it would go on if it doesn't notice, which is what is tested.
impl Drop for Terminal {
    fn drop(&mut self) {
        let Some(pid) = fs::read_to_string(&self.pid)
            .ok()
            .and_then(|pid| pid.trim().parse().ok())
        else {
            return;
        };
        // The number may be somebody else's by now.
        if fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == Path::new(TIDEGATE)) {
            signal(pid, "KILL");
        }
    }
}

fn is_harmless(text: &str) -> bool {
    text.chars()
        .all(|letter| letter == '\n' || (' '..='~').contains(&letter))
}

#[tokio::test]
async fn without_a_terminal_it_prints_a_table_once() {
    let desk = desk().await;
    for words in [&["--once"][..], &[]] {
        let ended = top(&desk, words).await;
        assert!(ended.status.success(), "{}", ended.stderr);
        let table = ended.stdout;
        assert!(is_harmless(&table), "{table:?}");
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
async fn json_is_what_the_admin_port_tells() {
    let desk = desk().await;
    let ended = top(&desk, &["--json"]).await;
    assert!(
        ended.status.success() && is_harmless(&ended.stdout),
        "{}{}",
        ended.stdout,
        ended.stderr
    );
    let told: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(told["overview"]["status"], "ready");
    assert_eq!(told["policies"]["policies"][0]["rejected"], 3);
    assert_eq!(told["top"]["keys"]["entries"][0]["count"], 3);
}

#[tokio::test]
async fn who_cannot_be_asked_is_an_error_with_a_reason() {
    let desk = desk().await;
    let mut command = tidegate();
    command
        .args(["top", "--once", "--config"])
        .arg(desk.proxy.config_path());
    let ended = run(command.env("TIDEGATE_ADMIN__ADDRESS", "127.0.0.1:9")).await;
    assert_eq!((ended.status.code(), ended.stdout.as_str()), (Some(1), ""));
    assert!(
        ended.stderr.starts_with("error: 127.0.0.1:9: "),
        "{}",
        ended.stderr
    );
    assert_eq!(top(&desk, &["--every", "0"]).await.status.code(), Some(2));
}

#[tokio::test]
async fn live_it_hears_keys_and_gives_the_terminal_back() {
    let desk = desk().await;
    let mut terminal = Terminal::open(&desk);
    terminal.shows("\u{1b}[?1049h").await;
    terminal.shows("60.0%").await;
    // Rates are there from the second look on.
    terminal.shows("refused/s").await;
    terminal.press("s").await;
    terminal.shows("sort: requests").await;
    terminal.press("p").await;
    terminal.shows("[paused]").await;
    assert!(
        !terminal.seen.contains('\u{9b}') && !terminal.seen.contains("\u{1b}[2Jann"),
        "{:?}",
        terminal.seen
    );
    terminal.press("q").await;
    terminal.comes_back().await;
}

#[tokio::test]
async fn a_signal_gives_the_terminal_back_too() {
    let desk = desk().await;
    let mut terminal = Terminal::open(&desk);
    terminal.shows("60.0%").await;
    terminal.seen.clear();
    assert!(signal(terminal.pid(), "TERM"));
    terminal.comes_back().await;
}

/// The window is closed: its program is not left behind, turning.
#[tokio::test]
async fn it_ends_with_its_terminal() {
    let desk = desk().await;
    // What it is doing at that moment makes a difference.
    for _ in 0..3 {
        let mut terminal = Terminal::open(&desk);
        terminal.shows("60.0%").await;
        let stat = format!("/proc/{}/stat", terminal.pid());
        assert!(fs::read_to_string(&stat).is_ok());
        terminal.child.kill().await.unwrap();
        eventually("its end", SOON, || {
            // Nobody may be there to ask how it ended.
            fs::read_to_string(&stat).map_or(Some(()), |stat| stat.contains(") Z ").then_some(()))
        })
        .await;
    }
}

#[tokio::test]
async fn an_instance_that_is_gone_is_told_and_what_was_seen_stays() {
    let desk = desk().await;
    let mut terminal = Terminal::open(&desk);
    terminal.shows("60.0%").await;
    desk.proxy.sigterm();
    terminal.seen.clear();
    terminal.shows("[NO ANSWER]").await;
    terminal.shows("60.0%").await;
    terminal.press("q").await;
    terminal.comes_back().await;
}
