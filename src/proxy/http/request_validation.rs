//! The gate: refuses what front and back could read differently, and makes a request out of the rest
//! that an HTTP/1.1 upstream can read in one way only.
//!
//! hyper's parser has already refused broken framing, obsolete folding and control bytes. What it lets
//! through and we must not: methods in small letters, a missing, repeated or malformed Host, targets of odd forms,
//! transfer codings other than one `chunked`, header names that a CGI-like upstream reads as another name, and `Connection`
//! lists that make us drop a field which somebody trusts.
//!
//! Framing on the way out is hyper's: it keeps the `Content-Length` or `Transfer-Encoding: chunked` that
//! stays in the map. With both in a request it has dropped the length and closes the connection after.

use super::upgrade::{self, UpgradeRequest};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, Version, header, request};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::net::Ipv6Addr;
use std::ops::Range;

/// Where a request wants to go. Owns what it says, so that the request's head may change meanwhile.
#[derive(Clone, Debug)]
pub(in crate::proxy) struct RequestTarget {
    authority: Option<HeaderValue>,
    host: NormalizedHost,
    path_and_query: PathAndQuery,
    /// The body's length in bytes as declared; `None` if it is chunked, framed by HTTP/2, or absent.
    pub(in crate::proxy) content_length: Option<u64>,
    /// What the upstream may answer with a `101`.
    pub(in crate::proxy) upgrade_request: Option<UpgradeRequest>,
}

/// Why a request is refused before anybody looks at it. The text is public.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestValidationError {
    #[error("a method in small letters could be taken for another")]
    LowercaseMethod,
    #[error("CONNECT is not supported")]
    Connect,
    #[error("the only protocol supported with CONNECT is \"websocket\"")]
    ConnectProtocol,
    #[error("a request needs a Host")]
    HostMissing,
    #[error("a request must have one Host only")]
    HostRepeated,
    #[error("the Host is not a valid name or address with an optional port")]
    HostInvalid,
    #[error("the Host differs from the authority of the request target")]
    HostMismatch,
    #[error("the request target must be a path, or an http or https URL")]
    Target,
    #[error("the only transfer coding supported is a single \"chunked\"")]
    TransferEncoding,
    #[error("the Content-Length must be one whole number and without Transfer-Encoding")]
    ContentLength,
    #[error("the only expectation supported is \"100-continue\"")]
    Expect,
    #[error("the Trailer field names a field that is not allowed in trailers")]
    Trailer,
    #[error("a header name could be taken for that of another, protected header")]
    AmbiguousHeaderName,
    #[error("the Connection header names a field that may not be removed")]
    ProtectedConnectionOption,
    #[error("a TRACE request must not have a body")]
    TraceBody,
}

/// Checks a request's head, removes what concerns only the connection that it came on, and rewrites the
/// rest for an HTTP/1.1 upstream: target in origin-form (bytes of path and query as they came), one `Host`.
///
/// `reads_header` tells which headers decide something beside the well-known ones.
///
/// # Errors
/// A [`RequestValidationError`]: answer it with its status and close the connection.
pub(in crate::proxy) fn validate_request(
    parts: &mut request::Parts,
    reads_header: &dyn Fn(&HeaderName) -> bool,
) -> Result<RequestTarget, RequestValidationError> {
    // Methods are case-sensitive (RFC 9110, 9.1), and some frameworks don't know: a `post` that is no POST to policies
    // would be one to them.
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
    // HTTP/1.0 knows no expectations (RFC 9110, 10.1.1).
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
    /// The host for policies: lower case, without port and trailing dot; IPv6 in its shortest form, in
    /// brackets. Empty for an HTTP/1.0 request that names none.
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

    /// Host and port as they came.
    pub(in crate::proxy) fn authority(&self) -> Option<&HeaderValue> {
        self.authority.as_ref()
    }

    /// The path for policies, as it came. `*` (the whole server) is `/`.
    pub(in crate::proxy) fn path(&self) -> &str {
        match self.path_and_query.path() {
            "*" => "/",
            path => path,
        }
    }

    /// Without the question mark.
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

/// The fields of a `Connection` header's list, lower case, without `close` and `keep-alive`.
pub(in crate::proxy) fn connection_options(
    value: &HeaderValue,
) -> impl Iterator<Item = HeaderName> + '_ {
    list_elements(value)
        .filter(|name| {
            !name.eq_ignore_ascii_case(b"keep-alive") && !name.eq_ignore_ascii_case(b"close")
        })
        .filter_map(|name| HeaderName::from_bytes(name).ok())
}

/// The non-empty elements of a comma-separated list without quoted strings.
pub(in crate::proxy) fn list_elements(value: &HeaderValue) -> impl Iterator<Item = &[u8]> {
    value
        .as_bytes()
        .split(|byte| *byte == b',')
        .map(<[u8]>::trim_ascii)
        .filter(|item| !item.is_empty())
}

