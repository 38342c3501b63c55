//! Changes to the headers of forwarded requests and responses: forwarding headers, `Via` and
//! framing.
//!
//! [`super::request_validation`] has already removed hop-by-hop headers from requests.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Request, StatusCode, Version, header, request, response,
};
use smallvec::SmallVec;
use std::net::IpAddr;
use tokio_rustls::rustls::pki_types::CertificateDer;

use super::header_lines::{
    CLIENT_CERT, CLIENT_CERT_CHAIN, append_to_list_header, join_cookie_lines, remove_headers,
};
use super::request_validation::RequestTarget;
use super::upgrade::RequestedProtocolSwitch;
use super::{header_lines, upgrade};
use crate::policy::PolicyTable;
use crate::policy::client::ClientAddress;
use crate::tls;

/// Takes a request head, and leaves an empty one.
pub(crate) fn take_head(head: &mut request::Parts) -> request::Parts {
    std::mem::replace(head, Request::new(()).into_parts().0)
}

/// Properties of a request, its client and the upstream that determine the forwarded headers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForwardingContext<'a> {
    pub(crate) peer: &'a AddressText,
    /// The client that sent the request; the peer itself if the peer is not trusted.
    pub(crate) client: ClientAddress,
    /// Whether the request came over TLS.
    pub(crate) is_https: bool,
    /// HTTP version of the client's request.
    pub(crate) version_in: Version,
    /// Configured header that holds the client's address.
    pub(crate) ip_header: &'a HeaderName,
    /// Whether the request has a body. An HTTP/2 request can have a body without any framing
    /// header.
    pub(crate) has_body: bool,
    pub(crate) preserve_host: bool,
    pub(crate) upstream_authority: &'a HeaderValue,
}

/// The peer's address, formatted for forwarding headers once per connection.
#[derive(Clone, Debug)]
pub(crate) struct AddressText {
    ip: IpAddr,
    header_value: HeaderValue,
    /// The address as the `for` parameter of a `Forwarded` element.
    forwarded_element: Box<str>,
}

/// Reason why an upstream's response head is not a valid response to the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ResponseValidationError {
    #[error("the upstream used a transfer coding other than \"chunked\"")]
    TransferEncoding,
    #[error("the upstream sent several Content-Length values that differ")]
    ContentLength,
    #[error("the upstream switched protocols, but the request asked for no upgrade")]
    UnrequestedSwitch,
    #[error("the upstream opened a WebSocket without a valid Sec-WebSocket-Accept header")]
    InvalidWebSocketAccept,
    #[error("the upstream answered a WebSocket handshake with a success status other than 101")]
    WebSocketNotOpened,
}

impl AddressText {
    /// Formats an address. Converts an IPv4-mapped IPv6 address (from a dual-stack socket) to IPv4.
    pub(crate) fn new(ip: IpAddr) -> Self {
        let ip = ip.to_canonical();
        Self {
            ip,
            header_value: format_ip_header_value(ip),
            forwarded_element: format_forwarded_for_parameter(ip).into(),
        }
    }
}

static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
static X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
static X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
static X_REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");

/// Rewrites the headers of a validated request before it is forwarded to the upstream.
///
/// Forwarding headers of a trusted peer are extended; those of an untrusted peer are replaced.
pub(crate) fn rewrite_request_headers(
    parts: &mut request::Parts,
    target: &RequestTarget,
    hop: &ForwardingContext<'_>,
) {
    let headers = &mut parts.headers;
    if hop.has_body
        && !headers.contains_key(header::CONTENT_LENGTH)
        && !headers.contains_key(header::TRANSFER_ENCODING)
    {
        // Without a framing header, hyper drops the body of a GET.
        let chunked = HeaderValue::from_static("chunked");
        headers.insert(header::TRANSFER_ENCODING, chunked);
    }
    // Reserving space once is cheaper than growing the map for each added header.
    headers.reserve(6);
    join_cookie_lines(headers);
    if !hop.client.is_peer_trusted {
        remove_or_overwrite_untrusted_headers(headers, hop);
    }
    const PROTO_HTTP: (&str, HeaderValue) = ("http", HeaderValue::from_static("http"));
    const PROTO_HTTPS: (&str, HeaderValue) = ("https", HeaderValue::from_static("https"));
    let (proto, proto_value) = if hop.is_https {
        PROTO_HTTPS
    } else {
        PROTO_HTTP
    };
    append_forwarded(headers, target, hop, proto);
    headers.entry(&X_FORWARDED_PROTO).or_insert(proto_value);
    if let Some(authority) = &target.authority {
        let host = headers.entry(&X_FORWARDED_HOST);
        host.or_insert_with(|| authority.clone());
    }
    append_to_list_header(headers, &header::VIA, via_value(hop.version_in));
    if !hop.preserve_host || target.authority.is_none() {
        headers.insert(header::HOST, hop.upstream_authority.clone());
    }
}

