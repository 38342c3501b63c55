//! The path at which clients can query their quotas, and the limit of these queries.

use super::NamedLimit;
use http::HeaderName;

/// Settings of the path at which clients can query their quotas.
#[derive(Clone, Debug)]
pub struct SelfServiceSettings {
    /// The exact path.
    pub path: Box<str>,
    /// The limit of queries, per client.
    pub limit: NamedLimit,
    /// Headers that identify the client, because the gateway in front sets or removes them.
    pub trusted_headers: Vec<HeaderName>,
}