/// The host that policies see of a `Host` field. `None`: a request with that would be refused.
pub fn normalize_host(field: &str) -> Option<Cow<'_, str>> {
    match AuthorityParts::parse(field)?.normalize_host() {
        NormalizedHost::AuthorityRange(range) => field.get(range).map(Cow::Borrowed),
        NormalizedHost::OwnedText(text) => Some(Cow::Owned(text.into())),
    }
}

/// Fields that speak about one connection only; `Connection` may name more.
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

/// Whether a field never gets as far as the policies. (`Connection`, `TE` and `Upgrade` are said anew.)
pub fn is_stripped_before_policies(name: &HeaderName) -> bool {
    let is_rebuilt = matches!(*name, header::CONNECTION | header::TE | header::UPGRADE);
    *name == header::EXPECT || (is_hop_by_hop(name) && !is_rebuilt)
}

#[derive(Clone, Debug)]
enum NormalizedHost {
    /// Where it stands in the authority.
    AuthorityRange(Range<usize>),
    OwnedText(Box<str>),
}

/// What one walk over the headers finds.
#[derive(Default)]
struct RequestHeaderScan {
    host: Option<HeaderValue>,
    is_chunked: bool,
    content_length: Option<u64>,
    accepts_trailers: bool,
    has_unknown_expectation: bool,
    /// `Upgrade`, as it came; it holds only if `Connection` names it.
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
                        // These two are said anew, so that naming them takes nothing away.
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

/// Says for our own connection what a request wants from it: that takes being named in `Connection`
/// (RFC 9110, 7.8 and 10.1.4).
///
/// A request with a body is not upgraded: the new protocol begins where the body ends, and not everybody
/// agrees on where that is. Nor is one by HTTP/1.0, which knows no upgrades.
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

/// Fields that decide who a request is from, where it goes or how long it is.
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

/// CGI-like upstreams turn `-` into `_`, some any other sign too, and so read two names as one.
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

/// Trailers come after every decision was made, so nothing that a decision rests on may come in them
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

/// The one host that a request names, by its Host field, its target, or both alike.
fn determine_host(
    parts: &request::Parts,
    field: Option<&HeaderValue>,
) -> Result<(Option<HeaderValue>, NormalizedHost), RequestValidationError> {
    let target_authority = parts.uri.authority().map(|authority| authority.as_str());
    let (value, authority) = match (field, target_authority) {
        (None, None) if parts.version == Version::HTTP_10 => {
            return Ok((None, NormalizedHost::AuthorityRange(0..0)));
        }
        (None, None) => return Err(RequestValidationError::HostMissing),
        // HTTP/1.1 asks for the field even beside a whole URL.
        (None, Some(_)) if parts.version == Version::HTTP_11 => {
            return Err(RequestValidationError::HostMissing);
        }
        (None, Some(named)) => {
            let place = AuthorityParts::parse(named).ok_or(RequestValidationError::HostInvalid)?;
            (
                HeaderValue::from_str(named)
                    .map_err(|_invalid| RequestValidationError::HostInvalid)?,
                place,
            )
        }
        (Some(value), named) => {
            let place = value
                .to_str()
                .ok()
                .and_then(AuthorityParts::parse)
                .ok_or(RequestValidationError::HostInvalid)?;
            if let Some(named) = named {
                let named =
                    AuthorityParts::parse(named).ok_or(RequestValidationError::HostInvalid)?;
                if !place.is_equivalent_to(&named, parts.uri.scheme_str()) {
                    return Err(RequestValidationError::HostMismatch);
                }
            }
            (value.clone(), place)
        }
    };
    let host = authority.normalize_host();
    Ok((Some(value), host))
}

/// An authority without user information.
struct AuthorityParts<'a> {
    /// With brackets if it is IPv6.
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

/// Dot-separated labels, none empty, with or without the root's dot. Narrower than a URL's `reg-name`:
/// signs such as `,` or `%` in a host are read in several ways and used by nobody.
fn is_host_name(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    let is_label_byte =
        |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'~');
    // By bytes: of so short a text, looking for a sign as `str` does costs five times as much.
    host.as_bytes()
        .split(|byte| *byte == b'.')
        .all(|label| !label.is_empty() && label.iter().all(is_label_byte))
}

fn to_origin_form(method: &Method, uri: &Uri) -> Result<PathAndQuery, RequestValidationError> {
    // `foo` alone is parsed as an authority; a scheme comes with one.
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
        // Of `http://host#x` this one says "/" and is written as nothing at all.
        Some(b'/') if text == "/" => Ok(PathAndQuery::from_static("/")),
        Some(b'/') => Ok(path_and_query.clone()),
        Some(b'*') if text == "*" && *method == Method::OPTIONS => Ok(path_and_query.clone()),
        // http://host?query
        Some(b'?') if uri.scheme().is_some() => PathAndQuery::try_from(format!("/{text}"))
            .map_err(|_invalid| RequestValidationError::Target),
        _ => Err(RequestValidationError::Target),
    }
}

/// ASCII digits only: no sign, no spaces, no list.
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
