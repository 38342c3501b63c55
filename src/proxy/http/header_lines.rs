//! Lines of header fields: lists, cookies and the memory that they take.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use smallvec::SmallVec;

pub(super) static CLIENT_CERT: HeaderName = HeaderName::from_static("client-cert");
pub(super) static CLIENT_CERT_CHAIN: HeaderName = HeaderName::from_static("client-cert-chain");

/// Memory of a field line in a header map: an entry, without name and value.
const FIELD_LINE_BYTES: usize = 104;

/// Number of lines up to which the spare memory of a map is kept.
const MAX_SCATTERED_LINES: usize = 64;

/// Capacity up to which a joined value is not moved to save memory.
const MAX_SPARE_CAPACITY: usize = 4096;

/// The values of a header. Comparing the few names of a request is cheaper than a lookup.
pub(crate) fn header_values<'h>(
    headers: &'h HeaderMap,
    name: &HeaderName,
) -> impl Iterator<Item = &'h HeaderValue> {
    let lines = headers.iter();
    lines.filter_map(move |(line_name, value)| (line_name == name).then_some(value))
}

/// Removes the headers that `is_removed` selects.
pub(crate) fn remove_headers(headers: &mut HeaderMap, is_removed: impl Fn(&HeaderName) -> bool) {
    let names = headers.keys().filter(|name| is_removed(name));
    let names: SmallVec<[HeaderName; 4]> = names.cloned().collect();
    for name in &names {
        headers.remove(name);
    }
}

/// Appends `item` to a comma-separated list header and joins all lines of the header into one.
pub(crate) fn append_to_list_header(headers: &mut HeaderMap, name: &HeaderName, item: HeaderValue) {
    if headers.append(name, item) {
        let joined = join_header_lines(headers.get_all(name).iter(), b", ");
        headers.insert(name, joined);
    }
}

/// Joins the non-empty lines of a header into one value.
fn join_header_lines<'v>(
    lines: impl Iterator<Item = &'v HeaderValue>,
    separator: &[u8],
) -> HeaderValue {
    let mut text = Vec::with_capacity(128);
    for line in lines
        .map(HeaderValue::as_bytes)
        .filter(|line| !line.trim_ascii().is_empty())
    {
        if !text.is_empty() {
            text.extend_from_slice(separator);
        }
        text.extend_from_slice(line);
    }
    // The value keeps spare capacity, up to the length of the text.
    text.shrink_to(MAX_SPARE_CAPACITY);
    HeaderValue::from_maybe_shared(Bytes::from(text))
        .expect("valid values joined by visible ASCII are valid")
}

/// Returns the memory of the map. If it has many lines, joins those of `Cookie` first, and releases
/// the memory of the lines.
///
/// One byte of HPACK can produce a line that takes [`FIELD_LINE_BYTES`]. Such lines share the
/// memory of their value until they are joined.
pub(crate) fn compact_header_map(headers: &mut HeaderMap) -> usize {
    if headers.len() > MAX_SCATTERED_LINES {
        join_cookie_lines(headers);
        let mut compact = HeaderMap::with_capacity(headers.keys_len());
        compact.extend(std::mem::take(headers));
        *headers = compact;
    }
    let lines = headers.iter();
    lines
        .map(|(name, value)| FIELD_LINE_BYTES + name.as_str().len() + value.len())
        .sum()
}

/// Joins the lines of `Cookie` into one: HTTP/2 allows several, HTTP/1.1 only one (RFC 9113,
/// 8.2.3).
pub(crate) fn join_cookie_lines(headers: &mut HeaderMap) {
    let has_repeated_header = headers.len() > headers.keys_len();
    if has_repeated_header && headers.get_all(header::COOKIE).iter().nth(1).is_some() {
        let joined = join_header_lines(headers.get_all(header::COOKIE).iter(), b"; ");
        headers.insert(header::COOKIE, joined);
    }
}

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
    let items = value.as_bytes().split(|byte| *byte == b',');
    items
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

/// Whether a field states a client certificate, so that the upstream may trust it.
pub fn is_client_cert_field(name: &HeaderName) -> bool {
    *name == CLIENT_CERT || *name == CLIENT_CERT_CHAIN
}

/// Whether a request is a gRPC or Connect call, whose body is a stream of messages.
pub(crate) fn is_message_stream(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE);
    content_type.is_some_and(|value| {
        let value = value.as_bytes();
        value.starts_with(b"application/grpc") || value.starts_with(b"application/connect+")
    })
}
