//! The parts of the store that can decide.

/// The component that decided on a request's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionSource {
    Redis,
    Memory,
    DenyCache,
    /// Units leased from the store in advance.
    Lease,
    /// The `on_store_failure` setting of the policies, because the store was unavailable.
    Degraded,
}

impl DecisionSource {
    /// Every [`DecisionSource::label`], in the order of declaration.
    pub const LABELS: [&str; 5] = [
        Self::Redis.label(),
        Self::Memory.label(),
        Self::DenyCache.label(),
        Self::Lease.label(),
        Self::Degraded.label(),
    ];

    /// The name in metrics, logs and spans.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Memory => "memory",
            Self::DenyCache => "deny_cache",
            Self::Lease => "lease",
            Self::Degraded => "degraded",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::DecisionSource;

    #[test]
    fn labels_match_discriminants() {
        assert_eq!(
            DecisionSource::LABELS.len(),
            DecisionSource::Degraded as usize + 1
        );
        for one in [
            DecisionSource::Redis,
            DecisionSource::Memory,
            DecisionSource::DenyCache,
            DecisionSource::Lease,
            DecisionSource::Degraded,
        ] {
            assert_eq!(DecisionSource::LABELS[one as usize], one.label());
        }
    }
}