/// Changes request headers to ask for the whole response body without content coding, so that the
/// cost can be read from the body.
///
/// Without this change, a client could prevent settlement by asking for a content coding or a
/// range.
pub(crate) fn ask_upstream_for_full_identity_body(headers: &mut HeaderMap) {
    let identity = HeaderValue::from_static("identity");
    headers.insert(header::ACCEPT_ENCODING, identity);
    headers.remove(header::RANGE);
    headers.remove(header::IF_RANGE);
}

/// Rewrites an upstream's response for a client that sent an HTTP request of version `version_in`.
///
/// `upgrade_request` is the protocol switch that the request asked for. hyper frames the body by
/// the `Content-Length` left in the headers, or chunked. hyper also downgrades the response to
/// HTTP/1.0 where needed.
///
/// # Errors
/// A [`ResponseValidationError`] if the response cannot be forwarded safely.
pub(crate) fn rewrite_response_head(
    parts: &mut response::Parts,
    version_in: Version,
    upgrade_request: Option<&RequestedProtocolSwitch>,
) -> Result<(), ResponseValidationError> {
    check_protocol_switch(parts, upgrade_request)?;
    let upgrade = upgrade_values_for_client(parts, version_in);
    let headers = &mut parts.headers;
    let mut headers_to_remove: SmallVec<[HeaderName; 4]> = SmallVec::new();
    let mut lengths = 0_usize;
    let mut codings = 0_usize;
    let mut has_outer_whitespace = false;
    for (name, value) in &*headers {
        // An HTTP/1.1 parser has removed it; HTTP/2 clients reject the response (RFC 9113, 8.2.1).
        has_outer_whitespace |=
            parts.version == Version::HTTP_2 && value.as_bytes().trim_ascii().len() < value.len();
        match *name {
            header::CONNECTION => headers_to_remove.extend(
                header_lines::headers_named_in_connection(value)
                    .filter(|name| !is_kept_if_named_in_connection(name)),
            ),
            header::CONTENT_LENGTH => lengths += value.as_bytes().split(|b| *b == b',').count(),
            header::TRANSFER_ENCODING => {
                codings += 1;
                if codings > 1 || !value.as_bytes().eq_ignore_ascii_case(b"chunked") {
                    return Err(ResponseValidationError::TransferEncoding);
                }
                headers_to_remove.push(header::TRANSFER_ENCODING);
                // The length is removed too: hyper read the body as chunked and ignored it.
                headers_to_remove.push(header::CONTENT_LENGTH);
            }
            _ => {}
        }
        if header_lines::is_hop_by_hop(name) {
            headers_to_remove.push(name.clone());
        }
    }
    for name in &headers_to_remove {
        headers.remove(name);
    }
    if has_outer_whitespace {
        for value in headers.values_mut() {
            *value = HeaderValue::from_bytes(value.as_bytes().trim_ascii())
                .expect("a part of a valid value is valid");
        }
    }
    if lengths > 1 && codings == 0 {
        collapse_content_length(headers)?;
    }
    if matches!(
        parts.status,
        StatusCode::SWITCHING_PROTOCOLS | StatusCode::NO_CONTENT
    ) {
        // RFC 9110, 8.6. The bytes after the head of a 101 belong to the new protocol.
        headers.remove(header::CONTENT_LENGTH);
    }
    append_to_list_header(headers, &header::VIA, via_value(parts.version));
    for line in upgrade {
        headers.append(header::UPGRADE, line);
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    }
    if parts.status == StatusCode::SWITCHING_PROTOCOLS
        && upgrade_request.is_some_and(|requested| requested.is_extended_connect)
    {
        headers.remove(header::SEC_WEBSOCKET_ACCEPT);
        parts.status = StatusCode::OK;
    }
    parts.version = if version_in == Version::HTTP_2 {
        Version::HTTP_2
    } else {
        Version::HTTP_11
    };
    Ok(())
}

/// Rewrites an informational (1xx) response for the client: removes hop-by-hop and framing headers.
/// `version` is the HTTP version of the response.
pub(crate) fn rewrite_informational_headers(headers: &mut HeaderMap, version: Version) {
    let connection_options = headers.get_all(header::CONNECTION).iter();
    let connection_options: SmallVec<[HeaderName; 4]> = connection_options
        .flat_map(header_lines::headers_named_in_connection)
        .collect();
    remove_headers(headers, |name| {
        connection_options.contains(name)
            || header_lines::is_hop_by_hop(name)
            || header_lines::is_framing(name)
    });
    append_to_list_header(headers, &header::VIA, via_value(version));
}

