//! Frames of HTTP/2 clients and upstreams: what the proxy counts, checks and replaces below h2.

pub(crate) mod field_block_filter;
pub(crate) mod frame_limits;
pub(crate) mod frame_scanner;
pub(crate) mod frame_splitter;
pub(crate) mod hpack;
