//! The policies that hold now, and where each of them is counted.

use crate::limiter::Key;
use crate::policy::PolicyTable;
use crate::telemetry::metrics::{Decision, Metrics, Shard, Tally};
use arc_swap::ArcSwap;
use std::sync::Arc;

/// Where new policies are put in effect and requests find them. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Live {
    rules: Arc<ArcSwap<Rules>>,
    metrics: Arc<Metrics>,
}

/// A policy table and the counts of its policies.
///
/// They are swapped together: names are looked up once per table, under a lock, and a request that has found
/// its policies has their places in the table and needs no name to count them. The table itself knows nothing
/// of this: what a policy means and how it is watched are two things.
#[derive(Debug)]
pub struct Rules {
    pub table: Arc<PolicyTable>,
    /// In the order of the table's policies.
    tallies: Box<[Arc<Tally>]>,
}

impl Live {
    pub fn new(table: Arc<PolicyTable>, metrics: Arc<Metrics>) -> Self {
        Self {
            rules: Arc::new(ArcSwap::from_pointee(Rules::new(table, &metrics))),
            metrics,
        }
    }

    /// Puts a table in effect. Requests in flight keep theirs.
    pub fn publish(&self, table: Arc<PolicyTable>) {
        self.rules.store(Arc::new(Rules::new(table, &self.metrics)));
    }

    pub fn rules(&self) -> Arc<Rules> {
        self.rules.load_full()
    }
}

impl Rules {
    fn new(table: Arc<PolicyTable>, metrics: &Metrics) -> Self {
        let tallies = metrics.tallies(table.policies().iter().map(|policy| &*policy.name));
        Self { table, tallies }
    }

    /// Where the policies are counted, in the order of the table.
    pub fn tallies(&self) -> &[Arc<Tally>] {
        &self.tallies
    }

    /// Counts what the policy at a place did with a request, and whom it refused: the request's key there, if it
    /// has one, and what it asked for.
    pub(super) fn count(
        &self,
        at: usize,
        shard: &Shard,
        did: Decision,
        (key, place): (Option<&Key>, &str),
    ) {
        let Some(tally) = self.tallies.get(at) else {
            return;
        };
        shard.policy(tally, did);
        if did.refuses() {
            shard.limited().path(tally.policy(), place);
            if let Some(key) = key {
                shard
                    .limited()
                    .key(tally.policy(), key.id(), || key.readable());
            }
        }
    }
}
