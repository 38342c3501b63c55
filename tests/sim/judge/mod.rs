//! Judges a finished run: never more than the limits, nothing charged for nothing, still answering.
//!
//! The judge knows the requests, what was forwarded when, and the faults. It does not know how
//! tidegate decides.

pub(crate) mod allowance;
mod counters;
mod limits;
mod lockouts;
mod pods;
mod retry;
mod service;
mod streams;

use crate::sim::instance::{Outcome, RequestRecord};
use crate::sim::redis_server::cluster::{SLOTS, slot_of};
use crate::sim::scenario::{
    FaultKind, OnFailure, PolicySpec, RequestSpec, Rule, Scenario, Topology,
};
use crate::sim::world::World;
use allowance::{Excuse, is_healthy, list_excuses};
use std::collections::BTreeMap;
use tidegate::limiter::Key;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Violation {
    pub(crate) rule: &'static str,
    pub(crate) at_us: u64,
    pub(crate) text: String,
}

/// One request at one counter.
#[derive(Clone, Debug)]
pub(crate) struct CounterUse {
    pub(crate) request: usize,
    pub(crate) arrived_us: u64,
    /// The end of the run, if there was no verdict.
    pub(crate) decided_us: u64,
    /// Units that were certainly forwarded.
    pub(crate) least_units: u64,
    /// Units that may be charged.
    pub(crate) most_units: u64,
    pub(crate) is_forwarded: bool,
    pub(crate) is_healthy: bool,
    /// No outage from the arrival until one timeout after the end of the request, so its settlement
    /// was applied if there was one.
    pub(crate) is_healthy_until_settled: bool,
    /// When its last unit is charged: at the decision, or while its response streams.
    pub(crate) charged_until_us: u64,
}

/// A policy's counter for one client, or for all.
pub(crate) struct CounterHistory<'r> {
    pub(crate) policy: &'r PolicySpec,
    pub(crate) policy_number: usize,
    pub(crate) client: Option<u32>,
    /// The instance that counts, if each one does.
    pub(crate) instance: Option<usize>,
    pub(crate) server: Option<usize>,
    /// In the order of arrival.
    pub(crate) uses: Vec<CounterUse>,
}

/// The server of counters that no fault of a server affects.
const NO_SERVER: Option<usize> = Some(usize::MAX);

/// A finished run.
pub(crate) struct FinishedRun<'r> {
    pub(crate) scenario: &'r Scenario,
    pub(crate) records: &'r [RequestRecord],
    pub(crate) excuses: Vec<Excuse>,
}

/// All violations of a finished run, by time.
pub(crate) fn judge_run(world: &mut World) -> Vec<Violation> {
    let scenario = world.scenario.clone();
    let records = world.log.lock().unwrap().clone();
    let run = FinishedRun {
        scenario: &scenario,
        records: &records,
        excuses: list_excuses(&scenario),
    };
    let histories = run.histories();
    let mut violations = Vec::new();
    for history in &histories {
        violations.extend(limits::check_limits(&run, history));
        violations.extend(counters::check_counter(&run, history, world));
        violations.extend(counters::check_counted_responses(&run, history, world));
        violations.extend(lockouts::check_lockouts(&run, history));
        violations.extend(streams::check_streams(&run, history));
    }
    violations.extend(streams::check_cut_offs(&run, &histories));
    violations.extend(limits::check_lease_ends(&run));
    violations.extend(pods::check_pods(&run, world));
    violations.extend(service::check_service(&run, &histories));
    violations.extend(service::check_returns(&run, &histories, world));
    violations.extend(service::check_recovery(&run, world));
    violations.sort_by_key(|violation| violation.at_us);
    violations
}

