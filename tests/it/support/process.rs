//! A child process with its output kept line by line.

use super::prelude::*;
use std::io;
use std::process::{ExitStatus, Stdio};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::time::Instant;

/// The binary under test.
pub fn tidegate_command() -> Command {
    command_for(Path::new(env!("CARGO_BIN_EXE_tidegate")))
}

/// Runs `check` with a configuration that needs no upstream of its own.
pub async fn run_check(config: &str) -> ProcessOutput {
    let file = ConfigFile::new(&format!("upstream.url = 'http://127.0.0.1:1'\n{config}"));
    file.run(&["check"]).await
}

/// A configuration file in its own directory, and the commands that read it.
#[derive(Debug)]
pub struct ConfigFile(TempDir);

impl ConfigFile {
    pub fn new(text: &str) -> Self {
        let file = Self(TempDir::new().unwrap());
        file.write(text);
        file
    }

    pub fn write(&self, text: &str) {
        fs::write(self.path(), text).unwrap();
    }

    pub fn path(&self) -> PathBuf {
        self.beside("config.toml")
    }

    /// The path of another file in the directory.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A command with this configuration.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = tidegate_command();
        command.args(words).arg("--config").arg(self.path());
        command
    }

    /// Runs a command with this configuration.
    pub async fn run(&self, words: &[&str]) -> ProcessOutput {
        run_command(&mut self.command(words)).await
    }

    /// Starts `run` with this configuration and further options.
    pub fn start(&self, options: &[&str]) -> ChildProcess {
        let mut command = self.command(&["run"]);
        ChildProcess::start(command.args(options)).unwrap()
    }

    /// As [`Self::run`]. Returns the output of a command that must succeed.
    pub async fn run_successfully(&self, words: &[&str]) -> String {
        self.run(words).await.into_stdout()
    }
}

/// A binary of any version, with an environment for tests.
pub fn command_for(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("RUST_BACKTRACE", "1");
    // Tests run in parallel, so the admin listener gets an ephemeral port.
    command.env("TIDEGATE_ADMIN__ADDRESS", "127.0.0.1:0");
    command
}

/// A running child process. It is killed on drop.
#[derive(Debug)]
pub struct ChildProcess {
    command: String,
    child: Child,
    lines: Arc<Mutex<Vec<OutputLine>>>,
    readers: [JoinHandle<()>; 2],
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputLine {
    pub stderr: bool,
    pub text: String,
}

impl OutputLine {
    /// The address in a log line whose message starts with these words.
    pub fn address(&self, message: &str) -> Option<SocketAddr> {
        let line = LogLine::parse(&self.text)?;
        let is_meant = line.message_starts_with(message);
        is_meant.then(|| line.field("address").parse().unwrap())
    }
}

/// The exit status of a child process and all its output.
#[derive(Debug)]
pub struct ProcessOutput {
    /// The command with its arguments.
    pub command: String,
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl ProcessOutput {
    pub fn expect_code(&self, code: i32) -> &Self {
        assert_eq!(
            self.status.code(),
            Some(code),
            "{}: {self:#?}",
            self.command
        );
        self
    }

    pub fn expect_stdout(&self, words: &str) -> &Self {
        assert!(self.stdout.contains(words), "no {words:?}: {self:#?}");
        self
    }

    pub fn expect_stderr(&self, words: &str) -> &Self {
        assert!(self.stderr.contains(words), "no {words:?}: {self:#?}");
        self
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }

    /// The standard output of a command that succeeded.
    pub fn into_stdout(self) -> String {
        self.expect_code(0);
        self.stdout
    }
}

impl Drop for ChildProcess {
    #[allow(clippy::print_stderr, reason = "the output of a failed test")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("output of the process:\n{}", self.transcript());
        }
    }
}

