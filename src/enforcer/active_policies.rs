//! The active policies and their counters.

use super::decisions::PolicyDecision;
use crate::limiter::Key;
use crate::policy::PolicyTable;
use crate::telemetry::metrics::{Metrics, PolicyCounters, WorkerMetrics};
use arc_swap::ArcSwap;
use std::sync::Arc;

/// Publishes policy tables to requests. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ActivePolicies {
    snapshot: Arc<ArcSwap<PolicySnapshot>>,
    metrics: Arc<Metrics>,
}

/// A policy table and the counters of its policies.
///
/// A reload replaces the table and the counters together. Counters are looked up by name once per
/// table, under a lock; a request finds them by the policy's index. The table itself has no
/// counters, because matching and metrics are separate concerns.
#[derive(Debug)]
pub struct PolicySnapshot {
    pub table: Arc<PolicyTable>,
    /// In the order of the table's policies.
    counters: Box<[Arc<PolicyCounters>]>,
}

impl ActivePolicies {
    pub fn new(table: Arc<PolicyTable>, metrics: Arc<Metrics>) -> Self {
        Self {
            snapshot: Arc::new(ArcSwap::from_pointee(PolicySnapshot::new(table, &metrics))),
            metrics,
        }
    }

    /// Activates a table. Requests in flight keep the previous table.
    pub fn activate_table(&self, table: Arc<PolicyTable>) {
        self.snapshot
            .store(Arc::new(PolicySnapshot::new(table, &self.metrics)));
    }

    pub fn load_snapshot(&self) -> Arc<PolicySnapshot> {
        self.snapshot.load_full()
    }
}

impl PolicySnapshot {
    fn new(table: Arc<PolicyTable>, metrics: &Metrics) -> Self {
        let counters = metrics
            .get_or_create_policy_counters(table.policies().iter().map(|policy| &*policy.name));
        Self { table, counters }
    }

    /// The counters of the policies, in the order of the table.
    pub fn counters(&self) -> &[Arc<PolicyCounters>] {
        &self.counters
    }

    /// Counts the decision of one policy. For a refusal, also records `place` (the path or domain
    /// of the request) and the key, if the request has one.
    pub(super) fn record_decision(
        &self,
        policy_index: usize,
        metrics: &WorkerMetrics,
        decision: PolicyDecision,
        (key, place): (Option<&Key>, &str),
    ) {
        let Some(tally) = self.counters.get(policy_index) else {
            return;
        };
        metrics.record_policy_decision(tally, decision as usize);
        if decision.is_client_rejection() {
            let (rejections, policy) = (&metrics.rejections, &tally.policy_name);
            rejections.record_path_rejection(policy, place);
            if let Some(key) = key {
                rejections.record_key_rejection(policy, key.id(), || key.to_readable_string());
            }
        }
    }
}
