//! Errors of keys and conditions that depend on ambiguous parts of a request.

/// Why a request cannot be keyed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("{0} occurs more than once; expected one")]
    Repeated(String),
    #[error(
        "{0} occurs more than once or has a comma; expected one value without a comma (setting check.joined_headers)"
    )]
    Joined(String),
    #[error("{0} is missing")]
    Missing(String),
    #[error(
        "the path can be read in several ways with different keys (setting path.ambiguous_key)"
    )]
    AmbiguousPath,
    #[error(
        "{0} can be read in several ways; expected it once, by its exact name, percent-encoded in UTF-8 (setting client.ambiguous_query)"
    )]
    AmbiguousQuery(String),
    #[error(
        "{0} can be read in several ways; expected it once, by its exact name, in ASCII without spaces and backslashes (setting client.ambiguous_cookie)"
    )]
    AmbiguousCookie(String),
    #[error(
        "{0} has white space around its value or control characters in it; expected the value without them (setting client.outer_white_space)"
    )]
    OuterWhiteSpace(String),
    #[error(
        "{0} has a comma, a bracket, an ampersand, a control character or an inner quote; expected a value without them (setting client.cookie_octets)"
    )]
    CookieOctet(String),
    #[error(
        "{0} is sent with the prefix __Host- or __Secure- in its name; expected it without (setting client.cookie_prefixes)"
    )]
    PrefixedCookie(String),
}
