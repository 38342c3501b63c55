//! HTTP semantics of the proxy, independent of sockets: request validation, header rewriting,
//! rate-limit headers, bodies and local replies.

pub(crate) mod access_log;
pub(crate) mod header_lines;
pub(crate) mod headers;
pub(crate) mod inbound_request;
pub(crate) mod local_replies;
pub(crate) mod query_escaper;
pub(crate) mod rate_limit_headers;
pub(crate) mod request_validation;
pub(crate) mod response_cost;

pub(crate) mod upgrade;
