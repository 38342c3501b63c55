//! Whether Redis can be asked: the breaker, the counters of failures, and one log line per change.

use super::error::{RedisConnectionError, RedisErrorKind};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// A foreign value is logged at most this often: it is one key's fault and lasts.
const FOREIGN_VALUE_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// One per process, shared by its workers.
#[derive(Debug)]
pub(super) struct RedisCircuitBreaker {
    /// Consecutive failures that open the breaker.
    failure_threshold: u32,
    consecutive_failures: AtomicU32,
    is_open: AtomicBool,
    failure_counts: [AtomicU64; RedisErrorKind::NAMES.len()],
    state: Mutex<RedisAvailability>,
}

#[derive(Debug, Default)]
struct RedisAvailability {
    /// Workers whose connection is lost and not yet replaced.
    connections_down: u32,
    breaker_open: bool,
    down_since: Option<Instant>,
    /// Redis was there at least once.
    was_connected: bool,
    foreign_value_logged_at: Option<Instant>,
}

impl RedisCircuitBreaker {
    pub(super) fn new(threshold: u32) -> Self {
        Self {
            failure_threshold: threshold.max(1),
            consecutive_failures: AtomicU32::new(0),
            is_open: AtomicBool::new(false),
            failure_counts: [const { AtomicU64::new(0) }; RedisErrorKind::NAMES.len()],
            state: Mutex::default(),
        }
    }

    /// Whether requests must not ask Redis.
    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    pub(super) fn is_up(&self) -> bool {
        let state = self.state.lock();
        state.was_connected && state.down_since.is_none()
    }

