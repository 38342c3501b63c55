//! Counters per policy and worker.

use super::histogram::SingleWriterCounter;
use super::labels::LabelledCounters;
use std::sync::Arc;

/// Counters of a policy and worker: two cache lines.
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
    pub fn policy(&self) -> &Arc<str> {
        &self.policy
    }

    /// Requests so far, by label.
    pub fn requests_by_label<'l>(
        &self,
        labels: &'l [LabelledCounters],
    ) -> impl Iterator<Item = (&'static str, u64)> + use<'_, 'l> {
        labels
            .iter()
            .map(|(label, indices)| (*label, self.sum_counters(indices)))
    }

    /// The sum of some counters of all workers.
    pub(in crate::telemetry) fn sum_counters(&self, indices: &[usize]) -> u64 {
        self.workers
            .iter()
            .flat_map(|counters| indices.iter().filter_map(|index| counters.0.get(*index)))
            .map(SingleWriterCounter::get)
            .sum()
    }

    /// Must be called by `worker` only, because each counter has a single writer.
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
