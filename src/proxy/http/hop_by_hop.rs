//! Hop-by-hop headers (RFC 9110, 7.6.1), which apply to a single connection, and parsing of the
//! `Connection` lists that name more of them.

use http::{HeaderMap, HeaderName, HeaderValue, header};

use super::header_lines::remove_headers;

/// Returns the header names in a `Connection` value, without `close` and `keep-alive`.
pub(crate) fn headers_named_in_connection(
    value: &HeaderValue,
) -> impl Iterator<Item = HeaderName> + '_ {
    list_elements(value)
        .filter(|name| {
            !name.eq_ignore_ascii_case(b"keep-alive") && !name.eq_ignore_ascii_case(b"close")
        })
        .filter_map(|name| HeaderName::from_bytes(name).ok())
}

/// Returns the non-empty elements of a comma-separated header value. Quotes are not interpreted.
pub(crate) fn list_elements(value: &HeaderValue) -> impl Iterator<Item = &[u8]> {
    value
        .as_bytes()
        .split(|byte| *byte == b',')
        .map(<[u8]>::trim_ascii)
        .filter(|item| !item.is_empty())
}

/// Whether a header applies to a single connection only; `Connection` can name further ones.
pub(crate) fn is_hop_by_hop(name: &HeaderName) -> bool {
    matches!(
        *name,
        header::CONNECTION
            | header::UPGRADE
            | header::TE
            | header::PROXY_AUTHORIZATION
            | header::PROXY_AUTHENTICATE
    ) || matches!(
        name.as_str(),
        "keep-alive" | "proxy-connection" | "http2-settings"
    )
}

/// Removes the trailers that apply to a connection or frame a message (RFC 9110, 6.5.1). HTTP/2
/// clients reset a stream with them; hyper removes them for HTTP/1.1.
pub(crate) fn remove_invalid_trailers(trailers: &mut HeaderMap) {
    remove_headers(trailers, |name| is_hop_by_hop(name) || is_framing(name));
}

/// Whether a header frames or routes a message.
pub(crate) fn is_framing(name: &HeaderName) -> bool {
    matches!(
        *name,
        header::CONTENT_LENGTH | header::TRANSFER_ENCODING | header::HOST | header::TRAILER
    )
}

/// Whether validation always removes a header, so that policies never see it. `Connection`, `TE`
/// and `Upgrade` do not count, because validation rebuilds them.
pub fn is_stripped_before_policies(name: &HeaderName) -> bool {
    let is_rebuilt = matches!(*name, header::CONNECTION | header::TE | header::UPGRADE);
    *name == header::EXPECT || (is_hop_by_hop(name) && !is_rebuilt)
}
