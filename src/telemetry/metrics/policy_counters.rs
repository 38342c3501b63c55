//! Counters per policy and worker, and the decisions that they count.

use super::histogram::SingleWriterCounter;
use std::sync::Arc;

/// The decision of one policy on one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyDecision {
    /// The request is within the limits. Shadow policies count these requests too.
    Allowed,
    /// The same, but a policy with `leaky_bucket` delayed the request.
    Delayed,
    Rejected,
    /// Rejected because an earlier rejection blocked the key.
    Blocked,
    /// Rejected whatever the quota: by `action = "deny"`, or because the request cannot be keyed.
    Denied,
    Exempt,
    /// A shadow policy would have rejected the request.
    ShadowRejected,
    /// A shadow policy could not decide, because the store was unavailable.
    Degraded,
    /// The store was unavailable, and the policy let the request through.
    DegradedOpen,
    /// The store was unavailable, and the policy rejected the request.
    DegradedClosed,
    /// The store was unavailable, and the request was within the local share of the limits.
    DegradedLocalAllowed,
    /// The store was unavailable, and the local share of the limits was exhausted.
    DegradedLocalRejected,
}

/// The decision of all policies together on a request, in the terms of the access log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestDecision {
    Allowed,
    Delayed,
    Rejected,
    Blocked,
    Denied,
    /// Let through without the store.
    Degraded,
    /// The request is invalid or cannot be keyed.
    Malformed,
    /// Rejected because the store was unavailable. The access log shows it as `degraded` too.
    Unavailable,
}

/// The counters of one policy. Workers do not share cache lines.
#[derive(Debug)]
pub struct PolicyCounters {
    policy: Arc<str>,
    workers: Box<[WorkerDecisionCounts]>,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct WorkerDecisionCounts([SingleWriterCounter; PolicyDecision::COUNT]);

/// Values of the label `decision`, in the order of [`PolicyCounters::requests_by_decision`].
pub const DECISION_LABELS: [&str; 8] = [
    "allowed",
    "delayed",
    "rejected",
    "blocked",
    "denied",
    "exempt",
    "shadow_rejected",
    "degraded",
];

/// The same for the history, plus the rejected part of `degraded`.
pub const HISTORY_DECISION_LABELS: [&str; 9] = [
    "allowed",
    "delayed",
    "rejected",
    "blocked",
    "denied",
    "exempt",
    "shadow_rejected",
    "degraded",
    DEGRADED_REFUSED,
];

/// The part of `degraded` that was rejected.
pub const DEGRADED_REFUSED: &str = "degraded_refused";

impl PolicyCounters {
    pub(super) fn new(policy: Arc<str>, workers: usize) -> Self {
        Self {
            policy,
            workers: (0..workers)
                .map(|_| WorkerDecisionCounts::default())
                .collect(),
        }
    }

    /// The name of the policy.
    pub fn policy(&self) -> &Arc<str> {
        &self.policy
    }

    /// Requests so far, by [`DECISION_LABELS`].
    pub fn requests_by_decision(&self) -> [u64; DECISION_LABELS.len()] {
        use PolicyDecision as D;
        let decided = [
            D::Allowed,
            D::Delayed,
            D::Rejected,
            D::Blocked,
            D::Denied,
            D::Exempt,
            D::ShadowRejected,
        ];
        let mut counts = [0; DECISION_LABELS.len()];
        for (count, decision) in counts.iter_mut().zip(decided) {
            *count = self.sum_workers(decision);
        }
        let degraded_enforced: u64 = self
            .degraded_by_outcome()
            .iter()
            .map(|(_, count)| count)
            .sum();
        if let Some(degraded) = counts.last_mut() {
            *degraded = degraded_enforced + self.sum_workers(D::Degraded);
        }
        counts
    }

    /// Requests so far, by [`HISTORY_DECISION_LABELS`].
    pub fn history_counts(&self) -> [u64; HISTORY_DECISION_LABELS.len()] {
        let refused = self.sum_workers(PolicyDecision::DegradedClosed)
            + self.sum_workers(PolicyDecision::DegradedLocalRejected);
        let mut counts = [refused; HISTORY_DECISION_LABELS.len()];
        for (count, requests) in counts.iter_mut().zip(self.requests_by_decision()) {
            *count = requests;
        }
        counts
    }

    /// Decisions of an enforced policy without the store, by outcome.
    pub fn degraded_by_outcome(&self) -> [(&'static str, u64); 4] {
        [
            ("open", self.sum_workers(PolicyDecision::DegradedOpen)),
            ("closed", self.sum_workers(PolicyDecision::DegradedClosed)),
            (
                "local_allowed",
                self.sum_workers(PolicyDecision::DegradedLocalAllowed),
            ),
            (
                "local_rejected",
                self.sum_workers(PolicyDecision::DegradedLocalRejected),
            ),
        ]
    }

    /// Must be called by `worker` only, because each counter has a single writer.
    pub(super) fn increment(&self, worker: usize, decision: PolicyDecision) {
        if let Some(count) = self
            .workers
            .get(worker)
            .and_then(|counts| counts.0.get(decision as usize))
        {
            count.add(1);
        }
    }

    fn sum_workers(&self, decision: PolicyDecision) -> u64 {
        self.workers
            .iter()
            .filter_map(|counts| counts.0.get(decision as usize))
            .map(SingleWriterCounter::get)
            .sum()
    }
}

impl PolicyDecision {
    const COUNT: usize = 12;

    /// Whether the policy rejected the request because of its client, or would have.
    pub fn is_rejection(self) -> bool {
        use PolicyDecision as D;
        matches!(
            self,
            D::Rejected | D::Blocked | D::Denied | D::ShadowRejected | D::DegradedLocalRejected
        )
    }
}

impl RequestDecision {
    pub const ALL: [Self; 8] = [
        Self::Allowed,
        Self::Delayed,
        Self::Rejected,
        Self::Blocked,
        Self::Denied,
        Self::Degraded,
        Self::Malformed,
        Self::Unavailable,
    ];

    pub fn label(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Delayed => "delayed",
            Self::Rejected => "rejected",
            Self::Blocked => "blocked",
            Self::Denied => "denied",
            Self::Degraded | Self::Unavailable => "degraded",
            Self::Malformed => "malformed",
        }
    }
}
