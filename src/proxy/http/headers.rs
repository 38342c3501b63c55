//! What a proxy changes in heads on their way: fields that say who sent a request, over what and through
//! whom. Connection-bound fields of requests are gone by then (see [`crate::proxy::gate`]).

use super::request_validation::{self, RequestTarget};
use super::upgrade::{self, UpgradeRequest};
use crate::policy::client::ClientIdentity;
use bytes::Bytes;
use http::header::Entry;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Version, header, request, response};
use smallvec::SmallVec;
use std::net::IpAddr;

/// The way that a request came, and where it goes on.
#[derive(Clone, Copy, Debug)]
pub(in crate::proxy) struct ForwardingContext<'a> {
    pub(in crate::proxy) peer: &'a AddressText,
    /// Who is behind it.
    pub(in crate::proxy) client: ClientIdentity,
    /// Whether the request came over TLS.
    pub(in crate::proxy) is_https: bool,
    /// As it came.
    pub(in crate::proxy) version_in: Version,
    /// The header that the client's address was read from.
    pub(in crate::proxy) ip_header: &'a HeaderName,
    /// Whether the body has anything left to read. HTTP/2 tells so by no header.
    pub(in crate::proxy) has_body: bool,
    pub(in crate::proxy) preserve_host: bool,
    pub(in crate::proxy) upstream_authority: &'a HeaderValue,
}

/// An address as it stands in forwarding fields; made once per connection.
#[derive(Clone, Debug)]
pub(in crate::proxy) struct AddressText {
    ip: IpAddr,
    header_value: HeaderValue,
    /// As an element of `Forwarded`.
    forwarded_element: Box<str>,
}

/// Why an upstream's response head cannot be passed on: it is no valid answer to what was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::proxy) enum ResponseValidationError {
    #[error("the upstream used a transfer coding other than \"chunked\"")]
    TransferEncoding,
    #[error("the upstream switched protocols unasked")]
    UnrequestedSwitch,
    #[error("the upstream opened a WebSocket without the proof that it knows what that is")]
    InvalidWebSocketAccept,
    #[error("the upstream answered a WebSocket's handshake with success, and opened none")]
    WebSocketNotOpened,
}

impl AddressText {
    /// An IPv4 address in IPv6 clothes (a dual-stack socket) is the IPv4 address.
    pub(in crate::proxy) fn new(ip: IpAddr) -> Self {
        let ip = ip.to_canonical();
        Self {
            ip,
            header_value: ip_header_value(ip),
            forwarded_element: format_forwarded_for(ip).into(),
        }
    }
}

static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
static X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
static X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
static X_REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");

/// Makes a request that passed the gate into the one for the upstream.
///
/// A peer that isn't trusted tells nothing about others: its forwarding fields are replaced. A trusted
/// one's are continued.
pub(in crate::proxy) fn forward_request(
    parts: &mut request::Parts,
    target: &RequestTarget,
    hop: &ForwardingContext<'_>,
) {
    let headers = &mut parts.headers;
    if hop.has_body
        && !headers.contains_key(header::CONTENT_LENGTH)
        && !headers.contains_key(header::TRANSFER_ENCODING)
    {
        // hyper would otherwise drop the body of a GET.
        headers.insert(
            header::TRANSFER_ENCODING,
            HeaderValue::from_static("chunked"),
        );
    }
    // One growth of the map instead of one per field.
    headers.reserve(6);
    join_cookies(headers);
    if !hop.client.peer_trusted {
        remove_untrusted_forwarding_headers(headers, hop);
    }
    const HTTP: (&str, HeaderValue) = ("http", HeaderValue::from_static("http"));
    const HTTPS: (&str, HeaderValue) = ("https", HeaderValue::from_static("https"));
    let (proto, proto_value) = if hop.is_https { HTTPS } else { HTTP };
    append_forwarded_for(headers, hop);
    append_forwarded(headers, target, hop, proto);
    headers.entry(&X_FORWARDED_PROTO).or_insert(proto_value);
    if let Some(authority) = target.authority() {
        headers
            .entry(&X_FORWARDED_HOST)
            .or_insert_with(|| authority.clone());
    }
    append_to_list(headers, &header::VIA, via_value(hop.version_in));
    if !hop.preserve_host || target.authority().is_none() {
        headers.insert(header::HOST, hop.upstream_authority.clone());
    }
}

