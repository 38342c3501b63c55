//! Validation of request heads: rejects requests that the proxy and the upstream could interpret
//! differently, and rewrites the others for an HTTP/1.1 upstream.
//!
//! hyper's parser has already rejected broken framing, obsolete line folding and control bytes. It
//! accepts lowercase methods, a missing, repeated or malformed Host, unusual target forms and
//! transfer codings other than one `chunked`. hyper also accepts header names that a CGI-like
//! upstream reads as another name, and `Connection` headers that list a protected header. This
//! module rejects all of these.
//!
//! hyper writes the framing of the forwarded request from the `Content-Length` or
//! `Transfer-Encoding: chunked` left in the header map. If a client's request has both, hyper drops
//! the length and closes the client connection after the response.

mod host;
#[cfg(test)]
mod tests;

pub use host::normalize_host;

use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, Version, header, request};
use hyper::ext::Protocol;
use smallvec::SmallVec;

use super::header_lines::{
    headers_named_in_connection, is_client_cert_field, is_hop_by_hop, list_elements,
};
use super::request_validation::host::{NormalizedHost, determine_authority_and_host};
use super::upgrade;
use super::upgrade::RequestedProtocolSwitch;
use crate::policy::{dashed_name, parse_whole_number};

/// Validated target of a request, with its content length and protocol switch. The data is owned,
/// so that the request head can still change.
#[derive(Clone, Debug)]
pub(crate) struct RequestTarget {
    /// Host and port as the client sent them.
    pub(crate) authority: Option<HeaderValue>,
    host: NormalizedHost,
    pub(crate) path_and_query: PathAndQuery,
    /// Declared length of the body in bytes; `None` without `Content-Length` (chunked, HTTP/2 or no
    /// body).
    pub(crate) content_length: Option<u64>,
    /// The protocol switch that the request asks for and the upstream may accept with a `101`.
    pub(crate) upgrade_request: Option<RequestedProtocolSwitch>,
}

/// Validates a request head, removes hop-by-hop headers and rewrites the rest for an HTTP/1.1
/// upstream: target in origin-form (path and query unchanged) and one `Host`.
///
/// `reads_header` returns whether a policy reads a header. Headers that policies read are
/// protected, in addition to the well-known ones.
///
/// # Errors
/// Returns a [`RequestValidationError`]; the caller must reply with its status and close an HTTP/1
/// connection.
pub(crate) fn validate_and_rewrite_request(
    parts: &mut request::Parts,
    reads_header: &dyn Fn(&HeaderName) -> bool,
) -> Result<RequestTarget, RequestValidationError> {
    // Lowercase methods are rejected: methods are case-sensitive (RFC 9110, 9.1), also for
    // policies, but some frameworks treat `post` as POST.
    let method = parts.method.as_str();
    if method.bytes().any(|byte| byte.is_ascii_lowercase()) {
        return Err(RequestValidationError::LowercaseMethod);
    }
    let is_extended_connect = parts.method == Method::CONNECT;
    if is_extended_connect {
        convert_websocket_connect_to_get(parts)?;
    }
    let scan = scan_headers(&parts.headers, reads_header)?;
    if parts.method == Method::TRACE
        && (scan.is_chunked || scan.content_length.is_some_and(|len| len > 0))
    {
        return Err(RequestValidationError::TraceBody);
    }
    let path_and_query = to_origin_form(parts)?;
    let (authority, host) = determine_authority_and_host(parts, scan.host.as_ref())?;
    // HTTP/1.0 has no expectations; `Expect` is ignored there (RFC 9110, 10.1.1).
    if scan.has_unknown_expectation && parts.version != Version::HTTP_10 {
        return Err(RequestValidationError::Expect);
    }

    if parts.uri.scheme().is_some() || parts.uri.path_and_query() != Some(&path_and_query) {
        parts.uri = Uri::from(path_and_query.clone());
    }
    if let (None, Some(authority)) = (&scan.host, &authority) {
        parts.headers.insert(header::HOST, authority.clone());
    }
    for name in &scan.headers_to_remove {
        parts.headers.remove(name);
    }
    let content_length = scan.content_length;
    let upgrade_request = rebuild_connection_headers(parts, scan, is_extended_connect);
    parts.version = Version::HTTP_11;
    Ok(RequestTarget {
        authority,
        host,
        path_and_query,
        content_length,
        upgrade_request,
    })
}

