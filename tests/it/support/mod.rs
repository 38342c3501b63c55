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
pub mod grpc_server;
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

use prelude::*;
use std::fmt::{Display, Write as _};

/// What most tests use.
pub mod prelude {
    pub use super::client::{
        ClientBody, ClientRequest, RawClient, RawResponse, assert_echo, await_response,
        get_request, open_http2_connection,
    };
    pub use super::cluster::RedisCluster;
    pub use super::cluster::initial_node;
    pub(crate) use super::fake_redis::{TcpRelay, start_filtering_relay};
    pub use super::gated_upstream::GatedUpstream;
    pub use super::grpc_server::serve_grpc;
    pub use super::h2_upstream::{H2Exchange, H2Upstream};
    pub use super::jwt_issuer::TokenIssuer;
    pub use super::login_app::{check_password, log_in};
    pub use super::process::{
        ChildProcess, ConfigFile, ProcessOutput, run_check, run_command, tidegate_command,
    };
    pub use super::proxy::{LogLine, Proxy};
    pub(crate) use super::redis::{RedisServer, connect_redis, list_counter_keys};
    pub(crate) use super::redis::{free_port, redis_settings};
    pub use super::rls_client::{
        RLS_LISTENER, ServiceClient, admitted_then_over, make_descriptor, make_request,
        single_descriptor_request, user_call, user_descriptor,
    };
    pub use super::sentinel::SentinelDeployment;
    pub use super::store_harness::{
        DAY_US, EVERY_ALGORITHM, START_US, StoreUnderTest, admissible_at_us, draw_duration_us,
        draw_limit_for, first_charge, first_counter, join_policies, test_seed,
    };
    pub use super::tls::{CertificateAuthority, TlsClient, connect_tls, connect_tls_http1};
    pub use super::upstream::{BodySender, RawSocket};
    pub use super::upstream::{
        RawUpstream, Upstream, UpstreamResponse, channel_body, echo, full_body, set_header,
    };
    pub use super::{
        TEST_TIMEOUT, assert_contains, assert_ends, assert_faster_than, assert_fields,
        assert_lacks, assert_starts, eventually, in_time, make_limit, plain_bucket, sliding_log,
        unused_address, wait_until, wait_until_within, with_algorithm, write_temp_file,
    };
    pub use super::{pseudo_random_bytes, serve_connections, sha256, unix_s};
    pub use bytes::Bytes;
    pub use fastrand::Rng;
    pub use futures_util::future::join_all;
    pub use http_body_util::{BodyExt, Full};
    pub use hyper::body::Incoming;
    pub use hyper::{Request, Response};
    pub use serde_json::{Value, json};
    pub use smallvec::SmallVec;
    pub use std::borrow::Cow;
    pub use std::collections::{BTreeMap, BTreeSet, HashMap};
    pub use std::fs;
    pub use std::net::SocketAddr;
    pub use std::path::{Path, PathBuf};
    pub use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
    pub use std::sync::{Arc, Mutex};
    pub use std::time::{Duration, Instant};
    pub use tempfile::TempDir;
    pub use tidegate::limiter::{
        Algorithm, Amendment, Charge, CounterRef, Decision, Key, KeyBuilder, Limit, LimitCharge,
        LimitStatus, MAX_UNITS, PolicyCharges, Refusal, RequestPart, each_charge,
    };
    pub use tidegate::store::redis::{RedisSettings, RedisStore, RedisTopology, SharedRedisState};
    pub use tidegate::store::{Settlement, Store};
    pub use tokio::io::{AsyncReadExt, AsyncWriteExt};
    pub use tokio::net::{TcpListener, TcpStream};
    pub use tokio::sync::Semaphore;
    pub use tokio::task::{JoinHandle, JoinSet};
    pub use tokio::time::{sleep, timeout};
}

