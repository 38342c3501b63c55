//! What was asked and answered, what was out of order meanwhile, and what that explains.
//!
//! A request that was admitted was decided between the moments at which it was sent and answered. Only what lies wholly
//! in a window counts as in it, so a slow machine makes the judgement milder and never wrong.

use crate::policies::{FleetKey, FleetPolicy, LIMIT_PERIOD, StoreFailureMode};
use crate::support::client::RequestOutcome;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tidegate::clock::Clock;

/// How long after its end a fault still explains something: what was admitted is written back, and whoever keeps to a
/// node that is lost finds out.
const FAULT_AFTERMATH: Duration = Duration::from_secs(5);
/// How far the clocks of Redis and of the books may be apart.
const CLOCK_TOLERANCE: Duration = Duration::from_millis(10);

/// What is out of order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FleetFault {
    /// A machine is gone for good.
    NodeLost(u8),
    /// A sidecar does not reach Redis; so many others know of it.
    NodePartitioned { node: u8, live_nodes: u64 },
    /// Nobody reaches this one.
    MasterPartitioned(usize),
    /// The same, and it comes back empty.
    MasterLost(usize),
    /// This machine is so busy that nothing goes on: answers of Redis come too late, anywhere.
    MachineStalled,
}

#[derive(Debug)]
struct FaultPeriod {
    fault: FleetFault,
    /// It came between these two moments.
    began: Instant,
    in_effect: Option<Instant>,
    ended: Option<Instant>,
}

/// A configuration that came to one node after the other.
#[derive(Debug)]
struct ConfigVersion {
    has_lowered_limits: bool,
    /// Before the first node had it; when all had it.
    began: Instant,
    rolled_out: Option<Instant>,
}

#[derive(Debug)]
struct RequestRecord {
    key: usize,
    node: u8,
    sent: Instant,
    answered: Instant,
    outcome: RequestOutcome,
}

#[derive(Debug)]
pub(crate) struct RequestLedger {
    pub(crate) start: Instant,
    start_us: u64,
    records: Mutex<Vec<RequestRecord>>,
    fault_periods: Mutex<Vec<FaultPeriod>>,
    config_versions: Mutex<Vec<ConfigVersion>>,
    explained_events: Mutex<BTreeMap<String, u64>>,
    unexplained_events: Mutex<BTreeMap<String, u64>>,
}

/// A request under way.
#[derive(Debug)]
pub(crate) struct PendingRequest<'a> {
    ledger: &'a RequestLedger,
    key: usize,
    node: u8,
    sent: Instant,
}

/// The fullest window of one kind: what was admitted, and what may be.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FullestWindow {
    pub(crate) admitted: u64,
    pub(crate) bound: u64,
}

/// Of one policy.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WindowReport {
    pub(crate) count: u64,
    /// Where the limit itself is the bound, and where a fault explains more.
    pub(crate) without_fault: FullestWindow,
    pub(crate) in_fault: FullestWindow,
    /// That nothing bounds.
    pub(crate) unbounded: u64,
}

/// What came of the requests of some time.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestTotals {
    pub(crate) requests: u64,
    pub(crate) failed: u64,
    /// Asked and admitted, by policy.
    pub(crate) requested: BTreeMap<&'static str, u64>,
    pub(crate) admitted: BTreeMap<&'static str, u64>,
}

