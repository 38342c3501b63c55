//! A limit and its name.

use crate::limiter::Limit;

/// A limit with its name in the rate-limit fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedLimit {
    pub name: Box<str>,
    /// What is counted, when it isn't requests.
    pub unit: Option<Box<str>>,
    pub limit: Limit,
}
