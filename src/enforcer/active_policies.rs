//! The active policies and their counters.

use super::decisions::PolicyDecision;
use crate::limiter::Key;
use crate::policy::PolicyTable;
use crate::telemetry::metrics::{Metrics, PolicyCounters, WorkerMetrics};
use arc_swap::ArcSwap;
use std::sync::Arc;

/// Publishes policy tables to the requests of one worker. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ActivePolicies {
    snapshot: Arc<ArcSwap<PolicySnapshot>>,
    /// One for each worker, so that requests of several workers share no reference count.
    snapshots: Arc<[Arc<ArcSwap<PolicySnapshot>>]>,
    metrics: Arc<Metrics>,
}

/// A policy table and the counters of its policies.
///
/// A reload replaces the table and the counters together. Counters are looked up by name once per
/// table, under a lock; a request finds them by the policy's index. The table itself has no
/// counters, because matching and metrics are separate concerns.
#[derive(Clone, Debug)]
// Keeps the reference counts of two workers out of one cache line, or pair of lines.
#[repr(align(128))]
pub struct PolicySnapshot {
    pub table: Arc<PolicyTable>,
    /// In the order of the table's policies.
    counters: Box<[Arc<PolicyCounters>]>,
}

impl ActivePolicies {
    /// The policies of `workers` workers, as the first one has them.
    pub fn new(table: &Arc<PolicyTable>, metrics: Arc<Metrics>, workers: usize) -> Self {
        let snapshot = PolicySnapshot::new(table, &metrics);
        let published = |_| Arc::new(ArcSwap::from_pointee(snapshot.clone()));
        let snapshots: Arc<[_]> = (0..workers).map(published).collect();
        Self {
            snapshot: snapshots.first().map_or_else(|| published(0), Arc::clone),
            snapshots,
            metrics,
        }
    }

    /// The same policies for another worker.
    pub fn for_worker(&self, worker: usize) -> Self {
        let mut other = self.clone();
        if let Some(snapshot) = self.snapshots.get(worker) {
            other.snapshot = Arc::clone(snapshot);
        }
        other
    }

    /// Activates a table for all workers. Requests in flight keep the previous table.
    pub fn activate_table(&self, table: &Arc<PolicyTable>) {
        let new = PolicySnapshot::new(table, &self.metrics);
        let new: Vec<_> = (self.snapshots.iter().map(|_| Arc::new(new.clone()))).collect();
        // The first worker's last: what the admin port shows applies to all requests.
        for (snapshot, new) in self.snapshots.iter().zip(new).rev() {
            snapshot.store(new);
        }
    }

    pub fn load_snapshot(&self) -> Arc<PolicySnapshot> {
        self.snapshot.load_full()
    }
}

impl PolicySnapshot {
    fn new(table: &Arc<PolicyTable>, metrics: &Metrics) -> Self {
        let counters = metrics
            .get_or_create_policy_counters(table.policies().iter().map(|policy| &*policy.name));
        declare_notifications(table, metrics);
        let table = Arc::clone(table);
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

/// Makes the counters of all thresholds appear in the metrics.
fn declare_notifications(table: &PolicyTable, metrics: &Metrics) {
    for policy in table.policies() {
        let Some(quota) = policy.quota() else {
            continue;
        };
        for threshold in &quota.notify {
            let threshold = threshold.to_string();
            let limits = quota.all_limits();
            for named in limits.filter(|named| !named.limit.algorithm.counts_slots()) {
                let labels = [&*policy.name, &named.name, &threshold];
                metrics.notifications.add(labels, 0);
            }
        }
    }
}
