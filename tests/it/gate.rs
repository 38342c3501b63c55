//! Requests that front and back could read differently: what, if anything, reaches the upstream's socket.

use crate::support::SOON;
use crate::support::client::{RawClient, Reply};
use crate::support::proxy::Proxy;
use crate::support::upstream::RawUpstream;
use std::fmt::Write as _;
use std::time::Duration;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
/// Sent behind every doubtful request; reaching the upstream, it would have been smuggled.
const NEXT: &str = "GET /smuggled HTTP/1.1\r\nHost: shop.example\r\n\r\n";

struct Gate {
    proxy: Proxy,
    upstream: RawUpstream,
}

/// What came of one connection.
struct Outcome {
    reply: Option<Reply>,
    reached_upstream: String,
}

impl Gate {
    async fn with(config: &str) -> Self {
        let upstream = RawUpstream::answering(OK).await;
        let proxy = Proxy::start(config, upstream.address).await;
        Self { proxy, upstream }
    }

    /// Sends these bytes, and reads the first answer and then whether the connection closes.
    async fn send(&self, bytes: &[u8]) -> (RawClient, Outcome) {
        let before = self.upstream.received().len();
        let mut client = RawClient::connect(self.proxy.address).await;
        client.send(bytes).await;
        let reply = client.reply_or_close().await;
        let reached = self.upstream.received()[before..].to_vec();
        let reached_upstream = String::from_utf8_lossy(&reached).into_owned();
        (
            client,
            Outcome {
                reply,
                reached_upstream,
            },
        )
    }

    /// It is refused with a 4xx or 501, or just closed; nothing reaches the upstream, and the connection ends.
    async fn refuses(&self, what: &str, bytes: impl AsRef<[u8]>) -> Option<u16> {
        let (mut client, outcome) = self.send(&[bytes.as_ref(), NEXT.as_bytes()].concat()).await;
        let status = outcome.reply.map(|reply| reply.status);
        let refused = status.is_none_or(|status| (400..500).contains(&status) || status == 501);
        assert!(
            refused,
            "{what}: {status:?}, and the upstream got {:?}",
            outcome.reached_upstream
        );
        client.rest().await;
        assert_eq!(outcome.reached_upstream, "", "{what}");
        assert!(
            !self.upstream_has("/smuggled"),
            "{what}: what came behind it was served"
        );
        status
    }

    /// It is refused, or reaches the upstream so that it can be read in one way only, and the connection ends.
    async fn refuses_or_makes_plain(&self, what: &str, bytes: impl AsRef<[u8]>) {
        self.makes_plain(what, [bytes.as_ref(), NEXT.as_bytes()].concat())
            .await;
        assert!(
            !self.upstream_has("/smuggled"),
            "{what}: what came behind it was served"
        );
    }

    /// It is refused, or reaches the upstream so that it can be read in one way only.
    async fn makes_plain(&self, what: &str, bytes: impl AsRef<[u8]>) {
        let (mut client, outcome) = self.send(bytes.as_ref()).await;
        client.rest().await;
        let reached = outcome.reached_upstream.to_ascii_lowercase();
        if reached.is_empty() {
            let status = outcome.reply.map(|reply| reply.status);
            assert!(
                status.is_none_or(|status| status >= 400),
                "{what}: {status:?} by whom?"
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

    fn upstream_has(&self, text: &str) -> bool {
        String::from_utf8_lossy(&self.upstream.received()).contains(text)
    }
}

fn post(headers: &str, body: &str) -> String {
    format!("POST / HTTP/1.1\r\nHost: shop.example\r\n{headers}\r\n{body}")
}

#[tokio::test]
async fn length_and_chunks_together_are_never_passed_on_together() {
    let gate = Gate::with("").await;
    let chunked = "0\r\n\r\n";
    let both = [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 0\r\n",
        "Content-Length: 5\r\nTransfer-Encoding:\tchunked\r\n",
        "Content-Length: 5\r\ntransfer-encoding: CHUNKED\r\n",
    ];
    for headers in both {
        gate.refuses_or_makes_plain(headers, post(headers, chunked))
            .await;
    }
}

#[tokio::test]
async fn only_plain_chunked_is_a_transfer_coding() {
    let gate = Gate::with("").await;
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
        gate.refuses(headers, post(headers, "0\r\n\r\n")).await;
    }
    let old = "POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n";
    gate.refuses("chunks in HTTP/1.0", old).await;
}

#[tokio::test]
async fn a_length_is_one_number() {
    let gate = Gate::with("").await;
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
        gate.refuses(length, post(&format!("Content-Length: {length}\r\n"), "x"))
            .await;
    }
}

#[tokio::test]
async fn bytes_that_end_lines_elsewhere_are_refused_or_made_plain() {
    let gate = Gate::with("").await;
    gate.refuses("NUL in a value", post("X-A: a\0b\r\n", ""))
        .await;
    gate.refuses("bare CR in a value", post("X-A: a\rX-B: b\r\n", ""))
        .await;
    gate.refuses("CR in a name", post("X\r-A: a\r\n", "")).await;
    gate.refuses("folded line", post("X-A: a\r\n b\r\n", ""))
        .await;
    gate.refuses(
        "folded with a tab",
        post("X-A: a\r\n\tContent-Length: 3\r\n", ""),
    )
    .await;
    gate.refuses(
        "space before the colon",
        post("Content-Length : 5\r\n", "hello"),
    )
    .await;
    gate.refuses("first line folded", "POST / HTTP/1.1\r\n Host: a\r\n\r\n")
        .await;
    gate.refuses("no name", post(": a\r\n", "")).await;
    gate.refuses("no colon", post("X-A\r\n", "")).await;
    let close = "Connection: close\r\n";
    gate.makes_plain(
        "bare LF",
        "GET / HTTP/1.1\nHost: shop.example\nConnection: close\n\n",
    )
    .await;
    gate.makes_plain(
        "one bare LF",
        post(&format!("X-A: a\nContent-Length: 0\r\n{close}"), ""),
    )
    .await;
}

#[tokio::test]
async fn chunks_are_well_formed_or_nothing_complete_arrives() {
    let gate = Gate::with("").await;
    for body in [
        "5\nhello\r\n0\r\n\r\n",
        "0x5\r\nhello\r\n0\r\n\r\n",
        "5\r\nhello!\r\n0\r\n\r\n",
        "fffffffffffffffff\r\n",
    ] {
        let bytes = post("Transfer-Encoding: chunked\r\n", body);
        let (mut client, outcome) = gate
            .send(&[bytes.as_bytes(), NEXT.as_bytes()].concat())
            .await;
        assert_eq!(
            outcome.reply.map(|reply| reply.status),
            Some(400),
            "{body:?}"
        );
        client.rest().await;
        assert!(!outcome.reached_upstream.ends_with("0\r\n\r\n"), "{body:?}");
        assert!(!gate.upstream_has("/smuggled"), "{body:?}");
    }
}

#[tokio::test]
async fn there_is_one_host_and_it_is_the_targets() {
    let gate = Gate::with("").await;
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
        assert_eq!(
            gate.refuses(what, format!("{head}\r\n")).await,
            Some(400),
            "{what}"
        );
    }
    let (_, outcome) = gate
        .send(b"GET http://shop.example/x HTTP/1.1\r\nHost: shop.example\r\n\r\n")
        .await;
    assert_eq!(outcome.reply.unwrap().status, 200);
    assert!(
        outcome.reached_upstream.starts_with("GET /x HTTP/1.1\r\n"),
        "{}",
        outcome.reached_upstream
    );
}

