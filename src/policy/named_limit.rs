//! Limits with names.

use crate::limiter::{Limit, LimitName};

/// A limit and its name in the rate-limit headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedLimit {
    pub name: LimitName,
    /// The unit that is counted; `None` means requests.
    pub unit: Option<Box<str>>,
    pub limit: Limit,
    /// Whether responses may have the limit: `report` of its policy.
    pub is_reported: bool,
}
