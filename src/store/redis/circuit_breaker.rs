//! The circuit breaker of Redis, the failure counters, and one log line per change of availability.

use super::error::{RedisConnectionError, RedisErrorKind};
use crate::clock::monotonic_now;
use crate::telemetry::LogThrottle;
use parking_lot::Mutex;
use redis::RedisError;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use strum::VariantNames;
use tokio::time::Instant;

/// Interval of log lines about what lasts until an operator corrects it: a foreign value, a
/// rejected login.
pub(super) const PROBLEM_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Why Redis is unavailable.
#[derive(Clone, Debug)]
pub struct RedisOutage {
    pub since: Instant,
    /// The newest error: what a new connection meets tells more than the loss of the last one.
    pub cause: RedisConnectionError,
}

/// The circuit breaker of a process, shared by its workers.
#[derive(Debug)]
pub(super) struct RedisCircuitBreaker {
    /// The servers, for log lines. `None` for an inspection, which logs nothing.
    pub(super) log_address: Option<String>,
    /// Consecutive failures that open the breaker.
    failure_threshold: u32,
    /// Failures since the last success. From the threshold on the breaker is open, and only a probe
    /// resets them.
    consecutive_failures: AtomicU32,
    failure_counts: [AtomicU64; RedisErrorKind::VARIANTS.len()],
    state: Mutex<RedisAvailability>,
    foreign_value_log: LogThrottle,
    pub(super) foreign_override_count: AtomicU64,
    foreign_override_log: LogThrottle,
    wrong_period_log: LogThrottle,
    login_rejection_log: LogThrottle,
}

#[derive(Debug, Default)]
struct RedisAvailability {
    /// Connections that are lost and not yet replaced.
    connections_down: u32,
    phase: AvailabilityPhase,
    /// The last error text that Redis sent for a command.
    last_command_error: Option<RedisConnectionError>,
}

#[derive(Clone, Debug, Default)]
enum AvailabilityPhase {
    /// Neither a probe nor a connection attempt has ended.
    #[default]
    Starting,
    Up,
    Down(RedisOutage),
}

impl RedisCircuitBreaker {
    pub(super) fn new(log_address: Option<String>, threshold: u32) -> Self {
        Self {
            log_address,
            failure_threshold: threshold.max(1),
            consecutive_failures: AtomicU32::new(0),
            failure_counts: [const { AtomicU64::new(0) }; RedisErrorKind::VARIANTS.len()],
            state: Mutex::default(),
            foreign_value_log: LogThrottle::new(PROBLEM_LOG_INTERVAL),
            foreign_override_count: AtomicU64::new(0),
            foreign_override_log: LogThrottle::new(PROBLEM_LOG_INTERVAL),
            wrong_period_log: LogThrottle::new(PROBLEM_LOG_INTERVAL),
            login_rejection_log: LogThrottle::new(PROBLEM_LOG_INTERVAL),
        }
    }

    /// Whether requests must not be sent to Redis.
    pub(super) fn is_open(&self) -> bool {
        self.consecutive_failures.load(Ordering::Relaxed) >= self.failure_threshold
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(self.state.lock().phase, AvailabilityPhase::Up)
    }

    pub(super) fn outage(&self) -> Option<RedisOutage> {
        match &self.state.lock().phase {
            AvailabilityPhase::Down(outage) => Some(outage.clone()),
            AvailabilityPhase::Starting | AvailabilityPhase::Up => None,
        }
    }

