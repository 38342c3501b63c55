//! The properties of a request that policies can read.

use super::authorization::read_credentials;
use super::jwt::RequestToken;
use super::path::PathInterpretations;
use super::{BodyFacts, Descriptor};
use crate::tls::CertificateSubject;
use http::header::{AUTHORIZATION, COOKIE, HOST};
use http::{HeaderMap, HeaderName, Method};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::LazyLock;

/// A borrowed view of a request, as policies see it.
///
/// The headers are those that will be forwarded, without hop-by-hop fields. So a policy reads the
/// same headers as the upstream.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    pub method: &'a Method,
    /// Lower case, without port and trailing dot.
    pub host: &'a str,
    pub paths: &'a PathInterpretations,
    /// The query without its question mark.
    pub query: Option<&'a str>,
    pub headers: &'a HeaderMap,
    /// Whether the proxy in front may have joined repeated header lines with commas. Each part of
    /// such a value then counts as a line too.
    pub has_joined_headers: bool,
    pub client_ip: IpAddr,
    /// Whether the peer is one of `client.trusted_proxies`.
    pub is_peer_trusted: bool,
    /// The request's token. It is verified only when a policy reads a claim.
    pub token: &'a RequestToken,
    /// Subject of the client certificate, if the client presented one.
    pub client_cert: Option<&'a CertificateSubject>,
    /// The body, if the request has one.
    pub body: Option<&'a BodyFacts>,
    /// Whether a condition on a value of the body that can't be read holds.
    pub unreadable_holds: bool,
    /// The descriptor of a call to the rate-limit service. If set, the other fields hold
    /// placeholders, and policies for requests do not apply.
    pub descriptor: Option<&'a Descriptor<'a>>,
}

impl<'a> Facts<'a> {
    /// Values for the fields that a caller does not set: those of a request for `/`, without
    /// headers.
    pub fn placeholder() -> Self {
        static METHOD: Method = Method::GET;
        static PATHS: LazyLock<PathInterpretations> = LazyLock::new(PathInterpretations::default);
        static HEADERS: LazyLock<HeaderMap> = LazyLock::new(HeaderMap::new);
        Self {
            method: &METHOD,
            host: "",
            paths: &PATHS,
            query: None,
            headers: &HEADERS,
            has_joined_headers: false,
            client_ip: Ipv4Addr::UNSPECIFIED.into(),
            is_peer_trusted: false,
            token: RequestToken::without_token_reader(),
            client_cert: None,
            body: None,
            unreadable_holds: true,
            descriptor: None,
        }
    }

    /// The same facts, with what a condition on an unreadable value of the body yields.
    pub(super) fn with_unreadable_values(self, holds: bool) -> Self {
        Self {
            unreadable_holds: holds,
            ..self
        }
    }

    /// The target of the request for messages: its path, or the descriptor's domain.
    pub fn path_or_domain(&self) -> &'a str {
        match self.descriptor {
            Some(descriptor) => descriptor.domain,
            None => self.paths.iter().next().unwrap_or_default(),
        }
    }

    /// The values of a header, one per line. A line that may be joined is followed by its parts.
    pub(super) fn header_values(
        &self,
        name: &HeaderName,
    ) -> impl Iterator<Item = Cow<'a, [u8]>> + use<'a> {
        let splits_lines = self.has_joined_headers;
        self.headers
            .get_all(name)
            .into_iter()
            .flat_map(move |line| {
                let line = line.as_bytes();
                let is_joined = splits_lines && line.contains(&b',');
                let joined = is_joined.then_some(line).into_iter();
                let parts = joined.flat_map(|line| line.split(|byte| *byte == b','));
                std::iter::once(line)
                    .chain(parts.map(<[u8]>::trim_ascii))
                    .map(Cow::Borrowed)
            })
    }

    /// The values of a header in the form that keys, conditions and overrides share. Credentials
    /// are several values if parsers may take different ones.
    pub(super) fn canonical_header_values(
        &self,
        name: &HeaderName,
    ) -> impl Iterator<Item = Cow<'a, [u8]>> + use<'a> {
        let is_credential = *name == AUTHORIZATION;
        let host = (*name == HOST).then_some(self.host.as_bytes());
        let values = self.header_values(name);
        values.flat_map(move |value| match value {
            Cow::Borrowed(value) if is_credential => read_credentials(value),
            value => SmallVec::from_iter([host.map_or(value, Cow::Borrowed)]),
        })
    }
}