/// Asks for a body that can be read on its way, and for all of it: a client that could choose otherwise would choose
/// whether its cost is settled.
pub(in crate::proxy) fn request_full_identity_body(headers: &mut HeaderMap) {
    headers.insert(
        header::ACCEPT_ENCODING,
        HeaderValue::from_static("identity"),
    );
    headers.remove(header::RANGE);
    headers.remove(header::IF_RANGE);
}

/// Makes an upstream's response into the one for a client that asked by `version_in`, and `wanted` more than
/// an answer.
///
/// hyper frames it: by the `Content-Length` that stays, or chunked; and it speaks HTTP/1.0 with clients
/// that do.
///
/// # Errors
/// A [`ResponseValidationError`] if the response cannot be passed on safely.
pub(in crate::proxy) fn forward_response(
    parts: &mut response::Parts,
    version_in: Version,
    upgrade_request: Option<&UpgradeRequest>,
) -> Result<(), ResponseValidationError> {
    check_protocol_switch(parts, upgrade_request)?;
    let upgrade = upgrade_values_for_client(parts, version_in);
    let headers = &mut parts.headers;
    let mut headers_to_remove: SmallVec<[HeaderName; 4]> = SmallVec::new();
    let mut lengths = 0_usize;
    let mut codings = 0_usize;
    for (name, value) in &*headers {
        match *name {
            header::CONNECTION => headers_to_remove.extend(
                request_validation::connection_options(value)
                    .filter(|name| !is_kept_in_response(name)),
            ),
            header::CONTENT_LENGTH => lengths += 1,
            header::TRANSFER_ENCODING => {
                codings += 1;
                if codings > 1 || !value.as_bytes().eq_ignore_ascii_case(b"chunked") {
                    return Err(ResponseValidationError::TransferEncoding);
                }
                headers_to_remove.push(header::TRANSFER_ENCODING);
                // The coding won when hyper read the body, so the length is a lie.
                headers_to_remove.push(header::CONTENT_LENGTH);
            }
            _ => {}
        }
        if request_validation::is_hop_by_hop(name) {
            headers_to_remove.push(name.clone());
        }
    }
    for name in &headers_to_remove {
        headers.remove(name);
    }
    if lengths > 0 && codings == 0 {
        collapse_content_length(headers, lengths);
    }
    append_to_list(headers, &header::VIA, via_value(parts.version));
    for line in upgrade {
        headers.append(header::UPGRADE, line);
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    }
    if parts.status == StatusCode::SWITCHING_PROTOCOLS {
        // Whatever it says of a body: what follows is the other protocol.
        headers.remove(header::CONTENT_LENGTH);
        if let Some(UpgradeRequest::Http2WebSocket(_)) = upgrade_request {
            headers.remove(header::SEC_WEBSOCKET_ACCEPT);
            parts.status = StatusCode::OK;
        }
    }
    parts.version = if version_in == Version::HTTP_2 {
        Version::HTTP_2
    } else {
        Version::HTTP_11
    };
    Ok(())
}

/// Makes what an upstream says before its answer into what a client may be told before it: nothing about connections, and
/// no framing, since there is no body.
pub(in crate::proxy) fn forward_informational_response(parts: &mut response::Parts) {
    let headers = &mut parts.headers;
    let connection_options = headers
        .get_all(header::CONNECTION)
        .iter()
        .flat_map(request_validation::connection_options);
    let hop_by_hop = headers
        .keys()
        .filter(|name| request_validation::is_hop_by_hop(name))
        .cloned();
    let framing = [
        header::CONTENT_LENGTH,
        header::TRANSFER_ENCODING,
        header::TRAILER,
    ];
    let headers_to_remove: SmallVec<[HeaderName; 8]> = connection_options
        .chain(hop_by_hop)
        .chain(framing)
        .collect();
    for name in &headers_to_remove {
        headers.remove(name);
    }
    append_to_list(headers, &header::VIA, via_value(parts.version));
}

