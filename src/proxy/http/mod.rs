//! HTTP semantics of the proxy, independent of sockets: request validation, header rewriting,
//! rate-limit headers, bodies and local replies.

pub(in crate::proxy) mod access_log;
pub(in crate::proxy) mod body;
pub(in crate::proxy) mod client_cert;
pub(in crate::proxy) mod header_lines;
pub(in crate::proxy) mod headers;
pub(in crate::proxy) mod hop_by_hop;
pub(in crate::proxy) mod inbound_request;
pub(in crate::proxy) mod informational_responses;
pub(in crate::proxy) mod local_replies;
pub(in crate::proxy) mod mark_header;
pub(in crate::proxy) mod rate_limit_headers;
pub(in crate::proxy) mod request_validation;
pub(in crate::proxy) mod response_cost;
pub(in crate::proxy) mod tunnel;
pub(in crate::proxy) mod upgrade;
