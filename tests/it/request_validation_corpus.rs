//! A table of unusual requests and the bytes that the upstream may receive for each.

use crate::support::prelude::*;

/// Each request uses its own upstream connection, so that the last received bytes belong to it.
const OK_RESPONSE: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok";
const HEADER_KEY_POLICY: &str = r#"
[[policy]]
name = "p"
key = ["header:x-user-id", "client_ip"]
limit = { requests = 1000, per = "1h" }
"#;

/// The expected handling of a request.
enum ExpectedOutcome {
    /// No byte reaches the upstream, and neither does the next request.
    ConnectionRejected,
    /// The request does not reach the upstream. The next one may, because this one's end is
    /// unambiguous.
    RequestRejected,
    /// One request reaches the upstream. It contains all strings of the first list and none of the
    /// second, in lower case.
    Forwarded(&'static [&'static str], &'static [&'static str]),
}
use ExpectedOutcome::{ConnectionRejected, Forwarded, RequestRejected};

const HOST_FIELD: &str = "Host: shop.example\r\n";

fn http1_cases() -> Vec<(&'static str, String, ExpectedOutcome)> {
    let head = |line: &str, fields: &str| format!("{line}\r\n{HOST_FIELD}{fields}\r\n");
    let get = |fields: &str| head("GET / HTTP/1.1", fields);
    let chunks = |fields: &str, body: &str| {
        head(
            "POST / HTTP/1.1",
            &format!("Transfer-Encoding: chunked\r\n{fields}"),
        ) + body
    };
    let rejected = vec![
        // Request line.
        (
            "a bare CR ends the line",
            format!("GET / HTTP/1.1\r{HOST_FIELD}\r\n"),
        ),
        (
            "only bare CRs",
            "GET / HTTP/1.1\rHost: a\r\r".to_owned() + "\r\n\r\n",
        ),
        ("NUL in the target", head("GET /a\0b HTTP/1.1", "")),
        ("a tab for a space", head("GET\t/\tHTTP/1.1", "")),
        ("an invalid version", head("GET / HTTP/1.1x", "")),
        ("a version in lower case", head("GET / http/1.1", "")),
        (
            "a method in lower case",
            head("post / HTTP/1.1", "Content-Length: 0\r\n"),
        ),
        (
            "an unknown method in lower case",
            head("purge / HTTP/1.1", ""),
        ),
        ("HTTP/0.9", "GET /\r\n\r\n".to_owned()),
        ("no target", head("GET HTTP/1.1", "")),
        ("a space before the method", head(" GET / HTTP/1.1", "")),
        // Target and host.
        (
            "whole URL of another host",
            head("GET http://evil.example/ HTTP/1.1", ""),
        ),
        (
            "a user in the URL",
            head("GET http://u@shop.example/ HTTP/1.1", ""),
        ),
        (
            "another scheme",
            head("GET file:///etc/passwd HTTP/1.1", ""),
        ),
        ("two Hosts", get("Host: shop.example\r\n")),
        (
            "a Host with spaces before its colon",
            "GET / HTTP/1.1\r\nHost : shop.example\r\n\r\n".to_owned(),
        ),
        (
            "an empty Host",
            "GET / HTTP/1.1\r\nHost:\r\n\r\n".to_owned(),
        ),
        // Body length.
        (
            "length in HTTP/1.0 with chunks",
            format!(
                "POST / HTTP/1.0\r\n{HOST_FIELD}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            ),
        ),
        (
            "a folded coding",
            head("POST / HTTP/1.1", "Transfer-Encoding:\r\n chunked\r\n") + "0\r\n\r\n",
        ),
        (
            "a coding with a form feed",
            head("POST / HTTP/1.1", "Transfer-Encoding: \x0cchunked\r\n") + "0\r\n\r\n",
        ),
        (
            "a coding's look-alike",
            head(
                "POST / HTTP/1.1",
                "Transfer_Encoding: chunked\r\nContent-Length: 0\r\n",
            ),
        ),
        (
            "a length's look-alike",
            head("POST / HTTP/1.1", "Content_Length: 9\r\n"),
        ),
        (
            "a length with a tab inside",
            head("POST / HTTP/1.1", "Content-Length: 1\t0\r\n") + "x",
        ),
        (
            "a trailer with the key header",
            chunks("Trailer: X-User-Id\r\n", "0\r\nX-User-Id: evil\r\n\r\n"),
        ),
        (
            "a trailer with a framing header",
            chunks(
                "Trailer: Content-Length\r\n",
                "0\r\nContent-Length: 9\r\n\r\n",
            ),
        ),
        (
            "a trailer with a client address",
            chunks("Trailer: X-Forwarded-For\r\n", "0\r\n\r\n"),
        ),
        (
            "a trailer's look-alike",
            chunks("Trailer: x_user_id\r\n", "0\r\n\r\n"),
        ),
        (
            "a trailer with an invalid name",
            chunks("Trailer: a b\r\n", "0\r\n\r\n"),
        ),
        // Header fields.
        ("no name", get(": x\r\n")),
        ("a name with a space", get("X A: x\r\n")),
        ("a name with a NUL", get("X\0A: x\r\n")),
        ("a name with a bracket", get("X(A: x\r\n")),
        ("a bare CR in a value", get("X-A: a\rb\r\n")),
        ("a vertical tab in a value", get("X-A: a\x0bb\r\n")),
        ("DEL in a value", get("X-A: a\x7fb\r\n")),
        ("the key's look-alike", get("X_User_Id: evil\r\n")),
        ("the key's look-alike by a dot", get("X.User.Id: evil\r\n")),
        ("an unknown expectation", get("Expect: magic\r\n")),
        // Hop-by-hop fields.
        (
            "Connection names the key header",
            get("X-User-Id: me\r\nConnection: X-User-Id\r\n"),
        ),
        (
            "Connection names the key header among others",
            get("X-User-Id: me\r\nConnection: close, ,x-a,\tX-USER-ID\r\n"),
        ),
        (
            "Connection names the key header on a second line",
            get("X-User-Id: me\r\nConnection: keep-alive\r\nConnection: x-user-id\r\n"),
        ),
        (
            "Connection names Cookie",
            get("Cookie: a=1\r\nConnection: cookie\r\n"),
        ),
        (
            "Connection names Authorization",
            get("Authorization: Bearer x\r\nConnection: authorization\r\n"),
        ),
        (
            "a look-alike of a forwarding header",
            get("X_Forwarded_For: 6.6.6.6\r\n"),
        ),
    ];
    let others = vec![
        (
            "an unknown method",
            head("PURGE /x HTTP/1.1", ""),
            Forwarded(&["purge /x http/1.1\r\n"], &[]),
        ),
        (
            "empty lines before it",
            format!("\r\n\r\n{}", head("GET /x HTTP/1.1", "")),
            Forwarded(&["get /x http/1.1\r\n"], &[]),
        ),
        (
            "a fragment",
            head("GET /x#/../y HTTP/1.1", ""),
            Forwarded(&["get /x http/1.1\r\n"], &["#", "/y"]),
        ),
        (
            "whole URL of the host",
            head("GET http://shop.example/x HTTP/1.1", ""),
            Forwarded(&["get /x http/1.1\r\nhost: shop.example\r\n"], &["http://"]),
        ),
        (
            "HTTP/1.0 without a Host",
            "GET /x HTTP/1.0\r\n\r\n".to_owned(),
            Forwarded(&["get /x http/1.1\r\n", "\r\nhost: 127.0.0.1:"], &[]),
        ),
        (
            "leading zeros",
            head("POST / HTTP/1.1", "Content-Length: 0003\r\n") + "abc",
            Forwarded(&["\r\n\r\nabc"], &["transfer-encoding"]),
        ),
        (
            "length and chunks of several",
            chunks("Content-Length: 0\r\nContent-Length: 5\r\n", "0\r\n\r\n"),
            Forwarded(&["transfer-encoding: chunked\r\n"], &["content-length"]),
        ),
        // Chunked bodies.
        (
            "an extension",
            chunks("", "3;a=b;c=\"d\"\r\nabc\r\n0;x\r\n\r\n"),
            Forwarded(&["3\r\nabc\r\n0\r\n\r\n"], &["a=b", ";x"]),
        ),
        (
            "leading zeros of a size",
            chunks("", "0003\r\nabc\r\n0\r\n\r\n"),
            Forwarded(&["3\r\nabc\r\n0\r\n\r\n"], &[]),
        ),
        // Trailers.
        (
            "a trailer that was not announced",
            chunks("", "0\r\nX-User-Id: evil\r\nContent-Length: 9\r\n\r\n"),
            Forwarded(&["\r\n\r\n0\r\n\r\n"], &["evil", "content-length"]),
        ),
        (
            "the key twice",
            get("X-User-Id: a\r\nX-User-Id: b\r\n"),
            RequestRejected,
        ),
        (
            "Connection names other fields",
            get("X-A: 1\r\nConnection: x-a\r\nKeep-Alive: timeout=5\r\nTE: gzip\r\n"),
            Forwarded(&["get / http/1.1"], &["x-a", "keep-alive", "te:"]),
        ),
        (
            "Proxy-Connection",
            get("Proxy-Connection: keep-alive\r\nProxy-Authorization: Basic x\r\n"),
            Forwarded(&["get / http/1.1"], &["proxy-"]),
        ),
        (
            "an upgrade to HTTP/2",
            get(
                "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
            ),
            Forwarded(&["get / http/1.1"], &["h2c", "settings", "upgrade"]),
        ),
        (
            "TE with more than trailers",
            get("TE: trailers, deflate;q=0.5\r\nConnection: TE\r\n"),
            Forwarded(&["te: trailers\r\n"], &["deflate"]),
        ),
        // Client address.
        (
            "forwarding headers of an untrusted client",
            get(
                "X-Forwarded-For: 6.6.6.6\r\nForwarded: for=6.6.6.6\r\nX-Real-IP: 6.6.6.6\r\nX-Forwarded-Proto: gopher\r\n",
            ),
            Forwarded(&["x-forwarded-for: 127.0.0.1\r\n"], &["6.6.6.6", "gopher"]),
        ),
    ];
    let rejected = rejected
        .into_iter()
        .map(|(what, request)| (what, request, ConnectionRejected));
    rejected.chain(others).collect()
}

#[tokio::test]
async fn ambiguous_http1_requests_are_normalized_or_rejected() {
    const SMUGGLED_REQUEST: &str =
        "GET /smuggled HTTP/1.1\r\nHost: shop.example\r\nConnection: close\r\n\r\n";
    let upstream = RawUpstream::with_response(OK_RESPONSE).await;
    let proxy = Proxy::start(HEADER_KEY_POLICY, upstream.address).await;
    let mut wrong = Vec::new();
    for (what, bytes, fate) in http1_cases() {
        let before = upstream.received_bytes().len();
        let mut client = proxy.send_raw(bytes.as_bytes()).await;
        let status = client
            .read_response_or_close()
            .await
            .map(|reply| reply.status);
        let reached =
            String::from_utf8_lossy(&upstream.received_bytes()[before..]).to_ascii_lowercase();
        match fate {
            RequestRejected => {
                if status != Some(400) || !reached.is_empty() {
                    wrong.push(format!("{what}: {status:?}, and upstream {reached:?}"));
                }
            }
            ConnectionRejected => {
                client.send(SMUGGLED_REQUEST).await;
                client.read_to_close().await;
                let reached =
                    String::from_utf8_lossy(&upstream.received_bytes()[before..]).into_owned();
                if status.is_some_and(|status| status < 400) || !reached.is_empty() {
                    wrong.push(format!("{what}: {status:?}, and upstream {reached:?}"));
                }
            }
            Forwarded(wanted, unwanted) => {
                let lacks = wanted.iter().find(|words| !reached.contains(*words));
                let has = unwanted.iter().find(|words| reached.contains(*words));
                let requests = reached.matches(" http/1.1\r\n").count();
                if status != Some(200) || lacks.is_some() || has.is_some() || requests != 1 {
                    wrong.push(format!(
                        "{what}: {status:?}, lacks {lacks:?}, has {has:?}: {reached:?}"
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

type HeaderFields = Vec<(&'static [u8], &'static [u8])>;

fn http2_cases() -> Vec<(&'static str, HeaderFields, ExpectedOutcome)> {
    let usual: [(&[u8], &[u8]); 4] = [
        (b":method", b"GET"),
        (b":scheme", b"http"),
        (b":path", b"/x"),
        (b":authority", b"shop.example"),
    ];
    let with = |name: &'static [u8], value: &'static [u8]| {
        let mut fields: HeaderFields = usual.to_vec();
        match fields.iter_mut().find(|(known, _)| *known == name) {
            Some(field) => field.1 = value,
            None => fields.push((name, value)),
        }
        fields
    };
    let and = |name: &'static [u8], value: &'static [u8]| {
        usual
            .iter()
            .copied()
            .chain([(name, value)])
            .collect::<HeaderFields>()
    };
    let without = |name: &[u8]| {
        usual
            .iter()
            .copied()
            .filter(|(known, _)| *known != name)
            .collect::<HeaderFields>()
    };
    let rejected = vec![
        ("CRLF in a value", with(b"x-a", b"a\r\nx-b: c")),
        ("LF in a value", with(b"x-a", b"a\nx-b: c")),
        ("CR in a value", with(b"x-a", b"a\rb")),
        ("NUL in a value", with(b"x-a", b"a\0b")),
        ("a name in capitals", with(b"X-A", b"a")),
        ("a name with a colon", with(b"x-a: b", b"c")),
        ("a name with CRLF", with(b"x-a\r\nx-b", b"c")),
        ("a name with a space", with(b"x a", b"c")),
        ("an empty name", with(b"", b"c")),
        ("Connection", with(b"connection", b"x-user-id")),
        ("Keep-Alive", with(b"keep-alive", b"timeout=5")),
        ("Proxy-Connection", with(b"proxy-connection", b"close")),
        ("Upgrade", with(b"upgrade", b"h2c")),
        ("Transfer-Encoding", with(b"transfer-encoding", b"chunked")),
        ("TE other than trailers", with(b"te", b"gzip")),
        ("a space in the path", with(b":path", b"/a b")),
        (
            "CRLF in the path",
            with(b":path", b"/ HTTP/1.1\r\nhost: evil\r\n\r\n"),
        ),
        ("a path without a slash", with(b":path", b"x")),
        ("an empty path", with(b":path", b"")),
        ("no path", without(b":path")),
        ("two paths", and(b":path", b"/y")),
        (
            "a whole URL as path",
            with(b":path", b"http://evil.example/"),
        ),
        ("a star", with(b":path", b"*")),
        (
            "a method with CRLF",
            with(b":method", b"GET / HTTP/1.1\r\nx: "),
        ),
        ("a method in lower case", with(b":method", b"get")),
        ("a method with a space", with(b":method", b"GET /y")),
        ("no method", without(b":method")),
        ("CONNECT", with(b":method", b"CONNECT")),
        ("another scheme", with(b":scheme", b"file")),
        ("another Host", with(b"host", b"evil.example")),
        (
            "two Hosts",
            [
                and(b"host", b"shop.example"),
                vec![(b"host", b"shop.example")],
            ]
            .concat(),
        ),
        ("neither authority nor Host", without(b":authority")),
        (
            "a user in the authority",
            with(b":authority", b"u@shop.example"),
        ),
        (
            "CRLF in the authority",
            with(b":authority", b"shop.example\r\nx: y"),
        ),
        (
            "a slash in the authority",
            with(b":authority", b"shop.example/y"),
        ),
        ("an unknown pseudo field", with(b":version", b"HTTP/1.1")),
        ("a pseudo field of a response", with(b":status", b"200")),
        (
            "a pseudo field after regular fields",
            [with(b"x-a", b"b"), vec![(b":authority", b"evil.example")]].concat(),
        ),
        (
            "a length that does not match the body",
            with(b"content-length", b"5"),
        ),
        (
            "two lengths",
            [
                with(b"content-length", b"0"),
                vec![(b"content-length", b"1")],
            ]
            .concat(),
        ),
        ("a signed length", with(b"content-length", b"+0")),
        ("the key's look-alike", with(b"x_user_id", b"evil")),
    ];
    let others = vec![
        (
            "TE",
            with(b"te", b"trailers"),
            Forwarded(&["te: trailers\r\n"], &[]),
        ),
        (
            "the same Host",
            with(b"host", b"SHOP.example"),
            Forwarded(&["host: shop.example\r\n"], &[]),
        ),
        (
            "the key twice",
            [with(b"x-user-id", b"a"), vec![(b"x-user-id", b"b")]].concat(),
            RequestRejected,
        ),
        (
            "split cookies",
            [with(b"cookie", b"a=1"), vec![(b"cookie", b"b=2")]].concat(),
            Forwarded(&["cookie: a=1; b=2\r\n"], &[]),
        ),
        (
            "a forwarding header of an untrusted client",
            with(b"x-forwarded-for", b"6.6.6.6"),
            Forwarded(&["x-forwarded-for: 127.0.0.1\r\n"], &["6.6.6.6"]),
        ),
        (
            "a plain request",
            usual.to_vec(),
            Forwarded(
                &["get /x http/1.1\r\nhost: shop.example\r\n"],
                &["transfer-encoding"],
            ),
        ),
    ];
    let rejected = rejected
        .into_iter()
        .map(|(what, request)| (what, request, ConnectionRejected));
    rejected.chain(others).collect()
}

/// Encodes a connection preface and one request without a body, uncompressed (RFC 9113; RFC 7541,
/// 6.2.2).
fn encode_request(fields: &HeaderFields) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.extend([0, name.len() as u8]);
        block.extend(*name);
        block.push(value.len() as u8);
        block.extend(*value);
    }
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    // HEADERS on stream 1 with END_STREAM and END_HEADERS.
    bytes.extend([
        0,
        (block.len() >> 8) as u8,
        block.len() as u8,
        1,
        5,
        0,
        0,
        0,
        1,
    ]);
    bytes.extend(block);
    bytes
}

#[tokio::test]
async fn ambiguous_http2_requests_are_normalized_or_rejected() {
    let upstream = RawUpstream::with_response(OK_RESPONSE).await;
    let proxy = Proxy::start(HEADER_KEY_POLICY, upstream.address).await;
    let mut wrong = Vec::new();
    for (what, fields, fate) in http2_cases() {
        let before = upstream.received_bytes().len();
        let mut client = proxy.send_raw(encode_request(&fields)).await;
        let answered = client.waits_for_stream_1_result().await;
        let reached =
            String::from_utf8_lossy(&upstream.received_bytes()[before..]).to_ascii_lowercase();
        let is_right = match fate {
            ConnectionRejected | RequestRejected => reached.is_empty(),
            Forwarded(wanted, unwanted) => {
                wanted.iter().all(|words| reached.contains(words))
                    && !unwanted.iter().any(|words| reached.contains(words))
                    && reached.matches(" http/1.1\r\n").count() == 1
            }
        };
        if !is_right || !answered {
            wrong.push(format!("{what}: answered {answered}, upstream {reached:?}"));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