/// Whether a response switches protocols exactly if that is an answer to what was `wanted`. That the protocol is
/// one of those asked for has been checked when the connection was given up for it.
fn check_protocol_switch(
    parts: &response::Parts,
    upgrade_request: Option<&UpgradeRequest>,
) -> Result<(), ResponseValidationError> {
    let is_switch = parts.status == StatusCode::SWITCHING_PROTOCOLS;
    match upgrade_request {
        None if is_switch => Err(ResponseValidationError::UnrequestedSwitch),
        // Who doesn't know WebSockets was talked into saying so, and would go on with HTTP.
        Some(UpgradeRequest::Http1Upgrade { websocket_key })
            if is_switch && upgrade::is_websocket(&parts.headers) =>
        {
            let is_proven = websocket_key
                .as_ref()
                .is_some_and(|key| upgrade::has_valid_websocket_accept(key, &parts.headers));
            if is_proven {
                Ok(())
            } else {
                Err(ResponseValidationError::InvalidWebSocketAccept)
            }
        }
        Some(UpgradeRequest::Http2WebSocket(key))
            if is_switch && !upgrade::has_valid_websocket_accept(key, &parts.headers) =>
        {
            Err(ResponseValidationError::InvalidWebSocketAccept)
        }
        // To a CONNECT, any success would mean that the tunnel is open.
        Some(UpgradeRequest::Http2WebSocket(_)) if parts.status.is_success() => {
            Err(ResponseValidationError::WebSocketNotOpened)
        }
        _ => Ok(()),
    }
}

/// The `Upgrade` of a response that means the client: the protocol switched to, or required.
fn upgrade_values_for_client(
    parts: &response::Parts,
    version_in: Version,
) -> SmallVec<[HeaderValue; 1]> {
    let may_carry_upgrade = matches!(
        parts.status,
        StatusCode::SWITCHING_PROTOCOLS | StatusCode::UPGRADE_REQUIRED
    );
    if version_in != Version::HTTP_11 || !may_carry_upgrade {
        return SmallVec::new();
    }
    let list: SmallVec<_> = parts
        .headers
        .get_all(header::UPGRADE)
        .iter()
        .cloned()
        .collect();
    if upgrade::is_forwardable_upgrade(&list) {
        list
    } else {
        SmallVec::new()
    }
}

/// Adds `item` to a field that is a comma-separated list, in one line.
pub(in crate::proxy) fn append_to_list(
    headers: &mut HeaderMap,
    name: &HeaderName,
    item: HeaderValue,
) {
    match headers.entry(name) {
        Entry::Vacant(vacant) => {
            vacant.insert(item);
        }
        Entry::Occupied(mut occupied) => {
            let joined = join_values(occupied.iter().chain([&item]), b", ");
            occupied.insert(joined);
        }
    }
}

/// In decimal, with one allocation; the conversion that `http` has makes two.
pub(in crate::proxy) fn integer_header_value(value: impl itoa::Integer) -> HeaderValue {
    HeaderValue::from_str(itoa::Buffer::new().format(value)).expect("digits are visible signs")
}

/// All lines of a list in one.
fn join_values<'v>(lines: impl Iterator<Item = &'v HeaderValue>, separator: &[u8]) -> HeaderValue {
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
    HeaderValue::from_maybe_shared(Bytes::from(text))
        .expect("valid values joined by visible signs are valid")
}

/// HTTP/2 may split cookies over lines; HTTP/1.1 has one line (RFC 9113, 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    if headers.get_all(header::COOKIE).iter().nth(1).is_some() {
        let joined = join_values(headers.get_all(header::COOKIE).iter(), b"; ");
        headers.insert(header::COOKIE, joined);
    }
}

