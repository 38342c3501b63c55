//! Checks that no concurrency limit is exceeded at the apps.

use crate::FleetContext;
use crate::ledger::FleetLedger;
use crate::policies::{FleetKey, SLOT_TTL};
use std::time::Duration;

/// Time after which slots that a fault ended are renewed.
const SLOT_RECOVERY: Duration = Duration::from_secs(5);
/// What `docs/GUARANTEE.md` permits while slots end during their requests.
const IN_FLIGHT_FACTOR_IN_FAULT: u64 = 3;

/// The most requests in flight of any key: while the limit applies, and where a fault permits more.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MostInFlight {
    pub(crate) requests: u64,
    pub(crate) without_fault: u64,
    pub(crate) in_fault: u64,
}

impl FleetContext {
    /// Checks the requests in flight whenever one arrives at an app.
    pub(crate) fn judge_requests_in_flight(&self) -> MostInFlight {
        let mut most = MostInFlight::default();
        for (number, key) in self.keys.iter().enumerate() {
            let Some(policy) = key.policy.filter(|policy| policy.is_concurrency_limit()) else {
                continue;
            };
            let mut changes = Vec::new();
            for request in self.forwarded.of_key(number) {
                changes.push((request.began_us, 1_i64));
                changes.extend(request.ended_us.map(|ended_us| (ended_us, -1)));
            }
            // At the same microsecond, ends count before begins.
            changes.sort_unstable();
            let (mut in_flight, mut reported) = (0_i64, false);
            for (at_us, change) in changes {
                in_flight += change;
                let count = u64::try_from(in_flight).unwrap_or(0);
                let (highest, allowed) = if self.ledger.may_slots_end_early(key, at_us) {
                    let allowed = policy.requests * IN_FLIGHT_FACTOR_IN_FAULT;
                    (&mut most.in_fault, allowed)
                } else {
                    (&mut most.without_fault, policy.requests)
                };
                most.requests = policy.requests;
                *highest = count.max(*highest);
                if count > allowed && !reported {
                    reported = true;
                    let seconds = (at_us - self.ledger.start_us) as f64 / 1e6;
                    self.ledger.record_unexplained_problem(format!(
                        "{}, key on master {}: {count} requests in flight at {seconds:.1} s, at most {allowed} may be",
                        key.path(),
                        key.master
                    ));
                }
            }
        }
        most
    }
}

impl FleetLedger {
    /// Whether a fault kept sidecars from renewing slots, or Redis lost them.
    fn may_slots_end_early(&self, key: &FleetKey, at_us: u64) -> bool {
        let aftermath_us = u64::try_from((SLOT_TTL + SLOT_RECOVERY).as_micros()).unwrap();
        let periods = self.fault_periods.lock().unwrap();
        periods
            .iter()
            .filter(|period| period.fault.concerns_master(key.master))
            .any(|period| {
                let ended = period
                    .ended
                    .map(|ended| self.epoch_us(ended) + aftermath_us);
                self.epoch_us(period.began) <= at_us && ended.is_none_or(|ended| at_us <= ended)
            })
    }
}