/// Deadline for events that should happen at once, long enough for a busy machine.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Waits until `found` returns a value. It is called every few milliseconds.
pub async fn eventually<T>(
    what: impl Display,
    within: Duration,
    mut found: impl AsyncFnMut() -> Option<T>,
) -> T {
    let deadline = Instant::now() + within;
    loop {
        if let Some(found) = found().await {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {within:?} for {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until `holds` returns true, for at most [`TEST_TIMEOUT`].
pub async fn wait_until(what: impl Display, holds: impl AsyncFnMut() -> bool) {
    wait_until_within(what, TEST_TIMEOUT, holds).await;
}

/// As [`wait_until`], with another deadline.
pub async fn wait_until_within(
    what: impl Display,
    within: Duration,
    mut holds: impl AsyncFnMut() -> bool,
) {
    eventually(what, within, async || holds().await.then_some(())).await;
}

/// Asserts that a text has all of these words.
#[track_caller]
pub fn assert_contains(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no {word:?} in {text}");
    }
}

/// Asserts that a text has none of these words.
#[track_caller]
pub fn assert_lacks(text: &str, words: &[&str]) {
    for word in words {
        assert!(!text.contains(word), "{word:?} is in {text}");
    }
}

/// Asserts that a JSON object has these fields, and each object in it likewise.
#[track_caller]
pub fn assert_fields(found: &Value, expected: Value) {
    let Value::Object(fields) = expected else {
        assert_eq!(*found, expected);
        return;
    };
    for (name, value) in fields {
        if value.is_object() {
            assert_fields(&found[&name], value);
        } else {
            assert_eq!(found[&name], value, "{name}: {found:#}");
        }
    }
}

#[track_caller]
pub fn assert_starts(text: &str, words: impl AsRef<str>) {
    let words = words.as_ref();
    assert!(text.starts_with(words), "{words:?} does not begin {text}");
}

#[track_caller]
pub fn assert_ends(text: &str, words: impl AsRef<str>) {
    let words = words.as_ref();
    assert!(text.ends_with(words), "{words:?} does not end {text}");
}

/// Asserts that less time than this has passed since an instant of std or tokio.
#[track_caller]
pub fn assert_faster_than(limit: Duration, since: impl Into<tokio::time::Instant>) {
    let passed = since.into().elapsed();
    assert!(passed < limit, "{passed:?}, not {limit:?}");
}

/// An address where nothing listens.
pub fn unused_address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], redis::free_port()))
}

/// A file in its own directory, which is removed on drop.
pub fn write_temp_file(name: &str, text: impl AsRef<[u8]>) -> (TempDir, PathBuf) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    (dir, path)
}

/// Waits for a future, for at most [`TEST_TIMEOUT`].
pub async fn in_time<T>(future: impl Future<Output = T>) -> T {
    let result = tokio::time::timeout(TEST_TIMEOUT, future).await;
    result.unwrap_or_else(|_| panic!("not within {TEST_TIMEOUT:?}"))
}

pub const fn make_limit(requests: u64, per_us: u64, algorithm: Algorithm) -> Limit {
    Limit {
        requests,
        per_us,
        algorithm,
    }
}

/// The amount and the period of a limit with another algorithm.
pub const fn with_algorithm(limit: Limit, algorithm: Algorithm) -> Limit {
    make_limit(limit.requests, limit.per_us, algorithm)
}

/// A limit that counts exactly.
pub const fn sliding_log(requests: u64, per_us: u64) -> Limit {
    make_limit(requests, per_us, Algorithm::SlidingLog)
}

/// A token bucket without a warm-up.
pub const fn plain_bucket(burst: u64) -> Algorithm {
    Algorithm::TokenBucket {
        burst,
        warm_up_us: 0,
    }
}

/// Listens on a free port, and runs `serve` with each connection until the test's runtime ends.
pub async fn serve_connections<F>(serve: impl Fn(TcpStream) -> F + Send + 'static) -> SocketAddr
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(serve(client));
        }
    });
    address
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
