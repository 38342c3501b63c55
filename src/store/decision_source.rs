//! The parts of the store that can decide.

use strum::{IntoStaticStr, VariantNames};

/// The component that decided on a request's limits. The names are those in metrics, logs and
/// spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum DecisionSource {
    Redis,
    Memory,
    DenyCache,
    /// Units leased from the store in advance.
    Lease,
    /// The `on_store_failure` setting of the policies, because the store was unavailable.
    Degraded,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_match_discriminants() {
        assert_eq!(
            DecisionSource::VARIANTS.len(),
            DecisionSource::Degraded as usize + 1
        );
        for one in [
            DecisionSource::Redis,
            DecisionSource::Memory,
            DecisionSource::DenyCache,
            DecisionSource::Lease,
            DecisionSource::Degraded,
        ] {
            assert_eq!(DecisionSource::VARIANTS[one as usize], <&str>::from(one));
        }
    }
}
