//! A table of odd requests, byte for byte, and what the upstream may see of each.

use crate::support::client::RawClient;
use crate::support::proxy::Proxy;
use crate::support::upstream::RawUpstream;

/// A connection for each request, so that what came last is what this one brought.
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok";
const KEYED: &str = r#"
[[policy]]
name = "p"
key = ["header:x-user-id", "client_ip"]
limit = { requests = 1000, per = "1h" }
"#;

/// What becomes of a request.
enum Fate {
    /// Nothing reaches the upstream, also not what comes behind.
    Refused,
    /// It does not; what comes behind may, as nobody doubts where this one ends.
    Unserved,
    /// One request does, with these words in it and none of the others (all in lower case).
    Plain(&'static [&'static str], &'static [&'static str]),
}
use Fate::{Plain, Refused, Unserved};

const H: &str = "Host: shop.example\r\n";

fn over_http1() -> Vec<(&'static str, String, Fate)> {
    let head = |line: &str, fields: &str| format!("{line}\r\n{H}{fields}\r\n");
    let get = |fields: &str| head("GET / HTTP/1.1", fields);
    let chunks = |fields: &str, body: &str| {
        head(
            "POST / HTTP/1.1",
            &format!("Transfer-Encoding: chunked\r\n{fields}"),
        ) + body
    };
    vec![
        // The first line.
        (
            "a bare CR ends the line",
            format!("GET / HTTP/1.1\r{H}\r\n"),
            Refused,
        ),
        (
            "only bare CRs",
            "GET / HTTP/1.1\rHost: a\r\r".to_owned() + "\r\n\r\n",
            Refused,
        ),
        ("NUL in the target", head("GET /a\0b HTTP/1.1", ""), Refused),
        ("a tab for a space", head("GET\t/\tHTTP/1.1", ""), Refused),
        (
            "a version that is none",
            head("GET / HTTP/1.1x", ""),
            Refused,
        ),
        (
            "a version in lower case",
            head("GET / http/1.1", ""),
            Refused,
        ),
        (
            "a method in small letters",
            head("post / HTTP/1.1", "Content-Length: 0\r\n"),
            Refused,
        ),
        (
            "a method of nobody's in small letters",
            head("purge / HTTP/1.1", ""),
            Refused,
        ),
        (
            "a method of nobody's",
            head("PURGE /x HTTP/1.1", ""),
            Plain(&["purge /x http/1.1\r\n"], &[]),
        ),
        ("HTTP/0.9", "GET /\r\n\r\n".to_owned(), Refused),
        ("no target", head("GET HTTP/1.1", ""), Refused),
        (
            "a space before the method",
            head(" GET / HTTP/1.1", ""),
            Refused,
        ),
        (
            "empty lines before it",
            format!("\r\n\r\n{}", head("GET /x HTTP/1.1", "")),
            Plain(&["get /x http/1.1\r\n"], &[]),
        ),
        (
            "a fragment",
            head("GET /x#/../y HTTP/1.1", ""),
            Plain(&["get /x http/1.1\r\n"], &["#", "/y"]),
        ),
        // Whose request.
        (
            "whole URL of another host",
            head("GET http://evil.example/ HTTP/1.1", ""),
            Refused,
        ),
        (
            "whole URL of the host",
            head("GET http://shop.example/x HTTP/1.1", ""),
            Plain(&["get /x http/1.1\r\nhost: shop.example\r\n"], &["http://"]),
        ),
        (
            "a user in the URL",
            head("GET http://u@shop.example/ HTTP/1.1", ""),
            Refused,
        ),
        (
            "another scheme",
            head("GET file:///etc/passwd HTTP/1.1", ""),
            Refused,
        ),
        ("two Hosts", get("Host: shop.example\r\n"), Refused),
        (
            "a Host with spaces before its colon",
            "GET / HTTP/1.1\r\nHost : shop.example\r\n\r\n".to_owned(),
            Refused,
        ),
        (
            "an empty Host",
            "GET / HTTP/1.1\r\nHost:\r\n\r\n".to_owned(),
            Refused,
        ),
        (
            "HTTP/1.0 without a Host",
            "GET /x HTTP/1.0\r\n\r\n".to_owned(),
            Plain(&["get /x http/1.1\r\n", "\r\nhost: 127.0.0.1:"], &[]),
        ),
        // How long.
        (
            "length in HTTP/1.0 with chunks",
            format!(
                "POST / HTTP/1.0\r\n{H}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            ),
            Refused,
        ),
        (
            "a folded coding",
            head("POST / HTTP/1.1", "Transfer-Encoding:\r\n chunked\r\n") + "0\r\n\r\n",
            Refused,
        ),
        (
            "a coding with a form feed",
            head("POST / HTTP/1.1", "Transfer-Encoding: \x0cchunked\r\n") + "0\r\n\r\n",
            Refused,
        ),
        (
            "a coding's look-alike",
            head(
                "POST / HTTP/1.1",
                "Transfer_Encoding: chunked\r\nContent-Length: 0\r\n",
            ),
            Refused,
        ),
        (
            "a length's look-alike",
            head("POST / HTTP/1.1", "Content_Length: 9\r\n"),
            Refused,
        ),
        (
            "a length with a tab inside",
            head("POST / HTTP/1.1", "Content-Length: 1\t0\r\n") + "x",
            Refused,
        ),
        (
            "leading zeros",
            head("POST / HTTP/1.1", "Content-Length: 0003\r\n") + "abc",
            Plain(&["\r\n\r\nabc"], &["transfer-encoding"]),
        ),
        (
            "length and chunks of several",
            chunks("Content-Length: 0\r\nContent-Length: 5\r\n", "0\r\n\r\n"),
            Plain(&["transfer-encoding: chunked\r\n"], &["content-length"]),
        ),
        // Chunks.
        (
            "an extension",
            chunks("", "3;a=b;c=\"d\"\r\nabc\r\n0;x\r\n\r\n"),
            Plain(&["3\r\nabc\r\n0\r\n\r\n"], &["a=b", ";x"]),
        ),
        (
            "leading zeros of a size",
            chunks("", "0003\r\nabc\r\n0\r\n\r\n"),
            Plain(&["3\r\nabc\r\n0\r\n\r\n"], &[]),
        ),
        // Trailers.
        (
            "a trailer that was not told of",
            chunks("", "0\r\nX-User-Id: evil\r\nContent-Length: 9\r\n\r\n"),
            Plain(&["\r\n\r\n0\r\n\r\n"], &["evil", "content-length"]),
        ),
        (
            "a trailer that decides",
            chunks("Trailer: X-User-Id\r\n", "0\r\nX-User-Id: evil\r\n\r\n"),
            Refused,
        ),
        (
            "a trailer that frames",
            chunks(
                "Trailer: Content-Length\r\n",
                "0\r\nContent-Length: 9\r\n\r\n",
            ),
            Refused,
        ),
        (
            "a trailer that says who",
            chunks("Trailer: X-Forwarded-For\r\n", "0\r\n\r\n"),
            Refused,
        ),
        (
            "a trailer's look-alike",
            chunks("Trailer: x_user_id\r\n", "0\r\n\r\n"),
            Refused,
        ),
        (
            "a trailer that is no name",
            chunks("Trailer: a b\r\n", "0\r\n\r\n"),
            Refused,
        ),
        // Fields.
        ("no name", get(": x\r\n"), Refused),
        ("a name with a space", get("X A: x\r\n"), Refused),
        ("a name with a NUL", get("X\0A: x\r\n"), Refused),
        ("a name with a bracket", get("X(A: x\r\n"), Refused),
        ("a bare CR in a value", get("X-A: a\rb\r\n"), Refused),
        ("a vertical tab in a value", get("X-A: a\x0bb\r\n"), Refused),
        ("DEL in a value", get("X-A: a\x7fb\r\n"), Refused),
        ("the key's look-alike", get("X_User_Id: evil\r\n"), Refused),
        (
            "the key's look-alike by a dot",
            get("X.User.Id: evil\r\n"),
            Refused,
        ),
        (
            "the key twice",
            get("X-User-Id: a\r\nX-User-Id: b\r\n"),
            Unserved,
        ),
        (
            "an expectation that nobody knows",
            get("Expect: magic\r\n"),
            Refused,
        ),
        // What belongs to one connection.
        (
            "the key named",
            get("X-User-Id: me\r\nConnection: X-User-Id\r\n"),
            Refused,
        ),
        (
            "the key named among others",
            get("X-User-Id: me\r\nConnection: close, ,x-a,\tX-USER-ID\r\n"),
            Refused,
        ),
        (
            "the key named on a second line",
            get("X-User-Id: me\r\nConnection: keep-alive\r\nConnection: x-user-id\r\n"),
            Refused,
        ),
        (
            "Cookie named",
            get("Cookie: a=1\r\nConnection: cookie\r\n"),
            Refused,
        ),
        (
            "Authorization named",
            get("Authorization: Bearer x\r\nConnection: authorization\r\n"),
            Refused,
        ),
        (
            "others named",
            get("X-A: 1\r\nConnection: x-a\r\nKeep-Alive: timeout=5\r\nTE: gzip\r\n"),
            Plain(&["get / http/1.1"], &["x-a", "keep-alive", "te:"]),
        ),
        (
            "Proxy-Connection",
            get("Proxy-Connection: keep-alive\r\nProxy-Authorization: Basic x\r\n"),
            Plain(&["get / http/1.1"], &["proxy-"]),
        ),
        (
            "an upgrade to HTTP/2",
            get(
                "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
            ),
            Plain(&["get / http/1.1"], &["h2c", "settings", "upgrade"]),
        ),
        (
            "TE with more than trailers",
            get("TE: trailers, deflate;q=0.5\r\nConnection: TE\r\n"),
            Plain(&["te: trailers\r\n"], &["deflate"]),
        ),
        // Who.
        (
            "claims of a stranger",
            get(
                "X-Forwarded-For: 6.6.6.6\r\nForwarded: for=6.6.6.6\r\nX-Real-IP: 6.6.6.6\r\nX-Forwarded-Proto: gopher\r\n",
            ),
            Plain(&["x-forwarded-for: 127.0.0.1\r\n"], &["6.6.6.6", "gopher"]),
        ),
        (
            "a claim's look-alike",
            get("X_Forwarded_For: 6.6.6.6\r\n"),
            Refused,
        ),
    ]
}

#[tokio::test]
async fn http1_reaches_the_upstream_in_one_reading_or_not_at_all() {
    const NEXT: &str = "GET /smuggled HTTP/1.1\r\nHost: shop.example\r\nConnection: close\r\n\r\n";
    let upstream = RawUpstream::answering(OK).await;
    let proxy = Proxy::start(KEYED, upstream.address).await;
    let mut wrong = Vec::new();
    for (what, bytes, fate) in over_http1() {
        let before = upstream.received().len();
        let mut client = RawClient::connect(proxy.address).await;
        client.send(bytes.as_bytes()).await;
        let status = client.reply_or_close().await.map(|reply| reply.status);
        let reached = String::from_utf8_lossy(&upstream.received()[before..]).to_ascii_lowercase();
        match fate {
            Unserved => {
                if status != Some(400) || !reached.is_empty() {
                    wrong.push(format!("{what}: {status:?}, and upstream {reached:?}"));
                }
            }
            Refused => {
                client.send(NEXT).await;
                client.rest().await;
                let reached = String::from_utf8_lossy(&upstream.received()[before..]).into_owned();
                if status.is_some_and(|status| status < 400) || !reached.is_empty() {
                    wrong.push(format!("{what}: {status:?}, and upstream {reached:?}"));
                }
            }
            Plain(wanted, unwanted) => {
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

type Fields = Vec<(&'static [u8], &'static [u8])>;

fn over_http2() -> Vec<(&'static str, Fields, Fate)> {
    let usual: [(&[u8], &[u8]); 4] = [
        (b":method", b"GET"),
        (b":scheme", b"http"),
        (b":path", b"/x"),
        (b":authority", b"shop.example"),
    ];
    let with = |name: &'static [u8], value: &'static [u8]| {
        let mut fields: Fields = usual.to_vec();
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
            .collect::<Fields>()
    };
    let without = |name: &[u8]| {
        usual
            .iter()
            .copied()
            .filter(|(known, _)| *known != name)
            .collect::<Fields>()
    };
    vec![
        ("CRLF in a value", with(b"x-a", b"a\r\nx-b: c"), Refused),
        ("LF in a value", with(b"x-a", b"a\nx-b: c"), Refused),
        ("CR in a value", with(b"x-a", b"a\rb"), Refused),
        ("NUL in a value", with(b"x-a", b"a\0b"), Refused),
        ("a name in capitals", with(b"X-A", b"a"), Refused),
        ("a name with a colon", with(b"x-a: b", b"c"), Refused),
        ("a name with CRLF", with(b"x-a\r\nx-b", b"c"), Refused),
        ("a name with a space", with(b"x a", b"c"), Refused),
        ("an empty name", with(b"", b"c"), Refused),
        ("Connection", with(b"connection", b"x-user-id"), Refused),
        ("Keep-Alive", with(b"keep-alive", b"timeout=5"), Refused),
        (
            "Proxy-Connection",
            with(b"proxy-connection", b"close"),
            Refused,
        ),
        ("Upgrade", with(b"upgrade", b"h2c"), Refused),
        (
            "Transfer-Encoding",
            with(b"transfer-encoding", b"chunked"),
            Refused,
        ),
        ("TE other than trailers", with(b"te", b"gzip"), Refused),
        (
            "TE",
            with(b"te", b"trailers"),
            Plain(&["te: trailers\r\n"], &[]),
        ),
        ("a space in the path", with(b":path", b"/a b"), Refused),
        (
            "CRLF in the path",
            with(b":path", b"/ HTTP/1.1\r\nhost: evil\r\n\r\n"),
            Refused,
        ),
        ("a path without a slash", with(b":path", b"x"), Refused),
        ("an empty path", with(b":path", b""), Refused),
        ("no path", without(b":path"), Refused),
        ("two paths", and(b":path", b"/y"), Refused),
        (
            "a whole URL as path",
            with(b":path", b"http://evil.example/"),
            Refused,
        ),
        ("a star", with(b":path", b"*"), Refused),
        (
            "a method with CRLF",
            with(b":method", b"GET / HTTP/1.1\r\nx: "),
            Refused,
        ),
        (
            "a method in small letters",
            with(b":method", b"get"),
            Refused,
        ),
        (
            "a method with a space",
            with(b":method", b"GET /y"),
            Refused,
        ),
        ("no method", without(b":method"), Refused),
        ("CONNECT", with(b":method", b"CONNECT"), Refused),
        ("another scheme", with(b":scheme", b"file"), Refused),
        ("another Host", with(b"host", b"evil.example"), Refused),
        (
            "two Hosts",
            [
                and(b"host", b"shop.example"),
                vec![(b"host", b"shop.example")],
            ]
            .concat(),
            Refused,
        ),
        (
            "the same Host",
            with(b"host", b"SHOP.example"),
            Plain(&["host: shop.example\r\n"], &[]),
        ),
        (
            "neither authority nor Host",
            without(b":authority"),
            Refused,
        ),
        (
            "a user in the authority",
            with(b":authority", b"u@shop.example"),
            Refused,
        ),
        (
            "CRLF in the authority",
            with(b":authority", b"shop.example\r\nx: y"),
            Refused,
        ),
        (
            "a slash in the authority",
            with(b":authority", b"shop.example/y"),
            Refused,
        ),
        (
            "a pseudo field that is none",
            with(b":version", b"HTTP/1.1"),
            Refused,
        ),
        (
            "a pseudo field of a response",
            with(b":status", b"200"),
            Refused,
        ),
        (
            "a pseudo field behind others",
            [with(b"x-a", b"b"), vec![(b":authority", b"evil.example")]].concat(),
            Refused,
        ),
        (
            "a length that is not kept",
            with(b"content-length", b"5"),
            Refused,
        ),
        (
            "two lengths",
            [
                with(b"content-length", b"0"),
                vec![(b"content-length", b"1")],
            ]
            .concat(),
            Refused,
        ),
        ("a signed length", with(b"content-length", b"+0"), Refused),
        ("the key's look-alike", with(b"x_user_id", b"evil"), Refused),
        (
            "the key twice",
            [with(b"x-user-id", b"a"), vec![(b"x-user-id", b"b")]].concat(),
            Unserved,
        ),
        (
            "split cookies",
            [with(b"cookie", b"a=1"), vec![(b"cookie", b"b=2")]].concat(),
            Plain(&["cookie: a=1; b=2\r\n"], &[]),
        ),
        (
            "a stranger's claim",
            with(b"x-forwarded-for", b"6.6.6.6"),
            Plain(&["x-forwarded-for: 127.0.0.1\r\n"], &["6.6.6.6"]),
        ),
        (
            "a plain one",
            usual.to_vec(),
            Plain(
                &["get /x http/1.1\r\nhost: shop.example\r\n"],
                &["transfer-encoding"],
            ),
        ),
    ]
}

/// A connection's beginning and one request without a body, not compressed (RFC 9113; RFC 7541, 6.2.2).
fn frames(fields: &Fields) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.extend([0, name.len() as u8]);
        block.extend(*name);
        block.push(value.len() as u8);
        block.extend(*value);
    }
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    // HEADERS of stream 1, END_STREAM and END_HEADERS.
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
async fn http2_reaches_the_upstream_in_one_reading_or_not_at_all() {
    let upstream = RawUpstream::answering(OK).await;
    let proxy = Proxy::start(KEYED, upstream.address).await;
    let mut wrong = Vec::new();
    for (what, fields, fate) in over_http2() {
        let before = upstream.received().len();
        let mut client = RawClient::connect(proxy.address).await;
        client.send(frames(&fields)).await;
        let answered = client.answered_on_stream_1().await;
        let reached = String::from_utf8_lossy(&upstream.received()[before..]).to_ascii_lowercase();
        let is_right = match fate {
            Refused | Unserved => reached.is_empty(),
            Plain(wanted, unwanted) => {
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
