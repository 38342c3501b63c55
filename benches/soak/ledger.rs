//! Ledger of the soak test: requests, responses, faults, and problems that no fault explains.

use crate::proxy::HELD_LIMIT;
use crate::support::client::RequestOutcome;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time after its end in which a fault still explains a problem: connections are reestablished and
/// the circuit breaker closes.
const FAULT_AFTERMATH: Duration = Duration::from_secs(2);

const LONGEST_HELD_REQUEST: Duration = Duration::from_millis(2500);

/// A deliberate, temporary fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SoakFault {
    /// Redis is stopped, killed or empty.
    Redis,
    /// The upstream is killed and restarted. Single broken responses belong to a [`Route`], not to
    /// this fault.
    AppServer,
    /// The configuration file is invalid.
    Config,
    /// The proxy's process is stopped.
    ProxyFrozen,
    /// The test machine itself stalled, so Redis responses are late.
    MachineStalled,
}

/// A path of the upstream and the results that a client may see there.
#[derive(Debug)]
pub(crate) struct RouteExpectation {
    pub(crate) path: &'static str,
    /// Statuses that are expected without a fault.
    pub(crate) expected: &'static [u16],
    /// Statuses that are expected while Redis is unavailable.
    pub(crate) without_redis: &'static [u16],
    /// The upstream aborts each response on this path, so a complete response is wrong.
    pub(crate) is_truncated: bool,
}

#[derive(Debug, Default)]
pub(crate) struct SoakLedger {
    sent: AtomicU64,
    given_up: AtomicU64,
    /// Requests of the accounted clients that have no result yet, and those without a decision.
    accounted_in_flight: AtomicU64,
    accounted_failed: AtomicU64,
    most_held: AtomicU64,
    /// Response counts by status.
    answers_by_status: Mutex<BTreeMap<u16, u64>>,
    /// Faults with their start and, once they are over, their end.
    faults: Mutex<Vec<(SoakFault, Instant, Option<Instant>)>>,
    explained_events: Mutex<BTreeMap<String, u64>>,
    unexplained_events: Mutex<BTreeMap<String, u64>>,
}

