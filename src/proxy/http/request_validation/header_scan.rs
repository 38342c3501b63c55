//! One pass over the headers of a request: framing, hop-by-hop headers and protected names.

use http::{HeaderMap, HeaderName, HeaderValue, header};
use smallvec::SmallVec;

use super::error::RequestValidationError;
use crate::policy::{dashed_name, parse_whole_number};
use crate::proxy::http::client_cert::is_client_cert_field;
use crate::proxy::http::header_lines::{headers_named_in_connection, is_hop_by_hop, list_elements};

/// Result of one pass over the request headers.
#[derive(Default)]
pub(super) struct RequestHeaderScan {
    pub(super) host: Option<HeaderValue>,
    pub(super) is_chunked: bool,
    pub(super) content_length: Option<u64>,
    pub(super) accepts_trailers: bool,
    pub(super) has_unknown_expectation: bool,
    /// Values of `Upgrade` as the client sent them; valid only if `connection_names_upgrade`.
    pub(super) upgrade_values: SmallVec<[HeaderValue; 1]>,
    pub(super) connection_names_upgrade: bool,
    pub(super) headers_to_remove: SmallVec<[HeaderName; 2]>,
}

impl RequestHeaderScan {
    pub(super) fn from_headers(
        headers: &HeaderMap,
        reads_header: &dyn Fn(&HeaderName) -> bool,
    ) -> Result<Self, RequestValidationError> {
        let mut scan = Self::default();
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
