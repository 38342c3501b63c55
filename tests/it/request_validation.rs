//! Requests that proxy and upstream could parse differently: checks the bytes that reach the
//! upstream.

use crate::support::prelude::*;
use std::fmt::Write as _;

const OK_RESPONSE: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
/// Sent after every ambiguous request. If it reaches the upstream, it was smuggled.
const SMUGGLED_REQUEST: &str = "GET /smuggled HTTP/1.1\r\nHost: shop.example\r\n\r\n";

struct ValidationFixture {
    proxy: Proxy,
    upstream: RawUpstream,
}

/// The result of one connection.
struct ConnectionOutcome {
    reply: Option<RawResponse>,
    upstream_bytes: String,
}

impl ValidationFixture {
    async fn start(config: &str) -> Self {
        let upstream = RawUpstream::with_response(OK_RESPONSE).await;
        let proxy = Proxy::start(config, upstream.address).await;
        Self { proxy, upstream }
    }

    /// Sends these bytes, then reads the first response or the close.
    async fn send(&self, bytes: &[u8]) -> (RawClient, ConnectionOutcome) {
        let before = self.upstream.received_bytes().len();
        let mut client = self.proxy.send_raw(bytes).await;
        let reply = client.read_response_or_close().await;
        let reached = self.upstream.received_bytes()[before..].to_vec();
        let reached_upstream = String::from_utf8_lossy(&reached).into_owned();
        (
            client,
            ConnectionOutcome {
                reply,
                upstream_bytes: reached_upstream,
            },
        )
    }

    /// The request gets a 4xx or 501 or a close. No byte reaches the upstream, and the connection
    /// ends.
    async fn assert_rejected(&self, what: &str, bytes: impl AsRef<[u8]>) -> Option<u16> {
        let (mut client, outcome) = self
            .send(&[bytes.as_ref(), SMUGGLED_REQUEST.as_bytes()].concat())
            .await;
        let status = outcome.reply.map(|reply| reply.status);
        let refused = status.is_none_or(|status| (400..500).contains(&status) || status == 501);
        assert!(
            refused,
            "{what}: {status:?}, and the upstream got {:?}",
            outcome.upstream_bytes
        );
        client.read_to_close().await;
        assert_eq!(outcome.upstream_bytes, "", "{what}");
        assert!(
            !self.upstream_received("/smuggled"),
            "{what}: the request after it was served"
        );
        status
    }

    /// The request is rejected or reaches the upstream in an unambiguous form, and the connection
    /// ends.
    async fn assert_rejected_or_normalized(&self, what: &str, bytes: impl AsRef<[u8]>) {
        self.assert_normalized(what, [bytes.as_ref(), SMUGGLED_REQUEST.as_bytes()].concat())
            .await;
        assert!(
            !self.upstream_received("/smuggled"),
            "{what}: the request after it was served"
        );
    }

    /// The request is rejected or reaches the upstream in an unambiguous form.
    async fn assert_normalized(&self, what: &str, bytes: impl AsRef<[u8]>) {
        let (mut client, outcome) = self.send(bytes.as_ref()).await;
        client.read_to_close().await;
        let reached = outcome.upstream_bytes.to_ascii_lowercase();
        if reached.is_empty() {
            let status = outcome.reply.map(|reply| reply.status);
            assert!(
                status.is_none_or(|status| status >= 400),
                "{what}: got {status:?}, but no request reached the upstream"
            );
            return;
        }
        let framings = reached.matches("content-length:").count()
            + reached.matches("transfer-encoding:").count();
        assert!(framings <= 1, "{what} reached the upstream as {reached:?}");
        assert!(
            !reached.replace("\r\n", "").contains(['\r', '\n', '\0']),
            "{what}: {reached:?}"
        );
    }

    fn upstream_received(&self, text: &str) -> bool {
        String::from_utf8_lossy(&self.upstream.received_bytes()).contains(text)
    }
}

fn post_request(headers: &str, body: &str) -> String {
    format!("POST / HTTP/1.1\r\nHost: shop.example\r\n{headers}\r\n{body}")
}

