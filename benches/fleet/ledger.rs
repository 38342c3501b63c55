//! Ledger of the fleet test: requests, responses, faults and configurations.

use crate::faults::{FaultPeriod, FleetFault};
use crate::policies::FleetKey;
use crate::support::client::RequestOutcome;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tidegate::clock::Clock;

/// A configuration that reached one node after another.
#[derive(Debug)]
pub(crate) struct ConfigVersion {
    pub(crate) has_lowered_limits: bool,
    /// Before the first node loaded it, and after all had loaded it.
    pub(crate) began: Instant,
    pub(crate) rolled_out: Option<Instant>,
}

#[derive(Debug)]
pub(crate) struct RequestRecord {
    pub(crate) key: usize,
    pub(crate) node: u8,
    pub(crate) sent: Instant,
    pub(crate) answered: Instant,
    pub(crate) outcome: RequestOutcome,
}

#[derive(Debug)]
pub(crate) struct FleetLedger {
    pub(crate) start: Instant,
    pub(crate) start_us: u64,
    pub(crate) records: Mutex<Vec<RequestRecord>>,
    pub(crate) fault_periods: Mutex<Vec<FaultPeriod>>,
    pub(crate) config_versions: Mutex<Vec<ConfigVersion>>,
    explained_events: Mutex<BTreeMap<String, u64>>,
    unexplained_events: Mutex<BTreeMap<String, u64>>,
    measurements: Mutex<Vec<String>>,
    in_flight: AtomicUsize,
    /// Times in which the ordinary clients wait.
    pauses: Mutex<Vec<(Instant, Option<Instant>)>>,
}

/// A request in flight.
#[derive(Debug)]
pub(crate) struct PendingRequest<'a> {
    ledger: &'a FleetLedger,
    key: usize,
    node: u8,
    sent: Instant,
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

impl FleetLedger {
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            start_us: Clock::system().now_us(),
            records: Mutex::default(),
            fault_periods: Mutex::default(),
            config_versions: Mutex::default(),
            explained_events: Mutex::default(),
            unexplained_events: Mutex::default(),
            measurements: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            pauses: Mutex::default(),
        }
    }

    /// Returns the number of requests without a result so far.
    pub(crate) fn in_flight_count(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// The request is dropped from the ledger unless it is finished.
    pub(crate) fn begin_request(&self, key: usize, node: u8) -> PendingRequest<'_> {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
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
    pub(crate) fn total_stall_time(&self, from: Instant, to: Instant) -> Duration {
        let periods = self.fault_periods.lock().unwrap();
        let still = periods.iter().filter(|period| {
            period.fault == FleetFault::MachineStalled && period.overlaps(from, to)
        });
        still
            .filter_map(|period| Some(period.ended? - period.began))
            .sum()
    }

    pub(crate) fn begin_pause(&self) {
        self.pauses.lock().unwrap().push((Instant::now(), None));
    }

    pub(crate) fn end_pause(&self) {
        if let Some((_, ended)) = self.pauses.lock().unwrap().last_mut() {
            *ended = Some(Instant::now());
        }
    }

    /// Returns the time between two times in which the ordinary clients did not wait.
    pub(crate) fn active_time(&self, from: Instant, to: Instant) -> Duration {
        let pauses = self.pauses.lock().unwrap();
        let paused = pauses.iter().map(|(began, ended)| {
            let ended = ended.unwrap_or(to).min(to);
            ended.saturating_duration_since(*began.max(&from))
        });
        (to - from).saturating_sub(paused.sum())
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

    /// Records a line of the report.
    pub(crate) fn record_measurement(&self, text: String) {
        eprintln!("          {text}");
        self.measurements.lock().unwrap().push(text);
    }

    pub(crate) fn measurements(&self) -> Vec<String> {
        self.measurements.lock().unwrap().clone()
    }

    /// Records a problem that no fault explains; prints the first of each kind immediately.
    pub(crate) fn record_unexplained_problem(&self, problem: String) {
        let mut problems = self.unexplained_events.lock().unwrap();
        let times = problems.entry(problem.clone()).or_default();
        *times += 1;
        if *times == 1 {
            eprintln!("UNEXPLAINED  {problem}");
        }
    }

    pub(crate) fn unexplained_events(&self) -> BTreeMap<String, u64> {
        self.unexplained_events.lock().unwrap().clone()
    }

    pub(crate) fn explained_count_by_cause(&self) -> BTreeMap<String, u64> {
        self.explained_events.lock().unwrap().clone()
    }

    pub(crate) fn record_explained(&self, what: String) {
        *self
            .explained_events
            .lock()
            .unwrap()
            .entry(what)
            .or_default() += 1;
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

    /// Returns how many requests of a key had no decision, or none that the client knows.
    pub(crate) fn failed_count(&self, key: usize, from: Instant) -> u64 {
        let records = self.records.lock().unwrap();
        let failed = records.iter().filter(|record| {
            record.key == key
                && record.sent >= from
                && !matches!(record.outcome, RequestOutcome::Answered(200 | 429))
        });
        failed.map(|_| 1).sum()
    }

    /// Returns the requests of a key that were sent in a time span, and how many were admitted.
    pub(crate) fn sent_and_admitted(&self, key: usize, from: Instant, to: Instant) -> (u64, u64) {
        let records = self.records.lock().unwrap();
        let (mut sent, mut admitted) = (0, 0);
        for record in records.iter().filter(|one| one.key == key) {
            sent += u64::from(record.sent >= from && record.sent < to);
            let is_admitted = matches!(record.outcome, RequestOutcome::Answered(200));
            admitted += u64::from(is_admitted && record.sent >= from && record.sent < to);
        }
        (sent, admitted)
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

    /// Returns the time in microseconds since the epoch.
    pub(crate) fn epoch_us(&self, moment: Instant) -> u64 {
        self.start_us + u64::try_from((moment - self.start).as_micros()).unwrap()
    }

    /// Seconds since the start.
    pub(crate) fn seconds_since_start(&self, moment: Instant) -> f64 {
        (moment - self.start).as_secs_f64()
    }
}

impl PendingRequest<'_> {
    pub(crate) fn finish(self, outcome: RequestOutcome) {
        let record = RequestRecord {
            key: self.key,
            node: self.node,
            sent: self.sent,
            answered: Instant::now(),
            outcome,
        };
        self.ledger.records.lock().unwrap().push(record);
    }
}

impl Drop for PendingRequest<'_> {
    fn drop(&mut self) {
        self.ledger.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
