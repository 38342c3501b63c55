//! What was asked and answered, what was out of order meanwhile, and what that explains.
//!
//! A request that was admitted was decided between the moments at which it was sent and answered. Only what lies wholly
//! in a window counts as in it, so a slow machine makes the judgement milder and never wrong.

use crate::policies::{Key, PER, Policy, Without};
use crate::support::client::Outcome;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tidegate::clock::Clock;

/// How long after its end a fault still explains something: what was admitted is written back, and whoever keeps to a
/// node that is lost finds out.
const AFTERMATH: Duration = Duration::from_secs(5);
/// How far the clocks of Redis and of the books may be apart.
const CLOCKS: Duration = Duration::from_millis(10);

/// What is out of order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A machine is gone for good.
    NodeLost(u8),
    /// A sidecar does not reach Redis; so many others know of it.
    NodeCut { node: u8, live: u64 },
    /// Nobody reaches this one.
    MasterCut(usize),
    /// The same, and it comes back empty.
    MasterLost(usize),
    /// This machine is so busy that nothing goes on: answers of Redis come too late, anywhere.
    Still,
}

#[derive(Debug)]
struct Trouble {
    fault: Fault,
    /// It came between these two moments.
    began: Instant,
    there: Option<Instant>,
    over: Option<Instant>,
}

/// A configuration that came to one node after the other.
#[derive(Debug)]
struct Version {
    lowered: bool,
    /// Before the first node had it; when all had it.
    began: Instant,
    everywhere: Option<Instant>,
}

#[derive(Debug)]
struct Record {
    key: usize,
    node: u8,
    sent: Instant,
    answered: Instant,
    outcome: Outcome,
}

#[derive(Debug)]
pub(crate) struct Books {
    pub(crate) start: Instant,
    start_us: u64,
    records: Mutex<Vec<Record>>,
    troubles: Mutex<Vec<Trouble>>,
    versions: Mutex<Vec<Version>>,
    explained: Mutex<BTreeMap<String, u64>>,
    complaints: Mutex<BTreeMap<String, u64>>,
}

/// A request under way.
#[derive(Debug)]
pub(crate) struct Asked<'a> {
    books: &'a Books,
    key: usize,
    node: u8,
    sent: Instant,
}

/// The fullest window of one kind: what was admitted, and what may be.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fullest {
    pub(crate) admitted: u64,
    pub(crate) allowed: u64,
}

/// Of one policy.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Windows {
    pub(crate) count: u64,
    /// Where the limit itself is the bound, and where a fault explains more.
    pub(crate) plain: Fullest,
    pub(crate) in_fault: Fullest,
    /// That nothing bounds.
    pub(crate) unbounded: u64,
}

/// What came of the requests of some time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Share {
    pub(crate) requests: u64,
    pub(crate) failed: u64,
    /// Asked and admitted, by policy.
    pub(crate) asked: BTreeMap<&'static str, u64>,
    pub(crate) admitted: BTreeMap<&'static str, u64>,
}

