//! Checks that a fault explains each unusual response and each log line.

use crate::faults::{FaultPeriod, FleetFault};
use crate::ledger::{FleetLedger, RequestRecord};
use crate::policies::{FleetKey, StoreFailureMode};
use crate::support::client::RequestOutcome;
use std::time::Instant;

impl FleetLedger {
    /// Records a warning or an error from a sidecar's log.
    pub(crate) fn record_log_line(&self, node: u8, message: &str, line: &str) {
        // Correct and expected messages about the configuration.
        let expected = ["clients choose these values", "keeps one entry per request"];
        if expected.iter().any(|text| message.contains(text)) {
            return;
        }
        let now = Instant::now();
        let periods = self.fault_periods.lock().unwrap();
        let explains = |period: &&FaultPeriod| match period.fault {
            FleetFault::NodePartitioned { node: faulty, .. }
            | FleetFault::SidecarFrozen { node: faulty, .. } => {
                faulty == node && period.overlaps(now, now)
            }
            FleetFault::MasterPartitioned(_)
            | FleetFault::MasterLost(_)
            | FleetFault::MachineStalled => period.overlaps(now, now),
            FleetFault::NodeLost(_) | FleetFault::RestartedInOutage { .. } => false,
        };
        let why = periods
            .iter()
            .find(explains)
            .map(|period| period.fault.to_string());
        drop(periods);
        match why {
            Some(why) => self.record_explained(format!("in a log: {message} ({why})")),
            None => self.record_unexplained_problem(format!("in the log of node {node}: {line}")),
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
            let path = key.path();
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
                        "{what}: {:?} of node {} at {:.3} s, after {:?}, key on master {}",
                        record.outcome,
                        record.node,
                        self.seconds_since_start(record.sent),
                        record.answered - record.sent,
                        key.master
                    );
                    self.record_unexplained_problem(what);
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
            FleetFault::NodePartitioned { node, .. } | FleetFault::SidecarFrozen { node, .. } => {
                is_refused && node == record.node
            }
            FleetFault::MasterPartitioned(master) | FleetFault::MasterLost(master) => {
                is_refused && key.uses_master(master)
            }
            FleetFault::MachineStalled => is_refused,
            FleetFault::RestartedInOutage { .. } => false,
        });
        found.map(|period| period.fault)
    }
}
