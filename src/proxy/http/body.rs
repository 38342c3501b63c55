//! Streaming request and response bodies.
//!
//! Both stream frame by frame without a buffer. A truncated body never looks complete to the
//! receiver: an error in a body closes the connection that carries it.

pub(in crate::proxy) mod error;
mod replay_buffer;
pub(in crate::proxy) mod request;
pub(in crate::proxy) mod response;

pub use error::BodyError;
pub(in crate::proxy) use request::BodyLimits;
pub use request::RequestBody;
pub use response::ResponseBody;
