use super::*;
use crate::proxy::http::request_validation;
use http_body::Frame;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::AsyncReadExt;

const UPSTREAM_HOST: HeaderValue = HeaderValue::from_static("127.0.0.1:3000");
const PEER_IP: &str = "192.0.2.1";

fn forwarding_context(peer: &str, client: Option<&str>) -> ForwardingContext<'static> {
    // The address is leaked for a `'static` reference, which keeps the tests short.
    let peer: &AddressText = Box::leak(Box::new(AddressText::new(peer.parse().unwrap())));
    static UPSTREAM_AUTHORITY: HeaderValue = UPSTREAM_HOST;
    static IP_HEADER: HeaderName = HeaderName::from_static("x-client-ip");
    ForwardingContext {
        peer,
        client: ClientAddress {
            ip: client.map_or(peer.ip, |client| client.parse().unwrap()),
            is_peer_trusted: client.is_some(),
        },
        is_https: true,
        version_in: Version::HTTP_11,
        ip_header: &IP_HEADER,
        has_body: false,
        preserve_host: true,
        upstream_authority: &UPSTREAM_AUTHORITY,
    }
}

fn validate_and_rewrite_headers(hop: &ForwardingContext<'_>, fields: &[(&str, &str)]) -> HeaderMap {
    let mut builder = http::Request::builder().uri("/").version(hop.version_in);
    for (name, value) in fields {
        builder = builder.header(*name, *value);
    }
    let mut parts = builder.body(()).unwrap().into_parts().0;
    let target = request_validation::validate_and_rewrite_request(&mut parts, &|_| false).unwrap();
    rewrite_request_headers(&mut parts, &target, hop);
    parts.headers
}

/// Maps every header name to its values.
fn values_by_name(headers: &HeaderMap) -> BTreeMap<&str, Vec<&str>> {
    let mut map = BTreeMap::<_, Vec<_>>::new();
    for (name, value) in headers {
        map.entry(name.as_str())
            .or_default()
            .push(value.to_str().unwrap());
    }
    map
}

#[test]
fn forwarding_headers_of_an_untrusted_peer_are_replaced() {
    let headers = validate_and_rewrite_headers(
        &forwarding_context(PEER_IP, None),
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
        (
            "forwarded",
            "for=192.0.2.1;host=\"a.example:8443\";proto=https",
        ),
        ("host", "a.example:8443"),
        ("via", "1.0 fred, 1.1 tidegate"),
        ("x-client-ip", PEER_IP),
        ("x-forwarded-for", PEER_IP),
        ("x-forwarded-host", "a.example:8443"),
        ("x-forwarded-proto", "https"),
        ("x-real-ip", PEER_IP),
    ];
    assert_eq!(
        values_by_name(&headers),
        expected.map(|(name, value)| (name, vec![value])).into()
    );
}

