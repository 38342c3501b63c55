//! What a proxy changes in heads on their way: fields that say who sent a request, over what and through
//! whom. Connection-bound fields of requests are gone by then (see [`super::gate`]).

use super::gate::{self, Target};
use crate::policy::client::Client;
use bytes::Bytes;
use http::header::Entry;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Version, header, request, response};
use smallvec::SmallVec;
use std::net::IpAddr;

/// The way that a request came, and where it goes on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hop<'a> {
    pub(super) peer: &'a AddressText,
    /// Who is behind it.
    pub(super) client: Client,
    /// Whether the request came over TLS.
    pub(super) https: bool,
    /// As it came.
    pub(super) version_in: Version,
    /// The header that the client's address was read from.
    pub(super) ip_header: &'a HeaderName,
    /// Whether the body has anything left to read. HTTP/2 tells so by no header.
    pub(super) has_body: bool,
    pub(super) preserve_host: bool,
    pub(super) upstream_authority: &'a HeaderValue,
}

/// An address as it stands in forwarding fields; made once per connection.
#[derive(Clone, Debug)]
pub(super) struct AddressText {
    ip: IpAddr,
    printed: HeaderValue,
    /// As an element of `Forwarded`.
    node: Box<str>,
}

/// Why an upstream's response head cannot be passed on: it is no valid answer to what was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ResponseFault {
    #[error("the upstream used a transfer coding other than \"chunked\"")]
    TransferEncoding,
    #[error("the upstream switched protocols unasked")]
    Switched,
}