/// Removes what an untrusted peer says about where a request came from. Fields that name one address are
/// made true instead, for upstreams that read them.
fn remove_untrusted_forwarding_headers(headers: &mut HeaderMap, hop: &ForwardingContext<'_>) {
    let forwarding_headers: SmallVec<[HeaderName; 4]> = headers
        .keys()
        .filter(|name| **name == header::FORWARDED || name.as_str().starts_with("x-forwarded-"))
        .cloned()
        .collect();
    for name in &forwarding_headers {
        headers.remove(name);
    }
    for name in [&X_REAL_IP, hop.ip_header] {
        // Mostly it isn't there, and an entry would first make room for it.
        if headers.contains_key(name) {
            headers.insert(name, hop.peer.header_value.clone());
        }
    }
}

fn append_forwarded_for(headers: &mut HeaderMap, hop: &ForwardingContext<'_>) {
    // If the peer told us by another field who the client is, an upstream that reads this one should know.
    if let Some(client) = client_behind_peer(hop)
        && !headers.contains_key(&X_FORWARDED_FOR)
    {
        headers.insert(&X_FORWARDED_FOR, ip_header_value(client));
    }
    append_to_list(headers, &X_FORWARDED_FOR, hop.peer.header_value.clone());
}

fn append_forwarded(
    headers: &mut HeaderMap,
    target: &RequestTarget,
    hop: &ForwardingContext<'_>,
    proto: &str,
) {
    let client = client_behind_peer(hop)
        .filter(|_| !headers.contains_key(header::FORWARDED))
        .map(format_forwarded_for);
    let (client, comma) = client.as_deref().map_or(("", ""), |client| (client, ", "));
    let authority = target
        .authority()
        .and_then(|authority| authority.to_str().ok());
    // Quoted for the colon and the brackets; a valid authority holds nothing to escape.
    let [host, authority, quote] =
        authority.map_or([""; 3], |authority| [";host=\"", authority, "\""]);
    let element = [
        client,
        comma,
        &hop.peer.forwarded_element,
        host,
        authority,
        quote,
        ";proto=",
        proto,
    ]
    .concat();
    let element = HeaderValue::from_maybe_shared(Bytes::from(element));
    append_to_list(
        headers,
        &header::FORWARDED,
        element.expect("made of visible signs only"),
    );
}

/// The client, if a trusted peer stands before it.
fn client_behind_peer(hop: &ForwardingContext<'_>) -> Option<IpAddr> {
    let client = hop.client.ip.to_canonical();
    (hop.client.peer_trusted && client != hop.peer.ip).then_some(client)
}

fn ip_header_value(ip: IpAddr) -> HeaderValue {
    HeaderValue::try_from(ip.to_string()).expect("addresses are printed in visible signs")
}

/// The address as an element of `Forwarded` (RFC 7239, 6).
fn format_forwarded_for(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(ip) => format!("for={ip}"),
        IpAddr::V6(ip) => format!("for=\"[{ip}]\""),
    }
}

fn via_value(version: Version) -> HeaderValue {
    // Constants, which nothing checks at run time.
    const VIA_20: HeaderValue = HeaderValue::from_static("2 tidegate");
    const VIA_11: HeaderValue = HeaderValue::from_static("1.1 tidegate");
    const VIA_10: HeaderValue = HeaderValue::from_static("1.0 tidegate");
    match version {
        Version::HTTP_2 => VIA_20,
        Version::HTTP_10 => VIA_10,
        _ => VIA_11,
    }
}

/// Fields of a response that no `Connection` list takes away.
fn is_kept_in_response(name: &HeaderName) -> bool {
    matches!(
        *name,
        header::CONTENT_LENGTH
            | header::CONTENT_TYPE
            | header::CONTENT_ENCODING
            | header::CACHE_CONTROL
    )
}

/// hyper has checked that all lengths agree (also as a list in one line), but would not write several.
fn collapse_content_length(headers: &mut HeaderMap, lines: usize) {
    let Some(first) = headers.get(header::CONTENT_LENGTH) else {
        return;
    };
    if lines == 1 && !first.as_bytes().contains(&b',') {
        return;
    }
    let number = request_validation::list_elements(first)
        .next()
        .and_then(|digits| HeaderValue::from_bytes(digits).ok());
    if let Some(number) = number {
        headers.insert(header::CONTENT_LENGTH, number);
    }
}

#[cfg(test)]
mod tests;
