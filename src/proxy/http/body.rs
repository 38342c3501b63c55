//! Streaming request and response bodies.
//!
//! Bodies stream frame by frame. A truncated body never looks complete to the receiver: an error in
//! a body closes the HTTP/1 connection or resets the HTTP/2 stream that carries it.

pub(in crate::proxy) mod error;
mod replay_buffer;
pub(in crate::proxy) mod request;
pub(in crate::proxy) mod response;

pub use error::BodyError;
pub use request::RequestBody;
pub(in crate::proxy) use request::{RequestBodyLimits, RequestBodyProgress};
pub use response::ResponseBody;