impl RequestLedger {
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            start_us: Clock::system().now_us(),
            records: Mutex::default(),
            fault_periods: Mutex::default(),
            config_versions: Mutex::default(),
            explained_events: Mutex::default(),
            unexplained_events: Mutex::default(),
        }
    }

    /// Is forgotten unless it ends.
    pub(crate) fn begin_request(&self, key: usize, node: u8) -> PendingRequest<'_> {
        PendingRequest {
            ledger: self,
            key,
            node,
            sent: Instant::now(),
        }
    }

    /// A fault comes when this is done; the rest is over when it has been said so.
    pub(crate) async fn begin_fault(&self, fault: FleetFault, act: impl Future<Output = ()>) {
        let began = Instant::now();
        self.fault_periods.lock().unwrap().push(FaultPeriod {
            fault,
            began,
            in_effect: None,
            ended: None,
        });
        act.await;
        self.update_fault(fault, |trouble| trouble.in_effect = Some(Instant::now()));
    }

    pub(crate) fn end_fault(&self, fault: FleetFault) {
        self.update_fault(fault, |trouble| trouble.ended = Some(Instant::now()));
    }

    fn update_fault(&self, fault: FleetFault, change: impl FnMut(&mut FaultPeriod)) {
        let mut troubles = self.fault_periods.lock().unwrap();
        troubles
            .iter_mut()
            .filter(|trouble| trouble.fault == fault && trouble.ended.is_none())
            .for_each(change);
    }

    /// From a moment until now nothing went on.
    pub(crate) fn record_stall(&self, began: Instant) {
        let now = Instant::now();
        eprintln!("this machine stood still for {:?}", now - began);
        let trouble = FaultPeriod {
            fault: FleetFault::MachineStalled,
            began,
            in_effect: Some(now),
            ended: Some(now),
        };
        self.fault_periods.lock().unwrap().push(trouble);
    }

    /// For how long nothing went on between these, in all.
    pub(crate) fn total_stall(&self, from: Instant, to: Instant) -> Duration {
        let troubles = self.fault_periods.lock().unwrap();
        let still = troubles.iter().filter(|trouble| {
            trouble.fault == FleetFault::MachineStalled && trouble.overlaps(from, to)
        });
        still
            .filter_map(|trouble| Some(trouble.ended? - trouble.began))
            .sum()
    }

    /// The first node is about to have another configuration.
    pub(crate) fn begin_rollout(&self, lowered: bool) {
        self.config_versions.lock().unwrap().push(ConfigVersion {
            has_lowered_limits: lowered,
            began: Instant::now(),
            rolled_out: None,
        });
    }

    /// All have it.
    pub(crate) fn end_rollout(&self) {
        if let Some(version) = self.config_versions.lock().unwrap().last_mut() {
            version.rolled_out = Some(Instant::now());
        }
    }

    /// Something that no fault explains; the first of its kind is told at once.
    pub(crate) fn record_unexplained(&self, complaint: String) {
        let mut complaints = self.unexplained_events.lock().unwrap();
        let times = complaints.entry(complaint.clone()).or_default();
        *times += 1;
        if *times == 1 {
            eprintln!("UNEXPLAINED  {complaint}");
        }
    }

    pub(crate) fn unexplained_events(&self) -> BTreeMap<String, u64> {
        self.unexplained_events.lock().unwrap().clone()
    }

    pub(crate) fn explained(&self) -> BTreeMap<String, u64> {
        self.explained_events.lock().unwrap().clone()
    }

    fn record_explained(&self, what: String) {
        *self
            .explained_events
            .lock()
            .unwrap()
            .entry(what)
            .or_default() += 1;
    }

    /// A warning or an error in a sidecar's log.
    pub(crate) fn record_log_line(&self, node: u8, message: &str, line: &str) {
        // True, and meant.
        if message.contains("clients choose these values") {
            return;
        }
        let now = Instant::now();
        let troubles = self.fault_periods.lock().unwrap();
        let explains = |trouble: &&FaultPeriod| match trouble.fault {
            FleetFault::NodePartitioned { node: cut, .. } => {
                cut == node && trouble.overlaps(now, now)
            }
            FleetFault::MasterPartitioned(_)
            | FleetFault::MasterLost(_)
            | FleetFault::MachineStalled => trouble.overlaps(now, now),
            FleetFault::NodeLost(_) => false,
        };
        let why = troubles
            .iter()
            .find(explains)
            .map(|trouble| trouble.fault.to_string());
        drop(troubles);
        match why {
            Some(why) => self.record_explained(format!("in a log: {message} ({why})")),
            None => self.record_unexplained(format!("in the log of node {node}: {line}")),
        }
    }

    /// Judges every request by itself, once all have ended.
    pub(crate) fn judge_requests(&self, keys: &[FleetKey]) {
        for record in self.records.lock().unwrap().iter() {
            let Some(key) = keys.get(record.key) else {
                continue;
            };
            let usual = match record.outcome {
                RequestOutcome::Answered(200) => true,
                RequestOutcome::Answered(429) => key.policy.is_some(),
                _ => false,
            };
            if usual {
                continue;
            }
            let (path, _) = key.path_and_user();
            let what = match record.outcome {
                RequestOutcome::Answered(status) => format!("{path}: {status}"),
                RequestOutcome::Truncated(status) => format!("{path}: {status}, not whole"),
                RequestOutcome::Mismatched(status) => format!("{path}: {status}, another's"),
                RequestOutcome::NoAnswer(_) => format!("{path}: no answer"),
                RequestOutcome::TimedOut => format!("{path}: no answer, nor an end"),
            };
            match self.find_explanation(record, key) {
                Some(why) => self.record_explained(format!("{what} ({why})")),
                None => {
                    eprintln!(
                        "{what}: {:?} of node {} at {:.1} s",
                        record.outcome,
                        record.node,
                        self.seconds_since_start(record.sent)
                    );
                    self.record_unexplained(what);
                }
            }
        }
    }

    /// The fault that explains what became of a request.
    fn find_explanation(&self, record: &RequestRecord, key: &FleetKey) -> Option<FleetFault> {
        let is_closed = key
            .policy
            .is_some_and(|policy| policy.on_store_failure == StoreFailureMode::Closed);
        let is_refused = is_closed && matches!(record.outcome, RequestOutcome::Answered(503));
        let is_broken = matches!(
            record.outcome,
            RequestOutcome::NoAnswer(_)
                | RequestOutcome::TimedOut
                | RequestOutcome::Truncated(_)
                | RequestOutcome::Answered(502)
        );
        let troubles = self.fault_periods.lock().unwrap();
        let mut all = troubles
            .iter()
            .filter(|trouble| trouble.overlaps(record.sent, record.answered));
        let found = all.find(|trouble| match trouble.fault {
            // It is gone for good, but nobody goes there for ever.
            FleetFault::NodeLost(node) => is_broken && node == record.node,
            FleetFault::NodePartitioned { node, .. } => is_refused && node == record.node,
            FleetFault::MasterPartitioned(master) | FleetFault::MasterLost(master) => {
                is_refused && master == key.master
            }
            FleetFault::MachineStalled => is_refused,
        });
        found.map(|trouble| trouble.fault)
    }

    /// Judges every window of every key.
    pub(crate) fn judge_windows(&self, keys: &[FleetKey]) -> BTreeMap<&'static str, WindowReport> {
        let mut found: BTreeMap<&'static str, WindowReport> = BTreeMap::new();
        for (number, key) in keys.iter().enumerate() {
            let Some(policy) = key.policy else { continue };
            let windows = found.entry(policy.name).or_default();
            for (from, admitted) in self.admitted_windows(number, policy) {
                windows.count += 1;
                let (plain, more) = self.allowed_units(key, policy, from, from + LIMIT_PERIOD);
                let Some(more) = more else {
                    windows.unbounded += 1;
                    continue;
                };
                let fullest = if more == 0 {
                    &mut windows.without_fault
                } else {
                    &mut windows.in_fault
                };
                let allowed = plain + more;
                if admitted * fullest.bound.max(1) >= fullest.admitted * allowed {
                    *fullest = FullestWindow {
                        admitted,
                        bound: allowed,
                    };
                }
                if admitted > allowed {
                    let (name, at) = (policy.name, self.seconds_since_start(from));
                    eprintln!(
                        "{name}: {admitted} admitted in {LIMIT_PERIOD:?} from {at:.3} s, at most {allowed} may be"
                    );
                    self.record_unexplained(format!(
                        "{name}: more admitted in a window than may be"
                    ));
                }
            }
        }
        found
    }

    /// Each window of a key that can be the fullest: where it begins, and what was certainly admitted in it.
    fn admitted_windows(&self, key: usize, policy: &FleetPolicy) -> Vec<(Instant, u64)> {
        let records = self.records.lock().unwrap();
        let is_ours = |record: &&RequestRecord| {
            record.key == key && matches!(record.outcome, RequestOutcome::Answered(200))
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
                let begins = self.window_start(sent);
                let count = windows.entry(begins).or_default();
                *count += u64::from(
                    sent >= begins + CLOCK_TOLERANCE
                        && answered + CLOCK_TOLERANCE < begins + LIMIT_PERIOD,
                );
            }
            return windows.into_iter().collect();
        }
        let within = |nth: usize| {
            let from = admitted[nth].0;
            let sent = admitted[nth..]
                .iter()
                .take_while(|(sent, _)| *sent < from + LIMIT_PERIOD);
            (
                from,
                sent.filter(|(_, answered)| *answered < from + LIMIT_PERIOD)
                    .map(|_| 1)
                    .sum(),
            )
        };
        (0..admitted.len()).map(within).collect()
    }

    /// The begin of the window that the clock has, or the start.
    fn window_start(&self, at: Instant) -> Instant {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap();
        let since_us = micros(at - self.start);
        let begins_us = since_us.saturating_sub((self.start_us + since_us) % micros(LIMIT_PERIOD));
        self.start + Duration::from_micros(begins_us)
    }

    /// What may be admitted from one moment to another: by the limit, and by faults beside it; `None`: anything.
    fn allowed_units(
        &self,
        key: &FleetKey,
        policy: &FleetPolicy,
        from: Instant,
        to: Instant,
    ) -> (u64, Option<u64>) {
        let limit = self.limit_during(policy, from, to);
        let mut more = 0;
        for trouble in self.fault_periods.lock().unwrap().iter() {
            let there = trouble.in_effect.unwrap_or(to);
            let overlaps = trouble.overlaps(from, to);
            let straddles = from < there && to > trouble.began;
            match (trouble.fault, policy.on_store_failure) {
                (FleetFault::NodeLost(_), _) => {}
                (
                    FleetFault::NodePartitioned { .. } | FleetFault::MachineStalled,
                    StoreFailureMode::Open,
                ) if overlaps => {
                    return (limit, None);
                }
                (FleetFault::MachineStalled, StoreFailureMode::Local) if overlaps => {
                    more = more.max(limit)
                }
                (FleetFault::MachineStalled, _) => {}
                // Its own share, beside what Redis lets the others have.
                (
                    FleetFault::NodePartitioned {
                        live_nodes: live, ..
                    },
                    StoreFailureMode::Local,
                ) if overlaps => more += limit.div_ceil(live),
                (FleetFault::NodePartitioned { .. }, _) => {}
                (FleetFault::MasterPartitioned(master) | FleetFault::MasterLost(master), _)
                    if master != key.master => {}
                (
                    FleetFault::MasterPartitioned(_) | FleetFault::MasterLost(_),
                    StoreFailureMode::Open,
                ) if overlaps => {
                    return (limit, None);
                }
                // Who knew nothing of the key begins with his whole share.
                (
                    FleetFault::MasterPartitioned(_) | FleetFault::MasterLost(_),
                    StoreFailureMode::Local,
                ) if straddles => more += limit,
                // What was counted is lost.
                (FleetFault::MasterLost(_), StoreFailureMode::Closed) if straddles => more += limit,
                (FleetFault::MasterPartitioned(_) | FleetFault::MasterLost(_), _) => {}
            }
        }
        (limit, Some(more))
    }

    /// While nodes disagree, that of the most generous.
    fn limit_during(&self, policy: &FleetPolicy, from: Instant, to: Instant) -> u64 {
        let versions = self.config_versions.lock().unwrap();
        let lasts_until = |nth: usize| versions.get(nth).map(|next| next.rolled_out.unwrap_or(to));
        let first = (false, self.start, lasts_until(0));
        let others = versions.iter().enumerate();
        let others = others.map(|(nth, version)| {
            (
                version.has_lowered_limits,
                version.began,
                lasts_until(nth + 1),
            )
        });
        let holds = std::iter::once(first).chain(others);
        let holds =
            holds.filter(|(_, began, ends)| *began < to && ends.is_none_or(|ends| ends > from));
        holds
            .map(|(lowered, ..)| policy.requests_per_period(lowered))
            .max()
            .unwrap_or(policy.requests)
    }

    /// What can be admitted by a policy's keys, if they are asked for it.
    pub(crate) fn possible_units(
        &self,
        policy: &FleetPolicy,
        keys: u64,
        from: Instant,
        to: Instant,
    ) -> f64 {
        // The least of the limits: what is admitted beyond is no lack.
        let versions = self.config_versions.lock().unwrap();
        let is_lowered = versions
            .iter()
            .rev()
            .find(|version| version.began < to)
            .is_some_and(|it| it.has_lowered_limits);
        let was_lowered = versions
            .iter()
            .rev()
            .find(|version| version.began < from)
            .is_some_and(|it| it.has_lowered_limits);
        let requests = policy.requests_per_period(is_lowered || was_lowered) * keys;
        requests as f64 * (to - from).as_secs_f64() / LIMIT_PERIOD.as_secs_f64()
    }

    pub(crate) fn totals_between(
        &self,
        keys: &[FleetKey],
        from: Instant,
        to: Instant,
    ) -> RequestTotals {
        let mut share = RequestTotals::default();
        for record in self
            .records
            .lock()
            .unwrap()
            .iter()
            .filter(|one| one.sent >= from && one.sent < to)
        {
            share.requests += 1;
            let is_admitted = matches!(record.outcome, RequestOutcome::Answered(200));
            share.failed +=
                u64::from(!is_admitted && !matches!(record.outcome, RequestOutcome::Answered(429)));
            if let Some(policy) = keys.get(record.key).and_then(|key| key.policy) {
                *share.requested.entry(policy.name).or_default() += 1;
                *share.admitted.entry(policy.name).or_default() += u64::from(is_admitted);
            }
        }
        share
    }

    /// How long those took that came whole, of a thousand sorted ones each of these.
    pub(crate) fn latency_quantiles(&self, per_mille: &[usize]) -> Vec<Duration> {
        let records = self.records.lock().unwrap();
        let whole = records
            .iter()
            .filter(|record| matches!(record.outcome, RequestOutcome::Answered(_)));
        let mut took: Vec<_> = whole.map(|record| record.answered - record.sent).collect();
        took.sort_unstable();
        let at = |per_mille: &usize| took.len().saturating_sub(1) * per_mille / 1000;
        per_mille
            .iter()
            .map(|nth| took.get(at(nth)).copied().unwrap_or_default())
            .collect()
    }

    /// In seconds since the start.
    pub(crate) fn seconds_since_start(&self, moment: Instant) -> f64 {
        (moment - self.start).as_secs_f64()
    }
}

impl FaultPeriod {
    /// Whether it, or what comes after it, was there at any time between these.
    fn overlaps(&self, from: Instant, to: Instant) -> bool {
        // Of a node that is lost soon everybody knows.
        let over = if let FleetFault::NodeLost(_) = self.fault {
            self.in_effect
        } else {
            self.ended
        };
        self.began <= to && over.is_none_or(|over| over + FAULT_AFTERMATH >= from)
    }
}

impl PendingRequest<'_> {
    pub(crate) fn finish(self, outcome: RequestOutcome) {
        let Self {
            ledger: books,
            key,
            node,
            sent,
        } = self;
        let record = RequestRecord {
            key,
            node,
            sent,
            answered: Instant::now(),
            outcome,
        };
        books.records.lock().unwrap().push(record);
    }
}

impl std::fmt::Display for FleetFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NodeLost(_) => "its node is lost",
            Self::NodePartitioned { .. } => "its node is cut off from Redis",
            Self::MasterPartitioned(_) => "a master is cut off",
            Self::MasterLost(_) => "a master is lost",
            Self::MachineStalled => "this machine stood still",
        })
    }
}