#[test]
fn forwarding_headers_of_a_trusted_peer_are_extended() {
    let headers = validate_and_rewrite_headers(
        &forwarding_context("2001:db8::1", Some("10.0.0.2")),
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
    assert_eq!(
        headers["x-forwarded-for"],
        "10.0.0.1, 10.0.0.2, 2001:db8::1"
    );
    assert_eq!(headers["x-forwarded-proto"], "http");
    assert_eq!(headers["x-forwarded-host"], "front.example");
    assert_eq!(
        headers["forwarded"],
        "for=10.0.0.2, for=\"[2001:db8::1]\";host=\"a.example\";proto=https"
    );
    assert_eq!(headers["x-real-ip"], "10.0.0.2");
}

#[test]
fn a_missing_forwarding_header_starts_with_the_client_address() {
    let headers = validate_and_rewrite_headers(
        &forwarding_context("::ffff:192.0.2.1", Some("2001:db8::2")),
        &[("host", "a.example"), ("x-forwarded-for", "2001:db8::2")],
    );
    assert_eq!(headers["x-forwarded-for"], "2001:db8::2, 192.0.2.1");
    assert_eq!(
        headers["forwarded"],
        "for=\"[2001:db8::2]\", for=192.0.2.1;host=\"a.example\";proto=https"
    );
    let headers = validate_and_rewrite_headers(
        &forwarding_context(PEER_IP, Some("2001:db8::2")),
        &[
            ("host", "a.example"),
            ("forwarded", "for=\"[2001:db8::2]\""),
        ],
    );
    assert_eq!(headers["x-forwarded-for"], "2001:db8::2, 192.0.2.1");
}

#[test]
fn host_is_preserved_or_replaced_by_the_upstream_authority() {
    let fields = [("host", "a.example")];
    assert_eq!(
        validate_and_rewrite_headers(&forwarding_context(PEER_IP, None), &fields)["host"],
        "a.example"
    );
    let headers = validate_and_rewrite_headers(
        &ForwardingContext {
            preserve_host: false,
            ..forwarding_context(PEER_IP, None)
        },
        &fields,
    );
    assert_eq!(
        (&headers["host"], &headers["x-forwarded-host"]),
        (&UPSTREAM_HOST, &"a.example".parse().unwrap())
    );
    let headers = validate_and_rewrite_headers(
        &ForwardingContext {
            version_in: Version::HTTP_10,
            ..forwarding_context(PEER_IP, None)
        },
        &[],
    );
    assert_eq!(
        (&headers["host"], &headers["via"]),
        (&UPSTREAM_HOST, &"1.0 tidegate".parse().unwrap())
    );
    assert!(!headers.contains_key("x-forwarded-host"));
    assert_eq!(headers["forwarded"], "for=192.0.2.1;proto=https");
}

#[test]
fn split_http_2_cookies_are_joined() {
    let fields = [("host", "h"), ("cookie", "a=1"), ("cookie", "b=2; c=3")];
    let headers = validate_and_rewrite_headers(
        &ForwardingContext {
            version_in: Version::HTTP_2,
            ..forwarding_context(PEER_IP, None)
        },
        &fields,
    );
    assert_eq!(values_by_name(&headers)["cookie"], ["a=1; b=2; c=3"]);
    assert_eq!(headers["via"], "2 tidegate");
}

#[test]
fn a_get_body_without_a_length_is_chunked() {
    let with_body = ForwardingContext {
        has_body: true,
        ..forwarding_context(PEER_IP, None)
    };
    assert_eq!(
        validate_and_rewrite_headers(&with_body, &[("host", "h")])["transfer-encoding"],
        "chunked"
    );
    let headers =
        validate_and_rewrite_headers(&with_body, &[("host", "h"), ("content-length", "3")]);
    assert!(!headers.contains_key("transfer-encoding"));
    assert!(
        !validate_and_rewrite_headers(&forwarding_context(PEER_IP, None), &[("host", "h")])
            .contains_key("transfer-encoding")
    );
}

/// A body of unknown length, like that of a forwarded request.
struct UnsizedTestBody(Option<Bytes>);

impl http_body::Body for UnsizedTestBody {
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

/// Returns the bytes that hyper writes to the upstream for a request.
async fn serialize_request(
    method: &str,
    body: Option<&'static str>,
    fields: &[(&str, &str)],
) -> String {
    let mut builder = http::Request::builder()
        .method(method)
        .uri("/p?q")
        .header("host", "h");
    for (name, value) in fields {
        builder = builder.header(*name, *value);
    }
    let mut parts = builder.body(()).unwrap().into_parts().0;
    let target = request_validation::validate_and_rewrite_request(&mut parts, &|_| false).unwrap();
    rewrite_request_headers(
        &mut parts,
        &target,
        &ForwardingContext {
            has_body: body.is_some(),
            ..forwarding_context(PEER_IP, None)
        },
    );
    let request = http::Request::from_parts(parts, UnsizedTestBody(body.map(Bytes::from)));
    let (ours, mut upstream) = tokio::io::duplex(4096);
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(ours))
            .await
            .unwrap();
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
async fn requests_have_exactly_one_framing_header() {
    for (method, body, fields, framing, end) in [
        ("GET", None, &[][..], None, "\r\n\r\n"),
        ("POST", None, &[], None, "\r\n\r\n"),
        (
            "POST",
            None,
            &[("content-length", "0")],
            Some("content-length: 0"),
            "\r\n\r\n",
        ),
        (
            "POST",
            Some("abc"),
            &[("content-length", "3")],
            Some("content-length: 3"),
            "\r\n\r\nabc",
        ),
        (
            "POST",
            Some("abc"),
            &[("transfer-encoding", "chunked")],
            Some("transfer-encoding: chunked"),
            "3\r\nabc\r\n0\r\n\r\n",
        ),
        (
            "GET",
            Some("abc"),
            &[],
            Some("transfer-encoding: chunked"),
            "3\r\nabc\r\n0\r\n\r\n",
        ),
    ] {
        let sent = serialize_request(method, body, fields).await;
        assert!(
            sent.starts_with(&format!("{method} /p?q HTTP/1.1\r\nhost: h\r\n")),
            "{sent}"
        );
        assert!(sent.ends_with(end), "{sent}");
        let lines: Vec<_> = sent
            .lines()
            .filter(|line| {
                line.starts_with("content-length") || line.starts_with("transfer-encoding")
            })
            .collect();
        assert_eq!(lines, framing.into_iter().collect::<Vec<_>>(), "{sent}");
    }
}

fn rewrite_response(
    version: Version,
    fields: &[(&str, &str)],
) -> Result<response::Parts, ResponseValidationError> {
    let mut builder = http::Response::builder().version(version);
    for (name, value) in fields {
        builder = builder.header(*name, *value);
    }
    let mut parts = builder.body(()).unwrap().into_parts().0;
    rewrite_response_head(&mut parts, Version::HTTP_11, None).map(|()| parts)
}

#[test]
fn removes_connection_headers_from_responses() {
    let parts = rewrite_response(
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
    assert_eq!(values_by_name(&parts.headers), expected.into());
    assert_eq!(parts.version, Version::HTTP_11);
}

#[test]
fn responses_have_one_framing() {
    let fields = |fields: &[(&str, &str)]| {
        rewrite_response(Version::HTTP_11, fields).map(|parts| parts.headers)
    };
    let headers = fields(&[("transfer-encoding", "chunked"), ("content-length", "3")]).unwrap();
    assert!(!headers.contains_key("content-length") && !headers.contains_key("transfer-encoding"));
    let headers = fields(&[("content-length", "3"), ("content-length", "3")]).unwrap();
    assert_eq!(values_by_name(&headers)["content-length"], ["3"]);
    assert_eq!(
        fields(&[("content-length", "3, 3")]).unwrap()["content-length"],
        "3"
    );
    for coding in ["gzip, chunked", "gzip", "identity"] {
        assert_eq!(
            fields(&[("transfer-encoding", coding)]),
            Err(ResponseValidationError::TransferEncoding)
        );
    }
}

#[test]
fn a_granted_upgrade_is_forwarded_to_the_client() {
    let switch_protocols =
        |wanted: &RequestedProtocolSwitch, version_in, fields: &[(&str, &str)]| {
            let mut builder = http::Response::builder()
                .status(101)
                .version(Version::HTTP_11);
            for (name, value) in [
                ("connection", "Upgrade, x-gone"),
                ("x-gone", "1"),
                ("upgrade", "websocket"),
            ] {
                builder = builder.header(name, value);
            }
            for (name, value) in fields {
                builder = builder.header(*name, *value);
            }
            let mut parts = builder.body(()).unwrap().into_parts().0;
            rewrite_response_head(&mut parts, version_in, Some(wanted)).map(|()| parts)
        };
    let body = [("content-length", "5"), ("sec-websocket-protocol", "chat")];
    let key = HeaderValue::from_static("dGhlIHNhbXBsZSBub25jZQ==");
    let proof = ("sec-websocket-accept", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    let http1_upgrade = |websocket_key| RequestedProtocolSwitch {
        is_extended_connect: false,
        websocket_key,
    };
    let fields = [proof, body[0], body[1]];
    let parts =
        switch_protocols(&http1_upgrade(Some(key.clone())), Version::HTTP_11, &fields).unwrap();
    let expected = [
        ("connection", vec!["upgrade"]),
        ("sec-websocket-accept", vec![proof.1]),
        ("sec-websocket-protocol", vec!["chat"]),
        ("upgrade", vec!["websocket"]),
        ("via", vec!["1.1 tidegate"]),
    ];
    assert_eq!(
        (values_by_name(&parts.headers), parts.status),
        (expected.into(), StatusCode::SWITCHING_PROTOCOLS)
    );

    // A WebSocket response without a valid `Sec-WebSocket-Accept` is rejected.
    for (key, fields) in [(Some(key.clone()), &body[..]), (None, &fields)] {
        let refused = switch_protocols(&http1_upgrade(key), Version::HTTP_11, fields).unwrap_err();
        assert_eq!(refused, ResponseValidationError::InvalidWebSocketAccept);
    }

    let wanted = RequestedProtocolSwitch {
        is_extended_connect: true,
        websocket_key: Some(key),
    };
    let parts = switch_protocols(&wanted, Version::HTTP_2, &[proof, body[1]]).unwrap();
    let expected = [
        ("sec-websocket-protocol", vec!["chat"]),
        ("via", vec!["1.1 tidegate"]),
    ];
    assert_eq!(
        (values_by_name(&parts.headers), parts.status),
        (expected.into(), StatusCode::OK)
    );
    assert_eq!(
        switch_protocols(&wanted, Version::HTTP_2, &body).unwrap_err(),
        ResponseValidationError::InvalidWebSocketAccept
    );
}

#[test]
fn rejects_an_unrequested_protocol_switch() {
    let mut parts = http::Response::builder()
        .status(101)
        .body(())
        .unwrap()
        .into_parts()
        .0;
    assert_eq!(
        rewrite_response_head(&mut parts, Version::HTTP_11, None),
        Err(ResponseValidationError::UnrequestedSwitch)
    );
}

proptest! {
    #[test]
    fn x_forwarded_for_keeps_every_value(
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
        let hop = ForwardingContext {
            peer: &AddressText::new(peer),
            client: ClientAddress { ip: peer, is_peer_trusted: true },
            ..forwarding_context(PEER_IP, None)
        };
        let request = http::Request::builder().header("host", "a");
        let mut parts = request.body(()).unwrap().into_parts().0;
        let target = request_validation::validate_and_rewrite_request(&mut parts, &|_| false);
        append_forwarded(&mut headers, &target.unwrap(), &hop, "http");
        let after: Vec<_> = headers.get_all(&X_FORWARDED_FOR).iter().collect();
        prop_assert_eq!(after.len(), 1);
        let text = after[0].as_bytes();
        prop_assert!(text.ends_with(peer.to_canonical().to_string().as_bytes()));
        for line in before.iter().map(HeaderValue::as_bytes).filter(|line| !line.trim_ascii().is_empty()) {
            prop_assert!(text.windows(line.len()).any(|part| part == line));
        }
    }
}
