//! Builders: a test says what matters to it, and they do the rest.
//!
//! Ports are free ones, whatever is started ends with its builder, and every wait has a deadline and
//! says what it waited for.

pub mod client;
pub mod cluster;
pub mod desk;
pub mod frames;
pub mod h2_upstream;
pub mod judge;
pub mod nginx;
pub mod old_log;
pub mod peer;
pub mod process;
pub mod proxy;
pub mod redis;
pub mod sentinel;
pub mod tls;
pub mod tokens;
pub mod upstream;

use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// How long a test waits for something that should come at once: long enough for a busy machine.
pub const SOON: Duration = Duration::from_secs(10);

/// Waits until `found` finds something, looking every few milliseconds.
pub async fn eventually<T>(
    what: &str,
    within: Duration,
    mut found: impl FnMut() -> Option<T>,
) -> T {
    let deadline = Instant::now() + within;
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {within:?} for {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Seconds since the Unix epoch.
pub fn unix_s() -> u64 {
    tidegate::clock::unix_s()
}

/// `len` bytes that look random and are the same every time.
pub fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// SHA-256 as hex.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&<sha2::Sha256 as sha2::Digest>::digest(bytes))
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes everything");
        text
    })
}

/// The builders against each other, without the proxy: what fails here is not its fault.
mod themselves {
    use super::client::{Ask, RawClient, http1};
    use super::nginx::Nginx;
    use super::upstream::{RawUpstream, Upstream, fed};
    use super::{noise, sha256};
    use hyper::{Request, Response};

    #[tokio::test]
    async fn echo_tells_what_it_got() {
        let upstream = Upstream::echo().await;
        let reply = Ask::new(upstream.address, "POST", "//a/%2e?x")
            .header("X-A", "1")
            .body("body")
            .send()
            .await;
        assert_eq!((reply.status, reply.complete), (200, true));
        assert_eq!(reply.json()["target"], "//a/%2e?x");
        assert_eq!(reply.json()["body_sha256"], sha256(b"body"));
        assert_eq!(upstream.last().one("x-a"), "1");
    }

    #[tokio::test]
    async fn a_broken_body_is_seen_to_be_incomplete() {
        let upstream = Upstream::serving(|_| async {
            let (feeder, body) = fed();
            tokio::spawn(async move {
                feeder.send("some").await;
                feeder.fail().await;
            });
            Response::new(body)
        })
        .await;
        let reply = Ask::new(upstream.address, "GET", "/").send().await;
        assert_eq!((reply.text().as_str(), reply.complete), ("some", false));
    }

    #[tokio::test]
    async fn raw_upstream_keeps_every_byte_and_answers_each_request() {
        let upstream =
            RawUpstream::answering("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
        let mut client = RawClient::connect(upstream.address).await;
        let sent = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n";
        client.send(sent).await;
        assert_eq!(client.reply().await.text(), "ok");
        assert_eq!(client.reply().await.text(), "ok");
        assert_eq!(upstream.received(), sent.as_bytes());
        assert_eq!(upstream.connections(), 1);
    }

    #[tokio::test]
    async fn nginx_serves_and_takes_files() {
        let nginx = Nginx::start().await;
        let content = noise(100_000);
        nginx.file("download", &content);
        let reply = Ask::new(nginx.address, "GET", "/download").send().await;
        assert_eq!(reply.body, content);
        assert_eq!(
            Ask::new(nginx.address, "PUT", "/upload")
                .body(content.clone())
                .status()
                .await,
            201
        );
        assert_eq!(nginx.uploaded("upload"), content);
    }

    #[tokio::test]
    async fn hyper_client_streams() {
        let upstream = Upstream::echo().await;
        let mut client = http1(upstream.address).await;
        let request = Request::get("/x")
            .body(super::client::ClientBody::default())
            .unwrap();
        assert_eq!(
            super::client::answered(client.send_request(request))
                .await
                .status(),
            200
        );
    }
}
