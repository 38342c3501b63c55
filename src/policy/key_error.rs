//! Errors of keys and conditions that depend on ambiguous parts of a request.

/// Why a request cannot be keyed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("{0} occurs more than once")]
    Repeated(String),
    #[error("{0} occurs more than once or has a comma (setting check.joined_headers)")]
    Joined(String),
    #[error("{0} is missing")]
    Missing(String),
    #[error(
        "the path can be read in several ways with different keys (setting path.ambiguous_key)"
    )]
    AmbiguousPath,
    #[error("{0} can be read in several ways (setting client.ambiguous_query)")]
    AmbiguousQuery(String),
    #[error("{0} can be read in several ways (setting client.ambiguous_cookie)")]
    AmbiguousCookie(String),
}
