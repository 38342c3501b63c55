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

mod error;
mod header_scan;
mod host;
#[cfg(test)]
mod tests;

pub use error::RequestValidationError;
pub(crate) use header_scan::has_outer_white_space;
pub use host::normalize_host;

use http::uri::PathAndQuery;
use http::{HeaderName, HeaderValue, Method, Uri, Version, header, request};
use hyper::ext::Protocol;

use super::request_validation::header_scan::RequestHeaderScan;
use super::request_validation::host::{NormalizedHost, determine_authority_and_host};
use super::upgrade::{self, RequestedProtocolSwitch};

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
    let websocket_key = if parts.method == Method::CONNECT {
        Some(convert_websocket_connect_to_get(parts)?)
    } else {
        None
    };
    let scan = RequestHeaderScan::from_headers(&parts.headers, reads_header)?;
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
    let upgrade_request = rebuild_connection_headers(parts, scan, websocket_key);
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

/// Converts an extended CONNECT for a WebSocket into the GET of an HTTP/1.1 handshake, and returns
/// a generated `Sec-WebSocket-Key` for it.
///
/// # Errors
/// Returns [`RequestValidationError::Connect`] for a plain CONNECT, and
/// [`RequestValidationError::ConnectProtocol`] for a protocol other than WebSocket.
fn convert_websocket_connect_to_get(
    parts: &mut request::Parts,
) -> Result<HeaderValue, RequestValidationError> {
    let protocol = parts.extensions.remove::<Protocol>();
    let protocol = protocol.filter(|_| parts.version == Version::HTTP_2);
    let protocol = protocol.ok_or(RequestValidationError::Connect)?;
    if !protocol.as_str().eq_ignore_ascii_case("websocket") {
        return Err(RequestValidationError::ConnectProtocol);
    }
    parts.method = Method::GET;
    Ok(upgrade::generate_websocket_key())
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
    websocket_key: Option<HeaderValue>,
) -> Option<RequestedProtocolSwitch> {
    let headers = &mut parts.headers;
    if scan.accepts_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    let has_body = scan.is_chunked || scan.content_length.is_some_and(|length| length > 0);
    let is_http11 = parts.version == Version::HTTP_11;
    let upgrade_request = if let Some(key) = websocket_key {
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(header::SEC_WEBSOCKET_KEY, key.clone());
        Some(RequestedProtocolSwitch::Http2WebSocket(key))
    } else if is_http11
        && scan.connection_names_upgrade
        && !has_body
        && upgrade::is_forwardable_upgrade(&scan.upgrade_values)
    {
        for value in scan.upgrade_values {
            headers.append(header::UPGRADE, value);
        }
        Some(RequestedProtocolSwitch::Http1Upgrade {
            websocket_key: headers.get(header::SEC_WEBSOCKET_KEY).cloned(),
        })
    } else {
        None
    };
    let connection_value = match (scan.accepts_trailers, &upgrade_request) {
        (true, Some(_)) => "te, upgrade",
        (true, None) => "te",
        (false, Some(_)) => "upgrade",
        (false, None) => return upgrade_request,
    };
    let connection = HeaderValue::from_static(connection_value);
    headers.insert(header::CONNECTION, connection);
    upgrade_request
}