    /// Failures so far, by word.
    pub(super) fn failure_counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        RedisErrorKind::NAMES
            .iter()
            .zip(&self.failure_counts)
            .map(|(word, count)| (*word, count.load(Ordering::Relaxed)))
    }

    /// Redis answered a request.
    pub(super) fn record_success(&self) {
        // Read first: the line stays shared between the workers while all is well.
        if self.consecutive_failures.load(Ordering::Relaxed) != 0 {
            self.consecutive_failures.store(0, Ordering::Relaxed);
        }
    }

    /// Redis did not answer, or not usefully.
    pub(super) fn record_failure(&self, kind: RedisErrorKind) {
        self.count_failure(kind);
        let consecutive_failures = self
            .consecutive_failures
            .fetch_add(1, Ordering::Relaxed)
            .saturating_add(1);
        if consecutive_failures < self.failure_threshold || self.is_open() {
            return;
        }
        // Opened and closed under the lock only, so that what is logged is what holds.
        let mut state = self.state.lock();
        if !self.is_open.swap(true, Ordering::Relaxed) {
            state.breaker_open = true;
            state.log_transition(&kind.into());
        }
    }

    /// Redis answered that the value under a key is not ours: it works, but not for this key.
    pub(super) fn record_foreign_value(&self, key: impl FnOnce() -> String) {
        self.record_success();
        self.count_failure(RedisErrorKind::WrongType(0));
        let mut state = self.state.lock();
        if state
            .foreign_value_logged_at
            .is_none_or(|at| at.elapsed() >= FOREIGN_VALUE_LOG_INTERVAL)
        {
            state.foreign_value_logged_at = Some(Instant::now());
            tracing::warn!(
                key = key(),
                kind = "wrongtype",
                "a key in Redis holds a value that is not ours"
            );
        }
    }

    /// A background probe was answered by a server that takes writes: requests may ask again.
    pub(super) fn record_probe_success(&self) {
        self.consecutive_failures.store(0, Ordering::Relaxed);
        let mut state = self.state.lock();
        state.was_connected = true;
        if self.is_open.swap(false, Ordering::Relaxed) {
            state.breaker_open = false;
            state.log_transition(&RedisErrorKind::Other.into());
        }
    }

    /// A background probe or an attempt to connect failed.
    pub(super) fn count_failure(&self, kind: RedisErrorKind) {
        let position = RedisErrorKind::NAMES.binary_search(&kind.as_str());
        if let Some(count) = position
            .ok()
            .and_then(|place| self.failure_counts.get(place))
        {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn record_connection_lost(&self, error: &RedisConnectionError) {
        let mut state = self.state.lock();
        state.connections_down += 1;
        state.log_transition(error);
    }

    pub(super) fn record_connection_restored(&self) {
        let mut state = self.state.lock();
        state.connections_down = state.connections_down.saturating_sub(1);
        state.log_transition(&RedisErrorKind::Other.into());
    }
}

impl RedisAvailability {
    fn log_transition(&mut self, error: &RedisConnectionError) {
        let is_down = self.connections_down > 0 || self.breaker_open;
        match (is_down, self.down_since) {
            (true, None) => {
                self.down_since = Some(Instant::now());
                let (kind, reason) = (error.kind.as_str(), &error.message);
                tracing::warn!(
                    kind,
                    reason,
                    "Redis is down: policies decide by on_store_failure"
                );
            }
            (false, Some(since)) => {
                self.down_since = None;
                let down_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
                tracing::info!(down_ms, "Redis is up again");
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_consecutive_failures_open_the_breaker_and_only_a_probe_closes_it() {
        let health = RedisCircuitBreaker::new(2);
        assert!(!health.is_up(), "not seen yet");
        health.record_probe_success();
        health.record_failure(RedisErrorKind::Timeout);
        health.record_success();
        health.record_failure(RedisErrorKind::Timeout);
        assert!(!health.is_open() && health.is_up());
        health.record_failure(RedisErrorKind::Timeout);
        assert!(health.is_open() && !health.is_up());
        health.record_success();
        assert!(health.is_open());
        health.record_probe_success();
        assert!(!health.is_open() && health.is_up());
        assert!(health.failure_counts().any(|count| count == ("timeout", 3)));
    }

    #[test]
    fn foreign_values_never_open_the_breaker() {
        let health = RedisCircuitBreaker::new(1);
        health.record_probe_success();
        for _ in 0..10 {
            health.record_foreign_value(|| "key".to_owned());
        }
        assert!(!health.is_open() && health.is_up());
        assert!(
            health
                .failure_counts()
                .any(|count| count == ("wrongtype", 10))
        );
    }

    #[derive(Clone, Default)]
    struct BreakerLogBuffer(std::sync::Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for BreakerLogBuffer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn changes_are_logged_and_failures_are_not() {
        let log_buffer = BreakerLogBuffer::default();
        let writer = log_buffer.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let health = RedisCircuitBreaker::new(5);
            for _ in 0..1000 {
                health.record_failure(RedisErrorKind::OutOfMemory);
                health.record_foreign_value(|| "key".to_owned());
            }
            health.record_connection_lost(&RedisErrorKind::Connection.into());
            for _ in 0..1000 {
                health.record_failure(RedisErrorKind::Connection);
            }
            health.record_connection_restored();
            health.record_probe_success();
        });
        let text = String::from_utf8(log_buffer.0.lock().clone()).unwrap();
        let log_lines: Vec<&str> = text.lines().collect();
        assert_eq!(log_lines.len(), 3, "{text}");
        assert!(log_lines[0].contains("not ours"), "{text}");
        assert!(
            log_lines[1].contains("kind=\"connection\"") && log_lines[2].contains("up again"),
            "{text}"
        );
    }

    #[test]
    fn is_up_when_every_connection_is_up() {
        let health = RedisCircuitBreaker::new(9);
        health.record_probe_success();
        health.record_connection_lost(&RedisErrorKind::Connection.into());
        health.record_connection_lost(&RedisErrorKind::Connection.into());
        health.record_connection_restored();
        assert!(!health.is_up());
        health.record_connection_restored();
        assert!(health.is_up());
    }
}