#[tokio::test]
async fn content_length_and_chunked_are_never_forwarded_together() {
    let fixture = ValidationFixture::start("").await;
    let chunked = "0\r\n\r\n";
    let both = [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 0\r\n",
        "Content-Length: 5\r\nTransfer-Encoding:\tchunked\r\n",
        "Content-Length: 5\r\ntransfer-encoding: CHUNKED\r\n",
    ];
    for headers in both {
        fixture
            .assert_rejected_or_normalized(headers, post_request(headers, chunked))
            .await;
    }
}

#[tokio::test]
async fn only_chunked_is_accepted_as_transfer_encoding() {
    let fixture = ValidationFixture::start("").await;
    let codings = [
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked, chunked\r\n",
        "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: identity\r\n",
        "Transfer-Encoding: \"chunked\"\r\n",
        "Transfer-Encoding: chunked;q=1\r\n",
        "Transfer-Encoding: ,chunked\r\n",
        "Transfer-Encoding:\r\n",
        "Transfer-Encoding : chunked\r\n",
        "Transfer-Encoding: chunked\x0b\r\n",
    ];
    for headers in codings {
        fixture
            .assert_rejected(headers, post_request(headers, "0\r\n\r\n"))
            .await;
    }
    let old = "POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n";
    fixture.assert_rejected("chunks in HTTP/1.0", old).await;
}

#[tokio::test]
async fn content_length_is_a_single_number() {
    let fixture = ValidationFixture::start("").await;
    let lengths = [
        "1, 1",
        "+1",
        "-1",
        "0x1",
        "1 1",
        "",
        "1\r\nContent-Length: 2",
        "18446744073709551616",
        "1e0",
    ];
    for length in lengths {
        fixture
            .assert_rejected(
                length,
                post_request(&format!("Content-Length: {length}\r\n"), "x"),
            )
            .await;
    }
}

#[tokio::test]
async fn ambiguous_line_endings_are_rejected_or_normalized() {
    let fixture = ValidationFixture::start("").await;
    fixture
        .assert_rejected("NUL in a value", post_request("X-A: a\0b\r\n", ""))
        .await;
    fixture
        .assert_rejected("bare CR in a value", post_request("X-A: a\rX-B: b\r\n", ""))
        .await;
    fixture
        .assert_rejected("CR in a name", post_request("X\r-A: a\r\n", ""))
        .await;
    fixture
        .assert_rejected("folded line", post_request("X-A: a\r\n b\r\n", ""))
        .await;
    fixture
        .assert_rejected(
            "folded with a tab",
            post_request("X-A: a\r\n\tContent-Length: 3\r\n", ""),
        )
        .await;
    fixture
        .assert_rejected(
            "space before the colon",
            post_request("Content-Length : 5\r\n", "hello"),
        )
        .await;
    fixture
        .assert_rejected("first line folded", "POST / HTTP/1.1\r\n Host: a\r\n\r\n")
        .await;
    fixture
        .assert_rejected("no name", post_request(": a\r\n", ""))
        .await;
    fixture
        .assert_rejected("no colon", post_request("X-A\r\n", ""))
        .await;
    let close = "Connection: close\r\n";
    fixture
        .assert_normalized(
            "bare LF",
            "GET / HTTP/1.1\nHost: shop.example\nConnection: close\n\n",
        )
        .await;
    fixture
        .assert_normalized(
            "one bare LF",
            post_request(&format!("X-A: a\nContent-Length: 0\r\n{close}"), ""),
        )
        .await;
}

#[tokio::test]
async fn malformed_chunks_never_reach_the_upstream_as_a_complete_body() {
    let fixture = ValidationFixture::start("").await;
    for body in [
        "5\nhello\r\n0\r\n\r\n",
        "0x5\r\nhello\r\n0\r\n\r\n",
        "5\r\nhello!\r\n0\r\n\r\n",
        "fffffffffffffffff\r\n",
    ] {
        let bytes = post_request("Transfer-Encoding: chunked\r\n", body);
        let (mut client, outcome) = fixture
            .send(&[bytes.as_bytes(), SMUGGLED_REQUEST.as_bytes()].concat())
            .await;
        assert_eq!(
            outcome.reply.map(|reply| reply.status),
            Some(400),
            "{body:?}"
        );
        client.read_to_close().await;
        assert!(!outcome.upstream_bytes.ends_with("0\r\n\r\n"), "{body:?}");
        assert!(!fixture.upstream_received("/smuggled"), "{body:?}");
    }
}

