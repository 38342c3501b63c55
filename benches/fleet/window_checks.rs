//! Checks that no window of a limit admits more than the limit and the faults permit.
//!
//! The decision on an admitted request was made between its send and response times. A request
//! counts in a window only if that interval lies entirely within it. A slow machine therefore makes
//! the checks weaker, never wrong.

use crate::faults::FleetFault;
use crate::ledger::{FleetLedger, RequestRecord};
use crate::policies::{FleetKey, FleetPolicy, INITIAL_INSTANCES, LIMIT_PERIOD, StoreFailureMode};
use crate::support::client::RequestOutcome;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Maximum clock difference between Redis and the ledger.
const CLOCK_TOLERANCE: Duration = Duration::from_millis(10);

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

impl FleetLedger {
    /// Checks every window of every key.
    pub(crate) fn judge_windows(&self, keys: &[FleetKey]) -> BTreeMap<&'static str, WindowReport> {
        let mut found: BTreeMap<&'static str, WindowReport> = BTreeMap::new();
        for (number, key) in keys.iter().enumerate() {
            let Some(policy) = key.policy.filter(|policy| policy.is_window_limit()) else {
                continue;
            };
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
                    self.record_unexplained_problem(format!(
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
        if policy.has_aligned_periods() {
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
                    FleetFault::NodePartitioned { .. }
                    | FleetFault::SidecarFrozen { .. }
                    | FleetFault::MachineStalled,
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
                    }
                    | FleetFault::SidecarFrozen {
                        live_nodes: live, ..
                    },
                    StoreFailureMode::Local,
                ) if overlaps => more += limit.div_ceil(live),
                (FleetFault::NodePartitioned { .. } | FleetFault::SidecarFrozen { .. }, _) => {}
                // Each new process has the share of the instances that it assumes.
                (FleetFault::RestartedInOutage { master }, StoreFailureMode::Local)
                    if overlaps && key.master == master =>
                {
                    more += limit.div_ceil(INITIAL_INSTANCES);
                }
                (FleetFault::RestartedInOutage { .. }, _) => {}
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
        requests as f64 * self.active_time(from, to).as_secs_f64() / LIMIT_PERIOD.as_secs_f64()
    }
}
