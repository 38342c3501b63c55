//! Checks that the clients get what the limits permit: in each phase, on healthy masters during a
//! fault, and after the recovery.

use crate::FleetContext;
use crate::ledger::RequestTotals;
use crate::masters::MASTER_COUNT;
use crate::phases::{DegradedDecisions, PhaseResult};
use crate::policies::{FleetKey, FleetPolicy, LIMIT_PERIOD, StoreFailureMode};
use crate::scenario::SETTLING_TIME;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Minimum share of admissions in an outage, in percent, for policies with local fallback.
const MIN_USED_PERCENT_IN_OUTAGE: u64 = 30;
/// Of the usual minimum, what one key must reach in a few seconds, in percent.
const MIN_PERCENT_OF_ONE_KEY: f64 = 80.0;
/// Shortest time in which the admissions of one key are judged.
const SHORTEST_JUDGED_TIME: Duration = LIMIT_PERIOD.saturating_mul(2);

impl FleetContext {
    /// Returns the share of the possible units that a policy admitted; records a problem if it is
    /// too low.
    pub(crate) fn check_used_percent(
        &self,
        result: &PhaseResult,
        policy: &FleetPolicy,
        totals: &RequestTotals,
    ) -> String {
        let ledger = &self.ledger;
        let of = |counts: &BTreeMap<&str, u64>| counts.get(policy.name).copied().unwrap_or(0);
        let keys = MASTER_COUNT as u64;
        let possible = ledger.possible_units(policy, keys, result.began, result.ended);
        let requested = of(&totals.requested) as f64;
        let percent = 100.0 * of(&totals.admitted) as f64 / possible.min(requested).max(1.0);
        let has_stalled = !ledger
            .total_stall_time(result.began, result.ended)
            .is_zero();
        let is_outage = result.phase.degraded_decisions() != DegradedDecisions::Forbidden;
        let least = match (is_outage || has_stalled, policy.on_store_failure) {
            (false, _) => policy.min_used_percent,
            (true, StoreFailureMode::Closed) => 0,
            (true, StoreFailureMode::Open | StoreFailureMode::Local) => MIN_USED_PERCENT_IN_OUTAGE,
        };
        if percent < least as f64 {
            let (title, name) = (result.phase.title(), policy.name);
            ledger.record_unexplained_problem(format!(
                "{title}: {name} admitted {percent:.0} % of what it could, not {least} %"
            ));
        }
        format!("{percent:.0}")
    }

    /// Checks each key whose masters are healthy while another master is at fault, and each key
    /// after the recovery. Returns the lowest share of the usual minimum, in percent.
    pub(crate) fn check_keys_alone(&self, result: &PhaseResult) -> Option<f64> {
        let mut spans = self.spans_on_healthy_masters(result);
        let all_keys = 0..self.keys.len();
        let recovered = result.ended - (SETTLING_TIME - LIMIT_PERIOD);
        spans.extend(all_keys.map(|key| (key, "after the recovery", recovered, result.ended)));
        spans
            .into_iter()
            .filter_map(|(key, when, from, to)| self.check_key(result, key, when, from, to))
            .min_by(f64::total_cmp)
    }

    /// Returns the keys of healthy masters, with the time of the fault.
    fn spans_on_healthy_masters(
        &self,
        result: &PhaseResult,
    ) -> Vec<(usize, &'static str, Instant, Instant)> {
        let is_judged = |key: &FleetKey, master: usize| !key.uses_master(master);
        let periods = self.ledger.fault_periods.lock().unwrap();
        let mut spans = Vec::new();
        for period in periods.iter() {
            let (Some(master), Some(from), Some(to)) =
                (period.fault.master(), period.in_effect, period.ended)
            else {
                continue;
            };
            if from < result.began || from > result.ended {
                continue;
            }
            let keys = self.keys.iter().enumerate();
            let healthy = keys.filter(|(_, key)| is_judged(key, master));
            spans.extend(healthy.map(|(key, _)| (key, "on a healthy master", from, to)));
        }
        spans
    }

    fn check_key(
        &self,
        result: &PhaseResult,
        number: usize,
        when: &str,
        from: Instant,
        to: Instant,
    ) -> Option<f64> {
        let (key, ledger) = (&self.keys[number], &self.ledger);
        let policy = key.policy.filter(|policy| policy.min_used_percent > 0)?;
        if to - from < SHORTEST_JUDGED_TIME || !ledger.total_stall_time(from, to).is_zero() {
            return None;
        }
        let (sent, admitted) = ledger.sent_and_admitted(number, from, to);
        // A part of a period may be used up before or after the span.
        let possible = ledger.possible_units(policy, 1, from, to - LIMIT_PERIOD / 2);
        let wanted = possible.min(sent as f64) * policy.min_used_percent as f64 / 100.0;
        let percent = 100.0 * admitted as f64 / wanted.max(1.0);
        if percent < MIN_PERCENT_OF_ONE_KEY {
            let (title, name, master) = (result.phase.title(), policy.name, key.master);
            let seconds = (to - from).as_secs_f64();
            ledger.record_unexplained_problem(format!(
                "{title}: {name}, key on master {master}, {when}: {admitted} of {sent} requests admitted in {seconds:.1} s"
            ));
        }
        Some(percent)
    }
}
