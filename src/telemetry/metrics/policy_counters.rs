//! Counters per policy and worker.

use super::histogram::SingleWriterCounter;
use super::labels::{LabelledCounterIndices, sum_at_indices};
use std::sync::Arc;

/// Number of counters per policy and worker; they fill two cache lines.
const COUNTERS_PER_WORKER: usize = 16;

/// The counters of one policy. Workers do not share cache lines.
#[derive(Debug)]
pub struct PolicyCounters {
    policy: Arc<str>,
    workers: Box<[WorkerPolicyCounters]>,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct WorkerPolicyCounters([SingleWriterCounter; COUNTERS_PER_WORKER]);

impl PolicyCounters {
    pub(super) fn new(policy: Arc<str>, workers: usize) -> Self {
        Self {
            policy,
            workers: (0..workers)
                .map(|_| WorkerPolicyCounters::default())
                .collect(),
        }
    }

    /// The name of the policy.
    pub fn policy_name(&self) -> &Arc<str> {
        &self.policy
    }

    /// Returns the number of requests since the start, by label. Each counter is read once, so that
    /// labels that share counters are consistent.
    pub fn requests_by_label<'l>(
        &self,
        labels: &'l [LabelledCounterIndices],
    ) -> impl Iterator<Item = (&'static str, u64)> + use<'l> {
        let mut totals = [0; COUNTERS_PER_WORKER];
        for worker in &self.workers {
            for (total, counter) in totals.iter_mut().zip(&worker.0) {
                *total += counter.get();
            }
        }
        labels
            .iter()
            .map(move |(label, indices)| (*label, sum_at_indices(&totals, indices)))
    }

    /// Increments a counter. Only `worker` may call this, because each counter has a single writer.
    pub(super) fn increment(&self, worker: usize, index: usize) {
        if let Some(count) = self
            .workers
            .get(worker)
            .and_then(|counters| counters.0.get(index))
        {
            count.add(1);
        }
    }
}