/// The values of a query parameter, decoded as form data (`+` is a space).
pub(super) fn query_values<'a>(
    query: Option<&'a str>,
    name: &str,
) -> impl Iterator<Item = Cow<'a, [u8]>> {
    query
        .unwrap_or_default()
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .filter(move |(found, _)| *decode_form_value(found) == *name.as_bytes())
        .map(|(_, value)| decode_form_value(value))
}

/// The decoded values of a cookie.
pub(super) fn cookie_values<'a>(
    headers: &'a HeaderMap,
    name: &str,
) -> impl Iterator<Item = Cow<'a, [u8]>> {
    raw_cookie_values(headers, name).map(decode_cookie_value)
}

/// The values of a cookie in all `Cookie` header lines, as sent. HTTP/2 clients may send one line
/// per cookie.
pub(super) fn raw_cookie_values<'a>(
    headers: &'a HeaderMap,
    name: &str,
) -> impl Iterator<Item = &'a [u8]> {
    cookie_pairs(headers).filter_map(move |pair| {
        let mut halves = pair.splitn(2, |byte| *byte == b'=').map(<[u8]>::trim_ascii);
        (halves.next()? == name.as_bytes()).then(|| halves.next())?
    })
}

/// The parts between semicolons of all `Cookie` header lines.
pub(super) fn cookie_pairs(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let lines = headers.get_all(COOKIE).into_iter();
    lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b';'))
}

/// Decodes the quotes and percent-encoding of a cookie value. Some upstreams decode both, so all
/// spellings of a cookie must share a quota.
fn decode_cookie_value(value: &[u8]) -> Cow<'_, [u8]> {
    let unquoted = value
        .strip_prefix(b"\"")
        .and_then(|value| value.strip_suffix(b"\""))
        .unwrap_or(value);
    percent_encoding::percent_decode(unquoted).into()
}

pub(super) fn decode_form_value(text: &str) -> Cow<'_, [u8]> {
    if text.contains('+') {
        let spaced = text.replace('+', " ");
        return Cow::Owned(percent_encoding::percent_decode_str(&spaced).collect());
    }
    percent_encoding::percent_decode_str(text).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to_strings<'a>(values: impl Iterator<Item = Cow<'a, [u8]>>) -> Vec<String> {
        values
            .map(|value| String::from_utf8(value.into_owned()).unwrap())
            .collect()
    }

    #[test]
    fn finds_and_decodes_all_query_values() {
        assert_eq!(
            to_strings(query_values(Some("a=1&b=2&%61=x%20y+z&a"), "a")),
            ["1", "x y z", ""]
        );
        assert_eq!(to_strings(query_values(None, "a")), Vec::<String>::new());
        assert_eq!(
            to_strings(query_values(Some("&&"), "")),
            Vec::<String>::new()
        );
    }

    #[test]
    fn finds_cookies_across_all_cookie_headers() {
        let mut headers = HeaderMap::new();
        headers.append(COOKIE, "id=1; idx=2;id=3".parse().unwrap());
        headers.append(COOKIE, "id=4".parse().unwrap());
        assert_eq!(to_strings(cookie_values(&headers, "id")), ["1", "3", "4"]);
    }

    #[test]
    fn equivalent_cookie_encodings_decode_equally() {
        for spelling in [
            "id=a:b",
            "id=\"a:b\"",
            "id=a%3ab",
            "id=\"%61%3Ab\"",
            " id =  a:b ",
            "id\t=a:b",
        ] {
            let mut headers = HeaderMap::new();
            headers.append(COOKIE, spelling.parse().unwrap());
            assert_eq!(
                to_strings(cookie_values(&headers, "id")),
                ["a:b"],
                "{spelling}"
            );
        }
        let mut headers = HeaderMap::new();
        headers.append(COOKIE, "id; ID=1; id=; id=\"".parse().unwrap());
        assert_eq!(to_strings(cookie_values(&headers, "id")), ["", "\""]);
    }
}
