//! The policies that hold now, and where each of them is counted.

use crate::limiter::Key;
use crate::policy::PolicyTable;
use crate::telemetry::metrics::{Metrics, PolicyCounters, PolicyDecision, WorkerMetrics};
use arc_swap::ArcSwap;
use std::sync::Arc;

/// Where new policies are put in effect and requests find them. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ActivePolicies {
    snapshot: Arc<ArcSwap<PolicySnapshot>>,
    metrics: Arc<Metrics>,
}

/// A policy table and the counts of its policies.
///
/// They are swapped together: names are looked up once per table, under a lock, and a request that has found
/// its policies has their places in the table and needs no name to count them. The table itself knows nothing
/// of this: what a policy means and how it is watched are two things.
#[derive(Debug)]
pub struct PolicySnapshot {
    pub table: Arc<PolicyTable>,
    /// In the order of the table's policies.
    tallies: Box<[Arc<PolicyCounters>]>,
}

impl ActivePolicies {
    pub fn new(table: Arc<PolicyTable>, metrics: Arc<Metrics>) -> Self {
        Self {
            snapshot: Arc::new(ArcSwap::from_pointee(PolicySnapshot::new(table, &metrics))),
            metrics,
        }
    }

    /// Puts a table in effect. Requests in flight keep theirs.
    pub fn publish(&self, table: Arc<PolicyTable>) {
        self.snapshot
            .store(Arc::new(PolicySnapshot::new(table, &self.metrics)));
    }

    pub fn load_snapshot(&self) -> Arc<PolicySnapshot> {
        self.snapshot.load_full()
    }
}

impl PolicySnapshot {
    fn new(table: Arc<PolicyTable>, metrics: &Metrics) -> Self {
        let tallies = metrics.policy_counters(table.policies().iter().map(|policy| &*policy.name));
        Self { table, tallies }
    }

    /// Where the policies are counted, in the order of the table.
    pub fn tallies(&self) -> &[Arc<PolicyCounters>] {
        &self.tallies
    }

    /// Counts what the policy at a place did with a request, and whom it refused: the request's key there, if it
    /// has one, and what it asked for.
    pub(super) fn record_decision(
        &self,
        policy_index: usize,
        shard: &WorkerMetrics,
        decision: PolicyDecision,
        (key, place): (Option<&Key>, &str),
    ) {
        let Some(tally) = self.tallies.get(policy_index) else {
            return;
        };
        shard.record_policy_decision(tally, decision);
        if decision.is_refusal() {
            shard.refusals().record_path(tally.policy(), place);
            if let Some(key) = key {
                shard
                    .refusals()
                    .record_key(tally.policy(), key.id(), || key.to_readable_string());
            }
        }
    }
}
