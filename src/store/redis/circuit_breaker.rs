//! The circuit breaker of Redis, the failure counters, and one log line per change of availability.

use super::error::{RedisConnectionError, RedisErrorKind};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// A foreign value is logged at most this often: it affects one key and lasts.
const FOREIGN_VALUE_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The circuit breaker of a process, shared by its workers.
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
    /// Connections that are lost and not yet replaced.
    connections_down: u32,
    down_since: Option<Instant>,
    /// Whether Redis was reached at least once.
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

    /// Whether requests must not be sent to Redis.
    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    pub(super) fn is_up(&self) -> bool {
        let state = self.state.lock();
        state.was_connected && state.down_since.is_none()
    }

    /// Failures since the start, by the name of their kind.
    pub(super) fn failure_counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        RedisErrorKind::NAMES
            .iter()
            .zip(&self.failure_counts)
            .map(|(name, count)| (*name, count.load(Ordering::Relaxed)))
    }

    /// Resets the count of consecutive failures after a useful reply. An open breaker stays open:
    /// only a probe closes it.
    pub(super) fn record_success(&self) {
        // Reads first: without failures the cache line stays shared between the workers.
        if self.consecutive_failures.load(Ordering::Relaxed) != 0 {
            self.consecutive_failures.store(0, Ordering::Relaxed);
        }
    }

    /// Records a request without a useful reply.
    pub(super) fn record_failure(&self, kind: RedisErrorKind) {
        self.count_failure(kind);
        let consecutive_failures = self
            .consecutive_failures
            .fetch_add(1, Ordering::Relaxed)
            .saturating_add(1);
        if consecutive_failures < self.failure_threshold || self.is_open() {
            return;
        }
        // The breaker changes only under the lock, so that the log matches its state.
        let mut state = self.state.lock();
        if !self.is_open.swap(true, Ordering::Relaxed) {
            self.update_and_log_availability(&mut state, &kind.into());
        }
    }

    /// Records that the value of a key is foreign: Redis works, but not for this key.
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
                "redis key holds a foreign value"
            );
        }
    }

    /// Records a probe that was answered by a writable server: requests may be sent again.
    pub(super) fn record_probe_success(&self) {
        self.consecutive_failures.store(0, Ordering::Relaxed);
        let mut state = self.state.lock();
        state.was_connected = true;
        if self.is_open.swap(false, Ordering::Relaxed) {
            self.update_and_log_availability(&mut state, &RedisErrorKind::Other.into());
        }
    }

    /// Counts a failure without an effect on the breaker, for example of a probe or of a connection
    /// attempt.
    pub(super) fn count_failure(&self, kind: RedisErrorKind) {
        let position = RedisErrorKind::NAMES.binary_search(&kind.as_str());
        if let Some(count) = position
            .ok()
            .and_then(|position| self.failure_counts.get(position))
        {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn record_connection_down(&self, error: &RedisConnectionError) {
        let mut state = self.state.lock();
        state.connections_down += 1;
        self.update_and_log_availability(&mut state, error);
    }

    pub(super) fn record_connection_restored(&self) {
        let mut state = self.state.lock();
        state.connections_down = state.connections_down.saturating_sub(1);
        self.update_and_log_availability(&mut state, &RedisErrorKind::Other.into());
    }

    fn update_and_log_availability(
        &self,
        state: &mut RedisAvailability,
        error: &RedisConnectionError,
    ) {
        let is_down = state.connections_down > 0 || self.is_open();
        match (is_down, state.down_since) {
            (true, None) => {
                state.down_since = Some(Instant::now());
                let (kind, reason) = (error.kind.as_str(), &error.message);
                tracing::warn!(kind, reason, "redis unavailable; applying on_store_failure");
            }
            (false, Some(since)) => {
                state.down_since = None;
                let down_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
                tracing::info!(down_ms, "redis available again");
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
        let breaker = RedisCircuitBreaker::new(2);
        assert!(!breaker.is_up(), "never connected");
        breaker.record_probe_success();
        breaker.record_failure(RedisErrorKind::Timeout);
        breaker.record_success();
        breaker.record_failure(RedisErrorKind::Timeout);
        assert!(!breaker.is_open() && breaker.is_up());
        breaker.record_failure(RedisErrorKind::Timeout);
        assert!(breaker.is_open() && !breaker.is_up());
        breaker.record_success();
        assert!(breaker.is_open());
        breaker.record_probe_success();
        assert!(!breaker.is_open() && breaker.is_up());
        assert!(
            breaker
                .failure_counts()
                .any(|count| count == ("timeout", 3))
        );
    }

    #[test]
    fn foreign_values_never_open_the_breaker() {
        let breaker = RedisCircuitBreaker::new(1);
        breaker.record_probe_success();
        for _ in 0..10 {
            breaker.record_foreign_value(|| "key".to_owned());
        }
        assert!(!breaker.is_open() && breaker.is_up());
        assert!(
            breaker
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
            let breaker = RedisCircuitBreaker::new(5);
            for _ in 0..1000 {
                breaker.record_failure(RedisErrorKind::OutOfMemory);
                breaker.record_foreign_value(|| "key".to_owned());
            }
            breaker.record_connection_down(&RedisErrorKind::Connection.into());
            for _ in 0..1000 {
                breaker.record_failure(RedisErrorKind::Connection);
            }
            breaker.record_connection_restored();
            breaker.record_probe_success();
        });
        let text = String::from_utf8(log_buffer.0.lock().clone()).unwrap();
        let log_lines: Vec<&str> = text.lines().collect();
        assert_eq!(log_lines.len(), 3, "{text}");
        assert!(log_lines[0].contains("foreign value"), "{text}");
        assert!(
            log_lines[1].contains("kind=\"connection\"")
                && log_lines[2].contains("available again"),
            "{text}"
        );
    }

    #[test]
    fn is_up_when_every_connection_is_up() {
        let breaker = RedisCircuitBreaker::new(9);
        breaker.record_probe_success();
        breaker.record_connection_down(&RedisErrorKind::Connection.into());
        breaker.record_connection_down(&RedisErrorKind::Connection.into());
        breaker.record_connection_restored();
        assert!(!breaker.is_up());
        breaker.record_connection_restored();
        assert!(breaker.is_up());
    }
}
