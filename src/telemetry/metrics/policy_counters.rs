//! What each policy did, counted per worker; and the words for it.

use super::histogram::SingleWriterCounter;
use std::sync::Arc;

/// What one policy did with one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyDecision {
    /// Its limits had room. A shadow policy's too.
    Allowed,
    /// The same, of a policy with a `leaky_bucket`, and the request was held.
    Delayed,
    Rejected,
    /// By a block that an earlier refusal began.
    Blocked,
    /// Refused whatever the quota: `action = "deny"`, or a request that cannot be keyed.
    Denied,
    Exempt,
    /// A shadow policy would have refused it.
    ShadowRejected,
    /// A shadow policy had no store to ask.
    Degraded,
    /// The same, of a policy that let the request through.
    DegradedOpen,
    /// The same, of one that refused.
    DegradedClosed,
    /// The same, of one whose share of its limits had room.
    DegradedLocalAllowed,
    /// The same, of one whose share was used up.
    DegradedLocalRejected,
}

/// What became of a request, all policies together, in the words of the access log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestDecision {
    Allowed,
    Delayed,
    Rejected,
    Blocked,
    Denied,
    /// Let through without the store.
    Degraded,
    /// It could not be read, or not be keyed.
    Malformed,
    /// Refused as there was no store: the same word.
    Unavailable,
}

/// One policy's counts, each worker's in cache lines of their own.
#[derive(Debug)]
pub struct PolicyCounters {
    policy: Arc<str>,
    workers: Box<[WorkerDecisionCounts]>,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct WorkerDecisionCounts([SingleWriterCounter; PolicyDecision::COUNT]);

/// The values of the label `decision`, in the order of [`PolicyCounters::requests`].
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

/// The same for the past, and how many of the degraded were refused: `degraded` alone doesn't say what came of it.
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

/// Part of `degraded`.
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

    /// Whose counts these are.
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

    /// What an enforced policy did without the store, by outcome.
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

    /// Only `worker` may say so.
    pub(super) fn increment(&self, worker: usize, decision: PolicyDecision) {
        if let Some(count) = self
            .workers
            .get(worker)
            .and_then(|line| line.0.get(decision as usize))
        {
            count.add(1);
        }
    }

    fn sum_workers(&self, decision: PolicyDecision) -> u64 {
        self.workers
            .iter()
            .filter_map(|line| line.0.get(decision as usize))
            .map(SingleWriterCounter::get)
            .sum()
    }
}

impl PolicyDecision {
    const COUNT: usize = 12;

    /// Whether the policy refused the request for what its client did, or would have.
    pub fn is_refusal(self) -> bool {
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
