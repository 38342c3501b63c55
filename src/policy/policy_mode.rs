//! The modes of a policy.

use strum::{EnumString, IntoStaticStr, VariantNames};

/// What a policy does with its decisions. In every mode it decides and counts.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, EnumString, VariantNames, IntoStaticStr,
)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum PolicyMode {
    Enforce,
    /// Never rejects, exempts or denies: a request over the limit is forwarded with a header that
    /// names the policy.
    Mark,
    /// Never rejects, exempts or denies, and is invisible to clients and the upstream.
    Shadow,
}

impl PolicyMode {
    /// The name in the configuration and in reports.
    pub const fn name(self) -> &'static str {
        self.into_str()
    }

    /// ` (mark)` or ` (shadow)`, to follow the name of a policy that does not reject.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Enforce => "",
            Self::Mark => " (mark)",
            Self::Shadow => " (shadow)",
        }
    }

    /// Whether the policy may reject, exempt or deny.
    pub fn is_enforced(self) -> bool {
        self == Self::Enforce
    }
}
