//! The path at which clients can query their quotas, and the limit of these queries.

use super::NamedLimit;

/// Settings of the path at which clients can query their quotas.
#[derive(Clone, Debug)]
pub struct SelfServiceSettings {
    /// The exact path.
    pub path: Box<str>,
    /// The limit of queries, per client.
    pub limit: NamedLimit,
}