impl Books {
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            start_us: Clock::system().now_us(),
            records: Mutex::default(),
            troubles: Mutex::default(),
            versions: Mutex::default(),
            explained: Mutex::default(),
            complaints: Mutex::default(),
        }
    }

    /// Is forgotten unless it ends.
    pub(crate) fn ask(&self, key: usize, node: u8) -> Asked<'_> {
        Asked {
            books: self,
            key,
            node,
            sent: Instant::now(),
        }
    }

    /// A fault comes when this is done; the rest is over when it has been said so.
    pub(crate) async fn begin(&self, fault: Fault, act: impl Future<Output = ()>) {
        let began = Instant::now();
        self.troubles.lock().unwrap().push(Trouble {
            fault,
            began,
            there: None,
            over: None,
        });
        act.await;
        self.of(fault, |trouble| trouble.there = Some(Instant::now()));
    }

    pub(crate) fn over(&self, fault: Fault) {
        self.of(fault, |trouble| trouble.over = Some(Instant::now()));
    }

    fn of(&self, fault: Fault, change: impl FnMut(&mut Trouble)) {
        let mut troubles = self.troubles.lock().unwrap();
        troubles
            .iter_mut()
            .filter(|trouble| trouble.fault == fault && trouble.over.is_none())
            .for_each(change);
    }

    /// From a moment until now nothing went on.
    pub(crate) fn stood_still(&self, began: Instant) {
        let now = Instant::now();
        eprintln!("this machine stood still for {:?}", now - began);
        let trouble = Trouble {
            fault: Fault::Still,
            began,
            there: Some(now),
            over: Some(now),
        };
        self.troubles.lock().unwrap().push(trouble);
    }

    /// For how long nothing went on between these, in all.
    pub(crate) fn still(&self, from: Instant, to: Instant) -> Duration {
        let troubles = self.troubles.lock().unwrap();
        let still = troubles
            .iter()
            .filter(|trouble| trouble.fault == Fault::Still && trouble.was(from, to));
        still
            .filter_map(|trouble| Some(trouble.over? - trouble.began))
            .sum()
    }

    /// The first node is about to have another configuration.
    pub(crate) fn version(&self, lowered: bool) {
        self.versions.lock().unwrap().push(Version {
            lowered,
            began: Instant::now(),
            everywhere: None,
        });
    }

    /// All have it.
    pub(crate) fn is_everywhere(&self) {
        if let Some(version) = self.versions.lock().unwrap().last_mut() {
            version.everywhere = Some(Instant::now());
        }
    }

    /// Something that no fault explains; the first of its kind is told at once.
    pub(crate) fn complain(&self, complaint: String) {
        let mut complaints = self.complaints.lock().unwrap();
        let times = complaints.entry(complaint.clone()).or_default();
        *times += 1;
        if *times == 1 {
            eprintln!("UNEXPLAINED  {complaint}");
        }
    }

    pub(crate) fn complaints(&self) -> BTreeMap<String, u64> {
        self.complaints.lock().unwrap().clone()
    }

    pub(crate) fn explained(&self) -> BTreeMap<String, u64> {
        self.explained.lock().unwrap().clone()
    }

    fn explain(&self, what: String) {
        *self.explained.lock().unwrap().entry(what).or_default() += 1;
    }

    /// A warning or an error in a sidecar's log.
    pub(crate) fn logged(&self, node: u8, message: &str, line: &str) {
        // True, and meant.
        if message.contains("clients choose these values") {
            return;
        }
        let now = Instant::now();
        let troubles = self.troubles.lock().unwrap();
        let explains = |trouble: &&Trouble| match trouble.fault {
            Fault::NodeCut { node: cut, .. } => cut == node && trouble.was(now, now),
            Fault::MasterCut(_) | Fault::MasterLost(_) | Fault::Still => trouble.was(now, now),
            Fault::NodeLost(_) => false,
        };
        let why = troubles
            .iter()
            .find(explains)
            .map(|trouble| trouble.fault.to_string());
        drop(troubles);
        match why {
            Some(why) => self.explain(format!("in a log: {message} ({why})")),
            None => self.complain(format!("in the log of node {node}: {line}")),
        }
    }

    /// Judges every request by itself, once all have ended.
    pub(crate) fn judge_requests(&self, keys: &[Key]) {
        for record in self.records.lock().unwrap().iter() {
            let Some(key) = keys.get(record.key) else {
                continue;
            };
            let usual = match record.outcome {
                Outcome::Answered(200) => true,
                Outcome::Answered(429) => key.policy.is_some(),
                _ => false,
            };
            if usual {
                continue;
            }
            let (path, _) = key.request();
            let what = match record.outcome {
                Outcome::Answered(status) => format!("{path}: {status}"),
                Outcome::Cut(status) => format!("{path}: {status}, not whole"),
                Outcome::Mixed(status) => format!("{path}: {status}, another's"),
                Outcome::Nothing(_) => format!("{path}: no answer"),
                Outcome::Hung => format!("{path}: no answer, nor an end"),
            };
            match self.why(record, key) {
                Some(why) => self.explain(format!("{what} ({why})")),
                None => {
                    eprintln!(
                        "{what}: {:?} of node {} at {:.1} s",
                        record.outcome,
                        record.node,
                        self.at(record.sent)
                    );
                    self.complain(what);
                }
            }
        }
    }

    /// The fault that explains what became of a request.
    fn why(&self, record: &Record, key: &Key) -> Option<Fault> {
        let is_closed = key
            .policy
            .is_some_and(|policy| policy.without == Without::Closed);
        let is_refused = is_closed && matches!(record.outcome, Outcome::Answered(503));
        let is_broken = matches!(
            record.outcome,
            Outcome::Nothing(_) | Outcome::Hung | Outcome::Cut(_) | Outcome::Answered(502)
        );
        let troubles = self.troubles.lock().unwrap();
        let mut all = troubles
            .iter()
            .filter(|trouble| trouble.was(record.sent, record.answered));
        let found = all.find(|trouble| match trouble.fault {
            // It is gone for good, but nobody goes there for ever.
            Fault::NodeLost(node) => is_broken && node == record.node,
            Fault::NodeCut { node, .. } => is_refused && node == record.node,
            Fault::MasterCut(master) | Fault::MasterLost(master) => {
                is_refused && master == key.master
            }
            Fault::Still => is_refused,
        });
        found.map(|trouble| trouble.fault)
    }

    /// Judges every window of every key.
    pub(crate) fn judge_windows(&self, keys: &[Key]) -> BTreeMap<&'static str, Windows> {
        let mut found: BTreeMap<&'static str, Windows> = BTreeMap::new();
        for (number, key) in keys.iter().enumerate() {
            let Some(policy) = key.policy else { continue };
            let windows = found.entry(policy.name).or_default();
            for (from, admitted) in self.windows(number, policy) {
                windows.count += 1;
                let (plain, more) = self.allowed(key, policy, from, from + PER);
                let Some(more) = more else {
                    windows.unbounded += 1;
                    continue;
                };
                let fullest = if more == 0 {
                    &mut windows.plain
                } else {
                    &mut windows.in_fault
                };
                let allowed = plain + more;
                if admitted * fullest.allowed.max(1) >= fullest.admitted * allowed {
                    *fullest = Fullest { admitted, allowed };
                }
                if admitted > allowed {
                    let (name, at) = (policy.name, self.at(from));
                    eprintln!(
                        "{name}: {admitted} admitted in {PER:?} from {at:.3} s, at most {allowed} may be"
                    );
                    self.complain(format!("{name}: more admitted in a window than may be"));
                }
            }
        }
        found
    }

    /// Each window of a key that can be the fullest: where it begins, and what was certainly admitted in it.
    fn windows(&self, key: usize, policy: &Policy) -> Vec<(Instant, u64)> {
        let records = self.records.lock().unwrap();
        let is_ours = |record: &&Record| {
            record.key == key && matches!(record.outcome, Outcome::Answered(200))
        };
        let mut admitted: Vec<_> = records
            .iter()
            .filter(is_ours)
            .map(|record| (record.sent, record.answered))
            .collect();
        admitted.sort_unstable();
        if policy.is_aligned() {
            let mut windows: BTreeMap<Instant, u64> = BTreeMap::new();
            for (sent, answered) in admitted {
                let begins = self.aligned(sent);
                let count = windows.entry(begins).or_default();
                *count += u64::from(sent >= begins + CLOCKS && answered + CLOCKS < begins + PER);
            }
            return windows.into_iter().collect();
        }
        let within = |nth: usize| {
            let from = admitted[nth].0;
            let sent = admitted[nth..]
                .iter()
                .take_while(|(sent, _)| *sent < from + PER);
            (
                from,
                sent.filter(|(_, answered)| *answered < from + PER)
                    .map(|_| 1)
                    .sum(),
            )
        };
        (0..admitted.len()).map(within).collect()
    }

    /// The begin of the window that the clock has, or the start.
    fn aligned(&self, at: Instant) -> Instant {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap();
        let since_us = micros(at - self.start);
        let begins_us = since_us.saturating_sub((self.start_us + since_us) % micros(PER));
        self.start + Duration::from_micros(begins_us)
    }

    /// What may be admitted from one moment to another: by the limit, and by faults beside it; `None`: anything.
    fn allowed(
        &self,
        key: &Key,
        policy: &Policy,
        from: Instant,
        to: Instant,
    ) -> (u64, Option<u64>) {
        let limit = self.limit(policy, from, to);
        let mut more = 0;
        for trouble in self.troubles.lock().unwrap().iter() {
            let there = trouble.there.unwrap_or(to);
            let overlaps = trouble.was(from, to);
            let straddles = from < there && to > trouble.began;
            match (trouble.fault, policy.without) {
                (Fault::NodeLost(_), _) => {}
                (Fault::NodeCut { .. } | Fault::Still, Without::Open) if overlaps => {
                    return (limit, None);
                }
                (Fault::Still, Without::Local) if overlaps => more = more.max(limit),
                (Fault::Still, _) => {}
                // Its own share, beside what Redis lets the others have.
                (Fault::NodeCut { live, .. }, Without::Local) if overlaps => {
                    more += limit.div_ceil(live)
                }
                (Fault::NodeCut { .. }, _) => {}
                (Fault::MasterCut(master) | Fault::MasterLost(master), _)
                    if master != key.master => {}
                (Fault::MasterCut(_) | Fault::MasterLost(_), Without::Open) if overlaps => {
                    return (limit, None);
                }
                // Who knew nothing of the key begins with his whole share.
                (Fault::MasterCut(_) | Fault::MasterLost(_), Without::Local) if straddles => {
                    more += limit
                }
                // What was counted is lost.
                (Fault::MasterLost(_), Without::Closed) if straddles => more += limit,
                (Fault::MasterCut(_) | Fault::MasterLost(_), _) => {}
            }
        }
        (limit, Some(more))
    }

    /// While nodes disagree, that of the most generous.
    fn limit(&self, policy: &Policy, from: Instant, to: Instant) -> u64 {
        let versions = self.versions.lock().unwrap();
        let lasts_until = |nth: usize| versions.get(nth).map(|next| next.everywhere.unwrap_or(to));
        let first = (false, self.start, lasts_until(0));
        let others = versions.iter().enumerate();
        let others =
            others.map(|(nth, version)| (version.lowered, version.began, lasts_until(nth + 1)));
        let holds = std::iter::once(first).chain(others);
        let holds =
            holds.filter(|(_, began, ends)| *began < to && ends.is_none_or(|ends| ends > from));
        holds
            .map(|(lowered, ..)| policy.requests(lowered))
            .max()
            .unwrap_or(policy.requests)
    }

    /// What can be admitted by a policy's keys, if they are asked for it.
    pub(crate) fn possible(&self, policy: &Policy, keys: u64, from: Instant, to: Instant) -> f64 {
        // The least of the limits: what is admitted beyond is no lack.
        let versions = self.versions.lock().unwrap();
        let is_lowered = versions
            .iter()
            .rev()
            .find(|version| version.began < to)
            .is_some_and(|it| it.lowered);
        let was_lowered = versions
            .iter()
            .rev()
            .find(|version| version.began < from)
            .is_some_and(|it| it.lowered);
        let requests = policy.requests(is_lowered || was_lowered) * keys;
        requests as f64 * (to - from).as_secs_f64() / PER.as_secs_f64()
    }

    pub(crate) fn share(&self, keys: &[Key], from: Instant, to: Instant) -> Share {
        let mut share = Share::default();
        for record in self
            .records
            .lock()
            .unwrap()
            .iter()
            .filter(|one| one.sent >= from && one.sent < to)
        {
            share.requests += 1;
            let is_admitted = matches!(record.outcome, Outcome::Answered(200));
            share.failed +=
                u64::from(!is_admitted && !matches!(record.outcome, Outcome::Answered(429)));
            if let Some(policy) = keys.get(record.key).and_then(|key| key.policy) {
                *share.asked.entry(policy.name).or_default() += 1;
                *share.admitted.entry(policy.name).or_default() += u64::from(is_admitted);
            }
        }
        share
    }

    /// How long those took that came whole, of a thousand sorted ones each of these.
    pub(crate) fn took(&self, per_mille: &[usize]) -> Vec<Duration> {
        let records = self.records.lock().unwrap();
        let whole = records
            .iter()
            .filter(|record| matches!(record.outcome, Outcome::Answered(_)));
        let mut took: Vec<_> = whole.map(|record| record.answered - record.sent).collect();
        took.sort_unstable();
        let at = |per_mille: &usize| took.len().saturating_sub(1) * per_mille / 1000;
        per_mille
            .iter()
            .map(|nth| took.get(at(nth)).copied().unwrap_or_default())
            .collect()
    }

    /// In seconds since the start.
    pub(crate) fn at(&self, moment: Instant) -> f64 {
        (moment - self.start).as_secs_f64()
    }
}

impl Trouble {
    /// Whether it, or what comes after it, was there at any time between these.
    fn was(&self, from: Instant, to: Instant) -> bool {
        // Of a node that is lost soon everybody knows.
        let over = if let Fault::NodeLost(_) = self.fault {
            self.there
        } else {
            self.over
        };
        self.began <= to && over.is_none_or(|over| over + AFTERMATH >= from)
    }
}

impl Asked<'_> {
    pub(crate) fn end(self, outcome: Outcome) {
        let Self {
            books,
            key,
            node,
            sent,
        } = self;
        let record = Record {
            key,
            node,
            sent,
            answered: Instant::now(),
            outcome,
        };
        books.records.lock().unwrap().push(record);
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NodeLost(_) => "its node is lost",
            Self::NodeCut { .. } => "its node is cut off from Redis",
            Self::MasterCut(_) => "a master is cut off",
            Self::MasterLost(_) => "a master is lost",
            Self::Still => "this machine stood still",
        })
    }
}
