//! The host of a request: parsing, comparison and normalization.

use http::{HeaderValue, Version, request};
use std::borrow::Cow;
use std::net::Ipv6Addr;
use std::ops::Range;

use super::RequestValidationError;
use crate::policy::parse_whole_number;

/// Host for policies: lowercase, without port and trailing dot.
#[derive(Clone, Debug)]
pub(super) enum NormalizedHost {
    /// Byte range of the host in the authority.
    AuthorityRange(Range<usize>),
    OwnedText(Box<str>),
}

/// Returns the host that policies see for a `Host` value, or `None` if the value is rejected.
pub fn normalize_host(value: &str) -> Option<Cow<'_, str>> {
    match AuthorityParts::parse(value)?.normalize_host() {
        NormalizedHost::AuthorityRange(range) => value.get(range).map(Cow::Borrowed),
        NormalizedHost::OwnedText(text) => Some(Cow::Owned(text.into())),
    }
}

/// Returns the authority and the normalized host of a request, from its Host header or its target.
/// If it has both, they must agree.
pub(super) fn determine_authority_and_host(
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
            let authority = value.to_str().ok().and_then(AuthorityParts::parse);
            let authority = authority.ok_or(RequestValidationError::HostInvalid)?;
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
    /// The host as written, with brackets for an IPv6 address.
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
            let host = text.get(..address.len() + 2)?;
            (host, port, Some(address.parse().ok()?))
        } else {
            let colon = text.bytes().position(|byte| byte == b':');
            let (host, port) = text.split_at_checked(colon.unwrap_or(text.len()))?;
            if !is_host_name(host) {
                return None;
            }
            (host, port.strip_prefix(':').unwrap_or(port), None)
        };
        let port = match port {
            "" => None,
            digits => Some(
                u16::try_from(parse_whole_number(digits.as_bytes())?)
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
/// This is stricter than `reg-name` of a URL, because implementations interpret characters such as
/// `,` and `%` in a host differently.
fn is_host_name(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    let is_label_byte =
        |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'~');
    // Splits bytes because `str::split` takes five times as long for short texts.
    host.as_bytes()
        .split(|byte| *byte == b'.')
        .all(|label| !label.is_empty() && label.iter().all(is_label_byte))
}