impl ChildProcess {
    pub fn start(command: &mut Command) -> io::Result<Self> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn()?;
        let lines = Arc::default();
        let stdout = child.stdout.take().expect("stdout is piped");
        let stderr = child.stderr.take().expect("stderr is piped");
        let readers = [
            spawn_output_reader(stdout, false, &lines),
            spawn_output_reader(stderr, true, &lines),
        ];
        Ok(Self {
            command: format!("{:?}", command.as_std()),
            child,
            lines,
            readers,
        })
    }

    /// All lines so far.
    pub fn lines(&self) -> Vec<OutputLine> {
        self.lines.lock().unwrap().clone()
    }

    /// The output so far, for assertion messages.
    pub fn transcript(&self) -> String {
        self.lines()
            .iter()
            .map(|line| format!("{}\n", line.text))
            .collect()
    }

    /// Returns the first result of `found`, over the lines from number `from` on.
    pub async fn wait_for<T>(
        &self,
        what: &str,
        from: usize,
        within: Duration,
        found: impl Fn(&OutputLine) -> Option<T>,
    ) -> T {
        let deadline = Instant::now() + within;
        loop {
            // Checked before the lines are read, so that the last lines of the process are searched
            // too.
            let ended = self.readers.iter().all(JoinHandle::is_finished);
            if let Some(found) = self.lines().iter().skip(from).find_map(&found) {
                return found;
            }
            let why = if ended {
                "it ended"
            } else {
                "the deadline has passed"
            };
            assert!(
                !ended && Instant::now() < deadline,
                "waited for {what}, but {why}. Output:\n{}",
                self.transcript()
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits for a line with these words.
    pub async fn wait_for_text(&self, words: &str) {
        let has_words = |line: &OutputLine| line.text.contains(words).then_some(());
        self.wait_for(words, 0, TEST_TIMEOUT, has_words).await;
    }

    /// Waits for the address of a listener, see [`OutputLine::address`].
    pub async fn wait_for_address(&self, message: &str) -> SocketAddr {
        let address = |line: &OutputLine| line.address(message);
        self.wait_for(message, 0, TEST_TIMEOUT, address).await
    }

    /// Resident memory in KiB.
    pub fn rss_kib(&self) -> u64 {
        self.read_status_kib("VmRSS:")
    }

    /// Resident memory in KiB without file-backed pages.
    pub fn anonymous_kib(&self) -> u64 {
        self.read_status_kib("RssAnon:")
    }

    fn read_status_kib(&self, what: &str) -> u64 {
        let pid = self.child.id().expect("the process is running");
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let value = status
            .lines()
            .find_map(|line| line.strip_prefix(what)?.strip_suffix(" kB"));
        value
            .expect("/proc/PID/status has the field")
            .trim()
            .parse()
            .unwrap()
    }

    /// Closes the reading ends of the process's output pipes.
    pub async fn close_output_pipes(&mut self) {
        for reader in &mut self.readers {
            reader.abort();
            assert!(
                reader.await.is_err_and(|end| end.is_cancelled()),
                "it has ended already"
            );
        }
    }

    /// Sends a signal, named as in `kill -TERM`.
    pub fn send_signal(&self, name: &str) {
        let pid = self.child.id().expect("the process is running");
        assert!(send_signal_to(pid, name), "kill -{name} {pid}");
    }

    pub async fn wait_for_exit(&mut self, within: Duration) -> ProcessOutput {
        let Ok(status) = timeout(within, self.child.wait()).await else {
            panic!(
                "did not end within {within:?}. Output:\n{}",
                self.transcript()
            )
        };
        for reader in self
            .readers
            .iter_mut()
            .filter(|reader| !reader.is_finished())
        {
            timeout(TEST_TIMEOUT, reader)
                .await
                .expect("a dead process closes its pipes")
                .unwrap();
        }
        let text = |stderr| -> String {
            self.lines()
                .iter()
                .filter(|line| line.stderr == stderr)
                .map(|line| line.text.clone() + "\n")
                .collect()
        };
        ProcessOutput {
            command: self.command.clone(),
            status: status.unwrap(),
            stdout: text(false),
            stderr: text(true),
        }
    }

    pub async fn assert_exit_code(&mut self, code: i32) {
        self.wait_for_exit(TEST_TIMEOUT).await.expect_code(code);
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

/// Sends a signal, named as in `kill -TERM`. Returns whether it was delivered.
pub fn send_signal_to(pid: u32, name: &str) -> bool {
    let kill = ["-c", "kill -$1 $2", "sh", name, &pid.to_string()];
    std::process::Command::new("sh")
        .args(kill)
        .status()
        .unwrap()
        .success()
}

/// Runs a command to its end.
pub async fn run_command(command: &mut Command) -> ProcessOutput {
    ChildProcess::start(command)
        .unwrap()
        .wait_for_exit(TEST_TIMEOUT)
        .await
}

fn spawn_output_reader(
    pipe: impl AsyncRead + Unpin + Send + 'static,
    stderr: bool,
    lines: &Arc<Mutex<Vec<OutputLine>>>,
) -> JoinHandle<()> {
    let lines = Arc::clone(lines);
    tokio::spawn(async move {
        let mut pipe = BufReader::new(pipe);
        let mut text = Vec::new();
        while pipe
            .read_until(b'\n', &mut text)
            .await
            .is_ok_and(|read| read > 0)
        {
            let line = String::from_utf8_lossy(&text).trim_end().to_owned();
            lines
                .lock()
                .unwrap()
                .push(OutputLine { stderr, text: line });
            text.clear();
        }
    })
}
