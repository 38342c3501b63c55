//! Builders: a test states only the settings it depends on.
//!
//! Ports are ephemeral, every process ends with its builder, and every wait has a deadline and
//! names its condition.

pub mod admin_proxy;
pub mod client;
pub mod clock_offset;
pub mod cluster;
pub mod fake_redis;
pub mod gated_upstream;
pub mod generated_log;
pub mod h2_frames;
pub mod h2_upstream;
pub mod jwt_issuer;
pub mod login_app;
pub mod nginx;
pub mod previous_version;
pub mod process;
pub mod proxy;
pub mod redis;
pub mod rls_client;
pub mod secret_volume;
pub mod sentinel;
pub mod store_harness;
pub mod tls;
pub mod upgrade;
pub mod upstream;

use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// Deadline for events that should happen at once, long enough for a busy machine.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Waits until `found` returns a value. It is called every few milliseconds.
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
    tidegate::clock::unix_time_s()
}

/// `len` pseudo-random bytes, the same in every run.
pub fn pseudo_random_bytes(len: usize) -> Vec<u8> {
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
    hex_encode(&<sha2::Sha256 as sha2::Digest>::digest(bytes))
}

pub fn hex_encode(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes everything");
        text
    })
}

/// Tests the builders against each other, without the proxy.
mod builder_tests {
    use super::client::{ClientRequest, RawClient, open_http1_connection};
    use super::nginx::Nginx;
    use super::upstream::{RawUpstream, Upstream, channel_body};
    use super::{pseudo_random_bytes, sha256};
    use hyper::{Request, Response};

    #[tokio::test]
    async fn echo_returns_the_request_as_json() {
        let upstream = Upstream::echo().await;
        let reply = ClientRequest::new(upstream.address, "POST", "//a/%2e?x")
            .header("X-A", "1")
            .body("body")
            .send()
            .await;
        assert_eq!((reply.status, reply.complete), (200, true));
        assert_eq!(reply.json()["target"], "//a/%2e?x");
        assert_eq!(reply.json()["body_sha256"], sha256(b"body"));
        assert_eq!(upstream.last_request().single_header("x-a"), "1");
    }

    #[tokio::test]
    async fn a_truncated_body_is_reported_as_incomplete() {
        let upstream = Upstream::with_handler(|_| async {
            let (feeder, body) = channel_body();
            tokio::spawn(async move {
                feeder.send("some").await;
                feeder.send_error().await;
            });
            Response::new(body)
        })
        .await;
        let reply = ClientRequest::new(upstream.address, "GET", "/")
            .send()
            .await;
        assert_eq!((reply.text().as_str(), reply.complete), ("some", false));
    }

    #[tokio::test]
    async fn raw_upstream_records_every_byte_and_answers_each_request() {
        let upstream =
            RawUpstream::with_response("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
        let mut client = RawClient::connect(upstream.address).await;
        let sent = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n";
        client.send(sent).await;
        assert_eq!(client.read_response().await.text(), "ok");
        assert_eq!(client.read_response().await.text(), "ok");
        assert_eq!(upstream.received_bytes(), sent.as_bytes());
        assert_eq!(upstream.connection_count(), 1);
    }

    #[tokio::test]
    async fn nginx_serves_and_accepts_files() {
        let nginx = Nginx::start().await;
        let content = pseudo_random_bytes(100_000);
        nginx.write_file("download", &content);
        let reply = ClientRequest::new(nginx.address, "GET", "/download")
            .send()
            .await;
        assert_eq!(reply.body, content);
        assert_eq!(
            ClientRequest::new(nginx.address, "PUT", "/upload")
                .body(content.clone())
                .send_for_status()
                .await,
            201
        );
        assert_eq!(nginx.uploaded_file("upload"), content);
    }

    #[tokio::test]
    async fn hyper_client_receives_a_response() {
        let upstream = Upstream::echo().await;
        let mut client = open_http1_connection(upstream.address).await;
        let request = Request::get("/x")
            .body(super::client::ClientBody::default())
            .unwrap();
        assert_eq!(
            super::client::await_response(client.send_request(request))
                .await
                .status(),
            200
        );
    }
}
