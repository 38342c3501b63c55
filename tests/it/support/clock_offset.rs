//! A wall clock that a test sets, for one process.

use std::fs::OpenOptions;
use std::io::Write;
use std::process::Command;
use tempfile::TempDir;

/// Adds an offset to the wall clock of a process.
pub(crate) struct ClockOffset(TempDir);

impl ClockOffset {
    /// Compiles the library that is preloaded, using the C compiler that the dependencies also
    /// need.
    pub(crate) fn new() -> Self {
        let clock = Self(tempfile::tempdir().unwrap());
        clock.set_secs(0);
        let source = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/it/support/clock_offset.c"
        );
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o"])
            .args([clock.0.path().join("clock.so").as_os_str(), source.as_ref()])
            .status();
        assert!(status.unwrap().success());
        clock
    }

    pub(crate) fn set_secs(&self, offset: u64) {
        let text = format!("{:020}", offset * 1_000_000);
        // The server keeps the file open, and a write of the same length replaces the old text.
        let mut options = OpenOptions::new();
        let file = options.create(true).write(true).truncate(false);
        let mut file = file.open(self.0.path().join("offset")).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    pub(crate) fn apply_to<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.envs(self.environment())
    }

    /// The variables of a process with this clock.
    pub(crate) fn environment(&self) -> [(&'static str, String); 2] {
        let path = |name| self.0.path().join(name).display().to_string();
        [
            ("LD_PRELOAD", path("clock.so")),
            ("CLOCK_OFFSET_FILE", path("offset")),
        ]
    }
}
