//! Results of calls to the rate-limit service.

use strum::{IntoStaticStr, VariantNames};

/// The result of a call to the rate-limit service. The names are metric labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum RlsCallResult {
    Ok,
    OverLimit,
    /// The store was unavailable.
    Unavailable,
    /// The request was not a valid gRPC call of the service.
    Invalid,
    /// The caller cancelled the call.
    #[strum(serialize = "given_up")]
    Cancelled,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_discriminants() {
        assert_eq!(
            RlsCallResult::VARIANTS.len(),
            RlsCallResult::Cancelled as usize + 1
        );
        for one in [
            RlsCallResult::Ok,
            RlsCallResult::OverLimit,
            RlsCallResult::Unavailable,
            RlsCallResult::Invalid,
            RlsCallResult::Cancelled,
        ] {
            assert_eq!(RlsCallResult::VARIANTS[one as usize], <&str>::from(one));
        }
    }
}