impl RequestTarget {
    /// The host for policies: lowercase, without port and trailing dot; an IPv6 address in its
    /// shortest form, in brackets. The host of an HTTP/1.0 request can be empty.
    pub(crate) fn host(&self) -> &str {
        match (&self.host, &self.authority) {
            (NormalizedHost::AuthorityRange(range), Some(authority)) => {
                let text = authority.to_str().unwrap_or_default();
                text.get(range.clone()).unwrap_or_default()
            }
            (NormalizedHost::OwnedText(text), _) => text,
            (NormalizedHost::AuthorityRange(_), None) => "",
        }
    }

    /// The path for policies, as the client sent it. `*` (`OPTIONS *`) becomes `/`.
    pub(crate) fn path(&self) -> &str {
        match self.path_and_query.path() {
            "*" => "/",
            path => path,
        }
    }

    /// Replaces the path. The query stays.
    pub(crate) fn replace_path(&mut self, path: &str) -> Result<(), RequestValidationError> {
        let replaced = match self.query() {
            Some(query) => PathAndQuery::try_from(format!("{path}?{query}")),
            None => PathAndQuery::try_from(path),
        };
        self.path_and_query = replaced.map_err(|_invalid| RequestValidationError::Target)?;
        Ok(())
    }

    /// The query without the question mark.
    pub(crate) fn query(&self) -> Option<&str> {
        self.path_and_query.query()
    }
}

/// Converts an extended CONNECT for a WebSocket into the GET of an HTTP/1.1 handshake.
///
/// # Errors
/// Returns [`RequestValidationError::Connect`] for a plain CONNECT, and
/// [`RequestValidationError::ConnectProtocol`] for a protocol other than WebSocket.
fn convert_websocket_connect_to_get(
    parts: &mut request::Parts,
) -> Result<(), RequestValidationError> {
    let protocol = parts.extensions.remove::<Protocol>();
    let protocol = protocol.filter(|_| parts.version == Version::HTTP_2);
    let protocol = protocol.ok_or(RequestValidationError::Connect)?;
    if !protocol.as_str().eq_ignore_ascii_case("websocket") {
        return Err(RequestValidationError::ConnectProtocol);
    }
    parts.method = Method::GET;
    Ok(())
}

fn to_origin_form(parts: &request::Parts) -> Result<PathAndQuery, RequestValidationError> {
    let uri = &parts.uri;
    // The `http` crate parses a target such as `foo` as an authority without a scheme.
    let is_known_form = match uri.scheme_str() {
        None => uri.authority().is_none(),
        Some(scheme) => matches!(scheme, "http" | "https"),
    };
    let path_and_query = uri
        .path_and_query()
        .filter(|_| is_known_form)
        .ok_or(RequestValidationError::Target)?;
    let text = path_and_query.as_str();
    match text.as_bytes().first() {
        // For `http://host#x`, `as_str` returns "/", but the URI would serialize without a path.
        Some(b'/') if text == "/" => Ok(PathAndQuery::from_static("/")),
        Some(b'/') => Ok(path_and_query.clone()),
        Some(b'*') if text == "*" && parts.method == Method::OPTIONS => Ok(path_and_query.clone()),
        // The target is an absolute URI without a path: `http://host?query`. The `:path` of HTTP/2
        // must have one (RFC 9113, 8.3.1).
        Some(b'?') if uri.scheme().is_some() && parts.version != Version::HTTP_2 => {
            PathAndQuery::try_from(format!("/{text}"))
                .map_err(|_invalid| RequestValidationError::Target)
        }
        _ => Err(RequestValidationError::Target),
    }
}

/// Rebuilds `Connection`, `TE` and `Upgrade` for the upstream connection (RFC 9110, 7.8 and
/// 10.1.4), and returns the protocol switch that is forwarded.
///
/// An `Upgrade` of a request with a body is removed: the new protocol would begin after the body,
/// and implementations can disagree on the end of the body. An `Upgrade` of an HTTP/1.0 request is
/// removed too.
fn rebuild_connection_headers(
    parts: &mut request::Parts,
    scan: RequestHeaderScan,
    is_extended_connect: bool,
) -> Option<RequestedProtocolSwitch> {
    let headers = &mut parts.headers;
    if scan.accepts_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    let has_body = scan.is_chunked || scan.content_length.is_some_and(|length| length > 0);
    let is_http11 = parts.version == Version::HTTP_11;
    let is_forwarded = is_extended_connect
        || is_http11
            && scan.connection_names_upgrade
            && !has_body
            && upgrade::is_forwardable_upgrade(&scan.upgrade_values);
    if is_extended_connect {
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        let key = upgrade::generate_websocket_key();
        headers.insert(header::SEC_WEBSOCKET_KEY, key);
    } else if is_forwarded {
        for value in scan.upgrade_values {
            headers.append(header::UPGRADE, value);
        }
    }
    let connection_value = match (scan.accepts_trailers, is_forwarded) {
        (true, true) => "te, upgrade",
        (true, false) => "te",
        (false, true) => "upgrade",
        (false, false) => return None,
    };
    let connection = HeaderValue::from_static(connection_value);
    headers.insert(header::CONNECTION, connection);
    is_forwarded.then(|| RequestedProtocolSwitch {
        is_extended_connect,
        websocket_key: headers.get(header::SEC_WEBSOCKET_KEY).cloned(),
    })
}

