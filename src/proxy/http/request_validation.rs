//! Validation of request heads: rejects requests that the proxy and the upstream could interpret
//! differently, and rewrites the others for an HTTP/1.1 upstream.
//!
//! hyper's parser has already rejected broken framing, obsolete line folding and control bytes. It
//! accepts lowercase methods, a missing, repeated or malformed Host, unusual target forms and
//! transfer codings other than one `chunked`. It also accepts header names that a CGI-like upstream
//! maps to another name, and `Connection` lists that name trusted headers. All of these are
//! rejected here.
//!
//! hyper writes the framing of the forwarded request from the `Content-Length` or
//! `Transfer-Encoding: chunked` left in the map. If a request has both, hyper drops the length and
//! closes the connection afterwards.

use super::upgrade::{self, UpgradeRequest};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, Version, header, request};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::net::Ipv6Addr;
use std::ops::Range;

/// Validated target of a request. Owns its data, so that the request head can still change.
#[derive(Clone, Debug)]
pub(in crate::proxy) struct RequestTarget {
    authority: Option<HeaderValue>,
    host: NormalizedHost,
    path_and_query: PathAndQuery,
    /// Declared length of the body in bytes; `None` without `Content-Length` (chunked, HTTP/2 or no
    /// body).
    pub(in crate::proxy) content_length: Option<u64>,
    /// The upgrade that the upstream may accept with a `101`.
    pub(in crate::proxy) upgrade_request: Option<UpgradeRequest>,
}

/// Reason why a request head is rejected. Clients see the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
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
    #[error("a header name resembles the name of a protected header")]
    AmbiguousHeaderName,
    #[error("the Connection header names a protected header")]
    ProtectedConnectionOption,
    #[error("a TRACE request must not have a body")]
    TraceBody,
}

/// Validates a request head, removes hop-by-hop headers and rewrites the rest for an HTTP/1.1
/// upstream: target in origin-form (path and query unchanged) and one `Host`.
///
/// `reads_header` returns whether a policy reads a header. Such headers are protected, in addition
/// to the well-known ones.
///
/// # Errors
/// A [`RequestValidationError`]. The caller replies with its status and closes the connection.
pub(in crate::proxy) fn validate_request(
    parts: &mut request::Parts,
    reads_header: &dyn Fn(&HeaderName) -> bool,
) -> Result<RequestTarget, RequestValidationError> {
    // Methods are case-sensitive (RFC 9110, 9.1), but some frameworks treat `post` as POST, which
    // policies do not.
    if parts
        .method
        .as_str()
        .bytes()
        .any(|byte| byte.is_ascii_lowercase())
    {
        return Err(RequestValidationError::LowercaseMethod);
    }
    let websocket_key = if parts.method == Method::CONNECT {
        Some(upgrade::convert_connect_to_get(parts)?)
    } else {
        None
    };
    let scan = RequestHeaderScan::from_headers(&parts.headers, reads_header)?;
    if parts.method == Method::TRACE
        && (scan.is_chunked || scan.content_length.is_some_and(|len| len > 0))
    {
        return Err(RequestValidationError::TraceBody);
    }
    let path_and_query = to_origin_form(&parts.method, &parts.uri)?;
    let (authority, host) = determine_host(parts, scan.host.as_ref())?;
    // HTTP/1.0 has no expectations; `Expect` is ignored there (RFC 9110, 10.1.1).
    let http10 = parts.version == Version::HTTP_10;
    if scan.has_unknown_expectation && !http10 {
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
    /// The host for policies: lowercase, without port and trailing dot; IPv6 in its shortest form,
    /// in brackets. Empty for an HTTP/1.0 request without a host.
    pub(in crate::proxy) fn host(&self) -> &str {
        match (&self.host, &self.authority) {
            (NormalizedHost::AuthorityRange(range), Some(authority)) => authority
                .to_str()
                .ok()
                .and_then(|text| text.get(range.clone()))
                .unwrap_or(""),
            (NormalizedHost::OwnedText(text), _) => text,
            (NormalizedHost::AuthorityRange(_), None) => "",
        }
    }

    /// Host and port as the client sent them.
    pub(in crate::proxy) fn authority(&self) -> Option<&HeaderValue> {
        self.authority.as_ref()
    }

    /// The path for policies, as the client sent it. `*` (`OPTIONS *`) becomes `/`.
    pub(in crate::proxy) fn path(&self) -> &str {
        match self.path_and_query.path() {
            "*" => "/",
            path => path,
        }
    }

    /// The query without the question mark.
    pub(in crate::proxy) fn query(&self) -> Option<&str> {
        self.path_and_query.query()
    }
}

impl RequestValidationError {
    pub(in crate::proxy) fn status(self) -> StatusCode {
        match self {
            Self::Connect => StatusCode::METHOD_NOT_ALLOWED,
            Self::TransferEncoding | Self::ConnectProtocol => StatusCode::NOT_IMPLEMENTED,
            Self::Expect => StatusCode::EXPECTATION_FAILED,
            _ => StatusCode::BAD_REQUEST,
        }
    }
}

/// Header names in a `Connection` value, without `close` and `keep-alive`.
pub(in crate::proxy) fn connection_options(
    value: &HeaderValue,
) -> impl Iterator<Item = HeaderName> + '_ {
    list_elements(value)
        .filter(|name| {
            !name.eq_ignore_ascii_case(b"keep-alive") && !name.eq_ignore_ascii_case(b"close")
        })
        .filter_map(|name| HeaderName::from_bytes(name).ok())
}

