//! Whether Redis can be asked: the breaker, the counters of failures, and one log line per change.

use super::failure::{Failure, Trouble};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// A foreign value is logged at most this often: it is one key's fault and lasts.
const FOREIGN_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// One per process, shared by its workers.
#[derive(Debug)]
pub(super) struct Health {
    /// Consecutive failures that open the breaker.
    threshold: u32,
    consecutive: AtomicU32,
    open: AtomicBool,
    counts: [AtomicU64; Failure::WORDS.len()],
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Workers whose connection is lost and not yet replaced.
    links_down: u32,
    breaker_open: bool,
    down_since: Option<Instant>,
    /// Redis was there at least once.
    seen: bool,
    foreign_logged: Option<Instant>,
}

impl Health {
    pub(super) fn new(threshold: u32) -> Self {
        Self {
            threshold: threshold.max(1),
            consecutive: AtomicU32::new(0),
            open: AtomicBool::new(false),
            counts: [const { AtomicU64::new(0) }; Failure::WORDS.len()],
            state: Mutex::default(),
        }
    }

    /// Whether requests must not ask Redis.
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    pub(super) fn is_up(&self) -> bool {
        let state = self.state.lock();
        state.seen && state.down_since.is_none()
    }

    /// Failures so far, by word.
    pub(super) fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Failure::WORDS
            .iter()
            .zip(&self.counts)
            .map(|(word, count)| (*word, count.load(Ordering::Relaxed)))
    }

    /// Redis answered a request.
    pub(super) fn answered(&self) {
        // Read first: the line stays shared between the workers while all is well.
        if self.consecutive.load(Ordering::Relaxed) != 0 {
            self.consecutive.store(0, Ordering::Relaxed);
        }
    }

    /// Redis did not answer, or not usefully.
    pub(super) fn failed(&self, failure: Failure) {
        self.count(failure);
        let consecutive = self
            .consecutive
            .fetch_add(1, Ordering::Relaxed)
            .saturating_add(1);
        if consecutive < self.threshold || self.is_open() {
            return;
        }
        // Opened and closed under the lock only, so that what is logged is what holds.
        let mut state = self.state.lock();
        if !self.open.swap(true, Ordering::Relaxed) {
            state.breaker_open = true;
            state.tell_change(&failure.into());
        }
    }

    /// Redis answered that the value under a key is not ours: it works, but not for this key.
    pub(super) fn foreign(&self, key: impl FnOnce() -> String) {
        self.answered();
        self.count(Failure::WrongType(0));
        let mut state = self.state.lock();
        if state
            .foreign_logged
            .is_none_or(|at| at.elapsed() >= FOREIGN_LOG_INTERVAL)
        {
            state.foreign_logged = Some(Instant::now());
            tracing::warn!(
                key = key(),
                kind = "wrongtype",
                "a key in Redis holds a value that is not ours"
            );
        }
    }

    /// A background probe was answered by a server that takes writes: requests may ask again.
    pub(super) fn probed(&self) {
        self.consecutive.store(0, Ordering::Relaxed);
        let mut state = self.state.lock();
        state.seen = true;
        if self.open.swap(false, Ordering::Relaxed) {
            state.breaker_open = false;
            state.tell_change(&Failure::Other.into());
        }
    }

    /// A background probe or an attempt to connect failed.
    pub(super) fn count(&self, failure: Failure) {
        let place = Failure::WORDS.binary_search(&failure.word());
        if let Some(count) = place.ok().and_then(|place| self.counts.get(place)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn link_lost(&self, trouble: &Trouble) {
        let mut state = self.state.lock();
        state.links_down += 1;
        state.tell_change(trouble);
    }

    pub(super) fn link_restored(&self) {
        let mut state = self.state.lock();
        state.links_down = state.links_down.saturating_sub(1);
        state.tell_change(&Failure::Other.into());
    }
}

impl State {
    fn tell_change(&mut self, trouble: &Trouble) {
        let down = self.links_down > 0 || self.breaker_open;
        match (down, self.down_since) {
            (true, None) => {
                self.down_since = Some(Instant::now());
                let (kind, reason) = (trouble.failure.word(), &trouble.why);
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
        let health = Health::new(2);
        assert!(!health.is_up(), "not seen yet");
        health.probed();
        health.failed(Failure::Timeout);
        health.answered();
        health.failed(Failure::Timeout);
        assert!(!health.is_open() && health.is_up());
        health.failed(Failure::Timeout);
        assert!(health.is_open() && !health.is_up());
        health.answered();
        assert!(health.is_open());
        health.probed();
        assert!(!health.is_open() && health.is_up());
        assert!(health.counts().any(|count| count == ("timeout", 3)));
    }

    #[test]
    fn foreign_values_never_open_the_breaker() {
        let health = Health::new(1);
        health.probed();
        for _ in 0..10 {
            health.foreign(|| "key".to_owned());
        }
        assert!(!health.is_open() && health.is_up());
        assert!(health.counts().any(|count| count == ("wrongtype", 10)));
    }

    #[derive(Clone, Default)]
    struct Lines(std::sync::Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Lines {
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
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let health = Health::new(5);
            for _ in 0..1000 {
                health.failed(Failure::OutOfMemory);
                health.foreign(|| "key".to_owned());
            }
            health.link_lost(&Failure::Connection.into());
            for _ in 0..1000 {
                health.failed(Failure::Connection);
            }
            health.link_restored();
            health.probed();
        });
        let text = String::from_utf8(lines.0.lock().clone()).unwrap();
        let said: Vec<&str> = text.lines().collect();
        assert_eq!(said.len(), 3, "{text}");
        assert!(said[0].contains("not ours"), "{text}");
        assert!(
            said[1].contains("kind=\"connection\"") && said[2].contains("up again"),
            "{text}"
        );
    }

    #[test]
    fn it_is_up_when_every_link_is() {
        let health = Health::new(9);
        health.probed();
        health.link_lost(&Failure::Connection.into());
        health.link_lost(&Failure::Connection.into());
        health.link_restored();
        assert!(!health.is_up());
        health.link_restored();
        assert!(health.is_up());
    }
}
