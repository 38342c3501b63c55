//! HTTP/2 connections to the upstream, each with many concurrent requests.
//!
//! The h2 library is used directly instead of hyper's client. hyper would run two tasks per
//! request. hyper also cannot cancel an upload after the response was read, nor report that the
//! upstream refused a request unprocessed.

pub(super) mod body_upload;
mod connection;
mod driver;
pub(super) mod received_stream;

pub(super) use connection::{Http2Connection, Http2ResponseFuture, MAX_CONCURRENT_STREAMS};

pub(super) use driver::perform_http2_handshake;