/// Non-empty elements of a comma-separated list without quoted strings.
pub(in crate::proxy) fn list_elements(value: &HeaderValue) -> impl Iterator<Item = &[u8]> {
    value
        .as_bytes()
        .split(|byte| *byte == b',')
        .map(<[u8]>::trim_ascii)
        .filter(|item| !item.is_empty())
}

/// Returns the host that policies see for a `Host` value, or `None` if the value is rejected.
pub fn normalize_host(value: &str) -> Option<Cow<'_, str>> {
    match AuthorityParts::parse(value)?.normalize_host() {
        NormalizedHost::AuthorityRange(range) => value.get(range).map(Cow::Borrowed),
        NormalizedHost::OwnedText(text) => Some(Cow::Owned(text.into())),
    }
}

/// Whether a header applies to a single connection only; `Connection` can name further ones.
pub(in crate::proxy) fn is_hop_by_hop(name: &HeaderName) -> bool {
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

/// Whether validation removes a header, so that policies never see it. `Connection`, `TE` and
/// `Upgrade` are rebuilt.
pub fn is_stripped_before_policies(name: &HeaderName) -> bool {
    let is_rebuilt = matches!(*name, header::CONNECTION | header::TE | header::UPGRADE);
    *name == header::EXPECT || (is_hop_by_hop(name) && !is_rebuilt)
}

#[derive(Clone, Debug)]
enum NormalizedHost {
    /// Byte range of the host in the authority.
    AuthorityRange(Range<usize>),
    OwnedText(Box<str>),
}

/// Result of one pass over the request headers.
#[derive(Default)]
struct RequestHeaderScan {
    host: Option<HeaderValue>,
    is_chunked: bool,
    content_length: Option<u64>,
    accepts_trailers: bool,
    has_unknown_expectation: bool,
    /// `Upgrade` as the client sent it; valid only if `Connection` names it.
    upgrade_values: SmallVec<[HeaderValue; 1]>,
    connection_names_upgrade: bool,
    headers_to_remove: SmallVec<[HeaderName; 6]>,
}

impl RequestHeaderScan {
    fn from_headers(
        headers: &HeaderMap,
        reads_header: &dyn Fn(&HeaderName) -> bool,
    ) -> Result<Self, RequestValidationError> {
        let mut scan = Self::default();
        for (name, value) in headers {
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
                    let length = parse_decimal(value.as_bytes())
                        .ok_or(RequestValidationError::ContentLength)?;
                    if scan.content_length.replace(length).is_some() {
                        return Err(RequestValidationError::ContentLength);
                    }
                }
                header::CONNECTION => {
                    for field in connection_options(value) {
                        // Both headers are rebuilt, so that naming them removes nothing.
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
}

/// Rebuilds `Connection`, `TE` and `Upgrade` for the upstream connection (RFC 9110, 7.8 and
/// 10.1.4), and returns the forwarded upgrade.
///
/// A request with a body is not upgraded: the new protocol begins after the body, and
/// implementations can disagree on its end. HTTP/1.0 requests are not upgraded either.
fn rebuild_connection_headers(
    parts: &mut request::Parts,
    scan: RequestHeaderScan,
    websocket_key: Option<HeaderValue>,
) -> Option<UpgradeRequest> {
    let headers = &mut parts.headers;
    if scan.accepts_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    let has_body = scan.is_chunked || scan.content_length.is_some_and(|length| length > 0);
    let is_http11 = parts.version == Version::HTTP_11;
    let upgrade_request = if let Some(key) = websocket_key {
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(header::SEC_WEBSOCKET_KEY, key.clone());
        Some(UpgradeRequest::Http2WebSocket(key))
    } else if is_http11
        && scan.connection_names_upgrade
        && !has_body
        && upgrade::is_forwardable_upgrade(&scan.upgrade_values)
    {
        for value in scan.upgrade_values {
            headers.append(header::UPGRADE, value);
        }
        Some(UpgradeRequest::Http1Upgrade {
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
    headers.insert(
        header::CONNECTION,
        HeaderValue::from_static(connection_value),
    );
    upgrade_request
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
        || reads_header(name)
}

/// Rejects a name that a CGI-like upstream maps to a protected one. Such upstreams replace `-`, and
/// some replace other characters, with `_`.
fn check_ambiguous_name(
    name: &HeaderName,
    reads_header: &dyn Fn(&HeaderName) -> bool,
) -> Result<(), RequestValidationError> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let bytes = name.as_str().as_bytes();
    if bytes.iter().all(|byte| is_plain(*byte)) {
        return Ok(());
    }
    let dashed: SmallVec<[u8; 64]> = bytes
        .iter()
        .map(|b| if is_plain(*b) { *b } else { b'-' })
        .collect();
    match HeaderName::from_bytes(&dashed) {
        Ok(normalized) if is_protected(&normalized, reads_header) => {
            Err(RequestValidationError::AmbiguousHeaderName)
        }
        _ => Ok(()),
    }
}

/// Rejects trailer names that a decision depends on: trailers arrive after all decisions
/// (RFC 9110, 6.5.1).
fn check_trailer_names(
    value: &HeaderValue,
    reads_header: &dyn Fn(&HeaderName) -> bool,
) -> Result<(), RequestValidationError> {
    for item in list_elements(value) {
        let name =
            HeaderName::from_bytes(item).map_err(|_invalid| RequestValidationError::Trailer)?;
        check_ambiguous_name(&name, reads_header)
            .map_err(|_fault| RequestValidationError::Trailer)?;
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

/// Returns the authority and host of a request, from its Host header, its target or both.
fn determine_host(
    parts: &request::Parts,
    host_header: Option<&HeaderValue>,
) -> Result<(Option<HeaderValue>, NormalizedHost), RequestValidationError> {
    let target_authority = parts.uri.authority().map(|authority| authority.as_str());
    let (value, authority) = match (host_header, target_authority) {
        (None, None) if parts.version == Version::HTTP_10 => {
            return Ok((None, NormalizedHost::AuthorityRange(0..0)));
        }
        (None, None) => return Err(RequestValidationError::HostMissing),
        // HTTP/1.1 requires the header even with an absolute target (RFC 9112, 3.2).
        (None, Some(_)) if parts.version == Version::HTTP_11 => {
            return Err(RequestValidationError::HostMissing);
        }
        (None, Some(target)) => {
            let authority =
                AuthorityParts::parse(target).ok_or(RequestValidationError::HostInvalid)?;
            let value = HeaderValue::from_str(target)
                .map_err(|_invalid| RequestValidationError::HostInvalid)?;
            (value, authority)
        }
        (Some(value), target) => {
            let authority = value
                .to_str()
                .ok()
                .and_then(AuthorityParts::parse)
                .ok_or(RequestValidationError::HostInvalid)?;
            if let Some(target) = target {
                let target =
                    AuthorityParts::parse(target).ok_or(RequestValidationError::HostInvalid)?;
                if !authority.is_equivalent_to(&target, parts.uri.scheme_str()) {
                    return Err(RequestValidationError::HostMismatch);
                }
            }
            (value.clone(), authority)
        }
    };
    let host = authority.normalize_host();
    Ok((Some(value), host))
}

/// Host and port of an authority; user information is not allowed.
struct AuthorityParts<'a> {
    /// In brackets for an IPv6 address.
    host: &'a str,
    port: Option<u16>,
    ipv6: Option<Ipv6Addr>,
}

impl<'a> AuthorityParts<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let (host, port, ipv6) = if let Some(rest) = text.strip_prefix('[') {
            let (address, after) = rest.split_once(']')?;
            let port = match after.strip_prefix(':') {
                Some(port) => port,
                None if after.is_empty() => "",
                None => return None,
            };
            (
                text.get(..address.len() + 2)?,
                port,
                Some(address.parse().ok()?),
            )
        } else {
            let colon = text
                .bytes()
                .position(|byte| byte == b':')
                .unwrap_or(text.len());
            let (host, port) = text.split_at_checked(colon)?;
            if !is_host_name(host) {
                return None;
            }
            (host, port.strip_prefix(':').unwrap_or(port), None)
        };
        let port = match port {
            "" => None,
            digits => Some(
                u16::try_from(parse_decimal(digits.as_bytes())?)
                    .ok()
                    .filter(|port| *port > 0)?,
            ),
        };
        Some(Self { host, port, ipv6 })
    }

    fn is_equivalent_to(&self, other: &Self, scheme: Option<&str>) -> bool {
        let default = if scheme == Some("https") { 443 } else { 80 };
        let same_host = match (self.ipv6, other.ipv6) {
            (Some(one), Some(two)) => one == two,
            _ => self.host.eq_ignore_ascii_case(other.host),
        };
        same_host && self.port.unwrap_or(default) == other.port.unwrap_or(default)
    }

    fn normalize_host(&self) -> NormalizedHost {
        if let Some(address) = self.ipv6 {
            return NormalizedHost::OwnedText(format!("[{address}]").into());
        }
        let host = self.host.strip_suffix('.').unwrap_or(self.host);
        if host.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return NormalizedHost::OwnedText(host.to_ascii_lowercase().into());
        }
        NormalizedHost::AuthorityRange(0..host.len())
    }
}

/// Whether the text is dot-separated, non-empty labels with an optional trailing dot.
///
/// Stricter than `reg-name` of a URL: implementations interpret characters such as `,` and `%` in a
/// host differently.
fn is_host_name(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    let is_label_byte =
        |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'~');
    // Splits bytes: for such short texts, the search of `str::split` takes five times as long.
    host.as_bytes()
        .split(|byte| *byte == b'.')
        .all(|label| !label.is_empty() && label.iter().all(is_label_byte))
}

fn to_origin_form(method: &Method, uri: &Uri) -> Result<PathAndQuery, RequestValidationError> {
    // `http` parses a bare `foo` as an authority without a scheme.
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
        Some(b'*') if text == "*" && *method == Method::OPTIONS => Ok(path_and_query.clone()),
        // A target such as `http://host?query`.
        Some(b'?') if uri.scheme().is_some() => PathAndQuery::try_from(format!("/{text}"))
            .map_err(|_invalid| RequestValidationError::Target),
        _ => Err(RequestValidationError::Target),
    }
}

/// Parses ASCII digits only: no sign, no spaces, no list.
fn parse_decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |number, digit| {
        let digit = digit.is_ascii_digit().then(|| u64::from(*digit - b'0'))?;
        number.checked_mul(10)?.checked_add(digit)
    })
}

#[cfg(test)]
mod tests;