#[tokio::test]
async fn there_is_exactly_one_host_and_it_matches_the_target() {
    let fixture = ValidationFixture::start("").await;
    let heads = [
        ("no Host", "GET / HTTP/1.1\r\n"),
        ("two Hosts", "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n"),
        (
            "two equal Hosts",
            "GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n",
        ),
        ("a list", "GET / HTTP/1.1\r\nHost: a, b\r\n"),
        ("a path in it", "GET / HTTP/1.1\r\nHost: a/b\r\n"),
        ("a user in it", "GET / HTTP/1.1\r\nHost: u@a\r\n"),
        ("a space in it", "GET / HTTP/1.1\r\nHost: a b\r\n"),
        ("a bad port", "GET / HTTP/1.1\r\nHost: a:b\r\n"),
        (
            "another than the target's",
            "GET http://a/ HTTP/1.1\r\nHost: b\r\n",
        ),
        (
            "another port than the target's",
            "GET http://a:1/ HTTP/1.1\r\nHost: a:2\r\n",
        ),
    ];
    for (what, head) in heads {
        let answer = fixture.assert_rejected(what, format!("{head}\r\n")).await;
        assert_eq!(answer, Some(400), "{what}");
    }
    let (_, outcome) = fixture
        .send(b"GET http://shop.example/x HTTP/1.1\r\nHost: shop.example\r\n\r\n")
        .await;
    assert_eq!(outcome.reply.unwrap().status, 200);
    assert_starts(&outcome.upstream_bytes, "GET /x HTTP/1.1\r\n");
}

#[tokio::test]
async fn invalid_targets_and_methods_are_rejected() {
    let fixture = ValidationFixture::start("").await;
    let lines = [
        "GET foo HTTP/1.1",
        "GET  / HTTP/1.1",
        "GET / HTTP/1.2",
        "GET / HTTP/2.0",
        "GET /",
        "G@T / HTTP/1.1",
        "get / HTTP/1.1",
        "PoST / HTTP/1.1",
        "GET /<x> HTTP/1.1",
        "GET /a b HTTP/1.1",
        "CONNECT shop.example:443 HTTP/1.1",
    ];
    for line in lines {
        fixture
            .assert_rejected(line, format!("{line}\r\nHost: shop.example\r\n\r\n"))
            .await;
    }
}

const HEADER_KEY_POLICY: &str = r#"
[[policy]]
name = "p"
key = ["header:x-user-id", "client_ip"]
limit = { requests = 1000, per = "1h" }
"#;

#[tokio::test]
async fn look_alike_key_headers_are_not_forwarded() {
    let fixture = ValidationFixture::start(HEADER_KEY_POLICY).await;
    for name in [
        "X_User_Id",
        "x_user-id",
        "X-User_Id",
        "X_Forwarded_For",
        "X-Forwarded_For",
    ] {
        let request =
            format!("GET / HTTP/1.1\r\nHost: a\r\nX-User-Id: me\r\n{name}: 6.6.6.6\r\n\r\n");
        let (_, outcome) = fixture.send(request.as_bytes()).await;
        let reached = outcome.upstream_bytes.to_ascii_lowercase();
        assert!(
            !reached.contains(&name.to_ascii_lowercase()),
            "{name} reached the upstream: {reached}"
        );
        let status = outcome.reply.unwrap().status;
        assert!(
            status == 400 || status == 200 && reached.contains("x-user-id: me"),
            "{name}: {status}"
        );
    }
    let harmless = "GET / HTTP/1.1\r\nHost: a\r\nMy_Header: 1\r\n\r\n";
    let (_, outcome) = fixture.send(harmless.as_bytes()).await;
    assert!(
        outcome
            .upstream_bytes
            .to_ascii_lowercase()
            .contains("my_header: 1"),
        "a header that resembles no key header must be forwarded"
    );
}