/// A request in flight. It counts as sent, whatever its result.
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

    /// Requests sent so far, including those that the client aborted deliberately.
    pub(crate) fn sent_count(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    pub(crate) fn given_up_count(&self) -> u64 {
        self.given_up.load(Ordering::Relaxed)
    }

    pub(crate) fn answers_by_status(&self) -> BTreeMap<u16, u64> {
        self.answers_by_status.lock().unwrap().clone()
    }

    /// Requests of clients whose charges are compared with those in Redis.
    pub(crate) fn begin_accounted_request(&self) {
        self.accounted_in_flight.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn end_accounted_request(&self, has_failed: bool) {
        let failed = u64::from(has_failed);
        self.accounted_failed.fetch_add(failed, Ordering::Relaxed);
        self.accounted_in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn accounted_in_flight(&self) -> u64 {
        self.accounted_in_flight.load(Ordering::Relaxed)
    }

    pub(crate) fn accounted_failed(&self) -> u64 {
        self.accounted_failed.load(Ordering::Relaxed)
    }

    pub(crate) fn most_held(&self) -> u64 {
        self.most_held.load(Ordering::Relaxed)
    }

    /// Judges the requests in flight on `/held`. Slots may end during their requests if Redis was
    /// away or the proxy frozen since the longest of these requests began.
    pub(crate) fn judge_held_requests(&self, held: u64) {
        let since = Instant::now() - LONGEST_HELD_REQUEST;
        if self.is_redis_late_since(since) {
            return;
        }
        self.most_held.fetch_max(held, Ordering::Relaxed);
        if held > HELD_LIMIT {
            self.record_unexplained(format!("/held: {held} requests in flight"));
        }
    }

    /// Problems that a fault explains, with their counts.
    pub(crate) fn explained_events(&self) -> BTreeMap<String, u64> {
        self.explained_events.lock().unwrap().clone()
    }

    /// Problems that no fault explains, with their counts.
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

    /// Judges a connection that ended before its first request. A frozen proxy may have exceeded
    /// its own timeout for the handshake.
    pub(crate) fn judge_failed_connection(&self, began: Instant, error: &std::io::Error) {
        if self.was_active_since(SoakFault::ProxyFrozen, began) {
            self.record_explained("no connection to a frozen proxy".to_owned());
        } else {
            self.record_unexplained(format!("no connection to the proxy: {error}"));
        }
    }

    /// Records a stall of the machine from a given time until now.
    pub(crate) fn record_stall(&self, began: Instant) {
        let (fault, now) = (SoakFault::MachineStalled, Instant::now());
        self.faults.lock().unwrap().push((fault, began, Some(now)));
    }

    /// Returns whether Redis' replies were missing or late at any time since `began`.
    fn is_redis_late_since(&self, began: Instant) -> bool {
        [
            SoakFault::Redis,
            SoakFault::ProxyFrozen,
            SoakFault::MachineStalled,
        ]
        .into_iter()
        .any(|fault| self.was_active_since(fault, began))
    }

    /// Returns whether the fault, or its aftermath, was active at any time since `began`.
    fn was_active_since(&self, fault: SoakFault, began: Instant) -> bool {
        let faults = self.faults.lock().unwrap();
        faults.iter().any(|(kind, _, end)| {
            *kind == fault && end.is_none_or(|end| end + FAULT_AFTERMATH >= began)
        })
    }

    /// Records a problem that no fault explains; prints the first of each kind immediately.
    pub(crate) fn record_unexplained(&self, problem: String) {
        let mut problems = self.unexplained_events.lock().unwrap();
        let times = problems.entry(problem.clone()).or_default();
        *times += 1;
        if *times == 1 {
            println!("UNEXPLAINED  {problem}");
        }
    }

    /// Records a warning or an error from the proxy's log.
    pub(crate) fn record_log_line(&self, level: &str, message: &str, line: &str) {
        let now = Instant::now();
        let is_explained = match message {
            "redis unavailable; applying on_store_failure"
            | "redis rejected the membership script; using the last known instance count" => {
                self.is_redis_late_since(now)
            }
            "new configuration rejected; the previous one stays in effect" => {
                self.was_active_since(SoakFault::Config, now)
            }
            // The largest limits are never reached.
            _ if message.contains("keeps one entry per request") => return,
            // Some upstream paths always send broken responses.
            "requests are not forwarded" => true,
            // A configuration error names file, line and column.
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
    /// Records a deliberate abort by the client. The proxy may or may not count the request.
    pub(crate) fn record_abort(self) {
        self.ledger.given_up.fetch_add(1, Ordering::Relaxed);
    }

    /// Records the result of an abusive request. The statuses in `usual` and a connection closed
    /// without a response are expected.
    pub(crate) fn judge_hostile_request(self, usual: &[u16], outcome: &RequestOutcome) {
        match outcome {
            RequestOutcome::NoAnswer(_) => self.record_abort(),
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
        let frozen = self.was_active(SoakFault::ProxyFrozen);
        let (redis, upstream) = (
            self.ledger.is_redis_late_since(self.began),
            self.was_active(SoakFault::AppServer),
        );
        let path = route.path;
        let why = match outcome {
            RequestOutcome::Answered(200) if route.is_truncated => None,
            RequestOutcome::Answered(status) if route.expected.contains(status) => return,
            RequestOutcome::Truncated(200) if route.is_truncated => return,
            // On a busy machine, a response aborted before its head was written has none.
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
            // The time in which the proxy was stopped counts for its timeouts.
            RequestOutcome::Answered(408)
                if frozen || self.was_active(SoakFault::MachineStalled) =>
            {
                Some("408 of a proxy that could not read".to_owned())
            }
            RequestOutcome::NoAnswer(_) if frozen => {
                Some("connection closed by a frozen proxy".to_owned())
            }
            _ => None,
        };
        match why {
            Some(why) => self.ledger.record_explained(why),
            None => {
                let away = format!(
                    "Redis away: {redis}, upstream away: {upstream}, proxy frozen: {frozen}"
                );
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
