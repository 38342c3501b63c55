//! What each policy did, counted per worker; and the words for it.

use super::histogram::Count;
use std::sync::Arc;

/// What one policy did with one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
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
pub enum Answer {
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
pub struct Tally {
    policy: Arc<str>,
    lines: Box<[Line]>,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Line([Count; Decision::COUNT]);

/// The values of the label `decision`, in the order of [`Tally::requests`].
pub const DECISIONS: [&str; 8] = [
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
pub const PAST: [&str; 9] = [
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

impl Tally {
    pub(super) fn new(policy: Arc<str>, workers: usize) -> Self {
        Self {
            policy,
            lines: (0..workers).map(|_| Line::default()).collect(),
        }
    }

    /// Whose counts these are.
    pub fn policy(&self) -> &Arc<str> {
        &self.policy
    }

    /// Requests so far, by [`DECISIONS`].
    pub fn requests(&self) -> [u64; DECISIONS.len()] {
        use Decision as D;
        let decided = [
            D::Allowed,
            D::Delayed,
            D::Rejected,
            D::Blocked,
            D::Denied,
            D::Exempt,
            D::ShadowRejected,
        ];
        let mut counts = [0; DECISIONS.len()];
        for (count, decision) in counts.iter_mut().zip(decided) {
            *count = self.sum(decision);
        }
        let alone: u64 = self.degraded().iter().map(|(_, count)| count).sum();
        if let Some(degraded) = counts.last_mut() {
            *degraded = alone + self.sum(D::Degraded);
        }
        counts
    }

    /// Requests so far, by [`PAST`].
    pub fn past(&self) -> [u64; PAST.len()] {
        let refused =
            self.sum(Decision::DegradedClosed) + self.sum(Decision::DegradedLocalRejected);
        let mut counts = [refused; PAST.len()];
        for (count, requests) in counts.iter_mut().zip(self.requests()) {
            *count = requests;
        }
        counts
    }

    /// What an enforced policy did without the store, by outcome.
    pub fn degraded(&self) -> [(&'static str, u64); 4] {
        [
            ("open", self.sum(Decision::DegradedOpen)),
            ("closed", self.sum(Decision::DegradedClosed)),
            ("local_allowed", self.sum(Decision::DegradedLocalAllowed)),
            ("local_rejected", self.sum(Decision::DegradedLocalRejected)),
        ]
    }

    /// Only `worker` may say so.
    pub(super) fn add(&self, worker: usize, decision: Decision) {
        if let Some(count) = self
            .lines
            .get(worker)
            .and_then(|line| line.0.get(decision as usize))
        {
            count.add(1);
        }
    }

    fn sum(&self, decision: Decision) -> u64 {
        self.lines
            .iter()
            .filter_map(|line| line.0.get(decision as usize))
            .map(Count::get)
            .sum()
    }
}

impl Decision {
    const COUNT: usize = 12;

    /// Whether the policy refused the request for what its client did, or would have.
    pub fn refuses(self) -> bool {
        use Decision as D;
        matches!(
            self,
            D::Rejected | D::Blocked | D::Denied | D::ShadowRejected | D::DegradedLocalRejected
        )
    }
}

impl Answer {
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

    pub fn word(self) -> &'static str {
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