impl AddressText {
    /// An IPv4 address in IPv6 clothes (a dual-stack socket) is the IPv4 address.
    pub(super) fn new(ip: IpAddr) -> Self {
        let ip = ip.to_canonical();
        Self { ip, printed: printed(ip), node: node(ip).into() }
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
pub(super) fn forward_request(parts: &mut request::Parts, target: &Target, hop: &Hop<'_>) {
    let headers = &mut parts.headers;
    if hop.has_body
        && !headers.contains_key(header::CONTENT_LENGTH)
        && !headers.contains_key(header::TRANSFER_ENCODING)
    {
        // hyper would otherwise drop the body of a GET.
        headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    // One growth of the map instead of one per field.
    headers.reserve(6);
    join_cookies(headers);
    if !hop.client.peer_trusted {
        drop_claims(headers, hop);
    }
    let proto = if hop.https { "https" } else { "http" };
    append_forwarded_for(headers, hop);
    append_forwarded(headers, target, hop, proto);
    headers.entry(&X_FORWARDED_PROTO).or_insert(HeaderValue::from_static(proto));
    if let Some(authority) = target.authority() {
        headers.entry(&X_FORWARDED_HOST).or_insert_with(|| authority.clone());
    }
    append_to_list(headers, &header::VIA, via(hop.version_in));
    if !hop.preserve_host || target.authority().is_none() {
        headers.insert(header::HOST, hop.upstream_authority.clone());
    }
}

/// Makes an upstream's response into the one for a client that asked by `version_in`.
///
/// hyper frames it: by the `Content-Length` that stays, or chunked; and it speaks HTTP/1.0 with clients
/// that do.
///
/// # Errors
/// A [`ResponseFault`] if the response cannot be passed on safely.
pub(super) fn forward_response(
    parts: &mut response::Parts,
    version_in: Version,
) -> Result<(), ResponseFault> {
    if parts.status == StatusCode::SWITCHING_PROTOCOLS {
        return Err(ResponseFault::Switched);
    }
    let headers = &mut parts.headers;
    let mut strip: SmallVec<[HeaderName; 4]> = SmallVec::new();
    let mut lengths = 0_usize;
    let mut codings = 0_usize;
    for (name, value) in &*headers {
        match *name {
            header::CONNECTION => strip.extend(gate::nominated(value).filter(|name| !is_essential(name))),
            header::CONTENT_LENGTH => lengths += 1,
            header::TRANSFER_ENCODING => {
                codings += 1;
                if codings > 1 || !value.as_bytes().eq_ignore_ascii_case(b"chunked") {
                    return Err(ResponseFault::TransferEncoding);
                }
                strip.push(header::TRANSFER_ENCODING);
                // The coding won when hyper read the body, so the length is a lie.
                strip.push(header::CONTENT_LENGTH);
            }
            _ => {}
        }
        if gate::is_hop_by_hop(name) {
            strip.push(name.clone());
        }
    }
    for name in &strip {
        headers.remove(name);
    }
    if lengths > 0 && codings == 0 {
        single_length(headers);
    }
    append_to_list(headers, &header::VIA, via(parts.version));
    parts.version = if version_in == Version::HTTP_2 { Version::HTTP_2 } else { Version::HTTP_11 };
    Ok(())
}

/// Adds `item` to a field that is a comma-separated list, in one line.
pub(super) fn append_to_list(headers: &mut HeaderMap, name: &HeaderName, item: HeaderValue) {
    match headers.entry(name) {
        Entry::Vacant(place) => {
            place.insert(item);
        }
        Entry::Occupied(mut lines) => {
            let joined = join(lines.iter().chain([&item]), b", ");
            lines.insert(joined);
        }
    }
}

/// All lines of a list in one.
fn join<'v>(lines: impl Iterator<Item = &'v HeaderValue>, separator: &[u8]) -> HeaderValue {
    let mut text = Vec::with_capacity(128);
    for line in lines.map(HeaderValue::as_bytes).filter(|line| !line.trim_ascii().is_empty()) {
        if !text.is_empty() {
            text.extend_from_slice(separator);
        }
        text.extend_from_slice(line);
    }
    HeaderValue::from_maybe_shared(Bytes::from(text)).expect("valid values joined by visible signs are valid")
}

/// HTTP/2 may split cookies over lines; HTTP/1.1 has one line (RFC 9113, 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    if let Entry::Occupied(mut lines) = headers.entry(header::COOKIE)
        && lines.iter().nth(1).is_some()
    {
        let joined = join(lines.iter(), b"; ");
        lines.insert(joined);
    }
}

/// Removes what an untrusted peer says about where a request came from. Fields that name one address are
/// made true instead, for upstreams that read them.
fn drop_claims(headers: &mut HeaderMap, hop: &Hop<'_>) {
    let claims: SmallVec<[HeaderName; 4]> = headers
        .keys()
        .filter(|name| **name == header::FORWARDED || name.as_str().starts_with("x-forwarded-"))
        .cloned()
        .collect();
    for name in &claims {
        headers.remove(name);
    }
    for name in [&X_REAL_IP, hop.ip_header] {
        if let Entry::Occupied(mut lines) = headers.entry(name) {
            lines.insert(hop.peer.printed.clone());
        }
    }
}

fn append_forwarded_for(headers: &mut HeaderMap, hop: &Hop<'_>) {
    // If the peer told us by another field who the client is, an upstream that reads this one should know.
    if let (false, Some(client)) = (headers.contains_key(&X_FORWARDED_FOR), behind(hop)) {
        headers.insert(&X_FORWARDED_FOR, printed(client));
    }
    append_to_list(headers, &X_FORWARDED_FOR, hop.peer.printed.clone());
}

fn append_forwarded(headers: &mut HeaderMap, target: &Target, hop: &Hop<'_>, proto: &str) {
    let mut text = String::with_capacity(128);
    if let (false, Some(client)) = (headers.contains_key(header::FORWARDED), behind(hop)) {
        text.push_str(&node(client));
        text.push_str(", ");
    }
    text.push_str(&hop.peer.node);
    if let Some(authority) = target.authority().and_then(|authority| authority.to_str().ok()) {
        // Quoted for the colon and the brackets; a valid authority holds nothing to escape.
        text.push_str(";host=\"");
        text.push_str(authority);
        text.push('"');
    }
    text.push_str(";proto=");
    text.push_str(proto);
    let element = HeaderValue::from_maybe_shared(Bytes::from(text)).expect("made of visible signs only");
    append_to_list(headers, &header::FORWARDED, element);
}

/// The client, if a trusted peer stands before it.
fn behind(hop: &Hop<'_>) -> Option<IpAddr> {
    let client = hop.client.ip.to_canonical();
    (hop.client.peer_trusted && client != hop.peer.ip).then_some(client)
}

fn printed(ip: IpAddr) -> HeaderValue {
    HeaderValue::try_from(ip.to_string()).expect("addresses are printed in visible signs")
}

/// The address as an element of `Forwarded` (RFC 7239, 6).
fn node(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(ip) => format!("for={ip}"),
        IpAddr::V6(ip) => format!("for=\"[{ip}]\""),
    }
}

fn via(version: Version) -> HeaderValue {
    HeaderValue::from_static(match version {
        Version::HTTP_2 => "2 tidegate",
        Version::HTTP_10 => "1.0 tidegate",
        _ => "1.1 tidegate",
    })
}

/// Fields of a response that no `Connection` list takes away.
fn is_essential(name: &HeaderName) -> bool {
    matches!(
        *name,
        header::CONTENT_LENGTH | header::CONTENT_TYPE | header::CONTENT_ENCODING | header::CACHE_CONTROL
    )
}

