//! Streaming request and response bodies.
//!
//! Bodies stream frame by frame. A truncated body never looks complete to the receiver: an error in
//! a body closes the HTTP/1 connection or resets the HTTP/2 stream that carries it.

pub(crate) mod error;
mod replay_buffer;
pub(crate) mod request;
pub(crate) mod response;
pub(crate) mod size_hint;

pub use error::BodyError;
pub use request::RequestBody;
pub(crate) use request::{RequestBodyLimits, RequestBodyProgress};
pub use response::ResponseBody;
