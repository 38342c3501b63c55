//! Writes log lines on a thread of its own, so that a slow or stopped reader of stderr delays no
//! request. Lines that do not fit into the queue are dropped and counted.

use parking_lot::{Condvar, Mutex};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Maximum bytes of lines that wait to be written. As many bytes may be in the current write.
const MAX_QUEUED_BYTES: usize = 1024 * 1024;

/// Pause before a write to a non-blocking stderr is repeated.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

static LOG_QUEUE: OnceLock<Arc<LogQueue>> = OnceLock::new();

/// Lines that wait for the writer thread.
#[derive(Debug, Default)]
struct LogQueue {
    state: Mutex<LogQueueState>,
    line_queued: Condvar,
    lines_written: Condvar,
    dropped_lines: AtomicU64,
}

#[derive(Debug, Default)]
struct LogQueueState {
    lines: Vec<u8>,
    is_writing: bool,
}

/// Sends each written line to the writer thread, or to stderr if there is none.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogSink;

impl Write for LogSink {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match LOG_QUEUE.get() {
            Some(queue) => queue.push_line(line),
            None => io::stderr().write_all(line)?,
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Starts the writer thread. If it cannot be started, lines are written to stderr directly.
pub(super) fn start_log_writer() {
    let queue = Arc::<LogQueue>::default();
    let writer = Arc::clone(&queue);
    let started = io::stderr()
        .as_fd()
        .try_clone_to_owned()
        .and_then(|stderr| {
            std::thread::Builder::new()
                .name("tidegate-log".to_owned())
                .spawn(move || writer.write_lines(File::from(stderr)))
        });
    if started.is_ok() {
        drop(LOG_QUEUE.set(queue));
    }
}

/// Waits until all lines are written, at most this long.
pub fn flush_log(within: Duration) {
    if let Some(queue) = LOG_QUEUE.get() {
        queue.wait_until_written(within);
    }
}

/// Number of log lines that were dropped.
pub fn dropped_log_lines() -> u64 {
    LOG_QUEUE
        .get()
        .map_or(0, |queue| queue.dropped_lines.load(Ordering::Relaxed))
}

impl LogQueue {
    fn push_line(&self, line: &[u8]) {
        let mut state = self.state.lock();
        if state.lines.len().saturating_add(line.len()) > MAX_QUEUED_BYTES {
            self.dropped_lines.fetch_add(1, Ordering::Relaxed);
            return;
        }
        state.lines.extend_from_slice(line);
        self.line_queued.notify_one();
    }

    /// Writes the queued lines for as long as the process runs. Lines that stderr does not take are
    /// lost, as there is no other place to report them.
    fn write_lines(&self, mut stderr: impl Write) {
        let (mut lines, mut reported_drops) = (Vec::new(), 0);
        loop {
            {
                let mut state = self.state.lock();
                state.is_writing = false;
                self.lines_written.notify_all();
                while state.lines.is_empty() {
                    self.line_queued.wait(&mut state);
                }
                std::mem::swap(&mut state.lines, &mut lines);
                state.is_writing = true;
            }
            write_patiently(&mut stderr, &lines);
            lines.clear();
            let dropped_lines = self.dropped_lines.load(Ordering::Relaxed);
            if dropped_lines > reported_drops {
                let lines = dropped_lines - reported_drops;
                tracing::warn!(lines, "log lines dropped; stderr is read too slowly");
                reported_drops = dropped_lines;
            }
        }
    }

    fn wait_until_written(&self, within: Duration) {
        let mut state = self.state.lock();
        let is_unwritten = |state: &mut LogQueueState| state.is_writing || !state.lines.is_empty();
        self.lines_written
            .wait_while_for(&mut state, is_unwritten, within);
    }
}

/// Writes all bytes. A non-blocking stderr is retried; any other error drops the rest.
fn write_patiently(stderr: &mut impl Write, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match stderr.write(bytes) {
            Ok(0) => return,
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                std::thread::sleep(RETRY_PAUSE);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{LogQueue, MAX_QUEUED_BYTES};
    use std::io::{Read, Write};
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::time::{Duration, Instant};

    #[test]
    fn a_stopped_reader_costs_lines_and_no_time() {
        let queue = Arc::<LogQueue>::default();
        let (mut reader, writer) = std::io::pipe().unwrap();
        let thread = Arc::clone(&queue);
        std::thread::spawn(move || thread.write_lines(writer));
        let line = [&[b'x'; 1023][..], b"\n"].concat();
        let lines = 4 * MAX_QUEUED_BYTES / line.len();
        let start = Instant::now();
        (0..lines).for_each(|_| queue.push_line(&line));
        assert!(start.elapsed() < Duration::from_secs(5));
        let dropped = usize::try_from(queue.dropped_lines.load(Ordering::Relaxed)).unwrap();
        assert!(dropped >= lines / 4, "{dropped} of {lines}");
        queue.wait_until_written(Duration::from_millis(10));
        assert!(queue.state.lock().is_writing, "the flush ends in time");
        let mut received = vec![0; (lines - dropped) * line.len()];
        reader.read_exact(&mut received).unwrap();
        assert!(received.chunks(line.len()).all(|one| one == line));
        queue.wait_until_written(Duration::from_secs(10));
        assert!(!queue.state.lock().is_writing);
    }

    #[test]
    fn a_broken_stderr_does_not_stop_the_writer() {
        struct Broken;
        impl Write for Broken {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let queue = Arc::<LogQueue>::default();
        let thread = Arc::clone(&queue);
        std::thread::spawn(move || thread.write_lines(Broken));
        for _ in 0..3 {
            queue.push_line(b"line\n");
            queue.wait_until_written(Duration::from_secs(10));
            assert!(queue.state.lock().lines.is_empty());
        }
    }
}