/// Reason why a request head is rejected. Clients see the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr, thiserror::Error)]
#[repr(u8)]
pub enum RequestValidationError {
    #[error("the method contains lowercase letters; methods are case-sensitive")]
    LowercaseMethod,
    #[error("CONNECT is not supported")]
    Connect,
    #[error("the only protocol supported with CONNECT is \"websocket\"")]
    ConnectProtocol,
    #[error("the Host header is missing")]
    HostMissing,
    #[error("the request has more than one Host header")]
    HostRepeated,
    #[error("the Host header is not a valid name or address with an optional port")]
    HostInvalid,
    #[error("the Host header differs from the authority of the request target")]
    HostMismatch,
    #[error("the request target must be a path, or an http or https URL")]
    Target,
    #[error("the only transfer coding supported is a single \"chunked\"")]
    TransferEncoding,
    #[error("the Content-Length must be a single whole number, without Transfer-Encoding")]
    ContentLength,
    #[error("the only expectation supported is \"100-continue\"")]
    Expect,
    #[error("the Trailer header names a field that is not allowed in trailers")]
    Trailer,
    #[error("a header value begins or ends with white space")]
    OuterWhiteSpace,
    #[error("a header name resembles the name of a protected header")]
    AmbiguousHeaderName,
    #[error("the Connection header names a protected header")]
    ProtectedConnectionOption,
    #[error("a TRACE request must not have a body")]
    TraceBody,
    #[error(
        "a header name of HTTP/2 is empty, or has other characters than lowercase letters, digits and symbols"
    )]
    FieldName,
    #[error("a header value contains control characters")]
    FieldValue,
    #[error(
        "the pseudo-header fields are not one :method, :scheme and :path, and at most one :authority, before all other fields"
    )]
    PseudoFields,
    #[error(
        "Connection, Keep-Alive, Proxy-Connection, Transfer-Encoding, Upgrade, and TE other than \"trailers\", are not allowed in HTTP/2"
    )]
    ConnectionField,
    #[error("the method is not a token")]
    Method,
    #[error(
        "the path contains characters that are not allowed; escape spaces, < (%3C), > (%3E) and ` (%60)"
    )]
    Path,
    #[error("the Content-Length differs from the length of the body")]
    BodyLength,
    #[error("the request head is too large")]
    HeadTooLarge,
    #[error("the request has more headers than allowed")]
    TooManyHeaders,
}

impl RequestValidationError {
    pub(crate) fn status(self) -> StatusCode {
        match self {
            Self::Connect => StatusCode::METHOD_NOT_ALLOWED,
            Self::TransferEncoding | Self::ConnectProtocol => StatusCode::NOT_IMPLEMENTED,
            Self::Expect => StatusCode::EXPECTATION_FAILED,
            Self::HeadTooLarge | Self::TooManyHeaders => {
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE
            }
            _ => StatusCode::BAD_REQUEST,
        }
    }
}

/// Result of one pass over the request headers.
#[derive(Default)]
struct RequestHeaderScan {
    host: Option<HeaderValue>,
    is_chunked: bool,
    content_length: Option<u64>,
    accepts_trailers: bool,
    has_unknown_expectation: bool,
    /// Values of `Upgrade` as the client sent them; valid only if `connection_names_upgrade`.
    upgrade_values: SmallVec<[HeaderValue; 1]>,
    connection_names_upgrade: bool,
    headers_to_remove: SmallVec<[HeaderName; 2]>,
}