#[tokio::test]
async fn targets_and_methods_that_are_none_are_refused() {
    let gate = Gate::with("").await;
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
        gate.refuses(line, format!("{line}\r\nHost: shop.example\r\n\r\n"))
            .await;
    }
}

const KEYED: &str = r#"
[[policy]]
name = "p"
key = ["header:x-user-id", "client_ip"]
limit = { requests = 1000, per = "1h" }
"#;

#[tokio::test]
async fn look_alikes_of_headers_that_decide_do_not_get_through() {
    let gate = Gate::with(KEYED).await;
    for name in [
        "X_User_Id",
        "x_user-id",
        "X-User_Id",
        "X_Forwarded_For",
        "X-Forwarded_For",
    ] {
        let request =
            format!("GET / HTTP/1.1\r\nHost: a\r\nX-User-Id: me\r\n{name}: 6.6.6.6\r\n\r\n");
        let (_, outcome) = gate.send(request.as_bytes()).await;
        let reached = outcome.reached_upstream.to_ascii_lowercase();
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
    let (_, outcome) = gate.send(harmless.as_bytes()).await;
    assert!(
        outcome
            .reached_upstream
            .to_ascii_lowercase()
            .contains("my_header: 1"),
        "nobody's look-alike"
    );
}

#[tokio::test]
async fn connection_cannot_take_away_what_the_upstream_relies_on() {
    let gate = Gate::with(KEYED).await;
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
        let (_, outcome) = gate.send(request.as_bytes()).await;
        if outcome.reply.unwrap().status == 400 {
            continue;
        }
        let reached = outcome.reached_upstream.to_ascii_lowercase();
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
async fn oversized_heads_are_refused() {
    let gate = Gate::with("[listen.http]\nmax_header_bytes = '16KiB'\nmax_headers = 20").await;
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
        let (mut client, outcome) = gate.send(head.as_bytes()).await;
        let status = outcome.reply.map(|reply| reply.status);
        assert!(
            matches!(status, Some(400 | 414 | 431)),
            "{what}: {status:?}"
        );
        client.rest().await;
        assert_eq!(outcome.reached_upstream, "", "{what}");
    }
    let fits = format!(
        "GET / HTTP/1.1\r\nHost: a\r\nX-A: {}\r\n\r\n",
        "x".repeat(12 << 10)
    );
    assert_eq!(
        gate.send(fits.as_bytes()).await.1.reply.unwrap().status,
        200
    );
}

#[tokio::test]
async fn a_head_that_does_not_come_is_not_waited_for() {
    let gate = Gate::with("[listen.http]\nheader_timeout = '300ms'\nidle_timeout = '300ms'").await;
    for head in [
        "GET / HTTP/1.1\r\nHost: a\r\nX-",
        "G",
        "",
        "PRI * HT",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let mut client = RawClient::connect(gate.proxy.address).await;
        client.send(head).await;
        let rest = client.rest().await;
        let told = String::from_utf8_lossy(&rest);
        let h1_answer = told.starts_with("HTTP/1.1 ");
        assert!(
            !h1_answer || told.starts_with("HTTP/1.1 408") || told.starts_with("HTTP/1.1 400"),
            "{head:?}: {told}"
        );
    }
    assert_eq!(gate.upstream.connections(), 0);
}

#[tokio::test]
async fn a_head_that_drips_is_not_waited_for_either() {
    let gate = Gate::with("[listen.http]\nheader_timeout = '300ms'").await;
    let mut client = RawClient::connect(gate.proxy.address).await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\nX-Drip: ").await;
    let start = std::time::Instant::now();
    while !client.closes(Duration::from_millis(50)).await {
        assert!(start.elapsed() < SOON, "still listening to drops");
        if client.reply_is_there() {
            break;
        }
        client.send("x").await;
    }
}