/// Checks that a response switches protocols only if the request asked for a switch, and to
/// WebSocket only with a valid `Sec-WebSocket-Accept`.
///
/// The upstream client has already checked that the request offered the new protocol.
fn check_protocol_switch(
    parts: &response::Parts,
    upgrade_request: Option<&RequestedProtocolSwitch>,
) -> Result<(), ResponseValidationError> {
    let is_switch = parts.status == StatusCode::SWITCHING_PROTOCOLS;
    let is_proven = |key: &HeaderValue| upgrade::has_valid_websocket_accept(key, &parts.headers);
    match upgrade_request {
        None if is_switch => Err(ResponseValidationError::UnrequestedSwitch),
        // Requires a valid `Sec-WebSocket-Accept`: an upstream that does not support WebSocket
        // could copy `Upgrade` into a 101 response and continue with HTTP.
        Some(requested)
            if is_switch
                && (requested.is_extended_connect
                    || upgrade::upgrade_names_websocket(&parts.headers))
                && !requested.websocket_key.as_ref().is_some_and(is_proven) =>
        {
            Err(ResponseValidationError::InvalidWebSocketAccept)
        }
        // Rejects a 2xx status: the client, which sent CONNECT, would take the tunnel for open.
        Some(requested) if requested.is_extended_connect && parts.status.is_success() => {
            Err(ResponseValidationError::WebSocketNotOpened)
        }
        _ => Ok(()),
    }
}

/// Returns the `Upgrade` values to forward to an HTTP/1.1 client: the protocol switched to (101) or
/// required (426).
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
    let values = parts.headers.get_all(header::UPGRADE);
    let list: SmallVec<_> = values.iter().cloned().collect();
    let is_forwardable = upgrade::is_forwardable_upgrade(&list);
    if is_forwardable {
        list
    } else {
        SmallVec::new()
    }
}

/// Formats an integer as a header value with one allocation; the `http` crate's conversion needs
/// two.
pub(crate) fn integer_header_value(value: impl itoa::Integer) -> HeaderValue {
    HeaderValue::from_str(itoa::Buffer::new().format(value)).expect("digits are visible ASCII")
}

/// Removes or overwrites the forwarding headers that an untrusted peer sent.
///
/// `X-Real-IP` and the configured address header, if present, are set to the peer's address,
/// because upstreams may read them.
fn remove_or_overwrite_untrusted_headers(headers: &mut HeaderMap, hop: &ForwardingContext<'_>) {
    let mut removed: SmallVec<[HeaderName; 4]> = SmallVec::new();
    let mut overwritten: SmallVec<[HeaderName; 2]> = SmallVec::new();
    // One pass instead of a lookup of each name: all of them are usually absent.
    for name in headers.keys() {
        if *name == header::FORWARDED || name.as_str().starts_with("x-forwarded-") {
            removed.push(name.clone());
        } else if *name == X_REAL_IP || name == hop.ip_header {
            overwritten.push(name.clone());
        }
    }
    for name in &removed {
        headers.remove(name);
    }
    for name in overwritten {
        headers.insert(name, hop.peer.header_value.clone());
    }
}

/// Appends the peer to `X-Forwarded-For` and `Forwarded`.
fn append_forwarded(
    headers: &mut HeaderMap,
    target: &RequestTarget,
    hop: &ForwardingContext<'_>,
    proto: &str,
) {
    // The client's address if a trusted peer forwarded the request for another address.
    let client = Some(hop.client.ip.to_canonical())
        .filter(|client| hop.client.is_peer_trusted && *client != hop.peer.ip);
    // If the trusted peer sent the client's address only in another header, the address is added to
    // `X-Forwarded-For`, which upstreams may read.
    if let Some(client) = client
        && !headers.contains_key(&X_FORWARDED_FOR)
    {
        headers.insert(&X_FORWARDED_FOR, format_ip_header_value(client));
    }
    append_to_list_header(headers, &X_FORWARDED_FOR, hop.peer.header_value.clone());
    let client = client
        .filter(|_| !headers.contains_key(header::FORWARDED))
        .map(format_forwarded_for_parameter);
    let (client, comma) = client.as_deref().map_or(("", ""), |client| (client, ", "));
    let authority = target
        .authority
        .as_ref()
        .and_then(|authority| authority.to_str().ok());
    // The host is quoted because of colons and brackets; a validated host has nothing to escape.
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
    let element = element.expect("the element is visible ASCII only");
    append_to_list_header(headers, &header::FORWARDED, element);
}

fn format_ip_header_value(ip: IpAddr) -> HeaderValue {
    HeaderValue::try_from(ip.to_string()).expect("addresses are printed in visible ASCII")
}

/// Formats an address as the `for` parameter of a `Forwarded` element (RFC 7239, 6).
fn format_forwarded_for_parameter(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(ip) => format!("for={ip}"),
        IpAddr::V6(ip) => format!("for=\"[{ip}]\""),
    }
}

