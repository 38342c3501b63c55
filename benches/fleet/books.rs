//! Ledger of the fleet test: requests, responses, faults and configurations, and the checks on
//! them.
//!
//! The decision on an admitted request was made between its send and response times. A request
//! counts in a window only if that interval lies entirely within it. A slow machine therefore makes
//! the checks weaker, never wrong.

use crate::policies::{FleetKey, FleetPolicy, LIMIT_PERIOD, StoreFailureMode};
use crate::support::client::RequestOutcome;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tidegate::clock::Clock;

/// Time after its end in which a fault still explains a problem: fallback admissions are written
/// back, and clients detect a lost node.
const FAULT_AFTERMATH: Duration = Duration::from_secs(5);
/// Maximum clock difference between Redis and the ledger.
const CLOCK_TOLERANCE: Duration = Duration::from_millis(10);

/// A fault in the fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FleetFault {
    /// A node is lost permanently.
    NodeLost(u8),
    /// A sidecar cannot reach Redis; its share is one in `live_nodes`.
    NodePartitioned { node: u8, live_nodes: u64 },
    /// A Redis master is unreachable.
    MasterPartitioned(usize),
    /// A Redis master is unreachable and returns empty.
    MasterLost(usize),
    /// The test machine itself stalled, so Redis responses are late on every node.
    MachineStalled,
}

#[derive(Debug)]
struct FaultPeriod {
    fault: FleetFault,
    /// The fault started between these two times.
    began: Instant,
    in_effect: Option<Instant>,
    ended: Option<Instant>,
}

/// A configuration that reached one node after another.
#[derive(Debug)]
struct ConfigVersion {
    has_lowered_limits: bool,
    /// Before the first node loaded it, and after all had loaded it.
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

/// A request in flight.
#[derive(Debug)]
pub(crate) struct PendingRequest<'a> {
    ledger: &'a RequestLedger,
    key: usize,
    node: u8,
    sent: Instant,
}

/// The fullest window of one kind: admitted units, and permitted units.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FullestWindow {
    pub(crate) admitted: u64,
    pub(crate) bound: u64,
}

/// Results of one policy.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WindowReport {
    pub(crate) count: u64,
    /// The fullest windows where only the limit applies, and where a fault permits more.
    pub(crate) without_fault: FullestWindow,
    pub(crate) in_fault: FullestWindow,
    /// Number of windows without an upper bound.
    pub(crate) unbounded: u64,
}