#[tokio::test]
async fn the_connection_header_cannot_remove_required_fields() {
    let fixture = ValidationFixture::start(HEADER_KEY_POLICY).await;
    for name in [
        "X-User-Id",
        "Host",
        "X-Forwarded-For",
        "Content-Length",
        "Via",
    ] {
        let request = format!(
            "POST / HTTP/1.1\r\nHost: shop.example\r\nConnection: {name}\r\nX-User-Id: me\r\nContent-Length: 2\r\n\r\nhi"
        );
        let (_, outcome) = fixture.send(request.as_bytes()).await;
        if outcome.reply.unwrap().status == 400 {
            continue;
        }
        let reached = outcome.upstream_bytes.to_ascii_lowercase();
        for kept in [
            "host: shop.example",
            "x-user-id: me",
            "x-forwarded-for: 127.0.0.1",
            "via: ",
            "\r\n\r\nhi",
        ] {
            assert!(
                reached.contains(kept),
                "Connection: {name} took {kept} away: {reached}"
            );
        }
    }
}

#[tokio::test]
async fn oversized_heads_are_rejected() {
    let fixture =
        ValidationFixture::start("[listen.http]\nmax_header_bytes = '16KiB'\nmax_headers = 20")
            .await;
    let large = format!(
        "GET / HTTP/1.1\r\nHost: a\r\nX-A: {}\r\n\r\n",
        "x".repeat(20 << 10)
    );
    let many = (0..30).fold("GET / HTTP/1.1\r\nHost: a\r\n".to_owned(), |mut head, n| {
        write!(head, "X-{n}: 1\r\n").unwrap();
        head
    });
    let long = format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(20 << 10));
    for (what, head) in [("large", large), ("many", many + "\r\n"), ("long", long)] {
        let (mut client, outcome) = fixture.send(head.as_bytes()).await;
        let status = outcome.reply.map(|reply| reply.status);
        assert!(
            matches!(status, Some(400 | 414 | 431)),
            "{what}: {status:?}"
        );
        client.read_to_close().await;
        assert_eq!(outcome.upstream_bytes, "", "{what}");
    }
    let fits = format!(
        "GET / HTTP/1.1\r\nHost: a\r\nX-A: {}\r\n\r\n",
        "x".repeat(12 << 10)
    );
    let answered = fixture.send(fits.as_bytes()).await.1.reply.unwrap().status;
    assert_eq!(answered, 200);
}

#[tokio::test]
async fn an_incomplete_head_times_out() {
    let fixture =
        ValidationFixture::start("[listen.http]\nheader_timeout = '300ms'\nidle_timeout = '300ms'")
            .await;
    for head in [
        "GET / HTTP/1.1\r\nHost: a\r\nX-",
        "G",
        "",
        "PRI * HT",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let mut client = fixture.proxy.send_raw(head).await;
        let rest = client.read_to_close().await;
        let text = String::from_utf8_lossy(&rest);
        let h1_answer = text.starts_with("HTTP/1.1 ");
        assert!(
            !h1_answer || text.starts_with("HTTP/1.1 408") || text.starts_with("HTTP/1.1 400"),
            "{head:?}: {text}"
        );
    }
    assert_eq!(fixture.upstream.connection_count(), 0);
}

#[tokio::test]
async fn a_head_sent_byte_by_byte_times_out() {
    let fixture = ValidationFixture::start("[listen.http]\nheader_timeout = '300ms'").await;
    let mut client = fixture
        .proxy
        .send_raw("GET / HTTP/1.1\r\nHost: a\r\nX-Drip: ")
        .await;
    let start = Instant::now();
    while !client.closes_within(Duration::from_millis(50)).await {
        assert!(
            start.elapsed() < TEST_TIMEOUT,
            "the proxy still reads a head that arrives byte by byte"
        );
        if client.has_buffered_bytes() {
            break;
        }
        client.send("x").await;
    }
}
