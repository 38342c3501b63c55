//! Results of calls to the rate-limit service.

/// The result of a call to the rate-limit service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RlsCallResult {
    Ok,
    OverLimit,
    /// The store was unavailable.
    Unavailable,
    /// The request was not a valid gRPC call of the service.
    Invalid,
    /// The caller cancelled the call.
    Cancelled,
}

impl RlsCallResult {
    /// The names of all results, in declaration order.
    pub const NAMES: [&str; 5] = [
        Self::Ok.name(),
        Self::OverLimit.name(),
        Self::Unavailable.name(),
        Self::Invalid.name(),
        Self::Cancelled.name(),
    ];

    /// The name of the result in metric labels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::OverLimit => "over_limit",
            Self::Unavailable => "unavailable",
            Self::Invalid => "invalid",
            Self::Cancelled => "given_up",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::RlsCallResult;

    #[test]
    fn names_match_discriminants() {
        assert_eq!(
            RlsCallResult::NAMES.len(),
            RlsCallResult::Cancelled as usize + 1
        );
        for one in [
            RlsCallResult::Ok,
            RlsCallResult::OverLimit,
            RlsCallResult::Unavailable,
            RlsCallResult::Invalid,
            RlsCallResult::Cancelled,
        ] {
            assert_eq!(RlsCallResult::NAMES[one as usize], one.name());
        }
    }
}