fn via_value(version: Version) -> HeaderValue {
    // The values are constants because constants are validated at compile time.
    const VIA_20: HeaderValue = HeaderValue::from_static("2 tidegate");
    const VIA_11: HeaderValue = HeaderValue::from_static("1.1 tidegate");
    const VIA_10: HeaderValue = HeaderValue::from_static("1.0 tidegate");
    match version {
        Version::HTTP_2 => VIA_20,
        Version::HTTP_10 => VIA_10,
        _ => VIA_11,
    }
}

/// Whether a response header is kept even if the response's `Connection` names it.
fn is_kept_if_named_in_connection(name: &HeaderName) -> bool {
    matches!(
        *name,
        header::CONTENT_LENGTH
            | header::CONTENT_TYPE
            | header::CONTENT_ENCODING
            | header::CACHE_CONTROL
    )
}

/// Reduces repeated or listed `Content-Length` values to one, because hyper cannot write several.
///
/// # Errors
/// Fails if the values differ: h2, unlike hyper, checks only the first.
fn collapse_content_length(headers: &mut HeaderMap) -> Result<(), ResponseValidationError> {
    let values = headers.get_all(header::CONTENT_LENGTH);
    let mut numbers = values.iter().flat_map(header_lines::list_elements);
    let first = numbers.next().unwrap_or_default();
    if numbers.any(|other| other != first) {
        return Err(ResponseValidationError::ContentLength);
    }
    let number = HeaderValue::from_bytes(first);
    drop(numbers);
    let number = number.map_err(|_invalid| ResponseValidationError::ContentLength)?;
    headers.insert(header::CONTENT_LENGTH, number);
    Ok(())
}

/// Largest `Client-Cert-Chain`, in bytes of certificates. The client chooses the chain, and each of
/// its requests repeats it. Three certificates with RSA keys of 4096 bits have 6 KiB.
const MAX_CHAIN_BYTES: usize = 16 * 1024;

/// The fields for one connection.
#[derive(Debug)]
pub(crate) struct ClientCertFields {
    certificate: HeaderValue,
    /// Present if the client sent the issuer of its certificate.
    chain: Option<HeaderValue>,
}

impl ClientCertFields {
    /// Formats the certificates of a TLS client, its own first. Of the others, only those count
    /// that are named as issuers, each of the one before: TLS does not verify the rest. Returns
    /// `None` if there is no certificate.
    pub(crate) fn from_chain(chain: &[CertificateDer<'_>]) -> Option<Self> {
        let (certificate, _) = chain.split_first()?;
        let issuers = tls::select_issuers(chain);
        let bytes: usize = issuers.iter().map(|der| der.len()).sum();
        let list: Vec<_> = issuers.iter().map(format_byte_sequence).collect();
        let is_sent = (1..=MAX_CHAIN_BYTES).contains(&bytes);
        Some(Self {
            certificate: HeaderValue::try_from(format_byte_sequence(certificate)).ok()?,
            chain: is_sent
                .then(|| HeaderValue::try_from(list.join(", ")).ok())
                .flatten(),
        })
    }
}

/// Removes the client's own fields. They stay only if `client.trusted_headers` names them and a
/// trusted proxy sends the request: other proxies pass on what their clients send.
pub(crate) fn remove_untrusted_client_cert(
    headers: &mut HeaderMap,
    client: &ClientAddress,
    table: &PolicyTable,
) {
    for name in [&CLIENT_CERT, &CLIENT_CERT_CHAIN] {
        if !is_set_by_gateway(name, client, table) {
            headers.remove(name);
        }
    }
}

/// Adds the fields of the connection, unless the gateway in front states the certificate.
pub(crate) fn add_client_cert(
    headers: &mut HeaderMap,
    fields: &ClientCertFields,
    client: &ClientAddress,
    table: &PolicyTable,
) {
    if is_set_by_gateway(&CLIENT_CERT, client, table) {
        return;
    }
    headers.insert(&CLIENT_CERT, fields.certificate.clone());
    // A chain of the gateway would be that of another certificate.
    headers.remove(&CLIENT_CERT_CHAIN);
    if let Some(chain) = &fields.chain {
        headers.insert(&CLIENT_CERT_CHAIN, chain.clone());
    }
}

fn is_set_by_gateway(name: &HeaderName, client: &ClientAddress, table: &PolicyTable) -> bool {
    client.is_peer_trusted && table.trusted_headers.contains(name)
}

/// Formats a byte sequence of structured fields (RFC 9651, section 3.3.5).
fn format_byte_sequence(der: &CertificateDer<'_>) -> String {
    format!(":{}:", STANDARD.encode(der))
}

#[cfg(test)]
mod tests;
