//! What was asked, what came back, which faults were there, and what none of them explains.

use crate::support::client::Outcome;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long after its end a fault still explains something: connections are made anew, the breaker closes.
const AFTERMATH: Duration = Duration::from_secs(2);

/// Something that is out of order on purpose, for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Stopped, killed or empty.
    Redis,
    /// Killed and started again. Single broken answers are a [`Route`]'s, not this.
    Upstream,
    /// The configuration file is wrong.
    Config,
}

/// A path of the upstream, and what a client may get there.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) path: &'static str,
    /// Statuses that need no fault.
    pub(crate) usual: &'static [u16],
    /// The same while Redis is away.
    pub(crate) without_redis: &'static [u16],
    /// The upstream breaks off each of its answers: whole ones are wrong.
    pub(crate) cut: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Books {
    sent: AtomicU64,
    given_up: AtomicU64,
    /// Answers by status.
    seen: Mutex<BTreeMap<u16, u64>>,
    /// Each with its begin and, once it is over, its end.
    faults: Mutex<Vec<(Fault, Instant, Option<Instant>)>>,
    explained: Mutex<BTreeMap<String, u64>>,
    complaints: Mutex<BTreeMap<String, u64>>,
}

/// A request under way; counted as sent, whatever becomes of it.
#[derive(Debug)]
pub(crate) struct Asked<'a> {
    books: &'a Books,
    began: Instant,
}

impl Books {
    pub(crate) fn ask(&self) -> Asked<'_> {
        self.sent.fetch_add(1, Ordering::Relaxed);
        Asked {
            books: self,
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

    pub(crate) fn seen(&self) -> BTreeMap<u16, u64> {
        self.seen.lock().unwrap().clone()
    }

    /// Faults' consequences, and how often each was met.
    pub(crate) fn explained(&self) -> BTreeMap<String, u64> {
        self.explained.lock().unwrap().clone()
    }

    /// What no fault explains, and how often each was met.
    pub(crate) fn complaints(&self) -> BTreeMap<String, u64> {
        self.complaints.lock().unwrap().clone()
    }

    pub(crate) fn begin(&self, fault: Fault) {
        self.faults
            .lock()
            .unwrap()
            .push((fault, Instant::now(), None));
    }

    pub(crate) fn end(&self, fault: Fault) {
        let mut faults = self.faults.lock().unwrap();
        for (_, _, end) in faults
            .iter_mut()
            .filter(|(kind, _, end)| *kind == fault && end.is_none())
        {
            *end = Some(Instant::now());
        }
    }

    /// Whether this fault, or what comes after it, was there at any time since `began`.
    fn was(&self, fault: Fault, began: Instant) -> bool {
        let faults = self.faults.lock().unwrap();
        faults
            .iter()
            .any(|(kind, _, end)| *kind == fault && end.is_none_or(|end| end + AFTERMATH >= began))
    }

    /// Something that no fault explains; the first of its kind is told at once.
    pub(crate) fn complain(&self, complaint: String) {
        let mut complaints = self.complaints.lock().unwrap();
        let times = complaints.entry(complaint.clone()).or_default();
        *times += 1;
        if *times == 1 {
            println!("UNEXPLAINED  {complaint}");
        }
    }

    /// A warning or an error in the proxy's log.
    pub(crate) fn logged(&self, level: &str, message: &str, line: &str) {
        let now = Instant::now();
        let is_explained = match message {
            "Redis is down: policies decide by on_store_failure"
            | "Redis does not let the instances be counted" => self.was(Fault::Redis, now),
            "the new configuration is wrong; the last good one stays in effect" => {
                self.was(Fault::Config, now)
            }
            // Some of the upstream's answers are always broken.
            "requests are not forwarded" => true,
            // An error in the configuration: file, line, column.
            _ => message.contains("soak.toml:") && self.was(Fault::Config, now),
        };
        if is_explained {
            self.explain(format!(
                "in the log: {level} {}",
                message.rsplit('/').next().unwrap_or(message)
            ));
        } else {
            println!("{line}");
            self.complain(format!("in the log: {level} {message}"));
        }
    }

    fn explain(&self, what: String) {
        *self.explained.lock().unwrap().entry(what).or_default() += 1;
    }
}

impl Asked<'_> {
    /// The client leaves on purpose. What the proxy counts of it, if anything, is unknown.
    pub(crate) fn give_up(self) {
        self.books.given_up.fetch_add(1, Ordering::Relaxed);
    }

    /// An answer that needs no explanation, nor does a connection that is closed without one.
    pub(crate) fn refused(self, usual: &[u16], outcome: &Outcome) {
        match outcome {
            Outcome::Nothing(_) => self.give_up(),
            Outcome::Answered(status) => {
                self.count(*status);
                if !usual.contains(status) {
                    self.books
                        .complain(format!("a hostile request was answered with {status}"));
                }
            }
            other => self.books.complain(format!("a hostile request: {other:?}")),
        }
    }

    pub(crate) fn judge(self, route: &Route, outcome: &Outcome) {
        if let Outcome::Answered(status) | Outcome::Cut(status) | Outcome::Mixed(status) = outcome {
            self.count(*status);
        }
        let (redis, upstream) = (self.was(Fault::Redis), self.was(Fault::Upstream));
        let path = route.path;
        let why = match outcome {
            Outcome::Answered(200) if route.cut => None,
            Outcome::Answered(status) if route.usual.contains(status) => return,
            Outcome::Cut(200) if route.cut => return,
            // What breaks off before the head was written, on a busy machine, has none.
            Outcome::Nothing(_) if route.cut => return,
            Outcome::Answered(status) if redis && route.without_redis.contains(status) => {
                Some(format!("{path}: {status} without Redis"))
            }
            Outcome::Answered(status @ 502..=504) if upstream => {
                Some(format!("{status} without an upstream"))
            }
            Outcome::Cut(101 | 200) if upstream => {
                Some("broken off without an upstream".to_owned())
            }
            _ => None,
        };
        match why {
            Some(why) => self.books.explain(why),
            None => {
                let away = format!("Redis away: {redis}, upstream away: {upstream}");
                self.books.complain(format!("{path}: {outcome:?} ({away})"));
            }
        }
    }

    fn was(&self, fault: Fault) -> bool {
        self.books.was(fault, self.began)
    }

    fn count(&self, status: u16) {
        *self.books.seen.lock().unwrap().entry(status).or_default() += 1;
    }
}
