//! Streaming request and response bodies.
//!
//! Bodies stream frame by frame. A truncated body never looks complete to the receiver: an error in
//! a body closes the HTTP/1 connection or resets the HTTP/2 stream that carries it.

pub(crate) mod error;
pub(crate) mod informational_responses;
pub(crate) mod replay_buffer;
pub(crate) mod request;
pub(crate) mod size_hint;
pub(crate) mod tunnel;
pub(crate) mod websocket_frames;

pub use error::BodyError;
pub use request::RequestBody;
pub(crate) use request::{RequestBodyLimits, RequestBodyProgress};