/// Results of the requests in one time span.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestTotals {
    pub(crate) requests: u64,
    pub(crate) failed: u64,
    /// Sent and admitted requests, by policy.
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

    /// The request is dropped from the ledger unless it is finished.
    pub(crate) fn begin_request(&self, key: usize, node: u8) -> PendingRequest<'_> {
        PendingRequest {
            ledger: self,
            key,
            node,
            sent: Instant::now(),
        }
    }

    /// Records a fault and runs `act`, which causes it. The fault is in effect when `act` ends, and
    /// lasts until the caller ends it.
    pub(crate) async fn begin_fault(&self, fault: FleetFault, act: impl Future<Output = ()>) {
        let began = Instant::now();
        self.fault_periods.lock().unwrap().push(FaultPeriod {
            fault,
            began,
            in_effect: None,
            ended: None,
        });
        act.await;
        self.update_fault(fault, |period| period.in_effect = Some(Instant::now()));
    }

    pub(crate) fn end_fault(&self, fault: FleetFault) {
        self.update_fault(fault, |period| period.ended = Some(Instant::now()));
    }

    fn update_fault(&self, fault: FleetFault, change: impl FnMut(&mut FaultPeriod)) {
        let mut periods = self.fault_periods.lock().unwrap();
        periods
            .iter_mut()
            .filter(|period| period.fault == fault && period.ended.is_none())
            .for_each(change);
    }

    /// Records a stall of the machine from a given time until now.
    pub(crate) fn record_stall(&self, began: Instant) {
        let now = Instant::now();
        eprintln!("this machine stalled for {:?}", now - began);
        let period = FaultPeriod {
            fault: FleetFault::MachineStalled,
            began,
            in_effect: Some(now),
            ended: Some(now),
        };
        self.fault_periods.lock().unwrap().push(period);
    }

    /// Returns the total stall time between two times.
    pub(crate) fn total_stall(&self, from: Instant, to: Instant) -> Duration {
        let periods = self.fault_periods.lock().unwrap();
        let still = periods.iter().filter(|period| {
            period.fault == FleetFault::MachineStalled && period.overlaps(from, to)
        });
        still
            .filter_map(|period| Some(period.ended? - period.began))
            .sum()
    }

    /// Records that the first node is about to load another configuration.
    pub(crate) fn begin_rollout(&self, lowered: bool) {
        self.config_versions.lock().unwrap().push(ConfigVersion {
            has_lowered_limits: lowered,
            began: Instant::now(),
            rolled_out: None,
        });
    }

    /// Records that all nodes have loaded it.
    pub(crate) fn end_rollout(&self) {
        if let Some(version) = self.config_versions.lock().unwrap().last_mut() {
            version.rolled_out = Some(Instant::now());
        }
    }

    /// Records a problem that no fault explains; prints the first of each kind immediately.
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

    pub(crate) fn explained_count_by_cause(&self) -> BTreeMap<String, u64> {
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

    /// Records a warning or an error from a sidecar's log.
    pub(crate) fn record_log_line(&self, node: u8, message: &str, line: &str) {
        // Correct and expected messages.
        if message.contains("clients choose these values") {
            return;
        }
        let now = Instant::now();
        let periods = self.fault_periods.lock().unwrap();
        let explains = |period: &&FaultPeriod| match period.fault {
            FleetFault::NodePartitioned { node: cut, .. } => {
                cut == node && period.overlaps(now, now)
            }
            FleetFault::MasterPartitioned(_)
            | FleetFault::MasterLost(_)
            | FleetFault::MachineStalled => period.overlaps(now, now),
            FleetFault::NodeLost(_) => false,
        };
        let why = periods
            .iter()
            .find(explains)
            .map(|period| period.fault.to_string());
        drop(periods);
        match why {
            Some(why) => self.record_explained(format!("in a log: {message} ({why})")),
            None => self.record_unexplained(format!("in the log of node {node}: {line}")),
        }
    }

    /// Checks every request individually, after all have ended.
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
                RequestOutcome::NoAnswer(_) => format!("{path}: no response"),
                RequestOutcome::TimedOut => {
                    format!("{path}: no response and no end of the connection")
                }
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

    /// Returns the fault that explains a request's result.
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
        let periods = self.fault_periods.lock().unwrap();
        let mut all = periods
            .iter()
            .filter(|period| period.overlaps(record.sent, record.answered));
        let found = all.find(|period| match period.fault {
            // The node is lost permanently, but clients stop using it soon.
            FleetFault::NodeLost(node) => is_broken && node == record.node,
            FleetFault::NodePartitioned { node, .. } => is_refused && node == record.node,
            FleetFault::MasterPartitioned(master) | FleetFault::MasterLost(master) => {
                is_refused && master == key.master
            }
            FleetFault::MachineStalled => is_refused,
        });
        found.map(|period| period.fault)
    }

    /// Checks every window of every key.
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

    /// Returns each window of a key that may be the fullest: its start, and the requests certainly
    /// admitted in it.
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

    /// Returns the start of the clock-aligned window, or the given start.
    fn window_start(&self, at: Instant) -> Instant {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap();
        let since_us = micros(at - self.start);
        let begins_us = since_us.saturating_sub((self.start_us + since_us) % micros(LIMIT_PERIOD));
        self.start + Duration::from_micros(begins_us)
    }

    /// Returns the units that may be admitted between two times: by the limit, and additionally
    /// through faults. `None` means no bound.
    fn allowed_units(
        &self,
        key: &FleetKey,
        policy: &FleetPolicy,
        from: Instant,
        to: Instant,
    ) -> (u64, Option<u64>) {
        let limit = self.limit_during(policy, from, to);
        let mut more = 0;
        for period in self.fault_periods.lock().unwrap().iter() {
            let there = period.in_effect.unwrap_or(to);
            let overlaps = period.overlaps(from, to);
            let straddles = from < there && to > period.began;
            match (period.fault, policy.on_store_failure) {
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
                // The node's own share, in addition to the admissions by Redis elsewhere.
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
                // A node without state for the key starts with its whole share.
                (
                    FleetFault::MasterPartitioned(_) | FleetFault::MasterLost(_),
                    StoreFailureMode::Local,
                ) if straddles => more += limit,
                // Redis lost its counters.
                (FleetFault::MasterLost(_), StoreFailureMode::Closed) if straddles => more += limit,
                (FleetFault::MasterPartitioned(_) | FleetFault::MasterLost(_), _) => {}
            }
        }
        (limit, Some(more))
    }

    /// While nodes have different configurations, the highest limit applies.
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

    /// Returns the units that a policy's keys can admit under full demand.
    pub(crate) fn possible_units(
        &self,
        policy: &FleetPolicy,
        keys: u64,
        from: Instant,
        to: Instant,
    ) -> f64 {
        // The lowest of the limits: admitting more than it is not a shortfall.
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

    /// Returns latency quantiles, in 1/1000, of complete responses.
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

    /// Seconds since the start.
    pub(crate) fn seconds_since_start(&self, moment: Instant) -> f64 {
        (moment - self.start).as_secs_f64()
    }
}

impl FaultPeriod {
    /// Returns whether the fault, or its aftermath, was active at any time between these times.
    fn overlaps(&self, from: Instant, to: Instant) -> bool {
        // All clients detect a lost node soon.
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
            Self::MachineStalled => "this machine stalled",
        })
    }
}
