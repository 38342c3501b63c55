//! What was asked, what came back, which faults were there, and what none of them explains.

use crate::support::client::RequestOutcome;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long after its end a fault still explains something: connections are made anew, the breaker closes.
const FAULT_AFTERMATH: Duration = Duration::from_secs(2);

/// Something that is out of order on purpose, for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SoakFault {
    /// Stopped, killed or empty.
    Redis,
    /// Killed and started again. Single broken answers are a [`Route`]'s, not this.
    AppServer,
    /// The configuration file is wrong.
    Config,
}

/// A path of the upstream, and what a client may get there.
#[derive(Debug)]
pub(crate) struct RouteExpectation {
    pub(crate) path: &'static str,
    /// Statuses that need no fault.
    pub(crate) expected: &'static [u16],
    /// The same while Redis is away.
    pub(crate) without_redis: &'static [u16],
    /// The upstream breaks off each of its answers: whole ones are wrong.
    pub(crate) is_truncated: bool,
}

#[derive(Debug, Default)]
pub(crate) struct SoakLedger {
    sent: AtomicU64,
    given_up: AtomicU64,
    /// Answers by status.
    answers_by_status: Mutex<BTreeMap<u16, u64>>,
    /// Each with its begin and, once it is over, its end.
    faults: Mutex<Vec<(SoakFault, Instant, Option<Instant>)>>,
    explained_events: Mutex<BTreeMap<String, u64>>,
    unexplained_events: Mutex<BTreeMap<String, u64>>,
}

/// A request under way; counted as sent, whatever becomes of it.
#[derive(Debug)]
pub(crate) struct PendingRequest<'a> {
    ledger: &'a SoakLedger,
    began: Instant,
}

impl SoakLedger {
    pub(crate) fn begin_request(&self) -> PendingRequest<'_> {
        self.sent.fetch_add(1, Ordering::Relaxed);
        PendingRequest {
            ledger: self,
            began: Instant::now(),
        }
    }

    /// Requests so far, those given up on purpose among them.
    pub(crate) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    pub(crate) fn given_up(&self) -> u64 {
        self.given_up.load(Ordering::Relaxed)
    }

    pub(crate) fn answers_by_status(&self) -> BTreeMap<u16, u64> {
        self.answers_by_status.lock().unwrap().clone()
    }

    /// Faults' consequences, and how often each was met.
    pub(crate) fn explained(&self) -> BTreeMap<String, u64> {
        self.explained_events.lock().unwrap().clone()
    }

    /// What no fault explains, and how often each was met.
    pub(crate) fn unexplained_events(&self) -> BTreeMap<String, u64> {
        self.unexplained_events.lock().unwrap().clone()
    }

    pub(crate) fn begin_fault(&self, fault: SoakFault) {
        self.faults
            .lock()
            .unwrap()
            .push((fault, Instant::now(), None));
    }

    pub(crate) fn end_fault(&self, fault: SoakFault) {
        let mut faults = self.faults.lock().unwrap();
        for (_, _, end) in faults
            .iter_mut()
            .filter(|(kind, _, end)| *kind == fault && end.is_none())
        {
            *end = Some(Instant::now());
        }
    }

    /// Whether this fault, or what comes after it, was there at any time since `began`.
    fn was_active_since(&self, fault: SoakFault, began: Instant) -> bool {
        let faults = self.faults.lock().unwrap();
        faults.iter().any(|(kind, _, end)| {
            *kind == fault && end.is_none_or(|end| end + FAULT_AFTERMATH >= began)
        })
    }

    /// Something that no fault explains; the first of its kind is told at once.
    pub(crate) fn record_unexplained(&self, complaint: String) {
        let mut complaints = self.unexplained_events.lock().unwrap();
        let times = complaints.entry(complaint.clone()).or_default();
        *times += 1;
        if *times == 1 {
            println!("UNEXPLAINED  {complaint}");
        }
    }

    /// A warning or an error in the proxy's log.
    pub(crate) fn record_log_line(&self, level: &str, message: &str, line: &str) {
        let now = Instant::now();
        let is_explained = match message {
            "redis unavailable; applying on_store_failure"
            | "redis rejected the membership script; using the last known instance count" => {
                self.was_active_since(SoakFault::Redis, now)
            }
            "new configuration rejected; the previous one stays in effect" => {
                self.was_active_since(SoakFault::Config, now)
            }
            // Some of the upstream's answers are always broken.
            "requests are not forwarded" => true,
            // An error in the configuration: file, line, column.
            _ => message.contains("soak.toml:") && self.was_active_since(SoakFault::Config, now),
        };
        if is_explained {
            self.record_explained(format!(
                "in the log: {level} {}",
                message.rsplit('/').next().unwrap_or(message)
            ));
        } else {
            println!("{line}");
            self.record_unexplained(format!("in the log: {level} {message}"));
        }
    }

    fn record_explained(&self, what: String) {
        *self
            .explained_events
            .lock()
            .unwrap()
            .entry(what)
            .or_default() += 1;
    }
}

impl PendingRequest<'_> {
    /// The client leaves on purpose. What the proxy counts of it, if anything, is unknown.
    pub(crate) fn give_up(self) {
        self.ledger.given_up.fetch_add(1, Ordering::Relaxed);
    }

    /// An answer that needs no explanation, nor does a connection that is closed without one.
    pub(crate) fn judge_hostile(self, usual: &[u16], outcome: &RequestOutcome) {
        match outcome {
            RequestOutcome::NoAnswer(_) => self.give_up(),
            RequestOutcome::Answered(status) => {
                self.count_status(*status);
                if !usual.contains(status) {
                    self.ledger.record_unexplained(format!(
                        "a hostile request was answered with {status}"
                    ));
                }
            }
            other => self
                .ledger
                .record_unexplained(format!("a hostile request: {other:?}")),
        }
    }

    pub(crate) fn judge_outcome(self, route: &RouteExpectation, outcome: &RequestOutcome) {
        if let RequestOutcome::Answered(status)
        | RequestOutcome::Truncated(status)
        | RequestOutcome::Mismatched(status) = outcome
        {
            self.count_status(*status);
        }
        let (redis, upstream) = (
            self.was_active(SoakFault::Redis),
            self.was_active(SoakFault::AppServer),
        );
        let path = route.path;
        let why = match outcome {
            RequestOutcome::Answered(200) if route.is_truncated => None,
            RequestOutcome::Answered(status) if route.expected.contains(status) => return,
            RequestOutcome::Truncated(200) if route.is_truncated => return,
            // What breaks off before the head was written, on a busy machine, has none.
            RequestOutcome::NoAnswer(_) if route.is_truncated => return,
            RequestOutcome::Answered(status) if redis && route.without_redis.contains(status) => {
                Some(format!("{path}: {status} without Redis"))
            }
            RequestOutcome::Answered(status @ 502..=504) if upstream => {
                Some(format!("{status} without an upstream"))
            }
            RequestOutcome::Truncated(101 | 200) if upstream => {
                Some("broken off without an upstream".to_owned())
            }
            _ => None,
        };
        match why {
            Some(why) => self.ledger.record_explained(why),
            None => {
                let away = format!("Redis away: {redis}, upstream away: {upstream}");
                self.ledger
                    .record_unexplained(format!("{path}: {outcome:?} ({away})"));
            }
        }
    }

    fn was_active(&self, fault: SoakFault) -> bool {
        self.ledger.was_active_since(fault, self.began)
    }

    fn count_status(&self, status: u16) {
        *self
            .ledger
            .answers_by_status
            .lock()
            .unwrap()
            .entry(status)
            .or_default() += 1;
    }
}
