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
    #[error(
        "{0} has white space around its value or control characters in it (setting client.outer_white_space)"
    )]
    OuterWhiteSpace(String),
    #[error("{0} has a character that cookies must not have (setting client.cookie_octets)")]
    CookieOctet(String),
    #[error("{0} is also sent with a prefix in its name (setting client.cookie_prefixes)")]
    PrefixedCookie(String),
}