impl<'r> FinishedRun<'r> {
    fn histories(&self) -> Vec<CounterHistory<'r>> {
        let mut histories: BTreeMap<_, CounterHistory<'r>> = BTreeMap::new();
        for (index, (request, record)) in
            self.scenario.requests.iter().zip(self.records).enumerate()
        {
            let Some(arrived_us) = record.arrived_us else {
                continue;
            };
            for (number, policy) in self.policies_of(request) {
                let client = (!policy.is_global).then_some(request.client);
                let instance = policy.is_of_instance.then_some(request.instance);
                let history = histories
                    .entry((number, client, instance))
                    .or_insert_with(|| CounterHistory {
                        policy,
                        policy_number: number,
                        client,
                        instance,
                        server: match instance {
                            Some(_) => NO_SERVER,
                            None => self.server_of(&self.scenario.counter_key(number, client)),
                        },
                        uses: Vec::new(),
                    });
                let server = history.server;
                history.uses.push(self.counter_use(
                    index,
                    (request, record),
                    policy,
                    (arrived_us, server),
                ));
            }
        }
        histories.into_values().collect()
    }

    fn counter_use(
        &self,
        index: usize,
        (request, record): (&RequestSpec, &RequestRecord),
        policy: &PolicySpec,
        (arrived_us, server): (u64, Option<usize>),
    ) -> CounterUse {
        // The verdict of a frozen instance is late, but its charge is not.
        let frozen_us = self
            .scenario
            .faults
            .iter()
            .find_map(|fault| match fault.kind {
                FaultKind::Freeze {
                    instance, for_us, ..
                } if instance == request.instance => {
                    let is_late = arrived_us + request.pause_us <= fault.at_us
                        && record.decided_us >= Some(fault.at_us + for_us)
                        && !record.is_from_lease;
                    is_late.then_some(fault.at_us)
                }
                _ => None,
            });
        let decided_us = frozen_us
            .or(record.decided_us)
            .unwrap_or(self.scenario.end_us);
        let until_us = record
            .decided_us
            .unwrap_or(arrived_us + self.scenario.timeout_us);
        let is_healthy_until = |end_us: u64| {
            let endpoints = (request.instance, server);
            is_healthy(&self.excuses, endpoints, (arrived_us, end_us))
        };
        let is_healthy = is_healthy_until(until_us);
        let is_streamed = policy.cut_off.is_some() && record.stream.is_some();
        // A stream without an end takes slices until its process ends.
        let ended_us = record
            .ended_us
            .or(is_streamed.then_some(self.scenario.end_us));
        let settled_by_us = ended_us.map_or(0, |us| us + self.scenario.timeout_us);
        let is_without_limit = policy.on_failure == OnFailure::Open && !policy.is_of_instance;
        let is_unlimited = record.is_degraded && is_without_limit;
        let cost = policy.cost(request);
        let actual = policy.actual_units(request);
        let is_forwarded = record.outcome == Outcome::Forwarded && !is_unlimited;
        let settled = actual.filter(|_| record.is_settled);
        let is_healthy_until_settled = is_healthy_until(settled_by_us.max(until_us));
        CounterUse {
            request: index,
            arrived_us,
            decided_us,
            least_units: if is_forwarded {
                let settled = settled.or(streams::settled_units(policy, request, record));
                cost.min(settled.unwrap_or(cost))
            } else {
                0
            },
            most_units: match record.outcome {
                Outcome::Forwarded | Outcome::Unknown => {
                    let streamed = streams::most_units(policy, request, record);
                    streamed.unwrap_or(cost.max(actual.unwrap_or(0)))
                }
                Outcome::Unavailable | Outcome::Refused { .. } if policy.is_of_instance => 0,
                Outcome::Refused { .. } if policy.counts_rejected => cost,
                // A verdict without Redis says nothing about a charge that was sent.
                Outcome::Unavailable if is_healthy => 0,
                Outcome::Refused { .. } if is_healthy && !record.is_degraded => 0,
                _ => cost,
            },
            is_forwarded,
            is_healthy,
            is_healthy_until_settled,
            charged_until_us: match ended_us.filter(|_| is_streamed) {
                Some(ended_us) => decided_us.max(ended_us),
                None => decided_us,
            },
        }
    }

    pub(crate) fn policies_of(
        &self,
        request: &RequestSpec,
    ) -> impl Iterator<Item = (usize, &'r PolicySpec)> {
        let policies = self.scenario.policies.iter().enumerate();
        policies.filter(|(_, policy)| policy.applies_to(request))
    }

    /// The master that held a key at the start.
    fn server_of(&self, key: &Key) -> Option<usize> {
        match self.scenario.topology {
            Topology::Memory { .. } => None,
            Topology::Standalone | Topology::Sentinel => Some(0),
            Topology::Cluster { masters } => {
                let slot = slot_of(format!("{{{:032x}}}", key.id()).as_bytes());
                Some(usize::from(slot) * masters / usize::from(SLOTS))
            }
        }
    }
}

impl CounterHistory<'_> {
    /// Whether the counter follows the wall clock of a machine.
    pub(crate) fn follows_wall_clock(&self, run: &FinishedRun<'_>) -> bool {
        let is_in_memory = matches!(run.scenario.topology, Topology::Memory { .. });
        let is_aligned = matches!(self.policy.rule, Rule::FixedWindow | Rule::CalendarDay);
        is_aligned && (is_in_memory || self.policy.is_of_instance)
    }

    /// The times of the steps of that clock.
    pub(crate) fn wall_clock_steps(&self, run: &FinishedRun<'_>) -> Vec<(u64, i64)> {
        let steps = run
            .scenario
            .faults
            .iter()
            .filter_map(|fault| match fault.kind {
                FaultKind::WallClockStep { instance, by_us }
                    if self.instance.is_none_or(|one| one == instance)
                        && self.follows_wall_clock(run) =>
                {
                    Some((fault.at_us, by_us))
                }
                _ => None,
            });
        steps.collect()
    }

    pub(crate) fn name(&self) -> String {
        let client = self.client.map_or("all clients".to_owned(), |client| {
            format!("client {client}")
        });
        format!(
            "policy p{} ({:?}, {} per {} ms) of {client}",
            self.policy_number,
            self.policy.rule,
            self.policy.requests,
            self.policy.per_us / 1000
        )
    }
}
