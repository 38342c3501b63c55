//! Errors of request and response bodies.

/// Why a body ended early.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The client sent nothing for `body_idle_timeout`.
    #[error("the client stopped sending the request body")]
    ClientTimeout,
    /// The request body exceeds `max_body_bytes`.
    #[error("the request body is larger than allowed")]
    TooLarge,
    /// The client disconnected, or sent an invalid body.
    #[error("the client aborted the request body: {0}")]
    ClientAborted(String),
    /// The upstream sent nothing for `body_idle_timeout`.
    #[error("the upstream stopped sending the response body")]
    UpstreamTimeout,
    /// The request exceeded the `max_duration` of a concurrency limit.
    #[error("the request took longer than allowed")]
    MaxDurationExceeded,
    /// The upstream closed the connection early, or violated the protocol.
    #[error("the upstream aborted the response body: {0}")]
    UpstreamAborted(String),
}

impl BodyError {
    /// A stable name for trace spans.
    pub(in crate::proxy) fn name(&self) -> &'static str {
        match self {
            Self::ClientTimeout => "client_timeout",
            Self::TooLarge => "too_large",
            Self::ClientAborted(_) => "client_gone",
            Self::UpstreamTimeout => "upstream_timeout",
            Self::MaxDurationExceeded => "overlong",
            Self::UpstreamAborted(_) => "upstream_broken",
        }
    }
}