    /// Failures since the start, by the name of their kind.
    pub(super) fn failure_counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        RedisErrorKind::VARIANTS
            .iter()
            .zip(&self.failure_counts)
            .map(|(name, count)| (*name, count.load(Ordering::Relaxed)))
    }

    /// Resets the count of consecutive failures after a useful reply. An open breaker stays open:
    /// only a probe closes it.
    pub(super) fn record_success(&self) {
        // Reads first: without failures the cache line stays shared between the workers.
        let failures = self.consecutive_failures.load(Ordering::Relaxed);
        if (1..self.failure_threshold).contains(&failures) {
            // Changes nothing after a concurrent failure or success.
            let (order, count) = (Ordering::Relaxed, &self.consecutive_failures);
            count.compare_exchange(failures, 0, order, order).ok();
        }
    }

    /// Records a request without a useful reply.
    pub(super) fn record_failure(&self, kind: RedisErrorKind) {
        self.count_failure(kind);
        if self.is_open() {
            return;
        }
        self.consecutive_failures.fetch_add(1, Ordering::Relaxed);
        if self.is_open() {
            self.update_and_log_availability(&mut self.state.lock(), &kind.into());
        }
    }

    /// Records that the value of a key is foreign: Redis works, but not for this key.
    pub(super) fn record_foreign_value(&self, key: String) {
        self.record_success();
        self.count_failure(RedisErrorKind::WrongType(0));
        let is_due = self.foreign_value_log.record_occurrence(monotonic_now());
        if is_due.is_some() {
            tracing::warn!(key, kind = "wrongtype", "redis key holds a foreign value");
        }
    }

    /// Records a decision that met a value at the key of an override that is none.
    pub(super) fn record_foreign_override(&self, key: impl FnOnce() -> String) {
        self.foreign_override_count.fetch_add(1, Ordering::Relaxed);
        let is_due = (self.foreign_override_log).record_occurrence(monotonic_now());
        if is_due.is_some() {
            let key = key();
            tracing::warn!(
                key,
                "redis key of an override holds a foreign value; the configured limits apply"
            );
        }
    }

    /// Records that the clock of Redis is in none of the periods that a call named: Redis works,
    /// but not for limits per day, week or month.
    pub(super) fn record_wrong_period(&self) {
        self.record_success();
        self.count_failure(RedisErrorKind::WrongPeriod);
        let is_due = self.wrong_period_log.record_occurrence(monotonic_now());
        if is_due.is_some() {
            tracing::warn!(
                kind = "period",
                "redis and local clocks differ by more than a limit's period; applying on_store_failure to that limit"
            );
        }
    }

    /// Records a probe that was answered by a writable server: requests may be sent again.
    pub(super) fn record_probe_success(&self) {
        let mut state = self.state.lock();
        self.consecutive_failures.store(0, Ordering::Relaxed);
        self.update_and_log_availability(&mut state, &RedisErrorKind::Other.into());
    }

    /// Counts a failure without an effect on the breaker, for example of a probe or of a connection
    /// attempt. Returns the kind.
    pub(super) fn count_failure(&self, kind: RedisErrorKind) -> RedisErrorKind {
        let name = kind.into_str();
        let mut counts = RedisErrorKind::VARIANTS.iter().zip(&self.failure_counts);
        if let Some((_, count)) = counts.find(|(known, _)| **known == name) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        kind
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

    /// Records a failed attempt to replace a lost connection. A rejected login is logged, because
    /// it needs an operator, whatever the first failure was.
    pub(super) fn record_connection_still_down(&self, error: &RedisConnectionError) {
        if let AvailabilityPhase::Down(outage) = &mut self.state.lock().phase {
            outage.cause = error.clone();
        }
        let log = &self.login_rejection_log;
        if error.kind == RedisErrorKind::NoAuth
            && let Some(address) = &self.log_address
            && log.record_occurrence(monotonic_now()).is_some()
        {
            tracing::warn!(
                kind = error.kind.into_str(),
                address,
                reason = error.message,
                remedy = error.remedy(),
                "redis rejects the login"
            );
        }
    }

    /// Keeps the message of a command's error, for the log line about its consequence.
    pub(super) fn record_error_message(&self, error: &RedisError) {
        self.state.lock().last_command_error = Some(error.clone().into());
    }

    fn update_and_log_availability(
        &self,
        state: &mut RedisAvailability,
        error: &RedisConnectionError,
    ) {
        let is_down = state.connections_down > 0 || self.is_open();
        match (is_down, &state.phase) {
            (true, AvailabilityPhase::Starting | AvailabilityPhase::Up) => {
                // An error without a message of its own is the consequence of a command's error.
                let command_error = state
                    .last_command_error
                    .as_ref()
                    .filter(|cause| cause.kind == error.kind && *error == error.kind.into());
                let cause = command_error.unwrap_or(error).clone();
                if let Some(address) = &self.log_address {
                    tracing::warn!(
                        kind = error.kind.into_str(),
                        address,
                        reason = cause.message,
                        remedy = cause.remedy(),
                        "redis unavailable; applying on_store_failure"
                    );
                }
                if error.kind == RedisErrorKind::NoAuth {
                    self.login_rejection_log.record_occurrence(monotonic_now());
                }
                let since = Instant::now();
                state.phase = AvailabilityPhase::Down(RedisOutage { since, cause });
            }
            (false, AvailabilityPhase::Starting) => state.phase = AvailabilityPhase::Up,
            (false, AvailabilityPhase::Down(outage)) => {
                let down_ms = outage.since.elapsed().as_millis();
                let down_ms = u64::try_from(down_ms).unwrap_or(u64::MAX);
                state.phase = AvailabilityPhase::Up;
                if let Some(address) = &self.log_address {
                    tracing::info!(down_ms, address, "redis available again");
                }
            }
            (true, AvailabilityPhase::Down(_)) | (false, AvailabilityPhase::Up) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_consecutive_failures_open_the_breaker_and_only_a_probe_closes_it() {
        let breaker = RedisCircuitBreaker::new(Some(String::new()), 2);
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
        let breaker = RedisCircuitBreaker::new(Some(String::new()), 1);
        breaker.record_probe_success();
        for _ in 0..10 {
            breaker.record_foreign_value("key".to_owned());
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
            let breaker = RedisCircuitBreaker::new(Some(String::new()), 5);
            for _ in 0..1000 {
                breaker.record_failure(RedisErrorKind::OutOfMemory);
                breaker.record_foreign_value("key".to_owned());
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
        let breaker = RedisCircuitBreaker::new(Some(String::new()), 9);
        breaker.record_probe_success();
        breaker.record_connection_down(&RedisErrorKind::Connection.into());
        breaker.record_connection_down(&RedisErrorKind::Connection.into());
        breaker.record_connection_restored();
        assert!(!breaker.is_up());
        breaker.record_connection_restored();
        assert!(breaker.is_up());
    }
}