fn scan_headers(
    headers: &HeaderMap,
    reads_header: &dyn Fn(&HeaderName) -> bool,
) -> Result<RequestHeaderScan, RequestValidationError> {
    let mut scan = RequestHeaderScan::default();
    for (name, value) in headers {
        if has_outer_white_space(value) {
            return Err(RequestValidationError::OuterWhiteSpace);
        }
        match *name {
            header::HOST if scan.host.is_some() => {
                return Err(RequestValidationError::HostRepeated);
            }
            header::HOST => scan.host = Some(value.clone()),
            header::TRANSFER_ENCODING => {
                if scan.is_chunked || !value.as_bytes().eq_ignore_ascii_case(b"chunked") {
                    return Err(RequestValidationError::TransferEncoding);
                }
                scan.is_chunked = true;
            }
            header::CONTENT_LENGTH => {
                let length = parse_whole_number(value.as_bytes())
                    .ok_or(RequestValidationError::ContentLength)?;
                if scan.content_length.replace(length).is_some() {
                    return Err(RequestValidationError::ContentLength);
                }
            }
            header::CONNECTION => {
                for field in headers_named_in_connection(value) {
                    // `Connection` may name `Upgrade` and `TE`, because both are rebuilt.
                    let is_rebuilt = matches!(field, header::UPGRADE | header::TE);
                    if !is_rebuilt && is_protected(&field, reads_header) {
                        return Err(RequestValidationError::ProtectedConnectionOption);
                    }
                    scan.connection_names_upgrade |= field == header::UPGRADE;
                    scan.headers_to_remove.push(field);
                }
            }
            header::TE => {
                scan.accepts_trailers |=
                    list_elements(value).any(|item| item.eq_ignore_ascii_case(b"trailers"));
            }
            header::UPGRADE => scan.upgrade_values.push(value.clone()),
            header::TRAILER => check_trailer_names(value, reads_header)?,
            header::EXPECT => {
                let is_known = value.as_bytes().eq_ignore_ascii_case(b"100-continue");
                scan.has_unknown_expectation |= !is_known;
                scan.headers_to_remove.push(header::EXPECT);
            }
            // Frequent names that consist of letters and hyphens.
            header::ACCEPT
            | header::ACCEPT_ENCODING
            | header::ACCEPT_LANGUAGE
            | header::AUTHORIZATION
            | header::CONTENT_TYPE
            | header::COOKIE
            | header::USER_AGENT => {}
            _ => check_ambiguous_name(name, reads_header)?,
        }
        if is_hop_by_hop(name) {
            scan.headers_to_remove.push(name.clone());
        }
    }
    if scan.is_chunked && scan.content_length.is_some() {
        return Err(RequestValidationError::ContentLength);
    }
    Ok(scan)
}

/// Whether a field value begins or ends with a space or tab. HTTP/1 parsers trim it; in HTTP/2 such
/// a field is malformed (RFC 9113, 8.2.1).
pub(crate) fn has_outer_white_space(value: &HeaderValue) -> bool {
    matches!(value.as_bytes(), [b' ' | b'\t', ..] | [.., b' ' | b'\t'])
}

/// Whether a header determines the client, the destination or the length of a request.
fn is_protected(name: &HeaderName, reads_header: &dyn Fn(&HeaderName) -> bool) -> bool {
    matches!(
        *name,
        header::HOST
            | header::CONTENT_LENGTH
            | header::TRANSFER_ENCODING
            | header::AUTHORIZATION
            | header::COOKIE
            | header::FORWARDED
            | header::VIA
    ) || name.as_str() == "x-real-ip"
        || name.as_str().starts_with("x-forwarded-")
        || is_client_cert_field(name)
        || reads_header(name)
}

/// Rejects a header name that a CGI-like upstream maps to a protected name. CGI-like upstreams
/// replace `-`, and some also replace other characters, with `_`.
fn check_ambiguous_name(
    name: &HeaderName,
    reads_header: &dyn Fn(&HeaderName) -> bool,
) -> Result<(), RequestValidationError> {
    match dashed_name(name) {
        Some(dashed) if is_protected(&dashed, reads_header) => {
            Err(RequestValidationError::AmbiguousHeaderName)
        }
        _ => Ok(()),
    }
}

/// Rejects a `Trailer` value that names a field forbidden in trailers, such as one that a decision
/// depends on: trailers arrive after all decisions (RFC 9110, 6.5.1).
fn check_trailer_names(
    value: &HeaderValue,
    reads_header: &dyn Fn(&HeaderName) -> bool,
) -> Result<(), RequestValidationError> {
    for item in list_elements(value) {
        let name =
            HeaderName::from_bytes(item).map_err(|_invalid| RequestValidationError::Trailer)?;
        check_ambiguous_name(&name, reads_header)
            .map_err(|_error| RequestValidationError::Trailer)?;
        let is_forbidden = is_hop_by_hop(&name)
            || is_protected(&name, reads_header)
            || matches!(
                name,
                header::TRAILER
                    | header::EXPECT
                    | header::CACHE_CONTROL
                    | header::MAX_FORWARDS
                    | header::CONTENT_ENCODING
                    | header::CONTENT_TYPE
                    | header::CONTENT_RANGE
                    | header::RANGE
                    | header::SET_COOKIE
            );
        if is_forbidden {
            return Err(RequestValidationError::Trailer);
        }
    }
    Ok(())
}
