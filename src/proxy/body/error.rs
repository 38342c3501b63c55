//! Errors of request and response bodies.

use strum::IntoStaticStr;

/// Why a body ended early. The names are those in trace spans.
#[derive(Debug, IntoStaticStr, thiserror::Error)]
#[strum(serialize_all = "snake_case")]
pub enum BodyError {
    /// The client sent nothing for `body_idle_timeout`.
    #[error("the client stopped sending the request body")]
    ClientTimeout,
    /// The request body exceeds `max_body_bytes`.
    #[error("the request body is larger than allowed")]
    TooLarge,
    /// The client disconnected, or sent an invalid body.
    #[error("the client aborted the request body: {0}")]
    #[strum(serialize = "client_gone")]
    ClientAborted(String),
    /// The upstream sent nothing for `body_idle_timeout`.
    #[error("the upstream stopped sending the response body")]
    UpstreamTimeout,
    /// The request exceeded the `max_duration` of a concurrency limit.
    #[error("the request took longer than allowed")]
    #[strum(serialize = "overlong")]
    MaxDurationExceeded,
    /// The upstream closed the connection early, or violated the protocol.
    #[error("the upstream aborted the response body: {0}")]
    #[strum(serialize = "upstream_broken")]
    UpstreamAborted(String),
}
