//! Streaming request and response bodies.
//!
//! Bodies stream frame by frame. A truncated body never looks complete to the receiver: an error in
//! a body closes the HTTP/1 connection or resets the HTTP/2 stream that carries it.

pub(crate) mod informational_responses;
pub(crate) mod replay_buffer;
pub(crate) mod request;
pub(crate) mod tunnel;

pub use request::RequestBody;
pub(crate) use request::{RequestBodyLimits, RequestBodyProgress};

use http_body::SizeHint;
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
    /// The key of the request has nothing left (`cut_off`).
    #[error("the quota of the request's key is used up")]
    #[strum(serialize = "cut_off")]
    CutOff,
    /// The upstream closed the connection early, or violated the protocol.
    #[error("the upstream aborted the response body: {0}")]
    #[strum(serialize = "upstream_broken")]
    UpstreamAborted(String),
}

/// The hint of a body that starts with `bytes` more.
pub(crate) fn add_to_size_hint(mut hint: SizeHint, bytes: usize) -> SizeHint {
    let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
    if let Some(upper) = hint.upper() {
        hint.set_upper(upper.saturating_add(bytes));
    }
    hint.set_lower(hint.lower().saturating_add(bytes));
    hint
}
