//! The decision of one policy, and of all policies together, as reported in logs and metrics.

/// The decision of one policy about one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyDecision {
    /// All limits admitted the request; also for a shadow policy.
    Allowed,
    /// Admitted by a policy with a `leaky_bucket`, and delayed.
    Delayed,
    Rejected,
    /// Rejected by a block that an earlier rejection started.
    Blocked,
    /// Rejected whatever the quota: `action = "deny"`, or a request without a valid key.
    Denied,
    Exempt,
    /// A shadow policy would have rejected the request.
    ShadowRejected,
    /// Not decided, because the store was unavailable: a shadow policy, or a `local` policy beside
    /// a `closed` one.
    Degraded,
    /// The store was unavailable and the policy is `open`.
    DegradedOpen,
    /// The store was unavailable and the policy is `closed`.
    DegradedClosed,
    /// The store was unavailable and the local share admitted the request.
    DegradedLocalAllowed,
    /// The store was unavailable and the local share was exhausted.
    DegradedLocalRejected,
}

/// The decision of all policies together about one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestDecision {
    Allowed,
    Delayed,
    Rejected,
    Blocked,
    Denied,
    /// Forwarded without the store.
    Degraded,
    /// The request is malformed, or a policy cannot form its key.
    Malformed,
    /// Rejected because the store was unavailable; has the same name as [`Self::Degraded`].
    Unavailable,
}

impl PolicyDecision {
    /// All decisions, in the order of their counters.
    pub const ALL: [Self; 12] = [
        Self::Allowed,
        Self::Delayed,
        Self::Rejected,
        Self::Blocked,
        Self::Denied,
        Self::Exempt,
        Self::ShadowRejected,
        Self::Degraded,
        Self::DegradedOpen,
        Self::DegradedClosed,
        Self::DegradedLocalAllowed,
        Self::DegradedLocalRejected,
    ];

    /// Value of the label `decision`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Delayed => "delayed",
            Self::Rejected => "rejected",
            Self::Blocked => "blocked",
            Self::Denied => "denied",
            Self::Exempt => "exempt",
            Self::ShadowRejected => "shadow_rejected",
            Self::Degraded
            | Self::DegradedOpen
            | Self::DegradedClosed
            | Self::DegradedLocalAllowed
            | Self::DegradedLocalRejected => "degraded",
        }
    }

    /// Whether the policy rejected the request because of its client, or would have.
    pub fn is_refusal(self) -> bool {
        matches!(
            self,
            Self::Rejected
                | Self::Blocked
                | Self::Denied
                | Self::ShadowRejected
                | Self::DegradedLocalRejected
        )
    }
}

impl RequestDecision {
    /// All decisions, in the order of their counters.
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

    /// Value of the label `decision`, and of that field in the access log.
    pub fn name(self) -> &'static str {
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