/// hyper has checked that all lengths agree (also as a list in one line), but would not write several.
fn single_length(headers: &mut HeaderMap) {
    let Some(first) = headers.get(header::CONTENT_LENGTH) else { return };
    let number = gate::elements(first).next().and_then(|digits| HeaderValue::from_bytes(digits).ok());
    if let Some(number) = number {
        headers.insert(header::CONTENT_LENGTH, number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body::Frame;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};
    use tokio::io::AsyncReadExt;

    const UPSTREAM: HeaderValue = HeaderValue::from_static("127.0.0.1:3000");
    const PEER: &str = "192.0.2.1";

    fn hop(peer: &str, client: Option<&str>) -> Hop<'static> {
        // Leaked, for tests to be short.
        let peer: &AddressText = Box::leak(Box::new(AddressText::new(peer.parse().unwrap())));
        static UPSTREAM_AUTHORITY: HeaderValue = UPSTREAM;
        static IP_HEADER: HeaderName = HeaderName::from_static("x-client-ip");
        Hop {
            peer,
            client: Client {
                ip: client.map_or(peer.ip, |client| client.parse().unwrap()),
                peer_trusted: client.is_some(),
            },
            https: true,
            version_in: Version::HTTP_11,
            ip_header: &IP_HEADER,
            has_body: false,
            preserve_host: true,
            upstream_authority: &UPSTREAM_AUTHORITY,
        }
    }

    fn forwarded(hop: &Hop<'_>, fields: &[(&str, &str)]) -> HeaderMap {
        let mut builder = http::Request::builder().uri("/").version(hop.version_in);
        for (name, value) in fields {
            builder = builder.header(*name, *value);
        }
        let mut parts = builder.body(()).unwrap().into_parts().0;
        let target = gate::check(&mut parts, &|_| false).unwrap();
        forward_request(&mut parts, &target, hop);
        parts.headers
    }

    /// Every field with its lines.
    fn listed(headers: &HeaderMap) -> BTreeMap<&str, Vec<&str>> {
        let mut map = BTreeMap::<_, Vec<_>>::new();
        for (name, value) in headers {
            map.entry(name.as_str()).or_default().push(value.to_str().unwrap());
        }
        map
    }

    #[test]
    fn a_strangers_claims_are_replaced() {
        let headers = forwarded(
            &hop(PEER, None),
            &[
                ("host", "a.example:8443"),
                ("x-forwarded-for", "10.0.0.1"),
                ("x-forwarded-for", "10.0.0.2"),
                ("x-forwarded-proto", "gopher"),
                ("x-forwarded-host", "evil"),
                ("x-forwarded-port", "1"),
                ("forwarded", "for=10.0.0.1"),
                ("x-real-ip", "10.0.0.1"),
                ("x-client-ip", "10.0.0.1"),
                ("via", "1.0 fred"),
            ],
        );
        let expected = [
            ("forwarded", "for=192.0.2.1;host=\"a.example:8443\";proto=https"),
            ("host", "a.example:8443"),
            ("via", "1.0 fred, 1.1 tidegate"),
            ("x-client-ip", PEER),
            ("x-forwarded-for", PEER),
            ("x-forwarded-host", "a.example:8443"),
            ("x-forwarded-proto", "https"),
            ("x-real-ip", PEER),
        ];
        assert_eq!(listed(&headers), expected.map(|(name, value)| (name, vec![value])).into());
    }

    #[test]
    fn a_trusted_proxys_words_are_continued() {
        let headers = forwarded(
            &hop("2001:db8::1", Some("10.0.0.2")),
            &[
                ("host", "a.example"),
                ("x-forwarded-for", "10.0.0.1"),
                ("x-forwarded-for", "10.0.0.2"),
                ("x-forwarded-proto", "http"),
                ("x-forwarded-host", "front.example"),
                ("forwarded", "for=10.0.0.2"),
                ("x-real-ip", "10.0.0.2"),
            ],
        );
        assert_eq!(headers["x-forwarded-for"], "10.0.0.1, 10.0.0.2, 2001:db8::1");
        assert_eq!(headers["x-forwarded-proto"], "http");
        assert_eq!(headers["x-forwarded-host"], "front.example");
        assert_eq!(
            headers["forwarded"],
            "for=10.0.0.2, for=\"[2001:db8::1]\";host=\"a.example\";proto=https"
        );
        assert_eq!(headers["x-real-ip"], "10.0.0.2");
    }

    #[test]
    fn the_field_that_a_trusted_proxy_left_out_starts_with_the_client() {
        let headers = forwarded(
            &hop("::ffff:192.0.2.1", Some("2001:db8::2")),
            &[("host", "a.example"), ("x-forwarded-for", "2001:db8::2")],
        );
        assert_eq!(headers["x-forwarded-for"], "2001:db8::2, 192.0.2.1");
        assert_eq!(
            headers["forwarded"],
            "for=\"[2001:db8::2]\", for=192.0.2.1;host=\"a.example\";proto=https"
        );
        let headers = forwarded(
            &hop(PEER, Some("2001:db8::2")),
            &[("host", "a.example"), ("forwarded", "for=\"[2001:db8::2]\"")],
        );
        assert_eq!(headers["x-forwarded-for"], "2001:db8::2, 192.0.2.1");
    }

    #[test]
    fn the_host_is_the_clients_or_the_upstreams() {
        let fields = [("host", "a.example")];
        assert_eq!(forwarded(&hop(PEER, None), &fields)["host"], "a.example");
        let headers = forwarded(&Hop { preserve_host: false, ..hop(PEER, None) }, &fields);
        assert_eq!(
            (&headers["host"], &headers["x-forwarded-host"]),
            (&UPSTREAM, &"a.example".parse().unwrap())
        );
        let headers = forwarded(&Hop { version_in: Version::HTTP_10, ..hop(PEER, None) }, &[]);
        assert_eq!((&headers["host"], &headers["via"]), (&UPSTREAM, &"1.0 tidegate".parse().unwrap()));
        assert!(!headers.contains_key("x-forwarded-host"));
        assert_eq!(headers["forwarded"], "for=192.0.2.1;proto=https");
    }

    #[test]
    fn cookies_that_http_2_split_are_one_line() {
        let fields = [("host", "h"), ("cookie", "a=1"), ("cookie", "b=2; c=3")];
        let headers = forwarded(&Hop { version_in: Version::HTTP_2, ..hop(PEER, None) }, &fields);
        assert_eq!(listed(&headers)["cookie"], ["a=1; b=2; c=3"]);
        assert_eq!(headers["via"], "2 tidegate");
    }

    #[test]
    fn a_body_without_a_length_is_chunked_whatever_the_method() {
        let with_body = Hop { has_body: true, ..hop(PEER, None) };
        assert_eq!(forwarded(&with_body, &[("host", "h")])["transfer-encoding"], "chunked");
        let headers = forwarded(&with_body, &[("host", "h"), ("content-length", "3")]);
        assert!(!headers.contains_key("transfer-encoding"));
        assert!(!forwarded(&hop(PEER, None), &[("host", "h")]).contains_key("transfer-encoding"));
    }

    /// A body that doesn't tell its length, as one that is passed through.
    struct Streamed(Option<Bytes>);

    impl http_body::Body for Streamed {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(self.0.take().map(|data| Ok(Frame::data(data))))
        }

        fn is_end_stream(&self) -> bool {
            self.0.is_none()
        }
    }

    /// What hyper makes of a request on its way to the upstream.
    async fn on_the_wire(method: &str, body: Option<&'static str>, fields: &[(&str, &str)]) -> String {
        let mut builder = http::Request::builder().method(method).uri("/p?q").header("host", "h");
        for (name, value) in fields {
            builder = builder.header(*name, *value);
        }
        let mut parts = builder.body(()).unwrap().into_parts().0;
        let target = gate::check(&mut parts, &|_| false).unwrap();
        forward_request(&mut parts, &target, &Hop { has_body: body.is_some(), ..hop(PEER, None) });
        let request = http::Request::from_parts(parts, Streamed(body.map(Bytes::from)));
        let (ours, mut upstream) = tokio::io::duplex(4096);
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(ours)).await.unwrap();
        let connection = tokio::spawn(connection);
        let response = tokio::spawn(async move { sender.send_request(request).await.map(drop) });
        let mut sent = vec![0; 4096];
        let count = upstream.read(&mut sent).await.unwrap();
        drop(upstream);
        response.await.unwrap().unwrap_err();
        connection.await.unwrap().unwrap();
        sent.truncate(count);
        String::from_utf8(sent).unwrap()
    }

    #[tokio::test]
    async fn the_upstream_sees_one_framing() {
        for (method, body, fields, framing, end) in [
            ("GET", None, &[][..], None, "\r\n\r\n"),
            ("POST", None, &[], None, "\r\n\r\n"),
            ("POST", None, &[("content-length", "0")], Some("content-length: 0"), "\r\n\r\n"),
            ("POST", Some("abc"), &[("content-length", "3")], Some("content-length: 3"), "\r\n\r\nabc"),
            (
                "POST",
                Some("abc"),
                &[("transfer-encoding", "chunked")],
                Some("transfer-encoding: chunked"),
                "3\r\nabc\r\n0\r\n\r\n",
            ),
            ("GET", Some("abc"), &[], Some("transfer-encoding: chunked"), "3\r\nabc\r\n0\r\n\r\n"),
        ] {
            let sent = on_the_wire(method, body, fields).await;
            assert!(sent.starts_with(&format!("{method} /p?q HTTP/1.1\r\nhost: h\r\n")), "{sent}");
            assert!(sent.ends_with(end), "{sent}");
            let lines: Vec<_> = sent
                .lines()
                .filter(|line| line.starts_with("content-length") || line.starts_with("transfer-encoding"))
                .collect();
            assert_eq!(lines, framing.into_iter().collect::<Vec<_>>(), "{sent}");
        }
    }

    fn answered(version: Version, fields: &[(&str, &str)]) -> Result<response::Parts, ResponseFault> {
        let mut builder = http::Response::builder().version(version);
        for (name, value) in fields {
            builder = builder.header(*name, *value);
        }
        let mut parts = builder.body(()).unwrap().into_parts().0;
        forward_response(&mut parts, Version::HTTP_11).map(|()| parts)
    }

    #[test]
    fn a_response_loses_what_belongs_to_the_upstreams_connection() {
        let parts = answered(
            Version::HTTP_10,
            &[
                ("connection", "close, x-gone, content-type"),
                ("x-gone", "1"),
                ("keep-alive", "timeout=5"),
                ("proxy-authenticate", "basic"),
                ("upgrade", "h2c"),
                ("content-type", "a/b"),
                ("trailer", "x-sum"),
                ("content-length", "3"),
            ],
        )
        .unwrap();
        let expected = [
            ("content-length", vec!["3"]),
            ("content-type", vec!["a/b"]),
            ("trailer", vec!["x-sum"]),
            ("via", vec!["1.0 tidegate"]),
        ];
        assert_eq!(listed(&parts.headers), expected.into());
        assert_eq!(parts.version, Version::HTTP_11);
    }

    #[test]
    fn a_response_has_one_framing() {
        let fields = |fields: &[(&str, &str)]| answered(Version::HTTP_11, fields).map(|parts| parts.headers);
        let headers = fields(&[("transfer-encoding", "chunked"), ("content-length", "3")]).unwrap();
        assert!(!headers.contains_key("content-length") && !headers.contains_key("transfer-encoding"));
        let headers = fields(&[("content-length", "3"), ("content-length", "3")]).unwrap();
        assert_eq!(listed(&headers)["content-length"], ["3"]);
        assert_eq!(fields(&[("content-length", "3, 3")]).unwrap()["content-length"], "3");
        for coding in ["gzip, chunked", "gzip", "identity"] {
            assert_eq!(fields(&[("transfer-encoding", coding)]), Err(ResponseFault::TransferEncoding));
        }
    }

    #[test]
    fn an_unasked_switch_of_protocols_is_a_fault() {
        let mut parts = http::Response::builder().status(101).body(()).unwrap().into_parts().0;
        assert_eq!(forward_response(&mut parts, Version::HTTP_11), Err(ResponseFault::Switched));
    }

    proptest! {
        #[test]
        fn joining_never_loses_a_line(
            lines in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..6),
            peer in any::<[u8; 16]>(),
        ) {
            let mut headers = HeaderMap::new();
            for line in lines {
                if let Ok(line) = HeaderValue::from_bytes(&line) {
                    headers.append(&X_FORWARDED_FOR, line);
                }
            }
            let before: Vec<_> = headers.get_all(&X_FORWARDED_FOR).iter().cloned().collect();
            let peer = IpAddr::from(peer);
            let hop = Hop {
                peer: &AddressText::new(peer),
                client: Client { ip: peer, peer_trusted: true },
                ..hop(PEER, None)
            };
            append_forwarded_for(&mut headers, &hop);
            let after: Vec<_> = headers.get_all(&X_FORWARDED_FOR).iter().collect();
            prop_assert_eq!(after.len(), 1);
            let text = after[0].as_bytes();
            prop_assert!(text.ends_with(peer.to_canonical().to_string().as_bytes()));
            for line in before.iter().map(HeaderValue::as_bytes).filter(|line| !line.trim_ascii().is_empty()) {
                prop_assert!(text.windows(line.len()).any(|part| part == line));
            }
        }
    }
}
