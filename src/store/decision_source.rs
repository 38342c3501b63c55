//! The part of the store that made a decision.

/// Source of a decision, as reported in the access log and the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionSource {
    Redis,
    Memory,
    DenyCache,
    /// Units charged in advance.
    Lease,
    /// The store was unavailable: `on_store_failure` of the policies decided.
    Degraded,
}

impl DecisionSource {
    /// All sources, in the order of their label values.
    pub const ALL: [Self; 5] = [
        Self::Redis,
        Self::Memory,
        Self::DenyCache,
        Self::Lease,
        Self::Degraded,
    ];

    /// Value of the label `source`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Memory => "memory",
            Self::DenyCache => "deny_cache",
            Self::Lease => "lease",
            Self::Degraded => "degraded",
        }
    }
}
